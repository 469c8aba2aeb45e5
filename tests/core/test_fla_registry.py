"""`kda_core.integrations.fla` with a fake FLA: what is accepted, the reasons of refusals, and that no call loops.

`tests/integrations/fla` repeats the main cases with FLA itself.
"""

import importlib
import inspect
import logging
import sys

import pytest
import torch
from helpers.fake_fla import HERE, fla_on_the_cpu, only_fla_in
from helpers.fla_contexts import fake_context
from helpers.inputs import call

import kda_core
from kda_core import chunk_kda
from kda_core.registry import record_calls
from kda_core.testing import token_oracle

MODULE = "kda_core.integrations.fla"
PASSED_ON = "through FLA's choice of an implementation; refused by kda_core: "


def imported():
    """Imports the integration, into the fake FLA that is on sys.path."""
    sys.modules.pop(MODULE, None)
    return importlib.import_module(MODULE)


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """The tests neither see nor change what other tests of the process have imported."""
    monkeypatch.delenv("FLA_KDA_CORE", raising=False)
    kept = sys.modules.get(MODULE)
    yield
    sys.modules.pop(MODULE, None)
    if kept is not None:
        sys.modules[MODULE] = kept


@pytest.fixture
def ours():
    """The integration in a new fake FLA."""
    with only_fla_in(HERE):
        yield imported()


@pytest.fixture
def prefill(ours):
    return importlib.import_module("fla.ops.kda").chunk_kda


@pytest.fixture
def decode(ours):
    """FLA's inner function, with the arguments that its public one always passes."""
    inner = importlib.import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
    return lambda **x: inner(**{"inplace_final_state": False, "scale": 0.5} | x)


def served(function, backend="reference", *entries, **x):
    with record_calls() as calls:
        found = function(**x)
    assert [(c.backend, c.entry) for c in calls] == [(backend, entry) for entry in entries]
    return found


# ---- served


def test_flas_functions_ask_kda_core_after_the_import(ours):
    assert ours.undispatched() == ()


def test_prefill_is_that_of_kda_core(prefill):
    x = call() | {"initial_state": torch.randn(1, 2, 8, 8)}
    o, state = served(prefill, "reference", "chunk_fwd", **x, output_final_state=True)
    wanted = chunk_kda(**x, output_final_state=True)
    assert torch.equal(o, wanted[0]) and torch.equal(state, wanted[1])
    *inputs, initial = x.values()
    assert torch.equal(prefill(*inputs, None, initial, True)[1], state)


def test_a_training_call_has_gradients(prefill):
    x = call()
    q = x["q"].clone().requires_grad_()
    o, _ = served(prefill, "reference", "chunk_fwd", **x | {"q": q})
    (found,) = torch.autograd.grad(o.sum(), q)
    exact = x["q"].double().requires_grad_()
    (wanted,) = torch.autograd.grad(token_oracle(**x | {"q": exact})[0].sum(), exact)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("v_first", [False, True])
def test_decoding_takes_flas_order_of_arguments(decode, v_first):
    """`initial_state` comes before `scale` in FLA's inner function, and after it in the public ones."""
    x = call(T=1)
    inner = importlib.import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
    state = torch.randn(1, 2, 8, 8)
    with record_calls() as calls:
        o, final = inner(*x.values(), None, None, state, 0.5, True, False, v_first)
    assert [c.entry for c in calls] == ["recurrent_fwd"]
    wanted = kda_core.fused_recurrent_kda(
        **x, scale=0.5, initial_state=state, output_final_state=True, state_v_first=v_first
    )
    assert torch.equal(o, wanted[0]) and torch.equal(final, wanted[1])


def test_decoding_writes_to_the_tensor_of_the_caller(decode):
    x = call(T=3)
    out = torch.full_like(x["v"], torch.nan)
    o, state = served(decode, "reference", "recurrent_fwd", **x, out=out)
    assert o is out and state is None
    torch.testing.assert_close(o.double(), token_oracle(**x, scale=0.5)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [1, 2])
