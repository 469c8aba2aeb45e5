"""The checks of gradients that each rank of a group executes, for tests/cp/test_cp_distributed_gradients.py and test_cp_gpu.py."""

import os
import sys
import traceback
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import kda_core
from helpers.rank_checks import COLLECTIVES, LANES, LENGTHS, LONG, TOKENS, fails, tables
from helpers.ranks import leave
from kda_core import chunk_kda
from kda_core.contract import FLOAT_TENSORS
from kda_core.registry import record_calls
from kda_core.testing import make_inputs
from kda_core.testing.gradients import GradientCase, gradient_errors
from kda_cp import Constants, constants
from kda_cp.distributed import ContextParallel, FragmentTable
from kda_cp.local_fragments import plan_fragments

OF = ("o", "final_state")


@cache
def case(family, lengths=LENGTHS, of=OF, **more):
    """Returns a `GradientCase` of a packed call."""
    recipe = {"H": 1, "HV": 2, "K": 16, "V": 8, "dtype": torch.float64, "initial_state": True} | more
    return GradientCase(make_inputs(family, sum(lengths), lengths=lengths, **recipe), of)


@cache
def one_process(case):
    """Returns the gradients of a call in one process."""
    x = case.arguments
    leaves = {n: x[n].clone().requires_grad_() for n in FLOAT_TENSORS if x.get(n) is not None}
    results = chunk_kda(**x | leaves, backend="reference", context_parallel="off")
    used = [(y, d) for y, d in zip(results, (case.grad_o, case.grad_final_state)) if d is not None]
    outputs, given = zip(*used)
    return dict(zip(leaves, torch.autograd.grad(outputs, [*leaves.values()], given)))


def local(table, rank, case, names=FLOAT_TENSORS):
    """Returns the arguments of a rank, and its leaves among them: the inputs `names`."""
    x = {n: y for n, y in case.arguments.items() if n != "cu_seqlens"}
    x |= {n: table.shard(x[n], rank) for n in TOKENS}
    leaves = {n: x[n].clone().requires_grad_() for n in names if x.get(n) is not None}
    return x | leaves, leaves


def backward(cp, case, results, leaves, **options):
    """Returns the gradients of this rank by name.

    If final states are on all ranks, the copy of rank r gets r shares of their gradient, and rank 0 does not use its copy.
    """
    o, final = results
    used = [] if case.grad_o is None else [(o, cp.table.shard(case.grad_o, cp.rank))]
    if case.grad_final_state is not None and cp.final_state_on == "owner":
        used.append((final, case.grad_final_state[list(cp.table.owned(cp.rank))]))
    elif case.grad_final_state is not None and cp.rank > 0:
        used.append((final, case.grad_final_state * (cp.rank / sum(range(cp.ranks)))))
    used = used or [(o, torch.zeros_like(o))]  # every rank runs the backward
    outputs, given = zip(*used)
    return dict(zip(leaves, torch.autograd.grad(outputs, [*leaves.values()], given, **options)))


def compare(table, case, on="owner", backend=None, names=FLOAT_TENSORS):
    """Returns the largest error of this rank's gradients, "backends" that were called, and "collectives" of the backward.

    The error is relative to the gradients of one process, the norm over all tokens of this rank. Gradients that ranks share are
    added before.
    """
    cp = ContextParallel(None, table, final_state_on=on)
    x, leaves = local(table, cp.rank, case, names)
    count = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            return function(*args, **kwargs)

        return call

    with record_calls() as calls:
        results = cp.chunk_kda(**x, backend=backend)
        with mock.patch.multiple(dist, **{n: counted(getattr(dist, n)) for n in COLLECTIVES}):
            found = backward(cp, case, results, leaves)
    errors = {}
    for n, want in one_process(case).items():
        if n not in leaves:
            continue
        assert found[n].shape == leaves[n].shape and found[n].dtype == leaves[n].dtype
        if n in TOKENS:
            want = table.shard(want, cp.rank)
        else:
            if n == "initial_state":
                started = {f.sequence for f in table.of_rank(cp.rank) if f.start == 0}
                others = [i for i in range(len(want)) if i not in started]
                assert not found[n][others].any()
            dist.all_reduce(found[n])
        errors[n] = ((found[n] - want).norm() / want.norm().clamp(min=1e-30)).item()
    return {
        "errors": errors,
        "backends": [(c.backend, c.entry, c.planner) for c in calls],
        "collectives": count,
    }


