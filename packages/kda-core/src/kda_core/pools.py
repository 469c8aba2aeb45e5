"""Calls whose states are in the slots of a pool: their arguments, their checks, and their execution on any backend.

A backend that declares the features of the pool (`PoolShape.features`) receives it as `KdaInputs.pool`. For any other backend core
copies the initial states out of the pool, makes the call, and copies the final states back. Both need no value of a tensor on the
host. The choice of the backend is that of the call with copied states, so a pool changes it only if the call has checkpoints, which
copies cannot serve.

A planner (context parallelism) splits a call over its pool if both it (`SupportsPools`) and the backend (`Feature.POOL_SEGMENTS`) can. If
not, it knows no pools: where it would split the call with copied states, the call is served by copies, also on a backend that declares
the other features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from kda_core import call as calls
from kda_core import env, slots
from kda_core.arguments import Arguments
from kda_core.buffers import GivenOutputs
from kda_core.contract import (
    ALIGNMENT,
    Feature,
    KdaCheckpoints,
    KdaInputs,
    KdaOutputs,
    KdaPool,
    PoolShape,
    ProblemShape,
    Tensors,
    unchecked,
)
from kda_core.errors import ArgumentError, DeviceError, DtypeError, ShapeError, StrideError, describe
from kda_core.recent import Recent
from kda_core.registry import REGISTRY, Choice
from kda_core.slot_checks import check_slots
from kda_core.validate import (
    OUTPUT_ARGUMENTS,
    check_layout,
    check_memory,
    check_outputs,
    extent,
    problem_shape,
)


class SlotArguments(NamedTuple):
    """The arguments of a call that concern slots, as the caller passed them; `kda_core.chunk_kda` documents each.

    Attributes:
        writes: whether the call writes states into the pool.
    """

    ssm_state_indices: Tensor | None = None
    final_state_indices: Tensor | None = None
    has_initial_state: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    checkpoint_pool: Tensor | None = None
    checkpoint_cu: Tensor | None = None
    checkpoint_positions: Tensor | None = None
    checkpoint_indices: Tensor | None = None
    first_slot: int = 0
    writes: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in order."""
        return self[:_N_SLOT_TENSORS]  # type: ignore[return-value]

    @property
    def values(self) -> tuple[Any, ...]:
        """The arguments that are no tensors, in order."""
        return self[_N_SLOT_TENSORS:]

    @property
    def copied(self) -> tuple[str, ...]:
        """The names of the tensors that `pool_of` copies."""
        named = zip(SlotArguments._fields, self.tensors)
        return tuple(
            n for n, x in named if x is not None and n != "checkpoint_pool" and not x.is_contiguous()
        )

    @property
    def writes_pool(self) -> bool:
        """Whether the call writes to the pool of the states."""
        return self.writes or (self.checkpoint_cu is not None and self.checkpoint_pool is None)

    @property
    def written(self) -> tuple[int, ...]:
        """The places of the tensors that the call writes."""
        return () if self.checkpoint_pool is None else (SlotArguments._fields.index("checkpoint_pool"),)

    def addresses(self, states: int) -> tuple[tuple[int, ...], int]:
        """Returns the addresses of `kda_core.contract.launch_tensors` behind cu_seqlens, and that of the pool of the checkpoints.

        Args:
            states: address of the pool.
        """
        tensors: Any = self.tensors
        read, write, mask, accepted, kept, cu, positions, indices = tensors
        at = read.data_ptr()
        found = (
            at, at if write is None else write.data_ptr(), 0 if mask is None else mask.data_ptr(),
            0 if accepted is None else accepted.data_ptr(),
        )  # fmt: skip
        if cu is None:
            return (*found, 0, 0, 0, 0), 0
        into = states if kept is None else kept.data_ptr()
        return (*found, into, cu.data_ptr(), positions.data_ptr(), indices.data_ptr()), into


SLOT_KINDS = {
    name: next(x for x in (*get_args(hint), hint) if x is not NoneType)
    for name, hint in get_type_hints(SlotArguments).items()
}
"""The type of each field by name, in order. Every tensor may be None."""
_N_SLOT_TENSORS = sum(kind is Tensor for kind in SLOT_KINDS.values())
_STATE = Tensors._fields.index("initial_state")
_CHECKPOINT_TENSORS = ("checkpoint_cu", "checkpoint_positions", "checkpoint_indices")


