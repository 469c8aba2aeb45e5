"""The Python sources that a kernel is made of: which they are, their digest, and whether they are still those that this
process imported.

A process runs the sources as they were when it imported them, and the cache key has to describe these. But Python keeps no
trace of them, and the DSL reads the text of a function from disk when it traces it. So each package or module is read once,
whole, and remembered: ``kda_cute`` when it is imported, any other when its first kernel is wanted. From then on the
digest is that of the text remembered. Before a kernel is loaded, compiled or stored, the disk is compared with it, by the
stamps of the files and, where these differ, by content. If anything changed, as an upgrade under a running process changes
it, the process is outdated: it neither loads nor stores kernels any more, so that no entry of the cache holds code of one
version under the key of another. It is outdated as well if a module that it imported was written after ``kda_cute`` was
imported, but before the text was first read: which text was imported nobody can tell then.

What an outdated process still compiles for itself is made of the text remembered, for modules that were imported before the
change: `pin` puts it where `inspect` looks for it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import linecache
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from kda_core.errors import ArgumentError

Stamp = tuple[int, int, int, int]

#: Packages whose text is no part of a key: the DSL's are, by version, and torch is not asked while a kernel is traced.
_BY_VERSION = frozenset({"cutlass", "cuda", "tvm_ffi", "torch"})
#: Part of every key, as a whole.
_PACKAGE = __name__.partition(".")[0]


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


def _imported() -> set[str]:
    """The files of the modules that this process has imported."""
    files = (getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values()))
    return {file for file in files if isinstance(file, str)}


@dataclass
class Text:
    """A package folder or module file as it was first read: its files' contents and ``stamps``, those ``imported`` with
    this content, and those of which nobody can tell (``unsure``)."""

    root: Path
    since: float
    content: dict[Path, bytes] = field(default_factory=dict)
    stamps: dict[Path, Stamp | None] = field(default_factory=dict)
    imported: set[Path] = field(default_factory=set)
    unsure: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        loaded = _imported()
        for path in self._files():
            stamp, content = _stamp(path), _text(path)  # in this order: a later change shows in the stamp
            if stamp is not None and content is not None:
                self.stamps[path], self.content[path] = stamp, content
        self.unsure = tuple(
            path
            for path, stamp in self.stamps.items()
            # by the time of the last change: that of modification is whatever an installer sets
            if str(path) in loaded and stamp is not None and stamp[1] > self.since * 1e9
        )
        self._note(loaded)

    def _note(self, loaded: set[str]) -> None:
        self.imported = {path for path in self.content if str(path) in loaded and path not in self.unsure}

    def _files(self) -> list[Path]:
        return [self.root] if self.root.is_file() else sorted(self.root.rglob("*.py"))

    def digest(self) -> str:
        """sha256 over names and contents."""
        digest = hashlib.sha256()
        for path, content in self.content.items():
            name = path.relative_to(self.root.parent).as_posix()
            digest.update(f"{len(name)} {name} {len(content)} ".encode())
            digest.update(content)
        return digest.hexdigest()

    def changed(self, loaded: set[str]) -> list[Path]:
        """Files that are not what was read at first; empty if all are, and then notes which are ``loaded`` by now."""
        paths = dict.fromkeys([*self.content, *self._files()])
        found = []
        for path in paths:
            stamp = _stamp(path)
            if path in self.content and stamp == self.stamps[path]:
                continue
            if _text(path) == self.content.get(path):  # None and None: an editor's lock, a folder
                self.stamps[path] = stamp
            else:
                found.append(path)
        if not found:
            self._note(loaded)
        return found


_lock = threading.RLock()
_texts: dict[Path, Text] = {}
#: When this process began to import what kernels are made of.
_start = time.time()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def text_of(root: Path) -> Text:
    """What is remembered of a package folder or module file; it is read now if nothing is."""
    with _lock:
        if root not in _texts:
            _texts[root] = Text(root, _start)
        return _texts[root]


def forget() -> None:
    """Forget all text, for tests: what is on disk now counts as what was imported."""
    global _start
    with _lock:
        _texts.clear()
        _helpers.cache_clear()
        _start = time.time()


@dataclass(frozen=True)
class Sources:
    """What kernels of some classes are made of: ``roots``, package folders and module files, and ``versions`` of installed
    packages beside them."""

    roots: tuple[Path, ...]
    versions: tuple[str, ...]

    def digest(self) -> str:
        """sha256 over all of it, as it was first read."""
        parts = sorted(text_of(root).digest() for root in self.roots)  # wherever they are installed
        return hashlib.sha256(" ".join([*parts, *self.versions]).encode()).hexdigest()

    def outdated(self) -> str | None:
        """Why this process may not be running the sources that are on disk; None if it is."""
        with _lock:
            texts, loaded = [text_of(root) for root in self.roots], _imported()
            for text in texts:
                if not text.content:
                    return f"there are no Python files in {text.root}"
                if changed := text.changed(loaded):
                    return f"{changed[0]} changed while this process ran"
                if text.unsure:
                    return f"{text.unsure[0]} changed after this process began to import kernels"
        return None

    def pin(self) -> None:
        """Have `inspect`, by which the DSL gets the text of functions, give the text that was imported."""
        with _lock:
            loaded = _imported()
            for text in map(text_of, self.roots):
                for path in text.imported.intersection(text.changed(loaded)):
                    lines = text.content[path].decode("utf-8", "replace").splitlines(keepends=True)
                    # Without a time of modification linecache does not compare the entry with the disk.
                    linecache.cache[str(path)] = (len(text.content[path]), None, lines, str(path))


def sources_of(classes: list[type], base: Path) -> Sources:
    """What these classes' code is made of: ``base``, the packages of the classes, and what their modules import beside
    these, in turn. An installed package enters by its version, anything else by the files that are imported. Names that
    are only known when the code runs (`importlib.import_module`) are not found."""
    modules = sorted({cls.__module__ for cls in classes} - {"builtins"})
    modules = [name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names]
    tops = sorted({name.partition(".")[0] for name in modules})
    whole = dict.fromkeys((base, *(root for top in tops for root in _roots(top))))
    files, versions = _helpers(tuple(modules))
    return Sources((*whole, *files), versions)


def _roots(top: str) -> list[Path]:
    """The folders of a top-level package, or the file of a top-level module."""
    module = sys.modules[top]
    if paths := getattr(module, "__path__", None):
        return [Path(path) for path in paths]
    if file := getattr(module, "__file__", None):
        return [Path(file)]
    raise ArgumentError("kernel", "a class whose source is in a file", f"a class of the module {top!r}")


@functools.cache
def _helpers(modules: tuple[str, ...]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Files and installed packages that these modules import, in turn, beside their own packages and `kda_cute`."""
    own = {name.partition(".")[0] for name in modules}
    queue, seen = list(modules), set(modules)
    files: set[Path] = set()
    versions: set[str] = set()
    while queue:
        name = queue.pop()
        top = name.partition(".")[0]
        if top in _BY_VERSION or top in sys.stdlib_module_names:
            continue
        if name == _PACKAGE or name.startswith(f"{_PACKAGE}."):  # it imports nothing but the DSL and kda_core
            continue
        if top not in own and (version := _release(top)):
            versions.add(version)
            continue
        path = _file(name)
        if path is None:
            continue
        if top not in own:
            files.add(path)
        found = set(_imports(name, path)) - seen
        seen |= found
        queue += found
    return tuple(sorted(files)), tuple(sorted(versions))


