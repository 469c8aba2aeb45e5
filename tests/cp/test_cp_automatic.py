"""The planner behind `chunk_kda`: which calls it splits, which it leaves alone, and what `explain` reports."""

import json
import logging
import tracemalloc
from dataclasses import replace

import pytest
import torch

from kda_core import chunk_kda, explain
from kda_core.buffers import make_inputs
from kda_core.contract import KdaOptions, Tensors
from kda_core.errors import ArgumentError, DtypeError, PlannerError
from kda_core.reference import SPEC as REFERENCE
from kda_core.reference import ReferenceBackend
from kda_core.registry import REGISTRY, record_calls
from kda_core.testing import error, token_oracle
from kda_core.testing import make_inputs as draw
from kda_core.validate import problem_shape
from kda_cp import Constants, Pass, Plan
from kda_cp import planner as planner_module
from kda_cp.choose import make_plan
from kda_cp.planner import UNKNOWN_LENGTHS, ContextParallelPlanner

LANES = Constants(Pass(((64, 100.0),), 0.01, 0.01, 1.0), 0.1, 0.01)  # many idle lanes: long sequences gain
ON_CPU = ("cpu", "reference", "bfloat16")


@pytest.fixture
def idle(stored):
    """Stores constants by which long calls of `reference` on the CPU gain from a split."""
    stored(ON_CPU, LANES)
    REGISTRY.refresh()


def run(x, **more):
    """Returns the planner that executed a call on `reference`, and the outputs."""
    with record_calls() as calls:
        result = chunk_kda(**x, **more)
    (call,) = calls
    assert (call.backend, call.entry) == ("reference", "chunk_fwd")
    return call.planner, result


def same(a, b):
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b))


def long_call(**more):
    return draw("memory", 1400, H=1, K=16, V=16, lengths=(1100, 300), **more).arguments


def test_a_call_with_a_predicted_gain_is_split(idle):
    x = long_call()
    planner, (o, state) = run(x, output_final_state=True)
    assert planner == "cp"
    want = token_oracle(**x)
    assert error(o, want[0], lengths=(1100, 300)) < 5e-3 and error(state, want[1], state=True) < 1e-5
    text = explain(**x).plan
    assert text.startswith("cp: exact (1100 in ") and "calibrated constants" in text
    planned, serial = (int(text.split(word)[1].split()[0]) for word in ("predicted ", "serial "))
    assert planned < serial


def test_new_lengths_of_direct_calls_need_no_new_decision(monkeypatch):
    made = []
    monkeypatch.setattr(planner_module, "make_plan", lambda *a, **k: made.append(a[0]) or make_plan(*a, **k))
    chooser, backend = ContextParallelPlanner(), ReferenceBackend()

    def inputs_of(T):
        x = draw("memory", T, H=1, K=16, V=16).arguments
        tensors = tuple(x.get(name) for name in Tensors._fields)
        return make_inputs(tensors, problem_shape(*tensors, options=KdaOptions()))

    for T in (*range(1, 300, 7), 64, 128):
        assert chooser.plan(inputs_of(T), REFERENCE, backend) is None
    assert sorted(made) == [(64,), (128,), (192,), (256,), (320,)]  # whatever the order of lengths
    assert str(chooser.decide(inputs_of(100), REFERENCE, backend)).startswith("serial (1 sequences)")
    many = (1,) * (planner_module.ROUNDED + 1)
    made.clear()
    x = draw("memory", len(many), H=1, K=16, V=16, lengths=many).arguments
    tensors = tuple(x.get(name) for name in Tensors._fields)
    shape = problem_shape(*tensors, options=KdaOptions())
    assert chooser.plan(make_inputs(tensors, shape), REFERENCE, backend) is None and made == [many]


def test_a_call_is_direct_if_its_rounded_lengths_are(idle, monkeypatch):
    """`explain` says so, where the plan of the exact lengths would be a split."""
    chooser, x = ContextParallelPlanner(), long_call()
    tensors = tuple(x.get(name) for name in Tensors._fields)
    inputs = make_inputs(tensors, problem_shape(*tensors, options=KdaOptions()))
    assert chooser.plan(inputs, REFERENCE, ReferenceBackend()).is_split
    whole = lambda lengths, **more: make_plan(lengths, **more | {"constants": None, "SMs": 0})
    monkeypatch.setattr(
        planner_module, "make_plan",
        lambda lengths, **more: (make_plan if 1100 in lengths else whole)(lengths, **more),
    )  # fmt: skip
    chooser = ContextParallelPlanner()
    assert chooser.plan(inputs, REFERENCE, ReferenceBackend()) is None
    chosen = chooser.decide(inputs, REFERENCE, ReferenceBackend())
    assert not chosen.is_split and "rounded up to multiples of 64" in str(chosen)


