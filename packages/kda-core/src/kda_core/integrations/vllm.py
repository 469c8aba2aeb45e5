"""KDA layers of vLLM whose recurrence runs on kda_core.

vLLM calls `register` through the entry point ``vllm.general_plugins``. It replaces the classes in `LAYERS` by subclasses that read and
write vLLM's cache of states in place:

=================  ======================================================================================================
batch              call
=================  ======================================================================================================
prefill            `chunk_kda` over the pool, with `has_initial_state`, and one checkpoint for each request
decode             `fused_recurrent_kda` on views of q, k, v after vLLM's convolution
speculation        `fused_recurrent_kda` with slots [N, W] and `num_accepted_tokens`
=================  ======================================================================================================

The convolution, its states and the gated norm stay vLLM's. So do the modes that kda_core does not serve in place (`Modes`), and those
for which ``--additional-config`` names one of vLLM's own backends. ``docs/engines.md`` has the details.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.api import chunk_kda, fused_recurrent_kda
from kda_core.contract import CHECKPOINT_SPACING
from kda_core.discovery import FAILURES
from kda_core.explanation import Explanation, explain
from kda_core.plugin_checks import show_error

PLUGIN = "kda_core"
"""The name of the entry point, and the word in ``VLLM_PLUGINS`` that turns the layers on."""

WRITTEN_FOR = "0.33.0"
"""The version of vLLM whose sources this module follows."""

FIRST_SLOT = 1
"""vLLM's block 0 is its null block: a row with that slot, or with a negative one, is padding."""


class Replaced(NamedTuple):
    """A class of vLLM that `register_layers` replaces.

    Attributes:
        module: where the class is defined.
        checkpoints: whether the builder of its metadata places checkpoints inside of prompts for any alignment.
    """

    module: str
    checkpoints: bool


LAYERS = {
    "KimiK3DeltaAttention": Replaced("vllm.models.kimi_k3.nvidia.kda", True),
    "KimiGatedDeltaNetAttention": Replaced(
        "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn", False
    ),
}
ARGUMENTS = ("self", "mixed_qkv", "g1", "g2", "beta", "core_attn_out")
"""The parameters of the method ``_forward`` that the subclasses override."""

logger = logging.getLogger("vllm.kda_core")  # vLLM shows what loggers below "vllm" log


@functools.cache
def _log_once(level: int, message: str) -> None:
    """Logs a message the first time. A model has dozens of equal layers."""
    logger.log(level, "%s", message)


# ---- registration


def register() -> None:
    """Replaces vLLM's KDA layers if ``VLLM_PLUGINS`` names this plugin. The entry point ``vllm.general_plugins`` names this function.

    It never raises an exception: what cannot be replaced is logged, and keeps vLLM's own kernels.
    """
    try:
        from vllm import envs, platforms

        if PLUGIN not in (envs.VLLM_PLUGINS or ()):
            logger.info("kda_core is installed but off; VLLM_PLUGINS=%s lets it serve KDA layers", PLUGIN)
        elif not platforms.current_platform.is_cuda():  # other platforms have classes of the same names
            logger.warning("kda_core serves no layer, because vLLM's platform is not CUDA")
        else:
            register_layers()
    except FAILURES as error:
        logger.warning("kda_core serves no layer of this vLLM: %s", show_error(error))


def register_layers() -> dict[str, type]:
    """Registers a subclass of each class in `LAYERS` in vLLM, and returns the subclasses by the names of the classes. A class that this
    vLLM lacks, or that has another form, is logged and left out. Calls after the first one change nothing."""
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    registered: dict[str, type] = {}
    for name, (module, checkpoints) in LAYERS.items():
        present = op_registry_oot.get(name)
        if present is not None:
            if issubclass(present, KdaCoreAttention):
                registered[name] = present
            else:
                logger.warning("kda_core does not serve %s: %r has replaced it", name, present)
            continue
        try:
            layer = layer_class(getattr(importlib.import_module(module), name), checkpoints)
            PluggableLayer.register_oot(layer, name=name)
        except FAILURES as error:
            logger.warning("kda_core does not serve %s of this vLLM: %s", name, show_error(error))
            continue
        registered[name] = layer
    served = ", ".join(registered) or "no layer"
    logger.info("kda_core serves %s (written for vLLM %s)", served, WRITTEN_FOR)
    return registered


