"""The pages of context parallelism: within one GPU (``cp.json``) and over several (``cp_multi_gpu.json``)."""

from __future__ import annotations

from typing import Any

from benchmarks.pages import (
    ERROR_RATIO,
    ERRORS,
    GENERATED,
    PEER,
    Data,
    Row,
    geometric_mean,
    named,
    peer_name,
    run_number,
    runs,
    version,
)
from kda_core.bench import cases
from kda_core.bench.cases import CP, PLANNED
from kda_core.bench.markdown import number, table
from kda_core.bench.plots import Picture

TABLES = {
    "cp": "The shapes of published benchmarks of context parallelism within one GPU; 4 and 8 heads.",
    "cp-h16": "Shapes with 16 heads.",
    "cp-1m": "One sequence of 1,048,576 tokens.",
}
Rows = dict[tuple[str, str, str], Row]


# ---- comparisons


def by_call(data: Data) -> Rows:
    """Returns the rows by case, gate family and implementation."""
    return {(r["case"], r["gates"], r["impl"]): r for r in data["rows"]}


def serial_row(r: Row, rows: Rows) -> Row | None:
    """Returns the row of the direct call, without context parallelism."""
    return rows.get((r["case"], r["gates"], r["impl"].partition("+")[0]))


def is_wrong(r: Row, serial: Row | None) -> bool:
    """Returns whether an error of the row was measured and is above `ERROR_RATIO` times the serial call's."""
    if serial is None or r["error_o"] is None:
        return False
    return any(not r[e] <= ERROR_RATIO * serial[e] for e in ERRORS)


def speedup(r: Row, rows: Rows) -> float | None:
    """Returns the serial call's device time divided by this row's; None if the row is wrong or serial was not measured."""
    serial = serial_row(r, rows)
    if serial is None or serial["median_ms"] is None or is_wrong(r, serial):
        return None
    return serial["median_ms"] / r["median_ms"]


def planned(data: Data) -> list[Row]:
    """Returns the rows with context parallelism and a device time, in the order of the cases."""
    found = [r for r in data["rows"] if r["impl"].endswith(PLANNED) and r["median_ms"] is not None]
    return cases.ordered(found)


# ---- page of one GPU


def page(data: Data, device: str) -> str:
    """Returns the Markdown page of context parallelism within one GPU."""
    gpu, rows, found = data["runs"][-1]["device_name"], by_call(data), planned(data)
    planner = f"kda-cp {version(data, 'kda-cp')}"
    lines = [f"# Context parallelism on {gpu}", "", GENERATED, ""]
    lines += [
        f"How much faster is a call on one {gpu} if {planner} splits its sequences into segments that run concurrently?",
        "",
    ]
    lines += _summary([r for r in found if r["impl"].endswith(CP)], rows)
    for name, picture in pictures(data).items():
        lines += [
            "",
            f"## {picture.question}",
            "",
            f"![{picture.title}; {picture.subtitle}]({device}-{name}.svg)",
        ]
    lines += _equal_lengths(found)
    columns = {
        "impl": "`+cp`: the planner decides whether to split. `+certified`: its best plan of certified decay.",
        "segments": "Largest number of segments of a sequence. 1: the call was not split.",
        "serial": "Device time in ms of the direct call: median over replays of a CUDA graph, with the L2 flushed before each.",
        "split": "Device time in ms with context parallelism.",
        "predicted": "What the planner's cost model predicts for the column before it, in ms.",
        "speed-up": f"serial / split. \"wrong\": an error above {ERROR_RATIO} times the serial call's.",
        "uniform": "Best device time in ms of the plans that cut every sequence into the same number of segments (in brackets);"
        " 1 segment is the serial call.",
        "FLA": f"Device time in ms of {peer_name(data)}.",
        "error o, error state": "Largest relative Frobenius error over sequences and heads, against the fp64 token loop; empty for"
        " long cases.",
        "run": "Number of the run in the list below.",
    }  # fmt: skip
    lines += [
        "",
        "## How it was measured",
        "",
        *table(("column", "meaning"), columns.items(), ("column", "meaning")),
    ]
    lines += ["", "Runs:", "", *runs(data), "", "## Measurements"]
    names = ("case", "gates", "impl", "segments", "serial", "predicted", "split", "predicted", "speed-up", "uniform", "FLA",
             "error o", "error state", "run")  # fmt: skip
    for name in (t for t in TABLES if any(r["table"] == t for r in found)):
        cells = (_cells(r, rows, data) for r in found if r["table"] == name)
        lines += ["", f"### {name}", "", TABLES[name], "", *table(names, cells, ("case", "gates", "impl"))]
    return "\n".join(lines) + "\n"


