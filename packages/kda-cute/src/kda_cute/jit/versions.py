"""The installed wheels of the CuTe DSL, and whether they fit together. Reads metadata and imports nothing.

``nvidia-cutlass-dsl`` itself is empty. Its requirements, ``nvidia-cutlass-dsl-libs-*``, contain the Python sources and one compiler
for each CUDA major version. All are pinned to one version and unpacked into one folder. Two things can go wrong: pip does not
undo a half-finished upgrade, and wheels before 4.6 overwrite each other's files, so that the order of installation decides what
runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations

DSL = "nvidia-cutlass-dsl"
TVM_FFI = "apache-tvm-ffi"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)\s*\(?==\s*([^;)\s]+)\)?\s*(?:;(.*))?$")


@dataclass(frozen=True)
class DslWheels:
    """The installed parts of the DSL.

    Attributes:
        versions: (distribution, version) of the DSL's wheels and of ``apache-tvm-ffi``, sorted by name.
        cuda: the CUDA major versions whose compiler is installed. The DSL uses the newest one that the driver supports.
        problems: one line for each problem.
    """

    versions: tuple[tuple[str, str], ...]
    cuda: tuple[int, ...]
    problems: tuple[str, ...]


def _parts() -> dict[str, metadata.Distribution]:
    """The distributions of the DSL by name. The first on ``sys.path`` counts, as for imports."""
    parts: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        # an interrupted pip leaves folders without a METADATA file, hence without a name
        name = str(distribution.metadata.json.get("name", "")).lower().replace("_", "-")
        if name == DSL or name.startswith(DSL + "-libs-") or name == TVM_FFI:
            parts.setdefault(name, distribution)
    return parts


def _pin_problems(parts: dict[str, metadata.Distribution]) -> list[str]:
    """The unmet pins between the DSL's own wheels. A pin of an extra is checked only if its wheel is installed."""
    problems = []
    for name, distribution in parts.items():
        for requirement in distribution.requires or ():
            if not (match := _PIN.match(requirement)) or not match[1].startswith(DSL):
                continue
            wanted, version, optional = match[1], match[2], "extra" in (match[3] or "")
            if wanted not in parts:
                if not optional:
                    problems.append(
                        f"{name} {distribution.version} needs {wanted}=={version}, which is not installed"
                    )
            elif parts[wanted].version != version:
                problems.append(
                    f"{name} {distribution.version} needs {wanted}=={version}, "
                    f"but {parts[wanted].version} is installed"
                )
    return problems


def _overlap_problems(parts: dict[str, metadata.Distribution]) -> list[str]:
    """The pairs of wheels that contain different files of one path. The order of installation decides which one is on disk."""
    files = {
        name: {str(file): file.hash.value for file in distribution.files or () if file.hash}
        for name, distribution in parts.items()
    }
    problems = []
    for one, other in combinations(sorted(files), 2):
        differing = [
            path for path in files[one].keys() & files[other].keys() if files[one][path] != files[other][path]
        ]
        if differing:
            problems.append(
                f"{one} and {other} overwrite each other: {len(differing)} files, such as {min(differing)}; "
                f"{DSL} 4.6 and later do not"
            )
    return problems


def dsl_wheels() -> DslWheels:
    """Returns the installed wheels of the DSL and their problems. Does not raise for a broken installation."""
    parts = _parts()
    cuda = tuple(sorted(int(m[1]) for name in parts if (m := re.fullmatch(DSL + r"-libs-cu(\d+)", name))))
    problems = []
    if DSL not in parts:
        problems.append(f"{DSL} is not installed: pip install '{DSL}[cu13]'")
        if any(name.startswith(DSL) for name in parts):
            problems.append(
                "only these parts of it are installed: "
                + ", ".join(sorted(name for name in parts if name != TVM_FFI))
            )
    if TVM_FFI not in parts:
        problems.append(f"{TVM_FFI} is not installed (the DSL does not require it): pip install {TVM_FFI}")
    problems += _pin_problems(parts) + _overlap_problems(parts)
    return DslWheels(
        tuple(sorted((name, part.version) for name, part in parts.items())), cuda, tuple(problems)
    )
