"""Prefill over pools of states, with checkpoints and strided inputs, by emulated kernels of kda-sm90."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from helpers.pool_cases import PoolCases, checkpoints

from kda_core.testing import serving
from kda_sm90 import launch_config
from kda_sm90.backend import launch_of
from kda_sm90.config import ARCH, PrefillConfig


class TestSm90(PoolCases):
    backend, arch = "sm90", ARCH
    options: ClassVar = {"races": ("shared",)}  # as in `test_emulated`

    launch_config = launch_config
    caches = (launch_config.launch_config, launch_config.workspace_bytes, launch_of)

    def chunk_of(self, shape):
        config = launch_config.launch_config(shape).config
        assert config.serving
        return config.chunk

    def test_checkpoints_between_local_records_change_no_bit(self, kda, monkeypatch, cleared):
        """Runs begin at chunks 2 and 4. Chunk 5 has a local record."""
        monkeypatch.setattr(launch_config, "CHUNKS", (32,))
        x = kda.inputs("slow", 226, H=1, HV=2)
        found = []
        for chains in (((2, False),), ((2, True),)):
            monkeypatch.setattr(launch_config, "CHAINS", chains)
            for cache in self.caches:
                cache.cache_clear()
            pool = serving.Pool(kda)
            given = x | pool.arguments((3,)) | checkpoints(pool, (((64, 4), (128, 5)),))
            config = launch_config.launch_config(kda.shape(given)).config
            assert config == replace(config, chunk=32, warpgroups=2, serving=True, local=chains[0][1])
            found.append((kda(given)[0], pool.states[3:6].clone()))
        assert all(torch.equal(y, z) for y, z in zip(*found, strict=True))

    def test_checkpoints_of_a_sequence_that_two_queues_share(self, kda, monkeypatch, cleared):
        """Two queues of 6 slots. Sequence 1 has the slots 4 to 7, so the first queue ends behind its first two chunks."""
        monkeypatch.setattr(launch_config._Model, "best", lambda model: 2)
        lengths = (192, 192, 192)
        x, pool = kda.inputs("slow", sum(lengths), lengths=lengths, H=1), serving.Pool(kda, "fp32-vk", HV=1)
        points = ((), ((64, 4), (128, 5), (192, 6)), ())
        given = x | pool.arguments((3, 1, 0)) | checkpoints(pool, points)
        assert launch_config.launch_config(kda.shape(given), longest=192).queues == 2
        before = pool.states[1].clone()
        kda(given, pin=True)
        for position, slot in ((64, 4), (128, 5), (192, 6)):
            part = {m: x[m][:, 192 : 192 + position] for m in serving.PER_TOKEN}
            alone = {m: y for m, y in x.items() if m != "cu_seqlens"} | part
            given = alone | {"initial_state": before[None], "state_v_first": True}
            assert torch.equal(pool.states[slot], kda(given, output_final_state=True, pin=True)[1][0])
        assert torch.equal(pool.states[1], pool.states[6])


@pytest.mark.parametrize("change", ({"mode": "reverse", "states": True}, {"states": True, "residual": True}))
def test_a_config_without_a_kernel_raises_an_error(change):
    with pytest.raises(ValueError, match="serving: expected False unless mode='whole'"):
        PrefillConfig(serving=True, **change)
