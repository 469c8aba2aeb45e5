"""Mutants of the kernels of a prefill beside the chain, and of those of serving: one instruction is missing, or one comparison is off by one.

A mutant repeats the kernel's launch of a call over the same memory. The emulator must notice each one, by an error or by other results.
"""

import functools
import re

import pytest
import torch

import ptx_emulator
from helpers.emulated_cases import emulated_runner
from helpers.pool_cases import checkpoints
from helpers.recorded_launches import record
from helpers.sm100_launch import launch
from kda_core.serving import journal_advance, journal_decode_kda
from kda_core.testing import serving
from kda_core.testing.journal import Engine, tokens
from kda_core.testing.serving import SLOTS
from kda_cute.testing.emulation import EmulatedBackend
from kda_sm100 import stages
from kda_sm100.config import ARCHS, HEAD_DIM

#: The slots of four sequences: the first valid one, one beyond the pool, one below the first, and one in between.
READ = (1, SLOTS, 0, 3)


def prefill(kda):
    kda(kda.inputs("slow", 20, H=1))


def output(kda):
    rng = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=rng)
    stages.chunk_gla_fwd_o_gk(
        new(1, 20, 1, HEAD_DIM).bfloat16(), new(1, 20, 1, HEAD_DIM).bfloat16(), -new(1, 20, 1, HEAD_DIM).abs(),
        new(1, 20, 1, 32).bfloat16(), new(1, 1, 1, HEAD_DIM, HEAD_DIM).bfloat16(), scale=0.1, chunk_size=32,
    )  # fmt: skip


def pool_prefill(kda):
    lengths = (66, 3, 3, 3)
    x, pool = kda.inputs("slow", sum(lengths), lengths=lengths, H=1), serving.Pool(kda, "fp32-vk", HV=1)
    kda(x | pool.arguments(READ, first_slot=1) | checkpoints(pool, (((64, 4),), (), (), ())))


def decode(kda, form="fp32-vk"):
    lengths = (2, 1, 1, 1)
    x, pool = kda.inputs("slow", sum(lengths), lengths=lengths, H=1), serving.Pool(kda, form, HV=1)
    kda.decode_pool(x | pool.arguments(READ, first_slot=1))


