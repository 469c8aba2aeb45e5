"""Arguments: errors name the invalid argument before anything is computed; accepted forms of valid ones."""

import inspect
import typing

import pytest
import torch
from helpers.bad_arguments import CASES, X, cu
from helpers.inputs import call
from torch.testing import assert_close

from kda_core import chunk_kda, explain, fused_recurrent_kda
from kda_core.buffers import make_inputs
from kda_core.contract import KdaOptions
from kda_core.errors import (
    ArgumentError,
    DtypeError,
    KdaError,
    ShapeError,
    UnknownArgumentError,
)
from kda_core.registry import record_calls
from kda_core.validate import problem_shape


@pytest.mark.parametrize(
    ("changes", "kind", "argument", "words"),
    CASES,
    ids=lambda c: "-".join(c) if isinstance(c, dict) else None,
)
def test_the_error_names_the_invalid_argument(changes, kind, argument, words):
    with pytest.raises(kind) as caught:
        chunk_kda(**(X | changes))
    assert str(caught.value).startswith(f"{argument}: expected ")
    assert ", got " in str(caught.value) and words in str(caught.value)
    assert isinstance(caught.value, KdaError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("changes", "kind", "argument", "words"),
    [
        c
        for c in CASES
        if "out" not in c[0] and "workspace" not in c[0] and not isinstance(c[0].get("v"), torch.Tensor)
    ],
    ids=lambda c: "-".join(c) if isinstance(c, dict) else None,
)
def test_the_error_names_the_invalid_argument_of_a_call_with_gradients(changes, kind, argument, words):
    """These calls go through torch's dispatcher, whose own errors would not use the names of `chunk_kda`."""
    x = X | {"v": X["v"].clone().requires_grad_()} | changes
    with pytest.raises(kind) as caught:
        chunk_kda(**x)
    assert str(caught.value).startswith(f"{argument}: expected ") and words in str(caught.value)


@pytest.mark.skipif(not hasattr(torch, "quantize_per_tensor"), reason="this torch has no quantised tensors")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
def test_quantised_tensors_are_refused():
    for name in ("q", "beta"):
        with pytest.raises(DtypeError, match=f"^{name}: expected .*, got torch.qint8"):
            chunk_kda(**X | {name: torch.quantize_per_tensor(X[name], 0.1, 0, torch.qint8)})


def test_batch_with_cu_seqlens_is_refused():
    with pytest.raises(ShapeError, match="batch size of 1"):
        chunk_kda(**call(B=2), cu_seqlens=cu(0, 20))


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("head_first", "pass x.transpose(1, 2)"),
        ("output_final_states", "Did you mean 'output_final_state'?"),
        ("a_log", "Did you mean 'A_log'?"),
        ("g_bias", "Did you mean 'dt_bias'?"),
        ("initial_state_indices", "Did you mean 'ssm_state_indices'?"),
        ("chunk_indices", "Leave it out"),
        ("fastmath", ""),
    ],
)
def test_an_unknown_keyword_is_a_type_error_with_a_hint(keyword, hint):
    for function in (chunk_kda, fused_recurrent_kda):
        with pytest.raises(TypeError) as caught:
            function(**X, **{keyword: None})
        start, _, rest = str(caught.value).partition(". ")
        assert start == f"{function.__name__}() got an unexpected keyword argument {keyword!r}"
        assert hint in rest and bool(hint) == bool(rest)
        assert isinstance(caught.value, UnknownArgumentError) and isinstance(caught.value, KdaError)


def test_the_error_says_that_only_chunk_kda_has_a_keyword():
    for keyword in ("safe_gate", "chunk_size", "cu_seqlens_cpu"):
        with pytest.raises(TypeError, match=f"'{keyword}'. Only chunk_kda has it"):
            fused_recurrent_kda(**X, **{keyword: None})


