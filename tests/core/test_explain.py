"""`explain` names the rule, the plan and the workspace of the actual call, for any planner and any kind of tensor."""

from dataclasses import replace

import pytest
import torch
from helpers.inputs import call
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kda_core import BACKEND_ABI, chunk_kda, explain, use_backend
from kda_core.contract import KdaInputs
from kda_core.errors import ArgumentError, BackendUnsupportedError, DtypeError, NoEligibleBackendError
from kda_core.registry import record_calls

X = call(T=20)
PACKED = X | {"cu_seqlens": torch.tensor([0, 5, 20])}

PLANNER = f"""
from kda_core.backend import PlannerSpec
SPEC = PlannerSpec(name="thirds", abi={BACKEND_ABI!r}, target="fake_thirds_backend:Thirds", install="pip install thirds")
"""

THIRDS = """
class Plan:
    def __init__(self, cuts):
        self.cuts = cuts

    def __str__(self):
        return f"cuts at {self.cuts}"

    def to_json(self):
        return ",".join(map(str, self.cuts))

class Thirds:
    made, seen = [], []

    def plan(self, inputs, spec, backend):
        lengths = inputs.sequence_lengths()
        self.made.append((lengths, inputs.q.device.type, inputs.shape.device_type))
        return None if lengths is None or max(lengths) < 9 else Plan([n // 3 for n in lengths])

    def plan_from_json(self, text):
        return Plan([int(n) for n in text.split(",")])

    def workspace_bytes(self, plan, inputs, spec, backend):
        return 1000 * len(plan.cuts)

    def execute(self, plan, inputs, outputs, backend):
        self.seen.append((str(plan), outputs.workspace.numel()))
        return backend.chunk_fwd(inputs, outputs)
"""


@pytest.fixture
def thirds(install):
    """A planner that cuts sequences of 9 tokens or more. `made`: the calls that it planned; `seen`: the plans and workspaces that it
    executed."""
    install("thirds", group="kda_core.planners", source=PLANNER, backend=THIRDS)
    import fake_thirds_backend

    return fake_thirds_backend.Thirds


def on_gpu(x, arch=(12, 0)):
    """Returns the shape of a call on a GPU of this architecture."""
    return replace(explain(**x).shape, device_type="cuda", arch=arch)


# ---- the rule


def test_the_rule_is_named_if_no_backend_serves_the_call(install, monkeypatch):
    install("picky", refuses="not today")
    assert explain(**X).rule == "automatic" and explain(**X).backend == "reference"
    found = explain(**X, backend="picky")
    assert (found.backend, found.rule) == (None, "backend=") and "not today" in found.error
    with use_backend("picky"):
        found = explain(**X)
    assert (found.backend, found.rule) == (None, "use_backend") and "not today" in found.error
    monkeypatch.setenv("KDA_BACKEND", "picky")
    found = explain(**X)
    assert (found.backend, found.rule) == (None, "KDA_BACKEND") and "not today" in found.error
    assert "backend   none (choice: KDA_BACKEND)" in str(found)
    with pytest.raises(NoEligibleBackendError):
        chunk_kda(**X)


def test_a_backend_that_is_named_by_any_rule_is_not_listed_as_refusing(monkeypatch):
    shape = on_gpu(X)
    assert "reference" in [r.name for r in explain(shape).refusals]
    named = explain(shape, backend="reference")
    with use_backend("reference"):
        used = explain(shape)
    monkeypatch.setenv("KDA_BACKEND", "reference")
    for found in (named, used, explain(shape)):
        assert found.backend == "reference" and "reference" not in [r.name for r in found.refusals]


# ---- the plan and its workspace


def test_a_shape_is_explained_like_the_call_itself(thirds):
    real = explain(**X)
    assert real.plan == "thirds: cuts at [6]" and real.workspace_bytes == 1000
    of_shape = explain(real.shape)
    assert of_shape == real
    assert explain(real.shape, context_parallel="off").plan == "direct"
    assert explain(real.shape, context_parallel="off").workspace_bytes == 0
    with record_calls() as calls:
        chunk_kda(**X)
    assert [c.planner for c in calls] == ["thirds"] and thirds.seen == [("cuts at [6]", 1000)]
    gpu = explain(on_gpu(X), backend="reference")
    assert gpu.plan == "thirds: cuts at [6]" and thirds.made[-1] == ((20,), "meta", "cuda")


def test_a_packed_shape_is_planned_by_the_given_lengths(thirds):
    real = explain(**PACKED)
    assert real.plan == "thirds: cuts at [1, 5]" and real.workspace_bytes == 2000
    assert explain(real.shape, lengths=(5, 15)) == real
    assert explain(real.shape, lengths=(13, 7)).plan == "thirds: cuts at [4, 2]"
    unknown = explain(real.shape)
    assert unknown.plan.startswith("unknown: it depends on the lengths") and unknown.workspace_bytes == 0
    assert explain(real.shape, context_parallel="off").plan == "direct"
    gpu = on_gpu(PACKED)
    assert explain(gpu, backend="reference", lengths=[5, 15]).plan == "thirds: cuts at [1, 5]"


@pytest.mark.parametrize("lengths", [(5, 14), (5, 16), (20,), (5, 5, 10), (-5, 25)])
def test_lengths_that_do_not_fit_the_shape_are_refused(lengths):
    shape = explain(**PACKED).shape
    with pytest.raises(
        ArgumentError, match="lengths: expected 2 whole numbers of at least 0 with the sum T=20, got"
    ):
        explain(shape, lengths=lengths)


