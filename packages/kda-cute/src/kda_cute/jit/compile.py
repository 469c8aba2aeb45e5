"""From a kernel class to a callable: first the table in memory, then exported kernels, then the cache folder, then the compiler.

What only compiled kernels need is imported when one is needed, because the first call of a process should be fast.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kda_core import env, storage
from kda_core.errors import CompileError, JitDisabledError
from kda_cute.interface import KernelInterface
from kda_cute.jit.cache import QUARANTINE, Entry, entry_of
from kda_cute.jit.dsl import export, export_with_ptx, load, parts, require_dsl
from kda_cute.jit.key import Variant, canonical
from kda_cute.jit.target import check_arch
from kda_cute.store import search

logger = logging.getLogger("kda_cute")


@dataclass(frozen=True)
class CacheInfo:
    """Counts of this process.

    Attributes:
        loaded: variants loaded from the cache folder.
        compiled: variants compiled.
        replaced: compiled variants that replaced a bad entry of the folder, which is damaged or not trusted.
        exported: variants loaded from exported kernels (`kda_cute.store`).
    """

    loaded: int = 0
    compiled: int = 0
    replaced: int = 0
    exported: int = 0


Maker = Callable[[str, bytes], Callable[..., Any]]
Slot = tuple["type | KernelInterface", str, str, "Maker | None"]

_maker: ContextVar[Maker | None] = ContextVar("kda_cute_kernel_maker", default=None)

# Lock order: the lock of a variant, its lock file, the compiler's lock (`kda_cute.jit.dsl`), `_lock`. `_lock` guards the tables
# below and is never held for long. A kernel on disk loads without the compiler's lock.
_lock = threading.RLock()
_variant_locks: dict[Slot, threading.Lock] = {}
_table: dict[Slot, Callable[..., Any]] = {}
_info = CacheInfo()


def _after_fork() -> None:
    """Runs in a forked child, in which the threads that held these locks do not exist."""
    global _lock
    _lock = threading.RLock()
    _variant_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def cache_info() -> CacheInfo:
    """Returns the counts of loads and compilations in this process."""
    return _info


def clear_memory() -> None:
    """Forgets the loaded kernels and the counts of this process. The cache folder is unchanged, and callables that the caller
    holds stay valid."""
    global _info
    with _lock:
        _table.clear()
        _info = CacheInfo()
    search.forget()
    storage.forget_warnings()


def _count(**more: int) -> None:
    global _info
    with _lock:
        _info = replace(_info, **{name: getattr(_info, name) + n for name, n in more.items()})


def get_kernel(kernel: type | KernelInterface, config: object, arch: str) -> Callable[..., Any]:
    """Returns the compiled form of ``kernel(config)`` for `arch`, such as "sm_90a".

    ``kernel`` is a class, or the interface of one. A class is compiled by the DSL. With an interface the kernel may also come from
    exported kernels (`kda_cute.store.search.KernelStore`), and the DSL need not be installed.

    The callable takes the arguments of ``kernel.__call__`` by position, all but the stream: torch tensors for fake tensors,
    numbers for scalars, None where ``fake_args`` returned None. It launches on torch's current stream without a copy to the host. With
    an interface it is a `kda_cute.store.launcher.Launcher`, wherever the kernel comes from; otherwise it is the DSL's function, which
    checks dtype, rank, extents, strides, alignment and device. Keep the callable on a hot path.

    The function is safe in threads, in processes and in children of `os.fork`. One of them compiles a variant, and the others
    wait. After 300 seconds a process stops waiting for another one and compiles for itself. The threads of a process compile
    one after the other, because the compiler is not thread-safe; cached kernels load meanwhile.

    Raises:
        ArgumentError: the configuration or the name of the architecture is not valid.
        CompileError: the kernel does not compile, or the DSL is not installed and no exported kernel serves.
        JitDisabledError: the variant is not cached and ``KDA_DISABLE_JIT=1``.
    """
    make = _maker.get()
    slot = (kernel, canonical(config), arch, make)
    found = _table.get(slot)
    if found is None:
        with _variant_lock(slot):
            found = _table.get(slot)
            if found is None:
                found = (
                    _find(kernel, config, arch)
                    if make is None
                    else make(*parts(_load_or_compile(_variant(kernel, config, arch), with_ptx=True)))
                )
                _table[slot] = found
    return found


def _find(kernel: type | KernelInterface, config: object, arch: str) -> Callable[..., Any]:
    """Returns an exported kernel, if `kernel` is an interface and the store has it; else one from the cache folder or the compiler."""
    if not isinstance(kernel, KernelInterface):
        variant = _variant(kernel, config, arch)
        return load(variant, _load_or_compile(variant))
    check_arch(arch)
    found, reasons = search.KernelStore.of_this_process().find(kernel, config, arch)
    if found is not None:
        _count(exported=1)
        return found
    from kda_cute.store.export import launcher_of

    try:
        variant = _variant(kernel, config, arch)
        return launcher_of(variant, _load_or_compile(variant))
    except CompileError as error:
        if reasons:
            lines = "".join(f"\n  {reason}" for reason in reasons)
            raise type(error)(f"{error}\nExported kernels that were not used:{lines}") from error
        raise


def _variant(kernel: type | KernelInterface, config: object, arch: str) -> Variant:
    if isinstance(kernel, KernelInterface):
        require_dsl()  # whose error names the remedy
        kernel = kernel.load()
    return Variant(kernel, config, arch)


def _variant_lock(slot: Slot) -> threading.Lock:
    """The lock of the threads that need one variant."""
    with _lock:
        return _variant_locks.setdefault(slot, threading.Lock())


@contextlib.contextmanager
def kernels_made_by(make: Maker) -> Iterator[None]:
    """Makes `get_kernel` return ``make(ptx, object)``, within the block and in this thread. For test instruments that run
    kernels without a GPU.

    ``object`` is the content of the object file that the DSL exports, with the function `kda_cute.jit.dsl.FUNCTION`. The results are
    kept in memory for each `make`, PTX and object in the cache folder. ``KDA_DISABLE_JIT`` has no effect.
    """
    token = _maker.set(make)
    try:
        yield
    finally:
        _maker.reset(token)


# ---- the cache folder


def _load_or_compile(variant: Variant, with_ptx: bool = False) -> bytes:
    """Returns the object file of a variant; with its PTX, see `dsl.export_with_ptx`."""
    require_dsl()
    entry, make = entry_of(variant, with_ptx), export_with_ptx if with_ptx else export
    outdated = variant.outdated()
    stored = entry.exists()  # before `Entry.read`, which moves a bad entry away
    if outdated is None and (content := entry.read()) is not None:
        _count(loaded=1)
        return content
    if env.disable_jit() and not with_ptx:
        raise JitDisabledError(_missing(variant, entry, outdated))
    if outdated:
        return _compile_outdated(variant, outdated, make)
    return _compile_shared(variant, entry, stored, make)


def _compile_outdated(variant: Variant, outdated: str, make: Callable[[Variant], bytes]) -> bytes:
    """Compiles for this process alone, which runs other sources than are installed."""
    storage.warn_once(
        "outdated",
        "%s. Restart this process: it compiles the kernels that it still needs for itself and does not store them.",
        outdated,
        log=logger,
    )
    content = make(variant)
    _count(compiled=1)
    return content


def _compile_shared(variant: Variant, entry: Entry, stored: bool, make: Callable[[Variant], bytes]) -> bytes:
    """Compiles into the cache folder, unless another process has. If the folder fails, compiles for this process alone.

    Args:
        stored: the folder had the entry, but it was bad.
        make: `export` or `export_with_ptx`.

    Returns the object: a kernel that was just compiled is loaded from it too, so that all processes run the same code.
    """
    from kda_cute.jit import housekeeping

    content, limit = None, env.cache_maxsize()
    try:
        with entry.locked():
            # another process may have compiled it while this one waited for the lock
            content = entry.read(locked=True)
            if content is not None:
                _count(loaded=1)
                return content
            _announce(variant, entry.folder)
            content = make(variant)
            _count(compiled=1, replaced=int(stored))
            if variant.outdated(thorough=True) is None:
                entry.commit(content)
                housekeeping.make_room(entry, limit)
    except OSError as error:
        storage.warn_once(
            ("unstored", entry.folder),
            "compiled kernels cannot be stored in %s (%s), so every process compiles them again. "
            "Fix the folder, or set %s to one that can be written.",
            entry.folder,
            error,
            env.KDA_CACHE_DIR.name,
            log=logger,
        )
        if content is None:
            content = make(variant)
            _count(compiled=1)
    return content


def ensure_on_disk(variant: Variant) -> bool:
    """Compiles a variant into the cache folder unless it is there. Returns whether it was compiled. Ignores
    ``KDA_DISABLE_JIT``.

    Raises:
        CompileError: it does not compile, or it could not be stored.
        OSError: the folder cannot be written.
    """
    from kda_cute.jit import housekeeping

    require_dsl()
    if problem := env.cache_dir_problem() or variant.outdated():
        raise CompileError(f"{variant} was not compiled, because it could not be stored: {problem}")
    entry, limit = entry_of(variant), env.cache_maxsize()
    if entry.read() is not None:
        return False
    with entry.locked():
        if entry.read(locked=True) is not None:
            return False
        content = export(variant)
        if problem := variant.outdated(thorough=True):
            raise CompileError(f"{variant} was compiled and not stored: {problem}")
        entry.commit(content)
        housekeeping.make_room(entry, limit)
        return True


# ---- messages


def _announce(variant: Variant, folder: Path) -> None:
    """Logs a compilation: the first one as a warning, which Python prints even if logging is not configured."""
    what = f"compiling {variant} into {folder}, which takes seconds"
    if storage.is_warned("first compilation"):
        logger.info(what)
        return
    storage.warn_once(
        "first compilation",
        "%s. This happens once for each machine and set of versions; `%s` compiles the common kernels ahead of time. "
        "Further compilations are logged at level INFO by the logger kda_cute.",
        what,
        _command(variant.arch),
        log=logger,
    )


def _command(arch: str) -> str:
    folder = env.KDA_CACHE_DIR.raw()  # the user's shell may not have the variable
    setting = f"{env.KDA_CACHE_DIR.name}={shlex.quote(folder)} " if folder else ""
    return f"{setting}python -m kda_core precompile --arch {arch}"


def _missing(variant: Variant, entry: Entry, outdated: str | None) -> str:
    from kda_cute.jit.ahead_of_time import offering_backend

    near = "" if outdated else "".join(f"\n  {line}" for line in entry.differences())
    bad = None if outdated else entry.quarantined()
    command = _command(variant.arch)
    backend = offering_backend(variant)
    remedy = (
        f"This command compiles it together with the other variants that {backend} lists:\n"
        f"  {command} --backend {shlex.quote(backend)}"
        if backend is not None
        else f"No backend lists it for ahead-of-time compilation: run the call once without {env.KDA_DISABLE_JIT.name}. "
        f"This command prints the listed variants:\n  {command} --list"
    )
    unused = outdated or env.cache_dir_problem()
    return (
        f"{variant} is not in {entry.folder} ({env.KDA_CACHE_DIR.name}), "
        f"and {env.KDA_DISABLE_JIT.name}=1 forbids compiling it. {remedy}"
        + (f"\nA stored one was moved to {entry.folder / QUARANTINE}: {bad}" if bad else "")
        + (f"\nEntries of the same kernel with other ingredients:{near}" if near else "")
        + (f"\n{unused}" if unused else "")
    )
