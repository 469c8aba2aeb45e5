"""The reduced conformance set on ptx-emulator (`helpers.emulated_cases`).

No Blackwell GPU has run the kernels yet. `test_sm100_conformance` is for the first one.
"""

import pytest
import torch
from helpers.emulated_cases import KIT, EmulatedCases, SharedKernelCases

import kda_core
from kda_core.serving import Journal, verify_kda
from kda_core.testing import error, token_oracle
from kda_core.testing.conformance import same
from kda_core.testing.runner import Runner
from kda_core.testing.serving import PER_TOKEN
from kda_cute.testing.emulation import emulated
from kda_sm100.config import ARCHS


class TestSm100(EmulatedCases, SharedKernelCases):
    backend, arch = "sm100", ARCHS[0]

    def test_long_sequences_reuse_the_rings(self, kda):
        kda.agrees(kda.case("slow", 300, H=1, initial_state=True))

    def test_intermediate_states_of_packed_sequences(self, kda):
        KIT.test_intermediate_states(kda, (0, 17, 17, 64, 130), False, 64)

    @pytest.mark.nightly
    def test_verification_of_more_states_than_ctas_at_a_time(self, kda):
        """CTAs prefetch the states of later CTAs into the L2. Some of these have no slot. The kernel is one for all GPU backends;
        here the emulator checks races in global memory, too."""
        N = 70
        x, device = kda.inputs("slow", 2, B=N, H=1, HV=2), {"device": kda.device}
        pool = torch.randn(N, 2, kda.V, kda.K, **device)
        slots = torch.arange(N - 1, -1, -1, dtype=torch.int32, **device)
        skipped = [3, N - 4, N - 1]
        slots[skipped] = torch.tensor((-1, N, -7), dtype=torch.int32, **device)
        records = Journal.allocate(
            N, 2, kda.K, kda.V, H=1, length=2, state_v_first=True, dtype=kda.dtype, **device
        )
        o = verify_kda(**x, pool=pool, slots=slots, records=records, backend=self.backend)
        rows = [n for n in range(N) if n not in skipped]
        part = {name: x[name][rows] for name in PER_TOKEN}
        start = {"initial_state": pool[slots[rows].long()], "state_v_first": True}
        want, _ = token_oracle(**x | part | start)
        kda.within(error(o[rows], want), 2.0**-7, "o of many drafts")
        assert not o[skipped].any()


def test_every_schedule_gives_the_same_bits():
    runner = Runner("sm100", "cpu", 128, quick=True)
    found = []
    for seed in range(4):
        with emulated("sm100", ARCHS[0], seed=seed):
            x = runner.inputs("slow", 260, H=1, initial_state=True)
            found.append(runner(x, output_final_state=True))
    assert all(same(one, found[0]) for one in found[1:])


@pytest.mark.parametrize("call, T, H", [(kda_core.chunk_kda, 70, 2), (kda_core.fused_recurrent_kda, 2, 3)])
def test_several_processes_have_the_bits_of_one(call, T, H):
    rng = torch.Generator().manual_seed(0)
    q, k, v, g = torch.randn(4, 1, T, H, 128, generator=rng).bfloat16().unbind()
    g, beta = -g.abs().float(), torch.rand(1, T, H, generator=rng)
    found = []
    for processes in (1, 2):
        with emulated("sm100", "sm_100a", processes=processes):
            found.append(call(q, k, v, g, beta, output_final_state=True, backend="sm100"))
    (o, state), (again, state_again) = found
    assert torch.equal(o, again) and torch.equal(state, state_again) and o.any()
