"""The chain: a CTA that runs the recurrence over the chunks of its queue, with the state in registers.

**Recurrence.** Per chunk, with v and the chunk record (Kd, Qd, Kg, Aqk, T, a) of the intra-chunk stage, in transposed
form:

    X^T = v^T + S^T (-Kd)^T      R^T = X^T T^T      O^T = S^T Qd^T + R^T Aqk^T      S^T <- S^T diag(a) + R^T Kg

Records of chunks of 64 are folded (`kda_cute.device.intra_chunk.fold`): in the places of Kg and Aqk they hold Kg~ = T^T Kg and
Aqk~ = Aqk T. One product and one rounding fewer lie between S and the next S:

    X^T = v^T + S^T (-Kd)^T      O^T = S^T Qd^T + X^T Aqk~^T      S^T <- S^T diag(a) + X^T Kg~

A launch that saves R for a backward computes it from X besides. Its records hold T as well.

A warpgroup owns 64 rows of V, one *half*. It keeps S^T [64, K] in fp32 accumulators for a whole sequence. A wgmma
accumulator has the layout of a register operand, so S, X and R never pass through shared memory; they are rounded to
bf16 only as operands. The record holds -Kd, and v is loaded into the accumulators of X, so X needs no subtraction.
The halves of V are independent. ``PrefillConfig.warpgroups`` decides whether they share a CTA, and with it the loads of
records.

**Queue and parts.** `schedule` lays all chunks of the launch out in one line and cuts it into *queues*, one for each
chain. The chunks that one sequence and value head has in a queue are a *part*. A chain executes the parts of its
queue from the last to the first, and the chunks of a part in order::

    line     | head 0          | head 1          | head 2          |      queue 0: head 1 up to the cut, then head 0
    queues   |         queue 0          |         queue 1          |      queue 1: head 2, then head 1 from the cut on

Queue 0 publishes the state at the cut early, and queue 1 acquires it late. Each role computes the same parts from the
offsets, in a loop that moves ``end`` from the end of the queue (``high``) to its start (``low``). The rings
continue from one part to the next.

**Warp roles.**

========== ============== ==============================================================================================
role       warps          work
========== ============== ==============================================================================================
chain      4 per half     wgmma, decay, rounding; writes O^T and intermediate states to shared memory
producer   1              waits for records of the intra-chunk stage, copies them to two rings of shared memory (TMA bulk
                          copies), and publishes which records it has read, so that intra-chunk groups may replace them
values     1              copies v to the early ring (cp.async); rows after the end of a sequence are zeros
store      1 per half     copies O, R and states from shared to global memory, valid rows only
local      4              computes every `PrefillConfig.local_period`-th record of the queue (`local_records`), in the variants that have
                          such records; in others with 512 threads these warps are idle
========== ============== ==============================================================================================

**Shared memory** (`shared_storage`). The *early* ring has the operands that a chunk needs first (Kd, Qd, a, v), the
*late* ring the others (Kg, Aqk, and T if R is computed). O has one buffer per half, with room for R where it is saved, and so
have states. Each ring has one more stage for local records (`rings.Ring`), for which the leader of the local warpgroup arrives
instead of the producer.

=================== ====================== ================== ==================================================
mbarrier            arrivals per phase     waited for by      condition
=================== ====================== ================== ==================================================
early_full[stage]   producer 1, values 32  chain              the stage holds Kd, Qd, a and v of a chunk
early_empty[stage]  1 per chain warp       producer, values   the chain has read the stage
late_full[stage]    producer 1             chain              the stage holds Kg, Aqk and T of a chunk
late_empty[stage]   1 per chain warp       producer           the chain has read the stage
o_free[half]        store warp 1           chain              the store warp has read O
state_free[half]    store warp 1           chain              the store warp has read a state; in a backward only
=================== ====================== ================== ==================================================

early_full and late_full also wait for the bytes of the producer's copies. The chain and store warps publish O and states
to one another at named barriers (`barriers.NamedBarrier`).

**Issue order of a chunk of 64 tokens** (`Chain.chunk_64`; that of 32 tokens, `Chain.chunk_32`, has R between O1 and S). A line issues one group of wgmmas; the ALU work beside it
overlaps with the groups in flight. tCrS and tCrX are the bf16 operands of S and of X::

    group  product             in flight   ALU work of the warpgroup
                                           load decays
    X      accX += tCrS (-Kd)  X           round O of the previous chunk, publish it; decay accS
    O1     accO  = tCrS Qd     X O1        wait for X (O1 in flight); round X to tCrX
    S      accS += tCrX Kg~    O1 S
    O2     accO += tCrX Aqk~   O1 S O2     load v of the next chunk into accX; wait for S (O2 in flight); release the early
                                           stage; round S to tCrS; wait for O2; release the late stage

Groups complete in the order of issue. The ALU work writes no fragment that a group in flight uses: the decay writes
accS while X and O1 read tCrS; v goes to accX after X is done; tCrS is written after O1, its last reader.
O1 is also the last reader of the early stage, and the wait for S is the first wait that includes O1. If R is saved, its product
accX = tCrX T follows O2, and v is loaded after R has been rounded.

ptxas would move much of the ALU work to places where no wgmma is in flight, or between the wgmmas of one product.
Branches that it cannot decide (`opaque_true`) keep the order. Barriers are tested ahead of the wait (``try_wait``),
because the answer takes 40 to 90 clocks. docs/kernels/chain.md has measurements, and the argument why no role waits forever.

**Initial states** come through the rings as well, before the first chunk of a part (`initial_states`). Chains for serving, of summaries and of
backwards, and those that save R, load their states from global memory.

**Ends of a part.** No chunk is special, so the loop over chunks has no branch for the first or the last one.

- Every chunk loads v of the next chunk. For the last chunk of a part this is the *trailing stage*: one more early stage,
  with zeros for v and without a record. Nothing uses the X that is loaded from it.
- Every chunk publishes O of the previous chunk. The first O of a part is empty, and the store warp skips it. The chain
  publishes O of the last chunk after the loop. R goes with O: tCrX holds it until X of the next chunk is rounded.
"""