def refuse_gradients(args: Arguments) -> None:
    """Checks that no gradient would have to pass through a pool.

    Raises:
        ArgumentError: an input requires grad while grad mode is on.
    """
    if torch.is_grad_enabled():
        for name, x in zip(Tensors._fields, args):
            if isinstance(x, Tensor) and x.requires_grad:
                wanted = (
                    "states without ssm_state_indices if an input requires grad (a pool has no gradients)"
                )
                hint = "Pass initial_state=pool[indices], or call under torch.no_grad()"
                raise ArgumentError("initial_state", wanted, f"a pool, and {name} requires grad", hint)


def checked_slots(given: SlotArguments) -> SlotArguments:
    """Returns the arguments with their types checked.

    Raises:
        DtypeError, ArgumentError: an argument of another type.
    """
    for name, x in zip(SlotArguments._fields, given.tensors):
        if x is not None and not isinstance(x, Tensor):
            raise DtypeError(name, "a torch.Tensor or None", describe(x))
        if x is not None:
            check_layout(name, x)
    first = given.first_slot
    if type(first) is not int or not 0 <= first < 2**31:
        raise DtypeError("first_slot", "an int of at least 0 and below 2**31", describe(first))
    return given._replace(writes=bool(given.writes))


# ---- checks of metadata


def pooled_shape(args: Arguments, given: SlotArguments) -> ProblemShape:
    """Checks the metadata of a call with a pool and returns it. Types have been checked.

    Raises:
        KdaError: as `problem_shape`; the message names the argument.
    """
    index, pool = given.ssm_state_indices, args.initial_state
    if index is None:
        named = zip(SlotArguments._fields, given.tensors)
        name, x = next(((n, x) for n, x in named if x is not None), ("first_slot", given.first_slot))
        raise ArgumentError(name, "its default unless ssm_state_indices is given", describe(x))
    if pool is None:
        raise ArgumentError("initial_state", "a pool of states with ssm_state_indices", "None")
    tensors = [x if i != _STATE else None for i, x in enumerate(args.tensors)]
    shape = problem_shape(*tensors, options=args.options)  # type: ignore[arg-type]
    recurrent = shape.options.recurrent
    check_states("initial_state", pool, shape)
    per_token = recurrent and index.dim() == 2
    size = (shape.N, index.shape[1]) if per_token else (shape.N,)
    symbols = "[N] or [N, W]" if recurrent else "[N]"
    integers = (torch.int32, torch.int64)
    check_index("ssm_state_indices", index, size, symbols, integers, shape)
    if per_token:
        _check_token_slots(given, index, shape)
    same = (index.dtype,)
    check_index("final_state_indices", given.final_state_indices, size, "[N]", same, shape)
    check_index("has_initial_state", given.has_initial_state, (shape.N,), "[N]", (torch.bool,), shape)
    accepted = given.num_accepted_tokens
    if accepted is not None and not per_token:
        wanted = "None unless ssm_state_indices is [N, W] (a slot for every token)"
        raise ArgumentError("num_accepted_tokens", wanted, describe(accepted))
    check_index("num_accepted_tokens", accepted, (shape.N,), "[N]", (torch.int32,), shape)
    checkpoints = _check_checkpoints(given, pool, shape)
    facts = PoolShape(
        dtype=pool.dtype,
        index_dtype=index.dtype,
        writes=given.writes,
        per_token=per_token,
        has_mask=given.has_initial_state is not None,
        has_num_accepted=accepted is not None,
        checkpoint_dtype=None if checkpoints is None else checkpoints.dtype,
    )
    return replace(shape, pool=facts)


def _check_token_slots(given: SlotArguments, index: Tensor, shape: ProblemShape) -> None:
    """Checks what only concerns slots [N, W]."""
    W = index.shape[1]
    if given.final_state_indices is not None:
        wanted = "None if ssm_state_indices is [N, W] (it names all slots)"
        raise ArgumentError("final_state_indices", wanted, describe(given.final_state_indices))
    if W < 1 or (not shape.varlen and W < shape.T):
        wanted = f"[N] or [N, W] with W of at least {max(1, shape.T)}, the tokens of a sequence"
        raise ShapeError("ssm_state_indices", wanted, str(list(index.shape)))


