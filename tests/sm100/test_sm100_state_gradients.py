"""How segments act on gradients of states: the launches of the mode ``reverse_summarize``, and training calls that kda-cp splits. Emulated,
and compared with fp64 autograd."""

import pytest
import torch
from helpers.split_training import check_emulated
from helpers.state_gradients import check, summaries

from kda_sm100 import backward
from kda_sm100.backend import Sm100Backend
from kda_sm100.config import ARCHS

LENGTHS = (70, 0, 130, 64)


def test_segments_act_on_gradients_of_states():
    check(Sm100Backend(), ARCHS[0], "memory", LENGTHS, (1, 2), "cpu", last=2)


@pytest.mark.nightly
def test_slabs_and_schedules_change_no_bit(monkeypatch):
    """In slabs of two slots, segment 2 has three chunks in two slabs."""
    call = Sm100Backend(), ARCHS[0], "slow", LENGTHS, (1, 1), "cpu"
    found = [summaries(*call, last=2, seed=seed)[0] for seed in (1, 2)]
    of = backward.summary_slabs_of
    monkeypatch.setattr(backward, "summary_slabs_of", lambda shape: of(shape)._replace(slots=2))
    backward.summary_of.cache_clear()
    found.append(check(*call, last=2))
    backward.summary_of.cache_clear()
    assert all(torch.equal(x, y) for one in found[1:] for x, y in zip(one, found[0], strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("disable_recompute", (False, True), ids=("default", "disable_recompute"))
def test_gradients_of_a_split_call(disable_recompute):
    check_emulated("sm100", ARCHS[0], disable_recompute)