def test_calls_that_are_off_or_not_split_equal_direct_calls_bit_for_bit(idle, monkeypatch):
    x = long_call()
    _, direct = run(x, output_final_state=True, context_parallel="off")
    assert explain(**x, context_parallel="off").plan == "direct"
    monkeypatch.setenv("KDA_CP", "0")
    planner, off = run(x, output_final_state=True)
    assert planner is None and same(off, direct)
    assert explain(**x).plan == "direct"
    with pytest.raises(PlannerError, match="no planner is"):
        chunk_kda(**x, context_parallel=Plan(((1100,), (300,))))
    monkeypatch.delenv("KDA_CP")
    assert run(x)[0] == "cp"

    short = draw("memory", 90, H=1, K=16, V=16).arguments
    planner, auto = run(short, output_final_state=True)
    assert planner is None
    assert same(auto, run(short, output_final_state=True, context_parallel="off")[1])
    assert explain(**short).plan.startswith("direct (cp: serial (1 sequences); predicted")


def test_a_call_over_a_pool_is_split_where_the_call_with_copied_states_is(idle):
    """The backend serves all other calls over a pool itself."""
    x = long_call()
    matrix = torch.randn(4, 1, 16, 16)
    more = {"ssm_state_indices": torch.tensor([2, -1]), "output_final_state": True}
    pools = {mode: {"initial_state": matrix.clone()} | more for mode in ("auto", "off")}
    results = {}
    for mode, pool in pools.items():
        found = explain(**(x | pool), context_parallel=mode)
        planner, (results[mode], _) = run(x | pool, context_parallel=mode)
        wanted = ("cp", "copies by kda-core") if mode == "auto" else (None, "the backend")
        assert (planner, found.pool) == wanted and found.plan.startswith(planner or "direct")
    split, direct = results.values()
    assert error(split, direct, lengths=(1100, 300)) < 5e-3 and not split[:, 1100:].any()
    states = [pool["initial_state"] for pool in pools.values()]
    assert error(states[0][2:3], states[1][2:3], state=True) < 1e-5
    kept = [0, 1, 3]
    assert torch.equal(states[0][kept], matrix[kept]) and torch.equal(states[1][kept], matrix[kept])

    as_int = lambda *values: torch.tensor(values, dtype=torch.int32)
    points = {
        "checkpoint_cu": as_int(0, 1, 1),
        "checkpoint_positions": as_int(64),
        "checkpoint_indices": torch.tensor([0]),
    }
    short = draw("memory", 90, H=1, K=16, V=16).arguments
    one = {"initial_state": matrix.clone(), "ssm_state_indices": torch.tensor([2])}
    for given, of_pool in ((x, pools["auto"] | points), (short, one)):
        assert run(given | of_pool)[0] is None and explain(**(given | of_pool)).pool == "the backend"


def test_pinned_calls_and_calls_that_require_grad_are_not_split(idle):
    x = long_call()
    assert run(x, pin=True)[0] is None
    x["v"].requires_grad_()
    with record_calls() as calls:
        chunk_kda(**x)[0].float().sum().backward()
    assert [(c.entry, c.planner) for c in calls] == [("chunk_fwd", None), ("chunk_bwd", None)]
    with torch.no_grad():
        assert run(x)[0] == "cp"


def test_a_cpu_without_constants_runs_serially(stored):
    x = long_call()
    planner, auto = run(x)
    assert planner is None and same(auto, run(x, context_parallel="off")[1])
    assert (
        explain(**x).plan == "direct (cp: serial (2 sequences); a CPU without stored constants runs serially)"
    )


def test_constants_are_looked_up_by_device_backend_and_dtype(stored):
    x = long_call()
    for key in (
        ("cpu", "reference", "float32"),
        ("cpu", "sm90", "bfloat16"),
        ("cuda", "reference", "bfloat16"),
    ):
        stored(key, LANES)
    assert run(x)[0] is None
    stored(ON_CPU, LANES)
    assert run(x)[0] == "cp"  # immediately: the cache key of plans contains the constants
    stored(ON_CPU, replace(LANES, merge_us=1e6))
    assert run(x)[0] is None


def test_the_third_party_example_backend_is_split(stored, tokenwise):
    stored(("cpu", tokenwise, "bfloat16"), LANES)
    x = draw("memory", 700, H=1, K=8, V=8).arguments
    with record_calls() as calls:
        o, _ = chunk_kda(**x, backend=tokenwise)
    assert [(c.backend, c.planner) for c in calls] == [("tokenwise", "cp")]
    assert error(o, token_oracle(**x)[0]) < 5e-3


def test_a_call_that_the_backend_cannot_serve_in_segments_runs_serially(stored, watched):
    stored(("cpu", "watched", "bfloat16"), LANES)
    watched(missing={"varlen"})
    x = draw("slow", 1100, H=1, K=16, V=16).arguments
    with record_calls() as calls:
        chunk_kda(**x, backend="watched")
    assert [(c.backend, c.planner) for c in calls] == [("watched", None)]
    assert "direct (cp: serial (1 sequences); backend 'watched' does not declare varlen)" in str(
        explain(**x, backend="watched")
    )


