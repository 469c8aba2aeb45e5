"""Executes PTX on the GPU of this machine through the driver.

`run` has the parameters of `ptx_emulator.run`, so both accept the same text and the same CPU tensors. `calibrate.py` records
its fixtures with it; no test uses it.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterable, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import torch

from helpers.emulator import ptx as texts
from helpers.emulator.tensor_maps import Form
from ptx_emulator.parser import parse

SHARED_BYTES, CLUSTERS_OF_16 = 8, 14  # CUfunction_attribute
CLUSTER = 4  # CUlaunchAttributeID
ERROR_LOG, ERROR_LOG_BYTES = 5, 6  # CUjit_option

_TYPES = {
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": c_uint32,
    "u64": c_uint64,
    "f32": ctypes.c_float,
}
_TYPES |= {
    "s32": ctypes.c_int32,
    "s64": ctypes.c_int64,
    "b32": c_uint32,
    "b64": c_uint64,
    "f64": ctypes.c_double,
}


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("identity", c_uint32), ("padding", c_uint32), ("value", c_uint32 * 16))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", c_uint32 * 3), ("block", c_uint32 * 3), ("shared_bytes", c_uint32), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", c_uint32),
    )  # fmt: skip


@functools.cache
def _driver() -> Any:
    """The driver's library, with a context on the first GPU."""
    library: Any = None
    for name in ("libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1", "/usr/lib64/libcuda.so.1"):
        try:
            library = ctypes.CDLL(name)
            break
        except OSError as error:
            missing = error
    if library is None:
        raise RuntimeError(f"no CUDA driver: {missing}")
    device, context = c_int(), c_void_p()
    for status in (
        library.cuInit(0),
        library.cuDeviceGet(byref(device), 0),
        library.cuDevicePrimaryCtxRetain(byref(context), device),
        library.cuCtxSetCurrent(context),
    ):
        if status:
            raise RuntimeError(f"no GPU: the driver returned status {status}")
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _driver()
    status = getattr(library, name)(*arguments)
    if status:
        text = c_char_p()
        library.cuGetErrorString(status, byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown').decode()} ({status})")


def describe() -> dict[str, str]:
    """The name of the GPU, and the CUDA version of its driver."""
    name, version = ctypes.create_string_buffer(128), c_int()
    _call("cuDeviceGetName", name, 128, 0)
    _call("cuDriverGetVersion", byref(version))
    return {"gpu": name.value.decode(), "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}"}


def _accepted(ptx: str) -> str:
    """The text with a PTX version that the driver accepts. An instruction that the driver lacks is still an error."""
    version = c_int()
    _call("cuDriverGetVersion", byref(version))
    cuda = version.value // 1000, version.value % 1000 // 10
    if cuda >= (13, 0):
        newest = 9, cuda[1]
    else:
        newest = 8, cuda[1] if cuda[1] < 6 else cuda[1] - 1
    match = re.search(r"\.version (\d+)\.(\d+)", ptx)
    assert match is not None
    if (int(match[1]), int(match[2])) <= newest:
        return ptx
    return f"{ptx[: match.start()]}.version {newest[0]}.{newest[1]}{ptx[match.end() :]}"


@functools.lru_cache(maxsize=8)
def _loaded(ptx: str) -> tuple[c_void_p, list[tuple[str, str, int]]]:
    """The only kernel of a PTX text, and its parameters."""
    (kernel,) = parse(ptx).kernels.values()
    code = (texts.images or {}).get(ptx) or _accepted(ptx).encode()
    module, function, log = c_void_p(), c_void_p(), ctypes.create_string_buffer(1 << 14)
    options = (c_int * 2)(ERROR_LOG, ERROR_LOG_BYTES)
    values = (c_void_p * 2)(ctypes.addressof(log), len(log))
    try:
        _call("cuModuleLoadDataEx", byref(module), c_char_p(code), 2, options, values)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{log.value.decode(errors='replace')}") from None
    _call("cuModuleGetFunction", byref(function), module, kernel.name.encode())
    return function, kernel.parameters


class _Memory:
    """Copies of the tensors' storages on the GPU. Each copy has the same address modulo 256 as its storage."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.places: dict[int, tuple[int, int]] = {}  # address of a storage -> (address of its copy, bytes)
        self.allocated: list[c_uint64] = []
        self.maps: dict[int, bytes] = {}  # address of a tensor map -> the address that it holds, as bytes
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            if size and start not in self.places:
                pointer = c_uint64()
                _call("cuMemAlloc_v2", byref(pointer), c_size_t(size + 256))
                self.allocated.append(pointer)
                self.places[start] = pointer.value + start % 256, size
            if tensor.dtype is torch.uint8 and tensor.numel() == 128:
                self.maps[tensor.data_ptr()] = ctypes.string_at(tensor.data_ptr(), 8)
        for start, (place, size) in self.places.items():
            _call("cuMemcpyHtoD_v2", c_uint64(place), c_void_p(start), c_size_t(size))
        for here, address in self.maps.items():
            there = c_uint64(self.translated(int.from_bytes(address, "little")))
            _call("cuMemcpyHtoD_v2", c_uint64(self.translated(here)), byref(there), c_size_t(8))

    def translated(self, address: int) -> int:
        """The address in the GPU copy, if a number is an address within a tensor; other numbers are returned unchanged."""
        for start, (place, size) in self.places.items():
            if start <= address < start + size:
                return address - start + place
        return address

    def back(self) -> None:
        """Copy the storages back from the GPU and restore the addresses in tensor maps."""
        for start, (place, size) in self.places.items():
            _call("cuMemcpyDtoH_v2", c_void_p(start), c_uint64(place), c_size_t(size))
        for here, address in self.maps.items():
            ctypes.memmove(here, address, 8)

    def free(self) -> None:
        for pointer in self.allocated:
            _call("cuMemFree_v2", pointer)


def run(
    ptx: str,
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    arguments: Sequence[int | float | bytes | torch.Tensor],
    tensors: Iterable[torch.Tensor] = (),
    *,
    scratch: Iterable[torch.Tensor] = (),
    cluster: Sequence[int] = (1, 1, 1),
    seed: int = 0,
    races: Sequence[str] = (),
) -> int:
    """Execute the only kernel of a PTX text on the GPU. Integers that are addresses within one of the tensors, and the address in
    a tensor map (128 bytes of uint8), are translated to the GPU copies. ``seed`` and ``races`` are ignored. Returns 0."""
    function, parameters = _loaded(ptx)
    memory = _Memory([x for x in (*tensors, *scratch, *arguments) if isinstance(x, torch.Tensor)])
    values = []
    for (_, kind, size), given in zip(parameters, arguments, strict=True):
        if isinstance(given, bytes):
            values.append(ctypes.create_string_buffer(given, size))
            continue
        number = given.data_ptr() if isinstance(given, torch.Tensor) else given
        values.append(_TYPES[kind](memory.translated(number) if isinstance(number, int) else number))
    pointers = (c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
    extents = lambda given: (c_uint32 * 3)(*(*given, 1, 1)[:3])
    _call("cuFuncSetAttribute", function, SHARED_BYTES, c_int(shared_bytes))
    attribute = _Attribute(CLUSTER)
    attribute.value[:3] = extents(cluster)[:]
    clustered = any(n > 1 for n in cluster)
    if clustered:
        _call("cuFuncSetAttribute", function, CLUSTERS_OF_16, c_int(1))
    config = _Config(
        extents(grid), extents(block), shared_bytes, None, ctypes.pointer(attribute), int(clustered)
    )
    _call("cuLaunchKernelEx", byref(config), function, pointers, None)
    _call("cuCtxSynchronize")
    memory.back()
    memory.free()
    return 0


@functools.cache
def _some_address() -> int:
    """An address of GPU memory."""
    pointer = c_uint64()
    _call("cuMemAlloc_v2", byref(pointer), c_size_t(1 << 20))
    return pointer.value


def encode(form: Form) -> bytes:
    """A tensor map encoded by the driver. The driver may check the address: it gets one of GPU memory, which is then replaced."""
    rank = len(form.extents)
    buffer = ctypes.create_string_buffer(192)
    place = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % 64
    wide = lambda values: (c_uint64 * max(len(values), 1))(*values)
    narrow = lambda values: (c_uint32 * rank)(*values)
    _call(
        "cuTensorMapEncodeTiled", c_void_p(place), c_int(form.kind), c_uint32(rank), c_void_p(_some_address()),
        wide(form.extents), wide(form.strides), narrow(form.box), narrow([1] * rank), c_int(0), c_int(form.swizzle),
        c_int(form.promotion), c_int(form.fill),
    )  # fmt: skip
    ctypes.memmove(place, form.address.to_bytes(8, "little"), 8)
    return ctypes.string_at(place, 128)
