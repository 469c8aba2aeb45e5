"""The kernel of kda-sm90 on the emulator: its launch as ``kernels.prefill.PrefillKernel.__call__`` makes
it."""

from __future__ import annotations

import functools
from typing import Any

import torch

import ptx_emulator
from kda_core.cute.ptxas import keep_ptx
from kda_sm90 import layouts
from kda_sm90.config import ARCH, THREADS, PrefillConfig


@functools.cache
def compiled(config: PrefillConfig) -> tuple[str, int]:
    """The PTX of a variant, and its dynamic shared memory."""
    from kda_sm90.kernels.prefill import PrefillKernel

    return keep_ptx(PrefillKernel, config, ARCH), PrefillKernel(config).shared_bytes


def launch(
    config: PrefillConfig,
    seed: int = 0,
    tensors: tuple[torch.Tensor, ...] = (),
    scratch: tuple[torch.Tensor, ...] = (),
    races: tuple[str, ...] = ("shared", "global"),
    **named: Any,
) -> int:
    """One launch with the arguments that ``kernels.prefill.ARGUMENTS`` names, CPU tensors among them; what is
    not named is 0. The number of instructions."""
    from kda_sm90.kernels.prefill import ARGUMENTS

    names = [name for group in ARGUMENTS.values() for name in group]
    assert named.keys() <= set(names), named.keys() - set(names)
    values = [0 if named.get(name) is None else named[name] for name in names]
    ptx, shared = compiled(config)
    grid = (named["preparers"] + named["streams"] * (2 // config.warpgroups),)
    return ptx_emulator.run(
        ptx, grid, (THREADS,), shared, values, tensors, scratch=scratch, seed=seed, races=races
    )


def config_of(x: dict[str, Any], chunk: int, warpgroups: int, vote: bool | None = None) -> PrefillConfig:
    """The variant that serves the arguments of a call."""
    bounded = x.get("lower_bound") is not None
    gate: Any = "precomputed" if not x.get("use_gate_in_kernel") else "bounded" if bounded else "softplus"
    dtype: Any = str(x["g"].dtype)[6:]
    return PrefillConfig(
        chunk,
        warpgroups,
        gate,
        gate != "bounded" if vote is None else vote,
        dtype,
        x.get("return_intermediate_states", False),
    )


def prefill(
    x: dict[str, Any],
    config: PrefillConfig,
    streams: int = 1,
    depth: int = 8,
    preparers: int = 1,
    seed: int = 0,
) -> tuple[torch.Tensor, ...]:
    """o, the final states, and with ``config.states`` those every 64 tokens, of the arguments of a call."""
    (B, T, H, K), HV, offsets = x["q"].shape, x["v"].shape[2], x.get("cu_seqlens")
    N = B if offsets is None else len(offsets) - 1
    lengths = [T] * B if offsets is None else offsets.diff().tolist()
    # On a line of its own, as an allocator of the device places it.
    size = layouts.workspace_bytes(streams, depth, config.chunk)
    room = torch.full((size + 128,), 0xFF, dtype=torch.uint8)
    workspace = room[-room.data_ptr() % 128 :][:size]
    views = layouts.split_workspace(workspace, streams, depth, config.chunk)
    counters = slice(size - views.counters.numel() * 4, size)
    outputs = {
        "o": torch.zeros_like(x["v"]),
        "final_state": torch.empty(N, HV, K, K),
    }
    count = sum(-(-n // 64) for n in lengths)
    if config.states:
        rows = B if offsets is None else 1
        outputs["states"] = torch.empty(rows, count // rows, HV, K, K, dtype=torch.bfloat16)
    beta = 1.0 if x.get("use_beta_sigmoid_in_kernel") else 0.0
    optional = {n: x.get(n) for n in ("initial_state",)} | {
        "a_log": x.get("A_log"),
        "dt_bias": x.get("dt_bias"),
    }
    # Where a ring is used again, relaxed counters tell so, by design: what is written then cannot overtake
    # what was read.
    slots = layouts.slot_count(B, T, config.chunk, None if offsets is None else N)
    races = ("shared", "global") if depth >= slots * HV else ("shared",)
    unwritten = [outputs[name] for name in outputs if name != "o"] + [workspace[: counters.start]]
    launch(
        config, seed, (workspace[counters],), tuple(unwritten), races,
        **{name: x[name] for name in ("q", "k", "v", "g", "beta")}, **optional, **outputs, offsets=offsets,
        workspace=workspace.data_ptr(), ticket=0x1234567890ABCDEF, state_count=count if config.states else 0,
        N=N, T=T, H=H, HV=HV,
        offset_bytes=0 if offsets is None else offsets.element_size(), beta_bytes=x["beta"].element_size(),
        l2norm=int(x.get("use_qk_l2norm_in_kernel", False)), v_first=int(x.get("state_v_first", False)),
        every=64 // config.chunk, preparers=preparers, streams=streams, depth=depth, scale=x.get("scale") or K**-0.5,
        lower_bound=x.get("lower_bound") or 0.0, beta_factor=beta * (1 + x.get("allow_neg_eigval", False)),
    )  # fmt: skip
    return tuple(outputs.values())
