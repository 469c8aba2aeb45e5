"""Tensor maps for the tests, and PTX bodies that load and store boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ptx_emulator import tensors


@dataclass(frozen=True)
class Form:
    """The arguments of `cuTensorMapEncodeTiled`. Type, swizzle, L2 promotion and fill are the driver's numbers. Extents and
    boxes are in elements and start with the innermost dimension; strides are in bytes and leave that dimension out."""

    kind: int
    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    promotion: int = 0
    fill: int = 0


def packed(form: Form) -> bytes:
    """The 128 bytes of a map. Those behind the known half are 0xFF; the emulator ignores them."""
    raw = tensors.encoded(
        form.kind, form.address, form.extents, form.strides, form.box, [1] * len(form.box), 0, form.swizzle,
        form.promotion, form.fill,
    )  # fmt: skip
    return raw[:64].ljust(128, b"\xff")


#: Encodes maps: `packed`, or the driver while fixtures are recorded.
encode: Callable[[Form], bytes] = packed


def tensor_map(
    x: torch.Tensor, box: tuple[int, ...], swizzle: int = 0, fill: int = 0, kind: int = 3
) -> torch.Tensor:
    """The tensor map of ``x``, 128 bytes of uint8. ``box`` starts with the innermost dimension."""
    strides = tuple(s * x.element_size() for s in x.stride()[::-1][1:])
    raw = encode(Form(kind, x.data_ptr(), tuple(x.shape[::-1]), strides, tuple(box), swizzle, fill=fill))
    return map_of(raw)


def map_of(raw: bytes) -> torch.Tensor:
    """The bytes of a tensor map at an address that is a multiple of 64."""
    memory = torch.zeros(192, dtype=torch.uint8)
    place = memory[-memory.data_ptr() % 64 :][:128]
    place.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return place


#: Thread 0 starts the load of a box into shared memory; `WAIT` waits for its mbarrier, `OUT` copies the box to tensor 2.
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
    """The text with each <name> replaced by its value."""
    for name, value in values.items():
        text = text.replace(f"<{name}>", str(value))
    return text


#: A warp writes its lane numbers to shared memory, and thread 0 copies them to global memory. `filled` replaces
#: <copy> and <last>. A test may leave out any other part in <>.
STORE = """
    mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 4, %r1; st.shared.b32 [%r2], %r0; <fence.proxy.async.shared::cta;>
    bar.warp.sync -1; setp.ne.s32 %p1, %r0, 0; @%p1 bra END; cp.async.bulk.<copy>;
    cp.async.bulk.commit_group; <cp.async.bulk.wait_group.read 0;> <last> END:
"""
