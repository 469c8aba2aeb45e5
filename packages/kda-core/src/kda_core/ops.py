"""The operators behind the API: schemas, fake kernels, dispatch. Autograd's part is in `kda_core.gradients`.

An operator takes the fields of `kda_core.arguments.Arguments`, so ``torch.compile(fullgraph=True)`` sees one node, with any
backend. The backend is chosen when the operator runs on real tensors, never while it is traced.

`run` is the entry of the public functions. An eager call without gradients skips torch's dispatcher, which would take longer
than the rest of the host's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from kda_core import flops, gradients, journal, known, pools
from kda_core.arguments import KINDS, Arguments, check_outputs_dense, checked, given_outputs
from kda_core.buffers import (
    NOTHING_GIVEN,
    GivenOutputs,
    aligned,
    allocate_outputs,
    allocate_saved,
    make_inputs,
)
from kda_core.call import (
    ResolvedCall,
    execute,
    execute_backward,
    look_up,
    resolve,
    resolved,
)
from kda_core.contract import (
    FLOAT_TENSORS,
    KdaInputs,
    KdaOutputs,
    intermediate_states_count,
    intermediate_states_shape,
)
from kda_core.errors import ArgumentError
from kda_core.gradients import Served
from kda_core.journal import JOURNAL_KINDS, JournalArguments
from kda_core.pools import SLOT_KINDS, SlotArguments
from kda_core.torch_private import below_autograd, is_dispatcher_idle
from kda_core.validate import check_outputs

_new = tuple.__new__
_N_ARGUMENTS = len(Arguments._fields)
_N_FLOATS = len(FLOAT_TENSORS)

# ---- schemas

_SCHEMA_TYPES = {Tensor: "Tensor", bool: "bool", int: "int", float: "float", str: "str"}
ARGUMENTS = ", ".join(
    f"{_SCHEMA_TYPES[kind]}{'?' if optional else ''} {name}" for name, (kind, optional) in KINDS.items()
)
_HINTS = get_type_hints(KdaOutputs)
WRITTEN = ", ".join(
    f"Tensor({alias}!){'' if _HINTS[name] is Tensor else '?'} {name}"
    for alias, name in zip("abcd", GivenOutputs._fields)
)

_POOL = ARGUMENTS.replace("Tensor? initial_state", "Tensor(s!)? initial_state")
_SLOTS = ", ".join(
    f"{_SCHEMA_TYPES[kind]}{'?' if kind is Tensor else ''} {name}" for name, kind in SLOT_KINDS.items()
).replace("Tensor? checkpoint_pool", "Tensor(t!)? checkpoint_pool")


def _records(written: bool) -> str:
    """Returns the schema of `JournalArguments`, whose records a call writes or only reads."""
    aliases = {"records_u": "(u!)", "records_k": "(v!)", "records_k_factor": "(w!)", "records_G": "(x!)"}
    marks = {"spans": "?"} | (aliases if written else {})
    return ", ".join(
        f"{_SCHEMA_TYPES[kind]}{marks.get(name, '')} {name}" for name, kind in JOURNAL_KINDS.items()
    )


_LIB = torch.library.Library("kda_core", "DEF")
_LIB.define(f"chunk_fwd({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_LIB.define(f"chunk_fwd_out({ARGUMENTS}, {WRITTEN}) -> ()")
_LIB.define(f"pooled_fwd_({_POOL}, {_SLOTS}, {WRITTEN}) -> ()")
_LIB.define(f"journal_decode_({_POOL}, {_records(True)}, Tensor(a!) o) -> ()")
_LIB.define(f"verify_({ARGUMENTS}, {_records(True)}, Tensor(a!) o) -> ()")
_LIB.define(
    f"journal_fold_(Tensor(s!) pool, {_records(False)}, Tensor? accepted, bool state_v_first, str? backend) -> ()"
)
_LIB.define(
    f"chunk_bwd(Tensor grad_o, Tensor? grad_final_state, Tensor served, Tensor saved_states, Tensor residual, str wanted, "
    f"{ARGUMENTS}) -> ({', '.join(['Tensor'] * _N_FLOATS)})"
)


# ---- calls


def run(
    tensors: tuple[Any, ...], values: tuple[Any, ...], given: GivenOutputs | None = None
) -> tuple[Tensor, Any, Any]:
    """Runs a call that is not known (`kda_core.known.run`). Returns o, the final states and the intermediate states. The last two are
    arbitrary if the call does not ask for them.

    Args:
        tensors, values: the fields of `Arguments` without `saves`, as the caller passed them, types not checked.
        given: the tensors that the caller passed to be written, of checked types.

    Raises:
        KdaError: as `kda_core.chunk_kda`.
    """
    is_compiling = torch.compiler.is_compiling()
    args = _new(Arguments, (*tensors, *values, False))
    check_outputs_dense(given)
    if is_compiling:
        return _dispatch(checked(args), given)
    # the key of a call cannot hold a planner's plan, which may be any object: `checked` makes it a text
    if type(args.context_parallel) is str and can_skip_dispatcher(
        tensors if given is None else (*tensors, *given)
    ):
        key, call = look_up(args)
        is_new = call is None
        if call is None:
            call = resolve(args, key, are_checked=False)
        outputs = run_directly(call, tensors, given)
        if not is_new:  # the second call: many shapes come once
            known.remember(args, call, None, given)
        return outputs.o, outputs.final_state, outputs.intermediate_states
    args = checked(args)
    flops.register()
    return _dispatch(args, given)


def _dispatch(args: Arguments, given: GivenOutputs | None) -> tuple[Tensor, Any, Any]:
    """`run` through torch's dispatcher."""
    if given is None:
        return torch.ops.kda_core.chunk_fwd(*args)[:3]
    options = args.options
    if options.needs_backward:
        name = "workspace" if given[:-1] == (None, None, None) else "out"
        raise ArgumentError(name, "None for inputs that require grad", "a tensor")
    o, state, h, workspace = given
    if (
        o is None
        or (state is None and options.output_final_state)
        or (h is None and options.return_intermediate_states)
    ):  # the operator only writes tensors that it is given
        inputs = _fake_inputs(args)
        made = allocate_outputs(inputs, 0, given)
        o, state, h = made.o, made.final_state, made.intermediate_states
    torch.ops.kda_core.chunk_fwd_out(*args, o, state, h, workspace)
    return o, state, h


