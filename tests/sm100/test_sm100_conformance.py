"""The conformance kit on this backend."""

import pytest

from kda_core.testing.conformance import BackendConformance


@pytest.mark.arch((10, 0), (10, 3))
class TestSm100(BackendConformance):
    backend = "sm100"
    device = "cuda"
