"""Derivatives: the backends that run forward and backward, the results of torch.func, and the derivatives that are refused."""

import threading

import pytest
import torch
from helpers.inputs import call, replaced
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from kda_core import chunk_kda, explain, use_backend
from kda_core.contract import Feature
from kda_core.errors import (
    ArgumentError,
    BackendError,
    BackendUnsupportedError,
    DerivativeError,
    NoEligibleBackendError,
)
from kda_core.registry import REGISTRY, record_calls

X = call()
V = X["v"]


def f(v, **more):
    return chunk_kda(**replaced(X, v=v), **more)[0]


def loss(v):
    return f(v).square().sum()


@pytest.fixture
def two(install):
    """Two backends that serve everything; calls that name none go to `usual`."""
    install("usual", priority=2)
    install("named", priority=1)
    torch._dynamo.reset()


def ran(calls):
    return [(c.backend, c.entry) for c in calls]


def forward_and_backward(name):
    return [(name, "chunk_fwd"), (name, "chunk_bwd")]


# ---- the backward runs on the backend of its forward


@pytest.mark.parametrize("thread", [False, True], ids=["same-thread", "other-thread"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_backward_outside_of_the_block_runs_on_the_backend_of_the_forward(two, thread, compiled):
    function = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    for _ in range(2):
        v = V.clone().requires_grad_()
        with record_calls() as calls:
            with use_backend("named"):
                value = function(v)
            if thread:
                other = threading.Thread(target=value.backward)
                other.start()
                other.join()
            else:
                value.backward()
        assert ran(calls) == forward_and_backward("named")
        assert v.grad.abs().sum() > 0
        with record_calls() as calls, use_backend("named"):
            function(v).backward()
        assert ran(calls) == forward_and_backward("named")
        with record_calls() as calls:
            function(v).backward()
        assert ran(calls) == forward_and_backward("usual")


def test_another_environment_in_the_backward_changes_nothing(two, monkeypatch):
    monkeypatch.setenv("KDA_BACKEND", "named,usual")
    with record_calls() as calls:
        value = loss(V.clone().requires_grad_())
        monkeypatch.setenv("KDA_BACKEND", "usual")
        value.backward()
    assert ran(calls) == forward_and_backward("named")


def test_the_pullback_of_vjp_runs_on_the_backend_of_the_forward(two):
    with record_calls() as calls:
        with use_backend("named"):
            o, pull = torch.func.vjp(f, V)
        pull(torch.ones_like(o))
    assert ran(calls) == forward_and_backward("named")


def test_each_of_two_forwards_has_its_own_backend(two):
    v = V.clone().requires_grad_()
    with record_calls() as calls:
        with use_backend("named"):
            a = loss(v)
        b = loss(v)
        (a + b).backward()
    assert sorted(ran(calls)) == sorted(forward_and_backward("named") + forward_and_backward("usual"))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("how", ["block", "argument"])
def test_checkpointed_steps_run_on_one_backend(two, reentrant, how):
    more = {"backend": "named"} if how == "argument" else {}
    v = V.clone().requires_grad_()
    with record_calls() as calls:
        if how == "argument":
            checkpoint(lambda v: f(2 * v, **more), v, use_reentrant=reentrant).sum().backward()
        else:
            with use_backend("named"):
                checkpoint(lambda v: f(2 * v), v, use_reentrant=reentrant).sum().backward()
    assert ran(calls) == [("named", "chunk_fwd"), *forward_and_backward("named")]


def test_a_recomputation_on_another_backend_is_refused(two):
    with use_backend("named"):
        o = checkpoint(lambda v: f(2 * v), V.clone().requires_grad_(), use_reentrant=False)
    with pytest.raises(BackendError, match="ran on backend 'named', but its recomputation .* on 'usual'"):
        o.sum().backward()


# ---- forward and backward on two backends


ALL = {f.value for f in Feature}


@pytest.fixture
def split(install):
    """`fast` has the highest priority and no backward; of two with a backward, `better` comes first."""
    install("fast", priority=3, features=ALL - {"backward"})
    install("better", priority=2)
    install("worse", priority=1)
    torch._dynamo.reset()


SPLIT = [("fast", "chunk_fwd"), ("better", "chunk_bwd")]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_fastest_forward_and_the_best_backward_serve_a_call(split, compiled):
    function = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    v = V.clone().requires_grad_()
    with record_calls() as calls:
        function(v).backward()
    assert ran(calls) == SPLIT
    want = V.clone().requires_grad_()
    f(want, backend="reference").square().sum().backward()
    assert torch.equal(v.grad, want.grad)
    with torch.no_grad(), record_calls() as calls:
        function(v)
    assert ran(calls) == SPLIT[:1]


def test_the_forward_of_a_backend_without_a_backward_looks_like_inference(install):
    body = "def chunk_fwd(self, i, o):\n    assert not i.options.needs_backward\n    return super().chunk_fwd(i, o)\n"
    for method in ("can_run", "workspace_bytes"):
        result = {"can_run": "None", "workspace_bytes": "0"}[method]
        body += (
            f"def {method}(self, shape):\n    assert not shape.options.needs_backward\n    return {result}\n"
        )
    source = "from kda_core.reference import ReferenceBackend\nclass Backend(ReferenceBackend):\n"
    source += "".join(f"    {line}\n" for line in body.splitlines())
    install("strict", priority=1, features=ALL - {"backward"}, backend=source)
    with record_calls() as calls:
        loss(V.clone().requires_grad_()).backward()
    assert ran(calls) == [("strict", "chunk_fwd"), ("reference", "chunk_bwd")]


def test_a_backward_that_refuses_the_shape_leaves_its_forward(install):
    source = (
        "from kda_core.reference import ReferenceBackend\nclass Backend(ReferenceBackend):\n"
        "    def can_run(self, shape):\n        return 'T is odd' if shape.options.needs_backward and shape.T % 2 else None\n"
    )
    install("even", priority=1, backend=source)
    for T, backward in ((20, "even"), (19, "reference")):
        x = call(T=T)
        x["v"].requires_grad_()
        with record_calls() as calls:
            chunk_kda(**x)[0].sum().backward()
        assert ran(calls) == [("even", "chunk_fwd"), (backward, "chunk_bwd")]
    assert "refused   even, the backward: unsupported: T is odd" in str(explain(**x))


@pytest.mark.parametrize("how", ["argument", "block", "environment"])
def test_a_named_backend_serves_both_or_the_call_fails(split, monkeypatch, how):
    def run(name):
        v = V.clone().requires_grad_()
        if how == "argument":
            return f(v, backend=name).sum()
        if how == "block":
            with use_backend(name):
                return f(v).sum()
        monkeypatch.setenv("KDA_BACKEND", name)
        return f(v).sum()

    with record_calls() as calls:
        run("worse").backward()
    assert ran(calls) == forward_and_backward("worse")
    with pytest.raises(BackendError, match="unsupported: backward") as caught:
        run("fast")
    assert "v requires grad; without gradients (torch.no_grad(), detach()) fast serves this call" in str(
        caught.value
    )


def test_a_list_of_backends_gives_each_direction_its_first(split, monkeypatch):
    for order, want in (("worse,fast,better", forward_and_backward("worse")), ("fast,better,worse", SPLIT)):
        monkeypatch.setenv("KDA_BACKEND", order)
        with record_calls() as calls:
            loss(V.clone().requires_grad_()).backward()
        assert ran(calls) == want


def test_explain_names_both_backends(split):
    x = replaced(X, v=V.clone().requires_grad_())
    found = explain(**x)
    assert (found.backend, found.backward, found.error) == ("fast", "better", None)
    assert explain(found.shape).backward == "better" and explain(**X).backward is None
    text = str(found)
    assert "backend   fast (choice: automatic)\nbackward  better, saved 0 bytes, plan direct" in text
    assert "refused   fast, the backward: unsupported: backward" in text
    assert explain(**x, backend="worse").backward == "worse"
    refused = explain(**x, backend="fast")
    assert (refused.backend, refused.backward) == (None, None) and "unsupported: backward" in refused.error


def test_a_recomputation_with_another_backward_is_refused(split, monkeypatch):
    monkeypatch.setenv("KDA_BACKEND", "fast,better")
    o = checkpoint(lambda v: f(2 * v), V.clone().requires_grad_(), use_reentrant=False)
    monkeypatch.setenv("KDA_BACKEND", "fast,worse")
    with pytest.raises(
        BackendError, match=r"'fast' \(its backward on 'better'\), but its recomputation .* on 'fast' \("
    ):
        o.sum().backward()


# ---- a backend without a backward


@pytest.mark.parametrize("named", [False, True], ids=["automatic", "named"])
def test_the_error_names_inputs_that_require_grad_if_only_the_backward_is_missing(
    install, monkeypatch, named
):
    install("forwards", priority=1, features={"unbounded_gate"})
    kind, more = NoEligibleBackendError, {}
    if named:
        kind, more = BackendUnsupportedError, {"backend": "forwards"}
    else:
        monkeypatch.setenv("KDA_BACKEND", "forwards")
    x = replaced(X, k=X["k"].clone().requires_grad_(), beta=X["beta"].clone().requires_grad_())
    with pytest.raises(kind, match=r"k, beta requires grad; without gradients \(torch.no_grad\(\)"):
        chunk_kda(**x, **more)
    with torch.no_grad(), record_calls() as calls:
        chunk_kda(**x, **more)
    assert ran(calls) == [("forwards", "chunk_fwd")]
    with pytest.raises(kind) as caught:  # the final state is missing too: no_grad would not help
        chunk_kda(**x, **more, output_final_state=True)
    assert "requires grad" not in str(caught.value)


# ---- torch.func


def test_functional_gradients_are_those_of_autograd():
    v = V.clone().requires_grad_()
    loss(v).backward()
    with record_calls() as calls:
        assert torch.equal(torch.func.grad(loss)(V), v.grad)
        assert torch.equal(torch.func.vjp(loss, V)[1](torch.ones(()))[0], v.grad)
        assert torch.equal(torch.func.jacrev(lambda v: loss(v)[None])(V)[0], v.grad)
    assert ran(calls) == 3 * forward_and_backward("reference")
    with torch.no_grad():
        assert torch.equal(torch.func.grad(loss)(V), v.grad)


def test_functional_gradients_of_a_batch_are_those_of_its_elements():
    batch = torch.stack([V, 2 * V])
    want = torch.stack([torch.func.grad(loss)(v) for v in batch])
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(batch), want)
    assert torch.equal(torch.func.grad(lambda b: torch.func.vmap(loss)(b).sum())(batch), want)
    assert torch.equal(
        torch.func.vmap(loss, in_dims=1)(batch.movedim(0, 1)), torch.stack([*map(loss, batch)])
    )


def test_an_outer_gradient_that_does_not_depend_on_the_inner_one_is_served():
    inner = torch.func.grad(loss)
    a = torch.tensor(3.0)
    assert torch.func.grad(lambda a: a * inner(V).sum())(a) == inner(V).sum()


def test_functional_gradients_compile():
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(V), torch.func.grad(loss)(V))


