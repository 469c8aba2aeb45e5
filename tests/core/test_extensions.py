"""Subcommands that other packages add to ``python -m kda_core``, and what kda-core itself needs."""

import ast
import re
import sys
from pathlib import Path

import pytest

import kda_core
from kda_core import extensions
from kda_core.cli import main

SOURCES = Path(kda_core.__file__).parent

COMMAND = """
from kda_core.errors import ArgumentError
from kda_core.extensions import Command

def add_arguments(parser):
    parser.add_argument("--name", default="you")

def run(args):
    if args.name == "nobody":
        args.usage_error("expected a name")
    if args.name == "error":
        raise ArgumentError("--name", "a name", "error")
    print("hello", args.name)
    return 3

SPEC = Command("greet somebody", "Greets somebody.", add_arguments, run)
"""


@pytest.fixture
def command(install):
    def install_command(name, source=COMMAND):
        install(name, group="kda_core.commands", source=source)

    return install_command


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as exit:
        main(argv)
    return exit.value.code, capsys.readouterr()


def test_a_command_of_another_package_runs(command, capsys):
    command("hello")
    assert main(["hello", "--name", "Ada"]) == 3
    assert capsys.readouterr().out == "hello Ada\n"
    assert main(["hello", "--name", "error"]) == 1
    assert capsys.readouterr().err == "ArgumentError: --name: expected a name, got error\n"
    status, (_, err) = refused(capsys, "hello", "--name", "nobody")
    assert status == 2 and "expected a name" in err
    status, (_, err) = refused(capsys, "hello", "--nonsense")
    assert status == 2 and "unrecognized arguments: --nonsense" in err


def test_the_help_lists_commands_of_other_packages(command, capsys):
    command("hello")
    command("explode", "raise ImportError('half an installation')")
    status, (out, _) = refused(capsys, "--help")
    assert status == 0
    assert re.search(r"hello +greet somebody", out) and re.search(r"explode +broken", out)
    assert "Greets somebody." in refused(capsys, "hello", "--help")[1].out


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('half an installation')", "ImportError: half an installation"),
        ("raise SystemExit('enough')", "SystemExit: enough"),
        ("SPEC = 3", "expected a kda_core.extensions.Command, got an object of type int"),
    ],
)
def test_a_broken_command_says_why_and_affects_no_other(command, capsys, source, reason):
    command("explode", source)
    command("hello")
    assert main(["explode", "--whatever", "7"]) == 1
    assert capsys.readouterr().err == (
        f"explode (fake_explode:SPEC, from fake-explode 1.0) is broken: {reason}\n"
    )
    assert main(["hello"]) == 3
    assert main(["backends"]) == 0


def test_only_the_command_that_runs_is_imported(command, capsys):
    command("hello")
    command("explode")
    main(["backends"])
    main(["hello"])
    assert "fake_hello" in sys.modules and "fake_explode" not in sys.modules


def test_a_command_of_kda_core_cannot_be_replaced(command, capsys):
    command("backends")
    assert main(["backends"]) == 0
    assert "reference" in capsys.readouterr().out


def test_a_missing_command_of_this_project_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(extensions, "find", lambda group: {})
    assert main(["precompile", "--arch", "sm_90a"]) == 1
    assert capsys.readouterr().err == (
        "precompile is a command of kda-cute, which is not installed: "
        "pip install ./packages/kda-core ./packages/kda-cute, from a checkout of the repository\n"
    )


def test_damaged_metadata_hides_no_command(command, tmp_path, capsys):
    command("hello")
    info = tmp_path / "aaa-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aaa\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(b"\xff\xfe[kda_core.commands]\n")
    assert main(["hello"]) == 3


# ---- dependencies of kda-core


def test_kda_core_imports_torch_and_nothing_else():
    """At the top level of its modules. Functions that import `packaging`, `pytest` or `rich` work without them or say what is
    missing; the conformance kit needs pytest and hypothesis."""
    allowed = {*sys.stdlib_module_names, "torch", "kda_core"}
    for path in SOURCES.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = [
            name
            for node in tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or "kda_core"]
            )
        ]
        more = {"pytest", "hypothesis"} if "testing" in path.parts else set()
        assert {name.partition(".")[0] for name in names} <= allowed | more, path


def test_no_source_of_kda_core_names_a_compiler():
    word = re.compile(r"(?<!kda-)\b(cute|kda_cute|cutlass|dsl|ptxas|tvm)\b", re.IGNORECASE)
    for path in SOURCES.rglob("*.py"):
        assert word.findall(path.read_text()) == [], path