def _summary(found: list[Row], rows: Rows) -> list[str]:
    """Returns the speed-up of split calls, the overhead of others, and the distance from the best uniform plan."""
    gains: dict[bool, list[float]] = {True: [], False: []}
    for r in found:
        if (gain := speedup(r, rows)) is not None:
            gains[r["pieces"] > 1].append(gain)
    forced = [r["median_ms"] / r["best_uniform_ms"] for r in found if r.get("best_uniform_ms")]
    lines = []
    if gains[True]:
        mean = f"**{geometric_mean(gains[True]):.2f}x** ({min(gains[True]):.2f} to {max(gains[True]):.2f})"
        lines.append(("speed-up of split calls over serial ones", str(len(gains[True])), mean))
    if gains[False]:
        worst = f"{1 / min(gains[False]):.3f} at most"
        lines.append(
            ("time of calls that were not split, divided by direct calls'", str(len(gains[False])), worst)
        )
    if forced:
        lines.append(
            ("time divided by the best uniform plan's", str(len(forced)), f"{max(forced):.3f} at most")
        )
    columns = ("quantity", "cases", "value: geometric mean (range), or worst")
    return table(columns, lines, (columns[0], columns[2]))


def _equal_lengths(found: list[Row]) -> list[str]:
    """Returns the section that compares plans with the best plan whose segments all have one length."""
    compared = [r for r in found if r.get("best_fixed_ms")]
    if not compared:
        return []
    cells = (
        [r["case"], f"{r['median_ms']:.3f}", f"{r['best_fixed_ms']:.3f}", str(r["best_fixed_tokens"])]
        for r in compared
    )
    columns = ("case", "planner ms", "best equal length ms", "tokens per segment")
    return [
        "", "## Are segments of one length for all sequences faster?", "",
        "Device time of the planner's choice, and of the best plan whose segments all have the same length:", "",
        *table(columns, cells, ("case",)),
    ]  # fmt: skip


def _cells(r: Row, rows: Rows, data: Data) -> list[str]:
    serial, peer, gain = serial_row(r, rows), rows.get((r["case"], r["gates"], PEER)), speedup(r, rows)
    device_ms = lambda row: number(None if row is None else row["median_ms"], ".3f")
    uniform = f"{r['best_uniform_ms']:.3f} ({r['best_uniform_pieces']})" if r.get("best_uniform_ms") else ""
    shown = "wrong" if is_wrong(r, serial) else "" if gain is None else f"{gain:.2f}x"
    return [
        r["case"], r["gates"], r["impl"], str(r["pieces"]), device_ms(serial),
        number(r["predicted_serial_ms"], ".3f"), number(r["median_ms"], ".3f"), number(r["predicted_ms"], ".3f"), shown,
        uniform, device_ms(peer), number(r["error_o"], ".2e"), number(r["error_state"], ".2e"),
        run_number(r, data),
    ]  # fmt: skip


def pictures(data: Data) -> dict[str, Picture]:
    """Returns the pictures of the page by the end of their file names: slow gates, the planner's choice."""
    rows, gpu = by_call(data), data["runs"][-1]["device_name"]
    found = [r for r in planned(data) if r["gates"] == "slow" and r["impl"].endswith(CP)]
    found = [r for r in found if speedup(r, rows) is not None]
    found.sort(key=lambda r: (0, r["B"], r["T"]) if not r["lengths"] else (1, 0, 0))
    if not found:
        return {}
    impl, peer = found[0]["impl"], peer_name(data)
    backend = named(impl.partition("+")[0], data)
    subtitle = "gate: bounded below by -5, slow decay; one row for each shape"
    order = tuple(dict.fromkeys(_key(r)[0] for r in found))
    pictures = {
        "cp": Picture(
            "How much faster is a call with context parallelism than without?",
            f"Context parallelism on {gpu}: {backend} with kda-cp {version(data, 'kda-cp')}", subtitle,
            f"speed-up (device time of {impl.partition('+')[0]} / {impl})",
            _by_heads({_key(r): speedup(r, rows) for r in found}), order=order, reference=1,
        ),
    }  # fmt: skip
    against = {_key(r): rows[r["case"], r["gates"], PEER]["median_ms"] / r["median_ms"]
               for r in found if (r["case"], r["gates"], PEER) in rows}  # fmt: skip
    if against:
        pictures["cp-fla"] = Picture(
            f"How fast is it compared with {peer}?",
            f"Context parallelism on {gpu}: compared with {peer}", subtitle,
            f"speed-up (device time of {peer} / {impl})", _by_heads(against), order=order, reference=1,
        )  # fmt: skip
    return pictures


