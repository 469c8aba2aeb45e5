"""Arguments of the kernels, in order, and their interfaces. Importing this module does not import the DSL.

The types are those of `kda_cute.arguments`. The kernels trust all values: the caller has checked them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kda_cute.arguments import Address, joined
from kda_cute.gradients import GradientsArguments
from kda_cute.interface import KernelInterface
from kda_cute.pools import PitchArguments, PoolAddresses, PoolArguments, SegmentArguments
from kda_sm100.config import BackwardChainConfig, IntraChunkConfig


class IntraChunkArguments(NamedTuple):
    """Arguments of the intra-chunk kernel beside the leading tensor. The caller has checked them."""

    q: Address  # [B, T, H, 128] bf16
    k: Address  # [B, T, H, 128] bf16
    v: Address  # [B, T, HV, 128] bf16
    g: Address  # [B, T, HV, 128], dtype of the configuration
    beta: Address  # [B, T, HV]
    a_log: Address  # [HV] fp32
    dt_bias: Address  # [HV, 128] fp32
    offsets: Address  # [N + 1], integers of offset_bytes bytes
    workspace: Address  # records, as `kda_sm100.layouts` describes
    N: int  # sequences
    T: int  # tokens per sequence; with offsets, tokens of all sequences
    H: int  # query and key heads
    HV: int  # value heads, a multiple of H
    offset_bytes: int  # 4 or 8; 0: sequences are rows of B, not packed
    beta_bytes: int  # 2: bf16; 4: fp32
    l2norm: int  # 1: normalise q and k
    scale: float  # factor of q
    lower_bound: float  # of the bounded gate
    beta_factor: float  # factor of sigmoid(beta); 0: beta is used as it is


class ChainArguments(NamedTuple):
    """Arguments of the chain and of the summary kernel beside the leading tensor. The caller has checked them."""

    offsets: Address  # [N + 1], integers of offset_bytes bytes
    initial_state: Address  # [N, HV, 128, 128] fp32
    o: Address  # [B, T, HV, 128] bf16
    final_state: Address  # [N, HV, 128, 128] fp32
    states: Address  # [state_count, HV, 128, 128] bf16
    transitions: Address  # [N, HV, 128, 128] fp32; summary kernel only
    workspace: Address  # records, as `kda_sm100.layouts` describes
    state_count: int
    N: int  # sequences
    T: int  # tokens per sequence; with offsets, tokens of all sequences
    HV: int  # value heads
    offset_bytes: int  # 4 or 8; 0: sequences are rows of B, not packed
    v_first: int  # 1: fp32 and bf16 states are [V, K]; 0: [K, V]
    every: int  # chunks from one bf16 state to the next


class SlabArguments(NamedTuple):
    """Further arguments of the kernels of a backward, which compute a *slab*: some consecutive slots of every head."""

    records: int  # of the workspace: slots of 64 tokens of a slab, times HV
    first_slot: int  # of the slab, in slots of slot_tokens
    slab_slots: int
    slot_tokens: int  # 64 or 512


class SavedArguments(NamedTuple):
    """Further arguments of the chain that saves for a backward. Its ``states`` are `KdaOutputs.saved_states`: fp32 before every 512
    tokens, or bf16 before every 64."""

    residual: Address  # [B, T, HV, 128] bf16; with states before every 64 tokens


class SlabChainArguments(NamedTuple):
    """Arguments of the chains of a backward beside the leading tensor and those of `SlabArguments`. Arrays of chunks begin with the
    slab. The states that pass between slabs are [2, HV, 128, 128] in the mode reverse_summarize, those of N and of M^T.
    """

    offsets: Address  # [N + 1], integers of offset_bytes bytes
    entry: Address  # [N, HV, 128, 128] fp32: initial states; in both reverse modes, gradients of the final states
    exit: Address  # [N, HV, 128, 128] fp32; both reverse modes: gradients of the initial states
    transitions: Address  # [N, HV, 128, 128] fp32: M^T; mode reverse_summarize
    from_slab: Address  # [HV, 128, 128] fp32, [V, K]: the state of the sequence that continues in the slab before this one in time
    to_slab: Address  # the same, written
    checkpoints: Address  # [slots of 512 tokens, HV, 128, 128] fp32, [K, V], of all slabs; written in the mode checkpoint
    states: Address  # [chunks, HV, 128, 128] bf16, written: S, [K, V]; mode reverse: dS', as images
    residual: Address  # [B, T, HV, 128] bf16, rows of residual_row bytes; written in the mode recompute
    grad_o: Address  # [B, T, HV, 128] bf16; both reverse modes
    o: Address  # [B, T, HV, 128] bf16: dX; mode reverse
    workspace: Address  # records with T, as `kda_sm100.layouts` describes
    residual_row: int
    N: int  # sequences
    T: int  # tokens per sequence; with offsets, tokens of all sequences
    HV: int  # value heads
    offset_bytes: int  # 4 or 8; 0: sequences are rows of B, not packed
    v_first: int  # 1: entry and exit are [V, K]; 0: [K, V]


#: Those of the intra-chunk kernel of a backward, of the chain that saves, and of the chains of a backward.
SlabIntraChunkArguments = joined("SlabIntraChunkArguments", IntraChunkArguments, SlabArguments)
SavingArguments = joined("SavingArguments", ChainArguments, SavedArguments)
BackwardChainArguments = joined("BackwardChainArguments", SlabChainArguments, SlabArguments)

#: Those of the intra-chunk kernel for strided inputs.
StridedArguments = joined("StridedArguments", IntraChunkArguments, PitchArguments)

#: Those of the chain for serving, which does not use `initial_state` and `final_state` of the chain, and those of the kernels of segments
#: over a pool, which do.
ServingArguments = joined("ServingArguments", PoolAddresses, ChainArguments, PoolArguments)
PoolSegmentArguments = joined("PoolSegmentArguments", ServingArguments, SegmentArguments)


class OutputArguments(NamedTuple):
    """Arguments of the output kernel beside the leading tensor. The caller has checked them."""

    q: Address  # [B, T, H, 128] bf16
    v_new: Address  # [B, T, HV, 128] bf16
    g: Address  # [B, T, HV, 128] fp32, log decays (base e), summed from the start of the chunk
    a: Address  # [B, T, HV, C] bf16
    h: Address  # [states, HV, 128, 128] bf16
    o: Address  # [B, T, HV, 128] bf16
    chunks: (
        Address  # [chunk_count, 4] int32: first token in B*T, tokens (0: empty slot), number of the state, 0
    )
    chunk_count: int
    H: int  # query heads
    HV: int  # value heads, a multiple of H
    scale: float  # factor of q


def _slots(config: IntraChunkConfig, x: Any) -> Any:
    """Returns the slots of a head, as `layouts.slot_count` and `kda_cute.device.varlen.slots` do, without a branch."""
    packed = (x.offset_bytes + 4) // 8
    return (1 - packed) * x.N * ((x.T + config.chunk - 1) // config.chunk) + packed * (
        x.T // config.chunk + x.N
    )


def _intra_chunk_arguments(config: IntraChunkConfig) -> Any:
    if config.backward:
        return SlabIntraChunkArguments
    return StridedArguments if config.strided else IntraChunkArguments


INTRA_CHUNK = KernelInterface(
    "kda_sm100.kernels.intra_chunk:IntraChunkKernel",
    _intra_chunk_arguments,
    lambda config, x: (x.records if config.backward else _slots(config, x) * x.HV, 1, 1),
)

CHAIN = KernelInterface(
    "kda_sm100.kernels.chain:ChainKernel",
    lambda config: ChainArguments,
    lambda config, x: (x.N * x.HV, 1, 1),
)

SERVING_CHAIN = KernelInterface(
    "kda_sm100.kernels.serving:ServingChainKernel", lambda config: ServingArguments, CHAIN.grid
)

SAVING_CHAIN = KernelInterface(
    "kda_sm100.kernels.saving:SavingChainKernel", lambda config: SavingArguments, CHAIN.grid
)

_CLASSES = {
    "checkpoint": "kda_sm100.kernels.recompute:CheckpointChainKernel",
    "recompute": "kda_sm100.kernels.recompute:RecomputeChainKernel",
    "reverse": "kda_sm100.kernels.reverse:ReverseChainKernel",
    "reverse_summarize": "kda_sm100.kernels.reverse_summary:ReverseSummaryKernel",
}


def _chain_grid(config: BackwardChainConfig, x: Any) -> tuple[Any, Any, Any]:
    """A CTA has a sequence and value head; in the mode recompute, a slot of 512 tokens and a value head. In the mode reverse_summarize, one
    CTA computes N of a sequence and value head, and the next CTA M^T."""
    if config.mode == "recompute":
        return x.slab_slots * x.HV, 1, 1
    return x.N * x.HV * (2 if config.mode == "reverse_summarize" else 1), 1, 1


BACKWARD_CHAINS = {
    mode: KernelInterface(kernel, lambda config: BackwardChainArguments, _chain_grid)
    for mode, kernel in _CLASSES.items()
}

GRADIENTS = KernelInterface(
    "kda_sm100.kernels.gradients:GradientsKernel",
    lambda config: GradientsArguments,
    lambda config, x: (x.ctas, 1, 1),
)

#: One CTA computes B of a sequence and value head, and the next CTA M.
SUMMARY = KernelInterface(
    "kda_sm100.kernels.summary:SummaryKernel",
    lambda config: ChainArguments,
    lambda config, x: (x.N * x.HV * 2, 1, 1),
)

#: The chain and the summary kernel for segments over a pool.
SEGMENT_CHAIN = KernelInterface(
    "kda_sm100.kernels.pool_segments:PoolSegmentChainKernel", lambda config: PoolSegmentArguments, CHAIN.grid
)
SEGMENT_SUMMARY = KernelInterface(
    "kda_sm100.kernels.pool_segments:PoolSummaryKernel", lambda config: PoolSegmentArguments, SUMMARY.grid
)

OUTPUT = KernelInterface(
    "kda_sm100.kernels.output:OutputKernel",
    lambda config: OutputArguments,
    lambda config, x: (x.chunk_count * x.HV, 1, 1),
)