def _check_checkpoints(given: SlotArguments, pool: Tensor, shape: ProblemShape) -> Tensor | None:
    """Checks the arguments of checkpoints, and returns the pool into which they go; None without checkpoints."""
    named = {name: getattr(given, name) for name in _CHECKPOINT_TENSORS}
    present = [name for name, x in named.items() if x is not None]
    if not present:
        if (x := given.checkpoint_pool) is not None:
            raise ArgumentError("checkpoint_pool", "None without checkpoint_positions", describe(x))
        return None
    if missing := [name for name, x in named.items() if x is None]:
        raise ArgumentError(missing[0], f"a tensor together with {present[0]}", "None")
    target = given.checkpoint_pool
    if target is None:
        if not given.writes:
            wanted = (
                "a pool of its own if the call does not write to initial_state (output_final_state=False)"
            )
            raise ArgumentError("checkpoint_pool", wanted, "None")
        target = pool
    check_states("checkpoint_pool", target, shape)
    positions, index = given.checkpoint_positions, given.ssm_state_indices
    assert positions is not None and index is not None
    C = positions.shape[:1]
    check_index("checkpoint_cu", given.checkpoint_cu, (shape.N + 1,), "[N+1]", (torch.int32,), shape)
    check_index("checkpoint_positions", positions, C, "[C]", (torch.int32,), shape)
    check_index("checkpoint_indices", given.checkpoint_indices, C, "[C]", (index.dtype,), shape)
    return target


def check_index(
    name: str,
    x: Tensor | None,
    size: tuple[Any, ...],
    symbols: str,
    dtypes: tuple[torch.dtype, ...],
    shape: ProblemShape,
) -> None:
    if x is None:
        return
    if x.dim() != len(size) or tuple(x.shape) != tuple(size):
        raise ShapeError(name, f"{symbols} = {list(size)}", str(list(x.shape)))
    if x.dtype not in dtypes:
        raise DtypeError(name, " or ".join(map(str, dtypes)), str(x.dtype))
    _check_device(name, x, shape)


def check_states(name: str, x: Tensor, shape: ProblemShape) -> None:
    """Checks a pool [slots, HV, K, V], of any number of slots and any pitch."""
    symbols = "[slots, HV, V, K]" if shape.options.state_v_first else "[slots, HV, K, V]"
    wanted = (shape.HV, *shape.state_matrix)
    if x.dim() != 4 or tuple(x.shape[1:]) != wanted or len(x) < 1:
        sizes = ", ".join(map(str, wanted))
        hint = ""
        if x.dim() == 4 and tuple(x.shape[1:]) == (shape.HV, *reversed(shape.state_matrix)):
            hint = f"Pass state_v_first={not shape.options.state_v_first} for states of this layout"
        raise ShapeError(name, f"{symbols} = [slots, {sizes}] with a slot at least", str(list(x.shape)), hint)
    dtypes = tuple(dict.fromkeys((torch.float32, torch.bfloat16, shape.state_dtype)))
    if x.dtype not in dtypes:
        raise DtypeError(name, " or ".join(map(str, dtypes)), str(x.dtype))
    _check_device(name, x, shape)
    _, HV, rows, columns = x.shape
    pitch, *inner = x.stride()
    slot = HV * rows * columns
    dense = all(
        stride == width or size == 1
        for size, stride, width in zip((HV, rows, columns), inner, (rows * columns, columns, 1))
    )
    if not dense or (len(x) > 1 and (pitch < slot or pitch * x.itemsize % ALIGNMENT)):
        wanted_strides = f"contiguous slots, at a distance of at least {slot} elements that is a multiple of {ALIGNMENT} bytes"
        raise StrideError(name, wanted_strides, f"strides {list(x.stride())} of {x.dtype}")


def _check_device(name: str, x: Tensor, shape: ProblemShape) -> None:
    if x.device.type != shape.device_type:
        raise DeviceError(name, f"a tensor on {shape.device_type} (as q)", str(x.device))


def _check_devices(args: Arguments, given: SlotArguments) -> None:
    """Checks the index of the device, which a shape does not contain."""
    named = {"initial_state": args.initial_state, **dict(zip(SlotArguments._fields, given.tensors))}
    for name, x in named.items():
        if x is not None and x.device != args.q.device:
            raise DeviceError(name, f"device {args.q.device} (that of q)", str(x.device))


# ---- resolve


@dataclass(frozen=True)
class PooledCall:
    """What the metadata of a call with a pool decides. It holds no tensor.

    Attributes:
        shape: of the call.
        call: the call of the backend: that of `shape` if the backend serves the pool itself, else the one with copied states.
        native: whether the backend serves the pool itself, also where a planner splits `call`.
        split: the call with copied states, which runs where a planner has a plan for it; None if no planner is asked, or if `call` is
            the one that it splits.
        checks_slots: whether slots are checked before each run (``KDA_CHECK_SLOTS``).
    """

    shape: ProblemShape
    call: calls.ResolvedCall
    native: bool
    checks_slots: bool
    split: calls.ResolvedCall | None = None


