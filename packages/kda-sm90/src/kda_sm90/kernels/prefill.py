"""Prefill in one launch: some CTAs prepare chunks, the others are chains that take them up.

A CTA has 384 threads and an SM of its own. The first ``streams * (2 // warpgroups)`` CTAs are chains (``chain``), one
a stream, or one a half of V of it. In the others every group of 128 (chunks of 64 tokens) or 64 threads (of 32)
prepares chunks (``prepare``), one after the other in the order of ``schedule``. Records go from one to the other
through rings in global memory that stay in L2.

The launch is cooperative: all CTAs are on the device at once, so that each may wait for any other.
"""

import functools
from types import SimpleNamespace

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from kda_cute.device import ptx
from kda_cute.device.intra_chunk import Chunk, Hooks, IntraChunk, Worker
from kda_sm90.config import THREADS, PrefillConfig
from kda_sm90.kernels import schedule
from kda_sm90.kernels.chain import Chain
from kda_sm90.kernels.summary import SummaryChain
from kda_sm90.layouts import CARRY_BYTES, record_bytes

SHARED_BYTES = 227 * 1024  # what a CTA of sm_90 may have

NOTES, NOTE_BYTES = 4, 32  # of a group: items that it has claimed; three of them are in use

#: The arguments, in order, by type: addresses (0 for what is not there), integers, factors. ``Int64`` q, k [B,T,H,128]
#: bf16, v [B,T,HV,128] bf16, g [B,T,HV,128], beta [B,T,HV], a_log [HV] fp32, dt_bias [HV,128] fp32, offsets [N+1],
#: initial_state [N,HV,128,128] fp32, o [B,T,HV,128] bf16, final_state [N,HV,128,128] fp32, states
#: [state_count,HV,128,128] bf16, workspace (``layouts``); ticket, which no launch before had (0: the counters in the
#: workspace are set); transitions [N,HV,128,128] fp32 (of ``summarize``). ``Int32``: N sequences, of T tokens each or,
#: with offsets of ``offset_bytes`` (4, 8; 0: none) packed into T; ``beta_bytes`` (2: bf16, 4: fp32); ``l2norm`` (0, 1):
#: normalise q and k; ``v_first`` (0, 1): states are [V, K]; ``every``: chunks from a state to the next; CTAs that prepare,
#: streams, depth of a ring, or records in all. ``Float32``: scale, lower_bound (of the bounded gate), beta_factor (of the
#: sigmoid; 0: beta as it is).
ARGUMENTS = {
    Int64: (
        "q", "k", "v", "g", "beta", "a_log", "dt_bias", "offsets", "initial_state", "o", "final_state", "states",
        "workspace", "ticket", "transitions",
    ),
    Int32: (
        "state_count", "N", "T", "H", "HV", "offset_bytes", "beta_bytes", "l2norm", "v_first", "every", "preparers",
        "streams", "depth",
    ),
    Float32: ("scale", "lower_bound", "beta_factor"),
}  # fmt: skip


