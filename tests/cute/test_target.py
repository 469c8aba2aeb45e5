"""Architectures, and what importing ``kda_cute`` brings with it."""

from __future__ import annotations

import pytest
import torch

from kda_core.errors import ArgumentError, DeviceError
from kda_cute import arch_of_capability, arch_of_device
from kda_cute.jit.target import check_arch


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")]
)
def test_capability(capability, arch):
    assert arch_of_capability(capability) == arch
    assert check_arch(arch) == arch


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 1), (10, 1), (12, 0)])
def test_other_capabilities_are_refused(capability):
    with pytest.raises(DeviceError, match=r"9\.0 \(sm_90a\).*got {}\.{}".format(*capability)):
        arch_of_capability(capability)


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "SM_90A", ""])
def test_other_architectures_are_refused(arch):
    with pytest.raises(ArgumentError, match="one of sm_90a, sm_100a, sm_103a"):
        check_arch(arch)


def test_device_is_asked_for_its_own_capability(monkeypatch):
    capabilities = {torch.device("cuda", 0): (9, 0), torch.device("cuda", 1): (10, 3)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert [arch_of_device(device) for device in capabilities] == ["sm_90a", "sm_103a"]


def test_device_without_an_architecture():
    with pytest.raises(DeviceError, match="expected a CUDA device, got cpu"):
        arch_of_device(torch.device("cpu"))


def test_import_leaves_the_dsl_alone(python):
    code = """
import sys
import kda_cute
kda_cute.dsl_wheels()
kda_cute.arch_of_capability((9, 0))
print(sorted({name.partition(".")[0] for name in sys.modules} & {"cutlass", "nvidia_cutlass_dsl", "tvm_ffi"}))
"""
    # The DSL's .pth file imports its empty outer package in every interpreter; torch imports cuda.bindings.
    assert eval(python(code)) in ([], ["nvidia_cutlass_dsl"])
