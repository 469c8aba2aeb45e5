"""A bounded cache that is safe for threads and for forked processes."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Value = TypeVar("Value")
_CACHES: weakref.WeakSet[Cache] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for cache in _CACHES:
        cache.after_fork_in_child()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Cache:
    """Maps hashable keys to values. Beyond `size` values the least recently used one is dropped."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._clear()
        _CACHES.add(self)

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def after_fork_in_child(self) -> None:
        """Clears the cache if another thread held its lock at the fork: the child does not have that thread."""
        if self._lock.locked():
            self._clear()

    def __len__(self) -> int:
        return len(self._values)

    def peek(self, key: Hashable) -> Any:
        """Returns the value of `key`, or None. The order of use does not change."""
        with self._lock:
            return self._values.get(key)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Returns the value of `key`; calls `make` if it is missing.

        `make` runs without the lock. If two threads make the same value, both get the one that was stored first.
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            kept = self._values.setdefault(key, value)
            self._values.move_to_end(key)
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        return kept
