"""Tensor memory and the tcgen05 instructions, of one CTA (`cta_group::1`) or of a pair (`cta_group::2`).

Tensor memory has 128 lanes of 512 columns of 4 bytes. A word's number is lane * 512 + column.

- `mma`, `cp` and `commit` enter a queue of the CTA that issues them. They execute in this order, at times that the seed decides.
- Words that a queued instruction writes are undefined until it executes; words that `st` writes, until its wait.

Source: PTX ISA, "TensorCore 5th Generation Family Instructions". No instruction of this module was compared with a device.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ptx_emulator import floats
from ptx_emulator.access import addresses, mbarrier_at, scatter_to
from ptx_emulator.decode import Decoder, Execute, handler
from ptx_emulator.lanes import BOOLS, FULL, INDICES, Array
from ptx_emulator.machine import DERIVED, LOADING, Cta, Wait, Warp
from ptx_emulator.matrices import check_pattern, load_operand, values_of
from ptx_emulator.memory import SHARED_WINDOW, UNSIGNED, WINDOW_BITS, Region
from ptx_emulator.parser import Address, Instruction, Operand, Vector
from ptx_emulator.races import ORDERED, Issuer, Shadow
from ptx_emulator.synchronize import aligned, uniform
from ptx_emulator.tensors import multicast_places

LANES, COLUMNS = 128, 512


@dataclass(frozen=True)
class Request:
    """An operation that a warp of each CTA of a pair executes: the first one waits for the second.

    Attributes:
        what: the operation and its operands, which must be the same in both CTAs.
        finish: completes the operation in the CTA of the warp that waits.
    """

    what: tuple[str, ...]
    finish: Callable[[], None]


class Words(NamedTuple):
    """Some words of tensor memory.

    Attributes:
        numbers: the numbers of the words, an array that cannot be written.
        shape, index: an array with an entry for each word of tensor memory, in this shape and with this index, gives the entries of these
            words. An index of slices is faster than one of numbers.
    """

    numbers: Array
    shape: tuple[int, ...]
    index: Any

    def within(self, array: Array) -> Array:
        """Return an array that has an entry for each word of tensor memory, in the shape to which ``index`` applies."""
        return array.reshape(self.shape)

    def of(self, array: Array) -> Array:
        """Return the entries of these words."""
        found: Array = array.reshape(self.shape)[self.index]
        return found


def _numbered(numbers: Array) -> Words:
    """Return the words of these numbers."""
    numbers.flags.writeable = False
    return Words(numbers, (-1,), numbers)


@functools.lru_cache(maxsize=64)
def _rectangle(m: int, first: int, column: int, count: int) -> Words:
    """Return ``count`` columns of the rows of D (`rows_of`)."""
    rows = rows_of(m, first)
    numbers = rows[:, None] * COLUMNS + column + np.arange(count)
    numbers.flags.writeable = False
    return Words(
        numbers, (LANES, COLUMNS), (slice(None) if m == LANES else rows, slice(column, column + count))
    )


@functools.lru_cache(maxsize=64)
def _halves(column: int, count: int) -> Words:
    """Return the words of D in a CTA of a pair with M = 128: the lanes from 64 on hold the second half of its columns."""
    lower = np.arange(64)[:, None] * COLUMNS + column + np.arange(count // 2)
    return _numbered(np.concatenate([lower, lower + 64 * COLUMNS], axis=1))


@dataclass
class TensorMemory:
    """The tensor memory of a CTA.

    Attributes:
        region: its bytes, word after word.
        owner: per column, the first column of its allocation; -1: not allocated.
        busy: per word, the number of issued instructions that have yet to write it; ``storing``: those of them that are `st`.
        queue: instructions that were issued and have yet to execute.
        working: those of them that access tensor memory; a `commit` does not.
        relinquished: whether `relinquish_alloc_permit` was executed.
        request: the collective operation of a pair for which a warp of this CTA waits; None: there is none.
    """

    region: Region
    owner: Array = field(default_factory=lambda: np.full(COLUMNS, -1))
    busy: Array = field(default_factory=lambda: np.zeros(LANES * COLUMNS, np.int32))
    storing: Array = field(default_factory=lambda: np.zeros(LANES * COLUMNS, np.int32))
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    working: int = 0
    relinquished: bool = False
    request: Request | None = None

    def free(self, count: int) -> list[int]:
        """Return the aligned places of ``count`` free columns."""
        return [c for c in range(0, COLUMNS, count) if (self.owner[c : c + count] < 0).all()]

    def check(self, w: Warp, column: int, count: int) -> None:
        """Check that columns are allocated."""
        if column + count > COLUMNS or (self.owner[column : column + count] < 0).any():
            w.fail(f"tensor memory: columns {column} to {column + count - 1} are not all allocated")

    def at(self, words: Words, bits: int = 32) -> tuple[Array, Array | None]:
        """Return the values of words, possibly a view, and bool of the undefined ones (None: all are defined). ``bits`` 16: the lower halves."""
        assert self.region.known is not None
        values, known = words.of(self.region.view(4, 1)), words.of(self.region.known_view(4, 1))
        mask = np.uint32((1 << bits) - 1)
        if bits < 32:
            values, known = values & mask, known & mask
        unknown = known != mask
        return values, unknown if unknown.any() else None

    def load(self, words: Words, bits: int = 32) -> tuple[Array, Array | None]:
        """`at`, where words that an issued instruction has yet to write are undefined."""
        values, unknown = self.at(words, bits)
        waiting = words.of(self.busy) > 0
        if waiting.any():
            unknown = waiting if unknown is None else unknown | waiting
        return values, unknown

    def store(self, words: Words, values: Array, unknown: Array | None, bits: int = 32) -> None:
        """Write words. ``bits`` 16: the lower halves; the upper halves become undefined."""
        mask = np.uint32((1 << bits) - 1)
        words.within(self.region.view(4, 1))[words.index] = values
        known = mask if unknown is None else np.where(unknown, np.uint32(0), mask)
        words.within(self.region.known_view(4, 1))[words.index] = known


def memory_of(cta: Cta) -> TensorMemory:
    """Return the tensor memory of a CTA; create it on first use."""
    if cta.tensor_memory is None:
        size = LANES * COLUMNS * 4
        data = np.frombuffer(bytearray(size), np.uint8)
        region = Region("tensor memory", 0, size, data, initialized=False, scratch=True)
        if cta.machine.races:
            region.shadow = Shadow(region)
        if cta.machine.map is not None:
            cta.machine.map.of(region)
        cta.tensor_memory = TensorMemory(region)
    found = cta.tensor_memory
    assert isinstance(found, TensorMemory)
    return found


def _group(d: Decoder, i: Instruction) -> tuple[bool, list[str]]:
    """Return whether an instruction is one of a pair of CTAs, and its modifiers behind the operation, without the group."""
    groups = [m for m in i.modifiers if m.startswith("cta_group::")]
    if groups not in (["cta_group::1"], ["cta_group::2"]):
        d.refuse("expected .cta_group::1 or .cta_group::2")
    d.cta_group = groups[0]
    return d.cta_group == "cta_group::2", [m for m in i.modifiers[1:] if m not in groups]


def _ctas(w: Warp, pair: bool) -> list[Cta]:
    """Return the CTAs of an instruction: the warp's, or both of its pair, whose ranks differ in the last bit. The even one is first."""
    if not pair:
        return [w.cta]
    first, ctas = w.cta.rank & ~1, w.cta.cluster.ctas
    if first + 2 > len(ctas):
        w.fail(f"cta_group::2: CTA {w.cta.rank} of a cluster of {len(ctas)} has no peer CTA")
    for cta in ctas[first : first + 2]:
        if not cta.live:
            w.fail(f"cta_group::2: the peer CTA {cta.number} has ended")
    return ctas[first : first + 2]


