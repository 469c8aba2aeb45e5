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
from typing import Any

from kda_core.contract import ProblemShape
from kda_cute.host import DTYPES, gate_of
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
    chunks = _chunks(shape)
    if shape.options.pin and PINNED_CHUNK in chunks:
        chunks = [PINNED_CHUNK]
    models = [_model(shape, chunk, warpgroups, sms, longest) for chunk in chunks for warpgroups in (1, 2)]
    model, streams = _fastest(models)
    config = PrefillConfig(
        chunk=model.chunk,
        warpgroups=model.warpgroups,
        states=shape.options.return_intermediate_states,
        padded=shape.varlen and shape.options.use_graph,
        **_gate(shape),
    )
    preparers = model.preparers(streams)
    wanted = math.ceil(RECORDS_A_GROUP[config.unbounded] * preparers * groups_of(model.chunk) / streams)
    depth = max(1, min(max(wanted, LEAST_DEPTH), _most_depth(shape, model, streams)))
    return Plan(config, preparers, streams, depth)


@lru_cache(maxsize=1024)
def workspace_bytes(shape: ProblemShape, sms: int = SMS) -> int:
    """Bytes for the plan of a shape, whatever the lengths are that a packed call comes with."""
    if not shape.varlen:
        return plan(shape, sms).workspace_bytes
    group, found = RECORDS_A_GROUP[not shape.options.bounded_gate], 0
    for chunk, warpgroups in CHAIN_NS:
        model = _model(shape, chunk, warpgroups, sms)
        if model.most:
            # What one stream more adds by rounding up is less than what the groups that it displaces have.
            rings = max(math.ceil(group * sms * groups_of(chunk)), model.most * LEAST_DEPTH)
            records = min(rings, model.most * _most_depth(shape, model, model.most))
            found = max(found, layouts.workspace_bytes(records, model.most, chunk))
    return found


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
    candidates = []
    for chunk in _chunks(shape):
        summaries, runs = (
            [_model(shape, chunk, warpgroups, sms, mode=mode) for warpgroups in (1, 2)]
            for mode in ("summarize", "run")
        )
        candidates.append((_fastest(summaries), _fastest(runs)))
    total_ns = lambda pair: sum(model.total_ns(streams) for model, streams in pair)
    (summary, summary_streams), (run, run_streams) = min(candidates, key=total_ns)
    records = summary.items + 1  # and one for items without a slot
    config = PrefillConfig(summary.chunk, summary.warpgroups, mode="summarize", **_gate(shape))
    states = shape.options.return_intermediate_states
    return SegmentPlan(
        Plan(config, summary.preparers(summary_streams), summary_streams, records),
        Plan(PrefillConfig(run.chunk, run.warpgroups, mode="run", states=states), 0, run_streams, records),
    )


def predicted_ns(
    shape: ProblemShape,
    chunk: int,
    warpgroups: int,
    streams: int,
    *,
    sms: int = SMS,
    longest: int | None = None,
    mode: Mode = "whole",
) -> float:
    """Device time of a launch by the model above; ``longest`` as in `plan`."""
    return _model(shape, chunk, warpgroups, sms, longest, mode).total_ns(streams)


def groups_of(chunk: int) -> int:
    """Groups of a CTA that prepares."""
    return THREADS // (2 * chunk)


# ---- the model


