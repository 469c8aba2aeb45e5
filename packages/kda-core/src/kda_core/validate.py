"""Checks of a call's metadata: presence, shape, dtype, device, strides and addresses of its tensors.

No check reads the contents of a tensor, so none waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kda_core.contract import (
    ALIGNMENT,
    HALF_DTYPES,
    INPUT_DTYPES,
    WORKSPACE_ALIGNMENT,
    KdaInputs,
    KdaOptions,
    KdaOutputs,
    ProblemShape,
    Tensors,
    intermediate_states_count,
    intermediate_states_shape,
    unchecked,
)
from kda_core.errors import ArgumentError, DeviceError, DtypeError, ShapeError, StrideError, describe
from kda_core.offsets import CUMULATE

_INDEX_DTYPES = (torch.int32, torch.int64)
_DEVICE_TENSORS = tuple(name for name in Tensors._fields if name != "cu_seqlens_cpu")


def device_arch(device: torch.device) -> tuple[int, int] | None:
    """Returns the compute capability of a CUDA device, None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def check_layout(name: str, x: Tensor) -> None:
    """Checks that a tensor has strides.

    Raises:
        ArgumentError: a sparse, nested or otherwise not strided tensor; the message names the layout.
    """
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        raise ArgumentError(name, "a dense tensor", kind)


def check_layouts(names: Iterable[str], tensors: Iterable[Tensor | None]) -> None:
    """Checks that all tensors that are not None have strides, as `check_layout`. ``names``: of the arguments, in the same order."""
    for name, x in zip(names, tensors):
        if x is not None:
            check_layout(name, x)


# ---- inputs


def problem_shape(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    options: KdaOptions,
) -> ProblemShape:
    """Checks presence, shape, dtype and device of each tensor of a call, and returns the metadata. Shapes and dtypes are
    those of `kda_core.contract.Tensors`.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: the message names the argument, what was expected and what came.
    """
    for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        _tensor(name, x)
    if q.dim() != 4:
        raise ShapeError("q", "[B, T, H, K], 4 dimensions", str(list(q.shape)))
    if q.dtype not in INPUT_DTYPES:
        raise DtypeError("q", " or ".join(map(str, INPUT_DTYPES)), str(q.dtype))
    if v.dim() != 4:
        raise ShapeError("v", "[B, T, HV, V], 4 dimensions", str(list(v.shape)))
    if not q.shape[1:2] == k.shape[1:2] == v.shape[1:2] == g.shape[1:2] == beta.shape[1:2]:
        _check_order(q=q, k=k, v=v, g=g, beta=beta)
    (B, T, H, K), (HV, V), device = q.shape, v.shape[2:], q.device
    if min(B, H, K, V) < 1:
        raise ShapeError("q" if min(B, H, K) < 1 else "v", "B, H, K and V of at least 1", str([B, H, K, V]))
    if HV < H or HV % H != 0:
        raise ShapeError("v", f"a head count HV that is a multiple of H={H}", f"HV={HV}")
    gates = tuple(dict.fromkeys((torch.float32, torch.bfloat16, q.dtype)))
    wide = (torch.float64, torch.float32) if q.dtype == torch.float64 else (torch.float32,)
    _check("k", k, (B, T, H, K), "[B, T, H, K]", (q.dtype,), device)
    _check("v", v, (B, T, HV, V), "[B, T, HV, V]", (q.dtype,), device)
    _check("g", g, (B, T, HV, K), "[B, T, HV, K]", gates, device)
    hint = "A beta for every channel of v (FLA's headwise beta) is not served" if beta.dim() == 4 else ""
    _check("beta", beta, (B, T, HV), "[B, T, HV]", gates, device, hint)
    _check_gate_parameters(A_log, dt_bias, options, (HV, K), wide + HALF_DTYPES, device)

    N = B
    if cu_seqlens is not None:
        N = _check_cu_seqlens(_tensor("cu_seqlens", cu_seqlens), cu_seqlens_cpu, B, device)
    elif cu_seqlens_cpu is not None:
        raise ArgumentError("cu_seqlens_cpu", "None unless cu_seqlens is given", describe(cu_seqlens_cpu))
    elif options.use_graph:
        raise ArgumentError("use_graph", "False unless cu_seqlens is given", "True")
    if options.max_num_seqs is not None and options.max_num_seqs != N:
        raise ArgumentError(
            "max_num_seqs", f"the number of sequences N={N} (cu_seqlens is padded)", str(options.max_num_seqs)
        )

    state = (N, HV, V, K) if options.state_v_first else (N, HV, K, V)
    if initial_state is not None:
        symbols = "[N, HV, V, K]" if options.state_v_first else "[N, HV, K, V]"
        came, hint = tuple(_tensor("initial_state", initial_state).shape), ""
        if came == (*state[:2], state[3], state[2]):
            hint = f"Pass state_v_first={not options.state_v_first} for states of this layout"
        elif cu_seqlens is not None and came == (N + 1, *state[1:]):
            hint = CUMULATE
        _check("initial_state", initial_state, state, symbols, wide, device, hint)

    values = {
        "B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V, "N": N,
        "dtype": q.dtype, "g_dtype": g.dtype, "beta_dtype": beta.dtype,
        "index_dtype": None if cu_seqlens is None else cu_seqlens.dtype,
        "has_A_log": A_log is not None, "has_dt_bias": dt_bias is not None,
        "has_initial_state": initial_state is not None,
        "device_type": device.type, "arch": device_arch(device), "options": options.resolved(K),
        "pool": None, "journal": None,
    }  # fmt: skip
    return unchecked(ProblemShape, values)