def through_layers(calls, x):
    """Returns the output of layers, each of which takes the output of the one before as v."""
    for call in calls:
        o, _ = call(**x)
        x = x | {"v": o}
    return o


def layers(table, case):
    """Returns for two microbatches the error of the gradient of q through two layers, relative to that of one process.

    The forwards of both run under autocast, before the first backward.
    """
    rank = dist.get_rank()
    whole = case.arguments["q"].clone().requires_grad_()
    one = partial(chunk_kda, backend="reference", context_parallel="off")
    o = through_layers([one, one], case.arguments | {"q": whole})
    want = table.shard(torch.autograd.grad(o, whole, case.grad_o)[0], rank)
    calls = [ContextParallel(None, table, tag=f"layer {i}").chunk_kda for i in range(2)]
    x, leaves = local(table, rank, case, ("q",))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [through_layers(calls, x) for _ in range(2)]
    grad_o = table.shard(case.grad_o, rank)
    found = [torch.autograd.grad(o, leaves["q"], grad_o)[0] for o in outputs]
    return [((d - want).norm() / want.norm()).item() for d in found]


def within_limits(table, case):
    """Returns the ratio of each error to the limit of the kit, for the gradients of all ranks together, and the exact norms."""
    cp = ContextParallel(None, table)
    x, leaves = local(table, cp.rank, case)
    found = backward(cp, case, cp.chunk_kda(**x), leaves)
    shards = [None] * cp.ranks
    dist.all_gather_object(shards, found)
    whole = {
        n: table.unshard([s[n] for s in shards]) if n in TOKENS else sum(s[n] for s in shards) for n in leaves
    }
    errors = gradient_errors(whole, case.exact, LENGTHS)
    return {n: (e / case.limits[n], case.exact.values[n].norm().item()) for n, e in errors.items()}


