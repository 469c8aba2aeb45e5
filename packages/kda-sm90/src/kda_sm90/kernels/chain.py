"""K2, the chain: the chunks of one sequence and value head in order, the state in registers.

With the records of the preparation (w, u, Qd, Kg, Aqk, a), per chunk and in transposed form:

    R^T = u^T + S^T (-w)^T      O^T = S^T Qd^T + R^T Aqk^T      S^T <- S^T diag(a) + R^T Kg

A warpgroup owns 64 rows of V. It keeps S^T [64, K] as fp32 accumulators for the whole sequence; the layout of
an accumulator is that of a register operand, so that neither S nor R ever passes through shared memory. S and
R are rounded to bf16 as operands only. The halves of V never meet: ``warpgroups`` says whether they share a
CTA, and with it the loads of w, Qd, Kg and Aqk.

========== ========== ====================================================================================
role       warps      work
========== ========== ====================================================================================
chain      4 a half   wgmma, decay, rounding; O^T and states to shared memory
producer   1          one thread: bulk copies of records, as two rings: *early* (w, u, Qd, a) and *late*
                      (Kg, Aqk) operands, each with its own full and empty barriers
store      1 a half   O and intermediate states from shared to global memory, the rows that exist
========== ========== ====================================================================================

Order of one chunk in a chain warpgroup; ALU work stands behind wgmmas that are in flight:

    issue R | round O of the chunk before | issue O (Qd), hand O over | decay S | wait R, round it
    issue S, O (Aqk) | u of the next chunk | wait S, round it | wait all

The loop has no special first or last turn: the producer completes one turn more than there are chunks, without
bytes, so that the prefetch of u needs no branch (a branch between issue and wait would serialise wgmmas); and
O of the chunk before is handed over in every turn, the store warp dropping the one that is none.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.utils import hopper_helpers

from kda_core.cute import device as dev
from kda_sm90.config import HEAD_DIM, ChainConfig
from kda_sm90.kernels.interface import clamped, fake_offsets, fake_tensor, fake_workspace, record
from kda_sm90.layouts import aqk_layout, kg_layout, operand_layout

HALF = HEAD_DIM // 2  # rows of V of a warpgroup
WARPGROUP = 128
SHARED_BYTES = 227 * 1024  # what a CTA of sm_90 may have
RINGS = ((4, 4), (4, 3), (3, 3), (3, 2), (2, 2))  # stages of the early and the late ring, best first
# Registers of the chain's threads and of the others, of 65536: two chain warpgroups need more than a third.
CHAIN_REGISTERS, OTHER_REGISTERS = 224, 56

# Named barriers of a half, from 1 + 4 * half on.
O_FREE, O_READY, STATE_FREE, STATE_READY = range(4)


class ChainKernel:
    """The records of ``layouts.Workspace``, cu_seqlens [N+1] or None, initial_state [N,HV,128,128] fp32 or
    None -> o [B,T,HV,128] bf16, final_state [N,HV,128,128] fp32 or None, states [B,NT,HV,128,128] bf16 or None.

    States are [K, V], or [V, K] with ``v_first``. Sequences are rows of B (N = B), or with cu_seqlens are packed
    along T (B = 1), its contents clamped to [0, T]. ``states`` are those at the start of every
    ``config.states`` tokens of a sequence; NT is that count for one sequence, or its sum over packed ones, in
    their order. A sequence of no tokens passes its state on. Rows of o outside of sequences are not written.
    """

    def __init__(self, config: ChainConfig):
        self.config = config
        self.chunk = config.chunk
        self.warpgroups = config.warpgroups
        # setmaxnreg takes whole warpgroups; one chain warpgroup does without it
        self.threads = WARPGROUP * config.warpgroups + (64 if config.warpgroups == 1 else WARPGROUP)
        wide = 2 * self.chunk * HEAD_DIM  # bytes
        self.u_bytes = wide // 2 * config.warpgroups
        self.o_bytes = 2 * self.chunk * HALF
        self.state_bytes = 2 * HALF * HEAD_DIM if config.states else 0
        self.early_bytes = 2 * wide + self.u_bytes + 4 * HEAD_DIM
        self.late_bytes = wide + 2 * self.chunk * self.chunk
        room = SHARED_BYTES - 1024 - config.warpgroups * (self.o_bytes + self.state_bytes)
        self.early, self.late = next(
            (early, late)
            for early, late in RINGS
            if early * self.early_bytes + late * self.late_bytes <= room
        )

    def fake_args(self) -> tuple:
        config = self.config
        B, T, N, HV, NT = (cute.sym_int() for _ in range(5))

        def state(wanted, dtype, *shape):
            return fake_tensor(dtype, *shape, HV, HEAD_DIM, HEAD_DIM) if wanted else None

        return (
            *fake_workspace(self.chunk),
            fake_offsets(config.offsets),
            state(config.initial_state, Float32, N),
            fake_tensor(BFloat16, B, T, HV, HEAD_DIM),
            state(config.final_state, Float32, N),
            state(config.states, BFloat16, B, NT),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        w: cute.Tensor,
        qd: cute.Tensor,
        kg: cute.Tensor,
        aqk: cute.Tensor,
        u: cute.Tensor,
        a: cute.Tensor,
        offsets: cute.Tensor | None,
        initial_state: cute.Tensor | None,
        o: cute.Tensor,
        final_state: cute.Tensor | None,
        states: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        C = self.chunk
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

        def mma(b_major, n):
            return hopper_helpers.make_trivial_tiled_mma(
                BFloat16, BFloat16, k_major, b_major, Float32, (1, 1, 1), (HALF, n),
                warpgroup.OperandSource.RMEM,
            )  # fmt: skip

        layouts = operand_layout(C, self.early), kg_layout(C, self.late), aqk_layout(C, self.late)
        operand, kg_l, aqk_l = layouts

        def image(layout):
            return cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout)], 1024]

        def raw(size):
            return cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, size], 128]

        @cute.struct
        class Storage:
            w: image(operand)
            qd: image(operand)
            kg: image(kg_l)
            aqk: image(aqk_l)
            u: raw(self.early * self.u_bytes)
            a: raw(self.early * 4 * HEAD_DIM)
            o: raw(self.warpgroups * self.o_bytes)
            state: raw(max(self.warpgroups * self.state_bytes, 128))
            early_full: cute.struct.MemRange[Int64, self.early]
            early_empty: cute.struct.MemRange[Int64, self.early]
            late_full: cute.struct.MemRange[Int64, self.late]
            late_empty: cute.struct.MemRange[Int64, self.late]

        self.storage = Storage
        sequences = o.shape[0] if const_expr(offsets is None) else offsets.shape[0] - 1
        self.kernel(
            mma(k_major, C), mma(mn_major, HEAD_DIM), *layouts,
            w, qd, kg, aqk, u, a, offsets, initial_state, o, final_state, states,
        ).launch(
            grid=(sequences * o.shape[2] * (2 // self.warpgroups), 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent; otherwise the DSL asks a device, at compile time
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mma_tokens: cute.TiledMma,
        mma_state: cute.TiledMma,
        operand: cute.ComposedLayout,
        kg_l: cute.ComposedLayout,
        aqk_l: cute.ComposedLayout,
        w: cute.Tensor,
        qd: cute.Tensor,
        kg: cute.Tensor,
        aqk: cute.Tensor,
        u: cute.Tensor,
        a: cute.Tensor,
        offsets: cute.Tensor | None,
        initial_state: cute.Tensor | None,
        o: cute.Tensor,
        final_state: cute.Tensor | None,
        states: cute.Tensor | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        T, HV = o.shape[1], o.shape[2]
        # The CTAs of the two halves of V are neighbours: what both read is in L2 for the second one.
        halves = 2 // self.warpgroups
        half, pair = index % halves, index // halves
        sequence, head = pair // HV, pair % HV
        if const_expr(offsets is None):
            length = T
            slot = sequence * cute.ceil_div(T, self.chunk)
            token = Int64(sequence) * T
        else:
            start = clamped(offsets, sequence, Int32(0), T)
            length = clamped(offsets, sequence + 1, start, T) - start
            slot = start // self.chunk + sequence
            token = Int64(start)
        chunks = cute.ceil_div(length, self.chunk)

        s = dev.shared_allocator().allocate(self.storage)
        early_full, early_empty = s.early_full.data_ptr(), s.early_empty.data_ptr()
        late_full, late_empty = s.late_full.data_ptr(), s.late_empty.data_ptr()
        if thread == 0:
            for i in cutlass.range_constexpr(self.early):
                cute.arch.mbarrier_init(early_full + i, 1)
                cute.arch.mbarrier_init(early_empty + i, 4 * self.warpgroups)
            for i in cutlass.range_constexpr(self.late):
                cute.arch.mbarrier_init(late_full + i, 1)
                cute.arch.mbarrier_init(late_empty + i, 4 * self.warpgroups)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        p = SimpleNamespace(
            chunks=chunks,
            length=length,
            early_full=early_full,
            early_empty=early_empty,
            late_full=late_full,
            late_empty=late_empty,
            w=Int32(s.w.data_ptr().toint()),
            qd=Int32(s.qd.data_ptr().toint()),
            kg=Int32(s.kg.data_ptr().toint()),
            aqk=Int32(s.aqk.data_ptr().toint()),
            u=Int32(s.u.data_ptr().toint()),
            a=Int32(s.a.data_ptr().toint()),
            o=Int32(s.o.data_ptr().toint()),
            state=Int32(s.state.data_ptr().toint()),
        )
        if warp >= 4 * self.warpgroups:
            if const_expr(self.warpgroups == 2):
                cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if thread == WARPGROUP * self.warpgroups:
                self.produce(p, (w, qd, kg, aqk, u, a), slot * HV + head, HV, half)
            if warp > 4 * self.warpgroups and warp <= 5 * self.warpgroups:
                self.store(p, offsets, o, states, sequence, token, head, half)
        else:
            if const_expr(self.warpgroups == 2):
                cute.arch.setmaxregister_increase(CHAIN_REGISTERS)
            tiles = (
                s.w.get_tensor(operand.outer, swizzle=operand.inner),
                s.qd.get_tensor(operand.outer, swizzle=operand.inner),
                s.kg.get_tensor(kg_l.outer, swizzle=kg_l.inner),
                s.aqk.get_tensor(aqk_l.outer, swizzle=aqk_l.inner),
            )
            matrix = Int64(sequence * HV + head) * (4 * HEAD_DIM * HEAD_DIM)
            self.chain(p, mma_tokens, mma_state, tiles, initial_state, final_state, matrix, half)

    # ---- producer, one thread

    @cute.jit
    def produce(self, p, workspace, first: Int32, HV: Int32, half: Int32):
        """Fill both rings, chunk by chunk. ``first``: record of the first chunk; the next is HV further."""
        early, late = Int32(0), Int32(0)
        early_phase, late_phase = Int32(1), Int32(1)
        for c in cutlass.range(p.chunks + 1, unroll=1):
            number = Int64(first) + Int64(c) * HV
            full = p.early_full + early
            cute.arch.mbarrier_wait(p.early_empty + early, early_phase)
            if c < p.chunks:
                w, qd, _, _, u, a = (record(array, number) for array in workspace)
                wide = 2 * self.chunk * HEAD_DIM
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.early_bytes)
                self.bulk_load(p.w + early * wide, w, wide, full)
                self.bulk_load(p.u + early * self.u_bytes, u + half * self.u_bytes, self.u_bytes, full)
                self.bulk_load(p.qd + early * wide, qd, wide, full)
                self.bulk_load(p.a + early * (4 * HEAD_DIM), a, 4 * HEAD_DIM, full)
                full = p.late_full + late
                square = 2 * self.chunk * self.chunk
                cute.arch.mbarrier_wait(p.late_empty + late, late_phase)
                _, _, kg, aqk, _, _ = (record(array, number) for array in workspace)
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.late_bytes)
                self.bulk_load(p.kg + late * wide, kg, wide, full)
                self.bulk_load(p.aqk + late * square, aqk, square, full)
            else:
                cute.arch.mbarrier_arrive(full)  # the prefetch behind the last chunk waits for nothing
            early += 1
            if early == self.early:
                early = Int32(0)
                early_phase = early_phase ^ 1
            late += 1
            if late == self.late:
                late = Int32(0)
                late_phase = late_phase ^ 1

    def bulk_load(self, shared, address, size, barrier):
        """Copy ``size`` bytes (a multiple of 16) to shared memory; the barrier counts them."""
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[shared, address, Int32(size), Int32(barrier.toint())],
        )

    # ---- store, one warp a half

    @cute.jit
    def store(
        self, p, offsets, o: cute.Tensor, states, sequence: Int32, token: Int64, head: Int32, half: Int32
    ):
        """O of each chunk, rows that exist, and states, from shared memory to where they belong."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = warp - 4 * self.warpgroups - 1
        HV = o.shape[2]
        half = half + wg
        o_row = Int64(HV) * (2 * HEAD_DIM)  # bytes from a token to the next
        o_chunk = dev.address_of(o) + (token * HV + head) * (2 * HEAD_DIM) + half * (2 * HALF)
        if const_expr(self.config.states):
            NT = states.shape[1]
            number = sequence * NT
            limit = number + NT
            if const_expr(offsets is not None):
                number, limit = self.states_before(offsets, sequence, o.shape[1]), NT
            self.arrive(wg, STATE_FREE)
        self.arrive(wg, O_FREE)
        for c in cutlass.range(p.chunks + 1, unroll=1):
            if const_expr(self.config.states):
                every = self.config.states // self.chunk
                if c < p.chunks and c % every == 0:
                    self.sync(wg, STATE_READY)
                    matrix = (Int64(number) * HV + head) * (2 * HEAD_DIM * HEAD_DIM)
                    rows = HALF if self.config.v_first else HEAD_DIM
                    pitch = 2 * HEAD_DIM if self.config.v_first else 2 * HALF
                    matrix += dev.address_of(states) + half * (
                        HALF * (HEAD_DIM if self.config.v_first else 1) * 2
                    )
                    valid = Int32(0)
                    if number < limit:
                        valid = Int32(rows)
                    self.copy_out(
                        p.state + wg * self.state_bytes, rows, pitch, matrix, Int64(2 * HEAD_DIM), valid
                    )
                    if c + every < p.chunks:
                        self.arrive(wg, STATE_FREE)
                    number += 1
            self.sync(wg, O_READY)
            valid = p.length - (c - 1) * self.chunk
            if c == 0:  # no chunk before the first
                valid = Int32(0)
            self.copy_out(
                p.o + wg * self.o_bytes, self.chunk, 2 * HALF, o_chunk - o_row * self.chunk, o_row, valid
            )
            o_chunk += o_row * self.chunk
            if c < p.chunks:
                self.arrive(wg, O_FREE)

    @cute.jit
    def states_before(self, offsets: cute.Tensor, sequence: Int32, T: Int32) -> Int32:
        """How many states the packed sequences before this one have, counted by a warp."""
        count = Int32(0)
        for n in cutlass.range(cute.arch.lane_idx(), sequence, 32, unroll=1):
            start = clamped(offsets, n, Int32(0), T)
            count += cute.ceil_div(clamped(offsets, n + 1, start, T) - start, self.config.states)
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
            values = [dev.load_shared_x4(shared + r * pitch + ((unit ^ (r % 8)) * 16), Int32) for r in batch]
            for r, value in zip(batch, values, strict=True):
                cute.arch.inline_ptx(
                    "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[address + stride * r + unit * 16, *value],
                    predicate=r < valid,
                )

    # ---- chain, a warpgroup a half

    @cute.jit
    def chain(
        self,
        p,
        mma_tokens: cute.TiledMma,
        mma_state: cute.TiledMma,
        tiles,
        initial_state,
        final_state,
        matrix: Int64,
        half: Int32,
    ):
        """The recurrence. ``matrix``: offset in bytes of the pair in the fp32 states."""
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        lane = thread % 32
        first_lane = lane == 0
        tokens, channels = mma_tokens.get_slice(thread), mma_state.get_slice(thread)

        tCsW = tokens.make_fragment_B(tokens.partition_B(tiles[0]))
        tCsQd = tokens.make_fragment_B(tokens.partition_B(tiles[1]))
        tCsKg = channels.make_fragment_B(channels.partition_B(tiles[2]))
        tCsAqk = tokens.make_fragment_B(tokens.partition_B(tiles[3]))
        shape = mma_tokens.partition_shape_C((HALF, self.chunk))
        accR = cute.make_rmem_tensor(shape, Float32)
        accO = cute.make_rmem_tensor(shape, Float32)
        accS = cute.make_rmem_tensor(mma_state.partition_shape_C((HALF, HEAD_DIM)), Float32)
        tCrS = cute.make_rmem_tensor(mma_tokens.partition_shape_A((HALF, HEAD_DIM)), BFloat16)
        tCrR = cute.make_rmem_tensor(mma_state.partition_shape_A((HALF, self.chunk)), BFloat16)
        rO = cute.make_rmem_tensor(cute.size(shape) // 2, Int32)

        state_offset = matrix + self.state_offset(half + wg, thread)
        if const_expr(initial_state is not None):
            self.load_state(dev.address_of(initial_state) + state_offset, accS)
        else:
            accS.fill(0.0)
        self.round(accS, tCrS)
        accO.fill(0.0)
        u = p.u + wg * (self.chunk * HALF * 2) + thread * 16
        a = p.a + (lane % 4) * 8
        early, late = Int32(0), Int32(0)
        early_phase, late_phase = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(p.early_full, early_phase)
        self.load_u(u, accR)

        half_k = HEAD_DIM // 32
        steps = self.chunk // 16
        for c in cutlass.range(p.chunks, unroll=1):
            # Nothing is in flight here; ptxas knows that only if a wait stands between it and the loop's start.
            warpgroup.wait_group(0)
            if const_expr(self.config.states):  # noqa: SIM102 - the outer one is decided while tracing
                if c % (self.config.states // self.chunk) == 0:
                    self.hand_over_state(p, wg, thread, tCrS)
            self.gemm(mma_tokens, accR, tCrS, tCsW, early, range(2 * half_k))
            self.round(accO, rO)
            self.gemm(mma_tokens, accO, tCrS, tCsQd, early, range(2 * half_k), zero=True)
            self.hand_over_o(p, wg, thread, rO)
            self.decay(a + early * (4 * HEAD_DIM), accS)
            warpgroup.wait_group(1)  # R
            self.round(accR, tCrR)
            cute.arch.mbarrier_wait(p.late_full + late, late_phase)
            self.gemm(mma_state, accS, tCrR, tCsKg, late, range(steps))
            self.gemm(mma_tokens, accO, tCrR, tCsAqk, late, range(steps))
            used = early
            early += 1
            if early == self.early:
                early = Int32(0)
                early_phase = early_phase ^ 1
            cute.arch.mbarrier_wait(p.early_full + early, early_phase)
            self.load_u(u + early * self.u_bytes, accR)
            warpgroup.wait_group(1)  # S
            self.release(p.early_empty + used, first_lane)
            self.round(accS, tCrS)
            warpgroup.wait_group(0)
            self.release(p.late_empty + late, first_lane)
            late += 1
            if late == self.late:
                late = Int32(0)
                late_phase = late_phase ^ 1
        self.round(accO, rO)
        self.hand_over_o(p, wg, thread, rO)
        if const_expr(final_state is not None):
            self.store_state(dev.address_of(final_state) + state_offset, accS)

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

    def load_u(self, shared, acc):
        """Accumulators from this thread's vectors of the image of u."""
        for vector in range(self.chunk // 16):
            for i, pair in enumerate(dev.load_shared_x4(shared + vector * (16 * WARPGROUP), Int32)):
                acc[8 * vector + 2 * i], acc[8 * vector + 2 * i + 1] = cute.arch.inline_ptx(
                    "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;",
                    write_only_types=[Float32, Float32],
                    read_only_args=[pair],
                )

    def decay(self, shared, acc):
        """S^T diag(a): element (e, r, j) of the accumulator is in column 8j + 2*(lane%4) + e."""
        for j in range(HEAD_DIM // 8):
            factors = dev.load_shared_x2(shared + j * 32, Float32)
            for i in range(4):
                acc[4 * j + i] = cute.arch.inline_ptx(
                    "mul.rn.f32 {$w0}, {$r0}, {$r1};",
                    write_only_types=[Float32],
                    read_only_args=[acc[4 * j + i], factors[i % 2]],
                )

    def hand_over_o(self, p, wg, thread, rO):
        """O^T to shared memory as an image of O [C, 64], when the store warp has left it."""
        self.sync(wg, O_FREE)
        self.put_transposed(p.o + wg * self.o_bytes, thread, rO, self.chunk)
        self.arrive(wg, O_READY)

    def hand_over_state(self, p, wg, thread, tCrS):
        """S to shared memory, rounded as it is for wgmma, as an image of its half of a matrix in global memory."""
        words = cute.make_tensor(
            cute.recast_ptr(tCrS.iterator, dtype=Int32), cute.make_layout(HEAD_DIM // 2 // 2)
        )
        shared = p.state + wg * self.state_bytes
        self.sync(wg, STATE_FREE)
        if self.config.v_first:
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
            dev.stmatrix_x4(place, [words[4 * i + j] for j in range(4)])

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

    def release(self, barrier, first_lane):
        """One arrival of the warp, without a branch."""
        cute.arch.inline_ptx(
            "mbarrier.arrive.release.cta.shared::cta.b64 _, [{$r0}];",
            read_only_args=[Int32(barrier.toint())],
            predicate=first_lane,
        )

    # ---- named barriers between a chain warpgroup and its store warp

    def sync(self, wg, name):
        cute.arch.barrier(barrier_id=1 + 4 * wg + name, number_of_threads=WARPGROUP + 32)

    def arrive(self, wg, name):
        cute.arch.barrier_arrive(barrier_id=1 + 4 * wg + name, number_of_threads=WARPGROUP + 32)

    # ---- fp32 states

    def state_offset(self, half, thread):
        """Byte offset, in a matrix, of the element (0, 0, 0) of a thread's accumulator."""
        row = half * HALF + 16 * (thread // 32) + thread % 32 // 4
        column = 2 * (thread % 4)
        v_step, k_step = self.state_steps()
        return row * v_step + column * k_step

    def state_steps(self):
        """Bytes from a row of S^T to the next, and from a column to the next."""
        return (4 * HEAD_DIM, 4) if self.config.v_first else (4, 4 * HEAD_DIM)

    def load_state(self, address, acc):
        v_step, k_step = self.state_steps()
        for j in range(HEAD_DIM // 8):
            for r in range(2):
                start, at = 4 * j + 2 * r, address + (8 * r * v_step + 8 * j * k_step)
                if self.config.v_first:
                    acc[start], acc[start + 1] = cute.arch.inline_ptx(
                        "ld.global.nc.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
                        write_only_types=[Float32, Float32],
                        read_only_args=[at],
                    )
                else:
                    for e in range(2):
                        acc[start + e] = cute.arch.inline_ptx(
                            "ld.global.nc.f32 {$w0}, [{$r0}];",
                            write_only_types=[Float32],
                            read_only_args=[at + e * k_step],
                        )

    def store_state(self, address, acc):
        v_step, k_step = self.state_steps()
        for j in range(HEAD_DIM // 8):
            for r in range(2):
                start, at = 4 * j + 2 * r, address + (8 * r * v_step + 8 * j * k_step)
                if self.config.v_first:
                    cute.arch.inline_ptx(
                        "st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                        read_only_args=[at, acc[start], acc[start + 1]],
                    )
                else:
                    for e in range(2):
                        dev.store_global(at + e * k_step, acc[start + e])
