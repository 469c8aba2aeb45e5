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
from kda_core.contract import KdaInputs, KdaJournal, KdaOutputs, KdaPool, ProblemShape
from kda_cute import get_kernel
from kda_cute.arguments import address
from kda_cute.decode import DecodeConfig, Rows, decode_config, token_strides, variants
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


class JournalLaunch(NamedTuple):
    """The launches of a shape, on the current device and stream."""

    kernel: Callable[..., Any]
    numbers: tuple[int | float, ...]  # arguments that the shape determines

    def __call__(self, inputs: KdaInputs, outputs: KdaOutputs) -> None:
        """Launches `kda_core.backend.SupportsJournal.journal_decode`."""
        x = inputs
        self.prepare(inputs, outputs)(x.q, x.k, x.v, x.g, x.beta, outputs.o)

    def prepare(self, inputs: KdaInputs, outputs: KdaOutputs) -> PreparedLaunch:
        """Implements `kda_core.backend.SupportsPrepare.prepare`."""
        x, kernel = inputs, self.kernel
        assert x.pool is not None and x.journal is not None  # core sets them with the entry
        fixed = address(x.A_log), address(x.dt_bias)
        rest = (*token_strides(x), *records_of(x.pool, x.journal), *self.numbers)

        def launch(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, o: Tensor) -> None:
            tokens = (q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr())
            kernel(o, *tokens, *fixed, o.data_ptr(), *rest)

        return launch

    def fold(self, pool: KdaPool, journal: KdaJournal) -> None:
        """Launches `kda_core.backend.SupportsJournal.journal_fold`."""
        self.kernel(journal.k, *[0] * 18, *records_of(pool, journal), *self.numbers)


def records_of(pool: KdaPool, journal: KdaJournal) -> tuple[int, ...]:
    """Returns the arguments of the kernel from ``states`` to ``accepted``."""
    tensors = (journal.u, journal.k, journal.k_factor, journal.G, journal.spans, journal.accepted)
    slots = (len(pool.states), pool.first_slot)
    states = (pool.states.data_ptr(), pool.states.stride(0), pool.read.data_ptr())
    return (*states, *slots, *(address(y) for y in tensors))


@functools.lru_cache(maxsize=1024)
def make_journal(shape: ProblemShape, arch: str) -> JournalLaunch:
    """Returns the launch of a shape for an architecture such as "sm_90a". Compiles its kernel on first use."""
    from kda_cute.device.journal import JournalKernel
    from kda_cute.device.verify import VerifyKernel

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
        return JournalLaunch(get_kernel(VerifyKernel, config, arch), numbers)
    return JournalLaunch(get_kernel(JournalKernel, journal_config(shape), arch), numbers)
