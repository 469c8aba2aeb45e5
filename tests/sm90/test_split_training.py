"""Training calls that kda-cp splits over kda-sm90: what the forward saves, and the gradients, compared with fp64 autograd."""

import pytest
import torch

from kda_core import chunk_kda
from kda_core.registry import record_calls
from kda_core.testing import GradientCase, gradient_errors, make_inputs
from kda_cp import Plan
from kda_cute.testing.emulation import emulated
from kda_sm90.config import ARCH

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def step(case, plan, **more):
    """Returns the gradients of a call by a plan. Asserts that kda-cp has executed both directions on kda-sm90."""
    leaves = {n: x.detach().requires_grad_() for n in NAMES if (x := case.arguments.get(n)) is not None}
    with record_calls() as calls:
        o, state = chunk_kda(**case.arguments | leaves | more, backend="sm90", context_parallel=plan)
        found = torch.autograd.grad((o, state), list(leaves.values()), (case.grad_o, case.grad_final_state))
    assert [(c.backend, c.entry, c.planner) for c in calls] == [
        ("sm90", "chunk_fwd", "cp"), ("sm90", "chunk_bwd", "cp"),
    ]  # fmt: skip
    return dict(zip(leaves, found, strict=True))


def check(case, found):
    errors = gradient_errors(found, case.exact, case.inputs.lengths)
    assert all(errors[n] <= case.limits[n] for n in errors), (errors, case.limits)


@pytest.mark.parametrize("disable_recompute", (False, True), ids=("default", "disable_recompute"))
def test_gradients_of_a_split_call(disable_recompute):
    """With three segments the gradients of the last one reach the first one through the transition of the middle one."""
    segments = ((512, 512, 36), (30,)) if disable_recompute else ((512, 36), (0,), (30,))
    lengths = tuple(map(sum, segments))
    recipe = {"lengths": lengths, "initial_state": True, "state_v_first": disable_recompute}
    case = GradientCase(make_inputs("memory", sum(lengths), H=1, **recipe))
    with emulated("sm90", ARCH, races=("shared",)):
        found = step(case, Plan(segments), disable_recompute=disable_recompute)
    check(case, found)


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
    found = step(case, Plan(segments), **more)
    check(case, found)
    again = step(case, Plan(segments), **more)
    assert all(torch.equal(found[n], again[n]) for n in found)
