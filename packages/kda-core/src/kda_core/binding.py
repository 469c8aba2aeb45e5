"""`bind`: a call that is validated once, for engines whose host time counts.

Everything that follows from metadata is decided when the call is bound: validity, the backend, the plan, and with a backend that has
`kda_core.backend.SupportsPrepare` also the launch. A bound call compares the metadata of the tensors of its tokens, and launches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core import buffers, journal, pools
from kda_core import call as calls
from kda_core.api import chunk_kda, cp_context_error, fused_recurrent_kda, renamed_layout
from kda_core.arguments import (
    N_TENSORS,
    Arguments,
    check_outputs_dense,
    checked,
    given_outputs,
    unknown_keyword,
)
from kda_core.backend import Plan
from kda_core.contract import (
    ALIGNMENT,
    KdaInputs,
    KdaJournal,
    KdaOutputs,
    KdaPool,
    Tensors,
    launch_tensors,
    unchecked,
)
from kda_core.errors import (
    ArgumentError,
    BackendUnsupportedError,
    DeviceError,
    DtypeError,
    ShapeError,
    StrideError,
    describe,
)
from kda_core.journal import JournalArguments
from kda_core.journal_api import journal_decode_kda, verify_kda
from kda_core.ops import can_skip_dispatcher
from kda_core.pools import SlotArguments
from kda_core.registry import OBSERVERS, notify
from kda_core.torch_private import (
    allocator,
    below_autograd,
    current_device,
    is_deterministic,
    is_free_of_modes,
    metadata_guard,
)
from kda_core.validate import check_layout, check_memory, check_outputs

PER_TOKEN = Tensors._fields[: Tensors._fields.index("beta") + 1]
"""The tensors that every bound call gets."""
FUNCTIONS = (chunk_kda, fused_recurrent_kda, journal_decode_kda, verify_kda)
"""The functions that can be bound."""
_STATE = Tensors._fields.index("initial_state")


class _Facts(NamedTuple):
    """The metadata of a tensor that a bound call compares."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Resolved(NamedTuple):
    """A call that was resolved from its example tensors.

    Attributes:
        call: of the backend; its shape, choice, entry, and whether values are checked.
        inputs: as the backend receives them.
        state: what the function returns besides o, if that is not new: a tuple of nothing, or of the pool or None.
        written: tensors besides o that the call writes.
        is_checked: whether a debugging variable asks for checks of values in every call.
        plan: of a planner, else None.
        workspace: that the caller bound, else None.
    """

    call: calls.ResolvedCall
    inputs: KdaInputs
    state: tuple[Tensor | None, ...]
    written: list[Tensor]
    is_checked: bool
    plan: Plan | None = None
    workspace: Tensor | None = None


