"""A strict PTX emulator for CuTe DSL kernels: a test instrument that runs on the CPU.

| name | use |
| --- | --- |
| `load` | turns a compiled DSL function into one whose launches are emulated |
| `device` | the emulated GPU: functions of `load` run within it |
| `run` | launches bare PTX |
| `PtxError` | the PTX cannot be parsed, or uses something that is not modelled |
| `ExecutionError` | the kernel does something that is undefined on a device, or it never ends |
"""

from ptx_emulator.errors import ExecutionError, PtxError
from ptx_emulator.gpu import Device, Launch, device
from ptx_emulator.host import Function, load
from ptx_emulator.launch import run

__all__ = ["Device", "ExecutionError", "Function", "Launch", "PtxError", "device", "load", "run"]
