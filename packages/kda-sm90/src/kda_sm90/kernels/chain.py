"""The chain: the chunks of one sequence and value head in order, the state in registers.

With v and the records of the preparation (Kd, Qd, Kg, Aqk, T, a), per chunk and in transposed form:

    X^T = v^T + S^T (-Kd)^T      R^T = X^T T^T      O^T = S^T Qd^T + R^T Aqk^T      S^T <- S^T diag(a) + R^T Kg

A warpgroup owns 64 rows of V. It keeps S^T [64, K] as fp32 accumulators for the whole sequence; the layout of
an accumulator is that of a register operand, so that S, X and R never pass through shared memory; they are
rounded to bf16 as operands only. The halves of V never meet: ``warpgroups`` says whether they share a CTA, and with it
the loads of records.

========== ========== ====================================================================================
role       warps      work
========== ========== ====================================================================================
chain      4 a half   wgmma, decay, rounding; O^T and states to shared memory
producer   1          waits for records, then bulk copies of them, as two rings: *early* (Kd, Qd, a) and *late*
                      (Kg, Aqk, T) operands, each with its own full and empty barriers; tells what it read
values     1          v of the early ring, by cp.async: rows that do not exist are zero
store      1 a half   O and intermediate states from shared to global memory, the rows that exist
========== ========== ====================================================================================

Each role goes through the parts of its stream (``schedule``) on its own, the rings run on.

Order of one chunk of 64 tokens in a chain warpgroup; ALU work stands behind wgmmas that are in flight:

    issue X | round O of the chunk before, hand it over | issue half of O (Qd) | wait X, round it
    issue R, the other half of O | decay S | wait R, round it
    issue S | v of the next chunk | issue O (Aqk) | wait S, round it | wait all

ptxas would move much of it to where nothing is in flight, or between the wgmmas of one product. So this order is kept by
branches that it cannot decide, and barriers are looked at ahead, for the answer takes a while. Products of chunks of 32
are too short for that: ptxas's own order is the faster one there (docs/kernels/chain.md).

The loop over chunks has no special first or last turn: behind the last chunk of a sequence the producer completes one
more turn of the early ring, without bytes, so that the prefetch of v needs no case of its own; and O of the chunk before
is handed over in every turn, the store warp dropping the one that is none.
"""

from types import SimpleNamespace

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from kda_cute.device import ptx
from kda_cute.records import decay_start, decay_units
from kda_sm90.config import HEAD_DIM, PrefillConfig
from kda_sm90.kernels import schedule
from kda_sm90.layouts import CARRY_BYTES, kg_layout, operand_layout, record_bytes, square_layout

HALF = HEAD_DIM // 2  # rows of V of a warpgroup
WARPGROUP = 128
RINGS = ((4, 4), (4, 3), (3, 3), (3, 2), (2, 2))  # stages of the early and the late ring, best first
# Records that the producer has asked for when it waits for the one before, to tell that it was read.
IN_FLIGHT = 2
# Registers of the chain's threads and of the others, of 65536: two chain warpgroups need more than a third.
CHAIN_REGISTERS, OTHER_REGISTERS = 224, 56

# Named barriers of a half, from 1 + 4 * half on.
O_READY, STATE_FREE, STATE_READY = range(3)
HANDED_OVER = 9  # and 10: of a chain warpgroup alone


