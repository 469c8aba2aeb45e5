"""Run public CuTe DSL kernels on ptx-emulator, unchanged, from checkouts of the user's.

    python tools/public_kernels.py FOLDER             # all of them: prints a table for each checkout
    python tools/public_kernels.py FOLDER PATTERN ..  # those whose name contains a pattern

The folder has checkouts of NVIDIA/cutlass, Dao-AILab/quack and Dao-AILab/flash-attention, or some of them, in folders of these names.

Each kernel runs in a process of its own. There, torch's CUDA tensors are CPU tensors, and `cute.compile` returns functions of
`ptx_emulator.load`; functions of the DSL that are called without it are compiled first. CUTLASS's examples compare their results with
torch themselves; the calls of `public_kernel_calls` do, too. The outcome is "ok" if nothing is said and a kernel was launched. Nothing is
timed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import inspect
import os
import runpy
import subprocess
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from public_kernel_calls import CALLS, SCRIPTS, SCRIPTS_FOLDER

REPOSITORIES = {
    "cutlass": "NVIDIA/cutlass",
    "quack": "Dao-AILab/quack",
    "flash-attention": "Dao-AILab/flash-attention",
}
EXAMPLES = Path("cutlass/examples/python/CuTeDSL/experimental/primitives")
BLACKWELL = (
    "tcgen05/",
    "minimal_tensor_mma",
    "gemm_M128",
    "redux_sync",
    "tma_multicast",
)  # these need sm_100a
SECONDS = 300  # for one example
ALIGNED = 256
SMS = 4
CUDA = 2  # DLDeviceType
ASSUME = "PUBLIC_KERNELS_ASSUME"  # to a process: what the kernel may rely on
ALIVE: list[weakref.ref[Any]] = []  # the tensors of this process
#: Parts of an error -> the assumption of `ptx_emulator.run` without which it is raised.
ASSUMPTIONS = {
    "tcgen05.ld in flight": "tcgen05.ld",
    "into its swizzle pattern": "swizzle",
    "all warps of a warpgroup must execute": "setmaxnreg",
    "written after the last wgmma.fence": "wgmma.fence",
}


def arch_of(path: str) -> str:
    """Return the architecture that a call or an example is compiled for."""
    if path in CALLS:
        return CALLS[path][0]
    if path in SCRIPTS:
        return SCRIPTS[path][0]
    return "sm_100a" if any(part in path for part in BLACKWELL) else "sm_90a"


def remembered(tensor: Any) -> Any:
    """Let launches access this tensor for as long as it lives: a kernel may get its address alone."""
    ALIVE[:] = [x for x in ALIVE if x() is not None] + [weakref.ref(tensor)]
    return tensor


def whole_ranges(tensors: Iterable[Any]) -> list[Any]:
    """Return tensors of bytes, one for each range of memory that the tensors touch: they may overlap, and have gaps."""
    import torch

    ranges: list[tuple[int, int]] = []
    for low, high in sorted(
        (
            x.data_ptr(),
            x.data_ptr() + x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))),
        )
        for x in tensors
        if x.numel()
    ):
        if ranges and low < ranges[-1][1]:
            first, last = ranges.pop()
            low, high = first, max(high, last)
        ranges.append((low, high))
    return [
        torch.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), dtype=torch.uint8)
        for low, high in ranges
    ]


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch: a CUDA device among its arguments becomes the CPU.

    Results start at a multiple of `ALIGNED` bytes, as on a GPU.
    """
    import torch

    def place(x: Any) -> Any:
        return "cpu" if isinstance(x, (str, torch.device)) and str(x).startswith("cuda") else x

    def call(*args: Any, **options: Any) -> Any:
        found = function(*map(place, args), **{k: place(v) for k, v in options.items()})
        if not isinstance(found, torch.Tensor):
            return found
        if found.data_ptr() % ALIGNED == 0:
            return remembered(found)
        size = found.untyped_storage().nbytes()
        room = whole(size + ALIGNED, dtype=torch.uint8)
        start = -room.data_ptr() % ALIGNED
        moved = room[start : start + size - size % found.element_size()].view(found.dtype)
        return remembered(moved.as_strided(found.shape, found.stride(), moved.storage_offset()).copy_(found))

    whole = torch.empty if function is not torch.empty else function
    return call


