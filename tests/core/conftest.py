"""Fake distributions for the tests of discovery."""

import pytest

import kda_core
from kda_core import registry


@pytest.fixture(scope="module", autouse=True)
def core_alone():
    """kda-cp is not found, whether it is installed or not: these tests bring planners of their own."""
    found = registry.entry_points
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            registry, "entry_points", lambda **kw: [p for p in found(**kw) if p.module != "kda_cp.plugin"]
        )
        kda_core.backends(refresh=True)
        yield
    kda_core.backends(refresh=True)
