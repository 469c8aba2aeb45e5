"""The conformance kit: what any backend must pass, and the parts that it is made of.

`token_oracle` is the truth, `specification` the arithmetic with every rounding point, `error` and `tolerance` the
measure, `make_inputs` the inputs. `kda_core.testing.conformance` (which needs pytest) holds the tests: subclass
`BackendConformance`, or run ``python -m kda_core conformance NAME``.
"""

from __future__ import annotations

from typing import Any

from kda_core.registry import Call, record_calls
from kda_core.testing.inputs import FAMILIES, Inputs, make_inputs, make_normalised, one_key
from kda_core.testing.oracle import token_oracle
from kda_core.testing.tolerance import BAND, error, tolerance

__all__ = [
    "BAND",
    "FAMILIES",
    "Call",
    "Inputs",
    "error",
    "make_inputs",
    "make_normalised",
    "one_key",
    "record_calls",
    "token_oracle",
    "tolerance",
]


def __getattr__(name: str) -> Any:
    if name == "BackendConformance":  # needs pytest, which users of the other names need not have
        from kda_core.testing.conformance import BackendConformance

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