def _check_gate_parameters(
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    options: KdaOptions,
    sizes: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Checks A_log and dt_bias; `sizes` is (HV, K)."""
    HV, K = sizes
    if not options.use_gate_in_kernel:
        for name, given in {"A_log": A_log, "dt_bias": dt_bias}.items():
            if given is not None:
                wanted = "None unless use_gate_in_kernel=True (g is the decay itself)"
                raise ArgumentError(name, wanted, describe(given))
    elif A_log is None and options.lower_bound is None:
        wanted = "a tensor [HV] with use_gate_in_kernel=True and lower_bound=None"
        raise ArgumentError("A_log", wanted, "None")
    if A_log is not None:
        if _tensor("A_log", A_log).numel() != HV:
            wanted = f"[HV] = [{HV}], or as many elements in another shape"
            raise ShapeError("A_log", wanted, str(list(A_log.shape)))
        _check("A_log", A_log, tuple(A_log.shape), "", dtypes, device)
    if dt_bias is not None:
        flat = _tensor("dt_bias", dt_bias).dim() == 1
        shape, symbols = ((HV * K,), "[HV*K]") if flat else ((HV, K), "[HV, K]")
        _check("dt_bias", dt_bias, shape, symbols, dtypes, device)


def _check_cu_seqlens(cu_seqlens: Tensor, host: Tensor | None, B: int, device: torch.device) -> int:
    """Checks cu_seqlens and its host copy, and returns N."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ShapeError("cu_seqlens", "[N+1] with N of at least 1", str(list(cu_seqlens.shape)))
    if B != 1:
        raise ShapeError("q", "a batch size of 1 with cu_seqlens (pack the sequences along T)", f"B={B}")
    shape = tuple(cu_seqlens.shape)
    _check("cu_seqlens", cu_seqlens, shape, "[N+1]", _INDEX_DTYPES, device)
    if host is not None:
        _tensor("cu_seqlens_cpu", host)
        cpu = torch.device("cpu")
        _check("cu_seqlens_cpu", host, shape, "[N+1], as cu_seqlens,", _INDEX_DTYPES, cpu)
    return cu_seqlens.shape[0] - 1


def _check_order(**tensors: Tensor) -> None:
    """Detects [B, H, T, ...] by name of the tensor that has this order. Without this check the error for q in that order
    would name v.

    Raises:
        ShapeError: the second dimension of a tensor is not T, but its third is; T is the second dimension of most tensors.
    """
    tokens = [x.shape[1] for x in tensors.values() if x.dim() > 1]
    T = max(tokens, key=tokens.count)
    for name, x in tensors.items():
        if x.dim() > 2 and x.shape[1] != T and x.shape[2] == T:
            wanted = f"[B, T, ...] with T={T}, as most of q, k, v, g and beta"
            hint = f"Tokens come before heads: pass {name}.transpose(1, 2)"
            raise ShapeError(name, wanted, str(list(x.shape)), hint)


def _tensor(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise DtypeError(name, "a torch.Tensor", describe(x))
    return x


def _check(
    name: str,
    x: Tensor,
    shape: tuple[Any, ...],
    symbols: str,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    hint: str = "",
) -> None:
    if x.shape != shape:
        raise ShapeError(name, f"{symbols} = {list(shape)}", str(list(x.shape)), hint)
    if x.dtype not in dtypes:
        raise DtypeError(name, " or ".join(str(d) for d in dict.fromkeys(dtypes)), str(x.dtype))
    if x.device != device:
        raise DeviceError(name, f"device {device} (that of q)", str(x.device))


# ---- outputs

OUTPUT_ARGUMENTS = ("out[0] (o)", "out[1] (final_state)", "out[2] (h)", "workspace")
"""The fields of `KdaOutputs`, in order, as a caller knows them."""

_O, _FINAL_STATE, _H, _WORKSPACE = OUTPUT_ARGUMENTS


def check_outputs(inputs: KdaInputs, outputs: KdaOutputs, workspace_bytes: int = 0) -> None:
    """Checks shape, dtype, device and contiguity of tensors that the caller passed to be written.

    Raises:
        ShapeError, DtypeError, DeviceError, StrideError, ArgumentError: the message names the tensor.
    """
    s, device = inputs.shape, inputs.q.device
    options, state, h = s.options, outputs.final_state, outputs.intermediate_states
    _check_output(_O, outputs.o, (s.B, s.T, s.HV, s.V), "[B, T, HV, V]", s.dtype, device)
    if options.output_final_state:
        symbols = "[N, HV, V, K]" if options.state_v_first else "[N, HV, K, V]"
        _check_output(_FINAL_STATE, state, s.state_shape, symbols, s.state_dtype, device)
    elif state is not None:
        raise ArgumentError(_FINAL_STATE, "None, because this call does not ask for it", describe(state))
    if options.return_intermediate_states:
        symbols = "[B, NT, HV, V, K]" if options.state_v_first else "[B, NT, HV, K, V]"
        wanted = intermediate_states_shape(s, intermediate_states_count(inputs))
        _check_output(_H, h, wanted, symbols, torch.bfloat16, device)
    elif h is not None:
        raise ArgumentError(_H, "None, because this call does not ask for it", describe(h))
    if (w := outputs.workspace) is not None:
        if w.dtype != torch.uint8 or w.dim() != 1 or not w.is_contiguous():
            came = f"{describe(w)}, strides {list(w.stride())}"
            raise ArgumentError(_WORKSPACE, "a contiguous 1-D uint8 tensor", came)
        if w.device != device:
            raise DeviceError(_WORKSPACE, f"device {device} (that of q)", str(w.device))
        if w.numel() < workspace_bytes:
            raise ShapeError(_WORKSPACE, f"at least {workspace_bytes} bytes", f"{w.numel()} bytes")


def _check_output(
    name: str, x: object, shape: tuple[Any, ...], symbols: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = _tensor(name, x)
    _check(name, x, shape, symbols, (dtype,), device)
    if not x.is_contiguous():
        raise StrideError(name, "a contiguous tensor", f"strides {list(x.stride())}")


def extent(x: Tensor) -> int:
    """Returns the bytes from the first element of a tensor to the end of its last one."""
    if x.is_contiguous() or not x.numel():
        return x.nbytes
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))) * x.itemsize


