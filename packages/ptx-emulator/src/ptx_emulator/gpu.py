"""The device that is not there: what a launch finds on it, and what ran on it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from ptx_emulator.launch import SHARED_LIMIT, run, target_of

__all__ = ["SHARED_LIMIT", "Device", "Launch", "current_device", "device"]


@dataclass(frozen=True)
class Launch:
    """A launch that ran: extents of grid and block, dynamic shared memory in bytes, instructions of warps."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    instructions: int


@dataclass
class Device:
    """What `device` was given; ``launches`` so far. Each launch has a seed of its own, counted from ``seed``."""

    arch: str
    seed: int
    sms: int
    races: Collection[str]
    tensors: Sequence[torch.Tensor]
    scratch: Sequence[torch.Tensor]
    launches: list[Launch] = field(default_factory=list)

    def launch(
        self,
        ptx: str,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
        shared_bytes: int,
        arguments: Sequence[bytes],
        tensors: Sequence[torch.Tensor],
        cooperative: bool,
    ) -> None:
        """Execute an entry; ``arguments``: the bytes of each parameter; ``tensors``: those of the call."""
        if (target := target_of(ptx)) != self.arch:
            raise ValueError(f"the kernel is for {target}, this device is {self.arch}")
        count = grid[0] * grid[1] * grid[2]
        # How many fit on an SM is not looked at: a grid has to do with one.
        if cooperative and count > self.sms:
            raise ValueError(f"a cooperative launch of {count} CTAs on {self.sms} SMs")
        seed = self.seed + len(self.launches)
        instructions = run(
            ptx, grid, block, shared_bytes, arguments, (*tensors, *self.tensors), scratch=self.scratch, name=name,
            seed=seed, resident=min(count, self.sms), races=self.races, cluster=cluster,
        )  # fmt: skip
        self.launches.append(Launch(name, grid, block, cluster, shared_bytes, instructions))


_device: ContextVar[Device | None] = ContextVar("ptx_emulator_device", default=None)


def current_device() -> Device:
    """The innermost open device of this thread. Raises `RuntimeError` where there is none."""
    found = _device.get()
    if found is None:
        raise RuntimeError("no emulated device: with ptx_emulator.device(arch): ..")
    return found


@contextmanager
def device(
    arch: str,
    *,
    seed: int = 0,
    sms: int = 132,
    races: Collection[str] = ("shared", "global"),
    tensors: Iterable[torch.Tensor] = (),
    scratch: Iterable[torch.Tensor] = (),
) -> Iterator[Device]:
    """Within the block, functions of `load` run on an emulated GPU; yields the `Device` that lists its launches.

    Args:
        arch: "sm_90a", for one; a kernel for another target is refused.
        seed, races: as those of `run`.
        sms: on each one CTA is resident at a time.
        tensors, scratch: CPU tensors that launches may access besides the arguments of a call, as those of `run`.
    """
    token = _device.set(Device(arch, seed, sms, races, tuple(tensors), tuple(scratch)))
    try:
        yield current_device()
    finally:
        _device.reset(token)
