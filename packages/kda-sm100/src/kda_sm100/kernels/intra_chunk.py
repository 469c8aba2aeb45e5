"""The intra-chunk kernel: one CTA computes the record of one slot and value head.

Stages 1 to 4 are `kda_cute.device.intra_chunk`, which kda-sm90 runs as well. They leave -Kd where w belongs and T where u belongs.
Stage 5, *products*, reads these and v, and multiplies. A warp computes a block of 16 rows:

    w = T (-Kd)      u = T v

The chain does not compute these products, because each of them would add one more round trip through tensor memory to the time
of a chunk. v and Kd arrive during stage 4 in shared memory that held row factors before.

The kernel uses mma.sync, ldmatrix, stmatrix, cp.async and bulk stores only. Compiled for sm_90a it runs on a Hopper GPU.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from kda_cute.device import ptx, varlen
from kda_cute.device.intra_chunk import Chunk, Hooks, IntraChunk, Worker
from kda_cute.device.intra_chunk.strided import StridedIntraChunk, token_address
from kda_cute.device.kernel import Kernel
from kda_cute.records import BLOCK, HEAD_DIM, image_offset
from kda_sm100.arguments import INTRA_CHUNK
from kda_sm100.config import IntraChunkConfig
from kda_sm100.kernels import warp_mma, workspace

#: Arrays that hold an intermediate operand until stage 5 has read it. Records of a backward keep T.
HOLDS, HOLDS_WITH_T = {"kd": "w", "t": "u"}, {"kd": "w"}

WARPS_PER_SM = 12  # what the register budget allows; see docs/kernels/sm100-intra-chunk.md


@dataclass(frozen=True)
class ProductsLayout:
    """Byte offsets of the matrices of stage 5 in shared memory. They replace regions of stages 1 to 4."""

    kd: int  # row factors
    v: int  # row factors
    t: int  # tables of decays
    w: int  # k
    u: int  # q


class IntraChunkKernel(Kernel):
    """Takes o, or any tensor of the device, and `IntraChunkArguments`; for strided inputs `StridedArguments`.

    Sequences are rows of B (N = B), or with offsets are packed along T (B = 1). The kernel clamps offsets to [0, T]. It does not
    write slots without a chunk.
    """

    interface = INTRA_CHUNK

    def __init__(self, config: IntraChunkConfig):
        self.config = config
        self.chunk = config.chunk
        self.stages = (StridedIntraChunk if config.strided else IntraChunk)(config)
        self.threads = self.stages.threads
        at, image = self.stages.layout, 2 * self.chunk * HEAD_DIM
        self.layout = ProductsLayout(kd=at.exponents, v=at.exponents + image, t=at.tables, w=at.k, u=at.q)
        self.shared_bytes = at.bytes
        self.ctas_per_sm = 32 * WARPS_PER_SM // self.threads

    @cute.kernel
    def kernel(self, values: tuple):
        x = self.interface.arguments(self.config)(*values)
        index, _, _ = cute.arch.block_idx()
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        s = workspace.sequences(x, self.chunk)
        if const_expr(self.config.backward):
            first, end = workspace.slab(x, self.chunk)
            slot = first + index // x.HV
            token, valid = self.locate(s, cutlass.min(slot, s.span - 1))
            valid = ptx.select(slot < end, valid, Int32(0))
        else:
            token, valid = self.locate(s, index // x.HV)
        if valid > 0:
            record = self.record(x, s, index)
            self.compute(x, record, Int32(shared.toint()), index % x.HV, token, valid, index)

    def record(self, x, s, index):
        """Returns a function from the name of an array to the address of record ``index`` in it."""
        if self.config.backward:
            address, holds = workspace.slab_record_addresses(x, self.chunk), HOLDS_WITH_T
        else:
            address, holds = workspace.record_addresses(x, s), HOLDS
        return lambda name: address(holds.get(name, name), index)

    @cute.jit
    def locate(self, s, slot: Int32):
        """Returns the first token of a slot, in B*T, and its number of tokens; 0 for an empty slot. Executed by whole warps."""
        n = slot // cute.ceil_div(s.T, s.chunk)
        if s.offset_bytes > 0:
            n = varlen.owner(s, slot)
        start, length, first, _ = varlen.extent(s, n)
        # If device offsets decrease, the tokens may be any, but must stay within the tensors.
        done = cutlass.max(slot - first, 0) * s.chunk
        return Int32(start) + done, cutlass.max(cutlass.min(length - done, s.chunk), 0)

    def compute(self, x, record, base, head, token, valid, turn):
        """Computes one record. ``record``: returns its address in an array, by name. ``base``: shared memory of the CTA."""
        thread, _, _ = cute.arch.thread_idx()
        lane, sync, nothing = thread % 32, cute.arch.sync_threads, lambda *_: None
        stages, at = self.stages, self.layout
        worker = Worker(thread, base, turn)
        chunk = Chunk(head, token, token * x.H + head // (x.HV // x.H), valid)
        loaded = stages.request(x, worker, chunk)
        stages.compute(x, worker, chunk, loaded, record, Hooks(sync, nothing, nothing, nothing))
        self.copy(record("kd"), base + at.kd, 2 * self.chunk * HEAD_DIM, thread)
        self.copy_values(x, chunk, base + at.v, thread)
        stages.finish(worker, record)
        sync()
        self.copy(record("t"), base + at.t, 2 * self.chunk * self.chunk, thread)
        cute.arch.cp_async_wait_group(0)
        sync()
        block = thread // 32
        self.product(block, lane, base + at.t, base + at.kd, base + at.w)
        self.product(block, lane, base + at.t, base + at.v, base + at.u)
        ptx.fence_proxy_async()  # the bulk stores overwrite Kd and T, which generic stores wrote
        cute.arch.fence_view_async_shared()
        sync()
        self.store(record, base, thread)

    # ---- stage 5: products

    def copy(self, address, shared, size, thread):
        """Copies what this CTA has written to global memory to shared memory, asynchronously."""
        for at in range(0, size, 16 * self.threads):
            place = at + thread * 16
            ptx.cp_async_x4(shared + place, address + place, True)
        cute.arch.cp_async_commit_group()

    def copy_values(self, x, chunk: Chunk, shared, thread):
        """Copies v of the chunk to an image, asynchronously. Rows that do not exist are zeros."""
        units = HEAD_DIM * 2 // 16  # per row
        unit, first = thread % units, thread // units
        for start in range(0, self.chunk, self.threads // units):
            row = start + first
            address = self.value_address(x, chunk, row) + unit * 16
            to = shared + image_offset(row, unit * 8, self.chunk, HEAD_DIM) * 2
            ptx.cp_async_x4(to, address, row < chunk.valid)
        cute.arch.cp_async_commit_group()

    def value_address(self, x, chunk: Chunk, row):
        """Returns the address of v of token ``row`` of a chunk."""
        if self.config.strided:
            return token_address(x, "v", chunk, row) + Int64(chunk.head) * (2 * HEAD_DIM)
        return x.v + Int64(chunk.token * x.HV + chunk.head + row * x.HV) * (2 * HEAD_DIM)

    @cute.jit
    def product(self, block: Int32, lane: Int32, t: Int32, source: Int32, target: Int32):
        """Multiplies the rows of one block of T with the image at ``source``, into the image at ``target``."""
        C, acc = self.chunk, warp_mma.zeros()
        for j in cutlass.range(block + 1, unroll=1):
            a = ptx.ldmatrix_x4(warp_mma.lane_address(t, block * BLOCK, j * BLOCK, C, C, lane))
            warp_mma.multiply_add(acc, a, source, j * BLOCK, C, lane)
        warp_mma.store(acc, target, block * BLOCK, C, lane)

    @cute.jit
    def store(self, record, base: Int32, thread: Int32):
        """Stores w and u to global memory by bulk copies."""
        if thread == 0:
            size = Int32(2 * self.chunk * HEAD_DIM)
            ptx.bulk_store(record("w"), base + self.layout.w, size)
            ptx.bulk_store(record("u"), base + self.layout.u, size)
            cute.arch.cp_async_bulk_wait_group(0)
