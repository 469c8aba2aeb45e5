"""The main job on real input: a Kimi-Linear-shaped layer over a text that ships with Python.

Bytes of the text are tokens. They are embedded and projected to q, k, v, the gate and beta with the structure and the
initialisation of the public layer (linear projections, causal depthwise convolution of 4 taps with SiLU on q, k, v;
a rank-K gate projection; A_log = log U(1, 16); dt_bias = softplus^-1(exp U(log 0.001, log 0.1))), from fixed seeds.
The prefill then runs in one piece and in two, and both are held against the fp64 token loop.
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
from kda_core.errors import DeviceError, NoEligibleBackendError
from kda_core.registry import record_calls
from kda_core.testing import error, token_oracle, tolerance

HEAD_DIM = 128
TEXT_MODULE = "pydoc_data.topics"  # the language reference's topics, some 700 kB of English and Python


class KimiLinearProjections(nn.Module):
    """What stands before the attention in a Kimi Linear layer: token ids [B, T] -> q, k, v, g, beta and the flags of
    `chunk_kda`."""

    def __init__(self, hidden_size: int, num_heads: int, conv_size: int = 4) -> None:
        super().__init__()
        self.num_heads, self.conv_size = num_heads, conv_size
        width = num_heads * HEAD_DIM
        self.embed = nn.Embedding(256, hidden_size)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, width, bias=False) for _ in range(3))
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, conv_size, groups=width, bias=False) for _ in range(3)
        )
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, HEAD_DIM, bias=False), nn.Linear(HEAD_DIM, width, bias=False)
        )
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.log(1 + 15 * torch.rand(num_heads)))
        dt = torch.exp(math.log(0.001) + torch.rand(width) * (math.log(0.1) - math.log(0.001)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = F.rms_norm(self.embed(ids), (self.embed.embedding_dim,))
        q, k, v = (
            F.silu(conv(F.pad(proj(x).mT, (self.conv_size - 1, 0))).mT)
            for proj, conv in zip((self.q_proj, self.k_proj, self.v_proj), self.convs)
        )
        heads = [y.unflatten(-1, (self.num_heads, HEAD_DIM)).contiguous() for y in (q, k, v, self.f_proj(x))]
        return dict(zip("qkvg", heads)) | {
            "beta": self.b_proj(x),
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
        }


@dataclass(frozen=True)
class Report:
    """What a demo run found; `ok` says whether every error is within its tolerance. Prints as text."""

    lines: tuple[str, ...]
    ok: bool

    def __str__(self) -> str:
        return "\n".join(self.lines)


def text() -> bytes:
    """The text, as bytes."""
    spec = importlib.util.find_spec(TEXT_MODULE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"this Python comes without {TEXT_MODULE}, the demo's text")
    return Path(spec.origin).read_bytes()


def layer_inputs(device: torch.device, tokens: int, num_heads: int, hidden_size: int) -> dict[str, Any]:
    """The arguments of `chunk_kda` for the first `tokens` bytes of the text, projections in bf16."""
    torch.manual_seed(0)
    layer = KimiLinearProjections(hidden_size, num_heads).requires_grad_(False).to(device)
    A_log, dt_bias = layer.A_log.clone(), layer.dt_bias.clone()  # fp32, whatever the weights are
    ids = torch.frombuffer(bytearray(text()[:tokens]), dtype=torch.uint8).long().to(device).unsqueeze(0)
    return layer.to(torch.bfloat16)(ids) | {"A_log": A_log, "dt_bias": dt_bias}


def run(
    device: str | None = None,
    tokens: int | None = None,
    backend: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Runs the demo.

    Args:
        device: "cpu" or "cuda"; by default "cuda" where there is one.
        tokens: length of the prefill; 65536 on a GPU, 4096 on a CPU by default, and at most the text.
        backend: the backend to use. None: the automatic choice, and where no GPU backend serves, the reference, with
            the reason printed.
        say: called with each line of the report as soon as it is known, and with each step before it begins.

    Raises:
        DeviceError: the device is "cuda", and torch finds no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device", "cpu (torch finds no CUDA GPU here)", "cuda")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = where.type == "cuda"
    heads, hidden = (32, 2304) if gpu else (4, 256)
    available = len(text())
    T = min(tokens or (65536 if gpu else 4096), available)
    cut = min(T * 3 // 8 + 5, T - 1)  # off every chunk boundary
    lines: list[str] = []

    def tell(*more: str) -> None:
        lines.extend(more)
        for line in more:
            say(line)

    tell(
        "KDA prefill of a real text",
        f"  text       {TEXT_MODULE}: {T} of {available} bytes, one token a byte",
        f"  layer      hidden {hidden}, H={heads}, K=V={HEAD_DIM}, 4-tap convolution, unbounded gate, bf16, seed 0",
        f"  step 1/4   inputs: embeddings, projections and convolutions of {T} tokens",
    )
    x = layer_inputs(where, T, heads, hidden)
    compiling = ", which may compile a kernel" if gpu else ""
    tell(f"  step 2/4   prefill in one piece of {T} tokens, after a first call{compiling}")
    try:
        kda_core.chunk_kda(**_piece(x, 0, 64), backend=backend)
    except NoEligibleBackendError as refusal:
        tell(*(f"  {line}" for line in str(refusal).splitlines()))
        backend = "reference"

    def prefill(start: int, end: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        piece = _piece(x, start, end)
        return kda_core.chunk_kda(**piece, initial_state=state, output_final_state=True, backend=backend)

    with torch.inference_mode(), record_calls() as calls:
        prefill(0, T, None)  # the first call may compile; it is not the one that is timed
        (o, state), seconds = _timed(lambda: prefill(0, T, None), where)
        tell(f"  step 3/4   prefill in two pieces, {cut} + {T - cut} tokens, the state passed on")
        ((o1, _s1), (o2, s2)), seconds2 = _timed(lambda: _two(prefill, cut, T), where)
        pieces = torch.cat([o1, o2], 1)
    with torch.inference_mode():
        tell(f"  step 4/4   fp64 token loop over {T} tokens, and the tolerance; this step takes longest")
        oracle_o, oracle_s = token_oracle(**x)
        limit_o, limit_s = tolerance(x, oracle=(oracle_o, oracle_s))
    ran = sorted({(c.backend, c.device_type) for c in calls})
    name = torch.cuda.get_device_name(where) if gpu else f"{torch.get_num_threads()} threads"
    tell(
        f"  ran on     {', '.join(f'{b} ({d})' for b, d in ran)}, {name}, torch {torch.__version__}",
        f"  one piece  {T} tokens in {seconds * 1e3:.1f} ms ({T / seconds:,.0f} tokens/s)",
        f"  two pieces {cut} + {T - cut} tokens in {seconds2 * 1e3:.1f} ms, the state passed on",
        "  exactness  largest relative Frobenius error over heads        output     state",
    )
    checks = [
        ("one piece against the fp64 token loop", error(o, oracle_o), error(state, oracle_s, state=True)),
        ("two pieces against the fp64 token loop", error(pieces, oracle_o), error(s2, oracle_s, state=True)),
        ("two pieces against one", error(pieces, o), error(s2, state, state=True)),
    ]
    tell(*(f"             {label:<47} {a:9.2e} {b:9.2e}" for label, a, b in checks))
    tell(f"             {'tolerance':<47} {limit_o:9.2e} {limit_s:9.2e}")
    ok = all(a <= limit_o and b <= limit_s for _, a, b in checks)
    tell("  result     exact within tolerance" if ok else "  result     OUT OF TOLERANCE")
    return Report(tuple(lines), ok)


def _two(prefill: Callable[..., Any], cut: int, T: int) -> tuple[Any, Any]:
    first = prefill(0, cut, None)
    return first, prefill(cut, T, first[1])


def _piece(x: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    return x | {n: x[n][:, start:end] for n in ("q", "k", "v", "g", "beta")}


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of `call` and its wall time in seconds, device work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start
