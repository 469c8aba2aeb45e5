"""Calls in segments over pools of states, by emulated kernels of kda-sm100."""

from helpers.pool_segment_cases import PoolSegmentCases

from kda_sm100.config import ARCHS


class TestSm100(PoolSegmentCases):
    backend, arch = "sm100", ARCHS[0]
