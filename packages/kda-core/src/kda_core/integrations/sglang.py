"""A kernel of SGLang's linear attention that runs KDA on kda_core.

SGLang calls `register` through the entry point ``sglang.srt.plugins``. It adds the choice ``kda_core`` to the options
``--linear-attn-backend``, ``--linear-attn-prefill-backend``, ``--linear-attn-decode-backend`` and ``--linear-attn-verify-backend``:

==================  =====================================================================================================
method              call
==================  =====================================================================================================
``extend``          `chunk_kda` over the pool; a tracked state becomes a checkpoint in SGLang's buffer
``packed_decode``   `fused_recurrent_kda` on views of q, k, v after SGLang's convolution
``decode``          the same from separate q, k, v
``target_verify``   `fused_recurrent_kda` with slots [N, W] in SGLang's buffer of intermediate states
==================  =====================================================================================================

SGLang's Triton kernel serves what is not listed: trees of drafts, ReplaySSM, and extends whose states must stay as they are.
``docs/engines.md`` has the details.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.api import chunk_kda, fused_recurrent_kda
from kda_core.contract import CHECKPOINT_SPACING
from kda_core.discovery import FAILURES
from kda_core.plugin_checks import show_error

CHOICE = "kda_core"
"""The name of the kernel in SGLang's options."""

WRITTEN_FOR = "0.5.23"
"""The version of SGLang whose sources this module follows."""

DISPATCHER = "sglang.srt.layers.attention.linear.kda_backend.KDAKernelDispatcher.__init__"
"""The method that the hook wraps: it chooses the kernels of a model."""

logger = logging.getLogger("sglang.kda_core")


# ---- registration


def register() -> None:
    """Adds the choice `CHOICE` and the hook that serves it. The entry point ``sglang.srt.plugins`` names this function.

    It never raises an exception: if this SGLang has another form, that is logged, and the choice is missing.
    """
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        kernel_class()  # before the choice is offered, so that it works if it is offered
        if CHOICE in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
            return
        HookRegistry.register(DISPATCHER, choose_kernels, HookType.AROUND)
        choices.add_linear_attn_kernel_backend_choices([CHOICE])
    except FAILURES as error:
        logger.warning("kda_core serves no layer of this SGLang: %s", show_error(error))
        return
    logger.info("--linear-attn-backend %s is available (written for SGLang %s)", CHOICE, WRITTEN_FOR)


class Wanted(NamedTuple):
    """Which kernels of a model shall be kda_core's."""

    decode: bool
    prefill: bool
    verify: bool


def wanted() -> Wanted:
    """Returns for which kernels the options of this process name `CHOICE`, by SGLang's rule: an option of one mode goes before
    ``--linear-attn-backend``, and verification follows neither."""
    from sglang.srt.runtime_context import get_exec

    options = get_exec().mamba
    base = options.linear_attn_backend
    return Wanted(
        (options.linear_attn_decode_backend or base) == CHOICE,
        (options.linear_attn_prefill_backend or base) == CHOICE,
        options.linear_attn_verify_backend == CHOICE,
    )


def choose_kernels(original: Any, dispatcher: Any, *backends: Any, **named: Any) -> None:
    """Wraps ``KDAKernelDispatcher.__init__``, which refuses names that it does not know. Where `CHOICE` is wanted, SGLang's dispatcher
    is made with its Triton kernel, which this function then replaces.

    Args:
        original: the method. dispatcher: its ``self``.
        backends: SGLang's names of the kernels that decode, extend and verify.
        named: nothing, in the version that this module was written for.
    """
    # SGLang has one value for all names that it does not know
    if named or len(backends) != len(Wanted._fields) or not any(x.is_custom() for x in backends):
        original(dispatcher, *backends, **named)
        return
    ours = [asked and backend.is_custom() for asked, backend in zip(wanted(), backends)]
    if not any(ours):
        original(dispatcher, *backends)
        return
    triton = type(backends[0])("triton")
    original(dispatcher, *(triton if mine else backend for mine, backend in zip(ours, backends)))
    kernel = kernel_class()(dispatcher.triton_kernel)
    for mine, name in zip(ours, ("decode_kernel", "extend_kernel", "verify_kernel")):
        if mine:
            setattr(dispatcher, name, kernel)
    if ours[0]:
        dispatcher.supports_packed_decode = kernel.supports_packed_decode
        dispatcher.supports_packed_decode_safe_gate = kernel.supports_packed_decode_safe_gate
    modes = [name for mine, name in zip(ours, Wanted._fields) if mine]
    logger.info("kda_core serves %s of KDA layers", ", ".join(modes))


