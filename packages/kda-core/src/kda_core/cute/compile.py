"""From a kernel class to a callable: the table in memory, then the disk, then the compiler."""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kda_core import env
from kda_core.cute.cache import Entry, entry_of
from kda_core.cute.key import Variant, canonical
from kda_core.cute.offers import offering_backend
from kda_core.errors import CompileError, JitDisabledError

logger = logging.getLogger("kda_core.cute")

_COLOR = re.compile(r"\x1b\[[0-9;]*m")  # the DSL colours its messages wherever they go

#: The name of the exported function. Each object is linked into a namespace of its own.
FUNCTION = "kda_kernel"

T = TypeVar("T")


@dataclass(frozen=True)
class CacheInfo:
    """What this process did so far: variants ``loaded`` from disk, ``compiled``, and ``replaced`` as
    damaged."""

    loaded: int = 0
    compiled: int = 0
    replaced: int = 0


Maker = Callable[[Any], Callable[..., Any]]

_maker: ContextVar[Maker | None] = ContextVar("kda_core_kernel_maker", default=None)

# One lock for everything behind the table: `cute.compile` is not thread-safe. Order: this lock, then a file
# lock.
_lock = threading.RLock()
_table: dict[tuple[type, str, str, Maker | None], Callable[..., Any]] = {}
_info = CacheInfo()
_warned: set[Path] = set()


def cache_info() -> CacheInfo:
    """Counts of loads and compilations in this process."""
    return _info


def clear_memory() -> None:
    """Forget the loaded kernels and the counts of this process; the disk stays. Callables that are held stay
    valid."""
    global _info
    with _lock:
        _table.clear()
        _warned.clear()
        _info = CacheInfo()


def _count(**more: int) -> None:
    global _info
    _info = replace(_info, **{name: getattr(_info, name) + n for name, n in more.items()})


def get_kernel(kernel: type, config: object, arch: str) -> Callable[..., Any]:
    """The compiled form of ``kernel(config)`` for ``arch``, e.g. ``"sm_90a"``.

    The callable takes the arguments of ``kernel.__call__`` by position, all of them but the stream: torch
    tensors for fake tensors, numbers for scalars, None for what ``fake_args`` gave as None. It checks them
    (dtype, rank, extents, strides, alignment, device) and launches on torch's current stream without copying
    anything to the host.

    Safe to call from several threads and processes; one of them compiles, the others wait. Hold on to the
    result on a hot path. Raises ``ArgumentError`` (configuration, architecture), ``CompileError``, and
    ``JitDisabledError`` if the variant is not cached and ``KDA_DISABLE_JIT=1``.
    """
    make = _maker.get()
    slot = (kernel, canonical(config), arch, make)
    found = _table.get(slot)
    if found is None:
        variant = Variant(kernel, config, arch)
        with _lock:
            found = _table.get(slot)
            if found is None:
                found = _load_or_compile(variant) if make is None else with_ptx(variant, make)
                _table[slot] = found
    return found


@contextlib.contextmanager
def kernels_made_by(make: Maker) -> Iterator[None]:
    """Within the block, in this thread, `get_kernel` returns what ``make`` makes of the DSL's compiled function, which
    then keeps its PTX (``__ptx__``): a test instrument that runs kernels elsewhere than on a GPU has its place here.

    Such kernels are held in memory, by ``make``; the disk is neither read nor written, and ``KDA_DISABLE_JIT`` not
    looked at.
    """
    token = _maker.set(make)
    try:
        yield
    finally:
        _maker.reset(token)


def with_ptx(variant: Variant, use: Callable[[Any], T]) -> T:
    """``use`` of the DSL's compiled function with its PTX. Raises ``CompileError``."""
    _require_dsl()
    with tempfile.TemporaryDirectory() as folder:
        return use(trace(variant, f"--keep-ptx --dump-dir {shlex.quote(folder)}"))


