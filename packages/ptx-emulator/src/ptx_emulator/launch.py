"""Launches: the driver's part, from PTX and arguments to the end of the grid."""

from __future__ import annotations

import gc
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

# These modules register their handlers when they are imported.
from ptx_emulator import (  # noqa: F401
    access,
    arithmetic,
    conversions,
    copies,
    map_updates,
    matrices,
    reductions,
    scheduling,
    synchronize,
    tensor_memory,
)
from ptx_emulator import processes as split
from ptx_emulator.compiled.memory_map import MachineMap
from ptx_emulator.compiled.program import CompiledProgram
from ptx_emulator.compiled.warp import CompiledWarp
from ptx_emulator.decode import PREPARATION, Decoder
from ptx_emulator.errors import PtxError
from ptx_emulator.halves import without_undefined_halves
from ptx_emulator.machine import Machine, Program
from ptx_emulator.memory import GlobalMemory, Region
from ptx_emulator.parser import Module, parse

SHARED_LIMIT = 227 * 1024  # bytes of shared memory of a CTA on sm_90 and sm_100

_FORMATS = {"u8": "B", "s8": "b", "u16": "H", "s16": "h", "u32": "I", "s32": "i", "u64": "Q", "s64": "q"}
_FORMATS |= {"b8": "B", "b16": "H", "b32": "I", "b64": "Q", "f32": "f", "f64": "d"}


#: What public kernels rely on, although the PTX ISA does not promise it.
#:
#: - "tcgen05.ld": the assembler waits for a register of a `tcgen05.ld` where an instruction reads it, without `wait::ld`.
#: - "swizzle": an operand may start anywhere in its swizzle pattern with base offset 0, because the bits of its addresses count.
#: - "setmaxnreg": warps of a warpgroup may execute different `setmaxnreg`.
#: - "wgmma.fence": moves to registers of a wgmma may lie between it and its `wgmma.fence`. LLVM places moves there.
ASSUMPTIONS = ("tcgen05.ld", "swizzle", "setmaxnreg", "wgmma.fence")

#: Programs that a process keeps, with their decoded instructions and machine code.
PROGRAMS = 48


