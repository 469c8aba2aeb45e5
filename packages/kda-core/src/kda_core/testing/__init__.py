"""The conformance kit, which every backend must pass, and its parts.

`token_oracle` and `token_gradients` compute the exact results and gradients, `specification` and `backward_specification` the chunked
ones with every rounding. `error`, `tolerance`, `gradient_errors` and `gradient_tolerance` compare them, and `make_inputs` draws inputs.
`kda_core.testing.conformance` (which needs pytest) contains the tests: subclass `BackendConformance`, or run
``python -m kda_core conformance NAME``.
"""

from __future__ import annotations

from typing import Any

from kda_core.registry import Call, record_calls
from kda_core.testing.gradients import GradientCase, gradient_errors, gradient_tolerance, token_gradients
from kda_core.testing.inputs import EXTREMES, FAMILIES, Inputs, make_inputs, make_normalised
from kda_core.testing.oracle import token_oracle
from kda_core.testing.tolerance import BAND, error, tolerance

__all__ = [
    "BAND",
    "EXTREMES",
    "FAMILIES",
    "Call",
    "GradientCase",
    "Inputs",
    "error",
    "gradient_errors",
    "gradient_tolerance",
    "make_inputs",
    "make_normalised",
    "record_calls",
    "token_gradients",
    "token_oracle",
    "tolerance",
]


def __getattr__(name: str) -> Any:
    if name == "BackendConformance":  # needs pytest, unlike the other names
        from kda_core.testing.conformance import BackendConformance

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
