"""How a call is served: from a `ProblemShape` to the variants of the kernels and the workspace.

Pure arithmetic on metadata; importing it needs neither a GPU nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from kda_core.contract import ProblemShape
from kda_sm100 import layouts
from kda_sm100.config import CHUNKS, HEAD_DIM, ChainConfig, Gate, GateDtype, PrepareConfig, SummaryConfig

_DTYPES: dict[torch.dtype, GateDtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


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


def refusal(shape: ProblemShape) -> str | None:
    """None, or why no kernel serves this shape."""
    if (shape.K, shape.V) != (HEAD_DIM, HEAD_DIM):
        return f"K={shape.K}, V={shape.V}; only K=V={HEAD_DIM} is built"
    if shape.dtype is not torch.bfloat16:
        return f"q, k, v in {shape.dtype}; only torch.bfloat16 is built"
    for name, dtype in (("g", shape.g_dtype), ("beta", shape.beta_dtype)):
        if dtype not in _DTYPES:
            return f"{name} in {dtype}; only torch.bfloat16 and torch.float32 are built"
    if (shape.B * shape.T + 64 * shape.N) * shape.HV >= 2**31:
        return "2^31 or more tokens, sequences counted as 64, times value heads"
    return None


@lru_cache(maxsize=1024)
def plan(shape: ProblemShape) -> Plan:
    """The plan of a shape that is not refused. It is the same for any batch, so that a pinned call is as any other. The
    last 1024 are held."""
    options = shape.options
    states = options.chunk_size if options.return_intermediate_states else 0
    # The longest chunk: the chain's time is hops between tensor memory and registers, as many for any chunk.
    chunk = next(C for C in CHUNKS if states % C == 0)
    prepare = PrepareConfig(chunk, _gate(shape), not options.bounded_gate, _DTYPES[shape.g_dtype])
    slots = layouts.slot_count(shape.B, shape.T, chunk, shape.N if shape.varlen else None)
    return Plan(prepare, ChainConfig(chunk, states > 0), slots * shape.HV)


def _gate(shape: ProblemShape) -> Gate:
    if not shape.options.use_gate_in_kernel:
        return "precomputed"
    return "softplus" if shape.options.lower_bound is None else "bounded"
