"""Pieces of a call as calls of their own: where they lie, which tensors and shapes a backend gets for them.

A call of B rows of T tokens is treated as packed, [1, B*T, ...], which is the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kda_core import buffers, contract
from kda_core.backend import Backend
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_core.errors import BackendContractError
from kda_cp.plan import Cache, Plan


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + length) of the packed call; number `index` of sequence `sequence`."""

    sequence: int
    index: int
    start: int
    length: int


def layout(plan: Plan) -> list[list[Piece]]:
    """The pieces of each sequence, in order."""
    found, start = [], 0
    for n, lengths in enumerate(plan.pieces):
        starts = accumulate(lengths, initial=start)
        found.append([Piece(n, i, *at) for i, at in enumerate(zip(starts, lengths))])
        start += sum(lengths)
    return found


def exits(pieces: list[list[Piece]]) -> list[Piece]:
    """Pieces whose exit state is needed: of split sequences, all but the last. Longest first where several sequences are
    split, for their tokens are copied together anyway; else as they lie."""
    return _launch_order([s[:-1] for s in pieces if len(s) > 1])


def middles(pieces: list[list[Piece]]) -> list[Piece]:
    """Pieces whose transition is needed: neither first nor last. In the order of `exits`."""
    return _launch_order([s[1:-1] for s in pieces if len(s) > 2])


def _launch_order(groups: list[list[Piece]]) -> list[Piece]:
    flat = [p for group in groups for p in group]
    return flat if len(groups) < 2 else sorted(flat, key=lambda p: -p.length)


# ---- shapes


def run_shape(shape: ProblemShape, pieces: Sequence[Sequence[Piece]], **options: Any) -> ProblemShape:
    """The call that runs these pieces from their true initial states; `options` replace those of the call."""
    lengths = [p.length for s in pieces for p in s]
    return _packed(shape, sum(lengths), len(lengths), needs_backward=False, **options)


def summary_shape(shape: ProblemShape, pieces: Sequence[Piece]) -> ProblemShape:
    """The call that gives exit states, or columns of transitions, of these pieces; states are [K, V]."""
    return _packed(
        shape, sum(p.length for p in pieces), len(pieces),
        output_final_state=True, return_intermediate_states=False, state_v_first=False, needs_backward=False,
    )  # fmt: skip


def _packed(shape: ProblemShape, T: int, N: int, **options: Any) -> ProblemShape:
    options = {"use_graph": False, "max_num_seqs": None} | options
    return replace(
        shape, B=1, T=T, N=N, index_dtype=index_dtype(T), has_initial_state=True,
        options=replace(shape.options, **options),
    )  # fmt: skip


def index_dtype(T: int) -> torch.dtype:
    """Of offsets up to T."""
    return torch.int32 if T < 2**31 else torch.int64


# ---- tensors


def packed(x: Tensor) -> Tensor:
    """x [B, T, ...] as [1, B*T, ...]."""
    return x if x.shape[0] == 1 else x.flatten(0, 1).unsqueeze(0)


