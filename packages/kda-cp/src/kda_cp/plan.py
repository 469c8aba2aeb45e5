"""A plan as data: how the sequences of one call are split, and its predicted cost.

==========  ====================================================================================================
strategy    execution
==========  ====================================================================================================
serial      one direct call of the backend
exact       summaries of the segments, their merge, and one packed call over all segments from their true
            initial states; with whole ends, the outer segments of a sequence are whole calls beside these
certified   as exact, but without the transitions of which a certificate proves that they have vanished
            (`kda_cp.certificate`). The gain depends on the gates, so only the caller can ask for it
==========  ====================================================================================================
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from kda_core.errors import ArgumentError
from kda_cp.arguments import non_negative_ints, positive_int
from kda_cp.cuts import cut

Strategy = Literal["serial", "exact", "certified"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


@dataclass(frozen=True)
class Prediction:
    """Predicted costs of a plan and of a direct call, and the rule that decided.

    Attributes:
        planned: device time of the plan, in `unit`. None for a split by certified decay, and if the rule predicts no times.
        serial: device time of a direct call, in `unit`. None if the rule predicts no times.
        unit: "us"; "tokens" under the ratio rule.
        rule: a sentence about the rule.
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
    """How one call is split. Plans are equal if their segments and strategies are; predictions are not compared.

    Attributes:
        segments: for each sequence the lengths of its segments in tokens, in order. ``(L,)`` leaves the sequence
            whole. Cuts may be at any token.
        strategy: "serial", "exact" or "certified".
        whole_ends: whether the first and the last segment of the split sequence are whole calls, beside the calls over its inner
            segments (`kda_cp.whole_ends`). Requires the strategy "exact", and exactly one split sequence, with at least three segments.
        prediction: None for a plan without a prediction.

    Raises:
        ArgumentError: `segments` contains anything but integers; a sequence has no segments, a negative segment, or an
            empty segment beside others; the strategy is unknown; it is "serial" and a sequence is split; or `whole_ends` is set
            for other plans than those above.
    """

    segments: tuple[tuple[int, ...], ...]
    strategy: Strategy = "exact"
    prediction: Prediction | None = field(default=None, compare=False)
    whole_ends: bool = False
    # Computed once: torch.compile cannot trace the json module.
    _json: str = field(init=False, compare=False, repr=False)
    # Computed once: every split call looks up its plan in caches.
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        try:
            segments = tuple(tuple(map(operator.index, s)) for s in self.segments)
        except TypeError:
            expected = "a sequence of integers, the tokens of its segments, for each sequence"
            raise ArgumentError("segments", expected, repr(self.segments)) from None
        object.__setattr__(self, "segments", segments)
        if self.strategy not in STRATEGIES:
            raise ArgumentError("strategy", f"one of {STRATEGIES}", repr(self.strategy))
        for n, s in enumerate(self.segments):
            if not (len(s) == 1 and s[0] >= 0) and not (len(s) > 1 and min(s) > 0):
                expected = "one length of at least 0, or several of at least 1"
                raise ArgumentError(f"segments[{n}]", expected, repr(s))
        if self.strategy == "serial" and self.is_split:
            raise ArgumentError("strategy", "'exact' or 'certified' for a plan that splits", "'serial'")
        data: dict[str, object] = {"strategy": self.strategy, "segments": self.segments}
        if self.whole_ends:
            split = [s for s in self.segments if len(s) > 1]
            if self.strategy != "exact" or len(split) != 1 or len(split[0]) < 3:
                expected = (
                    "False, except for an exact plan with one split sequence, of at least three segments"
                )
                raise ArgumentError(
                    "whole_ends", expected, f"True with {self.strategy!r} and {self.segments}"
                )
            data["whole_ends"] = True
        object.__setattr__(self, "_json", json.dumps(data, separators=(",", ":")))
        # Without the strategy: a hash of integers, unlike that of a str, is the same in every process.
        object.__setattr__(self, "_hash", hash(self.segments))

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_split(self) -> bool:
        """Whether a sequence has more than one segment."""
        return any(len(s) > 1 for s in self.segments)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(sum(s) for s in self.segments)

    @classmethod
    def uniform(cls, lengths: Sequence[int], segments: int, strategy: Strategy = "exact") -> Plan:
        """Returns a plan that cuts each sequence into segments of nearly equal length.

        Args:
            lengths: tokens of each sequence.
            segments: segments of a sequence. A sequence of fewer tokens gets one segment per token.
            strategy: as in `Plan`.

        Raises:
            ArgumentError: `segments` is not an integer of at least 1, or a length is not an integer of at least 0.
        """
        count = positive_int("segments", segments)
        return cls(tuple(cut(n, count, 1) for n in non_negative_ints("lengths", lengths)), strategy)

    def to_json(self) -> str:
        """Returns the plan as JSON, without its prediction. `from_json` makes an equal plan from it."""
        return self._json

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that `to_json` wrote.

        Raises:
            ArgumentError: `text` is not the JSON of a plan.
        """
        try:
            data = json.loads(text)
            segments = tuple(tuple(s) for s in data["segments"])
            return cls(segments, data["strategy"], whole_ends=bool(data.get("whole_ends", False)))
        except (ValueError, TypeError, KeyError) as error:  # ArgumentError is a ValueError
            raise ArgumentError("context_parallel", "a plan of kda-cp as JSON", str(error)) from error

    def __str__(self) -> str:
        if not self.is_split:
            text = f"{len(self.segments)} sequences"
        else:
            kinds = Counter(f"{sum(s)} in {len(s)}" for s in self.segments if len(s) > 1)
            text = ", ".join(f"{n}x {kind}" if n > 1 else kind for kind, n in kinds.items())
            if self.whole_ends:
                (split,) = (s for s in self.segments if len(s) > 1)
                text += f" with whole ends of {split[0]} and {split[-1]}"
            if whole := sum(len(s) == 1 for s in self.segments):
                text += f", {whole} whole"
        prediction = "" if self.prediction is None else f"; {self.prediction}"
        return f"{self.strategy} ({text}){prediction}"
