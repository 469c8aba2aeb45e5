"""What the CuTe DSL backends of kda-core share: compile cache, ptxas report, device functions, intra-chunk stage.

``import kda_cute`` does not import the CuTe DSL; the functions import it when they first need it. A kernel is a class:

.. code-block:: python

    @dataclass(frozen=True)
    class Config: ...                       # plain literals only: they are part of the cache key

    class SomeKernel:
        compile_options = ""                # optional: more options of `cute.compile`
        spill_allowance = 0                 # optional: spilled bytes for each thread that `kda_cute.jit.ptxas` accepts

        def __init__(self, config: Config): ...
        def fake_args(self) -> tuple: ...   # fake tensors, scalars, fake stream: the arguments of __call__
        @cute.jit
        def __call__(self, ...): ...        # layouts, TMA atoms, launch
        @cute.kernel
        def kernel(self, ...): ...

A kernel whose arguments are one struct derives from `kda_cute.device.kernel.Kernel` instead, and states a
`kda_cute.interface.KernelInterface`, so that it can be exported and launched without the DSL.

``get_kernel(SomeKernel, config, arch)`` compiles it once for each configuration and architecture, and returns a callable that
takes torch tensors and runs on torch's current stream. A new value of an extent that ``fake_args`` leaves dynamic needs no
compilation. A backend that chooses its configuration by shape compiles each one when a call first needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kda_cute.jit.compile import CacheInfo, cache_info, clear_memory, get_kernel, kernels_made_by
from kda_cute.jit.target import arch_of_capability, arch_of_device
from kda_cute.jit.versions import DslWheels, dsl_wheels

if TYPE_CHECKING:
    from kda_cute.jit.precompile import Built, precompile

__all__ = [
    "Built",
    "CacheInfo",
    "DslWheels",
    "arch_of_capability",
    "arch_of_device",
    "cache_info",
    "clear_memory",
    "dsl_wheels",
    "get_kernel",
    "kernels_made_by",
    "precompile",
]


def __getattr__(name: str) -> Any:
    """Imports `precompile` at its first use: it needs pools of processes, which take milliseconds to import, and no call needs it."""
    if name in ("Built", "precompile"):
        from kda_cute.jit import precompile as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
