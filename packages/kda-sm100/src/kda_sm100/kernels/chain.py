"""The chain: one CTA runs the recurrence over the chunks of one sequence and value head, the state in tensor memory.

The chain reads the chunk records of the intra-chunk kernel (w = -T Kd, u = T V, Qd, Kg, Aqk, a). Per chunk it computes, in
transposed form:

    R^T = u^T + S^T w^T      O^T = S^T Qd^T + R^T Aqk^T      S^T <- S^T diag(a) + R^T Kg

The CTA owns all 128 rows of V, which are the lanes of tensor memory. S^T [V, K] stays there in fp32 for the whole sequence. S
and R are rounded to bf16 as operands only. These operands lie in tensor memory too; the operands that they are multiplied with
lie in shared memory, as the bulk copies wrote them.

============ ====== ====================================================================================================
role         warps  work
============ ====== ====================================================================================================
state        4      loads S, writes its bf16 operand, decays S and writes it back; loads R, adds u, writes its bf16 operand
output       4      loads O, rounds it, and copies the rows that exist through shared memory to global memory
producer     1      copies records into two ring buffers: *early* (w, u, Qd, a) and *late* (Kg, Aqk)
MMA          1      issues all products
============ ====== ====================================================================================================

Order of one chunk. An arrow is an mbarrier; time runs downwards:

    state warps                               MMA warp                 output warps
    round S, store it     - s_bf16_full ->    R = S w
    decay S, store it                         O = S Qd     <- o_empty -   loaded O of two chunks before
    load R                <- r_full -         (R is done)
    add u, round, store   - r_bf16_full ->    S += R Kg
    load S                <- s_full -         O += R Aqk   - o_full ->    load O, copy it out

The store of the decayed S needs no arrow of its own: the state warps publish ``r_bf16_full`` after it, and S += R Kg waits for
that. The four barriers between state and MMA warps complete one phase per chunk, so chunk c waits for parity c % 2.

``tcgen05.commit`` waits for all earlier products of the thread. The commit that publishes S therefore also shows that the first
half of O has read the old bf16 S, and the commit that publishes the next R shows that the second half of O has read the bf16 R.
O has two accumulators, so that the output warps may take as long as a chunk.

docs/kernels/sm100-chain.md has the correctness argument.
"""

from enum import IntEnum
from types import SimpleNamespace
from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute
from cutlass.pipeline import PipelineUserType, make_pipeline_state

from kda_cute.device import ptx, varlen
from kda_cute.device.kernel import Kernel
from kda_cute.records import HEAD_DIM, decay_start, decay_units, image_offset
from kda_sm100.arguments import CHAIN
from kda_sm100.config import ChainConfig
from kda_sm100.kernels import tensor, workspace
from kda_sm100.kernels.tensor import Operand, TensorColumns
from kda_sm100.layouts import record_bytes


class FirstWarp(IntEnum):
    """The first warp of each role. Warps 10 and 11 are idle: setmaxnreg works on whole warpgroups."""

    STATE = 0
    OUTPUT = 4
    PRODUCER = 8
    MMA = 9


class NamedBarrier(IntEnum):
    """Hardware barriers; 0 belongs to ``sync_threads``."""

    OUTPUT_WARPS = 1


WARPS = 12
WARPGROUP = 128  # threads
#: Registers per thread. All threads start with 168. The output warps keep these.
STATE_REGISTERS, OTHER_REGISTERS = 208, 128

SHARED_BYTES = 227 * 1024  # what a CTA may use
#: Candidate depths of the early and the late ring, best first.
RINGS = ((6, 6), (4, 4), (3, 3), (3, 2), (2, 2))
ACCUMULATORS = 2  # of O
STATE_BYTES = 4 * HEAD_DIM * HEAD_DIM  # an fp32 state in global memory


class Mbarriers(NamedTuple):
    """A group of mbarriers: their number, and the arrivals that complete a phase of one.

    A commit of products, a bulk copy, and each warp of a role arrive once.
    """

    count: int
    arrivals: int


