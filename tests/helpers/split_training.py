"""Training calls that kda-cp splits over a backend: what the forward saves, and the gradients, compared with fp64 autograd."""

import torch

from kda_core import chunk_kda
from kda_core.registry import record_calls
from kda_core.testing import GradientCase, gradient_errors, make_inputs
from kda_cp import Plan
from kda_cute.testing.emulation import emulated

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def step(backend, case, plan, **more):
    """Returns the gradients of a call by a plan. Asserts that kda-cp has executed both directions on the backend."""
    leaves = {n: x.detach().requires_grad_() for n in NAMES if (x := case.arguments.get(n)) is not None}
    with record_calls() as calls:
        o, state = chunk_kda(**case.arguments | leaves | more, backend=backend, context_parallel=plan)
        found = torch.autograd.grad((o, state), list(leaves.values()), (case.grad_o, case.grad_final_state))
    assert [(c.backend, c.entry, c.planner) for c in calls] == [
        (backend, "chunk_fwd", "cp"), (backend, "chunk_bwd", "cp"),
    ]  # fmt: skip
    return dict(zip(leaves, found, strict=True))


def check(case, found):
    errors = gradient_errors(found, case.exact, case.inputs.lengths)
    assert all(errors[n] <= case.limits[n] for n in errors), (errors, case.limits)


def check_emulated(backend, arch, disable_recompute, **emulation):
    """Checks a call by emulated kernels. With three segments the gradients of the last one reach the first one through the transition of the
    middle one."""
    segments = ((512, 512, 36), (30,)) if disable_recompute else ((512, 36), (0,), (30,))
    lengths = tuple(map(sum, segments))
    recipe = {"lengths": lengths, "initial_state": True, "state_v_first": disable_recompute}
    case = GradientCase(make_inputs("memory", sum(lengths), H=1, **recipe))
    with emulated(backend, arch, **emulation):
        found = step(backend, case, Plan(segments), disable_recompute=disable_recompute)
    check(case, found)
