"""A layer for models: ``from kda_core.nn import KimiDeltaAttention``. ``import kda_core`` does not import this module.

`KimiDeltaAttention` has the arguments and the ``state_dict`` of FLA's layer of the same name (flash-linear-attention 0.6.0), so the
weights of one load into the other. Beside `chunk_kda` and `fused_recurrent_kda` it uses only operations of torch. It therefore
runs on every device that a backend serves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_core.api import chunk_kda, fused_recurrent_kda
from kda_core.contract import SAFE_GATE_BOUND
from kda_core.errors import ArgumentError, ShapeError, describe

__all__ = ["Cache", "KimiDeltaAttention", "RMSNormGated", "ShortConvolution"]

MODES = ("chunk", "fused_recurrent")
DT_RANGE = (0.001, 0.1)
"""Lowest and highest softplus(dt_bias) of a new layer; FLA's constants."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which the convolution and the norm compute: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


class ShortConvolution(nn.Conv1d):
    """A causal depthwise convolution over tokens, followed by SiLU.

    ``y[t, d] = silu(bias[d] + sum over i of weight[d, 0, i] * x[t - W + 1 + i, d])``, where tokens before the first one are those
    of `cache`, or zeros. It is computed in fp32 (fp64 for fp64) and rounded once to x's dtype, also under autocast.

    Args:
        hidden_size: the number of channels D.
        kernel_size: the number of taps W.
        bias: add a bias to each channel.
    """

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the convolution of each sequence.

        Args:
            x: [B, T, D].
            cache: [N, D, W], the last W inputs of each sequence before this call, oldest first. N is B, or
                ``len(cu_seqlens) - 1``. None means zeros. It is not written to.
            output_final_state: also return the cache for the tokens after x.
            cu_seqlens: [N+1], cumulative lengths of the sequences packed along T; B is then 1. Values are read on the device,
                which clamps them to [0, T].

        Returns:
            y [B, T, D] in x's dtype; the new cache [N, D, W] in x's dtype, or None.

        Raises:
            ShapeError: the cache has another shape.
        """
        B, T, D = x.shape
        W = self.kernel_size[0]
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        if cache is None:
            history = x.new_zeros(N, W, D)
        elif cache.shape == (N, D, W):
            history = cache.to(x.dtype).mT
        else:
            raise ShapeError("cache", f"[N, D, W] = {[N, D, W]}", str(list(cache.shape)))

        if cu_seqlens is None:
            rows = torch.cat([history, x], dim=1)
            y, last = self._taps(rows), rows[:, T:]
        else:  # one array, in which each sequence follows its W rows of history
            offsets = cu_seqlens.long().clamp(0, T)
            sequence, token = torch.arange(N, device=x.device), torch.arange(T, device=x.device)
            owner = torch.searchsorted(offsets[1:].contiguous(), token, right=True).clamp(max=N - 1)
            before = W * sequence.unsqueeze(1) + torch.arange(W, device=x.device)  # [N, W]
            history_rows = (offsets[:-1].unsqueeze(1) + before).flatten()
            token_rows = W * (owner + 1) + token
            rows = x.new_zeros(T + N * W, D)
            rows = rows.index_copy(0, history_rows, history.flatten(0, 1)).index_copy(0, token_rows, x[0])
            y = self._taps(rows.unsqueeze(0)).index_select(1, token_rows - W)
            last = rows[offsets[1:].unsqueeze(1) + before]
        y = F.silu(y).to(x.dtype)
        return y, last.mT.contiguous() if output_final_state else None

    def _taps(self, rows: Tensor) -> Tensor:
        """Returns the convolution with the bias, [..., R - W, D] for `rows` [..., R, D]. The result of row r is at r - W."""
        dtype, W = wide(rows.dtype), self.kernel_size[0]
        weight, rows = self.weight.squeeze(1).mT.to(dtype), rows.to(dtype)
        count = rows.shape[-2] - W
        y = torch.zeros((), dtype=dtype, device=rows.device) if self.bias is None else self.bias.to(dtype)
        for i in range(W):
            y = torch.addcmul(y, rows.narrow(-2, i + 1, count), weight[i])
        return y


class RMSNormGated(nn.Module):
    """An RMS norm over the last dimension, multiplied by the sigmoid of a gate.

    ``y = x / sqrt(mean(x**2) + eps) * weight * sigmoid(g)``, computed in fp32 (fp64 for fp64) and rounded once to x's dtype.

    Args:
        hidden_size: the size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """Returns y, of the shape and dtype of x. `x`, `g`: [..., hidden_size]."""
        dtype = wide(x.dtype)
        y = F.rms_norm(x.to(dtype), (self.hidden_size,), self.weight.to(dtype), self.eps)
        return (y * g.to(dtype).sigmoid()).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class Cache:
    """The states of a model's layers after the tokens so far, for decoding. One cache serves one batch of sequences.

    A layer calls ``len(cache)``, ``cache[layer_idx]`` and ``cache.update(...)``. FLA's ``Cache`` has these methods and the same
    states, so each layer accepts the other's cache. `KimiDeltaAttention` never writes to a stored tensor.
    """

    def __init__(self) -> None:
        self._states: dict[int, dict[str, Any]] = {}
        self._seen: dict[int, int] = {}

    def __len__(self) -> int:
        """Returns one more than the highest index of a layer that has states."""
        return max(self._states, default=-1) + 1

    def __getitem__(self, layer_idx: int) -> dict[str, Any] | None:
        """Returns the states of a layer: a dict with ``recurrent_state`` [N, HV, V, K] and ``conv_state``, the three [N, D, W] of
        q, k and v (None without convolutions). Returns None for a layer without states."""
        return self._states.get(layer_idx)

    def update(
        self,
        *,
        layer_idx: int,
        recurrent_state: Tensor | None = None,
        conv_state: tuple[Tensor | None, ...] | None = None,
        offset: int = 1,
    ) -> dict[str, Any]:
        """Stores the states of a layer after `offset` more tokens, and returns what `__getitem__` does. None keeps the old state."""
        states = self._states.setdefault(layer_idx, {"recurrent_state": None, "conv_state": None})
        given = {"recurrent_state": recurrent_state, "conv_state": conv_state}
        states.update({name: state for name, state in given.items() if state is not None})
        self._seen[layer_idx] = self.get_seq_length(layer_idx) + offset
        return states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens that a layer has seen, padding included."""
        return self._seen.get(layer_idx, 0)


class KimiDeltaAttention(nn.Module):
    """The attention layer of Kimi Linear (arXiv:2510.26692), with the arguments and parameters of FLA's layer.

    With x [B, T, hidden_size], and H heads of K = `head_dim`, HV value heads of V = ``head_dim * expand_v``::

        q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))
        g       = -exp(A_log) * softplus(W_f2 W_f1 x + dt_bias)      or, with lower_bound,
                  lower_bound * sigmoid(exp(A_log) * (W_f2 W_f1 x + dt_bias))
        beta    = sigmoid(W_b x)                                     times 2 with allow_neg_eigval
        o       = chunk_kda(q / |q|, k / |k|, v, g, beta)
        y       = W_o (rms_norm(o) * sigmoid(W_g2 W_g1 x + b_g))

    The projections compute in the dtype of their weights, or in that of autocast. `chunk_kda` gets q, k, v, g and beta in this dtype,
    and computes the gate and the normalisation of q and k in fp32. `A_log` and `dt_bias` may be in fp32, bf16 or fp16. A GPU backend
    serves bf16: use ``layer.bfloat16()``, or autocast to bf16 with weights in fp32.

    Args:
        hidden_size: the size of the last dimension of the input and of the output.
        expand_v: V / `head_dim`; the product must be an integer.
        head_dim: K. GPU backends serve K = V = 128.
        num_heads: H, the number of query/key heads.
        num_v_heads: HV, a multiple of `num_heads`; None for `num_heads`.
        mode: "chunk" calls `chunk_kda`, except for a single token after the states of a cache. "fused_recurrent" always calls
            `fused_recurrent_kda`, which runs token by token. Both compute the same function. FLA's layer decodes up to 64 tokens
            with `fused_recurrent_kda`.
        use_short_conv: False leaves out the convolutions, and keeps SiLU.
        allow_neg_eigval: beta is in [0, 2] instead of [0, 1].
        safe_gate: promise that the gate is bounded, which is faster; it needs a `lower_bound` in [-5, 0). New layers then start
            with ``A_log = 0``.
        lower_bound: None for the softplus gate, or a number below 0 for the bounded gate.
        conv_size: the number of taps W of the convolutions.
        conv_bias: add a bias to the convolutions.
        layer_idx: the index of this layer in a cache; a call with a cache needs it.
        norm_eps: eps of the output norm.
        backend: name of the backend that must serve the calls; None for the automatic choice of `chunk_kda`.

    Raises:
        ArgumentError: an argument has a value that the layer does not allow.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        K, V = head_dim, round(head_dim * expand_v)
        for name, size in (("hidden_size", hidden_size), ("head_dim", head_dim), ("num_heads", num_heads)):
            if size < 1:
                raise ArgumentError(name, "at least 1", repr(size))
        if mode not in MODES:
            raise ArgumentError("mode", " or ".join(map(repr, MODES)), repr(mode))
        if V < 1 or not math.isclose(head_dim * expand_v, V, rel_tol=1e-5):
            wanted = f"a ratio with an integer head_dim * expand_v, for head_dim={head_dim}"
            raise ArgumentError("expand_v", wanted, repr(expand_v))
        if num_v_heads < 1 or num_v_heads % num_heads != 0:
            raise ArgumentError("num_v_heads", f"a multiple of num_heads={num_heads}", repr(num_v_heads))
        if lower_bound is not None and not lower_bound < 0:
            raise ArgumentError("lower_bound", "a number below 0 or None", repr(lower_bound))
        if safe_gate and (lower_bound is None or lower_bound < SAFE_GATE_BOUND):
            wanted = f"a number in [{SAFE_GATE_BOUND:g}, 0) with safe_gate=True"
            raise ArgumentError("lower_bound", wanted, repr(lower_bound))

        self.hidden_size, self.mode, self.layer_idx, self.backend = hidden_size, mode, layer_idx, backend
        self.num_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim = num_heads, num_v_heads, K, V
        self.use_short_conv, self.allow_neg_eigval = use_short_conv, allow_neg_eigval
        self.safe_gate, self.lower_bound = safe_gate, lower_bound
        key_dim, value_dim, gate_dim = num_heads * K, num_v_heads * V, num_v_heads * K

        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_dim, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(key_dim, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(key_dim, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(value_dim, conv_size, conv_bias)
        self.f_proj = nn.Sequential(nn.Linear(hidden_size, V, bias=False), nn.Linear(V, gate_dim, bias=False))
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False)
        rate = torch.zeros(num_v_heads) if safe_gate else torch.empty(num_v_heads).uniform_(1, 16).log()
        self.A_log = nn.Parameter(rate.float())
        low, high = map(math.log, DT_RANGE)
        dt = torch.empty(gate_dim, dtype=torch.float32).uniform_(low, high).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]  # FLA's trainers read it
        self.g_proj = nn.Sequential(nn.Linear(hidden_size, V, bias=False), nn.Linear(V, value_dim, bias=True))
        self.o_norm = RMSNormGated(V, norm_eps)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False)

    def extra_repr(self) -> str:
        heads = f"H={self.num_heads}, HV={self.num_v_heads}, K={self.head_k_dim}, V={self.head_v_dim}"
        return f"{heads}, mode={self.mode!r}, layer_idx={self.layer_idx}"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        *,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, None, Any]:
        """Computes the layer for whole sequences, or for the tokens after those of a cache.

        Args:
            hidden_states: [B, T, hidden_size].
            attention_mask: [B, S] with S >= T, bool or numbers; its last T columns say which of the tokens are real (not 0). The
                others, at any place, are left out: they change no state, and their outputs are 0. On a GPU the call waits for
                the mask.
            past_key_values: a `Cache`, FLA's ``Cache``, or another object with their methods. The states of this layer in it are
                where the sequences continue.
            use_cache: store the states after the last token in `past_key_values`, which must be given.
            output_attentions: must be false, because the layer has no attention weights.
            cu_seqlens: [N+1] int32 or int64 on the device of hidden_states, cumulative lengths of sequences packed along T; B is
                then 1, and states belong to the N sequences. Not together with attention_mask.
            cu_seqlens_cpu: the same values in host memory, see `chunk_kda`.

        Returns:
            The output [B, T, hidden_size]; None, in the place of attention weights; `past_key_values`.

        Raises:
            ArgumentError, ShapeError: the message names the argument, what was expected and what came.
            BackendError: no backend serves the call, or the named one does not.
        """
        self._check_batch(hidden_states, attention_mask, cu_seqlens, cu_seqlens_cpu)
        self._check_cache(past_key_values, use_cache)
        if output_attentions:
            raise ArgumentError("output_attentions", "False: the layer has no attention weights", "True")
        B, T, _ = hidden_states.shape
        real: Tensor | None = None
        if attention_mask is not None:
            mask = attention_mask[:, attention_mask.shape[1] - T :] != 0
            real = mask.flatten().nonzero().squeeze(1)  # indices of the tokens that are not padding
            hidden_states = hidden_states.flatten(0, 1).index_select(0, real).unsqueeze(0)
            cu_seqlens = F.pad(mask.sum(1).cumsum(0), (1, 0))

        state, conv_state = None, (None, None, None)
        index = self.layer_idx
        if past_key_values is not None and index is not None and len(past_key_values) > index:
            last = past_key_values[index]
            if last is not None:
                state, conv_state = last["recurrent_state"], last["conv_state"] or conv_state
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        new_conv_state = None
        if self.use_short_conv:
            options = (bool(use_cache), cu_seqlens)
            q, q_state = self.q_conv1d(q, conv_state[0], *options)
            k, k_state = self.k_conv1d(k, conv_state[1], *options)
            v, v_state = self.v_conv1d(v, conv_state[2], *options)
            new_conv_state = (q_state, k_state, v_state)
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        o, new_state = self._attend(
            q, k, v, self.f_proj(hidden_states), self.b_proj(hidden_states), state, bool(use_cache),
            cu_seqlens, cu_seqlens_cpu, decodes=T == 1 and state is not None and cu_seqlens_cpu is None,
        )  # fmt: skip
        if use_cache:
            past_key_values.update(
                layer_idx=index, recurrent_state=new_state, conv_state=new_conv_state, offset=T
            )
        gate = self.g_proj(hidden_states).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        y = self.o_proj(self.o_norm(o, gate).flatten(-2))
        if real is not None:
            y = y.new_zeros(B * T, self.hidden_size).index_copy(0, real, y[0]).unflatten(0, (B, T))
        return y, None, past_key_values

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None,
        decodes: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns o [B, T, HV, V] and the final states [N, HV, V, K]. `q`, `k`, `v`, `g` have their heads in the last dimension.
        `decodes`: the call has a single token of each sequence."""
        H, HV, K, V = self.num_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim
        tensors = {
            "q": q.unflatten(-1, (H, K)),
            "k": k.unflatten(-1, (H, K)),
            "v": v.unflatten(-1, (HV, V)),
            "g": g.unflatten(-1, (HV, K)),
            "beta": beta,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "initial_state": state,
            "cu_seqlens": cu_seqlens,
        }
        options: dict[str, Any] = {
            "output_final_state": output_final_state,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.lower_bound,
            "state_v_first": True,
            "backend": self.backend,
        }
        if decodes or self.mode == "fused_recurrent":
            return fused_recurrent_kda(**tensors, **options)
        return chunk_kda(**tensors, **options, safe_gate=self.safe_gate, cu_seqlens_cpu=cu_seqlens_cpu)

    def _check_batch(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None,
    ) -> None:
        """Checks what `chunk_kda` does not see, or sees too late."""
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != self.hidden_size:
            wanted = f"[B, T, hidden_size={self.hidden_size}]"
            raise ShapeError("hidden_states", wanted, str(list(hidden_states.shape)))
        B, T, _ = hidden_states.shape
        if attention_mask is not None:
            if cu_seqlens is not None or cu_seqlens_cpu is not None:
                raise ArgumentError("attention_mask", "None with cu_seqlens", describe(attention_mask))
            shape = attention_mask.shape
            if attention_mask.dim() != 2 or shape[0] != B or shape[1] < T:
                raise ShapeError("attention_mask", f"[B={B}, at least T={T}]", str(list(shape)))
        if cu_seqlens is not None:
            if B != 1:
                raise ShapeError("hidden_states", "B=1 with cu_seqlens", f"B={B}")
            if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
                raise ShapeError("cu_seqlens", "[N+1] with N of at least 1", str(list(cu_seqlens.shape)))
        if cu_seqlens_cpu is not None and self.mode == "fused_recurrent":
            wanted = "None with mode='fused_recurrent', which has no use for it"
            raise ArgumentError("cu_seqlens_cpu", wanted, describe(cu_seqlens_cpu))

    def _check_cache(self, past_key_values: Any, use_cache: bool | None) -> None:
        if past_key_values is not None and self.layer_idx is None:
            raise ArgumentError("layer_idx", "the index of the layer, for past_key_values", "None")
        if type(past_key_values) in (dict, tuple, list):
            raise ArgumentError("past_key_values", "a Cache or None", type(past_key_values).__name__)
        if use_cache and past_key_values is None:
            raise ArgumentError("past_key_values", "a cache with use_cache=True", "None")
