"""What calls cost: the constants by which the planner predicts, one set per (device, backend, dtype).

Looked up in this order: the calibration file, which `store` writes; `SHIPPED`; what is shipped for the backend on another GPU;
nothing, and then the planner goes by the ratio rule of `kda_cp.plan`. The file is ``cp/constants.json`` in the folder of ``KDA_CACHE_DIR``.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kda_core import env, storage
from kda_core.errors import ArgumentError
from kda_core.registry import REGISTRY

Ways = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Pass:
    """Device time of one kind of call of a backend, over streams (sequence, value head)::

        call_us + prepare_ns * tokens * HV + max(lane * ns, work_ns * tokens * HV)

    Attributes:
        chain: ways in which the backend runs streams, each (lanes, ns a token of a stream): so many streams go at once, each
            at this pace. A call takes the fastest way.
        prepare_ns: of the part that is parallel over tokens and done before, a token and value head.
        work_ns: of all that is done beside the chains, or binds them, as memory does: a token and value head.
        call_us: fixed.
        even: whether the backend cuts streams where it likes, so that lanes have the same to do. Else a lane is what
            longest-first list scheduling gives.

    Raises:
        ArgumentError: no ways, or a number that is negative or not finite.
    """

    chain: Ways
    prepare_ns: float
    work_ns: float
    call_us: float
    even: bool = False

    def __post_init__(self) -> None:
        if not self.chain or any(lanes < 1 or not 0 < ns < float("inf") for lanes, ns in self.chain):
            raise ArgumentError("chain", "pairs (lanes of at least 1, ns above 0)", repr(self.chain))
        for name in ("prepare_ns", "work_ns", "call_us"):
            _check(name, getattr(self, name))


@dataclass(frozen=True)
class Constants:
    """Times of one backend on one device for one dtype of q, k, v.

    Attributes:
        forward: of a forward call.
        merge_us: one step of the merge: the states of all sequences pass one piece.
        gather_ns: copying the inputs of a summary where its pieces are not neighbours in memory, a token and value head.
        summarize, run: of the two calls of a backend that summarises segments itself, over all segments; None where it
            does not, or nobody has measured them.

    Raises:
        ArgumentError: a number that is negative or not finite, or one of `summarize` and `run` without the other.
    """

    forward: Pass
    merge_us: float
    gather_ns: float
    summarize: Pass | None = None
    run: Pass | None = None

    def __post_init__(self) -> None:
        _check("merge_us", self.merge_us)
        _check("gather_ns", self.gather_ns)
        if (self.summarize is None) != (self.run is None):
            raise ArgumentError("summarize, run", "both or neither", "one")


def _check(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ArgumentError(name, "a finite number of at least 0", repr(value))


Key = tuple[str, str, str]
"""(device name as torch gives it, or "cpu"; backend; dtype such as "bfloat16")."""

# kda-sm90 on the 132 SMs of an H200: the paces of chains in long calls. With s streams the preparation keeps up with the
# chains while s * (CTAs of a chain + SM ns of preparing a token / pace) <= 132. Preparing takes 73 SM ns a token in chunks
# of 64, 59 in chunks of 32, measured alone. `summarize` and `run` were measured over 4 and 8 heads of
# 65536 tokens: chains of four halves (B, M), and what the preparation takes where it binds; chains without preparation,
# and the bandwidth of HBM.
_SM90 = Constants(
    forward=Pass(((20, 15.9), (28, 21.8), (46, 31.1)), 0.0, 0.0, 30.0, even=True),
    merge_us=1.2,
    gather_ns=0.62,
    summarize=Pass(((14, 12.7), (24, 20.0), (32, 25.8)), 0.0, 0.83, 28.0, even=True),
    run=Pass(((32, 15.7), (66, 19.6), (132, 29.5)), 0.0, 0.37, 15.0, even=True),
)

#: Shipped constants, of devices with so many SMs.
SHIPPED_SMS = 132
SHIPPED: dict[Key, Constants] = {("NVIDIA H200", "sm90", "bfloat16"): _SM90}

FILE = "constants.json"
#: A larger file is none of ours.
FILE_BYTES = 4 << 20

_lock = threading.RLock()
_stored: dict[Key, Constants] | None = None
_version = 0


def _after_fork() -> None:
    """In a child: the thread that held the lock is not there."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def path() -> Path:
    """The calibration file, which need not exist."""
    return env.cache_dir() / "cp" / FILE


def lookup(key: Key) -> tuple[Constants | None, str]:
    """The constants of a (device, backend, dtype) and where they come from; None if nobody has any.

    The file is read once a process, until `store` or `refresh`; after a change of ``KDA_CACHE_DIR`` call `refresh`. A file
    that cannot be read, trusted or understood is warned of once, by the logger ``kda_core``, and counts as absent.
    """
    if (found := _read().get(key)) is not None:
        return found, "calibrated"
    return shipped(key)


