"""The operators behind the API: torch.library schemas, fake kernels, autograd, and the dispatch to a backend.

An operator takes FLA's tensors, then the fields of `KdaOptions` in order, then the choice of backend and of context
parallelism as strings, so that ``torch.compile(fullgraph=True)`` sees one node and every backend gets it for nothing.
The backend is chosen when the operator runs on real tensors, never while it is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kda_core import contract, registry
from kda_core.contract import OPTION_FIELDS, KdaInputs, KdaOptions, KdaOutputs
from kda_core.errors import ArgumentError, BackendContractError, PlannerError

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
    f"chunk_bwd(Tensor grad_o, Tensor? grad_final_state, {TENSORS}, {OPTIONS}, str? backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _unpack(args: Sequence[Any]) -> tuple[KdaInputs, str | None, str]:
    """Validated inputs, the named backend and the context-parallel mode from an operator's arguments."""
    tensors, options = args[:_N_TENSORS], args[_N_TENSORS : _N_TENSORS + _N_OPTIONS]
    backend, context_parallel = args[_N_TENSORS + _N_OPTIONS :][:2]
    return contract.make_inputs(*tensors, options=KdaOptions(*options)), backend, context_parallel


# ---- real tensors


def _execute(
    inputs: KdaInputs, backend: str | None, context_parallel: str, given: KdaOutputs | None
) -> KdaOutputs:
    """Runs one call on the backend that the registry chooses, through a planner where one has a plan for it."""
    shape, inputs = inputs.shape, contract.align_inputs(inputs)
    inputs.sequence_lengths()  # where the host has a copy of cu_seqlens, its contents are checked before any launch
    choice = registry.REGISTRY.resolve(shape, backend)
    entry = "recurrent_fwd" if shape.options.recurrent else "chunk_fwd"
    needed = 0 if shape.options.recurrent else choice.backend.workspace_bytes(shape)
    if given is None:
        outputs = contract.allocate_outputs(inputs, needed)
    else:
        contract.check_outputs(inputs, given, needed)
        contract.check_memory(inputs, given)
        outputs = given
        if given.workspace is None and needed:
            workspace = inputs.q.new_empty(needed, dtype=torch.uint8)
            outputs = KdaOutputs(given.o, given.final_state, given.intermediate_states, workspace)
    planned = None if shape.options.recurrent else _plan(inputs, choice, context_parallel)
    if planned is not None:
        name, planner, plan = planned
        returned = planner.run(plan, inputs, outputs, choice.backend)
    else:
        name, returned = None, getattr(choice.backend, entry)(inputs, outputs)
    if returned is not outputs:
        raise BackendContractError(
            f"{choice.spec.name}.{entry} returned {type(returned).__name__}, not the outputs it was given"
        )
    registry.notify(registry.Call(choice.spec.name, entry, shape.device_type, name))
    return outputs


def _plan(inputs: KdaInputs, choice: registry.Choice, mode: str) -> tuple[str, Any, Any] | None:
    """(planner's name, planner, plan), or None for a direct call. Mode: "off", "auto", or a plan as JSON."""
    if mode == "off" or (mode == "auto" and inputs.options.needs_backward):
        return None
    found = registry.REGISTRY.planner()
    if mode == "auto":
        if found is None or inputs.options.pin:
            return None
        name, planner = found
        plan = planner.plan(inputs, choice.spec, choice.backend)
        return None if plan is None else (name, planner, plan)
    if found is None:
        raise PlannerError(
            "context_parallel: a plan was given, but no planner is installed and on (kda-cp, KDA_CP)"
        )
    name, planner = found
    return name, planner, planner.plan_from_json(mode)


def _empty(x: Tensor | None, like: Tensor) -> Tensor:
    """An operator returns a fixed number of tensors: what was not asked for is one without elements."""
    return like.new_empty(0) if x is None else x


def _chunk_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = _execute(*_unpack(args), given=None)
    return out.o, _empty(out.final_state, out.o), _empty(out.intermediate_states, out.o)


def _chunk_fwd_out(*args: Any) -> None:
    _execute(*_unpack(args[:-4]), given=KdaOutputs(*args[-4:]))


def _chunk_bwd(grad_o: Tensor, grad_final_state: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """Gradients of the first eight tensor arguments, in their shapes."""
    inputs, backend, _ = _unpack((*args, "off"))
    inputs = contract.align_inputs(inputs)
    choice = registry.REGISTRY.resolve(inputs.shape, backend)
    grads = choice.backend.chunk_bwd(inputs, grad_o.contiguous(), grad_final_state)  # type: ignore[attr-defined]
    registry.notify(registry.Call(choice.spec.name, "chunk_bwd", inputs.shape.device_type))
    found = [getattr(grads, f.name) for f in fields(grads)]
    return tuple(grad_o.new_empty(0) if x is None else d.reshape(x.shape) for x, d in zip(args[:8], found))


# ---- fake tensors


def _fake_chunk_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, _, _ = _unpack(args)
    s, new = inputs.shape, inputs.q.new_empty
    o = new((s.B, s.T, s.HV, s.V))
    state = new(s.state_shape, dtype=s.state_dtype) if s.options.output_final_state else new(0)
    if not s.options.return_intermediate_states:
        return o, state, new(0)
    if s.varlen and not s.options.use_graph:  # the contents of cu_seqlens decide, which a trace lacks
        nt: Any = torch.library.get_ctx().new_dynamic_size()
    else:
        nt = contract.intermediate_states_count(inputs)
    return o, state, new(contract.intermediate_states_shape(s, nt), dtype=torch.bfloat16)


def _fake_chunk_fwd_out(*args: Any) -> None:
    inputs, _, _ = _unpack(args[:-4])
    if not inputs.options.return_intermediate_states:
        contract.check_outputs(inputs, KdaOutputs(*args[-4:]))


def _fake_chunk_bwd(grad_o: Tensor, grad_final_state: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    return tuple(grad_o.new_empty(0) if x is None else x.new_empty(x.shape) for x in args[:8])


# ---- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_N_TENSORS])
    ctx.rest = inputs[_N_TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*([output[2]] if output[2].dtype == torch.bfloat16 else []))


def _backward(
    ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None, grad_h: Tensor | None
) -> tuple[Any, ...]:
    tensors, (*options, backend, _) = ctx.saved_tensors, ctx.rest
    parsed = KdaOptions(*options)
    v = tensors[2]
    if not parsed.needs_backward:
        raise ArgumentError("needs_backward", "True for an operator that is differentiated", "False")
    if grad_o is None:
        grad_o = torch.zeros_like(v)
    if not parsed.output_final_state:
        grad_final_state = None
    grads = torch.ops.kda_core.chunk_bwd(grad_o, grad_final_state, *tensors, *options, backend)
    return (
        *(None if x is None else d for x, d in zip(tensors[:8], grads)),
        None,
        None,
        *([None] * (_N_OPTIONS + 2)),
    )


_LIB.impl("chunk_fwd", _chunk_fwd, "CompositeExplicitAutograd")
_LIB.impl("chunk_fwd_out", _chunk_fwd_out, "CompositeExplicitAutograd")
_LIB.impl("chunk_bwd", _chunk_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("kda_core::chunk_fwd", _fake_chunk_fwd, lib=_LIB)
torch.library.register_fake("kda_core::chunk_fwd_out", _fake_chunk_fwd_out, lib=_LIB)
torch.library.register_fake("kda_core::chunk_bwd", _fake_chunk_bwd, lib=_LIB)
torch.library.register_autograd("kda_core::chunk_fwd", _backward, setup_context=_setup_context, lib=_LIB)
