"""A call between its arguments and its backend, in two steps.

`look_up` and `resolve` compute what the metadata of a call decides: validation, the backend, the size of the workspace. The
result is cached, because for short sequences host overhead dominates. `execute` does the rest in every call: it checks
addresses and host copies of cu_seqlens, allocates the outputs, asks the planner and runs the backend.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core import backward, contents, env, install, registry
from kda_core.arguments import N_TENSORS, Arguments, checked
from kda_core.backend import (
    PREPARES_SINCE,
    Plan,
    Planner,
    PreparedLaunch,
    saves_states,
)
from kda_core.buffers import GivenOutputs, allocate_outputs, has_other_rows, make_inputs
from kda_core.contract import (
    Feature,
    KdaGradients,
    KdaInputs,
    KdaJournal,
    KdaOptions,
    KdaOutputs,
    KdaPool,
    ProblemShape,
    Tensors,
    unchecked,
)
from kda_core.discovery import FAILURES
from kda_core.errors import (
    BackendContractError,
    BackendUnsupportedError,
    KdaError,
    NoEligibleBackendError,
    PlannerError,
)
from kda_core.plugin_checks import show_error, shown
from kda_core.recent import Recent
from kda_core.validate import check_layouts, check_memory, check_outputs

MAX_CALLS = 1024
"""How many resolved calls are kept."""

_numbers = itertools.count()


@dataclass(frozen=True)
class ResolvedCall:
    """What the metadata of a call, its options and the rules of choice decide. It holds no tensor.

    Attributes:
        shape: the validated metadata, as the backend of the forward receives it.
        choice: the backend of the forward, and the rule that chose it.
        backward: the same of the backward; None if the call needs none.
        entry: name of the backend's method that computes the call.
        workspace_bytes: scratch memory of a direct call; `needed_workspace` returns that of a plan.
        planner: name and object of the planner to ask for a plan, or None.
        plan: JSON text of the plan that the caller passed; None if the planner makes one.
        saves: whether the forward can save states that the backward then reads.
        strided: whether the backend receives strided inputs as they are; a planner only does in a call over a pool.
        checks_contents: whether the values of the inputs are checked before each run (``KDA_CHECK``).
        number: unique in the process; key of the planner's cached answers.
    """

    shape: ProblemShape
    choice: registry.Choice
    backward: registry.Choice | None
    entry: str
    workspace_bytes: int
    planner: tuple[str, Planner] | None
    plan: str | None
    saves: bool = False
    strided: bool = False
    checks_contents: bool = False
    number: int = field(default_factory=lambda: next(_numbers), compare=False, repr=False)


# Errors that a plugin raises on purpose: those of this project, and those of a device or an allocator, which callers may
# handle. Core wraps all others.
_ON_PURPOSE = (KdaError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)

CALLS: Recent[ResolvedCall] = Recent(MAX_CALLS)
"""Resolved calls by `Key`."""

SHAPES: Recent[ProblemShape] = Recent(MAX_CALLS)
"""Validated shapes by `_without_T`: in serving nearly every call has a new T."""

ANSWERS: Recent[tuple[Plan | None]] = Recent(
    16 << 20, lambda key, answer: 500 + 40 * len(key[1] or ()) + (0 if answer[0] is None else 1 << 16)
)
"""The planner's plans (or the caller's plan), each in a tuple, by `ResolvedCall.number`, the lengths of a packed call that the host
knows, or None, and whether the plan is that of the backward. In serving every call may have new lengths, so the limit is in bytes:
a tuple and an int for each length, and for a plan the size of one with some hundred segments."""


# ---- resolve


Key = tuple[tuple[Any, ...], ...]
"""What a `ResolvedCall` is computed from: `environment`; shape, dtype and device of each tensor, or None; the other arguments;
their types, because ``1 == True`` and both have the same hash. Addresses and contents are not part of it: `execute` checks
those."""


def look_up(args: Arguments) -> tuple[Key | None, ResolvedCall | None]:
    """Returns the key of a call, and the cached result or None. The types of the arguments need not have been checked: a wrong
    one gives the key None, or a key for which nothing is cached."""
    try:
        tensors = tuple([None if x is None else (x.shape, x.dtype, x.device) for x in args[:N_TENSORS]])  # type: ignore[union-attr]
    except RuntimeError:  # a nested tensor has no shape
        return None, None
    values = args[N_TENSORS:-1]  # without `saves`, which does not affect the look-up
    key = (environment(args), tensors, values, tuple(map(type, values)))
    try:
        return key, CALLS.get(key)
    except TypeError:  # a value that cannot be hashed
        return None, None


def environment(args: Arguments) -> tuple[Any, ...]:
    """Returns what a call depends on besides its arguments: the state of the registry and environment variables."""
    return (
        registry.REGISTRY.generation,
        registry.REGISTRY.rules(args.backend),
        env.KDA_CP.given() if args.context_parallel == "auto" else None,
        env.KDA_CHECK.given(),
    )


def resolve(args: Arguments, key: Key | None, are_checked: bool = True) -> ResolvedCall:
    """Validates a call's metadata, chooses its backend, and caches the result.

    Args:
        args: the arguments.
        key: from `look_up` of the same call.
        are_checked: whether their types are checked. If not, none that is a tensor requires grad while grad mode is on.

    Raises:
        KdaError: invalid arguments, or no backend serves the call.
    """
    shape = interned(_validated(args, key, are_checked))
    requiring: list[str] = []
    if shape.options.needs_backward:
        requiring += (n for n, x in zip(Arguments._fields, args.tensors) if x is not None and x.requires_grad)
    call = of_shape(shape, choose(shape, args.backend, requiring), args.context_parallel)
    if env.check():
        call = replace(call, checks_contents=True)
    # plugins and other threads may have changed the environment meanwhile
    if key is not None and key[0] == environment(args):
        CALLS.put(key, call)
    return call


def _validated(args: Arguments, key: Key | None, are_checked: bool) -> ProblemShape:
    """Returns the validated metadata of a call; arguments as in `resolve`.

    The checks compare T between q, k, v, g and beta, and with nothing else. So a call is valid if it differs only in T from an earlier one,
    and its tensors have strides.

    Raises:
        KdaError: invalid arguments.
    """
    similar = None if key is None else _without_T(key)
    found = None if similar is None else SHAPES.get(similar)
    if found is not None:
        check_layouts(Tensors._fields, args.tensors)
        return unchecked(ProblemShape, {**found.__getstate__(), "T": args.q.shape[1]})
    shape = (args if are_checked else checked(args)).shape()
    if similar is not None:
        SHAPES.put(similar, shape)
    return shape


def _without_T(key: Key) -> tuple[Any, ...] | None:
    """Returns the metadata and the options of a key without T; None if q, k, v, g and beta do not have one T."""
    _, tensors, *options = key
    rest, lengths = [], set()
    for tensor in tensors[:_N_PER_TOKEN]:
        if tensor is None or len(tensor[0]) < 2:
            return None
        (B, T, *sizes), dtype, device = tensor
        lengths.add(T)
        rest.append((B, *sizes, dtype, device))
    return (*rest, tensors[_N_PER_TOKEN:], *options) if len(lengths) == 1 else None


_N_PER_TOKEN = Tensors._fields.index("beta") + 1


def resolved(args: Arguments) -> ResolvedCall:
    """Returns the cached result of `resolve`, or a new one."""
    key, call = look_up(args)
    return resolve(args, key) if call is None else call


@functools.lru_cache(maxsize=MAX_CALLS)
def interned(shape: ProblemShape) -> ProblemShape:
    """Returns one object for all equal shapes, so that the caches of backends hit by identity."""
    return shape


class Choices(NamedTuple):
    """The backends of a call: that of the forward, and that of the backward, which is None if the call needs none."""

    forward: registry.Choice
    backward: registry.Choice | None


def choose(shape: ProblemShape, backend: str | None, requiring: Sequence[str] = ()) -> Choices:
    """Returns `Registry.resolve` for the backward, which only a backend with that feature has, and for the forward alone. If a
    backend would serve the call without gradients, the error says so.

    Args:
        requiring: names of the inputs that require grad, for that message.

    Raises:
        BackendError: as `Registry.resolve`.
    """
    resolve = registry.REGISTRY.resolve
    if not shape.options.needs_backward:
        return Choices(resolve(shape, backend), None)
    try:
        backward = resolve(shape, backend)
    except (BackendUnsupportedError, NoEligibleBackendError) as error:
        try:
            served = resolve(forward_alone(shape), backend).spec.name
        except KdaError:
            raise error from None
        who = f"{', '.join(requiring) or 'an input'} requires grad"
        hint = f"{who}; without gradients (torch.no_grad(), detach()) {served} serves this call"
        raise type(error)(f"{error}\n  {hint}") from None
    return Choices(resolve(forward_alone(shape), backend), backward)


def forward_alone(shape: ProblemShape) -> ProblemShape:
    """Returns the shape of the same call without a backward."""
    return replace(shape, options=replace(shape.options, needs_backward=False))


def of_shape(shape: ProblemShape, choices: Choices, mode: str) -> ResolvedCall:
    """Returns the call of this shape on chosen backends; `mode` is "off", "auto", or a planner's plan as JSON text.

    Raises:
        BackendContractError: the backend's workspace size is not a number of bytes.
        PlannerError: the installed planner is broken, or no planner is active for the plan.
    """
    choice, backward = choices
    is_split = backward is not None and backward.spec != choice.spec
    # a backend that has not the backward of the call may have none at all
    received = interned(forward_alone(shape)) if is_split else shape
    strided = Feature.STRIDED.value in choice.spec.features
    if shape.options.recurrent:
        return ResolvedCall(received, choice, backward, "recurrent_fwd", 0, None, None, strided=strided)
    planner, plan, saves = _planned(choices, shape, mode)
    size = _workspace_bytes(received, choice)
    strided = strided and (planner is None or shape.pool is not None)
    return ResolvedCall(received, choice, backward, "chunk_fwd", size, planner, plan, saves, strided)


def _planned(
    choices: Choices, shape: ProblemShape, mode: str
) -> tuple[tuple[str, Planner] | None, str | None, bool]:
    """Returns `ResolvedCall.planner`, `ResolvedCall.plan` and `ResolvedCall.saves` of a mode."""
    planner, plan = _planner(shape.options, mode)
    forward, backward = choices
    if backward is None:
        return planner, plan, False
    saves = saves_states(shape, forward.spec, backward.spec, backward.backend)
    if planner is None or (is_training(planner) and not (saves and backward.spec != forward.spec)):
        return planner, plan, saves
    # the planner would not save states: its own plans are then not worth it, and those of the caller go first
    return (None, None, saves) if plan is None else (planner, plan, False)


def is_training(planner: tuple[str, Planner]) -> bool:
    """Returns whether a planner splits calls whose inputs require grad (`kda_core.backend.SupportsTraining`)."""
    return hasattr(planner[1], "plan_backward")


def splits_over_pools(options: KdaOptions, choice: registry.Choice, mode: str) -> bool:
    """Returns whether the active planner splits calls over a pool without copies (`kda_core.backend.SupportsPools`), by its own plans or
    by the caller's; `mode` as in `of_shape`.

    Raises:
        PlannerError: the planner is broken, or there is none for the caller's plan.
    """
    found, text = _planner(options, mode)
    if found is None or Feature.POOL_SEGMENTS.value not in choice.spec.features:
        return False
    if not hasattr(found[1], "executes_over_pools"):
        return False
    plan = None if text is None else _from_planner(found, "plan_from_json", text)
    return bool(_from_planner(found, "executes_over_pools", plan, choice.spec, choice.backend))


def may_save(args: Arguments) -> bool:
    """Returns whether the forward is to save states for the backward; False if the call is going to fail.

    A trace asks too, and may not know the sizes. The answer becomes an argument of the operator, so its outputs have the shapes of the
    trace whichever backends serve the call when it runs.
    """
    try:
        key, call = look_up(args)
        if call is not None:
            return call.saves
        shape = args.shape()
        if shape.is_concrete:
            return resolve(args, key).saves
        return _planned(choose(shape, args.backend), shape, args.context_parallel)[2]
    except KdaError:
        return False


def _workspace_bytes(shape: ProblemShape, choice: registry.Choice) -> int:
    """Returns the workspace size that the backend asks for.

    Raises:
        BackendContractError: the backend raised, or returned no number of bytes.
    """
    asked = f"{choice.spec.name}.workspace_bytes"
    try:
        needed = choice.backend.workspace_bytes(shape)
    except _ON_PURPOSE:
        raise
    except FAILURES as error:
        raise BackendContractError(f"{asked} raised {show_error(error)}") from error
    if not _is_size(needed):
        raise BackendContractError(f"{asked} returned {shown(needed)}, not an int from 0 to 2**63 - 1")
    return needed


def _is_size(x: object) -> bool:
    return type(x) is int and 0 <= x < 2**63


def _planner(options: KdaOptions, mode: str) -> tuple[tuple[str, Planner] | None, str | None]:
    """Returns the active planner, if the mode and the options allow one, and the caller's plan."""
    if mode == "off":
        return None, None
    found = registry.REGISTRY.planner()
    if mode == "auto":
        return (None if options.pin else found), None
    if found is None:
        raise PlannerError(
            "context_parallel: got a plan, but no planner is active; unset KDA_CP=0, or install a planner: "
            f"{install.command('kda-cp')}"
        )
    return found, mode


