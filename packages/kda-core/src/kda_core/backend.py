"""What a plugin is: a cheap spec, found through an entry point, and the class that the spec names.

A backend package registers ``name = "package.plugin:SPEC"`` in the entry-point group ``kda_core.backends``. Importing
that module must be cheap (no compiler, no CUDA); `BackendSpec.target` is imported when the backend is first needed.
A planner (context parallelism) does the same in ``kda_core.planners``. ``docs/writing-a-backend.md`` is the guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kda_core.contract import KdaGradients, KdaInputs, KdaOutputs, ProblemShape, dtype_name

BACKEND_GROUP = "kda_core.backends"
PLANNER_GROUP = "kda_core.planners"

Arch = tuple[int, int] | str
"""A compute capability such as (9, 0), or "cpu", or "any" (every device, CPU included)."""


@dataclass(frozen=True)
class BackendSpec:
    """A backend, described by literals.

    Attributes:
        name: what users write in ``backend=``; lower case, unique.
        abi: the (major, minor) of `kda_core.abi.BACKEND_ABI` that the plugin was written for.
        archs: where it runs, see `Arch`.
        features: values of `kda_core.contract.Feature` that it serves; a call that needs another one goes elsewhere.
        priority: among eligible backends the highest wins, then the name that sorts first.
        target: ``"package.module:Class"``; the class takes no arguments and satisfies `Backend`.
        install: the command that installs it, for messages.
        unavailable: why no call can be served although the package is installed; None where calls are served.
        variants: ``"package.module:callable"``, imported when kernels are compiled ahead of time; called with an
            architecture such as "sm_90a", it gives (kernel class, configuration) pairs.
            None: nothing to compile.
        note: what whoever relies on the backend should know, such as where it has been run; shown where
            backends are listed. None: nothing.
        dtypes: torch's names of the dtypes of q, k and v that it serves, such as ``{"bfloat16", "float16"}``. Core refuses
            all others. None: `Backend.can_run` decides.
        head_dims: the pairs (K, V) that it serves, such as ``{(128, 128)}``. Core refuses all others. None:
            `Backend.can_run` decides.
    """

    name: str
    abi: tuple[int, int]
    archs: frozenset[Arch]
    features: frozenset[str]
    target: str
    install: str
    priority: int = 0
    unavailable: str | None = None
    variants: str | None = None
    note: str | None = None
    dtypes: frozenset[str] | None = None
    head_dims: frozenset[tuple[int, int]] | None = None

    def undeclared(self, shape: ProblemShape) -> str | None:
        """None, or what `shape` needs that this spec does not declare."""
        if missing := sorted(f.value for f in shape.features if f.value not in self.features):
            return ", ".join(missing)
        if self.dtypes is not None and (name := dtype_name(shape.dtype)) not in self.dtypes:
            return f"dtype {name}; serves {', '.join(sorted(self.dtypes))}"
        if self.head_dims is not None and (shape.K, shape.V) not in self.head_dims:
            served = ", ".join(f"K={K}, V={V}" for K, V in sorted(self.head_dims))
            return f"head dimensions K={shape.K}, V={shape.V}; serves {served}"
        return None


@runtime_checkable
class Backend(Protocol):
    """The methods that every backend has. All launches go to the current stream of the inputs' device, and no method
    but `compile` may synchronise with a GPU. Methods may be called from several threads at once. Answers of `can_run` and
    `workspace_bytes` depend on the shape alone: core keeps them until the registry is refreshed."""

    def can_run(self, shape: ProblemShape) -> str | None:
        """None, or why this shape is not served ("T=70; a multiple of 64 is needed"). What the spec declares was
        checked before: features, dtypes and head dimensions."""
        ...

    def workspace_bytes(self, shape: ProblemShape) -> int:
        """Bytes of scratch memory that `chunk_fwd` needs for this shape, 0 for none."""
        ...

    def compile(self, shape: ProblemShape) -> None:
        """Compiles or loads all that `chunk_fwd` needs for this shape, without a launch."""
        ...

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """Writes every row of o that belongs to a sequence, the final states and intermediate states asked for.
        Returns `outputs`. A sequence of length zero passes its initial state (or zeros) through."""
        ...


class SupportsBackward(Protocol):
    """Optional, behind `Feature.BACKWARD`."""

    def chunk_bwd(self, inputs: KdaInputs, grad_o: Tensor, grad_final_state: Tensor | None) -> KdaGradients:
        """Gradients of sum(o * grad_o) + sum(final_state * grad_final_state) in every floating-point input."""
        ...


class SupportsRecurrent(Protocol):
    """Optional, behind `Feature.RECURRENT`."""

    def recurrent_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """As `Backend.chunk_fwd`, for a few tokens a sequence (decoding). ``cu_seqlens[-1]`` may be below T: rows of o
        behind it are zeros already and stay so."""
        ...


@runtime_checkable
class SupportsSegments(Protocol):
    """Optional, behind `Feature.SEGMENT_SUMMARY`: for planners that cut sequences into segments.

    A planner asks for the summaries of all segments, finds from them the state at the start of each, and has them run from
    there. `inputs` are those of a packed call (B = 1) whose N sequences are the segments; both times the same tokens, and
    shapes that differ in `state_v_first` alone, which is False in `summarize`; final and intermediate states that they ask
    for are the run's matter. `Backend.can_run` has said yes to the run's shape. The rules of `Backend` hold.
    """

    def segment_workspace_bytes(self, shape: ProblemShape) -> int:
        """Bytes of scratch memory of both calls; the same for both shapes."""
        ...

    def summarize(self, inputs: KdaInputs, exits: Tensor, transitions: Tensor, workspace: Tensor) -> None:
        """How each segment acts on a state, ``S_out = M S_in + B`` with fp32 accumulators.

        Args:
            inputs: `initial_state` [N, HV, K, V] or None for zeros.
            exits: [N, HV, K, V], written: the final states from those initial states.
            transitions: [N, HV, K, K], written: M, prod (I - beta k k^T) Diag(e^g). Both fp32 (fp64 for fp64 inputs). A
                segment of length zero has the identity.
            workspace: [`segment_workspace_bytes`] uint8. What `execute_segments` can use is left in it: all that depends
                on the tokens alone is computed once.
        """
        ...

    def execute_segments(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """As `Backend.chunk_fwd`, with `outputs.workspace` as the last `summarize` left it, which was of these segments.
        `inputs.initial_state` are the true states at the segments' starts. Returns `outputs`."""
        ...


