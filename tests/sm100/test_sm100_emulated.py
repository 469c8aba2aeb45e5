"""The reduced conformance set on ptx-emulator (`helpers.emulated_cases`).

No Blackwell GPU has run the kernels yet. `test_sm100_conformance` is for the first one.
"""

from helpers.emulated_cases import KIT, EmulatedCases

from kda_core.testing.conformance import same
from kda_core.testing.runner import Runner
from kda_cute.testing.emulation import emulated
from kda_sm100.config import ARCHS


class TestSm100(EmulatedCases):
    backend, arch = "sm100", ARCHS[0]

    def test_long_sequences_reuse_the_rings(self, kda):
        kda.agrees(kda.case("slow", 300, H=1, initial_state=True))

    def test_intermediate_states_of_packed_sequences(self, kda):
        KIT.test_intermediate_states(kda, (0, 17, 17, 64, 130), False, 64)


def test_every_schedule_gives_the_same_bits():
    runner = Runner("sm100", "cpu", 128, quick=True)
    found = []
    for seed in range(4):
        with emulated("sm100", ARCHS[0], seed=seed):
            x = runner.inputs("slow", 260, H=1, initial_state=True)
            found.append(runner(x, output_final_state=True))
    assert all(same(one, found[0]) for one in found[1:])
