"""The rounding-exact specification of a chunked KDA prefill, from which tolerances are derived. Plain torch, any device.

`chunk_record` (K1) is the intra-chunk stage for chunks of C tokens, `chain_step` (K2) one step of the chain. Tests compare kernels
with the intermediate values of both::

    G = inclusive cumsum of g, a = e^{G_end}, Kd = k e^G, Qd = scale q e^G, Kg = beta k e^{G_end - G}
    L_ij = k_i . (e^{G_i-G_j} beta_j k_j) (j < i),  Aqk_ij = scale q_i . (e^{G_i-G_j} beta_j k_j) (j <= i)
    T = (I + L)^-1
    R = T (v - Kd S),  O = Qd S + Aqk R,  S <- a S + Kg^T R

beta scales the columns k_j, so that the diagonal of T is exactly 1. With (I + L)^-1 diag(beta) and L_ij = beta_i k_i . k_j, the rounding of
beta to bf16 in T would scale a whole row by one wrong factor.

"bf16" and "fp32" below are value sets: tensors are fp32 with rounded values. A kernel may sum in another order and
use other instructions. It must round no earlier and no coarser than this program, and row i must not depend on rows
after i. On a GPU the fp32 products here need torch's default precision (no TF32).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.testing.oracle import sequence_bounds

F32 = torch.float32
LOG2E = 1.4426950408889634
BLOCK = 16  # rows of a diagonal block
G_FLOOR = -104.0
"""Lower bound of g. e^-104 rounds to 0 in fp32, so the clamp changes no result and keeps -1000 out of the cumsum."""
VOTE_LIMIT = 60.0
"""Column j uses two-sided factors if the maximum of G_first - G_j over channels is below this."""
CHUNKS = (16, 32, 64)  # values of C
SLAB_BYTES = 128 << 20
"""Upper bound of the largest temporary in bytes: the pairwise decays of columns that lost the vote."""


# ---- rounding points


def flush(x: Tensor) -> Tensor:
    """Flushes fp32 subnormals to zero, any shape, as kernels may.

    Only row factors are scaled up again afterwards. With a vote the factor is below 2^87, so a product loses less than 2^-39. At
    the bound of -5 the factor is e^75, so a row loses elements of k and scale*q below 2^-18.
    """
    return torch.where(x.abs() < torch.finfo(F32).tiny, torch.zeros_like(x), x)


def bf16(x: Tensor) -> Tensor:
    """Rounds to nearest even bf16, held in fp32, any shape: an MMA operand, or a value stored in bf16."""
    if (rng := _dither.get()) is not None:
        x = x * (1 + 2.0**-9 * (2 * torch.rand(x.shape, generator=rng) - 1)).to(x.device)
    return flush(x.to(torch.bfloat16).to(F32))


_dither: ContextVar[torch.Generator | None] = ContextVar("dither", default=None)


@contextmanager
def dithered(seed: int) -> Iterator[None]:
    """Within the block, `bf16` adds noise of at most half a unit in the last place before it rounds.

    The result is another rounding of the same algorithm. Values that bf16 holds exactly keep their value.
    """
    token = _dither.set(torch.Generator().manual_seed(seed))
    try:
        yield
    finally:
        _dither.reset(token)


def ex2(x: Tensor) -> Tensor:
    """Returns 2**x in fp32 with subnormal results flushed, any shape."""
    return flush(torch.exp2(x))


def mma(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies [..., m, k] @ [..., k, n] as a tensor core does: bf16 operands, exact products, fp32 accumulators."""
    return bf16(a) @ bf16(b)


def cumsum(g: Tensor) -> Tensor:
    """Returns the inclusive fp32 running sum over rows [..., C, K], one addition for each row, so that G_i depends only on rows
    <= i."""
    rows = [g[..., 0, :]]
    for i in range(1, g.shape[-2]):
        rows.append(rows[-1] + g[..., i, :])
    return torch.stack(rows, -2)


# ---- K1: the intra-chunk stage


