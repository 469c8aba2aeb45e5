"""Autograd and ``torch.func`` for the operators in `kda_core.ops`.

Reverse-mode gradients exist if the backend has a backward. Forward-mode AD and second derivatives raise `DerivativeError`:
torch itself would ignore a tangent, and would return 0 for a second derivative.

The functions with an operator's name are its kernels for the dispatch key Autograd. The dispatcher calls
them once for each level of ``torch.func``, with the tensors of that level. They therefore see everything that is
differentiated, in eager mode and while ``torch.compile`` traces.

The forward chooses the backend of the backward. That may run in another thread, outside of a `use_backend` block, or in a
compiled graph, so the forward returns its choice as a number in a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_core import flops, journal, pools, torch_private
from kda_core.arguments import Arguments
from kda_core.call import may_save
from kda_core.contract import FLOAT_TENSORS, Tensors
from kda_core.errors import ArgumentError, BackendError, DerivativeError

SECOND_DERIVATIVES = (
    "second derivatives are not supported: the gradients of chunk_kda were differentiated (create_graph=True with a gradient "
    "penalty, nested torch.func.grad, gradgradcheck); detach these gradients"
)
"""The text of the error."""

_N_ARGUMENTS = len(Arguments._fields)
_BWD_NAMES = ("grad_o", "grad_final_state", "served", "saved_states", "residual", "wanted", *Tensors._fields)


# ---- kernels for the dispatch key Autograd


def chunk_fwd(*values: Any) -> Any:
    """The Autograd kernel of the operator ``chunk_fwd``."""
    refuse_tangents(Arguments._fields, values)
    if not _requires_grad(values):
        return _below_autograd(torch.ops.kda_core.chunk_fwd.default, values)
    # `chunk_kda` does not see requires_grad of an outer level of torch.func inside vmap
    args = Arguments(*values)._replace(needs_backward=True)
    return ChunkKda.record(*args._replace(saves=may_save(args)))


def chunk_fwd_out(*values: Any) -> None:
    """The Autograd kernel of the operator ``chunk_fwd_out``."""
    refuse_tangents(Arguments._fields, values)
    if _requires_grad(values[_N_ARGUMENTS:]):
        raise ArgumentError("out", "tensors that require no grad", "requires_grad=True")
    if _requires_grad(values):
        raise ArgumentError("out", "None for inputs that require grad", "tensors")
    _below_autograd(torch.ops.kda_core.chunk_fwd_out.default, values)


def pooled_fwd_(*values: Any) -> None:
    """The Autograd kernel of the operator ``pooled_fwd_``."""
    refuse_tangents(Arguments._fields, values)
    pools.refuse_gradients(Arguments(*values[:_N_ARGUMENTS]))
    _below_autograd(torch.ops.kda_core.pooled_fwd_.default, values)


def journal_decode_(*values: Any) -> None:
    """The Autograd kernel of the operator ``journal_decode_``."""
    _of_journal(torch.ops.kda_core.journal_decode_.default, values)


def verify_(*values: Any) -> None:
    """The Autograd kernel of the operator ``verify_``."""
    _of_journal(torch.ops.kda_core.verify_.default, values)


def _of_journal(operator: Any, values: tuple[Any, ...]) -> None:
    refuse_tangents(Arguments._fields, values)
    journal.refuse_gradients(Arguments(*values[:_N_ARGUMENTS]))
    _below_autograd(operator, values)


def journal_fold_(*values: Any) -> None:
    """The Autograd kernel of the operator ``journal_fold_``."""
    if _requires_grad(values[:1]):
        raise ArgumentError("pool", "a tensor that requires no grad", "requires_grad=True")
    _below_autograd(torch.ops.kda_core.journal_fold_.default, values)


def chunk_bwd(*values: Any) -> Any:
    """The Autograd kernel of the operator ``chunk_bwd``."""
    flops.register()
    refuse_tangents(_BWD_NAMES, values)
    if not _requires_grad(values):
        return _below_autograd(torch.ops.kda_core.chunk_bwd.default, values)
    return ChunkKdaGradients.record(*values)


def _below_autograd(operator: Any, values: tuple[Any, ...]) -> Any:
    """Calls what the dispatcher calls after autograd: the next level of torch.func, or the implementation."""
    with torch_private.below_autograd():
        return operator(*values)


def _inside_a_node(operator: Any, values: tuple[Any, ...]) -> Any:
    """`_below_autograd` from a node's forward. torch turns gradients off there, also for the outer levels of torch.func."""
    if not torch_private.is_transformed():
        return _below_autograd(operator, values)
    with torch.enable_grad(), torch_private.set_forward_gradients(True):
        return _below_autograd(operator, values)


def _requires_grad(values: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)


