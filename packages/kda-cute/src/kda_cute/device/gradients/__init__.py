"""The gradients kernel: everything of the backward that is parallel over chunks.

From the inputs, dO, and what the chains left (S before and dS' behind every chunk, R and dX), it computes dq, dk, dg and dbeta. With
R = T (V - Kd S), dX the gradient of v, E = 2^{G_i - G_j} and b = beta k:

    across chunks      dQd = dO S^T        dKd = -dX S^T       dKg = R dS'^T
    within a chunk     Dq = tril(dO R^T)   Dk = -stril(dX R^T)
    rows               uq_i = sum_j Dq_ij E b_j + 2^{G_i} dQd_i            uk_i = sum_j Dk_ij E b_j + 2^{G_i} dKd_i
    columns            ub_j = sum_i E (Dq_ij q_i + Dk_ij k_i) + 2^{G_end - G_j} dKg_j
    gradients          dq = scale uq       dk = uk + beta ub           dbeta = k . ub
    decay              dg_t = a sum_v S dS' + sum_{j<t} Kg_j dKg_j + sum_{i>=t} (Qd_i dQd_i + Kd_i dKd_i) + pairs with i >= t > j

then through l2norm, the sigmoid of beta and the gate. "Pairs" are a suffix sum of rows' minus columns' products, in which all pairs
inside the suffix must cancel. They do because both sides multiply the *rounded* factors of the tensor core, and because anchors are
integers: a factor has the same mantissa for every anchor (``backward`` of docs/kernels).

A CTA has two compute warpgroups, one for each half of the channels, and a producer warpgroup, which also finds the steps of the
CTA. A CTA takes items (chunk, query head) in a fixed order; value heads of a group follow one another, and sum dq and dk in a fixed
order. No atomics.

The five products between chunks, dO R^T and dX R^T as well as dQd, dKd and dKg, are those of the backend (`BetweenChunks`). All else
is `mma.sync` and arithmetic, the same on every GPU.
"""

from abc import ABC, abstractmethod
from enum import IntEnum
from types import SimpleNamespace

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx, varlen
from kda_cute.device.barriers import release
from kda_cute.device.gradients import decay, elements, memory, outputs, products, steep
from kda_cute.device.gradients.decay_gradient import DecayGradient, partial_offset
from kda_cute.device.gradients.loads import Producer, Raw, load_beta
from kda_cute.device.gradients.memory import (
    BLOCK,
    CHUNK,
    COMPUTE,
    OFFSETS,
    PANEL,
    TILES,
    Operand,
    Step,
    Sum,
)
from kda_cute.device.intra_chunk.gates import Gate, gate_rate
from kda_cute.device.kernel import Kernel
from kda_cute.gradients import GradientsArguments, GradientsConfig
from kda_cute.records import HEAD_DIM

THREADS = COMPUTE + 128
COMPUTE_REGISTERS, PRODUCER_REGISTERS = 232, 40


class Barrier(IntEnum):
    """Named barriers of the compute threads. 0 is ``sync_threads``."""

    ALL = 1
    HALF = 2  # and 3: of a warpgroup
    PAIR = 4  # to 7: of the two warps of a block of rows


class BetweenChunks(ABC):
    """The products of a step between chunks, by the tensor core of a backend. A kernel makes one object for each step.

    A thread's part of an accumulator [64 tokens, 64 channels] has the layout of ``mma.sync`` (`products`). The operands are the
    regions of `memory`; the caller has waited for them.
    """

    @abstractmethod
    def start_rows(self):
        """Starts dO R^T or dX R^T, dO S^T and dX S^T. Returns their accumulators: the first belongs to dO in the first half of the
        channels, and to dX in the second."""

    @abstractmethod
    def finish_d(self):
        """Waits for the first accumulator of `start_rows`."""

    @abstractmethod
    def finish_rows(self):
        """Waits for the other two accumulators of `start_rows`."""

    @abstractmethod
    def start_across(self):
        """Starts R dS'^T and returns its accumulator."""

    @abstractmethod
    def finish_across(self):
        """Waits for the accumulator of `start_across`."""


