"""The merge of states: the state before every segment of a sequence, from the segments' summaries.

    S_1 = exit of segment 0,    S_{j+1} = M_j S_j + B_j

A CTA owns 8 or 16 columns of the states of one sequence and value head, and works through the segments in order; columns of
S are independent. A warp owns 16 rows. No other warp needs these rows of M, so they are loaded straight into its registers:
each block is requested as soon as the same block of the previous M has been split. Loads then have most of a step to arrive,
and spread over the step. All warps need the whole of S, which is in shared memory.

A product sums three of the four products of two TF32 parts of each factor in fp32; the fourth is below 2^-22. Nothing is
rounded to less than the segments' own launch keeps. Tensor cores truncate their sums, so sums of MMAs are short, and the
last additions are ordinary ones.

Backends share this kernel: it uses nothing that is particular to an architecture.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.kernel import Kernel
from kda_cute.merge import MERGE, MergeArguments, MergeConfig
from kda_cute.records import HEAD_DIM

THREADS = 32 * HEAD_DIM // 16
BLOCKS = (
    HEAD_DIM // 16
)  # of k. Each lane of a quad has four k of a block: 16 bytes of a row of M, for two MMAs of k8
SUMS = 4  # accumulators of the products of the high parts
ROW = 4 * HEAD_DIM  # bytes
MATRIX = HEAD_DIM * ROW


class MergeKernel(Kernel):
    """Takes the tensor starts, which determines the device and the stream, and the values of `MergeArguments`. Writes the starts of all segments but the
    first of each sequence."""

    spill_allowance = 0
    interface = MERGE
    threads = THREADS
    carveout = 15  # one CTA's. The rest is L1, which M passes through
    leading = Float32

    def __init__(self, config: MergeConfig):
        self.config = config
        self.columns, self.tiles = config.columns, config.columns // 8
        self.parts_bytes = 2 * ROW * self.columns  # a state's columns in two parts
        self.shared_bytes = 2 * self.parts_bytes

    @cute.kernel
    def kernel(self, values: tuple):
        x = MergeArguments(*values)
        thread, _, _ = cute.arch.thread_idx()
        n, head, block = cute.arch.block_idx()
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())
        first = ptx.load_global_i32(x.bounds + Int64(n) * 4, n < x.N)
        last = ptx.load_global_i32(x.bounds + Int64(n) * 4 + 4, n < x.N) - 1
        if first < last:
            place = lambda segment: (Int64(segment) * x.HV + head) * MATRIX
            # Rows r and r + 8 of an MMA are the warp's rows 2r and 2r + 1, so that a thread has pairs of rows of S, which are k.
            lane = thread % 32
            row = thread // 32 * 16 + lane // 4 * 2
            left = row * ROW + lane % 4 * 16
            own = row * ROW + block * (self.columns * 4) + lane % 4 * 8
            matrix = [
                y for k in range(BLOCKS) for y in self.load_rows(x.transitions + place(first + 1) + left, k)
            ]
            state = self.load_state(x.exits + place(first) + own)
            self.store_state(shared, thread, first + 1, state, x.starts + place(first + 1) + own)
            for segment in cutlass.range(first + 1, last, unroll=1):
                cute.arch.sync_threads()  # S is complete, and no thread still reads the S before it
                added = self.load_state(x.exits + place(segment) + own)
                following = x.transitions + place(segment + 1) + left  # the last segment has an M too
                product, matrix = self.product(shared, lane, segment, matrix, following)
                state = [y + z for y, z in zip(product, added, strict=True)]
                self.store_state(shared, thread, segment + 1, state, x.starts + place(segment + 1) + own)

    def load_rows(self, address, block):
        """Loads the thread's part of a block of M: four k of two rows."""
        at = address + block * 64
        return ptx.load_global_f32_x4(at) + ptx.load_global_f32_x4(at + ROW)

    def load_state(self, address):
        """Loads the thread's values of B in the order of accumulators: for each tile two columns of two rows."""
        places = [address + tile * 32 + row * ROW for tile in range(self.tiles) for row in range(2)]
        return [y for at in places for y in ptx.load_global_f32_x2(at, Boolean(True))]

    def parts(self, shared, segment, block, tile):
        """Returns the shared address of a tile of 16 rows of S, in two parts of 512 bytes each."""
        return shared + segment % 2 * self.parts_bytes + block * (self.tiles * 1024) + tile * 1024

    def unit(self, column, group):
        """Returns the offset, in a part, of the 16 bytes of a column's four k of a group. A part is [4 groups][8 columns] of
        such units.

        Column c of groups 0 to 3 lies at c XOR 0, 3, 4 and 7. So neither access has bank conflicts: in `store_state` a half
        warp stores the columns of one parity of two groups, and in `load_columns` eight lanes load two columns of all groups.
        """
        return (group * 8 + (column ^ (group * 2 + group % 2))) * 16

    def store_state(self, shared, thread, segment, state, address):
        """Stores the thread's values of the state before a segment to global memory, and in two parts to shared memory."""
        lane = thread % 32
        for tile in range(self.tiles):
            values = state[4 * tile : 4 * tile + 4]
            for row in range(2):
                ptx.store_global_x2(address + tile * 32 + row * ROW, values[2 * row : 2 * row + 2])
            start = self.parts(shared, segment, thread // 32, tile) + lane // 4 % 2 * 8
            for column in range(2):
                pairs = zip(*(ptx.split_tf32(values[2 * row + column]) for row in range(2)), strict=True)
                for part, pair in enumerate(pairs):
                    unit = self.unit(lane % 4 * 2 + column, lane // 8)
                    ptx.store_shared_x2(start + part * 512 + unit, pair)

    def load_columns(self, shared, segment, block, unit):
        """Loads the thread's part of a block of S: for each tile and part four k of a column."""
        addresses = [self.parts(shared, segment, block, tile) + unit for tile in range(self.tiles)]
        return [[ptx.load_shared_x4(start + part * 512, Int32) for part in range(2)] for start in addresses]

    def product(self, shared, lane, segment, matrix, address):
        """Returns the thread's values of M S, and its part of the next M, at ``address``."""
        acc = [[[Float32(0.0)] * 4 for _ in range(2 + SUMS)] for _ in range(self.tiles)]
        unit = self.unit(lane // 4, lane % 4)
        following, right = [], self.load_columns(shared, segment, 0, unit)
        for block in range(BLOCKS):
            left = [ptx.split_tf32(y) for y in matrix[8 * block : 8 * block + 8]]
            following += self.load_rows(address, block)
            present = right
            if block + 1 < BLOCKS:
                right = self.load_columns(shared, segment, block + 1, unit)
            for b, sums in zip(present, acc, strict=True):
                for k in (0, 2):
                    high, low = ([left[at][part] for at in (k, k + 4, k + 1, k + 5)] for part in range(2))
                    b_high, b_low = (part[k : k + 2] for part in b)
                    main = 2 + (2 * block + k // 2) % SUMS
                    sums[0] = ptx.mma_m16n8k8_tf32(low, b_high, sums[0])
                    sums[1] = ptx.mma_m16n8k8_tf32(high, b_low, sums[1])
                    sums[main] = ptx.mma_m16n8k8_tf32(high, b_high, sums[main])
            cute.arch.sync_warp()  # otherwise ptxas moves the loads of all blocks to one place
        tree = lambda x, y, *main: (x + y) + ((main[0] + main[1]) + (main[2] + main[3]))
        return [tree(*values) for sums in acc for values in zip(*sums, strict=True)], following
