"""One training step of an implementation: its forward, its backward, their times and memory, and the errors of its gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kda_core.bench import implementations, measure, peers
from kda_core.bench.cases import CP
from kda_core.contract import FLOAT_TENSORS
from kda_core.registry import record_calls
from kda_core.testing import Inputs, error, token_oracle
from kda_core.testing.gradients import PER_TOKEN
from kda_core.testing.oracle import sequence_bounds

SEGMENT = 256  # tokens of which autograd through the fp64 token loop keeps every state at a time
#: The field of a row with the error of each gradient.
GRADIENT_ERRORS = {n: f"error_d{'h0' if n == 'initial_state' else n}" for n in FLOAT_TENSORS}
ERRORS = ("error_o", "error_state", *GRADIENT_ERRORS.values())
#: The field of a row with the error in the median head, by the field with that in the worst head.
MEDIANS = {name: name.replace("error", "median") for name in GRADIENT_ERRORS.values()}
#: Dimension of the heads in a tensor. The others have it in dimension 2. A gradient of A_log is one number for each head, which may
#: cancel, so all heads count together.
HEADS = {"A_log": None, "dt_bias": 0, "initial_state": 1}


@dataclass(frozen=True)
class Problem:
    """A call on a device, and the gradients of its outputs.

    Attributes:
        arguments: of ``chunk_kda``; dt_bias is [HV*K], the only shape that FLA's backward takes.
        lengths: of packed sequences; None for fixed length.
        grad_outputs: the gradient of o, N(0,1) in its dtype, and with output_final_state that of the final state, N(0,1) in fp32.
    """

    arguments: dict[str, Any]
    lengths: tuple[int, ...] | None
    grad_outputs: tuple[Tensor, ...]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that have gradients, by name."""
        return {n: self.arguments[n] for n in FLOAT_TENSORS if self.arguments.get(n) is not None}


def problem(x: Inputs, device: torch.device, final_state: bool) -> Problem:
    """Returns the problem of a call on `device`. The gradients of its outputs are drawn on the CPU, with seed 1.

    Args:
        final_state: whether the call returns the final state, and the loss depends on it. Needs an initial state.
    """
    call = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in x.arguments.items()}
    if "dt_bias" in call:
        call["dt_bias"] = call["dt_bias"].flatten()
    rng = torch.Generator().manual_seed(1)
    outputs = [call["v"], *([call["initial_state"]] if final_state else [])]
    grads = tuple(torch.randn(y.shape, generator=rng).to(y) for y in outputs)
    return Problem(call | {"output_final_state": final_state}, x.lengths, grads)


def prepared(p: Problem) -> Problem:
    """Returns the problem of the same values with `peers.prepared` arguments."""
    B, T = p.arguments["q"].shape[:2]
    grad_o, *grad_state = p.grad_outputs
    grads = (grad_o.flatten(0, 1).unsqueeze(0), *(y.mT.contiguous() for y in grad_state))
    return Problem(peers.prepared(p.arguments), p.lengths or (T,) * B, grads)


class Forward(NamedTuple):
    """What a forward in training mode returns: o and, if the call asks for it, the final state; and the inputs with gradients."""

    outputs: list[Tensor]
    leaves: dict[str, Tensor]


class Step:
    """One training step: the forward, and the backward to every floating-point input.

    A backend of kda-core is called as users do: a planner may split the call. Each call asserts that the backend served it.
    """

    def __init__(self, impl: str, problem: Problem, disable_recompute: bool = False):
        is_peer = peers.is_peer(impl)
        self.backend = None if is_peer else implementations.backend_name(impl)
        self._call = implementations.named(impl if is_peer else impl + CP, training=True)
        self._problem = problem
        self._mode = {"disable_recompute": True} if disable_recompute else {}

    def inference(self) -> tuple[Any, Any]:
        """Returns o and the final state of a call without gradients."""
        with torch.inference_mode():
            return self._call(**self._problem.arguments)

    def forward(self) -> Forward:
        """Runs the forward in training mode.

        Each forward has leaves of its own. Autograd ties a leaf to the stream of its first use, and a CUDA graph must not depend on
        another stream.
        """
        leaves = {n: t.detach().requires_grad_() for n, t in self._problem.leaves.items()}
        found = self._call(**(self._problem.arguments | leaves | self._mode))
        return Forward([y for y in found if y is not None], leaves)

    def backward(self, of: Forward, retain_graph: bool = False) -> dict[str, Tensor]:
        """Returns the gradients by the names of the inputs."""
        leaves = [*of.leaves.values()]
        with record_calls() as calls:
            found = torch.autograd.grad(
                of.outputs, leaves, self._problem.grad_outputs, retain_graph=retain_graph
            )
        if self.backend is not None:
            assert calls and {(c.backend, c.entry) for c in calls} == {(self.backend, "chunk_bwd")}, calls
        return dict(zip(of.leaves, found, strict=True))

    def __call__(self) -> dict[str, Tensor]:
        """Returns the gradients of a whole step."""
        return self.backward(self.forward())

    def backwards(self) -> Callable[[], dict[str, Tensor]]:
        """Returns a function that computes the backward alone. Its first call runs a forward, whose saved tensors stay alive; a
        CUDA graph of a later call holds the backward only."""
        kept: list[Forward] = []

        def call() -> dict[str, Tensor]:
            if not kept:
                kept.append(self.forward())
            return self.backward(kept[0], retain_graph=True)

        return call