from types import SimpleNamespace
from typing import ClassVar

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import PipelineUserType
from cutlass.utils import hopper_helpers

from kda_cute.device import ptx
from kda_cute.records import decay_start
from kda_sm90.config import HEAD_DIM, PrefillConfig
from kda_sm90.kernels import barriers, fragments, schedule
from kda_sm90.kernels.barriers import WARPGROUP, NamedBarrier
from kda_sm90.kernels.fragments import HALF, MATRIX_BYTES
from kda_sm90.kernels.initial_states import InitialStates
from kda_sm90.kernels.local_records import LocalIntraChunk, StridedLocalIntraChunk
from kda_sm90.kernels.rings import Ring
from kda_sm90.kernels.store import StoreWarp
from kda_sm90.layouts import kg_layout, operand_layout, record_bytes, square_layout

#: Stages of the early and of the late ring, best first. The first pair that fits into shared memory is used.
STAGES = ((4, 4), (4, 3), (3, 3), (3, 2), (2, 2))

#: The producer publishes that it has read a record after it has requested this many more, so it seldom waits for the
#: arrival. A ring in global memory must hold more records than that (`schedule`, "No deadlock"). Local records need no request.
IN_FLIGHT = 2

#: Registers per thread of the chain warps, of the other warps, and of the local or idle ones, by threads of a CTA and whether there are local
#: records: shares of 65536 / 128 = 512. Two warpgroups of chain warps and one of other warps take 2 * 224 + 56 = 504, with an idle one
#: 2 * 216 + 56 + 24 = 512, with a local one 2 * 168 + 48 + 128 = 512. With 512 threads, one warpgroup of chain warps leaves two idle.
REGISTERS = {(384, False): (224, 56, 56), (512, False): (216, 56, 24), (512, True): (168, 48, 128)}


def shared_storage(config: PrefillConfig, stages, early, late, stores):
    """Returns the ``cute.struct`` of a chain's shared memory.

    Args:
        stages: stages of each array of a record that the chain loads.
        early, late: stages of the rings.
        stores: whether the chain stores O.

    The stages of an array follow one another. Swizzled images start at multiples of 1024 bytes.
    """
    C, wgs = config.chunk, config.warpgroups
    image = lambda count: cute.struct.Align[cute.struct.MemRange[BFloat16, count], 1024]
    operand = lambda name, count: image(stages.get(name, 0) * count)
    mbarriers = lambda count: cute.struct.MemRange[Int64, count]
    decays = stages["a"] * HEAD_DIM

    @cute.struct
    class SharedStorage:
        kd: operand("kd", C * HEAD_DIM)
        qd: operand("qd", C * HEAD_DIM)
        t: operand("t", C * C)
        kg: operand("kg", C * HEAD_DIM)
        aqk: operand("aqk", C * C)
        v: image(early * wgs * C * HALF)
        o: image(wgs * C * HALF * (2 if config.residual else 1) if stores else 0)
        state: image(wgs * HALF * HEAD_DIM if config.states else 0)
        a: cute.struct.Align[cute.struct.MemRange[Float32, decays], 128]  # `decay_units` relies on it
        o_free: mbarriers(wgs)
        state_free: mbarriers(wgs if config.backward else 0)
        early_full: mbarriers(early)
        early_empty: mbarriers(early)
        late_full: mbarriers(late)
        late_empty: mbarriers(late)

    return SharedStorage


