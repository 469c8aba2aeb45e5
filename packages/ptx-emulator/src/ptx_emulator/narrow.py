"""Floating-point types of 8, 6 and 4 bits: their values, and the conversions of `cvt`.

Source: PTX ISA, "Alternate Floating-Point Data Formats", `cvt`. No conversion of this module was compared with a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ptx_emulator import floats
from ptx_emulator.errors import PtxError
from ptx_emulator.lanes import Array


@dataclass(frozen=True)
class Format:
    """A type with a sign, an exponent and a mantissa.

    Attributes:
        exponent, mantissa: their bits.
        specials: codes of positive infinity and NaN at the upper end: 0, 1 (NaN only) or a whole exponent.
        width: bits that a value occupies where values are packed; those above its own are zero.
    """

    exponent: int
    mantissa: int
    specials: int
    width: int = 8

    @cached_property
    def values(self) -> Array:
        """The value of each code as fp64."""
        codes = np.arange(1 << 1 + self.exponent + self.mantissa)
        sign, rest = codes >> self.exponent + self.mantissa, codes & (1 << self.exponent + self.mantissa) - 1
        exponent, fraction = rest >> self.mantissa, rest & (1 << self.mantissa) - 1
        bias = (1 << self.exponent - 1) - 1
        low = np.ldexp(fraction.astype(np.float64), 1 - bias - self.mantissa)
        high = np.ldexp(1 + np.ldexp(fraction.astype(np.float64), -self.mantissa), exponent - bias)
        found = np.where(exponent == 0, low, high)
        first = (1 << self.exponent + self.mantissa) - self.specials
        nan = rest >= first
        if self.specials > 1:
            found = np.where(rest == first, np.inf, found)
            nan &= rest != first
        return np.where(sign == 1, -1.0, 1.0) * np.where(nan, np.nan, found)

    def codes(self, x: Array, relu: bool) -> Array:
        """Round to nearest even, with `.satfinite`: numbers beyond the largest one become that. Returns uint8."""
        count = (1 << self.exponent + self.mantissa) - self.specials
        finite = self.values[:count]
        y = np.minimum(np.abs(x.astype(np.float64)), finite[-1])
        middles = (finite[1:] + finite[:-1]) / 2
        low, high = np.searchsorted(middles, y, "left"), np.searchsorted(middles, y, "right")
        code = np.where(low % 2 == 0, low, high)  # a tie lies between `low` and `high`: the even code
        negative = np.signbit(x)
        if relu:
            code, negative = np.where(negative, 0, code), np.zeros_like(negative)
        code = code | negative << self.exponent + self.mantissa
        # Types without NaN get the largest number.
        nan = (1 << self.exponent + self.mantissa) - 1
        return np.where(np.isnan(x), nan, code).astype(np.uint8)


FORMATS = {
    "e4m3": Format(4, 3, 1),
    "e5m2": Format(5, 2, 4),
    "e2m3": Format(2, 3, 0),
    "e3m2": Format(3, 2, 0),
    "e2m1": Format(2, 1, 0, 4),
}


def _scales(x: Array, up: bool) -> Array:
    """Round to ue8m0, powers of 2, towards zero or up. Returns uint8."""
    if np.signbit(x[~np.isnan(x)]).any():
        raise PtxError("cvt of a negative number to .ue8m0 is not modelled")
    fraction, exponent = np.frexp(np.where(np.isfinite(x) & (x > 0), x, 1.0))
    code = exponent - 1 + 127 + (up & (fraction > 0.5))
    code = np.where(x == 0, 0, np.where(np.isinf(x), 254, np.clip(code, 0, 254)))
    return np.where(np.isnan(x), 255, code).astype(np.uint8)


def _halves(words: Array, kind: str) -> tuple[Array, Array]:
    """Return the upper and the lower element of packed pairs as fp64."""
    values = floats.bf16_values if kind == "bf16x2" else lambda bits: bits.view(np.float16)
    high, low = ((words >> np.uint32(n)).astype(np.uint16) for n in (16, 0))
    return values(high).astype(np.float64), values(low).astype(np.float64)


Conversion = tuple[Callable[..., Array], str, tuple[str, ...]]


def conversion(modifiers: tuple[str, ...]) -> Conversion | None:
    """Return a conversion from or to a pair of a type of this module: the function, and the types of its registers.

    None: `cvt` with these modifiers has no such type.

    Raises:
        PtxError: the conversion is not modelled.
    """
    *how, result, source = modifiers
    relu = "relu" in how
    known = {name + "x2" for name in (*FORMATS, "ue8m0", "s2f6")}
    if result not in known and source not in known:
        return None
    refused = PtxError(f"cvt.{'.'.join(modifiers)} is not modelled")
    if SCALED in how:
        return _scaled(how, result, source, refused)
    if "s2f6x2" in (result, source):
        raise refused
    if source in known:
        if how not in (["rn"], ["rn", "relu"]) or (relu and source == "ue8m0x2"):
            raise refused
        return _widening(source, result, relu, refused)
    pair = "b8" if result == "e2m1x2" else "b16"
    width = 4 if result == "e2m1x2" else 8
    if result == "ue8m0x2":
        if how not in (["rz"], ["rp"], ["rz", "satfinite"], ["rp", "satfinite"]):
            raise refused
        encode: Callable[[Array], Array] = lambda x: _scales(x, how[0] == "rp")
    else:
        if how not in (["rn", "satfinite"], ["rn", "satfinite", "relu"]):
            raise refused
        encode = lambda x: FORMATS[result[:-2]].codes(x, relu)
    out = np.uint8 if pair == "b8" else np.uint16

    def packed(high: Array, low: Array) -> Array:
        return (encode(high).astype(np.uint16) << np.uint16(width) | encode(low)).astype(out)

    if source == "f32":
        return packed, pair, ("f32", "f32")
    if source == ("bf16x2" if result == "ue8m0x2" else "f16x2"):
        return lambda words: packed(*_halves(words, source)), pair, ("b32",)
    raise refused


SCALED = "scaled::n2::ue8m0"  # the result is multiplied by a power of 2, one for each of the pair


def _scaled(how: list[str], result: str, source: str, refused: PtxError) -> Conversion:
    """Return a conversion to bf16x2 that multiplies by powers of 2. s2f6 is an integer of 8 bits in units of 1/64."""
    if (
        result != "bf16x2"
        or source == "ue8m0x2"
        or how[0] != "rn"
        or set(how[1:]) - {SCALED, "satfinite", "relu"}
    ):
        raise refused
    width = FORMATS[source[:-2]].width if source != "s2f6x2" else 8
    values = np.arange(256).astype(np.int8) / 64 if source == "s2f6x2" else FORMATS[source[:-2]].values
    largest = np.float32(float.fromhex("0x1.fep127"))

    def element(code: Array, scale: Array) -> Array:
        exact = np.ldexp(values[code & len(values) - 1], scale.astype(np.int32) - 127)
        x = np.where(scale == 255, np.nan, exact).astype(np.float32)
        if "relu" in how:
            x = np.where(np.signbit(x) & ~np.isnan(x), np.float32(0), x)
        if "satfinite" in how:
            x = np.where(np.isnan(x), x, np.clip(x, -largest, largest))
        return floats.bf16_bits(x)

    def pair(codes: Array, scales: Array) -> Array:
        high = element(codes >> width, scales >> 8)
        return high << np.uint32(16) | element(codes & (1 << width) - 1, scales & 255)

    return pair, "b32", ("b8" if width == 4 else "b16", "b16")


def _widening(source: str, result: str, relu: bool, refused: PtxError) -> Conversion:
    """Return a conversion to f16x2, or of ue8m0x2 to bf16x2. Both are exact."""
    if source == "ue8m0x2":
        if result != "bf16x2":
            raise refused

        def scale(code: Array) -> Array:
            bits = np.where(code == 0, 0x0040, code.astype(np.uint32) << np.uint32(7))
            return np.where(code == 255, np.uint32(0x7FFF), bits).astype(np.uint32)

        return lambda x: scale(x >> 8) << np.uint32(16) | scale(x & 255), "b32", ("b16",)
    if result != "f16x2":
        raise refused
    form = FORMATS[source[:-2]]

    def half(code: Array) -> Array:
        x = form.values[code & len(form.values) - 1].astype(np.float32)
        x = np.where(np.signbit(x) & ~np.isnan(x), np.float32(0), x) if relu else x
        return floats.f16_bits(x)

    mask = (1 << form.width) - 1
    return (
        lambda x: half(x >> form.width & mask) << np.uint32(16) | half(x & mask),
        "b32",
        ("b8" if form.width == 4 else "b16",),
    )
