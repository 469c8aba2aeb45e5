"""Measures one long sequence over the GPUs of a torchrun group, against the best plan of one GPU.

    torchrun --standalone --nproc-per-node 2 benchmarks/multi_gpu.py
    torchrun --standalone --nproc-per-node 4 benchmarks/multi_gpu.py
    torchrun --standalone --nproc-per-node 2 benchmarks/multi_gpu.py --T 2048 --H 2 --repeats 1   # on CPUs

Every rank draws the whole inputs from one seed, computes its fragments, and compares them with a call on its own GPU alone.
Times are those of the slowest rank. Rows go to ``benchmarks/results/<gpu>/cp_multi_gpu.json``:

  T, H, gates, ranks    what was measured
  fragments             how the sequence is distributed: contiguous or zigzag
  median_ms             device time from the moment when all devices reach the call. The L2 is flushed, and the call is already
                        enqueued, as in a loop of calls. null on CPUs
  eager_ms              from a barrier of the hosts to the end of the last rank, with the hosts' work
  single_ms, single_eager_ms, single_plan    the best of one GPU: serial, the planner's choice, or a uniform plan of 2 to 64
                        segments
  difference            relative Frobenius norm of the difference of o from one GPU's, the largest over ranks
  run                   the id of the run
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

import torch
import torch.distributed as dist
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the folder of the package, not of this script

from benchmarks import records
from kda_core import chunk_kda
from kda_core.bench.measure import FLUSH_BYTES
from kda_core.testing import make_inputs
from kda_cp import Plan
from kda_cp.distributed import ContextParallel, FragmentTable

UNIFORM = (2, 4, 8, 12, 16, 24, 32, 48, 64)
TABLES = {"contiguous": FragmentTable.contiguous, "zigzag": FragmentTable.zigzag}
BUSY = 120  # flushes before a call: they take about 20 ms, during which the hosts enqueue the call
KEY = ("T", "H", "gates", "ranks", "fragments")


def main(argv: list[str] | None = None) -> int:
    """Measures on every rank of torchrun; rank 0 writes the rows."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--T", type=int, default=1 << 20, help="tokens (default: 1048576)")
    p.add_argument("--H", type=int, default=8, help="heads (default: 8)")
    p.add_argument("--gates", default="slow", help="gate family (default: slow)")
    p.add_argument("--fragments", nargs="+", choices=TABLES, default=[*TABLES], help="distributions")
    p.add_argument("--backend", help="backend of kda-core (default: automatic choice)")
    p.add_argument("--repeats", type=int, default=20, help="timed repetitions (default: 20)")
    p.add_argument("--out", type=Path, help="the JSON file")
    args = p.parse_args(argv)

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        with torch.inference_mode():
            rows, rank = _measure(args, device), dist.get_rank()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        script = f"torchrun --standalone --nproc-per-node {rows[0]['ranks']} benchmarks/multi_gpu.py"
        about = records.describe(device, argv, script)
        path = args.out or records.RESULTS / about["device"] / "cp_multi_gpu.json"
        records.save(path, about, [row | {"run": about["id"]} for row in rows], KEY)
        for row in rows:
            print(
                f"{row['ranks']} ranks, {row['fragments']}: {_show(row, '')}; one, {row['single_plan']}: {_show(row, 'single_')}"
            )
        print(path)
    return 0


def _measure(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Returns a row for each table of fragments."""
    x = dict(make_inputs(args.gates, args.T, H=args.H, device=device, seed=0).arguments)
    single, whole = _best_single(x, args, device)
    rows = []
    for name in args.fragments:
        table = TABLES[name]((args.T,), dist.get_world_size())
        cp = ContextParallel(None, table)
        mine = x | {n: table.shard(x[n], cp.rank) for n in ("q", "k", "v", "g", "beta")}
        call = lambda cp=cp, mine=mine: cp.chunk_kda(**mine, output_final_state=True, backend=args.backend)
        o, _ = call()
        parts = table.shard(whole, cp.rank).float()
        difference = torch.tensor(((o.float() - parts).norm() / parts.norm()).item(), device=device)
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        device_ms, eager_ms = _times(call, device, args.repeats)
        rows.append({
            "T": args.T, "H": args.H, "gates": args.gates, "ranks": cp.ranks, "fragments": name,
            "median_ms": device_ms, "eager_ms": eager_ms, **single, "difference": difference.item(),
        })  # fmt: skip
    return rows


def _best_single(
    x: dict[str, Any], args: argparse.Namespace, device: torch.device
) -> tuple[dict[str, Any], Tensor]:
    """Returns the fields of a row on the best plan of one GPU, with times of the slowest rank, and o of the serial call."""
    plans: dict[str, Any] = {"serial": "off", "auto": "auto"}
    plans |= {f"uniform {n}": Plan.uniform((args.T,), n) for n in UNIFORM}
    times = {}
    for name, plan in plans.items():
        call = lambda plan=plan: chunk_kda(
            **x, output_final_state=True, backend=args.backend, context_parallel=plan
        )
        call()
        times[name] = _times(call, device, args.repeats)
    best = min(times, key=lambda name: times[name][0] or times[name][1])
    o, _ = chunk_kda(**x, backend=args.backend, context_parallel="off")
    device_ms, eager_ms = times[best]
    return {"single_ms": device_ms, "single_eager_ms": eager_ms, "single_plan": best}, o


def _times(call: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float | None, float]:
    """Returns the medians of `_device_ms`, which is None on a CPU, and of `_eager_ms`."""
    eager = statistics.median(_eager_ms(call, device) for _ in range(repeats))
    if device.type == "cpu":
        return None, eager
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    return statistics.median(_device_ms(call, flush) for _ in range(repeats)), eager


def _device_ms(call: Callable[[], Any], flush: Tensor) -> float:
    """Returns the milliseconds of one call on the slowest device, from the moment when all devices reach the call."""
    for _ in range(BUSY):
        flush.zero_()
    dist.all_reduce(flush[:1], op=dist.ReduceOp.MAX)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    waited = start.query()
    torch.cuda.synchronize()
    took = torch.tensor([start.elapsed_time(end), waited], dtype=torch.float64, device=flush.device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    if took[1]:
        raise RuntimeError(
            f"a device reached the call before its host had enqueued it; raise BUSY in multi_gpu.py above {BUSY}"
        )
    return took[0].item()


def _eager_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Returns the milliseconds of one call of all ranks, from a barrier to the end of the slowest rank."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    dist.barrier()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    took = torch.tensor((time.perf_counter() - start) * 1e3, dtype=torch.float64, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def _show(row: dict[str, Any], which: str) -> str:
    device, eager = row[f"{which}ms" if which else "median_ms"], row[f"{which}eager_ms"]
    return f"device {'-' if device is None else f'{device:.3f}'} ms, eager {eager:.3f} ms"


if __name__ == "__main__":
    sys.exit(main())
