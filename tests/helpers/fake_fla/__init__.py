"""A folder for ``sys.path`` with a package `fla`, see `fla/__init__.py`, and what tests need to use it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import kda_core
from kda_core.fla import SPEC, FlaBackend
from kda_core.registry import REGISTRY

HERE = Path(__file__).parent


def _modules() -> dict[str, object]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "fla"}


@contextmanager
def only_fla_in(folder: Path) -> Iterator[None]:
    """Within the block, the package `fla` is that of `folder`, whatever else is installed."""
    before = _modules()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name in before:
            del sys.modules[name]
        kda_core.backends(refresh=True)
        try:
            yield
        finally:
            for name in _modules():
                del sys.modules[name]
            sys.modules.update(before)  # type: ignore[arg-type]
    kda_core.backends(refresh=True)


@contextmanager
def fla_on_the_cpu() -> Iterator[None]:
    """Within the block, the backend `fla` serves CPU tensors, with the fake package."""
    with only_fla_in(HERE):
        here = replace(SPEC, archs=frozenset({"cpu"}))
        with REGISTRY.replaced(here, FlaBackend(), "with a fake FLA on the CPU"):
            yield
