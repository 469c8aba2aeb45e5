"""kda-sm100 as a package: listed everywhere, refused by name without a Blackwell GPU, chosen automatically with one."""

from importlib import metadata

import pytest
from helpers.support import listed, modules_after, prefill

from kda_core import chunk_kda
from kda_core.contract import Feature
from kda_core.errors import BackendUnavailableError
from kda_core.registry import record_calls, visible_archs
from kda_sm100.config import HEAD_DIM
from kda_sm100.plugin import SPEC

BLACKWELL = {(10, 0), (10, 3)}


def test_the_backend_is_listed_on_every_machine():
    info = listed("sm100")
    assert info.status == ("ok" if BLACKWELL & set(visible_archs()) else "wrong-arch")
    assert (info.distribution, info.version) == ("kda-sm100", metadata.version("kda-sm100"))
    assert info.spec is SPEC


def test_the_spec_declares_every_feature():
    assert SPEC.archs == BLACKWELL
    assert SPEC.unavailable is None
    assert SPEC.features == {f.value for f in Feature}
    assert SPEC.dtypes == {"bfloat16"} and SPEC.head_dims == {(HEAD_DIM, HEAD_DIM)}


def test_cpu_tensors_are_refused():
    with pytest.raises(
        BackendUnavailableError, match=r"'sm100'.*wrong-arch: runs on sm_100.*on cpu.*reference"
    ):
        chunk_kda(**prefill(), backend="sm100")


def test_listing_imports_no_compiler():
    imported = modules_after("import kda_core; assert 'sm100' in str(kda_core.backends())")
    assert "kda_sm100" in imported
    assert not imported & {"cutlass", "tvm_ffi", "triton"}


def test_the_package_pins_kda_cute_at_its_own_version():
    assert f"kda-cute=={metadata.version('kda-sm100')}" in (metadata.requires("kda-sm100") or ())


@pytest.mark.arch((10, 0), (10, 3))
def test_blackwell_gpus_choose_this_backend():
    with record_calls() as calls:
        chunk_kda(**prefill("cuda"), context_parallel="off")
    assert [(c.backend, c.device_type) for c in calls] == [("sm100", "cuda")]
