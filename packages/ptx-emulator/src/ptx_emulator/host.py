"""Runs the DSL's compiled host code on the CPU, against a replacement of the CUDA runtime.

A compiled function is exported as an object file. It calls CUDA, and TVM-FFI's error functions, through a few undefined
symbols. This module links these symbols to the functions below. The host code then computes grid, shared memory and
parameters exactly as for a GPU, and its launches go to the emulator.
"""

from __future__ import annotations

import ctypes
import math
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p as pointer
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ptx_emulator import tensors
from ptx_emulator.errors import PtxError
from ptx_emulator.gpu import SHARED_LIMIT, Device, current_device
from ptx_emulator.launch import kernel_of

NAME = "emulated"  # name of the exported function
INVALID_VALUE, RAISED = 1, -1  # cudaErrorInvalidValue; TVM-FFI's status for "an error was set"

# The modelled values of cudaDeviceAttr, CUfunction_attribute, cudaFuncAttribute and cudaLaunchAttributeID.
SHARED_OPTIN, SHARED_STATIC = 97, 1
KERNEL_ATTRIBUTES = {8: "dynamic shared memory", 9: "carveout", 14: "cluster larger than is portable"}
COOPERATIVE, CLUSTER, OVERLAP, PREFERRED_CLUSTER = 2, 4, 6, 11


class _Tensor(ctypes.Structure):  # DLTensor
    _fields_ = (
        ("data", pointer), ("device", c_int32), ("index", c_int32), ("ndim", c_int32),
        ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16),
        ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)), ("byte_offset", c_uint64),
    )  # fmt: skip


class _Value(ctypes.Union):
    _fields_ = (("integer", c_int64), ("real", ctypes.c_double), ("address", pointer))


class _Any(ctypes.Structure):  # TVMFFIAny
    _fields_ = (("kind", c_int32), ("padding", c_uint32), ("value", _Value))


class _Attribute(ctypes.Structure):  # cudaLaunchAttribute
    _fields_ = (("identity", c_uint32), ("padding", c_uint32), ("value", c_uint32 * 16))


class _Config(ctypes.Structure):  # cudaLaunchConfig_t
    _fields_ = (
        ("grid", c_uint32 * 3), ("block", c_uint32 * 3), ("shared_bytes", c_size_t), ("stream", pointer),
        ("attributes", POINTER(_Attribute)), ("count", c_uint32),
    )  # fmt: skip


class _Array(ctypes.Structure):  # ffi::ArrayObj: TVMFFIObject, then TVMFFISeqCell
    _fields_ = (
        ("references", c_uint64), ("kind", c_int32), ("padding", c_uint32), ("deleter", pointer),
        ("data", POINTER(_Any)), ("size", c_int64), ("capacity", c_int64), ("data_deleter", pointer),
    )  # fmt: skip


NONE, INTEGER, BOOLEAN, REAL, OPAQUE, TENSOR, ARRAY = 0, 1, 2, 3, 4, 7, 71  # TVMFFITypeIndex
_CUDA = 2  # DLDeviceType
_DTYPES = {  # (DLDataTypeCode, bits)
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8),
    torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16), torch.bool: (6, 8),
    torch.float8_e4m3fn: (10, 8), torch.float8_e4m3fnuz: (11, 8), torch.float8_e5m2: (12, 8), torch.float8_e5m2fnuz: (13, 8),
    torch.float8_e8m0fnu: (14, 8),
}  # fmt: skip

_DSL_TYPES = {  # name of the DSL's class -> (DLDataTypeCode, bits)
    "Int4": (0, 4), "Int8": (0, 8), "Int16": (0, 16), "Int32": (0, 32), "Int64": (0, 64),
    "Uint8": (1, 8), "Uint16": (1, 16), "Uint32": (1, 32), "Uint64": (1, 64), "Boolean": (6, 8),
    "Float16": (2, 16), "BFloat16": (4, 16), "Float32": (2, 32), "TFloat32": (2, 32), "Float64": (2, 64),
    "Float8E4M3FN": (10, 8), "Float8E5M2": (12, 8), "Float8E8M0FNU": (14, 8),
    "Float6E2M3FN": (15, 6), "Float6E3M2FN": (16, 6), "Float4E2M1FN": (17, 4),
}  # fmt: skip

Argument: TypeAlias = "torch.Tensor | float | None | tuple[Argument, ...] | list[Argument]"

