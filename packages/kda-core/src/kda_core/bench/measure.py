"""Device time, host time and memory of a call, and the difference of two outputs."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 512 << 20  # several times the L2 of any supported GPU


def device_time(call: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the median milliseconds of `call` on the device, from replays of a CUDA graph with the L2 flushed before each.

    The flush keeps the GPU busy while the host enqueues the replay, which hides the launch latency.
    """
    graph = _graph([call] * 3, [call])
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    graph.replay()
    return _between_events(graph.replay, flush, repeats)


def launch_time(launches: Sequence[Callable[[], Any]], repeats: int = 20) -> float:
    """Returns the median milliseconds of a launch on the device, from replays of one CUDA graph that holds all `launches`.

    The L2 is not flushed: together, the launches must touch several times the L2, each another part of it.
    """
    graph = _graph(launches[:2], launches)
    graph.replay()
    return _between_events(graph.replay, None, repeats) / len(launches)


def _graph(first: Sequence[Callable[[], Any]], launches: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph of `launches`, after it has made the `first` calls eagerly, on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still compute the inputs
    with torch.cuda.stream(stream):
        for call in first:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in launches:
            call()
    return graph


def _between_events(work: Callable[[], Any], flush: Tensor | None, repeats: int) -> float:
    """Returns the median milliseconds of `work` on the current stream; `flush` is overwritten before each."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for start, end in events:
        if flush is not None:
            flush.zero_()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def event_time(call: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the median milliseconds between CUDA events around an eager `call`, with the L2 flushed before each. Where the host
    is slower than the kernels, this is the host's time: use it only for a call that no CUDA graph can capture."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    call()
    return _between_events(call, flush, repeats)


def times(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int, is_peer: bool
) -> dict[str, Any]:
    """Returns the median milliseconds of each call by its name, and how they were measured (``timing``).

    On a GPU "graph": device time by replays of a CUDA graph. A peer that no graph captures is timed by CUDA events ("events").
    On a CPU "eager": the time of the call.
    """
    if device.type != "cuda":
        return {n: eager_time(call, repeats) for n, call in calls.items()} | {"timing": "eager"}
    torch.cuda.synchronize()
    try:
        return {n: device_time(call, repeats) for n, call in calls.items()} | {"timing": "graph"}
    except RuntimeError as problem:
        if not is_peer:
            raise
        print(
            f"timed by events, because no CUDA graph can be captured: {problem}", file=sys.stderr, flush=True
        )
    return {n: event_time(call, repeats) for n, call in calls.items()} | {"timing": "events"}


def peak_bytes(call: Callable[[], Any], before: int) -> int:
    """Returns how far the allocated memory of the GPU rises above `before` bytes during `call`."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


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


def eager_launch_time(launches: Sequence[Callable[[], Any]], repeats: int = 20) -> float:
    """Returns the median milliseconds of one of the `launches`, called eagerly one after the other."""
    return eager_time(lambda: [call() for call in launches], repeats) / len(launches)


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
