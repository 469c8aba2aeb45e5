"""Loads, stores, atomics: gathers and scatters over the active lanes, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator import floats
from ptx_emulator.decode import DTYPES, Decoder, Execute, handler
from ptx_emulator.lanes import BOOLS, FULL, INDICES, Array, to_bits
from ptx_emulator.machine import POLL, Cta, Warp
from ptx_emulator.memory import CTA_BITS, UNSIGNED, Fail, Region
from ptx_emulator.parser import SIZES, Instruction, Vector
from ptx_emulator.races import SEVERAL

SPACES = ("global", "shared", "shared::cta", "param", "local", "const", "shared::cluster")
#: Where data is kept, and for how long, changes no result.
HINTS = (
    "nc", "L1::no_allocate", "L1::evict_first", "L1::evict_last", "L1::evict_normal", "L1::evict_unchanged",
    "L2::cache_hint", "L2::evict_first", "L2::evict_last", "L2::evict_normal",
    "L2::64B", "L2::128B", "L2::256B",
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "gpu", "cta", "sys", "cluster",
)  # fmt: skip


def space_of(d: Decoder, i: Instruction) -> str:
    """The state space of an access."""
    found = [m for m in i.modifiers if m in SPACES]
    if len(found) != 1 or found[0] not in ("global", "shared", "shared::cta", "shared::cluster", "param"):
        d.refuse("generic, local and constant addresses are not modelled")
    return found[0] if found[0] == "shared::cluster" else found[0].partition("::")[0]


def finder(w: Warp, space: str) -> Callable[[int, int, Fail], Region]:
    """What gives the region that holds ``[place, end)``."""
    if space != "shared::cluster":
        return w.machine.memory.at

    def at(place: int, end: int, fail: Fail) -> Region:
        region = w.cta.window(place >> CTA_BITS, fail)
        if place < region.low or end > region.high:
            fail(f"{space} memory out of bounds: {place:#x} to {end:#x}")
        return region

    return at


def addresses(w: Warp, slot: int, offset: int, lanes: int, what: str = "an address") -> Array:
    """Of the active lanes, as int64; all have to be known."""
    if w.unknown[slot] & lanes:
        w.fail(f"{what} is computed from what nothing has written (lanes {w.unknown[slot] & lanes:08x})")
    found = w.regs[slot].astype(np.int64)
    if lanes != FULL:
        found = found[INDICES[lanes]]
    return found + offset if offset else found


def region_of(w: Warp, space: str, places: Array, size: int) -> Region | None:
    """The region of all accesses of ``size`` bytes, aligned to it; None: there are several, each within
    one."""
    if np.bitwise_or.reduce(places) & (size - 1):
        bad = places[places % size != 0][0]
        w.fail(f"{space} memory: address {bad:#x} is not aligned to {size} bytes")
    low, high = int(places.min()), int(places.max()) + size
    if space == "global":
        region = w.machine.memory.region(low, high)
        if region is None:
            for place in places.tolist():
                w.machine.memory.at(place, place + size, w.fail)
        return region
    if space == "shared::cluster":
        if low >> CTA_BITS != high - 1 >> CTA_BITS:
            return None
        region = w.cta.window(low >> CTA_BITS, w.fail)
    else:
        region = w.cta.shared if space == "shared" else w.machine.parameters
    if low < region.low or high > region.high:
        w.fail(
            f"{space} memory out of bounds: {low:#x} to {high:#x}, there are {region.low:#x} to {region.high:#x}"
        )
    return region


def gather(
    w: Warp, space: str, places: Array, size: int, count: int, lanes: Any = SEVERAL
) -> tuple[Array, Array | None]:
    """[n, count] words of ``size`` bytes, and which are not known. ``lanes``: that access them, or None: no
    race is looked for."""
    region = region_of(w, space, places, size * count)
    if region is not None:
        if region.shadow is not None and lanes is not None:
            region.shadow.load(w, *touched(region, places, size * count, lanes))
        return region.load(places, size, count)
    values = np.empty((len(places), count), UNSIGNED[size])
    unknown = np.zeros((len(places), count), np.bool_)
    for n, place in enumerate(places.tolist()):
        one = finder(w, space)(place, place + size * count, w.fail)
        if one.shadow is not None and lanes is not None:
            one.shadow.load(w, *touched(one, places[n : n + 1], size * count, SEVERAL))
        values[n : n + 1], missing = one.load(places[n : n + 1], size, count)
        if missing is not None:
            unknown[n] = missing[0]
    return values, unknown if unknown.any() else None


def touched(region: Region, places: Array, size: int, lanes: Any) -> tuple[Array, Any]:
    """The words of 4 bytes of accesses of ``size`` bytes, and the lane of each."""
    words = (places - region.base) >> 2
    if size <= 4:
        return words, lanes
    words = words[:, None] + np.arange(size // 4)
    return words, lanes if isinstance(lanes, int) else lanes[:, None]


def _by_words(flags: Array, size: int) -> Array:
    """Flags [n, count] of elements of ``size`` bytes as flags [n, words] of words of 4 bytes."""
    if size >= 4:
        return np.repeat(flags, size // 4, axis=1)
    return np.any(flags.reshape(len(flags), -1, min(4 // size, flags.shape[1])), axis=2)


def scatter(
    w: Warp, space: str, places: Array, size: int, values: Array, unknown: Array | None, lanes: Any = SEVERAL
) -> None:
    """The reverse; values that are not known may go to scratch memory alone."""
    count = values.shape[1]
    region = region_of(w, space, places, size * count)
    if space == "global":
        w.machine.changes += 1
    parts: list[tuple[Region, Any]]
    if region is not None:
        parts = [(region, slice(None))]
    else:
        at = finder(w, space)
        parts = [(at(p, p + size * count, w.fail), slice(n, n + 1)) for n, p in enumerate(places.tolist())]
    for region, part in parts:
        missing = None if unknown is None else unknown[part]
        if missing is not None and not region.scratch and missing.any():
            w.fail(f"a value that comes from what nothing has written is stored to {region.name}")
        if region.shadow is not None and lanes is not None:
            who = lanes[part] if isinstance(lanes, np.ndarray) else lanes
            words, who = touched(region, places[part], size * count, who)
            # To write what is there already is no race: groups of threads often all store one value.
            before, unknown_before = region.load(places[part], size, count)
            changed = before != values[part]
            if unknown_before is not None:
                changed |= unknown_before
            if missing is not None:
                changed |= missing
            if changed.any():
                changed = _by_words(changed, size)
                region.shadow.store(
                    w,
                    words.reshape(changed.shape)[changed],
                    np.broadcast_to(who, words.shape).reshape(changed.shape)[changed],
                )
        region.store(places[part], size, count, values[part], missing)
        w.machine.clock += 1
        region.stamp(places[part], w.machine.clock, w.cta.number)


def spread(values: Array, lanes: int) -> Array:
    """Values of the active lanes to 32 lanes."""
    if lanes == FULL:
        return values
    found = np.zeros(32, values.dtype)
    found[INDICES[lanes]] = values
    return found


def lanes_of(flags: Array | None, lanes: int) -> int:
    """The set of lanes that flags of the active lanes say."""
    if flags is None:
        return 0
    found = np.zeros(32, np.bool_)
    found[INDICES[lanes]] = flags
    return to_bits(found)


def _count(d: Decoder, i: Instruction) -> int:
    return 2 if "v2" in i.modifiers else 4 if "v4" in i.modifiers else 8 if "v8" in i.modifiers else 1


@handler("ld")
def _ld(d: Decoder, i: Instruction) -> Execute:
    space, kind, count = space_of(d, i), i.modifiers[-1], _count(d, i)
    order = next((m for m in i.modifiers if m in ("weak", "relaxed", "acquire", "volatile")), "weak")
    d.only(i.modifiers[:-1], *SPACES, *HINTS, "v2", "v4", "weak", "relaxed", "acquire", "volatile")
    strong = order != "weak"
    size = SIZES[kind]
    targets = d.destinations(i.operands[0], kind, wider=True)
    if len(targets) != count:
        d.refuse(f"expected {count} destinations")
    elements = i.operands[0].elements if isinstance(i.operands[0], Vector) else i.operands[:1]
    rooms = [SIZES[getattr(x, "type", kind)] for x in elements]
    base, offset = (d.parameter(i.operands[1]) if space == "param" else None) or d.address(
        i.operands[1], "b32"
    )
    dtype = DTYPES.get(kind, UNSIGNED[size])
    wide = [
        None if room == size else (np.dtype(f"{np.dtype(dtype).kind}{room}"), UNSIGNED[room])
        for room in rooms
    ]

    def load(w: Warp, lanes: int) -> Any:
        places = addresses(w, base, offset, lanes)
        values, unknown = gather(w, space, places, size, count, None if strong else INDICES[lanes])
        if strong:
            for word in _words(w, space, places):
                w.clock.read(order, w.machine.releases.get(word))
        for n, target in enumerate(targets):
            value, extend = np.ascontiguousarray(values[:, n]), wide[n]
            if extend is not None:
                value = value.view(dtype).astype(extend[0]).view(extend[1])
            missing = 0 if unknown is None else lanes_of(unknown[:, n], lanes)
            w.put(target, spread(value, lanes), missing, lanes)
        return None

    if not strong:
        return load

    def poll(w: Warp, lanes: int) -> Any:
        load(w, lanes)
        return POLL

    return poll


@handler("st")
def _st(d: Decoder, i: Instruction) -> Execute:
    space, kind, count = space_of(d, i), i.modifiers[-1], _count(d, i)
    d.only(i.modifiers[:-1], *SPACES, *HINTS, "v2", "v4", "weak", "relaxed", "release", "volatile")
    if space == "param":
        d.refuse("parameters cannot be written")
    order = next((m for m in i.modifiers if m in ("relaxed", "release", "volatile")), "weak")
    size = SIZES[kind]
    base, offset = d.address(i.operands[0], "b32")
    sources = d.sources(i.operands[1], kind, wider=True)
    if len(sources) != count:
        d.refuse(f"expected {count} sources")
    narrow = UNSIGNED[size]

    def store(w: Warp, lanes: int) -> None:
        places = addresses(w, base, offset, lanes)
        columns = [w.regs[s].astype(narrow, copy=False) for s in sources]
        values = np.stack(columns, 1) if count > 1 else columns[0][:, None]
        if lanes != FULL:
            values = values[INDICES[lanes]]
        missing = None
        if any(w.unknown[s] & lanes for s in sources):
            missing = np.stack([_flags(w.unknown[s], lanes) for s in sources], 1)
        scatter(w, space, places, size, values, missing, INDICES[lanes] if order == "weak" else None)
        if order != "weak":
            w.machine.releases.update(dict.fromkeys(_words(w, space, places), w.clock.write(order)))

    return store


def _flags(bits: int, lanes: int) -> Array:
    """A set of lanes as bools of the active ones."""
    return BOOLS[bits & FULL][INDICES[lanes]]


def _words(w: Warp, space: str, places: Array) -> list[tuple[int, int]]:
    """Keys of `Machine.releases`."""
    if space == "global":
        return [(-1, place) for place in places.tolist()]
    return [(cta.number, local) for cta, local in (home(w, place) for place in places.tolist())]


def home(w: Warp, place: int) -> tuple[Cta, int]:
    """The CTA to whose shared memory an address leads, and the address there."""
    rank = place >> CTA_BITS
    return (w.cta.peer(rank - 1, w.fail) if rank else w.cta), place & (1 << CTA_BITS) - 1


_ATOMIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda old, b: old + b,
    "inc": lambda old, b: 0 if old >= b else old + 1,
    "dec": lambda old, b: b if old == 0 or old > b else old - 1,
    "min": min,
    "max": max,
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "exch": lambda old, b: b,
}


def _sum(kind: str, space: str) -> Callable[[int, int], int]:
    """What adds the bits of floats. fp32 in global memory is flushed, as PTX says."""
    size = SIZES[kind]
    flushed = kind == "f32" and space == "global"

    def values(bits: int) -> Array:
        raw = np.array([bits], UNSIGNED[size])
        if kind == "bf16x2":
            return floats.bf16_values(raw.view(np.uint16))
        return raw.view(np.float16 if kind == "f16x2" else DTYPES[kind])

    def add(old: int, b: int) -> int:
        x, y = values(old), values(b)
        if flushed:
            total = floats.flush(floats.flush(x) + floats.flush(y))
        else:
            total = x + y  # of two bf16 in fp32: where that is not exact, the smaller one counts for nothing
        if kind == "f32":
            total = floats.canonical(total)
        elif kind != "f64":
            bits = floats.bf16_bits(total) if kind == "bf16x2" else floats.f16_bits(total.astype(np.float32))
            total = bits.astype(np.uint16)
        return int(total.view(UNSIGNED[size])[0])

    return add


@handler("atom", "red")
def _atom(d: Decoder, i: Instruction) -> Execute:
    """Lane by lane in their order; of floats sums alone."""
    space, kind = space_of(d, i), i.modifiers[-1]
    operation = next((m for m in i.modifiers if m in _ATOMIC or m == "cas"), None)
    real = kind in ("f32", "f64", "f16x2", "bf16x2")
    if (
        operation is None
        or (operation != "add" if real else kind[0] not in "bus")
        or SIZES.get(kind) not in (4, 8)
    ):
        d.refuse("this atomic is not modelled")
    halves = ("noftz",) if kind in ("f16x2", "bf16x2") else ()
    d.only(i.modifiers[:-1], *SPACES, *HINTS, operation, "relaxed", "acquire", "release", "acq_rel", *halves)
    apply = _sum(kind, space) if real else _ATOMIC.get(operation)
    if real:  # their bits
        kind = f"b{8 * SIZES[kind]}"
    order = next((m for m in i.modifiers if m in ("acquire", "release", "acq_rel")), "relaxed")
    size, bits = SIZES[kind], 8 * SIZES[kind]
    operands = list(i.operands)
    to = d.destination(operands.pop(0), kind) if i.opcode == "atom" else None
    base, offset = d.address(operands[0], "b32")
    sources = [d.source(x, kind) for x in operands[1 : 3 if operation == "cas" else 2]]
    dtype = DTYPES[kind]

    def atomic(w: Warp, lanes: int) -> None:
        places = addresses(w, base, offset, lanes)
        if any(w.unknown[s] & lanes for s in sources):
            w.fail("an operand of an atomic operation comes from what nothing has written")
        given = [w.regs[s].view(dtype)[INDICES[lanes]].tolist() for s in sources]
        old = np.zeros(len(places), UNSIGNED[size])
        for n in range(len(places)):
            values, unknown = gather(w, space, places[n : n + 1], size, 1, None)
            if unknown is not None:
                w.fail("an atomic operation on what nothing has written")
            old[n] = values[0, 0]
            before = int(values.view(dtype)[0, 0])
            if operation == "cas":
                after = given[1][n] if before == given[0][n] else before
            else:
                assert apply is not None
                after = apply(before, given[0][n])
            new = np.array([[after & (1 << bits) - 1]], UNSIGNED[size])
            scatter(w, space, places[n : n + 1], size, new, None, None)
        releases = w.machine.releases
        for word in _words(w, space, places):
            before_it = releases.get(word)
            w.clock.read(order, before_it)
            mine = w.clock.write(order)
            # What was released before stays so: an atomic operation goes on with it.
            releases[word] = (
                before_it if mine is None else mine if before_it is None else np.maximum(mine, before_it)
            )
        if to is not None:
            w.put(to, spread(old, lanes), 0, lanes)

    return atomic
