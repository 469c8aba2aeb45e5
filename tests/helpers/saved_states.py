"""What a forward saves for its backward, compared with the token recurrence in fp64."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from helpers.aligned import aligned
from kda_core import buffers, validate
from kda_core.contract import KdaOptions, KdaOutputs
from kda_core.testing import token_oracle
from kda_core.testing.oracle import log_decay, sequence_bounds
from kda_cute import kernels_made_by
from kda_cute.testing.emulation import load

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu")
NAN = float("nan")


def forward(backend: Any, arch: str, x: dict[str, Any], spacing: int, **emulation: Any) -> KdaOutputs:
    """Returns o, the final states, the saved states and R of a call; with spacing 0 it saves nothing.

    Args:
        backend: its backend object.
        arch: architecture of its kernels, emulated for CPU tensors. ``emulation``: options of `ptx_emulator.device`.
        x: arguments of `kda_core.chunk_kda`.
    """
    import ptx_emulator

    known = {f: x[f] for f in KdaOptions.__dataclass_fields__ if f in x}
    tensors = [x.get(name) for name in NAMES]
    shape = validate.problem_shape(*tensors, options=KdaOptions(**known, output_final_state=True))
    inputs, device = buffers.make_inputs(tensors, shape), x["q"].device.type
    poisoned = lambda *size, dtype=torch.bfloat16: torch.full(size, NAN, dtype=dtype, device=device)
    saved = None
    if spacing:
        slots = shape.T // spacing + shape.N if shape.varlen else shape.B * -(-shape.T // spacing)
        dtype = torch.bfloat16 if spacing == 64 else torch.float32
        saved = poisoned(slots, shape.HV, 128, 128, dtype=dtype)
    outputs = KdaOutputs(
        o=poisoned(*x["v"].shape), final_state=poisoned(*shape.state_shape, dtype=torch.float32),
        workspace=aligned(backend.workspace_bytes(shape), device), saved_states=saved,
        residual=poisoned(*x["v"].shape) if spacing == 64 else None,
    )  # fmt: skip
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(kernels_made_by(load))
            reachable = [y for y in (*tensors, *vars(outputs).values()) if y is not None]
            stack.enter_context(ptx_emulator.device(arch, tensors=reachable, **emulation))
        backend.chunk_fwd(inputs, outputs)
    return outputs


def check(backend: Any, arch: str, x: dict[str, Any], spacing: int, **emulation: Any) -> None:
    """Compares the saved states and R with those of the token recurrence."""
    found = forward(backend, arch, x, spacing, **emulation)
    o, final, states = token_oracle(**x, return_intermediate_states=True, chunk_size=1)
    v_first = x.get("state_v_first", False)
    states = (states.mT if v_first else states).flatten(0, 1)  # before every token
    decays = log_decay(x["g"], x["A_log"], x["dt_bias"], x["lower_bound"]).exp().flatten(0, 1)
    k = x["k"].double().flatten(0, 1)
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    k = k.repeat_interleave(x["v"].shape[2] // k.shape[1], 1)
    residual = x["v"].double().flatten(0, 1) - torch.einsum("thk,thkv->thv", k * decays, states)
    close = lambda got, want: (got.double() - want).norm() <= 8e-3 * want.norm()
    assert close(found.o, o) and close(found.final_state, final)
    if spacing == 64:
        assert close(found.residual.flatten(0, 1), residual)
    bounds, T = sequence_bounds(x["q"], x.get("cu_seqlens")), x["q"].shape[1]
    for n, (start, end) in enumerate(bounds):
        first = n * -(-T // spacing) if x.get("cu_seqlens") is None else start // spacing + n
        for i, token in enumerate(range(start, end, spacing)):
            assert close(found.saved_states[first + i], states[token]), (n, token)


PACKED = (0, 70, 15, 65, 0)
