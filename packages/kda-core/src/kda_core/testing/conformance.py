"""The conformance tests. Subclass `BackendConformance` and name the backend, or run the class below on any backend:

    pytest -p kda_core.testing.plugin --pyargs kda_core.testing.conformance --kda-backend NAME

Every test calls the public API and asserts which backend ran. Results are compared with the fp64 oracle, with a tolerance derived
from the data (`kda_core.testing.limits`). Comparisons are counted, and a run without any fails. Tests of what a backend does not
declare are skipped and counted.

`kda_core.testing.declared` tests each item that a spec declares, starting from a call that needs no feature.
`kda_core.testing.backward` tests gradients, `kda_core.testing.serving` pools of states, `kda_core.testing.pool_segments` both calls of
segments over them. Most tests of this module need several features.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import kda_core
from kda_core import arguments, buffers, contract
from kda_core.backend import SAVES_SINCE, SupportsMerge, SupportsSegments, SupportsWholeEnds
from kda_core.contract import Feature, KdaInputs, KdaOutputs
from kda_core.errors import ArgumentError
from kda_core.registry import REGISTRY, arch_matches, record_calls
from kda_core.serving import bind
from kda_core.testing.backward import BackwardConformance
from kda_core.testing.declared import DeclaredConformance, lengths_of
from kda_core.testing.forms import FORMS, in_form
from kda_core.testing.inputs import FAMILIES, PLAIN, Inputs, make_normalised
from kda_core.testing.journal import JournalConformance
from kda_core.testing.memory import amid, guarded
from kda_core.testing.pool_segments import PoolSegmentsConformance
from kda_core.testing.runner import NEEDS_GPU, NOT_DECLARED, TESTED, Case, Runner, spec_of, unusable
from kda_core.testing.serving import PER_TOKEN, ServingConformance
from kda_core.testing.tolerance import error

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1000, 1500, 2048, 4096)
BOUNDS = (
    (0, 15), (0, 1), (0, 63, 130), (0, 63, 64, 65), (0, 17, 64, 65, 130), (0, 256, 500, 1000),
    (0, 15, 100, 300, 1200, 2000), (0, 100, 300, 1200, 3000, 4096),
    (0, 0, 70), (0, 70, 70, 130), (0, 0, 0, 40, 40, 100, 100), (0, 0, 0),
)  # fmt: skip
HEADS = ((1, 1), (3, 3), (4, 4), (2, 4), (2, 8), (1, 2), (1, 4), (5, 15), (16, 64), (32, 96))
DECODE_HEADS = ((1, 1), (3, 3), (12, 12), (5, 15), (16, 64), (32, 96), (96, 96))
FLA_HEADS = ((1, 1), (3, 3), (4, 4), (8, 8), (32, 32), (2, 4), (2, 8), (1, 2), (1, 4))
FLA_CASES = tuple(
    # (B, T, H, HV, normaliser, mask): every head pair with every normaliser and mask, B and T in turn
    ((1, 2, 3, 4)[n % 4] if heads[1] <= 8 else 1, (63, 100, 200, 64, 500, 130, 1000, 65, 2048)[n % 9] if heads[1] <= 4
     else (63, 100, 200)[n % 3], *heads, normaliser, mask)
    for n, (heads, normaliser, mask) in enumerate(
        (h, z, m) for h in FLA_HEADS for z in (0.1, 1.0, 10.0) for m in (0.1, 0.5, 0.9)
    )
)  # fmt: skip
PACKED = (0, 17, 17, 64, 130)


def same(a: Any, b: Any) -> bool:
    """Returns whether all tensors of two results are equal bit for bit."""
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b))


class BackendConformance(
    DeclaredConformance,
    BackwardConformance,
    ServingConformance,
    PoolSegmentsConformance,
    JournalConformance,
):
    """The kit. A subclass sets `backend`, and any other attribute.

    Attributes:
        backend: name of the backend.
        device: "cpu" or "cuda"; None for "cuda" if the backend runs on a visible GPU, else "cpu".
        head_dim: K and V of all inputs, if the backend serves that pair, except in the tests of head dimensions.
        quick: whether to leave out costly cases.
    """

    device: str | None = None
    head_dim: int = 128
    quick: bool = False

    @pytest.fixture
    def kda(self, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Runner:
        """The backend under test."""
        option = lambda name: request.config.getoption(name, None)
        name = self.backend or option("kda_backend")
        if name is None:
            pytest.fail("no backend: set the class attribute `backend`, or pass --kda-backend", pytrace=False)
        if (why := unusable(name)) is not None:
            pytest.fail(why, pytrace=False)
        device = option("kda_device") or self.device or _default_device(name)
        quick = self.quick or bool(option("kda_quick"))
        runner = Runner(name, device, self.head_dim, quick, record_property)
        record_property(TESTED, runner.tested())
        return runner

    # ---- results

    @pytest.mark.parametrize("T", LENGTHS)
    def test_length(self, kda: Runner, T: int) -> None:
        """Lengths around every block boundary, with initial and final states, agree with the oracle."""
        kda.full_only(T > 200)
        kda.agrees(kda.case("slow", T, HV=4, initial_state=True))

    @pytest.mark.parametrize("family", (*FAMILIES, "finite masks"))
    @pytest.mark.parametrize("T", (130, 1000))
    def test_gates(self, kda: Runner, family: str, T: int) -> None:
        """Every family of gates agrees with the oracle: bounded and unbounded, in the kernel and precomputed, saturated, masked, mixed."""
        kda.full_only(T > 200)
        kda.agrees(kda.case(family, T, B=2, H=1, HV=2))

    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_heads(self, kda: Runner, heads: tuple[int, int]) -> None:
        """Equal and grouped heads agree with the oracle."""
        kda.full_only(heads == (16, 64))
        kda.agrees(kda.case("steep", 70, H=heads[0], HV=heads[1], initial_state=True))

    @pytest.mark.parametrize("family", ("slow", "mixed", "memory"))
    @pytest.mark.parametrize("bounds", BOUNDS, ids=lambda b: "-".join(map(str, b)))
    def test_packed(self, kda: Runner, bounds: tuple[int, ...], family: str) -> None:
        """Packed sequences agree with the oracle. Empty ones, at any position, return their initial state bit for bit."""
        kda.full_only(bounds[-1] > 200)
        lengths = lengths_of(bounds)
        case = kda.case(family, bounds[-1], H=1, HV=2, lengths=lengths, initial_state=True)
        _, state = kda.agrees(case)
        given = case.arguments["initial_state"]
        assert all(torch.equal(state[n], given[n]) for n, size in enumerate(lengths) if size == 0)

    def test_packed_without_state(self, kda: Runner) -> None:
        """The final state of an empty sequence without an initial state is zeros; int64 offsets act as int32 offsets."""
        case = kda.case("slow", 130, lengths=lengths_of(PACKED))
        o, state = kda.agrees(case)
        assert not state[1].any()
        wide = {"cu_seqlens": case.arguments["cu_seqlens"].long()}
        assert same(kda(case.arguments, output_final_state=True, **wide), (o, state))

    def test_host_copy_of_bounds(self, kda: Runner) -> None:
        """A host copy of the offsets changes no bit of a call this small, in which lengths allow no choice."""
        x = kda.inputs("slow", 130, lengths=lengths_of(PACKED))
        host = x["cu_seqlens"].cpu()
        assert same(
            kda(x, output_final_state=True, cu_seqlens_cpu=host, pin=False), kda(x, output_final_state=True)
        )

    def test_host_copy_of_bounds_of_a_pinned_call(self, kda: Runner) -> None:
        """With `pin` a host copy changes no bit for any lengths. A backend may choose kernels by lengths only if the bits stay the
        same."""
        kda.require(Feature.PIN)
        x = kda.inputs("slow", 1800, lengths=(1000, *(20,) * 40))
        host = x["cu_seqlens"].cpu()
        known, unknown = (
            kda(x, output_final_state=True, pin=True, **given) for given in ({"cu_seqlens_cpu": host}, {})
        )
        assert same(known, unknown)

    @pytest.mark.parametrize(
        "n", range(len(FLA_CASES)), ids=lambda n: "B{}-T{}-H{}-HV{}-norm{}-mask{}".format(*FLA_CASES[n])
    )
    def test_normalised_gates(self, kda: Runner, n: int) -> None:
        """logsigmoid gates with normalisers and masks, as in FLA's tests, agree with the oracle."""
        B, T, H, HV, normaliser, mask = FLA_CASES[n]
        kda.full_only(n % 9 != 0)
        x = make_normalised(T, B=B, H=H, HV=HV, normaliser=normaliser, mask=mask, seed=n, **kda.common)
        kda.agrees(Case(x))

    @pytest.mark.parametrize("form", FORMS)
    def test_form(self, kda: Runner, form: str) -> None:
        """Each form of gate, beta, normalisation and scale agrees with the oracle."""
        inputs = lambda family: kda.case(family, 130, HV=4, initial_state=True).inputs
        kda.agrees(Case(in_form(form, inputs)))

    @pytest.mark.parametrize("bounds", (None, PACKED), ids=("fixed", "packed"))
    def test_state_layouts(self, kda: Runner, bounds: tuple[int, ...] | None) -> None:
        """[V,K] states are [K,V] states transposed, bit for bit."""
        lengths = None if bounds is None else lengths_of(bounds)
        x = kda.inputs("slow", 130, lengths=lengths, initial_state=True)
        turned = x | {"initial_state": x["initial_state"].mT.contiguous(), "state_v_first": True}
        a, b = kda(x, output_final_state=True), kda(turned, output_final_state=True)
        assert same(a, (b[0], b[1].mT))

    @pytest.mark.parametrize("size", (32, 64))
    @pytest.mark.parametrize("v_first", (False, True), ids=("kv", "vk"))
    @pytest.mark.parametrize("bounds", (None, PACKED), ids=("fixed", "packed"))
    def test_intermediate_states(self, kda: Runner, bounds: Any, v_first: bool, size: int) -> None:
        """The states at the start of every chunk agree with the oracle, in bf16."""
        kda.require(Feature.INTERMEDIATE_STATES)
        lengths = None if bounds is None else lengths_of(bounds)
        case = kda.case(
            "slow",
            130,
            B=1 if bounds else 2,
            H=1,
            HV=2,
            lengths=lengths,
            initial_state=True,
            state_v_first=v_first,
        )
        x = case.arguments
        host = {} if bounds is None else {"cu_seqlens_cpu": x["cu_seqlens"].cpu()}
        kda.agrees(Case(case.inputs.replace(return_intermediate_states=True, chunk_size=size, **host)))

    def test_one_repeated_key(self, kda: Runner) -> None:
        """With identical keys, beta near 1, gates near 0 and 16k tokens, the inverse stays finite and accurate."""
        kda.full_only()
        kda.agrees(kda.case("one key", 16384, H=1))

    def test_zero_keys(self, kda: Runner) -> None:
        """With zero keys the state only decays."""
        x = kda.case("zero keys", 200, H=1).inputs
        kda.agrees(Case(x.replace(initial_state=kda.states(1, HV=1, value=1.0))))

    # ---- equalities

    @pytest.mark.parametrize("family", ("slow", "mixed"))
    def test_no_initial_state_is_zeros(self, kda: Runner, family: str) -> None:
        x = kda.inputs(family, 130)
        zeros = {"initial_state": kda.states(1)}
        assert same(kda(x, output_final_state=True), kda(x, output_final_state=True, **zeros))

    @pytest.mark.parametrize("family", ("slow", "mixed"))
    def test_same_bits_on_every_run(self, kda: Runner, family: str) -> None:
        x = kda.served(family, 500, B=2, HV=4)
        first = kda(x)
        for _ in range(3):
            assert same(kda(x), first)

    @pytest.mark.parametrize("states", (False, True), ids=("without states", "with states"))
    def test_calls_like_an_earlier_one(self, kda: Runner, states: bool) -> None:
        """Calls that differ in tensors alone skip most checks, and bound calls all but one. Both have the bits of calls through torch's
        dispatcher, which skip nothing."""
        given: dict[str, Any] = {"output_final_state": states}
        calls = [kda.inputs("slow", 130, initial_state=states, seed=seed) for seed in range(4)]
        with FlopCounterMode(display=False):
            wanted = [kda(x, **given) for x in calls]
        assert all(same(kda(x, **given), want) for x, want in zip(calls, wanted))
        bound = bind(kda_core.chunk_kda, **calls[0], **given, backend=kda.backend, context_parallel="off")
        fixed = {name: x for name, x in calls[0].items() if name not in PER_TOKEN}
        for x in calls:
            with FlopCounterMode(display=False):
                want = kda(x | fixed, **given)
            with record_calls() as ran:
                got = bound(*(x[name] for name in PER_TOKEN))
            kda.assert_ran(ran, "chunk_fwd")
            assert same(got, want)

    def test_no_final_state_is_none(self, kda: Runner) -> None:
        """Without output_final_state no state is returned, and o is unchanged."""
        x = kda.inputs("slow", 130)
        o, state = kda(x)
        assert state is None and torch.equal(o, kda(x, output_final_state=True)[0])

    @pytest.mark.parametrize("family", ("slow", "mixed", "masked"))
    def test_causality(self, kda: Runner, family: str) -> None:
        """Pinned: outputs before t keep every bit if all inputs from t on change or are cut off."""
        kda.require(Feature.PIN)
        T = 150
        x, y = kda.inputs(family, T, seed=1), kda.inputs(family, T, seed=2)
        o = kda(x, pin=True)[0]
        for t in (1, 15, 16, 40, 63, 64, 70, 128, 149):
            mixed = {n: torch.cat([x[n][:, :t], y[n][:, t:]], 1) for n in ("q", "k", "v", "g", "beta")}
            assert torch.equal(kda(x | mixed, pin=True)[0][:, :t], o[:, :t]), (
                f"outputs before token {t} depend on inputs from {t} on"
            )
            cut = {n: x[n][:, :t].contiguous() for n in mixed}
            assert torch.equal(kda(x | cut, pin=True)[0], o[:, :t]), (
                f"outputs before token {t} depend on whether more tokens follow"
            )

    def test_batch_invariance(self, kda: Runner) -> None:
        """Pinned: a sequence has the same bits alone, in a batch, and packed among others."""
        kda.require(Feature.PIN)
        x = kda.inputs("slow", 130, B=3, initial_state=True)
        per_token = ("q", "k", "v", "g", "beta")
        alone = [
            kda(
                x | {n: x[n][b : b + 1] for n in (*per_token, "initial_state")},
                output_final_state=True,
                pin=True,
            )
            for b in range(3)
        ]
        together = kda(x, output_final_state=True, pin=True)
        for b, (o, state) in enumerate(alone):
            assert torch.equal(together[0][b : b + 1], o) and torch.equal(together[1][b : b + 1], state)
        cu = torch.tensor([0, 130, 130, 260, 390], device=kda.device)
        packed = {n: x[n].flatten(0, 1).unsqueeze(0) for n in per_token} | {"cu_seqlens": cu}
        states = torch.cat([x["initial_state"][:1], x["initial_state"][:1], x["initial_state"][1:]])
        o, state = kda(x | packed | {"initial_state": states}, output_final_state=True, pin=True)
        assert torch.equal(o.view(3, 130, *o.shape[2:]), together[0]) and torch.equal(
            state[[0, 2, 3]], together[1]
        )

    @pytest.mark.parametrize("family", ("slow", "memory", "mixed"))
    @pytest.mark.parametrize("cut", (1, 37, 64, 100, 299))
    def test_split(self, kda: Runner, family: str, cut: int) -> None:
        """Two calls that pass the state on agree with one call."""
        case = kda.case(family, 300)
        first, second = case.inputs.tokens(0, cut), case.inputs.tokens(cut)
        o1, state = kda(first, output_final_state=True)
        o2, state = kda(second | {"initial_state": state}, output_final_state=True)
        kda.check(case, torch.cat([o1, o2], 1), state, f", cut at {cut}")

    # ---- memory

    def test_poisoned_outputs_and_workspace(self, kda: Runner) -> None:
        """Outputs and workspace are not read before they are written, and every token of o is written."""
        x = kda.served("mixed", 130, initial_state=True)
        case = Case(Inputs(x))
        kda.may_run(x)
        needed = kda_core.explain(**x, backend=kda.backend, context_parallel="off").workspace_bytes
        results = []
        for poison in (0xFF, 0x00):  # 0xFF bytes are NaN in bf16 and in fp32
            o = torch.full_like(x["v"], float("nan"))
            state = kda.states(1, value=float("nan")) if "output_final_state" in x else None
            workspace = torch.full((max(needed, 1),), poison, dtype=torch.uint8, device=kda.device)
            kda(x, out=(o, state), workspace=workspace)
            results.append((o, state))
        assert same(*results)
        kda.check(case, *results[0])

    def test_poisoned_padding(self, kda: Runner) -> None:
        """Strided inputs between NaNs are read correctly."""
        x = kda.served("slow", 65)
        case = Case(Inputs(dict(x)))
        for n in ("q", "k", "v", "g", "beta"):
            wide = torch.full(
                (*x[n].shape[:-1], 2 * x[n].shape[-1]), float("nan"), dtype=x[n].dtype, device=kda.device
            )
            wide[..., ::2] = x[n]
            x[n] = wide[..., ::2]
        kda.check(case, *kda(x))

    @pytest.mark.parametrize("bounds", (None, PACKED), ids=("fixed", "packed"))
    def test_poisoned_surroundings(self, kda: Runner, bounds: Any) -> None:
        """NaNs next to the inputs, which the last tile of a sequence may load but must not use, change no bit."""
        lengths = _served_lengths(kda, bounds)
        x = kda.served("mixed", 130, lengths=lengths, initial_state=True)
        surrounded = {n: amid(t) if isinstance(t, Tensor) else t for n, t in x.items()}
        o, state = kda(surrounded)
        kda.check(Case(Inputs(x, lengths)), o, state)
        assert same((o, state), kda(x))

    @pytest.mark.parametrize("bounds", (None, PACKED), ids=("fixed", "packed"))
    def test_unaligned_memory(self, kda: Runner, bounds: Any) -> None:
        """Inputs that start one element past an aligned address return the same bits; such outputs are refused."""
        x = kda.served("mixed", 130, lengths=_served_lengths(kda, bounds), initial_state=True)
        moved = {n: amid(t, 4097) if isinstance(t, Tensor) else t for n, t in x.items()}
        found = kda(moved)
        assert same(found, kda(x))
        for i, name in enumerate(("o", "final_state")):
            if found[i] is not None:
                out = [None if y is None else torch.empty_like(y) for y in found]
                out[i] = amid(found[i], 4097)
                with pytest.raises(ArgumentError, match=rf"out\[{i}\] \({name}\).*multiple of 16"):
                    kda(x, out=tuple(out))

    def test_poisoned_neighbours(self, kda: Runner) -> None:
        """NaNs in one packed sequence, or in its state, reach no other sequence."""
        lengths = lengths_of(PACKED)
        case = kda.case("mixed", PACKED[-1], lengths=lengths, initial_state=True)
        for n, (start, end) in enumerate(itertools.pairwise(PACKED)):
            x = dict(case.arguments)
            for name in ("q", "k", "v", "g", "beta"):
                x[name] = x[name].clone()
                x[name][:, start:end] = float("nan")
            x["initial_state"] = x["initial_state"].clone()
            x["initial_state"][n] = float("nan")
            o, state = kda(x, output_final_state=True)
            others = torch.arange(len(lengths), device=kda.device) != n
            off = error(state[others], case.oracle[1][others], state=True)
            kda.within(off, case.limits[1], f"other states than that of sequence {n}, which holds NaNs,")
            o[:, start:end] = case.oracle[0][:, start:end]
            off = error(o, case.oracle[0], lengths=lengths)
            kda.within(off, case.limits[0], f"other outputs than those of sequence {n}, which holds NaNs,")

    @pytest.mark.parametrize("bounds", (None, PACKED), ids=("fixed", "packed"))
    def test_untouched_memory(self, kda: Runner, bounds: Any) -> None:
        """Inputs and the memory before and after each output keep their bits."""
        lengths = _served_lengths(kda, bounds)
        x = kda.served("slow", 130, lengths=lengths, initial_state=True)
        before = {n: t.clone() for n, t in x.items() if isinstance(t, Tensor)}
        N = 1 if lengths is None else len(lengths)
        o, o_guard = guarded(tuple(x["v"].shape), x["v"].dtype, kda.device)
        state, state_guard = guarded((N, 2, kda.K, kda.V), kda.state_dtype, kda.device)
        kda.may_run(x)
        needed = kda_core.explain(**x, backend=kda.backend, context_parallel="off").workspace_bytes
        workspace, workspace_guard = guarded((needed,), torch.uint8, kda.device)
        kda(x, out=(o, state if "output_final_state" in x else None), workspace=workspace)
        assert all(torch.equal(x[n], t) for n, t in before.items())
        assert (o_guard() == 7).all() and (state_guard() == 7).all() and (workspace_guard() == 7).all()

    @pytest.mark.parametrize("size", (32, 64))
    def test_untouched_memory_around_intermediate_states(self, kda: Runner, size: int) -> None:
        """The memory before and after the intermediate states keeps its bits."""
        kda.require(Feature.INTERMEDIATE_STATES)
        x, chunks = kda.inputs("slow", 130, B=2), -(-130 // size)
        h, guard = guarded((2, chunks, 2, kda.K, kda.V), torch.bfloat16, kda.device)
        kda(x, return_intermediate_states=True, chunk_size=size, out=(None, None, h))
        assert (guard() == 7).all() and not (h == 7).all()

    def test_rows_of_no_sequence(self, kda: Runner) -> None:
        """With use_graph, tokens after the last sequence are neither read nor written."""
        kda.require(Feature.GRAPH)
        x = kda.inputs("slow", 130)
        for n in ("q", "k", "v", "g", "beta"):
            x[n][:, 100:] = float("nan")
        cu = torch.tensor([0, 40, 100, 100], device=kda.device)
        o = torch.full_like(x["v"], 7.0)
        kda(x, cu_seqlens=cu, use_graph=True, max_num_seqs=3, out=o)
        assert (o[:, 100:] == 7).all() and torch.isfinite(o[:, :100]).all()

    @pytest.mark.parametrize("graph", (False, True))
    def test_wrong_device_bounds_touch_nothing_foreign(self, kda: Runner, graph: bool) -> None:
        """If device offsets lie outside of [0, T], start above 0 or decrease, the call terminates and writes no memory around its
        outputs."""
        kda.needs_gpu("bounds in host memory are checked instead")
        kda.require(Feature.VARLEN, Feature.FINAL_STATE, *([Feature.GRAPH] if graph else []))
        beyond, late = ((0, 70, 10**9), (-(10**9), 40, 130)), ((70, 130), (65, 100, 100))
        unordered = (0, 100, 50, 130), (130, 0, 130), (0, 130, 50), (0, 100, -5)
        for bounds in (*beyond, *late, *unordered, (0, 0, 0)):
            x = kda.inputs("slow", 130) | {"cu_seqlens": torch.tensor(bounds, device=kda.device)}
            o, o_guard = guarded(tuple(x["v"].shape), x["v"].dtype, kda.device)
            N = len(bounds) - 1
            state, state_guard = guarded((N, 2, kda.K, kda.V), kda.state_dtype, kda.device)
            captured = {"use_graph": True, "max_num_seqs": N} if graph else {}
            kda(x, output_final_state=True, out=(o, state), **captured)
            torch.cuda.synchronize()
            assert (o_guard() == 7).all() and (state_guard() == 7).all()

    def test_no_state_is_allocated_unasked(self, kda: Runner) -> None:
        """Without output_final_state, peak memory is lower by the size of the final states."""
        kda.needs_gpu("peak memory is measured by CUDA's allocator")
        N = 64
        x = kda.inputs("slow", 16 * N, lengths=(16,) * N)
        peaks = []
        for wanted in (True, False):
            kda(x, output_final_state=wanted)
            torch.cuda.synchronize()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            kda.direct(x, output_final_state=wanted)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - base)
        assert peaks[0] - peaks[1] >= kda.states(N).nbytes

    def test_offsets_beyond_32_bits(self, kda: Runner) -> None:
        """B*T*HV*V above 2^31: the last sequence is computed as if it were alone."""
        kda.needs_gpu("a call of that size takes 60 GB")
        kda.full_only()
        if torch.cuda.mem_get_info()[0] < 60 << 30:
            pytest.skip(f"{NEEDS_GPU}60 GB of free memory")
        HV, tail = 64, 100
        T = 2**31 // (HV * kda.V) + 64 * 5
        case = kda.case("slow", tail, H=1, HV=HV)
        small = case.inputs.arguments
        x = {n: t for n, t in small.items() if n not in ("q", "k", "v", "g", "beta")}
        for n in ("q", "k", "v", "g", "beta"):
            x[n] = torch.zeros(1, T, *small[n].shape[2:], dtype=small[n].dtype, device=kda.device)
            x[n][:, T - tail :] = small[n]
        cu = torch.tensor(
            [0, *range((T - tail) // 8, T - tail, (T - tail) // 8), T - tail, T], device=kda.device
        )
        o, state = kda(x, cu_seqlens=cu, output_final_state=True)
        kda.check(case, o[:, T - tail :], state[-1:])

    # ---- execution

    def test_no_synchronisation(self, kda: Runner) -> None:
        """A call never waits for the GPU."""
        kda.needs_gpu("a CPU call is synchronous")
        kda.require(Feature.GRAPH)
        for more in ({}, {"lengths": lengths_of(PACKED)}):
            x = kda.inputs("mixed", 130, initial_state=True, **more)
            kda(x, output_final_state=True)
            torch.cuda.synchronize()
            with _no_synchronisation():
                kda.direct(x, output_final_state=True)

    @pytest.mark.parametrize("packed", (False, True), ids=("fixed", "packed"))
    def test_graph_capture(self, kda: Runner, packed: bool) -> None:
        """A replay of a captured call returns the results of the new inputs and offsets, bit for bit."""
        kda.needs_gpu("CUDA graphs")
        kda.require(Feature.GRAPH)
        lengths = lengths_of(PACKED) if packed else None
        more = {"use_graph": True} if packed else {}
        x = kda.inputs("slow", 130, lengths=lengths, initial_state=True, seed=1)
        y = kda.inputs(
            "slow", 130, lengths=tuple(reversed(lengths)) if lengths else None, initial_state=True, seed=2
        )
        want = [kda(z, output_final_state=True, **more) for z in (x, y)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = kda.direct(x, output_final_state=True, **more)
        graph.replay()
        torch.cuda.synchronize()
        assert same(got, want[0])
        for n, t in y.items():
            if isinstance(t, Tensor):
                x[n].copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        assert same(got, want[1])

    def test_two_streams(self, kda: Runner) -> None:
        """Concurrent calls on two streams return the right results."""
        kda.needs_gpu("CUDA streams")
        xs = [kda.served("slow", 1000, HV=4, seed=s, initial_state=True) for s in (1, 2)]
        want = [kda(x) for x in xs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in xs]
        got: list[Any] = [None, None]
        for _ in range(5):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    got[i] = kda.direct(xs[i])
        torch.cuda.synchronize()
        assert same(got[0], want[0]) and same(got[1], want[1])

    def test_two_threads(self, kda: Runner) -> None:
        """Concurrent calls from two threads return the right results."""
        xs = [kda.served("slow", 300, HV=4, seed=s, initial_state=True) for s in (1, 2)]
        want = [kda(x) for x in xs]
        wrong: list[Any] = []

        def work(i: int) -> None:
            try:
                for _ in range(5):
                    if not same(kda.direct(xs[i]), want[i]):
                        wrong.append(f"thread {i}: other bits")
            except Exception as e:  # noqa: BLE001 - a thread's exception must reach the test
                wrong.append(e)

        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong

    @pytest.mark.filterwarnings("ignore")  # warnings of torch's own code while it traces
    def test_opcheck(self, kda: Runner) -> None:
        """The operator's schema and fake kernel are correct for this backend."""
        x = kda.served("slow", 20, lengths=(7, 13))
        kda(x)
        args = arguments.checked(arguments.Arguments(**x, backend=kda.backend, context_parallel="off"))
        results = torch.library.opcheck(
            torch.ops.kda_core.chunk_fwd.default, tuple(args), test_utils=("test_schema", "test_faketensor")
        )
        assert set(results.values()) == {"SUCCESS"}

    @pytest.mark.filterwarnings("ignore")  # as above
    def test_compile(self, kda: Runner) -> None:
        """torch.compile(fullgraph=True) returns the bits of eager mode."""
        x = kda.served("slow", 130, initial_state=True)
        want = kda(x)
        torch._dynamo.reset()
        f = torch.compile(lambda **y: kda.direct(y), fullgraph=True, backend="aot_eager")
        with record_calls() as calls:
            got = f(**x)
        kda.assert_ran(calls, "chunk_fwd")
        assert same(got, want)

    # ---- optional parts

    @pytest.mark.parametrize("T", (*range(1, 9), 20))
    @pytest.mark.parametrize("v_first", (False, True), ids=("kv", "vk"))
    def test_recurrent(self, kda: Runner, T: int, v_first: bool) -> None:
        """The decode entry agrees with the oracle for a few tokens."""
        kda.require(Feature.RECURRENT)
        case = kda.case("mixed", T, B=3, HV=4, initial_state=True, state_v_first=v_first)
        kda.check(case, *kda.recurrent(case.arguments, output_final_state=True))

    @pytest.mark.parametrize("heads", DECODE_HEADS, ids=str)
    def test_recurrent_heads(self, kda: Runner, heads: tuple[int, int]) -> None:
        """The decode entry agrees with the oracle for equal and grouped heads."""
        kda.require(Feature.RECURRENT)
        kda.full_only(heads[1] > 12)
        case = kda.case("steep", 2, B=2, H=heads[0], HV=heads[1], initial_state=True, state_v_first=True)
        kda.check(case, *kda.recurrent(case.arguments, output_final_state=True))

    def test_recurrent_packed(self, kda: Runner) -> None:
        kda.require(Feature.RECURRENT, Feature.VARLEN)
        case = kda.case("slow", 6, lengths=(1, 0, 4, 1), initial_state=True)
        _, state = kda.recurrent(case.arguments, output_final_state=True)
        kda.check(case, kda.recurrent(case.arguments)[0], state)
        assert state is not None and torch.equal(state[1], case.arguments["initial_state"][1])

    @pytest.mark.parametrize("family", [PLAIN, "steep", "slow", "memory"])
    def test_segments(self, kda: Runner, family: str) -> None:
        """Segments that are executed from merged summaries agree with the whole sequence."""
        kda.require(Feature.SEGMENT_SUMMARY, Feature.VARLEN, Feature.INITIAL_STATE, Feature.FINAL_STATE)
        backend: Any = REGISTRY.load(REGISTRY.find(kda.backend).spec)
        assert isinstance(backend, SupportsSegments)
        case = kda.case(family, 230, HV=2, lengths=(230,), initial_state=True)
        x = case.arguments
        kda.may_run(x | {"output_final_state": True})
        starts = x["initial_state"].new_zeros(4, *x["initial_state"].shape[1:])
        starts[0] = x["initial_state"][0]
        cu_seqlens = torch.tensor([0, 100, 100, 167, 230], dtype=torch.int32, device=kda.device)
        packed = {"initial_state": starts, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens.cpu()}
        inputs = kda.backend_inputs(x | packed, output_final_state=True)
        shape = inputs.shape
        exits = torch.full_like(starts, torch.nan)
        transitions = starts.new_full((4, 2, shape.K, shape.K), torch.nan)
        size = backend.segment_workspace_bytes(shape)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=kda.device)
        backend.summarize(inputs, exits, transitions, workspace)
        true = starts.double()
        true[1] = exits[0]
        for i in (1, 2):
            true[i + 1] = transitions[i].double() @ true[i] + exits[i].double()
        identity = torch.eye(shape.K, dtype=starts.dtype, device=kda.device)
        assert torch.equal(transitions[1], identity.expand(2, -1, -1))
        if isinstance(backend, SupportsMerge):
            merged = torch.full_like(starts, torch.nan)
            bounds = torch.tensor([0, 4], dtype=torch.int32, device=kda.device)
            backend.merge_segments(merged, exits, transitions, bounds)
            limit = 1e-5 * true.abs().max().item()
            torch.testing.assert_close(merged[1:].double(), true[1:], rtol=1e-5, atol=limit)
            assert merged[0].isnan().all()  # the state of the first segment is neither read nor written
        inputs = replace(inputs, initial_state=true.to(starts.dtype))
        outputs = buffers.allocate_outputs(inputs, 0, buffers.GivenOutputs(workspace=workspace))
        assert backend.execute_segments(inputs, outputs) is outputs
        assert outputs.final_state is not None
        kda.check(case, outputs.o, outputs.final_state[3:])

    @pytest.mark.parametrize("family", [PLAIN, "steep", "slow", "memory"])
    def test_whole_ends(self, kda: Runner, family: str) -> None:
        """A sequence whose first and last segment are whole calls beside the inner segments agrees with the whole sequence. Unlike other
        workspaces, these have no more bytes than the backend asks for."""
        kda.require(Feature.SEGMENT_SUMMARY, Feature.VARLEN, Feature.INITIAL_STATE, Feature.FINAL_STATE)
        backend: Any = REGISTRY.load(REGISTRY.find(kda.backend).spec)
        if not isinstance(backend, SupportsWholeEnds):
            pytest.skip(f"{NOT_DECLARED}summarize_beside")
        case = kda.case(family, 230, HV=2, initial_state=True)
        x = case.arguments
        kda.may_run(x | {"output_final_state": True})
        bounds = (0, 70, 100, 167, 230)  # of the segments
        first, last = slice(*bounds[:2]), slice(*bounds[-2:])
        inner = slice(bounds[1], bounds[-2])
        cu_seqlens = torch.tensor([n - inner.start for n in bounds[1:-1]], dtype=torch.int32)
        states = x["initial_state"].new_zeros(4, *x["initial_state"].shape[1:])
        exits = torch.full_like(states, torch.nan)
        per_token = ("q", "k", "v", "g", "beta")

        def inputs(tokens: slice, start: torch.Tensor | None, final: bool, **more: Any) -> KdaInputs:
            own = {name: x[name][:, tokens] for name in per_token} | {"initial_state": start} | more
            return kda.backend_inputs(x | own, output_final_state=final)

        offsets = {"cu_seqlens": cu_seqlens.to(kda.device), "cu_seqlens_cpu": cu_seqlens}
        head = inputs(first, x["initial_state"], True)
        middle = inputs(inner, None, False, **offsets)  # summarised from zeros
        tail_shape = inputs(last, states[-1:], True).shape
        sizes = backend.whole_ends_workspace_bytes(head.shape, middle.shape, tail_shape)
        whole, rest = (torch.full((n,), 255, dtype=torch.uint8, device=kda.device) for n in sizes)
        o = torch.full_like(x["v"], torch.nan)
        transitions = states.new_full((4, 2, tail_shape.K, tail_shape.K), torch.nan)
        outputs = KdaOutputs(o[:, first], exits[:1], None, whole)
        backend.summarize_beside(head, outputs, middle, exits[1:-1], transitions[1:-1], rest)
        true = states.double()
        true[1] = exits[0]
        for i in (1, 2):
            true[i + 1] = transitions[i].double() @ true[i] + exits[i].double()
        states.copy_(true)
        final = torch.full_like(x["initial_state"], torch.nan)
        backend.execute_beside(
            inputs(last, states[-1:], True),
            KdaOutputs(o[:, last], final, None, whole),
            inputs(inner, states[1:-1], False, **offsets),
            KdaOutputs(o[:, inner], None, None, rest),
        )
        kda.check(case, o, final)

    @pytest.mark.parametrize("disable_recompute", (False, True), ids=("default", "disable_recompute"))
    def test_segments_that_save_states(self, kda: Runner, disable_recompute: bool) -> None:
        """Segments that are executed from their records save the states and residuals of a direct call over them."""
        needed = Feature.VARLEN, Feature.INITIAL_STATE, Feature.FINAL_STATE
        kda.require(Feature.SEGMENT_SUMMARY, Feature.SAVED_STATES, *needed)
        if spec_of(kda.backend).abi < SAVES_SINCE or kda.dtype not in contract.HALF_DTYPES:
            pytest.skip(f"{NOT_DECLARED}ABI 2.6 and a dtype of 16 bits")
        backend: Any = REGISTRY.load(REGISTRY.find(kda.backend).spec)
        lengths = (600, 0, 70)
        x = kda.inputs("slow", sum(lengths), HV=2, lengths=lengths, initial_state=True)
        options = {"output_final_state": True, "disable_recompute": disable_recompute}
        kda.may_run(x | options)
        inputs = kda.backend_inputs(x, **options)
        states = x["initial_state"]
        transitions = states.new_empty(3, 2, inputs.shape.K, inputs.shape.K)
        found: list[Any] = []
        for entry, size in (
            (backend.execute_segments, backend.segment_workspace_bytes(inputs.shape)),
            (backend.chunk_fwd, backend.workspace_bytes(inputs.shape)),
        ):
            outputs = buffers.allocate_outputs(inputs, size, saves=True)
            for saved in (outputs.saved_states, outputs.residual):
                if saved is not None:
                    saved.fill_(torch.nan)
            if not found:
                backend.summarize(inputs, torch.empty_like(states), transitions, outputs.workspace)
            assert entry(inputs, outputs) is outputs
            found.append(outputs)
        split, direct = found
        slots = [slot for own in contract.saved_slots(inputs.shape, lengths) for slot in own]
        pairs = {"the saved states": (split.saved_states[slots], direct.saved_states[slots])}
        assert (split.residual is not None) == disable_recompute
        if disable_recompute:
            pairs["the residual"] = split.residual, direct.residual
        for what, (got, want) in pairs.items():
            off = (got.double() - want.double()).norm() / want.double().norm()
            kda.within(off.item(), 1e-2, what)


class TestBackend(BackendConformance):
    """The kit on the backend of ``--kda-backend``."""

    __test__ = True


# ---- helpers


def _default_device(backend: str) -> str:
    """Returns "cuda" if the backend runs on a visible GPU, else "cpu"."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_capability(i) for i in range(count)]
    spec = spec_of(backend)
    return "cuda" if "any" not in spec.archs and any(arch_matches(spec, gpu) for gpu in gpus) else "cpu"


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    """Within the block, a CUDA call that synchronises is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype, each time it is set
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _served_lengths(kda: Runner, bounds: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Returns the lengths of packed sequences, None for fixed lengths. Skips packed ones that the backend does not declare."""
    if bounds is None:
        return None
    kda.require(Feature.VARLEN)
    return lengths_of(bounds)
