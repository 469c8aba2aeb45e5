"""Tensor memory and what works on it: tcgen05, one CTA at a time.

Tensor memory is 128 lanes of 512 columns of 4 bytes. `mma` and `commit` are executed later, in their order; until then
what they write cannot be used, as what `st` writes cannot before its wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx_emulator import floats
from ptx_emulator.access import addresses, mbarrier_at, scatter_to
from ptx_emulator.decode import Decoder, Execute, handler
from ptx_emulator.lanes import BOOLS, FULL, INDICES, Array, to_bits
from ptx_emulator.machine import Cta, Warp
from ptx_emulator.matrices import load_operand, values_of
from ptx_emulator.memory import SHARED_WINDOW, WINDOW_BITS, Region
from ptx_emulator.parser import Address, Instruction, Operand, Vector
from ptx_emulator.races import Shadow
from ptx_emulator.synchronize import aligned, uniform
from ptx_emulator.tensors import ends

LANES, COLUMNS = 128, 512
LOADING = 1 << 60  # `Warp.flight` of registers that `ld` fills


@dataclass
class TensorMemory:
    """Of a CTA. ``owner``: of each column the first one of its allocation, or -1; ``busy``: of each word how many
    instructions are going to write it; ``queue``: what is going to be executed."""

    region: Region
    owner: Array = field(default_factory=lambda: np.full(COLUMNS, -1))
    busy: Array = field(default_factory=lambda: np.zeros(LANES * COLUMNS, np.int32))
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    relinquished: bool = False

    def words(self, w: Warp, lanes: Array, column: int, count: int) -> Array:
        """[lanes, count] numbers of the words of columns that are allocated."""
        if column + count > COLUMNS or (self.owner[column : column + count] < 0).any():
            w.fail(f"tensor memory: columns {column} to {column + count - 1} are not all allocated")
        return lanes[:, None] * COLUMNS + column + np.arange(count)

    def at(self, words: Array, bits: int = 32) -> tuple[Array, Array]:
        """Values, and which of them hold nothing; of 16 bits the lower ones."""
        assert self.region.known is not None
        flat, mask = words.reshape(-1), np.uint32((1 << bits) - 1)
        values, known = self.region.view(4, 1)[flat, 0], self.region.known_view(4, 1)[flat, 0]
        return (values & mask).reshape(words.shape), (known & mask != mask).reshape(words.shape)

    def load(self, words: Array, bits: int = 32) -> tuple[Array, Array]:
        """The same; what is going to be written is not known."""
        values, unknown = self.at(words, bits)
        return values, unknown | (self.busy[words] > 0)

    def store(self, words: Array, values: Array, unknown: Array | None, bits: int = 32) -> None:
        """Of 16 bits the lower ones: the others hold nothing then."""
        missing = None if unknown is None else unknown.reshape(-1, 1)
        flat = words.reshape(-1)
        self.region.store(flat * 4, 4, 1, values.reshape(-1, 1), missing)
        if bits == 16:
            self.region.known_view(4, 1)[flat, 0] &= np.uint32(0xFFFF)


def memory_of(cta: Cta) -> TensorMemory:
    """The tensor memory of a CTA."""
    if cta.tensor_memory is None:
        size = LANES * COLUMNS * 4
        data = np.frombuffer(bytearray(size), np.uint8)
        region = Region("tensor memory", 0, size, data, initialized=False, scratch=True)
        if cta.machine.races:
            region.shadow = Shadow(region)
        cta.tensor_memory = TensorMemory(region)
    found = cta.tensor_memory
    assert isinstance(found, TensorMemory)
    return found


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
    """Execution is sequentially consistent here, but for what `TensorMemory.queue` holds."""
    d.only(i.modifiers[1:])
    return lambda w, lanes: None


# ---- allocation


def _alloc(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers[1:], "cta_group::1", "sync", "aligned", "shared::cta", "b32")
    space = "shared" if "shared::cta" in i.modifiers else "generic"
    to, offset = d.address(i.operands[0], "b32")
    slot = d.source(i.operands[1], "u32")

    def allocate(w: Warp, lanes: int) -> None:
        memory, count = memory_of(w.cta), _columns(w, slot, lanes)
        if memory.relinquished:
            w.fail("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        free = [c for c in range(0, COLUMNS, count) if (memory.owner[c : c + count] < 0).all()]
        if not free:
            w.fail(f"tensor memory: {count} columns are never free")
        memory.owner[free[0] : free[0] + count] = free[0]
        memory.region.forget().reshape(LANES, COLUMNS * 4)[:, free[0] * 4 : (free[0] + count) * 4] = 0
        place = addresses(w, to, offset, lanes)[:1]
        scatter_to(w, space, place, 4, np.array([[free[0]]], np.uint32), None, 1, strong=False)

    return aligned(allocate)


def _columns(w: Warp, slot: int, lanes: int) -> int:
    count = uniform(w, slot, lanes)
    if not 32 <= count <= COLUMNS or count & count - 1:
        w.fail(f"tensor memory: {count} columns; a power of 2 from 32 to {COLUMNS} was expected")
    return count


def _dealloc(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers[1:], "cta_group::1", "sync", "aligned", "b32")
    base, slot = d.source(i.operands[0], "b32"), d.source(i.operands[1], "u32")

    def free(w: Warp, lanes: int) -> None:
        memory, first, count = memory_of(w.cta), uniform(w, base, lanes), _columns(w, slot, lanes)
        if first >= COLUMNS or np.count_nonzero(memory.owner == first) != count:
            w.fail(f"tensor memory: no {count} columns were allocated at {first:#x}")
        if memory.queue:
            w.fail("tensor memory is freed while an instruction of tcgen05 is in flight")
        memory.owner[memory.owner == first] = -1

    return aligned(free)


def _relinquish(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers[1:], "cta_group::1", "sync", "aligned")

    def relinquish(w: Warp, lanes: int) -> None:
        memory_of(w.cta).relinquished = True

    return aligned(relinquish)


# ---- registers from and to tensor memory


@dataclass(frozen=True)
class Fragment:
    """[registers, 32] lanes and columns, from the first ones of a warp's access, of the words that it moves. ``packed``: a
    register holds the lower halves of two columns."""

    rows: Array
    columns: Array
    packed: bool

    def words(self, w: Warp, address: int) -> list[Array]:
        """Numbers of the words of tensor memory: those of lower halves and of upper ones, where they are packed."""
        places = [self.columns, self.columns + 1] if self.packed else [self.columns]
        return [_accessed(w, address, self.rows, columns) for columns in places]


def _fragment(d: Decoder, i: Instruction, split: Operand | None) -> Fragment:
    """``split``: where the columns of the upper 16 threads begin, of `16x32bx2`."""
    modifiers = [m for m in i.modifiers if m not in ("pack::16b", "unpack::16b")]
    packed = len(modifiers) < len(i.modifiers)
    d.only(modifiers[1:3], "sync", "aligned")
    if len(modifiers) != 6 or modifiers[5] != "b32" or modifiers[4][:1] != "x":
        d.refuse("this access of tensor memory is not modelled")
    shape, count = modifiers[3], int(modifiers[4][1:])
    threads = np.arange(32)
    # Registers of one repetition: by its lanes and columns.
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
        d.refuse("operands not understood")
    places = np.concatenate([np.stack(columns) + n * width for n in range(count)]) * (1 + packed)
    if split is not None:
        places = places + threads // 16 * d.immediate(split)
    return Fragment(np.tile(np.stack(rows), (count, 1)), places, packed)


def _accessed(w: Warp, address: int, rows: Array, columns: Array) -> Array:
    """Numbers of the words of an access, each within the 32 lanes that the warp may access."""
    first, column = address >> 16, address & 0xFFFF
    low = w.number % 4 * 32
    if first < low or first + int(rows.max()) >= low + 32 or (first - low) % 16:
        w.fail(
            f"tensor memory: lane {first} of {address:#x}; warp {w.number} accesses lanes {low} to {low + 31}"
        )
    memory_of(w.cta).words(w, rows[:1, 0], column, int(columns.max()) + 1)
    return (first + rows) * COLUMNS + column + columns


def _ld(d: Decoder, i: Instruction) -> Execute:
    fragment = _fragment(d, i, i.operands[2] if len(i.operands) > 2 else None)
    targets = d.destinations(i.operands[0], "b32")
    base, offset = d.address(i.operands[1], "b32")
    if len(targets) != len(fragment.rows):
        d.refuse(f"expected {len(fragment.rows)} destinations")

    def load(w: Warp, lanes: int) -> None:
        address = int(addresses(w, base, offset, lanes)[0])
        uniform(w, base, lanes)
        memory, parts = memory_of(w.cta), fragment.words(w, address)
        values: Array = np.zeros(fragment.rows.shape, np.uint32)
        unknown: Array = np.zeros(fragment.rows.shape, np.bool_)
        for n, words in enumerate(parts):
            _look(w, memory, words)
            found, missing = memory.load(words, 32 // len(parts))
            values, unknown = values | found << np.uint32(16 * n), unknown | missing
        for target, value, missing in zip(targets, values, unknown):
            w.put(target, value, to_bits(missing), FULL)
            w.flight[target] = LOADING
        w.tensor_loads += parts

    return aligned(load)


def _st(d: Decoder, i: Instruction) -> Execute:
    fragment = _fragment(d, i, i.operands[1] if len(i.operands) > 2 else None)
    base, offset = d.address(i.operands[0], "b32")
    sources = d.sources(i.operands[-1], "b32")
    if len(sources) != len(fragment.rows):
        d.refuse(f"expected {len(fragment.rows)} sources")

    def store(w: Warp, lanes: int) -> None:
        address = int(addresses(w, base, offset, lanes)[0])
        uniform(w, base, lanes)
        memory, parts = memory_of(w.cta), fragment.words(w, address)
        values, unknown = (
            np.stack([w.regs[s] for s in sources]),
            np.stack([BOOLS[w.unknown[s]] for s in sources]),
        )
        bits = 32 // len(parts)
        for n, words in enumerate(parts):
            if (memory.busy[words] > 0).any() and not _only_stores(w, words):
                w.fail("tensor memory is written that an instruction in flight writes")
            _write(w, memory, words)
            memory.store(words, values >> np.uint32(16 * n) & np.uint32((1 << bits) - 1), unknown, bits)
            np.add.at(memory.busy, words.reshape(-1), 1)
        w.tensor_stores += parts

    return aligned(store)


def _only_stores(w: Warp, words: Array) -> bool:
    """Whether what is going to write words are stores of this warp alone, which keep their order."""
    mine = np.zeros(LANES * COLUMNS, np.int32)
    for earlier in w.tensor_stores:
        np.add.at(mine, earlier.reshape(-1), 1)
    return bool((memory_of(w.cta).busy[words] <= mine[words]).all())


def _look(w: Warp, memory: TensorMemory, words: Array) -> None:
    """Reads of a warp, which are ordered with all that it does itself: it waits as a whole."""
    if memory.region.shadow is not None:
        memory.region.shadow.load(w, words.reshape(-1), 0)


def _write(w: Warp, memory: TensorMemory, words: Array) -> None:
    if memory.region.shadow is not None:
        memory.region.shadow.store(w, words.reshape(-1), 0)


def _wait(d: Decoder, i: Instruction) -> Execute:
    """Accesses end here, not earlier: who was told before has not been told of them."""
    d.only(i.modifiers[1:], "sync", "aligned")
    d.relaxed = True
    loads = i.modifiers[0] == "wait::ld"

    def wait(w: Warp, lanes: int) -> None:
        memory = memory_of(w.cta)
        if loads:
            for words in w.tensor_loads:
                _look(w, memory, words)
            w.tensor_loads = []
            w.flight = {slot: group for slot, group in w.flight.items() if group != LOADING}
        else:
            for words in w.tensor_stores:
                _write(w, memory, words)
                np.subtract.at(memory.busy, words.reshape(-1), 1)
            w.tensor_stores = []

    return aligned(wait)


# ---- mma


@dataclass(frozen=True)
class Shape:
    """What an instruction descriptor says. ``a``, ``b``: "f16", "bf16" or "tf32"; ``bits`` of an element of D."""

    m: int
    n: int
    bits: int
    a: str
    b: str
    negative: bool
    a_mn_major: bool
    b_mn_major: bool


def shape_of(descriptor: int, kind: str) -> Shape:
    """Raises `ValueError` for what is malformed or not modelled."""
    m, n = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
    if descriptor & 0xE080_004F:
        raise ValueError("sparsity, saturation, shifts and reserved bits are not modelled")
    form = descriptor >> 4 & 3
    if form > 1 or (form == 0 and kind != "f16"):
        raise ValueError(f"a type of D that kind::{kind} does not have")
    types = {"f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}}[kind]
    a, b = types.get(descriptor >> 7 & 7), types.get(descriptor >> 10 & 7)
    if a is None or b is None:
        raise ValueError(f"types of A and B that kind::{kind} does not have")
    if m not in (64, 128) or not 8 <= n <= 256 or (m == 128 and n % 16):
        raise ValueError(f"M = {m} and N = {n}")
    negative = (descriptor >> 13 ^ descriptor >> 14) & 1 == 1
    return Shape(
        m, n, 32 if form else 16, a, b, negative, bool(descriptor >> 15 & 1), bool(descriptor >> 16 & 1)
    )


#: Width of a swizzle atom's row in bytes, by the descriptor's field.
_SWIZZLE = {0: 16, 2: 128, 4: 64, 6: 32}


def matrix_of(w: Warp, descriptor: int) -> tuple[int, int, int, int]:
    """Start, leading and stride offsets in bytes, and the width of the swizzle, of an operand in shared memory."""
    if descriptor >> 46 & 7 != 1 or descriptor & 0x1FFE_0000_C000_C000 or descriptor >> 61 not in _SWIZZLE:
        w.fail(
            f"matrix descriptor {descriptor:#x}: malformed, or not modelled (base offset, absolute stride, 32-byte atoms)"
        )
    start, leading, stride = ((descriptor >> place & 0x3FFF) << 4 for place in (0, 16, 32))
    return start, leading, stride, _SWIZZLE[descriptor >> 61]


def rows_of(m: int, first: int) -> Array:
    """The lanes of the rows of D: all of them, or 16 of each 32."""
    rows = np.arange(m)
    return rows if m == 128 else first + rows // 16 * 32 + rows % 16


def _mma(d: Decoder, i: Instruction) -> Execute:
    kinds = [m[6:] for m in i.modifiers if m.startswith("kind::")]
    d.only(
        i.modifiers[1:],
        "cta_group::1",
        "kind::f16",
        "kind::tf32",
        "collector::a::discard",
        "collector::a::fill",
    )
    if len(kinds) != 1 or "cta_group::1" not in i.modifiers:
        d.refuse("this mma is not modelled")
    (kind,) = kinds
    size = 2 if kind == "f16" else 4
    operands = list(i.operands)
    to, to_offset = d.address(operands[0], "b32")
    in_tensor_memory = isinstance(operands[1], Address)
    a, a_offset = d.address(operands[1], "b32") if in_tensor_memory else (d.source(operands[1], "b64"), 0)
    b, instruction = d.source(operands[2], "b64"), d.source(operands[3], "b32")
    rest = operands[4:]
    masks = d.sources(rest.pop(0), "b32") if isinstance(rest[0], Vector) else []
    if len(rest) not in (1, 2) or len(masks) not in (0, 4):
        d.refuse("operands not understood")
    scale, negated = d.predicate(rest[0])
    factor = 2.0 ** -d.immediate(rest[1]) if len(rest) == 2 else 1.0

    def multiply(w: Warp, lanes: int) -> None:
        (lane,) = _one_lane(w, lanes)
        known = [to, a, b, instruction, scale, *masks]
        if any(w.unknown[s] & lanes for s in known):
            w.fail("an operand comes from what nothing has written")
        value = lambda slot: int(w.regs[slot][lane])
        try:
            shape = shape_of(value(instruction), kind)
        except ValueError as error:
            w.fail(f"instruction descriptor {value(instruction):#x}: {error}")
        memory, pc = memory_of(w.cta), w.pc
        target = value(to) + to_offset
        first, column = target >> 16, target & 0xFFFF
        if first not in ((0,) if shape.m == 128 else (0, 16)):
            w.fail(f"tensor memory: D begins in lane {first}")
        rows = rows_of(shape.m, first)
        words = memory.words(w, rows, column, shape.n)
        add = bool((w.regs[scale] ^ FULL * negated) >> lane & 1)
        kept = sum(value(s) << 32 * n for n, s in enumerate(masks))
        written = np.array([not kept >> int(row) & 1 for row in rows])
        right, b_unknown, checks = _operand(w, value(b), shape.n, shape.b_mn_major, size)
        if in_tensor_memory:
            if shape.a_mn_major:
                w.fail("A in tensor memory is K-major")
            place = value(a) + a_offset
            if place >> 16 != first:
                w.fail(f"tensor memory: A begins in lane {place >> 16}, D in lane {first}")
            a_words = memory.words(w, rows, place & 0xFFFF, 8)
            _look(w, memory, a_words)
        else:
            left, a_unknown, more = _operand(w, value(a), shape.m, shape.a_mn_major, size)
            checks += more
        if add:
            _look(w, memory, words)
        _write(w, memory, words[written])
        np.add.at(memory.busy, words.reshape(-1), 1)

        def execute() -> None:
            w.pc = pc
            for check in checks:
                check()
            x, x_unknown = (
                _from_tensor_memory(memory, a_words, size) if in_tensor_memory else (left, a_unknown)
            )
            product = values_of(x, shape.a) @ values_of(right, shape.b).T * (-1 if shape.negative else 1)
            np.subtract.at(memory.busy, words.reshape(-1), 1)
            missing = x_unknown[:, None] | b_unknown[None, :]
            if add:
                # What later instructions are going to write does not count: this one comes before them.
                before, empty = memory.at(words, shape.bits)
                missing = missing | empty
                product = product + _values(before, shape.bits) * factor
            bits = _rounded(product, shape.bits)
            memory.store(words[written], bits[written], missing[written], shape.bits)

        _enqueue(w, memory, execute)

    return multiply


def _values(words: Array, bits: int) -> Array:
    """fp64 of the elements of D, of fp32 or of fp16."""
    real: Any = words.view(np.float32) if bits == 32 else words.astype(np.uint16).view(np.float16)
    return real.astype(np.float64)


def _rounded(x: Array, bits: int) -> Array:
    """The reverse."""
    if bits == 16:
        return floats.f16_bits_of(x)
    return floats.canonical(np.ascontiguousarray(x.astype(np.float32))).view(np.uint32)


def _one_lane(w: Warp, lanes: int) -> Array:
    found = INDICES[lanes]
    if len(found) != 1:
        w.fail(f"{len(found)} lanes issue this, each on its own: one was expected")
    return found


def _operand(
    w: Warp, descriptor: int, rows: int, mn_major: bool, size: int
) -> tuple[Array, Array, list[Callable[[], None]]]:
    """Bits [rows, 32 / size] of an operand in shared memory, which rows are not known, and checks that it stays."""
    if size == 4 and mn_major:
        w.fail("tf32 is modelled K-major only")
    bits, unknown, check = load_operand(w, *matrix_of(w, descriptor), rows, mn_major, size)
    return bits, np.zeros(rows, np.bool_) if unknown is None else unknown, [check]


def _from_tensor_memory(memory: TensorMemory, words: Array, size: int) -> tuple[Array, Array]:
    """The same of A in tensor memory: a word holds two elements of 2 bytes, the lower one first."""
    values, unknown = memory.load(words)
    kind: Any = np.uint16 if size == 2 else np.uint32
    return np.ascontiguousarray(values).view(kind), np.any(unknown, axis=1)


def _enqueue(w: Warp, memory: TensorMemory, execute: Callable[[], None]) -> None:
    """At some time the first one of the queue is executed, as often as something was added."""
    memory.queue.append(execute)
    w.machine.pending.append(lambda: memory.queue.popleft()())


def _commit(d: Decoder, i: Instruction) -> Execute:
    """An mbarrier, or the same one in several CTAs of the cluster, is told when all that came before is done."""
    d.only(
        i.modifiers[1:], "cta_group::1", "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64"
    )  # fmt: skip
    base, offset = d.address(i.operands[0], "b32")
    multicast = "multicast::cluster" in i.modifiers
    if len(i.operands) != 1 + multicast:
        d.refuse("operands not understood")
    mask = d.source(i.operands[1], "b16") if multicast else None
    generic = "shared::cluster" not in i.modifiers

    def commit(w: Warp, lanes: int) -> None:
        (lane,) = _one_lane(w, lanes)
        place = int(addresses(w, base, offset, lanes)[0])
        if generic and place >> WINDOW_BITS != SHARED_WINDOW:
            w.fail("mbarrier: a generic address that is not one of shared memory")
        places = [(place,)] if mask is None else ends(w, mask, int(lane), place)
        barriers = [mbarrier_at(w, place) for (place,) in places]
        # What is done read operands that the warp knew to be there: who sees this may write them anew.
        known, pc = w.clock.release(), w.pc

        def arrive() -> None:
            w.pc = pc
            known[w.clock.index] = w.clock.now  # operands may have been read as late as now
            w.clock.now += 1
            for barrier in barriers:
                barrier.asynchronous = True
                barrier.release(known)
                barrier.arrive(1, w.fail)

        _enqueue(w, memory_of(w.cta), arrive)

    return commit


# ---- shared to tensor memory

#: Shapes of `cp` with what multicasts them: lanes of their rows, once for each replica, and columns.
_COPIES = {
    ("128x256b", ""): (np.arange(128)[None], 8),
    ("128x128b", ""): (np.arange(128)[None], 4),
    ("4x256b", ""): (np.arange(4)[None] * 32, 8),
    ("64x128b", "warpx2::02_13"): (np.arange(64) + np.array([[0], [64]]), 4),
    ("64x128b", "warpx2::01_23"): (np.arange(64) // 32 * 64 + np.arange(64) % 32 + np.array([[0], [32]]), 4),
    ("32x128b", "warpx4"): (np.arange(32) + np.arange(4)[:, None] * 32, 4),
}


def _cp(d: Decoder, i: Instruction) -> Execute:
    """Rows of a K-major operand, which a descriptor names, to columns of tensor memory. It keeps its order with `mma`."""
    rest = [m for m in i.modifiers[1:] if m != "cta_group::1"]
    shape = next((m for m in rest if m[0].isdigit()), "")
    form = shape, ".".join(m for m in rest if m != shape)
    if "cta_group::1" not in i.modifiers or form not in _COPIES:
        d.refuse("this copy to tensor memory is not modelled")
    replicas, count = _COPIES[form]
    to, offset = d.address(i.operands[0], "b32")
    source = d.source(i.operands[1], "b64")

    def copy(w: Warp, lanes: int) -> None:
        (lane,) = _one_lane(w, lanes)
        if (w.unknown[to] | w.unknown[source]) & lanes:
            w.fail("an operand comes from what nothing has written")
        memory, pc, target = memory_of(w.cta), w.pc, int(w.regs[to][lane]) + offset
        if target >> 16 or target % 4:
            w.fail(f"tensor memory: a copy to {target:#x} has to begin in lane 0, at a multiple of 4 columns")
        matrix = matrix_of(w, int(w.regs[source][lane]))
        bits, missing, check = load_operand(w, *matrix, replicas.shape[1], False, 2, 4 * count)
        values = np.ascontiguousarray(bits).view(np.uint32)
        unknown = None if missing is None else np.repeat(missing[:, None], count, 1)
        places = [memory.words(w, rows, target, count) for rows in replicas]
        for words in places:
            _write(w, memory, words)
            np.add.at(memory.busy, words.reshape(-1), 1)

        def execute() -> None:
            w.pc = pc
            check()
            for words in places:
                np.subtract.at(memory.busy, words.reshape(-1), 1)
                memory.store(words, values, unknown)

        _enqueue(w, memory, execute)

    return copy
