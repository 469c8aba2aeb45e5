"""Plans over a backend that summarises segments itself: its calls, and every result against the oracle."""

from dataclasses import fields, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kda_core
from kda_core import chunk_kda, explain
from kda_core.buffers import make_inputs as make_kda_inputs
from kda_core.contract import KdaOptions, Tensors
from kda_core.errors import ShapeError
from kda_core.registry import REGISTRY, record_calls
from kda_core.testing import error, make_inputs, token_oracle
from kda_core.testing.conformance import BackendConformance
from kda_core.testing.runner import Runner
from kda_core.validate import problem_shape
from kda_cp import Constants, Pass, Plan, native
from kda_cp.calibrate import merge_call, segment_calls
from kda_cp.cuts import GRANULE, windows
from kda_cp.planner import ContextParallelPlanner

FP32 = 3e-5  # relative error of fp32 arithmetic over these lengths; masks cost a digit
LENGTHS = (300, 0, 170, 5, 128, 0)
# Cuts inside chunks and at chunk boundaries.
PLAN = ((100, 37, 1, 62, 100), (0,), (90, 80), (5,), (32, 32, 32, 32), (0,))


def check(calls, x, plan, windowed=False, **more):
    """Compares a native execution with the oracle, and asserts that every token passed the intra-chunk stage once.

    `windowed`: whether the call may be executed in windows. A window without a split sequence is a direct call. Returns o,
    the final states, the intermediate states and the calls of the backend.
    """
    calls.clear()
    want = token_oracle(**x)
    with record_calls() as ran:
        o, state, *h = chunk_kda(
            **x, backend="segmented", context_parallel=plan, output_final_state=True, **more
        )
    assert [(c.backend, c.planner) for c in ran] == [("segmented", "cp")]
    done = [method for method, _ in calls]
    assert done.count("summarize") == done.count("execute_segments")
    assert windowed or (done.count("summarize"), done.count("chunk_fwd")) == (1, 0)
    prepared = [n for method, lengths in calls if method in ("summarize", "chunk_fwd") for n in lengths]
    assert sum(prepared) == x["q"].shape[0] * x["q"].shape[1]
    made = list(calls)
    direct, _ = chunk_kda(**x, backend="reference", context_parallel="off")
    lengths = x["cu_seqlens"].diff().tolist() if "cu_seqlens" in x else None
    assert error(o, want[0], lengths=lengths) <= 1.2 * error(direct, want[0], lengths=lengths) + FP32
    assert error(state, want[1], state=True) <= FP32
    return o, state, h, made


@pytest.mark.parametrize("family", ["steep", "slow", "memory", "mixed"])
@pytest.mark.parametrize("v_first", [False, True])
def test_a_batch_of_split_and_whole_sequences_agrees_with_the_oracle(family, v_first, segmented):
    x = make_inputs(
        family,
        sum(LENGTHS),
        H=2,
        HV=4,
        K=32,
        V=16,
        lengths=LENGTHS,
        initial_state=True,
        state_v_first=v_first,
    ).arguments
    *_, made = check(segmented, x, Plan(PLAN))
    segments = tuple(p for s in PLAN for p in s)
    own_merge = [("merge_segments", (0, 5, 6, 8, 9, 13, 14))]
    merged = own_merge if len(made) == 3 else []
    assert made == [("summarize", segments), *merged, ("execute_segments", segments)]


@pytest.mark.parametrize("tokens", [64, 128, 256])
@pytest.mark.parametrize("family", ["slow", "memory"])
def test_long_calls_are_executed_in_windows(family, tokens, segmented, monkeypatch):
    x = make_inputs(
        family, sum(LENGTHS), H=1, HV=2, K=16, V=24, lengths=LENGTHS, initial_state=True
    ).arguments
    monkeypatch.setattr(native, "WORKSPACE_BYTES", tokens * 4 * (2 * 16 + 2 * (16 + 24 + 1)))
    *_, made = check(segmented, x, Plan(PLAN), windowed=True)
    seen = [
        lengths for method, lengths in made if method != "merge_segments" and method != "execute_segments"
    ]
    assert len(seen) > 2 and all(sum(lengths) <= tokens for lengths in seen)
    if tokens > 64:
        assert "execute_segments" in dict(made)
    x = make_inputs(family, 1000, B=2, H=1, K=16, V=16).arguments
    check(segmented, x, Plan(((150, 350, 500), (1000,))), windowed=True)


def test_windows_may_start_at_unaligned_tokens(segmented, monkeypatch):
    x = make_inputs("slow", 400, H=1, K=8, V=4, lengths=(101, 299), initial_state=True).arguments
    monkeypatch.setattr(native, "WORKSPACE_BYTES", 128 * 4 * (2 * 8 + 8 + 4 + 1))
    *_, made = check(segmented, x, Plan(((33, 35, 33), (61, 100, 138))), windowed=True)
    assert "execute_segments" in dict(made)


