"""Training calls that kda-cp splits over kda-sm90, compared with fp64 autograd."""

import pytest
import torch
from helpers.split_training import check, check_emulated, step

from kda_core.testing import GradientCase, make_inputs
from kda_cp import Plan
from kda_sm90.config import ARCH


@pytest.mark.parametrize("disable_recompute", (False, True), ids=("default", "disable_recompute"))
def test_gradients_of_a_split_call(disable_recompute):
    check_emulated("sm90", ARCH, disable_recompute, races=("shared",))


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("disable_recompute", (False, True), ids=("default", "disable_recompute"))
@pytest.mark.parametrize("family", ("steep", "slow", "memory", "mixed"))
@pytest.mark.parametrize("lengths", ((4000,), (3000, 0, 1500, 100)), ids=str)
def test_gradients_of_a_split_call_on_a_gpu(lengths, family, disable_recompute):
    recipe = {"H": 2, "HV": 4, "lengths": lengths, "initial_state": True, "device": "cuda"}
    case = GradientCase(make_inputs(family, sum(lengths), **recipe))
    segments = tuple((512, 512, n - 1024) if n > 1024 else (n,) for n in lengths)
    offsets = case.arguments["cu_seqlens"].cpu()  # a plan needs the lengths on the host
    more = {"disable_recompute": disable_recompute, "cu_seqlens_cpu": offsets}
    found = step("sm90", case, Plan(segments), **more)
    check(case, found)
    again = step("sm90", case, Plan(segments), **more)
    assert all(torch.equal(found[n], again[n]) for n in found)
