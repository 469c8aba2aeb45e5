"""Machine code against the closures that specify it: the same bits, the same errors, the same order of execution."""

import functools
import re

import numpy as np
import pytest
import torch
from helpers.emulator import prefill as kernels
from helpers.emulator import ptx
from helpers.emulator.cases import CASES
from helpers.emulator.decoding import check_decoding_by_example
from helpers.emulator.prefill import config_of, prefill
from helpers.nightly import nightly

import ptx_emulator
from kda_core.testing import make_inputs
from ptx_emulator.compiled import objects, products, shadow
from ptx_emulator.compiled.emit import Routine
from ptx_emulator.compiled.engine import Engine
from ptx_emulator.launch import compiled_of

#: Instructions over registers of 32, 64 and 16 bits, fp32 and predicates, with operands of these kinds.
INSTRUCTIONS = """
add.s32 r r r; sub.s32 r r r; mul.lo.s32 r r r; mul.hi.s32 r r r; mul.hi.u32 r r r; mad.lo.s32 r r r r; mul.wide.s32 q r r
mul.wide.u32 q r r; mad.wide.u32 q r r q; mul.wide.s16 r h h; mul.wide.u16 r h h; add.s64 q q q; sub.s64 q q q; mul.lo.s64 q q q
mul.hi.u64 q q q; mul.hi.s64 q q q; add.s16 h h h; mul.lo.s16 h h h; div.s32 r r r; div.u32 r r r; rem.s32 r r r; rem.u32 r r r
min.s32 r r r; max.s32 r r r; min.u32 r r r; max.u64 q q q; min.relu.s32 r r r; neg.s32 r r; abs.s32 r r; neg.s64 q q; abs.s16 h h
and.b32 r r r; or.b64 q q q; xor.b16 h h h; not.b32 r r; not.b64 q q; and.pred p p p; or.pred p p p; xor.pred p p p; not.pred p p
shl.b32 r r r; shl.b64 q q r; shl.b16 h h r; shr.u32 r r r; shr.s32 r r r; shr.s64 q q r; shr.u16 h h r; shr.b64 q q r
popc.b32 r r; popc.b64 r q; clz.b32 r r; clz.b64 r q; brev.b32 r r; brev.b64 q q; bfe.u32 r r r r; bfe.s32 r r r r; bfe.s64 q q r r
prmt.b32 r r r r; lop3.b32 r r r r 0x96; lop3.b32 r r r r 0xe2; shf.l.wrap.b32 r r r r; shf.r.wrap.b32 r r r r
shf.l.clamp.b32 r r r r; shf.r.clamp.b32 r r r r; setp.eq.s32 p r r; setp.lt.s32 p r r; setp.lo.u32 p r r; setp.ge.s64 p q q
setp.ne.b16 p h h; setp.lt.and.s32 p r r p; setp.gt.xor.u32 p r r !p; setp.lt.s32 p|p r r; setp.lt.f32 p f f; setp.neu.f32 p f f
setp.ltu.ftz.f32 p f f; setp.num.f32 p f f; setp.nan.f32 p f f; setp.ge.ftz.f32 p f f; selp.b32 r r r p; selp.f32 f f f p
selp.b64 q q q p; selp.b16 h h h p; mov.b32 r r; mov.f32 f f; mov.b32 f r; mov.b32 r f; mov.b64 q q; mov.b16 h h; mov.pred p p
mov.b64 q {r,r}; mov.b64 {r,r} q; mov.b32 r {h,h}; mov.b32 {h,h} r; mov.b64 q {h,h,h,h}; mov.b64 {h,h,h,h} q; mov.b64 {_,r} q
cvta.to.global.u64 q q; cvta.shared.u64 q q; cvta.to.shared.u64 q q
add.f32 f f f; sub.ftz.f32 f f f; mul.f32 f f f; mul.ftz.f32 f f f; mul.ftz.sat.f32 f f f; fma.rn.f32 f f f f
fma.rn.ftz.f32 f f f f; fma.rn.sat.f32 f f f f; div.rn.f32 f f f; min.f32 f f f; max.ftz.f32 f f f; neg.f32 f f; abs.ftz.f32 f f
ex2.approx.ftz.f32 f f; ex2.approx.f32 f f; rcp.approx.ftz.f32 f f; rsqrt.approx.f32 f f; sqrt.approx.ftz.f32 f f; sqrt.rn.f32 f f
lg2.approx.f32 f f; cvt.u32.u16 r h; cvt.s32.s16 r h; cvt.s32.s8 r r; cvt.u64.u32 q r; cvt.s64.s32 q r; cvt.u32.u64 r q; cvt.u16.u32 h r
cvt.rn.f32.s32 f r; cvt.rn.f32.u32 f r; cvt.rn.f32.s64 f q; cvt.rn.f32.u64 f q; cvt.rzi.s32.f32 r f; cvt.rni.u32.f32 r f
cvt.rmi.s64.f32 q f; cvt.rpi.ftz.u64.f32 q f; cvt.rni.f32.f32 f f; cvt.rmi.ftz.f32.f32 f f; cvt.f32.f16 f h; cvt.f32.bf16 f h
cvt.rn.bf16.f32 h f; cvt.rz.bf16.f32 h f; cvt.rn.f16.f32 h f; cvt.rn.relu.f16.f32 h f; cvt.rn.bf16x2.f32 r f f
cvt.rn.relu.bf16x2.f32 r f f; cvt.rn.f16x2.f32 r f f; cvt.rn.tf32.f32 r f
add.bf16 h h h; add.rn.bf16x2 r r r; sub.bf16x2 r r r; mul.bf16 h h h; mul.rn.bf16x2 r r r; fma.rn.bf16 h h h h; fma.rn.bf16x2 r r r r
vote.sync.ballot.b32 r p -1; vote.sync.any.pred p p -1; vote.sync.all.pred p !p -1; vote.sync.uni.pred p p -1
shfl.sync.idx.b32 r r r 31 -1; shfl.sync.bfly.b32 r|p r 5 31 -1; shfl.sync.up.b32 r|p r 3 0 -1; shfl.sync.down.b32 r r 2 0x1807 -1
movmatrix.sync.aligned.m8n8.trans.b16 r r; activemask.b32 r
""".replace("\n", ";").split(";")  # fmt: skip
INSTRUCTIONS = [text.strip() for text in INSTRUCTIONS if text.strip()]
COUNTS = {"r": 6, "q": 4, "h": 4, "f": 6, "p": 4}
OPCODES_OF_ALL_LANES = ("vote", "shfl", "movmatrix", "activemask")


