"""Entries of the cache folder, without the DSL: which files are an entry, and what a failed write leaves behind."""

from __future__ import annotations

import json
import os
import stat
import threading

import pytest

from kda_cute.jit.cache import QUARANTINE, Entry

INGREDIENTS = {"kernel": "package:Kernel", "config": "Config()", "arch": "sm_90a", "sources": "1"}
CONTENT = bytes(range(256)) * 10


@pytest.fixture
def entry(cache_dir):
    entry = Entry(cache_dir, "Kernel.sm_90a", INGREDIENTS)
    with entry.locked():
        entry.commit(CONTENT)
    return entry


def test_commit_then_read(entry):
    assert entry.read() == CONTENT
    assert entry.object.read_bytes() == CONTENT
    assert json.loads(entry.metadata.read_text())["ingredients"] == INGREDIENTS


@pytest.mark.parametrize("kept", [0, 1, 100, len(CONTENT) - 1])
@pytest.mark.parametrize("suffix", ["object", "metadata"])
def test_truncated_files_count_as_absent(entry, suffix, kept):
    path = getattr(entry, suffix)
    path.write_bytes(path.read_bytes()[: min(kept, path.stat().st_size - 1)])
    assert entry.read() is None
    entry.commit(CONTENT)
    assert entry.read() == CONTENT


def test_a_changed_byte_makes_an_entry_invalid(entry):
    entry.object.write_bytes(CONTENT[:-1] + b"\0")
    assert entry.read() is None


@pytest.mark.parametrize("text", ["[]", "null", '{"bytes": 2560}', "\xff"])
def test_metadata_of_another_form_counts_as_absent(entry, text):
    entry.metadata.write_text(text, encoding="latin-1")
    assert entry.read() is None


def test_metadata_of_another_key_counts_as_absent(entry):
    other = Entry(entry.folder, entry.stem, {**INGREDIENTS, "sources": "2"})
    entry.metadata.rename(other.metadata)
    entry.object.rename(other.object)
    assert other.read() is None


def test_an_object_is_not_committed_before_its_metadata(entry, monkeypatch):
    entry.metadata.unlink()
    entry.object.unlink()
    replace, renamed = os.replace, []

    def fail_at_metadata(source, target, **folders):
        if str(target).endswith(".json"):
            raise OSError(28, "No space left on device")
        renamed.append(target)
        replace(source, target, **folders)

    monkeypatch.setattr(os, "replace", fail_at_metadata)
    with pytest.raises(OSError, match="No space"):
        entry.commit(CONTENT)
    assert renamed == [entry.object.name]
    assert entry.read() is None
    assert not list(entry.folder.glob("*.tmp"))


def test_reading_takes_no_lock_and_creates_nothing(cache_dir):
    assert Entry(cache_dir, "Kernel.sm_90a", INGREDIENTS).read() is None
    assert not cache_dir.exists()


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_folders_are_private_and_files_readable_whatever_the_umask(tmp_path, umask):
    folder = tmp_path / "new" / "folder"
    before = os.umask(umask)
    try:
        entry = Entry(folder, "Kernel.sm_90a", INGREDIENTS)
        with entry.locked():
            entry.commit(CONTENT)
    finally:
        os.umask(before)
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes.pop(".lock", 0o600) == 0o600  # some versions of filelock remove the file
    assert modes == {".o": 0o644, ".json": 0o644}
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_the_lock_is_exclusive_and_per_entry(entry):
    inside = threading.Semaphore(1)
    overlaps = []

    def hold():
        for _ in range(20):
            with entry.locked():
                overlaps.append(not inside.acquire(blocking=False))
                inside.release()

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [False] * 60
    other = Entry(entry.folder, entry.stem, {**INGREDIENTS, "sources": "2"})
    with entry.locked(), other.locked():
        pass


@pytest.mark.parametrize("which", ["object", "metadata"])
def test_a_file_that_is_not_regular_counts_as_absent_and_is_replaced(entry, caplog, tmp_path, which):
    path = getattr(entry, which)
    for make in (os.mkfifo, lambda path: path.symlink_to(tmp_path / "elsewhere")):
        (tmp_path / "elsewhere").write_bytes(path.read_bytes())
        path.unlink()
        make(path)
        assert entry.read() is None  # without blocking on the FIFO
        assert str(path) in caplog.text
        with entry.locked():
            entry.commit(CONTENT)
        assert entry.read() == CONTENT and not path.is_symlink()


@pytest.mark.parametrize("which", ["object", "metadata"])
@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_is_not_used(entry, caplog, which, mode):
    path = getattr(entry, which)
    path.chmod(mode)
    assert entry.read() is None
    assert entry.read() is None
    (record,) = caplog.records
    assert record.name == "kda_cute" and f"mode {mode:04o}" in record.getMessage()
    assert entry.quarantined() in record.getMessage()


