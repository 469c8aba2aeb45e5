"""fused_recurrent_kda_fwd by the fp64 oracle, token by token; between tokens states are in fp32, as in FLA."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from kda_core.testing import token_oracle

from ...backends import dispatch
from .checks import check_call


@dispatch("kda")
def fused_recurrent_kda_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert not kwargs, f"FLA ignores {sorted(kwargs)}"
    assert ssm_state_indices is None and num_accepted_tokens is None and not state_v_first
    assert not inplace_final_state, "FLA would write to the initial state"
    flags = {
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }
    check_call(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, cu_seqlens, flags, lower_bound, may_end_early=True
    )  # fmt: skip
    assert not torch.is_grad_enabled()
    out = torch.zeros_like(v) if out is None else out
    assert out.shape == v.shape and out.dtype == v.dtype
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    N = q.shape[0] if cu_seqlens is None else len(bounds) - 1
    shape = (N, v.shape[2], q.shape[3], v.shape[3])
    states = q.new_zeros(shape, dtype=torch.float32) if initial_state is None else initial_state.float()
    final = []
    for state, (first, end) in zip(
        states.split(N if cu_seqlens is None else 1), pairwise(bounds), strict=True
    ):
        for t in range(first, end):
            token = (x[:, t : t + 1] for x in (q, k, v, g, beta))
            o, state = token_oracle(
                *token, scale=scale, initial_state=state, lower_bound=lower_bound, A_log=A_log, dt_bias=dt_bias, **flags
            )  # fmt: skip
            out[:, t : t + 1], state = o.to(out.dtype), state.float()
        final.append(state)
    return out, torch.cat(final) if output_final_state else None
