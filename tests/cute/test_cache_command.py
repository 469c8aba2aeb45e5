"""``python -m kda_core cache``: what it prints, what ``prune`` and ``clear`` remove, and the limit of the size."""

from __future__ import annotations

import json
import os
import re
import time

import pytest

from kda_core.cli import main
from kda_core.errors import ArgumentError
from kda_cute import CacheInfo, cache_info, get_kernel
from kda_cute.jit.cache import entry_of
from kda_cute.jit.key import Variant

ARCH = "sm_90a"


@pytest.fixture
def filled(cache_dir, kernels):
    """A folder with two compiled kernels; returns their configurations."""
    configs = [kernels.RmsConfig(dim=64), kernels.RmsConfig(dim=128)]
    for config in configs:
        get_kernel(kernels.RmsNorm, config, ARCH)
    return configs


def entry(kernels, config):
    return entry_of(Variant(kernels.RmsNorm, config, ARCH))


def run(capsys, *words, status=0):
    assert main(["cache", *words]) == status
    return capsys.readouterr()


def change(entry, **ingredients):
    """Rewrites the ingredients of an entry, as if another installation had stored it."""
    metadata = json.loads(entry.metadata.read_text())
    metadata["ingredients"].update(ingredients)
    entry.metadata.write_text(json.dumps(metadata))


def age(entry, days):
    """Moves the last use of an entry into the past."""
    then = time.time() - days * 86400
    for path in entry.folder.glob(f"{entry.object.stem}.*"):
        os.utime(path, (then, then))


def test_list_prints_size_age_state_and_name(filled, kernels, cache_dir, capsys):
    change(entry(kernels, filled[0]), python="cpython 3.9", cpu="another")
    lines = run(capsys, "list").out.splitlines()
    assert re.fullmatch(rf"2 compiled kernels, \d+\.\d MB, in {re.escape(str(cache_dir))}", lines[0])
    states = {re.search(r"dim=(\d+)", line)[1]: line for line in lines[1:]}
    line = r" +\d+\.\d\d MB +0 days  stale \(other python, cpu\)  RmsNorm\(dim=64, weighted=True\) for sm_90a"
    assert re.fullmatch(line, states["64"])
    assert "0 days  usable  RmsNorm(dim=128" in states["128"]


@pytest.mark.parametrize(
    ("ingredients", "why"),
    [
        ({"wheels": "nvidia-cutlass-dsl 1.0"}, "other wheels"),
        ({"sources": "0"}, "other sources"),
        ({"options": "--opt-level 1"}, "other options"),
        ({"kernel": "no_such_module:Kernel"}, "its kernel is not installed"),
        ({"kernel": "helpers.demo_kernels:NoSuchKernel"}, "its kernel is not installed"),
    ],
)
def test_prune_removes_what_this_installation_cannot_use(filled, kernels, capsys, ingredients, why):
    stale, usable = (entry(kernels, config) for config in filled)
    change(stale, **ingredients)
    dry = run(capsys, "prune", "--dry-run").out
    assert dry.startswith("would remove 1 of 2 compiled kernels, ") and f"stale ({why})" in dry
    assert stale.object.exists()
    assert run(capsys, "prune").out.startswith("removed 1 of 2 compiled kernels, ")
    assert not stale.object.exists() and not stale.metadata.exists()
    assert usable.read() is not None
    assert run(capsys, "prune").out.startswith("removed 0 of 1 compiled kernels, 0.0 MB")


def test_prune_removes_damaged_and_incomplete_entries(filled, kernels, cache_dir, capsys):
    damaged, incomplete = (entry(kernels, config) for config in filled)
    damaged.metadata.write_text("{")
    incomplete.metadata.unlink()
    left = incomplete.object.with_name(f"{incomplete.object.name}.0123456789abcdef.tmp")
    left.touch()
    out = run(capsys, "list").out
    assert "stale (damaged)" in out and "stale (incomplete)" in out
    run(capsys, "prune")
    assert [path.suffix for path in cache_dir.iterdir() if path.suffix != ".lock"] == []


