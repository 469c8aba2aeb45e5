"""Measures `Constants` on the GPU at hand, in a few seconds: ``python -m kda_cp calibrate``.

Calls of n streams of T tokens are timed, for n = 1, `FEW`, half and all of the SMs. By the model of `kda_cp.constants.Pass` the
slope in T is ``prepare_ns * n + max(ns(n), work_ns * n)``, for the device runs all n streams at once, in one way up to half
the SMs and in another beyond; and the rest of the time is ``call_us``. Few streams are never bound by the work, so::

    prepare_ns = (slope(FEW) - slope(1)) / (FEW - 1)
    chain = (half, slope(1) - prepare_ns), (SMs, slope(SMs) - prepare_ns * SMs)
    work_ns = slope(half) / half - prepare_ns       where that is above what latency explains, else 0

A forward call has a sequence of n value heads; of a backend that summarises segments itself, its two calls are timed as well,
over one segment of n heads.

Of a backend with shipped constants, which tell more ways of running than these few calls can, those are kept, and scaled to the
times found here (`scaled`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kda_core import buffers, chunk_kda, validate
from kda_core.backend import SupportsMerge, SupportsSegments
from kda_core.contract import KdaOptions
from kda_core.errors import DeviceError
from kda_core.registry import REGISTRY
from kda_cp.constants import SHIPPED_SMS, Constants, Pass, shipped
from kda_cp.merge import merge
from kda_cp.plan import pass_us

SHORT, LONG = 2048, 8192  # tokens
FEW = 8
D = 128  # K and V
REPEATS = 20
FLUSH_BYTES = 256 << 20  # several times the L2
BOUND_BY_WORK = 1.05  # a slope this much above what latency explains
LEAST_NS = 1e-3  # where noise leaves no latency at all


def fit(call_us: Callable[[int, int], float], SMs: int) -> Pass:
    """The constants that explain device times.

    Args:
        call_us: device time of a call with n streams of T tokens.
        SMs: of the GPU, more than 2 * `FEW`.
    """
    half = SMs // 2
    times = {n: (call_us(n, SHORT), call_us(n, LONG)) for n in (1, FEW, half, SMs)}
    slope = {n: 1e3 * (long - short) / (LONG - SHORT) for n, (short, long) in times.items()}  # ns a token
    prepare = max(0.0, (slope[FEW] - slope[1]) / (FEW - 1))
    latency = max(LEAST_NS, slope[1] - prepare)
    bound = slope[half] - prepare * half
    return Pass(
        chain=((half, latency), (SMs, max(latency, slope[SMs] - prepare * SMs))),
        prepare_ns=prepare,
        work_ns=bound / half if bound > BOUND_BY_WORK * latency else 0.0,
        call_us=max(0.0, times[1][0] - slope[1] * SHORT / 1e3),
    )


def scaled(known: Pass, call_us: Callable[[int, int], float], SMs: int) -> Pass:
    """`known`, of a GPU of `SHIPPED_SMS`, for one on which calls take so long; arguments as in `fit`. All its times change by
    one factor, the median over calls of 1, `FEW`, half and all of the SMs' streams, and its lanes with the SMs."""
    lanes = tuple((max(1, n * SMs // SHIPPED_SMS), ns) for n, ns in known.chain)
    known = replace(known, chain=lanes)
    streams = (1, FEW, SMs // 2, SMs)
    factor = statistics.median(call_us(n, LONG) / pass_us(known, [LONG], n) for n in streams)
    return Pass(
        chain=tuple((n, ns * factor) for n, ns in lanes),
        prepare_ns=known.prepare_ns * factor,
        work_ns=known.work_ns * factor,
        call_us=known.call_us * factor,
        even=known.even,
    )


def measure(device: torch.device, backend: str, dtype: torch.dtype) -> Constants:
    """The constants of a backend on a CUDA device, K = V = 128, gates in the kernel.

    Raises:
        DeviceError: `device` is no CUDA device.
        BackendError: the backend does not serve such calls.
    """
    if device.type != "cuda":
        raise DeviceError("device", "a CUDA device (a CPU runs serially)", str(device))

    def forward_us(n: int, T: int) -> float:
        x = _arguments(n, T, device, dtype)
        return device_us(lambda: chunk_kda(**x, backend=backend, context_parallel="off"), device)

    heads, steps = 8, 16
    chosen = segment_calls(1, SHORT, device, dtype, backend)[0]
    merge_us = device_us(merge_call(chosen, heads, steps, device), device) / steps
    x = _arguments(heads, LONG, device, dtype)
    copied = [x[name] for name in ("k", "v", "g", "beta")]
    gather_us = device_us(lambda: [torch.cat((t[:, :100], t[:, 200:]), 1) for t in copied], device)
    SMs = torch.cuda.get_device_properties(device).multi_processor_count
    known, _ = shipped((torch.cuda.get_device_name(device), backend, str(dtype)[6:]))

    def fitted(name: str, call_us: Callable[[int, int], float]) -> Pass:
        of_known = None if known is None else getattr(known, name)
        return fit(call_us, SMs) if of_known is None else scaled(of_known, call_us, SMs)

    found = Constants(fitted("forward", forward_us), merge_us, gather_us * 1e3 / (LONG * heads))
    if not isinstance(chosen, SupportsSegments):
        return found

    def summarize_us(n: int, T: int) -> float:
        return device_us(segment_calls(n, T, device, dtype, backend)[1], device)

    def run_us(n: int, T: int) -> float:
        _, summarize, run = segment_calls(n, T, device, dtype, backend)
        summarize()
        return device_us(run, device)

    return replace(found, summarize=fitted("summarize", summarize_us), run=fitted("run", run_us))


def segment_calls(
    n: int, T: int, device: torch.device, dtype: torch.dtype, name: str
) -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    """The backend, and its `summarize` and `execute_segments` of one segment with n value heads."""
    x = _arguments(n, T, device, dtype)
    offsets = torch.tensor([0, T], dtype=torch.int32)
    tensors = [x.pop(name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")]
    tensors += [torch.zeros(1, n, D, D, device=device), offsets.to(device), offsets]
    shape = validate.problem_shape(*tensors, options=KdaOptions(**x))
    backend: Any = REGISTRY.resolve(shape, name).backend
    inputs = buffers.make_inputs(tensors, shape)
    exits, M = torch.empty(2, 1, n, D, D, device=device)
    size = backend.segment_workspace_bytes(shape) if isinstance(backend, SupportsSegments) else 0
    outputs = buffers.allocate_outputs(inputs, size)
    return (
        backend,
        lambda: backend.summarize(inputs, exits, M, outputs.workspace),
        lambda: backend.execute_segments(inputs, outputs),
    )


def merge_call(backend: Any, heads: int, steps: int, device: torch.device) -> Callable[[], Any]:
    """A merge of `steps` pieces of one sequence, as a plan over this backend makes it."""
    S = torch.randn(heads, D, D, device=device)
    M = torch.randn(heads, D, D, device=device) / D
    if not isinstance(backend, SupportsMerge):
        return lambda: merge([S], [[S] * steps], [[M] * (steps - 1)])
    states, exits, transitions = (x.expand(steps + 1, -1, -1, -1).contiguous() for x in (S, S, M))
    bounds = torch.tensor([0, steps + 1], dtype=torch.int32, device=device)
    return lambda: backend.merge_segments(states, exits, transitions, bounds)


def device_us(call: Callable[[], Any], device: torch.device) -> float:
    """Median device time of replays of a captured call, in us, the L2 flushed before each."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # compiles, and brings to the device what a capture may not
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        for start, end in spans:
            flush.zero_()  # also keeps the device busy while the host enqueues the replay
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return 1e3 * statistics.median(start.elapsed_time(end) for start, end in spans)


def _arguments(n: int, T: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A call with n value heads. Gates and values do not change its time."""
    q, k, v, g = torch.randn(4, 1, T, n, D, device=device, dtype=dtype).unbind()
    return {
        "q": q, "k": k, "v": v, "g": g, "beta": torch.randn(1, T, n, device=device, dtype=dtype),
        "A_log": torch.zeros(n, device=device), "dt_bias": torch.zeros(n, D, device=device), "lower_bound": -5.0,
        "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "output_final_state": True,
    }  # fmt: skip
