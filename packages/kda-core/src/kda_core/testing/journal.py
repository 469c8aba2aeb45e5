"""The conformance tests of `kda_core.serving`: records of tokens in place of states, and bound calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_core
from kda_core.contract import Feature
from kda_core.errors import BackendUnsupportedError
from kda_core.registry import record_calls
from kda_core.serving import (
    Journal,
    bind,
    journal_advance,
    journal_decode_kda,
    journal_fold,
    journal_reset,
    verify_kda,
)
from kda_core.testing.inputs import Inputs
from kda_core.testing.oracle import token_oracle
from kda_core.testing.runner import NOT_DECLARED, REFUSED, Case, Runner
from kda_core.testing.serving import PER_TOKEN, POOL_FORMS, SLOTS, Pool
from kda_core.testing.tolerance import error

STATE_LIMITS = {
    torch.bfloat16: 2.0**-13,
    torch.float16: 2.0**-13,
    torch.float32: 2.0**-13,
    torch.float64: 2.0**-36,
}
"""The largest error of a state after any number of tokens, by the dtype of q. Records in bf16 exceed it, and keys that are rounded again."""
GATES = (-104.0, float("-inf"), 0.0, -1e-3, -5.0, -1000.0)
"""Log decays that a test mixes."""
LAYOUTS = ("fp32-kv", "fp32-vk")
"""Forms of a pool with each layout of states."""


class Engine:
    """A pool with a journal, and the exact state of every slot.

    Records that no call has written are NaN. Every call is compared with the oracle.

    Attributes:
        exact: [SLOTS, HV, ..], fp64, in the layout of the pool: the state after the accepted tokens of each slot.
        counts: the number of records of each slot, by the rule of the contract.
    """

    def __init__(
        self, kda: Runner, form: str = "fp32-kv", length: int = 4, drafts: int = 1, HV: int = 2, H: int = 2
    ) -> None:
        kda.require(Feature.JOURNAL)
        if form.startswith("bf16"):
            kda.require(Feature.BF16_POOL)
        self.kda, self.pool, self.drafts = kda, Pool(kda, form, HV=HV), drafts
        self.journal = Journal.allocate(
            SLOTS, HV, kda.K, kda.V, H=H, length=length, drafts=drafts, state_v_first=self.pool.v_first,
            dtype=kda.dtype, device=kda.device,
        )  # fmt: skip
        for x in self.records:
            x.fill_(torch.nan)
        self.exact = self.pool.states.double().clone()
        self.counts = [0] * SLOTS
        self.slack = 2.0**-8 if form.startswith("bf16") else 0.0

    @property
    def records(self) -> tuple[Tensor, ...]:
        j = self.journal
        return j.u, j.k, j.k_factor, j.G

    def index(self, values: Sequence[int]) -> Tensor:
        return self.pool.index(values)

    def arguments(self, slots: Sequence[int], verifies: bool = False, **more: Any) -> dict[str, Any]:
        """Returns the arguments of a call that do not concern its tokens."""
        name = "records" if verifies else "journal"
        given = {"pool": self.pool.states, "slots": self.index(slots), name: self.journal}
        return given | {"backend": self.kda.backend} | more

    def call(
        self, function: Callable[..., Tensor], x: dict[str, Any], slots: Sequence[int], **more: Any
    ) -> Tensor:
        """Makes a call on the backend, asserts that it ran there, and compares o with the oracle."""
        given = self.arguments(slots, function is verify_kda, **more)
        _may_run(self.kda, function, x | given)
        with record_calls() as calls:
            o = function(**x, **given)
        self.kda.assert_ran(calls, "journal_decode")
        rows = [n for n, slot in enumerate(slots) if more.get("first_slot", 0) <= slot < SLOTS]
        skipped = [n for n in range(len(slots)) if n not in rows]
        assert not o[skipped].any(), "o of a sequence without a slot is not zero"
        if rows:
            case = self.case(_rows(x, rows), [slots[n] for n in rows])
            # A call that folds may compute u of its tokens from the state before it is rounded to the dtype of the pool.
            limit = max(case.limits[0], self.slack)
            self.kda.within(error(o[rows], case.oracle[0]), limit, f"o of {function.__name__}")
        return o

    def case(self, x: dict[str, Any], slots: Sequence[int]) -> Case:
        """Returns the case of these tokens from the exact states."""
        start = self.exact[list(slots)].to(self.kda.state_dtype)
        return Case(Inputs(x | {"initial_state": start, "state_v_first": self.pool.v_first}))

    def accept(self, x: dict[str, Any], slots: Sequence[int], accepted: Sequence[int]) -> None:
        """Continues the exact states by the first tokens of each sequence."""
        for n, (slot, count) in enumerate(zip(slots, accepted)):
            if 0 <= slot < SLOTS and count:
                part = _rows(x, [n])
                part |= {name: part[name][:, :count] for name in PER_TOKEN}
                start = {"initial_state": self.exact[slot : slot + 1], "state_v_first": self.pool.v_first}
                self.exact[slot] = token_oracle(**part | start)[1][0]

    def decode(
        self, x: dict[str, Any], slots: Sequence[int], accepted: Sequence[int] | None = None, **more: Any
    ) -> Tensor:
        """A step: `journal_decode_kda` and `journal_advance`. Compares o, the spans, and the state of each slot that is folded.

        Args:
            accepted: tokens of each sequence; all by default.
        """
        T = x["q"].shape[1]
        before, spans = self.pool.states.clone(), self.journal.spans.clone()
        o = self.call(journal_decode_kda, x, slots, **more)
        assert torch.equal(self.journal.spans, spans), "the call changed the spans"
        for slot in range(SLOTS):
            folds = slot in slots and self.counts[slot] + T > self.journal.length
            if folds:
                self.check_state(slot, "a call folds it")
                self.counts[slot] = 0
            else:
                same = torch.equal(_bits(self.pool.states[slot]), _bits(before[slot]))
                assert same, f"slot {slot} changed"
        taken = [T] * len(slots) if accepted is None else list(accepted)
        self.accept(x, slots, taken)
        journal_advance(self.journal, self.index(slots), self.index(taken), T)
        for slot, count in zip(slots, taken):
            if 0 <= slot < SLOTS:
                self.counts[slot] += count
        assert self.journal.lengths.tolist() == self.counts
        return o

    def fold(self, slots: Sequence[int]) -> None:
        """Writes the states of these slots to the pool, and compares them. Nothing else changes."""
        before = self.pool.bits()
        records = [_bits(x.clone()) for x in self.records]
        with record_calls() as calls:
            journal_fold(self.pool.states, self.index(slots), self.journal, backend=self.kda.backend)
        self.kda.assert_ran(calls, "journal_fold")
        assert all(torch.equal(_bits(x), y) for x, y in zip(self.records, records)), "a fold wrote records"
        kept = [n for n in range(SLOTS) if n not in slots or not self.counts[n]]
        assert torch.equal(self.pool.bits()[kept], before[kept]), "a slot without records changed"
        for slot in slots:
            if 0 <= slot < SLOTS and self.counts[slot]:
                self.check_state(slot, "a fold")
        journal_reset(self.journal, self.index(slots))
        for slot in slots:
            if 0 <= slot < SLOTS:
                self.counts[slot] = 0
        assert self.journal.lengths.tolist() == self.counts

    def check_state(self, slot: int, what: str) -> None:
        """Compares a slot of the pool with its exact state. The state of a bf16 pool then is exact: later errors are others."""
        off = error(self.pool.states[slot : slot + 1], self.exact[slot : slot + 1], state=True)
        limit = STATE_LIMITS[self.kda.dtype] + self.slack
        self.kda.within(off, limit, f"the state of slot {slot} after {what}")
        if self.slack:
            self.exact[slot] = self.pool.states[slot].double()


class JournalConformance:
    """A part of `kda_core.testing.conformance.BackendConformance`, which has the fixture `kda`."""

    def test_undeclared_journal_is_refused(self, kda: Runner) -> None:
        """Without the feature `journal` the calls are refused by name, and nothing runs."""
        x, pool = tokens(kda, 2, 1), Pool(kda)
        journal = Journal.allocate(SLOTS, 2, kda.K, kda.V, dtype=kda.dtype, device=kda.device)
        given = {"pool": pool.states, "slots": pool.index((3, 1)), "backend": kda.backend}
        if Feature.JOURNAL.value in kda.declared():
            shape = kda_core.explain(journal_decode_kda, **x, **given, journal=journal).shape
            assert Feature.JOURNAL in shape.features
            return
        with record_calls() as calls:
            for name, function in (("journal", journal_decode_kda), ("records", verify_kda)):
                arguments: dict[str, Any] = x | given | {name: journal}
                with pytest.raises(BackendUnsupportedError, match="journal"):
                    function(**arguments)
            with pytest.raises(BackendUnsupportedError, match="journal"):
                journal_fold(pool.states, given["slots"], journal, backend=kda.backend)
        assert not calls

    @pytest.mark.parametrize("form", POOL_FORMS)
    def test_journal(self, kda: Runner, form: str) -> None:
        """Decoding with a journal agrees with the oracle at every number of records, in slots that fold in different steps."""
        kda.full_only(form in ("fp32-vk", "bf16-kv"))
        engine, order = Engine(kda, form), (5, 0, 7, 2)
        for step in range(11):
            slots = (
                order[: 1 + step % 4] if step < 5 else order
            )  # the slots have different numbers of records
            engine.decode(tokens(kda, len(slots), 1, seed=step), slots)
        engine.fold((2, 7, 5, 0))

    @pytest.mark.parametrize("family", ("steep", "mixed", "masked"))
    @pytest.mark.parametrize("drafts", (2, 4, 8))
    def test_journal_of_drafts(self, kda: Runner, drafts: int, family: str) -> None:
        """The same for steps of several drafts of which some are accepted, in the middle and across folds, for grouped heads."""
        kda.full_only(drafts != 4)
        kda.require(Feature.GVA)
        engine, slots = Engine(kda, "fp32-vk", length=drafts + 1, drafts=drafts, HV=4), (6, 1, 4)
        for step in range(6):
            accepted = [(step * 3 + n * 2) % (drafts + 1) for n in range(3)]
            engine.decode(tokens(kda, 3, drafts, family, HV=4, seed=step), slots, accepted)
        engine.fold(slots)

    @pytest.mark.parametrize("form", LAYOUTS)
    @pytest.mark.parametrize("drafts", (1, 3))
    def test_gates_of_records(self, kda: Runner, drafts: int, form: str) -> None:
        """Log decays of -104, -inf, 0 and others, which differ from channel to channel, in records and in the call."""
        kda.require(Feature.UNBOUNDED_GATE)
        engine, slots = Engine(kda, form, length=4, drafts=drafts), (6, 1)
        rng = torch.Generator().manual_seed(3)
        for step in range(8 // drafts + 2):
            x = tokens(kda, 2, drafts, "masked", seed=step)
            which = torch.randint(len(GATES), x["g"].shape, generator=rng)
            x["g"] = torch.tensor(GATES)[which].to(x["g"])
            if step in (2, 5):
                x["g"][:, 0] = GATES[step % 2]  # one value on all channels
            engine.decode(x, slots)
        engine.fold(slots)

    @pytest.mark.parametrize("form", ("fp32-vk", "bf16-vk"))
    @pytest.mark.parametrize("mechanism", ("verify", "journal"))
    def test_rollback(self, kda: Runner, mechanism: str, form: str) -> None:
        """Drafts agree with the oracle. After any accepted number of them, 20 further steps and the state agree as well."""
        T, slots = 4, (3, 0, 6, 5, 1)
        engine = Engine(kda, form, length=6, drafts=T)
        x, accepted = tokens(kda, T + 1, T, seed=1), list(range(T + 1))
        engine.decode(tokens(kda, T + 1, 2, seed=2), slots)
        if mechanism == "verify":
            engine.fold(slots)
            bits, spans = engine.pool.bits(), engine.journal.spans.clone()
            o = engine.call(verify_kda, x, slots)
            assert torch.equal(engine.pool.bits(), bits) and torch.equal(engine.journal.spans, spans)
            commit = engine.index(accepted)
            journal_fold(
                engine.pool.states, engine.index(slots), engine.journal, accepted=commit, backend=kda.backend
            )
            assert torch.equal(engine.pool.bits()[3], bits[3]), "no draft of slot 3 was accepted"
            engine.accept(x, slots, accepted)
            for slot in slots:
                engine.check_state(slot, "the accepted drafts")
        else:
            o = engine.decode(x, slots, accepted)
        assert o.isfinite().all()
        for step in range(20):
            engine.decode(tokens(kda, T + 1, 1, seed=10 + step), slots)
        engine.fold(slots)

    @pytest.mark.parametrize("form", POOL_FORMS)
    def test_verify_agrees_with_decoding(self, kda: Runner, form: str) -> None:
        """o of T drafts agrees with T calls of `fused_recurrent_kda`, which round the states of a bf16 pool after every token."""
        T, slots = 5, (4, 2, 7)
        engine, x = Engine(kda, form, length=T), tokens(kda, 3, T)
        o = engine.call(verify_kda, x, slots)
        other, limit = Pool(kda, form), 2 * engine.case(x, slots).limits[0] + engine.slack
        for t in range(T):
            token = x | {name: x[name][:, t : t + 1] for name in PER_TOKEN}
            found, _ = kda_core.fused_recurrent_kda(**token, **other.arguments(slots), backend=kda.backend)
            kda.within(error(o[:, t : t + 1], found.double()), limit, f"o of draft {t}, against decoding")

    def test_fold_then_decode(self, kda: Runner) -> None:
        """A fold between two steps changes results within the accuracy only."""
        engines, slots = (Engine(kda), Engine(kda)), (1, 6)
        for step in range(6):
            for engine in engines:
                engine.decode(tokens(kda, 2, 1, seed=step), slots)
            if step % 2:
                engines[0].fold(slots)
        engines[1].fold(slots)
        a, b = (engine.pool.states[list(slots)] for engine in engines)
        kda.within(error(a, b.double(), state=True), 2 * STATE_LIMITS[kda.dtype], "the state without folds")

    @pytest.mark.parametrize("form", LAYOUTS)
    @pytest.mark.parametrize("first_slot", (0, 1))
    def test_skipped_and_untouched_slots(self, kda: Runner, first_slot: int, form: str) -> None:
        """Sequences without a slot have zeros in o, and their tokens are not read. Slots and records of no sequence, and the memory
        between slots, keep their bits."""
        engine = Engine(kda, form, length=2, drafts=2)
        slots = (-1, 3, 0 if first_slot else SLOTS, 5, -(2**31))
        for step in range(3):  # the last one folds
            x = tokens(kda, 5, 2, seed=step)
            for name in PER_TOKEN:
                x[name][[0, 2, 4]] = torch.nan
            bits, records = engine.pool.bits(), [_bits(y.clone()) for y in engine.records]
            out = torch.full_like(x["v"], torch.nan)
            o = engine.call(journal_decode_kda, x, slots, first_slot=first_slot, out=out)
            assert o is out
            others = [slot for slot in range(SLOTS) if slot not in (3, 5)]
            assert torch.equal(engine.pool.bits()[others], bits[others])
            size = engine.pool.states[0].numel() * engine.pool.states.itemsize
            assert torch.equal(engine.pool.bits()[:, size:], bits[:, size:])
            for found, before in zip(engine.records, records):
                assert torch.equal(_bits(found)[others], before[others])
            engine.accept(x, slots, (0, 2, 0, 2, 0))
            journal_advance(engine.journal, engine.index(slots), 2, 2, first_slot=first_slot)
            assert engine.journal.lengths.tolist() == [2 if slot in (3, 5) else 0 for slot in range(SLOTS)]
        journal_fold(
            engine.pool.states,
            engine.index(slots),
            engine.journal,
            first_slot=first_slot,
            backend=kda.backend,
        )
        journal_reset(engine.journal, engine.index(slots), first_slot=first_slot)
        for slot in (3, 5):
            engine.check_state(slot, "a fold with padding")
        assert torch.equal(engine.pool.bits()[others], bits[others]) and not engine.journal.lengths.any()

    @pytest.mark.parametrize("form", LAYOUTS)
    def test_bits_of_records(self, kda: Runner, form: str) -> None:
        """The bits of a sequence depend on neither the batch, nor the slot, nor the row of its first record."""
        kda.require(Feature.GVA)
        shape = {"form": form, "length": 5, "drafts": 2, "HV": 4}
        engine, slots = Engine(kda, **shape), (2, 7, 4)  # type: ignore[arg-type]
        alone = Engine(kda, **shape)  # type: ignore[arg-type]
        alone.pool.states[5] = alone.pool.states[7]
        alone.exact[5] = alone.exact[7]
        alone.journal.spans[5] = alone.index((4, 0))
        for step in range(5):
            x = tokens(kda, 3, 2, HV=4, seed=step)
            o = engine.decode(x, slots)
            assert torch.equal(alone.decode(_rows(x, [1]), (5,)), o[1:2]), f"o of step {step}"
        engine.fold(slots)
        alone.fold((5,))
        assert torch.equal(alone.pool.states[5], engine.pool.states[7])

    @pytest.mark.parametrize("form", LAYOUTS)
    def test_strided_tokens(self, kda: Runner, form: str) -> None:
        """Views of wider tensors have the bits of dense tensors."""
        x = tokens(kda, 3, 2)
        views = dict(x)
        for name in PER_TOKEN:
            wide = torch.cat([x[name].flatten(2), torch.full_like(x[name].flatten(2), torch.nan)], -1)
            views[name] = wide[..., : x[name][0, 0].numel()].unflatten(-1, x[name].shape[2:])
        a, b = Engine(kda, form, drafts=2), Engine(kda, form, drafts=2)
        assert torch.equal(
            a.call(journal_decode_kda, x, (1, 5, 3)), b.call(journal_decode_kda, views, (1, 5, 3))
        )

    def test_journal_is_read_anew(self, kda: Runner) -> None:
        """Slots and spans are those of the tensors when the call runs: in a replay of a CUDA graph, or in a second call on a device
        without graphs."""
        engine, x = Engine(kda, length=2), tokens(kda, 2, 1)
        engine.decode(tokens(kda, 4, 1, seed=1), (0, 3, 5, 6))
        engine.decode(tokens(kda, 2, 1, seed=2), (3, 6))
        slots, o = engine.index((-1, -1)), torch.zeros_like(x["v"])
        given = engine.arguments((0, 0)) | {"slots": slots, "out": o}
        journal_decode_kda(**x, **given)
        replay: Callable[[], Any] = lambda: journal_decode_kda(**x, **given)
        if kda.device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                journal_decode_kda(**x, **given)
            replay = graph.replay
        for step, chosen in enumerate(((0, 3), (6, 5), (3, 1))):
            for name, y in tokens(kda, 2, 1, seed=20 + step).items():
                if name in PER_TOKEN:
                    x[name].copy_(y)
            slots.copy_(engine.index(chosen))
            replay()
            case = engine.case(x, chosen)
            kda.within(error(o, case.oracle[0]), case.limits[0], "o of a replay")
            engine.accept(x, chosen, (1, 1))
            journal_advance(engine.journal, slots, 1, 1)

    @pytest.mark.parametrize(
        "function", ("journal_decode_kda", "verify_kda", "fused_recurrent_kda", "chunk_kda")
    )
    def test_bound_calls(self, kda: Runner, function: str) -> None:
        """A bound call has the bits of the call, with other tokens and with other values in the bound tensors."""
        first, x = tokens(kda, 3, 2, seed=1), tokens(kda, 3, 2, seed=2)
        x = first | {name: x[name] for name in PER_TOKEN}  # A_log and dt_bias are bound
        whole: Any
        if function in ("fused_recurrent_kda", "chunk_kda"):
            kda.require(Feature.STATE_POOL)
            a, b = Pool(kda), Pool(kda)
            given, others = (p.arguments((4, -1, 2)) | {"backend": kda.backend} for p in (a, b))
            slots, pools, whole, entry = given["ssm_state_indices"], (a, b), kda_core.chunk_kda, "chunk_fwd"
            if function == "fused_recurrent_kda":
                kda.require(Feature.RECURRENT)
                whole, entry = kda_core.fused_recurrent_kda, "recurrent_fwd"
        else:
            engines = Engine(kda, drafts=2), Engine(kda, drafts=2)
            whole = verify_kda if function == "verify_kda" else journal_decode_kda
            given, others = (e.arguments((4, -1, 2), whole is verify_kda) for e in engines)
            pools = engines[0].pool, engines[1].pool
            slots, entry = given["slots"], "journal_decode"
        with record_calls() as calls:
            step = bind(whole, **first, **given)
        assert not calls and step.backend == kda.backend
        for chosen in ((4, -1, 2), (7, 2, 6)):
            slots.copy_(pools[0].index(chosen))
            for name in ("slots", "ssm_state_indices"):
                if name in others:
                    others[name] = pools[1].index(chosen)
            with record_calls() as calls:
                found = step(*(x[name] for name in PER_TOKEN))
            kda.assert_ran(calls, entry)
            want = whole(**x, **others)
            if entry != "journal_decode":
                assert found[1] is pools[0].states
                found, want = found[0], want[0]
            assert torch.equal(found, want) and torch.equal(pools[0].bits(), pools[1].bits())


# ---- helpers


def tokens(kda: Runner, N: int, T: int, family: str = "slow", **recipe: Any) -> dict[str, Any]:
    """Returns the arguments of a call of T tokens of N sequences, without slots."""
    return kda.inputs(family, T, B=N, **recipe)


def _rows(x: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Returns the arguments of a call of some of the sequences."""
    return x | {name: x[name][list(rows)] for name in PER_TOKEN}


def _bits(x: Tensor) -> Tensor:
    """Returns the memory of a tensor as bytes, so that NaNs are compared."""
    return x.contiguous().view(torch.uint8)


def _may_run(kda: Runner, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Skips the test if the backend does not declare what the call needs, or refuses its shape."""
    found = kda_core.explain(function, **{name: x for name, x in arguments.items() if name != "out"})
    if missing := sorted(f.value for f in found.shape.features if f.value not in kda.declared()):
        pytest.skip(f"{NOT_DECLARED}{', '.join(missing)}")
    for refusal in found.refusals:
        if refusal.name == kda.backend:
            pytest.skip(f"{REFUSED}{refusal.reason}")
