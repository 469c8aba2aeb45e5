"""The argument struct of a kernel: what the host passes is what the declaration says."""

from typing import NamedTuple

import pytest
import torch

from kda_cute import arguments


class Arguments(NamedTuple):
    x: arguments.Address
    y: arguments.Address
    pitch: arguments.Long
    n: int
    scale: float


def test_pack_passes_addresses_in_the_declared_order():
    x = torch.zeros(3)
    assert arguments.pack(Arguments, scale=0.5, n=3, pitch=7, x=x, y=None) == (x.data_ptr(), 0, 7, 3, 0.5)
    assert arguments.pack(Arguments, scale=0.5, n=3, pitch=7) == (0, 0, 7, 3, 0.5)


@pytest.mark.parametrize(
    "given", [{"n": 3, "pitch": 7}, {"n": 3, "scale": 1.0}, {"n": 3, "pitch": 7, "scale": 1.0, "z": 0}]
)
def test_pack_refuses_missing_numbers_and_unknown_names(given):
    with pytest.raises(TypeError, match="scale|pitch|z"):
        arguments.pack(Arguments, **given)


def test_fake_args_are_a_tensor_the_values_and_a_stream():
    cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: its types are compared")
    tensor, *values, _ = arguments.fake_args(Arguments, cutlass.BFloat16)
    assert tensor.element_type is cutlass.BFloat16
    assert [type(x) for x in values] == [
        cutlass.Int64, cutlass.Int64, cutlass.Int64, cutlass.Int32, cutlass.Float32
    ]  # fmt: skip
