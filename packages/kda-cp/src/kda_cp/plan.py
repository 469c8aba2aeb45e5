"""Planning: from sequence lengths to pieces and a strategy, by predicted time. Pure Python, no tensors.

Strategies:

=========  ========================================================================================================
serial     the call goes to the backend as it is
exact      summaries of the pieces, their merge, and one packed run of all pieces from their true initial states
certified  as exact, but the transition M of a piece and head is computed only where no certificate shows that it
           has vanished; only on request, for what it gains depends on the gates (`kda_cp.certificate`)
=========  ========================================================================================================

**Prediction.** Calls of the backend take what `kda_cp.constants.Pass` says. Serial is one forward call. A generic split is one
over the pieces that need an exit state (all but the last of a sequence), ceil(K/V) over those that need a transition (neither
first nor last), the merge, and one over all pieces. Over a backend that summarises segments itself it is one `summarize`
over all pieces, the merge, and one `run`; in windows of tokens where its workspace would be too large. A split is chosen where
it is predicted to be `MARGIN` times as fast as serial.

**Ratio rule**, where nobody knows constants of a GPU: time is counted in tokens on the longest lane, one stream an SM,
nothing else costs anything, pieces have at least `RATIO_PIECE` tokens, and the split must win by `RATIO_MARGIN`.

**CPU** without stored constants: serial. A split does more work, and a CPU has no idle lanes to do it in.
"""

from __future__ import annotations

import heapq
import json
import math
import operator
import os
import threading
import weakref
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from kda_core.errors import ArgumentError
from kda_cp.constants import Constants, Pass
from kda_cp.numbers import whole_number, whole_numbers

