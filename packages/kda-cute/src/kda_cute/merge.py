"""The merge of states on a GPU: the configuration of the kernel `kda_cute.device.merge_states`, and its interface.

Importing this needs neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kda_cute.arguments import Address
from kda_cute.interface import KernelInterface
from kda_cute.records import HEAD_DIM


@dataclass(frozen=True)
class MergeConfig:
    """Variant of the merge. ``columns``: of a CTA, 8 or 16. Raises ValueError on others."""

    columns: int = 8

    def __post_init__(self) -> None:
        if self.columns not in (8, 16):
            raise ValueError(f"columns: expected 8 or 16, got {self.columns}")


#: All variants.
MERGES = MergeConfig(8), MergeConfig(16)


def merge_config(states: int, sms: int) -> MergeConfig:
    """Returns the variant for a number of states (sequences times value heads) on a device of ``sms`` SMs: 8 columns while
    every CTA has an SM of its own, else 16, because each CTA reads the whole of M."""
    return MergeConfig(8 if states * (HEAD_DIM // 8) <= sms else 16)


class MergeArguments(NamedTuple):
    """Arguments after the leading tensor. Sequence n has segments bounds[n] to bounds[n+1] - 1."""

    starts: Address  # [P, HV, 128, 128] fp32
    exits: Address  # the same
    transitions: Address  # the same
    bounds: Address  # [N + 1] int32
    N: int
    HV: int


#: The interface of `kda_cute.device.merge_states.MergeKernel`.
MERGE = KernelInterface(
    "kda_cute.device.merge_states:MergeKernel",
    lambda config: MergeArguments,
    lambda config, x: (x.N, x.HV, HEAD_DIM // config.columns),  # only the first may exceed 65535
)
