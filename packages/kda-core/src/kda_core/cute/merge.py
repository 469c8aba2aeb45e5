"""The merge: the state before every segment of a sequence, from what each segment does to a state.

    S_1 = exit of segment 0,    S_{j+1} = M_j S_j + B_j

A CTA has `COLUMNS` columns of the states of one sequence and value head, and goes from segment to segment: columns of S do
not meet. Products are fp32 FMAs, so that nothing is rounded that the segments' own launch has not. The M of the next two
segments are on their way to shared memory while one is multiplied.

Shared memory bounds a product, so that a thread multiplies 4 rows of M by all columns, over an eighth of k: M is then read
once. Eight lanes hold such parts of the same sums; they exchange halves until each has the sum of one row and four columns.

Backends share it: it has nothing that is particular to an architecture.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from kda_core.cute import device as dev
from kda_core.cute.operands import HEAD_DIM

COLUMNS = 8
THREADS = 2 * HEAD_DIM  # two a row of S, with four columns each
LANES = 8  # that share a product over k
ROWS = 4  # of a thread's product
ROW = 4 * HEAD_DIM  # bytes
MATRIX = HEAD_DIM * ROW
ROOMS = 3  # for M
STATE = ROW * COLUMNS  # bytes of a state's columns, of which there are two

#: The arguments, in order, by type. Addresses: starts, exits and transitions, [P,HV,128,128] fp32, and bounds [N+1] int32:
#: segments bounds[n] to bounds[n+1] - 1 are those of sequence n. N and HV.
ARGUMENTS = {Int64: ("starts", "exits", "transitions", "bounds"), Int32: ("N", "HV")}


@dataclass(frozen=True)
class MergeConfig:
    """The merge has one variant."""


class MergeKernel:
    """Takes starts, which tells the device, and `ARGUMENTS`; writes the starts of all segments but the first ones."""

    spill_allowance = 0

    def __init__(self, config: MergeConfig):
        self.shared_bytes = ROOMS * MATRIX + 2 * STATE

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
            grid=(x.N, x.HV, HEAD_DIM // COLUMNS),  # only the first may exceed 65535
            block=(THREADS, 1, 1),
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent; otherwise the DSL asks a device, at compile time
        )

    @cute.kernel
    def kernel(self, arguments: tuple):
        names = [name for group in ARGUMENTS.values() for name in group]
        x = SimpleNamespace(**dict(zip(names, arguments, strict=True)))
        thread, _, _ = cute.arch.thread_idx()
        n, head, block = cute.arch.block_idx()
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())
        first = dev.load_global_i32(x.bounds + Int64(n) * 4, n < x.N)
        last = dev.load_global_i32(x.bounds + Int64(n) * 4 + 4, n < x.N) - 1
        if first < last:
            matrix = lambda segment: (Int64(segment) * x.HV + head) * MATRIX
            own = thread // 2 * ROW + (block * COLUMNS + thread % 2 * 4) * 4
            for ahead in (1, 2):
                segment = first + ahead
                self.fetch(shared, thread, segment, x.transitions + matrix(segment), segment < last)
            state = self.load(x.exits + matrix(first) + own)
            self.put(shared, thread, first + 1, state, x.starts + matrix(first + 1) + own)
            for segment in cutlass.range(first + 1, last, unroll=1):
                cute.arch.cp_async_wait_group(1)
                cute.arch.sync_threads()  # M and S are there, and the room of the M before is free
                added = self.load(x.exits + matrix(segment) + own)
                following = segment + 2
                self.fetch(shared, thread, following, x.transitions + matrix(following), following < last)
                product = self.product(shared, thread, segment)
                state = [y + z for y, z in zip(product, added, strict=True)]
                self.put(shared, thread, segment + 1, state, x.starts + matrix(segment + 1) + own)

    def load(self, address):
        """Four columns of a row of B."""
        return [dev.load_global_f32(address + 4 * i, Boolean(True)) for i in range(4)]

    def fetch(self, shared, thread, segment, address, exists):
        """M of a segment to its room."""
        room = shared + segment % ROOMS * MATRIX
        for start in range(0, MATRIX, 16 * THREADS):
            at = start + thread * 16
            dev.cp_async_x4(room + at, address + at, exists)
        cute.arch.cp_async_commit_group()

    def state(self, shared, segment):
        return shared + ROOMS * MATRIX + segment % 2 * STATE

    def put(self, shared, thread, segment, state, address):
        """Four columns of a row of the state before a segment: to global memory, and to shared memory, where the rows
        that `LANES` lanes read at once lie in different banks."""
        k, part = thread // 2, thread % 2
        at = k // 32 * 1024 + k % 4 * 256 + part * 128 + k // 4 % LANES * 16
        dev.store_shared_x4(self.state(shared, segment) + at, state)
        dev.store_global_x4(address, state)

    def product(self, shared, thread, segment):
        """Four columns of the thread's row of M S."""
        lane = thread % LANES
        matrix = shared + segment % ROOMS * MATRIX + thread // LANES * (ROWS * ROW) + lane * 16
        state = self.state(shared, segment) + lane * 16
        acc = [[Float32(0.0)] * COLUMNS for _ in range(ROWS)]
        for i in range(HEAD_DIM // (4 * LANES)):  # k = 32 i + 4 lane + e
            left = [dev.load_shared_x4(matrix + row * ROW + i * 128, Float32) for row in range(ROWS)]
            for e in range(4):
                at = state + i * 1024 + e * 256
                right = dev.load_shared_x4(at, Float32) + dev.load_shared_x4(at + 128, Float32)
                acc = [[dev.fma(x[e], y, z) for y, z in zip(right, sums)] for x, sums in zip(left, acc)]
        values = [x for row in acc for x in row]
        for bit in (4, 2, 1):  # lane = 2 * row + half of the columns
            upper, half = (lane & bit) > 0, len(values) // 2
            low, high = values[:half], values[half:]
            kept = [dev.select(upper, y, x) for x, y in zip(low, high)]
            given = [dev.select(upper, x, y) for x, y in zip(low, high)]
            values = [x + cute.arch.shuffle_sync_bfly(y, bit) for x, y in zip(kept, given)]
        return values
