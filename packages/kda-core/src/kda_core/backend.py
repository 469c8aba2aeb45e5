"""What a plugin is: a cheap spec, found through an entry point, and the class that the spec names.

A backend package registers ``name = "package.plugin:SPEC"`` in the entry-point group ``kda_core.backends``. Importing
that module must be cheap (no compiler, no CUDA); `BackendSpec.target` is imported when the backend is first needed.
A planner (context parallelism) does the same in ``kda_core.planners``. ``docs/writing-a-backend.md`` is the guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kda_core.contract import KdaGradients, KdaInputs, KdaOutputs, ProblemShape

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


@runtime_checkable
class Backend(Protocol):
    """The methods that every backend has. All launches go to the current stream of the inputs' device, and no method
    but `prepare` may synchronise with a GPU. Methods may be called from several threads at once. Answers of `can_run` and
    `workspace_bytes` depend on the shape alone: core keeps them until the registry is refreshed."""

    def can_run(self, shape: ProblemShape) -> str | None:
        """None, or why this shape is not served ("K=64; only K=128 is compiled"). Features were checked before."""
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
        """As `Backend.chunk_fwd`, for a few tokens a sequence (decoding)."""
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
        """A plan that is predicted to be faster than a direct call, or None. Must not synchronise."""
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


def spec_problem(loaded: object, kind: type) -> str | None:
    """What is wrong with the object behind an entry point, or None."""
    if not isinstance(loaded, kind):
        return f"the entry point is {type(loaded).__name__}, not a {kind.__name__}"
    spec: Any = loaded
    if not (isinstance(spec.abi, tuple) and len(spec.abi) == 2 and all(isinstance(n, int) for n in spec.abi)):
        return f"abi is {spec.abi!r}, not (major, minor)"
    if not (isinstance(spec.name, str) and spec.name and spec.name == spec.name.lower()):
        return f"name is {spec.name!r}, not a lower-case name"
    if spec.target.count(":") != 1:
        return f"target is {spec.target!r}, not 'package.module:Class'"
    variants = getattr(spec, "variants", None)  # a `PlannerSpec` has none
    if variants is not None and not (isinstance(variants, str) and variants.count(":") == 1):
        return f"variants is {variants!r}, not 'package.module:callable'"
    return None
