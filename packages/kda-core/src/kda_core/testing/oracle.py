"""The fp64 oracle: the contract, token by token. It shares no code with any implementation.

Per value head, with a state S [K,V] and tokens t (Kimi Linear, arXiv:2510.26692)::

    S *= exp(g_t)[:, None];  S += (beta_t k_t) (v_t - k_t^T S);  o_t = scale * q_t^T S
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

F64 = torch.float64


def log_decay(
    g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None
) -> Tensor:
    """Returns the log decay of `use_gate_in_kernel`, in fp64.

    With `lower_bound` ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``, factor 1 without A_log; without it
    ``-exp(A_log) * softplus(g + dt_bias)``, softplus linear above 20.

    Args:
        g: [B, T, HV, K]. A_log: [HV]. dt_bias: [HV, K] or [HV*K].

    Returns:
        [B, T, HV, K].
    """
    HV, K = g.shape[2:]
    x = g.to(F64)
    if dt_bias is not None:
        x = x + dt_bias.to(F64).reshape(HV, K)
    rate = torch.ones((), dtype=F64, device=g.device) if A_log is None else A_log.to(F64).exp().reshape(HV, 1)
    if lower_bound is not None:
        return lower_bound / (1 + torch.exp(-rate * x))
    return -rate * torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def sequence_bounds(
    q: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None
) -> list[tuple[int, int]]:
    """Returns first token and end of each of the N sequences, as indices into the B*T tokens of q [B, T, H, K]. Reads the
    contents of cu_seqlens and therefore waits for a GPU."""
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return [(b * T, b * T + T) for b in range(B)]
    return list(pairwise((cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()))


def token_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    pin: bool = False,
) -> tuple[Any, ...]:
    """Computes ``chunk_kda(...)`` in fp64 on the device of its inputs, one token of every sequence at a time.

    Arguments are those of `kda_core.chunk_kda`. `output_final_state`, `safe_gate`, `use_graph`, `max_num_seqs` and
    `pin` are accepted because a call may pass them; they change no value. Differentiable in every tensor.

    Returns:
        o [B, T, HV, V], zero for tokens outside of every sequence; the final states [N, HV, K, V], or [N, HV, V, K]
        with `state_v_first`; with `return_intermediate_states` also the states at the start of every chunk of
        `chunk_size` tokens [B, NT, HV, K, V] (or [.., V, K]), packed sequences one after the other. All fp64.

    Raises:
        ValueError: `allow_neg_eigval` without `use_beta_sigmoid_in_kernel`.
    """
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval requires use_beta_sigmoid_in_kernel")
    (B, T, H, K), (HV, V), device = q.shape, v.shape[2:], q.device
    bounds = sequence_bounds(q, cu_seqlens, cu_seqlens_cpu)
    if use_gate_in_kernel:
        g = log_decay(g, A_log, dt_bias, lower_bound)
    q, k, v, g, beta = (x.to(F64).flatten(0, 1) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) / (1 + torch.exp(-beta))
    q = q * (K**-0.5 if scale is None else scale)
    decay, head = g.exp(), torch.arange(HV, device=device) // (HV // H)

    # Longest sequence first, so that the sequences with a token t are the first `live` rows of the state.
    lengths = [end - first for first, end in bounds]
    order = sorted(range(len(bounds)), key=lambda n: -lengths[n])
    first = torch.tensor([bounds[n][0] for n in order], device=device)
    S = torch.zeros(len(bounds), HV, K, V, dtype=F64, device=device)
    if initial_state is not None:
        S = (initial_state.mT if state_v_first else initial_state).to(F64)[order]
    live, final, outputs, rows = len(bounds), [], [], []
    saved: dict[tuple[int, int], Tensor] = {}
    for t in range(max(lengths, default=0)):
        while lengths[order[live - 1]] <= t:
            live -= 1
        if live < len(S):
            final.append(S[live:])
            S = S[:live]
        if return_intermediate_states and t % chunk_size == 0:
            saved.update({(order[i], t): S[i] for i in range(live)})
        at = first[:live] + t
        q_t, k_t = q[at][:, head].unsqueeze(-2), k[at][:, head].unsqueeze(-2)  # [live, HV, 1, K]
        S = S * decay[at].unsqueeze(-1)
        wrong = v[at].unsqueeze(-2) - k_t @ S  # [live, HV, 1, V]
        S = S + (beta[at].view(live, HV, 1, 1) * k_t).mT * wrong
        outputs.append((q_t @ S).squeeze(-2))
        rows.append(at)
    o = torch.zeros(B * T, HV, V, dtype=F64, device=device)
    if outputs:
        o = o.index_copy(0, torch.cat(rows), torch.cat(outputs))
    place = torch.tensor(order, device=device).argsort()
    states = torch.cat([S, *reversed(final)])[place]
    o, states = o.view(B, T, HV, V), states.mT.contiguous() if state_v_first else states
    if not return_intermediate_states:
        return o, states
    starts = [saved[n, t] for n, length in enumerate(lengths) for t in range(0, length, chunk_size)]
    h = torch.stack(starts) if starts else S.new_zeros((0, HV, K, V))
    h = h.unflatten(0, (B, -1)) if starts else h.expand(B, 0, HV, K, V)
    return o, states, h.mT.contiguous() if state_v_first else h
