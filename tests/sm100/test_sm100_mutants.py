"""Broken copies of the chain are noticed on the emulator: by an error, or because the result is wrong. Each wait counts."""

import functools
import re

import pytest
import torch
from blackwell import Workspace

import ptx_emulator
from kda_core.cute.ptxas import keep_ptx
from kda_sm100.config import ARCHS, HEAD_DIM, ChainConfig

C, CHUNKS = 32, 9  # stages of both rings, which are alike, and both accumulators of O are used again
CONFIG = ChainConfig(C)

#: What is taken out, and how many there are.
PARTS = {
    "wait for an mbarrier": (r"mbarrier\.try_wait[^;]*;\s*@P1 bra\.uni DONE;\s*bra\.uni\s+LAB_WAIT;", 11),
    "wait for stores": (r"tcgen05\.wait::st\.sync\.aligned;", 2),
    "wait for loads": (r"tcgen05\.wait::ld\.sync\.aligned;", 3),
    "commit": (r"tcgen05\.commit[^;]*;", 5),
    "arrival": (r"mbarrier\.arrive\.shared\.b64[^;]*;", 4),
}


@functools.cache
def compiled():
    from kda_sm100.kernels.chain import WARPS, ChainKernel

    return keep_ptx(ChainKernel, CONFIG, ARCHS[0]), ChainKernel(CONFIG).shared_bytes, 32 * WARPS


def run(ptx):
    """o and the final state over random records."""
    from kda_sm100.kernels.chain import ARGUMENTS

    rng = torch.Generator().manual_seed(0)
    workspace = Workspace(CHUNKS, C, "cpu")
    for name, rows, columns in (("w", C, 128), ("u", C, 128), ("qd", C, 128), ("kg", C, 128), ("aqk", C, C)):
        workspace[name] = 0.1 * torch.randn(CHUNKS, rows, columns, generator=rng)
    workspace["a"] = torch.rand(CHUNKS, HEAD_DIM, generator=rng)
    o, final = torch.zeros(1, CHUNKS * C, 1, HEAD_DIM).bfloat16(), torch.zeros(1, 1, HEAD_DIM, HEAD_DIM)
    given = {
        "o": o,
        "final_state": final,
        "workspace": workspace.bytes,
        "N": 1,
        "T": CHUNKS * C,
        "HV": 1,
        "every": 1,
    }
    values = [given.get(name, 0) for names in ARGUMENTS.values() for name in names]
    _, shared, threads = compiled()
    ptx_emulator.run(ptx, (1,), (threads,), shared, values)
    return o, final


@functools.cache
def expected():
    return run(compiled()[0])


@pytest.mark.parametrize(
    ("what", "place"), [(what, i) for what, (_, count) in PARTS.items() for i in range(count)]
)
def test_nothing_is_there_in_vain(what, place):
    pattern, count = PARTS[what]
    ptx = compiled()[0]
    matches = list(re.finditer(pattern, ptx))
    assert len(matches) == count
    match = matches[place]
    try:
        found = run(ptx[: match.start()] + ptx[match.end() :])
    except ptx_emulator.ExecutionError as error:
        print(error)
        return
    assert not all(torch.equal(x, y) for x, y in zip(found, expected(), strict=True)), "not noticed"
