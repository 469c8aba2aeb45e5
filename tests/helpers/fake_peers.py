"""Stand-ins for cuDNN frontend 1.32 and FlashInfer 0.7: their public functions of KDA, with the signatures and the checks of the real
ones. They compute with the reference, and append their arguments to a list."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_core import chunk_kda, fused_recurrent_kda

Calls = list[tuple[str, dict[str, Any]]]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CUDNN, FLASHINFER = "cudnn.linear_attention.kimi_delta_attention", "flashinfer.recurrent_kda"


def install(monkeypatch: Any, functions: dict[str, Callable[..., Any]]) -> None:
    """Makes functions importable by their dotted names; the modules exist until the test ends."""
    for name, function in functions.items():
        path, _, attribute = name.rpartition(".")
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        monkeypatch.setattr(sys.modules[path], attribute, function, raising=False)


def expect(holds: bool, what: str) -> None:
    """Raises the error of an engine that declines a call."""
    if not holds:
        raise NotImplementedError(what)


def cudnn(calls: Calls) -> Callable[..., Any]:
    """Returns ``cudnn.linear_attention.kimi_delta_attention`` on Hopper."""

    def kimi_delta_attention(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        batch_invariant: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
        safe_gate: bool = False, gate_lower_bound: float | None = None, gate_domain: str = "log", a_log: Tensor | None = None,
        dt_bias: Tensor | None = None, checkpoint_every_n_tokens: int = 0, checkpoint_dtype: torch.dtype | None = None,
        plan_name: str | None = None, overwrite_initial_state: bool = False, state_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        calls.append(("cudnn", dict(locals())))
        engine = plan_name or "kda_hopper_cuda"
        (total, H, K), (HV, V), N = q.shape, v.shape[1:], len(cu_seqlens) - 1
        expect(engine in ("kda_hopper", "kda_hopper_cuda"), f"no {engine} plan for this graph")
        expect(q.shape == k.shape == (total, H, K) and K == V == 128 and HV % H == 0, "heads and dimensions")
        expect(
            v.shape == (total, HV, V) and g.shape == (total, HV, K) and beta.shape == (total, HV), "shapes"
        )
        expect(q.dtype == k.dtype == v.dtype == BF16, "q/k/v must be bf16")
        expect(all(t.is_contiguous() for t in (q, k, v, g, beta)), "packed row-major operands")
        expect(cu_seqlens.dtype == torch.int32 and cu_seqlens.shape == (N + 1,), "cu_seqlens must be int32")
        expect(g.dtype in (F32, BF16, F16) and beta.dtype in (F32, BF16), "dtypes of g and beta")
        if initial_state is not None:
            expect(initial_state.shape == (N, HV, V, K) and initial_state.dtype == F32, "initial_state")
            expect(initial_state.is_contiguous(), "initial_state is packed")
        if safe_gate:
            assert a_log is not None and dt_bias is not None and gate_lower_bound is not None
            expect(a_log.shape == (HV,) and dt_bias.shape == (HV, K), "shapes of a_log and dt_bias")
            expect(a_log.dtype == dt_bias.dtype == F32, "dtypes of a_log and dt_bias")
        else:
            expect(a_log is None and dt_bias is None, "a_log/dt_bias require safe_gate=True")
        in_kernel = safe_gate or use_qk_l2norm_in_kernel or use_beta_sigmoid_in_kernel
        needs_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, g, beta))
        if engine == "kda_hopper" or needs_backward:
            expect(not in_kernel, "the kernel takes log-space g, normalised q/k and post-sigmoid beta")
            expect(H == HV, "grouped heads are unsupported")
            expect(g.dtype == beta.dtype == F32, "g and beta must be fp32")
            expect(scale is None or abs(scale - K**-0.5) < 1e-9, "only the default scale")
        expect(engine != "kda_hopper" or not needs_backward, "forward only")
        tokens = (t.unsqueeze(0) for t in (q, k, v, g, beta))
        o, state = chunk_kda(
            *tokens, scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
            use_gate_in_kernel=safe_gate, lower_bound=gate_lower_bound, A_log=a_log, dt_bias=dt_bias, state_v_first=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            backend="reference",
        )  # fmt: skip
        return o.squeeze(0), o.new_empty(0) if state is None else state

    return kimi_delta_attention


def flashinfer(calls: Calls) -> Callable[..., Any]:
    """Returns ``flashinfer.recurrent_kda`` for decoding of packed tokens."""

    def recurrent_kda(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
        scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = True, use_gate_in_kernel: bool = False, lower_bound: float | None = None,
        cu_seqlens: Tensor | None = None, ssm_state_indices: Tensor | None = None, num_spec_tokens: int | None = None,
        num_accepted_tokens: Tensor | None = None, output: Tensor | None = None, initial_state_source: Tensor | None = None,
        initial_state_indices: Tensor | None = None, beta_is_logit: bool = False, seq_order: Tensor | None = None,
        prefill_workspace: Any = None, state_checkpoints: Tensor | None = None, checkpoint_cu_starts: Tensor | None = None,
        checkpoint_every_n_tokens: int = 0, checkpoint_state_indices: Tensor | None = None, *, disable_state_update: bool = False,
        correction_cache: Tensor | None = None, kg_cache: Tensor | None = None, backend: str = "auto",
    ) -> tuple[Tensor, None]:  # fmt: skip
        calls.append(("flashinfer", dict(locals())))
        assert cu_seqlens is not None and ssm_state_indices is not None and initial_state is not None
        assert A_log is not None and dt_bias is not None and output is not None
        (B, total, H, K), (HV, V), N = q.shape, v.shape[2:], len(cu_seqlens) - 1
        T = 1 + (num_spec_tokens or 0)
        expect(B == 1 and total == N * T and K == V == 128 and HV % H == 0, "packed tokens")
        expect(all(t.dtype == BF16 for t in (q, k, v, g, beta)), "q, k, v, g and beta must be bfloat16")
        expect(initial_state.dtype == BF16 and initial_state.shape[1:] == (HV, V, K), "a pool of bf16 states")
        expect(A_log.dtype == dt_bias.dtype == F32 and dt_bias.numel() == HV * K, "A_log and dt_bias")
        expect(cu_seqlens.tolist() == [n * T for n in range(N + 1)], "cu_seqlens must step by the tokens")
        expect(cu_seqlens.dtype == ssm_state_indices.dtype == torch.int32, "int32 indices")
        expect(ssm_state_indices.shape == ((N,) if T == 1 else (N, T)), "shape of ssm_state_indices")
        expect(output.shape == v.shape and output.dtype == BF16, "output")
        if num_accepted_tokens is not None:
            expect(T > 1 and num_accepted_tokens.shape == (N,), "num_accepted_tokens")
        tokens = (t.view(N, T, *t.shape[2:]) for t in (q, k, v, g, beta))
        fused_recurrent_kda(
            *tokens, A_log=A_log, dt_bias=dt_bias, scale=scale, initial_state=initial_state, output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound,
            use_beta_sigmoid_in_kernel=beta_is_logit, ssm_state_indices=ssm_state_indices,
            num_accepted_tokens=num_accepted_tokens, out=output.view(N, T, HV, V), state_v_first=True, backend="reference",
        )  # fmt: skip
        return output, None

    return recurrent_kda
