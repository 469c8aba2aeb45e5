"""The page of prefill: speed-ups by gate family and shape, then every measured row."""

from __future__ import annotations

from benchmarks.pages import (
    ERROR_RATIO,
    ERRORS,
    GENERATED,
    PEER,
    Data,
    Row,
    geometric_mean,
    mean_gain,
    named,
    peer_name,
    run_number,
    runs,
)
from kda_core.bench import cases, peers
from kda_core.bench.markdown import number, table
from kda_core.bench.plots import Picture

#: Gate families by description, in the order of the pages: the gates of models first.
FAMILIES = {
    "slow-unbounded": "softplus, slow decay (Kimi Linear's gate)",
    "steep-unbounded": "softplus, steep decay",
    "slow": "bounded below by -5, slow decay",
    "steep": "bounded below by -5, steep decay",
    "memory": "computed before the call, hardly any decay",
}
MODEL = "slow-unbounded"  # the gate family of the pictures by shape
COMMON = "public"  # the table that was measured with every family
TABLES = {
    "public": "The shapes of published benchmarks of KDA kernels.",
    "varlen": "Sequences of different lengths, packed along T.",
    "gva": "Sequences of one length. The heads of v (HV) are a multiple of the heads of q and k (H).",
    "padded": "Calls with `use_graph`: the sequences use a part of the T tokens, and the rest is padding. FLA has no `use_graph`.",
    "blackwell": "The shapes of published benchmarks of KDA kernels on Blackwell.",
}
BANDWIDTH = {"h200": 4.27e12}  # bytes/s of a device-to-device copy, reads plus writes


# ---- comparison with the peer


def peer_row(r: Row, rows: list[Row]) -> Row | None:
    """Returns the peer's row of the same call; None if there is none, or if `r` is the peer's."""
    same = (p for p in rows if (p["case"], p["gates"], p["impl"]) == (r["case"], r["gates"], PEER))
    return None if r["impl"] == PEER else next(same, None)


def speedup(r: Row, rows: list[Row]) -> float | None:
    """Returns the peer's device time divided by this row's; None if the row is wrong or the peer has no row. Errors that were not measured
    do not count."""
    peer = peer_row(r, rows)
    if peer is None or any(not ratio <= ERROR_RATIO for ratio in error_ratios(r, rows)):
        return None
    return peer["median_ms"] / r["median_ms"]


def error_ratios(r: Row, rows: list[Row]) -> list[float]:
    """Returns the errors of a row divided by those of the peer's row. Empty if the peer has no row or errors were not measured."""
    peer = peer_row(r, rows)
    if peer is None:
        return []
    return [r[e] / peer[e] for e in ERRORS if r[e] is not None and peer[e] is not None]


def compared(rows: list[Row]) -> list[Row]:
    """Returns the rows of backends with a device time and a row of the peer. Rows of other peers are in the measurements only."""
    own = (r for r in rows if not peers.is_peer(r["impl"]))
    return [r for r in own if r["median_ms"] is not None and peer_row(r, rows) is not None]


def floor_ms(row: Row, device: str) -> float | None:
    """Returns the milliseconds that a device copy needs to read q, k, v, g (bf16) and beta, and to write o, once."""
    if device not in BANDWIDTH:
        return None
    tokens, D = sum(row["lengths"]) or row["B"] * row["T"], 128
    values = tokens * (2 * row["H"] * D + 3 * row["HV"] * D + row["HV"])
    return 2 * values / BANDWIDTH[device] * 1e3


# ---- page


def page(data: Data, device: str) -> str:
    """Returns the Markdown page of a results file."""
    gpu, rows = data["runs"][-1]["device_name"], data["rows"]
    shown = pictures(data)
    with_peer = bool(compared(rows))
    own = " and ".join(dict.fromkeys(named(r["impl"], data) for r in rows if not peers.is_peer(r["impl"])))
    lines = [f"# Prefill on {gpu}", "", GENERATED, ""]
    question = f"How fast and how accurate is prefill with {own} on one {gpu}"
    lines += [f"{question}, compared with {peer_name(data)}?" if with_peer else f"{question}?", ""]
    lines += ["## Speed-up over FLA" if with_peer else "## Times", "", *summary(data)]
    for name, picture in shown.items():
        lines += [
            "",
            f"### {picture.question}",
            "",
            f"![{picture.title}; {picture.subtitle}]({device}-{name}.svg)",
        ]
    lines += ["", "## How it was measured", "", *_method(data, device), "", "## Measurements"]
    for name in (t for t in TABLES if any(r["table"] == t for r in rows)):
        lines += ["", f"### {name}", "", TABLES[name], "", *_measurements(data, name, device)]
    return "\n".join(lines) + "\n"


