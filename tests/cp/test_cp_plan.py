"""Plans as data, the choice of a plan, the cost model, constants and the command line."""

import itertools
import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_core.errors import ArgumentError
from kda_cp import Constants, Pass, Plan, Prediction, constants, make_plan, predict
from kda_cp.__main__ import main
from kda_cp.cache import Cache
from kda_cp.calibrate import fit, scaled
from kda_cp.choose import MARGIN
from kda_cp.cost import busiest_lane, call_us
from kda_cp.cuts import GRANULE, MAX_SEGMENTS, windows
from kda_cp.plan import STRATEGIES

H200 = constants.SHIPPED["NVIDIA H200", "sm90", "bfloat16"]
CHEAP = Constants(Pass(((32, 20.0),), 0.05, 0.01, 5.0), 2.0, 0.05)  # a device on which short splits gain
NAN = float("nan")

sequences = st.lists(st.integers(0, 200_000), min_size=1, max_size=12).map(tuple)
segments = st.one_of(
    st.integers(0, 1000).map(lambda n: (n,)),
    st.lists(st.integers(1, 1000), min_size=2, max_size=9).map(tuple),
)
plans = st.builds(
    Plan, st.lists(segments, min_size=1, max_size=6).map(tuple), st.sampled_from(STRATEGIES[1:])
)


# ---- plans


@settings(deadline=None)
@given(plans)
def test_plans_round_trip_through_json_and_compare_by_content(plan):
    copy = Plan.from_json(plan.to_json())
    assert copy == plan and hash(copy) == hash(plan) and copy.to_json() == plan.to_json()
    assert Plan([list(s) for s in plan.segments], plan.strategy) == plan
    assert Plan(plan.segments, plan.strategy, Prediction(1.0, 2.0, "us", "a rule")) == plan


@pytest.mark.parametrize(
    ("sequences", "strategy", "words"),
    [
        (((),), "exact", "segments.0."),
        (((3,), (2, 0)), "exact", "segments.1.*several of at least 1"),
        (((-1,),), "exact", "one length"),
        (((2.0,),), "exact", "segments: expected .*integers"),
        ((5,), "exact", "segments: expected .*integers"),
        (5, "exact", "segments: expected .*integers"),
        (((1, 1),), "serial", "strategy.*'exact' or 'certified'"),
        (((1,),), "fast", "strategy: expected one of"),
    ],
)
def test_an_invalid_plan_raises_an_error_that_names_the_argument(sequences, strategy, words):
    with pytest.raises(ArgumentError, match=words):
        Plan(sequences, strategy)


