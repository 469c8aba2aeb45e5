"""Prefill over pools of states, with checkpoints and strided inputs, by emulated kernels of kda-sm100."""

from helpers.pool_cases import PoolCases

from kda_sm100 import launch_config
from kda_sm100.backend import launches_of
from kda_sm100.config import ARCHS


class TestSm100(PoolCases):
    backend, arch = "sm100", ARCHS[0]
    launch_config = launch_config
    caches = (launch_config.launch_config, launches_of)

    def chunk_of(self, shape):
        chain = launch_config.launch_config(shape).chain
        assert chain.serving
        return chain.chunk
