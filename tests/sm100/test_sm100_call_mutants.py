"""Mutants of the kernels of a prefill beside the chain, and of those of serving (`helpers.sm100_call_mutants`)."""

import pytest
from helpers.sm100_call_mutants import MUTANTS, cases, check


@pytest.mark.parametrize(("kernel", "pattern", "new", "how"), cases(MUTANTS))
def test_every_mutant_is_detected(kernel, pattern, new, how):
    check(kernel, pattern, new, how)
