"""The conformance tests of serving: pools of states, slots, checkpoints, strided inputs, and bits of decoding.

A backend without `Feature.STATE_POOL` is tested with the copies of core (`kda_core.pools`), which every backend is served with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import kda_core
from kda_core.contract import Feature
from kda_core.errors import BackendUnsupportedError
from kda_core.registry import record_calls
from kda_core.testing.inputs import Inputs
from kda_core.testing.oracle import token_oracle
from kda_core.testing.runner import Case, Runner
from kda_core.testing.tolerance import error

SLOTS, PADDING = 8, 24
"""Slots of the pools of these tests, and elements between two slots."""
PER_TOKEN = ("q", "k", "v", "g", "beta")
POOL_FORMS = ("fp32-kv", "fp32-vk", "bf16-kv", "bf16-vk")


class Scenario(NamedTuple):
    """Which slots five sequences read and write. Slots that a scenario calls fresh hold NaNs.

    Attributes:
        read, write: the slots; `write` None for the same.
        has: `has_initial_state`, or None.
        writes: whether the call writes final states.
    """

    read: tuple[int, ...]
    write: tuple[int, ...] | None = None
    has: tuple[bool, ...] | None = None
    first_slot: int = 0
    writes: bool = True
    fresh: tuple[int, ...] = ()

    @property
    def written(self) -> tuple[int, ...]:
        return self.read if self.write is None else self.write

    def is_slot(self, slot: int) -> bool:
        return self.first_slot <= slot < SLOTS

    def skipped(self) -> list[bool]:
        return [not (self.is_slot(r) or self.is_slot(w)) for r, w in zip(self.read, self.written)]


SCENARIOS = {
    "out of order": Scenario((3, 1, 7, 0, 5)),
    "negative": Scenario((-1, 1, 4, -9, 5)),
    "null slot": Scenario((0, 1, 4, 0, 5), first_slot=1),
    "beyond the pool": Scenario((3, SLOTS, 4, 2**31 - 1, 5)),
    "shared prefix": Scenario((3, 3, 3, 1, 2), (4, 5, 6, 1, 0)),
    "dropped": Scenario((3, 1, 4, 0, 5), (-1, 1, -1, 6, 5)),
    "from no slot": Scenario((-1, 1, -5, 0, 5), (2, 1, 4, 6, 7)),
    "fresh": Scenario((3, 1, 4, 0, 5), has=(False, True, False, True, False), fresh=(3, 4)),
    "all skipped": Scenario((-1, -2, -1, -1, -1)),
    "read only": Scenario((3, 3, -1, 0, 5), writes=False),
}


class Pool:
    """A pool of random states whose slots have NaNs between them.

    Attributes:
        states: [SLOTS, HV, K, V] or [SLOTS, HV, V, K], a view.
    """

    def __init__(self, kda: Runner, form: str = "fp32-kv", HV: int = 2, slots: int = SLOTS) -> None:
        dtype, layout = form.split("-")
        self.v_first = layout == "vk"
        matrix = (kda.V, kda.K) if self.v_first else (kda.K, kda.V)
        wide = torch.bfloat16 if dtype == "bf16" else kda.state_dtype
        rng = torch.Generator().manual_seed(7)
        size = HV * kda.K * kda.V
        buffer = torch.full((slots, size + PADDING), torch.nan, dtype=wide)
        buffer[:, :size] = torch.randn(slots, size, generator=rng).to(wide)
        self.buffer = buffer.to(kda.device)
        self.states = self.buffer[:, :size].unflatten(1, (HV, *matrix))

    def bits(self) -> Tensor:
        """Returns a copy of the memory as bytes, so that NaNs are compared."""
        return self.buffer.clone().view(torch.uint8)

    def arguments(self, slots: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Returns the arguments of a call that reads and writes these slots."""
        given = {"initial_state": self.states, "state_v_first": self.v_first, "output_final_state": True}
        return given | {"ssm_state_indices": self.index(slots)} | more

    def index(self, values: Sequence[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.buffer.device)


class ServingConformance:
    """A part of `kda_core.testing.conformance.BackendConformance`, which has the fixture `kda`."""

    @pytest.mark.parametrize("form", POOL_FORMS)
    @pytest.mark.parametrize("entry", ("prefill", "decode"))
    def test_pool(self, kda: Runner, entry: str, form: str) -> None:
        """A call over a pool has the bits of gather, call and scatter on the same backend. Skipped rows of o are zero, and slots that are
        not written and the memory between slots keep their bits."""
        kda.require(Feature.INITIAL_STATE, Feature.FINAL_STATE)
        kda.full_only(form in ("fp32-vk", "bf16-kv"))
        run, lengths = _entry(kda, entry), _lengths(kda, entry)
        for name, scenario in SCENARIOS.items():
            x = _tokens(kda, lengths, entry)
            spoil(x, lengths, scenario.skipped())
            pool = Pool(kda, form)
            pool.states[list(scenario.fresh)] = torch.nan
            want, bits, states = by_copies(run, x, pool, lengths, scenario)
            o = torch.full_like(x["v"], torch.nan)
            found, state = run(x | arguments(pool, scenario) | {"out": o})
            assert found is o and state is (pool.states if scenario.writes else None), name
            assert torch.equal(o, want), f"{name}: o has other bits than a call with copied states"
            assert torch.equal(pool.bits(), bits), f"{name}: the pool has other bits"
            if name == "out of order":
                case = Case(Inputs(x | {"initial_state": states[0], "state_v_first": pool.v_first}, lengths))
                kda.check(case, o, states[1], f" over {name} slots")

    @pytest.mark.parametrize("form", ("fp32-kv", "bf16-vk"))
    @pytest.mark.parametrize("packed", (False, True), ids=("fixed", "packed"))
    def test_slots_of_tokens(self, kda: Runner, packed: bool, form: str) -> None:
        """With slots [N, W] the state after every token agrees with the oracle, for every number of accepted tokens, also 0 and
        W + 1, which are clamped."""
        kda.require(Feature.RECURRENT, Feature.INITIAL_STATE, Feature.FINAL_STATE)
        N, W = 5, 3
        lengths = (3, 0, 2, 1, 3) if packed else None
        if packed:
            kda.require(Feature.VARLEN)
        x = _tokens(kda, lengths, "decode") if packed else kda.inputs("slow", W, B=N)
        pool = Pool(kda, form, slots=16)
        rows = [[4, 2, 6], [1, 0, 3], [7, -1, 5], [8, 9, 10], [-1, -1, -1]]
        accepted = [0, 1, 3, W + 1, 2]
        before, reads = pool.states.clone(), [4, 1, 5, 10, -1]
        given = pool.arguments(rows, num_accepted_tokens=pool.index(accepted), inplace_final_state=True)
        o, _ = kda.decode_pool(x | given)
        initial = _initial(before, Scenario(tuple(reads)), kda.state_dtype, size=16)
        whole = Case(Inputs(x | {"initial_state": initial, "state_v_first": pool.v_first}, lengths))
        want, limit = whole.oracle[0].clone(), whole.limits
        ends = torch.tensor(lengths or (W,) * N).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        rows_of_o = want.view(-1, *want.shape[2:])
        rows_of_o[starts[4] : ends[4]] = 0  # the last sequence has no slot
        kda.within(error(o, want, lengths=lengths), limit[0], "o with a slot for every token")
        untouched = before.clone()
        for n, row in enumerate(rows[:4]):
            for t in range(ends[n] - starts[n]):
                if row[t] < 0:
                    continue
                part = {m: x[m].flatten(0, 1)[starts[n] : starts[n] + t + 1].unsqueeze(0) for m in PER_TOKEN}
                alone = {m: y for m, y in x.items() if m != "cu_seqlens"} | part
                alone |= {"initial_state": initial[n : n + 1], "state_v_first": pool.v_first}
                off = error(pool.states[row[t]].unsqueeze(0), token_oracle(**alone)[1], state=True)
                kda.within(off, limit[1] + _rounding(form), f"the state of sequence {n} after token {t}")
                untouched[row[t]] = pool.states[row[t]]
        assert torch.equal(pool.states, untouched), "a slot of no token was written"

    def test_decode_bits(self, kda: Runner) -> None:
        """Decoding: a sequence has the same bits alone, in a batch, in other slots, and in a dense pool."""
        kda.require(Feature.RECURRENT, Feature.INITIAL_STATE, Feature.FINAL_STATE)
        B = 9 if kda.quick else 64
        x, pool = kda.inputs("slow", 1, B=B, HV=4), Pool(kda, HV=4, slots=B)
        dense = pool.states.contiguous()
        o, _ = kda.decode_pool(x | pool.arguments(range(B)))
        turned = dense.flip(0).contiguous()
        more = pool.arguments(list(reversed(range(B)))) | {"initial_state": turned}
        other, _ = kda.decode_pool(x | more)
        assert torch.equal(o, other) and torch.equal(turned.flip(0), pool.states)
        for n in (0, 3, B - 1):
            alone = x | {m: x[m][n : n + 1] for m in PER_TOKEN}
            one, state = kda.recurrent(alone, initial_state=dense[n : n + 1], output_final_state=True)
            assert torch.equal(o[n : n + 1], one) and _same(pool.states[n : n + 1], state), (
                f"sequence {n} has other bits alone"
            )

    @pytest.mark.parametrize("form", ("fp32-kv", "fp32-vk"))
    def test_decode_bits_of_several_tokens(self, kda: Runner, form: str) -> None:
        """Decoding: several tokens in one call have the bits of calls of one token each, also with a slot for every token. The states are
        in fp32: a bf16 pool rounds them after every call."""
        kda.require(Feature.RECURRENT, Feature.INITIAL_STATE, Feature.FINAL_STATE)
        T, slots, rows = 4, (3, 1), [[3, 0, 2, 4], [1, 5, 6, 7]]
        x = kda.inputs("slow", T, B=2)
        whole, drafts, steps = (Pool(kda, form) for _ in range(3))
        o, _ = kda.decode_pool(x | whole.arguments(slots))
        found, _ = kda.decode_pool(x | drafts.arguments(rows, inplace_final_state=True))
        assert torch.equal(found, o), "o with a slot for every token"
        for t in range(T):
            token = x | {n: x[n][:, t : t + 1] for n in PER_TOKEN}
            one, _ = kda.decode_pool(token | steps.arguments(slots))
            assert torch.equal(one, o[:, t : t + 1]), f"o of token {t}"
            for slot, row in zip(slots, rows):
                assert torch.equal(drafts.states[row[t]], steps.states[slot]), f"the state after token {t}"
        assert torch.equal(whole.bits(), steps.bits()), "the final states"

    def test_decoding_with_the_bits_of_prefill(self, kda: Runner) -> None:
        """Pinned: a token that is computed with its open chunk of 64, from the state at the start of the chunk, has the bits of the
        whole call."""
        kda.require(Feature.PIN, Feature.INITIAL_STATE, Feature.FINAL_STATE)
        T, start = 130, 64
        inputs = kda.case("slow", T, initial_state=True).inputs
        o, last = kda(inputs.arguments, output_final_state=True, pin=True)
        _, state = kda(inputs.tokens(0, start), output_final_state=True, pin=True)
        for end in (65, 80, 100, 127, 128, 129, 130) if not kda.quick else (65, 100, 129):
            while start + 64 < end:
                full = inputs.tokens(start, start + 64) | {"initial_state": state}
                state, start = kda(full, output_final_state=True, pin=True)[1], start + 64
            chunk = inputs.tokens(start, end) | {"initial_state": state}
            found, final = kda(chunk, output_final_state=True, pin=True)
            assert torch.equal(found[:, -1], o[:, end - 1]), f"o of token {end - 1}"
        if end == T:
            assert _same(final, last)

    @pytest.mark.parametrize("cut", (64, 128, 192))
    def test_split_bits(self, kda: Runner, cut: int) -> None:
        """Pinned: two calls split at a multiple of 64 that pass the state on have the bits of one call."""
        kda.require(Feature.PIN, Feature.INITIAL_STATE, Feature.FINAL_STATE)
        inputs = kda.case("slow", 230, initial_state=True).inputs
        o, state = kda(inputs.arguments, output_final_state=True, pin=True)
        o1, between = kda(inputs.tokens(0, cut), output_final_state=True, pin=True)
        rest = inputs.tokens(cut) | {"initial_state": between}
        o2, last = kda(rest, output_final_state=True, pin=True)
        assert torch.equal(torch.cat([o1, o2], 1), o) and torch.equal(last, state)

    @pytest.mark.parametrize("entry", ("prefill", "decode"))
    def test_strided_views(self, kda: Runner, entry: str) -> None:
        """Parts of wider tensors, as a projection returns them, have the bits of dense tensors."""
        run, x = _entry(kda, entry), _tokens(kda, _lengths(kda, entry), entry)
        views, wholes = dict(x), []
        for names in (("q", "k", "v"), ("g",), ("beta",)):
            parts = [x[n].flatten(2) for n in names]
            whole = torch.cat([parts[0].new_full((*parts[0].shape[:2], 8), torch.nan), *parts], -1)
            wholes.append((whole, whole.clone()))
            at = 8
            for n, part in zip(names, parts):
                views[n] = whole[..., at : at + part.shape[-1]].unflatten(-1, x[n].shape[2:])
                at += part.shape[-1]
        assert not any(views[n].is_contiguous() for n in PER_TOKEN)
        assert torch.equal(run(views)[0], run(x)[0])
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in wholes)

    def test_pool_is_read_anew(self, kda: Runner) -> None:
        """Slots, masks and lengths are those of the tensors when the call runs: in a replay of a CUDA graph, or in a second call on a
        device without graphs."""
        kda.require(Feature.INITIAL_STATE, Feature.FINAL_STATE, Feature.VARLEN, Feature.GRAPH)
        x, pool = kda.inputs("slow", 130, lengths=(17, 47, 66)), Pool(kda)
        y = pool.arguments((3, 1, -1), has_initial_state=pool.index((1, 1, 1)) > 0, use_graph=True)
        changes: tuple[dict[str, Any], ...] = (
            {"ssm_state_indices": (5, -1, 2), "has_initial_state": (True, True, False), "cu_seqlens": (0, 70, 70, 100)},
            {"ssm_state_indices": (2, 7, 5), "has_initial_state": (True, False, True), "cu_seqlens": (0, 0, 64, 130)},
        )  # fmt: skip
        if Feature.CHECKPOINTS.value in kda.declared():
            y |= _checkpoints(kda, (1, 0, 1), (64, 64), (0, 4))
            changes[0].update(checkpoint_cu=(0, 1, 1, 2), checkpoint_indices=(6, 0))
            changes[1].update(checkpoint_cu=(0, 0, 0, 2), checkpoint_indices=(4, 6))
            changes[1].update(checkpoint_positions=(32, 64))
        _read_anew(kda, kda, kda.direct, x | y, pool, changes)

    def test_slots_of_tokens_are_read_anew(self, kda: Runner) -> None:
        """The same for a slot for every token, and for the numbers of accepted tokens."""
        kda.require(Feature.RECURRENT, Feature.TOKEN_STATES)
        x, pool = kda.inputs("slow", 3, B=2), Pool(kda)
        y = pool.arguments([[4, 2, 6], [1, 0, 3]], num_accepted_tokens=pool.index((1, 1)))
        changes = (
            {"num_accepted_tokens": (3, 2)},
            {"ssm_state_indices": ((-1, -1, -1), (5, 7, 1)), "num_accepted_tokens": (1, 3)},
        )
        direct = lambda given: kda_core.fused_recurrent_kda(**given, backend=kda.backend)
        _read_anew(kda, kda.decode_pool, direct, x | y, pool, changes)

    def test_pool_beyond_32_bits(self, kda: Runner) -> None:
        """A slot more than 2^31 elements from the first is read and written."""
        kda.needs_gpu("a pool of that size takes 5 GB")
        kda.full_only()
        kda.require(Feature.INITIAL_STATE, Feature.FINAL_STATE)
        x, pool = kda.inputs("slow", 70), Pool(kda, "bf16-kv")
        buffer = torch.empty(5 << 29, dtype=torch.bfloat16, device=kda.device)
        far = buffer.as_strided((5, *pool.states.shape[1:]), (1 << 29, *pool.states.stride()[1:]))
        far[4] = pool.states[6]
        o, _ = kda(x | pool.arguments((6,)))
        found, _ = kda(x | pool.arguments((4,)) | {"initial_state": far})
        assert torch.equal(found, o) and torch.equal(far[4], pool.states[6])

    # ---- checkpoints

    def test_undeclared_checkpoints_are_refused(self, kda: Runner) -> None:
        """Without the feature `checkpoints` a call with checkpoints is refused, and nothing runs."""
        x = kda.inputs("slow", 130) | Pool(kda).arguments((3,)) | _checkpoints(kda, (1,), (64,), (5,))
        if Feature.CHECKPOINTS.value in kda.declared():
            assert Feature.CHECKPOINTS in kda.shape(x).features
            return
        with record_calls() as calls, pytest.raises(BackendUnsupportedError, match="checkpoints"):
            kda_core.chunk_kda(**x, backend=kda.backend)
        assert not calls

    @pytest.mark.parametrize("form", ("fp32-kv", "bf16-vk"))
    def test_checkpoints(self, kda: Runner, form: str) -> None:
        """Checkpoints agree with the oracle: several in a sequence, at 64, at the length, of 130 tokens the one at 128. Positions that
        are no multiple of 64, not ascending or beyond the sequence, and those of skipped sequences, are ignored."""
        kda.require(Feature.CHECKPOINTS)
        lengths = (130, 64, 200, 0, 70)
        x, pool, kept = _tokens(kda, lengths, "prefill"), Pool(kda, form), Pool(kda, form)
        rows: tuple[tuple[tuple[int, int], ...], ...] = (
            ((64, 1), (64, 2), (128, 3)),
            ((64, 4), (100, 2), (128, 2)),
            ((0, 2), (100, 2), (128, 5), (64, 2), (192, 6), (256, 2)),
            ((64, 2),),
            ((64, 2),),
        )
        flat = [pair for row in rows for pair in row]
        given = _checkpoints(kda, tuple(map(len, rows)), *zip(*flat)) | {"checkpoint_pool": kept.states}
        slots = (3, 1, 7, 0, -1)
        initial = _initial(pool.states.clone(), Scenario(slots), kda.state_dtype)
        kda(x | pool.arguments(slots) | given)
        for n, position, slot in ((0, 64, 1), (0, 128, 3), (1, 64, 4), (2, 128, 5), (2, 192, 6)):
            start = sum(lengths[:n])
            part = {m: x[m][:, start : start + position] for m in PER_TOKEN}
            alone = {m: y for m, y in x.items() if m != "cu_seqlens"} | part
            case = Case(Inputs(alone | {"initial_state": initial[n : n + 1], "state_v_first": pool.v_first}))
            off = error(kept.states[slot].unsqueeze(0), case.oracle[1], state=True)
            limit = case.limits[1] + _rounding(form)
            kda.within(off, limit, f"the checkpoint of sequence {n} at {position}")
        untouched = Pool(kda, form)
        for stored in (kept, untouched):
            stored.states[[1, 3, 4, 5, 6]] = 0
        assert torch.equal(kept.bits(), untouched.bits()), "a slot of no checkpoint was written"

    @pytest.mark.parametrize("into", ("the pool", "another pool"))
    def test_resumed_checkpoints(self, kda: Runner, into: str) -> None:
        """Pinned: a call that resumes from a checkpoint has the bits of the call that stored it. The checkpoint is a shared prefix: two
        sequences read it and write slots of their own."""
        kda.require(Feature.CHECKPOINTS, Feature.PIN)
        x, pool = kda.inputs("slow", 230), Pool(kda)
        kept = pool if into == "the pool" else Pool(kda)
        more = _checkpoints(kda, (3,), (64, 128, 192), (4, 5, 6)) | {"checkpoint_pool": kept.states}
        o, _ = kda(x | pool.arguments((3,)) | more, pin=True)
        final = pool.states[3].clone()
        for position, slot in ((64, 4), (128, 5), (192, 6)):
            rest = {m: x[m][:, position:].expand(2, *[-1] * (x[m].dim() - 1)) for m in PER_TOKEN}
            prefix = kept.states[slot].clone()
            given = kept.arguments((slot, slot), final_state_indices=kept.index((0, 1)))
            resumed, _ = kda(x | rest | given, pin=True)
            for n in (0, 1):
                assert torch.equal(resumed[n], o[0, position:]), f"o after {position} tokens"
                assert torch.equal(kept.states[n], final), f"the final state after {position} tokens"
            assert torch.equal(kept.states[slot], prefix)

    def test_checkpoints_change_no_bit(self, kda: Runner) -> None:
        """A call with checkpoints returns o and final states of the call without them."""
        kda.require(Feature.CHECKPOINTS)
        x, pool, plain = kda.inputs("slow", 230), Pool(kda), Pool(kda)
        more = _checkpoints(kda, (2,), (64, 192), (4, 5))
        o, _ = kda(x | pool.arguments((3,)) | more)
        want, _ = kda(x | plain.arguments((3,)))
        assert torch.equal(o, want) and torch.equal(pool.states[3], plain.states[3])

    # ---- sequences of calls

    def test_requests(self, kda: Runner) -> None:
        """Random sequences of prefills, decodes, forks, drafts, records of tokens and evictions over eight slots agree with states in fp64."""
        kda.full_only()
        kda.require(Feature.INITIAL_STATE, Feature.FINAL_STATE, Feature.VARLEN)
        pytest.importorskip("hypothesis")
        from kda_core.testing.requests import run_requests

        run_requests(kda)


