"""A program of calls, to run once with the DSL and once with exported kernels:

    python -m helpers.exported_calls RESULT DEVICE [--blocked]

It saves the outputs of every call, and what served them. ``--blocked``: the DSL cannot be imported.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from kda_core import chunk_kda, fused_recurrent_kda

RAW = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "lower_bound": -5.0,
    "safe_gate": True,
}


def inputs(device: str, B: int, T: int, H: int, HV: int, seed: int) -> dict[str, Any]:
    """Returns the tensors of a call with a gate in the kernel. They do not depend on the device."""
    random = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=random)
    tensors = {
        "q": make(B, T, H, 128).bfloat16(), "k": make(B, T, H, 128).bfloat16(), "v": make(B, T, HV, 128).bfloat16(),
        "g": make(B, T, HV, 128).bfloat16(), "beta": make(B, T, HV).bfloat16(), "A_log": make(HV), "dt_bias": make(HV, 128),
    }  # fmt: skip
    return {name: x.to(device) for name, x in tensors.items()}


def calls(device: str) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields the outputs of each call."""
    common: dict[str, Any] = {**RAW, "output_final_state": True, "context_parallel": "off"}
    yield "prefill", list(chunk_kda(**inputs(device, 1, 300, 2, 2, 0), **common))
    packed = torch.tensor([0, 70, 70, 200], device=device)
    yield "packed", list(chunk_kda(**inputs(device, 1, 200, 2, 4, 1), **common, cu_seqlens=packed))
    x = inputs(device, 2, 130, 1, 1, 2)
    state = torch.randn(2, 1, 128, 128, generator=torch.Generator().manual_seed(3)).to(device)
    yield "state", list(chunk_kda(**x, **common, initial_state=state))
    x = inputs(device, 1, 200, 1, 2, 4)
    for name in ("q", "k", "v", "g", "beta"):
        x[name].requires_grad_()
    o, final = chunk_kda(**x, **common)
    (o.float().square().sum() + final.square().sum()).backward()
    yield "backward", [o.detach(), *(x[name].grad for name in ("q", "k", "v", "g", "beta"))]
    pool = torch.randn(6, 2, 128, 128, generator=torch.Generator().manual_seed(5)).to(device)
    slots = torch.tensor([3, 1, 4], dtype=torch.int32, device=device)
    step: dict[str, Any] = {name: value for name, value in RAW.items() if name != "safe_gate"}
    step |= {
        "initial_state": pool,
        "ssm_state_indices": slots,
        "state_v_first": True,
        "output_final_state": True,
    }
    o, _ = fused_recurrent_kda(**inputs(device, 3, 1, 2, 2, 6), **step)
    yield "decode", [o, pool]
    found: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: found.extend(chunk_kda(**inputs(device, 1, 300, 2, 2, 0), **common))
    )
    thread.start()
    thread.join()
    yield "thread", found
    if device == "cuda":
        x = inputs(device, 3, 1, 2, 2, 7)
        out = torch.empty_like(x["v"])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fused_recurrent_kda(**x, **step, out=out)
        graph.replay()
        yield "graph", [out, pool]
        x = inputs(device, 1, 300, 2, 2, 8)
        chunk_kda(**x, **common)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # of a cooperative launch
            found = list(chunk_kda(**x, **common))
        x["v"].add_(1)
        graph.replay()
        yield "graph of a prefill", found


def main(result: str, device: str, *options: str) -> None:
    """Runs the program."""
    if options == ("--blocked",):
        for name in ("cutlass", "tvm_ffi"):
            sys.modules[name] = None  # type: ignore[assignment]
    from kda_core.registry import record_calls
    from kda_cute import cache_info

    outputs, seconds = {}, []
    with record_calls() as served:
        start = time.perf_counter()
        for name, tensors in calls(device):
            outputs[name] = [x.cpu() for x in tensors]
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
    info = cache_info()
    report = {
        "outputs": outputs, "backends": {call.backend for call in served}, "seconds": seconds,
        "exported": info.exported, "others": info.loaded + info.compiled,
        "dsl": any(sys.modules.get(name) is not None for name in ("cutlass", "tvm_ffi")),
    }  # fmt: skip
    torch.save(report, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
