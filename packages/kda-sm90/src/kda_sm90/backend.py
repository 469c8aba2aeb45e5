"""The backend object. A call is one launch. A call in segments is two launches, with a merge of states in between."""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_cute import get_kernel
from kda_cute.host import merge_segments, pass_states, refusal
from kda_sm90.arguments import ShapeArguments, addresses
from kda_sm90.config import ARCH, PrefillConfig
from kda_sm90.launch_config import (
    SMS,
    LaunchConfig,
    launch_config,
    segment_launch_configs,
    workspace_bytes,
)


class Sm90Backend:
    """Implements `kda_core.backend.Backend`. It has no state of its own: the process shares the compiled kernels."""

    def can_run(self, shape: ProblemShape) -> str | None:
        return refusal(shape)

    def workspace_bytes(self, shape: ProblemShape) -> int:
        return workspace_bytes(shape, sm_count())

    def compile(self, shape: ProblemShape) -> None:
        lengths_known = shape.varlen and not shape.options.use_graph
        steps = (n * length_step(shape) for n in range(LENGTH_STEPS + 1)) if lengths_known else ()
        for config in {launch_config(shape, sm_count(), longest).config for longest in (None, *steps)}:
            compiled(config)

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        if inputs.shape.T == 0:
            return pass_states(inputs, outputs)
        on_device_of(inputs.q, launch_of(inputs.shape, longest_of(inputs)), inputs, outputs)
        return outputs

    # ---- calls in segments (the feature SEGMENT_SUMMARY)

    def segment_workspace_bytes(self, shape: ProblemShape) -> int:
        return segment_launch_configs(shape, sm_count()).workspace_bytes

    def summarize(
        self, inputs: KdaInputs, exits: torch.Tensor, transitions: torch.Tensor, workspace: torch.Tensor
    ) -> None:
        outputs = KdaOutputs(inputs.v, exits, None, workspace)  # this mode writes no o
        on_device_of(inputs.q, segment_launches(inputs.shape)[0], inputs, outputs, transitions)

    def merge_segments(
        self,
        initial: torch.Tensor,
        exits: torch.Tensor,
        transitions: torch.Tensor,
        bounds: torch.Tensor,
    ) -> None:
        merge = functools.partial(merge_segments, sms=sm_count(), arch=ARCH)
        on_device_of(initial, merge, initial, exits, transitions, bounds)

    def execute_segments(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        on_device_of(inputs.q, segment_launches(inputs.shape)[1], inputs, outputs)
        return outputs


def on_device_of(x: torch.Tensor, launch: Any, *arguments: Any) -> None:
    """Calls ``launch(*arguments)`` with the device of x as the current device. For CPU tensors (device -1) the launch is
    emulated and needs no device.

    The function compares devices first, because entering the context of the current device takes longer.
    """
    device = x.get_device()
    if device < 0 or device == torch.cuda.current_device():
        launch(*arguments)
    else:
        with torch.cuda.device(device):
            launch(*arguments)


class Launch(NamedTuple):
    """A launch for a shape: the compiled kernel, and the arguments that are the same in every call."""

    kernel: Callable[..., Any]
    shape_arguments: ShapeArguments

    def __call__(
        self, inputs: KdaInputs, outputs: KdaOutputs, transitions: torch.Tensor | None = None
    ) -> None:
        """Launches on the current device and stream."""
        states = outputs.intermediate_states
        count = 0 if states is None else states.shape[0] * states.shape[1]
        m = 0 if transitions is None else transitions.data_ptr()
        # A plain tuple in the order of `LaunchArguments`: constructing the NamedTuple takes 0.5 us.
        launch_arguments = (next(_tickets), m, count)
        self.kernel(outputs.o, *addresses(inputs, outputs), *launch_arguments, *self.shape_arguments)


#: Tickets that no other launch on the same workspace has had, in any process. See ``schedule.clear``.
_tickets = itertools.count(1 + secrets.randbits(62))


@functools.lru_cache(maxsize=1024)
def launch_of(shape: ProblemShape, longest: int | None = None) -> Launch:
    """Returns the launch for a shape; ``longest`` as in `launch_config`. Compiles its kernel on first use.

    The cache holds the last 1024 results.
    """
    return _launch(shape, launch_config(shape, sm_count(), longest))


#: The length of the longest packed sequence is rounded up to a multiple of T / LENGTH_STEPS. Calls of one shape then
#: share few launches.
LENGTH_STEPS = 32


def length_step(shape: ProblemShape) -> int:
    """Returns the step in tokens. The longest length is rounded up to a multiple of it."""
    return -(-shape.T // LENGTH_STEPS)


def longest_of(inputs: KdaInputs) -> int | None:
    """Returns the tokens of the longest packed sequence, rounded up to a multiple of `length_step`.

    Returns None for sequences that are not packed, and if the host does not know the lengths.
    """
    if inputs.cu_seqlens is None or (lengths := inputs.sequence_lengths()) is None:
        return None
    step = length_step(inputs.shape)
    return -(-max(lengths) // step) * step


@functools.lru_cache(maxsize=1024)
def segment_launches(shape: ProblemShape) -> tuple[Launch, Launch]:
    """Returns the launches (summarize, execute) of segments packed along T."""
    configs = segment_launch_configs(shape, sm_count())
    return _launch(shape, configs.summarize), _launch(shape, configs.execute)


def _launch(shape: ProblemShape, launch: LaunchConfig) -> Launch:
    options, config = shape.options, launch.config
    arguments = ShapeArguments(
        N=shape.N,
        T=shape.T,
        H=shape.H,
        HV=shape.HV,
        offset_bytes=0 if shape.index_dtype is None else shape.index_dtype.itemsize,
        beta_bytes=shape.beta_dtype.itemsize,
        l2norm=int(options.use_qk_l2norm_in_kernel),
        v_first=int(options.state_v_first),
        every=max(1, options.chunk_size // config.chunk),
        intra_chunk_ctas=launch.intra_chunk_ctas,
        queues=launch.queues,
        depth=launch.depth,
        scale=shape.scale,
        lower_bound=options.lower_bound or 0.0,
        beta_factor=(2.0 if options.allow_neg_eigval else 1.0) if options.use_beta_sigmoid_in_kernel else 0.0,
    )
    return Launch(compiled(config), arguments)


@functools.cache
def sm_count() -> int:
    """Returns the SMs of the smallest visible Hopper GPU; without such a GPU, those of an H100.

    All devices use this number, so a shape has one launch configuration and one workspace size.
    """
    devices = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return min((d.multi_processor_count for d in devices if d.major == 9), default=SMS)


def compiled(config: PrefillConfig) -> Callable[..., Any]:
    """Returns the compiled kernel of a variant."""
    from kda_sm90.kernels.prefill import PrefillKernel

    return get_kernel(PrefillKernel, config, ARCH)
