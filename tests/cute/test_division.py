"""Fast division on the device, on ptx-emulator."""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: no kernel could be compiled")

from helpers.emulator.dsl_kernels import THREADS, compiled_division

import ptx_emulator

LARGEST = 2**31 - 1
DIVISORS = (
    1, 2, 3, 5, 7, 58, 64, 65, 127, 641, 2**16 - 1, 2**16, 2**16 + 1, 2**30 - 1, 2**30, 2**30 + 1, LARGEST - 1, LARGEST,
)  # fmt: skip


def test_quotients_are_exact():
    """Around every multiple of the divisor near 0, in the middle, and near 2^31, where an inexact reciprocal would show."""
    pairs = []
    for d in DIVISORS:
        multiples = (0, d, 2 * d, 2**30 // d * d, LARGEST // d * d, LARGEST)
        pairs += [(x + by, d) for x in multiples for by in (-1, 0, 1) if 0 <= x + by <= LARGEST]
    generator = torch.Generator().manual_seed(0)
    for _ in range(-len(pairs) % THREADS + 4 * THREADS):
        bits = torch.randint(1, 32, (2,), generator=generator).tolist()
        x, d = (int(torch.randint(2**b, (1,), generator=generator)) for b in bits)
        pairs.append((x, max(d, 1)))
    x, divisors = (torch.tensor(column, dtype=torch.int32) for column in zip(*pairs, strict=True))
    y = torch.full_like(x, -1)
    with ptx_emulator.device("sm_90a") as device:
        ptx_emulator.load(compiled_division("sm_90a"))(x, divisors, y)
    assert len(device.launches) == 1
    assert torch.equal(y, x // divisors)
