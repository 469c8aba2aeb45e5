"""chunk_kda by the fp64 oracle."""

from __future__ import annotations

from typing import Any

import torch

from kda_core.testing import token_oracle

from ...backends import dispatch
from .checks import check_call, offsets


@dispatch
def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    assert not kwargs.keys() - {"A_log", "dt_bias", "chunk_size"}, f"FLA ignores {sorted(kwargs)}"
    assert cp_context is None and not state_v_first
    A_log, dt_bias, chunk_size = kwargs.get("A_log"), kwargs.get("dt_bias"), kwargs.get("chunk_size", 64)
    flags = {
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }
    check_call(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, cu_seqlens, flags, lower_bound, may_end_early=use_graph
    )  # fmt: skip
    assert chunk_size in (32, 64) and q.shape[0] * v.shape[2] <= 65535
    assert not (safe_gate and use_gate_in_kernel) or -5 <= lower_bound < 0
    assert not safe_gate or use_gate_in_kernel or -5 <= g.min() <= g.max() <= 0 or g.isnan().any()
    assert not (allow_neg_eigval and not use_beta_sigmoid_in_kernel)
    assert not use_graph or not disable_recompute, "FLA's graph mode recomputes"
    if return_intermediate_states:
        assert torch.is_inference_mode_enabled() and not disable_recompute
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta))
    assert not (differentiated and use_graph), "FLA would keep the buffers of this backward"

    known = None
    if cu_seqlens is not None:
        assert cu_seqlens_cpu is None or cu_seqlens_cpu.tolist() == cu_seqlens.tolist()
        known = torch.tensor(cu_seqlens.tolist() if use_graph else offsets(cu_seqlens))
    o, state, *h = token_oracle(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, lower_bound=lower_bound, A_log=A_log, dt_bias=dt_bias,
        cu_seqlens=known, chunk_size=chunk_size, return_intermediate_states=return_intermediate_states, **flags,
    )  # fmt: skip
    results = (o.to(q.dtype), state.float() if output_final_state else None)
    if not return_intermediate_states:
        return results
    found = h[0].to(k.dtype)
    if use_graph:  # rows for the largest possible number of chunks
        most = -(-q.shape[1] // chunk_size) + len(cu_seqlens) - 2
        rest = found.new_full((1, most - found.shape[1], *found.shape[2:]), torch.nan)
        found = torch.cat([found, rest], 1)
    return (*results, found)
