"""Random sequences of the calls of a serving engine, over one pool, against states in fp64. Needs hypothesis."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch import Tensor

from kda_core.contract import Feature
from kda_core.serving import (
    Journal,
    journal_advance,
    journal_decode_kda,
    journal_fold,
    journal_reset,
    verify_kda,
)
from kda_core.testing.oracle import token_oracle
from kda_core.testing.runner import Runner
from kda_core.testing.serving import PER_TOKEN, SLOTS, Pool
from kda_core.testing.tolerance import error

STEP = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 2e-3, torch.float64: 1e-10}
"""The largest error that one call may add to a state: some times that of a kernel with bf16 operands, with TF32 operands, in fp64."""
W = 3

_slot = st.integers(0, SLOTS - 1)
_some_slots = st.lists(_slot, min_size=1, max_size=3, unique=True)
_seeds = st.integers(0, 2**16)


class Requests(RuleBasedStateMachine):
    """An engine with `SLOTS` slots. Each rule makes one call, then compares every slot: those that the call wrote with the exact states,
    all others with their earlier bits.

    Attributes:
        exact: the fp64 state [HV, K, V] of each slot in use.
        bounds: the largest admissible error of each of these.
        journal: of the slots, whose states in the pool are stale while they have records; None if the backend declares none.
    """

    def __init__(self, kda: Runner) -> None:
        super().__init__()
        self.kda, self.pool = kda, Pool(kda)
        self.exact: dict[int, Tensor] = {}
        self.bounds: dict[int, float] = {}
        self.journal: Journal | None = None
        if {Feature.JOURNAL.value, Feature.STATE_POOL.value} <= kda.declared():
            size = {"length": 4, "drafts": W, "dtype": kda.dtype, "device": kda.device}
            self.journal = Journal.allocate(SLOTS, 2, kda.K, kda.V, **size)  # type: ignore[arg-type]

    @rule(writes=_some_slots, data=st.data(), seed=_seeds)
    def prefill(self, writes: list[int], data: st.DataObject, seed: int) -> None:
        """Starts or continues sequences, or forks them from slots that the call does not write; one more row is padding."""
        self._settle()
        lengths = [data.draw(st.sampled_from((1, 5, 16, 64, 70))) for _ in writes]
        sources = [data.draw(st.sampled_from(self._sources(slot, writes))) for slot in writes]
        x = self.kda.inputs("slow", sum(lengths) + 3, lengths=(*lengths, 3), seed=seed)
        self._call(x, lengths, sources, writes)

    @precondition(lambda self: self.exact)
    @rule(data=st.data(), T=st.integers(1, 2), seed=_seeds)
    def decode(self, data: st.DataObject, T: int, seed: int) -> None:
        """Continues some sequences by few tokens, in place."""
        self._settle()
        live = sorted(self.exact)
        writes = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True))
        x = self.kda.inputs("slow", T, B=len(writes) + 1, seed=seed)
        self._call(x, [T] * len(writes), list(writes), writes, recurrent=True)

    @precondition(lambda self: self.exact and Feature.RECURRENT.value in self.kda.declared())
    @rule(data=st.data(), accepted=st.integers(1, W), seed=_seeds)
    def draft(self, data: st.DataObject, accepted: int, seed: int) -> None:
        """Continues a sequence from the last accepted draft by `W` drafts, each with a slot."""
        self._settle()
        source = data.draw(st.sampled_from(sorted(self.exact)))
        row = data.draw(st.lists(_slot.filter(lambda s: s != source), min_size=W, max_size=W, unique=True))
        row[accepted - 1] = source
        x = self.kda.inputs("slow", W, seed=seed)
        start, bound = self.exact[source], self.bounds[source]
        before = self.pool.bits()
        self.kda.decode_pool(
            x
            | self.pool.arguments((), ssm_state_indices=self.pool.index([row]))
            | {"num_accepted_tokens": self.pool.index([accepted])}
        )
        for t, slot in enumerate(row):
            part = x | {name: x[name][:, : t + 1] for name in PER_TOKEN}
            self.exact[slot] = token_oracle(**part | {"initial_state": start.unsqueeze(0)})[1][0]
            self.bounds[slot] = bound + self._step()
        self._compare(before, row)

    @precondition(lambda self: self.exact and self.journal is not None)
    @rule(data=st.data(), T=st.integers(1, W), seed=_seeds)
    def record(self, data: st.DataObject, T: int, seed: int) -> None:
        """Continues some sequences by the accepted ones of T tokens, in their records. Slots that are full are folded."""
        slots, accepted, x = self._drafts(data, T, seed)
        assert self.journal is not None
        folded = [s for s in slots if self.journal.lengths[s] + T > self.journal.length]
        before, index = self.pool.bits(), self.pool.index((*slots, -1))
        given = {"pool": self.pool.states, "slots": index, "journal": self.journal}
        journal_decode_kda(**x, **given, backend=self.kda.backend)
        self._compare(before, folded)
        self._accept(x, slots, accepted)
        journal_advance(self.journal, index, self.pool.index((*accepted, 0)), T)

    @precondition(lambda self: self.exact and self.journal is not None)
    @rule(data=st.data(), T=st.integers(1, W), seed=_seeds)
    def verify(self, data: st.DataObject, T: int, seed: int) -> None:
        """Continues some sequences by the accepted ones of T drafts, in the pool."""
        self._settle()
        slots, accepted, x = self._drafts(data, T, seed)
        assert self.journal is not None
        before, index = self.pool.bits(), self.pool.index((*slots, -1))
        given = {"pool": self.pool.states, "slots": index, "records": self.journal}
        verify_kda(**x, **given, backend=self.kda.backend)
        self._compare(before, [])
        self._accept(x, slots, accepted)
        commit = self.pool.index((*accepted, 1))
        journal_fold(self.pool.states, index, self.journal, accepted=commit, backend=self.kda.backend)
        self._compare(before, [slot for slot, count in zip(slots, accepted) if count])

    @precondition(lambda self: self.exact)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Ends a sequence. Its slot holds NaNs until another one starts there."""
        slot = data.draw(st.sampled_from(sorted(self.exact)))
        if self.journal is not None:
            journal_reset(self.journal, self.pool.index((slot,)))
        self.pool.states[slot] = torch.nan
        del self.exact[slot], self.bounds[slot]

    def _drafts(self, data: st.DataObject, T: int, seed: int) -> tuple[list[int], list[int], dict[str, Any]]:
        """Returns some slots in use, how many of T tokens each accepts, and the tokens, with one more row that is padding."""
        slots = data.draw(st.lists(st.sampled_from(sorted(self.exact)), min_size=1, unique=True))
        accepted = [data.draw(st.integers(0, T)) for _ in slots]
        return slots, accepted, self.kda.inputs("slow", T, B=len(slots) + 1, seed=seed)

    def _accept(self, x: dict[str, Any], slots: list[int], accepted: list[int]) -> None:
        """Continues the exact states by the first tokens of each sequence."""
        for n, (slot, count) in enumerate(zip(slots, accepted)):
            if count:
                part = x | {name: x[name][n : n + 1, :count] for name in PER_TOKEN}
                self.exact[slot] = token_oracle(**part | {"initial_state": self.exact[slot][None]})[1][0]
                self.bounds[slot] += self._step()

    def _settle(self) -> None:
        """Writes the states of all slots that have records to the pool, as an engine does before it reads the pool otherwise."""
        if self.journal is None or not self.journal.lengths.any():
            return
        slots = [slot for slot in range(SLOTS) if self.journal.lengths[slot]]
        before, index = self.pool.bits(), self.pool.index(slots)
        journal_fold(self.pool.states, index, self.journal, backend=self.kda.backend)
        journal_reset(self.journal, index)
        self._compare(before, slots)

    def _sources(self, slot: int, writes: list[int]) -> list[int | None]:
        """Returns the slots from which a sequence that writes `slot` may start; None for zeros."""
        return [None, *(s for s in self.exact if s == slot or s not in writes)]

    def _step(self) -> float:
        return STEP[self.kda.dtype]

    def _call(
        self,
        x: dict[str, Any],
        lengths: list[int],
        sources: list[int | None],
        writes: list[int],
        recurrent: bool = False,
    ) -> None:
        before = self.pool.bits()
        reads = [slot if source is None else source for source, slot in zip(sources, writes)]
        mask = [source is not None for source in sources]
        given = self.pool.arguments(
            (*reads, -1),
            final_state_indices=self.pool.index((*writes, -1)),
            has_initial_state=torch.tensor((*mask, True), device=self.pool.buffer.device),
        )
        recurrent = recurrent and Feature.RECURRENT.value in self.kda.declared()
        o = (self.kda.decode_pool if recurrent else self.kda)(x | given)[0]
        assert not o.flatten(0, 1)[sum(lengths) :].any(), "o of the padding is not zero"
        zeros = torch.zeros(self.pool.states.shape[1:], dtype=torch.float64, device=self.pool.buffer.device)
        starts = [zeros if source is None else self.exact[source] for source in sources]
        exact = token_oracle(**x | {"initial_state": torch.stack([*starts, zeros])})[1]
        bounds = [self._step() + (0.0 if s is None else self.bounds[s]) for s in sources]
        self.exact |= dict(zip(writes, exact))
        self.bounds |= dict(zip(writes, bounds))
        self._compare(before, writes)

    def _compare(self, before: Tensor, written: list[int]) -> None:
        after = self.pool.bits()
        others = [slot for slot in range(SLOTS) if slot not in written]
        assert torch.equal(after[others], before[others]), "a slot that the call does not write changed"
        padding = self.pool.states[0].numel() * self.pool.states.itemsize
        assert torch.equal(after[:, padding:], before[:, padding:]), "the memory between slots changed"
        for slot in written:
            off = error(self.pool.states[slot].unsqueeze(0), self.exact[slot].unsqueeze(0), state=True)
            self.kda.within(off, self.bounds[slot], f"the state in slot {slot}")


def run_requests(kda: Runner) -> None:
    """Runs `Requests` on a backend, with the same examples in every run."""
    few = settings(
        max_examples=6,
        stateful_step_count=12,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    class OfBackend(Requests):
        def __init__(self) -> None:
            super().__init__(kda)

    run_state_machine_as_test(OfBackend, settings=few)
