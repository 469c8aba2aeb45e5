"""Variants of the kernel: `ALL` for ahead-of-time compilation, and a `SAMPLE` for tests and ``nox -s compile``.

The sample has each form of the gate at each chunk size and number of warpgroups. It alternates the dtype of g and the
intermediate states.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from kda_cute.decode import DECODES
from kda_cute.gradients import GRADIENT_CONFIGS, GradientsConfig
from kda_cute.journal import JOURNALS
from kda_cute.merge import MERGES
from kda_cute.verify import VERIFIES
from kda_sm90.config import ARCH, GateDtype, PrefillConfig

GATES: tuple[dict[str, Any], ...] = (
    {"gate": "bounded"},
    {"gate": "bounded", "unbounded": True},
    {"gate": "softplus", "unbounded": True},
    {"gate": "precomputed"},
    {"gate": "precomputed", "unbounded": True},
)

CHAINS = tuple(product((64, 32), (1, 2)))  # (chunk, warpgroups)
DTYPES: tuple[GateDtype, ...] = ("bfloat16", "float32")

#: What a call writes beside o: nothing, intermediate states, or what it saves for a backward in either mode.
WRITES: tuple[dict[str, Any], ...] = (
    {},
    {"states": True},
    {"saved_states": True},
    {"states": True, "residual": True},
)
WHOLE = tuple(
    PrefillConfig(chunk, warpgroups, gate_dtype=dtype, padded=padded, **writes, **gate)
    for padded, (chunk, warpgroups), gate, dtype, writes in product(
        (False, True), CHAINS, GATES, DTYPES, WRITES
    )
)
#: Calls over pools of states, and of strided inputs.
SERVING = tuple(
    replace(config, serving=True) for config in WHOLE if not (config.residual or config.saved_states)
)
#: Long calls of many heads, whose chains have local records.
LOCAL = tuple(
    replace(config, local=True)
    for config in (*WHOLE, *SERVING)
    if (config.chunk, config.warpgroups, config.unbounded) == (32, 2, False)
    and not (config.states or config.saved_states)
)
#: The first launch of calls in segments.
SUMMARIZE = tuple(
    PrefillConfig(chunk, warpgroups, gate_dtype=dtype, mode="summarize", **gate)
    for (chunk, warpgroups), gate, dtype in product(CHAINS, GATES, DTYPES)
)
#: The second launch of calls in segments.
EXECUTE = tuple(
    PrefillConfig(chunk, warpgroups, mode="execute", **writes)
    for (chunk, warpgroups), writes in product(CHAINS, WRITES)
)
#: Both launches of calls in segments over pools.
SERVING_SEGMENTS = (
    *(replace(config, serving=True) for config in SUMMARIZE),
    *(replace(config, serving=True) for config in EXECUTE if not (config.residual or config.saved_states)),
)
#: The launches of the chains of a backward.
REVERSE = tuple(
    PrefillConfig(64, warpgroups, gate_dtype=dtype, states=True, mode=mode, **gate)
    for mode, warpgroups, gate, dtype in product(("reverse", "recompute"), (1, 2), GATES, DTYPES)
)
#: How segments act on gradients of states.
REVERSE_SUMMARIZE = tuple(
    PrefillConfig(64, warpgroups, gate_dtype=dtype, mode="reverse_summarize", **gate)
    for warpgroups, gate, dtype in product((1, 2), GATES, DTYPES)
)
ALL: tuple[PrefillConfig | GradientsConfig, ...] = (
    *WHOLE,
    *SERVING,
    *LOCAL,
    *SUMMARIZE,
    *EXECUTE,
    *SERVING_SEGMENTS,
    *REVERSE,
    *REVERSE_SUMMARIZE,
    *GRADIENT_CONFIGS,
)

SAMPLE: tuple[PrefillConfig | GradientsConfig, ...] = (
    *(
        PrefillConfig(chunk, warpgroups, gate_dtype=DTYPES[i // 2 % 2], states=i % 2 > 0, **gate)
        for i, ((chunk, warpgroups), gate) in enumerate(product(CHAINS, GATES))
    ),
    *(PrefillConfig(*chain, padded=True) for chain in CHAINS),
    *(PrefillConfig(*chain, **writes) for chain, writes in product(CHAINS, WRITES[2:])),
    *(
        PrefillConfig(*chain, gate_dtype=dtype, states=i % 2 > 0, serving=True, **gate)
        for i, (chain, dtype, gate) in enumerate(zip(CHAINS, DTYPES * 2, GATES[:4], strict=True))
    ),
    *(PrefillConfig(*chain, padded=True, serving=True) for chain in CHAINS),
    *LOCAL[::5],  # each gate, dtype, padding and form of states
    *SUMMARIZE[:: len(GATES) * 2],
    *EXECUTE[:: len(WRITES)],
    *EXECUTE[len(WRITES) - 2 :: len(WRITES)],
    *EXECUTE[len(WRITES) - 1 :: len(WRITES)],
    *(replace(config, serving=True) for config in SUMMARIZE[1 :: len(GATES) * 2 + 1]),
    *(replace(config, serving=True) for config in EXECUTE[:: len(WRITES)]),
    *(replace(config, serving=True) for config in EXECUTE[1 :: len(WRITES)]),
    *REVERSE[:: len(GATES) * 2],
    *REVERSE_SUMMARIZE[:: len(GATES) * 2],
    *GRADIENT_CONFIGS[:: len(DTYPES) * 2],
)


def kernels() -> list[tuple[type, object]]:
    """Returns (kernel class, configuration) of the sample. Imports the DSL."""
    return _pairs(SAMPLE)


def ahead_of_time(arch: str) -> list[tuple[type, object]]:
    """Returns (kernel class, configuration) of all variants, for ``python -m kda_core precompile``. Imports the DSL."""
    assert arch == ARCH, arch  # the only architecture of the backend's spec
    return _pairs(ALL)


def _pairs(configs: tuple[PrefillConfig | GradientsConfig, ...]) -> list[tuple[type, object]]:
    from kda_cute.device.decode import DecodeKernel
    from kda_cute.device.journal import JournalKernel
    from kda_cute.device.merge_states import MergeKernel
    from kda_cute.device.verify import VerifyKernel
    from kda_sm90.kernels.gradients import GradientsKernel
    from kda_sm90.kernels.prefill import PrefillKernel

    kernels: dict[type, type] = {PrefillConfig: PrefillKernel, GradientsConfig: GradientsKernel}
    pairs: list[tuple[type, object]] = [(kernels[type(config)], config) for config in configs]
    pairs += [(DecodeKernel, config) for config in DECODES]
    pairs += [(JournalKernel, config) for config in JOURNALS]
    pairs += [(VerifyKernel, config) for config in VERIFIES]
    return [*pairs, *((MergeKernel, config) for config in MERGES)]
