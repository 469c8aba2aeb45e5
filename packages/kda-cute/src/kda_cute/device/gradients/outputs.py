"""Stores of dq, dk and dbeta."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.gradients.loads import ROW, row_offset
from kda_cute.device.gradients.memory import CHUNK, COMPUTE, TILES
from kda_cute.records import HEAD_DIM

SCRATCH = CHUNK * HEAD_DIM * 4  # bytes of dq or dk of a chunk


@cute.jit
def add_group(x, place, kind: cutlass.Constexpr[int], member: Int32, total: cute.Tensor):
    """Adds to ``total`` the sum that earlier members of a group left in the thread's scratch, and stores the new sum unless this
    member is the last. l2norm's backward is linear in the gradient, so each value head has gone through it. ``kind`` 0: dq, 1: dk."""
    if x.group > 1:
        cta, _, _ = cute.arch.block_idx()
        start = x.scratch + (Int64(cta) * 2 + kind) * SCRATCH + place.thread * 16
        if member > 0:
            for i in cutlass.range_constexpr(TILES):
                for n, y in enumerate(ptx.load_global_f32_x4(start + i * (COMPUTE * 16))):
                    total[4 * i + n] = total[4 * i + n] + y
        if member < x.group - 1:
            for i in cutlass.range_constexpr(TILES):
                ptx.store_global_x4(start + i * (COMPUTE * 16), [total[4 * i + n] for n in range(4)])


def store_rows(x, output, place, step, found):
    """Stores the thread's 32 elements of dq or dk, if the value head is the last one of its group."""
    row, last = place.rows()[0], step.member == x.group - 1
    start = output + row_offset(place, step.token + row, x.H, step.key_head)
    pitch = Int64(x.H) * (8 * ROW)
    for r in range(2):
        pairs = [ptx.pack_bf16x2(found[n], found[n + 1]) for n in range(2 * r, 4 * TILES, 4)]
        for n in (0, 4):
            exists = (row + 8 * r < step.valid) & last
            ptx.store_global_words_if(start + pitch * r + 4 * n, pairs[n : n + 4], exists)


def store_grad_beta(x, step, place, r, beta, of_beta):
    """Stores dbeta of a row, through the sigmoid: ``dbeta beta (1 - beta / factor)``."""
    factor, row = x.beta_factor, place.rows()[r]
    slope = beta * (Float32(1.0) - beta * ptx.select(factor == Float32(2.0), Float32(0.5), Float32(1.0)))
    gradient = ptx.select(factor > Float32(0.0), of_beta * slope, of_beta)
    address = x.grad_beta + (Int64(step.token + row) * x.HV + step.head) * x.beta_bytes
    mine = (row < step.valid) & (place.quad == 0) & (place.half == 0)
    ptx.store_global_u16(address, ptx.pack_bf16x2(gradient, Float32(0.0)), mine & (x.beta_bytes == 2))
    ptx.store_global_f32_if(address, gradient, mine & (x.beta_bytes == 4))
