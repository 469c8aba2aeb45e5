"""The report of ``python -m kda_core bench``: Markdown that an issue shows, and pictures."""

from __future__ import annotations

import math
from typing import Any

from kda_core.bench import peers
from kda_core.bench.markdown import number, table
from kda_core.bench.peers import DECODE, PREFILL, TRAINING
from kda_core.bench.plots import Picture
from kda_core.bench.steps import GRADIENT_ERRORS

Row = dict[str, Any]

#: An error of o or of the states above this makes a row "wrong", and so does a gradient that is not finite. bf16 has 4e-3.
WRONG = 2e-2
GIB = 2**30
LONGEST = 200  # characters of a note
TITLES = {PREFILL: "Prefill", TRAINING: "Training", DECODE: "Decode"}
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
TIMINGS = {
    "graph": "device time, replays of a CUDA graph, cold L2",
    "events": "CUDA events around an eager call, cold L2",
    "eager": "wall clock of an eager call",
}
TEXT = ("case", "gates", "states", "impl", "timing", "note")
LEGEND = {
    "timing": "; ".join(f"`{name}`: {text}" for name, text in TIMINGS.items()) + ". Times are medians.",
    "relative": "the time divided by that of the first correct implementation of the case.",
    "error": "largest relative Frobenius error over sequences and heads, against the fp64 token loop.",
    "dx": "largest error of a gradient in its worst head.",
    peers.PREPARED: "gate, l2norm and sigmoid are computed before the call and do not count.",
}


def errors(row: Row) -> dict[str, float]:
    """Returns the measured errors of a row by field."""
    names = ("error_o", "error_state", *GRADIENT_ERRORS.values())
    return {name: row[name] for name in names if row.get(name) is not None}


def is_wrong(row: Row) -> bool:
    """Returns whether an error is above its limit, see `WRONG`."""
    limits = {"error_o": WRONG, "error_state": WRONG}
    return any(not (math.isfinite(e) and e <= limits.get(name, math.inf)) for name, e in errors(row).items())


def worst_gradient(row: Row) -> float | None:
    """Returns the largest error of a gradient; None without gradients."""
    return max((e for name, e in errors(row).items() if name in GRADIENT_ERRORS.values()), default=None)


def variant(row: Row) -> str:
    """Returns what distinguishes the rows of a case: the gate family, or the dtype of the states."""
    return row["gates"] if "gates" in row else DTYPES[row["state_dtype"]]


def line(row: Row) -> str:
    """Returns a row as a line of text."""
    head = f"{row['call']} {row['case']} {variant(row)} {row['impl']}: "
    if "failed" in row:
        return head + _one_line(row["failed"])
    shown = ", ".join(
        f"{name.replace('_', ' ')} {e:.2e}" for name, e in errors(row).items() if name[6:] in ("o", "state")
    )
    return f"{head}{row['ms']:.4g} ms ({row['timing']}); {shown or 'errors not measured'}{' WRONG' if is_wrong(row) else ''}"


def page(facts: dict[str, Any], rows: list[Row]) -> str:
    """Returns the report: the environment, then a table for each call."""
    lines = [f"## KDA on {facts['device_name']}", "", *_head(facts)]
    for call, title in TITLES.items():
        if of_call := [row for row in rows if row["call"] == call]:
            lines += ["", f"### {title}", "", *_table(call, of_call)]
    shown = [name for name in LEGEND if name != "dx" or any(row["call"] == TRAINING for row in rows)]
    shown = [n for n in shown if n != peers.PREPARED or any(row["impl"].endswith(n) for row in rows)]
    return "\n".join([*lines, "", *(f"- {name}: {LEGEND[name]}" for name in shown)])


def _head(facts: dict[str, Any]) -> list[str]:
    driver = f", driver {facts['driver']}" if facts["driver"] else ""
    cuda = f", CUDA {facts['cuda']}" if facts["cuda"] else ""
    return table(
        ("environment", ""),
        [
            ("date", facts["date"]),
            ("device", f"{facts['device_name']} ({facts['arch']}){driver}"),
            ("torch", f"{facts['torch']}{cuda}, Python {facts['python']}"),
            ("packages", ", ".join(f"{name} {v}" for name, v in facts["versions"].items())),
            ("command", f"`{facts['command']}`"),
        ],
        ("environment", ""),
    )


def _table(call: str, rows: list[Row]) -> list[str]:
    times = {
        PREFILL: {"ms": "ms", "eager ms": "eager_ms"},
        TRAINING: {"inference ms": "inference_ms", "forward ms": "forward_ms", "backward ms": "backward_ms", "step ms": "step_ms"},
        DECODE: {"us": "us"},
    }[call]  # fmt: skip
    extra = ("peak GiB", "error dx") if call == TRAINING else ()
    columns = (
        "case", "states" if call == DECODE else "gates", "impl", *times, "relative", "timing", "error o", "error state", *extra, "note",
    )  # fmt: skip
    cells = []
    for row in rows:
        head = [row["case"], variant(row), row["impl"]]
        if "failed" in row:
            cells.append([*head, *[""] * (len(columns) - 4), _one_line(row["failed"])])
            continue
        form = ".1f" if call == DECODE else ".3f"
        values = [number(row[field], form) for field in times.values()]
        values += [number(relative(row, rows), ".2f"), row["timing"]]
        values += [number(row[name], ".1e") for name in ("error_o", "error_state")]
        if call == TRAINING:
            peak = row["peak_bytes"]
            values += [
                number(None if peak is None else peak / GIB, ".2f"),
                number(worst_gradient(row), ".1e"),
            ]
        cells.append([*head, *values, "**wrong**" if is_wrong(row) else ""])
    return table(columns, cells, TEXT)


def relative(row: Row, rows: list[Row]) -> float | None:
    """Returns the time of a row divided by that of the first correct row of the same case; None if the row is wrong."""
    same = (r for r in rows if (r["case"], variant(r)) == (row["case"], variant(row)))
    first = next((r for r in same if "failed" not in r and not is_wrong(r)), None)
    return None if first is None or is_wrong(row) else row["ms"] / first["ms"]


def picture(call: str, facts: dict[str, Any], rows: list[Row]) -> Picture | None:
    """Returns the picture of the times of a call; None without a correct row."""
    shown = [r for r in rows if r["call"] == call and "failed" not in r and not is_wrong(r)]
    if not shown:
        return None
    label = lambda r: f"{r['case']}, {variant(r)}"
    series: dict[str, dict[str, float]] = {}
    for row in shown:
        series.setdefault(row["impl"], {})[label(row)] = row["ms"]
    alone = len(series) == 1
    timings = dict.fromkeys(TIMINGS[row["timing"]] for row in shown)
    return Picture(
        f"How long does {call} take?",
        f"{TITLES[call]} on {facts['device_name']}",
        "; ".join(timings),
        ("time of a training step" if call == TRAINING else "time of a call") + " in ms" + ("" if alone else " (logarithmic)"),
        series,
        texts={label(r): f"{r['ms']:.4g}" for r in shown} if alone else {},
        order=tuple(dict.fromkeys(map(label, shown))),
        log=not alone,
    )  # fmt: skip


def _one_line(text: str) -> str:
    """Returns a text for a cell of a table: on one line, shortened."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= LONGEST else text[:LONGEST].rstrip("\\") + " ..."
