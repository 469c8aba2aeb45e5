"""A launch in several processes: each executes a part of the clusters. For kernels whose CTAs share nothing.

The processes are forks. So each has its own copy of global memory, and the race check's history of what its CTAs read and wrote there.
At the end the caller compares these histories, and copies what each process has written into the tensors.
"""

from __future__ import annotations

import itertools
import multiprocessing
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from ptx_emulator.compiled.engine import engine_lock
from ptx_emulator.decode import PREPARATION
from ptx_emulator.errors import ExecutionError
from ptx_emulator.lanes import Array
from ptx_emulator.machine import Machine
from ptx_emulator.memory import Region
from ptx_emulator.parser import Instruction, Kernel

#: Instructions through which CTAs communicate, unless they are of shared memory.
_ATOMIC, _STRONG = ("atom", "red"), {"relaxed", "acquire", "release", "volatile"}


def check_separate(kernel: Kernel) -> None:
    """Check that the CTAs of a kernel do not communicate through global memory.

    Raises:
        ValueError: an instruction serves to communicate.
    """
    for line, instruction in zip(kernel.lines, kernel.instructions):
        if _communicates(instruction):
            raise ValueError(
                f"processes: expected 1 for {kernel.name[:60]}, because its CTAs may communicate: "
                f"PTX line {line}: {instruction.text}"
            )


def _communicates(i: Instruction) -> bool:
    # They change which CTAs run, and tensor maps in global memory.
    if i.opcode in ("clusterlaunchcontrol", "tensormap"):
        return True
    spaces = {m.partition("::")[0] for m in i.modifiers}
    if i.opcode == "cp":
        return "reduce" in spaces and "global" in spaces
    strong = i.opcode in ("ld", "st") and spaces & _STRONG
    return bool(i.opcode in _ATOMIC or strong) and "shared" not in spaces


@dataclass(frozen=True)
class _Accesses:
    """What the CTAs of a process did to a region.

    Attributes:
        read, written: per half of a word, whether they did.
        values: the bytes of the written halves.
    """

    read: Array
    written: Array
    values: Array


def run(machine: Machine, processes: int) -> int:
    """Execute a launch whose global memory is checked for races. Return the number of warp instructions.

    Raises:
        PtxError, ExecutionError: of the first process that raises one; or the parts of two processes communicate.
        RuntimeError: a process ended early.
    """
    count = len(machine.places())
    bounds = [count * n // processes for n in range(processes + 1)]
    context = multiprocessing.get_context("fork")
    found, workers = [], []
    try:
        for first, last in itertools.pairwise(bounds):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_execute, args=(machine, slice(first, last), sender), daemon=True)
            workers.append((worker, receiver))
            # Python warns of forks of processes with threads, because another thread may hold a lock. The worker takes the locks of the
            # emulator only.
            with warnings.catch_warnings(), PREPARATION, engine_lock():
                warnings.simplefilter("ignore", DeprecationWarning)
                worker.start()
            sender.close()
        for number, (worker, receiver) in enumerate(workers):
            try:
                found.append(receiver.recv())
            except EOFError:
                worker.join()
                found.append(
                    RuntimeError(f"process {number} of the launch ended with exit code {worker.exitcode}")
                )
    finally:  # a worker that has sent its result ends by itself
        for worker, receiver in workers:
            receiver.close()
            if len(found) < len(workers) and worker.pid is not None:
                worker.terminate()
            if worker.pid is not None:
                worker.join()
    for one in found:
        if isinstance(one, BaseException):
            raise one
    parts = [[accesses[number] for _, accesses in found] for number in range(len(machine.memory.regions))]
    for region, of_region in zip(machine.memory.regions, parts):
        _check(machine.program.name, region, of_region)
    for region, of_region in zip(machine.memory.regions, parts):
        for part in of_region:
            region.view(2, 1)[: len(part.written), 0][part.written] = part.values
    return sum(executed for executed, _ in found)


def _execute(machine: Machine, part: slice, sender: Connection) -> None:
    """Execute clusters, and send what they did, or the error."""
    try:
        machine.part = part
        for region in machine.memory.regions:
            assert region.shadow is not None
            region.shadow.note_observed()
        with np.errstate(all="ignore"):
            machine.run()
        sender.send((machine.executed, [_accesses(region) for region in machine.memory.regions]))
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        sender.send(error)


def _accesses(region: Region) -> _Accesses:
    shadow = region.shadow
    assert shadow is not None
    read = shadow.read > 0
    for marks in (shadow.constant, shadow.observed):  # `ld.global.nc`, asynchronous copies
        if marks is not None:
            read |= marks
    written = _halves(shadow.written > 0, shadow.apart)
    return _Accesses(_halves(read, shadow.apart), written, region.view(2, 1)[: len(written), 0][written])


def _halves(cells: Array, apart: Array | None) -> Array:
    """Return flags of halves of words, from those of cells (`races.Shadow`)."""
    if apart is None:
        return np.repeat(cells, 2)
    lower, upper = cells[: len(apart)], cells[len(apart) :]
    return np.stack([lower, np.where(apart, upper, lower)], axis=1).reshape(-1)


def _check(kernel: str, region: Region, parts: Sequence[_Accesses]) -> None:
    """Check that no process has accessed a half of a word that another one has written."""
    writers = np.sum([part.written for part in parts], axis=0)
    for number, part in enumerate(parts):
        others = writers - part.written > 0
        for what, mine in (("write", part.written), ("read", part.read)):
            if (mine & others).any():
                place = int(np.argmax(mine & others)) * 2 + region.base - region.low
                raise ExecutionError(
                    f"CTAs of two processes communicate: those of process {number} {what} {region.name}, offset {place}, "
                    "and those of another one write it; run the launch in one process",
                    kernel,
                )
