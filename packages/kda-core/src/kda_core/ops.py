"""The operators behind the API: torch.library schemas, fake kernels, and the dispatch to a backend. Autograd is in
`kda_core.gradients`.

An operator takes FLA's tensors, then the fields of `KdaOptions` in order, then the choice of backend and of context
parallelism as strings, so that ``torch.compile(fullgraph=True)`` sees one node and every backend gets it for nothing.
The backend is chosen when the operator runs on real tensors, never while it is traced.

A call is two steps. `call_plan` finds all that metadata decides (validation, backend, size of the workspace) and keeps
it, so that a call like one before costs a look-up. `execute` does what every call needs: it looks at addresses and
contents, allocates, and runs the backend. Eager calls without gradients take both steps without the dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad

from kda_core import contents, contract, env, gradients, install, registry
from kda_core.backend import Plan, Planner, SupportsBackward
from kda_core.contract import OPTION_FIELDS, KdaInputs, KdaOptions, KdaOutputs, ProblemShape
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

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"
)
_N_TENSORS = TENSORS.count(",") + 1
_N_OPTIONS = len(OPTION_FIELDS)
_SCHEMA_TYPES = {"bool": "bool", "int": "int", "int | None": "int?", "float | None": "float?"}
OPTIONS = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind, _ in OPTION_FIELDS)
CHOICE = "str? backend, str context_parallel"

_LIB = torch.library.Library("kda_core", "DEF")
_LIB.define(f"chunk_fwd({TENSORS}, {OPTIONS}, {CHOICE}) -> (Tensor, Tensor, Tensor)")
_LIB.define(
    f"chunk_fwd_out({TENSORS}, {OPTIONS}, {CHOICE}, "
    "Tensor(a!) o, Tensor(b!)? final_state, Tensor(c!)? h, Tensor(d!)? workspace) -> ()"
)
_LIB.define(
    f"chunk_bwd(Tensor grad_o, Tensor? grad_final_state, Tensor served, {TENSORS}, {OPTIONS}, str? backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True)
class CallPlan:
    """What the metadata of a call, its options and the rules of choice decide; it holds no tensor.

    Attributes:
        shape: the validated metadata.
        choice: the backend.
        entry: the backend's method that computes the call.
        workspace_bytes: scratch memory of a direct call; `needed_workspace` has that of a plan.
        planner: name and planner that is asked how to split the call, or None.
        plan: JSON of the plan that the caller gave, None where the planner makes one.
        checked: whether the values of its inputs are looked at before it runs (``KDA_CHECK``).
        identity: stands for this object where the planner's answers are kept.
    """

    shape: ProblemShape
    choice: registry.Choice
    entry: str
    workspace_bytes: int
    planner: tuple[str, Planner] | None
    plan: str | None
    checked: bool = False
    identity: object = field(default_factory=object, compare=False, repr=False)


# Not by accident: errors of this project, and those of a device or an allocator, which callers may handle.
_ON_PURPOSE = (KdaError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)

# What the planner has answered, or the caller's plan, in a tuple, by `CallPlan.identity` and the lengths of a packed call
# that the host knows, or None. Serving may meet other lengths in every call, so their memory is bounded: a tuple and an
# int for each length, and for a plan what one of some hundred pieces takes.
_ANSWERS: Recent[tuple[Plan | None]] = Recent(
    16 << 20, lambda key, answer: 500 + 40 * len(key[1] or ()) + (0 if answer[0] is None else 1 << 16)
)


def call_plan(
    tensors: Sequence[Any],
    rest: tuple[Any, ...],
    check: Callable[..., tuple[Any, ...]] | None = None,
) -> CallPlan:
    """The plan of a call, made when a call like it is first met. `rest`: the options, backend and context_parallel, in
    the order of the operators' arguments, or what a user gave for them: then ``check(tensors, rest)`` raises or
    returns the arguments of an operator.

    The key is all that a plan is made from. Addresses and contents are no part of it: `execute` looks at those.

    Raises:
        KdaError: bad metadata, or nobody serves the call.
    """
    try:
        key = _plan_key(tensors, rest)
    except RuntimeError:  # a nested tensor has no shape, which `check` says
        if check is not None:
            check(tensors, rest)
        raise
    plans = registry.REGISTRY.plans  # read once: see there
    try:
        plan = plans.get(key)
    except TypeError:  # a user's option that cannot be hashed is none, which `check` says
        plan = None
    if plan is None:
        *options, backend, mode = rest if check is None else check(tensors, rest)[_N_TENSORS:]
        shape = _shared(contract.problem_shape(*tensors, options=KdaOptions(*options)))
        plan = make_plan(shape, _choose(shape, backend, tensors), mode)
        if env.check():
            plan = replace(plan, checked=True)
        if key == _plan_key(tensors, rest):  # another thread may have changed the environment meanwhile
            plans.put(key, plan)
    return plan


def _choose(shape: ProblemShape, backend: str | None, tensors: Sequence[Tensor | None]) -> registry.Choice:
    """`Registry.resolve`, with a hint where the call would be served without gradients."""
    try:
        return registry.REGISTRY.resolve(shape, backend)
    except (BackendUnsupportedError, NoEligibleBackendError) as error:
        if not shape.options.needs_backward:
            raise
        try:
            options = replace(shape.options, needs_backward=False)
            served = registry.REGISTRY.resolve(replace(shape, options=options), backend).spec.name
        except KdaError:
            raise error from None
        names = [n for n, x in zip(gradients.TENSOR_NAMES, tensors) if x is not None and x.requires_grad]
        who = f"{', '.join(names) or 'an input'} requires grad"
        hint = f"{who}; without gradients (torch.no_grad(), detach()) {served} serves this call"
        raise type(error)(f"{error}\n  {hint}") from None


@functools.lru_cache(maxsize=registry.MAX_PLANS)
def _shared(shape: ProblemShape) -> ProblemShape:
    """One object for all plans of equal shapes: what a backend keeps by shape is then found without comparing fields."""
    return shape


def _plan_key(tensors: Sequence[Tensor | None], rest: tuple[Any, ...]) -> tuple[Any, ...]:
    return (
        tuple([None if x is None else (x.shape, x.dtype, x.device) for x in tensors]),
        rest,
        tuple(map(type, rest)),  # 1 is no bool, though it equals True
        registry.REGISTRY.rules(rest[-2]),
        env.KDA_CP.given() if rest[-1] == "auto" else None,
        env.KDA_CHECK.given(),
    )


def make_plan(shape: ProblemShape, choice: registry.Choice, mode: str) -> CallPlan:
    """The plan of a call on a chosen backend; `mode` is "off", "auto", or a planner's plan as JSON.

    Raises:
        PlannerError: the installed planner is broken, or a plan has none.
    """
    if shape.options.recurrent:
        return CallPlan(shape, choice, "recurrent_fwd", 0, None, None)
    return CallPlan(
        shape, choice, "chunk_fwd", _workspace_bytes(shape, choice), *_planner(shape.options, mode)
    )


def _workspace_bytes(shape: ProblemShape, choice: registry.Choice) -> int:
    """What the backend asks for.

    Raises:
        BackendContractError: it raised, or this is no number of bytes.
    """
    asked = f"{choice.spec.name}.workspace_bytes"
    try:
        needed = choice.backend.workspace_bytes(shape)
    except _ON_PURPOSE:
        raise
    except FAILURES as error:
        raise BackendContractError(f"{asked} raised {show_error(error)}") from error
    if type(needed) is not int or not 0 <= needed < 2**63:
        raise BackendContractError(f"{asked} returned {shown(needed)}, not an int from 0 to 2**63 - 1")
    return needed


def _planner(options: KdaOptions, mode: str) -> tuple[tuple[str, Planner] | None, str | None]:
    """`CallPlan.planner` and `CallPlan.plan` of a mode."""
    if mode == "off" or (mode == "auto" and options.needs_backward):
        return None, None
    found = registry.REGISTRY.planner()
    if mode == "auto":
        return (None if options.pin else found), None
    if found is None:
        raise PlannerError(
            "context_parallel: a plan was given, but no planner is installed and on; KDA_CP=0 turns planners off, "
            f"kda-cp is one: {install.command('kda-cp')}"
        )
    return found, mode


# ---- real tensors


def execute(
    call: CallPlan, tensors: Sequence[Tensor | None], given: Sequence[Tensor | None] | None = None
) -> KdaOutputs:
    """Runs one call. `given`: the caller's o, final_state, h and workspace, each or None.

    Raises:
        KdaError: contents of cu_seqlens that the host knows, or `given`, are wrong; or the backend broke the ABI.
    """
    shape, choice = call.shape, call.choice
    inputs = contract.make_inputs(tensors, shape)
    # where the host has a copy of cu_seqlens, its contents are checked before any launch
    lengths = None if inputs.cu_seqlens is None else inputs.sequence_lengths()
    if call.checked:
        contents.check_contents(inputs)
    plan = None if call.planner is None else ask_planner(call, inputs, lengths)
    needed = call.workspace_bytes if plan is None else needed_workspace(call, plan, inputs)
    if given is None:
        outputs = contract.allocate_outputs(inputs, needed)
    else:
        plan, needed = fitting(call, plan, needed, given[3])
        outputs = contract.allocate_outputs(inputs, needed, given)
        contract.check_outputs(inputs, outputs, needed)
        contract.check_memory(inputs, outputs)
    name = None
    if plan is not None and call.planner is not None:
        name = call.planner[0]
        returned = _from_planner(call.planner, "execute", plan, inputs, outputs, choice.backend)
    else:
        returned = getattr(choice.backend, call.entry)(inputs, outputs)
    if returned is not outputs:
        what = f"returned {type(returned).__name__}, not the outputs it was given"
        if name is not None:
            raise registry.REGISTRY.planner_error(name, f"execute {what}")
        raise BackendContractError(f"{choice.spec.name}.{call.entry} {what}")
    if given is not None:  # as torch's own functions do: autograd sees that what it saved has changed
        torch.autograd.graph.increment_version([x for x in given if x is not None])
    registry.notify(choice.spec.name, call.entry, shape.device_type, name)
    return outputs


def ask_planner(call: CallPlan, inputs: KdaInputs, lengths: tuple[int, ...] | None) -> Plan | None:
    """How the planner splits the call, or None for a direct one. `lengths`: of a packed call, where the host knows them.

    Raises:
        PlannerError: the caller's plan does not fit the call, or the planner is broken.
    """
    if call.planner is None:
        return None
    answer = _ANSWERS.get((call.identity, lengths))
    if answer is None:
        if call.plan is None:
            choice = call.choice
            plan = _from_planner(call.planner, "plan", inputs, choice.spec, choice.backend)
            answer = (None if plan is None else _checked_plan(call.planner[0], "plan", plan),)
        else:
            answer = (_given_plan(call.plan, call, inputs),)
        _ANSWERS.put((call.identity, lengths), answer)
    return answer[0]


def needed_workspace(call: CallPlan, plan: Plan | None, inputs: KdaInputs) -> int:
    """Bytes of scratch memory of a call by this plan, which `ask_planner` gave; None is a direct call.

    Raises:
        PlannerError: the planner gives no number of bytes.
    """
    if plan is None or call.planner is None:
        return call.workspace_bytes
    name, planner = call.planner
    if not hasattr(planner, "workspace_bytes"):  # optional: kda_core.backend.SupportsWorkspace
        return call.workspace_bytes
    choice = call.choice
    needed = _from_planner(call.planner, "workspace_bytes", plan, inputs, choice.spec, choice.backend)
    if type(needed) is not int or not 0 <= needed < 2**63:
        raise registry.REGISTRY.planner_error(
            name, f"workspace_bytes returned {shown(needed)}, not an int of at least 0 and below 2**63"
        )
    return needed


def fitting(
    call: CallPlan, plan: Plan | None, needed: int, workspace: Tensor | None
) -> tuple[Plan | None, int]:
    """The plan that runs a call with the caller's workspace, and the bytes that it must have. A planner's own plan that does not
    fit into it gives way to a direct call; a plan that the caller gave stays."""
    if plan is None or call.plan is not None or workspace is None or workspace.numel() >= needed:
        return plan, needed
    return None, min(needed, call.workspace_bytes)


def _given_plan(text: str, call: CallPlan, inputs: KdaInputs) -> Plan:
    """The caller's plan, if it fits the call."""
    assert call.planner is not None
    (name, planner), choice = call.planner, call.choice
    plan = _checked_plan(name, "plan_from_json", _from_planner(call.planner, "plan_from_json", text))
    if hasattr(planner, "refusal"):  # optional: kda_core.backend.SupportsRefusal
        why = _from_planner(call.planner, "refusal", plan, inputs, choice.spec, choice.backend)
        if why is not None:
            raise PlannerError(f"context_parallel: {name} cannot run this plan: {why}")
    return plan


