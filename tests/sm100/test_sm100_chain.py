"""The chain by itself, emulated: its recurrence over given records, against the same in fp64."""

from itertools import accumulate

import pytest
import torch
from helpers.sm100_launch import Workspace, chunks_of, launch

from kda_core.testing import error
from kda_sm100.config import HEAD_DIM, ChainConfig

NAN = float("nan")


def make_records(n, C):
    """n logical records of random tokens, gates that decay by up to 6% a token, rounded as the preparation does."""
    rng = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)
    q, k = (torch.nn.functional.normalize(new(n, C, HEAD_DIM), dim=-1) for _ in range(2))
    v, beta, g = new(n, C, HEAD_DIM), new(n, C).sigmoid(), -0.06 * new(n, C, HEAD_DIM).sigmoid()
    G = g.cumsum(1)
    up, down = G.exp(), (-G).exp()
    L = (k * up @ (k * down).mT).tril(-1) * beta[..., None]
    T = torch.linalg.solve_triangular(torch.eye(C) + L, torch.diag_embed(beta), upper=False)
    qd = q * up * HEAD_DIM**-0.5
    logical = {
        "w": -(T @ (k * up)), "u": T @ v, "qd": qd, "kg": k * (G[:, -1:] - G).exp(), "aqk": (qd @ (k * down).mT).tril(),
    }  # fmt: skip
    return {n: x.bfloat16() for n, x in logical.items()} | {"a": G[:, -1].exp().float()}


def laid_out(C, HV, B, T, lengths):
    """Random records, the chunks of each sequence, and a workspace with them; slots without a chunk hold
    NaN."""
    N = B if lengths is None else len(lengths)
    flat, slots = chunks_of(B, T, C, lengths)
    starts = [0, *accumulate(lengths or ())]
    owner = lambda b, first: b if lengths is None else max(n for n in range(N) if starts[n] <= first)
    chunks = [[c for c in flat if owner(c[0], c[1]) == n] for n in range(N)]
    records = make_records(slots * HV, C)
    unused = [
        i for slot in set(range(slots)) - {c[3] for c in flat} for i in range(slot * HV, (slot + 1) * HV)
    ]
    for _, _, tokens, slot in flat:  # rows beyond a sequence are zeros
        for name in ("w", "u", "qd", "kg", "aqk"):
            records[name][slot * HV : (slot + 1) * HV, tokens:] = 0
    workspace = Workspace(slots * HV, C, "cpu")
    for name, logical in records.items():
        workspace[name] = logical
    for name in records:
        kept = workspace[name]
        kept[unused] = NAN
        workspace[name] = kept
    return records, chunks, workspace


def recurrence(records, chunks, HV, shape, initial, dtype):
    """o, and the states before every chunk and at the end by (row of B or sequence, head); with fp32 also the roundings of
    operands to bf16. ``chunks``: of each sequence."""
    rounded = (lambda x: x.bfloat16().to(dtype)) if dtype is torch.float32 else lambda x: x
    o, final, before = torch.full(shape, NAN, dtype=torch.float64), initial.to(dtype, copy=True), []
    for n, own in enumerate(chunks):
        S = initial[n].to(dtype)
        for b, first, tokens, slot in own:
            x = {name: r[slot * HV : (slot + 1) * HV].to(dtype) for name, r in records.items()}
            before.append(S)
            R = x["u"] + x["w"] @ rounded(S)
            O = x["qd"] @ rounded(S) + x["aqk"] @ rounded(R)
            S = x["a"][:, :, None] * S + x["kg"].mT @ rounded(R)
            o[b, first : first + tokens] = O[:, :tokens].movedim(0, 1).double()
        final[n] = S
    return o, final.double(), before


@pytest.mark.parametrize(
    ("arch", "C", "lengths", "v_first", "seed"),
    [
        ("sm_100a", 64, None, False, 0), ("sm_103a", 64, (0, 1, 63, 0, 65, 0), True, 1),
        ("sm_103a", 32, None, True, 2), ("sm_100a", 32, (0, 1, 31, 0, 97, 0), False, 3),
    ],
    ids=str,
)  # fmt: skip
def test_it_is_the_recurrence(arch, C, lengths, v_first, seed):
    from kda_sm100.kernels.chain import ARGUMENTS, ChainKernel

    HV, (B, T) = 2, (2, 100) if lengths is None else (1, sum(lengths))
    N = B if lengths is None else len(lengths)
    records, chunks, workspace = laid_out(C, HV, B, T, lengths)
    shape, every = (B, T, HV, HEAD_DIM), 64 // C
    initial = torch.randn(N, HV, HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    want_o, want_s, before = recurrence(records, chunks, HV, shape, initial, torch.float64)
    best_o, best_s, _ = recurrence(records, chunks, HV, shape, initial, torch.float32)
    layout = (lambda x: x.mT.contiguous()) if v_first else (lambda x: x)
    o, final = torch.full(shape, NAN, dtype=torch.bfloat16), torch.full_like(initial, NAN)
    at, saved = 0, []
    for own in chunks:
        saved += before[at : at + len(own)][::every]
        at += len(own)
    states = torch.full((len(saved), HV, HEAD_DIM, HEAD_DIM), NAN, dtype=torch.bfloat16)
    offsets = None if lengths is None else torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    launch(
        ChainKernel, ARGUMENTS, ChainConfig(C, states=True), arch, o, seed, offsets=offsets, o=o, states=states,
        initial_state=layout(initial), final_state=final, workspace=workspace.bytes, state_count=len(saved), N=N, T=T,
        HV=HV, offset_bytes=0 if lengths is None else 4, v_first=int(v_first), every=every,
    )  # fmt: skip

    limits = [error(best_o.bfloat16(), want_o), error(best_s, want_s, state=True)]
    assert error(o, want_o) <= 1.2 * limits[0] + 1e-6
    assert error(layout(final), want_s, state=True) <= 1.2 * limits[1] + 1e-6
    for n, own in enumerate(chunks):
        if not own:
            assert torch.equal(layout(final)[n], initial[n]), "a sequence without tokens passes its state on"
    for S, h in zip(saved, layout(states), strict=True):
        assert (h.double() - S).norm() <= 6e-3 * S.norm()
