"""Cached calls, and calls that skip the dispatcher: neither changes a result or an error."""

import gc
import random
import threading
import tracemalloc
import weakref

import pytest
import torch
from helpers.bad_arguments import CASES
from helpers.bad_arguments import X as GOOD  # some cases contain its tensors
from helpers.fake_plugins import install_planner
from helpers.inputs import call, replaced
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kda_core.call
from kda_core import chunk_kda, explain, fused_recurrent_kda, ops, use_backend
from kda_core.arguments import Arguments, checked
from kda_core.errors import (
    ArgumentError,
    BackendNotFoundError,
    KdaError,
    NoEligibleBackendError,
    ShapeError,
)
from kda_core.recent import Recent
from kda_core.registry import REGISTRY, record_calls
from kda_core.validate import problem_shape

X = call()
OPERATORS = {"kda_core.chunk_fwd.default", "kda_core.chunk_fwd_out.default"}


class Seen(TorchDispatchMode):
    """Collects the names of this project's operators that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) in OPERATORS:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _empty_caches():
    kda_core.backends(refresh=True)


@pytest.fixture
def made(monkeypatch):
    """A list of the shapes of the calls that were resolved."""
    shapes = []
    original = kda_core.call.of_shape
    monkeypatch.setattr(
        kda_core.call, "of_shape", lambda shape, *a: shapes.append(shape) or original(shape, *a)
    )
    return shapes


def ran(**kwargs):
    with record_calls() as calls:
        chunk_kda(**replaced(X, **kwargs))
    (only,) = calls
    return only.backend


def through_the_operator(function, *args, **kwargs):
    with Seen() as seen:
        result = function(*args, **kwargs)
    assert len(seen.names) == 1, seen.names
    return result


def same(a, b):
    return len(a) == len(b) and all(x is y is None or torch.equal(x, y) for x, y in zip(a, b))


# ---- cached calls


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"output_final_state": True, "return_intermediate_states": True},
        {"initial_state": torch.ones(1, 2, 8, 8), "output_final_state": True},
        {"cu_seqlens": torch.tensor([0, 7, 7, 20]), "output_final_state": True},
        {"use_gate_in_kernel": True, "A_log": torch.nn.Parameter(torch.zeros(2)), "dt_bias": torch.zeros(16)},
    ],
    ids=["plain", "outputs", "state", "packed", "gate"],
)
def test_cached_calls_return_the_results_of_the_operator(more, made):
    with torch.no_grad():
        want = through_the_operator(chunk_kda, **X, **more)
        for _ in range(3):
            got = chunk_kda(**X, **more)
            assert same(got, want) and not any(t is not None and t.requires_grad for t in got)
    assert len(made) == 1, "the operator's kernel and the direct call share the cache"


def test_calls_of_equal_shape_share_one_shape_object(made):
    for more in ({}, {"context_parallel": "off"}, {"backend": "reference"}, {"scale": 8**-0.5}):
        chunk_kda(**X, **more)
    assert len(made) == 4 and len(set(map(id, made))) == 1


@pytest.fixture
def validated(monkeypatch):
    """A list of the shapes that all checks of metadata returned."""
    shapes = []
    monkeypatch.setattr(kda_core.call, "SHAPES", Recent(100))
    original = Arguments.shape
    monkeypatch.setattr(Arguments, "shape", lambda args: shapes.append(original(args)) or shapes[-1])
    return shapes


STATES = {"initial_state": torch.ones(1, 2, 8, 8), "output_final_state": True}


@pytest.mark.parametrize("more", [{}, STATES, {"cu_seqlens": None}], ids=["plain", "states", "packed"])
def test_calls_that_differ_only_in_their_tokens_are_validated_once(more, made, validated):
    for n, T in enumerate((20, 21, 300, 1, 7), start=1):
        x = call(T=T) | more
        if "cu_seqlens" in more:
            x["cu_seqlens"] = torch.tensor([0, T // 2, T])
        chunk_kda(**x)
        args = checked(Arguments(**x))
        want = problem_shape(*args.tensors, options=args.options)
        assert made[-1] == want and hash(made[-1]) == hash(want) and made[-1].T == T
        assert len(made) == n and len(validated) == 1


OTHER_METADATA = {
    "another batch": lambda: call(B=2, T=33),
    "more heads": lambda: call(T=33) | {"v": torch.randn(1, 33, 4, 8), "g": -torch.ones(1, 33, 4, 8), "beta": torch.ones(1, 33, 4)},
    "a dtype": lambda: call(T=33) | {"beta": torch.ones(1, 33, 2).bfloat16()},
    "an option": lambda: call(T=33) | {"scale": 0.5},
    "packed": lambda: call(T=33) | {"cu_seqlens": torch.tensor([0, 33])},
    "states": lambda: call(T=33) | STATES,
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_METADATA)
def test_calls_that_differ_in_more_are_validated_anew(case, made, validated):
    chunk_kda(**X)
    x = OTHER_METADATA[case]()
    chunk_kda(**x)
    assert len(validated) == 2 and made[-1] == validated[-1] and made[-1].T == 33


@pytest.mark.parametrize("name", ("q", "k", "v", "g", "beta"))
def test_another_number_of_tokens_in_one_tensor_is_refused(name, validated):
    chunk_kda(**X)
    for T in (20, 40):
        with pytest.raises(ShapeError):
            chunk_kda(**call(T=T) | {name: call(T=T + 1)[name]})
    with pytest.raises(ShapeError, match="number of sequences|cu_seqlens|initial_state"):
        chunk_kda(**call(T=40) | STATES | {"initial_state": torch.ones(2, 2, 8, 8)})
    assert len(validated) == 1


def test_inputs_that_require_grad_are_other_calls(made, validated):
    chunk_kda(**X)
    x = call(T=33)
    x["v"].requires_grad_()
    assert chunk_kda(**x)[0].requires_grad and made[-1].options.needs_backward
    with torch.no_grad():
        chunk_kda(**call(T=34) | {"v": call(T=34)["v"].requires_grad_()})
    assert not made[-1].options.needs_backward


def test_recurrent_calls_are_cached(made):
    want = through_the_operator(fused_recurrent_kda, **X, output_final_state=True)
    assert same(fused_recurrent_kda(**X, output_final_state=True), want)
    assert same(fused_recurrent_kda(**X, output_final_state=True), want)
    assert len(made) == 1 and made[0].options.recurrent
    chunk_kda(**X, output_final_state=True)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("changes", "kind", "argument", "words"),
    CASES,
    ids=lambda c: "-".join(c) if isinstance(c, dict) else None,
)
def test_invalid_input_is_refused_after_a_valid_call_each_time(changes, kind, argument, words):
    packed = {"cu_seqlens": torch.tensor([0, 20])}
    for good in ({}, packed, packed | {"cu_seqlens_cpu": packed["cu_seqlens"]}):
        chunk_kda(**GOOD, **good)
    for _ in range(2):
        with pytest.raises(kind) as caught:
            chunk_kda(**(GOOD | changes))
        assert str(caught.value).startswith(f"{argument}: expected ") and words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "kind", "argument", "words"),
    CASES,
    ids=lambda c: "-".join(c) if isinstance(c, dict) else None,
)
def test_invalid_input_is_refused_after_a_valid_call_of_another_length(
    changes, kind, argument, words, monkeypatch
):
    monkeypatch.setattr(kda_core.call, "CALLS", Recent(100))
    monkeypatch.setattr(kda_core.call, "SHAPES", Recent(100))
    for more in ({}, {"cu_seqlens": torch.tensor([0, 21])}):
        chunk_kda(**call(T=21), **more)
    with pytest.raises(kind) as caught:
        chunk_kda(**(GOOD | changes))
    assert str(caught.value).startswith(f"{argument}: expected ") and words in str(caught.value)


def test_equal_values_of_another_type_miss_the_cache():
    chunk_kda(**X, output_final_state=True, chunk_size=64)
    for bad in ({"output_final_state": 1}, {"output_final_state": True, "chunk_size": 64.0}, {"scale": True}):
        with pytest.raises(KdaError):
            chunk_kda(**X, **bad)
    assert same(chunk_kda(**X, scale=1), chunk_kda(**X, scale=1.0))


def test_contents_are_checked_in_every_call():
    cu = torch.tensor([0, 5, 20])
    for bounds, chunks in ((cu, 2), (torch.tensor([0, 10, 20]), 2)):
        h = chunk_kda(**X, cu_seqlens=bounds, return_intermediate_states=True)[2]
        assert h.shape[1] == chunks
    long = call(T=130)
    for bounds, chunks in ((torch.tensor([0, 65, 130]), 4), (torch.tensor([0, 64, 130]), 3)):
        h = chunk_kda(**long, cu_seqlens=bounds, return_intermediate_states=True)[2]
        assert h.shape[1] == chunks
    cu[1] = 30
    with pytest.raises(ArgumentError, match="30 before 20"):
        chunk_kda(**X, cu_seqlens=cu)
    with pytest.raises(ArgumentError, match="30 before 20"):
        chunk_kda(**X, cu_seqlens=torch.tensor([0, 5, 20]), cu_seqlens_cpu=cu)


def test_addresses_and_strides_are_checked_in_every_call(made):
    want = chunk_kda(**X)[0]
    shifted = torch.empty(X["q"].numel() + 1)[1:].view_as(X["q"]).copy_(X["q"])
    strided = torch.empty(*X["q"].shape, 2)[..., 0].copy_(X["q"])
    negative = torch.complex(torch.zeros_like(X["q"]), -X["q"]).conj().imag
    assert shifted.data_ptr() % 16 and not strided.is_contiguous() and negative.is_neg()
    for q in (shifted, strided, negative):
        assert torch.equal(chunk_kda(**replaced(X, q=q))[0], want)
    zeros = torch._efficientzerotensor(
        X["v"].shape
    )  # as some tangents: without memory until they are first read
    assert not chunk_kda(**replaced(X, v=zeros))[0].any()
    out = torch.empty_like(want)
    assert chunk_kda(**X, out=out)[0] is out and torch.equal(out, want)
    for bad, words in (
        (X["v"], "shared with v"),
        (torch.empty(out.numel() + 1)[1:].view_as(out), "multiple of 16"),
        (torch.empty(1, 20, 8, 2).mT, "contiguous"),
    ):
        with pytest.raises(KdaError, match=words):
            chunk_kda(**X, out=bad)
    assert len(made) == 1


def test_one_of_two_outputs_may_be_given():
    want = chunk_kda(**X, output_final_state=True)
    state = torch.empty_like(want[1])
    o, got = chunk_kda(**X, output_final_state=True, out=(None, state))
    assert got is state and same((o, got), want)
    with pytest.raises(ArgumentError, match="out\\[1\\].*shared with initial_state"):
        chunk_kda(**X, initial_state=state, output_final_state=True, out=(None, state))


# ---- rules of choice


def test_another_rule_of_choice_misses_the_cache(install, monkeypatch):
    install("alpha", priority=1)
    install("beta", priority=0)
    for _ in range(2):
        assert ran() == "alpha"
        with use_backend("beta"):
            assert ran() == "beta"
            assert ran(backend="reference") == "reference"
        assert ran() == "alpha"
        monkeypatch.setenv("KDA_BACKEND", "beta")
        assert ran() == "beta"
        monkeypatch.setenv("KDA_BACKEND", "absent")
        with pytest.raises(BackendNotFoundError):
            ran()
        monkeypatch.delenv("KDA_BACKEND")
        monkeypatch.setenv("KDA_CP", "maybe")
        with pytest.raises(ArgumentError, match="KDA_CP"):
            ran()
        assert ran(context_parallel="off") == "alpha"
        monkeypatch.delenv("KDA_CP")


def test_a_new_plugin_serves_calls_that_were_cached(install):
    assert ran() == "reference"
    install("better", priority=1)
    assert ran() == "better"
    install("best", priority=2)
    assert ran() == "best"


def test_a_call_that_started_before_a_refresh_is_not_cached(install, monkeypatch):
    original = kda_core.call.of_shape

    def slow(*args):
        plan = original(*args)
        install("late", priority=1)
        return plan

    monkeypatch.setattr(kda_core.call, "of_shape", slow)
    assert ran() == "reference"
    monkeypatch.setattr(kda_core.call, "of_shape", original)
    assert ran() == "late"


def test_a_call_is_not_cached_if_the_environment_changed_meanwhile(install, monkeypatch):
    install("alpha")
    original = REGISTRY.resolve

    def late(*args):
        monkeypatch.setenv("KDA_BACKEND", "reference")
        return original(*args)

    monkeypatch.setattr(REGISTRY, "resolve", late)
    assert ran() == "reference"
    monkeypatch.setattr(REGISTRY, "resolve", original)
    monkeypatch.delenv("KDA_BACKEND")
    assert ran() == "alpha"


def test_failures_are_not_cached(install, monkeypatch):
    monkeypatch.setenv("KDA_BACKEND", "moody")
    install(
        "moody",
        backend="from kda_core.reference import ReferenceBackend\n"
        "class Backend(ReferenceBackend):\n    reason = 'not today'\n    def can_run(self, shape):\n        return self.reason\n",
    )
    import fake_moody_backend

    for _ in range(2):
        with pytest.raises(NoEligibleBackendError, match="not today"):
            chunk_kda(**X)
    monkeypatch.setattr(fake_moody_backend.Backend, "reason", None)
    assert ran() == "moody"


# ---- the cache


def test_the_cache_is_bounded_and_holds_no_tensor(monkeypatch):
    monkeypatch.setattr(kda_core.call, "CALLS", Recent(4))
    for T in range(1, 12):
        x = call(T=T)
        chunk_kda(**x)
        assert 1 <= len(kda_core.call.CALLS) <= 4
    alive = [weakref.ref(t) for t in x.values()]
    del x
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_frequent_calls_stay_in_the_cache(monkeypatch, made):
    monkeypatch.setattr(kda_core.call, "CALLS", Recent(4))
    for T in range(1, 20):
        chunk_kda(**X)
        chunk_kda(**call(T=T + 100))
    assert len(made) == 20, "one entry for each shape"


def test_new_lengths_in_every_call_take_bounded_memory(install, monkeypatch):
    install_planner(install)
    from fake_halves_backend import Halves

    monkeypatch.setattr(Halves, "plan", lambda self, inputs, spec, backend: None)

    monkeypatch.setattr(kda_core.call.ANSWERS, "limit", 2 << 20)  # not 16 MiB, to save time
    install(
        "idle",
        priority=1,
        backend="from kda_core.reference import ReferenceBackend\n"
        "class Backend(ReferenceBackend):\n    def chunk_fwd(self, inputs, outputs):\n        return outputs\n",
    )
    T, rng = 1 << 20, random.Random(0)
    x = call(T=T, H=1, HV=1, K=1, V=1)
    tracemalloc.start()
    try:
        with record_calls() as calls:
            for _ in range(200):
                bounds = sorted(rng.choices(range(T), k=rng.randint(900, 1000)))
                chunk_kda(**x, cu_seqlens=torch.tensor([0, *bounds, T]))
                assert [c.backend for c in calls] == ["idle"]
                calls.clear()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4 << 20  # all of them would take 7 MiB


def test_a_cache_keeps_the_last_used_entries_within_its_limit():
    cache = Recent(10, weigh=lambda key, value: value)
    for key in range(100):
        cache.put(key, 1)
        cache.put("often", 1)
        assert cache.get("often") == cache.get(key) == 1 and len(cache) <= 10
    cache.put("heavy", 6)
    assert cache.get("heavy") is None and cache.get(99) == 1
    cache.put("half", 5)
    assert cache.get("half") == 5 and cache.get("often") == 1
    with pytest.raises(TypeError):
        cache.get([])


def test_threads_share_the_cache(install):
    install("alpha", priority=1)
    names, wrong = ("alpha", "reference"), []
    inputs = [call(T=T) for T in range(1, 7)]
    want = [chunk_kda(**x)[0] for x in inputs]

    def work(i):
        with use_backend(names[i % 2]):
            for _ in range(20):
                for x, o in zip(inputs, want):
                    if not torch.equal(chunk_kda(**x)[0], o):
                        wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    with record_calls() as calls:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong
    assert sorted(c.backend for c in calls) == ["alpha"] * 360 + ["reference"] * 360


# ---- calls that go through the operator


@pytest.fixture
def direct(monkeypatch):
    """Counts the calls that skip the dispatcher."""
    calls = []
    original = ops.run_directly
    monkeypatch.setattr(ops, "run_directly", lambda *a: calls.append(1) or original(*a))
    chunk_kda(**X)
    assert len(calls) == 1
    calls.clear()
    return calls


def test_calls_with_gradients_go_through_the_operator(direct):
    x = call()
    x["v"].requires_grad_()
    chunk_kda(**X)
    direct.clear()
    with record_calls() as calls:
        o, _ = chunk_kda(**x)
        assert o.grad_fn.name() == "ChunkKdaBackward"
        o.sum().backward()
    assert [c.entry for c in calls] == ["chunk_fwd", "chunk_bwd"] and not direct
    with pytest.raises(ArgumentError, match="^out: "):
        chunk_kda(**x, out=torch.empty_like(x["v"]))
    with torch.no_grad():
        assert not chunk_kda(**x)[0].requires_grad
    assert len(direct) == 1


def test_modes_see_the_operator(direct):
    class Functions(TorchFunctionMode):
        names = ()

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names += (str(func),)
            return func(*args, **(kwargs or {}))

    o = torch.empty_like(X["v"])
    with Seen() as seen:
        chunk_kda(**X)
        chunk_kda(**X, out=o)
    assert seen.names == ["kda_core.chunk_fwd.default", "kda_core.chunk_fwd_out.default"]
    with Functions() as functions:
        chunk_kda(**X)
    assert any("chunk_fwd" in name for name in functions.names)
    assert not direct


def test_tracers_record_the_operator(direct):
    from torch.fx.experimental.proxy_tensor import make_fx

    f = lambda *x: chunk_kda(*x)[0]
    graph = make_fx(f)(*X.values())
    assert any("chunk_fwd" in str(n.target) for n in graph.graph.nodes)
    assert torch.equal(graph(*X.values()), chunk_kda(**X)[0])
    direct.clear()
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*X.values()), graph(*X.values()))
    assert not direct


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")  # a DeprecationWarning, of torch 2.15 a FutureWarning
def test_jit_tracing_records_the_operator(direct):
    traced = torch.jit.trace(lambda *x: chunk_kda(*x)[0], tuple(X.values()), check_trace=False)
    assert "kda_core::chunk_fwd" in str(traced.graph) and not direct


def test_fake_tensors_run_nothing(direct):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode, record_calls() as calls:
        fake = {n: mode.from_tensor(t) for n, t in X.items()}
        o, _ = chunk_kda(**fake)
    assert o.shape == X["v"].shape and not calls and not direct
    o, _ = chunk_kda(**{n: t.to("meta") for n, t in X.items()})
    assert o.device.type == "meta" and o.shape == X["v"].shape


def test_transforms_see_the_operator(direct):
    other = call(seed=1)
    batch = [torch.stack([X[n], other[n]]) for n in X]
    o = torch.func.vmap(lambda *x: chunk_kda(*x)[0])(*batch)
    assert not direct
    assert torch.equal(o, torch.stack([chunk_kda(**X)[0], chunk_kda(**other)[0]]))


def test_explain_does_not_depend_on_the_cache():
    before = explain(**X, output_final_state=True)
    chunk_kda(**X, output_final_state=True)
    chunk_kda(**X, output_final_state=True)
    assert explain(**X, output_final_state=True) == before
