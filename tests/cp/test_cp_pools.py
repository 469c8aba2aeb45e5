"""Split calls over a pool of states: by a backend that executes segments over pools, and by copies."""

from itertools import accumulate

import pytest
import torch

from kda_core import chunk_kda, explain, pools
from kda_core.contract import Feature
from kda_core.errors import ArgumentError, PlannerError
from kda_core.registry import REGISTRY, record_calls
from kda_core.testing import error, serving
from kda_core.testing.runner import Runner
from kda_cp import Constants, Pass, Plan, native
from kda_cp.planner import ContextParallelPlanner

FP32 = 3e-5
A_TOKEN = 4 * (4 * 16 + 1)  # bytes of workspace of the test backend
# Cuts inside chunks and at chunk boundaries; an empty sequence; whole ones.
PLAN = Plan(((100, 37, 1, 62, 100), (0,), (90, 80), (5,), (64, 64)))
AT_64 = Plan(((128, 64, 108), (0,), (64, 106), (5,), (64, 64)))  # for checkpoints


@pytest.fixture
def kda(segmented):
    return Runner("segmented", "cpu", 16, True)


@pytest.fixture
def copies(request, kda, distribution):
    """Installs the same backend without segments over pools; returns its name."""
    same = request.node.callspec.params["segmented"]
    distribution("copies", f"helpers.segmented_backend:COPIES_{same}")
    return "copies"


@pytest.fixture
def uncopied(monkeypatch):
    """Returns a function after whose call core copies no states."""
    return lambda: monkeypatch.setattr(pools, "_with_copies", None)


def tokens(kda, plan=PLAN):
    return kda.inputs("slow", sum(plan.lengths), lengths=plan.lengths, H=1, HV=2)


def points(pool, rows):
    """Returns the arguments of checkpoints; `rows`: (position, slot) of each sequence."""
    flat = [pair for row in rows for pair in row]
    return {
        "checkpoint_cu": pool.index((0, *accumulate(map(len, rows)))),
        "checkpoint_positions": pool.index([p for p, _ in flat]),
        "checkpoint_indices": pool.index([s for _, s in flat]),
    }


def run(x, plan, backend="segmented"):
    """Returns o of a call that `cp` splits."""
    with record_calls() as calls:
        o, *_ = chunk_kda(**x, backend=backend, context_parallel=plan)
    assert [(c.backend, c.planner) for c in calls] == [(backend, "cp")]
    return o


@pytest.mark.parametrize("form", serving.POOL_FORMS)
def test_a_split_call_has_the_bits_of_copied_states(form, kda, copies, segmented, monkeypatch):
    """Over all kinds of slots. NaNs in fresh slots and in the tokens of skipped sequences change nothing."""
    for name, scenario in serving.SCENARIOS.items():
        x = tokens(kda)
        serving.spoil(x, PLAN.lengths, scenario.skipped())
        found = {}
        for backend, by in ((copies, "copies by kda-core"), ("segmented", "the backend")):
            pool = serving.Pool(kda, form)
            pool.states[list(scenario.fresh)] = torch.nan
            given = x | serving.arguments(pool, scenario)
            told = explain(**given, backend=backend, context_parallel=PLAN)
            assert told.pool == by and told.plan.startswith(
                "cp: exact (300 in 5, 170 in 2, 128 in 2, 2 whole)"
            )
            segmented.clear()
            with monkeypatch.context() as patch:
                if backend == "segmented":
                    patch.setattr(pools, "_with_copies", None)
                o = run(given | {"out": torch.full_like(x["v"], torch.nan)}, PLAN, backend)
            assert [m for m, _ in segmented if m != "merge_segments"] == ["summarize", "execute_segments"]
            found[backend] = o, pool.bits()
        assert all(map(torch.equal, found["segmented"], found[copies])), name