def _load_or_compile(variant: Variant) -> Callable[..., Any]:
    _require_dsl()
    entry = entry_of(variant)
    if (path := entry.read()) is not None:
        function = _load(path)
        _count(loaded=1)
        return function
    if env.disable_jit():
        raise JitDisabledError(_missing(variant, entry))
    content = None
    try:
        with entry.locked():
            # Another process may have compiled it while this one waited.
            path = entry.read()
            if path is None:
                damaged = entry.exists()
                content = export(variant)
                _count(compiled=1, replaced=int(damaged))
                path = entry.commit(content)
    except OSError as error:
        _warn_unwritable(entry.folder, error)
        if content is None:
            content = export(variant)
            _count(compiled=1)
        with tempfile.TemporaryDirectory() as folder:
            return _load(_stored(Path(folder), content))
    if content is None:
        _count(loaded=1)
    # What was just compiled is loaded from its object as well, so that every process runs the same code.
    return _load(path)


def ensure_on_disk(variant: Variant) -> bool:
    """Compile a variant into the cache folder unless it is there; whether it was compiled.

    ``KDA_DISABLE_JIT`` does not matter here. Raises ``CompileError``; ``OSError`` if the folder cannot be
    written.
    """
    _require_dsl()
    entry = entry_of(variant)
    if entry.read() is not None:
        return False
    with _lock, entry.locked():
        if entry.read() is not None:
            return False
        entry.commit(export(variant))
        return True


def trace(variant: Variant, options: str = "") -> Any:
    """Run ``cute.compile`` on a variant, against its fake arguments; the DSL's compiled function.

    ``options`` are added to the variant's own. Raises ``CompileError`` with the DSL's message for any
    failure.
    """
    _require_dsl()
    from cutlass import cute

    start = time.perf_counter()
    with _lock:
        try:
            instance = variant.kernel(variant.config)
            compiled = cute.compile(
                instance, *instance.fake_args(), options=f"{variant.options} {options}".strip()
            )
        except Exception as error:
            message = _COLOR.sub("", str(error)).strip()
            raise CompileError(f"{variant} did not compile: {type(error).__name__}: {message}") from error
    logger.info("compiled %s in %.2f s", variant, time.perf_counter() - start)
    return compiled


def export(variant: Variant) -> bytes:
    """Compile a variant; the object file's content. Raises ``CompileError``."""
    compiled = trace(variant)
    with _lock, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        try:
            compiled.export_to_c(str(path), function_name=FUNCTION)
            return path.read_bytes()
        except Exception as error:
            raise CompileError(f"{variant} could not be exported: {type(error).__name__}: {error}") from error


def _stored(folder: Path, content: bytes) -> Path:
    path = folder / "kernel.o"
    path.write_bytes(content)
    return path


def _load(path: Path) -> Callable[..., Any]:
    """Link an object into this process. The file may be deleted afterwards."""
    from cutlass.cute.runtime import load_module

    try:
        return load_module(str(path), enable_tvm_ffi=True)[FUNCTION]
    except Exception as error:
        raise CompileError(
            f"the compiled kernel {path} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _require_dsl() -> None:
    try:
        import cutlass.cute  # noqa: F401
        import tvm_ffi  # noqa: F401
    except ImportError as error:
        raise CompileError(
            f"the CuTe DSL cannot be imported ({error}): "
            "pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
        ) from error


def _missing(variant: Variant, entry: Entry) -> str:
    near = "".join(f"\n  {line}" for line in entry.differences())
    folder = env.KDA_CACHE_DIR.raw()  # the command may be run in a shell that has not set it
    command = f"{env.KDA_CACHE_DIR.name}={shlex.quote(folder)} " if folder else ""
    command += f"python -m kda_core precompile --arch {variant.arch}"
    backend = offering_backend(variant)
    remedy = (
        f"This compiles it, with the others that {backend} compiles ahead of time:\n"
        f"  {command} --backend {shlex.quote(backend)}"
        if backend is not None
        else f"No backend compiles it ahead of time: run the call once without {env.KDA_DISABLE_JIT.name}. "
        f"What is compiled ahead of time is listed by\n  {command} --list"
    )
    return (
        f"{variant} is not in {entry.folder} ({env.KDA_CACHE_DIR.name}), "
        f"and {env.KDA_DISABLE_JIT.name}=1 forbids to compile it. {remedy}"
        + (f"\nCompiled from other ingredients:{near}" if near else "")
    )


def _warn_unwritable(folder: Path, error: OSError) -> None:
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(
            f"compiled kernels cannot be stored in {folder} ({error}): every process compiles them again. "
            f"Set {env.KDA_CACHE_DIR.name} to a folder that can be written.",
            RuntimeWarning,
            stacklevel=4,
        )
