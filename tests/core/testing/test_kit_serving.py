"""The kit's tests of serving accept core's copies for a backend without pools, and find defective backends with pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.segmented_backend import SPEC as SEGMENTED
from helpers.segmented_backend import Segmented

from kda_core.contract import Feature
from kda_core.reference import SPEC, ReferenceBackend
from kda_core.registry import REGISTRY
from kda_core.testing.conformance import BackendConformance
from kda_core.testing.runner import Runner
from kda_core.testing.serving import ServingConformance

KIT = BackendConformance()
POOLS = {
    Feature.STATE_POOL,
    Feature.BF16_POOL,
    Feature.TOKEN_STATES,
    Feature.CHECKPOINTS,
    Feature.STRIDED,
    Feature.JOURNAL,
}


class TestReference(ServingConformance):
    """The tests on `reference`."""

    head_dim = 16
    backend, device, quick = "reference", "cpu", False
    kda = BackendConformance.kda


class TestCopies(TestReference):
    """The tests on `reference` without what concerns pools, so that core copies the states."""

    @pytest.fixture(autouse=True)
    def without_pools(self):
        features = SPEC.features - {f.value for f in POOLS}
        with REGISTRY.replaced(replace(SPEC, features=features), ReferenceBackend(), "without pools"):
            yield


def kda():
    return Runner("reference", "cpu", 16, True)


class Changed(ReferenceBackend):
    """`reference` with another pool than that of the call."""

    def pool(self, pool):
        return pool

    def _forward(self, inputs, outputs, block):
        changed = inputs if inputs.pool is None else replace(inputs, pool=self.pool(inputs.pool))
        return super()._forward(changed, outputs, block)


class Journals(ReferenceBackend):
    """`reference` with another journal than that of the call."""

    def journal(self, journal):
        return journal

    def journal_decode(self, inputs, outputs):
        return super().journal_decode(replace(inputs, journal=self.journal(inputs.journal)), outputs)


class NeverFolds(Journals):
    def journal(self, journal):
        return replace(journal, length=journal.length + 1)


class IgnoresRecords(Journals):
    def journal(self, journal):
        return journal if journal.spans is None else replace(journal, spans=torch.zeros_like(journal.spans))


class RoundsRecords(ReferenceBackend):
    def journal_decode(self, inputs, outputs):
        super().journal_decode(inputs, outputs)
        inputs.journal.u.copy_(inputs.journal.u.bfloat16())
        return outputs


class IgnoresAcceptedDrafts(ReferenceBackend):
    def journal_fold(self, shape, pool, journal):
        if journal.accepted is not None:
            journal = replace(journal, accepted=torch.full_like(journal.accepted, 4))
        super().journal_fold(shape, pool, journal)


class StoresOtherDecays(ReferenceBackend):
    """Stores sums of log decays of at most -0.25."""

    def journal_decode(self, inputs, outputs):
        super().journal_decode(inputs, outputs)
        inputs.journal.G.clamp_(max=-0.25)
        return outputs


class IgnoresTheMask(Changed):
    def pool(self, pool):
        return replace(pool, has_initial_state=None)


class IgnoresTheFirstSlot(Changed):
    def pool(self, pool):
        return replace(pool, first_slot=0)


class WritesWhereItReads(Changed):
    def pool(self, pool):
        return replace(pool, write=pool.read)


class WrapsNegativeSlots(Changed):
    def pool(self, pool):
        n = len(pool.states)
        wrapped = [torch.where(x < 0, x + n, x) for x in (pool.read, pool.write)]
        return replace(pool, read=wrapped[0], write=wrapped[1])


class IgnoresAcceptedTokens(Changed):
    def pool(self, pool):
        return replace(pool, num_accepted_tokens=None)


class LeavesSkippedRows(ReferenceBackend):
    def _forward(self, inputs, outputs, block):
        before = outputs.o.clone()
        super()._forward(inputs, outputs, block)
        if inputs.pool is not None:
            empty = (outputs.o == 0).all(-1).all(-1)
            outputs.o[empty] = before[empty]
        return outputs


class WritesAReadOnlyPool(ReferenceBackend):
    def _forward(self, inputs, outputs, block):
        if inputs.pool is not None:
            shape = replace(inputs.shape, pool=replace(inputs.shape.pool, writes=True))
            inputs = replace(inputs, shape=shape)
        return super()._forward(inputs, outputs, block)


class ShiftsCheckpoints(Changed):
    def pool(self, pool):
        if pool.checkpoints is None:
            return pool
        positions = pool.checkpoints.positions + 64
        return replace(pool, checkpoints=replace(pool.checkpoints, positions=positions))


class StoresAnyPosition(Changed):
    """Rounds positions down to a multiple of 64 instead of ignoring them."""

    def pool(self, pool):
        if pool.checkpoints is None:
            return pool
        positions = pool.checkpoints.positions // 64 * 64
        return replace(pool, checkpoints=replace(pool.checkpoints, positions=positions))


class DependsOnTheBatch(ReferenceBackend):
    def recurrent_fwd(self, inputs, outputs):
        super().recurrent_fwd(inputs, outputs)
        if inputs.shape.N > 1:
            outputs.o.mul_(1 + 2.0**-7)
        return outputs


class DependsOnTheTokens(ReferenceBackend):
    def recurrent_fwd(self, inputs, outputs):
        super().recurrent_fwd(inputs, outputs)
        if inputs.shape.T > 1:
            outputs.o.mul_(1 + 2.0**-7)
        return outputs


class KeepsValues(Changed):
    """Uses values of the first call over each pool again, as a captured constant would."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def value(self, pool, name, tensor):
        return self.kept.setdefault((pool.states.data_ptr(), name), tensor.clone())


