"""The gradients kernel: everything of the backward that is parallel over chunks.

From the inputs, dO, and what the chains left (S before and dS' behind every chunk, R and dX), it computes dq, dk, dg and dbeta. With
the notation of `kernels.reverse`, E = 2^{G_i - G_j} and b = beta k:

    across chunks      dQd = dO S^T        dKd = -dX S^T       dKg = R dS'^T
    within a chunk     Dq = tril(dO R^T)   Dk = -stril(dX R^T)
    rows               uq_i = sum_j Dq_ij E b_j + 2^{G_i} dQd_i            uk_i = sum_j Dk_ij E b_j + 2^{G_i} dKd_i
    columns            ub_j = sum_i E (Dq_ij q_i + Dk_ij k_i) + 2^{G_end - G_j} dKg_j
    gradients          dq = scale uq       dk = uk + beta ub           dbeta = k . ub
    decay              dg_t = a sum_v S dS' + sum_{j<t} Kg_j dKg_j + sum_{i>=t} (Qd_i dQd_i + Kd_i dKd_i) + pairs with i >= t > j

then through l2norm, the sigmoid of beta and the gate. "Pairs" are a suffix sum of rows' minus columns' products, in which all pairs
inside the suffix must cancel. They do because both sides multiply the *rounded* factors of the tensor core, and because anchors are
integers: a factor has the same mantissa for every anchor (``backward`` of docs/kernels).

A CTA has two compute warpgroups, one for each half of the channels, and a producer warpgroup. It takes items (chunk, query head) in
a fixed order; value heads of a group follow one another, and sum dq and dk in a fixed order. No atomics.
"""

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from kda_cute import arguments
from kda_cute.device import ptx, varlen
from kda_cute.device.intra_chunk.gates import sigmoid
from kda_sm90.config import HEAD_DIM, GradientsConfig
from kda_sm90.kernels.barriers import release
from kda_sm90.kernels.gradients import decay, elements, memory, products, steep
from kda_sm90.kernels.gradients.decay_gradient import DecayGradient
from kda_sm90.kernels.gradients.loads import Producer
from kda_sm90.kernels.gradients.memory import BLOCK, CHUNK, HALF, OFFSETS, Operand, Sum

COMPUTE = 256  # threads
THREADS = 384
COMPUTE_REGISTERS, PRODUCER_REGISTERS = 224, 56

#: Named barrier of the compute threads. 0 is ``sync_threads``.
COMPUTE_BARRIER = 1


class Arguments(NamedTuple):
    """Arguments after the tensor ``grad_q``."""

    q: Int64  # [B, T, H, 128] bf16
    k: Int64  # [B, T, H, 128] bf16
    g: Int64  # [B, T, HV, 128]
    beta: Int64  # [B, T, HV], elements of beta_bytes
    a_log: Int64  # [HV] fp32
    dt_bias: Int64  # [HV, 128] fp32
    offsets: Int64  # [N + 1], elements of offset_bytes
    grad_o: Int64  # [B, T, HV, 128] bf16
    grad_v: Int64  # [B, T, HV, 128] bf16: dX
    residual: Int64  # [B, T, HV, 128] bf16, rows of residual_row bytes: R. It may be the memory of grad_g
    states: Int64  # [slots, HV, 128, 128] bf16: S before every chunk of the slab, [K, V]
    grad_states: Int64  # [slots, HV, 128, 128] bf16: dS' behind every chunk of the slab, [K, V]
    grad_q: Int64  # [B, T, H, 128] bf16
    grad_k: Int64  # [B, T, H, 128] bf16
    grad_g: Int64  # [B, T, HV, 128], dtype of g
    grad_beta: Int64  # [B, T, HV], dtype of beta
    partials: Int64  # [slots, HV, 2, 2, 128] fp32: sums over half a chunk for dt_bias, and for A_log
    scratch: Int64  # [CTAs, 2, 64 * 128] fp32: dq and dk of the value heads so far, if HV > H
    N: Int32
    T: Int32
    H: Int32
    HV: Int32
    offset_bytes: Int32
    beta_bytes: Int32
    l2norm: Int32
    ctas: Int32
    first_slot: Int32  # of the slab, in slots of slot_tokens
    slab_slots: Int32
    slot_tokens: Int32  # 64 or 512
    residual_row: Int32
    scale: Float32
    lower_bound: Float32
    beta_factor: Float32


