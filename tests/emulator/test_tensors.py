"""Tensor maps and bulk copies of boxes: those that the DSL makes, and boxes of every rank against numpy."""

import itertools

import numpy as np
import pytest
import torch
from dsl_kernels import TILE, compiled_map_tiles
from ptx import run
from tensor_maps import OUT, START, STORE, WAIT, filled, tensor_map

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


def changed(tensor, byte):
    """A map with a bit that is not understood."""
    tensor[8 + byte] |= 0x10
    return tensor


def test_what_is_malformed():
    x, out = torch.zeros(8, 16, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = lambda **values: filled(START + WAIT, **({"bytes": 256, "rank": 2, "corner": "0, 0"} | values))
    run(body(), tensor_map(x, (8, 8)), x, out, shared=16400)
    for text, m, wrong in (
        (body(), changed(tensor_map(x, (8, 8)), 2), "flags 0x140"),
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
