"""`reference` with prepared launches: a launch makes the tensors at its addresses again and calls the backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

from kda_core.contract import (
    KdaCheckpoints,
    KdaInputs,
    KdaJournal,
    KdaOutputs,
    KdaPool,
    Tensors,
    launch_tensors,
)
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
        examples = launch_tensors(inputs), [getattr(outputs, name) for name in WRITTEN]
        layouts = [[None if x is None else Layout.of(x) for x in group] for group in examples]
        number, shape, has_journal = len(self.prepared), inputs.shape, inputs.journal is not None
        # a launch keeps none of the tensors that it replaces
        remade = bare(inputs)
        assert outputs.workspace is not None or shape.options.recurrent
        self.prepared.append(shape)
        self.launched.append(0)

        def at(addresses, layouts):
            assert [address == 0 for address in addresses] == [layout is None for layout in layouts]
            return [layout and layout.at(address) for address, layout in zip(addresses, layouts, strict=True)]

        def launch(o, given, *written):
            self.launched[number] += 1
            assert o.data_ptr() == written[0]
            changed = remade(at(given, layouts[0]))
            made = KdaOutputs(**dict(zip(WRITTEN, at(written, layouts[1]), strict=True)))
            entry = "chunk_fwd"
            if shape.options.recurrent:
                entry = "journal_decode" if has_journal else "recurrent_fwd"
            assert getattr(self, entry)(changed, made) is made

        return launch


def bare(inputs):
    """Returns a function that makes inputs like these from the tensors of `launch_tensors`."""
    fixed = {f.name: getattr(inputs, f.name) for f in fields(KdaInputs) if f.name not in OPEN}
    pool, journal = fixed.pop("pool"), fixed.pop("journal")
    first_slot = pool and pool.first_slot
    has_checkpoints, length = pool is not None and pool.checkpoints is not None, journal and journal.length
    has_pool = pool is not None
    del inputs, pool, journal

    def remade(tensors):
        *tokens, states, cu_seqlens = tensors[:9]
        more = {}
        if has_pool:
            read, write, mask, accepted, *points = tensors[9:17]
            kept = KdaCheckpoints(*points) if has_checkpoints else None
            more["pool"] = KdaPool(states, read, write, first_slot, mask, accepted, kept)
            states = None
        if length is not None:
            u, k, k_factor, G, spans = tensors[17:]
            more["journal"] = KdaJournal(u, k, k_factor, G, length, spans)
        return KdaInputs(*tokens, states, cu_seqlens, **fixed, **more)

    return remade


@contextmanager
def prepared(**changes: object) -> Iterator[PreparedReference]:
    """Within the block, and until something is installed, `PreparedReference` is the backend ``reference``. ``changes``: of its spec."""
    backend = PreparedReference()
    with REGISTRY.replaced(replace(SPEC, **changes), backend, "prepared launches"):  # type: ignore[arg-type]
        yield backend
