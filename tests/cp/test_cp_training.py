"""Split training calls: which path forward and backward take, what they save, and their gradients."""

from dataclasses import replace

import pytest
import torch
from helpers import training_backend
from helpers.segmented_backend import Merging

from kda_core import chunk_kda, contract, explain
from kda_core.arguments import Arguments, checked
from kda_core.errors import PlannerError
from kda_core.registry import REGISTRY, record_calls
from kda_core.testing import make_inputs
from kda_core.testing.conformance import BackendConformance
from kda_core.testing.gradients import GradientCase, gradient_errors
from kda_core.testing.runner import Runner
from kda_core.validate import problem_shape
from kda_cp import Constants, Pass, Plan, native
from kda_cp.calibrate import gradient_calls

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
IDLE = Pass(((64, 100.0),), 0.01, 0.01, 1.0)  # many idle lanes: long sequences gain
BUSY = Pass(((1, 100.0),), 0.01, 0.01, 1.0)  # one lane: nothing gains
BOTH = Constants(IDLE, 0.1, 0.01, IDLE, IDLE, IDLE, IDLE, IDLE)

LENGTHS = (1100, 0, 600, 30, 0)
PLAN = Plan(((512, 512, 76), (0,), (512, 88), (30,), (0,)))
ROWS = Plan(((512, 512, 26), (1024, 26)))
T_ROWS = 1050
#: Largest relative difference of a gradient in bf16 to that of a direct call. States are saved in bf16; a wrong transition or a wrong
#: slot changes gradients by more than 0.1.
BF16 = 1e-2


@pytest.fixture(params=["SPEC", "GENERIC"])
def backend(request, distribution):
    """Installs a backend whose forward saves states and whose backward reads them; returns its name."""
    distribution("training", f"helpers.training_backend:{request.param}")
    training_backend.calls.clear()
    return getattr(training_backend, request.param).name


@pytest.fixture
def training(distribution, stored):
    """Installs the backend that summarises segments; returns a function that stores its constants."""
    distribution("training", "helpers.training_backend:SPEC")
    training_backend.calls.clear()

    def store(constants):
        stored(("cpu", "training", "bfloat16"), constants)
        REGISTRY.refresh()

    return store


def step(x, grads, **more):
    """Returns the gradients of a call and (backend, entry, planner) of its forward and its backward."""
    leaves = {n: x[n].detach().requires_grad_() for n in NAMES if x.get(n) is not None}
    with record_calls() as calls:
        outputs = [y for y in chunk_kda(**x | leaves | more) if y is not None]
        found = torch.autograd.grad(outputs, list(leaves.values()), [d for d in grads if d is not None])
    return dict(zip(leaves, found)), [(c.backend, c.entry, c.planner) for c in calls]


def split(backend):
    return [(backend, "chunk_fwd", "cp"), (backend, "chunk_bwd", "cp")]


def direct(backend):
    return [(backend, "chunk_fwd", None), (backend, "chunk_bwd", None)]


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


# ---- gradients


FORMS = {
    "packed": {"lengths": LENGTHS, "initial_state": True, "V": 24},
    "v first": {"lengths": LENGTHS, "initial_state": True, "state_v_first": True, "V": 8},
    "rows": {"B": 2, "initial_state": True, "V": 16},
    "no states": {"HV": 1, "lengths": LENGTHS, "V": 16},
}