def summary(data: Data) -> list[str]:
    """Returns the table of speed-ups by gate family, unbounded gates first, and the explanation of its cells."""
    rows = data["rows"]
    own = compared(rows)
    families = [gates for gates in FAMILIES if any(r["gates"] == gates for r in own)]
    if not families:
        return ["The results have no row of FLA to compare with."]
    lines = []
    for gates in families:
        for impl in dict.fromkeys(r["impl"] for r in own):
            of_family = [r for r in own if (r["gates"], r["impl"]) == (gates, impl)]
            common = [r for r in of_family if r["table"] == COMMON]
            mean = lambda found: mean_gain([speedup(r, rows) for r in found])
            cells = [mean(common), "" if common == of_family else mean(of_family)]
            lines.append([FAMILIES[gates], impl, *cells])
    columns = ("gates", "impl", "published shapes", "all shapes")
    ratios = [error_ratios(r, rows) for r in own]
    about_errors = []
    if measured := [ratio for of_row in ratios for ratio in of_row]:
        about_errors.append(
            f"The errors of these rows are {min(measured):.2f} to {max(measured):.2f} times FLA's."
        )
    if [] in ratios:
        about_errors.append(f"{ratios.count([])} of {len(own)} rows were measured without errors.")
    return [
        *table(columns, lines, columns),
        "",
        f"- A figure is the geometric mean of {peer_name(data)}'s device time divided by the implementation's. Brackets: lowest and",
        "  highest speed-up; number of shapes.",
        f"- Published shapes are those of table `{COMMON}`. All shapes also include `gva` and `varlen`. An empty cell means that only",
        "  published shapes were measured.",
        "- Slow gates have the initial `dt_bias` of FLA's layer. Steep gates decay within a few tokens.",
        f"- {' '.join(about_errors)}",
    ]  # fmt: skip


def _method(data: Data, device: str) -> list[str]:
    columns = {
        "device ms": "Device time: median over replays of a CUDA graph, with the L2 flushed before each.",
        "x floor": "Device time divided by the time that a device copy needs to read q, k, v, g and beta and to write o once, at"
        f" {BANDWIDTH.get(device, 0) / 1e12:g} TB/s.",
        "vs FLA": f"FLA's device time divided by this row's. \"wrong\": an error above {ERROR_RATIO} times FLA's.",
        "eager ms": "An eager call from its start to the end of its last kernel, with the host's work.",
        "error o, error state": "Largest relative Frobenius error over sequences and heads, against the fp64 token loop.",
        "run": "Number of the run in the list below.",
    }  # fmt: skip
    columns = {name: meaning for name, meaning in columns.items() if name not in _empty_columns(data, device)}
    measured = {r["gates"] for r in data["rows"]}
    families = [(f"`{name}`", text) for name, text in FAMILIES.items() if name in measured]
    return [
        *table(("column", "meaning"), columns.items(), ("column", "meaning")), "",
        *table(("gates", "meaning"), families, ("gates", "meaning")), "",
        "Runs:", "", *runs(data),
    ]  # fmt: skip


def _empty_columns(data: Data, device: str) -> set[str]:
    """Returns the columns that the results cannot fill."""
    has_values = {"x floor": device in BANDWIDTH, "vs FLA": bool(compared(data["rows"]))}
    return {column for column, has in has_values.items() if not has}


def _measurements(data: Data, name: str, device: str) -> list[str]:
    """Returns the rows of one table, by case, gate family (unbounded first) and implementation (peers last)."""
    columns = (
        "case",
        "gates",
        "impl",
        "device ms",
        "x floor",
        "vs FLA",
        "eager ms",
        "error o",
        "error state",
        "run",
    )
    order = list(FAMILIES)
    found = cases.ordered([r for r in data["rows"] if r["table"] == name])
    places = {case: i for i, case in enumerate(dict.fromkeys(r["case"] for r in found))}
    found.sort(key=lambda r: (places[r["case"]], order.index(r["gates"]), peers.is_peer(r["impl"])))
    shown = [i for i, column in enumerate(columns) if column not in _empty_columns(data, device)]
    lines = ([cells[i] for i in shown] for cells in (_cells(r, data, device) for r in found))
    return table([columns[i] for i in shown], lines, ("case", "gates", "impl"))


