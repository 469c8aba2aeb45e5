"""The kernel: prefill in one launch. Some CTAs run the intra-chunk stage, the others are chains.

A CTA has 384 or 512 threads and an SM of its own::

    CTAs 0 .. queues * (halves / warpgroups) - 1     the others (``intra_chunk_ctas``)
    chains: one per queue, or per half of V of it    intra-chunk stage, by tokens of a chunk: 2 groups of 256 or 3 of 128
    (`chain`, `summary`)                             threads (64), 4 of 128 or 6 of 64 (32): see `PrefillConfig.groups`
              ^                                                |
              |     ring of chunk records per queue,           |
              +----- in global memory, stays in L2 <-----------+

A group of the intra-chunk stage computes the records of one chunk after the other, in the order of `schedule`, and
writes them to the ring of the chunk's queue. The chain of the queue reads them. In some variants its CTA computes a sixth of them itself
(`local_records`).

The launch is cooperative: all CTAs are co-resident, so any CTA may wait for any other. Clusters of two CTAs form the grid, so that
neighbouring SMs have the same role. The kernel does not use the clusters otherwise. If the number of CTAs is odd, the grid has one more, which
does nothing.
"""

import functools
import itertools

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk import Chunk, Hooks, IntraChunk, Worker
from kda_cute.device.intra_chunk.fold import FoldedIntraChunk, StridedFoldedIntraChunk
from kda_cute.device.intra_chunk.strided import StridedIntraChunk
from kda_cute.device.kernel import Kernel
from kda_sm90.config import HELP_ABOVE, PrefillConfig
from kda_sm90.interfaces import PREFILL
from kda_sm90.kernels import schedule
from kda_sm90.kernels.chain import Chain
from kda_sm90.kernels.intra_chunk import Hooks as WarpgroupHooks
from kda_sm90.kernels.intra_chunk import StridedWarpgroupIntraChunk, WarpgroupIntraChunk
from kda_sm90.kernels.intra_chunk_64 import StridedTwoWarpgroupIntraChunk, TwoWarpgroupIntraChunk
from kda_sm90.kernels.pool_segments import PoolSegmentChain, PoolSummaryChain
from kda_sm90.kernels.recompute import RecomputeChain
from kda_sm90.kernels.reverse import ReverseChain
from kda_sm90.kernels.reverse_summary import ReverseSummaryChain
from kda_sm90.kernels.serving import ServingChain
from kda_sm90.kernels.summary import SummaryChain
from kda_sm90.layouts import counter_bytes, record_bytes, record_pitch

SHARED_BYTES = 227 * 1024  # largest shared memory of a CTA on sm_90

#: The chain of each mode.
CHAINS = {
    "whole": Chain,
    "summarize": SummaryChain,
    "execute": Chain,
    "reverse": ReverseChain,
    "recompute": RecomputeChain,
    "reverse_summarize": ReverseSummaryChain,
}

#: The same of the variants for serving.
SERVING = {"whole": ServingChain, "summarize": PoolSummaryChain, "execute": PoolSegmentChain}

#: The intra-chunk stage by warpgroups, and that of the variants for serving, by tokens of a chunk.
INTRA_CHUNK = {
    32: (WarpgroupIntraChunk, StridedWarpgroupIntraChunk),
    64: (TwoWarpgroupIntraChunk, StridedTwoWarpgroupIntraChunk),
}

#: Buffers for the claimed items of a group, and their bytes. Three are in use at a time: of the item to publish, the item
#: to compute, and the item claimed next. A power of two, because the turn's low bits choose the buffer.
ITEMS, ITEM_BYTES = 4, 32

#: Index of an item that does not exist, in any call. Its number (`schedule.number_of`) is less than 2^31.
NO_ITEM = 0x3FFFFFFF

#: Named barriers of an intra-chunk CTA: of the threads of the first group, of all groups while they wait for the first inputs, and of the
#: second group while it waits for the first one. Those of the other groups follow. 0 is ``sync_threads``.
FIRST_GROUP, FIRST_INPUTS, FIRST_FOLLOWER = 1, 8, 9


