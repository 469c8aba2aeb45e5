"""The cache folder by itself, without the DSL: what counts as an entry, and what a failed write leaves
behind."""

from __future__ import annotations

import json
import os
import stat
import threading
import time

import pytest

from kda_core.cute.cache import Entry

INGREDIENTS = {"kernel": "package:Kernel", "config": "Config()", "arch": "sm_90a", "sources": "1"}
CONTENT = bytes(range(256)) * 10


@pytest.fixture
def entry(cache_dir):
    entry = Entry(cache_dir, "Kernel.sm_90a", INGREDIENTS)
    with entry.locked():
        entry.commit(CONTENT)
    return entry


def test_commit_then_read(entry):
    assert entry.read() == entry.object
    assert entry.object.read_bytes() == CONTENT
    assert json.loads(entry.metadata.read_text())["ingredients"] == INGREDIENTS


@pytest.mark.parametrize("kept", [0, 1, 100, len(CONTENT) - 1])
@pytest.mark.parametrize("suffix", ["object", "metadata"])
def test_torn_files_are_no_entry(entry, suffix, kept):
    path = getattr(entry, suffix)
    path.write_bytes(path.read_bytes()[: min(kept, path.stat().st_size - 1)])
    assert entry.read() is None
    assert entry.commit(CONTENT) == entry.read()


def test_a_changed_byte_is_noticed(entry):
    entry.object.write_bytes(CONTENT[:-1] + b"\0")
    assert entry.read() is None


@pytest.mark.parametrize("text", ["[]", "null", '{"bytes": 2560}', "\xff"])
def test_foreign_metadata_is_no_entry(entry, text):
    entry.metadata.write_text(text, encoding="latin-1")
    assert entry.read() is None


def test_metadata_of_another_key_is_no_entry(entry):
    other = Entry(entry.folder, entry.stem, {**INGREDIENTS, "sources": "2"})
    entry.metadata.rename(other.metadata)
    entry.object.rename(other.object)
    assert other.read() is None


def test_an_object_is_not_committed_before_its_metadata(entry, monkeypatch):
    entry.metadata.unlink()
    entry.object.unlink()
    replace, renamed = os.replace, []

    def fail_at_metadata(source, target):
        if str(target).endswith(".json"):
            raise OSError(28, "No space left on device")
        renamed.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_at_metadata)
    with pytest.raises(OSError, match="No space"):
        entry.commit(CONTENT)
    assert renamed == [entry.object]
    assert entry.read() is None
    assert not list(entry.folder.glob("*.tmp"))


def test_reading_takes_no_lock_and_makes_nothing(cache_dir):
    assert Entry(cache_dir, "Kernel.sm_90a", INGREDIENTS).read() is None
    assert not cache_dir.exists()


@pytest.mark.parametrize(("variable", "mode"), [("", 0o700), ("named", 0o755)])
def test_only_the_default_folder_is_private(tmp_path, monkeypatch, variable, mode):
    monkeypatch.setenv("KDA_CACHE_DIR", variable and str(tmp_path / variable))
    umask = os.umask(0o022)
    try:
        with Entry(tmp_path / "folder", "Kernel.sm_90a", INGREDIENTS).locked():
            pass
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == mode


def test_the_lock_is_exclusive_and_per_entry(entry):
    events = []

    def hold(which):
        with which.locked():
            events.append((which, "in"))
            time.sleep(0.1)
            events.append((which, "out"))

    threads = [threading.Thread(target=hold, args=(entry,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event for _, event in events] == ["in", "out"] * 3
    other = Entry(entry.folder, entry.stem, {**INGREDIENTS, "sources": "2"})
    with entry.locked(), other.locked():
        pass


def test_differences_name_what_changed(entry):
    other = Entry(entry.folder, entry.stem, {**INGREDIENTS, "sources": "2", "cpu": "x"})
    assert other.differences() == [f"{entry.metadata.name} differs in sources, cpu"]
    assert Entry(entry.folder, entry.stem, {**INGREDIENTS, "config": "Config(1)"}).differences() == []
    entry.metadata.write_text("{")
    assert other.differences() == [f"{entry.metadata.name} is damaged"]