_ERRORS = {b"TypeError": TypeError, b"ValueError": ValueError, b"IndexError": IndexError}

#: A destructor calls this symbol, possibly after Python has shut down. So it is not a Python callback.
_UNLOAD = "define void @cuda_dialect_unload_library_once(ptr %library) { ret void }"


#: Undefined symbols that the linker provides itself.
LINKED = {"_GLOBAL_OFFSET_TABLE_", "cuda_dialect_unload_library_once"}


def undefined_symbols(content: bytes) -> set[str]:
    """Return the names of the symbols that an ELF object of 64 bits expects from elsewhere, without those of the C library."""
    (sections,) = struct.unpack_from("<Q", content, 0x28)
    size, count = struct.unpack_from("<HH", content, 0x3A)
    # Per section: type, offset, bytes, the linked section of names.
    headers = [struct.unpack_from("<4xI16xQQI", content, sections + n * size) for n in range(count)]
    found = set()
    for kind, offset, length, names in headers:
        if kind != 2:  # SHT_SYMTAB
            continue
        for place in range(offset, offset + length, 24):
            name, _, _, section = struct.unpack_from("<IBBH", content, place)
            if name and section == 0:
                start = headers[names][1] + name
                found.add(content[start : content.index(b"\0", start)].decode())
    # Not those of the whole process: it holds the DSL's runtime, which needs a GPU.
    libraries = [ctypes.CDLL(name) for name in ("libc.so.6", "libm.so.6")]
    return {name for name in found if not any(hasattr(library, name) for library in libraries)}


class _Call(threading.local):
    """State of a thread's current call: the tensors among its arguments, and the first error of a callback."""

    tensors: Sequence[torch.Tensor] = ()
    error: BaseException | None = None


