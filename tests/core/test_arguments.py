"""Bad input is refused by name, from metadata, before anything is computed."""

import pytest
import torch
from inputs import call

from kda_core import chunk_kda, fused_recurrent_kda
from kda_core.errors import ArgumentError, DeviceError, DtypeError, KdaError, ShapeError, StrideError

X = call()
PACKED = call(T=20)
GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}


def cu(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


CASES = [
    # changes, error class, argument, words that must stand in the message
    ({"q": X["q"][0]}, ShapeError, "q", "[B, T, H, K]"),
    ({"q": None}, DtypeError, "q", "a torch.Tensor"),
    ({"v": X["v"].numpy()}, DtypeError, "v", "ndarray"),
    ({"q": X["q"].long()}, DtypeError, "q", "torch.int64"),
    ({"k": X["k"].double()}, DtypeError, "k", "torch.float64"),
    ({"k": X["k"][:, :19]}, ShapeError, "k", "[1, 19, 2, 8]"),
    ({"v": X["v"][:, :, :1]}, ShapeError, "v", "multiple of H=2"),
    ({"v": torch.zeros(1, 20, 3, 8)}, ShapeError, "v", "HV=3"),
    ({"g": X["g"][..., :7]}, ShapeError, "g", "[B, T, HV, K]"),
    ({"g": X["g"].half()}, DtypeError, "g", "torch.float16"),
    ({"beta": X["beta"].unsqueeze(-1)}, ShapeError, "beta", "[1, 20, 2]"),
    ({"beta": X["beta"].to("meta")}, DeviceError, "beta", "meta"),
    ({"scale": "1"}, DtypeError, "scale", "str"),
    ({"scale": float("nan")}, ArgumentError, "scale", "finite"),
    ({"output_final_state": "yes"}, DtypeError, "output_final_state", "bool"),
    ({"output_final_state": 1}, DtypeError, "output_final_state", "bool"),
    ({"chunk_size": 48}, ArgumentError, "chunk_size", "32 or 64"),
    ({"chunk_size": 64.0}, DtypeError, "chunk_size", "int"),
    ({"allow_neg_eigval": True}, ArgumentError, "allow_neg_eigval", "use_beta_sigmoid_in_kernel"),
    ({"lower_bound": -5.0}, ArgumentError, "lower_bound", "use_gate_in_kernel"),
    ({"A_log": torch.zeros(2)}, ArgumentError, "A_log", "use_gate_in_kernel"),
    ({"dt_bias": torch.zeros(16)}, ArgumentError, "dt_bias", "use_gate_in_kernel"),
    ({"use_gate_in_kernel": True}, ArgumentError, "A_log", "lower_bound=None"),
    (GATE | {"A_log": torch.zeros(3)}, ShapeError, "A_log", "[HV] = [2]"),
    (GATE | {"A_log": torch.zeros(2).bfloat16()}, DtypeError, "A_log", "torch.float32"),
    (GATE | {"dt_bias": torch.zeros(2, 9)}, ShapeError, "dt_bias", "[HV, K] = [2, 8]"),
    (GATE | {"dt_bias": torch.zeros(17)}, ShapeError, "dt_bias", "[HV*K] = [16]"),
    (GATE | {"safe_gate": True}, ArgumentError, "lower_bound", "[-5, 0)"),
    (GATE | {"safe_gate": True, "lower_bound": -8.0}, ArgumentError, "lower_bound", "-8.0"),
    (GATE | {"lower_bound": 0.5}, ArgumentError, "lower_bound", "below 0"),
    (GATE | {"lower_bound": float("nan")}, ArgumentError, "lower_bound", "below 0"),
    ({"initial_state": torch.zeros(2, 2, 8, 8)}, ShapeError, "initial_state", "[1, 2, 8, 8]"),
    ({"initial_state": torch.zeros(1, 2, 8, 8).bfloat16()}, DtypeError, "initial_state", "torch.float32"),
    ({"cu_seqlens": [0, 20]}, DtypeError, "cu_seqlens", "list"),
    ({"cu_seqlens": cu(0)}, ShapeError, "cu_seqlens", "[N+1]"),
    ({"cu_seqlens": cu(0, 20).float()}, DtypeError, "cu_seqlens", "torch.int32"),
    ({"cu_seqlens": cu(0, 12, 7, 20)}, ArgumentError, "cu_seqlens", "12 before 7"),
    ({"cu_seqlens": cu(1, 20)}, ArgumentError, "cu_seqlens", "first value of 0"),
    ({"cu_seqlens": cu(0, 21)}, ArgumentError, "cu_seqlens", "T=20"),
    ({"cu_seqlens": cu(0, 19)}, ArgumentError, "cu_seqlens", "T=20"),
    ({"cu_seqlens": cu(0, 20), "cu_seqlens_cpu": cu(0, 9, 20)}, ShapeError, "cu_seqlens_cpu", "[3]"),
    ({"cu_seqlens": cu(0, 20), "cu_seqlens_cpu": cu(0, 18)}, ArgumentError, "cu_seqlens_cpu", "18"),
    ({"cu_seqlens_cpu": cu(0, 20)}, ArgumentError, "cu_seqlens_cpu", "unless cu_seqlens"),
    ({"max_num_seqs": 1}, ArgumentError, "max_num_seqs", "use_graph"),
    ({"max_num_seqs": 2, "use_graph": True, "cu_seqlens": cu(0, 20)}, ArgumentError, "max_num_seqs", "N=1"),
    ({"cp_context": object()}, ArgumentError, "cp_context", "planner"),
    ({"context_parallel": "on"}, ArgumentError, "context_parallel", "'off'"),
    ({"context_parallel": 4}, DtypeError, "context_parallel", "int 4"),
    ({"backend": 90}, DtypeError, "backend", "int 90"),
    ({"pin": "yes"}, DtypeError, "pin", "bool"),
    ({"out": torch.zeros(1, 20, 2, 9)}, ShapeError, "out[0] (o)", "[1, 20, 2, 8]"),
    ({"out": torch.zeros(1, 20, 2, 8).bfloat16()}, DtypeError, "out[0] (o)", "torch.float32"),
    ({"out": torch.zeros(1, 20, 8, 2).mT}, StrideError, "out[0] (o)", "contiguous"),
    ({"out": X["v"]}, ArgumentError, "out[0] (o)", "v"),
    ({"out": (None, torch.zeros(1, 2, 8, 8))}, ArgumentError, "out[1] (final_state)", "does not ask"),
    ({"out": (1, 2, 3, 4)}, DtypeError, "out", "up to 3"),
    ({"workspace": torch.zeros(4)}, ArgumentError, "workspace", "uint8"),
]


@pytest.mark.parametrize(
    ("changes", "kind", "argument", "words"),
    CASES,
    ids=lambda c: "-".join(c) if isinstance(c, dict) else None,
)
def test_bad_input_is_refused_by_name(changes, kind, argument, words):
    with pytest.raises(kind) as caught:
        chunk_kda(**(X | changes))
    assert str(caught.value).startswith(f"{argument}: expected ")
    assert ", got " in str(caught.value) and words in str(caught.value)
    assert isinstance(caught.value, KdaError) and isinstance(caught.value, ValueError)


def test_batch_with_cu_seqlens_is_refused():
    with pytest.raises(ShapeError, match="batch size of 1"):
        chunk_kda(**call(B=2), cu_seqlens=cu(0, 20))


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'head_first'"):
        chunk_kda(**X, head_first=True)


def test_messages_stay_short_for_large_objects():
    with pytest.raises(DtypeError) as caught:
        chunk_kda(**(X | {"scale": list(range(100_000))}))
    assert len(str(caught.value)) < 200


def test_none_is_false_as_fla_callers_use_it():
    o, state = chunk_kda(**X, output_final_state=None)
    assert state is None and o.shape == X["v"].shape


def test_deprecated_layout_name():
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, state = chunk_kda(**call(K=8, V=4), output_final_state=True, transpose_state_layout=True)
    assert state.shape == (1, 2, 4, 8)
    with pytest.warns(DeprecationWarning), pytest.raises(ArgumentError, match="transpose_state_layout"):
        chunk_kda(**X, state_v_first=True, transpose_state_layout=True)


def test_positional_order_is_that_of_fla():
    import inspect

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


def test_recurrent_is_forward_only():
    x = call()
    x["v"].requires_grad_()
    with pytest.raises(ArgumentError, match="^v: expected no grad"):
        fused_recurrent_kda(**x)
    with torch.no_grad():
        fused_recurrent_kda(**x)


def test_out_and_intermediate_states_are_not_differentiable():
    x = call()
    x["v"].requires_grad_()
    with pytest.raises(ArgumentError, match="^out: "):
        chunk_kda(**x, out=torch.empty_like(x["v"]))
    with pytest.raises(ArgumentError, match="^return_intermediate_states: "):
        chunk_kda(**x, return_intermediate_states=True)
