"""Mutants of the chains, of the summary kernel and of the gradients kernel: the PTX without one wait, commit or arrival.

The emulator must detect each mutant, by an error or by another result. This shows that the kernel needs each of them.
"""

import functools
import re

import pytest
import torch
from helpers.compiled import compiled as cached
from helpers.nightly import nightly
from helpers.sm100_launch import Workspace

import ptx_emulator
from kda_cute.arguments import pack
from kda_cute.gradients import GradientsArguments, GradientsConfig
from kda_sm100.arguments import (
    BACKWARD_CHAINS,
    CHAIN,
    GRADIENTS,
    SUMMARY,
    BackwardChainArguments,
    ChainArguments,
)
from kda_sm100.config import ARCHS, HEAD_DIM, BackwardChainConfig, ChainConfig, SummaryConfig

C, CHUNKS = 32, 9  # enough chunks to reuse every stage of both rings and both accumulators of O
BACKWARD_CHUNKS = 5  # the same for the chains of a backward, whose chunks have 64 tokens
INTERFACES = {
    "chain": (CHAIN, ChainConfig(C)),
    "summary": (SUMMARY, SummaryConfig(C)),
    "recompute": (BACKWARD_CHAINS["recompute"], BackwardChainConfig("recompute")),
    "reverse": (BACKWARD_CHAINS["reverse"], BackwardChainConfig()),
    "reverse_summarize": (BACKWARD_CHAINS["reverse_summarize"], BackwardChainConfig("reverse_summarize")),
    "gradients": (GRADIENTS, GradientsConfig()),
}

WAIT = r"mbarrier\.try_wait[^;]*;\s*@P1 bra\.uni DONE;\s*bra\.uni\s+LAB_WAIT;"

#: The instructions that mutants lack, one occurrence at a time.
PARTS = {
    "wait for an mbarrier": WAIT,
    "wait for stores": r"tcgen05\.wait::st\.sync\.aligned;",
    "wait for loads": r"tcgen05\.wait::ld\.sync\.aligned;",
    "commit": r"tcgen05\.commit[^;]*;",
    "arrival": r"mbarrier\.arrive\.shared\.b64[^;]*;",
}
#: Of the gradients kernel: what belongs to its products. Other waits of it follow from each other if a step has few instructions.
OF_PRODUCTS = {
    "wait for products": WAIT + r"(?=[^;]*DONE:[^;]*tcgen05\.fence::after_thread_sync;)",
    "commit": PARTS["commit"],
    "arrival": PARTS["arrival"],
}
CASES = [(which, what) for which in INTERFACES for what in (OF_PRODUCTS if which == "gradients" else PARTS)]
SHARES = 10  # tests that share the occurrences of one kind; every change runs the first, the nightly session the others


@functools.cache
def compiled(which):
    interface, config = INTERFACES[which]
    kernel = interface.load()
    return cached(interface, config, ARCHS[0]).ptx, kernel(config).shared_bytes, kernel.threads


def random_records(count, chunk, backward=False):
    """Returns a new workspace of random records, the same in each call."""
    found = Workspace(count, chunk, "cpu", backward).bytes
    found.copy_(_records(count, chunk, backward))
    return found


@functools.cache
def _records(count, chunk, backward):
    rng = torch.Generator().manual_seed(0)
    workspace = Workspace(count, chunk, "cpu", backward)
    wide, square = (chunk, HEAD_DIM), (chunk, chunk)
    for name, shape in {"w": wide, "u": wide, "qd": wide, "kg": wide, "aqk": square, "t": square}.items():
        if name != "t" or backward:
            workspace[name] = 0.1 * torch.randn(count, *shape, generator=rng)
    workspace["a"] = torch.rand(count, HEAD_DIM, generator=rng)
    return workspace.bytes


def chain_call(which):
    """Returns grid, values of the arguments, the outputs, and the tensors that the kernel may access besides."""
    workspace = random_records(CHUNKS, C)
    o = torch.zeros(1, CHUNKS * C, 1, HEAD_DIM).bfloat16()
    final, transition = torch.zeros(2, 1, 1, HEAD_DIM, HEAD_DIM).unbind()
    values = pack(
        ChainArguments, o=o, final_state=final, transitions=transition, workspace=workspace, state_count=0,
        N=1, T=CHUNKS * C, HV=1, offset_bytes=0, v_first=0, every=1,
    )  # fmt: skip
    return 2 if which == "summary" else 1, values, (o, final, transition), [workspace]


