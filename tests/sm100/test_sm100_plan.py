"""The choice of kernels, from metadata alone; and the set that ``python -m kda_core precompile`` compiles."""

import functools

import pytest
import torch
from helpers.support import FREE, NOT_BUILT, problem_shape, refused

from kda_cute.jit.key import Variant
from kda_sm100 import layouts
from kda_sm100.config import ARCHS, ChainConfig, PrepareConfig, SummaryConfig
from kda_sm100.plan import plan
from kda_sm100.variants import CHAIN, PREPARE, SAMPLE, SUMMARY

shape = functools.partial(problem_shape, (10, 0))


@pytest.mark.parametrize(("change", "reason"), NOT_BUILT)
def test_what_is_not_built_is_refused_with_the_reason(change, reason):
    assert refused("sm100", shape()) is None
    assert reason in refused("sm100", shape(**change))


def test_the_gate_decides_whether_rows_vote():
    assert not plan(shape()).prepare.unbounded
    assert plan(shape(lower_bound=-8.0)).prepare.unbounded
    assert plan(shape(lower_bound=None)).prepare.gate == "softplus"
    assert plan(shape(**FREE)).prepare.unbounded and not plan(shape(**FREE, safe_gate=True)).prepare.unbounded


def test_chunks_are_as_long_as_intermediate_states_allow():
    assert plan(shape()).chunk == plan(shape(chunk_size=32)).chunk == 64
    assert plan(shape(return_intermediate_states=True)).chunk == 64
    assert plan(shape(return_intermediate_states=True, chunk_size=32)).chunk == 32


def test_the_workspace_holds_a_record_of_each_slot_and_value_head():
    assert plan(shape(B=2, T=65, HV=8)).records == 2 * 2 * 8
    packed = plan(shape(T=65, HV=8, N=5, index=torch.int32))
    assert packed.records == (65 // 64 + 5) * 8
    assert packed.workspace_bytes == packed.records * (4 * 2 * 64 * 128 + 2 * 64 * 64 + 4 * 128)
    assert layouts.slot_count(1, 65, 64, 5) == 6


@pytest.mark.parametrize(
    "gate", [{}, {"lower_bound": -8.0}, {"lower_bound": None}, FREE, FREE | {"safe_gate": True}]
)
def test_every_call_is_served_by_what_is_compiled_ahead_of_time(gate):
    for dtype in (torch.bfloat16, torch.float32):
        for states in (
            {},
            {"return_intermediate_states": True},
            {"return_intermediate_states": True, "chunk_size": 32},
        ):
            chosen = plan(shape(g=dtype, **gate, **states))
            assert chosen.prepare in PREPARE and chosen.chain in CHAIN and chosen.summary in SUMMARY


def test_every_variant_is_offered_once():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the kernel classes import it")
    from kda_sm100.variants import ahead_of_time

    for arch in ARCHS:
        variants = {Variant(kernel, config, arch) for kernel, config in ahead_of_time(arch)}
        assert len(variants) == len(PREPARE) + len(CHAIN) + len(SUMMARY) + 2 == 28  # and two of the merge
    assert set(SAMPLE) <= set(PREPARE)


@pytest.mark.parametrize(
    ("kind", "wrong", "named"),
    [
        (PrepareConfig, {"chunk": 16}, "chunk"),
        (PrepareConfig, {"gate": "softplus"}, "unbounded"),
        (ChainConfig, {"chunk": 128}, "chunk"),
        (SummaryConfig, {"chunk": 16}, "chunk"),
    ],
)
def test_a_variant_that_does_not_exist_is_refused(kind, wrong, named):
    with pytest.raises(ValueError, match=f"^{named}: "):
        kind(**wrong)
