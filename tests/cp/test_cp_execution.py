"""Every strategy against the fp64 oracle, over several backends. Each test asserts that the plan was executed."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_core import chunk_kda
from kda_core.errors import PlannerError
from kda_core.registry import record_calls
from kda_core.testing import FAMILIES, error, make_inputs, token_oracle
from kda_cp import Plan
from kda_cp.merge import merge
from kda_cp.upload import Integers, Uploads

# Relative error of fp32 arithmetic over these lengths. A wrong transition gives an error of at least 1e-1.
FP32 = 1e-5


def split(x, plan, backend="reference", **more):
    """Calls ``chunk_kda`` with a plan; asserts that the plan was executed on this backend."""
    with record_calls() as calls:
        result = chunk_kda(**x, backend=backend, context_parallel=plan, **more)
    assert [(c.backend, c.entry, c.planner) for c in calls] == [(backend, "chunk_fwd", "cp")]
    assert plan.is_split
    return result


def lengths_of(x):
    return x["cu_seqlens"].diff().tolist() if "cu_seqlens" in x else None


def check(x, plan, backend="reference"):
    """Compares o and the final states of a plan with the oracle; o in bf16 also with the direct call."""
    want = token_oracle(**x)
    o, state = split(x, plan, backend, output_final_state=True)
    direct, _ = chunk_kda(**x, backend=backend, context_parallel="off")
    lengths = lengths_of(x)
    assert error(o, want[0], lengths=lengths) <= 1.2 * error(direct, want[0], lengths=lengths) + FP32
    assert error(state, want[1], state=True) <= FP32
    return o, state


# ---- plans and backends

LENGTHS = (300, 0, 170, 5, 128, 0)
# Cuts inside chunks and at chunk boundaries.
PLAN = ((100, 37, 1, 62, 100), (0,), (90, 80), (5,), (32, 32, 32, 32), (0,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", ["exact", "certified"])
def test_a_batch_of_split_and_whole_sequences_agrees_with_the_oracle(family, strategy):
    x = make_inputs(
        family, sum(LENGTHS), H=2, HV=4, K=32, V=32, lengths=LENGTHS, initial_state=True, state_v_first=True
    )
    check(x.arguments, Plan(PLAN, strategy))


@pytest.mark.parametrize("family", ["steep", "slow", "memory", "mixed"])
@pytest.mark.parametrize("strategy", ["exact", "certified"])
def test_plans_over_the_third_party_example_agree_with_the_oracle(family, strategy, tokenwise):
    lengths = (150, 0, 90)
    x = make_inputs(family, 240, H=1, HV=2, K=16, V=16, lengths=lengths, initial_state=True)
    check(x.arguments, Plan(((50, 30, 70), (0,), (20, 20, 19, 31)), strategy), tokenwise)


@pytest.mark.parametrize("family", ["steep", "memory"])
@pytest.mark.parametrize(("K", "V"), [(16, 48), (48, 16), (24, 20), (8, 8)])
def test_plans_with_different_k_and_v_agree_with_the_oracle(family, K, V):
    x = make_inputs(family, 200, B=2, H=2, K=K, V=V, initial_state=True).arguments
    check(x, Plan.uniform((200, 200), 4))


def test_gates_of_the_memory_family_detect_a_missing_transition():
    x = make_inputs("memory", 400, H=2, K=32, V=32).arguments
    want = token_oracle(**x)[1]
    gone = token_oracle(**(x | {"initial_state": torch.zeros_like(x["initial_state"])}))[1]
    assert error(gone, want, state=True) > 0.1
    check(x, Plan.uniform((400,), 5))


@st.composite
def calls(draw):
    """Draws a small call of any kind, and a plan for it with cuts at any token."""
    HV, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
    H = HV // group
    K, V = draw(st.sampled_from([(8, 8), (16, 8), (8, 16)]))
    packed = draw(st.booleans())
    lengths = (
        draw(st.lists(st.integers(0, 70), min_size=1, max_size=4)) if packed else [draw(st.integers(2, 90))]
    )
    lengths[0] = max(2, lengths[0])
    B = 1 if packed else draw(st.integers(1, 3))
    segments = []
    for n, length in enumerate(lengths if packed else lengths * B):
        inside = st.integers(1, max(1, length - 1))
        cuts = sorted(draw(st.sets(inside, min_size=n == 0, max_size=6))) if length > 1 else []
        ends = [*cuts, length]
        segments.append(tuple(b - a for a, b in zip([0, *cuts], ends)))
    x = make_inputs(
        draw(st.sampled_from(FAMILIES)),
        sum(lengths),
        B=B,
        H=H,
        HV=HV,
        K=K,
        V=V,
        seed=draw(st.integers(0, 99)),
        lengths=tuple(lengths) if packed else None,
        beta_dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        initial_state=draw(st.booleans()),
        state_v_first=draw(st.booleans()),
    ).arguments
    if draw(st.booleans()) and packed:
        x["cu_seqlens"] = x["cu_seqlens"].long()
        x["cu_seqlens_cpu"] = x["cu_seqlens"].clone()
    if draw(st.booleans()) and x["use_beta_sigmoid_in_kernel"]:
        x["allow_neg_eigval"] = True
    return x, Plan(tuple(segments), draw(st.sampled_from(["exact", "certified"])))


@settings(deadline=None, max_examples=60)
@given(calls())
def test_random_plans_of_random_calls_agree_with_the_oracle(call):
    check(*call)


# ---- states and outputs


@pytest.mark.parametrize("strategy", ["exact", "certified"])
def test_a_missing_initial_state_zeros_and_both_state_layouts_give_the_same_bits(strategy):
    x = make_inputs("slow", 300, H=2, K=32, V=32, lengths=(200, 100)).arguments
    plan = Plan(((60, 50, 90), (33, 33, 34)), strategy)
    o, state = split(x, plan, output_final_state=True)
    zeros = split(x, plan, output_final_state=True, initial_state=torch.zeros(2, 2, 32, 32))
    v_first = split(x, plan, output_final_state=True, state_v_first=True)
    again = split(x, plan, output_final_state=True)
    for other in (zeros, (v_first[0], v_first[1].mT), again):
        assert torch.equal(o, other[0]) and torch.equal(state, other[1])
    assert split(x, plan)[1] is None


def test_initial_states_are_not_modified_and_pass_through_empty_sequences():
    x = make_inputs("memory", 120, H=2, K=16, V=16, lengths=(0, 120, 0)).arguments
    before = {n: t.clone() for n, t in x.items() if isinstance(t, torch.Tensor)}
    _, state = split(x, Plan(((0,), (40, 40, 40), (0,))), output_final_state=True)
    assert torch.equal(state[0], before["initial_state"][0]) and torch.equal(
        state[2], before["initial_state"][2]
    )
    assert all(torch.equal(x[n], t) for n, t in before.items())


def test_outputs_overwrite_every_element_of_the_tensors_of_the_caller():
    x = make_inputs("slow", 200, H=2, K=16, V=16, lengths=(150, 50)).arguments
    plan = Plan(((70, 50, 30), (20, 30)))
    want = split(x, plan, output_final_state=True)
    o, state = (torch.full_like(t, torch.nan) for t in want)
    split(x, plan, output_final_state=True, out=(o, state))
    assert torch.equal(o, want[0]) and torch.equal(state, want[1])


@pytest.mark.parametrize("state_v_first", [False, True])
def test_intermediate_states_require_cuts_at_chunk_boundaries(state_v_first):
    x = make_inputs(
        "slow", 490, H=2, K=16, V=16, lengths=(300, 190), state_v_first=state_v_first
    ).arguments | {"return_intermediate_states": True}
    direct = chunk_kda(**x, context_parallel="off")[2]
    h = split(x, Plan(((64, 128, 108), (64, 64, 62))))[2]
    assert h.shape == direct.shape and error(h, direct, state=True) < 0.01
    with pytest.raises(
        PlannerError, match="cuts at multiples of chunk_size=64; sequence 0 has segments .64, 100, 136."
    ):
        split(x, Plan(((64, 100, 136), (190,))))


def test_tokens_outside_of_all_sequences_are_not_written():
    x = make_inputs("slow", 200, H=2, K=16, V=16, lengths=(120, 80)).arguments
    x |= {"use_graph": True, "max_num_seqs": 2, "cu_seqlens": torch.tensor([0, 120, 180], dtype=torch.int32)}
    o = torch.full((1, 200, 2, 16), 7.0, dtype=torch.bfloat16)
    split(x, Plan(((50, 40, 30), (60,))), out=o)
    direct, _ = chunk_kda(**x, context_parallel="off", out=torch.full_like(o, 7.0))
    assert torch.equal(o[:, 180:], direct[:, 180:]) and (o[:, 180:] == 7).all()
    assert error(o[:, :180], direct[:, :180].double()) < 5e-3


def test_cu_seqlens_may_change_in_place_between_calls():
    x = make_inputs("memory", 240, H=2, K=16, V=16, lengths=(100, 140)).arguments
    plan = Plan(((50, 30, 20), (70, 70)))
    check(x, plan)
    x["cu_seqlens"].copy_(torch.tensor([0, 180, 240]))
    with pytest.raises(PlannerError, match=r"for sequences of \[100, 140\] tokens, the call has \[180, 60\]"):
        split(x, plan)
    check(x, Plan(((50, 30, 100), (30, 20, 10))))
    x["cu_seqlens"].copy_(torch.tensor([0, 100, 240]))
    check(x, plan)


def test_fp64_inputs_are_computed_in_fp64():
    x = make_inputs("memory", 200, H=2, K=16, V=16).arguments
    x = {n: t.double() if torch.is_tensor(t) and t.dtype != torch.int32 else t for n, t in x.items()}
    want = token_oracle(**x)
    for strategy in ("exact", "certified"):
        o, state = split(x, Plan.uniform((200,), 5, strategy), output_final_state=True)
        assert error(o, want[0]) < 1e-12 and error(state, want[1], state=True) < 1e-12


def test_concurrent_and_repeated_calls_give_the_same_bits():
    x = make_inputs("memory", 300, H=2, K=16, V=16, lengths=(200, 100)).arguments
    plan = Plan(((50,) * 4, (25,) * 4))
    want = split(x, plan, output_final_state=True)
    seen = []

    def work():
        seen.extend(chunk_kda(**x, output_final_state=True, context_parallel=plan) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(seen) == 20
    assert all(torch.equal(o, want[0]) and torch.equal(s, want[1]) for o, s in seen)


# ---- calls of the backend


def test_an_exact_plan_makes_the_documented_backend_calls(watched):
    calls = watched()
    x = make_inputs("memory", 210, H=1, K=16, V=16, lengths=(100, 110)).arguments
    check(x, Plan(((20, 30, 50), (110,))), "watched")
    assert [n for _, n in calls[:3]] == [(20, 30), (30,), (20, 30, 50, 110)]
    calls.clear()
    check(x, Plan(((40, 60), (10, 40, 60))), "watched")
    # Summaries have the longest segment first.
    assert [n for _, n in calls[:3]] == [(40, 40, 10), (40,), (40, 60, 10, 40, 60)]
    calls.clear()
    check(make_inputs("memory", 100, H=1, K=32, V=16).arguments, Plan.uniform((100,), 4), "watched")
    # M has 32 columns, and a call gives 16 of them.
    assert [n for _, n in calls[:4]] == [(25,) * 3, (25,) * 2, (25,) * 2, (25,) * 4]


def test_two_segments_need_no_transition(watched):
    calls = watched()
    check(make_inputs("memory", 100, H=1, K=16, V=16).arguments, Plan.uniform((100,), 2), "watched")
    assert [n for _, n in calls[:2]] == [(50,), (50, 50)]


def test_a_serial_plan_equals_a_direct_call_bit_for_bit(watched):
    calls = watched()
    x = make_inputs("slow", 100, H=1, K=16, V=16).arguments
    o, _ = chunk_kda(**x, backend="watched", context_parallel=Plan(((100,),), "serial"))
    direct, _ = chunk_kda(**x, backend="watched", context_parallel="off")
    assert torch.equal(o, direct) and calls[0] == calls[1]


# ---- refused plans


@pytest.mark.parametrize(
    ("segments", "more", "words"),
    [
        (((100, 100),), {}, r"for sequences of \[200\] tokens, the call has \[100\]"),
        (((50, 50), (100,)), {}, r"\[100, 100\] tokens, the call has \[100\]"),
        (((50, 50),), {"pin": True}, "pin=True"),
    ],
)
def test_a_plan_that_does_not_match_the_call_raises(segments, more, words):
    x = make_inputs("slow", 100, H=1, K=16, V=16).arguments
    with pytest.raises(PlannerError, match=f"context_parallel: cp cannot run this plan: .*{words}"):
        chunk_kda(**x, context_parallel=Plan(segments), **more)


def test_a_plan_over_a_backend_without_a_required_feature_raises(watched):
    watched(missing={"varlen"})
    x = make_inputs("slow", 100, H=1, K=16, V=16).arguments
    chunk_kda(**x, backend="watched")
    with pytest.raises(PlannerError, match="backend 'watched' does not declare varlen"):
        chunk_kda(**x, backend="watched", context_parallel=Plan.uniform((100,), 3))


def test_a_plan_that_needs_a_call_the_backend_refuses_raises(watched):
    watched(refuses="no states today")
    x = make_inputs("slow", 100, H=1, K=16, V=16).arguments
    with pytest.raises(
        PlannerError, match="backend 'watched' refuses a call that the plan needs: no states today"
    ):
        chunk_kda(**x, backend="watched", context_parallel=Plan.uniform((100,), 3))


# ---- the certificate


def computed_tokens(calls):
    """Returns how many tokens times value heads a certified plan computed transitions for, on the CPU: in its second call."""
    shape, _ = calls[1]
    assert (shape.B, shape.H, shape.HV) == (1, 1, 1)
    return shape.T


SEGMENT = 640  # longer than the tail that the certificate computes


@pytest.mark.parametrize(("family", "share"), [("saturated", 0), ("masked", 0), ("slow", 1), ("memory", 1)])
def test_vanished_transitions_are_left_out_and_the_others_are_computed(family, share, watched):
    calls = watched()
    x = make_inputs(family, 4 * SEGMENT, H=2, K=16, V=16, initial_state=True).arguments
    check(x, Plan.uniform((4 * SEGMENT,), 4, "certified"), "watched")
    assert computed_tokens(calls) == share * 2 * SEGMENT * 2


def test_each_head_is_certified_separately(watched):
    calls = watched()
    x = make_inputs("memory", 4 * SEGMENT, H=3, K=16, V=16).arguments
    x["g"][:, :, 1] = -1.0
    x["g"][:, SEGMENT : 2 * SEGMENT, 2] = -1.0
    check(x, Plan.uniform((4 * SEGMENT,), 4, "certified"), "watched")
    assert computed_tokens(calls) == 3 * SEGMENT  # head 0 twice, head 1 never, head 2 in one segment


def test_large_sums_of_gates_do_not_certify_a_segment(watched):
    """Every channel decays by at least e^-1000, yet half of the state survives because the open channel changes."""
    calls = watched()
    T, K = 4 * SEGMENT, 16
    x = make_inputs("memory", T, H=1, K=K, V=K).arguments
    g, k, beta = torch.full((1, T, 1, K), -5.0), torch.zeros(1, T, 1, K), torch.zeros(1, T, 1)
    for segment in range(4):
        a, b = (0, 1) if segment % 2 == 0 else (1, 0)
        first, change = segment * SEGMENT, segment * SEGMENT + SEGMENT // 2
        g[:, first : change + 1, :, a] = 0.0
        g[:, change + 1 : first + SEGMENT, :, b] = 0.0
        k[:, change, :, a], k[:, change, :, b], beta[:, change] = 2**-0.5, -(2**-0.5), 1.0
    g[:, :, :, 2:] = -5.0
    g[:, [p * SEGMENT + SEGMENT // 2 for p in range(4)], :, 1] = 0.0
    g[:, [p * SEGMENT + SEGMENT // 2 for p in range(4)], :, 0] = 0.0
    x |= {"g": g, "k": k.bfloat16(), "beta": beta, "use_qk_l2norm_in_kernel": False}
    _, state = check(x, Plan.uniform((T,), 4, "certified"), "watched")
    assert state.norm() > 0.01 * x["initial_state"].norm()
    assert computed_tokens(calls) == 2 * SEGMENT


def test_a_large_state_is_kept_if_the_segment_adds_little(watched):
    """The transition is below 2^-24, but its product with the state is 1e-3 of the exit state that the segment adds."""
    calls, plan = watched(), Plan(((SEGMENT, SEGMENT, 3),), "certified")
    x = make_inputs("memory", 2 * SEGMENT + 3, H=1, K=16, V=16).arguments
    x["g"] = torch.zeros_like(x["g"])
    x["g"][:, SEGMENT : 2 * SEGMENT] = -25.0 / SEGMENT
    small = x | {"v": x["v"] * 1e-8}
    check(small, plan, "watched")
    assert computed_tokens(calls) == SEGMENT
    calls.clear()
    x["g"] *= 2
    check(x, plan, "watched")
    assert computed_tokens(calls) == 0


@pytest.mark.parametrize("what", ["long keys", "negative beta", "growing gate"])
def test_factors_with_a_norm_above_one_are_never_certified(what, watched):
    calls = watched()
    x = make_inputs("memory", 4 * SEGMENT, H=1, K=16, V=16).arguments
    x |= {"g": torch.full_like(x["g"], -0.2), "use_qk_l2norm_in_kernel": False}
    x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).bfloat16()
    plan = Plan.uniform((4 * SEGMENT,), 4, "certified")
    check(x, plan, "watched")
    assert computed_tokens(calls) == 0
    calls.clear()
    # In the first segment with a transition, far from its tail. The state of the next segment depends on it as well.
    at = SEGMENT + 3
    if what == "long keys":
        x["k"][:, at] *= 8
    elif what == "negative beta":
        x["beta"][:, at] = -0.5
    else:
        x["g"][:, at] = 0.5
    check(x, plan, "watched")
    assert computed_tokens(calls) == 2 * SEGMENT


# ---- the merge


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_merge_equals_the_sequential_product(dtype):
    rng = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, generator=rng, dtype=torch.float64).to(dtype)
    counts = (1, 2, 5, 3)
    initial = [draw(3, 8, 4) for _ in counts]
    exits = [[draw(3, 8, 4) for _ in range(n - 1)] for n in counts]
    M = [[draw(3, 8, 8) / 3 for _ in range(max(0, n - 2))] for n in counts]
    for n, got in enumerate(merge(initial, exits, M)):
        want = [initial[n].double(), *(e.double() for e in exits[n][:1])]
        for m, b in zip(M[n], exits[n][1:]):
            want.append(torch.einsum("hij,hjv->hiv", m.double(), want[-1]) + b.double())
        assert len(got) == counts[n] and all(s.dtype == torch.float64 for s in got)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_the_merge_ignores_tf32_settings_and_autocast():
    eye, S = torch.eye(64).expand(1, 64, 64), torch.randn(1, 64, 64)
    M = eye * (1 + 2.0**-20)  # bf16 and TF32 see the identity
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            (states,) = merge([S], [[S, torch.zeros_like(S)]], [[M]])
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.testing.assert_close(states[2], S.double() * (1 + 2.0**-20), rtol=1e-15, atol=0)


def test_a_split_call_ignores_autocast():
    x = make_inputs("memory", 200, H=1, K=16, V=16).arguments
    plan = Plan.uniform((200,), 4)
    want = split(x, plan, output_final_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = split(x, plan, output_final_state=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# ---- integers on the device


@pytest.fixture
def streams(monkeypatch):
    """Replaces CUDA streams and copies, so that no GPU is needed.

    Returns the current stream, whose `capturing` a test may set; the host tensors that were made; and weak references to
    the source and the result of each copy.
    """
    stream, placed, copied = SimpleNamespace(cuda_stream=1, capturing=False), [], []
    make = torch.tensor

    def place(values, dtype, pin_memory):
        assert pin_memory
        placed.append(make(values, dtype=dtype))
        return placed[-1]

    def copy(x, device, non_blocking):
        assert non_blocking
        copied.append((weakref.ref(x), weakref.ref(found := x.clone())))
        return found

    monkeypatch.setattr(torch, "tensor", place)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.capturing)
    return stream, placed, copied


def upload(uploads, *numbers):
    groups = (Integers(numbers, torch.int32), Integers(numbers[:1], torch.int64))
    return uploads.get(groups, torch.device("cuda", 0))


def test_integers_are_copied_once_per_stream_and_captures_use_the_first_copy(streams):
    stream, placed, copied = streams
    uploads = Uploads(16)
    first = upload(uploads, 11, 22, 33)
    assert [x.device.tolist() for x in first] == [[11, 22, 33], [11]] and upload(uploads, 11, 22, 33) is first
    stream.cuda_stream = 2
    second = upload(uploads, 11, 22, 33)
    assert second is not first and upload(uploads, 11, 22, 33) is second and len(placed) == len(copied) == 4
    stream.capturing = True
    assert upload(uploads, 11, 22, 33) is first and len(copied) == 4


def test_captures_of_the_same_plan_share_one_copy(streams):
    stream, placed, _ = streams
    uploads = Uploads(1)
    first = upload(uploads, 101, 202)
    stream.capturing = True
    assert upload(uploads, 101, 202) is first
    for n in range(3):  # a copy that a graph reads is kept when the cache drops it
        stream.capturing = False
        upload(uploads, n, n)
        stream.capturing = True
        assert upload(uploads, 101, 202) is first
    assert len(placed) == 2 + 3 * 2


def test_a_copy_made_during_a_capture_belongs_to_the_graph(streams):
    """Without an earlier call the copy is part of the graph, and only its source is kept."""
    stream, placed, copied = streams
    uploads = Uploads(16)
    stream.capturing = True
    for _ in range(3):
        assert [x.device.tolist() for x in upload(uploads, 303, 404)] == [[303, 404], [303]]
    gc.collect()
    assert len(copied) == 6 and all(found() is None for _, found in copied)  # the graph owns the memory
    sources = {id(source()) for source, _ in copied}
    assert len(placed) == len(sources) == 2
    del placed[:]
    gc.collect()
    assert all(source() is not None for source, _ in copied)
