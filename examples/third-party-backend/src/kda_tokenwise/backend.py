"""The recurrence itself, one token at a time, vectorised over batch rows and heads.

Per value head, with a state S [K,V] (Kimi Linear, arXiv:2510.26692)::

    S *= exp(g_t)[:, None];  S += (beta_t k_t) (v_t - k_t^T S);  o_t = scale * q_t^T S
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape


class TokenwiseBackend:
    """Satisfies `kda_core.backend.Backend`. It has no mutable state, so it is thread-safe."""

    def can_run(self, shape: ProblemShape) -> str | None:
        """Returns None: every shape is served."""
        return None

    def workspace_bytes(self, shape: ProblemShape) -> int:
        """Returns 0: torch allocates the temporaries."""
        return 0

    def compile(self, shape: ProblemShape) -> None:
        """Does nothing: there is nothing to compile."""

    @torch.no_grad()
    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """Writes o [B,T,HV,V], and the final states if the call asks for them. Returns `outputs`."""
        s = inputs.shape
        q, k, v, g, beta = _activate(inputs)
        states = _initial_states(inputs)
        for n, rows, tokens in _sequences(inputs):
            state = states[n]
            for t in range(tokens.start, tokens.stop):
                q_t, k_t, v_t, decay = q[rows, t], k[rows, t], v[rows, t], g[rows, t].exp()
                state = state * decay.unsqueeze(-1)
                wrong = v_t - (k_t.unsqueeze(-2) @ state).squeeze(-2)
                state = state + (beta[rows, t].unsqueeze(-1) * k_t).unsqueeze(-1) * wrong.unsqueeze(-2)
                o = (q_t.unsqueeze(-2) @ state).squeeze(-2)
                outputs.o[rows, t] = o.to(s.dtype)
            states[n] = state
        if outputs.final_state is not None:
            outputs.final_state.copy_(states.mT if s.options.state_v_first else states)
        return outputs

    def recurrent_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """The decode entry, the same computation."""
        return self.chunk_fwd(inputs, outputs)


def _activate(inputs: KdaInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns q (times scale) and k [B,T,HV,K], v [B,T,HV,V], log decay g [B,T,HV,K] and beta [B,T,HV], all fp32.

    It computes in fp64 and rounds once. In fp32 the last bits would depend on the number of tokens: torch's vectorised functions and the
    scalar ones for the last elements of a tensor round differently.
    """
    s, options = inputs.shape, inputs.options
    q, k, v, g, beta = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    if options.use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(s.HV // s.H, dim=2) for x in (q, k))
    if options.use_gate_in_kernel:
        if inputs.dt_bias is not None:
            g = g + inputs.dt_bias
        rate = 1.0 if inputs.A_log is None else inputs.A_log.exp().unsqueeze(-1)
        if options.lower_bound is None:
            g = -rate * F.softplus(g)
        else:
            g = options.lower_bound * torch.sigmoid(rate * g)
    if options.use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2.0 if options.allow_neg_eigval else 1.0)
    assert options.scale is not None  # `ProblemShape` resolves the default
    q, k, v, g, beta = (x.float() for x in (q * options.scale, k, v, g, beta))
    return q, k, v, g, beta


def _initial_states(inputs: KdaInputs) -> Tensor:
    """Returns the initial states [N,HV,K,V] in fp32 and in new memory."""
    s = inputs.shape
    if inputs.initial_state is None:
        return torch.zeros(s.N, s.HV, s.K, s.V)
    state = inputs.initial_state.mT if s.options.state_v_first else inputs.initial_state
    return state.clone(memory_format=torch.contiguous_format)  # the rounding of products depends on strides


def _sequences(inputs: KdaInputs) -> list[tuple[slice, slice, range]]:
    """Returns (sequences, batch rows, tokens) of each step: all rows together, or packed sequences one by one."""
    s = inputs.shape
    if not s.varlen:
        return [(slice(0, s.N), slice(0, s.B), range(s.T))]
    lengths = inputs.sequence_lengths()
    assert lengths is not None  # cu_seqlens lies in host memory: the spec says archs={"cpu"}
    ends = accumulate(lengths)
    return [
        (slice(n, n + 1), slice(0, 1), range(end - length, end))
        for n, (length, end) in enumerate(zip(lengths, ends))
    ]
