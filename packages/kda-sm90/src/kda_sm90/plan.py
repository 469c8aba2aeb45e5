"""How a call is served: from a `ProblemShape` to the variant of the kernel, its roles' share of the GPU and the
workspace.

Pure arithmetic on metadata; importing it needs neither a GPU nor the DSL. Of all chunk sizes, warpgroups of a chain,
and numbers of chains (``kernels/schedule.py``) the ones of the smallest predicted time are taken. The model: each
group of the preparation takes a constant time an item, each chain a constant time a token, and both run at the same
time, the chains one item behind. The constants were measured on an H200, a role at a time (docs/kernels/prefill.md);
they choose, they promise nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from kda_core.contract import ProblemShape
from kda_sm90 import layouts
from kda_sm90.config import HEAD_DIM, THREADS, Gate, GateDtype, PrefillConfig

#: SMs of an H100 SXM and of an H200, a CTA on each.
SMS = 132

#: ns a group of the preparation takes for a chunk, by chunk size, and by whether rows vote: then something between what
#: slow gates and what steep ones take.
ITEM_NS = {(64, False): 14100, (32, False): 11200, (64, True): 15200, (32, True): 12000}

#: ns a token of the chain, by (chunk size, warpgroups).
CHAIN_NS = {(64, 1): 16.5, (64, 2): 28.3, (32, 1): 21.8, (32, 2): 31.1}

#: ns of a launch before its first item begins and behind its last.
START_NS = 15000

#: Records for which rings have room, to a group of the preparation: what it writes, what it has claimed, and what waits
#: for its chain, which is more where rows vote, because items then differ. With fewer, groups wait for room; with more,
#: records leave the L2 before they are read.
RECORDS_A_GROUP = {False: 2.05, True: 2.2}

#: Records of a stream's ring. With fewer than 3 a chain would wait for one that has no room before it tells that the first
#: was read (``kernels.chain.IN_FLIGHT``).
LEAST_DEPTH = 8

CHUNKS = (64, 32)

#: Chunk size where bits may not depend on the rest of the batch (``pin``), and with it on the prediction.
PINNED_CHUNK = 64

_DTYPES: dict[torch.dtype, GateDtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class Plan:
    """One launch: the ``config`` of its kernel, the CTAs that prepare, and ``streams`` of chunks, a chain each, with
    a ring of ``depth`` records each."""

    config: PrefillConfig
    preparers: int
    streams: int
    depth: int

    @property
    def chunk(self) -> int:
        return self.config.chunk

    @property
    def workspace_bytes(self) -> int:
        return layouts.workspace_bytes(self.streams, self.depth, self.chunk)


def refusal(shape: ProblemShape) -> str | None:
    """None, or why no kernel serves this shape."""
    if (shape.K, shape.V) != (HEAD_DIM, HEAD_DIM):
        return f"K={shape.K}, V={shape.V}; only K=V={HEAD_DIM} is built"
    if shape.dtype is not torch.bfloat16:
        return f"q, k, v in {shape.dtype}; only torch.bfloat16 is built"
    for name, dtype in (("g", shape.g_dtype), ("beta", shape.beta_dtype)):
        if dtype not in _DTYPES:
            return f"{name} in {dtype}; only torch.bfloat16 and torch.float32 are built"
    if (shape.B * shape.T + 64 * shape.N) * shape.HV >= 2**31:
        return "2^31 or more tokens, sequences counted as 64, times value heads"
    return None


@lru_cache(maxsize=1024)
def plan(shape: ProblemShape, sms: int = SMS) -> Plan:
    """The plan of a shape that is not refused, for a device of ``sms`` SMs (2 at least). The last 1024 are held."""
    options = shape.options
    states = options.chunk_size if options.return_intermediate_states else 0
    chunks = [C for C in CHUNKS if not states or states % C == 0]
    if options.pin and PINNED_CHUNK in chunks:
        chunks = [PINNED_CHUNK]
    choices = [
        (chunk, warpgroups, streams)
        for chunk, warpgroups in CHAIN_NS
        if chunk in chunks
        for streams in range(1, _most_streams(shape, warpgroups, sms) + 1)
    ]
    chunk, warpgroups, streams = min(choices, key=lambda choice: predicted_ns(shape, *choice, sms=sms))
    config = PrefillConfig(
        chunk=chunk,
        warpgroups=warpgroups,
        gate=_gate(shape),
        vote=not options.bounded_gate,
        gate_dtype=_DTYPES[shape.g_dtype],
        states=states > 0,
    )
    preparers = _preparers(shape, chunk, warpgroups, streams, sms)
    wanted = math.ceil(RECORDS_A_GROUP[config.vote] * preparers * groups_of(chunk) / streams)
    # More than its stream has is of no use; of packed sequences one may be the whole of a head.
    most = _items(shape, chunk) // shape.HV if shape.varlen else _width(shape, chunk, streams)
    depth = max(1, min(max(wanted, LEAST_DEPTH), most))
    return Plan(config, preparers, streams, depth)


def predicted_ns(shape: ProblemShape, chunk: int, warpgroups: int, streams: int, *, sms: int = SMS) -> float:
    """Device time by the model above. Packed sequences count as if they were of one length."""
    groups = _preparers(shape, chunk, warpgroups, streams, sms) * groups_of(chunk)
    item = ITEM_NS[chunk, not shape.options.bounded_gate]
    preparation = max(1.0, _items(shape, chunk) / groups) * item
    chain = _width(shape, chunk, streams) * chunk * CHAIN_NS[chunk, warpgroups]
    return START_NS + item + max(preparation, chain)


def groups_of(chunk: int) -> int:
    """Groups of a CTA that prepares."""
    return THREADS // (2 * chunk)


def _most_streams(shape: ProblemShape, warpgroups: int, sms: int) -> int:
    """More would leave no SM to the preparation, or have nothing to do."""
    return max(1, min((sms - 1) // (2 // warpgroups), shape.HV * shape.N))


def _width(shape: ProblemShape, chunk: int, streams: int) -> int:
    """Slots of a stream, packed sequences counted as above; at least 1."""
    longest = -(-_items(shape, chunk) // (shape.HV * max(shape.N, 1)))
    return max(1, longest, -(-_items(shape, chunk) // streams))


def _items(shape: ProblemShape, chunk: int) -> int:
    N = shape.N if shape.varlen else None
    return layouts.slot_count(shape.B, shape.T, chunk, N) * shape.HV


def _preparers(shape: ProblemShape, chunk: int, warpgroups: int, streams: int, sms: int) -> int:
    """CTAs that prepare: all that the chains leave, but no more than have something to do."""
    return max(1, min(sms - streams * (2 // warpgroups), -(-_items(shape, chunk) // groups_of(chunk))))


def _gate(shape: ProblemShape) -> Gate:
    if not shape.options.use_gate_in_kernel:
        return "precomputed"
    return "softplus" if shape.options.lower_bound is None else "bounded"
