"""The GitHub workflows name sessions and scripts that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def sessions():
    """Returns the names of the nox sessions."""
    found = set()
    for function in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(function, ast.FunctionDef):
            for decorator in map(ast.unparse, function.decorator_list):
                if decorator == "nox.session":
                    found.add(function.name)
                elif name := re.match(r"(?:nox\.session\(name=|matrix\()'([\w-]+)'", decorator):
                    found.add(name[1])
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_existing_sessions_and_needs_no_secret(path):
    text = path.read_text()
    named = {name for line in re.findall(r"nox -s ([\w -]+)", text) for name in line.split()}
    scripts = re.findall(r"run: bash (\S+)", text)
    assert named or scripts
    assert named <= sessions() and all((ROOT / script).is_file() for script in scripts)
    assert "secrets." not in text and "permissions:\n  contents: read\n" in text


def test_workflows_cover_tests_wheels_and_docs():
    assert {path.stem for path in WORKFLOWS} >= {"tests", "wheels", "docs"}
