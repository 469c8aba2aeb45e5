"""Environment variables, lazy imports, the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from helpers.inputs import call

from kda_core import chunk_kda, env
from kda_core.cli import main
from kda_core.errors import ArgumentError, BackendNotFoundError
from kda_core.registry import record_calls

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "value"), [("0", False), ("false", False), ("Off", False), ("1", True), ("YES", True)]
)
def test_flags(monkeypatch, text, value):
    monkeypatch.setenv("KDA_CP", text)
    assert env.context_parallel() is value


def test_another_value_of_a_flag_is_an_error(monkeypatch):
    monkeypatch.setenv("KDA_DISABLE_JIT", "maybe")
    with pytest.raises(ArgumentError, match="KDA_DISABLE_JIT: expected .* got 'maybe'"):
        env.disable_jit()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", None),
        ("4096", 4096),
        ("500M", 500 << 20),
        (" 4g ", 4 << 30),
        ("1.5K", 1536),
        ("2T", 2 << 40),
    ],
)
def test_the_limit_of_the_cache_folder(monkeypatch, text, size):
    monkeypatch.setenv("KDA_CACHE_MAXSIZE", text)
    assert env.cache_maxsize() == size


@pytest.mark.parametrize("text", ["", "4GB", "-1", "1e9", "four"])
def test_a_limit_that_is_no_size_is_an_error(monkeypatch, text):
    monkeypatch.setenv("KDA_CACHE_MAXSIZE", text)
    with pytest.raises(ArgumentError, match=f"KDA_CACHE_MAXSIZE: expected bytes, .* got '{text}'"):
        env.cache_maxsize()


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KDA_CACHE_DIR", raising=False)
    assert env.cache_dir() == tmp_path / "kda-core"
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "mine"))
    assert env.cache_dir() == tmp_path / "mine"


def test_the_documentation_has_every_variable():
    assert env.markdown() in (ROOT / "docs" / "env.md").read_text()


def test_the_import_loads_no_compiler_and_no_layer():
    script = (
        "import sys, torch\n"  # torch imports cuda.bindings, among others
        "before = set(sys.modules)\n"
        "import kda_core, kda_core.testing\n"
        "kda_core.backends()\n"
        "bad = [m for m in set(sys.modules) - before if m.split('.')[0] in ('cutlass', 'triton', 'tvm_ffi', 'cuda', 'pytest') or m == 'kda_core.nn']\n"
        "print(bad)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_backends_and_explain(capsys):
    assert main(["backends"]) == 0
    assert "reference" in capsys.readouterr().out
    assert main(["explain", "--T", "100", "--arch", "cpu", "--final-state"]) == 0
    assert "backend   reference (choice: automatic)" in capsys.readouterr().out
    assert main(["explain", "--arch", "7.5"]) == 1
    assert "no backend serves this call on cuda (sm_75)" in capsys.readouterr().out


def test_doctor(capsys):
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (1 if report["problems"] else 0)
    assert report["versions"]["torch"] and {b["name"] for b in report["backends"]} >= {
        "reference",
        "sm90",
        "sm100",
    }
    main(["doctor"])
    text = capsys.readouterr().out
    assert "backend     reference: ok" in text and report["cache"]["folder"] in text
    (note,) = (b["note"] for b in report["backends"] if b["name"] == "sm100")
    assert "on no GPU yet" in note and f"note        sm100: {note}" in text


def test_demo_runs_on_a_cpu(capsys):
    assert main(["demo", "--device", "cpu", "--tokens", "300"]) == 0
    out = capsys.readouterr().out
    assert "ran on     reference (cpu)" in out and "all errors are within tolerance" in out


def test_unknown_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["backends", "--nonsense"])
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err
    assert main(["conformance", "no-such-backend"]) != 0


@pytest.mark.parametrize("given", [{}, {"KDA_BACKEND": "reference"}, dict(os.environ)])
def test_calls_work_while_a_dict_replaces_the_environment(given):
    with mock.patch("os.environ", given), record_calls() as calls:
        chunk_kda(**call())
        given["KDA_BACKEND"] = "refrence"
        with pytest.raises(BackendNotFoundError, match="KDA_BACKEND='refrence'.*did you mean 'reference'"):
            chunk_kda(**call())
        given["KDA_BACKEND"] = "reference"
        chunk_kda(**call())
    assert [c.backend for c in calls] == ["reference"] * 2


def test_a_changed_environment_is_seen(monkeypatch):
    """`Variable.given` works with and without the private dict of ``os.environ``."""

    class Other(dict):
        encodekey = staticmethod(str)
        _data = {}  # noqa: RUF012 - never read

    for environ in (os.environ, dict(os.environ), Other(os.environ)):
        with mock.patch("os.environ", environ):
            seen = []
            for value in ("reference", "absent", "reference"):
                monkeypatch.setitem(environ, "KDA_BACKEND", value)
                seen.append(env.KDA_BACKEND.given())
            assert seen[0] == seen[2] != seen[1]


def test_the_import_works_while_a_dict_replaces_the_environment():
    script = (
        "import os\nfrom unittest import mock\nimport torch\n"
        "with mock.patch('os.environ', dict(os.environ)):\n    from kda_core import env\n"
        "os.environ['KDA_CP'] = '0'\nfirst = env.KDA_CP.given()\n"
        "os.environ['KDA_CP'] = '1'\nprint(first != env.KDA_CP.given(), env.context_parallel())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True"], done.stdout + done.stderr
