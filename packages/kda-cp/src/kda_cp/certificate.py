"""Certified decay: proves on the device, per segment and value head, that the exit state does not depend on the initial one.

A segment with exit state B (from zeros), transition M and true initial state S maps S to ``M S + B``. The first term may be left
out if ``||M S||_F <= 2^-24 ||B||_F``, the rounding of fp32. That holds under three conditions:

- Every factor of M, ``(I - beta k k^T) Diag(e^g)``, has norm at most 1: 0 <= beta |k|^2 <= 2 and g <= 0, checked for every
  token of the segment. Then ``||M||_2 <= ||M_tail||_F``, where M_tail is the product of the factors of the last `TAIL`
  tokens. M_tail is computed in fp64, because a product of bf16 operands would not be a bound.
- The first condition also holds for all earlier segments of the sequence. Then ``||S||_F <= s``, the sum of their ``||B||_F``,
  in which B of the first segment is its true exit state.
- ``m max(s, ||B||_F) <= 2^-24 ||B||_F < inf``, where m is ``||M_tail||_F + SLACK``. So nothing is certified if s is more than
  2^12 times ``||B||_F``.

Sums of g alone prove nothing: see ``docs/context-parallel.md``. The backend computes the exact transition of every (segment,
head) pair that is not certified, in the same call; segments shorter than `TAIL` are never certified. The host does not learn how
many pairs these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_core.contract import KdaInputs, ProblemShape
from kda_core.gates import log_decay, step_size
from kda_cp.segments import Caller, Segment, index_dtype
from kda_cp.summary import transitions_from
from kda_cp.upload import upload

TAIL = 512  # last tokens of a segment, whose transition M_tail is computed
BLOCK = 16  # tokens of a block of the tail
FLOOR = -40.0  # lower limit of log decays in the tail, so that e^(BLOCK |FLOOR|) is finite in fp64
SLACK = 2.0**-36  # more than TAIL e^FLOOR plus the rounding of fp64 over TAIL tokens
TAILS = 256  # tails, one per (segment, value head), that are computed at a time; each takes about 5 MB
THRESHOLD = 2.0**-24  # the rounding of fp32
LONGEST_STEP = 2 * (1 - 2.0**-18)  # limit of beta |k|^2: 2 less a margin for the rounding of fp32


def transitions(
    inputs: KdaInputs, segments: Sequence[Segment], exits: Sequence[Sequence[Tensor]], o: Tensor, call: Caller
) -> Tensor:
    """Returns the transitions [n, HV, K, K] of n segments: zero where `certified`, else computed by the backend.

    Args:
        inputs: inputs of the whole call.
        segments: segments that are neither the first nor the last of their sequence.
        exits: for each sequence the exit states of its segments but the last, [HV, K, V]: of the first segment from its
            true initial state, of the others from zeros.
        o: [B, T, HV, V], scratch memory. The first tokens are overwritten.
        call: calls the backend.
    """
    vanished = certified(inputs, segments, exits)
    M = _remaining(inputs, segments, vanished, o, call)
    return torch.where(vanished[:, :, None, None], 0.0, M)


def certified(inputs: KdaInputs, segments: Sequence[Segment], exits: Sequence[Sequence[Tensor]]) -> Tensor:
    """Returns [n, HV] bool: whether the transition of each segment and head may be left out.

    Arguments as in `transitions`.
    """
    HV, device = inputs.shape.HV, inputs.q.device
    long = [p for p in segments if p.length >= TAIL]
    if not long:
        return torch.zeros(len(segments), HV, dtype=torch.bool, device=device)
    tail = dict(zip(long, _tail_norms(inputs, long)))
    expands = _expanding(inputs)
    expanding = {p: expands[p.start : p.start + p.length].any(0) for p in segments}
    unbounded = torch.full((HV,), torch.inf, dtype=torch.float64, device=device)
    found: dict[Segment, Tensor] = {}
    for n, states in enumerate(exits):
        inner = sorted((p for p in segments if p.sequence == n), key=lambda p: p.start)
        if not inner:
            continue
        # [P - 1, HV] for a sequence of P segments.
        b = torch.stack([B.flatten(1).norm(dim=1, dtype=torch.float64) for B in states])
        before = b.cumsum(0)[:-1]
        sound = torch.stack([expanding[p] for p in inner]).cumsum(0) == 0
        m = torch.stack([tail.get(p, unbounded) for p in inner])
        holds = sound & b[1:].isfinite() & (m * torch.maximum(before, b[1:]) <= THRESHOLD * b[1:])
        found |= zip(inner, holds)
    return torch.stack([found[p] for p in segments])


def _tail_norms(inputs: KdaInputs, segments: Sequence[Segment]) -> Tensor:
    """Returns an upper bound [n, HV] of ||M_tail||_2 of segments of at least `TAIL` tokens.

    Requires that the factors have norm at most 1. For a block of tokens, the WY form (`kda_core.reference`) gives, with G
    the inclusive cumulative sum of g in the block::

        M = Diag(e^G_end) - (k e^{G_end - G})^T (I + L)^-1 diag(beta) k e^G
        L_ij = beta_i sum_c k_ic e^{G_ic - G_mid,c} k_jc e^{G_mid,c - G_jc}  (j < i)

    Log decays are raised to `FLOOR` so that no exponent overflows. That moves M_tail by at most ``TAIL e^FLOOR``.
    """
    count = max(1, TAILS // inputs.shape.HV)
    groups = [segments[i : i + count] for i in range(0, len(segments), count)]
    return torch.cat([_tails(inputs, group) for group in groups]).flatten(2).norm(dim=2) + SLACK


def _tails(inputs: KdaInputs, segments: Sequence[Segment]) -> Tensor:
    """Returns M_tail [n, HV, K, K] in fp64; names as in the formulas of `_tail_norms`."""
    s = inputs.shape
    first = upload((p.start + p.length - TAIL for p in segments), torch.int64, inputs.q.device).device
    tokens = first.unsqueeze(1) + torch.arange(TAIL, device=first.device)

    def blocks(x: Tensor) -> Tensor:
        """Returns x [n, TAIL, HV, ...] as [n * HV, blocks, BLOCK, ...]."""
        return x.transpose(1, 2).reshape(len(segments) * s.HV, TAIL // BLOCK, BLOCK, -1)

    k = inputs.k.flatten(0, 1)[tokens].double()
    if inputs.options.use_qk_l2norm_in_kernel:
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    k = blocks(k.repeat_interleave(s.HV // s.H, dim=2))
    g = _log_decay(inputs.g.flatten(0, 1)[tokens].double(), inputs, slice(None))
    beta = blocks(step_size(inputs.beta.flatten(0, 1)[tokens].double(), inputs.options))

    G = blocks(g.clamp(min=FLOOR)).cumsum(2)
    mid, end = G[:, :, BLOCK // 2, None], G[:, :, -1, None]
    L = beta * ((k * (G - mid).exp()) @ (k * (mid - G).exp()).mT).tril(-1)
    w = torch.linalg.solve_triangular(L, beta * k * G.exp(), upper=False, unitriangular=True)
    out, decay = (k * (end - G).exp()).mT, end.exp().mT
    M = torch.eye(s.K, dtype=torch.float64, device=k.device).expand(len(k), -1, -1)
    for c in range(TAIL // BLOCK):
        M = torch.baddbmm(decay[:, c] * M, out[:, c], w[:, c] @ M, alpha=-1)
    return M.view(len(segments), s.HV, s.K, s.K)


def _expanding(inputs: KdaInputs) -> Tensor:
    """Returns [B*T, HV] bool: whether the factor of a token may have a norm above 1, or contains a NaN."""
    s, options = inputs.shape, inputs.options
    size = inputs.k.flatten(0, 1).float().square().sum(-1)  # [B*T, H]
    if options.use_qk_l2norm_in_kernel:
        size = size / (size + 1e-6)
    beta = step_size(inputs.beta.flatten(0, 1).float(), options)
    step = beta * size.repeat_interleave(s.HV // s.H, dim=1)
    shrinks = (step >= 0) & (step <= LONGEST_STEP)
    if not options.use_gate_in_kernel:  # the formulas of the gate never give a log decay above 0
        shrinks &= (inputs.g.flatten(0, 1) <= 0).all(-1)
    return ~shrinks


def _log_decay(g: Tensor, inputs: KdaInputs, head: Tensor | slice) -> Tensor:
    """Returns the log decays [..., n, K] of gates g [..., n, K] as the caller passed them.

    `head`: the value heads of the n rows.
    """
    A_log, dt_bias = inputs.A_log, inputs.dt_bias
    return log_decay(
        g,
        None if A_log is None else A_log[head].unsqueeze(-1),
        None if dt_bias is None else dt_bias.view(inputs.shape.HV, -1)[head],
        inputs.options,
    )


# ---- transitions that are not certified


def per_head_shape(shape: ProblemShape, segments: Sequence[Segment]) -> ProblemShape:
    """Returns the shape of the largest call of `_remaining`: one sequence per (segment, value head) pair, H = HV = 1."""
    graph = shape.device_type != "cpu"
    n, T = len(segments) * shape.HV, sum(p.length for p in segments) * shape.HV
    options = replace(
        shape.options, output_final_state=True, return_intermediate_states=False, state_v_first=False,
        needs_backward=False, use_gate_in_kernel=False, lower_bound=None, safe_gate=shape.options.bounded_gate,
        use_graph=graph, max_num_seqs=n if graph else None,
    )  # fmt: skip
    return replace(
        shape, B=1, T=T, H=1, HV=1, N=n, g_dtype=shape.state_dtype, index_dtype=index_dtype(T), has_A_log=False,
        has_dt_bias=False, has_initial_state=True, options=options,
    )  # fmt: skip


def _remaining(
    inputs: KdaInputs, segments: Sequence[Segment], vanished: Tensor, o: Tensor, call: Caller
) -> Tensor:
    """Returns the transitions M [n, HV, K, K] of the (segment, head) pairs that have not vanished; the identity elsewhere.

    The function packs the tokens of the remaining pairs and calls the backend with a sequence per pair. Vanished pairs are
    empty sequences. On a GPU the host does not know how many pairs remain, so it sizes memory and launches for all of them.
    The kernels do the work of the remaining ones only.

    Args:
        vanished: [n, HV] bool.

    Other arguments as in `transitions`.
    """
    s, device = inputs.shape, inputs.q.device
    shape = per_head_shape(s, segments)
    lengths = upload((p.length for p in segments for _ in range(s.HV)), torch.int64, device).device
    first = upload((p.start for p in segments), torch.int64, device).device
    ends = torch.where(vanished.flatten(), 0, lengths).cumsum(0)
    cu_seqlens = F.pad(ends, (1, 0)).to(shape.index_dtype)
    if device.type == "cpu":
        shape = replace(shape, T=int(ends[-1]))

    at = torch.arange(shape.T, device=device)
    pair = torch.searchsorted(ends, at, right=True).clamp(max=shape.N - 1)
    head = pair % s.HV
    token = first[pair // s.HV] + at - cu_seqlens[pair]
    token = token.clamp(max=s.B * s.T - 1)  # tokens after the last pair belong to no sequence
    row = token * s.HV + head

    def gathered(x: Tensor, index: Tensor) -> Tensor:
        """Returns the rows `index` of x [B * T * heads, ...] as [1, T, 1, ...]."""
        return x.flatten(0, 2)[index].unsqueeze(0).unsqueeze(2)

    k = gathered(inputs.k, token * s.H + head // (s.HV // s.H))
    g = _log_decay(inputs.g.flatten(0, 2)[row].to(shape.state_dtype), inputs, head).view_as(k)
    v = k.new_zeros((1, shape.T, 1, s.V))
    x = replace(
        inputs, q=k, k=k, v=v, g=g, beta=gathered(inputs.beta, row), A_log=None, dt_bias=None,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=None, shape=shape,
    )  # fmt: skip

    def final_states(start: Tensor) -> Tensor:
        final = torch.empty_like(start)
        scratch = o.flatten(0, 2)[: shape.T].view(1, shape.T, 1, s.V)
        call(replace(x, initial_state=start), scratch, final)
        return final

    like = inputs.q.new_empty(0, dtype=shape.state_dtype)
    M = transitions_from(final_states, like, shape.N, 1, s.K, s.V)
    return M.view(len(segments), s.HV, s.K, s.K)
