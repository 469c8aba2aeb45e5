"""From a kernel class to a callable: the table in memory, then the disk, then the compiler."""

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
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kda_core import env, storage
from kda_core.errors import CompileError, JitDisabledError
from kda_cute.jit.ahead_of_time import offering_backend
from kda_cute.jit.cache import Entry, entry_of
from kda_cute.jit.key import Variant, canonical

logger = logging.getLogger("kda_core")

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
Slot = tuple[type, str, str, "Maker | None"]

_maker: ContextVar[Maker | None] = ContextVar("kda_core_kernel_maker", default=None)

# Locks are taken in this order: the turn of a variant, its file lock, `_compiler`, `_lock`. The last guards the tables
# below, for moments. The DSL's compiler is not thread-safe, and keeps Python's global lock while it works: threads compile one after
# the other whatever is done here, and only processes compile side by side (`precompile`). Kernels on disk load without
# waiting for the compiler.
_lock = threading.RLock()
_compiler = threading.RLock()
_turns: dict[Slot, threading.Lock] = {}
_table: dict[Slot, Callable[..., Any]] = {}
_info = CacheInfo()


def _after_fork() -> None:
    """In a child: the threads that held these locks are not there."""
    global _lock, _compiler
    _lock, _compiler = threading.RLock(), threading.RLock()
    _turns.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def cache_info() -> CacheInfo:
    """Counts of loads and compilations in this process."""
    return _info


def clear_memory() -> None:
    """Forget the loaded kernels and the counts of this process; the disk stays. Callables that are held stay
    valid."""
    global _info
    with _lock:
        _table.clear()
        _info = CacheInfo()
    storage.forget_warnings()


def _count(**more: int) -> None:
    global _info
    with _lock:
        _info = replace(_info, **{name: getattr(_info, name) + n for name, n in more.items()})


def get_kernel(kernel: type, config: object, arch: str) -> Callable[..., Any]:
    """The compiled form of ``kernel(config)`` for ``arch``, e.g. ``"sm_90a"``.

    The callable takes the arguments of ``kernel.__call__`` by position, all of them but the stream: torch
    tensors for fake tensors, numbers for scalars, None for what ``fake_args`` gave as None. It checks them
    (dtype, rank, extents, strides, alignment, device) and launches on torch's current stream without copying
    anything to the host.

    Safe to call from several threads and processes, and from children of `os.fork`: one compiles a variant, the
    others wait for it; a process that waits for minutes compiles for itself. Threads of one process compile one after
    the other, for the compiler is not thread-safe; what is cached loads meanwhile. Hold on to the result on a hot path.

    Raises ``ArgumentError`` (configuration, architecture), ``CompileError``, and ``JitDisabledError`` if the variant is
    not cached and ``KDA_DISABLE_JIT=1``.
    """
    make = _maker.get()
    slot = (kernel, canonical(config), arch, make)
    found = _table.get(slot)
    if found is None:
        variant = Variant(kernel, config, arch)
        with _turn(slot):
            found = _table.get(slot)
            if found is None:
                found = _load_or_compile(variant) if make is None else with_ptx(variant, make)
                _table[slot] = found
    return found


def _turn(slot: Slot) -> threading.Lock:
    """The lock of the threads that want one variant."""
    with _lock:
        return _turns.setdefault(slot, threading.Lock())


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
    with _compiler, tempfile.TemporaryDirectory() as folder:
        return use(trace(variant, f"--keep-ptx --dump-dir {shlex.quote(folder)}"))


def _load_or_compile(variant: Variant) -> Callable[..., Any]:
    _require_dsl()
    entry = entry_of(variant)
    outdated = variant.outdated()
    if outdated is None and (content := entry.read()) is not None:
        function = _load(variant, content)
        _count(loaded=1)
        return function
    if env.disable_jit():
        raise JitDisabledError(_missing(variant, entry, outdated))
    return _load(variant, _private(variant, outdated) if outdated else _shared(variant, entry))


def _private(variant: Variant, outdated: str) -> bytes:
    """Compile for this process alone."""
    storage.warn_once(
        "outdated",
        "%s. Kernels that this process still needs are compiled for it alone and not stored: restart it.",
        outdated,
    )
    content = export(variant)
    _count(compiled=1)
    return content


def _shared(variant: Variant, entry: Entry) -> bytes:
    """Compile into the cache folder, unless another process has; where the folder fails, for this process alone."""
    content = None
    try:
        with entry.locked():
            # Another process may have compiled it while this one waited.
            content = entry.read()
            if content is not None:
                _count(loaded=1)
                return content
            damaged = entry.exists()
            _announce(variant, entry.folder)
            content = export(variant)
            _count(compiled=1, replaced=int(damaged))
            if variant.outdated(thorough=True) is None:
                entry.commit(content)
    except OSError as error:
        storage.warn_once(
            ("unstored", entry.folder),
            "compiled kernels cannot be stored in %s (%s): every process compiles them again. "
            "Mend the folder, or set %s to one that can be written.",
            entry.folder,
            error,
            env.KDA_CACHE_DIR.name,
        )
        if content is None:
            content = export(variant)
            _count(compiled=1)
    # What was just compiled is loaded from its object as well, so that every process runs the same code.
    return content


