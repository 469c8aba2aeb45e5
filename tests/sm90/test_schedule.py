"""The order in which chains and intra-chunk groups process chunks."""

import random
from itertools import accumulate, pairwise

import pytest
import torch
from helpers.sm90_launch import launch, record_places

from kda_core.testing import make_inputs
from kda_sm90 import layouts
from kda_sm90.config import PrefillConfig

TOKENS = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("seed", range(50))
def test_a_cut_sequence_continues_after_its_first_part(seed):
    rng = random.Random(seed)
    heads, queues = rng.randint(1, 9), rng.randint(1, 12)
    firsts = [0, *accumulate(rng.randint(1, 9) for _ in range(rng.randint(0, 6)))]
    slots = firsts[-1] + rng.randint(1, 9)
    place, width = record_places(firsts, slots, heads, queues)
    assert sorted(place.flatten().tolist()) == sorted(set(place.flatten().tolist()))
    assert place.min() >= 0 and place.max() < queues * width
    for head in place.tolist():
        for start, end in pairwise([*firsts, slots]):
            parts: dict[int, list[int]] = {}  # the numbers in each queue
            for x in head[start:end]:
                parts.setdefault(x // width, []).append(x % width)
            for numbers in parts.values():
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            first, *rest = parts.values()
            assert len(rest) <= 1
            assert not rest or first[0] == 0 and first[-1] < rest[0][0]


def run(x, config, queues, depth, intra_chunk_ctas):
    """Returns o, final states and intermediate states of a call with a given schedule."""
    (B, T, H, K), HV, offsets = x["q"].shape, x["v"].shape[2], x.get("cu_seqlens")
    N = B if offsets is None else len(offsets) - 1
    initial = x["initial_state"]
    size = layouts.workspace_bytes(queues * depth, queues, config.chunk)
    buffer = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    o, final = torch.zeros_like(x["v"]), torch.zeros_like(initial)
    states = torch.zeros(B * (T // 64 + N), HV, K, K, dtype=torch.bfloat16, device="cuda")
    launch(
        config, o, **{name: x[name] for name in ("q", "k", "v", "g", "beta", "initial_state")},
        a_log=x["A_log"], dt_bias=x["dt_bias"], offsets=offsets, final_state=final, states=states, workspace=buffer,
        ticket=0x123456789, state_count=len(states), N=N, T=T, H=H, HV=HV, offset_bytes=0 if offsets is None else 4,
        beta_bytes=x["beta"].element_size(), l2norm=1, every=64 // config.chunk, intra_chunk_ctas=intra_chunk_ctas,
        queues=queues, depth=depth, scale=K**-0.5, lower_bound=-5.0, beta_factor=1.0,
    )  # fmt: skip
    return o, final, states


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("lengths", (None, (0, 700, 1, 0, 64, 300, 7, 0)), ids=("fixed", "packed"))
@pytest.mark.parametrize("warpgroups", (1, 2))
@pytest.mark.parametrize("C", (32, 64))
def test_every_schedule_gives_the_same_bits(C, warpgroups, lengths):
    """Shallow rings, few and many intra-chunk CTAs, queues that cut heads anywhere, and queues without a chunk."""
    x = make_inputs(
        "slow", 1072 if lengths else 500, B=1 if lengths else 2, H=1, HV=3, lengths=lengths, device="cuda"
    )
    config = PrefillConfig(C, warpgroups, states=True)
    N = len(lengths) if lengths else 2
    arguments = x.arguments | {"initial_state": torch.randn(N, 3, 128, 128, device="cuda")}
    want = run(arguments, config, queues=1, depth=200, intra_chunk_ctas=1)
    assert want[0].abs().max() > 0
    for queues in (2, 3, 4, 5, 7, 11, 30):
        for depth, intra_chunk_ctas in ((5, 1), (5, 40), (8, 3), (40, 40)):
            got = run(arguments, config, queues, depth, intra_chunk_ctas)
            for name, y, z in zip(("o", "final", "states"), got, want, strict=True):
                assert torch.equal(y, z), (name, queues, depth, intra_chunk_ctas)
            if (C, warpgroups) == (32, 2):
                local = PrefillConfig(C, warpgroups, local=True)
                o, final, _ = run(arguments, local, queues, depth, intra_chunk_ctas)
                assert torch.equal(o, want[0]) and torch.equal(final, want[1]), (
                    queues,
                    depth,
                    intra_chunk_ctas,
                )


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("C", (32, 64))
def test_padding_after_the_last_sequence_changes_no_bit(C):
    """A captured call has memory for more tokens than a replay may use."""
    lengths = (300, 0, 129, 71)
    x = make_inputs("slow", 500, H=1, HV=3, lengths=lengths, device="cuda").arguments
    x |= {"initial_state": torch.randn(len(lengths), 3, 128, 128, device="cuda")}
    want = run(x, PrefillConfig(C, 1), queues=4, depth=8, intra_chunk_ctas=3)
    assert want[0].abs().max() > 0
    for more in (1, 64, 5000):
        tail = {n: torch.full_like(x[n][:, :1], float("nan")).repeat_interleave(more, 1) for n in TOKENS}
        longer = x | {n: torch.cat([x[n], tail[n]], 1) for n in TOKENS}
        o, final, _ = run(longer, PrefillConfig(C, 1, padded=True), queues=4, depth=8, intra_chunk_ctas=3)
        assert torch.equal(o[:, :500], want[0]) and not o[:, 500:].any()
        assert torch.equal(final, want[1])
