"""Calls in segments over pools of states, by emulated kernels of kda-sm90."""

from typing import ClassVar

from helpers.pool_segment_cases import PoolSegmentCases

from kda_sm90.config import ARCH


class TestSm90(PoolSegmentCases):
    backend, arch = "sm90", ARCH
    options: ClassVar = {"races": ("shared",)}  # as in `test_emulated`
