"""The page of serving calls (``decode.json``): decoding beside the floor of its memory, verification, and prefill beside decoding."""

from __future__ import annotations

from benchmarks.pages import GENERATED, PEER, Data, Row, mean_gain, named, peer_name, run_number, runs
from kda_core.bench import peers
from kda_core.bench.markdown import number, table
from kda_core.bench.plots import Picture

FLOOR = "rmw"
VERIFY, COMMIT, JOURNAL = "+verify", "+commit", "+journal"
PREFILL, PLAIN = "prefill", "prefill without a pool"
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
#: The largest error of o of a correct row, and of the states of decode by their dtype: twice the unit of the last rounding. A prefill
#: multiplies bf16 operands, so its fp32 states have the errors of bf16.
LIMITS = {"error_o": 2**-7, "float32": 1e-4, "bfloat16": 2**-7}


def is_wrong(r: Row) -> bool:
    """Returns whether an error of a row is above its limit. The floor must be exact."""
    state = LIMITS[r["state_dtype"] if r["call"] == "decode" else "bfloat16"]
    limits = (LIMITS["error_o"], 0.0 if r["impl"] == FLOOR else state)
    found = (r["error_o"], r["error_state"])
    return any(e is not None and not e <= limit for e, limit in zip(found, limits, strict=True))


def backend(r: Row) -> str:
    """Returns the implementation without its suffix."""
    name: str = r["impl"].partition("+")[0]
    return name


def decoding(data: Data) -> list[Row]:
    """Returns the rows of decode by tokens, shape, dtype and implementation, without those that `mixed` measured alone."""
    rows = [r for r in data["rows"] if r["call"] == "decode"]
    last = [FLOOR, *peers.PEERS]
    key = lambda r: (
        r["T"], r["N"] * r["HV"], r["N"], r["state_dtype"] != "float32", last.index(r["impl"]) + 1 if r["impl"] in last else 0,
        r["impl"],
    )  # fmt: skip
    return sorted(rows, key=key)


def of_impl(rows: list[Row], r: Row, impl: str, **other: object) -> Row | None:
    """Returns the row of another implementation on the same shape; `other` changes fields of the shape. None: there is no such row."""
    wanted = {n: r[n] for n in ("call", "N", "HV", "T", "state_dtype")} | {"impl": impl} | other
    return next((x for x in rows if all(x[n] == value for n, value in wanted.items())), None)


def ratio(r: Row, other: Row | None) -> str:
    """Returns this row's time divided by another's as a cell; empty without the other, "wrong" if an error is above its limit."""
    if other is None or r is other:
        return ""
    return "wrong" if is_wrong(r) or is_wrong(other) else f"{r['us'] / other['us']:.2f}"


def headline(data: Data) -> str:
    """Returns the mean speed-up of decoding over FLA: one token of each sequence, fp32 states. An empty text without rows of FLA."""
    rows = [r for r in decoding(data) if r["T"] == 1 and r["state_dtype"] == "float32"]
    own = (r for r in rows if r["impl"] == backend(r) != FLOOR and not peers.is_peer(r["impl"]))
    pairs = [(r, p) for r in own if (p := of_impl(rows, r, PEER)) is not None]
    gains = [None if is_wrong(r) or is_wrong(p) else p["us"] / r["us"] for r, p in pairs]
    return mean_gain(gains) if gains else ""


def page(data: Data, device: str) -> str:
    """Returns the Markdown page of a results file."""
    gpu = data["runs"][-1]["device_name"]
    own = " and ".join(
        dict.fromkeys(
            named(backend(r), data)
            for r in data["rows"]
            if r["impl"] != FLOOR and not peers.is_peer(r["impl"])
        )
    )
    lines = [f"# Serving on {gpu}", "", GENERATED, ""]
    lines += [
        f"How long do decoding, verification of drafts and prefill over a pool of states take with {own} on one {gpu}?"
    ]
    if found := headline(data):
        lines += [
            "",
            f"Decoding of one token with fp32 states: {found}, the geometric mean of {peer_name(data)}'s time divided by the backend's.",
            "Brackets: lowest and highest speed-up; number of shapes.",
        ]
    for name, picture in pictures(data).items():
        alternative = f"{picture.title}; {picture.subtitle}"
        lines += ["", f"## {picture.question}", "", f"![{alternative}]({device}-{name}.svg)"]
    lines += ["", "## How it was measured", "", *_method(data)]
    for title, part in (
        ("Decoding: one token of each sequence", [r for r in decoding(data) if r["T"] == 1]),
        ("Verification: several drafts of each sequence", [r for r in decoding(data) if r["T"] > 1]),
    ):
        if part:
            lines += ["", f"## {title}", "", *_decoding(part, data)]
    if loads := _loads(data):
        lines += ["", "## Prefill over a pool, and beside decoding", "", *_mixed(loads, data)]
    return "\n".join(lines) + "\n"


