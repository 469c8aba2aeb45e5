"""What the functions of FLA expect of their arguments, and how FLA caches chunks."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import torch

HALVES = (torch.bfloat16, torch.float16)


def tensor_cache(function: Any) -> Any:
    """Keeps the last four results by the identity of the argument, as FLA's decorator does."""
    kept: deque[Any] = deque(maxlen=4)

    @functools.wraps(function)
    def cached(x: Any) -> Any:
        for given, result in kept:
            if given is x:
                return result
        kept.append((x, function(x)))
        return kept[-1][1]

    return cached


@tensor_cache
def offsets(cu_seqlens: torch.Tensor) -> list[int]:
    """The contents of cu_seqlens when FLA first saw the tensor."""
    return cu_seqlens.tolist()


def check(name: str, x: Any, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    assert isinstance(x, torch.Tensor), f"{name} is {x!r}"
    assert tuple(x.shape) == shape, f"{name} has the shape {tuple(x.shape)}, not {shape}"
    assert x.dtype in dtypes, f"{name} is {x.dtype}"
    assert x.is_contiguous(), f"{name} has the strides {x.stride()}"


def check_call(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, scale: Any, initial_state: Any, cu_seqlens: Any,
    flags: dict[str, Any], lower_bound: Any, may_end_early: bool,
) -> None:  # fmt: skip
    """Asserts that the arguments of a call are those of FLA's documentation."""
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    assert q.dtype in HALVES and T > 0 and 16 <= K <= 256 and HV % H == 0
    gates = (torch.float32, torch.bfloat16, q.dtype)
    check("q", q, (B, T, H, K), q.dtype)
    check("k", k, (B, T, H, K), q.dtype)
    check("v", v, (B, T, HV, V), q.dtype)
    check("g", g, (B, T, HV, K), *gates)
    check("beta", beta, (B, T, HV), *gates)
    assert type(scale) is float
    assert all(type(flag) is bool for flag in flags.values()), flags
    gate = flags["use_gate_in_kernel"]
    assert gate or A_log is dt_bias is lower_bound is None, "parameters of a gate that FLA ignores"
    assert not gate or A_log is not None or lower_bound is not None
    if A_log is not None:
        check("A_log", A_log, (HV,), torch.float32)
    if dt_bias is not None:
        # the gradient of FLA has this shape, whatever dt_bias has
        check("dt_bias", dt_bias, (HV * K,), torch.float32)
    N = B
    if cu_seqlens is not None:
        assert B == 1
        N = len(cu_seqlens) - 1
        check("cu_seqlens", cu_seqlens, (N + 1,), torch.int32, torch.int64)
        assert cu_seqlens.device == q.device
        found = cu_seqlens.tolist()
        assert found[0] == 0 and found == sorted(found), found
        assert found[-1] <= T if may_end_early else found[-1] == T, f"{found} for T={T}"
    if initial_state is not None:
        check("initial_state", initial_state, (N, HV, K, V), torch.float32)
