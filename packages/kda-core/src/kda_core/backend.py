"""The interfaces of plugins: a cheap spec, which core discovers through an entry point, and the class that the spec names.

A backend package registers ``name = "package.plugin:SPEC"`` in the entry-point group ``kda_core.backends``. Importing
that module must be cheap (no compiler, no CUDA). Core imports `BackendSpec.target` when it first needs the backend.
A planner (context parallelism) does the same in ``kda_core.planners``. ``docs/writing-a-backend.md`` is the guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kda_core.contract import (
    HALF_DTYPES,
    Feature,
    KdaGradients,
    KdaInputs,
    KdaJournal,
    KdaOutputs,
    KdaPool,
    ProblemShape,
    dtype_name,
)

BACKEND_GROUP = "kda_core.backends"
PLANNER_GROUP = "kda_core.planners"

Arch = tuple[int, int] | str
"""A compute capability such as (9, 0); or "sm_80+", every GPU of at least that one (since ABI 2.2); or "cpu"; or "any" (every
device, CPU included)."""


def least_capability(arch: Arch) -> tuple[int, int] | None:
    """Returns the smallest compute capability of an `Arch` such as "sm_80+"; None for any other `Arch`."""
    if not isinstance(arch, str) or (found := re.fullmatch(r"sm_([1-9][0-9]*)([0-9])\+", arch)) is None:
        return None
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class BackendSpec:
    """A backend, described by literals.

    Attributes:
        name: what users pass as ``backend=``; lower case, unique.
        abi: the (major, minor) of `kda_core.abi.BACKEND_ABI` that the plugin was written for.
        archs: where it runs, see `Arch`.
        features: values of `kda_core.contract.Feature` that it serves. It never receives a call that needs another one.
        priority: the automatic choice takes the eligible backend with the highest priority, then the one whose name sorts first.
        target: ``"package.module:Class"``; the class takes no arguments and satisfies `Backend`.
        install: the command that installs it, for messages.
        unavailable: why the installed package cannot serve any call; None if it serves calls.
        variants: ``"package.module:callable"``, imported when kernels are compiled ahead of time; called with an
            architecture such as "sm_90a", it returns (kernel class, configuration) pairs.
            None: nothing to compile.
        note: a remark for users in the list of backends, such as where it has been run. None: no remark.
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
        """Returns what `shape` needs and this spec does not declare, or None."""
        if missing := sorted(f.value for f in shape.features if f.value not in self.features):
            return ", ".join(missing)
        if self.dtypes is not None and (name := dtype_name(shape.dtype)) not in self.dtypes:
            return f"dtype {name}; serves {', '.join(sorted(self.dtypes))}"
        # not `in`, because the sizes of a trace have no hash
        if self.head_dims is not None and not any(shape.K == K and shape.V == V for K, V in self.head_dims):
            served = ", ".join(f"K={K}, V={V}" for K, V in sorted(self.head_dims))
            return f"head dimensions K={shape.K}, V={shape.V}; serves {served}"
        return None


@runtime_checkable
class Backend(Protocol):
    """The methods that every backend has.

    Methods are called from several threads at once. All launches go to the current stream of the inputs' device, and only `compile`
    may synchronise with a GPU. The results of `can_run` and `workspace_bytes` depend only on the shape, because core caches
    them.
    """

    def can_run(self, shape: ProblemShape) -> str | None:
        """Returns None, or why this shape is not served ("T=70; a multiple of 64 is needed"). Core has already checked the
        features, dtypes and head dimensions of the spec."""
        ...

    def workspace_bytes(self, shape: ProblemShape) -> int:
        """Returns the bytes of scratch memory that `chunk_fwd` needs for this shape, 0 for none."""
        ...

    def compile(self, shape: ProblemShape) -> None:
        """Compiles or loads every kernel that `chunk_fwd` needs for this shape, without a launch."""
        ...

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """Writes o for every token that belongs to a sequence, and the states that the call asks for. Returns `outputs`. The
        final state of a sequence of length zero is its initial state, or zeros."""
        ...


class SupportsBackward(Protocol):
    """The backward of a backend that declares `Feature.BACKWARD`, unless it has the methods of `SupportsBackwardInto`."""

    def chunk_bwd(self, inputs: KdaInputs, grad_o: Tensor, grad_final_state: Tensor | None) -> KdaGradients:
        """Returns the gradients of sum(o * grad_o) + sum(final_state * grad_final_state) in every floating-point input."""
        ...


