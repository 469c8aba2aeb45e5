"""Calls whose sequences are cut into segments: the summary kernel alone, and a plan of kda-cp, emulated.

The conformance kit's test of segments runs in `test_sm100_emulated`.
"""

from itertools import accumulate

import pytest
import torch
from helpers.sm100_chain_cases import NAN, laid_out, recurrence
from helpers.sm100_launch import launch

from kda_core import chunk_kda
from kda_core.registry import record_calls
from kda_core.testing import error, make_inputs, token_oracle, tolerance
from kda_cute.testing.emulation import emulated
from kda_sm100.arguments import SUMMARY
from kda_sm100.config import ARCHS, HEAD_DIM, SummaryConfig


@pytest.mark.parametrize(
    ("arch", "C", "lengths"),
    [("sm_100a", 64, (130, 0, 1, 320)), ("sm_103a", 32, (0, 31, 0, 225))],  # long enough to reuse the rings
    ids=str,
)
def test_summaries_match_the_recurrence_under_every_schedule(arch, C, lengths):
    HV, N, T = 1, len(lengths), sum(lengths)
    records, chunks, workspace = laid_out(C, HV, 1, T, lengths)
    for name in ("qd", "aqk"):
        workspace[name] = torch.full_like(workspace[name], NAN)
    shape = (N, HV, HEAD_DIM, HEAD_DIM)
    initial = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    identity = torch.eye(HEAD_DIM).expand(shape)
    no_values = records | {"u": torch.zeros_like(records["u"])}
    call = (chunks, HV, (1, T, HV, HEAD_DIM))
    want = [
        [recurrence(records, *call, initial, dtype)[1], recurrence(no_values, *call, identity, dtype)[1]]
        for dtype in (torch.float64, torch.float32)
    ]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    v, found = torch.empty(1, T, HV, HEAD_DIM).bfloat16(), []
    for seed in range(3):
        exits, transitions = (torch.full(shape, NAN) for _ in range(2))
        launch(
            SUMMARY, SummaryConfig(C), v, arch=arch, seed=seed, offsets=offsets,
            initial_state=initial, final_state=exits, transitions=transitions, workspace=workspace.bytes,
            state_count=0, N=N, T=T, HV=HV, offset_bytes=4, v_first=0, every=1,
        )  # fmt: skip
        found.append((exits, transitions))
        assert all(torch.equal(x, y) for x, y in zip(found[0], found[-1], strict=True))
    for x, exact, best in zip(found[0], *want, strict=True):
        assert error(x, exact, state=True) <= 1.2 * error(best, exact, state=True) + 1e-6
    for n, own in enumerate(chunks):
        if not own:
            assert torch.equal(found[0][0][n], initial[n]) and torch.equal(found[0][1][n], identity[n])


def test_a_plan_of_kda_cp_matches_the_oracle():
    """One sequence is cut into three segments, one of which is no multiple of a chunk. Another sequence stays whole."""
    Plan = pytest.importorskip("kda_cp").Plan
    lengths = (150, 20)
    x = make_inputs("memory", 170, H=1, lengths=lengths, initial_state=True).arguments
    x |= {"output_final_state": True}
    with emulated("sm100", ARCHS[0]), record_calls() as calls:
        o, state = chunk_kda(**x, backend="sm100", context_parallel=Plan(((64, 36, 50), (20,))))
    assert [(c.backend, c.planner) for c in calls] == [("sm100", "cp")]
    want = token_oracle(**x)
    limits = tolerance(x, 64, oracle=want)
    assert error(o, want[0], lengths=lengths) <= limits[0]
    assert error(state, want[1], state=True) <= limits[1]
