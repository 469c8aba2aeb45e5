"""Loads, stores and atomics: checked gathers and scatters over the active lanes.

Sources: PTX ISA, "State Spaces", "Generic Addressing", and the instructions `ld`, `st`, `atom`, `red`, `st.async`, `red.async`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator import floats
from ptx_emulator.decode import DTYPES, PARAMETERS, Decoder, Execute, handler
from ptx_emulator.lanes import BOOLS, FULL, INDICES, Array, to_bits
from ptx_emulator.machine import POLL, Cta, Mbarrier, Warp
from ptx_emulator.memory import CTA_BITS, LOCAL_WINDOW, SHARED_WINDOW, UNSIGNED, WINDOW_BITS, Fail, Region
from ptx_emulator.parser import SIZES, Instruction, Vector
from ptx_emulator.races import SEVERAL, issue_snapshot

SPACES = ("global", "shared", "shared::cta", "param", "local", "const", "shared::cluster")
#: Cache hints and scopes. They change no result: scopes are taken as wide enough.
HINTS = (
    "nc", "L1::no_allocate", "L1::evict_first", "L1::evict_last", "L1::evict_normal", "L1::evict_unchanged",
    "L2::cache_hint", "L2::evict_first", "L2::evict_last", "L2::evict_normal",
    "L2::64B", "L2::128B", "L2::256B",
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "gpu", "cta", "sys", "cluster",
)  # fmt: skip


def space_of(d: Decoder, i: Instruction) -> str:
    """Return the state space of an access; "generic" if none is named."""
    found = [m for m in i.modifiers if m in SPACES]
    if len(found) > 1 or found == ["const"]:
        d.refuse("constant memory, or more than one state space, is not modelled")
    if not found:
        return "generic"
    return found[0] if found[0] == "shared::cluster" else found[0].partition("::")[0]


#: State space of each window of generic addresses. The bits below the window number are the address in that space.
WINDOWS = {
    0: "global",
    LOCAL_WINDOW: "local",
    SHARED_WINDOW: "shared::cluster",
    PARAMETERS >> WINDOW_BITS: "param",
}


def located(w: Warp, space: str, places: Array, size: int, lanes: int) -> list[tuple[str, Array, Any]]:
    """Group the accesses of the active lanes by state space.

    Args:
        space: of the instruction, or "generic".
        places: addresses of the active lanes.
        size: bytes of each access.
        lanes: the active lanes.

    Returns:
        (state space, addresses in it, index of these accesses among ``places``) for each group. An address of local memory
        becomes an offset in the local memory of the warp, where each thread has its part.
    """
    if space == "local":
        if places.min() < 0 or int(places.max()) + size > w.program.local_bytes:
            w.fail(
                f"local memory out of bounds: there are {w.program.local_bytes} bytes, "
                f"got {size} bytes at {int(places.min()):#x} to {int(places.max()):#x}"
            )
        return [(space, places + INDICES[lanes] * w.program.local_bytes, slice(None))]
    if space != "generic":
        return [(space, places, slice(None))]
    found: list[tuple[str, Array, Any]] = []
    windows = places >> WINDOW_BITS
    for window in np.unique(windows).tolist():
        chosen = windows == window
        if window not in WINDOWS:
            w.fail(f"generic address {int(places[chosen][0]):#x} leads to no memory")
        inner = places[chosen] - (window << WINDOW_BITS)
        who = sum(1 << int(lane) for lane in INDICES[lanes][chosen])
        found += [
            (name, x, np.flatnonzero(chosen)) for name, x, _ in located(w, WINDOWS[window], inner, size, who)
        ]
    return found


def gather_from(
    w: Warp, space: str, places: Array, size: int, count: int, lanes: int, strong: bool
) -> tuple[Array, Array | None]:
    """`gather` from any state space, generic included. ``strong``: not checked for races."""
    if space not in ("generic", "local"):
        return gather(w, space, places, size, count, None if strong else INDICES[lanes])
    values = np.empty((len(places), count), UNSIGNED[size])
    unknown = np.zeros((len(places), count), np.bool_)
    for name, inner, chosen in located(w, space, places, size * count, lanes):
        who = None if strong else INDICES[lanes][chosen]
        values[chosen], missing = gather(w, name, inner, size, count, who)
        if missing is not None:
            unknown[chosen] = missing
    return values, unknown if unknown.any() else None


def scatter_to(
    w: Warp, space: str, places: Array, size: int, values: Array, unknown: Array | None, lanes: int, strong: bool
) -> None:  # fmt: skip
    """`scatter` to any state space, generic included. ``strong``: not checked for races."""
    for name, inner, chosen in located(w, space, places, size * values.shape[1], lanes):
        missing, who = (
            None if unknown is None else unknown[chosen],
            None if strong else INDICES[lanes][chosen],
        )
        scatter(w, name, inner, size, values[chosen], missing, who)


def finder(w: Warp, space: str) -> Callable[[int, int, Fail], Region]:
    """Return a function of (place, end, fail): the region that holds ``[place, end)`` of global or cluster memory."""
    if space != "shared::cluster":
        return w.machine.memory.at

    def at(place: int, end: int, fail: Fail) -> Region:
        region = w.cta.window(place >> CTA_BITS, fail)
        if place < region.low or end > region.high:
            fail(
                f"{space} memory out of bounds: {place:#x} to {end:#x} is accessed, {region.low:#x} to {region.high:#x} exists"
            )
        return region

    return at


def addresses(w: Warp, slot: int, offset: int, lanes: int, what: str = "an address") -> Array:
    """Return register + ``offset`` of the active lanes as int64 [lanes].

    ``what`` names the operand in the error that is raised if a lane's value is undefined.
    """
    if w.unknown[slot] & lanes:
        w.fail(
            f"{what} is undefined: it depends on a value that nothing has written yet (lanes {w.unknown[slot] & lanes:08x})"
        )
    found = w.regs[slot].astype(np.int64)
    if lanes != FULL:
        found = found[INDICES[lanes]]
    return found + offset if offset else found


def region_of(w: Warp, space: str, places: Array, size: int) -> Region | None:
    """Check alignment and bounds of accesses of ``size`` bytes, and return the region that holds all of them.

    None: the accesses lie in several regions, each access within one.
    """
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
        region = w.cta.shared if space == "shared" else w.local if space == "local" else w.machine.parameters
    if low < region.low or high > region.high:
        w.fail(
            f"{space} memory out of bounds: {low:#x} to {high:#x} is accessed, {region.low:#x} to {region.high:#x} exists"
        )
    return region


def gather(
    w: Warp, space: str, places: Array, size: int, count: int, lanes: Any = SEVERAL
) -> tuple[Array, Array | None]:
    """Read ``count`` words of ``size`` bytes at each of n addresses.

    Args:
        lanes: int[n], the lane of each access, or `SEVERAL`, for the race check; None: do not check.

    Returns:
        The words [n, count], and bool[n, count] of the undefined ones (None: all are defined).
    """
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


def touched(region: Region, places: Array, size: int, lanes: Any) -> tuple[Array, Any, Array | None]:
    """Return for `races.Shadow` the word indices of accesses of ``size`` bytes, the lane of each, and the halves."""
    offsets = places - region.base
    words = offsets >> 2
    if size <= 4:
        return words, lanes, offsets >> 1 & 1 if size <= 2 else None
    words = words[:, None] + np.arange(size // 4)
    return words, lanes if isinstance(lanes, int) else lanes[:, None], None


def _by_words(flags: Array, size: int) -> Array:
    """Convert flags [n, count] of elements of ``size`` bytes to flags [n, words] of words of 4 bytes."""
    if size >= 4:
        return np.repeat(flags, size // 4, axis=1)
    return np.any(flags.reshape(len(flags), -1, min(4 // size, flags.shape[1])), axis=2)


def scatter(
    w: Warp, space: str, places: Array, size: int, values: Array, unknown: Array | None, lanes: Any = SEVERAL
) -> None:
    """Write ``values`` [n, count], words of ``size`` bytes, at n addresses.

    Args:
        unknown: bool[n, count] of the undefined values; None: all are defined. Only scratch memory accepts them.
        lanes: as for `gather`.
    """
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
            w.fail(
                f"an undefined value is stored to {region.name}: it depends on a value that nothing has written yet "
                f"({np.count_nonzero(missing.any(1))} of the warp's {len(missing)} accesses here)"
            )
        if region.shadow is not None and lanes is not None:
            who = lanes[part] if isinstance(lanes, np.ndarray) else lanes
            words, who, halves = touched(region, places[part], size * count, who)
            # Writing the value that is already there is not a race: groups of threads often store the same value.
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
                    None if halves is None else halves.reshape(changed.shape)[changed],
                    generic=True,
                )
        region.store(places[part], size, count, values[part], missing)
        w.machine.clock += 1
        region.stamp(places[part], w.machine.clock, w.cta.number, size * count)


def spread(values: Array, lanes: int) -> Array:
    """Expand values of the active lanes to 32 lanes; the other lanes get 0."""
    if lanes == FULL:
        return values
    found = np.zeros(32, values.dtype)
    found[INDICES[lanes]] = values
    return found


def lanes_of(flags: Array | None, lanes: int) -> int:
    """Convert bool[active lanes] to a set of lanes. None: the empty set."""
    if flags is None:
        return 0
    found = np.zeros(32, np.bool_)
    found[INDICES[lanes]] = flags
    return to_bits(found)


def _count(d: Decoder, i: Instruction) -> int:
    if (
        "v8" in i.modifiers or ("v4" in i.modifiers and SIZES[i.modifiers[-1]] == 8)
    ) and "global" not in i.modifiers:
        d.refuse("vectors of 32 bytes are only in global memory")
    return 2 if "v2" in i.modifiers else 4 if "v4" in i.modifiers else 8 if "v8" in i.modifiers else 1


@handler("ld")
def _ld(d: Decoder, i: Instruction) -> Execute:
    if i.modifiers[-1] == "b128":
        return _ld_128(d, i)
    space, kind, count = space_of(d, i), i.modifiers[-1], _count(d, i)
    order = next((m for m in i.modifiers if m in ("weak", "relaxed", "acquire", "volatile")), "weak")
    d.only(i.modifiers[:-1], *SPACES, *HINTS, "v2", "v4", "v8", "weak", "relaxed", "acquire", "volatile")
    strong, constant = order != "weak", "nc" in i.modifiers and space == "global"
    size = SIZES[kind]
    targets = d.destinations(i.operands[0], kind, wider=True)
    if len(targets) != count:
        d.refuse(f"expected {count} destinations, got {len(targets)}")
    elements = i.operands[0].elements if isinstance(i.operands[0], Vector) else i.operands[:1]
    widths = [SIZES[getattr(x, "type", kind)] for x in elements]
    base, offset = (d.parameter(i.operands[1]) if space == "param" else None) or d.address(
        i.operands[1], "b32"
    )
    dtype = DTYPES.get(kind, UNSIGNED[size])
    wide = [
        None if width == size else (np.dtype(f"{np.dtype(dtype).kind}{width}"), UNSIGNED[width])
        for width in widths
    ]

    def load(w: Warp, lanes: int) -> Any:
        places = addresses(w, base, offset, lanes)
        values, unknown = gather_from(w, space, places, size, count, lanes, strong)
        if constant:
            region = region_of(w, "global", places, size * count)
            parts = (
                [(region, places)]
                if region
                else [
                    (w.machine.memory.at(x, x + 1, w.fail), places[n : n + 1])
                    for n, x in enumerate(places.tolist())
                ]
            )
            for one, where in parts:
                if one.shadow is not None:
                    words, _, halves = touched(one, where, size * count, SEVERAL)
                    one.shadow.load_constant(w, words.reshape(-1), halves)
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


def _ld_128(d: Decoder, i: Instruction) -> Execute:
    """`ld` of a register of 16 bytes, from global or shared memory."""
    space = space_of(d, i)
    d.only(i.modifiers[:-1], *HINTS, "weak", "global", "shared", "shared::cta")
    to = d.destination(i.operands[0], "b128")
    base, offset = d.address(i.operands[1], "b32")

    def load(w: Warp, lanes: int) -> None:
        values, unknown = gather_from(w, space, addresses(w, base, offset, lanes), 8, 2, lanes, False)
        whole = np.zeros((32, 2), np.uint64)
        whole[INDICES[lanes]] = values
        missing = 0 if unknown is None else lanes_of(np.any(unknown, axis=1), lanes)
        w.put(to, whole.view(np.dtype("V16"))[:, 0], missing, lanes)

    return load


@handler("st")
def _st(d: Decoder, i: Instruction) -> Execute:
    if i.modifiers[0] == "async":
        return _st_async(d, i)
    space, kind, count = space_of(d, i), i.modifiers[-1], _count(d, i)
    d.only(i.modifiers[:-1], *SPACES, *HINTS, "v2", "v4", "v8", "weak", "relaxed", "release", "volatile")
    if space == "param":
        d.refuse("parameters are read-only")
    order = next((m for m in i.modifiers if m in ("relaxed", "release", "volatile")), "weak")
    size = SIZES[kind]
    base, offset = d.address(i.operands[0], "b32")
    sources = d.sources(i.operands[1], kind, wider=True)
    if len(sources) != count:
        d.refuse(f"expected {count} sources, got {len(sources)}")
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
        scatter_to(w, space, places, size, values, missing, lanes, order != "weak")
        if order != "weak":
            w.machine.releases.update(dict.fromkeys(_words(w, space, places), w.clock.write(order)))

    return store


def _flags(bits: int, lanes: int) -> Array:
    """Convert a set of lanes to bool[active lanes]."""
    return BOOLS[bits & FULL][INDICES[lanes]]


def _words(w: Warp, space: str, places: Array) -> list[tuple[int, int]]:
    """Return the keys of `Machine.releases` for these addresses."""
    found = []
    for place in places.tolist():
        window = place >> WINDOW_BITS if space == "generic" else 0
        if space == "global" or (space == "generic" and window == 0):
            found.append((-1, place))
        elif space.startswith("shared") or window == SHARED_WINDOW:
            cta, local = cta_at(w, place)
            found.append((cta.number, local))
    return found


def cta_at(w: Warp, place: int) -> tuple[Cta, int]:
    """Return the CTA whose shared memory an address (generic or not) points to, and the address in shared memory."""
    place &= (1 << WINDOW_BITS) - 1
    rank = place >> CTA_BITS
    return w.cta if rank == w.cta.rank else w.cta.peer(rank, w.fail), place


def mbarrier_at(w: Warp, place: int, proxy: bool = False) -> Mbarrier:
    """Return the mbarrier at an address of shared memory, of this CTA or another one of the cluster.

    ``proxy``: the async proxy counts the bytes of a copy there.
    """
    cta, place = cta_at(w, place)
    found = cta.mbarriers.get(place)
    if found is None:
        w.fail(
            f"no mbarrier at {place:#x} of the shared memory of CTA {cta.number}: it was not initialised, or invalidated"
        )
    if not found.visible and (proxy or cta is not w.cta):
        w.fail(
            f"the mbarrier at {place:#x} of CTA {cta.number} is used by {'the async proxy' if proxy else 'another CTA'}, but the "
            "warp that initialised it has executed no fence.mbarrier_init (or fence.proxy.async) since"
        )
    return found


Combine = Callable[[Array, Array], Array]

_BITS: dict[str, Combine] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, b: b,
}
_INTEGERS: dict[str, Combine] = {"add": np.add, "min": np.minimum, "max": np.maximum}
_COUNTERS: dict[str, Combine] = {
    "inc": lambda old, b: np.where(old >= b, np.uint32(0), old + np.uint32(1)),
    "dec": lambda old, b: np.where((old == 0) | (old > b), b, old - np.uint32(1)),
}


def combiner(operation: str, kind: str, flushed: bool = False) -> Combine | None:
    """Return the function of an atomic operation or a reduction; None: PTX has no such operation, or it is not modelled.

    The function takes the bits in memory and the bits of the operand, and returns the new bits of memory. ``flushed``:
    subnormal fp32 numbers count as zero.
    """
    if operation in _BITS:
        return _BITS[operation] if kind[0] == "b" and kind[1] != "f" or kind[0] in "us" else None
    if kind == "u32" and operation in _COUNTERS:
        return _COUNTERS[operation]
    if kind[0] in "us" and operation in _INTEGERS:
        function, dtype, unsigned = _INTEGERS[operation], DTYPES[kind], UNSIGNED[SIZES[kind]]
        return lambda old, b: function(old.view(dtype), b.view(dtype)).view(unsigned)
    if kind in ("f32", "f64"):
        return _sum(kind, flushed) if operation == "add" else None
    halves = kind.removesuffix("x2")
    if halves not in ("f16", "bf16") or operation not in ("add", "min", "max"):
        return None
    values = floats.bf16_values if halves == "bf16" else lambda bits: bits.view(np.float16).astype(np.float32)
    rounded = floats.bf16_bits if halves == "bf16" else floats.f16_bits
    # fp32 sums are exact enough: the second rounding gives the same result as a single one.
    chosen: Combine = {"add": np.add, "min": np.fmin, "max": np.fmax}[operation]

    def combine(old: Array, b: Array) -> Array:
        x, y = (values(v.view(np.uint16)) for v in (old, b))
        found = chosen(x, y)
        if operation != "add":  # -0 is below +0
            negative = np.signbit(x) | np.signbit(y) if operation == "min" else np.signbit(x) & np.signbit(y)
            found = np.where((x == 0) & (y == 0), np.where(negative, np.float32(-0.0), np.float32(0)), found)
        return rounded(found).astype(np.uint16).view(old.dtype)

    return combine


def _sum(kind: str, flushed: bool) -> Combine:
    dtype, unsigned = DTYPES[kind], UNSIGNED[SIZES[kind]]

    def add(old: Array, b: Array) -> Array:
        x, y = old.view(dtype), b.view(dtype)
        total = floats.flush(floats.flush(x) + floats.flush(y)) if flushed else x + y
        return (floats.canonical(total) if kind == "f32" else total).view(unsigned)

    return add


@handler("atom", "red")
def _atom(d: Decoder, i: Instruction) -> Execute:
    """Atomics run lane by lane, in ascending order. fp32 sums in global memory flush subnormals (PTX ISA, `atom`)."""
    if i.modifiers[0] == "async":
        return _red_async(d, i)
    space, kind = space_of(d, i), i.modifiers[-1]
    operation = next((m for m in i.modifiers if m in (*_BITS, *_INTEGERS, *_COUNTERS, "cas")), "")
    size = SIZES.get(kind, 0)
    apply = combiner(operation, kind, kind == "f32" and space == "global") if kind in SIZES else None
    halves = kind.removesuffix("x2") in ("f16", "bf16")
    exists = operation == "cas" and not halves if apply is None else not halves or operation == "add"
    if not exists or size not in ((2, 4, 8) if operation == "cas" or halves else (4, 8)):
        d.refuse("this atomic is not modelled")
    noftz = ("noftz",) if halves else ()
    d.only(i.modifiers[:-1], *SPACES, *HINTS, operation, "relaxed", "acquire", "release", "acq_rel", *noftz)
    order = next((m for m in i.modifiers if m in ("acquire", "release", "acq_rel")), "relaxed")
    operands = list(i.operands)
    bits = f"b{8 * size}"
    to = d.destination(operands.pop(0), bits) if i.opcode == "atom" else None
    base, offset = d.address(operands[0], "b32")
    number = bits if halves else kind
    sources = [d.source(x, number) for x in operands[1 : 3 if operation == "cas" else 2]]

    def atomic(w: Warp, lanes: int) -> None:
        places = addresses(w, base, offset, lanes)
        if any(w.unknown[s] & lanes for s in sources):
            w.fail("an operand of an atomic is undefined: it depends on a value that nothing has written yet")
        given = [w.regs[s][INDICES[lanes]] for s in sources]
        old = np.zeros(len(places), UNSIGNED[size])
        for n, lane in enumerate(INDICES[lanes].tolist()):
            one, here = slice(n, n + 1), 1 << lane
            values, unknown = gather_from(w, space, places[one], size, 1, here, strong=True)
            if unknown is not None:
                w.fail(
                    f"an atomic updates undefined memory at {int(places[n]):#x}: nothing has written it (lane {lane})"
                )
            old[n] = values[0, 0]
            if apply is None:
                after = given[1][one] if old[n] == given[0][n] else old[one]
            else:
                after = apply(old[one], given[0][one])
            scatter_to(w, space, places[one], size, after[:, None], None, here, strong=True)
        releases = w.machine.releases
        for word in _words(w, space, places):
            before_it = releases.get(word)
            w.clock.read(order, before_it)
            mine = w.clock.write(order)
            # A release sequence continues through an atomic: earlier releases stay visible.
            releases[word] = (
                before_it if mine is None else mine if before_it is None else np.maximum(mine, before_it)
            )
        if to is not None:
            w.put(to, spread(old, lanes), 0, lanes)

    return atomic


# ---- asynchronous stores to shared memory of the cluster


def _st_async(d: Decoder, i: Instruction) -> Execute:
    """`st.async`: the words arrive at some later time. An mbarrier of the destination CTA counts their bytes."""
    kind, count = i.modifiers[-1], _count(d, i)
    d.only(i.modifiers[1:-1], "weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4")
    if "shared::cluster" not in i.modifiers or "mbarrier::complete_tx::bytes" not in i.modifiers:
        d.refuse("this form of st.async is not modelled")
    if SIZES.get(kind) not in (4, 8) or (count == 4 and SIZES[kind] == 8):
        d.refuse(f".{kind} is not modelled")
    return _arriving(d, i, kind, count, None)


def _red_async(d: Decoder, i: Instruction) -> Execute:
    """`red.async`: as `st.async`, with an atomic operation."""
    kind, operation = i.modifiers[-1], i.modifiers[-2]
    d.only(i.modifiers[1:-2], "relaxed", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes")
    combine = combiner(operation, kind) if kind in ("u32", "s32", "b32", "u64") else None
    if "shared::cluster" not in i.modifiers or combine is None or operation == "exch":
        d.refuse("this form of red.async is not modelled")
    return _arriving(d, i, kind, 1, combine)


def _arriving(d: Decoder, i: Instruction, kind: str, count: int, combine: Combine | None) -> Execute:
    size = SIZES[kind]
    base, offset = d.address(i.operands[0], "b32")
    sources = d.sources(i.operands[1], kind)
    barrier_base, barrier_offset = d.address(i.operands[2], "b32")
    if len(sources) != count:
        d.refuse(f"expected {count} sources, got {len(sources)}")

    def start(w: Warp, lanes: int) -> None:
        places = addresses(w, base, offset, lanes)
        barriers = addresses(w, barrier_base, barrier_offset, lanes).tolist()
        values = np.stack([w.regs[s][INDICES[lanes]] for s in sources], 1)
        undefined = np.stack([_flags(w.unknown[s], lanes) for s in sources], 1)
        if combine is not None and undefined.any():
            w.fail("an operand of red.async is undefined: it depends on a value that nothing has written yet")
        mbarriers = [mbarrier_at(w, place) for place in barriers]
        pc, clock = w.pc, w.clock.now
        if any(cta_at(w, a)[0] is not cta_at(w, b)[0] for a, b in zip(places.tolist(), barriers)):
            w.fail(f"{i.opcode}.async: the mbarrier is not in the CTA whose shared memory is written")
        for place in places.tolist():  # the destination is undefined until the words arrive
            cta, local = cta_at(w, place)
            region = region_of(w, "shared::cluster", np.array([place]), size * count)
            assert region is not None
            if combine is None:
                cta.shared.track()[local - cta.shared.base : local - cta.shared.base + size * count] = 0
                if cta.shared.shadow is not None:
                    cta.shared.shadow.store(w, *touched(cta.shared, np.array([local]), size * count, SEVERAL))

        def complete() -> None:
            w.pc = pc
            for place, value, missing, barrier in zip(places.tolist(), values, undefined, mbarriers):
                cta, local = cta_at(w, place)
                at, bits = np.array([local]), value[None]
                if combine is not None:
                    before, unknown = cta.shared.load(at, size, count)
                    if unknown is not None:
                        w.fail(f"red.async updates undefined memory at {place:#x}: nothing has written it")
                    bits = combine(before, bits)
                cta.shared.store(at, size, count, bits, missing[None] if missing.any() else None)
                barrier.release(issue_snapshot(w, clock))
                barrier.count_bytes(size * count, w.fail)

        w.machine.pending.append(complete)

    return start
