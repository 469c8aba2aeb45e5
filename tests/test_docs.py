"""What the documents say about the code, held against the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kda_core import BACKEND_ABI, errors
from kda_core.contract import Feature

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "docs", "packages/*", "examples/*")
DOCUMENTS = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md"))


def first_column(section: str) -> list[str]:
    """The names in backticks of the first column of the table under a heading of docs/contract.md."""
    text = (ROOT / "docs" / "contract.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_the_contract_lists_every_feature():
    assert first_column("Features") == [feature.value for feature in Feature]


def test_the_contract_lists_every_error():
    bases = {"KdaError", "BackendError"}
    classes = {name for name in vars(errors) if name.endswith("Error") and name not in bases}
    assert set(first_column("Errors")) == classes


def test_the_abi_page_and_the_changelog_are_at_the_current_abi():
    version = ".".join(map(str, BACKEND_ABI))
    page = (ROOT / "docs" / "abi.md").read_text()
    assert f"**{version}**" in page and f"\n| {version} |" in page
    assert f"\n### {version}\n" in (ROOT / "CHANGELOG.md").read_text().partition("\n## Backend ABI\n")[2]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:)([^)#]*)#?[^)]*\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_sessions_that_documents_name_exist():
    noxfile = (ROOT / "noxfile.py").read_text()
    named = {
        n
        for path in DOCUMENTS
        for n in re.findall(r'nox -s "?([\w-]+?)(?:-3\.\d+)?[ "(`\n]', path.read_text())
    }
    assert named >= {"test", "demo"}
    for name in named:
        assert f"def {name}(" in noxfile or f'"{name}"' in noxfile, name


def test_the_quickstart_runs():
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "backend   reference" in done.stdout and "o [2, 100, 4, 64]" in done.stdout
