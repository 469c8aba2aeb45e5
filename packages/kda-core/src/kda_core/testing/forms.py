"""The forms of a call that the gate families do not cover: of gate, beta, normalisation and scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kda_core.testing.inputs import Inputs

FORMS = (
    "no A_log", "no dt_bias", "bound -1", "bound -8", "softplus", "softplus, no dt_bias", "flat dt_bias", "bf16 g",
    "bf16 beta", "fp32 beta", "fp32 raw g", "safe precomputed", "negative eigenvalues", "no l2norm", "scale",
)  # fmt: skip


def in_form(form: str, inputs: Callable[[str], Inputs]) -> Inputs:
    """Returns a call in one of `FORMS`.

    Args:
        inputs: returns a call of a family; a form changes one of the family slow, masked or memory.
    """
    slow, masked, memory = (lambda family=family: inputs(family) for family in ("slow", "masked", "memory"))

    def unit_keys() -> Inputs:
        x = slow()
        unit = {n: torch.nn.functional.normalize(x.arguments[n].float(), dim=-1) for n in ("q", "k")}
        unit = {n: t.to(x.arguments[n].dtype) for n, t in unit.items()}
        return x.replace(**unit, use_qk_l2norm_in_kernel=False)

    def converted(x: Inputs, name: str, to: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        return x.replace(**{name: to(x.arguments[name])})

    forms: dict[str, Any] = {
        "no A_log": lambda: slow().replace(A_log=None),
        "no dt_bias": lambda: slow().replace(dt_bias=None),
        "bound -1": lambda: slow().replace(lower_bound=-1.0),
        "bound -8": lambda: slow().replace(lower_bound=-8.0),
        "softplus": lambda: slow().replace(lower_bound=None),
        "softplus, no dt_bias": lambda: slow().replace(lower_bound=None, dt_bias=None),
        "flat dt_bias": lambda: converted(slow(), "dt_bias", lambda t: t.flatten()),
        "bf16 g": lambda: converted(masked(), "g", lambda t: t.bfloat16()),
        "bf16 beta": lambda: converted(memory(), "beta", lambda t: t.bfloat16()),
        "fp32 beta": lambda: converted(slow(), "beta", lambda t: t.float()),
        "fp32 raw g": lambda: converted(slow(), "g", lambda t: t.float() * 1.001),
        "safe precomputed": lambda: memory().replace(safe_gate=True),
        "negative eigenvalues": lambda: slow().replace(allow_neg_eigval=True),
        "no l2norm": unit_keys,
        "scale": lambda: slow().replace(scale=0.37),
    }
    return forms[form]()
