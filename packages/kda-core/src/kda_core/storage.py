"""Files that other processes, other users and crashes share: what is trusted, whole-file writes, locks that end with
their owner.

Compiled kernels are native code, so their folder deserves the trust of a folder of Python packages: nothing is read from
a folder or a file that belongs to somebody else than this process's user or root, or that others may write. Each is
checked when it is opened, on the open descriptor, and files are opened relative to their folder's descriptor: whoever
swaps a path between the check and the use gains nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("kda_core")

#: Elsewhere there are no owners and modes of this kind: nothing is checked, and nothing is read or written here.
_POSIX = os.name == "posix"
if _POSIX:
    _OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO in place of a file must not hang its reader
_warned: dict[object, object] = {}


class UntrustedError(PermissionError):
    """A folder or file that may hold what somebody else wrote; the message says why and how to mend it."""


def warn_once(key: object, message: str, *args: object) -> None:
    """Log a warning by the logger ``kda_core``, once a process for each key."""
    mine = object()
    if _warned.setdefault(key, mine) is mine:  # of several threads one
        logger.warning(message, *args)


def is_warned(key: object) -> bool:
    """Whether `warn_once` has said this."""
    return key in _warned


def forget_warnings() -> None:
    """Let `warn_once` say everything again."""
    _warned.clear()


# ---- trust


def _foreign(status: os.stat_result, path: object) -> str | None:
    """Why something may hold what somebody else wrote; None if only this process's user or root can have."""
    if status.st_uid not in (0, os.geteuid()):
        return (
            f"{path} belongs to uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}, and only what belongs to this "
            f"process's user (uid {os.geteuid()}) or to root is trusted: name another folder, or change the owner"
        )
    if status.st_mode & 0o022:
        return (
            f"{path} can be written by others: owner uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}; "
            f"mend it with `chmod go-w {path}` if nobody else has written there"
        )
    return None


