"""The ptxas report of a kernel: registers, spills and advisories. Needs no GPU.

The DSL contains ptxas but prints none of its messages. So the kernel is compiled again, and its PTX is passed to ``ptxas -v`` of
PyPI's ``nvidia-cuda-nvcc``. That wheel must be at least as new as the DSL's own compiler (CUDA 13.4 for 4.8), or it refuses the
PTX. At the same version the machine code is the same.

    python -m kda_cute.jit.ptxas package.module:KERNELS --arch sm_90a

prints a table and exits with 1 if a kernel has problems. ``KERNELS()`` returns (kernel class, configuration) pairs.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from kda_core.errors import ArgumentError, CompileError, KdaError
from kda_cute.jit.cpus import usable_cpus
from kda_cute.jit.dsl import with_ptx
from kda_cute.jit.key import Variant
from kda_cute.jit.target import check_arch

PACKAGE = "nvidia-cuda-nvcc"

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
#: Numbered advisories of ptxas, such as C7510 (wgmma serialized), C7512, C7517 and C7518 (a wait was inserted), and its
#: warnings, such as a .minnctapersm or a setmaxnreg that it ignores.
_COMPLAINT = re.compile(r"\(C\d+\)|\bwarning\s*:|performance loss", re.IGNORECASE)


@dataclass(frozen=True)
class Usage:
    """The resources of an entry point, or of a function that was not inlined.

    Attributes:
        name: of the function, shortened.
        registers: for each thread; 0 for a function that is not an entry point.
        smem: static shared memory in bytes, without the dynamic part of a launch.
        stack, spill_stores, spill_loads: local memory in bytes for each thread.
    """

    name: str
    registers: int = 0
    smem: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


@dataclass(frozen=True)
class Report:
    """The report of ptxas on a variant.

    Attributes:
        name: of the variant.
        usage: of each function.
        complaints: advisories and warnings.
        spill_allowance: the spills that the kernel class accepts, in bytes for each thread.
    """

    name: str
    usage: tuple[Usage, ...]
    complaints: tuple[str, ...]
    spill_allowance: int = 0

    def problems(self) -> tuple[str, ...]:
        """Returns what must fail a build: spills beyond the allowance, a stack without spills (from arrays that are indexed
        dynamically), and every complaint."""
        found = []
        for use in self.usage:
            if max(use.spill_stores, use.spill_loads) > self.spill_allowance:
                found.append(
                    f"{use.name}: spills {use.spill_stores} bytes (stores), {use.spill_loads} (loads), "
                    f"allowed {self.spill_allowance}"
                )
            elif use.stack and not use.spill_stores:
                found.append(f"{use.name}: {use.stack} bytes of stack without spills")
        return (*found, *self.complaints)


def ptxas_path() -> Path:
    """Returns the path of ptxas in PyPI's ``nvidia-cuda-nvcc``.

    Raises:
        CompileError: as `tool_path`.
    """
    return tool_path("ptxas", PACKAGE)


def tool_path(tool: str, package: str) -> Path:
    """Returns the path of a CUDA tool in one of CUDA's packages on PyPI. A tool on ``PATH`` is not used, because its version is
    unknown.

    Raises:
        CompileError: the package is not installed or lacks the tool. The message contains the command that installs it.
    """
    try:
        files = metadata.distribution(package).files or ()
    except metadata.PackageNotFoundError:
        raise CompileError(f"{tool} is not installed: pip install {package}") from None
    for file in files:
        if file.name == tool and (path := Path(str(file.locate()))).is_file():
            return path
    raise CompileError(
        f"{package} {metadata.version(package)} holds no {tool}: pip install --force-reinstall {package}"
    )


def parse(name: str, output: str) -> Report:
    """Parses the text that ``ptxas -v`` prints.

    Raises:
        CompileError: the text has no entry point, or lacks its resources. A text that cannot be parsed must not pass for a
            kernel without problems.
    """
    usage: dict[str, dict[str, int]] = {}
    entry = current = ""
    for line in output.splitlines():
        if match := _ENTRY.search(line):
            entry = current = match[1]
            usage.setdefault(entry, {})
        elif match := _PROPERTIES.search(line):
            current = match[1]
        elif match := _STACK.search(line):
            stack, stores, loads = map(int, match.groups())
            usage.setdefault(current, {}).update(stack=stack, spill_stores=stores, spill_loads=loads)
        elif match := _USED.search(line):
            smem = _SMEM.search(line)
            usage.setdefault(entry, {}).update(registers=int(match[1]), smem=int(smem[1]) if smem else 0)
    if not entry or any("stack" not in found for found in usage.values()) or "registers" not in usage[entry]:
        raise CompileError(f"{name}: the output of ptxas cannot be parsed:\n{output}")
    complaints = [
        re.sub(r"^ptxas\s+", "", _shorten(line.strip()))
        for line in output.splitlines()
        if _COMPLAINT.search(line)
    ]
    return Report(name, tuple(Usage(_shorten(key), **use) for key, use in usage.items()), tuple(complaints))


def _shorten(text: str) -> str:
    """Removes the mangled argument types from the DSL's names (hundreds of characters)."""
    return re.sub(r"(kernel_cutlass_\w+?)_object_at_\w*", r"\1", text)


