"""Inputs from documented recipes. They have the same bits on every machine, because they are drawn on the CPU.

All gate families share: q, k, v ~ N(0,1) in bf16, normalised in the kernel; beta logits ~ N(0,1) in bf16, sigmoid in
the kernel; A_log = log U(1,16) and dt_bias in fp32. A generator seeded with `seed` draws, in this order: q, k, v, beta,
A_log, then the tensors of the family, in the order of its description. A `dtype` other than bf16 replaces bf16.

=========  =============================================================================================================
steep      raw g ~ N(0,1) bf16, dt_bias ~ N(0,1), lower_bound -5
slow       raw g ~ N(0,1) bf16, dt_bias = softplus^-1(exp U(log 0.001, log 0.1)), lower_bound -5: the public layer's
memory     precomputed fp32 g: 0 on channels below K/2, -0.3 on the others; beta = min(0.05, 128/T), fp32, post-sigmoid;
           initial state ~ N(0,1), fp32: the state decays slowly
saturated  raw g = 32 bf16, no dt_bias, lower_bound -5: every gate is -5
masked     precomputed fp32 g = -U(0, 0.1); then -1000 where U(0,1) < 1/2000 per (token, head, channel), where
           U(0,1) < 1/50 per (token, head), and, on odd heads, where U(0,1) < 1/8 per (head, channel)
mixed      raw g ~ N(0,1) bf16, softplus form (unbounded); dt_bias by channel mod 4: -20 (open), as slow, -2, 1
plain      needs no feature of a backend: q and k are normalised, beta is the fp32 sigmoid of the logits, and fp32 g =
           -exp U(log 0.0001, log 5) per (head, channel) * U(0,1) per element, with the promise `safe_gate`
=========  =============================================================================================================

The extremes change one thing of a family, by draws that follow the family's:

============  ==========================================================================================================
finite masks  as masked, but masks are -U(40, 50) where U(0,1) < 1/8 per (token, head): two of them decay by about 2^-126, the
              smallest normal number of fp32
one key       as masked, but every key is that of token 0, beta's logits are 8 and g = -1e-4: inverses by a truncated
              series or in fp16 overflow
near keys     as one key, plus N(0, 0.01) in fp32 to every element of k before its rounding
zero keys     as one key, but k = 0: the state only decays
zero gates    as slow, but with precomputed fp32 g = 0: nothing decays
spikes        as mixed, but raw g = 40 where U(0,1) < 1/50 per element: these gates forget everything
============  ==========================================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16
FAMILIES = ("steep", "slow", "memory", "saturated", "masked", "mixed")
PLAIN = "plain"
EXTREMES = {
    "finite masks": "masked",
    "one key": "masked",
    "near keys": "masked",
    "zero keys": "masked",
    "zero gates": "slow",
    "spikes": "mixed",
}
"""The family that each extreme changes."""


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call of `kda_core.chunk_kda`, and the lengths of its packed sequences (None for fixed length)."""

    arguments: dict[str, Any]
    lengths: tuple[int, ...] | None = None

    def replace(self, **changes: Any) -> Inputs:
        """Returns the call with changed arguments; None removes an argument."""
        kept = {n: x for n, x in (self.arguments | changes).items() if x is not None}
        return Inputs(kept, self.lengths)

    def tokens(self, start: int, end: int | None = None) -> dict[str, Any]:
        """Returns the arguments for tokens start to end of a call of fixed length."""
        return self.arguments | {n: self.arguments[n][:, start:end] for n in ("q", "k", "v", "g", "beta")}


