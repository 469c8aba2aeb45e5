"""The page of training: speed-ups and memory by shape, then every measured row with the errors of its gradients."""

from __future__ import annotations

from benchmarks.pages import (
    ERROR_RATIO,
    GENERATED,
    PEER,
    Data,
    Row,
    mean_gain,
    named,
    peer_name,
    run_number,
    runs,
)
from benchmarks.report_prefill import FAMILIES, label
from kda_core.bench import cases, peers
from kda_core.bench.markdown import number, table
from kda_core.bench.plots import Picture
from kda_core.bench.steps import ERRORS, MEDIANS

GIB = 2**30
MAIN = "slow"  # the gate family that every shape was measured with
#: The largest errors of correct rows, as multiples of FLA's. Gradients are compared in the median head, because the error of dg in one
#: head depends on chance: with slow gates, that of the specification was 0.69 to 1.54 times that of FLA's rounding points for 16
#: gradients of o, and 1.00 times on average. The specification has up to 1.45 for dbeta. The gradients of A_log and dt_bias must not be
#: worse than FLA's.
LIMITS = (
    dict.fromkeys(ERRORS, 1.1)
    | {"error_o": ERROR_RATIO, "error_state": ERROR_RATIO}
    | {"error_dbeta": 1.5, "error_dA_log": 1.0, "error_ddt_bias": 1.0}
)
SHORT = {"fla": "FLA", "cudnn": "cuDNN, inputs prepared"}


# ---- comparison with the peer


def peer_row(r: Row, rows: list[Row]) -> Row | None:
    """Returns FLA's row of the same call and mode. None if there is none, if `r` is FLA's, or if its inputs were prepared."""
    if r["impl"] == PEER or r["prepared"]:
        return None
    key = lambda x: (x["case"], x["gates"], x["disable_recompute"])
    return next((p for p in rows if p["impl"] == PEER and key(p) == key(r)), None)


def error_ratio(r: Row, peer: Row, error: str) -> float | None:
    """Returns a field with an error divided by the peer's; None if the call does not have it. 0 / 0 is 1."""
    mine, other = r[error], peer[error]
    if mine is None or other is None:
        return None
    if other == 0:
        return 1.0 if mine == 0 else float("inf")
    return mine / other


def judged_ratio(r: Row, peer: Row, error: str) -> float | None:
    """Returns the ratio that `LIMITS` holds for: `error_ratio` of the median head, where the row has one."""
    return error_ratio(r, peer, MEDIANS.get(error, error))


def is_wrong(r: Row, peer: Row) -> bool:
    """Returns whether an error is above its limit, see `LIMITS`."""
    ratios = ((e, judged_ratio(r, peer, e)) for e in ERRORS)
    return any(ratio is not None and not ratio <= LIMITS[e] for e, ratio in ratios)


def gain(r: Row, rows: list[Row], time: str) -> str:
    """Returns FLA's time divided by this row's as a cell; empty without a row of FLA, "wrong" if an error is above its limit."""
    peer = peer_row(r, rows)
    if peer is None:
        return ""
    return "wrong" if is_wrong(r, peer) else f"{peer[time] / r[time]:.2f}x"


def headline(data: Data) -> str:
    """Returns the mean speed-up of a step over FLA's, in the default mode with slow gates; an empty text without rows of FLA."""
    rows = [r for r in data["rows"] if r["gates"] == MAIN and not r["disable_recompute"]]
    pairs = [(r, p) for r in rows if (p := peer_row(r, rows)) is not None]
    gains = [None if is_wrong(r, p) else p["step_ms"] / r["step_ms"] for r, p in pairs]
    return mean_gain(gains) if gains else ""


# ---- page


def page(data: Data, device: str) -> str:
    """Returns the Markdown page of a results file."""
    gpu = data["runs"][-1]["device_name"]
    own = " and ".join(
        dict.fromkeys(named(r["impl"], data) for r in data["rows"] if not peers.is_peer(r["impl"]))
    )
    lines = [f"# Training on {gpu}", "", GENERATED, ""]
    lines += [
        f"How long does a training step take with {own} on one {gpu}, how much memory, and how exact are its gradients?"
    ]
    lines += ["", "## Speed-up over FLA", "", *summary(data)]
    for name, picture in pictures(data).items():
        alternative = f"{picture.title}; {picture.subtitle}"
        lines += ["", f"### {picture.question}", "", f"![{alternative}]({device}-{name}.svg)"]
    lines += ["", "## How it was measured", "", *_method(data), "", "## Times and memory", "", *_times(data)]
    return "\n".join([*lines, "", "## Errors", "", *_errors(data)]) + "\n"