def _method(data: Data) -> list[str]:
    columns = {
        "us": "Microseconds of a call: the median over replays of a CUDA graph that holds several launches, divided by their number.",
        "/ rmw": "Divided by `rmw`, an in-place multiplication of the same states: the floor of a call that reads and writes them.",
        "/ FLA": f"Divided by {peer_name(data)}'s `fused_recurrent_kda_fwd` with `ssm_state_indices`, on the same slots.",
        "bf16 / fp32": "The time with bf16 states divided by that with fp32 states.",
        "error": "Largest relative Frobenius error over sequences and heads against the fp64 token loop, of a few sequences. \"wrong\": "
        f"above {LIMITS['error_o']:.1e} for o and bf16 states, above {LIMITS['float32']:.0e} for fp32 states of decode.",
        "run": "Number of the run in the list below.",
    }  # fmt: skip
    return [
        *table(("column", "meaning"), columns.items(), ("column", "meaning")),
        "",
        "K = V = 128, states are [V, K], and gates are slow; gate, l2norm and sigmoid are in the kernel. Every launch of a graph has other",
        "slots, in random order, of a pool of several times the L2. So the states come from memory, and no cache is flushed.",
        "",
        f"- `{JOURNAL}`: decoding with records of tokens. A sequence has 1 to 8 records, and one of 8 sequences is folded, as in a",
        "  batch of sequences in random phases. The one `journal_advance` of all layers is not included. With several tokens it verifies",
        "  drafts; a sequence whose records do not fit beside them is folded first: with 8 drafts each one, which commits the step before.",
        f"- `{VERIFY}`: drafts with records of tokens, which writes no state. Other rows with several tokens store the state after each",
        "  token in a slot of its own.",
        f"- `{COMMIT}`: the same, and a fold of all drafts into the states by a second launch.",
        "",
        "Runs:",
        "",
        *runs(data),
    ]


def _decoding(rows: list[Row], data: Data) -> list[str]:
    columns = (
        "N",
        "HV",
        "T",
        "states",
        "impl",
        "us",
        "/ rmw",
        "/ FLA",
        "bf16 / fp32",
        "error o",
        "error state",
        "run",
    )
    lines = []
    for r in rows:
        wide = of_impl(rows, r, r["impl"], state_dtype="float32")
        lines.append([
            str(r["N"]), str(r["HV"]), str(r["T"]), DTYPES[r["state_dtype"]], r["impl"], f"{r['us']:.1f}",
            ratio(r, of_impl(rows, r, FLOOR)), ratio(r, of_impl(rows, r, PEER)), ratio(r, wide),
            number(r["error_o"], ".2e"), number(r["error_state"], ".2e"), run_number(r, data),
        ])  # fmt: skip
    return table(columns, lines, ("states", "impl"))


def _loads(data: Data) -> list[Row]:
    """Returns the rows of prefill, mixed calls, and of decode beside them."""
    found = [r for r in data["rows"] if r["call"] != "decode"]
    mixed = [r for r in found if r["call"].startswith("mixed")]
    return [*found, *(x for r in mixed[:1] for x in data["rows"] if _is_part(x, r, data))]


def _is_part(r: Row, mixed: Row, data: Data) -> bool:
    """Returns whether a row is the decoding of a mixed call alone."""
    prompts = next(
        (x["N"] for x in data["rows"] if x["call"] == PREFILL and x["impl"] == mixed["impl"]), None
    )
    wanted = {"call": "decode", "T": 1, "state_dtype": "float32", "HV": mixed["HV"], "impl": mixed["impl"]}
    return (
        prompts is not None and r["N"] == mixed["N"] - prompts and all(r[n] == x for n, x in wanted.items())
    )


def _mixed(rows: list[Row], data: Data) -> list[str]:
    """Returns the table of prefill and mixed calls, with what running at once saves of the sum of the parts."""
    lines = []
    for r in sorted(rows, key=lambda r: (r["impl"], r["call"].startswith("mixed"))):
        same = [x for x in rows if x["impl"] == r["impl"]]
        time = lambda call, found=same: next((x["us"] for x in found if x["call"] == call), None)
        prefill, plain, decode = time(PREFILL), time(PLAIN), time("decode")
        text = ""
        if r["call"] == PREFILL and plain is not None:
            text = f"{r['us'] / plain:.3f} times the call without a pool"
        elif r["call"].startswith("mixed") and prefill is not None and decode is not None:
            text = f"saves {1 - r['us'] / (prefill + decode):.1%} of {prefill + decode:.1f} us, the sum of prefill and decode"
        lines.append([
            r["call"], str(r["N"]), str(r["HV"]), str(r["T"]), r["impl"], f"{r['us']:.1f}", "wrong" if is_wrong(r) else text,
            number(r["error_o"], ".2e"), number(r["error_state"], ".2e"), run_number(r, data),
        ])  # fmt: skip
    columns = ("call", "N", "HV", "T", "impl", "us", "comparison", "error o", "error state", "run")
    return [
        "Mixed calls run prefill and decoding at once, on two streams of one graph. They have N sequences in all, and T is the length of a",
        "prompt.",
        "",
        *table(columns, lines, ("call", "impl", "comparison")),
    ]


def pictures(data: Data) -> dict[str, Picture]:
    """Returns the picture of decoding by the end of its file name: times of one token divided by the floor's."""
    rows = [r for r in decoding(data) if r["T"] == 1 and r["state_dtype"] == "float32"]
    series: dict[str, dict[str, float]] = {}
    for r in rows:
        floor = of_impl(rows, r, FLOOR)
        if floor is None or r is floor or is_wrong(r) or is_wrong(floor):
            continue
        impl: str = "FLA" if r["impl"] == PEER else r["impl"]
        series.setdefault(impl, {})[f"N={r['N']}, HV={r['HV']}"] = r["us"] / floor["us"]
    if not series:
        return {}
    gpu, names = (
        data["runs"][-1]["device_name"],
        dict.fromkeys(backend(r) for r in rows if r["impl"] != FLOOR),
    )
    return {"decode": Picture(
        "How far is decoding from the floor of its memory?",
        f"Decoding on {gpu}: {' and '.join(named(n, data) for n in names)}",
        "one token of each sequence, fp32 states [V, K]", "device time divided by that of reading and writing the states",
        series, reference=1.0,
        order=tuple(dict.fromkeys(label for values in series.values() for label in values)),
    )}  # fmt: skip
