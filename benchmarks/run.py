"""Measures prefill or context parallelism: every selected case, gate family and implementation, into one JSON file.

    python benchmarks/run.py                          # a small selection for this machine
    python benchmarks/run.py --table public gva varlen
    python benchmarks/run.py --table public --impl kda-sm90 fla
    python benchmarks/run.py --table gva --hv 32 --gates slow
    python benchmarks/run.py --table public --gates slow-unbounded steep-unbounded
    python benchmarks/run.py --table public gva varlen blackwell      # all published shapes of Blackwell
    python benchmarks/run.py --table padded           # calls with use_graph, which FLA does not support
    python benchmarks/run.py --table cp cp-h16 cp-1m --brute-force

Rows go to ``benchmarks/results/<gpu>/prefill.json``, those of context parallelism to ``cp.json``; ``--out`` names another
file. A run replaces the rows that it measures again and keeps all others. ``--resume`` continues an interrupted run.
``report.py`` writes the pages of these files.

Implementations are "kda-<backend>", "reference" and peers. "fla" is FLA's `chunk_kda`. "cudnn" is cuDNN frontend with the engine
that it chooses, "cudnn-hopper" its engine kda_hopper, which has no gate, l2norm, sigmoid and grouped value heads; what an engine does not
compute is computed before it, and counts. With the suffix "+prepared" it is computed before the call and does not count.

Rows have the fields of `kda_core.bench.prefill.FIELDS`, shown at the end, ``run``, the id of the run, and where FLA
ran too:

  rmse_fla, rel_max_fla, mean_diff_fla    difference of o from FLA's

Implementations "<backend>+cp" and "<backend>+certified" also have the plan:

  plan, pieces          the plan, and its largest number of segments of a sequence
  predicted_ms, predicted_serial_ms       null without constants of the GPU

With --brute-force, "+cp" also has the best of two families of plans:

  best_uniform_ms, best_uniform_pieces    the same number of segments for every sequence: the time, and the number, 1 to 64
  best_fixed_ms, best_fixed_tokens        the same length for all segments, where the lengths of sequences differ: the time, and
                                          the length in tokens
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the folder of the package, not of this script

from benchmarks import records, rows
from kda_core.bench import cases, implementations, peers
from kda_core.bench.prefill import FIELDS, draw
from kda_core.testing import Inputs

SCRIPT = "benchmarks/run.py"
SMALL = cases.Case("B1-T2048-H4", "cpu", 1, 2048, 4, 4)  # takes seconds on a CPU


def main(argv: list[str] | None = None) -> int:
    """Measures the selection. Returns 1 if a measured error is not finite."""
    args = parser().parse_args(argv)
    _check(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = _select(args, device)
    impls = args.impl or _default_impls(device, _parallel(args))
    run = records.describe(device, argv, SCRIPT)
    path = args.out or records.RESULTS / run["device"] / ("cp.json" if _parallel(args) else "prefill.json")
    found: list[dict[str, Any]] = []
    if args.resume:
        run, found = records.interrupted(path, run)
    done = {(r["case"], r["gates"]) for r in found}
    total = len(args.gates) * sum(
        implementations.serves(impl, "prefill", c) for c in chosen for impl in impls
    )
    for impl in filter(peers.is_peer, impls):
        if left_out := [c.name for c in chosen if not implementations.serves(impl, "prefill", c)]:
            print(
                f"{impl}: {len(left_out)} cases are skipped, because it has no use_graph or no grouped value heads"
            )
    groups = [(c, gates) for c in chosen for gates in args.gates if (c.name, gates) not in done]
    for (case, gates), x in zip(groups, _draw_ahead(groups), strict=True):
        for row in rows.measure_rows(case, gates, x, impls, device, options(args)):
            found.append(row | {"run": run["id"]})
            print(f"[{len(found)}/{total}] {_line(row)}", flush=True)
        records.save(path, run, found)  # after every group, so that an interruption loses one group at most
    print(f"{len(found)} rows in {path}")
    return 0 if all(r["error_o"] is None or r["error_o"] < float("inf") for r in found) else 1


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    p = argparse.ArgumentParser(
        description=f"{__doc__}\n{FIELDS}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--table", nargs="+", choices=(*cases.PREFILL, *cases.CONTEXT_PARALLEL), help="tables of cases"
    )
    p.add_argument(
        "--case", nargs="+", help="cases by name, of these tables or of prefill; see kda_core.bench.cases"
    )
    p.add_argument("--hv", type=int, help="value heads of table gva (default: 64)")
    p.add_argument("--gates", nargs="+", choices=(*cases.GATES, *cases.UNBOUNDED), default=list(cases.GATES))
    p.add_argument("--impl", nargs="+", help="as described above (default: all that run here)")
    p.add_argument("--repeats", type=int, default=20, help="timed repetitions of a row (default: 20)")
    p.add_argument(
        "--brute-force", action="store_true", help='also time other plans for "+cp", as described above'
    )
    p.add_argument(
        "--segments",
        type=int,
        default=64,
        help="most segments of a sequence with --brute-force (default: 64)",
    )
    p.add_argument(
        "--errors-up-to",
        type=int,
        default=1 << 18,
        metavar="TOKENS",
        help="no errors above so many tokens, because the oracle is slow (default: 262144)",
    )
    p.add_argument("--out", type=Path, help="the JSON file")
    p.add_argument(
        "--resume", action="store_true", help="continue the last run of the same command, device and versions"
    )
    return p


def options(args: argparse.Namespace) -> rows.Options:
    """Returns the options of measurement that the command line names."""
    return rows.Options(args.repeats, args.errors_up_to, _parallel(args), args.brute_force, args.segments)


def _check(args: argparse.Namespace) -> None:
    if args.table and {*args.table} & {*cases.PREFILL} and {*args.table} & {*cases.CONTEXT_PARALLEL}:
        raise SystemExit(
            "--table: expected tables of prefill or of context parallelism, got both; they have different results files"
        )


def _parallel(args: argparse.Namespace) -> bool:
    """Returns whether the run measures context parallelism."""
    return bool(args.table) and args.table[0] in cases.CONTEXT_PARALLEL


def _select(args: argparse.Namespace, device: torch.device) -> list[cases.Case]:
    found = (*cases.context_parallel(),) if _parallel(args) else cases.prefill(args.hv)
    if args.case:
        known = {c.name: c for c in (*found, SMALL) if not args.table or c.table in args.table}
        if unknown := [n for n in args.case if n not in known]:
            raise SystemExit(f"--case: expected one of {', '.join(known)}, got {', '.join(unknown)}")
        return [known[n] for n in args.case]
    if args.table:
        return [c for c in found if c.table in args.table]
    return [SMALL] if device.type == "cpu" else [c for c in found if c.name == "B1-T8192-H64"]


def _default_impls(device: torch.device, parallel: bool) -> list[str]:
    suffixes = ("", cases.CP) if parallel else ("",)
    found = implementations.default(device, peers.PREFILL)
    names = [n for n in found if n == "fla" or not parallel or not peers.is_peer(n)]
    return [n + suffix for n in names for suffix in (suffixes if not peers.is_peer(n) else ("",))]


def _draw_ahead(groups: list[tuple[cases.Case, str]]) -> Iterator[Inputs]:
    """Yields the inputs of each group. A thread draws those of the next group, which takes seconds, during a measurement."""
    if not groups:
        return
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(draw, *groups[0])
        for group in groups[1:]:
            x, following = following.result(), pool.submit(draw, *group)
            yield x
        yield following.result()


def _line(row: dict[str, Any]) -> str:
    """Returns a row as a line of text."""
    show = lambda x: "-" if x is None else f"{x:.2e}"
    device = "-" if row["median_ms"] is None else f"{row['median_ms']:.3f}"
    return (
        f"{row['case']:<28} {row['gates']:<15} {row['impl']:<10} device {device} ms, eager {row['eager_ms']:.3f} ms, "
        f"error o {show(row['error_o'])} state {show(row['error_state'])}"
    )


if __name__ == "__main__":
    sys.exit(main())
