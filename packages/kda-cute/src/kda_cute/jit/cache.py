"""The folder of compiled kernels: whole-file writes, one compiler at a time per kernel, no trust in what it
finds.

An entry is two files. ``<kernel>.<arch>.<digest>.o`` is the exported object. ``....json`` holds its length,
its sha256 and the ingredients of the key; it is written last and commits the entry: an object without it, or
one that differs from it, counts as absent. Both are written under another name and renamed. ``....lock``
carries the advisory lock and the process id of its holder. Reading needs no lock.

The objects are native code: the folder deserves the trust of a folder of Python packages. `kda_core.storage`
says which folders and files are trusted; `folder_problem` is its answer for one folder. What was read and
checked is what is run: `kda_cute.jit.compile` links the bytes, not the path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kda_core import env, storage
from kda_core.storage import Patience, folder_problem
from kda_cute.jit.key import Variant, digest

__all__ = ["Entry", "Patience", "entry_of", "folder_problem"]

#: Larger files are none of ours: objects have up to a few MB, metadata a few kB.
OBJECT_BYTES = 256 << 20
METADATA_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One variant's place in a cache folder."""

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
        """Whether there is a commit marker, be the entry sound or not."""
        try:
            return self.metadata.exists()
        except OSError:
            return False

    def read(self) -> bytes | None:
        """The object if the entry is committed, undamaged and to be trusted, else None. What is there and not trusted is
        warned of once."""
        try:
            with storage.opened(self.folder) as folder:
                metadata = json.loads(folder.read(self.metadata.name, METADATA_BYTES))
                content = folder.read(self.object.name, OBJECT_BYTES)
        except storage.UntrustedError as error:
            storage.warn_once(("untrusted", str(error)), "a compiled kernel is not used: %s", error)
            return None
        except (OSError, ValueError, RecursionError):
            return None
        expected = {**_summary(content), "ingredients": self.ingredients}
        return content if metadata == expected else None

    def commit(self, content: bytes) -> None:
        """Store an object. Call it with the lock held. Raises ``OSError``."""
        metadata = {**_summary(content), "ingredients": self.ingredients}
        with storage.opened(self.folder) as folder:
            for name, whole in (
                (self.object.name, content),
                (self.metadata.name, json.dumps(metadata, indent=1, sort_keys=True).encode()),
            ):
                folder.sweep(name)
                folder.write(name, whole)

    @contextlib.contextmanager
    def locked(self, patience: Patience | None = None) -> Iterator[None]:
        """Hold this entry's lock among all processes and threads; makes the folder if need be.

        Raises ``TimeoutError`` where another holds it for longer than `Patience` allows, and other ``OSError`` where the
        folder cannot be used.
        """
        storage.make_folder(self.folder)
        with storage.opened(self.folder) as folder, folder.locked(self._path(".lock").name, patience):
            yield

    def differences(self) -> list[str]:
        """For each entry of the same kernel, configuration and architecture: what keeps it from being this
        one."""
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
    """The place of a variant in the folder of `env.cache_dir`. Imports the DSL."""
    return Entry(env.cache_dir(), variant.stem, variant.ingredients())
