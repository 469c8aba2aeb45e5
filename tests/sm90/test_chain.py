"""The chain alone: its recurrence over given records, compared with the same recurrence in fp64."""

from itertools import accumulate

import pytest
import torch
from helpers.chain_records import folded, make_records, sequences
from helpers.sm90_launch import launch, record_places

from kda_core.testing import error
from kda_sm90 import layouts
from kda_sm90.config import HEAD_DIM, PrefillConfig

LENGTHS = (0, 1, 63, 0, 64, 65, 130, 400, 0)
NAN = float("nan")


def recurrence(records, each, C, HV, shape, initial, dtype):
    """Returns o, the final states, and the state before every chunk.

    In fp32 the function also rounds operands to bf16, as the kernel does; in fp64 it rounds nothing.
    """
    rounded = (lambda x: x.bfloat16().to(dtype)) if dtype is torch.float32 else lambda x: x
    o = torch.full(shape, NAN, device="cuda", dtype=torch.float64)
    final, before = [], []
    for i, (b, start, length, slot) in enumerate(each):
        S = initial[i].to(dtype)
        before.append([])
        for c in range(-(-length // C)):
            x = {n: r[(slot + c) * HV : (slot + c + 1) * HV].to(dtype) for n, r in records.items()}
            before[-1].append(S)
            R = x["t"] @ rounded(x["v"] + x["kd"] @ rounded(S))
            O = x["qd"] @ rounded(S) + x["aqk"] @ rounded(R)
            S = x["a"][:, :, None] * S + x["kg"].mT @ rounded(R)
            rows = min(C, length - c * C)
            first = start + c * C
            o[b, first : first + rows] = O[:, :rows].movedim(0, 1).double()
        final.append(S)
    return o, torch.stack(final).double(), before


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("v_first", (False, True), ids=("kv", "vk"))
@pytest.mark.parametrize("packed", (False, True), ids=("fixed", "packed"))
@pytest.mark.parametrize("queues", (1, 3), ids=("one queue", "queues that cut sequences"))
@pytest.mark.parametrize("warpgroups", (1, 2))
@pytest.mark.parametrize("C", (32, 64))
def test_chain_computes_the_recurrence(C, warpgroups, queues, packed, v_first):
    HV, lengths = 2, LENGTHS if packed else None
    B, T = (1, sum(LENGTHS)) if packed else (2, 200)
    each, slots = sequences(B, T, C, lengths, compact=C == 32)
    records = make_records(slots * HV, C, "cuda", "v")
    owned = torch.zeros(slots, dtype=torch.bool)
    for _, _, length, slot in each:  # rows after a sequence are zeros; slots without a chunk hold NaN
        owned[slot : slot + -(-length // C)] = True
        if rest := length % C:
            last = slice((slot + length // C) * HV, (slot + length // C + 1) * HV)
            for name in ("kd", "qd", "kg", "aqk", "t", "v"):
                records[name][last, rest:] = 0
            for name in ("aqk", "t"):
                records[name][last, :, rest:] = 0
    config = PrefillConfig(C, warpgroups, states=True)
    if config.folded:
        records = folded(records)
    # Every ring holds all records of its queue. The records are ready from the start, the states are not.
    place, depth = record_places([first for *_, first in each], slots, HV, queues)
    size = layouts.workspace_bytes(queues * depth, queues, C)
    buffer = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    workspace = layouts.split_workspace(buffer, queues * depth, queues, C)
    workspace.counters.zero_()
    workspace.counters[(queues + 1) * layouts.LINE :] = 2**31 - 1
    for name, records_of in records.items():
        if name != "v":
            packed_records = layouts.pack(name, records_of, C).view(slots, HV, -1)
            packed_records[~owned] = NAN
            getattr(workspace, name)[place] = packed_records.transpose(0, 1)

    N, shape, every = len(each), (B, T, HV, HEAD_DIM), 64
    v = torch.full(shape, NAN, device="cuda", dtype=torch.bfloat16)
    for b, start, length, slot in each:
        rows = records["v"].view(slots, HV, C, HEAD_DIM)[slot : slot + -(-length // C)]
        v[b, start : start + length] = rows.transpose(1, 2).flatten(0, 1)[:length]
    initial = torch.randn(N, HV, HEAD_DIM, HEAD_DIM, device="cuda")
    want_o, want_s, before = recurrence(records, each, C, HV, shape, initial, torch.float64)
    best_o, best_s, _ = recurrence(records, each, C, HV, shape, initial, torch.float32)

    layout = (lambda x: x.mT.contiguous()) if v_first else lambda x: x
    o = torch.full(shape, NAN, device="cuda", dtype=torch.bfloat16)
    final = torch.full_like(initial, NAN)
    NT = sum(-(-n // every) for n in lengths) if packed else -(-T // every)
    states = torch.full((B, NT, HV, HEAD_DIM, HEAD_DIM), NAN, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, *accumulate(lengths)], device="cuda", dtype=torch.int32) if packed else None
    start = layout(initial)
    launch(
        config, o, v=v, initial_state=start, final_state=final, states=states,
        offsets=offsets, offset_bytes=4 if packed else 0, workspace=buffer, N=N, T=T, H=HV, HV=HV, beta_bytes=2,
        v_first=int(v_first), every=every // C, state_count=B * NT, intra_chunk_ctas=0, queues=queues, depth=depth,
    )  # fmt: skip

    limits = [error(best_o.bfloat16(), want_o), error(best_s, want_s, state=True)]
    assert error(o, want_o) <= 1.2 * limits[0] + 1e-6
    assert error(layout(final), want_s, state=True) <= 1.2 * limits[1] + 1e-6
    for i, (_, _, length, _) in enumerate(each):
        if length == 0:
            assert torch.equal(layout(final)[i], initial[i]), "a sequence without tokens changed its state"
    saved = [S for chunks in before for S in chunks[:: every // C]]
    found = layout(states).flatten(0, 1)
    assert len(saved) == len(found)
    for S, h in zip(saved, found):
        assert (h.double() - S).norm() <= 6e-3 * S.norm()
