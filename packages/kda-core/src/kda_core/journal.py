"""Calls with records of tokens (`kda_core.contract.KdaJournal`): their tensors, their checks, and their execution on a backend.

Only backends that declare `Feature.JOURNAL` serve them. Nothing reads a tensor on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from kda_core import call as calls
from kda_core import env
from kda_core.arguments import N_TENSORS, Arguments
from kda_core.buffers import GivenOutputs
from kda_core.contract import (
    ALIGNMENT,
    INPUT_DTYPES,
    JournalShape,
    KdaJournal,
    KdaOptions,
    KdaPool,
    PoolShape,
    ProblemShape,
    Tensors,
    unchecked,
)
from kda_core.errors import ArgumentError, DeviceError, DtypeError, ShapeError, StrideError, describe
from kda_core.pools import check_index, check_states
from kda_core.recent import Recent
from kda_core.registry import REGISTRY, Choice, notify
from kda_core.slot_checks import check_own_slots
from kda_core.validate import OUTPUT_ARGUMENTS, check_layout, device_arch, extent, problem_shape

INDEX_DTYPES = (torch.int32, torch.int64)
_STATE = Tensors._fields.index("initial_state")


@dataclass(frozen=True)
class Journal:
    """The records of one layer: the tokens of each slot since the state that the pool holds. `kda_core.contract.KdaJournal` has the formula.

    A slot takes 4 (K + V) bytes of fp32 and the key for each record and value head, 16 % of an fp32 state at the defaults.

    Attributes:
        u, k, k_factor, G: the records, as in `kda_core.contract.KdaJournal`; R = `length` + `drafts` rows for each slot.
        spans: [slots, 2] int32: first row and number of records of each slot. All layers share one tensor.
        length: a call whose tokens would exceed so many records folds first.
        state_v_first: layout of the states in the pool.
    """

    u: Tensor
    k: Tensor
    k_factor: Tensor
    G: Tensor
    spans: Tensor
    length: int
    state_v_first: bool

    @classmethod
    def allocate(
        cls,
        slots: int,
        HV: int,
        K: int,
        V: int,
        *,
        H: int | None = None,
        length: int = 8,
        drafts: int = 1,
        state_v_first: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        spans: Tensor | None = None,
    ) -> Journal:
        """Returns a journal without records.

        Args:
            slots: of the pool. HV, K, V: of the states. H: key heads; HV by default.
            length: most records of a slot.
            drafts: most tokens of a sequence in one call.
            state_v_first: whether the states of the pool are [V, K].
            dtype: of q, k and v.
            device: of the pool.
            spans: those of another layer's journal with the same `slots`, `length` and `drafts`, to share them. None: new ones, zero.

        Raises:
            ArgumentError, DtypeError: a size that is not an int of at least 1, or another dtype.
        """
        H = HV if H is None else H
        sizes = {"slots": slots, "HV": HV, "K": K, "V": V, "H": H, "length": length, "drafts": drafts}
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ArgumentError(name, "an int of at least 1", describe(size))
        if HV % H:
            raise ArgumentError("HV", f"a multiple of H={H}", str(HV))
        if dtype not in INPUT_DTYPES:
            raise DtypeError("dtype", " or ".join(map(str, INPUT_DTYPES)), str(dtype))
        rows, wide = length + drafts, _wide(dtype)
        new = lambda *size, dtype=wide: torch.zeros(size, dtype=dtype, device=device)
        return cls(
            u=new(slots, HV, rows, V),
            k=new(slots, H, rows, K, dtype=dtype),
            k_factor=new(slots, H, rows),
            G=new(slots, HV, rows, K),
            spans=new(slots, 2, dtype=torch.int32) if spans is None else spans,
            length=length,
            state_v_first=state_v_first,
        )

    @property
    def lengths(self) -> Tensor:
        """[slots] int32, a view: the number of records of each slot."""
        return self.spans[:, 1]


class JournalArguments(NamedTuple):
    """The arguments of a call besides `Arguments`, whose `initial_state` is the pool. `spans` is None in a call that verifies drafts."""

    slots: Tensor
    records_u: Tensor
    records_k: Tensor
    records_k_factor: Tensor
    records_G: Tensor
    spans: Tensor | None
    length: int
    first_slot: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in order."""
        return self[:_N_TENSORS]  # type: ignore[return-value]

    @property
    def values(self) -> tuple[Any, ...]:
        """The arguments that are no tensors, in order."""
        return self[_N_TENSORS:]

    @property
    def copied(self) -> tuple[str, ...]:
        """The names of the tensors that `described` copies."""
        return () if self.slots.is_contiguous() else ("slots",)

    @property
    def writes_pool(self) -> bool:
        """Whether the call writes to the pool."""
        return self.spans is not None

    @property
    def written(self) -> tuple[int, ...]:
        """The places of the tensors that the call writes."""
        return (1, 2, 3, 4)

    def addresses(self, states: int) -> tuple[tuple[int, ...], int]:
        """Returns the addresses of `kda_core.contract.launch_tensors` behind cu_seqlens, and a number that is a multiple of a power of two
        if those of all records are."""
        tensors: Any = self.tensors
        slots, u, k, factor, G, spans = tensors
        at = slots.data_ptr()
        a, b, c, d = u.data_ptr(), k.data_ptr(), factor.data_ptr(), G.data_ptr()
        e = 0 if spans is None else spans.data_ptr()
        return (at, at, 0, 0, 0, 0, 0, 0, a, b, c, d, e), a | b | c | d | e

    @property
    def records(self) -> tuple[Tensor, ...]:
        """u, k, k_factor and G."""
        return self[1:5]

    @property
    def name(self) -> str:
        """The argument that holds the records, as the caller knows it."""
        return "records" if self.spans is None else "journal"


