"""Builds every project of the repository and installs it into clean environments, without a download.

A clean environment sees torch and the other third-party distributions of the test environment through links, and
nothing else. pip therefore resolves real requirements, and finds this repository's packages only in the wheels or
folders that a test names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SOURCES = {
    "kda-core": ROOT / "packages" / "kda-core",
    "kda-cute": ROOT / "packages" / "kda-cute",
    "kda-sm90": ROOT / "packages" / "kda-sm90",
    "kda-sm100": ROOT / "packages" / "kda-sm100",
    "kda-cp": ROOT / "packages" / "kda-cp",
    "ptx-emulator": ROOT / "packages" / "ptx-emulator",
    "kda-tokenwise": ROOT / "examples" / "third-party-backend",
}
THIRD_PARTY = (
    "torch",
    "pytest",
    "hypothesis",
    "nvidia-cutlass-dsl[cu13]",
    "apache-tvm-ffi",
    "llvmlite",
    "numpy",
    "hatchling",  # builds folders that pip installs without build isolation
)


def build_wheel(source: Path, folder: Path) -> Path:
    """Builds the wheel of the project in `source` into `folder` and returns its path.

    The build backend comes from the test environment, so nothing is downloaded.
    """
    return _build(source, folder, "--wheel")


def build_sdist(source: Path, folder: Path) -> Path:
    """Builds the source archive of the project in `source` into `folder` and returns its path."""
    return _build(source, folder, "--sdist")


def _build(source: Path, folder: Path, what: str) -> Path:
    command = [sys.executable, "-m", "build", what, "--no-isolation", "--outdir", str(folder), str(source)]
    # Builds must be reproducible without this variable, so the caller's value is dropped.
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    before = set(folder.iterdir())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = set(folder.iterdir()) - before
    return built


def copy_project(source: Path, target: Path) -> Path:
    """Copies a project to `target` without the files that tools leave behind, and returns `target`.

    Symbolic links stay links, so a link that points out of the project breaks.
    """
    unwanted = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", ".*")
    return Path(shutil.copytree(source, target, ignore=unwanted, symlinks=True))


def closure(names: Iterable[str]) -> list[metadata.Distribution]:
    """Returns the installed distributions that satisfy the requirements `names`, with all their dependencies."""
    found: dict[tuple[str, frozenset[str]], metadata.Distribution] = {}
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in found:
            continue
        found[key] = metadata.distribution(wanted.name)
        for text in found[key].requires or ():
            requirement = Requirement(text)
            extras = wanted.extras or {""}
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in extras):
                todo.append(requirement)
    return list(found.values())


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment without pip, and the folder of wheels that `install` may use."""

    folder: Path
    wheels: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def install(self, *requirements: str) -> None:
        """Installs `requirements` from `wheels` and folders, beside what is installed; downloads nothing."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet"]
        offline = ["--no-index", "--no-build-isolation", "--find-links", str(self.wheels)]
        self._run([*pip, *offline, *requirements])

    def run(self, *arguments: str, cwd: Path | None = None, status: int = 0) -> str:
        """Runs Python with `arguments` outside the repository and returns its standard output."""
        return self._run([self.python, *arguments], cwd=cwd or self.folder, status=status)

    def run_command(self, name: str, *arguments: str) -> str:
        """Runs the console script `name` of an installed wheel and returns its standard output."""
        return self._run([str(self.folder / "bin" / name), *arguments], cwd=self.folder)

    def ask(self, expression: str) -> Any:
        """Returns the value of a Python expression that may use `kda_core`; the value passes through JSON."""
        return json.loads(self.run("-c", f"import json, kda_core\nprint(json.dumps({expression}))"))

    def requirements(self, name: str) -> list[str]:
        """Returns the requirements that the installed distribution `name` states, without those of its extras."""
        stated = f"__import__('importlib.metadata').metadata.requires({name!r})"
        found = json.loads(self.run("-c", f"import json\nprint(json.dumps({stated}))"))
        return sorted(text for text in found if "extra ==" not in text)

    def ours(self) -> dict[str, str]:
        """Returns name -> version of each installed distribution of this repository or called kda-something."""
        listed = "{d.name: d.version for d in __import__('importlib.metadata').metadata.distributions()}"
        found = json.loads(self.run("-c", f"import json\nprint(json.dumps({listed}))"))
        return {
            name: version for name, version in found.items() if name in SOURCES or name.startswith("kda-")
        }

    def statuses(self) -> dict[str, list[str]]:
        """Returns name -> [status, reason, distribution] of each backend that `kda_core.backends` lists."""
        return self.ask("{i.name: [i.status, i.reason, i.distribution] for i in kda_core.backends()}")

    def _run(self, command: list[str], cwd: Path | None = None, status: int = 0) -> str:
        done = subprocess.run(
            command, cwd=cwd, env=self._environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == status, (
            f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    @staticmethod
    def _environment() -> dict[str, str]:
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_", "KDA_", "PYTEST_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        return kept | {
            "CUDA_VISIBLE_DEVICES": "",  # so that a backend's status does not depend on the machine
            "OMP_NUM_THREADS": "1",  # for such small tensors more threads are slower
        }
