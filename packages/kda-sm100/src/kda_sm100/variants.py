"""The variants of the kernels: all of them, and the sample that the tests and ``nox -s compile`` compile without a GPU.

The sample has each form of the gate at each chunk size and alternates the dtype of g; it has one variant for strided inputs at each chunk
size. It has every variant of the other kernels.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from kda_cute.decode import DECODES
from kda_cute.gradients import GRADIENT_CONFIGS, GradientsConfig
from kda_cute.journal import JOURNALS
from kda_cute.merge import MERGES
from kda_cute.verify import VERIFIES
from kda_sm100.config import (
    ARCHS,
    CHUNKS,
    MODES,
    SPACINGS,
    BackwardChainConfig,
    ChainConfig,
    IntraChunkConfig,
    OutputConfig,
    SummaryConfig,
)

GATES: tuple[dict[str, Any], ...] = (
    {"gate": "bounded"},
    {"gate": "bounded", "unbounded": True},
    {"gate": "softplus", "unbounded": True},
    {"gate": "precomputed"},
    {"gate": "precomputed", "unbounded": True},
)

INTRA_CHUNK = (
    *(
        IntraChunkConfig(chunk, gate_dtype=dtype, strided=strided, **gate)
        for chunk, gate, dtype, strided in product(CHUNKS, GATES, ("bfloat16", "float32"), (False, True))
    ),
    *(
        IntraChunkConfig(gate_dtype=dtype, backward=True, **gate)
        for gate, dtype in product(GATES, ("bfloat16", "float32"))
    ),
)

CHAIN = tuple(
    ChainConfig(chunk, states, serving)
    for chunk, states, serving in product(CHUNKS, (False, True), (False, True))
)

#: The chains that save for a backward, and those of a backward.
SAVING = tuple(ChainConfig(saves=spacing) for spacing in SPACINGS)
BACKWARD = tuple(BackwardChainConfig(mode) for mode in MODES)

SUMMARY = tuple(SummaryConfig(chunk) for chunk in CHUNKS)

#: Used by `kda_sm100.stages` only; `chunk_kda` needs no output kernel.
OUTPUT = tuple(OutputConfig(chunk) for chunk in CHUNKS)

SAMPLE = (
    *(
        IntraChunkConfig(chunk, gate_dtype=("bfloat16", "float32")[i % 2], **gate)
        for i, (chunk, gate) in enumerate(product(CHUNKS, GATES))
    ),
    *(IntraChunkConfig(chunk, strided=True) for chunk in CHUNKS),
    *(IntraChunkConfig(backward=True, **gate) for gate in GATES[:2]),
)


def kernels() -> list[tuple[type, object]]:
    """Returns (kernel class, configuration) of the sample and of all other kernels. Imports the DSL."""
    from kda_sm100.kernels.output import OutputKernel

    return [*_of(SAMPLE, GRADIENT_CONFIGS[::2]), *((OutputKernel, config) for config in OUTPUT)]


def ahead_of_time(arch: str) -> list[tuple[type, object]]:
    """Returns (kernel class, configuration) of every variant that a call may need. Imports the DSL.

    ``python -m kda_core precompile`` compiles them. ``arch``: an architecture of the spec.
    """
    assert arch in ARCHS, arch  # the architectures of the backend's spec
    return _of(INTRA_CHUNK, GRADIENT_CONFIGS)


def _of(
    configs: tuple[IntraChunkConfig, ...], gradients: tuple[GradientsConfig, ...]
) -> list[tuple[type, object]]:
    from kda_cute.device.decode import DecodeKernel
    from kda_cute.device.journal import JournalKernel
    from kda_cute.device.merge_states import MergeKernel
    from kda_cute.device.verify import VerifyKernel
    from kda_sm100.kernels.chain import ChainKernel
    from kda_sm100.kernels.gradients import GradientsKernel
    from kda_sm100.kernels.intra_chunk import IntraChunkKernel
    from kda_sm100.kernels.pool_segments import PoolSegmentChainKernel, PoolSummaryKernel
    from kda_sm100.kernels.recompute import CheckpointChainKernel, RecomputeChainKernel
    from kda_sm100.kernels.reverse import ReverseChainKernel
    from kda_sm100.kernels.reverse_summary import ReverseSummaryKernel
    from kda_sm100.kernels.saving import SavingChainKernel
    from kda_sm100.kernels.serving import ServingChainKernel
    from kda_sm100.kernels.summary import SummaryKernel

    pairs: list[tuple[type, object]] = [(IntraChunkKernel, config) for config in configs]
    pairs += [(ServingChainKernel if config.serving else ChainKernel, config) for config in CHAIN]
    pairs += [(SavingChainKernel, config) for config in SAVING]
    chains = CheckpointChainKernel, RecomputeChainKernel, ReverseChainKernel, ReverseSummaryKernel
    pairs += zip(chains, BACKWARD, strict=True)
    pairs += [(GradientsKernel, config) for config in gradients]
    pairs += [(SummaryKernel, config) for config in SUMMARY]
    pairs += [(PoolSegmentChainKernel, config) for config in CHAIN if config.serving]
    pairs += [(PoolSummaryKernel, config) for config in SUMMARY]
    pairs += [(DecodeKernel, config) for config in DECODES]
    pairs += [(JournalKernel, config) for config in JOURNALS]
    pairs += [(VerifyKernel, config) for config in VERIFIES]
    return [*pairs, *((MergeKernel, config) for config in MERGES)]
