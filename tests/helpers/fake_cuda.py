"""A stand-in for ``libcuda``: functions with C's calling convention that record what they are given."""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, NamedTuple

from kda_cute.store import cubin
from kda_cute.store.driver import Driver

INVALID_VALUE, INVALID_IMAGE, INVALID_CONTEXT, NOT_FOUND = 1, 200, 201, 500
NAMES = {
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    INVALID_IMAGE: b"CUDA_ERROR_INVALID_IMAGE",
    INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
}
STREAM, CONTEXT = 0x51, 0xC0
CLUSTER_DIMENSION = 4  # the attribute with three values


class Launch(NamedTuple):
    """What ``cuLaunchKernelEx`` was given."""

    symbol: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    attributes: dict[int, Any]
    parameters: bytes


class FakeCuda:
    """The library. A handle of a library or kernel is a number from 1 on.

    Attributes:
        launches: all of them.
        attributes: (attribute, value, kernel, device) of every call that sets one.
        current: the context of the threads.
        fails: the code that a function of this name returns.
        parameters: (offset, size) of the parameters of every kernel; None: those of its cubin.
        version: of the driver.
    """

    def __init__(self, version: int = 13000) -> None:
        self.launches: list[Launch] = []
        self.attributes: list[tuple[int, ...]] = []
        self.kernels: list[cubin.Entry] = []
        self.current = 0
        self.fails: dict[str, int] = {}
        self.parameters: list[tuple[int, int]] | None = None
        self.version = version
        p = c_void_p
        kinds = {
            "cuInit": (c_uint,),
            "cuDriverGetVersion": (POINTER(c_int),),
            "cuGetErrorName": (c_int, POINTER(c_char_p)),
            "cuLibraryLoadData": (POINTER(p), p, p, p, c_uint, p, p, c_uint),
            "cuLibraryGetKernel": (POINTER(p), p, c_char_p),
            "cuKernelGetParamInfo": (p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
            "cuKernelSetAttribute": (c_int, c_int, p, c_int),
            "cuDeviceGet": (POINTER(c_int), c_int),
            "cuDevicePrimaryCtxRetain": (POINTER(p), c_int),
            "cuCtxGetCurrent": (POINTER(p),),
            "cuCtxSetCurrent": (p,),
            "cuLaunchKernelEx": (p, p, p, p),
        }
        for name, types in kinds.items():
            setattr(self, name, ctypes.CFUNCTYPE(c_int, *types)(self._body(name)))

    def _body(self, name: str) -> Any:
        body = getattr(self, f"_{name}")
        return lambda *arguments: self.fails.get(name) or body(*arguments) or 0

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDriverGetVersion(self, out: Any) -> None:
        out[0] = self.version

    def _cuGetErrorName(self, code: int, out: Any) -> int:
        if code not in NAMES:
            return INVALID_VALUE
        out[0] = NAMES[code]
        return 0

    def _cuLibraryLoadData(self, out: Any, image: int, *options: Any) -> int:
        assert not any(options)
        if ctypes.string_at(image, 4) != b"\x7fELF":
            return INVALID_IMAGE
        size = (
            struct.unpack("<Q", ctypes.string_at(image + 32, 8))[0] + 56 * 16
        )  # program headers lie at the end
        try:
            (entry,) = cubin.entries(ctypes.string_at(image, size))
        except cubin.CubinError:
            return INVALID_IMAGE
        self.kernels.append(entry)
        out[0] = len(self.kernels)
        return 0

    def _cuLibraryGetKernel(self, out: Any, library: int, name: bytes) -> int:
        out[0] = library
        return 0 if self.kernels[library - 1].symbol == name.decode() else NOT_FOUND

    def _cuKernelGetParamInfo(self, kernel: int, index: int, offset: Any, size: Any) -> int:
        if not self.current:  # as the driver does
            return INVALID_CONTEXT
        parameters = self.kernels[kernel - 1].parameters if self.parameters is None else self.parameters
        if index >= len(parameters):
            return INVALID_VALUE
        offset[0], size[0] = parameters[index]
        return 0

    def _cuKernelSetAttribute(self, attribute: int, value: int, kernel: int, device: int) -> None:
        self.attributes.append((attribute, value, kernel, device))

    def _cuDeviceGet(self, out: Any, ordinal: int) -> None:
        out[0] = 100 + ordinal

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        out[0] = CONTEXT + device

    def _cuCtxGetCurrent(self, out: Any) -> None:
        out[0] = self.current or None

    def _cuCtxSetCurrent(self, context: int) -> None:
        self.current = context

    def _cuLaunchKernelEx(self, config: int, kernel: int, parameters: int, extra: Any) -> None:
        """Decodes ``CUlaunchConfig`` and the addresses of the parameters as ``cuda.h`` declares them."""
        assert extra is None  # a cooperative launch with it cannot be captured
        *sizes, stream, at, count = struct.unpack("<7I4x2QI", ctypes.string_at(config, 52))
        entry = self.kernels[kernel - 1]
        places = struct.unpack(
            f"<{len(entry.parameters)}Q", ctypes.string_at(parameters, 8 * len(entry.parameters))
        )
        content = bytearray(entry.parameter_bytes)
        for (offset, size), place in zip(entry.parameters, places):
            content[offset : offset + size] = ctypes.string_at(place, size)
        attributes = (struct.unpack("<I4x3I52x", ctypes.string_at(at + 72 * n, 72)) for n in range(count))
        self.launches.append(
            Launch(
                entry.symbol, tuple(sizes[:3]), tuple(sizes[3:6]), sizes[6], stream,
                {n: tuple(extents) if n == CLUSTER_DIMENSION else extents[0] for n, *extents in attributes}, bytes(content),
            )
        )  # fmt: skip


class FakeDriver(Driver):
    """The driver over a `FakeCuda`. Torch's current stream is `STREAM` plus the device's number, its current device is `device`."""

    def __init__(self, device: int = 0, **options: Any) -> None:
        self.cuda, self.device = FakeCuda(**options), device
        super().__init__(self.cuda)

    def stream(self, ordinal: int) -> int:
        return STREAM + ordinal

    def current_device(self) -> int:
        return self.device


class OnDevice:
    """In place of a tensor on a GPU."""

    def __init__(self, device: int = 0) -> None:
        self.device = device

    def get_device(self) -> int:
        return self.device