# ---- helpers


def _read_anew(
    kda: Runner,
    run: Callable[[dict[str, Any]], tuple[Any, ...]],
    direct: Callable[[dict[str, Any]], tuple[Any, ...]],
    x: dict[str, Any],
    pool: Pool,
    changes: Sequence[dict[str, Any]],
) -> None:
    """Compares replays of a call with calls of the same values in other tensors. `changes` are values of its tensors by name; `direct`
    is `run` without assertions, for the capture."""
    o = torch.zeros_like(x["v"])
    replay: Callable[[], Any] = lambda: direct(x | {"out": o})
    run(x | {"out": o})
    if kda.device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replay()
        replay = graph.replay
    for change in changes:
        for name, values in change.items():
            x[name].copy_(torch.tensor(values, dtype=x[name].dtype))
        o.zero_()
        other, copy = Pool(kda), torch.zeros_like(o)
        other.states.copy_(pool.states)
        again = {n: t.clone() if isinstance(t, Tensor) else t for n, t in x.items()}
        run(again | {"initial_state": other.states, "out": copy})
        replay()
        assert torch.equal(o, copy) and torch.equal(pool.bits(), other.bits())


def _same(a: Tensor, b: Tensor | None) -> bool:
    """Returns whether two tensors are equal bit for bit."""
    return b is not None and torch.equal(a, b)