def test_checkpoints_lie_inside_of_segments_and_at_their_ends(kda, uncopied):
    """They agree with those of a direct call, also where windows cut sequences."""
    uncopied()
    rows = (
        ((0, 2), (64, 1), (100, 2), (128, 3), (64, 2), (192, 6), (256, 7), (320, 2)),
        ((64, 2),),
        ((64, 4),),
        (),
        ((64, -1), (128, 5)),
    )
    x, slots = tokens(kda, AT_64), (3, 1, 0, -1, 2)
    for form in ("fp32-vk", "bf16-kv"):
        kept = {mode: serving.Pool(kda, form) for mode in ("off", "split", "windows")}
        states, o = {mode: serving.Pool(kda, form) for mode in kept}, {}
        for mode, into in kept.items():
            given = x | states[mode].arguments(slots) | points(into, rows) | {"checkpoint_pool": into.states}
            if mode == "off":
                o[mode] = chunk_kda(**given, backend="segmented", context_parallel="off")[0]
                continue
            with pytest.MonkeyPatch.context() as patch:
                if mode == "windows":
                    patch.setattr(native, "WORKSPACE_BYTES", 128 * 4 * (2 * 16 + 2 * (16 + 16 + 1)))
                o[mode] = run(given, AT_64)
        for mode in ("split", "windows"):
            assert error(o[mode], o["off"], lengths=AT_64.lengths) < 5e-3
            for found in (kept, states):
                limit = FP32 if form == "fp32-vk" else 2**-8
                assert error(found[mode].states, found["off"].states, state=True) <= limit
            untouched = serving.Pool(kda, form)
            for pool in (kept[mode], untouched):
                pool.states[[1, 3, 4, 5, 6, 7]] = 0
            assert torch.equal(kept[mode].bits(), untouched.bits()), "a slot of no checkpoint was written"


@pytest.mark.parametrize("tokens_of_a_window", (64, 128, 256))
@pytest.mark.parametrize("form", ("fp32-vk", "bf16-kv"))
def test_states_pass_from_window_to_window(form, tokens_of_a_window, kda, segmented, uncopied, monkeypatch):
    """Windows cut sequences, and begin and end between them. Skipped sequences, fresh ones, and other slots for final states."""
    uncopied()
    scenario = serving.Scenario(
        (3, 3, 0, -1, 6), (5, 1, -1, -1, 2), (True, True, True, True, False), fresh=(6,)
    )
    x, results = tokens(kda), {}
    serving.spoil(x, PLAN.lengths, scenario.skipped())
    for mode in ("whole", "windows"):
        pool = serving.Pool(kda, form)
        pool.states[list(scenario.fresh)] = torch.nan
        if mode == "windows":
            size = tokens_of_a_window * 4 * (2 * 16 + 2 * (16 + 16 + 1))
            monkeypatch.setattr(native, "WORKSPACE_BYTES", size)
        segmented.clear()
        results[mode] = run(x | serving.arguments(pool, scenario), PLAN), pool
    executed = [lengths for method, lengths in segmented if method == "execute_segments"]
    assert len(executed) > 2 and {m for m, _ in segmented} <= {
        "summarize",
        "merge_segments",
        "execute_segments",
    }
    assert sum(map(sum, executed)) == sum(PLAN.lengths)
    (o, pool), (want, whole) = results["windows"], results["whole"]
    assert error(o, want, lengths=PLAN.lengths) < 5e-3
    for slot in (5, 1, 2):
        off = error(pool.states[slot : slot + 1], whole.states[slot : slot + 1], state=True)
        assert off <= (FP32 if form == "fp32-vk" else 2**-8)
        pool.states[slot] = whole.states[slot]
    assert torch.equal(pool.bits(), whole.bits())


def test_strided_inputs_reach_the_backend_without_copies(kda, uncopied, monkeypatch):
    uncopied()
    x, pool, plain = tokens(kda), serving.Pool(kda), serving.Pool(kda)
    wide = torch.cat([x[n].flatten(2) for n in "qkv"], -1)
    views, at = dict(x), 0
    for n in "qkv":
        size = x[n].flatten(2).shape[-1]
        views[n] = wide[..., at : at + size].unflatten(-1, x[n].shape[2:])
        at += size
    backend, seen = REGISTRY.load(REGISTRY.find("segmented").spec), []
    for method in ("summarize", "execute_segments"):
        call = getattr(type(backend), method)

        def watched(self, inputs, *rest, call=call):
            seen.append([getattr(inputs, n).data_ptr() - wide.data_ptr() for n in "qkv"])
            return call(self, inputs, *rest)

        monkeypatch.setattr(type(backend), method, watched)
    want = run(x | plain.arguments((3, 1, 7, 0, 5)), PLAN)
    seen.clear()
    o = run(views | pool.arguments((3, 1, 7, 0, 5)), PLAN)
    assert seen == [[views[n].data_ptr() - wide.data_ptr() for n in "qkv"]] * 2
    assert torch.equal(o, want) and torch.equal(pool.bits(), plain.bits())