def _collective(
    pair: bool, w: Warp, what: tuple[str, ...], check: Callable[[], None], finish: Callable[[], None]
) -> Any:
    """Execute an operation of a warp, or of a warp in each CTA of a pair.

    Args:
        what: the operation and its operands, which must be the same in both CTAs.
        check, finish: check and complete it in the warp's CTA. Both CTAs are checked before one of them changes.
    """
    check()
    if not pair:
        return finish()
    ctas, mine = _ctas(w, pair), memory_of(w.cta)
    other = memory_of(ctas[w.cta.rank & 1 ^ 1])
    if mine.request is not None:  # of another warp of this CTA
        return Wait(lambda: mine.request is None, "an operation of another warp on tensor memory", again=True)
    request = other.request
    if request is None:
        request = mine.request = Request(what, finish)
        return Wait(lambda: mine.request is not request, f"the peer CTA to execute {what[0]}", again=False)
    if request.what != what:
        w.fail(f"cta_group::2: {' '.join(what)} here, and {' '.join(request.what)} in the peer CTA")
    other.request = None
    request.finish()
    finish()
    w.machine.changes += 1
    return None


@handler("tcgen05")
def _tcgen05(d: Decoder, i: Instruction) -> Execute:
    operation = i.modifiers[0]
    found = {
        "alloc": _alloc, "dealloc": _dealloc, "relinquish_alloc_permit": _relinquish, "ld": _ld, "st": _st,
        "wait::ld": _wait, "wait::st": _wait, "cp": _cp, "mma": _mma, "commit": _commit, "fence::before_thread_sync": _fence,
        "fence::after_thread_sync": _fence,
    }.get(operation)  # fmt: skip
    if found is None:
        d.refuse(f"tcgen05.{operation} is not modelled")
    return found(d, i)


def _fence(d: Decoder, i: Instruction) -> Execute:
    """`fence::before_thread_sync` and `fence::after_thread_sync`: they order instructions that several warps issue.

    They complete nothing: `ld` needs a `commit` and a wait for its mbarrier.
    """
    d.only(i.modifiers[1:])

    def before(w: Warp, lanes: int) -> None:
        if w.machine.sections > ORDERED:
            w.clock.learn(ORDERED * w.clock.warps + w.clock.index, w.issuer.advance())

    def after(w: Warp, lanes: int) -> None:
        if w.machine.sections > ORDERED:
            w.issuer.order = w.clock.known[ORDERED * w.clock.warps :].copy()

    return before if i.modifiers[0] == "fence::before_thread_sync" else after