def make_inputs(
    family: str,
    T: int,
    *,
    B: int = 1,
    H: int = 2,
    HV: int | None = None,
    K: int = 128,
    V: int = 128,
    seed: int = 0,
    lengths: tuple[int, ...] | None = None,
    dtype: torch.dtype = BF16,
    beta_dtype: torch.dtype | None = None,
    initial_state: bool = False,
    state_v_first: bool = False,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Returns a call of one family: q,k [B,T,H,K], v [B,T,HV,V], g [B,T,HV,K], beta [B,T,HV], A_log [HV], dt_bias [HV,K].

    Args:
        lengths: of packed sequences (sum T, B = 1), with int32 cu_seqlens; None for fixed length.
        dtype: of q, k, v, of a raw g and, by default, of beta's logits.
        beta_dtype: of beta's logits.
        initial_state: whether to add one ~ N(0,1), fp32 (fp64 for fp64 inputs). The memory family always has one.
    """
    known = (*FAMILIES, PLAIN, *EXTREMES)
    if family not in known:
        raise ValueError(f"family: expected one of {known}, got {family!r}")
    extreme, family = family, EXTREMES.get(family, family)
    HV = H if HV is None else HV
    rng = torch.Generator().manual_seed(seed)

    def normal(*s: int) -> Tensor:
        return torch.randn(*s, generator=rng)

    def uniform(*s: int) -> Tensor:
        return torch.rand(*s, generator=rng)

    N, shape = (B if lengths is None else len(lengths)), (B, T, HV, K)
    x: dict[str, Any] = {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, HV, V),
        "beta": normal(B, T, HV),
        "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
    }
    A_log = torch.log(1 + 15 * uniform(HV))
    if family == PLAIN:
        rate = torch.exp(math.log(0.0001) + uniform(HV, K) * math.log(5 / 0.0001))
        x["g"] = -(rate * uniform(*shape)).clamp(max=5.0)
        x |= {n: torch.nn.functional.normalize(x[n], dim=-1) for n in ("q", "k")}
        x |= {"beta": x["beta"].sigmoid(), "use_beta_sigmoid_in_kernel": False}
        x |= {"use_qk_l2norm_in_kernel": False, "safe_gate": True}
    elif family == "memory":
        x["g"] = torch.where(torch.arange(K) < K // 2, 0.0, -0.3).expand(shape).contiguous()
        x |= {"beta": torch.full((B, T, HV), min(0.05, 128 / max(T, 1))), "use_beta_sigmoid_in_kernel": False}
        initial_state = True
    elif family == "masked":
        soft = -0.1 * uniform(*shape)
        mask = (uniform(*shape) < 1 / 2000) | (uniform(B, T, HV, 1) < 1 / 50)
        mask |= (uniform(HV, K) < 1 / 8) & (torch.arange(HV) % 2 == 1).unsqueeze(-1)
        x["g"] = torch.where(mask, -1000.0, soft)
    else:
        x |= {"use_gate_in_kernel": True, "A_log": A_log, "lower_bound": -5.0}
        x |= _raw_gate(family, shape, normal, uniform)
        x["g"] = x["g"].to(dtype)
    if extreme in EXTREMES:
        x |= _changed(extreme, x, normal, uniform)
    if x["use_beta_sigmoid_in_kernel"]:
        x["beta"] = x["beta"].to(beta_dtype or dtype)
    x |= {n: x[n].to(dtype) for n in ("q", "k", "v")}
    if initial_state:
        state = normal(N, HV, K, V).to(state_dtype(dtype))
        x["initial_state"] = state.mT.contiguous() if state_v_first else state
    if state_v_first:
        x["state_v_first"] = True
    if lengths is not None:
        if B != 1 or sum(lengths) != T:
            raise ValueError(f"lengths: expected B=1 and a sum of T={T}, got B={B} and {sum(lengths)}")
        x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    moved = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in x.items()}
    return Inputs({n: t for n, t in moved.items() if t is not None}, lengths)


def _raw_gate(family: str, shape: tuple[int, ...], normal: Any, uniform: Any) -> dict[str, Any]:
    HV, K = shape[2:]
    if family == "saturated":
        return {"g": torch.full(shape, 32.0)}
    g = normal(*shape)
    if family == "steep":
        return {"g": g, "dt_bias": normal(HV, K)}
    dt = torch.exp(math.log(0.001) + uniform(HV, K) * math.log(100.0))
    bias = dt + torch.log(-torch.expm1(-dt))  # softplus^-1
    if family == "slow":
        return {"g": g, "dt_bias": bias}
    kind = torch.arange(K) % 4
    bias = torch.where(kind == 0, -20.0, torch.where(kind == 1, bias, torch.where(kind == 2, -2.0, 1.0)))
    return {"g": g, "dt_bias": bias, "lower_bound": None}


def _changed(extreme: str, x: dict[str, Any], normal: Any, uniform: Any) -> dict[str, Any]:
    """Returns what an extreme changes in the arguments of its family."""
    k, g = x["k"], x["g"]
    if extreme == "zero gates":
        raw = dict.fromkeys(("use_gate_in_kernel", "A_log", "dt_bias", "lower_bound"))
        return raw | {"g": torch.zeros(g.shape)}
    if extreme == "finite masks":
        mask = uniform(*g.shape[:3], 1) < 1 / 8
        return {"g": torch.where(mask, -40.0 - 10.0 * uniform(*g.shape), g.clamp(min=-0.1))}
    if extreme == "spikes":
        return {"g": torch.where(uniform(*g.shape) < 1 / 50, 40.0, g)}
    found = {"g": torch.full(g.shape, -1e-4), "beta": torch.full(x["beta"].shape, 8.0)}
    if extreme == "zero keys":
        return found | {"k": torch.zeros_like(k)}
    same = k[:, :1].expand_as(k).contiguous()
    return found | {"k": same + 0.1 * normal(*k.shape) if extreme == "near keys" else same}


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the same call with copied tensors."""
    return {n: x.clone() if isinstance(x, Tensor) else x for n, x in arguments.items()}


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the states of a call whose q has `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_normalised(
    T: int,
    *,
    B: int = 1,
    H: int = 2,
    HV: int | None = None,
    K: int = 128,
    V: int = 128,
    dtype: torch.dtype = BF16,
    normaliser: float = 1.0,
    mask: float = 0.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Returns a call with precomputed gates g = logsigmoid(N(0,1)) / `normaliser`, set to 0 on a fraction `mask` of the elements,
    q, k, v ~ U(0,1) and beta = sigmoid(N(0,1)) in `dtype`, initial state ~ N(0,1): FLA's family of tests."""
    HV = H if HV is None else HV
    rng = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.rand(*s, generator=rng)
    x: dict[str, Any] = {"q": rand(B, T, H, K), "k": rand(B, T, H, K), "v": rand(B, T, HV, V)}
    x = {n: t.to(dtype) for n, t in x.items()}
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, HV, K, generator=rng)) / normaliser
    x["g"] = g * (rand(B, T, HV, K) >= mask)
    x["beta"] = torch.randn(B, T, HV, generator=rng).sigmoid().to(dtype)
    x["initial_state"] = torch.randn(B, HV, K, V, generator=rng).to(state_dtype(dtype))
    x["use_qk_l2norm_in_kernel"] = True
    return Inputs({n: t.to(device) if isinstance(t, Tensor) else t for n, t in x.items()})
