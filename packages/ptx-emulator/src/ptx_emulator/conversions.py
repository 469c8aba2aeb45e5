"""`cvt`: conversions between types, except for those of `narrow`.

Source: PTX ISA, "Data Movement and Conversion Instructions: cvt".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx_emulator import floats, narrow
from ptx_emulator.arithmetic import Function, elementwise, fp32, saturated
from ptx_emulator.decode import DTYPES, Decoder, Execute, handler
from ptx_emulator.lanes import Array
from ptx_emulator.machine import Warp
from ptx_emulator.memory import UNSIGNED
from ptx_emulator.parser import SIZES, Instruction

#: Roundings to an integral value.
_INTEGRAL: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _from_float(d: Decoder, modifiers: tuple[str, ...], result: str) -> Callable[[Array], Array]:
    """Build a conversion of floats to integers. NaN becomes 0, or for 64 bits the top bit alone."""
    name = next((x for x in modifiers if x in _INTEGRAL), None)
    if name is None:
        d.refuse("cvt of a float to an integer: expected .rni, .rzi, .rmi or .rpi")
    info = np.iinfo(DTYPES[result])
    nan = -(2.0**63) if result == "s64" else 2.0**63 if result == "u64" else 0.0

    def convert(x: Array) -> Array:
        y = np.nan_to_num(_INTEGRAL[name](x.astype(np.float64)), nan=nan, posinf=np.inf, neginf=-np.inf)
        clipped = [
            min(max(int(v) if np.isfinite(v) else (info.max if v > 0 else info.min), info.min), info.max)
            for v in y
        ]
        return np.array(clipped, DTYPES[result])

    return convert


#: Roundings of floating-point results.
_ROUNDED: dict[str, Function] = {
    "rn": floats.nearest32, "rz": floats.cut32, "rm": floats.down32, "rp": floats.up32,
}  # fmt: skip


@handler("cvt")
def _cvt(d: Decoder, i: Instruction) -> Execute:
    if len(i.modifiers) < 2:
        d.refuse("cvt: expected the types of the result and of the source")
    if (found := narrow.conversion(i.modifiers)) is not None:
        function, result, kinds = found
        return elementwise(d, i, function, kinds[0], result, kinds)
    if i.modifiers[-1] == "f32" and i.modifiers[-2] in _NARROW:
        return _cvt_narrow(d, i)
    *rest, result, kind = i.modifiers
    to, source = d.destination(i.operands[0], result, wider=True), d.source(i.operands[1], kind, wider=True)
    size, width = SIZES[kind], d.size_of(i.operands[0])
    d.only(rest, "rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat")
    rounding = next((m for m in rest if m in _ROUNDED), None)
    convert: Function
    if result[0] in "us" and kind[0] in "us":
        d.only(rest, "sat")
        info = np.iinfo(DTYPES[result])

        def integers(x: Array) -> Array:
            if "sat" in rest:
                x = np.array([min(max(v, info.min), info.max) for v in x.tolist()], DTYPES[result])
            return x.astype(DTYPES[result])

        convert = integers
    elif result[0] in "us" and kind in ("f16", "f32", "f64"):
        d.only(rest, *_INTEGRAL, "ftz", "sat")  # the result saturates with and without .sat
        whole = _from_float(d, tuple(rest), result)
        convert = (lambda x: whole(floats.flush(x))) if "ftz" in rest and kind == "f32" else whole
    elif kind[0] in "us" and result in ("f16", "f32", "f64"):
        d.only(rest, *_ROUNDED)
        if rounding is None:
            d.refuse(f"cvt of .{kind} to .{result}: expected .rn, .rz, .rm or .rp")
        if result == "f32":
            convert = lambda x: _ROUNDED[rounding](x.astype(np.longdouble))
        elif rounding == "rn":
            convert = lambda x: x.astype(DTYPES[result])
        else:
            d.refuse(f"cvt.{rounding} of .{kind} to .{result} is not modelled")
    elif kind == result == "f32":
        d.only(rest, *_INTEGRAL, "ftz", "sat")
        integral = next((_INTEGRAL[m] for m in rest if m in _INTEGRAL), lambda x: x)
        convert = fp32(integral, "ftz" in rest)
        if "sat" in rest:
            unlimited = convert
            convert = lambda x: saturated(unlimited(x))
    elif (kind, result) in (("f32", "f64"), ("f64", "f32"), ("f16", "f32")):
        d.only(rest, *(_ROUNDED if result == "f32" and kind == "f64" else ("rn",)), "ftz", "sat")
        ftz = "ftz" in rest

        def reals(x: Array) -> Array:
            x = floats.flush(x) if ftz and kind == "f32" else x
            y = _ROUNDED[rounding or "rn"](x) if kind == "f64" else x.astype(DTYPES[result])
            y = floats.canonical(y) if kind == "f16" else y
            y = floats.flush(y) if ftz and result == "f32" else y
            return (
                np.where(y > 0, np.minimum(y, DTYPES[result](1)), DTYPES[result](0)) if "sat" in rest else y
            )

        convert = reals
    elif (kind, result) == ("bf16", "f32"):
        d.only(rest)
        convert = floats.bf16_values
    else:
        d.refuse(f"cvt of .{kind} to .{result} is not modelled")
    view = DTYPES.get(kind, np.uint16)
    unsigned = UNSIGNED[size]
    extended = DTYPES[f"{'s' if result[0] == 's' else 'u'}{8 * width}"]

    def converted(w: Warp, lanes: int) -> None:
        found = convert(w.regs[source].astype(unsigned).view(view))
        if found.dtype.kind == "f" and found.dtype.itemsize < width:
            found = found.view(UNSIGNED[found.dtype.itemsize])
        if found.dtype.itemsize < width:
            found = found.astype(extended)
        w.put(to, found.view(UNSIGNED[width]), w.unknown[source], lanes)

    return converted


#: Conversions of fp32 to the bits of narrower types, by type and rounding.
_NARROW: dict[str, dict[str, Function]] = {
    "bf16": {"rn": floats.bf16_bits, "rz": floats.bf16_bits_towards_zero},
    "f16": {
        "rn": floats.f16_bits, "rz": floats.f16_bits_towards_zero, "rm": floats.f16_bits_down, "rp": floats.f16_bits_up,
    },
    "tf32": {"rn": floats.tf32_bits, "rna": floats.tf32_bits_away, "rz": floats.tf32_bits_towards_zero},
}  # fmt: skip
_NARROW |= {f"{kind}x2": {how: _NARROW[kind][how] for how in ("rn", "rz")} for kind in ("bf16", "f16")}
#: The largest number of each of these types.
_LARGEST = {"bf16": float.fromhex("0x1.fep127"), "f16": 65504.0, "tf32": float.fromhex("0x1.ffcp127")}


def _cvt_narrow(d: Decoder, i: Instruction) -> Execute:
    """Build `cvt` of fp32, one or a pair, to a narrower type.

    With `.relu` negative numbers become 0, and NaN canonical. With `.satfinite` numbers beyond the largest one become that.
    """
    *how, kind, _ = i.modifiers
    d.only(how[1:], "relu", "satfinite", *(("ftz", "sat") if kind == "f16" else ()))
    if not how or how[0] not in _NARROW[kind]:
        d.refuse(f"cvt: this rounding to .{kind} is not modelled")
    function = _NARROW[kind][how[0]]
    largest = np.float32(_LARGEST[kind.removesuffix("x2")])

    def convert(x: Array) -> Array:
        if "ftz" in how:
            x = floats.flush(x)
        if "sat" in how:
            x = saturated(x)
        if "relu" in how:
            x = np.where(x < 0, np.float32(0), x) + np.float32(0)
        if "satfinite" in how:
            x = np.where(np.isnan(x), x, np.clip(x, -largest, largest))
        return function(x)

    if kind.endswith("x2"):
        pair = lambda high, low: convert(high) << np.uint32(16) | convert(low)
        return elementwise(d, i, pair, "b32", kinds=("f32", "f32"))
    if kind == "tf32":
        return elementwise(d, i, convert, "b32", kinds=("f32",))
    return elementwise(d, i, lambda x: convert(x).astype(np.uint16), "b16", kinds=("f32",))
