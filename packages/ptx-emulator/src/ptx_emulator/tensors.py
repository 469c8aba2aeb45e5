"""Tensor maps, bulk tensor copies in both directions, and bulk async-groups.

The 128 bytes of a tensor map are undocumented. This module decodes the fields that the DSL's host code sets; they were
found by encoding varied maps with the driver. A map with any other bit set is refused.

Source of the rest: PTX ISA, "Tensors" (boxes, swizzling modes), `cp.async.bulk.tensor`, `cp.reduce.async.bulk.tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptx_emulator.access import addresses, combiner, cta_at, mbarrier_at
from ptx_emulator.decode import PARAMETERS, Decoder, Execute, handler
from ptx_emulator.errors import PtxError
from ptx_emulator.lanes import BOOLS, INDICES, Array
from ptx_emulator.machine import Warp
from ptx_emulator.memory import CTA_BITS, UNSIGNED, Region
from ptx_emulator.parser import SIZES, Coordinates, Instruction
from ptx_emulator.races import SEVERAL, issue_snapshot
from ptx_emulator.synchronize import check_proxy

MAP_BYTES = 128
#: Type and bytes of the elements, by their number in a map. Number 8 is fp32 that flushes subnormals; `TF32` makes fp32 tf32.
_ELEMENTS = {
    0: ("u8", 1), 1: ("u16", 2), 2: ("u32", 4), 3: ("s32", 4), 4: ("u64", 8), 5: ("s64", 8), 6: ("f16", 2), 7: ("f32", 4),
    8: ("f32", 4), 9: ("f64", 8), 10: ("bf16", 2),
}  # fmt: skip
FILL, TF32 = 1 << 15, 1 << 16
#: The flags that are decoded, and 1, 17, 18 and 21, which only change the use of L2.
_FLAGS = 0x27_E7F2
_NAN = 0x7FF7  # each 2 bytes outside of a tensor, if its map fills with NaN


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map. Dimensions are listed from the innermost one on.

    Attributes:
        address: of the tensor in global memory.
        kind: type of the elements; ``size``: their bytes.
        extents: of the tensor, in elements.
        strides: of the tensor, in bytes.
        box: extents of a box, in elements.
        swizzle: mask of the address bits 7 to 9 that are XORed into the bits 4 to 6: 0, 1, 3 or 7.
        pitch: bytes from row to row of a box in shared memory.
        fill: the bits of the elements outside of the tensor.
    """

    address: int
    kind: str
    size: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    pitch: int
    fill: int

    @property
    def bytes(self) -> int:
        """Bytes of a box that an mbarrier counts."""
        return int(np.prod(self.box)) * self.size

    @property
    def span(self) -> int:
        """Bytes of a box in shared memory, gaps between rows included."""
        return int(np.prod(self.box[1:])) * self.pitch


