"""The interfaces of the kernels. Importing this module does not import the DSL."""

from __future__ import annotations

from typing import Any

from kda_cute.gradients import GradientsArguments
from kda_cute.interface import KernelInterface
from kda_sm90.arguments import (
    PrefillArguments,
    SegmentPrefillArguments,
    ServingPrefillArguments,
)
from kda_sm90.config import CLUSTER, PrefillConfig


def _prefill_arguments(config: PrefillConfig) -> type[tuple]:
    if not config.serving:
        return PrefillArguments
    return ServingPrefillArguments if config.mode == "whole" else SegmentPrefillArguments


def _prefill_grid(config: PrefillConfig, x: Any) -> tuple[Any, Any, Any]:
    ctas = x.intra_chunk_ctas + x.queues * config.chain_ctas
    return (ctas + CLUSTER - 1) // CLUSTER * CLUSTER, 1, 1  # whole clusters


PREFILL = KernelInterface(
    "kda_sm90.kernels.prefill:PrefillKernel", _prefill_arguments, _prefill_grid, cooperative=True,
    cluster=lambda config: CLUSTER,
)  # fmt: skip

GRADIENTS = KernelInterface(
    "kda_sm90.kernels.gradients:GradientsKernel",
    lambda config: GradientsArguments,
    lambda config, x: (x.ctas, 1, 1),
)