def journal(kda, form, T, records):
    """Steps of T tokens up to this number of records, and one that folds them."""
    engine = Engine(kda, form, length=records, drafts=T, HV=1, H=1)
    for step in range(records // T + 1):
        x = tokens(kda, len(READ), T, seed=step, H=1)
        engine.call(journal_decode_kda, x, READ, first_slot=1)
        engine.accept(x, READ, (T,) * len(READ))
        journal_advance(engine.journal, engine.index(READ), T, T, first_slot=1)


#: A kernel, and what is particular to the call -> the call. The kernels of records load eight of them at a time.
CALLS = {
    "IntraChunkKernel": prefill,
    "OutputKernel": output,
    "ServingChainKernel": pool_prefill,
    "DecodeKernel, [V, K]": decode,
    "DecodeKernel, [K, V]": functools.partial(decode, form="fp32-kv"),
    "JournalKernel": functools.partial(journal, form="fp32-kv", T=3, records=9),
    "VerifyKernel": functools.partial(journal, form="fp32-vk", T=2, records=10),
}

BARRIER, WAIT = r"bar\.sync\s+\d+;", r"cp\.async\.wait_group\s+\d+;"
#: The last commit before a wait: the copies before an earlier one belong to the next group without it.
COMMIT = rf"cp\.async\.commit_group;(?=(?:(?!commit_group)[\s\S])*?{WAIT})"
#: Comparisons of 64-bit numbers: only slots have them. A slot is valid from the first one on, and below the number of slots.
FIRST_SLOT, SLOT_COUNT = r"setp\.ge\.s64", r"setp\.lt\.s64"
EACH, ALL = "each", "all"

#: Kernel, what is wrong, the pattern of the instructions, their replacement, and whether each mutant has one of them or all. A kernel
#: with code for other calls (other dtypes and layouts of states, several slots of a sequence) needs all.
MUTANTS = (
    ("IntraChunkKernel", "no barrier", BARRIER, "", EACH),
    ("IntraChunkKernel", "no wait for copies", WAIT, "", EACH),
    ("IntraChunkKernel", "no commit of copies", COMMIT, "", EACH),
    ("IntraChunkKernel", "no wait for bulk stores", r"cp\.async\.bulk\.wait_group\s+\d+;", "", EACH),
    ("IntraChunkKernel", "no proxy fence", r"fence\.proxy\.async[^;]*;", "", EACH),
    ("OutputKernel", "no barrier", rf"{BARRIER}|bar\.warp\.sync[^;]*;", "", EACH),
    ("OutputKernel", "no wait for copies", WAIT, "", EACH),
    ("OutputKernel", "no commit of copies", COMMIT, "", EACH),
    ("ServingChainKernel", "the first slot is none", FIRST_SLOT, "setp.gt.s64", ALL),
    ("ServingChainKernel", "one slot too many", SLOT_COUNT, "setp.le.s64", ALL),
    *(
        (kernel, what, pattern, new, ALL)
        for kernel in ("DecodeKernel, [V, K]", "JournalKernel", "VerifyKernel")
        for what, pattern, new in (
            ("the first slot is none", FIRST_SLOT, "setp.gt.s64"),
            ("one slot too many", SLOT_COUNT, "setp.le.s64"),
        )
    ),
    ("DecodeKernel, [V, K]", "no barrier", r"bar\.warp\.sync[^;]*;", "", EACH),
    ("DecodeKernel, [K, V]", "no barrier", BARRIER, "", EACH),
    ("JournalKernel", "no barrier", BARRIER, "", EACH),
    ("VerifyKernel", "no barrier", BARRIER, "", EACH),
    ("ServingChainKernel", "no wait for stores", r"tcgen05\.wait::st[^;]*;", "", EACH),
)


#: Further ones, of the night.
MORE = (("ServingChainKernel", "no commit", r"tcgen05\.commit[^;]*;", "", EACH),)


@functools.cache
def launch_of(kernel):
    """Returns the launch of a kernel by its call, and the memory after it."""
    with pytest.MonkeyPatch.context() as patched:
        # A prepared launch knows addresses only; the tensors of others keep their memory. The runner binds the method.
        patched.setattr(EmulatedBackend, "_prepare", lambda *_: None)
        patched.setattr(stages, "launch", functools.partial(launch, arch=ARCHS[0]))
        with emulated_runner("sm100", ARCHS[0], lambda *_: None) as kda:
            found = record(patched, kernel.split(",")[0], lambda: CALLS[kernel](kda))
    return found, found.repeat(found.ptx)  # an error of the kernel itself must not count


def is_detected(kernel, mutant, seed):
    """Returns whether the mutant ends in an error or in other results. ``seed``: of the emulator."""
    found, want = launch_of(kernel)
    try:
        after = found.repeat(mutant, seed)
    except ptx_emulator.ExecutionError as error:
        print(error)
        return True
    return not all(torch.equal(x, y) for x, y in zip(after, want, strict=True))


def check(kernel, pattern, new, how, seed=0):
    """Asserts that each mutant is detected. Arguments as in a row of `MUTANTS`, and the seed of the emulator."""
    ptx = launch_of(kernel)[0].ptx
    places = list(re.finditer(pattern, ptx))
    assert places, "the pattern is out of date: the PTX has no match"
    if how == ALL:
        assert is_detected(kernel, re.sub(pattern, new, ptx), seed)
        return
    for n, match in enumerate(places):
        mutant = ptx[: match.start()] + match.expand(new) + ptx[match.end() :]
        assert is_detected(kernel, mutant, seed), f"not needed: occurrence {n} of {len(places)}"


def cases(rows):
    """Returns the parameters of a test of these rows."""
    return [pytest.param(*row[:1], *row[2:], id=f"{row[0]}-{row[1]}") for row in rows]