@pytest.mark.parametrize("disable_recompute", [False, True], ids=["default", "disable_recompute"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_a_split_call_are_those_of_a_direct_one(backend, form, disable_recompute):
    recipe = {"H": 1, "HV": 2, "K": 16} | FORMS[form]
    plan = PLAN if "lengths" in recipe else ROWS
    family, T = "slow" if form == "no states" else "memory", sum(recipe.get("lengths", (T_ROWS,)))
    case = GradientCase(
        make_inputs(family, T, **recipe), of=("o",) if form == "no states" else ("o", "final_state")
    )
    call = case.arguments | {"backend": backend, "disable_recompute": disable_recompute}
    grads = case.grad_o, case.grad_final_state
    found, ran = step(call, grads, context_parallel=plan)
    assert ran == split(backend)
    segments = tuple(n for s in plan.segments for n in s)
    made = [call for call in training_backend.calls if call[0].startswith("chunk_bwd")]
    assert made[-1] == ("chunk_bwd from saved states", segments)
    assert (("initial_state_gradients", segments) in training_backend.calls) == (backend == "training")
    want, ran = step(call, grads, context_parallel="off")
    assert ran == direct(backend)
    errors = {n: relative(found[n], want[n]) for n in want}
    assert max(errors.values()) < BF16, errors


def test_gradients_of_a_split_call_have_the_accuracy_of_the_contract(training):
    case = GradientCase(make_inputs("memory", 1100, H=1, HV=2, K=16, V=16))
    call = case.arguments | {"backend": "training"}
    found, ran = step(call, (case.grad_o, case.grad_final_state), context_parallel=Plan(((512, 512, 76),)))
    assert ran == split("training")
    errors = gradient_errors(found, case.exact)
    assert all(errors[n] <= case.limits[n] for n in errors), errors


@pytest.mark.parametrize(("family", "v_first"), [("memory", False), ("slow", True)])
def test_a_call_that_saves_nothing_may_be_cut_at_any_token(family, v_first, backend):
    """In fp32 no states are saved, so the gradients are those of a direct call to fp32."""
    lengths = (150, 0, 90)
    plan = Plan(((50, 30, 70), (0,), (20, 20, 19, 31)))
    recipe = {
        "H": 1,
        "HV": 2,
        "K": 16,
        "V": 8,
        "lengths": lengths,
        "initial_state": True,
        "state_v_first": v_first,
    }
    x = make_inputs(family, 240, dtype=torch.float32, **recipe)
    case = GradientCase(x)
    for name in (backend, "reference"):
        call = case.arguments | {"backend": name}
        found, ran = step(call, (case.grad_o, case.grad_final_state), context_parallel=plan)
        assert ran == split(name)
        want, ran = step(call, (case.grad_o, case.grad_final_state), context_parallel="off")
        assert ran == direct(name)
        assert all(relative(found[n], want[n]) < 2e-5 for n in want)


def test_a_missing_transition_would_be_seen(training):
    """With gates of the memory family the gradient of the last token reaches the first segment."""
    x = make_inputs("memory", 1536, H=1, K=16, V=16)
    case = GradientCase(x, of=("final_state",))
    call = case.arguments | {"backend": "training"}
    zeros = torch.zeros_like(call["v"])
    found, ran = step(call, (zeros, case.grad_final_state), context_parallel=Plan.uniform((1536,), 3))
    assert ran == split("training")
    want, _ = step(call, (zeros, case.grad_final_state), context_parallel="off")
    assert want["v"][:, :512].norm() > 1e-3 * want["v"].norm()
    assert relative(found["v"][:, :512], want["v"][:, :512]) < BF16


def test_a_repeated_step_gives_the_same_bits(backend):
    x = make_inputs("slow", sum(LENGTHS), H=1, K=16, V=16, lengths=LENGTHS).arguments
    grad = torch.randn_like(x["v"])
    first, second = (step(x | {"backend": backend}, (grad,), context_parallel=PLAN)[0] for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_only_wanted_gradients_are_computed(backend):
    x = make_inputs("slow", 1100, H=1, K=16, V=16, initial_state=True).arguments | {"backend": backend}
    x["v"].requires_grad_()
    o, _ = chunk_kda(**x, context_parallel=Plan(((512, 588),)))
    (found,) = torch.autograd.grad(o.sum(), x["v"])
    o, _ = chunk_kda(**x, context_parallel="off")
    (want,) = torch.autograd.grad(o.sum(), x["v"])
    assert relative(found, want) < BF16


# ---- saved states


@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.parametrize("limit", [None, 1], ids=["one window", "windows"])
@pytest.mark.parametrize("lengths", [LENGTHS, None], ids=["packed", "rows"])
def test_a_split_forward_saves_what_a_direct_one_saves(
    backend, lengths, limit, disable_recompute, monkeypatch
):
    if limit is not None:
        monkeypatch.setattr(native, "TRAINING_WORKSPACE_BYTES", limit)
    recipe = {"H": 1, "HV": 2, "K": 16, "V": 8, "initial_state": True}
    if lengths is None:
        x, plan = make_inputs("memory", T_ROWS, B=2, **recipe).arguments, ROWS
    else:
        x, plan = make_inputs("memory", sum(lengths), lengths=lengths, **recipe).arguments, PLAN
    options = {"disable_recompute": disable_recompute, "backend": backend, "needs_backward": True}
    found = []
    for mode in (plan, "off"):
        args = checked(Arguments(**x | options | {"context_parallel": mode}))
        with torch.no_grad(), record_calls() as calls:
            found.append(torch.ops.kda_core.chunk_fwd(*args._replace(saves=True)))
        assert [c.planner for c in calls] == ["cp" if mode is plan else None]
    shape = problem_shape(*args.tensors, options=args.options)
    for slots in contract.saved_slots(shape, lengths or (T_ROWS, T_ROWS)):
        for slot in slots:
            assert relative(found[0][3][slot], found[1][3][slot]) < BF16
    assert found[1][3].shape == shape.saved_states_shape
    if disable_recompute:
        assert relative(found[0][4], found[1][4]) < BF16
    methods = {method for method, _ in training_backend.calls}
    assert ("execute_segments" in methods) == (backend == "training" and limit is None) or limit is not None


@pytest.mark.parametrize("disable_recompute", [False, True])
def test_the_test_backends_pass_the_conformance_kit(backend, disable_recompute):
    kit, runner = BackendConformance(), Runner(backend, "cpu", 16, True)
    if backend == "generic":  # it has none of these methods
        with pytest.raises(pytest.skip.Exception, match="not declared: segment_summary"):
            kit.test_segments_that_save_states(runner, disable_recompute)
        with pytest.raises(pytest.skip.Exception, match="not declared: initial_state_gradients"):
            kit.test_state_gradients_of_segments(runner, "memory")
    else:
        kit.test_segments_that_save_states(runner, disable_recompute)
        kit.test_state_gradients_of_segments(runner, "steep" if disable_recompute else "memory")


def wrong_state(self, inputs, outputs):
    found = Merging.execute_segments(self, inputs, outputs)
    outputs.saved_states[1].mul_(1.1)
    return found


def without_end(self, inputs, grad_o, grad_final_state, *rest):
    return RIGHT(self, inputs, grad_o, torch.zeros_like(grad_final_state), *rest)


def transposed(self, inputs, grad_o, grad_final_state, gradients, transitions, workspace):
    RIGHT(self, inputs, grad_o, grad_final_state, gradients, transitions, workspace)
    transitions.copy_(transitions.mT.clone())


RIGHT = training_backend.Native.initial_state_gradients


@pytest.mark.parametrize("wrong", [wrong_state, without_end, transposed])
def test_wrong_backends_fail_the_conformance_kit(training, wrong, monkeypatch):
    kit, runner = BackendConformance(), Runner("training", "cpu", 16, True)
    if wrong is wrong_state:
        monkeypatch.setattr(training_backend.Native, "execute_segments", wrong)
        with pytest.raises(AssertionError, match="error of the saved states"):
            kit.test_segments_that_save_states(runner, False)
    else:
        monkeypatch.setattr(training_backend.Native, "initial_state_gradients", wrong)
        with pytest.raises(AssertionError, match="error of the gradient of initial_state through segments"):
            kit.test_state_gradients_of_segments(runner, "memory")


def test_a_backend_of_an_older_abi_saves_no_states(training):
    """Such a backend expects another dtype of saved states."""
    x = make_inputs("slow", 1100, H=1, K=16, V=16).arguments | {"backend": "training"}
    x["v"].requires_grad_()
    assert explain(**x).saved_bytes > 0
    older = replace(training_backend.SPEC, abi=(2, 5))
    native_backend = REGISTRY.load(REGISTRY.find("training").spec)
    with REGISTRY.replaced(older, native_backend, "of an older ABI"):
        for plan in ("off", Plan(((512, 588),))):
            found = explain(**x, context_parallel=plan)
            assert (found.error, found.saved_bytes) == (None, 0)


# ---- plans of the caller


def test_a_plan_whose_cuts_do_not_fit_the_saved_states_raises_before_the_forward(backend):
    x = make_inputs("slow", 1200, H=1, K=16, V=16).arguments | {"backend": backend}
    plan = Plan(((600, 600),))
    x["v"].requires_grad_()
    training_backend.calls.clear()
    with pytest.raises(PlannerError, match=r"cuts at multiples of 512; sequence 0 has segments \(600, 600\)"):
        chunk_kda(**x, context_parallel=plan)
    assert training_backend.calls == []
    assert "multiples of 512" in explain(**x, context_parallel=plan).error
    with torch.no_grad(), record_calls() as calls:
        chunk_kda(**x, context_parallel=plan)
    assert [c.planner for c in calls] == ["cp"]


def test_a_serial_plan_equals_a_direct_call_bit_for_bit(backend):
    x = make_inputs("slow", 600, H=1, K=16, V=16).arguments | {"backend": backend}
    grad = torch.randn_like(x["v"])
    found, ran = step(x, (grad,), context_parallel=Plan(((600,),), "serial"))
    want, _ = step(x, (grad,), context_parallel="off")
    assert ran == split(backend) and all(torch.equal(found[n], want[n]) for n in want)


def test_tokens_behind_the_last_sequence_are_refused(backend):
    x = make_inputs("slow", 1200, H=1, K=16, V=16, lengths=(1200,)).arguments | {"backend": backend}
    x |= {"use_graph": True, "max_num_seqs": 1, "cu_seqlens": torch.tensor([0, 1100], dtype=torch.int32)}
    x["v"].requires_grad_()
    with pytest.raises(
        PlannerError, match="in the backward: tokens after the last sequence: .* 1100 of 1200"
    ):
        chunk_kda(**x, context_parallel=Plan(((512, 588),)))


def test_a_certified_plan_has_the_backward_of_an_exact_one(backend):
    x = make_inputs("slow", 1100, H=1, K=16, V=16).arguments | {"backend": backend}
    grad = torch.randn_like(x["v"])
    found, ran = step(x, (grad,), context_parallel=Plan(((512, 512, 76),), "certified"))
    want, _ = step(x, (grad,), context_parallel="off")
    assert ran == split(backend) and all(relative(found[n], want[n]) < 2e-2 for n in want)


# ---- automatic plans


def long_call(**more):
    x = make_inputs("slow", 2560, H=1, K=16, V=16, lengths=(2060, 500)).arguments
    return x | {"backend": "training"} | more


@pytest.mark.parametrize("disable_recompute", [False, True])
def test_both_directions_are_split_where_a_gain_is_predicted(training, disable_recompute, monkeypatch):
    training(BOTH)
    x = long_call(disable_recompute=disable_recompute)
    grad = torch.randn_like(x["v"])
    found, ran = step(x, (grad,))
    assert ran == split("training")
    cuts = [lengths for method, lengths in training_backend.calls if method == "execute_segments"]
    assert len(cuts[0]) > 2 and all(n % 512 == 0 for n in cuts[0][:1])
    want, ran = step(x, (grad,), context_parallel="off")
    assert ran == direct("training") and all(relative(found[n], want[n]) < 2e-2 for n in want)
    _, ran = step(x, (grad,), pin=True)
    assert ran == direct("training")
    monkeypatch.setenv("KDA_CP", "0")
    _, ran = step(x, (grad,))
    assert ran == direct("training")


@pytest.mark.parametrize("forward", [True, False])
def test_forward_and_backward_have_plans_of_their_own(training, forward):
    one, other = (IDLE, BUSY) if forward else (BUSY, IDLE)
    training(Constants(one, 0.1, 0.01, one, one, other, other, other))
    x = long_call()
    _, ran = step(x, (torch.randn_like(x["v"]),))
    planners = ("cp", None) if forward else (None, "cp")
    assert ran == [
        ("training", "chunk_fwd", planners[0]), ("training", "chunk_bwd", planners[1]),
    ]  # fmt: skip
    x["q"].requires_grad_()
    found = explain(**x)
    assert found.plan.startswith("cp: exact" if forward else "direct (cp: serial")
    assert found.backward_plan.startswith("direct (cp: serial" if forward else "cp: exact")
    assert f"backward  training, saved {found.saved_bytes} bytes, plan {found.backward_plan}" in str(found)
    assert found.saved_bytes > 0


def test_calibration_times_the_backward_in_both_modes(backend):
    timed = gradient_calls(2, 600, torch.device("cpu"), torch.bfloat16, backend)
    training_backend.calls.clear()
    for call in timed.values():
        call()
    if backend == "generic":
        assert timed == {}
    else:
        assert list(timed) == ["backward", "backward_dense", "state_gradients"]
        made = [*(["chunk_bwd from saved states"] * 2), "initial_state_gradients"]
        assert training_backend.calls == [(method, (600,)) for method in made]
        assert gradient_calls(2, 50, torch.device("cpu"), torch.float32, backend) == {}


def test_a_training_call_without_constants_of_its_backward_is_not_split(training):
    training(Constants(IDLE, 0.1, 0.01, IDLE, IDLE))
    x = long_call()
    _, ran = step(x, (torch.randn_like(x["v"]),))
    assert ran == direct("training")
    x["q"].requires_grad_()
    found = explain(**x)
    assert all(
        "no constants of the backward of 'training'" in text for text in (found.plan, found.backward_plan)
    )


def test_explain_predicts_a_plan_of_the_caller_for_both_directions(training):
    training(BOTH)
    x = long_call(context_parallel=Plan(((1024, 1036), (500,))))
    x["q"].requires_grad_()
    found = explain(**x)
    for text in (found.plan, found.backward_plan):
        assert text.startswith("cp: exact (2060 in 2, 1 whole); predicted") and "given by the caller" in text
    assert explain(**x | {"context_parallel": "off"}).backward_plan == "direct"


def test_only_the_device_knows_the_lengths(training):
    training(BOTH)
    x = long_call()
    shape = problem_shape(*(x.get(n) for n in (*NAMES, "cu_seqlens")), options=contract.KdaOptions(
        use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
        needs_backward=True,
    ))  # fmt: skip
    found = explain(shape, "training")
    assert found.plan.startswith("unknown") and found.backward_plan.startswith("unknown")


def test_a_compiled_step_is_split_and_has_the_bits_of_an_eager_one(training):
    training(BOTH)
    x = long_call()
    grad = torch.randn_like(x["v"])
    rest = {n: v for n, v in x.items() if n not in NAMES}
    compiled = torch.compile(
        lambda **leaves: chunk_kda(**leaves, **rest)[0], fullgraph=True, backend="aot_eager"
    )
    leaves = {n: x[n].detach().clone().requires_grad_() for n in NAMES if x.get(n) is not None}
    with record_calls() as calls:
        found = torch.autograd.grad(compiled(**leaves), list(leaves.values()), grad)
    assert [(c.backend, c.entry, c.planner) for c in calls] == split("training")
    want, _ = step(x, (grad,))
    assert all(torch.equal(a, b) for a, b in zip(found, want.values()))
