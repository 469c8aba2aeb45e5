"""The launches of a call: their kernels, and the arguments that the shape determines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from kda_core.backend import PreparedLaunch
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_cute import arch_of_capability, get_kernel
from kda_cute.arguments import Address, address, bound
from kda_cute.interface import KernelInterface
from kda_cute.pools import pitch_arguments, pool_addresses, pool_arguments, pool_places, segment_arguments
from kda_sm100.arguments import (
    CHAIN,
    INTRA_CHUNK,
    SAVING_CHAIN,
    SEGMENT_CHAIN,
    SEGMENT_SUMMARY,
    SERVING_CHAIN,
    SUMMARY,
    ChainArguments,
    IntraChunkArguments,
    SavedArguments,
)
from kda_sm100.config import ARCHS
from kda_sm100.launch_config import launch_config


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
        in_slots: whether it is a variant for pools, which also takes `kda_cute.pools.PoolAddresses` and `PoolArguments`.
        extra: returns the further arguments of a variant for segments over a pool, or of one that saves states.
    """

    kernel: Callable[..., Any]
    arguments: Callable[..., tuple[float, ...]]
    in_slots: bool = False
    extra: Callable[[KdaInputs, KdaOutputs], tuple[int, ...]] = lambda *_: ()

    def __call__(self, inputs: KdaInputs, outputs: KdaOutputs, transitions: Tensor | None = None) -> None:
        """Launches on the current device and stream."""
        states = outputs.intermediate_states if outputs.saved_states is None else outputs.saved_states
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
        slots, more = (pool_addresses(inputs, outputs), pool_arguments(inputs)) if self.in_slots else ((), ())
        self.kernel(outputs.o, *slots, *arguments, *more, *self.extra(inputs, outputs))


@functools.lru_cache(maxsize=1024)
def launches_of(
    shape: ProblemShape, strided: bool = False, saves: int = 0
) -> tuple[IntraChunkLaunch, ChainLaunch]:
    """Returns the launches for a shape. Compiles their kernels on first use.

    ``strided``: whether q, k, v, g or beta is not contiguous. ``saves``: tokens between the states that the chain saves for a
    backward, or 0. The cache holds the last 1024 results.
    """
    return _intra_chunk_launch(shape, strided), chain_launch_of(shape, saves)


def chain_launch_of(shape: ProblemShape, saves: int) -> ChainLaunch:
    """Returns the second launch for a shape; ``saves`` as in `launches_of`."""
    config = launch_config(shape, saves=saves).chain
    if config.serving:
        return _chain_launch(shape, SERVING_CHAIN, config)._replace(in_slots=True)
    if config.saves:
        return _chain_launch(shape, SAVING_CHAIN, config)._replace(extra=_saved_arguments)
    return _chain_launch(shape, CHAIN, config)


def _saved_arguments(inputs: KdaInputs, outputs: KdaOutputs) -> SavedArguments:
    return SavedArguments(Address(address(outputs.residual)))


def prepared(inputs: KdaInputs, strided: bool) -> PreparedLaunch:
    """Implements `kda_core.backend.SupportsPrepare.prepare` for `chunk_fwd`; ``strided`` as in `launches_of`.

    The inputs need no copies.
    """
    first, second = launches_of(inputs.shape, strided)
    numbers = intra_chunk_numbers(inputs.shape)
    pitches = pitch_arguments(inputs) if strided else ()
    intra_chunk = bound(
        first.kernel, *(numbers[name] for name in IntraChunkArguments._fields if name in numbers), *pitches
    )
    numbers = chain_numbers(inputs.shape) | {"state_count": 0}
    fixed = (numbers[name] for name in ChainArguments._fields if name in numbers)
    places, more = (pool_places(inputs), pool_arguments(inputs)) if second.in_slots else (None, ())
    chain = bound(second.kernel, *fixed, *more)

    def launch(o: Tensor, given: tuple[int, ...], o_at: int, final_state: int, workspace: int) -> None:
        *tokens, initial_state, offsets = given[:9]
        intra_chunk(o, (*tokens, offsets, workspace))
        # a variant for pools finds states by `PoolAddresses` alone
        slots = () if places is None else places(given, final_state)
        chain(o, (*slots, offsets, initial_state, o_at, final_state, 0, 0, workspace))

    return launch


