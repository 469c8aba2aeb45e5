"""The planner that kda-core finds by entry point: decides for a call, and executes it."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace

import torch

from kda_core.backend import Backend, BackendSpec, SupportsSegments
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_core.errors import ArgumentError, PlannerError
from kda_core.registry import show_archs
from kda_cp import constants, execute, native
from kda_cp.plan import Cache, Plan, Prediction, make_plan, predict

NO_LENGTHS = "serial: only the device knows the lengths; give cu_seqlens_cpu, without use_graph"

_log = logging.getLogger("kda_cp")


class ContextParallelPlanner:
    """Satisfies `kda_core.backend.Planner`, `SupportsRefusal`, `SupportsExplanation`, `SupportsWorkspace` and
    `SupportsDiagnosis`. Safe for threads."""

    def __init__(self) -> None:
        self._plans = Cache(128)  # of 1000 sequences some 80 KB each; kda-core keeps answers too

    def plan(self, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> Plan | None:
        """A plan that splits the call, or None where a direct call is predicted to be as fast, or lengths are not known
        to the host."""
        decided = self.decide(inputs, spec, backend)
        if decided is None:
            _say_once()
        return decided if decided is not None and decided.is_split else None

    def plan_from_json(self, text: str) -> Plan:
        try:
            return Plan.from_json(text)
        except ArgumentError as error:
            raise PlannerError(str(error)) from error

    def refusal(self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str | None:
        return execute.refusal(plan, inputs, spec, backend)

    def execute(self, plan: Plan, inputs: KdaInputs, outputs: KdaOutputs, backend: Backend) -> KdaOutputs:
        return execute.run(plan, inputs, outputs, backend)

    def workspace_bytes(self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> int:
        return execute.workspace_bytes(plan, inputs.shape, backend)

    def problems(self) -> list[str]:
        return constants.problems()

    def explain(self, plan: Plan | None, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str:
        if plan is None:
            decided = self.decide(inputs, spec, backend)
            return NO_LENGTHS if decided is None else str(decided)
        if plan.prediction is not None:
            return str(plan)
        s, (known, source, SMs) = inputs.shape, machine(inputs, spec)
        tokens = window(s, backend)
        prediction = predict(
            plan,
            HV=s.HV,
            K=s.K,
            V=s.V,
            constants=known,
            SMs=SMs,
            native=tokens is not None,
            window=tokens or 0,
        )
        if prediction is None:
            return f"{plan}; given by the caller"
        return str(
            replace(plan, prediction=replace(prediction, rule=f"given by the caller; {source} constants"))
        )

    def decide(self, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> Plan | None:
        """The plan of a call, serial or not, with its prediction; None without host lengths."""
        lengths = inputs.sequence_lengths()
        if lengths is None:
            return None
        # nothing here that is slow to find, hash or compare: every call of the user comes by
        key = (lengths, inputs.shape, spec.name, spec.features, inputs.q.device.index, constants.version())
        return self._plans.get(key, lambda: _choose(lengths, inputs, spec, backend))


def _choose(lengths: tuple[int, ...], inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> Plan:
    s, (known, source, SMs) = inputs.shape, machine(inputs, spec)
    whole = tuple((n,) for n in lengths)
    if known is None and SMs < 1 and s.device_type == "cuda":
        return Plan(whole, "serial", Prediction(None, None, "us", f"nobody knows the SMs of {_where(s)}"))
    tokens = window(s, backend)
    plan = make_plan(
        lengths, HV=s.HV, K=s.K, V=s.V, constants=known, source=source, SMs=SMs,
        native=tokens is not None, window=tokens or 0,
    )  # fmt: skip
    why = execute.refusal(plan, inputs, spec, backend)
    if why is None:
        return plan
    return Plan(whole, "serial", Prediction(None, None, "us", why))


def window(shape: ProblemShape, backend: Backend) -> int | None:
    """Tokens of a window, 0 for no limit; None for a backend that does not summarise segments itself."""
    return native.window_tokens(shape, backend) if isinstance(backend, SupportsSegments) else None


TYPICAL = {(9, 0): ("NVIDIA H200", 132), (10, 0): ("NVIDIA B200", 148)}
"""Name and SMs of a GPU by its architecture, for `kda_core.explain` where there is none."""


def machine(inputs: KdaInputs, spec: BackendSpec) -> tuple[constants.Constants | None, str, int]:
    """The constants for a call, where they come from, and the SMs of its GPU. Inputs on the meta device ask for a GPU of an
    architecture: the first one here, else a `TYPICAL` one, which the words about the source name then."""
    device, s = inputs.q.device, inputs.shape
    dtype = str(s.dtype)[6:]
    if device.type == "cuda":
        name, SMs = _device(device.index)
    elif s.device_type != "cuda":
        name, SMs = s.device_type, 0
    elif (index := _first_of(s.arch)) is not None:
        name, SMs = _device(index)
    else:
        name, SMs = TYPICAL.get(s.arch, (_where(s), 0))  # type: ignore[arg-type]
        found, source = constants.lookup((name, spec.name, dtype))
        return found, source if "'s " in source else f"{name}'s {source}", SMs
    return *constants.lookup((name, spec.name, dtype)), SMs


def _first_of(arch: tuple[int, int] | None) -> int | None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return next((i for i in range(count) if torch.cuda.get_device_capability(i) == arch), None)


def _where(shape: ProblemShape) -> str:
    return "a CUDA device" if shape.arch is None else show_archs([shape.arch])


@functools.lru_cache(maxsize=64)
def _device(index: int) -> tuple[str, int]:
    found = torch.cuda.get_device_properties(index)
    return found.name, found.multi_processor_count


@functools.lru_cache(maxsize=1)
def _say_once() -> None:
    _log.info("context parallelism: %s", NO_LENGTHS)
