"""A reduced conformance set on ptx-emulator: on any machine, with small shapes, every kind of call.

It shows that the kernels do what they say. No Blackwell GPU has run them; `test_conformance` is for the first one.
"""

from itertools import pairwise

import pytest

from kda_core.testing import FAMILIES
from kda_core.testing.conformance import BackendConformance, same
from kda_core.testing.emulation import emulated
from kda_core.testing.runner import EMULATED, TESTED, Runner
from kda_sm100.config import ARCHS

KIT = BackendConformance()  # for its tests, called one by one


@pytest.fixture
def kda(request):
    with emulated("sm100", ARCHS[0]):
        runner = Runner("sm100", "cpu", 128, quick=True)
        assert runner.tested()[2] == EMULATED
        request.node.user_properties.append((TESTED, runner.tested()))
        yield runner


@pytest.mark.parametrize("T", (0, 1, 15, 17, 64, 130))
def test_length(kda, T):
    kda.agrees(kda.case("slow", T, H=1, initial_state=True))


def test_rings_that_are_used_again(kda):
    kda.agrees(kda.case("slow", 300, H=1, initial_state=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_gates(kda, family):
    kda.agrees(kda.case(family, 100, H=1))


@pytest.mark.parametrize("heads", ((2, 4), (1, 3)), ids=str)
def test_heads(kda, heads):
    kda.agrees(kda.case("steep", 40, B=2, H=heads[0], HV=heads[1], initial_state=True))


@pytest.mark.parametrize("bounds", ((0, 15, 15, 79, 80), (0, 0, 70), (0, 65, 130, 130)), ids=str)
def test_packed(kda, bounds):
    lengths = tuple(b - a for a, b in pairwise(bounds))
    kda.agrees(kda.case("memory", bounds[-1], H=1, HV=2, lengths=lengths, initial_state=True))


@pytest.mark.parametrize(
    "form", ("no A_log", "softplus, no dt_bias", "bf16 g", "fp32 beta", "negative eigenvalues", "no l2norm")
)
def test_form(kda, form):
    KIT.test_form(kda, form)


@pytest.mark.parametrize("bounds", (None, (0, 17, 17, 64, 130)), ids=("fixed", "packed"))
def test_state_layouts(kda, bounds):
    KIT.test_state_layouts(kda, bounds)


@pytest.mark.parametrize("size", (32, 64))
def test_intermediate_states(kda, size):
    KIT.test_intermediate_states(kda, None, True, size)


def test_intermediate_states_of_packed_sequences(kda):
    KIT.test_intermediate_states(kda, (0, 17, 17, 64, 130), False, 64)


def test_segments(kda):
    KIT.test_segments(kda, "memory")


def test_poisoned_outputs_and_workspace(kda):
    KIT.test_poisoned_outputs_and_workspace(kda)


def test_no_initial_state_is_zeros(kda):
    KIT.test_no_initial_state_is_zeros(kda, "mixed")


def test_a_pinned_sequence_has_the_same_bits_alone_and_in_a_batch(kda):
    x = kda.inputs("slow", 70, B=2, H=1, initial_state=True)
    o, state = kda(x, output_final_state=True, pin=True)
    one = x | {n: x[n][1:] for n in ("q", "k", "v", "g", "beta", "initial_state")}
    assert same(kda(one, output_final_state=True, pin=True), (o[1:], state[1:]))


def test_no_schedule_changes_a_bit():
    runner = Runner("sm100", "cpu", 128, quick=True)
    found = []
    for seed in range(4):
        with emulated("sm100", ARCHS[0], seed=seed):
            x = runner.inputs("slow", 260, H=1, initial_state=True)
            found.append(runner(x, output_final_state=True))
    assert all(same(one, found[0]) for one in found[1:])
