"""Measured constants of the cost model, one set per (device, backend, dtype).

`lookup` searches in this order:

1. the calibration file ``cp/constants.json`` in the folder of ``KDA_CACHE_DIR``, which `store` writes;
2. `SHIPPED`;
3. shipped constants of the same backend on another GPU.

Without constants the planner uses the ratio rule of `kda_cp.choose`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from kda_core import env, storage
from kda_core.errors import ArgumentError
from kda_core.registry import REGISTRY

Ways = tuple[tuple[int, float], ...]
"""Pairs (lanes, ns per token of a task)."""


@dataclass(frozen=True)
class Pass:
    """Device time of one kind of call of a backend, over tasks (sequence, value head)::

        call_us + intra_chunk_ns * tokens * HV + max(lane * ns, work_ns * tokens * HV)

    ``lane`` is the number of tokens of the busiest lane.

    Attributes:
        chain: the ways in which the backend can execute tasks, as pairs (lanes, ns): how many tasks are in progress at
            once, and how many ns each takes per token. A call takes the fastest way.
        intra_chunk_ns: time per token and value head of an intra-chunk stage that runs before the chains.
        work_ns: time per token and value head of work that runs beside the chains or limits them, such as memory
            traffic.
        call_us: fixed time of a call.
        even: whether the backend divides tasks among its lanes evenly. Otherwise tasks are indivisible, and the
            busiest lane is that of longest-first list scheduling.

    Raises:
        ArgumentError: `chain` is empty, or a number is negative or not finite.
    """

    chain: Ways
    intra_chunk_ns: float
    work_ns: float
    call_us: float
    even: bool = False

    def __post_init__(self) -> None:
        if not self.chain or any(lanes < 1 or not 0 < ns < float("inf") for lanes, ns in self.chain):
            raise ArgumentError("chain", "pairs (lanes of at least 1, ns above 0)", repr(self.chain))
        for name in ("intra_chunk_ns", "work_ns", "call_us"):
            _check(name, getattr(self, name))


@dataclass(frozen=True)
class Beside:
    """Times of the calls of a plan with whole ends (`kda_cp.whole_ends`), each while the other one runs.

    A whole call has as many lanes of the first way as it has heads; a call over the inner segments has the rest of the device. So its
    lanes are fewer than those given here, and `work_ns` of `summarize` is longer, in proportion.

    Attributes:
        first, summarize: the first segment as a whole call, and `summarize` over the inner ones.
        last, execute: the last segment as a whole call, and `execute_segments` over the inner ones.
    """

    first: Pass
    summarize: Pass
    last: Pass
    execute: Pass


@dataclass(frozen=True)
class Constants:
    """Times of one backend on one device for one dtype of q, k, v.

    Attributes:
        forward: constants of a forward call.
        merge_us: time of one step of the merge, in which the states of all sequences pass one segment.
        gather_ns: time per token and value head to copy the inputs of summaries whose segments are not neighbours in
            memory.
        summarize, execute: constants of `summarize` and `execute_segments` over all segments. None if the backend does
            not summarise segments itself, or if they were not measured.
        backward, backward_dense: constants of a backward, from the states that a forward saves by default and with
            `disable_recompute`. None if they were not measured.
        state_gradients: constants of `initial_state_gradients` over all segments. None if the backend has no such method, or if they
            were not measured.
        beside: constants of plans with whole ends. None if the backend is no `kda_core.backend.SupportsWholeEnds`, or if they were not
            measured.

    Raises:
        ArgumentError: a number is negative or not finite, or only some of `summarize` and `execute`, or of the constants of the
            backward, are given.
    """

    forward: Pass
    merge_us: float
    gather_ns: float
    summarize: Pass | None = None
    execute: Pass | None = None
    backward: Pass | None = None
    backward_dense: Pass | None = None
    state_gradients: Pass | None = None
    beside: Beside | None = None

    def __post_init__(self) -> None:
        _check("merge_us", self.merge_us)
        _check("gather_ns", self.gather_ns)
        for names in (("summarize", "execute"), ("backward", "backward_dense", "state_gradients")):
            given = [name for name in names if getattr(self, name) is not None]
            if 0 < len(given) < len(names):
                raise ArgumentError(", ".join(names), "all or none", f"only {', '.join(given)}")

    def of_backward(self, disable_recompute: bool) -> Constants | None:
        """Returns constants by which the cost model predicts backwards, or None: a backward takes the place of a forward, and
        `initial_state_gradients` that of `summarize`."""
        chains = self.backward_dense if disable_recompute else self.backward
        if chains is None:
            return None
        return Constants(chains, self.merge_us, self.gather_ns, self.state_gradients, chains)


PASSES = ("forward", "summarize", "execute", "backward", "backward_dense", "state_gradients")
"""The fields of `Constants` that are a `Pass`."""


def _check(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ArgumentError(name, "a finite number of at least 0", repr(value))


Key = tuple[str, str, str]
"""(device name as torch reports it, or "cpu"; backend; dtype such as "bfloat16")."""

# kda-sm90 beside itself on an H200, fitted to both steps of plans with whole ends for 65536 tokens of 4 and 8 heads. With slow gates the predicted
# times of these plans are 3 to 5% below the measured ones. Steep gates take up to 4% longer than slow ones, because summarize does.
_BESIDE = Beside(
    first=Pass(chain=((17, 12.5),), intra_chunk_ns=0.0, work_ns=0.0, call_us=46.0, even=True),
    summarize=Pass(chain=((32, 24.0),), intra_chunk_ns=0.0, work_ns=0.76, call_us=24.0, even=True),
    last=Pass(chain=((17, 12.5),), intra_chunk_ns=0.0, work_ns=0.0, call_us=42.0, even=True),
    execute=Pass(chain=((66, 20.0),), intra_chunk_ns=0.0, work_ns=0.45, call_us=17.0, even=True),
)

# kda-sm90 on an H200 with 132 SMs.
#
# forward: fitted to rows of results/h200/prefill.json with slow gates: 65536 tokens of 8 heads, 16384 of 16, 8192 of 32, of 64 and of 96.
# Predicted times are within 3% of these. `_H100` has the same values, because both GPUs have the same SMs, which limit these calls.
#
# summarize, execute: measured over 65536 tokens of 4 and of 8 heads. In `summarize` a chain has four halves, two of B and
# two of M; work_ns is the time of the intra-chunk stage where it is the limit. In `execute` no intra-chunk stage runs beside
# the chains; work_ns comes from the bandwidth of HBM.
#
# backward, backward_dense, state_gradients: from single measurements (docs/kernels/backward.md), not fitted to sweeps. A backward has
# two launches. The chains of the first one are those of the modes `recompute` and `reverse`. The second one computes the gradients of
# chunks; intra_chunk_ns is its time, which a split does not change. The chains of `initial_state_gradients` are taken to be as fast as
# those of `reverse` without stores, with twice as many halves. work_ns is the time of the intra-chunk stage.
#
# All values except forward and beside were then scaled to the times of one run of ``python -m kda_cp calibrate`` on an H200.
_H200 = Constants(
    forward=Pass(
        chain=((17, 12.4), (32, 20.2), (46, 26.0)), intra_chunk_ns=0.0, work_ns=0.0, call_us=23.0, even=True
    ),
    merge_us=1.7,
    gather_ns=0.62,
    summarize=Pass(
        chain=((14, 12.4), (24, 19.5), (32, 25.2)), intra_chunk_ns=0.0, work_ns=0.81, call_us=27.3, even=True
    ),
    execute=Pass(
        chain=((32, 15.3), (66, 19.1), (132, 28.8)), intra_chunk_ns=0.0, work_ns=0.36, call_us=14.6, even=True
    ),
    backward=Pass(chain=((32, 47.6), (64, 90.5)), intra_chunk_ns=1.33, work_ns=0.0, call_us=42.9, even=True),
    backward_dense=Pass(
        chain=((26, 22.9), (46, 38.4)), intra_chunk_ns=1.31, work_ns=0.0, call_us=42.1, even=True
    ),
    state_gradients=Pass(
        chain=((17, 16.1), (32, 27.3)), intra_chunk_ns=0.0, work_ns=0.67, call_us=24.1, even=True
    ),
    beside=_BESIDE,
)

# kda-sm90 on an H100 with 132 SMs and 80 GB of HBM3: `_H200`, scaled by two runs of ``python -m kda_cp calibrate`` there, whose values differ
# by less than 1%. forward, and the first step of beside: those of `_H200`, because SMs limit these calls. HBM limits the second step of beside. Its
# constants are fitted to plans of 2 to 12 heads on an H100.
_H100 = Constants(
    forward=Pass(
        chain=((17, 12.4), (32, 20.2), (46, 26.0)), intra_chunk_ns=0.0, work_ns=0.0, call_us=23.0, even=True
    ),
    merge_us=1.87,
    gather_ns=0.76,
    summarize=Pass(
        chain=((4, 10.0), (14, 12.4), (24, 19.6), (32, 26.3)),
        intra_chunk_ns=0.0,
        work_ns=0.86,
        call_us=24.0,
        even=True,
    ),
    execute=Pass(
        chain=((32, 14.4), (66, 21.8), (132, 33.0)), intra_chunk_ns=0.0, work_ns=0.5, call_us=13.0, even=True
    ),
    backward=Pass(chain=((32, 51.9), (64, 98.8)), intra_chunk_ns=1.46, work_ns=0.0, call_us=46.9, even=True),
    backward_dense=Pass(
        chain=((26, 23.6), (46, 39.5)), intra_chunk_ns=1.35, work_ns=0.0, call_us=43.3, even=True
    ),
    state_gradients=Pass(
        chain=((17, 17.0), (32, 28.9)), intra_chunk_ns=0.0, work_ns=0.7, call_us=25.5, even=True
    ),
    beside=replace(
        _BESIDE,
        last=Pass(chain=((17, 16.8),), intra_chunk_ns=0.0, work_ns=0.0, call_us=25.0, even=True),
        execute=Pass(chain=((66, 21.9),), intra_chunk_ns=0.0, work_ns=0.5, call_us=17.0, even=True),
    ),
)

#: SMs of the devices of `SHIPPED`.
SHIPPED_SMS = 132
#: The first device of a backend also stands for its devices that the table lacks.
SHIPPED: dict[Key, Constants] = {
    ("NVIDIA H200", "sm90", "bfloat16"): _H200,
    ("NVIDIA H100 80GB HBM3", "sm90", "bfloat16"): _H100,
}

FILE = "constants.json"
#: Larger files are not read: no calibration file is that large.
FILE_BYTES = 4 << 20

_UNUSED = "calibrations in %s are ignored and shipped constants are used: %s"
_REMEDY = "Remove the file and run `python -m kda_cp calibrate` again."

_lock = threading.RLock()
_stored: dict[Key, Constants] | None = None
_version = 0


def _after_fork_in_child() -> None:
    """Replaces the lock: the thread that held it at the fork does not exist in the child."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def path() -> Path:
    """Returns the path of the calibration file. The file need not exist."""
    return env.cache_dir() / "cp" / FILE


