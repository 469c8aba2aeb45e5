"""The backend object. A call is two launches: the intra-chunk kernel over all chunks, then the chains over their records.

For a call in segments, the summaries of the segments and their merge run between the two launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.backend import PreparedLaunch
from kda_core.contract import KdaInputs, KdaJournal, KdaOutputs, KdaPool, ProblemShape
from kda_cute import arch_of_capability, arch_of_device, get_kernel
from kda_cute.arguments import address
from kda_cute.decode import make_decode
from kda_cute.host import dense, is_strided, merge_segments, pass_states, refusal, with_token_strides
from kda_cute.interface import KernelInterface
from kda_cute.journal import make_journal
from kda_cute.pools import pitch_arguments, pool_arguments
from kda_sm100.arguments import (
    CHAIN,
    INTRA_CHUNK,
    SERVING_CHAIN,
    SUMMARY,
    ChainArguments,
    IntraChunkArguments,
)
from kda_sm100.config import ARCHS, SMS
from kda_sm100.launch_config import launch_config


class Sm100Backend:
    """Implements `kda_core.backend.Backend`. It holds no state; the process shares the compiled kernels."""

    def can_run(self, shape: ProblemShape) -> str | None:
        return refusal(shape)

    def workspace_bytes(self, shape: ProblemShape) -> int:
        return launch_config(shape).workspace_bytes

    def compile(self, shape: ProblemShape) -> None:
        if shape.journal is not None:
            make_journal(shape, _arch_of(shape))
        elif shape.options.recurrent:
            make_decode(shape, _arch_of(shape))
        else:
            launches_of(shape)

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        if inputs.shape.T == 0:
            return pass_states(inputs, outputs)
        strided = is_strided(inputs)
        inputs = with_token_strides(inputs) if strided else dense(inputs)
        with device_of(inputs.q):
            intra_chunk, chain = launches_of(inputs.shape, strided)
            intra_chunk(inputs, outputs)
            chain(inputs, outputs)
        return outputs

    # ---- decoding (the feature RECURRENT)

    def recurrent_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        if inputs.shape.T == 0:
            return pass_states(inputs, outputs)
        with device_of(inputs.q):
            make_decode(inputs.shape, _arch_of(inputs.shape))(inputs, outputs)
        return outputs

    # ---- decoding with records of tokens (the feature JOURNAL)

    def journal_decode(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        with device_of(inputs.q):
            make_journal(inputs.shape, _arch_of(inputs.shape))(inputs, outputs)
        return outputs

    def journal_fold(self, shape: ProblemShape, pool: KdaPool, journal: KdaJournal) -> None:
        with device_of(pool.states):
            make_journal(shape, _arch_of(shape)).fold(pool, journal)

    # ---- prepared launches of both

    def prepare(self, inputs: KdaInputs, outputs: KdaOutputs) -> PreparedLaunch | None:
        if not inputs.shape.options.recurrent:
            return None
        make = make_decode if inputs.journal is None else make_journal
        return make(inputs.shape, _arch_of(inputs.shape)).prepare(inputs, outputs)

    # ---- calls in segments (the feature SEGMENT_SUMMARY)

    def segment_workspace_bytes(self, shape: ProblemShape) -> int:
        return self.workspace_bytes(shape)

    def summarize(self, inputs: KdaInputs, exits: Tensor, transitions: Tensor, workspace: Tensor) -> None:
        outputs = KdaOutputs(inputs.v, exits, None, workspace)  # the summary kernel writes no o
        with device_of(inputs.q):
            intra_chunk, summary = summary_launches_of(inputs.shape)
            intra_chunk(inputs, outputs)
            summary(inputs, outputs, transitions)

    def merge_segments(self, initial: Tensor, exits: Tensor, transitions: Tensor, bounds: Tensor) -> None:
        arch = arch_of_device(initial.device) if initial.is_cuda else ARCHS[0]  # CPU tensors are emulated
        with device_of(initial):
            merge_segments(initial, exits, transitions, bounds, sms=SMS, arch=arch)

    def execute_segments(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        with device_of(inputs.q):
            _, chain = launches_of(inputs.shape)
            chain(inputs, outputs)
        return outputs


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which the tensor's device is current. CPU tensors (device -1) are emulated and need none.

    The function compares devices first, because entering the context of the current device takes longer.
    """
    device = x.get_device()
    return nullcontext() if device < 0 or device == torch.cuda.current_device() else torch.cuda.device(device)