def both(execute):
    """Execute with machine code and without. Returns the result or the text of the error, which must be the same."""
    found = []
    for compiled in (True, False):
        try:
            found.append(execute(compiled))
        except (ptx_emulator.ExecutionError, ptx_emulator.PtxError) as error:
            found.append(re.sub("at 0x[0-9a-f]*|0x[0-9a-f]{9,}", "", str(error)))
    first, second = found
    if isinstance(first, str) or isinstance(second, str):
        assert first == second
    else:
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    return first


def random_program(seed, length=40):
    """A kernel: registers with random values, some of them undefined in some lanes, and random instructions over them."""
    r = np.random.default_rng(seed)
    words = np.frombuffer(r.bytes(32 * 4 * 64), np.uint32).copy().reshape(64, 32)
    edges = np.array(
        [0, 1, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x00000001, 0x807FFFFF, 0xFFFFFFFF, 31, 32, 64]
    )
    chosen = r.random(words.shape) < 0.3
    words[chosen] = r.choice(edges, np.count_nonzero(chosen)).astype(np.uint32)
    body, row = ["mul.wide.u32 %q20, %r0, 4; add.s64 %q20, %q20, %q0;"], 0

    def name(kind):
        return f"%{kind}{10 + r.integers(COUNTS[kind])}"

    for kind, count in COUNTS.items():
        for n in range(10, 10 + count):
            if r.random() < 0.1:  # leave it undefined in some lanes
                body.append(f"setp.lt.u32 %p9, %r0, {r.integers(33)}; @%p9 bra SKIP{row};")
            body.append(
                f"ld.global.b32 %r5, [%q20+{row * 128}]; ld.global.b32 %r6, [%q20+{row * 128 + 128}];"
            )
            body.append({
                "r": f"mov.b32 %r{n}, %r5;", "f": f"mov.b32 %f{n}, %r5;", "q": f"mov.b64 %q{n}, {{%r5, %r6}};",
                "h": f"cvt.u16.u32 %h{n}, %r5;", "p": f"setp.lt.s32 %p{n}, %r5, 0;",
            }[kind])  # fmt: skip
            body.append(f"SKIP{row}: bar.warp.sync -1;")
            row += 1
    body.append("setp.lt.s32 %p8, %r0, 20;")
    for _ in range(length):
        opcode, *operands = r.choice(INSTRUCTIONS).split()
        operands = [re.sub(r"\b[rqhfp]\b", lambda m: name(m[0]), x) for x in operands]
        guard = (
            ""
            if opcode.startswith(OPCODES_OF_ALL_LANES)
            else r.choice(["", "", "", "@%p8 ", "@!%p8 ", "@%p10 "])
        )
        body.append(f"{guard}{opcode} {', '.join(operands)};")
    body.append("mul.wide.u32 %q21, %r0, 8; add.s64 %q21, %q21, %q1;")
    for row, (kind, n) in enumerate((k, n) for k, count in COUNTS.items() for n in range(10, 10 + count)):
        source, size = f"%{kind}{n}", {"r": 32, "f": 32, "q": 64, "h": 16}.get(kind, 32)
        if kind == "p":
            body.append(f"selp.b32 %r5, 1, 0, {source};")
            source = "%r5"
        body.append(f"st.global.b{size} [%q21+{row * 256}], {source};")
    return "\n".join(body), torch.from_numpy(words.view(np.int32))


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_programs(first):
    results = []
    for seed in range(first, first + 10):
        body, words = random_program(seed)

        def execute(compiled, body=body, words=words, seed=seed):
            out = torch.zeros(24, 256, dtype=torch.uint8)
            states = {"scratch": [out]} if seed % 2 else {}
            ptx.run(body, words, out, compiled=compiled, **states)
            return [out]

        results.append(both(execute))
    assert any(not isinstance(x, str) for x in results)


