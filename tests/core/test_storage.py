"""The cache folder in every state, trusted files and folders, locks across forks and kills."""

from __future__ import annotations

import os
import pickle
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from kda_core import env, storage

NOBODY = 65534


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A separate temporary folder and home directory; `warn_once` has logged nothing."""
    folder, home = tmp_path / "tmp", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("KDA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(storage, "_own", {})
    storage.forget_warnings()
    yield folder
    storage.forget_warnings()


def give_away(path: Path, monkeypatch) -> None:
    """Makes a path belong to another user."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)


def private(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700


# ---- the cache folder


def test_a_trusted_folder_is_used(tmp_path, monkeypatch, caplog):
    assert env.cache_dir() == tmp_path / "home" / ".cache" / "kda-core"
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "new" / "folder"))
    assert env.cache_dir() == tmp_path / "new" / "folder"
    (tmp_path / "new").mkdir()
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "new" / "folder").symlink_to(tmp_path / "real")
    assert env.cache_dir() == tmp_path / "new" / "folder"
    assert env.cache_dir_problem() is None and not caplog.records


def test_without_a_home_directory_the_folder_is_private(temporary, monkeypatch, caplog):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    folder = env.cache_dir()
    assert folder == temporary / f"kda-core-{os.geteuid()}" and private(folder)
    assert env.cache_dir() == folder
    (record,) = caplog.records
    assert record.name == "kda_core" and record.levelname == "WARNING"
    assert "home directory" in record.getMessage() and "Set KDA_CACHE_DIR" in record.getMessage()
    assert str(folder) in record.getMessage()


#: Drops the capability to ignore permissions, because root could write anywhere.
UNPRIVILEGED = """
import ctypes, os, sys
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None, use_errno=True).capset(header, nothing) == 0
from kda_core import env
from kda_cp import constants
print(env.cache_dir())
print(constants.lookup(("NVIDIA H200", "sm90", "bfloat16"))[1])
"""


@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_a_home_directory_without_permission_is_replaced(tmp_path, temporary, mode):
    pytest.importorskip("kda_cp")
    home = tmp_path / "home"
    home.chmod(mode)
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HOME": str(home),
        "TMPDIR": str(temporary),
    }
    command = [sys.executable, "-c", UNPRIVILEGED]
    try:
        done = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    finally:
        home.chmod(0o700)
    assert done.stdout.split() == [str(temporary / f"kda-core-{os.geteuid()}"), "shipped"]
    assert done.stderr.count("The default cache folder is not used") == 1  # without a logging configuration


def bad_folder(kind: str, path: Path, monkeypatch) -> str:
    """Makes `path` a folder that cannot be used. Returns a word of the warning."""
    if kind == "file":
        path.write_text("a file")
        return "Not a directory"
    if kind == "below a file":
        path.parent.joinpath("file").write_text("a file")
        monkeypatch.setenv("KDA_CACHE_DIR", str(path.parent / "file" / "folder"))
        return "Not a directory"
    if kind == "unknown user":
        monkeypatch.setenv("KDA_CACHE_DIR", "~nobody-of-this-name/cache")
        return "home directory"
    if kind == "link to nowhere":
        path.symlink_to(path.parent / "nowhere")
        return "symbolic link whose target does not exist"
    if kind == "loop":
        path.symlink_to(path)
        return "symbolic link"
    path.mkdir()
    if kind == "foreign":
        give_away(path, monkeypatch)
        return f"belongs to uid {path.stat().st_uid}, mode 0755"
    path.chmod(int(kind, 8))
    return f"chmod go-w {path}"


