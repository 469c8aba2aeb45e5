"""The ahead-of-time set of ``python -m kda_core precompile`` has every variant that calls need."""

import functools
from dataclasses import replace

import pytest
import torch
from helpers.support import FREE, problem_shape

from kda_core.contract import PoolShape
from kda_cute.decode import DECODES, decode_config
from kda_cute.jit.key import Variant
from kda_cute.journal import JOURNALS, journal_config
from kda_cute.verify import VERIFIES
from kda_sm90.config import ARCH, SPACINGS, PrefillConfig
from kda_sm90.launch_config import backward_launch_config, launch_config, segment_launch_configs
from kda_sm90.variants import ALL, SAMPLE

shape = functools.partial(problem_shape, (9, 0))

GATES = ({}, {"lower_bound": None}, FREE, FREE | {"safe_gate": True})


def test_every_variant_is_offered_once():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the kernel class imports it")
    from kda_cute.merge import MERGES
    from kda_sm90.variants import ahead_of_time

    offered = ahead_of_time(ARCH)
    assert len({Variant(kernel, config, ARCH) for kernel, config in offered}) == len(offered)
    assert {
        config for kernel, config in offered if kernel.__name__ in ("PrefillKernel", "GradientsKernel")
    } == set(ALL)
    assert {config for kernel, config in offered if kernel.__name__ == "MergeKernel"} == set(MERGES)
    assert {config for kernel, config in offered if kernel.__name__ == "DecodeKernel"} == set(DECODES)
    assert {config for kernel, config in offered if kernel.__name__ == "JournalKernel"} == set(JOURNALS)
    assert {config for kernel, config in offered if kernel.__name__ == "VerifyKernel"} == set(VERIFIES)
    assert set(SAMPLE) <= set(ALL)


@pytest.mark.parametrize("gate", (*GATES, {"lower_bound": -8.0}))
def test_every_call_has_its_variant(gate):
    needed = {
        launch_config(
            shape(B=B, T=T, HV=heads, H=heads, g=dtype, return_intermediate_states=states, **options, **gate),
            spacing=spacing,
            strided=strided,
        ).config
        for heads in (1, 8, 48, 67, 129)
        for B, T in ((1, 1), (1, 10**6), (100, 300))
        for dtype in (torch.bfloat16, torch.float32)
        for options in ({}, {"pin": True}, {"index": torch.int32, "use_graph": True, "max_num_seqs": 4})
        for states, spacing in ((False, 0), (True, 0), *((False, spacing) for spacing in SPACINGS))
        for strided in ((False,) if spacing else (False, True))
    }
    assert needed <= set(ALL)


def test_a_pool_changes_nothing_but_the_variant_for_serving():
    for call in (
        shape(B=1, T=1000, HV=4, H=4),
        shape(B=100, T=70, HV=4, H=4, return_intermediate_states=True),
    ):
        plain = launch_config(call)
        pool = PoolShape(torch.bfloat16, torch.int64, True, checkpoint_dtype=torch.float32)
        found = launch_config(replace(call, pool=pool))
        assert (
            found
            == replace(plain, config=replace(plain.config, serving=True))
            == launch_config(call, strided=True)
        )


@pytest.mark.parametrize("v_first", (False, True))
@pytest.mark.parametrize("gate", GATES)
def test_every_decode_has_its_variant(gate, v_first):
    calls = [
        shape(B=B, T=1, HV=64, H=64, g=dtype, recurrent=True, state_v_first=v_first, **gate)
        for B in (1, 256)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    pools = (None, *(PoolShape(dtype, torch.int32, True) for dtype in (torch.bfloat16, torch.float32)))
    pooled = [replace(call, pool=pool) for call in calls for pool in pools]
    assert {decode_config(call) for call in pooled} <= set(DECODES)
    assert {journal_config(call) for call in pooled} <= set(JOURNALS)


@pytest.mark.parametrize("gate", GATES)
def test_every_backward_has_its_variants(gate):
    needed = {
        backward_launch_config(
            shape(T=T, HV=heads, H=heads, g=dtype, needs_backward=True, **gate), mode=mode
        ).config
        for heads in (1, 8, 48, 129)
        for T in (1, 8192, 10**6)
        for dtype in (torch.bfloat16, torch.float32)
        for mode in ("reverse", "recompute")
    }
    assert needed <= set(ALL)


@pytest.mark.parametrize("gate", GATES)
def test_every_call_in_segments_has_its_variants(gate):
    launches = [
        segment_launch_configs(
            replace(
                shape(T=T, N=N, HV=heads, H=heads, g=dtype, index=torch.int32, **states, **gate), pool=pool
            ),
            sms,
        )
        for heads in (1, 4, 16, 64)
        for T, N in ((1, 1), (8192, 8), (10**6, 64))
        for dtype in (torch.bfloat16, torch.float32)
        for states in ({}, {"return_intermediate_states": True, "chunk_size": 32})
        for sms in (4, 132)
        for pool in (None, PoolShape(torch.bfloat16, torch.int32, True))
    ]
    needed = {config for pair in launches for config in (pair.summarize.config, pair.execute.config)}
    assert needed <= set(ALL)


def test_warpgroups_compute_all_records_but_those_of_backwards_and_summaries_of_chunks_of_64():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the kernel class imports it")
    from kda_sm90.kernels.intra_chunk import WarpgroupIntraChunk
    from kda_sm90.kernels.prefill import SHARED_BYTES, PrefillKernel

    of_warpgroups = set()
    for config in (
        config for config in ALL if isinstance(config, PrefillConfig) and not config.reads_records
    ):
        kernel = PrefillKernel(config)
        assert kernel.groups * kernel.intra_chunk.threads == kernel.threads == config.threads
        assert kernel.group_bytes % 128 == 0 and kernel.shared_bytes <= SHARED_BYTES
        if isinstance(kernel.intra_chunk, WarpgroupIntraChunk):
            assert kernel.group_bytes % 1024 == 0  # operand images of a group start at its memory
            of_warpgroups.add(config)
    assert of_warpgroups == {
        config
        for config in ALL
        if isinstance(config, PrefillConfig)
        and (config.mode == "whole" or (config.mode, config.chunk) == ("summarize", 32))
    }
