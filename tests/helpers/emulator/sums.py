"""Which rule a tensor core follows when it sums products: found by comparing D with what each candidate rule gives.

    PYTHONPATH=tests python -m helpers.emulator.sums FOLDER     of the fixtures that `calibrate.py` recorded on a GPU

A candidate aligns the products to the largest exponent among them, keeps some bits below it, sums exactly, and rounds to fp32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ptx_emulator.floats import cut32

K = 16
#: End of the names of the cases that multiply `factors`.
SUMS = "sums of products of all sizes"


class Rule(NamedTuple):
    """A candidate.

    Attributes:
        bits: kept below the largest exponent; None: all.
        rounds: whether the sum is rounded to nearest; else it is cut.
    """

    bits: int | None
    rounds: bool

    def __str__(self) -> str:
        kept = (
            "exact products"
            if self.bits is None
            else f"products cut {self.bits} bits below the largest exponent"
        )
        return f"{kept}, the sum {'rounded to nearest' if self.rounds else 'cut'}"


RULES = tuple(Rule(bits, rounds) for rounds in (True, False) for bits in (None, *range(22, 33)))


def factors(m: int = 128, n: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a [m, 16] and b [n, 16] in bf16 whose products have exponents from -16 to 17, and significands of 16 bits."""
    rng = np.random.default_rng(5)

    def operand(rows: int) -> torch.Tensor:
        significands = rng.choice([-1.0, 1.0], (rows, K)) * (1 + rng.integers(0, 128, (rows, K)) / 128)
        return torch.from_numpy(np.ldexp(significands, rng.integers(-8, 9, (rows, K)))).bfloat16()

    return operand(m), operand(n)


def predicted(rule: Rule, a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """Returns D = a b^T in fp32 by a rule. fp64 holds the sums exactly. The exponent of a product is the sum of its factors'."""
    x, y = (v.double().numpy() for v in (a, b))
    terms = x[:, None, :] * y[None, :, :]
    if rule.bits is not None:
        exponents = (np.frexp(x)[1][:, None, :] + np.frexp(y)[1][None, :, :]) - 2
        unit = np.ldexp(1.0, exponents.max(-1, keepdims=True) - rule.bits)
        terms = np.trunc(terms / unit) * unit
    total = terms.sum(-1)
    return total.astype(np.float32) if rule.rounds else cut32(total).astype(np.float32)


def matching(d: np.ndarray) -> list[tuple[Rule, float]]:
    """Returns each rule with the share of the elements of D that it predicts to the bit, best first. ``d``: that of `factors`, thinned as
    in a fixture."""
    from helpers.emulator.calibrate import thinned

    operands = factors()
    predict = lambda rule: thinned(torch.from_numpy(predicted(rule, *operands)))
    same = lambda rule: float((predict(rule).view(np.uint32) == d.view(np.uint32)).mean())
    return sorted(((rule, same(rule)) for rule in RULES), key=lambda pair: -pair[1])


def main(folder: Path) -> int:
    """Prints the rules that fit best to the recorded cases of sums. Returns 1 if there is a case that no rule fits."""
    from helpers.emulator.calibrate import fixture, recorded
    from helpers.emulator.cases import CASES

    found = [case for case in CASES.values() if case.name.endswith(SUMS)]
    found = [case for case in found if recorded(case, folder)]
    if not found:
        print(f"{folder} has no recorded case of sums")
    status = 0
    for case in found:
        best = matching(fixture(case, folder)["d"])
        exact = [str(rule) for rule, share in best if share == 1]
        print(f"- {case.name}: {' or '.join(exact) or 'no rule predicts all elements'}")
        for rule, share in best[:4]:
            print(f"    - {share:.2%}: {rule}")
        status |= not exact
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
