"""The compile-time configuration of each kernel: whatever changes machine code, and nothing else.

Shapes (B, T, N, H, HV) are dynamic and appear nowhere here. Every field is a plain literal, so that a
configuration can be the key of a cache on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Channels of a query or key head, and of a value head. The kernels are written for these.
HEAD_DIM = 128

#: Rows of a diagonal block: the span in which decay may be split into a row and a column factor.
BLOCK = 16

#: How g becomes a log decay. ``precomputed``: it is one. ``bounded``: ``lower_bound * sigmoid(exp(A_log) *
#: (g + dt_bias))``. ``softplus``: ``-exp(A_log) * softplus(g + dt_bias)``, linear above 20.
Gate = Literal["precomputed", "bounded", "softplus"]
GateDtype = Literal["bfloat16", "float32"]
OffsetDtype = Literal["int32", "int64"]


@dataclass(frozen=True)
class PrepareConfig:
    """Variant of the preparation kernel.

    ``chunk``: tokens a chunk, 32 or 64. ``gate``, ``a_log``, ``dt_bias``: the form of the gate and which of
    its parameters are there (never with a precomputed one; softplus needs ``A_log``). ``l2norm``: normalise
    q and k. ``beta_sigmoid``: beta holds logits; ``neg_eigval``: twice the sigmoid. ``gate_dtype`` and
    ``beta_dtype``: of g and beta. ``offsets``: dtype of ``cu_seqlens``, or None for sequences of one length.
    ``vote``: the log decays may lie below -5, so that rows of a block have to vote on split factors; False is
    the promise that they do not. Raises ValueError on a combination that does not exist.
    """

    chunk: int = 64
    gate: Gate = "bounded"
    a_log: bool = True
    dt_bias: bool = True
    l2norm: bool = True
    beta_sigmoid: bool = True
    neg_eigval: bool = False
    gate_dtype: GateDtype = "bfloat16"
    beta_dtype: GateDtype = "bfloat16"
    offsets: OffsetDtype | None = None
    vote: bool = False

    def __post_init__(self) -> None:
        if self.chunk not in (32, 64):
            raise ValueError(f"chunk: expected 32 or 64, got {self.chunk}")
        if self.gate == "precomputed" and (self.a_log or self.dt_bias):
            raise ValueError("gate: a precomputed log decay takes neither A_log nor dt_bias")
        if self.gate == "softplus" and not self.a_log:
            raise ValueError("a_log: the softplus gate needs A_log")
        if self.neg_eigval and not self.beta_sigmoid:
            raise ValueError("neg_eigval: only with beta_sigmoid")


@dataclass(frozen=True)
class ChainConfig:
    """Variant of the chain kernel.

    ``chunk``: tokens a chunk, 32 or 64. ``warpgroups``: 1, a CTA for each half of V, is faster where CTAs are
    few; 2, both halves in one CTA, reads w, Qd, Kg and Aqk once and is faster where memory is the limit.
    ``initial_state``, ``final_state``: read and write fp32 states. ``states``: tokens between the bf16 states
    that are written, a multiple of ``chunk``; 0 for none. ``v_first``: all states are [V, K], not [K, V].
    ``offsets``: dtype of ``cu_seqlens``, or None for sequences of one length. Raises ValueError on a
    combination that does not exist.
    """

    chunk: int = 64
    warpgroups: int = 1
    initial_state: bool = False
    final_state: bool = True
    states: int = 0
    v_first: bool = False
    offsets: OffsetDtype | None = None

    def __post_init__(self) -> None:
        if self.chunk not in (32, 64):
            raise ValueError(f"chunk: expected 32 or 64, got {self.chunk}")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups: expected 1 or 2, got {self.warpgroups}")
        if self.states < 0 or self.states % self.chunk:
            raise ValueError(f"states: expected a multiple of {self.chunk}, got {self.states}")
        if self.v_first and not (self.initial_state or self.final_state or self.states):
            raise ValueError("v_first: there is no state whose layout it could be")
