"""GPU backends on CPU tensors: ptx-emulator executes their kernels. It is imported when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor

from kda_core.backend import Backend, SupportsBackwardInto
from kda_core.contract import Feature, KdaGradients, KdaInputs, KdaOutputs, ProblemShape
from kda_core.reference import SPEC as REFERENCE_SPEC
from kda_core.registry import REGISTRY
from kda_cute import kernels_made_by

OPTIONAL = (
    "segment_workspace_bytes", "summarize", "merge_segments", "execute_segments",
    "backward_workspace_bytes", "chunk_bwd_into", "recurrent_fwd",
)  # fmt: skip


class EmulatedBackend:
    """Satisfies `kda_core.backend.Backend` for CPU tensors, by emulating the kernels of a GPU backend.

    The kernels may access only the tensors of a call. Outputs and workspace count as initialised, because kernels read the data
    that earlier calls left in a workspace. The optional methods (`OPTIONAL`) are those that the GPU backend has.
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
        """Calls a method of the backend with its launches emulated."""
        import ptx_emulator

        parts = [
            vars(x).values() if isinstance(x, KdaInputs | KdaOutputs | KdaGradients) else (x,)
            for x in arguments
        ]
        tensors = [x for part in parts for x in part if isinstance(x, Tensor)]
        with (
            kernels_made_by(ptx_emulator.load),
            ptx_emulator.device(self.arch, tensors=tensors, **self.options),
        ):
            return method(*arguments)


@contextmanager
def emulated(name: str, arch: str, **options: Any) -> Iterator[None]:
    """Within the block, the GPU backend ``name`` serves calls with CPU tensors that name it; ptx-emulator executes its kernels.
    Calls that name no backend do not use it.

    Args:
        name: an installed backend whose kernels come from `kda_cute.get_kernel`. Its GPU need not be present.
        arch: the architecture for which its kernels are compiled, such as "sm_90a".
        options: options of `ptx_emulator.device`, such as ``seed``.

    Raises:
        BackendNotFoundError: the backend is not installed.
        BackendUnavailableError: the backend cannot be loaded.
    """
    spec = REGISTRY.find(name).spec
    stand_in = EmulatedBackend(REGISTRY.load(spec), arch, options)
    features = spec.features
    if not isinstance(
        stand_in, SupportsBackwardInto
    ):  # the memory of another backward is unknown to the emulator
        features -= {Feature.BACKWARD.value}
    last = REFERENCE_SPEC.priority - 1
    changed = replace(spec, archs=frozenset({"cpu"}), features=features, priority=last)
    with REGISTRY.replaced(changed, stand_in, f"emulated {arch}, on the CPU"):
        yield
