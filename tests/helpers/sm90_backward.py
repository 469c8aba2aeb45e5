"""Runs the backward of kda-sm90 on a GPU or on ptx-emulator, and compares it with fp64 autograd through the token recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from helpers.aligned import aligned
from helpers.replay import Tape
from kda_core import buffers, validate
from kda_core.contract import KdaGradients, KdaOptions, KdaOutputs
from kda_core.testing import token_oracle
from kda_cute import kernels_made_by
from kda_cute.testing.emulation import load
from kda_sm90 import backward, layouts
from kda_sm90.config import ARCH
from kda_sm90.launch import make_launch
from kda_sm90.launch_config import launch_config

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def gradients(
    x: dict[str, Any],
    grad_o: torch.Tensor,
    grad_final: torch.Tensor | None,
    sms: int,
    spacing: int = 0,
    slab_slots: int | None = None,
    change: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Returns the gradients of a call by the kernels of kda-sm90.

    Args:
        spacing: tokens between the states that a forward saves before; with 64 it also saves R, with 0 there is no forward.
        slab_slots: slots of a slab; None: as many as fit.
        change: changes the tensors of the call in place after the first run. All recorded work then runs again (`helpers.replay`), as
            in a replay of a CUDA graph.
    """
    import ptx_emulator

    known = {f: x[f] for f in KdaOptions.__dataclass_fields__ if f in x}
    tensors = [x.get(name) for name in (*NAMES, "cu_seqlens", "cu_seqlens_cpu")]
    shape = validate.problem_shape(*tensors, options=KdaOptions(**known))
    inputs = buffers.make_inputs(tensors, shape)
    device = x["q"].device.type
    poison = lambda y: None if y is None else torch.full_like(y, float("nan"))
    found = KdaGradients(*(poison(x.get(name)) for name in NAMES))
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(kernels_made_by(load))
        launch = backward.launch_of(shape, spacing, sms=sms)
        launch = launch._replace(slabs=launch.slabs._replace(slots=slab_slots or launch.slabs.slots))
        # Arrays of their own: the emulator then finds accesses behind the end of each.
        workspace = backward.Workspace(
            *(
                aligned(math.prod(size) * dtype.itemsize, device).view(dtype).view(size)
                for dtype, size in backward.arrays(shape, spacing, launch.slabs, sms).values()
            )
        )
        saved = residual = None
        if spacing:
            slots = layouts.slot_count(shape.B, shape.T, spacing, shape.N if shape.varlen else None)
            dtype = torch.bfloat16 if spacing == 64 else torch.float32
            saved = torch.full((slots, shape.HV, 128, 128), float("nan"), dtype=dtype, device=device)
            residual = poison(x["v"]) if spacing == 64 else None
        o = poison(x["v"])
        config = launch_config(shape, sms, None, spacing)
        space = aligned(config.workspace_bytes, device)  # of the forward
        if device == "cpu":
            reachable = [
                *tensors,
                grad_o,
                grad_final,
                *vars(found).values(),
                *workspace,
                saved,
                residual,
                o,
                space,
            ]
            reachable = [y for y in reachable if y is not None and y.numel()]
            stack.enter_context(ptx_emulator.device(ARCH, tensors=reachable, races=("shared",)))
        forward = make_launch(shape, config, spacing) if spacing else None
        tape = Tape()
        if change is not None:
            recorded = lambda part: part and part._replace(kernel=tape.recorded(part.kernel))
            forward, own, chains = (recorded(part) for part in (forward, launch.forward, launch.chains))
            launch = launch._replace(forward=own, chains=chains, gradients=recorded(launch.gradients))
        with nullcontext() if change is None else tape:
            if forward is not None:
                forward(inputs, KdaOutputs(o, None, None, space, saved, residual))
            launch.run(inputs, grad_o, grad_final, found, workspace, saved, residual)
        if change is not None:
            change()
            tape.replay()
        if device == "cuda":
            torch.cuda.synchronize()
    return {name: getattr(found, name) for name in NAMES if x.get(name) is not None}


def oracle(
    x: dict[str, Any], grad_o: torch.Tensor, grad_final: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Returns the gradients in fp64."""
    leaves = {n: x[n].detach().double().requires_grad_() for n in NAMES if x.get(n) is not None}
    o, state = token_oracle(**(x | leaves))
    total = (o * grad_o.double()).sum()
    if grad_final is not None:
        total = total + (state * grad_final.double()).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        n: torch.zeros_like(y) if d is None else d for (n, y), d in zip(leaves.items(), found, strict=True)
    }


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns ||got - want|| / ||want||."""
    norm = want.norm()
    return ((got.double() - want).norm() / norm).item() if norm > 0 else got.double().norm().item()
