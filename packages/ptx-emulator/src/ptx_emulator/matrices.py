"""Matrices of a warp or a warpgroup: `ldmatrix`, `stmatrix`, `movmatrix`, `mma`, `wgmma`.

Sums of products equal those of an H200, bit for bit (`tensor_core_sum`).

Source of layouts: PTX ISA, "Warp Level Matrix Instructions" and "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ptx_emulator import floats, narrow
from ptx_emulator.access import addresses, gather, scatter
from ptx_emulator.decode import Decoder, Execute, handler
from ptx_emulator.lanes import BOOLS, FULL, Array, to_bits
from ptx_emulator.machine import Cta, Wait, Warp
from ptx_emulator.memory import CTA_BITS, UNSIGNED, Region
from ptx_emulator.parser import Instruction, Vector
from ptx_emulator.synchronize import aligned, check_proxy, uniform

# ---- 8x8 matrices in shared memory


def _matrix(d: Decoder, i: Instruction) -> tuple[int, bool]:
    """Return the number of 8x8 matrices of an instruction, and whether they are transposed."""
    d.only(i.modifiers, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    count = next((int(m[1]) for m in i.modifiers if m in ("x1", "x2", "x4")), 0)
    if not count or "m8n8" not in i.modifiers:
        d.refuse("this shape is not modelled")
    if i.opcode != "movmatrix" and not any(m.startswith("shared") for m in i.modifiers):
        d.refuse(f"{i.opcode}: only shared addresses are modelled, not generic ones")
    return count, "trans" in i.modifiers


@handler("ldmatrix")
def _ldmatrix(d: Decoder, i: Instruction) -> Execute:
    count, transposed = _matrix(d, i)
    targets = d.destinations(i.operands[0], "b32")
    base, offset = d.address(i.operands[1], "b32")

    def load(w: Warp, lanes: int) -> None:
        rows = addresses(w, base, offset, (1 << 8 * count) - 1)
        values, unknown = gather(w, "shared", rows, 2, 8) if count else (None, None)
        assert values is not None
        words = _to_lanes(values.reshape(count, 8, 8), transposed)
        missing = (
            None if unknown is None else _to_lanes(unknown.astype(np.uint16).reshape(count, 8, 8), transposed)
        )
        for n, target in enumerate(targets):
            w.put(target, words[n], 0 if missing is None else to_bits(missing[n] != 0), lanes)

    return aligned(load)


def _to_lanes(matrices: Array, transposed: bool) -> Array:
    """Convert [n, 8, 8] elements of 2 bytes to [n, 32] words.

    Lane l holds row l // 4, columns 2 * (l % 4) and 2 * (l % 4) + 1.
    """
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, 32)


def _from_lanes(words: Array, transposed: bool) -> Array:
    """Convert [n, 32] words to [n, 8, 8] elements of 2 bytes, the inverse of `_to_lanes`."""
    matrices = words.view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(matrices.transpose(0, 2, 1)) if transposed else matrices


def _bytes_from_lanes(words: Array) -> Array:
    """Convert registers [count, 32] to the rows [8 count, 16] of transposed 16x8 matrices of bytes.

    Byte e of lane t is in row 2 (t % 4) + e % 2 and column t // 4 + 8 (e // 2).
    """
    parts = words.view(np.uint8).reshape(len(words), 8, 4, 2, 2)
    return np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1)).reshape(-1, 16)


@handler("stmatrix")
def _stmatrix(d: Decoder, i: Instruction) -> Execute:
    if "b8" in i.modifiers:
        d.only(
            i.modifiers, "sync", "aligned", "m16n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b8"
        )
        if "m16n8" not in i.modifiers or "trans" not in i.modifiers:
            d.refuse("stmatrix of bytes: expected .m16n8 with .trans")
        size, of_lanes = 1, _bytes_from_lanes
        count = next((int(m[1]) for m in i.modifiers if m in ("x1", "x2", "x4")), 0)
    else:
        count, transposed = _matrix(d, i)
        size, of_lanes = 2, lambda words: _from_lanes(words, transposed).reshape(-1, 8)
    base, offset = d.address(i.operands[0], "b32")
    sources = d.sources(i.operands[1], "b32")

    def store(w: Warp, lanes: int) -> None:
        rows = addresses(w, base, offset, (1 << 8 * count) - 1)
        values = of_lanes(np.stack([w.regs[s] for s in sources]))
        missing = None
        if any(w.unknown[s] for s in sources):
            words = np.stack([np.where(BOOLS[w.unknown[s]], FULL, 0).astype(np.uint32) for s in sources])
            missing = of_lanes(words) != 0
        scatter(w, "shared", rows, size, values, missing)

    return aligned(store)


@handler("movmatrix")
def _movmatrix(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers, "sync", "aligned", "m8n8", "trans", "b16")
    to, source = d.destination(i.operands[0], "b32"), d.source(i.operands[1], "b32")

    def move(w: Warp, lanes: int) -> None:
        unknown = 0
        if w.unknown[source]:
            words = np.where(BOOLS[w.unknown[source]], FULL, 0).astype(np.uint32)[None]
            unknown = to_bits(_from_lanes(words, True).view(np.uint32).reshape(32) != 0)
        w.put(to, _from_lanes(w.regs[source][None], True).view(np.uint32).reshape(32), unknown, lanes)

    return aligned(move)


# ---- fragments of mma and wgmma


#: Bytes of an element of each operand type.
ELEMENT = {"bf16": 2, "f16": 2, "tf32": 4}


def values_of(bits: Array, kind: str) -> Array:
    """Convert the bits of operands to fp64. Of the 4 bytes of tf32 the upper 19 bits count."""
    if kind in narrow.FORMATS:
        return narrow.FORMATS[kind].values[bits]
    if kind == "bf16":
        return floats.bf16_values(bits.astype(np.uint16)).astype(np.float64)
    if kind == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def _elements(words: Array, kind: str) -> Array:
    """Convert registers [.., 32] to fp64 [.., 32 * n], with n elements for each lane."""
    return values_of(words.view(np.uint16) if ELEMENT[kind] == 2 else words, kind)


def _a_matrix(words: Array, kind: str) -> Array:
    """Convert the A fragment, registers [n, 32], to fp64 [16, k]. The odd registers hold rows 8 to 15."""
    n, e = len(words) // 2, 4 // ELEMENT[kind]
    x = _elements(words, kind).reshape(n, 2, 8, 4, e)  # block of k, row half, row, quad, element
    return x.transpose(1, 2, 0, 3, 4).reshape(16, 4 * e * n)


def _b_matrix(words: Array, kind: str) -> Array:
    """Convert the B fragment, registers [n, 32], to fp64 [k, 8]."""
    n, e = len(words), 4 // ELEMENT[kind]
    x = _elements(words, kind).reshape(n, 8, 4, e)  # block of k, column, quad, element
    return x.transpose(0, 2, 3, 1).reshape(4 * e * n, 8)


def _c_matrix(words: Array, kind: str) -> Array:
    """Convert the accumulators, 4n registers of fp32 or 2n of fp16x2, to fp64 [16, 8 * n]."""
    if kind == "f16":
        n = len(words) // 2
        x = _elements(words, kind).reshape(n, 2, 8, 4, 2)  # n, row half, row, quad, element
        return x.transpose(1, 2, 0, 3, 4).reshape(16, 8 * n)
    n = len(words) // 4
    y = words.view(np.float32).astype(np.float64).reshape(n, 2, 2, 8, 4)  # n, row half, element, row, quad
    return y.transpose(1, 3, 0, 4, 2).reshape(16, 8 * n)


def _spread(matrix: Array, kind: str) -> Array:
    """Distribute accumulators [16, 8 * n] to registers: [4n, 32], or [2n, 32, 2] for fp16."""
    n = matrix.shape[1] // 8
    x = matrix.reshape(2, 8, n, 4, 2)  # row half, row, n, quad, element
    if kind == "f16":
        return np.ascontiguousarray(x.transpose(2, 0, 1, 3, 4)).reshape(2 * n, 32, 2)
    return np.ascontiguousarray(x.transpose(2, 0, 4, 1, 3)).reshape(4 * n, 32)


def _c_words(matrix: Array, kind: str) -> Array:
    """Convert fp64 accumulators [16, 8 * n] to registers. fp16 is rounded to nearest, fp32 towards zero."""
    if kind == "f16":
        with np.errstate(over="ignore"):
            halves = matrix.astype(np.float16)
        bits = np.where(np.isnan(halves), np.uint16(0x7FFF), halves.view(np.uint16))
        return _spread(bits, kind).view(np.uint32)[..., 0]
    return _spread(floats.canonical(floats.cut32(matrix)).view(np.uint32), kind)


def _unknown_rows(w: Warp, slots: list[int]) -> Array:
    """Return bool[16]: the rows of an A fragment that have an undefined element."""
    flags = np.stack([BOOLS[w.unknown[s]] for s in slots]).reshape(-1, 2, 8, 4)
    return flags.any((0, 3)).reshape(16)


ALIGNED = 25  # bits below the largest exponent that a sum of products keeps


def _exponents(x: Array) -> Array:
    """Return the exponents of numbers; that of zero is very small."""
    return np.where(x == 0, -2000, np.frexp(x)[1] - 1)


def tensor_core_sum(a: Array, b: Array, c: Array | None) -> Array:
    """Return a @ b + c as Hopper's tensor cores compute it, before the final rounding.

    1. The largest exponent among the products and c is found. A product's exponent is the sum of its factors'.
    2. Every product, and c, is truncated `ALIGNED` bits below it.
    3. They are summed exactly.

    Args:
        a, b, c: fp64 [m, k], [k, n], [m, n]; c None: zero.

    PTX leaves the order and the precision open. The formula was fitted to recorded outputs of an H200 (docs/ptx-emulator.md).
    """
    plain = a @ b if c is None else a @ b + c
    top = (_exponents(a)[:, :, None] + _exponents(b)[None]).max(1)
    if c is not None:
        top = np.maximum(top, _exponents(c))
    scale = np.ldexp(1.0, ALIGNED - np.maximum(top, -900))
    total = np.trunc(a[:, :, None] * b[None] * scale[:, None]).sum(1)
    if c is not None:
        total += np.trunc(c * scale)
    # Infinities and NaN follow IEEE 754.
    return np.where(np.isfinite(plain), total / scale, plain)


def _put_product(
    w: Warp,
    targets: list[int],
    c: list[int],
    left: Array,
    right: Array,
    add: bool,
    rows: Array | None,
    columns: Array | None,
    kind: str = "f32",
) -> None:
    """Write left @ right + c to the registers ``targets``.

    Args:
        c: the registers of the accumulators; used if ``add``.
        rows, columns: bool, the rows of ``left`` and the columns of ``right`` with undefined elements; None: there are none.
        kind: "f32" (rounded towards zero) or "f16" (rounded to nearest).
    """
    before = _c_matrix(w.values(c), kind) if add else None
    bits = w.product(left, right, before) if kind == "f32" else None
    if bits is None:
        words = _c_words(tensor_core_sum(left, right, before), kind)
    else:
        words = _spread(bits, kind)
    missing = [w.unknown[s] if add else 0 for s in c]
    if rows is not None or columns is not None:
        flags = np.zeros((len(left), right.shape[1]), np.bool_)
        if rows is not None:
            flags |= rows[:, None]
        if columns is not None:
            flags |= columns[None, :]
        spread = _spread(flags, kind)
        if kind == "f16":
            spread = spread[..., 0] | spread[..., 1]
        missing = [old | to_bits(new) for old, new in zip(missing, spread)]
    w.put_all(targets, words, missing)


#: Number of registers of A and B, by shape and operand type.
MMA_REGISTERS = {
    ("m16n8k8", "bf16"): (2, 1), ("m16n8k16", "bf16"): (4, 2), ("m16n8k8", "f16"): (2, 1), ("m16n8k16", "f16"): (4, 2),
    ("m16n8k4", "tf32"): (2, 1), ("m16n8k8", "tf32"): (4, 2),
}  # fmt: skip


@handler("mma")
def _mma(d: Decoder, i: Instruction) -> Execute:
    if len(i.modifiers) != 9 or i.modifiers[:2] != ("sync", "aligned") or i.modifiers[3:5] != ("row", "col"):
        d.refuse("this form of mma is not modelled")
    shape, d_type, kind, b_type, c_type = i.modifiers[2], *i.modifiers[5:]
    if (shape, kind) not in MMA_REGISTERS or b_type != kind:
        d.refuse("this shape or these types are not modelled")
    if d_type != c_type or d_type not in (("f32", "f16") if kind == "f16" else ("f32",)):
        d.refuse(f"mma: D .{d_type} and C .{c_type} with A and B .{kind} are not modelled")
    targets = d.destinations(i.operands[0], "b32")
    a, b, c = (d.sources(x, "b32") for x in i.operands[1:])
    count = 4 if d_type == "f32" else 2
    if (len(a), len(b), len(c), len(targets)) != (*MMA_REGISTERS[shape, kind], count, count):
        d.refuse(
            f"expected {(*MMA_REGISTERS[shape, kind], count, count)} registers of A, B, C and D, "
            f"got {(len(a), len(b), len(c), len(targets))}"
        )

    def multiply(w: Warp, lanes: int) -> None:
        left, right = np.stack([w.regs[s] for s in a]), np.stack([w.regs[s] for s in b])
        rows = _unknown_rows(w, a) if any(w.unknown[s] for s in a) else None
        columns: Array | None = None
        if any(w.unknown[s] for s in b):
            flags = np.stack([BOOLS[w.unknown[s]] for s in b]).reshape(-1, 8, 4)
            columns = np.asarray(flags.any((0, 2)))
        _put_product(
            w, targets, c, _a_matrix(left, kind), _b_matrix(right, kind), True, rows, columns, d_type
        )

    return aligned(multiply)


# ---- wgmma

#: Bytes of a swizzle atom's row, by the descriptor's swizzle field.
_SWIZZLE = {0: 16, 1: 128, 2: 64, 3: 32}


def matrix_of(w: Warp, descriptor: int) -> tuple[int, int, int, int]:
    """Decode a wgmma matrix descriptor (PTX ISA, "Matrix-descriptor Format").

    Returns:
        Start address, leading and stride byte offsets, and the bytes of a swizzle atom's row.
    """
    if descriptor >> 49 & 7:
        w.fail(
            f"matrix descriptor {descriptor:#x}: a base offset is not modelled; "
            "the operand must start aligned to its swizzle pattern"
        )
    if descriptor & ~0xC00E_3FFF_3FFF_3FFF:
        w.fail(
            f"matrix descriptor {descriptor:#x}: reserved bits are set ({descriptor & ~0xC00E_3FFF_3FFF_3FFF:#x})"
        )
    start, leading, stride = ((descriptor >> place & 0x3FFF) << 4 for place in (0, 16, 32))
    check_pattern(w, descriptor, start, _SWIZZLE[descriptor >> 62])
    return start, leading, stride, _SWIZZLE[descriptor >> 62]


def check_pattern(w: Warp, descriptor: int, start: int, width: int) -> None:
    """Check that an operand with base offset 0 starts in the first row of its swizzle pattern: 8 rows of ``width`` bytes."""
    if width > 16 and start & (8 * width - 1) & ~127 and "swizzle" not in w.machine.assume:
        w.fail(
            f"matrix descriptor {descriptor:#x}: the operand starts at {start:#x}, {start % (8 * width)} bytes into its swizzle "
            f"pattern of {8 * width} bytes, with base offset 0"
        )


@lru_cache(maxsize=4096)
def operand_places(
    start: int,
    leading: int,
    stride: int,
    width: int,
    rows: int,
    mn_major: bool,
    size: int = 2,
    depth: int = 32,
) -> Array:
    """Return the addresses [rows, depth / size] of the elements of an operand in shared memory.

    Args:
        start, leading, stride: from the descriptor, in bytes.
        width: bytes of a swizzle atom's row; 16: no swizzle.
        rows: extent in M or N.
        mn_major: whether M or N is contiguous; otherwise K is.
        size: bytes of an element.
        depth: bytes of K.
    """
    per = 16 // size  # elements in 16 bytes
    r, k = np.arange(rows)[:, None], np.arange(depth // size)[None, :]
    if mn_major:
        # An atom has `width` bytes along M or N, and 8 elements along K.
        elements = width // size
        if width == 16:
            place = r // 8 * stride + r % 8 * size + k // 8 * leading + k % 8 * 16
        else:
            place = r // elements * leading + r % elements * size + k // 8 * stride + k % 8 * width
    elif width == 16:
        place = r // 8 * stride + r % 8 * 16 + k // per * leading + k % per * size
    else:
        place = r // 8 * stride + r % 8 * width + k * size
    place = start + place
    place = place ^ (place >> 7 & width // 16 - 1) << 4
    place.flags.writeable = False
    return place


@dataclass(frozen=True)
class Places:
    """Where an operand lies in a region, counted from its base.

    Attributes:
        shape: rows and elements of K.
        low, high: the addresses of its first byte and behind its last one.
        elements: the numbers of its elements, flat.
        words, units: the words of 4 bytes and units of 16 bytes that it touches, ascending.
        words_of_units: the words of ``units``.
    """

    shape: tuple[int, ...]
    low: int
    high: int
    elements: Array
    words: Array
    units: Array
    words_of_units: Array


@lru_cache(maxsize=4096)
def _places_from(base: int, *form: Any) -> Places:
    """Return the places of an operand in a region with this base. ``form``: see `operand_places`."""
    places, size = operand_places(*form), form[6]
    offsets = places.reshape(-1) - base
    words, units = (np.unique(offsets >> shift) for shift in (2, 4))
    found = (offsets // size, words, units, (units[:, None] * 4 + np.arange(4)).reshape(-1))
    for x in found:
        x.flags.writeable = False
    return Places(places.shape, int(places.min()), int(places.max()) + size, *found)


def load_operand(
    w: Warp, start: int, leading: int, stride: int, width: int, rows: int, mn_major: bool, size: int = 2, depth: int = 32,
    cta: Cta | None = None,
) -> tuple[Array, Array | None, Callable[[], None]]:  # fmt: skip
    """Read an operand in shared memory through the async proxy. Arguments: see `operand_places`; ``cta``: whose memory it is, by
    default the warp's.

    Returns:
        The bits [rows, depth / size]; bool[rows], the rows with undefined elements (None: there are none); and a check that
        raises an error if the operand has changed since.
    """
    cta = cta or w.cta
    region = w.cta.window(cta.rank, w.fail)
    form = (start + (cta.rank << CTA_BITS), leading, stride, width, rows, mn_major, size, depth)
    places = _places_from(region.base, *form)
    if places.low < region.low or places.high > region.high:
        w.fail(
            f"an operand in shared memory out of bounds: {places.low:#x} to {places.high:#x} is read, "
            f"{region.low:#x} to {region.high:#x} exists"
        )
    if region.shadow is not None:
        region.shadow.observe(w, places.words)
        region.shadow.load(w.issuer.start(), places.words, 0)
    check_proxy(w, "shared", region, places.units, cta, places.words_of_units)
    bits = region.view(size, 1)[places.elements, 0]
    unknown = _unknown_elements(region, places, size)

    def check() -> None:
        changed = (region.view(size, 1)[places.elements, 0] != bits).any()
        missing = None if changed else _unknown_elements(region, places, size)
        if changed or (missing is not None and (unknown is None or (missing & ~unknown).any())):
            w.fail("an operand in shared memory was overwritten while a multiplication was in flight")

    flags = None if unknown is None else np.any(unknown.reshape(places.shape), axis=1)
    return bits.reshape(places.shape), flags, check


def _unknown_elements(region: Region, places: Places, size: int) -> Array | None:
    """Return bool of the undefined elements of an operand. None: all are defined."""
    if region.known is None or (region.known_view(4, 1)[places.words, 0] == 0xFFFFFFFF).all():
        return None
    missing: Array = region.known_view(size, 1)[places.elements, 0] != UNSIGNED[size]((1 << 8 * size) - 1)
    return missing if missing.any() else None


def _load_operand(
    w: Warp, descriptor: int, rows: int, mn_major: bool, kind: str
) -> tuple[Array, Array | None, Callable[[], None]]:
    """`load_operand` for the descriptor of a wgmma, with the operand as fp64."""
    bits, flags, check = load_operand(w, *matrix_of(w, descriptor), rows, mn_major, ELEMENT[kind])
    return values_of(bits, kind), flags, check


@handler("wgmma")
def _wgmma(d: Decoder, i: Instruction) -> Execute:
    d.relaxed = True
    operation = i.modifiers[0]
    if operation == "mma_async":
        return _wgmma_mma(d, i)
    d.only(i.modifiers[1:], "sync", "aligned")
    if operation == "fence":

        def fence(w: Warp, lanes: int) -> None:
            w.fence_registers()

        return aligned(fence)
    if operation == "commit_group":

        def commit(w: Warp, lanes: int) -> None:
            w.wgmma_group += 1

        return aligned(commit)
    if operation != "wait_group":
        d.refuse(f".{operation} is not modelled")
    left = d.immediate(i.operands[0])

    def wait(w: Warp, lanes: int) -> Any:
        done = w.wgmma_group - left  # groups below this one are complete
        last = max((number for group, number, _ in w.operands if group < done), default=0)
        # A wgmma is one instruction of four warps: it is complete only if all of them have issued it.
        warps = warpgroup(w)
        if any(one.issuer.clock.now <= last for one in warps):
            ready = lambda: all(one.issuer.clock.now > last for one in warps)
            return Wait(
                ready, "the other warps of the warpgroup, which have not executed this wgmma", again=True
            )
        for one in warps:
            for _, number, check in one.operands:
                if number <= last:
                    check()
            # The others still wait for their part, but its operands may be overwritten from now on.
            one.operands = [(g, n, _unchecked if n <= last else check) for g, n, check in one.operands]
        w.operands = [x for x in w.operands if x[0] >= done]
        w.set_flight({slot: group for slot, group in w.flight.items() if group >= done})
        for one in warps:
            w.clock.learn(one.issuer.clock.index, last)
        return None

    return aligned(wait)


def _unchecked() -> None:
    """The check of operands that have been read."""


def warpgroup(w: Warp) -> list[Warp]:
    """Return the four warps of a warp's warpgroup."""
    first = w.number // 4 * 4
    found = w.cta.warps[first : first + 4]
    if len(found) < 4:
        w.fail(f"a warpgroup has four warps, but the CTA ends with warp {w.cta.width - 1}")
    return found


