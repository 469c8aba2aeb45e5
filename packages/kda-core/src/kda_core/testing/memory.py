"""Tensors between elements of known contents, to find reads and writes outside of them; and tensors at addresses."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.validate import extent


def guarded(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, guard: int = 4096
) -> tuple[Tensor, Any]:
    """Returns a tensor between `guard` elements of 7 on each side, and a function that returns these elements."""
    size = math.prod(shape)
    whole = torch.full((size + 2 * guard,), 7.0, dtype=dtype, device=device)
    return whole[guard : guard + size].view(shape), lambda: torch.cat([whole[:guard], whole[guard + size :]])


def amid(x: Tensor, guard: int = 4096) -> Tensor:
    """Returns a copy of x between `guard` NaNs on each side, or between large numbers if x has integers."""
    fill = float("nan") if x.is_floating_point() else 2**30
    whole = torch.full((x.numel() + 2 * guard,), fill, dtype=x.dtype, device=x.device)
    return whole[guard : guard + x.numel()].view(x.shape).copy_(x)


class Layout(NamedTuple):
    """The metadata of a tensor in host memory: what a `kda_core.backend.PreparedLaunch` knows besides its address."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    bytes: int

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        return cls(x.shape, x.stride(), x.dtype, extent(x))

    def at(self, address: int) -> Tensor:
        """Returns the tensor at an address, whose memory the caller keeps alive."""
        if not self.bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        memory = (ctypes.c_char * self.bytes).from_address(address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.shape, self.strides)
