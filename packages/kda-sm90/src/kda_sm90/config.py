"""The compile-time configuration of each kernel: whatever changes machine code, and nothing else.

Shapes (B, T, N, H, HV) are dynamic and appear nowhere here. Every field is a plain literal, so that a
configuration can be the key of a cache on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kda_cute.records import HEAD_DIM, Gate, GateDtype

__all__ = [
    "ARCH",
    "HALVES",
    "HEAD_DIM",
    "THREADS",
    "Gate",
    "GateDtype",
    "Mode",
    "PrefillConfig",
]

#: What the kernel is compiled for.
ARCH = "sm_90a"

#: Threads of a CTA: three warpgroups, or groups of 2 * chunk threads that prepare.
THREADS = 384

#: What a launch does. ``whole``: a call. A call whose sequences are cut into segments is two launches: ``summarize``
#: prepares all chunks, keeps their records, and finds how each segment acts on a state; ``run`` is the chains over what
#: was kept, from the segments' initial states.
Mode = Literal["whole", "summarize", "run"]

#: Halves of columns that chains of a mode have, of 64 each: of V, and of M as well.
HALVES: dict[Mode, int] = {"whole": 2, "summarize": 4, "run": 2}


@dataclass(frozen=True)
class PrefillConfig:
    """Variant of the kernel; all else that a call may ask for is decided while it runs.

    ``chunk``: tokens a chunk, 32 or 64. ``warpgroups`` of a chain: 1, a CTA for each half of V, is faster where
    sequences and heads are few; 2, both halves in one CTA, shares the loads. ``gate``: the form of the gate.
    ``unbounded``: the log decays may lie below -5, so that columns of a block have to vote on split factors; False is the
    promise that they do not. ``gate_dtype``: of g. ``states``: bf16 states at the start of chunks are written.
    ``mode``: see `Mode`; ``run`` has no gate, ``summarize`` no states. ``padded``: sequences are packed, and what may follow
    the last one in T (``use_graph``) takes no time; elsewhere it would cost time (docs/kernels/prefill.md, Tried).
    Raises ValueError on a variant that does not exist.
    """

    chunk: int = 64
    warpgroups: int = 1
    gate: Gate = "bounded"
    unbounded: bool = False
    gate_dtype: GateDtype = "bfloat16"
    states: bool = False
    mode: Mode = "whole"
    padded: bool = False

    def __post_init__(self) -> None:
        if self.chunk not in (32, 64):
            raise ValueError(f"chunk: expected 32 or 64, got {self.chunk}")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups: expected 1 or 2, got {self.warpgroups}")
        if self.gate == "softplus" and not self.unbounded:
            raise ValueError("unbounded: a softplus gate has no lower bound; expected True, got False")
        if self.mode == "run" and (self.gate, self.unbounded, self.gate_dtype) != (
            "bounded",
            False,
            "bfloat16",
        ):
            raise ValueError("mode: run has no gate; leave gate, unbounded and gate_dtype as they are")
        if self.mode == "summarize" and self.states:
            raise ValueError("mode: summarize writes no intermediate states")
        if self.mode != "whole" and self.padded:
            raise ValueError("padded: the host knows the lengths of segments")

    @property
    def keeps(self) -> bool:
        """Whether every record has a place of its own, by its slot, instead of one in a ring."""
        return self.mode != "whole"

    @property
    def halves(self) -> int:
        """See `HALVES`."""
        return HALVES[self.mode]
