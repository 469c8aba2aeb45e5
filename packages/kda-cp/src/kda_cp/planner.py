"""The planner that kda-core finds through its entry point. It plans a call and executes the plan.

What executes plans is imported for the first one: most calls are direct, and the first call of a process should be fast.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypedDict

from torch import Tensor

from kda_core.backend import (
    Backend,
    BackendSpec,
    SupportsSegments,
    SupportsStateGradients,
    SupportsWholeEnds,
    saves_states,
)
from kda_core.contract import KdaGradients, KdaInputs, KdaOutputs, ProblemShape, besides_tokens
from kda_core.errors import ArgumentError, PlannerError
from kda_cp import constants
from kda_cp.cache import Cache
from kda_cp.choose import make_plan, predict
from kda_cp.cuts import GRANULE, granule_of
from kda_cp.machine import Machine, device_text, machine
from kda_cp.plan import Plan, Prediction

UNKNOWN_LENGTHS = (
    "serial: the host does not know the lengths of the sequences; pass cu_seqlens_cpu, without use_graph"
)

ROUNDED = 64
"""Most sequences of a call whose decision is kept by rounded lengths."""

_log = logging.getLogger("kda_cp")


class ContextParallelPlanner:
    """Implements `kda_core.backend.Planner`, `SupportsTraining`, `SupportsPools`, `SupportsRefusal`, `SupportsExplanation`,
    `SupportsWorkspace` and `SupportsDiagnosis`. Thread-safe."""

    def __init__(self) -> None:
        # Small, because a plan of 1000 sequences takes about 80 KB, and kda-core caches the results as well.
        self._plans = Cache(128)
        self._whole = Cache(4096)

    def plan(self, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> Plan | None:
        """Returns a plan that splits the call.

        Returns None if no split is predicted to be fast enough, or if the host does not know the lengths.
        """
        if self._stays_whole(inputs, spec, backend):
            return None
        return _split(self.decide(inputs, spec, backend))

    def plan_backward(self, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> Plan | None:
        """Returns a plan that splits the backward of a call; None as `plan`. It may differ from the plan of the forward."""
        return _split(self.decide(inputs, spec, backend, of_backward=True))

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
        from kda_cp import execute

        return execute.refusal(plan, inputs, spec, backend)

    def execute(self, plan: Plan, inputs: KdaInputs, outputs: KdaOutputs, backend: Backend) -> KdaOutputs:
        """Executes the call by the plan; returns `outputs`."""
        from kda_cp import execute

        return execute.execute(plan, inputs, outputs, backend)

    def executes_over_pools(self, plan: Plan | None, spec: BackendSpec, backend: Backend) -> bool:
        """Returns whether calls over a pool are executed by this plan, or by automatic plans, without copies of states."""
        from kda_cp import execute

        return execute.executes_over_pools(plan, backend)

    def refusal_of_backward(
        self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend
    ) -> str | None:
        """Returns None, or why this plan cannot execute the backward of this call."""
        from kda_cp import backward

        return backward.refusal(plan, inputs, spec, backend)

    def execute_backward(
        self,
        plan: Plan,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        wanted: Collection[str],
        spec: BackendSpec,
        backend: Backend,
        saved_states: Tensor | None,
        residual: Tensor | None,
    ) -> KdaGradients:
        """Executes the backward of a call by the plan; returns its gradients."""
        from kda_cp import backward

        given = backward.Gradients(grad_o, grad_final_state, saved_states, residual)
        return backward.execute(plan, inputs, given, wanted, spec, backend)

    def workspace_bytes(self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> int:
        """Returns the bytes of workspace that `execute` needs."""
        from kda_cp import execute

        return execute.workspace_bytes(plan, inputs.shape, backend)

    def problems(self) -> list[str]:
        """Returns a line for each part of the calibration file that is unusable."""
        return constants.problems()

    def explain(self, plan: Plan | None, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str:
        """Returns the plan, its prediction and the deciding rule as text; for None, why the call is not split."""
        if plan is None:
            chosen = self.decide(inputs, spec, backend)
            return UNKNOWN_LENGTHS if chosen is None else str(chosen)
        m = machine(inputs, spec)
        return _explained(plan, inputs.shape, m, native_options(inputs.shape, backend))

    def explain_backward(
        self, plan: Plan | None, inputs: KdaInputs, spec: BackendSpec, backend: Backend
    ) -> str:
        """As `explain`, for the backward of a call."""
        if plan is None:
            chosen = self.decide(inputs, spec, backend, of_backward=True)
            return UNKNOWN_LENGTHS if chosen is None else str(chosen)
        m = _machine_of_backward(inputs, spec)
        # without constants there is no prediction, not even that of the ratio rule
        return _explained(plan, inputs.shape, m._replace(SMs=0), options_of_backward(backend))

    def decide(
        self, inputs: KdaInputs, spec: BackendSpec, backend: Backend, of_backward: bool = False
    ) -> Plan | None:
        """Returns the plan of a call, or of its backward, serial or split, with its prediction; None without host lengths."""
        lengths = inputs.sequence_lengths()
        if lengths is None:
            return None
        # Every call computes this key. All its parts are fast to find, hash and compare.
        key = (
            lengths, inputs.shape, spec.name, spec.features, inputs.q.device.index, constants.version(), of_backward
        )  # fmt: skip
        choose = _choose_backward if of_backward else _choose
        found = self._plans.get(key, lambda: choose(lengths, inputs, spec, backend))
        if found.is_split and not of_backward and self._stays_whole(inputs, spec, backend):
            return _serial(
                lengths, f"no split of the lengths, rounded up to multiples of {GRANULE}, is faster"
            )
        return found

    def _stays_whole(self, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> bool:
        """Returns whether a call is direct because one of rounded lengths is.

        In serving nearly every call has new lengths, and most calls are direct. Their decision is kept for all lengths between two
        multiples of `GRANULE`. A call of more than `ROUNDED` sequences seldom has the rounded lengths of an earlier one.
        """
        lengths = inputs.sequence_lengths()
        if lengths is None or len(lengths) > ROUNDED:
            return False
        rounded = tuple([-(-n // GRANULE) * GRANULE for n in lengths])
        key = (
            rounded, besides_tokens(inputs.shape), spec.name, spec.features, inputs.q.device.index, id(backend),
            constants.version(),
        )  # fmt: skip
        decide = lambda: (not _choose(rounded, inputs, spec, backend, refuse=False).is_split, backend)
        return self._whole.get(key, decide)[0]


def _split(chosen: Plan | None) -> Plan | None:
    """Returns a plan if it splits the call. None is that of unknown lengths."""
    if chosen is None:
        _log_unknown_lengths()
    return chosen if chosen is not None and chosen.is_split else None


def _explained(plan: Plan, s: ProblemShape, m: Machine, options: NativeOptions) -> str:
    """Returns a plan as text, with a prediction if it has none."""
    if plan.prediction is not None:
        return str(plan)
    prediction = predict(plan, HV=s.HV, K=s.K, V=s.V, constants=m.constants, SMs=m.SMs, **options)
    if prediction is None:
        return f"{plan}; given by the caller"
    rule = f"given by the caller; {m.source} constants"
    return str(replace(plan, prediction=replace(prediction, rule=rule)))


def _choose(
    lengths: tuple[int, ...], inputs: KdaInputs, spec: BackendSpec, backend: Backend, refuse: bool = True
) -> Plan:
    """Returns the plan of `make_plan`, or a serial one if the backend cannot execute that plan, unless not to ``refuse``. Training calls
    are split only where their backward has been measured."""
    s, m = inputs.shape, machine(inputs, spec)
    if m.constants is None and m.SMs < 1 and s.device_type == "cuda":
        return _serial(lengths, f"the number of SMs of {device_text(s)} is not known")
    if s.options.needs_backward and _machine_of_backward(inputs, spec).constants is None:
        return _serial(lengths, _unmeasured(spec))
    plan = make_plan(
        lengths, HV=s.HV, K=s.K, V=s.V, constants=m.constants, source=m.source, SMs=m.SMs, granule=granule_of(s),
        whole_ends=may_have_whole_ends(s, backend), **native_options(s, backend),
    )  # fmt: skip
    if not refuse:
        return plan
    from kda_cp import execute

    why = execute.refusal(plan, inputs, spec, backend)
    return plan if why is None else _serial(lengths, why)


def _choose_backward(
    lengths: tuple[int, ...], inputs: KdaInputs, spec: BackendSpec, backend: Backend
) -> Plan:
    """Returns the plan of `make_plan` for a backward, or a serial one if the backend cannot execute it, or if there are no
    constants of its backward."""
    s, m = inputs.shape, _machine_of_backward(inputs, spec)
    if not isinstance(backend, SupportsStateGradients):
        return _serial(lengths, f"backend {spec.name!r} has no initial_state_gradients")
    if not saves_states(s, spec, spec, backend):
        return _serial(lengths, "the forward saves no states for the backward")
    if m.constants is None:
        return _serial(lengths, _unmeasured(spec))
    plan = make_plan(
        lengths, HV=s.HV, K=s.K, V=s.V, constants=m.constants, source=m.source, granule=granule_of(s),
        **options_of_backward(backend),
    )  # fmt: skip
    from kda_cp import backward

    why = backward.refusal(plan, inputs, spec, backend)
    return plan if why is None else _serial(lengths, why)


def _unmeasured(spec: BackendSpec) -> str:
    """Returns why a training call over a backend without constants of its backward is not split."""
    return f"no constants of the backward of {spec.name!r} on this device"


def _machine_of_backward(inputs: KdaInputs, spec: BackendSpec) -> Machine:
    """Returns the device of a call with the constants of its backward."""
    m = machine(inputs, spec)
    found = None if m.constants is None else m.constants.of_backward(inputs.options.disable_recompute)
    return m._replace(constants=found)


def _serial(lengths: tuple[int, ...], rule: str) -> Plan:
    return Plan(tuple((n,) for n in lengths), "serial", Prediction(None, None, "us", rule))


class NativeOptions(TypedDict):
    """Arguments of `make_plan` and `predict` that the backend determines."""

    native: bool
    window: int | Callable[[], int]


def native_options(shape: ProblemShape, backend: Backend) -> NativeOptions:
    """Returns whether a backend summarises segments itself, and a function for the tokens of its windows (0 for no limit)."""
    if not _summarises.get(id(backend), lambda: (isinstance(backend, SupportsSegments), backend))[0]:
        return {"native": False, "window": 0}
    return {"native": True, "window": functools.partial(_window_tokens, shape, backend)}


def _window_tokens(shape: ProblemShape, backend: Backend) -> int:
    from kda_cp import native

    return native.window_tokens(shape, backend)


_summarises = Cache(64)
"""Whether a backend has the methods of `SupportsSegments`, which takes long to find, and the backend, which is kept alive for its id."""


def may_have_whole_ends(shape: ProblemShape, backend: Backend) -> bool:
    """Returns whether a plan with whole ends may execute a call."""
    if not _runs_beside.get(id(backend), lambda: (isinstance(backend, SupportsWholeEnds), backend))[0]:
        return False
    from kda_cp import whole_ends

    return whole_ends.refusal_of_shape(shape) is None


_runs_beside = Cache(64)
"""The same for the methods of `SupportsWholeEnds`."""


def options_of_backward(backend: Backend) -> NativeOptions:
    """Returns the same for a backward, whose workspace does not grow with the tokens of a split."""
    return {"native": isinstance(backend, SupportsStateGradients), "window": 0}


@functools.lru_cache(maxsize=1)
def _log_unknown_lengths() -> None:
    """Logs once per process."""
    _log.info("context parallelism: %s", UNKNOWN_LENGTHS)
