"""Stand-ins for the parts of vLLM that `kda_core.integrations.vllm` imports, and a server that drives a layer with them.

The functions have the names and parameters of vLLM 0.33.0, which `tests/integrations/test_signatures.py` compares with the records. If
vLLM itself is installed, `install` only replaces its Triton functions, which need a GPU, and what depends on a running engine.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from kda_core.integrations import vllm as adapter
from kda_core.testing import token_oracle

HEADS, DIM, WIDTH, SLOTS, PADDING = 2, 16, 4, 12, 24
CHANNELS = 3 * HEADS * DIM
NULL_SLOT = 0
MAMBA = "vllm.model_executor.layers.mamba"
INSTALLED = importlib.util.find_spec("vllm") is not None

# ---- vLLM's functions


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    null_block_id: int = 0,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """x [dim, tokens], conv_states [slots, dim, width - 1 + drafts]."""
    out = torch.empty_like(x)
    if isinstance(x, FakeTensor):
        return out
    assert cache_indices is not None and has_initial_state is not None and activation == "silu"
    history, bounds = weight.shape[1] - 1, query_start_loc.tolist()
    for n, (slot, known) in enumerate(zip(cache_indices.tolist(), has_initial_state.tolist())):
        new = x[:, bounds[n] : bounds[n + 1]]
        old = conv_states[slot, :, :history] if known else x.new_zeros(len(x), history)
        window = torch.cat([old, new], dim=1)
        out[:, bounds[n] : bounds[n + 1]] = _convolved(window, weight)
        if slot > null_block_id:
            conv_states[slot, :, :history] = window[:, -history:]
    return out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = 0,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [tokens, dim]: one token of each request, or with `query_start_loc` its drafts."""
    assert out is not None and conv_state_indices is not None and activation == "silu"
    if isinstance(x, FakeTensor):
        return out
    history, slots = weight.shape[1] - 1, conv_state_indices.tolist()
    drafts = query_start_loc is not None
    bounds = query_start_loc.tolist() if drafts else list(range(len(slots) + 1))
    accepted = num_accepted_tokens.tolist() if num_accepted_tokens is not None else [1] * len(slots)
    for n, slot in enumerate(slots):
        new = x[bounds[n] : bounds[n + 1]].T
        if not new.numel():  # a request that pads a graph
            continue
        old = conv_state[slot, :, accepted[n] - 1 : accepted[n] - 1 + history]
        window = torch.cat([old, new], dim=1)
        out[bounds[n] : bounds[n + 1]] = _convolved(window, weight).T
        if slot > null_block_id:
            conv_state[slot, :, : window.shape[1] - 1] = window[:, 1:]
    return out


def _convolved(window: Tensor, weight: Tensor) -> Tensor:
    y = (window.unfold(1, weight.shape[1], 1) * weight.unsqueeze(1)).sum(-1)
    return y * torch.sigmoid(y)


@dataclass(frozen=True)
class MambaPrefillCheckpointExporter:
    state_len: int | None = None

    def export(
        self,
        checkpoint: Any,
        *,
        raw_qkv: Tensor,
        conv_state: Tensor,
        cu_seqlens: Tensor,
        recurrent_checkpoint: Tensor | None = None,
        recurrent_state: Tensor | None = None,
        recurrent_rows: Tensor | None = None,
        token_indices: Tensor | None = None,
    ) -> None:
        """Without `recurrent_checkpoint` only the states of the convolution are stored."""
        assert recurrent_checkpoint is None
        if isinstance(raw_qkv, FakeTensor):
            return
        length = conv_state.shape[-1] if self.state_len is None else self.state_len
        rows = zip(
            checkpoint.checkpoint_offsets.tolist(), checkpoint.state_indices.tolist(), cu_seqlens.tolist()
        )
        for offset, slot, start in rows:
            if offset > 0 and slot != NULL_SLOT:
                conv_state[slot, :, :length] = raw_qkv[start + offset - length : start + offset].T


def eager_break_during_capture(fn: Any) -> Any:
    return fn


class PluggableLayer(nn.Module):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_layer_cls: type | None = None, name: str | None = None) -> Any:
        assert _decorated_layer_cls is not None and name not in op_registry_oot
        op_registry_oot[name] = _decorated_layer_cls
        return _decorated_layer_cls


