"""Inputs of the cases: edge values in all pairs, and random numbers from fixed seeds."""

from __future__ import annotations

import itertools

import numpy as np
import torch


def random(seed: str) -> np.random.Generator:
    """A new generator whose seed is the bytes of a string."""
    return np.random.default_rng(list(seed.encode()))


def crossed(edges: np.ndarray, more: np.ndarray, operands: int) -> list[np.ndarray]:
    """All pairs of edges for the first two operands, followed by the values of ``more``. A third operand cycles through the
    edges. The length is cut to a multiple of 32."""
    pairs = np.array(list(itertools.product(range(len(edges)), repeat=min(operands, 2)))).T
    picks = [edges[p] for p in pairs]
    if operands == 3:
        picks.append(edges[np.arange(len(picks[0])) * 7 % len(edges)])
    found = [np.concatenate([p, m]) for p, m in zip(picks, more)]
    return [x[: len(x) // 32 * 32] for x in found]


def words(operands: int, size: int = 4) -> list[np.ndarray]:
    """Unsigned integers of ``size`` bytes, 4 or 8, one array for each operand."""
    edges = np.array([0, 1, 5, 31, 32, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint64)
    if size == 8:
        edges = np.concatenate([edges, np.array([1 << 63, (1 << 64) - 1, (1 << 63) - 1], np.uint64)])
    more = random("words").integers(0, (1 << 64) - 1, (operands, 64), np.uint64)
    more >>= random("shifts").integers(0, 8 * size, more.shape, np.uint64)
    return crossed(edges.astype(f"u{size}"), more.astype(f"u{size}"), operands)


def floats(operands: int) -> list[np.ndarray]:
    """fp32 numbers, one array for each operand: zeros, infinities, subnormals and a NaN among the edges."""
    edges = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, 1e-42, -3e-39, 3e38, -3.4e38, 1.1754944e-38, 0.3333333]
    edges = np.array([*edges, np.nan], np.float32)
    edges[-1:].view(np.uint32)[0] = 0xFF812345  # a NaN that no instruction would compute
    r = random("floats")
    more = r.standard_normal((operands, 87)) * np.exp2(r.integers(-20, 20, (operands, 87)))
    return crossed(edges, more.astype(np.float32), operands)


def matrix(rows: int, columns: int, dtype: torch.dtype, whole: bool, seed: str) -> torch.Tensor:
    """[rows, columns] of ``dtype``: integers from -8 to 8 if ``whole``, else normally distributed."""
    r = random(seed)
    x = r.integers(-8, 9, (rows, columns)) if whole else r.standard_normal((rows, columns))
    return torch.from_numpy(x.astype(np.float32)).to(dtype)
