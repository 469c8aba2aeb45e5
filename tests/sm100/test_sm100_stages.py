"""The functions of `kda_sm100.stages`, emulated, against the same formulas in fp64."""

import functools
from itertools import accumulate, pairwise

import pytest
import torch
from helpers.sm100_launch import chunks_of, launch

from kda_core.errors import ArgumentError, DeviceError
from kda_core.testing import error
from kda_sm100 import stages
from kda_sm100.config import HEAD_DIM

CASES = [(64, None, True, False), (32, (0, 40, 0, 33), True, True), (64, (70, 0, 1), False, False)]


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(stages, "launch", functools.partial(launch, arch="sm_100a"))


def arguments(B, T, HV, C, lengths, gates, v_first):
    """Returns arguments of the recurrence from an exact intra-chunk stage, rounded as operands are."""
    rng = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)
    k, v = torch.nn.functional.normalize(new(B, T, HV, HEAD_DIM), dim=-1), new(B, T, HV, HEAD_DIM)
    beta, g = new(B, T, HV).sigmoid(), -0.06 * gates * new(B, T, HV, HEAD_DIM).sigmoid()
    kg, w, u, gk = (torch.zeros_like(v) for _ in range(4))
    chunks, _ = chunks_of(B, T, C, lengths)
    for b, first, tokens, _ in chunks:
        rows = (b, slice(first, first + tokens))
        G, key, b_ = g[rows].cumsum(0), k[rows].transpose(0, 1), beta[rows].T[..., None]
        up, down = (x.transpose(0, 1) for x in (G.exp(), (-G).exp()))
        L = (key * up @ (key * down).mT).tril(-1) * b_
        T_ = torch.linalg.inv(torch.eye(tokens) + L) * b_.mT
        w[rows] = (T_ @ (key * up)).transpose(0, 1)
        u[rows] = (T_ @ v[rows].transpose(0, 1)).transpose(0, 1)
        kg[rows], gk[rows] = k[rows] * (G[-1] - G).exp(), G
    N = B if lengths is None else len(lengths)
    initial = torch.randn(N, HV, HEAD_DIM, HEAD_DIM, generator=rng)
    named = {"k": kg.bfloat16(), "w": w.bfloat16(), "u": u.bfloat16()}
    named |= {
        "gk": gk.float() if gates else None,
        "initial_state": initial.mT.contiguous() if v_first else initial,
    }
    if lengths is not None:
        named["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return named | {"chunk_size": C, "state_v_first": v_first}


def recurrence(x, lengths):
    """Returns h [chunks, HV, K, V], v_new and the final states in fp64."""
    C, rows = x["chunk_size"], {n: x[n].double() for n in ("k", "w", "u")}
    (B, T, *_), turn = x["k"].shape, (lambda s: s.mT if x["state_v_first"] else s)
    S = turn(x["initial_state"]).double()
    spans = [(b, 0, T) for b in range(B)]
    if lengths is not None:
        ends = [0, *accumulate(lengths)]
        spans = [(0, *span) for span in pairwise(ends)]
    h, v_new, final = [], torch.zeros_like(rows["u"]), S.clone()
    for n, (b, start, end) in enumerate(spans):
        state = S[n]
        for first in range(start, end, C):
            at = (b, slice(first, min(first + C, end)))
            k, w, u = (rows[name][at].transpose(0, 1) for name in ("k", "w", "u"))
            h.append(state)
            new = u - w @ state
            decay = 1.0 if x["gk"] is None else x["gk"][at][-1].double().exp()[..., None]
            state, v_new[at] = decay * state + k.mT @ new, new.transpose(0, 1)
        final[n] = state
    return torch.stack(h), v_new, final


@pytest.mark.parametrize(("C", "lengths", "gates", "v_first"), CASES, ids=str)
def test_recurrence_matches_fp64(emulated, C, lengths, gates, v_first):
    B, T = (2, 100) if lengths is None else (1, sum(lengths))
    x = arguments(B, T, 2, C, lengths, gates, v_first)
    h, v_new, final = stages.chunk_gated_delta_rule_fwd_h(**x, output_final_state=True)
    want_h, want_v, want_s = recurrence(x, lengths)
    turn = (lambda s: s.mT) if v_first else (lambda s: s)
    assert h.shape == (B, len(want_h) // B, 2, HEAD_DIM, HEAD_DIM) and h.dtype is torch.bfloat16
    assert error(v_new, want_v) <= 6e-3
    assert error(turn(final), want_s, state=True) <= 6e-3
    for found, want in zip(turn(h).flatten(0, 1), want_h, strict=True):
        assert (found.double() - want).norm() <= 6e-3 * want.norm()


def test_recurrence_without_states(emulated):
    x = arguments(1, 20, 1, 32, None, True, False) | {"initial_state": None}
    h, v_new, final = stages.chunk_gated_delta_rule_fwd_h(**x)
    assert final is None and not h.any() and torch.equal(v_new, x["u"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"chunk_size": 16}, "chunk_size: expected one of 64, 32, got 16"),
        ({"k": torch.zeros(1, 20, 1, 64).bfloat16()}, "k: "),
        ({"w": torch.zeros(1, 20, 1, 128)}, "w: expected .*bfloat16"),
        ({"gk": torch.zeros(1, 20, 1, 128).double()}, "gk: expected .*float32"),
        ({"initial_state": torch.zeros(2, 1, 128, 128)}, "initial_state: expected"),
        ({"cu_seqlens": torch.tensor([0.0, 20.0])}, "cu_seqlens: expected"),
        ({"cu_seqlens": torch.tensor([0, 21])}, "cu_seqlens: expected ascending offsets in .0, T = 20."),
    ],
)
def test_recurrence_names_invalid_arguments(change, named):
    x = arguments(1, 20, 1, 32, None, True, False)
    with pytest.raises(ArgumentError, match=f"^{named}"):
        stages.chunk_gated_delta_rule_fwd_h(**x | change)