def checks(rank, ranks):
    """Yields (name, check) in the same order on every rank."""
    last, memory = rank == ranks - 1, case("memory")
    crossing = FragmentTable.contiguous(LENGTHS, ranks)
    for name, table in tables(ranks).items():
        for on in ("owner", "all"):
            yield f"compare {name} {on}", partial(compare, table, memory, on)
    zigzag = FragmentTable.zigzag(LENGTHS, ranks)
    forms = {
        "gates in the kernel": case("slow"),
        "v first": case("mixed", state_v_first=True),
        "equal heads": case("steep", HV=1),
        "fp32": case("memory", dtype=torch.float32),
        "no initial state": case("slow", initial_state=False),
        "only o": case("memory", of=("o",)),
        "only final states": case("slow", of=("final_state",)),
    }
    for name, form in forms.items():
        yield f"form {name}", partial(compare, zigzag, form)
    yield "form v first on all", partial(compare, crossing, forms["v first"], "all")
    for names in (("v",), ("A_log",), ("initial_state",), ("dt_bias", "g")):
        yield (
            f"form of {' '.join(names)}",
            partial(compare, crossing, forms["gates in the kernel"], names=names),
        )
    yield "layers", partial(layers, zigzag, forms["fp32"])
    yield "limits", partial(within_limits, zigzag, case("slow", dtype=torch.bfloat16))

    yield from error_checks(rank, ranks, crossing, memory)

    def no_grad():
        """Returns whether results without gradients are those with gradients, and no backward is planned without."""
        cp = ContextParallel(None, crossing)
        x, _ = local(crossing, rank, memory)
        trained = cp.chunk_kda(**x)
        refuses = mock.patch("kda_cp.distributed.FragmentGradients", side_effect=AssertionError)
        with refuses, torch.no_grad():
            found = cp.chunk_kda(**x)
        with refuses:
            detached = cp.chunk_kda(**local(crossing, rank, memory, ())[0])
        assert all(y.requires_grad for y in trained) and not any(y.requires_grad for y in (*found, *detached))
        return all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(trained, found, detached))

    yield "no grad", no_grad

    def again():
        """Returns whether a second backward of a call, and that of a checkpointed call, have the same bits."""
        cp = ContextParallel(None, crossing)
        x, leaves = local(crossing, rank, memory)
        results = cp.chunk_kda(**x)
        first = backward(cp, memory, results, leaves, retain_graph=True)
        second = backward(cp, memory, results, leaves)
        run = lambda *values: cp.chunk_kda(**x | dict(zip(leaves, values)))
        third = backward(cp, memory, checkpoint(run, *leaves.values(), use_reentrant=False), leaves)
        return all(torch.equal(d, other[n]) for n, d in first.items() for other in (second, third))

    yield "again", again

    def twice_differentiated():
        cp = ContextParallel(None, crossing)
        x, leaves = local(crossing, rank, memory)
        found = backward(cp, memory, cp.chunk_kda(**x), leaves, create_graph=True)
        return fails(lambda: found["q"].sum().backward())

    yield "second derivative", twice_differentiated

    def forward_mode(names):
        cp = ContextParallel(None, crossing)
        x, _ = local(crossing, rank, memory, names)
        with forward_ad.dual_level():
            return fails(
                lambda: cp.chunk_kda(**x | {"v": forward_ad.make_dual(x["v"], torch.ones_like(x["v"]))})
            )

    yield "forward mode", lambda: [forward_mode(names) for names in ((), FLOAT_TENSORS)]
    apart = FragmentTable.document_aligned(LENGTHS, ranks)

    def alone():
        """Returns whether rank 0 alone can run a backward that exchanges nothing."""
        cp = ContextParallel(None, apart)
        x, leaves = local(apart, rank, memory)
        results = cp.chunk_kda(**x)
        return rank > 0 or backward(cp, memory, results, leaves)["q"].isfinite().all().item()

    yield "alone", alone
    for backend in ("writing", "old-writing", "merging"):
        form = case("slow", dtype=torch.float32)
        yield f"backend {backend}", partial(compare, zigzag, form, backend=backend)

    def no_backward():
        cp = ContextParallel(None, crossing)
        return fails(
            lambda: cp.chunk_kda(**local(crossing, rank, memory)[0], backend="forward" if last else None)
        )

    yield "no backward", no_backward
    for backend in ("reference", "merging"):
        yield f"cut {backend}", partial(cut, FragmentTable.contiguous(LONG, ranks), backend)


def cut(table, backend):
    """Returns the results of `compare` for long sequences, and as "cut" the segments of the forward of this rank."""
    plans = []

    def planned(*args):
        plans.append(plan_fragments(*args))
        return plans[-1]

    with mock.patch("kda_cp.distributed.plan_fragments", planned):
        found = compare(table, case("memory", LONG, dtype=torch.float32), backend=backend)
    return found | {"cut": sum(len(p.flat) for p in plans)}


