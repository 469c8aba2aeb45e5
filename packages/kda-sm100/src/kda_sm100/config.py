"""The compile-time configuration of each kernel: everything that changes machine code, and nothing else.

Shapes (B, T, N, H, HV) are dynamic and do not appear here. Every field is a plain literal, because a configuration is part of
the key of a cache on disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from kda_cute.records import HEAD_DIM, Gate, GateDtype

__all__ = [
    "ARCHS",
    "CHUNKS",
    "HEAD_DIM",
    "SMS",
    "ChainConfig",
    "Gate",
    "GateDtype",
    "IntraChunkConfig",
    "OutputConfig",
    "SummaryConfig",
]

#: Targets of the kernels. The intra-chunk kernel also compiles for sm_90a, where the tests run it.
ARCHS = ("sm_100a", "sm_103a")

#: SMs of a B200.
SMS = 148

#: Chunk sizes, in tokens.
CHUNKS = (64, 32)


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

    Raises:
        ValueError: the variant does not exist.
    """

    chunk: int = 64
    gate: Gate = "bounded"
    unbounded: bool = False
    gate_dtype: GateDtype = "bfloat16"
    strided: bool = False

    def __post_init__(self) -> None:
        _check_chunk(self.chunk)
        if self.gate == "softplus" and not self.unbounded:
            raise ValueError("unbounded: expected True, because softplus gates are unbounded, got False")


@dataclass(frozen=True)
class ChainConfig:
    """A variant of the chain.

    Attributes:
        chunk: tokens per chunk, one of `CHUNKS`; the records must have the same chunk size.
        states: whether the kernel writes the bf16 states at the start of chunks.
        serving: whether states may be in the slots of a pool, with checkpoints. The kernel is then `kernels.serving`.

    Raises:
        ValueError: the variant does not exist.
    """

    chunk: int = 64
    states: bool = False
    serving: bool = False

    def __post_init__(self) -> None:
        _check_chunk(self.chunk)


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
