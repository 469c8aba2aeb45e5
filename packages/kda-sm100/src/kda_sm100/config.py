"""The compile-time configuration of each kernel: whatever changes machine code, and nothing else.

Shapes (B, T, N, H, HV) are dynamic and appear nowhere here. Every field is a plain literal, so that a
configuration can be the key of a cache on disk.
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
    "OutputConfig",
    "PrepareConfig",
    "SummaryConfig",
]

#: What the kernels are compiled for. The preparation compiles for sm_90a as well, and runs there in the tests.
ARCHS = ("sm_100a", "sm_103a")

#: SMs of a B200.
SMS = 148

#: Tokens of a chunk.
CHUNKS = (64, 32)


@dataclass(frozen=True)
class PrepareConfig:
    """Variant of the preparation.

    ``chunk``: tokens a chunk. ``gate``: the form of the gate. ``unbounded``: the log decays may lie below -5, so that rows of
    a block have to vote on split factors; False is the promise that they do not. ``gate_dtype``: of g. Raises ValueError
    on a variant that does not exist.
    """

    chunk: int = 64
    gate: Gate = "bounded"
    unbounded: bool = False
    gate_dtype: GateDtype = "bfloat16"

    def __post_init__(self) -> None:
        _check_chunk(self.chunk)
        if self.gate == "softplus" and not self.unbounded:
            raise ValueError("unbounded: a softplus gate has no lower bound; expected True, got False")


@dataclass(frozen=True)
class ChainConfig:
    """Variant of the chain. ``chunk``: as the preparation's. ``states``: bf16 states at the start of chunks are written.
    Raises ValueError on a variant that does not exist."""

    chunk: int = 64
    states: bool = False

    def __post_init__(self) -> None:
        _check_chunk(self.chunk)


@dataclass(frozen=True)
class SummaryConfig:
    """Variant of the summaries of segments. ``chunk``: as the preparation's. Raises ValueError on one that
    does not exist."""

    chunk: int = 64

    def __post_init__(self) -> None:
        _check_chunk(self.chunk)


@dataclass(frozen=True)
class OutputConfig:
    """Variant of the output stage. ``chunk``: tokens a chunk. Raises ValueError on one that does not exist."""

    chunk: int = 64

    def __post_init__(self) -> None:
        _check_chunk(self.chunk)


def _check_chunk(chunk: int) -> None:
    if chunk not in CHUNKS:
        raise ValueError(f"chunk: expected one of {', '.join(map(str, CHUNKS))}, got {chunk}")
