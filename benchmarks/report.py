"""Makes the Markdown page and the plot of a results file: ``python benchmarks/report.py results/h200/prefill.json``.

The page goes to ``docs/benchmarks/<device>.md``, the plot beside it (needs matplotlib); those of ``cp.json``,
``cp_multi_gpu.json`` and ``host.json`` (no plot) to ``<device>-cp.md``, ``-cp-multi-gpu.md`` and ``-host.md``. A speed-up is
printed only where both errors of the row are at most 1.2 times the peer's: no figure stands over a wrong result.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import registry
import report_cp

DOCS = Path(__file__).parent.parent / "docs" / "benchmarks"
PEER = "fla"
ERROR_RATIO = 1.2
SUFFIX = {
    "prefill": "",
    "cp": "-cp",
    "cp_multi_gpu": "-cp-multi-gpu",
    "host": "-host",
}  # of pages, by results file
NOTES = {
    "padded": "Calls with `use_graph`: room for T tokens, of which the sequences take what their lengths say."
}
BANDWIDTH = {"h200": 4.27e12}  # bytes/s that a device copy reaches, counting reads and writes


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("results", type=Path)
    p.add_argument("--out", type=Path, default=DOCS, help="folder of the page")
    args = p.parse_args(argv)
    data = json.loads(args.results.read_text())
    device = data["runs"][-1]["device"]
    args.out.mkdir(parents=True, exist_ok=True)
    kind = args.results.stem
    bars = report_cp.multi_gpu_bars(data) if kind == "cp_multi_gpu" else data["rows"]
    plotted = None if kind == "host" else plot(bars, args.out / f"{device}{SUFFIX[kind]}.svg")
    name, text = rendered(kind, data, device, plotted)
    (args.out / name).write_text(text)
    print(args.out / name)
    return 0


def rendered(kind: str, data: dict[str, Any], device: str, plotted: str | None) -> tuple[str, str]:
    """Name and text of the page of a results file; `kind` is the file's name without ".json", `plotted` the plot's."""
    name = f"{device}{SUFFIX[kind]}.md"
    pages = {
        "prefill": page, "cp": report_cp.page, "cp_multi_gpu": report_cp.multi_gpu_page, "host": host_page,
    }  # fmt: skip
    return name, pages[kind](data, device, plotted)


def floor_ms(row: dict[str, Any], device: str) -> float | None:
    """Milliseconds to read q, k, v, g (bf16), beta and write o once, at the device's copy bandwidth."""
    if device not in BANDWIDTH:
        return None
    tokens, D = sum(row["lengths"]) or row["B"] * row["T"], 128
    values = tokens * (2 * row["H"] * D + 3 * row["HV"] * D + row["HV"])
    return 2 * values / BANDWIDTH[device] * 1e3


def page(data: dict[str, Any], device: str, plotted: str | None) -> str:
    """The Markdown page."""
    lines = [f"# Prefill on {data['runs'][-1]['device_name']}", ""]
    lines += ["Made by `benchmarks/report.py`; do not edit. Times are medians of CUDA-graph replays with the L2 flushed,",
              "errors the largest relative Frobenius norm over sequences and heads against the fp64 token loop.", ""]  # fmt: skip
    lines += [report_cp.run_line(run) for run in data["runs"]]
    if plotted:
        lines += ["", f"![device time by case]({plotted})"]
    rows = data["rows"]
    for table in dict.fromkeys(r["table"] for r in rows):
        lines += ["", f"## {table}", "", *([NOTES[table], ""] if table in NOTES else [])]
        lines += [
            "| case | gates | impl | device ms | x floor | vs FLA | eager ms | error o | error state | run |"
        ]
        lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
        for r in (r for r in rows if r["table"] == table):
            lines.append(_row(r, rows, device))
    return "\n".join(lines) + "\n"


def host_page(data: dict[str, Any], device: str, plotted: str | None = None) -> str:
    """The page of host times: a table for each size of calls."""
    rows = data["rows"]
    lines = [f"# Host time of a call, {data['runs'][-1]['device_name']}", ""]
    lines += ["Made by `benchmarks/report.py`; do not edit. Microseconds of an asynchronous call, medians over rounds in which the columns",
              "take turns. *auto* asks the planner, *off* does not; the backend `nothing` launches nothing. Where *auto* takes several times",
              "as long the call is split: over a backend that summarises segments in a few launches, over others in torch.", ""]  # fmt: skip
    lines += [report_cp.run_line(run) for run in data["runs"]]
    for T, H in dict.fromkeys((r["T"], r["H"]) for r in rows):
        found = [r for r in rows if (r["T"], r["H"]) == (T, H)]
        kinds = list(dict.fromkeys((r["backend"], r["context_parallel"]) for r in found))
        lines += ["", f"## T = {T}, H = {H}", ""]
        lines += [f"| case | {' | '.join(map(' '.join, kinds))} | run |"]
        lines += [f"| --- | {'---: | ' * len(kinds)}--- |"]
        for case in dict.fromkeys(r["case"] for r in found):
            own = {(r["backend"], r["context_parallel"]): r for r in found if r["case"] == case}
            cells = [f"{own[k]['us']:.1f}" if k in own else "" for k in kinds]
            runs = ", ".join(dict.fromkeys(r["run"] for r in own.values()))
            lines += [f"| {' | '.join([case, *cells, runs])} |"]
    return "\n".join(lines) + "\n"


def _row(r: dict[str, Any], rows: list[dict[str, Any]], device: str) -> str:
    show = lambda x, f: "" if x is None else format(x, f)
    floor, ms = floor_ms(r, device), r["median_ms"]
    ratio = None if floor is None or ms is None else ms / floor
    cells = [
        r["case"], r["gates"], r["impl"], show(ms, ".3f"), show(ratio, ".1f"), _speedup(r, rows),
        show(r["eager_ms"], ".3f"), show(r["error_o"], ".2e"), show(r["error_state"], ".2e"), r["run"],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _speedup(r: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    peers = [p for p in rows if (p["case"], p["gates"], p["impl"]) == (r["case"], r["gates"], PEER)]
    if r["impl"] == PEER or not peers or r["median_ms"] is None:
        return ""
    peer = peers[0]
    if any(not r[e] <= ERROR_RATIO * peer[e] for e in ("error_o", "error_state")):
        return "wrong"
    return f"{peer['median_ms'] / r['median_ms']:.2f}x"


def plot(rows: list[dict[str, Any]], path: Path) -> str | None:
    """Bars of device time by case and implementation, slow gates; the file's name, or None without matplotlib."""
    rows = registry.ordered([r for r in rows if r["gates"] == "slow" and r["median_ms"] is not None])
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return None
    if not rows:
        return None
    matplotlib.use("svg")
    from matplotlib import pyplot

    cases, impls = (list(dict.fromkeys(r[k] for r in rows)) for k in ("case", "impl"))
    figure, axes = pyplot.subplots(figsize=(10, 0.3 * len(cases) * len(impls) + 1.5))
    height = 0.8 / len(impls)
    for i, impl in enumerate(impls):
        found = {r["case"]: r["median_ms"] for r in rows if r["impl"] == impl}
        places = [(n + i * height, found[c]) for n, c in enumerate(cases) if c in found]
        axes.barh([y for y, _ in places], [ms for _, ms in places], height, label=impl)
    axes.set_yticks([n + 0.4 - height / 2 for n in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set_xlabel("device time, ms (slow gates)")
    if max(r["median_ms"] for r in rows) > 100 * min(r["median_ms"] for r in rows):
        axes.set_xscale("log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    return path.name


if __name__ == "__main__":
    sys.exit(main())
