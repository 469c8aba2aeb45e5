"""Checks integers that a caller passes. Integers of numpy and of torch are accepted."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex

from kda_core.errors import ArgumentError


def positive_int(name: str, value: SupportsIndex) -> int:
    """Returns `value` as an int.

    Raises:
        ArgumentError: `value` is not an integer of at least 1. The message contains `name`.
    """
    try:
        checked = operator.index(value)
    except TypeError:
        checked = 0
    if checked < 1:
        raise ArgumentError(name, "an integer of at least 1", repr(value))
    return checked


def non_negative_ints(name: str, values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Returns `values` as ints.

    Raises:
        ArgumentError: a value is not an integer of at least 0. The message contains `name`.
    """
    try:
        checked = tuple(map(operator.index, values))
    except TypeError:
        checked = (-1,)
    if min(checked, default=0) < 0:
        raise ArgumentError(name, "integers of at least 0", repr(values))
    return checked