# ---- derivatives that are refused


TANGENT = "forward-mode AD is not supported: v has a tangent"
SECOND = "second derivatives are not supported"


@pytest.mark.parametrize(
    ("grad", "given"), [(False, False), (True, False), (False, True)], ids=["plain", "requires-grad", "out"]
)
def test_a_tangent_is_refused(grad, given):
    f(V)  # this call is cached
    with forward_ad.dual_level():
        v = V.clone().requires_grad_(grad)
        more = {"out": torch.empty_like(V)} if given else {}
        with pytest.raises(DerivativeError, match=TANGENT):
            f(forward_ad.make_dual(v, torch.ones_like(v)), **more)
        with record_calls() as calls:
            assert torch.equal(f(V), f(V.clone()))  # no tangent, so nothing to refuse
    assert ran(calls) == 2 * [("reference", "chunk_fwd")]


def test_a_tangent_of_a_functional_transform_is_refused():
    for derivative in (
        lambda: torch.func.jvp(f, (V,), (V,)),
        lambda: torch.func.jacfwd(loss)(V),
        lambda: torch.func.hessian(loss)(V),
        lambda: torch.func.jvp(lambda v: f(v, out=torch.empty_like(V)), (V,), (V,)),
        lambda: torch.func.jvp(torch.func.vmap(f), (V[None],), (V[None],)),
    ):
        with pytest.raises(DerivativeError, match=TANGENT):
            derivative()