def test_a_pool_has_a_state_for_every_token(decode, T):
    x = call(B=2, T=T)
    pool = torch.randn(6, 2, 8, 8)
    before, slots = pool.clone(), torch.tensor([[1, 3], [5, 0]])
    given = {"initial_state": pool, "ssm_state_indices": slots, "inplace_final_state": True}
    o, state = decode(**x, **given)
    assert state is pool
    wanted, final = token_oracle(**x, scale=0.5, initial_state=before[slots[:, 0]])
    torch.testing.assert_close(o.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pool[slots[:, T - 1]].double(), final, rtol=1e-4, atol=1e-5)
    assert torch.equal(pool[[2, 4]], before[[2, 4]])


def test_decoding_with_gradients_becomes_prefill(decode):
    x = call(T=3)
    q = x["q"].clone().requires_grad_()
    o, _ = served(decode, "reference", "chunk_fwd", **x | {"q": q})
    assert o.requires_grad


# ---- refused


def refuses(function, *words, **x):
    with record_calls() as calls, pytest.raises(AssertionError) as caught:
        function(**x)
    assert not calls and PASSED_ON in str(caught.value)
    for word in words:
        assert word in str(caught.value)


PREFILL_REFUSALS = {
    "unknown": ({"head_first": False}, "the keyword 'head_first', which kda-core does not know"),
    "an argument of kda-core alone": ({"pin": True}, "'pin'"),
    "gate": ({"A_log": torch.zeros(2)}, "A_log: expected"),
    "bound": ({"lower_bound": -5.0}, "lower_bound: expected"),
    "shape": ({"beta": torch.rand(1, 20, 2, 8)}, "ShapeError: beta"),
    "dtype of a state": ({"initial_state": torch.zeros(1, 2, 8, 8).bfloat16()}, "DtypeError: initial_state"),
    "not a tensor": ({"beta": 0.5}, "'float' object has no attribute"),
    "padding": ({"cu_seqlens": torch.tensor([0, 7, 19])}, "cu_seqlens: expected a last value of T=20"),
    "both layouts": (
        {"state_v_first": True, "transpose_state_layout": True},
        "the old name of state_v_first",
    ),
    "intermediate states": (
        {"return_intermediate_states": True},
        "the intermediate states of kda-core are bf16",
    ),
    "graph": ({"use_graph": True}, "use_graph: expected"),
    "no group": ({"cp_context": object()}, "cp_context"),
}


@pytest.mark.parametrize("name", PREFILL_REFUSALS)
def test_prefill_is_refused_with_a_reason(prefill, name):
    changes, words = PREFILL_REFUSALS[name]
    for _ in range(2):  # the second time from the cache
        refuses(prefill, words, **call() | changes)


POOL = {"initial_state": torch.zeros(4, 2, 8, 8), "inplace_final_state": True}
DECODE_REFUSALS = {
    "unknown": ({"backend": "reference"}, "the keyword 'backend'"),
    "in place without slots": (
        {"inplace_final_state": True},
        "inplace_final_state without ssm_state_indices",
    ),
    "accepted without slots": ({"num_accepted_tokens": torch.ones(1).int()}, "num_accepted_tokens without"),
    "a state for every token, apart": (
        POOL | {"ssm_state_indices": torch.zeros(1).int(), "inplace_final_state": False},
        "ssm_state_indices without inplace_final_state",
    ),
    "slots of others": (POOL | {"ssm_state_indices": torch.zeros(1).int()}, "[N] with more than one token"),
    "too few slots": (POOL | {"ssm_state_indices": torch.zeros(1, 2).int()}, "ShapeError: ssm_state_indices"),
    "dtype of slots": (POOL | {"ssm_state_indices": torch.zeros(1, 20)}, "DtypeError: ssm_state_indices"),
    "out": ({"out": torch.empty(1, 20, 2, 8).double()}, "DtypeError: out"),
    "strides of out": ({"out": torch.empty(1, 2, 20, 8).transpose(1, 2)}, "StrideError: out"),
    "headwise beta": ({"beta": torch.rand(1, 20, 2, 8)}, "ShapeError: beta"),
}


@pytest.mark.parametrize("name", DECODE_REFUSALS)
def test_decoding_is_refused_with_a_reason(decode, name):
    changes, words = DECODE_REFUSALS[name]
    for _ in range(2):
        refuses(decode, words, **call() | changes)


