"""The launch for a shape, and the model that chooses it."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from helpers.support import FREE, NOT_BUILT, problem_shape, refused

from kda_core import buffers, validate
from kda_core.contract import KdaOptions
from kda_core.testing import make_inputs
from kda_sm90 import layouts
from kda_sm90.backend import Sm90Backend, longest_of
from kda_sm90.config import CLUSTER
from kda_sm90.interfaces import PREFILL
from kda_sm90.launch_config import (
    CHAIN_NS,
    LEAST_DEPTH,
    MOST_DEPTH,
    RING_RECORDS,
    SOFTPLUS_MOST_DEPTH,
    backward_launch_config,
    beside_workspace_bytes,
    launch_config,
    launch_configs_beside,
    predicted_ns,
    segment_launch_configs,
    workspace_bytes,
)

shape = functools.partial(problem_shape, (9, 0))


@pytest.mark.parametrize(("change", "reason"), NOT_BUILT)
def test_unsupported_shapes_are_refused_with_the_reason(change, reason):
    assert refused("sm90", shape()) is None
    assert reason in refused("sm90", shape(**change))


@pytest.mark.parametrize(
    ("options", "gate", "unbounded"),
    [
        ({}, "bounded", False),
        ({"lower_bound": -8.0}, "bounded", True),
        ({"lower_bound": None}, "softplus", True),
        (FREE, "precomputed", True),
        (FREE | {"safe_gate": True}, "precomputed", False),
    ],
)
def test_the_options_of_the_gate_choose_the_variant(options, gate, unbounded):
    config = launch_config(shape(**options)).config
    assert (config.gate, config.unbounded) == (gate, unbounded)


def test_the_chunk_divides_the_spacing_of_intermediate_states():
    for size in (32, 64):
        chosen = launch_config(shape(return_intermediate_states=True, chunk_size=size))
        assert chosen.config.states and size % chosen.chunk == 0
    assert not launch_config(shape(chunk_size=32)).config.states


def test_halves_of_v_share_a_cta_only_for_many_heads():
    assert launch_config(shape(T=65536)).config.warpgroups == 1
    assert launch_config(shape(T=8192, H=96, HV=96)).config.warpgroups == 2


def test_a_pinned_call_has_the_same_chunk_in_every_batch():
    shapes = [shape(B=B, T=T, HV=HV, pin=True) for B in (1, 8) for T in (64, 8192) for HV in (4, 64)]
    assert {launch_config(s).chunk for s in shapes} == {64}
    assert launch_config(shape(pin=True, return_intermediate_states=True, chunk_size=32)).chunk == 32


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
@pytest.mark.parametrize("sms", (3, 20, 114, 131, 132))
@pytest.mark.parametrize("choose", (launch_config, backward_launch_config))
def test_all_ctas_are_co_resident_and_the_workspace_is_bounded(choose, case, sms):
    s = shape(**case)
    chosen = choose(s, sms)
    chains = chosen.queues * (2 // chosen.config.warpgroups)
    assert chosen.intra_chunk_ctas >= 1 and chosen.intra_chunk_ctas + chains <= sms - sms % CLUSTER
    grid, *_ = PREFILL.grid(chosen.config, chosen)
    assert grid % PREFILL.cluster(chosen.config) == 0 and grid <= sms
    assert chosen.queues <= s.HV * s.N
    assert (
        chosen.workspace_bytes
        == layouts.workspace_bytes(chosen.queues * chosen.depth, chosen.queues, chosen.chunk)
        <= 512 << 20
    )


@pytest.mark.parametrize("longest", (None, 40, 2000, 6000))
@pytest.mark.parametrize("gate", ({}, {"lower_bound": None}), ids=("bounded", "unbounded"))
@pytest.mark.parametrize("HV", (1, 4, 12, 64))
def test_the_launch_has_the_smallest_predicted_time(HV, gate, longest):
    s = shape(T=6000, H=HV, HV=HV, N=9, index=torch.int32, **gate)
    predicted = functools.partial(predicted_ns, s, sms=132, longest=longest)
    kinds = [(*kind, False) for kind in CHAIN_NS]
    if not gate:
        kinds.append((32, 2, True))
    every = [
        predicted(*kind, n, local=local)
        for *kind, local in kinds
        for n in range(1, min(131 * kind[1] // 2, HV * 9) + 1)
    ]
    chosen = launch_config(s, 132, longest)
    kind = chosen.chunk, chosen.config.warpgroups
    assert predicted(*kind, chosen.queues, local=chosen.config.local) == min(every)


@pytest.mark.parametrize("sms", (132, 20, 2))
@pytest.mark.parametrize(("HV", "N"), ((1, 1), (3, 1), (12, 36), (40, 36), (64, 1), (96, 2), (128, 1)))
def test_of_equal_times_the_launch_has_the_fewest_queues(HV, N, sms):
    for T, longest in itertools.product((1, 33, 300, 2047, 9000, 65536), (None, 16, 480, 9000)):
        s = shape(T=T, H=HV, HV=HV, N=N, index=None if N == 1 else torch.int32)
        longest = None if N == 1 else longest
        chosen = launch_config(s, sms, longest)
        kind = chosen.chunk, chosen.config.warpgroups
        most = min((sms - 1) * kind[1] // 2, HV * N)
        predicted = functools.partial(predicted_ns, sms=sms, longest=longest, local=chosen.config.local)
        times = [predicted(s, *kind, n) for n in range(1, most + 1)]
        assert chosen.queues == 1 + times.index(min(times))


@pytest.mark.parametrize(("T", "heads", "queues"), ((512, 64, 64), (1024, 64, 64), (1024, 80, 57)))
def test_only_queues_of_longer_calls_cut_heads(T, heads, queues):
    chosen = launch_config(shape(T=T, H=heads, HV=heads), 132)
    assert (chosen.chunk, chosen.config.warpgroups, chosen.queues) == (32, 2, queues)
    assert chosen.depth >= 13


@pytest.mark.parametrize("gate", ({}, {"lower_bound": None}), ids=("bounded", "unbounded"))
@pytest.mark.parametrize(("HV", "T", "N"), ((1, 6000, 9), (4, 65536, 40), (64, 500, 3)))
def test_the_launches_of_segments_have_the_smallest_predicted_time(HV, T, N, gate):
    s = shape(T=T, H=HV, HV=HV, N=N, index=torch.int32, **gate)
    chosen = segment_launch_configs(s)

    def fastest(chunk, mode):
        chains = {"summarize": 4, "execute": 2}[mode]
        free = 132 if mode == "execute" else 131
        numbers = {wg: range(1, min(free * wg // chains, HV * N) + 1) for wg in (1, 2)}
        return min(predicted_ns(s, chunk, wg, n, mode=mode) for wg in (1, 2) for n in numbers[wg])

    def predicted(p):
        return predicted_ns(s, p.chunk, p.config.warpgroups, p.queues, mode=p.config.mode)

    both = {chunk: fastest(chunk, "summarize") + fastest(chunk, "execute") for chunk in (32, 64)}
    assert predicted(chosen.summarize) + predicted(chosen.execute) == min(both.values())
    assert chosen.summarize.chunk == chosen.execute.chunk and chosen.summarize.depth == chosen.execute.depth


@pytest.mark.parametrize("sms", (8, 20, 114, 132))
@pytest.mark.parametrize("gate", ({}, {"lower_bound": None}), ids=("bounded", "unbounded"))
@pytest.mark.parametrize("HV", (1, 4, 8, 12))
def test_two_launches_at_the_same_time_have_room_on_the_device(HV, gate, sms):
    inner = shape(T=32000, H=HV, HV=HV, N=5, index=torch.int32, **gate)
    found = {}
    for mode, tokens in (("summarize", 24000), ("execute", 8000)):
        both = launch_configs_beside(shape(T=tokens, H=HV, HV=HV, **gate), inner, mode, sms)
        ctas = [p.queues * p.config.chain_ctas + p.intra_chunk_ctas for p in both]
        assert sum(n + n % 2 for n in ctas) <= sms, "clusters of two CTAs"
        assert both.whole.config.mode == "whole" and both.inner.config.mode == mode
        assert both.whole.intra_chunk_ctas >= 1
        found[mode] = both.inner
    same = lambda launch: (launch.chunk, launch.depth, launch.records)
    assert same(found["summarize"]) == same(found["execute"]), "both launches have the same records"


@pytest.mark.parametrize("sms", (8, 60, 132))
@pytest.mark.parametrize("gate", ({}, {"lower_bound": None}), ids=("bounded", "unbounded"))
@pytest.mark.parametrize("HV", (1, 4, 12))
def test_the_workspaces_of_two_launches_suffice_for_all_lengths(HV, gate, sms):
    inner = shape(T=9000, H=HV, HV=HV, N=4, index=torch.int32, **gate)
    for N, T in itertools.product((1, 3, 40), (200, 5000, 40000)):
        whole = shape(T=T, H=HV, HV=HV, N=N, index=None if N == 1 else torch.int32, **gate)
        sizes = beside_workspace_bytes(whole, inner, whole, sms)
        for mode in ("summarize", "execute"):
            for longest in (None,) if N == 1 else (None, T // N, T // 2, T):
                both = launch_configs_beside(whole, inner, mode, sms, longest)
                assert both.whole.workspace_bytes <= sizes[0] and both.inner.workspace_bytes <= sizes[1]


def test_a_share_makes_the_whole_call_about_as_fast_as_the_segments_beside_it():
    whole, inner = shape(T=26944, H=8, HV=8), shape(T=30016, H=8, HV=8, N=5, index=torch.int32)
    both = launch_configs_beside(whole, inner, "summarize")
    assert (both.whole.chunk, both.whole.config.warpgroups, both.whole.queues) == (64, 1, 8)
    assert 36 <= both.whole.intra_chunk_ctas <= 50
    longer = launch_configs_beside(shape(T=8000, H=8, HV=8), inner, "summarize")
    assert longer.whole.intra_chunk_ctas < both.whole.intra_chunk_ctas


def test_a_device_without_room_for_two_launches_is_refused():
    inner = shape(T=100, N=2, index=torch.int32)
    with pytest.raises(ValueError, match="sms: expected at least 8, got 6"):
        launch_configs_beside(shape(T=100), inner, "summarize", 6)


@pytest.mark.parametrize(
    ("T", "heads", "local"), ((8192, 64, True), (8192, 96, True), (1024, 64, False), (8192, 48, False))
)
def test_long_calls_of_many_heads_have_local_records(T, heads, local):
    call = functools.partial(shape, T=T, H=heads, HV=heads)
    chosen, dense = launch_config(call()), launch_config(call(), spacing=64)
    assert chosen.config.local == local and not dense.config.local
    same = lambda config: (config.chunk, config.warpgroups)  # what changes bits
    assert same(dense.config) == same(chosen.config) == (32, 2)
    largest = max(
        chosen.workspace_bytes, dense.workspace_bytes
    )  # a backward may run the forward again, without dense states
    assert largest == workspace_bytes(call(needs_backward=True, disable_recompute=True))
    assert not launch_config(call(lower_bound=None)).config.local
    assert replace(launch_config(call(), spacing=512), config=dense.config) == dense
    assert not launch_config(call(return_intermediate_states=True)).config.local


def test_one_much_longer_sequence_gets_the_faster_chain():
    s = shape(T=61440, H=16, HV=16, N=8, index=torch.int32)
    even, known, ragged = launch_config(s), launch_config(s, longest=8000), launch_config(s, longest=32768)
    assert even == known and even.config.warpgroups == 2
    assert ragged.config.warpgroups == 1 and ragged.queues < even.queues


def test_known_lengths_are_rounded_up_to_steps():
    x = make_inputs("slow", 100, H=1, lengths=(61, 0, 39)).arguments
    options = KdaOptions(use_gate_in_kernel=True, lower_bound=-5.0)
    tensors = [
        x.get(n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
    ]
    packed = [*tensors, None]
    fixed = [*tensors[:-1], None, None]
    longest = [
        longest_of(buffers.make_inputs(t, validate.problem_shape(*t, options=options)))
        for t in (packed, fixed)
    ]
    assert longest == [64, None]  # steps of 4 tokens


@pytest.mark.parametrize("N", (1, 2, 9, 100, 1000))
@pytest.mark.parametrize("HV", (1, 3, 64))
@pytest.mark.parametrize("T", (1, 64, 640, 6400))
def test_a_ring_is_deep_enough_or_holds_a_whole_sequence(T, HV, N):
    s = shape(T=T, H=HV, HV=HV, N=N, index=torch.int32)
    for sms, longest in itertools.product((2, 20, 132), (None, 0, T // 3, T)):
        for mode, choose in (("whole", launch_config), ("reverse", backward_launch_config)):
            chosen = choose(s, sms, longest)
            assert chosen.depth >= min(
                LEAST_DEPTH, T // chosen.chunk + N
            )  # one sequence may have all the tokens
            assert chosen.workspace_bytes <= workspace_bytes(s, sms, mode) <= 128 << 20
        chosen = backward_launch_config(s, sms, longest, "recompute")
        assert 8 <= chosen.depth <= 16 and (chosen.depth == 8 or chosen.records <= RING_RECORDS)
        assert chosen.depth >= min(16 if T > 512 else 8, RING_RECORDS // chosen.queues)
        assert chosen.workspace_bytes <= workspace_bytes(s, sms, "recompute") <= 128 << 20


@pytest.mark.parametrize(("B", "T", "H", "queues"), ((1, 8192, 64, 64), (2, 8192, 64, 63), (1, 8192, 32, 32)))
def test_chains_that_recompute_states_have_the_queues_that_were_fastest(B, T, H, queues):
    assert backward_launch_config(shape(B=B, T=T, H=H, HV=H), 132, None, "recompute").queues == queues


@pytest.mark.parametrize("heads", (1, 4, 12, 24))
def test_chunks_of_64_by_warpgroups_have_rings_that_stay_in_the_l2(heads):
    chosen = launch_config(shape(T=8192, H=heads, HV=heads))
    assert (chosen.chunk, chosen.config.by_warpgroup) == (64, True)
    assert LEAST_DEPTH <= chosen.depth <= MOST_DEPTH


@pytest.mark.parametrize("heads", (1, 4, 12, 20))
def test_softplus_gates_with_chunks_of_64_have_deeper_rings(heads):
    chosen = launch_config(shape(T=8192, H=heads, HV=heads, lower_bound=None))
    assert (chosen.chunk, chosen.config.by_warpgroup) == (64, True)
    assert MOST_DEPTH < chosen.depth <= SOFTPLUS_MOST_DEPTH


def test_a_ring_is_no_deeper_than_its_queue_is_long():
    chosen = launch_config(shape(T=64, H=1, HV=1))
    assert chosen.queues == 1 and chosen.depth == -(-64 // chosen.chunk)
    assert Sm90Backend().workspace_bytes(shape(T=64, H=1, HV=1)) == chosen.workspace_bytes


@pytest.mark.parametrize("disable_recompute", (False, True))
@pytest.mark.parametrize("T", (1, 8192, 10**5, 10**6, 10**7))
@pytest.mark.parametrize("HV", (1, 4, 64))
def test_the_workspace_of_a_backward_is_bounded(HV, T, disable_recompute):
    from kda_sm90.backward import CHECKPOINT, CHUNK, slabs_of, workspace_bytes

    s = shape(T=T, H=HV, HV=HV, needs_backward=True, disable_recompute=disable_recompute)
    limit = (256 if disable_recompute else 640) << 20
    unsaved = -(-T // CHECKPOINT) * HV << 16  # S every 512 tokens, if another backend's forward saved nothing
    assert workspace_bytes(s) <= max(limit, unsaved + limit // 2)
    slabs = slabs_of(s, CHUNK if disable_recompute else CHECKPOINT)
    starts = list(slabs.starts())
    assert starts[-1] == 0 and starts[0] + slabs.slots >= slabs.total > starts[0]
    assert len(starts) == 1 or slabs.chunks * HV * CHUNK >= 10**5  # token-heads of a slab


def test_shapes_with_as_many_slots_share_a_launch():
    """In serving nearly every call has a new T. The choice is the one without the cache."""
    seen: dict[int, set[int]] = {}
    for choose in (launch_config, segment_launch_configs):
        for sizes in ({}, {"B": 3}, {"N": 5, "index": torch.int32}):
            for T in (*range(1, 200), *range(8000, 8200)):
                s = shape(T=T, **sizes)
                found = choose(s)
                assert found == choose.__wrapped__(s)
                seen.setdefault(id(found), set()).add(T)
    assert max(len(lengths) for lengths in seen.values()) >= 32
    s = shape(T=100)
    assert launch_config(s) is launch_config(s, 132, None, 0, False) is launch_config(s, strided=False)
    assert launch_config(s) is not launch_config(s, 131) and launch_config(s) != launch_config(
        s, strided=True
    )