def test_a_tangent_in_a_trace_is_refused():
    torch._dynamo.reset()
    compiled = torch.compile(lambda v: torch.func.jvp(f, (v,), (v,)), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=TANGENT):
        compiled(V)


def test_a_second_derivative_is_refused():
    v = V.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(v), v, create_graph=True)
    assert torch.equal(g, torch.func.grad(loss)(V)), "create_graph=True by itself is no second derivative"
    for derivative in (
        lambda: (loss(v) + g.square().sum()).backward(),
        lambda: torch.func.grad(lambda v: torch.func.grad(loss)(v).square().sum())(V),
        lambda: torch.func.jacrev(torch.func.grad(loss))(V),
    ):
        with pytest.raises(DerivativeError, match=SECOND):
            derivative()


def test_gradgradcheck_raises():
    x = call(T=3, K=2, V=2, H=1, HV=1, dtype=torch.float64)
    x = tuple(t.double().requires_grad_() for t in x.values())
    function = lambda *x: chunk_kda(*x)[0]
    assert torch.autograd.gradcheck(function, x, atol=1e-7)
    with pytest.raises(DerivativeError, match=SECOND):
        torch.autograd.gradgradcheck(function, x)


def test_neither_out_nor_the_intermediate_states_can_be_differentiated():
    with pytest.raises(ArgumentError, match="^out: expected None for inputs that require grad"):
        torch.func.grad(lambda v: f(v, out=torch.empty_like(V)).sum())(V)
    with pytest.raises(ArgumentError, match="^return_intermediate_states: "):
        torch.func.grad(lambda v: f(v, return_intermediate_states=True).sum())(V)
    with pytest.raises(ArgumentError, match="^out: expected tensors that require no grad"):
        chunk_kda(**X, out=torch.empty_like(V, requires_grad=True))
    batch = V[None]
    with pytest.raises(
        ArgumentError, match="^return_intermediate_states: "
    ):  # only the operator sees requires_grad
        torch.func.grad(lambda b: torch.func.vmap(lambda v: f(v, return_intermediate_states=True))(b).sum())(
            batch
        )


def test_the_backward_finds_its_backend_after_a_refresh(two):
    with use_backend("named"):
        value = loss(V.clone().requires_grad_())
    REGISTRY.refresh()
    with record_calls() as calls:
        value.backward()
    assert ran(calls) == [("named", "chunk_bwd")]
