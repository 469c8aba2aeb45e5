"""Integer and fp32 arithmetic with exactly defined results."""

from __future__ import annotations

from helpers.emulator.cases.inputs import floats, words
from helpers.emulator.cases.registry import instruction

INTEGERS = [
    "add.s32", "sub.s32", "mul.lo.s32", "mul.hi.s32", "mul.hi.u32", "min.s32", "max.s32", "min.u32", "max.u32",
    "min.relu.s32", "max.relu.s32", "and.b32", "or.b32", "xor.b32", "shl.b32", "shr.u32", "shr.s32", "div.s32", "div.u32",
    "rem.s32", "rem.u32",
]  # fmt: skip
for name in INTEGERS:
    instruction("arithmetic", f"{name} {{d}}, {{0}}, {{1}};", "b32", *words(2))
for name in ("neg.s32", "abs.s32", "not.b32", "popc.b32", "clz.b32", "brev.b32"):
    instruction("arithmetic", f"{name} {{d}}, {{0}};", "b32", *words(1))
for name in (
    "bfe.s32 {d}, {0}, {1}, {2};", "bfe.u32 {d}, {0}, {1}, {2};", "prmt.b32 {d}, {0}, {1}, {2};",
    "mad.lo.s32 {d}, {0}, {1}, {2};", "mad.hi.s32 {d}, {0}, {1}, {2};", "lop3.b32 {d}, {0}, {1}, {2}, 0x96;",
    "lop3.b32 {d}, {0}, {1}, {2}, 0xD8;", "shf.l.wrap.b32 {d}, {0}, {1}, {2};", "shf.r.wrap.b32 {d}, {0}, {1}, {2};",
    "shf.l.clamp.b32 {d}, {0}, {1}, {2};", "shf.r.clamp.b32 {d}, {0}, {1}, {2};",
):  # fmt: skip
    instruction("arithmetic", name, "b32", *words(3))
for name in ("mul.wide.s32", "mul.wide.u32"):
    instruction("arithmetic", f"{name} {{d}}, {{0}}, {{1}};", "b64", *words(2))
for name in ("add.s64", "mul.lo.s64", "mul.hi.u64", "min.s64"):
    instruction("arithmetic", f"{name} {{d}}, {{0}}, {{1}};", "b64", *words(2, 8))
for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    for kind in ("s32", "u32"):
        instruction("arithmetic", f"setp.{name}.{kind} {{d}}, {{0}}, {{1}};", "pred", *words(2))

for name in ("add", "sub", "mul", "min", "max"):
    for ftz in ("", ".ftz"):
        instruction("arithmetic", f"{name}{ftz}.f32 {{d}}, {{0}}, {{1}};", "f32", *floats(2))
for ftz in ("", ".ftz"):
    instruction("arithmetic", f"fma.rn{ftz}.f32 {{d}}, {{0}}, {{1}}, {{2}};", "f32", *floats(3))
    instruction("arithmetic", f"fma.rn{ftz}.sat.f32 {{d}}, {{0}}, {{1}}, {{2}};", "f32", *floats(3))
    instruction("arithmetic", f"div.rn{ftz}.f32 {{d}}, {{0}}, {{1}};", "f32", *floats(2))
    for name in ("rcp.rn", "sqrt.rn", "neg", "abs"):
        instruction("arithmetic", f"{name}{ftz}.f32 {{d}}, {{0}};", "f32", *floats(1))
for name in ("add", "mul"):
    instruction("arithmetic", f"{name}.ftz.sat.f32 {{d}}, {{0}}, {{1}};", "f32", *floats(2))
instruction("arithmetic", "mul.rn.bf16x2 {d}, {0}, {1};", "b32", *words(2))
for name in (
    "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan", "lt.ftz",
):  # fmt: skip
    instruction("arithmetic", f"setp.{name}.f32 {{d}}, {{0}}, {{1}};", "pred", *floats(2))