def test_the_other_arguments_of_a_shape_are_checked():
    shape = explain(**X).shape
    with pytest.raises(ArgumentError, match="lengths: expected None for a call of fixed length"):
        explain(shape, lengths=(20,))
    with pytest.raises(
        ArgumentError, match="context_parallel: expected 'auto', 'off' or a plan, got 'always'"
    ):
        explain(shape, context_parallel="always")
    with pytest.raises(DtypeError, match="backend: expected the name of a backend"):
        explain(shape, backend=3)
    with pytest.raises(TypeError, match="output_final_state"):
        explain(shape, output_final_state=True)


def test_a_workspace_of_the_explained_size_is_used_and_a_smaller_one_explained(thirds):
    size = explain(**X).workspace_bytes
    enough, little = (torch.empty(n, dtype=torch.uint8) for n in (size, size - 1))
    assert explain(**X, workspace=enough).plan == "thirds: cuts at [6]"
    chunk_kda(**X, workspace=enough)
    assert thirds.seen == [("cuts at [6]", size)]
    found = explain(**X, workspace=little)
    assert (
        found.plan.startswith("direct (the workspace has less than 1000 bytes") and found.workspace_bytes == 0
    )
    chunk_kda(**X, workspace=little)
    assert len(thirds.seen) == 1
    forced = {"context_parallel": thirds().plan_from_json("3"), "workspace": little}
    found = explain(**X, **forced)
    assert found.error == "ShapeError: workspace: expected at least 1000 bytes, got 999 bytes"
    with pytest.raises(ArgumentError, match="workspace: expected at least 1000 bytes, got 999 bytes"):
        chunk_kda(**X, **forced)


def test_an_error_of_the_planner_is_the_error_of_the_call(thirds, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of ideas")

    with monkeypatch.context() as m:
        m.setattr(thirds, "plan", fail)
        found = explain(**X)
        assert (found.backend, found.plan, found.workspace_bytes) == ("reference", "none", 0)
        assert "out of ideas" in found.error
        with pytest.raises(RuntimeError, match="out of ideas"):
            chunk_kda(**X)
    monkeypatch.setattr(thirds, "explain", fail, raising=False)  # no call needs it
    found = explain(**X)
    assert found.error is None and found.plan.startswith("thirds: cuts at [6]; the planner cannot explain it")


def test_a_wrong_environment_is_the_error_of_the_call(thirds, monkeypatch):
    monkeypatch.setenv("KDA_CP", "maybe")
    found = explain(**X)
    assert found.error.startswith("ArgumentError: KDA_CP: expected") and found.plan == "none"
    with pytest.raises(ArgumentError, match="KDA_CP"):
        chunk_kda(**X)
    assert explain(**X, context_parallel="off").error is None


def test_intermediate_states_of_lengths_that_only_the_device_knows_are_an_error(monkeypatch):
    x = PACKED | {"return_intermediate_states": True}
    assert explain(**x).error is None
    monkeypatch.setattr(KdaInputs, "sequence_lengths", lambda self: None)  # as for device tensors
    assert explain(**x).error.startswith("ArgumentError: cu_seqlens_cpu: expected a host copy")
    with pytest.raises(ArgumentError, match="cu_seqlens_cpu: expected a host copy"):
        chunk_kda(**x)


# ---- tensors of all kinds


class Sizes(TorchDispatchMode):
    """Records the size in bytes of the largest memory that an operator allocated."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view and out.device.type != "meta":
            self.most = max(self.most, out.untyped_storage().nbytes())
        return out


def test_nothing_is_copied(thirds):
    x = call(T=1)
    one = {
        name: x[name][:, :1].expand(-1, 100_000, *x[name].shape[2:]) for name in ("q", "k", "v", "g", "beta")
    }
    bias = torch.zeros(1).expand(one["g"].shape[2] * one["g"].shape[3])
    more = {"use_gate_in_kernel": True, "lower_bound": -5.0, "dt_bias": bias}
    with Sizes() as sizes:
        found = explain(**one, **more)
    assert found.plan == "thirds: cuts at [33333]" and sizes.most == 0
    with Sizes() as sizes:
        explain(found.shape)
    assert sizes.most == 0


def test_fake_tensors_are_explained_as_tensors_of_their_device(thirds):
    with FakeTensorMode():
        fake = {name: torch.empty(tensor.shape) for name, tensor in X.items()}
        ends = torch.tensor([0, 5, 20])
        found, packed = explain(**fake), explain(**fake, cu_seqlens=ends, cu_seqlens_cpu=ends)
    assert found == explain(**X)
    assert packed.backend == "reference" and packed.plan.startswith("unknown: it depends on the lengths")
    assert packed.shape == explain(**PACKED).shape


def test_no_backend_runs_on_the_meta_device():
    meta = {name: tensor.to("meta") for name, tensor in X.items()}
    found = explain(**meta)
    assert found.backend is None and found.error is None and found.plan.startswith("none: no backend runs")
    with record_calls() as calls:
        o, _ = chunk_kda(**meta)
    assert o.is_meta and not calls


def test_explain_names_the_inputs_that_require_grad_as_the_call_does(install):
    install("forward", features={"unbounded_gate"}, priority=1)
    x = X | {"v": X["v"].clone().requires_grad_()}
    with pytest.raises(BackendUnsupportedError) as caught:
        chunk_kda(**x, backend="forward")
    hint = "v requires grad; without gradients (torch.no_grad(), detach()) forward serves this call"
    assert hint in str(caught.value)
    found = explain(**x, backend="forward")
    assert found.error == f"BackendUnsupportedError: {caught.value}"
    shape = explain(found.shape, backend="forward")
    assert "an input requires grad; without gradients" in shape.error
