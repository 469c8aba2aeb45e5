"""Mutants of the chain and of the summary kernel: the PTX without one wait, commit or arrival.

The emulator must detect each mutant, by an error or by another result. This shows that the kernel needs each of them.
"""

import functools
import re

import pytest
import torch
from helpers.sm100_launch import Workspace

import ptx_emulator
from kda_cute.arguments import pack
from kda_cute.jit.ptxas import keep_ptx
from kda_sm100.arguments import ChainArguments
from kda_sm100.config import ARCHS, HEAD_DIM, ChainConfig, SummaryConfig

C, CHUNKS = 32, 9  # enough chunks to reuse every stage of both rings and both accumulators of O
CONFIGS = {"chain": ChainConfig(C), "summary": SummaryConfig(C)}

#: The instructions that mutants lack, one occurrence at a time.
PARTS = {
    "wait for an mbarrier": r"mbarrier\.try_wait[^;]*;\s*@P1 bra\.uni DONE;\s*bra\.uni\s+LAB_WAIT;",
    "wait for stores": r"tcgen05\.wait::st\.sync\.aligned;",
    "wait for loads": r"tcgen05\.wait::ld\.sync\.aligned;",
    "commit": r"tcgen05\.commit[^;]*;",
    "arrival": r"mbarrier\.arrive\.shared\.b64[^;]*;",
}
SHARES = 3  # tests that share the occurrences of one kind


@functools.cache
def compiled(which):
    from kda_sm100.kernels.chain import WARPS, ChainKernel
    from kda_sm100.kernels.summary import SummaryKernel

    kernel, config = {"chain": ChainKernel, "summary": SummaryKernel}[which], CONFIGS[which]
    return keep_ptx(kernel, config, ARCHS[0]), kernel(config).shared_bytes, 32 * WARPS


def run(which, ptx):
    """Returns o, the final state and the transition over random records; zeros if the kernel writes none."""
    rng = torch.Generator().manual_seed(0)
    workspace = Workspace(CHUNKS, C, "cpu")
    for name, rows, columns in (("w", C, 128), ("u", C, 128), ("qd", C, 128), ("kg", C, 128), ("aqk", C, C)):
        workspace[name] = 0.1 * torch.randn(CHUNKS, rows, columns, generator=rng)
    workspace["a"] = torch.rand(CHUNKS, HEAD_DIM, generator=rng)
    o = torch.zeros(1, CHUNKS * C, 1, HEAD_DIM).bfloat16()
    final, transition = torch.zeros(2, 1, 1, HEAD_DIM, HEAD_DIM).unbind()
    values = pack(
        ChainArguments, o=o, final_state=final, transitions=transition, workspace=workspace.bytes, state_count=0, N=1,
        T=CHUNKS * C, HV=1, offset_bytes=0, v_first=0, every=1,
    )  # fmt: skip
    _, shared, threads = compiled(which)
    ptx_emulator.run(ptx, (2 if which == "summary" else 1,), (threads,), shared, list(values))
    return o, final, transition


@functools.cache
def expected(which):
    return run(which, compiled(which)[0])


def is_detected(which, mutant):
    """Returns whether the mutant ends in an error or in another result."""
    try:
        found = run(which, mutant)
    except ptx_emulator.ExecutionError as error:
        print(error)
        return True
    return not all(torch.equal(x, y) for x, y in zip(found, expected(which), strict=True))


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("what", PARTS)
@pytest.mark.parametrize("which", CONFIGS)
def test_every_mutant_is_detected(which, what, share):
    ptx = compiled(which)[0]
    places = list(re.finditer(PARTS[what], ptx))
    assert places, "the pattern is out of date: the PTX has no match"
    for match in places[share::SHARES]:
        mutant = ptx[: match.start()] + ptx[match.end() :]
        assert is_detected(which, mutant), f"not needed: occurrence {places.index(match)} of {len(places)}"
