"""The prefill kernel of kda-sm90 on the emulator against the fp64 oracle. Every change runs each variant once, and the nightly session the
other combinations."""

import math
from dataclasses import replace
from itertools import pairwise, starmap
from types import SimpleNamespace

import pytest
import torch
from helpers.emulator.prefill import config_of, in_segments, merge, prefill
from helpers.nightly import nightly

from kda_core.testing import error, make_inputs, token_oracle, tolerance
from kda_core.testing.oracle import log_decay

VARIANTS = [(64, 1), (64, 2), (32, 1), (32, 2)]


def check(x, chunk, warpgroups, *, unbounded=None, **schedule):
    """Execute a call and check o, the final and the intermediate states against the tolerance of its data. Returns these."""
    arguments = x.arguments | {"output_final_state": True}
    want = token_oracle(**arguments)
    found = prefill(arguments, config_of(arguments, chunk, warpgroups, unbounded), **schedule)
    limits = tolerance(arguments, chunk, oracle=want)
    assert len(found) == len(limits)
    assert error(found[0], want[0], lengths=x.lengths) <= limits[0]
    for y, r, limit in zip(found[1:], want[1:], limits[1:]):
        assert error(y, r, state=True) <= limit
    return found


@pytest.mark.parametrize(("chunk", "warpgroups"), VARIANTS)
@pytest.mark.parametrize("T", (nightly(64), 160))
def test_bounded_gate(chunk, warpgroups, T):
    check(make_inputs("slow", T, H=1), chunk, warpgroups)


@pytest.mark.parametrize(("chunk", "warpgroups"), [*starmap(nightly, [(64, 1), (64, 2), (32, 1)]), (32, 2)])
def test_softplus_gate_that_is_steep_enough_to_refine_rows(chunk, warpgroups):
    x = make_inputs("mixed", 160, H=1, initial_state=True)
    g = log_decay(*(x.arguments[n] for n in ("g", "A_log", "dt_bias")))
    fall = g.view(1, 10, 16, 1, 128)[:, :, 1:].sum(2)
    assert (fall < -80).any(-1).all(), "every block must have rows outside the range of split factors"
    check(x, chunk, warpgroups)


@pytest.mark.parametrize("dtype", (torch.bfloat16, nightly(torch.float32)), ids=str)
def test_precomputed_gates_that_are_steep_enough_to_refine_columns(dtype):
    """In some blocks all rows are within the range of column factors, in others not. Later gates change no bit of earlier outputs."""
    x = make_inputs("mixed", 160, H=1, initial_state=True)
    g = log_decay(*(x.arguments[n] for n in ("g", "A_log", "dt_bias")))
    g[:, 32:96] /= 16
    x = x.replace(g=g.to(dtype), A_log=None, dt_bias=None, use_gate_in_kernel=None)
    fall = g.view(1, 10, 16, 1, 2, 64)[:, :, 1:].sum(2).amin(-1)
    assert (fall < -105).any() and (fall > -100).any(), "both kinds of panels must exist"
    o, *_ = check(x, 32, 2)
    g[:, 75:] = -50.0
    changed = prefill(x.replace(g=g.to(dtype)).arguments, config_of(x.arguments, 32, 2))[0]
    assert torch.equal(changed[:, :75], o[:, :75]) and not torch.equal(changed, o)


@pytest.mark.parametrize(
    ("chunk", "warpgroups"), [*starmap(nightly, [(64, 1), (64, 2)]), (32, 1), nightly(32, 2)]
)
def test_masks_whose_sum_is_near_the_smallest_exponent(chunk, warpgroups):
    check(make_inputs("finite masks", 160, H=1, HV=2), chunk, warpgroups, intra_chunk_ctas=2, queues=2)


def test_decays_at_the_limit_of_column_factors():
    """In each last block of a chunk one channel of a panel decays by 2^-190, up to roundings. So some sums are above the limit by one order of
    additions and below it by another, and all uses of the limit must agree."""
    x = make_inputs("masked", 256, H=1, HV=4)
    rng = torch.Generator().manual_seed(1)
    shares = torch.rand(4, 15, 4, 2, generator=rng) + 0.1
    decays = 190 * math.log(2) * shares / shares.sum(1, keepdim=True)
    decays[:, -1] *= 1 + 1e-6 * torch.randn(4, 4, 2, generator=rng)
    g = torch.zeros(1, 256, 4, 128)
    g.view(4, 64, 4, 128)[:, 49:, :, 5::64] = -decays
    check(x.replace(g=g), 64, 1, intra_chunk_ctas=2, queues=2)