@dataclass(frozen=True)
class _Model:
    """The times of one kind of launch of a shape, by the number of streams.

    Attributes:
        chunk, warpgroups, mode: the kind.
        most: the most streams. More would leave no SM to the preparation, or have nothing to do. 0 where a stream has more
            CTAs than there are.
        items: chunks of all value heads.
        longest: chunks of the longest sequence.
        sms: SMs of the device.
        chains: CTAs of a stream.
        item_ns: of a group that prepares, an item; 0 where nothing is prepared.
        chain_ns: of a chain, a chunk.
        least_ns: of all chains together: their records' way through HBM.
    """

    chunk: int
    warpgroups: int
    mode: Mode
    most: int
    items: int
    longest: int
    sms: int
    chains: int
    item_ns: float
    chain_ns: float
    least_ns: float

    def preparers(self, streams: int) -> int:
        """CTAs that prepare: all that the chains leave, but no more than have something to do."""
        return max(1, min(self.sms - streams * self.chains, -(-self.items // groups_of(self.chunk))))

    def width(self, streams: int) -> int:
        """Slots of a stream; at least 1."""
        return max(1, self.longest, -(-self.items // streams))

    def preparation_ns(self, streams: int) -> float:
        """Never falls with the number of streams."""
        if not self.item_ns:
            return self.least_ns
        return max(1.0, self.items / (self.preparers(streams) * groups_of(self.chunk))) * self.item_ns

    def chains_ns(self, streams: int) -> float:
        """Never rises with the number of streams."""
        return self.width(streams) * self.chain_ns

    def total_ns(self, streams: int) -> float:
        return START_NS + self.item_ns + max(self.preparation_ns(streams), self.chains_ns(streams))

    def best(self) -> int:
        """The number of streams that takes the smallest time: of equals the least, which leaves most SMs to the preparation,
        or the most where nothing is prepared. Times of the two roles meet where their maximum is smallest."""
        if not self.item_ns:
            return self.most
        numbers = range(1, self.most + 1)
        meet = bisect_left(numbers, True, key=lambda n: self.preparation_ns(n) >= self.chains_ns(n))
        if meet == 0:
            return 1
        before = self.chains_ns(meet)  # of as many streams, the last number before they meet
        if meet < self.most and self.preparation_ns(meet + 1) < before:
            return meet + 1
        return 1 + bisect_left(numbers, True, hi=meet, key=lambda n: self.chains_ns(n) <= before)


def _model(
    shape: ProblemShape,
    chunk: int,
    warpgroups: int,
    sms: int,
    longest: int | None = None,
    mode: Mode = "whole",
) -> _Model:
    chains = HALVES[mode] // warpgroups
    free = sms if mode == "run" else sms - 1
    slots = layouts.slot_count(shape.B, shape.T, chunk, shape.N if shape.varlen else None)
    item_ns = {"whole": 1.0, "summarize": KEPT, "run": 0.0}[mode] * ITEM_NS[
        chunk, not shape.options.bounded_gate
    ]
    token_ns = {"whole": CHAIN_NS, "summarize": SUMMARY_NS, "run": RUN_NS}[mode][chunk, warpgroups]
    return _Model(
        chunk=chunk,
        warpgroups=warpgroups,
        mode=mode,
        most=min(free // chains, shape.HV * shape.N),
        items=slots * shape.HV,
        longest=-(-slots // max(shape.N, 1)) if longest is None else -(-longest // chunk),
        sms=sms,
        chains=chains,
        item_ns=item_ns,
        chain_ns=chunk * token_ns,
        least_ns=slots * shape.HV * RECORD_NS[chunk] if mode == "run" else 0.0,
    )


def _fastest(models: list[_Model]) -> tuple[_Model, int]:
    """The model with the smallest time, the first of equals, and its number of streams."""
    choices = [(model, model.best()) for model in models if model.most > 0]
    return min(choices, key=lambda choice: choice[0].total_ns(choice[1]))


def _chunks(shape: ProblemShape) -> list[int]:
    """Chunk sizes that serve a shape: those that divide the spacing of its intermediate states."""
    options = shape.options
    return [C for C in CHUNKS if not options.return_intermediate_states or options.chunk_size % C == 0]


def _gate(shape: ProblemShape) -> dict[str, Any]:
    """The fields of `PrefillConfig` that say how g becomes a log decay."""
    return {
        "gate": gate_of(shape),
        "unbounded": not shape.options.bounded_gate,
        "gate_dtype": DTYPES[shape.g_dtype],
    }


def _most_depth(shape: ProblemShape, model: _Model, streams: int) -> int:
    """Records that a stream has; of packed sequences one may be the whole of a head. More in its ring are of no use."""
    return model.items // shape.HV if shape.varlen else model.width(streams)
