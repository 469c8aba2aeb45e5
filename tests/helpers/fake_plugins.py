"""Fake distributions: a module and its metadata in a folder, which is all that discovery looks at."""

import kda_core
from kda_core.contract import Feature

SPEC = """
from kda_core.backend import BackendSpec
SPEC = BackendSpec(
    name={name!r}, abi={abi!r}, archs=frozenset({archs!r}), features=frozenset({features!r}),
    target={target!r}, install="pip install {name}", priority={priority!r}, unavailable={unavailable!r},{later}
)
"""

BACKEND = """
import torch
from kda_core.reference import ReferenceBackend

class Backend(ReferenceBackend):
    def can_run(self, shape):
        return {refuses!r}
"""


def install_into(
    folder, name, *, source=None, backend=None, group="kda_core.backends", version="1.0", refuses=None, **spec
):
    """Writes a backend distribution ``fake-<name>`` into `folder`; returns the names of its modules.

    `spec` replaces fields of its `BackendSpec`, `source` the whole module of the spec, `backend` the module of the class
    (by default the reference, which refuses every shape with the reason `refuses`, if that is given).
    """
    module = f"fake_{name.replace('-', '_')}"
    fields = {
        "abi": kda_core.BACKEND_ABI, "archs": {"cpu"}, "features": {f.value for f in Feature},
        "target": f"{module}_backend:Backend", "priority": 0, "unavailable": None,
    }  # fmt: skip
    # a spec of ABI 1.0 has none of these
    later = "".join(
        f" {field}={spec.pop(field)!r},"
        for field in ("variants", "note", "dtypes", "head_dims")
        if field in spec
    )
    source = SPEC.format(name=name, later=later, **(fields | spec)) if source is None else source
    (folder / f"{module}.py").write_text(source)
    (folder / f"{module}_backend.py").write_text(
        BACKEND.format(refuses=refuses) if backend is None else backend
    )
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-{name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:SPEC\n")
    return [module, f"{module}_backend"]