def pretend_gpu(capsule: object) -> None:
    """Let a DLPack capsule say that its tensor is on a GPU: the DSL traces other pointers for those of a CPU."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    device = pointer_of(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)  # DLTensor.device
    ctypes.c_int32.from_address(device).value = CUDA


def pretend(arch: str) -> None:
    """Let torch claim a GPU whose tensors lie in the CPU's memory, and the DSL compile for the emulator."""
    import cutlass.cuda
    import cutlass.utils
    import torch
    from cuda.bindings import driver
    from cutlass import cute
    from cutlass._mlir import ir
    from cutlass.base_dsl.dsl import BaseDSL, is_arg_annotation_constexpr
    from cutlass.base_dsl.tvm_ffi_builder import spec
    from cutlass.cute._tvm_ffi_args_spec_converter import ConverterContext
    from cutlass.cute.runtime import _Tensor

    import ptx_emulator
    from ptx_emulator.gpu import Device

    class Stream:
        cuda_stream = 0

        def synchronize(self) -> None:
            """All launches have ended."""

    class Generator(torch.Generator):
        def __new__(cls, device: object = None) -> Any:
            return super().__new__(cls)

    class Hardware:
        def __init__(self, device: int = 0) -> None:
            """Of any device."""

        def get_max_active_clusters(self, cluster_size: int, stream: object = None) -> int:
            return SMS // cluster_size

        def get_device_multiprocessor_count(self) -> int:
            return SMS

    capability = divmod(int(arch[3:-1]), 10)
    fakes: dict[str, Any] = {
        "is_available": lambda: True, "synchronize": lambda *_: None, "current_device": lambda: 0, "_lazy_init": lambda: None,
        "get_device_capability": lambda *_: capability, "current_stream": lambda *_: Stream(), "Stream": Stream,
        "default_stream": lambda *_: Stream(), "device_count": lambda: 1, "get_device_name": lambda *_: arch,
        "set_device": lambda *_: None, "empty_cache": lambda: None,
        "get_device_properties": lambda *_: types.SimpleNamespace(
            major=capability[0], minor=capability[1], multi_processor_count=SMS, name=arch
        ),
    }  # fmt: skip
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    success = driver.CUresult.CUDA_SUCCESS
    driver.cuInit, driver.cuDeviceGetCount = lambda *_: (success,), lambda: (success, 1)
    cutlass.cuda.initialize_cuda_context = lambda *_, **__: None
    cutlass.utils.HardwareInfo = cutlass.utils.hardware_info.HardwareInfo = Hardware
    torch.Tensor.is_cuda = property(lambda x: True)  # type: ignore[assignment]
    makers = "arange zeros ones empty full randn rand randint tensor randperm linspace eye as_tensor"
    for name in (
        *makers.split(),
        *(f"{x}_like" for x in ("zeros", "ones", "empty", "full", "randn", "rand")),
    ):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.to = on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda x, *_, **__: x  # type: ignore[method-assign]
    torch.Generator = Generator  # type: ignore[misc]
    custom_op = torch.library.custom_op

    def anywhere(*args: Any, device_types: object = None, **others: Any) -> Any:
        return custom_op(*args, **others)

    torch.library.custom_op = anywhere
    wrap = _Tensor.__init__

    def wrapped(self: Any, *args: Any, **others: Any) -> None:
        wrap(self, *args, **others)
        pretend_gpu(self._dlpack_data)

    _Tensor.__init__ = wrapped
    allocate, describe = ConverterContext.alloc_or_reuse_device_id, spec.Tensor.__init__

    def described(self: Any, *args: Any, device_type: str | None = None, **others: Any) -> None:
        """A tensor of the host code is one of a GPU."""
        describe(self, *args, device_type="cuda" if device_type == "cpu" else device_type, **others)

    ConverterContext.alloc_or_reuse_device_id = lambda self, kind, index: allocate(self, "cuda", 0)
    spec.Tensor.__init__ = described
    compile_it = cute.compile

    def compiled(*args: Any, options: str | None = None, **others: Any) -> ptx_emulator.Function:
        given = set((options or "").split()) | {"--enable-tvm-ffi", "--keep-ptx"}
        with tempfile.TemporaryDirectory() as folder:
            all_options = f"{' '.join(sorted(given))} --gpu-arch {arch} --dump-dir {folder}"
            return ptx_emulator.load(compile_it(*args, options=all_options, **others))

    cute.compile = compiled
    launch: Callable[..., None] = Device.launch

    def launched(device: Device, *args: Any) -> None:
        *others, tensors, cooperative = args
        known = [x for x in (one() for one in ALIVE) if x is not None]
        launch(device, *others, whole_ranges([*tensors, *known]), cooperative)

    mock.patch.object(Device, "launch", launched).start()
    in_order = BaseDSL._func_impl

    def run_now(dsl: Any, body: Any, *args: Any, **others: Any) -> Any:
        """A function of the DSL that the host calls, without `cute.compile`."""
        if others.get("compile_only") or ir.Context.current is not None:
            return in_order(dsl, body, *args, **others)
        others = {name: value for name, value in others.items() if name in inspect.signature(body).parameters}
        given = inspect.signature(body).bind(*args, **others)
        given.apply_defaults()
        values = [
            value
            for n, (name, value) in enumerate(given.arguments.items())
            if not is_arg_annotation_constexpr(given.signature.parameters[name].annotation, name, n, None)
        ]
        return cute.compile(body, *args, **others)(*values)

    BaseDSL._func_impl = run_now

    def once(function: Any, *, kernel_arguments: Any = None, **_: object) -> float:
        """In place of a benchmark: some examples call their kernel there alone."""
        if kernel_arguments is not None:
            function(*kernel_arguments.args, **kernel_arguments.kwargs)
        return 1.0

    class Profile(contextlib.nullcontext[Any]):
        def __init__(self, **_: object) -> None:
            super().__init__(self)

        def key_averages(self) -> Profile:
            return self

        def table(self, **_: object) -> str:
            return ""

    cute.testing.benchmark = once
    mock.patch.object(torch.profiler, "profile", Profile).start()


