"""The conformance kit on the backend `fla`, with a fake FLA on the CPU: it tests how calls are handed to FLA."""

import pytest
from helpers.fake_fla import fla_on_the_cpu

from kda_core.testing.conformance import BackendConformance


@pytest.fixture(scope="module", autouse=True)
def fake_fla():
    with fla_on_the_cpu():
        yield


class TestFla(BackendConformance):
    """The kit without the tests of what kda-core does around a backend, and of many gates."""

    backend = "fla"
    device = "cpu"
    head_dim = 32
    quick = True
    test_opcheck = test_compile = test_normalised_gates = None
