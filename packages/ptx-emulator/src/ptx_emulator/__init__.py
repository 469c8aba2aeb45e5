"""Executes the PTX of CuTe DSL kernels on the CPU, strictly: a test instrument.

`run` is a launch; `PtxError` names what is not modelled, `ExecutionError` what a kernel does wrong.
"""

from ptx_emulator.errors import ExecutionError, PtxError
from ptx_emulator.launch import run

__all__ = ["ExecutionError", "PtxError", "run"]
