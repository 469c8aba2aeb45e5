"""Atomic operations: atom and red, in global and shared memory."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import torch

from helpers.emulator.cases.inputs import floats, words
from helpers.emulator.cases.registry import Outputs, add
from helpers.emulator.ptx import run
from helpers.emulator.tensor_maps import filled


def atomic(space: str, operation: str, kind: str, given: torch.Tensor, operand: torch.Tensor) -> Outputs:
    """`atom` in ``space``, "global" or "shared", one thread for each element: memory before and after it."""
    size = given.element_size()
    x, old = given.clone(), torch.zeros_like(given)
    where = {"global": "%q10", "shared": "%r3"}[space]
    # Pairs of halves use b32 registers; fp32 and fp64 have their own registers.
    r = {"f32": "%f", "f64": "%e"}.get(kind, {2: "%h", 4: "%r", 8: "%q"}[size])
    move = kind if kind in ("f32", "f64") else f"b{8 * size}"
    there = {2: 2, 4: 40, 8: 40}[size] if r in ("%h", "%r", "%q") else 2
    operands = f"{r}{there + 1}, {r}{there + 2}" if operation == "cas" else f"{r}{there + 1}"
    modifiers = f"{operation}.noftz" if kind[:3] in ("f16", "bf1") else operation
    run(
        f"""
        mov.b32 %r1, shared_bytes; mad.lo.s32 %r3, %r0, {size}, %r1; mul.wide.u32 %q8, %r0, {size};
        add.s64 %q10, %q0, %q8; add.s64 %q11, %q1, %q8; add.s64 %q12, %q2, %q8;
        ld.global.{move} {r}{there + 1}, [%q11]; ld.global.{move} {r}{there + 2}, [%q10]; st.shared.{move} [%r3], {r}{there + 2}; bar.sync 0;
        atom.{space}.{modifiers}.{kind} {r}{there}, [{where}], {operands}; st.global.{move} [%q12], {r}{there};
        {f"bar.sync 0; ld.shared.{move} {r}{there}, [%r3]; st.global.{move} [%q10], {r}{there};" if space == "shared" else ""}
        """,
        x, operand, old, threads=len(x), shared=8 * len(x),
    )  # fmt: skip
    return {"now": x, "before": old}


def integers(kind: str) -> list[torch.Tensor]:
    """Two tensors of 128 integers as wide as ``kind``."""
    size = 8 if kind.endswith("64") else 4
    return [torch.from_numpy(x[:128].view(f"i{size}").copy()) for x in words(2, size)]


for space, (operation, kind) in itertools.product(
    ("global", "shared"),
    [
        ("add", "u32"), ("min", "s32"), ("max", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"), ("exch", "b32"),
        ("cas", "b32"), ("inc", "u32"), ("dec", "u32"), ("add", "u64"), ("max", "s64"), ("exch", "b64"),
    ],
):  # fmt: skip
    add(
        "memory", f"atom.{space}.{operation}.{kind}",
        lambda s=space, o=operation, k=kind: atomic(s, o, k, *integers(k)),
    )  # fmt: skip
HALVES_OF = {"f16": torch.float16, "bf16": torch.bfloat16}


def added(space: str, kind: str) -> Outputs:
    """`atom.add` of floats: one element for each thread, or two of f16x2 and bf16x2."""
    x, y = (torch.from_numpy(v[:192].copy()) for v in floats(2))
    if kind == "f64":
        return atomic(space, "add", kind, x.double(), y.double())
    if kind != "f32":
        dtype = HALVES_OF[kind.removesuffix("x2")]
        bits = torch.int32 if kind.endswith("x2") else torch.int16
        x, y = x.to(dtype).view(bits), y.to(dtype).view(bits)
    return atomic(space, "add", kind, x, y)


for space, kind in itertools.product(("global", "shared"), ("f32", "f64", "f16x2", "bf16x2", "f16", "bf16")):
    add("memory", f"atom.{space}.add.{kind}", partial(added, space, kind))
for space in ("global", "shared"):
    add(
        "memory", f"atom.{space}.cas.b16",
        lambda s=space: atomic(s, "cas", "b16", *(torch.from_numpy(v[:128].astype(np.uint16).view(np.int16)) for v in words(2))),
    )  # fmt: skip

RED = """
    mov.b32 %r1, shared_bytes; mul.wide.u32 %q8, %r0, 4; add.s64 %q9, %q0, %q8; add.s64 %q10, %q1, %q8; and.b32 %r2, %r0, 7;
    mul.wide.u32 %q11, %r2, 4; add.s64 %q11, %q2, %q11; mad.lo.s32 %r3, %r2, 4, %r1; ld.global.b32 %r4, [%q9]; mov.b32 %f4, %r4;
    st.shared.b32 [%r3], 0; bar.sync 0; red.<space>.<operation> [<where>], <r>4; bar.sync 0; ld.shared.b32 %r5, [%r3];
    st.global.b32 [%q10], %r5;
"""


def reduction(space: str, operation: str) -> Outputs:
    """`red` on eight words by four threads each. The words of global memory start with values, those of shared memory with 0."""
    real = operation.endswith("f32")
    a = np.arange(1, 33, dtype=np.float32) if real else words(2)[0][40:72]
    x, y = torch.from_numpy(a.view(np.int32).copy()), torch.zeros(32, dtype=torch.int32)
    z = torch.from_numpy(words(2)[1][40:48].view(np.int32).copy()) * (not real)
    values = {"where": "%q11" if space == "global" else "%r3", "r": "%f" if real else "%r"}
    run(filled(RED, space=space, operation=operation, **values), x, y, z, shared=32)
    return {"shared": y, "global": z}


for space, operation in itertools.product(
    ("global", "shared"), ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "add.f32", "relaxed.gpu.add.s32")
):  # fmt: skip
    add("memory", f"red.{space}.{operation}", partial(reduction, space, operation))
