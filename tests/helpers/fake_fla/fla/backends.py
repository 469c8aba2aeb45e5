"""FLA's choice among the implementations of a function: registries by function and by operation, with FLA's names."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

registries: dict[Any, list[BaseBackend]] = {}
"""Backends by the function without decorators, or by the name of an operation."""


class BaseBackend:
    """An implementation, with a verifier for each function."""

    backend_type = "base"
    env_var: str | None = None
    priority = 5

    def is_enabled(self) -> bool:
        return self.env_var is None or os.environ.get(self.env_var, "1") != "0"


def register(entry_point: Any) -> Callable[[type[BaseBackend]], type[BaseBackend]]:
    """Registers a class of `BaseBackend`, in place of one of the same type."""
    key = entry_point if isinstance(entry_point, str) else inspect.unwrap(entry_point)

    def decorate(cls: type[BaseBackend]) -> type[BaseBackend]:
        others = [b for b in registries[key] if b.backend_type != cls.backend_type]
        registries[key] = sorted([*others, cls()], key=lambda b: b.priority)
        return cls

    return decorate


def dispatch(entry_point: Any) -> Any:
    """Decorates a function, or returns the decorator of an operation. Without an implementation that accepts the call it raises: this
    package has no kernels, and kda-core must not come here by itself."""
    if isinstance(entry_point, str):
        registries.setdefault(entry_point, [])
        return functools.partial(_dispatched, entry_point)
    registries[entry_point] = []
    return _dispatched(entry_point, entry_point)


def _dispatched(key: Any, function: Any) -> Any:
    name = function.__name__

    @functools.wraps(function)
    def choose(*args: Any, **kwargs: Any) -> Any:
        reasons = []
        for backend in registries[key] if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") != "1" else ():
            if backend.is_enabled() and hasattr(backend, name):
                accepted, reason = getattr(backend, f"{name}_verifier")(*args, **kwargs)
                if accepted:
                    return getattr(backend, name)(*args, **kwargs)
                reasons.append(f"{backend.backend_type}: {reason}")
        said = "; ".join(reasons)
        raise AssertionError(
            f"{name} was called through FLA's choice of an implementation; refused by {said or 'none'}"
        )

    return choose
