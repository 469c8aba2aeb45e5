"""The cache folder as a whole: its entries, which of them this installation can still use, and their removal.

Only files with the names of `kda_cute.jit.cache` are touched; calibrations of kda-cp lie in the same folder.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_core import storage
from kda_core.discovery import FAILURES
from kda_cute.jit.cache import METADATA_BYTES
from kda_cute.jit.key import compile_options, kernel_sources, toolchain

_FILE = re.compile(r"(?P<entry>[^/]+\.sm_\d+[af]?\.[0-9a-f]{64})\.(?P<suffix>o|json|lock)(\.[0-9a-f]+\.tmp)?")
_DAY_S = 86400.0


@dataclass(frozen=True)
class Stored:
    """An entry of the cache folder.

    Attributes:
        name: ``<kernel>.<arch>.<digest>``, the common part of the names of its files.
        files: the names of its files.
        bytes: their total size.
        used: time of the last use, to the day, in seconds since the epoch.
        variant: the kernel, its configuration and its architecture; `name` if they cannot be read.
        stale: why this installation cannot use the entry; None if it can.
    """

    name: str
    files: tuple[str, ...]
    bytes: int
    used: float
    variant: str
    stale: str | None

    @property
    def unused_days(self) -> float:
        """Days since the last use."""
        return (time.time() - self.used) / _DAY_S


def entries(path: Path) -> list[Stored]:
    """Returns the entries of a cache folder by name; none if the folder does not exist. A lock without other files is not an
    entry. Imports the DSL and the modules of the kernels.

    Raises:
        OSError: the folder cannot be read or is not trusted.
    """
    if not os.path.lexists(path):
        return []
    with storage.opened(path) as folder:
        groups: dict[str, list[str]] = {}
        for name in sorted(os.listdir(folder.descriptor)):
            if match := _FILE.fullmatch(name):
                groups.setdefault(match["entry"], []).append(name)
        return [_stored(folder, name, files) for name, files in groups.items() if files != [f"{name}.lock"]]


def remove(path: Path, chosen: Iterable[Stored]) -> tuple[list[Stored], list[Stored]]:
    """Removes entries from a cache folder. An entry that another process compiles at the moment stays.

    Returns:
        The entries that were removed, and those that were not.

    Raises:
        OSError: the folder cannot be opened or is not trusted.
    """
    removed: list[Stored] = []
    kept: list[Stored] = []
    chosen = list(chosen)
    if not chosen:
        return removed, kept
    with storage.opened(path) as folder:
        for entry in chosen:
            (removed if _remove(folder, entry) else kept).append(entry)
    return removed, kept


def _remove(folder: storage.Folder, entry: Stored) -> bool:
    """Removes an entry under its lock. The commit marker goes first: a reader sees the whole entry or none. A process that waits
    for the lock meanwhile may compile together with one that comes later; both write the same entry."""
    lock = f"{entry.name}.lock"
    try:
        with folder.locked(lock, storage.Patience(notice_s=0.0, limit_s=0.0)):
            for name in sorted(entry.files):  # .json before .lock and .o
                if name != lock:
                    folder.remove(name)
            folder.remove(lock)
    except OSError:
        return False
    left = set(os.listdir(folder.descriptor))
    return left.isdisjoint(entry.files)


def _stored(folder: storage.Folder, name: str, files: list[str]) -> Stored:
    total, used = 0, 0.0
    for file in files:
        try:
            status = os.stat(file, dir_fd=folder.descriptor, follow_symlinks=False)
        except FileNotFoundError:  # another process removed it
            continue
        total += status.st_size
        used = max(used, status.st_mtime)
        if file.endswith(".o"):  # the only file that nothing but `Entry.read` reads
            used = max(used, status.st_atime)
    variant, stale = _examined(folder, name, files)
    return Stored(name, tuple(files), total, used, variant, stale)


def _examined(folder: storage.Folder, name: str, files: list[str]) -> tuple[str, str | None]:
    """The variant of an entry, and why it is stale."""
    if f"{name}.json" not in files or f"{name}.o" not in files:
        return name, "incomplete"
    try:
        ingredients = json.loads(folder.read(f"{name}.json", METADATA_BYTES))["ingredients"]
        config = ingredients["config"]
        variant = f"{ingredients['kernel'].partition(':')[2]}{config[config.index('(') :]} for {ingredients['arch']}"
        return variant, _stale(ingredients)
    except storage.UntrustedError as error:
        return name, str(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return name, "damaged"


def _stale(ingredients: dict[str, str]) -> str | None:
    changed = [name for name, value in toolchain().items() if ingredients.get(name) != value]
    if changed:
        return f"other {', '.join(changed)}"
    current = _current(ingredients["kernel"], ingredients["config"].partition("(")[0], ingredients["arch"])
    if current is None:
        return "its kernel is not installed"
    changed = [name for name, value in current.items() if ingredients[name] != value]
    return f"other {', '.join(changed)}" if changed else None


@functools.cache
def _current(kernel: str, config: str, arch: str) -> dict[str, str] | None:
    """The ingredients of an installed kernel class that its configuration's values do not change; None if it is not installed.
    Classes are named ``module:qualified.name``."""
    try:
        kernel_class, config_class = _class(kernel), _class(config)
    except FAILURES:
        return None
    sources = kernel_sources(kernel_class, config_class)
    return {"options": compile_options(kernel_class, arch), "sources": sources.digest()}


def _class(name: str) -> type:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise TypeError(f"{name} is not a class")
    return found
