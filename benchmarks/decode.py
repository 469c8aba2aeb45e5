"""Measures serving calls over a pool of states: decoding, verification of drafts, prefill, and prefill beside decoding.

    python benchmarks/decode.py                                                # everything; on a CPU small calls
    python benchmarks/decode.py --call decode --T 1 --impl kda-sm90 rmw
    python benchmarks/decode.py --N 64 --HV 32 --impl kda-sm90 fla

Rows go to ``benchmarks/results/<gpu>/decode.json``; ``--out`` names another file. A run replaces the rows that it measures again
and keeps all others, and saves after every row. ``report.py`` writes the page of this file.

All calls have K = V = 128, states [V, K], and slow gates; gate, l2norm and sigmoid are in the kernel. A CUDA graph holds launches
over different slots, in random order, of a pool of at least ``--pool-mib``, which is several times the L2: so the states are not in
the L2, and nothing is flushed. The tokens of all launches are the same. A time is the median over replays, divided by the launches.

Calls:

  decode                     T = 1; with T > 1, drafts: the state after every token goes to a slot of its own
  prefill                    packed sequences, whose states are in the pool
  prefill without a pool     the same tokens, with states in a tensor
  mixed, prefill first       prefill and decoding over one pool, on two streams of one graph; prefill is launched first
  mixed, decode first        the same, with decoding launched first

Implementations of decode:

  kda-<backend>, fla         `fused_recurrent_kda` with the states in place
  flashinfer                 FlashInfer's `recurrent_kda`, the same; bf16 states; on the GPUs that it serves
  kda-<backend>+journal      `journal_decode_kda` with sequences that have 1 to 8 records. With T = 1 one of 8 is folded; with drafts
                             those whose records do not fit beside them, with T = 8 all: the accepted drafts of the step before
  kda-<backend>+verify       `verify_kda`, which writes no state; T > 1
  kda-<backend>+commit       `verify_kda`, then `journal_fold` of all drafts; T > 1
  rmw                        multiplies the same states in place: the floor of T = 1

Rows with records need a backend that declares the feature ``journal``.

Rows have the fields of `kda_core.bench.decode.FIELDS`, shown at the end, and ``run``, the id of the run. In mixed calls N counts all
sequences, and T is the length of a prompt. The error_state of rmw is the largest difference of a value.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the folder of the package, not of this script

from benchmarks import floor, mixed, records
from kda_core.bench import decode as pools
from kda_core.bench import implementations, peers
from kda_core.bench.decode import RECORDS, STATE_DTYPES, Launch, times

SCRIPT = "benchmarks/decode.py"
KEY = ("call", "N", "HV", "T", "impl", "state_dtype")  # identifies a row of decode.json
CALLS = ("decode", "mixed")
FLOOR = "rmw"
N, HV, T = (1, 8, 64, 256), (12, 32, 64, 96), (1, 4, 8)
SMALL = (2,), (2,), (1, 4)  # takes seconds on a CPU


def main(argv: list[str] | None = None) -> int:
    """Measures the selection. Returns 1 if a measured error is not finite."""
    args = parser().parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    impls = args.impl or default(device)
    run = records.describe(device, argv, SCRIPT)
    path = args.out or records.RESULTS / run["device"] / "decode.json"
    found: list[dict[str, Any]] = []
    for row in measured(args, impls, device):
        found.append(row | {"run": run["id"]})
        print(f"[{len(found)}] {line(row)}", flush=True)
        records.save(path, run, found, KEY)  # after every row: an interruption loses one at most
    print(f"{len(found)} rows in {path}")
    return (
        0
        if all(r[e] is None or r[e] < float("inf") for r in found for e in ("error_o", "error_state"))
        else 1
    )


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    p = argparse.ArgumentParser(
        description=f"{__doc__}\n{pools.FIELDS}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--call", nargs="+", choices=CALLS, default=list(CALLS),
        help="decode, or mixed with the calls of prefill (default: both)",
    )  # fmt: skip
    for name, values in (("N", N), ("HV", HV), ("T", T)):
        p.add_argument(
            f"--{name}", nargs="+", type=int, help=f"of decode (default: {' '.join(map(str, values))})"
        )
    p.add_argument(
        "--impl", nargs="+", help="as described above (default: all that run here); mixed takes backends"
    )
    p.add_argument(
        "--state-dtype", nargs="+", choices=tuple(STATE_DTYPES), default=list(STATE_DTYPES),
        help="of the pool of decode (default: both); mixed has fp32 states",
    )  # fmt: skip
    p.add_argument("--repeats", type=int, default=11, help="replays of a row (default: 11)")
    p.add_argument("--pool-mib", type=int, help="least MiB of a pool (default: 256; on a CPU 1)")
    p.add_argument("--out", type=Path, help="the JSON file")
    return p


def default(device: torch.device) -> list[str]:
    """Returns all implementations that run here, and prints which backends have no rows with records."""
    found = []
    for impl in implementations.default(device, peers.DECODE):
        found.append(impl)
        if peers.is_peer(impl):
            continue
        if pools.has_journal(implementations.backend_name(impl)):
            found += [impl + suffix for suffix in RECORDS]
        else:
            print(f"{impl}: no rows {', '.join(RECORDS)}, because it does not declare the feature journal")
    return [*found, FLOOR]


def measured(args: argparse.Namespace, impls: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields all rows of a selection: decode first, by shape."""
    usual = SMALL if device.type == "cpu" else (N, HV, T)
    shapes = itertools.product(
        *(given or values for given, values in zip((args.T, args.N, args.HV), (usual[2], *usual[:2])))
    )
    pool_bytes = args.pool_mib << 20 if args.pool_mib else pools.POOL_BYTES[device.type]
    for tokens, n, heads in shapes if "decode" in args.call else ():
        for impl, dtype in itertools.product(impls, args.state_dtype):
            if not serves(impl, tokens, dtype):
                continue
            problem = pools.make_problem(
                n, heads, tokens, pools.slots_of(impl, tokens), dtype, device, pool_bytes
            )
            row = {"call": "decode", "N": n, "HV": heads, "T": tokens, "impl": impl, "state_dtype": dtype}
            launches = variants(impl, problem)
            yield row | times(launches, device, args.repeats)
            del problem, launches
            if device.type == "cuda":
                torch.cuda.empty_cache()
    backends = [i for i in impls if not i.endswith(RECORDS) and i != FLOOR and not peers.is_peer(i)]
    for impl in backends if "mixed" in args.call else ():
        load = mixed.SMALL if device.type == "cpu" else mixed.LOAD
        for row, launch in mixed.launches(impl, load, device):
            yield row | {"impl": impl, "state_dtype": "float32"} | times([launch], device, args.repeats)


def serves(impl: str, T: int, state_dtype: str) -> bool:
    """Returns whether an implementation has rows with T tokens of each sequence."""
    return T == 1 if impl == FLOOR else pools.serves(impl, T, state_dtype)


def variants(impl: str, problem: pools.Problem) -> list[Launch]:
    """Returns the launches of an implementation. Several variants do the same; the fastest one counts."""
    return floor.floors(problem) if impl == FLOOR else [pools.launch(impl, problem)]


def line(row: dict[str, Any]) -> str:
    """Returns a row as a line of text."""
    show = lambda x: "-" if x is None else f"{x:.2e}"
    return (
        f"{row['call']:<23} N {row['N']:<4} HV {row['HV']:<3} T {row['T']:<5} {row['impl']:<17} {row['state_dtype']:<9} "
        f"{row['us']:9.1f} us, {row['launches']} launches, first {row['first_call_s']:.1f} s, "
        f"error o {show(row['error_o'])} state {show(row['error_state'])}"
    )


if __name__ == "__main__":
    sys.exit(main())