# ---- execute


def execute(
    call: ResolvedCall,
    tensors: Sequence[Tensor | None],
    given: GivenOutputs | None = None,
    *,
    saves: bool = False,
    pool: KdaPool | None = None,
    journal: KdaJournal | None = None,
) -> KdaOutputs:
    """Runs one call and returns its outputs.

    Args:
        tensors: `Arguments.tensors`.
        given: the tensors that the caller passed to be written.
        saves: whether the backend is to save states for the backward.
        pool, journal: those of a call whose shape has them.

    Raises:
        KdaError: contents of cu_seqlens that the host knows, or `given`, are invalid; or the backend violated the ABI.
    """
    shape, choice = call.shape, call.choice
    inputs = make_inputs(tensors, shape, strided=call.strided, pool=pool, journal=journal)
    # reading the lengths checks host contents of cu_seqlens, before any launch
    lengths = None if inputs.cu_seqlens is None else inputs.sequence_lengths()
    if call.checks_contents:
        contents.check_contents(inputs)
    plan = None if call.planner is None else ask_planner(call, inputs, lengths)
    needed = call.workspace_bytes if plan is None else needed_workspace(call, plan, inputs)
    if given is None:
        outputs = allocate_outputs(inputs, needed, saves=saves)
    else:
        plan, needed = fitting(call, plan, needed, given.workspace)
        outputs = allocate_outputs(inputs, needed, given)
        check_outputs(inputs, outputs, needed)
        check_memory(inputs, outputs)
        if has_other_rows(inputs):
            outputs.o.zero_()
    planner = run(call, plan, inputs, outputs)
    if given is not None:  # as torch's own functions do, so that autograd detects changes of what it saved
        torch.autograd.graph.increment_version([x for x in given if x is not None])
    registry.notify(choice.spec.name, call.entry, shape.device_type, planner)
    return outputs


