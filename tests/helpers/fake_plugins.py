"""Fake distributions: a module and its metadata in a folder. Discovery reads nothing else."""

import kda_core
from kda_core.contract import Feature

SPEC = """
from kda_core.backend import BackendSpec
SPEC = BackendSpec(
    name={name!r}, abi={abi!r}, archs=frozenset({archs!r}), features=frozenset({features!r}),
    target={target!r}, install="pip install {name}", priority={priority!r}, unavailable={unavailable!r},{later}
)
"""

BACKEND = """
import torch
from kda_core.reference import ReferenceBackend

class Backend(ReferenceBackend):
    def can_run(self, shape):
        return {refuses!r}
"""


PLANNER = """
from kda_core.backend import PlannerSpec
SPEC = PlannerSpec(name="halves", abi={abi!r}, target="fake_halves_backend:Halves", install="pip install halves", unavailable={unavailable!r})
"""

HALVES = """
import json
from dataclasses import dataclass, replace
import torch
from kda_core.contract import KdaInputs, KdaOutputs
from kda_core.errors import PlannerError

@dataclass(frozen=True)
class Plan:
    cut: int
    def to_json(self):
        return json.dumps({"cut": self.cut})

class Halves:
    def plan(self, inputs, spec, backend):
        return Plan(inputs.shape.T // 2) if inputs.shape.T >= 16 and not inputs.shape.varlen else None

    def plan_from_json(self, text):
        return Plan(json.loads(text)["cut"])

    def execute(self, plan, inputs, outputs, backend):
        if not 0 < plan.cut < inputs.shape.T:
            raise PlannerError(f"cut {plan.cut} outside the sequence")
        state = None
        for a, b in ((0, plan.cut), (plan.cut, inputs.shape.T)):
            s = replace(inputs.shape, T=b - a, has_initial_state=state is not None,
                        options=replace(inputs.options, output_final_state=True))
            piece = {n: getattr(inputs, n)[:, a:b].contiguous() for n in ("q", "k", "v", "g", "beta")}
            part = replace(inputs, **piece, initial_state=state, shape=s)
            out = KdaOutputs(torch.empty_like(piece["v"]), inputs.q.new_empty(s.state_shape))
            backend.chunk_fwd(part, out)
            outputs.o[:, a:b] = out.o
            state = out.final_state
        if outputs.final_state is not None:
            outputs.final_state.copy_(state)
        return outputs
"""


def install_into(
    folder, name, *, source=None, backend=None, group="kda_core.backends", version="1.0", refuses=None, **spec
):
    """Writes a backend distribution ``fake-<name>`` into `folder`; returns the names of its modules.

    `spec` replaces fields of its `BackendSpec`, `source` the whole module of the spec, `backend` the module of the class
    (by default the reference, which refuses every shape with the reason `refuses`, if that is given).
    """
    module = f"fake_{name.replace('-', '_')}"
    fields = {
        "abi": kda_core.BACKEND_ABI, "archs": {"cpu"}, "features": {f.value for f in Feature},
        "target": f"{module}_backend:Backend", "priority": 0, "unavailable": None,
    }  # fmt: skip
    # Only if they are given: a spec of ABI 1.0 has none of these fields.
    later = "".join(
        f" {field}={spec.pop(field)!r},"
        for field in ("variants", "note", "dtypes", "head_dims")
        if field in spec
    )
    source = SPEC.format(name=name, later=later, **(fields | spec)) if source is None else source
    (folder / f"{module}.py").write_text(source)
    (folder / f"{module}_backend.py").write_text(
        BACKEND.format(refuses=refuses) if backend is None else backend
    )
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-{name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:SPEC\n")
    return [module, f"{module}_backend"]


def install_planner(install, abi=kda_core.BACKEND_ABI, unavailable=None, backend=HALVES):
    source = PLANNER.format(abi=abi, unavailable=unavailable)
    install("halves", group="kda_core.planners", source=source, backend=backend)
