"""The rounding-exact specification of a chunked KDA backward, from which the tolerances of gradients are derived. Plain torch, any
device.

The forward and its records (Kd, Qd, Kg, T, Aqk, a) are those of `kda_core.testing.specification`, with q = scale * normalised q, k
normalised, b = beta k, and G the inclusive cumulative sum of g in a chunk. From dO and dS', the gradient of the state behind the
chunk::

    reverse chain      Y = Aqk^T dO + Kg dS',  dX = T^T Y (= dv),  dS = a dS' + Qd^T dO - Kd^T dX
    across chunks      dQd = dO S^T,  dKd = -dX S^T,  dKg = R dS'^T
    within a chunk     Dq = tril(dO R^T),  Dk = -stril(dX R^T): the gradients of Aqk and L
    rows               uq_i = sum_j Dq_ij e^{G_i-G_j} b_j + e^{G_i} dQd_i,  dq = scale uq
                       uk_i = sum_j Dk_ij e^{G_i-G_j} b_j + e^{G_i} dKd_i
    columns            ub_j = sum_i e^{G_i-G_j} (Dq_ij q_i + Dk_ij k_i) + e^{G_end-G_j} dKg_j
                       dk = uk + beta ub,  dbeta = k . ub
    decay              dg_t = a sum_v S dS' + sum_{j<t} Kg_j dKg_j + sum_{i>=t} (Qd_i dQd_i + Kd_i dKd_i)
                              + the pairs (i, j) with i >= t > j

The derivatives of the l2norm, of the sigmoid of beta and of the gate follow element by element.

The pairs of dg are a suffix sum over i >= t of row i's products minus column i's products. All pairs inside the suffix must cancel
in it. They do if both sides multiply with the same rounded factors r_i = x_i 2^{G_i-A} and c_j = b_j 2^{A-G_j}, which are the
operands of the products with Dq and Dk. Anchors A are integers, so a factor has the same significand for every anchor, and an anchor
that depends on later rows changes no bit of earlier ones.

"bf16" and "fp32" are value sets, as in `kda_core.testing.specification`. bf16 are the operands of all products, S, R and dS'
as the gradients read them, and dq, dk and dv. All else is fp32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.testing import specification
from kda_core.testing.oracle import sequence_bounds
from kda_core.testing.specification import BLOCK, ChunkRecord, chunk_record, chunk_residual, cumsum, mma

SPAN = 120.0
"""Bits: rows of a diagonal block within this range of its first row share one anchor, so no exponent exceeds 61."""
LARGEST = 64.0
"""Exponents are clamped here. Only factors that a zero of Dq and Dk removes reach it."""
WIDE = (torch.float32, torch.float64)
GATES = (
    "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate",
    "lower_bound", "A_log", "dt_bias",
)  # fmt: skip


def ex2(x: Tensor) -> Tensor:
    """Returns 2**x with subnormal results flushed, any shape. The significand depends on the fraction of x alone."""
    whole = x.floor()
    return specification.flush(torch.ldexp(torch.exp2(x - whole), whole.clamp(min=-300)))


def suffix_sum(x: Tensor) -> Tensor:
    """Returns the inclusive running sum over rows [..., C, K] from the last row on, one addition for each row."""
    return cumsum(x.flip(-2)).flip(-2)


# ---- the chains


class Chained(NamedTuple):
    """What both chains hand over to the gradients of a chunk; bf16 values.

    Attributes:
        S, dS: [chunks, HV, K, V], the state before each chunk, and the gradient of the state behind it.
        R, dX: [chunks, HV, C, V], the residuals and their gradients; dX is dv.
    """

    S: Tensor
    dS: Tensor
    R: Tensor
    dX: Tensor


def forward_chain(records: ChunkRecord, S: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the fp32 state before each chunk, and R, from the state S [HV, K, V] before the first."""
    states, residuals = [], []
    for x in (ChunkRecord(*parts) for parts in zip(*records)):
        states.append(S)
        residuals.append(chunk_residual(S, x))
        S = x.a.unsqueeze(-1) * S + mma(x.Kg.mT, residuals[-1])
    return torch.stack(states), torch.stack(residuals)