class PrefillKernel(Kernel):
    """Takes a leading tensor, which determines the device and the stream, and the values of `kda_sm90.arguments.PrefillArguments`; for
    serving those of `ServingPrefillArguments`, and of segments over a pool those of `SegmentPrefillArguments`.

    Sequences are rows of B (N = B), or with offsets they are packed along T (B = 1).
    """

    #: Bytes of spills that ``nox -s compile`` accepts, as ptxas counts them: stores and loads in the code, however often they
    #: are executed. Twelve warps per SM leave 168 registers per thread. Some variants spill values that the schedule
    #: computes once, and reload them for each item or each part of a queue.
    spill_allowance = 256
    interface = PREFILL

    def __init__(self, config: PrefillConfig):
        self.config = config
        self.arguments = self.interface.arguments(config)
        chain = (SERVING if config.serving else CHAINS)[config.mode]
        self.threads = config.threads
        if config.by_warpgroup:
            self.intra_chunk = INTRA_CHUNK[config.chunk][config.serving](config)
        elif config.folded:
            stage = StridedFoldedIntraChunk if config.serving else FoldedIntraChunk
            self.intra_chunk = stage(config, config.keeps_inverse)
        else:
            self.intra_chunk = (StridedIntraChunk if config.serving else IntraChunk)(config)
        table_bytes = schedule.table_bytes(config)
        self.chain = chain(config, SHARED_BYTES - table_bytes)
        self.leader = self.intra_chunk.leader if config.by_warpgroup else 0  # of a group
        self.groups = config.groups
        # Whether the groups of a CTA compute their first items one after the other.
        self.in_turn = config.chunk == 64 and not config.backward
        self.group_bytes = self.intra_chunk.layout.bytes + ITEMS * ITEM_BYTES
        if config.by_warpgroup:
            self.group_bytes = -(-self.group_bytes // 1024) * 1024
        self.first_halves = range(0, config.halves, config.warpgroups)  # of the chain CTAs of a queue
        self.chain_ctas = config.chain_ctas
        self.table_offset = max(self.groups * self.group_bytes, self.chain.shared_bytes)  # in shared memory
        self.shared_bytes = self.table_offset + table_bytes

    @cute.kernel
    def kernel(self, values: tuple):
        args = self.arguments(*values)
        index, _, _ = cute.arch.block_idx()
        ctas = args.queues * self.chain_ctas + args.intra_chunk_ctas
        if index < ctas:  # not the CTA that completes the last cluster
            self.run(args, index)

    @cute.jit
    def run(self, args, index: Int32):
        """Runs the roles of a CTA."""
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        chains = args.queues * self.chain_ctas
        records, carry, counters = self.workspace(args)
        sched = schedule.schedule(
            self.config, args.offsets, args.offset_bytes, args.N, args.T, args.HV, args.queues, args.depth, counters
        )  # fmt: skip
        if const_expr(self.config.backward):
            sched = schedule.slab(sched, args.HV, args.first_slot, args.slab_slots)
        thread, _, _ = cute.arch.thread_idx()
        # CTA 0 clears the counters. Other chains wait for it here or below, groups in `compute_records`.
        if args.ticket != Int64(0):
            if index == 0:
                schedule.clear(sched, args.ticket, self.threads)
            elif const_expr(not self.config.helps):  # noqa: SIM102 - decided at compile time
                if index < chains and thread == 0:
                    schedule.wait_for_clear(sched, args.ticket)
        table = Int32(shared.toint()) + self.table_offset
        schedule.fill_table(sched, table, self.threads // 32)
        cute.arch.sync_threads()
        sched = schedule.with_table(sched, table, self.threads // 32)
        helpers = Int32(0)
        if const_expr(self.config.helps):
            helpers = self.count_helpers(sched, args)
        if const_expr(not self.config.reads_records):  # noqa: SIM102 - decided at compile time
            if index >= chains - helpers:
                self.compute_records(sched, args, records, shared, index, helpers)
        if index < chains:
            if const_expr(self.config.helps):
                cute.arch.fence_proxy("async.shared", space="cta")  # bulk copies overwrite what groups used
                if args.ticket != Int64(0) and thread == 0:
                    schedule.wait_for_clear(sched, args.ticket)
                cute.arch.sync_threads()
            if args.ticket != Int64(0) and thread == self.threads - 1:
                self.see_clear(sched, args)
            queue, half = index // self.chain_ctas, index % self.chain_ctas * self.config.warpgroups
            self.chain.run(shared, args, records, carry, sched, queue, half)

    @cute.jit
    def count_helpers(self, sched, args) -> Int32:
        """Returns how many CTAs of chains, the last ones, compute first items before they become chains.

        Each of their groups has an item, and room for its record: a group that waits for room may wait until a chain begins. No chain helps
        unless items are many (`HELP_ABOVE`). A launch without intra-chunk CTAs reads records that are there already.
        """
        ctas, firsts = args.intra_chunk_ctas, cutlass.min(sched.total, args.queues * args.depth)
        helpers = cutlass.min(firsts // self.groups - ctas, args.queues * self.chain_ctas)
        helps = (ctas > 0) & (sched.total > HELP_ABOVE * self.groups * ctas)
        return ptx.select(helps, cutlass.max(helpers, 0), Int32(0))

    def see_clear(self, sched, args):
        """Counts the CTA of a chain, or all groups of intra-chunk CTAs together, as a waiter that has seen the ticket."""
        schedule.see_clear(sched, args.queues * self.chain_ctas + (0 if self.config.reads_records else 1))

    def workspace(self, args):
        """Returns (records, carry, counters) of the workspace: a function from array name and index to the address of
        an array of a record, and the addresses of the carried states and of the counters."""
        pitch, sizes = record_pitch(self.config.chunk), record_bytes(self.config.chunk)
        starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        count = args.depth if self.config.keeps_records else args.queues * args.depth
        record = lambda name, index: args.workspace + Int64(index) * pitch + starts[name]
        counters = args.workspace + Int64(count) * pitch
        return record, counters + counter_bytes(count, args.queues), counters

    # ---- the intra-chunk stage

    @cute.jit
    def compute_records(self, sched, args, records, shared, index: Int32, helpers: Int32):
        """Claims items and computes their records. Each group of threads does so by itself; a turn is one item.

        Order of turn t. The stages are those of `IntraChunk`, which calls back between them (`Hooks`)::

            work on item t            between the stages (hook)
            stage 1
                                      publish record t - 1; wait for room for record t (acquire_record)
            stage 2
                                      claim item t + 1 (claim_next)
            stage 3
                                      store the claim to the buffer of turn t + 1 (store_claim)
                                      look up the room for record t + 1 (prefetch_read)
                                      request the inputs of item t + 1
            stage 4

        An item without a chunk has the hooks, but no stages.

        A record is published one turn later, when its stores have left the SM and the fence has little to wait for. An
        item is claimed no earlier than one turn ahead, because a claimed item occupies room in its ring, and its chain
        waits for it.

        The first item of a group is its index, counted over the first groups of all CTAs, then over the second groups, and
        so on. It needs no claim, and seldom a look at its ring. So its inputs are on their way while the counters are cleared. Its
        record is published at the end of its own turn, because its chain has nothing else to do.

        Args:
            index: of the CTA.
            helpers: see `count_helpers`. Their groups compute no other items. They are the last ones in the order of first items, because their
                chains have to be set up before they can use a record.
        """
        thread, _, _ = cute.arch.thread_idx()
        size = self.intra_chunk.threads
        group, thread = cute.arch.make_warp_uniform(thread // size), thread % size
        base = Int32(shared.toint()) + group * self.group_bytes
        sync = lambda: cute.arch.barrier(barrier_id=FIRST_GROUP + group, number_of_threads=size)
        turn = Int32(0)
        index -= args.queues * self.chain_ctas
        is_helper, ctas = index < 0, args.intra_chunk_ctas + helpers
        index = ptx.select(is_helper, index + ctas, index) + group * ctas  # of the first item
        is_followed = (group + 1 < self.groups) & (index + ctas < schedule.items(sched))
        if thread < 32:
            self.store_item(sched, args, self.item_address(base, turn), index, thread)
        sync()
        loaded = self.request_first_inputs(sched, args, thread, base, group, index, ctas)
        claims = self.intra_chunk.is_claimer(thread, turn) and thread % 32 == 0
        if args.ticket != Int64(0) and (thread == self.leader or claims):
            schedule.wait_for_clear(sched, args.ticket)
        read = tuple(Int32(0) for _ in self.first_halves)  # the counters may not be clear yet
        _, number, valid, index_of_record = self.load_item(base, turn)
        if const_expr(self.in_turn):
            self.wait_for_turn(sched, group, index)
        while number >= 0:
            # Everything derived from these is computed in each turn, because registers are scarce.
            # The mask tells the compiler that the thread index is not negative, which makes divisions cheap.
            thread, base = ptx.opaque(thread) & (size - 1), ptx.opaque(base)
            record = functools.partial(self.record_address, records, index_of_record)
            acquire_record = functools.partial(self.acquire_record, sched, args, thread, base, turn, read)
            claim_next = functools.partial(self.claim_next, sched, thread, turn, is_helper)
            store_claim = functools.partial(
                self.store_claim, sched, args, thread, base, turn, ctas, is_helper
            )
            publish_previous = functools.partial(self.publish_previous, sched, thread, base, turn)
            exists = valid > 0
            if exists:
                chunk = self.load_chunk(base, turn)
                hooks = Hooks(sync, acquire_record, claim_next, store_claim)
                if const_expr(self.config.by_warpgroup):
                    hooks = WarpgroupHooks(
                        *hooks, functools.partial(publish_previous, self.intra_chunk.early_copies)
                    )
                self.intra_chunk.compute(args, Worker(thread, base, turn), chunk, loaded, record, hooks)
            else:
                published = acquire_record()
                sync()  # as in `IntraChunk.compute`: claim only when the item has room
                store_claim(claim_next())
                sync()
                if const_expr(self.config.by_warpgroup):
                    publish_previous(0, published)
            # Before the request: the load would share the scoreboard of the copies that it starts, and wait for them.
            read = self.prefetch_read(sched, thread, base, turn + 1)
            loaded = self.request_inputs(args, thread, base, turn + 1)
            if exists:
                self.intra_chunk.finish(Worker(thread, base, turn), record)
            sync()
            if const_expr(self.config.by_warpgroup):  # noqa: SIM102 - decided at compile time
                if exists:
                    self.intra_chunk.complete(Worker(thread, base, turn), record, sync)
            if const_expr(self.in_turn):
                self.pass_turn(group, turn == 0 and is_followed)
            if thread == self.leader and turn == 0:  # the first record, at once
                self.publish(sched, base, turn)
            turn += 1
            _, number, valid, index_of_record = self.load_item(base, turn)
        if thread == self.leader and turn > 1:  # the last record, unless it was also the first
            self.publish(sched, base, turn - 1)
        if thread == self.leader and valid < 0 and args.ticket != Int64(0):
            schedule.wait_for_clear(sched, args.ticket)  # in case that there are no items at all
            self.see_clear(sched, args)

    @cute.jit
    def request_first_inputs(
        self, sched, args, thread: Int32, base: Int32, group: Int32, index: Int32, ctas: Int32
    ):
        """Requests the inputs of the group's first item, as `request_inputs`. ``index``: of that item.

        Groups of warpgroups wait until those of the CTA's first group are here, because HBM takes several us for the inputs of all groups,
        and chains need the records of first groups first. Other groups do not wait: they request k only in `compute`, so the first
        group would compete with the others for its k.
        """
        others_have_items = index + (1 - group) * ctas < schedule.items(sched)
        if const_expr(self.config.by_warpgroup):  # noqa: SIM102 - decided at compile time
            if others_have_items & (group > 0):
                cute.arch.barrier(barrier_id=FIRST_INPUTS, number_of_threads=self.threads)
        loaded = self.request_inputs(args, thread, base, Int32(0))
        if const_expr(self.config.by_warpgroup):  # noqa: SIM102 - decided at compile time
            if others_have_items & (group == 0):
                cute.arch.cp_async_wait_group(0)
                cute.arch.barrier_arrive(barrier_id=FIRST_INPUTS, number_of_threads=self.threads)
        return loaded

    @cute.jit
    def wait_for_turn(self, sched, group: Int32, index: Int32):
        """Lets a group wait for the group before it, if it has a first item. ``index``: of that item."""
        if (group > 0) & (index < schedule.items(sched)):
            threads = 2 * self.intra_chunk.threads
            cute.arch.barrier(barrier_id=FIRST_FOLLOWER - 1 + group, number_of_threads=threads)

    @cute.jit
    def pass_turn(self, group: Int32, is_followed):
        """Lets the next group begin, if it waits."""
        if is_followed:
            threads = 2 * self.intra_chunk.threads
            cute.arch.barrier_arrive(barrier_id=FIRST_FOLLOWER + group, number_of_threads=threads)

    def record_address(self, records, index, name):
        """Returns the address of a record in the array ``name``."""
        return records(name, index)

    # Buffer of an item, 32-bit words: value head, first token in B*T, its row of q and k, tokens (a `Chunk`); queue,
    # number (-1: no item), tokens (-1: the last claim of the launch, which finds no item), index of its record.

    def item_address(self, base, turn):
        """Returns the shared address of the buffer with the item of a turn."""
        return base + self.intra_chunk.layout.bytes + (turn & (ITEMS - 1)) * ITEM_BYTES

    def load_item(self, base, turn):
        """Returns (queue, number, tokens, index of the record) of the item of a turn."""
        return tuple(ptx.load_shared_x4(self.item_address(base, turn) + 16, Int32))

    def load_chunk(self, base, turn):
        """Returns the chunk of the item of a turn."""
        return Chunk(*ptx.load_shared_x4(self.item_address(base, turn), Int32))

    @cute.jit
    def store_item(self, sched, args, address: Int32, index: Int32, lane: Int32):
        """Stores an item to its buffer; a whole warp calls it. ``index``: of the item, in lane 0."""
        queue, number, head, token, valid = schedule.item(sched, cute.arch.shuffle_sync(index, 0))
        record = schedule.record(schedule.ring(sched, queue), number)
        if lane == 0:
            # Groups of intra-chunk CTAs claim an item for each that they compute. So all have seen the ticket before the last claim.
            if index == schedule.items(sched) + args.intra_chunk_ctas * self.groups - 1:
                valid = Int32(-1)
            key_head = head
            if args.HV != args.H:  # a branch costs the warp less than a division
                key_head = head // (args.HV // args.H)
            ptx.store_shared_x4(address, [head, token, token * args.H + key_head, valid])
            ptx.store_shared_x4(address + 16, [queue, number, valid, record])

    @cute.jit
    def request_inputs(self, args, thread: Int32, base: Int32, turn: Int32):
        """Requests the first inputs of a turn's chunk, if it has one. Returns those that go to registers."""
        loaded = Int32(0), *(Float32(0.0) for _ in range(6))
        chunk = self.load_chunk(base, turn)
        if chunk.valid > 0:
            loaded = self.intra_chunk.request(args, Worker(thread, base, turn), chunk)
        return loaded

    @cute.jit
    def prefetch_read(self, sched, thread: Int32, base: Int32, turn: Int32):
        """Returns, in the leader, the numbers below which each chain CTA of the turn's item has read all records. `acquire_record` of that
        turn compares them 1 to 2 us later: an instruction on them here would wait for the loads of the next item as well."""
        read = tuple(Int32(0) for _ in self.first_halves)
        if thread == self.leader:
            queue, _, _, _ = self.load_item(base, turn)
            read = schedule.numbers_read(schedule.ring(sched, queue), self.first_halves)
        return read

    @cute.jit
    def acquire_record(self, sched, args, thread: Int32, base: Int32, turn: Int32, read: tuple):
        """Waits for room in the ring. ``read``: result of `prefetch_read`; if it already shows room, nothing is waited for. The group
        writes the record after this.

        Publishes the record of the previous turn, except the first, before it waits. Groups of `kda_sm90.kernels.intra_chunk` do so only
        if they wait, because they have a better place (`publish_previous`). Returns whether it has published it.
        """
        published = Int32(0)
        if thread == self.leader:
            if const_expr(not self.config.by_warpgroup):
                self.publish_previous(sched, thread, base, turn, 0, Int32(0))
            queue, number, _, _ = self.load_item(base, turn)
            if not schedule.has_room(sched, number, read):
                if const_expr(self.config.by_warpgroup):
                    self.publish_previous(sched, thread, base, turn, 0, Int32(0))
                    published = Int32(1)
                schedule.wait_for_room(schedule.ring(sched, queue), number, self.first_halves)
        return published

    @cute.jit
    def publish_previous(
        self,
        sched,
        thread: Int32,
        base: Int32,
        turn: Int32,
        pending: cutlass.Constexpr[int],
        published: Int32,
    ):
        """Publishes the record of the previous turn, except the first, unless it is ``published``. ``pending``: bulk copies of this turn."""
        if thread == self.leader and turn > 1 and published == 0:
            self.publish(sched, base, turn - 1, pending)

    @cute.jit
    def claim_next(self, sched, thread: Int32, turn: Int32, is_helper):
        """Claims the next item. Returns how many items were claimed before, in lane 0 of the claiming warp. `store_claim` uses it
        about 1 us later: an instruction on it here would wait for the answer."""
        claimed = Int32(0)
        if self.intra_chunk.is_claimer(thread, turn) and thread % 32 == 0 and not is_helper:
            claimed = schedule.claim(sched)
        return claimed

    @cute.jit
    def store_claim(
        self, sched, args, thread: Int32, base: Int32, turn: Int32, ctas: Int32, is_helper, claimed: Int32
    ):
        """Stores the next item to its buffer, in the warp that claimed it. ``ctas``: CTAs that compute first items."""
        if self.intra_chunk.is_claimer(thread, turn):
            index = ptx.select(is_helper, Int32(NO_ITEM), claimed + ctas * self.groups)
            self.store_item(sched, args, self.item_address(base, turn + 1), index, thread % 32)

    def publish(self, sched, base: Int32, turn: Int32, pending=0):
        """Publishes the record of a turn. ``pending``: bulk copies that the leader has started since."""
        if self.config.by_warpgroup:
            self.intra_chunk.wait_for_stores(pending)
        _, number, _, index = self.load_item(base, turn)
        ptx.fence_proxy_async()  # chains read records through the async proxy
        schedule.publish_record(sched, index, number)