@contextmanager
def _uncollected() -> Iterator[None]:
    """Within the block, Python's garbage collector does not run. Programs consist of many objects that stay: collections would only go
    through all others, of which the DSL has millions."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@lru_cache(maxsize=PROGRAMS)
def _parsed(ptx: str) -> Module:
    with _uncollected():
        return parse(ptx)


def target_of(ptx: str) -> str:
    """Return the ``.target`` of a PTX module."""
    return _parsed(ptx).target


@lru_cache(maxsize=PROGRAMS)
def kernel_of(ptx: str, name: str | None) -> Decoder:
    """Return the decoder of an entry of a PTX module. ``name`` None: the only entry.

    Raises:
        PtxError: the module has no such entry, or several and none is named.
    """
    kernels = _parsed(ptx).kernels
    if name is None:
        if len(kernels) != 1:
            raise PtxError(f"name: expected one of the entries {', '.join(kernels)}, got None")
        (name,) = kernels
    if name not in kernels:
        raise PtxError(f"name: expected one of the entries {', '.join(kernels)}, got {name}")
    kernel = kernels[name]
    return Decoder(replace(kernel, instructions=without_undefined_halves(kernel.instructions)))


@lru_cache(maxsize=PROGRAMS)
def decoded(ptx: str, name: str | None) -> tuple[Program, Decoder]:
    """Return the program of an entry, and its decoder. ``name``: as for `kernel_of`."""
    with PREPARATION, _uncollected():
        decoder = kernel_of(ptx, name)
        return decoder.decode(), decoder


@lru_cache(maxsize=PROGRAMS)
def compiled_of(ptx: str, name: str | None) -> CompiledProgram:
    """Return the compiled program of an entry. ``name``: as for `kernel_of`."""
    with PREPARATION, _uncollected():
        return CompiledProgram(*decoded(ptx, name))


def run(
    ptx: str,
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    arguments: Sequence[int | float | bytes | torch.Tensor],
    tensors: Iterable[torch.Tensor] = (),
    *,
    scratch: Iterable[torch.Tensor] = (),
    name: str | None = None,
    seed: int = 0,
    resident: int | None = None,
    races: Collection[str] = ("shared", "global"),
    commits: bool = False,
    cluster: Sequence[int] = (1, 1, 1),
    compiled: bool = True,
    assume: Collection[str] = (),
    processes: int = 1,
) -> int:
    """Execute an entry of a PTX module to its end.

    Args:
        ptx: the module.
        grid: up to three extents, in CTAs.
        block: up to three extents, in threads.
        shared_bytes: dynamic shared memory.
        arguments: one for each parameter. A dense CPU tensor, in any order of its dimensions, stands for its address, and the kernel may access it.
            Bytes are passed unchanged.
        tensors: further tensors that the kernel may access.
        scratch: tensors whose contents are undefined until the kernel writes them.
        name: the entry; required if there are several.
        seed: decides the order in which warps run and asynchronous operations complete.
        races: the state spaces that are checked for races: "shared" (with tensor memory), "global".
        commits: whether a CTA may only end when it has observed the arrival of every `tcgen05.commit`. Kernels that others ship end
            earlier.
        resident: CTAs that are on the device at once. Default: all of them, as in a cooperative launch.
        cluster: extents of a cluster, in CTAs.
        compiled: whether instructions are executed as machine code. Results, errors and the order of execution are the same
            without it: in Python, which is slower.
        assume: what the kernel may rely on although the PTX ISA does not promise it, a part of `ASSUMPTIONS`.
        processes: how many processes execute the clusters, each a part of them. For kernels whose CTAs share nothing: others are
            refused, or an error. Memory is unchanged after an error.

    Returns:
        The number of warp instructions that were executed.

    Raises:
        PtxError: the PTX cannot be parsed, or uses something that is not modelled.
        ExecutionError: the kernel does something that is undefined on a device, or it never ends.
        ValueError: the launch or its arguments do not fit the entry.
    """
    program, decoder = decoded(ptx, name)
    grid, block = _extents(grid), _extents(block)
    cluster = _extents(cluster)
    if any(c < 1 or g % c for g, c in zip(grid, cluster)) or cluster[0] * cluster[1] * cluster[2] > 16:
        raise ValueError(
            f"cluster: up to 16 CTAs with extents that divide those of the grid {grid} expected, got {cluster}"
        )
    threads = block[0] * block[1] * block[2]
    required = decoder.kernel.threads
    if required is not None and _extents(required) != block:
        raise ValueError(f"block: the kernel's .reqntid is {required}, got {block}")
    if not 1 <= threads <= 1024:
        raise ValueError(f"block: expected 1 to 1024 threads, got {threads}")
    total = decoder.static_bytes + shared_bytes
    if total > SHARED_LIMIT:
        raise ValueError(
            f"shared_bytes: expected at most {SHARED_LIMIT} bytes, dynamic and static, got {total}"
        )
    if processes < 1:
        raise ValueError(f"processes: expected at least 1, got {processes}")
    tensors, scratch = tuple(tensors), tuple(scratch)
    memory = GlobalMemory()
    _register(memory, arguments, tensors, scratch)
    if unknown := set(races) - {"shared", "global"}:
        raise ValueError(f"races: expected 'shared' and 'global', got {sorted(unknown)}")
    if unknown := set(assume) - set(ASSUMPTIONS):
        raise ValueError(f"assume: expected some of {', '.join(ASSUMPTIONS)}, got {sorted(unknown)}")
    if "global" in races:
        memory.watch()
    processes = min(processes, grid[0] * grid[1] * grid[2] // (cluster[0] * cluster[1] * cluster[2]))
    if processes > 1:
        _check_processes(decoder, races, (*tensors, *scratch, *arguments))
    count = grid[0] * grid[1] * grid[2]
    machine = Machine(
        program, memory, grid, block, total, _parameters(decoder, arguments), seed,
        count if resident is None else resident, cluster, "shared" in races, commits, frozenset(assume),
    )  # fmt: skip
    if compiled:
        machine.compiled, machine.warp_type = compiled_of(ptx, name), CompiledWarp
        machine.map = MachineMap(memory, count * -(-threads // 32))
    if processes > 1:
        return split.run(machine, processes)
    with np.errstate(all="ignore"):
        machine.run()
    return machine.executed


def _check_processes(decoder: Decoder, races: Collection[str], given: Iterable[object]) -> None:
    """Check that a launch may run in several processes."""
    if "global" not in races:
        raise ValueError("processes: several need races='global', which finds CTAs that communicate")
    if any(isinstance(x, torch.Tensor) and x.is_shared() for x in given):
        raise ValueError("processes: several need tensors that are not in memory shared by processes")
    if any(
        isinstance(x, torch.Tensor) and x.element_size() == 1 and (x.data_ptr() | x.numel()) % 2
        for x in given
    ):
        raise ValueError("processes: several need tensors that begin and end at even addresses")
    split.check_separate(decoder.kernel)


def _extents(given: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


def _register(
    memory: GlobalMemory,
    arguments: Iterable[object],
    tensors: Iterable[torch.Tensor],
    scratch: Iterable[torch.Tensor],
) -> None:
    """Add each tensor once. Tensors without elements have nothing to access."""
    scratch = list(scratch)
    given = [(x, False) for x in scratch] + [
        (x, True) for x in (*tensors, *arguments) if isinstance(x, torch.Tensor)
    ]
    seen: set[int] = set()
    for number, (tensor, initialized) in enumerate(given):
        if tensor.device.type != "cpu" or not _is_dense(tensor):
            raise ValueError(
                f"tensor {number}: expected a dense CPU tensor, without gaps, "
                f"got {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
            )
        if tensor.data_ptr() in seen or tensor.numel() == 0:
            continue
        seen.add(tensor.data_ptr())
        kind = f"tensor {number} {tuple(tensor.shape)} {str(tensor.dtype)[6:]}"
        memory.add(kind, tensor.data_ptr(), tensor.numel() * tensor.element_size(), initialized=initialized)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps, in any order of the dimensions."""
    expected = 1
    for stride, extent in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride != expected and extent:
            return False
        expected *= extent
    return True


