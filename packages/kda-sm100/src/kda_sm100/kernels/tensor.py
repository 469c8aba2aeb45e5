"""tcgen05 and tensor memory behind names, one CTA at a time, operands in bf16, sums in fp32.

Tensor memory has 128 lanes, the rows of D and A, and 512 columns of 4 bytes; an address is lane << 16 | column. A product
has M = 128: row i of D is lane i, its column j a column. A in tensor memory holds two neighbours of a row in a column. B
is an image in shared memory (`kda_cute.records`), K-major [N, K], or MN-major [K, N].

A *tile* is what a warp has of a matrix in registers, in the layout of an accumulator of ``mma.sync``: of its 32 rows
two halves of 16, of each, for every 8 columns, rows lane // 4 and that plus 8, columns 2 * (lane % 4) and its right
neighbour. In fp32 element (row, column) is register ``4 * (column // 8) + 2 * (row // 8) + column % 2`` of a half; in bf16x2
two of them are one register.

Encodings are those of the PTX ISA's tables "Instruction descriptor" and "Shared memory descriptor"; the tests hold them
against what the DSL encodes.
"""

from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from kda_cute.device.ptx import inline_ptx
from kda_cute.records import HEAD_DIM

ROWS = 32  # of a warp; those of warp w of a warpgroup are from 32 w on
COLUMNS = 512

# Layouts of an image, as a descriptor names them, by the bytes of a row.
_SWIZZLE = {128: 2, 64: 4}


def instruction(n, mn_major=False):
    """The descriptor of a product of M = 128 and N = ``n``; B is ``mn_major`` or K-major."""
    fp32, bf16 = 1, 1
    return fp32 << 4 | bf16 << 7 | bf16 << 10 | int(mn_major) << 16 | n // 8 << 17 | 128 // 16 << 24


def operand(leading, stride, row_bytes):
    """The descriptor of B, but for its address. K-major: ``stride`` bytes from 8 rows to the next, ``leading`` unused.
    MN-major: ``stride`` from 8 rows of K to the next, ``leading`` from a panel of N to the next."""
    version = 1
    return leading >> 4 << 16 | stride >> 4 << 32 | version << 46 | _SWIZZLE[row_bytes] << 61


class Operand:
    """B, as its products take it, 16 of K at a time. ``rows``: of the image of ``columns``."""

    def __init__(self, rows, columns, mn_major=False):
        self.row_bytes = min(columns * 2, 128)
        self.panel = rows * self.row_bytes
        self.mn_major = mn_major
        n, k = (columns, rows) if mn_major else (rows, columns)
        self.steps = k // 16
        self.instruction = instruction(n, mn_major)
        self.bits = operand(self.panel if mn_major else 16, 8 * self.row_bytes, self.row_bytes)

    def offset(self, step):
        """Bytes from the beginning of the image to what step ``step`` takes."""
        if self.mn_major:
            return step * 16 * self.row_bytes
        each = self.row_bytes // 32  # steps to a panel
        return step // each * self.panel + step % each * 32

    def words(self, shared):
        """The descriptor of the first step, of the image at a shared address, in two words; those of others differ in the
        lower one, by their offset in units of 16 bytes."""
        return (shared >> 4) + signed(self.bits & 0xFFFFFFFF), Int32(signed(self.bits >> 32))


def signed(bits):
    """The 32-bit integer of these bits."""
    return bits - (1 << 32) if bits >> 31 else bits


# ---- products, by one thread


@dsl_user_op
def mma(d: Int32, a: Int32, b, instruction: Int32, add: Int32, *, loc=None, ip=None) -> None:
    """D (+)= A B, 16 of K: D and A at addresses of tensor memory, B by the words of its descriptor. Those of one
    accumulator are executed in their order."""
    text = (
        "{ .reg .pred add; .reg .b64 b; setp.ne.b32 add, $5, 0; mov.b64 b, {$2, $3}; "
        "tcgen05.mma.cta_group::1.kind::f16 [$0], [$1], b, $4, add; }"
    )
    inline_ptx(text, [], [d, a, *b, instruction, add], True, loc, ip)


