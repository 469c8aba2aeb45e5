"""The tcgen05 descriptors of `kda_sm100.kernels.tensor` against those that the DSL encodes, product by product."""

import importlib.util
from pathlib import Path

import pytest
import torch

import ptx_emulator
from ptx_emulator import tensor_memory

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the module imports it")


def gemm_of_the_dsl(n, k, majors):
    path = Path(__file__).parent.parent / "helpers" / "emulator" / "gemm_kernel.py"
    spec = importlib.util.spec_from_file_location("gemm_kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compiled(n, k, majors)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("C", (64, 32))
@pytest.mark.parametrize("name", ("w", "kg", "aqk"))
def test_descriptors_equal_those_of_the_dsl(name, C, monkeypatch):
    from kda_sm100.config import HEAD_DIM
    from kda_sm100.kernels.tensor import Operand

    operand, n, k, majors = {
        "w": (Operand(C, HEAD_DIM), C, HEAD_DIM, ("K", "K")),
        "kg": (Operand(C, HEAD_DIM, mn_major=True), HEAD_DIM, C, ("K", "MN")),
        "aqk": (Operand(C, C), C, C, ("K", "K")),
    }[name]
    shapes, operands = [], []
    shape_of, operand_of = tensor_memory.shape_of, tensor_memory._operand
    monkeypatch.setattr(tensor_memory, "shape_of", lambda *x: shapes.append(x[0]) or shape_of(*x))
    monkeypatch.setattr(tensor_memory, "_operand", lambda *x: operands.append(x[1]) or operand_of(*x))
    x, y, z = torch.zeros(128, k).bfloat16(), torch.zeros(n, k).bfloat16(), torch.zeros(128, n)
    with ptx_emulator.device("sm_100a"):
        ptx_emulator.load(gemm_of_the_dsl(n, k, majors))(x, y, z)
    found = operands[::2]  # the emulator decodes B before A
    assert set(shapes) == {operand.instruction} and len(found) == operand.steps
    address = 0x3FFF
    assert {d & ~address for d in found} == {operand.bits}
    starts = [(d & address) << 4 for d in found]
    assert [s - starts[0] for s in starts] == [operand.offset(step) for step in range(operand.steps)]


@pytest.mark.parametrize("C", (64, 32))
def test_shared_memory_fits_on_an_sm(C):
    from kda_sm100.config import ChainConfig, SummaryConfig
    from kda_sm100.kernels.chain import SHARED_BYTES, ChainKernel
    from kda_sm100.kernels.summary import SummaryKernel

    assert ChainKernel(ChainConfig(C)).shared_bytes <= SHARED_BYTES
    assert SummaryKernel(SummaryConfig(C)).shared_bytes <= SHARED_BYTES