def assemble(
    name: str, ptx: str, arch: str, options: Sequence[str] = (), cubin: Path | None = None
) -> Report:
    """Runs ``ptxas -v`` on PTX and returns the report.

    Args:
        name: for messages.
        options: further options of ptxas.
        cubin: the file for the machine code; None to discard it.

    Raises:
        CompileError: ptxas fails; with its message.
    """
    ptxas = ptxas_path()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            str(ptxas),
            f"-arch={arch}",
            "-v",
            *options,
            str(source),
            "-o",
            str(cubin or Path(folder) / "kernel.cubin"),
        ]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
    output = result.stdout + result.stderr
    if result.returncode != 0:
        hint = ""
        if "Unsupported .version" in output:
            version = metadata.version(PACKAGE)
            hint = f"\n{PACKAGE} {version} is older than the DSL's compiler: pip install -U {PACKAGE}"
        raise CompileError(f"{name}: ptxas failed: {output.strip()}{hint}")
    return parse(name, output)


def keep_ptx(kernel: type, config: object, arch: str) -> str:
    """Compiles a variant and returns its PTX. Does not use the cache.

    Raises:
        CompileError: the kernel does not compile.
        ArgumentError: as `Variant`.
    """
    variant = Variant(kernel, config, arch)
    ptx = with_ptx(variant, lambda compiled: compiled.__ptx__)
    if not ptx:
        raise CompileError(f"{variant}: the DSL kept no PTX")
    return ptx


def report(kernel: type, config: object, arch: str, cubin: Path | None = None) -> Report:
    """Compiles a variant and returns the report of ptxas.

    Args:
        cubin: the file for the machine code; None to discard it.

    Raises:
        CompileError: the compiler or ptxas fails.
        ArgumentError: as `Variant`.
    """
    variant = Variant(kernel, config, arch)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ptxas-options", default="")
    # argparse parses a value that starts with a dash as an option, unless it is joined to its option by "="
    joined = re.sub(r"--ptxas-options\s+", "--ptxas-options=", variant.options)
    known, _ = parser.parse_known_args(shlex.split(joined))
    ptx, words = keep_ptx(kernel, config, arch), shlex.split(known.ptxas_options)
    found = assemble(str(variant), ptx, arch, words, cubin)
    return replace(found, spill_allowance=getattr(kernel, "spill_allowance", 0))


def table(reports: Iterable[Report]) -> str:
    """Returns a text with one line for each function, and the problems below their kernel."""
    lines = [f"{'regs':>5} {'smem':>7} {'stack':>6} {'spill st/ld':>12}  kernel"]
    for item in reports:
        for use in item.usage:
            where = item.name if len(item.usage) == 1 else f"{item.name}: {use.name}"
            spills = f"{use.spill_stores}/{use.spill_loads}"
            lines.append(f"{use.registers:>5} {use.smem:>7} {use.stack:>6} {spills:>12}  {where}")
        lines += [f"{'':>5} problem: {problem}" for problem in item.problems()]
    return "\n".join(lines)


def _kernels(name: str) -> list[tuple[type, object]]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ArgumentError("KERNELS", "package.module:NAME", repr(name))
    try:
        kernels = list(getattr(importlib.import_module(module), attribute)())
    except (ImportError, AttributeError) as error:
        raise ArgumentError("KERNELS", "a callable that can be imported", f"{name!r}: {error}") from error
    if not kernels:
        raise ArgumentError("KERNELS", "at least one (kernel class, configuration)", "none")
    return kernels


def _tried(task: tuple[type, object, str]) -> Report | str:
    """A report, or the message of the error."""
    try:
        return report(*task)
    except KdaError as error:
        return str(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0; 1 if there are problems or a kernel does not compile; 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m kda_cute.jit.ptxas", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("kernels", metavar="package.module:KERNELS", nargs="+")
    parser.add_argument("--arch", action="append", type=check_arch, required=True)
    parser.add_argument("--jobs", type=int, help="worker processes (default: the usable CPUs)")
    options = parser.parse_args(argv)
    try:
        kernels = [pair for name in options.kernels for pair in _kernels(name)]
    except ArgumentError as error:
        parser.error(str(error))
    tasks = [(kernel, config, arch) for kernel, config in kernels for arch in options.arch]
    jobs = min(len(tasks), options.jobs or usable_cpus())
    if jobs == 1:
        found = [_tried(task) for task in tasks]
    else:  # as `precompile` does
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(_tried, tasks))
    reports = [x for x in found if isinstance(x, Report)]
    failures = [x for x in found if isinstance(x, str)]
    print(table(reports))
    for failure in failures:
        print(failure, file=sys.stderr)
    problems = sum(len(item.problems()) for item in reports)
    print(f"{len(reports)} kernels, {problems} problems, {len(failures)} not compiled")
    return 1 if problems or failures else 0


if __name__ == "__main__":
    from kda_cute.jit import ptxas  # noqa: PLW0406 - worker processes import its functions by this name

    sys.exit(ptxas.main())
