"""Names of architectures, and the modules that importing ``kda_cute`` imports."""

from __future__ import annotations

import pytest
import torch

from kda_core.errors import ArgumentError, DeviceError
from kda_cute import arch_of_capability, arch_of_device
from kda_cute.jit.target import capability_of_arch, check_arch


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a")],
)
def test_the_name_follows_from_the_capability(capability, arch):
    assert arch_of_capability(capability) == arch
    assert check_arch(arch) == arch
    assert capability_of_arch(arch) == capability


@pytest.mark.parametrize("arch", ["sm_90", "sm_100f", "sm_80", "sm_210a"])
def test_names_of_other_forms_are_accepted(arch):
    assert check_arch(arch) == arch


@pytest.mark.parametrize(
    "arch", ["SM_90A", "sm_9", "sm_90b", "sm_90aa", "sm_090", "compute_90", "90", " sm_90", ""]
)
def test_names_of_no_architecture_are_refused(arch):
    for function in (check_arch, capability_of_arch):
        with pytest.raises(ArgumentError, match=r"arch: expected sm_<number>.*such as sm_90a, got "):
            function(arch)


def test_the_architecture_of_a_device_is_that_of_its_capability(monkeypatch):
    capabilities = {torch.device("cuda", 0): (9, 0), torch.device("cuda", 1): (10, 3)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert [arch_of_device(device) for device in capabilities] == ["sm_90a", "sm_103a"]


def test_a_cpu_has_no_architecture():
    with pytest.raises(DeviceError, match="expected a CUDA device, got cpu"):
        arch_of_device(torch.device("cpu"))


def test_the_import_does_not_import_the_dsl(python):
    code = """
import sys
import kda_core
import kda_cute
import kda_cute.commands
import kda_cute.diagnosis
kda_core.backends()
kda_cute.dsl_wheels()
kda_cute.arch_of_capability((9, 0))
print(sorted({name.partition(".")[0] for name in sys.modules} & {"cutlass", "nvidia_cutlass_dsl", "triton", "tvm_ffi"}))
"""
    # The DSL's .pth file imports its empty outer package in every interpreter; torch imports cuda.bindings.
    assert eval(python(code)) in ([], ["nvidia_cutlass_dsl"])