class Function:
    """A compiled DSL function whose launches run on the open `device`. Created by `load`, or from an exported function."""

    def __init__(self, ptx: str, content: bytes, name: str = NAME):
        """Link the host code of an exported function.

        Args:
            ptx: the PTX of its kernels.
            content: the object file of ``export_to_c``.
            name: the ``function_name`` of ``export_to_c``.

        Raises:
            PtxError: the host code calls a function that is not modelled.
        """
        import llvmlite.binding as llvm

        self.ptx = ptx
        self._call = _Call()
        self._kernels: list[str] = []  # a kernel's handle is its index + 1
        # Keep the callbacks alive: ctypes frees those without a reference.
        symbols = self._symbols()
        # Without this check the linker ends the process.
        if unknown := undefined_symbols(content) - symbols.keys() - LINKED:
            raise PtxError(f"the host code calls {', '.join(sorted(unknown))}, which is not modelled")
        self._callbacks = {name: kind(self._caught(body)) for name, (kind, body) in symbols.items()}
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._jit = llvm.create_lljit_compiler(use_jit_link=True)
        library = llvm.JITLibraryBuilder().add_object_img(content).add_ir(_UNLOAD)
        for symbol, callback in self._callbacks.items():
            library.import_symbol(symbol, ctypes.cast(callback, pointer).value)
        entry = f"__tvm_ffi_{name}"
        self._library = library.export_symbol(entry).link(self._jit, NAME)
        self._entry = ctypes.CFUNCTYPE(c_int, pointer, POINTER(_Any), c_int32, POINTER(_Any))(
            self._library[entry]
        )

    def __call__(self, *arguments: Argument) -> None:
        """Run the host code and its launches to their end.

        Args:
            arguments: those of the DSL's function, with dense CPU tensors in place of GPU tensors; the DSL's ``from_dlpack`` and
                ``make_ptr`` of CPU tensors; numbers, the DSL's too; None; tuples and lists of all these. The memory behind a pointer
                belongs to `device`'s ``tensors``.

        Raises:
            PtxError, ExecutionError: see `run`.
            TypeError, ValueError: the host code refuses the arguments, with its own message; or an argument is none of the above.
            RuntimeError: no device is open.
        """
        current_device()
        values = (_Any * max(len(arguments), 1))()
        kept = [_fill(value, argument) for value, argument in zip(values, arguments)]
        self._call.tensors = _tensors_of(arguments)
        self._call.error = None
        try:
            status = self._entry(None, values, len(arguments), ctypes.byref(_Any()))
            error = self._call.error
        finally:
            self._call.tensors, self._call.error = (), None
            del kept
        if error is not None:
            raise error
        if status:
            raise RuntimeError(f"the host code returned {status}")

    # ---- the replacement of the CUDA runtime

    def _caught(self, body: Callable[..., int | None]) -> Callable[..., int | None]:
        """Wrap a callback. Exceptions cannot pass through C, so `__call__` raises the first one after the call returns."""

        def caught(*arguments: Any) -> int | None:
            try:
                return body(*arguments)
            except BaseException as error:  # noqa: BLE001 - also KeyboardInterrupt
                self._call.error = self._call.error or error
                return INVALID_VALUE

        return caught

    def _symbols(self) -> dict[str, tuple[Any, Callable[..., int | None]]]:
        """Return the C type and the body of each function that host code calls. Those of CUDA return 0 or an error code."""

        def status(*kinds: Any) -> Any:
            return ctypes.CFUNCTYPE(c_int, *kinds)

        nothing = ctypes.CFUNCTYPE(None, pointer, pointer)
        number, address, words = POINTER(c_int), POINTER(c_uint64), POINTER(c_uint32)
        return {
            "_cudaGetDevice": (status(number), lambda out: _put(out, 0)),
            "_cudaSetDevice": (status(c_int), lambda index: 0),
            "_cudaDeviceGetAttribute": (status(number, c_int, c_int), self._device_attribute),
            "_cudaLibraryLoadData": (
                status(address, *[pointer] * 3, c_uint32, *[pointer] * 2, c_uint32),
                lambda out, *_: _put(out, 1),
            ),
            "_cudaLibraryGetKernel": (status(address, pointer, c_char_p), self._kernel),
            "_cuKernelGetAttribute": (status(number, c_int, c_uint64, c_int), self._kernel_attribute),
            "_cudaFuncSetAttribute": (status(c_uint64, c_int, c_int), self._set_attribute),
            "_cudaKernelSetAttributeForDevice": (status(c_uint64, c_int, c_int, c_int), self._set_attribute),
            "_cudaLaunchKernelEx": (status(POINTER(_Config), c_uint64, POINTER(pointer)), self._launch),
            "cuda_dialect_init_library_once": (status(address, pointer, pointer, pointer), self._initialize),
            "_cuTensorMapEncodeTiled": (
                status(pointer, c_int, c_uint32, pointer, *[address] * 2, *[words] * 2, *[c_int] * 4),
                self._encode_tensor_map,
            ),
            # The runtime's own function ends the process. `_caught` already holds the error, and `_launch` starts no kernel then.
            "cuda_dialect_assert_success": (ctypes.CFUNCTYPE(None, c_int), lambda code: None),
            "TVMFFIEnvGetStream": (ctypes.CFUNCTYPE(pointer, c_int32, c_int32), lambda device, index: 0),
            "TVMFFIErrorSetRaisedFromCStr": (ctypes.CFUNCTYPE(None, c_char_p, c_char_p), self._refuse),
            "TVMFFIErrorSetRaisedFromCStrParts": (
                ctypes.CFUNCTYPE(None, c_char_p, POINTER(c_char_p), c_int32),
                lambda kind, parts, count: self._refuse(
                    kind, b"".join(parts[n] or b"" for n in range(count))
                ),
            ),
            "CuteDSLRT_TVMFFISetRaisedCudaError": (
                nothing,
                lambda message, code: None,
            ),  # `_caught` already holds the error
            "CuteDSLRT_TVMFFISetRaisedCudaLaunchError": (nothing, lambda message, code: None),
        }

    def _refuse(self, kind: bytes, message: bytes) -> None:
        """Raise the host code's own error."""
        raise _ERRORS.get(kind, RuntimeError)(message.decode())

    def _initialize(self, library: Any, load: int, load_to_device: int, raised: int) -> int:
        if not library[0]:
            found = c_uint64(0)
            made = ctypes.CFUNCTYPE(c_int, POINTER(c_uint64))
            placed = ctypes.CFUNCTYPE(c_int, POINTER(c_uint64), c_int)
            if made(load)(ctypes.byref(found)) or placed(load_to_device)(ctypes.byref(found), 0):
                return RAISED
            library[0] = found.value
        return 0

    def _device_attribute(self, out: Any, attribute: int, index: int) -> int:
        if attribute != SHARED_OPTIN:
            raise PtxError(f"the host code reads cudaDeviceAttr {attribute}, which is not modelled")
        return _put(out, SHARED_LIMIT)

    def _kernel(self, out: Any, library: int, name: bytes) -> int:
        self._kernels.append(name.decode())
        return _put(out, len(self._kernels))

    def _kernel_attribute(self, out: Any, attribute: int, kernel: int, index: int) -> int:
        if attribute != SHARED_STATIC:
            raise PtxError(f"the host code reads CUfunction_attribute {attribute}, which is not modelled")
        return _put(out, kernel_of(self.ptx, self._kernels[kernel - 1]).static_bytes)

    def _set_attribute(self, kernel: int, attribute: int, value: int, index: int = 0) -> int:
        if attribute not in KERNEL_ATTRIBUTES:
            raise PtxError(f"the host code sets cudaFuncAttribute {attribute}, which is not modelled")
        return 0

    def _encode_tensor_map(
        self, out: int, kind: int, rank: int, place: int | None, extents: Any, strides: Any, box: Any, steps: Any, *rest: int
    ) -> int:  # fmt: skip
        if not 1 <= rank <= 5:
            raise ValueError(f"cuTensorMapEncodeTiled: tensorRank: expected 1 to 5, got {rank}")
        raw = tensors.encoded(
            kind, place or 0, extents[:rank], strides[: rank - 1] if rank > 1 else (), box[:rank], steps[:rank], *rest
        )  # fmt: skip
        ctypes.memmove(out, raw, len(raw))
        return 0

    def _launch(self, config: Any, kernel: int, values: Any) -> int:
        if self._call.error is not None:
            return INVALID_VALUE
        given = config.contents
        cooperative, cluster = False, (1, 1, 1)
        for n in range(given.count):
            attribute = given.attributes[n]
            if attribute.identity == COOPERATIVE:
                cooperative = attribute.value[0] != 0
            elif attribute.identity == CLUSTER:
                cluster = tuple(attribute.value[:3])
            # Both are optional: launches run one after the other, and all clusters have the extents that a launch must have.
            elif attribute.identity not in (OVERLAP, PREFERRED_CLUSTER):
                raise PtxError(
                    f"the host code sets cudaLaunchAttributeID {attribute.identity}, which is not modelled"
                )
        name = self._kernels[kernel - 1]
        parameters = kernel_of(self.ptx, name).kernel.parameters
        arguments = [ctypes.string_at(values[n], size) for n, (_, _, size) in enumerate(parameters)]
        device: Device = current_device()
        device.launch(
            self.ptx, name, tuple(given.grid), tuple(given.block), cluster, given.shared_bytes, arguments,
            self._call.tensors, cooperative,
        )  # fmt: skip
        return 0


