"""Launches of the chain kernel: its compiled variants, and the arguments that a shape determines."""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.backend import PreparedLaunch
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_cute import get_kernel
from kda_cute.arguments import bound
from kda_cute.pools import pool_addresses, pool_places
from kda_sm90.arguments import (
    BackwardArguments,
    InputArguments,
    ShapeArguments,
    addresses,
    serving_arguments,
    states_of,
)
from kda_sm90.config import ARCH, PrefillConfig
from kda_sm90.interfaces import PREFILL
from kda_sm90.launch_config import SMS, LaunchConfig


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


def at_the_same_time(x: torch.Tensor, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Launches ``first`` on a side stream, beside ``second`` on the current stream, which then waits for both. ``x`` names the device; for
    CPU tensors the launches are emulated one after the other."""
    device = x.get_device()
    if device < 0:
        first()
        second()
        return
    current = torch.cuda.current_stream(device)
    side = _side_stream(device, current.cuda_stream)
    side.fork.record(current)
    side.stream.wait_event(side.fork)
    try:
        with torch.cuda.stream(side.stream):
            first()
        second()
    finally:  # also a capture that fails must end with its streams joined
        side.join.record(side.stream)
        current.wait_event(side.join)


class SideStream(NamedTuple):
    """A stream beside another one, and the events at which they part and meet."""

    stream: torch.cuda.Stream
    fork: torch.cuda.Event
    join: torch.cuda.Event


@functools.lru_cache(maxsize=256)
def _side_stream(device: int, stream: int) -> SideStream:
    """Returns the side stream of a stream. Each stream has its own, so that a capture on one does not include calls on another."""
    return SideStream(torch.cuda.Stream(device, priority=-1), torch.cuda.Event(), torch.cuda.Event())


NO_BACKWARD = BackwardArguments()


class Launch(NamedTuple):
    """A launch for a shape: the compiled kernel, and the arguments that are the same in every call."""

    kernel: Callable[..., Any]
    shape_arguments: ShapeArguments
    serving: bool = False  # whether the kernel is a variant for serving

    def __call__(
        self,
        inputs: KdaInputs,
        outputs: KdaOutputs,
        transitions: torch.Tensor | None = None,
        backward: BackwardArguments = NO_BACKWARD,
    ) -> None:
        """Launches on the current device and stream."""
        states = states_of(outputs)
        count = 0 if states is None else states.shape[:-3].numel()
        m = 0 if transitions is None else transitions.data_ptr()
        # A plain tuple in the order of `LaunchArguments`: constructing the NamedTuple takes 0.5 us.
        launch_arguments = (next(_tickets), m, count, *backward)
        slots, more = (
            (pool_addresses(inputs, outputs), serving_arguments(inputs)) if self.serving else ((), ())
        )
        # o names the device and the stream, because it is contiguous in any call
        self.kernel(
            outputs.o, *slots, *addresses(inputs, outputs), *launch_arguments, *self.shape_arguments, *more
        )

    def prepare(self, inputs: KdaInputs) -> PreparedLaunch:
        """Implements `kda_core.backend.SupportsPrepare.prepare`."""
        places, more = (pool_places(inputs), serving_arguments(inputs)) if self.serving else (None, ())
        kernel, tickets = bound(self.kernel, 0, 0, *NO_BACKWARD, *self.shape_arguments, *more), _tickets

        def launch(o: Tensor, given: tuple[int, ...], o_at: int, final_state: int, workspace: int) -> None:
            # `InputArguments`, `OutputArguments`, the ticket; a variant for serving finds states by `PoolAddresses` alone
            first = given if places is None else places(given, final_state) + given[:_N_INPUTS]
            kernel(o, first + (o_at, final_state, 0, workspace, 0, next(tickets)))

        return launch


_N_INPUTS = len(InputArguments._fields)

#: Tickets that no other launch on the same workspace has had, in any process. See ``schedule.clear``.
_tickets = itertools.count(1 + secrets.randbits(62))


def make_launch(shape: ProblemShape, launch: LaunchConfig, spacing: int = 0) -> Launch:
    """Returns the launch of a shape with this configuration. Compiles its kernel on first use.

    Args:
        spacing: tokens between the saved states; 0 if the call saves none.
    """
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
        saved=int(spacing > 0),
        every=max(1, (spacing or options.chunk_size) // config.chunk),
        intra_chunk_ctas=launch.intra_chunk_ctas,
        queues=launch.queues,
        depth=launch.depth,
        scale=shape.scale,
        lower_bound=options.lower_bound or 0.0,
        beta_factor=(2.0 if options.allow_neg_eigval else 1.0) if options.use_beta_sigmoid_in_kernel else 0.0,
    )
    return Launch(compiled(config), arguments, config.serving)


@functools.cache
def sm_count() -> int:
    """Returns the SMs of the smallest visible Hopper GPU; without such a GPU, those of an H100.

    All devices use this number, so a shape has one launch configuration and one workspace size.
    """
    devices = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return min((d.multi_processor_count for d in devices if d.major == 9), default=SMS)


def compiled(config: PrefillConfig) -> Callable[..., Any]:
    """Returns the compiled kernel of a variant."""
    return get_kernel(PREFILL, config, ARCH)
