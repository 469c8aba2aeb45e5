"""Files that processes and users share: which folders and files are trusted, whole-file writes, locks.

Compiled kernels are native code, so their folder needs the same trust as a folder of Python packages. A folder or file is read
only if it belongs to this process's user or to root and no other user may write it. Each is checked after it is opened, on the
descriptor, and files are opened relative to their folder's descriptor. Replacing a path between check and use therefore has no
effect.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import filelock

logger = logging.getLogger("kda_core")

#: Other systems have no owners and modes of this kind. There, nothing is checked, and nothing is read or written.
_POSIX = os.name == "posix"
if _POSIX:
    _OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a FIFO must not block
_warned: dict[object, object] = {}

#: Seconds after which `Folder.read` with ``mark_used`` records the use of a file again.
_DAY_S = 86400.0


class UntrustedError(PermissionError):
    """A folder or file that another user may have written. The message gives the reason and the remedy.

    Attributes:
        problem: the reason alone.
        remedy: the remedy, with the punctuation that separates it from the reason.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}{remedy}")
        self.problem, self.remedy = problem, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles with both arguments: a worker process of `precompile` may raise it."""
        return type(self), (self.problem, self.remedy)


def warn_once(key: object, message: str, *args: object, log: logging.Logger = logger) -> None:
    """Logs a warning, once a process for each key."""
    mine = object()
    if _warned.setdefault(key, mine) is mine:  # true in one of several threads
        log.warning(message, *args)


def is_warned(key: object) -> bool:
    """Returns whether `warn_once` has logged this key."""
    return key in _warned


def forget_warnings() -> None:
    """Makes `warn_once` log every key again."""
    _warned.clear()


# ---- trust


def _check_owner(status: os.stat_result, path: object) -> None:
    """Checks that only this process's user or root can have written a file or folder.

    Raises:
        UntrustedError: another user can have.
    """
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedError(
            f"{path} belongs to uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}, and only files of this process's "
            f"user (uid {os.geteuid()}) or of root are trusted",
            ": name another folder, or change the owner",
        )
    if status.st_mode & 0o022:
        raise UntrustedError(
            f"{path} can be written by others: owner uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}",
            f"; if nobody else has written there, run `chmod go-w {path}`",
        )


@dataclass(frozen=True)
class Patience:
    """How long `Folder.locked` waits.

    Attributes:
        notice_s: seconds after which a warning names the holder.
        limit_s: seconds after which `Folder.locked` raises ``TimeoutError``.
    """

    notice_s: float = 10.0
    limit_s: float = 300.0


@dataclass(frozen=True)
class Folder:
    """A trusted folder that is open.

    Attributes:
        path: its path, for messages.
        descriptor: its file descriptor, through which its files are opened.
    """

    path: Path
    descriptor: int

    def read(self, name: str, limit: int, mark_used: bool = False) -> bytes:
        """Returns the content of a regular, trusted file of at most `limit` bytes.

        Args:
            mark_used: set the file's access time to now if it is older than a day and this user may set it. Many file systems
                are mounted with options under which reading does not.

        Raises:
            UntrustedError: the file is not trusted, not a regular file, or larger.
            OSError: it does not exist or cannot be read.
        """
        path = self.path / name
        try:
            descriptor = os.open(name, os.O_RDONLY | _OPEN, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UntrustedError(f"{path} is a symbolic link", ": remove it") from error
            raise
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UntrustedError(f"{path} is not a regular file", ": remove it")
            _check_owner(status, path)
            content = file.read(limit + 1)
            if len(content) > limit:
                raise UntrustedError(f"{path} is larger than {limit} bytes", ": remove it")
            if mark_used and time.time() - status.st_atime > _DAY_S:
                with contextlib.suppress(OSError):
                    os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))
            return content

    def write(self, name: str, content: bytes) -> None:
        """Writes a file completely or not at all: under an unpredictable name, then renamed.

        Under any umask, only the owner may write the file, and all users who may enter the folder may read it, because one folder
        may serve many users.
        """
        temporary = f"{name}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
        descriptor = os.open(temporary, flags, 0o600, dir_fd=self.descriptor)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(descriptor, 0o644)
                os.fsync(descriptor)  # otherwise a crash may keep the rename and lose the content
            os.replace(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            self.remove(temporary)
            raise

    def remove(self, name: str) -> None:
        """Removes a file if it exists and this user may remove it."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.descriptor)

    def move(self, name: str, target: Folder) -> None:
        """Moves a file of any kind into another folder under the same name, where it replaces a file; does nothing if it does not
        exist.

        Raises:
            OSError: this user may not move it.
        """
        with contextlib.suppress(FileNotFoundError):
            os.rename(name, name, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def sweep(self, name: str) -> None:
        """Removes what killed writers of a file left behind. The caller holds the lock of the writers."""
        for left in os.listdir(self.descriptor):
            if left.startswith(f"{name}.") and left.endswith(".tmp"):
                self.remove(left)

    @contextlib.contextmanager
    def locked(self, name: str, patience: Patience | None = None) -> Iterator[None]:
        """Holds an advisory lock on a file of the folder, exclusive among all processes and threads.

        The lock is ``filelock``'s. It ends when its holder dies, even if a child that the holder forked lives on. The file
        contains the holder's process id, for messages. Packages that call this require ``filelock>=3.32.7``: in older versions
        a forked child keeps the lock, or ends it.

        Raises:
            TimeoutError: another holder kept the lock longer than `patience` allows.
            OSError: no lock can be had.
        """
        import filelock

        self._check_lock_file(name)
        lock = filelock.FileLock(self.path / name, mode=0o600, thread_local=False, fallback_to_soft=False)
        self._acquire(lock, name, patience or Patience())
        try:
            with contextlib.suppress(OSError):  # on a full disk the holder stays unknown
                self._write_holder(name)
            yield
        finally:
            lock.release()  # does nothing in a child that was forked within the block

    def _check_lock_file(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise UntrustedError(f"{self.path / name} is not a regular file", ": remove it")

    def _acquire(self, lock: filelock.BaseFileLock, name: str, patience: Patience) -> None:
        import filelock

        path = self.path / name
        with contextlib.suppress(filelock.Timeout):
            lock.acquire(timeout=min(patience.notice_s, patience.limit_s))
            return
        if patience.notice_s < patience.limit_s:
            logger.warning(
                "waiting for process %s, which holds the lock %s and probably compiles the same kernel; "
                "this process goes on without the lock after %.0f s",
                self._holder(name), path, patience.limit_s,
            )  # fmt: skip
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=patience.limit_s - patience.notice_s)
                return
        raise TimeoutError(
            errno.ETIMEDOUT,
            f"process {self._holder(name)} has held the lock {path} for more than {patience.limit_s:.0f} s",
        )

    def _write_holder(self, name: str) -> None:
        descriptor = os.open(name, os.O_WRONLY | _OPEN, dir_fd=self.descriptor)
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        finally:
            os.close(descriptor)

    def _holder(self, name: str) -> str:
        """Returns the process id in a lock file, "unknown" if there is none."""
        try:
            descriptor = os.open(name, os.O_RDONLY | _OPEN, dir_fd=self.descriptor)
            try:
                text = os.read(descriptor, 32).decode("ascii", "replace").strip()
            finally:
                os.close(descriptor)
        except OSError:
            return "unknown"
        return text if text.isdigit() else "unknown"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Folder]:
    """Opens a trusted folder for a block.

    Raises:
        UntrustedError: another user may have written the folder.
        OSError: it does not exist or cannot be opened.
    """
    link = os.lstat(path)
    if not _POSIX:
        raise OSError(errno.ENOTSUP, "compiled kernels and calibrations are kept on POSIX systems only")
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise UntrustedError(
            f"{path} is a symbolic link that uid {link.st_uid} made", ": name another folder"
        )
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(descriptor), path)
        yield Folder(path, descriptor)
    finally:
        os.close(descriptor)


def folder_problem(path: Path) -> str | None:
    """Returns why a folder cannot be used for compiled kernels and calibrations, with the remedy; None if it can, or if it does
    not exist and can be made. Never raises and changes nothing."""
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
        return f"{path} is a symbolic link whose target does not exist"
    nearest = path.absolute().parent
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{path} cannot be made: {nearest} is not a folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{path} cannot be made: uid {os.geteuid()} may not write {nearest}"
    return None


def make_folder(path: Path) -> None:
    """Makes a folder and its missing parents with mode 0700 under any umask."""
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
    """Returns a folder that only this user may enter, below the system's temporary folder: ``kda-core-<uid>``, or if another
    user owns that name, a new one that is removed when this process ends. None if no temporary folder can be written."""
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
    if os.getpid() == owner:  # not in a child that was forked later
        shutil.rmtree(folder, ignore_errors=True)
