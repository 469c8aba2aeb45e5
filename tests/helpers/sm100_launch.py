"""Launches kernels of kda-sm100 without the API above them: emulated for CPU tensors, else on the GPU of the tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import ptx_emulator
from kda_cute import get_kernel, kernels_made_by
from kda_cute.arguments import pack
from kda_cute.interface import KernelInterface
from kda_cute.records import decay_offset, image_offset
from kda_cute.testing.emulation import load
from kda_sm100 import layouts
from kda_sm100.config import HEAD_DIM


def launch(
    kernel: KernelInterface,
    config: object,
    tensor: torch.Tensor,
    *,
    arch: str,
    seed: int = 0,
    **given: Any,
) -> None:
    """Launches a kernel and waits for its end.

    Args:
        kernel, config: kernel and variant.
        tensor: the leading tensor of the kernel; it selects the device.
        arch: target of the compiler.
        seed: schedule of the emulator.
        given: values of the argument struct, as for `kda_cute.arguments.pack`. An emulated kernel may access these tensors only.
    """
    arguments = pack(kernel.arguments(config), **given)
    if tensor.is_cuda:
        get_kernel(kernel, config, arch)(tensor, *arguments)
        torch.cuda.synchronize()
        return
    tensors = [x for x in given.values() if torch.is_tensor(x)]
    with kernels_made_by(load), ptx_emulator.device(arch, seed=seed, tensors=tensors):
        get_kernel(kernel, config, arch)(tensor, *arguments)


class Workspace:
    """A workspace whose arrays are read and written by name, as [records, rows, columns]. All its bits are 1 at first (NaN)."""

    def __init__(self, records: int, C: int, device: str, backward: bool = False) -> None:
        size = layouts.workspace_bytes(records, C, backward)
        memory = torch.full((size + 128,), 0xFF, dtype=torch.uint8, device=device)
        self.bytes, self.C = memory[-memory.data_ptr() % 128 :][:size], C
        self.start, self.records = layouts.addresses(0, records, C, backward), records
        self.sizes = layouts.record_bytes(C, backward)

    def _view(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the records of an array, [records, elements], and the index of each matrix element in a record."""
        size = self.records * self.sizes[name]
        flat = self.bytes[self.start[name] :][:size]
        flat = flat.view(torch.float32 if name == "a" else torch.bfloat16).view(self.records, -1)
        if name == "a":
            return flat, decay_offset(torch.arange(HEAD_DIM)).to(flat.device)
        columns = self.C if name in ("aqk", "t") else HEAD_DIM
        row, column = torch.arange(self.C)[:, None], torch.arange(columns)
        return flat, image_offset(row, column, self.C, columns).to(flat.device)

    def __getitem__(self, name: str) -> torch.Tensor:
        flat, places = self._view(name)
        return flat[:, places]

    def __setitem__(self, name: str, logical: torch.Tensor) -> None:
        flat, places = self._view(name)
        flat[:, places.flatten()] = logical.to(flat.dtype).flatten(1)


class Chunk(NamedTuple):
    """A chunk of a sequence.

    Attributes:
        row: row of B.
        first: its first token in the row.
        tokens: number of its tokens.
        slot: its slot.
    """

    row: int
    first: int
    tokens: int
    slot: int


def chunks_of(B: int, T: int, C: int, lengths: tuple[int, ...] | None) -> tuple[list[Chunk], int]:
    """Returns every chunk, and the number of slots per head. ``lengths``: of sequences packed along T."""
    if lengths is None:
        each = -(-T // C)
        found = [Chunk(b, c * C, min(C, T - c * C), b * each + c) for b in range(B) for c in range(each)]
        return found, layouts.slot_count(B, T, C)
    found, start = [], 0
    for n, size in enumerate(lengths):
        slot = start // C + n
        found += [Chunk(0, start + c * C, min(C, size - c * C), slot + c) for c in range(-(-size // C))]
        start += size
    return found, layouts.slot_count(B, T, C, len(lengths))
