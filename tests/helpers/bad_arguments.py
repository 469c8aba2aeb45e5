"""Invalid arguments of `chunk_kda`, each with the error that it must raise."""

import warnings

import torch

from helpers.inputs import call
from kda_core.errors import ArgumentError, DeviceError, DtypeError, ShapeError, StrideError

X = call()
PACKED = call(T=20)
GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}


def cu(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


with warnings.catch_warnings():  # torch warns that nested tensors are a prototype
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([X["g"][0]])
    JAGGED = torch.nested.nested_tensor([X["q"][0]], layout=torch.jagged)


class NoText:
    def to_json(self):
        return 3


CASES = [
    # changes, error class, argument, words of the message
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
    ({"scale": float("inf")}, ArgumentError, "scale", "finite"),
    ({"scale": 1e300}, ArgumentError, "scale", "fp32"),
    ({"scale": -3.5e38}, ArgumentError, "scale", "fp32"),
    ({"scale": 10**400}, ArgumentError, "scale", "fp64"),
    ({"scale": torch.tensor(0.5)}, DtypeError, "scale", "Pass scale.item()"),
    ({"scale": 1j}, DtypeError, "scale", "complex"),
    ({"output_final_state": "yes"}, DtypeError, "output_final_state", "bool"),
    ({"output_final_state": 1}, DtypeError, "output_final_state", "bool"),
    ({"chunk_size": 48}, ArgumentError, "chunk_size", "32 or 64"),
    ({"chunk_size": 16}, ArgumentError, "chunk_size", "`chunk_size` must be either 32 or 64"),
    ({"chunk_size": 64.0}, DtypeError, "chunk_size", "int"),
    ({"chunk_size": None}, DtypeError, "chunk_size", "int"),
    ({"chunk_size": torch.tensor(64)}, DtypeError, "chunk_size", "Pass chunk_size.item()"),
    ({"pin": torch.tensor(True)}, DtypeError, "pin", "Pass pin.item()"),
    ({"allow_neg_eigval": True}, ArgumentError, "allow_neg_eigval", "use_beta_sigmoid_in_kernel"),
    ({"lower_bound": -5.0}, ArgumentError, "lower_bound", "use_gate_in_kernel"),
    ({"A_log": torch.zeros(2)}, ArgumentError, "A_log", "use_gate_in_kernel"),
    ({"dt_bias": torch.zeros(16)}, ArgumentError, "dt_bias", "use_gate_in_kernel"),
    ({"use_gate_in_kernel": True}, ArgumentError, "A_log", "lower_bound=None"),
    (GATE | {"A_log": torch.zeros(3)}, ShapeError, "A_log", "[HV] = [2]"),
    (GATE | {"A_log": torch.zeros(1, 2, 2)}, ShapeError, "A_log", "[1, 2, 2]"),
    (GATE | {"A_log": torch.zeros(2).long()}, DtypeError, "A_log", "torch.float32"),
    (GATE | {"dt_bias": torch.zeros(2, 9)}, ShapeError, "dt_bias", "[HV, K] = [2, 8]"),
    (GATE | {"dt_bias": torch.zeros(17)}, ShapeError, "dt_bias", "[HV*K] = [16]"),
    (GATE | {"safe_gate": True}, ArgumentError, "lower_bound", "[-5, 0)"),
    (GATE | {"safe_gate": True, "lower_bound": -8.0}, ArgumentError, "lower_bound", "-8.0"),
    (GATE | {"lower_bound": 0.5}, ArgumentError, "lower_bound", "below 0"),
    (GATE | {"lower_bound": float("nan")}, ArgumentError, "lower_bound", "below 0"),
    (GATE | {"lower_bound": float("-inf")}, ArgumentError, "lower_bound", "finite"),
    (GATE | {"lower_bound": -1e300}, ArgumentError, "lower_bound", "finite"),
    ({"safe_gate": True, "lower_bound": 0.0}, ArgumentError, "lower_bound", "below 0"),
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
    (
        {"cu_seqlens": cu(0, 7, 20), "cu_seqlens_cpu": cu(0, 10, 20, dtype=torch.int32)},
        ArgumentError,
        "cu_seqlens_cpu",
        "the values of cu_seqlens, 7 at 1, got 10",
    ),
    ({"cu_seqlens": cu(7, 13)}, ArgumentError, "cu_seqlens", "Lengths? cu_seqlens is their cumulative sum"),
    (
        {"cu_seqlens": cu(7, 13), "initial_state": torch.zeros(2, 2, 8, 8)},
        ShapeError,
        "initial_state",
        "Lengths? cu_seqlens is their cumulative sum",
    ),
    (
        {"v": X["v"][..., :4], "initial_state": torch.zeros(1, 2, 4, 8)},
        ShapeError,
        "initial_state",
        "Pass state_v_first=True",
    ),
    (
        {"v": X["v"][..., :4], "initial_state": torch.zeros(1, 2, 8, 4), "state_v_first": True},
        ShapeError,
        "initial_state",
        "Pass state_v_first=False",
    ),
    ({"q": X["q"].transpose(1, 2)}, ShapeError, "q", "pass q.transpose(1, 2)"),
    ({n: X[n].transpose(1, 2) for n in "qk"}, ShapeError, "q", "T=20"),
    ({"v": X["v"].transpose(1, 2)}, ShapeError, "v", "pass v.transpose(1, 2)"),
    ({"beta": X["beta"].mT}, ShapeError, "beta", "pass beta.transpose(1, 2)"),
    ({"use_graph": True}, ArgumentError, "use_graph", "unless cu_seqlens"),
    ({"max_num_seqs": 1}, ArgumentError, "max_num_seqs", "use_graph"),
    ({"max_num_seqs": 2, "use_graph": True, "cu_seqlens": cu(0, 20)}, ArgumentError, "max_num_seqs", "N=1"),
    (
        {"max_num_seqs": 2**63, "use_graph": True, "cu_seqlens": cu(0, 20)},
        ArgumentError,
        "max_num_seqs",
        "64 bits",
    ),
    ({"max_num_seqs": 0, "use_graph": True, "cu_seqlens": cu(0, 20)}, ArgumentError, "max_num_seqs", "N=1"),
    ({"q": X["q"].to_sparse()}, ArgumentError, "q", "torch.sparse_coo"),
    ({"beta": X["beta"].to_sparse()}, ArgumentError, "beta", "torch.sparse_coo"),
    ({"cu_seqlens": cu(0, 20).to_sparse()}, ArgumentError, "cu_seqlens", "torch.sparse_coo"),
    ({"k": X["k"].to_mkldnn()}, ArgumentError, "k", "torch._mkldnn"),
    ({"g": NESTED}, ArgumentError, "g", "a nested tensor"),
    ({"q": JAGGED}, ArgumentError, "q", "a nested tensor"),
    ({"cp_context": object()}, ArgumentError, "cp_context", "integrations"),
    ({"context_parallel": "on"}, ArgumentError, "context_parallel", "'off'"),
    ({"context_parallel": NoText()}, DtypeError, "context_parallel", "int 3"),
    ({"context_parallel": 4}, DtypeError, "context_parallel", "int 4"),
    ({"backend": 90}, DtypeError, "backend", "int 90"),
    ({"pin": "yes"}, DtypeError, "pin", "bool"),
    ({"out": torch.zeros(1, 20, 2, 9)}, ShapeError, "out[0] (o)", "[1, 20, 2, 8]"),
    ({"out": torch.zeros(1, 20, 2, 8).bfloat16()}, DtypeError, "out[0] (o)", "torch.float32"),
    ({"out": torch.zeros(1, 20, 8, 2).mT}, StrideError, "out[0] (o)", "contiguous"),
    ({"out": X["v"]}, ArgumentError, "out[0] (o)", "v"),
    ({"out": (None, torch.zeros(1, 2, 8, 8))}, ArgumentError, "out[1] (final_state)", "does not ask"),
    ({"out": (1, 2, 3, 4)}, DtypeError, "out", "up to 3"),
    ({"out": 3}, DtypeError, "out", "int 3"),
    ({"out": X["v"].to_sparse()}, ArgumentError, "out[0] (o)", "torch.sparse_coo"),
    (
        {"workspace": torch.zeros(4, dtype=torch.uint8).to_sparse()},
        ArgumentError,
        "workspace",
        "torch.sparse_coo",
    ),
    ({"workspace": torch.zeros(4)}, ArgumentError, "workspace", "uint8"),
]
