"""The contents of the wheels, and that all builds give the same bytes."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from helpers.wheelhouse import ROOT, SOURCES, build_sdist, build_wheel, copy_project
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

LICENSE = ROOT / "LICENSE"
FROM_CHECKOUT = [name for name, source in SOURCES.items() if (source / "build_backend.py").exists()]
LOCKSTEP = {(name, "kda-cute") for name in SOURCES if name.startswith("kda-sm")}  # of the same version


def contents(wheel: Path) -> tuple[set[str], Message]:
    """Returns the names of the files in a wheel, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (head,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        return names, Parser().parsestr(archive.read(head).decode())


def licence_in(wheel: Path) -> bytes:
    """Returns the text of the one licence file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/licenses/LICENSE"))
        return archive.read(name)


@pytest.mark.parametrize("name", SOURCES)
def test_wheel_holds_one_typed_pure_python_package(wheels, name):
    names, head = contents(wheels[name])
    package = name.replace("-", "_")
    assert wheels[name].name == f"{package}-{head['Version']}-py3-none-any.whl"
    assert f"{package}/py.typed" in names
    assert {n.partition("/")[0].partition("-")[0] for n in names} == {package}
    assert {Path(n).suffix for n in names if n.startswith(f"{package}/")} <= {".py", ".typed"}
    sources = SOURCES[name] / "src"
    assert {n for n in names if n.endswith(".py")} == {
        p.relative_to(sources).as_posix() for p in sources.rglob("*.py")
    }


@pytest.mark.parametrize("name", [name for name in SOURCES if SOURCES[name].parent == ROOT / "packages"])
def test_metadata_is_complete(wheels, name):
    _, head = contents(wheels[name])
    assert (head["License-Expression"], head["Requires-Python"]) == ("Apache-2.0", ">=3.10")
    assert head["License-File"] == "LICENSE"
    assert head["Summary"] and head["Author"] and head["Keywords"]
    assert head["Description-Content-Type"] == "text/markdown" and head.get_payload().startswith("#")
    classifiers = head.get_all("Classifier")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)} <= set(classifiers)
    assert "Typing :: Typed" in classifiers


@pytest.mark.parametrize("name", SOURCES)
def test_requirements_are_version_ranges(wheels, name):
    """Between packages of this repository, ``~=`` and ``==``: `test_versions.py`. The example is a third party's."""
    _, head = contents(wheels[name])
    required = [Requirement(text) for text in head.get_all("Requires-Dist")]
    required = [r for r in required if r.marker is None]  # without those of extras
    assert required
    for requirement in required:
        assert requirement.url is None, requirement
        operators = {specifier.operator for specifier in requirement.specifier}
        ours = name != "kda-tokenwise" and requirement.name in SOURCES
        expected = {"==" if (name, requirement.name) in LOCKSTEP else "~="} if ours else {">=", "<"}
        assert operators == expected, requirement


def test_the_extra_of_the_backend_fla_is_the_range_that_it_was_written_for(wheels):
    _, head = contents(wheels["kda-core"])
    required = map(Requirement, head.get_all("Requires-Dist"))
    (found,) = [r for r in required if r.marker is not None and r.marker.evaluate({"extra": "fla"})]
    assert (found.name, found.extras, found.specifier) == ("fla-core", {"cuda"}, SpecifierSet(">=0.6,<0.7"))


@pytest.mark.parametrize(("name", "sibling"), sorted(LOCKSTEP))
def test_lockstep_requirement_names_the_version_of_the_checkout(wheels, name, sibling):
    _, head = contents(wheels[name])
    (required,) = (r for r in map(Requirement, head.get_all("Requires-Dist")) if r.name == sibling)
    assert str(required.specifier) == f"=={contents(wheels[sibling])[1]['Version']}"


# ---- licence


@pytest.mark.parametrize("name", SOURCES)
def test_each_project_has_its_own_licence_file(name):
    """A symbolic link would break in a copy of the project, and the wheel would lack the licence."""
    licence = SOURCES[name] / "LICENSE"
    assert not licence.is_symlink() and licence.read_bytes() == LICENSE.read_bytes()


@pytest.mark.parametrize("name", SOURCES)
def test_wheel_of_a_copied_project_has_the_licence(wheels, name):
    assert licence_in(wheels[name]) == LICENSE.read_bytes()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("name", SOURCES)
def test_wheel_of_a_git_archive_has_the_licence(name, tmp_path):
    folder = SOURCES[name].relative_to(ROOT).as_posix()
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", f"HEAD:{folder}"], capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as opened:
        opened.extractall(tmp_path / "project", filter="data")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    assert licence_in(build_wheel(tmp_path / "project", wheels)) == LICENSE.read_bytes()


# ---- the same bytes


@pytest.mark.parametrize("name", SOURCES)
def test_source_archive_builds_the_same_wheel(wheels, name, tmp_path):
    archive = build_sdist(copy_project(SOURCES[name], tmp_path / "project"), tmp_path)
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    expected = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "src"}
    expected |= {"build_backend.py"} if name in FROM_CHECKOUT else set()
    expected |= {"tests"} if name == "kda-tokenwise" else set()
    # hatchling adds the .gitignore of the checkout that contains the project, if there is one.
    assert {path.name for path in unpacked.iterdir()} - {".gitignore"} == expected
    again = tmp_path / "again"
    again.mkdir()
    assert build_wheel(unpacked, again).read_bytes() == wheels[name].read_bytes()


@pytest.mark.parametrize("name", SOURCES)
def test_times_and_permissions_of_files_do_not_change_the_archives(wheels, name, tmp_path):
    """Without SOURCE_DATE_EPOCH: two clones differ in file times, and in permissions if their umask differs."""
    project = copy_project(SOURCES[name], tmp_path / "project")
    first = build_sdist(project, tmp_path).read_bytes()
    for path in project.rglob("*"):
        if path.is_file():
            path.chmod(0o640)
            os.utime(path, (1_000_000_000, 1_000_000_000))
    for folder in ("wheel", "sdist"):
        (tmp_path / folder).mkdir()
    assert build_sdist(project, tmp_path / "sdist").read_bytes() == first
    assert build_wheel(project, tmp_path / "wheel").read_bytes() == wheels[name].read_bytes()


@pytest.mark.parametrize("name", FROM_CHECKOUT)
def test_wheel_built_inside_the_checkout_is_the_same(wheels, name, tmp_path):
    """In a checkout, requirements refer to sibling folders. No wheel contains such a reference."""
    packages = tmp_path / "packages"
    for sibling in FROM_CHECKOUT:
        copy_project(SOURCES[sibling], packages / sibling)
    folder = tmp_path / "wheels"
    folder.mkdir()
    assert build_wheel(packages / name, folder).read_bytes() == wheels[name].read_bytes()


def test_build_backends_are_equal():
    assert len(FROM_CHECKOUT) > 1
    first, *others = ((SOURCES[name] / "build_backend.py").read_bytes() for name in FROM_CHECKOUT)
    assert all(other == first for other in others)


def test_folders_of_older_builds_are_in_no_archive(tmp_path):
    """The former build backend, setuptools, did not remove ``build/``."""
    project = Path(shutil.copytree(SOURCES["kda-cp"], tmp_path / "project"))
    stale = project / "build" / "lib" / "kda_cp" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    names, _ = contents(build_wheel(project, tmp_path))
    assert not any("stale" in name for name in names)
    with tarfile.open(build_sdist(project, tmp_path)) as archive:
        assert not any("stale" in name for name in archive.getnames())
