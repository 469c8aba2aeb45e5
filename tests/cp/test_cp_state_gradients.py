"""Gradients of the states between segments, from the backward of any backend and the merge from behind."""

from itertools import accumulate

import pytest
import torch
from helpers import segmented_backend, writing_backend

from kda_core import chunk_kda
from kda_core.arguments import Arguments, checked
from kda_core.buffers import make_inputs as backend_inputs
from kda_core.reference import SPEC as REFERENCE
from kda_core.reference import ReferenceBackend
from kda_core.registry import Choice
from kda_core.testing import make_inputs
from kda_core.validate import problem_shape
from kda_cp.merge import merge_segments_backward
from kda_cp.plan import Plan
from kda_cp.segments import Caller, gradient_shape, layout, segment_inputs
from kda_cp.state_gradients import BackwardCaller, state_gradients
from kda_cp.summary import transitions

TOKENS = ("q", "k", "v", "g", "beta")
SEGMENTS = ((30, 25, 1, 15), (0,), (20, 20))  # of three packed sequences; cuts inside of chunks
LENGTHS = tuple(map(sum, SEGMENTS))
CHOICES = {
    "reference": Choice(REFERENCE, ReferenceBackend(), "backend="),
    "writing": Choice(writing_backend.SPEC, writing_backend.Writing(), "backend="),
    "old-writing": Choice(writing_backend.OLD, writing_backend.OldWriting(), "backend="),
}


def call(family, dtype):
    """Returns arguments of a packed call and its inputs as a backend gets them."""
    recipe = {"H": 1, "HV": 2, "K": 8, "V": 12, "initial_state": True}
    x = make_inputs(family, sum(LENGTHS), lengths=LENGTHS, dtype=dtype, **recipe).arguments
    args = checked(Arguments(**x))
    return x, backend_inputs(args.tensors, problem_shape(*args.tensors, options=args.options))


def true_ends(x, grad_o, grad_final):
    """Returns the gradients of the states at the ends of all segments: those of the initial states of the tokens behind."""
    found, first = [], 0
    for n, lengths in enumerate(SEGMENTS):
        end = first + sum(lengths)
        for cut in accumulate(lengths, initial=first):
            state = torch.zeros_like(grad_final[n : n + 1], requires_grad=True)
            rest = {name: x[name][:, cut:end] for name in TOKENS} | {
                "initial_state": state,
                "cu_seqlens": None,
            }
            o, final = chunk_kda(**x | rest, output_final_state=True, backend="reference")
            total = (o * grad_o[:, cut:end]).sum() + (final * grad_final[n]).sum()
            found.append(torch.autograd.grad(total, state)[0][0])
        del found[-len(lengths) - 1]  # the start of the sequence
        first = end
    return torch.stack(found)


@pytest.mark.parametrize("family", ["memory", "slow"])
@pytest.mark.parametrize("backend", CHOICES)
def test_gradients_of_the_states_between_segments_follow_from_the_backward_of_any_backend(backend, family):
    x, inputs = call(family, torch.float64)
    grad_o, grad_final = torch.randn_like(inputs.v), torch.randn_like(inputs.initial_state)
    segments = [p for s in layout(Plan(SEGMENTS)) for p in s]
    bounds = [*accumulate(map(len, SEGMENTS), initial=0)]
    ends = torch.zeros(len(segments), *grad_final.shape[1:], dtype=grad_final.dtype)
    for n, bound in enumerate(bounds[1:]):
        ends[bound - 1] = grad_final[n]
    M = transitions(inputs, segments, torch.empty_like(inputs.v), Caller(ReferenceBackend(), None))
    whole = segment_inputs(inputs, segments, gradient_shape(inputs.shape, segments), torch.zeros_like(ends))
    caller = BackwardCaller.reserve(CHOICES[backend], whole, ("q",), segments)
    writing_backend.calls.clear()
    starts = state_gradients(inputs, segments, grad_o, ends, caller)
    merge_segments_backward(None, bounds, ends, starts, M)
    want = true_ends(x, grad_o, grad_final)
    assert (ends - want).norm() < 1e-12 * want.norm()
    needed = TOKENS + (("A_log", "dt_bias") if backend == "old-writing" else ()) + ("initial_state",)
    lengths = tuple(p.length for p in segments)
    needed = tuple(n for n in needed if x.get(n) is not None)
    assert writing_backend.calls == ([] if backend == "reference" else [(lengths, needed)])


def test_a_later_call_in_the_same_memory_changes_no_gradient_of_a_state():
    _, inputs = call("slow", torch.float32)
    segments = [p for s in layout(Plan(SEGMENTS)) for p in s]
    states = torch.zeros(len(segments), 2, 8, 12)
    whole = segment_inputs(inputs, segments, gradient_shape(inputs.shape, segments), states)
    caller = BackwardCaller.reserve(CHOICES["writing"], whole, ("initial_state",), segments[1:])
    grad_o = torch.randn_like(inputs.v)
    early = state_gradients(inputs, segments[1:], grad_o, None, caller)
    kept = early.clone()
    caller(whole, grad_o, torch.ones_like(states))
    assert torch.equal(early, kept) and kept.any()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_merge_kernel_merges_gradients_as_torch_does(transposed):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    bounds, P = [0, 1, 4, 6], 6
    ends, starts, M = draw(P, 2, 8, 12), draw(P, 2, 8, 12), draw(P, 2, 8, 8) / 3
    if transposed:
        M = M.mT
    merged = [ends.clone(), ends.clone()]
    segmented_backend.calls.clear()
    for kernel, found in zip((None, segmented_backend.Merging().merge_segments), merged):
        merge_segments_backward(kernel, bounds, found, starts, M)
    assert segmented_backend.calls == [("merge_segments", (0, 2, 5, 6))]
    assert torch.equal(*merged)
    want = ends.clone()
    want[2], want[4] = starts[3], starts[5]
    want[1] = M[2].mT @ want[2] + starts[2]
    torch.testing.assert_close(merged[0], want)
