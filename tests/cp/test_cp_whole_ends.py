"""Plans with whole ends: their calls, every result against the oracle, refusals, and the choice of such a plan."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kda_core import chunk_kda, explain
from kda_core.errors import ArgumentError, PlannerError, ShapeError
from kda_core.registry import REGISTRY, record_calls
from kda_core.testing import error, make_inputs, token_oracle
from kda_core.testing.conformance import BackendConformance
from kda_core.testing.runner import Runner
from kda_cp import Constants, Pass, Plan, calibrate, constants, make_plan, native, predict
from kda_cp.constants import Beside
from kda_cp.whole_ends_cost import LARGEST_SHARE, WholeEndsModel

H100 = constants.SHIPPED["NVIDIA H100 80GB HBM3", "sm90", "bfloat16"]
KEY = ("cpu", "beside", "bfloat16")
FP32 = 3e-5  # relative error of fp32 arithmetic over these lengths
PLAN = Plan(((101, 33, 35, 131),), whole_ends=True)  # cuts inside chunks


def run(x, plan, **more):
    with record_calls() as ran:
        found = chunk_kda(**x, backend="beside", context_parallel=plan, **more)
    assert [(c.backend, c.planner) for c in ran] == [("beside", "cp")]
    return found


@pytest.mark.parametrize("family", ["steep", "slow", "memory", "mixed"])
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("lengths", [None, (300,)], ids=["fixed", "packed"])
def test_a_sequence_agrees_with_the_oracle(family, v_first, lengths, beside):
    x = make_inputs(
        family, 300, H=2, HV=4, K=32, V=16, lengths=lengths, initial_state=True, state_v_first=v_first
    ).arguments
    beside.clear()
    before, want = x["initial_state"].clone(), token_oracle(**x)
    o, state = run(x, PLAN, output_final_state=True)
    assert beside == [
        ("chunk_fwd", (101,)),
        ("summarize", (33, 35)),
        ("merge_segments", (0, 4)),
        ("chunk_fwd", (131,)),
        ("execute_segments", (33, 35)),
    ]
    direct, _ = chunk_kda(**x, backend="reference", context_parallel="off")
    assert error(o, want[0]) <= 1.2 * error(direct, want[0]) + FP32
    assert error(state, want[1], state=True) <= FP32
    assert torch.equal(x["initial_state"], before)


PACKED = ((40,), (0,), (101, 33, 35, 131), (70,), (0,))


@pytest.mark.parametrize("segments", [PACKED, PACKED[:3], PACKED[2:], PACKED[2:4]], ids=str)
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
def test_other_sequences_belong_to_the_whole_calls(segments, v_first, beside):
    lengths, at = tuple(map(sum, segments)), segments.index(PACKED[2])
    x = make_inputs(
        "memory",
        sum(lengths),
        H=2,
        HV=4,
        K=32,
        V=16,
        lengths=lengths,
        initial_state=True,
        state_v_first=v_first,
    ).arguments
    x["cu_seqlens_cpu"], want = x["cu_seqlens"], token_oracle(**x)
    plan = Plan(segments, whole_ends=True)
    beside.clear()
    o, state = run(x, plan, output_final_state=True)
    assert [n for method, n in beside if method == "chunk_fwd"] == [
        (*lengths[:at], 101),
        (131, *lengths[at + 1 :]),
    ]
    direct, _ = chunk_kda(**x, backend="reference", context_parallel="off")
    assert error(o, want[0], lengths=lengths) <= 1.2 * error(direct, want[0], lengths=lengths) + FP32
    assert error(state, want[1], state=True) <= FP32
    alone, none = run(x, plan)
    assert torch.equal(alone, o) and none is None
    x.pop("initial_state")
    o, state = run(x, plan, output_final_state=True)
    want = token_oracle(**x)
    assert error(o, want[0], lengths=lengths) < 5e-3 and error(state, want[1], state=True) <= FP32


def test_rows_of_equal_length_may_belong_to_the_whole_calls(beside):
    x = make_inputs("slow", 300, B=3, H=1, K=16, V=16, initial_state=True).arguments
    o, state = run(x, Plan(((300,), (101, 33, 35, 131), (300,)), whole_ends=True), output_final_state=True)
    want = token_oracle(**x)
    assert error(o, want[0]) < 5e-3 and error(state, want[1], state=True) < FP32


def test_a_missing_initial_state_equals_zeros_and_a_final_state_is_optional(beside):
    x = make_inputs("memory", 300, H=2, K=16, V=16).arguments
    zeros = torch.zeros_like(x.pop("initial_state"))
    o, state = run(x, PLAN, output_final_state=True)
    same = run(x | {"initial_state": zeros}, PLAN, output_final_state=True)
    assert torch.equal(o, same[0]) and torch.equal(state, same[1])
    alone, none = run(x, PLAN)
    assert torch.equal(alone, o) and none is None


@pytest.fixture
def nan_in_new_memory():
    """Lets torch fill new tensors that nothing has written with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_calls_without_initial_states_read_no_uninitialised_memory(nan_in_new_memory, beside):
    assert torch.empty(1).isnan()
    lengths = tuple(map(sum, PACKED))
    x = make_inputs("memory", sum(lengths), H=2, K=32, V=16, lengths=lengths).arguments
    x.pop("initial_state")
    x["cu_seqlens_cpu"], want = x["cu_seqlens"], token_oracle(**x)
    o, state = run(x, Plan(PACKED, whole_ends=True), output_final_state=True)
    assert error(o, want[0], lengths=lengths) < 5e-3 and error(state, want[1], state=True) <= FP32


