"""The emulator notices broken copies of the kda-sm90 kernel, by an error or by a wrong result."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.emulator import prefill
from helpers.nightly import nightly

import ptx_emulator
from kda_core.testing import error, make_inputs, token_oracle, tolerance
from kda_sm90.kernels.barriers import WARPGROUP, NamedBarrier
from kda_sm90.kernels.local_records import BARRIER as LOCAL_BARRIER

DOCS = Path(__file__).parents[2] / "docs/ptx-emulator.md"
ARRIVE = r"@first mbarrier\.arrive\.release\.cta[^;]*;"

DEADLOCK, RACE, WRONG = "deadlock", "a race", "a wrong result"
UNWRITTEN = "an undefined value is stored to"
UNDEFINED_BRANCH = "the predicate of a branch is undefined"

GAP = r"(?:\s|//.*)*"  # blanks and comments
#: Barriers between stores and the loads of other threads: a warp barrier between the factors of rows and their loads, and the named barrier in
#: front of the wgmma of the intra-chunk stage.
AFTER_FACTORS = r"(st\.shared\.b32 [^;]*;(?:(?!bar\.)[\s\S])*?)bar\.warp\.sync\s+-1;(?=(?:(?!bar\.)[\s\S])*?ld\.shared\.v4)"
BEFORE_WGMMA = r"bar\.sync\s+%r\d+, \d+;(?=(?:(?!bar\.sync)[\s\S])*?wgmma\.fence)"
#: The comparison of a row index with the number of rows, before the store of that row.
VALID_ROW = (
    rf"setp\.lt\.s32(\s+(%p\d+), %r\d+, %r\d+;{GAP}selp\.b32\s+(%r\d+), 1, 0, \2;{GAP}"
    r"\{ \.reg \.pred p; setp\.ne\.b32 p, \3, 0; @p st\.global\.cs)"
)
#: The wait of a store warp until O of a chunk is ready.
O_READY = rf"bar\.sync\s+{NamedBarrier.O_READY}, {WARPGROUP + 32};"
#: A constant that is the arrival count of the mbarriers behind it, and one that is the size of a bulk copy.
ARRIVALS = rf"mov\.b32\s+(%r\d+), (\d+);(?={GAP}mbarrier\.init[^;]*, \1;)"
COPY_SIZE = r"mov\.b32\s+(%r\d+), (\d+);(?=[\s\S]*?cp\.async\.bulk[^;]*\], \1, \[)"
SWIZZLE = "the swizzle of its descriptor"
#: The loop in which a group waits for the ticket before it uses its first inputs. CTA 0 publishes the ticket when it has cleared the counters.
WAIT_FOR_TICKET = (
    r"(\$L__BB0_\d+):\s+ld\.acquire\.gpu\.global\.b64 [^;]*;\s+setp\.ne\.b64 [^;]*;\s+@%p\d+ bra\s+\1;"
    r"(?=(?:(?!ld\.acquire\.gpu\.global\.b64)[\s\S])*?cp\.async\.wait_group)"
)
#: A delay of CTA 0, longer than a group needs for its first item.
DELAY = """
{ .reg .pred p; .reg .b32 n; mov.u32 n, %ctaid.x; setp.ne.s32 p, n, 0; @p bra GO; mov.b32 n, 4000;
WAIT: add.s32 n, n, -1; setp.ne.s32 p, n, 0; @p bra WAIT;
GO: }
"""


def lowered(by):
    """Returns the replacement of a constant by a smaller one."""
    return lambda match: f"mov.b32 {match[1]}, {int(match[2]) - by};"


#: Each row: how the emulator notices the mutant (a part of the error, or a result beyond the tolerance), the pattern of the
#: instructions to replace, the replacement, and how many occurrences to replace (0: all). docs/ptx-emulator.md has the same table.
MUTANTS = {
    "no fence towards the async proxy": (
        "without a fence.proxy.async between", r"fence\.proxy\.async\.global;", "", 0,
    ),
    "a record that is never published": (DEADLOCK, r"st\.release\.gpu\.global\.b32 [^;]*;", "", 0),
    "records published without order": (RACE, r"st\.release\.gpu", "st.relaxed.gpu", 0),
    "records acquired without order": (RACE, r"ld\.acquire\.gpu", "ld.relaxed.gpu", 0),
    "no wait for the copies of q, k and g": (UNDEFINED_BRANCH, r"cp\.async\.wait_group\s+0;", "", 0),
    "an intra-chunk stage without its barrier": (RACE, BEFORE_WGMMA, "", 1),
    "lanes that read what others store, without their barrier": (RACE, AFTER_FACTORS, r"\1", 0),
    "o stored before it is ready": (UNWRITTEN, O_READY, "", 1),
    "an mbarrier of too few arrivals": (RACE, ARRIVALS, lowered(1), 1),
    "the wrong phase of an mbarrier": (
        DEADLOCK, r"(mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\]), %r\d+", r"\1, 0", 1,
    ),
    "a stage that is never released": (DEADLOCK, ARRIVE, "", 0),
    "a copy that is too short": (DEADLOCK, COPY_SIZE, lowered(16), 1),
    "a tail that is one row too long": ("global memory out of bounds", VALID_ROW, r"setp.le.s32\1", 0),
    "a wgmma without its fence": (
        "written after the last wgmma.fence", r"wgmma\.fence\.sync\.aligned;", "", 1,
    ),
    "a wgmma without its wait": (
        "a register of a wgmma in flight is accessed before its wait", r"wgmma\.wait_group\.sync\.aligned\s+1;", "", 1,
    ),
    "a swizzle of 64 bytes": (WRONG, r"wgmma\.mma_async[^;]*?\}, (%rd\d+), p", SWIZZLE, 1),
    "no step of the substitution": (
        WRONG, r"fma\.rn\.ftz\.f32 (%r\d+), (%r\d+), (%r\d+), (%r\d+);", r"mov.b32 \1, \4;", 0,
    ),
    "an MMA that adds nothing": (
        WRONG, r"(mma\.sync\.aligned\.m16n8k16[^{]*\{[^}]*\}, \{[^}]*\}, )\{(%r\d+), (%r\d+)\}", r"\1{\2, \2}", 0,
    ),
}  # fmt: skip


def mutated(ptx, pattern, replacement, count):
    """Returns the PTX with the first ``count`` matches replaced, or all for 0. Fails if there are fewer."""
    if replacement == SWIZZLE:
        match = re.search(pattern, ptx)
        assert match, "the pattern of the mutant matches nothing"
        line = ptx.rindex("\n", 0, match.start())
        line = ptx.rindex("{", 0, line)  # the scope of the inline PTX
        # Bits 62 and 63 of a descriptor are the swizzle: 1, of 128 bytes, becomes 2, of 64 bytes.
        flip = f"\n xor.b64 {match[1]}, {match[1]}, {-(1 << 62)};\n"
        return ptx[:line] + flip + ptx[line:]
    changed, replaced = re.subn(pattern, replacement, ptx, count=count)
    assert replaced >= max(count, 1), "the pattern of the mutant matches too little"
    return changed


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_noticed(mutant, monkeypatch):
    # Some patterns first match in the code for initial states. The call must execute this code.
    x = make_inputs("slow", 160, H=1, initial_state=True).arguments
    config = prefill.config_of(x, 32, 1)
    ptx, shared = prefill.compiled(config)
    how, *change = MUTANTS[mutant]
    assert f"| {mutant} | {how} |" in DOCS.read_text(), (
        "the table of mutants in docs/ptx-emulator.md lacks it"
    )
    broken = mutated(ptx, *change)
    assert broken != ptx
    monkeypatch.setattr(prefill, "compiled", lambda _: (broken, shared))
    want = token_oracle(**x, output_final_state=True)
    try:
        found = prefill.prefill(x, config)
    except ptx_emulator.ExecutionError as caught:
        assert how in str(caught)
        return
    limits = tolerance(x, 32, oracle=want)
    errors = error(found[0], want[0]), error(found[1], want[1], state=True)
    assert any(e > limit for e, limit in zip(errors, limits)), "not noticed"
    assert how == WRONG


#: The same of local records, for a call of 200 tokens.
BARRIER_OF_LOCAL = rf"bar\.sync\s+{LOCAL_BARRIER}, {WARPGROUP};"
NO_BARRIER = "a local warpgroup without the barriers behind its fences"
NO_FENCE = "local records without a fence towards the async proxy"
LOCAL_MUTANTS = {
    NO_BARRIER: (
        RACE, rf"(fence\.proxy\.async\.shared::cta;\s*){BARRIER_OF_LOCAL}", r"\1", 0,
    ),
    NO_FENCE: (
        "without a fence.proxy.async between", rf"fence\.proxy\.async\.shared::cta;(?=\s*{BARRIER_OF_LOCAL})", "", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", (nightly(NO_BARRIER), NO_FENCE))
def test_mutants_of_local_records_are_noticed(mutant, monkeypatch):
    x = make_inputs("slow", 200, H=1).arguments
    config = replace(prefill.config_of(x, 32, 2), local=True)
    ptx, shared = prefill.compiled(config)
    how, *change = LOCAL_MUTANTS[mutant]
    assert f"| {mutant} | {how} |" in DOCS.read_text()
    broken = mutated(ptx, *change)
    monkeypatch.setattr(prefill, "compiled", lambda _: (broken, shared))
    with pytest.raises(ptx_emulator.ExecutionError, match=how):
        prefill.prefill(x, config, queues=1, intra_chunk_ctas=1, depth=7)


def test_groups_wait_for_the_counters_before_they_claim(monkeypatch):
    """Relaxed accesses and atomics are no races. So only a late clear shows whether groups wait for it: without the wait it erases
    that their records are ready."""
    x = make_inputs("slow", 280, H=1).arguments
    config = prefill.config_of(x, 32, 2)
    ptx, shared = prefill.compiled(config)
    run = lambda: prefill.prefill(x, config, depth=9, intra_chunk_ctas=1)
    want = run()
    start = ptx.index("mov.u32 \t%r1, %ctaid.x;")
    late = ptx[:start] + DELAY + ptx[start:]
    monkeypatch.setattr(prefill, "compiled", lambda _: (late, shared))
    assert all(torch.equal(y, z) for y, z in zip(run(), want, strict=True))
    broken = mutated(late, WAIT_FOR_TICKET, r"\1:", 0)
    monkeypatch.setattr(prefill, "compiled", lambda _: (broken, shared))
    with pytest.raises(ptx_emulator.ExecutionError, match=DEADLOCK):
        run()
