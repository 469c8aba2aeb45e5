"""The choice of kernels, from metadata alone."""

import pytest
import torch

from kda_core.contract import KdaOptions, ProblemShape
from kda_sm90 import layouts
from kda_sm90.backend import Sm90Backend
from kda_sm90.plan import plan, refusal

BF16 = torch.bfloat16


def shape(B=1, T=1000, H=4, HV=4, K=128, V=128, N=None, index=None, dtype=BF16, g=BF16, beta=BF16, A_log=True,
          dt_bias=True, initial=False, **options):  # fmt: skip
    gate = {"use_gate_in_kernel": True, "lower_bound": -5.0, "scale": 1.0}
    return ProblemShape(
        B=B, T=T, H=H, HV=HV, K=K, V=V, N=N or B, dtype=dtype, g_dtype=g, beta_dtype=beta, index_dtype=index,
        has_A_log=A_log, has_dt_bias=dt_bias, has_initial_state=initial, device_type="cuda", arch=(9, 0),
        options=KdaOptions(**gate | options),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"K": 64}, "K=64, V=128"),
        ({"V": 256}, "K=128, V=256"),
        ({"dtype": torch.float16}, "float16"),
        ({"g": torch.float16}, "g in torch.float16"),
        ({"beta": torch.float64}, "beta in torch.float64"),
        ({"B": 2**20, "T": 2**20}, "2^31 or more"),
    ],
)
def test_what_is_not_built_is_refused_with_the_reason(change, reason):
    assert refusal(shape()) is None
    assert reason in refusal(shape(**change))
    assert reason in Sm90Backend().can_run(shape(**change))


def test_the_gate_decides_whether_rows_vote():
    assert not plan(shape()).prepare.vote
    assert plan(shape(lower_bound=-8.0)).prepare.vote
    assert (
        plan(shape(lower_bound=None)).prepare.gate == "softplus"
        and plan(shape(lower_bound=None)).prepare.vote
    )
    free = {"use_gate_in_kernel": False, "lower_bound": None, "A_log": False, "dt_bias": False}
    assert plan(shape(**free)).prepare.gate == "precomputed" and plan(shape(**free)).prepare.vote
    assert not plan(shape(**free, safe_gate=True)).prepare.vote


def test_intermediate_states_choose_a_chunk_that_divides_their_spacing():
    for size in (32, 64):
        chosen = plan(shape(return_intermediate_states=True, chunk_size=size))
        assert chosen.chain.states == size and size % chosen.chain.chunk == 0
        assert chosen.prepare.chunk == chosen.chain.chunk
    assert plan(shape(chunk_size=32)).chain.states == 0


def test_few_sequences_take_long_chunks_and_many_take_short_ones():
    kind = lambda s: (plan(s).chain.chunk, plan(s).chain.warpgroups)
    assert kind(shape(T=65536)) == (64, 1)
    assert kind(shape(T=8192, H=64, HV=64)) == (32, 1)
    assert kind(shape(T=8192, H=96, HV=96)) == (32, 2)


def test_a_pinned_call_has_its_chunk_whatever_the_batch():
    shapes = [shape(B=B, T=T, HV=HV, pin=True) for B in (1, 8) for T in (64, 8192) for HV in (4, 64)]
    assert {plan(s).prepare.chunk for s in shapes} == {64}
    assert plan(shape(pin=True, return_intermediate_states=True, chunk_size=32)).prepare.chunk == 32


def test_a_layout_without_a_state_compiles_no_variant():
    assert plan(shape(state_v_first=True)).chain == plan(shape()).chain
    assert plan(shape(state_v_first=True, output_final_state=True)).chain.v_first


@pytest.mark.parametrize(
    ("B", "T", "N", "index"), [(3, 130, None, None), (1, 130, 7, torch.int32), (1, 0, 2, torch.int64)]
)
def test_the_workspace_holds_every_slot(B, T, N, index):
    s = shape(B=B, T=T, N=N, index=index)
    chosen = plan(s)
    C = chosen.prepare.chunk
    assert chosen.slots == (B * -(-T // C) if index is None else T // C + N)
    assert Sm90Backend().workspace_bytes(s) == layouts.workspace_bytes(chosen.slots, s.HV, C)
