"""Wheels of every project of the repository, and clean environments to install them into, without a download.

A clean environment sees torch and the other third-party distributions of the test environment (links to them, and to
nothing else), so that pip resolves real requirements and finds this repository's packages in the built wheels alone.
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
    "kda-sm90": ROOT / "packages" / "kda-sm90",
    "kda-sm100": ROOT / "packages" / "kda-sm100",
    "kda-cp": ROOT / "packages" / "kda-cp",
    "ptx-emulator": ROOT / "packages" / "ptx-emulator",
    "kda-tokenwise": ROOT / "examples" / "third-party-backend",
}
THIRD_PARTY = (
    "torch",
    "pytest",
    "nvidia-cutlass-dsl[cu13]",
    "apache-tvm-ffi",
    "llvmlite",
    "numpy",
)


def build_wheel(source: Path, folder: Path) -> Path:
    """Builds the wheel of the project in `source` into `folder` with the build backend of this environment."""
    return _build(source, folder, "--wheel")


def build_sdist(source: Path, folder: Path) -> Path:
    """Builds the source archive of the project in `source` into `folder`, as `build_wheel` builds the wheel."""
    return _build(source, folder, "--sdist")


def _build(source: Path, folder: Path, what: str) -> Path:
    command = [sys.executable, "-m", "build", what, "--no-isolation", "--outdir", str(folder), str(source)]
    before = set(folder.iterdir())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = set(folder.iterdir()) - before
    return built


def copy_project(source: Path, target: Path) -> Path:
    """Copies a project out of the repository without what tools left in it; links stay links."""
    unwanted = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", ".*")
    return Path(shutil.copytree(source, target, ignore=unwanted, symlinks=True))


def closure(names: Iterable[str]) -> list[metadata.Distribution]:
    """The installed distributions behind some requirements and, recursively, behind what those require."""
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
    """A virtual environment without pip, and the wheels that can be installed into it."""

    folder: Path
    wheels: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def install(self, *requirements: str) -> None:
        """Installs from the wheels and from what is there; nothing is downloaded."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-index"]
        self._run([*pip, "--find-links", str(self.wheels), *requirements])

    def run(self, *arguments: str, cwd: Path | None = None, status: int = 0) -> str:
        """Runs Python with some arguments, away from the repository; what it printed."""
        return self._run([self.python, *arguments], cwd=cwd or self.folder, status=status)

    def run_command(self, name: str, *arguments: str) -> str:
        """Runs a command that a wheel installed; what it printed."""
        return self._run([str(self.folder / "bin" / name), *arguments], cwd=self.folder)

    def ask(self, expression: str) -> Any:
        """The value of a Python expression, which sees `kda_core`, by way of JSON."""
        return json.loads(self.run("-c", f"import json, kda_core\nprint(json.dumps({expression}))"))

    def ours(self) -> dict[str, str]:
        """The installed distributions of this repository, and any other that is called kda-something."""
        listed = "{d.name: d.version for d in __import__('importlib.metadata').metadata.distributions()}"
        found = json.loads(self.run("-c", f"import json\nprint(json.dumps({listed}))"))
        return {
            name: version for name, version in found.items() if name in SOURCES or name.startswith("kda-")
        }

    def statuses(self) -> dict[str, list[str]]:
        """name -> [status, reason, distribution] of every backend that `kda_core.backends` lists."""
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
            "CUDA_VISIBLE_DEVICES": "",  # a backend's status shall not depend on the machine
            "OMP_NUM_THREADS": "1",  # these tensors are small: threads would only wait for each other
        }
