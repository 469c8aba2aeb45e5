"""A reduced conformance set on ptx-emulator, for the GPU backends: every kind of call with small shapes, on any machine.

It tests the results of the kernels, but neither their speed nor the last bits of a GPU's results. `test_conformance` tests
the results of a GPU. Every change runs a case of each kind: gate families, chunk sizes, state layouts, fixed and packed sequences,
grouped heads, pools, records. More values of the parameters are marked `nightly`, beside the full kit.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch

from helpers.nightly import nightly
from kda_core import slots
from kda_core.registry import REGISTRY, record_calls
from kda_core.testing import FAMILIES, serving
from kda_core.testing.conformance import BackendConformance, same
from kda_core.testing.inputs import PLAIN
from kda_core.testing.runner import EMULATED, TESTED, Runner
from kda_cute import decode, journal
from kda_cute.testing.emulation import emulated

KIT = BackendConformance()  # its tests are called one by one
# Sequences 0 and 1 (of length zero) read one slot, and sequence 0 writes none; 2 starts from no slot; the slot of 3 holds NaNs; 4 is skipped.
SLOTS = serving.Scenario(
    (3, 3, 0, 6, -1), (-1, 5, 2, 6, serving.SLOTS), (True, True, True, False, True), first_slot=1, fresh=(6,)
)
BOUNDS = ((0, 15, 15, 79, 80), (0, 0, 70), (0, 65, 130, 130))


class OneChunk(Runner):
    """The kit's runner with one head and at most 20 tokens, for tests of the host's part of a call."""

    def inputs(self, family, T, **recipe):
        return super().inputs(family, min(T, 20), **(recipe | {"H": 1}))


class OneHead(Runner):
    """The kit's runner with one head and one value head. Several heads have tests of their own."""

    def case(self, family, T, **recipe):
        return super().case(family, T, **(recipe | {"H": 1, "HV": 1}))

    def inputs(self, family, T, **recipe):
        return super().inputs(family, T, **(recipe | {"H": 1, "HV": 1}))


def fetched_kernels(monkeypatch, module):
    """Forgets all launches. Returns the list to which `kda_cute.decode` or `kda_cute.journal` appends (interface, configuration) of every
    kernel that it fetches from now on."""
    found, get_kernel = [], module.get_kernel

    def get(interface, config, arch):
        found.append((interface, config))
        return get_kernel(interface, config, arch)

    monkeypatch.setattr(module, "get_kernel", get)
    forget_launches()
    return found


def forget_launches():
    """Forgets all launches: those of `kda_cute`, and those that core remembers for calls like an earlier one."""
    decode.make_decode.cache_clear()
    journal.make_journal.cache_clear()
    REGISTRY.forget_plans()


@contextmanager
def emulated_runner(backend, arch, record_property, kind=Runner, **options):
    """Yields the kit's runner on an emulated backend. ``kind``: its class; ``options``: of `ptx_emulator.device`."""
    with emulated(backend, arch, **options):
        runner = kind(backend, "cpu", 128, quick=True, record=record_property)
        assert runner.tested() == (backend, "cpu", EMULATED)
        record_property(TESTED, runner.tested())
        yield runner


class EmulatedBackend:
    """Base of a test class for one backend.

    Attributes:
        backend: name of the backend.
        arch: architecture that its kernels are compiled for.
        options: options of `ptx_emulator.device`.
    """

    backend: str
    arch: str
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def kda(self, record_property):
        with emulated_runner(self.backend, self.arch, record_property, **self.options) as runner:
            yield runner
            forget_launches()  # a test may have changed what is launched

    @pytest.fixture
    def host(self, record_property):
        options = self.options | {"kind": OneChunk}
        with emulated_runner(self.backend, self.arch, record_property, **options) as runner:
            yield runner

    @pytest.fixture
    def one_head(self, record_property):
        options = self.options | {"kind": OneHead}
        with emulated_runner(self.backend, self.arch, record_property, **options) as runner:
            yield runner