def run(call: ResolvedCall, plan: Plan | None, inputs: KdaInputs, outputs: KdaOutputs) -> str | None:
    """Runs the backend, or the planner with its plan. Returns the name of the planner if it ran.

    Raises:
        KdaError: the backend or the planner violated the ABI.
    """
    choice, planner = call.choice, None
    if plan is not None and call.planner is not None:
        planner = call.planner[0]
        returned = _from_planner(call.planner, "execute", plan, inputs, outputs, choice.backend)
    else:
        returned = getattr(choice.backend, call.entry)(inputs, outputs)
    if returned is not outputs:
        what = f"returned {type(returned).__name__}, not the outputs that it was given"
        if planner is not None:
            raise registry.REGISTRY.planner_error(planner, f"execute {what}")
        raise BackendContractError(f"{choice.spec.name}.{call.entry} {what}")
    return planner


def prepares(call: ResolvedCall) -> bool:
    """Returns whether the backend may have a launch of calls like this one."""
    choice, shape = call.choice, call.shape
    if choice.spec.abi < PREPARES_SINCE or not hasattr(choice.backend, "prepare"):
        return False
    return shape.T > 0 and not call.saves and not shape.options.return_intermediate_states


def prepared(call: ResolvedCall, inputs: KdaInputs) -> PreparedLaunch | None:
    """Returns the backend's launch of direct calls like this one, or None if it has none. Nothing is launched."""
    if not prepares(call):
        return None
    backend: Any = call.choice.backend  # a kda_core.backend.SupportsPrepare
    return backend.prepare(inputs, allocate_outputs(inputs, call.workspace_bytes))