def _put(out: Any, value: int) -> int:
    """Store the result of a CUDA function; return cudaSuccess."""
    out[0] = value
    return 0


def _fill(value: _Any, argument: object) -> Any:
    """Fill ``value`` with an argument, as TVM-FFI passes it. Returns an object to keep alive during the call.

    Tensors claim to be on a GPU, as the host code requires.
    """
    if argument is None:
        value.kind = NONE
    elif isinstance(argument, bool):
        value.kind, value.value.integer = BOOLEAN, argument
    elif isinstance(argument, int):
        value.kind = INTEGER
        value.value.integer = argument
    elif isinstance(argument, float):
        value.kind, value.value.real = REAL, argument
    elif hasattr(argument, "__tvm_ffi_int__"):  # TVM-FFI's protocol, of the DSL's numbers
        value.kind, value.value.integer = INTEGER, argument.__tvm_ffi_int__()
    elif hasattr(argument, "__tvm_ffi_float__"):
        value.kind, value.value.real = REAL, argument.__tvm_ffi_float__()
    elif isinstance(argument, torch.Tensor):
        if argument.device.type != "cpu" or argument.dtype not in _DTYPES:
            raise ValueError(
                f"expected a CPU tensor of a type that TVM-FFI knows, got {argument.dtype} on {argument.device}"
            )
        return _fill_tensor(
            value, argument.data_ptr(), (*_DTYPES[argument.dtype], 1), argument.shape, argument.stride()
        )
    elif _is_dsl_tensor(argument):
        given: Any = argument
        return _fill_tensor(value, given.data_ptr, *described(given))
    elif hasattr(argument, "__tvm_ffi_opaque_ptr__"):  # TVM-FFI's protocol, of the DSL's pointers
        value.kind, value.value.address = OPAQUE, int(argument.__tvm_ffi_opaque_ptr__())
    elif (
        type(argument).__name__ == "CUstream"
    ):  # of cuda-python; launches run one after the other on any stream
        value.kind, value.value.address = OPAQUE, 0
    elif isinstance(argument, (tuple, list)):
        values = (_Any * max(len(argument), 1))()
        kept = [_fill(one, x) for one, x in zip(values, argument)]
        # The host code only borrows the array: one reference stays here.
        array = _Array(1, ARRAY, 0, None, values, len(argument), len(argument), None)
        value.kind, value.value.address = ARRAY, ctypes.addressof(array)
        return array, values, kept
    else:
        raise TypeError(
            f"an argument of type {type(argument).__name__}: expected a tensor, a number, None, or a tuple or list of them"
        )
    return None