# ---- allocation


def _alloc(d: Decoder, i: Instruction) -> Execute:
    pair, rest = _group(d, i)
    d.only(rest, "sync", "aligned", "shared::cta", "b32")
    space = "shared" if "shared::cta" in rest else "generic"
    to, offset = d.address(i.operands[0], "b32")
    slot = d.source(i.operands[1], "u32")

    def allocate(w: Warp, lanes: int) -> Any:
        count = _columns(w, slot, lanes)
        place = addresses(w, to, offset, lanes)[:1]

        def check() -> None:
            memory = memory_of(w.cta)
            if memory.relinquished:
                w.fail("tcgen05.alloc after tcgen05.relinquish_alloc_permit of this CTA")
            if not memory.free(count):
                w.fail(
                    f"tcgen05.alloc: no {count} aligned columns are free "
                    f"({np.count_nonzero(memory.owner >= 0)} of {COLUMNS} are allocated); to wait for a dealloc is not modelled"
                )

        def finish() -> None:
            memory = memory_of(w.cta)
            first = memory.free(count)[
                0
            ]  # of a pair: the same columns in both CTAs, because they allocate and free together
            memory.owner[first : first + count] = first
            memory.region.track().reshape(LANES, COLUMNS * 4)[:, first * 4 : (first + count) * 4] = 0
            scatter_to(w, space, place, 4, np.array([[first]], np.uint32), None, 1, strong=False)

        return _collective(pair, w, ("tcgen05.alloc", str(count)), check, finish)

    return aligned(allocate)


def _columns(w: Warp, slot: int, lanes: int) -> int:
    """Return the number of columns of an allocation, checked."""
    count = uniform(w, slot, lanes)
    if not 32 <= count <= COLUMNS or count & count - 1:
        w.fail(
            f"tensor memory: expected a power of 2 from 32 to {COLUMNS} as the number of columns, got {count}"
        )
    return count


def _dealloc(d: Decoder, i: Instruction) -> Execute:
    pair, rest = _group(d, i)
    d.only(rest, "sync", "aligned", "b32")
    base, slot = d.source(i.operands[0], "b32"), d.source(i.operands[1], "u32")

    def free(w: Warp, lanes: int) -> Any:
        first, count = uniform(w, base, lanes), _columns(w, slot, lanes)

        def check() -> None:
            memory = memory_of(w.cta)
            if first >= COLUMNS or np.count_nonzero(memory.owner == first) != count:
                w.fail(f"tcgen05.dealloc: no allocation of {count} columns starts at {first:#x}")

        def finish() -> None:
            memory = memory_of(w.cta)
            if memory.working:
                w.fail(
                    f"tcgen05.dealloc while {memory.working} tcgen05 instructions of this CTA are in flight"
                )
            memory.owner[memory.owner == first] = -1
            if (
                memory.region.shadow is not None
            ):  # to free them is to write them: all accesses must come before
                words = np.arange(LANES)[:, None] * COLUMNS + np.arange(first, first + count)
                memory.region.shadow.store(w, words.reshape(-1), 0)

        return _collective(pair, w, ("tcgen05.dealloc", hex(first), str(count)), check, finish)

    return aligned(free)


def _relinquish(d: Decoder, i: Instruction) -> Execute:
    pair, rest = _group(d, i)
    d.only(rest, "sync", "aligned")

    def relinquish(w: Warp, lanes: int) -> Any:
        def finish() -> None:
            memory_of(w.cta).relinquished = True

        return _collective(pair, w, ("tcgen05.relinquish_alloc_permit",), lambda: None, finish)

    return aligned(relinquish)


# ---- registers from and to tensor memory


@dataclass(frozen=True, eq=False)
class Fragment:
    """The words of tensor memory that a `ld` or `st` of a warp moves.

    Attributes:
        rows, columns: [registers, 32], lane and column of each word, relative to the address.
        packed: a register holds the lower halves of two adjacent columns (`.pack::16b`, `.unpack::16b`).
    """

    rows: Array
    columns: Array
    packed: bool

    def words(self, w: Warp, address: int) -> list[Words]:
        """Return the words [registers, 32]. If packed: those of the registers' lower halves, and of the upper ones.

        The warp may access 32 lanes: those from 32 * (warp % 4) on. Lanes from 0 to 31 in the address stand for them as well, as on
        a device.
        """
        first, column = address >> 16, address & 0xFFFF
        low = w.number % 4 * 32
        if first < 32:
            first += low
        if first < low or first + self.last_row >= low + 32 or (first - low) % 16:
            w.fail(
                f"tensor memory: address {address:#x} starts at lane {first}; "
                f"warp {w.number} only accesses lanes {low} to {low + 31}, in units of 16"
            )
        memory_of(w.cta).check(w, column, self.last_column + 1)
        return self._at(first * COLUMNS + column)

    @cached_property
    def last_row(self) -> int:
        """The last lane."""
        return int(self.rows.max())

    @cached_property
    def last_column(self) -> int:
        """The last column."""
        return int(self.columns.max()) + self.packed

    @cached_property
    def _at(self) -> Callable[[int], list[Words]]:
        """Return the words by the number of the first one: most instructions are executed at the same places again."""

        @functools.lru_cache(maxsize=16)
        def found(start: int) -> list[Words]:
            numbers = start + self.rows * COLUMNS + self.columns
            return [_numbered(numbers + n) for n in range(1 + self.packed)]

        return found


