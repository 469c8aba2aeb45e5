"""Arithmetic of fp16, bf16 and pairs, and reductions over a warp or a CTA."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.emulator.ptx import lanewise, run
from helpers.emulator.tensor_maps import tensor_map

from ptx_emulator import ExecutionError

HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}


def halves(dtype, seed):
    """256 numbers over many exponents, with edges: bits as uint16, values as fp64."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(256) * np.exp2(rng.uniform(-6, 6, 256))
    x[:6] = np.roll([np.nan, np.inf, 0.0, -0.0, 65504.0, 2.0**-24], seed)
    x = torch.from_numpy(x).to(dtype)
    return x.view(torch.int16).numpy().view(np.uint16), x.double()


def same(bits, want, dtype):
    found = torch.from_numpy(np.ascontiguousarray(bits.astype(np.uint16)).view(np.int16)).view(dtype)
    return torch.equal(found.double().nan_to_num(1e30), want.to(dtype).double().nan_to_num(1e30))


EXACT = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
}  # fmt: skip


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("opcode", EXACT)
def test_sums_and_products(opcode, kind):
    """Sums and products of these numbers are exact in fp64, up to what a single rounding sees."""
    dtype = HALVES[kind]
    (x, a), (y, b) = halves(dtype, 0), halves(dtype, 1)
    want = EXACT[opcode](a, b)
    assert same(lanewise(f"{opcode}.rn.{kind} {{d}}, {{0}}, {{1}};", "b16", x, y), want, dtype)
    pack = lambda low, high: high.astype(np.uint32) << np.uint32(16) | low
    found = lanewise(f"{opcode}.rn.{kind}x2 {{d}}, {{0}}, {{1}};", "b32", pack(x, y), pack(y, x))
    assert same(found & 0xFFFF, want, dtype) and same(found >> 16, EXACT[opcode](b, a), dtype)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", HALVES)
def test_fma_rounds_once(kind):
    """1 + 2^-n and 1 - 2^-n, whose product 1 - 2^-2n is just below the middle of -1 + 1 + .. and the next number."""
    dtype = HALVES[kind]
    (x, a), (y, b), (z, c) = (halves(dtype, seed) for seed in range(3))
    n = 10 if kind == "f16" else 7
    edge = (
        torch.tensor([1 + 2.0**-n, 1 - 2.0 ** -(n + 1), 2.0 ** -(3 * n)])
        .to(dtype)
        .view(torch.int16)
        .numpy()
        .view(np.uint16)
    )
    x[10], y[10], z[10] = edge
    found = lanewise(f"fma.rn.{kind} {{d}}, {{0}}, {{1}}, {{2}};", "b16", x, y, z)
    keep = torch.isfinite(a * b + c)
    keep[10] = False
    want = torch.from_numpy((a.numpy().astype(np.longdouble) * b.numpy() + c.numpy()).astype(np.float64))
    assert same(found[keep.numpy()], want[keep], dtype)
    relu = lanewise(f"fma.rn.relu.{kind} {{d}}, {{0}}, {{1}}, {{2}};", "b16", x, y, z)
    assert same(relu[keep.numpy()], want[keep].clamp(min=0), dtype)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", HALVES)
def test_products_of_halves_are_added_in_fp32(kind):
    (x, a), (y, b) = halves(HALVES[kind], 0), halves(HALVES[kind], 1)
    c = np.random.default_rng(3).standard_normal(256).astype(np.float32)
    found = lanewise(f"fma.rn.f32.{kind} {{d}}, {{0}}, {{1}}, {{2}};", "f32", x, y, c).view(np.float32)
    want = (a.numpy() * b.numpy() + c).astype(np.float32)
    assert np.array_equal(found, want, equal_nan=True)
    found = lanewise(f"add.rn.f32.{kind} {{d}}, {{0}}, {{1}};", "f32", x, c).view(np.float32)
    assert np.array_equal(found, a.numpy().astype(np.float32) + c, equal_nan=True)