def layer_class(base: type, checkpoints: bool) -> type:
    """Returns the subclass of a KDA layer of vLLM that runs on kda_core.

    Raises:
        TypeError: the method ``_forward`` of `base` has other parameters than `ARGUMENTS`.
    """
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    found = tuple(inspect.signature(base._forward).parameters)  # type: ignore[attr-defined]
    if found != ARGUMENTS:
        raise TypeError(f"{base.__name__}._forward must have the parameters {ARGUMENTS}, found {found}")
    members = {
        "__module__": __name__,
        "kda_core_checkpoints": checkpoints,
        # vLLM decorates the method that this one replaces in the same way
        "_forward": eager_break_during_capture(KdaCoreAttention._forward),
    }
    return type(f"KdaCore{base.__name__}", (KdaCoreAttention, base), members)


# ---- which modes kda_core serves


class Modes(NamedTuple):
    """Which batches of a layer run on kda_core; vLLM's own method serves the others."""

    prefill: bool
    decode: bool
    speculation: bool


def refusal(found: Explanation) -> str | None:
    """Returns why a call is left to vLLM, or None. A backend that kda_core would serve by copies of states is slower than vLLM's."""
    if found.error is not None:
        return found.error
    return None if found.pool == "the backend" else f"backend {found.backend!r} has no pools of states"


def refusals(layer: Any, checkpoints: bool) -> tuple[str | None, str | None, str | None]:
    """Returns why kda_core does not serve each mode of a layer, in the order of `Modes`; None for a mode that it serves. Nothing is launched."""
    H, K, device = layer.local_num_heads, layer.head_dim, layer.A_log.device
    dtype, state_dtype = layer.model_config.dtype, layer.get_state_dtype()[1]
    window = 1 + layer.num_spec
    pool = torch.empty((2, H, K, K), dtype=state_dtype, device=device)
    ints = functools.partial(torch.zeros, dtype=torch.int32, device=device)

    def tokens(n: int) -> tuple[Tensor, ...]:
        qkv, g = torch.empty((2, n, 3, H, K), dtype=dtype, device=device)
        beta = torch.empty((1, n, H), dtype=dtype, device=device)
        return (*qkv.unsqueeze(0).unbind(2), g[None, :, 0], beta)

    given = {"initial_state": pool, "first_slot": FIRST_SLOT, **layer_arguments(layer)}
    bounds = {"cu_seqlens": torch.tensor([0, CHECKPOINT_SPACING], dtype=torch.int32, device=device)}
    marks = {"checkpoint_cu": ints(2), "checkpoint_positions": ints(1), "checkpoint_indices": ints(1)}
    fresh = {"has_initial_state": torch.zeros(1, dtype=torch.bool, device=device)}
    with torch.no_grad():
        prefill = explain(
            *tokens(CHECKPOINT_SPACING),
            ssm_state_indices=ints(1),
            context_parallel="off",
            **given | bounds | fresh | (marks if checkpoints else {}),
        )
        decode = explain(fused_recurrent_kda, *tokens(1), ssm_state_indices=ints(1), **given)
        bounds = {"cu_seqlens": torch.tensor([0, window], dtype=torch.int32, device=device)}
        drafts = {"ssm_state_indices": ints((1, window)), "num_accepted_tokens": ints(1)}
        speculation = explain(fused_recurrent_kda, *tokens(window), **given | bounds | drafts)
    return refusal(prefill), refusal(decode), refusal(speculation)


def layer_arguments(layer: Any) -> dict[str, Any]:
    """Returns the arguments that all calls of a layer share."""
    return {
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "lower_bound": layer.gate_lower_bound,
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True,
        "output_final_state": True,
    }


# ---- the layer


