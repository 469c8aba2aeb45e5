"""The error measure of the project, and the largest admissible error, derived from the inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.testing.oracle import token_oracle
from kda_core.testing.specification import BLOCK, CHUNKS, dithered, forward

BAND = 2.0**-9  # the largest relative Frobenius error that one rounding to bf16 can cause
SHORT = BLOCK  # tokens; shorter sequences are compared with several roundings of the specification
DITHERS = 16  # number of these roundings


def error(
    x: Tensor,
    ref: Tensor,
    *,
    lengths: Sequence[int] | None = None,
    state: bool = False,
    unavoidable: Tensor | None = None,
) -> float:
    """Returns the largest relative Frobenius norm ||x - ref|| / ||ref|| over (sequence, value head), so that one wrong head is
    visible.

    Empty sequences do not count. The error is infinite if ref is zero and x is not, and if x has a value that is not finite.
    Tokens of o outside of every sequence (``sum(lengths) < T``) are ignored.

    Args:
        x, ref: o [B, T, HV, V] or other values of tokens [B, T, heads, ..], or with `state` final states [N, HV, K, V] (either
            layout), or intermediate states [B, NT, HV, K, V], where every chunk counts separately. ref is usually fp64.
        lengths: of the sequences packed along T.
        unavoidable: absolute errors like ref; the norm of x - ref counts as far as it exceeds theirs.
    """
    if x.shape != ref.shape:
        raise ValueError(f"x {list(x.shape)} and ref {list(ref.shape)} differ in shape")
    both = (x, ref, torch.zeros_like(ref) if unavoidable is None else unavoidable)
    parts: list[Any]  # x, ref and the unavoidable errors, each an iterable of items [heads, ..]
    if state:
        parts = [y.flatten(0, -4) for y in both]
    elif lengths is None:
        parts = [y.transpose(1, 2) for y in both]
    else:
        sizes = list(lengths)
        parts = [[z.transpose(0, 1) for z in y[0, : sum(sizes)].split(sizes)] for y in both]
    worst = 0.0
    for item in zip(*parts):
        if item[0].numel() == 0:
            continue
        y, r, least = (z.to(torch.float64).flatten(1) for z in item)
        if not torch.isfinite(y).all():
            return math.inf
        off, size = ((y - r).norm(dim=1) - least.norm(dim=1)).clamp(min=0), r.norm(dim=1)
        ratio = torch.where(size > 0, off / size, torch.where(off > 0, math.inf, 0.0))
        worst = max(worst, ratio.max().item())
    return worst


def tolerance(
    x: dict[str, Any], C: int | None = None, oracle: tuple[Tensor, ...] | None = None
) -> tuple[float, ...]:
    """Returns the largest admissible `error` against the oracle: 2 * (e + BAND), where e is the error of the specification on the
    same inputs.

    For sequences of at most `SHORT` tokens, e is the largest error of `DITHERS` further roundings of the specification. If the
    output of such a sequence cancels, its error comes from a few roundings, such as that of one product q . k. A single sample may
    be near zero by chance.

    Args:
        x: arguments of `kda_core.chunk_kda`.
        C: the chunk that a kernel computes in; None for the largest error over C = 16, 32 and 64 (with
            `return_intermediate_states` those that divide `chunk_size`).
        oracle: what `token_oracle(**x)` returns, if known.

    Returns:
        (for o, for the final state), and with `return_intermediate_states` (.., for the intermediate states).
    """
    want = token_oracle(**x) if oracle is None else oracle
    lengths = sequence_lengths(x)
    save = x.get("return_intermediate_states", False)
    sizes = (C,) if C else [c for c in CHUNKS if not save or x.get("chunk_size", 64) % c == 0]
    worst = [0.0] * (3 if save else 2)
    for size in sizes:
        for i, (got, ref) in enumerate(zip(forward(C=size, **x), want)):
            worst[i] = max(worst[i], error(got, ref, lengths=None if i else lengths, state=i > 0))
    if (short := short_sequences(x)) is not None:
        x, o, state = short.arguments, short.of_tokens(want[0]), short.of_sequences(want[1])
        lengths = sequence_lengths(x)
        for seed in range(DITHERS):
            with dithered(seed):
                found = forward(C=sizes[0], **x)
            for i, (got, ref) in enumerate(zip(found, (o, state))):
                worst[i] = max(worst[i], error(got, ref, lengths=None if i else lengths, state=i > 0))
    return tuple(2 * (e + BAND) for e in worst)


class ShortSequences(NamedTuple):
    """The sequences of 1 to `SHORT` tokens of a call.

    Attributes:
        arguments: a call of them alone. It asks for no intermediate states.
        rows: their tokens in a packed call, None if the call is one of fixed lengths and has no others.
        which: their numbers, likewise.
    """

    arguments: dict[str, Any]
    rows: Tensor | None
    which: Tensor | None

    def of_tokens(self, x: Tensor) -> Tensor:
        """Returns these sequences' part of a tensor [B, T, ..]."""
        return x if self.rows is None else x[:, self.rows]

    def of_sequences(self, x: Tensor) -> Tensor:
        """Returns these sequences' part of a tensor [N, ..]."""
        return x if self.which is None else x[self.which]


def short_sequences(x: dict[str, Any]) -> ShortSequences | None:
    """Returns the sequences of 1 to `SHORT` tokens of a call, or None if there are none."""
    x = {n: t for n, t in x.items() if n not in ("return_intermediate_states", "cu_seqlens_cpu")}
    lengths, T = sequence_lengths(x), x["q"].shape[1]
    if lengths is None:
        return ShortSequences(x, None, None) if 0 < T <= SHORT else None
    device = x["q"].device
    mine = [n for n, size in enumerate(lengths) if 0 < size <= SHORT]
    if not mine:
        return None
    ends = torch.tensor(lengths).cumsum(0).tolist()
    rows = torch.cat([torch.arange(ends[n] - lengths[n], ends[n]) for n in mine]).to(device)
    which = torch.tensor(mine, device=device)
    x = x | {n: x[n][:, rows] for n in ("q", "k", "v", "g", "beta")}
    x["cu_seqlens"] = torch.tensor([0, *(lengths[n] for n in mine)], device=device).cumsum(0)
    if x.get("initial_state") is not None:
        x["initial_state"] = x["initial_state"][which]
    return ShortSequences(x, rows, which)


def sequence_lengths(x: dict[str, Any]) -> list[int] | None:
    """Returns the lengths of a call's packed sequences, None for fixed lengths."""
    cu_seqlens = x.get("cu_seqlens")
    return None if cu_seqlens is None else cu_seqlens.diff().tolist()
