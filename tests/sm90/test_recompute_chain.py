"""The chain of the mode ``recompute``: its states, R, dv and gradients of states, compared with the token recurrence in fp64."""

import functools
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from helpers.aligned import aligned
from helpers.sm90_backward import NAMES, oracle, relative_error

from kda_core import buffers, validate
from kda_core.contract import KdaOptions, KdaOutputs
from kda_core.testing import make_inputs, token_oracle
from kda_core.testing.oracle import sequence_bounds
from kda_cute import kernels_made_by
from kda_cute.testing.emulation import load
from kda_sm90 import layouts
from kda_sm90.arguments import BackwardArguments
from kda_sm90.config import ARCH, PrefillConfig
from kda_sm90.launch import make_launch
from kda_sm90.launch_config import LaunchConfig

NAN = float("nan")
LIMIT = 8e-3
CHECKPOINT = 512


def chunk_of(bounds, packed, T, slot):
    """Returns the slot of 64 tokens at which a slot of 512 tokens starts."""
    for n, (start, end) in enumerate(bounds):
        first, behind = (
            (start // 512 + n, end // 512 + n + 1) if packed else (n * -(-T // 512), (n + 1) * -(-T // 512))
        )
        if first <= slot < behind:
            fine, last = (
                (start // 64 + n, end // 64 + n + 1) if packed else (n * -(-T // 64), (n + 1) * -(-T // 64))
            )
            return min(fine + 8 * (slot - first), last)
    raise AssertionError(slot)


@functools.cache
def problem(lengths, HV, device):
    """Returns the inputs of a call, gradients of its outputs, the oracle's gradients, and its states before every token."""
    packed = not isinstance(lengths, int)
    T = sum(lengths) if packed else lengths
    made = make_inputs(
        "slow", T, H=1, HV=HV, lengths=lengths if packed else None, initial_state=True, device=device
    )
    x = made.arguments
    rng = torch.Generator().manual_seed(1)
    grad_o = torch.randn(x["v"].shape, generator=rng).bfloat16().to(device)
    grad_final = torch.randn(x["initial_state"].shape, generator=rng).to(device)
    before = token_oracle(**x, return_intermediate_states=True, chunk_size=1)[2].flatten(0, 1)
    return x, grad_o, grad_final, oracle(x, grad_o, grad_final), before


def check(lengths, HV, warpgroups, queues, depth, ctas, device, slab_slots=1000):
    """Runs the chains of a backward from states that the oracle has saved every 512 tokens, slab by slab."""
    import ptx_emulator

    x, grad_o, grad_final, want, before = problem(lengths, HV, device)
    packed, T = not isinstance(lengths, int), x["q"].shape[1]
    tensors = [x.get(name) for name in (*NAMES, "cu_seqlens", "cu_seqlens_cpu")]
    options = KdaOptions(**{f: x[f] for f in KdaOptions.__dataclass_fields__ if f in x})
    shape = validate.problem_shape(*tensors, options=options)
    inputs = buffers.make_inputs(tensors, shape)
    bounds = sequence_bounds(x["q"], x.get("cu_seqlens"))
    first = lambda n, spacing: bounds[n][0] // spacing + n if packed else n * -(-T // spacing)
    poisoned = lambda *size, dtype=torch.bfloat16: torch.full(size, NAN, dtype=dtype, device=device)
    count = lambda tokens: layouts.slot_count(1, T, tokens, shape.N if packed else None)
    slots, matrix = count(64), (HV, 128, 128)
    checkpoints = poisoned(count(CHECKPOINT), *matrix, dtype=torch.float32)
    for n, (start, end) in enumerate(bounds):
        for i, token in enumerate(range(start, end, CHECKPOINT)):
            checkpoints[first(n, CHECKPOINT) + i] = before[token]
    grad_v, residual = poisoned(*x["v"].shape), poisoned(*x["v"].shape)
    states, grad_states = poisoned(slots, *matrix), poisoned(slots, *matrix)
    grad_initial = torch.full_like(grad_final, NAN)
    config = LaunchConfig(PrefillConfig(64, warpgroups, states=True, mode="recompute"), ctas, queues, depth)
    workspace = aligned(config.workspace_bytes, device)
    between = torch.full((2, HV, 128, 128), NAN, device=device)
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(kernels_made_by(load))
            reachable = [
                *tensors, grad_o, grad_final, checkpoints, grad_v, residual, states, grad_states, grad_initial, workspace,
                between,
            ]  # fmt: skip
            reachable = [y for y in reachable if y is not None]
            stack.enter_context(ptx_emulator.device(ARCH, tensors=reachable, races=("shared",)))
        run = make_launch(shape, config, 64)
        for slab in reversed(range(0, count(CHECKPOINT), slab_slots)):
            turn = slab // slab_slots % 2
            from_slab, to_slab = between[1 - turn], between[turn]
            begin = chunk_of(bounds, packed, T, slab)
            run(
                replace(inputs, v=grad_o, initial_state=grad_final),
                KdaOutputs(grad_v, grad_initial, None, workspace, grad_states[begin:], residual),
                backward=BackwardArguments(
                    checkpoints.data_ptr(), inputs.v.data_ptr(), states[begin:].data_ptr(), from_slab.data_ptr(),
                    to_slab.data_ptr(), slab, slab_slots, 256,
                ),
            )  # fmt: skip
    assert relative_error(grad_v, want["v"]) <= LIMIT
    assert relative_error(grad_initial, want["initial_state"]) <= LIMIT
    assert not residual.isnan().any()
    for n, (start, end) in enumerate(bounds):
        if start == end:
            assert torch.equal(grad_initial[n], grad_final[n]), (
                "a sequence without tokens changed its gradient"
            )
        for i, token in enumerate(range(start, end, 64)):
            stored = layouts.unpack_states(states[first(n, 64) + i])
            assert relative_error(stored, before[token]) <= LIMIT, (n, token)
            assert not grad_states[first(n, 64) + i].isnan().any(), (n, token)
    return grad_v, grad_initial, residual, states, grad_states


@pytest.mark.parametrize(
    ("lengths", "warpgroups", "slab_slots", "depth"), (((0, 1, 0, 64, 530, 0), 2, 5, 11), (530, 1, 1, 8))
)
def test_sequences_of_several_checkpoints(lengths, warpgroups, slab_slots, depth):
    """Two slabs, one of which begins within a sequence; rings with and without spare records."""
    check(lengths, 1, warpgroups, queues=1, depth=depth, ctas=1, device="cpu", slab_slots=slab_slots)


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("warpgroups", (1, 2))
@pytest.mark.parametrize("lengths", (1300, (0, 700, 1, 0, 64, 1600, 7, 0)), ids=("fixed", "packed"))
def test_every_schedule_gives_the_same_bits(lengths, warpgroups):
    """Queues that cut sequences, rings of one slot and more, few and many intra-chunk CTAs."""
    want = check(lengths, HV=3, warpgroups=warpgroups, queues=1, depth=16, ctas=1, device="cuda")
    for queues in (2, 4, 7, 20):
        for depth, ctas in ((8, 1), (8, 40), (10, 40), (13, 9), (16, 40)):
            found = check(lengths, 3, warpgroups, queues, depth, ctas, "cuda")
            for got, expected in zip(found, want, strict=True):
                assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), (queues, depth, ctas)
    for slab_slots in (1, 2, 5):
        found = check(lengths, 3, warpgroups, 4, 16, 40, "cuda", slab_slots)
        for got, expected in zip(found, want, strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), slab_slots
