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
import operator
import os
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

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
    whole = Plan(tuple((n,) for n in lengths), "serial")
    margin, unit, shortest, by = MARGIN, "us", GRANULE, f"{source} constants"
    if constants is None:
        if SMs < 1:
            if strategy == "auto":
                rule = "a CPU without stored constants runs serially"
                return replace(whole, prediction=Prediction(None, None, unit, rule))
            SMs = 1
        constants = _tokens(SMs)
        margin, unit, shortest, by = RATIO_MARGIN, "tokens", RATIO_PIECE, f"ratio rule for {SMs} SMs"
    rule = f"{by}, a split must win by {margin:.2f}x"
    costs = _Costs(constants, HV, -(-K // V), strategy == "certified", native, window, crossing)
    serial = costs.total(whole.pieces)
    if strategy == "auto" and serial < margin * costs.bound(lengths):
        return replace(
            whole,
            prediction=Prediction(serial, serial, unit, f"{rule}; no split can: the device is full or idle"),
        )
    best, best_time = whole.pieces, serial / margin if strategy == "auto" else float("inf")
    passes = (constants.forward, constants.summarize, constants.run)
    fits = {min(max(n // HV, 2), MAX_PIECES) for p in passes if p is not None for n, _ in p.chain}
    for pieces in _candidates(
        lengths, shortest, fits, -(-sum(lengths) // window) if native and window else 1
    ):
        # the bound first, for list scheduling is the costly part
        if costs.total(pieces, _even_lane) < best_time and (time := costs.total(pieces)) < best_time:
            best, best_time = pieces, time
    if best == whole.pieces:
        return replace(
            whole, prediction=Prediction(serial, serial, unit, f"{rule}; none of those tried does")
        )
    if strategy == "certified":
        rule = f"{by}; the gates decide what certified decay takes"
        return Plan(best, "certified", Prediction(None, serial, unit, rule))
    return Plan(best, "exact", Prediction(best_time, serial, unit, rule))


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


def _candidates(
    lengths: tuple[int, ...], shortest: int, fits: set[int], windows: int
) -> list[tuple[tuple[int, ...], ...]]:
    """Ways to cut, each once, about 100: every sequence into the same number of pieces; and for each piece length that cuts
    the longest sequence into so many, and each limit in `WHOLE`, every sequence above the limit into the fewest pieces of at
    most that length. Pieces of a sequence are equal but for a granule. `fits` are numbers to try beside `COUNTS`;
    of a call that goes in `windows` each is also tried as a number of pieces a window."""
    counts, longest = sorted({*COUNTS, *fits}), max(lengths, default=0)
    counts = sorted({*counts, *(n * windows for n in counts)})
    sizes = dict.fromkeys(max(shortest, _up(-(-longest // n), GRANULE)) for n in counts)
    by_size = (
        tuple(_cut(n, -(-n // size), GRANULE) if n > limit * size else (n,) for n in lengths)
        for size in sizes
        for limit in WHOLE
    )
    by_count = (tuple(_cut(n, min(count, n // shortest), GRANULE) for n in lengths) for count in counts)
    found = dict.fromkeys([*by_size, *(by_count if len(lengths) > 1 else ())])
    return [pieces for pieces in found if any(len(s) > 1 for s in pieces)]


def _cut(length: int, pieces: int, granule: int) -> tuple[int, ...]:
    """`length` tokens in at most `pieces` pieces, multiples of `granule` but for the last, as equal as that allows."""
    units = -(-length // granule)
    pieces = max(1, min(pieces, units))
    ends = [min(length, units * (i + 1) // pieces * granule) for i in range(pieces)]
    return tuple(b - a for a, b in zip([0, *ends], ends))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def windows(pieces: Sequence[Sequence[int]], tokens: int) -> list[list[tuple[int, int]]]:
    """All pieces as (sequence, length), in order, in groups of at most `tokens` tokens, 0 for one group. A piece that is
    longer than `tokens`, a multiple of `GRANULE`, is cut. Groups are about equal, up to half a piece."""
    flat = [(n, p) for n, s in enumerate(pieces) for p in s]
    total, longest = sum(p for _, p in flat), max((p for _, p in flat), default=0)
    if tokens < 1 or total <= tokens:
        return [flat]
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
        return _even_lane(lengths, heads, lanes)
    ordered = [n for n in sorted(lengths, reverse=True) for _ in range(heads)]
    loads = ordered[:lanes][::-1]  # ascending, hence a heap
    for n in ordered[lanes:]:
        heapq.heapreplace(loads, loads[0] + n)
    return max(loads)


def _even_lane(lengths: Sequence[int], heads: int, lanes: int) -> float:
    """A lower bound of `longest_lane`."""
    return max(max(lengths), sum(lengths) * heads / lanes)


Lane = Callable[[Sequence[int], int, int], float]


def pass_us(p: Pass, lengths: Sequence[int], HV: int, lane: Lane = longest_lane) -> float:
    """The time of a call over sequences of these lengths, at least one; `lane` in place of `longest_lane`."""
    work = sum(lengths) * HV
    lane = _even_lane if p.even and lane is longest_lane else lane
    latency = min(lane(lengths, HV, lanes) * ns for lanes, ns in p.chain)
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

    def total(self, pieces: tuple[tuple[int, ...], ...], lane: Lane = longest_lane) -> float:
        """The time of a plan, with `lane` in place of `longest_lane`."""
        c, split = self.constants, [s for s in pieces if len(s) > 1]
        if not split and not self.crossing:
            return self._call(c.forward, [p for s in pieces for p in s], lane)
        if self.native and not self.vanished and c.summarize is not None and c.run is not None:
            found = windows(pieces, self.window)
            return sum(self._window(c.summarize, c.run, w, lane) for w in found)
        exits = [p for s in split for p in s[:-1]]
        middle = [p for s in split for p in s[1:-1]]
        if self.crossing:
            exits = middle = [p for s in pieces for p in s]
        time = self._call(c.forward, [p for s in pieces for p in s], lane) + self._call(
            c.forward, exits, lane
        )
        if not self.vanished:
            time += self.transitions * self._call(c.forward, middle, lane)
        if len(split) > 1:
            time += c.gather_ns * (sum(exits) + sum(middle)) * self.HV / 1e3
        return time + c.merge_us * (max(map(len, pieces)) - 1)

    def bound(self, lengths: tuple[int, ...]) -> float:
        """Below any split: the calls that it has at least, and all work spread evenly."""
        c, everything = self.constants, [sum(lengths)]
        forward = self._call(c.forward, everything, _no_lane)
        generic = c.forward.call_us + forward
        if not self.native or self.vanished or c.summarize is None or c.run is None:
            return generic
        return self._call(c.summarize, everything, _no_lane) + self._call(c.run, everything, _no_lane)

    def _window(self, summarize: Pass, run: Pass, window: list[tuple[int, int]], lane: Lane) -> float:
        """Of these (sequence, length): a window without a split sequence is a forward call."""
        lengths, counts = [p for _, p in window], Counter(n for n, _ in window)
        if (most := max(counts.values())) == 1 and not self.crossing:
            return self._call(self.constants.forward, lengths, lane)
        merge = self.constants.merge_us * (most - 1)
        return self._call(summarize, lengths, lane) + merge + self._call(run, lengths, lane)

    def _call(self, p: Pass, lengths: list[int], lane: Lane) -> float:
        return pass_us(p, lengths, self.HV, lane) if lengths else 0.0


def _no_lane(lengths: Sequence[int], heads: int, lanes: int) -> float:
    """A lower bound of `_even_lane` however the tokens are cut."""
    return sum(lengths) * heads / lanes


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
