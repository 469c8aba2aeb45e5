"""``python -m kda_core bench``: selects cases and implementations, measures them, and writes the report.

A row is a dictionary with the fields ``call``, ``case``, ``impl``, ``gates`` or ``state_dtype``, and either ``failed``, the reason why
nothing was measured, or ``ms``, ``timing`` and the fields of `prefill.FIELDS`, `training.FIELDS` or `decode.FIELDS`. ``ms`` is the time
that implementations are compared by. Progress goes to stderr, the report to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kda_core
from kda_core.bench import cases, decode, environment, implementations, peers, plots, prefill, report
from kda_core.bench.cases import CP, Case
from kda_core.bench.peers import CALLS, DECODE, PREFILL, TRAINING
from kda_core.bench.training import Training
from kda_core.errors import ArgumentError

Row = dict[str, Any]
Measure = Callable[[str], Row]

#: Cases by call, "quick" or not: on a GPU, and on a CPU.
DEFAULT = {
    PREFILL: ("B1-T1024-H64", "B1-T2048-H12", "B1-T8192-H32", "B1-T8192-H64", "B1-T8192-H16-HV64", "varlen-mixed-H64"),
    TRAINING: ("B1-T8192-H32", "B1-T8192-H64", "varlen-mixed-H64"),
    DECODE: ("N1-HV32-T1", "N8-HV32-T1", "N64-HV32-T1", "N256-HV32-T1", "N64-HV32-T4"),
}  # fmt: skip
QUICK = {PREFILL: ("B1-T8192-H64",), TRAINING: ("B1-T8192-H32",), DECODE: ("N64-HV32-T1",)}
ON_CPU = {PREFILL: (cases.SMALL.name,), TRAINING: (cases.SMALL.name,), DECODE: ("N2-HV2-T1", "N2-HV2-T4")}
#: Gate families by call.
GATES = {PREFILL: ("slow-unbounded", "slow"), TRAINING: ("slow",)}
#: Most tokens of a prefill, and of the short call of training, whose errors are measured: the oracle takes them one by one.
ERROR_TOKENS = {PREFILL: 1 << 15, TRAINING: 1024}


@dataclass(frozen=True)
class Group:
    """The rows of one call and case on the same inputs.

    Attributes:
        call, case: which, by name.
        variant: the gate family, or the dtype of the states.
        impls: the implementations.
        start: prepares the inputs, and returns the function that measures an implementation.
    """

    call: str
    case: str
    variant: dict[str, str]
    impls: tuple[str, ...]
    start: Callable[[], Measure]


def run(args: argparse.Namespace) -> int:
    """Measures what the options select and prints the report. Returns 1 if a backend failed or is wrong, 130 if interrupted."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        groups = select(args, device)
        pictures = _check_paths(args, groups)
    except ArgumentError as error:
        return args.usage_error(str(error))  # exits
    facts = environment.describe(device) | {"command": command_line(args)}
    rows: list[Row] = []
    interrupted = False
    total = sum(len(group.impls) for group in groups)
    try:
        for group in groups:
            with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no part of the report
                for row in measured(group):
                    rows.append(row)
                    print(f"[{len(rows)}/{total}] {report.line(row)}", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: the report has the rows measured so far", file=sys.stderr)
    print(report.page(facts, rows), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"environment": facts, "rows": _finite(rows)}, indent=1) + "\n")
    for call, path in pictures.items():
        if (picture := report.picture(call, facts, rows)) is not None:
            plots.draw(picture, path)
    if interrupted:
        return 130
    own = [row for row in rows if not peers.is_peer(row["impl"])]
    return int(any("failed" in row or report.is_wrong(row) for row in own))


def measured(group: Group) -> Iterator[Row]:
    """Yields the rows of a group. An implementation that fails has a row that says why."""
    measure: Measure | None = None
    for impl in group.impls:
        row: Row = {"call": group.call, "case": group.case, "impl": impl} | group.variant
        try:
            if (reason := unavailable(impl, group.call)) is not None:
                raise _Refused(reason)
            if measure is None:
                torch.cuda.empty_cache()  # of the last group; does nothing without a GPU
                measure = group.start()
            row |= measure(impl)
        except _Refused as refused:
            row["failed"] = str(refused)
        except Exception as error:  # noqa: BLE001 - the other rows are still measured
            row["failed"] = f"{type(error).__name__}: {error}"
        yield row


