"""Launches the prefill kernel of kda-sm90 on the emulator as ``kernels.prefill.PrefillKernel.__call__`` does."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from helpers.compiled import compiled as cached
from helpers.emulator import ptx
from kda_cute.jit.dsl import trace
from kda_cute.jit.key import Variant
from kda_sm90 import layouts
from kda_sm90.arguments import PrefillArguments
from kda_sm90.config import ARCH, PrefillConfig


def ptx_of(kernel: type, config: object) -> str:
    """The PTX of a variant. Its machine code is added to `ptx.images` unless that is None."""
    if ptx.images is None:
        return cached(kernel, config, ARCH).ptx
    with tempfile.TemporaryDirectory() as folder:
        made = trace(Variant(kernel, config, ARCH), f"--keep-ptx --keep-cubin --dump-dir {folder}")
    ptx.images[made.__ptx__] = made.__cubin__
    return made.__ptx__


@functools.cache
def compiled(config: PrefillConfig) -> tuple[str, int]:
    """The PTX of a variant, and the bytes of its dynamic shared memory."""
    from kda_sm90.kernels.prefill import PrefillKernel

    return ptx_of(PrefillKernel, config), PrefillKernel(config).shared_bytes


def launch(
    config: PrefillConfig,
    seed: int = 0,
    tensors: tuple[torch.Tensor, ...] = (),
    scratch: tuple[torch.Tensor, ...] = (),
    races: tuple[str, ...] = ("shared", "global"),
    **named: Any,
) -> int:
    """One launch. ``named``: arguments of `kda_sm90.arguments.PrefillArguments`, CPU tensors among them; absent arguments are 0. Returns
    the number of executed instructions."""
    assert named.keys() <= set(PrefillArguments._fields), named.keys() - set(PrefillArguments._fields)
    values = [0 if named.get(name) is None else named[name] for name in PrefillArguments._fields]
    text, shared = compiled(config)
    grid = (named["intra_chunk_ctas"] + named["queues"] * (config.halves // config.warpgroups),)
    return ptx.execute(
        text, grid, (config.threads,), shared, values, tensors, scratch=scratch, seed=seed, races=races
    )


def config_of(x: dict[str, Any], chunk: int, warpgroups: int, unbounded: bool | None = None) -> PrefillConfig:
    """The variant that serves the arguments of a call."""
    bounded = x.get("lower_bound") is not None
    gate: Any = "precomputed" if not x.get("use_gate_in_kernel") else "bounded" if bounded else "softplus"
    dtype: Any = str(x["g"].dtype)[6:]
    return PrefillConfig(
        chunk,
        warpgroups,
        gate,
        gate != "bounded" if unbounded is None else unbounded,
        dtype,
        x.get("return_intermediate_states", False),
    )


def described(x: dict[str, Any], config: PrefillConfig) -> dict[str, Any]:
    """The arguments of a launch that follow from those of a call: numbers, and inputs other than states."""
    (B, T, H, K), HV, offsets = x["q"].shape, x["v"].shape[2], x.get("cu_seqlens")
    beta = 1.0 if x.get("use_beta_sigmoid_in_kernel") else 0.0
    return dict(
        **{name: x[name] for name in ("q", "k", "v", "g", "beta")}, a_log=x.get("A_log"), dt_bias=x.get("dt_bias"),
        offsets=offsets, N=B if offsets is None else len(offsets) - 1, T=T, H=H, HV=HV,
        offset_bytes=0 if offsets is None else offsets.element_size(), beta_bytes=x["beta"].element_size(),
        l2norm=int(x.get("use_qk_l2norm_in_kernel", False)), v_first=int(x.get("state_v_first", False)),
        every=64 // config.chunk, scale=x.get("scale") or K**-0.5, lower_bound=x.get("lower_bound") or 0.0,
        beta_factor=beta * (1 + x.get("allow_neg_eigval", False)),
    )  # fmt: skip


def empty_workspace(size: int) -> torch.Tensor:
    """``size`` bytes of 0xFF at a multiple of 128, the alignment of a device allocation."""
    memory = torch.full((size + 128,), 0xFF, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 128 :][:size]


def prefill(
    x: dict[str, Any],
    config: PrefillConfig,
    queues: int = 1,
    depth: int = 8,
    intra_chunk_ctas: int = 1,
    seed: int = 0,
    counters_after: dict[str, int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Execute a call: o, the final states, and with ``config.states`` the states every 64 tokens. ``counters_after`` receives the
    counter ``claimed`` of the launch."""
    call = described(x, config)
    (B, T, _, K), HV, N, offsets = x["q"].shape, call["HV"], call["N"], call["offsets"]
    lengths = [T] * B if offsets is None else offsets.diff().tolist()
    size = layouts.workspace_bytes(queues * depth, queues, config.chunk)
    workspace = empty_workspace(size)
    views = layouts.split_workspace(workspace, queues * depth, queues, config.chunk)
    start = views.counters.data_ptr() - workspace.data_ptr()
    counters = slice(start, start + views.counters.numel() * 4)
    outputs = {
        "o": torch.zeros_like(x["v"]),
        "final_state": torch.empty(N, HV, K, K),
    }
    count = sum(-(-n // 64) for n in lengths)
    if config.states:
        rows = B if offsets is None else 1
        outputs["states"] = torch.empty(rows, count // rows, HV, K, K, dtype=torch.bfloat16)
    # The consumer publishes freed entries of a ring by relaxed counters, by design: a later write cannot overtake the reads
    # before it. The check of global memory would report a race, so it is on only if no ring entry is used twice.
    slots = layouts.slot_count(B, T, config.chunk, None if offsets is None else N)
    races = ("shared", "global") if depth >= slots * HV else ("shared",)
    unwritten = [outputs[name] for name in outputs if name != "o"]
    unwritten += [workspace[: counters.start], workspace[counters.stop :]]
    launch(
        config, seed, (workspace[counters],), tuple(unwritten), races,
        **call, **outputs, initial_state=x.get("initial_state"), state_count=count if config.states else 0,
        workspace=workspace.data_ptr(), ticket=0x1234567890ABCDEF, intra_chunk_ctas=intra_chunk_ctas, queues=queues, depth=depth,
    )  # fmt: skip
    ticket = layouts.LaunchCounter.TICKET
    assert not views.counters[ticket : ticket + 2].any(), "a replay would find the ticket of this launch"
    if counters_after is not None:
        counters_after["claimed"] = int(views.counters[layouts.LaunchCounter.CLAIMED])
    return tuple(outputs.values())


def in_segments(
    x: dict[str, Any],
    lengths: tuple[int, ...],
    chunk: int,
    queues: tuple[int, int],
    intra_chunk_ctas: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Execute a call with one sequence in segments of the given lengths: o and the final state. The first launch summarises the
    segments with chains of two warpgroups, this function merges the states, and the second launch executes the segments with
    chains of one warpgroup. ``queues``: of the two launches."""
    packed = x | {"cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)}
    HV, K, v_first = x["v"].shape[2], x["q"].shape[3], x.get("state_v_first", False)
    summarize = replace(config_of(packed, chunk, 2), mode="summarize")
    run = PrefillConfig(chunk, 1, mode="execute")
    starts, final = torch.zeros(2, len(lengths), HV, K, K).unbind()
    starts[0] = x["initial_state"][0].mT if v_first else x["initial_state"][0]
    exits, transitions = torch.empty(2, len(lengths), HV, K, K).unbind()
    records = layouts.slot_count(1, sum(lengths), chunk, len(lengths)) * HV + 1
    sizes = [layouts.workspace_bytes(records, n, chunk, c.halves) for n, c in zip(queues, (summarize, run))]
    workspace = empty_workspace(max(sizes))
    counters = records * layouts.record_pitch(chunk)
    carry = counters + layouts.counter_bytes(records, queues[0])
    common = {"workspace": workspace.data_ptr(), "depth": records}
    launch(
        summarize, 0, (workspace[counters:carry],), (workspace[:counters], workspace[carry:], exits, transitions),
        **described(packed | {"state_v_first": False}, summarize), **common, initial_state=starts, final_state=exits,
        transitions=transitions, ticket=0x1234567890ABCDEF, intra_chunk_ctas=intra_chunk_ctas, queues=queues[0],
    )  # fmt: skip
    state = exits[0].double()
    for n in range(1, len(lengths)):
        starts[n] = state
        state = transitions[n].double() @ state + exits[n].double()
    o = torch.zeros_like(x["v"])
    launch(
        run, 0, (workspace,), **described(packed, run), **common, o=o, final_state=final,
        initial_state=starts.mT.contiguous() if v_first else starts, ticket=0x1234567890ABCDF0, intra_chunk_ctas=0,
        queues=queues[1],
    )  # fmt: skip
    return o, final[-1:]


@functools.cache
def compiled_merge(columns: int) -> tuple[str, int]:
    """The PTX of the kernel that merges segments, and the bytes of its dynamic shared memory."""
    from kda_cute.device.merge_states import MergeKernel
    from kda_cute.merge import MergeConfig

    config = MergeConfig(columns)
    return ptx_of(MergeKernel, config), MergeKernel(config).shared_bytes


def merge(
    starts: torch.Tensor,
    exits: torch.Tensor,
    transitions: torch.Tensor,
    bounds: torch.Tensor,
    columns: int = 8,
) -> None:
    """Write ``starts`` of all segments except the first one of each sequence."""
    from kda_cute.device.merge_states import HEAD_DIM, THREADS

    text, shared = compiled_merge(columns)
    N, HV = len(bounds) - 1, starts.shape[1]
    grid = (N, HV, HEAD_DIM // columns)
    ptx.execute(text, grid, (THREADS,), shared, (starts, exits, transitions, bounds, N, HV))
