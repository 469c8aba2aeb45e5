"""tcgen05 and tensor memory for one CTA: operands in bf16, sums in fp32.

Tensor memory has 128 lanes, which are the rows of D and A, and 512 columns of 4 bytes. An address is lane << 16 | column. A
product has M = 128. Row i of D is lane i, and column j of D is a column. A column of A in tensor memory holds two neighbours of a
row. B is an image in shared memory (`kda_cute.records`): K-major [N, K], or MN-major [K, N]. A may be such an image as well (`product_of_images`), and
M may then be 64: rows 16w to 16w + 15 of D are lanes 32w to 32w + 15, or the next 16.

A *tile* is a warp's part of a matrix in registers, in the layout of an accumulator of ``mma.sync``. Its 32 rows are two halves of
16. Of each half and every 8 columns a thread has rows lane // 4 and lane // 4 + 8, columns 2 * (lane % 4) and its right
neighbour. In fp32, element (row, column) is register ``4 * (column // 8) + 2 * (row // 8) + column % 2`` of a half; in bf16x2 a
register holds two of them.

The encodings follow the tables "Instruction descriptor" and "Shared memory descriptor" of the PTX ISA. The tests compare them with
the encodings of the DSL.

Inline PTX remains where the DSL has no equivalent in all supported versions: ``tcgen05.mma`` with A at an address of tensor memory,
the fences, and tiles, whose loads must be one text with their wait (`load`).
"""

from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

from kda_cute.device.ptx import inline_ptx
from kda_cute.records import HEAD_DIM

ROWS = 32  # lanes per warp; warp w of a warpgroup accesses those from 32 w on
COLUMNS = 512  # all that an SM has

# Swizzle of an image in a descriptor, by the bytes of a row.
_SWIZZLE = {128: 2, 64: 4}


class TensorColumns:
    """First column of each matrix in tensor memory, and the number of columns used.

    Attributes:
        s: S^T, fp32.
        o: two accumulators of O^T, fp32, `chunk` columns each.
        s_bf16: S^T as an operand.
        r: R^T, fp32.
        r_bf16: R^T as an operand.
        used: columns of all matrices. A kernel without outputs does not use those of O.
    """

    def __init__(self, chunk, outputs):
        self.s = 0
        self.o = self.s + HEAD_DIM
        self.s_bf16 = self.o + 2 * chunk
        self.r = self.s_bf16 + HEAD_DIM // 2
        self.r_bf16 = self.r + chunk
        end = self.r_bf16 + chunk // 2
        assert end <= COLUMNS
        self.used = end if outputs else end - 2 * chunk


def instruction(n, mn_major=False, m=128, a_mn_major=False):
    """Returns the descriptor of a product of M = ``m`` and N = ``n``. B and A are MN-major or K-major."""
    fp32, bf16 = 1, 1
    majors = int(a_mn_major) << 15 | int(mn_major) << 16
    return fp32 << 4 | bf16 << 7 | bf16 << 10 | majors | n // 8 << 17 | m // 16 << 24


def operand(leading, stride, row_bytes):
    """Returns the descriptor of B without its address.

    K-major: ``stride`` bytes from 8 rows to the next 8; ``leading`` is unused. MN-major: ``stride`` bytes from 8 rows of K to the
    next 8, ``leading`` bytes from a panel of N to the next.
    """
    version = 1
    return leading >> 4 << 16 | stride >> 4 << 32 | version << 46 | _SWIZZLE[row_bytes] << 61


class Operand:
    """An image as operand B of a product, or A, which is executed in steps of 16 of K. ``rows``, ``columns``: extents of the image."""

    def __init__(self, rows, columns, mn_major=False):
        self.row_bytes = min(columns * 2, 128)
        self.panel = rows * self.row_bytes
        self.mn_major = mn_major
        self.n, k = (columns, rows) if mn_major else (rows, columns)
        self.steps = k // 16
        self.instruction = instruction(self.n, mn_major)
        self.bits = operand(self.panel if mn_major else 16, 8 * self.row_bytes, self.row_bytes)

    def offset(self, step):
        """Returns the bytes from the start of the image to the operand of step ``step``."""
        if self.mn_major:
            return step * 16 * self.row_bytes
        each = self.row_bytes // 32  # steps per panel
        return step // each * self.panel + step % each * 32

    def words(self, shared):
        """Returns the two words of the first step's descriptor for the image at a shared address.

        The lower word of another step is larger by the step's offset in units of 16 bytes.
        """
        return (shared >> 4) + signed(self.bits & 0xFFFFFFFF), Int32(signed(self.bits >> 32))


def signed(bits):
    """Returns the signed 32-bit integer with these bits."""
    return bits - (1 << 32) if bits >> 31 else bits


# ---- products, issued by one thread


@dsl_user_op
def mma(d: Int32, a: Int32, b, instruction: Int32, add: Int32, *, loc=None, ip=None) -> None:
    """Issues D = A B, or D += A B if ``add``, over 16 of K.

    D and A are addresses of tensor memory, ``b`` the two words of B's descriptor. The hardware executes the products of one
    accumulator in the order of issue.
    """
    text = (
        "{ .reg .pred add; .reg .b64 b; setp.ne.b32 add, $5, 0; mov.b64 b, {$2, $3}; "
        "tcgen05.mma.cta_group::1.kind::f16 [$0], [$1], b, $4, add; }"
    )
    inline_ptx(text, [], [d, a, *b, instruction, add], True, loc, ip)


def product(d, a, operand, shared, add):
    """Issues D = A B, or D += A B if ``add``, over all of K. ``shared``: address of the image of B. ``add``: a bool, or an ``Int32``."""
    low, high = operand.words(shared)
    for step in range(operand.steps):
        b = low + operand.offset(step) // 16, high
        mma(d, a + 8 * step, b, Int32(operand.instruction), Int32(1 if step > 0 else add))


