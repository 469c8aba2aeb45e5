"""Tensor maps that a kernel changes before it uses them."""

import pytest
import torch
from helpers.emulator.ptx import run
from helpers.emulator.tensor_maps import OUT, START, WAIT, filled, tensor_map

import ptx_emulator
from ptx_emulator import ExecutionError

#: A warp copies the map of tensor 0 to shared memory, changes it there, and writes it to tensor 3. %q0 then points to that one.
UPDATE = """
    mov.b32 %r20, shared_bytes; add.s32 %r20, %r20, 16512; mad.lo.s32 %r21, %r0, 4, %r20; mul.wide.u32 %q20, %r0, 4;
    add.s64 %q20, %q20, %q0; ld.global.b32 %r22, [%q20]; st.shared.b32 [%r21], %r22; bar.warp.sync -1; setp.eq.s32 %p9, %r0, 0;
    <changes> bar.warp.sync -1; <copy> <acquire> mov.b64 %q0, %q3;
"""
COPY = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%q3], [%r20], 128;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%q3], 128;"
REPLACE = "@%p9 tensormap.replace.tile.{}.shared::cta.b1024.{} [%r20], {};".format
#: From a map of int16 [4, 4] without a swizzle to one of int32 [8, 16] with boxes of 8 x 8 and a swizzle of 32 bytes.
CHANGES = (
    REPLACE("global_address", "b64", "%q1"), REPLACE("elemtype", "b32", "3"), REPLACE("rank", "b32", "1"),
    REPLACE("global_dim", "b32", "0, 16"), REPLACE("global_dim", "b32", "1, 8"), REPLACE("global_stride", "b64", "0, 64"),
    REPLACE("box_dim", "b32", "0, 8"), REPLACE("box_dim", "b32", "1, 8"), REPLACE("element_stride", "b32", "0, 1"),
    REPLACE("interleave_layout", "b32", "0"), REPLACE("swizzle_mode", "b32", "0"), REPLACE("fill_mode", "b32", "0"),
)  # fmt: skip


def load(changes=CHANGES, copy=COPY, acquire=ACQUIRE, update=UPDATE):
    """The box at (8, 0) of a tensor [8, 16], through a map that the kernel changes."""
    other = torch.zeros(4, 8, dtype=torch.int16)
    x, out, room = (
        torch.arange(128, dtype=torch.int32).view(8, 16),
        torch.zeros(64, dtype=torch.int32),
        tensor_map(other, (8, 4)),
    )
    room.zero_()
    body = filled(update, changes=" ".join(changes), copy=copy, acquire=acquire)
    body += filled(START + WAIT + OUT, bytes=256, rank=2, corner="8, 0", count=64)
    run(body, tensor_map(other, (8, 4), kind=1), x, out, room, shared=16512 + 128)
    return out.view(8, 8), x


def test_a_changed_map_is_used():
    out, x = load()
    assert torch.equal(out, x[:, 8:])


@pytest.mark.parametrize(("words", "wrong"), [(16, None), (15, "nothing has written the whole tensor map")])
def test_the_fields_of_a_map_are_in_its_first_half(words, wrong):
    store = "st.shared.b32 [%r21], %r22;"
    assert store in UPDATE
    part = UPDATE.replace(store, f"setp.lt.u32 %p8, %r0, {words}; @%p8 {store}")
    if wrong:
        with pytest.raises(ExecutionError, match=wrong):
            load(update=part)
        return
    out, x = load(update=part)
    assert torch.equal(out, x[:, 8:])


@pytest.mark.parametrize(
    ("parts", "wrong"),
    [
        ({"acquire": ""}, "no thread of this CTA has executed a fence.proxy.tensormap"), ({"copy": ""}, "not understood|multiples of 16"),
        ({"changes": (*CHANGES, REPLACE("box_dim", "b32", "0, 0"))}, "box_dim: expected 1 to 256"),
        ({"changes": (*CHANGES, REPLACE("global_stride", "b64", "0, 24"))}, "global_stride: expected 0 to .*got 24"),
        ({"changes": (*CHANGES, REPLACE("element_stride", "b32", "0, 2"))}, "element_stride: expected 1 to 1"),
        ({"changes": (*CHANGES, REPLACE("box_dim", "b32", "0, 3"))}, "multiples of 16"),
        ({"changes": (*CHANGES, REPLACE("rank", "b32", "%r99"))}, "the new value is undefined"),
    ],
)  # fmt: skip
def test_misuse_is_an_error(parts, wrong):
    with pytest.raises(ExecutionError, match=wrong):
        load(**parts)


@pytest.mark.parametrize(
    "text",
    (
        REPLACE("swizzle_atomicity", "b32", "0"),
        REPLACE("box_dim", "b32", "5, 1"),
        REPLACE("rank", "b64", "%q1"),
    ),
)
def test_other_fields_are_refused_by_name(text):
    with pytest.raises(ptx_emulator.PtxError, match=r"tensormap\.replace"):
        load(changes=(text,))
