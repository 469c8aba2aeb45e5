"""Device functions that every NVIDIA backend shares: one PTX instruction, or a few, behind a name.

Names follow PTX. No instruction is newer than sm_90. Shared memory is addressed by 32-bit byte addresses, global memory by
64-bit ones. A bf16x2 is an ``Int32`` with the element of the lower index in its low half.

A function uses a primitive of the DSL where all supported versions (4.6 to 4.8) have one with the same machine code, else
inline PTX. Inline PTX that accesses memory or involves a whole warp is volatile: the compiler keeps its order. The rest is
not, so that the compiler may move it.

Importing this module imports the CuTe DSL, so only kernel files import it.
"""

from cutlass import Float32, Int32, Int64, cute, select_
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

#: L2 cache policies, as ``createpolicy`` returns them for the whole of the data.
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000

LOG2E = 1.4426950408889634

#: The letter of a register in the constraints of inline PTX.
_LETTER = {Float32: "f", Int32: "r", Int64: "l"}


def inline_ptx(text, results, operands, volatile, loc, ip):
    """Emits inline PTX and returns its results as a list.

    ``text`` refers to operands as $0, $1, ..., results first. ``results``: DSL types, one register each. ``operands``: DSL
    values, one register each. ``volatile``: the compiler neither moves nor removes it. (`cute.arch.inline_ptx` is always
    volatile.)
    """
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


def _global(address: Int64, kind):
    """Returns the DSL pointer of an address in global memory."""
    return cute.make_ptr(kind, address, cute.AddressSpace.gmem)


# ---- arithmetic


@dsl_user_op
def ex2(x: Float32, *, loc=None, ip=None) -> Float32:
    """Returns 2**x with relative error 2^-22; subnormal results are flushed to zero."""
    return cute.math.exp2(x, fastmath=True, loc=loc, ip=ip)


@dsl_user_op
def rcp(x: Float32, *, loc=None, ip=None) -> Float32:
    """Returns 1/x with an error of 1 ulp; 1/inf is 0."""
    return cute.arch.rcp_approx(x, loc=loc, ip=ip)


@dsl_user_op
def rsqrt(x: Float32, *, loc=None, ip=None) -> Float32:
    """Returns 1/sqrt(x) with relative error 2^-22."""
    return cute.math.rsqrt(x, fastmath=True, loc=loc, ip=ip)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """Returns a*b + c, rounded once; subnormals are flushed to zero, which `cute.math.fma` does not do."""
    return inline_ptx("fma.rn.ftz.f32 $0, $1, $2, $3;", [Float32], [a, b, c], False, loc, ip)[0]


