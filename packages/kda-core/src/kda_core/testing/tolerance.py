"""The project's error, and the largest error that a backend may have, derived from the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kda_core.testing.oracle import token_oracle
from kda_core.testing.specification import CHUNKS, forward

BAND = 2.0**-9  # the largest relative Frobenius error that one rounding to bf16 can cause


def error(x: Tensor, ref: Tensor, *, lengths: Sequence[int] | None = None, state: bool = False) -> float:
    """The largest relative Frobenius norm ||x - ref|| / ||ref|| over (sequence, value head), so that one broken head
    cannot hide.

    Empty sequences do not count; where ref is zero x must be zero, else the error is infinite, as it is where x holds
    anything that is not finite. Rows of o that belong to no sequence (``sum(lengths) < T``) are not looked at.

    Args:
        x, ref: o [B, T, HV, V], or with `state` final states [N, HV, K, V] (either layout), or intermediate states
            [B, NT, HV, K, V], where every chunk counts for itself. ref is usually fp64.
        lengths: of the sequences packed along T.
    """
    if x.shape != ref.shape:
        raise ValueError(f"x {list(x.shape)} and ref {list(ref.shape)} differ in shape")
    if state:
        x, ref = (y.flatten(0, -4) for y in (x, ref))
        items = [*zip(x, ref)]
    elif lengths is None:
        items = [(y.transpose(0, 1), r.transpose(0, 1)) for y, r in zip(x, ref)]
    else:
        n = sum(lengths)
        parts = zip(x[0, :n].split(list(lengths)), ref[0, :n].split(list(lengths)))
        items = [(y.transpose(0, 1), r.transpose(0, 1)) for y, r in parts]
    worst = 0.0
    for y, r in items:
        if y.numel() == 0:
            continue
        y, r = y.to(torch.float64).flatten(1), r.to(torch.float64).flatten(1)
        if not torch.isfinite(y).all():
            return math.inf
        off, size = (y - r).norm(dim=1), r.norm(dim=1)
        ratio = torch.where(size > 0, off / size, torch.where(off > 0, math.inf, 0.0))
        worst = max(worst, ratio.max().item())
    return worst


def tolerance(
    x: dict[str, Any], C: int | None = None, oracle: tuple[Tensor, ...] | None = None
) -> tuple[float, ...]:
    """The largest admissible `error` against the oracle: 2 * (e + BAND), e the error of the specification on the same
    inputs.

    Args:
        x: arguments of `kda_core.chunk_kda`.
        C: the chunk that a kernel computes in; None for the largest error over C = 16, 32 and 64 (with
            `return_intermediate_states` those that divide `chunk_size`).
        oracle: what `token_oracle(**x)` returns, where it is known.

    Returns:
        (for o, for the final state), and with `return_intermediate_states` (.., for the intermediate states).
    """
    want = token_oracle(**x) if oracle is None else oracle
    lengths = _lengths(x)
    save = x.get("return_intermediate_states", False)
    sizes = (C,) if C else [c for c in CHUNKS if not save or x.get("chunk_size", 64) % c == 0]
    worst = [0.0] * (3 if save else 2)
    for size in sizes:
        for i, (got, ref) in enumerate(zip(forward(C=size, **x), want)):
            worst[i] = max(worst[i], error(got, ref, lengths=None if i else lengths, state=i > 0))
    return tuple(2 * (e + BAND) for e in worst)


def _lengths(x: dict[str, Any]) -> list[int] | None:
    cu_seqlens = x.get("cu_seqlens")
    return None if cu_seqlens is None else cu_seqlens.diff().tolist()
