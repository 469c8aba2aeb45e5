"""A cache of recently used entries."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")
_lock = threading.Lock()  # of all caches; held for a few dict operations


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it


if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(after_in_child=_after_fork)


class Recent(Generic[_Value]):
    """A mapping that keeps the most recently used entries, up to a total weight of `limit`. Thread-safe.

    Entries are in two dicts of half the limit each. When the newer dict is full, it replaces the older one, whose entries are
    dropped. A hit in the older dict moves the entry to the newer one. A look-up therefore takes no lock and hashes the key
    once, which an exact order of use would not allow.

    Args:
        limit: upper bound of the total weight.
        weigh: returns the weight of (key, value); 1 by default.
    """

    def __init__(self, limit: int, weigh: Callable[[Any, _Value], int] = lambda key, value: 1) -> None:
        self.limit = limit
        self._weigh = weigh
        self._weight = 0  # of the newer entries
        self._newer: dict[Hashable, _Value] = {}
        self._older: dict[Hashable, _Value] = {}

    def __len__(self) -> int:
        with _lock:
            return len(self._newer.keys() | self._older.keys())

    def get(self, key: Hashable) -> _Value | None:
        """Returns the value of this key, or None.

        Raises:
            TypeError: the key cannot be hashed.
        """
        found = self._newer.get(key)
        if found is None and (found := self._older.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: Hashable, value: _Value) -> None:
        """Stores a value, unless it alone weighs more than half of the limit."""
        weight = self._weigh(key, value)
        if 2 * weight > self.limit:
            return
        with _lock:
            if key in self._newer:
                self._weight -= self._weigh(key, self._newer[key])
            elif 2 * (self._weight + weight) > self.limit:
                self._older, self._newer, self._weight = self._newer, {}, 0
            self._newer[key] = value
            self._weight += weight
