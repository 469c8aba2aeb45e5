"""The mutants of `helpers.sm100_call_mutants` under more schedules of the emulator."""

import pytest
from helpers.sm100_call_mutants import MORE, MUTANTS, cases, check


class TestSm100Mutants:
    @pytest.mark.parametrize("seed", range(1, 7))
    @pytest.mark.parametrize(("kernel", "pattern", "new", "how"), cases((*MUTANTS, *MORE)))
    def test_every_mutant_is_detected(self, kernel, pattern, new, how, seed):
        check(kernel, pattern, new, how, seed)