def test_a_single_inner_segment(beside):
    x = make_inputs("slow", 300, H=1, K=16, V=16, initial_state=True).arguments
    o, state = run(x, Plan(((100, 90, 110),), whole_ends=True), output_final_state=True)
    want = token_oracle(**x)
    assert error(o, want[0]) < 5e-3 and error(state, want[1], state=True) < FP32


def test_the_test_backend_passes_the_conformance_kit(beside):
    BackendConformance().test_whole_ends(Runner("beside", "cpu", 16, True), "slow")


def test_a_workspace_that_is_too_small_raises(beside):
    x = make_inputs("slow", 300, H=1, K=16, V=16).arguments
    needed = 512 + 4 * 68 * (4 * 16 + 1)  # the first part is rounded up to a multiple of 256
    want = run(x, PLAN)[0]
    assert torch.equal(run(x, PLAN, workspace=torch.zeros(needed, dtype=torch.uint8))[0], want)
    beside.clear()
    with pytest.raises(ShapeError, match=f"workspace: expected at least {needed} bytes, got {needed - 1}"):
        run(x, PLAN, workspace=torch.zeros(needed - 1, dtype=torch.uint8))
    assert not beside


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"return_intermediate_states": True}, "return_intermediate_states=False"),
        ({"requires_grad": True}, "without requires_grad"),
        ({"backend": "merging"}, "whole calls beside segments; Merging has none"),
        ({"bytes": 4096}, "workspace of at most 4096 bytes"),
    ],
)
def test_calls_that_cannot_have_whole_ends_are_refused(more, words, beside, distribution, monkeypatch):
    distribution("merging", "helpers.segmented_backend:MERGING")
    x = make_inputs("slow", 300, H=1, K=16, V=16).arguments
    if more.pop("requires_grad", False):
        x["q"].requires_grad_()
    if "bytes" in more:
        monkeypatch.setattr(native, "WORKSPACE_BYTES", more.pop("bytes"))
    with pytest.raises(PlannerError, match=words):
        chunk_kda(**x, **{"backend": "beside"} | more, context_parallel=PLAN)
    assert not beside


@pytest.mark.parametrize(
    ("segments", "strategy"),
    [
        (((100, 50),), "exact"),
        (((300,),), "serial"),
        (((9, 9, 9), (9, 9, 9)), "exact"),
        (((9, 9, 9),), "certified"),
    ],
)
def test_other_plans_have_no_whole_ends(segments, strategy):
    with pytest.raises(ArgumentError, match="whole_ends: expected False, except"):
        Plan(segments, strategy, whole_ends=True)


def test_plans_with_whole_ends_differ_from_others_and_round_trip_through_json():
    plain = Plan(PLAN.segments)
    assert plain != PLAN and "whole_ends" not in plain.to_json()
    copy = Plan.from_json(PLAN.to_json())
    assert copy == PLAN and copy.whole_ends and not Plan.from_json(plain.to_json()).whole_ends
    assert str(PLAN) == "exact (300 in 4 with whole ends of 101 and 131)"


# ---- the choice


def beside_constants():
    """Returns constants by which long calls of few heads gain from whole ends."""
    whole, inner = Pass(((8, 100.0),), 0.0, 0.0, 1.0), Pass(((16, 100.0),), 0.0, 0.0, 1.0)
    return Constants(whole, 0.1, 0.01, inner, inner, beside=Beside(whole, inner, whole, inner))


@pytest.mark.parametrize("lengths", [None, (2000,), (100, 1850, 50)], ids=["fixed", "packed", "with others"])
def test_a_long_call_of_one_sequence_gets_whole_ends_automatically(lengths, beside, stored):
    stored(KEY, beside_constants())
    REGISTRY.refresh()
    x = make_inputs("slow", 2000, H=2, K=16, V=16, lengths=lengths).arguments
    text = explain(**x, backend="beside").plan
    assert "with whole ends of" in text and "calibrated constants" in text
    beside.clear()
    o, state = run(x, "auto", output_final_state=True)
    assert [name for name, _ in beside].count("chunk_fwd") == 2 and len(beside) == 5
    want = token_oracle(**x)
    assert error(o, want[0], lengths=lengths) < 5e-3 and error(state, want[1], state=True) < FP32


