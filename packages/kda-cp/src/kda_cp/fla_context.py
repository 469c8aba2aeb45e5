"""FLA's context of context parallelism (`fla.ops.cp.FLACPContext`, of its ``build_cp_context``), served by `kda_cp.distributed`.

FLA splits the packed sequences into intervals of equal length: one for each rank, or with its layout "zigzag" two, of which rank r of W
holds numbers r and 2 W - 1 - r. A context has the sequences of its own rank only. So the ranks exchange their sequences once for each context, and
every rank makes the same `FragmentTable` from them.

This module reads attributes of the context and imports nothing of FLA.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from kda_core.errors import ArgumentError
from kda_cp.agreement import RankError, attempt
from kda_cp.distributed import ContextParallel
from kda_cp.fragments import Fragment, FragmentTable

IGNORED = frozenset({"cp_context", "cu_seqlens", "cu_seqlens_cpu", "chunk_size", "max_num_seqs"})
"""Arguments of ``chunk_kda`` that have no effect beside a context: it replaces the offsets, as in FLA, and no chunk is returned."""


class Interval(NamedTuple):
    """An interval of the packed sequences on one rank.

    Attributes:
        lengths: tokens of each sequence in the interval.
        begins_inside: whether its first sequence began in an earlier interval.
        ends_inside: whether its last sequence continues in the next one.
    """

    lengths: tuple[int, ...]
    begins_inside: bool
    ends_inside: bool


def refusal(context: Any) -> str | None:
    """Returns why a context cannot be served, or None. Exchanges nothing."""
    if getattr(context, "group", None) is None:
        return "cp_context without a process group"
    if context.layout not in ("contiguous", "zigzag"):
        return f"cp_context with the layout {context.layout!r}"
    if context.cu_seqlens is None:
        return "cp_context without cu_seqlens"
    return None


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Computes a call of ``chunk_kda`` with `cp_context` on this rank. All ranks call it with the same options.

    Args:
        options: further arguments of ``kda_core.chunk_kda``, without states and intermediate states.

    Returns:
        o and None, as FLA does.

    Raises:
        RankError, KdaError: as `kda_cp.distributed.ContextParallel`; ArgumentError on all ranks if their contexts do not fit.
    """
    given = {name: x for name, x in options.items() if name not in IGNORED}
    if (v_first := given.pop("transpose_state_layout", None)) is not None:
        given["state_v_first"] = v_first
    unserved = ("return_intermediate_states", "use_graph")
    if (name := next((n for n in unserved if given.pop(n, False)), None)) is not None:
        raise ArgumentError(name, "False with cp_context", "True")
    cp = context_parallel(options["cp_context"])
    return cp.chunk_kda(q, k, v, g, beta, **given)[0], None


# ---- one ContextParallel for each context

_known: dict[int, tuple[weakref.ref[Any], ContextParallel]] = {}  # by id: FLA's contexts have no hash


def context_parallel(context: Any) -> ContextParallel:
    """Returns the `ContextParallel` of a context. The first call for a context exchanges data, so all ranks make it together. A context
    must not change afterwards.

    Raises:
        RankError: another rank's context cannot be used, or a rank cannot be reached.
        ArgumentError: the context of this rank cannot be used, or those of the ranks do not fit.
    """
    key = id(context)
    found = _known.get(key)
    if found is not None and found[0]() is context:
        return found[1]
    cp = ContextParallel(context.group, table(gathered(context)), tag="FLA's cp_context")
    _known[key] = weakref.ref(context, lambda _: _known.pop(key, None)), cp
    return cp


def gathered(context: Any) -> list[list[Interval]]:
    """Returns the intervals of all ranks.

    Raises:
        ArgumentError, RankError: as `context_parallel`.
    """
    own, error = attempt(lambda: intervals(context))
    sent = own if error is None else f"{type(error).__name__}: {error}"
    by_rank: list[Any] = [None] * dist.get_world_size(context.group)
    dist.all_gather_object(by_rank, sent, group=context.group)
    if error is not None:
        raise error
    failed = [f"rank {r} failed: {text}" for r, text in enumerate(by_rank) if isinstance(text, str)]
    if failed:
        raise RankError(f"cp_context: {'; '.join(failed)}")
    return by_rank


def intervals(context: Any) -> list[Interval]:
    """Returns the intervals of this rank, in the order of its tokens. Waits for the device if the context has no host offsets.

    Raises:
        ArgumentError: the offsets of the context are not those of its intervals.
    """
    host = context.cu_seqlens if context.cu_seqlens_cpu is None else context.cu_seqlens_cpu
    offsets = host.tolist()
    lengths = tuple(b - a for a, b in pairwise(offsets))
    if not lengths or offsets[0] != 0 or min(lengths) <= 0:
        raise ArgumentError("cp_context.cu_seqlens", "offsets from 0 that increase", str(offsets))
    if context.layout == "contiguous":
        return [Interval(lengths, context.pre_num_ranks > 0, context.post_num_ranks > 0)]
    count = context.front_num_seqs
    parts = lengths[:count], lengths[count:]
    if any(sum(part) != context.part_len for part in parts):
        wanted = f"two parts of {context.part_len} tokens, the first with {count} sequences"
        raise ArgumentError("cp_context.cu_seqlens", wanted, str(offsets))
    sides = zip(parts, context.pre_num_ranks_by_part, context.post_num_ranks_by_part)
    return [Interval(part, before > 0, after > 0) for part, before, after in sides]


def table(by_rank: Sequence[Sequence[Interval]]) -> FragmentTable:
    """Returns the table of the sequences whose intervals the ranks hold: one for each rank, or two in a zigzag.

    Raises:
        ArgumentError: the intervals do not fit together.
    """
    ranks = len(by_rank)
    if len({len(own) for own in by_rank}) != 1:
        raise ArgumentError("cp_context", "the same layout on all ranks", str([len(own) for own in by_rank]))
    chain = [(rank, own[0]) for rank, own in enumerate(by_rank)]
    if len(by_rank[0]) == 2:
        chain += [(rank, by_rank[rank][1]) for rank in reversed(range(ranks))]
    ends = [False, *(interval.ends_inside for _, interval in chain)]
    begins = [*(interval.begins_inside for _, interval in chain), False]
    if begins != ends:
        wanted = "intervals that agree on which sequences continue from one interval to the next"
        raise ArgumentError("cp_context", wanted, f"begins {begins[:-1]}, ends {ends[1:]}")
    totals: list[int] = []
    fragments: list[Fragment] = []
    for rank, interval in chain:
        for i, length in enumerate(interval.lengths):
            if i > 0 or not interval.begins_inside:
                totals.append(0)
            start, sequence = totals[-1], len(totals) - 1
            totals[-1] += length
            if start > 0 and fragments[-1].rank == rank:  # adjacent on the rank, too: the middle of a zigzag
                start = fragments.pop().start
            fragments.append(Fragment(rank, sequence, start, totals[-1]))
    return FragmentTable(tuple(totals), ranks, tuple(fragments))
