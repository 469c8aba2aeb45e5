"""Calls of kda-core's functions like an earlier one, which need none of its checks.

A call is known if a launch was prepared (`kda_core.backend.SupportsPrepare`) for an earlier call with the same options, the same
environment, and tensors of the same metadata. One call of C++ compares the metadata (`kda_core.torch_private.metadata_guard`). Only
addresses may differ. A known call checks their alignment, and that tensors of the caller that are written share no memory with others. It
allocates its other outputs, and launches. If the host knows the lengths of packed sequences, they must be the same too, as in the layers
of a model. All other calls go through `kda_core.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from kda_core import buffers, env, journal, pools
from kda_core import call as calls
from kda_core.arguments import N_TENSORS, Arguments
from kda_core.backend import PreparedLaunch
from kda_core.buffers import GivenOutputs
from kda_core.contract import (
    ALIGNMENT,
    WORKSPACE_ALIGNMENT,
    KdaJournal,
    KdaPool,
    Tensors,
    launch_tensors,
)
from kda_core.journal import JournalArguments
from kda_core.pools import SlotArguments
from kda_core.recent import Recent
from kda_core.registry import OBSERVERS, REGISTRY, notify, override
from kda_core.torch_private import (
    allocator,
    below_autograd,
    current_device,
    is_deterministic,
    is_free_of_modes,
    metadata_guard,
)
from kda_core.validate import extent

MOST_ALIKE = 4
"""How many known calls differ only in what their key does not hold, such as strides and options."""


@dataclass(frozen=True)
class Known:
    """A call that was made before. It holds no tensor of the caller.

    Attributes:
        values: the arguments that are no tensors.
        types: their types, because ``1 == True``.
        generation, override, variables: what the call depends on besides its arguments, as in `is_current`.
        present: returns the tensors of arguments without those that are None here.
        is_like: whether such tensors, none of them nested, are like those of the call.
        offsets: the contents of cu_seqlens that the host knows, or None.
        requires_grad: whether one of them requires grad. It only matters while grad mode is on.
        call: what its metadata decided.
        launch: the backend's.
        beta_is_aligned: whether beta must start at a multiple of `ALIGNMENT`, as all others must.
        copied: names of slot tensors that are not contiguous, of which each call makes a copy.
        clears: whether o has rows of no sequence, which are zero.
        device: number of the GPU, -1 for the CPU.
        new_o, new_state, new_workspace: allocate o, the final states and the workspace (`kda_core.torch_private.allocator`); None if the
            call has none.
        extents: bytes of `kda_core.contract.launch_tensors`, which outputs of the caller must not overlap; 0 for None.
        notice: what observers of calls are told.
        written: places of the tensors of the caller that the call writes.
    """

    values: tuple[Any, ...]
    types: tuple[type, ...]
    generation: int
    override: str | None
    variables: tuple[Any, ...]
    present: Callable[[tuple[Any, ...]], tuple[Tensor, ...]]
    is_like: Callable[..., bool]
    offsets: list[int] | None
    requires_grad: bool
    call: calls.ResolvedCall
    launch: PreparedLaunch
    beta_is_aligned: bool
    copied: tuple[str, ...]
    clears: bool
    device: int
    new_o: Callable[[], Tensor]
    new_state: Callable[[], Tensor] | None
    new_workspace: Callable[[], Tensor] | None
    extents: tuple[int, ...]
    notice: tuple[str, str, str]
    written: tuple[int, ...]

    def has_options(self, values: tuple[Any, ...]) -> bool:
        """Returns whether these are the same options, maybe as other objects."""
        return tuple(map(type, values)) == self.types and values == self.values

    def is_current(self) -> bool:
        """Returns whether the state of the registry, the backend of `use_backend` and the environment variables are those of the call."""
        environment = (self.generation, self.override, self.variables)
        return environment == (REGISTRY.generation, override(), env.given())


Made = tuple[Tensor, Tensor | None, None]
"""o, the final states, None if they go to a pool, and no intermediate states."""

KNOWN: Recent[tuple[Known, ...]] = Recent(calls.MAX_CALLS, lambda key, known: len(known))
"""Known calls by the size of q and which tensors are None, in each tuple the newest first."""

Slots = SlotArguments | JournalArguments
"""The arguments of a call over a pool besides `Arguments`."""

_VALUES = slice(N_TENSORS, -1)  # without `saves`
_BETA = Tensors._fields.index("beta")
_N_REQUIRED = _BETA + 1  # tensors that no call lacks
_STATE = Tensors._fields.index("initial_state")


def run(
    tensors: tuple[Any, ...],
    values: tuple[Any, ...],
    slots: Slots | None = None,
    given: GivenOutputs | None = None,
) -> Made | None:
    """Makes a known call. If the call is not known, returns None and does nothing. Types of arguments need not have been checked.

    Args:
        tensors, values: the fields of `Arguments` without `saves`, which does not affect the look-up.
        slots: of a call over a pool.
        given: the tensors that the caller passed to be written.
    """
    if is_dynamo_compiling():  # other tracers are modes, or `Known.is_like` sees them
        return None
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu = tensors
    every, options = tensors, values
    try:
        key: Any = (
            q.shape, A_log is None, dt_bias is None, initial_state is None, cu_seqlens is None, cu_seqlens_cpu is None,
        )  # fmt: skip
        if slots is not None or given is not None:
            if slots is not None:
                every += slots.tensors
                options += slots.values
            if given is not None:
                every += given
            more = every[N_TENSORS:]
            key += tuple([x is None for x in more])
            for x in more:
                if x is not None and x.is_nested:
                    return None
        if is_deterministic() or not is_free_of_modes():
            return None
        # `Known.is_like` takes no nested tensor, and q has a shape
        if (
            (alike := KNOWN.get(key)) is None
            or k.is_nested or v.is_nested or g.is_nested or beta.is_nested
            or (A_log is not None and A_log.is_nested) or (dt_bias is not None and dt_bias.is_nested)
            or (initial_state is not None and initial_state.is_nested)
            or (cu_seqlens is not None and cu_seqlens.is_nested)
            or (cu_seqlens_cpu is not None and cu_seqlens_cpu.is_nested)
        ):  # fmt: skip
            return None
    except (AttributeError, TypeError, RuntimeError):  # not a tensor, or one without a shape
        return None
    offsets = None
    for known in alike:
        if (all(map(is_, options, known.values)) or known.has_options(options)) and known.is_like(
            *known.present(every)
        ):
            if known.offsets is None:
                break
            if offsets is None:
                offsets = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
            if known.offsets == offsets:
                break
    else:
        return None
    if (  # `Known.is_current` would take longer
        known.generation != REGISTRY.generation
        or known.override != override()
        or known.variables != env.given()
        or (known.requires_grad and is_grad_enabled())
    ):
        return None
    if known.device >= 0 and known.device != current_device():
        with torch.cuda.device(known.device):
            return run(tensors, values, slots, given)
    multiples: tuple[int, ...] = (
        ALIGNMENT, q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(),
        0 if A_log is None else A_log.data_ptr(), 0 if dt_bias is None else dt_bias.data_ptr(),
        0 if initial_state is None else initial_state.data_ptr(), 0 if cu_seqlens is None else cu_seqlens.data_ptr(),
    )  # fmt: skip
    addresses = multiples[1:]
    if not known.beta_is_aligned:
        multiples = multiples[: _BETA + 1] + multiples[_BETA + 2 :]
    if gcd(*multiples) != ALIGNMENT:  # the fastest way to compare all of them
        return None
    if slots is not None:
        if known.copied:
            slots = slots._replace(**{name: getattr(slots, name).contiguous() for name in known.copied})
        of_slots, of_states = slots.addresses(addresses[_STATE])
        if of_states % ALIGNMENT:
            return None
        addresses += of_slots
    o = state = workspace = None
    if given is not None:
        o, state, _, workspace = given
        if not _is_apart(known, given, addresses):
            return None
    if o is None:
        o = known.new_o()
    if state is None and known.new_state is not None:
        state = known.new_state()
    if workspace is None and known.new_workspace is not None:
        workspace = known.new_workspace()
    if known.clears:
        with below_autograd():
            o.zero_()
    known.launch(
        o, addresses, o.data_ptr(), 0 if state is None else state.data_ptr(),
        0 if workspace is None else workspace.data_ptr(),
    )  # fmt: skip
    if known.written:  # as torch's own functions do; tensors of inference mode have no version
        written = [x for place in known.written if not (x := every[place]).is_inference()]
        torch.autograd.graph.increment_version(written)
    if OBSERVERS:
        notify(*known.notice)
    return o, state, None


def _is_apart(known: Known, given: GivenOutputs, addresses: tuple[int, ...]) -> bool:
    """Returns whether tensors of the caller are aligned, and share memory neither with an input nor with each other."""
    wide = ALIGNMENT if known.call.shape.device_type == "cpu" else WORKSPACE_ALIGNMENT
    before: list[tuple[int, int]] = []
    for x in given:
        if x is None:
            continue
        first = x.data_ptr()
        end = first + x.nbytes
        if first % (wide if x is given.workspace else ALIGNMENT):
            return False
        for start, size in zip(addresses, known.extents):
            if start < end and first < start + size:
                return False
        for start, stop in before:
            if start < end and first < stop:
                return False
        before.append((first, end))
    return True


def remember(
    args: Arguments, call: calls.ResolvedCall, slots: Slots | None = None, given: GivenOutputs | None = None
) -> None:
    """Makes calls like this one known, if the backend prepares their launch. Nothing is launched.

    Args:
        args: with checked types, of a call that was made.
        call: what its metadata decided; a call whose backend serves the pool itself.
        slots, given: as `run`.
    """
    if call.backward is not None or call.checks_contents or not calls.prepares(call):
        return
    inputs_given = list(args.tensors)
    if slots is not None:
        inputs_given[_STATE] = None
    if not buffers.are_in_place(inputs_given, call.strided):
        return  # core copies them in every call
    tensors = (*args.tensors, *(() if slots is None else slots.tensors), *(given or ()))
    present = [x for x in tensors if x is not None]
    if len(set(map(id, present))) < len(present):
        return  # the comparison takes no tensor twice
    host = args.cu_seqlens if args.cu_seqlens_cpu is None else args.cu_seqlens_cpu
    offsets = None if host is None or host.device.type != "cpu" else host.tolist()
    key = (args.q.shape, *(x is None for x in tensors[_N_REQUIRED:]))
    values: Any = args[_VALUES]
    values += () if slots is None else slots.values
    # plugins that `prepare` calls, and other threads, may change the environment meanwhile
    environment = REGISTRY.generation, override(), env.given()
    alike = tuple(known for known in KNOWN.get(key) or () if known.is_current())
    if any(
        known.has_options(values) and known.is_like(*present) and known.offsets == offsets for known in alike
    ):
        return
    pool, records = _described(args, slots)
    inputs = buffers.make_inputs(inputs_given, call.shape, strided=call.strided, pool=pool, journal=records)
    lengths = None if inputs.cu_seqlens is None else inputs.sequence_lengths()
    if call.planner is not None and not calls.is_direct(call, lengths):
        return
    is_like = metadata_guard(present)
    if is_like is None or (launch := calls.prepared(call, inputs)) is None:
        return
    shape, size, kind = call.shape, call.workspace_bytes, call.shape.device_type
    found = Known(
        values=values,
        types=tuple(map(type, values)),
        generation=environment[0],
        override=environment[1],
        variables=environment[2],
        present=itemgetter(*(i for i, x in enumerate(tensors) if x is not None)),
        is_like=is_like,
        offsets=offsets,
        requires_grad=any(x.requires_grad for x in present),
        call=call,
        launch=launch,
        beta_is_aligned=not (call.strided and shape.options.recurrent),
        copied=() if slots is None else slots.copied,
        clears=buffers.has_other_rows(inputs),
        device=args.q.get_device(),
        new_o=allocator(args.v.shape, shape.dtype, kind),
        new_state=allocator(shape.state_shape, shape.state_dtype, kind)
        if shape.options.output_final_state
        else None,
        new_workspace=allocator((size,), torch.uint8, kind) if size else None,
        extents=tuple(0 if x is None else extent(x) for x in launch_tensors(inputs)),
        notice=(call.choice.spec.name, call.entry, kind),
        written=_written(tensors, slots, given),
    )
    KNOWN.put(key, (found, *alike)[:MOST_ALIKE])


def _described(args: Arguments, slots: Slots | None) -> tuple[KdaPool | None, KdaJournal | None]:
    """Returns pool and journal of a call as its backend receives them."""
    if slots is None:
        return None, None
    if isinstance(slots, JournalArguments):
        return journal.described(args.initial_state, slots)
    return pools.pool_of(args, slots), None


def _written(
    tensors: tuple[Tensor | None, ...], slots: Slots | None, given: GivenOutputs | None
) -> tuple[int, ...]:
    """Returns the places among all tensors of a call of those of the caller that it writes."""
    first_given = len(tensors) - (0 if given is None else len(given))
    places = [i for i in range(first_given, len(tensors)) if tensors[i] is not None]
    if slots is not None:
        places += [_STATE] if slots.writes_pool else []
        places += [N_TENSORS + i for i in slots.written]
    return tuple(places)