class BoundCall:
    """A call of `bind`.

    Attributes:
        backend: name of the backend that serves it.
    """

    def __init__(self, function: Callable[..., Any], fixed: dict[str, Any], found: _Resolved) -> None:
        call, inputs = found.call, found.inputs
        self.backend: str = call.choice.spec.name
        self._function, self._fixed, self._found = function, fixed, found
        per_token = [getattr(inputs, name) for name in PER_TOKEN]
        self._facts = tuple(_Facts(x.shape, x.stride(), x.dtype, x.device) for x in per_token)
        q, v = inputs.q, inputs.v
        self._o = _Facts(v.shape, v.new_empty(v.shape, device="meta").stride(), q.dtype, q.device)
        decodes = call.shape.options.recurrent
        self._beta_is_free = call.strided and decodes
        self._clears = call.shape.varlen and decodes  # tokens outside of every sequence have zeros
        self._written = [x for x in found.written if not x.is_inference()]
        self._device = q.get_device()
        self._launch = calls.prepared(call, inputs) if found.plan is None else None
        self._direct = None if self._clears else self._launch  # if it is all that a call does
        self._fixed_addresses = tuple(map(_address, launch_tensors(inputs)[len(PER_TOKEN) :]))
        options = call.shape.options
        kind = call.shape.device_type
        self._new_o = allocator(v.shape, q.dtype, kind)
        state = call.shape.state_shape, call.shape.state_dtype
        self._new_state = allocator(*state, kind) if options.output_final_state else None
        self._workspace, self._workspace_at = found.workspace, _address(found.workspace)
        self._state, self._is_checked = found.state or None, found.is_checked
        needed = 0 if found.workspace is not None else calls.needed_workspace(call, found.plan, inputs)
        self._new_workspace = allocator((needed,), torch.uint8, kind) if needed else None
        planner = None if found.plan is None or call.planner is None else call.planner[0]
        self._notice = (self.backend, call.entry, call.shape.device_type, planner)
        # without what an object keeps
        self._inputs = {f.name: getattr(inputs, f.name) for f in fields(KdaInputs)}
        # functions that accept tensors like those of an earlier call, without out and with it
        self._is_known: Callable[..., bool] = _knows_none
        self._is_known_with_out: Callable[..., bool] = _knows_none

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, out: Tensor | None = None
    ) -> Any:
        """Makes the call with these tensors, whose shapes, strides, dtypes and device are those of the example.

        Args:
            out: o to write; it must share no memory with any other tensor, which is not checked.

        Returns:
            what the bound function returns.

        Raises:
            ShapeError, StrideError, DtypeError, DeviceError, ArgumentError: a tensor differs from the example; the message names it.
        """
        if torch.compiler.is_compiling() or self._is_checked or is_deterministic():
            result = self._function(q, k, v, g, beta, **self._fixed, out=out)
            return result
        try:
            # the comparison takes no nested tensor
            is_known = not (q.is_nested or k.is_nested or v.is_nested or g.is_nested or beta.is_nested)
            if out is None:
                is_known = is_known and self._is_known(q, k, v, g, beta)
            else:
                is_known = is_known and not out.is_nested and self._is_known_with_out(q, k, v, g, beta, out)
        except AttributeError:  # not a tensor
            is_known = False
        if not (is_known and is_free_of_modes()) and not self._accepts((q, k, v, g, beta), out):
            result = self._function(q, k, v, g, beta, **self._fixed, out=out)
            return result
        if self._device >= 0 and self._device != current_device():
            with torch.cuda.device(self._device):
                return self(q, k, v, g, beta, out)
        a, b, c, d, e = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr()
        if out is None:
            out = self._new_o()
        o_at = out.data_ptr()
        if (a | b | c | d | o_at | (0 if self._beta_is_free else e)) % ALIGNMENT:
            self._refuse_unaligned((q, k, v, g, beta, out))
        state, workspace, state_at, workspace_at = None, self._workspace, 0, self._workspace_at
        if self._new_state is not None:
            state = self._new_state()
            state_at = state.data_ptr()
        if self._new_workspace is not None:
            workspace = self._new_workspace()
            workspace_at = workspace.data_ptr()
        if self._direct is not None:
            self._direct(out, (a, b, c, d, e, *self._fixed_addresses), o_at, state_at, workspace_at)
        else:
            with below_autograd():  # as in an operator's kernel
                self._run(q, k, v, g, beta, out, state, workspace)
        if self._written:
            torch.autograd.graph.increment_version(self._written)
        if OBSERVERS:
            notify(*self._notice)
        if state is not None:
            return out, state
        return out if self._state is None else (out, self._state[0])

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, o: Tensor, state: Tensor | None,
        workspace: Tensor | None,
    ) -> None:  # fmt: skip
        """Makes the call on the current device, whatever the backend prepares."""
        if self._clears:
            o.zero_()
        if self._launch is not None:
            tokens = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr()
            given: Any = (*tokens, *self._fixed_addresses)
            self._launch(o, given, o.data_ptr(), _address(state), _address(workspace))
            return
        inputs = {**self._inputs, "q": q, "k": k, "v": v, "g": g, "beta": beta}
        outputs = {
            "o": o, "final_state": state, "intermediate_states": None, "workspace": workspace, "saved_states": None,
            "residual": None,
        }  # fmt: skip
        found = self._found
        calls.run(found.call, found.plan, unchecked(KdaInputs, inputs), unchecked(KdaOutputs, outputs))

    def _accepts(self, tensors: tuple[Tensor, ...], out: Tensor | None) -> bool:
        """Compares the metadata of tensors with those of the example, and remembers them.

        Returns:
            False if torch's dispatcher has more to do than to call the operator.

        Raises:
            ShapeError, StrideError, DtypeError, DeviceError: a tensor differs from the example.
        """
        given = tensors if out is None else (*tensors, out)
        if not can_skip_dispatcher(given):
            return False
        for name, x, facts in zip((*PER_TOKEN, "out"), given, (*self._facts, self._o)):
            check_layout(name, x)
            if (x.shape, x.stride(), x.dtype, x.device) != facts:
                raise _difference(name, x, facts)
        # those with gradients would be accepted only without grad mode, and the comparison takes no tensor twice
        if not any(x.requires_grad for x in given) and len(set(map(id, given))) == len(given):
            is_known = metadata_guard(given) or _knows_none
            if out is None:
                self._is_known = is_known
            else:
                self._is_known_with_out = is_known
        return True

    def _refuse_unaligned(self, tensors: tuple[Tensor, ...]) -> None:
        """Raises an ArgumentError for the first tensor that does not start at a multiple of `ALIGNMENT` bytes."""
        for name, x, facts in zip((*PER_TOKEN, "out"), tensors, (*self._facts, self._o)):
            if x.data_ptr() % ALIGNMENT and not (name == "beta" and self._beta_is_free):
                raise _difference(name, x, facts)


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> BoundCall:
    """Returns ``function`` as a function of q, k, v, g, beta and `out` alone, validated once for these example arguments.

    Nothing is launched. A call of the result takes little host time: it compares metadata, and launches on the backend that was chosen
    when it was bound, by the plan that the planner then made. Later changes of installed plugins, `use_backend` or ``KDA_BACKEND`` do not
    matter. All other tensors stay bound. Their contents may change, so an engine copies new slots into the tensor that it has bound, as
    for a CUDA graph. Only lengths in host memory, `cu_seqlens_cpu`, are read once: the same lengths must then be in cu_seqlens.

    A bound call never copies a tensor. It allocates o unless it gets `out`, new final states that it returns, and the workspace of
    `chunk_kda` unless one is bound; calls that may overlap must not share that. With ``KDA_CHECK=1`` or ``KDA_CHECK_SLOTS=1`` when it is bound, with inputs that require grad, in a
    trace, or under a mode of torch, it is a call of `function`.

    Args:
        function: `kda_core.chunk_kda`; `kda_core.fused_recurrent_kda` over a pool; `kda_core.serving.journal_decode_kda` or
            `kda_core.serving.verify_kda`.
        args, kwargs: its arguments without `out`.

    Raises:
        TypeError, KdaError: as `function`.
        ArgumentError: another function; decoding without a pool, or with new final states; intermediate states; inputs that require grad
            or need copies.
        BackendUnsupportedError: the backend serves the pool only by copies.
    """
    args_of_call, given, options = parsed(function, args, kwargs)
    if options.out is not None:
        raise ArgumentError("out", "None (a bound call gets it in every call)", describe(options.out))
    if isinstance(given, JournalArguments):
        found = _of_journal(args_of_call, given)
    elif function is chunk_kda:
        found = _of_chunk(args_of_call, given, options.workspace)
    else:
        found = _of_pool(args_of_call, given)
    return BoundCall(function, options.fixed, found)