def test_changed_lengths_are_read_at_every_call(idle):
    x = long_call()
    assert run(x)[0] == "cp"
    x["cu_seqlens"].copy_(torch.tensor([0, 700, 1400]))
    planner, (o, state) = run(x, output_final_state=True)
    assert planner == "cp" and "2x 700 in" in explain(**x).plan
    want = token_oracle(**x)
    assert error(o, want[0], lengths=(700, 700)) < 5e-3 and error(state, want[1], state=True) < 1e-5


def test_calls_with_intermediate_states_are_cut_at_chunk_boundaries(idle):
    x = long_call() | {"return_intermediate_states": True, "chunk_size": 32}
    planner, (_, _, h) = run(x)
    assert planner == "cp"
    assert error(h, chunk_kda(**x, context_parallel="off")[2], state=True) < 0.01


def test_the_planner_does_not_wait_for_lengths_that_only_the_device_has(idle, caplog):
    """A tensor on the meta device has no contents, so reading it raises an error."""
    x = long_call()
    tensors = [
        x.get(n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
    ]
    tensors.append(None)  # cu_seqlens_cpu
    shape = problem_shape(*tensors, options=KdaOptions(use_qk_l2norm_in_kernel=True))
    inputs = make_inputs(tensors, shape)
    planner, backend = ContextParallelPlanner(), ReferenceBackend()
    assert planner.plan(inputs, REFERENCE, backend) is not None
    unknown = replace(inputs, cu_seqlens=x["cu_seqlens"].to("meta"))
    with caplog.at_level(logging.INFO, "kda_cp"):
        for _ in range(3):
            assert planner.plan(unknown, REFERENCE, backend) is None
    assert len(caplog.records) <= 1  # once per process
    assert planner.explain(None, unknown, REFERENCE, backend) == UNKNOWN_LENGTHS
    told = replace(unknown, cu_seqlens_cpu=x["cu_seqlens"])
    assert planner.plan(told, REFERENCE, backend) is not None
    why = planner.refusal(Plan.uniform((1100, 300), 2), unknown, REFERENCE, backend)
    assert why is not None and "the host does not know the lengths" in why


def test_explain_reports_a_forced_plan(stored):
    x = long_call()
    plan = Plan(((500, 600), (300,)))
    assert explain(**x, context_parallel=plan).plan == "cp: exact (1100 in 2, 1 whole); given by the caller"
    stored(ON_CPU, LANES)
    assert "predicted" in explain(**x, context_parallel=plan).plan
    wrong = explain(**x, context_parallel=Plan(((500, 700), (300,))))
    assert wrong.plan == "none" and "for sequences of [1200, 300] tokens" in wrong.error


def test_context_parallel_rejects_values_that_are_not_plans():
    x = draw("slow", 90, H=1, K=16, V=16).arguments
    with pytest.raises(ArgumentError, match="context_parallel: expected 'auto', 'off' or a plan"):
        chunk_kda(**x, context_parallel="always")
    with pytest.raises(DtypeError, match="context_parallel"):
        chunk_kda(**x, context_parallel=3)

    class Foreign:
        def to_json(self):
            return json.dumps({"cut": 3})

    with pytest.raises(PlannerError, match="expected a plan of kda-cp as JSON"):
        chunk_kda(**x, context_parallel=Foreign())


def test_split_calls_work_under_torch_compile(idle):
    x = long_call()
    call = torch.compile(lambda: chunk_kda(**x, output_final_state=True), fullgraph=True, backend="eager")
    with record_calls() as calls:
        got = call()
    assert [(c.backend, c.planner) for c in calls] == [("reference", "cp")]
    assert same(got, chunk_kda(**x, output_final_state=True))
    plan = Plan(((500, 400, 200), (300,)))
    forced = torch.compile(lambda: chunk_kda(**x, context_parallel=plan), fullgraph=True, backend="eager")
    with record_calls() as calls:
        got = forced()
    assert [(c.backend, c.planner) for c in calls] == [("reference", "cp")]
    assert same(got, chunk_kda(**x, context_parallel=plan))


def test_cached_plans_of_many_different_lengths_use_little_memory(stored):
    planner, spec, backend = ContextParallelPlanner(), REFERENCE, ReferenceBackend()
    x = torch.empty(1, 50_000, 1, 16, dtype=torch.bfloat16, device="meta")
    tracemalloc.start()
    try:
        for n in range(400):
            host = torch.tensor([0, *range(n + 1, n + 500), 50_000], dtype=torch.int32)
            tensors = [x, x, x, x, x[..., 0], None, None, None, host.to("meta"), host]
            shape = problem_shape(*tensors, options=KdaOptions())
            assert planner.plan(make_inputs(tensors, shape, align=False), spec, backend) is None
        assert tracemalloc.get_traced_memory()[0] < 10 << 20
    finally:
        tracemalloc.stop()