class PrefillKernel:
    """Takes o, which tells the device, and `ARGUMENTS`, which are trusted: the caller has checked shapes, dtypes,
    contiguity and alignment to 16 bytes.

    Sequences are rows of B (N = B), or with offsets are packed along T (B = 1), the offsets clamped to [0, T].
    """

    #: Twelve warps an SM leave 168 registers. Some variants put aside what the schedule computes once, and load it again
    #: for each item and each part of a stream; the figure counts these places in the code.
    spill_allowance = 256

    def __init__(self, config: PrefillConfig):
        self.config = config
        self.intra_chunk = IntraChunk(config)
        chain = SummaryChain if config.mode == "summarize" else Chain
        self.chain = chain(config, SHARED_BYTES - schedule.TABLE_BYTES)
        self.groups = THREADS // self.intra_chunk.threads
        self.group_bytes = self.intra_chunk.layout.bytes + NOTES * NOTE_BYTES
        self.halves = config.halves // config.warpgroups  # CTAs of a stream
        self.table = max(self.groups * self.group_bytes, self.chain.shared_bytes)
        self.shared_bytes = self.table + schedule.TABLE_BYTES

    def fake_args(self) -> tuple:
        # A tensor, because it tells the device, and with it torch's current stream.
        o = make_fake_compact_tensor(
            BFloat16, tuple(cute.sym_int() for _ in range(4)), stride_order=(3, 2, 1, 0), assumed_align=16
        )
        values = [kind(0) for kind, names in ARGUMENTS.items() for _ in names]
        return (o, *values, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(self, o: cute.Tensor, *arguments):
        *arguments, stream = arguments
        x = self.named(arguments)
        self.kernel(tuple(arguments)).launch(
            grid=(x.preparers + x.streams * self.halves, 1, 1),
            block=(THREADS, 1, 1),
            smem=self.shared_bytes,
            stream=stream,
            cooperative=True,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent; otherwise the DSL asks a device, at compile time
        )

    def named(self, arguments):
        """`ARGUMENTS` by name."""
        names = [name for group in ARGUMENTS.values() for name in group]
        return SimpleNamespace(**dict(zip(names, arguments, strict=True)))

    @cute.kernel
    def kernel(self, arguments: tuple):
        x = self.named(arguments)
        index, _, _ = cute.arch.block_idx()
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        chains = x.streams * self.halves
        records, carry, counters = self.arrays(x.workspace, x.streams, x.depth)
        s = schedule.schedule(
            self.config, x.offsets, x.offset_bytes, x.N, x.T, x.HV, x.streams, x.depth, counters
        )
        waiting = chains - 1 + x.preparers * self.groups
        if x.ticket != Int64(0):
            thread, _, _ = cute.arch.thread_idx()
            if index == 0:
                schedule.clear(s, x.ticket, THREADS)
            elif index < chains and thread == 0:
                schedule.wait_for_clear(s, x.ticket, waiting)
        table = Int32(shared.toint()) + self.table
        schedule.fill_table(s, table, THREADS // 32)
        cute.arch.sync_threads()
        s = schedule.with_width(s, table, THREADS // 32)
        stream, half = index // self.halves, index % self.halves * self.config.warpgroups
        if const_expr(self.config.mode == "run"):  # noqa: SIM114 - decided while tracing
            self.chain.run(shared, x, records, carry, s, stream, half)
        elif index < chains:
            self.chain.run(shared, x, records, carry, s, stream, half)
        else:
            self.prepare(s, x, records, shared, index - chains, waiting)

    def arrays(self, workspace, streams, depth):
        """What gives the address of a record in an array by name and number, and the addresses of the states that chains
        hand over and of the counters."""
        sizes, starts = record_bytes(self.config.chunk), {}
        records = Int64(depth) if self.config.keeps else Int64(streams) * depth
        for name, size in sizes.items():
            starts[name] = workspace
            workspace = workspace + records * size
        record = lambda name, number: starts[name] + Int64(number) * sizes[name]
        return record, workspace, workspace + Int64(streams) * (self.config.halves * CARRY_BYTES)

    @cute.jit
    def prepare(self, s, x, records, shared, index: Int32, waiting: Int32):
        """What a group of threads does, item by item as it claims them. ``index``: of the CTA among those that prepare;
        ``waiting``: how often it is waited for the counters to be cleared.

        The first item of a group is known, those of groups of different CTAs first, so that its inputs are under way when
        the counters are. Notes tell a group's warps about the items of this turn and of the next. No item is claimed
        earlier than that: what is claimed takes room in the rings, and its chain waits for it. A record is published in
        the next turn, behind the first stage, when its stores have left the SM, so that the fence has little to wait for;
        but the first at once, for its chain has nothing else to do."""
        thread, _, _ = cute.arch.thread_idx()
        size = self.intra_chunk.threads
        group, thread = cute.arch.make_warp_uniform(thread // size), thread % size
        base = Int32(shared.toint()) + group * self.group_bytes
        sync = lambda: cute.arch.barrier(barrier_id=1 + group, number_of_threads=size)
        turn = Int32(0)
        if thread < 32:
            self.write_note(s, x, self.note(base, turn), group * x.preparers + index, thread)
        sync()
        loaded = self.request(x, thread, base, turn)
        if thread == 0 and x.ticket != Int64(0):
            schedule.wait_for_clear(s, x.ticket, waiting)
        stream, number, valid = self.claimed(base, turn)
        while number >= 0:
            # What follows from these is computed in each turn, not held in registers, which are scarce.
            # The mask tells the compiler that a thread's number is none below 0, which makes divisions cheap.
            thread, base = ptx.opaque(thread) & size - 1, ptx.opaque(base)
            ring = schedule.ring(s, stream)
            read = self.look_ahead(ring, thread)
            record = schedule.record(ring, number)
            mine = functools.partial(self.at, records, record)
            begun = functools.partial(self.begin, s, thread, base, turn, read)
            claim = functools.partial(self.claim, s, x, thread, turn)
            noted = functools.partial(self.note_next, s, x, thread, base, turn)
            exists = valid > 0
            if exists:
                chunk = Chunk(*ptx.load_shared_x4(self.note(base, turn), Int32))
                hooks = Hooks(sync, begun, claim, noted)
                self.intra_chunk.compute(x, Worker(thread, base, turn), chunk, loaded, mine, hooks)
            else:
                begun()
                sync()
                noted(claim())
                sync()
            loaded = self.request(x, thread, base, turn + 1)
            if exists:
                self.intra_chunk.finish(Worker(thread, base, turn), mine)
            sync()
            if thread == 0 and turn == 0:
                self.publish(s, base, turn)
            turn += 1
            stream, number, valid = self.claimed(base, turn)
        if thread == 0 and turn > 1:
            self.publish(s, base, turn - 1)

    def at(self, records, record, name):
        return records(name, record)

    # A note: head, first token in B*T, its row of q and k, tokens; stream, number (-1: no item), tokens.

    def note(self, base, turn):
        """Where the item of a turn is noted."""
        return base + self.intra_chunk.layout.bytes + (turn & NOTES - 1) * NOTE_BYTES

    def claimed(self, base, turn):
        """Stream, number and tokens of a turn's item."""
        stream, number, valid, _ = ptx.load_shared_x4(self.note(base, turn) + 16, Int32)
        return stream, number, valid

    @cute.jit
    def look_ahead(self, ring, thread: Int32):
        """How far the chain of an item's stream has read, for one thread; it is used about 1 us later."""
        read = Int32(0)
        if thread == 0:
            read = schedule.read(ring, self.halves)
        return read

    @cute.jit
    def claim(self, s, x, thread: Int32, turn: Int32):
        """The next item, for one thread of the warp that has the least to do; it is used about 1 us later."""
        index = Int32(0)
        if self.intra_chunk.has_least_work(thread, turn) and thread % 32 == 0:
            index = schedule.claim(s) + x.preparers * self.groups
        return index

    @cute.jit
    def note_next(self, s, x, thread: Int32, base: Int32, turn: Int32, index: Int32):
        """The next item to its note, by the warp that claimed it."""
        if self.intra_chunk.has_least_work(thread, turn):
            self.write_note(s, x, self.note(base, turn + 1), index, thread % 32)

    @cute.jit
    def write_note(self, s, x, note: Int32, index: Int32, lane: Int32):
        """An item, which the first lane knows, to its note; by a whole warp."""
        stream, number, head, token, valid = schedule.item(s, cute.arch.shuffle_sync(index, 0))
        if lane == 0:
            key_row = token * x.H + head // (x.HV // x.H)
            ptx.store_shared_x4(note, [head, token, key_row, valid])
            ptx.store_shared_x4(note + 16, [stream, number, valid, Int32(0)])

    @cute.jit
    def request(self, x, thread: Int32, base: Int32, turn: Int32):
        """What has to be there when the item of a turn is prepared, if there is one."""
        loaded = Int32(0), *(Float32(0.0) for _ in range(6))
        chunk = Chunk(*ptx.load_shared_x4(self.note(base, turn), Int32))
        if chunk.valid > 0:
            loaded = self.intra_chunk.request(x, Worker(thread, base, turn), chunk)
        return loaded

    @cute.jit
    def begin(self, s, thread: Int32, base: Int32, turn: Int32, read: Int32):
        """Before anything is written to a record: publish the one before, unless it was the first, and wait for room, unless
        there was some when the turn began."""
        if thread == 0:
            if turn > 1:
                self.publish(s, base, turn - 1)
            stream, number, _ = self.claimed(base, turn)
            if not schedule.has_room(s, number, read):
                schedule.wait_for_room(schedule.ring(s, stream), number, self.halves)

    def publish(self, s, base: Int32, turn: Int32):
        """The item of a turn has been written."""
        stream, number, _ = self.claimed(base, turn)
        ptx.fence_proxy_async()  # records are read through the async proxy
        schedule.publish(schedule.ring(s, stream), number)
