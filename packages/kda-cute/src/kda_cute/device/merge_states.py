"""The merge: the state before every segment of a sequence, from what each segment does to a state.

    S_1 = exit of segment 0,    S_{j+1} = M_j S_j + B_j

A CTA has 8 or 16 columns of the states of one sequence and value head, and goes from segment to segment: columns of S do
not meet. A warp has 16 rows. It alone needs these rows of M, which come right into its registers: each block as soon as
the same one of the M before is split, so that it has most of a step to arrive, and copies spread over the step. All
warps need all of S, from shared memory.

Products are those of two TF32 parts of each factor, three of four (the last is below 2^-22), summed in fp32: nothing is
rounded to less than the segments' own launch keeps. Tensor cores do not round their sums but cut them off: so sums are
short, and the last ones are added outside.

Backends share it: it has nothing that is particular to an architecture.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from kda_cute.device import ptx
from kda_cute.records import HEAD_DIM

THREADS = 32 * HEAD_DIM // 16
BLOCKS = HEAD_DIM // 16  # of k, of which the four lanes of a row have four each: 16 bytes of M. Two MMAs
SUMS = 4  # of the products of the greater parts
ROW = 4 * HEAD_DIM  # bytes
MATRIX = HEAD_DIM * ROW

#: The arguments, in order, by type. Addresses: starts, exits and transitions, [P,HV,128,128] fp32, and bounds [N+1] int32:
#: segments bounds[n] to bounds[n+1] - 1 are those of sequence n. N and HV.
ARGUMENTS = {Int64: ("starts", "exits", "transitions", "bounds"), Int32: ("N", "HV")}


@dataclass(frozen=True)
class MergeConfig:
    """Variant of the merge: the ``columns`` of a CTA, 8 or 16. Raises ValueError on others."""

    columns: int = 8

    def __post_init__(self) -> None:
        if self.columns not in (8, 16):
            raise ValueError(f"columns: expected 8 or 16, got {self.columns}")


#: All variants.
MERGES = MergeConfig(8), MergeConfig(16)


def merge_config(states: int, sms: int) -> MergeConfig:
    """The variant for a number of states (sequences times value heads) on a device of ``sms`` SMs: fewer columns while every
    CTA finds an SM of its own; then more, for each CTA reads all of M."""
    return MergeConfig(8 if states * (HEAD_DIM // 8) <= sms else 16)


class MergeKernel:
    """Takes starts, which tells the device, and `ARGUMENTS`; writes the starts of all segments but the first ones."""

    spill_allowance = 0

    def __init__(self, config: MergeConfig):
        self.columns, self.tiles = config.columns, config.columns // 8
        self.parts_bytes = 2 * ROW * self.columns  # a state's columns in two parts
        self.shared_bytes = 2 * self.parts_bytes

    def fake_args(self) -> tuple:
        shape = tuple(cute.sym_int() for _ in range(4))
        starts = make_fake_compact_tensor(Float32, shape, stride_order=(3, 2, 1, 0), assumed_align=16)
        values = [kind(0) for kind, names in ARGUMENTS.items() for _ in names]
        return (starts, *values, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(self, starts: cute.Tensor, *arguments):
        *arguments, stream = arguments
        names = [name for group in ARGUMENTS.values() for name in group]
        x = SimpleNamespace(**dict(zip(names, arguments, strict=True)))
        self.kernel(tuple(arguments)).launch(
            grid=(x.N, x.HV, HEAD_DIM // self.columns),  # only the first may exceed 65535
            block=(THREADS, 1, 1),
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=15,  # percent: of one CTA. The rest is the L1's, through which M comes
        )

    @cute.kernel
    def kernel(self, arguments: tuple):
        names = [name for group in ARGUMENTS.values() for name in group]
        x = SimpleNamespace(**dict(zip(names, arguments, strict=True)))
        thread, _, _ = cute.arch.thread_idx()
        n, head, block = cute.arch.block_idx()
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())
        first = ptx.load_global_i32(x.bounds + Int64(n) * 4, n < x.N)
        last = ptx.load_global_i32(x.bounds + Int64(n) * 4 + 4, n < x.N) - 1
        if first < last:
            place = lambda segment: (Int64(segment) * x.HV + head) * MATRIX
            # Rows r and r + 8 of an MMA are 2r and 2r + 1 of the warp's, so that a thread has pairs of rows of S: of k.
            lane = thread % 32
            row = thread // 32 * 16 + lane // 4 * 2
            left = row * ROW + lane % 4 * 16
            own = row * ROW + block * (self.columns * 4) + lane % 4 * 8
            matrix = [y for k in range(BLOCKS) for y in self.load(x.transitions + place(first + 1) + left, k)]
            state = self.load_state(x.exits + place(first) + own)
            self.put(shared, thread, first + 1, state, x.starts + place(first + 1) + own)
            for segment in cutlass.range(first + 1, last, unroll=1):
                cute.arch.sync_threads()  # S is there, and the room of the one before is free
                added = self.load_state(x.exits + place(segment) + own)
                following = x.transitions + place(segment + 1) + left  # there is an M of the last segment too
                product, matrix = self.product(shared, lane, segment, matrix, following)
                state = [y + z for y, z in zip(product, added, strict=True)]
                self.put(shared, thread, segment + 1, state, x.starts + place(segment + 1) + own)

    def load(self, address, block):
        """The thread's part of a block of M: four k of two rows."""
        at = address + block * 64
        return ptx.load_global_f32_x4(at) + ptx.load_global_f32_x4(at + ROW)

    def load_state(self, address):
        """The thread's values of B: for each tile two columns of two rows, as accumulators are."""
        places = [address + tile * 32 + row * ROW for tile in range(self.tiles) for row in range(2)]
        return [y for at in places for y in ptx.load_global_f32_x2(at, Boolean(True))]

    def parts(self, shared, segment, block, tile):
        """Where shared memory has a tile of 16 rows of S in two parts, 512 bytes each."""
        return shared + segment % 2 * self.parts_bytes + block * (self.tiles * 1024) + tile * 1024

    def slot(self, column, group):
        """Where a part has the four k of a group of a column: 16 bytes, so placed that neither the threads of ``put`` nor
        those of ``right`` meet at a bank."""
        return (group * 8 + (column ^ (group * 2 + group % 2))) * 16

    def put(self, shared, thread, segment, state, address):
        """The thread's values of the state before a segment: to global memory, and in two parts to shared memory."""
        lane = thread % 32
        for tile in range(self.tiles):
            values = state[4 * tile : 4 * tile + 4]
            for row in range(2):
                ptx.store_global_x2(address + tile * 32 + row * ROW, values[2 * row : 2 * row + 2])
            room = self.parts(shared, segment, thread // 32, tile) + lane // 4 % 2 * 8
            for column in range(2):
                pairs = zip(*(ptx.split_tf32(values[2 * row + column]) for row in range(2)), strict=True)
                for part, pair in enumerate(pairs):
                    slot = self.slot(lane % 4 * 2 + column, lane // 8)
                    ptx.store_shared_x2(room + part * 512 + slot, pair)

    def right(self, shared, segment, block, slot):
        """The thread's part of a block of S: for each tile and part four k of a column."""
        rooms = [self.parts(shared, segment, block, tile) + slot for tile in range(self.tiles)]
        return [[ptx.load_shared_x4(room + part * 512, Int32) for part in range(2)] for room in rooms]

    def product(self, shared, lane, segment, matrix, address):
        """The thread's values of M S, and its part of the next M, which is at an address."""
        acc = [[[Float32(0.0)] * 4 for _ in range(2 + SUMS)] for _ in range(self.tiles)]
        slot = self.slot(lane // 4, lane % 4)
        following, right = [], self.right(shared, segment, 0, slot)
        for block in range(BLOCKS):
            left = [ptx.split_tf32(y) for y in matrix[8 * block : 8 * block + 8]]
            following += self.load(address, block)
            present = right
            if block + 1 < BLOCKS:
                right = self.right(shared, segment, block + 1, slot)
            for b, sums in zip(present, acc, strict=True):
                for k in (0, 2):
                    high, low = ([left[at][part] for at in (k, k + 4, k + 1, k + 5)] for part in range(2))
                    b_high, b_low = (part[k : k + 2] for part in b)
                    main = 2 + (2 * block + k // 2) % SUMS
                    sums[0] = ptx.mma_m16n8k8_tf32(low, b_high, sums[0])
                    sums[1] = ptx.mma_m16n8k8_tf32(high, b_low, sums[1])
                    sums[main] = ptx.mma_m16n8k8_tf32(high, b_high, sums[main])
            cute.arch.sync_warp()  # the assembler would gather the loads of all blocks at one place
        tree = lambda x, y, *main: (x + y) + ((main[0] + main[1]) + (main[2] + main[3]))
        return [tree(*values) for sums in acc for values in zip(*sums, strict=True)], following