class Rest(NamedTuple):
    """What `parsed` returns besides the arguments of the call.

    Attributes:
        out: what the caller passed to be written, or None.
        fixed: the given arguments by name, without q, k, v, g, beta and out.
        workspace: as the caller passed it.
    """

    out: Any
    fixed: dict[str, Any]
    workspace: Any = None


def parsed(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Arguments, SlotArguments | JournalArguments | None, Rest]:
    """Returns the arguments of a call of one of `FUNCTIONS` with their types checked, and those that concern its slots, if it has any.

    Raises:
        TypeError, KdaError: as the function. ArgumentError: another function.
    """
    if function not in FUNCTIONS:
        wanted = " or ".join(f.__name__ for f in FUNCTIONS)
        raise ArgumentError("function", wanted, getattr(function, "__name__", describe(function)))
    signature = inspect.signature(function)
    if unknown := {name: x for name, x in kwargs.items() if name not in signature.parameters}:
        raise unknown_keyword(function, unknown, chunk_kda)
    bound = signature.bind(*args, **kwargs)
    fixed = {name: x for name, x in bound.arguments.items() if name not in (*PER_TOKEN, "out")}
    bound.apply_defaults()
    a = dict(bound.arguments)
    rest = Rest(a["out"], fixed, a.get("workspace"))
    if function is chunk_kda:
        return *_parsed_chunk(a), rest
    if function is not fused_recurrent_kda:
        verifies = function is verify_kda
        name = "records" if verifies else "journal"
        given = journal.journal_arguments(name, a[name], a["slots"], a["first_slot"], verifies=verifies)
        journal.check_types(given, a["pool"], verifies=verifies)
        call = _arguments(a | {"initial_state": a["pool"], "state_v_first": a[name].state_v_first})
        journal.refuse_gradients(call)
        return checked(call), given, rest
    if a["transpose_state_layout"] is not None:
        raise ArgumentError("transpose_state_layout", "None (it is now state_v_first)", "a value")
    if a["ssm_state_indices"] is None:
        return checked(_arguments(a)), None, rest
    inplace = a["inplace_final_state"]
    writes = bool(a["output_final_state"] if inplace is None else inplace)
    call = _arguments(a | {"output_final_state": a["output_final_state"] and not writes})
    pools.refuse_gradients(call)
    slots = {name: a[name] for name in SlotArguments._fields if name in a}
    return checked(call), pools.checked_slots(SlotArguments(**slots, writes=writes)), rest


