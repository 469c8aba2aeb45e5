"""The page of host times (``host.json``)."""

from __future__ import annotations

from benchmarks.pages import GENERATED, Data, Row, run_number, runs
from kda_core.bench.markdown import table
from kda_core.bench.plots import Picture

TEXT = """
How much host time does one call take? Kernels run asynchronously and are not included. Calls are of `kda_core.chunk_kda`. Those named
"decode" are of `kda_core.fused_recurrent_kda`, those named "journal" and "verify" of `kda_core.serving.journal_decode_kda` and
`verify_kda`: one token of 8 sequences over a pool. A bound call is one of `kda_core.serving.bind`. With "out" it gets the tensor for o,
and with "workspace" its scratch memory was bound: such a call allocates nothing.
""".strip()
MODES = {"auto": "the planner is asked", "off": "the planner is not asked"}


def page(data: Data, device: str) -> str:
    """Returns the Markdown page of host times: a table for each shape."""
    gpu, rows = data["runs"][-1]["device_name"], data["rows"]
    lines = [f"# Host time of a call, {gpu}", "", GENERATED, ""]
    lines += [TEXT]
    for name, picture in pictures(data).items():
        lines += ["", f"![{picture.title}; {picture.subtitle}]({device}-{name}.svg)"]
    columns = {
        "case": "The arguments of the call. \"new shape\": the first call with a new length, which is in no cache.",
        "a backend": "Microseconds of an asynchronous call: median over rounds, in which the columns alternate.",
        "`nothing`": "A backend that launches no kernel: the time of kda-core alone.",
        "`auto`, `off`": "`context_parallel`. With `auto` kda-core asks the planner. Where `auto` takes several times as long, the"
        " planner has split the call: a backend that summarises segments then makes a few launches; over any other backend, kda-cp"
        " executes the split with torch operations.",
        "run": "Number of the run in the list below.",
    }  # fmt: skip
    lines += [
        "",
        "## How it was measured",
        "",
        *table(("column", "meaning"), columns.items(), ("column", "meaning")),
    ]
    lines += ["", "Runs:", "", *runs(data), "", "## Measurements", "", "All figures are in microseconds."]
    for T, H in dict.fromkeys((r["T"], r["H"]) for r in rows):
        found = [r for r in rows if (r["T"], r["H"]) == (T, H)]
        kinds = list(dict.fromkeys((r["backend"], r["context_parallel"]) for r in found))
        lines += ["", f"### T = {T}, H = {H}", ""]
        cells = (_cells(case, kinds, found, data) for case in dict.fromkeys(r["case"] for r in found))
        lines += table(("case", *map(" ".join, kinds), "run"), cells, ("case",))
    return "\n".join(lines) + "\n"


def _cells(case: str, kinds: list[tuple[str, str]], found: list[Row], data: Data) -> list[str]:
    own = {(r["backend"], r["context_parallel"]): r for r in found if r["case"] == case}
    times = [f"{own[k]['us']:.1f}" if k in own else "" for k in kinds]
    return [case, *times, ", ".join(dict.fromkeys(run_number(r, data) for r in own.values()))]


def pictures(data: Data) -> dict[str, Picture]:
    """Returns the picture of the page, of the smallest shape, by the end of its file name."""
    T, H = min((r["T"], r["H"]) for r in data["rows"])
    series: dict[str, dict[str, float]] = {}
    for r in (r for r in data["rows"] if (r["T"], r["H"]) == (T, H)):
        backend = "no kernel" if r["backend"] == "nothing" else r["backend"]
        name = f"{backend}, {MODES[r['context_parallel']]}"
        series.setdefault(name, {})[r["case"]] = r["us"]
    gpu = data["runs"][-1]["device_name"]
    core = data["runs"][-1]["versions"].get("kda-core", "")
    return {"host": Picture(
        "How long does the host take for a call?", f"Host time of chunk_kda, kda-core {core}, host of {gpu}",
        f"T = {T}, H = {H}; \"no kernel\" is kda-core alone", "microseconds of an asynchronous call (logarithmic)", series,
        log=True,
    )}  # fmt: skip
