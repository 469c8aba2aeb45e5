"""The emulator decodes instructions of the kernels by the example of others."""

import pytest
from helpers.compiled import compiled
from helpers.emulator.decoding import check_decoding_by_example

from kda_cute.gradients import GradientsConfig
from kda_sm100.arguments import CHAIN, GRADIENTS
from kda_sm100.config import ARCHS, ChainConfig


@pytest.mark.parametrize(
    ("interface", "config"),
    [(CHAIN, ChainConfig(32)), (GRADIENTS, GradientsConfig())],
    ids=("chain", "gradients"),
)
def test_decoding_by_example_equals_decoding(interface, config):
    check_decoding_by_example(compiled(interface, config, ARCHS[0]).ptx)