@pytest.mark.parametrize(
    "kind",
    ["file", "below a file", "unknown user", "link to nowhere", "loop", "foreign", "0777", "0775", "1777"],
)
def test_a_named_folder_that_cannot_be_trusted_is_replaced(tmp_path, temporary, monkeypatch, caplog, kind):
    path = tmp_path / "cache"
    monkeypatch.setenv("KDA_CACHE_DIR", str(path))
    before = os.umask(0o022)
    word = bad_folder(kind, path, monkeypatch)
    os.umask(before)
    folder = env.cache_dir()
    if kind != "foreign" or os.geteuid() == 0:
        assert folder.parent == temporary and private(folder)
    assert env.cache_dir() == folder
    (record,) = caplog.records
    assert "KDA_CACHE_DIR" in record.getMessage() and word in record.getMessage(), record.getMessage()
    assert record.getMessage().startswith(env.cache_dir_problem())


def test_a_link_of_another_user_is_not_followed(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root can give a link away")
    (tmp_path / "mine").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    assert storage.folder_problem(link) is None
    give_away(link, monkeypatch)
    assert "symbolic link that uid 65534 made" in storage.folder_problem(link)


def test_a_folder_of_root_serves_all_users(tmp_path, monkeypatch):
    folder = tmp_path / "fleet"
    folder.mkdir(mode=0o755)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 1234)
    else:
        folder = Path("/usr")
    assert storage.folder_problem(folder) is None


@pytest.mark.parametrize("how", ["wide", "foreign", "link", "file"])
def test_another_user_may_own_the_name_of_the_private_folder(tmp_path, temporary, monkeypatch, how):
    name = temporary / f"kda-core-{os.geteuid()}"
    if how == "file":
        name.touch()
    elif how == "link":
        name.symlink_to(tmp_path / "home")
    else:
        name.mkdir()
        name.chmod(0o777)
        if how == "foreign":
            if os.geteuid() != 0:
                pytest.skip("only root can give a folder away")
            give_away(name, monkeypatch)
    folder = storage.private_folder()
    assert folder != name and folder.parent == temporary and private(folder)
    assert storage.private_folder() == folder