def _parsed_chunk(a: dict[str, Any]) -> tuple[Arguments, SlotArguments | None]:
    """Returns the first two results of `parsed` for the arguments of `chunk_kda` by name."""
    if (transposed := a["transpose_state_layout"]) is not None:
        a["state_v_first"] = renamed_layout(a["state_v_first"], transposed)
    if a["cp_context"] is not None:
        raise cp_context_error(a["cp_context"])
    slots = None
    given = {name: a[name] for name in SlotArguments._fields if name in a}
    if any(x is not None for name, x in given.items() if name != "first_slot") or given["first_slot"] != 0:
        slots = pools.checked_slots(SlotArguments(**given, writes=bool(a["output_final_state"])))
        a["output_final_state"] = False
    return checked(Arguments(**{name: a[name] for name in Arguments._fields if name in a})), slots


def _knows_none(*tensors: Tensor) -> bool:
    return False


def _of_chunk(args: Arguments, given: SlotArguments | None, workspace: Any) -> _Resolved:
    """Resolves a call of `chunk_kda` with these arguments."""
    if args.return_intermediate_states:
        raise ArgumentError("return_intermediate_states", "False (a bound call returns no h)", "True")
    if given is None:
        for name, x in zip(Tensors._fields, args.tensors):
            if args.needs_backward and x is not None and x.requires_grad:
                raise ArgumentError(
                    name, "a tensor that requires no grad (a bound call has no gradients)", describe(x)
                )
        call = calls.resolved(args)
        inputs = _inputs(args, call)
        found = _Resolved(call, inputs, (None,), [], call.checks_contents)
    else:
        pools.refuse_gradients(args)
        found = _over_pool(args, given)
    call, inputs = found.call, found.inputs
    plan = calls.ask_planner(call, inputs, None if inputs.cu_seqlens is None else inputs.sequence_lengths())
    given_workspace = given_outputs(None, workspace)
    check_outputs_dense(given_workspace)
    workspace = given_workspace.workspace
    plan, needed = calls.fitting(call, plan, calls.needed_workspace(call, plan, inputs), workspace)
    outputs = buffers.allocate_outputs(inputs, needed, buffers.GivenOutputs(workspace=workspace))
    check_outputs(inputs, outputs, needed)
    check_memory(inputs, outputs)
    return found._replace(plan=plan, workspace=workspace)


def _of_pool(args: Arguments, given: SlotArguments | None) -> _Resolved:
    """Resolves a call of `fused_recurrent_kda` with these arguments."""
    if given is None:
        raise ArgumentError("ssm_state_indices", "the slots of a pool (bind needs one)", "None")
    if args.output_final_state:
        raise ArgumentError("inplace_final_state", "None or True with output_final_state", "False")
    return _over_pool(args, given)


