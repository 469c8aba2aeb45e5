"""Records for tests of the chain and of the summary kernel, and the recurrence over them in torch."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from helpers.sm100_launch import Chunk, Workspace, chunks_of
from kda_sm100.config import HEAD_DIM

NAN = float("nan")

#: The chunks of each sequence.
Chunks = list[list[Chunk]]


def make_records(n: int, C: int) -> dict[str, Tensor]:
    """Returns n records of random tokens as matrices by name, rounded like those of the intra-chunk stage.

    Gates decay by up to 6% per token.
    """
    rng = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)
    q, k = (torch.nn.functional.normalize(new(n, C, HEAD_DIM), dim=-1) for _ in range(2))
    v, beta, g = new(n, C, HEAD_DIM), new(n, C).sigmoid(), -0.06 * new(n, C, HEAD_DIM).sigmoid()
    G = g.cumsum(1)
    up, down = G.exp(), (-G).exp()
    L = (k * up @ (k * down).mT).tril(-1) * beta[..., None]
    T = torch.linalg.solve_triangular(torch.eye(C) + L, torch.diag_embed(beta), upper=False)
    qd = q * up * HEAD_DIM**-0.5
    logical = {
        "w": -(T @ (k * up)), "u": T @ v, "qd": qd, "kg": k * (G[:, -1:] - G).exp(), "aqk": (qd @ (k * down).mT).tril(),
    }  # fmt: skip
    return {n: x.bfloat16() for n, x in logical.items()} | {"a": G[:, -1].exp().float()}


def laid_out(
    C: int, HV: int, B: int, T: int, lengths: tuple[int, ...] | None
) -> tuple[dict[str, Tensor], Chunks, Workspace]:
    """Returns random records, the chunks of each sequence, and a workspace with the records.

    In the workspace, slots without a chunk hold NaN.
    """
    N = B if lengths is None else len(lengths)
    flat, slots = chunks_of(B, T, C, lengths)
    starts = [0, *accumulate(lengths or ())]
    sequence_of = lambda c: c.row if lengths is None else max(n for n in range(N) if starts[n] <= c.first)
    chunks = [[c for c in flat if sequence_of(c) == n] for n in range(N)]
    records = make_records(slots * HV, C)
    empty = set(range(slots)) - {c.slot for c in flat}
    unused = [i for slot in empty for i in range(slot * HV, (slot + 1) * HV)]
    for c in flat:  # rows beyond a sequence are zeros
        for name in ("w", "u", "qd", "kg", "aqk"):
            records[name][c.slot * HV : (c.slot + 1) * HV, c.tokens :] = 0
    workspace = Workspace(slots * HV, C, "cpu")
    for name, logical in records.items():
        workspace[name] = logical
    for name in records:
        kept = workspace[name]
        kept[unused] = NAN
        workspace[name] = kept
    return records, chunks, workspace


def recurrence(
    records: dict[str, Tensor],
    chunks: Chunks,
    HV: int,
    shape: tuple[int, ...],
    initial: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns o, the final states, and the state before every chunk, sequence by sequence.

    ``shape``: of o. In fp32 the function also rounds operands to bf16, as the kernel does; in fp64 it rounds nothing.
    """
    rounded = (lambda x: x.bfloat16().to(dtype)) if dtype is torch.float32 else lambda x: x
    o, final, before = torch.full(shape, NAN, dtype=torch.float64), initial.to(dtype, copy=True), []
    for n, own in enumerate(chunks):
        S = initial[n].to(dtype)
        for b, first, tokens, slot in own:
            x = {name: r[slot * HV : (slot + 1) * HV].to(dtype) for name, r in records.items()}
            before.append(S)
            R = x["u"] + x["w"] @ rounded(S)
            O = x["qd"] @ rounded(S) + x["aqk"] @ rounded(R)
            S = x["a"][:, :, None] * S + x["kg"].mT @ rounded(R)
            o[b, first : first + tokens] = O[:, :tokens].movedim(0, 1).double()
        final[n] = S
    return o, final.double(), before