@pytest.mark.parametrize("v_first", [False, True])
def test_intermediate_states_equal_those_of_a_direct_call(v_first, segmented, monkeypatch):
    x = make_inputs("memory", 700, H=2, K=16, V=16, lengths=(500, 0, 200), state_v_first=v_first).arguments
    x |= {"return_intermediate_states": True, "chunk_size": 32}
    plan = Plan(((128, 64, 308), (0,), (96, 104)))
    want = chunk_kda(**x, backend="reference", context_parallel="off")[2]
    for tokens in (10_000, 128):
        monkeypatch.setattr(native, "WORKSPACE_BYTES", tokens * 4 * 2 * (4 * 16 + 1))
        segmented.clear()
        h = chunk_kda(**x, backend="segmented", context_parallel=plan)[2]
        assert "execute_segments" in [method for method, _ in segmented]
        assert error(h, want, state=True) < 0.01


def test_a_missing_initial_state_equals_zeros_and_a_given_one_is_not_modified(segmented):
    x = make_inputs("memory", 300, H=2, K=16, V=16).arguments
    before = x["initial_state"].clone()
    plan = Plan.uniform((300,), 5)
    check(segmented, x, plan)
    assert torch.equal(x.pop("initial_state"), before)
    a = check(segmented, x, plan)
    b = check(segmented, x | {"initial_state": torch.zeros_like(before)}, plan)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def workspace_of(x, plan=None, backend="segmented"):
    """Returns the workspace bytes that `kda_cp` reports for a plan, by default its own plan of the call."""
    spec = REGISTRY.find(backend).spec
    made, planner = REGISTRY.load(spec), ContextParallelPlanner()
    tensors = [x.get(name) for name in Tensors._fields]
    options = {f.name: x[f.name] for f in fields(KdaOptions) if f.name in x}
    shape = problem_shape(*tensors, options=KdaOptions(**options))
    inputs = make_kda_inputs(tensors, shape)
    plan = plan or planner.plan(inputs, spec, made)
    return planner.workspace_bytes(plan, inputs, spec, made)


def test_a_forced_plan_raises_if_the_workspace_is_too_small(segmented):
    x = make_inputs("slow", 200, H=1, K=16, V=16).arguments
    for plan in (Plan.uniform((200,), 4), Plan(((200,),), "serial")):
        call = partial(chunk_kda, **x, backend="segmented", context_parallel=plan)
        want, needed = call()[0], workspace_of(x, plan)
        assert (needed > 0) == plan.is_split
        for size in (needed, 1 << 20):
            workspace = torch.zeros(size, dtype=torch.uint8)
            assert torch.equal(call(workspace=workspace)[0], want)
            assert bool((workspace == 255).any()) == plan.is_split
        segmented.clear()
        for size in {0, needed - 1} if plan.is_split else ():
            with pytest.raises(
                ShapeError, match=f"workspace: expected at least {needed} bytes, got {size} bytes"
            ):
                call(workspace=torch.zeros(size, dtype=torch.uint8))
        assert not segmented


def test_an_automatic_plan_gives_way_to_a_direct_call_if_the_workspace_is_too_small(segmented, stored):
    lanes = Pass(((64, 100.0),), 0.01, 0.01, 1.0)
    stored(("cpu", "segmented", "bfloat16"), Constants(lanes, 0.1, 0.01, lanes, lanes))
    x = make_inputs("memory", 1400, H=1, K=16, V=16, lengths=(1100, 300)).arguments
    call = partial(chunk_kda, **x, backend="segmented", output_final_state=True)
    direct, split, needed = call(context_parallel="off"), call(), workspace_of(x)
    assert needed > 0 and not torch.equal(direct[1], split[1])
    for size, planner, want in ((needed, "cp", split), (needed - 1, None, direct), (0, None, direct)):
        with record_calls() as calls:
            got = call(workspace=torch.zeros(size, dtype=torch.uint8))
        assert [(c.backend, c.planner) for c in calls] == [("segmented", planner)]
        assert all(map(torch.equal, got, want))


def test_the_workspace_of_a_call_is_that_of_its_largest_window(segmented, monkeypatch):
    x, a_token = make_inputs("slow", 1000, H=1, K=16, V=16).arguments, 4 * (4 * 16 + 1)
    plan = Plan.uniform((1000,), 10)
    assert workspace_of(x, plan) == 1000 * a_token
    monkeypatch.setattr(native, "WORKSPACE_BYTES", 256 * a_token)
    needed = workspace_of(x, plan)
    assert 0 < needed <= 256 * a_token
    chunk_kda(
        **x, backend="segmented", context_parallel=plan, workspace=torch.empty(needed, dtype=torch.uint8)
    )


