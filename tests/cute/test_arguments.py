"""The argument struct of a kernel: what the host passes is what the declaration says."""

from typing import NamedTuple

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: fields are DSL types")

from kda_cute import arguments


class Arguments(NamedTuple):
    x: cutlass.Int64
    y: cutlass.Int64
    n: cutlass.Int32
    scale: cutlass.Float32


def test_pack_passes_addresses_in_the_declared_order():
    x = torch.zeros(3)
    assert arguments.pack(Arguments, scale=0.5, n=3, x=x, y=None) == (x.data_ptr(), 0, 3, 0.5)
    assert arguments.pack(Arguments, scale=0.5, n=3) == (0, 0, 3, 0.5)


@pytest.mark.parametrize("given", [{"n": 3}, {"n": 3, "scale": 1.0, "z": 0}], ids=["missing", "unknown"])
def test_pack_refuses_missing_numbers_and_unknown_names(given):
    with pytest.raises(TypeError, match="scale|z"):
        arguments.pack(Arguments, **given)


def test_fake_args_are_a_tensor_the_values_and_a_stream():
    tensor, *values, _ = arguments.fake_args(Arguments, cutlass.BFloat16)
    assert tensor.element_type is cutlass.BFloat16 and [type(x) for x in values] == list(
        Arguments.__annotations__.values()
    )
