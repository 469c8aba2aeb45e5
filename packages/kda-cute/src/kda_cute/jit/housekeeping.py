"""The cache folder as a whole: its entries, which of them this installation can still use, its size, and their removal.

Only files with the names of `kda_cute.jit.cache` are touched; calibrations of kda-cp lie in the same folder.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kda_core import env, storage
from kda_core.discovery import FAILURES
from kda_cute.jit.cache import METADATA_BYTES, QUARANTINE, Entry
from kda_cute.jit.key import compile_options, kernel_sources, toolchain

logger = logging.getLogger("kda_cute")

_FILE = re.compile(
    r"(?P<entry>[^/]+\.sm_\d+[af]?\.[0-9a-f]{64})\.(?P<suffix>o|json|lock|reason)(\.[0-9a-f]+\.tmp)?"
)
_DAY_S = 86400.0


@dataclass(frozen=True)
class Files:
    """The files of an entry.

    Attributes:
        name: ``<kernel>.<arch>.<digest>``, the common part of their names.
        files: their names.
        bytes: their total size.
        used: time of the last use, to the day, in seconds since the epoch.
    """

    name: str
    files: tuple[str, ...]
    bytes: int
    used: float

    @property
    def unused_days(self) -> float:
        """Days since the last use."""
        return (time.time() - self.used) / _DAY_S


@dataclass(frozen=True)
class Stored(Files):
    """An entry of the cache folder.

    Attributes:
        variant: the kernel, its configuration and its architecture; `name` if they cannot be read.
        stale: why this installation cannot use the entry; None if it can.
    """

    variant: str
    stale: str | None


@dataclass(frozen=True)
class Quarantined(Files):
    """A bad entry in the quarantine.

    Attributes:
        reason: why it was moved there.
    """

    reason: str


FilesType = TypeVar("FilesType", bound=Files)


def entries(path: Path) -> list[Stored]:
    """Returns the entries of a cache folder by name; none if the folder does not exist. A lock without other files is not an
    entry. Imports the DSL and the modules of the kernels.

    Raises:
        OSError: the folder cannot be read or is not trusted.
    """
    if not os.path.lexists(path):
        return []
    with storage.opened(path) as folder:
        return [
            Stored(f.name, f.files, f.bytes, f.used, *_examined(folder, f.name, f.files))
            for f in _groups(folder)
        ]


def quarantined(path: Path) -> list[Quarantined]:
    """Returns the bad entries in the quarantine of a cache folder.

    Raises:
        OSError: the quarantine cannot be read or is not trusted.
    """
    if not os.path.lexists(path / QUARANTINE):
        return []
    with storage.opened(path / QUARANTINE) as folder:
        return [
            Quarantined(f.name, f.files, f.bytes, f.used, _reason(folder, f.name)) for f in _groups(folder)
        ]


def least_recently_used(found: Sequence[FilesType], limit: int) -> list[FilesType]:
    """Returns the entries to remove, least recently used first, so that the others have at most `limit` bytes."""
    excess = sum(entry.bytes for entry in found) - limit
    chosen = []
    for entry in sorted(found, key=lambda entry: (entry.used, entry.name)):
        if excess <= 0:
            break
        chosen.append(entry)
        excess -= entry.bytes
    return chosen


def make_room(new: Entry, limit: int | None) -> None:
    """Removes the least recently used entries of the folder of `new`, but not `new`, until all have at most `limit` bytes. The
    quarantine may have the rest of the limit. Never raises: an entry that cannot be removed stays.

    Args:
        limit: bytes; None: no limit.
    """
    if limit is None:
        return
    with contextlib.suppress(OSError):
        with storage.opened(new.folder) as folder:
            found = _groups(folder)
        own = sum(entry.bytes for entry in found if entry.name == new.name)
        others = [entry for entry in found if entry.name != new.name]
        removed, _ = remove(new.folder, least_recently_used(others, limit - own))
        _report(new.folder, removed)
        left = own + sum(entry.bytes for entry in others) - sum(entry.bytes for entry in removed)
        remove(new.folder / QUARANTINE, least_recently_used(quarantined(new.folder), limit - left))


def _report(folder: Path, removed: list[Files]) -> None:
    if not removed:
        return
    logger.info("removed %d compiled kernels from %s, the least recently used ones", len(removed), folder)
    if recent := sum(entry.unused_days < 1 for entry in removed):
        storage.warn_once(
            ("full", folder),
            "%s is larger than %s=%s: %d compiled kernels were removed although they were used within a day. Raise the limit, "
            "or kernels compile again and again.",
            folder,
            env.KDA_CACHE_MAXSIZE.name,
            env.KDA_CACHE_MAXSIZE.raw(),
            recent,
            log=logger,
        )


def remove(path: Path, chosen: Iterable[FilesType]) -> tuple[list[FilesType], list[FilesType]]:
    """Removes entries from a cache folder or a quarantine. An entry that another process compiles at the moment stays.

    Returns:
        The entries that were removed, and those that were not.

    Raises:
        OSError: the folder cannot be opened or is not trusted.
    """
    removed: list[FilesType] = []
    kept: list[FilesType] = []
    chosen = list(chosen)
    if not chosen:
        return removed, kept
    with storage.opened(path) as folder:
        for entry in chosen:
            (removed if _remove(folder, entry) else kept).append(entry)
    return removed, kept


def _remove(folder: storage.Folder, entry: Files) -> bool:
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


def _groups(folder: storage.Folder) -> list[Files]:
    """The entries of a folder by name. A lock without other files is not an entry."""
    groups: dict[str, list[str]] = {}
    for name in sorted(os.listdir(folder.descriptor)):
        if match := _FILE.fullmatch(name):
            groups.setdefault(match["entry"], []).append(name)
    return [_files(folder, name, files) for name, files in groups.items() if files != [f"{name}.lock"]]


def _files(folder: storage.Folder, name: str, files: list[str]) -> Files:
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
    return Files(name, tuple(files), total, used)


def _reason(folder: storage.Folder, name: str) -> str:
    try:
        return folder.read(f"{name}.reason", METADATA_BYTES).decode(errors="replace")
    except OSError as error:
        return f"unknown ({error})"


def _examined(folder: storage.Folder, name: str, files: Sequence[str]) -> tuple[str, str | None]:
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
