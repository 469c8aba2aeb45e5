"""Measures `Constants` on a GPU within seconds: ``python -m kda_cp calibrate``.

`fit` times calls of n tasks of T tokens, for n = 1, `FEW`, half of the SMs and all SMs. It assumes that all n tasks run at
once, in one way up to half of the SMs and in a slower way above. Then, by the model of `kda_cp.constants.Pass`, the slope of the
time in T is ``intra_chunk_ns * n + max(ns(n), work_ns * n)``, and the rest of the time is ``call_us``. The work never limits few
tasks, hence::

    intra_chunk_ns = (slope(FEW) - slope(1)) / (FEW - 1)
    chain = (half, slope(1) - intra_chunk_ns), (SMs, slope(SMs) - intra_chunk_ns * SMs)
    work_ns = slope(half) / half - intra_chunk_ns       if the latency does not explain slope(half), else 0

A forward call has one sequence of n value heads. For a backend that summarises segments itself, `summarize` and
`execute_segments` are timed as well, over one segment of n value heads; for one with `initial_state_gradients`, that method and the
backward in both modes; for one with `summarize_beside`, both steps of one plan with whole ends.

Shipped constants contain more ways of execution than these few calls can find. A backend that has shipped constants keeps
them, scaled to the measured times (`scaled`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from kda_core import backward, buffers, chunk_kda, validate
from kda_core.backend import (
    SupportsMerge,
    SupportsSegments,
    SupportsStateGradients,
    SupportsWholeEnds,
    saves_states,
)
from kda_core.contract import FLOAT_TENSORS, Feature, KdaInputs, KdaOptions, Tensors, dtype_name
from kda_core.errors import DeviceError
from kda_core.registry import REGISTRY, Choice
from kda_cp import whole_ends
from kda_cp.constants import SHIPPED_SMS, Beside, Constants, Pass, shipped
from kda_cp.cost import call_us
from kda_cp.merge import merge
from kda_cp.plan import Plan
from kda_cp.whole_ends_cost import WholeEndsModel

SHORT, LONG = 2048, 8192  # tokens of the two timed calls
FEW = 8  # tasks of a call that the work does not limit
ENDS_TOKENS, ENDS_HEADS = 65536, 8  # of the call with whole ends
D = 128  # K and V
REPEATS = 20
FLUSH_BYTES = 256 << 20  # several times the L2
BOUND_BY_WORK = 1.05  # the work limits a call if the slope exceeds the latency by this factor
LEAST_NS = 1e-3  # lower limit of a latency: noise may make the difference of two times negative


def fit(measured_us: Callable[[int, int], float], SMs: int) -> Pass:
    """Returns the constants that explain device times.

    Args:
        measured_us: returns the device time in us of a call with n tasks of T tokens.
        SMs: SMs of the GPU, more than 2 * `FEW`.
    """
    half = SMs // 2
    times = {n: (measured_us(n, SHORT), measured_us(n, LONG)) for n in (1, FEW, half, SMs)}
    slope = {n: 1e3 * (long - short) / (LONG - SHORT) for n, (short, long) in times.items()}  # ns per token
    intra_chunk = max(0.0, (slope[FEW] - slope[1]) / (FEW - 1))
    latency = max(LEAST_NS, slope[1] - intra_chunk)
    bound = slope[half] - intra_chunk * half
    return Pass(
        chain=((half, latency), (SMs, max(latency, slope[SMs] - intra_chunk * SMs))),
        intra_chunk_ns=intra_chunk,
        work_ns=bound / half if bound > BOUND_BY_WORK * latency else 0.0,
        call_us=max(0.0, times[1][0] - slope[1] * SHORT / 1e3),
    )


def scaled(known: Pass, measured_us: Callable[[int, int], float], SMs: int) -> Pass:
    """Returns `known`, the constants of a GPU with `SHIPPED_SMS`, adapted to another GPU; other arguments as in `fit`.

    Lanes are scaled by the number of SMs. Times are scaled by one factor: the median over calls of n tasks, for n = 1,
    `FEW`, half of the SMs and all SMs.
    """
    known = _with_lanes_of(known, SMs)
    tasks = (1, FEW, SMs // 2, SMs)
    return _times(known, statistics.median(measured_us(n, LONG) / call_us(known, [LONG], n) for n in tasks))


def _with_lanes_of(p: Pass, SMs: int) -> Pass:
    """Returns a pass of a GPU with `SHIPPED_SMS` with the lanes of a GPU with this number of SMs."""
    return replace(p, chain=tuple((max(1, n * SMs // SHIPPED_SMS), ns) for n, ns in p.chain))


def _times(p: Pass, factor: float) -> Pass:
    """Returns a pass with all times multiplied by a factor."""
    return Pass(
        chain=tuple((n, ns * factor) for n, ns in p.chain),
        intra_chunk_ns=p.intra_chunk_ns * factor,
        work_ns=p.work_ns * factor,
        call_us=p.call_us * factor,
        even=p.even,
    )


def measure(device: torch.device, backend: str, dtype: torch.dtype) -> Constants:
    """Returns the constants of a backend on a CUDA device for one dtype of q, k, v. K = V = 128; gates are in the kernel.

    Raises:
        DeviceError: `device` is not a CUDA device.
        BackendError: the backend does not serve such calls.
    """
    if device.type != "cuda":
        raise DeviceError("device", "a CUDA device (a CPU runs serially)", str(device))

    def forward_us(n: int, T: int) -> float:
        x = _arguments(n, T, device, dtype)
        return device_us(lambda: chunk_kda(**x, backend=backend, context_parallel="off"), device)

    heads, steps = 8, 16
    chosen = segment_calls(1, SHORT, device, dtype, backend).backend
    merge_us = device_us(merge_call(chosen, heads, steps, device), device) / steps
    x = _arguments(heads, LONG, device, dtype)
    copied = [x[name] for name in ("k", "v", "g", "beta")]
    two_ranges = lambda t: (t[:, :100], t[:, 200:])  # nearly all tokens, which are not neighbours in memory
    gather_us = device_us(lambda: [torch.cat(two_ranges(t), 1) for t in copied], device)
    SMs = torch.cuda.get_device_properties(device).multi_processor_count
    known, _ = shipped((torch.cuda.get_device_name(device), backend, dtype_name(dtype)))

    def fitted(name: str, measured_us: Callable[[int, int], float]) -> Pass:
        own = None if known is None else getattr(known, name)
        return fit(measured_us, SMs) if own is None else scaled(own, measured_us, SMs)

    found = Constants(fitted("forward", forward_us), merge_us, gather_us * 1e3 / (LONG * heads))

    def summarize_us(n: int, T: int) -> float:
        return device_us(segment_calls(n, T, device, dtype, backend).summarize, device)

    def execute_us(n: int, T: int) -> float:
        calls = segment_calls(n, T, device, dtype, backend)
        calls.summarize()
        return device_us(calls.execute, device)

    def gradients_us(name: str) -> Callable[[int, int], float]:
        return lambda n, T: device_us(gradient_calls(n, T, device, dtype, backend)[name], device)

    passes: dict[str, Any] = {}
    if isinstance(chosen, SupportsSegments):
        passes = {"summarize": fitted("summarize", summarize_us), "execute": fitted("execute", execute_us)}
    names = gradient_calls(1, SHORT, device, dtype, backend)
    passes |= {name: fitted(name, gradients_us(name)) for name in names}
    found = replace(found, **passes)
    if isinstance(chosen, SupportsWholeEnds):
        found = replace(found, beside=measure_beside(found, known, device, dtype, backend))
    return found


def measure_beside(
    constants: Constants, known: Constants | None, device: torch.device, dtype: torch.dtype, name: str
) -> Beside | None:
    """Returns `Constants.beside`: those of `known`, or else the passes of `constants`, scaled to the measured times of both steps of one
    plan: the best one for `ENDS_TOKENS` tokens of `ENDS_HEADS` heads. None if there is no such plan."""
    if known is not None and known.beside is not None:
        SMs = torch.cuda.get_device_properties(device).multi_processor_count
        beside = Beside(*(_with_lanes_of(getattr(known.beside, f.name), SMs) for f in fields(Beside)))
    else:
        summarize, execute = constants.summarize, constants.execute
        assert summarize is not None and execute is not None
        beside = Beside(constants.forward, summarize, constants.forward, execute)
    model = WholeEndsModel(replace(constants, beside=beside), ENDS_HEADS)
    best = model.best([ENDS_TOKENS])
    if best is None:
        return None
    choice, inputs = _segment(ENDS_HEADS, ENDS_TOKENS, device, dtype, name)
    execution = whole_ends.execution(Plan(best[0], whole_ends=True), inputs.shape, choice.backend)
    steps = whole_ends.Steps(execution, inputs, buffers.allocate_outputs(inputs, execution.workspace_bytes))
    measured = []
    for step in (steps.summarize, steps.execute):
        measured.append(device_us(step, device))
        steps.merge()
    first, last = (us / predicted for us, predicted in zip(measured, model.steps(best[0])))
    return Beside(
        first=_times(beside.first, first),
        summarize=_times(beside.summarize, first),
        last=_times(beside.last, last),
        execute=_times(beside.execute, last),
    )


class SegmentCalls(NamedTuple):
    """A backend and its two calls over one segment.

    Attributes:
        backend: the backend.
        summarize: calls `summarize`.
        execute: calls `execute_segments`. Requires a call of `summarize` before.
    """

    backend: Any
    summarize: Callable[[], Any]
    execute: Callable[[], Any]


def segment_calls(n: int, T: int, device: torch.device, dtype: torch.dtype, name: str) -> SegmentCalls:
    """Returns the calls of the backend `name` over one segment of T tokens with n value heads."""
    choice, inputs = _segment(n, T, device, dtype, name)
    backend: Any = choice.backend
    exits, M = torch.empty(2, 1, n, D, D, device=device)
    size = backend.segment_workspace_bytes(inputs.shape) if isinstance(backend, SupportsSegments) else 0
    outputs = buffers.allocate_outputs(inputs, size)
    return SegmentCalls(
        backend,
        lambda: backend.summarize(inputs, exits, M, outputs.workspace),
        lambda: backend.execute_segments(inputs, outputs),
    )


def gradient_calls(
    n: int, T: int, device: torch.device, dtype: torch.dtype, name: str
) -> dict[str, Callable[[], Any]]:
    """Returns the calls of the backward of the backend `name` over one segment of T tokens with n value heads, by their names in
    `Constants`; none if the backend has no `initial_state_gradients`, or if no states are saved for its backward."""
    choice, inputs = _segment(n, T, device, dtype, name)
    backend, spec = choice.backend, choice.spec
    if Feature.BACKWARD.value not in spec.features or not isinstance(backend, SupportsStateGradients):
        return {}
    if not saves_states(inputs.shape, spec, spec, backend):
        return {}

    def backward_call(inputs: KdaInputs) -> Callable[[], Any]:
        kept = buffers.allocate_saved(inputs.shape, inputs.q)
        for saved in kept:
            if saved is not None:
                saved.zero_()
        memory = backward.reserve(choice, inputs, FLOAT_TENSORS)
        return lambda: backward.run(choice, inputs, inputs.v, None, memory, kept)

    _, x = _segment(n, T, device, dtype, name, needs_backward=True)
    _, dense = _segment(n, T, device, dtype, name, needs_backward=True, disable_recompute=True)
    gradients, M = torch.empty(2, 1, n, D, D, device=device)
    workspace = buffers.allocate_workspace(backend.state_gradients_workspace_bytes(x.shape), x.q)
    return {
        "backward": backward_call(x),
        "backward_dense": backward_call(dense),
        "state_gradients": lambda: backend.initial_state_gradients(x, x.v, None, gradients, M, workspace),
    }


def _segment(
    n: int, T: int, device: torch.device, dtype: torch.dtype, name: str, **options: Any
) -> tuple[Choice, KdaInputs]:
    """Returns the backend `name`, and the inputs of a packed call over one segment of T tokens with n value heads."""
    x = _arguments(n, T, device, dtype) | options
    offsets = torch.tensor([0, T], dtype=torch.int32)
    tensors = Tensors(
        **{tensor: x.pop(tensor) for tensor in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")},
        initial_state=torch.zeros(1, n, D, D, device=device),
        cu_seqlens=offsets.to(device),
        cu_seqlens_cpu=offsets,
    )
    shape = validate.problem_shape(*tensors, options=KdaOptions(**x))
    return REGISTRY.resolve(shape, name), buffers.make_inputs(tensors, shape)


def merge_call(backend: Any, heads: int, steps: int, device: torch.device) -> Callable[[], Any]:
    """Returns a function that merges `steps` segments of one sequence, as a plan over this backend does."""
    S = torch.randn(heads, D, D, device=device)
    M = torch.randn(heads, D, D, device=device) / D
    if not isinstance(backend, SupportsMerge):
        return lambda: merge([S], [[S] * steps], [[M] * (steps - 1)])
    states, exits, transitions = (x.expand(steps + 1, -1, -1, -1).contiguous() for x in (S, S, M))
    bounds = torch.tensor([0, steps + 1], dtype=torch.int32, device=device)
    return lambda: backend.merge_segments(states, exits, transitions, bounds)


def device_us(call: Callable[[], Any], device: torch.device) -> float:
    """Returns the median device time of `REPEATS` replays of a captured call, in us, each after a flush of the L2."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # compiles kernels and uploads integers, which should not be part of the capture
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
    """Returns the arguments of a call of T tokens with n value heads. Its time does not depend on gates and values."""
    q, k, v, g = torch.randn(4, 1, T, n, D, device=device, dtype=dtype).unbind()
    return {
        "q": q, "k": k, "v": v, "g": g, "beta": torch.randn(1, T, n, device=device, dtype=dtype),
        "A_log": torch.zeros(n, device=device), "dt_bias": torch.zeros(n, D, device=device), "lower_bound": -5.0,
        "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "output_final_state": True,
    }  # fmt: skip
