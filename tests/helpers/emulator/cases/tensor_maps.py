"""Tensor maps as the driver encodes them, and boxes that they load."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from helpers.emulator import tensor_maps
from helpers.emulator.cases.registry import Outputs, add
from helpers.emulator.ptx import run
from helpers.emulator.tensor_maps import OUT, START, WAIT, Form, filled, tensor_map


def maps() -> dict[str, Form]:
    """Tensor maps over all types, ranks, swizzles, L2 promotions and fills. Their address belongs to no tensor."""
    place, found = 0x7F12_3456_0000, {}
    sizes = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
    for kind, size in sizes.items():
        found[f"kind {kind}"] = Form(kind, place, (64, 48), (256 * size,), (16, 8))
    extents, strides, box = (100, 7, 9, 11, 13), (256, 2048, 32768, 1 << 20), (8, 1, 2, 3, 4)
    for rank in range(1, 6):
        found[f"rank {rank}"] = Form(9, place, extents[:rank], strides[: rank - 1], box[:rank])
    for swizzle in range(1, 4):
        found[f"swizzle {swizzle}"] = Form(9, place, (64, 48), (256,), (8 << swizzle, 8), swizzle=swizzle)
    for promotion in range(1, 4):
        found[f"promotion {promotion}"] = Form(9, place, (64, 48), (256,), (16, 8), promotion=promotion)
    found["fill with NaN"] = Form(9, place, (64, 48), (256,), (16, 8), fill=1)
    found["large"] = Form(9, place, (1 << 32, 1 << 31), (1 << 39,), (64, 256), swizzle=3)
    return found


def encoded() -> Outputs:
    """The first 64 bytes of each map, the half that the emulator understands. Zeros if the encoder refuses the form."""
    found = {}
    for name, form in maps().items():
        try:
            raw = tensor_maps.encode(form)
        except RuntimeError as error:
            print(f"{name}: {error}")
            raw = bytes(128)
        found[name] = torch.frombuffer(bytearray(raw[:64]), dtype=torch.uint8)
    return found


add("memory", "cuTensorMapEncodeTiled", encoded)


#: Element types of boxes by the driver's numbers.
BOX_OF = {
    0: torch.uint8, 1: torch.int16, 5: torch.int64, 6: torch.float16, 7: torch.float32, 8: torch.float64, 9: torch.bfloat16,
}  # fmt: skip
#: 32 threads write -1 to the words of the box, some of which the copy leaves as gaps.
BLANKED = """
    mov.b32 %r1, shared_bytes; mov.b32 %r3, %r0; mov.b32 %r5, -1; AGAIN: setp.ge.s32 %p3, %r3, <words>; @%p3 bra BLANK;
    mad.lo.s32 %r4, %r3, 4, %r1; st.shared.b32 [%r4], %r5; add.s32 %r3, %r3, 32; bra AGAIN; BLANK: fence.proxy.async.shared::cta;
"""


def loaded_box(
    shape: tuple[int, ...], box: tuple[int, ...], corner: tuple[int, ...], swizzle: int = 0, fill: int = 0, kind: int = 7
) -> Outputs:  # fmt: skip
    """Shared memory after the load of a box whose first element is ``corner``. ``box`` and ``corner`` start with the innermost
    dimension; ``kind``, ``swizzle`` and ``fill`` are those of `Form`. Rows narrower than the swizzle leave gaps."""
    size = torch.zeros((), dtype=BOX_OF[kind]).element_size()
    per = 16 // size
    count = int(np.prod(shape[:-1])) * -(-shape[-1] // per) * per
    x = torch.arange(1, 1 + count).to(BOX_OF[kind]).view(*shape[:-1], -1)[..., : shape[-1]]
    taken = int(np.prod(box)) * size
    held = taken // (box[0] * size) * (16 << swizzle) if swizzle else taken
    out = torch.zeros(held // 4, dtype=torch.float32)
    whole = torch.tensor([], dtype=BOX_OF[kind]).set_(x.untyped_storage())
    at = ", ".join(map(str, corner))
    text = filled(START + WAIT + OUT, bytes=taken, rank=len(box), corner=at, count=held // 4)
    if held > taken:
        text = filled(BLANKED, words=held // 4) + text
    run(text, tensor_map(x, box, swizzle, fill, kind), whole, out, shared=16400)
    return {"box": out}


for shape, extents, corner in (
    ((50,), (16,), (40,)), ((50,), (16,), (-4,)), ((9, 20), (8, 4), (16, 7)), ((9, 20), (8, 4), (-100, 3)),
    ((5, 9, 20), (8, 2, 3), (-4, 8, 1)), ((3, 5, 9, 20), (4, 2, 3, 2), (12, -1, 3, 2)),
    ((2, 3, 5, 9, 20), (4, 2, 3, 2, 2), (20, 0, 0, 0, 0)),
):  # fmt: skip
    add("memory", f"box {extents} of {shape} at {corner}", partial(loaded_box, shape, extents, corner))
for swizzle in range(1, 4):
    add(
        "memory",
        f"box with swizzle {swizzle}",
        partial(loaded_box, (32, 32), (4 << swizzle, 32), (0, 0), swizzle),
    )
    half = partial(loaded_box, (32, 32), (2 << swizzle, 24), (0, 3), swizzle)
    add("memory", f"box with swizzle {swizzle} of half its width", half)
add("memory", "box filled with NaN", partial(loaded_box, (9, 20), (8, 4), (16, 7), fill=1))
for kind, dtype in BOX_OF.items():
    if kind != 7:
        load = partial(loaded_box, (9, 20), (16, 4), (16, 7), fill=int(dtype.is_floating_point), kind=kind)
        add("memory", f"box of {str(dtype)[6:]}", load)
