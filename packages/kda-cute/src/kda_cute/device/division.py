"""Fast division by a number that divides often: one wide multiplication and a shift instead of about 30 instructions.

For 0 <= x < 2^31 and a divisor d from 1 on, with l = ceil(log2 d) and m = ceil(2^(31 + l) / d), floor(x / d) = (x m) >> (31 + l), because
m d exceeds 2^(31 + l) by less than 2^l (Granlund and Montgomery, *Division by invariant integers using multiplication*, 1994).
"""

from cutlass import Int32, Uint32, Uint64
from cutlass.cutlass_dsl import dsl_user_op

from kda_cute.device.ptx import inline_ptx


@dsl_user_op
def _leading_zeros(x: Int32, *, loc=None, ip=None) -> Int32:
    return inline_ptx("clz.b32 $0, $1;", [Int32], [x], False, loc, ip)[0]


def reciprocal(divisor: Int32) -> list[Int32]:
    """Returns [multiplier, shift] of a positive divisor, for `divide`."""
    shift = Int32(63) - _leading_zeros(divisor - 1)
    wide = Uint64(Uint32(divisor))
    multiplier = ((Uint64(1) << Uint64(Uint32(shift))) + wide - Uint64(1)) // wide
    return [Int32(Uint32(multiplier)), shift]


def divide(x: Int32, multiplier: Int32, shift: Int32) -> Int32:
    """Returns floor(x / d) for x >= 0. ``multiplier``, ``shift``: the `reciprocal` of d."""
    product = Uint64(Uint32(x)) * Uint64(Uint32(multiplier))
    return Int32(Uint32(product >> Uint64(Uint32(shift))))
