"""The callable of a kernel, exported or just compiled: it packs the values of the argument struct and launches by
``cuLaunchKernelEx``."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from kda_core.errors import KdaError
from kda_cute.interface import KernelInterface
from kda_cute.store.driver import Driver, DriverError
from kda_cute.store.manifest import Described, layout

_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_OVERLAPS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


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
    """The memory of the launches of one thread on one device. The driver copies it during a launch.

    The driver gets the address of each parameter, not of the whole buffer (``CU_LAUNCH_PARAM_BUFFER_POINTER``): with that it refuses to
    capture a cooperative launch into a CUDA graph.
    """

    def __init__(self, handle: int, kernel: Described, parameters: bytes) -> None:
        self.buffer = ctypes.create_string_buffer(parameters, len(parameters))
        wanted = {
            _COOPERATIVE: (kernel.cooperative,),
            _CLUSTER: (kernel.cluster, 1, 1) if kernel.cluster > 1 else (0,),
            _OVERLAPS: (kernel.overlaps,),
        }
        attributes = [_Attribute(identity, 0, value) for identity, value in wanted.items() if value[0]]
        self.attributes = (_Attribute * len(attributes))(*attributes)
        self.config = _Config(
            (1, 1, 1), (kernel.threads, 1, 1), kernel.shared_bytes, None, ctypes.addressof(self.attributes),
            len(attributes),
        )  # fmt: skip
        start = ctypes.addressof(self.buffer)
        places = [start + parameter.offset for parameter in kernel.parameters]
        self.places = (ctypes.c_void_p * len(places))(*places)
        # made once: `Driver.launch_kernel` takes no numbers
        self.arguments = ctypes.byref(self.config), ctypes.c_void_p(handle), ctypes.byref(self.places), None


class Loaded(NamedTuple):
    """A kernel in the driver.

    Attributes:
        driver: the driver.
        handle: of the kernel, valid on every device.
    """

    driver: Driver
    handle: int

    @classmethod
    def of(cls, driver: Driver, cubin: bytes, kernel: Described) -> Loaded:
        """Loads a kernel. A thread without a current context gets that of torch's current device.

        Raises:
            DriverError: the driver cannot load it, or finds other parameters.
        """
        driver.make_current(driver.current_device())  # to read the parameters
        handle = driver.load(cubin, kernel.symbol)
        expected = [(one.offset, one.size) for one in kernel.parameters]
        found = driver.parameters(handle, len(expected) + 1)
        if found != expected:
            raise DriverError(
                f"the driver finds {len(found)} parameters at other places than the {len(expected)} of the kernel"
            )
        return cls(driver, handle)


class Launcher:
    """The callable of a kernel, with the arguments of ``kernel.__call__``: a tensor, which determines the device, and the values of
    the argument struct. It launches on torch's current stream, and is safe in threads.

    The tensor's device must be torch's current device.

    Args:
        kernel: its description.
        interface, config: of the kernel.
        load: returns the loaded kernel. Called before the first launch of a thread on a device.
    """

    def __init__(
        self, kernel: Described, interface: KernelInterface, config: Any, load: Callable[[], Loaded]
    ) -> None:
        self._kernel, self._interface, self._config, self._load = kernel, interface, config, load
        arguments: Any = interface.arguments(config)
        self._arguments, self._count, self._threads = arguments, len(arguments._fields), threading.local()
        self._launch = self._launch_of(self._count, ())

    def __call__(self, tensor: Any, *values: Any) -> None:
        self._launch(tensor, values)

    def bound(self, *last: Any) -> Callable[..., None]:
        """Returns the callable with the last values fixed: it takes the tensor and a tuple of the values before them, and packs only
        these. The grid must follow from the last values alone.

        See `kda_cute.arguments.bound`.
        """
        return self._launch_of(self._count - len(last), last)

    def _grid_of(self, count: int, last: tuple[Any, ...]) -> tuple[int, int, int]:
        """Returns the grid of fixed values.

        Raises:
            TypeError: it follows from one of the first `count` values, which are open.
        """
        try:
            grid = self._interface.grid(self._config, self._arguments._make([*[None] * count, *last]))
            struct.pack("@3I", *grid)
        except (TypeError, struct.error) as error:
            raise TypeError(f"{self._interface.name}: its grid needs a value that is not fixed") from error
        return grid

    def _ready(self, device: int) -> Loaded:
        """Returns the loaded kernel, ready for launches of this thread on a device.

        Raises:
            LaunchError: there is no such device, or the driver cannot load the kernel.
        """
        name, ready = self._interface.name, self._threads.__dict__.setdefault("ready", set())
        if device < 0:
            raise LaunchError(f"{name}: expected a CUDA tensor, got one on a CPU")
        try:
            loaded = self._load()
            if device not in ready:  # not in the capture of a CUDA graph, if the kernel has run before
                loaded.driver.prepare(loaded.handle, device, self._kernel.shared_bytes)
        except DriverError as error:
            raise LaunchError(f"{name}: {error}") from error
        ready.add(device)
        return loaded

    def _launch_of(self, count: int, last: tuple[Any, ...]) -> Callable[..., None]:
        """Returns the callable of a tuple of the first `count` values."""
        kernel, interface, config = self._kernel, self._interface, self._config
        pack = struct.Struct(layout(self._arguments, count)).pack_into
        make, find_grid, set_grid = self._arguments._make, interface.grid, struct.Struct("@3I").pack_into
        parameters = struct.pack(layout(self._arguments), *[0] * count, *last)
        fixed_grid = self._grid_of(count, last) if last else None
        threads = threading.local()

        def prepare(device: int) -> tuple[Any, ...]:
            driver, handle = self._ready(device)
            call = _Call(handle, kernel, parameters)
            if fixed_grid is not None:
                set_grid(call.config, 0, *fixed_grid)
            fill = functools.partial(pack, call.buffer, 0)
            start = functools.partial(driver.launch_kernel, *call.arguments)
            made = fill, call.config, driver.stream, start, call
            return threads.__dict__.setdefault("calls", {}).setdefault(device, made)

        def launch(tensor: Any, values: tuple[Any, ...]) -> None:
            device = tensor.get_device()
            try:
                fill, launch_config, stream, start, _ = threads.calls[device]
            except (AttributeError, KeyError):
                fill, launch_config, stream, start, _ = prepare(device)
            fill(*values)
            if fixed_grid is None:
                set_grid(launch_config, 0, *find_grid(config, make(values)))
            launch_config.stream = stream(device)
            if code := start():
                raise LaunchError(
                    f"{interface.name}: cuLaunchKernelEx: {self._load().driver.error_name(code)}; grid {list(launch_config.grid)}, "
                    f"{kernel.threads} threads, {kernel.shared_bytes} bytes of dynamic shared memory"
                )

        return launch
