"""Random chunk records for tests of a chain alone, and where sequences lie."""

from __future__ import annotations

from itertools import accumulate

import torch

from kda_sm90 import layouts
from kda_sm90.config import HEAD_DIM


def make_records(n: int, C: int, device: str, tokens: str) -> dict[str, torch.Tensor]:
    """Returns n records of random tokens with decays of up to 6% per token, as matrices rounded like those of the intra-chunk
    stage, and a random matrix [C, 128] of each under the name ``tokens``."""
    rng = torch.Generator(device).manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=rng, device=device, dtype=torch.float64)
    q, k = (torch.nn.functional.normalize(new(n, C, HEAD_DIM), dim=-1) for _ in range(2))
    beta, g = new(n, C).sigmoid(), -0.06 * new(n, C, HEAD_DIM).sigmoid()
    G = g.cumsum(1)
    up, down = G.exp(), (-G).exp()
    beta_k = k * beta[..., None]
    L = (k * up @ (beta_k * down).mT).tril(-1)
    T = torch.linalg.inv(torch.eye(C, device=device) + L).tril()
    qd = q * up * HEAD_DIM**-0.5
    logical = {
        "kd": -(k * up),
        "qd": qd,
        "kg": beta_k * (G[:, -1:] - G).exp(),
        "aqk": (qd @ (beta_k * down).mT).tril(),
        "t": T,
        tokens: new(n, C, HEAD_DIM),
    }
    return {n: x.bfloat16() for n, x in logical.items()} | {"a": G[:, -1].exp().float()}


def folded(records: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the records with T multiplied into Kg and Aqk, and the identity in the place of T."""
    kg, aqk, t = (records[name].double() for name in ("kg", "aqk", "t"))
    one = torch.eye(t.shape[-1], device=t.device).expand_as(t)
    replaced = {"kg": t.mT @ kg, "aqk": aqk @ t, "t": one}
    return records | {name: x.bfloat16() for name, x in replaced.items()}


def sequences(
    B: int, T: int, C: int, lengths: tuple[int, ...] | None, compact: bool = False
) -> tuple[list[tuple[int, int, int, int]], int]:
    """Returns (row of B, first token, length, first slot) of each sequence, and the number of slots of a head.

    ``compact``: whether the slots of packed sequences are compact (`PrefillConfig.compact`)."""
    if lengths is None:
        return [(b, 0, T, b * -(-T // C)) for b in range(B)], layouts.slot_count(B, T, C)
    starts = [0, *accumulate(lengths)]
    if compact:
        *firsts, slots = accumulate((max(1, -(-n // C)) for n in lengths), initial=0)
        return [(0, *at) for at in zip(starts, lengths, firsts, strict=False)], slots
    each = [(0, s, n, s // C + i) for i, (s, n) in enumerate(zip(starts, lengths, strict=False))]
    return each, layouts.slot_count(1, T, C, len(lengths))
