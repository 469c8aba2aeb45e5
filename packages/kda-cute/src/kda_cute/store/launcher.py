"""The callable of an exported kernel: it packs the values of the argument struct and launches by ``cuLaunchKernelEx``."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

from kda_core.errors import KdaError
from kda_cute.interface import KernelInterface
from kda_cute.store.driver import Driver
from kda_cute.store.manifest import Exported, layout

_COOPERATIVE, _OVERLAPS = (
    2,
    6,
)  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_BUFFER, _BUFFER_BYTES, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*


class LaunchError(KdaError, RuntimeError):
    """The driver refused a launch."""


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("identity", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class _Call:
    """The memory of the launches of one thread on one device. The driver copies it during a launch."""

    def __init__(self, kernel: Exported, parameter_bytes: int) -> None:
        self.buffer = ctypes.create_string_buffer(parameter_bytes)
        self.size = ctypes.c_size_t(parameter_bytes)
        identities = [
            i for i, wanted in ((_COOPERATIVE, kernel.cooperative), (_OVERLAPS, kernel.overlaps)) if wanted
        ]
        self.attributes = (_Attribute * len(identities))(*(_Attribute(i, 0, (1,)) for i in identities))
        self.config = _Config(
            (1, 1, 1), (kernel.threads, 1, 1), kernel.shared_bytes, None, ctypes.addressof(self.attributes),
            len(identities),
        )  # fmt: skip
        self.extra = (ctypes.c_void_p * 5)(
            _BUFFER, ctypes.addressof(self.buffer), _BUFFER_BYTES, ctypes.addressof(self.size), _END
        )
        self.arguments = ctypes.addressof(self.config), ctypes.addressof(self.extra)


def launcher(
    driver: Driver, handle: int, kernel: Exported, interface: KernelInterface, config: Any
) -> Callable[..., None]:
    """Returns the callable of a loaded kernel, with the arguments of ``kernel.__call__``: a tensor, which determines the device,
    and the values of the argument struct. It launches on torch's current stream, and is safe in threads.

    The tensor's device must be torch's current device.
    """
    arguments = interface.arguments(config)
    buffer_format = struct.Struct(layout(arguments))
    pack, make, grid, parameter_bytes = (
        buffer_format.pack_into,
        arguments._make,  # type: ignore[attr-defined]
        interface.grid,
        buffer_format.size,
    )
    set_grid = struct.Struct("@3I").pack_into
    launch_kernel, stream = driver.launch_kernel, driver.stream
    threads = threading.local()

    def prepare(device: int) -> _Call:
        if device < 0:
            raise LaunchError(f"{interface.name}: expected a CUDA tensor, got one on a CPU")
        driver.prepare(handle, device, kernel.shared_bytes)
        calls = threads.__dict__.setdefault("calls", {})
        return calls.setdefault(device, _Call(kernel, parameter_bytes))

    def launch(tensor: Any, *values: Any) -> None:
        device = tensor.get_device()
        try:
            call = threads.calls[device]
        except (AttributeError, KeyError):
            call = prepare(device)
        pack(call.buffer, 0, *values)
        set_grid(call.config, 0, *grid(config, make(values)))
        call.config.stream = stream(device)
        at, extra = call.arguments
        if code := launch_kernel(at, handle, None, extra):
            raise LaunchError(
                f"{interface.name}: cuLaunchKernelEx: {driver.error_name(code)}; grid {list(call.config.grid)}, "
                f"{kernel.threads} threads, {kernel.shared_bytes} bytes of dynamic shared memory"
            )

    return launch