class KdaCoreAttention:
    """What the subclasses add to a KDA layer of vLLM, whose attributes they use."""

    kda_core_checkpoints = False

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        given = vllm_config.additional_config
        named = given if isinstance(given, dict) else {}
        keys = ("kda_prefill_backend", "kda_decode_backend", "kda_spec_decode_backend")
        self._kda_core_wanted = Modes(*(named.get(key, "auto") == "auto" for key in keys))
        self._kda_core_modes: Modes | None = None

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        """Asks for checkpoints at multiples of 64 tokens from the start of each query. vLLM calls this method after it has loaded the
        weights, and before it captures CUDA graphs."""
        spec, modes = super().get_kv_cache_spec(vllm_config), self.kda_core_modes()  # type: ignore[misc]
        if not (self.kda_core_checkpoints and modes.prefill):
            return spec
        return dataclasses.replace(
            spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=CHECKPOINT_SPACING
        )

    def kda_core_modes(self: Any) -> Modes:
        """Returns which modes run on kda_core, which is decided once."""
        if self._kda_core_modes is None:
            wanted, reasons = self._kda_core_wanted, refusals(self, self.kda_core_checkpoints)
            served = Modes(*(w and reason is None for w, reason in zip(wanted, reasons)))
            # a batch of prompts and drafts is served whole, so that its checkpoints are written in any case
            drafts = self.num_spec == 0 or served.speculation or self._kda_core_recovers
            served = served._replace(prefill=served.prefill and drafts)
            for mode, on, wish, reason in zip(Modes._fields, served, wanted, reasons):
                if on:
                    _log_once(logging.INFO, f"kda_core serves {mode} of KDA layers")
                elif reason is not None and wish:
                    _log_once(
                        logging.WARNING, f"vLLM serves {mode} of KDA layers. kda_core does not: {reason}"
                    )
            self._kda_core_modes = served
        return self._kda_core_modes

    @property
    def _kda_core_recovers(self: Any) -> bool:
        """Whether the layer verifies drafts by vLLM's RecoverSSM, whose records its own commit reads."""
        return getattr(self, "use_recoverssm", False)

    def _forward(
        self: Any, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        """Replaces the method of vLLM's layer: convolution, recurrence and gated norm, into `core_attn_out`.

        Args:
            mixed_qkv: [tokens, 3 * H * K], strided. g1: [1, tokens, H, K]. g2: [tokens, H, K]. beta: [1, tokens, H], strided.
            core_attn_out: [1, tokens, H, K].
        """
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        m = None if metadata is None else metadata.get(self.prefix)
        if m is None:  # a profiling run without a cache
            return
        if not self._kda_core_serves(m):
            super()._forward(mixed_qkv=mixed_qkv, g1=g1, g2=g2, beta=beta, core_attn_out=core_attn_out)  # type: ignore[misc]
            return
        drafts, others = token_groups(m)
        serve_others = self._kda_core_prefill if m.num_prefills else self._kda_core_decode
        for rows, serve in ((drafts, self._kda_core_speculation), (others, serve_others)):
            if rows is None:
                continue
            x = take(mixed_qkv, rows, 0), take(g1, rows, 1), take(beta, rows, 1)
            if isinstance(rows, slice):
                serve(m, *x, core_attn_out[:, rows])
            else:
                o = torch.empty_like(x[1], dtype=core_attn_out.dtype)
                serve(m, *x, o)
                core_attn_out.index_copy_(1, rows, o)
        core_attn_out.copy_(self.o_norm(core_attn_out, g2))

    def _kda_core_serves(self: Any, m: Any) -> bool:
        """Returns whether the whole batch runs on kda_core."""
        modes = self.kda_core_modes()
        if m.num_spec_decodes and not (modes.speculation or (m.num_prefills and self._kda_core_recovers)):
            return False
        return modes.prefill if m.num_prefills else modes.decode or not m.num_decodes

    def _kda_core_caches(self: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the states of the convolution [slots, 3*H*K, width - 1], the pool [slots, H, V, K], and the weights [3*H*K, width]."""
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        conv_state, pool = self.kv_cache[:2]
        if not is_conv_state_dim_first():
            conv_state = conv_state.transpose(-1, -2)
        return conv_state, pool, self.conv1d.weight.squeeze(1)

    def _kda_core_qkv(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        """Returns q, k, v [1, tokens, H, K] as views of the output of the convolution [tokens, 3*H*K]."""
        return x.unsqueeze(0).unflatten(-1, (3, self.local_num_heads, self.head_dim)).unbind(2)

    def _kda_core_prefill(self: Any, m: Any, qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
        """Prompts, and single tokens among them."""
        from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointExporter
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

        conv_state, pool, weights = self._kda_core_caches()
        slots, bounds, checkpoint = m.non_spec_state_indices_tensor, m.non_spec_query_start_loc, m.checkpoint
        x = causal_conv1d_fn(
            qkv.transpose(0, 1),
            weights,
            self.conv1d.bias,
            activation="silu",
            conv_states=conv_state,
            has_initial_state=m.has_initial_state,
            cache_indices=slots,
            query_start_loc=bounds,
            metadata=m,
        ).transpose(0, 1)
        marks: dict[str, Any] = {}
        if checkpoint is not None:
            offsets, indices = checkpoint.checkpoint_offsets, checkpoint.state_indices
            marks = {
                "checkpoint_cu": torch.arange(len(offsets) + 1, dtype=torch.int32, device=offsets.device),
                "checkpoint_positions": offsets,  # 0 is none
                "checkpoint_indices": indices.to(slots.dtype),
            }
        q, k, v = self._kda_core_qkv(x)
        chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            initial_state=pool,
            cu_seqlens=bounds,
            ssm_state_indices=slots,
            has_initial_state=m.has_initial_state,
            first_slot=FIRST_SLOT,
            context_parallel="off",  # a plan would copy states
            out=out,
            **marks,
            **layer_arguments(self),
        )
        if checkpoint is not None:  # the states of the convolution that belong to the checkpoints
            # drafts widen `conv_state`; a prompt uses its first columns
            exporter = MambaPrefillCheckpointExporter(state_len=weights.shape[1] - 1)
            exporter.export(checkpoint, raw_qkv=qkv, conv_state=conv_state, cu_seqlens=bounds)

    def _kda_core_decode(self: Any, m: Any, qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
        """One token of each request. Rows that pad the batch for a CUDA graph have the null slot."""
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        conv_state, pool, weights = self._kda_core_caches()
        slots = m.non_spec_state_indices_tensor[: len(qkv)]
        x = causal_conv1d_update(
            qkv,
            conv_state,
            weights,
            self.conv1d.bias,
            activation="silu",
            conv_state_indices=slots,
            validate_data=True,
            out=torch.empty(
                qkv.shape, dtype=qkv.dtype, device=qkv.device
            ),  # g2 and beta share the memory of qkv
        )
        q, k, v, g, beta = (y.transpose(0, 1) for y in (*self._kda_core_qkv(x), g, beta))
        fused_recurrent_kda(
            q,
            k,
            v,
            g,
            beta,
            initial_state=pool,
            ssm_state_indices=slots,
            first_slot=FIRST_SLOT,
            out=out.transpose(0, 1),
            **layer_arguments(self),
        )

    def _kda_core_speculation(self: Any, m: Any, qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
        """The drafts of each request: the state after each goes to a slot of its own."""
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        conv_state, pool, weights = self._kda_core_caches()
        n = m.num_spec_decodes
        slots, accepted = m.spec_state_indices_tensor[:n], m.num_accepted_tokens[:n]
        bounds = m.spec_query_start_loc[: n + 1]
        if self._kda_core_recovers:
            self._recoverssm_verify(m, qkv, g, beta, weights, bounds, out)
            return
        x = causal_conv1d_update(
            qkv,
            conv_state,
            weights,
            self.conv1d.bias,
            activation="silu",
            conv_state_indices=slots[:, 0],
            num_accepted_tokens=accepted,
            query_start_loc=bounds,
            max_query_len=slots.shape[1],
            validate_data=False,
            out=torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device),
        )
        q, k, v = self._kda_core_qkv(x)
        fused_recurrent_kda(
            q,
            k,
            v,
            g,
            beta,
            initial_state=pool,
            cu_seqlens=bounds,
            ssm_state_indices=slots,
            num_accepted_tokens=accepted,
            first_slot=FIRST_SLOT,
            out=out,
            **layer_arguments(self),
        )


# ---- tokens of a batch


def token_groups(m: Any) -> tuple[slice | Tensor | None, slice | Tensor | None]:
    """Returns the rows of drafts and of other tokens in a batch: a slice, or indices where they are mixed; None where there are none."""
    plain = m.num_prefill_tokens + m.num_decode_tokens
    if not m.num_spec_decodes:
        # a prefill has no padding rows; a decode batch may have some
        return None, slice(0, plain if m.num_prefills else m.num_actual_tokens)
    if not (m.num_prefills or m.num_decodes):
        return slice(0, m.num_actual_tokens), None
    start = getattr(m, "spec_token_start", None)
    if start is None:
        return m.spec_token_indx, m.non_spec_token_indx
    other = m.non_spec_token_start
    return slice(start, start + m.num_spec_decode_tokens), slice(other, other + plain)


def take(x: Tensor, rows: slice | Tensor, dim: int) -> Tensor:
    """Returns these rows of a dimension: a view for a slice, a copy for indices."""
    if isinstance(rows, slice):
        return x.narrow(dim, rows.start, rows.stop - rows.start)
    return x.index_select(dim, rows)
