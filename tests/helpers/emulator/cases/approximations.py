"""Approximate instructions.

Their limits are within the errors that the PTX ISA documents, and as tight as the recorded outputs allow: ulps of the result, or
an absolute difference. The emulator rounds the exact result.
"""

from __future__ import annotations

import numpy as np

from helpers.emulator.cases.inputs import random
from helpers.emulator.cases.registry import Near, instruction

ENDS = np.array([
    0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -1e-42, 1e38, -1e38, 1.1754944e-38, 200, -200, 127.9, 1, -1, 3e-39,
])  # fmt: skip
ENDS = np.resize(ENDS.astype(np.float32), 32)


def points(low: float, high: float, signed: bool = False) -> np.ndarray:
    """fp32 numbers of magnitude 2^low to 2^high, both signs if ``signed``, after the special values of `ENDS`."""
    r = random(f"{low} {high}")
    x = np.exp2(r.uniform(low, high, 992)) * (r.choice([-1, 1], 992) if signed else 1)
    return np.concatenate([ENDS, x.astype(np.float32)])


for name, limit, x in (
    ("ex2.approx.ftz", Near(2), points(-10, 7, True)), ("ex2.approx", Near(2), points(-10, 7, True)),
    ("lg2.approx.ftz", Near(1, 2.0**-22), points(-60, 60)), ("lg2.approx", Near(1, 2.0**-22), points(-2, 2)),
    ("rcp.approx.ftz", Near(1), points(-120, 120, True)), ("rsqrt.approx.ftz", Near(1), points(-120, 120)),
    ("sqrt.approx.ftz", Near(1), points(-120, 120)), ("tanh.approx", Near(128), points(-12, 4, True)),
    ("sin.approx.ftz", Near(0, 2.0**-21), points(-10, 1.6, True)), ("cos.approx.ftz", Near(0, 2.0**-21), points(-10, 1.6, True)),
):  # fmt: skip
    if name[:3] in ("sin", "cos"):  # PTX documents their error from -pi to pi
        x = np.where(np.abs(x) < 3.2, x, np.float32(0))
    instruction("arithmetic", f"{name}.f32 {{d}}, {{0}};", "f32", x, limit=limit)