def _parameters(decoder: Decoder, arguments: Sequence[int | float | bytes | torch.Tensor]) -> Region:
    """Return a region with the bytes of all parameters."""
    given = decoder.kernel.parameters
    if len(arguments) != len(given):
        raise ValueError(f"arguments: expected {len(given)}, one for each parameter, got {len(arguments)}")
    data = bytearray(-(-max(decoder.parameter_bytes, 16) // 16) * 16)
    for (name, kind, size), value in zip(given, arguments):
        place = decoder.offsets[name]
        if isinstance(value, bytes):
            if len(value) != size:
                raise ValueError(f"arguments: parameter {name}: expected {size} bytes, got {len(value)}")
            data[place : place + size] = value
        else:
            number = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if kind not in _FORMATS or size != struct.calcsize(_FORMATS[kind]):
                raise ValueError(
                    f"arguments: parameter {name} of {size} bytes: expected bytes, got {type(value).__name__}"
                )
            form = _FORMATS[kind]
            if form in "BHIQ":
                number = int(number) & (1 << 8 * size) - 1
            struct.pack_into("<" + form, data, place, number)
    return Region(
        "parameters",
        0,
        decoder.parameter_bytes,
        np.frombuffer(data, np.uint8),
        initialized=True,
        scratch=False,
    )
