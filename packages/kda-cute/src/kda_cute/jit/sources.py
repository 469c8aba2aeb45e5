"""The Python sources of a kernel: which files they are, their digest, and whether the process still runs them.

The cache key must describe the sources that this process imported. Python does not keep their text, and the DSL reads the text
of a function from disk when it traces the function. An upgrade under a running process could therefore store new code under an
old key. This module prevents that:

1. Each package folder or module file is read once, completely, and kept in memory (`Snapshot`): ``kda_cute`` when it is
   imported, any other package when its first kernel is needed. The digest is that of the text in memory.
2. Before a kernel is loaded, compiled or stored, the files on disk are compared with the text in memory, by their stamps and,
   if these differ, by content. If a file changed, the process is outdated: it neither loads nor stores kernels any more.
3. A process is also outdated if a module was imported, then written, then read for the first time: which text was imported is
   unknown.
4. An outdated process still compiles kernels for itself, from the text in memory: `Sources.pin` gives it to `inspect`.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from kda_core.errors import ArgumentError
from kda_cute.jit.imports import imported_by

#: Time of modification, time of the last change (both in ns), size in bytes, inode.
Stamp = tuple[int, int, int, int]


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _text(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _loaded_files() -> set[str]:
    """The files of the modules that this process has imported."""
    files = (getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values()))
    return {file for file in files if isinstance(file, str)}


@dataclass
class Snapshot:
    """A package folder or module file as it was first read.

    Attributes:
        root: the folder or file.
        since: when this process began to import kernels, in seconds since the epoch.
        content, stamps: of each Python file.
        imported: the files that were imported with this content.
        unsure: the files that may have been imported with another content.
    """

    root: Path
    since: float
    content: dict[Path, bytes] = field(default_factory=dict)
    stamps: dict[Path, Stamp | None] = field(default_factory=dict)
    imported: set[Path] = field(default_factory=set)
    unsure: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        loaded = _loaded_files()
        for path in self._files():
            stamp, content = _stamp(path), _text(path)  # in this order: the stamp shows a change in between
            if stamp is not None and content is not None:
                self.stamps[path], self.content[path] = stamp, content
        self.unsure = tuple(
            path
            for path, stamp in self.stamps.items()
            # the time of the last change: an installer may set that of modification to any value
            if str(path) in loaded and stamp is not None and stamp[1] > self.since * 1e9
        )
        self._set_imported(loaded)

    def _set_imported(self, loaded: set[str]) -> None:
        self.imported = {path for path in self.content if str(path) in loaded and path not in self.unsure}

    def _files(self) -> list[Path]:
        return [self.root] if self.root.is_file() else sorted(self.root.rglob("*.py"))

    def digest(self) -> str:
        """Returns the sha256 (hexadecimal) over names and contents."""
        digest = hashlib.sha256()
        for path, content in self.content.items():
            name = path.relative_to(self.root.parent).as_posix()
            digest.update(f"{len(name)} {name} {len(content)} ".encode())
            digest.update(content)
        return digest.hexdigest()

    def changed(self, loaded: set[str]) -> list[Path]:
        """Returns the files whose content on disk differs from the snapshot. If there are none, records which files are
        `loaded` by now."""
        paths = dict.fromkeys([*self.content, *self._files()])
        found = []
        for path in paths:
            stamp = _stamp(path)
            if path in self.content and stamp == self.stamps[path]:
                continue
            if _text(path) == self.content.get(path):  # both None for an editor's lock file or a folder
                self.stamps[path] = stamp
            else:
                found.append(path)
        if not found:
            self._set_imported(loaded)
        return found


_lock = threading.RLock()
_snapshots: dict[Path, Snapshot] = {}
#: When this process began to import kernels.
_start = time.time()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def snapshot_of(root: Path) -> Snapshot:
    """Returns the snapshot of a package folder or module file, which is taken now if there is none."""
    with _lock:
        if root not in _snapshots:
            _snapshots[root] = Snapshot(root, _start)
        return _snapshots[root]


def forget() -> None:
    """Forgets all snapshots, for tests: the text on disk now counts as the text that was imported."""
    global _start
    with _lock:
        _snapshots.clear()
        imported_by.cache_clear()
        _start = time.time()


@dataclass(frozen=True)
class Sources:
    """The sources of kernel classes.

    Attributes:
        roots: package folders and module files.
        versions: "name version" of the installed packages that they import.
    """

    roots: tuple[Path, ...]
    versions: tuple[str, ...]

    def digest(self) -> str:
        """Returns the sha256 (hexadecimal) over the snapshots and the versions. It does not depend on where they are
        installed."""
        parts = sorted(snapshot_of(root).digest() for root in self.roots)
        return hashlib.sha256(" ".join([*parts, *self.versions]).encode()).hexdigest()

    def outdated(self) -> str | None:
        """Returns why this process may run other sources than are on disk; None if it runs those."""
        with _lock:
            snapshots, loaded = [snapshot_of(root) for root in self.roots], _loaded_files()
            for snapshot in snapshots:
                if not snapshot.content:
                    return f"there are no Python files in {snapshot.root}"
                if changed := snapshot.changed(loaded):
                    return f"{changed[0]} changed while this process ran"
                if snapshot.unsure:
                    return f"{snapshot.unsure[0]} changed after this process began to import kernels"
        return None

    def pin(self) -> None:
        """Makes `inspect`, from which the DSL gets the text of functions, return the text that was imported."""
        with _lock:
            loaded = _loaded_files()
            for snapshot in map(snapshot_of, self.roots):
                for path in snapshot.imported.intersection(snapshot.changed(loaded)):
                    content = snapshot.content[path]
                    lines = content.decode("utf-8", "replace").splitlines(keepends=True)
                    # linecache does not compare an entry without a time of modification (None) with the disk
                    linecache.cache[str(path)] = (len(content), None, lines, str(path))


def sources_of(classes: list[type], base: Path) -> Sources:
    """Returns the sources of kernel classes: the folder `base`, the packages of the classes, and what their modules import from
    elsewhere, directly or indirectly. An installed package enters by its version, any other module by its file."""
    modules = sorted({cls.__module__ for cls in classes} - {"builtins"})
    modules = [name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names]
    tops = sorted({name.partition(".")[0] for name in modules})
    whole = dict.fromkeys((base, *(root for top in tops for root in _roots(top))))
    files, versions = imported_by(tuple(modules))
    return Sources((*whole, *files), versions)


def _roots(top: str) -> list[Path]:
    """The folders of a top-level package, or the file of a top-level module."""
    module = sys.modules[top]
    if paths := getattr(module, "__path__", None):
        return [Path(path) for path in paths]
    if file := getattr(module, "__file__", None):
        return [Path(file)]
    raise ArgumentError("kernel", "a class whose source is in a file", f"a class of the module {top!r}")