# ---- time and memory


def times(step: Step, device: torch.device, repeats: int) -> dict[str, Any]:
    """Returns the fields of a row with the times of a step, and how they were measured (``timing``): see `measure.times`."""
    calls: dict[str, Callable[[], Any]] = {
        "inference_ms": step.inference, "forward_ms": step.forward, "backward_ms": step.backwards(), "step_ms": step,
    }  # fmt: skip
    return measure.times(calls, device, repeats, is_peer=step.backend is None)


def first(step: Step, device: torch.device) -> float:
    """Returns the seconds of the first step, with compilation and tuning."""
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def memory(step: Step, before: int) -> dict[str, int]:
    """Returns the fields of a row with the memory of an eager step on a GPU, in bytes.

    ``saved_bytes``: what lives between forward and backward, besides inputs and outputs. ``peak_bytes``: the peak of a step above
    `before`, the memory that was allocated before the implementation's first call.
    """
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    forward = step.forward()
    saved = torch.cuda.memory_allocated() - start - sum(y.nbytes for y in forward.outputs)
    del forward
    return {"saved_bytes": saved, "peak_bytes": measure.peak_bytes(step, before)}


# ---- errors


def exact(p: Problem) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the outputs of a problem, and its gradients by name, from autograd through the fp64 token loop.

    The loop runs in segments of `SEGMENT` tokens, and again for the gradients of each. In one piece it would keep the states of all
    tokens, 8 MiB for each token of 64 heads.
    """
    leaves = {n: t.double().requires_grad_() for n, t in p.leaves.items()}
    call = p.arguments | leaves
    bounds = sequence_bounds(call["q"], call.get("cu_seqlens"))
    tokens = {n: call.pop(n).flatten(0, 1).unsqueeze(0) for n in PER_TOKEN}
    initial, _ = call.pop("initial_state", None), call.pop("cu_seqlens", None)
    loop = partial(token_oracle, **(call | {"output_final_state": True}))
    parts: list[Any] = []
    states: list[Any] = []
    for n, (first, end) in enumerate(bounds):
        state = None if initial is None else initial[n : n + 1]
        for start in range(first, end, SEGMENT):
            piece = {name: x[:, start : min(start + SEGMENT, end)] for name, x in tokens.items()}
            o, state = checkpoint(loop, **piece, initial_state=state, use_reentrant=False)
            parts.append(o)
        states.append(state)
    outputs = [torch.cat(parts, 1).view(p.arguments["v"].shape)]
    if len(p.grad_outputs) > 1:
        outputs.append(torch.cat(states))
    found = torch.autograd.grad(outputs, [*leaves.values()], [y.double() for y in p.grad_outputs])
    return [y.detach() for y in outputs], dict(zip(leaves, found, strict=True))


def errors(step: Step, p: Problem, want: tuple[list[Tensor], dict[str, Tensor]]) -> dict[str, float | None]:
    """Returns the fields `ERRORS` and `MEDIANS` of a row for a step on `p`; None for a gradient that the problem does not have.

    o and the final state: `kda_core.testing.error`. Gradients: the largest and the median of `head_errors`.
    """
    forward = step.forward()
    gradients, outputs = step.backward(forward), [y.detach() for y in forward.outputs]
    found: dict[str, float | None] = dict.fromkeys((*ERRORS, *MEDIANS.values()))
    found["error_o"] = error(outputs[0], want[0][0], lengths=p.lengths)
    if len(outputs) > 1:
        found["error_state"] = error(outputs[1], want[0][1], state=True)
    heads = p.arguments["v"].shape[2]
    for name, gradient in gradients.items():
        of_heads, field = head_errors(name, gradient, want[1][name], heads), GRADIENT_ERRORS[name]
        found |= {field: of_heads.max().item(), MEDIANS[field]: of_heads.quantile(0.5).item()}
    return found


def gradient_error(name: str, x: Tensor, ref: Tensor, heads: int) -> float:
    """Returns the largest of `head_errors`."""
    return head_errors(name, x, ref, heads).max().item()


def head_errors(name: str, x: Tensor, ref: Tensor, heads: int) -> Tensor:
    """Returns the relative Frobenius norm ||x - ref|| / ||ref|| of every head, in fp64; for A_log one norm of all heads together.

    All are infinite if x has a value that is not finite. That of a head is infinite if ref is zero and x is not.

    Args:
        name: the input, one of `FLOAT_TENSORS`.
        x, ref: gradients of its shape.
        heads: number of value heads.
    """
    per_head = []
    for y in (x, ref):
        dim = HEADS.get(name, 2)
        y = y.reshape(heads, -1) if name == "dt_bias" else y
        per_head.append(y.double().flatten()[None] if dim is None else y.double().movedim(dim, 0).flatten(1))
    off, size = (per_head[0] - per_head[1]).norm(dim=1), per_head[1].norm(dim=1)
    found = torch.where(size > 0, off / size, torch.where(off > 0, math.inf, 0.0))
    return found if torch.isfinite(x).all() else torch.full_like(found, math.inf)