@dsl_user_op
def fma_saturated(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """Returns a*b + c, rounded once and clamped to [0, 1]; 0 for a NaN."""
    return inline_ptx("fma.rn.ftz.sat.f32 $0, $1, $2, $3;", [Float32], [a, b, c], False, loc, ip)[0]


@dsl_user_op
def maximum(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """Returns the larger of two; of a number and a NaN, the number. Subnormals are flushed to zero."""
    return inline_ptx("max.ftz.f32 $0, $1, $2;", [Float32], [a, b], False, loc, ip)[0]


@dsl_user_op
def minimum(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """Returns the smaller of two; of a number and a NaN, the number. Subnormals are flushed to zero."""
    return inline_ptx("min.ftz.f32 $0, $1, $2;", [Float32], [a, b], False, loc, ip)[0]


@dsl_user_op
def absolute(x: Float32, *, loc=None, ip=None) -> Float32:
    """Returns |x|. It usually costs nothing: ``abs``, unlike ``abs.ftz``, becomes a modifier of the operand."""
    return inline_ptx("abs.f32 $0, $1;", [Float32], [x], False, loc, ip)[0]


@dsl_user_op
def float_of_bits(bits: Int32, *, loc=None, ip=None) -> Float32:
    """Returns the fp32 with these bits."""
    return Float32(llvm.bitcast(T.f32(), bits.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def bits_of_float(x: Float32, *, loc=None, ip=None) -> Int32:
    """Returns the bits of an fp32."""
    return Int32(llvm.bitcast(T.i32(), x.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def select(condition, x, y):
    """Returns x where the condition holds, else y (one DSL type), without a branch."""
    return type(x)(select_(condition, x, y))


# ---- bf16x2


@dsl_user_op
def pack_bf16x2(low: Float32, high: Float32, *, loc=None, ip=None) -> Int32:
    """Returns two fp32 rounded to the nearest even bf16."""
    return inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", [Int32], [high, low], False, loc, ip)[0]


@dsl_user_op
def unpack_bf16x2(pair: Int32, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """Returns the two elements of a bf16x2 in fp32, exactly."""
    bits = (pair << 16, pair & Int32(-65536))
    low, high = (llvm.bitcast(T.f32(), x.ir_value(loc=loc, ip=ip), loc=loc, ip=ip) for x in bits)
    return Float32(low), Float32(high)


@dsl_user_op
def unpack_bf16x2_again(pair: Int32, zero: Int32, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """Returns what `unpack_bf16x2` does. ``zero``: a zero that the compiler does not know to be one, such as a loaded word.

    The compiler computes equal expressions once and keeps the results in registers, which take twice the space of the pair. Results with
    different zeros are not equal to it.
    """
    found = [
        inline_ptx(f"prmt.b32 $0, $1, $2, {order};", [Int32], [pair, zero], False, loc, ip)[0]
        for order in ("0x1044", "0x3244")
    ]
    low, high = (llvm.bitcast(T.f32(), x.ir_value(loc=loc, ip=ip), loc=loc, ip=ip) for x in found)
    return Float32(low), Float32(high)


@dsl_user_op
def mul_bf16x2(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    """Returns the products of two pairs of bf16, rounded to nearest even."""
    return inline_ptx("mul.rn.bf16x2 $0, $1, $2;", [Int32], [a, b], False, loc, ip)[0]


def split_bf16x2(low: Float32, high: Float32) -> tuple[Int32, Int32]:
    """Returns two fp32 as the sum of two bf16x2, the rounded values and their rounded remainders: 16 bits in all."""
    head = pack_bf16x2(low, high)
    x, y = unpack_bf16x2(head)
    return head, pack_bf16x2(low - x, high - y)


@dsl_user_op
def split_tf32(x: Float32, *, loc=None, ip=None) -> list[Int32]:
    """Returns an fp32 as the sum of two TF32, the rounded value and its rounded remainder: 22 bits and a sign in all."""
    text = "{ .reg .f32 r; cvt.rn.tf32.f32 $0, $2; mov.b32 r, $0; sub.f32 r, $2, r; cvt.rn.tf32.f32 $1, r; }"
    return inline_ptx(text, [Int32] * 2, [x], False, loc, ip)


@dsl_user_op
def cut_tf32(x: Float32, *, loc=None, ip=None) -> tuple[Int32, Int32]:
    """Returns an fp32 as the sum of two values for `mma_m16n8k8_tf32`: its upper 19 bits, and the remainder, of which an MMA uses 11
    significant bits. Together these have 21 bits. It takes fewer instructions than `split_tf32`."""
    bits = Int32(llvm.bitcast(T.i32(), x.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
    head = bits & Int32(-8192)
    rest = x - Float32(llvm.bitcast(T.f32(), head.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
    return head, Int32(llvm.bitcast(T.i32(), rest.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def opaque(x: Int32, *, loc=None, ip=None) -> Int32:
    """Returns x, hidden from the compiler. It cannot hoist computations with the result out of a loop, where their values would
    occupy registers."""
    return inline_ptx("mov.b32 $0, $1;", [Int32], [x], True, loc, ip)[0]


# ---- a warp


def quad_max(x: Float32) -> Float32:
    """Returns the maximum over the four lanes of a quad, which share the rows of an MMA fragment."""
    x = maximum(x, cute.arch.shuffle_sync_bfly(x, 1))
    return maximum(x, cute.arch.shuffle_sync_bfly(x, 2))


@dsl_user_op
def mma_m16n8k16(a, b, c, *, loc=None, ip=None) -> list[Float32]:
    """Returns a @ b + c of a warp: a is 4 bf16x2, b is 2 bf16x2, c and the result are 4 fp32.

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
    """Returns a @ b + c as `mma_m16n8k16` over 8 columns of a: a is 2 bf16x2 [row, pair], [row+8, pair], b is 1 bf16x2."""
    text = (
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
    )
    return inline_ptx(text, [Float32] * 4, [*a, b, *c], True, loc, ip)


@dsl_user_op
def mma_m16n8k8_tf32(a, b, c, *, loc=None, ip=None) -> list[Float32]:
    """Returns a @ b + c of a warp: a is 4 and b 2 values in TF32, as `split_tf32` and `cut_tf32` return them, c and the result are 4 fp32.

    With row = lane//4 and k = lane%4: a holds [row, k], [row+8, k], [row, k+4], [row+8, k+4] of [16, 8]; b holds
    [k, row], [k+4, row] of [8, 8]; c and the result are as in `mma_m16n8k16`.
    """
    text = (
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return inline_ptx(text, [Float32] * 4, [*a, *b, *c], True, loc, ip)


@dsl_user_op
def transpose_8x8(x: Int32, *, loc=None, ip=None) -> Int32:
    """Returns the transpose of an 8x8 matrix of bf16. A lane holds the elements [lane//4, 2*(lane%4)] and its right
    neighbour."""
    return inline_ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", [Int32], [x], True, loc, ip)[0]


def transpose_16x16(a: list[Int32]) -> list[Int32]:
    """Returns the A fragment of the transpose of a 16x16 matrix, from its A fragment."""
    return [transpose_8x8(a[i]) for i in (0, 2, 1, 3)]


# ---- shared memory


@dsl_user_op
def ldmatrix_x4(address: Int32, *, transpose: bool = False, loc=None, ip=None) -> list[Int32]:
    """Loads four 8x8 matrices of bf16. Lane 8i + r gives the address of row r (16 bytes) of matrix i."""
    kind = ".trans" if transpose else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    return inline_ptx(text, [Int32] * 4, [address], True, loc, ip)


@dsl_user_op
def stmatrix_x4(address: Int32, matrices, *, transpose: bool = False, loc=None, ip=None) -> None:
    """Stores four 8x8 matrices of bf16. Addresses are as for `ldmatrix_x4`."""
    kind = ".trans" if transpose else ""
    text = f"stmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 [$0], {{$1, $2, $3, $4}};"
    inline_ptx(text, [], [address, *matrices], True, loc, ip)


@dsl_user_op
def load_shared(address: Int32, kind, *, loc=None, ip=None):
    """Loads one 32-bit ``Float32`` or ``Int32``."""
    return inline_ptx("ld.shared.b32 $0, [$1];", [kind], [address], True, loc, ip)[0]


@dsl_user_op
def load_shared_x2(address: Int32, kind, *, loc=None, ip=None) -> list:
    """Loads two 32-bit values, aligned to 8 bytes."""
    return inline_ptx("ld.shared.v2.b32 {$0, $1}, [$2];", [kind] * 2, [address], True, loc, ip)


@dsl_user_op
def load_shared_x4(address: Int32, kind, *, loc=None, ip=None) -> list:
    """Loads four 32-bit values, aligned to 16 bytes."""
    return inline_ptx("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [kind] * 4, [address], True, loc, ip)


@dsl_user_op
def store_shared(address: Int32, value, *, loc=None, ip=None) -> None:
    """Stores one 32-bit value."""
    inline_ptx("st.shared.b32 [$0], $1;", [], [address, value], True, loc, ip)


@dsl_user_op
def store_shared_if(address: Int32, value, valid, *, loc=None, ip=None) -> None:
    """Stores one 32-bit value; no access unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.shared.b32 [$0], $1; }"
    inline_ptx(text, [], [address, value, Int32(valid)], True, loc, ip)


@dsl_user_op
def store_shared_x2_if(address: Int32, values, valid, *, loc=None, ip=None) -> None:
    """Stores two 32-bit values, aligned to 8 bytes; no access unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.v2.b32 [$0], {$1, $2}; }"
    inline_ptx(text, [], [address, *values, Int32(valid)], True, loc, ip)


@dsl_user_op
def store_shared_x2(address: Int32, values, *, loc=None, ip=None) -> None:
    """Stores two 32-bit values, aligned to 8 bytes."""
    inline_ptx("st.shared.v2.b32 [$0], {$1, $2};", [], [address, *values], True, loc, ip)


@dsl_user_op
def store_shared_x4(address: Int32, values, *, loc=None, ip=None) -> None:
    """Stores four 32-bit values, aligned to 16 bytes."""
    inline_ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [], [address, *values], True, loc, ip)


# ---- global memory
#
# The ``load_global_*`` with ``valid`` read memory that no thread writes during the kernel. Unless ``valid`` they do not
# access memory and return zero.


@dsl_user_op
def load_global_i32(address: Int64, valid, *, loc=None, ip=None) -> Int32:
    """Loads one 32-bit integer; zero unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }"
    return inline_ptx(text, [Int32], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def load_global_i64(address: Int64, valid, *, loc=None, ip=None) -> Int64:
    """Loads one 64-bit integer; zero unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b64 $0, 0; @p ld.global.nc.b64 $0, [$1]; }"
    return inline_ptx(text, [Int64], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def load_global_f32(address: Int64, valid, *, loc=None, ip=None) -> Float32:
    """Loads one fp32; zero unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }"
    return inline_ptx(text, [Float32], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def load_global_f32_x2(address: Int64, valid, *, loc=None, ip=None) -> list[Float32]:
    """Loads two fp32, aligned to 8 bytes; zeros unless ``valid``."""
    text = (
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
        "@p ld.global.nc.v2.b32 {$0, $1}, [$2]; }"
    )
    return inline_ptx(text, [Float32] * 2, [address, Int32(valid)], True, loc, ip)


@dsl_user_op
def load_global_f32_x4(address: Int64, *, loc=None, ip=None) -> list[Float32]:
    """Loads four fp32, aligned to 16 bytes. ptxas moves this load across no barrier, `cute.arch.sync_warp` included. It does
    move the read-only loads above."""
    text = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    return inline_ptx(text, [Float32] * 4, [address], True, loc, ip)


@dsl_user_op
def load_global_words(address: Int64, count: int, valid, *, loc=None, ip=None) -> list[Int32]:
    """Loads 2 or 4 32-bit integers, aligned to their size; zeros unless ``valid``."""
    names = [f"${n}" for n in range(count)]
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros} "
        f"@p ld.global.nc.v{count}.b32 {{{', '.join(names)}}}, [${count}]; }}"
    )
    return inline_ptx(text, [Int32] * count, [address, Int32(valid)], True, loc, ip)


@dsl_user_op
def load_global_streaming(address: Int64, valid, kind=Float32, *, loc=None, ip=None):
    """Loads one 32-bit value that is used once, and that this thread may overwrite; zero unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.cs.b32 $0, [$1]; }"
    return inline_ptx(text, [kind], [address, Int32(valid)], True, loc, ip)[0]


def load_global_streaming_x4(address: Int64, valid, kind=Float32) -> list:
    """`load_global_streaming_words` of four 32-bit values."""
    return load_global_streaming_words(address, 4, valid, kind)


@dsl_user_op
def load_global_streaming_words(
    address: Int64, count: int, valid, kind=Float32, *, loc=None, ip=None
) -> list:
    """Loads 2 or 4 32-bit values, aligned to their size, that are used once, and that this thread may overwrite; zeros unless
    ``valid``."""
    names = [f"${n}" for n in range(count)]
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros} "
        f"@p ld.global.cs.v{count}.b32 {{{', '.join(names)}}}, [${count}]; }}"
    )
    return inline_ptx(text, [kind] * count, [address, Int32(valid)], True, loc, ip)


@dsl_user_op
def load_global_u16(address: Int64, valid, *, loc=None, ip=None) -> Int32:
    """Loads 16 bits; zero unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.u16 $0, [$1]; }"
    return inline_ptx(text, [Int32], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def load_global_u8(address: Int64, valid, *, loc=None, ip=None) -> Int32:
    """Loads 8 bits; zero unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.u8 $0, [$1]; }"
    return inline_ptx(text, [Int32], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def load_global_streaming_u16(address: Int64, valid, *, loc=None, ip=None) -> Int32:
    """Loads 16 bits that are used once, and that this thread may overwrite; zero unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.cs.u16 $0, [$1]; }"
    return inline_ptx(text, [Int32], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def store_global_x4(address: Int64, values, *, keep: bool = False, loc=None, ip=None) -> None:
    """Stores 16 aligned bytes. ``keep``: the L2 evicts them last."""
    if keep:
        text = "st.global.L2::cache_hint.v4.b32 [$0], {$1, $2, $3, $4}, $5;"
        inline_ptx(text, [], [address, *values, Int64(EVICT_LAST)], True, loc, ip)
    else:
        inline_ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", [], [address, *values], True, loc, ip)


@dsl_user_op
def store_global(address: Int64, value, *, loc=None, ip=None) -> None:
    """Stores one 32-bit value."""
    inline_ptx("st.global.b32 [$0], $1;", [], [address, value], True, loc, ip)


@dsl_user_op
def store_global_f32_if(address: Int64, value: Float32, valid, *, loc=None, ip=None) -> None:
    """Stores one fp32; no access unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.f32 [$0], $1; }"
    inline_ptx(text, [], [address, value, Int32(valid)], True, loc, ip)


@dsl_user_op
def store_global_streaming_x4(address: Int64, values, *, loc=None, ip=None) -> None:
    """Stores four 32-bit values, aligned to 16 bytes, that are not read again soon."""
    inline_ptx("st.global.cs.v4.b32 [$0], {$1, $2, $3, $4};", [], [address, *values], True, loc, ip)


@dsl_user_op
def store_global_words_if(address: Int64, values, valid, *, loc=None, ip=None) -> None:
    """Stores 2 or 4 32-bit values, aligned to their size; no access unless ``valid``."""
    count = len(values)
    names = ", ".join(f"${n + 1}" for n in range(count))
    text = f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; @p st.global.v{count}.b32 [$0], {{{names}}}; }}"
    inline_ptx(text, [], [address, *values, Int32(valid)], True, loc, ip)


@dsl_user_op
def store_global_u16(address: Int64, value: Int32, valid, *, loc=None, ip=None) -> None:
    """Stores the low 16 bits of a value; no access unless ``valid``."""
    text = "{ .reg .pred p; .reg .b16 low, high; setp.ne.s32 p, $2, 0; mov.b32 {low, high}, $1; @p st.global.b16 [$0], low; }"
    inline_ptx(text, [], [address, value, Int32(valid)], True, loc, ip)


@dsl_user_op
def store_global_x2(address: Int64, values, *, keep: bool = False, loc=None, ip=None) -> None:
    """Stores two 32-bit values, aligned to 8 bytes. ``keep``: the L2 evicts them last."""
    if keep:
        text = "st.global.L2::cache_hint.v2.b32 [$0], {$1, $2}, $3;"
        inline_ptx(text, [], [address, *values, Int64(EVICT_LAST)], True, loc, ip)
    else:
        inline_ptx("st.global.v2.b32 [$0], {$1, $2};", [], [address, *values], True, loc, ip)


@dsl_user_op
def load_acquire(address: Int64, valid, *, loc=None, ip=None) -> Int32:
    """Loads a 32-bit counter that another CTA releases; zero, and no access, unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.acquire.gpu.global.b32 $0, [$1]; }"
    return inline_ptx(text, [Int32], [address, Int32(valid)], True, loc, ip)[0]


@dsl_user_op
def load_relaxed(address: Int64, *, loc=None, ip=None) -> Int32:
    """Loads a 32-bit counter without ordering."""
    return cute.arch.load(_global(address, Int32), Int32, sem="relaxed", scope="gpu", loc=loc, ip=ip)


@dsl_user_op
def store_release(address: Int64, value: Int32, *, loc=None, ip=None) -> None:
    """Stores a 32-bit counter after everything that this thread has written or observed."""
    cute.arch.store(_global(address, Int32), value, sem="release", scope="gpu", loc=loc, ip=ip)


@dsl_user_op
def store_relaxed(address: Int64, value: Int32, *, loc=None, ip=None) -> None:
    """Stores a 32-bit counter without ordering."""
    cute.arch.store(_global(address, Int32), value, sem="relaxed", scope="gpu", loc=loc, ip=ip)


@dsl_user_op
def raise_release(address: Int64, value: Int32, *, loc=None, ip=None) -> None:
    """Raises a 32-bit counter to at least ``value``, after everything that this thread has written or observed."""
    inline_ptx("red.release.gpu.global.max.s32 [$0], $1;", [], [address, value], True, loc, ip)


@dsl_user_op
def load_acquire_i64(address: Int64, *, loc=None, ip=None) -> Int64:
    """Loads a 64-bit value that another CTA releases."""
    return cute.arch.load(_global(address, Int64), Int64, sem="acquire", scope="gpu", loc=loc, ip=ip)


@dsl_user_op
def store_release_i64(address: Int64, value: Int64, *, loc=None, ip=None) -> None:
    """Stores a 64-bit value after everything that this thread has written or observed."""
    cute.arch.store(_global(address, Int64), value, sem="release", scope="gpu", loc=loc, ip=ip)


@dsl_user_op
def fetch_increment(address: Int64, *, loc=None, ip=None) -> Int32:
    """Adds 1 to a counter without ordering, and returns its previous value."""
    # Not atom.add: ptxas combines the additions of a warp's threads and distributes the result at once, which waits for it.
    return inline_ptx(
        "atom.relaxed.gpu.global.inc.u32 $0, [$1], 0x7fffffff;", [Int32], [address], True, loc, ip
    )[0]


@dsl_user_op
def nanosleep(ns: Int32, *, loc=None, ip=None) -> None:
    """Suspends the thread for about ``ns`` nanoseconds, at most twice as long."""
    inline_ptx("nanosleep.u32 $0;", [], [ns], True, loc, ip)


@dsl_user_op
def fence_proxy_async(*, loc=None, ip=None) -> None:
    """Orders accesses to global memory through the generic proxy and those of bulk copies (async proxy)."""
    cute.arch.fence_proxy("async.global", loc=loc, ip=ip)


@dsl_user_op
def cp_async_x4(shared: Int32, address: Int64, valid, *, evict_first: bool = True, loc=None, ip=None) -> None:
    """Copies 16 aligned bytes to shared memory asynchronously, past the L1. ``evict_first``: the L2 evicts them first. Unless
    ``valid`` it does not access global memory and writes zeros."""
    size = Int32(valid) * 16
    if not evict_first:
        text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        inline_ptx(text, [], [shared, address, size], True, loc, ip)
        return
    text = "cp.async.cg.shared.global.L2::cache_hint [$0], [$1], 16, $2, $3;"
    inline_ptx(text, [], [shared, address, size, Int64(EVICT_FIRST)], True, loc, ip)


@dsl_user_op
def cp_async_arrive(barrier: Int32, *, loc=None, ip=None) -> None:
    """Arrives at an mbarrier once all earlier ``cp_async_x4`` of this thread are complete."""
    pointer = cute.make_ptr(Int64, barrier, cute.AddressSpace.smem)
    cute.arch.cp_async_mbarrier_arrive_noinc(pointer, loc=loc, ip=ip)


@dsl_user_op
def bulk_store(
    address: Int64,
    shared: Int32,
    size: Int32,
    *,
    evict_first: bool = False,
    keep: bool = False,
    commit: bool = True,
    loc=None,
    ip=None,
) -> None:
    """Copies ``size`` bytes (a multiple of 16) from shared to global memory. ``evict_first``: the L2 evicts them first. ``keep``: it evicts
    them last. ``commit``: the copy completes a bulk group.

    The threads that wrote the bytes must fence towards the async proxy before the barrier that precedes this.
    """
    end = " cp.async.bulk.commit_group;" if commit else ""
    if evict_first or keep:
        text = "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [$0], [$1], $2, $3;" + end
        policy = Int64(EVICT_LAST if keep else EVICT_FIRST)
        inline_ptx(text, [], [address, shared, size, policy], True, loc, ip)
    else:
        text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;" + end
        inline_ptx(text, [], [address, shared, size], True, loc, ip)


@dsl_user_op
def bulk_load(
    shared: Int32, address: Int64, size: Int32, barrier: Int32, *, keep: bool = False, loc=None, ip=None
) -> None:
    """Copies ``size`` bytes (a multiple of 16) from global to shared memory; the L2 evicts them first. The mbarrier counts
    the bytes."""
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[$0], [$1], $2, [$3], $4;"
    )
    policy = Int64(EVICT_LAST if keep else EVICT_FIRST)
    inline_ptx(text, [], [shared, address, size, barrier, policy], True, loc, ip)


@dsl_user_op
def bulk_prefetch(address: Int64, size: Int32, *, loc=None, ip=None) -> None:
    """Requests that ``size`` bytes (a multiple of 16) of global memory be brought into the L2."""
    inline_ptx("cp.async.bulk.prefetch.L2.global [$0], $1;", [], [address, size], True, loc, ip)


@dsl_user_op
def store_global_evict_first_x4(address: Int64, values, valid, *, loc=None, ip=None) -> None:
    """Stores 16 aligned bytes, which caches evict first; no access unless ``valid``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.cs.v4.b32 [$0], {$1, $2, $3, $4}; }"
    inline_ptx(text, [], [address, *values, Int32(valid)], True, loc, ip)
