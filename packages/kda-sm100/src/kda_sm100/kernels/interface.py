"""What both kernels have in common: how arguments reach them, and where records lie.

A kernel takes a tensor, which tells the device and with it torch's current stream, and then addresses (0 for what is not
there), integers and factors, listed by type and name in its ``ARGUMENTS``. They are trusted: the caller has checked shapes,
dtypes, contiguity and alignment to 16 bytes.
"""

from types import SimpleNamespace

from cutlass import BFloat16, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from kda_cute.device import varlen
from kda_sm100.layouts import addresses, record_bytes


def fake_args(arguments) -> tuple:
    """What a kernel is compiled with."""
    tensor = make_fake_compact_tensor(
        BFloat16, tuple(cute.sym_int() for _ in range(4)), stride_order=(3, 2, 1, 0), assumed_align=16
    )
    values = [kind(0) for kind, names in arguments.items() for _ in names]
    return (tensor, *values, make_fake_stream(use_tvm_ffi_env_stream=True))


def named(arguments, values):
    """The values by name."""
    names = [name for group in arguments.values() for name in group]
    return SimpleNamespace(**dict(zip(names, values, strict=True)))


def sequences_of(x, chunk):
    """The sequences of a call, as `kda_cute.device.varlen` takes them."""
    span = varlen.slots(chunk, x.offset_bytes, x.N, x.T)
    return SimpleNamespace(
        chunk=chunk, offsets=x.offsets, offset_bytes=x.offset_bytes, N=x.N, T=x.T, span=span
    )


def records_of(x, s):
    """What gives the address of a record in an array, by the array's name and the record's number."""
    sizes, starts = record_bytes(s.chunk), addresses(x.workspace, Int64(s.span) * x.HV, s.chunk)
    return lambda name, number: starts[name] + Int64(number) * sizes[name]
