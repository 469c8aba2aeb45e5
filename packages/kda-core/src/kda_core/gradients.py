"""What autograd and ``torch.func`` get of the operators in `kda_core.ops`.

Gradients in reverse mode exist where the backend has a backward. Forward-mode AD and second derivatives do not, and raise
`DerivativeError`: torch by itself would drop a tangent and take a second derivative as 0.

`chunk_fwd`, `chunk_fwd_out` and `chunk_bwd` are the operators' kernels for the dispatch key Autograd. The dispatcher calls
them once for each level of ``torch.func``, with the tensors of that level, so they see all that is differentiated, in
eager mode and while ``torch.compile`` traces.

The backward runs on the backend of its forward. It may run in another thread, outside of a `use_backend` block, or in a
compiled graph, so the forward returns the backend that served it, as a number in a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import _C, Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from kda_core import flops
from kda_core.contract import OPTION_FIELDS, KdaInputs, KdaOptions
from kda_core.errors import ArgumentError, BackendError, DerivativeError

TENSOR_NAMES = tuple(f.name for f in fields(KdaInputs) if f.name != "shape")
_N_TENSORS = len(TENSOR_NAMES)
_N_FLOATS = TENSOR_NAMES.index("cu_seqlens")  # the tensors before it have gradients
_NEEDS_BACKWARD = _N_TENSORS + [name for name, _, _ in OPTION_FIELDS].index("needs_backward")
_BWD_NAMES = ("grad_o", "grad_final_state", "served", *TENSOR_NAMES)


# ---- kernels for the dispatch key Autograd


def chunk_fwd(*args: Any) -> Any:
    """The operator ``chunk_fwd``."""
    _refuse_tangents(TENSOR_NAMES, args)
    if not _requires_grad(args):
        return _below_autograd(torch.ops.kda_core.chunk_fwd.default, args)
    # `chunk_kda` cannot see inside torch.func.vmap that an outer level differentiates
    args = (*args[:_NEEDS_BACKWARD], True, *args[_NEEDS_BACKWARD + 1 :])
    return ChunkKda.record(*args)


def chunk_fwd_out(*args: Any) -> None:
    """The operator ``chunk_fwd_out``."""
    _refuse_tangents(TENSOR_NAMES, args)
    if _requires_grad(args[-4:]):
        raise ArgumentError("out", "tensors that require no grad", "requires_grad=True")
    if _requires_grad(args):
        raise ArgumentError("out", "None for inputs that require grad", "tensors")
    _below_autograd(torch.ops.kda_core.chunk_fwd_out.default, args)


def chunk_bwd(*args: Any) -> Any:
    """The operator ``chunk_bwd``."""
    flops.offer()
    _refuse_tangents(_BWD_NAMES, args)
    if not _requires_grad(args):
        return _below_autograd(torch.ops.kda_core.chunk_bwd.default, args)
    return ChunkKdaGradients.record(*args)


def _below_autograd(operator: Any, args: tuple[Any, ...]) -> Any:
    """What the dispatcher calls after autograd: the next level of torch.func, or in the end the implementation."""
    with _C._AutoDispatchBelowAutograd():
        return operator(*args)


def _inside_a_node(operator: Any, args: tuple[Any, ...]) -> Any:
    """`_below_autograd` from a node's forward, where torch has turned gradients off, at the outer levels too."""
    if _C._functorch.peek_interpreter_stack() is None:
        return _below_autograd(operator, args)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _below_autograd(operator, args)


def _requires_grad(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)


def _refuse_tangents(names: Sequence[str], args: Sequence[Any]) -> None:
    if forward_ad._current_level < 0:
        return
    for name, x in zip(names, args):
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise DerivativeError(
                f"forward-mode AD is not supported: {name} has a tangent (torch.func.jvp, jacfwd, hessian, or "
                "torch.autograd.forward_ad); gradients in reverse mode are (torch.func.grad, vjp, jacrev)"
            )


class _Node(_SingleLevelFunction):
    """A node in the graph of one level of autograd: `torch.autograd.Function` walks through the levels of torch.func, as
    the dispatcher has done here."""

    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)

    @classmethod
    def record(cls, *args: Any) -> Any:
        with enable_single_level_autograd_function():
            return cls.apply(*args)  # type: ignore[attr-defined]


class ChunkKda(_Node):  # torch shows the name
    """``chunk_fwd``."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        outputs = _inside_a_node(torch.ops.kda_core.chunk_fwd.default, args)
        served = outputs[2]
        ctx.save_for_backward(*args[:_N_TENSORS], served)
        ctx.rest, ctx.served = args[_N_TENSORS:], _number(served)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(served)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_o, grad_final_state, _ = grads
        *tensors, served = ctx.saved_tensors
        *options, backend, _ = ctx.rest
        again = _number(
            served
        )  # under torch.utils.checkpoint the saved tensors are those of a second forward
        if again is not None and ctx.served is not None and again != ctx.served:
            raise BackendError(
                f"the forward ran on backend {_names[ctx.served]!r}, but its recomputation (torch.utils.checkpoint) on "
                f"{_names[again]!r}: name it with backend=, or put the backward into the same use_backend block"
            )
        if grad_o is None:
            grad_o = torch.zeros_like(tensors[2])
        if not KdaOptions(*options).output_final_state:
            grad_final_state = None
        found = torch.ops.kda_core.chunk_bwd(grad_o, grad_final_state, served, *tensors, *options, backend)
        return (
            *(None if x is None else d for x, d in zip(tensors[:_N_FLOATS], found)),
            *([None] * (len(tensors) - _N_FLOATS + len(ctx.rest))),
        )


class ChunkKdaGradients(_Node):
    """``chunk_bwd``, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return _inside_a_node(torch.ops.kda_core.chunk_bwd.default, args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise DerivativeError(
            "second derivatives are not supported: the gradients of chunk_kda were differentiated (create_graph=True "
            "with a gradient penalty, nested torch.func.grad, gradgradcheck); detach these gradients"
        )


# ---- the backend of a forward


_names: list[str] = []
_lock = threading.Lock()


def served_by(name: str) -> Tensor:
    """What the forward returns for `backend_of` to read: a number in host memory."""
    if name not in _names:
        with _lock:
            if name not in _names:
                _names.append(name)
    return torch.tensor(_names.index(name))


def backend_of(served: Tensor) -> str:
    """The name that `served_by` was given."""
    return _names[int(served)]


def _number(served: Tensor) -> int | None:
    """What a tensor of `served_by` holds; None where a trace or a transform hides that, and where the call itself names
    its backend."""
    readable = (
        type(served) is Tensor
        and served.numel() == 1
        and not _C._len_torch_dispatch_stack()
        and _C._functorch.peek_interpreter_stack() is None
    )
    return int(served) if readable else None


# ---- torch.func.vmap


def batching_rule(operator: Any) -> Callable[..., Any]:
    """Calls an operator, all of whose outputs are tensors, for each element of a batch, one after the other."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        calls = [
            operator(*(x if at is None else x.select(at, i) for x, at in zip(args, in_dims)))
            for i in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(outputs) for outputs in zip(*calls))
        return stacked, (0,) * len(stacked)

    return rule