def test_the_signature_names_every_keyword():
    for function in (chunk_kda, fused_recurrent_kda):
        parameters = inspect.signature(function).parameters
        assert not [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
        assert typing.get_type_hints(function).keys() == {*parameters, "return"}
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        explain(**X, head_first=True)


def test_messages_stay_short_for_large_objects():
    with pytest.raises(DtypeError) as caught:
        chunk_kda(**(X | {"scale": list(range(100_000))}))
    assert len(str(caught.value)) < 200


def test_none_means_false_as_in_fla():
    o, state = chunk_kda(**X, output_final_state=None)
    assert state is None and o.shape == X["v"].shape


def test_deprecated_layout_name():
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, state = chunk_kda(**call(K=8, V=4), output_final_state=True, transpose_state_layout=True)
    assert state.shape == (1, 2, 4, 8)
    with pytest.warns(DeprecationWarning), pytest.raises(ArgumentError, match="transpose_state_layout"):
        chunk_kda(**X, state_v_first=True, transpose_state_layout=True)


def test_the_positional_order_is_that_of_fla():
    names = list(inspect.signature(chunk_kda).parameters)
    assert names[:22] == [
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound",
        "disable_recompute", "return_intermediate_states", "state_v_first", "cu_seqlens", "cu_seqlens_cpu",
        "cp_context", "use_graph", "max_num_seqs",
    ]  # fmt: skip
    assert list(inspect.signature(fused_recurrent_kda).parameters)[:17] == [
        "q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
        "lower_bound", "state_v_first", "cu_seqlens",
    ]  # fmt: skip


def test_scalars_of_numpy_act_as_those_of_python():
    np = pytest.importorskip("numpy")
    want = chunk_kda(**X, scale=0.5, chunk_size=32, output_final_state=True)
    for scale in (np.float16(0.5), np.float32(0.5), np.float64(0.5)):
        got = chunk_kda(
            **X, scale=scale, chunk_size=np.int64(32), output_final_state=np.True_, pin=np.bool_(False)
        )
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert torch.equal(chunk_kda(**X, scale=np.int32(2))[0], chunk_kda(**X, scale=2)[0])
    assert chunk_kda(**X, output_final_state=np.False_)[1] is None
    for bad in (
        {"scale": np.True_},
        {"chunk_size": np.True_},
        {"pin": np.int64(1)},
        {"scale": np.array([0.5])},
    ):
        with pytest.raises(DtypeError):
            chunk_kda(**X, **bad)
    with pytest.raises(DtypeError, match=r"Pass scale.item\(\)"):
        chunk_kda(**X, scale=np.array(0.5))


# ---- decoding


def with_grad(x):
    return {n: t.clone().requires_grad_() for n, t in x.items()}


def test_decoding_has_the_gradients_of_chunk_kda():
    x, y = with_grad(call(T=5)), with_grad(call(T=5))
    with record_calls() as calls:
        o, state = fused_recurrent_kda(**x, output_final_state=True)
        (o.square().sum() + state.square().sum()).backward()
    assert [(c.backend, c.entry) for c in calls] == [("reference", "chunk_fwd"), ("reference", "chunk_bwd")]
    want, want_state = chunk_kda(**y, output_final_state=True)
    (want.square().sum() + want_state.square().sum()).backward()
    assert torch.equal(o, want) and torch.equal(state, want_state)
    for name in x:
        assert x[name].grad.abs().sum() > 0 and torch.equal(x[name].grad, y[name].grad), name


def test_decoding_without_grad_mode_runs_token_by_token():
    x = with_grad(call(T=5))
    with torch.no_grad(), record_calls() as calls:
        o, _ = fused_recurrent_kda(**x)
    assert [c.entry for c in calls] == ["recurrent_fwd"] and not o.requires_grad
    assert_close(o, fused_recurrent_kda(**x)[0].detach(), rtol=1e-5, atol=1e-5)


def test_decoded_sequences_may_end_before_T():
    short = {n: t[:, :13] for n, t in X.items()}
    want, want_state = fused_recurrent_kda(**short, cu_seqlens=cu(0, 7, 13), output_final_state=True)
    # o probably reuses the memory of these tensors, so that a row which is not written would hold NaN
    noise = [torch.full_like(X["v"], float("nan")) for _ in range(8)]
    del noise
    o, state = fused_recurrent_kda(**X, cu_seqlens=cu(0, 7, 13), output_final_state=True)
    assert torch.equal(o[:, :13], want) and torch.equal(state, want_state)
    assert torch.equal(o[:, 13:], torch.zeros_like(o[:, 13:]))
    with pytest.raises(ArgumentError, match="^cu_seqlens: expected a last value of at most T=20, got 21"):
        fused_recurrent_kda(**X, cu_seqlens=cu(0, 21))
    with pytest.raises(ArgumentError, match="^cu_seqlens: expected a last value of T=20, got 13"):
        fused_recurrent_kda(**with_grad(X), cu_seqlens=cu(0, 7, 13))


# ---- the gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2,), (1, 1, 2, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("bound", [None, -5.0])
def test_gate_parameters_of_other_shapes_and_dtypes(dtype, shape, bound):
    A_log = torch.tensor([0.5, -0.25]).to(dtype).reshape(shape).requires_grad_()
    dt_bias = torch.linspace(-1, 1, 16).to(dtype).requires_grad_()
    plain = {
        n: t.detach().float().flatten().requires_grad_() for n, t in (("A_log", A_log), ("dt_bias", dt_bias))
    }
    options = {"use_gate_in_kernel": True, "lower_bound": bound, "output_final_state": True}
    want = chunk_kda(**X, **options, **plain)
    got = chunk_kda(**X, **options, A_log=A_log, dt_bias=dt_bias)
    with torch.no_grad():
        for entry in (chunk_kda, fused_recurrent_kda):
            direct = entry(**X, **options, A_log=A_log, dt_bias=dt_bias)
            assert all(torch.equal(a, b) for a, b in zip(direct, entry(**X, **options, **plain)))
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    for o, state in (got, want):
        (o.sum() + state.square().sum()).backward()
    for given, (name, like) in zip((A_log, dt_bias), plain.items()):
        assert given.grad.dtype == dtype and given.grad.shape == given.shape, name
        assert torch.equal(given.grad.flatten(), like.grad.to(dtype)) and like.grad.abs().sum() > 0


def test_a_backend_receives_gate_parameters_in_one_form():
    A_log, dt_bias = torch.zeros(1, 1, 2, 1, dtype=torch.float16), torch.zeros(16, dtype=torch.bfloat16)
    tensors = (*X.values(), A_log, dt_bias, None, None, None)
    shape = problem_shape(*tensors, options=KdaOptions(use_gate_in_kernel=True))
    inputs = make_inputs(tensors, shape)
    for x, form in ((inputs.A_log, (2,)), (inputs.dt_bias, (2, 8))):
        assert x.dtype == torch.float32 and tuple(x.shape) == form and x.is_contiguous()


@pytest.mark.parametrize(
    ("promise", "unbounded"),
    [
        ({}, True),
        ({"safe_gate": True}, False),
        ({"safe_gate": True, "lower_bound": -5.0}, False),
        ({"safe_gate": True, "lower_bound": -0.5}, False),
        ({"safe_gate": True, "lower_bound": -8.0}, True),
    ],
)
def test_a_lower_bound_of_precomputed_decays_is_part_of_the_promise(promise, unbounded):
    found = explain(**X, **promise).shape
    assert ("unbounded_gate" in {f.value for f in found.features}) is unbounded
    # a backend sees only `safe_gate`
    assert found.options.lower_bound is None and found.options.safe_gate is not unbounded
    assert torch.equal(chunk_kda(**X, **promise)[0], chunk_kda(**X)[0])


def test_out_and_intermediate_states_are_not_differentiable():
    x = call()
    x["v"].requires_grad_()
    with pytest.raises(ArgumentError, match="^out: "):
        chunk_kda(**x, out=torch.empty_like(x["v"]))
    with pytest.raises(ArgumentError, match="^return_intermediate_states: "):
        chunk_kda(**x, return_intermediate_states=True)