class Chain(InitialStates):
    """Runs one queue, or one half of V of it, in a CTA of ``THREADS`` threads.

    A sequence without tokens passes its initial state on. Rows of o outside of sequences are not written.

    Names of the methods: ``args``, the arguments of the launch (`prefill.Arguments`); ``sched``, the schedule; ``smem``,
    addresses in shared memory (`pointers`); ``thr``, the fragments and addresses of a chain thread (`thread_view`);
    ``half``, the first half of the CTA in `run` and in the other roles, and that of the warpgroup in ``thr``.

    Attributes:
        shared_bytes: shared memory of the CTA, at most the ``room`` of the constructor.
    """

    #: Layout of each matrix of a record as the B operand of the chain's products.
    LAYOUTS: ClassVar = {
        "kd": operand_layout,
        "qd": operand_layout,
        "kg": kg_layout,
        "aqk": square_layout,
        "t": square_layout,
    }
    StoreWarp = StoreWarp
    STORES = True  # whether the chain has an output O and intermediate states
    STATES_IN_RINGS = True  # whether initial states come through the rings (`initial_states`)

    @staticmethod
    def arrays(config: PrefillConfig):
        """Returns the arrays of a record in the early and in the late ring, in the order of their loads."""
        t = () if config.folded and not config.residual else ("t",)
        return ("kd", "qd", "a"), (*t, "kg", "aqk")

    def __init__(self, config: PrefillConfig, room: int):
        self.config = config
        self.chunk = config.chunk
        self.warpgroups = config.warpgroups
        self.bytes = record_bytes(self.chunk)
        self.v_bytes = 2 * self.chunk * HALF * config.warpgroups  # of an early stage
        # A chain that saves R would spill more than `nox -s compile` allows.
        self.states_in_rings = self.STATES_IN_RINGS and not config.residual
        self.store_warp = self.StoreWarp(config)
        self.early_arrays, self.late_arrays = self.arrays(config)
        local_bytes = 0
        if config.local:
            self.local = (StridedLocalIntraChunk if config.serving else LocalIntraChunk)(config)
            local_bytes = self.local.bytes
        more = int(config.local)  # stages for local records
        for self.early_depth, self.late_depth in STAGES:
            early, late = self.early_depth + more, self.late_depth + more
            self.stages = dict.fromkeys(self.early_arrays, early) | dict.fromkeys(self.late_arrays, late)
            self.storage = shared_storage(config, self.stages, early, late, self.STORES)
            self.local_offset = -(-self.storage.size_in_bytes() // 1024) * 1024
            self.shared_bytes = self.local_offset + local_bytes
            if self.shared_bytes <= room:
                break

    @cute.jit
    def run(self, shared: cute.Pointer, args, records, carry, sched, queue: Int32, half: Int32):
        """Runs the role of the calling warp.

        Args:
            shared: the CTA's shared memory, aligned to 1024 bytes.
            args: the arguments of the launch (`prefill.Arguments`).
            records: returns the address of a record in an array of the workspace, by array name and index.
            carry: address of the states that queues pass on.
            sched: the schedule.
            half: the CTA's first half; with two warpgroups the CTA also has the next one.
        """
        storage = self.storage(shared)
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = self.pointers(storage)
        if thread == 0:
            self.init_barriers(smem)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        of_chain, of_others, of_local = REGISTERS[self.config.threads, self.config.local]
        if warp >= 4 * self.warpgroups + 4:
            if const_expr(of_local < 128):  # of the 128 that it begins with
                cute.arch.setmaxregister_decrease(of_local)
            if const_expr(self.config.local):
                self.local.run(self, smem, Int32(shared.toint()) + self.local_offset, sched, queue, args)
        elif warp >= 4 * self.warpgroups:
            cute.arch.setmaxregister_decrease(of_others)
            if warp == 4 * self.warpgroups:
                self.produce_records(smem, records, sched, queue, half, args)
            if warp == 4 * self.warpgroups + 1:
                self.produce_values(smem, sched, queue, args, half)
            if const_expr(self.STORES):  # noqa: SIM102 - decided at compile time
                if warp >= 4 * self.warpgroups + 2 and warp < 5 * self.warpgroups + 2:
                    self.store_warp.run(smem, sched, queue, args, half)
        else:
            cute.arch.setmaxregister_increase(of_chain)
            self.chain(smem, sched, queue, self.tiles(storage), args, carry, half)

    def pointers(self, storage):
        """Returns the pointers to barriers, and the 32-bit addresses of everything else."""
        address = lambda name: Int32(getattr(storage, name).data_ptr().toint())
        names = ("early_full", "early_empty", "late_full", "late_empty", "o_free", "state_free")
        return SimpleNamespace(
            **{name: getattr(storage, name).data_ptr() for name in names},
            **{name: address(name) for name in (*self.early_arrays, *self.late_arrays, "v", "o", "state")},
        )

    def init_barriers(self, smem):
        """Initialises the mbarriers; see the table of the module."""
        chain_warps = 4 * self.warpgroups
        early, late = (depth + int(self.config.local) for depth in (self.early_depth, self.late_depth))
        for barrier, count, arrivals in (
            (smem.early_full, early, 1 + 32),
            (smem.early_empty, early, chain_warps),
            (smem.late_full, late, 1),
            (smem.late_empty, late, chain_warps),
            (smem.o_free, self.warpgroups, 1),
            (smem.state_free, self.warpgroups if self.config.backward else 0, 1),
        ):
            for i in range(count):
                cute.arch.mbarrier_init(barrier + i, arrivals)

    def tiles(self, storage):
        """Returns the tensors (N, K, stages) of the B operands in shared memory, by name."""
        tiles = {}
        for name in (name for name in self.stages if name in self.LAYOUTS):
            layout = self.LAYOUTS[name](self.chunk, self.stages[name])
            tiles[name] = getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
        return tiles

    def rings(self, user: PipelineUserType):
        """Returns the positions of a role in the early and in the late ring at the start."""
        phase = int(user is PipelineUserType.Producer)
        return tuple(
            Ring.at_start(depth, phase, self.config.local) for depth in (self.early_depth, self.late_depth)
        )

    # ---- producer: one warp. All lanes wait and track the rings. `elect.sync` chooses the lane that copies: behind a comparison of the lane
    # index, ptxas may wrap every bulk copy in a loop over the lanes (docs/kernels/chain.md, "Machine code").

    @cute.jit
    def produce_records(self, smem, records, sched, queue: Int32, half: Int32, args):
        """Fills both rings with the records of the queue, and publishes which ones have been read."""
        lane = cute.arch.lane_idx()
        ring = schedule.ring(sched, queue)
        early, late = self.rings(PipelineUserType.Producer)
        head, n, high, low = schedule.first_task(sched, queue)
        end = high
        while end > low:
            part = schedule.part(sched, head, n, end, low, high)
            # All earlier numbers have been read: the last IN_FLIGHT records of the part before have arrived (below),
            # and the slots at its end that have no chunk need no reading.
            if lane == 0:
                schedule.publish_read(ring, half, part.number)
            if const_expr(self.states_in_rings):
                early, late = self.request_initial_state(smem, args, part, early, late)
            ready = Int32(0)
            for c in cutlass.range(part.chunks, unroll=1):
                if ready <= c:
                    ready = self.wait_for_chunk(ring, part, c)
                is_local = schedule.is_local(sched, part, c)
                loads = is_local == False  # is_local is a Boolean of the DSL, or False
                if loads:
                    record = schedule.record(ring, part.number + c)
                    self.load_record(smem, records, record, early, late)
                early.advance_past(is_local)
                late.advance_past(is_local)
                # The records up to c are requested; both rings point to the stages of c + 1.
                if loads and c >= IN_FLIGHT:
                    # Of c - IN_FLIGHT. If a record in between is local, of the chunk before.
                    self.wait_for_load(smem, IN_FLIGHT + 1, early, late)
                    read = c - IN_FLIGHT + 1 - int(self.config.local)
                    if lane == 0:
                        schedule.publish_read(ring, half, part.number + read)
            for back in cutlass.range_constexpr(1, IN_FLIGHT + 1):
                if part.chunks >= back:
                    self.wait_for_load(smem, back, early, late)
            self.pass_trailing_stage(smem, early)
            early.advance()
            end = part.begin
            head, n = schedule.next_task(sched, head, n)
        if lane == 0:
            schedule.publish_read(ring, half, Int32(schedule.ALL_READ))

    def wait_for_chunk(self, ring, part, c):
        """Waits for the record of chunk c of the part. Returns how many chunks of the part, from its first one, have records that are
        ready."""
        if self.config.reads_records:  # an earlier launch has written all records
            return part.chunks
        return c + schedule.wait_for_records(ring, part.number + c, cutlass.min(part.chunks - c, 32))

    def load_record(self, smem, records, record, early, late):
        """Waits for a free stage of each ring, and requests one record into them. A whole warp calls it."""
        own = lambda names: {name: name for name in names}
        self.load_arrays(smem, records, record, early, late, own(self.early_arrays), own(self.late_arrays))

    def load_arrays(self, smem, records, record, early, late, early_arrays, late_arrays, keep=False):
        """Waits for a free stage of each ring, and requests arrays of one record into them. A whole warp calls it.

        Args:
            early_arrays, late_arrays: the array of the record for each array of a stage.
            keep: whether the record is read again.
        """
        for arrays, ring, full, empty in (
            (early_arrays, early, smem.early_full, smem.early_empty),
            (late_arrays, late, smem.late_full, smem.late_empty),
        ):
            barriers.wait(empty, ring)
            barrier = full + ring.index
            with cute.arch.elect_one():
                ptx.fence_proxy_async()  # the intra-chunk stage wrote the record through the generic proxy
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, sum(self.bytes[name] for name in arrays))
                for place, name in arrays.items():
                    size = self.bytes[name]
                    stage = getattr(smem, place) + ring.index * size
                    ptx.bulk_load(
                        stage, records(name, record), Int32(size), Int32(barrier.toint()), keep=keep
                    )

    def pass_trailing_stage(self, smem, early):
        """Waits for a free early stage, and passes it on without bytes. A whole warp calls it."""
        barriers.wait(smem.early_empty, early)
        barriers.release(smem.early_full + early.index)

    def wait_for_load(self, smem, back, early, late):
        """Waits until the load that is ``back`` loads before the next one has arrived. ``early``, ``late``: the
        stages of the next load."""
        for full, ring in ((smem.early_full, early), (smem.late_full, late)):
            if back > ring.stages:
                continue  # its stage was reused since, so the chain has read it
            # A producer's ``ring.phase`` is the parity of the *empty* barrier that it waits for. The *full* barrier of a
            # stage that was filled in this turn of the ring has the other parity, and in the turn before, the same.
            before = ring.index - back
            wrapped = before < 0
            index = ptx.select(wrapped, before + ring.stages, before)
            cute.arch.mbarrier_wait(full + index, ptx.select(wrapped, ring.phase, ring.phase ^ 1))

    # ---- values: one warp

    @cute.jit
    def produce_values(self, smem, sched, queue: Int32, args, half: Int32):
        """Fills the early ring with v: an image [C, 64] for each half of the CTA. Each lane copies 16-byte units of one
        column: 8 units are a row of a half."""
        unit, _ = self.value_unit()
        pitch = self.value_pitch(args)
        early, _ = self.rings(PipelineUserType.Producer)
        head, n, high, low = schedule.first_task(sched, queue)
        end = high
        while end > low:
            part = schedule.part(sched, head, n, end, low, high)
            source = self.value_row(args, part) + half * (2 * HALF) + unit * 16
            source += Int64(pitch) * (part.first * self.chunk)
            if const_expr(self.states_in_rings):
                early = self.pass_initial_state(smem, args, part, early)
            for c in cutlass.range(part.chunks + 1, unroll=1):
                is_local = schedule.is_local(sched, part, c)
                stage = early.stage(is_local)
                barriers.wait(smem.early_empty, stage)
                valid = self.valid_rows(part.length - (part.first + c * sched.step) * self.chunk, half)
                if c == part.chunks:  # the trailing stage: zeros
                    valid = Int32(0)
                self.copy_values(smem, stage, source, pitch, valid)
                source += Int64(pitch) * (self.chunk * sched.step)
                early.advance_past(is_local)
            end = part.begin
            head, n = schedule.next_task(sched, head, n)

    def value_pitch(self, args):
        """Returns the bytes from a token of v to the next. Unsigned, so that a row's address takes one instruction (`copy_values`)."""
        return Uint32(args.HV) * Uint32(2 * HEAD_DIM)

    def value_row(self, args, part):
        """Returns the address of v of a part's head at the first token of its sequence."""
        return args.v + (part.token * args.HV + part.head) * (2 * HEAD_DIM)

    def value_unit(self):
        """Returns the lane's unit of 16 bytes in a row of all halves of the CTA, and its first row."""
        lane = cute.arch.lane_idx()
        units = 8 * self.warpgroups
        return lane % units, lane // units

    def copy_values(self, smem, early, source, pitch, valid):
        """Requests the first ``valid`` rows of v of a chunk into a stage; the others are zeros. ``source``: the address of the
        lane's unit in the first row."""
        unit, first = self.value_unit()
        image_of_half = smem.v + early.index * self.v_bytes + unit // 8 * (self.chunk * 2 * HALF)
        for start in range(0, self.chunk, 4 // self.warpgroups):
            row = start + first
            to = image_of_half + row * (2 * HALF) + ((unit % 8) ^ (row % 8)) * 16  # swizzled
            ptx.cp_async_x4(to, source + Int64(Uint32(row)) * Int64(pitch), row < valid)
        ptx.cp_async_arrive(Int32((smem.early_full + early.index).toint()))

    def valid_rows(self, valid, half):
        """Returns the rows of v to load of a chunk that has ``valid`` tokens."""
        return valid

    # ---- chain: one warpgroup per half

    @cute.jit
    def chain(self, smem, sched, queue: Int32, tiles, args, carry: Int64, half: Int32):
        """Runs the recurrence over every part of the queue."""
        thr = self.thread_view(smem, tiles, half)
        early, late = self.rings(PipelineUserType.Consumer)
        o_phase = Int32(0)
        # Always true. ptxas cannot decide a branch on a runtime argument, so it moves no instruction into or out of it.
        opaque_true = args.depth > 0
        head, n, high, low = schedule.first_task(sched, queue)
        end = high
        while end > low:
            part = schedule.part(sched, head, n, end, low, high)
            if const_expr(self.states_in_rings):
                # The first branch: if it follows that of `continues`, ptxas copies S to other registers in every part.
                if self.has_initial_state(args, part):
                    early, late = self.receive_initial_state(smem, args, thr, early, late)
                else:
                    self.load_carry_or_zeros(sched, queue, carry, part, thr)
            else:
                self.load_state(sched, queue, args, carry, part, thr)
            fragments.round_to_bf16(thr.accS, thr.tCrS)
            fragments.fill_zero(thr.accO)
            if const_expr(self.config.residual):
                fragments.fill_zero(thr.tCrX)
            stage = early.stage(schedule.is_local(sched, part, 0))
            barriers.wait(smem.early_full, stage)
            self.load_v(thr, stage)
            # Invariant of the loop: tCrS and accX hold S and v of the chunk, accO holds O of the previous one, and no
            # thread has stored that O yet. No thread has waited for the buffer of O.
            early, late, o_phase = self.run_part(
                smem, sched, args, part, thr, early, late, o_phase, opaque_true
            )
            barriers.release(smem.early_empty + early.index)  # the trailing stage
            fragments.round_to_bf16(thr.accO, thr.rO)  # O of the last chunk
            cute.arch.mbarrier_wait(smem.o_free + thr.wg, o_phase)
            self.publish_o(smem, thr)
            o_phase = o_phase ^ 1
            early.advance()  # past the trailing stage
            self.store_state(sched, queue, args, carry, part, thr)
            end = part.begin
            head, n = schedule.next_task(sched, head, n)

    @cute.jit
    def run_part(self, smem, sched, args, part, thr, early, late, o_phase: Int32, opaque_true):
        """Runs the chunks of a part. Returns both rings and the phase of O behind them."""
        return self.run_chunks(
            smem, sched, args, part, part.first, part.chunks, thr, early, late, o_phase, opaque_true
        )

    @cute.jit
    def run_chunks(
        self,
        smem,
        sched,
        args,
        part,
        first: Int32,
        count: Int32,
        thr,
        early,
        late,
        o_phase: Int32,
        opaque_true,
    ):
        """Runs ``count`` chunks of a part's sequence, from its chunk ``first`` on. Returns the same as `run_part`."""
        for c in cutlass.range(count, unroll=1):
            # No wgmma is in flight over the back edge. ptxas sees that only if a wait follows the loop's start.
            warpgroup.wait_group(0)
            if const_expr(self.config.states):  # noqa: SIM102 - decided at compile time
                if (first + c) % args.every == 0:
                    self.publish_state(smem, self.store_warp.v_first(args), thr)
            if const_expr(self.config.saved_states):  # noqa: SIM102 - decided at compile time
                if (first + c) % args.every == 0:
                    self.save_state(sched, args, part, first + c, thr)
            if const_expr(self.chunk == 64):
                early, late, o_phase = self.chunk_64(smem, thr, early, late, o_phase, opaque_true)
            else:
                number = first + c - part.first
                is_local = schedule.is_local(sched, part, number)
                next_local = schedule.is_local(sched, part, number + 1)
                early, late, o_phase = self.chunk_32(
                    smem, thr, early, late, o_phase, opaque_true, is_local, next_local
                )
        return early, late, o_phase

    def thread_view(self, smem, tiles, half):
        """Returns the calling thread's place, its fragments, and its addresses of v and of the decays in stage 0.

        There are two shapes of wgmma: ``mma_tokens`` has an accumulator [64, C] (X, R, O), ``mma_state`` one of [64, K] (S).
        Both have the same layout of register operands A, so tCrS and tCrX serve either. Names are CuTe's: tCs is B in
        shared memory, tCr is A in registers.
        """
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        mma_tokens = self.tiled_mma(OperandMajorMode.K, self.chunk)
        mma_state = self.tiled_mma(OperandMajorMode.MN, HEAD_DIM)
        tokens, channels = mma_tokens.get_slice(thread), mma_state.get_slice(thread)
        make = lambda mma, tile: mma.make_fragment_B(mma.partition_B(tile))
        operand = lambda mma, name: make(mma, tiles[name]) if name in tiles else None
        shape = mma_tokens.partition_shape_C((HALF, self.chunk))
        # Opaque, else ptxas computes it again from the thread index in every chunk.
        decays = ptx.opaque(smem.a + decay_start(thread % 32 % 4))
        return SimpleNamespace(
            wg=wg,
            index=thread,
            half=half + wg,
            mma_tokens=mma_tokens,
            mma_state=mma_state,
            tCsKd=operand(tokens, "kd"),
            tCsQd=operand(tokens, "qd"),
            tCsKg=operand(channels, "kg"),
            tCsAqk=operand(tokens, "aqk"),
            tCsT=operand(tokens, "t"),
            accX=cute.make_rmem_tensor(shape, Float32),  # X, then R; so is tCrX
            accO=cute.make_rmem_tensor(shape, Float32),
            accS=cute.make_rmem_tensor(mma_state.partition_shape_C((HALF, HEAD_DIM)), Float32),
            tCrS=cute.make_rmem_tensor(mma_tokens.partition_shape_A((HALF, HEAD_DIM)), BFloat16),
            tCrX=cute.make_rmem_tensor(mma_state.partition_shape_A((HALF, self.chunk)), BFloat16),
            rO=cute.make_rmem_tensor(cute.size(shape) // 2, Int32),  # O in bf16 pairs, to be stored
            v=smem.v + wg * (self.chunk * HALF * 2),
            a=decays,
        )

    def tiled_mma(self, b_major, n):
        """Returns the wgmma of a register operand (S^T, X^T or R^T) with a tile in shared memory of n columns."""
        return hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (HALF, n),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip

    @cute.jit
    def chunk_64(self, smem, thr, early, late, o_phase: Int32, opaque_true):
        """Runs one chunk of 64 tokens in the issue order of the module's docstring, which names the groups. Returns both
        rings and the phase of O for the next chunk, whose v it has loaded."""
        channels, steps = range(HEAD_DIM // 16), range(self.chunk // 16)
        # X
        late_full = barriers.test(smem.late_full, late)  # S is its first reader
        o_free = cute.arch.mbarrier_try_wait(smem.o_free + thr.wg, o_phase)
        decays = fragments.load_decays(thr.a + early.index * (4 * HEAD_DIM))
        self.gemm(thr.mma_tokens, thr.accX, thr.tCrS, thr.tCsKd, early, channels)
        barriers.wait_unless(late_full, smem.late_full, late)
        if opaque_true:
            fragments.round_to_bf16(thr.accO, thr.rO)
            if not o_free:
                cute.arch.mbarrier_wait(smem.o_free + thr.wg, o_phase)
            self.publish_o(smem, thr)
        o_phase = o_phase ^ 1
        if opaque_true:  # a branch of its own: one branch for both is slower
            fragments.multiply_columns(thr.accS, decays)
        # O1
        self.gemm(thr.mma_tokens, thr.accO, thr.tCrS, thr.tCsQd, early, channels, zero=True)
        warpgroup.wait_group(1)  # X is done; O1 is in flight
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        # S
        self.gemm(thr.mma_state, thr.accS, thr.tCrX, thr.tCsKg, late, steps)
        following = early.clone()
        following.advance()
        early_full = barriers.test(smem.early_full, following)
        # O2, R
        self.gemm(thr.mma_tokens, thr.accO, thr.tCrX, thr.tCsAqk, late, steps)
        if const_expr(self.config.residual):
            self.gemm(thr.mma_tokens, thr.accX, thr.tCrX, thr.tCsT, late, steps, zero=True)
        barriers.wait_unless(early_full, smem.early_full, following)
        if const_expr(not self.config.residual):
            self.load_v(thr, following)
        warpgroup.wait_group(1 + self.config.residual)  # O1 and S are done; O2, and R, are in flight
        barriers.release(smem.early_empty + early.index)
        if opaque_true:
            fragments.round_to_bf16(thr.accS, thr.tCrS)
        warpgroup.wait_group(0)  # O2 and R are done
        barriers.release(smem.late_empty + late.index)
        if const_expr(self.config.residual):
            fragments.round_to_bf16(thr.accX, thr.tCrX)
            self.load_v(thr, following)
        late.advance()
        return following, late, o_phase

    @cute.jit
    def chunk_32(self, smem, thr, early_ring, late_ring, o_phase: Int32, opaque_true, is_local, next_local):
        """Runs one chunk of 32 tokens: the groups of `chunk_64`, with R between O1 and S, and the second half of O1 beside R.
        ``is_local``, ``next_local``: whether the record of the chunk, and of the next one, is local."""
        channels, steps = range(HEAD_DIM // 16), range(self.chunk // 16)
        first, second = channels[: len(channels) // 2], channels[len(channels) // 2 :]  # halves of K
        early, late = early_ring.stage(is_local), late_ring.stage(is_local)
        following_ring = early_ring.clone()
        following_ring.advance_past(is_local)
        following = following_ring.stage(next_local)
        late_full = barriers.test(smem.late_full, late)
        o_free = cute.arch.mbarrier_try_wait(smem.o_free + thr.wg, o_phase)
        decays = thr.a + early.index * (4 * HEAD_DIM)
        decays_of_first = fragments.load_decays(decays, first)  # there are no registers for all
        self.gemm(thr.mma_tokens, thr.accX, thr.tCrS, thr.tCsKd, early, channels)
        fragments.round_to_bf16(thr.accO, thr.rO)
        self.gemm(thr.mma_tokens, thr.accO, thr.tCrS, thr.tCsQd, early, first, zero=True)
        if not o_free:
            cute.arch.mbarrier_wait(smem.o_free + thr.wg, o_phase)
        o_phase = o_phase ^ 1
        if opaque_true:
            self.publish_o(smem, thr)
            fragments.multiply_columns(thr.accS, decays_of_first, first)
            fragments.multiply_columns(thr.accS, fragments.load_decays(decays, second), second)
        barriers.wait_unless(late_full, smem.late_full, late)
        warpgroup.wait_group(1)  # X is done; O1 is in flight
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        self.gemm(thr.mma_tokens, thr.accX, thr.tCrX, thr.tCsT, late, steps, zero=True)
        self.gemm(thr.mma_tokens, thr.accO, thr.tCrS, thr.tCsQd, early, second)
        early_full = barriers.test(smem.early_full, following)
        warpgroup.wait_group(1)  # O1 and R are done; O2 is in flight
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        self.gemm(thr.mma_state, thr.accS, thr.tCrX, thr.tCsKg, late, steps)
        self.gemm(thr.mma_tokens, thr.accO, thr.tCrX, thr.tCsAqk, late, steps)
        barriers.wait_unless(early_full, smem.early_full, following)
        self.load_v(thr, following)
        warpgroup.wait_group(1)  # O2 and S are done; O3 is in flight
        barriers.release(smem.early_empty + early.index)
        fragments.round_to_bf16(thr.accS, thr.tCrS)
        warpgroup.wait_group(0)  # O3 is done
        barriers.release(smem.late_empty + late.index)
        late_ring.advance_past(is_local)
        return following_ring, late_ring, o_phase

    def load_v(self, thr, early):
        """Loads v of a stage into accX."""
        fragments.load_v(thr.v + early.index * self.v_bytes, thr.index, self.chunk, thr.accX)

    def gemm(self, mma, acc, tCrA, tCsB, ring, steps, zero=False):
        """Issues ``acc (+)= A B`` as one group of wgmmas. ``steps``: which 16 columns of A each wgmma reduces over. B is in
        the stage of ``ring``."""
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not zero)
        warpgroup.fence()
        for k in steps:
            cute.gemm(atom, acc, tCrA[None, None, k], tCsB[None, None, k, ring.index], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def publish_o(self, smem, thr):
        """Stores O^T (rounded, in rO) as an image of O [C, 64], and R^T of the same chunk (tCrX) behind it if the call saves R.
        Publishes them to the store warp. The caller has waited for ``o_free``. That is an mbarrier, because a named barrier
        would make the chain warps wait for one another."""
        place = smem.o + thr.wg * self.store_warp.o_bytes
        fragments.store_transposed(place, thr.index, thr.rO, self.chunk)
        if const_expr(self.config.residual):
            place += self.store_warp.image_bytes
            fragments.store_transposed(place, thr.index, fragments.words_of(thr.tCrX), self.chunk)
        barriers.arrive(NamedBarrier.O_READY, thr.wg)

    @cute.jit
    def publish_state(self, smem, v_first: Int32, thr):
        """Stores S as an image of its half of a matrix in global memory, and publishes it to the store warp. S comes from
        tCrS, which already holds it in bf16."""
        words = cute.make_tensor(
            cute.recast_ptr(thr.tCrS.iterator, dtype=Int32), cute.make_layout(HEAD_DIM // 2 // 2)
        )
        shared = smem.state + thr.wg * self.store_warp.state_bytes
        barriers.sync(NamedBarrier.STATE_FREE, thr.wg)
        if v_first > 0:
            fragments.store_rows(shared, thr.index, words)
        else:
            fragments.store_transposed(shared, thr.index, words, HEAD_DIM)
        barriers.arrive(NamedBarrier.STATE_READY, thr.wg)

    # ---- chain: states at the start and at the end of a part

    @cute.jit
    def load_state(self, sched, queue: Int32, args, carry: Int64, part, thr):
        """Loads the state at the start of a part: that of the previous queue, the initial state, or zeros."""
        if part.continues:
            self.acquire_carry(sched, queue - sched.step, carry, thr)
        else:
            self.load_initial_state(args, part, thr)

    @cute.jit
    def store_state(self, sched, queue: Int32, args, carry: Int64, part, thr):
        """Stores the state at the end of a part: for the next queue, or as final state."""
        if part.cut:
            self.publish_carry(sched, queue, carry, thr)
        else:
            self.store_matrix(args.final_state, args, part, thr.half, thr)

    @cute.jit
    def load_carry_or_zeros(self, sched, queue: Int32, carry: Int64, part, thr):
        """Loads the state of the previous queue, or zeros, at the start of a part that has no initial state."""
        if part.continues:
            self.acquire_carry(sched, queue - sched.step, carry, thr)
        else:
            fragments.fill_zero(thr.accS)

    @cute.jit
    def acquire_carry(self, sched, queue: Int32, carry: Int64, thr):
        """Loads the state at the end of the first part of a queue, as soon as it is published."""
        schedule.wait_for_state(schedule.ring(sched, queue), thr.half)
        place = fragments.carry_address(carry, queue, self.config.carries, thr.half, thr.index)
        fragments.load_carry(place, thr.accS)

    @cute.jit
    def publish_carry(self, sched, queue: Int32, carry: Int64, thr):
        """Stores the state for the queue that continues the sequence, and publishes it."""
        place = fragments.carry_address(carry, queue, self.config.carries, thr.half, thr.index)
        fragments.store_carry(place, thr.accS)
        barriers.sync(NamedBarrier.CARRY_STORED, thr.wg, threads=WARPGROUP)
        if thr.index == 0:
            schedule.publish_state(schedule.ring(sched, queue), thr.half)

    @cute.jit
    def load_initial_state(self, args, part, thr):
        """Loads the initial state of a sequence, or zeros if there is none."""
        if args.initial_state == Int64(0):
            fragments.fill_zero(thr.accS)
        elif args.v_first > 0:
            cute.autovec_copy(
                self.state_fragment(args.initial_state, args, part, thr.half, thr, (HEAD_DIM, 1)), thr.accS
            )
        else:
            cute.autovec_copy(
                self.state_fragment(args.initial_state, args, part, thr.half, thr, (1, HEAD_DIM)), thr.accS
            )

    @cute.jit
    def store_matrix(self, states: Int64, args, part, half: Int32, thr):
        """Stores S as a half of the matrix of a sequence and head in ``states`` [N, HV, 128, 128] fp32, if there is
        such an array."""
        if states != Int64(0):
            if args.v_first > 0:
                cute.autovec_copy(thr.accS, self.state_fragment(states, args, part, half, thr, (HEAD_DIM, 1)))
            else:
                cute.autovec_copy(thr.accS, self.state_fragment(states, args, part, half, thr, (1, HEAD_DIM)))

    @cute.jit
    def save_state(self, sched, args, part, chunk: Int32, thr):
        """Stores S before a chunk of a part to ``states`` [slots, HV, 128, 128] fp32, unless the slot is beyond their end."""
        tokens = args.every * self.chunk
        slot = part.sequence * cute.ceil_div(sched.T, tokens)  # sequences as rows of B
        if sched.offset_bytes > 0:
            slot = Int32(part.token) // tokens + part.sequence
        slot += chunk // args.every
        if slot < args.state_count:
            address = args.states + (Int64(slot) * args.HV + part.head) * MATRIX_BYTES
            cute.autovec_copy(thr.accS, self.half_fragment(address, Float32, thr.half, thr, (1, HEAD_DIM)))

    def state_fragment(self, states, args, part, half, thr, stride):
        """Returns the thread's elements of a half of a matrix in ``states``, a tensor in global memory of the shape
        of accS.
        ``stride``: elements from a row of S^T to the next, and from a column to the next."""
        address = states + Int64(part.sequence * args.HV + part.head) * MATRIX_BYTES
        return self.half_fragment(address, Float32, half, thr, stride)

    def half_fragment(self, matrix: Int64, dtype, half, thr, stride):
        """Returns the same for the matrix at an address, in ``dtype``."""
        place = matrix + half * (HALF * stride[0] * (dtype.width // 8))
        pointer = cute.make_ptr(dtype, place, cute.AddressSpace.gmem, assumed_align=16)
        tile = cute.make_tensor(pointer, cute.make_layout((HALF, HEAD_DIM), stride=stride))
        # Computed anew for each state: offsets that are held over the loop of chunks would be spilled.
        thread = ptx.opaque(thr.index) & (WARPGROUP - 1)
        return thr.mma_state.get_slice(thread).partition_C(tile)
