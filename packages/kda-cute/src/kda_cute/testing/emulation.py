"""GPU backends on CPU tensors, their kernels executed by ptx-emulator, which is imported when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor

from kda_core.backend import Backend
from kda_core.contract import Feature, KdaInputs, KdaOutputs, ProblemShape
from kda_core.reference import SPEC as REFERENCE_SPEC
from kda_core.registry import REGISTRY
from kda_cute import kernels_made_by

OPTIONAL = ("segment_workspace_bytes", "summarize", "merge_segments", "execute_segments")


class EmulatedBackend:
    """Satisfies `kda_core.backend.Backend` for CPU tensors, through the methods of a backend for a GPU.

    Its kernels may access the tensors of a call and no more. Outputs and workspace count as written: kernels read in
    workspaces what earlier calls left. It has those of the methods `OPTIONAL` that the backend has.
    """

    emulated = True

    def __init__(self, backend: Backend, arch: str, options: dict[str, Any]) -> None:
        self.backend, self.arch, self.options = backend, arch, options
        for name in OPTIONAL:
            if (method := getattr(backend, name, None)) is not None:
                setattr(self, name, update_wrapper(partial(self._emulate, method), method))

    def can_run(self, shape: ProblemShape) -> str | None:
        return self.backend.can_run(shape)

    def workspace_bytes(self, shape: ProblemShape) -> int:
        return self.backend.workspace_bytes(shape)

    def compile(self, shape: ProblemShape) -> None:
        import ptx_emulator

        with kernels_made_by(ptx_emulator.load):
            self.backend.compile(shape)

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        return self._emulate(self.backend.chunk_fwd, inputs, outputs)

    def _emulate(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """A call of a method of the backend, its launches emulated."""
        import ptx_emulator

        parts = [vars(x).values() if isinstance(x, KdaInputs | KdaOutputs) else (x,) for x in arguments]
        tensors = [x for part in parts for x in part if isinstance(x, Tensor)]
        with (
            kernels_made_by(ptx_emulator.load),
            ptx_emulator.device(self.arch, tensors=tensors, **self.options),
        ):
            return method(*arguments)


@contextmanager
def emulated(name: str, arch: str, **options: Any) -> Iterator[None]:
    """Within the block, calls with CPU tensors that name a backend are served by it, its kernels emulated; calls that
    name none are not.

    Args:
        name: an installed backend, for a GPU that need not be here; its kernels come from `kda_cute.get_kernel`.
        arch: what its kernels are compiled for, "sm_90a" for one.
        options: of `ptx_emulator.device`, such as ``seed``.

    Raises:
        BackendNotFoundError, BackendUnavailableError: it is not installed, or cannot be loaded.
    """
    spec = REGISTRY.find(name).spec
    stand_in = EmulatedBackend(REGISTRY.load(spec), arch, options)
    features = spec.features - {Feature.BACKWARD.value, Feature.RECURRENT.value}
    last = REFERENCE_SPEC.priority - 1
    changed = replace(spec, archs=frozenset({"cpu"}), features=features, priority=last)
    with REGISTRY.replaced(changed, stand_in, f"emulated {arch}, on the CPU"):
        yield
