"""A kernel's launch by a call on an emulated backend, recorded to be repeated with another PTX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import ptx_emulator
from ptx_emulator.gpu import Device


class RecordedLaunch(NamedTuple):
    """A launch.

    Attributes:
        ptx, name, grid, block, cluster, shared_bytes, arguments: as `ptx_emulator.gpu.Device.launch` has received them.
        memory: the tensors that the kernel may access, and what they held before.
    """

    ptx: str
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    arguments: list[bytes]
    memory: list[tuple[torch.Tensor, torch.Tensor]]

    def repeat(self, ptx: str, seed: int = 0) -> list[torch.Tensor]:
        """Executes ``ptx`` in place of the kernel, over the memory as it was before the launch. Returns the bytes of all tensors after
        it. ``seed``: of the emulator."""
        for tensor, before in self.memory:
            tensor.copy_(before)
        ptx_emulator.run(
            ptx, self.grid, self.block, self.shared_bytes, self.arguments, [x for x, _ in self.memory], name=self.name,
            seed=seed, cluster=self.cluster, commits=True,
        )  # fmt: skip
        return [x.clone().view(-1).view(torch.uint8) for x, _ in self.memory]


def record(monkeypatch: Any, part: str, call: Callable[[], object]) -> RecordedLaunch:
    """Returns the last launch of a kernel whose name contains ``part``, of those that ``call`` makes."""
    found = []
    launch = Device.launch

    def launched(device: Device, ptx: str, name: str, *given: Any) -> None:
        if part in name:
            grid, block, cluster, shared_bytes, arguments, tensors, _ = given
            memory = [(x, x.clone()) for x in (*tensors, *device.tensors, *device.scratch)]
            found.append(RecordedLaunch(ptx, name, grid, block, cluster, shared_bytes, arguments, memory))
        launch(device, ptx, name, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Device, "launch", launched)
        call()
    assert found, f"no launch of a kernel whose name contains {part}"
    return found[-1]