def mbarriers(early: int, late: int) -> dict[str, Mbarriers]:
    """Returns the mbarriers of a CTA by name. ``early`` and ``late``: stages of the rings."""
    return {
        "early_full": Mbarriers(early, 1),
        "early_empty": Mbarriers(early, 1 + 4),  # MMA warp, state warps
        "late_full": Mbarriers(late, 1),
        "late_empty": Mbarriers(late, 1),
        "s_bf16_full": Mbarriers(1, 4),
        "r_full": Mbarriers(1, 1),
        "r_bf16_full": Mbarriers(1, 4),
        "s_full": Mbarriers(1, 1),
        "o_full": Mbarriers(ACCUMULATORS, 1),
        "o_empty": Mbarriers(ACCUMULATORS, 4),
    }


def shared_memory(chunk: int, stages: dict[str, int], groups: dict[str, Mbarriers]) -> type:
    """Returns the ``cute.struct`` of a CTA's shared memory.

    ``stages``: of each image. ``groups``: the mbarriers. Images start at multiples of 1024 bytes, as the swizzle requires.
    """
    MemRange, Align = cute.struct.MemRange, cute.struct.Align
    columns = {"aqk": chunk, "t": chunk}
    image = lambda name, count: Align[MemRange[BFloat16, chunk * columns.get(name, HEAD_DIM) * count], 1024]
    fields = {
        **{name: image(name, count) for name, count in stages.items() if name != "a"},
        "a": Align[MemRange[Float32, HEAD_DIM * stages["a"]], 128],  # `decay_units` relies on it
        **{name: MemRange[Int64, group.count] for name, group in groups.items()},
        "tensor_memory": Int32,  # address of the allocated columns
    }
    return cute.struct(type("SharedMemory", (), {"__annotations__": fields}))


