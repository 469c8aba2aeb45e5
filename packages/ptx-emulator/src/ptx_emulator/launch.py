"""A launch: what a driver does, from PTX and arguments to the end of the grid."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

# Imported for the handlers that they register.
from ptx_emulator import access, arithmetic, copies, matrices, synchronize, tensor_memory  # noqa: F401
from ptx_emulator.decode import Decoder
from ptx_emulator.errors import PtxError
from ptx_emulator.machine import Machine, Program
from ptx_emulator.memory import GlobalMemory, Region
from ptx_emulator.parser import parse

SHARED_LIMIT = 227 * 1024  # of a CTA of sm_90, sm_100

_FORMATS = {"u8": "B", "s8": "b", "u16": "H", "s16": "h", "u32": "I", "s32": "i", "u64": "Q", "s64": "q"}
_FORMATS |= {"b8": "B", "b16": "H", "b32": "I", "b64": "Q", "f32": "f", "f64": "d"}


_parsed = lru_cache(maxsize=16)(parse)


def target_of(ptx: str) -> str:
    """The architecture that a text of PTX is for."""
    return _parsed(ptx).target


@lru_cache(maxsize=64)
def kernel_of(ptx: str, name: str | None) -> Decoder:
    """An entry of a text of PTX; None: the only one."""
    kernels = _parsed(ptx).kernels
    if name is None:
        if len(kernels) != 1:
            raise PtxError(f"name one of the entries: {', '.join(kernels)}")
        (name,) = kernels
    if name not in kernels:
        raise PtxError(f"no entry {name}; there are {', '.join(kernels)}")
    return Decoder(kernels[name])


@lru_cache(maxsize=64)
def _decoded(ptx: str, name: str | None) -> tuple[Program, Decoder]:
    decoder = kernel_of(ptx, name)
    return decoder.decode(), decoder


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
    cluster: Sequence[int] = (1, 1, 1),
) -> int:
    """Execute an entry of a text of PTX, and return the number of instructions of warps that it took.

    Args:
        grid, block: up to three extents each.
        shared_bytes: of dynamic shared memory.
        arguments: one a parameter. A CPU tensor stands for its address, and may be accessed; bytes are taken as
            they are.
        tensors: others that may be accessed.
        scratch: tensors whose contents are not to be used before the kernel writes them.
        name: of the entry; needed where there are several.
        seed: of the order in which warps run and copies end.
        races: spaces in which accesses are looked for that nothing orders.
        resident: CTAs that are on the device at once; all of them by default, as in a cooperative launch.
        cluster: extents of a cluster in CTAs.

    Raises `PtxError` for what is not modelled, `ExecutionError` for what a kernel does wrong.
    """
    program, decoder = _decoded(ptx, name)
    grid, block = _extents(grid), _extents(block)
    cluster = _extents(cluster)
    if any(c < 1 or g % c for g, c in zip(grid, cluster)) or cluster[0] * cluster[1] * cluster[2] > 16:
        raise ValueError(
            f"cluster: up to 16 CTAs, whose extents divide those of the grid {grid}; got {cluster}"
        )
    threads = block[0] * block[1] * block[2]
    promised = decoder.kernel.threads
    if promised is not None and _extents(promised) != block:
        raise ValueError(f"block: the kernel requires {promised}, got {block}")
    if not 1 <= threads <= 1024:
        raise ValueError(f"block: 1 to 1024 threads, got {threads}")
    total = decoder.static_bytes + shared_bytes
    if total > SHARED_LIMIT:
        raise ValueError(f"shared_bytes: {total} with the static ones, {SHARED_LIMIT} at most")
    memory = GlobalMemory()
    _register(memory, arguments, tensors, scratch)
    if unknown := set(races) - {"shared", "global"}:
        raise ValueError(f"races: 'shared' and 'global', got {sorted(unknown)}")
    if "global" in races:
        memory.watch()
    count = grid[0] * grid[1] * grid[2]
    machine = Machine(
        program, memory, grid, block, total, _parameters(decoder, arguments), seed,
        count if resident is None else resident, cluster, "shared" in races,
    )  # fmt: skip
    with np.errstate(all="ignore"):
        machine.run()
    return machine.executed


def _extents(given: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


def _register(
    memory: GlobalMemory,
    arguments: Iterable[object],
    tensors: Iterable[torch.Tensor],
    scratch: Iterable[torch.Tensor],
) -> None:
    """Every tensor once; those without elements have nothing to access."""
    scratch = list(scratch)
    given = [(x, False) for x in scratch] + [
        (x, True) for x in (*tensors, *arguments) if isinstance(x, torch.Tensor)
    ]
    seen: set[int] = set()
    for number, (tensor, initialized) in enumerate(given):
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError("tensors have to be contiguous, on the CPU")
        if tensor.data_ptr() in seen or tensor.numel() == 0:
            continue
        seen.add(tensor.data_ptr())
        kind = f"tensor {number} {tuple(tensor.shape)} {str(tensor.dtype)[6:]}"
        memory.add(kind, tensor.data_ptr(), tensor.numel() * tensor.element_size(), initialized=initialized)


def _parameters(decoder: Decoder, arguments: Sequence[int | float | bytes | torch.Tensor]) -> Region:
    """The bytes of the parameters, as a region of their own."""
    given = decoder.kernel.parameters
    if len(arguments) != len(given):
        raise ValueError(f"arguments: {len(given)} parameters, got {len(arguments)}")
    data = bytearray(-(-max(decoder.parameter_bytes, 16) // 16) * 16)
    for (name, kind, size), value in zip(given, arguments):
        place = decoder.offsets[name]
        if isinstance(value, bytes):
            if len(value) != size:
                raise ValueError(f"arguments: {name} has {size} bytes, got {len(value)}")
            data[place : place + size] = value
        else:
            number = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if kind not in _FORMATS or size != struct.calcsize(_FORMATS[kind]):
                raise ValueError(f"arguments: {name} has to be given as bytes")
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
