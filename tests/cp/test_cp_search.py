"""The search for a plan finds the same plan as an exhaustive search, with a bounded amount of work."""

import heapq
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_cp import Constants, Pass, Plan, constants, make_plan, predict
from kda_cp.choose import MARGIN, RATIO_MARGIN, RATIO_SEGMENT
from kda_cp.cost import busiest_lane
from kda_cp.cuts import COUNTS, GRANULE, MAX_SEGMENTS, WHOLE

H200 = constants.SHIPPED["NVIDIA H200", "sm90", "bfloat16"]
CHEAP = Constants(Pass(((32, 20.0),), 0.05, 0.01, 5.0), 2.0, 0.05)  # a device on which short splits gain
LANES = Pass(((20, 20.0), (66, 31.0)), 0.05, 0.01, 5.0)  # lanes by list scheduling
LISTED = Constants(LANES, 2.0, 0.05, LANES, Pass(((33, 22.0),), 0.0, 0.02, 5.0))
EACH = Pass(((132, 1e3),), 0.0, 0.0, 0.0)
TOKENS = Constants(EACH, 0.0, 0.0, EACH, EACH)  # the constants of the ratio rule


def cut(length, segments):
    """Returns the lengths of at most this many segments, cut at granules as evenly as possible."""
    units = -(-length // GRANULE)
    count = max(1, min(segments, units))
    ends = [min(length, units * i // count * GRANULE) for i in range(1, count)]
    return tuple(b - a for a, b in zip([0, *ends], [*ends, length]))


def every_cut(lengths, HV, known, shortest, windows):
    """Yields the candidates that `kda_cp.cuts.candidates` documents, in order."""
    passes = [p for p in (known.forward, known.summarize, known.execute) if p is not None]
    fits = {min(max(lanes // HV, 2), MAX_SEGMENTS) for p in passes for lanes, _ in p.chain}
    counts = {*COUNTS, *fits}
    counts = sorted(counts | {n * windows for n in counts})
    for count in counts:
        size = max(shortest, -(-max(lengths) // (count * GRANULE)) * GRANULE)
        for limit in WHOLE:
            yield tuple(cut(n, -(-n // size)) if n > limit * size else (n,) for n in lengths)
    if len(lengths) > 1:
        for count in counts:
            yield tuple(cut(n, min(count, n // shortest)) for n in lengths)


def exhaustive(lengths, HV, known, strategy, native, window):
    """Returns the segments and the predicted time of the fastest candidate, the first of equally fast ones.

    The segments are None if no split is fast enough.
    """
    options = {"HV": HV, "native": native, "window": window} | (
        {"SMs": 132} if known is None else {"constants": known}
    )
    margin, shortest = (RATIO_MARGIN, RATIO_SEGMENT) if known is None else (MARGIN, GRANULE)
    windows = max(1, -(-sum(lengths) // window)) if native and window else 1
    serial = predict(Plan(tuple((n,) for n in lengths)), **options).planned
    best, found = serial / margin if strategy == "auto" else float("inf"), None
    for segments in every_cut(lengths, HV, known or TOKENS, shortest, windows):
        if any(len(s) > 1 for s in segments):
            time = predict(Plan(segments), **options).planned
            if time < best:
                best, found = time, segments
    return found, best


lengths = st.lists(
    st.one_of(st.integers(0, 300), st.integers(0, 20_000), st.integers(0, 3000).map(lambda n: n * GRANULE)),
    min_size=1,
    max_size=12,
).map(tuple)


@settings(deadline=None, max_examples=25)
@given(
    lengths,
    st.sampled_from([1, 2, 4, 8, 12, 64]),
    st.sampled_from([H200, CHEAP, LISTED, None]),
    st.sampled_from(["auto", "exact"]),
    st.booleans(),
    st.sampled_from([0, 0, 64, 4096, 65536]),
)
def test_the_search_finds_the_same_plan_as_an_exhaustive_search(lengths, HV, known, strategy, native, window):
    plan = make_plan(
        lengths, HV=HV, constants=known, SMs=132, strategy=strategy, native=native, window=window
    )
    segments, time = exhaustive(lengths, HV, known, strategy, native, window)
    assert plan.segments == (segments or tuple((n,) for n in lengths))
    if segments is not None:
        assert plan.prediction.planned == time


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=30),
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
    st.sampled_from([1, 2, 4, 12, 33, 66, 132]),
)
def test_the_busiest_lane_is_that_of_list_scheduling_task_by_task(lengths, heads, lanes):
    loads = [0] * lanes
    for n in sorted(lengths * heads, reverse=True):
        heapq.heapreplace(loads, loads[0] + n)
    assert busiest_lane(lengths, heads, lanes) == max(loads)


def function_calls(lengths, **more):
    """Returns the number of function calls, built-in ones included, that planning makes."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        make_plan(lengths, **more)
    finally:
        sys.setprofile(None)
    return count


SHORT = random.Random(0)


@pytest.mark.parametrize(
    ("lengths", "HV", "known", "most"),
    [
        ((65536,), 8, {"native": True, "constants": H200}, 2500),
        ((65536, 32768, 16384), 4, {"native": True, "constants": H200}, 5000),
        ((65536, 32768, 16384), 4, {"constants": H200}, 9000),
        ((60_000, *SHORT.choices(range(50, 2000), k=63)), 4, {"native": True, "constants": H200}, 6000),
        ((100_000, *SHORT.choices(range(50, 1000), k=511)), 4, {"constants": H200}, 12_000),
        ((100_000, *SHORT.choices(range(50, 1000), k=511)), 4, {"native": True, "SMs": 132}, 45_000),
        ((1 << 20,), 8, {"native": True, "constants": H200, "window": 520_064}, 25_000),
    ],
)
def test_planning_makes_few_function_calls(lengths, HV, known, most):
    assert function_calls(lengths, HV=HV, **known) < most