def run_one(folder: Path, name: str) -> str:
    """Run a call or an example in this process and return its outcome."""
    import ptx_emulator

    arch, path, arguments = arch_of(name), folder / EXAMPLES / name, ""
    if name in SCRIPTS:
        _, below, arguments = SCRIPTS[name]
        path = folder / SCRIPTS_FOLDER / below
    assume = [x for x in os.environ.get(ASSUME, "").split(",") if x]
    pretend(arch)
    sys.argv, found = [str(path), *arguments.split()], "ok"
    with ptx_emulator.device(arch, sms=SMS, assume=assume) as device:
        try:
            if name in CALLS:
                CALLS[name][1](folder)
            else:
                sys.path.insert(0, str(path.parent))
                runpy.run_path(str(path), run_name="__main__")
        except SystemExit as error:
            found = f"exits with {error.code}" if error.code else found
        except Exception as error:  # noqa: BLE001 - any error is the outcome
            found = f"{type(error).__name__}: {getattr(error, 'message', str(error))}"
    return "no launch" if found == "ok" and not device.launches else found


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout; "unknown" if git does not know it."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def outcome_of(folder: Path, name: str) -> str:
    """Return the outcome of a call or an example. If an assumption prevents an error, it runs again with it."""
    first = found = outcome_in_process(folder, name)
    assumed: list[str] = []
    while more := [x for text, x in ASSUMPTIONS.items() if text in found and x not in assumed]:
        assumed += more
        found = outcome_in_process(folder, name, assumed)
    if not assumed:
        return first
    return f"{found} if `assume` has {' and '.join(assumed)}; else {first}"


def outcome_in_process(folder: Path, name: str, assume: Sequence[str] = ()) -> str:
    """Run a call or an example in a process of its own and return its outcome."""
    command = [sys.executable, __file__, "--one", str(folder), name]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "CUTE_DSL_ARCH": arch_of(name), ASSUME: ",".join(assume)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {SECONDS} s"
    lines = [x[8:] for x in done.stdout.splitlines() if x.startswith("OUTCOME ")]
    return lines[-1] if lines else f"ends with {done.returncode}"


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help=f"holds checkouts: {', '.join(REPOSITORIES)}")
    parser.add_argument("patterns", nargs="*", help="parts of the names of kernels")
    parser.add_argument("--one", action="store_true", help="run the kernel of this name in this process")
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.one:
        print("OUTCOME", " ".join(run_one(folder, given.patterns[0]).split()))
        return
    found = [name for name in REPOSITORIES if (folder / name).is_dir()]
    if not found:
        parser.error(f"folder: expected one with checkouts named {', '.join(REPOSITORIES)}, got {folder}")
    for repository in found:
        names = [name for name in (*CALLS, *SCRIPTS) if name.startswith(f"{repository}/")]
        if repository == "cutlass":
            examples = folder / EXAMPLES
            names += sorted(str(path.relative_to(examples)) for path in examples.rglob("*.py"))
        names = [x for x in names if not given.patterns or any(part in x for part in given.patterns)]
        if names:
            print(f"\n{REPOSITORIES[repository]}, commit `{commit_of(folder / repository)}`\n")
            print("| kernel | target | outcome |\n| --- | --- | --- |", flush=True)
        for name in names:
            outcome = outcome_of(folder, name)[:160].replace("|", "/")
            shown = name.removeprefix(f"{repository}/").removesuffix(f" ({arch_of(name)})")
            print(f"| {shown} | {arch_of(name)} | {outcome} |", flush=True)


if __name__ == "__main__":
    main()