POOLED_CALLS: Recent[PooledCall] = Recent(calls.MAX_CALLS)
"""Resolved calls by what they are computed from, as `kda_core.call.CALLS`."""


def look_up(args: Arguments, given: SlotArguments) -> tuple[Any, PooledCall | None]:
    """Returns the key of a call, and the cached result or None. Types need not have been checked, as in `kda_core.call.look_up`."""
    key = calls.look_up(args)[0]
    if key is None:
        return None, None
    values = given[_N_SLOT_TENSORS:]
    try:
        tensors = tuple([None if x is None else (x.shape, x.dtype, x.device) for x in given.tensors])
        # the strides of pools are part of what is checked
        pools = [None if x is None else x.stride() for x in (args.initial_state, given.checkpoint_pool)]
        key = (*key, tensors, tuple(pools), values, tuple(map(type, values)), env.KDA_CHECK_SLOTS.given())
        return key, POOLED_CALLS.get(key)
    # an argument of another type, a nested or sparse tensor, or a value that cannot be hashed
    except (AttributeError, RuntimeError, TypeError):
        return None, None


def resolve(args: Arguments, given: SlotArguments, key: Any = None) -> PooledCall:
    """Validates a call's metadata, chooses its backend, and caches the result.

    Args:
        args, given: with checked types.
        key: from `look_up` of the same call.

    Raises:
        KdaError: invalid metadata, or no backend serves the call.
    """
    shape = calls.interned(pooled_shape(args, given))
    _check_devices(args, given)
    choice, native = choose(shape, args.backend, args.context_parallel)
    over, split = calls_of(shape, choice, native, args.context_parallel)
    over = replace(over, checks_contents=env.check())
    split = None if split is None else replace(split, checks_contents=env.check())
    call = PooledCall(shape, over, native, env.check_slots(), split)
    # plugins and other threads may have changed the environment meanwhile
    again = calls.look_up(args)[0]
    if key is not None and again is not None and key[0] == again[0]:
        POOLED_CALLS.put(key, call)
    return call


def resolved(args: Arguments, given: SlotArguments) -> PooledCall:
    """Returns the cached result of `resolve`, or a new one."""
    key, call = look_up(args, given)
    return resolve(args, given, key) if call is None else call


def choose(shape: ProblemShape, backend: str | None, mode: str) -> tuple[Choice, bool]:
    """Returns the backend of a call with a pool, and whether it serves the pool itself.

    Args:
        mode: "off", "auto" or a planner's plan as JSON text. A plan needs copied states unless the planner and the backend split calls over
            pools.

    Raises:
        BackendError: as `Registry.resolve`. A call with checkpoints needs a backend that serves them.
        ArgumentError: a plan for a call with checkpoints that needs copied states.
        PlannerError: as `kda_core.call.splits_over_pools`.
    """
    facts = shape.pool
    assert facts is not None
    if facts.checkpoint_dtype is not None:
        choice = REGISTRY.resolve(shape, backend)
        if not _takes_plan(shape, choice, mode):
            wanted = (
                f"'auto' or 'off' with checkpoint_positions, or a plan that backend {choice.spec.name!r} and the planner execute over a "
                f"pool (feature {Feature.POOL_SEGMENTS.value})"
            )
            raise ArgumentError("context_parallel", wanted, "another plan")
        return choice, True
    choice = REGISTRY.resolve(copied_shape(shape), backend)
    candidate = REGISTRY.find(choice.spec.name)
    native = REGISTRY.refusal(candidate, shape, named=True) is None and _takes_plan(shape, choice, mode)
    return choice, native


def _takes_plan(shape: ProblemShape, choice: Choice, mode: str) -> bool:
    """Returns whether a call can run without copied states in this mode. Only a plan of the caller may need them."""
    return mode in ("auto", "off") or calls.splits_over_pools(shape.options, choice, mode)


