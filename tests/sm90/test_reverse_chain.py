"""The chain of the mode ``reverse``: its recurrence over given records, compared with the same recurrence in fp64."""

from contextlib import ExitStack
from itertools import accumulate, product

import pytest
import torch
from helpers.chain_records import make_records, sequences
from helpers.sm90_launch import launch, record_places

import ptx_emulator
from kda_core.testing import error
from kda_cute import kernels_made_by
from kda_cute.testing.emulation import load
from kda_sm90 import layouts
from kda_sm90.config import ARCH, HEAD_DIM, PrefillConfig

C = 64
NAN = float("nan")
NAMES = ("kd", "qd", "kg", "aqk", "t", "a")


def recurrence(records, each, HV, shape, grad_final, dtype):
    """Returns dv, the gradients of the initial states, and dS' behind every chunk by slot. With fp32 it rounds operands to
    bf16 as the kernel does."""
    rounded = (lambda x: x.bfloat16().to(dtype)) if dtype is torch.float32 else lambda x: x
    dv = torch.full(shape, NAN, device=grad_final.device, dtype=torch.float64)
    first, behind = [], {}
    for i, (b, start, length, slot) in enumerate(each):
        dS = grad_final[i].to(dtype)
        for c in reversed(range(-(-length // C))):
            x = {n: r[slot + c].to(dtype) for n, r in records.items()}
            behind[slot + c] = dS
            Y = x["aqk"].mT @ x["do"] + x["kg"] @ rounded(dS)
            dX = x["t"].mT @ rounded(Y)
            dS = x["a"][:, :, None] * dS + x["qd"].mT @ x["do"] + x["kd"].mT @ rounded(dX)
            rows = min(C, length - c * C)
            dv[b, start + c * C : start + c * C + rows] = dX[:, :rows].movedim(0, 1).double()
        first.append(dS)
    return dv, torch.stack(first).double(), behind


PACKED = (0, 1, 63, 0, 64, 130, 0)
EMULATED = ((1, 3, PACKED, True), (2, 1, None, False))
CASES = tuple(product((1, 2), (1, 3), (None, PACKED), (False, True)))  # warpgroups, queues, lengths, v_first


@pytest.mark.parametrize(
    ("device", "warpgroups", "queues", "lengths", "v_first"),
    [
        *(("cpu", *case) for case in EMULATED),
        *(pytest.param("cuda", *case, marks=pytest.mark.arch((9, 0))) for case in CASES),
    ],
)
def test_the_reverse_chain_computes_the_recurrence(device, warpgroups, queues, lengths, v_first):
    HV = 2
    B, T = (2, 130) if lengths is None else (1, sum(lengths))
    each, slots = sequences(B, T, C, lengths)
    records = {
        n: r.view(slots, HV, *r.shape[1:]) for n, r in make_records(slots * HV, C, device, "do").items()
    }
    owned = torch.zeros(slots, dtype=torch.bool)
    for _, _, length, slot in each:  # rows behind a sequence are zeros; slots without a chunk hold NaN
        owned[slot : slot + -(-length // C)] = True
        if rest := length % C:
            last = slot + length // C
            for name in ("kd", "qd", "kg", "aqk", "t", "do"):
                records[name][last, :, rest:] = 0
            for name in ("aqk", "t"):
                records[name][last, :, :, rest:] = 0
    # Every ring holds all records of its queue. The records are ready from the start, the states are not.
    place, depth = record_places([slot for *_, slot in each], slots, HV, queues, reverse=True)
    count = queues * depth
    size = layouts.workspace_bytes(count, queues, C)
    buffer = torch.full((size + 128,), 0xFF, dtype=torch.uint8, device=device)
    buffer = buffer[-buffer.data_ptr() % 128 :][:size]
    workspace = layouts.split_workspace(buffer, count, queues, C)
    workspace.counters.zero_()
    workspace.counters[(queues + 1) * layouts.LINE :] = 2**31 - 1
    for name in NAMES:
        packed = layouts.pack(name, records[name], C)
        packed[~owned] = NAN
        getattr(workspace, name)[place] = packed.transpose(0, 1)

    N, shape = len(each), (B, T, HV, HEAD_DIM)
    grad_o = torch.full(shape, NAN, device=device, dtype=torch.bfloat16)
    for b, start, length, slot in each:
        rows = records["do"][slot : slot + -(-length // C)]
        grad_o[b, start : start + length] = rows.transpose(1, 2).flatten(0, 1)[:length]
    grad_final = torch.randn(N, HV, HEAD_DIM, HEAD_DIM, device=device)
    want_v, want_s, behind = recurrence(records, each, HV, shape, grad_final, torch.float64)
    best_v, best_s, _ = recurrence(records, each, HV, shape, grad_final, torch.float32)

    layout = (lambda x: x.mT.contiguous()) if v_first else lambda x: x
    grad_v = torch.full(shape, NAN, device=device, dtype=torch.bfloat16)
    grad_initial = torch.full_like(grad_final, NAN)
    states = torch.full((slots, HV, HEAD_DIM, HEAD_DIM), NAN, device=device, dtype=torch.bfloat16)
    offsets = (
        None if lengths is None else torch.tensor([0, *accumulate(lengths)], device=device, dtype=torch.int32)
    )
    given = {"v": grad_o, "initial_state": layout(grad_final), "final_state": grad_initial, "states": states}
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(kernels_made_by(load))
            tensors = [x for x in (*given.values(), grad_v, buffer, offsets) if x is not None]
            stack.enter_context(ptx_emulator.device(ARCH, tensors=tensors, races=("shared",)))
        launch(
            PrefillConfig(C, warpgroups, states=True, mode="reverse"), grad_v, **given, offsets=offsets,
            offset_bytes=0 if offsets is None else 4, workspace=buffer, N=N, T=T, H=HV, HV=HV, beta_bytes=2,
            v_first=int(v_first), every=1, state_count=slots, intra_chunk_ctas=0, queues=queues, depth=depth,
            slab_slots=slots,
        )  # fmt: skip

    assert error(grad_v, want_v) <= 1.2 * error(best_v.bfloat16(), want_v) + 1e-6
    assert error(layout(grad_initial), want_s, state=True) <= 1.2 * error(best_s, want_s, state=True) + 1e-6
    for i, (_, _, length, _) in enumerate(each):
        if length == 0:
            assert torch.equal(layout(grad_initial)[i], grad_final[i]), (
                "a sequence without tokens changed its gradient"
            )
    for slot, dS in behind.items():
        assert (layouts.unpack_states(states[slot]).double() - dS).norm() <= 6e-3 * dS.norm()
