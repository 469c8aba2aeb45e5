"""kda-sm90 as a package: without a Hopper GPU it is listed and refuses calls; with one it is the automatic choice."""

import functools
from importlib import metadata

import pytest
import torch
from helpers.support import listed, modules_after_each, prefill

from kda_core import chunk_kda, explain
from kda_core.contract import Feature
from kda_core.errors import ArgumentError, BackendUnavailableError, BackendUnsupportedError
from kda_core.registry import record_calls, visible_archs
from kda_sm90.config import HEAD_DIM
from kda_sm90.plugin import SPEC

HOPPER = (9, 0)


def test_backend_is_listed_on_every_machine():
    info = listed("sm90")
    assert info.status == ("ok" if HOPPER in visible_archs() else "wrong-arch")
    assert (info.distribution, info.version) == ("kda-sm90", metadata.version("kda-sm90"))
    assert info.spec is SPEC


def test_spec_declares_every_feature():
    assert SPEC.archs == {HOPPER}
    assert SPEC.unavailable is None
    assert SPEC.features == {f.value for f in Feature}
    assert SPEC.dtypes == {"bfloat16"} and SPEC.head_dims == {(HEAD_DIM, HEAD_DIM)}


def test_cpu_tensors_are_refused_with_the_reason():
    with pytest.raises(BackendUnavailableError, match="'sm90'.*wrong-arch: runs on sm_90.*on cpu.*reference"):
        chunk_kda(**prefill(), backend="sm90")


@functools.cache
def imported_by():
    """Returns what a process has imported after it listed the backends, and what another one after it imported the emulation of kernels."""
    listing = "import kda_core; assert 'sm90' in str(kda_core.backends())"
    return modules_after_each(listing, "import kda_cute.testing.emulation, kda_sm90.backend")


def test_listing_backends_does_not_import_the_dsl():
    imported, _ = imported_by()
    assert "kda_sm90" in imported
    assert not imported & {"cutlass", "tvm_ffi", "triton"}


def test_the_emulator_is_imported_on_first_use():
    _, imported = imported_by()
    assert "kda_sm90" in imported and "ptx_emulator" not in imported


def test_kda_cute_is_required_at_the_same_version():
    assert f"kda-cute=={metadata.version('kda-sm90')}" in (metadata.requires("kda-sm90") or ())


@pytest.mark.arch(HOPPER)
def test_backend_is_the_automatic_choice_on_a_hopper_gpu():
    with record_calls() as calls:
        chunk_kda(**prefill("cuda"), context_parallel="off")
    assert [(c.backend, c.device_type) for c in calls] == [("sm90", "cuda")]


@pytest.mark.arch(HOPPER)
def test_unsupported_calls_are_refused_with_the_reason():
    x = prefill("cuda")
    narrow = x | {n: x[n][..., :64].contiguous() for n in ("q", "k", "g")}
    with pytest.raises(BackendUnsupportedError, match="K=64, V=128; serves K=128, V=128"):
        chunk_kda(**narrow, backend="sm90")
    half = x | {n: x[n].half() for n in ("q", "k", "v")}
    with pytest.raises(BackendUnsupportedError, match="dtype float16; serves bfloat16"):
        chunk_kda(**half, backend="sm90")


@pytest.mark.arch(HOPPER)
def test_backend_serves_training_on_a_hopper_gpu():
    x = prefill("cuda")
    leaves = {"v": x["v"].clone().requires_grad_()}
    with record_calls() as calls:
        chunk_kda(**x | leaves)[0].float().sum().backward()
    assert [(c.backend, c.entry) for c in calls] == [("sm90", "chunk_fwd"), ("sm90", "chunk_bwd")]
    assert leaves["v"].grad.isfinite().all()


@pytest.mark.arch(HOPPER)
def test_a_workspace_of_wrong_size_or_alignment_is_refused():
    x = prefill("cuda")
    needed = explain(**x, backend="sm90").workspace_bytes
    whole = torch.empty(needed + 256, dtype=torch.uint8, device="cuda")
    chunk_kda(**x, backend="sm90", workspace=whole)
    with pytest.raises(ArgumentError, match=f"workspace.*at least {needed} bytes"):
        chunk_kda(**x, backend="sm90", workspace=whole[: needed - 1])
    with pytest.raises(ArgumentError, match="workspace.*multiple of 256"):
        chunk_kda(**x, backend="sm90", workspace=whole[128:])
