"""Tensor maps and bulk copies of boxes: maps of the DSL, and boxes of every rank against numpy."""

import itertools

import numpy as np
import pytest
import torch
from helpers.emulator.dsl_kernels import TILE, map_tiles
from helpers.emulator.ptx import run
from helpers.emulator.tensor_maps import OUT, START, STORE, WAIT, filled, tensor_map

import ptx_emulator
from ptx_emulator import ExecutionError, tensors

KINDS = ("K_INTER", "K_SW32", "K_SW64", "K_SW128")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
@pytest.mark.parametrize("kind", KINDS)
def test_dsl_kernels_load_and_store_tiles(arch, kind):
    function = map_tiles(arch, kind)
    for shape in ((32, 64), (45, 72), (3, 136)):
        x = torch.arange(shape[0] * shape[1]).reshape(shape).remainder(128).bfloat16()
        y = torch.zeros(shape, dtype=torch.bfloat16)
        with ptx_emulator.device(arch) as device:
            function(x, y)
        assert torch.equal(y, (x.float() * 1.5 + 1).bfloat16())
        assert device.launches[0].grid == (-(-shape[0] // TILE[0]), -(-shape[1] // TILE[1]), 1)


CASES = [
    ((50,), (16,), (40,)), ((50,), (16,), (-4,)), ((9, 20), (8, 4), (16, 7)), ((5, 9, 20), (8, 2, 3), (-4, 8, 1)),
    ((3, 5, 9, 20), (4, 2, 3, 2), (12, -1, 3, 2)), ((2, 3, 5, 9, 20), (4, 2, 3, 2, 2), (20, 0, 0, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "box", "corner"), CASES)
def test_boxes_of_every_rank(shape, box, corner):
    """Elements of the box outside the tensor are zeros."""
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
def test_swizzled_boxes(swizzle, mask):
    """The index of a unit of 16 bytes is XORed with address bits from 7 on."""
    width = 4 << swizzle
    x = torch.arange(32 * width, dtype=torch.int32).reshape(32, width)
    out = torch.zeros(32 * width, dtype=torch.int32)
    body = filled(START + WAIT + OUT, bytes=128 * width, rank=2, corner="0, 0", count=32 * width)
    run(body, tensor_map(x, (width, 32), swizzle), x, out, shared=16400)
    place = np.arange(32 * width) * 4
    assert np.array_equal(out.numpy()[(place ^ (place >> 7 & mask) << 4) // 4], x.numpy().reshape(-1))


def changed(tensor, byte, bits=0x10):
    """The map with further flags set. Byte 2 has a bit that the emulator does not know."""
    tensor[8 + byte] |= bits
    return tensor


def with_box(tensor, *extents):
    """The map with another box."""
    tensor[55 : 55 + len(extents)] = torch.tensor(extents) - 1
    return tensor


def test_malformed_maps_and_copies_are_errors():
    x, out = torch.zeros(8, 16, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = lambda **values: filled(START + WAIT, **({"bytes": 256, "rank": 2, "corner": "0, 0"} | values))
    run(body(), tensor_map(x, (8, 8)), x, out, shared=16400)
    for text, m, wrong in (
        (body(), changed(tensor_map(x, (8, 8)), 2), "flags 0x100"),
        (body(), changed(tensor_map(x, (16, 8)), 1, 0x20), "more than the 32 of the swizzle"),
        (body(), with_box(tensor_map(x, (8, 8)), 3, 8), "multiples of 16"),
        (body(corner="0", rank=1), tensor_map(x, (8, 8)), "rank 2, 1 coordinates"),
        (
            body(corner="2, 0"),
            tensor_map(x, (8, 8)),
            "coordinate 2 of elements of 4 bytes is not aligned to 16 bytes",
        ),
        (body(), changed(tensor_map(x, (8, 8)), 1, 0x80), "NaN outside of a tensor of integers"),
        (body(bytes=128), tensor_map(x, (8, 8)), "more bytes than it expects"),
        (body(bytes=512), tensor_map(x, (8, 8)), "deadlock(.|\n)*bytes pending"),
        (body().replace("[%r1], [%q0", "[%r1+64], [%q0"), tensor_map(x, (8, 8)), "not aligned to 128"),
    ):
        with pytest.raises(ExecutionError, match=wrong):
            run(text, m, x, out, shared=16400)
    with pytest.raises(ExecutionError, match="outside|out of bounds"):
        run(body(), tensor_map(x, (8, 8)), x[:4], out, shared=16400)


def encode(**changes):
    """A map of 16-bit elements with some arguments changed."""
    given = {
        "kind": 6, "address": 256, "extents": (64, 8), "strides": (128,), "box": (64, 8), "steps": (1, 1), "interleave": 0,
        "swizzle": 3, "promotion": 0, "fill": 0,
    }  # fmt: skip
    return tensors.encoded(**(given | changes))


def test_the_encoder_names_what_it_refuses():
    """That it encodes as the driver does is part of the calibration."""
    assert len(encode()) == 128
    for changes, wrong in (
        ({"box": (0, 8)}, "boxDim"), ({"box": (128, 8)}, "more than the 128 of the swizzle"), ({"box": (9, 8)}, "multiples of 16"),
        ({"extents": (0, 8)}, "globalDim"), ({"strides": (24,)}, "globalStrides"), ({"address": 264}, "address 0x108"),
        ({"promotion": 4}, "l2Promotion"), ({"kind": 2, "box": (32, 8), "fill": 1}, "NaN outside of a tensor of integers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"cuTensorMapEncodeTiled: .*{wrong}"):
            encode(**changes)
    for changes in ({"kind": 13}, {"swizzle": 4}, {"interleave": 1}, {"steps": (1, 2)}):
        with pytest.raises(ptx_emulator.PtxError, match="cuTensorMapEncodeTiled: .*not modelled"):
            encode(**changes)


def test_rows_narrower_than_their_swizzle_leave_gaps():
    """Gaps stay unwritten and do not count as bytes of the copy."""
    x, out = torch.arange(32 * 16, dtype=torch.int32).reshape(32, 16), torch.zeros(32 * 8, dtype=torch.int32)
    body = (
        filled(START + WAIT, bytes=32 * 16, rank=2, corner="0, 0")
        + "mul.wide.u32 %q8, %r0, 16; add.s64 %q8, %q2, %q8;"
    )
    body += "mad.lo.s32 %r3, %r0, 32, %r1; and.b32 %r4, %r0, 4; mad.lo.s32 %r3, %r4, 4, %r3; ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];"
    body += "st.global.v4.b32 [%q8], {%r4, %r5, %r6, %r7};"
    run(body, tensor_map(x, (4, 32), 1), x, out, shared=16400)
    assert torch.equal(out[:128].view(32, 4), x[:, :4])
    with pytest.raises(ExecutionError, match="nothing has written"):
        run(
            body.replace("and.b32 %r4, %r0, 4", "and.b32 %r4, %r0, 8"),
            tensor_map(x, (4, 32), 1),
            x,
            out,
            shared=16400,
        )


def test_storing_a_box_at_negative_coordinates_is_an_error():
    y = torch.zeros(6, 12, dtype=torch.int32)
    copy = "tensor.2d.global.shared::cta.tile.bulk_group [%q0, {4, -1}], [%r1]"
    body = filled(STORE, copy=copy, last="").replace("<", "").replace(">", "")
    with pytest.raises(ExecutionError, match=r"negative coordinates \[4, -1\]"):
        run(body, tensor_map(y, (8, 4)), y, shared=128)


@pytest.mark.parametrize("to", ("global", "box"))
def test_concurrent_reductions_of_one_place_all_count(to):
    y = torch.arange(48, dtype=torch.int32).reshape(4, 12)
    want = y.clone()
    if to == "box":
        copy = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%q0, {4, 0}], [%r1]"
        want[:, 4:] += 2 * torch.arange(32, dtype=torch.int32).reshape(4, 8)
    else:
        copy = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%q1+64], [%r1], 128"
        want.view(-1)[16:] += 2 * torch.arange(32, dtype=torch.int32)
    body = filled(STORE, last="").replace("<", "").replace(">", "").replace("cp.async.bulk.copy", copy)
    for seed in range(3):
        x = y.clone()
        run(
            body.replace("setp.ne.s32 %p1, %r0, 0", "setp.ge.s32 %p1, %r0, 2"),
            tensor_map(x, (8, 4)),
            x,
            shared=128,
            seed=seed,
        )
        assert torch.equal(x, want)
    with (
        pytest.raises(ptx_emulator.PtxError, match="not modelled")
        if to == "global"
        else pytest.raises(ExecutionError, match="not defined")
    ):
        run(body.replace("add", "inc"), tensor_map(y, (8, 4)), y, shared=128)


@pytest.mark.parametrize(
    "copy",
    (
        "tensor.2d.global.shared::cta.tile.bulk_group [%q0, {8, 4}], [%r1]",
        "global.shared::cta.bulk_group [%q1+48], [%r1], 128",
    ),
)
def test_stores_need_their_fence_wait_and_barrier(copy):
    """A store writes only the part of a box inside the tensor. Without one of the three, it is an error."""
    want = torch.full((6, 12), -1, dtype=torch.int32)
    if copy.startswith("tensor"):
        want[4:, 8:] = torch.arange(32).reshape(4, 8)[:2, :4]
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
            "commit_group;", "commit_group; st.shared.b32 [%r1+32], 7;"
        )
        with pytest.raises(ExecutionError, match="overwritten before a bulk copy|a race"):
            run(early.replace("<", "").replace(">", ""), m, y, shared=128, seed=seed)
