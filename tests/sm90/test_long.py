"""Long calls, for which the kit's oracle would take minutes, compared with the same call in several parts."""

import pytest
import torch

import kda_core
from kda_core import serving
from kda_core.registry import record_calls
from kda_core.testing import make_inputs
from kda_cute.decode import MOST_ALONG_Z
from kda_sm90.launch_config import launch_config

T = 1 << 20


def run(x, **more):
    with record_calls() as calls:
        o, state = kda_core.chunk_kda(
            **x, **more, output_final_state=True, backend="sm90", context_parallel="off"
        )
    assert [c.backend for c in calls] == ["sm90"]
    return o, state


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("family", ("slow", "memory"))
def test_a_million_tokens_equal_four_consecutive_calls(family):
    x = make_inputs(family, T, H=4, device="cuda").arguments
    x.pop("output_final_state", None)
    whole, final = run(x)
    state, size = x.pop("initial_state", None), T // 4
    for start in range(0, T, size):
        part = {
            n: t[:, start : start + size] if n in ("q", "k", "v", "g", "beta") else t for n, t in x.items()
        }
        o, state = run(part, initial_state=state)
        assert torch.equal(o, whole[:, start : start + size]), f"outputs differ from token {start} on"
    assert torch.equal(state, final)
    assert torch.isfinite(final).all() and torch.isfinite(whole).all()


@pytest.mark.arch((9, 0))
def test_one_long_sequence_among_empty_ones():
    """The rings are sized for sequences of the mean length."""
    lengths = (*(0,) * 60, 3000, *(0,) * 60)
    x = make_inputs("slow", 3000, H=3, lengths=lengths, device="cuda").arguments
    x.pop("output_final_state", None)
    o, state = run(x, pin=True)
    x.pop("cu_seqlens")
    alone, final = run(x, pin=True)
    assert torch.equal(o, alone) and torch.equal(state[60], final[0])
    assert not state[:60].any() and not state[61:].any()


@pytest.mark.arch((9, 0))
def test_known_lengths_change_the_launch_but_no_bit_of_a_pinned_call():
    lengths = (4000, *(64,) * 31)
    x = make_inputs("slow", sum(lengths), H=3, lengths=lengths, device="cuda").arguments
    x.pop("output_final_state", None)
    shape = kda_core.explain(**x, backend="sm90", pin=True).shape
    assert launch_config(shape) != launch_config(shape, longest=max(lengths))
    o, state = run(x, pin=True)
    known, final = run(x | {"cu_seqlens_cpu": x["cu_seqlens"].cpu()}, pin=True)
    assert torch.equal(o, known) and torch.equal(state, final)


def decoded(x, states, slots, v_first):
    """Decodes in place. Returns o."""
    given = {"initial_state": states, "ssm_state_indices": slots, "output_final_state": True}
    return kda_core.fused_recurrent_kda(**x, **given, state_v_first=v_first)[0]


def verified(x, states, slots, v_first):
    """Verifies tokens, and folds them into the states. Returns o."""
    (T, heads), options = x["q"].shape[1:3], {"state_v_first": v_first, "device": "cuda"}
    records = serving.Journal.allocate(len(states), x["v"].shape[2], 128, 128, H=heads, drafts=T, **options)
    o = serving.verify_kda(**x, pool=states, slots=slots, records=records)
    serving.journal_fold(states, slots, records, accepted=torch.full_like(slots, T))
    return o


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("v_first", (False, True), ids=("kv", "vk"))
@pytest.mark.parametrize(("call", "tokens"), ((decoded, 1), (verified, 2)))
def test_more_sequences_than_blocks_along_z(call, tokens, v_first):
    """All but a few are skipped. The others have the bits of a call of their own."""
    N, live = MOST_ALONG_Z + 65, [0, 7, MOST_ALONG_Z - 1, MOST_ALONG_Z, MOST_ALONG_Z + 64]
    few = make_inputs("slow", tokens, B=len(live), H=1, HV=2, device="cuda").arguments
    for name in ("output_final_state", "state_v_first"):
        few.pop(name, None)
    pool = torch.randn(len(live), 2, 128, 128, device="cuda")
    slots = torch.arange(len(live), dtype=torch.int32, device="cuda")
    at = torch.tensor(live, device="cuda")
    spread = lambda t, fill: t.new_full((N, *t.shape[1:]), fill).index_copy(0, at, t)
    many = few | {n: spread(few[n], 1.0) for n in ("q", "k", "v", "g", "beta")}
    found = []
    for x, indices in ((few, slots), (many, spread(slots, -1))):
        states = pool.clone()
        with record_calls() as calls:
            o = call(x, states, indices, v_first)
        assert {c.backend for c in calls} == {"sm90"}
        found.append((o, states))
    (want, states), (o, after) = found
    assert torch.equal(o[at], want) and torch.equal(after, states) and not torch.equal(after, pool)
    o[at] = 0
    assert not o.any()
