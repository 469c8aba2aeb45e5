"""mma.sync: one instruction on fragments."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from helpers.emulator.cases.inputs import random
from helpers.emulator.cases.registry import Outputs, add
from helpers.emulator.ptx import run


def mma(shape: str, d: str, kind: str, whole: bool, special: bool = False) -> Outputs:
    """One mma.sync. The fragments hold integers from -8 to 8 if ``whole``, with exact sums, else normally distributed numbers.
    ``special`` adds infinities, NaN, and very small and large numbers."""
    n, k = {"k4": (1, 4), "k8": (2, 8), "k16": (4, 16)}[shape[5:]]
    count_a, count_b = (2 * max(n // 2, 1), max(n // 2, 1)) if kind != "tf32" else (2 * (k // 4), k // 4)
    count_c = 4 if d == "f32" else 2
    r = random(f"mma {shape} {d} {kind} {whole}")
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}[kind]

    def registers(count: int, dtype: torch.dtype) -> torch.Tensor:
        elements = 4 // torch.zeros((), dtype=dtype).element_size()
        x = r.integers(-8, 9, (count, 32 * elements)) if whole else r.standard_normal((count, 32 * elements))
        if special:
            edges = [0.0, np.inf, -np.inf, np.nan, 1e-39, 3e38]
            x = np.where(r.random(x.shape) < 0.06, r.choice(edges, x.shape), x)
        return torch.from_numpy(x.astype(np.float32)).to(dtype).view(torch.int32)

    a, b = registers(count_a, dtype), registers(count_b, dtype)
    c = registers(count_c, torch.float32 if d == "f32" else torch.float16)
    out = torch.zeros_like(c)
    loads, names, first = "", [], 10
    for q, count in enumerate((count_a, count_b, count_c)):
        loads += f"add.s64 %q2{q}, %q{q}, %q8;"
        loads += "".join(f"ld.global.b32 %r{first + i}, [%q2{q}+{128 * i}];" for i in range(count))
        names.append("{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}")
        first += count
    to = [f"%r{40 + i}" for i in range(count_c)]
    run(
        f"mul.wide.u32 %q8, %r0, 4; {loads} mma.sync.aligned.{shape}.row.col.{d}.{kind}.{kind}.{d} "
        f"{{{', '.join(to)}}}, {', '.join(names)}; add.s64 %q23, %q3, %q8;"
        + "".join(f"st.global.b32 [%q23+{128 * i}], {x};" for i, x in enumerate(to)),
        a, b, c, out,
    )  # fmt: skip
    return {"d": out.view(torch.float32 if d == "f32" else torch.float16)}


for shape, d, kind in (
    ("m16n8k8", "f32", "bf16"), ("m16n8k16", "f32", "bf16"), ("m16n8k8", "f32", "f16"), ("m16n8k16", "f32", "f16"),
    ("m16n8k8", "f16", "f16"), ("m16n8k16", "f16", "f16"), ("m16n8k4", "f32", "tf32"), ("m16n8k8", "f32", "tf32"),
):  # fmt: skip
    name = f"mma.{shape}.{d}.{kind}"
    add("matrices", f"{name} of integers", partial(mma, shape, d, kind, whole=True))
    add("matrices", name, partial(mma, shape, d, kind, whole=False))
    special = partial(mma, shape, d, kind, whole=True, special=True)
    add("matrices", f"{name} of integers, infinities and NaN", special)
