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


def slab(x, chunk):
    """Returns the first and the end slot of the slab that a launch computes. ``x``: arguments with those of `SlabArguments`. A whole
    warp calls it."""
    return varlen.slab(sequences(x, x.slot_tokens), x.first_slot, x.slab_slots, chunk)


def record_addresses(x, s):
    """Returns a function from (array, record number) to the address of the record in the array.

    ``x``: the kernel's arguments. ``s``: its sequences.
    """
    return _record_addresses(x, s.chunk, Int64(s.span) * x.HV, False)


def slab_record_addresses(x, chunk):
    """As `record_addresses`, for records of a backward. ``x``: arguments with those of `SlabArguments`."""
    return _record_addresses(x, chunk, Int64(x.records), True)


def _record_addresses(x, chunk, records, backward):
    sizes, starts = record_bytes(chunk, backward), addresses(x.workspace, records, chunk, backward)
    return lambda name, number: starts[name] + Int64(number) * sizes[name]
