"""The calls into the CuTe DSL: trace, compile, export to an object, load an object.

The DSL's compiler is not thread-safe, and it holds Python's global lock while it works. So the threads of a process compile one
after the other, behind one lock. Only processes compile concurrently (`kda_cute.jit.precompile`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kda_core.errors import CompileError
from kda_cute.jit.key import Variant

logger = logging.getLogger("kda_cute")

_COLOR = re.compile(r"\x1b\[[0-9;]*m")  # the DSL colours its messages even if no terminal shows them

#: The name of the exported function. Each object is linked into a namespace of its own.
FUNCTION = "kda_kernel"

T = TypeVar("T")

_compiler = threading.RLock()


def _after_fork() -> None:
    """Runs in a forked child, in which the thread that held the lock does not exist."""
    global _compiler
    _compiler = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def require_dsl() -> None:
    """Imports the DSL.

    Raises:
        CompileError: it is not installed. The message contains the command that installs it.
    """
    try:
        import cutlass.cute  # noqa: F401
        import tvm_ffi  # noqa: F401
    except ImportError as error:
        raise CompileError(
            f"the CuTe DSL cannot be imported ({error}): pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
        ) from error


def trace(variant: Variant, options: str = "") -> Any:
    """Compiles a variant against its fake arguments and returns the DSL's compiled function.

    Args:
        options: options of ``cute.compile`` besides those of the variant.

    Raises:
        CompileError: the DSL fails. The message contains the DSL's.
    """
    require_dsl()
    from cutlass import cute

    start = time.perf_counter()
    with _compiler:
        try:
            variant.pin_sources()
            instance = variant.kernel(variant.config)
            compiled = cute.compile(
                instance, *instance.fake_args(), options=f"{variant.options} {options}".strip()
            )
        except Exception as error:
            if isinstance(error, KeyError) and error.args == (variant.arch,):  # a look-up in the DSL's table
                raise CompileError(
                    f"{variant} did not compile: the installed CuTe DSL does not support {variant.arch}"
                ) from error
            message = _COLOR.sub("", str(error)).strip()
            raise CompileError(f"{variant} did not compile: {type(error).__name__}: {message}") from error
    logger.info("compiled %s in %.2f s", variant, time.perf_counter() - start)
    return compiled


def with_ptx(variant: Variant, use: Callable[[Any], T]) -> T:
    """Compiles a variant so that the DSL's compiled function keeps its PTX (``__ptx__``); returns `use` of that function.

    Raises:
        CompileError: as `trace`.
    """
    with _compiler, tempfile.TemporaryDirectory() as folder:
        return use(trace(variant, f"--keep-ptx --dump-dir {shlex.quote(folder)}"))


def export(variant: Variant) -> bytes:
    """Compiles a variant and returns the content of its object file.

    Raises:
        CompileError: as `trace`, or the object cannot be written.
    """
    with _compiler:
        return _exported(variant, trace(variant))


def _exported(variant: Variant, compiled: Any) -> bytes:
    """Returns the content of the object file of the DSL's compiled function."""
    try:
        with _memory_file() as path:
            compiled.export_to_c(path, function_name=FUNCTION)
            return Path(path).read_bytes()
    except Exception as error:
        raise CompileError(f"{variant} could not be exported: {type(error).__name__}: {error}") from error


def export_with_ptx(variant: Variant) -> bytes:
    """Compiles a variant and returns its PTX with the content of its object file, for `parts`.

    Raises:
        CompileError: as `export`.
    """

    def both(compiled: Any) -> bytes:
        ptx = compiled.__ptx__.encode()
        return len(ptx).to_bytes(8, "little") + ptx + _exported(variant, compiled)

    return with_ptx(variant, both)


def parts(content: bytes) -> tuple[str, bytes]:
    """Returns the PTX and the object of `export_with_ptx`."""
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end].decode(), content[end:]


def load(variant: Variant, content: bytes) -> Callable[..., Any]:
    """Links an object file into this process and returns its function.

    Raises:
        CompileError: the DSL cannot load it.
    """
    require_dsl()
    from cutlass.cute.runtime import load_module

    try:
        with _memory_file(content) as path:
            return load_module(path, enable_tvm_ffi=True)[FUNCTION]
    except Exception as error:
        raise CompileError(
            f"the compiled kernel {variant} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _memory_file(content: bytes = b"") -> Iterator[str]:
    """Yields the path of a file in memory. A full disk does not affect it, and no other user can reach it."""
    descriptor = os.memfd_create("kda-kernel")  # Linux, as are the DSL's wheels
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
