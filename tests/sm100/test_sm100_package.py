"""kda-sm100 as it stands: installed, listed with its reason, refused by name, and nothing heavier imported."""

from importlib import metadata

import pytest
from support import listed, modules_after, prefill

from kda_core import chunk_kda
from kda_core.errors import BackendUnsupportedError, NoEligibleBackendError
from kda_core.registry import record_calls
from kda_sm100.plugin import SPEC

NO_KERNEL = "this version of kda-sm100 has no kernel yet"


def test_it_is_listed_with_the_reason_on_every_machine():
    info = listed("sm100")
    assert (info.status, info.reason) == ("unsupported", NO_KERNEL)
    assert (info.distribution, info.version) == ("kda-sm100", metadata.version("kda-sm100"))
    assert info.spec is SPEC


def test_the_spec_claims_nothing():
    assert SPEC.archs == {(10, 0), (10, 3)}
    assert SPEC.features == frozenset()


def test_a_call_that_names_it_is_refused_and_told_who_could_serve_it():
    with pytest.raises(
        BackendUnsupportedError, match=f"'sm100'.*{NO_KERNEL}; these could serve it: .*reference"
    ):
        chunk_kda(**prefill(), backend="sm100")


def test_listing_it_imports_no_compiler():
    imported = modules_after("import kda_core; assert 'sm100' in str(kda_core.backends())")
    assert "kda_sm100" in imported
    assert not imported & {"cutlass", "tvm_ffi", "triton"}


def test_it_asks_for_the_cuda_13_libraries_of_the_dsl():
    assert any(r.startswith("nvidia-cutlass-dsl[cu13]") for r in metadata.requires("kda-sm100") or ())


@pytest.mark.arch((10, 0), (10, 3))
def test_on_its_own_gpu_nothing_is_chosen_silently():
    x = prefill("cuda")
    with pytest.raises(NoEligibleBackendError, match=f"sm100 +unsupported: {NO_KERNEL}"):
        chunk_kda(**x)
    with record_calls() as calls:
        chunk_kda(**x, backend="reference")
    assert [(c.backend, c.device_type) for c in calls] == [("reference", "cuda")]
