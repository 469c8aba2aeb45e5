"""What a measurement depends on: the device, the driver, and the versions of backends and peers."""

from __future__ import annotations

import datetime
import platform
from typing import Any

import torch

from kda_core import requirements
from kda_core.bench.peers import PEERS
from kda_core.doctor import nvidia_driver

#: Distributions whose versions matter although kda-core and its backends do not require them.
OTHERS = ("triton", *(peer.distribution for peer in PEERS.values()))


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU, or the architecture of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def now() -> datetime.datetime:
    """Returns the time in UTC."""
    return datetime.datetime.now(datetime.timezone.utc)


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages of this project, of what they require, and of the peers."""
    installed = requirements.installed()
    ours = requirements.ours(installed)
    names = (*ours, *sorted(requirements.required(ours, installed) - {"torch"}), *OTHERS)
    return {name: installed[name].version for name in dict.fromkeys(names) if name in installed}


def describe(device: torch.device) -> dict[str, Any]:
    """Returns the facts for the head of a report: date, device, driver, Python, torch, CUDA, versions."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return {
        "date": now().isoformat(timespec="seconds"),
        "device_name": device_name(device),
        "arch": "cpu" if capability is None else "sm_{}{}".format(*capability),
        "driver": nvidia_driver() if capability is not None else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "versions": versions(),
    }
