"""How a call is served: from a `ProblemShape` to the variants of the kernels and the workspace.

Pure arithmetic on metadata; importing it needs neither a GPU nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kda_core.contract import ProblemShape
from kda_cute.host import DTYPES, gate_of
from kda_sm100 import layouts
from kda_sm100.config import CHUNKS, ChainConfig, PrepareConfig, SummaryConfig


@dataclass(frozen=True)
class Plan:
    """One call: a variant of each kernel, and ``records`` of the workspace. With the summaries it is also
    that of a call whose sequences are segments of others: records are kept anyway."""

    prepare: PrepareConfig
    chain: ChainConfig
    records: int

    @property
    def chunk(self) -> int:
        return self.chain.chunk

    @property
    def summary(self) -> SummaryConfig:
        return SummaryConfig(self.chunk)

    @property
    def workspace_bytes(self) -> int:
        return layouts.workspace_bytes(self.records, self.chunk)


@lru_cache(maxsize=1024)
def plan(shape: ProblemShape) -> Plan:
    """The plan of a shape that is not refused. It is the same for any batch, so that a pinned call is as any other. The
    last 1024 are held."""
    options = shape.options
    states = options.chunk_size if options.return_intermediate_states else 0
    # The longest chunk: the chain's time is hops between tensor memory and registers, as many for any chunk.
    chunk = next(C for C in CHUNKS if states % C == 0)
    prepare = PrepareConfig(chunk, gate_of(shape), not options.bounded_gate, DTYPES[shape.g_dtype])
    slots = layouts.slot_count(shape.B, shape.T, chunk, shape.N if shape.varlen else None)
    return Plan(prepare, ChainConfig(chunk, states > 0), slots * shape.HV)
