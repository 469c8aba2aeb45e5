"""The output kernel: one CTA computes o of one chunk and value head from the state before the chunk.

    O = scale (q e^g) S + tril(A) v_new

A warp computes 16 rows by mma.sync. `chunk_kda` does not need this kernel: its chain computes O while it holds S.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.kernel import Kernel
from kda_cute.device.ptx import LOG2E
from kda_cute.records import BLOCK, HEAD_DIM, image_offset
from kda_sm100.arguments import OUTPUT, OutputArguments
from kda_sm100.config import OutputConfig
from kda_sm100.kernels import warp_mma

UNIT = 16  # bytes per access of a thread
WIDE = 2 * HEAD_DIM  # bytes of a row of 128 bf16


@dataclass(frozen=True)
class Layout:
    """Byte offsets of the matrices in shared memory, and their total size. All but g are images; O replaces Qd."""

    qd: int
    h: int
    v_new: int
    a: int
    g: int
    bytes: int

    @classmethod
    def of(cls, chunk):
        """Returns the layout for this number of tokens per chunk."""
        h = chunk * WIDE
        v_new = h + HEAD_DIM * WIDE
        a = v_new + chunk * WIDE
        g = a + 2 * chunk * chunk
        return cls(0, h, v_new, a, g, g + 2 * chunk * WIDE)


class OutputKernel(Kernel):
    """Takes o and `OutputArguments`."""

    interface = OUTPUT

    def __init__(self, config: OutputConfig):
        self.config = config
        self.chunk = config.chunk
        self.threads = 32 * (self.chunk // BLOCK)
        self.layout = Layout.of(self.chunk)
        self.shared_bytes = self.layout.bytes
        # Registers for 8 warps per SM: 2 CTAs (C = 64) or 4 (C = 32, where shared memory admits 3).
        self.ctas_per_sm = 2 * 4 * BLOCK // self.chunk

    @cute.kernel
    def kernel(self, values: tuple):
        x = OutputArguments(*values)
        index, _, _ = cute.arch.block_idx()
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        chunk = x.chunks + Int64(index // x.HV) * 16
        token, valid, state = (ptx.load_global_i32(chunk + 4 * i, True) for i in range(3))
        if valid > 0:
            self.compute(x, Int32(shared.toint()), index % x.HV, token, valid, state)

    def compute(self, x, base, head, token, valid, state):
        """Computes one chunk."""
        thread, _, _ = cute.arch.thread_idx()
        C, lane, block, at = self.chunk, thread % 32, thread // 32, self.layout
        row, key = token * x.HV + head, token * x.H + head // (x.HV // x.H)
        h = x.h + (Int64(state) * x.HV + head) * (HEAD_DIM * WIDE)
        image = lambda rows, columns: lambda r, unit: image_offset(r, unit * 8, rows, columns) * 2
        plain = lambda r, unit: r * (2 * WIDE) + unit * UNIT
        wide = image(C, HEAD_DIM)
        self.copy(base + at.qd, wide, x.q + Int64(key) * WIDE, x.H * WIDE, C, WIDE, valid, thread)
        self.copy(base + at.v_new, wide, x.v_new + Int64(row) * WIDE, x.HV * WIDE, C, WIDE, valid, thread)
        self.copy(
            base + at.a, image(C, C), x.a + Int64(row) * (2 * C), x.HV * (2 * C), C, 2 * C, valid, thread
        )
        self.copy(base + at.h, image(HEAD_DIM, HEAD_DIM), h, WIDE, HEAD_DIM, WIDE, HEAD_DIM, thread)
        self.copy(
            base + at.g, plain, x.g + Int64(row) * (2 * WIDE), x.HV * (2 * WIDE), C, 2 * WIDE, valid, thread
        )
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.decay(base, x.scale, thread)
        cute.arch.sync_threads()
        self.products(base + at.qd, base + at.h, base + at.a, base + at.v_new, block, lane)
        cute.arch.sync_threads()
        self.copy_out(base + at.qd, x.o + Int64(row) * WIDE, Int64(x.HV) * WIDE, valid, thread)

    def copy(self, shared, offset, address, pitch, count, size, valid, thread):
        """Copies ``count`` rows of ``size`` bytes, ``pitch`` bytes apart, to shared memory, asynchronously.

        ``offset(row, unit)``: byte offset of 16 bytes in shared memory. Rows from ``valid`` on become zeros.
        """
        units = size // UNIT
        for start in range(0, count, self.threads // units):
            r, unit = start + thread // units, thread % units
            ptx.cp_async_x4(shared + offset(r, unit), address + Int64(pitch) * r + unit * UNIT, r < valid)

    def decay(self, base, scale, thread):
        """Replaces q by scale q e^g. A thread processes 8 channels at a time."""
        for start in range(0, self.chunk, self.threads // 16):
            r, unit = start + thread // 16, thread % 16
            q = base + self.layout.qd + image_offset(r, unit * 8, self.chunk, HEAD_DIM) * 2
            g_row = base + self.layout.g + r * (4 * HEAD_DIM)
            g = [x for i in range(2) for x in ptx.load_shared_x4(g_row + (2 * unit + i) * UNIT, Float32)]
            values = [x for pair in ptx.load_shared_x4(q, Int32) for x in ptx.unpack_bf16x2(pair)]
            values = [x * scale * ptx.ex2(y * Float32(LOG2E)) for x, y in zip(values, g, strict=True)]
            ptx.store_shared_x4(q, [ptx.pack_bf16x2(values[i], values[i + 1]) for i in range(0, 8, 2)])

    @cute.jit
    def products(self, qd: Int32, h: Int32, a: Int32, v_new: Int32, block: Int32, lane: Int32):
        """Computes the rows of one block of O and stores them where the same rows of Qd were."""
        C, acc = self.chunk, warp_mma.zeros()
        for j in cutlass.range_constexpr(HEAD_DIM // BLOCK):
            address = warp_mma.lane_address(qd, block * BLOCK, j * BLOCK, C, HEAD_DIM, lane)
            warp_mma.multiply_add(acc, ptx.ldmatrix_x4(address), h, j * BLOCK, HEAD_DIM, lane)
        for j in cutlass.range(block + 1, unroll=1):
            fragment = ptx.ldmatrix_x4(warp_mma.lane_address(a, block * BLOCK, j * BLOCK, C, C, lane))
            lower = self.lower(fragment, j < block, lane)
            warp_mma.multiply_add(acc, lower, v_new, j * BLOCK, C, lane)
        cute.arch.sync_warp()  # the warp has read its rows of Qd
        warp_mma.store(acc, qd, block * BLOCK, C, lane)

    def lower(self, fragment, whole, lane):
        """Returns an A fragment [16, 16] without the elements above the diagonal; all of it if ``whole``."""
        kept = []
        for i, pair in enumerate(fragment):
            row, column = lane // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2)
            low = ptx.select(whole | (column <= row), Int32(0xFFFF), Int32(0))
            high = ptx.select(whole | (column < row), Int32(-0x10000), Int32(0))
            kept.append(pair & (low | high))
        return kept

    def copy_out(self, shared, address, pitch, valid, thread):
        """Copies the first ``valid`` rows of the image of O to rows that lie ``pitch`` bytes apart."""
        for start in range(0, self.chunk, self.threads // 16):
            r, unit = start + thread // 16, thread % 16
            values = ptx.load_shared_x4(shared + image_offset(r, unit * 8, self.chunk, HEAD_DIM) * 2, Int32)
            ptx.store_global_evict_first_x4(address + pitch * r + unit * UNIT, values, r < valid)