def test_prune_removes_unused_kernels_if_asked(filled, kernels, capsys):
    old, new = (entry(kernels, config) for config in filled)
    age(old, days=30)
    assert run(capsys, "prune").out.startswith("removed 0 of 2")
    assert run(capsys, "prune", "--unused-for", "31").out.startswith("removed 0 of 2")
    assert run(capsys, "prune", "--unused-for", "29").out.startswith("removed 1 of 2")
    assert not old.exists() and new.exists()


def test_a_kernel_that_is_loaded_counts_as_used(filled, kernels, capsys):
    old = entry(kernels, filled[0])
    age(old, days=30)
    assert old.read() is not None
    assert run(capsys, "prune", "--unused-for", "29").out.startswith("removed 0 of 2")


def size(entry):
    return sum(path.stat().st_size for path in (entry.object, entry.metadata))


def test_prune_removes_the_least_recently_used_kernels_beyond_the_limit(filled, kernels, capsys, monkeypatch):
    old, new = (entry(kernels, config) for config in filled)
    age(old, days=2)
    both = size(old) + size(new) + 1000  # room for lock files
    assert run(capsys, "prune", "--max-size", str(both)).out.startswith("removed 0 of 2")
    assert run(capsys, "prune", "--max-size", "0").out.startswith("removed 0 of 2")
    monkeypatch.setenv("KDA_CACHE_MAXSIZE", str(size(new) + 500))
    assert run(capsys, "prune", "--max-size", "1G").out.startswith("removed 0 of 2")
    assert run(capsys, "prune", "--dry-run").out.startswith("would remove 1 of 2")
    assert run(capsys, "prune").out.startswith("removed 1 of 2")
    assert not old.exists() and new.read() is not None


def test_a_compilation_keeps_the_folder_below_its_limit(filled, kernels, monkeypatch, caplog):
    old, used = (entry(kernels, config) for config in filled)
    age(old, days=3)
    age(used, days=4)
    assert used.read() is not None  # now it was used today
    monkeypatch.setenv("KDA_CACHE_MAXSIZE", str(size(old) + size(used) + 1000))
    caplog.set_level("INFO", logger="kda_cute")
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=32), ARCH)
    assert not old.exists() and used.exists()
    assert entry(kernels, kernels.RmsConfig(dim=32)).read() is not None
    assert "removed 1 compiled kernels" in caplog.text and "Raise the limit" not in caplog.text


def test_a_limit_below_the_kernels_of_a_day_is_a_warning(filled, kernels, monkeypatch, caplog):
    monkeypatch.setenv("KDA_CACHE_MAXSIZE", "1")
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=32), ARCH)
    assert not any(entry(kernels, config).exists() for config in filled)
    assert entry(kernels, kernels.RmsConfig(dim=32)).read() is not None  # the new one stays
    (record,) = [r for r in caplog.records if "Raise the limit" in r.getMessage()]
    assert "KDA_CACHE_MAXSIZE=1: 2 compiled kernels were removed" in record.getMessage()


def test_a_limit_that_is_no_size_is_an_error_before_the_compilation(cache_dir, kernels, monkeypatch):
    monkeypatch.setenv("KDA_CACHE_MAXSIZE", "plenty")
    with pytest.raises(ArgumentError, match="KDA_CACHE_MAXSIZE: expected bytes, .*got 'plenty'"):
        get_kernel(kernels.RmsNorm, kernels.RmsConfig(), ARCH)
    assert cache_info() == CacheInfo()


def test_the_quarantine_has_the_rest_of_the_limit(filled, kernels, cache_dir, monkeypatch):
    bad, good = (entry(kernels, config) for config in filled)
    bad.object.write_bytes(bytes(100_000))
    assert bad.read() is None and bad.quarantined()
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=32), ARCH)
    assert bad.quarantined()
    monkeypatch.setenv("KDA_CACHE_MAXSIZE", "100000")
    get_kernel(kernels.RmsNorm, kernels.RmsConfig(dim=256), ARCH)
    assert not list((cache_dir / "quarantine").iterdir())
    assert good.exists() and len(list(cache_dir.glob("*.o"))) == 3


