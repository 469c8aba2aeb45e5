"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for a call.

Counted are the three products of the recurrence with a state [K, V], ``k^T S``, ``k (..)^T`` and ``q^T S``: 6 K V FLOPs a
token and value head, and twice that in the backward. What a backend computes beyond it (chunks, recomputation) is not.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def offer() -> None:
    """Gives these formulas to torch's counters, those that count now and those to come. It is too early at import:
    ``torch.utils.flop_counter`` imports triton, and logs a warning where there is none."""
    counters = sys.modules.get("torch.utils.flop_counter")
    if counters is None:
        return
    operators = torch.ops.kda_core
    if operators.chunk_fwd not in counters.flop_registry:
        counters.register_flop_formula([operators.chunk_fwd, operators.chunk_fwd_out])(_forward)
        counters.register_flop_formula(operators.chunk_bwd)(_backward)
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, counters.FlopCounterMode):  # it copied the registry when it was made
            for operator in (operators.chunk_fwd, operators.chunk_fwd_out, operators.chunk_bwd):
                counter.flop_registry.setdefault(operator, counters.flop_registry[operator])


def _forward(q: Any, k: Any, v: Any, *rest: Any, **outputs: Any) -> int:
    """From the shapes: v [B, T, HV, V], q [B, T, H, K]."""
    return 6 * math.prod(v) * q[-1]


def _backward(
    grad_o: Any, grad_final_state: Any, served: Any, q: Any, k: Any, v: Any, *rest: Any, **outputs: Any
) -> int:
    return 2 * _forward(q, k, v)
