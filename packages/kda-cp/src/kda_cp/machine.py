"""The device of a call as the planner sees it: its constants and its SMs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kda_core.backend import BackendSpec
from kda_core.contract import KdaInputs, ProblemShape, dtype_name
from kda_core.registry import show_archs
from kda_cp import constants

TYPICAL = {(9, 0): ("NVIDIA H200", 132), (10, 0): ("NVIDIA B200", 148)}
"""Name and SMs of a typical GPU of each architecture, for `kda_core.explain` without such a GPU."""


class Machine(NamedTuple):
    """The device of a call.

    Attributes:
        constants: constants of the device, the backend and the dtype; None if there are none.
        source: origin of the constants, in words.
        SMs: SMs of the GPU; 0 for a CPU, and for a GPU that is not known.
    """

    constants: constants.Constants | None
    source: str
    SMs: int


def machine(inputs: KdaInputs, spec: BackendSpec) -> Machine:
    """Returns the device of a call.

    Inputs on the meta device stand for a GPU of an architecture: the first such GPU of this host, else the `TYPICAL` one.
    `Machine.source` then contains the name of a GPU.
    """
    device, s = inputs.q.device, inputs.shape
    dtype = dtype_name(s.dtype)
    if device.type == "cuda":
        name, SMs = gpu(device.index)
    elif s.device_type != "cuda":
        name, SMs = s.device_type, 0
    elif (index := _first_of(s.arch)) is not None:
        name, SMs = gpu(index)
    else:
        name, SMs = TYPICAL.get(s.arch, (device_text(s), 0))  # type: ignore[arg-type]
        found, source = constants.lookup((name, spec.name, dtype))
        names_a_gpu = "'s " in source  # as "NVIDIA H200's shipped"
        return Machine(found, source if names_a_gpu else f"{name}'s {source}", SMs)
    return Machine(*constants.lookup((name, spec.name, dtype)), SMs)


def _first_of(arch: tuple[int, int] | None) -> int | None:
    """Returns the index of the first GPU of an architecture, or None."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return next((i for i in range(count) if torch.cuda.get_device_capability(i) == arch), None)


def device_text(shape: ProblemShape) -> str:
    """Returns the device of a shape in words."""
    return "a CUDA device" if shape.arch is None else show_archs([shape.arch])


@functools.lru_cache(maxsize=64)
def gpu(index: int) -> tuple[str, int]:
    """Returns the name and the SMs of a GPU of this host."""
    found = torch.cuda.get_device_properties(index)
    return found.name, found.multi_processor_count
