"""Fake distributions for the tests of discovery: a module and its metadata in a folder on sys.path."""

import importlib
import sys

import pytest

import kda_core

SPEC = """
from kda_core.backend import BackendSpec
SPEC = BackendSpec(
    name={name!r}, abi={abi!r}, archs=frozenset({archs!r}), features=frozenset({features!r}),
    target={target!r}, install="pip install {name}", priority={priority!r}, unavailable={unavailable!r},
)
"""

BACKEND = """
import torch
from kda_core.reference import ReferenceBackend

class Backend(ReferenceBackend):
    def can_run(self, shape):
        return {refuses!r}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs a fake backend distribution and forgets all cached discovery."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def install_distribution(name, *, source=None, backend=None, group="kda_core.backends", version="1.0", **spec):
        module = f"fake_{name.replace('-', '_')}"
        fields = {
            "abi": kda_core.BACKEND_ABI, "archs": {"cpu"}, "features": {f.value for f in _features()},
            "target": f"{module}_backend:Backend", "priority": 0, "unavailable": None,
        }  # fmt: skip
        refuses = spec.pop("refuses", None)
        source = SPEC.format(name=name, **(fields | spec)) if source is None else source
        (tmp_path / f"{module}.py").write_text(source)
        (tmp_path / f"{module}_backend.py").write_text(BACKEND.format(refuses=refuses) if backend is None else backend)
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-{name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:SPEC\n")
        written.extend([module, f"{module}_backend"])
        importlib.invalidate_caches()
        kda_core.backends(refresh=True)

    yield install_distribution
    for module in written:
        sys.modules.pop(module, None)
    monkeypatch.undo()
    kda_core.backends(refresh=True)


def _features():
    from kda_core.contract import Feature

    return Feature