@pytest.mark.parametrize("kind", HALVES)
def test_extremes_signs_and_comparisons(kind):
    dtype = HALVES[kind]
    (x, a), (y, b) = halves(dtype, 0), halves(dtype, 1)
    assert same(lanewise(f"max.{kind} {{d}}, {{0}}, {{1}};", "b16", x, y), torch.fmax(a, b), dtype)
    assert same(lanewise(f"min.NaN.{kind} {{d}}, {{0}}, {{1}};", "b16", x, y), torch.minimum(a, b), dtype)
    assert same(lanewise(f"neg.{kind} {{d}}, {{0}};", "b16", x), -a, dtype)
    assert same(lanewise(f"abs.{kind} {{d}}, {{0}};", "b16", x), a.abs(), dtype)
    found = lanewise(f"setp.lt.{kind} {{d}}, {{0}}, {{1}};", "pred", x, y)
    assert np.array_equal(found != 0, (a < b).numpy())


@pytest.mark.parametrize("opcode", ("add", "sub", "mul", "fma"))
def test_pairs_of_fp32(opcode):
    """Each half is the result of the instruction of single numbers."""
    x = np.random.default_rng(4).standard_normal((3, 64)).astype(np.float32)
    x[:, :4] = [[np.nan, np.inf, 1e-40, 1e-30], [1, -np.inf, 1, 1e-30], [0, 1, 1e-40, 1e-40]]
    count = 3 if opcode == "fma" else 2
    operands = ", ".join(f"{{{n}}}" for n in range(count))
    for ftz in ("", ".ftz"):
        want = lanewise(f"{opcode}.rn{ftz}.f32 {{d}}, {operands};", "f32", *x[:count])
        pairs = [np.ascontiguousarray(v).view(np.uint64) for v in x[:count]]
        found = lanewise(f"{opcode}.rn{ftz}.f32x2 {{d}}, {operands};", "b64", *pairs)
        assert np.array_equal(found.view(np.uint32), want)


def test_nan_wins_if_it_is_asked_for():
    x = np.resize(np.array([np.nan, 1, -0.0, 5], np.float32), 32)
    y = np.resize(np.array([2, np.nan, 0, -7], np.float32), 32)
    z = np.resize(np.array([9, 9, -1, 6], np.float32), 32)
    result = lambda text, *v: lanewise(text, "f32", *v).view(np.float32)[:4].tolist()
    assert np.isnan(result("max.NaN.f32 {d}, {0}, {1};", x, y)[:2]).all()
    assert result("max.f32 {d}, {0}, {1}, {2};", x, y, z) == [9, 9, 0, 6]
    assert result("min.NaN.ftz.f32 {d}, {0}, {1}, {2};", x, y, z)[2:] == [-1, -7]


def test_reductions_over_a_warp():
    x = np.random.default_rng(5).integers(-1000, 1000, 32).astype(np.int32)
    for operation, want in (("add", x.sum()), ("min", x.min()), ("max", x.max())):
        found = lanewise(f"redux.sync.{operation}.s32 {{d}}, {{0}}, -1;", "b32", x.view(np.uint32)).view(
            np.int32
        )
        assert (found == want).all()
    found = lanewise("redux.sync.xor.b32 {d}, {0}, -1;", "b32", x.view(np.uint32))
    assert (found == np.bitwise_xor.reduce(x.view(np.uint32))).all()
    y = np.random.default_rng(6).standard_normal(32).astype(np.float32)
    y[3] = np.nan
    extreme = lambda how: lanewise(f"redux.sync.{how}.f32 {{d}}, {{0}}, -1;", "f32", y).view(np.float32)
    assert (extreme("max") == np.nanmax(y)).all() and (extreme("min.abs") == np.nanmin(np.abs(y))).all()
    assert np.isnan(extreme("min.NaN")).all()


@pytest.mark.parametrize("seed", range(3))
def test_reductions_over_a_barrier(seed):
    out = torch.zeros(64, dtype=torch.int32)
    run(
        """setp.ge.u32 %p1, %r0, 40; barrier.cta.red.popc.aligned.u32 %r1, 0, %p1; bar.red.or.pred %p2, 0, %p1;
        barrier.red.and.pred %p3, 1, 64, %p1; selp.b32 %r2, 100, 0, %p2; selp.b32 %r3, 1000, 0, %p3; add.s32 %r1, %r1, %r2;
        add.s32 %r1, %r1, %r3; mul.wide.u32 %q8, %r0, 4; add.s64 %q8, %q8, %q0; st.global.b32 [%q8], %r1;""",
        out, threads=64, seed=seed,
    )  # fmt: skip
    assert out.tolist() == [124] * 64


