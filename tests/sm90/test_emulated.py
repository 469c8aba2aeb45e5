"""The reduced conformance set on ptx-emulator (`helpers.emulated_cases`)."""

from typing import ClassVar

import pytest
from helpers.emulated_cases import BOUNDS, EmulatedCases, SharedKernelCases
from helpers.nightly import nightly
from helpers.support import listed

from kda_core import chunk_kda
from kda_core.errors import BackendUnavailableError
from kda_core.testing import error, make_inputs, record_calls, token_oracle
from kda_cute.testing.emulation import emulated
from kda_sm90.config import ARCH
from kda_sm90.layouts import COMPACT_SEQUENCES


class TestSm90(EmulatedCases):
    backend, arch = "sm90", ARCH
    # The producer of a record learns from a relaxed counter that it may reuse the ring; the check for races in global
    # memory would report that as a race.
    options: ClassVar = {"races": ("shared",)}

    @pytest.mark.nightly  # `emulator/test_prefill` runs segments
    def test_segments(self, kda):
        super().test_segments(kda)

    @pytest.mark.nightly  # the host's code is the same for all GPU backends
    @pytest.mark.parametrize("states", (False, True))
    def test_calls_like_an_earlier_one(self, host, states):
        super().test_calls_like_an_earlier_one(host, states)

    @pytest.mark.parametrize("bounds", (BOUNDS[0], *map(nightly, BOUNDS[1:])), ids=str)
    @pytest.mark.parametrize("family", ("slow", nightly("memory")))
    def test_packed(self, kda, bounds, family):
        super().test_packed(kda, bounds, family)

    @pytest.mark.parametrize("family", ("slow", "masked"))
    def test_decode(self, kda, family):
        SharedKernelCases.test_decode(self, kda, family, True)


@pytest.mark.nightly
class TestSharedKernels(SharedKernelCases):
    """The kernels of kda-cute are the same for all GPU backends. Every change runs them with the newest one."""

    backend, arch, options = TestSm90.backend, TestSm90.arch, TestSm90.options


def test_calls_without_a_backend_name_are_not_emulated():
    x = make_inputs("slow", 20, H=1).arguments
    with emulated("sm90", ARCH), record_calls() as calls:
        assert listed("sm90").reason == "emulated sm_90a, on the CPU"
        chunk_kda(**x)
    assert [c.backend for c in calls] == ["reference"]
    with pytest.raises(BackendUnavailableError, match="on cpu"):
        chunk_kda(**x, backend="sm90")


@pytest.mark.nightly
@pytest.mark.parametrize("N", (COMPACT_SEQUENCES, COMPACT_SEQUENCES + 1))
def test_the_most_sequences_with_compact_slots_and_one_more(N):
    lengths = [0] * N
    lengths[0], lengths[1], lengths[97], lengths[N - 2] = 33, 1, 40, 20
    x = make_inputs("slow", sum(lengths), H=1, lengths=tuple(lengths)).arguments
    with emulated("sm90", ARCH, **TestSm90.options), record_calls() as calls:
        o, final = chunk_kda(**x, output_final_state=True, backend="sm90")
    want_o, want_final = token_oracle(**x, output_final_state=True)[:2]
    assert [c.backend for c in calls] == ["sm90"]
    assert error(o, want_o) < 5e-3
    assert error(final, want_final, state=True) < 5e-3
