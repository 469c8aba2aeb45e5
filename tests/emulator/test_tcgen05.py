"""tcgen05: products compiled by the DSL, and single instructions, against exact sums of integers."""

import re

import numpy as np
import pytest
import torch
from helpers.emulator import wgmma_kernel as wgmma
from helpers.emulator.gemm_kernel import compiled
from helpers.emulator.ptx import run
from helpers.emulator.tcgen05 import (
    COMMIT,
    FILL,
    HEAD,
    LAYOUTS,
    MULTIPLY,
    TAIL,
    VERSION,
    ZERO,
    copied_out,
    core_matrices,
    instruction_descriptor,
    integers,
    product,
    registers,
)
from helpers.nightly import nightly

import ptx_emulator
from ptx_emulator import ExecutionError


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("m", "n", "k", "majors", "copy", "a_in_tmem"),
    [
        (128, 16, 16, ("K", "K"), "16x64b", False), (128, 32, 64, ("MN", "MN"), "16x256b", False),
        (128, 64, 64, ("K", "K"), "16x128b", True), (64, 64, 64, ("K", "K"), "16x256b", False),
        nightly(128, 64, 64, ("K", "K"), "32x32b", False), nightly(128, 256, 32, ("K", "K"), "32x32b", False),
        nightly(128, 128, 128, ("K", "K"), "16x256b", False), nightly(128, 64, 64, ("MN", "K"), "16x128b", False),
        nightly(128, 64, 64, ("K", "MN"), "16x64b", False), nightly(128, 16, 32, ("MN", "MN"), "16x128b", False),
        nightly(128, 128, 32, ("K", "MN"), "32x32b", True), nightly(64, 128, 64, ("MN", "MN"), "16x128b", False),
    ],
)  # fmt: skip
def test_products_compiled_by_the_dsl(m, n, k, majors, copy, a_in_tmem):
    """The DSL's copy traits decide which element each register of `tcgen05.ld` and `tcgen05.st` is, and its MMA atoms where D and A lie."""
    function = compiled(n, k, majors, copy, a_in_tmem, m)
    assert all(f"tcgen05.{kind}.sync.aligned.{copy}" in function.ptx for kind in ("ld", "st"))
    x, y, z = integers(m, k), integers(n, k, seed=1), integers(m, n, seed=2)
    for seed in range(2):
        found = z.clone()
        with ptx_emulator.device("sm_100a", seed=seed):
            function(x.bfloat16(), y.bfloat16(), found)
        assert torch.equal(found, z + x @ y.T)


# ---- single instructions