def check_memory(inputs: KdaInputs, outputs: KdaOutputs) -> None:
    """Checks that outputs are aligned and share no memory with an input or with each other, because kernels read inputs
    while they write outputs.

    Raises:
        ArgumentError: the message names the tensor, and the tensor with which it shares memory.
    """
    wide = ALIGNMENT if inputs.shape.device_type == "cpu" else WORKSPACE_ALIGNMENT
    written = []  # (first byte, end, name)
    for name, x, wanted in (
        (_O, outputs.o, ALIGNMENT),
        (_FINAL_STATE, outputs.final_state, ALIGNMENT),
        (_H, outputs.intermediate_states, ALIGNMENT),
        (_WORKSPACE, outputs.workspace, wide),
    ):
        if x is not None and (size := x.nbytes):
            first = x.data_ptr()
            if past := first % wanted:
                expected = f"memory that starts at a multiple of {wanted} bytes"
                raise ArgumentError(name, expected, f"{past} bytes past one")
            written.append((first, first + size, name))
    spans = list(written)
    for name in _DEVICE_TENSORS:
        if (x := getattr(inputs, name)) is not None and (size := extent(x)):
            spans.append(((first := x.data_ptr()), first + size, name))
    for i, (first, end, name) in enumerate(written):
        for first2, end2, other in spans[i + 1 :]:
            if first < end2 and first2 < end:
                raise ArgumentError(
                    name, f"memory of its own, not shared with {other}", "overlapping tensors"
                )
