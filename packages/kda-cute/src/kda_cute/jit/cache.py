"""Entries of the cache folder: whole-file writes, a lock for each kernel, checks of everything that is read.

| file | content |
| --- | --- |
| ``<kernel>.<arch>.<digest>.o`` | the exported object |
| ``<kernel>.<arch>.<digest>.json`` | the object's length and sha256, and the ingredients of the key |
| ``<kernel>.<arch>.<digest>.lock`` | the advisory lock of the compiling process, and its process id |

The ``.json`` file is written last and commits the entry. An object without it, or one that differs from it, counts as absent.
Reading needs no lock.

Objects are native code. `kda_core.storage` defines which folders and files are trusted. `kda_cute.jit.dsl.load` links the bytes
that were read and checked, not the file.
"""

from __future__ import annotations

import contextlib
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

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.stem}.{digest(self.ingredients)}{suffix}"

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

    def read(self) -> bytes | None:
        """Returns the object if the entry is committed, undamaged and trusted, else None. Warns once of an untrusted file."""
        try:
            with storage.opened(self.folder) as folder:
                metadata = json.loads(folder.read(self.metadata.name, METADATA_BYTES))
                content = folder.read(self.object.name, OBJECT_BYTES, mark_used=True)
        except storage.UntrustedError as error:
            storage.warn_once(
                ("untrusted", str(error)), "a compiled kernel is not used: %s", error, log=logger
            )
            return None
        except (OSError, ValueError, RecursionError):
            return None
        expected = {**_summary(content), "ingredients": self.ingredients}
        return content if metadata == expected else None

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


def _summary(content: bytes) -> dict[str, object]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def entry_of(variant: Variant) -> Entry:
    """Returns the place of a variant in the folder `env.cache_dir`. Imports the DSL."""
    return Entry(env.cache_dir(), variant.stem, variant.ingredients())
