"""Build backend: hatchling, which also finds the packages of this repository that no package index has yet.

Problem: kda-sm90 requires kda-core and kda-cute, so ``pip install ./packages/kda-sm90`` asks the index for them and fails.
Solution: pip reads a package's requirements from `prepare_metadata_for_build_wheel`, which replaces each requirement
whose folder lies beside this one by a ``file://`` reference to that folder.

Only this one answer differs. Every built wheel, and so every installed package, states the version ranges of
pyproject.toml: an installed reference would break later pip commands once the checkout is gone. PEP 517 wants both
metadata to be equal; hatchling documents that it cannot promise that either, and pip compares only name and version.
Editable installs get the version ranges too, because pip refuses a package as editable and as a reference at once.
Outside a checkout no folder lies beside this one, so nothing is replaced.

The packages hold equal copies of this file, because a build backend must lie inside its project; a test compares them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hatchling.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: dict | None = None) -> str:
    """Writes the wheel's ``.dist-info`` with references to sibling folders, and returns its name (PEP 517)."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder, build_wheel(folder, config_settings))
        shutil.unpack_archive(wheel, folder, "zip")
        (info,) = Path(folder).glob("*.dist-info")
        path = Path(metadata_directory, info.name, "METADATA")
        shutil.copytree(info, path.parent, ignore=shutil.ignore_patterns("RECORD"), dirs_exist_ok=True)
    head, blank, description = path.read_text(encoding="utf-8").partition("\n\n")
    fields = (line.partition(": ") for line in head.split("\n"))
    lines = [
        key + colon + (with_sibling(text) if key == "Requires-Dist" else text) for key, colon, text in fields
    ]
    path.write_text("\n".join(lines) + blank + description, encoding="utf-8")
    return path.parent.name


def with_sibling(text: str) -> str:
    """Returns a requirement with its version range replaced by a reference to the sibling folder, if there is one."""
    requirement = Requirement(text)
    sibling = Path.cwd().parent / requirement.name
    if (sibling / "pyproject.toml").is_file():
        requirement.specifier, requirement.url = SpecifierSet(), sibling.as_uri()
    return str(requirement)
