"""Backends for the tests of the planner: the third-party example, and backends that record their calls."""

import importlib
import sys
from pathlib import Path

import pytest
from helpers import segmented_backend

import kda_core
from kda_cp import constants

EXAMPLE = Path(__file__).parents[2] / "examples" / "third-party-backend" / "src"

WATCHED = """
import kda_core
from kda_core.backend import BackendSpec
from kda_core.contract import Feature
from kda_core.reference import ReferenceBackend

FEATURES = frozenset(f.value for f in Feature) - {missing!r}
SPEC = BackendSpec(
    name="watched", abi=kda_core.BACKEND_ABI, archs=frozenset({{"cpu"}}), features=FEATURES,
    target="kda_watched:Backend", install="pip install watched", priority={priority!r},
)
calls = []

class Backend(ReferenceBackend):
    def workspace_bytes(self, shape):
        return shape.T * shape.HV

    def can_run(self, shape):
        return {refuses!r} if shape.has_initial_state else None

    def chunk_fwd(self, inputs, outputs):
        assert outputs.workspace.numel() >= inputs.shape.T * inputs.shape.HV
        assert all(getattr(inputs, n).data_ptr() % 16 == 0 for n in ("q", "k", "v", "g", "beta"))
        calls.append((inputs.shape, inputs.sequence_lengths()))
        return super().chunk_fwd(inputs, outputs)
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Returns a function that installs a backend: it writes the metadata of a distribution to a folder on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def add(name, target):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kda_core.backends]\n{name} = {target}\n")
        importlib.invalidate_caches()
        kda_core.backends(refresh=True)

    yield add
    for module in set(sys.modules) - before:
        if module.partition(".")[0] in ("kda_watched", "kda_tokenwise"):
            del sys.modules[module]
    monkeypatch.undo()
    kda_core.backends(refresh=True)


@pytest.fixture
def tokenwise(distribution, monkeypatch):
    """Installs the backend of examples/third-party-backend; returns its name."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    distribution("tokenwise-example", "kda_tokenwise.plugin:SPEC")
    return "tokenwise"


@pytest.fixture
def watched(distribution, tmp_path):
    """Returns a function that installs `WATCHED` and returns the list of (shape, lengths) of its calls."""

    def install(missing=(), priority=-150, refuses=None):
        source = WATCHED.format(missing=set(missing), priority=priority, refuses=refuses)
        (tmp_path / "kda_watched.py").write_text(source)
        distribution("watched", "kda_watched:SPEC")
        return importlib.import_module("kda_watched").calls

    return install


@pytest.fixture(params=["SPEC", "MERGES"])
def segmented(request, distribution):
    """Installs a backend that summarises segments, "segmented"; returns the list of (method, lengths) of its calls."""
    distribution("segmented", f"helpers.segmented_backend:{request.param}")
    segmented_backend.calls.clear()
    return segmented_backend.calls


@pytest.fixture
def beside(distribution):
    """The same for a backend with whole calls beside segments, "beside"."""
    distribution("beside", "helpers.segmented_backend:BESIDE")
    segmented_backend.calls.clear()
    return segmented_backend.calls


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Returns `kda_cp.constants.store`, which writes to a folder of this test."""
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "cache"))
    constants.refresh()
    yield constants.store
    constants.refresh()