JOURNAL_KINDS = {
    name: next(x for x in (*get_args(hint), hint) if x is not NoneType)
    for name, hint in get_type_hints(JournalArguments).items()
}
"""The type of each field by name, in order."""
_N_TENSORS = sum(kind is Tensor for kind in JOURNAL_KINDS.values())


def journal_arguments(
    name: str, journal: object, slots: object, first_slot: object, *, verifies: bool = False
) -> JournalArguments:
    """Returns the arguments of a call, whose types `check_types` checks.

    Args:
        name: of the argument `journal`.
        verifies: whether the call has no records before its tokens.

    Raises:
        DtypeError: the journal is none.
    """
    if not isinstance(journal, Journal):
        raise DtypeError(name, "a kda_core.serving.Journal", describe(journal))
    spans = None if verifies else journal.spans
    values = slots, journal.u, journal.k, journal.k_factor, journal.G, spans, journal.length, first_slot
    return tuple.__new__(JournalArguments, values)


def check_types(given: JournalArguments, pool: object, *, verifies: bool = False) -> None:
    """Checks the types of arguments.

    Raises:
        DtypeError, ArgumentError: an argument of another type.
    """
    name, first_slot = "records" if verifies else "journal", given.first_slot
    named = {"pool": pool, "slots": given.slots, **dict(zip(_names(name), given.tensors[1:]))}
    for argument, x in named.items():
        if not isinstance(x, Tensor) and not (verifies and x is None):
            raise DtypeError(argument, "a torch.Tensor", describe(x))
        if isinstance(x, Tensor):
            check_layout(argument, x)
    if type(first_slot) is not int or not 0 <= first_slot < 2**31:
        raise DtypeError("first_slot", "an int of at least 0 and below 2**31", describe(first_slot))
    if type(given.length) is not int or given.length < 1:
        raise ArgumentError(f"{name}.length", "an int of at least 1", describe(given.length))