class Chain:
    """What one CTA of ``THREADS`` threads does with the chunks of one stream, or of half of V of it.

    A sequence of no tokens passes its state on. Rows of o outside of sequences are not written. ``shared_bytes``:
    shared memory of the CTA, ``room`` at most.
    """

    #: What the two rings hold of a record, in the order in which it is asked for.
    EARLY, LATE = ("kd", "qd", "a"), ("t", "kg", "aqk")
    STORES = True  # whether there are O and intermediate states

    def __init__(self, config: PrefillConfig, room: int):
        self.config = config
        self.chunk = config.chunk
        self.warpgroups = config.warpgroups
        self.bytes = record_bytes(self.chunk)  # of an operand
        self.v_bytes = 2 * self.chunk * HALF * config.warpgroups
        self.o_bytes = 2 * self.chunk * HALF if self.STORES else 0
        self.state_bytes = 2 * HALF * HEAD_DIM if config.states else 0
        for self.early, self.late in RINGS:
            stages = dict.fromkeys(self.EARLY, self.early) | dict.fromkeys(self.LATE, self.late)
            decays = stages.pop("a")
            sizes = {  # images begin at multiples of 1024
                **{name: depth * self.bytes[name] for name, depth in stages.items()},
                "v": self.early * self.v_bytes,
                "o": config.warpgroups * self.o_bytes,
                "state": config.warpgroups * self.state_bytes,
                "a": decays * self.bytes["a"],
                "o_free": 8 * config.warpgroups,
                "early_full": 8 * self.early,
                "early_empty": 8 * self.early,
                "late_full": 8 * self.late,
                "late_empty": 8 * self.late,
            }
            self.shared_bytes = sum(sizes.values())
            if self.shared_bytes <= room:
                break
        self.at, end = {}, 0
        for name, size in sizes.items():
            self.at[name] = end
            end += size

    @cute.jit
    def run(self, shared: cute.Pointer, x, records, carry, s, stream: Int32, half: Int32):
        """``shared``: the CTA's bytes. ``x``: the call (``prefill``); ``records``, ``carry``: of the workspace;
        ``s``: the schedule. ``half``: of V, where the CTA has one warpgroup."""
        C = self.chunk
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        barriers = {
            name: cute.recast_ptr(shared + self.at[name], dtype=Int64)
            for name in ("early_full", "early_empty", "late_full", "late_empty", "o_free")
        }
        if thread == 0:
            # early: the producer, and every lane that copies v
            for name, depth, arrivals in (("early", self.early, 33), ("late", self.late, 1)):
                for i in cutlass.range_constexpr(depth):
                    cute.arch.mbarrier_init(barriers[name + "_full"] + i, arrivals)
                    cute.arch.mbarrier_init(barriers[name + "_empty"] + i, 4 * self.warpgroups)
            for i in cutlass.range_constexpr(self.warpgroups):
                cute.arch.mbarrier_init(barriers["o_free"] + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        base = Int32(shared.toint())
        places = {name: base + self.at[name] for name in (*self.EARLY, *self.LATE, "v", "o", "state")}
        p = SimpleNamespace(**barriers, **places)
        if warp >= 4 * self.warpgroups:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == 4 * self.warpgroups:
                self.produce(p, records, s, stream, half)
            if warp == 4 * self.warpgroups + 1:
                self.load_values(p, s, stream, x, half)
            if const_expr(self.STORES):  # noqa: SIM102 - decided while tracing
                if warp >= 4 * self.warpgroups + 2 and warp < 5 * self.warpgroups + 2:
                    self.store(p, s, stream, x, half)
        else:
            cute.arch.setmaxregister_increase(CHAIN_REGISTERS)

            def tensor(name, layout):
                pointer = cute.recast_ptr(shared + self.at[name], layout.inner, dtype=BFloat16)
                return cute.make_tensor(pointer, layout.outer)

            layouts = {"kd": operand_layout, "qd": operand_layout, "kg": kg_layout}
            tiles = {
                name: tensor(name, layouts.get(name, square_layout)(C, depth))
                for names, depth in ((self.EARLY, self.early), (self.LATE, self.late))
                for name in names
                if name != "a"
            }
            self.chain(p, s, stream, tiles, x, carry, half)

    def mma(self, b_major, n):
        """S^T or R^T, in registers, times a tile in shared memory."""
        return hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (HALF, n),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip

    # ---- producer, one warp

    @cute.jit
    def produce(self, p, records, order, stream: Int32, half: Int32):
        """Fill both rings, chunk by chunk."""
        lane = cute.arch.lane_idx()
        ring = schedule.ring(order, stream)
        early, late = Int32(0), Int32(0)
        early_phase, late_phase = Int32(1), Int32(1)
        head, n, high, low = schedule.first_task(order, stream)
        end = high
        while end > low:
            s = schedule.part(order, head, n, end, low, high)
            if lane == 0:
                schedule.tell(ring, half, s.number)  # all before it is read, numbers that nobody has included
            ready = Int32(0)
            for c in cutlass.range(s.chunks, unroll=1):
                while ready <= c:
                    ready = self.prepared(ring, s, c)
                if lane == 0:
                    record = schedule.record(ring, s.number + c)
                    self.load(p, records, record, early, early_phase, late, late_phase)
                early += 1
                if early == self.early:
                    early = Int32(0)
                    early_phase = early_phase ^ 1
                late += 1
                if late == self.late:
                    late = Int32(0)
                    late_phase = late_phase ^ 1
                if lane == 0 and c >= IN_FLIGHT:
                    self.wait_for_load(p, IN_FLIGHT + 1, early, early_phase, late, late_phase)
                    schedule.tell(ring, half, s.number + c - IN_FLIGHT + 1)
            if lane == 0:
                for back in cutlass.range_constexpr(1, IN_FLIGHT + 1):
                    if s.chunks >= back:
                        self.wait_for_load(p, back, early, early_phase, late, late_phase)
                cute.arch.mbarrier_wait(p.early_empty + early, early_phase)
                cute.arch.mbarrier_arrive(p.early_full + early)  # the prefetch behind the last chunk
            early += 1
            if early == self.early:
                early = Int32(0)
                early_phase = early_phase ^ 1
            end = s.begin
            head, n = schedule.next_task(order, head, n)
        if lane == 0:
            schedule.tell(ring, half, Int32(0x7FFFFFFF))  # nothing waits for this chain any more

    def prepared(self, ring, s, c):
        """Below which chunk of a part all records are ready, this one at least, if not more."""
        if self.config.mode == "run":  # all have been since before the launch
            return s.chunks
        return c + schedule.prepared(ring, s.number + c, cutlass.min(s.chunks - c, 32))

    def load(self, p, records, record, early, early_phase, late, late_phase):
        """One record to a stage of each ring, when the chain has left it."""
        ptx.fence_proxy_async()  # the record was written through the generic proxy
        for names, stage, phase, full, empty in (
            (self.EARLY, early, early_phase, p.early_full, p.early_empty),
            (self.LATE, late, late_phase, p.late_full, p.late_empty),
        ):
            cute.arch.mbarrier_wait(empty + stage, phase)
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, sum(self.bytes[name] for name in names))
            for name in names:
                size = self.bytes[name]
                self.bulk_load(getattr(p, name) + stage * size, records(name, record), size, full + stage)

    def wait_for_load(self, p, back, early, early_phase, late, late_phase):
        """Until the record of the load ``back`` before the next one is in shared memory; the next stages and their
        phases are given. One whose stage holds another since was read."""
        for full, depth, stage, phase in (
            (p.early_full, self.early, early, early_phase),
            (p.late_full, self.late, late, late_phase),
        ):
            if back > depth:
                continue
            behind = stage - back
            wrapped = behind < 0
            place = ptx.select(wrapped, behind + depth, behind)
            cute.arch.mbarrier_wait(full + place, ptx.select(wrapped, phase, phase ^ 1))

    def bulk_load(self, shared, address, size, barrier):
        """Copy ``size`` bytes (a multiple of 16), which nobody needs again, to shared memory; the barrier counts them."""
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
            read_only_args=[shared, address, Int32(size), Int32(barrier.toint()), Int64(ptx.EVICT_FIRST)],
        )

    # ---- values, one warp

    @cute.jit
    def load_values(self, p, order, stream: Int32, x, half: Int32):
        """Fill the early ring with v: an image [C, 64] of each half of V that the CTA has."""
        lane = cute.arch.lane_idx()
        units = 8 * self.warpgroups  # of 16 bytes, to a row
        step = 32 // units  # rows at once
        unit, first = lane % units, lane // units
        pitch = Int64(x.HV) * (2 * HEAD_DIM)
        early, phase = Int32(0), Int32(1)
        head, n, high, low = schedule.first_task(order, stream)
        end = high
        while end > low:
            s = schedule.part(order, head, n, end, low, high)
            source = x.v + (s.token * x.HV + s.head) * (2 * HEAD_DIM) + half * (2 * HALF) + unit * 16
            source += pitch * (s.first * self.chunk)
            for c in cutlass.range(s.chunks + 1, unroll=1):
                cute.arch.mbarrier_wait(p.early_empty + early, phase)
                valid = self.values_of(s.length - (s.first + c) * self.chunk, half)
                if c == s.chunks:  # none behind the last chunk
                    valid = Int32(0)
                place = p.v + early * self.v_bytes + unit // 8 * (self.chunk * 2 * HALF)
                for start in range(0, self.chunk, step):
                    row = start + first
                    to = place + row * (2 * HALF) + (unit % 8 ^ row % 8) * 16
                    ptx.cp_async_x4(to, source + pitch * row, row < valid)
                source += pitch * self.chunk
                ptx.cp_async_arrive(Int32((p.early_full + early).toint()))
                early += 1
                if early == self.early:
                    early = Int32(0)
                    phase = phase ^ 1
            end = s.begin
            head, n = schedule.next_task(order, head, n)

    def values_of(self, valid, half):
        """How many rows of v a chunk of ``valid`` rows has."""
        return valid

    # ---- store, one warp a half

    @cute.jit
    def store(self, p, order, stream: Int32, x, half: Int32):
        """O of each chunk, rows that exist, and states, from shared memory to where they belong."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = warp - 4 * self.warpgroups - 2
        self.free_o(p, wg)
        head, n, high, low = schedule.first_task(order, stream)
        end = high
        while end > low:
            s = schedule.part(order, head, n, end, low, high)
            self.store_part(p, order, s, x, half + wg, wg)
            end = s.begin
            head, n = schedule.next_task(order, head, n)

    @cute.jit
    def store_part(self, p, order, s, x, half, wg):
        o_row = Int64(x.HV) * (2 * HEAD_DIM)  # bytes from a token to the next
        o_chunk = x.o + (s.token * x.HV + s.head) * (2 * HEAD_DIM) + half * (2 * HALF)
        o_chunk += o_row * (s.first * self.chunk)
        number, left = Int32(0), Int32(0)
        if const_expr(self.config.states):
            left = self.states_of(s, x.every)
            number = self.states_before(order, s.sequence, x.every * self.chunk)
            number += cute.ceil_div(s.first, x.every)
            if left > 0:
                self.arrive(wg, STATE_FREE)
        for c in cutlass.range(s.chunks + 1, unroll=1):
            if const_expr(self.config.states):  # noqa: SIM102 - decided while tracing
                if c < s.chunks and (s.first + c) % x.every == 0:
                    self.sync(wg, STATE_READY)
                    self.store_matrix(p.state + wg * self.state_bytes, x, number, s.head, half)
                    number += 1
                    left -= 1
                    if left > 0:
                        self.arrive(wg, STATE_FREE)
            self.sync(wg, O_READY)
            valid = s.length - (s.first + c - 1) * self.chunk
            if c == 0:  # no chunk before the first
                valid = Int32(0)
            self.copy_out(
                p.o + wg * self.o_bytes, self.chunk, 2 * HALF, o_chunk - o_row * self.chunk, o_row, valid
            )
            o_chunk += o_row * self.chunk
            self.free_o(p, wg)

    def free_o(self, p, wg):
        """Let the chain have the image of O: what was in it has been read."""
        cute.arch.sync_warp()
        self.release(p.o_free + wg)

    @cute.jit
    def store_matrix(self, shared: Int32, x, number: Int32, head: Int32, half: Int32):
        """Half of a state, as image, to number ``number`` of the bf16 states, if it is there."""
        matrix = x.states + (Int64(number) * x.HV + head) * (2 * HEAD_DIM * HEAD_DIM)
        exists = number < x.state_count
        row = Int64(2 * HEAD_DIM)
        if x.v_first > 0:
            rows = ptx.select(exists, Int32(HALF), Int32(0))
            self.copy_out(shared, HALF, 2 * HEAD_DIM, matrix + half * (2 * HALF * HEAD_DIM), row, rows)
        else:
            rows = ptx.select(exists, Int32(HEAD_DIM), Int32(0))
            self.copy_out(shared, HEAD_DIM, 2 * HALF, matrix + half * (2 * HALF), row, rows)

    def states_of(self, s, every):
        """How many states are written in a part: one for each of its chunks whose number ``every`` divides."""
        return cute.ceil_div(s.first + s.chunks, every) - cute.ceil_div(s.first, every)

    @cute.jit
    def states_before(self, order, sequence: Int32, every: Int32) -> Int32:
        """How many states, one for ``every`` tokens begun, the sequences before this one have, counted by a warp."""
        count = sequence * cute.ceil_div(order.T, every)
        if order.offset_bytes > 0:
            count = Int32(0)
            for n in cutlass.range(cute.arch.lane_idx(), sequence, 32, unroll=1):
                _, length, _, _ = schedule.extent(order, n)
                count += cute.ceil_div(length, every)
            for i in cutlass.range_constexpr(5):
                count += cute.arch.shuffle_sync_bfly(count, 1 << i)
        return count

    def copy_out(self, shared, rows, pitch, address, stride, valid):
        """A swizzled image of ``rows`` rows of ``pitch`` bytes to global rows ``stride`` bytes apart; by a
        warp, the first ``valid`` rows."""
        lane = cute.arch.lane_idx()
        units = pitch // 16
        row, unit = lane // units, lane % units
        step = 32 // units  # rows at once
        for start in range(0, rows, 4 * step):
            batch = [start + i * step + row for i in range(4)]
            values = [ptx.load_shared_x4(shared + r * pitch + ((unit ^ (r % 8)) * 16), Int32) for r in batch]
            for r, value in zip(batch, values, strict=True):
                cute.arch.inline_ptx(
                    "st.global.cs.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[address + stride * r + unit * 16, *value],
                    predicate=r < valid,
                )

    # ---- chain, a warpgroup a half

    @cute.jit
    def chain(self, p, order, stream: Int32, tiles, x, carry: Int64, half: Int32):
        """The recurrence over every part of the stream."""
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        lane = thread % 32
        mma_tokens = self.mma(OperandMajorMode.K, self.chunk)
        mma_state = self.mma(OperandMajorMode.MN, HEAD_DIM)
        tokens, channels = mma_tokens.get_slice(thread), mma_state.get_slice(thread)

        tCsKd = tokens.make_fragment_B(tokens.partition_B(tiles["kd"]))
        tCsQd = tokens.make_fragment_B(tokens.partition_B(tiles["qd"]))
        tCsKg = channels.make_fragment_B(channels.partition_B(tiles["kg"]))
        tCsAqk = tokens.make_fragment_B(tokens.partition_B(tiles["aqk"]))
        tCsT = tokens.make_fragment_B(tokens.partition_B(tiles["t"]))
        shape = mma_tokens.partition_shape_C((HALF, self.chunk))
        accX = cute.make_rmem_tensor(shape, Float32)  # and then R
        accO = cute.make_rmem_tensor(shape, Float32)
        accS = cute.make_rmem_tensor(mma_state.partition_shape_C((HALF, HEAD_DIM)), Float32)
        tCrS = cute.make_rmem_tensor(mma_tokens.partition_shape_A((HALF, HEAD_DIM)), BFloat16)
        tCrX = cute.make_rmem_tensor(mma_state.partition_shape_A((HALF, self.chunk)), BFloat16)  # and then R
        rO = cute.make_rmem_tensor(cute.size(shape) // 2, Int32)

        v = p.v + wg * (self.chunk * HALF * 2)
        a = p.a + decay_start(lane % 4)
        early, late = Int32(0), Int32(0)
        early_phase, late_phase, o_phase = Int32(0), Int32(0), Int32(0)
        half_k = HEAD_DIM // 32
        steps = self.chunk // 16
        kept = self.chunk == 64  # whether the order is that of the module's docstring, not ptxas's
        always = x.depth > 0  # a branch on it holds instructions where they are: ptxas does not know
        head, n, high, low = schedule.first_task(order, stream)
        end = high
        while end > low:
            s = schedule.part(order, head, n, end, low, high)
            matrix = Int64(s.sequence * x.HV + s.head) * (4 * HEAD_DIM * HEAD_DIM)
            if s.first > 0:
                self.take_over(order, stream - 1, carry, half + wg, thread, accS)
            else:
                self.load_state(x, matrix, half + wg, thread, accS)
            self.round(accS, tCrS)
            accO.fill(0.0)
            cute.arch.mbarrier_wait(p.early_full + early, early_phase)
            self.load_v(v + early * self.v_bytes, thread, accX)
            if const_expr(kept):  # for the first O that is handed over; for the others, a turn before
                cute.arch.mbarrier_wait(p.o_free + wg, o_phase)
            for c in cutlass.range(s.chunks, unroll=1):
                # Nothing is in flight here; ptxas knows that only if a wait stands between it and the loop's start.
                warpgroup.wait_group(0)
                if const_expr(self.config.states):  # noqa: SIM102 - the outer one is decided while tracing
                    if (s.first + c) % x.every == 0:
                        self.hand_over_state(p, x.v_first, wg, thread, tCrS)
                if const_expr(kept):
                    seen = cute.arch.mbarrier_try_wait(p.late_full + late, late_phase)
                    self.gemm(mma_tokens, accX, tCrS, tCsKd, early, range(2 * half_k))
                    self.wait(p.late_full + late, late_phase, seen)
                    factors = self.load_decay(a + early * (4 * HEAD_DIM))
                    if always:
                        self.round(accO, rO)
                        self.hand_over_o(p, wg, thread, rO)
                    o_phase = o_phase ^ 1
                    self.gemm(mma_tokens, accO, tCrS, tCsQd, early, range(half_k), zero=True)
                    warpgroup.wait_group(1)  # X
                    self.round(accX, tCrX)
                    self.gemm(mma_tokens, accX, tCrX, tCsT, late, range(steps), zero=True)
                    self.gemm(mma_tokens, accO, tCrS, tCsQd, early, range(half_k, 2 * half_k))
                    if always:
                        self.decay(factors, accS)
                    used = early
                    early += 1
                    if early == self.early:
                        early = Int32(0)
                        early_phase = early_phase ^ 1
                    seen = cute.arch.mbarrier_try_wait(p.early_full + early, early_phase)
                    warpgroup.wait_group(1)  # R
                    self.round(accX, tCrX)
                    self.gemm(mma_state, accS, tCrX, tCsKg, late, range(steps))
                    self.wait(p.early_full + early, early_phase, seen)
                    seen = cute.arch.mbarrier_try_wait(p.o_free + wg, o_phase)
                    if always:
                        self.load_v(v + early * self.v_bytes, thread, accX)
                    self.gemm(mma_tokens, accO, tCrX, tCsAqk, late, range(steps))
                    self.wait(p.o_free + wg, o_phase, seen)
                    warpgroup.wait_group(1)  # S
                    self.release(p.early_empty + used)
                    if always:
                        self.round(accS, tCrS)
                    warpgroup.wait_group(0)
                    self.release(p.late_empty + late)
                else:
                    self.gemm(mma_tokens, accX, tCrS, tCsKd, early, range(2 * half_k))
                    self.round(accO, rO)
                    self.gemm(mma_tokens, accO, tCrS, tCsQd, early, range(half_k), zero=True)
                    cute.arch.mbarrier_wait(p.o_free + wg, o_phase)
                    self.hand_over_o(p, wg, thread, rO)
                    o_phase = o_phase ^ 1
                    warpgroup.wait_group(1)  # X
                    self.round(accX, tCrX)
                    cute.arch.mbarrier_wait(p.late_full + late, late_phase)
                    factors = self.load_decay(a + early * (4 * HEAD_DIM))
                    self.gemm(mma_tokens, accX, tCrX, tCsT, late, range(steps), zero=True)
                    self.gemm(mma_tokens, accO, tCrS, tCsQd, early, range(half_k, 2 * half_k))
                    self.decay(factors, accS)
                    warpgroup.wait_group(1)  # R
                    self.round(accX, tCrX)
                    self.gemm(mma_state, accS, tCrX, tCsKg, late, range(steps))
                    self.gemm(mma_tokens, accO, tCrX, tCsAqk, late, range(steps))
                    used = early
                    early += 1
                    if early == self.early:
                        early = Int32(0)
                        early_phase = early_phase ^ 1
                    cute.arch.mbarrier_wait(p.early_full + early, early_phase)
                    self.load_v(v + early * self.v_bytes, thread, accX)
                    warpgroup.wait_group(1)  # S
                    self.release(p.early_empty + used)
                    self.round(accS, tCrS)
                    warpgroup.wait_group(0)
                    self.release(p.late_empty + late)
                late += 1
                if late == self.late:
                    late = Int32(0)
                    late_phase = late_phase ^ 1
            self.release(p.early_empty + early)  # the stage without bytes
            self.round(accO, rO)
            if const_expr(not kept):
                cute.arch.mbarrier_wait(p.o_free + wg, o_phase)
            self.hand_over_o(p, wg, thread, rO)
            o_phase = o_phase ^ 1
            early += 1
            if early == self.early:
                early = Int32(0)
                early_phase = early_phase ^ 1
            if s.cut:
                self.hand_over(order, stream, carry, half + wg, wg, thread, accS)
            else:
                self.store_state(x.final_state, matrix, x.v_first, half + wg, thread, accS)
            end = s.begin
            head, n = schedule.next_task(order, head, n)

    def gemm(self, mma, acc, tCrA, tCsB, stage, steps, zero=False):
        """Issue ``acc (+)= A B`` over the k16 steps, one group of wgmmas."""
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not zero)
        warpgroup.fence()
        for k in steps:
            cute.gemm(atom, acc, tCrA[None, None, k], tCsB[None, None, k, stage], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    # Volatile PTX below: LLVM would sink pure operations past the next wait.

    def round(self, acc, bf16):
        """fp32 accumulators to bf16x2 in the same order, which is that of a register operand."""
        pairs = cute.size(acc) // 2
        words = cute.make_tensor(cute.recast_ptr(bf16.iterator, dtype=Int32), cute.make_layout(pairs))
        for i in range(pairs):
            words[i] = cute.arch.inline_ptx(
                "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};",
                write_only_types=[Int32],
                read_only_args=[acc[2 * i + 1], acc[2 * i]],
            )

    def load_v(self, shared, thread, acc):
        """Accumulators from the image [C, 64] of v: two 8x8 matrices of 8 tokens, transposed, for each of two row
        halves."""
        warp, lane = thread // 32, thread % 32
        matrix, token = lane // 8, lane % 8
        place = shared + (8 * (matrix // 2) + token) * (2 * HALF) + ((2 * warp + matrix % 2) ^ token) * 16
        for i in range(self.chunk // 16):
            for j, pair in enumerate(ptx.ldmatrix_x4(place + i * (16 * 2 * HALF), transpose=True)):
                acc[8 * i + 2 * j], acc[8 * i + 2 * j + 1] = cute.arch.inline_ptx(
                    "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;",
                    write_only_types=[Float32, Float32],
                    read_only_args=[pair],
                )

    def load_decay(self, shared):
        """The decays of a thread's columns 8j + 2*(lane%4) + 0..1, j < 16. ``shared``: the address of the first unit."""
        return [x for place in decay_units(shared) for x in ptx.load_shared_x4(place, Float32)]

    def decay(self, factors, acc):
        """S^T diag(a): element (e, r, j) of the accumulator is in column 8j + 2*(lane%4) + e."""
        for j in range(HEAD_DIM // 8):
            for i in range(4):
                acc[4 * j + i] = cute.arch.inline_ptx(
                    "mul.rn.f32 {$w0}, {$r0}, {$r1};",
                    write_only_types=[Float32],
                    read_only_args=[acc[4 * j + i], factors[2 * j + i % 2]],
                )

    @cute.jit
    def wait(self, barrier, phase: Int32, seen):
        """For a barrier that was looked at before, while something else was under way."""
        if not seen:
            cute.arch.mbarrier_wait(barrier, phase)

    def hand_over_o(self, p, wg, thread, rO):
        """O^T to shared memory as an image of O [C, 64], when the store warp has left it, of which an mbarrier tells
        (``o_free``): a barrier would make the warps wait for one another."""
        self.put_transposed(p.o + wg * self.o_bytes, thread, rO, self.chunk)
        self.arrive(wg, O_READY)

    @cute.jit
    def hand_over_state(self, p, v_first: Int32, wg: Int32, thread: Int32, tCrS: cute.Tensor):
        """S to shared memory, rounded as it is for wgmma, as an image of its half of a matrix in global memory."""
        words = cute.make_tensor(
            cute.recast_ptr(tCrS.iterator, dtype=Int32), cute.make_layout(HEAD_DIM // 2 // 2)
        )
        shared = p.state + wg * self.state_bytes
        self.sync(wg, STATE_FREE)
        if v_first > 0:
            self.put(shared, thread, words)
        else:
            self.put_transposed(shared, thread, words, HEAD_DIM)
        self.arrive(wg, STATE_READY)

    def put(self, shared, thread, words):
        """A fragment [64, 128], bf16x2, as a swizzled image of rows of 256 bytes."""
        warp, lane = thread // 32, thread % 32
        matrix, row = lane // 8, lane % 8
        start = shared + (16 * warp + 8 * (matrix % 2) + row) * (2 * HEAD_DIM)
        for i in range(HEAD_DIM // 16):
            place = start + ((2 * i + matrix // 2) ^ row) * 16
            ptx.stmatrix_x4(place, [words[4 * i + j] for j in range(4)])

    def put_transposed(self, shared, thread, words, rows):
        """The transpose of a fragment [64, rows], bf16x2, as a swizzled image of rows of 128 bytes."""
        warp, lane = thread // 32, thread % 32
        matrix, row = lane // 8, lane % 8
        place = shared + (8 * (matrix // 2) + row) * (2 * HALF) + ((2 * warp + matrix % 2) ^ row) * 16
        for i in range(rows // 16):
            cute.arch.inline_ptx(
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[place + i * (16 * 2 * HALF), *(words[4 * i + j] for j in range(4))],
            )

    def release(self, barrier):
        """One arrival of the warp, without a branch. Which lane is elected: a lane's number would be read again each time,
        which takes longer."""
        cute.arch.inline_ptx(
            "{ .reg .pred first; elect.sync _|first, 0xffffffff; "
            "@first mbarrier.arrive.release.cta.shared::cta.b64 _, [{$r0}]; }",
            read_only_args=[Int32(barrier.toint())],
        )

    # ---- named barriers between a chain warpgroup and its store warp

    def sync(self, wg, name):
        cute.arch.barrier(barrier_id=1 + 4 * wg + name, number_of_threads=WARPGROUP + 32)

    def arrive(self, wg, name):
        cute.arch.barrier_arrive(barrier_id=1 + 4 * wg + name, number_of_threads=WARPGROUP + 32)

    # ---- fp32 states

    def element(self, matrix, half, thread, v_step, k_step):
        """The address, in a matrix, of the element (0, 0, 0) of a thread's accumulator; bytes from a row of S^T to the
        next, and from a column to the next, are given."""
        row = half * HALF + 16 * (thread // 32) + thread % 32 // 4
        return matrix + row * v_step + 2 * (thread % 4) * k_step

    def carried(self, carry, stream, half, thread):
        """Where a thread's share of a state lies that a stream hands over: 16 bytes of each thread side by side."""
        return carry + (Int64(stream) * self.config.halves + half) * CARRY_BYTES + thread * 16

    @cute.jit
    def take_over(self, order, stream: Int32, carry: Int64, half: Int32, thread: Int32, acc: cute.Tensor):
        """The state at the end of the first part of a stream, as soon as it is there."""
        schedule.wait_for_state(schedule.ring(order, stream), half)
        place = self.carried(carry, stream, half, thread)
        for i in cutlass.range_constexpr(HEAD_DIM // 8):
            acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3] = cute.arch.inline_ptx(
                "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Float32, Float32, Float32, Float32],
                read_only_args=[place + i * (16 * WARPGROUP)],
            )

    @cute.jit
    def hand_over(
        self, order, stream: Int32, carry: Int64, half: Int32, wg: Int32, thread: Int32, acc: cute.Tensor
    ):
        """The state to the stream that goes on with the sequence."""
        place = self.carried(carry, stream, half, thread)
        for i in cutlass.range_constexpr(HEAD_DIM // 8):
            cute.arch.inline_ptx(
                "st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[place + i * (16 * WARPGROUP), *(acc[4 * i + j] for j in range(4))],
            )
        cute.arch.barrier(barrier_id=HANDED_OVER + wg, number_of_threads=WARPGROUP)
        if thread == 0:
            schedule.hand_over(schedule.ring(order, stream), half)

    @cute.jit
    def load_state(self, x, matrix: Int64, half: Int32, thread: Int32, acc: cute.Tensor):
        """The initial state; zeros where there is none."""
        row = 4 * HEAD_DIM
        if x.initial_state == Int64(0):
            acc.fill(0.0)
        elif x.v_first > 0:
            first = self.element(x.initial_state + matrix, half, thread, row, 4)
            for i in cutlass.range_constexpr(HEAD_DIM // 4):
                acc[2 * i], acc[2 * i + 1] = cute.arch.inline_ptx(
                    "ld.global.nc.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
                    write_only_types=[Float32, Float32],
                    read_only_args=[first + (8 * (i % 2) * row + 8 * (i // 2) * 4)],
                )
        else:
            first = self.element(x.initial_state + matrix, half, thread, 4, row)
            for i in cutlass.range_constexpr(HEAD_DIM // 4):
                for e in range(2):
                    acc[2 * i + e] = cute.arch.inline_ptx(
                        "ld.global.nc.f32 {$w0}, [{$r0}];",
                        write_only_types=[Float32],
                        read_only_args=[first + (8 * (i % 2) * 4 + (8 * (i // 2) + e) * row)],
                    )

    @cute.jit
    def store_state(
        self, states: Int64, matrix: Int64, v_first: Int32, half: Int32, thread: Int32, acc: cute.Tensor
    ):
        """A final state to its place in an array, if there is one."""
        row = 4 * HEAD_DIM
        if states != Int64(0):
            if v_first > 0:
                first = self.element(states + matrix, half, thread, row, 4)
                for i in cutlass.range_constexpr(HEAD_DIM // 4):
                    cute.arch.inline_ptx(
                        "st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                        read_only_args=[
                            first + (8 * (i % 2) * row + 8 * (i // 2) * 4),
                            acc[2 * i],
                            acc[2 * i + 1],
                        ],
                    )
            else:
                first = self.element(states + matrix, half, thread, 4, row)
                for i in cutlass.range_constexpr(HEAD_DIM // 4):
                    for e in range(2):
                        ptx.store_global(first + (8 * (i % 2) * 4 + (8 * (i // 2) + e) * row), acc[2 * i + e])