class KeepsAcceptedTokens(KeepsValues):
    def pool(self, pool):
        return replace(pool, num_accepted_tokens=self.value(pool, "accepted", pool.num_accepted_tokens))


class KeepsCheckpoints(KeepsValues):
    def pool(self, pool):
        kept = self.value(pool, "positions", pool.checkpoints.positions)
        return replace(pool, checkpoints=replace(pool.checkpoints, positions=kept))


class ReadsDenseMemory(ReferenceBackend):
    """Ignores the strides of q."""

    def _forward(self, inputs, outputs, block):
        q = inputs.q
        dense = torch.as_strided(q, q.shape, torch.empty(q.shape).stride())
        return super()._forward(replace(inputs, q=dense), outputs, block)


class InSegments(Segmented):
    """The test backend of segments with another `KdaSegments` than that of the call."""

    def summarize(self, inputs, *rest):
        super().summarize(replace(inputs, segments=self.changed(inputs.segments, "summarize")), *rest)

    def execute_segments(self, inputs, outputs):
        return super().execute_segments(
            replace(inputs, segments=self.changed(inputs.segments, "execute")), outputs
        )


class StartsFromSlotsInside(InSegments):
    def changed(self, segments, call):
        return segments and replace(segments, before=torch.zeros_like(segments.before))


class EndsEverywhere(InSegments):
    def changed(self, segments, call):
        return segments and replace(segments, ends=torch.ones_like(segments.ends))


class CountsFromTheSegment(InSegments):
    def changed(self, segments, call):
        return replace(segments, before=segments.before * (call == "summarize"))


class KeepsNoInitialStates(Segmented):
    def summarize(self, inputs, *rest):
        if inputs.segments is not None:
            inputs = replace(inputs, initial_state=inputs.initial_state.clone())
        super().summarize(inputs, *rest)


class WritesSlotsEarly(Segmented):
    def summarize(self, inputs, *rest):
        super().summarize(inputs, *rest)
        if inputs.pool is not None:
            inputs.pool.states[5] = 0


