"""Broken copies of the kda-sm90 kernel are noticed: by an error, or because the result is wrong."""

import re
from pathlib import Path

import prefill
import pytest

import ptx_emulator
from kda_core.testing import error, make_inputs, token_oracle, tolerance

DOCS = Path(__file__).parents[2] / "docs/ptx-emulator.md"
ARRIVE = r"@first mbarrier\.arrive\.release\.cta[^;]*;"

DEADLOCK, RACE, WRONG = "deadlock", "a race", "a wrong result"
UNWRITTEN = "a value that comes from what nothing has written"

#: How each is noticed: a part of the error, or a result beyond the tolerance; what is replaced, by what, and which of the
#: places: all of them, or one. docs/ptx-emulator.md has the same table.
MUTANTS = {
    "no fence towards the async proxy": (
        "without a fence.proxy.async between", r"fence\.proxy\.async\.global;", "", None,
    ),
    "a record that is never published": (DEADLOCK, r"st\.release\.gpu\.global\.b32 [^;]*;", "", None),
    "records published without order": (RACE, r"st\.release\.gpu", "st.relaxed.gpu", None),
    "records taken up without order": (RACE, r"ld\.acquire\.gpu", "ld.relaxed.gpu", None),
    "no wait for the copies of q and k": (UNWRITTEN, r"cp\.async\.wait_group\s+0;", "", None),
    "a stage of the preparation without its barrier": (RACE, r"bar\.sync\s+%r\d+, 128;", "", 3),
    "lanes that read what others store, without their barrier": (RACE, r"bar\.warp\.sync\s+-1;", "", 11),
    "o taken before it is there": (UNWRITTEN, r"bar\.sync\s+1, 160;", "", 0),
    "an mbarrier of too few arrivals": (UNWRITTEN, r"mov\.b32\s+(%r\d+), 33;", r"mov.b32 \1, 32;", None),
    "the wrong phase of an mbarrier": (
        DEADLOCK, r"(mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\]), %r\d+", r"\1, 0", 0,
    ),
    "a stage that is never released": (DEADLOCK, ARRIVE, "", 2),
    "a copy that is too short": (DEADLOCK, r"(\[%r\d+\], \[%rd\d+\]), 16384,", r"\1, 16368,", 0),
    "a tail that is one row too long": (
        "global memory out of bounds",
        r"setp\.lt\.s32(\s+(%p\d+), %r\d+, %r\d+;(?:(?!setp)[^@])*@\2 st\.global\.cs)", r"setp.le.s32\1", None,
    ),
    "a wgmma without its fence": (
        "written after the last wgmma.fence", r"wgmma\.fence\.sync\.aligned;", "", 0,
    ),
    "a wgmma without its wait": (
        "a register of a wgmma is touched that nothing has waited for", r"wgmma\.wait_group\.sync\.aligned\s+1;", "", 0,
    ),
    "a swizzle of 64 bytes": (WRONG, r"wgmma\.mma_async[^;]*?\}, (%rd\d+), p", None, 0),
    "no step of the substitution": (
        WRONG, r"fma\.rn\.ftz\.f32 (%r\d+), (%r\d+), (%r\d+), (%r\d+);", r"mov.b32 \1, \4;", -20,
    ),
    "an MMA that adds nothing": (
        WRONG, r"(mma\.sync\.aligned\.m16n8k16[^{]*\{[^}]*\}, \{[^}]*\}, )\{(%r\d+), (%r\d+)\}", r"\1{\2, \2}", 20,
    ),
}  # fmt: skip


def mutated(ptx, pattern, replacement, place):
    if replacement is None:  # of the descriptor: its swizzle
        replacement = None
        match = re.search(pattern, ptx)
        assert match
        line = ptx.rindex("\n", 0, match.start())
        line = ptx.rindex("{", 0, line)  # the scope of the inline PTX
        flip = f"\n xor.b64 {match[1]}, {match[1]}, -4611686018427387904;\n"
        return ptx[:line] + flip + ptx[line:]
    if place is None:
        found, count = re.subn(pattern, replacement, ptx)
        assert count, "nothing to break"
        return found
    match = list(re.finditer(pattern, ptx))[place]
    return ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_noticed(mutant, monkeypatch):
    x = make_inputs("slow", 160, H=1).arguments
    config = prefill.config_of(x, 64, 1)
    ptx, shared = prefill.compiled(config)
    how, *change = MUTANTS[mutant]
    assert f"| {mutant} | {how} |" in DOCS.read_text(), "the table of mutants lacks it"
    broken = mutated(ptx, *change)
    assert broken != ptx
    monkeypatch.setattr(prefill, "compiled", lambda _: (broken, shared))
    want = token_oracle(**x, output_final_state=True)
    try:
        found = prefill.prefill(x, config)
    except ptx_emulator.ExecutionError as caught:
        assert how in str(caught)
        return
    limits = tolerance(x, 64, oracle=want)
    errors = error(found[0], want[0]), error(found[1], want[1], state=True)
    assert any(e > limit for e, limit in zip(errors, limits)), "not noticed"
    assert how == WRONG
