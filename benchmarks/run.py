"""Measures prefill, and context parallelism: every case, gate family and implementation of a selection, into one JSON file.

    python benchmarks/run.py                          # a small selection that fits this machine
    python benchmarks/run.py --table public --impl kda-sm90 fla
    python benchmarks/run.py --table gva --hv 32 --gates slow
    python benchmarks/run.py --table public --gates slow-unbounded steep-unbounded
    python benchmarks/run.py --table public gva varlen blackwell      # all of prefill that is published for Blackwell
    python benchmarks/run.py --table padded           # calls with use_graph, which FLA does not know
    python benchmarks/run.py --table cp cp-h16 cp-1m --brute-force

Rows go to ``benchmarks/results/<gpu>/prefill.json``, those of the tables of context parallelism to ``cp.json`` (``--out`` names
another file); rows measured before are kept unless the run measures them again, and each carries the run that made it.
``--resume`` goes on with a run that was interrupted. ``report.py`` makes the tables from these files.

A row has: case, table, B, T, H, HV, lengths, gates, impl; median_ms (device time of CUDA-graph replays with the L2
flushed, null on a CPU), eager_ms (an asynchronous call to its end), error_o and error_state (the largest relative
Frobenius error over sequences and heads against the fp64 token loop), rmse_fla, rel_max_fla, mean_diff_fla (the output
against FLA's, where FLA ran), and run. Errors are null above ``--errors-up-to`` tokens. Rows of an implementation with "+cp"
also have plan, pieces (the most of a sequence), predicted_ms and predicted_serial_ms (null without constants), and with
``--brute-force`` best_uniform_ms and best_uniform_pieces, of 1 to 64 pieces for each sequence; where lengths differ also
best_fixed_ms and best_fixed_tokens, of one length for the pieces of all sequences. "+certified" is the best split by certified
decay, with the same fields of its plan.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import implementations
import measure
import registry
import torch

from kda_core.testing import Inputs, error, make_inputs, token_oracle

if TYPE_CHECKING:
    from kda_cp import Plan

KEY = ("case", "gates", "impl")
FIXED = (*range(1024, 8192, 512), *range(8192, 16384, 1024), *range(16384, 65536, 4096))  # tokens a piece
RESULTS = Path(__file__).parent / "results"
SMALL = registry.Case("B1-T2048-H4", "cpu", 1, 2048, 4, 4)  # what a CPU does in seconds
PACKAGES = (
    "kda-core",
    "kda-cp",
    "kda-sm90",
    "kda-sm100",
    "fla-core",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
)


def main(argv: list[str] | None = None) -> int:
    """Runs the selection; 1 if any measured error was not finite."""
    args = _parser().parse_args(argv)
    _check(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = _select(args, device)
    impls = args.impl or _default_impls(device, _parallel(args))
    run = describe(device, argv)
    file = "cp.json" if _parallel(args) else "prefill.json"
    path = args.out or RESULTS / run["device"] / file
    rows: list[dict[str, Any]] = []
    if args.resume:
        run, rows = _interrupted(path, run)
    done = {(r["case"], r["gates"]) for r in rows}
    total = len(args.gates) * sum(len(_able(impls, c)) for c in chosen)
    if "fla" in impls and any(c.use_graph for c in chosen):
        print("fla: no rows of calls with use_graph, which it does not know")
    groups = [(c, gates) for c in chosen for gates in args.gates if (c.name, gates) not in done]
    for (case, gates), x in zip(groups, _drawn(groups), strict=True):
        for row in _measure(case, gates, x, impls, device, args):
            rows.append(row | {"run": run["id"]})
            print(f"[{len(rows)}/{total}] {_line(row)}", flush=True)
        save(path, run, rows)  # after every group, so that an interrupted run keeps what it measured
    print(f"{len(rows)} rows in {path}")
    return 0 if all(r["error_o"] is None or r["error_o"] < float("inf") for r in rows) else 1


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--table", nargs="+", choices=(*registry.PREFILL, *registry.CONTEXT_PARALLEL), help="groups of cases"
    )
    p.add_argument("--case", nargs="+", help="cases by name, of these groups or of prefill; see registry.py")
    p.add_argument("--hv", type=int, help="value heads of the gva table (default 64)")
    p.add_argument(
        "--gates", nargs="+", choices=(*registry.GATES, *registry.UNBOUNDED), default=list(registry.GATES)
    )
    p.add_argument("--impl", nargs="+", help="kda-<backend>, reference, fla (default: all that run here)")
    p.add_argument("--repeats", type=int, default=20, help="timed repetitions a row")
    p.add_argument(
        "--brute-force",
        action="store_true",
        help='also time uniform plans of 1 to 64 pieces, and plans of one piece length, for "+cp"',
    )
    p.add_argument("--pieces", type=int, default=64, help="most pieces of a sequence with --brute-force")
    p.add_argument(
        "--errors-up-to", type=int, default=1 << 18, metavar="TOKENS", help="the oracle goes token by token"
    )
    p.add_argument("--out", type=Path, help="the JSON file")
    p.add_argument(
        "--resume",
        action="store_true",
        help="go on with the last run of the same command, device and versions",
    )
    return p


def _check(args: argparse.Namespace) -> None:
    if args.table and {*args.table} & {*registry.PREFILL} and {*args.table} & {*registry.CONTEXT_PARALLEL}:
        raise SystemExit(
            "--table: prefill and context parallelism go to different files; run them one by one"
        )


def _parallel(args: argparse.Namespace) -> bool:
    """Whether the run is one of context parallelism."""
    return bool(args.table) and args.table[0] in registry.CONTEXT_PARALLEL


def _select(args: argparse.Namespace, device: torch.device) -> list[registry.Case]:
    cases = (*registry.context_parallel(),) if _parallel(args) else registry.cases(args.hv)
    if args.case:
        known = {c.name: c for c in (*cases, SMALL) if not args.table or c.table in args.table}
        if unknown := [n for n in args.case if n not in known]:
            raise SystemExit(f"--case: unknown {unknown}; known: {', '.join(known)}")
        return [known[n] for n in args.case]
    if args.table:
        return [c for c in cases if c.table in args.table]
    return [SMALL] if device.type == "cpu" else [c for c in cases if c.name == "B1-T8192-H64"]


def _default_impls(device: torch.device, parallel: bool) -> list[str]:
    import kda_core

    ok = [i.name for i in kda_core.backends() if i.status == "ok"]
    names = [f"kda-{n}" for n in ok if n != "reference" and device.type != "cpu"] or ["reference"]
    names = [n + suffix for n in names for suffix in (("", registry.CP) if parallel else ("",))]
    if device.type == "cpu":
        return names
    try:
        version("fla-core")
    except PackageNotFoundError:
        return names
    return [*names, "fla"]


def _able(impls: list[str], case: registry.Case) -> list[str]:
    """The implementations that know such calls: FLA has no `use_graph`."""
    return [name for name in impls if not (case.use_graph and name == "fla")]


def _drawn(groups: list[tuple[registry.Case, str]]) -> Iterator[Inputs]:
    """The inputs of each group, on the CPU; the next ones are drawn, which takes seconds, while a group is measured."""
    if not groups:
        return
    with ThreadPoolExecutor(1) as pool:
        draw = lambda c, gates: pool.submit(_inputs, c, gates)
        following = draw(*groups[0])
        for group in groups[1:]:
            x, following = following.result(), draw(*group)
            yield x
        yield following.result()


def _inputs(case: registry.Case, gates: str) -> Inputs:
    family = registry.UNBOUNDED.get(gates, gates)
    lengths = (*case.lengths, case.behind) if case.behind else case.lengths
    x = make_inputs(family, case.T, B=case.B, H=case.H, HV=case.HV, lengths=lengths or None, seed=0)
    if case.behind:  # the tokens behind the last sequence are there, but in no sequence
        per_sequence = {n: x.arguments[n][:-1] for n in ("cu_seqlens", "initial_state") if n in x.arguments}
        x = Inputs(x.arguments | per_sequence, case.lengths)
    return x if family == gates else x.replace(lower_bound=None)


def _measure(
    case: registry.Case,
    gates: str,
    x: Inputs,
    impls: list[str],
    device: torch.device,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    x = Inputs(
        {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in x.arguments.items()}, x.lengths
    )
    call = dict(x.arguments) | {"output_final_state": True}
    if case.use_graph:
        call |= {"use_graph": True, "max_num_seqs": len(case.lengths)}
    if _parallel(args) and case.lengths:
        call["cu_seqlens_cpu"] = call["cu_seqlens"].cpu()  # without it no call is split
    tokens = case.T - case.behind
    checked = case.B * tokens <= args.errors_up_to
    want_o, want_s = token_oracle(**x.tokens(0, tokens)) if checked else (None, None)
    rows, outputs = [], {}
    for name in _able(impls, case):
        function = implementations.named(name, call)
        with torch.inference_mode():
            started = time.perf_counter()
            o, state = function(**call)
            first = time.perf_counter() - started
            row: dict[str, Any] = {
                "case": case.name, "table": case.table, "B": case.B, "T": case.T, "H": case.H, "HV": case.HV,
                "lengths": list(case.lengths), "gates": gates, "impl": name,
                "error_o": error(o[:, :tokens], want_o, lengths=x.lengths) if checked else None,
                "error_state": error(state, want_s, state=True) if checked else None,
                "first_call_s": first,
            }  # fmt: skip
            run = lambda f=function: f(**call)
            row["median_ms"] = measure.device_time(run, args.repeats) if device.type == "cuda" else None
            row["eager_ms"] = measure.eager_time(run, args.repeats)
            if name.endswith(registry.PLANNED):
                row |= _planned(name, call)
            if name.endswith(registry.CP) and args.brute_force:
                row |= _brute_force(name, call, device, args)
        outputs[name] = o
        rows.append(row)
        del o, state
    if "fla" in outputs:
        for row in rows:
            if row["impl"] != "fla":
                found = measure.difference(outputs[row["impl"]], outputs["fla"])
                row |= {f"{k}_fla": v for k, v in found.items()}
    return rows


def _planned(name: str, call: dict[str, Any]) -> dict[str, Any]:
    """What was predicted, in the row's units."""
    plan = implementations.plan(name, call)
    said = plan.prediction
    in_ms = lambda t: t / 1e3 if t is not None and said is not None and said.unit == "us" else None
    return {
        "plan": str(plan), "pieces": max(map(len, plan.segments)),
        "predicted_ms": in_ms(said and said.planned), "predicted_serial_ms": in_ms(said and said.serial),
    }  # fmt: skip


