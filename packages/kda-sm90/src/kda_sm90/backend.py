"""The backend object: one launch, in which some CTAs prepare chunks and others are chains over them; or, where sequences
are cut into segments, one of summaries, the merge, and one of chains over the records that the first left."""

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
from kda_sm90.config import ARCH, PrefillConfig
from kda_sm90.plan import SMS, Plan, plan, segment_plan, workspace_bytes


class Sm90Backend:
    """Satisfies `kda_core.backend.Backend`. It has no state of its own; compiled kernels are shared by the process."""

    def can_run(self, shape: ProblemShape) -> str | None:
        return refusal(shape)

    def workspace_bytes(self, shape: ProblemShape) -> int:
        return workspace_bytes(shape, sm_count())

    def compile(self, shape: ProblemShape) -> None:
        told = shape.varlen and not shape.options.use_graph
        lengths = (n * length_step(shape) for n in range(LENGTH_STEPS + 1)) if told else ()
        for config in {plan(shape, sm_count(), longest).config for longest in (None, *lengths)}:
            compiled(config)

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        if inputs.shape.T == 0:
            return pass_states(inputs, outputs)
        on_device_of(inputs.q, launch_of(inputs.shape, longest_of(inputs)), inputs, outputs)
        return outputs

    # ---- sequences that are cut into segments (SEGMENT_SUMMARY)

    def segment_workspace_bytes(self, shape: ProblemShape) -> int:
        return segment_plan(shape, sm_count()).workspace_bytes

    def summarize(
        self, inputs: KdaInputs, exits: torch.Tensor, transitions: torch.Tensor, workspace: torch.Tensor
    ) -> None:
        outputs = KdaOutputs(inputs.v, exits, None, workspace)  # no o is written
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
    """Calls a launch while the device of a tensor is the current one. A CPU (-1) emulates. To enter the context of the
    current device takes longer than to ask for it."""
    device = x.get_device()
    if device < 0 or device == torch.cuda.current_device():
        launch(*arguments)
    else:
        with torch.cuda.device(device):
            launch(*arguments)


class Launch(NamedTuple):
    """All of a launch that the shape decides: the kernel, and numbers in the order of ``kernels.prefill.ARGUMENTS``."""

    kernel: Callable[..., Any]
    integers: tuple[int, ...]
    factors: tuple[float, ...]

    def __call__(
        self, inputs: KdaInputs, outputs: KdaOutputs, transitions: torch.Tensor | None = None
    ) -> None:
        """On the current device and stream."""
        states = outputs.intermediate_states
        tensors = (
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, inputs.cu_seqlens,
            inputs.initial_state, outputs.o, outputs.final_state, states, outputs.workspace,
        )  # fmt: skip
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        count = 0 if states is None else states.shape[0] * states.shape[1]
        m = 0 if transitions is None else transitions.data_ptr()
        self.kernel(outputs.o, *addresses, next(_tickets), m, count, *self.integers, *self.factors)


#: What tells a launch from all others that have used its workspace, of other processes too: see ``schedule.clear``.
_tickets = itertools.count(1 + secrets.randbits(62))


@functools.lru_cache(maxsize=1024)
def launch_of(shape: ProblemShape, longest: int | None = None) -> Launch:
    """The launch that serves a shape, ``longest`` as in `plan`; compiles its kernel if no call has needed it before. The last
    1024 are held."""
    return _launch(shape, plan(shape, sm_count(), longest))


#: Of packed sequences, the longest is told in steps of T / LENGTH_STEPS, so that calls of one shape have few plans.
LENGTH_STEPS = 32


def length_step(shape: ProblemShape) -> int:
    return -(-shape.T // LENGTH_STEPS)


def longest_of(inputs: KdaInputs) -> int | None:
    """Tokens of the longest packed sequence, rounded up to steps, where the host knows them; None for fixed lengths."""
    if inputs.cu_seqlens is None or (lengths := inputs.sequence_lengths()) is None:
        return None
    step = length_step(inputs.shape)
    return -(-max(lengths) // step) * step


@functools.lru_cache(maxsize=1024)
def segment_launches(shape: ProblemShape) -> tuple[Launch, Launch]:
    """The two launches of segments packed along T: summaries, and the run."""
    chosen = segment_plan(shape, sm_count())
    return _launch(shape, chosen.summarize), _launch(shape, chosen.run)


def _launch(shape: ProblemShape, chosen: Plan) -> Launch:
    options, config = shape.options, chosen.config
    integers = (
        shape.N, shape.T, shape.H, shape.HV,
        0 if shape.index_dtype is None else shape.index_dtype.itemsize,
        shape.beta_dtype.itemsize,
        int(options.use_qk_l2norm_in_kernel),
        int(options.state_v_first),
        max(1, options.chunk_size // config.chunk),
        chosen.preparers, chosen.streams, chosen.depth,
    )  # fmt: skip
    beta_factor = (2.0 if options.allow_neg_eigval else 1.0) if options.use_beta_sigmoid_in_kernel else 0.0
    factors = (shape.scale, options.lower_bound or 0.0, beta_factor)
    return Launch(compiled(config), integers, factors)


@functools.cache
def sm_count() -> int:
    """SMs of the smallest visible Hopper GPU, for one plan, and with it one workspace, whatever the device; where
    there is none, those of an H100."""
    devices = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return min((d.multi_processor_count for d in devices if d.major == 9), default=SMS)


def compiled(config: PrefillConfig) -> Callable[..., Any]:
    """The kernel of a variant."""
    from kda_sm90.kernels.prefill import PrefillKernel

    return get_kernel(PrefillKernel, config, ARCH)