def test_plans_accept_integers_of_numpy_and_torch():
    plan = Plan(((np.int64(2), torch.tensor(3)),))
    assert plan == Plan(((2, 3),)) and plan.to_json() == Plan(((2, 3),)).to_json()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Plan.uniform((10,), 2.0), "segments: expected an integer of at least 1, got 2.0"),
        (lambda: Plan.uniform((10,), 0), "segments: expected an integer of at least 1, got 0"),
        (lambda: Plan.uniform((-10,), 2), "lengths: expected integers of at least 0"),
        (lambda: make_plan((10, -1), HV=1), "lengths: expected integers of at least 0"),
        (lambda: make_plan((10,), HV=0), "HV: expected an integer of at least 1, got 0"),
        (lambda: make_plan((10,), HV=1, V=0), "V: expected"),
        (lambda: make_plan((10,), HV=1, strategy="fast"), "strategy: expected 'auto'"),
        (lambda: predict(Plan(((10,),)), HV=-1), "HV: expected"),
    ],
)  # fmt: skip
def test_invalid_arguments_raise_errors_that_name_them(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.parametrize("text", ["", "3", "{}", '{"segments":[[1]]}', '{"segments":3,"strategy":"exact"}'])
def test_text_that_is_not_the_json_of_a_plan_raises(text):
    with pytest.raises(ArgumentError, match="context_parallel: expected a plan of kda-cp"):
        Plan.from_json(text)


@settings(deadline=None)
@given(sequences, st.integers(1, 64))
def test_uniform_plans_cut_evenly(lengths, n):
    plan = Plan.uniform(lengths, n)
    assert plan.lengths == lengths
    for length, s in zip(lengths, plan.segments):
        assert len(s) == max(1, min(n, length)) and max(s) - min(s) <= 1


# ---- choice


@settings(deadline=None)
@given(sequences, st.sampled_from([1, 4, 16, 64]), st.sampled_from([H200, CHEAP, None]))
def test_a_chosen_plan_cuts_its_sequences_at_granules(lengths, HV, c):
    plan = make_plan(lengths, HV=HV, constants=c, SMs=132)
    assert plan.lengths == lengths and plan.strategy == ("exact" if plan.is_split else "serial")
    for s in plan.segments:
        assert len(s) <= MAX_SEGMENTS
        assert all(p % GRANULE == 0 for p in s[:-1])
        assert max(s[:-1], default=0) <= max(s) and (len(s) == 1 or min(s[:-1]) > max(s) - 2 * GRANULE)


@settings(deadline=None, max_examples=60)
@given(sequences, st.sampled_from([1, 4, 16]), st.sampled_from([H200, CHEAP]))
def test_the_choice_is_as_good_as_the_best_uniform_or_serial_plan(lengths, HV, c):
    plan = make_plan(lengths, HV=HV, constants=c)
    serial = plan.prediction.serial
    brute = min(predict(Plan.uniform(lengths, n), HV=HV, constants=c).planned for n in range(1, 65))
    assert plan.prediction.planned <= 1.02 * serial
    if plan.is_split:
        assert plan.prediction.planned == predict(plan, HV=HV, constants=c).planned <= serial / MARGIN
        assert plan.prediction.planned <= 1.05 * brute
    else:
        assert serial <= 1.05 * MARGIN * brute


def test_sequences_of_different_lengths_get_balanced_segments():
    plan = make_plan((65536, 32768, 16384), HV=1, constants=CHEAP)
    longest = [max(s) for s in plan.segments]
    assert plan.is_split and max(longest) <= 2 * min(p for s in plan.segments for p in s)
    assert plan.prediction.planned <= min(
        predict(Plan.uniform((65536, 32768, 16384), n), HV=1, constants=CHEAP).planned for n in range(1, 65)
    )


def test_a_full_device_and_a_short_call_run_serially():
    for lengths, HV in (((8192,) * 4, 64), ((256,), 4), ((0, 0), 4), ((65536,), 128)):
        plan = make_plan(lengths, HV=HV, constants=H200)
        assert not plan.is_split and plan.strategy == "serial"
        assert plan.prediction.planned == plan.prediction.serial


def test_a_named_strategy_splits_even_if_serial_is_faster():
    for strategy in ("exact", "certified"):
        plan = make_plan((4096, 100), HV=64, constants=H200, strategy=strategy)
        assert plan.is_split and plan.strategy == strategy
    plan = make_plan((65536,), HV=8, constants=H200, strategy="certified")
    assert plan.prediction.planned is None and "depends on the gates" in str(plan)
    assert predict(plan, HV=8, constants=H200) is None
    assert make_plan((1,), HV=1, constants=H200, strategy="exact").strategy == "serial"  # nothing to cut


def test_the_ratio_rule_counts_tokens_of_the_busiest_lane():
    plan = make_plan((65536,), HV=4, SMs=132)
    assert plan.is_split and plan.prediction.unit == "tokens" and plan.prediction.serial == 65536
    assert plan.prediction.planned == 3 * max(plan.segments[0]) and min(plan.segments[0]) >= 1024
    assert "ratio rule for 132 SMs" in plan.prediction.rule
    assert not make_plan((4096,), HV=4, SMs=132).is_split  # four segments gain only a third
    assert not make_plan((65536,), HV=132, SMs=132).is_split
    cpu = make_plan((65536,), HV=4)
    assert not cpu.is_split and "CPU" in str(cpu)


# ---- the model


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3), st.integers(1, 6))
def test_the_busiest_lane_is_within_the_bounds_of_list_scheduling(lengths, heads, lanes):
    got = busiest_lane(lengths, heads, lanes)
    tasks = [n for n in lengths for _ in range(heads)]
    low = max(max(tasks), sum(tasks) / lanes)
    assert low <= got <= sum(tasks) / lanes + max(tasks)
    if len(tasks) <= 6 and lanes <= 3:
        best = min(
            max(sum(n for n, lane in zip(tasks, lane_of) if lane == i) for i in range(lanes))
            for lane_of in itertools.product(range(lanes), repeat=len(tasks))
        )
        assert best <= got <= (4 / 3) * best  # Graham 1969