def _brute_force(
    name: str, call: dict[str, Any], device: torch.device, args: argparse.Namespace
) -> dict[str, Any]:
    """The best of uniform plans, those of one piece, which are serial, among them; and where lengths differ, the best length
    for the pieces of all sequences, the longest sequence's, which is serial, among them."""
    from kda_cp import Plan

    lengths = implementations.plan(name, call).lengths
    timed = measure.device_time if device.type == "cuda" else measure.eager_time

    def best(plans: dict[int, Plan]) -> tuple[float, int]:
        def ms(plan: Plan) -> float:
            function = implementations.planned(name, plan if plan.is_split else "off")
            return timed(lambda: function(**call), args.repeats)

        return min((ms(plan), n) for n, plan in plans.items())

    ms, pieces = best({n: Plan.uniform(lengths, n) for n in range(1, args.pieces + 1)})
    found = {"best_uniform_ms": ms, "best_uniform_pieces": pieces}
    if len({*lengths}) > 1:
        longest = max(lengths)
        tokens = (*(n for n in FIXED if n < longest), longest)
        found["best_fixed_ms"], found["best_fixed_tokens"] = best({n: _fixed(lengths, n) for n in tokens})
    return found


def _fixed(lengths: tuple[int, ...], tokens: int) -> Plan:
    """Pieces of so many tokens, but for the last of a sequence."""
    from kda_cp import Plan

    rest = lambda n: (n % tokens,) if n % tokens or not n else ()
    return Plan(tuple((*[tokens] * (n // tokens), *rest(n)) for n in lengths))


def _line(row: dict[str, Any]) -> str:
    show = lambda x: "-" if x is None else f"{x:.2e}"
    device = "-" if row["median_ms"] is None else f"{row['median_ms']:.3f}"
    return (
        f"{row['case']:<28} {row['gates']:<15} {row['impl']:<10} device {device} ms, eager {row['eager_ms']:.3f} ms, "
        f"error o {show(row['error_o'])} state {show(row['error_state'])}"
    )


def describe(
    device: torch.device, argv: list[str] | None, script: str = "benchmarks/run.py"
) -> dict[str, Any]:
    """The run: when, on what, with which versions and which command, of arguments (default: those of the process)."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    words = name.lower().replace("nvidia", "").split()
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "id": now.strftime("%Y%m%dT%H%M%SZ"),
        "date": now.isoformat(timespec="seconds"),
        "device": words[0] if device.type == "cuda" else "cpu",
        "device_name": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": versions,
        "command": _command(sys.argv[1:] if argv is None else argv, script),
    }


def _command(argv: list[str], script: str = "benchmarks/run.py") -> str:
    """The command that measures these rows again: all but where they were written."""
    args = list(argv)
    if "--out" in args:
        at = args.index("--out")
        del args[at : at + 2]
    return " ".join([script, *(a for a in args if not a.startswith("--out=") and a != "--resume")])


def _interrupted(path: Path, run: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The last run in the file that is like this one in all but its time, and its rows."""
    old = json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": []}
    alike = lambda r: all(r.get(k) == x for k, x in run.items() if k not in ("id", "date"))
    for known in reversed(old["runs"]):
        if alike(known):
            return known, [r for r in old["rows"] if r["run"] == known["id"]]
    raise SystemExit(f"--resume: {path} has no run of this command with these versions on this device")


def save(path: Path, run: dict[str, Any], rows: list[dict[str, Any]], names: tuple[str, ...] = KEY) -> None:
    """Replaces the rows that this run measured, known by the values of `names`, and keeps the others, with the runs that
    made them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": []}
    key = lambda r: tuple(r[name] for name in names)
    mine = {key(r) for r in rows}
    kept = [r for r in old["rows"] if key(r) not in mine]
    used = {r["run"] for r in kept}
    runs = [r for r in old["runs"] if r["id"] in used] + [run]
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps({"runs": runs, "rows": kept + rows}, indent=1) + "\n")
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
