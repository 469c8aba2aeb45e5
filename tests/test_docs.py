"""The documents agree with the code and with each other."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from kda_core import BACKEND_ABI, chunk_kda, errors, explain
from kda_core.backend import BACKEND_GROUP, PLANNER_GROUP
from kda_core.contract import Feature
from kda_core.extensions import COMMAND_GROUP, DIAGNOSTIC_GROUP
from kda_cp import Plan

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "docs/**", "packages/*", "examples/*")
DOCUMENTS = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md"))


def first_column(section: str) -> list[str]:
    """Returns the names in backticks in the first column of the table below a heading of docs/contract.md."""
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


def prose(text: str) -> str:
    """Returns `text` without its code blocks."""
    return re.sub(r"^(```+).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Returns the anchors of a document's headings by GitHub's rule."""
    titles = re.findall(r"^#+ (.*)$", prose(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_reach_a_file_and_a_heading(document):
    text = re.sub(r"`+[^`\n]+`+", "", prose(document.read_text()))
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        path = document.parent / target if target else document
        assert path.exists(), f"{document.name}: {target}"
        assert not anchor or anchor in anchors(path), f"{document.name}: {target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_external_links_are_well_formed(document):
    for url in re.findall(r"\]\((https?:[^)]*)\)", prose(document.read_text())):
        parts = urllib.parse.urlsplit(url)
        assert parts.scheme == "https" and "." in parts.netloc and not set(url) & set(" <>\"'"), url


def test_the_navigation_of_the_site_lists_every_page():
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": (\S+\.md)$", text, re.MULTILINE)
    assert len(listed) == len(set(listed)), "a page is listed twice"
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(listed)


def test_each_change_in_the_changelog_takes_one_line():
    text = (
        (ROOT / "CHANGELOG.md")
        .read_text()
        .partition("\n## [Unreleased]\n")[2]
        .partition("\n## Backend ABI\n")[0]
    )
    entry = re.compile(r"- [\w-]+( packages)?(, [\w-]+)*: [a-z]")
    lines = [line for line in text.splitlines() if line and not line.startswith("##")]
    assert len(lines) > 50
    assert not [line for line in lines if not entry.match(line)]
    assert len(lines) == len(set(lines)), "a change is listed twice"


def test_the_versions_of_ruff_are_the_same():
    ruff = re.search(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"ruff-pre-commit\n    rev: v{ruff[1]}\n" in (ROOT / ".pre-commit-config.yaml").read_text()


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
    """Returns the text below a heading of a document."""
    text = (ROOT / document).read_text()
    assert f"\n## {heading}\n" in text, f"{document} has no section {heading}"
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def code(text: str, language: str = "") -> list[str]:
    """Returns the code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def requirements(package: str) -> list[str]:
    """Returns the third-party requirements of a package, as its pyproject.toml spells them."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    listed = ast.literal_eval(re.search(r"^dependencies = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)[1])
    return [r for r in listed if not r.startswith("kda-")]


