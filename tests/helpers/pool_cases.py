"""Prefill over pools of states, with checkpoints and strided inputs, by emulated kernels of a GPU backend."""

from itertools import accumulate
from typing import Any, ClassVar

import pytest
import torch

from helpers.emulated_cases import SLOTS, EmulatedBackend
from helpers.nightly import nightly
from kda_core import explain, pools
from kda_core.testing import record_calls, serving
from kda_core.testing.inputs import Inputs
from kda_core.testing.runner import Case

LENGTHS = (66, 0, 17, 3, 5)  # of the sequences of SLOTS


def checkpoints(pool, rows, index=torch.int32):
    """Returns the arguments of checkpoints; ``rows``: (position, slot) of each sequence."""
    flat = [pair for row in rows for pair in row]
    cu, positions = (0, *accumulate(map(len, rows))), [p for p, _ in flat]
    return {
        "checkpoint_cu": pool.index(cu), "checkpoint_positions": pool.index(positions),
        "checkpoint_indices": pool.index([s for _, s in flat], index),
    }  # fmt: skip


class PoolCases(EmulatedBackend):
    """Base of a test class for one backend, which defines `chunk_of`.

    Attributes:
        launch_config: module of the backend that chooses launches.
        caches: functions with a cache that depends on these choices.
    """

    launch_config: Any
    caches: ClassVar[tuple[Any, ...]]

    @pytest.fixture
    def cleared(self):
        """Clears the caches, before the test and after it."""
        for cache in self.caches:
            cache.cache_clear()
        yield
        for cache in self.caches:
            cache.cache_clear()

    @pytest.fixture(autouse=True)
    def no_copies(self, monkeypatch):
        monkeypatch.setattr(pools, "_with_copies", None)  # core copies no states

    @pytest.mark.parametrize("form", ("bf16-kv", *map(nightly, sorted({*serving.POOL_FORMS} - {"bf16-kv"}))))
    def test_a_pool_has_the_bits_of_gather_call_and_scatter(self, kda, form):
        x, pool = kda.inputs("slow", sum(LENGTHS), lengths=LENGTHS, H=1), serving.Pool(kda, form, HV=1)
        serving.spoil(x, LENGTHS, SLOTS.skipped())
        pool.states[list(SLOTS.fresh)] = torch.nan
        want, bits, _ = serving.by_copies(kda, x, pool, LENGTHS, SLOTS)
        given = x | serving.arguments(pool, SLOTS)
        before = pool.bits()
        o, state = kda(given | {"output_final_state": False, "out": torch.full_like(x["v"], torch.nan)})
        assert torch.equal(o, want) and state is None and torch.equal(pool.bits(), before)
        with record_calls() as calls:
            o, state = kda(given | {"out": torch.full_like(x["v"], torch.nan)})
        assert [c.backend for c in calls] == [self.backend]
        assert explain(**given, backend=self.backend).pool == "the backend"
        assert torch.equal(o, want) and state is pool.states
        assert torch.equal(pool.bits(), bits)

    @pytest.mark.parametrize("form", (nightly("fp32-vk"), "bf16-kv"))
    def test_checkpoints_are_the_states_of_calls_that_end_there(self, kda, form):
        """Several in a sequence, at 64, at the length; ignored ones; those of a skipped sequence."""
        lengths = (200, 64, 70, 65)
        x, pool, kept, want = (
            kda.inputs("slow", sum(lengths), lengths=lengths, H=1),
            *(serving.Pool(kda, form, HV=1) for _ in range(3)),
        )
        rows = (
            ((0, 2), (64, 1), (100, 2), (128, 3), (64, 2), (192, -1), (256, 2)),
            ((64, 4),),
            ((100, 2), (64, 2)),  # behind a larger position, though that is ignored too
            ((64, 5),),
        )
        slot = (3, 1, 0, -1)
        more = checkpoints(kept, rows, torch.int64) | {"checkpoint_pool": kept.states}
        before = pool.states.clone()
        kda(x | pool.arguments(slot) | {"ssm_state_indices": pool.index(slot, torch.int64)} | more, pin=True)
        for n, position, target in ((0, 64, 1), (0, 128, 3), (1, 64, 4)):
            start = sum(lengths[:n])
            part = {m: x[m][:, start : start + position] for m in serving.PER_TOKEN}
            alone = {m: y for m, y in x.items() if m != "cu_seqlens"} | part
            given = alone | {
                "initial_state": before[slot[n] : slot[n] + 1].float(),
                "state_v_first": pool.v_first,
            }
            want.states[target] = kda(given, output_final_state=True, pin=True)[1][0].to(want.states.dtype)
        assert torch.equal(kept.bits(), want.bits())

    def test_a_call_that_resumes_from_a_checkpoint_has_the_bits_of_the_whole(self, kda):
        x, pool = kda.inputs("slow", 130, H=1), serving.Pool(kda, "fp32-vk", HV=1)
        initial = pool.states[3:4].clone()
        o, _ = kda(x | pool.arguments((3,)) | checkpoints(pool, (((64, 4), (128, 5)),)), pin=True)
        kda.check(Case(Inputs(x | {"initial_state": initial, "state_v_first": True})), o, pool.states[3:4])
        for position, prefix in ((64, 4), (128, 5)):
            rest = {m: x[m][:, position:] for m in serving.PER_TOKEN}
            kept = pool.states[prefix].clone()
            given = pool.arguments((prefix,), final_state_indices=pool.index((1,)))
            assert torch.equal(kda(x | rest | given, pin=True)[0], o[:, position:])
            assert torch.equal(pool.states[1], pool.states[3]) and torch.equal(pool.states[prefix], kept)

    def test_checkpoints_of_chunks_of_32_change_no_bit(self, kda, monkeypatch, cleared):
        monkeypatch.setattr(self.launch_config, "CHUNKS", (32,))
        x, pool, plain = kda.inputs("slow", 130, H=1, HV=2), serving.Pool(kda), serving.Pool(kda)
        assert self.chunk_of(kda.shape(x | pool.arguments((3,)))) == 32
        o, _ = kda(x | pool.arguments((3,)) | checkpoints(pool, (((64, 4), (128, 5)),)))
        part = {m: x[m][:, :128] for m in serving.PER_TOKEN}
        kda(x | part | plain.arguments((3,), final_state_indices=plain.index((5,))))
        want, _ = kda(x | plain.arguments((3,)))
        assert torch.equal(o, want) and torch.equal(pool.states[[3, 5]], plain.states[[3, 5]])

    @pytest.mark.parametrize("packed", (False, nightly(True)), ids=("fixed", "packed"))
    def test_views_of_one_projection_are_not_copied(self, kda, monkeypatch, packed):
        from kda_cute import host

        lengths = (66, 3) if packed else None
        x = kda.inputs("slow", 69 if packed else 33, B=1 if packed else 2, lengths=lengths, H=1, HV=2)
        want = kda(x, output_final_state=True)
        monkeypatch.setattr(host, "aligned", None)  # copies nothing
        views = dict(x)
        for names in (("q", "k", "v"), ("g",), ("beta",)):
            parts = [x[n].flatten(2) for n in names]
            whole = torch.cat([parts[0].new_full((*parts[0].shape[:2], 8), torch.nan), *parts], -1)
            at = 8
            for n, part in zip(names, parts):
                views[n] = whole[..., at : at + part.shape[-1]].unflatten(-1, x[n].shape[2:])
                at += part.shape[-1]
        assert not any(views[n].is_contiguous() for n in serving.PER_TOKEN)
        found = kda(views, output_final_state=True)
        assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])

    @pytest.mark.nightly
    def test_slots_and_lengths_are_read_anew(self, kda):
        serving.ServingConformance.test_pool_is_read_anew(None, kda)

    def test_a_call_without_tokens_passes_states_from_slot_to_slot(self, kda):
        x, pool = kda.inputs("slow", 0, lengths=(0, 0), H=1), serving.Pool(kda, HV=1)
        state = pool.states[3].clone()
        kda(x | pool.arguments((3, -1), final_state_indices=pool.index((5, -1))))
        assert torch.equal(pool.states[5], state)
