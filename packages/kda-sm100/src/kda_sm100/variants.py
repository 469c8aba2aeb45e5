"""The variants of the kernels: all of them, and those that are compiled without a GPU in the tests and by ``nox -s
compile``: each form of the gate at each chunk size, g in turns, and of the other kernels all."""

from __future__ import annotations

from itertools import product
from typing import Any

from kda_sm100.config import ARCHS, CHUNKS, ChainConfig, OutputConfig, PrepareConfig, SummaryConfig

GATES: tuple[dict[str, Any], ...] = (
    {"gate": "bounded"},
    {"gate": "bounded", "unbounded": True},
    {"gate": "softplus", "unbounded": True},
    {"gate": "precomputed"},
    {"gate": "precomputed", "unbounded": True},
)

PREPARE = tuple(
    PrepareConfig(chunk, gate_dtype=dtype, **gate)
    for chunk, gate, dtype in product(CHUNKS, GATES, ("bfloat16", "float32"))
)

CHAIN = tuple(ChainConfig(chunk, states) for chunk, states in product(CHUNKS, (False, True)))

SUMMARY = tuple(SummaryConfig(chunk) for chunk in CHUNKS)

OUTPUT = tuple(OutputConfig(chunk) for chunk in CHUNKS)  # of ``stages``; `chunk_kda` does not need it

SAMPLE = tuple(
    PrepareConfig(chunk, gate_dtype=("bfloat16", "float32")[i % 2], **gate)
    for i, (chunk, gate) in enumerate(product(CHUNKS, GATES))
)


def kernels() -> list[tuple[type, object]]:
    """(kernel class, configuration) of the sample and of all other kernels; imports the DSL."""
    from kda_sm100.kernels.output import OutputKernel

    return [*_of(SAMPLE), *((OutputKernel, config) for config in OUTPUT)]


def ahead_of_time(arch: str) -> list[tuple[type, object]]:
    """(kernel class, configuration) of all variants, for ``python -m kda_core precompile``; imports the DSL."""
    assert arch in ARCHS, arch  # those of the spec
    return _of(PREPARE)


def _of(configs: tuple[PrepareConfig, ...]) -> list[tuple[type, object]]:
    from kda_cute.device.merge_states import MERGES, MergeKernel
    from kda_sm100.kernels.chain import ChainKernel
    from kda_sm100.kernels.intra_chunk import PrepareKernel
    from kda_sm100.kernels.summary import SummaryKernel

    pairs: list[tuple[type, object]] = [(PrepareKernel, config) for config in configs]
    pairs += [(ChainKernel, config) for config in CHAIN]
    pairs += [(SummaryKernel, config) for config in SUMMARY]
    return [*pairs, *((MergeKernel, config) for config in MERGES)]