def _file(name: str) -> Path | None:
    """The Python file of a module, None if it has none or does not exist. Imports the module's parents."""
    module = sys.modules.get(name)
    try:
        spec = importlib.util.find_spec(name) if module is None else None
    except Exception:  # noqa: BLE001 - whatever a parent raises that no kernel has imported so far
        return None
    origin = getattr(module, "__file__", None) or (spec.origin if spec is not None else None)
    return Path(origin) if origin and origin.endswith(".py") else None


def _imports(name: str, path: Path) -> Iterator[str]:
    """The modules that a module's text may import."""
    try:
        tree = ast.parse(_text(path) or b"")
    except (SyntaxError, ValueError):  # nothing that was imported
        return
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _statements(tree):
        if isinstance(node, ast.Import):  # binds the first name, through which the parents can be used
            for words in (alias.name.split(".") for alias in node.names):
                yield from (".".join(words[:n]) for n in range(1, len(words) + 1))
        else:
            parts = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)  # a module or an attribute of one


def _statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements that may run, those of functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(ast.Module(node.orelse, []))
        else:
            yield from _statements(node)


@functools.cache
def _distributions() -> dict[str, list[metadata.Distribution]]:
    """The installed distributions of each top-level module. (``packages_distributions`` of Python 3.10 misses those
    without a ``top_level.txt``.)"""
    found: dict[str, list[metadata.Distribution]] = {}
    for distribution in metadata.distributions():
        text = distribution.read_text("top_level.txt")
        tops = (
            text.split() if text else {file.parts[0].partition(".")[0] for file in distribution.files or ()}
        )
        for top in tops:
            found.setdefault(top, []).append(distribution)
    return found


def _release(top: str) -> str | None:
    """Name and version of the installed distribution that a top-level module belongs to; None for one of a checkout."""
    distributions = _distributions().get(top, [])
    try:
        spec = importlib.util.find_spec(top) if distributions else None
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    for distribution in distributions:
        folder = Path(str(distribution.locate_file("")))
        if any(Path(place).is_relative_to(folder) for place in places):
            return f"{distribution.metadata['Name']} {distribution.version}"
    return None