def summary(data: Data) -> list[str]:
    """Returns the table of times with slow gates in both modes, beside FLA's, and that of errors divided by FLA's."""
    rows = _ordered(data)
    compared = [(r, p) for r in rows if (p := peer_row(r, rows)) is not None]
    main = [(r, p) for r, p in compared if r["gates"] == MAIN]
    if not main:
        return [f"The results have no row of FLA with {MAIN} gates to compare with."]
    columns = ("shape", "impl", "disable_recompute", "backward ms", "FLA", "speed-up", "forward + backward ms", "FLA",
               "speed-up", "peak GiB", "FLA")  # fmt: skip
    mean = [
        f"Forward and backward in the default mode: {found}, the geometric mean of the speed-ups. Brackets: lowest and highest",
        "speed-up; number of shapes.",
        "",
    ] if (found := headline(data)) else []  # fmt: skip
    lines = []
    for r, p in main:
        lines.append([
            label(r), r["impl"], _mode(r), f"{r['backward_ms']:.3f}", f"{p['backward_ms']:.3f}", gain(r, rows, "backward_ms"),
            f"{r['step_ms']:.3f}", f"{p['step_ms']:.3f}", gain(r, rows, "step_ms"), _gib(r["peak_bytes"]), _gib(p["peak_bytes"]),
        ])  # fmt: skip
    return [
        *table(columns, lines, ("shape", "impl", "disable_recompute")),
        "",
        f"Slow gates ({FAMILIES[MAIN]}); gate, l2norm and sigmoid are inside. The peer is {peer_name(data)} in the same mode.",
        "",
        *mean,
        *_ratios(compared),
    ]


def _ratios(compared: list[tuple[Row, Row]]) -> list[str]:
    """Returns the table of the largest errors divided by FLA's, from pairs of a row and FLA's row."""
    lines = []
    for e in ERRORS:
        found = [(ratio, r) for r, p in compared if (ratio := judged_ratio(r, p, e)) is not None]
        if not found:
            continue
        ratio, r = max(found, key=lambda pair: pair[0])
        above = sum(not ratio <= LIMITS[e] for ratio, _ in found)
        worst = max(x for r, p in compared if (x := error_ratio(r, p, e)) is not None)
        lines.append([
            _shown(e), f"{ratio:.2f}", f"{LIMITS[e]:.1f}", f"{above} of {len(found)}", r["case"], r["gates"], _mode(r),
            f"{worst:.2f}",
        ])  # fmt: skip
    columns = (
        "error", "divided by FLA's, at most", "limit", "rows above it", "case", "gates", "disable_recompute", "in the worst head",
    )  # fmt: skip
    return [
        "Gradients are compared in the median head. The last column has the ratios of the worst heads, which depend on chance.",
        "",
        *table(columns, lines, ("error", "case", "gates", "disable_recompute")),
    ]


def _method(data: Data) -> list[str]:
    timings = {
        "graph": "replays of a CUDA graph, with the L2 flushed before each",
        "events": "CUDA events around an eager call, with the L2 flushed before each, because no graph can capture the call",
        "eager": "eager calls on the host",
    }
    used = dict.fromkeys(r["timing"] for r in data["rows"])
    columns = {
        "times": "Medians in ms of " + "; or ".join(f"{timings[name]} (`{name}`)" for name in used) + ".",
        "inference": "The forward without gradients.",
        "forward": "The forward in training mode, which saves what the backward needs. Brackets: divided by inference.",
        "backward": "The backward alone. The saved tensors of one forward stay alive.",
        "step": "Forward and backward together.",
        "vs FLA": 'FLA\'s step in the same mode divided by this one\'s. "wrong": an error above its limit.',
        "eager": "An eager step from its start to the end of its last kernel, with the host's work.",
        "peak": "Peak of allocated memory above the inputs in an eager step, in GiB.",
        "saved": "What lives between forward and backward besides inputs and outputs, in bytes for each token and value head.",
        "run": "Number of the run in the list below.",
    }  # fmt: skip
    calls = [
        "Calls have no final state, and an initial state only with `memory` gates. `safe_gate=True` promises that bounded gates are",
        "bounded; FLA needs it for its fast kernels. A backend of kda-core has the defaults of `chunk_kda`: a planner may split the call.",
    ]
    if any(r["prepared"] for r in data["rows"]):
        calls += [
            "",
            "The backward of cuDNN frontend on Hopper has no gate, no l2norm, no sigmoid, no grouped value heads and no",
            "`disable_recompute`. Its inputs are prepared: gate, l2norm and sigmoid are computed before the call, outside of its times,",
            "and its gradients are those of the prepared tensors. It is therefore not compared with FLA.",
        ]
    measured = {r["gates"] for r in data["rows"]}
    families = [(f"`{name}`", text) for name, text in FAMILIES.items() if name in measured]
    return [
        *table(("column", "meaning"), columns.items(), ("column", "meaning")), "",
        *table(("gates", "meaning"), families, ("gates", "meaning")), "",
        *calls, "", "Runs:", "", *runs(data),
    ]  # fmt: skip


