"""FLA's functions on the backends of kda-core, on a CPU. `tests/core/test_fla_registry.py` has all reasons of refusals."""

import inspect

import pytest
import torch
from helpers.inputs import call
from helpers.real_fla import (
    chunk_kda,
    fused_recurrent_kda,
    fused_recurrent_kda_fwd,
    integration,
    interpreted,
)

import kda_core
from kda_core.registry import record_calls

GATE = {
    "A_log": torch.tensor([0.1, 0.4]),
    "dt_bias": torch.linspace(-1, 1, 2 * 16),
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def inputs(**changes):
    return call(**{"B": 2, "T": 5, "H": 1, "HV": 2, "K": 16, "V": 16} | changes)


def ran(function, x, *entries, backend="reference"):
    with record_calls() as calls:
        found = function(**x)
    assert [(c.backend, c.entry) for c in calls] == [(backend, entry) for entry in entries]
    return found


def same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        assert (a is None) is (b is None)
        assert a is None or torch.equal(a, b)


def test_fla_asks_kda_core():
    assert integration.undispatched() == ()


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("cu_seqlens", [None, (0, 30, 70)], ids=("fixed", "packed"))
def test_prefill(cu_seqlens, v_first):
    x = inputs(B=1, T=70) | GATE | {"output_final_state": True, "state_v_first": v_first}
    N = 1
    if cu_seqlens is not None:
        x["cu_seqlens"], N = torch.tensor(cu_seqlens), 2
    x["initial_state"] = torch.randn(N, 2, 16, 16)
    same(ran(chunk_kda, x, "chunk_fwd"), kda_core.chunk_kda(**x))


def test_a_training_call():
    x = inputs(T=70) | GATE
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    leaves = {n: x[n].clone().requires_grad_() for n in names}
    o, _ = ran(chunk_kda, x | leaves, "chunk_fwd")
    with record_calls() as calls:
        found = torch.autograd.grad(o.sum(), list(leaves.values()))
    assert [(c.backend, c.entry) for c in calls] == [("reference", "chunk_bwd")]
    o, _ = kda_core.chunk_kda(**x | leaves)
    same(found, torch.autograd.grad(o.sum(), list(leaves.values())))


def test_intermediate_states_of_bf16():
    x = inputs(T=130, dtype=torch.bfloat16) | {"return_intermediate_states": True}
    with torch.inference_mode():
        same(ran(chunk_kda, x, "chunk_fwd"), kda_core.chunk_kda(**x))


def test_the_deprecated_name_of_a_layout():
    x = inputs() | {"transpose_state_layout": True, "output_final_state": True}
    with pytest.warns(DeprecationWarning):
        _, state = ran(chunk_kda, x, "chunk_fwd")
    assert torch.equal(state, kda_core.chunk_kda(**inputs(), output_final_state=True)[1].mT)


@pytest.fixture
def theirs(monkeypatch):
    """Returns a function that makes a call with FLA's own kernels, in Triton's interpreter."""

    def run(function, x):
        with monkeypatch.context() as patch:
            patch.setenv("FLA_KDA_CORE", "0")
            return ran(function, x)

    return run


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"output_final_state": True},
        {"output_final_state": True, "state_v_first": True},
        GATE | {"lower_bound": -5.0, "output_final_state": True, "allow_neg_eigval": True},
        GATE | {"scale": 0.3},
    ],
    ids=("plain", "state", "v first", "bounded gate", "gate"),
)
def test_decoding_agrees_with_flas_kernels(theirs, changes):
    x = inputs() | {"initial_state": torch.randn(2, 2, 16, 16)} | changes
    with torch.no_grad():
        close(ran(fused_recurrent_kda, x, "recurrent_fwd"), theirs(fused_recurrent_kda, x))


