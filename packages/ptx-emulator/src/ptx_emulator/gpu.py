"""The emulated device: the properties that a launch sees, and the list of the launches that ran."""

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
    """A launch that ran.

    Attributes:
        kernel: name of the entry.
        grid: extents in CTAs.
        block: extents in threads.
        cluster: extents in CTAs.
        shared_bytes: dynamic shared memory.
        instructions: warp instructions that were executed.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    instructions: int


@dataclass
class Device:
    """An emulated GPU: the arguments of `device`, and the ``launches`` so far.

    Launch n uses the seed ``seed + n``.
    """

    arch: str
    seed: int
    sms: int
    races: Collection[str]
    tensors: Sequence[torch.Tensor]
    scratch: Sequence[torch.Tensor]
    compiled: bool = True
    assume: Collection[str] = ()
    processes: int = 1
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
        """Execute an entry and append it to ``launches``.

        Args:
            ptx: the module.
            name: the entry.
            grid, cluster: extents in CTAs.
            block: extents in threads.
            shared_bytes: dynamic shared memory.
            arguments: the bytes of each parameter.
            tensors: the tensors of the call, which the kernel may access.
            cooperative: whether all CTAs must be resident at once.

        Raises:
            ValueError: the PTX is for another architecture, or the CTAs of a cooperative launch exceed the SMs.
            PtxError, ExecutionError: see `run`.
        """
        if (target := target_of(ptx)) != self.arch:
            raise ValueError(f"kernel {name}: it is for {target}, this device is {self.arch}")
        count = grid[0] * grid[1] * grid[2]
        # The emulator does not compute occupancy: one CTA is resident per SM.
        if cooperative and count > self.sms:
            raise ValueError(
                f"kernel {name}: a cooperative launch of {count} CTAs on {self.sms} SMs; one CTA per SM is resident"
            )
        if cooperative and self.processes > 1:
            raise ValueError(f"processes: expected 1 for {name[:60]}, whose launch is cooperative")
        seed = self.seed + len(self.launches)
        instructions = run(
            ptx, grid, block, shared_bytes, arguments, (*tensors, *self.tensors), scratch=self.scratch, name=name,
            seed=seed, resident=min(count, self.sms), races=self.races, cluster=cluster, compiled=self.compiled, assume=self.assume,
            processes=self.processes,
        )  # fmt: skip
        self.launches.append(Launch(name, grid, block, cluster, shared_bytes, instructions))


_device: ContextVar[Device | None] = ContextVar("ptx_emulator_device", default=None)


def current_device() -> Device:
    """Return the innermost open device of this thread.

    Raises:
        RuntimeError: no device is open.
    """
    found = _device.get()
    if found is None:
        raise RuntimeError("no emulated device is open: call this within `with ptx_emulator.device(arch):`")
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
    compiled: bool = True,
    assume: Collection[str] = (),
    processes: int = 1,
) -> Iterator[Device]:
    """Open an emulated GPU. Within the block, functions of `load` run on it.

    Args:
        arch: the target of the kernels, for example "sm_90a". Kernels for another target are refused.
        seed: seed of the first launch, see `run`. Each later launch adds 1.
        sms: number of SMs; one CTA is resident per SM.
        races: see `run`.
        compiled, assume, processes: see `run`. A cooperative launch runs in one process only.
        tensors, scratch: see `run`. Launches may access these CPU tensors in addition to the arguments of a call.

    Yields:
        The `Device`. Its ``launches`` grows with each launch.
    """
    token = _device.set(
        Device(arch, seed, sms, races, tuple(tensors), tuple(scratch), compiled, assume, processes)
    )
    try:
        yield current_device()
    finally:
        _device.reset(token)