def refuse_gradients(args: Arguments) -> None:
    """Checks that no input requires a gradient, which a call with records does not have.

    Raises:
        ArgumentError: an input requires grad while grad mode is on.
    """
    if torch.is_grad_enabled():
        for name, x in zip(Tensors._fields, args):
            if isinstance(x, Tensor) and x.requires_grad:
                hint = "Call it under torch.no_grad(), or use fused_recurrent_kda"
                what = "pool" if name == "initial_state" else name
                raise ArgumentError(what, "a tensor that requires no grad", "requires_grad=True", hint)


# ---- checks of metadata


def _names(journal: str) -> list[str]:
    return [f"{journal}.{part}" for part in ("u", "k", "k_factor", "G", "spans")]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def decode_shape(args: Arguments, given: JournalArguments) -> ProblemShape:
    """Checks the metadata of a call and returns it. Types have been checked.

    Raises:
        KdaError: as `problem_shape`; the message names the argument.
    """
    tensors = [x if i != _STATE else None for i, x in enumerate(args.tensors)]
    shape = problem_shape(*tensors, options=args.options)  # type: ignore[arg-type]
    shape = _with_journal(shape, args.initial_state, given)
    facts = shape.journal
    assert facts is not None
    most = facts.rows - (facts.length if facts.has_spans else 0)
    if not 1 <= shape.T <= most:
        has = f"{given.name} has {facts.rows} rows and a length of {facts.length}"
        raise ShapeError("q", f"[N, T, H, K] with T from 1 to {most} ({has})", str(list(args.q.shape)))
    return shape


def fold_shape(pool: Tensor, given: JournalArguments, accepted: Tensor | None, v_first: bool) -> ProblemShape:
    """Checks the metadata of a fold and returns it.

    Raises:
        KdaError: as `decode_shape`.
    """
    slots, u, k = given.slots, given.records_u, given.records_k
    if slots.dim() != 1 or len(slots) < 1:
        raise ShapeError("slots", "[N] with N of at least 1", str(list(slots.shape)))
    for name, x in zip(_names(given.name), (u, k)):
        if x.dim() != 4:
            raise ShapeError(name, "4 dimensions", str(list(x.shape)))
    (HV, V), (H, K), N, wide = (u.shape[1], u.shape[3]), (k.shape[1], k.shape[3]), len(slots), _wide(k.dtype)
    # with the promise safe_gate, a fold needs no feature of a gate
    options = KdaOptions(state_v_first=v_first, safe_gate=True, recurrent=True).resolved(K)
    shape = ProblemShape(
        B=N, T=0, H=H, HV=HV, K=K, V=V, N=N, dtype=k.dtype, g_dtype=wide, beta_dtype=wide, index_dtype=None,
        has_A_log=False, has_dt_bias=False, has_initial_state=False,
        device_type=pool.device.type, arch=device_arch(pool.device), options=options,
    )  # fmt: skip
    check_index("accepted", accepted, (N,), "[N]", (torch.int32,), shape)
    shape = _with_journal(shape, pool, given)
    assert shape.pool is not None
    return replace(shape, pool=replace(shape.pool, writes=True))


def _with_journal(shape: ProblemShape, pool: Tensor | None, given: JournalArguments) -> ProblemShape:
    """Checks pool, slots and records, and returns the shape with them."""
    assert pool is not None
    check_states("pool", pool, shape)
    check_index("slots", given.slots, (shape.N,), "[N]", INDEX_DTYPES, shape)
    slots, rows = len(pool), given.records_u.shape[2] if given.records_u.dim() == 4 else 0
    wide, least = shape.state_dtype, 1 if given.spans is None else given.length + 1
    wanted = (
        (shape.HV, rows, shape.V, "HV, R, V", wide),
        (shape.H, rows, shape.K, "H, R, K", shape.dtype),
        (shape.H, rows, None, "H, R", wide),
        (shape.HV, rows, shape.K, "HV, R, K", wide),
        (2, None, None, "2", torch.int32),
    )
    for name, x, (*sizes, symbols, dtype) in zip(_names(given.name), given.tensors[1:], wanted):
        if x is None:
            continue
        expected = [slots, *(n for n in sizes if n is not None)]
        if list(x.shape) != expected:
            raise ShapeError(name, f"[slots, {symbols}] = {expected} (slots of the pool)", str(list(x.shape)))
        if x.dtype != dtype:
            raise DtypeError(name, str(dtype), str(x.dtype))
        if x.device.type != shape.device_type:
            raise DeviceError(name, f"a tensor on {shape.device_type} (as q)", str(x.device))
        if not x.is_contiguous():
            raise StrideError(name, "a contiguous tensor", f"strides {list(x.stride())}")
    if rows < least:
        raise ShapeError(f"{given.name}.u", f"at least {least} rows", str(list(given.records_u.shape)))
    return replace(
        shape,
        pool=PoolShape(dtype=pool.dtype, index_dtype=given.slots.dtype, writes=given.spans is not None),
        journal=JournalShape(length=given.length, rows=rows, has_spans=given.spans is not None),
    )