class GradientsKernel(Kernel, ABC):
    """Base of the kernel of a backend, which sets ``interface`` and implements `between_chunks`. It takes grad_q as a tensor, which
    determines the device and the stream, and the values of `GradientsArguments`."""

    #: Bytes of the spills of a variant, most of them in the branch for steep pairs.
    spill_allowance = 1280
    threads = THREADS

    def __init__(self, config: GradientsConfig):
        self.config = config
        self.unbounded = config.unbounded
        self.shared_bytes = memory.shared_bytes(config.unbounded)
        self.decay = decay.Decay(config)
        self.decay_gradient = DecayGradient(config)
        self.producer = Producer(config)

    @cute.kernel
    def kernel(self, values: tuple):
        x = GradientsArguments(*values)
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        thread, _, _ = cute.arch.thread_idx()
        barriers = self.barriers(shared)
        if thread == 0:
            for operand in Operand:
                cute.arch.mbarrier_init(barriers.full + int(operand), 128)
                cute.arch.mbarrier_init(barriers.empty + int(operand), COMPUTE // 32)
            for number in range(2):
                cute.arch.mbarrier_init(barriers.step_full + number, 128)
                cute.arch.mbarrier_init(barriers.step_empty + number, COMPUTE // 32)
        self.prepare(shared, thread)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        self.begin()
        if thread < COMPUTE:
            cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
            self.compute(x, shared, barriers, thread)
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.produce(x, shared, barriers, thread - COMPUTE)
        self.finish(shared, thread)

    @abstractmethod
    def between_chunks(self, shared, place, phase) -> BetweenChunks:
        """Returns the products of a step. ``place``: the calling thread. ``phase``: 0 and 1 alternately."""

    def prepare(self, shared, thread):
        """Prepares what the products need, before the barrier of all threads at the start."""

    def begin(self):
        """Executed behind that barrier."""

    def finish(self, shared, thread):
        """Executed by all threads at the end."""

    def barriers(self, shared):
        """Returns the pointers to the full and the empty mbarriers of the operands and of the steps."""
        first = cute.recast_ptr(shared + OFFSETS["barriers"], dtype=Int64)
        steps = first + 2 * len(Operand)
        return SimpleNamespace(full=first, empty=first + len(Operand), step_full=steps, step_empty=steps + 2)

    # ---- items

    def sequences(self, x):
        """Returns the namespace of `kda_cute.device.varlen`, with the first and the end slot of the slab."""
        of = lambda tokens: SimpleNamespace(
            chunk=tokens, N=x.N, T=x.T, offsets=x.offsets, offset_bytes=x.offset_bytes,
            span=varlen.slots(tokens, x.offset_bytes, x.N, x.T),
        )  # fmt: skip
        first, end = varlen.slab(of(x.slot_tokens), x.first_slot, x.slab_slots, CHUNK)
        return SimpleNamespace(**vars(of(CHUNK)), first=first, end=end)

    @cute.jit
    def chunk_of(self, s, slot: Int32):
        """Returns the first token of a chunk of the slab and its tokens, 0 to 64; 0 behind the slab. A whole warp calls it."""
        last = s.span - 1
        n = varlen.sequence_of(s, cutlass.min(s.first + slot, last))
        start, length, first, _ = varlen.extent(s, n)
        if n == 0:
            first = Int32(0)
        done = (cutlass.min(s.first + slot, last) - first) * CHUNK
        valid = cutlass.max(cutlass.min(length - done, CHUNK), 0)
        return Int32(start) + done, ptx.select(s.first + slot < s.end, valid, Int32(0))

    @cute.jit
    def produce(self, x, shared, barriers, thread: Int32):
        """Finds the steps, the items (slot, query head) of the CTA in a fixed order and the value heads of a group one after the other,
        and loads their operands. Stores zeros as partial sums of chunks that do not exist."""
        base = Int32(shared.toint())
        cta, _, _ = cute.arch.block_idx()
        s = self.sequences(x)
        phase, number = Int32(0), Int32(0)
        slot, index, stride = cta // x.H, cta % x.H, (x.ctas // x.H, x.ctas % x.H)
        slots = x.slab_slots * (x.slot_tokens // CHUNK)
        while slot < slots:
            token, valid = self.chunk_of(s, slot)
            for member in cutlass.range(x.group, unroll=1):
                head = index * x.group + member
                if valid > 0:
                    chunk = SimpleNamespace(slot=slot, token=token, valid=valid)
                    self.announce(
                        x, base, barriers, thread, number, [token, valid, head, index, member, slot]
                    )
                    self.producer.load(x, base, barriers, thread, chunk, head, phase)
                    phase, number = phase ^ 1, number + 1
                else:
                    partials = x.partials + partial_offset(x, slot, head)
                    ptx.store_global_x2(partials + thread * 8, [Float32(0.0)] * 2)
            slot, index = slot + stride[0], index + stride[1]
            if index >= x.H:
                slot, index = slot + 1, index - x.H
        self.announce(x, base, barriers, thread, number, [Int32(0)] * 6)

    @cute.jit
    def announce(self, x, base: Int32, barriers, thread: Int32, number: Int32, words: list):
        """Publishes a step to the compute warps, which load its inputs while they compute the step before it."""
        token, valid, head = words[:3]
        beta = load_beta(x, token, thread < valid, head, thread)
        exists = valid > 0
        bias = ptx.load_global_f32(
            x.dt_bias + Int64(head * HEAD_DIM + thread) * 4, exists & (x.dt_bias != Int64(0))
        )
        a_log = ptx.load_global_f32(x.a_log + Int64(head) * 4, exists & (x.a_log != Int64(0)))
        if thread < valid:
            self.producer.prefetch(x, token + thread, head, words[Step.KEY_HEAD])
        step = memory.step(base, number)
        cute.arch.mbarrier_wait(barriers.step_empty + (number & 1), number >> 1 & 1 ^ 1)
        if thread < CHUNK:
            ptx.store_shared(memory.beta(step, thread), beta)
        ptx.store_shared(memory.bias(step, thread), bias)
        if thread == 0:
            for n in cutlass.range_constexpr(len(words)):
                ptx.store_shared(step + 4 * n, words[n])
            ptx.store_shared(step + 4 * int(Step.RATE), gate_rate(a_log))
            ptx.store_shared(step + 4 * int(Step.ZERO), Int32(0))
        cute.arch.mbarrier_arrive(barriers.step_full + (number & 1))

    @cute.jit
    def compute(self, x, shared, barriers, thread: Int32):
        """Computes the gradients of every step."""
        base = Int32(shared.toint())
        raw = Raw(self.config)
        number = Int32(0)
        valid = self.request(x, raw, base, barriers, thread, number)
        while valid > 0:
            valid = self.gradients(x, shared, base, barriers, thread, raw, number)
            number = number + 1
        cute.arch.cp_async_wait_group(0)  # the zeros of the step behind the last one

    def step(self, base, number):
        """Loads a step. Each stage does, because the words would occupy registers."""
        address = memory.step(base, ptx.opaque(number))
        words = [*ptx.load_shared_x4(address, Int32), *ptx.load_shared_x2(address + 16, Int32)]
        found = {word.name.lower(): words[word] for word in Step if word < len(words)}
        return SimpleNamespace(**found, address=address)

    def zero(self, step):
        """Loads the zero of a step."""
        return ptx.load_shared(step.address + 4 * int(Step.ZERO), Int32)

    def betas(self, place, step):
        """Loads beta of the thread's two rows."""
        return [ptx.load_shared(memory.beta(step.address, row), Float32) for row in place.rows()]

    def gate(self, x, at, step):
        """Returns the gate of a step's value head, and dt_bias of the lane's channels."""
        biases = ptx.load_shared_x4(memory.bias(step.address, at.channel), Float32)
        if self.config.gate == "precomputed":
            return Gate(self.config, Float32(1.0), x.lower_bound), biases
        rate = ptx.load_shared(step.address + 4 * int(Step.RATE), Float32)
        return Gate(self.config, rate, x.lower_bound), biases

    def request(self, x, raw, base, barriers, thread, number):
        """Waits for a step, requests its inputs, and returns its number of tokens."""
        cute.arch.mbarrier_wait(barriers.step_full + (number & 1), number >> 1 & 1)
        step = self.step(base, number)
        raw.request(x, self.place(base, thread), step)
        return step.valid

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
    def gradients(self, x, shared, base: Int32, barriers, thread: Int32, raw, number: Int32):
        """Computes the gradients of a step; dq and dk are complete after the last member of the group.

        Its inputs have been requested by ``raw``; the function requests those of the next step, and returns its number of tokens.
        """
        # Each stage computes its addresses anew: kept over the loop they would occupy registers that the stages need.
        place = self.place(base, thread)
        at = decay.Lane(place)
        half, block, phase = place.half, place.block, number & 1
        step, l2norm = self.step(base, number), x.l2norm > 0
        unbounded = self.unbounded
        wait = lambda operand: cute.arch.mbarrier_wait(barriers.full + int(operand), phase)

        # gates, their sums, anchors
        raw.take(place)
        q, k = raw.elements(raw.q), raw.elements(raw.k)
        gate, biases = self.gate(x, at, step)
        rows = self.decay.log_decays(gate, raw.gates(raw.g), biases, at, step.valid)
        self.decay.store_total(at, rows)
        if cutlass.const_expr(unbounded):
            self.decay.store_kept(rows, at.unit, memory.kept_address(base, half, block))
        elements.store_square_sums(place, Sum.Q_SQUARE, q)
        elements.store_square_sums(place, Sum.K_SQUARE, k)
        self.sync(Barrier.ALL, 0, COMPUTE)
        kept = memory.kept(base, block) if unbounded else None
        self.decay.store_exponents(at, rows, kept)
        self.sync(Barrier.HALF, half, 128)

        # Dq and Dk, dO S^T and dX S^T; factors meanwhile
        between = self.between_chunks(shared, place, phase)
        for operand in (Operand.GRAD_O, Operand.RESIDUAL, Operand.GRAD_V, Operand.STATE):
            wait(operand)
        d, acc_q, acc_k = between.start_rows()
        products.store_scales(place, unbounded)
        q_inverse = elements.norms(place, Sum.Q_SQUARE, l2norm)
        k_inverse = elements.norms(place, Sum.K_SQUARE, l2norm)
        q_factors = [y * x.scale for y in q_inverse]
        column_factors = [y * beta for y, beta in zip(k_inverse, self.betas(place, step), strict=True)]
        elements.store_factors(place, q, k, q_factors, k_inverse, column_factors, kept)
        between.finish_d()
        products.store_image(base + OFFSETS["d_q"] + half * PANEL, d, place)
        between.finish_rows()
        self.release(barriers, Operand.GRAD_O, Operand.GRAD_V)
        elements.to_anchor(place, acc_q, acc_k)
        self.sync(Barrier.ALL, 0, COMPUTE)

        # dq, and what rows contribute to dk
        place, step = self.place(base, thread), self.step(base, number)
        terms = cute.make_rmem_tensor((4 * TILES,), Float32)
        query, key, column = steep.row_loaders(x, place, step)
        products.add_row_products(base, place.thread, acc_q, acc_k, unbounded)
        elements.row_gradients(place, acc_q, acc_k, terms)
        if cutlass.const_expr(unbounded):
            steep.add_rows(place, kept, query, key, column, acc_q, acc_k, terms)
        q = raw.elements(raw.q, self.zero(step))
        elements.store_dots(place, Sum.Q_DOT, q, acc_q)
        self.sync(Barrier.PAIR, block, 64)
        q_dots = [elements.load_sum(place, Sum.Q_DOT, row) for row in place.rows()]
        elements.project(q, acc_q, q_inverse, q_dots, x.scale, l2norm)
        outputs.add_group(x, place, 0, step.member, acc_q)
        outputs.store_rows(x, x.grad_q, place, step, acc_q)

        # dk, dbeta
        place, step = self.place(base, thread), self.step(base, number)
        grad_b = cute.make_rmem_tensor((4 * TILES,), Float32)
        grad_b.fill(0.0)
        products.add_column_products(base, place.thread, grad_b, unbounded)
        wait(Operand.GRAD_STATE)
        across = between.start_across()
        through = products.through_diagonal(place)
        between.finish_across()
        self.release(barriers, Operand.RESIDUAL, Operand.STATE, Operand.GRAD_STATE)
        k = raw.elements(raw.k, self.zero(step))
        elements.column_gradients(place, k, column_factors, across, grad_b, terms, kept)
        if cutlass.const_expr(unbounded):
            steep.add_columns(place, kept, query, key, column, grad_b, terms)
        cute.arch.sync_warp()  # other lanes have read exponents
        elements.store_terms(place, terms)
        raw_gates = raw.load_gates(x, place, step)  # for the gradient of the gates
        k = raw.elements(raw.k, self.zero(step))
        elements.store_dots(place, Sum.BETA_DOT, k, grad_b)
        betas = self.betas(place, step)
        elements.combine(grad_b, betas, acc_k)
        elements.store_dots(place, Sum.K_DOT, k, grad_b)
        self.sync(Barrier.PAIR, block, 64)
        k_dots = [elements.load_sum(place, Sum.K_DOT, row) for row in place.rows()]
        for r, row in enumerate(place.rows()):
            of_beta = elements.load_sum(place, Sum.BETA_DOT, row) * k_inverse[r]
            outputs.store_grad_beta(x, step, place, r, betas[r], of_beta)
        elements.project(k, grad_b, k_inverse, k_dots, Float32(1.0), l2norm)
        outputs.add_group(x, place, 1, step.member, grad_b)
        outputs.store_rows(x, x.grad_k, place, step, grad_b)

        # the gradient of the gates
        place, step = self.place(base, thread), self.step(base, number)
        at = decay.Lane(place)
        self.store_through(place, through)
        cute.arch.sync_warp()
        sums, decays = self.decay_gradient.suffix_sums(at), self.decay_gradient.chunk_decays(at)
        self.sync(Barrier.HALF, half, 128)
        # All warps of the half have read the factors of rows, whose place the inputs take.
        following = self.request(x, raw, base, barriers, thread, number + 1)
        behind = self.decay_gradient.behind(at, decays)
        gate, biases = self.gate(x, at, step)
        self.decay_gradient.store(x, at, step, gate, raw.gates(raw_gates), biases, sums, behind)
        self.sync(Barrier.HALF, half, 128)
        self.decay_gradient.store_partials(x, place, step)
        cute.arch.sync_warp()
        release(barriers.step_empty + (number & 1))
        return following

    @cute.jit
    def store_through(self, place, through: list):
        """Stores the diagonal of S dS'^T of the warp's channels."""
        if place.quad == place.row >> 1:
            for n in cutlass.range_constexpr(2):
                position = place.block * BLOCK + 8 * n + place.row
                ptx.store_shared(memory.through_address(place.base, place.half, position), through[n])

    def place(self, base, thread):
        """Returns the thread's place; the compiler does not know that it is always the same."""
        return elements.Place(base, ptx.opaque(thread))
