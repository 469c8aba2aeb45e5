"""The operators behind the API: schemas, fake kernels, dispatch. Autograd's part is in `kda_core.gradients`.

An operator takes the fields of `kda_core.arguments.Arguments`, so ``torch.compile(fullgraph=True)`` sees one node, with any
backend. The backend is chosen when the operator runs on real tensors, never while it is traced.

`run` is the entry of the public functions. An eager call without gradients skips torch's dispatcher, which would take longer
than the rest of the host's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor

from kda_core import flops, gradients, registry
from kda_core.arguments import KINDS, N_TENSORS, Arguments, checked
from kda_core.backend import SupportsBackward, SupportsBackwardInto
from kda_core.buffers import GivenOutputs, aligned, allocate_gradients, allocate_outputs, make_inputs
from kda_core.call import ResolvedCall, execute, look_up, resolve
from kda_core.contract import (
    FLOAT_TENSORS,
    KdaInputs,
    KdaOutputs,
    intermediate_states_count,
    intermediate_states_shape,
)
from kda_core.errors import ArgumentError
from kda_core.torch_private import below_autograd, is_dispatcher_idle
from kda_core.validate import check_outputs, problem_shape

_N_ARGUMENTS = len(Arguments._fields)
_N_FLOATS = len(FLOAT_TENSORS)

# ---- schemas

_SCHEMA_TYPES = {Tensor: "Tensor", bool: "bool", int: "int", float: "float", str: "str"}
ARGUMENTS = ", ".join(
    f"{_SCHEMA_TYPES[kind]}{'?' if optional else ''} {name}" for name, (kind, optional) in KINDS.items()
)
WRITTEN = ", ".join(
    f"Tensor({alias}!){'' if hint is Tensor else '?'} {name}"
    for alias, (name, hint) in zip("abcd", get_type_hints(KdaOutputs).items())
)

_LIB = torch.library.Library("kda_core", "DEF")
_LIB.define(f"chunk_fwd({ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
_LIB.define(f"chunk_fwd_out({ARGUMENTS}, {WRITTEN}) -> ()")
_LIB.define(
    f"chunk_bwd(Tensor grad_o, Tensor? grad_final_state, Tensor served, {ARGUMENTS}) "
    f"-> ({', '.join(['Tensor'] * _N_FLOATS)})"
)


# ---- calls


def run(args: Arguments, given: GivenOutputs | None = None) -> tuple[Tensor, Any, Any]:
    """Runs a call and returns o, the final states and the intermediate states; the last two are arbitrary if the call does
    not ask for them.

    Args:
        args: as the caller passed them, types not checked.
        given: the tensors that the caller passed to be written.

    Raises:
        KdaError: as `kda_core.chunk_kda`.
    """
    if torch.compiler.is_compiling():
        return _dispatch(checked(args), given)
    # the key of a call cannot hold a planner's plan, which may be any object: `checked` makes it a text
    tensors: Sequence[Any] = args[:N_TENSORS]
    if type(args.context_parallel) is str and can_skip_dispatcher(
        tensors if given is None else (*tensors, *given)
    ):
        key, call = look_up(args)
        if call is None:
            call = resolve(checked(args), key)
        found = run_directly(call, tensors, given)
        return found.o, found.final_state, found.intermediate_states
    args = checked(args)
    flops.register()
    return _dispatch(args, given)


def _dispatch(args: Arguments, given: GivenOutputs | None) -> tuple[Tensor, Any, Any]:
    """`run` through torch's dispatcher."""
    if given is None:
        return torch.ops.kda_core.chunk_fwd(*args)
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


def _resolved(args: Arguments) -> ResolvedCall:
    key, call = look_up(args)
    return resolve(args, key) if call is None else call


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """Returns `x`, or a tensor without elements: an operator returns a fixed number of tensors."""
    return like.new_empty(0) if x is None else x


