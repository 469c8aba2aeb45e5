"""The workspace of a plan: its size, and the effect of a workspace that the caller passes."""

import pytest
import torch
from helpers.inputs import call

from kda_core import BACKEND_ABI, chunk_kda
from kda_core.errors import PlannerError, ShapeError
from kda_core.registry import REGISTRY, record_calls

PLANNER = f"""
from kda_core.backend import PlannerSpec
SPEC = PlannerSpec(name="greedy", abi={BACKEND_ABI!r}, target="fake_greedy_backend:Greedy", install="pip install greedy")
"""

GREEDY = """
from kda_core.contract import ProblemShape
from kda_core.reference import ReferenceBackend

class Plan:
    def to_json(self):
        return "greedy"

class Greedy:
    needs, seen = 1000, []

    def plan(self, inputs, spec, backend):
        return Plan()

    def plan_from_json(self, text):
        return Plan()

    def workspace_bytes(self, plan, inputs, spec, backend):
        assert isinstance(plan, Plan) and spec.name == "reference" and isinstance(backend, ReferenceBackend)
        return self.needs

    def execute(self, plan, inputs, outputs, backend):
        self.seen.append(0 if outputs.workspace is None else outputs.workspace.numel())
        return backend.chunk_fwd(inputs, outputs)
"""

X = call(T=20)


@pytest.fixture
def greedy(install):
    """A planner that splits every call and needs `needs` bytes; `seen` holds the sizes that it received."""
    install("greedy", group="kda_core.planners", source=PLANNER, backend=GREEDY)
    import fake_greedy_backend

    return fake_greedy_backend


def ran(workspace=None, **more):
    """Returns the planner that executed a call with a workspace of this size."""
    if workspace is not None:
        more["workspace"] = torch.empty(workspace, dtype=torch.uint8)
    with record_calls() as calls:
        chunk_kda(**X, **more)
    return calls[0].planner


def direct_calls_need(monkeypatch, needed):
    monkeypatch.setattr("kda_core.reference.ReferenceBackend.workspace_bytes", lambda self, shape: needed)
    REGISTRY.refresh()


def test_core_allocates_the_workspace_of_the_plan(greedy, monkeypatch):
    direct_calls_need(monkeypatch, 10)
    assert ran() == "greedy" and ran(context_parallel=greedy.Plan()) == "greedy"
    assert greedy.Greedy.seen == [1000, 1000]


@pytest.mark.parametrize("direct", [10, 5000])
def test_a_call_is_direct_if_the_plan_does_not_fit_the_workspace(greedy, monkeypatch, direct):
    direct_calls_need(monkeypatch, direct)
    assert ran(1000) == ran(6000) == "greedy" and greedy.Greedy.seen[-2:] == [1000, 6000]
    least = min(direct, 1000)
    if direct == 10:
        assert ran(999) is ran(10) is None
    with pytest.raises(
        ShapeError, match=f"workspace: expected at least {least} bytes, got {least - 1} bytes"
    ):
        ran(least - 1)


@pytest.mark.parametrize("direct", [10, 5000])
def test_a_plan_of_the_caller_that_does_not_fit_the_workspace_raises(greedy, monkeypatch, direct):
    direct_calls_need(monkeypatch, direct)
    assert ran(1000, context_parallel=greedy.Plan()) == "greedy"
    with pytest.raises(ShapeError, match="workspace: expected at least 1000 bytes, got 999 bytes"):
        ran(999, context_parallel=greedy.Plan())


def test_a_planner_without_workspace_bytes_gets_the_workspace_of_a_direct_call(greedy, monkeypatch):
    direct_calls_need(monkeypatch, 10)
    monkeypatch.delattr(greedy.Greedy, "workspace_bytes")
    assert ran() == "greedy" and greedy.Greedy.seen == [10]


@pytest.mark.parametrize("wrong", [None, -1, 1.5, True, 2**63, "1000"])
def test_a_wrong_workspace_size_is_an_error_of_the_planner(greedy, monkeypatch, wrong):
    monkeypatch.setattr(greedy.Greedy, "needs", wrong)
    with pytest.raises(PlannerError, match="'greedy'.*workspace_bytes returned .*not an int of at least 0"):
        ran()
