"""Broken copies of the chain, and of that of summaries, are noticed on the emulator: by an error, or because
the result is wrong. Each wait counts."""

import functools
import re

import pytest
import torch
from helpers.sm100_launch import Workspace

import ptx_emulator
from kda_cute.jit.ptxas import keep_ptx
from kda_sm100.config import ARCHS, HEAD_DIM, ChainConfig, SummaryConfig

C, CHUNKS = 32, 9  # stages of both rings, which are alike, and both accumulators of O are used again
CONFIGS = {"chain": ChainConfig(C), "summary": SummaryConfig(C)}

#: What is taken out, one place at a time, wherever it is.
PARTS = {
    "wait for an mbarrier": r"mbarrier\.try_wait[^;]*;\s*@P1 bra\.uni DONE;\s*bra\.uni\s+LAB_WAIT;",
    "wait for stores": r"tcgen05\.wait::st\.sync\.aligned;",
    "wait for loads": r"tcgen05\.wait::ld\.sync\.aligned;",
    "commit": r"tcgen05\.commit[^;]*;",
    "arrival": r"mbarrier\.arrive\.shared\.b64[^;]*;",
}
SHARES = 3  # tests that share the places of one kind


@functools.cache
def compiled(which):
    from kda_sm100.kernels.chain import WARPS, ChainKernel
    from kda_sm100.kernels.summary import SummaryKernel

    kernel, config = {"chain": ChainKernel, "summary": SummaryKernel}[which], CONFIGS[which]
    return keep_ptx(kernel, config, ARCHS[0]), kernel(config).shared_bytes, 32 * WARPS


def run(which, ptx):
    """o, the final state and the transition over random records; zeros where the kernel writes none."""
    from kda_sm100.kernels.chain import ARGUMENTS

    rng = torch.Generator().manual_seed(0)
    workspace = Workspace(CHUNKS, C, "cpu")
    for name, rows, columns in (("w", C, 128), ("u", C, 128), ("qd", C, 128), ("kg", C, 128), ("aqk", C, C)):
        workspace[name] = 0.1 * torch.randn(CHUNKS, rows, columns, generator=rng)
    workspace["a"] = torch.rand(CHUNKS, HEAD_DIM, generator=rng)
    o = torch.zeros(1, CHUNKS * C, 1, HEAD_DIM).bfloat16()
    final, transition = torch.zeros(2, 1, 1, HEAD_DIM, HEAD_DIM).unbind()
    given = {
        "o": o,
        "final_state": final,
        "transitions": transition,
        "workspace": workspace.bytes,
        "N": 1,
        "T": CHUNKS * C,
        "HV": 1,
        "every": 1,
    }
    values = [given.get(name, 0) for names in ARGUMENTS.values() for name in names]
    _, shared, threads = compiled(which)
    ptx_emulator.run(ptx, (2 if which == "summary" else 1,), (threads,), shared, values)
    return o, final, transition


@functools.cache
def expected(which):
    return run(which, compiled(which)[0])


def is_noticed(which, broken):
    """Whether the broken PTX ends in an error or in another result."""
    try:
        found = run(which, broken)
    except ptx_emulator.ExecutionError as error:
        print(error)
        return True
    return not all(torch.equal(x, y) for x, y in zip(found, expected(which), strict=True))


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("what", PARTS)
@pytest.mark.parametrize("which", CONFIGS)
def test_nothing_is_there_in_vain(which, what, share):
    ptx = compiled(which)[0]
    places = list(re.finditer(PARTS[what], ptx))
    assert places, "the PTX has none: the pattern is out of date"
    for match in places[share::SHARES]:
        broken = ptx[: match.start()] + ptx[match.end() :]
        assert is_noticed(which, broken), f"place {places.index(match)} of {len(places)} is there in vain"