@pytest.mark.parametrize("which", ["object", "metadata"])
def test_a_file_of_another_user_is_not_used(entry, caplog, which):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(getattr(entry, which), 65534, 65534)
    assert entry.read() is None
    assert "belongs to uid 65534" in entry.quarantined() and entry.quarantined() in caplog.text


# ---- the quarantine


def quarantine(entry):
    """Returns the content of the quarantine by name."""
    return {path.name: path.read_bytes() for path in (entry.folder / QUARANTINE).iterdir()}


DAMAGE = {
    "object": (lambda entry: entry.object.write_bytes(CONTENT[:-1] + b"\0"), "is damaged: its sha256 is"),
    "no object": (lambda entry: entry.object.unlink(), "does not exist"),
    "metadata": (lambda entry: entry.metadata.write_text("{"), "is damaged: it is not JSON"),
    "key": (lambda entry: entry.metadata.write_text('{"ingredients": {}}'), "describes another kernel"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_bad_entry_is_moved_to_the_quarantine_with_the_reason(entry, caplog, how):
    damage, word = DAMAGE[how]
    damage(entry)
    files = {path.name: path.read_bytes() for path in (entry.metadata, entry.object) if path.exists()}
    assert entry.read() is None and not entry.exists() and not entry.object.exists()
    reason = entry.quarantined()
    assert word in reason
    assert quarantine(entry) == files | {f"{entry.name}.reason": reason.encode()}
    assert stat.S_IMODE((entry.folder / QUARANTINE).stat().st_mode) == 0o700
    (record,) = caplog.records
    assert record.levelname == "WARNING" and reason in record.getMessage()
    assert str(entry.folder / QUARANTINE) in record.getMessage()
    with entry.locked():
        entry.commit(CONTENT)
    assert entry.read() == CONTENT


def test_the_newest_bad_entry_of_a_name_replaces_the_older_one(entry):
    for content in (b"first", b"second"):
        entry.object.write_bytes(content)
        assert entry.read() is None
        with entry.locked():
            entry.commit(CONTENT)
    assert quarantine(entry)[entry.object.name] == b"second"


def test_an_entry_that_a_process_writes_at_the_moment_stays(entry, caplog):
    """A reader may see the new object with the old metadata."""
    with entry.locked():
        entry.object.write_bytes(b"new")
        assert entry.read() is None
        assert entry.object.exists() and entry.quarantined() is None
        entry.commit(CONTENT)
    assert entry.read() == CONTENT and not caplog.records


def test_a_bad_entry_stays_if_it_cannot_be_moved(entry, caplog):
    (entry.folder / QUARANTINE).write_text("a file is in the way")
    entry.object.write_bytes(b"")
    assert entry.read() is None
    assert "it cannot be moved" in caplog.text and entry.object.exists()
    with entry.locked():
        entry.commit(CONTENT)
    assert entry.read() == CONTENT


def test_an_entry_without_its_metadata_is_not_bad(entry, caplog):
    """Its writer was killed."""
    entry.metadata.unlink()
    assert entry.read() is None
    assert entry.quarantined() is None and not caplog.records


def test_files_that_are_too_large_are_not_read(entry, monkeypatch, caplog):
    monkeypatch.setattr("kda_cute.jit.cache.OBJECT_BYTES", len(CONTENT) - 1)
    assert entry.read() is None
    assert f"larger than {len(CONTENT) - 1} bytes" in caplog.text


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_the_lock_is_a_regular_file_of_the_folder(entry, make):
    lock = entry.object.with_suffix(".lock")
    lock.unlink(missing_ok=True)
    make(lock)
    with pytest.raises(OSError, match=r"\.lock"), entry.locked():
        pytest.fail("locked something else")


def test_files_of_killed_writers_are_removed(entry):
    left = entry.object.with_name(f"{entry.object.name}.0123456789abcdef.tmp")
    other = entry.folder / "Other.sm_90a.o.0123.tmp"
    left.touch()
    other.touch()
    with entry.locked():
        entry.commit(CONTENT)
    assert not left.exists() and other.exists()


def test_differences_name_the_ingredients_that_changed(entry):
    other = Entry(entry.folder, entry.stem, {**INGREDIENTS, "sources": "2", "cpu": "x"})
    assert other.differences() == [f"{entry.metadata.name} differs in sources, cpu"]
    assert Entry(entry.folder, entry.stem, {**INGREDIENTS, "config": "Config(1)"}).differences() == []
    entry.metadata.write_text("{")
    assert other.differences() == [f"{entry.metadata.name} is damaged"]
