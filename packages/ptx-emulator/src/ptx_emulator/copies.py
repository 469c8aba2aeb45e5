"""Asynchronous copies: `cp.async`, `cp.async.bulk`, `cp.reduce.async.bulk`.

Their bytes arrive as late as possible (`cp.async`), or at a time that the seed decides (bulk copies). The destination is
undefined from the issue to the arrival, so a read without a wait is noticed. Copies of `tensors` are dispatched from here.

Source: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_emulator import tensors
from ptx_emulator.access import addresses, cta_at, mbarrier_at, region_of, touched
from ptx_emulator.decode import Decoder, Execute, handler
from ptx_emulator.lanes import BOOLS, INDICES, Array, to_bits
from ptx_emulator.machine import Warp
from ptx_emulator.memory import Region, copy
from ptx_emulator.parser import Instruction
from ptx_emulator.races import issue_snapshot
from ptx_emulator.synchronize import check_proxy

REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


@dataclass
class Copy:
    """One `cp.async` of a warp. Arrays have an entry for each of the 32 lanes.

    Attributes:
        size: bytes that are written in shared memory.
        left: bool, the lanes whose bytes have not arrived.
        groups: the cp.async group of each lane.
        targets: addresses in shared memory.
        sources: addresses in global memory.
        bytes: bytes that are read; the rest of ``size`` is filled with zeros.
        clock: the warp's `Clock.now` at the issue.
        region: that of all sources, if every lane reads ``size`` bytes or none; None otherwise, or if no lane reads.
        whole: whether every lane reads ``size`` bytes of ``region``, or none.
    """

    size: int
    left: Array
    groups: Array
    targets: Array
    sources: Array
    bytes: Array
    clock: int
    region: Region | None
    whole: bool

    def complete(self, w: Warp, lanes: Array) -> None:
        """Let the bytes of ``lanes`` (indices) arrive, one lane after the other."""
        for lane in lanes.tolist():
            place, count = int(self.targets[lane]), int(self.bytes[lane])
            shared = w.cta.shared
            if count:
                source = int(self.sources[lane])
                copy(w.machine.memory.at(source, source + count, w.fail), source, shared, place, count)
            start = place - shared.base
            shared.data[start + count : start + self.size] = 0
            shared.track()[start + count : start + self.size] = 255
            w.machine.clock += 1
            shared.stamp(self.targets[lane : lane + 1], w.machine.clock, w.cta.number)


def arrive(w: Warp, copies: list[Copy], flags: list[Array]) -> None:
    """Let the bytes of the lanes in ``flags`` (bool[32] for each copy) arrive."""
    together: dict[tuple[int, int], tuple[Region | None, list[tuple[Array, Array]]]] = {}
    for one, flag in zip(copies, flags, strict=True):
        arriving = np.flatnonzero(one.left & flag)
        if len(arriving) == 0:
            continue
        one.left = one.left & ~flag
        if not one.whole:
            one.complete(w, arriving)
            continue
        reads = one.bytes[arriving] > 0
        for region, lanes in ((one.region, arriving[reads]), (None, arriving[~reads])):
            if len(lanes):
                _, places = together.setdefault((id(region), one.size), (region, []))
                places.append((one.sources[lanes], one.targets[lanes]))
    for (_, size), (region, places) in together.items():
        _arrive_whole(w, size, region, *map(np.concatenate, zip(*places)))
    w.copies = [one for one in w.copies if one.left.any()]


def _arrive_whole(w: Warp, size: int, region: Region | None, sources: Array, targets: Array) -> None:
    """Let ``size`` bytes of each source, all of them in ``region``, arrive. None: zeros."""
    shared, form = w.cta.shared, (4, size // 4)
    words: Any = 0
    known: Any = 0xFFFFFFFF
    if region is not None:
        here = (sources - region.base) // size
        words = region.view(*form)[here]
        known = known if region.known is None else region.known_view(*form)[here]
    there = (targets - shared.base) // size
    shared.view(*form)[there] = words
    shared.track()
    shared.known_view(*form)[there] = known
    clock, units = w.machine.clock, (targets - shared.base) >> 4
    shared.written[units] = clock + 1 + np.arange(len(targets))
    shared.writer[units] = w.cta.number
    w.machine.clock = clock + len(targets)


_NOWHERE = np.zeros(32, np.int64)


def _spread(places: Array, lanes: Array) -> Array:
    """Return the addresses of some lanes as int64[32]."""
    if len(lanes) == 32:
        return places
    found = _NOWHERE.copy()
    found[lanes] = places
    return found


@handler("cp")
def _cp(d: Decoder, i: Instruction) -> Execute:
    if i.modifiers[:2] == ("async", "commit_group"):
        return _commit

    if i.modifiers[:2] in (("async", "wait_group"), ("async", "wait_all")):
        left = d.immediate(i.operands[0]) if i.modifiers[1] == "wait_group" else None
        return lambda w, lanes: _wait(w, BOOLS[lanes], left)
    if i.modifiers[:1] == ("reduce",):
        return _reduce(d, i)
    if i.modifiers[:1] != ("async",):
        d.refuse("this copy is not modelled")
    if i.modifiers[1] == "mbarrier":
        return _arrive(d, i)
    if i.modifiers[1] == "bulk":
        return _bulk(d, i)
    return _cp_async(d, i)


def _commit(w: Warp, lanes: int) -> None:
    w.group = w.group + BOOLS[lanes]


def _wait(w: Warp, flags: Array, left: int | None) -> None:
    """Let all but the last ``left`` groups of the lanes in ``flags`` arrive. None: all copies of these lanes."""
    if w.copies:
        done = None if left is None else w.group - left
        arrive(w, w.copies, [flags if done is None else flags & (one.groups < done) for one in w.copies])


def _cp_async(d: Decoder, i: Instruction) -> Execute:
    d.only(
        i.modifiers,
        "async",
        "ca",
        "cg",
        "shared",
        "shared::cta",
        "global",
        "L2::cache_hint",
        "L2::64B",
        "L2::128B",
        "L2::256B",
    )
    to, to_offset = d.address(i.operands[0], "b32")
    source, source_offset = d.address(i.operands[1], "b64")
    size = d.immediate(i.operands[2])
    if size not in (4, 8, 16) or ("cg" in i.modifiers and size != 16):
        d.refuse(f"expected a size of 4, 8 or 16 bytes (.cg: 16), got {size}")
    rest = list(i.operands[3:])
    if "L2::cache_hint" in i.modifiers:
        d.source(rest.pop(), "b64")
    given = d.source(rest[0], "u32") if rest else None
    all_bytes = np.full(32, size, np.int64)

    def start(w: Warp, lanes: int) -> None:
        index = INDICES[lanes]
        places = addresses(w, to, to_offset, lanes)
        shared = region_of(w, "shared", places, size)
        assert shared is not None
        counts = all_bytes
        if given is not None:
            if w.unknown[given] & lanes:
                w.fail(
                    f"the source size is undefined: it depends on a value that nothing has written yet "
                    f"(lanes {w.unknown[given] & lanes:08x})"
                )
            counts = w.regs[given].astype(np.int64)
            if (counts[index] > size).any():
                w.fail(f"cp.async: expected a source size of at most {size} bytes, got {counts[index].max()}")
        # A lane that reads 0 bytes may have any address.
        reading = index if given is None else index[counts[index] > 0]
        sources, region, whole = _NOWHERE, None, True
        if len(reading):
            bits = lanes if len(reading) == len(index) else to_bits(counts * BOOLS[lanes] > 0)
            read = addresses(w, source, source_offset, bits)
            region = region_of(w, "global", read, size)
            whole = region is not None and (given is None or bool((counts[reading] == size).all()))
            sources = _spread(read, reading)
        targets = _spread(places, index)
        shared.track()
        shared.known_view(4, size // 4)[(places - shared.base) // size] = 0
        if shared.shadow is not None:
            shared.shadow.store(w, *touched(shared, places, size, index))
        w.copies.append(
            Copy(size, BOOLS[lanes].copy(), w.group, targets, sources, counts, w.clock.now, region, whole)
        )

    return start


def _arrive(d: Decoder, i: Instruction) -> Execute:
    """`cp.async.mbarrier.arrive`: an arrival that is triggered when the earlier copies of these lanes have arrived."""
    d.only(i.modifiers, "async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64")
    if "noinc" not in i.modifiers:
        d.refuse("only cp.async.mbarrier.arrive.noinc is modelled")
    base, offset = d.address(i.operands[0], "b32")

    def start(w: Warp, lanes: int) -> None:
        barriers = [mbarrier_at(w, place) for place in addresses(w, base, offset, lanes).tolist()]
        copies, flags, pc = list(w.copies), BOOLS[lanes], w.pc

        def complete() -> None:
            w.pc = pc
            arrive(w, copies, [flags] * len(copies))
            for barrier in barriers:
                barrier.asynchronous = True
                for one in copies:
                    barrier.release(issue_snapshot(w, one.clock))
                barrier.arrive(1, w.fail)

        w.machine.pending.append(complete)

    return start


#: Destination, source and completion mechanism of the bulk copies whose bytes an mbarrier counts.
_COUNTED = [
    (*ends, "mbarrier::complete_tx::bytes")
    for ends in (("shared::cluster", "global"), ("shared::cta", "global"), ("shared::cluster", "shared::cta"))
]


def _bulk(d: Decoder, i: Instruction) -> Execute:
    """`cp.async.bulk`: copies to shared memory, from global memory or this CTA's shared memory. An mbarrier counts the bytes.

    The other forms are in `tensors`.
    """
    if i.modifiers[2] == "commit_group":
        return tensors.commit
    if i.modifiers[2] == "wait_group":
        return tensors.wait(d, i)
    if i.modifiers[2:] == ("prefetch", "L2", "global"):
        return _prefetch(d, i)
    if i.modifiers[2:4] == ("prefetch", "tensor"):
        return tensors.tensor_prefetch(d, i)
    if i.modifiers[2] == "tensor":
        return tensors.tensor_copy(d, i)
    multicast = "multicast::cluster" in i.modifiers
    shape = tuple(m for m in i.modifiers[2:] if m not in ("L2::cache_hint", "multicast::cluster"))
    if shape == ("global", "shared::cta", "bulk_group") and not multicast:
        return tensors.bulk_store(d, i)
    if shape not in _COUNTED or (multicast and shape[:2] != ("shared::cluster", "global")):
        d.refuse("this bulk copy is not modelled")
    from_shared = shape[1] == "shared::cta"
    to, to_offset = d.address(i.operands[0], "b32")
    source, source_offset = d.address(i.operands[1], "b32" if from_shared else "b64")
    size = d.source(i.operands[2], "u32")
    base, offset = d.address(i.operands[3], "b32")
    rest = list(i.operands[4:])
    if "L2::cache_hint" in i.modifiers:
        d.source(rest.pop(), "b64")
    mask = d.source(rest.pop(), "b16") if multicast else None

    def start(w: Warp, lanes: int) -> None:
        if w.unknown[size] & lanes:
            w.fail(
                f"the size is undefined: it depends on a value that nothing has written yet "
                f"(lanes {w.unknown[size] & lanes:08x})"
            )
        columns: list[Any] = [
            addresses(w, to, to_offset, lanes), addresses(w, source, source_offset, lanes),
            w.regs[size][INDICES[lanes]], addresses(w, base, offset, lanes),
        ]  # fmt: skip
        for lane, place, origin, count, barrier in zip(
            INDICES[lanes].tolist(), *(c.tolist() for c in columns)
        ):
            for target, mbarrier in (
                [(place, barrier)]
                if mask is None
                else tensors.multicast_places(w, mask, lane, place, barrier)
            ):
                _start_bulk(w, target, origin, count, mbarrier, from_shared, lane)

    return start


def _prefetch(d: Decoder, i: Instruction) -> Execute:
    """`cp.async.bulk.prefetch.L2`: checks that memory is there, and that its address and size are multiples of 16."""
    base, offset = d.address(i.operands[0], "b64")
    size = d.source(i.operands[1], "u32")

    def prefetch(w: Warp, lanes: int) -> None:
        places = addresses(w, base, offset, lanes)
        for place, count in zip(places.tolist(), w.regs[size][INDICES[lanes]].tolist(), strict=True):
            if (place | count) % 16:
                w.fail(f"prefetch of {count} bytes at {place:#x}: size and address must be multiples of 16")
            w.machine.memory.at(place, place + count, w.fail)

    return prefetch


def _start_bulk(
    w: Warp, place: int, origin: int, count: int, barrier_place: int, from_shared: bool, lane: int
) -> None:
    """Start one bulk copy to shared memory.

    Args:
        place, barrier_place: addresses of the destination and of the mbarrier in shared memory of the cluster.
        origin: address of the source.
        count: bytes.
        lane: the lane that issues it.
        from_shared: the source is this CTA's shared memory; otherwise global memory.
    """
    if count % 16 or place % 16 or origin % 16:
        w.fail(
            f"bulk copy of {count} bytes from {origin:#x} to {place:#x}: size and addresses must be multiples of 16"
        )
    (cta, place), pc, clock = cta_at(w, place), w.pc, w.clock.now
    barrier, shared = mbarrier_at(w, barrier_place, proxy=True), cta.shared
    if cta_at(w, barrier_place)[0] is not cta:
        w.fail("bulk copy: the mbarrier is not in the CTA whose shared memory is written")
    if count:
        region = w.cta.shared if from_shared else w.machine.memory.at(origin, origin + count, w.fail)
        for what, start in [(shared, place)] + [(region, origin)] * from_shared:
            if start < what.low or start + count > what.high:
                w.fail(
                    f"bulk copy: shared memory out of bounds: {count} bytes at {start:#x}, {what.low:#x} to {what.high:#x} exists"
                )
        words = np.arange(0, count, 4)
        here = (origin - region.base + words) >> 2
        if from_shared:
            check_proxy(w, "shared", region, here >> 2)
        if region.shadow is not None:
            region.shadow.observe(w, here)
        sent = region.load(origin + words, 4, 1)[0] if from_shared else None
        shared.track()[place - shared.base : place - shared.base + count] = 0
        if shared.shadow is not None:
            shared.shadow.store(w, (place - shared.base + words) >> 2, lane)

    def complete() -> None:
        w.pc = pc
        if count:
            if not from_shared:
                check_proxy(
                    w,
                    "global",
                    region,
                    slice((origin - region.base) >> 4, (origin - region.base + count) >> 4),
                )
            elif (region.load(origin + words, 4, 1)[0] != sent).any():
                w.fail("shared memory was overwritten before a bulk copy had read it")
            copy(region, origin, shared, place, count)
        cta.incoming -= 1
        barrier.release(issue_snapshot(w, clock))
        barrier.count_bytes(count, w.fail)

    cta.incoming += 1
    w.machine.pending.append(complete)


def _reduce(d: Decoder, i: Instruction) -> Execute:
    """`cp.reduce.async.bulk` and `cp.reduce.async.bulk.tensor`, from shared to global memory."""
    rest = [m for m in i.modifiers if m not in ("L2::cache_hint", "noftz", "tile")]
    if rest[:3] != ["reduce", "async", "bulk"]:
        d.refuse("this bulk reduction is not modelled")
    if rest[3] == "tensor":
        operation = next((m for m in rest if m in REDUCTIONS), None)
        if operation is None:
            d.refuse("this bulk reduction is not modelled")
        return tensors.tensor_copy(d, i, operation)
    if rest[3:6] != ["global", "shared::cta", "bulk_group"] or len(rest) != 8 or rest[6] not in REDUCTIONS:
        d.refuse("this bulk reduction is not modelled")
    if (rest[7] in ("f16", "bf16") and rest[6] == "add") != ("noftz" in i.modifiers):
        d.refuse(".noftz is required for .add of .f16 and .bf16, and not allowed otherwise")
    return tensors.bulk_store(d, i, rest[6], rest[7])
