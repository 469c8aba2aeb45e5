"""A compiled DSL function on the emulated device: its own host code makes the launches."""

import threading

import pytest
import torch
from cutlass import Float4E2M1FN, Float6E2M3FN, Float8E4M3FN, Float32, Int32
from cutlass.cute.runtime import from_dlpack
from helpers.emulator import ptx
from helpers.emulator.dsl_kernels import (
    THREADS,
    TILE,
    compiled,
    compiled_copy_pair,
    compiled_load_tile,
    compiled_ranks,
    ranks_of_either,
)

import ptx_emulator
from ptx_emulator import ExecutionError, PtxError
from ptx_emulator.host import Function, described


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


def test_numbers_of_the_dsl_are_arguments(function):
    x, y = torch.arange(128.0), torch.zeros(128)
    with ptx_emulator.device("sm_90a"):
        function(x, y, Float32(2.5), Int32(100))
    assert torch.equal(y[:100], 3.5 * x[:100])


@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
def test_host_code_launches_clusters(arch):
    y = torch.full((6,), -1.0)
    with ptx_emulator.device(arch) as device:
        ptx_emulator.load(compiled_ranks(arch))(y)
    assert y.tolist() == [0, 1] * 3 and device.launches[0].cluster == (2, 1, 1)


def test_a_preferred_cluster_is_optional():
    y = torch.full((8,), -1.0)
    with ptx_emulator.device("sm_100a") as device:
        ptx_emulator.load(compiled_ranks("sm_100a", ranks_of_either))(y)
    assert y.tolist() == [0, 1] * 4 and device.launches[0].cluster == (2, 1, 1)


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


@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
def test_host_code_encodes_tensor_maps(arch):
    x, y = torch.arange(64 * 128).reshape(64, 128).half(), torch.zeros(TILE[0] * TILE[1]).half()
    with ptx_emulator.device(arch):
        ptx_emulator.load(compiled_load_tile(arch))(x, y)
    assert torch.equal(y.view(TILE), x[: TILE[0], : TILE[1]])


def test_a_refused_tensor_map_is_an_error():
    with ptx_emulator.device("sm_90a"), pytest.raises(ValueError, match="cuTensorMapEncodeTiled: globalDim"):
        ptx_emulator.load(compiled_load_tile("sm_90a"))(torch.zeros(0, 128).half(), torch.zeros(2048).half())


def test_a_function_that_is_not_modelled_is_an_error_that_names_it(monkeypatch):
    symbols = Function._symbols
    without = lambda self: {name: body for name, body in symbols(self).items() if name != "_cudaGetDevice"}
    monkeypatch.setattr(Function, "_symbols", without)
    with pytest.raises(PtxError, match="the host code calls _cudaGetDevice, which is not modelled"):
        ptx_emulator.load(compiled("sm_90a"))


@pytest.mark.parametrize(("kind", "dtype"), [(Float32, "float32"), (Float8E4M3FN, "float8_e4m3fn")])
def test_tuples_lists_and_fp8_tensors_are_arguments(kind, dtype):
    function = ptx_emulator.load(compiled_copy_pair(kind))
    x = [torch.arange(8 * (n + 1)).float().to(getattr(torch, dtype)) for n in range(2)]
    y = [torch.zeros_like(v) for v in x]
    with ptx_emulator.device("sm_90a") as device:
        function(((x[0], y[0]), [x[1], y[1]]), [8, 3])
        with pytest.raises(ValueError, match="expected dtype="):
            function(((x[0].double(), y[0]), (x[1], y[1])), (8, 3))
        with pytest.raises(TypeError, match="argument of type str"):
            function(((x[0], y[0]), (x[1], "y")), (8, 3))
    assert len(device.launches) == 2
    assert torch.equal(y[0].float(), x[0].float())
    assert torch.equal(y[1].float(), torch.where(torch.arange(16) < 3, x[1].float(), 0.0))


@pytest.mark.parametrize(("kind", "dtype"), [(Float32, torch.float32), (Float8E4M3FN, torch.uint8)])
def test_tensors_of_the_dsl_are_arguments(kind, dtype):
    """Those of types that torch lacks, too: their bytes are a tensor of uint8."""
    function = ptx_emulator.load(compiled_copy_pair(kind))
    x = [torch.arange(8 * (n + 1)).to(dtype) for n in range(2)]
    y = [torch.zeros_like(v) for v in x]
    given = [from_dlpack(v) for v in (*x, *y)]
    for v in given:
        v.element_type = kind
        v.mark_layout_dynamic()
    with ptx_emulator.device("sm_90a"):
        function(((given[0], given[2]), [given[1], given[3]]), [8, 3])
    assert torch.equal(y[0], x[0])
    assert torch.equal(y[1], torch.where(torch.arange(16) < 3, x[1], 0))


def test_tensors_of_4_bits_are_described_in_pairs():
    """TVM-FFI counts pairs along the dimension whose stride is always 1."""
    tensor = from_dlpack(torch.zeros(6, 64, dtype=torch.uint8))
    tensor.element_type = Float4E2M1FN
    tensor.mark_layout_dynamic()
    assert described(tensor) == ((17, 4, 2), [6, 32], [32, 1])
    whole = from_dlpack(torch.zeros(4, dtype=torch.uint8))
    whole.element_type = Float6E2M3FN
    assert described(whole) == ((15, 6, 1), [4], [1])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 1, 0)])
def test_tensors_may_be_dense_in_any_order_of_their_dimensions(order):
    """Column-major and permuted tensors have no gaps; a slice has some."""
    x = torch.zeros(4, 2, 8, dtype=torch.int32).permute(order)
    body = "shl.b32 %r1, %r0, 2; cvt.u64.u32 %q8, %r1; add.s64 %q8, %q8, %q0; st.global.b32 [%q8], %r0;"
    ptx.run(body, x, threads=64)
    assert x.permute([order.index(n) for n in range(3)]).flatten().tolist() == list(range(64))
    with pytest.raises(ValueError, match="tensor 0: expected a dense CPU tensor, without gaps"):
        ptx.run(body, torch.zeros(4, 2, 16)[..., :8].permute(order), threads=64)
    with pytest.raises(ValueError, match="expected a dense CPU tensor"):
        ptx.run(body, torch.zeros(1, 8).expand(8, 8), threads=64)