op_registry_oot: dict[str | None, type] = {}


@dataclass(frozen=True)
class Spec:
    """The fields of vLLM's ``MambaSpec`` that concern checkpoints."""

    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int | None = None


class KimiK3DeltaAttention(PluggableLayer):
    """What the adapter uses of vLLM's layer."""

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix

    def get_kv_cache_spec(self, vllm_config: Any) -> Spec:
        return Spec()

    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        core_attn_out.fill_(42.0)


class KimiGatedDeltaNetAttention(KimiK3DeltaAttention):
    pass


# ---- installation


def install(monkeypatch: Any) -> SimpleNamespace:
    """Puts the stand-ins in place, and returns what a test changes: ``context``, ``envs``, ``platform`` and ``registry``."""
    installed = SimpleNamespace(
        context=SimpleNamespace(attn_metadata=None),
        envs=SimpleNamespace(VLLM_PLUGINS=["kda_core"]),
        platform=SimpleNamespace(is_cuda=lambda: True),
        registry={},
    )
    monkeypatch.setattr(sys.modules[__name__], "op_registry_oot", installed.registry)
    members: dict[str, dict[str, Any]] = {
        "vllm": {
            "envs": installed.envs,
            "platforms": SimpleNamespace(current_platform=installed.platform),
        },
        "vllm.forward_context": {"get_forward_context": lambda: installed.context},
        "vllm.model_executor.custom_op": {"op_registry_oot": installed.registry},
        f"{MAMBA}.ops.causal_conv1d": {
            "causal_conv1d_fn": causal_conv1d_fn,
            "causal_conv1d_update": causal_conv1d_update,
        },
        f"{MAMBA}.checkpoint": {"MambaPrefillCheckpointExporter": MambaPrefillCheckpointExporter},
        f"{MAMBA}.mamba_utils": {"is_conv_state_dim_first": lambda: False},
    }
    if INSTALLED:
        for path in (*members, *(replaced.module for replaced in adapter.LAYERS.values())):
            importlib.import_module(path)  # vLLM reads its own platform while it is imported
    else:
        members["vllm.model_executor.custom_op"]["PluggableLayer"] = PluggableLayer
        members["vllm.compilation.breakable_cudagraph"] = {
            "eager_break_during_capture": eager_break_during_capture
        }
        for name, replaced in adapter.LAYERS.items():
            members[replaced.module] = {name: globals()[name]}
        for path in members:
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in sys.modules:
                    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for path, values in members.items():
        for name, value in values.items():
            monkeypatch.setattr(sys.modules[path], name, value, raising=INSTALLED)
    return installed


# ---- a server of one layer


@dataclass
class Request:
    """The tokens of a request, and the slots that it owns: one for each draft.

    Attributes:
        accepted: how many drafts of its last step were accepted; its state is in ``slots[accepted - 1]``.
    """

    slots: list[int]
    qkv: Tensor = field(default_factory=lambda: torch.empty(0, CHANNELS))
    g: Tensor = field(default_factory=lambda: torch.empty(0, HEADS, DIM))
    beta: Tensor = field(default_factory=lambda: torch.empty(0, HEADS))
    accepted: int = 1

    def __len__(self) -> int:
        return len(self.qkv)

    def extended(self, qkv: Tensor, g: Tensor, beta: Tensor) -> Request:
        """Returns the request with further tokens."""
        joined = (torch.cat(pair) for pair in ((self.qkv, qkv), (self.g, g), (self.beta, beta)))
        return Request(self.slots, *joined, self.accepted)

    def shortened(self, n: int) -> Request:
        """Returns the request with its first n tokens."""
        return Request(self.slots, self.qkv[:n], self.g[:n], self.beta[:n], self.accepted)


