"""Fake distributions for the tests of discovery."""

import importlib
import sys

import pytest
from fake_plugins import install_into

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


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`fake_plugins.install_into` a folder on sys.path; cached discovery is forgotten, before and after."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def install_distribution(name, **fields):
        written.extend(install_into(tmp_path, name, **fields))
        importlib.invalidate_caches()
        kda_core.backends(refresh=True)

    yield install_distribution
    for module in written:
        sys.modules.pop(module, None)
    monkeypatch.undo()
    kda_core.backends(refresh=True)
