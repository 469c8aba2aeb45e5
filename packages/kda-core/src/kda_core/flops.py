"""FLOP counts of a call for ``torch.utils.flop_counter.FlopCounterMode``.

The forward counts the three products of the recurrence with a state [K, V], ``k^T S``, ``k (..)^T`` and ``q^T S``: 6 K V FLOPs
for each token and value head. The backward counts twice that. Extra work of a backend (chunks, recomputation) is not counted.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from kda_core.torch_private import active_dispatch_modes


def register() -> None:
    """Registers the formulas with torch's counters, active and future ones.

    This cannot happen at import, because ``torch.utils.flop_counter`` imports triton and logs a warning without it.
    """
    counters = sys.modules.get("torch.utils.flop_counter")
    if counters is None:
        return
    operators = torch.ops.kda_core
    forwards = [
        operators.chunk_fwd,
        operators.chunk_fwd_out,
        operators.pooled_fwd_,
        operators.journal_decode_,
        operators.verify_,
    ]
    if operators.chunk_fwd not in counters.flop_registry:
        counters.register_flop_formula(forwards)(_forward)
        counters.register_flop_formula(operators.chunk_bwd)(_backward)
    for mode in active_dispatch_modes():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, counters.FlopCounterMode):  # its constructor copied the registry
            for operator in (*forwards, operators.chunk_bwd):
                counter.flop_registry.setdefault(operator, counters.flop_registry[operator])


def _forward(q: Any, k: Any, v: Any, *rest: Any, **outputs: Any) -> int:
    """Returns the FLOPs of a forward; arguments are shapes: v [B, T, HV, V], q [B, T, H, K]."""
    return 6 * math.prod(v) * q[-1]


def _backward(
    grad_o: Any, grad_final_state: Any, served: Any, saved_states: Any, residual: Any, wanted: Any,
    q: Any, k: Any, v: Any, *rest: Any, **outputs: Any,
) -> int:  # fmt: skip
    """Returns the FLOPs of a backward."""
    return 2 * _forward(q, k, v)