@lru_cache(maxsize=1024)
def decoded(raw: bytes) -> TensorMap:
    """Decode the 128 bytes of a tensor map. The second half is ignored.

    Raises:
        ValueError: a field is malformed, or not understood.
    """
    words = np.frombuffer(raw, np.uint32)
    flags = int(words[2])
    rank, number, swizzle = (flags >> 4 & 7) + 1, flags >> 7 & 15, flags >> 13 & 3
    if flags & ~_FLAGS or rank > 5 or number not in _ELEMENTS or (flags & TF32 and number not in (7, 8)):
        raise ValueError(
            f"flags {flags:#x}: bits {flags & ~_FLAGS:#x}, rank {rank} or element type {number} are not understood"
        )
    kind, size = _ELEMENTS[number]
    # Strides have 36 bits. One word holds the upper 4 bits of all dimensions.
    upper = int(words[7])
    strides = (
        size,
        *((int(x) | (upper >> 4 * n & 15) << 32) * 16 for n, x in enumerate(words[3 : 2 + rank])),
    )
    box = tuple(x + 1 for x in raw[55 : 55 + rank])
    beyond = any(words[2 + rank : 7]) or upper >> 4 * (rank - 1) or any(words[8 + rank : 13])
    if any(raw[55 + rank : 64]) or any(raw[52:55]) or beyond:
        raise ValueError(f"rank {rank}: element strides, or fields of further dimensions, are set")
    address = int(words[0]) | int(words[1]) << 32
    inner, width = box[0] * size, 16 << swizzle
    if address % 16 or inner % 16:
        raise ValueError(f"address {address:#x} and the {inner} bytes of a box's row must be multiples of 16")
    if swizzle and inner > width:
        raise ValueError(f"a row of a box has {inner} bytes, more than the {width} of the swizzle")
    fill = 0
    if flags & FILL:
        if "f" not in kind:
            raise ValueError(f"fill with NaN outside of a tensor of integers (.{kind})")
        fill = int.from_bytes(_NAN.to_bytes(2, "little") * (size // 2), "little")
    extents = tuple(int(x) + 1 for x in words[8 : 8 + rank])
    pitch = width if swizzle else inner
    return TensorMap(address, kind, size, extents, strides, box, (1 << swizzle) - 1, pitch, fill)


#: CUtensorMapDataType -> number of the type in a map, and flags.
_DRIVER_TYPES = {n: (n, 0) for n in range(8)} | {
    8: (9, 0),
    9: (10, 0),
    10: (8, 0),
    11: (7, TF32),
    12: (8, TF32),
}


def encoded(
    kind: int, address: int, extents: Sequence[int], strides: Sequence[int], box: Sequence[int], steps: Sequence[int],
    interleave: int, swizzle: int, promotion: int, fill: int,
) -> bytes:  # fmt: skip
    """Encode a tensor map, as `cuTensorMapEncodeTiled` does.

    Args:
        kind, interleave, swizzle, promotion, fill: the driver's numbers.
        address: of the tensor in global memory.
        extents, box: in elements, innermost dimension first.
        strides: in bytes, of all dimensions but the innermost.
        steps: the element strides.

    Raises:
        ValueError: the driver refuses an argument.
        PtxError: an argument is not modelled.
    """
    name, rank = "cuTensorMapEncodeTiled", len(extents)
    if kind not in _DRIVER_TYPES:
        raise PtxError(f"{name}: tensorDataType {kind} is not modelled")
    if interleave or swizzle > 3:
        raise PtxError(f"{name}: interleave {interleave} with swizzle {swizzle} is not modelled")
    if any(step != 1 for step in steps):
        raise PtxError(f"{name}: elementStrides other than 1 are not modelled, got {list(steps)}")
    if not all(1 <= n <= 1 << 32 for n in extents):
        raise ValueError(f"{name}: globalDim: expected 1 to {1 << 32}, got {list(extents)}")
    if not all(1 <= n <= 256 for n in box):
        raise ValueError(f"{name}: boxDim: expected 1 to 256, got {list(box)}")
    if any(n % 16 or not 0 <= n < 1 << 40 for n in strides):
        raise ValueError(
            f"{name}: globalStrides: expected multiples of 16 below {1 << 40}, got {list(strides)}"
        )
    if not 0 <= promotion <= 3 or not 0 <= fill <= 1:
        raise ValueError(f"{name}: l2Promotion {promotion} or oobFill {fill}: no such value")
    number, more = _DRIVER_TYPES[kind]
    flags = (rank - 1) << 4 | number << 7 | swizzle << 13 | fill << 15 | promotion << 17 | more
    words, raw = np.zeros(MAP_BYTES // 4, np.uint32), bytearray(MAP_BYTES)
    words[:3] = address & 0xFFFFFFFF, address >> 32, flags
    words[3 : 2 + rank] = [n >> 4 & 0xFFFFFFFF for n in strides]
    words[7] = sum(n >> 36 << 4 * i for i, n in enumerate(strides))
    words[8 : 8 + rank] = [n - 1 for n in extents]
    raw[:] = words.tobytes()
    raw[55 : 55 + rank] = bytes(n - 1 for n in box)
    try:
        decoded(bytes(raw))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return bytes(raw)


@lru_cache(maxsize=64)
def _grid(box: tuple[int, ...]) -> Array:
    """Return the coordinates of each element in a box, [rank, elements]. The innermost dimension is first and fastest."""
    found = np.indices(box[::-1])[::-1].reshape(len(box), -1)
    found.flags.writeable = False
    return found


def elements(m: TensorMap, place: int, corner: list[int]) -> tuple[Array, Array, Array]:
    """Locate the elements of a box.

    Args:
        place: address of the box in shared memory.
        corner: its coordinates in the tensor, innermost first.

    Returns:
        The addresses of all elements in shared memory (rows narrower than the swizzle leave gaps); bool, which elements are
        inside of the tensor; the addresses of those in global memory.
    """
    index = _grid(m.box) + np.array(corner)[:, None]
    inside = ((index >= 0) & (index < np.array(m.extents)[:, None])).all(0)
    origins = m.address + (index[:, inside] * np.array(m.strides)[:, None]).sum(0)
    row, column = np.divmod(np.arange(len(inside)), m.box[0])
    places = place + row * m.pitch + column * m.size
    return places ^ (places >> 7 & m.swizzle) << 4, inside, origins


def map_at(w: Warp, address: int) -> TensorMap:
    """Return the tensor map at a generic address: among the parameters, or in global memory."""
    if address % 64:
        w.fail(f"tensor map: address {address:#x} is not aligned to 64 bytes")
    if address >= PARAMETERS:
        region, start = w.machine.parameters, address - PARAMETERS
        if start + MAP_BYTES > region.high:
            w.fail(
                f"tensor map: {MAP_BYTES} bytes at offset {start} go past the end of the parameters ({region.high} bytes)"
            )
    else:
        region, start = w.machine.memory.at(address, address + MAP_BYTES, w.fail), address
        first = (start - region.base) >> 4
        if (region.written[first : first + MAP_BYTES // 16] > w.cta.acquired_maps.get(address, 0)).any():
            w.fail(
                f"tensor map at {address:#x}: this kernel has written it, and no thread of this CTA has executed a "
                "fence.proxy.tensormap::generic.acquire of it since"
            )
    raw = region.data[start - region.base : start - region.base + MAP_BYTES].tobytes()
    try:
        return decoded(raw)
    except ValueError as error:
        w.fail(f"tensor map at {address:#x}: {error}")


def units(region: Region, places: Array) -> Array:
    """Return the 16-byte units of these addresses, as `check_proxy` takes them."""
    return _distinct((places - region.base) >> 4)


def words(region: Region, places: Array, size: int) -> Array:
    """Return the word indices of elements of ``size`` bytes, as `races.Shadow` takes them."""
    first = (places - region.base) >> 2
    return _distinct(first if size <= 4 else first[:, None] + np.arange(size // 4))


def _distinct(numbers: Array) -> Array:
    """Return the numbers in ascending order, each once."""
    first, last = int(numbers.min()), int(numbers.max())
    if last - first > 64 * numbers.size:  # rows that are far apart
        return np.unique(numbers)
    seen = np.zeros(last - first + 1, np.bool_)
    seen[numbers - first] = True
    return np.flatnonzero(seen) + first


def region_of(w: Warp, places: Array, size: int) -> Region:
    """Return the region of global memory that holds all these elements of ``size`` bytes."""
    low = int(places.min())
    return w.machine.memory.at(low, int(places.max()) + size, w.fail)


# ---- global to shared memory


def start_load(
    w: Warp, m: TensorMap, place: int, corner: list[int], barrier_place: int, lane: int, pair: bool = False
) -> None:
    """Start a copy of a box to shared memory. At some later time its bytes arrive, and the mbarrier counts them.

    Elements outside of the tensor get the map's fill value. ``pair``: the mbarrier may be in the peer CTA of the destination's.
    """
    (cta, place), pc, clock = cta_at(w, place), w.pc, w.clock.now
    counting = cta_at(w, barrier_place)[0]
    if counting is not cta and not (pair and counting.rank == cta.rank ^ 1):
        w.fail(
            "bulk tensor copy: the mbarrier is not in the CTA whose shared memory is written"
            + (", nor in its peer" if pair else "")
        )
    barrier, shared = mbarrier_at(w, barrier_place, proxy=True), cta.shared
    places, inside, origins = _checked(w, m, shared, place, corner)
    shared.track()
    shared.known_view(m.size, 1)[(places - shared.base) // m.size] = 0
    if shared.shadow is not None:
        shared.shadow.store(w, words(shared, places, m.size), lane)
    region = region_of(w, origins, m.size) if len(origins) else None
    if region is not None and region.shadow is not None:
        region.shadow.observe(w, words(region, origins, m.size))

    def complete() -> None:
        w.pc = pc
        values = np.full((len(places), 1), m.fill, UNSIGNED[m.size])
        unknown = np.zeros((len(places), 1), np.bool_)
        if region is not None:
            check_proxy(w, "global", region, units(region, origins))
            values[inside], missing = region.load(origins, m.size, 1)
            if missing is not None:
                unknown[inside] = missing
        shared.store(places, m.size, 1, values, unknown)
        cta.incoming -= 1
        barrier.release(issue_snapshot(w, clock))
        barrier.count_bytes(m.bytes, w.fail)

    cta.incoming += 1
    w.machine.pending.append(complete)


def _checked(
    w: Warp, m: TensorMap, shared: Region, place: int, corner: list[int]
) -> tuple[Array, Array, Array]:
    """`elements`, after checks of rank, alignment and the bounds of shared memory."""
    if len(corner) != len(m.box):
        w.fail(f"bulk tensor copy: tensor map of rank {len(m.box)}, {len(corner)} coordinates")
    if corner[0] * m.size % 16:
        w.fail(
            f"bulk tensor copy: coordinate {corner[0]} of elements of {m.size} bytes is not aligned to 16 bytes"
        )
    if place % 128:
        w.fail(f"bulk tensor copy: shared memory at {place:#x} is not aligned to 128 bytes")
    if place < shared.low or place + m.span > shared.high:
        w.fail(
            f"bulk tensor copy: shared memory out of bounds: {m.span} bytes at {place:#x}, "
            f"{shared.low:#x} to {shared.high:#x} exists"
        )
    return elements(m, place, corner)


# ---- shared to global memory


Combine = Callable[[Array, Array], Array]


class Store:
    """A bulk copy or a reduction from shared to global memory.

    It reads and writes at some time before its wait, or at the wait.
    """

    def __init__(
        self, w: Warp, lanes: list[int], places: Array, origins: Array, size: int, combine: Combine | None = None
    ):  # fmt: skip
        """Start the copy.

        Args:
            lanes: the lanes that issued it. Several lanes that issue the same copy start one copy; each reduction counts.
            places: addresses of the elements in shared memory.
            origins: their addresses in global memory.
            size: bytes of an element.
            combine: the reduction (`access.combiner`); None: a copy.
        """
        self.w, self.groups, self.pc = w, {lane: int(w.bulk_group[lane]) for lane in lanes}, w.pc
        self.places, self.origins, self.size, self.combine = places, origins, size, combine
        self.has_read = self.has_written = self.was_awaited = False
        shared = w.cta.shared
        self.read_words = words(shared, places, size)
        self._record_read(w)
        check_proxy(w, "shared", shared, units(shared, places))
        self.bits, self.unknown = shared.load(places, size, 1)
        self.region = region_of(w, origins, size)
        if self.unknown is not None and not (self.region.scratch and combine is None):
            w.fail(
                f"an undefined value is stored to {self.region.name}: it depends on a value that nothing has written yet"
            )
        check_proxy(w, "global", self.region, units(self.region, origins), access="writes")
        if shared.shadow is not None:
            shared.shadow.start_reading(self.read_words)
        if self.region.shadow is not None and combine is None:  # reductions are atomic
            changed = self._changed(w)
            if changed.any():
                self.region.shadow.store(w, words(self.region, origins[changed], size), SEVERAL)
        w.bulk.append(self)
        w.machine.pending.append(self.write)

    def _changed(self, w: Warp) -> Array:
        """Return bool[elements] of those whose bits differ from memory's, or from those of a store that has yet to write.

        Several warps may store the same bytes: that is no race.
        """
        bits, unknown = self.region.load(self.origins, self.size, 1)
        changed: Array = (bits != self.bits)[:, 0]
        if unknown is not None or self.unknown is not None:
            return np.ones_like(changed)
        for one in (
            x for cta in w.machine.ctas for warp in cta.warps for x in warp.bulk if not x.has_written
        ):
            if one.region is self.region and one.combine is None and one.size == self.size:
                _, mine, its = np.intersect1d(self.origins, one.origins, return_indices=True)
                changed[mine] = (self.bits[mine] != one.bits[its])[:, 0]
        return changed

    def _record_read(self, w: Warp) -> None:
        """Report the read of shared memory to the race check."""
        shared = w.cta.shared
        if shared.shadow is not None:
            lane = next(iter(self.groups)) if len(self.groups) == 1 else SEVERAL
            shared.shadow.load(w, self.read_words, lane)

    def read(self) -> None:
        """Read shared memory, once. An error if it was overwritten since the issue."""
        if self.has_read:
            return
        self.has_read = True
        if (self.w.cta.shared.load(self.places, self.size, 1)[0] != self.bits).any():
            self.w.pc = self.pc
            self.w.fail("shared memory was overwritten before a bulk copy had read it")

    def write(self) -> None:
        """Read shared memory and write global memory, once."""
        self.read()
        if self.has_written:
            return
        self.has_written = True
        bits = self.bits
        if self.combine is not None:
            before, unknown = self.region.load(self.origins, self.size, 1)
            if unknown is not None:
                self.w.pc = self.pc
                self.w.fail(
                    f"a bulk reduction updates undefined memory of {self.region.name}: nothing has written it"
                )
            bits = self.combine(before, bits)
        self.region.store(self.origins, self.size, 1, bits, self.unknown)


def commit(w: Warp, lanes: int) -> None:
    """`cp.async.bulk.commit_group`: the lanes start a new group."""
    w.bulk_group = w.bulk_group + BOOLS[lanes]


def wait(d: Decoder, i: Instruction) -> Execute:
    """`cp.async.bulk.wait_group`: all but the last groups of each lane have written, or with ``.read`` have read."""
    d.only(i.modifiers[2:], "wait_group", "read")
    left, reading = d.immediate(i.operands[0]), "read" in i.modifiers

    def waits(w: Warp, lanes: int) -> None:
        for one in w.bulk:
            if any(
                lanes >> lane & 1 and group < w.bulk_group[lane] - left for lane, group in one.groups.items()
            ):
                if not one.was_awaited:
                    one.was_awaited = True
                    one._record_read(w)  # the read may happen as late as now
                    if w.cta.shared.shadow is not None:
                        w.cta.shared.shadow.end_reading(one.read_words)
                if reading:
                    one.read()
                else:
                    one.write()
        w.bulk = [one for one in w.bulk if not (one.was_awaited and one.has_written)]
        w.machine.changes += 1

    return waits


# ---- instructions


def tensor_copy(d: Decoder, i: Instruction, operation: str = "") -> Execute:
    """`cp.async.bulk.tensor` in tiled mode. With an ``operation``: `cp.reduce.async.bulk.tensor`."""
    multicast = "multicast::cluster" in i.modifiers
    pair = "cta_group::2" in i.modifiers
    dropped = (
        "reduce", operation, "L2::cache_hint", "tile", "multicast::cluster", "cta_group::1", "cta_group::2",
    )  # fmt: skip
    shape = tuple(m for m in i.modifiers if m not in dropped)[3:]
    loads = shape[1:] in (
        ("shared::cta", "global", "mbarrier::complete_tx::bytes"),
        ("shared::cluster", "global", "mbarrier::complete_tx::bytes"),
    )
    if (
        pair
        and not loads
        or ((not loads or operation) and shape[1:] != ("global", "shared::cta", "bulk_group"))
    ):
        d.refuse("this bulk tensor copy is not modelled")
    operands = list(i.operands)
    if "L2::cache_hint" in i.modifiers:
        d.source(operands.pop(), "b64")
    mask = d.source(operands.pop(), "b16") if multicast else None
    tensor = operands[1 if loads else 0]
    if not isinstance(tensor, Coordinates) or shape[0] != f"{len(tensor.elements)}d":
        d.refuse(f"expected coordinates of a .{shape[0]} tensor, got {tensor}")
    base = d.source(tensor.base, "b64")
    coordinates = [d.source(x, "b32") for x in tensor.elements]
    to, offset = d.address(operands[0 if loads else 1], "b32")
    barrier, barrier_offset = d.address(operands[2], "b32") if loads else (to, 0)

    def start(w: Warp, lanes: int) -> None:
        columns = [addresses(w, slot, 0, lanes, "a coordinate") for slot in coordinates]
        # Coordinates are signed.
        corners = np.stack(columns, 1).astype(np.uint32).view(np.int32).tolist()
        maps, places = addresses(w, base, 0, lanes).tolist(), addresses(w, to, offset, lanes).tolist()
        barriers = addresses(w, barrier, barrier_offset, lanes).tolist()
        stores: dict[tuple[int, ...], list[int]] = {}
        for n, lane in enumerate(INDICES[lanes].tolist()):
            if mask is not None:
                for place, mbarrier in multicast_places(w, mask, lane, places[n], barriers[n]):
                    if pair:  # the CTA of each pair whose rank has the parity of that of the given mbarrier
                        odd = barriers[n] >> CTA_BITS & 1
                        mbarrier = mbarrier & ~(1 << CTA_BITS) | odd << CTA_BITS
                    start_load(w, map_at(w, maps[n]), place, corners[n], mbarrier, lane, pair)
            elif loads:
                start_load(w, map_at(w, maps[n]), places[n], corners[n], barriers[n], lane, pair)
            else:
                # The reduction of each lane counts, even if it is the same.
                key = (maps[n], places[n], lane if operation else -1, *corners[n])
                stores.setdefault(key, []).append(lane)
        for (address, place, _, *corner), issuers in stores.items():
            m = map_at(w, address)
            if min(corner) < 0:
                w.fail(f"bulk tensor copy to global memory: negative coordinates {corner}")
            combine = None
            if operation and (combine := combiner(operation, m.kind)) is None:
                w.fail(f"bulk tensor reduction: .{operation} of {m.kind} is not defined, or not modelled")
            sources, inside, targets = _checked(w, m, w.cta.shared, place, corner)
            if len(targets):
                Store(w, issuers, sources[inside], targets, m.size, combine)

    return start


def tensor_prefetch(d: Decoder, i: Instruction) -> Execute:
    """`cp.async.bulk.prefetch.tensor` in tiled mode: only checks the tensor map and the rank."""
    d.only(i.modifiers[5:], "L2", "global", "tile", "L2::cache_hint")
    (tensor, *rest), rank = i.operands, i.modifiers[4]
    if not isinstance(tensor, Coordinates) or rank != f"{len(tensor.elements)}d":
        d.refuse(f"expected coordinates of a .{rank} tensor, got {tensor}")
    base = d.source(tensor.base, "b64")
    coordinates = [d.source(x, "b32") for x in tensor.elements]
    for hint in rest:
        d.source(hint, "b64")

    def prefetch(w: Warp, lanes: int) -> None:
        for slot in coordinates:
            addresses(w, slot, 0, lanes, "a coordinate")
        for address in addresses(w, base, 0, lanes).tolist():
            if len(map_at(w, address).box) != len(coordinates):
                w.fail(
                    f"prefetch: tensor map of rank {len(map_at(w, address).box)}, {len(coordinates)} coordinates"
                )

    return prefetch


def multicast_places(w: Warp, mask: int, lane: int, *places: int) -> list[tuple[int, ...]]:
    """Return the same addresses of shared memory in each CTA of a multicast mask.

    Args:
        mask: the register of the mask.
        lane: the lane that issues the instruction.
        places: addresses in this CTA.

    Returns:
        ``places`` as shared::cluster addresses, for each CTA of the mask in ascending order.
    """
    if w.unknown[mask] >> lane & 1:
        w.fail(f"the CTA mask is undefined: it depends on a value that nothing has written yet (lane {lane})")
    bits = int(w.regs[mask][lane])
    if bits == 0:
        w.fail(f"multicast: the CTA mask of lane {lane} is 0, expected at least one CTA")
    local = (1 << CTA_BITS) - 1
    return [tuple(x & local | rank << CTA_BITS for x in places) for rank in range(16) if bits >> rank & 1]


def bulk_store(d: Decoder, i: Instruction, operation: str = "", kind: str = "b32") -> Execute:
    """`cp.async.bulk` from shared to global memory. With an ``operation``: `cp.reduce.async.bulk`."""
    combine, step = combiner(operation, kind) if operation else None, SIZES[kind]
    if operation and combine is None:
        d.refuse(f".{operation}.{kind} is not modelled")
    to, to_offset = d.address(i.operands[0], "b64")
    source, source_offset = d.address(i.operands[1], "b32")
    size = d.source(i.operands[2], "u32")
    if "L2::cache_hint" in i.modifiers:
        d.source(i.operands[3], "b64")

    def start(w: Warp, lanes: int) -> None:
        columns = (
            addresses(w, to, to_offset, lanes), addresses(w, source, source_offset, lanes),
            addresses(w, size, 0, lanes, "a size"),
        )  # fmt: skip
        shared = w.cta.shared
        stores: dict[tuple[int, ...], list[int]] = {}
        for lane, *what in zip(INDICES[lanes].tolist(), *(c.tolist() for c in columns)):
            stores.setdefault((*what, lane if operation else -1), []).append(lane)
        for (target, place, count, _), issuers in stores.items():
            if count % 16 or place % 16 or target % 16:
                w.fail(
                    f"bulk copy of {count} bytes from {place:#x} to {target:#x}: size and addresses must be multiples of 16"
                )
            if place < shared.low or place + count > shared.high:
                w.fail(
                    f"bulk copy: shared memory out of bounds: {count} bytes at {place:#x}, "
                    f"{shared.low:#x} to {shared.high:#x} exists"
                )
            if count:
                steps = np.arange(0, count, step)
                Store(w, issuers, place + steps, target + steps, step, combine)

    return start


@handler("prefetch")
def _prefetch(d: Decoder, i: Instruction) -> Execute:
    """`prefetch.tensormap`: only checks that the address holds a valid tensor map. `prefetch.global` to a cache has no effect: a
    prefetch accesses no memory, so any address is allowed."""
    base, offset = d.address(i.operands[0], "b64")
    if i.modifiers in (("global", "L1"), ("global", "L2")):
        return lambda w, lanes: None
    d.only(i.modifiers, "tensormap")

    def prefetch(w: Warp, lanes: int) -> None:
        for address in addresses(w, base, offset, lanes).tolist():
            map_at(w, address)

    return prefetch