class ChunkRecord(NamedTuple):
    """The records of chunks of every head, which K1 writes and K2 reads.

    Attributes:
        Kd, Qd, Kg: [..., HV, C, K], bf16 values.
        v: [..., HV, C, V], the values of the call unchanged (bf16).
        T, Aqk: [..., HV, C, C], bf16 values.
        a: [..., HV, K], fp32.
    """

    Kd: Tensor
    Qd: Tensor
    Kg: Tensor
    v: Tensor
    T: Tensor
    Aqk: Tensor
    a: Tensor


def activate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool]:
    """Computes the elementwise stage in fp32 on the tensors of a call of `kda_core.chunk_kda`.

    Returns:
        q, k [B, T, HV, K] and v [B, T, HV, V] in bf16, g [B, T, HV, K] in base 2 and at least G_FLOOR*LOG2E, beta
        [B, T, HV] fp32, and whether the gates are bounded by -5, so that no row needs a vote.
    """
    HV, repeat = v.shape[2], v.shape[2] // q.shape[2]
    q, k, v, g, beta = (x.to(F32) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:  # the normalised row is stored in bf16
        q, k = (bf16(x * (1 / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6))) for x in (q, k))
    if use_gate_in_kernel:
        x = g if dt_bias is None else g + dt_bias.to(F32).reshape(HV, -1)
        rate = 1.0 if A_log is None else torch.exp2(A_log.to(F32) * LOG2E).reshape(HV, 1)
        if lower_bound is not None:
            g = lower_bound * torch.sigmoid(rate * x)
        else:
            g = -rate * torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))
    if use_beta_sigmoid_in_kernel:
        beta = (2.0 if allow_neg_eigval else 1.0) * torch.sigmoid(beta)
    q, k = (x.repeat_interleave(repeat, dim=2) for x in (q, k))
    bounded = lower_bound is not None and lower_bound >= -5 if use_gate_in_kernel else safe_gate
    return q, k, v, g.clamp(min=G_FLOOR) * LOG2E, beta, bounded