class GradientsKernel:
    """Takes grad_q as a tensor, which determines the device and the stream, and the values of `Arguments`."""

    #: Bytes of the spills at 224 registers, most of them in the branch for steep pairs.
    spill_allowance = 1280

    def __init__(self, config: GradientsConfig):
        self.config = config
        self.decay = decay.Decay(config)
        self.decay_gradient = DecayGradient(config)
        self.producer = Producer()

    def fake_args(self) -> tuple:
        return arguments.fake_args(Arguments, BFloat16)

    @cute.jit
    def __call__(self, grad_q: cute.Tensor, *values_and_stream):
        *values, stream = values_and_stream
        x = Arguments(*values)
        self.kernel(tuple(values)).launch(
            grid=(x.ctas, 1, 1),
            block=(THREADS, 1, 1),
            smem=memory.BYTES,
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, values: tuple):
        x = Arguments(*values)
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        thread, _, _ = cute.arch.thread_idx()
        barriers = self.barriers(shared)
        if thread == 0:
            for operand in Operand:
                cute.arch.mbarrier_init(barriers.full + int(operand), 128)
                cute.arch.mbarrier_init(barriers.empty + int(operand), COMPUTE // 32)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if thread < COMPUTE:
            cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
            self.compute(x, shared, barriers, thread)
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.produce(x, shared, barriers, thread - COMPUTE)

    def barriers(self, shared):
        """Returns the pointers to the full and the empty mbarriers of the operands."""
        first = cute.recast_ptr(shared + OFFSETS["barriers"], dtype=Int64)
        return SimpleNamespace(full=first, empty=first + len(Operand))

    # ---- items

    def sequences(self, x):
        """Returns the namespace of `kda_cute.device.varlen`."""
        span = varlen.slots(CHUNK, x.offset_bytes, x.N, x.T)
        s = SimpleNamespace(
            chunk=CHUNK, N=x.N, T=x.T, offsets=x.offsets, offset_bytes=x.offset_bytes, span=span
        )
        coarse = SimpleNamespace(
            chunk=x.slot_tokens, N=x.N, T=x.T, offsets=x.offsets, offset_bytes=x.offset_bytes,
            span=varlen.slots(x.slot_tokens, x.offset_bytes, x.N, x.T),
        )  # fmt: skip
        first, end = self.slab(coarse, x.first_slot, x.slab_slots)
        return SimpleNamespace(**vars(s), first=first, end=end)

    @cute.jit
    def slab(self, coarse, first_slot: Int32, slab_slots: Int32):
        """Returns the first and the end slot of the slab."""
        first = varlen.finer_slot(coarse, first_slot, CHUNK)
        return first, varlen.finer_slot(coarse, cutlass.min(first_slot + slab_slots, coarse.span), CHUNK)

    @cute.jit
    def chunk_values(self, x, s, slot: Int32):
        n = varlen.sequence_of(s, slot)
        start, length, first, _ = varlen.extent(s, n)
        if n == 0:
            first = Int32(0)
        done = (slot - first) * CHUNK
        return Int32(start) + done, cutlass.max(cutlass.min(length - done, CHUNK), 0)

    def chunk(self, x, s, index):
        """Returns a chunk of the slab: ``slot``, its index in the slab, ``token``, the first one in B*T, and ``valid``, its tokens, 0 to
        64; 0 behind the slab. A whole warp calls it."""
        slot = s.first + index
        token, valid = self.chunk_values(x, s, cutlass.min(slot, s.span - 1))
        return SimpleNamespace(slot=index, token=token, valid=ptx.select(slot < s.end, valid, Int32(0)))

    def items(self, x):
        """Returns the items of the launch: the slots of a slab, times the query heads."""
        return x.slab_slots * (x.slot_tokens // CHUNK) * x.H

    @cute.jit
    def produce(self, x, shared, barriers, thread: Int32):
        """Loads the operands of every item."""
        base = Int32(shared.toint())
        index, _, _ = cute.arch.block_idx()
        s = self.sequences(x)
        phase, group = Int32(0), x.HV // x.H
        for item in cutlass.range(index, self.items(x), x.ctas, unroll=1):
            chunk = self.chunk(x, s, item // x.H)
            if chunk.valid > 0:
                for member in cutlass.range(group, unroll=1):
                    self.producer.load(x, base, barriers, thread, chunk, item % x.H * group + member, phase)
                    phase = phase ^ 1

    @cute.jit
    def compute(self, x, shared, barriers, thread: Int32):
        """Computes the gradients of every item."""
        base = Int32(shared.toint())
        index, _, _ = cute.arch.block_idx()
        s = self.sequences(x)
        phase, group = Int32(0), x.HV // x.H
        for item in cutlass.range(index, self.items(x), x.ctas, unroll=1):
            chunk = self.chunk(x, s, item // x.H)
            for member in cutlass.range(group, unroll=1):
                head = item % x.H * group + member
                partials = x.partials + (Int64(chunk.slot) * x.HV + head) * (4 * HEAD_DIM * 4)
                if chunk.valid > 0:
                    self.gradients(
                        x, shared, base, barriers, thread, chunk, head, member, phase, index, partials
                    )
                    phase = phase ^ 1
                else:
                    ptx.store_global(partials + thread * 4, Float32(0.0))
                    ptx.store_global(partials + (thread + 2 * HEAD_DIM) * 4, Float32(0.0))

    def sync(self):
        """Barrier of the compute threads."""
        cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=COMPUTE)

    def release(self, barriers, operand):
        """Arrives at an operand's empty barrier, once for the warp."""
        cute.arch.sync_warp()
        release(barriers.empty + int(operand))

    # ---- one chunk and value head

    @cute.jit
    def gradients(
        self, x, shared, base: Int32, barriers, thread: Int32, chunk, head: Int32, member: Int32, phase: Int32,
        cta: Int32, partials: Int64,
    ):  # fmt: skip
        """Computes the gradients of a chunk and value head; dq and dk are complete after the last member of the group."""
        place = elements.Place(base, thread)
        l2norm = x.l2norm > 0
        key_head = head // (x.HV // x.H)
        q = elements.load_pairs(x.q, place, chunk.token, x.H, key_head, chunk.valid)
        k = elements.load_pairs(x.k, place, chunk.token, x.H, key_head, chunk.valid)
        betas = [self.beta(x, chunk, head, row) for row in place.rows()]

        self.store_decays(x, base, place, chunk, head)
        elements.store_square_sums(place, Sum.Q_SQUARE, q)
        elements.store_square_sums(place, Sum.K_SQUARE, k)
        self.sync()
        q_inverse = elements.norms(place, Sum.Q_SQUARE, l2norm)
        k_inverse = elements.norms(place, Sum.K_SQUARE, l2norm)
        q_norms = [y * x.scale for y in q_inverse]
        half, block, lane = place.half, place.block, place.lane
        unbounded = self.config.unbounded
        kept = memory.kept(base, block) if unbounded else None
        elements.store_factors(place, q, k, q_norms, k_inverse, betas, kept)

        mma = products.tiled_mma()
        tensor = lambda name, rows: products.matrix(shared, name, rows)
        half_of = lambda name: cute.local_tile(tensor(name, HEAD_DIM), (HALF, HEAD_DIM), (half, 0))
        across = products.accumulator(mma)
        warps = thread % 128
        d_q, d_k = base + OFFSETS["d_q"], base + OFFSETS["d_k"]
        for operand in (Operand.GRAD_O, Operand.RESIDUAL, Operand.GRAD_V):
            cute.arch.mbarrier_wait(barriers.full + int(operand), phase)
        if half == 0:
            products.start(mma, across, tensor("grad_o", CHUNK), tensor("residual", CHUNK), warps)
            warpgroup.wait_group(0)
            products.store_masked(d_q, across, block, lane, 0, Float32(1.0))
        else:
            products.start(mma, across, tensor("grad_v", CHUNK), tensor("residual", CHUNK), warps)
            warpgroup.wait_group(0)
            products.store_masked(d_k, across, block, lane, 1, Float32(-1.0))
        self.sync()

        terms = cute.make_rmem_tensor((32,), Float32)
        outer, inner, uk = (products.accumulator(mma) for _ in range(3))
        elements.fill_zero(terms)
        cute.arch.mbarrier_wait(barriers.full + int(Operand.STATE), phase)
        # dq
        products.start(mma, across, tensor("grad_o", CHUNK), half_of("state"), warps)
        elements.fill_zero(outer, inner)
        products.row_products(base, d_q, place.panel("column"), outer, inner, block, half, lane, unbounded)
        warpgroup.wait_group(0)
        self.release(barriers, Operand.GRAD_O)
        elements.row_gradient(place, "row_q", q, q_norms, across, outer, inner, terms, kept)
        if cutlass.const_expr(unbounded):
            self.add_steep_rows(x, base, thread, chunk, head, d_q, kept, q, q_norms, outer, terms)
        elements.store_dots(place, Sum.Q_DOT, q, q_norms, outer)
        self.sync()
        q_dots = [elements.load_sum(place, Sum.Q_DOT, row) for row in place.rows()]
        uq = [outer[n] * x.scale for n in range(32)]
        self.finish(x, x.grad_q, place, chunk, key_head, member, cta, 0, uq, q, q_inverse, q_dots, l2norm)
        # dk as rows
        products.start(mma, across, tensor("grad_v", CHUNK), half_of("state"), warps)
        elements.fill_zero(uk, inner)
        products.row_products(base, d_k, place.panel("column"), uk, inner, block, half, lane, unbounded)
        warpgroup.wait_group(0)
        self.release(barriers, Operand.GRAD_V)
        elements.negate(across)
        elements.row_gradient(place, "row_k", k, k_inverse, across, uk, inner, terms, kept)
        if cutlass.const_expr(unbounded):
            self.add_steep_rows(x, base, thread, chunk, head, d_k, kept, k, k_inverse, uk, terms)
        elements.store_dots(place, Sum.K_DOT, k, k_inverse, uk)
        # dk as columns, dbeta
        cute.arch.mbarrier_wait(barriers.full + int(Operand.GRAD_STATE), phase)
        products.start(mma, across, tensor("residual", CHUNK), half_of("grad_state"), warps)
        elements.fill_zero(outer, inner)
        products.column_products(base, d_q, place.panel("row_q"), outer, inner, block, half, lane, unbounded)
        products.column_products(base, d_k, place.panel("row_k"), outer, inner, block, half, lane, unbounded)
        self.decay_gradient.store_through(base, thread)
        self.release(barriers, Operand.STATE)
        warpgroup.wait_group(0)
        self.release(barriers, Operand.RESIDUAL)
        self.release(barriers, Operand.GRAD_STATE)
        elements.column_gradient(place, k, k_inverse, betas, across, outer, inner, terms, kept)
        if cutlass.const_expr(unbounded):
            self.add_steep_columns(
                x, base, thread, chunk, head, d_q, d_k, kept, k, k_inverse, betas, outer, terms
            )
        elements.store_dots(place, Sum.BETA_DOT, k, k_inverse, outer)
        cute.arch.sync_warp()  # the steep pairs read exponents of other lanes, which terms overwrite
        elements.store_terms(place, terms)
        self.sync()
        steps = [elements.load_sum(place, Sum.BETA_DOT, row) for row in place.rows()]
        k_dots = [
            elements.load_sum(place, Sum.K_DOT, row) + beta * step
            for row, beta, step in zip(place.rows(), betas, steps, strict=True)
        ]
        dk = [uk[n] + betas[n // 2 % 2] * outer[n] for n in range(32)]
        self.finish(x, x.grad_k, place, chunk, key_head, member, cta, 1, dk, k, k_inverse, k_dots, l2norm)
        for row, beta, step in zip(place.rows(), betas, steps, strict=True):
            self.store_grad_beta(x, chunk, head, place, row, beta, step)
        gate = decay.gate_of(self.config, x, head)
        self.decay_gradient.run(x, base, thread, chunk, head, gate, partials)
        self.sync()

    # ---- rows beyond the range of factors

    @cute.jit
    def add_steep_rows(
        self, x, base: Int32, thread: Int32, chunk, head: Int32, d: Int32, kept: Int32, pairs: list, norms: list,
        gradient: cute.Tensor, terms: cute.Tensor,
    ):  # fmt: skip
        """Adds the pairs of rows from ``kept`` on to the rows of q or k."""
        if kept < BLOCK:
            place = elements.Place(base, thread)

            def columns(row):
                beta = self.beta(x, chunk, head, row)
                return [y * beta for y in self.normalised_row(x, place, x.k, Sum.K_SQUARE, chunk, head, row)]

            steep.add_rows(
                place, d, kept, elements.packed(pairs), elements.packed_norms(norms), columns, gradient, terms
            )

    @cute.jit
    def add_steep_columns(
        self, x, base: Int32, thread: Int32, chunk, head: Int32, d_q: Int32, d_k: Int32, kept: Int32, k: list, k_norms: list,
        betas: list, gradient: cute.Tensor, terms: cute.Tensor,
    ):  # fmt: skip
        """Adds the pairs of rows from ``kept`` on to the columns."""
        if kept < BLOCK:
            place = elements.Place(base, thread)
            b = cute.make_rmem_tensor((32,), Float32)
            for n, y in enumerate(elements.unit_rows(k, k_norms)):
                b[n] = y * betas[n // 2 % 2]
            queries = lambda row: [
                y * x.scale for y in self.normalised_row(x, place, x.q, Sum.Q_SQUARE, chunk, head, row)
            ]
            keys = lambda row: self.normalised_row(x, place, x.k, Sum.K_SQUARE, chunk, head, row)
            steep.add_columns(place, d_q, kept, queries, b, gradient, terms)
            steep.add_columns(place, d_k, kept, keys, b, gradient, terms)

    def normalised_row(self, x, place, source, kind, chunk, head, row):
        """Returns the thread's 16 channels of a row of q or k, normalised, in fp32."""
        inverse = ptx.rsqrt(elements.load_sum(place, kind, row) + Float32(1e-6))
        inverse = ptx.select(x.l2norm > 0, inverse, Float32(1.0))
        found = steep.load_row(source, place, chunk.token, x.H, head // (x.HV // x.H), row, chunk.valid)
        return [y * inverse for pair in found for y in ptx.unpack_bf16x2(pair)]

    def store_decays(self, x, base, place, chunk, head):
        """Stores exponents and anchors of the warp's block and half of the channels, a lane two channels."""
        channel = place.half * HALF + 2 * place.lane
        gate = decay.gate_of(self.config, x, head)
        biases = decay.biases_of(self.config, x, head, channel)
        raw = self.decay.raw_gates(x, chunk, head, place.block, channel)
        rows = self.decay.log_decays(gate, raw, biases, place.block, chunk.valid)
        self.decay.store_totals(base, rows, place.block, channel)
        if self.config.unbounded:
            self.decay.store_kept(rows, memory.kept_address(base, place.half, place.block))
        self.sync()
        kept = memory.kept(base, place.block) if self.config.unbounded else None
        self.decay.store_exponents(base, rows, place.block, channel, kept)

    def raw_beta(self, x, chunk, head, row):
        """Loads a raw beta; 0 behind the sequence."""
        address = x.beta + (Int64(chunk.token + row) * x.HV + head) * x.beta_bytes
        exists = row < chunk.valid
        narrow = ptx.unpack_bf16x2(ptx.load_global_u16(address, exists & (x.beta_bytes == 2)))[0]
        return narrow + ptx.load_global_f32(address, exists & (x.beta_bytes == 4))

    def beta(self, x, chunk, head, row):
        """Returns beta of a row; 0 behind the sequence."""
        raw = self.raw_beta(x, chunk, head, row)
        beta = ptx.select(x.beta_factor > Float32(0.0), sigmoid(raw) * x.beta_factor, raw)
        return ptx.select(row < chunk.valid, beta, Float32(0.0))

    def store_grad_beta(self, x, chunk, head, place, row, beta, step):
        """Stores dbeta of a row, through the sigmoid: ``dbeta beta (1 - beta / factor)``."""
        factor = x.beta_factor
        slope = beta * (Float32(1.0) - beta * ptx.select(factor == Float32(2.0), Float32(0.5), Float32(1.0)))
        gradient = ptx.select(factor > Float32(0.0), step * slope, step)
        address = x.grad_beta + (Int64(chunk.token + row) * x.HV + head) * x.beta_bytes
        mine = (row < chunk.valid) & (place.quad == 0) & (place.half == 0)
        ptx.store_global_u16(address, ptx.pack_bf16x2(gradient, Float32(0.0)), mine & (x.beta_bytes == 2))
        ptx.store_global_f32_if(address, gradient, mine & (x.beta_bytes == 4))

    @cute.jit
    def finish(
        self, x, output: Int64, place, chunk, key_head: Int32, member: Int32, cta: Int32, kind: cutlass.Constexpr[int],
        gradient, pairs, inverse, dots, l2norm,
    ):  # fmt: skip
        """Stores dq or dk of raw rows. With several value heads a group, adds them up in scratch, and stores the sum last.

        l2norm's backward is linear in the gradient, so it is applied to each value head.
        """
        units = elements.unit_rows(pairs, inverse)
        found = elements.through_l2norm(gradient, units, inverse, dots, l2norm)
        total = cute.make_rmem_tensor((32,), Float32)
        for n in cutlass.range_constexpr(32):
            total[n] = found[n]
        group = x.HV // x.H
        if group > 1:
            start = x.scratch + (Int64(cta) * 2 + kind) * (CHUNK * HEAD_DIM * 4) + place.thread * 16
            elements.accumulate(start, member, group, total)
        if member == group - 1:
            elements.store_pairs(
                output, place, chunk.token, x.H, key_head, chunk.valid, [total[n] for n in range(32)]
            )
