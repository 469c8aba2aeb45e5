"""What a forward saves for its backward: states every 64 or 512 tokens, and R, compared with the token recurrence in fp64."""

from contextlib import ExitStack

import pytest
import torch
from helpers.sm90_backward import aligned

from kda_core import buffers, validate
from kda_core.contract import KdaOptions, KdaOutputs
from kda_core.testing import make_inputs, token_oracle
from kda_core.testing.oracle import log_decay, sequence_bounds
from kda_cute import kernels_made_by
from kda_sm90.backend import Sm90Backend
from kda_sm90.config import ARCH, HEAD_DIM

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu")
NAN = float("nan")


def forward(x, spacing):
    """Returns o, the final states, the saved states and R of a call of kda-sm90; with spacing 0 it saves nothing."""
    import ptx_emulator

    known = {f: x[f] for f in KdaOptions.__dataclass_fields__ if f in x}
    tensors = [x.get(name) for name in NAMES]
    shape = validate.problem_shape(*tensors, options=KdaOptions(**known, output_final_state=True))
    inputs, backend, device = buffers.make_inputs(tensors, shape), Sm90Backend(), x["q"].device.type
    poisoned = lambda *size, dtype=torch.bfloat16: torch.full(size, NAN, dtype=dtype, device=device)
    saved = None
    if spacing:
        slots = shape.T // spacing + shape.N if shape.varlen else shape.B * -(-shape.T // spacing)
        dtype = torch.bfloat16 if spacing == 64 else torch.float32
        saved = poisoned(slots, shape.HV, HEAD_DIM, HEAD_DIM, dtype=dtype)
    outputs = KdaOutputs(
        o=poisoned(*x["v"].shape), final_state=poisoned(*shape.state_shape, dtype=torch.float32),
        workspace=aligned(backend.workspace_bytes(shape), device), saved_states=saved,
        residual=poisoned(*x["v"].shape) if spacing == 64 else None,
    )  # fmt: skip
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(kernels_made_by(ptx_emulator.load))
            reachable = [y for y in (*tensors, *vars(outputs).values()) if y is not None]
            stack.enter_context(ptx_emulator.device(ARCH, tensors=reachable, races=("shared",)))
        backend.chunk_fwd(inputs, outputs)
    return outputs


def check(x, spacing):
    """Compares the saved states and R with those of the token recurrence."""
    found = forward(x, spacing)
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


@pytest.mark.parametrize(("lengths", "spacing"), ((None, 64), (PACKED, 64), (PACKED, 512)), ids=str)
def test_saved_states_and_residuals(lengths, spacing):
    T = 70 if lengths is None else sum(lengths)
    x = make_inputs("slow", T, B=2 if lengths is None else 1, H=1, HV=2, lengths=lengths, initial_state=True)
    v_first = {"state_v_first": True, "initial_state": x.arguments["initial_state"].mT.contiguous()}
    check(x.arguments | (v_first if spacing == 64 else {}), spacing)


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("spacing", (64, 512))
@pytest.mark.parametrize("lengths", (None, (0, 700, 1, 0, 1100, 63)), ids=("fixed", "packed"))
@pytest.mark.parametrize("heads", (1, 24), ids=("few heads", "many heads"))
def test_saved_states_on_a_gpu(heads, lengths, spacing):
    T = 1300 if lengths is None else sum(lengths)
    x = make_inputs("slow", T, H=heads, lengths=lengths, device="cuda", initial_state=True)
    check(x.arguments, spacing)


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("heads", (2, 64))
@pytest.mark.parametrize("family", ("slow", "mixed"))
def test_saving_changes_no_bit_of_the_outputs(family, heads):
    x = make_inputs(family, 1500, H=heads, device="cuda", initial_state=True).arguments
    plain = forward(x, 0)
    for spacing in (64, 512):
        saving = forward(x, spacing)
        assert torch.equal(saving.o, plain.o) and torch.equal(saving.final_state, plain.final_state)
