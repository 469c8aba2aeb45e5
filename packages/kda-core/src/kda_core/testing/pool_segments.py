"""The conformance tests of calls in segments over a pool (`Feature.POOL_SEGMENTS`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_core import buffers
from kda_core.contract import (
    Feature,
    KdaCheckpoints,
    KdaInputs,
    KdaOutputs,
    KdaPool,
    KdaSegments,
    PoolShape,
)
from kda_core.registry import REGISTRY
from kda_core.testing.inputs import Inputs
from kda_core.testing.runner import Case, Runner
from kda_core.testing.serving import PER_TOKEN, POOL_FORMS, SLOTS, Pool, Scenario, arguments, spoil
from kda_core.testing.tolerance import error

SEGMENTS = ((32, 33), (0,), (17, 64, 2), (5,), (3, 1))
"""Tokens of the segments of each sequence."""
SEGMENTS_AT_64 = ((64, 66), (0,), (128, 2), (5,), (64, 1))
"""The same for `CHECKPOINTS`."""
SCENARIO = Scenario(
    (3, 1, 0, 6, -1), (3, 5, 2, 6, SLOTS), (True, True, True, False, True), first_slot=1, fresh=(6,)
)
"""Sequence 0 reads the slot that it writes, 1 has no tokens, 2 starts from no slot, 3 from zeros, and 4 is skipped."""
CHECKPOINTS = (
    ((64, 1), (100, 7), (128, 4), (192, 7)),  # at the end of a segment, and inside of one; two are ignored
    (),
    ((64, 0), (128, 5), (192, 7)),  # inside of a segment, but slot 0 is none; at its end
    ((64, 7),),  # beyond the sequence
    ((64, 7),),
)


class PoolSegmentsConformance:
    """A part of `kda_core.testing.conformance.BackendConformance`, which has the fixture `kda`."""

    @pytest.mark.parametrize("form", POOL_FORMS)
    def test_segments_over_a_pool(self, kda: Runner, form: str) -> None:
        """Both calls have the bits of those with copied states. Every slot is read in the first one and written in the second one."""
        kda.full_only(form in ("fp32-vk", "bf16-kv"))
        call = _Call(kda, form, SEGMENTS)
        exits, transitions, final, o = call.dense()
        for writes in (True, False) if form == "bf16-vk" else (True,):
            before = call.pool.bits()
            inputs, workspace = call.over_pool(writes)
            found = call.new_summaries()
            call.backend.summarize(inputs, *found, workspace)
            assert torch.equal(call.pool.bits(), before), "summarize changed the pool"
            for what, got, want in zip(("exits", "transitions"), found, (exits, transitions)):
                assert torch.equal(got[call.live], want[call.live]), f"{what} have other bits"
            first = call.live & (call.before == 0)
            wanted = call.starts[first]
            assert torch.equal(inputs.initial_state[first], wanted), "summarize keeps other initial states"  # type: ignore[index]
            got_o, got_final = call.execute(inputs, workspace)
            assert torch.equal(got_o, o), f"o has other bits, writes={writes}"
            inner = call.live & ~call.ends
            assert torch.equal(got_final[inner], final[inner]), "states at the ends of inner segments"
            assert bool(got_final[call.ends].isnan().all()), (
                "the final state of a last segment was written twice"
            )
            if writes:
                call.expect(final)
            same = torch.equal(call.pool.bits(), before if not writes else call.expected.bits())
            assert same, f"the pool has other bits, writes={writes}"
            call.reset()

    @pytest.mark.parametrize("form", ("fp32-kv", "bf16-vk"))
    def test_checkpoints_of_segments(self, kda: Runner, form: str) -> None:
        """Each segment stores the checkpoints at its end and inside of it, and no others, also if no state goes on behind the last one."""
        kda.require(Feature.CHECKPOINTS)
        call, kept, untouched = _Call(kda, form, SEGMENTS_AT_64), Pool(kda, form, HV=1), Pool(kda, form, HV=1)
        inputs, workspace = call.over_pool(True, kept)
        exits, transitions = call.new_summaries()
        call.backend.summarize(inputs, exits, transitions, workspace)
        call.merge(exits, transitions)
        call.execute(inputs, workspace)
        initial = call.starts[call.before == 0]
        for n, position, slot in ((0, 64, 1), (0, 128, 4), (2, 128, 5)):
            start = sum(call.lengths[:n])
            part = {m: call.x[m][:, start : start + position] for m in PER_TOKEN}
            alone = {m: y for m, y in call.x.items() if m != "cu_seqlens"} | part
            case = Case(Inputs(alone | {"initial_state": initial[n : n + 1]}))
            state = kept.states[slot].mT if kept.v_first else kept.states[slot]
            off = error(state.unsqueeze(0), case.oracle[1], state=True)
            limit = case.limits[1] + (2.0**-8 if form.startswith("bf16") else 0.0)
            kda.within(off, limit, f"the checkpoint of sequence {n} at {position}")
        for stored in (kept, untouched):
            stored.states[[1, 4, 5]] = 0
        assert torch.equal(kept.bits(), untouched.bits()), "a slot of no checkpoint was written"


class _Call:
    """A call in segments over a pool, with one value head, and the same with dense states.

    Attributes:
        lengths: of the sequences.
        before, ends: as in `KdaSegments`. live: the segments of sequences that are not skipped. All [P], on the device.
        starts: [P, HV, K, V], the states at the starts of the segments; `merge` computes those between segments.
        pool, expected: the pool, and after `expect` one with the wanted contents.
    """

    def __init__(self, kda: Runner, form: str, segments: tuple[tuple[int, ...], ...]) -> None:
        needed = Feature.SEGMENT_SUMMARY, Feature.VARLEN, Feature.INITIAL_STATE, Feature.FINAL_STATE
        kda.require(Feature.POOL_SEGMENTS, *needed)
        self.kda = kda
        self.backend: Any = REGISTRY.load(REGISTRY.find(kda.backend).spec)
        self.lengths = tuple(map(sum, segments))
        self.x = kda.inputs("slow", sum(self.lengths), lengths=self.lengths, H=1)
        spoil(self.x, self.lengths, SCENARIO.skipped())
        self.pool, self.expected = Pool(kda, form, HV=1), Pool(kda, form, HV=1)
        self.form = form
        self.reset()
        kda.may_run(self.x | arguments(self.pool, SCENARIO))
        flat = [(n, length) for n, lengths in enumerate(segments) for length in lengths]
        before = [b for lengths in segments for b in accumulate(lengths[:-1], initial=0)]
        ends = [b + length == self.lengths[n] for (n, length), b in zip(flat, before)]
        on_device = lambda values, dtype: torch.tensor(values, dtype=dtype, device=kda.device)
        self.sequence = on_device([n for n, _ in flat], torch.int32)
        self.before, self.ends = on_device(before, torch.int32), on_device(ends, torch.bool)
        self.live = ~on_device(SCENARIO.skipped(), torch.bool)[self.sequence.long()]
        self.offsets = on_device([0, *accumulate(length for _, length in flat)], torch.int32)
        self.starts = kda.states(len(flat), 1)
        for p, (n, b) in enumerate(zip(self.sequence.tolist(), before)):
            slot = SCENARIO.read[n]
            if b == 0 and SCENARIO.is_slot(slot) and SCENARIO.has and SCENARIO.has[n]:
                state = self.pool.states[slot]
                self.starts[p] = state.mT if self.pool.v_first else state

    def reset(self) -> None:
        """Gives both pools their first contents."""
        fresh = Pool(self.kda, self.form, HV=1)
        fresh.states[list(SCENARIO.fresh)] = torch.nan
        for pool in (self.pool, self.expected):
            pool.buffer.copy_(fresh.buffer)

    def expect(self, final: Tensor) -> None:
        """Writes the final states [P, HV, K, V] of last segments to the slots of `expected`."""
        for n, p in enumerate(self.ends.nonzero().flatten().tolist()):
            if SCENARIO.is_slot(slot := SCENARIO.written[n]):
                state = final[p].mT if self.pool.v_first else final[p]
                self.expected.states[slot] = state.to(self.expected.states.dtype)

    def inputs(self, states: Tensor, **options: Any) -> KdaInputs:
        """Returns the inputs of the packed call over the segments."""
        packed = {"initial_state": states, "cu_seqlens": self.offsets, "cu_seqlens_cpu": self.offsets.cpu()}
        return self.kda.backend_inputs(self.x | packed, output_final_state=True, **options)

    def workspace(self, inputs: KdaInputs) -> Tensor:
        size = self.backend.segment_workspace_bytes(inputs.shape)
        return torch.full((size,), 255, dtype=torch.uint8, device=self.kda.device)

    def dense(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Computes `starts`. Returns exits, transitions and states at the ends of the segments, and o with the zeros of skipped
        sequences."""
        inputs = self.inputs(self.starts.clone())
        exits, transitions = self.new_summaries()
        workspace = self.workspace(inputs)
        self.backend.summarize(inputs, exits, transitions, workspace)
        self.merge(exits, transitions)
        v_first = self.pool.v_first
        states = (self.starts.mT if v_first else self.starts).contiguous()
        inputs = self.inputs(states, state_v_first=v_first)
        outputs = buffers.allocate_outputs(inputs, 0, buffers.GivenOutputs(workspace=workspace))
        self.backend.execute_segments(inputs, outputs)
        assert outputs.final_state is not None
        start = sum(self.lengths[:-1])
        assert SCENARIO.skipped() == [False] * (len(self.lengths) - 1) + [True]
        outputs.o[:, start:] = 0
        final = outputs.final_state.mT if v_first else outputs.final_state
        return exits, transitions, final, outputs.o

    def new_summaries(self) -> tuple[Tensor, Tensor]:
        """Returns memory for exits and transitions, filled with NaN."""
        K = self.kda.K
        exits = torch.full_like(self.starts, torch.nan)
        return exits, self.starts.new_full((*self.starts.shape[:2], K, K), torch.nan)

    def merge(self, exits: Tensor, transitions: Tensor) -> None:
        """Computes the states between segments, in fp64."""
        before = self.before.tolist()
        for p, b in enumerate(before):
            if b > 0:
                through = transitions[p - 1].double() @ self.starts[p - 1].double()
                self.starts[p] = exits[p - 1] if before[p - 1] == 0 else through + exits[p - 1].double()

    def over_pool(self, writes: bool, kept: Pool | None = None) -> tuple[KdaInputs, Tensor]:
        """Returns the inputs of both calls over the pool, and their workspace. First segments have NaNs as initial states. ``kept``: where
        `CHECKPOINTS` go."""
        pool, index = self.pool, self.pool.index
        checkpoints = None
        if kept is not None:
            flat = [pair for row in CHECKPOINTS for pair in row]
            cu = index((0, *accumulate(map(len, CHECKPOINTS))))
            checkpoints = KdaCheckpoints(
                kept.states, cu, index([position for position, _ in flat]), index([slot for _, slot in flat])
            )
        has = torch.tensor(SCENARIO.has, device=pool.buffer.device)
        given = KdaPool(
            pool.states, index(SCENARIO.read), index(SCENARIO.written), SCENARIO.first_slot, has, None, checkpoints
        )  # fmt: skip
        starts = torch.where((self.before == 0).view(-1, 1, 1, 1), torch.nan, torch.zeros_like(self.starts))
        inputs = self.inputs(starts)
        facts = PoolShape(
            pool.states.dtype, torch.int32, writes, has_mask=True,
            checkpoint_dtype=None if kept is None else kept.states.dtype,
        )  # fmt: skip
        options = replace(inputs.options, state_v_first=pool.v_first, output_final_state=kept is None)
        segments = KdaSegments(self.sequence, self.before, self.ends)
        shape = replace(inputs.shape, pool=facts, options=options)
        inputs = replace(inputs, pool=given, segments=segments, shape=shape)
        return inputs, self.workspace(inputs)

    def execute(self, inputs: KdaInputs, workspace: Tensor) -> tuple[Tensor, Tensor]:
        """Executes the segments over the pool from `starts`. Returns o and the states at the ends of segments, NaN where they are not
        written. Without `output_final_state` the backend gets no memory for them."""
        assert inputs.initial_state is not None
        inputs.initial_state.copy_(self.starts)
        final = torch.full_like(self.starts, torch.nan)
        given = final if inputs.options.output_final_state else None
        outputs = KdaOutputs(torch.full_like(self.x["v"], torch.nan), given, None, workspace)
        assert self.backend.execute_segments(inputs, outputs) is outputs
        return outputs.o, final
