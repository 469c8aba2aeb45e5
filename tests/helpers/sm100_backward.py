"""Runs the backward of kda-sm100 on ptx-emulator, with arrays of the workspace that are tensors of their own."""

from __future__ import annotations

import math
from typing import Any

import torch

import ptx_emulator
from helpers.aligned import aligned
from kda_core import buffers, validate
from kda_core.contract import KdaGradients, KdaInputs, KdaOptions, KdaOutputs
from kda_cute import kernels_made_by
from kda_cute.testing.emulation import load
from kda_sm100 import backward
from kda_sm100.config import ARCHS
from kda_sm100.launch import launches_of
from kda_sm100.launch_config import launch_config

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
NAN = float("nan")


def inputs_of(x: dict[str, Any]) -> KdaInputs:
    """Returns the inputs of a call from the arguments of `kda_core.chunk_kda`."""
    known = {f: x[f] for f in KdaOptions.__dataclass_fields__ if f in x}
    tensors = [x.get(name) for name in (*NAMES, "cu_seqlens", "cu_seqlens_cpu")]
    return buffers.make_inputs(tensors, validate.problem_shape(*tensors, options=KdaOptions(**known)))


def saved(inputs: KdaInputs, spacing: int) -> KdaOutputs:
    """Returns outputs of a forward that saves states every ``spacing`` tokens and, for 64, R; with 0 it saves nothing."""
    s, v = inputs.shape, inputs.v
    states = residual = None
    if spacing:
        slots = s.T // spacing + s.N if s.varlen else s.B * -(-s.T // spacing)
        dtype = torch.bfloat16 if spacing == 64 else torch.float32
        states = torch.full((slots, s.HV, 128, 128), NAN, dtype=dtype)
        residual = torch.full_like(v, NAN) if spacing == 64 else None
    return KdaOutputs(
        torch.full_like(v, NAN),
        None,
        None,
        aligned(launch_config(s).workspace_bytes, "cpu"),
        states,
        residual,
    )


def gradients(
    x: dict[str, Any],
    grad_o: torch.Tensor,
    grad_final: torch.Tensor | None,
    spacing: int = 0,
    slab_slots: int | None = None,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Returns the gradients of a call.

    Args:
        spacing: as in `saved`.
        slab_slots: slots of a slab; None: as many as fit.
        seed: schedule of the emulator.
    """
    inputs = inputs_of(x)
    s, outputs = inputs.shape, saved(inputs, spacing)
    found = KdaGradients(*(None if x.get(n) is None else torch.full_like(x[n], NAN) for n in NAMES))
    with kernels_made_by(load):
        launch = backward.launch_of(s, spacing)
        slabs = launch.launches.slabs
        slabs = slabs._replace(slots=slab_slots or slabs.slots)
        numbers = launch.gradients.numbers | {"ctas": 6}
        launch = launch._replace(
            launches=launch.launches._replace(slabs=slabs),
            gradients=launch.gradients._replace(numbers=numbers),
        )
        workspace = backward.Workspace(
            *(
                aligned(math.prod(size) * dtype.itemsize, "cpu").view(dtype).view(size)
                for dtype, size in backward.arrays(s, spacing, slabs).values()
            )
        )
        given = (*(x.get(n) for n in NAMES), inputs.cu_seqlens, grad_o, grad_final)
        reachable = [*given, *vars(found).values(), *workspace, *vars(outputs).values()]
        reachable = [y for y in reachable if y is not None and y.numel()]
        with ptx_emulator.device(ARCHS[0], tensors=reachable, seed=seed):
            if spacing:
                for one in launches_of(s, saves=spacing):
                    one(inputs, outputs)
            launch.run(inputs, grad_o, grad_final, found, workspace, outputs.saved_states, outputs.residual)
    return {name: getattr(found, name) for name in NAMES if x.get(name) is not None}
