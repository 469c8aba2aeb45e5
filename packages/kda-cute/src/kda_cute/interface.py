"""The interface of a kernel, for code that must not import the DSL: its class by name, its parameters, its grid.

It is stated once. The DSL's function takes its parameters and its grid from it (`kda_cute.device.kernel`), and so does the launcher
of exported kernels (`kda_cute.store`).

Importing this needs neither torch nor the DSL.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelInterface:
    """The interface of a kernel class.

    Attributes:
        kernel: the class, "package.module:Class". Importing the module imports the DSL.
        arguments: returns the argument struct (`kda_cute.arguments`) of a configuration.
        grid: returns the CTAs of a launch along x, y and z, from a configuration and the values of the struct. The DSL traces the
            function, and exported kernels call it with Python's numbers: it may add, subtract, multiply, and divide numbers that are
            not negative by ``//``, but not branch on values.
        cooperative: whether all CTAs of a launch must be co-resident.
        overlaps: whether a launch may begin before the kernel ahead of it in the stream has ended (programmatic dependent launch). Such
            a kernel begins with `kda_cute.device.kernel.Kernel.wait_for_stream`.
        cluster: returns the CTAs of a cluster, which follow one another along x, from a configuration. The grid is a multiple of it.
    """

    kernel: str
    arguments: Callable[[Any], type[tuple]]
    grid: Callable[[Any, Any], tuple[Any, Any, Any]]
    cooperative: bool = False
    overlaps: bool = False
    cluster: Callable[[Any], int] = lambda config: 1

    @property
    def package(self) -> str:
        """The top-level package of the class."""
        return self.kernel.partition(".")[0]

    @property
    def name(self) -> str:
        """The name of the class, for files and messages."""
        return self.kernel.rpartition(":")[2]

    def load(self) -> type:
        """Imports and returns the class.

        Raises:
            ImportError: the DSL is not installed.
        """
        module, _, name = self.kernel.partition(":")
        return getattr(importlib.import_module(module), name)