@runtime_checkable
class SupportsMerge(Protocol):
    """Optional beside `SupportsSegments`. Without it the planner merges in torch."""

    def merge_segments(self, initial: Tensor, exits: Tensor, transitions: Tensor, bounds: Tensor) -> None:
        """The state at the start of every segment, accurate to fp32 and found on the device.

        Args:
            initial: [N, HV, K, V] fp32, as `summarize` had it: at the first segment of a sequence its true state, elsewhere
                zeros, which are overwritten. After the first segment the state is its exit, after every further one M S
                + exit.
            exits, transitions: [N, HV, K, V] and [N, HV, K, K] fp32, as `summarize` wrote them, or others of the kind:
                those of whole groups of segments, zeros, and where K = V transitions in place of exits, to multiply
                transitions.
            bounds: int32 on the device, one more than there are sequences: segments bounds[n] to bounds[n+1] - 1 are the
                parts of sequence n, in order.
        """
        ...


@dataclass(frozen=True)
class PlannerSpec:
    """A planner, described by literals; fields as in `BackendSpec`. `target` names a class that satisfies `Planner`."""

    name: str
    abi: tuple[int, int]
    target: str
    install: str
    unavailable: str | None = None


class Plan(Protocol):
    """How one call is executed, made by a planner. Immutable."""

    def to_json(self) -> str:
        """A text from which the same planner's `plan_from_json` makes an equal plan."""
        ...


class Planner(Protocol):
    """Splits calls into pieces over any backend."""

    def plan(self, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> Plan | None:
        """A plan that is predicted to be faster than a direct call, or None. Must not synchronise. The answer depends on
        metadata and on the lengths that the host knows (`KdaInputs.sequence_lengths`) alone: core keeps it until the
        registry is refreshed or the planner calls ``kda_core.registry.REGISTRY.forget_plans()``."""
        ...

    def plan_from_json(self, text: str) -> Plan:
        """The plan that `Plan.to_json` wrote.

        Raises:
            PlannerError: `text` is no plan of this planner.
        """
        ...

    def execute(self, plan: Plan, inputs: KdaInputs, outputs: KdaOutputs, backend: Backend) -> KdaOutputs:
        """Executes the call by the plan; the outputs are those of `Backend.chunk_fwd` within tolerance.

        Raises:
            PlannerError: the plan does not fit the call.
        """
        ...


class SupportsRefusal(Protocol):
    """Optional for a planner. A planner without it is given every plan that a caller forces."""

    def refusal(self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str | None:
        """None, or why this plan, which a caller gave, cannot run this call on this backend: core raises it as a
        `PlannerError` before anything is launched. Must not synchronise. It depends on what `Planner.plan` does; core keeps
        None as it keeps a plan."""
        ...


class SupportsExplanation(Protocol):
    """Optional for a planner."""

    def explain(self, plan: Plan | None, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str:
        """For `kda_core.explain`: the plan with its prediction and the rule that decided, or with None, which is what
        `Planner.plan` returned, why the call goes directly to the backend."""
        ...


class SupportsWorkspace(Protocol):
    """Optional for a planner. Calls by the plans of a planner without it get the workspace of a direct call."""

    def workspace_bytes(self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> int:
        """Bytes of scratch memory that `Planner.execute` needs for this plan, 0 for none; `KdaOutputs.workspace` then has as
        many. Must not synchronise. It depends on what `Planner.plan` does."""
        ...


class SupportsDiagnosis(Protocol):
    """Optional for a planner."""

    def problems(self) -> Sequence[str]:
        """For ``python -m kda_core doctor``: a line for everything that the planner reads and cannot use, such as a damaged
        file, and how to mend it; empty where all is well."""
        ...