def test_predicted_times_grow_with_work():
    for small, large in (((4096,), (8192,)), ((4096,), (4096, 4096, 4096) * 40)):
        a, b = (predict(Plan.uniform(x, 4), HV=4, constants=H200) for x in (small, large))
        assert a.planned < b.planned and a.serial < b.serial
    plan = Plan.uniform((4096,), 4)
    square = predict(plan, HV=4, constants=H200).planned
    assert predict(plan, HV=4, K=256, V=128, constants=H200).planned > square  # two calls for M
    assert predict(plan, HV=4) is None


def test_a_native_split_is_predicted_as_summarize_merge_and_execute():
    plan = Plan(((1000, 1000, 1000), (500,)))
    got = predict(plan, HV=4, constants=H200, native=True)
    tokens = 3500 * 4
    lanes = {p: min(max(1000, tokens / n) * ns for n, ns in p.chain) for p in (H200.summarize, H200.execute)}
    want = sum(p.call_us + max(ns, p.work_ns * tokens) / 1e3 for p, ns in lanes.items()) + 2 * H200.merge_us
    assert got.planned == pytest.approx(want)
    assert got.planned < predict(plan, HV=4, constants=H200).planned
    assert got.serial == predict(plan, HV=4, constants=H200).serial
    whole = Plan(((3000,), (500,)))
    assert predict(whole, HV=4, constants=H200, native=True).planned == got.serial
    for lengths in ((65536,), (65536, 32768, 16384)):
        own, generic = (make_plan(lengths, HV=4, constants=H200, native=n).prediction for n in (True, False))
        assert own.planned < generic.planned


def test_windows_are_asked_for_only_if_a_split_may_be_fast_enough():
    asked = []

    def window():
        asked.append(1)
        return 1 << 18

    assert not make_plan((64, 1000), HV=8, constants=H200, native=True, window=window).is_split
    assert not asked
    lengths = (1 << 20,)
    plan = make_plan(lengths, HV=8, constants=H200, native=True, window=window)
    assert asked == [1] and plan == make_plan(lengths, HV=8, constants=H200, native=True, window=1 << 18)
    assert predict(plan, HV=8, constants=H200, native=True, window=window) == predict(
        plan, HV=8, constants=H200, native=True, window=1 << 18
    )


def test_each_window_gets_its_own_segments():
    lengths, window = (1 << 20,), 1 << 18
    plan = make_plan(lengths, HV=8, constants=H200, native=True, window=window)
    found = windows(plan.segments, window)
    assert len(found) == 4 and len({len(w) for w in found}) == 1 and len(found[0]) > 2
    one = Plan((tuple(p for _, p in found[0]),))
    each = predict(one, HV=8, constants=H200, native=True).planned
    assert plan.prediction.planned == pytest.approx(4 * each, rel=0.01)
    assert str(predict(Plan.uniform(lengths, 2), HV=8, constants=H200, native=True, window=window))


# ---- the cache and the constants


def test_the_cache_is_bounded_and_drops_the_least_recently_used_value():
    cache = Cache(3)
    made = []
    for key in (1, 2, 3, 1, 4, 1, 2):
        cache.get(key, lambda key=key: made.append(key) or key)
    assert len(cache) == 3 and made == [1, 2, 3, 4, 2]


def test_threads_share_one_cached_value():
    cache, seen, gate = Cache(8), [], threading.Barrier(8)

    def work():
        gate.wait()
        seen.append(cache.get("key", object))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(map(id, seen))) == 1


def test_a_backend_without_constants_uses_the_ratio_rule(stored):
    assert constants.lookup(("NVIDIA B200", "sm100", "bfloat16")) == (None, "none")
    plan = make_plan((65536,), HV=4, SMs=148, native=True)
    assert plan.is_split and plan.prediction.unit == "tokens"
    assert plan.prediction.rule.startswith("ratio rule for 148 SMs")


