"""Target architectures: from a compute capability or a device to the name that ``--gpu-arch`` takes.

Nothing here looks at a GPU unless it is handed one: kernels are compiled on machines without any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kda_core.errors import ArgumentError, DeviceError

if TYPE_CHECKING:
    import torch

#: Compute capability -> architecture. The suffix ``a`` unlocks wgmma (9.0) and tcgen05 (10.x), and makes the
#: code run on exactly that capability.
ARCHITECTURES: dict[tuple[int, int], str] = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


def arch_of_capability(capability: tuple[int, int]) -> str:
    """The architecture of a compute capability, e.g. ``(9, 0) -> "sm_90a"``.

    Raises ``DeviceError`` for a capability that no kernel here is written for.
    """
    arch = ARCHITECTURES.get(capability)
    if arch is None:
        known = ", ".join(f"{major}.{minor} ({name})" for (major, minor), name in ARCHITECTURES.items())
        raise DeviceError("compute capability", f"one of {known}", ".".join(map(str, capability)))
    return arch


def arch_of_device(device: torch.device) -> str:
    """The architecture of a CUDA device. ``torch.device("cuda")`` is torch's current device.

    Raises ``DeviceError`` for a device of another type or of another capability.
    """
    if device.type != "cuda":
        raise DeviceError("device", "a CUDA device", str(device))
    import torch

    return arch_of_capability(torch.cuda.get_device_capability(device))


def check_arch(arch: str) -> str:
    """``arch`` itself, if it is one of ``ARCHITECTURES``; ``ArgumentError`` otherwise."""
    if arch not in ARCHITECTURES.values():
        raise ArgumentError("arch", "one of " + ", ".join(ARCHITECTURES.values()), repr(arch))
    return arch
