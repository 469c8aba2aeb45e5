"""The compile-time configuration of each kernel: everything that changes machine code, and nothing else.

Shapes (B, T, N, H, HV) are dynamic and do not appear here. Every field is a plain literal, because a configuration is part of
the key of a cache on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kda_cute.records import HEAD_DIM, Gate, GateDtype

__all__ = [
    "ARCHS",
    "CHUNKS",
    "HEAD_DIM",
    "MODES",
    "SMS",
    "SPACINGS",
    "BackwardChainConfig",
    "ChainConfig",
    "Gate",
    "GateDtype",
    "IntraChunkConfig",
    "Mode",
    "OutputConfig",
    "SummaryConfig",
]

#: Targets of the kernels. The intra-chunk kernel also compiles for sm_90a, where the tests run it.
ARCHS = ("sm_100a", "sm_103a")

#: SMs of a B200.
SMS = 148

#: Chunk sizes, in tokens.
CHUNKS = (64, 32)

#: Tokens between the states that a forward saves for the backward: the default, and with ``disable_recompute``.
SPACINGS = (512, 64)

Mode = Literal["checkpoint", "recompute", "reverse", "reverse_summarize"]

#: Modes of `BackwardChainConfig`.
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class IntraChunkConfig:
    """A variant of the intra-chunk kernel. It satisfies `kda_cute.records.IntraChunkConfig`.

    Attributes:
        chunk: tokens per chunk, one of `CHUNKS`.
        gate: form of the gate.
        unbounded: whether log decays may lie below -5, so that the warps vote on split factors. False is the caller's
            promise that none does.
        gate_dtype: dtype of g.
        strided: whether the tokens of q, k, v, g and beta may be at any distance.
        backward: whether the records are those of a slab of a backward, with T. Requires chunks of 64 and not ``strided``.

    Raises:
        ValueError: the variant does not exist.
    """

    chunk: int = 64
    gate: Gate = "bounded"
    unbounded: bool = False
    gate_dtype: GateDtype = "bfloat16"
    strided: bool = False
    backward: bool = False

    def __post_init__(self) -> None:
        _check_chunk(self.chunk)
        if self.backward and (self.chunk != 64 or self.strided):
            raise ValueError(
                f"backward: expected False unless chunk=64 and strided=False, got True with chunk={self.chunk} and "
                f"strided={self.strided}"
            )
        if self.gate == "softplus" and not self.unbounded:
            raise ValueError("unbounded: expected True, because softplus gates are unbounded, got False")


@dataclass(frozen=True)
class ChainConfig:
    """A variant of the chain.

    Attributes:
        chunk: tokens per chunk, one of `CHUNKS`; the records must have the same chunk size.
        states: whether the kernel writes the bf16 states at the start of chunks.
        serving: whether states may be in the slots of a pool, with checkpoints. The kernel is then `kernels.serving`.
        saves: tokens between the states that the kernel saves for the backward: 512 (fp32), or 64 (bf16, and R); 0: none. Otherwise the
            kernel is `kernels.training`. Requires chunks of 64, without ``states`` and ``serving``.

    Raises:
        ValueError: the variant does not exist.
    """

    chunk: int = 64
    states: bool = False
    serving: bool = False
    saves: int = 0

    def __post_init__(self) -> None:
        _check_chunk(self.chunk)
        if self.saves not in (0, *SPACINGS):
            raise ValueError(f"saves: expected 0, {' or '.join(map(str, SPACINGS))}, got {self.saves}")
        if self.saves and (self.chunk, self.states, self.serving) != (64, False, False):
            raise ValueError(
                f"saves: expected 0 unless chunk=64, states=False and serving=False, got {self.saves} with chunk={self.chunk}, "
                f"states={self.states} and serving={self.serving}"
            )


@dataclass(frozen=True)
class BackwardChainConfig:
    """A variant of a chain of the backward.

    Attributes:
        mode: ``checkpoint``: from S before a slab to S before every 512 tokens. ``recompute``: from those to S before every 64 tokens,
            and R. ``reverse``: the gradients of states and of v. ``reverse_summarize``: how segments act on gradients of states.

    Raises:
        ValueError: the variant does not exist.
    """

    mode: Mode = "reverse"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {self.mode!r}")


@dataclass(frozen=True)
class SummaryConfig:
    """A variant of the summary kernel.

    Attributes:
        chunk: tokens per chunk, one of `CHUNKS`; the records must have the same chunk size.

    Raises:
        ValueError: the variant does not exist.
    """

    chunk: int = 64

    def __post_init__(self) -> None:
        _check_chunk(self.chunk)


@dataclass(frozen=True)
class OutputConfig:
    """A variant of the output kernel.

    Attributes:
        chunk: tokens per chunk, one of `CHUNKS`.

    Raises:
        ValueError: the variant does not exist.
    """

    chunk: int = 64

    def __post_init__(self) -> None:
        _check_chunk(self.chunk)


def _check_chunk(chunk: int) -> None:
    if chunk not in CHUNKS:
        raise ValueError(f"chunk: expected one of {', '.join(map(str, CHUNKS))}, got {chunk}")
