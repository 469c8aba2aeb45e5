"""Hides kda-cp from the tests of kda-core."""

import pytest

import kda_core
from kda_core import registry


@pytest.fixture(scope="module", autouse=True)
def core_alone():
    """Hides the planner kda-cp, because these tests install their own planners."""
    found = registry.entry_points
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            registry, "entry_points", lambda **kw: [p for p in found(**kw) if p.module != "kda_cp.plugin"]
        )
        kda_core.backends(refresh=True)
        yield
    kda_core.backends(refresh=True)
