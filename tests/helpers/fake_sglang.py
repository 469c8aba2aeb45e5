"""Stand-ins for the parts of SGLang that `kda_core.integrations.sglang` imports.

They have the names and parameters of SGLang 0.5.23, which `tests/integrations/test_signatures.py` compares with the records. If SGLang
itself is installed, `install` replaces only what depends on a running engine or on a GPU.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any, ClassVar

INSTALLED = importlib.util.find_spec("sglang") is not None
LINEAR = "sglang.srt.layers.attention.linear"


class LinearAttnKernelBase(ABC):
    uses_state_checkpoints = False
    supports_fused_chain_verify = False
    supports_strided_target_verify_qkv = False
    supports_track_state_snapshot = False

    @abstractmethod
    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **kwargs):
        """Has no body."""

    @abstractmethod
    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **kwargs):
        """Has no body."""

    def target_verify(
        self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc, **kwargs
    ):
        raise NotImplementedError


class HookType(enum.Enum):
    AROUND = "around"


class HookRegistry:
    hooks: ClassVar[list[tuple[str, Any, HookType]]] = []

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AROUND, *, source=None):
        cls.hooks.append((target, hook, hook_type))


class LinearAttnKernelBackend(enum.Enum):
    TRITON = "triton"
    CUTEDSL = "cutedsl"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value):
        return cls.CUSTOM

    def is_custom(self):
        return self is LinearAttnKernelBackend.CUSTOM


class KDAKernelDispatcher:
    """What the hook wraps. Its kernels are names here."""

    def __init__(self, decode_backend, prefill_backend, verify_backend):
        if LinearAttnKernelBackend.CUSTOM in (decode_backend, prefill_backend, verify_backend):
            raise ValueError("Unsupported KDA backend: custom")
        self.triton_kernel = "triton kernel"
        self.decode_kernel = f"{decode_backend.value} kernel"
        self.extend_kernel = f"{prefill_backend.value} kernel"
        self.verify_kernel = f"{verify_backend.value} kernel"
        self.supports_packed_decode = self.supports_packed_decode_safe_gate = False


def install(monkeypatch: Any) -> SimpleNamespace:
    """Puts the stand-ins in place, and returns what a test reads or changes: ``choices``, ``hooks`` and the ``options`` of a server."""
    options = SimpleNamespace(
        linear_attn_backend="triton",
        linear_attn_decode_backend=None,
        linear_attn_prefill_backend=None,
        linear_attn_verify_backend=None,
    )
    choices, hooks = ["triton", "cutedsl"], []
    monkeypatch.setattr(HookRegistry, "hooks", hooks)
    members: dict[str, dict[str, Any]] = {
        "sglang.srt.arg_groups.choices": {
            "LINEAR_ATTN_KERNEL_BACKEND_CHOICES": choices,
            "add_linear_attn_kernel_backend_choices": choices.extend,
        },
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.runtime_context": {"get_exec": lambda: SimpleNamespace(mamba=options)},
    }
    if INSTALLED:
        for path in members:
            importlib.import_module(path)
    else:
        members[f"{LINEAR}.kernels.kernel_backend"] = {"LinearAttnKernelBase": LinearAttnKernelBase}
        for path in members:
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in sys.modules:
                    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
                if end > 1:
                    parent = sys.modules[".".join(parts[: end - 1])]
                    monkeypatch.setattr(parent, parts[end - 1], sys.modules[name], raising=False)
    for path, values in members.items():
        for name, value in values.items():
            monkeypatch.setattr(sys.modules[path], name, value, raising=INSTALLED)
    return SimpleNamespace(choices=choices, hooks=hooks, options=options)
