"""Exported kernels of kda-sm100."""

import pytest
import torch
from helpers.exported_backend import check_bits, kernels_without_dsl

from kda_cute import arch_of_capability


def test_the_host_code_of_calls_needs_no_dsl():
    assert kernels_without_dsl("sm100") == [
        "ChainKernel", "DecodeKernel", "GradientsKernel", "IntraChunkKernel", "RecomputeChainKernel", "ReverseChainKernel",
        "SavingChainKernel",
    ]  # fmt: skip


@pytest.mark.arch((10, 0), (10, 3))
@pytest.mark.parametrize("blocked", [True, False], ids=["without-the-dsl", "beside-the-dsl"])
def test_exported_kernels_compute_the_bits_of_the_dsls_launches(tmp_path, monkeypatch, blocked):
    from kda_sm100.variants import ahead_of_time

    arch = arch_of_capability(torch.cuda.get_device_capability())
    check_bits("sm100", arch, ahead_of_time, tmp_path, monkeypatch, blocked)