def test_info_prints_size_limit_and_quarantine(filled, kernels, cache_dir, capsys, monkeypatch):
    stale, bad = (entry(kernels, config) for config in filled)
    monkeypatch.setenv("KDA_CACHE_MAXSIZE", "2G")
    change(stale, cpu="another")
    bad.object.write_bytes(b"")
    assert bad.read() is None
    lines = run(capsys, "info").out.splitlines()
    assert lines[0] == f"folder      {cache_dir}"
    assert lines[1] == "usable      0 compiled kernels, 0.0 MB"
    assert re.fullmatch(r"stale       1 compiled kernels, \d+\.\d MB", lines[2])
    assert lines[3] == "limit       2147.5 MB (KDA_CACHE_MAXSIZE=2G)"
    assert re.fullmatch(r"quarantine  1 bad entries, \d+\.\d MB", lines[4])
    assert lines[5] == f"  {bad.name}: {bad.quarantined()}"
    monkeypatch.setenv("KDA_CACHE_MAXSIZE", "0")
    assert "limit       none (KDA_CACHE_MAXSIZE=0)" in run(capsys, "info").out


@pytest.mark.parametrize("action", ["prune", "clear"])
def test_prune_and_clear_empty_the_quarantine(filled, kernels, cache_dir, capsys, action):
    bad = entry(kernels, filled[0])
    bad.object.write_bytes(b"")
    assert bad.read() is None
    assert "would remove 1 bad entries" in run(capsys, action, "--dry-run").out
    assert bad.quarantined()
    assert re.search(r"removed 1 bad entries, \d+\.\d MB, from .*quarantine", run(capsys, action).out)
    assert not list((cache_dir / "quarantine").iterdir())
    assert "bad entries" not in run(capsys, action).out


def test_clear_removes_all_kernels_and_nothing_else(filled, cache_dir, capsys):
    others = [cache_dir / "calibration.json", cache_dir / "notes.o", cache_dir / "RmsNorm.sm_90a.1234.o"]
    for path in others:
        path.write_text("not a kernel")
    assert run(capsys, "clear", "--dry-run").out.startswith("would remove 2 of 2 compiled kernels")
    assert run(capsys, "clear").out.startswith("removed 2 of 2 compiled kernels")
    assert sorted(cache_dir.iterdir()) == sorted(others)
    assert run(capsys, "list").out.startswith("0 compiled kernels, 0.0 MB")


def test_a_kernel_that_another_process_compiles_stays(filled, kernels, capsys):
    held = entry(kernels, filled[0])
    with held.locked():
        out, err = run(capsys, "clear", status=1)
    assert out.startswith("removed 1 of 2") and "not removed, because it is locked" in err
    assert held.read() is not None


@pytest.mark.parametrize("action", ["info", "list", "prune", "clear"])
def test_an_empty_folder_is_no_error(cache_dir, kernels, capsys, action):
    assert "0 " in run(capsys, action).out
    assert not cache_dir.exists()


@pytest.mark.parametrize("action", ["info", "list", "prune", "clear"])
def test_a_folder_that_is_not_trusted_is_an_error(filled, cache_dir, capsys, action):
    files = sorted(cache_dir.iterdir())
    cache_dir.chmod(0o777)
    out, err = run(capsys, action, status=1)
    assert out == "" and f"The folder that KDA_CACHE_DIR names is not used: {cache_dir}" in err
    assert sorted(cache_dir.iterdir()) == files


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: ACTION"),
        (["shrink"], "invalid choice: 'shrink'"),
        (["prune", "--unused-for", "0"], "--unused-for: expected a positive integer, got 0"),
        (["prune", "--max-size", "2x"], "--max-size: expected bytes, or a number with K, M, G or T"),
        (["list", "--dry-run"], "unrecognized arguments: --dry-run"),
    ],
)
def test_wrong_usage(capsys, words, said):
    with pytest.raises(SystemExit) as stopped:
        main(["cache", *words])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
