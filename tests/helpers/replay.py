"""What a CUDA graph does with the work of a call, on any device: records it once, and repeats it with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Tape(TorchDispatchMode):
    """Records, within its block, the launches of `recorded` kernels and the operators of torch. `replay` repeats them in order, in the
    same memory and with the same arguments.

    A value that the host reads within the block, as ``tensor.item()`` does, fails: no graph could hold it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._work: list[Callable[[], Any]] = []
        self._in_kernel = False

    def recorded(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the kernel, whose launches are recorded."""

        def launch(*arguments: Any) -> None:
            self._work.append(partial(kernel, *arguments))
            self._in_kernel = True  # an emulated kernel uses torch itself
            kernel(*arguments)
            self._in_kernel = False

        return launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if self._in_kernel:
            return call()
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value of a tensor"
        found = call()
        if func._schema.is_mutable:
            self._work.append(call)
        elif not _is_view(found, args):
            self._work.append(partial(_again, found, call))
        return found

    def replay(self) -> None:
        for work in self._work:
            work()


def _is_view(found: Any, args: Any) -> bool:
    storage = found.untyped_storage().data_ptr()
    return any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() == storage for x in args)


def _again(found: Tensor, call: Callable[[], Tensor]) -> None:
    found.copy_(call())