def _from_planner(planner: tuple[str, Planner], method: str, *args: Any) -> Any:
    """What a method of the planner returns. What it raises by accident becomes a `PlannerError` that names it."""
    name, made = planner
    try:
        return getattr(made, method)(*args)
    except _ON_PURPOSE:
        raise
    except Exception as error:
        raise registry.REGISTRY.planner_error(name, f"{method} raised {show_error(error)}") from error


def _checked_plan(name: str, method: str, plan: Any) -> Plan:
    try:
        sound = callable(plan.to_json)
    except Exception:  # noqa: BLE001 - of a plugin, which may fail in any way
        sound = False
    if not sound:
        raise registry.REGISTRY.planner_error(
            name, f"{method} returned {shown(plan)}, not a plan with to_json"
        )
    return plan


def _empty(x: Tensor | None, like: Tensor) -> Tensor:
    """An operator returns a fixed number of tensors: what was not asked for is one without elements."""
    return like.new_empty(0) if x is None else x


def _chunk_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """o, the final states, and the intermediate states, which a call with a backward has not: then which backend served it,
    unless the call says that."""
    tensors, backend = args[:_N_TENSORS], args[-2]
    call = call_plan(tensors, args[_N_TENSORS:])
    out = execute(call, tensors)
    third = out.intermediate_states
    if call.shape.options.needs_backward and backend is None:
        third = gradients.served_by(call.choice.spec.name)
    return out.o, _empty(out.final_state, out.o), _empty(third, out.o)