def check_memory(device: torch.device, pool: Tensor, given: JournalArguments) -> None:
    """Checks the index of the device, which a shape does not contain, and addresses."""
    named = {"pool": pool, "slots": given.slots, **dict(zip(_names(given.name), given.tensors[1:]))}
    for name, x in named.items():
        if x is not None and x.device != device:
            raise DeviceError(name, f"device {device} (that of q)", str(x.device))
        if x is not None and name != "slots" and (past := x.data_ptr() % ALIGNMENT):
            # a copy would not be written in place
            wanted = f"memory that starts at a multiple of {ALIGNMENT} bytes"
            raise ArgumentError(name, wanted, f"{past} bytes past one")


# ---- resolve


@dataclass(frozen=True)
class JournalCall:
    """What the metadata of a call decides. It holds no tensor.

    Attributes:
        call: the call of the backend; its entry is ``journal_decode``, or ``journal_fold``.
        checks_slots: whether slots are checked before each run (``KDA_CHECK_SLOTS``).
    """

    call: calls.ResolvedCall
    checks_slots: bool

    @property
    def shape(self) -> ProblemShape:
        return self.call.shape

    @property
    def choice(self) -> Choice:
        return self.call.choice


JOURNAL_CALLS: Recent[JournalCall] = Recent(calls.MAX_CALLS)
"""Resolved calls by what they are computed from, as `kda_core.call.CALLS`."""