def _key(r: Row) -> tuple[str, str]:
    """Returns the label of a row in a picture, without its heads, and the name of its series."""
    if not r["lengths"]:
        tokens = f"{r['T'] >> 20}M tokens" if r["T"] >= 1 << 20 else f"{r['T'] >> 10}K tokens"
        return tokens if r["B"] == 1 else f"{r['B']} x {tokens}", f"{r['H']} heads"
    lengths = r["case"].removeprefix("varlen-").rpartition("-")[0]
    return f"packed {lengths}", f"{r['H']} heads"


def _by_heads(values: dict[tuple[str, str], Any]) -> dict[str, dict[str, float]]:
    """Returns a series for each number of heads."""
    series: dict[str, dict[str, float]] = {}
    for (label, heads), value in values.items():
        series.setdefault(heads, {})[label] = value
    return series


# ---- page of several GPUs


def multi_gpu_page(data: Data, device: str) -> str:
    """Returns the Markdown page of one sequence over several GPUs."""
    gpu = data["runs"][-1]["device_name"]
    lines = [f"# Context parallelism over several GPUs, {gpu}", "", GENERATED, ""]
    lines += [f"How much faster is one long sequence on several GPUs than with the best plan on one {gpu}?"]
    for name, picture in multi_gpu_pictures(data).items():
        lines += ["", f"![{picture.title}; {picture.subtitle}]({device}-{name}.svg)"]
    columns = {
        "device ms": "Device time of the slowest rank, from the moment when all devices reach the call, with the L2 flushed: median.",
        "eager ms": "Time from a common start of the hosts to the end of the last rank, with the hosts' work: median.",
        "one GPU": "The same on one GPU with its best plan: serial, the planner's choice, or a uniform plan.",
        "speed-up": "one GPU / several GPUs.",
        "difference": "Relative Frobenius norm of the difference of o from one GPU's, the largest over ranks.",
        "run": "Number of the run in the list below.",
    }  # fmt: skip
    lines += [
        "",
        "## How it was measured",
        "",
        *table(("column", "meaning"), columns.items(), ("column", "meaning")),
    ]
    lines += ["", "Runs:", "", *runs(data), "", "## Measurements", ""]
    names = ("B, T, H", "gates", "GPUs", "fragments", "device ms", "one GPU", "speed-up", "eager ms", "one GPU", "speed-up",
             "plan of one GPU", "difference", "run")  # fmt: skip
    cells = (
        [f"1, {r['T']}, {r['H']}", r["gates"], str(r["ranks"]), r["fragments"], *_sped(r["median_ms"], r["single_ms"]),
         *_sped(r["eager_ms"], r["single_eager_ms"]), r["single_plan"], f"{r['difference']:.1e}", run_number(r, data)]
        for r in sorted(data["rows"], key=_multi_gpu_order)
    )  # fmt: skip
    lines += table(names, cells, ("B, T, H", "gates", "fragments", "plan of one GPU"))
    return "\n".join(lines) + "\n"


def multi_gpu_pictures(data: Data) -> dict[str, Picture]:
    """Returns the picture of the page by the end of its file name."""
    timed = sorted((r for r in data["rows"] if r["median_ms"] is not None), key=_multi_gpu_order)
    if not timed:
        return {}
    first = timed[0]
    same = [r for r in timed if (r["T"], r["H"], r["gates"]) == (first["T"], first["H"], first["gates"])]
    values = {f"{r['ranks']} GPUs, {r['fragments']}": r["single_ms"] / r["median_ms"] for r in same}
    texts = {f"{r['ranks']} GPUs, {r['fragments']}": f"{r['single_ms'] / r['median_ms']:.2f}x, {r['median_ms']:.3f} ms"
             for r in same}  # fmt: skip
    return {"cp-multi-gpu": Picture(
        "How much faster is one long sequence on several GPUs?",
        f"Context parallelism over several GPUs, {data['runs'][-1]['device_name']}",
        f"one sequence of {first['T']:,} tokens, {first['H']} heads, {first['gates']} gates; kda-cp {version(data, 'kda-cp')}",
        "speed-up (device time of the best plan on one GPU / several GPUs); labels: speed-up, device time", {"speed-up": values}, texts=texts, reference=1,
    )}  # fmt: skip


def _multi_gpu_order(r: Row) -> tuple[Any, ...]:
    return r["T"], r["H"], r["gates"], r["ranks"], r["fragments"]


def _sped(ms: float | None, single: float | None) -> tuple[str, str, str]:
    if ms is None or single is None:
        return "", "", ""
    return f"{ms:.3f}", f"{single:.3f}", f"{single / ms:.2f}x"