@pytest.mark.nightly  # every change runs a case of `test_calibration`
@pytest.mark.parametrize(("chunk", "warpgroups"), [(64, 1), (32, 2)])
def test_precomputed_gates_with_masks(chunk, warpgroups):
    check(make_inputs("masked", 100, H=1, HV=2), chunk, warpgroups, intra_chunk_ctas=2, queues=2)


@pytest.mark.parametrize("family", ("slow", *map(nightly, ("steep", "saturated"))))
def test_bounded_gate_in_the_variant_that_votes(family):
    check(make_inputs(family, 72, H=1), 64, 1, unbounded=True)


@pytest.mark.parametrize(
    ("chunk", "warpgroups", "v_first"),
    [(64, 1, True), (64, 2, False), nightly(64, 2, True), nightly(32, 1, False), (32, 1, True)],
)
def test_packed_sequences_split_across_queues(chunk, warpgroups, v_first):
    """With chunks of 64 and intermediate states, the rings of a chain of both halves have two stages. An initial state needs both."""
    lengths = (0, 63, 1, 96, 0, 65)
    x = make_inputs(
        "slow", sum(lengths), H=1, HV=2, lengths=lengths, initial_state=True, state_v_first=v_first
    )
    x = x.replace(return_intermediate_states=True)
    check(x, chunk, warpgroups, queues=3, depth=5, intra_chunk_ctas=2)


@pytest.mark.parametrize(("chunk", "warpgroups"), [nightly(64, 1), (32, 2)])
@pytest.mark.parametrize("padded", (nightly(False), True), ids=("", "padded"))
def test_tokens_outside_all_sequences_are_ignored(chunk, warpgroups, padded):
    """cu_seqlens starts after the first token and ends before the last one. o stays unwritten outside."""
    given, initial = make_inputs("slow", 170, H=1, HV=2), torch.ones(2, 2, 128, 128)
    x = given.arguments | {
        "cu_seqlens": torch.tensor([70, 70, 150], dtype=torch.int32), "initial_state": initial,
    }  # fmt: skip
    config = replace(config_of(x, chunk, warpgroups), padded=padded)
    o, state = prefill(x, config, queues=3, intra_chunk_ctas=2)
    alone = given.tokens(70, 150) | {"initial_state": initial[1:], "output_final_state": True}
    want = token_oracle(**alone)
    limits = tolerance(alone, chunk, oracle=want)
    assert error(o[:, 70:150], want[0]) <= limits[0] and error(state[1:], want[1], state=True) <= limits[1]
    assert torch.equal(state[0], initial[0]) and not o[:, :70].any() and not o[:, 150:].any()


