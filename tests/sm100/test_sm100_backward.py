"""The backward on ptx-emulator: a reduced set of the kit's gradient cases, slabs, and what a forward saves for it.

Every change runs a case of each kind of gate (`test_packed` has the precomputed one) and of both modes, the nightly session the others.

No Blackwell GPU has run the kernels yet. `test_sm100_conformance` is for the first one.
"""

from itertools import pairwise

import pytest
import torch
from helpers.emulated_cases import BOUNDS, KIT, EmulatedBackend
from helpers.nightly import nightly
from helpers.saved_states import PACKED, check
from helpers.sm100_backward import gradients

from kda_core.testing import FAMILIES, make_inputs, record_calls
from kda_core.testing.gradients import GradientCase, gradient_errors
from kda_sm100.backend import Sm100Backend
from kda_sm100.config import ARCHS


class TestGradients(EmulatedBackend):
    backend, arch = "sm100", ARCHS[0]

    @pytest.mark.parametrize(
        "family",
        ("slow", "mixed", *map(nightly, sorted({*FAMILIES, "spikes"} - {"slow", "mixed"}))),
    )
    def test_gates(self, kda, family):
        with record_calls() as calls:
            HV = 1 if family == "slow" else 2
            kda.gradients_agree(kda.gradient_case(family, 70, H=1, HV=HV, initial_state=True))
        assert {call.backend for call in calls} == {"sm100"}

    @pytest.mark.parametrize("T", (0, 1, *map(nightly, (15, 64))))
    def test_length(self, kda, T):
        kda.gradients_agree(kda.gradient_case("slow", T, H=1, initial_state=True))

    @pytest.mark.parametrize("bounds", (BOUNDS[0], nightly(BOUNDS[1])), ids=str)
    @pytest.mark.parametrize("disable_recompute", (nightly(False), True))
    def test_packed(self, kda, bounds, disable_recompute):
        lengths = tuple(b - a for a, b in pairwise(bounds))
        case = kda.gradient_case(
            "memory", bounds[-1], H=1, HV=2, lengths=lengths, initial_state=True, state_v_first=True
        )
        call = case.arguments | {"disable_recompute": disable_recompute}
        kda.check_gradients(case, kda.gradients(call, case.grad_o, case.grad_final_state))

    @pytest.mark.nightly
    def test_batches_without_states(self, kda):
        case = kda.case("steep", 40, B=2, H=2, HV=4)
        kda.gradients_agree(GradientCase(case.inputs, of=("o",)))

    @pytest.mark.parametrize(
        "form",
        ("softplus, no dt_bias", "bf16 g", "fp32 beta", "negative eigenvalues", "no l2norm"),
    )
    @pytest.mark.nightly
    def test_form(self, kda, form):
        KIT.test_gradients_of_a_form(kda, form)

    @pytest.mark.nightly
    def test_state_layouts(self, kda):
        KIT.test_gradients_of_state_layouts(kda, (0, 17, 17, 64, 130))

    @pytest.mark.nightly
    @pytest.mark.parametrize("exponent", (-20, 20))
    def test_scale(self, kda, exponent):
        KIT.test_gradients_at_a_scale(kda, "steep", exponent)

    @pytest.mark.nightly
    @pytest.mark.parametrize("disable_recompute", (False, True))
    def test_segments_that_save_states(self, kda, disable_recompute):
        KIT.test_segments_that_save_states(kda, disable_recompute)

    @pytest.mark.nightly
    def test_tokens_behind_the_last_used_output(self, kda):
        KIT.test_gradients_behind_the_last_used_output(kda, "masked")


def case(family, T, **options):
    """Returns the arguments of a call, and its `GradientCase` with gradients of all outputs."""
    found = GradientCase(make_inputs(family, T, initial_state=True, **options), seed=1)
    return {n: y for n, y in found.arguments.items() if n != "output_final_state"}, found


def differences(found, want):
    """Returns the names of gradients that differ. Those of A_log and dt_bias are sums of slabs, in another order, and may differ a little."""
    near = lambda x, y: torch.allclose(x, y, rtol=1e-5, atol=1e-5)
    return [
        n for n, y in want.items() if not (near if n in ("A_log", "dt_bias") else torch.equal)(found[n], y)
    ]


def check_errors(found, given):
    errors = gradient_errors(found, given.exact, given.inputs.lengths)
    assert not {n: (e, given.limits[n]) for n, e in errors.items() if not e <= given.limits[n]}


@pytest.mark.nightly
def test_slabs_of_512_tokens_change_no_bit_of_the_gradients_of_tokens():
    """A sequence of three slots is cut between slabs, twice; others are empty, or lie in one slab. One call finds saved states, the
    other computes them anew, slab by slab."""
    x, given = case("slow", 1050, H=1, lengths=(0, 1030, 20, 0))
    outputs = given.grad_o, given.grad_final_state
    want = gradients(x, *outputs, spacing=512)
    check_errors(want, given)
    assert not differences(gradients(x, *outputs, spacing=0, slab_slots=1), want)


@pytest.mark.parametrize("long", (140, nightly(330)))
def test_slabs_of_64_tokens_change_no_bit_of_the_gradients_of_tokens(long):
    """As above, with what a forward saves every 64 tokens."""
    x, given = case("slow", long + 20, H=1, lengths=(0, long, 20, 0))
    outputs = given.grad_o, given.grad_final_state
    want = gradients(x, *outputs, spacing=512)
    check_errors(want, given)
    assert not differences(gradients(x, *outputs, spacing=64, slab_slots=2 if long > 200 else 1), want)


@pytest.mark.parametrize(("T", "HV"), ((70, 1), nightly(130, 2)))
def test_every_schedule_gives_the_same_bits(T, HV):
    x, given = case("mixed", T, H=1, HV=HV)
    found = [gradients(x, given.grad_o, given.grad_final_state, seed=seed) for seed in range(2)]
    assert all(torch.equal(one[n], found[0][n]) for one in found[1:] for n in one)


@pytest.mark.parametrize(("lengths", "spacing"), ((None, 64), (PACKED, 64), (PACKED, 512)), ids=str)
def test_saved_states_and_residuals(lengths, spacing):
    T = 70 if lengths is None else sum(lengths)
    x = make_inputs("slow", T, B=2 if lengths is None else 1, H=1, HV=2, lengths=lengths, initial_state=True)
    v_first = {"state_v_first": True, "initial_state": x.arguments["initial_state"].mT.contiguous()}
    check(Sm100Backend(), ARCHS[0], x.arguments | (v_first if spacing == 64 else {}), spacing)
