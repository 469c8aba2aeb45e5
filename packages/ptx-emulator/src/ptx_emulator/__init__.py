"""Executes the PTX of CuTe DSL kernels on the CPU, strictly: a test instrument.

`load` takes a compiled function, which then runs within `device`; `run` is a launch of bare PTX. `PtxError` names what is
not modelled, `ExecutionError` what a kernel does wrong.
"""

from ptx_emulator.errors import ExecutionError, PtxError
from ptx_emulator.gpu import Device, Launch, device
from ptx_emulator.host import Function, load
from ptx_emulator.launch import run

__all__ = ["Device", "ExecutionError", "Function", "Launch", "PtxError", "device", "load", "run"]
