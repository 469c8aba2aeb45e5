"""Makes the Markdown page and the plot of a results file: ``python benchmarks/report.py results/h200/prefill.json``.

The page goes to ``docs/benchmarks/<device>.md``, the plot beside it; those of ``cp.json``, ``cp_multi_gpu.json`` and
``host.json`` (no plot) to ``<device>-cp.md``, ``-cp-multi-gpu.md`` and ``-host.md``. Plots need matplotlib; without it a plot
that is there is kept. A speed-up is printed only where both errors of the row are at most 1.2 times the peer's: no figure
stands over a wrong result. README.md shows the summary of the page of prefill, word for word.
"""

from __future__ import annotations

import argparse
import json
import math
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
#: What the families of gates are, in the order of a summary: those of the models first.
FAMILIES = {
    "slow-unbounded": "softplus, slow decay (Kimi Linear's gate)",
    "steep-unbounded": "softplus, steep decay",
    "slow": "bounded below by -5, slow decay",
    "steep": "bounded below by -5, steep decay",
    "memory": "computed before the call, hardly any decay",
}
MODEL, COMMON = "slow-unbounded", "public"  # the family that is plotted; the table that all families have
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
    path = args.out / f"{device}{SUFFIX[kind]}.svg"
    name = data["runs"][-1]["device_name"]
    plotted = None if kind == "host" else plot(bars(kind, data), path, name, labelled=kind == "prefill")
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
    lines += ["", f"## Speed-up over {PEER.upper()}", "", *summary(rows)]
    for table in dict.fromkeys(r["table"] for r in rows):
        lines += ["", f"## {table}", "", *([NOTES[table], ""] if table in NOTES else [])]
        lines += [
            "| case | gates | impl | device ms | x floor | vs FLA | eager ms | error o | error state | run |"
        ]
        lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
        for r in (r for r in rows if r["table"] == table):
            lines.append(_row(r, rows, device))
    return "\n".join(lines) + "\n"


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """A table of speed-ups over the peer by family of gates: over the shapes of the table that all families have, and over
    all shapes. Then by how much the errors of these rows differ from the peer's."""
    own = [r for r in rows if r["impl"] != PEER and _peer(r, rows) and r["median_ms"] is not None]
    families = [gates for gates in FAMILIES if any(r["gates"] == gates for r in own)]
    if not families:
        return [f"No row of {PEER.upper()} to compare with."]
    lines = ["| gates | impl | published shapes | all shapes |", "| --- | --- | --- | --- |"]
    for gates in families:
        for impl in dict.fromkeys(r["impl"] for r in own):
            of_family = [r for r in own if (r["gates"], r["impl"]) == (gates, impl)]
            common = [r for r in of_family if r["table"] == COMMON]
            cells = [_mean(common, rows), "" if common == of_family else _mean(of_family, rows)]
            lines.append(f"| {FAMILIES[gates]} | {' | '.join([impl, *cells])} |")
    ratios = [r[e] / _peer(r, rows)[e] for r in own for e in ("error_o", "error_state")]
    lines += ["", f"Geometric mean of {PEER.upper()}'s device time over ours; in brackets the lowest, the highest and the number of shapes.",
              "Published shapes are those of published benchmarks of KDA kernels; an empty cell has no others. Slow gates have the",
              "`dt_bias` with which the public layer begins, steep ones decay within a few tokens.",
              f"Over all these rows the errors are {min(ratios):.2f} to {max(ratios):.2f} times {PEER.upper()}'s."]  # fmt: skip
    return lines


def _mean(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """The geometric mean of the right rows' speed-ups, their range, and how many are wrong."""
    gains = [gain for r in found if (gain := _gain(r, rows)) is not None]
    if not gains:
        return f"wrong in all {len(found)}"
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    count = str(len(gains)) if len(gains) == len(found) else f"{len(gains)}, {len(found) - len(gains)} wrong"
    return f"**{mean:.2f}x** ({min(gains):.2f} to {max(gains):.2f}; {count})"


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
    if _peer(r, rows) is None or r["median_ms"] is None:
        return ""
    gain = _gain(r, rows)
    return "wrong" if gain is None else f"{gain:.2f}x"


def _peer(r: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    """The peer's row of the same call; None where there is none, and for the peer itself."""
    same = (p for p in rows if (p["case"], p["gates"], p["impl"]) == (r["case"], r["gates"], PEER))
    return None if r["impl"] == PEER else next(same, None)


def _gain(r: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """The peer's time over this row's; None where the row is wrong. The peer has a row."""
    peer = _peer(r, rows)
    if any(not r[e] <= ERROR_RATIO * peer[e] for e in ("error_o", "error_state")):
        return None
    return peer["median_ms"] / r["median_ms"]


def bars(kind: str, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that the plot of a results file shows: of prefill the published shapes with the models' gates, of context
    parallelism slow gates."""
    if kind == "cp_multi_gpu":
        return report_cp.multi_gpu_bars(data)
    timed = registry.ordered([r for r in data["rows"] if r["median_ms"] is not None])
    of_model = [r for r in timed if (r["table"], r["gates"]) == (COMMON, MODEL)]
    return of_model or [r for r in timed if r["gates"] == "slow"]


def plot(rows: list[dict[str, Any]], path: Path, device_name: str, labelled: bool) -> str | None:
    """Bars of device time by case and implementation, `labelled` with the speed-up over the peer; the file's name. Without
    matplotlib the file is left as it is; None if there is no file."""
    try:
        import matplotlib
    except ImportError:
        name, done = (path.name, "kept as it is") if path.exists() else (None, "not made")
        print(f"matplotlib is not installed: {path} is {done}", file=sys.stderr)
        return name
    if not rows:
        return None
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "kda"}
    )  # text as text, the same bytes each time

    cases, impls = (list(dict.fromkeys(r[k] for r in rows)) for k in ("case", "impl"))
    figure, axes = pyplot.subplots(figsize=(10, 0.22 * len(cases) * len(impls) + 1.5))
    height = 0.8 / len(impls)
    for i, impl in enumerate(impls):
        found = [r for r in rows if r["impl"] == impl]
        places = [cases.index(r["case"]) + i * height for r in found]
        drawn = axes.barh(places, [r["median_ms"] for r in found], height, label=impl)
        if labelled:
            axes.bar_label(drawn, [_speedup(r, rows) for r in found], padding=3)
    axes.set_yticks([n + 0.4 - height / 2 for n in range(len(cases))], cases)
    axes.invert_yaxis()
    (gates,) = dict.fromkeys(r["gates"] for r in rows)
    axes.set_title(f"{device_name}, gates: {FAMILIES.get(gates, gates)}")
    axes.set_xlabel("device time in ms" + labelled * f"; beside a bar the speed-up over {PEER.upper()}")
    if max(r["median_ms"] for r in rows) > 100 * min(r["median_ms"] for r in rows):
        axes.set_xscale("log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    return path.name


if __name__ == "__main__":
    sys.exit(main())