def calls_of(
    shape: ProblemShape, choice: Choice, native: bool, mode: str
) -> tuple[calls.ResolvedCall, calls.ResolvedCall | None]:
    """Returns `PooledCall.call` and `PooledCall.split`; `choice` and `native` are the results of `choose`."""
    copied = lambda: calls.of_shape(calls.interned(copied_shape(shape)), calls.Choices(choice, None), mode)
    if not native:
        return copied(), None
    over = lambda mode: calls.of_shape(shape, calls.Choices(choice, None), mode)
    # no planner splits decoding
    if mode == "off" or shape.options.recurrent:
        return over("off"), None
    if calls.splits_over_pools(shape.options, choice, mode):
        return over(mode), None
    facts = shape.pool
    assert facts is not None
    split = None if facts.checkpoint_dtype is not None else copied()  # copies cannot serve checkpoints
    return over("off"), None if split is None or split.planner is None else split


def copied_shape(shape: ProblemShape) -> ProblemShape:
    """Returns the shape of the call with copied states: of all tokens, or of one token of each sequence if every token has a
    slot."""
    facts = shape.pool
    assert facts is not None
    final = facts.writes or shape.options.output_final_state
    options = replace(shape.options, output_final_state=final)
    plain = replace(shape, pool=None, has_initial_state=True, options=options)
    return replace(plain, B=shape.N, T=1, index_dtype=None) if facts.per_token else plain


# ---- execute


