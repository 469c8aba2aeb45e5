"""The outputs of chunks from the states before them, for those who keep both: a CTA a chunk and value head.

    O = scale (q e^g) S + tril(A) v_new

A warp takes 16 rows, products by mma.sync. `chunk_kda` does not come here: its chain makes O while it has S.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.ptx import LOG2E
from kda_cute.records import BLOCK, HEAD_DIM, image_offset
from kda_sm100.config import OutputConfig
from kda_sm100.kernels import interface, rows

#: ``Int64`` q [B,T,H,128] bf16, v_new [B,T,HV,128] bf16, g [B,T,HV,128] fp32, log decays (base e) summed from the start of the
#: chunk, a [B,T,HV,C] bf16, h [states,HV,128,128] bf16, o [B,T,HV,128] bf16, chunks [count,4] int32: first token in B*T,
#: tokens (0: no chunk), number of the state, 0.
ARGUMENTS = {
    Int64: ("q", "v_new", "g", "a", "h", "o", "chunks"),
    Int32: ("count", "H", "HV"),
    Float32: ("scale",),
}

UNIT = 16  # bytes that a thread moves at once


class OutputKernel:
    """Takes o, and `ARGUMENTS` (`interface`)."""

    def __init__(self, config: OutputConfig):
        self.config = config
        C = self.chunk = config.chunk
        self.threads = 32 * (C // BLOCK)
        sizes = {  # images, but for g: rows of 512 bytes. O goes where Qd was.
            "qd": 2 * C * HEAD_DIM,
            "h": 2 * HEAD_DIM * HEAD_DIM,
            "v_new": 2 * C * HEAD_DIM,
            "a": 2 * C * C,
            "g": 4 * C * HEAD_DIM,
        }
        self.at, end = {}, 0
        for name, size in sizes.items():
            self.at[name] = end
            end += size
        self.shared_bytes = end

    def fake_args(self) -> tuple:
        return interface.fake_args(ARGUMENTS)

    @cute.jit
    def __call__(self, o: cute.Tensor, *arguments):
        *arguments, stream = arguments
        x = interface.named(ARGUMENTS, arguments)
        self.kernel(tuple(arguments)).launch(
            grid=(x.count * x.HV, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=2 * 4 * BLOCK // self.chunk,
            preferred_smem_carveout=100,  # percent; otherwise the DSL asks a device, at compile time
        )

    @cute.kernel
    def kernel(self, arguments: tuple):
        x = interface.named(ARGUMENTS, arguments)
        index, _, _ = cute.arch.block_idx()
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        chunk = x.chunks + Int64(index // x.HV) * 16
        token, valid, number = (ptx.load_global_i32(chunk + 4 * i, True) for i in range(3))
        if valid > 0:
            self.compute(x, Int32(shared.toint()), index % x.HV, token, valid, number)

    def compute(self, x, base, head, token, valid, number):
        """One chunk."""
        thread, _, _ = cute.arch.thread_idx()
        C, lane, block = self.chunk, thread % 32, thread // 32
        p = SimpleNamespace(**{name: base + at for name, at in self.at.items()})
        row, key = token * x.HV + head, token * x.H + head // (x.HV // x.H)
        state = x.h + (Int64(number) * x.HV + head) * (2 * HEAD_DIM * HEAD_DIM)
        image = lambda rows, columns: lambda r, unit: image_offset(r, unit * 8, rows, columns) * 2
        wide = 2 * HEAD_DIM
        self.copy(p.qd, image(C, HEAD_DIM), x.q + Int64(key) * wide, x.H * wide, C, wide, valid, thread)
        self.copy(
            p.v_new, image(C, HEAD_DIM), x.v_new + Int64(row) * wide, x.HV * wide, C, wide, valid, thread
        )
        self.copy(p.a, image(C, C), x.a + Int64(row) * (2 * C), x.HV * (2 * C), C, 2 * C, valid, thread)
        self.copy(p.h, image(HEAD_DIM, HEAD_DIM), state, wide, HEAD_DIM, wide, HEAD_DIM, thread)
        plain = lambda r, unit: r * (2 * wide) + unit * UNIT
        self.copy(p.g, plain, x.g + Int64(row) * (2 * wide), x.HV * (2 * wide), C, 2 * wide, valid, thread)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.decay(p, x.scale, thread)
        cute.arch.sync_threads()
        self.products(p.qd, p.h, p.a, p.v_new, block, lane)
        cute.arch.sync_threads()
        self.copy_out(p.qd, x.o + Int64(row) * wide, Int64(x.HV) * wide, valid, thread)

    def copy(self, shared, place, address, pitch, count, size, valid, thread):
        """``count`` rows of ``size`` bytes, ``pitch`` bytes apart, to where ``place`` says, asynchronously; those from ``valid``
        on as zeros."""
        units = size // UNIT
        for start in range(0, count, self.threads // units):
            r, unit = start + thread // units, thread % units
            ptx.cp_async_x4(shared + place(r, unit), address + Int64(pitch) * r + unit * UNIT, r < valid)

    def decay(self, p, scale, thread):
        """q to scale q e^g, each thread 8 channels at a time."""
        for start in range(0, self.chunk, self.threads // 16):
            r, unit = start + thread // 16, thread % 16
            q = p.qd + image_offset(r, unit * 8, self.chunk, HEAD_DIM) * 2
            g = [
                x
                for i in range(2)
                for x in ptx.load_shared_x4(p.g + r * (4 * HEAD_DIM) + (2 * unit + i) * UNIT, Float32)
            ]
            values = [x for pair in ptx.load_shared_x4(q, Int32) for x in ptx.unpack_bf16x2(pair)]
            values = [x * scale * ptx.ex2(y * Float32(LOG2E)) for x, y in zip(values, g, strict=True)]
            ptx.store_shared_x4(q, [ptx.pack_bf16x2(values[i], values[i + 1]) for i in range(0, 8, 2)])

    @cute.jit
    def products(self, qd: Int32, h: Int32, a: Int32, v_new: Int32, block: Int32, lane: Int32):
        """The rows of one block of O, to where they were in Qd."""
        C, acc = self.chunk, rows.zeros()
        for j in cutlass.range_constexpr(HEAD_DIM // BLOCK):
            fragment = ptx.ldmatrix_x4(rows.place(qd, block * BLOCK, j * BLOCK, C, HEAD_DIM, lane))
            rows.add(acc, fragment, h, j * BLOCK, HEAD_DIM, lane)
        for j in cutlass.range(block + 1, unroll=1):
            fragment = ptx.ldmatrix_x4(rows.place(a, block * BLOCK, j * BLOCK, C, C, lane))
            rows.add(acc, self.lower(fragment, j < block, lane), v_new, j * BLOCK, C, lane)
        cute.arch.sync_warp()  # its rows of Qd have been read
        rows.store(acc, qd, block * BLOCK, C, lane)

    def lower(self, fragment, whole, lane):
        """An A fragment [16, 16], of the diagonal block what is not above the diagonal; ``whole``: it is another block."""
        kept = []
        for i, pair in enumerate(fragment):
            row, column = lane // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2)
            low = ptx.select(whole | (column <= row), Int32(0xFFFF), Int32(0))
            high = ptx.select(whole | (column < row), Int32(-0x10000), Int32(0))
            kept.append(pair & (low | high))
        return kept

    def copy_out(self, shared, address, pitch, valid, thread):
        """The image of O to rows ``pitch`` bytes apart, the first ``valid`` ones."""
        for start in range(0, self.chunk, self.threads // 16):
            r, unit = start + thread // 16, thread % 16
            values = ptx.load_shared_x4(shared + image_offset(r, unit * 8, self.chunk, HEAD_DIM) * 2, Int32)
            ptx.store_global_evict_first_x4(address + pitch * r + unit * UNIT, values, r < valid)
