"""Measures one long sequence over the GPUs of a torchrun group against the best that one GPU does with it:

    torchrun --standalone --nproc-per-node 2 benchmarks/multi_gpu.py
    torchrun --standalone --nproc-per-node 4 benchmarks/multi_gpu.py
    torchrun --standalone --nproc-per-node 2 benchmarks/multi_gpu.py --T 2048 --H 2 --repeats 1   # on CPUs

Every rank draws the whole inputs from one seed, runs its fragments, and compares them with a run of its own GPU alone. A time
is that of the slowest rank, from a barrier on. Rows go to ``benchmarks/results/<gpu>/cp_multi_gpu.json``: T, H, gates, ranks,
fragments (the form of the table), median_ms, single_ms and single_plan (the best of one GPU: serial, the planner's choice,
uniform plans of 2 to 64 pieces), difference (relative, of o to one GPU's, the largest over ranks), and run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import run as runs
import torch
import torch.distributed as dist
from torch import Tensor

from kda_core import chunk_kda
from kda_core.testing import make_inputs
from kda_cp import Plan
from kda_cp.distributed import ContextParallel, FragmentTable

UNIFORM = (2, 4, 8, 12, 16, 24, 32, 48, 64)
TABLES = {"contiguous": FragmentTable.contiguous, "zigzag": FragmentTable.zigzag}
KEY = ("T", "H", "gates", "ranks", "fragments")


def main(argv: list[str] | None = None) -> int:
    """Runs on every rank of torchrun; rank 0 writes the row."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--T", type=int, default=1 << 20)
    p.add_argument("--H", type=int, default=8)
    p.add_argument("--gates", default="slow")
    p.add_argument("--fragments", choices=TABLES, default="contiguous")
    p.add_argument("--backend", help="of kda-core (default: the best one)")
    p.add_argument("--repeats", type=int, default=20)
    p.add_argument("--out", type=Path, help="the JSON file")
    args = p.parse_args(argv)

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        with torch.inference_mode():
            row = _measure(args, device)
    finally:
        dist.destroy_process_group()
    if row is not None:
        about = runs._describe(device, argv)
        about["command"] = f"torchrun --nproc-per-node {row['ranks']} benchmarks/multi_gpu.py " + " ".join(
            about["command"].split()[1:]
        )
        path = args.out or runs.RESULTS / about["device"] / "cp_multi_gpu.json"
        runs.save(path, about, [row | {"run": about["id"]}], KEY)
        print(f"{row['median_ms']:.3f} ms on {row['ranks']} ranks, {row['single_ms']:.3f} ms on one; {path}")
    return 0


def _measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any] | None:
    """The row, on rank 0."""
    x = dict(make_inputs(args.gates, args.T, H=args.H, device=device, seed=0).arguments)
    table = TABLES[args.fragments]((args.T,), dist.get_world_size())
    cp = ContextParallel(None, table)
    mine = x | {n: table.shard(x[n], cp.rank) for n in ("q", "k", "v", "g", "beta")}
    call = lambda: cp.chunk_kda(**mine, output_final_state=True, backend=args.backend)
    o, _ = call()
    single_ms, single_plan, whole = _best_single(x, args, device)
    parts = table.shard(whole, cp.rank).float()
    difference = torch.tensor(((o.float() - parts).norm() / parts.norm()).item(), device=device)
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    median = statistics.median(_slowest(call, device) for _ in range(args.repeats))
    if cp.rank:
        return None
    return {
        "T": args.T, "H": args.H, "gates": args.gates, "ranks": cp.ranks, "fragments": args.fragments,
        "median_ms": median, "single_ms": single_ms, "single_plan": single_plan, "difference": difference.item(),
    }  # fmt: skip


def _best_single(
    x: dict[str, Any], args: argparse.Namespace, device: torch.device
) -> tuple[float, str, Tensor]:
    """Milliseconds of the best plan of one GPU, on the slowest rank; which one; and its o, of the serial call."""
    plans: dict[str, Any] = {"serial": "off", "auto": "auto"}
    plans |= {f"uniform {n}": Plan.uniform((args.T,), n) for n in UNIFORM}
    times = {}
    for name, plan in plans.items():
        call = lambda plan=plan: chunk_kda(
            **x, output_final_state=True, backend=args.backend, context_parallel=plan
        )
        call()
        times[name] = statistics.median(_slowest(call, device) for _ in range(args.repeats))
    best = min(times, key=lambda name: times[name])
    o, _ = chunk_kda(**x, backend=args.backend, context_parallel="off")
    return times[best], best, o


def _slowest(call: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call of all ranks, from a barrier to the end of the slowest."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    dist.barrier()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    took = torch.tensor((time.perf_counter() - start) * 1e3, dtype=torch.float64, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


if __name__ == "__main__":
    sys.exit(main())