def test_without_a_writable_folder_nothing_raises(monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setenv("KDA_CACHE_DIR", "/dev/null/cache")
    assert env.cache_dir() == Path("/dev/null/cache")
    assert storage.private_folder() is None


def test_systems_without_owners_and_modes_are_not_checked(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(storage, "_POSIX", False)
    assert env.cache_dir() == tmp_path / "home" / ".cache" / "kda-core"
    assert env.cache_dir_problem() is None and not caplog.records
    with pytest.raises(OSError, match="POSIX systems only"), storage.opened(tmp_path):
        pass


def test_only_one_of_many_threads_warns(caplog):
    start = threading.Barrier(8)

    def warn():
        start.wait()
        storage.warn_once("key", "once")

    threads = [threading.Thread(target=warn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caplog.messages == ["once"]


# ---- files


def test_the_error_of_an_untrusted_file_passes_between_processes(tmp_path):
    (tmp_path / "home" / "file").symlink_to(tmp_path)
    with storage.opened(tmp_path / "home") as folder, pytest.raises(storage.UntrustedError) as caught:
        folder.read("file", 10)
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == f"{tmp_path / 'home' / 'file'} is a symbolic link: remove it"
    assert error.problem == f"{tmp_path / 'home' / 'file'} is a symbolic link"


def test_moving_replaces_a_file_and_follows_no_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "home" / "file").symlink_to(victim)
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "other" / "file").write_text("old")
    with storage.opened(tmp_path / "home") as folder, storage.opened(tmp_path / "other") as other:
        folder.move("file", other)
        folder.move("file", other)  # it does not exist any more
    assert not list((tmp_path / "home").iterdir())
    assert (tmp_path / "other" / "file").readlink() == victim
    assert victim.read_text() == "mine"


def test_a_full_disk_leaves_no_partial_file(tmp_path):
    import resource

    with storage.opened(tmp_path / "home") as folder:
        folder.write("file", b"before")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a longer write fails, as on a full disk
        try:
            with pytest.raises(OSError, match="too large"):
                folder.write("file", bytes(100_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert folder.read("file", 10) == b"before"
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["file"]


def test_writing_replaces_a_link_instead_of_following_it(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "home" / "file").symlink_to(victim)
    with storage.opened(tmp_path / "home") as folder:
        folder.write("file", b"new")
        assert folder.read("file", 10) == b"new"
    assert victim.read_text() == "mine"


def test_the_use_of_a_file_is_recorded(tmp_path):
    path = tmp_path / "home" / "file"
    with storage.opened(tmp_path / "home") as folder:
        folder.write("file", b"content")
        os.utime(path, (1e9, 1e9))
        folder.read("file", 10)
        assert path.stat().st_mtime == 1e9
        folder.read("file", 10, mark_used=True)
        first = path.stat()
        assert first.st_mtime == 1e9 and first.st_atime > 1.7e9


# ---- locks


def test_waiting_is_announced_and_ends(tmp_path, caplog):
    lock = tmp_path / "home" / "a.lock"
    short = storage.Patience(notice_s=0.01, limit_s=0.02)
    with storage.opened(tmp_path / "home") as folder:
        with (
            folder.locked("a.lock"),
            pytest.raises(TimeoutError, match="held the lock .*a.lock for more than 0 s") as caught,
            folder.locked("a.lock", short),
        ):
            pytest.fail("two hold one lock")
        (record,) = caplog.records
        assert f"waiting for process {os.getpid()}, which holds the lock {lock}" in record.getMessage()
        assert f"process {os.getpid()} " in str(caught.value)
        with folder.locked("a.lock", short):
            pass


def test_a_short_wait_is_not_announced(tmp_path, caplog):
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with storage.opened(tmp_path / "home") as folder, folder.locked("a.lock"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    threading.Timer(0.1, leave.set).start()
    hours = storage.Patience(notice_s=3600, limit_s=7200)
    with storage.opened(tmp_path / "home") as folder, folder.locked("a.lock", hours):
        assert leave.is_set()
    thread.join()
    assert not caplog.records


def test_an_untrusted_lock_file_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "home" / "a.lock")
    with (
        storage.opened(tmp_path / "home") as folder,
        pytest.raises(storage.UntrustedError, match="a.lock is not a regular file"),
        folder.locked("a.lock"),
    ):
        pytest.fail("locked something else")


#: Acquires the lock, forks a child that lives on, and is killed or releases the lock.
HOLDER = """
import os, signal, sys
from pathlib import Path
from kda_core import storage
read, write = os.pipe()
with storage.opened(Path(sys.argv[1])) as folder:
    with folder.locked("a.lock"):
        if os.fork() == 0:
            os.write(write, b"up")
            sys.stdin.read()  # until the test ends
            os._exit(0)
        os.read(read, 2)
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    print("released", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["killed", "released"])
def test_a_lock_ends_with_its_holder_even_if_a_child_lives_on(tmp_path, end):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "home"), end]
    holder = subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        if end == "killed":
            assert holder.wait() == -signal.SIGKILL
        else:
            assert holder.stdout.readline() == "released\n"
        at_once = storage.Patience(limit_s=0)
        with storage.opened(tmp_path / "home") as folder, folder.locked("a.lock", at_once):
            pass
    finally:
        holder.stdin.close()
        holder.stdout.close()
        holder.wait()


#: Forks within the block; the child leaves it first.
LEAVING_CHILD = """
import os, sys
from pathlib import Path
from kda_core import storage
patience = storage.Patience(limit_s=0)
with storage.opened(Path(sys.argv[1])) as folder:
    with folder.locked("a.lock"):
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            try:
                with folder.locked("a.lock", patience):
                    sys.exit("the child ended the lock")
            except TimeoutError:
                print("still held")
"""


def test_a_child_that_leaves_the_block_does_not_end_its_parents_lock(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", LEAVING_CHILD, str(tmp_path / "home")]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    assert done.stdout == "still held\n"