def backward_call(which):
    """As `chain_call`, for the chains of a backward."""
    T = 64 * BACKWARD_CHUNKS
    o, residual = torch.zeros(2, 1, T, 1, HEAD_DIM).bfloat16().unbind()
    final, transition, checkpoint = torch.zeros(3, 1, 1, HEAD_DIM, HEAD_DIM).unbind()
    slots = 512 // 64 if which == "recompute" else BACKWARD_CHUNKS
    states = torch.zeros(slots, 1, HEAD_DIM, HEAD_DIM).bfloat16()
    grad_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    workspace, tokens = random_records(slots, 64, backward=True), 512 if which == "recompute" else 64
    values = pack(
        BackwardChainArguments, o=o, grad_o=grad_o, exit=final, transitions=transition, checkpoints=checkpoint, states=states, residual=residual,
        workspace=workspace, residual_row=2 * HEAD_DIM, N=1, T=T, HV=1, offset_bytes=0, v_first=0, records=slots, first_slot=0,
        slab_slots=slots * 64 // tokens, slot_tokens=tokens,
    )  # fmt: skip
    ctas = 2 if which == "reverse_summarize" else 1
    return ctas, values, (o, residual, final, transition, states), [workspace, grad_o, checkpoint]


def gradients_call(which):
    """As `chain_call`, for two value heads of one chunk."""
    rng, T = torch.Generator().manual_seed(0), 64
    random = lambda *shape: 0.3 * torch.randn(*shape, generator=rng)
    q, k = random(2, 1, T, 1, HEAD_DIM).bfloat16().unbind()
    g, grad_o, grad_v, residual = random(4, 1, T, 2, HEAD_DIM).bfloat16().unbind()
    states, grad_states = random(2, 1, 2, HEAD_DIM, HEAD_DIM).bfloat16().unbind()
    beta, a_log, dt_bias = random(1, T, 2), random(2), random(2, HEAD_DIM)
    outputs = [torch.zeros_like(x) for x in (q, k, g, beta)]
    partials, scratch = torch.zeros(1, 2, 2, HEAD_DIM), torch.zeros(1, 2, T * HEAD_DIM)
    values = pack(
        GradientsArguments, q=q, k=k, g=g, beta=beta, a_log=a_log, dt_bias=dt_bias, grad_o=grad_o, grad_v=grad_v,
        residual=residual, states=states, grad_states=grad_states,
        **dict(zip(("grad_q", "grad_k", "grad_g", "grad_beta"), outputs, strict=True)), partials=partials, scratch=scratch,
        N=1, T=T, H=1, HV=2, group=2, offset_bytes=0, beta_bytes=4, l2norm=1, ctas=1, first_slot=0, slab_slots=1,
        slot_tokens=64, residual_row=2 * HEAD_DIM, state_images=0, scale=1.0, lower_bound=-5.0, beta_factor=1.0,
    )  # fmt: skip
    inputs = [q, k, g, beta, a_log, dt_bias, grad_o, grad_v, residual, states, grad_states, scratch]
    return 1, values, (*outputs, partials), inputs


CALLS = dict.fromkeys(INTERFACES, backward_call) | {
    "chain": chain_call, "summary": chain_call, "gradients": gradients_call,
}  # fmt: skip


def run(which, ptx):
    """Returns the outputs over random inputs; zeros where the kernel writes none."""
    grid, values, outputs, inputs = CALLS[which](which)
    _, shared, threads = compiled(which)
    tensors = [*outputs, *inputs]
    ptx_emulator.run(ptx, (grid,), (threads,), shared, list(values), tensors=tensors, commits=True)
    return outputs


@functools.cache
def expected(which):
    return run(which, compiled(which)[0])


def is_detected(which, mutant):
    """Returns whether the mutant ends in an error or in another result."""
    want = expected(which)  # first: an error of the kernel itself must not count
    try:
        found = run(which, mutant)
    except ptx_emulator.ExecutionError as error:
        print(error)
        return True
    return not all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("share", (0, *map(nightly, range(1, SHARES))))
@pytest.mark.parametrize(("which", "what"), CASES)
def test_every_mutant_is_detected(which, what, share):
    ptx = compiled(which)[0]
    places = list(re.finditer((PARTS | OF_PRODUCTS)[what], ptx))
    assert places, "the pattern is out of date: the PTX has no match"
    for match in places[share::SHARES]:
        mutant = ptx[: match.start()] + ptx[match.end() :]
        assert is_detected(which, mutant), f"not needed: occurrence {places.index(match)} of {len(places)}"
