"""The largest error that a backend may have in each dtype of q, k and v."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_core.testing.tolerance import tolerance

#: Share of the tolerance of bf16 operands. fp16 has the same, because decays exceed its range and kernels multiply in bf16. fp32
#: has an eighth: products of TF32 operands, which have three more bits, stay below it, products of bf16 operands do not. fp64 has
#: 2^-29 of that, the ratio of the roundings of fp64 and fp32: arithmetic in fp32 does not stay below it.
SHARES = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 2.0**-3, torch.float64: 2.0**-32}


def limits(x: dict[str, Any], oracle: tuple[Tensor, ...]) -> tuple[float, ...]:
    """Returns the largest admissible `error` of a call.

    Args:
        x: arguments of `kda_core.chunk_kda`.
        oracle: what `token_oracle(**x)` returns.

    Returns:
        (for o, for the final state), and with `return_intermediate_states` (.., for the intermediate states, which are bf16
        for every dtype of q).
    """
    o, state, *h = tolerance(x, oracle=oracle)
    share = SHARES[x["q"].dtype]
    return (share * o, share * state, *h)