def rows(x: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """The tokens of `pieces` of x [B, T, ...], one after the other, [1, sum of lengths, ...]: a view where the pieces lie
    side by side, else a copy."""
    return _rows(x, _spans(pieces))


def _spans(pieces: Sequence[Piece]) -> list[list[int]]:
    """Where tokens of `pieces` begin and end, those of neighbours as one."""
    spans = [[pieces[0].start, pieces[0].start]]
    for p in pieces:
        if p.start == spans[-1][1]:
            spans[-1][1] += p.length
        else:
            spans.append([p.start, p.start + p.length])
    return spans


def _rows(x: Tensor, spans: list[list[int]]) -> Tensor:
    x = packed(x)
    if spans == [[0, x.shape[1]]]:
        return x
    parts = [x[:, a:b] for a, b in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def piece_inputs(
    inputs: KdaInputs,
    pieces: Sequence[Piece],
    shape: ProblemShape,
    initial_state: Tensor,
    offsets: Uploaded | None = None,
    **tensors: Tensor,
) -> KdaInputs:
    """The inputs of a call over `pieces`. `offsets`: of the pieces, if they are on the device. `tensors` replace q, k, v, g or
    beta, which are not copied then."""
    cu_seqlens, host = offsets or upload(*offsets_of(pieces), inputs.q.device)
    spans = _spans(pieces)
    if spans == [[0, inputs.q.shape[1]]] and len(inputs.q) == 1 and not tensors:
        # the tensors of a call are as a backend gets them
        return replace(
            inputs, shape=shape, initial_state=initial_state.contiguous(), cu_seqlens=cu_seqlens, cu_seqlens_cpu=host
        )  # fmt: skip
    names = ("q", "k", "v", "g", "beta")
    own = {n: tensors[n] if n in tensors else _rows(getattr(inputs, n), spans) for n in names}
    return replaced(
        inputs, shape=shape, initial_state=initial_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=host, **own
    )


def offsets_of(pieces: Sequence[Piece]) -> Integers:
    """cu_seqlens of pieces one after the other."""
    ends = tuple(accumulate((p.length for p in pieces), initial=0))
    return ends, index_dtype(ends[-1])


def replaced(inputs: KdaInputs, *, shape: ProblemShape, **tensors: Tensor | None) -> KdaInputs:
    """`inputs` with another shape and other tensors, contiguous and aligned as a backend gets them."""
    mine = [tensors[f.name] if f.name in tensors else getattr(inputs, f.name) for f in fields(inputs)]
    return buffers.make_inputs(mine[:-1], shape)  # the last field is the shape


def aligned(x: Tensor) -> Tensor:
    """`x`, or memory of its shape where it starts off `contract.ALIGNMENT`, as a part of an output may."""
    return x if x.data_ptr() % contract.ALIGNMENT == 0 else torch.empty_like(x)


Integers = tuple[tuple[int, ...], torch.dtype]
Uploaded = tuple[Tensor, Tensor]
_UPLOADED = Cache(512)
# What replays of captured graphs read. Nobody tells when a graph is gone, so it stays as long as the process, once by content.
_captured: dict[Any, tuple[Uploaded, ...]] = {}
_captured_sources: dict[Any, tuple[Tensor, ...]] = {}  # of copies that are part of a graph


def upload(values: Iterable[int], dtype: torch.dtype, device: torch.device) -> Uploaded:
    """Integers [n] on `device` and in host memory, without waiting for the device. Nobody may write to them."""
    return uploads(((tuple(values), dtype),), device)[0]


def uploads(groups: tuple[Integers, ...], device: torch.device) -> tuple[Uploaded, ...]:
    """As `upload`, several at once.

    They are kept by content, device and stream: on another stream the copy may not have happened yet. A capture begins when the
    device has finished, so it takes what any stream has brought; a call that was made before leaves it there. Without one the
    copies become part of the graph: their memory is the graph's, and only what they read has to stay.
    """
    key = (groups, device)
    host = lambda: tuple(_host(values, dtype, device) for values, dtype in groups)
    if device.type != "cuda":
        return _UPLOADED.get(key, lambda: _sent(host(), device))
    if torch.cuda.is_current_stream_capturing():
        found = _captured.get(key) or (_UPLOADED.peek(key) or {}).get(None)
        if found is not None:
            return _captured.setdefault(key, found)
        if key not in _captured_sources:
            _captured_sources[key] = host()
        return _sent(_captured_sources[key], device)
    by_stream: dict[int | None, tuple[Uploaded, ...]] = _UPLOADED.get(key, dict)
    stream = torch.cuda.current_stream(device).cuda_stream
    if (known := by_stream.get(stream)) is None:
        known = by_stream[stream] = _sent(host(), device)
        by_stream.setdefault(None, known)  # for captures: the first, which has had the most time
    return known


def _host(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def _sent(hosts: tuple[Tensor, ...], device: torch.device) -> tuple[Uploaded, ...]:
    return tuple((host.to(device, non_blocking=True), host) for host in hosts)


# ---- calls


class Caller:
    """Calls of one backend that share a workspace, which is large enough for each; None where they need none."""

    def __init__(self, backend: Backend, workspace: Tensor | None) -> None:
        self._backend, self._workspace = backend, workspace

    def __call__(
        self, inputs: KdaInputs, o: Tensor, final_state: Tensor | None, h: Tensor | None = None
    ) -> None:
        outputs = KdaOutputs(o, final_state, h, self._workspace)
        if (returned := self._backend.chunk_fwd(inputs, outputs)) is not outputs:
            raise BackendContractError(
                f"{type(self._backend).__name__}.chunk_fwd returned {type(returned).__name__}, not the outputs it was given"
            )
