"""Fixtures of the packaging tests: wheels, third-party distributions, clean environments."""

from __future__ import annotations

import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.wheelhouse import SOURCES, THIRD_PARTY, CleanEnvironment, build_wheel, closure, copy_project


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each project, built into one folder from copies outside the repository."""
    folder = tmp_path_factory.mktemp("wheels")
    copies = tmp_path_factory.mktemp("sources")
    return {
        name: build_wheel(copy_project(source, copies / name), folder) for name, source in SOURCES.items()
    }


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to the installed `THIRD_PARTY` distributions and all their dependencies."""
    folder = tmp_path_factory.mktemp("third-party")
    site = Path(sysconfig.get_path("purelib"))
    for distribution in closure(THIRD_PARTY):
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(site / top)
    return folder


@pytest.fixture
def bare_environment(tmp_path: Path, third_party: Path) -> CleanEnvironment:
    """A clean environment without packages of this repository, and without wheels to install from."""
    (tmp_path / "no-wheels").mkdir()
    return new_environment(tmp_path / "bare", tmp_path / "no-wheels", third_party)


@pytest.fixture
def clean_environment(
    tmp_path: Path, wheels: dict[str, Path], third_party: Path
) -> Callable[..., CleanEnvironment]:
    """A function that creates a clean environment and installs some requirements into it from the wheels."""

    def make(*requirements: str) -> CleanEnvironment:
        environment = new_environment(tmp_path / "environment", wheels["kda-core"].parent, third_party)
        environment.install(*requirements)
        return environment

    return make


def new_environment(folder: Path, wheels: Path, third_party: Path) -> CleanEnvironment:
    """Creates a virtual environment in `folder` that also sees the distributions in `third_party`."""
    venv.EnvBuilder(symlinks=True).create(folder)
    (site,) = (folder / "lib").glob("python3*/site-packages")
    (site / "third_party.pth").write_text(f"import site; site.addsitedir({str(third_party)!r})\n")
    return CleanEnvironment(folder, wheels)