@functools.cache
def kernel_class() -> type:
    """Returns `KdaCoreKernel` as a subclass of SGLang's base class of kernels."""
    from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

    return type("KdaCoreKernel", (KdaCoreKernel, LinearAttnKernelBase), {"__module__": __name__})


# ---- the kernel


class KdaCoreKernel:
    """The methods of SGLang's ``LinearAttnKernelBase``, and the flags of what they serve.

    Args:
        fallback: SGLang's Triton kernel, which serves the calls that kda_core does not.
    """

    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_safe_gate = True
    supports_safe_gate_verify = True
    supports_strided_target_verify_qkv = True
    supports_track_state_snapshot = True
    # `track_state` names the one state of a request that is kept; the plan of FlashInfer's kernel would name it a second time
    uses_state_checkpoints = False
    # that kernel fuses the convolution
    supports_fused_chain_verify = False

    def __init__(self, fallback: Any) -> None:
        self.fallback = fallback

    def packed_decode(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        scale: float,
        ssm_states: Tensor,
        cache_indices: Tensor,
        num_v_heads: int,
        head_v_dim: int,
        lower_bound: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One token of each request: mixed_qkv [N, 2*H*K + HV*V], a [.., HV*K], b [.., HV]. Returns o [1, N, HV, V]."""
        if kwargs.get("replayssm_d") is not None:
            return self.fallback.packed_decode(
                mixed_qkv,
                a,
                b,
                A_log=A_log,
                dt_bias=dt_bias,
                scale=scale,
                ssm_states=ssm_states,
                cache_indices=cache_indices,
                num_v_heads=num_v_heads,
                head_v_dim=head_v_dim,
                lower_bound=lower_bound,
                **kwargs,
            )
        N, K = len(mixed_qkv), ssm_states.shape[-1]
        values = num_v_heads * head_v_dim
        keys = (mixed_qkv.shape[1] - values) // 2
        q, k, v = (x.unsqueeze(1) for x in mixed_qkv.split([keys, keys, values], dim=-1))
        out = mixed_qkv.new_empty(N, 1, num_v_heads, head_v_dim)
        fused_recurrent_kda(
            q.unflatten(-1, (-1, K)),
            k.unflatten(-1, (-1, K)),
            v.unflatten(-1, (num_v_heads, head_v_dim)),
            a.reshape(N, 1, num_v_heads, K),
            b.reshape(N, 1, num_v_heads),
            scale=scale,
            ssm_state_indices=cache_indices,
            out=out,
            **_shared(ssm_states, A_log, dt_bias, lower_bound),
        )
        return out.transpose(0, 1)

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        lower_bound: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As `packed_decode`, with q, k [1, N, H, K] and v [1, N, HV, V]."""
        o, _ = fused_recurrent_kda(
            q,
            k,
            v,
            _gate(a, v, k),
            b.reshape(v.shape[:3]),
            cu_seqlens=query_start_loc,
            ssm_state_indices=cache_indices,
            **_shared(ssm_states, A_log, dt_bias, lower_bound),
        )
        return o

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        beta_is_raw: bool = False,
        is_spec_decode: bool = False,
        return_intermediate_states: bool = False,
        track_state: Tensor | None = None,
        track_chunk_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Prompts packed along T, from and into the slots of the pool.

        Args:
            track_state: [N, HV, V, K] fp32, into which the state before chunk ``track_chunk_idx[n]`` (of 64 tokens, -1 none) is stored.

        Returns:
            o [1, T, HV, V], or (o, None) with `return_intermediate_states`: SGLang then takes states from `track_state`.
        """
        chunks = kwargs.get("track_ssm_h_src")
        untracked = track_state is None and chunks is not None and chunks.numel() > 0
        # drafts of another model must leave the pool as it is; and only the fallback returns the state of every chunk
        if is_spec_decode or (return_intermediate_states and untracked):
            return self.fallback.extend(
                q,
                k,
                v,
                g,
                beta,
                ssm_states=ssm_states,
                cache_indices=cache_indices,
                query_start_loc=query_start_loc,
                A_log=A_log,
                dt_bias=dt_bias,
                lower_bound=lower_bound,
                beta_is_raw=beta_is_raw,
                is_spec_decode=is_spec_decode,
                return_intermediate_states=return_intermediate_states,
                track_state=track_state,
                track_chunk_idx=track_chunk_idx,
                **kwargs,
            )
        marks: dict[str, Any] = {}
        if track_state is not None and track_chunk_idx is not None:
            rows = torch.arange(len(track_chunk_idx) + 1, dtype=torch.int32, device=q.device)
            marks = {
                "checkpoint_pool": track_state,
                "checkpoint_cu": rows,
                "checkpoint_positions": track_chunk_idx * CHECKPOINT_SPACING,
                "checkpoint_indices": rows[:-1].to(cache_indices.dtype),
            }
        shared = _shared(ssm_states, A_log, dt_bias, lower_bound)
        o, _ = chunk_kda(
            q,
            k,
            v,
            _gate(g, v, k),
            beta,
            cu_seqlens=query_start_loc,
            ssm_state_indices=cache_indices,
            context_parallel="off",  # a plan would copy states
            **shared | {"use_beta_sigmoid_in_kernel": beta_is_raw},
            **marks,
        )
        return (o, None) if return_intermediate_states else o

    def target_verify(
        self,
        A_log: Tensor,
        dt_bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        intermediate_states_buffer: Tensor | None,
        intermediate_state_indices: Tensor,
        cache_steps: int,
        retrieve_parent_token: Tensor | None,
        lower_bound: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Up to `cache_steps` drafts of each request. The pool is only read; the state after draft t of request n goes to
        ``intermediate_states_buffer[intermediate_state_indices[n], t]`` [rows, steps, HV, V, K]. A call of kda_core reads and writes one
        pool, so each initial state is first copied to where the last draft's goes. Rows without a slot use the last row of the buffer,
        as SGLang's own padding does.
        """
        buffer = intermediate_states_buffer
        if (
            retrieve_parent_token is not None
            or buffer is None
            or kwargs.get("cache_ring")
            or buffer.stride(0) != buffer.shape[1] * buffer.stride(1)
        ):
            return self.fallback.target_verify(
                A_log=A_log,
                dt_bias=dt_bias,
                q=q,
                k=k,
                v=v,
                a=a,
                b=b,
                ssm_states=ssm_states,
                cache_indices=cache_indices,
                query_start_loc=query_start_loc,
                intermediate_states_buffer=buffer,
                intermediate_state_indices=intermediate_state_indices,
                cache_steps=cache_steps,
                retrieve_parent_token=retrieve_parent_token,
                lower_bound=lower_bound,
                **kwargs,
            )
        N, steps = len(query_start_loc) - 1, buffer.shape[1]
        pool = buffer.flatten(0, 1)
        read, rows = cache_indices[:N].long(), intermediate_state_indices[:N].long()
        served = (read >= 0) & (rows >= 0)
        slots = rows.unsqueeze(1) * steps + torch.arange(cache_steps, device=q.device)
        last = torch.where(served, slots[:, -1], len(pool) - 1)
        pool.index_copy_(0, last, ssm_states.index_select(0, read.clamp(min=0)).to(pool.dtype))
        o, _ = fused_recurrent_kda(
            q,
            k,
            v,
            _gate(a, v, k),
            b.reshape(v.shape[:3]),
            cu_seqlens=query_start_loc,
            ssm_state_indices=torch.where(served.unsqueeze(1), slots, -1),
            num_accepted_tokens=torch.full((N,), cache_steps, dtype=torch.int32, device=q.device),
            **_shared(pool, A_log, dt_bias, lower_bound),
        )
        return o


def _gate(a: Tensor, v: Tensor, k: Tensor) -> Tensor:
    """Returns the input of the gate as [1, T, HV, K]; SGLang passes it with and without separate heads."""
    return a.reshape(*v.shape[:3], k.shape[-1])


def _shared(
    pool: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> dict[str, Any]:
    """Returns the arguments that all calls share. Without A_log the gate was computed before the call."""
    raw = A_log is not None
    return {
        "A_log": A_log,
        "dt_bias": None if dt_bias is None or not raw else dt_bias.reshape(-1),
        "lower_bound": lower_bound if raw else None,
        "use_gate_in_kernel": raw,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "initial_state": pool,
        "state_v_first": True,
        "output_final_state": True,
    }
