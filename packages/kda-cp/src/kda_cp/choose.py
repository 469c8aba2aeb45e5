"""Chooses a plan: compares candidate cuts by predicted time. Pure Python, no tensors.

The rule depends on the known facts about the device:

===============================  ==============================================================================
known                            rule
===============================  ==============================================================================
constants (`kda_cp.constants`)   predict times; a split must be `MARGIN` times as fast as a direct call
only the SMs of a GPU            ratio rule: count the tokens of the busiest lane, one task per SM, no other costs,
                                 segments of at least `RATIO_SEGMENT` tokens; a split must win by `RATIO_MARGIN`
neither (a CPU)                  serial: a split does more work, and a CPU has no idle lanes
===============================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from kda_core.errors import ArgumentError
from kda_cp.arguments import non_negative_ints, positive_int
from kda_cp.constants import Constants, Pass
from kda_cp.cost import CostModel
from kda_cp.cuts import GRANULE, Segments, candidates
from kda_cp.plan import Plan, Prediction
from kda_cp.whole_ends_cost import WholeEndsModel

MARGIN = 1.10
RATIO_MARGIN = 2.0
RATIO_SEGMENT = 1024  # tokens


def make_plan(
    lengths: Sequence[int],
    *,
    HV: int,
    K: int = 128,
    V: int = 128,
    constants: Constants | None = None,
    source: str = "given",
    SMs: int = 0,
    strategy: Literal["auto", "exact", "certified"] = "auto",
    native: bool = False,
    window: int | Callable[[], int] = 0,
    crossing: bool = False,
    granule: int = GRANULE,
    whole_ends: bool = False,
) -> Plan:
    """Returns the plan with the smallest predicted time. H is not an argument: costs are per value head.

    Args:
        lengths: tokens of each sequence.
        HV, K, V: value heads and head dimensions.
        constants: constants of the device, the backend and the dtype; None for the ratio rule.
        source: origin of the constants, for the text of the rule.
        SMs: SMs of the GPU, for the ratio rule; 0 for a CPU.
        strategy: "auto" chooses between serial and exact. "exact" and "certified" return the best split of that kind,
            even if a direct call is faster. A certified split is the fastest one if every transition has vanished. It
            gets no predicted time.
        native: whether the backend summarises segments itself. Exact plans then use its summaries.
        window: tokens of a window of such a backend (`kda_cp.native`); 0 for no limit. Or a function that returns them, because a backend
            takes long to answer: it is only called if a split may be fast enough.
        crossing: whether the sequences are fragments of longer ones. They are then summarised even if they are whole.
        granule: cuts are at multiples of this number of tokens.
        whole_ends: whether the backend can execute a plan with whole ends (`Plan.whole_ends`). Such a plan needs `Constants.beside` and
            one window, and splits the longest sequence.

    Returns:
        A plan with its prediction. It is serial if no sequence can be cut, and with "auto" also if no split is fast enough.

    Raises:
        ArgumentError: a length is not an integer of at least 0; HV, K or V is not an integer of at least 1; or the
            strategy is unknown.
    """
    lengths = non_negative_ints("lengths", lengths)
    HV, K, V = positive_int("HV", HV), positive_int("K", K), positive_int("V", V)
    if strategy not in ("auto", "exact", "certified"):
        raise ArgumentError("strategy", "'auto', 'exact' or 'certified'", repr(strategy))
    margin, unit, shortest, basis = MARGIN, "us", granule, f"{source} constants"

    def serial_plan(time: float | None, rule: str) -> Plan:
        return Plan(whole, "serial", Prediction(time, time, unit, rule))

    whole = tuple((n,) for n in lengths)
    if constants is None:
        if SMs < 1:
            if strategy == "auto":
                return serial_plan(None, "a CPU without stored constants runs serially")
            SMs = 1
        constants = _ratio_constants(SMs)
        margin, unit, shortest, basis = (
            RATIO_MARGIN,
            "tokens",
            max(granule, RATIO_SEGMENT),
            f"ratio rule for {SMs} SMs",
        )
    rule = f"{basis}, a split must win by {margin:.2f}x"
    costs = CostModel(
        constants, HV, transition_calls=-(-K // V), vanished=strategy == "certified", native=native, window=0,
        crossing=crossing, granule=granule,
    )  # fmt: skip
    serial = costs.total(whole)
    limit = serial / margin if strategy == "auto" else float("inf")
    ends = None
    if whole_ends and constants.beside is not None and strategy != "certified":
        ends = WholeEndsModel(constants, HV, granule).best(lengths, limit)
    if strategy == "auto" and ends is None and limit < costs.bound_of_any_split(lengths):
        return serial_plan(serial, f"{rule}; even a split that spreads all work evenly would not")
    # the window changes neither the time of whole sequences nor that bound
    costs = replace(costs, window=window if isinstance(window, int) else window())
    ends = None if costs.window else ends
    best, time = _fastest(lengths, shortest, costs, limit if ends is None else ends[1])
    if best is None and ends is not None:
        segments, time = ends
        return Plan(segments, "exact", Prediction(time, serial, unit, rule), whole_ends=True)
    if best is None:
        return serial_plan(serial, f"{rule}; no candidate does")
    if strategy == "certified":
        rule = f"{basis}; the time of certified decay depends on the gates"
        return Plan(best, "certified", Prediction(None, serial, unit, rule))
    return Plan(best, "exact", Prediction(time, serial, unit, rule))


def predict(
    plan: Plan,
    *,
    HV: int,
    K: int = 128,
    V: int = 128,
    constants: Constants | None = None,
    SMs: int = 0,
    native: bool = False,
    window: int | Callable[[], int] = 0,
) -> Prediction | None:
    """Returns the predicted costs of any plan; arguments as in `make_plan`.

    Returns None for a CPU without constants, for a split by certified decay, and for whole ends whose cost is not known.
    """
    unit, HV, K, V = "us", positive_int("HV", HV), positive_int("K", K), positive_int("V", V)
    if constants is None:
        if SMs < 1:
            return None
        constants, unit = _ratio_constants(SMs), "tokens"
    if plan.strategy == "certified" and plan.is_split:
        return None
    if plan.whole_ends:
        planned = None if constants.beside is None else WholeEndsModel(constants, HV).total(plan.segments)
        if planned is None:
            return None
    tokens = window if isinstance(window, int) else window()
    costs = CostModel(
        constants, HV, transition_calls=-(-K // V), vanished=False, native=native, window=tokens
    )
    serial = costs.total(tuple((n,) for n in plan.lengths))
    if not plan.whole_ends:
        planned = costs.total(plan.segments)
    return Prediction(planned, serial, unit, "no choice was made")


def _ratio_constants(SMs: int) -> Constants:
    """Returns the constants of the ratio rule. A predicted time in us is then a number of tokens, because a token takes 1 us."""
    count = Pass(chain=((SMs, 1e3),), intra_chunk_ns=0.0, work_ns=0.0, call_us=0.0)
    return Constants(forward=count, merge_us=0.0, gather_ns=0.0, summarize=count, execute=count)


def _fastest(
    lengths: tuple[int, ...], shortest: int, costs: CostModel, limit: float
) -> tuple[Segments | None, float]:
    """Returns the fastest of the `candidates` and its time; None if none takes less than `limit`.

    Of equally fast candidates the first wins. The search visits candidates in the order of their lower bounds and stops
    where the bound exceeds the best time, so it never builds most of them. For each one it first computes a bound without
    list scheduling, which is the slow part.
    """
    if limit <= costs.bound_of_any_split(lengths):  # as where whole ends are much faster
        return None, limit
    best, first, best_segments = limit, -1, None
    ordered, tokens = sorted(lengths), sum(lengths)
    windows = max(1, -(-tokens // costs.window)) if costs.native and costs.window else 1
    cuts = enumerate(candidates(ordered, shortest, costs.filling_counts, windows, costs.granule))
    for bound, at, cut in sorted((costs.bound(ordered, tokens, cut), at, cut) for at, cut in cuts):
        if bound > best:
            break
        segments = cut.segments(lengths)
        if (costs.total(segments, exact=False), at) < (best, first):
            time = costs.total(segments)
            if (time, at) < (best, first):
                best, first, best_segments = time, at, segments
    return best_segments, best
