"""The demo: prefill of a Kimi-Linear-shaped layer over a text that ships with Python.

Bytes of the text are tokens. They are embedded and projected to q, k, v, the gate and beta with the structure and the
initialisation of the public layer (linear projections, causal depthwise convolution of 4 taps with SiLU on q, k, v;
a rank-K gate projection; A_log = log U(1, 16); dt_bias = softplus^-1(exp U(log 0.001, log 0.1))), from fixed seeds.
The prefill runs in one call and in two calls, and both results are compared with the fp64 token loop.

A named backend gets a layer that it serves, on a device and with head dimensions and a dtype that its spec declares. What the spec
does not declare (the gate, the normalisation, the sigmoid of beta) is computed in torch before the call.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kda_core
from kda_core.backend import BackendSpec
from kda_core.contract import SAFE_GATE_BOUND, Feature, KdaOptions, dtype_name
from kda_core.errors import DeviceError, NoEligibleBackendError
from kda_core.gates import l2_normalised, log_decay, step_size
from kda_core.registry import REGISTRY, default_arch, record_calls
from kda_core.testing import error, token_oracle, tolerance

HEAD_DIMS = (128, 128)
"""(K, V) of the layer, unless the named backend does not declare them."""
TEXT_MODULE = "pydoc_data.topics"
"""The topics of the language reference, some 700 kB of English and Python."""


class KimiLinearProjections(nn.Module):
    """The part of a Kimi Linear layer before its attention: token ids [B, T] -> q, k, v, g, beta and the flags of
    `chunk_kda`."""

    def __init__(
        self, hidden_size: int, num_heads: int, head_dims: tuple[int, int] = HEAD_DIMS, conv_size: int = 4
    ) -> None:
        super().__init__()
        self.num_heads, self.conv_size = num_heads, conv_size
        K, V = head_dims
        widths = [num_heads * size for size in (K, K, V)]
        self.embed = nn.Embedding(256, hidden_size)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, w, bias=False) for w in widths)
        self.convs = nn.ModuleList(nn.Conv1d(w, w, conv_size, groups=w, bias=False) for w in widths)
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, K, bias=False), nn.Linear(K, num_heads * K, bias=False)
        )
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.log(1 + 15 * torch.rand(num_heads)))
        dt = torch.exp(math.log(0.001) + torch.rand(num_heads * K) * (math.log(0.1) - math.log(0.001)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))

    def forward(self, ids: Tensor) -> dict[str, Any]:
        """Returns arguments of `chunk_kda`."""
        x = F.rms_norm(self.embed(ids), (self.embed.embedding_dim,))
        q, k, v = (
            F.silu(conv(F.pad(proj(x).mT, (self.conv_size - 1, 0))).mT)
            for proj, conv in zip((self.q_proj, self.k_proj, self.v_proj), self.convs)
        )
        heads = [y.unflatten(-1, (self.num_heads, -1)).contiguous() for y in (q, k, v, self.f_proj(x))]
        return dict(zip("qkvg", heads)) | {
            "beta": self.b_proj(x),
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
        }


@dataclass(frozen=True)
class Report:
    """The result of a run; prints as text.

    Attributes:
        lines: the printed lines.
        ok: whether every error is within its tolerance.
    """

    lines: tuple[str, ...]
    ok: bool

    def __str__(self) -> str:
        return "\n".join(self.lines)


def text() -> bytes:
    """Returns the text as bytes."""
    spec = importlib.util.find_spec(TEXT_MODULE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"this Python lacks {TEXT_MODULE}, which contains the demo's text")
    return Path(spec.origin).read_bytes()


def layer_inputs(
    device: torch.device,
    tokens: int,
    num_heads: int,
    hidden_size: int,
    head_dims: tuple[int, int] = HEAD_DIMS,
) -> dict[str, Any]:
    """Returns arguments of `chunk_kda` for the first `tokens` bytes of the text, with projections in bf16. `head_dims`: (K, V)."""
    torch.manual_seed(0)
    layer = KimiLinearProjections(hidden_size, num_heads, head_dims).requires_grad_(False).to(device)
    A_log, dt_bias = layer.A_log.clone(), layer.dt_bias.clone()  # fp32; the weights become bf16
    ids = torch.frombuffer(bytearray(text()[:tokens]), dtype=torch.uint8).long().to(device).unsqueeze(0)
    return layer.to(torch.bfloat16)(ids) | {"A_log": A_log, "dt_bias": dt_bias}


def served_inputs(x: dict[str, Any], spec: BackendSpec) -> dict[str, Any]:
    """Returns `layer_inputs` in a form that needs only what a backend declares.

    The result has the first declared dtype if bf16 is not declared. Without `gate_in_kernel` it has precomputed decays, without
    `unbounded_gate` decays that are bounded at -5.
    """
    dtypes, features = spec.dtypes or {dtype_name(torch.bfloat16)}, spec.features
    if dtype_name(torch.bfloat16) not in dtypes:
        dtype = getattr(torch, min(dtypes))
        x = x | {n: x[n].to(dtype) for n in ("q", "k", "v", "g", "beta")}
    if Feature.QK_L2NORM.value not in features:
        x = x | {n: l2_normalised(x[n].float()).to(x[n].dtype) for n in ("q", "k")}
        del x["use_qk_l2norm_in_kernel"]
    if Feature.BETA_SIGMOID.value not in features:
        x = x | {"beta": step_size(x["beta"].float(), KdaOptions(use_beta_sigmoid_in_kernel=True))}
        del x["use_beta_sigmoid_in_kernel"]
    unbounded = Feature.UNBOUNDED_GATE.value in features
    bound = None if unbounded else SAFE_GATE_BOUND
    if Feature.GATE_IN_KERNEL.value not in features:
        heads = x["g"].shape[2]
        gate = KdaOptions(use_gate_in_kernel=True, lower_bound=bound)
        decay = log_decay(
            x["g"].float(), x.pop("A_log").view(heads, 1), x.pop("dt_bias").view(heads, -1), gate
        )
        x = x | {"g": decay, "safe_gate": not unbounded}
        del x["use_gate_in_kernel"]
    elif not unbounded:
        x = x | {"lower_bound": bound}
    return x


def run(
    device: str | None = None,
    tokens: int | None = None,
    backend: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Runs the demo.

    Args:
        device: "cpu" or "cuda"; by default "cuda" if there is a GPU, and the named backend is not for CPUs only.
        tokens: length of the prefill; 65536 on a GPU, 4096 on a CPU by default, and at most the length of the text.
        backend: name of the backend to use; see `served_inputs`. None for the automatic choice; if no GPU backend serves the
            layer, the reference does, and the reason is printed.
        say: called with each line of the report, and with each step before it starts.

    Raises:
        DeviceError: the device is "cuda", and torch finds no GPU.
        BackendError: the named backend is not installed, or cannot serve the layer.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device", "cpu (torch finds no CUDA GPU here)", "cuda")
    spec = None if backend is None else REGISTRY.find(backend, "backend=").spec
    where = torch.device(device or ("cpu" if default_arch(spec) == "cpu" else "cuda"))
    gpu = where.type == "cuda"
    head_dims = HEAD_DIMS
    if spec is not None and spec.head_dims is not None and HEAD_DIMS not in spec.head_dims:
        head_dims = min(spec.head_dims)
    heads, hidden = (32, 2304) if gpu else (4, 256)
    available = len(text())
    T = min(tokens or (65536 if gpu else 4096), available)
    cut = min(T * 3 // 8 + 5, T - 1)  # off every chunk boundary
    lines: list[str] = []

    def report(*more: str) -> None:
        lines.extend(more)
        for line in more:
            say(line)

    report(
        "KDA prefill of a real text",
        f"  text       {TEXT_MODULE}: {T} of {available} bytes, one token a byte",
        f"  layer      hidden {hidden}, H={heads}, K={head_dims[0]}, V={head_dims[1]}, 4-tap convolution, bf16, seed 0",
        f"  step 1/4   inputs: embeddings, projections and convolutions of {T} tokens",
    )
    x = layer_inputs(where, T, heads, hidden, head_dims)
    features = frozenset(f.value for f in Feature)
    if spec is not None:
        x, features = served_inputs(x, spec), spec.features
    splits = {Feature.INITIAL_STATE.value, Feature.FINAL_STATE.value} <= features
    compiling = ", which may compile a kernel" if gpu else ""
    report(f"  step 2/4   prefill in one call of {T} tokens, after a first call{compiling}")
    try:
        kda_core.chunk_kda(**_tokens(x, 0, 64), backend=backend)
    except NoEligibleBackendError as refusal:
        report(*(f"  {line}" for line in str(refusal).splitlines()))
        backend = "reference"

    def prefill(start: int, end: int, state: Tensor | None) -> tuple[Tensor, Any]:
        states: dict[str, Any] = {"initial_state": state, "output_final_state": True} if splits else {}
        return kda_core.chunk_kda(**_tokens(x, start, end), **states, backend=backend)

    with torch.inference_mode(), record_calls() as calls:
        prefill(0, T, None)  # not timed, because it may compile a kernel
        (o, state), seconds = _timed(lambda: prefill(0, T, None), where)
        if splits:
            report(f"  step 3/4   prefill in two calls, {cut} + {T - cut} tokens, the state passed on")
            ((o1, _s1), (o2, s2)), seconds2 = _timed(lambda: _two(prefill, cut, T), where)
            joined = torch.cat([o1, o2], 1)
        else:
            report(f"  step 3/4   skipped: {backend} does not declare initial_state and final_state")
    with torch.inference_mode():
        report(f"  step 4/4   fp64 token loop over {T} tokens, and the tolerance; this step takes longest")
        oracle_o, oracle_s = token_oracle(**x)
        limit_o, limit_s = tolerance(x, oracle=(oracle_o, oracle_s))
    ran = sorted({(c.backend, c.device_type) for c in calls})
    name = torch.cuda.get_device_name(where) if gpu else f"{torch.get_num_threads()} threads"
    report(
        f"  ran on     {', '.join(f'{b} ({d})' for b, d in ran)}, {name}, torch {torch.__version__}",
        f"  one call   {T} tokens in {seconds * 1e3:.1f} ms ({T / seconds:,.0f} tokens/s)",
    )
    if splits:
        report(f"  two calls  {cut} + {T - cut} tokens in {seconds2 * 1e3:.1f} ms, the state passed on")
        checks = [
            ("one call against the fp64 token loop", error(o, oracle_o), error(state, oracle_s, state=True)),
            (
                "two calls against the fp64 token loop",
                error(joined, oracle_o),
                error(s2, oracle_s, state=True),
            ),
            ("two calls against one", error(joined, o), error(s2, state, state=True)),
        ]
    else:
        checks = [("one call against the fp64 token loop", error(o, oracle_o), 0.0)]
    report("  accuracy   largest relative Frobenius error over heads        output     state")
    report(*(f"             {label:<47} {a:9.2e} {b:9.2e}" for label, a, b in checks))
    report(f"             {'tolerance':<47} {limit_o:9.2e} {limit_s:9.2e}")
    ok = all(a <= limit_o and b <= limit_s for _, a, b in checks)
    report("  result     all errors are within tolerance" if ok else "  result     OUT OF TOLERANCE")
    return Report(tuple(lines), ok)


def _two(prefill: Callable[..., Any], cut: int, T: int) -> tuple[Any, Any]:
    first = prefill(0, cut, None)
    return first, prefill(cut, T, first[1])


def _tokens(x: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    return x | {n: x[n][:, start:end] for n in ("q", "k", "v", "g", "beta")}


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Returns the result of `call` and its wall time in seconds, device work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start