@functools.lru_cache(maxsize=1024)
def summary_launches_of(shape: ProblemShape, strided: bool = False) -> tuple[IntraChunkLaunch, ChainLaunch]:
    """Returns the launches that summarise the segments of a shape; otherwise as `launches_of`."""
    config = launch_config(shape).summary
    if shape.pool is None:
        summary = _chain_launch(shape, SUMMARY, config)
    else:
        summary = _chain_launch(shape, SEGMENT_SUMMARY, config)._replace(
            in_slots=True, extra=_segment_arguments
        )
    return _intra_chunk_launch(shape, strided), summary


@functools.lru_cache(maxsize=1024)
def execution_launch_of(shape: ProblemShape, saves: int = 0) -> ChainLaunch:
    """Returns the launch that executes the segments of a shape from the records of `summary_launches_of`; otherwise as `launches_of`."""
    if shape.pool is None:
        return chain_launch_of(shape, saves)
    chain = _chain_launch(shape, SEGMENT_CHAIN, launch_config(shape).chain)
    return chain._replace(in_slots=True, extra=_segment_arguments)


def _segment_arguments(inputs: KdaInputs, outputs: KdaOutputs) -> tuple[int, ...]:
    return segment_arguments(inputs)


def _intra_chunk_launch(shape: ProblemShape, strided: bool = False) -> IntraChunkLaunch:
    arguments = functools.partial(IntraChunkArguments, **intra_chunk_numbers(shape))
    kernel = get_kernel(INTRA_CHUNK, launch_config(shape, strided).intra_chunk, arch_of(shape))
    return IntraChunkLaunch(kernel, arguments, strided)


def intra_chunk_numbers(shape: ProblemShape) -> dict[str, Any]:
    """Returns the arguments of the intra-chunk kernel that a shape determines."""
    options = shape.options
    return {
        "N": shape.N,
        "T": shape.T,
        "H": shape.H,
        "HV": shape.HV,
        "offset_bytes": offset_bytes(shape),
        "beta_bytes": shape.beta_dtype.itemsize,
        "l2norm": int(options.use_qk_l2norm_in_kernel),
        "scale": shape.scale,
        "lower_bound": options.lower_bound or 0.0,
        "beta_factor": (2.0 if options.allow_neg_eigval else 1.0)
        if options.use_beta_sigmoid_in_kernel
        else 0.0,
    }


def _chain_launch(shape: ProblemShape, kernel: KernelInterface, config: object) -> ChainLaunch:
    arguments = functools.partial(ChainArguments, **chain_numbers(shape))
    return ChainLaunch(get_kernel(kernel, config, arch_of(shape)), arguments)


def chain_numbers(shape: ProblemShape) -> dict[str, Any]:
    """Returns the arguments of the chain that a shape determines."""
    return {
        "N": shape.N,
        "T": shape.T,
        "HV": shape.HV,
        "offset_bytes": offset_bytes(shape),
        "v_first": int(shape.options.state_v_first),
        "every": max(1, shape.options.chunk_size // launch_config(shape).chunk),
    }


def arch_of(shape: ProblemShape) -> str:
    """Returns the target of the compiler, such as "sm_100a". A call without a GPU is emulated."""
    return ARCHS[0] if shape.arch is None else arch_of_capability(shape.arch)


def offset_bytes(shape: ProblemShape) -> int:
    """Returns the bytes of an element of cu_seqlens; 0 if sequences are not packed."""
    return 0 if shape.index_dtype is None else shape.index_dtype.itemsize
