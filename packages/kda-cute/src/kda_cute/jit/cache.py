"""Entries of the cache folder: whole-file writes, a lock for each kernel, checks of everything that is read.

| file | content |
| --- | --- |
| ``<kernel>.<arch>.<digest>.o`` | the exported object; ``<kernel>-ptx.<arch>.<digest>.o``: PTX and object, for an instrument (`kernels_made_by`) |
| ``<kernel>.<arch>.<digest>.json`` | the object's length and sha256, and the ingredients of the key |
| ``<kernel>.<arch>.<digest>.lock`` | the advisory lock of the compiling process, and its process id |
| ``quarantine/<kernel>.<arch>.<digest>.*`` | a bad entry, and the reason in a ``.reason`` file |

The ``.json`` file is written last and commits the entry. An object without it counts as absent. Reading needs no lock.

Objects are native code. `kda_core.storage` defines which folders and files are trusted. `kda_cute.jit.dsl.load` links the bytes
that were read and checked, not the file. A committed entry that is damaged or not trusted is bad: it counts as absent, and
`Entry.read` moves it to the quarantine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kda_core import env, storage
from kda_cute.jit.key import Variant, digest

logger = logging.getLogger("kda_cute")

#: The largest files that are read. Objects have up to a few MB, metadata a few kB.
OBJECT_BYTES = 256 << 20
METADATA_BYTES = 1 << 20

#: The folder of bad entries, in the cache folder.
QUARANTINE = "quarantine"
_AT_ONCE = storage.Patience(notice_s=0.0, limit_s=0.0)


@dataclass(frozen=True)
class Entry:
    """The place of a variant in a cache folder.

    Attributes:
        folder: the cache folder.
        stem: `Variant.stem`.
        ingredients: `Variant.ingredients`.
    """

    folder: Path
    stem: str
    ingredients: dict[str, str]

    @functools.cached_property
    def name(self) -> str:
        """The common part of the names of its files."""
        return f"{self.stem}.{digest(self.ingredients)}"

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.name}{suffix}"

    @property
    def object(self) -> Path:
        return self._path(".o")

    @property
    def metadata(self) -> Path:
        return self._path(".json")

    def exists(self) -> bool:
        """Returns whether the entry was committed. It may be damaged."""
        try:
            return self.metadata.exists()
        except OSError:
            return False

    def read(self, locked: bool = False) -> bytes | None:
        """Returns the object if the entry is committed, undamaged and trusted, else None. Moves a bad entry to the quarantine, and
        logs a warning with the reason.

        Args:
            locked: the caller holds the lock. Otherwise a bad entry is checked again under the lock, because its files may have
                been read while another process wrote them. It stays if that process still holds the lock.
        """
        try:
            with storage.opened(self.folder) as folder:
                content, problem = self._checked(folder)
                if problem is not None and locked:
                    self._set_aside(folder, problem)
        except storage.UntrustedError as error:
            storage.warn_once(
                ("untrusted", str(error)), "compiled kernels are not used: %s", error, log=logger
            )
            return None
        except OSError:
            return None
        if problem is None or locked:
            return content
        try:
            with self.locked(_AT_ONCE):
                return self.read(locked=True)
        except TimeoutError:
            return None
        except OSError as error:
            _warn_unused(problem, f"it cannot be moved to {QUARANTINE}: {error}")
            return None

    def _checked(self, folder: storage.Folder) -> tuple[bytes | None, str | None]:
        """Returns the object, or why the entry is bad; both None if it is not committed or cannot be read."""
        try:
            text = folder.read(self.metadata.name, METADATA_BYTES)
        except storage.UntrustedError as error:
            return None, error.problem
        except OSError:
            return None, None
        try:
            content = folder.read(self.object.name, OBJECT_BYTES, mark_used=True)
            metadata = json.loads(text)
        except FileNotFoundError:
            return None, f"{self.object} does not exist"
        except storage.UntrustedError as error:
            return None, error.problem
        except (ValueError, RecursionError):
            return None, f"{self.metadata} is damaged: it is not JSON"
        except OSError:
            return None, None
        summary = _summary(content)
        if metadata == {**summary, "ingredients": self.ingredients}:
            return content, None
        if not isinstance(metadata, dict) or metadata.get("ingredients") != self.ingredients:
            return None, f"{self.metadata} is damaged: it describes another kernel"
        return None, (
            f"{self.object} is damaged: its sha256 is {summary['sha256']}, and its metadata says {metadata.get('sha256')}"
        )

    def _set_aside(self, folder: storage.Folder, problem: str) -> None:
        """Moves a bad entry to the quarantine. The caller holds the lock."""
        path = self.folder / QUARANTINE
        try:
            storage.make_folder(path)
            with storage.opened(path) as quarantine:
                for file in (self.metadata, self.object):
                    folder.move(file.name, quarantine)
                quarantine.write(f"{self.name}.reason", problem.encode())
        except OSError as error:
            _warn_unused(problem, f"it cannot be moved to {path}: {error}")
        else:
            _warn_unused(problem, f"it was moved to {path}")

    def quarantined(self) -> str | None:
        """Returns why an entry of this name was moved to the quarantine; None if there is none."""
        try:
            with storage.opened(self.folder / QUARANTINE) as quarantine:
                return quarantine.read(f"{self.name}.reason", METADATA_BYTES).decode(errors="replace")
        except OSError:
            return None

    def commit(self, content: bytes) -> None:
        """Stores an object. The caller holds the lock.

        Raises:
            OSError: the folder cannot be written.
        """
        metadata = {**_summary(content), "ingredients": self.ingredients}
        with storage.opened(self.folder) as folder:
            for name, whole in (
                (self.object.name, content),
                (self.metadata.name, json.dumps(metadata, indent=1, sort_keys=True).encode()),
            ):
                folder.sweep(name)
                folder.write(name, whole)

    @contextlib.contextmanager
    def locked(self, patience: storage.Patience | None = None) -> Iterator[None]:
        """Holds the entry's lock, exclusive among all processes and threads. Makes the folder if it does not exist.

        Raises:
            TimeoutError: another holder kept the lock longer than `patience` allows.
            OSError: the folder cannot be used.
        """
        storage.make_folder(self.folder)
        with storage.opened(self.folder) as folder, folder.locked(self._path(".lock").name, patience):
            yield

    def differences(self) -> list[str]:
        """Returns a line for each entry of the same kernel, configuration and architecture: the ingredients that differ."""
        found = []
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.glob(f"{self.stem}.*.json")):
                found += self._difference(path)
        return found

    def _difference(self, path: Path) -> list[str]:
        try:
            with storage.opened(self.folder) as folder:
                other = json.loads(folder.read(path.name, METADATA_BYTES))["ingredients"]
            if any(other[name] != self.ingredients[name] for name in ("kernel", "config", "arch")):
                return []
            changed = [name for name, value in self.ingredients.items() if other.get(name) != value]
        except storage.UntrustedError as error:
            return [str(error)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            changed = []
        return [f"{path.name} differs in {', '.join(changed)}" if changed else f"{path.name} is damaged"]


def _warn_unused(problem: str, moved: str) -> None:
    storage.warn_once((problem, moved), "a compiled kernel is not used: %s; %s", problem, moved, log=logger)


def _summary(content: bytes) -> dict[str, object]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def entry_of(variant: Variant, with_ptx: bool = False) -> Entry:
    """Returns the place of a variant in the folder `env.cache_dir`. Imports the DSL. ``with_ptx``: of `dsl.export_with_ptx`."""
    if with_ptx:
        stem = f"{variant.kernel.__qualname__}-ptx.{variant.arch}"
        return Entry(env.cache_dir(), stem, variant.ingredients() | {"content": "PTX and object"})
    return Entry(env.cache_dir(), variant.stem, variant.ingredients())