def new_layer(
    layer_class: type,
    *,
    num_spec: int = 0,
    bound: float | None = -5.0,
    state_dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Any:
    """Returns a layer with random weights, without what its constructor needs of a running engine."""
    layer: Any = object.__new__(layer_class)
    nn.Module.__init__(layer)
    rng = torch.Generator().manual_seed(1)
    attributes = {
        "prefix": "layer",
        "local_num_heads": HEADS,
        "head_dim": DIM,
        "num_spec": num_spec,
        "use_recoverssm": False,
        "gate_lower_bound": bound,
        "model_config": SimpleNamespace(dtype=torch.float32),
        "get_state_dtype": lambda: (torch.float32, state_dtype),
        "A_log": nn.Parameter(torch.rand(HEADS, generator=rng)),
        "dt_bias": nn.Parameter(torch.randn(HEADS * DIM, generator=rng)),
        "conv1d": SimpleNamespace(
            weight=nn.Parameter(torch.randn(CHANNELS, 1, WIDTH, generator=rng) / 2), bias=None
        ),
        "o_norm": lambda o, gate: o * torch.sigmoid(gate),
        "_kda_core_wanted": adapter.Modes(True, True, True),
        "_kda_core_modes": None,
    }
    for name, value in (attributes | more).items():
        setattr(layer, name, value)
    return layer


class Server:
    """Runs batches of requests on one layer in vLLM's layouts, and compares outputs and states with the oracle of whole requests."""

    def __init__(self, layer: Any, context: SimpleNamespace, dtype: torch.dtype = torch.float32) -> None:
        self.layer, self.context = layer, context
        self.rng = torch.Generator().manual_seed(2)
        size = HEADS * DIM * DIM
        self.buffer = torch.full((SLOTS, size + PADDING), torch.nan, dtype=dtype)  # the null slot too
        self.pool = self.buffer[:, :size].unflatten(1, (HEADS, DIM, DIM))
        self.conv = torch.full((SLOTS, WIDTH - 1 + layer.num_spec, CHANNELS), torch.nan)
        layer.kv_cache = (self.conv, self.pool)

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.rng)

    def run(self, metadata: Any, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Runs the layer on random tokens. Returns q, k, v before the convolution, g, beta, and the output before the norm."""
        width = 4 * HEADS * DIM + HEADS
        projected = self.random(tokens, width)
        qkv, beta = projected[:, :CHANNELS], projected[:, -HEADS:]  # views of one projection
        g, gate = self.random(1, tokens, HEADS, DIM), self.random(tokens, HEADS, DIM)
        o = torch.full((1, tokens, HEADS, DIM), torch.nan)
        self.context.attn_metadata = {"layer": metadata}
        self.before = self.buffer.clone()
        self.passed = g, beta, o
        with torch.inference_mode():
            self.layer._forward(mixed_qkv=qkv, g1=g, g2=gate, beta=beta[None], core_attn_out=o)
        return qkv.clone(), g[0], beta.clone(), o[0] / torch.sigmoid(gate)

    def oracle(self, request: Request) -> tuple[Tensor, Tensor]:
        """Returns o [tokens, H, V] and the state [H, V, K] after all tokens of a request, in fp64."""
        weight = self.layer.conv1d.weight.detach().squeeze(1).double()
        window = torch.cat([torch.zeros(WIDTH - 1, CHANNELS), request.qkv]).double().T
        q, k, v = _convolved(window, weight).T.reshape(1, -1, 3, HEADS, DIM).unbind(2)
        o, state, *_ = token_oracle(
            q,
            k,
            v,
            request.g[None],
            request.beta[None],
            A_log=self.layer.A_log.detach(),
            dt_bias=self.layer.dt_bias.detach(),
            lower_bound=self.layer.gate_lower_bound,
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
        )
        return o[0], state[0]

    def check(self, o: Tensor, request: Request, new: int, states: dict[int, int], limit: float) -> None:
        """Compares the outputs of the last `new` tokens, and the slots of `states` after their numbers of tokens."""
        want, _ = self.oracle(request)
        assert far(o, want[len(want) - new :]) < limit
        for slot, length in states.items():
            assert far(self.pool[slot], self.oracle(request.shortened(length))[1]) < limit, (slot, length)

    def check_untouched(self, written: set[int]) -> None:
        """Compares the bits of all slots but the written ones, and of the memory between slots."""
        size = HEADS * DIM * DIM
        for slot in range(SLOTS):
            now, old = self.buffer[slot], self.before[slot]
            start = size if slot in written else 0
            assert torch.equal(now[start:].view(torch.uint8), old[start:].view(torch.uint8)), slot


def far(x: Tensor, want: Tensor) -> float:
    """Returns the largest difference, relative to the largest value that is wanted."""
    assert x.shape == want.shape
    return ((x.double() - want).abs().max() / want.abs().max()).item()
