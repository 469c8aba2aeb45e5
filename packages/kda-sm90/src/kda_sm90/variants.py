"""The variants of the kernel: all of them, and those that are compiled without a GPU in the tests and by ``nox -s
compile``: each form of the gate at each chunk size and number of warpgroups, g and states in turns."""

from __future__ import annotations

from itertools import product
from typing import Any

from kda_sm90.config import ARCH, GateDtype, PrefillConfig

GATES: tuple[dict[str, Any], ...] = (
    {"gate": "bounded"},
    {"gate": "bounded", "unbounded": True},
    {"gate": "softplus", "unbounded": True},
    {"gate": "precomputed"},
    {"gate": "precomputed", "unbounded": True},
)

CHAINS = tuple(product((64, 32), (1, 2)))  # chunk, warpgroups
DTYPES: tuple[GateDtype, ...] = ("bfloat16", "float32")

WHOLE = tuple(
    PrefillConfig(chunk, warpgroups, gate_dtype=dtype, states=states, padded=padded, **gate)
    for padded, (chunk, warpgroups), gate, dtype, states in product(
        (False, True), CHAINS, GATES, DTYPES, (False, True)
    )
)
#: Of calls whose sequences are cut into segments.
SUMMARIES = tuple(
    PrefillConfig(chunk, warpgroups, gate_dtype=dtype, mode="summarize", **gate)
    for (chunk, warpgroups), gate, dtype in product(CHAINS, GATES, DTYPES)
)
RUNS = tuple(
    PrefillConfig(*chain, states=states, mode="run") for chain, states in product(CHAINS, (False, True))
)
ALL = WHOLE + SUMMARIES + RUNS

SAMPLE = (
    *(
        PrefillConfig(chunk, warpgroups, gate_dtype=DTYPES[i // 2 % 2], states=i % 2 > 0, **gate)
        for i, ((chunk, warpgroups), gate) in enumerate(product(CHAINS, GATES))
    ),
    *(PrefillConfig(*chain, padded=True) for chain in CHAINS),
    *SUMMARIES[:: len(GATES) * 2],
    *RUNS[::2],
)


def kernels() -> list[tuple[type, object]]:
    """(kernel class, configuration) of the sample; imports the DSL."""
    return _of(SAMPLE)


def ahead_of_time(arch: str) -> list[tuple[type, object]]:
    """(kernel class, configuration) of all variants, for ``python -m kda_core precompile``; imports the DSL."""
    assert arch == ARCH, arch  # that of the spec
    return _of(ALL)


def _of(configs: tuple[PrefillConfig, ...]) -> list[tuple[type, object]]:
    from kda_cute.device.merge_states import MERGES, MergeKernel
    from kda_sm90.kernels.prefill import PrefillKernel

    pairs: list[tuple[type, object]] = [(PrefillKernel, config) for config in configs]
    return [*pairs, *((MergeKernel, config) for config in MERGES)]
