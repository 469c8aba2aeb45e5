"""Which kernels serve a call: from a `ProblemShape` to the configurations and the size of the workspace.

Pure arithmetic on metadata; importing it needs neither a GPU nor the DSL. Chunk size and number of warpgroups are those
of the smallest predicted time. The model: the preparation takes a constant time a token and value head; the chain takes
the larger of its latency, a constant time a token of a sequence for each round of CTAs, and of its traffic. Constants
were measured on an H200 (docs/kernels/); they choose, they promise nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kda_core.contract import ProblemShape
from kda_sm90 import layouts
from kda_sm90.config import HEAD_DIM, ChainConfig, Gate, GateDtype, OffsetDtype, PrepareConfig

#: SMs of an H100 SXM and of an H200, one CTA of the chain on each.
SMS = 132

#: ns a token and value head of the preparation, by chunk size.
PREPARE_NS = {64: 0.61, 32: 0.55}

#: ns a token of the chain where memory does not bind, by (chunk size, warpgroups).
CHAIN_NS = {(64, 1): 14.0, (64, 2): 22.5, (32, 1): 18.0, (32, 2): 27.4}

#: Bytes a ns between the chain and memory.
CHAIN_BANDWIDTH = 4100

#: Chunk size where bits may not depend on the rest of the batch (``pin``), and with it on the prediction.
PINNED_CHUNK = 64

_DTYPES: dict[torch.dtype, GateDtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_OFFSETS: dict[torch.dtype | None, OffsetDtype | None] = {
    None: None,
    torch.int32: "int32",
    torch.int64: "int64",
}


@dataclass(frozen=True)
class Plan:
    """The kernels of one call, and how many ``slots`` (chunks, some of them unused) its workspace has."""

    prepare: PrepareConfig
    chain: ChainConfig
    slots: int


def refusal(shape: ProblemShape) -> str | None:
    """None, or why no kernel serves this shape."""
    if (shape.K, shape.V) != (HEAD_DIM, HEAD_DIM):
        return f"K={shape.K}, V={shape.V}; only K=V={HEAD_DIM} is built"
    if shape.dtype is not torch.bfloat16:
        return f"q, k, v in {shape.dtype}; only torch.bfloat16 is built"
    for name, dtype in (("g", shape.g_dtype), ("beta", shape.beta_dtype)):
        if dtype not in _DTYPES:
            return f"{name} in {dtype}; only torch.bfloat16 and torch.float32 are built"
    if max(shape.B * shape.T, plan(shape).slots, 2 * shape.N) * shape.HV >= 2**31:
        return "2^31 or more tokens, chunks, or halves of sequences, times value heads"
    return None


def plan(shape: ProblemShape) -> Plan:
    """The plan of a shape that is not refused."""
    options = shape.options
    states = options.chunk_size if options.return_intermediate_states else 0
    chunk, warpgroups = _fastest(shape, states)
    offsets = _OFFSETS[shape.index_dtype]
    gate = _gate(shape)
    prepare = PrepareConfig(
        chunk=chunk,
        gate=gate,
        a_log=shape.has_A_log,
        dt_bias=shape.has_dt_bias,
        l2norm=options.use_qk_l2norm_in_kernel,
        beta_sigmoid=options.use_beta_sigmoid_in_kernel,
        neg_eigval=options.allow_neg_eigval,
        gate_dtype=_DTYPES[shape.g_dtype],
        beta_dtype=_DTYPES[shape.beta_dtype],
        offsets=offsets,
        vote=not options.bounded_gate,
    )
    stateful = shape.has_initial_state or options.output_final_state or states > 0
    chain = ChainConfig(
        chunk=chunk,
        warpgroups=warpgroups,
        initial_state=shape.has_initial_state,
        final_state=options.output_final_state,
        states=states,
        v_first=options.state_v_first and stateful,
        offsets=offsets,
    )
    slots = layouts.slot_count(shape.B, shape.T, chunk, shape.N if shape.varlen else None)
    return Plan(prepare, chain, slots)


def _gate(shape: ProblemShape) -> Gate:
    if not shape.options.use_gate_in_kernel:
        return "precomputed"
    return "softplus" if shape.options.lower_bound is None else "bounded"


def _fastest(shape: ProblemShape, states: int) -> tuple[int, int]:
    """(chunk size, warpgroups) of the smallest predicted time. Intermediate states need a chunk that divides their
    spacing. The number of warpgroups changes no bit."""
    chunks = [C for C in PREPARE_NS if not states or states % C == 0]
    if shape.options.pin and PINNED_CHUNK in chunks:
        chunks = [PINNED_CHUNK]
    return min(((C, n) for C in chunks for n in (1, 2)), key=lambda kind: predicted_ns(shape, *kind))


def predicted_ns(shape: ProblemShape, chunk: int, warpgroups: int) -> float:
    """Device time of a call by the model above. Packed sequences count as if they were of one length."""
    pairs = shape.N * shape.HV
    tokens = shape.B * shape.T
    rounds = -(-pairs * (2 // warpgroups) // SMS)
    latency = CHAIN_NS[chunk, warpgroups] * rounds * tokens / shape.N
    traffic = (
        tokens * shape.HV * (layouts.workspace_bytes(1, 1, chunk) / chunk + 2 * HEAD_DIM) / CHAIN_BANDWIDTH
    )
    return PREPARE_NS[chunk] * tokens * shape.HV + max(latency, traffic)