def _announce(variant: Variant, folder: Path) -> None:
    """Tell the user what takes so long: the first time as a warning, which Python shows where nobody configures logging."""
    what = f"compiling {variant}, which takes seconds, into {folder}"
    if storage.is_warned("first compilation"):
        logger.info(what)
        return
    storage.warn_once(
        "first compilation",
        "%s. It is compiled once for this machine and these versions; `%s` compiles what calls commonly need ahead of time. "
        "Further compilations are logged at level INFO by the logger kda_cute.",
        what,
        _command(variant.arch),
    )


def ensure_on_disk(variant: Variant) -> bool:
    """Compile a variant into the cache folder unless it is there; whether it was compiled.

    ``KDA_DISABLE_JIT`` does not matter here. Raises ``CompileError``; ``OSError`` if the folder cannot be
    written.
    """
    _require_dsl()
    if problem := env.cache_dir_problem() or variant.outdated():
        raise CompileError(f"{variant} was not compiled, for it could not be stored: {problem}")
    entry = entry_of(variant)
    if entry.read() is not None:
        return False
    with entry.locked():
        if entry.read() is not None:
            return False
        content = export(variant)
        if problem := variant.outdated(thorough=True):
            raise CompileError(f"{variant} was compiled and not stored: {problem}")
        entry.commit(content)
        return True


def trace(variant: Variant, options: str = "") -> Any:
    """Run ``cute.compile`` on a variant, against its fake arguments; the DSL's compiled function.

    ``options`` are added to the variant's own. Raises ``CompileError`` with the DSL's message for any
    failure.
    """
    _require_dsl()
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
            if isinstance(error, KeyError) and error.args == (variant.arch,):  # its table of architectures
                raise CompileError(
                    f"{variant}: the installed CuTe DSL does not support {variant.arch}"
                ) from error
            message = _COLOR.sub("", str(error)).strip()
            raise CompileError(f"{variant} did not compile: {type(error).__name__}: {message}") from error
    logger.info("compiled %s in %.2f s", variant, time.perf_counter() - start)
    return compiled


def export(variant: Variant) -> bytes:
    """Compile a variant; the object file's content. Raises ``CompileError``."""
    with _compiler:
        compiled = trace(variant)
        try:
            with _memory_file() as path:
                compiled.export_to_c(path, function_name=FUNCTION)
                return Path(path).read_bytes()
        except Exception as error:
            raise CompileError(f"{variant} could not be exported: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _memory_file(content: bytes = b"") -> Iterator[str]:
    """The path of a file in memory: a full disk is no reason to fail, and nobody else can reach it."""
    descriptor = os.memfd_create("kda-kernel")  # Linux, as are the DSL's wheels
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _load(variant: Variant, content: bytes) -> Callable[..., Any]:
    """Link an object into this process."""
    from cutlass.cute.runtime import load_module

    try:
        with _memory_file(content) as path:
            return load_module(path, enable_tvm_ffi=True)[FUNCTION]
    except Exception as error:
        raise CompileError(
            f"the compiled kernel {variant} cannot be loaded: {type(error).__name__}: {error}"
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


def _command(arch: str) -> str:
    folder = env.KDA_CACHE_DIR.raw()  # the command may be run in a shell that has not set it
    setting = f"{env.KDA_CACHE_DIR.name}={shlex.quote(folder)} " if folder else ""
    return f"{setting}python -m kda_core precompile --arch {arch}"


def _missing(variant: Variant, entry: Entry, outdated: str | None) -> str:
    near = "" if outdated else "".join(f"\n  {line}" for line in entry.differences())
    command = _command(variant.arch)
    backend = offering_backend(variant)
    remedy = (
        f"This compiles it, with the others that {backend} compiles ahead of time:\n"
        f"  {command} --backend {shlex.quote(backend)}"
        if backend is not None
        else f"No backend compiles it ahead of time: run the call once without {env.KDA_DISABLE_JIT.name}. "
        f"What is compiled ahead of time is listed by\n  {command} --list"
    )
    unused = outdated or env.cache_dir_problem()
    return (
        f"{variant} is not in {entry.folder} ({env.KDA_CACHE_DIR.name}), "
        f"and {env.KDA_DISABLE_JIT.name}=1 forbids to compile it. {remedy}"
        + (f"\nCompiled from other ingredients:{near}" if near else "")
        + (f"\n{unused}" if unused else "")
    )