def run_pooled(
    tensors: tuple[Any, ...], values: tuple[Any, ...], slots: SlotArguments, given: GivenOutputs | None = None
) -> tuple[Tensor, Any, Any]:
    """`run` of a call whose states are in a pool. The final states are None if they go to the pool.

    Raises:
        KdaError: as `kda_core.chunk_kda`.
    """
    is_compiling = torch.compiler.is_compiling()
    args = _new(Arguments, (*tensors, *values, False))
    check_outputs_dense(given)
    pools.refuse_gradients(args)
    if not is_compiling:
        present = (*tensors, *slots.tensors, *(given or ()))
        if type(args.context_parallel) is str and can_skip_dispatcher(present):
            key, call = pools.look_up(args, slots)
            is_new = call is None
            if call is None:
                call = pools.resolve(checked(args), pools.checked_slots(slots), key)
            with below_autograd():  # as in an operator's kernel
                found = pools.execute(call, args, slots, given)
            if not is_new and not call.checks_slots and pools.is_native(call, args):
                known.remember(args, call.call, slots, given)
            return found
        flops.register()
    args, slots = checked(args), pools.checked_slots(slots)
    shape = pools.pooled_shape(args, slots)
    o, state, h, workspace = NOTHING_GIVEN if given is None else given
    inputs = KdaInputs(*args.tensors, shape)  # type: ignore[arg-type, call-arg]
    new = inputs.q.new_empty
    if o is None:  # the operator only writes tensors that it is given
        o = new((shape.B, shape.T, shape.HV, shape.V))
    if state is None and shape.options.output_final_state:
        state = new(shape.state_shape, dtype=shape.state_dtype)
    if h is None and shape.options.return_intermediate_states:
        h = new(intermediate_states_shape(shape, intermediate_states_count(inputs)), dtype=torch.bfloat16)
    torch.ops.kda_core.pooled_fwd_(*args, *slots, o, state, h, workspace)
    return o, state, h


