"""Kernels without a compiler: exported cubins, the folders that hold them, and their launch through the CUDA driver.

| module | task |
| --- | --- |
| `cubin` | reads a cubin: symbol, parameters, threads |
| `manifest` | the list of the kernels of a folder |
| `export` | takes the cubin from the object file of a compiled kernel; writes a folder; needs the DSL |
| `search` | `KernelStore`: finds a kernel in the folders, and checks it |
| `driver` | the functions of ``libcuda`` that a launch needs |
| `launcher` | the callable of a loaded kernel, exported or just compiled |

All but `export` work without the DSL. Nothing of the DSL's runtime library is used.
"""