def shipped(key: Key) -> tuple[Constants | None, str]:
    """As `lookup`, whatever is stored."""
    if key in SHIPPED:
        return SHIPPED[key], "shipped"
    device, *rest = key
    for (other, *same), found in SHIPPED.items():
        # a backend is for GPUs of one kind, whose chains take the same clocks: nearer than the ratio rule
        if same == rest and device != "cpu":
            return found, f"{other}'s shipped"
    return None, "none"


def stored() -> dict[Key, Constants]:
    """What the calibration file holds, as `lookup` reads it."""
    return dict(_read())


def store(key: Key, constants: Constants, patience: storage.Patience | None = None) -> Path:
    """Adds or replaces one set in the calibration file; returns its path. What other processes stored stays, and so do
    fields of other versions. ``patience``: with whoever holds the file's lock.

    Raises:
        ArgumentError: the file holds something else, which would be lost; or it cannot be written.
    """
    global _stored
    file = path()
    with _lock:
        try:
            storage.make_folder(file.parent)
            with storage.opened(file.parent) as folder, folder.locked(f"{FILE}.lock", patience):
                rows = [row for row in _rows(folder) if _key(row) != key]
                rows.append({"key": list(key), **asdict(constants)})
                rows.sort(key=lambda row: _key(row) or ())
                folder.sweep(FILE)
                folder.write(FILE, (json.dumps(rows, indent=2) + "\n").encode())
        except OSError as error:
            raise ArgumentError(
                env.KDA_CACHE_DIR.name, "a folder in which calibrations can be stored", str(error)
            ) from error
        except (ValueError, TypeError) as error:
            expected = "a file that kda_cp.constants.store wrote; remove it"
            raise ArgumentError(str(file), expected, str(error)) from error
        _stored = None
        _advance()
    return file


def problems() -> list[str]:
    """What in the calibration file is not used, why, and how to mend it. The file is read anew."""
    found: list[str] = []
    _load(path(), lambda file, problem: found.append(_UNUSED % (file, problem)))
    return found


def refresh() -> None:
    """Forgets what was read of the calibration file, and all plans that were made by it."""
    global _stored
    with _lock:
        _stored = None
        _advance()


def version() -> int:
    """A number that changes whenever what `lookup` finds may have changed: by `store`, or by `refresh`."""
    return _version


def _advance() -> None:
    global _version
    _version += 1
    REGISTRY.forget_plans()


def _read() -> dict[Key, Constants]:
    global _stored
    with _lock:
        if _stored is None:
            _stored = _load(path(), _warn)
        return _stored


def _load(file: Path, say: Callable[[Path, str], None]) -> dict[Key, Constants]:
    """What of the file can be used; `say` gets the rest."""
    try:
        with storage.opened(file.parent) as folder:
            rows = _rows(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except storage.UntrustedError as error:
        say(file, str(error))
        return {}
    except (OSError, ValueError, TypeError) as error:
        say(file, f"{type(error).__name__}: {error}. {_REMEDY}")
        return {}
    found: dict[Key, Constants] = {}
    for row in rows:
        key = _key(row)
        try:
            if key is None:
                raise ValueError("no key of device, backend and dtype")
            found[key] = _read_row(row)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            say(file, f"row {key}: {type(error).__name__}: {error}. {_REMEDY}")
    return found


_REMEDY = "Remove the file; `python -m kda_cp calibrate` measures anew."


_UNUSED = "calibrations in %s are not used, shipped constants are: %s"


def _warn(file: Path, problem: str) -> None:
    storage.warn_once(("calibration", file), _UNUSED, file, problem)


def _rows(folder: storage.Folder) -> list[Any]:
    """The rows of the calibration file, empty if there is none. Raises ``OSError``, ``ValueError`` and ``TypeError``."""
    try:
        content = folder.read(FILE, FILE_BYTES)
    except FileNotFoundError:
        return []
    try:
        rows = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(rows, list):
        raise TypeError(f"a {type(rows).__name__} instead of a list, as another version may write it")
    return rows


def _key(row: Any) -> Key | None:
    key = row.get("key") if isinstance(row, dict) else None
    if isinstance(key, list) and len(key) == 3 and all(isinstance(word, str) for word in key):
        return key[0], key[1], key[2]
    return None


def _read_row(row: dict[str, Any]) -> Constants:
    """Fields that this version does not know are left out."""

    def one(x: dict[str, Any]) -> Pass:
        known = _known(Pass, x)
        return Pass(**known | {"chain": tuple((int(n), float(ns)) for n, ns in known["chain"])})

    known = _known(Constants, row)
    for name in ("forward", "summarize", "run"):
        if name == "forward" or known.get(name) is not None:
            known[name] = one(known[name])
    return Constants(**known)


def _known(cls: type, row: dict[str, Any]) -> dict[str, Any]:
    return {f.name: row[f.name] for f in fields(cls) if f.name in row}
