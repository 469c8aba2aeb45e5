"""The launch configuration of a shape, and the variants that ``python -m kda_core precompile`` compiles."""

import functools
from dataclasses import replace

import pytest
import torch
from helpers.support import FREE, NOT_BUILT, problem_shape, refused

from kda_core.contract import PoolShape
from kda_cute.backward import BUDGETS
from kda_cute.gradients import GRADIENT_CONFIGS
from kda_cute.jit.key import Variant
from kda_sm100 import backward, layouts
from kda_sm100.config import ARCHS, BackwardChainConfig, ChainConfig, IntraChunkConfig, SummaryConfig
from kda_sm100.launch_config import launch_config
from kda_sm100.variants import BACKWARD, CHAIN, INTRA_CHUNK, SAMPLE, SAVING, SUMMARY

shape = functools.partial(problem_shape, (10, 0))


@pytest.mark.parametrize(("change", "reason"), NOT_BUILT)
def test_unsupported_shapes_are_refused_with_a_reason(change, reason):
    assert refused("sm100", shape()) is None
    assert reason in refused("sm100", shape(**change))


def test_the_gate_decides_whether_the_kernel_votes():
    unbounded = lambda **change: launch_config(shape(**change)).intra_chunk.unbounded
    assert not unbounded() and unbounded(lower_bound=-8.0) and unbounded(lower_bound=None)
    assert launch_config(shape(lower_bound=None)).intra_chunk.gate == "softplus"
    assert unbounded(**FREE) and not unbounded(**FREE, safe_gate=True)


def test_chunks_are_the_longest_that_intermediate_states_allow():
    chunk = lambda **change: launch_config(shape(**change)).chunk
    assert chunk() == chunk(chunk_size=32) == 64
    assert chunk(return_intermediate_states=True) == 64
    assert chunk(return_intermediate_states=True, chunk_size=32) == 32


def test_the_workspace_has_a_record_per_slot_and_value_head():
    assert launch_config(shape(B=2, T=65, HV=8)).records == 2 * 2 * 8
    packed = launch_config(shape(T=65, HV=8, N=5, index=torch.int32))
    assert packed.records == (65 // 64 + 5) * 8
    assert packed.workspace_bytes == packed.records * (4 * 2 * 64 * 128 + 2 * 64 * 64 + 4 * 128)
    assert layouts.slot_count(1, 65, 64, 5) == 6


@pytest.mark.parametrize(
    "gate", [{}, {"lower_bound": -8.0}, {"lower_bound": None}, FREE, FREE | {"safe_gate": True}]
)
def test_precompiled_variants_serve_every_call(gate):
    for dtype in (torch.bfloat16, torch.float32):
        for states in (
            {},
            {"return_intermediate_states": True},
            {"return_intermediate_states": True, "chunk_size": 32},
        ):
            call = shape(g=dtype, **gate, **states)
            for pool in (None, PoolShape(torch.float32, torch.int32, True)):
                chosen = launch_config(replace(call, pool=pool), strided=pool is None)
                assert (
                    chosen.intra_chunk in INTRA_CHUNK and chosen.chain in CHAIN and chosen.summary in SUMMARY
                )


@pytest.mark.parametrize("T", (100, 8192, 1 << 20))
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("recompute", (False, True))
def test_the_workspace_of_a_backward_is_bounded(recompute, packed, T):
    call = shape(
        T=T,
        H=8,
        HV=64,
        N=3 if packed else None,
        index=torch.int32 if packed else None,
        disable_recompute=not recompute,
    )
    budget = BUDGETS[not recompute]
    for spacing in (64, 512):
        slabs = backward.slabs_of(call, spacing)
        size = backward.total_bytes(backward.arrays(call, spacing, slabs))
        assert size <= budget or slabs.slots == 1
        assert len(list(slabs.starts())) == -(-slabs.total // slabs.slots)
    kept = (
        4 * 64 * 128 * 128 * backward.slabs_of(call, 0).total
    )  # S before every 512 tokens, if the forward saves nothing
    assert backward.workspace_bytes(call) <= kept + 2 * budget


def test_precompile_builds_each_variant_once():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the kernel classes import it")
    from kda_cute.decode import DECODES
    from kda_cute.journal import JOURNALS
    from kda_cute.merge import MERGES
    from kda_cute.verify import VERIFIES
    from kda_sm100.variants import ahead_of_time

    for arch in ARCHS:
        variants = [Variant(kernel, config, arch) for kernel, config in ahead_of_time(arch)]
        assert len(set(variants)) == len(variants)
        assert {v.config for v in variants} == {
            *INTRA_CHUNK, *CHAIN, *SAVING, *BACKWARD, *GRADIENT_CONFIGS, *SUMMARY, *MERGES, *DECODES, *JOURNALS, *VERIFIES,
        }  # fmt: skip
    assert set(SAMPLE) <= set(INTRA_CHUNK)


@pytest.mark.parametrize(
    ("kind", "wrong", "named"),
    [
        (IntraChunkConfig, {"chunk": 16}, "chunk"),
        (IntraChunkConfig, {"gate": "softplus"}, "unbounded"),
        (IntraChunkConfig, {"chunk": 32, "backward": True}, "backward"),
        (ChainConfig, {"chunk": 128}, "chunk"),
        (ChainConfig, {"saves": 128}, "saves"),
        (ChainConfig, {"saves": 64, "states": True}, "saves"),
        (BackwardChainConfig, {"mode": "whole"}, "mode"),
        (SummaryConfig, {"chunk": 16}, "chunk"),
    ],
)
def test_invalid_variants_are_refused(kind, wrong, named):
    with pytest.raises(ValueError, match=f"^{named}: "):
        kind(**wrong)
