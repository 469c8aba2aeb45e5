"""A case, its limit, and the table of all cases."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from helpers.emulator.ptx import lanewise

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Bits:
    """The outputs have the same bits."""

    def __str__(self) -> str:
        return "equal"


@dataclass(frozen=True)
class Near:
    """fp32 outputs within ``ulps`` representable numbers, or within an ``absolute`` difference. NaN only equals NaN."""

    ulps: int
    absolute: float = 0.0

    def __str__(self) -> str:
        return f"{self.ulps} ulp" + (f" or {self.absolute:.1e}" if self.absolute else "")


@dataclass(frozen=True)
class Norm:
    """The norm of the difference is at most ``relative`` times the norm of the recorded output."""

    relative: float

    def __str__(self) -> str:
        return f"norm {self.relative:.1e}"


Limit = Bits | Near | Norm


@dataclass(frozen=True)
class Case:
    """``run`` returns the outputs by name. The fixtures of a ``group`` share one file. ``arch``: the only architecture that has the
    instructions of the case; None: every one from sm_90a on."""

    group: str
    name: str
    run: Callable[[], Outputs]
    limit: Limit = Bits()
    arch: str | None = None

    def runs_on(self, arch: str) -> bool:
        """Whether a GPU of this architecture has the instructions of the case."""
        return self.arch is None or self.arch == arch


#: All cases by "group/name".
CASES: dict[str, Case] = {}

#: Keys of cases that no GPU has executed yet. After `calibrate.py record --missing`, take them off this list.
TO_BE_RECORDED: set[str] = set()


def add(
    group: str,
    name: str,
    function: Callable[[], Outputs],
    limit: Limit = Bits(),
    arch: str | None = None,
) -> None:
    """Register a case. Its name must be new in its group."""
    key = f"{group}/{name}"
    assert key not in CASES, key
    CASES[key] = Case(group, name, function, limit, arch)


def instruction(group: str, text: str, result: str, *operands: np.ndarray, limit: Limit = Bits()) -> None:
    """Register a case of one instruction, one thread for each element of the operands; arguments as for `ptx.lanewise`.
    The name is the text without operands in braces."""
    name = " ".join(re.sub(r"\{+\w\}+,?|;", "", text).split())
    kind = (
        np.float32 if result == "f32" else {"b16": np.int16, "b64": np.int64, "f64": np.float64}.get(result)
    )

    def outputs() -> Outputs:
        found = lanewise(text, result, *operands)
        return {"d": torch.from_numpy(found.view(kind or np.int32).copy())}

    add(group, name, outputs, limit)