@pytest.mark.parametrize(
    "bounds", [(0, 130, 50), *map(nightly, [(0, 100, 50, 130), (0, 100, -5), (0, 0, 0)])], ids=str
)
@pytest.mark.parametrize("padded", (False, True), ids=("", "padded"))
def test_decreasing_cu_seqlens_end_without_stray_accesses(bounds, padded):
    """Chains that share such tasks could wait for each other for ever. They end, and no access is out of bounds."""
    x = make_inputs("slow", 130, H=1, HV=2).arguments
    x |= {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    prefill(x, replace(config_of(x, 64, 1), padded=padded), queues=3, intra_chunk_ctas=2)


@pytest.mark.nightly
def test_schedule_and_execution_order_change_no_bit():
    x = make_inputs("slow", 300, H=1, initial_state=True).arguments
    config = config_of(x, 32, 2)
    want = prefill(x, config, queues=1, depth=40, intra_chunk_ctas=1)
    for seed, (queues, depth, intra_chunk_ctas) in enumerate([(1, 5, 1), (2, 5, 2), (3, 8, 1), (12, 5, 1)]):
        found = prefill(x, config, queues=queues, depth=depth, intra_chunk_ctas=intra_chunk_ctas, seed=seed)
        assert all(torch.equal(y, z) for y, z in zip(found, want, strict=True)), (
            queues,
            depth,
            intra_chunk_ctas,
            seed,
        )


@pytest.mark.parametrize(
    ("warpgroups", "queues", "intra_chunk_ctas", "depth", "lengths", "helpers"),
    [
        (2, 4, 1, 5, None, 3),  # as many as find items
        (1, 2, 1, 8, None, 3),  # of one queue only one half
        (2, 4, 1, 5, (130, 0, 40, 30), 3),
        nightly(2, 2, 1, 6, None, 2),  # all
        nightly(2, 1, 1, 10, None, 1),
        nightly(2, 3, 1, 5, None, 2),  # as many as find room
        nightly(2, 1, 1, 3, None, 0),  # intra-chunk CTAs do not find room for all first items
        nightly(2, 2, 2, 6, None, 0),  # too few items: `HELP_ABOVE`
    ],
)
def test_chains_that_help_change_no_bit(warpgroups, queues, intra_chunk_ctas, depth, lengths, helpers):
    """As many chains compute first items as find an item for each of their groups, with room in its ring."""
    lengths = lengths or (226,)
    packed = lengths if len(lengths) > 1 else None
    x = make_inputs("slow", sum(lengths), H=2, lengths=packed, initial_state=True)
    counters: dict[str, int] = {}
    launch = {"queues": queues, "intra_chunk_ctas": intra_chunk_ctas, "depth": depth}
    found = check(x, 32, warpgroups, **launch, counters_after=counters)
    config = config_of(x.arguments, 32, warpgroups)
    slots = [max(1, -(-n // 32)) for n in lengths]
    items = queues * max(*slots, -(-2 * sum(slots) // queues))
    # Each group of an intra-chunk CTA claims an item for each one that it computes; helpers claim none.
    assert counters["claimed"] == items - helpers * config.groups
    want = prefill(x.arguments, config, queues=queues, intra_chunk_ctas=6)  # too many groups for help
    assert all(torch.equal(y, z) for y, z in zip(found, want, strict=True))


@pytest.mark.parametrize(
    ("lengths", "queues", "intra_chunk_ctas", "depth", "seed"),
    [
        ((193, 0, 30, 1, 34), 3, 2, 6, 0),
        nightly((193, 0, 30, 1, 170), 3, 2, 6, 0),
        nightly((193, 0, 30, 1, 170), 1, 1, 5, 1),
        nightly((193, 0, 30, 1, 170), 2, 1, 20, 2),
        nightly((500,), 2, 3, 5, 3),
        nightly((160,), 1, 1, 8, 4),
    ],
)
def test_local_records_change_no_bit(lengths, queues, intra_chunk_ctas, depth, seed):
    """Every sixth record is computed by the CTA of its chain. Some of these have no chunk, some are the first or the last of a part."""
    x = make_inputs("slow", sum(lengths), H=1, HV=2, lengths=lengths, initial_state=True).arguments
    config = config_of(x, 32, 2)
    want = prefill(x, config, queues=2, intra_chunk_ctas=2, depth=8)
    schedule = {"queues": queues, "intra_chunk_ctas": intra_chunk_ctas, "depth": depth, "seed": seed}
    found = prefill(x, replace(config, local=True), **schedule)
    assert all(torch.equal(y, z) for y, z in zip(found, want, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_local_records_of_precomputed_gates(dtype):
    x = make_inputs("masked", 226, H=1, HV=2).arguments
    x |= {"g": x["g"].clamp(min=-4).to(dtype)}
    config = replace(config_of(x, 32, 2), unbounded=False)
    want = prefill(x, config, queues=1, intra_chunk_ctas=2)
    found = prefill(x, replace(config, local=True), queues=1, intra_chunk_ctas=2)
    assert all(torch.equal(y, z) for y, z in zip(found, want, strict=True))


def partly_gentle(T, dtype=torch.bfloat16):
    """Returns bounded gates for which some panels of 64 channels fall by less than 60 bits in a chunk of 32 tokens, and others further: in
    the same chunk, and from chunk to chunk. All of them fall by more than 0.5 bits before the second block, whose anchor would then not be 0."""
    x = make_inputs("slow", T, H=1, HV=2, initial_state=True)
    channels, tokens = torch.arange(128), torch.arange(T)
    arguments = x.arguments | {
        "A_log": torch.zeros(2),
        "dt_bias": torch.where(channels < 64, -2.6, -0.3).repeat(2, 1).float(),
        "g": (x.arguments["g"] * 0.2 + 2.0 * ((tokens // 32) % 3 == 1)[None, :, None, None]).to(dtype),
    }
    fall = log_decay(*(arguments[n] for n in ("g", "A_log", "dt_bias")), lower_bound=-5.0) * math.log2(math.e)
    fall = fall[0, : T // 32 * 32].view(-1, 32, 2, 2, 64)
    gentle = (fall.sum(1) > -60).all(-1)
    assert gentle.any() and not gentle.all() and (gentle[..., 0] != gentle[..., 1]).any()
    assert (fall[:, :17].sum(1) < -0.5).all()
    return SimpleNamespace(arguments=arguments, lengths=x.lengths)


@pytest.mark.parametrize(
    ("unbounded", "dtype"),
    [(False, torch.bfloat16), nightly(False, torch.float32), (True, torch.bfloat16)],
)
def test_gentle_panels(unbounded, dtype):
    """Panels of 64 channels that fall little need no anchors. The last chunk is partial."""
    check(partly_gentle(202, dtype), 32, 2, unbounded=unbounded)


def test_local_records_of_gentle_panels_change_no_bit():
    x = partly_gentle(226).arguments
    config = config_of(x, 32, 2)
    want = prefill(x, config, queues=1, intra_chunk_ctas=2)
    found = prefill(x, replace(config, local=True), queues=1, intra_chunk_ctas=2)
    assert all(torch.equal(y, z) for y, z in zip(found, want, strict=True))


@pytest.mark.parametrize(("family", "chunk", "v_first"), [nightly("memory", 64, False), ("slow", 32, True)])
def test_segments_split_across_queues(family, chunk, v_first):
    lengths = (70, 0, 90)
    x = make_inputs(family, sum(lengths), H=1, HV=2, initial_state=True, state_v_first=v_first).arguments
    want = token_oracle(**x, output_final_state=True)
    o, state = in_segments(x, lengths, chunk, queues=(3, 5), intra_chunk_ctas=2)
    limits = tolerance(x, chunk, oracle=want)
    assert error(o, want[0]) <= limits[0]
    assert error(state, want[1], state=True) <= limits[1]


@pytest.mark.nightly  # every change runs a case of `test_calibration`
@pytest.mark.parametrize("columns", (8, 16))
def test_merge_of_segments(columns):
    """Sequences of 3, 1, 0, 2 and 5 segments, in fp32 against fp64. The first start of each sequence stays unchanged, and the last
    exit and transition are not used. The number of columns of a CTA changes no bit."""
    r, bounds = torch.Generator().manual_seed(0), (0, 3, 4, 4, 6, 11)
    starts, exits, transitions = (torch.randn(bounds[-1], 2, 128, 128, generator=r) for _ in range(3))
    transitions = transitions / 16 + torch.eye(128)
    for last in (2, 3, 5, 10):
        exits[last] = transitions[last] = float("nan")
    want, again = starts.double(), starts.clone()
    for first, end in pairwise(bounds):
        for n in range(first + 1, end):
            B = exits[n - 1].double()
            want[n] = B if n == first + 1 else transitions[n - 1].double() @ want[n - 1] + B
    merge(starts, exits, transitions, torch.tensor(bounds, dtype=torch.int32), columns)
    if columns != 8:
        merge(again, exits, transitions, torch.tensor(bounds, dtype=torch.int32), 8)
        assert torch.equal(starts, again)
    for n in range(bounds[-1]):
        if n in bounds:
            assert torch.equal(starts[n], want[n].float())
        else:
            assert error(starts[n : n + 1], want[n : n + 1], state=True) < 4e-7


def test_merge_of_segments_does_not_drift():
    """All products are positive: accumulators that truncate would make every element too small."""
    r = torch.Generator().manual_seed(0)
    starts, exits, transitions = (torch.rand(6, 1, 128, 128, generator=r) for _ in range(3))
    transitions /= 64
    want = starts.double()
    want[1] = exits[0]
    for n in range(2, 6):
        want[n] = transitions[n - 1].double() @ want[n - 1] + exits[n - 1].double()
    merge(starts, exits, transitions, torch.tensor([0, 6], dtype=torch.int32))
    assert error(starts[1:], want[1:], state=True) < 3e-7
