"""FLA's contexts of context parallelism for tests: fakes with the attributes that `kda_cp.fla_context` reads, and what each rank of a
group executes with fakes or with FLA's own contexts."""

import os
import traceback
from itertools import accumulate
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

import kda_core
from helpers.inputs import call
from helpers.ranks import leave
from kda_core.registry import record_calls
from kda_cp import fla_context

LAYOUTS = ("contiguous", "zigzag")
CASES = ((96,), (10, 30, 56), (24, 24, 24, 24), (1, 94, 1), (48, 48))
"""Lengths of packed sequences."""
NAMES = ("q", "k", "v", "g", "beta")
GATE = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


class FakeContext(SimpleNamespace):
    """Like FLA's context, it can be compared but has no hash, and can be referenced weakly."""


def owned(rank, ranks, layout):
    """Returns the numbers of the intervals of a rank."""
    return [rank] if layout == "contiguous" else [rank, 2 * ranks - 1 - rank]


def shard(x, rank, ranks, layout):
    """Returns the tokens of a rank, as FLA splits x [1, T, ...]."""
    length = x.shape[1] // (ranks if layout == "contiguous" else 2 * ranks)
    return torch.cat([x[:, i * length : (i + 1) * length] for i in owned(rank, ranks, layout)], 1)


def fake_context(lengths, rank, ranks, layout, group="a group"):
    """Returns the context of a rank."""
    offsets = [0, *accumulate(lengths)]
    count = ranks if layout == "contiguous" else 2 * ranks
    size = offsets[-1] // count
    parts, before, after = [], [], []
    for i in owned(rank, ranks, layout):
        start, end = i * size, (i + 1) * size
        cuts = sorted({min(max(x, start), end) - start for x in offsets})
        parts.append(cuts)
        before.append(i - max(x for x in offsets[:-1] if x <= start) // size)
        after.append((min(x for x in offsets[1:] if x >= end) - 1) // size - i)
    own = [*parts[0], *(x + size for x in parts[-1][1:] if len(parts) == 2)]
    context = FakeContext(group=group, layout=layout, cu_seqlens=torch.tensor(own).int())
    context.cu_seqlens_cpu = context.cu_seqlens.clone()
    if layout == "contiguous":
        context.pre_num_ranks, context.post_num_ranks = before[0], after[0]
    else:
        context.part_len, context.front_num_seqs = size, len(parts[0]) - 1
        context.pre_num_ranks_by_part, context.post_num_ranks_by_part = tuple(before), tuple(after)
    return context


def arguments(lengths):
    """Returns a call with gates in the kernel in fp64, its offsets, and a gradient of o."""
    T = sum(lengths)
    x = call(T=T, HV=4, K=16, V=8, dtype=torch.float64)
    rng = torch.Generator().manual_seed(1)
    x |= {"A_log": torch.rand(4, generator=rng), "dt_bias": torch.rand(4 * 16, generator=rng)}
    seed = torch.randn(1, T, 4, 8, generator=rng, dtype=torch.float64)
    return x, torch.tensor([0, *accumulate(lengths)]), seed


def compare(function, context, lengths, rank, ranks):
    """Returns the largest errors of o and of each gradient of this rank against one process, and the calls that ran."""
    x, cu_seqlens, seed = arguments(lengths)
    leaves = {n: y.clone().requires_grad_() for n, y in x.items()}
    o, _ = kda_core.chunk_kda(**leaves, **GATE, cu_seqlens=cu_seqlens)
    o.backward(seed)
    cut = lambda y: shard(y, rank, ranks, context.layout)
    mine = {n: (cut(y) if n in NAMES else y).clone().requires_grad_() for n, y in x.items()}
    with record_calls() as calls:
        own, state = function(**mine, **GATE, cp_context=context)
        own.backward(cut(seed))
    assert state is None
    errors = {"o": (own - cut(o)).abs().max().item()}
    for n, leaf in leaves.items():
        found, want = mine[n].grad, leaf.grad
        if n in NAMES:
            want = cut(want)
        else:
            dist.all_reduce(found)
        errors[n] = (found - want).abs().max().item()
    return errors, [(c.backend, c.entry, c.planner) for c in calls]


def work(rank, ranks, folder, real):
    """Entry of a spawned process: compares all cases and stores the results in the folder.

    Args:
        real: whether contexts and function are those of FLA.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["FLA_KDA_CORE"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    results = {}
    try:
        if real:
            from helpers.real_fla import build_cp_context, chunk_kda
        for layout in LAYOUTS:
            for lengths in CASES:
                if real:
                    offsets = torch.tensor([0, *accumulate(lengths)])
                    context = build_cp_context(offsets, dist.group.WORLD, layout=layout)
                    function = chunk_kda
                else:
                    context = fake_context(lengths, rank, ranks, layout, dist.group.WORLD)
                    function = fla_context.chunk_kda
                with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gathered:
                    results[layout, lengths] = compare(function, context, lengths, rank, ranks)
                    compare(function, context, lengths, rank, ranks)
                assert gathered.call_count == 1, "the ranks gather once for a context"
        results["failure"] = failure(rank, ranks)
    except Exception:  # noqa: BLE001 - the test prints it
        results["crashed"] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    leave()


def failure(rank, ranks):
    """Returns the error of this rank where the last rank has a context that cannot be used."""
    context = fake_context((96,), rank, ranks, "contiguous", dist.group.WORLD)
    if rank == ranks - 1:
        context.cu_seqlens_cpu = torch.tensor([0, 0, 48])
    try:
        fla_context.context_parallel(context)
    except Exception as error:  # noqa: BLE001 - the test compares it
        return type(error).__name__, str(error)
    return None


def check(by_rank):
    """Asserts the results of `work` on all ranks."""
    for rank, found in enumerate(by_rank):
        assert "crashed" not in found, found["crashed"]
        name, message = found.pop("failure")
        last = rank == len(by_rank) - 1
        assert name == ("ArgumentError" if last else "RankError")
        assert last or f"rank {len(by_rank) - 1} failed: ArgumentError: cp_context.cu_seqlens" in message
        assert set(found) == {(layout, lengths) for layout in LAYOUTS for lengths in CASES}
        for case, (errors, calls) in found.items():
            assert set(errors) == {"o", *NAMES, "A_log", "dt_bias"}
            limits = {n: 1e-5 if n in ("A_log", "dt_bias") else 1e-11 for n in errors}
            assert all(errors[n] < limits[n] for n in errors), (rank, case, errors)
            backward = [("reference", "chunk_bwd", "cp.distributed")]
            assert calls == [("reference", "chunk_fwd", "cp.distributed"), *backward], (rank, case, calls)
