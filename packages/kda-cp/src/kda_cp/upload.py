"""Small integer tensors on the device, such as offsets, without a wait for the device.

Copies are kept by content, device and stream. On another stream than its own a copy may not have finished.

CUDA graphs:

- A capture uses the copy of any stream. It begins when the device is idle, so all earlier copies have finished. A call
  before the capture provides that copy.
- Without an earlier copy the copies become part of the graph. The graph owns their memory, and only the host tensors that
  they read have to be kept.
- What a graph reads is kept until the process ends, because nothing reports the end of a graph. It is kept once per
  content, however many graphs read it.
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
    """One tensor of integers [n] on the device and its host copy. Both are shared and must not be written."""

    device: Tensor
    host: Tensor


Groups = tuple[Integers, ...]


class Uploads:
    """A cache of uploaded integers; at most `size` groups beside those that captured graphs read."""

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
            by_stream.setdefault(None, known)  # for captures: the first copy has had the most time
        return known


_uploads = Uploads(512)


def upload(values: Iterable[int], dtype: torch.dtype, device: torch.device) -> Uploaded:
    """Returns integers [n] on `device` and in host memory."""
    return _uploads.get((Integers(tuple(values), dtype),), device)[0]


def upload_groups(groups: Groups, device: torch.device) -> tuple[Uploaded, ...]:
    """Returns what `upload` returns, for each of `groups`."""
    return _uploads.get(groups, device)


def _to_host(groups: Groups, device: torch.device) -> tuple[Tensor, ...]:
    pinned = device.type == "cuda"
    return tuple(torch.tensor(values, dtype=dtype, pin_memory=pinned) for values, dtype in groups)


def _to_device(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Uploaded, ...]:
    return tuple(Uploaded(x.to(device, non_blocking=True), x) for x in tensors)
