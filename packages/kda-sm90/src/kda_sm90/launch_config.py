"""Chooses how to launch the kernel for a shape: its variant, the CTAs of each role, the queues, the ring depth.

This module is arithmetic on metadata. Importing it needs neither a GPU nor the DSL.

The choice minimises a predicted time over chunk sizes, warpgroups per chain CTA, and numbers of queues
(``kernels/schedule.py``). The model has two constants per variant: the time of an intra-chunk group per chunk, and the
time of a chain per token. Both roles run at the same time, and the chains lag one chunk behind. The constants were
measured on an H200 (docs/kernels/prefill.md), so the shapes of those sweeps get the fastest launch. The constants affect
speed only: every candidate is correct.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, update_wrapper
from inspect import signature
from typing import Any, Generic, NamedTuple, TypeVar

from kda_core.contract import ProblemShape, besides_tokens
from kda_cute.backward import spacing_of
from kda_cute.host import DTYPES, gate_of
from kda_sm90 import layouts
from kda_sm90.config import (
    CLUSTER,
    HALVES,
    HELP_ABOVE,
    LOCAL_PERIOD,
    SPACINGS,
    Gate,
    Mode,
    PrefillConfig,
    by_warpgroup,
    chains_help,
    groups_of,
)

#: SMs of an H100 SXM and of an H200. A launch puts one CTA on each.
SMS = 132

#: ns per chunk of 64 of an intra-chunk group of the stage of `kda_cute`, by whether gates are unbounded. The value for unbounded gates lies
#: between those of slow gates and those of steep gates.
ITEM_NS = {False: 13600, True: 14400}

#: The same of groups of one or two warpgroups (`config.by_warpgroup`), by chunk size; with softplus gates, between slow and steep ones; and the
#: time for a first chunk, which others hardly delay.
#:
#: The constants of bounded gates, CHAIN_NS, the constants of local records, and CUT_NS were fitted together to a grid of 90 shapes on an H200:
#: 512 to 16384 tokens, 8 to 128 heads, slow gates (docs/kernels/prefill.md). On average the launch that they choose is 0.3% slower than the
#: fastest of the grid. Prefill has become 1 to 3% faster since. The value for softplus gates and chunks of 32 was then lowered from 7400, so
#: that 1024 tokens of 64 heads keep chains of both halves: with it they take 0.064 instead of 0.069 ms (two versions of
#: benchmarks/results/h200/prefill.json, slow softplus gates; the kernels differ too).
WARPGROUP_ITEM_NS = {32: 5900, 64: 9900}
SOFTPLUS_ITEM_NS = {32: 7100, 64: 12000}
WARPGROUP_FIRST_NS = {32: 7100, 64: 9000}
#: How many ns longer a chain needs after the last record of a launch than after the first one, where chains help. The value was fitted to
#: short calls in the mode ``whole``.
WARPGROUP_LAST_NS = 1500
#: How many ns chains that help lag behind those that do not.
HELP_NS = 2200

#: ns per token of a chain, by (chunk size, warpgroups), while intra-chunk CTAs run beside it. A chain that runs alone, or
#: whose start is a small part of a long call, is up to 15% faster.
CHAIN_NS = {(64, 1): 14.5, (64, 2): 24.8, (32, 1): 20.9, (32, 2): 29.1}

#: The same two times where chains have local records (`PrefillConfig.local`).
LOCAL_ITEM_NS = 5750
LOCAL_CHAIN_NS = 35.0

#: How many ns a chain needs between two parts of its queue, in the mode ``whole``. With this value calls of 20 and 36 packed sequences get
#: numbers of queues within 1% of the fastest.
PART_NS = 600

#: How many ns longer a launch takes in the mode ``whole`` if its queues cut sequences: a state passes through memory, and a queue has a part
#: more.
CUT_NS = 6700

#: ns per token of the chains of the modes ``summarize`` and ``execute``. In ``execute`` no intra-chunk CTA runs
#: beside them.
SUMMARIZE_NS = {(64, 1): 12.7, (64, 2): 20.0, (32, 1): 20.0, (32, 2): 25.8}
EXECUTE_NS = {(64, 1): 15.7, (64, 2): 28.2, (32, 1): 19.6, (32, 2): 29.5}

#: ns per token of the chains of a backward, which have chunks of 64. With these values the model chooses the numbers of queues that were
#: fastest with 32 and 64 heads (docs/kernels/backward.md).
REVERSE_NS = {(64, 1): 24.0, (64, 2): 37.5}
RECOMPUTE_NS = {(64, 1): 32.0, (64, 2): 62.0}

#: The same for ``reverse_summarize``, whose chains store nothing for single chunks. Not measured.
REVERSE_SUMMARIZE_NS = {(64, 1): 20.0, (64, 2): 34.0}

TOKEN_NS: dict[Mode, dict[tuple[int, int], float]] = {
    "whole": CHAIN_NS,
    "summarize": SUMMARIZE_NS,
    "execute": EXECUTE_NS,
    "reverse": REVERSE_NS,
    "recompute": RECOMPUTE_NS,
    "reverse_summarize": REVERSE_SUMMARIZE_NS,
}

#: ns per record of all chains together in the mode ``execute``, by chunk size: the bandwidth of HBM.
RECORD_NS = {64: 32.0, 32: 11.85}

#: Factor on ITEM_NS in the mode ``summarize``: every slot has a record of its own, so no group waits for a free one.
KEPT = 0.93

#: ns of a launch before its first item starts and after its last one ends.
START_NS = 15000

#: Records in all rings per intra-chunk group of chunks of 64, by whether gates are unbounded: those that the group writes, those that it has
#: claimed, and those that wait for their chain. Unbounded gates need more because the times of their items differ. With fewer
#: records, groups wait for a free one; with more, records leave the L2 before the chain reads them.
RECORDS_PER_GROUP = {False: 1.2, True: 1.7}
#: The same of groups of one or two warpgroups, by (chunk size, warpgroups of a chain CTA).
RECORDS_PER_WARPGROUP = {(32, 1): 2.75, (32, 2): 2.05, (64, 1): 1.6, (64, 2): 1.6}
#: The same with softplus gates, whose items take different times, and where chains have local records.
SOFTPLUS_RECORDS_PER_WARPGROUP = {(32, 1): 2.55, (32, 2): 2.3, (64, 1): 2.4, (64, 2): 2.4}
LOCAL_RECORDS_PER_WARPGROUP = 3.0
#: Most records of a ring with groups of two warpgroups: with bounded gates, precomputed unbounded gates, and softplus gates. If chains bind,
#: deeper rings fill up, and their records leave the L2.
MOST_DEPTH, UNBOUNDED_MOST_DEPTH, SOFTPLUS_MOST_DEPTH = 16, 18, 28

#: Least number of records of a ring. The chain publishes that it has read record n only after it has requested record n + 2
#: (``kernels.chain.IN_FLIGHT``), so a ring of fewer than 3 records, or 5 places with local records, would deadlock.
LEAST_DEPTH = 8
#: The same for groups of one warpgroup. Calls of 512 to 1024 tokens of 64 heads, with 64 queues, take 3 to 4% less time with 12 or 13 records than
#: with the 9 of `RECORDS_PER_WARPGROUP`.
WARPGROUP_LEAST_DEPTH = 13

#: Records of all rings together in the mode ``recompute``. A ring holds the slot that its chain reads, and of the next slot as many
#: records as this allows. With more, more of them leave the L2 before the chains have read them twice. So a ring of 32 queues has 10
#: records, which was fastest on an H100 (docs/kernels/backward.md).
RING_RECORDS = 320

#: Limits of `_with_shorter_queues`: two predicted times are about equal up to this ratio.
ABOUT_EQUAL = 1.015
#: Queues are clearly shorter if they have at most this share of the slots. 64 queues instead of 61 at 1, 8192, 64 have 0.94.
CLEARLY_SHORTER = 0.95

#: Fewest SMs of a launch beside another one: two clusters, because a whole call needs CTAs of both roles.
LEAST_SHARE = 4
#: Chunk size of inner segments beside a whole call. With chunks of 64, summarize takes 15% longer at 65536 tokens of 8 heads
#: (docs/kernels/segments.md).
INNER_CHUNK = 32
#: Factor on CHAIN_NS of whole calls beside segments. They are long, so their start is a small part.
LONG_CHAIN = 0.95

CHUNKS = (64, 32)

#: (warpgroups, local) of the chains that a launch chooses from, fields of a `PrefillConfig`; the last one only where it has such a variant.
CHAINS = ((1, False), (2, False), (2, True))

#: Chunk size of pinned calls (``pin``), whose bits may depend neither on the rest of the batch nor on a prediction.
PINNED_CHUNK = 64


@dataclass(frozen=True)
class LaunchConfig:
    """One launch of the kernel.

    Attributes:
        config: the kernel variant.
        intra_chunk_ctas: CTAs of the intra-chunk stage.
        queues: queues of slots, one chain each.
        depth: records in the ring of one queue; in the modes ``summarize`` and ``execute``, records of the workspace.
    """

    config: PrefillConfig
    intra_chunk_ctas: int
    queues: int
    depth: int

    @property
    def chunk(self) -> int:
        """Tokens per chunk."""
        return self.config.chunk

    @property
    def records(self) -> int:
        """Records that fit in the workspace."""
        return self.depth if self.config.keeps_records else self.queues * self.depth

    @property
    def workspace_bytes(self) -> int:
        """Size of the workspace in bytes."""
        return layouts.workspace_bytes(self.records, self.queues, self.chunk, self.config.carries)


class _Slots:
    """A shape as the key of a cache: shapes with as many slots are equal, because only the slots of T matter here. In serving nearly
    every call has a new T."""

    __slots__ = ("key", "shape")

    def __init__(self, shape: ProblemShape) -> None:
        N = shape.N if shape.varlen else None
        slots = [layouts.slot_count(shape.B, shape.T, tokens, N) for tokens in (*CHUNKS, max(SPACINGS))]
        self.key, self.shape = (*slots, *besides_tokens(shape)), shape

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Slots) and self.key == other.key


#: Returns the key of a shape, kept because the look-ups of its launch and of its workspace both need it.
_slots = lru_cache(maxsize=64)(_Slots)

_Answer = TypeVar("_Answer")


class _OfSlots(Generic[_Answer]):
    """A function of a shape and other arguments that keeps its last 1024 results by `_Slots`."""

    def __init__(self, compute: Callable[..., _Answer]) -> None:
        update_wrapper(self, compute)
        _, *others = signature(compute).parameters.values()
        self._defaults = [parameter.default for parameter in others]
        self._places = {parameter.name: i for i, parameter in enumerate(others)}
        self._kept = lru_cache(maxsize=1024)(lambda slots, *given: compute(slots.shape, *given))
        self.cache_clear = self._kept.cache_clear

    def __call__(self, shape: ProblemShape, *args: Any, **kwargs: Any) -> _Answer:
        given = [*args, *self._defaults[len(args) :]]  # a default has the same key as its value
        for name, value in kwargs.items():
            given[self._places[name]] = value
        return self._kept(_slots(shape), *given)


@_OfSlots
def launch_config(
    shape: ProblemShape, sms: int = SMS, longest: int | None = None, spacing: int = 0, strided: bool = False
) -> LaunchConfig:
    """Returns the launch with the smallest predicted time.

    Args:
        shape: a shape that the backend serves.
        sms: SMs of the device, at least 2.
        longest: tokens of the longest packed sequence; None if the host does not know them, or if sequences are not
            packed. The model then takes all sequences as equally long. The argument changes the time of a call, and
            without ``pin`` the last bits of its result. Every launch of a shape serves all lengths, within
            `workspace_bytes`.
        spacing: tokens between the states that the call saves for its backward, one of `SPACINGS`; 0 if it saves none. Beside what is
            written it may change the number of queues, and so no bit.
        strided: whether q, k, v, g or beta is not contiguous. It changes nothing else either.
    """
    chunks = _chunks(shape)
    if shape.options.pin and PINNED_CHUNK in chunks:
        chunks = [PINNED_CHUNK]
    choice = _fastest(
        [
            _model(shape, chunk, warpgroups, sms, longest, local=local)
            for chunk in chunks
            for warpgroups, local in CHAINS
            if not local or may_be_local(shape, chunk, warpgroups)
        ]
    )
    written = _written(shape, spacing)
    if any(written.values()) and choice.model.local:
        # The chunk size and the warpgroups, which change bits, are those of a call that writes no states.
        choice = _fastest([_model(shape, choice.model.chunk, choice.model.warpgroups, sms, longest)])
    return _with_rings(
        shape,
        choice,
        **written,
        padded=shape.varlen and shape.options.use_graph,
        serving=shape.pool is not None or strided,
    )


@_OfSlots
def backward_launch_config(
    shape: ProblemShape, sms: int = SMS, longest: int | None = None, mode: Mode = "reverse"
) -> LaunchConfig:
    """Returns the launch of the chains of a backward, which have chunks of 64; arguments as in `launch_config`.

    ``mode``: ``reverse``, ``recompute`` or ``reverse_summarize``.
    """
    models = [_model(shape, 64, warpgroups, sms, longest, mode) for warpgroups in (1, 2)]
    return _with_rings(shape, _fastest(models), states=mode != "reverse_summarize", mode=mode)


def _with_rings(shape: ProblemShape, choice: _Choice, **fields: Any) -> LaunchConfig:
    """Returns the launch of a choice, with a ring of records for each queue. ``fields``: of the `PrefillConfig`."""
    model, queues = choice
    config = _variant(model.chunk, model.warpgroups, local=model.local, **fields, **_gate(shape))
    if config.mode == "recompute" and not shape.varlen:
        queues = _with_shorter_queues(model, queues)
    ctas, most = model.intra_chunk_ctas(queues), _most_depth(shape, model, queues)
    if config.mode == "recompute":
        slot = config.chunks_per_slot
        depth = max(slot, min(RING_RECORDS // queues, min(most, 2) * slot))
    else:
        per_group = records_per_group(config)
        wanted = math.ceil(_numbers(per_group * ctas * config.groups / queues, config.local))
        if config.chunk == 64 and config.by_warpgroup:
            wanted = min(wanted, most_depth(config))
        depth = max(1, min(max(wanted, least_depth(config.chunk, config.by_warpgroup)), most))
    return LaunchConfig(config, ctas, queues, depth)


def may_be_local(shape: ProblemShape, chunk: int, warpgroups: int) -> bool:
    """Returns whether chains of a call have a variant with local records (`PrefillConfig.local`)."""
    return (chunk, warpgroups) == (32, 2) and shape.options.bounded_gate


def records_per_group(config: PrefillConfig) -> float:
    """Returns the records in all rings per intra-chunk group of a variant."""
    if config.local:
        return LOCAL_RECORDS_PER_WARPGROUP
    if not config.by_warpgroup:
        return RECORDS_PER_GROUP[config.unbounded]
    found = SOFTPLUS_RECORDS_PER_WARPGROUP if config.gate == "softplus" else RECORDS_PER_WARPGROUP
    return found[config.chunk, config.warpgroups]


def most_depth(config: PrefillConfig) -> int:
    """Returns `MOST_DEPTH`, `UNBOUNDED_MOST_DEPTH` or `SOFTPLUS_MOST_DEPTH`, by the gates of a variant."""
    if config.gate == "softplus":
        return SOFTPLUS_MOST_DEPTH
    return UNBOUNDED_MOST_DEPTH if config.unbounded else MOST_DEPTH


def least_depth(chunk: int, by_warpgroups: bool) -> int:
    """Returns `LEAST_DEPTH` or `WARPGROUP_LEAST_DEPTH`, by fields of a `PrefillConfig`."""
    return WARPGROUP_LEAST_DEPTH if by_warpgroups and chunk == 32 else LEAST_DEPTH


def _numbers(records: float, local: bool) -> float:
    """Returns how many numbers have as many records that are not local. A ring has a place for each number."""
    return records * LOCAL_PERIOD / (LOCAL_PERIOD - 1) if local else records


@_OfSlots
def workspace_bytes(shape: ProblemShape, sms: int = SMS, mode: Mode = "whole") -> int:
    """Returns the workspace size in bytes that serves a shape, for all lengths of packed sequences. ``mode``: ``whole``, ``reverse``
    or ``recompute``."""
    if not shape.varlen:
        if mode == "whole":
            spacings = {0, spacing_of(shape)}
            return max(launch_config(shape, sms, None, spacing).workspace_bytes for spacing in spacings)
        return backward_launch_config(shape, sms, mode=mode).workspace_bytes
    found = 0
    for chunk, warpgroups in TOKEN_NS[mode]:
        model = _model(shape, chunk, warpgroups, sms, mode=mode)
        if model.most and mode == "recompute":
            # A longer longest sequence leads to no more queues.
            queues = min(model.most, _model(shape, chunk, warpgroups, sms, 1, mode).best() + 1)
            slots = queues * model.chunks_per_slot
            records = max(slots, min(RING_RECORDS, slots * min(2, _most_depth(shape, model, queues))))
            found = max(found, layouts.workspace_bytes(records, queues, chunk, 4))
        elif model.most:
            # Each queue rounds its records up, by less than one. An additional queue displaces intra-chunk groups, which
            # need more records than that. So these totals bound the records for every number of queues.
            local = mode == "whole" and may_be_local(shape, chunk, warpgroups)
            config = _variant(
                chunk, warpgroups, states=mode == "reverse", mode=mode, local=local, **_gate(shape)
            )
            per_cta = records_per_group(config) * model.groups
            least = model.most * least_depth(chunk, config.by_warpgroup)
            rings = max(math.ceil(_numbers(per_cta * sms, local)), least)
            records = min(rings, model.most * _most_depth(shape, model, model.most))
            found = max(found, layouts.workspace_bytes(records, model.most, chunk))
    return found


@dataclass(frozen=True)
class SegmentLaunchConfigs:
    """The two launches of a call in segments. They have the same chunk size and the same records."""

    summarize: LaunchConfig
    execute: LaunchConfig

    @property
    def workspace_bytes(self) -> int:
        """Size in bytes of the workspace, which both launches share."""
        return max(self.summarize.workspace_bytes, self.execute.workspace_bytes)


@_OfSlots
def segment_launch_configs(shape: ProblemShape, sms: int = SMS, spacing: int = 0) -> SegmentLaunchConfigs:
    """Returns the launches for N segments packed along T, on a device of at least 4 SMs; ``spacing`` as in `launch_config`."""
    candidates = []
    for chunk in _chunks(shape):
        summarize, execute = (
            _fastest([_model(shape, chunk, warpgroups, sms, mode=mode) for warpgroups in (1, 2)])
            for mode in ("summarize", "execute")
        )
        candidates.append((summarize, execute))
    summarize, execute = min(candidates, key=lambda both: sum(choice.total_ns for choice in both))
    return SegmentLaunchConfigs(
        summarize=_over_segments(shape, summarize),
        execute=_over_segments(shape, execute, **_written(shape, spacing)),
    )


def _over_segments(shape: ProblemShape, choice: _Choice, **written: Any) -> LaunchConfig:
    """Returns the launch of a choice in the mode ``summarize`` or ``execute``. ``written``: `_written`."""
    model, queues = choice
    gate: dict[str, Any] = {} if model.mode == "execute" else _gate(shape)
    config = PrefillConfig(
        model.chunk, model.warpgroups, mode=model.mode, serving=shape.pool is not None, **gate, **written
    )
    ctas = 0 if config.reads_records else model.intra_chunk_ctas(queues)
    records = model.items + 1  # the last one takes the items of slots without a chunk
    return LaunchConfig(config, ctas, queues, records)


class LaunchConfigsBeside(NamedTuple):
    """Two launches at the same time: a whole call, and one over segments."""

    whole: LaunchConfig
    inner: LaunchConfig


def launch_configs_beside(
    whole: ProblemShape, inner: ProblemShape, mode: Mode, sms: int = SMS, longest: int | None = None
) -> LaunchConfigsBeside:
    """Returns both launches, with as many CTAs together as the device has SMs, so that it can run them at the same time.

    The whole call gets the fewest SMs with which it is no slower than the other launch, or about as fast as with all that it can get.
    ``execute`` has chains of one half only. Chains of both halves would be faster, but take so much bandwidth that both launches take 1.4
    to 1.5 times as long as the whole call alone, instead of 1.15 to 1.3 times (docs/kernels/segments.md).

    Args:
        whole: the whole call.
        inner: the segments, packed along T.
        mode: of the launch over the segments, ``summarize`` or ``execute``. Both modes have the same chunk size.
        sms: SMs of the device, at least 8.
        longest: of the whole call, as in `launch_config`.
    """
    return _beside(_slots(whole), _slots(inner), mode, sms, longest)


def beside_workspace_bytes(
    first: ProblemShape, inner: ProblemShape, last: ProblemShape, sms: int = SMS
) -> tuple[int, int]:
    """Returns the workspace sizes of the whole calls ``first`` and ``last``, for all lengths of packed sequences, and of both launches over
    ``inner``."""
    both: tuple[tuple[ProblemShape, Mode], ...] = ((first, "summarize"), (last, "execute"))
    of_whole = of_inner = 0
    for whole, mode in both:
        if whole.varlen:
            size = workspace_bytes(
                whole, sms
            )  # a launch on a part of the device has fewer queues and fewer records
        else:
            size = launch_configs_beside(whole, inner, mode, sms).whole.workspace_bytes
        of_whole = max(of_whole, size)
        for warpgroups in (1, 2):
            model = _model(inner, INNER_CHUNK, warpgroups, sms - LEAST_SHARE, mode=mode)
            size = layouts.workspace_bytes(model.items + 1, model.most, INNER_CHUNK, HALVES[mode])
            of_inner = max(of_inner, size)
    return of_whole, of_inner


@lru_cache(maxsize=1024)
def _beside(whole: _Slots, inner: _Slots, mode: Mode, sms: int, longest: int | None) -> LaunchConfigsBeside:
    if sms < 2 * LEAST_SHARE:
        raise ValueError(f"sms: expected at least {2 * LEAST_SHARE}, got {sms}")
    written = _written(inner.shape, 0) if mode == "execute" else {}

    shares = range(LEAST_SHARE, sms - LEAST_SHARE + 1, CLUSTER)
    wholes = [_model(whole.shape, chunk, warpgroups, shares[-1], longest) for chunk, warpgroups in CHAIN_NS]
    for model in wholes:
        model.chain_ns *= LONG_CHAIN
    ways = (1,) if mode == "execute" else (1, 2)
    inners = [_model(inner.shape, INNER_CHUNK, n, sms - shares[0], mode=mode) for n in ways]

    of_whole = lambda share: min(model.even_ns(share) for model in wholes)
    of_inner = lambda share: min(model.even_ns(sms - share) for model in inners)
    enough = ABOUT_EQUAL * of_whole(shares[-1])
    # More SMs make the whole call faster, and the other launch slower.
    is_enough = lambda share: of_whole(share) <= max(enough, of_inner(share))
    share = shares[bisect_left(shares, True, hi=len(shares) - 1, key=is_enough)]
    for model in wholes:
        model.move_to(share)
    for model in inners:
        model.move_to(sms - share)
    return LaunchConfigsBeside(
        _with_rings(whole.shape, _fastest(wholes)), _over_segments(inner.shape, _fastest(inners), **written)
    )


def predicted_ns(
    shape: ProblemShape,
    chunk: int,
    warpgroups: int,
    queues: int,
    *,
    sms: int = SMS,
    longest: int | None = None,
    mode: Mode = "whole",
    local: bool = False,
) -> float:
    """Returns the predicted device time of a launch in ns; ``longest`` as in `launch_config`, ``local`` as in `PrefillConfig`."""
    return _model(shape, chunk, warpgroups, sms, longest, mode, local).total_ns(queues)


# ---- the model


@dataclass(slots=True)
class _Model:
    """Predicts the time of one kind of launch of a shape as a function of the number of queues.

    Attributes:
        chunk, warpgroups, mode: the kind of launch.
        groups: `PrefillConfig.groups`.
        helps: `PrefillConfig.helps`.
        chunks_per_slot: `PrefillConfig.chunks_per_slot`.
        local: `PrefillConfig.local`.
        items: slots of all value heads.
        longest: slots of the longest sequence.
        sequences: sequences of all value heads.
        sms: SMs of the device, a multiple of `CLUSTER`: a single SM has no room for a cluster.
        chain_ctas: CTAs per queue.
        item_ns: ns per slot of an intra-chunk group; 0 in the mode ``execute``.
        first_ns: ns until a group has computed its first chunk; 0 in the mode ``execute``.
        last_ns: how many ns longer a chain needs after the last record than after the first one.
        chain_ns: ns per slot of a chain, with its share of `PART_NS`.
        cut_ns: `CUT_NS`; 0 if the sequences may have different lengths, so that the queues of any launch may cut them.
        least_ns: ns that all records together take through HBM; 0 except in the mode ``execute``.
    """

    chunk: int
    warpgroups: int
    mode: Mode
    groups: int
    helps: bool
    chunks_per_slot: int
    local: bool
    items: int
    longest: int
    sequences: int
    sms: int
    chain_ctas: int
    item_ns: float
    first_ns: float
    last_ns: float
    chain_ns: float
    cut_ns: float
    least_ns: float

    @property
    def most(self) -> int:
        """Largest number of queues, which leaves an SM to the intra-chunk stage and gives each queue a sequence. 0 if one chain needs more
        CTAs than the device has."""
        free = self.sms - 1 if self.item_ns else self.sms
        return min(free // self.chain_ctas, self.sequences)

    def move_to(self, sms: int) -> None:
        """Changes the number of SMs."""
        self.sms = sms - sms % CLUSTER

    def intra_chunk_ctas(self, queues: int) -> int:
        """Returns the CTAs of the intra-chunk stage: all that the chains leave, but no more than there are items.

        The first items of all CTAs come before their second ones, so few items do not share SMs."""
        free = self.sms - queues * self.chain_ctas
        return max(1, min(free, self.items * self.chunks_per_slot))

    def width(self, queues: int) -> int:
        """Returns the slots per queue, at least 1."""
        return max(1, self.longest, -(-self.items // queues))

    def intra_chunk_ns(self, queues: int) -> float:
        """Returns the time of the intra-chunk stage in ns. As queues are added, it falls only where chains begin to help."""
        if not self.item_ns:
            return self.least_ns
        groups = self.intra_chunk_ctas(queues) * self.groups
        items = self.items - (self.items // LOCAL_PERIOD if self.local else 0)
        first = self.first_ns * self.chunks_per_slot
        firsts, last_ns = groups, self.last_ns  # first items, each of a group
        if self.helps and items > HELP_ABOVE * groups:
            firsts, last_ns = min(groups + queues * self.chain_ctas * self.groups, items), last_ns + HELP_NS
        return max(first, last_ns + max(0.0, (items - firsts) / groups) * self.item_ns)

    def chains_ns(self, queues: int) -> float:
        """Returns the time of the chains in ns. It never rises as queues are added."""
        return self.width(queues) * self.chain_ns

    def total_ns(self, queues: int) -> float:
        """Returns the time of the launch in ns."""
        cut_ns = self.cut_ns if self.width(queues) % max(1, self.longest) else 0.0
        return START_NS + self.first_ns + max(self.intra_chunk_ns(queues), self.chains_ns(queues)) + cut_ns

    def even_ns(self, sms: int) -> float:
        """Returns about the time of the launch on this number of SMs in ns: as if any number of queues and items were possible. Needs no
        search, unlike `best`."""
        work = self.items * (self.item_ns / self.groups + self.chain_ctas * self.chain_ns)
        return START_NS + self.first_ns + max(work / sms, self.longest * self.chain_ns, self.least_ns)

    def best(self) -> int:
        """Returns the number of queues with the smallest time, the fewest of equals."""
        found = [self._balanced()]
        if self.cut_ns:
            whole = self.width(found[0]) // self.longest  # sequences that fit into a queue
            uncut = (-(-self.items // (n * self.longest)) for n in (whole, whole + 1))
            found += [queues for queues in uncut if queues <= self.most]
        return min(found, key=lambda queues: (self.total_ns(queues), queues))

    def _balanced(self) -> int:
        """Returns the number of queues with the smallest time if cuts cost nothing, the fewest of equals.

        Of equal times it takes the fewest queues, which leaves most SMs to the intra-chunk stage. In the mode ``execute``
        it takes as many as fit. As queues are added, the time of one role rises and that of the other falls, so their
        maximum is smallest where they cross. Where chains begin to help, both fall, and the choice may take up to 3% longer than the best.
        """
        if not self.item_ns:
            return self.most
        # with `cross` queues the chains are slower, with `stop` queues the intra-chunk stage, or there are too many
        cross, stop, step = 0, self.most + 1, 1
        queues = min(max(1, self._crossing()), self.most)
        while stop - cross > 1:
            if self.intra_chunk_ns(queues) < self.chains_ns(queues):
                cross, queues = queues, queues + step
            else:
                stop, queues = queues, queues - step
            step *= 2
            if not cross < queues < stop:
                queues = (cross + stop) // 2
        if cross == 0:
            return 1
        if cross < self.most and self.intra_chunk_ns(cross + 1) < self.chains_ns(cross):
            return cross + 1
        return max(1, -(-self.items // self.width(cross)))  # the fewest queues of this width

    def _crossing(self) -> int:
        """Returns about how many queues make both roles equally slow, if all numbers are taken as continuous: where the search begins."""
        if not self.items:
            return 1
        groups_ns = self.groups * self.chain_ns
        shared = self.sms * groups_ns / (self.item_ns + self.chain_ctas * groups_ns)
        alone = (self.sms - self.items * self.item_ns / (groups_ns * max(1, self.longest))) / self.chain_ctas
        return int(max(shared, alone))


@cache
def _kind(
    chunk: int, warpgroups: int, gate: Gate, unbounded: bool, mode: Mode, local: bool
) -> dict[str, Any]:
    """Returns the fields of a `_Model` that do not depend on the sizes of a shape."""
    reads_records = mode == "execute"
    launch = PrefillConfig(64, warpgroups, states=mode in ("reverse", "recompute"), mode=mode)
    per_slot = launch.chunks_per_slot
    by_warpgroups = by_warpgroup(chunk, mode)
    if by_warpgroups:
        item_ns = (SOFTPLUS_ITEM_NS if gate == "softplus" else WARPGROUP_ITEM_NS)[chunk]
        first_ns = WARPGROUP_FIRST_NS[chunk]
    else:
        item_ns = first_ns = ITEM_NS[unbounded]
    helps = chains_help(chunk, by_warpgroups, local)
    factor = 0.0 if reads_records else KEPT if mode == "summarize" else 1.0
    token_ns = TOKEN_NS[mode][chunk, warpgroups]
    if local:
        item_ns, token_ns = LOCAL_ITEM_NS, LOCAL_CHAIN_NS
    return {
        "chunk": chunk,
        "warpgroups": warpgroups,
        "mode": mode,
        "groups": groups_of(chunk, by_warpgroups),
        "helps": helps,
        "chunks_per_slot": per_slot,
        "local": local,
        "chain_ctas": launch.chain_ctas,
        "item_ns": factor * per_slot * item_ns,
        "first_ns": factor * first_ns,
        "last_ns": WARPGROUP_LAST_NS if helps and mode == "whole" else factor * first_ns * per_slot,
        "chain_ns": chunk * per_slot * token_ns,
    }


def _model(
    shape: ProblemShape,
    chunk: int,
    warpgroups: int,
    sms: int,
    longest: int | None = None,
    mode: Mode = "whole",
    local: bool = False,
) -> _Model:
    kind = _kind(chunk, warpgroups, gate_of(shape), not shape.options.bounded_gate, mode, local)
    reads_records = mode == "execute"
    tokens = chunk * kind["chunks_per_slot"]
    slots = layouts.slot_count(shape.B, shape.T, tokens, shape.N if shape.varlen else None)
    if mode == "whole" and chunk == 32 and shape.varlen and shape.N <= layouts.COMPACT_SEQUENCES:
        slots -= shape.N // 2  # compact, and the last chunk of a sequence is half full on average
    equal_lengths = not shape.varlen and slots > 0
    if mode == "whole" and slots:
        kind = kind | {"chain_ns": kind["chain_ns"] + PART_NS * shape.N / slots}
    return _Model(
        **kind,
        sequences=shape.HV * shape.N,
        items=slots * shape.HV,
        longest=-(-slots // max(shape.N, 1)) if longest is None else -(-longest // tokens),
        cut_ns=CUT_NS if mode == "whole" and equal_lengths else 0.0,
        sms=sms - sms % CLUSTER,
        least_ns=slots * shape.HV * RECORD_NS[chunk] if reads_records else 0.0,
    )


_variant = lru_cache(maxsize=1024)(PrefillConfig)


class _Choice(NamedTuple):
    """A kind of launch and its number of queues."""

    model: _Model
    queues: int

    @property
    def total_ns(self) -> float:
        """The predicted time of the launch in ns."""
        return self.model.total_ns(self.queues)


def _fastest(models: list[_Model]) -> _Choice:
    """Returns the choice with the smallest predicted time, the first of equals. At least one model has `most` > 0."""
    choices = [_Choice(model, model.best()) for model in models if model.most > 0]
    return min(choices, key=lambda choice: choice.total_ns)


def _with_shorter_queues(model: _Model, queues: int) -> int:
    """Returns the number of queues of the mode ``recompute``, by the number that the model prefers.

    The model ignores the L2 and HBM, which limit these chains. Where it predicts that the chains are slower than the intra-chunk stage,
    clearly shorter queues were faster, although it predicts about equal times for both launches (docs/kernels/backward.md).
    """
    width = model.width(queues)
    shorter = -(-model.items // max(1, width - 1))
    if shorter > model.most or model.chains_ns(queues) <= model.intra_chunk_ns(queues):
        return queues
    about_equal = model.total_ns(shorter) <= ABOUT_EQUAL * model.total_ns(queues)
    return shorter if about_equal and model.width(shorter) <= CLEARLY_SHORTER * width else queues


def _chunks(shape: ProblemShape) -> list[int]:
    """Returns the chunk sizes that serve a shape: those that divide the spacing of its intermediate states."""
    options = shape.options
    return [C for C in CHUNKS if not options.return_intermediate_states or options.chunk_size % C == 0]


def _gate(shape: ProblemShape) -> dict[str, Any]:
    """Returns the fields of `PrefillConfig` that describe the gate."""
    return {
        "gate": gate_of(shape),
        "unbounded": not shape.options.bounded_gate,
        "gate_dtype": DTYPES[shape.g_dtype],
    }


def _written(shape: ProblemShape, spacing: int) -> dict[str, Any]:
    """Returns the fields of `PrefillConfig` that say what a forward writes beside o; ``spacing`` as in `launch_config`."""
    dense = spacing == min(SPACINGS)
    return {
        "states": shape.options.return_intermediate_states or dense,
        "residual": dense,
        "saved_states": spacing == max(SPACINGS),
    }


def _most_depth(shape: ProblemShape, model: _Model, queues: int) -> int:
    """Returns the largest useful ring depth: the slots of a queue. A packed sequence may have all the tokens of a head."""
    tokens = model.chunk * model.chunks_per_slot
    return layouts.slot_count(1, shape.T, tokens, shape.N) if shape.varlen else model.width(queues)
