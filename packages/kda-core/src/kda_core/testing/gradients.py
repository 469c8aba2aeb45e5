"""Exact gradients of a call, the errors of others, and the largest admissible errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.contract import FLOAT_TENSORS
from kda_core.testing.backward_specification import backward
from kda_core.testing.inputs import Inputs, copied, state_dtype
from kda_core.testing.limits import SHARES
from kda_core.testing.oracle import F64, log_decay, token_oracle
from kda_core.testing.specification import CHUNKS, dithered
from kda_core.testing.tolerance import BAND, DITHERS, error, sequence_lengths, short_sequences

ROUNDINGS = 2
"""Number of further roundings of the specification. A gradient of A_log is one number for each head, which may cancel, and few
tokens may dominate the gradient of beta: one rounding may then be exact by luck."""
PER_TOKEN = ("q", "k", "v", "g", "beta")


class ExactGradients(NamedTuple):
    """The gradients of a call in fp64.

    Attributes:
        values: the gradient of each floating-point tensor of the call, in its shape.
        resolution: of g, A_log and dt_bias, with the same shapes: absolute errors that arithmetic in the dtype of the states cannot
            avoid. The slope s (1 - s) of a bounded gate's sigmoid has an absolute error of a few units in the last place of 1, and
            is much smaller where the gate is saturated. Without a bounded gate in the kernel it is empty.
    """

    values: dict[str, Tensor]
    resolution: dict[str, Tensor]


def token_gradients(
    x: dict[str, Any], grad_o: Tensor | None, grad_final_state: Tensor | None
) -> ExactGradients:
    """Computes the gradients of sum(o * grad_o) + sum(final_state * grad_final_state) in fp64, by autograd through `token_oracle`.

    Args:
        x: arguments of `kda_core.chunk_kda`.
        grad_o: [B, T, HV, V], or None for zeros. grad_final_state: like the final states, or None for zeros.
    """
    leaves = {n: x[n].detach().to(F64).requires_grad_() for n in FLOAT_TENSORS if x.get(n) is not None}
    call = x | leaves
    if in_kernel := x.get("use_gate_in_kernel", False):
        gate = {n: call.pop(n, None) for n in ("A_log", "dt_bias", "lower_bound")}
        call |= {"g": log_decay(leaves["g"], **gate), "use_gate_in_kernel": False}
    o, state, *_ = token_oracle(**call)
    total = sum((y * d.to(F64)).sum() for y, d in ((o, grad_o), (state, grad_final_state)) if d is not None)
    wanted = [*leaves.values(), *([call["g"]] if in_kernel else [])]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if isinstance(total, Tensor) and total.requires_grad:  # not without tokens and initial states
        found = torch.autograd.grad(total, wanted, allow_unused=True)
    of_all = [torch.zeros_like(y) if d is None else d for y, d in zip(wanted, found)]
    values, resolution = dict(zip(leaves, of_all)), {}
    if in_kernel and x.get("lower_bound") is not None:
        HV = x["v"].shape[2]
        A_log, dt_bias = (None if (y := leaves.get(n)) is None else y.detach() for n in ("A_log", "dt_bias"))
        rate = 1.0 if A_log is None else A_log.exp().reshape(HV, 1)
        at = leaves["g"].detach() + (0.0 if dt_bias is None else dt_bias.reshape(HV, -1))
        unit = 4 * torch.finfo(state_dtype(x["q"].dtype)).eps * abs(x["lower_bound"])
        resolution["g"] = (unit * rate * of_all[-1]).abs()
        if dt_bias is not None:
            resolution["dt_bias"] = resolution["g"].sum((0, 1)).reshape(dt_bias.shape)
        if A_log is not None:
            resolution["A_log"] = (resolution["g"] * at.abs()).sum((0, 1, 3)).reshape(A_log.shape)
    return ExactGradients(values, resolution)


def gradient_errors(
    found: dict[str, Tensor],
    exact: ExactGradients,
    lengths: Iterable[int] | None = None,
    names: Iterable[str] = FLOAT_TENSORS,
) -> dict[str, float]:
    """Returns the error of each gradient: the largest relative Frobenius error over (sequence, head), for dt_bias over heads, and for
    A_log over all heads together, because one number may cancel. Errors below `ExactGradients.resolution` do not count.

    Args:
        found: the gradients, with the shapes of `exact.values`.
        lengths: of the sequences packed along T.
        names: the gradients to compare, as far as `exact` has them.
    """
    errors = {}
    for name in names:
        if (want := exact.values.get(name)) is None:
            continue
        got, unavoidable = found[name], exact.resolution.get(name)
        if got.shape != want.shape:
            raise ValueError(
                f"the gradient of {name}: expected the shape {list(want.shape)}, got {list(got.shape)}"
            )
        if name == "initial_state":
            errors[name] = error(got, want, state=True)
        elif name in PER_TOKEN:
            sizes = None if lengths is None else [*lengths]
            errors[name] = error(got, want, lengths=sizes, unavoidable=unavoidable)
        else:  # as those of one token, of all heads or of one
            heads = (1, 1, exact.values["v"].shape[2] if name == "dt_bias" else 1, -1)
            unavoidable = None if unavoidable is None else unavoidable.reshape(heads)
            errors[name] = error(got.reshape(heads), want.reshape(heads), unavoidable=unavoidable)
    return errors


def gradient_tolerance(
    x: dict[str, Any], grad_o: Tensor | None, grad_final_state: Tensor | None, exact: ExactGradients
) -> dict[str, float]:
    """Returns the largest admissible error of each gradient of a call in bf16: 2 * (e + BAND), where e is the error of the
    specification on the same inputs, the largest over C = 16, 32 and 64 and over `ROUNDINGS` further roundings. For sequences of at
    most `SHORT` tokens, it is also the largest over `DITHERS` roundings.

    Args:
        exact: what `token_gradients` returns for the same arguments.
    """
    lengths, worst = sequence_lengths(x), dict.fromkeys(exact.values, 0.0)

    def judge(errors: dict[str, float]) -> None:
        worst.update({n: max(worst[n], e) for n, e in errors.items()})

    for C in CHUNKS:
        judge(gradient_errors(backward(x, grad_o, grad_final_state, C), exact, lengths))
    for seed in range(ROUNDINGS):
        with dithered(seed):
            judge(gradient_errors(backward(x, grad_o, grad_final_state, CHUNKS[-1]), exact, lengths))
    if (short := short_sequences(x)) is not None:
        o = None if grad_o is None else short.of_tokens(grad_o)
        state = None if grad_final_state is None else short.of_sequences(grad_final_state)
        names = [n for n in exact.values if n in PER_TOKEN]
        values = {n: short.of_tokens(exact.values[n]) for n in names}
        if "initial_state" in exact.values:
            values["initial_state"] = short.of_sequences(exact.values["initial_state"])
        resolution = {n: short.of_tokens(y) for n, y in exact.resolution.items() if n == "g"}
        lengths, short_exact = sequence_lengths(short.arguments), ExactGradients(values, resolution)
        for seed in range(DITHERS):
            with dithered(seed):
                judge(gradient_errors(backward(short.arguments, o, state, CHUNKS[0]), short_exact, lengths))
    return {n: 2 * (e + BAND) for n, e in worst.items()}


class GradientCase:
    """A call with random gradients of its outputs, its exact gradients and the largest admissible errors of others.

    The exact gradients and the limits are computed at first use, and from a copy of the inputs, as those of
    `kda_core.testing.runner.Case`.

    Attributes:
        inputs: the call; it asks for the final states if they have a gradient.
        grad_o: [B, T, HV, V] ~ N(0,1) in the dtype of q, or None.
        grad_final_state: like the final states, ~ N(0,1), or None.
    """

    def __init__(self, inputs: Inputs, of: Iterable[str] = ("o", "final_state"), seed: int = 0) -> None:
        """`of` names the outputs that have a gradient."""
        x, rng = inputs.arguments, torch.Generator().manual_seed(seed)
        (B, T, _, K), (HV, V) = x["q"].shape, x["v"].shape[2:]
        N = B if x.get("cu_seqlens") is None else len(x["cu_seqlens"]) - 1
        matrix = (V, K) if x.get("state_v_first") else (K, V)
        grad_o = torch.randn(B, T, HV, V, generator=rng).to(x["v"])
        grad_final_state = torch.randn(N, HV, *matrix, generator=rng).to(
            x["v"].device, state_dtype(x["v"].dtype)
        )
        self.grad_o = grad_o if "o" in of else None
        self.grad_final_state = grad_final_state if "final_state" in of else None
        self.inputs = inputs.replace(output_final_state=True) if "final_state" in of else inputs
        self._kept = copied(self.inputs.arguments)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the call."""
        return self.inputs.arguments

    @cached_property
    def exact(self) -> ExactGradients:
        """The exact gradients, see `token_gradients`."""
        return token_gradients(self._kept, self.grad_o, self.grad_final_state)

    @cached_property
    def limits(self) -> dict[str, float]:
        """The largest admissible errors: `gradient_tolerance` times the share of the dtype of q (`SHARES`), but at least one rounding
        of the gradient's own dtype."""
        found = gradient_tolerance(self._kept, self.grad_o, self.grad_final_state, self.exact)
        share = SHARES[self._kept["q"].dtype]
        return {n: max(share * e, torch.finfo(self._kept[n].dtype).eps) for n, e in found.items()}
