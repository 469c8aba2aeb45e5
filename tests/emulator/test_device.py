"""A compiled DSL function on the emulated device: its own host code makes the launches."""

import threading

import pytest
import torch
from helpers.emulator.dsl_kernels import THREADS, compiled, compiled_ranks

import ptx_emulator
from ptx_emulator import ExecutionError


@pytest.fixture(scope="module")
def function():
    return ptx_emulator.load(compiled("sm_90a"))


def test_host_code_launches_its_kernels(function):
    x, y = torch.arange(128.0), torch.zeros(128)
    with ptx_emulator.device("sm_90a") as device:
        function(x, y, 2.5, 100)
    assert torch.equal(y[:100], 3.5 * x[:100]) and torch.equal(y[100:], x[100:])
    scale, add = device.launches
    assert "scale" in scale.kernel and "add" in add.kernel
    assert scale.grid == add.grid == (2, 1, 1) and scale.block == (THREADS, 1, 1)
    assert (scale.shared_bytes, add.shared_bytes) == (0, 1024)
    assert min(scale.instructions, add.instructions) > 0


@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
def test_host_code_launches_clusters(arch):
    y = torch.full((6,), -1.0)
    with ptx_emulator.device(arch) as device:
        ptx_emulator.load(compiled_ranks(arch))(y)
    assert y.tolist() == [0, 1] * 3 and device.launches[0].cluster == (2, 1, 1)


def test_an_error_in_a_kernel_passes_through_the_host_code(function):
    x, y = torch.zeros(100), torch.zeros(100)
    with ptx_emulator.device("sm_90a") as device, pytest.raises(ExecutionError, match="add.*out of bounds"):
        function(x, y, 1.0, 100)
    assert len(device.launches) == 1


def test_the_host_code_checks_its_arguments(function):
    x = torch.zeros(64)
    with ptx_emulator.device("sm_90a") as device:
        with pytest.raises(TypeError, match="expected 4|float32"):
            function(x, x)
        with pytest.raises(ValueError, match="expected dtype=float32"):
            function(x, x.double(), 1.0, 64)
        with pytest.raises(TypeError, match="argument of type str"):
            function(x, x, "1.0", 64)
    assert not device.launches


def test_a_launch_needs_a_device_that_fits(function):
    x, y = torch.zeros(64), torch.zeros(64)
    with pytest.raises(RuntimeError, match="no emulated device"):
        function(x, y, 1.0, 64)
    with (
        ptx_emulator.device("sm_100a"),
        pytest.raises(ValueError, match="for sm_90a, this device is sm_100a"),
    ):
        function(x, y, 1.0, 64)
    with (
        ptx_emulator.device("sm_90a", sms=1),
        pytest.raises(ValueError, match="cooperative launch of 2 CTAs on 1"),
    ):
        function(torch.zeros(128), torch.zeros(128), 1.0, 128)


def test_each_thread_has_its_own_device(function):
    found = {}

    def work(n):
        x, y = torch.full((64,), float(n)), torch.zeros(64)
        with ptx_emulator.device("sm_90a", seed=n) as device:
            function(x, y, 1.0, 64)
        found[n] = (y[0].item(), len(device.launches))

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == {1: (2.0, 2), 2: (4.0, 2)}


def test_a_function_without_ptx_is_refused():
    with pytest.raises(ValueError, match="--keep-ptx"):
        ptx_emulator.load(compiled("sm_90a", options=""))
