"""cvt: fp32 to narrower floats and integers, and back."""

from __future__ import annotations

import itertools

import numpy as np

from helpers.emulator.cases.inputs import random, words
from helpers.emulator.cases.registry import instruction


def conversions() -> np.ndarray:
    """fp32 numbers: ties and the ends of the range of each narrower type, fractions, infinities, NaN, random numbers."""
    steps = [1 + m * 2.0**-k for k in (8, 9, 11, 12) for m in (1, 3, 5)] + [1 + 2.0**-9 + 2.0**-20]
    ends = [65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 6.1e-5, 3.39e38, 3.4e38, 1e-40]
    whole = [0.5, 1.5, 2.5, 0.49999997, 2.0**31, 2.0**31 - 128, 2.0**32, 127.5, 128.5, 255.5, 1e20, 65536.5]
    x = np.array([0.0, np.inf, *steps, *ends, *whole], np.float32)
    r = random("conversions")
    more = (r.standard_normal(53) * np.exp2(r.integers(-16, 20, 53))).astype(np.float32)
    nan = np.array([0x7FC00000, 0xFF812345], np.uint32).view(np.float32)
    found = np.concatenate([x, -x, nan, more])
    return found[: len(found) // 32 * 32]


for name in ("rn.bf16", "rz.bf16", "rn.relu.bf16", "rn.f16", "rz.f16", "rn.relu.f16"):
    instruction("arithmetic", f"cvt.{name}.f32 {{d}}, {{0}};", "b16", conversions())
for name in ("rn.bf16x2", "rz.bf16x2", "rn.relu.bf16x2", "rn.f16x2", "rz.f16x2"):
    instruction(
        "arithmetic", f"cvt.{name}.f32 {{d}}, {{0}}, {{1}};", "b32", conversions(), conversions()[::-1]
    )
for name in ("rna.tf32", "rn.tf32"):
    instruction("arithmetic", f"cvt.{name}.f32 {{d}}, {{0}};", "b32", conversions())
for rounding, kind in itertools.product(("rni", "rzi", "rmi", "rpi"), ("s32", "u32")):
    instruction("arithmetic", f"cvt.{rounding}.{kind}.f32 {{d}}, {{0}};", "b32", conversions())
instruction("arithmetic", "cvt.rzi.ftz.s32.f32 {d}, {0};", "b32", conversions())
instruction("arithmetic", "cvt.rzi.s64.f32 {d}, {0};", "b64", conversions())
instruction("arithmetic", "cvt.f64.f32 {d}, {0};", "f64", conversions())
for kind in ("s32", "u32"):
    instruction("arithmetic", f"cvt.rn.f32.{kind} {{d}}, {{0}};", "f32", *words(1))
for kind in ("s8.s32", "u8.u32", "s16.s32", "u16.u32"):
    instruction("arithmetic", f"cvt.{kind} {{d}}, {{0}};", "b32", *words(1))
for kind in ("u8.s32", "s8.s32", "s16.s32", "u16.s32", "u8.u32"):
    instruction("arithmetic", f"cvt.sat.{kind} {{d}}, {{0}};", "b32", *words(1))
HALVES = np.concatenate(
    [np.arange(0, 1 << 16, 509), [0x7C00, 0xFC00, 0x7E01, 0x7F80, 0xFF80, 0x7FC1, 1, 0x8001]]
)
HALVES = HALVES[: len(HALVES) // 32 * 32].astype(np.uint16)
for kind in ("f16", "bf16"):
    instruction("arithmetic", f"cvt.f32.{kind} {{d}}, {{0}};", "f32", HALVES)
DOUBLES = np.nan_to_num(conversions()[:64], nan=7.0, posinf=np.inf, neginf=-np.inf).astype(np.float64)
DOUBLES = np.concatenate([DOUBLES * (1 + 2.0**-30), [1e300, -1e-300] * 16])
instruction("arithmetic", "cvt.rn.f32.f64 {d}, {0};", "f32", DOUBLES)
instruction("arithmetic", "cvt.rn.ftz.f32.f64 {d}, {0};", "f32", DOUBLES)
