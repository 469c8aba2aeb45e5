"""Local records: those that the CTA of a chain computes itself, for its own queue.

One warpgroup of the CTA runs the intra-chunk stage on the chunks of these records (`schedule.is_local`), one after the other. It writes the
operands to the stage of the chain's rings that only local records use. So such a record never passes through the L2, and no other CTA waits for
it. docs/kernels/prefill.md has the gain.

The warpgroup takes the place of the producer at the mbarriers of this stage: its leader waits until both rings have freed it, and arrives
once the operands of a ring are stored.
"""

import functools

import cutlass
from cutlass import Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk import Chunk, Worker
from kda_cute.device.intra_chunk.strided import StridedInputs
from kda_sm90.config import PrefillConfig
from kda_sm90.kernels import barriers, schedule
from kda_sm90.kernels.intra_chunk import Hooks, Place, WarpgroupIntraChunk, in_row
from kda_sm90.kernels.rings import Stage

CHUNK_BYTES = 16  # of a buffer with a `Chunk`
WALK_BYTES = 16  # of the state of `find`

#: Named barrier of the warpgroup. `barriers.NamedBarrier` has the others of a chain CTA.
BARRIER = 15


class LocalIntraChunk(WarpgroupIntraChunk):
    """The intra-chunk stage of local records.

    ``turn`` counts the local records of the queue. ``bytes``: shared memory that the warpgroup needs, from a multiple of 1024 on.
    """

    has_images = False
    claimer = WarpgroupIntraChunk.leader // 32  # it finds the next chunk; there are no bulk copies

    def __init__(self, config: PrefillConfig):
        super().__init__(config)
        self.walk = self.layout.bytes + 2 * CHUNK_BYTES
        self.bytes = self.walk + WALK_BYTES

    @cute.jit
    def run(self, chain, smem, base: Int32, sched, queue: Int32, args):
        """Computes all local records of a queue.

        Args:
            chain: the `Chain` of the CTA.
            smem: its addresses in shared memory.
            base: shared address of the warpgroup's `bytes`.
        """
        thread, _, _ = cute.arch.thread_idx()
        thread = thread & (self.threads - 1)
        sync = lambda: cute.arch.barrier(barrier_id=BARRIER, number_of_threads=self.threads)
        turn = Int32(0)
        if self.is_claimer(thread, turn):
            head, n, high, _ = schedule.first_task(sched, queue)
            if thread == self.leader:
                ptx.store_shared_x4(base + self.walk, [head, n, high, Int32(0)])
            cute.arch.sync_warp()
            self.find(sched, queue, args, base, turn)
        sync()
        loaded = self.request_inputs(args, thread, base, turn)
        valid = self.load_chunk(base, turn).valid
        while valid > 0:
            # Everything derived from these is computed in each turn, because registers are scarce.
            thread, base = ptx.opaque(thread) & (self.threads - 1), ptx.opaque(base)
            worker = Worker(thread, base, turn)
            record = functools.partial(self.record_address, chain, smem)
            hooks = Hooks(
                sync,
                acquire_record=functools.partial(self.acquire_stages, chain, smem, thread, turn),
                # Kd, Qd and a are stored, and there is nothing to claim.
                claim_next=functools.partial(self.publish, thread, smem.early_full + chain.early_depth),
                store_claim=functools.partial(self.find_next, sched, queue, args, thread, base, turn + 1),
                publish_previous=lambda published: None,
            )
            self.compute(args, worker, self.load_chunk(base, turn), loaded, record, hooks)
            loaded = self.request_inputs(args, thread, base, turn + 1)
            self.finish(worker, record)
            sync()
            self.publish(thread, smem.late_full + chain.late_depth)
            turn += 1
            valid = self.load_chunk(base, turn).valid

    # ---- stages

    def record_address(self, chain, smem, name):
        """Returns the shared address of an array of the record."""
        depth = chain.early_depth if name in chain.early_arrays else chain.late_depth
        return getattr(smem, name) + depth * chain.bytes[name]

    @cute.jit
    def acquire_stages(self, chain, smem, thread: Int32, turn: Int32):
        """Waits until the chain has read the record of the turn before."""
        if thread == self.leader:
            phase = (turn & 1) ^ 1
            barriers.wait(smem.early_empty, Stage(Int32(chain.early_depth), phase))
            barriers.wait(smem.late_empty, Stage(Int32(chain.late_depth), phase))

    @cute.jit
    def publish(self, thread: Int32, full):
        """Arrives at the mbarrier of a stage, whose operands all threads of the warpgroup have stored."""
        if thread == self.leader:
            cute.arch.mbarrier_arrive(full)

    # ---- chunks. A buffer has the `Chunk` of a turn; its tokens are 0 if there is none.

    def chunk_address(self, base, turn):
        """Returns the shared address of the buffer of a turn."""
        return base + self.layout.bytes + (turn & 1) * CHUNK_BYTES

    def load_chunk(self, base, turn):
        """Returns the chunk of a turn."""
        return Chunk(*ptx.load_shared_x4(self.chunk_address(base, turn), Int32))

    @cute.jit
    def request_inputs(self, args, thread: Int32, base: Int32, turn: Int32):
        """Requests the first inputs of a turn's chunk, if it has one. Returns those that go to registers."""
        loaded = Int32(0), *(Float32(0.0) for _ in range(6))
        chunk = self.load_chunk(base, turn)
        if chunk.valid > 0:
            loaded = self.request(args, Worker(thread, base, turn), chunk)
        return loaded

    @cute.jit
    def find_next(self, sched, queue: Int32, args, thread: Int32, base: Int32, turn: Int32, claimed):
        """Stores the chunk of a turn to its buffer, in one warp."""
        if self.is_claimer(thread, turn):
            self.find(sched, queue, args, base, turn)

    @cute.jit
    def find(self, sched, queue: Int32, args, base: Int32, turn: Int32):
        """Stores the next local chunk of the queue to the buffer of a turn. A whole warp calls it.

        It walks through the parts of the queue as the chain does. Shared memory keeps the place: the task, its end, and the next chunk
        of its part.
        """
        head, n, end, c = ptx.load_shared_x4(base + self.walk, Int32)
        cute.arch.sync_warp()  # all lanes have read it
        low, high = schedule.range_of(sched, queue)
        found_head, token, valid = Int32(0), Int32(0), Int32(0)
        while (valid == 0) & (end > low):
            part = schedule.part(sched, head, n, end, low, high)
            c += sched.local_period - 1 - (part.number + c) % sched.local_period  # to the next local number
            if c < part.chunks:
                done = (part.first + c) * self.chunk  # tokens before the chunk
                found_head = Int32(0) + part.head
                token = Int32(part.token) + done
                valid = cutlass.min(Int32(part.length) - done, self.chunk)
                c += 1
            else:
                c = Int32(0)
                end = Int32(0) + part.begin
                head, n = schedule.next_task(sched, head, n)
        if cute.arch.lane_idx() == 0:
            key_row = token * args.H + found_head // (args.HV // args.H)
            ptx.store_shared_x4(self.chunk_address(base, turn), [found_head, token, key_row, valid])
            ptx.store_shared_x4(base + self.walk, [head, n, end, c])
        cute.arch.sync_warp()

    # ---- places of a record, in shared memory

    def cell(self, p: Place, image):
        return image + (p.panel_index * self.image_bytes + p.cell)

    def store_row(self, cell, r, words):
        ptx.store_shared_x2(in_row(cell, r), words)

    def store_decays(self, address, words, condition):
        ptx.store_shared_x2_if(address, words, condition)

    def kg_cell(self, p: Place, record):
        return self.cell(p, record("kg"))

    def store_kg_row(self, cell, shared, r, words):
        ptx.store_shared_x2(in_row(cell, r), words)

    def square(self, base, record, name):
        return record(name)


class StridedLocalIntraChunk(StridedInputs, LocalIntraChunk):
    """`LocalIntraChunk` over strided inputs."""
