"""Stores of dq, dk and dbeta."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels.gradients.loads import ROW, row_offset
from kda_sm90.kernels.gradients.memory import CHUNK, TILES

SCRATCH = CHUNK * HEAD_DIM * 4  # bytes of dq or dk of a chunk


@cute.jit
def add_group(start: Int64, member: Int32, group: Int32, total: cute.Tensor):
    """Adds to ``total`` the sum that earlier members of a group left in the thread's scratch, and stores the new sum unless this
    member is the last. l2norm's backward is linear in the gradient, so each value head has gone through it."""
    if member > 0:
        for i in cutlass.range_constexpr(8):
            for n, y in enumerate(ptx.load_global_f32_x4(start + i * (256 * 16))):
                total[4 * i + n] = total[4 * i + n] + y
    if member < group - 1:
        for i in cutlass.range_constexpr(8):
            ptx.store_global_x4(start + i * (256 * 16), [total[4 * i + n] for n in range(4)])


def store_rows(x, output, place, token, valid, head, found):
    """Stores the thread's 32 elements of dq or dk."""
    row = place.rows()[0]
    start, pitch = output + row_offset(place, token + row, x.H, head), Int64(x.H) * (8 * ROW)
    for r in range(2):
        for tile in range(TILES):
            pair = ptx.pack_bf16x2(found[4 * tile + 2 * r], found[4 * tile + 2 * r + 1])
            ptx.store_global_if(start + pitch * r + 16 * tile, pair, row + 8 * r < valid)


def store_grad_beta(x, token, valid, head, place, r, beta, step):
    """Stores dbeta of a row, through the sigmoid: ``dbeta beta (1 - beta / factor)``."""
    factor, row = x.beta_factor, place.rows()[r]
    slope = beta * (Float32(1.0) - beta * ptx.select(factor == Float32(2.0), Float32(0.5), Float32(1.0)))
    gradient = ptx.select(factor > Float32(0.0), step * slope, step)
    address = x.grad_beta + (Int64(token + row) * x.HV + head) * x.beta_bytes
    mine = (row < valid) & (place.quad == 0) & (place.half == 0)
    ptx.store_global_u16(address, ptx.pack_bf16x2(gradient, Float32(0.0)), mine & (x.beta_bytes == 2))
    ptx.store_global_f32_if(address, gradient, mine & (x.beta_bytes == 4))
