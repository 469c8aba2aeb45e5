"""The reduced conformance set on ptx-emulator (`helpers.emulated_cases`)."""

from typing import ClassVar

import pytest
from helpers.emulated_cases import BOUNDS, EmulatedCases
from helpers.nightly import nightly
from helpers.support import listed, modules_after

from kda_core import chunk_kda
from kda_core.errors import BackendUnavailableError
from kda_core.testing import make_inputs, record_calls
from kda_cute.testing.emulation import emulated
from kda_sm90.config import ARCH


class TestSm90(EmulatedCases):
    backend, arch = "sm90", ARCH
    # The producer of a record learns from a relaxed counter that it may reuse the ring; the check for races in global
    # memory would report that as a race.
    options: ClassVar = {"races": ("shared",)}

    @pytest.mark.parametrize("bounds", (BOUNDS[0], *map(nightly, BOUNDS[1:])), ids=str)
    @pytest.mark.parametrize("family", ("slow", nightly("memory")))
    def test_packed(self, kda, bounds, family):
        super().test_packed(kda, bounds, family)


def test_calls_without_a_backend_name_are_not_emulated():
    x = make_inputs("slow", 20, H=1).arguments
    with emulated("sm90", ARCH), record_calls() as calls:
        assert listed("sm90").reason == "emulated sm_90a, on the CPU"
        chunk_kda(**x)
    assert [c.backend for c in calls] == ["reference"]
    with pytest.raises(BackendUnavailableError, match="on cpu"):
        chunk_kda(**x, backend="sm90")


def test_the_emulator_is_imported_on_first_use():
    assert "ptx_emulator" not in modules_after("import kda_cute.testing.emulation, kda_sm90.backend")