def test_gradients_are_refused_where_they_cannot_be(decode):
    x = call(T=1)
    x["q"].requires_grad_()
    refuses(decode, "out with inputs that require grad", **x, out=torch.empty_like(x["v"]))
    refuses(decode, "a pool has no gradients", **x, **POOL, ssm_state_indices=torch.zeros(1).int())


def test_out_that_shares_memory_with_an_input_is_refused(decode):
    x = call(T=1)
    refuses(decode, "(o): expected memory of its own, not shared with v", **x, out=x["v"])


def test_a_training_call_is_refused_unless_a_backend_has_a_backward(prefill, install, monkeypatch):
    install("forward", archs={"cpu"}, features={"unbounded_gate"})
    monkeypatch.setenv("KDA_BACKEND", "forward")
    x = call()
    x["q"].requires_grad_()
    refuses(
        prefill, "unsupported: backward", "without gradients (torch.no_grad(), detach()) forward serves", **x
    )


def test_a_context_needs_kda_cp(prefill, ours, monkeypatch):
    monkeypatch.setattr(ours, "_has_kda_cp", lambda: False)
    refuses(prefill, "cp_context needs kda-cp: pip install", **call(), cp_context=object())


def test_a_context_needs_a_backend_that_starts_from_states(prefill, install, monkeypatch):
    x = call()
    context = fake_context((20,), 0, 1, "contiguous")
    features = {"unbounded_gate", "varlen", "final_state"}
    install("stateless", archs={"cpu"}, features=features)
    monkeypatch.setenv("KDA_BACKEND", "stateless")
    refuses(prefill, "the backend 'stateless' has no initial_state", **x, cp_context=context)
    monkeypatch.setenv("KDA_BACKEND", "reference,stateless")
    backend = importlib.import_module(MODULE).KdaCoreBackend()
    assert backend.chunk_kda_verifier(**x, cp_context=context) == (True, None)


def test_reasons_are_logged_once(prefill, caplog):
    with caplog.at_level(logging.INFO, MODULE):
        for changes in ({"head_first": False}, {"head_first": False}, {"lower_bound": -5.0}):
            refuses(prefill, **call() | changes)
    found = [r.getMessage() for r in caplog.records]
    assert len(found) == 2 and all(m.startswith("chunk_kda runs on FLA's kernels: ") for m in found)


@pytest.mark.parametrize("arguments", [(), (None,) * 5, (1, 2), (torch.zeros(2).to_sparse(),) * 5])
def test_a_verifier_never_raises(ours, arguments):
    backend = ours.KdaCoreBackend()
    for name in ("chunk_kda_verifier", "fused_recurrent_kda_fwd_verifier"):
        accepted, reason = getattr(backend, name)(*(arguments or (None,)))
        assert accepted is False and isinstance(reason, str)


def test_a_verifier_launches_nothing_and_asks_once_for_each_shape(ours, monkeypatch):
    from kda_core.registry import REGISTRY

    backend, asked, resolve = ours.KdaCoreBackend(), [], REGISTRY.resolve
    monkeypatch.setattr(REGISTRY, "resolve", lambda *args: asked.append(args) or resolve(*args))
    with record_calls() as calls:
        for changes in ({}, {}, {"dtype": torch.int32}, {"dtype": torch.int32}):
            backend.chunk_kda_verifier(**call(T=21, K=24, **changes))
            backend.fused_recurrent_kda_fwd_verifier(**call(T=21, K=24, **changes), inplace_final_state=False)
    assert not calls and len(asked) == 2


# ---- switches


def test_the_environment_turns_it_off_and_on_at_each_call(prefill, ours, monkeypatch):
    served(prefill, "reference", "chunk_fwd", **call())
    monkeypatch.setenv("FLA_KDA_CORE", "0")
    assert ours.undispatched() == ("chunk_kda", "fused_recurrent_kda_fwd")
    with pytest.raises(AssertionError, match="refused by none"):
        prefill(**call())
    monkeypatch.setenv("FLA_KDA_CORE", "1")
    served(prefill, "reference", "chunk_fwd", **call())