def run_journal(
    tensors: tuple[Any, ...], values: tuple[Any, ...], given: JournalArguments, out: Any, verifies: bool
) -> Tensor:
    """`run` of a call with records. Returns o.

    Args:
        tensors, values: as in `run`; `initial_state` is the pool. As `given` and `out` they are as the caller passed them, types not
            checked.
        verifies: whether the call has no records before its tokens.

    Raises:
        KdaError: as `kda_core.serving.journal_decode_kda`.
    """
    outputs = None
    if not torch.compiler.is_compiling():
        if out is not None and type(out) is Tensor:
            outputs = given_outputs(out, None)
        if (out is None) is (outputs is None) and (
            found := known.run(tensors, values, given, outputs)
        ) is not None:
            return found[0]
    args = _new(Arguments, (*tensors, *values, False))
    journal.check_types(given, args.initial_state, verifies=verifies)
    journal.refuse_gradients(args)
    if out is not None:
        outputs = given_outputs(out, None)
        check_outputs_dense(outputs)
    if not torch.compiler.is_compiling():
        if can_skip_dispatcher((*tensors, *given.tensors, out)):
            key, call = journal.look_up(args, given)
            is_new = call is None
            if call is None:
                call = journal.resolve(checked(args), given, key)
            with below_autograd():  # as in an operator's kernel
                o = journal.execute(call, args, given, out)
            if not is_new and not call.checks_slots:
                known.remember(args, call.call, given, outputs)
            return o
        flops.register()
    args = checked(args)
    shape = journal.decode_shape(args, given)
    o = args.q.new_empty((shape.B, shape.T, shape.HV, shape.V)) if out is None else out
    operator = torch.ops.kda_core.verify_ if given.spans is None else torch.ops.kda_core.journal_decode_
    operator(*args, *given, o)
    return o


def run_fold(
    pool: Tensor, given: JournalArguments, accepted: Tensor | None, v_first: bool, backend: str | None
) -> None:
    """Writes the states that records describe to the pool.

    Raises:
        KdaError: as `kda_core.serving.journal_fold`.
    """
    if not torch.compiler.is_compiling() and can_skip_dispatcher((pool, accepted, *given.tensors)):
        call = journal.resolved_fold(pool, given, accepted, v_first, backend)
        with below_autograd():
            journal.execute_fold(call, pool, given, accepted)
    else:
        torch.ops.kda_core.journal_fold_(pool, *given, accepted, v_first, backend)


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def can_skip_dispatcher(tensors: Sequence[Tensor | None]) -> bool:
    """Returns whether torch's dispatcher would go straight to the operator's kernel, without gradients: nothing observes
    operators, and all tensors are ordinary. The first one is q. Must not be called while `torch.compiler.is_compiling`."""
    if not is_dispatcher_idle():
        return False
    grad, q = torch.is_grad_enabled(), tensors[0]
    for x in tensors:
        if x is None:
            continue
        # ``x.conj().imag`` is a view with a flag; the dispatcher negates it on reading
        if type(x) not in _PLAIN_TYPES or (grad and x.requires_grad) or x.is_neg():
            return False
    return q is not None and not q.is_meta


def run_directly(
    call: ResolvedCall, tensors: Sequence[Tensor | None], given: GivenOutputs | None
) -> KdaOutputs:
    """Executes a call without the dispatcher. Requires `can_skip_dispatcher`."""
    if not torch.is_grad_enabled():
        return execute(call, tensors, given)
    with below_autograd():  # as in an operator's kernel: torch tracks no versions and no tangents
        return execute(call, tensors, given)


# ---- kernels for real tensors


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """Returns `x`, or a tensor without elements: an operator returns a fixed number of tensors."""
    return like.new_empty(0) if x is None else x