def test_the_random_instructions_are_compiled():
    """Apart from lg2, which stays with its closure."""
    for text in INSTRUCTIONS:
        opcode, *operands = text.split()
        operands = [
            re.sub(r"\b[rqhfp]\b", lambda m, n=n: f"%{m[0]}{10 + n}", x) for n, x in enumerate(operands)
        ]
        compiled = compiled_of(ptx.kernel(f"{opcode} {', '.join(operands)};", 0), None).compiled
        assert compiled[1] == (opcode != "lg2.approx.f32"), text


ACCESSES = {
    "vectors": (
        "ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%q8]; ld.global.nc.v2.b64 {%q9,%q10}, [%q8]; ld.global.u8 %r5, [%q8+1];"
        "ld.global.s8 %r6, [%q8+3]; ld.global.s16 %r7, [%q8+2]; add.s32 %r1, %r5, %r6; add.s32 %r2, %r2, %r7;"
        "st.global.v2.b64 [%q11], {%q9,%q10}; st.global.v2.b32 [%q11], {%r1,%r2}; st.global.u8 [%q11+9], %r4; st.global.b16 [%q11+12], %h1;"
    ),
    "generic": (
        "mov.b32 %r1, shared_bytes; cvt.u64.u32 %q12, %r1; cvta.shared.u64 %q12, %q12; mad.wide.u32 %q12, %r0, 16, %q12;"
        "ld.b32 %r2, [%q8+4]; st.b32 [%q12], %r2; st.b32 [%q12+4], %r0; ld.v2.b32 {%r3, %r4}, [%q12]; st.v2.b32 [%q11], {%r3, %r4};"
    ),
    "undefined bytes": (
        "mov.b32 %r1, shared_bytes; mad.lo.s32 %r1, %r0, 16, %r1; st.shared.b16 [%r1], %r0; ld.shared.b32 %r2, [%r1];"
        "ld.shared.u16 %r3, [%r1]; @%p1 st.global.b32 [%q11], %r3; @!%p1 st.global.b32 [%q11], %r2;"
    ),
    "a race": "mov.b32 %r1, shared_bytes; st.shared.b32 [%r1], %r0; ld.shared.b32 %r2, [%r1]; st.global.b32 [%q11], %r2;",
    "no race behind a barrier": (
        "mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 4, %r1; st.shared.b32 [%r2], %r0; bar.sync 0; xor.b32 %r3, %r0, 1;"
        "mad.lo.s32 %r3, %r3, 4, %r1; ld.shared.b32 %r4, [%r3]; st.global.b32 [%q11], %r4;"
    ),
    "a race of warps": (
        "mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 4, %r1; st.shared.b32 [%r2], %r0; xor.b32 %r3, %r0, 32; bar.warp.sync -1;"
        "mad.lo.s32 %r3, %r3, 4, %r1; ld.shared.b32 %r4, [%r3]; st.global.b32 [%q11], %r4;"
    ),
    "halves of a word, then all of it": (
        "mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 2, %r1; st.shared.b16 [%r2], %r0; ld.shared.u8 %r4, [%r2+1]; bar.sync 0;"
        "xor.b32 %r3, %r0, 1; mad.lo.s32 %r3, %r3, 2, %r1; ld.shared.u16 %r4, [%r3]; ld.global.nc.u16 %r5, [%q8+2]; add.s32 %r4, %r4, %r5;"
        "bar.sync 0; st.shared.b16 [%r3], %r4; bar.sync 0; @%p1 ld.shared.b32 %r4, [%r1+4]; bar.sync 0; @!%p1 st.shared.b16 [%r3], %r5;"
        "st.global.b32 [%q11], %r4; st.global.b16 [%q11+4], %h1; st.global.u8 [%q11+6], %r0; st.global.u8 [%q11+7], %r0;"
    ),
    "a race of halves": (
        "mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 2, %r1; st.shared.b16 [%r2], %r0; xor.b32 %r3, %r0, 1;"
        "mad.lo.s32 %r3, %r3, 2, %r1; ld.shared.u16 %r4, [%r3]; st.global.b32 [%q11], %r4;"
    ),
    "written after ld.global.nc": "ld.global.nc.b32 %r1, [%q8]; bar.sync 0; st.global.b32 [%q8], %r0;",
    "matrices": (
        "mov.b32 %r1, shared_bytes; mad.lo.s32 %r1, %r0, 16, %r1; ld.global.v4.b32 {%r2,%r3,%r4,%r5}, [%q8]; bar.sync 0;"
        "st.shared.v4.b32 [%r1], {%r2,%r3,%r4,%r5}; bar.sync 0; ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r6,%r7,%r8,%r9}, [%r1];"
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r10,%r11}, [%r1]; bar.sync 0;"
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r6,%r7,%r10,%r11}; stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r1], {%r8};"
        "bar.sync 0; ld.shared.v4.b32 {%r2,%r3,%r4,%r5}, [%r1]; st.global.v4.b32 [%q11], {%r2,%r3,%r4,%r5};"
    ),
}  # fmt: skip