def product(d, a, operand, shared, add):
    """D (+)= A B over all of K. ``shared``: where the image of B lies."""
    low, high = operand.words(shared)
    for step in range(operand.steps):
        b = low + operand.offset(step) // 16, high
        mma(d, a + 8 * step, b, Int32(operand.instruction), Int32(add or step > 0))


@dsl_user_op
def commit(barrier: Int32, *, loc=None, ip=None) -> None:
    """One arrival at an mbarrier when all products that this thread has issued are done."""
    text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];"
    inline_ptx(text, [], [barrier], True, loc, ip)


# ---- order


@dsl_user_op
def fence_before(*, loc=None, ip=None) -> None:
    """Before this thread tells others: what it did in tensor memory comes first."""
    inline_ptx("tcgen05.fence::before_thread_sync;", [], [], True, loc, ip)


@dsl_user_op
def fence_after(*, loc=None, ip=None) -> None:
    """After this thread was told: what it does in tensor memory comes later."""
    inline_ptx("tcgen05.fence::after_thread_sync;", [], [], True, loc, ip)


@dsl_user_op
def wait_stores(*, loc=None, ip=None) -> None:
    """Until the warp's stores are done."""
    inline_ptx("tcgen05.wait::st.sync.aligned;", [], [], True, loc, ip)


# ---- tiles, by a warp


@dsl_user_op
def load(address: Int32, columns: int, *, loc=None, ip=None) -> list[Float32]:
    """The fp32 tile of the warp's rows and ``columns`` columns: half by half. ``address``: of the warp's first row. Waits
    for it: in one piece with the loads, for nothing else would keep their registers untouched until then."""
    count = columns // 2  # registers of a half
    registers = lambda half: ", ".join(f"${half * count + i}" for i in range(count))
    kind = f"tcgen05.ld.sync.aligned.16x256b.x{columns // 8}.b32"
    text = f"{kind} {{{registers(0)}}}, [${2 * count}]; {kind} {{{registers(1)}}}, [${2 * count + 1}]; "
    text += "tcgen05.wait::ld.sync.aligned;"
    return inline_ptx(text, [Float32] * (2 * count), [address, address + Int32(16 << 16)], True, loc, ip)


@dsl_user_op
def store(address: Int32, tile, *, loc=None, ip=None) -> None:
    """A tile, fp32 or bf16x2, half by half, to the warp's rows; ``wait_stores`` waits for it."""
    count = len(tile) // 2
    # Registers of a half, and columns of the two, for 8 elements of a row.
    shape, each = ("16x256b", 4) if isinstance(tile[0], Float32) else ("16x128b", 2)
    registers = ", ".join(f"${1 + i}" for i in range(count))
    text = f"tcgen05.st.sync.aligned.{shape}.x{count // each}.b32 [$0], {{{registers}}};"
    for half in range(2):
        inline_ptx(text, [], [address + Int32(half * 16 << 16), *tile[half * count :][:count]], True, loc, ip)


# ---- allocation, by a warp


@dsl_user_op
def allocate(shared: Int32, *, loc=None, ip=None) -> None:
    """All columns; their address to shared memory."""
    text = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], $1;"
    inline_ptx(text, [], [shared, Int32(COLUMNS)], True, loc, ip)
    inline_ptx("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", [], [], True, loc, ip)


@dsl_user_op
def free(address: Int32, *, loc=None, ip=None) -> None:
    """All columns."""
    text = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, $1;"
    inline_ptx(text, [], [address, Int32(COLUMNS)], True, loc, ip)


def columns_of(chunk):
    """Where everything begins in tensor memory, at multiples of 32: S, two of O, S in bf16, R, R in bf16."""
    sizes = {"s": HEAD_DIM, "o": 2 * chunk, "s16": HEAD_DIM // 2, "r": chunk, "r16": chunk // 2}
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = end
        end += size
    assert end <= COLUMNS
    return places
