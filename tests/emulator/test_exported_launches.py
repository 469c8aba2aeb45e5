"""Exported kernels: their cubin, and their launch compared with that of the DSL's host code, for every kernel class."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: no kernel could be compiled")

from helpers.exported_kernels import VARIANTS, compiled, values_of, write
from helpers.fake_cuda import STREAM, FakeDriver, OnDevice

from kda_core.errors import CompileError
from kda_cute.jit.dsl import FUNCTION
from kda_cute.store import cubin, manifest
from kda_cute.store.export import exported
from kda_cute.store.search import Folder, KernelStore
from kda_sm90 import variants as sm90
from kda_sm100 import variants as sm100
from ptx_emulator import gpu, host

COOPERATIVE, CLUSTER, OVERLAPS = (
    2,
    4,
    6,
)  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, ..._CLUSTER_DIMENSION, ..._PROGRAMMATIC_STREAM_SERIALIZATION
DYNAMIC_SHARED_BYTES, PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
IDS = [f"{interface.name}-{arch}-{i}" for i, (interface, _, arch) in enumerate(VARIANTS)]


def test_every_kernel_class_of_the_backends_has_a_variant_here():
    offered = {kernel for pairs in (sm90.kernels(), sm100.kernels()) for kernel, _ in pairs}
    assert {interface.load() for interface, _, _ in VARIANTS} == offered


@pytest.mark.parametrize("one", VARIANTS, ids=IDS)
def test_the_description_is_that_of_the_cubin(one):
    interface, config, _ = one
    variant, ptx, content = compiled(*one)
    description, _ = exported(variant, content)
    (entry,) = cubin.entries(cubin.cubin_of(content))
    assert description.symbol == entry.symbol and f".entry {entry.symbol}(" in ptx
    assert [(p.offset, p.size) for p in description.parameters] == list(entry.parameters)
    last = description.parameters[-1]
    assert entry.parameter_bytes == last.offset + last.size
    assert entry.max_threads == (description.threads, 1, 1)
    names = [p.name for p in description.parameters]
    assert names == list(interface.arguments(config)._fields)


@pytest.mark.parametrize("one", VARIANTS, ids=IDS)
def test_a_launch_is_that_of_the_dsl(one, tmp_path, monkeypatch):
    """The emulator runs the DSL's compiled host code; both get the same arguments."""
    interface, config, arch = one
    write(tmp_path, one)
    driver = FakeDriver()
    store = KernelStore([Folder(tmp_path, "test", trusted=False)], driver)
    launch, reasons = store.find(interface, config, arch)
    assert launch is not None and not reasons

    recorded, attributes = [], []
    monkeypatch.setattr(gpu.Device, "launch", lambda self, *given: recorded.append(given))
    set_attribute = host.Function._set_attribute
    monkeypatch.setattr(
        host.Function,
        "_set_attribute",
        lambda self, kernel, attribute, value, device=0: (
            attributes.append((attribute, value)) or set_attribute(self, kernel, attribute, value, device)
        ),
    )
    _, ptx, content = compiled(*one)
    of_the_dsl = host.Function(ptx, content, FUNCTION)
    kind = {"MergeKernel": torch.float32}.get(interface.name, torch.bfloat16)
    tensor = torch.zeros(1, 1, 1, 128, dtype=kind)
    with gpu.device(arch):
        for seed in range(3):
            values = values_of(interface, config, seed)
            of_the_dsl(tensor, *values)
            launch(OnDevice(), *values)
    assert len(recorded) == len(driver.cuda.launches) == 3
    for theirs, ours in zip(recorded, driver.cuda.launches, strict=True):
        _, symbol, grid, block, cluster, shared_bytes, parameters, _, cooperative = theirs
        assert (symbol, grid, block, shared_bytes) == (ours.symbol, ours.grid, ours.block, ours.shared_bytes)
        assert cluster == (interface.cluster(config), 1, 1)
        wanted = {
            COOPERATIVE: cooperative,
            CLUSTER: cluster if cluster != (1, 1, 1) else 0,
            OVERLAPS: interface.overlaps,
        }
        assert ours.attributes == {n: value for n, value in wanted.items() if value}
        places = manifest.parameters(interface.arguments(config))
        assert [ours.parameters[p.offset : p.offset + p.size] for p in places] == parameters
        assert ours.stream == STREAM
    assert len({ours.grid for ours in driver.cuda.launches}) > 1
    shared_bytes = driver.cuda.launches[0].shared_bytes
    assert driver.cuda.attributes == [(DYNAMIC_SHARED_BYTES, shared_bytes, 1, 100)]
    theirs = dict(attributes)
    assert theirs.keys() <= {DYNAMIC_SHARED_BYTES, PORTABLE_CLUSTER}  # no carveout
    assert shared_bytes <= theirs[DYNAMIC_SHARED_BYTES]


def test_a_cubin_with_other_parameters_is_not_exported(monkeypatch):
    one = VARIANTS[6]
    variant, _, content = compiled(*one)
    monkeypatch.setattr(variant.kernel, "interface", VARIANTS[-1][0])
    with pytest.raises(CompileError, match="states no KernelInterface of kda_cute.device.merge_states"):
        exported(variant, content)
    monkeypatch.undo()
    monkeypatch.setattr(manifest, "parameters", lambda struct: ())
    with pytest.raises(CompileError, match="expected parameters at"):
        exported(variant, content)
    monkeypatch.undo()
    monkeypatch.setattr(variant.kernel, "threads", 128)
    with pytest.raises(CompileError, match=r"expected 128 threads, got \(256, 1, 1\)"):
        exported(variant, content)
