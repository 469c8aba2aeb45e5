"""Whole numbers that a caller gave, as ints; numpy's and torch's count as such."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex

from kda_core.errors import ArgumentError


def whole_number(name: str, given: SupportsIndex) -> int:
    """`given` as an int of at least 1.

    Raises:
        ArgumentError: it is none; the message has `name`.
    """
    try:
        found = operator.index(given)
    except TypeError:
        found = 0
    if found < 1:
        raise ArgumentError(name, "a whole number of at least 1", repr(given))
    return found


def whole_numbers(name: str, given: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """`given` as ints of at least 0.

    Raises:
        ArgumentError: they are none; the message has `name`.
    """
    try:
        found = tuple(map(operator.index, given))
    except TypeError:
        found = (-1,)
    if min(found, default=0) < 0:
        raise ArgumentError(name, "whole numbers of at least 0", repr(given))
    return found