def _chunk_fwd_out(*args: Any) -> None:
    tensors = args[:_N_TENSORS]
    execute(call_plan(tensors, args[_N_TENSORS:-4]), tensors, given=args[-4:])


def _chunk_bwd(
    grad_o: Tensor, grad_final_state: Tensor | None, served: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Gradients of the first eight tensor arguments, in their shapes and dtypes. `served`: what `chunk_fwd` returned last."""
    tensors, (*options, backend) = args[:_N_TENSORS], args[_N_TENSORS:]
    if backend is None:
        backend = gradients.backend_of(served)
    call = call_plan(tensors, (*options, backend, "off"))
    inputs = contract.make_inputs(tensors, call.shape)
    backend = cast(SupportsBackward, call.choice.backend)  # its features were checked when it was chosen
    with torch.inference_mode(False), torch.no_grad():  # a backend may use autograd, which may be off here
        grads = backend.chunk_bwd(inputs, grad_o.contiguous(), grad_final_state)
    registry.notify(call.choice.spec.name, "chunk_bwd", call.shape.device_type)
    found = [getattr(grads, f.name) for f in fields(grads)]
    return tuple(
        grad_o.new_empty(0) if x is None else d.reshape(x.shape).to(x.dtype) for x, d in zip(args[:8], found)
    )


# ---- eager calls, past the dispatcher

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def dispatcher_is_idle(tensors: Sequence[Tensor | None]) -> bool:
    """Whether torch's dispatcher would go straight to the operator's kernel: nobody differentiates, transforms, traces
    or watches operators, and these are ordinary tensors. Not to be asked while `torch.compiler.is_compiling`."""
    if (
        _C._len_torch_dispatch_stack()
        or _C._is_torch_function_mode_enabled()
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or not _PLAIN.issuperset(map(type, tensors))
        or (q := tensors[0]) is None
        or q.is_meta
    ):
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:
        # the dispatcher negates ``x.conj().imag``, which is a flag on a view, when it is read
        if x is not None and ((grad and x.requires_grad) or x.is_neg()):
            return False
    return True


def execute_directly(
    call: CallPlan, tensors: Sequence[Tensor | None], given: Sequence[Tensor | None] | None
) -> KdaOutputs:
    """`execute` without the dispatcher, which takes longer than all the rest; only where `dispatcher_is_idle`."""
    if not torch.is_grad_enabled():
        return execute(call, tensors, given)
    with _C._AutoDispatchBelowAutograd():  # as in an operator's kernel: no versions or tangents are tracked
        return execute(call, tensors, given)


# ---- fake tensors


def _fake_inputs(args: Sequence[Any]) -> KdaInputs:
    tensors, options = args[:_N_TENSORS], args[_N_TENSORS : _N_TENSORS + _N_OPTIONS]
    shape = contract.problem_shape(*tensors, options=KdaOptions(*options))
    return contract.make_inputs(tensors, shape, align=False)


def _fake_chunk_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _fake_inputs(args)
    s, new = inputs.shape, inputs.q.new_empty
    o = new((s.B, s.T, s.HV, s.V))
    state = new(s.state_shape, dtype=s.state_dtype) if s.options.output_final_state else new(0)
    if s.options.needs_backward and args[-2] is None:
        return o, state, torch.empty((), dtype=torch.int64, device="cpu")  # as `gradients.served_by`
    if not s.options.return_intermediate_states:
        return o, state, new(0)
    if s.varlen and not s.options.use_graph:  # the contents of cu_seqlens decide, which a trace lacks
        nt: Any = torch.library.get_ctx().new_dynamic_size()
    else:
        nt = contract.intermediate_states_count(inputs)
    return o, state, new(contract.intermediate_states_shape(s, nt), dtype=torch.bfloat16)


def _fake_chunk_fwd_out(*args: Any) -> None:
    inputs = _fake_inputs(args)
    if not inputs.options.return_intermediate_states:
        contract.check_outputs(inputs, KdaOutputs(*args[-4:]))


def _fake_chunk_bwd(
    grad_o: Tensor, grad_final_state: Tensor | None, served: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    return tuple(grad_o.new_empty(0) if x is None else x.new_empty(x.shape) for x in args[:8])


# ---- registration


for name, on_tensors, on_fakes, with_autograd in (
    ("chunk_fwd", _chunk_fwd, _fake_chunk_fwd, gradients.chunk_fwd),
    ("chunk_fwd_out", _chunk_fwd_out, _fake_chunk_fwd_out, gradients.chunk_fwd_out),
    ("chunk_bwd", _chunk_bwd, _fake_chunk_bwd, gradients.chunk_bwd),
):
    _LIB.impl(name, on_tensors, "CompositeExplicitAutograd")
    _LIB.impl(name, with_autograd, "Autograd")
    torch.library.register_fake(f"kda_core::{name}", on_fakes, lib=_LIB)
for operator in (torch.ops.kda_core.chunk_fwd.default, torch.ops.kda_core.chunk_bwd.default):
    torch.library.register_vmap(operator, gradients.batching_rule(operator), lib=_LIB)
