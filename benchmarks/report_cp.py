"""The pages of ``cp.json`` and ``cp_multi_gpu.json``; ``report.py`` writes them."""

from __future__ import annotations

import math
from typing import Any

import registry
from registry import CP, PLANNED

PEER = "fla"
ERROR_RATIO = 1.2  # of context parallelism to the serial call, either error


def page(data: dict[str, Any], device: str, plotted: str | None = None) -> str:
    """The page of context parallelism within one GPU: a row for each case and family of gates."""
    rows = {(r["case"], r["gates"], r["impl"]): r for r in data["rows"]}
    split = [r for r in data["rows"] if r["impl"].endswith(PLANNED) and r["median_ms"] is not None]
    split = registry.ordered(split)
    lines = [f"# Context parallelism on {data['runs'][-1]['device_name']}", ""]
    lines += ["Made by `benchmarks/report.py`; do not edit. Device time in ms, medians of CUDA-graph replays with the L2 flushed.",
              "*pieces* is the most that a sequence was cut into; 1 is a bypassed call. *uniform* is the best of plans that",
              "cut every sequence into the same number of pieces, 1 (serial) among them.", ""]  # fmt: skip
    lines += [run_line(run) for run in data["runs"]]
    lines += ["", *_summary([r for r in split if r["impl"].endswith(CP)], rows)]
    if plotted:
        lines += ["", f"![device time by case]({plotted})"]
    for table in dict.fromkeys(r["table"] for r in split):
        lines += ["", f"## {table}", ""]
        lines += [
            "| case | gates | impl | pieces | serial | predicted | cp | predicted | speed-up | uniform | fla | error o | error state |",
            "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [_row(r, rows) for r in split if r["table"] == table]
    return "\n".join(lines) + "\n"


def _summary(split: list[dict[str, Any]], rows: dict[Any, dict[str, Any]]) -> list[str]:
    """Geomean of engaged rows, worst overhead of bypassed ones, worst against brute force."""
    gains = {True: [], False: []}  # type: dict[bool, list[float]]
    for r in split:
        if (gain := _gain(r, rows)) is not None:
            gains[r["pieces"] > 1].append(gain)
    found = []
    if gains[True]:
        mean = math.exp(sum(map(math.log, gains[True])) / len(gains[True]))
        found.append(
            f"- {len(gains[True])} engaged rows: speed-up over serial {mean:.2f}x (geomean), at least {min(gains[True]):.2f}x"
        )
    if gains[False]:
        found.append(
            f"- {len(gains[False])} bypassed rows: at most {1 / min(gains[False]):.3f}x the time of a direct call"
        )
    forced = [r["median_ms"] / r["best_uniform_ms"] for r in split if r.get("best_uniform_ms")]
    if forced:
        found.append(
            f"- {len(forced)} rows with brute force: at most {max(forced):.3f}x the best uniform plan"
        )
    for r in split:
        if ms := r.get("best_fixed_ms"):
            found.append(
                f"- {r['case']}: {r['median_ms']:.3f}, with one piece length for all sequences at best {ms:.3f} "
                f"({r['best_fixed_tokens']} tokens)"
            )
    return found


def _row(r: dict[str, Any], rows: dict[Any, dict[str, Any]]) -> str:
    show = lambda x, f: "" if x is None else format(x, f)
    serial, gain = _serial(r, rows), _gain(r, rows)
    peer, wrong = _beside(r, rows, PEER), _is_wrong(r, serial)
    uniform = (
        "" if not r.get("best_uniform_ms") else f"{r['best_uniform_ms']:.3f} ({r['best_uniform_pieces']})"
    )
    cells = [
        r["case"], r["gates"], r["impl"], str(r["pieces"]), show(serial and serial["median_ms"], ".3f"),
        show(r["predicted_serial_ms"], ".3f"), show(r["median_ms"], ".3f"), show(r["predicted_ms"], ".3f"),
        "wrong" if wrong else "" if gain is None else f"{gain:.2f}x", uniform, show(peer and peer["median_ms"], ".3f"),
        show(r["error_o"], ".2e"), show(r["error_state"], ".2e"),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _beside(r: dict[str, Any], rows: dict[Any, dict[str, Any]], impl: str) -> dict[str, Any] | None:
    """The row of another implementation of the same call."""
    return rows.get((r["case"], r["gates"], impl))


def _serial(r: dict[str, Any], rows: dict[Any, dict[str, Any]]) -> dict[str, Any] | None:
    """The row of the direct call."""
    return _beside(r, rows, r["impl"].partition("+")[0])


def _gain(r: dict[str, Any], rows: dict[Any, dict[str, Any]]) -> float | None:
    """Serial time over this row's; None where the row is wrong, or serial was not measured."""
    serial = _serial(r, rows)
    if serial is None or serial["median_ms"] is None or _is_wrong(r, serial):
        return None
    return serial["median_ms"] / r["median_ms"]


def _is_wrong(r: dict[str, Any], serial: dict[str, Any] | None) -> bool:
    """Whether errors were measured, and are above `ERROR_RATIO` times those of the serial call."""
    if serial is None or r["error_o"] is None:
        return False
    return any(not r[e] <= ERROR_RATIO * serial[e] for e in ("error_o", "error_state"))


def multi_gpu_page(data: dict[str, Any], device: str, plotted: str | None = None) -> str:
    """The page of sequences over several GPUs."""
    lines = [f"# Context parallelism over several GPUs, {data['runs'][-1]['device_name']}", ""]
    lines += ["Made by `benchmarks/report.py`; do not edit. Medians of the slowest rank: *device*, from the moment that all devices come",
              "to the call, the L2 flushed; *eager*, from a common start of the hosts to the end of the last rank, the hosts' work included.",
              "*one GPU* is the best of serial, the planner's choice and uniform plans. *difference* is that of o to one GPU's, relative",
              "Frobenius norm, the largest over ranks.", ""]  # fmt: skip
    lines += [run_line(run) for run in data["runs"]]
    if plotted:
        lines += ["", f"![device time by GPUs]({plotted})"]
    names = ("B, T, H", "gates", "ranks", "table", "device ms", "one GPU", "speed-up", "eager ms", "one GPU", "speed-up",
             "plan of one GPU", "difference", "run")  # fmt: skip
    lines += ["", f"| {' | '.join(names)} |"]
    lines += ["| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | --- |"]
    for r in data["rows"]:
        times = [*_sped(r["median_ms"], r["single_ms"]), *_sped(r["eager_ms"], r["single_eager_ms"])]
        cells = [
            f"1, {r['T']}, {r['H']}", r["gates"], str(r["ranks"]), r["fragments"], *times, r["single_plan"],
            f"{r['difference']:.1e}", r["run"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def multi_gpu_bars(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows as bars of a plot, a case for each number of GPUs: the best of one GPU, and the tables'."""
    bars = []
    for r in sorted(data["rows"], key=lambda r: (r["T"], r["H"], r["ranks"])):
        common = {"case": f"T={r['T']} H={r['H']}, {r['ranks']} GPUs", "gates": r["gates"]}
        bars.append(common | {"impl": "one GPU", "median_ms": r["single_ms"]})
        bars.append(common | {"impl": r["fragments"], "median_ms": r["median_ms"]})
    return bars


def _sped(ms: float | None, single: float | None) -> tuple[str, str, str]:
    if ms is None or single is None:
        return "", "", ""
    return f"{ms:.3f}", f"{single:.3f}", f"{single / ms:.2f}x"


def run_line(run: dict[str, Any]) -> str:
    """What a page says of a run."""
    versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items())
    return f"- run {run['id']}: `{run['command']}`, torch {run['torch']}, {versions}"
