"""What the forward saves for the backward: its values and slots, who gets it, and the same in a compiled graph."""

import math
from itertools import accumulate

import pytest
import torch
import torch._dynamo.testing
from helpers.inputs import call
from helpers.saving_backend import SAVING, install_saving
from hypothesis import given
from hypothesis import strategies as st

from kda_core import backends, chunk_kda, explain, use_backend
from kda_core.arguments import Arguments, checked
from kda_core.contract import Feature, saved_slots
from kda_core.registry import record_calls
from kda_core.testing import make_inputs, token_oracle
from kda_core.testing.oracle import log_decay, sequence_bounds

BF16 = torch.bfloat16
EVERY = {f.value for f in Feature}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture
def saving(install):
    """A backend that offers saved states; calls that name none go to it."""
    return install_saving(install)


def small(T=150, grad=("v",), **more):
    """Returns a call in bf16 whose inputs `grad` require grad."""
    x = call(T=T, dtype=BF16) | more
    return {n: t.requires_grad_() if n in grad else t for n, t in x.items()}


def ran(calls):
    return [(c.backend, c.entry) for c in calls]


def step(x, **more):
    """Runs forward and backward; returns (o, gradients)."""
    o, state = chunk_kda(**x, output_final_state=True, **more)
    leaves = [t for t in x.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    return o, torch.autograd.grad(o.float().square().sum() + state.sum(), leaves)


# ---- values


def exact(x):
    """Returns the state before every token, [N, tokens, HV, K, V] as a list of sequences, and the residual [B, T, HV, V], fp64."""
    x = {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in x.items()}
    bounds = sequence_bounds(x["q"], x.get("cu_seqlens"))
    h = token_oracle(**x, return_intermediate_states=True, chunk_size=1)[2]
    h = (h.mT if x.get("state_v_first") else h).flatten(0, 1)
    k, g = x["k"].double(), x["g"].double()
    if x.get("use_qk_l2norm_in_kernel"):
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    if x.get("use_gate_in_kernel"):
        g = log_decay(g, x.get("A_log"), x.get("dt_bias"), x.get("lower_bound"))
    HV = g.shape[2]
    k = k.repeat_interleave(HV // k.shape[2], 2).flatten(0, 1)
    read = (k.unsqueeze(-2) @ (g.flatten(0, 1).exp().unsqueeze(-1) * h)).squeeze(-2)
    return [h[a:b] for a, b in bounds], (x["v"].double().flatten(0, 1) - read).view(x["v"].shape)


CASES = {
    "fixed": ("slow", 600, {"B": 2}),
    "grouped heads": ("slow", 150, {"H": 1, "HV": 3, "initial_state": True}),
    "states as [V, K]": ("memory", 150, {"state_v_first": True}),
    "packed": ("slow", 150, {"lengths": (70, 0, 1, 64, 15), "initial_state": True}),
    "packed, long": ("steep", 1100, {"lengths": (513, 0, 512, 75), "H": 1}),
    "masks": ("masked", 150, {}),
    "unbounded gates": ("mixed", 150, {"initial_state": True}),
}


@pytest.mark.parametrize("dense", [False, True], ids=["default", "disable_recompute"])
@pytest.mark.parametrize("case", CASES)
def test_saved_states_and_residuals_are_those_of_the_recurrence(saving, case, dense):
    family, T, recipe = CASES[case]
    x = make_inputs(family, T, K=16, V=8, **recipe).arguments
    spacing = 64 if dense else 512
    want, residual = exact(x)
    x["v"].requires_grad_()
    with record_calls() as calls:
        step(x, disable_recompute=dense)
    assert ran(calls) == [("saving", "chunk_fwd"), ("saving", "chunk_bwd")]
    ((shape, states, found, _),) = saving.given
    assert (
        states.dtype == (BF16 if dense else torch.float32) and tuple(states.shape) == shape.saved_states_shape
    )
    slots = saved_slots(shape, [len(h) for h in want])
    for h, own in zip(want, slots, strict=True):
        assert len(own) == -(-len(h) // spacing)
        for i, slot in enumerate(own):
            torch.testing.assert_close(
                states[slot].double(), h[i * spacing], rtol=2**-8 if dense else 1e-4, atol=1e-5
            )
    used = torch.zeros(len(states), dtype=torch.bool)
    used[[slot for own in slots for slot in own]] = True
    assert states[~used].isnan().all(), "a slot that belongs to no chunk was written"
    if dense:
        assert found.dtype == BF16
        torch.testing.assert_close(found.double(), residual, rtol=2**-8, atol=1e-5)
    else:
        assert found is None


@pytest.mark.parametrize("more", [{"pin": True}, {"use_graph": True}], ids=["pin", "use_graph"])
def test_other_modes_save_the_same_values(saving, more):
    packed = {"cu_seqlens": torch.tensor([0, 70, 70, 71, 150])}
    step(small(**packed), disable_recompute=True)
    step(small(**packed), disable_recompute=True, **more)
    (_, want, R, _), (_, states, R2, _) = saving.given
    torch.testing.assert_close(states, want, equal_nan=True)
    torch.testing.assert_close(R2, R)


@given(st.lists(st.integers(0, 1500), min_size=1, max_size=9), st.booleans(), st.booleans())
def test_slots_are_distinct_and_within_the_saved_states(lengths, packed, dense):
    if not packed:
        lengths = [lengths[0]] * len(lengths)
    tokens, N = (1, sum(lengths)) if packed else (len(lengths), lengths[0]), len(lengths)
    meta = {n: torch.empty(*tokens, *end, device="meta") for n, end in (
        ("q", (1, 2)), ("k", (1, 2)), ("v", (1, 2)), ("g", (1, 2)), ("beta", (1,)),
    )}  # fmt: skip
    cu = torch.empty(N + 1, dtype=torch.int32, device="meta") if packed else None
    shape = explain(**meta, cu_seqlens=cu, disable_recompute=dense).shape
    slots = saved_slots(shape, lengths)
    assert [len(own) for own in slots] == [-(-n // shape.saved_spacing) for n in lengths]
    every = [slot for own in slots for slot in own]
    assert len(set(every)) == len(every) and all(0 <= slot < shape.saved_states_shape[0] for slot in every)
    if packed:
        starts = list(accumulate(lengths, initial=0))
        assert [own.start for own in slots] == [starts[n] // shape.saved_spacing + n for n in range(N)]


# ---- who saves, and who reads


def kept_bytes(x, **more):
    """Returns the bytes that autograd keeps for the backward besides the inputs."""
    inputs = {t.data_ptr() for t in x.values()}
    kept = {}

    def pack(t):
        if t.data_ptr() not in inputs:
            kept[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        chunk_kda(**x, **more)
    return sum(kept.values())


@pytest.mark.parametrize("dense", [False, True], ids=["default", "disable_recompute"])
def test_a_training_call_keeps_what_explain_says(saving, dense):
    x = small(T=1024, disable_recompute=dense)
    options = {"disable_recompute": x.pop("disable_recompute")}
    number = 8  # the number of what served it
    per_token = 2 * (8 * 8 / 64 + 8) if dense else 4 * 8 * 8 / 512
    found = explain(**x, **options)
    assert found.saved_bytes == per_token * 2 * 1024
    assert f"backward  saving, saved {found.saved_bytes} bytes" in str(found)
    assert kept_bytes(x, **options) == found.saved_bytes + number
    assert explain(**call(dtype=BF16), **options).saved_bytes == 0, "no input requires grad"


def test_the_reference_alone_saves_nothing():
    x = small(T=1024)
    with record_calls() as calls:
        assert explain(**x, disable_recompute=True).saved_bytes == 0
        assert kept_bytes(x, disable_recompute=True) == 8
    assert ran(calls) == [("reference", "chunk_fwd")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_only_16_bit_calls_save_states(saving, dtype):
    x = call(T=100, dtype=dtype)
    x["v"].requires_grad_()
    step(x)
    assert [forward[1] for forward in saving.forwards] == [dtype == torch.float16]
    assert (saving.given[0][1] is not None) == (dtype == torch.float16)


def test_inference_saves_nothing(saving):
    with torch.no_grad():
        chunk_kda(**small())
    with torch.inference_mode():
        chunk_kda(**small())
    assert [forward[1] for forward in saving.forwards] == [False, False]


def test_a_call_without_tokens_has_nothing_saved(saving):
    state = torch.ones(1, 2, 8, 8)
    _, grads = step(small(T=0, grad=("v", "initial_state"), initial_state=state))
    assert grads[0].shape == (1, 0, 2, 8) and torch.equal(grads[1], state)
    assert saving.given[0][1] is None


OLD = SAVING.replace(
    "gradients, workspace, saved_states=None, residual=None", "gradients, workspace"
).replace("saved_states, residual, names", "None, None, names")


def test_a_backend_of_abi_2_1_gets_neither_saved_states_nor_missing_gradients(install):
    install("old", backend=OLD, priority=1, abi=(2, 1), features=EVERY - {"saved_states"})
    import fake_old_backend

    more = {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(16)}
    with record_calls() as calls:
        step(small(**more), disable_recompute=True)
    assert ran(calls) == [("old", "chunk_fwd"), ("old", "chunk_bwd")]
    ((_, _, _, names),) = fake_old_backend.Backend.given
    assert names == ["q", "k", "v", "g", "beta", "A_log", "dt_bias"]


def test_a_backend_that_declares_saved_states_must_take_them(install):
    install("old", backend=OLD)
    (info,) = (i for i in backends() if i.name == "old")
    assert info.status == "broken"
    assert (
        "Backend.chunk_bwd_into has no saved_states, residual, but the spec declares saved_states"
        in info.reason
    )


def test_gradients_of_parameters_that_nobody_needs_are_not_asked_for(saving):
    more = {
        "use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(16),
        "initial_state": torch.zeros(1, 2, 8, 8),
    }  # fmt: skip
    always = ["q", "k", "v", "g", "beta"]
    for grad in ((), ("A_log",), ("dt_bias", "initial_state"), ("q", "A_log", "initial_state")):
        fresh = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in more.items()}
        step(small(grad=(*grad, "v"), **fresh))
        assert saving.given.pop()[3] == always + [n for n in more if n in grad]
    leaf = torch.nn.Parameter(
        torch.zeros(2, dtype=BF16)
    )  # another dtype than that of its gradient in the backend
    step(small(grad=(), use_gate_in_kernel=True, A_log=leaf))
    assert saving.given.pop()[3] == [*always, "A_log"]


def test_saved_states_of_one_backend_serve_the_backward_of_another(install):
    first = install_saving(install, "first", priority=2, features=EVERY - {"backward"})
    second = install_saving(install, "second", priority=1)
    x = small(T=600)
    with record_calls() as calls:
        step(x, disable_recompute=True)
    assert ran(calls) == [("first", "chunk_fwd"), ("second", "chunk_bwd")]
    ((shape, saves),) = first.forwards
    assert saves and not shape.options.needs_backward and not second.forwards
    ((shape, states, R, _),) = second.given
    assert shape.options.needs_backward
    assert (
        torch.equal(states[0], torch.zeros_like(states[0]))
        and not states.isnan().any()
        and not R.isnan().any()
    )


def test_nothing_is_saved_for_a_backward_that_recomputes(install):
    first = install_saving(install, "first", priority=2, features=EVERY - {"backward"})
    with record_calls() as calls:
        step(small(), disable_recompute=True)
    assert ran(calls) == [("first", "chunk_fwd"), ("reference", "chunk_bwd")]
    assert [saves for _, saves in first.forwards] == [False]


@pytest.mark.parametrize("dense", [False, True], ids=["default", "disable_recompute"])
def test_functional_gradients_of_a_batch_save_states(saving, dense):
    x = small(grad=())
    batch = torch.stack([x["v"], 2 * x["v"]])
    loss = lambda v: chunk_kda(**(x | {"v": v}), disable_recompute=dense)[0].float().square().sum()
    want = torch.stack([torch.func.grad(loss)(v) for v in batch])
    with record_calls() as calls:
        assert torch.equal(torch.func.vmap(torch.func.grad(loss))(batch), want)
    assert ran(calls) == 2 * [("saving", "chunk_fwd")] + 2 * [("saving", "chunk_bwd")]
    for one, of_batch in zip(saving.given[:2], saving.given[2:], strict=True):
        assert torch.equal(one[1], of_batch[1]) and (one[2] is None) == (of_batch[2] is None) == (not dense)


# ---- compiled graphs


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dense", [False, True], ids=["default", "disable_recompute"])
def test_a_compiled_step_saves_the_same_and_has_the_bits_of_eager_mode(saving, dense, dynamic):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda **x: chunk_kda(**x, output_final_state=True, disable_recompute=dense),
        fullgraph=True, backend=counter, dynamic=dynamic,
    )  # fmt: skip
    lengths = (600, 700, 1100) if dynamic else (600,)  # torch compiles again for a dimension of size 1
    for T in lengths:
        results = []
        for function in (None, compiled):
            x = small(T=T, grad=("q", "v", "beta"))
            if function is None:
                o, grads = step(x, disable_recompute=dense)
            else:
                o, state = function(**x)
                leaves = [x[n] for n in ("q", "v", "beta")]
                grads = torch.autograd.grad(o.float().square().sum() + state.sum(), leaves)
            results.append((o, *grads))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        eager, traced = saving.given[-2:]
        assert torch.equal(eager[1], traced[1]) and eager[1].shape[0] == math.ceil(T / (64 if dense else 512))
        assert eager[0] == traced[0] and eager[3] == traced[3]
    assert counter.frame_count == 1


def test_a_graph_that_another_backend_executes_reads_nothing_unsaved(saving, install):
    x = small()
    compiled = torch.compile(lambda **x: chunk_kda(**x)[0], fullgraph=True, backend="aot_eager")
    (want,) = torch.autograd.grad(compiled(**x).sum(), x["v"])
    assert saving.given.pop()[1] is not None
    install("other", backend=OLD, features=EVERY - {"saved_states"}, priority=-1)
    for name in ("reference", "other"):
        with record_calls() as calls:
            with use_backend(name):
                o = compiled(**x)
            assert torch.equal(*torch.autograd.grad(o.sum(), x["v"]), want)
        assert ran(calls) == [(name, "chunk_fwd"), (name, "chunk_bwd")]
    import fake_other_backend

    assert [saves for _, saves in fake_other_backend.Backend.forwards] == [False]


def test_a_graph_that_was_traced_without_saved_states_recomputes(saving):
    x = small()
    compiled = torch.compile(lambda **x: chunk_kda(**x)[0], fullgraph=True, backend="aot_eager")
    with use_backend("reference"):
        compiled(**x).sum().backward()
    compiled(**x).sum().backward()
    assert saving.forwards[-1][1] is False and saving.given[-1][1] is None


@pytest.mark.parametrize(
    ("named", "packed", "dense"),
    [(False, False, False), (False, True, True), (True, True, False)],
    ids=["default", "packed-disable_recompute", "named-packed"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.15's own
def test_opcheck_of_both_operators(saving, named, packed, dense):
    cu = torch.tensor([0, 3, 70]) if packed else None
    args = checked(Arguments(
        **small(T=70), cu_seqlens=cu, output_final_state=True, disable_recompute=dense,
        backend="saving" if named else None, context_parallel="off",
    ))._replace(saves=True)  # fmt: skip
    forward = torch.ops.kda_core.chunk_fwd.default
    with torch.no_grad():
        o, state, *saved = forward(*args)
    assert saved[1].numel() > 0 and (saved[2].numel() > 0) == dense
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    for operator, values in (
        (forward, args),
        (torch.ops.kda_core.chunk_bwd.default, (o, state, *saved, "q v", *args._replace(v=args.v.detach()))),
    ):
        results = torch.library.opcheck(operator, tuple(values), test_utils=tests)
        assert set(results.values()) == {"SUCCESS"}
