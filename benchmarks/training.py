"""Measures training steps: forward and backward of every selected case, gate family, implementation and mode, into one JSON file.

    python benchmarks/training.py                     # all cases; on a CPU a small one
    python benchmarks/training.py --impl kda-sm90 fla --case B1-T8192-H64 B2-T8192-H64
    python benchmarks/training.py --impl kda-sm90 --gates slow --disable-recompute yes

Rows go to ``benchmarks/results/<gpu>/training.json``; ``--out`` names another file. A run replaces the rows that it measures again
and keeps all others, and saves after every row. ``report.py`` writes the page of this file.

Without ``--gates``, every case has slow gates, and B1-T8192-H64 also steep and memory. Calls have no final state; only memory has
an initial state. ``safe_gate=True`` promises all implementations that bounded gates are bounded. A backend of kda-core is
called with the defaults of `chunk_kda`, so that a planner may split the call.

Implementation "cudnn" is cuDNN frontend on its kernels for Hopper. They take no raw gate, no raw q and k and no logits of beta, so
its calls are prepared: gate, l2norm and sigmoid are computed before the call, outside of its times, and its gradients are those of
the prepared tensors. It has no grouped value heads and no disable_recompute.

Rows have the fields of `kda_core.bench.training.FIELDS`, shown at the end, and ``run``, the id of the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the folder of the package, not of this script

from benchmarks import records
from kda_core.bench import cases, implementations, peers, steps
from kda_core.bench.training import FIELDS, Training, serves

SCRIPT = "benchmarks/training.py"
KEY = ("case", "gates", "impl", "disable_recompute")  # identifies a row of training.json
MODES = {"no": False, "yes": True}


def main(argv: list[str] | None = None) -> int:
    """Measures the selection. Returns 1 if a measured error is not finite."""
    args = parser().parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    selected = _select(args.case, device)
    impls = args.impl or implementations.default(device, peers.TRAINING)
    modes = [MODES[name] for name in args.disable_recompute]
    run = records.describe(device, argv, SCRIPT)
    path = args.out or records.RESULTS / run["device"] / "training.json"
    groups = [(case, gates) for case in selected for gates in args.gates or cases.training_gates(case)]
    total = sum(len(calls(case, impls, modes)) for case, _ in groups)
    found: list[dict[str, Any]] = []
    for case, gates in groups:
        chosen = calls(case, impls, modes)
        for row in measure_rows(case, gates, chosen, device, args.repeats, args.error_tokens):
            found.append(row | {"run": run["id"]})
            print(f"[{len(found)}/{total}] {_line(row)}", flush=True)
            records.save(path, run, found, KEY)  # after every row: an interruption loses one at most
    print(f"{len(found)} rows in {path}")
    return 0 if all(r[e] is None or r[e] < float("inf") for r in found for e in steps.ERRORS) else 1


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    p = argparse.ArgumentParser(
        description=f"{__doc__}\n{FIELDS}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--case",
        nargs="+",
        help="cases by name, see kda_core.bench.cases (default: all; on a CPU a small one)",
    )
    p.add_argument(
        "--gates",
        nargs="+",
        choices=(*cases.GATES, *cases.UNBOUNDED),
        help="gate families of every selected case (default: as described above)",
    )
    p.add_argument(
        "--impl", nargs="+", help="kda-<backend>, reference, fla, cudnn (default: all that run here)"
    )
    p.add_argument(
        "--disable-recompute",
        nargs="+",
        choices=tuple(MODES),
        default=list(MODES),
        help="modes (default: both)",
    )
    p.add_argument("--repeats", type=int, default=20, help="timed repetitions of a row (default: 20)")
    p.add_argument(
        "--error-tokens",
        type=int,
        default=8192,
        help="most tokens of a call whose errors are measured; the fp64 loop takes them one by one (default: 8192)",
    )
    p.add_argument("--out", type=Path, help="the JSON file")
    return p


def calls(case: cases.Case, impls: list[str], modes: list[bool]) -> list[tuple[str, bool]]:
    """Returns the implementations and modes that serve a case. FLA comes first, so that others are compared with it."""
    names = sorted(impls, key=lambda impl: impl != "fla")
    return [(impl, mode) for impl in names for mode in modes if serves(impl, case, mode)]


def measure_rows(
    case: cases.Case,
    gates: str,
    chosen: list[tuple[str, bool]],
    device: torch.device,
    repeats: int,
    error_tokens: int,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each pair of implementation and mode; see `FIELDS`."""
    group = Training(case, gates, device, error_tokens)
    for impl, mode in chosen:
        yield group.measure(impl, mode, repeats)


def _select(names: list[str] | None, device: torch.device) -> list[cases.Case]:
    if not names:
        return [cases.SMALL] if device.type == "cpu" else cases.training()
    known = {c.name: c for c in (*cases.training(), cases.SMALL)}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--case: expected one of {', '.join(known)}, got {', '.join(unknown)}")
    return [known[name] for name in names]


def _line(row: dict[str, Any]) -> str:
    """Returns a row as a line of text."""
    worst = max((row[e], e) for e in steps.ERRORS if row[e] is not None)
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
    mode = "disable_recompute" if row["disable_recompute"] else ""
    return (
        f"{row['case']:<18} {row['gates']:<6} {row['impl']:<9} {mode:<17} {row['timing']}: forward {row['forward_ms']:.3f} "
        f"(inference {row['inference_ms']:.3f}), backward {row['backward_ms']:.3f}, step {row['step_ms']:.3f} ms; "
        f"peak {peak}; first step {row['first_step_s']:.1f} s; worst {worst[1]} {worst[0]:.2e}"
    )


if __name__ == "__main__":
    sys.exit(main())
