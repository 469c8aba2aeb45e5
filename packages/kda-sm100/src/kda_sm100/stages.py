"""The recurrence over chunks and the output stage as functions, for callers that have their own intra-chunk stage.

The recurrence is the chain of `chunk_kda`, which reads chunk records. This module makes the records from tensors by token in
torch, which takes several passes over memory that `chunk_kda` does not make. Both functions copy ``cu_seqlens`` to the host,
because the number of chunks depends on its values.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.errors import ArgumentError, DeviceError
from kda_cute import arch_of_device, get_kernel
from kda_cute.arguments import pack
from kda_cute.interface import KernelInterface
from kda_cute.records import decay_offset, image_offset
from kda_sm100 import layouts
from kda_sm100.arguments import CHAIN, OUTPUT
from kda_sm100.config import ARCHS, CHUNKS, HEAD_DIM, ChainConfig, OutputConfig


def chunk_gated_delta_rule_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    *,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Runs the recurrence ``v_new = u - w S``, ``S <- diag(e^gk_end) S + k^T v_new`` over the chunks of each sequence.

    The name and the order of the arguments are FLA's.

    Args:
        k: [B, T, HV, 128] bf16, keys; if ``gk`` is given, decayed to the end of their chunk.
        w, u: [B, T, HV, 128] bf16.
        gk: [B, T, HV, 128] fp32, log decays (base e), summed from the start of their chunk. None: no decay.
        initial_state: [N, HV, K, V] fp32, or [N, HV, V, K] with ``state_v_first``. None: zeros.
        output_final_state: whether to return the final states.
        chunk_size: tokens per chunk, 64 or 32.
        cu_seqlens: [N + 1] int32 or int64, bounds of sequences that are packed along T (B = 1). None: N = B.
        state_v_first: whether states are [V, K].

    Returns:
        h [B, NT, HV, K, V] bf16 (or [.., V, K]), the state at the start of each of the NT chunks, sequence by sequence;
        v_new [B, T, HV, 128] bf16; the final states in fp32, or None.

    Raises:
        ArgumentError: a tensor has another shape, dtype, device or alignment, or is not contiguous; ``chunk_size`` is
            neither 64 nor 32; or ``cu_seqlens`` does not ascend within [0, T].
        DeviceError: the tensors are not on a Blackwell GPU.
    """
    lengths = _lengths("k", k, chunk_size, cu_seqlens)
    (B, T, HV, D), C, device = k.shape, chunk_size, k.device
    N, NT = len(lengths), sum(-(-length // C) for length in lengths)
    _check(k, torch.bfloat16, k.shape, w=w, u=u)
    _check(k, torch.float32, k.shape, gk=gk)
    _check(k, torch.float32, (N, HV, D, D), initial_state=initial_state)
    h = torch.empty(B, NT // B, HV, D, D, dtype=torch.bfloat16, device=device)
    v_new = torch.zeros_like(u)
    final = torch.empty(N, HV, D, D, dtype=torch.float32, device=device) if output_final_state else None
    slots = _slots(B, T, C, cu_seqlens, device)

    launch(
        CHAIN,
        ChainConfig(C, states=True),
        v_new,
        offsets=cu_seqlens,
        initial_state=initial_state,
        o=v_new,
        final_state=final,
        states=h,
        workspace=_records(slots, k, w, u, gk, C),
        state_count=NT,
        N=N,
        T=T,
        HV=HV,
        offset_bytes=0 if cu_seqlens is None else cu_seqlens.element_size(),
        v_first=int(state_v_first),
        every=1,
    )
    return h, v_new, final


def chunk_gla_fwd_o_gk(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    A: Tensor,
    h: Tensor,
    scale: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes ``o = scale (q e^g) S + tril(A) v``, where S is the state before the chunk.

    The name and the order of the arguments are FLA's.

    Args:
        q: [B, T, H, 128] bf16. Value head i uses head ``i // (HV // H)``.
        v: [B, T, HV, 128] bf16, v_new.
        g: [B, T, HV, 128] fp32, log decays (base e), summed from the start of their chunk.
        A: [B, T, HV, chunk_size] bf16, products of queries and keys of the same chunk, decayed and scaled.
        h: [B, NT, HV, K, V] bf16, the state before each chunk, sequence by sequence.
        scale: factor of the queries. None: ``128**-0.5``.
        chunk_size, cu_seqlens: as for `chunk_gated_delta_rule_fwd_h`.

    Returns:
        o [B, T, HV, 128] bf16; tokens outside sequences are 0.

    Raises:
        ArgumentError, DeviceError: as for `chunk_gated_delta_rule_fwd_h`.
    """
    lengths = _lengths("v", v, chunk_size, cu_seqlens)
    (B, T, HV, D), C, H = v.shape, chunk_size, q.shape[2] if q.dim() == 4 else 0
    if not 0 < H <= HV or HV % H:
        raise ArgumentError("q", f"[B, T, H, {D}] with H that divides {HV}", str(tuple(q.shape)))
    _check(v, torch.bfloat16, (B, T, H, D), q=q)
    _check(v, torch.float32, v.shape, g=g)
    _check(v, torch.bfloat16, (B, T, HV, C), A=A)
    _check(v, torch.bfloat16, (B, sum(-(-length // C) for length in lengths) // B, HV, D, D), h=h)
    o = torch.zeros_like(v)
    slots = _slots(B, T, C, cu_seqlens, v.device)
    tokens = slots.exist.sum(1)
    number = (tokens > 0).cumsum(0) - 1  # of the state in h
    chunks = torch.stack([slots.tokens[:, 0], tokens, number, torch.zeros_like(number)], 1).int().contiguous()

    launch(
        OUTPUT,
        OutputConfig(C),
        o,
        q=q,
        v_new=v,
        g=g,
        a=A,
        h=h,
        o=o,
        chunks=chunks,
        chunk_count=len(chunks),
        H=H,
        HV=HV,
        scale=D**-0.5 if scale is None else scale,
    )
    return o


def launch(kernel: KernelInterface, config: object, tensor: Tensor, **given: Any) -> None:
    """Launches a kernel on the device of ``tensor`` and on torch's current stream.

    Args:
        kernel, config: kernel and variant.
        tensor: the leading tensor of the kernel.
        given: the values of the kernel's argument struct, as for `kda_cute.arguments.pack`.

    Raises:
        DeviceError: ``tensor`` is not on a Blackwell GPU.
    """
    arch = arch_of_device(tensor.device)
    if arch not in ARCHS:
        raise DeviceError("device", f"a GPU of {' or '.join(ARCHS)}", f"one of {arch}")
    with torch.cuda.device(tensor.device):
        get_kernel(kernel, config, arch)(tensor, *pack(kernel.arguments(config), **given))


class _Slots(NamedTuple):
    """The slots of a head.

    Attributes:
        tokens: [slots, C] int64, index in B*T of each token; 0 if it does not exist.
        exist: [slots, C] bool, whether the token exists.
        last: [slots] int64, index in B*T of the slot's last token; 0 for an empty slot.
    """

    tokens: Tensor
    exist: Tensor
    last: Tensor


def _slots(B: int, T: int, C: int, cu_seqlens: Tensor | None, device: torch.device) -> _Slots:
    slots = layouts.slot_count(B, T, C, None if cu_seqlens is None else len(cu_seqlens) - 1)
    slot = torch.arange(slots, device=device)
    if cu_seqlens is None:
        each = -(-T // C)
        first, end = slot // each * T + slot % each * C, (slot // each + 1) * T
    else:
        starts = cu_seqlens[:-1].long()
        firsts = starts // C + torch.arange(len(starts), device=device)
        n = torch.searchsorted(firsts, slot, right=True) - 1
        first, end = starts[n] + (slot - firsts[n]) * C, cu_seqlens[1:].long()[n]
    tokens = first[:, None] + torch.arange(C, device=device)
    exist = tokens < end[:, None]
    return _Slots(torch.where(exist, tokens, 0), exist, torch.where(exist, tokens, 0).amax(1))


def _records(slots: _Slots, k: Tensor, w: Tensor, u: Tensor, gk: Tensor | None, C: int) -> Tensor:
    """Returns a workspace for the chain, with a record per slot and value head.

    The chain computes o = Qd S + Aqk v_new. In these records Qd is zero and Aqk is the identity, so o is v_new.
    """
    count, device = len(slots.tokens) * k.shape[2], k.device

    def images(x: Tensor) -> Tensor:
        """Returns x [B, T, HV, 128] as images [slots * HV, C * 128]."""
        rows = torch.where(slots.exist[..., None, None], x.flatten(0, 1)[slots.tokens], 0)
        return rows.transpose(1, 2).flatten(2).flatten(0, 1)[:, _order(C, HEAD_DIM, device)]

    decay = torch.ones(count, HEAD_DIM, device=device)
    if gk is not None:
        exists = slots.exist[:, :1, None]
        decay = torch.where(exists, gk.flatten(0, 1)[slots.last].exp(), 1.0).flatten(0, 1)
    place = torch.empty(HEAD_DIM, dtype=torch.long, device=device)
    channel = torch.arange(HEAD_DIM, device=device)
    place[decay_offset(channel)] = channel
    identity = torch.eye(C, dtype=k.dtype, device=device).flatten()[_order(C, C, device)]
    arrays = {
        "w": images(-w),
        "u": images(u),
        "qd": torch.zeros(count, C * HEAD_DIM, dtype=k.dtype, device=device),
        "kg": images(k),
        "aqk": identity.expand(count, -1).contiguous(),
        "a": decay[:, place].contiguous(),
    }
    return torch.cat([arrays[name].view(torch.uint8).flatten() for name in layouts.record_bytes(C)])


@functools.lru_cache(maxsize=8)
def _order(rows: int, columns: int, device: torch.device) -> Tensor:
    """Returns, for each element of an image, the index of its matrix element in [rows, columns], row by row."""
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    order = torch.empty(rows * columns, dtype=torch.long, device=device)
    order[image_offset(row, column, rows, columns).flatten()] = torch.arange(rows * columns, device=device)
    return order


def _lengths(name: str, x: Tensor, chunk_size: int, cu_seqlens: Tensor | None) -> list[int]:
    """Returns the tokens of each sequence. Checks the tensor ``x`` called ``name``, the chunk size and the bounds."""
    if x.dim() != 4 or x.shape[-1] != HEAD_DIM or 0 in x.shape:
        raise ArgumentError(name, f"[B, T, HV, {HEAD_DIM}] without an extent of 0", str(tuple(x.shape)))
    _check(x, torch.bfloat16, x.shape, **{name: x})
    if chunk_size not in CHUNKS:
        raise ArgumentError("chunk_size", f"one of {', '.join(map(str, CHUNKS))}", str(chunk_size))
    B, T = x.shape[:2]
    if cu_seqlens is None:
        return [T] * B
    found = f"{tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ArgumentError("cu_seqlens", "[N + 1] of int32 or int64", found)
    if B != 1 or cu_seqlens.device != x.device:
        raise ArgumentError("cu_seqlens", f"B = 1, and bounds on {x.device}", f"B = {B}, {cu_seqlens.device}")
    bounds = cu_seqlens.tolist()
    if sorted(bounds) != bounds or bounds[0] < 0 or bounds[-1] > T:
        raise ArgumentError("cu_seqlens", f"ascending offsets in [0, T = {T}]", str(bounds))
    return [end - start for start, end in pairwise(bounds)]


def _check(like: Tensor, dtype: torch.dtype, shape: tuple[int, ...], **named: Tensor | None) -> None:
    """Checks the dtype, shape, device and memory of the given tensors; the device is that of ``like``. Skips None."""
    for name, x in named.items():
        if x is None:
            continue
        if x.dtype is not dtype or x.shape != shape or x.device != like.device:
            expected = f"{tuple(shape)} of {dtype} on {like.device}"
            raise ArgumentError(name, expected, f"{tuple(x.shape)} of {x.dtype} on {x.device}")
        if not x.is_contiguous() or x.data_ptr() % 16:
            raise ArgumentError(
                name,
                "a contiguous tensor whose address is a multiple of 16",
                f"strides {x.stride()}, address {x.data_ptr():#x}",
            )
