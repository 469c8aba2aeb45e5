"""The folder of compiled kernels: whole-file writes, one compiler at a time per kernel, no trust in what it
finds.

An entry is two files. ``<kernel>.<arch>.<digest>.o`` is the exported object. ``....json`` holds its length,
its sha256 and the ingredients of the key; it is written last and commits the entry: an object without it, or
one that differs from it, counts as absent. Both are written under another name and renamed. ``....lock`` is
empty and carries the advisory lock; the kernel drops that when its owner dies. Reading needs no lock.

The objects are native code: the folder deserves the trust of a folder of Python packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kda_core import env
from kda_core.cute.key import Variant, digest

logger = logging.getLogger("kda_core.cute")


def _write(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: under a name of its own, then renamed. Modes follow the umask."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash may keep the rename and lose the bytes
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Entry:
    """One variant's place in a cache folder. ``OSError`` from a method means that the folder cannot be
    used."""

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
        return self.metadata.exists()

    def read(self) -> Path | None:
        """The path of the object if the entry is committed and undamaged, else None."""
        try:
            metadata = json.loads(self.metadata.read_bytes())
            content = self.object.read_bytes()
        except (OSError, ValueError):
            return None
        expected = {**_summary(content), "ingredients": self.ingredients}
        return self.object if metadata == expected else None

    def commit(self, content: bytes) -> Path:
        """Store an object. Call it with the lock held."""
        _write(self.object, content)
        metadata = {**_summary(content), "ingredients": self.ingredients}
        _write(self.metadata, json.dumps(metadata, indent=1, sort_keys=True).encode())
        return self.object

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold this entry's lock among all processes and threads; makes the folder if need be."""
        import fcntl  # POSIX only, as are the DSL's wheels with a CUDA runtime

        # The default folder is private; one that the user names may be meant for several users.
        self.folder.mkdir(mode=0o777 if env.KDA_CACHE_DIR.raw() else 0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process that compiles %s", self.stem)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def differences(self) -> list[str]:
        """For each entry of the same kernel, configuration and architecture: what keeps it from being this
        one."""
        found = []
        for path in sorted(self.folder.glob(f"{self.stem}.*.json")):
            try:
                other = json.loads(path.read_bytes())["ingredients"]
                if all(other[name] == self.ingredients[name] for name in ("kernel", "config", "arch")):
                    changed = [name for name, value in self.ingredients.items() if other.get(name) != value]
                    found.append(
                        f"{path.name} differs in {', '.join(changed)}"
                        if changed
                        else f"{path.name} is damaged"
                    )
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                found.append(f"{path.name} is damaged")
        return found


def _summary(content: bytes) -> dict[str, object]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def entry_of(variant: Variant) -> Entry:
    """The place of a variant in the folder that ``KDA_CACHE_DIR`` names now. Imports the DSL."""
    return Entry(env.cache_dir(), variant.stem, variant.ingredients())