def is_direct(call: ResolvedCall, lengths: tuple[int, ...] | None) -> bool:
    """Returns whether the planner has answered that a call with these lengths is direct."""
    answer = ANSWERS.get((call.number, lengths, False))
    return answer is not None and answer[0] is None


def execute_backward(
    call: ResolvedCall,
    inputs: KdaInputs,
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    wanted: Collection[str],
    kept: Sequence[Tensor | None],
) -> KdaGradients:
    """Runs the backward of one call and returns its gradients.

    Args:
        call: resolved for the backend of the backward.
        inputs: those of the call, in the form that backends require.
        grad_o, grad_final_state: gradients of the outputs, contiguous and aligned.
        wanted: names of the inputs that need a gradient.
        kept: the saved states and the residual, each or None.

    Raises:
        KdaError: the planner is broken.
    """
    lengths = None if inputs.cu_seqlens is None else inputs.sequence_lengths()
    plan, choice, planner = ask_planner_of_backward(call, inputs, lengths), call.choice, None
    if plan is not None and call.planner is not None:
        planner = call.planner[0]
        arguments = (plan, inputs, grad_o, grad_final_state, wanted, choice.spec, choice.backend, *kept)
        gradients = _from_planner(call.planner, "execute_backward", *arguments)
        if not isinstance(gradients, KdaGradients):
            what = f"execute_backward returned {type(gradients).__name__}, not KdaGradients"
            raise registry.REGISTRY.planner_error(planner, what)
    else:
        memory = backward.reserve(choice, inputs, wanted)
        gradients = backward.run(choice, inputs, grad_o, grad_final_state, memory, kept)
    registry.notify(choice.spec.name, "chunk_bwd", call.shape.device_type, planner)
    return gradients


