"""All environment variables and their parsing. `markdown` returns the table of ``docs/env.md``.

A variable is read when it is needed, never at import, so that a test or a notebook may change it. A flag accepts 1/true/yes/on
and 0/false/no/off in any case; any other value is an error that names the variable.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_core import storage
from kda_core.errors import ArgumentError

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off", ""})


def _with_private_data() -> Any:
    """Returns ``os.environ`` if its private dict ``_data`` holds the encoded environment, else None."""
    environ: Any = os.environ
    try:
        data = {environ.encodekey(name): environ.encodevalue(value) for name, value in environ.items()}
        return environ if type(environ._data) is dict and environ._data == data else None
    except AttributeError:  # another Python, or a test's mapping in place of os.environ
        return None


#: Checked once, at import. If it is None, `Variable.given` uses the public interface, which is slower.
_CHECKED_ENVIRON: Any = _with_private_data()


@dataclass(frozen=True)
class Variable:
    """An environment variable.

    Attributes:
        name: its name.
        default: its default, as a user would write it.
        help: its meaning, for the documentation.
    """

    name: str
    default: str
    help: str

    @functools.cached_property
    def _encoded_name(self) -> Any:
        """The name as a key of the private dict of `_CHECKED_ENVIRON`."""
        return _CHECKED_ENVIRON.encodekey(self.name)

    def given(self) -> Any:
        """Returns the value in the environment, in a form that may only be compared with earlier results.

        Every call of an operator uses it. For a variable that is not set, ``os.environ.get`` takes 0.7 us, because it raises
        and catches a KeyError; the private dict avoids that. A test may have replaced ``os.environ`` by another mapping.
        """
        environ = os.environ
        if environ is _CHECKED_ENVIRON:
            return environ._data.get(self._encoded_name)
        return environ.get(self.name)

    def raw(self) -> str:
        """Returns the value without surrounding space, or the default."""
        if self.given() is None:
            return self.default
        return os.environ.get(self.name, self.default).strip()

    def flag(self) -> bool:
        """Returns the value of a flag.

        Raises:
            ArgumentError: the value is not one of a flag.
        """
        value = self.raw().lower()
        if value in _TRUE:
            return True
        if value in _FALSE:
            return False
        raise ArgumentError(self.name, "1/true/yes/on or 0/false/no/off", repr(self.raw()))


KDA_BACKEND = Variable(
    "KDA_BACKEND",
    "",
    "Comma-separated backends that may serve calls, in order of preference. The first one that is installed and accepts a "
    "call serves it. Empty: automatic choice.",
)
KDA_CP = Variable("KDA_CP", "1", "0 turns off automatic context parallelism (the planners).")
KDA_CACHE_DIR = Variable(
    "KDA_CACHE_DIR",
    "",
    "Folder of compiled kernels and calibrations. Empty: `$XDG_CACHE_HOME/kda-core`, or `~/.cache/kda-core`.",
)
KDA_CACHE_MAXSIZE = Variable(
    "KDA_CACHE_MAXSIZE",
    "4G",
    "Largest total size of the compiled kernels in the cache folder: bytes, or a number with K, M, G or T for powers of 1024. "
    "Beyond it the least recently used ones are removed. 0: no limit.",
)
KDA_DISABLE_JIT = Variable(
    "KDA_DISABLE_JIT",
    "0",
    "1 forbids compilation: only cached kernels run. A kernel that is not cached is an error with the command that compiles it.",
)
KDA_KERNEL_DIR = Variable(
    "KDA_KERNEL_DIR",
    "",
    "Folder of exported kernels, which are used before compiled ones. Empty: none.",
)
KDA_CHECK = Variable(
    "KDA_CHECK",
    "0",
    "1 checks the values of the inputs before every call, for debugging. The check waits for the GPU.",
)
KDA_CHECK_SLOTS = Variable(
    "KDA_CHECK_SLOTS",
    "0",
    "1 checks the slots and the checkpoints of every call with a pool of states, for debugging. The check waits for the GPU.",
)
KDA_REQUIRE_ARCH = Variable(
    "KDA_REQUIRE_ARCH",
    "0",
    "1 makes tests that need a GPU fail on a machine without it, instead of being skipped.",
)

VARIABLES = (
    KDA_BACKEND,
    KDA_CP,
    KDA_CACHE_DIR,
    KDA_CACHE_MAXSIZE,
    KDA_DISABLE_JIT,
    KDA_KERNEL_DIR,
    KDA_CHECK,
    KDA_CHECK_SLOTS,
    KDA_REQUIRE_ARCH,
)


_OF_CALLS = (KDA_BACKEND, KDA_CP, KDA_CHECK, KDA_CHECK_SLOTS)


def given() -> tuple[Any, ...]:
    """Returns `Variable.given` of all variables that a call depends on, in less time."""
    environ = os.environ
    if environ is not _CHECKED_ENVIRON:
        return tuple(variable.given() for variable in _OF_CALLS)
    get, (backend, cp, check, check_slots) = environ._data.get, _ENCODED
    return get(backend), get(cp), get(check), get(check_slots)


_ENCODED = () if _CHECKED_ENVIRON is None else tuple(_CHECKED_ENVIRON.encodekey(x.name) for x in _OF_CALLS)


def backend_order() -> tuple[str, ...]:
    """Returns the names in ``KDA_BACKEND``, in order. Empty: automatic choice."""
    return tuple(dict.fromkeys(name.strip() for name in KDA_BACKEND.raw().split(",") if name.strip()))


def context_parallel() -> bool:
    """Returns whether planners may split calls (``KDA_CP``)."""
    return KDA_CP.flag()


def cache_dir() -> Path:
    """Returns the folder of compiled kernels and calibrations (``KDA_CACHE_DIR``), which may not exist yet. Never raises: if the
    folder cannot be used or trusted, returns `storage.private_folder` and warns once a process."""
    wanted, problem = _wanted_cache_dir()
    if problem is None and wanted is not None:
        return wanted
    folder = storage.private_folder()
    if folder is None:  # no folder can be written: reads find nothing, writes fail
        return wanted or Path(os.devnull) / "kda-core"
    storage.warn_once(
        ("cache_dir", problem), "%s Compiled kernels and calibrations go to %s.", _unused(problem), folder
    )
    return folder


def cache_dir_problem() -> str | None:
    """Returns why `cache_dir` is not the folder that the environment names, with the remedy; None if it is."""
    _, problem = _wanted_cache_dir()
    return None if problem is None else _unused(problem)


def _unused(problem: str | None) -> str:
    if KDA_CACHE_DIR.raw():
        return f"The folder that {KDA_CACHE_DIR.name} names is not used: {problem}."
    return (
        f"The default cache folder is not used: {problem}. Set {KDA_CACHE_DIR.name} to a folder of your own."
    )


def _wanted_cache_dir() -> tuple[Path | None, str | None]:
    """Returns the folder that the environment names (None if there is no home directory), and why it is not used (None if it is).

    The default is that of ``platformdirs`` on Linux. kda-core depends only on torch and does not import ``platformdirs``.
    """
    try:
        if value := KDA_CACHE_DIR.raw():
            folder = Path(value).expanduser()
        else:
            base = os.environ.get("XDG_CACHE_HOME", "").strip()
            folder = (Path(base) if base else Path.home() / ".cache") / "kda-core"
    except RuntimeError as error:  # no HOME and an unknown user, as in `docker run --user 1234`
        return None, str(error).rstrip(".")
    return folder, storage.folder_problem(folder)


def cache_maxsize() -> int | None:
    """Returns the largest total size of the compiled kernels in bytes (``KDA_CACHE_MAXSIZE``); None: no limit.

    Raises:
        ArgumentError: the value is not a size.
    """
    return size_in_bytes(KDA_CACHE_MAXSIZE.name, KDA_CACHE_MAXSIZE.raw()) or None


def size_in_bytes(name: str, text: str) -> int:
    """Returns the bytes of a size, such as "500M" or "1.5G".

    Raises:
        ArgumentError: `text` is not a size. The message names `name`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text.strip().upper())
    if match is None:
        raise ArgumentError(name, "bytes, or a number with K, M, G or T, such as 4G", repr(text))
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " "))


def disable_jit() -> bool:
    """Returns whether compilation is forbidden (``KDA_DISABLE_JIT``)."""
    return KDA_DISABLE_JIT.flag()


def check() -> bool:
    """Returns whether the values of inputs are checked (``KDA_CHECK``)."""
    return KDA_CHECK.flag()


def check_slots() -> bool:
    """Returns whether the slots of pools are checked (``KDA_CHECK_SLOTS``)."""
    return KDA_CHECK_SLOTS.flag()


def require_arch() -> bool:
    """Returns whether a test fails if its GPU is missing (``KDA_REQUIRE_ARCH``)."""
    return KDA_REQUIRE_ARCH.flag()


def markdown() -> str:
    """Returns the table of ``docs/env.md``."""
    default = lambda v: f"`{v.default}`" if v.default else "empty"
    rows = [f"| `{v.name}` | {default(v)} | {v.help} |" for v in VARIABLES]
    return "\n".join(["| variable | default | meaning |", "| --- | --- | --- |", *rows])
