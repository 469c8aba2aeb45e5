"""Results files: the record of a run, and rows that replace those of earlier runs.

A results file is JSON: {"runs": [record, ...], "rows": [row, ...]}. Each row has the id of the run that measured it.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kda_core.bench import environment

RESULTS = Path(__file__).parent / "results"
KEY = ("case", "gates", "impl")  # identifies a row of prefill.json and cp.json
#: Distributions whose versions are part of the record.
PACKAGES = (
    "kda-core", "kda-cute", "kda-cp", "kda-sm90", "kda-sm100", "fla-core", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi",
    "nvidia-cudnn-frontend", "flashinfer-python",
)  # fmt: skip


def describe(device: torch.device, argv: list[str] | None, script: str) -> dict[str, Any]:
    """Returns the record of a run: id, time, device, versions, and the command of `script` with the arguments `argv`.

    `argv` None stands for the arguments of the process.
    """
    name, now = environment.device_name(device), environment.now()
    words = name.lower().replace("nvidia", "").split()
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "id": now.strftime("%Y%m%dT%H%M%SZ"),
        "date": now.isoformat(timespec="seconds"),
        "device": words[0] if device.type == "cuda" else "cpu",
        "device_name": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": versions,
        "command": command(sys.argv[1:] if argv is None else argv, script),
    }


def command(argv: list[str], script: str) -> str:
    """Returns the command that measures the same rows again, without ``--out`` and ``--resume``."""
    args = list(argv)
    if "--out" in args:
        at = args.index("--out")
        del args[at : at + 2]
    return " ".join([script, *(a for a in args if not a.startswith("--out=") and a != "--resume")])


def load(path: Path) -> dict[str, Any]:
    """Returns the content of a results file, without runs and rows if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": []}


def interrupted(path: Path, run: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the last recorded run that equals `run` except for its id and date, and its rows.

    Raises:
        SystemExit: the file has no such run.
    """
    old = load(path)
    for known in reversed(old["runs"]):
        if all(known.get(k) == x for k, x in run.items() if k not in ("id", "date")):
            return known, [r for r in old["rows"] if r["run"] == known["id"]]
    raise SystemExit(f"--resume: {path} has no run of this command with these versions on this device")


def save(path: Path, run: dict[str, Any], rows: list[dict[str, Any]], key: tuple[str, ...] = KEY) -> None:
    """Writes `rows` of `run` to a results file in place of earlier rows with the same values of the fields `key`.

    Other rows stay, and so do the records of their runs. The file is replaced atomically.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    old = load(path)
    identity = lambda r: tuple(r[name] for name in key)
    measured = {identity(r) for r in rows}
    kept = [r for r in old["rows"] if identity(r) not in measured]
    used = {r["run"] for r in kept}
    runs = [r for r in old["runs"] if r["id"] in used] + [run]
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps({"runs": runs, "rows": kept + rows}, indent=1) + "\n")
    new.replace(path)
