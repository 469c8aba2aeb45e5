"""Copies small integer tensors, such as offsets, to the device. The host does not wait for the device.

Copies are cached by content, device and stream. Other streams get a copy of their own, because they could read this one before it
has finished.

CUDA graphs:

- A capture uses the cached copy of any stream. It starts when the device is idle, so that copy has finished. A call before the
  capture provides it.
- Without a cached copy, the copy becomes part of the graph. The graph owns its memory, and this module keeps the host tensor
  that the graph reads.
- Tensors that a graph reads are kept until the process ends, because nothing reports the end of a graph. Graphs that read the
  same content share one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kda_cp.cache import Cache


class Integers(NamedTuple):
    """Integers [n] and the dtype of their tensor."""

    values: tuple[int, ...]
    dtype: torch.dtype


class Uploaded(NamedTuple):
    """A tensor of integers [n] on the device, and the same on the host. Both are shared and must not be written."""

    device: Tensor
    host: Tensor


Groups = tuple[Integers, ...]


class Uploads:
    """A cache of uploaded integers. It holds at most `size` groups, and all those that captured graphs read."""

    def __init__(self, size: int) -> None:
        self._recent = Cache(size)
        self._captured: dict[tuple[Groups, torch.device], tuple[Uploaded, ...]] = {}
        self._captured_sources: dict[tuple[Groups, torch.device], tuple[Tensor, ...]] = {}

    def get(self, groups: Groups, device: torch.device) -> tuple[Uploaded, ...]:
        """Returns one pair of tensors for each of `groups`."""
        key = (groups, device)
        if device.type != "cuda":
            return self._recent.get(key, lambda: _to_device(_to_host(groups, device), device))
        if torch.cuda.is_current_stream_capturing():
            found = self._captured.get(key) or (self._recent.peek(key) or {}).get(None)
            if found is not None:
                return self._captured.setdefault(key, found)
            if key not in self._captured_sources:
                self._captured_sources[key] = _to_host(groups, device)
            return _to_device(self._captured_sources[key], device)
        by_stream: dict[int | None, tuple[Uploaded, ...]] = self._recent.get(key, dict)
        stream = torch.cuda.current_stream(device).cuda_stream
        if (known := by_stream.get(stream)) is None:
            known = by_stream[stream] = _to_device(_to_host(groups, device), device)
            by_stream.setdefault(None, known)  # for captures: the oldest copy finishes first
        return known


_uploads = Uploads(512)


def upload(values: Iterable[int], dtype: torch.dtype, device: torch.device) -> Uploaded:
    """Returns integers [n] on `device` and in host memory."""
    return _uploads.get((Integers(tuple(values), dtype),), device)[0]


def upload_groups(groups: Groups, device: torch.device) -> tuple[Uploaded, ...]:
    """Returns the result of `upload` for each of `groups`."""
    return _uploads.get(groups, device)


def _to_host(groups: Groups, device: torch.device) -> tuple[Tensor, ...]:
    pinned = device.type == "cuda"
    return tuple(torch.tensor(values, dtype=dtype, pin_memory=pinned) for values, dtype in groups)


def _to_device(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Uploaded, ...]:
    return tuple(Uploaded(x.to(device, non_blocking=True), x) for x in tensors)