def test_stored_constants_take_precedence_over_shipped_ones(stored):
    key = ("NVIDIA H200", "sm90", "bfloat16")
    assert constants.lookup(key) == (H200, "shipped")
    assert constants.lookup(("other", "sm90", "bfloat16")) == (H200, "NVIDIA H200's shipped")
    for unknown in (("cpu", "sm90", "bfloat16"), ("other", "sm90", "float32"), ("other", "mine", "bfloat16")):
        assert constants.lookup(unknown) == (None, "none")
    stored(("other", "sm90", "bfloat16"), H200)
    file = stored(key, CHEAP)
    constants.refresh()
    assert constants.lookup(key) == (CHEAP, "calibrated")
    assert constants.lookup(("other", "sm90", "bfloat16")) == (H200, "calibrated")
    assert len(json.loads(file.read_text())) == 2 and file == constants.path()


def test_the_fit_recovers_the_constants_of_a_simulated_device():
    for c in (
        Pass(((66, 14.0), (132, 22.5)), 0.6, 0.0, 12.0),
        Pass(((66, 14.0), (132, 46.2)), 0.6, 0.35, 12.0),
        Pass(((66, 20.0), (132, 20.0)), 0.0, 0.0, 0.0),
    ):
        whole = Constants(c, 1.0, 1.0)
        got = fit(lambda n, T, c=whole: predict(Plan(((T,),)), HV=n, constants=c).planned, 132)
        assert got.chain[0] == pytest.approx(c.chain[0]) and got.chain[1] == pytest.approx(c.chain[1])
        for name in ("intra_chunk_ns", "work_ns", "call_us"):
            assert getattr(got, name) == pytest.approx(getattr(c, name), abs=1e-9), name


@pytest.mark.parametrize(
    "known", [H200.forward, H200.summarize, H200.execute], ids=("forward", "summarize", "execute")
)
def test_shipped_constants_are_scaled_to_a_device_of_other_speed(known):
    there = Pass(
        tuple((n * 114 // 132, 1.25 * ns) for n, ns in known.chain), 1.25 * known.intra_chunk_ns, 1.25 * known.work_ns,
        1.25 * known.call_us, known.even,
    )  # fmt: skip
    got = scaled(known, lambda n, T: call_us(there, [T], n), 114)
    assert got.even and [n for n, _ in got.chain] == [n for n, _ in there.chain]
    for name in ("intra_chunk_ns", "work_ns", "call_us"):
        assert getattr(got, name) == pytest.approx(getattr(there, name))
    assert [ns for _, ns in got.chain] == pytest.approx([ns for _, ns in there.chain])


def test_the_command_line_prints_constants_plans_and_errors(stored, capsys, monkeypatch):
    stored(("other", "mine", "bfloat16"), CHEAP)
    assert main(["constants"]) == 0
    shown = capsys.readouterr().out
    assert (
        "NVIDIA H200 / sm90 / bfloat16 (shipped)" in shown and "other / mine / bfloat16 (calibrated)" in shown
    )
    assert main(["plan", "65536", "--HV", "4"]) == 0
    assert capsys.readouterr().out.startswith("exact (65536 in ")
    assert main(["plan", "65536", "--HV", "4", "--device", "unheard of"]) == 0
    assert "NVIDIA H200's shipped constants" in capsys.readouterr().out
    assert main(["plan", "65536", "--HV", "4", "--backend", "reference"]) == 0
    assert "ratio rule for 132 SMs" in capsys.readouterr().out
    assert main(["plan", "65536", "--HV", "4", "--backend", "mine"]) == 1
    assert "backend 'mine' is not installed" in capsys.readouterr().err
    assert main(["plan", "65536", "--HV", "0"]) == 1
    assert "HV: expected an integer of at least 1, got 0" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["calibrate", "--backend", "reference"]) == 1
    assert "device: expected a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "field", [{"chain": ()}, {"chain": ((0, 1.0),)}, {"call_us": -1.0}, {"work_ns": NAN}]
)
def test_an_invalid_pass_raises(field):
    given = {"chain": ((1, 1.0),), "intra_chunk_ns": 1.0, "work_ns": 1.0, "call_us": 1.0}
    with pytest.raises(ArgumentError, match=next(iter(field))):
        Pass(**(given | field))


@pytest.mark.parametrize("field", [{"merge_us": NAN}, {"gather_ns": -1.0}, {"execute": CHEAP.forward}])
def test_invalid_constants_raise(field):
    with pytest.raises(ArgumentError, match=next(iter(field))):
        Constants(**({"forward": CHEAP.forward, "merge_us": 1.0, "gather_ns": 1.0} | field))
