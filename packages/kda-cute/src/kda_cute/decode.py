"""Decode on a GPU: the configuration of the kernel `kda_cute.device.decode`, and its launch.

Importing this needs torch, but not the DSL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.backend import PreparedLaunch
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape, launch_tensors
from kda_cute import get_kernel
from kda_cute.arguments import Address, Long, address, bound
from kda_cute.host import DTYPES, gate_of
from kda_cute.interface import KernelInterface
from kda_cute.records import HEAD_DIM, Gate, GateDtype, StateDtype

#: Warps of a CTA.
WARPS = 4


class Rows(NamedTuple):
    """Rows of a CTA if states are [V, K]. Few states need many CTAs, to have enough loads in flight. Many states need few CTAs, because
    each CTA computes the factors of a token anew.

    Attributes:
        few: rows if there are few states.
        many: rows if there are many states.
        many_states: number of states (sequences times value heads) from which there are many.
    """

    few: int
    many: int
    many_states: int


#: By the dtype of the states. The fastest on an H200.
ROWS: dict[StateDtype, Rows] = {"float32": Rows(16, 32, 96), "bfloat16": Rows(32, 64, 256)}


@dataclass(frozen=True)
class DecodeConfig:
    """Variant of the kernel.

    Attributes:
        rows: values of a state that a CTA has: 16, 32 or 64; 32 if states are [K, V].
        v_first: whether states are [V, K].
        gate: form of the gate.
        gate_dtype: dtype of g.
        state_dtype: dtype of the states that are read, and of the pool.

    Raises:
        ValueError: the kernel has no such variant.
    """

    rows: int = 32
    v_first: bool = True
    gate: Gate = "bounded"
    gate_dtype: GateDtype = "bfloat16"
    state_dtype: StateDtype = "float32"

    def __post_init__(self) -> None:
        served = (16, 32, 64) if self.v_first else (32,)
        if self.rows not in served:
            raise ValueError(f"rows: expected one of {served}, got {self.rows}")

    @property
    def unbounded(self) -> bool:
        """As `kda_cute.device.intra_chunk.gates.Gate` needs it. A single decay needs no limit, except for softplus."""
        return self.gate == "softplus"


def variants(rows: dict[StateDtype, Rows]) -> tuple[DecodeConfig, ...]:
    """Returns all variants with these numbers of rows."""
    return tuple(
        DecodeConfig(of_cta, v_first, gate, gate_dtype, state_dtype)
        for state_dtype, choice in rows.items()
        for of_cta, v_first in ((choice.few, True), (choice.many, True), (32, False))
        for gate in ("bounded", "softplus", "precomputed")
        for gate_dtype in ("bfloat16", "float32")
    )


#: All variants.
DECODES = variants(ROWS)


def decode_config(shape: ProblemShape, rows: dict[StateDtype, Rows] | None = None) -> DecodeConfig:
    """Returns the variant for a shape. ``rows``: `ROWS` unless given."""
    dtype = DTYPES[torch.float32 if shape.pool is None else shape.pool.dtype]
    choice = (rows or ROWS)[dtype]
    v_first = shape.options.state_v_first
    of_cta = (choice.many if shape.N * shape.HV >= choice.many_states else choice.few) if v_first else 32
    return DecodeConfig(of_cta, v_first, gate_of(shape), DTYPES[shape.g_dtype], dtype)


class DecodeArguments(NamedTuple):
    """Arguments after the leading tensor. Strides, of the batch and of tokens, are in elements."""

    q: Address  # [B, T, H, 128] bf16
    k: Address  # [B, T, H, 128] bf16
    v: Address  # [B, T, HV, 128] bf16
    g: Address  # [B, T, HV, 128]
    beta: Address  # [B, T, HV], elements of beta_bytes
    a_log: Address  # [HV] fp32
    dt_bias: Address  # [HV, 128] fp32
    states: Address  # [slots, HV, 128, 128], those that are read; 0: all are zeros
    offsets: Address  # [N + 1], elements of offset_bytes
    read: Address  # this and the next three: see `kda_cute.device.slots`
    write: Address
    has_initial_state: Address
    accepted: Address
    o: Address  # [B, T, HV, 128] bf16, contiguous
    final_state: Address  # [N, HV, 128, 128] fp32. It may be the memory of states. A prepared launch fixes all that follows
    q_batch: Long
    q_token: Long
    k_batch: Long
    k_token: Long
    v_batch: Long
    v_token: Long
    g_batch: Long
    g_token: Long
    beta_batch: Long
    beta_token: Long
    pitch: Long  # elements between two slots
    slots: Long  # this and the next four: see `kda_cute.device.slots`
    first_slot: Long
    W: int
    index_bytes: int
    writes: int  # whether states are written to slots
    per_token: int  # whether that is the state after every token, and not only the final one
    N: int
    T: int
    H: int
    HV: int
    offset_bytes: int  # 4 or 8; 0: sequences are not packed
    beta_bytes: int  # 2: bf16, 4: fp32
    l2norm: int
    scale: float
    lower_bound: float  # of the bounded gate
    beta_factor: float  # factor on the sigmoid of beta; 0: beta is used without a sigmoid


#: Sequences of a launch that are blocks along z. More of them are blocks along x, because CUDA limits y and z to 65535 blocks.
MOST_ALONG_Z = 65535


def grid(parts: int, x: Any) -> tuple[Any, Any, Any]:
    """Returns the grid: (parts of a state and value heads of a group, key heads, sequences). So CTAs start in the order of a slot's memory,
    and the kernel divides by nothing but the number of parts. With more than `MOST_ALONG_Z` sequences, value heads and sequences change
    places."""
    members = x.HV // x.H
    many = 1 - 1 // (1 + x.N // (MOST_ALONG_Z + 1))
    swap = many * (x.N - members)
    return (parts * (members + swap), x.H, x.N - swap)


#: The interface of `kda_cute.device.decode.DecodeKernel`.
DECODE = KernelInterface(
    "kda_cute.device.decode:DecodeKernel",
    lambda config: DecodeArguments,
    lambda config, x: grid(HEAD_DIM // config.rows, x),
    overlaps=True,
)


class Decode(NamedTuple):
    """The launch of a shape."""

    kernel: Callable[..., Any]
    numbers: tuple[int | float, ...]  # arguments that the shape determines

    def __call__(self, inputs: KdaInputs, outputs: KdaOutputs) -> None:
        """Launches on the current device and stream."""
        given, o = [address(x) for x in launch_tensors(inputs)[:_WITH_SLOTS]], outputs.o
        self.kernel(
            o, *given, *_no_slots(inputs), *map(address, (o, outputs.final_state)), *self._fixed(inputs)
        )

    def prepare(self, inputs: KdaInputs, outputs: KdaOutputs) -> PreparedLaunch:
        """Implements `kda_core.backend.SupportsPrepare.prepare`."""
        kernel, no_slots = bound(self.kernel, *self._fixed(inputs)), _no_slots(inputs)

        def launch(o: Tensor, given: tuple[int, ...], o_at: int, final_state: int, workspace: int) -> None:
            kernel(o, (*given[:_WITH_SLOTS], *no_slots, o_at, final_state))

        return launch

    def _fixed(self, inputs: KdaInputs) -> tuple[int | float, ...]:
        """Returns the arguments behind ``final_state``."""
        return (*token_strides(inputs), *slots_of(inputs), *self.numbers)


#: Of `kda_core.contract.launch_tensors`, the first tensors, which the kernel takes. The last four of them belong to a pool.
_WITH_SLOTS = 13


def _no_slots(inputs: KdaInputs) -> tuple[int, ...]:
    """Returns the arguments from ``read`` to ``accepted`` of a call without a pool, nothing for one over a pool."""
    return (0, 0, 0, 0) if inputs.pool is None else ()


def token_strides(inputs: KdaInputs) -> list[int]:
    """Returns the strides of B and T of q, k, v, g and beta, in elements."""
    x = inputs
    return [stride for y in (x.q, x.k, x.v, x.g, x.beta) for stride in y.stride()[:2]]


def slots_of(inputs: KdaInputs) -> tuple[int, ...]:
    """Returns the arguments of the kernel from ``pitch`` to ``W``. Without a pool they are those of a pool whose state n is that of
    sequence n."""
    pool, s = inputs.pool, inputs.shape
    if pool is None:
        return (s.HV * s.K * s.V, s.N, 0, 1)
    W = pool.read.shape[1] if pool.read.dim() == 2 else 1
    return (pool.states.stride(0), len(pool.states), pool.first_slot, W)


@functools.lru_cache(maxsize=1024)
def make_decode(shape: ProblemShape, arch: str) -> Decode:
    """Returns the launch of a shape for an architecture such as "sm_90a". Compiles its kernel on first use."""
    o, pool = shape.options, shape.pool
    offset_bytes = 0 if shape.index_dtype is None else shape.index_dtype.itemsize
    beta_factor = (2.0 if o.allow_neg_eigval else 1.0) if o.use_beta_sigmoid_in_kernel else 0.0
    facts = (0, 0, 0) if pool is None else (pool.index_dtype.itemsize, int(pool.writes), int(pool.per_token))
    numbers = (
        *facts, shape.N, shape.T, shape.H, shape.HV, offset_bytes, shape.beta_dtype.itemsize,
        int(o.use_qk_l2norm_in_kernel), shape.scale, o.lower_bound or 0.0, beta_factor,
    )  # fmt: skip
    return Decode(get_kernel(DECODE, decode_config(shape), arch), numbers)