class EmulatedCases(EmulatedBackend):
    """The reduced set of prefills."""

    @pytest.mark.parametrize("T", (1, nightly(70)))
    def test_base(self, kda, T):
        kda.compare(kda.case(PLAIN, T, H=3))

    @pytest.mark.parametrize("T", (0, *map(nightly, (1, 15, 17, 64)), 130))
    def test_length(self, kda, T):
        kda.agrees(kda.case("slow", T, H=1, initial_state=True))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_gates(self, kda, family):
        kda.agrees(kda.case(family, 100, H=1))

    @pytest.mark.parametrize("heads", (nightly((2, 4)), (1, 3)), ids=str)
    def test_heads(self, kda, heads):
        kda.agrees(kda.case("steep", 40, B=2, H=heads[0], HV=heads[1], initial_state=True))

    @pytest.mark.parametrize("bounds", (BOUNDS[0], *map(nightly, BOUNDS[1:])), ids=str)
    def test_packed(self, kda, bounds, family="memory"):
        lengths = tuple(b - a for a, b in pairwise(bounds))
        kda.agrees(kda.case(family, bounds[-1], H=1, HV=2, lengths=lengths, initial_state=True))

    @pytest.mark.parametrize(
        "form",
        (
            "bf16 g",
            *map(
                nightly,
                ("no A_log", "softplus, no dt_bias", "fp32 beta", "negative eigenvalues", "no l2norm"),
            ),
        ),
    )
    def test_form(self, one_head, form):
        KIT.test_form(one_head, form)

    @pytest.mark.parametrize("bounds", (nightly(None), (0, 17, 17, 64, 130)), ids=("fixed", "packed"))
    def test_state_layouts(self, one_head, bounds):
        KIT.test_state_layouts(one_head, bounds)

    @pytest.mark.parametrize("size", (32, nightly(64)))
    def test_intermediate_states(self, kda, size):
        KIT.test_intermediate_states(kda, None, True, size)

    def test_rows_of_no_sequence(self, one_head):
        KIT.test_rows_of_no_sequence(one_head)

    @pytest.mark.parametrize("states", (nightly(False), True))
    def test_calls_like_an_earlier_one(self, host, states):
        KIT.test_calls_like_an_earlier_one(host, states)

    def test_segments(self, kda):
        KIT.test_segments(kda, "memory")

    def test_whole_ends(self, kda):
        KIT.test_whole_ends(kda, "memory")

    def test_prefill_of_strided_views(self, kda):
        x = kda.inputs("slow", 17, H=1)
        wide = torch.cat([x["q"], x["k"], x["v"]], -1)
        views = dict(zip("qkv", wide.split(128, -1)))
        assert not views["q"].is_contiguous()
        assert torch.equal(kda(x | views)[0], kda(x)[0])

    def test_prefills_of_strided_views_like_an_earlier_one(self, kda):
        """Their states are tensors of their own, whose addresses are those of a pool for the kernel."""
        calls = [kda.inputs("slow", 17, H=1, initial_state=True, seed=seed) for seed in range(4)]
        given = {"output_final_state": True}
        for x in calls:
            wide = torch.cat([x["q"], x["k"], x["v"]], -1)
            with record_calls() as ran:
                found = kda(x | dict(zip("qkv", wide.split(128, -1))), **given)
            kda.assert_ran(ran, "chunk_fwd")
            assert same(found, kda(x, **given))

    @pytest.mark.nightly
    def test_poisoned_outputs_and_workspace(self, kda):
        KIT.test_poisoned_outputs_and_workspace(kda)

    @pytest.mark.nightly
    def test_no_initial_state_is_zeros(self, kda):
        KIT.test_no_initial_state_is_zeros(kda, "mixed")

    def test_a_pinned_sequence_has_the_same_bits_alone_and_in_a_batch(self, kda):
        x = kda.inputs("slow", 70, B=2, H=1, initial_state=True)
        o, state = kda(x, output_final_state=True, pin=True)
        one = x | {n: x[n][1:] for n in ("q", "k", "v", "g", "beta", "initial_state")}
        assert same(kda(one, output_final_state=True, pin=True), (o[1:], state[1:]))


