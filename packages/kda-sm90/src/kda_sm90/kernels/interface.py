"""What the preparation and the chain share: fake tensors of their arguments, addresses of records, and offsets."""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor

from kda_core.cute import device as dev
from kda_sm90.config import HEAD_DIM

DTYPES = {"bfloat16": BFloat16, "float32": Float32, "int32": Int32, "int64": Int64}


def fake_tensor(dtype, *shape, align=16):
    """A contiguous tensor, ``align`` in bytes."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def fake_workspace(chunk):
    """The arrays of ``layouts.Workspace``: w, qd, kg, aqk, u, a."""
    records, wide = cute.sym_int(), chunk * HEAD_DIM
    widths = (wide, wide, wide, chunk * chunk, wide)
    operands = (fake_tensor(BFloat16, records, width, align=128) for width in widths)
    return *operands, fake_tensor(Float32, records, HEAD_DIM, align=128)


def fake_offsets(kind):
    """cu_seqlens of the dtype that a configuration names; None for None."""
    if kind is None:
        return None
    return fake_tensor(DTYPES[kind], cute.sym_int(), align=DTYPES[kind].width // 8)


def record(array, index):
    """The address of a record in an array of the workspace."""
    return dev.address_of(array) + Int64(index) * (array.shape[1] * array.element_type.width // 8)


def clamped(offsets, n, low, T):
    """Offset n in [low, T]: what the device holds is not trusted."""
    wide = cutlass.min(cutlass.max(Int64(offsets[n]), Int64(low)), Int64(T))
    return Int32(wide)