@dsl_user_op
def mma_of_images(d: Int32, a, b, instruction: Int32, add: Int32, *, loc=None, ip=None) -> None:
    """`mma` with A in shared memory: ``a`` are the two words of its descriptor."""
    text = (
        "{ .reg .pred add; .reg .b64 a, b; setp.ne.b32 add, $6, 0; mov.b64 a, {$1, $2}; mov.b64 b, {$3, $4}; "
        "tcgen05.mma.cta_group::1.kind::f16 [$0], a, b, $5, add; }"
    )
    inline_ptx(text, [], [d, *a, *b, instruction, add], True, loc, ip)


def product_of_images(d, a, a_shared, b, b_shared, add):
    """Issues D = A B, or D += A B if ``add``. ``a``, ``b``: `Operand`; the rows of D are those that ``a`` has as N, 64 or 128.
    ``*_shared``: addresses of the images."""
    (a_low, a_high), (b_low, b_high) = a.words(a_shared), b.words(b_shared)
    kind = instruction(b.n, b.mn_major, a.n, a.mn_major)
    for step in range(b.steps):
        words = [(a_low + a.offset(step) // 16, a_high), (b_low + b.offset(step) // 16, b_high)]
        mma_of_images(d, *words, Int32(kind), Int32(add or step > 0))


def commit(barrier):
    """Arrives once at an mbarrier when all products that this thread has issued are done."""
    tcgen05.commit(barrier)


# ---- order


@dsl_user_op
def fence_before(*, loc=None, ip=None) -> None:
    """Orders this thread's accesses to tensor memory before the synchronisation that follows."""
    inline_ptx("tcgen05.fence::before_thread_sync;", [], [], True, loc, ip)


@dsl_user_op
def fence_after(*, loc=None, ip=None) -> None:
    """Orders this thread's accesses to tensor memory after the synchronisation that precedes."""
    inline_ptx("tcgen05.fence::after_thread_sync;", [], [], True, loc, ip)


def wait_stores():
    """Waits until the warp's stores to tensor memory are done."""
    cute.arch.fence_view_async_tmem_store()


# ---- tiles, accessed by a warp


@dsl_user_op
def load(address: Int32, columns: int, *, loc=None, ip=None) -> list[Float32]:
    """Returns the fp32 tile of the warp's lanes and ``columns`` columns, half by half, after waiting for it.

    ``address``: of the warp's first lane. The wait is part of the same assembly text as the loads, because otherwise the compiler
    may use their registers before the data has arrived.
    """
    count = columns // 2  # registers of a half
    registers = lambda half: ", ".join(f"${half * count + i}" for i in range(count))
    kind = f"tcgen05.ld.sync.aligned.16x256b.x{columns // 8}.b32"
    text = f"{kind} {{{registers(0)}}}, [${2 * count}]; {kind} {{{registers(1)}}}, [${2 * count + 1}]; "
    text += "tcgen05.wait::ld.sync.aligned;"
    return inline_ptx(text, [Float32] * (2 * count), [address, address + Int32(16 << 16)], True, loc, ip)


@dsl_user_op
def load_half(address: Int32, columns: int, *, loc=None, ip=None) -> list[Float32]:
    """Returns the half of an fp32 tile at ``address``: 16 lanes, ``columns`` columns; see `load`."""
    count = columns // 2
    registers = ", ".join(f"${i}" for i in range(count))
    text = f"tcgen05.ld.sync.aligned.16x256b.x{columns // 8}.b32 {{{registers}}}, [${count}]; tcgen05.wait::ld.sync.aligned;"
    return inline_ptx(text, [Float32] * count, [address], True, loc, ip)


@dsl_user_op
def load_bf16(address: Int32, columns: int, *, loc=None, ip=None) -> list[Int32]:
    """Returns the bf16x2 tile of the warp's lanes and ``columns`` columns, in the order in which `store` takes it; see `load`."""
    count = columns // 2  # registers of a half
    registers = lambda half: ", ".join(f"${half * count + i}" for i in range(count))
    kind = f"tcgen05.ld.sync.aligned.16x128b.x{columns // 4}.b32"
    text = f"{kind} {{{registers(0)}}}, [${2 * count}]; {kind} {{{registers(1)}}}, [${2 * count + 1}]; "
    text += "tcgen05.wait::ld.sync.aligned;"
    return inline_ptx(text, [Int32] * (2 * count), [address, address + Int32(16 << 16)], True, loc, ip)


@dsl_user_op
def store(address: Int32, tile, *, loc=None, ip=None) -> None:
    """Stores a tile, fp32 or bf16x2, to the warp's lanes, half by half. `wait_stores` waits for it."""
    count = len(tile) // 2  # registers of a half
    # The shape of the access, and its registers per 8 elements of a row.
    shape, each = ("16x256b", 4) if isinstance(tile[0], Float32) else ("16x128b", 2)
    registers = ", ".join(f"${1 + i}" for i in range(count))
    text = f"tcgen05.st.sync.aligned.{shape}.x{count // each}.b32 [$0], {{{registers}}};"
    for half in range(2):
        inline_ptx(text, [], [address + Int32(half * 16 << 16), *tile[half * count :][:count]], True, loc, ip)


# ---- allocation, by a warp


def allocate(holder):
    """Allocates all columns and stores their address to shared memory. ``holder``: pointer to an ``Int32``."""
    cute.arch.alloc_tmem(COLUMNS, holder)
    cute.arch.relinquish_tmem_alloc_permit()


def free(holder):
    """Frees all columns. ``holder``: pointer to the address that `allocate` stored."""
    cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, holder), COLUMNS)
