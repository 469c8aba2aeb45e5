"""The GitHub workflows name sessions and scripts that exist, pin their actions, and have the least permissions."""

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
    lines = re.findall(r"nox -s (.+)", text)
    named = {name for line in lines for name in line.partition(" --")[0].split()}
    scripts = re.findall(r"run: bash (\S+)", text)
    assert named or scripts
    assert named <= sessions() and all((ROOT / script).is_file() for script in scripts)
    assert "secrets." not in text and "permissions:\n  contents: read\n" in text


def test_workflows_cover_tests_releases_and_docs():
    assert {path.stem for path in WORKFLOWS} >= {"tests", "release", "docs", "nightly"}


def test_the_nightly_workflow_runs_every_class_of_the_full_conformance_kit():
    text = next(path for path in WORKFLOWS if path.stem == "nightly").read_text()
    (backends,) = re.findall(r"backend: \[(.*)\]", text)
    assert "nox -s nightly -- tests/nightly -k Test${{ matrix.backend }} " in text
    assert re.search(r'\n  schedule:\n    - cron: "[^"]+"\n', text)
    source = (ROOT / "tests" / "nightly" / "test_full_conformance.py").read_text()
    classes = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    tested = {name for name in classes if name.startswith("Test")}
    assert {f"Test{name}" for name in backends.split(", ")} == tested and len(tested) == 2


def test_the_nightly_workflow_runs_every_marked_test():
    text = next(path for path in WORKFLOWS if path.stem == "nightly").read_text()
    (folders,) = re.findall(r"nox -s nightly -- ((?:tests/\w+ ){2,})", text)
    marking = re.compile(
        r"mark\.nightly|helpers\.nightly|helpers\.emulated_cases|helpers\.pool(?:_segment)?_cases"
    )
    tests = {path for path in (ROOT / "tests").rglob("test_*.py") if marking.search(path.read_text())}
    found = {str(path.parent.relative_to(ROOT)) for path in tests - {Path(__file__)}}
    assert found == {*folders.split()}


def test_the_nightly_workflow_compares_every_record_of_an_engine():
    text = next(path for path in WORKFLOWS if path.stem == "nightly").read_text()
    engines = {path.stem for path in (ROOT / "tests" / "integrations" / "signatures").glob("*.json")}
    (tested,), (compared,) = (
        re.findall(r"nox -s (test-.*)", text),
        re.findall(r"for engine in (.*); do", text),
    )
    assert {f"test-{name}" for name in engines} == {*tested.split()} and engines == {*compared.split()}
    assert (ROOT / "tests" / "integrations" / "test_signatures.py").is_file() and len(engines) == 2


def test_actions_are_pinned_by_commit():
    """A tag can be moved to other code. Dependabot updates the commit and the version in the comment."""
    uses = [line for path in WORKFLOWS for line in re.findall(r"uses: (.*)", path.read_text())]
    pins = {}
    for line in uses:
        pinned = re.fullmatch(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40}) # v\d+\.\d+\.\d+", line)
        assert pinned, line
        assert pins.setdefault(pinned[1], pinned[2]) == pinned[2], line
    assert len(pins) > 3


def jobs(path):
    """Returns the text of each job of a workflow by name."""
    parts = re.split(r"^  ([\w-]+):\n", path.read_text().partition("\njobs:\n")[2], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_only_the_release_of_a_tag_has_permissions_to_write():
    granted = {
        (path.stem, job): set(re.findall(r"^      ([\w-]+): write\b", text, re.MULTILINE))
        for path in WORKFLOWS
        for job, text in jobs(path).items()
    }
    assert {job: names for job, names in granted.items() if names} == {
        ("release", "attest"): {"id-token", "attestations"},
        ("release", "publish"): {"id-token"},
        ("release", "github"): {"contents"},
    }
    assert all(len(re.findall(": write", path.read_text())) in (0, 4) for path in WORKFLOWS)
    assert not any("write-all" in path.read_text() for path in WORKFLOWS)


def test_publishing_follows_a_tag_and_the_checks():
    found = jobs(ROOT / ".github" / "workflows" / "release.yml")
    condition = "if: github.event_name == 'push' && github.ref_type == 'tag'\n"
    assert condition in found["attest"] and "needs: build\n" in found["attest"]
    assert "needs: attest\n" in found["publish"] and "environment: pypi" in found["publish"]
    assert "needs: publish\n" in found["github"]
