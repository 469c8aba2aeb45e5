"""Build hook: a wheel without kernels, or with other files than its manifest lists, is not built."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src", "kda_sm90_kernels", "sm_90a")


class KernelsHook(BuildHookInterface):
    """Checks the kernels before a wheel is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root, FOLDER)
        if version != "editable" and (problem := problem_of(folder)):
            raise RuntimeError(
                f"{problem}; `python -m nox -s kernels` exports the kernels and builds the wheel"
            )


def problem_of(folder: Path) -> str | None:
    """Returns why a folder has no complete export; None if it has."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return f"{manifest} does not exist"
    listed = {one["file"]: one["sha256"] for one in json.loads(manifest.read_text())["kernels"]}
    found = {path.name for path in folder.iterdir()} - {manifest.name}
    if found != listed.keys():
        return f"{folder}: expected {len(listed)} files that the manifest lists, found {len(found)}"
    for name, sha256 in listed.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != sha256:
            return f"{folder / name} is damaged"
    return None
