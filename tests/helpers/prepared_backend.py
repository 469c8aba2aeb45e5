"""`reference` with prepared launches: a launch makes the tensors at its addresses again and calls the backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

from kda_core.contract import KdaInputs, KdaOutputs, Tensors
from kda_core.reference import SPEC, ReferenceBackend
from kda_core.registry import REGISTRY
from kda_core.testing.memory import Layout

OPEN = Tensors._fields[: Tensors._fields.index("cu_seqlens") + 1]
WRITTEN = ("o", "final_state", "workspace")


class PreparedReference(ReferenceBackend):
    """Attributes:
    prepared: shapes of the calls whose launch was prepared.
    launched: how often each of these launches ran.
    """

    def __init__(self):
        self.prepared, self.launched = [], []

    def workspace_bytes(self, shape):
        return 0 if shape.options.recurrent else 512

    def prepare(self, inputs, outputs):
        examples = [getattr(inputs, name) for name in OPEN], [getattr(outputs, name) for name in WRITTEN]
        layouts = [[None if x is None else Layout.of(x) for x in group] for group in examples]
        number, shape, journal = len(self.prepared), inputs.shape, inputs.journal
        # a launch keeps none of the tensors that it replaces
        fixed = {f.name: getattr(inputs, f.name) for f in fields(KdaInputs) if f.name not in OPEN}
        assert outputs.workspace is not None or shape.options.recurrent
        self.prepared.append(shape)
        self.launched.append(0)

        def at(addresses, layouts):
            assert [address == 0 for address in addresses] == [layout is None for layout in layouts]
            return [layout and layout.at(address) for address, layout in zip(addresses, layouts, strict=True)]

        def launch(o, given, *written):
            self.launched[number] += 1
            assert o.data_ptr() == written[0]
            changed = KdaInputs(**fixed, **dict(zip(OPEN, at(given, layouts[0]), strict=True)))
            made = KdaOutputs(**dict(zip(WRITTEN, at(written, layouts[1]), strict=True)))
            entry = "chunk_fwd"
            if shape.options.recurrent:
                entry = "recurrent_fwd" if journal is None else "journal_decode"
            assert getattr(self, entry)(changed, made) is made

        return launch


@contextmanager
def prepared(**changes: object) -> Iterator[PreparedReference]:
    """Within the block, and until something is installed, `PreparedReference` is the backend ``reference``. ``changes``: of its spec."""
    backend = PreparedReference()
    with REGISTRY.replaced(replace(SPEC, **changes), backend, "prepared launches"):  # type: ignore[arg-type]
        yield backend
