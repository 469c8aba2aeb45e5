"""Tensor maps and bulk copies of boxes: those that the DSL makes, and boxes of every rank against numpy."""

import itertools
import struct

import numpy as np
import pytest
import torch
from dsl_kernels import TILE, compiled_map_tiles
from ptx import run

import ptx_emulator
from ptx_emulator import ExecutionError

KINDS = ("K_INTER", "K_SW32", "K_SW64", "K_SW128")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_in_and_out(arch, kind):
    function = ptx_emulator.load(compiled_map_tiles(arch, kind))
    for shape in ((32, 64), (45, 72), (3, 136)):
        x = torch.arange(shape[0] * shape[1]).reshape(shape).remainder(128).bfloat16()
        y = torch.zeros(shape, dtype=torch.bfloat16)
        with ptx_emulator.device(arch) as device:
            function(x, y)
        assert torch.equal(y, (x.float() * 1.5 + 1).bfloat16())
        assert device.launches[0].grid == (-(-shape[0] // TILE[0]), -(-shape[1] // TILE[1]), 1)


def tensor_map(x, box, swizzle=0, flags=0x40002):
    """The 128 bytes for a tensor of int32; ``box``: from the innermost dimension on."""
    rank, extents, strides = x.dim(), x.shape[::-1], x.stride()[::-1]
    pad = lambda values: [*values, *[0] * (5 - len(values))]
    flags |= (rank - 1) << 4 | 2 << 7 | swizzle << 13
    raw = struct.pack("<QI4II", x.data_ptr(), flags, *pad([s * 4 // 16 for s in strides[1:]])[:4], 0)
    raw += struct.pack("<5I3x5B4x", *pad([n - 1 for n in extents]), *pad([n - 1 for n in box]))
    raw = raw.ljust(128, b"\xff")
    room = torch.zeros(192, dtype=torch.uint8)
    place = room[-room.data_ptr() % 64 :][:128]
    place.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return place


START = """
    setp.eq.s32 %p1, %r0, 0; mov.b32 %r1, shared_bytes; add.s32 %r2, %r1, 16384; @%p1 mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0; @!%p1 bra WAIT; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], <bytes>;
    cp.async.bulk.tensor.<rank>d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%q0, {<corner>}], [%r2];
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra WAIT;"
OUT = """
    mov.b32 %r3, %r0; LOOP: setp.ge.s32 %p3, %r3, <count>; @%p3 bra END; mad.lo.s32 %r4, %r3, 4, %r1; ld.shared.b32 %r5, [%r4];
    mul.wide.s32 %q8, %r3, 4; add.s64 %q8, %q2, %q8; st.global.b32 [%q8], %r5; add.s32 %r3, %r3, 32; bra LOOP; END:
"""


def filled(text, **values):
    for name, value in values.items():
        text = text.replace(f"<{name}>", str(value))
    return text


CASES = [
    ((50,), (16,), (40,)), ((50,), (16,), (-3,)), ((9, 20), (8, 4), (16, 7)), ((5, 9, 20), (8, 2, 3), (-4, 8, 1)),
    ((3, 5, 9, 20), (4, 2, 3, 2), (12, -1, 3, 2)), ((2, 3, 5, 9, 20), (4, 2, 3, 2, 2), (20, 0, 0, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "box", "corner"), CASES)
def test_boxes_of_every_rank(shape, box, corner):
    """A box of zeros where it is outside of the tensor."""
    x = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    x = torch.nn.functional.pad(x, (0, -shape[-1] % 4))[..., : shape[-1]]  # rows are multiples of 16 bytes
    want = np.zeros(box[::-1], np.int32)
    for place in itertools.product(*(range(n) for n in box[::-1])):
        at = tuple(c + n for c, n in zip(corner[::-1], place))
        if all(0 <= a < n for a, n in zip(at, shape)):
            want[place] = x[at]
    out, room = torch.zeros(want.size, dtype=torch.int32), x.untyped_storage()
    whole = torch.tensor([], dtype=torch.int32).set_(room)
    body = filled(
        START + WAIT + OUT,
        bytes=want.size * 4,
        rank=len(box),
        corner=", ".join(map(str, corner)),
        count=want.size,
    )
    run(body, tensor_map(x, box), whole, out, shared=16400)
    assert np.array_equal(out.numpy().reshape(want.shape), want)


@pytest.mark.parametrize(("swizzle", "mask"), [(1, 1), (2, 3), (3, 7)])
def test_swizzles(swizzle, mask):
    """Units of 16 bytes change places with what their address has above 128 bytes."""
    width = 4 << swizzle
    x = torch.arange(32 * width, dtype=torch.int32).reshape(32, width)
    out = torch.zeros(32 * width, dtype=torch.int32)
    body = filled(START + WAIT + OUT, bytes=128 * width, rank=2, corner="0, 0", count=32 * width)
    run(body, tensor_map(x, (width, 32), swizzle), x, out, shared=16400)
    place = np.arange(32 * width) * 4
    assert np.array_equal(out.numpy()[(place ^ (place >> 7 & mask) << 4) // 4], x.numpy().reshape(-1))


def test_what_is_malformed():
    x, out = torch.zeros(8, 16, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = lambda **values: filled(START + WAIT, **({"bytes": 256, "rank": 2, "corner": "0, 0"} | values))
    run(body(), tensor_map(x, (8, 8)), x, out, shared=16400)
    for text, m, wrong in (
        (body(), tensor_map(x, (8, 8), flags=0x140002), "flags 0x140"),
        (body(), tensor_map(x, (16, 8), swizzle=1), "more than the 32 of the swizzle"),
        (body(), tensor_map(x, (3, 8)), "multiples of 16"),
        (body(corner="0", rank=1), tensor_map(x, (8, 8)), "rank 2, 1 coordinates"),
        (body(bytes=128), tensor_map(x, (8, 8)), "more bytes than it expects"),
        (body(bytes=512), tensor_map(x, (8, 8)), "deadlock(.|\n)*bytes pending"),
        (body().replace("[%r1], [%q0", "[%r1+64], [%q0"), tensor_map(x, (8, 8)), "not aligned to 128"),
    ):
        with pytest.raises(ExecutionError, match=wrong):
            run(text, m, x, out, shared=16400)
    with pytest.raises(ExecutionError, match="outside|out of bounds"):
        run(body(), tensor_map(x, (8, 8)), x[:4], out, shared=16400)


STORE = """
    mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 4, %r1; st.shared.b32 [%r2], %r0; <fence.proxy.async.shared::cta;>
    bar.warp.sync -1; setp.ne.s32 %p1, %r0, 0; @%p1 bra END; cp.async.bulk.<copy>;
    cp.async.bulk.commit_group; <cp.async.bulk.wait_group.read 0;> <last> END:
"""


@pytest.mark.parametrize(
    "copy",
    (
        "tensor.2d.global.shared::cta.tile.bulk_group [%q0, {4, -1}], [%r1]",
        "global.shared::cta.bulk_group [%q1+48], [%r1], 128",
    ),
)
def test_stores(copy):
    """Boxes are written where they are inside of the tensor. What is left out is noticed."""
    want = torch.full((6, 12), -1, dtype=torch.int32)
    if copy.startswith("tensor"):
        want[:3, 4:12] = torch.arange(8, 32).reshape(3, 8)
    else:
        want.view(-1)[12:44] = torch.arange(32)
    for seed in range(3):
        y = torch.full((6, 12), -1, dtype=torch.int32)
        m = tensor_map(y, (8, 4))
        right = filled(STORE, copy=copy, last="").replace("<", "").replace(">", "")
        run(right, m, y, shared=128, seed=seed)
        assert torch.equal(y, want)
        for part, wrong in (
            ("<fence.proxy.async.shared::cta;>", "without a fence.proxy.async"),
            ("<cp.async.bulk.wait_group.read 0;>", "nothing has waited"),
            ("bar.warp.sync -1;", "a race"),
        ):
            broken = filled(STORE, copy=copy, last="").replace(part, "").replace("<", "").replace(">", "")
            with pytest.raises(ExecutionError, match=wrong):
                run(broken, m, y, shared=128, seed=seed)
        early = filled(STORE, copy=copy, last="").replace(
            "commit_group;", "commit_group; st.shared.b32 [%r1+64], 7;"
        )
        with pytest.raises(ExecutionError, match="overwritten before a bulk copy|a race"):
            run(early.replace("<", "").replace(">", ""), m, y, shared=128, seed=seed)
