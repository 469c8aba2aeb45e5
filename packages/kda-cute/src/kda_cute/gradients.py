"""The gradients of chunks on a GPU: the configuration of the kernel `kda_cute.device.gradients`, and its arguments.

Importing this needs neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kda_cute.arguments import Address
from kda_cute.records import Gate, GateDtype


@dataclass(frozen=True)
class GradientsConfig:
    """Variant of the kernel.

    Attributes:
        gate: form of the gate.
        unbounded: whether log decays may lie below -5. False is the caller's promise that none does.
        gate_dtype: dtype of g.

    Raises:
        ValueError: the kernel has no such variant.
    """

    gate: Gate = "bounded"
    unbounded: bool = False
    gate_dtype: GateDtype = "bfloat16"

    def __post_init__(self) -> None:
        if self.gate == "softplus" and not self.unbounded:
            raise ValueError("unbounded: softplus gates are unbounded; set unbounded=True, got False")


_GATES: tuple[tuple[Gate, bool], ...] = (
    ("bounded", False),
    ("bounded", True),
    ("softplus", True),
    ("precomputed", False),
    ("precomputed", True),
)
_DTYPES: tuple[GateDtype, ...] = ("bfloat16", "float32")

#: All variants.
GRADIENT_CONFIGS = tuple(
    GradientsConfig(gate, unbounded, dtype) for gate, unbounded in _GATES for dtype in _DTYPES
)


class GradientsArguments(NamedTuple):
    """Arguments after the tensor ``grad_q``."""

    q: Address  # [B, T, H, 128] bf16
    k: Address  # [B, T, H, 128] bf16
    g: Address  # [B, T, HV, 128]
    beta: Address  # [B, T, HV], elements of beta_bytes
    a_log: Address  # [HV] fp32
    dt_bias: Address  # [HV, 128] fp32
    offsets: Address  # [N + 1], elements of offset_bytes
    grad_o: Address  # [B, T, HV, 128] bf16
    grad_v: Address  # [B, T, HV, 128] bf16: dX
    residual: Address  # [B, T, HV, 128] bf16, rows of residual_row bytes: R. It may be the memory of grad_g
    states: Address  # [slots, HV, 128, 128] bf16: S before every chunk of the slab
    grad_states: Address  # [slots, HV, 128, 128] bf16: dS' behind every chunk of the slab, as images
    grad_q: Address  # [B, T, H, 128] bf16
    grad_k: Address  # [B, T, H, 128] bf16
    grad_g: Address  # [B, T, HV, 128], dtype of g
    grad_beta: Address  # [B, T, HV], dtype of beta
    partials: Address  # [slots, HV, 2, 128] fp32: sums over a chunk for dt_bias, and for A_log
    scratch: Address  # [CTAs, 2, 64 * 128] fp32: dq and dk of the value heads so far, if HV > H
    N: int
    T: int
    H: int
    HV: int
    group: int  # HV / H
    offset_bytes: int
    beta_bytes: int
    l2norm: int
    ctas: int
    first_slot: int  # of the slab, in slots of slot_tokens
    slab_slots: int
    slot_tokens: int  # 64 or 512
    residual_row: int
    state_images: int  # 1: states are images; 0: [K, V]
    scale: float
    lower_bound: float
    beta_factor: float