def _agree(w: Warp, number: int, descriptors: list[Any]) -> None:
    """Check that the warps of a warpgroup execute the same wgmma: that with this number."""
    issued, mine = w.cta.wgmmas.setdefault(w.number // 4, []), (w.pc, descriptors)
    if len(issued) < number:
        issued.append(mine)
    elif issued[number - 1] != mine:
        line = w.program.lines[issued[number - 1][0]]
        w.fail(
            f"the warps of a warpgroup execute different wgmmas here: another warp executed that of PTX line {line}, or with other operands"
        )


def _wgmma_mma(d: Decoder, i: Instruction) -> Execute:
    """`wgmma.mma_async`. Each warp computes its 16 rows of the 64 on its own."""
    match = re.fullmatch(
        r"mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|f16)\.(\w+)\.(\w+)", ".".join(i.modifiers)
    )
    if match is None:
        d.refuse("this form of wgmma is not modelled")
    columns, d_type, kind = int(match[1]), match[3], match[4]
    if kind not in ELEMENT or match[5] != kind or (d_type == "f16" and kind != "f16"):
        d.refuse(f"wgmma: D .{d_type} with A .{kind} and B .{match[5]} is not modelled")
    if int(match[2]) != 32 // ELEMENT[kind] or columns % 8 or not 8 <= columns <= 256:
        d.refuse("this shape is not modelled")
    acc = d.destinations(i.operands[0], "b32")
    d.sources(i.operands[0], "b32")
    count = columns // (2 if d_type == "f32" else 4)
    if len(acc) != count:
        d.refuse(f"expected {count} registers of D, got {len(acc)}")
    in_registers = isinstance(i.operands[1], Vector)
    a = d.sources(i.operands[1], "b32") if in_registers else [d.source(i.operands[1], "b64")]
    b = d.source(i.operands[2], "b64")
    scale, negated = d.predicate(i.operands[3])
    factors = [d.immediate(x) for x in i.operands[4:6]]
    majors = [d.immediate(x) != 0 for x in i.operands[6:]]
    # Only types of 2 bytes have the transposition operands (imm-trans-a, imm-trans-b).
    if any(x not in (1, -1) for x in factors) or len(majors) != (
        0 if kind == "tf32" else 1 if in_registers else 2
    ):
        d.refuse(
            "wgmma: expected imm-scale-a and imm-scale-b of 1 or -1, and the transposition operands of these types"
        )
    majors = majors or [False, False]
    sign = factors[0] * factors[1]
    touched = acc + a if in_registers else acc
    descriptors = [b] if in_registers else [b, *a]

    def multiply(w: Warp, lanes: int) -> None:
        if w.written_since_fence(touched) and "wgmma.fence" not in w.machine.assume:
            w.fail("registers of this wgmma were written after the last wgmma.fence")
        if in_registers and not w.flight.keys().isdisjoint(a):
            w.fail("A in registers is the accumulator of a wgmma in flight")
        if w.unknown[scale]:
            w.fail(
                f"scale-d is undefined: it depends on a value that nothing has written yet (lanes {w.unknown[scale]:08x})"
            )
        add = (w.regs[scale] ^ FULL * negated) & 1 == 1
        right, b_unknown, b_check = _load_operand(w, uniform(w, b, lanes), columns, majors[-1], kind)
        checks = [b_check]
        if in_registers:
            left = _a_matrix(np.stack([w.regs[s] for s in a]), kind)
            rows = _unknown_rows(w, a) if any(w.unknown[s] for s in a) else None
        else:
            whole, missing, check = _load_operand(w, uniform(w, a[0], lanes), 64, majors[0], kind)
            first = w.number % 4 * 16
            left = whole[first : first + 16]
            rows = None if missing is None else missing[first : first + 16]
            checks.append(check)
        _put_product(w, acc, acc, sign * left, right.T, add, rows, b_unknown, d_type)
        w.accumulate(acc)
        number = w.issuer.advance()
        w.operands += [(w.wgmma_group, number, check) for check in checks]
        _agree(w, number, [w.regs[s][0] for s in descriptors])

    return aligned(multiply)