def lookup(key: Key) -> tuple[Constants | None, str]:
    """Returns the constants of a (device, backend, dtype), or None, and their source in words.

    The file is read once per process, and again after `store` or `refresh`. Call `refresh` after a change of
    ``KDA_CACHE_DIR``. If the file is unreadable, untrusted or malformed, the logger ``kda_core`` warns once and the
    file counts as absent.
    """
    if (found := _stored_sets().get(key)) is not None:
        return found, "calibrated"
    return shipped(key)


def shipped(key: Key) -> tuple[Constants | None, str]:
    """Returns the result of `lookup` without a calibration file."""
    if key in SHIPPED:
        return SHIPPED[key], "shipped"
    device, *rest = key
    for (other, *same), found in SHIPPED.items():
        # A backend serves one GPU architecture, whose GPUs need about the same clocks for a chain. So these constants are
        # closer than the ratio rule.
        if same == rest and device != "cpu":
            return found, f"{other}'s shipped"
    return None, "none"


def stored() -> dict[Key, Constants]:
    """Returns the contents of the calibration file as `lookup` reads it."""
    return dict(_stored_sets())


def store(key: Key, constants: Constants, patience: storage.Patience | None = None) -> Path:
    """Adds or replaces one set in the calibration file and returns the path of the file.

    Sets of other processes and fields of other versions are kept.

    Args:
        key: (device, backend, dtype).
        constants: the set.
        patience: how long to wait for the lock of the file; None for the default of `kda_core.storage`.

    Raises:
        ArgumentError: the file cannot be written, or it has contents that `store` did not write and would lose.
    """
    global _stored
    file = path()
    with _lock:
        try:
            storage.make_folder(file.parent)
            with storage.opened(file.parent) as folder, folder.locked(f"{FILE}.lock", patience):
                entries = [entry for entry in _entries(folder) if _key(entry) != key]
                entries.append({"key": list(key), **asdict(constants)})
                entries.sort(key=lambda entry: _key(entry) or ())
                folder.sweep(FILE)
                folder.write(FILE, (json.dumps(entries, indent=2) + "\n").encode())
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
    """Reads the calibration file again and returns a line for each unusable part: the file, the cause and a remedy."""
    found: list[str] = []
    _load(path(), lambda file, problem: found.append(_UNUSED % (file, problem)))
    return found


