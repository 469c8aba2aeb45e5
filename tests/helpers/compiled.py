"""The PTX and the object file of a kernel, from the cache folder: test processes compile a kernel once for all of them."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from kda_cute import get_kernel, kernels_made_by
from kda_cute.interface import KernelInterface


class Compiled(NamedTuple):
    """What the DSL makes of a kernel.

    Attributes:
        ptx: the PTX.
        content: the object file, with the function `kda_cute.jit.dsl.FUNCTION`.
    """

    ptx: str
    content: bytes


def compiled(kernel: type | KernelInterface, config: Any, arch: str) -> Compiled:
    """Returns the PTX and the object of ``kernel(config)``."""
    with kernels_made_by(cast(Any, Compiled)):
        return cast(Compiled, get_kernel(kernel, config, arch))
