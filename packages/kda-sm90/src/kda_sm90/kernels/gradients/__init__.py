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

from enum import IntEnum
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
from kda_sm90.kernels.gradients import decay, elements, memory, outputs, products, steep
from kda_sm90.kernels.gradients.decay_gradient import DecayGradient
from kda_sm90.kernels.gradients.loads import Producer, Raw
from kda_sm90.kernels.gradients.memory import BLOCK, CHUNK, HALF, OFFSETS, PANEL, TILES, Operand, Sum, Table


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
    partials: Int64  # [slots, HV, 2, 128] fp32: sums over a chunk for dt_bias, and for A_log
    scratch: Int64  # [CTAs, 2, 64 * 128] fp32: dq and dk of the value heads so far, if HV > H
    N: Int32
    T: Int32
    H: Int32
    HV: Int32
    group: Int32  # HV / H
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


COMPUTE = 256  # threads
THREADS = 384
COMPUTE_REGISTERS, PRODUCER_REGISTERS = 232, 40


class Barrier(IntEnum):
    """Named barriers of the compute threads. 0 is ``sync_threads``."""

    ALL = 1
    HALF = 2  # and 3: of a warpgroup
    PAIR = 4  # to 7: of the two warps of a block of rows


class GradientsKernel:
    """Takes grad_q as a tensor, which determines the device and the stream, and the values of `Arguments`."""

    #: Bytes of the spills of a variant, most of them in the branch for steep pairs.
    spill_allowance = 1280

    def __init__(self, config: GradientsConfig):
        self.config = config
        self.unbounded = config.unbounded
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
            smem=memory.shared_bytes(self.unbounded),
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
        """Returns the first and the end slot of the slab, in slots of 64 tokens."""
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

    def step(self, x, s, slot, index, member):
        """Returns a step of a CTA: a chunk and value head. A whole warp calls it.

        ``slot``: index of the chunk in the slab. ``index``: query head. ``member``: index of the value head in its group. ``token``: the
        first one in B*T. ``valid``: tokens of the chunk, 0 to 64; 0 behind the slab.
        """
        token, valid = self.chunk_values(x, s, cutlass.min(s.first + slot, s.span - 1))
        valid = ptx.select(s.first + slot < s.end, valid, Int32(0))
        return SimpleNamespace(slot=slot, token=token, valid=valid, head=index * x.group + member)

    @cute.jit
    def following(self, x, stride, slot: Int32, index: Int32, member: Int32):
        """Returns slot, query head and member of the next step. A CTA takes items (slot, query head) in a fixed order, and the value
        heads of a group one after the other. ``stride``: slots and heads between its items."""
        member = member + 1
        if member == x.group:
            member = Int32(0)
            slot, index = slot + stride[0], index + stride[1]
            if index >= x.H:
                slot, index = slot + 1, index - x.H
        return slot, index, member

    def steps(self, x, cta):
        """Returns the number of steps of a CTA."""
        return cute.ceil_div(x.slab_slots * (x.slot_tokens // CHUNK) * x.H - cta, x.ctas) * x.group

    @cute.jit
    def produce(self, x, shared, barriers, thread: Int32):
        """Loads the operands of every step."""
        base = Int32(shared.toint())
        cta, _, _ = cute.arch.block_idx()
        s = self.sequences(x)
        phase, member = Int32(0), Int32(0)
        slot, index, stride = cta // x.H, cta % x.H, (x.ctas // x.H, x.ctas % x.H)
        for _ in cutlass.range(self.steps(x, cta), unroll=1):
            step = self.step(x, s, slot, index, member)
            if step.valid > 0:
                self.producer.load(x, base, barriers, thread, step, step.head, phase)
                phase = phase ^ 1
            slot, index, member = self.following(x, stride, slot, index, member)

    @cute.jit
    def compute(self, x, shared, barriers, thread: Int32):
        """Computes the gradients of every step."""
        base = Int32(shared.toint())
        cta, _, _ = cute.arch.block_idx()
        s = self.sequences(x)
        raw = Raw(self.config)
        slot, index, member, stride = cta // x.H, cta % x.H, Int32(0), (x.ctas // x.H, x.ctas % x.H)
        first = self.step(x, s, slot, index, member)
        token, valid, head = first.token, first.valid, first.head
        self.load_raw(x, raw, base, thread, token, valid, head)
        phase = Int32(0)
        for _ in cutlass.range(self.steps(x, cta), unroll=1):
            next_slot, index, next_member = self.following(x, stride, slot, index, member)
            after = self.step(x, s, next_slot, index, next_member)
            partials = x.partials + (Int64(slot) * x.HV + head) * (2 * HEAD_DIM * 4)
            if valid > 0:
                self.gradients(
                    x, shared, base, barriers, thread, raw, token, valid, head, member, phase, cta, partials,
                    after.token, after.valid, after.head,
                )  # fmt: skip
                phase = phase ^ 1
            else:
                ptx.store_global(partials + thread * 4, Float32(0.0))
                self.load_raw(x, raw, base, thread, after.token, after.valid, after.head)
            slot, member, token, valid, head = next_slot, next_member, after.token, after.valid, after.head

    def load_raw(self, x, raw, base, thread, token, valid, head):
        """Loads the inputs of a chunk and value head."""
        raw.load(x, self.place(base, thread), token, valid, head)

    def sync(self, barrier, index, threads):
        """Waits at a named barrier."""
        cute.arch.barrier(barrier_id=int(barrier) + index, number_of_threads=threads)

    def release(self, barriers, *operands):
        """Arrives at the empty barriers of operands, once for the warp."""
        cute.arch.sync_warp()
        for operand in operands:
            release(barriers.empty + int(operand))

    # ---- one chunk and value head

    @cute.jit
    def gradients(
        self, x, shared, base: Int32, barriers, thread: Int32, raw, token: Int32, valid: Int32, head: Int32,
        member: Int32, phase: Int32, cta: Int32, partials: Int64, next_token: Int32, next_valid: Int32, next_head: Int32,
    ):  # fmt: skip
        """Computes the gradients of a chunk and value head; dq and dk are complete after the last member of the group.

        ``raw`` holds the chunk's inputs; the function loads those of the next chunk, ``next_*``.
        """
        # Each stage computes its addresses anew: kept over the loop they would occupy registers that the stages need.
        place = self.place(base, thread)
        at = decay.Lane(place)
        half, block = place.half, place.block
        key_head, l2norm = head // x.group, x.l2norm > 0
        unbounded = self.unbounded
        mma = products.tiled_mma()
        wait = lambda operand: cute.arch.mbarrier_wait(barriers.full + int(operand), phase)
        warps = thread % 128
        rows_of = lambda name, count=1: products.matrix(shared, name, CHUNK, count)
        half_of = lambda name: cute.local_tile(
            products.matrix(shared, name, HEAD_DIM)[None, None, 0], (HALF, HEAD_DIM), (half, 0)
        )

        # gates, their sums, anchors
        q, k = raw.pairs(raw.q), raw.pairs(raw.k)
        biases, gate = [raw.bias[0], raw.bias[1]], raw.gate(x)
        betas = [self.beta(x, raw.beta[r], row, valid) for r, row in enumerate(place.rows())]
        rows = self.decay.log_decays(gate, raw.gates(raw.g), biases, block, valid)
        ptx.store_shared_x2(at.table(Table.TOTAL, block), rows[-1])
        if cutlass.const_expr(unbounded):
            self.decay.store_kept(rows, memory.kept_address(base, half, block))
        elements.store_square_sums(place, Sum.Q_SQUARE, q)
        elements.store_square_sums(place, Sum.K_SQUARE, k)
        self.sync(Barrier.ALL, 0, COMPUTE)
        kept = memory.kept(base, block) if unbounded else None
        self.decay.store_exponents(at, rows, kept)
        self.sync(Barrier.HALF, half, COMPUTE // 2)

        # Dq and Dk, dO S^T; factors meanwhile
        d, acc = (products.accumulator(mma) for _ in range(2))
        for operand in (Operand.GRAD_O, Operand.RESIDUAL, Operand.GRAD_V, Operand.STATE):
            wait(operand)
        products.start(
            mma, d, rows_of("grad_o", 2)[None, None, half], rows_of("residual")[None, None, 0], warps
        )
        products.start(mma, acc, rows_of("grad_o")[None, None, 0], half_of("state"), warps)
        products.store_scales(place, unbounded)
        q_inverse = elements.norms(place, Sum.Q_SQUARE, l2norm)
        k_inverse = elements.norms(place, Sum.K_SQUARE, l2norm)
        q_factors = [y * x.scale for y in q_inverse]
        column_factors = [y * beta for y, beta in zip(k_inverse, betas, strict=True)]
        elements.store_factors(place, q, k, q_factors, k_inverse, column_factors, kept)
        warpgroup.wait_group(1)
        products.store_image(base + OFFSETS["d_q"] + half * PANEL, d, place)
        warpgroup.wait_group(0)
        self.release(barriers, Operand.GRAD_O)
        elements.to_anchor(place, acc)
        self.sync(Barrier.ALL, 0, COMPUTE)

        # dq
        place = self.place(base, thread)
        terms = cute.make_rmem_tensor((4 * TILES,), Float32)
        beta_of = lambda y, row: self.beta(x, y, row, valid)
        query, key, column = steep.row_loaders(x, place, token, valid, head, beta_of)
        products.add_row_products(base, place.thread, 0, acc, unbounded)
        elements.row_gradients(place, "row_q", acc, terms, first=True)
        if cutlass.const_expr(unbounded):
            steep.add_rows(place, kept, 0, query, column, acc, terms)
        elements.store_dots(place, Sum.Q_DOT, q, acc)
        self.sync(Barrier.PAIR, block, 64)
        q_dots = [elements.load_sum(place, Sum.Q_DOT, row) for row in place.rows()]
        scratch = x.scratch + Int64(cta) * (2 * outputs.SCRATCH) + place.thread * 16
        elements.project(q, acc, q_inverse, q_dots, x.scale, l2norm)
        outputs.add_group(scratch, member, x.group, acc)
        if member == x.group - 1:
            outputs.store_rows(x, x.grad_q, place, token, valid, key_head, acc)

        # the gradient of beta k
        place = self.place(base, thread)
        across, grad_b = (products.accumulator(mma) for _ in range(2))
        wait(Operand.GRAD_STATE)
        products.start(mma, across, rows_of("residual")[None, None, 0], half_of("grad_state"), warps)
        grad_b.fill(0.0)
        products.add_column_products(base, place.thread, grad_b, unbounded)
        through = products.through_diagonal(place)
        warpgroup.wait_group(0)
        self.release(barriers, Operand.RESIDUAL, Operand.GRAD_STATE)
        elements.column_gradients(place, k, column_factors, across, grad_b, terms, kept)
        if cutlass.const_expr(unbounded):
            steep.add_columns(place, kept, query, key, column, grad_b, terms)

        # dk, dbeta
        place = self.place(base, thread)
        acc_k = products.accumulator(mma)
        products.start(mma, acc_k, rows_of("grad_v")[None, None, 0], half_of("state"), warps)
        raw_gates = raw.load_gates(x, place, token, valid, head)  # for the gradient of the gates
        elements.store_dots(place, Sum.BETA_DOT, k, grad_b)
        warpgroup.wait_group(0)
        self.release(barriers, Operand.GRAD_V, Operand.STATE)
        elements.to_anchor(place, acc_k)
        products.add_row_products(base, place.thread, 1, acc_k, unbounded)
        elements.row_gradients(place, "row_k", acc_k, terms, first=False)
        if cutlass.const_expr(unbounded):
            steep.add_rows(place, kept, 1, key, column, acc_k, terms)
        elements.combine(grad_b, betas, acc_k)
        elements.store_dots(place, Sum.K_DOT, k, grad_b)
        self.sync(Barrier.PAIR, block, 64)
        k_dots = [elements.load_sum(place, Sum.K_DOT, row) for row in place.rows()]
        for r, row in enumerate(place.rows()):
            step = elements.load_sum(place, Sum.BETA_DOT, row) * k_inverse[r]
            outputs.store_grad_beta(x, token, valid, head, place, r, betas[r], step)
        elements.project(k, grad_b, k_inverse, k_dots, Float32(1.0), l2norm)
        outputs.add_group(scratch + outputs.SCRATCH, member, x.group, grad_b)
        if member == x.group - 1:
            outputs.store_rows(x, x.grad_k, place, token, valid, key_head, grad_b)

        # the gradient of the gates
        place = self.place(base, thread)
        at = decay.Lane(place)
        raw.load(x, place, next_token, next_valid, next_head)
        cute.arch.sync_warp()  # other lanes have read exponents
        elements.store_terms(place, terms)
        self.store_through(place, through)
        cute.arch.sync_warp()
        sums, decays = self.decay_gradient.suffix_sums(at), self.decay_gradient.chunk_decays(at)
        self.sync(Barrier.HALF, half, COMPUTE // 2)
        behind = self.decay_gradient.behind(at, decays)
        self.decay_gradient.store(x, at, token, valid, head, gate, raw.gates(raw_gates), biases, sums, behind)
        self.sync(Barrier.HALF, half, COMPUTE // 2)
        self.decay_gradient.store_partials(place, partials)

    @cute.jit
    def store_through(self, place, through: list):
        """Stores the diagonal of S dS'^T of the warp's channels."""
        if place.quad == place.row // 2:
            for n in cutlass.range_constexpr(2):
                channel = place.block * BLOCK + place.row + 8 * n
                ptx.store_shared(memory.through_address(place.base, place.half, channel), through[n])

    def place(self, base, thread):
        """Returns the thread's place; the compiler does not know that it is always the same."""
        return elements.Place(base, ptx.opaque(thread))

    def beta(self, x, raw, row, valid):
        """Returns beta of a row from a raw one; 0 behind the sequence."""
        beta = ptx.select(x.beta_factor > Float32(0.0), sigmoid(raw) * x.beta_factor, raw)
        return ptx.select(row < valid, beta, Float32(0.0))