def test_the_readme_has_the_versions_that_are_accepted_and_tested():
    table = section("README.md", "Support")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition(";")[0].split("==") for line in lines if line[:1].islower()]
    required = {
        text
        for package in ("kda-core", "kda-cute", "kda-sm90", "kda-sm100")
        for text in requirements(package)
    }
    for text in required:
        (row,) = (line for line in table.splitlines() if f"`{text}`" in line)
        pinned = [version.split()[0] for name, version in pins if name == Requirement(text).name]
        assert any(version in row.split("|")[3] for version in pinned), row
    assert set(re.findall(r"\| `([^`]*[<>=][^`]*)` \|", table)) == required
    pythons = re.search(r"^PYTHONS = (\(.*?\))", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    first, *_, last = ast.literal_eval(pythons[1])
    assert f"| Python | {first} or newer | {first} to {last} |" in table


def executed(program: str) -> str:
    """Returns what a program prints in its own Python process."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_of_the_readme_runs():
    (program,) = code(section("README.md", "Use"), "python")
    printed = executed(program)
    assert "torch.Size([1, 1024, 8, 128]) torch.Size([1, 8, 128, 128])" in printed
    assert "\nbackend   " in printed
    assert len(program.splitlines()) <= 12


def test_the_programs_of_the_quick_start_run_in_order():
    programs = code((ROOT / "docs" / "quick-start.md").read_text(), "python")
    printed = executed("\n".join(programs))
    shown = re.findall(r"# (torch\.Size\(.*?\))", "".join(programs))
    assert len(programs) >= 4 and len(shown) == 3 and all(size in printed for size in shown)


def call(**changed: Any) -> Any:
    """Calls `chunk_kda` on the CPU with T = 64, H = 2, K = V = 128 in bf16, and with the changed arguments."""
    q, k, v = torch.randn(3, 1, 64, 2, 128).bfloat16()
    known = {"q": q, "k": k, "v": v, "g": -torch.rand(1, 64, 2, 128), "beta": torch.rand(1, 64, 2)}
    return chunk_kda(**(known | changed))


def error_on_a_gpu(name: str | None = None) -> None:
    """Raises a `BackendError` with the message that a call in fp64 has on an H200."""
    q = torch.randn(1, 64, 2, 128)
    shape = replace(
        explain(q, q, q, q, q[..., 0]).shape, device_type="cuda", arch=(9, 0), dtype=torch.float64
    )
    error = explain(shape, backend=name).error
    assert error is not None
    raise errors.BackendError(re.sub(r"^\w+Error: ", "", error))


RAISED: dict[str, Callable[[], Any]] = {
    "backend ... is not installed": lambda: call(backend="nothing"),
    "no backend serves": error_on_a_gpu,
    "backend ... cannot serve": lambda: error_on_a_gpu("sm90"),
    "chunk_kda()": lambda: call(head_first=True),
    "q: expected": lambda: call(q=torch.zeros(1, 2, 64, 128).bfloat16()),
    "cu_seqlens: expected a first": lambda: call(cu_seqlens=torch.tensor([30, 34])),
    "cu_seqlens: expected a last": lambda: call(cu_seqlens=torch.tensor([0, 34])),
    "A_log: expected": lambda: call(use_gate_in_kernel=True),
    "lower_bound: expected": lambda: call(lower_bound=-5.0),
    "initial_state: expected": lambda: call(initial_state=torch.zeros(1, 2, 128, 128).bfloat16()),
    "scale: expected": lambda: call(scale=torch.tensor(1.0)),
    "cp_context: expected": lambda: call(cp_context=object()),
    "context_parallel: cp cannot": lambda: call(context_parallel=Plan.uniform((65,), 2)),
    "out: expected": lambda: call(
        beta=torch.rand(1, 64, 2).requires_grad_(), out=torch.empty(1, 64, 2, 128).bfloat16()
    ),
}
"""Calls that raise a quoted message, by the first words of its heading in docs/troubleshooting.md."""


def quoted() -> list[str]:
    """Returns the messages that docs/troubleshooting.md quotes, except for those of pip."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    return [m for m in re.findall(r"^### `(.*)`$", text, re.MULTILINE) if not m.startswith("ERROR: ")]


@pytest.fixture(scope="module")
def texts_of_the_sources() -> str:
    """Returns all string literals of the packages, one per line, with a NUL for each value that an f-string inserts."""
    found = []
    for path in (ROOT / "packages").glob("*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (x.value if isinstance(x, ast.Constant) else "\0" for x in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in found)


def wildcards(message: str) -> str:
    """Returns a regular expression for a quoted message. It matches anything in the place of "..." and of KDA_ variables."""
    return ".*".join(re.escape(part) for part in re.split(r"\.\.\.|KDA_\w+", message))


@pytest.mark.parametrize("message", quoted())
def test_quoted_message_exists_in_the_code(message, texts_of_the_sources):
    raisers = [raiser for begin, raiser in RAISED.items() if message.startswith(begin)]
    if raisers:
        with pytest.raises(errors.KdaError) as caught:
            raisers[0]()
        assert re.match(wildcards(message), str(caught.value), re.DOTALL), caught.value
        return
    for part in re.split(r", got ", message.partition(": expected ")[2] or message):
        if len(part.replace("...", "")) > 5:
            assert re.search(wildcards(part), texts_of_the_sources), part


def test_every_raised_message_is_quoted():
    assert not [begin for begin in RAISED if not any(message.startswith(begin) for message in quoted())]


@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if ROOT / "packages" not in path.parents],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_commands_install_nox_and_the_packages_into_a_virtual_environment(document):
    """Many systems refuse `pip install` outside a virtual environment."""
    for block in code(document.read_text()):
        for command in ("pip install nox", "pip install ./"):
            if command in block:
                assert "-m venv .venv" in block.partition(command)[0], block


GUIDE_TO_MODELS = code((ROOT / "docs" / "use-in-a-model.md").read_text(), "python")


def test_the_programs_about_the_layer_run_in_order():
    programs = [p for p in GUIDE_TO_MODELS if "fla." not in p and "transformers" not in p and "Cache" in p]
    assert len(programs) == 2 and "KimiDeltaAttention" in programs[0]
    assert executed("\n".join(programs)) == "103\n"


def test_programs_in_the_guide_to_models_name_what_exists():
    programs = GUIDE_TO_MODELS
    assert len(programs) == 6
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
    """A place is a file or a folder. A name is in one of the files of the row, or is a path too."""
    there = [ROOT / place.replace("<arch>", "sm100") for place in places]
    assert all(path.exists() for path in there)
    text = "".join(path.read_text() for path in there if path.is_file())
    for name in names:
        known = any((folder / name).exists() for folder in (ROOT, *there))
        assert known or name.replace("<arch>", "sm100") in text or name.startswith("python -m"), name


def test_contributing_names_modules_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = {path for path in re.findall(r"`(kda_\w+/[\w/]+(?:\.py)?)`", text) if "<arch>" not in path}
    assert len(named) > 15
    assert not [
        path for path in named if not any((src / path).exists() for src in ROOT.glob("packages/*/src"))
    ]


def test_the_guide_for_backends_names_every_group_of_entry_points():
    text = (ROOT / "docs" / "writing-a-backend.md").read_text()
    groups = {BACKEND_GROUP, PLANNER_GROUP, COMMAND_GROUP, DIAGNOSTIC_GROUP}
    assert not [group for group in groups if f"| `{group}` |" not in text]


def test_the_list_for_a_backend_is_complete():
    """The list has every file that names kda-sm100, except for files of kda-sm100 and tests that use it as an example."""
    listed = {name for row in BACKEND_LIST for cell in row for name in cell}
    files = [ROOT / "noxfile.py", ROOT / "pyproject.toml", *(ROOT / "packages").glob("*/pyproject.toml")]
    for folder in ("packages/*/src", "benchmarks", "tools", "tests"):
        files += [path for top in ROOT.glob(folder) for path in top.rglob("*.py")]
    naming = re.compile(r"kda[-_]sm100\b|\"sm100\"")
    found = {p.relative_to(ROOT).as_posix() for p in files if naming.search(p.read_text())}
    own = {path for path in found if "sm100" in path}
    examples = {"tests/cp/test_cp_plan.py", "tests/test_benchmarks.py", "tests/test_docs.py"}
    assert own and not found - own - listed - examples


def test_the_example_of_the_quick_start_runs():
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "backend   reference" in done.stdout and "o [2, 100, 4, 64]" in done.stdout
