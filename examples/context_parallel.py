"""Distributes a long and a short sequence over the ranks of a torchrun group.

Each rank prints the relative difference between its results and those of a single process.

torchrun --standalone --nproc-per-node 4 examples/context_parallel.py          # CPUs, gloo
torchrun --standalone --nproc-per-node 2 examples/context_parallel.py --cuda   # 2 GPUs, NCCL
torchrun --standalone --nproc-per-node 4 examples/context_parallel.py --cuda   # 4 GPUs, NCCL
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

from kda_core import chunk_kda
from kda_cp.distributed import ContextParallel, FragmentTable

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cuda", action="store_true", help="use one GPU per rank")
parser.add_argument(
    "--tokens",
    type=int,
    nargs="+",
    default=[1000, 123],
    help="tokens of each sequence (default: %(default)s)",
)
args = parser.parse_args()

if args.cuda:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")
dist.init_process_group("cpu:gloo,cuda:nccl" if args.cuda else "gloo")

# The inputs of the whole batch are equal on all ranks. A real program loads only the tokens of its rank.
H, D = 4, 128
T, N = sum(args.tokens), len(args.tokens)
generator = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16().to(device)
q, k, v, g = (draw(1, T, H, D) for _ in range(4))
beta, state = draw(1, T, H), torch.zeros(N, H, D, D, device=device)
options: dict[str, Any] = {
    "A_log": torch.zeros(H, device=device), "dt_bias": torch.zeros(H, D, device=device), "lower_bound": -5.0,
    "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
}  # fmt: skip

# Distribute the tokens in contiguous blocks. Every rank makes the same table, selects its tokens, and calls.
cp = ContextParallel(None, FragmentTable.contiguous(args.tokens, dist.get_world_size()), final_state_on="all")
own_q, own_k, own_v, own_g, own_beta = (cp.table.shard(x, cp.rank) for x in (q, k, v, g, beta))
o, final = cp.chunk_kda(
    own_q, own_k, own_v, own_g, own_beta, initial_state=state, output_final_state=True, **options
)  # fmt: skip
assert final is not None

offsets = torch.tensor([0, *args.tokens]).cumsum(0).int()
want, want_final = chunk_kda(
    q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=offsets.to(device),
    context_parallel="off", **options,
)  # fmt: skip
difference = lambda a, b: ((a.float() - b.float()).norm() / b.float().norm()).item()
held = ", ".join(f"{f.start}:{f.stop} of sequence {f.sequence}" for f in cp.table.of_rank(cp.rank))
line = (
    f"rank {cp.rank} of {cp.ranks} on {device}: tokens {held}; relative difference of o "
    f"{difference(o, cp.table.shard(want, cp.rank)):.1e}, of the final states {difference(final, want_final):.1e}"
)
lines = [""] * cp.ranks
dist.all_gather_object(lines, line)
if cp.rank == 0:
    print("\n".join(lines))
dist.destroy_process_group()
