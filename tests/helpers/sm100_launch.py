"""The kernels of kda-sm100 without the API above them: emulated for CPU tensors, else on the tensors' GPU."""

from __future__ import annotations

from typing import Any

import torch

import ptx_emulator
from kda_cute import get_kernel, kernels_made_by
from kda_cute.records import decay_offset, image_offset
from kda_sm100 import layouts
from kda_sm100.config import HEAD_DIM


def launch(
    kernel: Any, arguments: Any, config: Any, arch: str, tensor: torch.Tensor, seed: int, **given: Any
) -> None:
    """One launch with the arguments of these names; tensors stand for their addresses, and what is not named is 0.
    Waits for its end."""
    names = [name for group in arguments.values() for name in group]
    assert given.keys() <= set(names), given.keys() - set(names)
    values = [given.get(name) for name in names]
    addresses = [x.data_ptr() if torch.is_tensor(x) else x or 0 for x in values]
    if tensor.is_cuda:
        get_kernel(kernel, config, arch)(tensor, *addresses)
        torch.cuda.synchronize()
        return
    tensors = [x for x in values if torch.is_tensor(x)]
    with kernels_made_by(ptx_emulator.load), ptx_emulator.device(arch, seed=seed, tensors=tensors):
        get_kernel(kernel, config, arch)(tensor, *addresses)


class Workspace:
    """A workspace, filled with ones, and its records: logical [records, rows, columns] by name."""

    def __init__(self, records: int, C: int, device: str) -> None:
        size = layouts.workspace_bytes(records, C)
        room = torch.full((size + 128,), 0xFF, dtype=torch.uint8, device=device)
        self.bytes, self.C = room[-room.data_ptr() % 128 :][:size], C
        self.start, self.records = layouts.addresses(0, records, C), records

    def _view(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The records of an array, [records, elements], and where their elements are."""
        size = self.records * layouts.record_bytes(self.C)[name]
        flat = self.bytes[self.start[name] :][:size]
        flat = flat.view(torch.float32 if name == "a" else torch.bfloat16).view(self.records, -1)
        if name == "a":
            return flat, decay_offset(torch.arange(HEAD_DIM)).to(flat.device)
        columns = self.C if name == "aqk" else HEAD_DIM
        row, column = torch.arange(self.C)[:, None], torch.arange(columns)
        return flat, image_offset(row, column, self.C, columns).to(flat.device)

    def __getitem__(self, name: str) -> torch.Tensor:
        flat, places = self._view(name)
        return flat[:, places]

    def __setitem__(self, name: str, logical: torch.Tensor) -> None:
        flat, places = self._view(name)
        flat[:, places.flatten()] = logical.to(flat.dtype).flatten(1)


def chunks_of(
    B: int, T: int, C: int, lengths: tuple[int, ...] | None
) -> tuple[list[tuple[int, int, int, int]], int]:
    """(row of B, first token, tokens, slot) of every chunk, and the number of slots."""
    if lengths is None:
        each = -(-T // C)
        found = [(b, c * C, min(C, T - c * C), b * each + c) for b in range(B) for c in range(each)]
        return found, layouts.slot_count(B, T, C)
    found, start = [], 0
    for n, size in enumerate(lengths):
        slot = start // C + n
        found += [(0, start + c * C, min(C, size - c * C), slot + c) for c in range(-(-size // C))]
        start += size
    return found, layouts.slot_count(B, T, C, len(lengths))