def test_training_calls_get_other_plans(beside, stored):
    stored(KEY, beside_constants())
    REGISTRY.refresh()
    x = make_inputs("slow", 2000, H=2, K=16, V=16).arguments
    x["q"].requires_grad_()
    assert "whole ends" not in str(explain(**x, backend="beside").plan)


@pytest.mark.parametrize(("T", "HV"), [(65536, 8), (65536, 4), (131072, 2), (32768, 6)])
def test_no_other_ends_are_predicted_to_be_clearly_faster(T, HV):
    model = WholeEndsModel(H100, HV)
    segments, time = model.best([T])
    plan = Plan(segments, whole_ends=True)
    assert plan.lengths == (T,) and all(n % 64 == 0 for n in segments[0])
    assert predict(plan, HV=HV, constants=H100, native=True).planned == time
    for first, last, count in itertools.product(range(8, 60, 4), range(2, 30, 4), (1, 2, 4, 6, 10, 16, 24)):
        ends = [T * n // 100 // 64 * 64 for n in (first, last)]
        inner = T - sum(ends)
        if inner >= 64 * count:
            other = Plan.uniform((inner,), count).segments[0]
            assert model.total(((ends[0], *other, ends[1]),)) > 0.97 * time


def test_the_planner_takes_whole_ends_only_where_they_are_predicted_to_be_faster():
    options = {"constants": H100, "native": True, "whole_ends": True}
    plan = make_plan((65536,), HV=8, **options)
    assert plan.whole_ends and plan.prediction.planned < 0.9 * plan.prediction.serial
    assert not make_plan((65536,), HV=8, **options | {"whole_ends": False}).whole_ends
    assert not make_plan((65536,), HV=8, **options, window=32768).whole_ends, "two windows"
    packed = make_plan((500, 65536, 64), HV=8, **options)
    assert packed.whole_ends and [len(s) for s in packed.segments] == [1, len(packed.segments[1]), 1]
    assert not make_plan((65536, 65536), HV=8, **options).whole_ends, (
        "the second one would make a whole call too slow"
    )
    assert not make_plan((65536,), HV=8, **options, strategy="certified").whole_ends
    assert make_plan((65536,), HV=16, **options).strategy == "serial", (
        "the chains of 16 heads fill the device"
    )
    assert not make_plan((65536,), HV=1, **options).whole_ends, "one head leaves a whole call too slow"
    without = replace(H100, beside=None)
    assert not make_plan((65536,), HV=8, **options | {"constants": without}).whole_ends
    assert predict(plan, HV=8, constants=without) is None


def test_heads_that_need_most_of_the_device_have_no_prediction():
    HV = int(LARGEST_SHARE * 17) + 1
    model = WholeEndsModel(H100, HV)
    assert model.best([65536]) is None and model.total(((30000, 20000, 15536),)) is None
    assert predict(PLAN, HV=HV, constants=H100) is None


def test_constants_of_whole_ends_survive_storage(stored):
    stored(KEY, H100)
    found, source = constants.lookup(KEY)
    assert (found, source) == (H100, "calibrated") and isinstance(found.beside, Beside)


@pytest.mark.parametrize("is_known", [True, False], ids=["shipped", "new"])
def test_calibration_scales_both_steps_to_their_measured_times(is_known, beside, monkeypatch):
    monkeypatch.setattr(calibrate, "ENDS_TOKENS", 2048)
    monkeypatch.setattr(calibrate, "ENDS_HEADS", 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=66)
    )
    times = iter((400.0, 90.0))
    monkeypatch.setattr(calibrate, "device_us", lambda call, device: next(times))
    c = beside_constants()
    known = c if is_known else None
    found = calibrate.measure_beside(c, known, torch.device("cpu"), torch.bfloat16, "beside")
    lanes = 4 if is_known else 8  # half of the SMs of the device whose constants are shipped
    assert found.first.chain[0][0] == found.last.chain[0][0] == lanes
    model = WholeEndsModel(replace(c, beside=found), 2)
    same = Beside(*(Pass(((n, 100.0),), 0.0, 0.0, 1.0) for n in (lanes, 2 * lanes) * 2))
    segments, _ = WholeEndsModel(replace(c, beside=same), 2).best([2048])
    assert model.steps(segments) == pytest.approx((400.0, 90.0))


def test_calibration_finds_no_constants_where_heads_take_most_of_the_device(beside, monkeypatch):
    whole = Pass(((8, 100.0),), 0.0, 0.0, 1.0)
    c = Constants(whole, 0.1, 0.01, whole, whole)
    assert calibrate.measure_beside(c, None, torch.device("cpu"), torch.bfloat16, "beside") is None