def _chunk_fwd(*values: Any) -> tuple[Tensor, ...]:
    """Returns o, the final states, the intermediate states, the saved states and the residual. A call with a backward has no
    intermediate states; it returns what served it instead, unless the arguments name a backend. Without `Arguments.saves` the last
    two are empty."""
    args = Arguments(*values)
    call = resolved(args)
    saves = args.saves and call.saves
    out = execute(call, args.tensors, saves=saves)
    third, saved, residual = out.intermediate_states, out.saved_states, out.residual
    if call.backward is not None and args.backend is None:
        third = gradients.served_by(Served(call.choice.spec.name, call.backward.spec.name, saves))
    if args.saves and not saves:  # traced when other backends served the call; the backward reads neither
        saved, residual = allocate_saved(call.shape, out.o)
    return out.o, *(_or_empty(x, out.o) for x in (out.final_state, third, saved, residual))


def _chunk_fwd_out(*values: Any) -> None:
    args = Arguments(*values[:_N_ARGUMENTS])
    execute(resolved(args), args.tensors, GivenOutputs(*values[_N_ARGUMENTS:]))


def _pooled_fwd_(*values: Any) -> None:
    args, slots, given = _of_pool(values)
    pools.execute(pools.resolved(args, slots), args, slots, given)


def _journal_decode_(*values: Any) -> None:
    args, given, o = of_journal(values)
    journal.execute(journal.resolved(args, given), args, given, o)


def _journal_fold_(*values: Any) -> None:
    pool, given, accepted, v_first, backend = _of_fold(values)
    call = journal.resolved_fold(pool, given, accepted, v_first, backend)
    journal.execute_fold(call, pool, given, accepted)


def of_journal(values: tuple[Any, ...]) -> tuple[Arguments, JournalArguments, Tensor]:
    """Returns the arguments of the operators ``journal_decode_`` and ``verify_``."""
    return (
        Arguments(*values[:_N_ARGUMENTS]),
        JournalArguments(*values[_N_ARGUMENTS:-1]),
        values[-1],
    )


def _of_fold(values: tuple[Any, ...]) -> tuple[Tensor, JournalArguments, Tensor | None, bool, str | None]:
    """Returns the arguments of the operator ``journal_fold_``."""
    return values[0], JournalArguments(*values[1:-3]), *values[-3:]


def _of_pool(values: tuple[Any, ...]) -> tuple[Arguments, SlotArguments, GivenOutputs]:
    """Returns the arguments of the operator ``pooled_fwd_``."""
    end = _N_ARGUMENTS + len(SlotArguments._fields)
    slots = SlotArguments(*values[_N_ARGUMENTS:end])
    return Arguments(*values[:_N_ARGUMENTS]), slots, GivenOutputs(*values[end:])


def _chunk_bwd(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    served: Tensor,
    saved_states: Tensor,
    residual: Tensor,
    wanted: str,
    *values: Any,
) -> tuple[Tensor, ...]:
    """Returns the gradients of `FLOAT_TENSORS`, in their shapes and dtypes, empty for those that are not wanted.

    Args:
        served, saved_states, residual: the last three outputs of `chunk_fwd`.
        wanted: the names of the inputs that need a gradient, with spaces between them.
    """
    args = Arguments(*values)
    names = wanted.split()
    by = None
    if args.backend is None:
        by = gradients.meaning_of(served)
        args = args._replace(backend=by.backward)
    call = resolved(args)
    inputs = make_inputs(args.tensors, call.shape)
    ready = aligned(grad_o), None if grad_final_state is None else aligned(grad_final_state)
    was_saved = args.saves and (call.saves if by is None else by.saved)
    kept = [aligned(x) if was_saved and x.numel() else None for x in (saved_states, residual)]
    with torch.inference_mode(False), torch.no_grad():  # a backend may use autograd, which may be off here
        grads = execute_backward(call, inputs, *ready, names, kept)
    return tuple(
        grad_o.new_empty(0)
        if x is None or name not in names
        else getattr(grads, name).reshape(x.shape).to(x.dtype)
        for name, x in zip(FLOAT_TENSORS, args.tensors)
    )


# ---- kernels for fake tensors


def _fake_inputs(args: Arguments) -> KdaInputs:
    shape = args.shape()
    return make_inputs(args.tensors, shape, align=False)


