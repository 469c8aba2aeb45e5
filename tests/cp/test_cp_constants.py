"""The calibration file in every condition: no call fails because of it, and stored constants are not lost."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile

import pytest
import torch

from kda_core import chunk_kda, explain, storage
from kda_core.errors import ArgumentError
from kda_core.registry import record_calls
from kda_cp import Constants, Pass, constants

H200 = constants.SHIPPED["NVIDIA H200", "sm90", "bfloat16"]
CHEAP = Constants(Pass(((64, 1.0),), 0.5, 0.25, 2.0), 1.0, 1.0)
KEY = ("NVIDIA H200", "sm90", "bfloat16")
OTHER = ("other", "mine", "float32")


@pytest.fixture(autouse=True)
def fresh(stored, tmp_path, monkeypatch):
    """Uses a folder of this test, and lets each warning appear again."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    storage.forget_warnings()
    yield
    storage.forget_warnings()


def entry(**changes):
    """Returns the entry that `store` writes for one set, with changes."""
    file = constants.store(KEY, CHEAP)
    (found,) = json.loads(file.read_text())
    file.unlink()
    return found | changes


def write_bad_file(kind: str) -> None:
    file = constants.store(KEY, CHEAP)
    text = file.read_text()
    if kind == "directory":
        file.unlink()
        file.mkdir()
    elif kind == "fifo":
        file.unlink()
        os.mkfifo(file)
    elif kind == "link":
        file.rename(file.with_name("elsewhere"))
        file.symlink_to("elsewhere")
    elif kind == "writable by others":
        file.chmod(0o666)
    elif kind == "folder writable by others":
        file.parent.chmod(0o777)
    else:
        file.write_text({
            "empty": "", "truncated": text[:-20], "not JSON": "{", "binary": "\udcff\udcfe", "later version": '{"version": 2, "sets": []}',
            "deep": "[" * 100_000, "no key": json.dumps([{"forward": None}]), "not an entry": "[3]",
            "no forward": json.dumps([{"key": list(KEY), "merge_us": 1.0, "gather_ns": 1.0}]),
            "wrong type": json.dumps([entry(merge_us="fast")]), "negative": json.dumps([entry(gather_ns=-1)]),
            "infinite lanes": text.replace("64", "1e999"), "forward is null": json.dumps([entry(forward=None)]),
        }[kind], encoding="utf-8", errors="surrogateescape")  # fmt: skip


KINDS = [
    "directory", "fifo", "link", "writable by others", "folder writable by others", "empty", "truncated", "not JSON", "binary",
    "later version", "deep", "no key", "not an entry", "no forward", "wrong type", "negative", "infinite lanes",
    "forward is null",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_file_causes_one_warning_and_shipped_constants_are_used(caplog, kind):
    write_bad_file(kind)
    for _ in range(2):
        constants.refresh()
        assert constants.lookup(KEY) == (H200, "shipped")
        assert constants.stored() == {}
    (record,) = caplog.records
    assert record.name == "kda_core" and record.levelname == "WARNING"
    assert str(constants.path()) in record.getMessage()


@pytest.mark.parametrize("kind", ["truncated", "later version", "writable by others"])
def test_a_call_with_a_bad_file_succeeds(caplog, kind):
    write_bad_file(kind)
    constants.refresh()
    q, k, v, g = torch.randn(4, 1, 300, 2, 16).unbind()
    x = {"q": q, "k": k, "v": v, "g": -g.abs(), "beta": torch.rand(1, 300, 2)}
    with record_calls() as calls:
        chunk_kda(**x)
    assert [call.backend for call in calls] == ["reference"]
    assert "reference" in str(explain(**x))


def test_other_entries_beside_a_bad_one_are_used(caplog):
    good, broken = entry(), entry(key=list(OTHER), merge_us=-1)
    constants.path().write_text(json.dumps([broken, good]))
    constants.refresh()
    assert constants.stored() == {KEY: CHEAP}
    assert f"entry {OTHER}" in caplog.text


def test_unknown_fields_are_ignored_when_read_and_kept_when_stored(caplog):
    later = entry(news=1)
    later["forward"]["news"] = 2
    del later["summarize"], later["execute"]
    constants.path().write_text(json.dumps([later]))
    constants.refresh()
    assert constants.lookup(KEY) == (CHEAP, "calibrated") and not caplog.records
    constants.store(OTHER, CHEAP)
    assert constants.lookup(OTHER) == (CHEAP, "calibrated")
    assert later in json.loads(constants.path().read_text())


@pytest.mark.parametrize("kind", ["truncated", "later version"])
def test_store_does_not_overwrite_a_file_that_it_cannot_read(kind):
    write_bad_file(kind)
    before = constants.path().read_bytes()
    with pytest.raises(
        ArgumentError, match=r"constants\.json: expected a file that .*store wrote; remove it"
    ):
        constants.store(OTHER, CHEAP)
    assert constants.path().read_bytes() == before


def test_store_on_a_full_disk_raises_and_keeps_the_old_file(monkeypatch):
    constants.store(KEY, CHEAP)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArgumentError, match="KDA_CACHE_DIR: expected a folder .* No space left"):
        constants.store(OTHER, CHEAP)
    constants.refresh()
    assert constants.stored() == {KEY: CHEAP}
    assert {path.name for path in constants.path().parent.iterdir()} == {
        "constants.json",
        "constants.json.lock",
    }


def test_other_users_cannot_write_the_file_and_its_folders():
    umask = os.umask(0)
    try:
        file = constants.store(KEY, CHEAP)
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent, file.parent.parent)]
    assert modes == [0o644, 0o700, 0o700]


STORE = """
import sys
from kda_cp import Constants, Pass, constants
found = Constants(Pass(((64, 1.0),), 0.5, 0.25, 2.0), 1.0, 1.0)
sys.stdin.readline()
for n in range(10):
    constants.store((sys.argv[1], str(n), "bfloat16"), found)
"""


def test_concurrent_processes_store_all_their_constants():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", STORE, name], env=environment, text=True, stdin=subprocess.PIPE
        )
        for name in ("a", "b", "c")
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    constants.refresh()
    assert sorted(constants.stored()) == [(name, str(n), "bfloat16") for name in "abc" for n in range(10)]


def test_an_unusable_cache_folder_is_replaced_by_a_temporary_one(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "file"))
    constants.refresh()
    assert constants.lookup(KEY) == (H200, "shipped")
    assert constants.store(OTHER, CHEAP).is_relative_to(tmp_path / "temporary")
    assert constants.lookup(OTHER) == (CHEAP, "calibrated")
    assert len(caplog.records) == 1 and "KDA_CACHE_DIR" in caplog.text
