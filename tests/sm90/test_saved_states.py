"""What a forward saves for its backward: states every 64 or 512 tokens, and R, compared with the token recurrence in fp64."""

import functools

import pytest
import torch
from helpers import saved_states
from helpers.saved_states import PACKED

from kda_core.testing import make_inputs
from kda_sm90.backend import Sm90Backend
from kda_sm90.config import ARCH

forward, check = (
    functools.partial(function, Sm90Backend(), ARCH, races=("shared",))
    for function in (saved_states.forward, saved_states.check)
)


@pytest.mark.parametrize(("lengths", "spacing"), ((None, 64), (PACKED, 64), (PACKED, 512)), ids=str)
def test_saved_states_and_residuals(lengths, spacing):
    T = 70 if lengths is None else sum(lengths)
    x = make_inputs("slow", T, B=2 if lengths is None else 1, H=1, HV=2, lengths=lengths, initial_state=True)
    v_first = {"state_v_first": True, "initial_state": x.arguments["initial_state"].mT.contiguous()}
    check(x.arguments | (v_first if spacing == 64 else {}), spacing)


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("spacing", (64, 512))
@pytest.mark.parametrize("lengths", (None, (0, 700, 1, 0, 1100, 63)), ids=("fixed", "packed"))
@pytest.mark.parametrize("heads", (1, 24), ids=("few heads", "many heads"))
def test_saved_states_on_a_gpu(heads, lengths, spacing):
    T = 1300 if lengths is None else sum(lengths)
    x = make_inputs("slow", T, H=heads, lengths=lengths, device="cuda", initial_state=True)
    check(x.arguments, spacing)


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("heads", (2, 64))
@pytest.mark.parametrize("family", ("slow", "mixed"))
def test_saving_changes_no_bit_of_the_outputs(family, heads):
    x = make_inputs(family, 1500, H=heads, device="cuda", initial_state=True).arguments
    plain = forward(x, 0)
    for spacing in (64, 512):
        saving = forward(x, spacing)
        assert torch.equal(saving.o, plain.o) and torch.equal(saving.final_state, plain.final_state)
