"""The launch configuration of a call: kernel variants and workspace, derived from a `ProblemShape`.

This is arithmetic on metadata. Importing the module needs neither a GPU nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kda_core.contract import ProblemShape
from kda_cute.host import DTYPES, gate_of
from kda_sm100 import layouts
from kda_sm100.config import CHUNKS, ChainConfig, IntraChunkConfig, SummaryConfig


@dataclass(frozen=True)
class LaunchConfig:
    """The kernel variants of one call, and the size of its workspace.

    Calls in segments use the same configuration and `summary`, because the workspace keeps every record in all calls.

    Attributes:
        intra_chunk: variant of the intra-chunk kernel.
        chain: variant of the chain.
        records: number of chunk records in the workspace.
    """

    intra_chunk: IntraChunkConfig
    chain: ChainConfig
    records: int

    @property
    def chunk(self) -> int:
        """Tokens per chunk."""
        return self.chain.chunk

    @property
    def summary(self) -> SummaryConfig:
        """Variant of the summary kernel."""
        return SummaryConfig(self.chunk)

    @property
    def workspace_bytes(self) -> int:
        """Size of the workspace in bytes."""
        return layouts.workspace_bytes(self.records, self.chunk)


@lru_cache(maxsize=1024)
def launch_config(shape: ProblemShape, strided: bool = False, saves: int = 0) -> LaunchConfig:
    """Returns the launch configuration of a shape that `kda_cute.host.refusal` accepts. ``strided``: whether q, k, v, g or beta is not
    contiguous. ``saves``: as in `ChainConfig`.

    The variants do not depend on the batch, so a pinned call needs no configuration of its own. The cache holds the last
    1024 results.
    """
    options = shape.options
    states = options.chunk_size if options.return_intermediate_states else 0
    # Take the longest chunk: a chunk of any length costs four round trips between tensor memory and registers.
    chunk = next(C for C in CHUNKS if states % C == 0)
    intra_chunk = IntraChunkConfig(
        chunk,
        gate_of(shape),
        unbounded=not options.bounded_gate,
        gate_dtype=DTYPES[shape.g_dtype],
        strided=strided,
    )
    slots = layouts.slot_count(shape.B, shape.T, chunk, shape.N if shape.varlen else None)
    chain = ChainConfig(chunk, states > 0, serving=shape.pool is not None, saves=saves)
    return LaunchConfig(intra_chunk, chain, slots * shape.HV)
