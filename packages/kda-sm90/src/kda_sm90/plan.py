"""How a call is served: from a `ProblemShape` to the variant of the kernel, its roles' share of the GPU and the
workspace.

Pure arithmetic on metadata; importing it needs neither a GPU nor the DSL. Of all chunk sizes, warpgroups of a chain,
and numbers of chains (``kernels/schedule.py``) the ones of the smallest predicted time are taken. The model: each
group of the preparation takes a constant time an item, each chain a constant time a token, and both run at the same
time, the chains one item behind. The constants were measured on an H200 (docs/kernels/prefill.md), so that the shapes
that were swept get what was fastest; they choose, they promise nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from kda_core.contract import ProblemShape
from kda_core.cute.calls import DTYPES, gate_of
from kda_sm90 import layouts
from kda_sm90.config import HALVES, THREADS, Mode, PrefillConfig

#: SMs of an H100 SXM and of an H200, a CTA on each.
SMS = 132

#: ns a group of the preparation takes for a chunk, by chunk size, and by whether columns vote: then something between what
#: slow gates and what steep ones take.
ITEM_NS = {(64, False): 13600, (32, False): 10500, (64, True): 14400, (32, True): 11300}

#: ns a token of the chain, by (chunk size, warpgroups), beside groups that prepare, up to 15% above what it takes alone or in
#: a long call, where its start counts for nothing.
CHAIN_NS = {(64, 1): 17.0, (64, 2): 27.5, (32, 1): 25.0, (32, 2): 29.3}

#: The same of the chains of summaries, and of chains over records that are kept, with nothing prepared beside them. Of the
#: latter all together take ns a record, which is the bandwidth of HBM.
SUMMARY_NS = {(64, 1): 12.7, (64, 2): 20.0, (32, 1): 20.0, (32, 2): 25.8}
RUN_NS = {(64, 1): 15.7, (64, 2): 28.2, (32, 1): 19.6, (32, 2): 29.5}
RECORD_NS = {64: 32.0, 32: 11.85}

#: Of ITEM_NS where records are kept: no group waits for room.
KEPT = 0.93

#: ns of a launch before its first item begins and behind its last.
START_NS = 15000

#: Records for which rings have room, to a group of the preparation: what it writes, what it has claimed, and what waits
#: for its chain, which is more where columns vote, because items then differ. With fewer, groups wait for room; with more,
#: records leave the L2 before they are read.
RECORDS_A_GROUP = {False: 2.05, True: 2.2}

#: Records of a stream's ring. With fewer than 3 a chain would wait for one that has no room before it tells that the first
#: was read (``kernels.chain.IN_FLIGHT``).
LEAST_DEPTH = 8

CHUNKS = (64, 32)

#: Chunk size where bits may not depend on the rest of the batch (``pin``), and with it on the prediction.
PINNED_CHUNK = 64


@dataclass(frozen=True)
class Plan:
    """One launch: the ``config`` of its kernel, the CTAs that prepare, and ``streams`` of chunks, a chain each, with
    a ring of ``depth`` records each; or ``depth`` records in all, where they are kept."""

    config: PrefillConfig
    preparers: int
    streams: int
    depth: int

    @property
    def chunk(self) -> int:
        return self.config.chunk

    @property
    def records(self) -> int:
        """For which the workspace has room."""
        return self.depth if self.config.keeps else self.streams * self.depth

    @property
    def workspace_bytes(self) -> int:
        return layouts.workspace_bytes(self.records, self.streams, self.chunk, self.config.halves)


@lru_cache(maxsize=1024)
def plan(shape: ProblemShape, sms: int = SMS, longest: int | None = None) -> Plan:
    """The plan of a shape that is not refused, for a device of ``sms`` SMs (2 at least). The last 1024 are held.

    ``longest``: tokens of the longest packed sequence, where the host knows them; otherwise, and in calls of fixed length, all
    count as equally long. It changes how fast a call is, and nothing that must hold: any plan of a shape serves any lengths,
    within `workspace_bytes`.
    """
    options = shape.options
    states = options.chunk_size if options.return_intermediate_states else 0
    chunks = [C for C in CHUNKS if not states or states % C == 0]
    if options.pin and PINNED_CHUNK in chunks:
        chunks = [PINNED_CHUNK]
    choices = [
        (chunk, warpgroups, _best_streams(shape, chunk, warpgroups, sms, longest))
        for chunk, warpgroups in CHAIN_NS
        if chunk in chunks and _most_streams(shape, warpgroups, sms) > 0
    ]
    predicted = lambda choice: predicted_ns(shape, *choice, sms=sms, longest=longest)
    chunk, warpgroups, streams = min(choices, key=predicted)
    config = PrefillConfig(
        chunk=chunk,
        warpgroups=warpgroups,
        gate=gate_of(shape),
        vote=not options.bounded_gate,
        gate_dtype=DTYPES[shape.g_dtype],
        states=states > 0,
        padded=shape.varlen and options.use_graph,
    )
    preparers = _preparers(shape, chunk, warpgroups, streams, sms)
    wanted = math.ceil(RECORDS_A_GROUP[config.vote] * preparers * groups_of(chunk) / streams)
    depth = max(1, min(max(wanted, LEAST_DEPTH), _most_depth(shape, chunk, streams)))
    return Plan(config, preparers, streams, depth)


@lru_cache(maxsize=1024)
def workspace_bytes(shape: ProblemShape, sms: int = SMS) -> int:
    """Bytes for the plan of a shape, whatever the lengths are that a packed call comes with."""
    if not shape.varlen:
        return plan(shape, sms).workspace_bytes
    group, found = RECORDS_A_GROUP[not shape.options.bounded_gate], 0
    for chunk, warpgroups in CHAIN_NS:
        if streams := _most_streams(shape, warpgroups, sms):
            # What one stream more adds by rounding up is less than what the groups that it displaces have.
            rings = max(math.ceil(group * sms * groups_of(chunk)), streams * LEAST_DEPTH)
            records = min(rings, streams * _most_depth(shape, chunk, streams))
            found = max(found, layouts.workspace_bytes(records, streams, chunk))
    return found


def _best_streams(shape: ProblemShape, chunk: int, warpgroups: int, sms: int, longest: int | None) -> int:
    """The least number of streams of those that take the smallest predicted time. More of them leave less to the preparation,
    whose time never falls, and share what the chains do, whose time never rises; they meet where time is smallest."""
    numbers = range(1, _most_streams(shape, warpgroups, sms) + 1)
    preparation = lambda n: _preparation_ns(shape, chunk, warpgroups, n, sms)
    chain = lambda n: _chain_ns(shape, chunk, warpgroups, n, longest)
    meet = bisect_left(numbers, True, key=lambda n: preparation(n) >= chain(n))
    if meet == 0:
        return 1
    before = chain(meet)  # of as many streams, the last number before they meet
    if meet < len(numbers) and preparation(meet + 1) < before:
        return meet + 1
    return 1 + bisect_left(numbers, True, hi=meet, key=lambda n: chain(n) <= before)


@dataclass(frozen=True)
class SegmentPlan:
    """The two launches of a call whose sequences are cut into segments; they share chunk and records."""

    summarize: Plan
    run: Plan

    @property
    def workspace_bytes(self) -> int:
        return max(self.summarize.workspace_bytes, self.run.workspace_bytes)


@lru_cache(maxsize=1024)
def segment_plan(shape: ProblemShape, sms: int = SMS) -> SegmentPlan:
    """The plan of segments packed along T (N of them), for a device of ``sms`` SMs (4 at least). The last 1024 are held."""
    options = shape.options
    states = options.chunk_size if options.return_intermediate_states else 0
    chunks = [C for C in CHUNKS if not states or states % C == 0]

    def best(chunk: int, of: Mode) -> tuple[float, int, int]:
        found = [
            (segment_ns(shape, of, chunk, warpgroups, streams, sms=sms), warpgroups, streams)
            for warpgroups in (1, 2)
            for streams in range(1, _most_streams(shape, warpgroups, sms, of) + 1)
        ]
        # Of equals, chains that have nothing beside them are best on many SMs, others leave many to the preparation.
        return min(found, key=lambda x: (*x[:2], -x[2] if of == "run" else x[2]))

    chunk = min(chunks, key=lambda C: best(C, "summarize")[0] + best(C, "run")[0])
    records = _items(shape, chunk) + 1  # and one for items without a slot
    plans = []
    for of in ("summarize", "run"):
        _, warpgroups, streams = best(chunk, of)
        gate = {"gate": gate_of(shape), "vote": not options.bounded_gate, "gate_dtype": DTYPES[shape.g_dtype]}
        config = PrefillConfig(
            chunk, warpgroups, mode=of, **(gate if of == "summarize" else {"states": states > 0})
        )
        preparers = _preparers(shape, chunk, warpgroups, streams, sms, of) if of == "summarize" else 0
        plans.append(Plan(config, preparers, streams, records))
    return SegmentPlan(*plans)


def segment_ns(
    shape: ProblemShape, mode: Mode, chunk: int, warpgroups: int, streams: int, *, sms: int = SMS
) -> float:
    """Device time of one of the two launches of a call in segments, by the model above."""
    tokens = _width(shape, chunk, streams) * chunk
    if mode == "run":  # from records in HBM, by all SMs at once or by few
        return START_NS + max(tokens * RUN_NS[chunk, warpgroups], _items(shape, chunk) * RECORD_NS[chunk])
    groups = _preparers(shape, chunk, warpgroups, streams, sms, mode) * groups_of(chunk)
    item = ITEM_NS[chunk, not shape.options.bounded_gate] * KEPT
    preparation = max(1.0, _items(shape, chunk) / groups) * item
    return START_NS + item + max(preparation, tokens * SUMMARY_NS[chunk, warpgroups])


def predicted_ns(
    shape: ProblemShape,
    chunk: int,
    warpgroups: int,
    streams: int,
    *,
    sms: int = SMS,
    longest: int | None = None,
) -> float:
    """Device time by the model above; ``longest`` as in `plan`."""
    preparation = _preparation_ns(shape, chunk, warpgroups, streams, sms)
    chain = _chain_ns(shape, chunk, warpgroups, streams, longest)
    return START_NS + ITEM_NS[chunk, not shape.options.bounded_gate] + max(preparation, chain)


def _preparation_ns(shape: ProblemShape, chunk: int, warpgroups: int, streams: int, sms: int) -> float:
    groups = _preparers(shape, chunk, warpgroups, streams, sms) * groups_of(chunk)
    return max(1.0, _items(shape, chunk) / groups) * ITEM_NS[chunk, not shape.options.bounded_gate]


def _chain_ns(shape: ProblemShape, chunk: int, warpgroups: int, streams: int, longest: int | None) -> float:
    return _width(shape, chunk, streams, longest) * chunk * CHAIN_NS[chunk, warpgroups]


def groups_of(chunk: int) -> int:
    """Groups of a CTA that prepares."""
    return THREADS // (2 * chunk)


def _most_streams(shape: ProblemShape, warpgroups: int, sms: int, mode: Mode = "whole") -> int:
    """More would leave no SM to the preparation, or have nothing to do. 0 where a stream has more CTAs than that."""
    free = sms if mode == "run" else sms - 1
    return min(free // (HALVES[mode] // warpgroups), shape.HV * shape.N)


def _width(shape: ProblemShape, chunk: int, streams: int, longest: int | None = None) -> int:
    """Slots of a stream, packed sequences counted as in `plan`; at least 1."""
    items = _items(shape, chunk)
    own = -(-items // (shape.HV * max(shape.N, 1))) if longest is None else -(-longest // chunk)
    return max(1, own, -(-items // streams))


def _most_depth(shape: ProblemShape, chunk: int, streams: int) -> int:
    """Records that a stream has; of packed sequences one may be the whole of a head. More in its ring are of no use."""
    return _items(shape, chunk) // shape.HV if shape.varlen else _width(shape, chunk, streams)


def _items(shape: ProblemShape, chunk: int) -> int:
    N = shape.N if shape.varlen else None
    return layouts.slot_count(shape.B, shape.T, chunk, N) * shape.HV


def _preparers(
    shape: ProblemShape, chunk: int, warpgroups: int, streams: int, sms: int, mode: Mode = "whole"
) -> int:
    """CTAs that prepare: all that the chains leave, but no more than have something to do."""
    chains = streams * (HALVES[mode] // warpgroups)
    return max(1, min(sms - chains, -(-_items(shape, chunk) // groups_of(chunk))))