DEFECTS_IN_SEGMENTS = [
    (StartsFromSlotsInside, lambda: KIT.test_segments_over_a_pool(kda(), "fp32-kv"), "exits have other bits"),
    (
        EndsEverywhere,
        lambda: KIT.test_segments_over_a_pool(kda(), "bf16-vk"),
        "at the ends of inner segments",
    ),
    (KeepsNoInitialStates, lambda: KIT.test_segments_over_a_pool(kda(), "fp32-kv"), "other initial states"),
    (WritesSlotsEarly, lambda: KIT.test_segments_over_a_pool(kda(), "bf16-vk"), "summarize changed the pool"),
    (CountsFromTheSegment, lambda: KIT.test_checkpoints_of_segments(kda(), "fp32-kv"), "the checkpoint of"),
]


@pytest.mark.parametrize(
    ("backend", "test", "words"), DEFECTS_IN_SEGMENTS, ids=[d[0].__name__ for d in DEFECTS_IN_SEGMENTS]
)
def test_a_defect_in_segments_is_found(backend, test, words):
    spec = replace(SPEC, features=SEGMENTED.features)
    with REGISTRY.replaced(spec, Segmented(), "in segments"):
        test()
    with REGISTRY.replaced(spec, backend(), "defective"), pytest.raises(AssertionError, match=words):
        test()


DEFECTS = [
    (IgnoresTheMask, lambda: KIT.test_pool(kda(), "prefill", "fp32-kv"), "fresh"),
    (IgnoresTheFirstSlot, lambda: KIT.test_pool(kda(), "decode", "fp32-kv"), "null slot"),
    (WritesWhereItReads, lambda: KIT.test_pool(kda(), "prefill", "bf16-vk"), "shared prefix"),
    (WrapsNegativeSlots, lambda: KIT.test_pool(kda(), "decode", "bf16-vk"), "negative"),
    (LeavesSkippedRows, lambda: KIT.test_pool(kda(), "prefill", "fp32-kv"), "other bits"),
    (WritesAReadOnlyPool, lambda: KIT.test_pool(kda(), "prefill", "fp32-kv"), "read only"),
    (IgnoresAcceptedTokens, lambda: KIT.test_slots_of_tokens(kda(), False, "fp32-kv"), "o with a slot"),
    (ShiftsCheckpoints, lambda: KIT.test_checkpoints(kda(), "fp32-kv"), "the checkpoint of"),
    (StoresAnyPosition, lambda: KIT.test_checkpoints(kda(), "fp32-kv"), "a slot of no checkpoint"),
    (ShiftsCheckpoints, lambda: KIT.test_resumed_checkpoints(kda(), "another pool"), "o after 64 tokens"),
    (DependsOnTheBatch, lambda: KIT.test_decode_bits(kda()), "other bits alone"),
    (DependsOnTheTokens, lambda: KIT.test_decode_bits_of_several_tokens(kda(), "fp32-vk"), "o of token 0"),
    (KeepsAcceptedTokens, lambda: KIT.test_slots_of_tokens_are_read_anew(kda()), None),
    (KeepsCheckpoints, lambda: KIT.test_pool_is_read_anew(kda()), None),
    (ReadsDenseMemory, lambda: KIT.test_strided_views(kda(), "prefill"), None),
    (NeverFolds, lambda: KIT.test_journal(kda(), "fp32-kv"), None),
    (IgnoresRecords, lambda: KIT.test_journal(kda(), "fp32-kv"), "error of o"),
    (RoundsRecords, lambda: KIT.test_journal(kda(), "fp32-kv"), "the state of slot"),
    (StoresOtherDecays, lambda: KIT.test_fold_then_decode(kda()), None),
    (IgnoresAcceptedDrafts, lambda: KIT.test_rollback(kda(), "verify", "fp32-vk"), "no draft of slot 3"),
    (IgnoresTheMask, lambda: KIT.test_requests(Runner("reference", "cpu", 16, False)), None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "test", "words"), DEFECTS, ids=[f"{n}-{d[0].__name__}" for n, d in enumerate(DEFECTS)]
)
def test_a_defect_is_found(backend, test, words):
    test()  # passes on `reference` itself
    with REGISTRY.replaced(SPEC, backend(), "defective"), pytest.raises(AssertionError, match=words):
        test()