def _chunk_fwd(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns o, the final states, and the intermediate states. A call with a backward has no intermediate states; it returns
    the backend that served it instead, unless the arguments name one."""
    args = Arguments(*values)
    call = _resolved(args)
    out = execute(call, args.tensors)
    third = out.intermediate_states
    if call.shape.options.needs_backward and args.backend is None:
        third = gradients.served_by(call.choice.spec.name)
    return out.o, _or_empty(out.final_state, out.o), _or_empty(third, out.o)


def _chunk_fwd_out(*values: Any) -> None:
    args = Arguments(*values[:_N_ARGUMENTS])
    execute(_resolved(args), args.tensors, GivenOutputs(*values[_N_ARGUMENTS:]))


def _chunk_bwd(
    grad_o: Tensor, grad_final_state: Tensor | None, served: Tensor, *values: Any
) -> tuple[Tensor, ...]:
    """Returns the gradients of `FLOAT_TENSORS`, in their shapes and dtypes. `served`: the third output of `chunk_fwd`."""
    args = Arguments(*values)
    if args.backend is None:
        args = args._replace(backend=gradients.backend_of(served))
    call = _resolved(args._replace(context_parallel="off"))
    inputs = make_inputs(args.tensors, call.shape)
    grad_o, grad_final_state = (
        aligned(grad_o),
        None if grad_final_state is None else aligned(grad_final_state),
    )
    with torch.inference_mode(False), torch.no_grad():  # a backend may use autograd, which may be off here
        if isinstance(backend := call.choice.backend, SupportsBackwardInto):
            grads = allocate_gradients(inputs)
            workspace = grad_o.new_empty(backend.backward_workspace_bytes(call.shape), dtype=torch.uint8)
            backend.chunk_bwd_into(inputs, grad_o, grad_final_state, grads, workspace)
        else:  # the choice has checked that it has one of the two
            grads = cast(SupportsBackward, backend).chunk_bwd(inputs, grad_o, grad_final_state)
    registry.notify(call.choice.spec.name, "chunk_bwd", call.shape.device_type)
    return tuple(
        grad_o.new_empty(0) if x is None else getattr(grads, name).reshape(x.shape).to(x.dtype)
        for name, x in zip(FLOAT_TENSORS, args.tensors)
    )


# ---- kernels for fake tensors


def _fake_inputs(args: Arguments) -> KdaInputs:
    shape = problem_shape(*args.tensors, options=args.options)  # type: ignore[arg-type]
    return make_inputs(args.tensors, shape, align=False)


def _fake_chunk_fwd(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    args = Arguments(*values)
    inputs = _fake_inputs(args)
    s, new = inputs.shape, inputs.q.new_empty
    o = new((s.B, s.T, s.HV, s.V))
    state = new(s.state_shape, dtype=s.state_dtype) if s.options.output_final_state else new(0)
    if s.options.needs_backward and args.backend is None:
        return o, state, torch.empty((), dtype=torch.int64, device="cpu")  # as `gradients.served_by`
    if not s.options.return_intermediate_states:
        return o, state, new(0)
    if s.varlen and not s.options.use_graph:  # NT depends on the contents of cu_seqlens, which a trace lacks
        nt: Any = torch.library.get_ctx().new_dynamic_size()
    else:
        nt = intermediate_states_count(inputs)
    return o, state, new(intermediate_states_shape(s, nt), dtype=torch.bfloat16)


def _fake_chunk_fwd_out(*values: Any) -> None:
    inputs = _fake_inputs(Arguments(*values[:_N_ARGUMENTS]))
    if not inputs.options.return_intermediate_states:
        check_outputs(inputs, KdaOutputs(*values[_N_ARGUMENTS:]))


def _fake_chunk_bwd(
    grad_o: Tensor, grad_final_state: Tensor | None, served: Tensor, *values: Any
) -> tuple[Tensor, ...]:
    return tuple(grad_o.new_empty(0) if x is None else x.new_empty(x.shape) for x in values[:_N_FLOATS])


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