@runtime_checkable
class SupportsBackwardInto(Protocol):
    """The backward of a backend that declares `Feature.BACKWARD`, in memory that core allocates. Since ABI 2.1."""

    def backward_workspace_bytes(self, shape: ProblemShape) -> int:
        """Returns the bytes of scratch memory that `chunk_bwd_into` needs for this shape, 0 for none."""
        ...

    def chunk_bwd_into(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        gradients: KdaGradients,
        workspace: Tensor,
    ) -> None:
        """Computes the gradients of sum(o * grad_o) + sum(final_state * grad_final_state).

        Args:
            grad_o: [B, T, HV, V], dtype of q, contiguous and aligned to `kda_core.contract.ALIGNMENT`.
            grad_final_state: like the final states, or None for zeros.
            gradients: written, for every token that belongs to a sequence; shapes and dtypes of `inputs`. Rows of other tokens are
                zero already and must stay zero. For a spec of ABI 2.2 or newer, the gradients of A_log, dt_bias and initial_state are
                None if autograd does not need them.
            workspace: [`backward_workspace_bytes`] uint8, written.
        """
        ...


class SupportsSavedStates(SupportsBackwardInto, Protocol):
    """Optional; requires `Feature.SAVED_STATES`. The forward saves states, so that the backward computes less. Since ABI 2.6
    (`SAVES_SINCE`): core lets a backend of ABI 2.2 to 2.5, whose saved states are all bf16, save nothing.

    `Backend.chunk_fwd` fills `KdaOutputs.saved_states` and `KdaOutputs.residual` if they are not None, even if `needs_backward` is
    not set, because another backend may serve the backward. `Backend.workspace_bytes` suffices in either case.

    The saved values belong to the recurrence and do not depend on how a backend computes it. So the backward of any backend can read
    what the forward of another has saved. A backend may declare the feature without having a backward. The feature does not apply to a
    backward in the form of `SupportsBackward`, which recomputes.
    """

    def chunk_bwd_into(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        gradients: KdaGradients,
        workspace: Tensor,
        saved_states: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """`SupportsBackwardInto.chunk_bwd_into`, which may also read what the forward has saved.

        `backward_workspace_bytes` suffices whether or not something was saved; it knows `disable_recompute`.

        Args:
            saved_states: `KdaOutputs.saved_states`, or None if nothing was saved; states then follow from `initial_state`.
            residual: `KdaOutputs.residual`, None unless `saved_states` is given and `disable_recompute` is set.
        """
        ...


SAVES_SINCE = (2, 6)
"""The ABI since which saved states have `ProblemShape.saved_states_dtype`."""


def saves_states(shape: ProblemShape, forward: BackendSpec, backward: BackendSpec, backend: object) -> bool:
    """Returns whether the forward of a call saves states that its backward then reads.

    Args:
        shape: a call whose inputs require grad.
        forward, backward: the specs of the backends of both.
        backend: that of the backward.
    """
    return (
        shape.dtype in HALF_DTYPES
        and not shape.options.recurrent
        and all(
            Feature.SAVED_STATES.value in spec.features and spec.abi >= SAVES_SINCE
            for spec in (forward, backward)
        )
        and isinstance(backend, SupportsBackwardInto)
    )


class SupportsRecurrent(Protocol):
    """Optional; requires `Feature.RECURRENT`."""

    def recurrent_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """`Backend.chunk_fwd` for a few tokens of each sequence (decoding). ``cu_seqlens[-1]`` may be below T; o after it is
        zero already and must stay zero."""
        ...


class SupportsJournal(Protocol):
    """Optional; requires `Feature.JOURNAL`. Decoding that records tokens instead of writing states. Since ABI 2.5.

    The bits of a sequence depend neither on the other sequences nor on its slot nor on the first row of its records. They may depend on
    the number of records.
    """

    def journal_decode(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """Computes T tokens of each of N sequences from the state that their slots and records describe. Returns `outputs`.

        Writes o, and a record of every token to `inputs.journal`. If it folds a slot, it writes the state of the slot to the pool. Rows of
        o of sequences without a slot (`KdaPool`) are zeros; nothing else of them is read or written. Other records, other slots and the
        spans keep their bits. The state after the tokens is not stored.

        Args:
            inputs: B is N; `pool` has one slot for each sequence, which is read and written; `journal` is given.
        """
        ...

    def journal_fold(self, shape: ProblemShape, pool: KdaPool, journal: KdaJournal) -> None:
        """Writes the state that records describe to the pool, for each sequence that has a slot and at least one record. Journal and
        spans keep their bits.

        Args:
            shape: T is 0. `can_run` has accepted it.
            pool, journal: as in `journal_decode`; without `KdaJournal.spans`, `KdaJournal.accepted` is given.
        """
        ...


PreparedLaunch = Callable[[Tensor, tuple[int, ...], int, int, int], object]
"""Launches one call on the current device and stream. Gets o, which is on that device; the addresses of
`kda_core.contract.launch_tensors`; and those of o, final_state and workspace. The address of a tensor that the call does not have is 0."""

PREPARES_SINCE = (2, 9)
"""The ABI since which a backend may have `SupportsPrepare`."""


@runtime_checkable
class SupportsPrepare(Protocol):
    """Optional: launches with little host time, for calls like an earlier one and for `kda_core.serving.bind`. Since ABI 2.9.

    Without it, core makes new `KdaInputs` and `KdaOutputs` for every call, and calls `chunk_fwd`, `recurrent_fwd` or `journal_decode`.
    """

    def prepare(self, inputs: KdaInputs, outputs: KdaOutputs) -> PreparedLaunch | None:
        """Returns a function that launches ``chunk_fwd(inputs, outputs)`` with tensors at other addresses, or None if the call has no such
        launch. It launches ``recurrent_fwd`` if the shape is `recurrent`, and ``journal_decode`` if `inputs.journal` is given.

        The tensors of a launch have the shapes, dtypes, strides, device and alignment of those in `inputs` and `outputs`, and that device is
        the current one. All else of `inputs` stays the same, such as the first slot and the lengths that the host knows.
        Core calls `prepare` only for calls with tokens, without intermediate and saved states. `prepare` compiles the kernels that the
        launch needs, and launches nothing.

        A launch is thread-safe, keeps no tensor alive, and calls no operator of torch.
        """
        ...


@runtime_checkable
class SupportsSegments(Protocol):
    """Optional; requires `Feature.SEGMENT_SUMMARY`. For planners that cut sequences into segments.

    A planner computes the summaries of all segments, derives the state at the start of each, and executes the segments from
    there. `inputs` are those of a packed call (B = 1) whose N sequences are the segments. Both calls have the same tokens. Their
    shapes differ only in `state_v_first`, which is False in `summarize`, and in `has_initial_state`, if `summarize` starts from zeros.
    `summarize` ignores whether final and intermediate states are asked for. `Backend.can_run` has accepted the shape of `execute_segments`. The rules of `Backend` hold.

    With `Feature.POOL_SEGMENTS` (since ABI 2.7) the whole call may be one over a pool. `inputs.pool` is then that of the whole call, and
    `inputs.segments` assigns the segments to its sequences. Both calls have the same shape, whose `state_v_first` is that of the pool,
    while `initial_state`, `final_state` and exits are [N, HV, K, V]. Every slot is read before any slot is written:

    - `summarize` starts a first segment from its slot, by the rules of `KdaPool`, and writes this state to its row of `initial_state`.
      Other segments start from their rows. The pool is only read.
    - `execute_segments` starts all segments from `initial_state` and reads no slot. The last segment of a sequence writes its final state
      to the slot, if `PoolShape.writes`; others write theirs to `final_state`, if it is given. A segment of length n stores the
      checkpoints of its sequence at positions in [before + 1, before + n]. Rows of o of skipped sequences are zeros.
    """

    def segment_workspace_bytes(self, shape: ProblemShape) -> int:
        """Returns the bytes of scratch memory of both calls, the same for both shapes."""
        ...

    def summarize(self, inputs: KdaInputs, exits: Tensor, transitions: Tensor, workspace: Tensor) -> None:
        """Computes how each segment acts on a state, ``S_out = M S_in + B``, with fp32 accumulators.

        Args:
            inputs: `initial_state` [N, HV, K, V] or None for zeros.
            exits: [N, HV, K, V], written: the final states from those initial states.
            transitions: [N, HV, K, K], written: M, prod (I - beta k k^T) Diag(e^g); the identity for a segment of length zero.
                Both are fp32 (fp64 for fp64 inputs).
            workspace: [`segment_workspace_bytes`] uint8, written: results that `execute_segments` can use, so that work that depends
                only on tokens is done once.
        """
        ...

    def execute_segments(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """`Backend.chunk_fwd` with `outputs.workspace` as the last `summarize` of these segments left it.
        `inputs.initial_state` are the true states at the starts of the segments. Returns `outputs`.

        Since ABI 2.6 a backend with `Feature.SAVED_STATES` fills `KdaOutputs.saved_states` and `residual` here as well, where they
        are given. They are those of the packed call over the segments."""
        ...


@runtime_checkable
class SupportsWholeEnds(Protocol):
    """Optional in addition to `SupportsSegments`: a whole call beside a call over segments, at the same time. Since ABI 2.10.

    A planner executes the first and the last segment of a long sequence as whole calls, beside both calls over the inner segments. The
    first and the last segment need no summary, so all parts of a device have work in both steps. Other sequences may belong to the whole
    calls.

    - `whole` are the inputs of `Backend.chunk_fwd` over one row (B = 1), without a pool and intermediate states. The row is one sequence, or
      sequences are packed and the host knows their lengths.
    - `inputs` are those of `SupportsSegments` over the inner segments, without a pool and intermediate states.
    - Both calls write different memory. The stream of the caller waits for both.
    """

    def whole_ends_workspace_bytes(
        self, first: ProblemShape, inner: ProblemShape, last: ProblemShape
    ) -> tuple[int, int]:
        """Returns the bytes of scratch memory of each of the two whole calls, and of both calls over the inner segments."""
        ...

    def summarize_beside(
        self,
        whole: KdaInputs,
        whole_outputs: KdaOutputs,
        inputs: KdaInputs,
        exits: Tensor,
        transitions: Tensor,
        workspace: Tensor,
    ) -> None:
        """``chunk_fwd(whole, whole_outputs)`` beside ``summarize(inputs, exits, transitions, workspace)``."""
        ...

    def execute_beside(
        self, whole: KdaInputs, whole_outputs: KdaOutputs, inputs: KdaInputs, outputs: KdaOutputs
    ) -> None:
        """``chunk_fwd(whole, whole_outputs)`` beside ``execute_segments(inputs, outputs)``, with ``outputs.workspace`` as
        `summarize_beside` of the same inner segments left it."""
        ...


@runtime_checkable
class SupportsMerge(Protocol):
    """Optional in addition to `SupportsSegments`. Without it the planner merges in torch."""

    def merge_segments(self, initial: Tensor, exits: Tensor, transitions: Tensor, bounds: Tensor) -> None:
        """Computes the state at the start of every segment on the device, accurate to fp32.

        Args:
            initial: [N, HV, K, V] fp32, written for all segments but the first one of each sequence. It may be uninitialised: the state
                after the first segment is its exit, after every further one M S + exit.
            exits, transitions: [N, HV, K, V] and [N, HV, K, K] fp32, as `summarize` wrote them. They may also be those of groups
                of segments, or zeros; and if K = V, exits may be transitions, to multiply transitions.
            bounds: [sequences + 1] int32 on the device: segments bounds[n] to bounds[n+1] - 1 are those of sequence n, in
                order.
        """
        ...


@runtime_checkable
class SupportsStateGradients(Protocol):
    """Optional for a backend with a backward. For planners that split the backward of a call into segments. Since ABI 2.4.

    A segment maps the gradient of the state at its end to that at its start, ``dS_in = M^T dS_out + N``, with M as in
    `SupportsSegments.summarize`. N and M depend neither on v nor on states. Without these methods a planner gets both from calls of
    the backward and of the forward.
    """

    def state_gradients_workspace_bytes(self, shape: ProblemShape) -> int:
        """Returns the bytes of scratch memory that `initial_state_gradients` needs for this shape, 0 for none."""
        ...

    def initial_state_gradients(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        gradients: Tensor,
        transitions: Tensor,
        workspace: Tensor,
    ) -> None:
        """Computes how each segment acts on the gradient of a state, with fp32 accumulators.

        Args:
            inputs: those of a packed call (B = 1) whose N sequences are the segments, without `state_v_first`. The initial states
                are not read.
            grad_o: [1, T, HV, V], dtype of q, contiguous and aligned to `kda_core.contract.ALIGNMENT`.
            grad_final_state: [N, HV, K, V], or None for zeros.
            gradients: [N, HV, K, V], written: the gradients of the initial states of sum(o * grad_o) + sum(final_state *
                grad_final_state); N where `grad_final_state` is zero.
            transitions: [N, HV, K, K], written: M^T; the identity for a segment of length zero. All states are fp32 (fp64 for fp64
                inputs).
            workspace: [`state_gradients_workspace_bytes`] uint8, written.
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
    """A planner's decision how to execute one call. Immutable."""

    def to_json(self) -> str:
        """Returns a text from which `plan_from_json` of the same planner creates an equal plan."""
        ...


class Planner(Protocol):
    """Splits calls into segments, over any backend."""

    def plan(self, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> Plan | None:
        """Returns a plan that is predicted to be faster than a direct call, or None. Must not synchronise. The result depends only
        on metadata and on the lengths that the host knows (`KdaInputs.sequence_lengths`), because core caches it until the
        registry is refreshed or the planner calls ``kda_core.registry.REGISTRY.forget_plans()``."""
        ...

    def plan_from_json(self, text: str) -> Plan:
        """Returns the plan that `Plan.to_json` wrote.

        Raises:
            PlannerError: `text` is not a plan of this planner.
        """
        ...

    def execute(self, plan: Plan, inputs: KdaInputs, outputs: KdaOutputs, backend: Backend) -> KdaOutputs:
        """Executes the call by the plan and returns `outputs`, which equal those of `Backend.chunk_fwd` within tolerance.

        Raises:
            PlannerError: the plan does not fit the call.
        """
        ...


class SupportsRefusal(Protocol):
    """Optional for a planner. A planner without it receives every plan that a caller passes."""

    def refusal(self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str | None:
        """Returns None, or why this plan of a caller cannot execute this call on this backend, which core raises as a
        `PlannerError` before anything is launched. Must not synchronise. The result depends on what that of `Planner.plan` depends
        on, because core caches None."""
        ...


class SupportsTraining(Protocol):
    """Optional for a planner: it splits calls whose inputs require grad, in the forward and in the backward. Since ABI 2.4.

    Without these methods core asks a planner only about calls without gradients. A plan that the caller passes then applies to the
    forward alone, which saves no states.

    For a call of which one backend has the forward and the backward, the shape that `Planner.plan` receives has `needs_backward`.
    `Planner.execute` then fills `KdaOutputs.saved_states` and `residual` where they are given (`saves_states`). For a call with two
    backends the forward saves no states if a planner splits it.
    """

    def plan_backward(self, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> Plan | None:
        """As `Planner.plan`, for the backward of a call. `spec` and `backend` are those of the backward."""
        ...

    def refusal_of_backward(
        self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend
    ) -> str | None:
        """As `SupportsRefusal.refusal`, for the backward. Core asks it before the forward of a call with a plan of the caller."""
        ...

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
        """Executes the backward of a call by the plan and returns its gradients, which equal those of the backend within tolerance.

        Args:
            grad_o, grad_final_state: as in `SupportsBackwardInto.chunk_bwd_into`.
            wanted: names of the inputs that need a gradient. Those of A_log, dt_bias and initial_state may be None if they are not
                among them.
            saved_states, residual: as in `SupportsSavedStates.chunk_bwd_into`.
        """
        ...

    def explain_backward(
        self, plan: Plan | None, inputs: KdaInputs, spec: BackendSpec, backend: Backend
    ) -> str:
        """As `SupportsExplanation.explain`, for the result of `plan_backward` or a plan of the caller."""
        ...


class SupportsPools(Protocol):
    """Optional for a planner: it splits calls over a pool of states on backends with `Feature.POOL_SEGMENTS`. Since ABI 2.7.

    The methods of the planner then also receive calls whose shape has a pool. `execute` finds it in `KdaInputs.pool`, and inputs that are
    strided if the backend declares `Feature.STRIDED`. Without this method, and on other backends, core copies the states of split calls
    out of the pool and back, and splits no call with checkpoints.
    """

    def executes_over_pools(self, plan: Plan | None, spec: BackendSpec, backend: Backend) -> bool:
        """Returns whether `execute` can execute this plan of a caller over a pool; None stands for the plans of `Planner.plan`. If not, core
        copies the states."""
        ...


class SupportsExplanation(Protocol):
    """Optional for a planner."""

    def explain(self, plan: Plan | None, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str:
        """Returns text for `kda_core.explain`: the plan, its prediction and the rule that decided; or, if `Planner.plan` returned
        None, why the call is direct."""
        ...


class SupportsWorkspace(Protocol):
    """Optional for a planner. Without it, `Planner.execute` receives the workspace of a direct call."""

    def workspace_bytes(self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> int:
        """Returns the bytes of scratch memory that `Planner.execute` needs for this plan, 0 for none; `KdaOutputs.workspace` then
        has that size. Must not synchronise. The result depends on what that of `Planner.plan` depends on."""
        ...


class SupportsDiagnosis(Protocol):
    """Optional for a planner."""

    def problems(self) -> Sequence[str]:
        """Returns a line for ``python -m kda_core doctor`` for each thing that the planner reads and cannot use, such as a damaged
        file, with the way to fix it; empty if there is no problem."""
        ...
