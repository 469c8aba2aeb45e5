"""The backward's launches, compared with fp64 autograd through the token recurrence."""

import pytest
import torch
from helpers.sm90_backward import gradients, oracle, relative_error

from kda_core.testing import FAMILIES, make_inputs

#: Largest relative error of a gradient. The specification of the backward (`kda_core.testing.backward_specification`) has 2e-3 to 6e-3
#: on these inputs, and up to 1.3e-2 for A_log, whose sums over all tokens cancel.
LIMIT, LIMIT_A_LOG = 8e-3, 2.5e-2


def spikes(x):
    """Unbounded gates of which 2% forget everything: rows of a block then lie beyond the range of factors."""
    rng = torch.Generator().manual_seed(5)
    forget = torch.rand(x["g"].shape, generator=rng) < 0.02
    x["g"] = torch.where(forget, 40.0, x["g"].float().cpu()).to(x["g"])
    return x


def check(x, v_first=False, scale=1.0, spacing=0, slab_slots=None):
    """Compares every gradient of a call, for random gradients of its outputs. ``spacing`` and ``slab_slots`` as in `gradients`."""
    rng = torch.Generator().manual_seed(1)
    draw = lambda like: (torch.randn(like.shape, generator=rng) * scale).to(like.device)
    grad_o, grad_final = draw(x["v"]).bfloat16(), None
    if x.get("initial_state") is not None:
        grad_final = draw(x["initial_state"])
    sms = 6 if grad_o.device.type == "cpu" else 132
    if v_first:
        swapped = x | {"initial_state": x["initial_state"].mT.contiguous(), "state_v_first": True}
        found = gradients(swapped, grad_o, grad_final.mT.contiguous(), sms, spacing, slab_slots)
        found["initial_state"] = found["initial_state"].mT
    else:
        found = gradients(x, grad_o, grad_final, sms, spacing, slab_slots)
    for name, want in oracle(x, grad_o, grad_final).items():
        assert torch.isfinite(found[name]).all(), name
        if (want / scale).abs().max() > 1e-6:  # not the derivative of a saturated gate
            limit = LIMIT_A_LOG if name == "A_log" else LIMIT
            assert relative_error(found[name], want) <= limit, name
    return found


def arguments(family, T, device="cpu", **options):
    return make_inputs(family, T, device=device, **options).arguments


def test_fixed_lengths_and_grouped_value_heads():
    check(arguments("steep", 70, H=1, HV=2, initial_state=True))


def test_packed_sequences_some_of_them_empty():
    check(
        arguments("memory", 150, H=1, lengths=(0, 70, 15, 65, 0), initial_state=True),
        v_first=True,
        spacing=64,
        slab_slots=4,  # the second sequence is cut
    )


def test_gates_that_forget_everything():
    check(spikes(arguments("mixed", 66, H=1)), spacing=512)


def test_replayed_launches_read_new_values_and_new_bounds():
    """A CUDA graph holds launches with fixed arguments over a workspace that the last replay has left. Here two slabs share it."""
    x, y = (
        arguments("slow", 80, H=1, lengths=lengths, initial_state=True, seed=seed)
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
    check(arguments(family, 700, "cuda", H=2, HV=4, initial_state=initial_state), spacing=spacing)


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("exponent", (-30, -20, 20))
def test_errors_do_not_depend_on_the_scale_of_the_gradients(exponent):
    check(arguments("steep", 300, "cuda", H=2, initial_state=True), scale=2.0**exponent)


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("g", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("lengths", (None, (700, 0, 64, 1300, 5)), ids=("fixed", "packed"))
@pytest.mark.parametrize("spacing", (512, 64))
def test_slabs_change_no_bit_of_the_gradients_of_tokens(spacing, lengths, g):
    T = sum(lengths or (1500,))
    x = arguments("slow", T, "cuda", H=2, HV=4, lengths=lengths, initial_state=True)
    x["g"] = x["g"].to(g)
    want = check(x, spacing=spacing)
    for slab_slots in (1, 2, 3):
        found = check(x, spacing=spacing, slab_slots=slab_slots)
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            assert torch.equal(found[name], want[name]), (slab_slots, name)


@pytest.mark.arch((9, 0))
def test_two_runs_have_the_same_bits():
    x = arguments("slow", 2000, "cuda", H=4, HV=8, lengths=(700, 0, 1300), initial_state=True)
    first, second = check(x), check(x)
    for name, found in first.items():
        assert torch.equal(found, second[name]), name


@pytest.mark.arch((9, 0))
def test_forgetting_gates_on_a_gpu():
    check(spikes(arguments("mixed", 1000, "cuda", H=2, initial_state=True)))