@pytest.mark.parametrize("body", ACCESSES.values(), ids=ACCESSES)
def test_accesses(body):
    """Among them errors: both paths report the same one. %q8 and %q11: addresses of 16 bytes of each thread."""
    places = "mov.b16 %h1, 7; setp.lt.u32 %p1, %r0, 48; mad.wide.u32 %q8, %r0, 16, %q0; mad.wide.u32 %q11, %r0, 16, %q1;"

    def execute(compiled):
        x = torch.arange(64 * 16, dtype=torch.int32).to(torch.uint8)
        out = torch.zeros(64 * 16, dtype=torch.uint8)
        ptx.run(places + body, x, out, threads=64, shared=2048, compiled=compiled)
        return [out, x]

    both(execute)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_accesses(first):
    """Loads and stores of 1 to 16 bytes by two warps in 32 bytes of each state space, and barriers: the same races."""
    results = []
    for seed in range(first, first + 10):
        r = np.random.default_rng(seed)
        body = [
            "mov.b32 %r1, shared_bytes; mov.b32 %r2, 0; mov.b16 %h2, 0; mov.b64 %q12, 0; mov.b64 %q13, 0;"
        ]
        for n in range(12):
            size = int(r.choice([1, 2, 2, 2, 4, 8, 16]))
            kind, register = {1: ("u8", "%r2"), 2: ("u16", "%h2"), 4: ("u32", "%r2")}.get(
                size, ("u64", "%q12")
            )
            if size == 16:
                kind, register = "v2.u64", "{%q12, %q13}"
            place = int(r.integers(32 // size)) * size
            space, base = ("global", "%q0") if r.random() < 0.5 else ("shared", "%r1")
            lane = int(r.choice([0, 0, 1, 32, 33]))
            address = f"[{base}+{place}]"
            value = f"mov.b32 %r2, {n}; cvt.u16.u32 %h2, %r2; cvt.u64.u32 %q12, %r2;"
            access = (
                f"ld.{space}.{kind} {register}, {address};"
                if r.random() < 0.4
                else f"{value} st.{space}.{kind} {address}, {register};"
            )
            body.append(f"setp.ne.s32 %p1, %r0, {lane}; @%p1 bra SKIP{n}; {access} SKIP{n}:")
            body.append(str(r.choice(["bar.sync 0;", "bar.sync 0;", "bar.warp.sync -1;", ""])))

        def execute(compiled, body=body, seed=seed):
            out = torch.zeros(32, dtype=torch.uint8)
            ptx.run(" ".join(body), out, threads=64, shared=32, seed=seed, compiled=compiled)
            return [out]

        results.append(both(execute))
    assert any(isinstance(x, str) for x in results) and any(not isinstance(x, str) for x in results)


SMALL = [name for name in CASES if name.startswith(("lanes/", "memory/", "matrices/"))]


@pytest.mark.parametrize("name", [name if n % 3 == 0 else nightly(name) for n, name in enumerate(SMALL)])
def test_calibration_cases(name, monkeypatch):
    def execute(compiled):
        monkeypatch.setattr(ptx, "execute", functools.partial(ptx_emulator.run, compiled=compiled))
        return [x.contiguous().view(-1).view(torch.uint8) for x in CASES[name].run().values()]

    assert not isinstance(both(execute), str)


def test_decoding_by_example_equals_decoding():
    source, _ = kernels.compiled(config_of(make_inputs("slow", 72, H=1).arguments, 32, 1))
    check_decoding_by_example(source)


def test_a_launch_of_the_prefill_kernel(monkeypatch):
    """The same bits after the same number of instructions: the seed gives both paths the same order of execution."""
    x = make_inputs("slow", 72, H=1).arguments
    counts = []

    def execute(compiled):
        def run(*given, **named):
            counts.append(ptx_emulator.run(*given, compiled=compiled, **named))
            return counts[-1]

        monkeypatch.setattr(ptx, "execute", run)
        return prefill(x, config_of(x, 64, 1))

    both(execute)
    assert len(counts) == 2 and counts[0] == counts[1]


# ---- the folder of object code


def never(module):
    raise AssertionError("it is compiled")


def test_a_later_process_links_what_an_earlier_one_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv(objects.VARIABLE, str(tmp_path))
    name, build = shadow.build("load")
    with pytest.raises(AssertionError, match="it is compiled"):
        Engine().function(name, never)
    assert Engine().function(name, build) and Engine().function(name, never)
    (file,) = tmp_path.glob("*/*.o")
    assert file.parent.stat().st_mode & 0o077 == 0

    file.write_bytes(file.read_bytes()[:-1])  # damaged
    with pytest.raises(AssertionError, match="it is compiled"):
        Engine().function(name, never)
    assert Engine().function(name, build) and Engine().function(name, never)


def test_a_function_brings_those_that_it_calls(tmp_path, monkeypatch):
    monkeypatch.setenv(objects.VARIABLE, str(tmp_path))
    call = lambda module: _calls_product(module)
    assert Engine().function("caller", call) and len(list(tmp_path.glob("*/*.o"))) == 2
    engine = Engine()
    assert engine.function("caller", never) and engine.function(products.NAME, never)
    for file in tmp_path.glob("*/*.o"):  # only the caller is left
        if products.NAME.encode() + b"\n" not in file.read_bytes()[:100]:
            file.unlink()
    assert Engine().function("caller", call)


def _calls_product(module):
    o = Routine(module, "caller", products.PRODUCT)
    o.call(products.NAME, products.build, *o.function.args[1:])
    o.done()


@pytest.mark.parametrize("why", ["turned off", "others may write it", "a file"])
def test_without_a_folder_functions_are_compiled(tmp_path, monkeypatch, why):
    folder = tmp_path / "objects"
    monkeypatch.setenv(objects.VARIABLE, "" if why == "turned off" else str(folder))
    if why == "a file":
        folder.write_text("")
    elif why == "others may write it":
        inner = objects.folder_of(("a machine",))
        inner.chmod(0o777)
        assert objects.folder_of(("a machine",)) is None and objects.folder_of(("another",)) is not None
        return
    assert Engine().function(*shadow.build("load")) and not list(tmp_path.rglob("*.o"))
