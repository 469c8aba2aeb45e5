"""What a plugin is: a cheap spec, found through an entry point, and the class that the spec names.

A backend package registers ``name = "package.plugin:SPEC"`` in the entry-point group ``kda_core.backends``. Importing
that module must be cheap (no compiler, no CUDA); `BackendSpec.target` is imported when the backend is first needed.
A planner (context parallelism) does the same in ``kda_core.planners``. ``docs/writing-a-backend.md`` is the guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kda_core.contract import INPUT_DTYPES, Feature, KdaGradients, KdaInputs, KdaOutputs, ProblemShape

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
            architecture such as "sm_90a", it gives (kernel class, configuration) pairs in the form of `kda_core.cute`.
            None: nothing to compile. Since ABI 1.1.
        note: what whoever relies on the backend should know, such as where it has been run; shown where
            backends are listed. None: nothing. Since ABI 1.2.
        dtypes: torch's names of the dtypes of q, k and v that it serves, such as ``{"bfloat16", "float16"}``. Core refuses
            all others. None: `Backend.can_run` decides. Since ABI 1.3.
        head_dims: the pairs (K, V) that it serves, such as ``{(128, 128)}``. Core refuses all others. None:
            `Backend.can_run` decides. Since ABI 1.3.
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
    but `prepare` may synchronise with a GPU. Methods may be called from several threads at once. Answers of `can_run` and
    `workspace_bytes` depend on the shape alone: core keeps them until the registry is refreshed."""

    def can_run(self, shape: ProblemShape) -> str | None:
        """None, or why this shape is not served ("T=70; a multiple of 64 is needed"). What the spec declares was
        checked before: features, dtypes and head dimensions."""
        ...

    def workspace_bytes(self, shape: ProblemShape) -> int:
        """Bytes of scratch memory that `chunk_fwd` needs for this shape, 0 for none."""
        ...

    def prepare(self, shape: ProblemShape) -> None:
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
    """Optional, behind `Feature.SEGMENT_SUMMARY`, since ABI 1.2: for planners that cut sequences into segments.

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
            workspace: [`segment_workspace_bytes`] uint8. What `run_segments` can use is left in it: all that depends
                on the tokens alone is computed once.
        """
        ...

    def run_segments(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """As `Backend.chunk_fwd`, with `outputs.workspace` as the last `summarize` left it, which was of these segments.
        `inputs.initial_state` are the true states at the segments' starts. Returns `outputs`."""
        ...


@runtime_checkable
class SupportsMerge(Protocol):
    """Optional beside `SupportsSegments`, since ABI 1.2. Without it the planner merges in torch."""

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

    def run(self, plan: Plan, inputs: KdaInputs, outputs: KdaOutputs, backend: Backend) -> KdaOutputs:
        """Executes the call by the plan; the outputs are those of `Backend.chunk_fwd` within tolerance.

        Raises:
            PlannerError: the plan does not fit the call.
        """
        ...


class SupportsRefusal(Protocol):
    """Optional for a planner, since ABI 1.2. A planner without it is given every plan that a caller forces."""

    def refusal(self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str | None:
        """None, or why this plan, which a caller gave, cannot run this call on this backend: core raises it as a
        `PlannerError` before anything is launched. Must not synchronise. It depends on what `Planner.plan` does; core keeps
        None as it keeps a plan."""
        ...


class SupportsExplanation(Protocol):
    """Optional for a planner, since ABI 1.2."""

    def explain(self, plan: Plan | None, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str:
        """For `kda_core.explain`: the plan with its prediction and the rule that decided, or with None, which is what
        `Planner.plan` returned, why the call goes directly to the backend."""
        ...


class SupportsWorkspace(Protocol):
    """Optional for a planner, since ABI 1.3. Calls by the plans of a planner without it get the workspace of a direct call."""

    def workspace_bytes(self, plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> int:
        """Bytes of scratch memory that `Planner.run` needs for this plan, 0 for none; `KdaOutputs.workspace` then has as
        many. Must not synchronise. It depends on what `Planner.plan` does."""
        ...


class SupportsDiagnosis(Protocol):
    """Optional for a planner, since ABI 1.3."""

    def problems(self) -> Sequence[str]:
        """For ``python -m kda_core doctor``: a line for everything that the planner reads and cannot use, such as a damaged
        file, and how to mend it; empty where all is well."""
        ...


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


# ---- what a plugin gives is checked before anything uses it


def plain_spec(loaded: object, kind: type) -> Any:
    """The spec that an entry point gave, with every field read once and its values of built-in types. A subclass
    cannot change what a spec means: a plain one takes its place.

    Raises:
        AttributeError: a field is missing, or a property of a subclass raises.
    """
    values = {}
    for f in fields(kind):
        try:
            values[f.name] = getattr(loaded, f.name)
        except Exception as error:
            raise AttributeError(f"{f.name} cannot be read: {show_error(error)}") from error
    plain = {name: _plain(value) for name, value in values.items()}
    if type(loaded) is kind and all(plain[name] is value for name, value in values.items()):
        return loaded
    return kind(**plain)


def spec_problem(spec: Any, names: Collection[str] | None = None) -> str | None:
    """What is wrong with a spec from `plain_spec`, or None. `names`: of the fields to look at, all by default."""
    for f in fields(spec):
        check, expected = _CHECKS[f.name]
        value = getattr(spec, f.name)
        if (names is None or f.name in names) and not check(value):
            return f"{f.name} is {shown(value)}, not {expected}"
    return None


def target_problem(spec: BackendSpec | PlannerSpec, made: object) -> str | None:
    """Which methods the object behind `spec.target` lacks, or None. Optional ones are needed where the spec declares
    their feature."""
    if isinstance(spec, PlannerSpec):
        needed = ["plan", "plan_from_json", "run"]
    else:
        needed = ["can_run", "workspace_bytes", "prepare", "chunk_fwd"]
        needed += [method for feature, method in _METHODS.items() if feature in spec.features]
    missing = [name for name in needed if not callable(getattr(made, name, None))]
    return f"{type(made).__name__} has no {', '.join(missing)}" if missing else None


def shown(value: object) -> str:
    """A value of any kind for a message, in at most 200 characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of a plugin, which may fail in any way
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


def show_error(error: BaseException) -> str:
    """The type and the message of an error, for a message."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - of a plugin, which may fail in any way
        text = "an error without a text"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_DTYPES = tuple(sorted(map(dtype_name, INPUT_DTYPES)))
_METHODS = {Feature.BACKWARD.value: "chunk_bwd", Feature.RECURRENT.value: "recurrent_fwd"}


def _plain(value: Any) -> Any:
    """`value` with strings, tuples and sets of subclasses replaced by those of the built-in types."""
    if isinstance(value, str):
        return str.__str__(value)  # an exact str is returned as it is
    if not isinstance(value, (tuple, frozenset, set)):
        return value
    built_in = tuple if isinstance(value, tuple) else frozenset
    items = list(value)
    plain = [_plain(x) for x in items]
    same = type(value) is built_in and all(a is b for a, b in zip(items, plain))
    return value if same else built_in(plain)


def _is_integer(x: object) -> bool:
    return type(x) is int  # which a bool is not


def _is_pair(x: object) -> bool:
    return type(x) is tuple and len(x) == 2 and all(type(n) is int and n >= 0 for n in x)


def _is_name(x: object) -> bool:
    return type(x) is str and re.fullmatch(r"[a-z0-9][a-z0-9._-]*", x) is not None


def _is_arch(x: object) -> bool:
    if type(x) is not str:
        return _is_pair(x)
    if x in ("any", "cuda"):  # a GPU is told by its compute capability
        return x == "any"
    try:
        return torch.device(x).type == x
    except RuntimeError:
        return False


def _is_dtype(x: object) -> bool:
    return type(x) is str and x in _DTYPES


def _is_head_dims(x: object) -> bool:
    return _is_pair(x) and 0 not in x  # type: ignore[operator]


def _is_path(x: object) -> bool:
    if type(x) is not str:
        return False
    module, _, attribute = x.partition(":")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _is_text(x: object) -> bool:
    return type(x) is str


def _optional(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda x: x is None or check(x)


def _set_of(check: Callable[[object], bool], least: int) -> Callable[[object], bool]:
    return lambda x: type(x) is frozenset and len(x) >= least and all(map(check, x))


# field: (what holds of it, how a message says that)
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_name, "a lower-case name of letters, digits, '.', '_' and '-'"),
    "abi": (_is_pair, "(major, minor)"),
    "archs": (_set_of(_is_arch, 1), "a frozenset of compute capabilities such as (9, 0), 'cpu' or 'any'"),
    "features": (_set_of(_is_text, 0), "a frozenset of texts"),
    "target": (_is_path, "'package.module:Class'"),
    "install": (_is_text, "a text"),
    "dtypes": (_optional(_set_of(_is_dtype, 1)), f"a frozenset of some of {', '.join(_DTYPES)}"),
    "head_dims": (_optional(_set_of(_is_head_dims, 1)), "a frozenset of pairs (K, V) of positive integers"),
    "priority": (_is_integer, "an int"),
    "unavailable": (_optional(_is_text), "a text or None"),
    "variants": (_optional(_is_path), "'package.module:callable'"),
    "note": (_optional(_is_text), "a text or None"),
}