def test_certified_plans_take_the_generic_path(segmented):
    x = make_inputs("slow", 300, H=1, K=16, V=16).arguments
    segmented.clear()
    chunk_kda(**x, backend="segmented", context_parallel=Plan.uniform((300,), 4, "certified"))
    assert {method for method, _ in segmented} == {"chunk_fwd"}


@pytest.mark.parametrize("family", ["steep", "slow", "memory"])
def test_the_test_backend_passes_the_conformance_kit(family, segmented):
    BackendConformance().test_segments(Runner("segmented", "cpu", 16, True), family)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 700), min_size=1, max_size=5).map(tuple), min_size=1, max_size=6),
    st.integers(0, 12),
)
def test_windows_contain_every_token_once_in_order(segments, granules):
    segments = [tuple(p for p in s if p > 0) or (0,) for s in segments]
    tokens = granules * GRANULE
    found = windows(segments, tokens)
    flat = [part for w in found for part in w]
    assert [n for n, _ in flat] == sorted(n for n, _ in flat)
    for n, s in enumerate(segments):
        ends, parts = {sum(s[: i + 1]) for i in range(len(s))}, [p for m, p in flat if m == n]
        assert sum(parts) == sum(s)
        assert ends <= {sum(parts[: i + 1]) for i in range(len(parts))}
    if tokens:
        assert all(sum(p for _, p in w) <= tokens for w in found)
    else:
        assert len(found) == 1


@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_random_plans_agree_with_the_oracle(segmented, data):
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    lengths[0] += 1
    segments = []
    for n, length in enumerate(lengths):
        cuts = (
            data.draw(st.sets(st.integers(1, max(1, length - 1)), min_size=n == 0, max_size=5))
            if length > 1
            else ()
        )
        ends = [0, *sorted(cuts), length]
        segments.append(tuple(b - a for a, b in pairwise(ends)))
    x = make_inputs(
        data.draw(st.sampled_from(["slow", "memory", "masked"])), sum(lengths), H=1, HV=2, K=8, V=8,
        lengths=tuple(lengths), initial_state=data.draw(st.booleans()), state_v_first=data.draw(st.booleans()),
    ).arguments  # fmt: skip
    check(segmented, x, Plan(tuple(segments)))


def test_calibration_times_both_calls_and_the_merge(segmented):
    cpu = torch.device("cpu")
    timed = segment_calls(2, 50, cpu, torch.bfloat16, "segmented")
    segmented.clear()
    timed.summarize()
    timed.execute()
    merge_call(timed.backend, 2, 3, cpu)()
    done = [method for method, _ in segmented]
    assert done[:2] == ["summarize", "execute_segments"] and set(done[2:]) <= {"merge_segments"}


def test_calls_with_a_predicted_gain_take_the_native_path(segmented, stored, monkeypatch):
    lanes = Pass(((64, 100.0),), 0.01, 0.01, 1.0)
    stored(("cpu", "segmented", "bfloat16"), Constants(lanes, 0.1, 0.01, lanes, lanes))
    x = make_inputs("memory", 1400, H=1, K=16, V=16, lengths=(1100, 300)).arguments
    for tokens in (10_000, 512):
        monkeypatch.setattr(native, "WORKSPACE_BYTES", tokens * 4 * (4 * 16 + 1))
        kda_core.backends(refresh=True)
        *_, made = check(segmented, x, "auto", windowed=tokens < 1400)
        assert len([method for method, _ in made if method == "execute_segments"]) == (
            1 if tokens > 1400 else 3
        )
        assert explain(**x, backend="segmented").plan.startswith("cp: exact (1100 in ")
    forced = explain(**x, backend="segmented", context_parallel=Plan.uniform((1100, 300), 4)).plan
    assert "predicted" in forced and "given by the caller; calibrated constants" in forced


def test_a_window_has_as_many_tokens_as_fit_and_few_sizes_are_queried(segmented, monkeypatch):
    backend = REGISTRY.load(REGISTRY.find("segmented").spec)
    asked = set()
    exactly = type(backend).segment_workspace_bytes
    monkeypatch.setattr(
        type(backend),
        "segment_workspace_bytes",
        lambda self, shape: asked.add(shape.T) or exactly(self, shape),
    )
    x = torch.empty(1, 1, 1, 16, dtype=torch.bfloat16, device="meta")
    shape = problem_shape(x, x, x, x, x[..., 0], *[None] * 5, options=KdaOptions())
    a_token = 4 * (4 * 16 + 1)
    monkeypatch.setattr(native, "WORKSPACE_BYTES", 4096 * a_token + 100)
    for T in range(3000, 4000):
        assert native.window_tokens(replace(shape, T=T), backend) == 0
    assert len(asked) <= 5
    for T in (1, 63, 4096, 4097, 5000, 8193, 100_000):
        found = native.window_tokens(replace(shape, T=T), backend)
        assert found == (4096 if T > 4096 else 0), T
