"""Where the sequences of a call and the records in its workspace lie, computed from a kernel's arguments."""

from types import SimpleNamespace

from cutlass import Int64

from kda_cute.device import varlen
from kda_sm100.layouts import addresses, record_bytes


def sequences(x, chunk):
    """Returns the sequences of a call in the form of `kda_cute.device.varlen`. ``x``: the kernel's arguments."""
    span = varlen.slots(chunk, x.offset_bytes, x.N, x.T)
    return SimpleNamespace(
        chunk=chunk, offsets=x.offsets, offset_bytes=x.offset_bytes, N=x.N, T=x.T, span=span
    )


def record_addresses(x, s):
    """Returns a function from (array, record number) to the address of the record in the array.

    ``x``: the kernel's arguments. ``s``: its sequences.
    """
    sizes, starts = record_bytes(s.chunk), addresses(x.workspace, Int64(s.span) * x.HV, s.chunk)
    return lambda name, number: starts[name] + Int64(number) * sizes[name]
