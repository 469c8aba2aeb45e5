"""The preparation as a launch of its own: a CTA makes the record of one slot and value head.

Four stages are `kda_cute.device.intra_chunk`, which kda-sm90 runs as well; it leaves -Kd where w belongs and T where u
belongs. A fifth, *products*, takes them from there with v and multiplies, a warp a block of 16 rows:

    w = T (-Kd)      u = T v

Here, and not in the chain, because there it would be one more product and one more way through tensor memory that the
next chunk waits for. v and Kd arrive during the fourth stage, where rows of factors lay before.

Only mma.sync, ldmatrix, stmatrix, cp.async and bulk stores: compiled for sm_90a this runs on a Hopper GPU.
"""

import functools

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx, varlen
from kda_cute.device.intra_chunk import Chunk, Hooks, IntraChunk, Worker
from kda_cute.records import BLOCK, HEAD_DIM, image_offset
from kda_sm100.config import PrepareConfig
from kda_sm100.kernels import interface, rows

#: ``Int64`` q, k [B,T,H,128] bf16, v [B,T,HV,128] bf16, g [B,T,HV,128], beta [B,T,HV], a_log [HV] fp32, dt_bias [HV,128]
#: fp32, offsets [N+1], workspace (``layouts``). ``Int32``: N sequences, of T tokens each or, with offsets of
#: ``offset_bytes`` (4, 8; 0: none) packed into T; ``beta_bytes`` (2: bf16, 4: fp32); ``l2norm`` (0, 1): normalise q and
#: k. ``Float32``: scale, lower_bound (of the bounded gate), beta_factor (of the sigmoid; 0: beta as it is).
ARGUMENTS = {
    Int64: ("q", "k", "v", "g", "beta", "a_log", "dt_bias", "offsets", "workspace"),
    Int32: ("N", "T", "H", "HV", "offset_bytes", "beta_bytes", "l2norm"),
    Float32: ("scale", "lower_bound", "beta_factor"),
}

#: Where the shared stages write what only the fifth reads.
LENT = {"kd": "w", "t": "u"}


class PrepareKernel:
    """Takes o or any tensor of the device, and `ARGUMENTS` (`interface`).

    Sequences are rows of B (N = B), or with offsets are packed along T (B = 1), the offsets clamped to [0, T]. Slots
    without a chunk are not written.
    """

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.chunk = config.chunk
        self.intra_chunk = IntraChunk(config)
        self.threads = self.intra_chunk.threads
        at, wide = self.intra_chunk.layout, 2 * self.chunk * HEAD_DIM
        # Stage 5: Kd and v lie where rows of factors lay, T where the tables did, and the products where q and k did.
        self.at = {"kd": at.exponents, "v": at.exponents + wide, "t": at.tables, "w": at.k, "u": at.q}
        self.shared_bytes = self.intra_chunk.layout.bytes

    def fake_args(self) -> tuple:
        return interface.fake_args(ARGUMENTS)

    @cute.jit
    def __call__(self, tensor: cute.Tensor, *arguments):
        *arguments, stream = arguments
        x = interface.named(ARGUMENTS, arguments)
        s = interface.sequences_of(x, self.chunk)
        self.kernel(tuple(arguments)).launch(
            grid=(s.span * x.HV, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=384 // self.threads,
            preferred_smem_carveout=100,  # percent; otherwise the DSL asks a device, at compile time
        )

    @cute.kernel
    def kernel(self, arguments: tuple):
        x = interface.named(ARGUMENTS, arguments)
        index, _, _ = cute.arch.block_idx()
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        s = interface.sequences_of(x, self.chunk)
        token, valid = self.locate(s, index // x.HV)
        if valid > 0:
            records = functools.partial(self.record, interface.records_of(x, s), index)
            self.prepare(x, records, Int32(shared.toint()), index % x.HV, token, valid, index)

    def record(self, records, number, name):
        return records(LENT.get(name, name), number)

    @cute.jit
    def locate(self, s, slot: Int32):
        """First token, in B*T, and number of tokens (0: none) of a slot; by whole warps."""
        n = slot // cute.ceil_div(s.T, s.chunk)
        if s.offset_bytes > 0:
            n = varlen.owner(s, slot)
        start, length, first, _ = varlen.extent(s, n)
        # Offsets that are not in order lead anywhere, but not out of the tensors.
        done = cutlass.max(slot - first, 0) * s.chunk
        return Int32(start) + done, cutlass.max(cutlass.min(length - done, s.chunk), 0)

    def prepare(self, x, records, base, head, token, valid, turn):
        """One chunk. ``records``: its addresses by array."""
        thread, _, _ = cute.arch.thread_idx()
        lane, sync, nothing = thread % 32, cute.arch.sync_threads, lambda *_: None
        stages = self.intra_chunk
        worker = Worker(thread, base, turn)
        chunk = Chunk(head, token, token * x.H + head // (x.HV // x.H), valid)
        loaded = stages.request(x, worker, chunk)
        stages.compute(x, worker, chunk, loaded, records, Hooks(sync, nothing, nothing, nothing))
        self.copy(records("kd"), base + self.at["kd"], 2 * self.chunk * HEAD_DIM, thread)
        self.copy_values(x, token * x.HV + head, base + self.at["v"], valid, thread)
        stages.finish(worker, records)
        sync()
        self.copy(records("t"), base + self.at["t"], 2 * self.chunk * self.chunk, thread)
        cute.arch.cp_async_wait_group(0)
        sync()
        block = thread // 32
        for source, target in (("kd", "w"), ("v", "u")):
            self.product(block, lane, base + self.at["t"], base + self.at[source], base + self.at[target])
        ptx.fence_proxy_async()  # Kd and T were written there
        cute.arch.fence_view_async_shared()
        sync()
        self.send(records, base, thread)

    # ---- stage 5: products

    def copy(self, address, shared, size, thread):
        """What this CTA has written to global memory to shared memory, asynchronously."""
        for at in range(0, size, 16 * self.threads):
            place = at + thread * 16
            ptx.cp_async_x4(shared + place, address + place, True)
        cute.arch.cp_async_commit_group()

    def copy_values(self, x, value_row, shared, valid, thread):
        """v of the chunk as an image, rows that do not exist as zeros."""
        units = HEAD_DIM * 2 // 16  # to a row
        unit, first = thread % units, thread // units
        for start in range(0, self.chunk, self.threads // units):
            row = start + first
            address = x.v + Int64(value_row + row * x.HV) * (2 * HEAD_DIM) + unit * 16
            to = shared + image_offset(row, unit * 8, self.chunk, HEAD_DIM) * 2
            ptx.cp_async_x4(to, address, row < valid)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def product(self, block: Int32, lane: Int32, t: Int32, source: Int32, target: Int32):
        """The rows of one block of T times the image at ``source``, to the image at ``target``."""
        C, acc = self.chunk, rows.zeros()
        for j in cutlass.range(block + 1, unroll=1):
            a = ptx.ldmatrix_x4(rows.place(t, block * BLOCK, j * BLOCK, C, C, lane))
            rows.add(acc, a, source, j * BLOCK, C, lane)
        rows.store(acc, target, block * BLOCK, C, lane)

    @cute.jit
    def send(self, records, base: Int32, thread: Int32):
        """w and u from shared to global memory."""
        if thread == 0:
            for name in ("w", "u"):
                ptx.bulk_store(records(name), base + self.at[name], Int32(2 * self.chunk * HEAD_DIM))
            cute.arch.cp_async_bulk_wait_group(0)