@pytest.mark.parametrize(
    ("shape", "half"),
    [(shape, half) for shape in LAYOUTS for half in (0, 16) if (shape, half) != ("32x32b", 16)],
)
@pytest.mark.parametrize("repeat", (1, 2, 8))
def test_register_layouts_of_stores_and_loads(shape, repeat, half):
    """A store in one layout is read back by lane and column; words written by lane and column are loaded in that layout."""
    each, place, width = LAYOUTS[shape]
    count, columns = each * repeat, width * repeat
    ramp = f"mul.lo.s32 %r5, %r0, {columns};" + "".join(
        f"add.s32 %r{20 + n}, %r5, {1 + n};" for n in range(columns)
    )
    zeros = "".join(f"mov.b32 %r{20 + n}, 0;" for n in range(64))
    store = lambda shape, count, where: (
        f"tcgen05.st.sync.aligned.{shape}.x{count}.b32 [{where}], {{{registers(20, count * LAYOUTS[shape][0])}}};"
        "tcgen05.wait::st.sync.aligned;"
    )
    move = f"add.s32 %r10, %r9, {half << 16};"
    out = torch.zeros(128, 64, dtype=torch.int32)
    ids = "mul.lo.s32 %r5, %r0, 1000;" + "".join(f"add.s32 %r{20 + n}, %r5, {1 + n};" for n in range(count))
    body = (
        HEAD
        + zeros
        + store("32x32b", 64, "%r9")
        + ids
        + move
        + store(shape, repeat, "%r10")
        + copied_out("%q0")
        + TAIL
    )
    run(body, out, threads=128, shared=32)
    want = np.zeros((128, 64), np.int32)
    for thread in range(128):
        for n in range(count):
            lane, column = place(thread % 32, n % each)
            want[thread // 32 * 32 + half + lane, column + n // each * width] = thread * 1000 + 1 + n
    assert np.array_equal(out.numpy(), want)
    # The reverse: load words into registers, which each thread then copies out in order.
    back = torch.zeros(128, count, dtype=torch.int32)
    load = f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {{{registers(100, count)}}}, [%r10]; tcgen05.wait::ld.sync.aligned;"
    load += f"mul.wide.s32 %q20, %r0, {4 * count}; add.s64 %q20, %q20, %q0;"
    load += "".join(f"st.global.b32 [%q20+{4 * n}], %r{100 + n};" for n in range(count))
    body = HEAD + zeros + ramp + store("32x32b", max(columns, 1), "%r9") + move + load + TAIL
    run(body, back, threads=128, shared=32)
    for thread in range(128):
        for n in range(count):
            lane, column = place(thread % 32, n % each)
            word = (thread // 32 * 32 + half + lane) * columns + column + n // each * width + 1
            assert back[thread, n] == word


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("shape", ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"))
def test_pack_and_unpack_two_columns_per_register(shape, packed):
    """Each column holds 100 times its lane plus its number. If ``packed``, `.unpack::16b` stores and `.pack::16b` loads two columns
    from a register. Threads of the shape 16x32bx2 access two places."""
    each, place, width = LAYOUTS.get(shape, (1, lambda t, n: (t % 16, 0), 1))
    columns = 40 if packed else 20  # of the second half
    split = columns if shape == "16x32bx2" else None
    count = 4 * each
    pack, unpack = (".pack::16b", ".unpack::16b") if packed else ("", "")
    body = HEAD + "mul.lo.s32 %r5, %r0, 100;"
    for n in range(32):
        low, high = (2 * n, 2 * n + 1) if packed else (n, 0)
        body += f"add.s32 %r6, %r5, {low}; add.s32 %r7, %r5, {high}; shl.b32 %r7, %r7, {16 * packed};"
        body += f"or.b32 %r{20 + n}, %r6, %r7;" if packed else f"mov.b32 %r{20 + n}, %r6;"
    body += f"tcgen05.st.sync.aligned.32x32b.x32{unpack}.b32 [%r9], {{{registers(20, 32)}}}; tcgen05.wait::st.sync.aligned;"
    body += f"tcgen05.ld.sync.aligned.{shape}.x4{pack}.b32 {{{registers(100, count)}}}, [%r9]" + (
        f", {split};" if split else ";"
    )
    body += f"tcgen05.wait::ld.sync.aligned; mul.wide.s32 %q20, %r0, {4 * count}; add.s64 %q20, %q20, %q0;"
    body += "".join(f"st.global.b32 [%q20+{4 * n}], %r{100 + n};" for n in range(count))
    out = torch.zeros(128, count, dtype=torch.int32)
    run(body + TAIL, out, threads=128, shared=32)
    for thread in range(128):
        for n in range(count):
            lane, column = place(thread % 32, n % each)
            column = (column + n // each * width) * (1 + packed) + (split or 0) * (thread % 32 // 16)
            value = (thread // 32 * 32 + lane) * 100 + column
            assert out[thread, n] == (value | (value + 1) << 16 if packed else value)


def test_unpack_leaves_the_upper_halves_unwritten():
    body = (
        HEAD
        + f"mov.b32 %r20, 7; tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32 [%r9], {{%r20}}; tcgen05.wait::st.sync.aligned; {copied_out('%q0', 1)}"
    )
    with pytest.raises(ExecutionError, match="nothing has written"):
        run(body + TAIL, torch.zeros(128, dtype=torch.int32), threads=128, shared=32)


#: By form of the copy: its rows, the words of a row, and the row that a lane receives.
COPIES = {
    "128x256b": (128, 8, lambda lane: lane),
    "128x128b": (128, 4, lambda lane: lane),
    "4x256b": (4, 8, lambda lane: lane // 32 if lane % 32 == 0 else None),
    "64x128b.warpx2::02_13": (64, 4, lambda lane: lane % 64),
    "64x128b.warpx2::01_23": (64, 4, lambda lane: lane // 64 * 32 + lane % 32),
    "32x128b.warpx4": (32, 4, lambda lane: lane % 32),
}


@pytest.mark.parametrize("form", COPIES)
def test_copies_from_shared_memory(form):
    """The copy moves rows of an operand without a swizzle to columns from 8 on."""
    rows, count, row_of = COPIES[form]
    x = torch.arange(rows * count, dtype=torch.int32).reshape(rows, count)
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % 8))
    image, lead, stride = core_matrices(padded.view(torch.float32))
    fill = "".join(f"mov.b32 %r{20 + n}, -7;" for n in range(64))
    fill += f"tcgen05.st.sync.aligned.32x32b.x64.b32 [%r9], {{{registers(20, 64)}}}; tcgen05.wait::st.sync.aligned; bar.sync 0;"
    body = HEAD + FILL.replace("<words>", str(image.numel() // 4)) + fill
    body += f"""
        cvt.u64.u32 %q11, %r1; add.s64 %q11, %q11, 1024; shr.u64 %q11, %q11, 4; add.s32 %r13, %r8, 8;
        or.b64 %q11, %q11, {(lead >> 4) << 16 | (stride >> 4) << 32 | VERSION};
        @!%p2 bra ISSUED; tcgen05.cp.cta_group::1.{form} [%r13], %q11; {COMMIT}
        ISSUED: W: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0; @!%p4 bra W; tcgen05.fence::after_thread_sync;
    """
    for seed in range(2):
        out = torch.zeros(128, 64, dtype=torch.int32)
        run(
            body + copied_out("%q1") + TAIL,
            image.view(torch.int32),
            out,
            threads=128,
            shared=1024 + len(image),
            seed=seed,
        )
        want = torch.full((128, 64), -7, dtype=torch.int32)
        for lane in range(128):
            if (row := row_of(lane)) is not None:
                want[lane, 8 : 8 + count] = x[row]
        assert torch.equal(out, want)
    for part, wrong in (
        (COMMIT, "deadlock"),
        ("fence.proxy.async.shared::cta;", "without a fence.proxy.async"),
    ):
        with pytest.raises(ExecutionError, match=wrong):
            run(
                (body + copied_out("%q1") + TAIL).replace(part, ""),
                image.view(torch.int32),
                out,
                threads=128,
                shared=1024 + len(image),
            )
    with pytest.raises(ptx_emulator.PtxError, match="this copy to tensor memory is not modelled"):
        run(
            body.replace(form, f"{form}.b8x16.b6x16_p32"),
            image.view(torch.int32),
            out,
            threads=128,
            shared=1024 + len(image),
        )


def test_a_commit_arrives_at_several_ctas():
    """Rank 0 commits to the mbarriers of ranks 0 and 2. Rank 1 waits for its own commit, by generic addresses."""
    meet = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    body = f"""
        mov.b32 %r20, shared_bytes; cvt.u64.u32 %q20, %r20; cvta.shared.u64 %q20, %q20; add.s64 %q21, %q20, 16;
        {HEAD.replace("sync.aligned.shared::cta.b32 [%r1]", "sync.aligned.b32 [%q20]")} {meet}
        mov.u32 %r21, %cluster_ctarank; @!%p2 bra WAIT; setp.eq.s32 %p3, %r21, 0; setp.eq.s32 %p5, %r21, 1; mov.b16 %h1, <mask>;
        @%p3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r2], %h1;
        @%p5 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%q21];
        WAIT: mbarrier.try_wait.parity.acquire.cluster.b64 %p4, [%q21], 0; @!%p4 bra WAIT; mul.wide.u32 %q9, %r21, 4;
        add.s64 %q9, %q0, %q9; st.global.b32 [%q9], 1; bar.sync 0; {meet} {TAIL}
    """
    for seed in range(3):
        out = torch.zeros(3, dtype=torch.int32)
        run(body.replace("<mask>", "5"), out, threads=128, grid=3, cluster=(3,), shared=32, seed=seed)
        assert out.tolist() == [1, 1, 1]
    with pytest.raises(ExecutionError, match="deadlock"):
        run(body.replace("<mask>", "1"), out, threads=128, grid=3, cluster=(3,), shared=32)


@pytest.mark.parametrize(
    ("dtype", "kind", "k"),
    [
        ("bfloat16", "f16", 16),
        ("float16", "f16", 16),
        ("float32", "tf32", 8),
        ("float8_e4m3fn", "f8f6f4", 32),
        ("float8_e5m2", "f8f6f4", 32),
    ],
)
@pytest.mark.parametrize(("m", "n"), [(128, 64), (128, 16), (64, 64), (64, 8)])
def test_one_mma(m, n, dtype, kind, k):
    """For M = 64, D occupies 16 of each 32 lanes."""
    dtype = getattr(torch, dtype)
    a, b = integers(m, k), integers(n, k, seed=1)
    rows = torch.arange(m) if m == 128 else torch.arange(m) // 16 * 32 + torch.arange(m) % 16
    found = product(m, n, a.to(dtype), b.to(dtype), kind, first=ZERO)
    want = torch.zeros(128, 64)
    want[rows, :n] = a @ b.T
    assert torch.equal(found, want)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("majors", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("modes", [(0, 0), (1, 1), (2, 2), (3, 3), (1, 3), (2, 0)])
@pytest.mark.parametrize(("m", "n"), [(128, 64), (64, 64)])
def test_swizzles_and_majors(m, n, modes, majors, dtype):
    """One mma of k = 16."""
    # A row of a K-major atom holds more than 16 elements of k. The mma reads only the first 16.
    deep = lambda mode, major: 16 if major or mode == 0 else wgmma.WIDTHS[mode] // 2
    x = [
        integers(rows, deep(mode, major), seed=i)
        for i, (rows, mode, major) in enumerate(zip((m, n), modes, majors))
    ]
    found = product(m, n, *(v.to(dtype) for v in x), first=ZERO, modes=modes, majors=majors)
    rows = torch.arange(m) if m == 128 else torch.arange(m) // 16 * 32 + torch.arange(m) % 16
    assert torch.equal(found[rows, :n], x[0][:, :16] @ x[1][:, :16].T)


@pytest.mark.parametrize(("mode", "start"), [(1, 512), (2, 256), (3, 128)])
def test_an_operand_starts_at_its_swizzle_pattern(mode, start):
    """512 mod 1024 for a swizzle of 128 bytes, with base offset 0."""
    x = integers(64, wgmma.WIDTHS[mode] // 2).bfloat16()
    moved = lambda body: body.replace("or.b64 %q10", f"add.s64 %q10, %q10, {start >> 4}; or.b64 %q10")
    with pytest.raises(ExecutionError, match=f"{start} bytes into its swizzle pattern of {2 * start} bytes"):
        product(64, 64, x, x, modes=(mode, mode), first=ZERO, change=moved)
    product(64, 64, x, x, modes=(mode, mode), first=ZERO, change=moved, assume=("swizzle",))


@pytest.mark.parametrize("number", (3, 4, 5))
def test_operands_of_6_and_4_bits_are_refused_by_name(number):
    x = integers(64, 32).to(torch.float8_e4m3fn)
    narrow = lambda body: body.replace("mov.b32 %r12", f"or.b32 %r11, %r11, {number << 7}; mov.b32 %r12", 1)
    wrong = (
        rf"kind::f8f6f4: the types {number} of A and 0 of B are not modelled, expected 0 \(e4m3\), 1 \(e5m2\)"
    )
    with pytest.raises(ExecutionError, match=wrong):
        product(64, 64, x, x, "f8f6f4", change=narrow)


@pytest.mark.parametrize("m", (64, 128))
def test_fp16_accumulators_are_rounded(m):
    """Each column holds one fp16 in its lower 16 bits."""
    a, b = integers(m, 16) * 37, integers(64, 16, seed=1) * 41
    found = product(m, 64, a.half(), b.half(), first=ZERO, half=True)
    rows = torch.arange(m) if m == 128 else torch.arange(m) // 16 * 32 + torch.arange(m) % 16
    assert torch.equal(found[rows], (a @ b.T).half())


@pytest.mark.parametrize("m", (128, 64))
def test_a_in_tensor_memory_and_scaled_accumulation(m):
    """A lies in columns 48 to 55 of the lanes of D, two bf16 in a word. The mma adds half of the previous D."""
    a, b, c = integers(128, 16), integers(16, 16, seed=1), integers(128, 16, seed=2) * 2
    packed = a.bfloat16().view(torch.int16).view(torch.int32)
    store = "mul.wide.s32 %q20, %r0, 64;"
    first = (
        store
        + "add.s64 %q21, %q20, %q2;"
        + "".join(f"ld.global.b32 %r{20 + n}, [%q21+{4 * n}];" for n in range(16))
    )
    first += f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r9], {{{registers(20, 16)}}};"
    first += "mul.wide.s32 %q20, %r0, 32; add.s64 %q21, %q20, %q3;"
    first += "".join(f"ld.global.b32 %r{40 + n}, [%q21+{4 * n}];" for n in range(8))
    first += f"add.s32 %r10, %r9, 48; tcgen05.st.sync.aligned.32x32b.x8.b32 [%r10], {{{registers(40, 8)}}};"
    first += "tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;"
    image, lead, stride = core_matrices(b.bfloat16())
    descriptor = instruction_descriptor(m, 16)
    body = HEAD + FILL.replace("<words>", str(image.numel() // 4)) + first
    body += f"""
        cvt.u64.u32 %q11, %r1; add.s64 %q11, %q11, 1024; shr.u64 %q11, %q11, 4;
        or.b64 %q11, %q11, {(lead >> 4) << 16 | (stride >> 4) << 32 | VERSION}; mov.b32 %r11, {descriptor};
        mov.b32 %r12, 0; setp.eq.s32 %p5, 0, 0; add.s32 %r13, %r8, 48;
    """
    multiply = MULTIPLY.replace("<kind>", "f16").replace("<a>", "[%r13]").replace("%p5;", "%p5, 1;")
    out = torch.zeros(128, 16, dtype=torch.int32)
    body += multiply.replace("<commit>", COMMIT) + copied_out("%q1", 16) + TAIL
    tensors = image.view(torch.int32), out, c.view(torch.int32), packed
    for seed in range(3):
        run(body, *tensors, threads=128, shared=2048, seed=seed)
        want = c / 2 + a @ b.T
        if m == 64:
            want = torch.where((torch.arange(128) % 32 < 16)[:, None], want, c)
        assert torch.equal(out.view(torch.float32), want)
    # A later mma may write the columns of A: they execute in order.
    again = re.sub(r"(tcgen05\.mma[^;]*;)", lambda m: m[1] + m[1].replace("[%r8]", "[%r13]"), body, count=1)
    assert again != body
    for seed in range(3):
        before = out.clone()
        run(again, *tensors, threads=128, shared=2048, seed=seed)
        assert torch.equal(out, before)
    for part, wrong in (
        ("tcgen05.wait::st.sync.aligned;", "nothing has written|nothing orders|in flight"),
        ("tcgen05.fence::before_thread_sync; bar.sync 0;", "a race"),
    ):
        with pytest.raises(ExecutionError, match=wrong):
            run(body.replace(part, ""), *tensors, threads=128, shared=2048)


BROKEN = {
    "no wait for the product": (r"W: mbarrier.try_wait[^;]*; @!%p4 bra W;", "", "nothing has written|a race"),
    "no commit": (re.escape(COMMIT), "", "deadlock"),
    "no fence towards the async proxy": (r"fence\.proxy\.async\.shared::cta;", "", "without a fence.proxy.async"),
    "no barrier behind the fill": (r"shared::cta; bar\.sync 0;", "shared::cta;", "a race|nothing has written"),
    "no wait for the load": (r"tcgen05\.wait::ld\.sync\.aligned;", "", "accessed before its wait"),
    "memory that is not freed": (r"tcgen05\.dealloc[^;]*;", "", "has not freed"),
    "columns that are not allocated": (r"32x32b\.x64\.b32 (\{[^}]*\}), \[%r9\]", r"32x32b.x64.b32 \1, [%r9+8]", "not all allocated"),
    "lanes of another warp": (r"%r4, %r3, 21;", "%r4, %r3, 20;", "accesses lanes"),
    "48 columns": (r"\[%r1\], 64;", "[%r1], 48;", "a power of 2"),
    "every lane issues": (r"@!%p2 bra ISSUED;", "@!%p1 bra ISSUED;", "32 lanes issue"),
    "N of 72": (r"mov\.b32 %r11, (\d+);", f"mov.b32 %r11, {instruction_descriptor(128, 72)};", "instruction descriptor"),
    "a descriptor without its version": (
        r"(or\.b64 %q11, %q11,) (\d+);", lambda found: f"{found[1]} {int(found[2]) & ~VERSION};", "matrix descriptor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_misuse_is_an_error(what):
    pattern, replacement, wrong = BROKEN[what]
    a, b = integers(128, 16).bfloat16(), integers(64, 16, seed=1).bfloat16()

    def change(body):
        found = re.sub(pattern, replacement, body)
        assert found != body
        return found

    with pytest.raises(ExecutionError, match=wrong):
        product(128, 64, a, b, change=change)


def test_operands_may_be_overwritten_after_the_commit_is_seen():
    a, b = integers(128, 16).bfloat16(), integers(64, 16, seed=1).bfloat16()
    waited = "@!%p4 bra W; tcgen05.fence::after_thread_sync;"
    overwrite = "setp.eq.s32 %p6, %r0, 64; @%p6 st.shared.b32 [%r1+1024], %r12;"
    # The issuing warp continues before the product is done; its arrival at another mbarrier orders nothing of the product.
    later = "mbarrier.init.shared.b64 [%r2+8], 1; mbarrier.arrive.shared.b64 %q12, [%r2+8];"
    behind = lambda body: body.replace(COMMIT, COMMIT + later).replace(waited, waited + overwrite)
    before = lambda body: body.replace("ISSUED:", "ISSUED:" + overwrite)
    assert torch.equal(product(128, 64, a, b, change=behind), a.float() @ b.float().T)
    with pytest.raises(ExecutionError, match="a race|overwritten"):
        product(128, 64, a, b, change=before)


#: Between a `tcgen05.ld` of %r100 and %r101 and its wait. None: allowed; else the error.
IN_FLIGHT = {
    "a copy": ("mov.b32 %r90, %r100;", None),
    "packed, and unpacked after the wait": ("mov.b64 %q30, {%r100, %r101};", None),
    "packed and unpacked": ("mov.b64 %q30, {%r100, %r101}; mov.b64 {%r90, %r91}, %q30;", None),
    "a copy of other lanes": ("@%p2 mov.b32 %r90, %r100;", None),
    "a copy that is written again and used": ("mov.b32 %r90, %r100; mov.b32 %r90, 1; add.s32 %r92, %r90, 1;", None),
    "a result": ("add.s32 %r90, %r100, 0;", None),
    "an address": ("cvt.u64.u32 %q30, %r101; add.s64 %q30, %q30, %q1; ld.global.b32 %r92, [%q30];", "tcgen05.ld in flight"),
    "a branch": ("setp.eq.s32 %p7, %r101, 0; @%p7 bra OVER; OVER:", "tcgen05.ld in flight"),
    "a shuffle": ("shfl.sync.bfly.b32 %r92, %r100, 1, 31, -1;", "tcgen05.ld in flight"),
    "a store of a packed copy": ("mov.b64 %q30, {%r101, %r100}; st.global.b64 [%q1], %q30;", "tcgen05.ld in flight"),
    "a store": ("mov.b32 %r90, %r100; st.global.b32 [%q1], %r90;", "tcgen05.ld in flight"),
    "a write": ("mov.b32 %r100, 0;", "tcgen05.ld in flight"),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_FLIGHT)
def test_registers_of_a_load_may_be_computed_with_before_its_wait(what):
    """LLVM moves arithmetic before the wait. Memory, branches and other lanes must not see its results."""
    between, wrong = IN_FLIGHT[what]
    body = HEAD + "mov.b32 %r20, 41; tcgen05.st.sync.aligned.32x32b.x2.b32 [%r9], {%r20, %r0};"
    body += "tcgen05.wait::st.sync.aligned; mov.b32 %r90, 41;"
    body += f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r100, %r101}}, [%r9]; {between} tcgen05.wait::ld.sync.aligned;"
    unpack = "mov.b64 {%r90, %r91}, %q30;" if "after the wait" in what else ""
    body += unpack + "mul.wide.s32 %q20, %r0, 4; add.s64 %q20, %q20, %q1; st.global.b32 [%q20], %r90;" + TAIL
    x, y = torch.zeros(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    launch = lambda **options: run(body, x, y, threads=128, shared=64, **options)
    if wrong:
        with pytest.raises(ExecutionError, match=wrong):
            launch()
        if what in ("a branch", "a shuffle", "a store"):
            launch(assume=("tcgen05.ld",))
    else:
        launch()
        assert y.tolist() == [1 if "written again" in what else 41] * 128


#: Thread 32, in another warp, behind a barrier.
OTHER_WARP = "ISSUED: bar.sync 0; setp.ne.s32 %p7, %r0, 32; @%p7 bra OVER; {} OVER: W:"
ANOTHER_MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r8], %q10, %q11, %r11, {%r12, %r12, %r12, %r12}, %p5;"
FENCES = ("tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;")

#: Edits of a product by thread 0: (pattern, replacement) each, and the error. None: it is allowed.
ISSUERS = {
    "a commit of another warp": ([(COMMIT, ""), ("ISSUED: W:", OTHER_WARP.format(COMMIT))], "a race|nothing has written"),
    "a commit of another lane": (
        [(COMMIT, ""), ("ISSUED: W:", f"ISSUED: setp.ne.s32 %p7, %r0, 1; @%p7 bra OVER; {COMMIT} OVER: W:")],
        "a race|nothing has written",
    ),
    "a second commit": ([(COMMIT, COMMIT.replace("%r2", "%r2+8") + COMMIT)], None),
    "an MMA of another warp": ([(COMMIT, ""), ("ISSUED: W:", OTHER_WARP.format(ANOTHER_MMA + COMMIT))], "a race"),
    "an MMA of another warp behind fences": (
        [(COMMIT, FENCES[0]), ("ISSUED: W:", OTHER_WARP.format(FENCES[1] + ANOTHER_MMA + COMMIT))], None,
    ),
    "only the first fence": ([(COMMIT, FENCES[0]), ("ISSUED: W:", OTHER_WARP.format(ANOTHER_MMA + COMMIT))], "a race"),
    "only the second fence": (
        [(COMMIT, ""), ("ISSUED: W:", OTHER_WARP.format(FENCES[1] + ANOTHER_MMA + COMMIT))], "a race",
    ),
    "operands overwritten behind a barrier": (
        [("ISSUED: W:", "ISSUED: bar.sync 0; setp.eq.s32 %p7, %r0, 64; @%p7 st.shared.b32 [%r1+1024], %r12; W:")],
        "a race|overwritten",
    ),
    "a dealloc behind a pending commit": (
        [("@!%p1 bra END; tcgen05.dealloc", f"@%p2 {COMMIT.replace('%r2', '%r2+8')} @!%p1 bra END; tcgen05.dealloc")], None,
    ),
    "a dealloc behind a pending MMA": (
        [("@!%p1 bra END; tcgen05.dealloc", f"@%p2 {ANOTHER_MMA} @!%p1 bra END; tcgen05.dealloc")], "tcgen05.dealloc|a race",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ISSUERS)
def test_what_is_complete_depends_on_the_thread_that_issued_it(what):
    changes, wrong = ISSUERS[what]
    a, b = integers(128, 16).bfloat16(), integers(64, 16, seed=1).bfloat16()

    def change(body):
        body = body.replace(
            "mbarrier.init.shared.b64 [%r2], 1;",
            "mbarrier.init.shared.b64 [%r2], 1; @%p2 mbarrier.init.shared.b64 [%r2+8], 1;",
        )
        for old, new in changes:
            assert old in body
            body = body.replace(old, new)
        return body

    for seed in range(3):
        if wrong is None:
            assert torch.equal(product(128, 64, a, b, change=change, seed=seed), a.float() @ b.float().T)
            if " commit" in what:  # the arrival of a commit that nobody waits for
                with pytest.raises(ExecutionError, match=r"the CTA ends while .* a tcgen05\.commit"):
                    product(128, 64, a, b, change=change, seed=seed, commits=True)
        else:
            with pytest.raises(ExecutionError, match=wrong):
                product(128, 64, a, b, change=change, seed=seed)


def test_lanes_0_to_31_of_an_address_stand_for_the_lanes_of_the_warp():
    """All warps use the address of lane 0."""
    body = (
        HEAD
        + "mov.b32 %r20, %r0; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r20}; tcgen05.wait::st.sync.aligned;"
    )
    body += copied_out("%q0", 1) + TAIL
    out = torch.zeros(128, dtype=torch.int32)
    run(body, out, threads=128, shared=64)
    assert out.tolist() == list(range(128))
    with pytest.raises(ExecutionError, match="only accesses lanes 0 to 31"):
        run(
            body.replace(
                "st.sync.aligned.32x32b.x1.b32 [%r8]", "st.sync.aligned.32x32b.x1.b32 [%r8+2097152]"
            ),
            out,
            threads=128,
            shared=64,
        )
