"""The floor of decoding (`rmw`): a read and a write of the same states, computed by `benchmarks.rmw` on a GPU and by torch on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda_core.bench.decode import Launch, Problem


def floors(problem: Problem) -> list[Launch]:
    """Returns the variants of `rmw`, which multiply the states of the slots by -1, so that their magnitudes stay."""
    pool, slots = problem.pool, problem.slots.squeeze(-1)

    def launch(function: Callable[[Tensor], Any]) -> Launch:
        def check() -> dict[str, Any]:
            changed, kept = slots[0].long(), slots[1].long()
            want = torch.cat([-pool[changed], pool[kept]])
            function(slots[0])
            found = torch.cat([pool[changed], pool[kept]])
            return {"error_o": None, "error_state": (found - want).abs().max().item()}

        return Launch([partial(function, s) for s in slots], check)

    return [launch(function) for function in _multiplications(pool)]


def _multiplications(pool: Tensor) -> list[Callable[[Tensor], Any]]:
    """Returns functions that multiply the states of slots by -1: `benchmarks.rmw` on a GPU, torch on a CPU."""
    if pool.device.type == "cpu":
        return [lambda slots: pool.index_copy_(0, slots.long(), -pool[slots.long()])]
    from benchmarks.rmw import Arguments, RmwConfig, RmwKernel
    from kda_cute import arch_of_device, arguments, get_kernel

    leading = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16, device=pool.device)
    arch, name = arch_of_device(pool.device), str(pool.dtype).removeprefix("torch.")

    def function(loads: int) -> Callable[[Tensor], Any]:
        kernel, of_slot = get_kernel(RmwKernel, RmwConfig(loads, name), arch), pool[0].nbytes

        def run(slots: Tensor) -> None:
            values = arguments.pack(
                Arguments, states=pool, slots=slots, bytes=of_slot, N=len(slots), factor=-1.0
            )
            kernel(leading, *values)

        return run

    return [function(loads) for loads in (4, 8)]
