"""The functions of the CUDA driver that exported kernels need, by ctypes. Nothing is linked, and no package is required.

`cuda-bindings` would add a dependency, and takes as long: most of the time of a launch is the driver's.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"

#: Of CUfunction_attribute. The DSL's host code sets no carveout, so none is set here.
_DYNAMIC_SHARED_BYTES = 8
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE

_P = c_void_p
#: The functions, and the types of their arguments. All return a CUresult. ``cuLaunchKernelEx`` is not among them: its arguments are
#: objects of ctypes, which it converts in less time without types.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuLibraryLoadData": (POINTER(_P), c_char_p, _P, _P, c_uint, _P, _P, c_uint),
    "cuLibraryGetKernel": (POINTER(_P), _P, c_char_p),
    "cuKernelGetParamInfo": (_P, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
    "cuKernelSetAttribute": (c_int, c_int, _P, c_int),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(_P), c_int),
    "cuCtxGetCurrent": (POINTER(_P),),
    "cuCtxSetCurrent": (_P,),
}


class DriverError(RuntimeError):
    """A function of the driver failed, or the driver cannot be loaded."""


class Driver:
    """The driver, initialised.

    Args:
        library: an object with the functions of ``libcuda``.

    Raises:
        DriverError: it lacks a function, or there is no GPU.
    """

    def __init__(self, library: Any) -> None:
        try:
            for name, kinds in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes, function.restype = kinds, c_int
            self.launch_kernel = library.cuLaunchKernelEx
        except AttributeError as error:
            raise DriverError(f"the NVIDIA driver is too old: {error}") from error
        self._library = library
        self._call("cuInit", 0)

    def error_name(self, code: int) -> str:
        """Returns the name of a CUresult, such as CUDA_ERROR_INVALID_VALUE."""
        name = c_char_p()
        if self._library.cuGetErrorName(code, byref(name)) or name.value is None:
            return f"CUDA error {code}"
        return name.value.decode()

    def _call(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._library, function)(*arguments):
            raise DriverError(f"{function}: {self.error_name(code)}")

    def version(self) -> int:
        """Returns the version of CUDA that the driver supports: 13000 for 13.0."""
        found = c_int()
        self._call("cuDriverGetVersion", byref(found))
        return found.value

    def load(self, cubin: bytes, symbol: str) -> int:
        """Loads a cubin and returns the handle of a kernel, which is valid on every device and is never unloaded."""
        library, kernel = c_void_p(), c_void_p()
        self._call("cuLibraryLoadData", byref(library), cubin, None, None, 0, None, None, 0)
        self._call("cuLibraryGetKernel", byref(kernel), library, symbol.encode())
        assert kernel.value is not None
        return kernel.value

    def parameters(self, kernel: int, limit: int) -> list[tuple[int, int]]:
        """Returns (offset, size) of the parameters of a kernel, of at most `limit` parameters. The thread needs a current context."""
        found: list[tuple[int, int]] = []
        offset, size = c_size_t(), c_size_t()
        while len(found) < limit:
            code = self._library.cuKernelGetParamInfo(kernel, len(found), byref(offset), byref(size))
            if code == _INVALID_VALUE:  # there is no parameter of this number
                break
            if code:
                raise DriverError(f"cuKernelGetParamInfo: {self.error_name(code)}")
            found.append((offset.value, size.value))
        return found

    def make_current(self, ordinal: int) -> None:
        """Makes the primary context of a device current if the thread has no context.

        A new thread has none until its first call of the CUDA runtime. Torch's threads for backwards are such threads: memory from
        torch's cache needs no call of the runtime.
        """
        device, context = c_int(), c_void_p()
        self._call("cuCtxGetCurrent", byref(context))
        if not context.value:
            self._call("cuDeviceGet", byref(device), ordinal)
            self._call("cuDevicePrimaryCtxRetain", byref(context), device)
            self._call("cuCtxSetCurrent", context)

    def prepare(self, kernel: int, ordinal: int, shared_bytes: int) -> None:
        """Makes a context current (see `make_current`), and allows a kernel its dynamic shared memory on a device."""
        device = c_int()
        self.make_current(ordinal)
        self._call("cuDeviceGet", byref(device), ordinal)
        self._call("cuKernelSetAttribute", _DYNAMIC_SHARED_BYTES, shared_bytes, kernel, device)

    def current_device(self) -> int:
        """Returns the number of torch's current device."""
        import torch

        return torch.cuda.current_device()

    def stream(self, ordinal: int) -> int:
        """Returns torch's current stream on a device."""
        import torch

        return torch.cuda.current_stream(ordinal).cuda_stream


class TorchDriver(Driver):
    """The driver of this machine."""

    def __init__(self) -> None:
        import torch

        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(f"the NVIDIA driver cannot be loaded: {error}") from error
        super().__init__(library)
        # without the Python object of a stream; builds of torch without CUDA lack the function
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if raw is not None:
            self.stream = raw  # type: ignore[method-assign]


@functools.cache
def current() -> Driver:
    """Returns the driver of this machine.

    Raises:
        DriverError: there is none, it is too old, or there is no GPU.
    """
    return TorchDriver()