def ask_planner(call: ResolvedCall, inputs: KdaInputs, lengths: tuple[int, ...] | None) -> Plan | None:
    """Returns the plan of a call, None for a direct call.

    Args:
        lengths: of a packed call, if the host knows them; else None.

    Raises:
        PlannerError: the caller's plan does not fit the call, or the planner is broken.
    """
    return _answer(call, inputs, lengths, of_backward=False)


def ask_planner_of_backward(
    call: ResolvedCall, inputs: KdaInputs, lengths: tuple[int, ...] | None
) -> Plan | None:
    """Returns the plan of the backward of a call, None for a direct one.

    Args:
        call: resolved for the backend of the backward.
        inputs, lengths: as in `ask_planner`.

    Raises:
        PlannerError: as `ask_planner`.
    """
    if call.planner is None or not is_training(call.planner):
        return None
    return _answer(call, inputs, lengths, of_backward=True)


def _answer(
    call: ResolvedCall, inputs: KdaInputs, lengths: tuple[int, ...] | None, of_backward: bool
) -> Plan | None:
    if call.planner is None:
        return None
    key = (call.number, lengths, of_backward)
    answer = ANSWERS.get(key)
    if answer is None:
        if call.plan is None:
            choice, method = call.choice, "plan_backward" if of_backward else "plan"
            plan = _from_planner(call.planner, method, inputs, choice.spec, choice.backend)
            answer = (None if plan is None else _checked_plan(call.planner[0], method, plan),)
        else:
            answer = (_given_plan(call.plan, call.planner, call, inputs, of_backward),)
        ANSWERS.put(key, answer)
    return answer[0]


