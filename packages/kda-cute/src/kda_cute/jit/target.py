"""Target architectures: the names that the DSL's option ``--gpu-arch`` takes, such as ``sm_90a``.

A name follows from a compute capability by a rule, so that a backend may be made for a GPU that this package does not know.
The compiler decides what it supports. Kernels compile on machines without a GPU: only `arch_of_device` queries one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kda_core.errors import ArgumentError, DeviceError

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"sm_([1-9]\d*)(\d)([af]?)")


def arch_of_capability(capability: tuple[int, int]) -> str:
    """Returns the architecture of a compute capability: (8, 9) -> "sm_89", (9, 0) -> "sm_90a", (12, 0) -> "sm_120a".

    From 9.0 on it has the suffix ``a``, which unlocks wgmma and tcgen05. The code then runs on exactly that capability.
    """
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def capability_of_arch(arch: str) -> tuple[int, int]:
    """Returns the compute capability of an architecture: "sm_103a" -> (10, 3).

    Raises:
        ArgumentError: `arch` is not the name of an architecture.
    """
    match = _match(arch)
    return int(match[1]), int(match[2])


def arch_of_device(device: torch.device) -> str:
    """Returns the architecture of a CUDA device. ``torch.device("cuda")`` is torch's current device.

    Raises:
        DeviceError: the device is not a CUDA device.
    """
    if device.type != "cuda":
        raise DeviceError("device", "a CUDA device", str(device))
    import torch

    return arch_of_capability(torch.cuda.get_device_capability(device))


def check_arch(arch: str) -> str:
    """Returns `arch` if it is the name of an architecture: ``sm_``, the digits of the capability, and no suffix, ``a`` or ``f``.

    Whether the compiler supports the architecture shows when a kernel is compiled.

    Raises:
        ArgumentError: it is not.
    """
    _match(arch)
    return arch


def _match(arch: str) -> re.Match[str]:
    match = _NAME.fullmatch(arch)
    if match is None:
        raise ArgumentError(
            "arch", "sm_<number>, optionally with the suffix a or f, such as sm_90a", repr(arch)
        )
    return match