class IntraChunkLaunch(NamedTuple):
    """The first launch for a shape.

    Attributes:
        kernel: the compiled kernel.
        arguments: makes the kernel's argument struct from the addresses of a call. It already has the arguments that the
            shape determines.
        strided: whether the kernel is a variant for strided inputs.
    """

    kernel: Callable[..., Any]
    arguments: Callable[..., tuple[float, ...]]
    strided: bool

    def __call__(self, inputs: KdaInputs, outputs: KdaOutputs) -> None:
        """Launches on the current device and stream. The records go to the workspace of the outputs."""
        arguments = self.arguments(
            q=inputs.q.data_ptr(),
            k=inputs.k.data_ptr(),
            v=inputs.v.data_ptr(),
            g=inputs.g.data_ptr(),
            beta=inputs.beta.data_ptr(),
            a_log=address(inputs.A_log),
            dt_bias=address(inputs.dt_bias),
            offsets=address(inputs.cu_seqlens),
            workspace=address(outputs.workspace),
        )
        # o names the device and the stream, because it is contiguous in any call
        self.kernel(outputs.o, *arguments, *(pitch_arguments(inputs) if self.strided else ()))


class ChainLaunch(NamedTuple):
    """A launch for a shape that reads the records: of the chain, or of the summary kernel.

    Attributes:
        kernel: the compiled kernel.
        arguments: as in `IntraChunkLaunch`.
        serving: whether the kernel is a variant for pools.
    """

    kernel: Callable[..., Any]
    arguments: Callable[..., tuple[float, ...]]
    serving: bool = False

    def __call__(self, inputs: KdaInputs, outputs: KdaOutputs, transitions: Tensor | None = None) -> None:
        """Launches on the current device and stream."""
        states = outputs.intermediate_states
        arguments = self.arguments(
            offsets=address(inputs.cu_seqlens),
            initial_state=address(inputs.initial_state),
            o=outputs.o.data_ptr(),
            final_state=address(outputs.final_state),
            states=address(states),
            transitions=address(transitions),
            workspace=address(outputs.workspace),
            state_count=0 if states is None else states.shape[0] * states.shape[1],
        )
        self.kernel(outputs.o, *arguments, *(pool_arguments(inputs, outputs) if self.serving else ()))


@functools.lru_cache(maxsize=1024)
def launches_of(shape: ProblemShape, strided: bool = False) -> tuple[IntraChunkLaunch, ChainLaunch]:
    """Returns the launches for a shape. Compiles their kernels on first use.

    ``strided``: whether q, k, v, g or beta is not contiguous. The cache holds the last 1024 results.
    """
    config = launch_config(shape).chain
    chain = _chain_launch(shape, SERVING_CHAIN if config.serving else CHAIN, config)
    return _intra_chunk_launch(shape, strided), chain._replace(serving=config.serving)


@functools.lru_cache(maxsize=1024)
def summary_launches_of(shape: ProblemShape) -> tuple[IntraChunkLaunch, ChainLaunch]:
    """Returns the launches that summarise the segments of a shape; otherwise as `launches_of`."""
    return _intra_chunk_launch(shape), _chain_launch(shape, SUMMARY, launch_config(shape).summary)


def _intra_chunk_launch(shape: ProblemShape, strided: bool = False) -> IntraChunkLaunch:
    options = shape.options
    arguments = functools.partial(
        IntraChunkArguments,
        N=shape.N,
        T=shape.T,
        H=shape.H,
        HV=shape.HV,
        offset_bytes=_offset_bytes(shape),
        beta_bytes=shape.beta_dtype.itemsize,
        l2norm=int(options.use_qk_l2norm_in_kernel),
        scale=shape.scale,
        lower_bound=options.lower_bound or 0.0,
        beta_factor=(2.0 if options.allow_neg_eigval else 1.0) if options.use_beta_sigmoid_in_kernel else 0.0,
    )
    kernel = get_kernel(INTRA_CHUNK, launch_config(shape, strided).intra_chunk, _arch_of(shape))
    return IntraChunkLaunch(kernel, arguments, strided)


def _chain_launch(shape: ProblemShape, kernel: KernelInterface, config: object) -> ChainLaunch:
    options = shape.options
    arguments = functools.partial(
        ChainArguments,
        N=shape.N,
        T=shape.T,
        HV=shape.HV,
        offset_bytes=_offset_bytes(shape),
        v_first=int(options.state_v_first),
        every=max(1, options.chunk_size // launch_config(shape).chunk),
    )
    return ChainLaunch(get_kernel(kernel, config, _arch_of(shape)), arguments)


def _arch_of(shape: ProblemShape) -> str:
    """Returns the target of the compiler, such as "sm_100a". A call without a GPU is emulated."""
    return ARCHS[0] if shape.arch is None else arch_of_capability(shape.arch)


def _offset_bytes(shape: ProblemShape) -> int:
    """Returns the bytes of an element of cu_seqlens; 0 if sequences are not packed."""
    return 0 if shape.index_dtype is None else shape.index_dtype.itemsize