def _rounding(form: str) -> float:
    """Returns the error that writing a state to the pool may add."""
    return 2.0**-8 if form.startswith("bf16") else 0.0


def _entry(kda: Runner, entry: str) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Returns the function of a call: ``chunk_kda`` or ``fused_recurrent_kda``."""
    if entry == "prefill":
        return kda
    kda.require(Feature.RECURRENT)
    return kda.decode_pool


def _lengths(kda: Runner, entry: str) -> tuple[int, ...] | None:
    """Returns the lengths of five packed sequences; None if the backend does not declare `Feature.VARLEN`."""
    if Feature.VARLEN.value not in kda.declared():
        return None
    return (66, 0, 17, 2, 5) if entry == "prefill" else (2, 0, 1, 3, 1)


def _tokens(kda: Runner, lengths: tuple[int, ...] | None, entry: str) -> dict[str, Any]:
    """Returns the arguments of a call of five sequences without states."""
    if lengths is not None:
        return kda.inputs("slow", sum(lengths), lengths=lengths)
    return kda.inputs("slow", 66 if entry == "prefill" else 2, B=5)


def spoil(x: dict[str, Any], lengths: tuple[int, ...] | None, skipped: Sequence[bool]) -> None:
    """Sets the tokens of skipped sequences to NaN."""
    sizes = lengths or (x["q"].shape[1],) * len(skipped)
    start = 0
    for size, is_skipped in zip(sizes, skipped):
        if is_skipped:
            for name in PER_TOKEN:
                x[name].flatten(0, 1)[start : start + size] = torch.nan
        start += size


def arguments(pool: Pool, scenario: Scenario) -> dict[str, Any]:
    more: dict[str, Any] = {"first_slot": scenario.first_slot, "output_final_state": scenario.writes}
    if scenario.write is not None:
        more["final_state_indices"] = pool.index(scenario.write)
    if scenario.has is not None:
        more["has_initial_state"] = torch.tensor(scenario.has, device=pool.buffer.device)
    return pool.arguments(scenario.read, **more)


def _initial(states: Tensor, scenario: Scenario, dtype: torch.dtype, size: int = SLOTS) -> Tensor:
    """Returns the initial states of a scenario, [N, HV, ..]."""
    initial = states.new_zeros((len(scenario.read), *states.shape[1:]), dtype=dtype)
    for n, slot in enumerate(scenario.read):
        if scenario.first_slot <= slot < size and (scenario.has is None or scenario.has[n]):
            initial[n] = states[slot]
    return initial


def by_copies(
    run: Callable[[dict[str, Any]], tuple[Any, ...]],
    x: dict[str, Any],
    pool: Pool,
    lengths: tuple[int, ...] | None,
    scenario: Scenario,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Returns o and the bits of the pool after gather, call and scatter, and the initial and final states."""
    dtype = torch.float64 if x["q"].dtype == torch.float64 else torch.float32
    initial = _initial(pool.states, scenario, dtype)
    o, final = run(x | {"initial_state": initial, "output_final_state": True, "state_v_first": pool.v_first})
    o, before = o.clone(), pool.buffer.clone()
    sizes, start = lengths or (x["q"].shape[1],) * len(scenario.read), 0
    for n, (size, slot, skipped) in enumerate(zip(sizes, scenario.written, scenario.skipped())):
        if skipped:
            o.flatten(0, 1)[start : start + size] = 0
        elif scenario.writes and scenario.is_slot(slot):
            pool.states[slot] = final[n].to(pool.states.dtype)
        start += size
    bits = pool.bits()
    pool.buffer.copy_(before)
    return o, bits, (initial, final)


def _checkpoints(
    kda: Runner, counts: Sequence[int], positions: Sequence[int], slots: Sequence[int]
) -> dict[str, Any]:
    """Returns the arguments of checkpoints; `counts` are their numbers of each sequence."""
    as_index = lambda values: torch.tensor(values, dtype=torch.int32, device=kda.device)
    cu = torch.tensor([0, *counts]).cumsum(0)
    return {
        "checkpoint_cu": as_index(cu.tolist()),
        "checkpoint_positions": as_index(positions),
        "checkpoint_indices": as_index(slots),
    }