def _facts(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Returns all metadata of tensors, for a key."""
    return tuple([None if x is None else (x.shape, x.dtype, x.device, x.stride()) for x in tensors])


def look_up(args: Arguments, given: JournalArguments) -> tuple[Any, JournalCall | None]:
    """Returns the key of a call, and the cached result or None."""
    key = calls.look_up(args)[0]
    if key is None:
        return None, None
    facts = _facts(args.initial_state, *given.tensors)
    key = (*key, facts, given[_N_TENSORS:], env.KDA_CHECK_SLOTS.given())
    return key, JOURNAL_CALLS.get(key)


def resolve(args: Arguments, given: JournalArguments, key: Any = None) -> JournalCall:
    """Validates a call's metadata, chooses its backend, and caches the result.

    Args:
        args: with checked types.
        key: from `look_up` of the same call.

    Raises:
        KdaError: invalid metadata, or no backend serves the call.
    """
    shape = calls.interned(decode_shape(args, given))
    made = _made(shape, REGISTRY.resolve(shape, args.backend), "journal_decode")
    again = calls.look_up(args)[0]  # plugins and other threads may have changed the environment meanwhile
    if key is not None and again is not None and key[0] == again[0]:
        JOURNAL_CALLS.put(key, made)
    return made


def resolved(args: Arguments, given: JournalArguments) -> JournalCall:
    """Returns the cached result of `resolve`, or a new one."""
    key, call = look_up(args, given)
    return resolve(args, given, key) if call is None else call


def resolved_fold(
    pool: Tensor, given: JournalArguments, accepted: Tensor | None, v_first: bool, backend: str | None
) -> JournalCall:
    """Returns the call of a fold, cached as `resolved`."""
    where = REGISTRY.generation, REGISTRY.rules(backend), env.KDA_CHECK_SLOTS.given()
    key = (*where, _facts(pool, accepted, *given.tensors), given[_N_TENSORS:], v_first)
    if (found := JOURNAL_CALLS.get(key)) is not None:
        return found
    shape = calls.interned(fold_shape(pool, given, accepted, v_first))
    made = _made(shape, REGISTRY.resolve(shape, backend), "journal_fold")
    if where == (REGISTRY.generation, REGISTRY.rules(backend), env.KDA_CHECK_SLOTS.given()):
        JOURNAL_CALLS.put(key, made)
    return made


def _made(shape: ProblemShape, choice: Choice, entry: str) -> JournalCall:
    call = calls.of_shape(shape, calls.Choices(choice, None), "off")
    return JournalCall(replace(call, entry=entry, checks_contents=env.check()), env.check_slots())


# ---- execute


def execute(call: JournalCall, args: Arguments, given: JournalArguments, out: Tensor | None) -> Tensor:
    """Runs one call and returns o.

    Raises:
        KdaError: a tensor is not aligned or on another device; `out` is invalid or shares memory with another tensor.
    """
    pool, journal = described(args.initial_state, given)
    check_memory(args.q.device, pool.states, given)
    if out is not None:
        _check_out(out, pool.states, given)
    if call.checks_slots:
        check_own_slots("slots", pool)
    tensors: list[Tensor | None] = list(args[:N_TENSORS])  # type: ignore[arg-type]
    tensors[_STATE] = None
    outputs = None if out is None else GivenOutputs(out)
    found = calls.execute(call.call, tensors, outputs, pool=pool, journal=journal)
    written = [*given.records, *([] if given.spans is None else [pool.states])]
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])
    return found.o


def execute_fold(call: JournalCall, states: Tensor, given: JournalArguments, accepted: Tensor | None) -> None:
    """Runs one fold.

    Raises:
        KdaError: a tensor is not aligned or on another device.
    """
    pool, journal = described(states, given, accepted)
    check_memory(states.device, states, given)
    if call.checks_slots:
        check_own_slots("slots", pool)
    call.choice.backend.journal_fold(call.shape, pool, journal)  # type: ignore[attr-defined]
    if not states.is_inference():
        torch.autograd.graph.increment_version([states])
    notify(call.choice.spec.name, "journal_fold", call.shape.device_type)


def described(
    states: Tensor | None, given: JournalArguments, accepted: Tensor | None = None
) -> tuple[KdaPool, KdaJournal]:
    """Returns pool and journal of a call as a backend receives them. Only slots and `accepted` are copied, where they are not
    contiguous."""
    slots = given.slots.contiguous()
    pool = {
        "states": states, "read": slots, "write": slots, "first_slot": given.first_slot,
        "has_initial_state": None, "num_accepted_tokens": None, "checkpoints": None,
    }  # fmt: skip
    u, k, k_factor, G = given.records
    journal = {
        "u": u, "k": k, "k_factor": k_factor, "G": G, "length": given.length, "spans": given.spans,
        "accepted": None if accepted is None else accepted.contiguous(),
    }  # fmt: skip
    return unchecked(KdaPool, pool), unchecked(KdaJournal, journal)


def _check_out(out: Tensor, states: Tensor, given: JournalArguments) -> None:
    """Checks that o shares no memory with what the call reads or writes. `kda_core.call.execute` checks q, k, v, g and beta."""
    named = {"pool": states, "slots": given.slots, **dict(zip(_names(given.name), given.tensors[1:]))}
    for name, x in named.items():
        if x is None or not (out.nbytes and x.nbytes):
            continue
        first, other = out.data_ptr(), x.data_ptr()
        if first < other + extent(x) and other < first + out.nbytes:
            wanted = f"memory of its own, not shared with {name}"
            raise ArgumentError(OUTPUT_ARGUMENTS[0], wanted, "overlapping tensors")
