"""How to install this project's packages, for messages. No other module says where the packages are.

The packages are on no package index. A message must not name them to pip as if they were: pip would download whatever
somebody else registered under the name.
"""

from __future__ import annotations

SOURCE = "./packages/"
"""Prefix of a package's name in a pip command. Set it to "" once the packages are on an index."""

SIBLINGS: dict[str, tuple[str, ...]] = {"kda-sm90": ("kda-cute",), "kda-sm100": ("kda-cute",)}
"""What a package requires of this project besides kda-core. From a checkout, pip has to be given all of them."""

GPUS: dict[tuple[int, int], str] = {(9, 0): "kda-sm90", (10, 0): "kda-sm100", (10, 3): "kda-sm100"}
"""The package of this project that drives a compute capability."""

COMMANDS: dict[str, str] = {"cache": "kda-cute", "precompile": "kda-cute"}
"""Subcommands of ``python -m kda_core`` that another package of this project brings."""


def command(*distributions: str) -> str:
    """The command that installs kda-core together with `distributions`, packages of this project."""
    names = ["kda-core"]
    for name in distributions:
        names += [*(SIBLINGS.get(name, ()) if SOURCE else ()), name]
    paths = " ".join(f"{SOURCE}{name}" for name in dict.fromkeys(names))
    return f"pip install {paths}{', from a checkout of the repository' if SOURCE else ''}"
