"""Every environment variable, parsed in one place. ``docs/env.md`` is this table.

Variables are read when they are needed, never at import, so that a test or a notebook may change them.
A flag accepts 1/true/yes/on and 0/false/no/off in any case; anything else is an error that names the variable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_core import storage
from kda_core.errors import ArgumentError

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off", ""})


def _direct() -> Any:
    """The class of ``os.environ`` if its private mapping holds what it shows, else None."""
    environ: Any = os.environ
    try:
        data = {environ.encodekey(name): environ.encodevalue(value) for name, value in environ.items()}
        return type(environ) if type(environ._data) is dict and environ._data == data else None
    except AttributeError:
        return None


_DIRECT = _direct()


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, its default as a user would write it, and what it does."""

    name: str
    default: str
    help: str

    def given(self) -> Any:
        """What the environment holds, to be compared only. Every call asks, and ``os.environ.get`` takes 0.7 us where a
        variable is not set: it raises and catches a KeyError. ``os.environ`` may be another mapping, which a test
        put there."""
        environ: Any = os.environ
        if type(environ) is _DIRECT:
            return environ._data.get(environ.encodekey(self.name))
        return environ.get(self.name)

    def raw(self) -> str:
        return os.environ.get(self.name, self.default).strip()

    def flag(self) -> bool:
        value = self.raw().lower()
        if value in _TRUE:
            return True
        if value in _FALSE:
            return False
        raise ArgumentError(self.name, "1/true/yes/on or 0/false/no/off", repr(self.raw()))


KDA_BACKEND = Variable(
    "KDA_BACKEND",
    "",
    "Comma-separated backends that may serve calls, in order of preference: the first that is installed and takes a "
    "call serves it. Empty: automatic choice.",
)
KDA_CP = Variable("KDA_CP", "1", "0 turns automatic context parallelism (the planners) off.")
KDA_CACHE_DIR = Variable(
    "KDA_CACHE_DIR",
    "",
    "Folder of compiled kernels and calibrations. Empty: `$XDG_CACHE_HOME/kda-core`, or `~/.cache/kda-core`.",
)
KDA_DISABLE_JIT = Variable(
    "KDA_DISABLE_JIT",
    "0",
    "1 turns the need to compile a kernel into an error that names the command to compile it: only cached kernels run.",
)
KDA_CHECK = Variable(
    "KDA_CHECK",
    "0",
    "1 checks the values of every call's inputs before it runs, for debugging: it waits for the GPU.",
)
KDA_REQUIRE_ARCH = Variable(
    "KDA_REQUIRE_ARCH", "0", "1 makes a test session fail where the GPU that its kernels need is absent."
)

VARIABLES = (KDA_BACKEND, KDA_CP, KDA_CACHE_DIR, KDA_DISABLE_JIT, KDA_CHECK, KDA_REQUIRE_ARCH)


def backend_order() -> tuple[str, ...]:
    """The names in ``KDA_BACKEND``, in order; empty means automatic."""
    return tuple(dict.fromkeys(name.strip() for name in KDA_BACKEND.raw().split(",") if name.strip()))


def context_parallel() -> bool:
    """Whether planners may be asked (``KDA_CP``)."""
    return KDA_CP.flag()


def cache_dir() -> Path:
    """The folder of compiled kernels and calibrations (``KDA_CACHE_DIR``). It need not exist yet. Never raises: where the
    folder cannot be used or trusted it is `storage.private_folder`, and a warning says why, once a process."""
    wanted, problem = _wanted_cache_dir()
    if problem is None and wanted is not None:
        return wanted
    folder = storage.private_folder()
    if folder is None:  # nothing can be written anywhere: reads find nothing there, writes fail
        return wanted or Path(os.devnull) / "kda-core"
    storage.warn_once(
        ("cache_dir", problem), "%s Compiled kernels and calibrations go to %s.", _unused(problem), folder
    )
    return folder


def cache_dir_problem() -> str | None:
    """Why `cache_dir` is not the folder that the environment names, and how to mend that; None where it is."""
    _, problem = _wanted_cache_dir()
    return None if problem is None else _unused(problem)


def _unused(problem: str | None) -> str:
    if KDA_CACHE_DIR.raw():
        return f"The folder that {KDA_CACHE_DIR.name} names is not used: {problem}."
    return (
        f"The default cache folder is not used: {problem}. Set {KDA_CACHE_DIR.name} to a folder of your own."
    )


def _wanted_cache_dir() -> tuple[Path | None, str | None]:
    """The folder that the environment names, None if that cannot be found out; and why it is not used, None if it is."""
    try:
        if value := KDA_CACHE_DIR.raw():
            folder = Path(value).expanduser()
        else:
            base = os.environ.get("XDG_CACHE_HOME", "").strip()
            folder = (Path(base) if base else Path.home() / ".cache") / "kda-core"
    except (
        RuntimeError
    ) as error:  # HOME is not set and the user is in no list, as in `docker run --user 1234`
        return None, str(error).rstrip(".")
    return folder, storage.folder_problem(folder)


def disable_jit() -> bool:
    """Whether compiling is forbidden (``KDA_DISABLE_JIT``)."""
    return KDA_DISABLE_JIT.flag()


def check() -> bool:
    """Whether the values of inputs are checked (``KDA_CHECK``)."""
    return KDA_CHECK.flag()


def require_arch() -> bool:
    """Whether a test session without its GPU is a failure (``KDA_REQUIRE_ARCH``)."""
    return KDA_REQUIRE_ARCH.flag()


def markdown() -> str:
    """The table of ``docs/env.md``."""
    rows = [f"| `{v.name}` | `{v.default}` | {v.help} |" for v in VARIABLES]
    return "\n".join(["| variable | default | meaning |", "| --- | --- | --- |", *rows])