def error_checks(rank, ranks, table, memory):
    """Checks in which a rank fails, or the ranks differ."""
    last = rank == ranks - 1

    def failing(target, on="owner"):
        """Returns the errors of a backward in which the last rank fails, and of the calls and backwards after it."""
        cp = ContextParallel(None, table, final_state_on=on, tag="layer 3")
        x, leaves = local(table, rank, memory)
        results = cp.chunk_kda(**x)
        with mock.patch(target, side_effect=MemoryError("no memory")) if last else nullcontext():
            first = fails(lambda: backward(cp, memory, results, leaves, retain_graph=True))
        again = fails(lambda: backward(cp, memory, results, leaves))
        return first, again, fails(lambda: cp.chunk_kda(**x))

    before = {
        "computes gradients of states": "kda_core.reference.ReferenceBackend.chunk_bwd",
        "allocates": "kda_core.backward.reserve",
    }
    for name, target in before.items():
        for on in ("owner", "all"):
            yield f"fails as it {name}, {on}", partial(failing, target, on)
    yield "fails before the sum", partial(failing, "kda_cp.rank_backward.RankBackward._copies", "all")
    yield "fails afterwards", partial(failing, "kda_cp.state_gradients.BackwardCaller.__call__")

    def trained_on_some():
        x, _ = local(table, rank, memory, () if last else FLOAT_TENSORS)
        return fails(lambda: ContextParallel(None, table).chunk_kda(**x))

    yield "trained on some", trained_on_some

    def order(*works):
        """Returns the errors of works in this order on rank 0, and in reverse on the others."""
        return [fails(work) for work in works[:: 1 if rank == 0 else -1]]

    def of_calls():
        cp = ContextParallel(None, table)
        x, leaves = local(table, rank, memory)
        a, b = (cp.chunk_kda(**x) for _ in range(2))
        return order(*(partial(backward, cp, memory, r, leaves, retain_graph=True) for r in (a, b)))

    def of_instances():
        instances = [ContextParallel(None, table, tag=tag) for tag in ("a", "b")]
        x, leaves = local(table, rank, memory)
        results = [cp.chunk_kda(**x) for cp in instances]
        works = [partial(backward, cp, memory, r, leaves) for cp, r in zip(instances, results)]
        return order(*works)

    def of_call_and_backward():
        cp = ContextParallel(None, table)
        x, leaves = local(table, rank, memory)
        results = cp.chunk_kda(**x)
        return order(partial(backward, cp, memory, results, leaves), lambda: cp.chunk_kda(**x))

    yield "order of calls", of_calls
    yield "order of instances", of_instances
    yield "order of call and backward", of_call_and_backward
    yield "compare contiguous owner", partial(compare, table, memory)  # after all these errors


def install(rank, folder):
    """Installs the backends of the checks: `segmented_backend` with a merge kernel, and those of `writing_backend`."""
    info = folder / f"gradients{rank}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gradients\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kda_core.backends]\nmerging = helpers.segmented_backend:MERGING\nwriting = helpers.writing_backend:SPEC\n"
        "old-writing = helpers.writing_backend:OLD\nforward = helpers.writing_backend:FORWARD\n"
    )
    sys.path.insert(0, str(folder))
    kda_core.backends(refresh=True)
    for backend in ("reference", "merging"):
        constants.store(("cpu", backend, "float32"), Constants(LANES, 0.1, 0.01, LANES, LANES))


def work(rank, ranks, folder):
    """Entry of a spawned process: executes all checks and stores their results in the folder."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["KDA_CACHE_DIR"] = f"{folder}/cache{rank}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    results = {}
    try:
        install(rank, Path(folder))
        dist.barrier()
        for name, check in checks(rank, ranks):
            results[name] = check()
    except Exception:  # noqa: BLE001 - the test prints it
        results["crashed"] = f"{name if results else ''}: {traceback.format_exc()}"
    torch.save(results, f"{folder}/{rank}.pt")
    leave()


def on_gpus(rank, ranks, folder, backend):
    """Entry of a process with its own GPU: compares gradients of kda-sm90 with those of one process."""
    torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    lengths = (2000, 0, 300)
    form = case("slow", lengths, H=2, HV=4, K=128, V=128, dtype=torch.bfloat16, device="cuda")
    tables = (FragmentTable.contiguous(lengths, ranks), FragmentTable.zigzag(lengths, ranks))
    found = [compare(table, form, on, backend="sm90") for table in tables for on in ("owner", "all")]
    torch.save(found, f"{folder}/{rank}.pt")
    leave()
