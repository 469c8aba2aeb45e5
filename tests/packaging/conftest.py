"""Fixtures of the packaging tests: the wheels, what they may require, and environments to install them into."""

from __future__ import annotations

import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.wheelhouse import SOURCES, THIRD_PARTY, CleanEnvironment, build_wheel, closure, copy_project


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each project, all in one folder; built from copies outside the repository."""
    folder = tmp_path_factory.mktemp("wheels")
    copies = tmp_path_factory.mktemp("sources")
    return {
        name: build_wheel(copy_project(source, copies / name), folder) for name, source in SOURCES.items()
    }


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to the installed `THIRD_PARTY` distributions and all that they require."""
    folder = tmp_path_factory.mktemp("third-party")
    site = Path(sysconfig.get_path("purelib"))
    for distribution in closure(THIRD_PARTY):
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(site / top)
    return folder


@pytest.fixture
def clean_environment(
    tmp_path: Path, wheels: dict[str, Path], third_party: Path
) -> Callable[..., CleanEnvironment]:
    """A function that makes a clean environment and installs some requirements into it."""

    def make(*requirements: str) -> CleanEnvironment:
        folder = tmp_path / "environment"
        venv.EnvBuilder(symlinks=True).create(folder)
        (site,) = (folder / "lib").glob("python3*/site-packages")
        (site / "third_party.pth").write_text(f"import site; site.addsitedir({str(third_party)!r})\n")
        environment = CleanEnvironment(folder, wheels["kda-core"].parent)
        environment.install(*requirements)
        return environment

    return make
