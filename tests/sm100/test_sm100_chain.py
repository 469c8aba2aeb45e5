"""The chain alone, emulated: its recurrence over given records against the same recurrence in fp64."""

from itertools import accumulate

import pytest
import torch
from helpers.sm100_chain_cases import NAN, laid_out, recurrence
from helpers.sm100_launch import launch

from kda_core.testing import error
from kda_sm100.arguments import CHAIN
from kda_sm100.config import HEAD_DIM, ChainConfig


@pytest.mark.parametrize(
    ("arch", "C", "lengths", "v_first", "seed"),
    [
        ("sm_100a", 64, None, False, 0), ("sm_103a", 64, (0, 1, 63, 0, 65, 0), True, 1),
        ("sm_103a", 32, None, True, 2), ("sm_100a", 32, (0, 1, 31, 0, 97, 0), False, 3),
    ],
    ids=str,
)  # fmt: skip
def test_chain_matches_the_fp64_recurrence(arch, C, lengths, v_first, seed):
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
        CHAIN, ChainConfig(C, states=True), o, arch=arch, seed=seed, offsets=offsets, o=o,
        states=states, initial_state=layout(initial), final_state=final, workspace=workspace.bytes,
        state_count=len(saved), N=N, T=T, HV=HV, offset_bytes=0 if lengths is None else 4, v_first=int(v_first),
        every=every,
    )  # fmt: skip

    limits = [error(best_o.bfloat16(), want_o), error(best_s, want_s, state=True)]
    assert error(o, want_o) <= 1.2 * limits[0] + 1e-6
    assert error(layout(final), want_s, state=True) <= 1.2 * limits[1] + 1e-6
    for n, own in enumerate(chunks):
        if not own:
            assert torch.equal(layout(final)[n], initial[n]), "an empty sequence returns its initial state"
    for S, h in zip(saved, layout(states), strict=True):
        assert (h.double() - S).norm() <= 6e-3 * S.norm()