def refuse_tangents(names: Sequence[str], values: Sequence[Any]) -> None:
    """Raises a `DerivativeError` if one of the values has a tangent. `names`: their names."""
    if torch_private.forward_level() < 0:
        return
    for name, x in zip(names, values):
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise forward_mode_error(name)


def forward_mode_error(name: str) -> DerivativeError:
    """Returns the error for an input of this name that has a tangent."""
    return DerivativeError(
        f"forward-mode AD is not supported: {name} has a tangent (torch.func.jvp, jacfwd, hessian, or "
        "torch.autograd.forward_ad); reverse-mode gradients are (torch.func.grad, vjp, jacrev)"
    )


class _Node(torch_private.SingleLevelFunction):
    """A node in the graph of one level of autograd. `torch.autograd.Function` would iterate over the levels of torch.func,
    which the dispatcher already does here."""

    _compiled_autograd_key = staticmethod(torch_private.compiled_autograd_key)

    @classmethod
    def record(cls, *values: Any) -> Any:
        """Runs the forward and records the node."""
        with torch_private.enable_single_level_autograd_function():
            return cls.apply(*values)  # type: ignore[attr-defined]


class ChunkKda(_Node):  # torch shows the name
    """The node of ``chunk_fwd``."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> Any:
        outputs = _inside_a_node(torch.ops.kda_core.chunk_fwd.default, values)
        served, saved_states, residual = outputs[2:]
        args = Arguments(*values)
        ctx.save_for_backward(*args.tensors, served, saved_states, residual)
        # the context itself must not hold what the node saves
        no_tensors: dict[str, Any] = dict.fromkeys(Tensors._fields)
        ctx.args = args._replace(**no_tensors)
        ctx.served = _number(served)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(served, saved_states, residual)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_o, grad_final_state = grads[:2]
        *tensors, served, saved_states, residual = ctx.saved_tensors
        args: Arguments = ctx.args._replace(**dict(zip(Tensors._fields, tensors)))
        # torch.utils.checkpoint runs the forward again, and its saved tensors are of that second run
        again = _number(served)
        if again is not None and ctx.served is not None and again != ctx.served:
            raise BackendError(
                f"the forward ran on backend {_meanings[ctx.served]}, but its recomputation (torch.utils.checkpoint) ran on "
                f"{_meanings[again]}: pass backend=, or run the backward inside the same use_backend block"
            )
        if grad_o is None:
            grad_o = torch.zeros_like(args.v)
        if not args.output_final_state:
            grad_final_state = None
        wanted = [name for name, needed in zip(FLOAT_TENSORS, ctx.needs_input_grad) if needed]
        found = torch.ops.kda_core.chunk_bwd(
            grad_o, grad_final_state, served, saved_states, residual, " ".join(wanted), *args
        )
        floats = [d if name in wanted else None for name, d in zip(FLOAT_TENSORS, found)]
        return (*floats, *([None] * (_N_ARGUMENTS - len(floats))))


class ChunkKdaGradients(_Node):
    """The node of ``chunk_bwd``, which has no derivative."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> Any:
        return _inside_a_node(torch.ops.kda_core.chunk_bwd.default, values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise DerivativeError(SECOND_DERIVATIVES)


# ---- what served a forward


class Served(NamedTuple):
    """What served a forward and will serve its backward: the names of the backends, and whether the forward saved states."""

    forward: str
    backward: str
    saved: bool

    def __str__(self) -> str:
        same = self.forward == self.backward
        return repr(self.forward) if same else f"{self.forward!r} (its backward on {self.backward!r})"


_meanings: list[Served] = []
_lock = threading.Lock()


def served_by(what: Served) -> Tensor:
    """Returns a number in host memory that stands for `what`; `meaning_of` inverts it."""
    if what not in _meanings:
        with _lock:
            if what not in _meanings:
                _meanings.append(what)
    return torch.tensor(_meanings.index(what))


def meaning_of(served: Tensor) -> Served:
    """Returns what `served_by` was given."""
    return _meanings[int(served)]


def _number(served: Tensor) -> int | None:
    """Returns the number in a tensor of `served_by`; None if a trace or a transform hides it, or if the tensor is empty because the
    call names its backend."""
    readable = (
        type(served) is Tensor
        and served.numel() == 1
        and not torch_private.is_intercepted()
        and not torch_private.is_transformed()
    )
    return int(served) if readable else None


# ---- torch.func.vmap


def batching_rule(operator: Any) -> Callable[..., Any]:
    """Returns the vmap rule of an operator that returns only tensors: it runs the elements of the batch one after the
    other."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        calls = [
            operator(*(x if at is None else x.select(at, i) for x, at in zip(values, in_dims)))
            for i in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(outputs) for outputs in zip(*calls))
        return stacked, (0,) * len(stacked)

    return rule
