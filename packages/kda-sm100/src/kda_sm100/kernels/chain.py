"""The chain: the chunks of one sequence and value head in order, the state in tensor memory.

With the records of the preparation (w = -T Kd, u = T V, Qd, Kg, Aqk, a), per chunk and in transposed form:

    R^T = u^T + S^T w^T      O^T = S^T Qd^T + R^T Aqk^T      S^T <- S^T diag(a) + R^T Kg

A CTA owns all 128 rows of V, which are the lanes of tensor memory. S^T [V, K] lies there in fp32 for the whole sequence; it
and R^T are rounded to bf16 as operands only, which lie there too, so that what is multiplied by a record, itself in shared
memory, never passes through shared memory.

============ ====== ====================================================================================================
role         warps  work
============ ====== ====================================================================================================
state        4      S to registers, rounded as operand, decayed and back; R to registers, u added, rounded as operand
output       4      O to registers, rounded, by way of shared memory to global memory, the rows that exist
producer     1      bulk copies of records, as two rings: *early* (w, u, Qd, a) and *late* (Kg, Aqk)
multiplier   1      all products
============ ====== ====================================================================================================

Order of one chunk; a column waits for what stands in the lines before, but for what the other two give it:

    state                        multiplier                     output
    S: round, store         ->   R = S w
    S: decay, store              O = S Qd
    R: add u, round, store  <-
                            ->   S += R Kg
    S: load                 <-   O += R Aqk                ->   O: load, copy out

``commit`` waits for all products before it: that S is updated tells that O's first half has read the old one, and that R
of the next chunk is there, that O's second half has read R. There are two accumulators of O, so that its way out may take
a chunk's time.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from kda_cute.device import ptx, varlen
from kda_cute.records import HEAD_DIM, decay_start, decay_units, image_offset
from kda_sm100.config import ChainConfig
from kda_sm100.kernels import interface, tensor
from kda_sm100.kernels.tensor import Operand
from kda_sm100.layouts import record_bytes

#: ``Int64`` offsets [N+1], initial_state [N,HV,128,128] fp32, o [B,T,HV,128] bf16, final_state [N,HV,128,128]
#: fp32, states [state_count,HV,128,128] bf16, transitions [N,HV,128,128] fp32 (of summaries), workspace
#: (``layouts``). ``Int32``: N sequences, of T tokens each or, with offsets of ``offset_bytes`` (4, 8; 0: none)
#: packed into T; ``v_first`` (0, 1): states are [V, K]; ``every``: chunks from a state to the next.
ARGUMENTS = {
    Int64: ("offsets", "initial_state", "o", "final_state", "states", "transitions", "workspace"),
    Int32: ("state_count", "N", "T", "HV", "offset_bytes", "v_first", "every"),
}

SHARED_BYTES = 227 * 1024  # what a CTA may have
RINGS = ((6, 6), (4, 4), (3, 3), (3, 2), (2, 2))  # stages of the early and the late ring, best first

WARPS = 12
OUTPUT, PRODUCER, MULTIPLIER = 4, 8, 9  # first warps of roles; the state's are 0 to 3, two are idle
WARPGROUP = 128
# Registers of the state's threads and of the last four warps'; the output's keep the third of 504 that all begin with.
STATE_REGISTERS, OTHER_REGISTERS = 208, 128

COPIED = 1  # the named barrier of the output warps


class ChainKernel:
    """Takes o, and `ARGUMENTS` (`interface`).

    A sequence of no tokens passes its state on. Rows of o outside of sequences are not written.
    """

    EARLY, LATE = ("w", "a", "u", "qd"), ("kg", "aqk")  # arrays of the rings
    IMAGES = ("o",)  # that have room besides
    CTAS = 1  # of a sequence and value head

    def __init__(self, config: ChainConfig):
        self.config = config
        C = self.chunk = config.chunk
        self.bytes = record_bytes(C) | {"o": 2 * C * HEAD_DIM}
        # B of each product: w and Qd alike.
        self.rows = Operand(C, HEAD_DIM)
        self.kg = Operand(C, HEAD_DIM, mn_major=True)
        self.aqk = Operand(C, C)
        self.columns = tensor.columns_of(C)
        for self.early, self.late in RINGS:
            stages = dict.fromkeys(self.EARLY, self.early) | dict.fromkeys(self.LATE, self.late)
            stages |= dict.fromkeys(self.IMAGES, 1)
            names = sorted(
                stages, key=lambda name: name == "a"
            )  # the last: images begin at multiples of 1024
            sizes = {name: stages[name] * self.bytes[name] for name in names}
            barriers = {  # mbarriers of each name, and arrivals: of a commit, of a copy, or one a warp
                "early_full": (self.early, 1),
                "early_empty": (self.early, 1 + 4),
                "late_full": (self.late, 1),
                "late_empty": (self.late, 1),
                "s_rounded": (1, 4),
                "r_made": (1, 1),
                "r_rounded": (1, 4),
                "s_made": (1, 1),
                "o_made": (2, 1),
                "o_read": (2, 4),
            }
            sizes |= {name: 8 * count for name, (count, _) in barriers.items()} | {"memory": 16}
            self.shared_bytes = sum(sizes.values())
            if self.shared_bytes <= SHARED_BYTES:
                break
        self.barriers = barriers
        self.at, end = {}, 0
        for name, size in sizes.items():
            self.at[name] = end
            end += size

    def fake_args(self) -> tuple:
        return interface.fake_args(ARGUMENTS)

    @cute.jit
    def __call__(self, o: cute.Tensor, *arguments):
        *arguments, stream = arguments
        x = interface.named(ARGUMENTS, arguments)
        self.kernel(tuple(arguments)).launch(
            grid=(x.N * x.HV * self.CTAS, 1, 1),
            block=(32 * WARPS, 1, 1),
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent; otherwise the DSL asks a device, at compile time
        )

    @cute.kernel
    def kernel(self, arguments: tuple):
        index, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        p = SimpleNamespace(**{name: Int32(shared.toint()) + at for name, at in self.at.items()})
        for name in self.barriers:
            setattr(p, name, cute.recast_ptr(shared + self.at[name], dtype=Int64))
        if thread == 0:
            for name, (count, arrivals) in self.barriers.items():
                for i in cutlass.range_constexpr(count):
                    cute.arch.mbarrier_init(getattr(p, name) + i, arrivals)
        cute.arch.mbarrier_init_fence()
        self.begin(p, index)
        if warp == 0:
            tensor.allocate(p.memory)
            tensor.fence_before()
        cute.arch.sync_threads()
        tensor.fence_after()

        if warp < OUTPUT:
            cute.arch.setmaxregister_increase(STATE_REGISTERS)
            self.carry_state(p, arguments, index)
        elif warp < PRODUCER:
            self.write_outputs(p, arguments, index)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == PRODUCER:
                self.produce(p, arguments, index)
            if warp == MULTIPLIER:
                self.multiply(p, arguments, index)
        tensor.fence_before()
        cute.arch.sync_threads()
        if warp == 0:
            tensor.fence_after()
            tensor.free(self.memory(p))

    def begin(self, p, index):
        """What all threads do before their roles: nothing."""

    def part(self, arguments, index):
        """For one role: the call, its sequences, and the CTA's share: sequence, head, first token in B*T, length, chunks,
        first record and the place of its matrix among [N, HV]. Not passed from role to role: DSL 4.6 puts what a branch
        makes of a namespace into it, and would use it in the next branch."""
        x = interface.named(ARGUMENTS, arguments)
        s = interface.sequences_of(x, self.chunk)
        n, head = index // x.HV, index % x.HV
        token, length, slot, _ = varlen.extent(s, n)
        # Offsets that are not in order lead anywhere, but not out of the workspace.
        chunks = cutlass.max(cutlass.min(cute.ceil_div(length, self.chunk), s.span - slot), 0)
        part = SimpleNamespace(
            sequence=n, head=head, token=token, length=length, chunks=chunks, record=slot * x.HV + head, matrix=index
        )  # fmt: skip
        return x, s, part

    def memory(self, p):
        """The address of the CTA's columns."""
        return ptx.load_shared(p.memory, Int32)

    # ---- producer, one warp

    @cute.jit
    def produce(self, p, arguments: tuple, index: Int32):
        """Fill both rings, chunk by chunk."""
        x, s, part = self.part(arguments, index)
        records = interface.records_of(x, s)
        early, late = Int32(0), Int32(0)
        early_phase, late_phase = Int32(1), Int32(1)
        for c in cutlass.range(part.chunks, unroll=1):
            record = part.record + c * x.HV
            cute.arch.mbarrier_wait(p.early_empty + early, early_phase)
            with cute.arch.elect_one():
                self.load_early(p, records, record, early, part)
            early, early_phase = self.following(early, early_phase, self.early)
            cute.arch.mbarrier_wait(p.late_empty + late, late_phase)
            with cute.arch.elect_one():
                self.load(p, records, record, p.late_full + late, late, self.LATE)
            late, late_phase = self.following(late, late_phase, self.late)

    def load_early(self, p, records, record, stage, part):
        self.load(p, records, record, p.early_full + stage, stage, self.EARLY)

    def load(self, p, records, record, full, stage, names):
        """What a record has in some arrays, to a stage of a ring."""
        cute.arch.mbarrier_arrive_and_expect_tx(full, sum(self.bytes[name] for name in names))
        for name in names:
            size = self.bytes[name]
            ptx.bulk_load(self.place(p, name, stage), records(name, record), Int32(size), Int32(full.toint()))

    def place(self, p, name, stage):
        """Where an array's stage lies in shared memory."""
        return getattr(p, name) + stage * self.bytes[name]

    def following(self, stage, phase, depth):
        """The next stage of a ring, and its phase."""
        last = stage == depth - 1
        return ptx.select(last, Int32(0), stage + 1), ptx.select(last, phase ^ 1, phase)

    # ---- multiplier, one warp

    @cute.jit
    def multiply(self, p, arguments: tuple, index: Int32):
        """All products, chunk by chunk."""
        _, _, part = self.part(arguments, index)
        early, late = Int32(0), Int32(0)
        early_phase, late_phase = Int32(0), Int32(0)
        memory = self.memory(p)
        s, s16, r, r16 = (memory + self.columns[name] for name in ("s", "s16", "r", "r16"))
        for c in cutlass.range(part.chunks, unroll=1):
            o, turn = memory + self.columns["o"] + c % 2 * self.chunk, c // 2 % 2
            cute.arch.mbarrier_wait(p.early_full + early, early_phase)
            self.wait(p.s_rounded, c % 2)
            with cute.arch.elect_one():
                tensor.product(r, s16, self.rows, self.place(p, "w", early), add=False)
                self.commit(p.r_made)
            self.wait(p.o_read + c % 2, turn ^ 1)
            with cute.arch.elect_one():
                tensor.product(o, s16, self.rows, self.place(p, "qd", early), add=False)
                self.commit(p.early_empty + early)
            cute.arch.mbarrier_wait(p.late_full + late, late_phase)
            self.wait(p.r_rounded, c % 2)
            with cute.arch.elect_one():
                tensor.product(s, r16, self.kg, self.place(p, "kg", late), add=True)
                self.commit(p.s_made)
                tensor.product(o, r16, self.aqk, self.place(p, "aqk", late), add=True)
                self.commit(p.late_empty + late)
                self.commit(
                    p.o_made + c % 2
                )  # the last one: when it has come, nothing is on its way any more
            early, early_phase = self.following(early, early_phase, self.early)
            late, late_phase = self.following(late, late_phase, self.late)

    def commit(self, barrier):
        tensor.commit(Int32(barrier.toint()))

    def wait(self, barrier, phase):
        """For what others did in tensor memory."""
        cute.arch.mbarrier_wait(barrier, phase)
        tensor.fence_after()

    def tell(self, barrier):
        """What this warp did in tensor memory is done: its loads and stores have been waited for."""
        tensor.fence_before()
        self.release(barrier)

    def release(self, barrier):
        """One arrival of the warp."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    # ---- state, four warps

    @cute.jit
    def carry_state(self, p, arguments: tuple, index: Int32):
        """The state from chunk to chunk, and R."""
        x, s, part = self.part(arguments, index)
        thread, _, _ = cute.arch.thread_idx()
        row = thread // 32 * tensor.ROWS  # of V, the warp's first
        memory = self.memory(p) + (row << 16)
        S = cute.make_rmem_tensor((HEAD_DIM,), Float32)  # a tile [32, K]
        self.enter(x, part, row, S)
        early, phase = Int32(0), Int32(0)
        number = Int32(0)
        if const_expr(self.config.states):
            number = self.states_before(s, part.sequence, x.every * self.chunk)
        for c in cutlass.range(part.chunks, unroll=1):
            words = self.round([S[i] for i in range(HEAD_DIM)])
            tensor.store(memory + self.columns["s16"], words)
            tensor.wait_stores()
            self.tell(p.s_rounded)
            if const_expr(self.config.states):  # noqa: SIM102 - the outer one is decided while tracing
                if c % x.every == 0:
                    self.store_bf16(x, number + c // x.every, part.head, row, S)
            cute.arch.mbarrier_wait(p.early_full + early, phase)
            factors = self.load_decay(self.place(p, "a", early))
            decayed = [S[i] * factors[i % 64 // 4 * 2 + i % 2] for i in range(HEAD_DIM)]
            tensor.store(memory + self.columns["s"], decayed)
            u = self.load_u(self.place(p, "u", early), row)
            self.release(p.early_empty + early)
            self.wait(p.r_made, c % 2)
            R = tensor.load(memory + self.columns["r"], self.chunk)
            tensor.store(memory + self.columns["r16"], self.round([x + y for x, y in zip(R, u, strict=True)]))
            tensor.wait_stores()
            self.tell(p.r_rounded)
            self.wait(p.s_made, c % 2)
            for i, value in enumerate(tensor.load(memory + self.columns["s"], HEAD_DIM)):
                S[i] = value
            early, phase = self.following(early, phase, self.early)
        self.leave(x, part, row, S)

    def enter(self, x, part, row, S):
        """The state at the start."""
        self.load_state(x, part.matrix, row, S)

    def leave(self, x, part, row, S):
        """The state at the end, if it is wanted."""
        self.store_state(x, x.final_state, part.matrix, row, S)

    def round(self, values):
        """fp32 values to bf16x2, in pairs."""
        return [ptx.pack_bf16x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]

    def load_u(self, shared, row):
        """The tile of u^T from the image of u [C, V]: 8x8 matrices, transposed."""
        values = []
        for half in range(2):
            for i in range(self.chunk // 16):
                place = shared + self.transposed(row + 16 * half, 16 * i)
                for pair in ptx.ldmatrix_x4(place, transpose=True):
                    values += ptx.unpack_bf16x2(pair)
        return values

    def transposed(self, row, token):
        """Where in an image [C, V] a lane's row of 16 bytes is, of four 8x8 matrices: 8 rows of V from ``row`` on and 8
        more, times 8 tokens from ``token`` on and 8 more."""
        lane = cute.arch.lane_idx()
        matrix = lane // 8
        token, row = token + 8 * (matrix // 2) + lane % 8, row + 8 * (matrix % 2)
        return image_offset(token, row, self.chunk, HEAD_DIM) * 2

    def load_decay(self, shared):
        """The decays of a thread's columns 8j + 2*(lane%4) + 0..1, j < 16. ``shared``: the address of a record's decays."""
        start = shared + decay_start(cute.arch.lane_idx() % 4)
        return [x for place in decay_units(start) for x in ptx.load_shared_x4(place, Float32)]

    # ---- states in global memory

    @cute.jit
    def states_before(self, s, sequence: Int32, every: Int32) -> Int32:
        """How many states, one for ``every`` tokens begun, the sequences before this one have, counted by a warp."""
        count = sequence * cute.ceil_div(s.T, every)
        if s.offset_bytes > 0:
            count = Int32(0)
            for n in cutlass.range(cute.arch.lane_idx(), sequence, 32, unroll=1):
                _, length, _, _ = varlen.extent(s, n)
                count += cute.ceil_div(length, every)
            for i in cutlass.range_constexpr(5):
                count += cute.arch.shuffle_sync_bfly(count, 1 << i)
        return count

    @cute.jit
    def store_bf16(self, x, number: Int32, head: Int32, row: Int32, S: cute.Tensor):
        """A state, rounded, to number ``number`` of the bf16 states, if it is there."""
        if number < x.state_count:
            matrix = x.states + (Int64(number) * x.HV + head) * (2 * HEAD_DIM * HEAD_DIM)
            lane = cute.arch.lane_idx()
            for i in cutlass.range_constexpr(HEAD_DIM // 4):
                for j in cutlass.range_constexpr(2):
                    # An 8x8 matrix of S^T: its first row of V and column of K.
                    v, k = row + 16 * (i // 16) + 8 * j, i % 16 * 8
                    pair = ptx.pack_bf16x2(S[4 * i + 2 * j], S[4 * i + 2 * j + 1])
                    at = (v + lane // 4) * HEAD_DIM + k + 2 * (lane % 4)
                    if x.v_first == 0:
                        pair = ptx.transpose_8x8(pair)
                        at = (k + lane // 4) * HEAD_DIM + v + 2 * (lane % 4)
                    ptx.store_global(matrix + at * 2, pair)

    def element(self, start, matrix, row, v_step, k_step):
        """The address, in a matrix of [N, HV], of the first element of a thread's tile; bytes from a row of S^T to the next,
        and from a column to the next, are given."""
        lane = cute.arch.lane_idx()
        first = (row + lane // 4) * v_step + 2 * (lane % 4) * k_step
        return start + Int64(matrix) * (4 * HEAD_DIM * HEAD_DIM) + first

    def pairs(self, v_step, k_step):
        """Of each two elements of a thread's tile that are neighbours in a row of S^T, how far they are from its first."""
        return [
            (16 * (i // 32) + 8 * (i % 2)) * v_step + i % 32 // 2 * 8 * k_step for i in range(HEAD_DIM // 2)
        ]

    @cute.jit
    def load_state(self, x, matrix: Int32, row: Int32, S: cute.Tensor):
        """The initial state; zeros where there is none."""
        step, exists = 4 * HEAD_DIM, x.initial_state != Int64(0)
        if x.v_first > 0:
            first = self.element(x.initial_state, matrix, row, step, 4)
            self.keep(S, [ptx.load_global_f32_x2(first + at, exists) for at in self.pairs(step, 4)])
        else:
            first = self.element(x.initial_state, matrix, row, 4, step)
            load = lambda at: ptx.load_global_f32(first + at, exists)
            self.keep(S, [(load(at), load(at + step)) for at in self.pairs(4, step)])

    def keep(self, S, pairs):
        for i, pair in enumerate(pairs):
            S[2 * i], S[2 * i + 1] = pair

    @cute.jit
    def store_state(self, x, target: Int64, matrix: Int32, row: Int32, S: cute.Tensor):
        """To a matrix of [N, HV] at ``target``, if that is there."""
        step = 4 * HEAD_DIM
        if target != Int64(0):
            if x.v_first > 0:
                self.put(self.element(target, matrix, row, step, 4), step, 4, S)
            else:
                self.put(self.element(target, matrix, row, 4, step), 4, step, S)

    def put(self, first, v_step, k_step, S):
        for i, at in enumerate(self.pairs(v_step, k_step)):
            if k_step == 4:
                ptx.store_global_x2(first + at, [S[2 * i], S[2 * i + 1]])
            else:
                ptx.store_global(first + at, S[2 * i])
                ptx.store_global(first + (at + k_step), S[2 * i + 1])

    # ---- output, four warps

    @cute.jit
    def write_outputs(self, p, arguments: tuple, index: Int32):
        """O of each chunk, the rows that exist."""
        x, _, part = self.part(arguments, index)
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        row = thread // 32 * tensor.ROWS
        memory = self.memory(p) + (row << 16) + self.columns["o"]
        pitch = Int64(x.HV) * (2 * HEAD_DIM)  # bytes from a token to the next
        address = x.o + (part.token * x.HV + part.head) * (2 * HEAD_DIM)
        for c in cutlass.range(part.chunks, unroll=1):
            self.wait(p.o_made + c % 2, c // 2 % 2)
            words = self.round(tensor.load(memory + c % 2 * self.chunk, self.chunk))
            self.tell(p.o_read + c % 2)
            self.sync()  # the image has been copied
            for i in cutlass.range_constexpr(self.chunk // 8):
                half, token = i // (self.chunk // 16), i % (self.chunk // 16) * 16
                place = p.o + self.transposed(row + 16 * half, token)
                ptx.stmatrix_x4(place, words[4 * i : 4 * i + 4], transpose=True)
            self.sync()
            self.copy_out(p.o, address, pitch, thread, part.length - c * self.chunk)
            address += pitch * self.chunk

    def copy_out(self, shared, address, pitch, thread, valid):
        """The image of O to rows ``pitch`` bytes apart, the first ``valid`` ones; by the output warps."""
        unit, first = thread % 16, thread // 16
        for start in range(0, self.chunk, WARPGROUP // 16):
            row = start + first
            values = ptx.load_shared_x4(shared + image_offset(row, unit * 8, self.chunk, HEAD_DIM) * 2, Int32)
            ptx.store_global_evict_first_x4(address + pitch * row + unit * 16, values, row < valid)

    def sync(self):
        cute.arch.barrier(barrier_id=COPIED, number_of_threads=WARPGROUP)
