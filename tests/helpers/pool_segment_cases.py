"""Calls in segments over pools of states, by emulated kernels of a GPU backend: both calls of the backend, and whole calls split by kda-cp."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from helpers.emulated_cases import KIT, EmulatedBackend
from helpers.nightly import nightly
from kda_core import chunk_kda, explain, pools, slots
from kda_core.contract import Feature
from kda_core.registry import REGISTRY
from kda_core.testing import error, record_calls, serving
from kda_cp import Plan, native
from kda_cute import host

PLAN = Plan(((20, 12, 7), (0,), (33, 2), (5,), (2, 3)))  # cuts inside chunks
AT_64 = Plan(((64, 66), (64, 1)))  # for checkpoints
#: Sequence 0 reads the slot that it writes, 1 has no tokens, 2 starts from no slot, 3 from zeros, and 4 is skipped.
SCENARIO = serving.Scenario(
    (3, 1, 0, 6, -1), (3, 5, 2, 6, -1), (True, True, True, False, True), first_slot=1, fresh=(6,)
)


def tokens(kda, plan):
    return kda.inputs("slow", sum(plan.lengths), lengths=plan.lengths, H=1)


def points(pool, rows):
    """Returns the arguments of checkpoints; ``rows``: (position, slot) of each sequence."""
    flat = [pair for row in rows for pair in row]
    return {
        "checkpoint_cu": pool.index((0, *accumulate(map(len, rows)))),
        "checkpoint_positions": pool.index([p for p, _ in flat]),
        "checkpoint_indices": pool.index([s for _, s in flat]),
    }


class PoolSegmentCases(EmulatedBackend):
    """Base of a test class for one backend."""

    @pytest.fixture
    def uncopied(self, monkeypatch):
        """Returns a function after whose call core copies no states."""

        def forbid():
            monkeypatch.setattr(pools, "_with_copies", None)
            monkeypatch.setattr(slots, "initial_states", None)

        return forbid

    def run(self, x, plan):
        """Returns o of a call that kda-cp splits over its pool."""
        given = {n: y for n, y in x.items() if n != "out"}
        told = explain(**given, backend=self.backend, context_parallel=plan)
        assert told.pool == "the backend" and told.plan.startswith("cp: exact (")
        return self.split(x, plan)

    def split(self, x, plan):
        with record_calls() as calls:
            o, *_ = chunk_kda(**x, backend=self.backend, context_parallel=plan)
        assert [(c.backend, c.planner) for c in calls] == [(self.backend, "cp")]
        return o

    @pytest.mark.nightly
    def test_both_calls_have_the_bits_of_copied_states(self, kda):
        KIT.test_segments_over_a_pool(kda, "bf16-vk")

    def test_segments_store_checkpoints(self, kda):
        KIT.test_checkpoints_of_segments(kda, "fp32-kv")

    @pytest.mark.parametrize("form", (nightly("fp32-vk"), "bf16-kv"))
    def test_a_split_call_has_the_bits_of_copied_states(self, kda, form, uncopied):
        x, found = tokens(kda, PLAN), {}
        serving.spoil(x, PLAN.lengths, SCENARIO.skipped())
        for copies in (True, False):
            pool = serving.Pool(kda, form, HV=1)
            pool.states[list(SCENARIO.fresh)] = torch.nan
            given = x | serving.arguments(pool, SCENARIO) | {"out": torch.full_like(x["v"], torch.nan)}
            if copies:
                spec = REGISTRY.find(self.backend).spec
                older = replace(spec, features=spec.features - {Feature.POOL_SEGMENTS.value})
                with REGISTRY.replaced(older, REGISTRY.load(spec), "without segments over pools"):
                    found[copies] = self.split(given, PLAN), pool.bits()
            else:
                uncopied()
                found[copies] = self.run(given, PLAN), pool.bits()
        assert all(map(torch.equal, found[True], found[False]))

    @pytest.mark.nightly
    def test_windows_and_strided_inputs_agree_with_a_direct_call(self, kda, monkeypatch, uncopied):
        """Windows of at most 64 tokens continue sequence 0 twice, and checkpoints lie at the ends of segments and inside of them."""
        uncopied()
        monkeypatch.setattr(host, "aligned", None)  # copies nothing
        x, found = tokens(kda, AT_64), {}
        wide = torch.cat([x[n] for n in "qkv"], -1)
        x |= dict(zip("qkv", wide.split(128, -1)))
        for size in (64, 0):
            monkeypatch.setattr(native, "window_tokens", lambda *_, size=size: size)
            pool = serving.Pool(kda, "fp32-vk", HV=1)
            given = x | pool.arguments((3, 2)) | points(pool, (((64, 1), (128, 4)), ((64, 7),)))
            if size:
                o = self.run(given, AT_64)
            else:
                o, _ = chunk_kda(**given, backend=self.backend, context_parallel="off")
            found[size] = o, pool
        (o, pool), (want, direct) = found.values()
        assert error(o, want, lengths=AT_64.lengths) < 1e-2
        for slot in (1, 4, 7, 3, 2):
            assert error(pool.states[slot : slot + 1], direct.states[slot : slot + 1], state=True) < 1e-2
            pool.states[slot] = direct.states[slot]
        assert torch.equal(pool.bits(), direct.bits())
