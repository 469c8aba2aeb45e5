"""All packages have the version of ``pyproject.toml``, and require each other in that version."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["bumpversion"]["current_version"]
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))
}


def siblings(name: str) -> list[Requirement]:
    """Returns the requirements of a package, and of its extras, that name packages of this repository."""
    project = PROJECTS[name]
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    return [r for texts in groups for r in map(Requirement, texts) if r.name in PROJECTS]


def test_the_version_has_its_normal_form():
    assert len(PROJECTS) > 3 and str(Version(VERSION)) == VERSION


@pytest.mark.parametrize("name", PROJECTS)
def test_a_package_has_the_version_and_the_name_of_its_folder(name):
    assert (PROJECTS[name]["name"], PROJECTS[name]["version"]) == (name, VERSION)


@pytest.mark.parametrize("name", PROJECTS)
def test_packages_require_each_other_in_the_same_version(name):
    """Backends and kda-cute share the layout of chunk records, so they need equal versions. Others need a compatible one."""
    for requirement in siblings(name):
        lockstep = requirement.name == "kda-cute"
        assert str(requirement.specifier) == f"{'==' if lockstep else '~='}{VERSION}", requirement


def test_requirements_between_the_packages_are_found():
    assert {r.name for r in siblings("kda-sm90")} == {"kda-core", "kda-cute"}
    assert {r.name for r in siblings("kda-core")} == {
        "kda-cp",
        *(n for n in PROJECTS if n.startswith("kda-sm") and not n.endswith("-kernels")),
    }


def test_the_citation_has_the_version():
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()


def test_nothing_else_states_a_version_of_the_packages():
    """`__version__` is read from the metadata of the installed package."""
    for path in (ROOT / "packages").glob("*/src/**/*.py"):
        assert not re.search(r"^(__version__|VERSION) = [\"']\d", path.read_text(), re.MULTILINE), path