def _cells(r: Row, data: Data, device: str) -> list[str]:
    floor, ms = floor_ms(r, device), r["median_ms"]
    ratio = None if floor is None or ms is None else ms / floor
    return [
        r["case"], r["gates"], r["impl"], number(ms, ".3f"), number(ratio, ".1f"), _gain(r, data["rows"]),
        number(r["eager_ms"], ".3f"), number(r["error_o"], ".2e"), number(r["error_state"], ".2e"), run_number(r, data),
    ]  # fmt: skip


def _gain(r: Row, rows: list[Row]) -> str:
    if r["median_ms"] is None or peer_row(r, rows) is None:
        return ""
    gain = speedup(r, rows)
    return "wrong" if gain is None else f"{gain:.2f}x"


# ---- pictures


def pictures(data: Data) -> dict[str, Picture]:
    """Returns the pictures of the page by the end of their file names. A picture without measured rows is left out."""
    rows = data["rows"]
    own = compared(rows)
    if not own:
        return _times(data)
    impl = own[0]["impl"]
    gains = [
        (r, gain)
        for r in cases.ordered([r for r in own if r["impl"] == impl])
        if (gain := speedup(r, rows)) is not None
    ]
    gpu, mine, peer = data["runs"][-1]["device_name"], named(impl, data), peer_name(data)
    title = f"Prefill on {gpu}: {mine} compared with {peer}"
    xlabel = f"speed-up (device time of {peer} / {impl})"
    found = {}
    if of_model := [(r, gain) for r, gain in gains if (r["table"], r["gates"]) == (COMMON, MODEL)]:
        mean = geometric_mean([gain for _, gain in of_model])
        found["speedup"] = Picture(
            "How much faster is each published shape with Kimi Linear's gate?",
            title,
            f"gate: {FAMILIES[MODEL]}; geometric mean {mean:.2f}x",
            f"{xlabel}; labels: speed-up, device time of {impl}",
            {impl: {label(r): gain for r, gain in of_model}},
            texts={label(r): f"{gain:.2f}x, {r['median_ms']:.3f} ms" for r, gain in of_model},
            reference=1,
        )
    families: dict[str, list[float]] = {}
    for gates, text in FAMILIES.items():
        if of_family := [gain for r, gain in gains if (r["table"], r["gates"]) == (COMMON, gates)]:
            families[text] = of_family
    if len(families) > 1:
        found["gates"] = Picture(
            "How does the speed-up depend on the gate?",
            title,
            "published shapes; bar: geometric mean, line: lowest to highest",
            xlabel,
            {impl: {text: geometric_mean(of_family) for text, of_family in families.items()}},
            texts={text: f"{geometric_mean(of_family):.2f}x" for text, of_family in families.items()},
            ranges={text: (min(of_family), max(of_family)) for text, of_family in families.items()},
            reference=1,
        )
    for name, question in (
        ("gva", "Does the speed-up hold with grouped value heads?"),
        ("varlen", "Does the speed-up hold with packed sequences?"),
    ):
        series: dict[str, dict[str, float]] = {}
        for gates, text in FAMILIES.items():
            if of_table := {label(r): gain for r, gain in gains if (r["table"], r["gates"]) == (name, gates)}:
                series[text] = of_table
        if series:
            found[name] = Picture(question, title, TABLES[name], xlabel, series, reference=1)
    return found


def _times(data: Data) -> dict[str, Picture]:
    """Returns the picture of results without a peer: device times of the published shapes."""
    of_model = [r for r in data["rows"] if (r["table"], r["gates"]) == (COMMON, MODEL)]
    times = {label(r): r["median_ms"] for r in cases.ordered(of_model) if r["median_ms"] is not None}
    if not times:
        return {}
    impl = of_model[0]["impl"]
    picture = Picture(
        "How long does each published shape take with Kimi Linear's gate?",
        f"Prefill on {data['runs'][-1]['device_name']}: {named(impl, data)}",
        f"gate: {FAMILIES[MODEL]}",
        "device time, ms",
        {impl: times},
        texts={row: f"{ms:.3f} ms" for row, ms in times.items()},
        log=True,
    )
    return {"times": picture}


def label(r: Row) -> str:
    """Returns a case as the label of a picture's row."""
    heads = f"H={r['H']}" + (f", HV={r['HV']}" if r["HV"] != r["H"] else "")
    if not r["lengths"]:
        return f"B={r['B']}, T={r['T']}, {heads}"
    return f"{len(r['lengths'])} {r['case'].split('-')[1]} sequences, T={r['T']}, {heads}"
