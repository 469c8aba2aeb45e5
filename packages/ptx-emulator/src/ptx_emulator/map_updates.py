"""Tensor maps that a kernel changes: `tensormap.replace` and `tensormap.cp_fenceproxy`.

Source: PTX ISA, "tensormap.replace", "tensormap.cp_fenceproxy". The fields are those of `tensors.decoded`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx_emulator.access import addresses, gather_from, scatter_to, space_of
from ptx_emulator.decode import Decoder, Execute, handler
from ptx_emulator.lanes import INDICES, Array
from ptx_emulator.machine import Warp
from ptx_emulator.parser import Instruction
from ptx_emulator.synchronize import aligned
from ptx_emulator.tensors import FILL, MAP_BYTES, TF32

#: Change of the 16 words of the known half of a map: words, ordinal, value.
Change = Callable[[Array, int, int], None]


def _flags(words: Array, mask: int, value: int) -> None:
    words[2] = int(words[2]) & ~mask | value


def _address(words: Array, _: int, value: int) -> None:
    words[0], words[1] = value & 0xFFFFFFFF, value >> 32


def _stride(words: Array, n: int, value: int) -> None:
    words[3 + n] = value >> 4 & 0xFFFFFFFF
    words[7] = int(words[7]) & ~(15 << 4 * n) | value >> 36 << 4 * n


def _extent(words: Array, n: int, value: int) -> None:
    words[8 + n] = value - 1 & 0xFFFFFFFF


def _box(words: Array, n: int, value: int) -> None:
    words.view(np.uint8)[55 + n] = value - 1 & 0xFF


def _type(words: Array, _: int, value: int) -> None:
    number, more = (value - 4, TF32) if value in (11, 12) else (value, 0)
    _flags(words, 15 << 7 | TF32, number << 7 | more)


#: Field -> number of operands behind the address, the values that are allowed, and the change.
_FIELDS: dict[str, tuple[int, range, Change]] = {
    "global_address": (1, range(1 << 64), _address),
    "rank": (1, range(5), lambda words, _, value: _flags(words, 7 << 4, value << 4)),
    "box_dim": (2, range(1, 257), _box),
    "global_dim": (2, range(1, 1 << 32), _extent),
    "global_stride": (2, range(0, 1 << 40, 16), _stride),
    "element_stride": (2, range(1, 2), lambda words, n, value: None),
    "elemtype": (1, range(13), _type),
    "interleave_layout": (1, range(1), lambda words, _, value: None),
    "swizzle_mode": (1, range(4), lambda words, _, value: _flags(words, 3 << 13, value << 13)),
    "fill_mode": (1, range(2), lambda words, _, value: _flags(words, FILL, value * FILL)),
}


@handler("tensormap")
def _tensormap(d: Decoder, i: Instruction) -> Execute:
    if i.modifiers[0] == "cp_fenceproxy":
        return _cp_fenceproxy(d, i)
    kind = i.modifiers[-1]
    d.only(i.modifiers[:2], "replace", "tile")
    field, space = i.modifiers[2], space_of(d, i)
    d.only(i.modifiers[3:], "global", "shared::cta", "b1024", "b32", "b64")
    if field not in _FIELDS:
        d.refuse(f"tensormap.replace: .{field} is not modelled")
    count, allowed, change = _FIELDS[field]
    if len(i.operands) != 1 + count or kind != (
        "b64" if field in ("global_address", "global_stride") else "b32"
    ):
        d.refuse(f"tensormap.replace.{field}: expected {1 + count} operands of other types")
    base, offset = d.address(i.operands[0], "b32")
    ordinal = d.immediate(i.operands[1]) if count == 2 else 0
    if not 0 <= ordinal < 5 - (field == "global_stride"):
        d.refuse(f"tensormap.replace.{field}: there is no dimension {ordinal}")
    value = d.source(i.operands[-1], kind)

    def replace(w: Warp, lanes: int) -> None:
        if w.unknown[value] & lanes:
            w.fail(f"tensormap.replace.{field}: the new value is undefined: nothing has written it")
        for place, lane in zip(addresses(w, base, offset, lanes).tolist(), INDICES[lanes].tolist()):
            new, one = int(w.regs[value][lane]), 1 << lane
            if new not in allowed:
                w.fail(
                    f"tensormap.replace.{field}: expected {allowed.start} to {allowed[-1]}, a multiple of {allowed.step}, got {new}"
                )
            words, unknown = _read(w, space, place, one)
            if unknown:
                w.fail(f"tensormap.replace at {place:#x}: nothing has written the whole tensor map")
            change(words, ordinal, new)
            _write(w, space, place, words, one)

    return replace


def _read(w: Warp, space: str, place: int, lanes: int) -> tuple[Array, bool]:
    """Return the words of a map, and whether some of its fields are undefined. Its second half has none (`tensors.decoded`), and kernels
    do not initialize it."""
    if place % 64:
        w.fail(f"tensor map: address {place:#x} is not aligned to 64 bytes")
    parts = [
        gather_from(w, space, np.array([place + n]), 4, 4, lanes, False) for n in range(0, MAP_BYTES, 16)
    ]
    fields = len(parts) // 2
    return np.concatenate([x[0] for x, _ in parts]), any(missing is not None for _, missing in parts[:fields])


def _write(w: Warp, space: str, place: int, words: Array, lanes: int) -> None:
    """Write the words of a map."""
    for n in range(0, MAP_BYTES, 16):
        part = words[None, n // 4 : n // 4 + 4]
        scatter_to(w, space, np.array([place + n]), 4, part, None, lanes, False)


def _cp_fenceproxy(d: Decoder, i: Instruction) -> Execute:
    """`tensormap.cp_fenceproxy`: a warp copies a map from shared to global memory, and releases it to the tensormap proxy."""
    d.only(
        i.modifiers[1:], "global", "shared::cta", "tensormap::generic", "release", "cta", "cluster", "gpu", "sys", "sync",
        "aligned",
    )  # fmt: skip
    to, to_offset = d.address(i.operands[0], "b64")
    source, source_offset = d.address(i.operands[1], "b32")
    if d.immediate(i.operands[2]) != MAP_BYTES:
        d.refuse(f"tensormap.cp_fenceproxy: expected a size of {MAP_BYTES} bytes")

    def copy(w: Warp, lanes: int) -> None:
        target = int(addresses(w, to, to_offset, lanes)[0])
        place = int(addresses(w, source, source_offset, lanes)[0])
        lane = 1 << int(INDICES[lanes][0])
        words, unknown = _read(w, "shared", place, lane)
        if unknown:
            w.fail(f"tensormap.cp_fenceproxy at {place:#x}: nothing has written the whole tensor map")
        _write(w, "global", target, words, lane)
        w.clock.fence()

    return aligned(copy)
