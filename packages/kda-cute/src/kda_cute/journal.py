"""Decoding with records of tokens on a GPU: the configuration of the kernel `kda_cute.device.journal`, and the launch of it or of
`kda_cute.device.verify`, which `kda_cute.verify` chooses.

Importing this needs torch, but not the DSL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from kda_core.backend import PreparedLaunch
from kda_core.contract import KdaInputs, KdaJournal, KdaOutputs, KdaPool, ProblemShape, launch_tensors
from kda_cute import get_kernel
from kda_cute.arguments import Address, Long, address, bound
from kda_cute.decode import DECODE, DecodeConfig, Rows, decode_config, grid, token_strides, variants
from kda_cute.interface import KernelInterface
from kda_cute.records import StateDtype
from kda_cute.verify import verify_config

#: No number of records is larger: nothing is folded.
NEVER = 2**31 - 1


@dataclass(frozen=True)
class JournalConfig(DecodeConfig):
    """Variant of the kernel, with the fields of `DecodeConfig`."""

    @property
    def unbounded(self) -> bool:
        """As `kda_cute.device.intra_chunk.gates.Gate` needs it. Every log decay is clamped, because records have their sum."""
        return True


#: As `kda_cute.decode.ROWS`.
ROWS: dict[StateDtype, Rows] = {"float32": Rows(16, 64, 96), "bfloat16": Rows(32, 64, 256)}

#: All variants.
JOURNALS = tuple(JournalConfig(**vars(config)) for config in variants(ROWS))


def journal_config(shape: ProblemShape) -> JournalConfig:
    """Returns the variant for a shape."""
    return JournalConfig(**vars(decode_config(shape, ROWS)))


class JournalArguments(NamedTuple):
    """Arguments after the leading tensor. Strides, of the batch and of tokens, are in elements."""

    q: Address  # [N, T, H, 128] bf16
    k: Address  # [N, T, H, 128] bf16
    v: Address  # [N, T, HV, 128] bf16
    g: Address  # [N, T, HV, 128]
    beta: Address  # [N, T, HV], elements of beta_bytes
    a_log: Address  # [HV] fp32
    dt_bias: Address  # [HV, 128] fp32
    states: Address  # [slots, HV, 128, 128]
    read: Address  # [N] slots, elements of index_bytes
    record_u: Address  # [slots, HV, R, 128] fp32
    record_k: Address  # [slots, H, R, 128] bf16
    record_factor: Address  # [slots, H, R] fp32
    record_g: Address  # [slots, HV, R, 128] fp32
    spans: Address  # [slots, 2] int32, or 0
    o: Address  # [N, T, HV, 128] bf16, contiguous. A prepared launch fixes all that follows
    accepted: Address  # [N] int32, or 0: records from row 0 on
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
    slots: Long
    first_slot: Long
    index_bytes: int
    R: int
    most: int  # records of a slot
    fold_above: int  # a slot folds if it has more records than this, with those of the call
    N: int
    T: int
    H: int
    HV: int
    beta_bytes: int  # 2: bf16, 4: fp32
    l2norm: int
    scale: float
    lower_bound: float  # of the bounded gate
    beta_factor: float  # factor on the sigmoid of beta; 0: beta is used without a sigmoid


#: The interface of `kda_cute.device.journal.JournalKernel`.
JOURNAL = KernelInterface(
    "kda_cute.device.journal:JournalKernel", lambda config: JournalArguments, DECODE.grid, overlaps=True
)

#: The interface of `kda_cute.device.verify.VerifyKernel`.
VERIFY = KernelInterface(
    "kda_cute.device.verify:VerifyKernel",
    lambda config: JournalArguments,
    # In the order of a slot's memory, unless slots may have records; no divisions in the kernel
    lambda config, x: (x.N, x.H, x.HV // x.H) if config.records else grid(1, x),
    overlaps=True,
)


class JournalLaunch(NamedTuple):
    """The launches of a shape, on the current device and stream."""

    kernel: Callable[..., Any]
    numbers: tuple[int | float, ...]  # arguments that the shape determines

    def __call__(self, inputs: KdaInputs, outputs: KdaOutputs) -> None:
        """Launches `kda_core.backend.SupportsJournal.journal_decode`."""
        given, o = tuple(map(address, launch_tensors(inputs))), outputs.o
        self.kernel(o, *given[:8], given[9], *given[17:], o.data_ptr(), *self._fixed(inputs))

    def prepare(self, inputs: KdaInputs, outputs: KdaOutputs) -> PreparedLaunch:
        """Implements `kda_core.backend.SupportsPrepare.prepare`."""
        kernel = bound(self.kernel, *self._fixed(inputs))

        def launch(o: Tensor, given: tuple[int, ...], o_at: int, final_state: int, workspace: int) -> None:
            # to the states; the slots that are read; the records
            kernel(o, (*given[:8], given[9], *given[17:], o_at))

        return launch

    def _fixed(self, inputs: KdaInputs) -> tuple[int | float, ...]:
        """Returns the arguments behind ``o``."""
        x = inputs
        assert x.pool is not None and x.journal is not None  # core sets them with the entry
        return (0, *token_strides(x), *slots_of(x.pool), *self.numbers)

    def fold(self, pool: KdaPool, journal: KdaJournal) -> None:
        """Launches `kda_core.backend.SupportsJournal.journal_fold`."""
        x = journal
        tensors = (pool.states, pool.read, x.u, x.k, x.k_factor, x.G, x.spans, None, x.accepted)
        self.kernel(x.k, *[0] * 7, *map(address, tensors), *[0] * 10, *slots_of(pool), *self.numbers)


def slots_of(pool: KdaPool) -> tuple[int, ...]:
    """Returns the arguments of the kernel from ``pitch`` to ``first_slot``."""
    return (pool.states.stride(0), len(pool.states), pool.first_slot)


@functools.lru_cache(maxsize=1024)
def make_journal(shape: ProblemShape, arch: str) -> JournalLaunch:
    """Returns the launch of a shape for an architecture such as "sm_90a". Compiles its kernel on first use."""
    o, pool, journal = shape.options, shape.pool, shape.journal
    assert pool is not None and journal is not None
    beta_factor = (2.0 if o.allow_neg_eigval else 1.0) if o.use_beta_sigmoid_in_kernel else 0.0
    if shape.T == 0:  # a fold, of all that has records
        most, fold_above = journal.length if journal.has_spans else journal.rows, 0
    else:
        most, fold_above = (journal.length, journal.length) if journal.has_spans else (0, NEVER)
    numbers = (
        pool.index_dtype.itemsize, journal.rows, most, fold_above, shape.N, shape.T, shape.H, shape.HV,
        shape.beta_dtype.itemsize, int(o.use_qk_l2norm_in_kernel), shape.scale, o.lower_bound or 0.0, beta_factor,
    )  # fmt: skip
    if (config := verify_config(shape)) is not None:
        return JournalLaunch(get_kernel(VERIFY, config, arch), numbers)
    return JournalLaunch(get_kernel(JOURNAL, journal_config(shape), arch), numbers)
