"""The choice of kernels, from metadata alone."""

import functools
import itertools

import pytest
import torch
from helpers.support import FREE, NOT_BUILT, problem_shape, refused

from kda_core import contract
from kda_core.contract import KdaOptions
from kda_core.testing import make_inputs
from kda_sm90 import layouts
from kda_sm90.backend import Sm90Backend, longest_of
from kda_sm90.plan import CHAIN_NS, LEAST_DEPTH, plan, predicted_ns, segment_plan, workspace_bytes

shape = functools.partial(problem_shape, (9, 0))


@pytest.mark.parametrize(("change", "reason"), NOT_BUILT)
def test_what_is_not_built_is_refused_with_the_reason(change, reason):
    assert refused("sm90", shape()) is None
    assert reason in refused("sm90", shape(**change))


def test_the_gate_decides_whether_rows_vote():
    assert not plan(shape()).config.unbounded
    assert plan(shape(lower_bound=-8.0)).config.unbounded
    assert (
        plan(shape(lower_bound=None)).config.gate == "softplus"
        and plan(shape(lower_bound=None)).config.unbounded
    )
    assert plan(shape(**FREE)).config.gate == "precomputed" and plan(shape(**FREE)).config.unbounded
    assert not plan(shape(**FREE, safe_gate=True)).config.unbounded


def test_intermediate_states_choose_a_chunk_that_divides_their_spacing():
    for size in (32, 64):
        chosen = plan(shape(return_intermediate_states=True, chunk_size=size))
        assert chosen.config.states and size % chosen.chunk == 0
    assert not plan(shape(chunk_size=32)).config.states


def test_few_sequences_give_each_half_of_v_an_sm_and_many_share_one():
    assert plan(shape(T=65536)).config.warpgroups == 1
    assert plan(shape(T=8192, H=96, HV=96)).config.warpgroups == 2


def test_a_pinned_call_has_its_chunk_whatever_the_batch():
    shapes = [shape(B=B, T=T, HV=HV, pin=True) for B in (1, 8) for T in (64, 8192) for HV in (4, 64)]
    assert {plan(s).chunk for s in shapes} == {64}
    assert plan(shape(pin=True, return_intermediate_states=True, chunk_size=32)).chunk == 32


CASES = [
    {"B": 3, "T": 130},
    {"T": 130, "N": 7, "index": torch.int32},
    {"T": 8192, "HV": 64, "H": 16},
    {"T": 8192, "HV": 96, "H": 96, "N": 6, "index": torch.int64},
    {"B": 200, "T": 1000, "HV": 3, "H": 3},
    {"T": 1 << 20, "HV": 4, "N": 1000, "index": torch.int32},
    {"B": 2, "T": 64, "HV": 97, "H": 97},
    {"T": 1 << 24, "HV": 64, "H": 64},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sms", (20, 114, 132))
def test_the_launch_fits_on_the_device_at_once_and_the_rings_into_512_mib(case, sms):
    s = shape(**case)
    chosen = plan(s, sms)
    chains = chosen.streams * (2 // chosen.config.warpgroups)
    assert chosen.preparers >= 1 and chosen.preparers + chains <= sms
    assert chosen.streams <= s.HV * s.N
    assert (
        chosen.workspace_bytes
        == layouts.workspace_bytes(chosen.streams * chosen.depth, chosen.streams, chosen.chunk)
        <= 512 << 20
    )


@pytest.mark.parametrize("longest", (None, 40, 2000, 6000))
@pytest.mark.parametrize("gate", ({}, {"lower_bound": None}), ids=("bounded", "unbounded"))
@pytest.mark.parametrize("HV", (1, 4, 12, 64))
def test_the_plan_is_the_fastest_of_all_by_the_model(HV, gate, longest):
    s = shape(T=6000, H=HV, HV=HV, N=9, index=torch.int32, **gate)
    predicted = functools.partial(predicted_ns, s, sms=132, longest=longest)
    every = [predicted(*kind, n) for kind in CHAIN_NS for n in range(1, min(131 * kind[1] // 2, HV * 9) + 1)]
    chosen = plan(s, 132, longest)
    assert predicted(chosen.chunk, chosen.config.warpgroups, chosen.streams) == min(every)


@pytest.mark.parametrize("gate", ({}, {"lower_bound": None}), ids=("bounded", "unbounded"))
@pytest.mark.parametrize(("HV", "T", "N"), ((1, 6000, 9), (4, 65536, 40), (64, 500, 3)))
def test_the_launches_of_segments_are_the_fastest_of_all_by_the_model(HV, T, N, gate):
    s = shape(T=T, H=HV, HV=HV, N=N, index=torch.int32, **gate)
    chosen = segment_plan(s)

    def fastest(chunk, mode):
        chains = {"summarize": 4, "run": 2}[mode]
        free = 132 if mode == "run" else 131
        numbers = {wg: range(1, min(free * wg // chains, HV * N) + 1) for wg in (1, 2)}
        return min(predicted_ns(s, chunk, wg, n, mode=mode) for wg in (1, 2) for n in numbers[wg])

    def predicted(p):
        return predicted_ns(s, p.chunk, p.config.warpgroups, p.streams, mode=p.config.mode)

    both = {chunk: fastest(chunk, "summarize") + fastest(chunk, "run") for chunk in (32, 64)}
    assert predicted(chosen.summarize) + predicted(chosen.run) == min(both.values())
    assert chosen.summarize.chunk == chosen.run.chunk and chosen.summarize.depth == chosen.run.depth


def test_a_sequence_that_is_much_longer_than_the_others_gets_a_faster_chain():
    s = shape(T=61440, H=16, HV=16, N=8, index=torch.int32)
    even, known, ragged = plan(s), plan(s, longest=8000), plan(s, longest=32768)
    assert even == known and even.config.warpgroups == 2
    assert ragged.config.warpgroups == 1 and ragged.streams < even.streams


def test_a_plan_goes_by_the_lengths_that_the_host_knows_in_steps():
    x = make_inputs("slow", 100, H=1, lengths=(61, 0, 39)).arguments
    options = KdaOptions(use_gate_in_kernel=True, lower_bound=-5.0)
    tensors = [
        x.get(n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
    ]
    packed = [*tensors, None]
    fixed = [*tensors[:-1], None, None]
    longest = [
        longest_of(contract.make_inputs(t, contract.problem_shape(*t, options=options)))
        for t in (packed, fixed)
    ]
    assert longest == [64, None]  # steps of 4 tokens


@pytest.mark.parametrize("N", (1, 2, 9, 100, 1000))
@pytest.mark.parametrize("HV", (1, 3, 64))
@pytest.mark.parametrize("T", (1, 64, 640, 6400))
def test_a_ring_that_does_not_hold_all_of_a_sequence_is_deep_enough_to_move_on(T, HV, N):
    s = shape(T=T, H=HV, HV=HV, N=N, index=torch.int32)
    for sms, longest in itertools.product((2, 20, 132), (None, 0, T // 3, T)):
        chosen = plan(s, sms, longest)
        assert chosen.depth >= min(LEAST_DEPTH, T // chosen.chunk + N)  # one sequence may have all the tokens
        assert chosen.workspace_bytes <= workspace_bytes(s, sms) <= 128 << 20


def test_a_ring_is_no_deeper_than_its_stream_is_long():
    chosen = plan(shape(T=64, H=1, HV=1))
    assert chosen.streams == 1 and chosen.depth == -(-64 // chosen.chunk)
    assert Sm90Backend().workspace_bytes(shape(T=64, H=1, HV=1)) == chosen.workspace_bytes