class ChainKernel(Kernel):
    """Takes o and `ChainArguments`.

    A sequence without tokens passes its state on. The kernel does not write rows of o outside sequences.

    Names of the methods: ``args``, the `ChainArguments`; ``smem``, the shared memory (`shared_memory`); ``seqs``, the packing of
    the sequences (`workspace.sequences`); ``column``, the columns of tensor memory (`TensorColumns`).
    """

    EARLY, LATE = ("w", "a", "u", "qd"), ("kg", "aqk")  # arrays of each ring
    OUTPUTS = True  # the kernel computes O
    STEP = 1  # from a chunk to the next one; -1: the chain runs from the last chunk to the first
    interface = CHAIN
    threads = 32 * WARPS

    def __init__(self, config: ChainConfig):
        self.config = config
        C = self.chunk = config.chunk
        self.writes_states = config.states
        self.bytes = record_bytes(C)
        # Operands B of the products. Qd has the shape and layout of w, so `self.w` describes both.
        self.w = Operand(C, HEAD_DIM)
        self.kg = Operand(C, HEAD_DIM, mn_major=True)
        self.aqk = Operand(C, C)
        self.tensor_columns = TensorColumns(C, self.OUTPUTS)
        for self.early_depth, self.late_depth in RINGS:
            stages = dict.fromkeys(self.EARLY, self.early_depth) | dict.fromkeys(self.LATE, self.late_depth)
            self.SharedMemory = shared_memory(C, stages | {"o": self.output_images()}, self.mbarriers())
            self.shared_bytes = self.SharedMemory.size_in_bytes()
            if self.shared_bytes <= SHARED_BYTES:
                break

    def output_images(self):
        """Returns how many images [C, V] the output warps need."""
        return int(self.OUTPUTS)

    def mbarriers(self):
        """Returns the mbarriers of a CTA by name."""
        return mbarriers(self.early_depth, self.late_depth)

    @cute.kernel
    def kernel(self, values: tuple):
        index, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = self.SharedMemory(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024))
        if thread == 0:
            for name, group in self.mbarriers().items():
                for i in cutlass.range_constexpr(group.count):
                    cute.arch.mbarrier_init(getattr(smem, name).data_ptr() + i, group.arrivals)
        cute.arch.mbarrier_init_fence()
        self.initialize(smem, index)
        if warp == 0:
            tensor.allocate(smem.tensor_memory.ptr)
            tensor.fence_before()
        cute.arch.sync_threads()
        tensor.fence_after()

        if warp < FirstWarp.OUTPUT:
            cute.arch.setmaxregister_increase(STATE_REGISTERS)
            self.carry_state(smem, values, index)
        elif warp < FirstWarp.PRODUCER:
            self.write_outputs(smem, values, index)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == FirstWarp.PRODUCER:
                self.produce(smem, values, index)
            if warp == FirstWarp.MMA:
                self.multiply(smem, values, index)
            if warp > FirstWarp.MMA:
                self.produce_values(smem, values, index)
        tensor.fence_before()
        cute.arch.sync_threads()
        if warp == 0:
            tensor.fence_after()
            tensor.free(smem.tensor_memory.ptr)

    def initialize(self, smem, index):
        """Initializes shared memory before the roles start. The chain needs nothing besides its mbarriers."""

    def task(self, values, index):
        """Returns the arguments, the packing of sequences, and the task of the CTA.

        A task has: sequence, head, first token in B*T, length, chunks, number of the first record, and number of its
        matrix in [N, HV]. Each role calls this for itself: DSL 4.6 would carry a namespace that one branch changes into the
        next branch.
        """
        args = self.interface.arguments(self.config)(*values)
        seqs = workspace.sequences(args, self.chunk)
        n, head = index // args.HV, index % args.HV
        token, length, slot, _ = varlen.extent(seqs, n)
        # If device offsets decrease, the task may be any, but must stay within the workspace.
        chunks = cutlass.max(cutlass.min(cute.ceil_div(length, self.chunk), seqs.span - slot), 0)
        task = SimpleNamespace(
            sequence=n, head=head, token=token, length=length, chunks=chunks, record=slot * args.HV + head, matrix=index
        )  # fmt: skip
        return args, seqs, task

    def columns(self, smem, row):
        """Returns the address of the CTA's columns in tensor memory, at lane ``row``."""
        return ptx.load_shared(Int32(smem.tensor_memory.ptr.toint()), Int32) + (row << 16)

    def stage(self, smem, name, stage):
        """Returns the shared address of stage number ``stage`` of the array ``name``."""
        return Int32(getattr(smem, name).data_ptr().toint()) + stage * self.bytes[name]

    # ---- synchronisation
    #
    #               waits or arrives at     with the fence of tensor memory
    #   acquire     full or empty, rings    no: bulk copies and shared memory only
    #   wait        any other mbarrier      yes, after the wait
    #   release     early_empty             no
    #   publish     any other mbarrier      yes, before the arrival
    #   commit      any, from the MMA warp  the instruction implies it

    def rings(self, user):
        """Returns the states of the early and the late ring. ``user``: whether the role fills or empties them."""
        return make_pipeline_state(user, self.early_depth), make_pipeline_state(user, self.late_depth)

    def wait(self, mbarriers, phase, stage=0):
        """Waits for an mbarrier after which this thread accesses tensor memory."""
        cute.arch.mbarrier_wait(mbarriers.data_ptr() + stage, phase)
        tensor.fence_after()

    def acquire(self, mbarriers, ring):
        """Waits until a stage of a ring in shared memory is full, or empty."""
        cute.arch.mbarrier_wait(mbarriers.data_ptr() + ring.index, ring.phase)

    def publish(self, mbarriers, stage=0):
        """Arrives once per warp after accesses to tensor memory that the warp has waited for."""
        tensor.fence_before()
        self.release(mbarriers, stage)

    def release(self, mbarriers, stage=0):
        """Arrives once per warp."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(mbarriers.data_ptr() + stage)

    def commit(self, mbarriers, stage=0):
        """Arrives once when all products that this thread has issued are done."""
        tensor.commit(mbarriers.data_ptr() + stage)

    # ---- producer, one warp

    @cute.jit
    def produce(self, smem, values: tuple, index: Int32):
        """Copies the records of the task into both rings."""
        args, seqs, task = self.task(values, index)
        address = self.record_addresses(args, seqs)
        early, late = self.rings(PipelineUserType.Producer)
        for c in cutlass.range(task.chunks, unroll=1):
            record = task.record + self.chunk_at(task, c) * args.HV
            self.acquire(smem.early_empty, early)
            with cute.arch.elect_one():
                self.load_early(smem, address, record, early.index, task)
            early.advance()
            self.acquire(smem.late_empty, late)
            with cute.arch.elect_one():
                self.load_late(smem, address, record, late.index, task)
            late.advance()
        self.drain(smem.early_empty, early, self.early_depth)
        self.drain(smem.late_empty, late, self.late_depth)

    def drain(self, empty, ring, stages):
        """Waits for the release of every stage of a ring, so that no commit arrives at its mbarrier after the CTA has ended."""
        for _ in range(stages):
            self.acquire(empty, ring)
            ring.advance()

    def record_addresses(self, args, seqs):
        """Returns a function from (array, record number) to the address of the record in the array."""
        return workspace.record_addresses(args, seqs)

    def produce_values(self, smem, values, index):
        """What the last two warps do: nothing."""

    def chunk_at(self, task, c):
        """Returns which chunk of the task is number ``c`` in the order of the chain."""
        return c if self.STEP > 0 else task.chunks - 1 - c

    def load_early(self, smem, address, record, stage, task):
        """Copies the early arrays of a record."""
        self.load(smem, address, record, smem.early_full, stage, self.EARLY)

    def load_late(self, smem, address, record, stage, task):
        """Copies the late arrays of a record."""
        self.load(smem, address, record, smem.late_full, stage, self.LATE)

    def load(self, smem, address, record, full, stage, names):
        """Copies the arrays ``names`` of a record to a stage. The stage's mbarrier in ``full`` counts the bytes."""
        full = full.data_ptr() + stage
        cute.arch.mbarrier_arrive_and_expect_tx(full, sum(self.bytes[name] for name in names))
        for name in names:
            size = Int32(self.bytes[name])
            ptx.bulk_load(self.stage(smem, name, stage), address(name, record), size, Int32(full.toint()))

    # ---- MMA, one warp

    @cute.jit
    def multiply(self, smem, values: tuple, index: Int32):
        """Issues all products. This is the only issue order of the kernel."""
        _, _, task = self.task(values, index)
        early, late = self.rings(PipelineUserType.Consumer)
        column, base = self.tensor_columns, self.columns(smem, 0)
        output = make_pipeline_state(PipelineUserType.Producer, ACCUMULATORS)
        s, s_bf16, r, r_bf16 = base + column.s, base + column.s_bf16, base + column.r, base + column.r_bf16
        for c in cutlass.range(task.chunks, unroll=1):
            o = base + column.o + output.index * self.chunk
            self.acquire(smem.early_full, early)
            self.wait(smem.s_bf16_full, c % 2)
            with cute.arch.elect_one():
                tensor.product(r, s_bf16, self.w, self.stage(smem, "w", early.index), add=False)
                self.commit(smem.r_full)
            self.await_accumulator(smem, output)
            with cute.arch.elect_one():
                # Qd, by the descriptor of w
                tensor.product(o, s_bf16, self.w, self.stage(smem, "qd", early.index), add=False)
                self.commit(smem.early_empty, early.index)
            self.acquire(smem.late_full, late)
            self.wait(smem.r_bf16_full, c % 2)
            with cute.arch.elect_one():
                tensor.product(s, r_bf16, self.kg, self.stage(smem, "kg", late.index), add=True)
                self.commit(smem.s_full)
                tensor.product(o, r_bf16, self.aqk, self.stage(smem, "aqk", late.index), add=True)
                self.commit(smem.late_empty, late.index)
                # The last commit. When the output warps have seen it, no product is in flight.
                self.commit(smem.o_full, output.index)
            early.advance()
            late.advance()
            output.advance()

    def await_accumulator(self, smem, output):
        """Waits until the output warps have loaded what an accumulator of O has held."""
        self.wait(smem.o_empty, output.phase, output.index)

    # ---- state, four warps

    @cute.jit
    def carry_state(self, smem, values: tuple, index: Int32):
        """Carries S from chunk to chunk, and turns R into an operand."""
        args, seqs, task = self.task(values, index)
        thread, _, _ = cute.arch.thread_idx()
        row = thread // 32 * tensor.ROWS  # the warp's first row of V
        S = cute.make_rmem_tensor((HEAD_DIM,), Float32)  # a tile [32, K]
        self.load_initial(args, task, row, S)
        early, _ = self.rings(PipelineUserType.Consumer)
        number = Int32(0)
        if const_expr(self.writes_states):
            number = self.states_before(seqs, task.sequence, args.every * self.chunk)
        self.carry_task(smem, args, task, row, S, early, number)
        self.store_final(args, task, row, S)

    def carry_task(self, smem, args, task, row, S, early, number):
        """Carries S through all chunks of the task. Arguments as those of `carry_chunks`."""
        self.carry_chunks(smem, args, task, row, S, early, number, Int32(0), task.chunks)

    @cute.jit
    def carry_chunks(
        self, smem, args, task, row: Int32, S: cute.Tensor, early, number: Int32, first: Int32, last: Int32
    ):
        """Carries S through chunks ``first`` to ``last - 1`` of the task.

        Args:
            row: the warp's first row of V.
            early: the state of the early ring before chunk ``first``.
            number: of the first bf16 state of the sequence.

        Returns:
            ``early`` after the last chunk.
        """
        column, base = self.tensor_columns, self.columns(smem, row)
        for c in cutlass.range(first, last, unroll=1):
            self.await_reader(smem, "s_read", c)
            tensor.store(base + column.s_bf16, self.round([S[i] for i in range(HEAD_DIM)]))
            tensor.wait_stores()
            self.publish(smem.s_bf16_full)
            self.save_state(args, task, number, c, row, S)
            self.acquire(smem.early_full, early)
            decay = self.load_decay(self.stage(smem, "a", early.index))
            # Element i of the tile is in the thread's column group ``i % 64 // 4``, left or right (`coordinates`). The
            # `wait_stores` before r_bf16_full waits for this store too.
            tensor.store(base + column.s, [S[i] * decay[i % 64 // 4 * 2 + i % 2] for i in range(HEAD_DIM)])
            u = self.load_u(self.stage(smem, "u", early.index), row)
            self.release(smem.early_empty, early.index)
            self.wait(smem.r_full, c % 2)
            R = tensor.load(base + column.r, self.chunk)
            self.await_reader(smem, "r_read", c)
            tensor.store(base + column.r_bf16, self.round([r + y for r, y in zip(R, u, strict=True)]))
            tensor.wait_stores()
            self.publish(smem.r_bf16_full)
            self.wait(smem.s_full, c % 2)
            for i, value in enumerate(tensor.load(base + column.s, HEAD_DIM)):
                S[i] = value
            early.advance()
        return early

    @cute.jit
    def save_state(self, args, task, number: Int32, c: Int32, row: Int32, S: cute.Tensor):
        """Stores S before chunk ``c`` of the task, if it is one of the states that the kernel writes."""
        if const_expr(self.writes_states):  # noqa: SIM102 - the outer condition is decided while tracing
            if c % args.every == 0:
                self.store_bf16(args, number + c // args.every, task.head, row, S)

    def await_reader(self, smem, name, c):
        """Waits until the output warps have read bf16 S (``s_read``) or R (``r_read``) of the chunk before, if they store it."""

    def load_initial(self, args, task, row, S):
        """Loads the state before the first chunk."""
        self.load_state(args.initial_state, args.v_first, task.matrix, row, S)

    def store_final(self, args, task, row, S):
        """Stores the state after the last chunk, if the caller wants it."""
        self.store_state(args.final_state, args.v_first, task.matrix, row, S)

    def round(self, values):
        """Returns fp32 values as bf16x2, in pairs."""
        return [ptx.pack_bf16x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]

    def load_u(self, shared, row):
        """Returns the tile of u^T from the image of u [C, V], as transposed 8x8 matrices."""
        values = []
        for half in range(2):
            for i in range(self.chunk // 16):
                address = shared + self.transposed(row + 16 * half, 16 * i, self.chunk)
                for pair in ptx.ldmatrix_x4(address, transpose=True):
                    values += ptx.unpack_bf16x2(pair)
        return values

    def transposed(self, row, token, rows):
        """Returns the byte offset of the lane's 16 bytes of four 8x8 matrices in an image [``rows``, V].

        The matrices cover 16 rows of V from ``row`` on and 16 tokens from ``token`` on.
        """
        lane = cute.arch.lane_idx()
        matrix = lane // 8
        token, row = token + 8 * (matrix // 2) + lane % 8, row + 8 * (matrix % 2)
        return image_offset(token, row, rows, HEAD_DIM) * 2

    def load_decay(self, shared):
        """Returns the decays of the thread's columns 8j + 2*(lane%4) + 0..1, j < 16, of a record's decays at ``shared``."""
        start = shared + decay_start(cute.arch.lane_idx() % 4)
        return [decay for address in decay_units(start) for decay in ptx.load_shared_x4(address, Float32)]

    # ---- states in global memory

    @cute.jit
    def states_before(self, seqs, sequence: Int32, every: Int32) -> Int32:
        """Returns the number of bf16 states of the sequences before this one. Executed by a warp.

        A sequence has one state per ``every`` tokens begun.
        """
        count = sequence * cute.ceil_div(seqs.T, every)
        if seqs.offset_bytes > 0:
            count = Int32(0)
            for n in cutlass.range(cute.arch.lane_idx(), sequence, 32, unroll=1):
                _, length, _, _ = varlen.extent(seqs, n)
                count += cute.ceil_div(length, every)
            for i in cutlass.range_constexpr(5):
                count += cute.arch.shuffle_sync_bfly(count, 1 << i)
        return count

    @cute.jit
    def store_bf16(self, args, number: Int32, head: Int32, row: Int32, S: cute.Tensor):
        """Stores S in bf16 as state ``number``. Skips numbers outside the array, which decreasing offsets may cause."""
        if number < args.state_count:
            matrix = args.states + (Int64(number) * args.HV + head) * (2 * HEAD_DIM * HEAD_DIM)
            self.store_bf16_matrix(matrix, args.v_first, row, S)

    @cute.jit
    def store_bf16_matrix(self, matrix: Int64, v_first: Int32, row: Int32, S: cute.Tensor):
        """Stores S in bf16 to the matrix at an address."""
        lane = cute.arch.lane_idx()
        for i, (v, k) in enumerate(self.corners(row)):
            pair = ptx.pack_bf16x2(S[2 * i], S[2 * i + 1])
            element = (v + lane // 4) * HEAD_DIM + k + 2 * (lane % 4)
            if v_first == 0:
                pair = ptx.transpose_8x8(pair)
                element = (k + lane // 4) * HEAD_DIM + v + 2 * (lane % 4)
            ptx.store_global(matrix + element * 2, pair)

    def corners(self, row):
        """Returns the first (row of V, column of K) of the 8x8 matrix of S^T to which each pair of the thread's tile belongs."""
        return [(row + 16 * (i // 32) + 8 * (i % 2), i % 32 // 2 * 8) for i in range(HEAD_DIM // 2)]

    def matrix(self, start, number, strides):
        """Returns matrix ``number`` of the fp32 states at ``start`` as a tensor [V, K]."""
        address = start + Int64(number) * STATE_BYTES
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout((HEAD_DIM, HEAD_DIM), stride=strides))

    def coordinates(self, row):
        """Returns (row of V, column of K) of each element of the thread's tile [32, K]. ``row``: the warp's first row.

        Bits of the element's index i, from the highest: half of 16 rows (1), group of 8 columns (4), upper or lower 8 rows (1),
        left or right column of a pair (1). See `tensor`.
        """
        lane = cute.arch.lane_idx()
        v, k = row + lane // 4, 2 * (lane % 4)
        return [(v + 16 * (i // 64) + 8 * (i // 2 % 2), k + i % 64 // 4 * 8 + i % 2) for i in range(HEAD_DIM)]

    @cute.jit
    def load_state(self, start: Int64, v_first: Int32, matrix: Int32, row: Int32, S: cute.Tensor):
        """Loads a matrix of the fp32 states at ``start``; zeros if that is 0."""
        # Predicated loads. A branch around plain loads makes the compiler compute addresses anew in the loop over chunks.
        exists = start != Int64(0)
        if v_first > 0:
            source = self.matrix(start, matrix, (HEAD_DIM, 1))
            for i, at in enumerate(self.coordinates(row)[::2]):
                S[2 * i], S[2 * i + 1] = ptx.load_global_f32_x2(self.address(source, at), exists)
        else:
            source = self.matrix(start, matrix, (1, HEAD_DIM))
            for i, at in enumerate(self.coordinates(row)):
                S[i] = ptx.load_global_f32(self.address(source, at), exists)

    def load_identity(self, row, S):
        """Sets S to the identity."""
        for i, (v, k) in enumerate(self.coordinates(row)):
            S[i] = ptx.select(v == k, Float32(1.0), Float32(0.0))

    def address(self, source, coordinates):
        """Returns the address of an element of a tensor in global memory."""
        return Int64((source.iterator + cute.crd2idx(coordinates, source.layout)).toint())

    @cute.jit
    def store_state(self, target: Int64, v_first: Int32, matrix: Int32, row: Int32, S: cute.Tensor):
        """Stores S as a matrix of the fp32 states at ``target``; does nothing if that is 0."""
        if target != Int64(0):
            if v_first > 0:
                self.store_tile(self.matrix(target, matrix, (HEAD_DIM, 1)), row, S)
            else:
                self.store_tile(self.matrix(target, matrix, (1, HEAD_DIM)), row, S)

    def store_tile(self, target, row, S):
        """Stores the thread's tile to a matrix [V, K]."""
        for i, (v, k) in enumerate(self.coordinates(row)):
            target[v, k] = S[i]

    # ---- output, four warps

    @cute.jit
    def write_outputs(self, smem, values: tuple, index: Int32):
        """Copies the rows of O that exist to global memory."""
        args, _, task = self.task(values, index)
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        row = thread // 32 * tensor.ROWS
        base = self.columns(smem, row) + self.tensor_columns.o
        image = Int32(smem.o.data_ptr().toint())
        output = make_pipeline_state(PipelineUserType.Consumer, ACCUMULATORS)
        pitch = Int64(args.HV) * (2 * HEAD_DIM)  # bytes from a token to the next
        address = args.o + (task.token * args.HV + task.head) * (2 * HEAD_DIM)
        address += pitch * (self.chunk_at(task, 0) * self.chunk)
        for c in cutlass.range(task.chunks, unroll=1):
            self.wait(smem.o_full, output.phase, output.index)
            words = self.round(tensor.load(base + output.index * self.chunk, self.chunk))
            self.publish(smem.o_empty, output.index)
            output.advance()
            self.store_transposed(image, words, row, self.chunk)
            valid = task.length - self.chunk_at(task, c) * self.chunk
            self.copy_out(image, address, pitch, thread, valid)
            address += pitch * (self.STEP * self.chunk)

    def store_transposed(self, image, words, row, rows):
        """Stores the transpose of a tile in bf16x2, ``row`` its first row of V, to an image [``rows``, V] between two barriers. The
        first one waits for the copy of what was in the image before."""
        self.sync_output_warps()
        for i in range(rows // 8):
            half, token = i // (rows // 16), i % (rows // 16) * 16
            tile = image + self.transposed(row + 16 * half, token, rows)
            ptx.stmatrix_x4(tile, words[4 * i : 4 * i + 4], transpose=True)
        self.sync_output_warps()

    def copy_out(self, image, address, pitch, thread, valid, rows=None):
        """Copies the first ``valid`` rows of an image [``rows``, V], by default [C, V], to rows that lie ``pitch`` bytes apart."""
        rows = self.chunk if rows is None else rows
        unit, first = thread % 16, thread // 16
        for start in range(0, rows, WARPGROUP // 16):
            row = start + first
            values = ptx.load_shared_x4(image + image_offset(row, unit * 8, rows, HEAD_DIM) * 2, Int32)
            ptx.store_global_evict_first_x4(address + pitch * row + unit * 16, values, row < valid)

    def sync_output_warps(self):
        cute.arch.barrier(barrier_id=NamedBarrier.OUTPUT_WARPS, number_of_threads=WARPGROUP)