def test_intermediate_states_of_a_split_call_over_a_pool(kda, uncopied):
    uncopied()
    x, slots = tokens(kda, AT_64) | {"return_intermediate_states": True}, (3, 1, 7, 0, 5)
    got = [
        chunk_kda(
            **x, **serving.Pool(kda, "fp32-vk").arguments(slots), backend="segmented", context_parallel=mode
        )[2]
        for mode in (AT_64, "off")
    ]
    assert error(*got, state=True) < 0.01


def test_automatic_plans_split_calls_over_pools_with_checkpoints(kda, stored, uncopied):
    lanes = Pass(((64, 100.0),), 0.01, 0.01, 1.0)
    stored(("cpu", "segmented", "bfloat16"), Constants(lanes, 0.1, 0.01, lanes, lanes))
    uncopied()
    x = kda.inputs("memory", 1400, lengths=(1100, 300), H=1)
    found = {}
    for mode in ("auto", "off"):
        pool = serving.Pool(kda, HV=1)
        given = x | pool.arguments((2, 5)) | points(pool, (((64, 1), (1088, 3)), ((256, 4),)))
        told = explain(**given, backend="segmented", context_parallel=mode)
        assert told.pool == "the backend"
        assert told.plan.startswith("cp: exact (1100 in " if mode == "auto" else "direct")
        with record_calls() as calls:
            o, _ = chunk_kda(**given, backend="segmented", context_parallel=mode)
        assert [c.planner for c in calls] == [None if mode == "off" else "cp"]
        found[mode] = o, pool
    (o, pool), (want, direct) = found.values()
    assert error(o, want, lengths=(1100, 300)) < 5e-3
    assert error(pool.states, direct.states, state=True) <= 1e-4
    short = kda.inputs("memory", 90, H=1)
    given = short | serving.Pool(kda, HV=1).arguments((2,))
    with record_calls() as calls:
        chunk_kda(**given, backend="segmented")
    assert [c.planner for c in calls] == [None]


def test_plans_that_do_not_serve_pools_take_copies_or_are_refused(kda, copies, segmented, uncopied):
    x, slots = tokens(kda, AT_64), (3, 1, 7, 0, 5)
    certified = Plan(AT_64.segments, "certified")
    serial = Plan(tuple((n,) for n in AT_64.lengths), "serial")
    pool = serving.Pool(kda)
    given = x | pool.arguments(slots)
    assert explain(**given, backend="segmented", context_parallel=certified).pool == "copies by kda-core"
    run(given, certified)
    more = given | points(pool, (((64, 2),), (), (), (), ()))
    for backend, plan in (("segmented", certified), (copies, AT_64)):
        with pytest.raises(ArgumentError, match=f"context_parallel: expected .* backend '{backend}'"):
            chunk_kda(**more, backend=backend, context_parallel=plan)
    segmented.clear()
    cut = Plan(((100, 200), (0,), (170,), (5,), (128,)))
    with pytest.raises(
        PlannerError, match="checkpoints require cuts at multiples of 64; sequence 0 has segments"
    ):
        chunk_kda(**more, backend="segmented", context_parallel=cut)
    assert "checkpoints require" in explain(**more, backend="segmented", context_parallel=cut).error
    assert not segmented
    uncopied()
    run(more, serial)
    assert [method for method, _ in segmented] == ["chunk_fwd"]


def test_an_older_planner_and_an_older_backend_take_copies(kda, copies, monkeypatch):
    x, slots = tokens(kda), (3, 1, 7, 0, 5)
    given = lambda: x | serving.Pool(kda).arguments(slots)
    assert explain(**given(), backend="segmented", context_parallel=PLAN).pool == "the backend"
    assert explain(**given(), backend=copies, context_parallel=PLAN).pool == "copies by kda-core"
    assert Feature.POOL_SEGMENTS.value not in REGISTRY.find("reference").spec.features
    monkeypatch.delattr(ContextParallelPlanner, "executes_over_pools")
    assert explain(**given(), backend="segmented", context_parallel=PLAN).pool == "copies by kda-core"
    run(given(), PLAN)
