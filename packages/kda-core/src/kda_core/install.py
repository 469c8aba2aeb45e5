"""The commands that install this project's packages, for messages. No other module says where the packages are.

They are on no package index. A message must not name them to pip as if they were: pip would fetch what somebody else
registered under the name.
"""

from __future__ import annotations

SOURCE = "./packages/"
"""What stands before a package's name in a pip command. Set it to "" once the packages are on the index."""


def command(*distributions: str) -> str:
    """What installs kda-core together with `distributions`, packages of this project."""
    names = " ".join(f"{SOURCE}{name}" for name in dict.fromkeys(("kda-core", *distributions)))
    return f"pip install {names}{', from a checkout of the repository' if SOURCE else ''}"