@interpreted
@pytest.mark.parametrize("cu_seqlens", [(0, 2, 5), (0, 2, 4)], ids=("full", "padded"))
def test_packed_decoding_agrees_with_flas_kernels(theirs, cu_seqlens):
    x = inputs(B=1) | {"cu_seqlens": torch.tensor(cu_seqlens), "output_final_state": True}
    with torch.no_grad():
        close(ran(fused_recurrent_kda, x, "recurrent_fwd"), theirs(fused_recurrent_kda, x))


POOLS = {
    "a slot": (1, [3, 0], None),
    "a slot for every token": (3, [[3, 0, 5], [1, 2, 4]], None),
    "accepted": (3, [[3, 0, 5], [1, 2, 4]], [2, 3]),
}


@interpreted
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
def test_pools_agree_with_flas_kernels(theirs, name, dtype):
    T, slots, accepted = POOLS[name]
    pool = torch.randn(7, 2, 16, 16).to(dtype)
    x = inputs(T=T) | {"ssm_state_indices": torch.tensor(slots).int(), "state_v_first": True}
    if accepted is not None:
        x["num_accepted_tokens"] = torch.tensor(accepted).int()
    mine, other = pool.clone(), pool.clone()
    with torch.no_grad():
        with record_calls() as calls:
            o, state = fused_recurrent_kda_fwd(**x, initial_state=mine)
        assert state is mine and {(c.backend, c.entry) for c in calls} == {("reference", "recurrent_fwd")}
        want, _ = theirs(fused_recurrent_kda_fwd, x | {"initial_state": other})
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
    limit = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(mine.float(), other.float(), rtol=limit, atol=limit)


def test_the_signatures_are_those_of_flas_functions():
    backend = integration.KdaCoreBackend
    theirs = inspect.signature(inspect.unwrap(chunk_kda)).parameters
    own = [
        n
        for n, p in inspect.signature(integration._refused_chunk).parameters.items()
        if p.kind != p.KEYWORD_ONLY
    ]
    assert own[:-1] == list(theirs)[:-1]
    assert list(inspect.signature(kda_core.chunk_kda).parameters)[: len(own) - 1] == own[:-1]
    theirs = inspect.signature(inspect.unwrap(fused_recurrent_kda_fwd)).parameters
    own = inspect.signature(integration._refused_recurrent).parameters
    assert list(own)[:-1] == list(theirs)[:-1]
    for name in list(own)[5:-1]:
        assert own[name].default == theirs[name].default, name
    assert backend.priority < 3  # that of FLA's FlashKDA


@interpreted
def test_the_backend_fla_does_not_come_back(monkeypatch):
    """Its calls pass by FLA's dispatch. FLA's own decoding kernel computes, in Triton's interpreter."""
    from dataclasses import replace

    from kda_core.fla import SPEC, FlaBackend
    from kda_core.registry import REGISTRY

    asked = []
    for name in ("chunk_kda_verifier", "fused_recurrent_kda_fwd_verifier"):
        monkeypatch.setattr(
            integration.KdaCoreBackend, name, lambda *args, **kwargs: asked.append(args) or (True, None)
        )
    x = inputs(dtype=torch.bfloat16) | {"output_final_state": True}
    wanted = kda_core.fused_recurrent_kda(**x)
    with REGISTRY.replaced(replace(SPEC, archs=frozenset({"cpu"})), FlaBackend(), "in a test"):
        found = ran(
            lambda **y: kda_core.fused_recurrent_kda(**y, backend="fla"), x, "recurrent_fwd", backend="fla"
        )
    assert not asked
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_torch_compile_breaks_its_graph_at_flas_dispatch():
    function = lambda **x: chunk_kda(**x)[0] + 1
    x = inputs(T=70)
    with pytest.raises(Exception, match="fullgraph|Skip|disable"):
        torch.compile(function, backend="eager", fullgraph=True)(**x)
    found = ran(torch.compile(function, backend="eager"), x, "chunk_fwd")
    assert torch.equal(found, kda_core.chunk_kda(**x)[0] + 1)
