"""Device functions that every NVIDIA backend shares: one PTX instruction, or a few, behind a name.

Nothing here is newer than sm_90, nothing is particular to it. Shared memory is addressed by 32-bit byte
addresses, global memory by 64-bit ones; a bf16x2 is an ``Int32`` with the element of the lower index in its
low half. Names follow PTX. What touches memory, or a whole warp, is volatile; the rest may be moved.

Importing this module imports the CuTe DSL: only kernel files do.
"""

from cutlass import Float32, Int32, Int64, cute, select_
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

#: Policies of the L2, as ``createpolicy`` makes them for all of the data.
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000

LOG2E = 1.4426950408889634

_LETTER = {Float32: "f", Int32: "r", Int64: "l"}


def inline_ptx(text, results, operands, volatile, loc, ip):
    """Inline PTX with one register a result (a list of DSL types) and an operand; the results as a list."""
    constraints = ",".join(
        [f"={_LETTER[kind]}" for kind in results] + [_LETTER[type(operand)] for operand in operands]
    )
    types = [kind.mlir_type for kind in results]
    if not results:
        kind = None
    elif len(results) == 1:
        kind = types[0]
    else:
        kind = llvm.StructType.get_literal(types)
    value = llvm.inline_asm(
        kind,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if len(results) < 2:
        return [wrap(value) for wrap in results]
    return [
        wrap(llvm.extractvalue(kind, value, [i], loc=loc, ip=ip))
        for i, (wrap, kind) in enumerate(zip(results, types, strict=True))
    ]


# ---- arithmetic


@dsl_user_op
def ex2(x: Float32, *, loc=None, ip=None) -> Float32:
    """2**x, relative error 2^-22, subnormal results flushed to zero."""
    return inline_ptx("ex2.approx.ftz.f32 $0, $1;", [Float32], [x], False, loc, ip)[0]


@dsl_user_op
def lg2(x: Float32, *, loc=None, ip=None) -> Float32:
    """log2(x), absolute error 2^-22 between 1/2 and 2, relative error 2^-22 elsewhere."""
    return inline_ptx("lg2.approx.ftz.f32 $0, $1;", [Float32], [x], False, loc, ip)[0]


@dsl_user_op
def rcp(x: Float32, *, loc=None, ip=None) -> Float32:
    """1/x, error 1 ulp; 1/inf is 0."""
    return inline_ptx("rcp.approx.ftz.f32 $0, $1;", [Float32], [x], False, loc, ip)[0]


@dsl_user_op
def rsqrt(x: Float32, *, loc=None, ip=None) -> Float32:
    """1/sqrt(x), relative error 2^-22."""
    return inline_ptx("rsqrt.approx.ftz.f32 $0, $1;", [Float32], [x], False, loc, ip)[0]


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a*b + c, rounded once."""
    return inline_ptx("fma.rn.ftz.f32 $0, $1, $2, $3;", [Float32], [a, b, c], False, loc, ip)[0]


@dsl_user_op
def fma_saturated(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a*b + c, rounded once, no less than 0 and no more than 1; 0 of a NaN."""
    return inline_ptx("fma.rn.ftz.sat.f32 $0, $1, $2, $3;", [Float32], [a, b, c], False, loc, ip)[0]


@dsl_user_op
def maximum(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The larger of two; of a number and a NaN, the number."""
    return inline_ptx("max.ftz.f32 $0, $1, $2;", [Float32], [a, b], False, loc, ip)[0]


@dsl_user_op
def minimum(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The smaller of two; of a number and a NaN, the number."""
    return inline_ptx("min.ftz.f32 $0, $1, $2;", [Float32], [a, b], False, loc, ip)[0]


@dsl_user_op
def absolute(x: Float32, *, loc=None, ip=None) -> Float32:
    """|x|, usually free: a modifier of the operand, which abs.ftz is not."""
    return inline_ptx("abs.f32 $0, $1;", [Float32], [x], False, loc, ip)[0]


def sigmoid(x: Float32) -> Float32:
    """1/(1 + e^-x), right at both ends: e^-x may overflow."""
    return rcp(ex2(x * Float32(-LOG2E)) + Float32(1.0))


def scaled_softplus2(x: Float32, bias: Float32, share: Float32) -> Float32:
    """softplus(x + bias) of natural logarithms, in base 2, times ``share``, at most 1. Relative error about 2^-16 or
    better wherever it is.

    With y = (x + bias) log2(e) it is max(y, 0) + log2(1 + t), t = 2^-|y| in (0, 1], and log2(1 + t) / t a polynomial of
    the smallest relative error (2^-16.9): a logarithm of a sum near 1 would lose the small gates of channels that hardly
    decay. Saturation is the larger of y and 0, and the limit, for nothing.
    """
    t = ex2(-absolute(fma(x, Float32(LOG2E), bias * Float32(LOG2E))))
    series = share * Float32(-0.023869155 * LOG2E)
    for coefficient in (0.101222299, -0.210048705, 0.325206697, -0.499361366, 0.999991596):
        series = fma(series, t, share * Float32(coefficient * LOG2E))
    scale = share * Float32(LOG2E)
    return fma_saturated(t, series, fma_saturated(x, scale, bias * scale))


def select(condition, x, y):
    """x where the condition holds, else y (one DSL type); no branch."""
    return type(x)(select_(condition, x, y))


# ---- bf16x2


@dsl_user_op
def pack_bf16x2(low: Float32, high: Float32, *, loc=None, ip=None) -> Int32:
    """Two fp32 rounded to nearest even bf16."""
    return inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", [Int32], [high, low], False, loc, ip)[0]


@dsl_user_op
def unpack_bf16x2(pair: Int32, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """The two elements of a bf16x2 in fp32, exactly."""
    bits = (pair << 16, pair & Int32(-65536))
    low, high = (llvm.bitcast(T.f32(), x.ir_value(loc=loc, ip=ip), loc=loc, ip=ip) for x in bits)
    return Float32(low), Float32(high)


@dsl_user_op
def mul_bf16x2(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    """Products of two pairs of bf16, rounded to nearest even."""
    return inline_ptx("mul.rn.bf16x2 $0, $1, $2;", [Int32], [a, b], False, loc, ip)[0]


def split_bf16x2(low: Float32, high: Float32) -> tuple[Int32, Int32]:
    """Two fp32 as the sum of two bf16x2: the rounded values, and their rounded remainders (16 bits in all)."""
    head = pack_bf16x2(low, high)
    x, y = unpack_bf16x2(head)
    return head, pack_bf16x2(low - x, high - y)


@dsl_user_op
def split_tf32(x: Float32, *, loc=None, ip=None) -> list[Int32]:
    """An fp32 as the sum of two TF32: the rounded value, and its rounded remainder (22 bits and a sign in all)."""
    text = "{ .reg .f32 r; cvt.rn.tf32.f32 $0, $2; mov.b32 r, $0; sub.f32 r, $2, r; cvt.rn.tf32.f32 $1, r; }"
    return inline_ptx(text, [Int32] * 2, [x], False, loc, ip)


@dsl_user_op
def opaque(x: Int32, *, loc=None, ip=None) -> Int32:
    """x. What is computed from it stays here: it is not hoisted out of a loop, to occupy registers there."""
    return inline_ptx("mov.b32 $0, $1;", [Int32], [x], True, loc, ip)[0]


# ---- a warp


def quad_max(x: Float32) -> Float32:
    """The maximum over the four lanes that share a row of an MMA fragment."""
    x = maximum(x, cute.arch.shuffle_sync_bfly(x, 1))
    return maximum(x, cute.arch.shuffle_sync_bfly(x, 2))


@dsl_user_op
def mma_m16n8k16(a, b, c, *, loc=None, ip=None) -> list[Float32]:
    """a @ b + c of a warp: a 4 bf16x2, b 2 bf16x2, c and the result 4 fp32.

    With row = lane//4 and pair = 2*(lane%4): a holds [row, pair], [row+8, pair], [row, pair+8],
    [row+8, pair+8] of [16, 16]; b holds [pair, row], [pair+8, row] of [16, 8]; c holds [row, pair],
    [row, pair+1], [row+8, pair], [row+8, pair+1] of [16, 8].
    """
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return inline_ptx(text, [Float32] * 4, [*a, *b, *c], True, loc, ip)


@dsl_user_op
def mma_m16n8k8(a, b: Int32, c, *, loc=None, ip=None) -> list[Float32]:
    """a @ b + c as ``mma_m16n8k16``, over 8 columns of a: a 2 bf16x2 [row, pair], [row+8, pair], b 1 bf16x2."""
    text = (
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
    )
    return inline_ptx(text, [Float32] * 4, [*a, b, *c], True, loc, ip)


@dsl_user_op
def mma_m16n8k8_tf32(a, b, c, *, loc=None, ip=None) -> list[Float32]:
    """a @ b + c of a warp: a 4 and b 2 values in TF32, as ``split_tf32`` gives them, c and the result 4 fp32.

    With row = lane//4 and k = lane%4: a holds [row, k], [row+8, k], [row, k+4], [row+8, k+4] of [16, 8]; b holds
    [k, row], [k+4, row] of [8, 8]; c and the result are as in ``mma_m16n8k16``.
    """
    text = (
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return inline_ptx(text, [Float32] * 4, [*a, *b, *c], True, loc, ip)


@dsl_user_op
def transpose_8x8(x: Int32, *, loc=None, ip=None) -> Int32:
    """Transpose an 8x8 matrix of bf16 held by a warp: [lane//4, 2*(lane%4)] and its right neighbour."""
    return inline_ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", [Int32], [x], True, loc, ip)[0]


def transpose_16x16(a: list[Int32]) -> list[Int32]:
    """The A fragment of the transpose of a 16x16 matrix, from its A fragment."""
    return [transpose_8x8(a[i]) for i in (0, 2, 1, 3)]


# ---- shared memory


@dsl_user_op
def ldmatrix_x4(address: Int32, *, transpose: bool = False, loc=None, ip=None) -> list[Int32]:
    """Four 8x8 matrices of bf16; lane 8i + r gives the address of row r (16 bytes) of matrix i."""
    kind = ".trans" if transpose else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    return inline_ptx(text, [Int32] * 4, [address], True, loc, ip)


@dsl_user_op
def stmatrix_x4(address: Int32, matrices, *, transpose: bool = False, loc=None, ip=None) -> None:
    """Store four 8x8 matrices of bf16; addresses as for ``ldmatrix_x4``."""
    kind = ".trans" if transpose else ""
    text = f"stmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 [$0], {{$1, $2, $3, $4}};"
    inline_ptx(text, [], [address, *matrices], True, loc, ip)


@dsl_user_op
def load_shared(address: Int32, kind, *, loc=None, ip=None):
    """One 32-bit ``Float32`` or ``Int32``."""
    return inline_ptx("ld.shared.b32 $0, [$1];", [kind], [address], True, loc, ip)[0]


@dsl_user_op
def load_shared_x2(address: Int32, kind, *, loc=None, ip=None) -> list:
    """Two 32-bit values, aligned to 8 bytes."""
    return inline_ptx("ld.shared.v2.b32 {$0, $1}, [$2];", [kind] * 2, [address], True, loc, ip)


@dsl_user_op
def load_shared_x4(address: Int32, kind, *, loc=None, ip=None) -> list:
    """Four 32-bit values, aligned to 16 bytes."""
    return inline_ptx("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [kind] * 4, [address], True, loc, ip)


@dsl_user_op
def store_shared(address: Int32, value, *, loc=None, ip=None) -> None:
    """One 32-bit value."""
    inline_ptx("st.shared.b32 [$0], $1;", [], [address, value], True, loc, ip)


@dsl_user_op
def store_shared_x2(address: Int32, values, *, loc=None, ip=None) -> None:
    """Two 32-bit values, aligned to 8 bytes."""
    inline_ptx("st.shared.v2.b32 [$0], {$1, $2};", [], [address, *values], True, loc, ip)


@dsl_user_op
def store_shared_x4(address: Int32, values, *, loc=None, ip=None) -> None:
    """Four 32-bit values, aligned to 16 bytes."""
    inline_ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [], [address, *values], True, loc, ip)


# ---- global memory


@dsl_user_op
def load_global_i32(address: Int64, valid, *, loc=None, ip=None) -> Int32:
    """One 32-bit integer that no thread writes while the kernel runs; zero, and no access, unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }"
    return inline_ptx(text, [Int32], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def load_global_i64(address: Int64, valid, *, loc=None, ip=None) -> Int64:
    """One 64-bit integer that no thread writes while the kernel runs; zero, and no access, unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b64 $0, 0; @p ld.global.nc.b64 $0, [$1]; }"
    return inline_ptx(text, [Int64], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def load_global_f32(address: Int64, valid, *, loc=None, ip=None) -> Float32:
    """One fp32 that no thread writes while the kernel runs; zero, and no access, unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }"
    return inline_ptx(text, [Float32], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def load_global_f32_x2(address: Int64, valid, *, loc=None, ip=None) -> list[Float32]:
    """Two fp32, aligned to 8 bytes, that no thread writes while the kernel runs; zeros, and no access, unless ``valid``."""
    text = (
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
        "@p ld.global.nc.v2.b32 {$0, $1}, [$2]; }"
    )
    return inline_ptx(text, [Float32] * 2, [address, Int32(valid)], True, loc, ip)


@dsl_user_op
def load_global_f32_x4(address: Int64, *, loc=None, ip=None) -> list[Float32]:
    """Four fp32, aligned to 16 bytes. Unlike loads of what no thread writes, the assembler leaves it between its barriers,
    ``sync_warp`` included."""
    text = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    return inline_ptx(text, [Float32] * 4, [address], True, loc, ip)


@dsl_user_op
def load_global_u16(address: Int64, valid, *, loc=None, ip=None) -> Int32:
    """16 bits that no thread writes while the kernel runs; zero, and no access, unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.u16 $0, [$1]; }"
    return inline_ptx(text, [Int32], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def store_global_x4(address: Int64, values, *, keep: bool = False, loc=None, ip=None) -> None:
    """16 aligned bytes. ``keep``: in the L2, before other data."""
    if keep:
        text = "st.global.L2::cache_hint.v4.b32 [$0], {$1, $2, $3, $4}, $5;"
        inline_ptx(text, [], [address, *values, Int64(EVICT_LAST)], True, loc, ip)
    else:
        inline_ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", [], [address, *values], True, loc, ip)


@dsl_user_op
def store_global(address: Int64, value, *, loc=None, ip=None) -> None:
    """One 32-bit value."""
    inline_ptx("st.global.b32 [$0], $1;", [], [address, value], True, loc, ip)


@dsl_user_op
def store_global_x2(address: Int64, values, *, loc=None, ip=None) -> None:
    """Two 32-bit values, aligned to 8 bytes."""
    inline_ptx("st.global.v2.b32 [$0], {$1, $2};", [], [address, *values], True, loc, ip)


@dsl_user_op
def load_acquire(address: Int64, valid, *, loc=None, ip=None) -> Int32:
    """One 32-bit value of a counter that another CTA releases; zero, and no access, unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.acquire.gpu.global.b32 $0, [$1]; }"
    return inline_ptx(text, [Int32], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def load_relaxed(address: Int64, *, loc=None, ip=None) -> Int32:
    """One 32-bit value of a counter, in no order with anything else."""
    return inline_ptx("ld.relaxed.gpu.global.b32 $0, [$1];", [Int32], [address], True, loc, ip)[0]


@dsl_user_op
def store_release(address: Int64, value: Int32, *, loc=None, ip=None) -> None:
    """One 32-bit value of a counter, behind all that this thread has written or seen."""
    inline_ptx("st.release.gpu.global.b32 [$0], $1;", [], [address, value], True, loc, ip)


@dsl_user_op
def store_relaxed(address: Int64, value: Int32, *, loc=None, ip=None) -> None:
    """One 32-bit value of a counter, in no order with anything else."""
    inline_ptx("st.relaxed.gpu.global.b32 [$0], $1;", [], [address, value], True, loc, ip)


@dsl_user_op
def load_acquire_i64(address: Int64, *, loc=None, ip=None) -> Int64:
    """One 64-bit value that another CTA releases."""
    return inline_ptx("ld.acquire.gpu.global.b64 $0, [$1];", [Int64], [address], True, loc, ip)[0]


@dsl_user_op
def store_release_i64(address: Int64, value: Int64, *, loc=None, ip=None) -> None:
    """One 64-bit value, behind all that this thread has written or seen."""
    inline_ptx("st.release.gpu.global.b64 [$0], $1;", [], [address, value], True, loc, ip)


@dsl_user_op
def fetch_increment(address: Int64, *, loc=None, ip=None) -> Int32:
    """Add 1 to a counter, in no order with anything else, and get what it was."""
    # Not atom.add: ptxas adds once for all threads of a warp, and hands out the result at once, which waits for it.
    return inline_ptx(
        "atom.relaxed.gpu.global.inc.u32 $0, [$1], 0x7fffffff;", [Int32], [address], True, loc, ip
    )[0]


@dsl_user_op
def nanosleep(ns: Int32, *, loc=None, ip=None) -> None:
    """Wait for about ``ns`` nanoseconds, twice as long at most."""
    inline_ptx("nanosleep.u32 $0;", [], [ns], True, loc, ip)


@dsl_user_op
def fence_proxy_async(*, loc=None, ip=None) -> None:
    """Order what was accessed through the generic proxy and what bulk copies access in global memory."""
    inline_ptx("fence.proxy.async.global;", [], [], True, loc, ip)


@dsl_user_op
def cp_async_x4(shared: Int32, address: Int64, valid, *, loc=None, ip=None) -> None:
    """Copy 16 aligned bytes, which are not needed again soon, to shared memory asynchronously; zeros, and no access,
    unless ``valid``."""
    size = Int32(valid) * 16
    text = "cp.async.cg.shared.global.L2::cache_hint [$0], [$1], 16, $2, $3;"
    inline_ptx(text, [], [shared, address, size, Int64(EVICT_FIRST)], True, loc, ip)


@dsl_user_op
def cp_async_arrive(barrier: Int32, *, loc=None, ip=None) -> None:
    """One arrival at an mbarrier when all copies that this thread has asked for so far are there."""
    inline_ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", [], [barrier], True, loc, ip)


@dsl_user_op
def bulk_store(address: Int64, shared: Int32, size: Int32, *, loc=None, ip=None) -> None:
    """Copy ``size`` bytes (a multiple of 16) from shared to global memory, one bulk group with its commit.

    The threads that wrote the bytes fence towards the async proxy before the barrier that precedes this.
    """
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2; cp.async.bulk.commit_group;"
    inline_ptx(text, [], [address, shared, size], True, loc, ip)


@dsl_user_op
def bulk_load(shared: Int32, address: Int64, size: Int32, barrier: Int32, *, loc=None, ip=None) -> None:
    """Copy ``size`` bytes (a multiple of 16), which are not needed again soon, from global to shared memory; the mbarrier
    counts them."""
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[$0], [$1], $2, [$3], $4;"
    )
    inline_ptx(text, [], [shared, address, size, barrier, Int64(EVICT_FIRST)], True, loc, ip)


@dsl_user_op
def store_global_evict_first_x4(address: Int64, values, valid, *, loc=None, ip=None) -> None:
    """16 aligned bytes that are not needed again soon; no access unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.cs.v4.b32 [$0], {$1, $2, $3, $4}; }"
    inline_ptx(text, [], [address, *values, Int32(valid)], True, loc, ip)