class _Refused(Exception):
    """An implementation does not serve a call. The message is the reason."""


def unavailable(impl: str, call: str) -> str | None:
    """Returns why an implementation cannot make a call on this machine; None if it can."""
    if not peers.is_peer(impl):
        return implementations.unavailable(impl)
    return peers.unavailable(impl, call, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


# ---- selection


def select(args: argparse.Namespace, device: torch.device) -> list[Group]:
    """Returns the groups that the options select.

    Raises:
        ArgumentError: a case or backend is unknown, or a peer or the cases belong to no selected call.
    """
    known = [info.name for info in kda_core.backends()]
    if unknown := [name for name in args.backend or () if name not in known]:
        raise ArgumentError("--backend", f"some of {', '.join(known)}", ", ".join(unknown))
    calls = args.call or CALLS
    for name in args.peers or ():
        if name != "none" and not {*calls} & {*peers.PEERS[name].serves}:
            has = ", ".join(peers.PEERS[name].serves)
            raise ArgumentError("--peers", f"peers of --call {' '.join(calls)}", f"{name}, which has {has}")
    chosen = {call: _cases(args, call, device) for call in calls}
    for name in args.case or ():
        if not any(name in of_call for of_call in chosen.values()):
            forms = "a name of kda_core.bench.cases, B1-T8192-H16-HV64 or N64-HV32-T1"
            raise ArgumentError("--case", f"{forms}, of --call {' '.join(calls)}", name)
    makers: dict[str, Callable[..., Iterator[Group]]] = {
        PREFILL: _prefill,
        TRAINING: _training,
        DECODE: _decode,
    }
    return [group for call in calls for group in makers[call](args, [*chosen[call].values()], device)]


def _cases(args: argparse.Namespace, call: str, device: torch.device) -> dict[str, Any]:
    """Returns the selected cases of a call by name."""
    if args.case:
        names = args.case
    elif device.type == "cpu":
        names = ON_CPU[call][:1] if args.quick else ON_CPU[call]
    else:
        names = (QUICK if args.quick else DEFAULT)[call]
    tables: dict[str, Case] = {}
    if call != DECODE:
        tables = {c.name: c for c in (cases.training() if call == TRAINING else cases.prefill())}
    parse: Callable[[str], Any] = decode.parse if call == DECODE else cases.parse
    found = {name: tables.get(name) or parse(name) for name in names}
    return {name: case for name, case in found.items() if case is not None}


def _impls(args: argparse.Namespace, call: str, device: torch.device) -> list[str]:
    """Returns the implementations of a call: backends first."""
    usual = implementations.default(device, call)
    own = [n if n == "reference" else f"kda-{n}" for n in args.backend or ()] or [
        n for n in usual if not peers.is_peer(n)
    ]
    if args.peers is None:
        return own + [n for n in usual if peers.is_peer(n)]
    return own + [n for n in peers.names(call) if n.removesuffix(peers.PREPARED) in args.peers]


def _gates(args: argparse.Namespace, call: str) -> tuple[str, ...]:
    return tuple(args.gates or (GATES[call][:1] if args.quick else GATES[call]))


def _prefill(args: argparse.Namespace, chosen: list[Case], device: torch.device) -> Iterator[Group]:
    impls = tuple(_impls(args, PREFILL, device))

    def start(case: Case, gates: str) -> Measure:
        x = prefill.draw(case, gates)
        problem = prefill.Prefill(case, gates, x, device, ERROR_TOKENS[PREFILL], lengths_on_host=True)

        def measure(impl: str) -> Row:
            _check_serves(impl, PREFILL, case)
            name = impl if peers.is_peer(impl) else impl + CP  # a planner may split it, as for users
            row, _ = problem.measure(impl, implementations.named(name), args.repeats)
            on_device = row["median_ms"] is not None
            timing = row.get("timing", "graph" if on_device else "eager")
            return row | {"ms": row["median_ms"] if on_device else row["eager_ms"], "timing": timing}

        return measure

    for case in chosen:
        for gates in _gates(args, PREFILL):
            yield Group(PREFILL, case.name, {"gates": gates}, impls, partial(start, case, gates))


def _training(args: argparse.Namespace, chosen: list[Case], device: torch.device) -> Iterator[Group]:
    impls = tuple(_impls(args, TRAINING, device))

    def start(case: Case, gates: str) -> Measure:
        problem = Training(case, gates, device, ERROR_TOKENS[TRAINING])

        def measure(impl: str) -> Row:
            _check_serves(impl, TRAINING, case)
            row = problem.measure(impl, False, args.repeats)
            return row | {"ms": row["step_ms"]}

        return measure

    for case in chosen:
        for gates in _gates(args, TRAINING):
            yield Group(TRAINING, case.name, {"gates": gates}, impls, partial(start, case, gates))


def _decode(args: argparse.Namespace, chosen: list[decode.Case], device: torch.device) -> Iterator[Group]:
    impls = _impls(args, DECODE, device)
    for impl in [] if args.quick else [*impls]:
        if not peers.is_peer(impl) and decode.has_journal(implementations.backend_name(impl)):
            impls.insert(impls.index(impl) + 1, impl + decode.JOURNAL)
            impls.insert(impls.index(impl) + 1, impl + decode.VERIFY)

    def start(case: decode.Case, dtype: str) -> Measure:
        pool_bytes = decode.POOL_BYTES[device.type]

        def measure(impl: str) -> Row:
            slots = decode.slots_of(impl, case.T)
            problem = decode.make_problem(case.N, case.HV, case.T, slots, dtype, device, pool_bytes)
            found = decode.times([decode.launch(impl, problem)], device, args.repeats)
            return {"N": case.N, "HV": case.HV, "T": case.T} | found | {"ms": found["us"] / 1e3}

        return measure

    for case in chosen:
        for dtype in decode.STATE_DTYPES:
            served = tuple(impl for impl in impls if decode.serves(impl, case.T, dtype))
            yield Group(DECODE, case.name, {"state_dtype": dtype}, served, partial(start, case, dtype))


def _check_serves(impl: str, call: str, case: Case) -> None:
    if not implementations.serves(impl, call, case):
        raise _Refused("has no use_graph" if case.use_graph else "has no grouped value heads")


# ---- output


def command_line(args: argparse.Namespace) -> str:
    """Returns the command that measures the same rows again."""
    words = ["python", "-m", "kda_core", "bench", *(["--quick"] if args.quick else [])]
    for name in ("call", "case", "gates", "backend", "peers"):
        if values := getattr(args, name):
            words += [f"--{name}", *values]
    return shlex.join([*words, "--repeats", str(args.repeats)])


def _check_paths(args: argparse.Namespace, groups: list[Group]) -> dict[str, Path]:
    """Returns the file of the picture of each call: with several calls, the call's name is added to ``--plot``.

    Raises:
        ArgumentError: a file cannot be written, or a picture cannot be drawn.
    """
    for name in ("json", "plot"):
        path: Path | None = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            raise ArgumentError(f"--{name}", "a file in a folder that exists", str(path))
    if args.plot is None:
        return {}
    if args.plot.suffix not in plots.SUFFIXES:
        raise ArgumentError("--plot", f"a file that ends in {' or '.join(plots.SUFFIXES)}", str(args.plot))
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot", "matplotlib (pip install matplotlib)", "no such package")
    calls = list(dict.fromkeys(group.call for group in groups))
    for call in calls:
        of_call = [group for group in groups if group.call == call]
        series = {impl for group in of_call for impl in group.impls}
        if len(of_call) > plots.MOST_ROWS or len(series) > len(plots.COLORS):
            most = f"at most {plots.MOST_ROWS} cases and {len(plots.COLORS)} implementations of a call"
            raise ArgumentError("--plot", most, f"{len(of_call)} and {len(series)} of {call}")
    if len(calls) == 1:
        return {calls[0]: args.plot}
    return {call: args.plot.with_stem(f"{args.plot.stem}-{call}") for call in calls}


def _finite(x: Any) -> Any:
    """Returns data that JSON can hold: figures that are not finite become text."""
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    return [_finite(value) for value in x] if isinstance(x, (list, tuple)) else x
