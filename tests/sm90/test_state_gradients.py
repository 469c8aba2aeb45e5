"""How segments act on gradients of states: the launch of the mode ``reverse_summarize``, compared with fp64 autograd."""

import pytest
import torch
from helpers.state_gradients import check, summaries

from kda_sm90 import backward
from kda_sm90.backend import Sm90Backend
from kda_sm90.config import ARCH


@pytest.mark.parametrize(
    "sms", [pytest.param(6, id="both halves in a CTA"), pytest.param(30, id="a CTA per half")]
)
def test_segments_act_on_gradients_of_states(sms, monkeypatch):
    for module in ("backward", "backend"):
        monkeypatch.setattr(f"kda_sm90.{module}.sm_count", lambda: sms)
    backward.summary_of.cache_clear()
    check(Sm90Backend(), ARCH, "memory", (70, 0, 130, 64), (1, 2), "cpu", last=2, races=("shared",))
    backward.summary_of.cache_clear()


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("family", ("steep", "slow", "memory", "mixed"))
@pytest.mark.parametrize(
    "lengths", [(512, 512, 476), (1024, 0, 1, 63, 512), (1500,), (512,) * 20], ids=lambda x: str(len(x))
)
def test_segments_act_on_gradients_of_states_on_a_gpu(lengths, family):
    check(Sm90Backend(), ARCH, family, lengths, (2, 4), "cuda", last=len(lengths) - 1)


@pytest.mark.arch((9, 0))
def test_two_runs_have_the_same_bits():
    first, second = (
        summaries(Sm90Backend(), ARCH, "slow", (4096,) * 16, (4, 4), "cuda")[0] for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