def _over_pool(args: Arguments, given: SlotArguments) -> _Resolved:
    """Resolves a call over a pool, which the backend reads and writes itself."""
    call = pools.resolve(args, given)
    if not call.native:
        name = call.call.choice.spec.name
        raise BackendUnsupportedError(
            f"backend {name!r} serves this pool by copies, which bind does not make"
        )
    pool = pools.pool_of(args, given)
    names = ("ssm_state_indices", "final_state_indices", "has_initial_state", "num_accepted_tokens")
    used = (pool.read, pool.write, pool.has_initial_state, pool.num_accepted_tokens)
    _check_same({name: getattr(given, name) for name in names}, used)
    written = [pool.states] if given.writes else []
    if (points := pool.checkpoints) is not None:
        of_points = ("checkpoint_cu", "checkpoint_positions", "checkpoint_indices")
        _check_same(
            {name: getattr(given, name) for name in of_points}, (points.cu, points.positions, points.indices)
        )
        written.append(points.states)
    inputs = _inputs(args, call.call, pool=pool)
    inputs.sequence_lengths()  # checks host contents of cu_seqlens
    state = (pool.states if given.writes else None,)
    is_checked = call.checks_slots or call.call.checks_contents
    return _Resolved(call.call, inputs, state, written, is_checked)


def _of_journal(args: Arguments, given: JournalArguments) -> _Resolved:
    """Resolves a call of `journal_decode_kda` or `verify_kda` with these arguments."""
    call = journal.resolve(args, given)
    pool, records = journal.described(args.initial_state, given)
    journal.check_memory(args.q.device, pool.states, given)
    _check_same({"slots": given.slots}, (pool.read,))
    inputs = _inputs(args, call.call, pool=pool, journal=records)
    written = [*given.records, *([] if given.spans is None else [pool.states])]
    return _Resolved(call.call, inputs, (), written, call.checks_slots or call.call.checks_contents)


def _arguments(a: dict[str, Any]) -> Arguments:
    """Returns the arguments of a decode call by their names."""
    named = {name: a[name] for name in Arguments._fields if name in a}
    return Arguments(**named | {"recurrent": True, "context_parallel": "off"})


def _inputs(
    args: Arguments, call: calls.ResolvedCall, pool: KdaPool | None = None, journal: KdaJournal | None = None
) -> KdaInputs:
    """Returns the inputs of a call, none of which is a copy."""
    tensors: list[Tensor | None] = list(args[:N_TENSORS])  # type: ignore[arg-type]
    if pool is not None:
        tensors[_STATE] = None
    inputs = buffers.make_inputs(tensors, call.shape, strided=call.strided, pool=pool, journal=journal)
    for name, x in zip(Tensors._fields, tensors):
        if x is not None and name != "cu_seqlens_cpu" and getattr(inputs, name).data_ptr() != x.data_ptr():
            came = (
                f"{describe(x)}, strides {list(x.stride())}, {x.data_ptr() % ALIGNMENT} bytes past a multiple"
            )
            dense = f"a tensor that {call.choice.spec.name} reads in place (bind copies nothing): of fp32 if it is A_log or dt_bias"
            raise ArgumentError(name, f"{dense}, contiguous, at a multiple of {ALIGNMENT} bytes", came)
    return inputs


def _check_same(named: dict[str, Tensor | None], used: Sequence[Tensor | None]) -> None:
    """Checks that the tensors that a call uses are those of the caller, and not copies."""
    for (name, x), y in zip(named.items(), used):
        if x is not None and y is not None and x.data_ptr() != y.data_ptr():
            raise StrideError(
                name, "a contiguous tensor (bind copies nothing)", f"strides {list(x.stride())}"
            )


def _address(x: Tensor | None) -> int:
    """Returns the address of a tensor, 0 for None."""
    return 0 if x is None else x.data_ptr()


def _difference(name: str, x: Tensor, wanted: _Facts) -> ArgumentError:
    """Returns the error for a tensor that differs from the example."""
    if x.shape != wanted.shape:
        return ShapeError(name, f"{list(wanted.shape)}, as bound", str(list(x.shape)))
    if x.dtype != wanted.dtype:
        return DtypeError(name, f"{wanted.dtype}, as bound", str(x.dtype))
    if x.device != wanted.device:
        return DeviceError(name, f"device {wanted.device}, as bound", str(x.device))
    if x.stride() != wanted.stride:
        return StrideError(name, f"strides {list(wanted.stride)}, as bound", str(list(x.stride())))
    past = f"{x.data_ptr() % ALIGNMENT} bytes past one"
    return ArgumentError(name, f"memory that starts at a multiple of {ALIGNMENT} bytes", past)
