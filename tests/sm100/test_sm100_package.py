"""kda-sm100 as a package: listed and refused by name where there is no Blackwell GPU, chosen where there is one."""

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


def test_it_is_listed_on_every_machine():
    info = listed("sm100")
    assert info.status == ("ok" if BLACKWELL & set(visible_archs()) else "wrong-arch")
    assert (info.distribution, info.version) == ("kda-sm100", metadata.version("kda-sm100"))
    assert info.spec is SPEC


def test_it_declares_the_whole_contract_of_prefill():
    assert SPEC.archs == BLACKWELL
    assert SPEC.unavailable is None
    assert SPEC.features == {f.value for f in Feature} - {"backward", "recurrent"}
    assert SPEC.dtypes == {"bfloat16"} and SPEC.head_dims == {(HEAD_DIM, HEAD_DIM)}


def test_a_call_on_cpu_tensors_that_names_it_is_refused():
    with pytest.raises(
        BackendUnavailableError, match=r"'sm100'.*wrong-arch: runs on sm_100.*on cpu.*reference"
    ):
        chunk_kda(**prefill(), backend="sm100")


def test_listing_it_imports_no_compiler():
    imported = modules_after("import kda_core; assert 'sm100' in str(kda_core.backends())")
    assert "kda_sm100" in imported
    assert not imported & {"cutlass", "tvm_ffi", "triton"}


def test_it_knows_nothing_of_kda_sm90():
    imported = modules_after(
        "import kda_sm100.kernels.chain, kda_sm100.kernels.intra_chunk, kda_sm100.backend"
    )
    assert "kda_sm90" not in imported


def test_it_asks_for_the_cuda_13_libraries_of_the_dsl():
    assert any(r.startswith("nvidia-cutlass-dsl[cu13]") for r in metadata.requires("kda-sm100") or ())


@pytest.mark.arch((10, 0), (10, 3))
def test_on_its_own_gpu_it_is_the_automatic_choice():
    with record_calls() as calls:
        chunk_kda(**prefill("cuda"), context_parallel="off")
    assert [(c.backend, c.device_type) for c in calls] == [("sm100", "cuda")]