class SharedKernelCases(EmulatedBackend):
    """The reduced set of calls that the kernels of kda-cute serve: decoding, records of tokens, verification; and of bound calls."""

    @pytest.mark.parametrize("v_first", (nightly(False), True), ids=("kv", "vk"))
    @pytest.mark.parametrize("family", FAMILIES)
    def test_decode(self, kda, family, v_first):
        case = kda.case(family, 3, H=1, HV=2, initial_state=True, state_v_first=v_first)
        kda.check(case, *kda.recurrent(case.arguments, output_final_state=True))

    @pytest.mark.parametrize("v_first", (False, True), ids=("kv", "vk"))
    def test_decode_from_zeros_in_packed_sequences(self, kda, v_first):
        x = kda.case("steep", 4, H=1, lengths=(1, 0, 3), state_v_first=v_first)
        kda.check(x, *kda.recurrent(x.arguments, output_final_state=True))

    def test_decode_without_states_and_options(self, kda):
        case = kda.case("steep", 1, B=2, H=1, state_v_first=True)
        o, state = kda.recurrent(case.arguments)
        assert state is None
        kda.check(case, o, kda.recurrent(case.arguments, output_final_state=True)[1])

    def test_bits_of_a_decode_depend_neither_on_the_batch_nor_on_the_rows_of_a_cta(self, kda, monkeypatch):
        x = kda.inputs("slow", 2, B=2, H=1, initial_state=True, state_v_first=True)
        o, state = kda.recurrent(x, output_final_state=True)
        one = x | {n: x[n][1:] for n in ("q", "k", "v", "g", "beta", "initial_state")}
        want = o[1:], state[1:]
        assert same(kda.recurrent(one, output_final_state=True), want)
        rows = {dtype: choice._replace(many_states=1) for dtype, choice in decode.ROWS.items()}
        monkeypatch.setattr(decode, "ROWS", rows)
        fetched = fetched_kernels(monkeypatch, decode)
        assert same(kda.recurrent(one, output_final_state=True), want)
        assert {config.rows for _, config in fetched} == {decode.ROWS["float32"].many}

    @pytest.mark.parametrize("form", serving.POOL_FORMS)
    def test_decode_over_a_pool(self, kda, form, monkeypatch):
        """As the kit's `test_pool`, with all kinds of slots in one call."""
        monkeypatch.setattr(slots, "initial_states", None)  # core copies no states
        lengths = (2, 0, 1, 3, 1)
        x, pool = kda.inputs("slow", 7, lengths=lengths, H=1), serving.Pool(kda, form, HV=1)
        serving.spoil(x, lengths, SLOTS.skipped())
        pool.states[list(SLOTS.fresh)] = torch.nan
        want, bits, (_, final) = serving.by_copies(kda.decode_pool, x, pool, lengths, SLOTS)
        given = x | serving.arguments(pool, SLOTS) | {"out": torch.full_like(x["v"], torch.nan)}
        if form.startswith("bf16"):  # without the right to write, the final states are a new tensor, in fp32
            before = pool.bits()
            o, state = kda.decode_pool(given | {"inplace_final_state": False})
            assert same((o[:, :-1], state[:-1]), (want[:, :-1], final[:-1])) and not o[:, -1].any()
            assert torch.equal(pool.bits(), before)
        o, state = kda.decode_pool(given)
        assert torch.equal(o, want) and state is pool.states
        assert torch.equal(pool.bits(), bits)

    @pytest.mark.parametrize("form", (nightly("fp32-kv"), "fp32-vk"))
    def test_decode_bits_of_several_tokens(self, kda, form):
        KIT.test_decode_bits_of_several_tokens(kda, form)

    def test_decode_with_a_slot_for_every_token(self, kda, monkeypatch):
        monkeypatch.setattr(slots, "initial_states", None)  # core makes no call for each token
        KIT.test_slots_of_tokens(kda, True, "bf16-vk")

    def test_fold_of_records(self, kda):
        self.needs_journal(kda)
        KIT.test_fold_then_decode(kda)

    @pytest.mark.parametrize("form", ("fp32-kv", nightly("fp32-vk")))
    def test_gates_of_records(self, kda, form):
        self.needs_journal(kda)
        KIT.test_gates_of_records(kda, 2, form)

    @pytest.mark.parametrize("form", ("fp32-kv", nightly("fp32-vk")))
    def test_records_of_skipped_and_untouched_slots(self, kda, form):
        self.needs_journal(kda)
        KIT.test_skipped_and_untouched_slots(kda, 1, form)

    @pytest.mark.parametrize("form", ("fp32-vk", nightly("bf16-vk")))
    def test_verification_of_drafts(self, kda, form):
        self.needs_journal(kda)
        KIT.test_verify_agrees_with_decoding(kda, form)

    @pytest.mark.nightly
    def test_verification_in_grouped_heads_with_records(self, kda):
        self.needs_journal(kda)
        KIT.test_bits_of_records(kda, "fp32-vk")

    @pytest.mark.parametrize("function", ("journal_decode_kda", "fused_recurrent_kda", "chunk_kda"))
    def test_bound_calls(self, kda, function, monkeypatch):
        """The backend prepares the launches of bound calls, and of calls like an earlier one: they build no `KdaInputs`."""
        if function == "journal_decode_kda":
            self.needs_journal(kda)
        found, kind = [], type(REGISTRY.load(REGISTRY.find(self.backend).spec).backend)
        prepare = kind.prepare

        def prepared(*given):
            found.append(launch := prepare(*given))
            return launch

        monkeypatch.setattr(kind, "prepare", prepared)
        KIT.test_bound_calls(kda, function)
        assert found and None not in found

    def needs_journal(self, kda):
        if "journal" not in REGISTRY.find(self.backend).spec.features:
            pytest.skip(f"{self.backend} does not declare the feature journal")

    def test_decode_of_strided_views(self, kda):
        KIT.test_strided_views(kda, "decode")

    def test_decoding_with_the_bits_of_prefill(self, kda):
        KIT.test_decoding_with_the_bits_of_prefill(kda)
