"""GPU backends on CPU tensors: ptx-emulator executes their kernels. It is imported when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kda_core.backend import Backend, PreparedLaunch, SupportsBackwardInto, SupportsPrepare
from kda_core.contract import (
    Feature,
    KdaCheckpoints,
    KdaGradients,
    KdaInputs,
    KdaJournal,
    KdaOutputs,
    KdaPool,
    KdaSegments,
    ProblemShape,
    launch_tensors,
)
from kda_core.reference import SPEC as REFERENCE_SPEC
from kda_core.registry import REGISTRY
from kda_core.testing.memory import Layout
from kda_cute import kernels_made_by
from kda_cute.jit.dsl import FUNCTION

OPTIONAL = (
    "segment_workspace_bytes", "summarize", "merge_segments", "execute_segments",
    "whole_ends_workspace_bytes", "summarize_beside", "execute_beside",
    "backward_workspace_bytes", "chunk_bwd_into", "recurrent_fwd", "journal_decode", "journal_fold",
    "state_gradients_workspace_bytes", "initial_state_gradients",
)  # fmt: skip


def load(ptx: str, content: bytes) -> Callable[..., Any]:
    """Returns the emulated function of a kernel, for `kda_cute.kernels_made_by`."""
    import ptx_emulator

    return ptx_emulator.Function(ptx, content, FUNCTION)


class EmulatedBackend:
    """Satisfies `kda_core.backend.Backend` for CPU tensors, by emulating the kernels of a GPU backend.

    The kernels may access only the tensors of a call, and nothing between the rows of a view, and copies that the backend
    makes of them. Outputs and workspace count as initialised, because kernels read the data
    that earlier calls left in a workspace. The optional methods (`OPTIONAL`) are those that the GPU backend has.
    """

    emulated = True

    def __init__(self, backend: Backend, arch: str, options: dict[str, Any]) -> None:
        self.backend, self.arch, self.options = backend, arch, options
        for name in OPTIONAL:
            if (method := getattr(backend, name, None)) is not None:
                setattr(self, name, update_wrapper(partial(self._emulate, method), method))
        if isinstance(backend, SupportsPrepare):
            self.prepare = partial(self._prepare, backend)

    def can_run(self, shape: ProblemShape) -> str | None:
        return self.backend.can_run(shape)

    def workspace_bytes(self, shape: ProblemShape) -> int:
        return self.backend.workspace_bytes(shape)

    def compile(self, shape: ProblemShape) -> None:
        with kernels_made_by(load):
            self.backend.compile(shape)

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        return self._emulate(self.backend.chunk_fwd, inputs, outputs)

    def _prepare(
        self, backend: SupportsPrepare, inputs: KdaInputs, outputs: KdaOutputs
    ) -> PreparedLaunch | None:
        """Implements `SupportsPrepare.prepare`. A launch may only access the memory at its addresses."""
        launch = self._emulate(backend.prepare, inputs, outputs)
        if launch is None:
            return None
        examples = (*launch_tensors(inputs), outputs.o, outputs.final_state, outputs.workspace)
        layouts = [None if x is None else Layout.of(x) for x in examples]

        def emulated_launch(o: Tensor, given: tuple[int, ...], *written: int) -> None:
            places = zip((*given, *written), layouts, strict=True)
            tensors = [layout.at(address) for address, layout in places if layout is not None]
            self._emulate(lambda *_: launch(o, given, *written), *tensors)

        return emulated_launch

    def _emulate(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a method of the backend with its launches emulated."""
        import ptx_emulator

        tensors = [part for x in arguments for tensor in tensors_of(x) for part in dense_parts(tensor)]
        with (
            kernels_made_by(load),
            ptx_emulator.device(self.arch, tensors=tensors, **self.options) as device,
            Copies(device),
        ):
            return method(*arguments)


class Copies(TorchDispatchMode):
    """Within the block, kernels may also access the copies of tensors that a backend makes."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # the second below autograd, where it copies unless its argument is contiguous already
        if func in (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default):
            self.device.tensors = (*self.device.tensors, result)
        return result


def tensors_of(x: Any) -> Iterator[Tensor]:
    """Yields the tensors of an argument of a backend's method."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(
        x, KdaInputs | KdaOutputs | KdaGradients | KdaPool | KdaCheckpoints | KdaSegments | KdaJournal
    ):
        for value in vars(x).values():
            yield from tensors_of(value)


def dense_parts(x: Tensor) -> list[Tensor]:
    """Returns contiguous tensors that together are ``x``."""
    return [x] if x.is_contiguous() else [part for row in x for part in dense_parts(row)]


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