def refresh() -> None:
    """Drops the cached contents of the calibration file, and all cached plans."""
    global _stored
    with _lock:
        _stored = None
        _advance()


def version() -> int:
    """Returns a number that `store` and `refresh` increase, because they may change the results of `lookup`."""
    return _version


def _advance() -> None:
    global _version
    _version += 1
    REGISTRY.forget_plans()


def _stored_sets() -> dict[Key, Constants]:
    global _stored
    with _lock:
        if _stored is None:
            _stored = _load(path(), _warn)
        return _stored


def _load(file: Path, report: Callable[[Path, str], None]) -> dict[Key, Constants]:
    """Returns the usable sets of the file. Calls `report` for each part that is unusable."""
    try:
        with storage.opened(file.parent) as folder:
            entries = _entries(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except storage.UntrustedError as error:
        report(file, str(error))
        return {}
    except (OSError, ValueError, TypeError) as error:
        report(file, f"{type(error).__name__}: {error}. {_REMEDY}")
        return {}
    found: dict[Key, Constants] = {}
    for entry in entries:
        key = _key(entry)
        try:
            if key is None:
                raise ValueError("no key of device, backend and dtype")
            found[key] = _constants(entry)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            report(file, f"entry {key}: {type(error).__name__}: {error}. {_REMEDY}")
    return found


def _warn(file: Path, problem: str) -> None:
    storage.warn_once(("calibration", file), _UNUSED, file, problem)


def _entries(folder: storage.Folder) -> list[Any]:
    """Returns the entries of the calibration file, [] without a file.

    Raises:
        OSError, ValueError, TypeError: the file is unreadable or malformed.
    """
    try:
        content = folder.read(FILE, FILE_BYTES)
    except FileNotFoundError:
        return []
    try:
        entries = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(entries, list):
        raise TypeError(
            f"expected a list, got a {type(entries).__name__}; another version may have written it"
        )
    return entries


def _key(entry: Any) -> Key | None:
    key = entry.get("key") if isinstance(entry, dict) else None
    if isinstance(key, list) and len(key) == 3 and all(isinstance(word, str) for word in key):
        return key[0], key[1], key[2]
    return None


def _constants(entry: dict[str, Any]) -> Constants:
    """Returns the constants of an entry. Fields that this version does not know are ignored."""

    def one_pass(data: dict[str, Any]) -> Pass:
        known = _known_fields(Pass, data)
        return Pass(**known | {"chain": tuple((int(n), float(ns)) for n, ns in known["chain"])})

    known = _known_fields(Constants, entry)
    for name in PASSES:
        if name == "forward" or known.get(name) is not None:
            known[name] = one_pass(known[name])
    if known.get("beside") is not None:
        known["beside"] = Beside(**{f.name: one_pass(known["beside"][f.name]) for f in fields(Beside)})
    return Constants(**known)


def _known_fields(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    return {f.name: data[f.name] for f in fields(cls) if f.name in data}