Strategy = Literal["serial", "exact", "certified"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

GRANULE = 64  # planned cuts are multiples: whole chunks of every kernel, and of intermediate states
COUNTS = (
    *range(2, 13),
    14,
    16,
    18,
    21,
    24,
    28,
    32,
    37,
    42,
    48,
    56,
    64,
)  # pieces of the longest sequence, to try
MAX_PIECES = COUNTS[-1]
WHOLE = (1, 2, 4)  # sequences of at most this many piece lengths may stay whole
MARGIN = 1.10
RATIO_MARGIN = 2.0
RATIO_PIECE = 1024
SEEN = 8  # sequences that a bound looks at
EXACT_LPT = 4096  # streams up to which list scheduling is simulated; above, rounds hardly matter


@dataclass(frozen=True)
class Prediction:
    """What a plan is predicted to cost beside a direct call, and the rule that decided.

    Attributes:
        planned, serial: device time in `unit`, of the plan and of a direct call; None where no time decided, and `planned` of
            a split by certified decay.
        unit: "us", or "tokens" under the ratio rule.
        rule: the deciding rule in words.
    """

    planned: float | None
    serial: float | None
    unit: str
    rule: str

    def __str__(self) -> str:
        if self.planned is None or self.serial is None:
            return self.rule
        return f"predicted {self.planned:.0f} {self.unit}, serial {self.serial:.0f} {self.unit}; {self.rule}"


@dataclass(frozen=True)
class Plan:
    """How one call is executed. Two plans are equal if they do the same; the prediction does not count.

    Attributes:
        pieces: for each sequence the lengths of its pieces in tokens, in order; ``(L,)`` leaves it whole. Cuts may lie
            anywhere.
        strategy: "serial", "exact" or "certified".
        prediction: None for a plan that nobody predicted.

    Raises:
        ArgumentError: a sequence without pieces, a negative piece, an empty one beside others, an unknown strategy, or
            "serial" with a split sequence.
    """

    pieces: tuple[tuple[int, ...], ...]
    strategy: Strategy = "exact"
    prediction: Prediction | None = field(default=None, compare=False)
    _json: str = field(init=False, compare=False, repr=False)  # made once: torch.compile cannot trace json
    _hash: int = field(
        init=False, compare=False, repr=False
    )  # made once: every split call looks up by its plan

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "pieces", tuple(tuple(map(operator.index, s)) for s in self.pieces))
        except TypeError:
            wanted = "for each sequence the whole numbers of tokens of its pieces"
            raise ArgumentError("pieces", wanted, repr(self.pieces)) from None
        if self.strategy not in STRATEGIES:
            raise ArgumentError("strategy", f"one of {STRATEGIES}", repr(self.strategy))
        for n, s in enumerate(self.pieces):
            if not (len(s) == 1 and s[0] >= 0) and not (len(s) > 1 and min(s) > 0):
                raise ArgumentError(f"pieces[{n}]", "one length, or several above 0", repr(s))
        if self.strategy == "serial" and self.is_split:
            raise ArgumentError("strategy", "'exact' or 'certified' for a plan that splits", "'serial'")
        data = {"strategy": self.strategy, "pieces": self.pieces}
        object.__setattr__(self, "_json", json.dumps(data, separators=(",", ":")))
        object.__setattr__(self, "_hash", hash(self.pieces))  # of ints alone: the same in every process

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_split(self) -> bool:
        return any(len(s) > 1 for s in self.pieces)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(sum(s) for s in self.pieces)

    @classmethod
    def uniform(cls, lengths: Sequence[int], pieces: int, strategy: Strategy = "exact") -> Plan:
        """A plan that cuts each sequence into `pieces` pieces of nearly equal length (fewer where it is shorter).

        Raises:
            ArgumentError: `pieces` is no whole number of at least 1, or `lengths` are none of at least 0.
        """
        count = whole_number("pieces", pieces)
        return cls(tuple(_cut(n, count, 1) for n in whole_numbers("lengths", lengths)), strategy)

    def to_json(self) -> str:
        """A text from which `from_json` makes an equal plan."""
        return self._json

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ArgumentError: `text` is no plan.
        """
        try:
            data = json.loads(text)
            pieces, strategy = data["pieces"], data["strategy"]
            return cls(tuple(tuple(s) for s in pieces), strategy)
        except (ValueError, TypeError, KeyError) as error:  # ArgumentError is a ValueError
            raise ArgumentError("context_parallel", "a plan of kda-cp as JSON", str(error)) from error

    def __str__(self) -> str:
        if not self.is_split:
            shape = f"{len(self.pieces)} sequences"
        else:
            kinds = Counter(f"{sum(s)} in {len(s)}" for s in self.pieces if len(s) > 1)
            shape = ", ".join(f"{n}x {k}" if n > 1 else k for k, n in kinds.items())
            if whole := sum(len(s) == 1 for s in self.pieces):
                shape += f", {whole} whole"
        said = "" if self.prediction is None else f"; {self.prediction}"
        return f"{self.strategy} ({shape}){said}"


# ---- choice


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
    window: int = 0,
    crossing: bool = False,
) -> Plan:
    """The plan of the smallest predicted time. H does not matter: all that costs is done a value head.

    Args:
        lengths: tokens of each sequence.
        HV, K, V: value heads and head dimensions.
        constants: of the device, the backend and the dtype; None for the ratio rule.
        source: where the constants come from, for the rule's words.
        SMs: of the GPU, for the ratio rule; 0 for a CPU.
        strategy: "auto" chooses between serial and exact; "exact" and "certified" the best split of that kind, whatever
            serial would take. The latter is the best if every transition has vanished; no time is predicted for it.
        native: whether the backend summarises segments itself, by which exact plans are executed then.
        window: tokens that a window of such a backend may have (`kda_cp.native`); 0 for no limit.
        crossing: whether the sequences are parts of longer ones, which are summarised even if they are whole.

    Returns:
        A plan with its prediction; a serial one where nothing can be cut.

    Raises:
        ArgumentError: lengths that are no whole numbers of at least 0, HV, K or V that are none of at least 1, or another
            strategy.
    """
    lengths = whole_numbers("lengths", lengths)
    HV, K, V = whole_number("HV", HV), whole_number("K", K), whole_number("V", V)
    if strategy not in ("auto", "exact", "certified"):
        raise ArgumentError("strategy", "'auto', 'exact' or 'certified'", repr(strategy))
    margin, unit, shortest, by = MARGIN, "us", GRANULE, f"{source} constants"

    def serially(time: float | None, rule: str) -> Plan:
        return Plan(whole, "serial", Prediction(time, time, unit, rule))

    whole = tuple((n,) for n in lengths)
    if constants is None:
        if SMs < 1:
            if strategy == "auto":
                return serially(None, "a CPU without stored constants runs serially")
            SMs = 1
        constants = _tokens(SMs)
        margin, unit, shortest, by = RATIO_MARGIN, "tokens", RATIO_PIECE, f"ratio rule for {SMs} SMs"
    rule = f"{by}, a split must win by {margin:.2f}x"
    costs = _Costs(constants, HV, -(-K // V), strategy == "certified", native, window, crossing)
    serial = costs.total(whole)
    if strategy == "auto" and serial < margin * costs.bound(lengths):
        return serially(serial, f"{rule}; no split can: the device is full or idle")
    best, time = _best(lengths, shortest, costs, serial / margin if strategy == "auto" else float("inf"))
    if best is None:
        return serially(serial, f"{rule}; none of those tried does")
    if strategy == "certified":
        rule = f"{by}; the gates decide what certified decay takes"
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
    window: int = 0,
) -> Prediction | None:
    """What a plan of any origin is predicted to cost; arguments as in `make_plan`. None for a CPU without constants, and for
    a split by certified decay."""
    unit, HV, K, V = "us", whole_number("HV", HV), whole_number("K", K), whole_number("V", V)
    if constants is None:
        if SMs < 1:
            return None
        constants, unit = _tokens(SMs), "tokens"
    if plan.strategy == "certified" and plan.is_split:
        return None
    costs = _Costs(constants, HV, -(-K // V), False, native, window)
    serial = costs.total(tuple((n,) for n in plan.lengths))
    return Prediction(costs.total(plan.pieces), serial, unit, "no choice was made")


def _tokens(SMs: int) -> Constants:
    """Constants under which a time in us is a number of tokens: those of the ratio rule."""
    one = Pass(((SMs, 1e3),), 0.0, 0.0, 0.0)
    return Constants(one, 0.0, 0.0, one, one)


Pieces = tuple[tuple[int, ...], ...]


def _best(
    lengths: tuple[int, ...], shortest: int, costs: _Costs, limit: float
) -> tuple[Pieces | None, float]:
    """The fastest of the `_ways` to cut and its time, the first of equally fast ones; None if none takes less than `limit`.

    Most are never built: they are visited in the order of a bound, until it exceeds the best time. List scheduling, the costly
    part, comes last.
    """
    best, first, best_pieces = limit, -1, None
    ordered, tokens = sorted(lengths), sum(lengths)
    ways = enumerate(_ways(ordered, tokens, shortest, costs))
    for bound, at, way in sorted((costs.bound_of(ordered, tokens, way), at, way) for at, way in ways):
        if bound > best:
            break
        pieces = way.pieces(lengths)
        if (costs.total(pieces, exact=False), at) < (best, first):
            time = costs.total(pieces)
            if (time, at) < (best, first):
                best, first, best_pieces = time, at, pieces
    return best_pieces, best


class _Way(NamedTuple):
    """A way to cut all sequences of a call.

    Attributes:
        size: tokens of the longest piece, above which nobody cuts; 0 for as many pieces in each sequence.
        above: sequences of at most so many tokens stay whole.
        each: pieces of a sequence at most, where `size` is 0.
        shortest: tokens of a piece at least, but for a granule, where `size` is 0.
    """

    size: int
    above: int
    each: int = 0
    shortest: int = 0

    def number(self, length: int) -> int:
        """Pieces of a sequence, as `_cut` makes them."""
        if self.size:
            return -(-length // self.size) if length > self.above else 1
        return max(1, min(self.each, length // self.shortest))

    def pieces(self, lengths: tuple[int, ...]) -> Pieces:
        if self.size:
            size, above = self.size, self.above
            return tuple([_cut(n, -(-n // size), GRANULE) if n > above else (n,) for n in lengths])
        each, shortest = self.each, self.shortest
        return tuple(
            [_cut(n, min(each, n // shortest), GRANULE) if n >= 2 * shortest else (n,) for n in lengths]
        )


def _ways(ordered: list[int], tokens: int, shortest: int, costs: _Costs) -> list[_Way]:
    """Ways to cut, about 100, each of which splits a sequence: for each piece length that cuts the longest sequence into so
    many, and each limit in `WHOLE`, every sequence above the limit into the fewest pieces of at most that length; and every
    sequence into the same number of pieces. Pieces of a sequence are equal but for a granule. Beside `COUNTS` those are tried
    that fill the lanes of the backend; of a call that goes in windows each is also tried as a number of pieces a window."""
    longest = ordered[-1] if ordered else 0
    windows = max(1, -(-tokens // costs.window)) if costs.native and costs.window else 1
    each = {*COUNTS, *costs.fits}
    counts = sorted({*each, *(n * windows for n in each)})
    found = []
    for size in dict.fromkeys(max(shortest, _up(-(-longest // n), GRANULE)) for n in counts):
        # limits with no length between them leave the same sequences whole
        for whole in dict.fromkeys(bisect_right(ordered, limit * size) for limit in WHOLE):
            if whole < len(ordered):
                found.append(_Way(size, ordered[whole - 1] if whole else 0))
    if len(ordered) > 1 and longest >= 2 * shortest:
        found += [_Way(0, 0, count, shortest) for count in counts]
    return found


def _cut(length: int, pieces: int, granule: int) -> tuple[int, ...]:
    """`length` tokens in at most `pieces` pieces, multiples of `granule` but for the last, as equal as that allows."""
    units = -(-length // granule)
    pieces = max(1, min(pieces, units))
    ends = [units * i // pieces * granule for i in range(pieces)]
    ends.append(length)
    return tuple(map(operator.sub, ends[1:], ends))


def _ends(length: int, pieces: int) -> tuple[int, int]:
    """Where the first and the last but one of `_cut(length, pieces, GRANULE)` end."""
    units = -(-length // GRANULE)
    return units // pieces * GRANULE, units * (pieces - 1) // pieces * GRANULE


def _longest_piece(length: int, pieces: int) -> int:
    """The longest of `_cut(length, pieces, GRANULE)`, for at most as many pieces as granules."""
    units = -(-length // GRANULE)
    some, over = divmod(units, pieces)
    if pieces == 1 or over == 1:  # the last one has the granule that is over, as far as it is full
        return length - units * (pieces - 1) // pieces * GRANULE
    return (some + (over > 0)) * GRANULE


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def windows(pieces: Sequence[Sequence[int]], tokens: int) -> list[list[tuple[int, int]]]:
    """All pieces as (sequence, length), in order, in groups of at most `tokens` tokens, 0 for one group. A piece that is
    longer than `tokens`, a multiple of `GRANULE`, is cut. Groups are about equal, up to half a piece."""
    flat = [(n, p) for n, s in enumerate(pieces) for p in s]
    total, longest = sum(p for _, p in flat), max((p for _, p in flat), default=0)
    if tokens < 1 or total <= tokens:
        return [flat]
    if longest > tokens:
        flat = [(n, part) for n, p in flat for part in _cut(p, -(-p // tokens), GRANULE)]
    even = -(-total // -(-total // tokens))
    limit = max(GRANULE, min(tokens, even + min(longest, tokens) // 2))
    found: list[list[tuple[int, int]]] = [[]]
    room = limit
    for n, p in flat:
        if p > room:
            found.append([])
            room = max(limit, p)
        found[-1].append((n, p))
        room -= p
    return found


# ---- prediction


def longest_lane(lengths: Sequence[int], heads: int, lanes: int) -> float:
    """Tokens on the longest of `lanes` lanes, when each length comes `heads` times and is put, longest first, where least
    is (Graham's LPT list scheduling). Above `EXACT_LPT` streams its lower bound, within one piece of it."""
    streams, longest = len(lengths) * heads, max(lengths)
    if streams <= lanes:
        return longest
    if min(lengths) == longest:
        return -(-streams // lanes) * longest
    if streams > EXACT_LPT:
        return max(longest, sum(lengths) * heads / lanes)
    # streams come in equal groups of `same`, and so do loads: one of each group tells all
    same = math.gcd(heads, lanes)
    heads, lanes = heads // same, lanes // same
    ordered = [n for n in sorted(lengths, reverse=True) for _ in range(heads)]
    loads = ordered[:lanes][::-1]  # ascending, hence a heap
    for n in ordered[lanes:]:
        heapq.heapreplace(loads, loads[0] + n)
    return max(loads)


class _Streams:
    """The streams of one packed call, `HV` of each length: how long its lanes get. What takes time is found once.

    Args:
        lengths: of its sequences.
        tokens, longest: where only these are known, without `lengths`.
    """

    def __init__(self, HV: int, lengths: Sequence[int] = (), tokens: int = 0, longest: int = 0) -> None:
        self.lengths, self.HV = lengths, HV
        self.tokens, self.longest = (sum(lengths), max(lengths)) if lengths else (tokens, longest)
        self._known: dict[tuple[int, bool], float] = {}

    def lane(self, lanes: int, exact: bool) -> float:
        """`longest_lane`, or a lower bound of it."""
        if (lanes, exact) not in self._known:
            found = longest_lane(self.lengths, self.HV, lanes) if exact else self._least(lanes)
            self._known[lanes, exact] = found
        return self._known[lanes, exact]

    def even(self, lanes: int) -> float:
        """The longest stream, or an even share: below any lane."""
        return max(self.longest, self.tokens * self.HV / lanes)

    def _least(self, lanes: int) -> float:
        streams = len(self.lengths) * self.HV
        if not lanes < streams <= EXACT_LPT:
            return self.even(lanes)
        # of the n * lanes + 1 longest streams some lane has n + 1
        ordered = sorted(self.lengths, reverse=True)
        rounds = range(1, -(-streams // lanes))
        return max(self.even(lanes), *((n + 1) * ordered[n * lanes // self.HV] for n in rounds))


def pass_us(p: Pass, lengths: Sequence[int], HV: int) -> float:
    """The time of a call over sequences of these lengths, at least one."""
    return _pass_us(p, _Streams(HV, lengths), True)


def _pass_us(p: Pass, streams: _Streams, exact: bool) -> float:
    work = streams.tokens * streams.HV
    if p.even or not streams.lengths:
        latency = min([streams.even(lanes) * ns for lanes, ns in p.chain])
    else:
        latency = min([streams.lane(lanes, exact) * ns for lanes, ns in p.chain])
    return p.call_us + (p.prepare_ns * work + max(latency, p.work_ns * work)) / 1e3


@dataclass(frozen=True)
class _Costs:
    """The model of the module's docstring, in us, for `HV` value heads; `transitions` calls give all columns of M."""

    constants: Constants
    HV: int
    transitions: int
    vanished: bool  # certified: no transition is computed
    native: bool
    window: int
    crossing: bool = False

    @property
    def segments(self) -> tuple[Pass, Pass] | None:
        """`summarize` and `run`, where splits are executed by them."""
        c = self.constants
        if not self.native or self.vanished or c.summarize is None or c.run is None:
            return None
        return c.summarize, c.run

    @property
    def fits(self) -> set[int]:
        """Numbers of pieces of one sequence that fill the lanes."""
        passes = (self.constants.forward, self.constants.summarize, self.constants.run)
        return {
            min(max(lanes // self.HV, 2), MAX_PIECES) for p in passes if p is not None for lanes, _ in p.chain
        }

    def total(self, pieces: Pieces, exact: bool = True) -> float:
        """The time of a plan, or a lower bound of it that needs no list scheduling."""
        flat, most = [p for s in pieces for p in s], max(map(len, pieces), default=0)
        everything = _Streams(self.HV, flat)
        if most < 2 and not self.crossing:
            return self._call(self.constants.forward, everything, exact)
        if self.segments is None:
            return self._generic(pieces, everything, most, exact)
        if not self.window or everything.tokens <= self.window:
            return self._split(everything, most, exact)
        time = 0.0
        for window in windows(pieces, self.window):
            streams = _Streams(self.HV, [p for _, p in window])
            most = max(Counter(n for n, _ in window).values())
            if most == 1 and not self.crossing:  # a forward call
                time += self._call(self.constants.forward, streams, exact)
            else:
                time += self._split(streams, most, exact)
        return time

    def _generic(self, pieces: Pieces, everything: _Streams, most: int, exact: bool) -> float:
        c, split = self.constants, [s for s in pieces if len(s) > 1]
        if self.crossing:
            exits = middle = everything
        else:
            exits = _Streams(self.HV, [p for s in split for p in s[:-1]])
            middle = _Streams(self.HV, [p for s in split for p in s[1:-1]])
        time = self._call(c.forward, everything, exact) + self._call(c.forward, exits, exact)
        if not self.vanished:
            time += self.transitions * self._call(c.forward, middle, exact)
        if len(split) > 1:
            time += c.gather_ns * (exits.tokens + middle.tokens) * self.HV / 1e3
        return time + c.merge_us * (most - 1)

    def _split(self, streams: _Streams, most: int, exact: bool) -> float:
        """`summarize`, merge and `run`; `most`: pieces of a sequence."""
        assert self.segments is not None
        summarize, run = self.segments
        merge = self.constants.merge_us * (most - 1)
        return _pass_us(summarize, streams, exact) + merge + _pass_us(run, streams, exact)

    def bound(self, lengths: tuple[int, ...]) -> float:
        """Below any split: the calls that it has at least, and all work spread evenly."""
        c, everything = self.constants, _Streams(self.HV, tokens=sum(lengths))
        if self.segments is None:
            return c.forward.call_us + _pass_us(c.forward, everything, False)
        return self._split(everything, 1, False)

    def bound_of(self, ordered: list[int], tokens: int, way: _Way) -> float:
        """Below the time of a way to cut. `ordered`: the lengths, the longest last, of which few are looked at; `tokens`: all."""
        c, longest = self.constants, ordered[-1]
        number = way.number(longest)
        piece = _longest_piece(longest, number)
        everything = _Streams(self.HV, tokens=tokens, longest=max(piece, way.above))
        if self.segments is not None:
            if self.window and tokens > self.window:
                return 0.0
            return self._split(everything, number, False)
        if self.crossing:
            exits = middle = everything
        else:
            exits, middle = _Streams(self.HV), _Streams(self.HV)
            for n in ordered[-SEEN:]:
                if (count := way.number(n)) > 1:
                    first, before_last = _ends(n, count)
                    exits.tokens += before_last
                    middle.tokens += before_last - first
                    exits.longest = max(exits.longest, first)
            middle.longest = exits.longest if middle.tokens else 0
        time = _pass_us(c.forward, everything, False) + _pass_us(c.forward, exits, False)
        if not self.vanished and middle.tokens:
            time += self.transitions * _pass_us(c.forward, middle, False)
        return time + c.merge_us * (number - 1)

    def _call(self, p: Pass, streams: _Streams, exact: bool) -> float:
        return _pass_us(p, streams, exact) if streams.lengths else 0.0


# ---- cache

Value = TypeVar("Value")
_CACHES: weakref.WeakSet[Cache] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for cache in _CACHES:
        cache.after_fork_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Cache:
    """Values by hashable content, the least recently used dropped beyond `size`; safe for threads and forks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._empty()
        _CACHES.add(self)

    def _empty(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def after_fork_in_child(self) -> None:
        """Empties it if another thread was at work on it, for the child does not have that thread."""
        if self._lock.locked():
            self._empty()

    def __len__(self) -> int:
        return len(self._values)

    def peek(self, key: Hashable) -> Any:
        """The value of `key`, or None."""
        with self._lock:
            return self._values.get(key)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of `key`, made outside the lock if it is missing; of two threads that make it one wins."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            found = self._values.setdefault(key, value)
            self._values.move_to_end(key)
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        return found
