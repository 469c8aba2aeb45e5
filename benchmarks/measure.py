"""Device time and host time of a call, and the difference of two outputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 512 << 20  # several times the L2 of any supported GPU


def device_time(call: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the median milliseconds of `call` on the device, from replays of a CUDA graph with the L2 flushed before each.

    The flush keeps the GPU busy while the host enqueues the replay, which hides the launch latency.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    graph.replay()
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def eager_time(call: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the median milliseconds of one eager call: host and device work, up to the end of the last kernel."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    call()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def difference(x: Tensor, peer: Tensor) -> dict[str, float]:
    """Returns the elementwise difference from a peer's output of the same shape.

    Keys: ``rmse``, ``rel_max`` = max|x - peer| / max|peer|, ``mean_diff`` = mean|x - peer|.
    """
    a, b = x.float(), peer.float()
    delta = a - b
    return {
        "rmse": delta.square().mean().sqrt().item(),
        "rel_max": (delta.abs().max() / b.abs().max().clamp(min=1e-30)).item(),
        "mean_diff": delta.abs().mean().item(),
    }
