"""What the documents say about the code, held against the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


def section(document: str, heading: str) -> str:
    """The text under a heading of a document."""
    text = (ROOT / document).read_text()
    assert f"\n## {heading}\n" in text, f"{document} has no section {heading}"
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def code(text: str, language: str = "") -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def requirements(package: str) -> list[str]:
    """What a package requires of others, as its pyproject.toml spells it."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    listed = ast.literal_eval(re.search(r"^dependencies = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)[1])
    return [r for r in listed if not r.startswith("kda-")]


def test_the_readme_has_the_versions_that_are_accepted_and_tested():
    table = section("README.md", "What it has run on")
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1].islower()
    )
    for text in {*requirements("kda-core"), *requirements("kda-sm90"), *requirements("kda-sm100")}:
        (row,) = (line for line in table.splitlines() if f"`{text}`" in line)
        assert pins[Requirement(text).name].partition(" ")[0] in row.split("|")[3], row
    pythons = re.search(r"^PYTHONS = (\(.*?\))", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    first, *_, last = ast.literal_eval(pythons[1])
    assert f"| Python | {first} or newer | {first} to {last} |" in table


def test_the_quickstart_of_the_readme_runs():
    (program,) = code(section("README.md", "Quickstart"), "python")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 1024, 8, 128]) torch.Size([1, 8, 128, 128])" in done.stdout
    assert "\nbackend   " in done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_install_nox_and_the_packages_into_a_virtual_environment(document):
    """Many systems refuse to install anything elsewhere."""
    for block in code(document.read_text()):
        for command in ("pip install nox", "pip install ./"):
            if command in block:
                assert "-m venv .venv" in block.partition(command)[0], block


def test_programs_in_the_guide_to_models_name_what_exists():
    programs = code((ROOT / "docs" / "use-in-a-model.md").read_text(), "python")
    assert len(programs) == 3
    import kda_core
    from kda_core import registry

    for program in programs:
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "kda_core":
                assert callable(getattr(kda_core, node.attr))
            if isinstance(node, ast.ImportFrom) and node.module == "kda_core.registry":
                assert all(callable(getattr(registry, name.name)) for name in node.names)


BACKEND_LIST = [
    [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3]]
    for line in section("CONTRIBUTING.md", "Adding a backend").splitlines()
    if line.startswith("| `")
]


@pytest.mark.parametrize(("places", "names"), BACKEND_LIST, ids=[places[0] for places, _ in BACKEND_LIST])
def test_the_list_for_a_backend_names_what_exists(places, names):
    """A place is a file or a folder; a name stands in one of the row's files, or is a path too."""
    there = [ROOT / place.replace("<arch>", "sm100") for place in places]
    assert all(path.exists() for path in there)
    text = "".join(path.read_text() for path in there if path.is_file())
    for name in names:
        known = any((folder / name).exists() for folder in (ROOT, *there))
        assert known or name.replace("<arch>", "sm100") in text or name.startswith("python -m"), name


def test_the_list_for_a_backend_is_complete():
    """Whatever names kda-sm100 outside its own package, tests and tables is in the list."""
    listed = {name for row in BACKEND_LIST for cell in row for name in cell}
    files = [ROOT / "noxfile.py", ROOT / "pyproject.toml", *(ROOT / "packages").glob("*/pyproject.toml")]
    for folder in ("packages/*/src", "benchmarks", "tests"):
        files += [path for top in ROOT.glob(folder) for path in top.rglob("*.py")]
    naming = re.compile(r"kda[-_]sm100\b|\"sm100\"")
    found = {p.relative_to(ROOT).as_posix() for p in files if naming.search(p.read_text())}
    own = {p for p in found if p.startswith(("packages/kda-sm100/", "tests/sm100/")) or "/sm100_" in p}
    examples = {"tests/cp/test_cp_plan.py", "tests/test_benchmarks.py", "tests/test_docs.py"}
    assert own and not found - own - listed - examples


def test_the_quickstart_runs():
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "backend   reference" in done.stdout and "o [2, 100, 4, 64]" in done.stdout