@dataclass(frozen=True)
class Folder:
    """A trusted folder, opened; its files are reached through the ``descriptor`` and named by the ``path``."""

    path: Path
    descriptor: int

    def read(self, name: str, limit: int) -> bytes:
        """The content of a regular, trusted file of at most ``limit`` bytes.

        Raises ``UntrustedError``; ``OSError`` if it is absent or cannot be read.
        """
        path = self.path / name
        try:
            descriptor = os.open(name, os.O_RDONLY | _OPEN, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UntrustedError(f"{path} is a symbolic link: remove it") from error
            raise
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UntrustedError(f"{path} is not a regular file: remove it")
            if problem := _foreign(status, path):
                raise UntrustedError(problem)
            content = file.read(limit + 1)
            if len(content) > limit:
                raise UntrustedError(f"{path} is larger than {limit} bytes: remove it")
            return content

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file or nothing: under a name that nobody can guess, then renamed. Its writer alone may write it,
        and whoever may enter the folder may read it, whatever the umask: a folder may serve many users."""
        temporary = f"{name}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
        descriptor = os.open(temporary, flags, 0o600, dir_fd=self.descriptor)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(descriptor, 0o644)
                os.fsync(descriptor)  # or a crash may keep the rename and lose the bytes
            os.replace(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self.descriptor)
            raise

    def sweep(self, name: str) -> None:
        """Remove what killed writers of a file left behind. Call it with the lock that its writers hold."""
        for left in os.listdir(self.descriptor):
            if left.startswith(f"{name}.") and left.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    os.unlink(left, dir_fd=self.descriptor)

    @contextlib.contextmanager
    def locked(self, name: str, patience: Patience | None = None) -> Iterator[None]:
        """Hold an advisory lock on a file of the folder, among all processes and threads. The kernel drops it when its
        holder dies. The file holds the holder's process id.

        Raises ``TimeoutError`` when ``patience`` ends, and other ``OSError`` where no lock can be had.
        """
        import fcntl  # POSIX only, as is whatever needs a lock here

        path = self.path / name
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=self.descriptor)
        _locks.add(descriptor)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UntrustedError(f"{path} is not a regular file: remove it")
            _wait(descriptor, path, patience or Patience())
            with contextlib.suppress(OSError):  # on a full disk nobody learns who holds it
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            if (
                descriptor in _locks
            ):  # else this is a child, which has closed it and must not end its parent's lock
                _locks.discard(descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone leaves it to the copies of children
                os.close(descriptor)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Folder]:
    """A trusted folder for a block.

    Raises ``UntrustedError``; ``OSError`` if there is no folder or it cannot be read.
    """
    link = os.lstat(path)
    if not _POSIX:
        raise OSError(errno.ENOTSUP, "compiled kernels and calibrations are kept on POSIX systems only")
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{path} is a symbolic link that uid {link.st_uid} made: name another folder")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if problem := _foreign(os.fstat(descriptor), path):
            raise UntrustedError(problem)
        yield Folder(path, descriptor)
    finally:
        os.close(descriptor)


def folder_problem(path: Path) -> str | None:
    """Why a folder is not used for compiled kernels and calibrations, and how to mend it; None if it is sound, or if it
    does not exist and can be made. Never raises, changes nothing, takes a few system calls."""
    if not _POSIX:
        return None
    try:
        with opened(path):
            return None
    except FileNotFoundError:
        return _making_problem(path)
    except UntrustedError as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be opened as a folder: {error.strerror}"


def _making_problem(path: Path) -> str | None:
    if os.path.lexists(path):
        return f"{path} is a symbolic link to nowhere"
    nearest = path.absolute().parent
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{path} cannot be made: {nearest} is no folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{path} cannot be made: uid {os.geteuid()} may not write {nearest}"
    return None


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, for this user alone whatever the umask."""
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_folder(path.parent)
        make_folder(path)
    except FileExistsError:
        if not path.is_dir():
            raise


_own: dict[tuple[int, str], Path] = {}


def private_folder() -> Path | None:
    """A folder of this user alone below the system's temporary one: ``kda-core-<uid>``, or where somebody else holds that
    name, one that is removed when this process ends. None if nothing can be written anywhere."""
    try:
        base = tempfile.gettempdir()
        folder = Path(base) / f"kda-core-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.lstat(folder)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return folder
        key = os.geteuid(), base
        if key not in _own or not _own[key].is_dir():
            _own[key] = Path(tempfile.mkdtemp(prefix="kda-core-"))
            atexit.register(_remove, _own[key], os.getpid())
        return _own[key]
    except OSError:
        return None


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a child that was forked later
        shutil.rmtree(folder, ignore_errors=True)


# ---- locks


@dataclass(frozen=True)
class Patience:
    """How long `Folder.locked` waits: a warning after ``notice_s`` seconds, ``TimeoutError`` after ``limit_s``. ``clock`` and
    ``sleep`` are there for tests."""

    notice_s: float = 10.0
    limit_s: float = 300.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


#: Descriptors of locks. A child of `os.fork` closes its copies: the kernel drops a lock when the last copy is closed, so
#: a child would keep the lock of a parent that was killed.
_locks: set[int] = set()


def _wait(descriptor: int, path: Path, patience: Patience) -> None:
    import fcntl

    start, told, pause = patience.clock(), False, 0.01
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = patience.clock() - start
        if waited >= patience.limit_s:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"process {_holder(descriptor)} has held the lock {path} for more than {patience.limit_s:.0f} s",
            )
        if waited >= patience.notice_s and not told:
            told = True
            logger.warning(
                "waiting for process %s, which holds the lock %s (it compiles the same kernel, as a rule); "
                "after %.0f s this process goes on without it",
                _holder(descriptor),
                path,
                patience.limit_s,
            )
        patience.sleep(pause)
        pause = min(2 * pause, 0.5)


def _holder(descriptor: int) -> str:
    try:
        text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    except OSError:
        return "unknown"
    return text if text.isdigit() else "unknown"


def _close_locks() -> None:
    for descriptor in _locks:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)