def test_vectors_of_32_bytes():
    x, y = torch.arange(256, dtype=torch.int32), torch.zeros(256 + 8, dtype=torch.int32)
    y = y[-(y.data_ptr() // 4) % 8 :][:256]
    z = torch.zeros(264, dtype=torch.int32)
    z = z[-(z.data_ptr() // 4) % 8 :][:256]
    z.copy_(x)
    names = ", ".join(f"%r{n}" for n in range(10, 18))
    body = f"""mul.wide.u32 %q8, %r0, 32; add.s64 %q9, %q8, %q0; add.s64 %q10, %q8, %q1; ld.global.v8.b32 {{{names}}}, [%q9];
        st.global.v8.b32 [%q10], {{{names}}};"""
    run(body, z, y)
    assert torch.equal(y, x)
    with pytest.raises(ExecutionError, match="not aligned to 32 bytes"):
        run(body.replace("[%q9]", "[%q9+16]"), z, y)


def test_a_prefetch_of_a_box_checks_its_tensor_map():
    x = torch.zeros(8, 16, dtype=torch.int32)
    body = "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%q0, {0, 0}];"
    run(body, tensor_map(x, (8, 8)), x)
    with pytest.raises(ExecutionError, match="tensor map of rank 2, 1 coordinates"):
        run(body.replace("2d", "1d").replace("{0, 0}", "{0}"), tensor_map(x, (8, 8)), x)


LARGEST = float(np.finfo(np.float32).max)


def rounded(exact, how):
    """The fp32 number of an exact one: the nearest that is not beyond it."""
    near = np.float32(min(max(exact, -Fraction(LARGEST)), Fraction(LARGEST)))
    beyond = {
        "rm": Fraction(float(near)) > exact, "rp": Fraction(float(near)) < exact,
        "rz": abs(Fraction(float(near))) > abs(exact),
    }[how]  # fmt: skip
    away = {"rm": -np.inf, "rp": np.inf, "rz": 0.0}[how]
    with np.errstate(over="ignore"):
        outside = abs(exact) > Fraction(LARGEST) and (exact > 0) == (how == "rp") and how != "rz"
        return np.nextafter(near, np.float32(away)) if beyond or outside else near


@pytest.mark.parametrize("how", ("rz", "rm", "rp"))
@pytest.mark.parametrize("opcode", ("add", "sub", "mul", "fma"))
def test_directed_rounding_of_fp32_and_its_pairs(opcode, how):
    rng = np.random.default_rng(3)
    scale = lambda: np.exp2(rng.integers(-30, 30, 512)).astype(np.float32)
    a, b, c = (rng.standard_normal(512).astype(np.float32) * scale() for _ in range(3))
    a[:6] = 1.0, 2.0**-149, LARGEST, -LARGEST, 3.0, 1.5
    b[:6] = 2.0**-30, 2.0**-149, LARGEST, -LARGEST, -3.0, 1.5
    given = (a, b, c) if opcode == "fma" else (a, b)
    function = {
        "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "fma": lambda x, y, z: x * y + z,
    }[opcode]  # fmt: skip
    exact = [function(*(Fraction(float(v)) for v in x)) for x in zip(*given)]
    want = np.array([rounded(x, how) for x in exact])
    operands = ", ".join(f"{{{n}}}" for n in range(len(given)))
    one = lanewise(f"{opcode}.{how}.f32 {{d}}, {operands};", "f32", *given).astype(np.uint32).view(np.float32)
    assert np.array_equal(one, want)
    pairs = [np.ascontiguousarray(x).view(np.uint64) for x in given]
    two = lanewise(f"{opcode}.{how}.f32x2 {{d}}, {operands};", "b64", *pairs)
    assert np.array_equal(np.ascontiguousarray(two.astype(np.uint64)).view(np.float32), want)


@pytest.mark.parametrize(("how", "negative"), [("rz", False), ("rm", True), ("rp", False)])
def test_zeros_of_numbers_that_cancel(how, negative):
    """Under rounding towards minus infinity they are negative; the sum of positive zeros is positive."""
    a, b = np.tile(np.float32([3, 0, 0, -0.0]), 8), np.tile(np.float32([-3, 0, -0.0, -0.0]), 8)
    found = lanewise(f"add.{how}.f32 {{d}}, {{0}}, {{1}};", "f32", a, b).astype(np.uint32).view(np.float32)
    assert not found.any() and np.signbit(found[:4]).tolist() == [negative, False, negative, True]
