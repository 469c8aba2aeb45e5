"""Environment variables, import laziness, the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kda_core import env
from kda_core.cli import main
from kda_core.errors import ArgumentError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "value"), [("0", False), ("false", False), ("Off", False), ("1", True), ("YES", True)]
)
def test_flags(monkeypatch, text, value):
    monkeypatch.setenv("KDA_CP", text)
    assert env.context_parallel() is value


def test_a_flag_that_is_neither_is_an_error(monkeypatch):
    monkeypatch.setenv("KDA_DISABLE_JIT", "maybe")
    with pytest.raises(ArgumentError, match="KDA_DISABLE_JIT: expected .* got 'maybe'"):
        env.disable_jit()


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KDA_CACHE_DIR", raising=False)
    assert env.cache_dir() == tmp_path / "kda-core"
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "mine"))
    assert env.cache_dir() == tmp_path / "mine"


def test_the_documentation_has_every_variable():
    assert env.markdown() in (ROOT / "docs" / "env.md").read_text()


def test_import_pulls_in_neither_cutlass_nor_triton():
    script = (
        "import sys, torch\n"  # which brings what it likes, cuda.bindings among it
        "before = set(sys.modules)\n"
        "import kda_core, kda_core.cute, kda_core.testing\n"
        "kda_core.backends()\n"
        "bad = [m for m in set(sys.modules) - before if m.split('.')[0] in ('cutlass', 'triton', 'tvm_ffi', 'cuda', 'pytest')]\n"
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
    assert "ran on     reference (cpu)" in out and "exact within tolerance" in out


def test_unknown_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["backends", "--nonsense"])
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err
    assert main(["conformance", "no-such-backend"]) != 0
