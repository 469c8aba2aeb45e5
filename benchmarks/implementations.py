"""What is measured: each backend of kda-core by name, and peers, all called with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kda_core
from kda_core.registry import record_calls

Outputs = tuple[Any, Any]


def backend(name: str) -> Callable[..., Outputs]:
    """``chunk_kda`` on one backend; every call asserts that this backend ran."""

    def call(**x: Any) -> Outputs:
        with record_calls() as calls:
            o, state = kda_core.chunk_kda(**x, backend=name, context_parallel="off")
        assert [c.backend for c in calls] == [name], calls
        return o, state

    return call


def fla() -> Callable[..., Outputs]:
    """FLA's Triton kernels, the peer in the same process."""
    from fla.ops.kda import chunk_kda

    def call(**x: Any) -> Outputs:
        return chunk_kda(**x)

    return call


def named(name: str) -> Callable[..., Outputs]:
    """The implementation behind a row's ``impl``: "fla", "reference", or "kda-<backend>".

    Raises:
        ValueError: no such implementation here.
    """
    if name == "fla":
        return fla()
    backend_name = name.removeprefix("kda-")
    known = {i.name: i for i in kda_core.backends()}
    if backend_name not in known or known[backend_name].status != "ok":
        state = known.get(backend_name, "unknown")
        raise ValueError(f"impl {name!r} cannot run here: {state}")
    return backend(backend_name)
