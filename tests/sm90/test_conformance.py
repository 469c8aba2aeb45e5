"""The conformance kit on this backend."""

import pytest

from kda_core.testing.conformance import BackendConformance


@pytest.mark.arch((9, 0))
class TestSm90(BackendConformance):
    backend = "sm90"
    device = "cuda"