def execute(
    call: PooledCall, args: Arguments, given: SlotArguments, outputs: GivenOutputs | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs one call. Returns o, the final states if the call does not write them to the pool, and the intermediate states.

    Args:
        outputs: the tensors that the caller passed to be written.

    Raises:
        KdaError: as `kda_core.call.execute`; or the pool is not aligned, or shares memory with outputs.
    """
    pool, shape = pool_of(args, given), call.shape
    tensors = list(args.tensors)
    tensors[_STATE] = None
    if outputs is not None:
        _check_outputs(call, tensors, pool, outputs)
    if call.checks_slots:
        check_slots(replace(_described(tensors, call.shape), pool=pool))
    split = planned(call, tensors)
    if split is not None:
        result = _with_copies(split, shape, tensors, pool, outputs)
    elif call.native:
        found = calls.execute(call.call, tensors, outputs, pool=pool)
        result = found.o, found.final_state, found.intermediate_states
    elif call.shape.pool.per_token:  # type: ignore[union-attr]
        result = _token_by_token(call, tensors, pool, outputs)
    else:
        result = _with_copies(call.call, shape, tensors, pool, outputs)
    written = [pool.states] if given.writes else []
    if pool.checkpoints is not None:
        written.append(pool.checkpoints.states)
    # as torch's own functions do, so that autograd detects changes; tensors of inference mode have no version
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])
    return result


def planned(call: PooledCall, tensors: list[Tensor | None]) -> calls.ResolvedCall | None:
    """Returns `PooledCall.split` if a planner has a plan for it, else None."""
    split = call.split
    if split is None:
        return None
    inputs = _described(tensors, split.shape)
    lengths = None if inputs.cu_seqlens is None else inputs.sequence_lengths()
    return None if calls.ask_planner(split, inputs, lengths) is None else split


def is_native(call: PooledCall, args: Arguments) -> bool:
    """Returns whether the backend served this call over its pool, which `execute` has made."""
    if call.split is None or not call.native:
        return call.native
    tensors = list(args.tensors)
    tensors[_STATE] = None
    return planned(call, tensors) is None


def _with_copies(
    call: calls.ResolvedCall,
    shape: ProblemShape,
    tensors: list[Tensor | None],
    pool: KdaPool,
    given: GivenOutputs | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Makes the call with states that are copied out of the pool and back. ``shape``: of the call with the pool."""
    tensors[_STATE] = slots.initial_states(pool, shape.state_dtype)
    found = calls.execute(call, tensors, given)
    final = found.final_state
    if shape.pool.writes:  # type: ignore[union-attr]
        assert final is not None
        slots.store_final(pool, final)
        final = None
    slots.clear_rows(_described(tensors, shape), pool, found.o)
    return found.o, final, found.intermediate_states


def _token_by_token(
    call: PooledCall, tensors: list[Tensor | None], pool: KdaPool, given: GivenOutputs | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Makes a call with a slot for the state after every token: one call for each token, of all sequences."""
    shape, facts = call.shape, call.shape.pool
    assert facts is not None
    inputs = _described(tensors, shape)
    inputs.sequence_lengths()  # checks host contents of cu_seqlens
    starts, ends = slots.sequence_bounds(inputs)
    v = tensors[Tensors._fields.index("v")]
    assert v is not None
    o = v.new_empty(v.shape) if given is None or given.o is None else given.o
    o.zero_()
    rows = o.view(shape.B * shape.T, shape.HV, shape.V)
    state = slots.initial_states(pool, shape.state_dtype)
    live_rows = ~slots.skipped(pool)
    tensors[Tensors._fields.index("cu_seqlens")] = None
    for t in range(min(pool.write.shape[1], shape.T)):
        token, has_token = starts + t, starts + t < ends
        at = token.clamp(max=shape.B * shape.T - 1)
        of_token: list[Tensor | None] = [
            x.flatten(0, 1)[at].unsqueeze(1) if x is not None and i < _N_PER_TOKEN else x
            for i, x in enumerate(tensors)
        ]
        of_token[_STATE] = state
        found = calls.execute(call.call, of_token)
        slots.masked_copy_(rows, at, found.o.squeeze(1), has_token & live_rows)
        if found.final_state is not None:
            state = torch.where(has_token.view(-1, 1, 1, 1), found.final_state, state)
        if facts.writes:
            index = pool.write[:, t]
            wanted = has_token & slots.is_slot(index, pool.states, pool.first_slot)
            slots.masked_copy_(pool.states, index, state, wanted)
    return o, state if shape.options.output_final_state else None, None


_N_PER_TOKEN = Tensors._fields.index("beta") + 1


def _described(tensors: list[Tensor | None], shape: ProblemShape) -> KdaInputs:
    """Returns the inputs for arithmetic on slots, without copies."""
    return KdaInputs(*tensors, shape)  # type: ignore[arg-type, call-arg]


def pool_of(args: Arguments, given: SlotArguments) -> KdaPool:
    """Returns the pool of a call as a backend receives it. Only slots are copied, where they are not contiguous."""
    states, read = args[_STATE], given.ssm_state_indices
    assert isinstance(states, Tensor) and read is not None
    for name, x in (("initial_state", states), ("checkpoint_pool", given.checkpoint_pool)):
        if x is not None and x.data_ptr() % ALIGNMENT:
            # a copy would not be written in place
            past = f"{x.data_ptr() % ALIGNMENT} bytes past one"
            raise ArgumentError(name, f"memory that starts at a multiple of {ALIGNMENT} bytes", past)
    read = read.contiguous()
    final, mask, accepted = given.final_state_indices, given.has_initial_state, given.num_accepted_tokens
    checkpoints = None
    if given.checkpoint_cu is not None:
        cu, positions, indices = given[5:8]
        into = states if given.checkpoint_pool is None else given.checkpoint_pool
        checkpoints = KdaCheckpoints(into, cu.contiguous(), positions.contiguous(), indices.contiguous())  # type: ignore[union-attr]
    values = {
        "states": states,
        "read": read,
        "write": read if final is None else final.contiguous(),
        "first_slot": given.first_slot,
        "has_initial_state": None if mask is None else mask.contiguous(),
        "num_accepted_tokens": None if accepted is None else accepted.contiguous(),
        "checkpoints": checkpoints,
    }
    return unchecked(KdaPool, values)


def _check_outputs(
    call: PooledCall, tensors: list[Tensor | None], pool: KdaPool, outputs: GivenOutputs
) -> None:
    """Checks what `kda_core.call.execute` does not: that outputs are not the pool, and the o of a call that is made token by
    token."""
    if outputs.final_state is not None and call.shape.pool.writes:  # type: ignore[union-attr]
        wanted = "None, because the final states go to the pool"
        raise ArgumentError(OUTPUT_ARGUMENTS[1], wanted, describe(outputs.final_state))
    if outputs.o is not None and not call.native:
        stateless = replace(call.shape.options, output_final_state=False, return_intermediate_states=False)
        inputs = _described(tensors, replace(call.shape, options=stateless))
        check_outputs(inputs, KdaOutputs(outputs.o))
        check_memory(inputs, KdaOutputs(outputs.o))
    pools = {"initial_state": pool.states}
    if pool.checkpoints is not None:
        pools["checkpoint_pool"] = pool.checkpoints.states
    for name, x in zip(OUTPUT_ARGUMENTS, outputs):
        for other, states in pools.items():
            if x is None or not x.nbytes:
                continue
            first, first2 = x.data_ptr(), states.data_ptr()
            if first < first2 + extent(states) and first2 < first + x.nbytes:
                expected = f"memory of its own, not shared with {other}"
                raise ArgumentError(name, expected, "overlapping tensors")