def test_an_fla_that_does_not_ask_is_reported_at_import(monkeypatch, caplog):
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with only_fla_in(HERE):
        assert imported().undispatched() == ("chunk_kda", "fused_recurrent_kda_fwd")
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and record.getMessage() == (
            "FLA does not ask kda-core for chunk_kda and fused_recurrent_kda_fwd: FLA_DISABLE_BACKEND_DISPATCH=1"
        )
        caplog.clear()
        monkeypatch.setenv("FLA_KDA_CORE", "0")  # nobody expects it to ask
        imported()
        assert not caplog.records


def test_another_implementation_that_comes_first_is_reported(caplog):
    with only_fla_in(HERE):
        backends = importlib.import_module("fla.backends")
        prefill = importlib.import_module("fla.ops.kda").chunk_kda

        @backends.register(prefill)
        class First(backends.BaseBackend):
            backend_type, priority = "first", 0
            chunk_kda_verifier = staticmethod(lambda *args, **kwargs: (True, None))
            chunk_kda = staticmethod(lambda *args, **kwargs: "first")

        assert imported().undispatched() == ("chunk_kda",)
        assert caplog.messages == [
            "FLA does not ask kda-core for chunk_kda: another implementation takes every call first"
        ]


def test_without_fla_the_import_names_the_command(tmp_path):
    with only_fla_in(tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fla", None)
        with pytest.raises(ImportError, match="needs fla-core 0.6, which cannot be imported .*pip install"):
            imported()


def test_an_old_fla_is_refused(monkeypatch):
    """Its functions would ignore arguments."""
    with only_fla_in(HERE):
        module = importlib.import_module("fla.ops.kda.chunk")
        monkeypatch.setattr(module, "chunk_kda", lambda q, k, v, g, beta, **kwargs: None)
        monkeypatch.setattr(sys.modules["fla"], "__version__", "0.5.3")
        with pytest.raises(ImportError, match=r"fla-core: expected version 0.6, got 0.5.3, .*pip install"):
            imported()
        assert not importlib.import_module("fla.backends").registries["kda"]


# ---- loops


def test_the_backend_fla_calls_below_the_registry():
    """kda_core -> backend `fla` -> FLA's function itself, not its dispatch, which would lead back."""
    with fla_on_the_cpu():
        module = imported()
        asked = []
        module.KdaCoreBackend.chunk_kda_verifier = lambda *args, **kwargs: asked.append(args) or (True, None)
        x = call(K=32, V=16)
        x |= {name: x[name].half() for name in "qkv"}
        with record_calls() as calls:
            chunk_kda(**x, backend="fla")
            kda_core.fused_recurrent_kda(**x, backend="fla")
        assert [(c.backend, c.entry) for c in calls] == [("fla", "chunk_fwd"), ("fla", "recurrent_fwd")]
        assert not asked


@pytest.mark.parametrize("gradients", [False, True])
def test_a_call_that_the_backend_fla_would_serve_goes_to_fla_directly(monkeypatch, gradients):
    with fla_on_the_cpu():
        imported()
        prefill = importlib.import_module("fla.ops.kda").chunk_kda
        decode = importlib.import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
        monkeypatch.setenv("KDA_BACKEND", "fla")
        x = call(K=32, V=16, T=1)
        x |= {name: x[name].half() for name in "qkv"}
        x["v"].requires_grad_(gradients)
        words = "the backend 'fla' of kda-core would serve it, with FLA's own kernels"
        refuses(prefill, words, **x)
        refuses(decode, words, **x, inplace_final_state=False)
        if not gradients:
            pool = {"initial_state": torch.zeros(4, 2, 32, 16), "ssm_state_indices": torch.zeros(1).int()}
            refuses(decode, words, **x, **pool)


def test_the_arguments_are_those_of_kda_core_in_flas_order(ours):
    """The public function is called with the arguments of FLA's as they are."""
    own = inspect.signature(chunk_kda).parameters
    theirs = inspect.signature(importlib.import_module("fla.ops.kda").chunk_kda).parameters
    named = [p for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in named] == list(own)[: len(named)]
