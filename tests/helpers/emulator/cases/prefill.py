"""Whole kernels: the prefill kernel of kda-sm90 over its variants, in segments, and the merge of segments."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from helpers.emulator import prefill
from helpers.emulator.cases.inputs import random
from helpers.emulator.cases.registry import Norm, Outputs, add
from kda_core.testing import make_inputs


def kda(
    family: str, T: int, chunk: int, warpgroups: int, *, unbounded: bool | None = None, **options: object
) -> Outputs:
    """One launch of a variant: o and the states. ``options`` are those of `make_inputs`, of the schedule, and of the call."""
    schedule = {n: options.pop(n) for n in ("queues", "depth", "intra_chunk_ctas") if n in options}
    call = {n: options.pop(n) for n in ("return_intermediate_states",) if n in options}
    x = make_inputs(family, T, **options).arguments | call
    found = prefill.prefill(x, prefill.config_of(x, chunk, warpgroups, unbounded), **schedule)
    return dict(zip(("o", "final_state", "states"), found))


#: The limit of outputs in bf16, with sums of products rounded to bf16 on the way.
PREFILL = Norm(2.0**-10)

PACKED = {"lengths": (0, 33, 1, 66), "initial_state": True, "queues": 3, "depth": 5, "intra_chunk_ctas": 2}
for name, arguments, options in (
    ("bounded", ("slow", 100, 64, 1), {"H": 1}),
    ("bounded, GVA", ("slow", 72, 64, 2), {"H": 1, "HV": 2}),
    ("bounded", ("slow", 100, 32, 1), {"H": 1}),
    ("bounded, GVA, initial state", ("slow", 72, 32, 2), {"H": 1, "HV": 2, "initial_state": True}),
    ("bounded, steep, vote", ("steep", 72, 64, 1), {"H": 1, "unbounded": True}),
    ("bounded, saturated", ("saturated", 72, 32, 1), {"H": 1}),
    ("softplus, initial state", ("mixed", 100, 64, 1), {"H": 1, "initial_state": True}),
    ("softplus", ("mixed", 100, 32, 2), {"H": 1}),
    ("precomputed, masked, GVA", ("masked", 100, 64, 1), {"H": 1, "HV": 2, "intra_chunk_ctas": 2, "queues": 2}),
    ("precomputed, masked", ("masked", 100, 32, 2), {"H": 1}),
    ("precomputed, slow memory", ("memory", 72, 64, 2), {"H": 1}),
    ("packed, V-first states", ("slow", 100, 64, 2), {"H": 1, "state_v_first": True, "return_intermediate_states": True, **PACKED}),
    ("packed, states, GVA", ("slow", 100, 32, 1), {"H": 1, "HV": 2, "return_intermediate_states": True, **PACKED}),
):  # fmt: skip
    _, _, chunk, warpgroups = arguments
    title = f"prefill chunk {chunk}, {warpgroups} warpgroup{'s' * (warpgroups > 1)}, {name}"
    add("prefill", title, partial(kda, *arguments, **options), PREFILL, arch="sm_90a")


def segments(chunk: int, v_first: bool) -> Outputs:
    """A sequence in three segments: one launch summarises them, a second one executes them."""
    x = make_inputs("slow", 160, H=1, HV=2, initial_state=True, state_v_first=v_first).arguments
    found = prefill.in_segments(x, (70, 0, 90), chunk, queues=(3, 5), intra_chunk_ctas=2)
    return dict(zip(("o", "final_state"), found))


for chunk, v_first in ((64, False), (32, True)):
    title = f"prefill chunk {chunk}, in segments{', V-first states' * v_first}"
    add("prefill", title, partial(segments, chunk, v_first), PREFILL, arch="sm_90a")


def merged() -> Outputs:
    """The starts of the segments of two sequences. The kernel multiplies TF32 parts and sums them in fp32."""
    r, shape = random("merge"), (5, 1, 128, 128)
    starts, exits, transitions = (
        torch.from_numpy(r.standard_normal(shape).astype(np.float32)) for _ in range(3)
    )
    prefill.merge(starts, exits, transitions / 8, torch.tensor([0, 4, 5], dtype=torch.int32))
    return {"starts": starts}


add("prefill", "merge of segments", merged, arch="sm_90a")
