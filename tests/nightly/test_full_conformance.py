"""The full conformance kit on the emulated kernels of kda-sm90 and kda-sm100: ``python -m nox -s nightly``.

It takes hours, so the folder is not among the tests of every change; these run a reduced set (`helpers.emulated_cases`). The same session
runs the tests of other folders that are marked `nightly`.
"""

from typing import Any, ClassVar

import pytest

from kda_core.testing.conformance import BackendConformance
from kda_cute.testing.emulation import emulated
from kda_sm90.config import ARCH
from kda_sm100.config import ARCHS


class EmulatedConformance(BackendConformance):
    """Base of the test class of a backend. Attributes as in `helpers.emulated_cases.EmulatedBackend`."""

    __test__ = False
    device = "cpu"
    arch: str
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def on_the_emulator(self):
        with emulated(self.backend, self.arch, **self.options):
            yield


class TestSm90(EmulatedConformance):
    __test__ = True
    backend, arch = "sm90", ARCH
    options: ClassVar = {"races": ("shared",)}  # as in `sm90/test_emulated.py`


class TestSm100(EmulatedConformance):
    __test__ = True
    backend, arch = "sm100", ARCHS[0]