def needed_workspace(call: ResolvedCall, plan: Plan | None, inputs: KdaInputs) -> int:
    """Returns the bytes of scratch memory of a call by this plan, which `ask_planner` returned; None is a direct call.

    Raises:
        PlannerError: the planner returned no number of bytes.
    """
    if plan is None or call.planner is None:
        return call.workspace_bytes
    name, planner = call.planner
    if not hasattr(planner, "workspace_bytes"):  # optional: kda_core.backend.SupportsWorkspace
        return call.workspace_bytes
    choice = call.choice
    needed = _from_planner(call.planner, "workspace_bytes", plan, inputs, choice.spec, choice.backend)
    if not _is_size(needed):
        what = f"workspace_bytes returned {shown(needed)}, not an int of at least 0 and below 2**63"
        raise registry.REGISTRY.planner_error(name, what)
    return needed


def fitting(
    call: ResolvedCall, plan: Plan | None, needed: int, workspace: Tensor | None
) -> tuple[Plan | None, int]:
    """Returns the plan that runs with the caller's workspace, and the bytes that the workspace must have. If a planner's own
    plan needs more than the caller passed, the call is direct; a plan that the caller passed stays."""
    if plan is None or call.plan is not None or workspace is None or workspace.numel() >= needed:
        return plan, needed
    return None, min(needed, call.workspace_bytes)


def _given_plan(
    text: str, found: tuple[str, Planner], call: ResolvedCall, inputs: KdaInputs, of_backward: bool
) -> Plan:
    """Returns the caller's plan if it fits the call, both the forward and the backward."""
    name, planner = found
    plan = _checked_plan(name, "plan_from_json", _from_planner(found, "plan_from_json", text))

    def check(method: str, choice: registry.Choice, inputs: KdaInputs, where: str = "") -> None:
        why = _from_planner(found, method, plan, inputs, choice.spec, choice.backend)
        if why is not None:
            raise PlannerError(f"context_parallel: {name} cannot run this plan{where}: {why}")

    if hasattr(planner, "refusal") and not of_backward:  # optional: kda_core.backend.SupportsRefusal
        check("refusal", call.choice, inputs)
    if call.backward is not None and is_training(found):
        options = replace(inputs.options, needs_backward=True)
        trained = replace(inputs, shape=interned(replace(inputs.shape, options=options)))
        check("refusal_of_backward", call.backward, trained, " in the backward")
    return plan


def _from_planner(planner: tuple[str, Planner], method: str, *args: Any) -> Any:
    """Returns what a method of the planner returns. An unexpected exception becomes a `PlannerError` with the planner's
    name."""
    name, made = planner
    try:
        return getattr(made, method)(*args)
    except _ON_PURPOSE:
        raise
    except Exception as error:
        raise registry.REGISTRY.planner_error(name, f"{method} raised {show_error(error)}") from error


def _checked_plan(name: str, method: str, plan: Any) -> Plan:
    """Returns the plan if it has the method that `Plan` requires."""
    try:
        valid = callable(plan.to_json)
    except Exception:  # noqa: BLE001 - a plugin may raise anything
        valid = False
    if not valid:
        what = f"{method} returned {shown(plan)}, not a plan with to_json"
        raise registry.REGISTRY.planner_error(name, what)
    return plan
