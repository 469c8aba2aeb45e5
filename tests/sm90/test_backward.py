"""The backward's launches, compared with fp64 autograd through the token recurrence."""

import functools

import pytest
import torch
from helpers.sm90_backward import gradients

from kda_core.testing import FAMILIES, make_inputs
from kda_core.testing.gradients import GradientCase, gradient_errors


@functools.lru_cache(maxsize=4)
def case(family, T, device="cpu", g=torch.bfloat16, **options):
    """Returns a call with random gradients of o and, with an initial state, of the final state. Its exact gradients and the largest
    admissible errors, which follow from the specification of the backward, are computed once. ``g`` is the dtype of a raw g."""
    inputs = make_inputs(family, T, device=device, **options)
    if inputs.arguments.get("use_gate_in_kernel"):
        inputs = inputs.replace(g=inputs.arguments["g"].to(g))
    state = "initial_state" in inputs.arguments
    return GradientCase(inputs, ("o", "final_state") if state else ("o",), seed=1)


def check(case, v_first=False, scale=1.0, spacing=0, slab_slots=None):
    """Compares every gradient of a call with the exact one, for gradients of the outputs that are `scale` times those of the case.
    ``spacing`` and ``slab_slots`` as in `gradients`."""
    x = {n: y for n, y in case.arguments.items() if n != "output_final_state"}
    grad_o, grad_final = (None if d is None else d * scale for d in (case.grad_o, case.grad_final_state))
    sms = 6 if grad_o.device.type == "cpu" else 132
    if v_first:
        swapped = x | {"initial_state": x["initial_state"].mT.contiguous(), "state_v_first": True}
        found = gradients(swapped, grad_o, grad_final.mT.contiguous(), sms, spacing, slab_slots)
        found["initial_state"] = found["initial_state"].mT
    else:
        found = gradients(x, grad_o, grad_final, sms, spacing, slab_slots)
    unscaled = {n: d.double() / scale for n, d in found.items()}
    errors = gradient_errors(unscaled, case.exact, case.inputs.lengths)
    too_large = {n: (e, case.limits[n]) for n, e in errors.items() if not e <= case.limits[n]}
    assert not too_large, f"(error, limit) of gradients: {too_large}"
    return found


def test_fixed_lengths_and_grouped_value_heads():
    check(case("steep", 70, H=1, HV=2, initial_state=True))


def test_packed_sequences_some_of_them_empty():
    check(
        case("memory", 150, H=1, lengths=(0, 70, 15, 65, 0), initial_state=True),
        v_first=True,
        spacing=64,
        slab_slots=4,  # the second sequence is cut
    )


def test_gates_that_forget_everything():
    check(case("spikes", 66, H=1), spacing=512)


def test_replayed_launches_read_new_values_and_new_bounds():
    """A CUDA graph holds launches with fixed arguments over a workspace that the last replay has left. Here two slabs share it."""
    x, y = (
        make_inputs("slow", 80, H=1, lengths=lengths, initial_state=True, seed=seed).arguments
        for seed, lengths in enumerate(((17, 0, 63), (60, 20, 0)))
    )
    grad_o, new_o = (
        torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (1, 2)
    )
    grad_final, new_final = (
        torch.randn(x["initial_state"].shape, generator=torch.Generator().manual_seed(i)) for i in (3, 4)
    )
    want = gradients(y, new_o, new_final, 6, 512, 2)

    def change():
        for old, new in (
            (grad_o, new_o),
            (grad_final, new_final),
            *((x[n], t) for n, t in y.items() if torch.is_tensor(t)),
        ):
            old.copy_(new)

    found = gradients(x, grad_o, grad_final, 6, 512, 2, change)
    for name, gradient in want.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("spacing", (0, 512, 64))
@pytest.mark.parametrize("initial_state", (False, True), ids=("no states", "states"))
@pytest.mark.parametrize("family", FAMILIES)
def test_gates_on_a_gpu(family, initial_state, spacing):
    check(case(family, 700, "cuda", H=2, HV=4, initial_state=initial_state), spacing=spacing)


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("exponent", (-30, -20, 20))
def test_errors_do_not_depend_on_the_scale_of_the_gradients(exponent):
    check(case("steep", 300, "cuda", H=2, initial_state=True), scale=2.0**exponent)


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("g", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("lengths", (None, (700, 0, 64, 1300, 5)), ids=("fixed", "packed"))
@pytest.mark.parametrize("spacing", (512, 64))
def test_slabs_change_no_bit_of_the_gradients_of_tokens(spacing, lengths, g):
    T = sum(lengths or (1500,))
    x = case("slow", T, "cuda", g, H=2, HV=4, lengths=lengths, initial_state=True)
    want = check(x, spacing=spacing)
    for slab_slots in (1, 2, 3):
        found = check(x, spacing=spacing, slab_slots=slab_slots)
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            assert torch.equal(found[name], want[name]), (slab_slots, name)


@pytest.mark.arch((9, 0))
def test_two_runs_have_the_same_bits():
    x = case("slow", 2000, "cuda", H=4, HV=8, lengths=(700, 0, 1300), initial_state=True)
    first, second = check(x), check(x)
    for name, found in first.items():
        assert torch.equal(found, second[name]), name


@pytest.mark.arch((9, 0))
def test_forgetting_gates_on_a_gpu():
    check(case("spikes", 1000, "cuda", H=2, initial_state=True))
