"""The set that ``python -m kda_core precompile`` compiles is all that calls need."""

import pytest
import torch
from test_plan import shape

from kda_cute.jit.key import Variant
from kda_sm90.plan import plan, segment_plan
from kda_sm90.variants import ALL, SAMPLE

FP32 = torch.float32
FREE = {"use_gate_in_kernel": False, "lower_bound": None, "A_log": False, "dt_bias": False}


def test_every_variant_is_offered_once():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the kernel class imports it")
    from kda_cute.device.merge_states import MERGES
    from kda_sm90.variants import ahead_of_time

    offered = ahead_of_time("sm_90a")
    assert len({Variant(kernel, config, "sm_90a") for kernel, config in offered}) == len(offered)
    assert {config for kernel, config in offered if kernel.__name__ == "PrefillKernel"} == set(ALL)
    assert {config for kernel, config in offered if kernel.__name__ == "MergeKernel"} == set(MERGES)
    assert set(SAMPLE) <= set(ALL)


@pytest.mark.parametrize(
    "gate", [{}, {"lower_bound": -8.0}, {"lower_bound": None}, FREE, FREE | {"safe_gate": True}]
)
def test_every_call_is_served(gate):
    needed = {
        plan(
            shape(B=B, T=T, HV=heads, H=heads, g=dtype, return_intermediate_states=states, **how, **gate)
        ).config
        for heads in (1, 8, 48, 67, 129)
        for B, T in ((1, 1), (1, 10**6), (100, 300))
        for dtype in (torch.bfloat16, FP32)
        for how in ({}, {"pin": True}, {"index": torch.int32, "use_graph": True, "max_num_seqs": 4})
        for states in (False, True)
    }
    assert needed <= set(ALL)


@pytest.mark.parametrize("gate", [{}, {"lower_bound": None}, FREE, FREE | {"safe_gate": True}])
def test_every_call_in_segments_is_served(gate):
    plans = [
        segment_plan(shape(T=T, N=N, HV=heads, H=heads, g=dtype, index=torch.int32, **states, **gate), sms)
        for heads in (1, 4, 16, 64)
        for T, N in ((1, 1), (8192, 8), (10**6, 64))
        for dtype in (torch.bfloat16, FP32)
        for states in ({}, {"return_intermediate_states": True, "chunk_size": 32})
        for sms in (4, 132)
    ]
    assert {config for p in plans for config in (p.summarize.config, p.run.config)} <= set(ALL)