def pairs(x: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """Returns sum_c x_ic k_jc 2^{G_ic - G_jc} for j <= i, pair by pair in fp32: [..., n, K] -> [..., n, n]. No exponent exceeds
    0."""
    decay = ex2((G.unsqueeze(-2) - G.unsqueeze(-3)).clamp(max=0))
    return (x.unsqueeze(-2) * k.unsqueeze(-3) * decay).sum(-1)


def invert(L: Tensor) -> Tensor:
    """Returns (I + L)^-1 of a strictly lower triangular fp32 L [..., C, C].

    Forward substitution inverts the 16x16 diagonal blocks. The inverse is then assembled from pairs of neighbours,
    X_21 = -X_22 (L_21 X_11), whose size doubles each time. All in fp32; a kernel may use three bf16 or TF32 products for each of
    these products.
    """
    C = L.shape[-1]
    X = torch.eye(C, dtype=F32, device=L.device).expand(L.shape).clone()
    for s in range(0, C, BLOCK):
        for i in range(s + 1, s + BLOCK):
            X[..., i, s:i] = -(L[..., i : i + 1, s:i] @ X[..., s:i, s:i]).squeeze(-2)
    size = BLOCK
    while size < C:
        for s in range(0, C, 2 * size):
            up, low = slice(s, s + size), slice(s + size, s + 2 * size)
            X[..., low, up] = -(X[..., low, low] @ (L[..., low, up] @ X[..., up, up]))
        size *= 2
    return X


def chunk_record(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, bounded: bool
) -> ChunkRecord:
    """Computes K1 for chunks of every head.

    The anchor of a block of 16 rows is its first row, A = G[first]. With a later row as the anchor, later gates would change the
    rounding of earlier outputs. Each element needs two exps, the row factor 2^{G_i-A} <= 1 and the column factor 2^{A-G_j} >= 1.
    Multipliers for each channel then carry the columns of a block from anchor to anchor to the end of the chunk, so every exponent
    below the diagonal blocks is <= 0.

    Args:
        q, k, g: [..., HV, C, K]. v: [..., HV, C, V]. beta: [..., HV, C]. All as `activate` returns them, with zero rows beyond the
            end of the sequence. C is 16, 32 or 64.
        bounded: whether every gate is at least -5, so no column needs a vote.
    """
    C, G = q.shape[-2], cumsum(g)
    blocks = [slice(s, s + BLOCK) for s in range(0, C, BLOCK)]
    anchors = [G[..., s.start, :].unsqueeze(-2) for s in blocks]
    anchors.append(G[..., -1:, :])  # the end of the chunk
    L = q.new_zeros(*q.shape[:-1], C)
    Aqk, Kd, Qd = torch.zeros_like(L), torch.zeros_like(q), torch.zeros_like(q)
    columns: list[
        Tensor
    ] = []  # fp32 beta_j k_j 2^{A - G_j} of earlier blocks, A the anchor of the current block

    for b, s in enumerate(blocks):
        A, A_next, Gb, kb, qb = anchors[b], anchors[b + 1], G[..., s, :], k[..., s, :], q[..., s, :] * scale
        reach = (A - Gb).amax(-1, keepdim=True)  # [..., HV, 16, 1]; for column j from rows up to j only
        vote = torch.full_like(reach, True, dtype=torch.bool) if bounded else reach < VOTE_LIMIT * LOG2E
        k_row, q_row = kb * ex2(Gb - A), qb * ex2(Gb - A)
        k_col = torch.where(vote, kb * ex2(torch.where(vote, A - Gb, 0.0)), 0.0)
        Kd[..., s, :], Qd[..., s, :] = k_row * ex2(A), q_row * ex2(A)
        L[..., s, s], Aqk[..., s, s] = mma(k_row, k_col.mT), mma(q_row, k_col.mT)
        if not vote.all():  # columns that lost the vote use exact pairs, without a factor above 1
            L[..., s, s] = torch.where(vote.mT, L[..., s, s], pairs(kb, kb, Gb))
            Aqk[..., s, s] = torch.where(vote.mT, Aqk[..., s, s], pairs(qb, kb, Gb))
        L[..., s, s] *= beta[..., s].unsqueeze(-2)
        Aqk[..., s, s] *= beta[..., s].unsqueeze(-2)
        for col, c in zip(columns, blocks):
            L[..., s, c], Aqk[..., s, c] = mma(k_row, col.mT), mma(q_row, col.mT)
        hop = ex2(A_next - A)
        arrived = k_col * hop
        if not bounded:  # columns of a steep block start from a new exp; only later rows and K2 read them
            steep = (A - A_next).amax(-1, keepdim=True) >= VOTE_LIMIT * LOG2E
            arrived = torch.where(steep, kb * ex2(A_next - Gb), arrived)
        columns = [col * hop for col in columns] + [arrived * beta[..., s].unsqueeze(-1)]

    # If beta is near 2 and one key repeats, |1 - beta|k|^2| is about 1. Nothing then damps the rounding errors of T, Kd and S,
    # which can grow exponentially from chunk to chunk for every C: bf16 operands are not accurate enough for such inputs.
    T = bf16(invert(torch.tril(L, -1)))
    a = ex2(anchors[-1]).squeeze(-2)
    return ChunkRecord(bf16(Kd), bf16(Qd), bf16(torch.cat(columns, -2)), v, T, bf16(torch.tril(Aqk)), a)


# ---- K2: the chain


def chunk_residual(S: Tensor, x: ChunkRecord) -> Tensor:
    """Returns R = T (v - Kd S) [..., HV, C, V] in fp32, from the state S [..., HV, K, V] before the chunk."""
    return mma(x.T, x.v - mma(x.Kd, S))


def chain_step(S: Tensor, x: ChunkRecord) -> tuple[Tensor, Tensor]:
    """Computes one step of the chain. S, v - Kd S and R are rounded only as MMA operands; S itself stays fp32. The two products of o
    share one accumulator.

    Args:
        S: [..., HV, K, V], fp32.

    Returns:
        o [..., HV, C, V] (bf16 values), and the next S.
    """
    R = chunk_residual(S, x)
    o = mma(x.Qd, S) + mma(x.Aqk, R)
    return bf16(o), x.a.unsqueeze(-1) * S + mma(x.Kg.mT, R)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    C: int,
    chunk_size: int = 64,
    pin: bool = False,
    **gates: Any,
) -> tuple[Tensor, ...]:
    """Computes ``chunk_kda(...)`` with chunks of C = 16, 32 or 64 tokens and the rounding points of this module.

    Arguments are those of `kda_core.testing.token_oracle`; `gates` are the options of `activate`. With
    `return_intermediate_states` C divides `chunk_size`.

    Returns:
        o [B, T, HV, V] (bf16 values), final states [N, HV, K, V] fp32 (or [N, HV, V, K]), and with
        `return_intermediate_states` h [B, NT, HV, K, V] (bf16 values; or [.., V, K]); all held in fp32.
    """
    bounds = sequence_bounds(q, cu_seqlens, cu_seqlens_cpu)
    (B, T), K, (HV, V) = q.shape[:2], q.shape[3], v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    q, k, v, g, beta, bounded = activate(q, k, v, g, beta, **gates)
    flat = [x.flatten(0, 1) for x in (q, k, v, g, beta)]

    # Step c of the chain: the sequences that have a chunk c, longest first.
    counts = [-(-(end - first) // C) for first, end in bounds]
    order = sorted(range(len(bounds)), key=lambda n: -counts[n])
    steps = [[n for n in order if counts[n] > c] for c in range(max(counts, default=0))]
    first = torch.tensor([s for s, _ in bounds], device=q.device)
    end = torch.tensor([e for _, e in bounds], device=q.device)

    def records_of(group: range) -> ChunkRecord:
        """Returns the records [chunks, HV, ...] of the chunks of these steps, one step after the other."""
        n = torch.tensor([n for c in group for n in steps[c]], device=q.device)
        c = torch.tensor([c for c in group for _ in steps[c]], device=q.device)
        at = (first[n] + c * C).unsqueeze(1) + torch.arange(C, device=q.device)
        keep = at < end[n].unsqueeze(1)  # [chunks, C]
        rows = [x[torch.where(keep, at, 0)] for x in flat]
        rows = [
            torch.where(keep.view(*keep.shape, *[1] * (x.dim() - 2)), x, 0.0).transpose(1, 2) for x in rows
        ]
        return chunk_record(rows[0], rows[1], rows[2], rows[3], rows[4], scale, bounded)

    S = torch.zeros(len(bounds), HV, K, V, device=q.device)
    if initial_state is not None:
        S = (initial_state.mT if state_v_first else initial_state).to(F32)[order].contiguous()
    o = torch.zeros(B * T, HV, V, device=q.device)
    saved: dict[tuple[int, int], Tensor] = {}
    for group in _groups(steps, max(1, SLAB_BYTES // (4 * HV * BLOCK * BLOCK * K))):
        records, at = records_of(group), 0
        for c in group:
            live = len(steps[c])
            if return_intermediate_states and c * C % chunk_size == 0:
                saved.update({(n, c * C): S[i] for i, n in enumerate(steps[c])})
            rows, moved = chain_step(S[:live], ChunkRecord(*(x[at : at + live] for x in records)))
            S = torch.cat([moved, S[live:]])
            for i, n in enumerate(steps[c]):
                s = bounds[n][0] + c * C
                size = min(C, bounds[n][1] - s)
                o[s : s + size] = rows[i, :, :size].transpose(0, 1)
            at += live
    states = S[torch.tensor(order, device=q.device).argsort()]
    layout = (lambda x: x.mT.contiguous()) if state_v_first else (lambda x: x)
    if not return_intermediate_states:
        return o.view(B, T, HV, V), layout(states)
    starts = [saved[n, t] for n, (s, e) in enumerate(bounds) for t in range(0, e - s, chunk_size)]
    h = torch.stack(starts).unflatten(0, (B, -1)) if starts else S.new_zeros((B, 0, HV, K, V))
    return o.view(B, T, HV, V), layout(states), layout(bf16(h))


def _groups(steps: list[list[int]], limit: int) -> list[range]:
    """Returns groups of consecutive steps. A group has at most `limit` chunks, unless a single step has more."""
    ends = list(accumulate(len(s) for s in steps))
    groups, start = [], 0
    while start < len(steps):
        base = ends[start - 1] if start else 0
        stop = start + 1
        while stop < len(steps) and ends[stop] - base <= limit:
            stop += 1
        groups.append(range(start, stop))
        start = stop
    return groups