def _fragment(d: Decoder, i: Instruction, split: Operand | None) -> Fragment:
    """Decode the shape of a `ld` or `st`. ``split``: of `16x32bx2`, the column offset of the upper 16 threads."""
    modifiers = [m for m in i.modifiers if m not in ("pack::16b", "unpack::16b")]
    packed = len(modifiers) < len(i.modifiers)
    d.only(modifiers[1:3], "sync", "aligned")
    if len(modifiers) != 6 or modifiers[5] != "b32" or modifiers[4][:1] != "x":
        d.refuse(f"this form of tcgen05.{modifiers[0]} is not modelled")
    shape, count = modifiers[3], int(modifiers[4][1:])
    threads = np.arange(32)
    # Per shape: lanes and columns of the registers of one repetition, and its columns.
    shapes = {
        "32x32b": ([threads], [0 * threads], 1),
        "16x32bx2": ([threads % 16], [0 * threads], 1),
        "16x64b": ([threads // 4 + threads % 2 * 8], [threads // 2 % 2], 2),
        "16x128b": ([threads // 4, threads // 4 + 8], [threads % 4] * 2, 4),
        "16x256b": (
            [threads // 4 + 8 * (n // 2) for n in range(4)], [threads % 4 * 2 + n % 2 for n in range(4)], 8,
        ),
    }  # fmt: skip
    if shape not in shapes:
        d.refuse(f".{shape} is not modelled")
    rows, columns, width = shapes[shape]
    if count & count - 1 or not 1 <= count <= 128 // len(rows):
        d.refuse(f".x{count} is not modelled")
    if (split is not None) != (shape == "16x32bx2"):
        d.refuse(f".{shape}: expected {'an' if shape == '16x32bx2' else 'no'} immediate half-split offset")
    places = np.concatenate([np.stack(columns) + n * width for n in range(count)]) * (1 + packed)
    if split is not None:
        places = places + threads // 16 * d.immediate(split)
    return Fragment(np.tile(np.stack(rows), (count, 1)), places, packed)


def _ld(d: Decoder, i: Instruction) -> Execute:
    fragment = _fragment(d, i, i.operands[2] if len(i.operands) > 2 else None)
    targets = d.destinations(i.operands[0], "b32")
    base, offset = d.address(i.operands[1], "b32")
    if len(targets) != len(fragment.rows):
        d.refuse(f"expected {len(fragment.rows)} destinations, got {len(targets)}")

    def load(w: Warp, lanes: int) -> None:
        address = int(addresses(w, base, offset, lanes)[0])
        uniform(w, base, lanes)
        memory, parts = memory_of(w.cta), fragment.words(w, address)
        values, undefined = np.uint32(0), [0] * len(targets)
        for n, words in enumerate(parts):
            _record_read(w, memory, words)
            found, missing = memory.load(words, 32 // len(parts))
            values = values | found << np.uint32(16 * n)
            if missing is not None:
                sets = np.packbits(missing, axis=1, bitorder="little").view("<u4")[:, 0]
                undefined = [before | lanes for before, lanes in zip(undefined, sets.tolist())]
        w.put_all(targets, values, undefined)
        if "tcgen05.ld" not in w.machine.assume:
            w.flight.update(dict.fromkeys(targets, LOADING))
        w.tensor_loads += parts

    return aligned(load)


def _st(d: Decoder, i: Instruction) -> Execute:
    fragment = _fragment(d, i, i.operands[1] if len(i.operands) > 2 else None)
    base, offset = d.address(i.operands[0], "b32")
    sources = d.sources(i.operands[-1], "b32")
    if len(sources) != len(fragment.rows):
        d.refuse(f"expected {len(fragment.rows)} sources, got {len(sources)}")

    def store(w: Warp, lanes: int) -> None:
        address = int(addresses(w, base, offset, lanes)[0])
        uniform(w, base, lanes)
        memory, parts = memory_of(w.cta), fragment.words(w, address)
        values, missing = w.values(sources), [w.unknown[s] for s in sources]
        unknown = np.stack([BOOLS[bits] for bits in missing]) if any(missing) else None
        bits = 32 // len(parts)
        for n, words in enumerate(parts):
            if words.of(memory.busy).any() and not _only_stores(w, words):
                w.fail(
                    "tcgen05.st writes words of tensor memory that an instruction in flight has yet to write"
                )
            _record_write(w, memory, words)
            memory.store(words, values >> np.uint32(16 * n) & np.uint32((1 << bits) - 1), unknown, bits)
            for counts in (memory.busy, memory.storing):
                counts[words.index] += 1
        w.tensor_stores += parts

    return aligned(store)


def _only_stores(w: Warp, words: Words) -> bool:
    """Return whether only stores of this warp have yet to write these words. Those stores keep their order."""
    mine = np.zeros(LANES * COLUMNS, np.int32)
    for earlier in w.tensor_stores:
        mine[earlier.numbers] += 1
    return bool((words.of(memory_of(w.cta).busy) <= words.of(mine)).all())


def _record_read(w: Warp | Issuer, memory: TensorMemory, words: Words) -> None:
    """Report reads to the race check, as lane 0: the warp waits as a whole, so its own accesses are ordered."""
    if memory.region.shadow is not None:
        memory.region.shadow.load(w, words.numbers.reshape(-1), 0)


def _record_write(w: Warp | Issuer, memory: TensorMemory, words: Words) -> None:
    """Report writes to the race check, see `_record_read`."""
    if memory.region.shadow is not None:
        memory.region.shadow.store(w, words.numbers.reshape(-1), 0)


def _wait(d: Decoder, i: Instruction) -> Execute:
    """`wait::ld` and `wait::st`. The accesses of the warp complete here.

    They are reported to the race check again, because a release before this point does not cover them.
    """
    d.only(i.modifiers[1:], "sync", "aligned")
    d.relaxed = True
    loads = i.modifiers[0] == "wait::ld"

    def wait(w: Warp, lanes: int) -> None:
        memory = memory_of(w.cta)
        if loads:
            for words in w.tensor_loads:
                _record_read(w, memory, words)
            w.tensor_loads = []
            kept = {slot: group for slot, group in w.flight.items() if group not in (LOADING, DERIVED)}
            w.set_flight(kept)
        else:
            for words in w.tensor_stores:
                _record_write(w, memory, words)
                for counts in (memory.busy, memory.storing):
                    counts[words.index] -= 1
            w.tensor_stores = []

    return aligned(wait)


# ---- mma


@dataclass(frozen=True)
class Shape:
    """A decoded instruction descriptor of `tcgen05.mma`.

    Attributes:
        m, n: extents of D.
        bits: of an element of D, 32 (fp32) or 16 (fp16).
        a, b: operand types, "f16", "bf16", "tf32", "e4m3" or "e5m2".
        negative: whether the product is negated.
        a_mn_major, b_mn_major: whether M or N is contiguous; otherwise K is.
    """

    m: int
    n: int
    bits: int
    a: str
    b: str
    negative: bool
    a_mn_major: bool
    b_mn_major: bool


#: Kind -> bytes of an element of A and B, and their types by their number in the instruction descriptor. Types of 6 and 4 bits,
#: which f8f6f4 also takes, are not modelled.
KINDS = {
    "f16": (2, {0: "f16", 1: "bf16"}),
    "tf32": (4, {2: "tf32"}),
    "f8f6f4": (1, {0: "e4m3", 1: "e5m2"}),
}


def shape_of(descriptor: int, kind: str, pair: bool = False) -> Shape:
    """Decode an instruction descriptor (PTX ISA, "Instruction descriptor"). ``kind``: a key of `KINDS`; ``pair``: of two CTAs.

    Raises:
        ValueError: the descriptor is malformed, or not modelled.
    """
    m, n = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
    if descriptor & 0xE080_004F:
        raise ValueError(
            f"sparsity, saturation, shifts and reserved bits are not modelled, got bits {descriptor & 0xE080_004F:#x}"
        )
    form = descriptor >> 4 & 3
    if form > 1 or (form == 0 and kind == "tf32"):
        raise ValueError(f"kind::{kind} has no type {form} of D")
    _, types = KINDS[kind]
    a, b = types.get(descriptor >> 7 & 7), types.get(descriptor >> 10 & 7)
    if a is None or b is None:
        known = ", ".join(f"{number} ({name})" for number, name in types.items())
        raise ValueError(
            f"kind::{kind}: the types {descriptor >> 7 & 7} of A and {descriptor >> 10 & 7} of B are not modelled, expected {known}"
        )
    if pair and (m not in (128, 256) or not 16 <= n <= 256 or n % 16):
        raise ValueError(
            f"cta_group::2: expected M = 128 or 256, and N a multiple of 16, at most 256; got M = {m}, N = {n}"
        )
    if not pair and (m not in (64, 128) or not 8 <= n <= 256 or (m == 128 and n % 16)):
        raise ValueError(
            f"expected M = 64 with N a multiple of 8, or M = 128 with N a multiple of 16, N at most 256; got M = {m}, N = {n}"
        )
    negative = (descriptor >> 13 ^ descriptor >> 14) & 1 == 1
    return Shape(
        m, n, 32 if form else 16, a, b, negative, bool(descriptor >> 15 & 1), bool(descriptor >> 16 & 1)
    )


#: Bytes of a swizzle atom's row, by the descriptor's swizzle field.
_SWIZZLE = {0: 16, 2: 128, 4: 64, 6: 32}


def matrix_of(w: Warp, descriptor: int) -> tuple[int, int, int, int]:
    """Decode a tcgen05 matrix descriptor (PTX ISA, "Shared memory descriptor").

    Returns:
        Start address, leading and stride byte offsets, and the bytes of a swizzle atom's row.
    """
    if descriptor >> 46 & 7 != 1 or descriptor & 0x1FFE_0000_C000_C000 or descriptor >> 61 not in _SWIZZLE:
        w.fail(
            f"matrix descriptor {descriptor:#x}: malformed, or not modelled "
            "(base offset, absolute leading dimension, 128-byte swizzle with 32-byte atoms)"
        )
    start, leading, stride = ((descriptor >> place & 0x3FFF) << 4 for place in (0, 16, 32))
    check_pattern(w, descriptor, start, _SWIZZLE[descriptor >> 61])
    return start, leading, stride, _SWIZZLE[descriptor >> 61]


def rows_of(m: int, first: int) -> Array:
    """Return the lanes of the rows of D: all 128 for M = 128; for M = 64, 16 of each 32, from lane ``first`` on."""
    rows = np.arange(m)
    return rows if m == 128 else first + rows // 16 * 32 + rows % 16


def _words_of_d(w: Warp, cta: Cta, shape: Shape, pair: bool, first: int, column: int) -> Words:
    """Return the words [rows, N] of D in the tensor memory of a CTA (PTX ISA, "Data Path Layout Organization").

    A pair with M = 128 has 64 rows in each CTA: see `_halves`.
    """
    halves = pair and shape.m == 128
    memory_of(cta).check(w, column, shape.n // 2 if halves else shape.n)
    if halves:
        return _halves(column, shape.n)
    return _rectangle(128 if pair else shape.m, first, column, shape.n)


def _mma(d: Decoder, i: Instruction) -> Execute:
    """`mma`. Of a pair, each CTA holds half of the rows of A and D, and of the columns of B, at the same addresses."""
    pair, modifiers = _group(d, i)
    kinds = [m[6:] for m in modifiers if m.startswith("kind::")]
    d.only(
        modifiers, "kind::f16", "kind::tf32", "kind::f8f6f4", "collector::a::discard", "collector::a::fill"
    )
    if len(kinds) != 1:
        d.refuse("this form of tcgen05.mma is not modelled")
    (kind,) = kinds
    size, _ = KINDS[kind]
    operands = list(i.operands)
    to, to_offset = d.address(operands[0], "b32")
    in_tensor_memory = isinstance(operands[1], Address)
    a, a_offset = d.address(operands[1], "b32") if in_tensor_memory else (d.source(operands[1], "b64"), 0)
    b, instruction = d.source(operands[2], "b64"), d.source(operands[3], "b32")
    rest = operands[4:]
    masks = d.sources(rest.pop(0), "b32") if isinstance(rest[0], Vector) else []
    if len(rest) not in (1, 2) or len(masks) not in (0, 8 if pair else 4):
        d.refuse(
            f"tcgen05.mma: expected d, a, b, idesc, an optional mask of {8 if pair else 4} registers, enable-input-d, "
            "an optional scale-input-d"
        )
    scale, negated = d.predicate(rest[0])
    factor = 2.0 ** -d.immediate(rest[1]) if len(rest) == 2 else 1.0

    def multiply(w: Warp, lanes: int) -> None:
        (lane,) = _one_lane(w, lanes)
        known = [to, a, b, instruction, scale, *masks]
        if any(w.unknown[s] & lanes for s in known):
            w.fail(
                f"an operand is undefined: it depends on a value that nothing has written yet (lane {lane})"
            )
        value = lambda slot: int(w.regs[slot][lane])
        try:
            shape = shape_of(value(instruction), kind, pair)
        except ValueError as error:
            w.fail(f"instruction descriptor {value(instruction):#x}: {error}")
        target, pc = value(to) + to_offset, w.pc
        first, column = target >> 16, target & 0xFFFF
        if first not in ((0, 16) if shape.m == 64 else (0,)):
            w.fail(
                f"tcgen05.mma: D of M = {shape.m} must start at lane 0{' or 16' if shape.m == 64 else ''}, got {first}"
            )
        add = bool((w.regs[scale] ^ FULL * negated) >> lane & 1)
        kept = sum(value(s) << 32 * n for n, s in enumerate(masks))
        if pair and kept:
            w.fail("tcgen05.mma: lanes of D that are disabled are not modelled for cta_group::2")
        ctas = _ctas(w, pair)
        rows, columns = shape.m // len(ctas), shape.n // len(ctas)
        w.issuer.issue(int(lane))
        rights = [_operand(w, cta, value(b), columns, shape.b_mn_major, size) for cta in ctas]
        if in_tensor_memory:
            if shape.a_mn_major:
                w.fail(
                    "tcgen05.mma: A in tensor memory must be K-major; the instruction descriptor says MN-major"
                )
            if pair and shape.m == 128:
                w.fail("tcgen05.mma: A in tensor memory with M = 128 is not modelled for cta_group::2")
            place = value(a) + a_offset
            if place >> 16 != first:
                w.fail(f"tcgen05.mma: A must start at the lane of D, {first}; got {place >> 16}")
        else:
            lefts = [_operand(w, cta, value(a), rows, shape.a_mn_major, size) for cta in ctas]
        parts = []
        for n, cta in enumerate(ctas):
            memory = memory_of(cta)
            words = written = _words_of_d(w, cta, shape, pair, first, column)
            enabled = None  # rows; None: all are
            if kept:
                enabled = np.array([not kept >> int(row) & 1 for row in words.numbers[:, 0] // COLUMNS])
                written = _numbered(words.numbers[enabled])
            left: Matrix | Words
            stored = None  # rows that no wait has completed
            if in_tensor_memory:
                memory.check(w, place & 0xFFFF, 8)
                left = _rectangle(rows, first, place & 0xFFFF, 8)
                stored = np.any(left.of(memory.storing), axis=1)
                _record_read(w.issuer.start(), memory, left)
            else:
                left = lefts[n]
            if add:
                _record_read(w.issuer.start(), memory, words)
            _record_write(w.issuer.start(), memory, written)
            words.within(memory.busy)[words.index] += 1
            parts.append((memory, words, written, enabled, left, stored))

        def execute() -> None:
            w.pc = pc
            for operand in rights if in_tensor_memory else rights + lefts:
                operand.check()
            y = np.concatenate([values_of(right.bits, shape.b) for right in rights])
            y_unknown = np.concatenate([right.unknown for right in rights])
            for memory, words, written, enabled, left, stored in parts:
                if isinstance(left, Matrix):
                    x, x_unknown = left.bits, left.unknown
                else:
                    x, x_unknown = _from_tensor_memory(memory, left, size)
                    x_unknown = x_unknown | stored
                product = values_of(x, shape.a) @ (-y.T if shape.negative else y.T)
                words.within(memory.busy)[words.index] -= 1
                missing = None
                if x_unknown.any() or y_unknown.any():
                    missing = x_unknown[:, None] | y_unknown[None, :]
                if add:
                    # Pending writes of later instructions do not count: this one precedes them in the queue.
                    before, empty = memory.at(words, shape.bits)
                    if empty is not None:
                        missing = empty if missing is None else missing | empty
                    product = product + _values(before, shape.bits) * factor
                bits = _rounded(product, shape.bits)
                if enabled is not None:
                    bits, missing = bits[enabled], None if missing is None else missing[enabled]
                memory.store(written, bits, missing, shape.bits)

        _enqueue(w, [memory_of(cta) for cta in ctas], execute)

    return multiply


def _values(words: Array, bits: int) -> Array:
    """Convert words of D, fp32 or fp16 (``bits`` 16), to fp64."""
    real: Any = words.view(np.float32) if bits == 32 else words.astype(np.uint16).view(np.float16)
    return real.astype(np.float64)


def _rounded(x: Array, bits: int) -> Array:
    """Round fp64 to words of D, the inverse of `_values`."""
    if bits == 16:
        return floats.f16_bits_of(x)
    return floats.canonical(np.ascontiguousarray(x.astype(np.float32))).view(np.uint32)


def _one_lane(w: Warp, lanes: int) -> Array:
    """Return the only active lane; an error if there are several."""
    found = INDICES[lanes]
    if len(found) != 1:
        w.fail(
            f"{len(found)} lanes issue this (lanes {lanes:08x}), and each issues one instruction: expected one lane"
        )
    return found


@dataclass(frozen=True)
class Matrix:
    """An operand in the shared memory of a CTA.

    Attributes:
        bits: [rows, 32 / size].
        unknown: bool[rows], the rows with undefined elements.
        check: checks that it has not changed.
    """

    bits: Array
    unknown: Array
    check: Callable[[], None]


def _operand(w: Warp, cta: Cta, descriptor: int, rows: int, mn_major: bool, size: int) -> Matrix:
    """Read an operand in the shared memory of a CTA."""
    if size != 2 and mn_major:
        w.fail(
            "tcgen05.mma: tf32 and fp8 are modelled K-major only, the instruction descriptor says MN-major"
        )
    bits, unknown, check = load_operand(w, *matrix_of(w, descriptor), rows, mn_major, size, cta=cta)
    return Matrix(bits, np.zeros(rows, np.bool_) if unknown is None else unknown, check)


def _from_tensor_memory(memory: TensorMemory, words: Words, size: int) -> tuple[Array, Array]:
    """Read A from tensor memory: the bits and undefined rows of a `Matrix`. A word holds several elements below 4 bytes, the lowest one first."""
    values, unknown = memory.at(words)  # not `load`: later instructions of the queue may write these words
    undefined = np.zeros(len(values), np.bool_) if unknown is None else np.any(unknown, axis=1)
    return np.ascontiguousarray(values).view(UNSIGNED[size]), undefined


def _enqueue(w: Warp, accessed: list[TensorMemory], execute: Callable[[], None]) -> None:
    """Append an instruction to the queue of the warp's CTA. Each pending entry of the machine executes the queue's first instruction.

    ``accessed``: the tensor memory that it accesses, of one CTA or of both in a pair.
    """
    queue = memory_of(w.cta).queue

    def last() -> None:
        for memory in accessed:
            memory.working -= 1
        execute()

    for memory in accessed:
        memory.working += 1
    queue.append(last)
    w.machine.pending.append(lambda: queue.popleft()())


def _commit(d: Decoder, i: Instruction) -> Execute:
    """`commit`: an arrival at an mbarrier when all earlier instructions of the queue have executed.

    With multicast: at the same mbarrier of several CTAs of the cluster.
    """
    _, modifiers = _group(d, i)
    d.only(modifiers, "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64")
    base, offset = d.address(i.operands[0], "b32")
    multicast = "multicast::cluster" in i.modifiers
    if len(i.operands) != 1 + multicast:
        d.refuse(f"tcgen05.commit: expected {1 + multicast} operands, got {len(i.operands)}")
    mask = d.source(i.operands[1], "b16") if multicast else None
    generic = "shared::cluster" not in i.modifiers

    def commit(w: Warp, lanes: int) -> None:
        (lane,) = _one_lane(w, lanes)
        place = int(addresses(w, base, offset, lanes)[0])
        if generic and place >> WINDOW_BITS != SHARED_WINDOW:
            w.fail(f"mbarrier: generic address {place:#x} is not in shared memory")
        places = [(place,)] if mask is None else multicast_places(w, mask, int(lane), place)
        barriers = [mbarrier_at(w, place) for (place,) in places]
        # The completed instructions have read their operands. A warp that observes this arrival may overwrite them.
        # That holds for instructions of the same thread only: a commit of another lane says nothing about them.
        known, pc = w.clock.release(), w.pc
        index = w.issuer.clock.index
        known[index] = max(known[index], w.issuer.commit(int(lane)))

        def arrive() -> None:
            w.pc = pc
            for barrier in barriers:
                barrier.asynchronous = True
                barrier.counted |= w.machine.commits
                barrier.release(known)
                barrier.arrive(1, w.fail)

        _enqueue(w, [], arrive)

    return commit


# ---- shared to tensor memory

#: Shape and multicast of `cp`: the lanes [replicas, rows] of its rows, and its columns.
_COPIES = {
    ("128x256b", ""): (np.arange(128)[None], 8),
    ("128x128b", ""): (np.arange(128)[None], 4),
    ("4x256b", ""): (np.arange(4)[None] * 32, 8),
    ("64x128b", "warpx2::02_13"): (np.arange(64) + np.array([[0], [64]]), 4),
    ("64x128b", "warpx2::01_23"): (np.arange(64) // 32 * 64 + np.arange(64) % 32 + np.array([[0], [32]]), 4),
    ("32x128b", "warpx4"): (np.arange(32) + np.arange(4)[:, None] * 32, 4),
}


def _cp(d: Decoder, i: Instruction) -> Execute:
    """`cp`: rows of a K-major operand in shared memory to columns of tensor memory. It stays in order with `mma`.

    In a pair, each CTA copies from its shared memory to its tensor memory.
    """
    pair, rest = _group(d, i)
    shape = next((m for m in rest if m[0].isdigit()), "")
    form = shape, ".".join(m for m in rest if m != shape)
    if form not in _COPIES:
        d.refuse("this copy to tensor memory is not modelled")
    replicas, count = _COPIES[form]
    to, offset = d.address(i.operands[0], "b32")
    source = d.source(i.operands[1], "b64")

    def copy(w: Warp, lanes: int) -> None:
        (lane,) = _one_lane(w, lanes)
        if (w.unknown[to] | w.unknown[source]) & lanes:
            w.fail(
                f"an operand is undefined: it depends on a value that nothing has written yet (lane {lane})"
            )
        pc, target = w.pc, int(w.regs[to][lane]) + offset
        if target >> 16 or target % 4:
            w.fail(
                f"tcgen05.cp: the destination {target:#x} must start at lane 0 and at a multiple of 4 columns"
            )
        w.issuer.issue(int(lane))
        matrix = matrix_of(w, int(w.regs[source][lane]))
        parts = []
        for cta in _ctas(w, pair):
            bits, missing, check = load_operand(w, *matrix, replicas.shape[1], False, 2, 4 * count, cta)
            values = np.ascontiguousarray(bits).view(np.uint32)
            unknown = None if missing is None else np.repeat(missing[:, None], count, 1)
            memory = memory_of(cta)
            memory.check(w, target, count)
            columns = target + np.arange(count)
            places = [_numbered(rows[:, None] * COLUMNS + columns) for rows in replicas]
            for words in places:
                _record_write(w.issuer.start(), memory, words)
                memory.busy[words.index] += 1
            parts.append((memory, places, values, unknown, check))

        def execute() -> None:
            w.pc = pc
            for memory, places, values, unknown, check in parts:
                check()
                for words in places:
                    memory.busy[words.index] -= 1
                    memory.store(words, values, unknown)

        _enqueue(w, [memory for memory, *_ in parts], execute)

    return copy
