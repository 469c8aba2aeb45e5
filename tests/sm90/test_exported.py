"""Exported kernels of kda-sm90."""

import pytest
from helpers.exported_backend import check_bits, kernels_without_dsl

from kda_sm90.config import ARCH


def test_the_host_code_of_calls_needs_no_dsl():
    assert kernels_without_dsl("sm90") == ["DecodeKernel", "GradientsKernel", "PrefillKernel"]


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("blocked", [True, False], ids=["without-the-dsl", "beside-the-dsl"])
def test_exported_kernels_compute_the_bits_of_the_dsls_launches(tmp_path, monkeypatch, blocked):
    from kda_sm90.variants import ahead_of_time

    check_bits("sm90", ARCH, ahead_of_time, tmp_path, monkeypatch, blocked)
