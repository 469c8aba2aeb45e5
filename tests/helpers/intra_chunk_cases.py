"""Shared by the tests of the intra-chunk stage on each GPU backend: the numeric specification, and the tolerance."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kda_core.testing import specification

#: Lengths of packed sequences: empty ones, and ones around a multiple of a chunk.
LENGTHS = (0, 15, 0, 63, 64, 65, 1, 130, 0)


def variant(x: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a kernel's configuration that describe the gate of a call."""
    bounded = x.get("lower_bound") is not None
    gate = "precomputed" if not x.get("use_gate_in_kernel") else "bounded" if bounded else "softplus"
    return {"gate": gate, "unbounded": gate != "bounded", "gate_dtype": str(x["g"].dtype)[6:]}


def specified(x: dict[str, Any], C: int, lengths: tuple[int, ...] | None) -> list[tuple[Any, Tensor]]:
    """Returns the specified chunk record and v of each chunk of a call.

    Normalised rows of q and k are not rounded, because the kernels keep them in fp32.
    """
    gates = {n: t for n, t in x.items() if n not in ("initial_state", "cu_seqlens")}
    if gates.pop("use_qk_l2norm_in_kernel"):
        for n in ("q", "k"):
            row = gates[n].float()
            gates[n] = row * torch.rsqrt(row.square().sum(-1, keepdim=True) + 1e-6)
    *tensors, bounded = specification.activate(**gates)
    sizes = lengths or (x["q"].shape[1],)
    sequences = [
        (b, end - size, end) for b in range(len(x["q"])) for size, end in zip(sizes, accumulate(sizes))
    ]
    found = []
    for b, first, end in sequences:
        for start in range(first, end, C):
            rows = [t[b, start : min(start + C, end)].transpose(0, 1) for t in tensors]
            pad = [pad_rows(t, C) for t in rows]
            record = specification.chunk_record(*pad, x["q"].shape[-1] ** -0.5, bounded)
            found.append((record, pad[2]))
    return found


def folded(record: Any) -> Any:
    """Returns a specified record with T^T Kg and Aqk T in the places of Kg and Aqk."""
    Kg, Aqk = specification.mma(record.T.mT, record.Kg), specification.mma(record.Aqk, record.T)
    return record._replace(Kg=Kg.bfloat16().float(), Aqk=Aqk.bfloat16().float())


def pad_rows(t: Tensor, C: int) -> Tensor:
    """Returns [HV, tokens, ...] with zeros up to C tokens."""
    return torch.nn.functional.pad(t, (0, 0) * (t.dim() - 2) + (0, C - t.shape[1]))


def assert_close(
    found: dict[str, Tensor], want: dict[str, Tensor], limits: dict[str, float] | None = None
) -> None:
    """Asserts that each operand of each head differs from the specification by at most 2^-8 of its Frobenius norm, or by its limit.

    One rounding to bf16, after a summation in another order, may change the operand by 2^-8.
    """
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        a, b = (t.double().transpose(0, 1).flatten(1) for t in (found[name], tensor))
        off = ((a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-30)).max().item()
        assert off <= (limits or {}).get(name, 2**-8), (
            f"{name}: relative difference {off:.2e} from the specification"
        )