def _times(data: Data) -> list[str]:
    """Returns every row with its times and its memory."""
    columns = ("case", "gates", "impl", "disable_recompute", "inference", "forward", "backward", "step", "vs FLA", "eager",
               "peak", "saved", "run")  # fmt: skip
    rows, lines = _ordered(data), []
    for r in rows:
        tokens = sum(r["lengths"]) or r["B"] * r["T"]
        saved = None if r["saved_bytes"] is None else r["saved_bytes"] / (tokens * r["HV"])
        lines.append([
            r["case"], r["gates"], r["impl"], _mode(r), f"{r['inference_ms']:.3f}",
            f"{r['forward_ms']:.3f} ({r['forward_ms'] / r['inference_ms']:.2f})", f"{r['backward_ms']:.3f}",
            f"{r['step_ms']:.3f}", gain(r, rows, "step_ms"), f"{r['eager_ms']:.3f}", _gib(r["peak_bytes"]), number(saved, ".0f"),
            run_number(r, data),
        ])  # fmt: skip
    return table(columns, lines, ("case", "gates", "impl", "disable_recompute"))


def _errors(data: Data) -> list[str]:
    """Returns every row with its errors."""
    columns = (
        "case",
        "gates",
        "impl",
        "disable_recompute",
        *map(_shown, ERRORS),
        "difference",
        "errors of",
        "run",
    )
    lines = [
        [r["case"], r["gates"], r["impl"], _mode(r), *(number(r[e], ".2e") for e in ERRORS),
         number(r["difference_fla"], ".2e"), r["error_case"], run_number(r, data)]
        for r in _ordered(data)
    ]  # fmt: skip
    return [
        "Relative Frobenius errors against autograd through the fp64 token loop. Column \"errors of\" names the call: the heads and gates",
        "of the case with B = 1, an initial state and a gradient of the final state, the same inputs for every impl. o and the state: the",
        "worst sequence and head. Gradients: the worst head; A_log: all heads together. An empty cell: the call has no such input.",
        "\"difference\": the largest difference of a gradient from FLA's on the case itself.", "",
        *table(columns, lines, ("case", "gates", "impl", "disable_recompute", "errors of")),
    ]  # fmt: skip


def _ordered(data: Data) -> list[Row]:
    """Returns the rows by case, gate family, and implementation: ours, FLA, others."""
    rows = cases.ordered(data["rows"])
    places = {case: i for i, case in enumerate(dict.fromkeys(r["case"] for r in rows))}
    families, last = list(FAMILIES), ["", *peers.PEERS]
    impl = lambda r: last.index(r["impl"]) if peers.is_peer(r["impl"]) else 0
    key = lambda r: (
        places[r["case"]],
        families.index(r["gates"]),
        impl(r),
        r["impl"],
        r["disable_recompute"],
    )
    return sorted(rows, key=key)


def _shown(error: str) -> str:
    return error.removeprefix("error_")


def _mode(r: Row) -> str:
    return "yes" if r["disable_recompute"] else "no"


def _gib(x: int | None) -> str:
    return number(None if x is None else x / GIB, ".2f")


# ---- pictures


def pictures(data: Data) -> dict[str, Picture]:
    """Returns the pictures of the page by the end of their file names: times and peak memory with slow gates."""
    rows = [r for r in _ordered(data) if r["gates"] == MAIN]
    own = [r["impl"] for r in rows if not peers.is_peer(r["impl"])]
    if not own:
        return {}
    gpu = data["runs"][-1]["device_name"]
    title = f"Training step on {gpu}: {named(own[0], data)}" + (
        f" and {peer_name(data)}" if any(r["impl"] == PEER for r in rows) else ""
    )

    def series(field: str, unit: float) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for r in rows:  # FLA with disable_recompute is in the tables
            if r[field] is None or (peers.is_peer(r["impl"]) and r["disable_recompute"]):
                continue
            impl: str = r["impl"]
            name = SHORT.get(impl, impl) + (", disable_recompute" if r["disable_recompute"] else "")
            found.setdefault(name, {})[label(r)] = r[field] / unit
        return found

    shapes = tuple(dict.fromkeys(label(r) for r in rows))
    found = {"training": Picture(
        "How long does a training step take?", title, "forward and backward; slow gates",
        "device time in ms (logarithmic)", series("step_ms", 1), order=shapes, log=True,
    )}  # fmt: skip
    if memory := series("peak_bytes", GIB):
        found["training-memory"] = Picture(
            "How much memory does a training step need?", title, "slow gates", "peak of allocated memory above the inputs in GiB",
            memory, order=shapes,
        )  # fmt: skip
    return found
