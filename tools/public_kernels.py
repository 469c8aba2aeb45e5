"""Run CUTLASS's examples of CuTe DSL primitives on ptx-emulator, unchanged, from a checkout of the user's.

    python tools/public_kernels.py CHECKOUT             # all of them: prints a table
    python tools/public_kernels.py CHECKOUT PATTERN ..  # those whose path contains a pattern

Each example runs in a process of its own. There, torch's CUDA tensors are CPU tensors, and `cute.compile` returns functions of
`ptx_emulator.load`. An example compares its result with torch itself: its outcome is "ok" if it says nothing and launched a kernel.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path("examples/python/CuTeDSL/experimental/primitives")
BLACKWELL = (
    "tcgen05/",
    "minimal_tensor_mma",
    "gemm_M128",
    "redux_sync",
    "tma_multicast",
)  # these need sm_100a
SECONDS = 300  # for one example
ALIGNED = 256


def arch_of(path: str) -> str:
    """Return the architecture that an example is compiled for."""
    return "sm_100a" if any(part in path for part in BLACKWELL) else "sm_90a"


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch: a CUDA device among its arguments becomes the CPU.

    Results start at a multiple of `ALIGNED` bytes, as on a GPU.
    """
    import torch

    def place(x: Any) -> Any:
        return "cpu" if isinstance(x, (str, torch.device)) and str(x).startswith("cuda") else x

    def call(*args: Any, **options: Any) -> Any:
        found = function(*map(place, args), **{k: place(v) for k, v in options.items()})
        if not isinstance(found, torch.Tensor) or found.data_ptr() % ALIGNED == 0:
            return found
        size = found.untyped_storage().nbytes()
        room = whole(size + ALIGNED, dtype=torch.uint8)
        start = -room.data_ptr() % ALIGNED
        moved = room[start : start + size - size % found.element_size()].view(found.dtype)
        return moved.as_strided(found.shape, found.stride(), moved.storage_offset()).copy_(found)

    whole = torch.empty if function is not torch.empty else function
    return call


def pretend(arch: str) -> None:
    """Let torch claim a GPU whose tensors lie in the CPU's memory, and the DSL compile for the emulator."""
    import torch
    from cutlass import cute

    import ptx_emulator

    class Stream:
        cuda_stream = 0

        def synchronize(self) -> None:
            """All launches have ended."""

    class Generator(torch.Generator):
        def __new__(cls, device: object = None) -> Any:
            return super().__new__(cls)

    capability = divmod(int(arch[3:-1]), 10)
    fakes: dict[str, Any] = {
        "is_available": lambda: True, "synchronize": lambda *_: None, "current_device": lambda: 0, "_lazy_init": lambda: None,
        "get_device_capability": lambda *_: capability, "current_stream": lambda *_: Stream(), "Stream": Stream,
    }  # fmt: skip
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    makers = "arange zeros ones empty full randn rand randint tensor randperm linspace eye as_tensor"
    for name in (
        *makers.split(),
        *(f"{x}_like" for x in ("zeros", "ones", "empty", "full", "randn", "rand")),
    ):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.to = on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda x, *_, **__: x  # type: ignore[method-assign]
    torch.Generator = Generator  # type: ignore[misc]
    compile_it = cute.compile

    def compiled(*args: Any, options: str = "", **others: Any) -> ptx_emulator.Function:
        given = set(options.split()) | {"--enable-tvm-ffi", "--keep-ptx"}
        with tempfile.TemporaryDirectory() as folder:
            all_options = f"{' '.join(sorted(given))} --gpu-arch {arch} --dump-dir {folder}"
            return ptx_emulator.load(compile_it(*args, options=all_options, **others))

    cute.compile = compiled


def run_one(path: Path) -> str:
    """Run an example in this process and return its outcome."""
    import ptx_emulator

    arch = arch_of(str(path))
    pretend(arch)
    sys.argv, found = [str(path)], "ok"
    with ptx_emulator.device(arch, sms=4) as device:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as error:
            found = f"exits with {error.code}" if error.code else found
        except Exception as error:  # noqa: BLE001 - any error is the outcome
            found = f"{type(error).__name__}: {getattr(error, 'message', str(error))}"
    return "no launch" if found == "ok" and not device.launches else found


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of NVIDIA/cutlass, or one example with --one")
    parser.add_argument("patterns", nargs="*", help="parts of the paths of examples")
    parser.add_argument("--one", action="store_true", help="run one example in this process")
    given = parser.parse_args()
    if given.one:
        print("OUTCOME", " ".join(run_one(given.checkout).split()))
        return
    folder = given.checkout / EXAMPLES
    if not folder.is_dir():
        parser.error(f"checkout: expected a folder with {EXAMPLES}, got {given.checkout}")
    print("| example | target | outcome |\n| --- | --- | --- |", flush=True)
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(folder))
        if given.patterns and not any(x in name for x in given.patterns):
            continue
        command = [sys.executable, __file__, "--one", str(path)]
        environment = {**os.environ, "CUTE_DSL_ARCH": arch_of(name), "PYTHONPATH": str(path.parent)}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            lines = [x[8:] for x in done.stdout.splitlines() if x.startswith("OUTCOME ")]
            outcome = lines[-1] if lines else f"ends with {done.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"not done after {SECONDS} s"
        print(f"| {name} | {arch_of(name)} | {outcome[:160].replace('|', '/')} |", flush=True)


if __name__ == "__main__":
    main()
