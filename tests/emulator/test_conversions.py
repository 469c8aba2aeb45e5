"""`cvt` between floating-point types and integers, against torch and exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.emulator.ptx import lanewise, run

import ptx_emulator

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
EDGES = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    448.0,
    449.0,
    464.0,
    57344.0,
    1e9,
    -1e9,
    2.0**-9,
    2.0**-10,
    3 * 2.0**-10,
    1e-30,
]


def numbers(scale=8):
    """1024 numbers, the first of which are `EDGES`."""
    rng = np.random.default_rng(0)
    found = (rng.standard_normal(1024) * np.exp2(rng.uniform(-scale, scale, 1024))).astype(np.float32)
    found[: len(EDGES)] = EDGES
    return found


@pytest.mark.parametrize("name", FP8)
def test_pairs_of_fp8(name):
    """The first operand becomes the upper half. Numbers beyond the largest one become that one."""
    x, y = numbers(), numbers()[::-1].copy()
    largest = torch.finfo(FP8[name]).max

    def want(v):
        return torch.from_numpy(v).clamp(-largest, largest).to(FP8[name]).view(torch.uint8).numpy()

    found = lanewise(f"cvt.rn.satfinite.{name}x2.f32 {{d}}, {{0}}, {{1}};", "b16", x, y)
    nan = np.isnan(x)
    assert np.array_equal((found >> 8)[~nan], want(x)[~nan]) and (found[nan] >> 8 == 0x7F).all()
    assert np.array_equal(found[~np.isnan(y)] & 255, want(y)[~np.isnan(y)])
    halves = torch.from_numpy(np.stack([y, x], 1)).half()  # the lower half first
    packed = halves.view(torch.int32).numpy().view(np.uint32)[:, 0]
    found = lanewise(f"cvt.rn.satfinite.relu.{name}x2.f16x2 {{d}}, {{0}};", "b16", packed)
    assert np.array_equal(
        (found >> 8)[~nan], want(np.where(x > 0, halves[:, 1].float().numpy(), np.float32(0)))[~nan]
    )


@pytest.mark.parametrize("name", FP8)
def test_fp8_to_fp16(name):
    codes = np.arange(1024, dtype=np.uint16) * 64 + np.arange(1024, dtype=np.uint16) % 64
    found = lanewise(f"cvt.rn.f16x2.{name}x2 {{d}}, {{0}};", "b32", codes).view(np.float16).reshape(-1, 2)
    want = torch.from_numpy(codes.view(np.uint8).copy()).view(FP8[name]).half().numpy().reshape(-1, 2)
    assert np.array_equal(found, want, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("e2m1", [0, 0.5, 1, 1.5, 2, 3, 4, 6]),
        (
            "e2m3",
            [n / 8 for n in range(16)] + [(8 + n) / 4 for n in range(8)] + [(8 + n) / 2 for n in range(8)],
        ),
        ("e3m2", [n / 16 for n in range(4)] + [(4 + n) / 16 * 2**e for e in range(7) for n in range(4)]),
    ],
)
def test_fp4_and_fp6_are_the_nearest_value(name, values):
    x = numbers(4)
    x[:5] = 0.25, 0.75, -5.0, 2.5, np.inf
    instruction = f"cvt.rn.satfinite.{name}x2.f32 {{d}}, {{0}}, 0f00000000;"
    if name == "e2m1":
        instruction = f".reg .b8 %c; {instruction.replace('{d}', '%c')} cvt.u16.u8 {{d}}, %c;"
    found = lanewise(instruction, "b16", x) >> (4 if name == "e2m1" else 8)
    for number, code in zip(x.tolist(), found.tolist()):
        if np.isnan(number):
            assert code == len(values) - 1  # the largest number
            continue
        near = min(
            range(len(values)), key=lambda n: (abs(abs(number) - values[n]) if number**2 < 1e9 else -n, n % 2)
        )
        assert code == near | (np.signbit(number) << (len(values) - 1).bit_length()), number


def test_scales():
    """ue8m0 holds powers of 2, rounded towards zero or up."""
    x = np.array([1.0, 1.5, 2.0**-127, 2.0**-126, 3.0, 1e-45, np.inf, np.nan] * 4, np.float32)
    down = lanewise("cvt.rz.satfinite.ue8m0x2.f32 {d}, {0}, {0};", "b16", x)
    up = lanewise("cvt.rp.satfinite.ue8m0x2.f32 {d}, {0}, {0};", "b16", x)
    assert (down & 255).tolist()[:8] == [127, 127, 0, 1, 128, 0, 254, 255] and np.array_equal(
        down >> 8, down & 255
    )
    assert (up & 255).tolist()[:8] == [127, 128, 0, 1, 129, 0, 254, 255]
    codes = np.arange(32, dtype=np.uint16) * 8
    found = lanewise("cvt.rn.bf16x2.ue8m0x2 {d}, {0};", "b32", codes)
    assert np.array_equal((found << 16).view(np.float32), np.exp2(codes - 127.0).astype(np.float32))


@pytest.mark.parametrize("name", ("s2f6", *FP8))
def test_pairs_are_scaled_by_powers_of_2(name):
    """Every code of a type, times a power of 2 for each of the pair. The code 255 of a scale is NaN."""
    codes = np.arange(256, dtype=np.uint8)
    kinds = {"s2f6": lambda x: x.view(torch.int8).double() / 64}
    value = kinds.get(name, lambda x: x.view(FP8[name]).double())(torch.from_numpy(codes)).numpy()
    for low, high in ((133, 120), (1, 254), (254, 255), (127, 0)):
        scales = np.full(256, high << 8 | low, np.uint16)
        pairs = (codes[::-1].astype(np.uint16) << 8) | codes
        for form, limit in (("", np.inf), (".satfinite", torch.finfo(torch.bfloat16).max)):
            text = f"cvt.rn{form}.scaled::n2::ue8m0.bf16x2.{name}x2 {{d}}, {{0}}, {{1}};"
            found = torch.from_numpy(
                lanewise(text, "b32", pairs, scales).view(np.int16).reshape(256, 2).copy()
            )
            for part, scale, x in ((0, low, value), (1, high, value[::-1])):
                exact = x * (np.nan if scale == 255 else 2.0 ** (scale - 127))
                want = torch.from_numpy(exact).clamp(-limit, limit).float().bfloat16()
                assert torch.equal(found[:, part].view(torch.bfloat16).nan_to_num(7), want.nan_to_num(7))


def exactly(x, unit, how):
    """Round to a multiple of ``unit``: "rz", "rm" or "rp"."""
    q = Fraction(x) / unit
    whole = {"rm": lambda: q.__floor__(), "rp": lambda: q.__ceil__(), "rz": lambda: q.__trunc__()}[how]()
    return whole * unit


@pytest.mark.parametrize("how", ("rz", "rm", "rp"))
def test_roundings_to_fp32(how):
    """Numbers between 2^30 and 2^31 are multiples of 128 in fp32."""
    rng = np.random.default_rng(1)
    integers = rng.integers(1 << 30, 1 << 31, 64) * rng.choice([-1, 1], 64)
    reals = integers + rng.random(64)
    want = lambda values: [float(exactly(v, 128, how)) for v in values.tolist()]
    found = lanewise(f"cvt.{how}.f32.s32 {{d}}, {{0}};", "f32", integers.astype(np.int32).view(np.uint32))
    assert found.view(np.float32).tolist() == want(integers)
    found = lanewise(f"cvt.{how}.f32.s64 {{d}}, {{0}};", "f32", integers.view(np.uint64))
    assert found.view(np.float32).tolist() == want(integers)
    assert lanewise(f"cvt.{how}.f32.f64 {{d}}, {{0}};", "f32", reals).view(np.float32).tolist() == want(reals)


@pytest.mark.parametrize("how", ("rz", "rm", "rp"))
def test_roundings_to_fp16(how):
    x = np.random.default_rng(2).uniform(-2048, -1024, 64).astype(np.float32) * np.resize([1, -1], 64).astype(
        np.float32
    )
    found = lanewise(f"cvt.{how}.f16.f32 {{d}}, {{0}};", "b16", x).view(np.float16)
    assert found.tolist() == [float(exactly(v, 1, how)) for v in x.tolist()]


def test_subnormals_and_limits():
    x = np.resize(np.array([1e-40, -1e-40, 0.3, 7.0, -3.0, np.nan, 1e30, -1e30], np.float32), 32)
    reals = lambda text, result="f32": lanewise(text + " {d}, {0};", result, x)[:8]
    assert reals("cvt.ftz.f32.f32").view(np.float32)[:2].tolist() == [0, 0]
    assert reals("cvt.sat.f32.f32").view(np.float32).tolist() == [
        np.float32(1e-40),
        0,
        np.float32(0.3),
        1,
        0,
        0,
        1,
        0,
    ]
    assert reals("cvt.rpi.s32.f32", "b32")[0] == 1 and reals("cvt.rpi.ftz.s32.f32", "b32")[0] == 0
    largest = float.fromhex("0x1.ffcp127")
    for name, shift, value in (("bf16", 16, float.fromhex("0x1.fep127")), ("tf32", 0, largest)):
        y = np.resize(np.array([3.4e38, -3.4e38, np.inf, 1.0], np.float32), 32)
        result = "b16" if name == "bf16" else "b32"
        how = "rn" if name == "bf16" else "rna"
        found = lanewise(f"cvt.{how}.satfinite.{name}.f32 {{d}}, {{0}};", result, y).astype(
            np.uint32
        ) << np.uint32(shift)
        assert found.view(np.float32)[[2, 3]].tolist() == [value, 1.0]
    found = lanewise(
        "cvt.rn.satfinite.f16x2.f32 {d}, {0}, {0};", "b32", np.resize(np.float32([7e4, -np.inf]), 32)
    )
    assert found.view(np.float16)[:4].tolist() == [65504, 65504, -65504, -65504]


def test_registers_of_16_bytes_are_moved():
    out = torch.zeros(32, 2, dtype=torch.int64)
    run(
        """.reg .b128 %z<3>; cvt.u64.u32 %q5, %r0; mov.b64 %q6, 7; mov.b128 %z1, {%q5, %q6}; mov.b128 %z2, %z1;
        setp.lt.u32 %p1, %r0, 9; @%p1 mov.b128 %z2, {%q6, %q6}; mov.b128 {%q7, %q8}, %z2; mad.lo.s64 %q9, %q5, 16, %q0;
        st.global.v2.b64 [%q9], {%q7, %q8};""",
        out,
    )
    lane = torch.arange(32)
    assert torch.equal(out, torch.stack([torch.where(lane < 9, 7, lane), 0 * lane + 7], 1))


@pytest.mark.parametrize(
    "text",
    (
        "cvt.rn.satfinite.s2f6x2.f32 %h1, %f1, %f2;", "cvt.rn.scaled::n2::ue8m0.f16x2.e4m3x2 %r1, %h1, %h2;",
        "cvt.rs.satfinite.e4m3x4.f32 %r1, {%f1, %f1, %f1, %f1}, %r2;",
        "cvt.rm.bf16.f32 %h1, %f1;", "cvt.f32 %f1, %f2;", "mov.b32 {%h1}, %r1;", "mov.b128 %r1, %r2;", "mov.b64 %q1, {%h1, %h2};",
        "st.global.b128 [%q0], %r1;", "set.eq.f32.bf16 %f1, %h1, %h2;", "add.rn.bf16x3 %r1, %r2, %r3;",
    ),
)  # fmt: skip
def test_forms_that_are_not_modelled_are_refused_by_name(text):
    with pytest.raises(ptx_emulator.PtxError) as caught:
        run(text, torch.zeros(1))
    assert caught.value.line > 0 and caught.value.text == text[:-1]