def _fake_chunk_fwd(*values: Any) -> tuple[Tensor, ...]:
    args = Arguments(*values)
    inputs = _fake_inputs(args)
    s, new = inputs.shape, inputs.q.new_empty
    o = new((s.B, s.T, s.HV, s.V))
    state = new(s.state_shape, dtype=s.state_dtype) if s.options.output_final_state else new(0)
    saved, residual = allocate_saved(s, o) if args.saves else (None, None)
    return o, state, _fake_third(args, inputs), _or_empty(saved, o), _or_empty(residual, o)


def _fake_third(args: Arguments, inputs: KdaInputs) -> Tensor:
    """Returns the third output of `chunk_fwd`."""
    s, new = inputs.shape, inputs.q.new_empty
    if s.options.needs_backward and args.backend is None:
        return torch.empty((), dtype=torch.int64, device="cpu")  # as `gradients.served_by`
    if not s.options.return_intermediate_states:
        return new(0)
    if s.varlen and not s.options.use_graph:  # NT depends on the contents of cu_seqlens, which a trace lacks
        nt: Any = torch.library.get_ctx().new_dynamic_size()
    else:
        nt = intermediate_states_count(inputs)
    return new(intermediate_states_shape(s, nt), dtype=torch.bfloat16)


def _fake_chunk_fwd_out(*values: Any) -> None:
    inputs = _fake_inputs(Arguments(*values[:_N_ARGUMENTS]))
    if not inputs.options.return_intermediate_states:
        check_outputs(inputs, KdaOutputs(*values[_N_ARGUMENTS:]))


def _fake_pooled_fwd_(*values: Any) -> None:
    args, slots, given = _of_pool(values)
    inputs = KdaInputs(*args.tensors, pools.pooled_shape(args, slots))  # type: ignore[arg-type, call-arg]
    if not inputs.options.return_intermediate_states:
        check_outputs(inputs, KdaOutputs(*given))  # type: ignore[arg-type]


def _fake_journal_decode_(*values: Any) -> None:
    args, given, o = of_journal(values)
    shape = journal.decode_shape(args, given)
    check_outputs(KdaInputs(*args.tensors, shape), KdaOutputs(o))  # type: ignore[arg-type, call-arg]


def _fake_journal_fold_(*values: Any) -> None:
    pool, given, accepted, v_first, _ = _of_fold(values)
    journal.fold_shape(pool, given, accepted, v_first)


def _fake_chunk_bwd(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    served: Tensor,
    saved_states: Tensor,
    residual: Tensor,
    wanted: str,
    *values: Any,
) -> tuple[Tensor, ...]:
    names = wanted.split()
    return tuple(
        x.new_empty(x.shape) if name in names else grad_o.new_empty(0)
        for name, x in zip(FLOAT_TENSORS, values)
    )


# ---- registration


for name, on_tensors, on_fakes, with_autograd in (
    ("chunk_fwd", _chunk_fwd, _fake_chunk_fwd, gradients.chunk_fwd),
    ("chunk_fwd_out", _chunk_fwd_out, _fake_chunk_fwd_out, gradients.chunk_fwd_out),
    ("pooled_fwd_", _pooled_fwd_, _fake_pooled_fwd_, gradients.pooled_fwd_),
    ("journal_decode_", _journal_decode_, _fake_journal_decode_, gradients.journal_decode_),
    ("verify_", _journal_decode_, _fake_journal_decode_, gradients.verify_),
    ("journal_fold_", _journal_fold_, _fake_journal_fold_, gradients.journal_fold_),
    ("chunk_bwd", _chunk_bwd, _fake_chunk_bwd, gradients.chunk_bwd),
):
    _LIB.impl(name, on_tensors, "CompositeExplicitAutograd")
    _LIB.impl(name, with_autograd, "Autograd")
    torch.library.register_fake(f"kda_core::{name}", on_fakes, lib=_LIB)
for operator in (torch.ops.kda_core.chunk_fwd.default, torch.ops.kda_core.chunk_bwd.default):
    torch.library.register_vmap(operator, gradients.batching_rule(operator), lib=_LIB)