def _fill_tensor(
    value: _Any, address: int, kind: tuple[int, int, int], shape: Sequence[int], strides: Sequence[int]
) -> _Tensor:
    """Fill ``value`` with a tensor. ``kind``: DLDataTypeCode, bits and lanes."""
    extents, steps = ((c_int64 * max(len(x), 1))(*x) for x in (shape, strides))
    tensor = _Tensor(address, _CUDA, 0, len(shape), *kind, extents, steps, 0)
    value.kind, value.value.address = TENSOR, ctypes.addressof(tensor)
    return tensor


def _is_dsl_tensor(argument: object) -> bool:
    """Return whether this is a result of the DSL's ``from_dlpack``. Its ``__class__`` claims another class."""
    return type(argument).__name__ == "_Tensor" and hasattr(argument, "element_type")


def described(argument: Any) -> tuple[tuple[int, int, int], list[int], list[int]]:
    """Return the type (DLDataTypeCode, bits, lanes), the shape and the strides of a DSL tensor, as its host code expects them.

    Host code counts pairs of 4-bit floating-point numbers along the dimension whose stride is always 1.
    """
    name, shape, strides = argument.element_type.__name__, list(argument.shape), list(argument.stride)
    if made := getattr(argument, "_tvm_ffi_tensor", None):  # of ``enable_tvm_ffi``: it keeps its own type
        return (made.dtype.type_code, made.dtype.bits, made.dtype.lanes), shape, strides
    if name not in _DSL_TYPES:
        raise ValueError(f"a tensor of {name}: expected one of {', '.join(_DSL_TYPES)}")
    code, bits = _DSL_TYPES[name]
    if name != "Float4E2M1FN":
        return (code, bits, 1), shape, strides
    fixed = [
        n
        for n, (stride, free) in enumerate(zip(strides, argument.dynamic_strides_mask))
        if stride == 1 and not free
    ]
    if not fixed:
        raise ValueError(
            f"a tensor of {name}: expected a dimension whose stride is always 1, got strides {strides}"
        )
    shape = [extent // 2 if n == fixed[0] else extent for n, extent in enumerate(shape)]
    strides = [stride if n == fixed[0] else stride // 2 for n, stride in enumerate(strides)]
    return (code, bits, 2), shape, strides


def _tensors_of(argument: object) -> list[torch.Tensor]:
    """Return the tensors of an argument, those in tuples and lists included."""
    if isinstance(argument, (tuple, list)):
        return [x for one in argument for x in _tensors_of(one)]
    if _is_dsl_tensor(argument):
        given: Any = argument
        if not math.prod(given.shape):
            return []
        given.load_dltensor()
        step = -(-given._dltensor_wrapper.dtype.width // 8)  # bytes of an element of the tensor behind it
        size = step * (1 + sum((extent - 1) * stride for extent, stride in zip(given.shape, given.stride)))
        return [torch.frombuffer((c_uint8 * size).from_address(given.data_ptr), dtype=torch.uint8)]
    return [argument] if isinstance(argument, torch.Tensor) else []


def load(compiled: Any) -> Function:
    """Load a compiled DSL function, to call within `device`.

    Args:
        compiled: the result of ``cute.compile(.., options="--enable-tvm-ffi --keep-ptx --gpu-arch ..")``.

    Raises:
        ValueError: the function was compiled without ``--keep-ptx``.
        PtxError: the host code calls a function that is not modelled.
    """
    ptx = getattr(compiled, "__ptx__", None)
    if not ptx:
        raise ValueError(
            "compiled: the function has no PTX; compile it with options='--enable-tvm-ffi --keep-ptx ..'"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.o"
        compiled.export_to_c(str(path), function_name=NAME)
        return Function(ptx, path.read_bytes())
