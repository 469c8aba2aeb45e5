"""The planner that kda-core finds through its entry point. It plans a call and executes the plan."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TypedDict

from kda_core.backend import Backend, BackendSpec, SupportsSegments
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_core.errors import ArgumentError, PlannerError
from kda_cp import constants, execute, native
from kda_cp.cache import Cache
from kda_cp.choose import make_plan, predict
from kda_cp.machine import device_text, machine
from kda_cp.plan import Plan, Prediction

UNKNOWN_LENGTHS = (
    "serial: the host does not know the lengths of the sequences; pass cu_seqlens_cpu, without use_graph"
)

_log = logging.getLogger("kda_cp")


class ContextParallelPlanner:
    """Implements `kda_core.backend.Planner`, `SupportsRefusal`, `SupportsExplanation`, `SupportsWorkspace` and
    `SupportsDiagnosis`. Thread-safe."""

    def __init__(self) -> None:
        # Small, because a plan of 1000 sequences takes about 80 KB, and kda-core caches the results as well.
        self._plans = Cache(128)

    def plan(self, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> Plan | None:
        """Returns a plan that splits the call.

        Returns None if no split is predicted to be fast enough, or if the host does not know the lengths.
        """
        chosen = self.decide(inputs, spec, backend)
        if chosen is None:
            _log_unknown_lengths()
        return chosen if chosen is not None and chosen.is_split else None

    def plan_from_json(self, text: str) -> Plan:
        """Returns the plan that `Plan.to_json` wrote.

        Raises:
            PlannerError: `text` is not the JSON of a plan of kda-cp.
        """
        try:
            return Plan.from_json(text)
        except ArgumentError as error:
            raise PlannerError(str(error)) from error

    def refusal(self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str | None:
        """Returns None, or why this plan cannot execute this call."""
        return execute.refusal(plan, inputs, spec, backend)

    def execute(self, plan: Plan, inputs: KdaInputs, outputs: KdaOutputs, backend: Backend) -> KdaOutputs:
        """Executes the call by the plan; returns `outputs`."""
        return execute.execute(plan, inputs, outputs, backend)

    def workspace_bytes(self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> int:
        """Returns the bytes of workspace that `execute` needs."""
        return execute.workspace_bytes(plan, inputs.shape, backend)

    def problems(self) -> list[str]:
        """Returns a line for each part of the calibration file that is unusable."""
        return constants.problems()

    def explain(self, plan: Plan | None, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str:
        """Returns the plan, its prediction and the deciding rule as text; for None, why the call is not split."""
        if plan is None:
            chosen = self.decide(inputs, spec, backend)
            return UNKNOWN_LENGTHS if chosen is None else str(chosen)
        if plan.prediction is not None:
            return str(plan)
        s, m = inputs.shape, machine(inputs, spec)
        prediction = predict(
            plan, HV=s.HV, K=s.K, V=s.V, constants=m.constants, SMs=m.SMs, **native_options(s, backend)
        )
        if prediction is None:
            return f"{plan}; given by the caller"
        rule = f"given by the caller; {m.source} constants"
        return str(replace(plan, prediction=replace(prediction, rule=rule)))

    def decide(self, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> Plan | None:
        """Returns the plan of a call, serial or split, with its prediction; None without host lengths."""
        lengths = inputs.sequence_lengths()
        if lengths is None:
            return None
        # Every call computes this key. All its parts are fast to find, hash and compare.
        key = (lengths, inputs.shape, spec.name, spec.features, inputs.q.device.index, constants.version())
        return self._plans.get(key, lambda: _choose(lengths, inputs, spec, backend))


def _choose(lengths: tuple[int, ...], inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> Plan:
    """Returns the plan of `make_plan`, or a serial one if the backend cannot execute that plan."""
    s, m = inputs.shape, machine(inputs, spec)
    whole = tuple((n,) for n in lengths)
    if m.constants is None and m.SMs < 1 and s.device_type == "cuda":
        rule = f"the number of SMs of {device_text(s)} is not known"
        return Plan(whole, "serial", Prediction(None, None, "us", rule))
    plan = make_plan(
        lengths, HV=s.HV, K=s.K, V=s.V, constants=m.constants, source=m.source, SMs=m.SMs,
        **native_options(s, backend),
    )  # fmt: skip
    why = execute.refusal(plan, inputs, spec, backend)
    if why is None:
        return plan
    return Plan(whole, "serial", Prediction(None, None, "us", why))


class NativeOptions(TypedDict):
    """Arguments of `make_plan` and `predict` that the backend determines."""

    native: bool
    window: int


def native_options(shape: ProblemShape, backend: Backend) -> NativeOptions:
    """Returns whether a backend summarises segments itself, and the tokens of its windows (0 for no limit)."""
    if not isinstance(backend, SupportsSegments):
        return {"native": False, "window": 0}
    return {"native": True, "window": native.window_tokens(shape, backend)}


@functools.lru_cache(maxsize=1)
def _log_unknown_lengths() -> None:
    """Logs once per process."""
    _log.info("context parallelism: %s", UNKNOWN_LENGTHS)
