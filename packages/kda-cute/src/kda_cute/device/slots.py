"""Slots of a pool of states, read on the device by the rules of `kda_core.contract.KdaPool`.

The functions take the arguments of a kernel, which has these fields. A call without a pool passes ``index_bytes`` 0: state n is that of
sequence n, and nothing is loaded.

=================== =======================================================================
read, write         addresses: [N, W] slots, elements of ``index_bytes``
has_initial_state   address: [N] bool; 0: all sequences have an initial state
accepted            address: [N] int32, `KdaPool.num_accepted_tokens`; 0: all 1
first_slot, slots   the slots of the pool that hold states are those in [first_slot, slots)
W                   slots of a sequence: 1, or one for every token
index_bytes         4 or 8
=================== =======================================================================
"""

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from kda_cute.device import ptx


def load_index(address: Int64, size, valid=True) -> Int64:
    """Loads an integer of ``size`` bytes, 4 or 8. Zero if size is another number, and unless ``valid``."""
    wide = ptx.load_global_i64(address, Boolean(valid) & (size == 8))
    return wide + Int64(ptx.load_global_i32(address, Boolean(valid) & (size == 4)))


def is_slot(x, slot: Int64):
    """Returns whether an index is a slot of the pool."""
    return (slot >= x.first_slot) & (slot < x.slots)


def read_slot(x, n: Int32) -> Int64:
    """Returns the slot from which sequence n starts, which may be no slot."""
    accepted = ptx.load_global_i32(x.accepted + Int64(n) * 4, x.accepted != Int64(0))
    column = cutlass.min(cutlass.max(accepted, 1), x.W) - 1
    slot = load_index(x.read + (Int64(n) * x.W + column) * x.index_bytes, x.index_bytes)
    return ptx.select(x.index_bytes > 0, slot, Int64(n))


def has_state(x, n: Int32, slot: Int64):
    """Returns whether sequence n starts from the state in its slot of `read_slot`, and not from zeros."""
    flag = ptx.load_global_u8(x.has_initial_state + Int64(n), x.has_initial_state != Int64(0))
    return is_slot(x, slot) & ((x.has_initial_state == Int64(0)) | (flag != 0))


def write_slot(x, n: Int32, column: Int32, valid) -> Int64:
    """Returns slot [n, column] of those that are written, which may be no slot. Unless ``valid`` it is not loaded."""
    return load_index(x.write + (Int64(n) * x.W + column) * x.index_bytes, x.index_bytes, valid)


@cute.jit
def is_skipped(x, n: Int32, slot: Int64):
    """Returns whether sequence n has neither a slot from which it starts (that of `read_slot`) nor one to which it writes."""
    found = Int32(is_slot(x, slot))
    for column in cutlass.range(ptx.select(found > 0, Int32(0), Int32(x.W)), unroll=1):
        found = found | Int32(is_slot(x, write_slot(x, n, column, True)))
    return found == 0