def reverse_chain(records: ChunkRecord, grad_o: Tensor, dS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the fp32 gradient of the state behind each chunk, dX, and the gradient of the state before the first chunk, from the
    gradient dS [HV, K, V] of the state behind the last. It needs neither S nor v."""
    behind, found = [], []
    for *parts, dO in reversed([*zip(*records, grad_o)]):
        x = ChunkRecord(*parts)
        behind.append(dS)
        Y = mma(x.Aqk.mT, dO) + mma(x.Kg, dS)
        dX = mma(x.T.mT, Y)
        found.append(dX)
        dS = x.a.unsqueeze(-1) * dS + mma(x.Qd.mT, dO) - mma(x.Kd.mT, dX)
    return torch.stack(behind[::-1]), torch.stack(found[::-1]), dS


# ---- the gradients of a chunk


class Products(NamedTuple):
    """Sums over pairs of rows and columns, [..., rows, K] and [..., columns, K].

    Attributes:
        uq, uk: parts of the gradients of the rows.
        ub: part of the gradients of the columns.
        of_rows, of_columns: what rows and columns add to the suffix sum of dg.
    """

    uq: Tensor
    uk: Tensor
    ub: Tensor
    of_rows: Tensor
    of_columns: Tensor

    def plus(self, other: Products) -> Products:
        return Products(*(x + y for x, y in zip(self, other)))


def pair_products(
    Dq: Tensor, Dk: Tensor, q: Tensor, k: Tensor, b: Tensor, G_rows: Tensor, G_columns: Tensor, A: Tensor
) -> Products:
    """Computes the products of rows (q, k at G_rows) [..., rows, K] and columns (b at G_columns) [..., columns, K], with the weights
    Dq and Dk [..., rows, columns], which are bf16 values, and the anchor A, which is broadcast."""
    bf16 = specification.bf16
    E, F = ex2((G_rows - A).clamp(max=LARGEST)), ex2((A - G_columns).clamp(max=LARGEST))
    r_q, r_k, c = bf16(q * E), bf16(k * E), bf16(b * F)
    U_q, U_k, W = Dq @ c, Dk @ c, Dq.mT @ r_q + Dk.mT @ r_k
    return Products(E * U_q, E * U_k, F * W, r_q * U_q + r_k * U_k, -c * W)


def diagonal_products(Dq: Tensor, Dk: Tensor, q: Tensor, k: Tensor, b: Tensor, G: Tensor) -> Products:
    """Computes the products of blocks [..., BLOCK, K] with themselves; Dq is lower and Dk strictly lower triangular.

    Rows within `SPAN` of the first row share an anchor in the middle of their range, channel by channel. Products of Dq and Dk with
    the factors then neither overflow nor underflow for small or large dO. The other rows are computed by halving the block: the
    anchor of rows in an upper half and columns in a lower half is between them. The product of such a row with itself adds nothing
    to dg.
    """
    first = G[..., :1, :]
    near = (first - G).amax(-1, keepdim=True) <= SPAN  # a row looks at rows up to itself alone
    A = ((first + torch.where(near, G, math.inf).amin(-2, keepdim=True)) / 2).round()
    found = pair_products(Dq * near, Dk * near, q, k, b, G, G, A)
    if near.all():
        return found
    itself = torch.diagonal(Dq * ~near, dim1=-2, dim2=-1).unsqueeze(-1)
    found = found._replace(uq=found.uq + itself * b, ub=found.ub + itself * q)
    i, size = torch.arange(BLOCK, device=G.device), BLOCK // 2
    while size:
        pair, upper = i // (2 * size), i % (2 * size) >= size
        A = G[..., pair * 2 * size + size, :].ceil()
        rows = upper.unsqueeze(-1)
        chosen = rows & ~upper & (pair.unsqueeze(-1) == pair) & ~near
        at = (torch.where(rows, G, A), torch.where(rows, A, G), A)
        found = found.plus(pair_products(Dq * chosen, Dk * chosen, q, k, b, *at))
        size //= 2
    return found


class ChunkGradients(NamedTuple):
    """uq, the gradient of the scaled q; uk and ub, of k as rows and of b; and dg, of the natural log decay: [chunks, HV, C, K]."""

    uq: Tensor
    uk: Tensor
    ub: Tensor
    dg: Tensor


def chunk_gradients(q: Tensor, k: Tensor, b: Tensor, g: Tensor, grad_o: Tensor, x: Chained) -> ChunkGradients:
    """Computes the gradients of chunks of every head.

    Args:
        q, k, b, g: [chunks, HV, C, K]; q scaled, b = beta k, g in base 2 as `activate` returns it.
        grad_o: [chunks, HV, C, V].
    """
    bf16, C, G = specification.bf16, q.shape[-2], cumsum(g)
    Dq, Dk = bf16(torch.tril(mma(grad_o, x.R.mT))), bf16(-torch.tril(mma(x.dX, x.R.mT), -1))
    blocks = [slice(s, s + BLOCK) for s in range(0, C, BLOCK)]
    weights = (torch.stack([D[..., rows, rows] for rows in blocks], -3) for D in (Dq, Dk))
    found = diagonal_products(*weights, *(y.unflatten(-2, (-1, BLOCK)) for y in (q, k, b, G)))
    uq, uk, ub, of_rows, of_columns = (y.flatten(-3, -2) for y in found)
    difference = of_rows + of_columns
    for rows in blocks[1:]:  # and all columns before them, with the anchor between both
        columns, A = slice(0, rows.start), G[..., rows.start, :].unsqueeze(-2).ceil()
        at = (q[..., rows, :], k[..., rows, :], b[..., columns, :], G[..., rows, :], G[..., columns, :], A)
        part = pair_products(Dq[..., rows, columns], Dk[..., rows, columns], *at)
        uq[..., rows, :] += part.uq
        uk[..., rows, :] += part.uk
        ub[..., columns, :] += part.ub
        difference[..., rows, :] += part.of_rows
        difference[..., columns, :] += part.of_columns

    grown, left = ex2(G), ex2(G[..., -1:, :] - G)
    dQd, dKd, dKg = mma(grad_o, x.S.mT), -mma(x.dX, x.S.mT), mma(x.R, x.dS.mT)
    uq, uk, ub = uq + grown * dQd, uk + grown * dKd, ub + left * dKg
    difference = difference + q * grown * dQd + k * grown * dKd
    ends = cumsum(b * left * dKg)
    earlier = torch.cat([torch.zeros_like(ends[..., :1, :]), ends[..., :-1, :]], -2)
    through = (ex2(G[..., -1, :]) * specification.flush((x.S * x.dS).sum(-1))).unsqueeze(-2)
    return ChunkGradients(uq, uk, ub, suffix_sum(difference) + earlier + through)


# ---- the whole backward


def backward(
    x: dict[str, Any], grad_o: Tensor | None, grad_final_state: Tensor | None, C: int
) -> dict[str, Tensor]:
    """Computes the gradients of sum(o * grad_o) + sum(final_state * grad_final_state) with chunks of C = 16, 32 or 64 tokens and the
    rounding points of this module.

    Args:
        x: arguments of `kda_core.chunk_kda`.
        grad_o: [B, T, HV, V], or None for zeros.
        grad_final_state: like the final states, or None for zeros.

    Returns:
        A gradient for each floating-point tensor of `x`, with its shape, held in fp32. Rows of tokens outside of every sequence are
        zero.
    """
    bf16, F32 = specification.bf16, specification.F32
    (B, T, H, K), (HV, V) = x["q"].shape, x["v"].shape[2:]
    scale = K**-0.5 if x.get("scale") is None else x["scale"]
    v_first = x.get("state_v_first", False)
    q, k, v, g, beta, bounded = specification.activate(
        *(x[n] for n in ("q", "k", "v", "g", "beta")), **{n: x[n] for n in GATES if n in x}
    )
    dO = torch.zeros_like(v) if grad_o is None else grad_o.to(F32)
    flat = [y.flatten(0, 1) for y in (q, k, v, g, beta, dO)]
    bounds = sequence_bounds(x["q"], x.get("cu_seqlens"), x.get("cu_seqlens_cpu"))

    def states(given: Tensor | None) -> Tensor:
        """Returns states of the call as [N, HV, K, V]."""
        if given is None:
            return v.new_zeros(len(bounds), HV, K, V)
        return (given.mT if v_first else given).to(F32)

    S_in, dS_out = states(x.get("initial_state")), states(grad_final_state)
    dS_in = dS_out.clone()
    dq, dk, dv, dg = (torch.zeros_like(y) for y in flat[:4])
    dbeta = torch.zeros_like(flat[4])
    for n, (first, end) in enumerate(bounds):
        if first == end:
            continue
        rows = [_chunks(y[first:end], C) for y in flat]
        records = chunk_record(rows[0], rows[1], rows[2], rows[3], rows[4], scale, bounded)
        S, R = forward_chain(records, S_in[n])
        dS, dX, dS_in[n] = reverse_chain(records, rows[5], dS_out[n])
        chained = Chained(*(bf16(y) for y in (S, dS, R, dX)))
        step = rows[4].unsqueeze(-1)
        found = chunk_gradients(rows[0] * scale, rows[1], step * rows[1], rows[3], rows[5], chained)
        tokens = lambda y, first=first, end=end: y.transpose(1, 2).flatten(0, 1)[: end - first]
        dq[first:end], dk[first:end] = tokens(scale * found.uq), tokens(found.uk + step * found.ub)
        dv[first:end], dg[first:end] = tokens(chained.dX), tokens(found.dg)
        dbeta[first:end] = tokens((rows[1] * found.ub).sum(-1))

    gradients = {
        n: y.unflatten(0, (B, T)) for n, y in zip(("q", "k", "v", "g", "beta"), (dq, dk, dv, dg, dbeta))
    }
    for name in ("q", "k"):  # the value heads of a group in a fixed order
        d = gradients[name].unflatten(2, (H, HV // H)).unbind(3)
        gradients[name] = sum(d[1:], start=d[0])
        if x.get("use_qk_l2norm_in_kernel"):
            gradients[name] = through_l2norm(gradients[name], x[name].to(F32))
    if x.get("use_beta_sigmoid_in_kernel"):
        gradients["beta"] = through_sigmoid(
            gradients["beta"], beta, 2.0 if x.get("allow_neg_eigval") else 1.0
        )
    if x.get("use_gate_in_kernel"):
        gradients |= through_gate(gradients["g"], x)
    for name in ("q", "k", "v", "g", "beta"):
        if name in ("q", "k", "v") or x[name].dtype not in WIDE:
            gradients[name] = bf16(gradients[name])
    if x.get("initial_state") is not None:
        gradients["initial_state"] = dS_in.mT if v_first else dS_in
    return gradients


def _chunks(x: Tensor, C: int) -> Tensor:
    """Returns rows [n, HV, ...] of a sequence as chunks [chunks, HV, C, ...], with zero rows behind its end."""
    padding = x.new_zeros(-len(x) % C, *x.shape[1:])
    return torch.cat([x, padding]).unflatten(0, (-1, C)).transpose(1, 2)


# ---- the derivatives of the elementwise stage


def through_l2norm(d: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of the fp32 rows x [..., K] from that of the normalised rows. It uses x / |x| before its rounding."""
    rstd = 1 / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    unit = x * rstd
    return rstd * (d - unit * (unit * d).sum(-1, keepdim=True))


def through_sigmoid(d: Tensor, beta: Tensor, top: float) -> Tensor:
    """Returns the gradient of the logits of beta = top * sigmoid(logits), any shape."""
    return d * beta * (1 - beta / top)


def through_gate(d: Tensor, x: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the gradients of g [B, T, HV, K], A_log and dt_bias from that of the log decay, as far as `x` has them."""
    F32 = specification.F32
    A_log, dt_bias, bound, HV = x.get("A_log"), x.get("dt_bias"), x.get("lower_bound"), d.shape[2]
    at = x["g"].to(F32)
    if dt_bias is not None:
        at = at + dt_bias.to(F32).reshape(HV, -1)
    rate = torch.ones((), dtype=F32, device=d.device) if A_log is None else A_log.to(F32).exp().reshape(HV, 1)
    if bound is not None:
        s = torch.sigmoid(rate * at)
        inner = d * bound * s * (1 - s)
        found, of_rate = inner * rate, inner * rate * at
    else:
        found = -d * rate * torch.where(at > 20, 1.0, torch.sigmoid(at))
        of_rate = -d * rate * torch.where(at > 20, at, torch.log1p(torch.exp(at.clamp(max=20))))
    gradients = {"g": found}
    if A_log is not None:
        gradients["A_log"] = of_rate.sum((0, 1, 3)).reshape(A_log.shape)
    if dt_bias is not None:
        gradients["dt_bias"] = found.sum((0, 1)).reshape(dt_bias.shape)
    return gradients
