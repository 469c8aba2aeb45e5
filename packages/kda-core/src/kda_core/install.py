"""How to install this project's packages, for messages. No other module says where the packages are.

The packages are on no package index. A message must not name them to pip as if they were: pip would download whatever
somebody else registered under the name.
"""

from __future__ import annotations

SOURCE = "./packages/"
"""Prefix of a package's name in a pip command. Set it to "" once the packages are on an index."""

GPUS: dict[tuple[int, int], str] = {(9, 0): "kda-sm90", (10, 0): "kda-sm100", (10, 3): "kda-sm100"}
"""The package of this project that drives a compute capability."""

FLA = "kda-core[fla]"
"""The package that contains the backend `fla`, for GPUs that `GPUS` lacks: kda-core with an extra."""

COMMANDS: dict[str, str] = {"cache": "kda-cute", "precompile": "kda-cute"}
"""Subcommands of ``python -m kda_core`` that another package of this project adds."""


def command(*distributions: str) -> str:
    """Returns the command that installs kda-core together with `distributions`, packages of this project, such as "kda-sm90", or
    `FLA`."""
    core = () if FLA in distributions else ("kda-core",)
    paths = [f"{SOURCE}{name}" for name in dict.fromkeys((*core, *distributions))]
    names = " ".join(f"'{p}'" if "[" in p else p for p in paths)  # brackets are a pattern for a shell
    return f"pip install {names}{', from a checkout of the repository' if SOURCE else ''}"