@pytest.mark.parametrize(("C", "lengths"), [(64, None), (32, (0, 40, 0, 33)), (64, (70, 0, 1))], ids=str)
def test_outputs_match_fp64(emulated, C, lengths):
    (B, T), H, HV = (2, 100) if lengths is None else (1, sum(lengths)), 1, 2
    rng = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=rng)
    chunks, _ = chunks_of(B, T, C, lengths)
    x = {
        "q": new(B, T, H, HEAD_DIM).bfloat16(), "v": new(B, T, HV, HEAD_DIM).bfloat16(),
        "g": -new(B, T, HV, HEAD_DIM).abs(), "A": new(B, T, HV, C).bfloat16(),
        "h": new(B, len(chunks) // B, HV, HEAD_DIM, HEAD_DIM).bfloat16(),
    }  # fmt: skip
    offsets = None if lengths is None else torch.tensor([0, *accumulate(lengths)])
    o = stages.chunk_gla_fwd_o_gk(**x, scale=0.1, chunk_size=C, cu_seqlens=offsets)
    want = torch.zeros(B, T, HV, HEAD_DIM, dtype=torch.float64)
    for (b, first, tokens, _), S in zip(chunks, x["h"].flatten(0, 1).double(), strict=True):
        at = (b, slice(first, first + tokens))
        q, v, g, A = (x[name][at].double().transpose(0, 1) for name in ("q", "v", "g", "A"))
        o_ = 0.1 * (q * g.exp()) @ S + A[..., :tokens].tril() @ v
        want[at] = o_.transpose(0, 1)
    assert error(o, want) <= 6e-3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": torch.zeros(1, 20, 3, 128).bfloat16()}, "q: expected .*divides 2"),
        ({"A": torch.zeros(1, 20, 2, 32).bfloat16()}, "A: expected .*64"),
        ({"h": torch.zeros(1, 2, 2, 128, 128).bfloat16()}, "h: expected .1, 1, 2"),
        ({"g": torch.zeros(1, 128, 2, 20).mT}, "g: expected .1, 20, 2, 128"),
    ],
)
def test_outputs_name_invalid_arguments(change, named):
    zeros = lambda *shape: torch.zeros(shape)
    x = {
        "q": zeros(1, 20, 1, 128).bfloat16(),
        "v": zeros(1, 20, 2, 128).bfloat16(),
        "g": zeros(1, 20, 2, 128),
    }
    x |= {"A": zeros(1, 20, 2, 64).bfloat16(), "h": zeros(1, 1, 2, 128, 128).bfloat16()}
    with pytest.raises(ArgumentError, match=f"^{named}"):
        stages.chunk_gla_fwd_o_gk(**x | change)


def test_cpu_tensors_are_refused():
    with pytest.raises(DeviceError, match="device: expected a CUDA device, got cpu"):
        stages.chunk_gated_delta_rule_fwd_h(**arguments(1, 20, 1, 32, None, True, False))
