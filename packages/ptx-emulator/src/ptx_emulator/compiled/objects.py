"""The folder of object code: functions that a process has compiled are linked, not compiled, by later processes."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "PTX_EMULATOR_CACHE_DIR"
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Compiled:
    """A compiled function.

    Attributes:
        needs: the names of the functions that it calls.
        image: an ELF object that exports it.
    """

    needs: tuple[str, ...]
    image: bytes


def folder_of(machine: Sequence[str]) -> Path | None:
    """Return the folder of the functions of this version of the emulator; None if there is none that only this user can write.

    Args:
        machine: names the compiler and the processor.
    """
    given = os.environ.get(VARIABLE)
    if given == "":
        return None
    key = hashlib.sha256()
    for part in (*machine, *(path.read_text() for path in sorted(_PACKAGE.rglob("*.py")))):
        key.update(hashlib.sha256(part.encode()).digest())
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = Path(given or Path(base, "ptx-emulator")).expanduser()
        folder = root / key.hexdigest()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        states = [path.lstat() for path in (root, folder)]
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    # Who can write `root` can replace `folder`.
    mine = all(stat.S_ISDIR(s.st_mode) and s.st_uid == os.getuid() and not s.st_mode & 0o022 for s in states)
    return folder if mine else None


def _path(folder: Path, name: str) -> Path:
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()}.o"


def read(folder: Path | None, name: str) -> Compiled | None:
    """Return a function; None if the folder has none, or a damaged one."""
    if folder is None:
        return None
    with suppress(OSError, ValueError):
        digest, content = _path(folder, name).read_bytes().split(b"\n", 1)
        if hashlib.sha256(content).hexdigest().encode() == digest:
            needs, image = content.split(b"\n", 1)
            return Compiled(tuple(needs.decode().split()), image)
    return None


def write(folder: Path | None, name: str, compiled: Compiled) -> None:
    """Keep a function. A folder that cannot be written is no error."""
    if folder is None:
        return
    content = " ".join(compiled.needs).encode() + b"\n" + compiled.image
    with suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            os.replace(temporary, _path(folder, name))
        except BaseException:
            os.unlink(temporary)
            raise
