"""The checks that each rank of a group executes, for tests/cp/test_cp_distributed.py and test_cp_gpu.py.

A check returns the values on which the test makes its assertions.
"""

import datetime
import os
import sys
import traceback
from contextlib import nullcontext
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import kda_core
from helpers import segmented_backend
from helpers.ranks import leave
from kda_core.reference import ReferenceBackend
from kda_core.registry import record_calls
from kda_core.testing import error, make_inputs, token_oracle
from kda_cp import Constants, Pass, constants
from kda_cp.distributed import ContextParallel, Fragment, FragmentTable
from kda_cp.local_fragments import plan_fragments

TOKENS = ("q", "k", "v", "g", "beta")
# torch 2.13 renamed all_gather_into_tensor.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
COLLECTIVES = ("all_gather", "all_gather_object", "all_reduce", "broadcast", GATHER)


def call(family, lengths, **more):
    """Returns arguments without cu_seqlens, which the table replaces, and the oracle's o and states."""
    x = make_inputs(
        family, sum(lengths), lengths=lengths, **({"H": 1, "HV": 2, "K": 16, "V": 16} | more)
    ).arguments
    want = token_oracle(**x)
    del x["cu_seqlens"]
    return x, want


def run(group, table, x, on="owner", **more):
    """Returns this rank's o and final states, the backends that were called, and the number of collectives."""
    cp = ContextParallel(group, table, final_state_on=on)
    mine = x | {n: table.shard(x[n], cp.rank) for n in TOKENS}
    count = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            return function(*args, **kwargs)

        return call

    with (
        record_calls() as calls,
        mock.patch.multiple(dist, **{n: counted(getattr(dist, n)) for n in COLLECTIVES}),
    ):
        o, state = cp.chunk_kda(**mine, output_final_state=True, **more)
    return o, state, [(c.backend, c.planner) for c in calls], count


def compare(group, table, x, want, on="owner", **more):
    """Returns the errors "o" and "state" of this rank, the "backends" that were called and the number of "collectives".

    The error of o is measured for each token range.
    """
    rank = dist.get_rank()
    o, state, ran, count = run(group, table, x, on, **more)
    lengths = [f.stop - f.start for f in table.of_rank(rank)]
    states = want[1] if on == "all" else want[1][list(table.owned(rank))]
    assert state.dtype == torch.float32 and state.shape == states.shape
    return {
        "o": error(o, table.shard(want[0], rank), lengths=lengths),
        "state": error(state, states, state=True) if len(states) else 0.0,
        "backends": ran,
        "collectives": count,
    }


LENGTHS = (70, 0, 130, 3, 55)


def tables(ranks):
    """Returns fragment tables over sequences of `LENGTHS` tokens, by name."""
    fragments = []  # uneven, out of order, more than one of a sequence on a rank
    for n, length in enumerate(LENGTHS):
        cuts = [0, *range(7 + n, length, 29), length]
        fragments += [
            Fragment((3 * n + i * i) % ranks, n, a, b) for i, (a, b) in enumerate(pairwise(cuts)) if b > a
        ] or [Fragment(n % ranks, n, 0, 0)]
    fragments = tuple(reversed(fragments))
    return {
        "contiguous": FragmentTable.contiguous(LENGTHS, ranks),
        "zigzag": FragmentTable.zigzag(LENGTHS, ranks),
        "document": FragmentTable.document_aligned(LENGTHS, ranks),
        "uneven": FragmentTable(LENGTHS, ranks, fragments),
        "one rank has all": FragmentTable(
            LENGTHS, ranks, tuple(Fragment(ranks - 1, n, 0, m) for n, m in enumerate(LENGTHS))
        ),
        "cut where nothing crosses": FragmentTable(
            LENGTHS,
            ranks,
            tuple(
                Fragment(n % ranks, n, a, b)
                for n, m in enumerate(LENGTHS)
                for a, b in pairwise((0, *sorted({m // 3, m})))
                if b > a or not m
            ),
        ),
    }


def fails(work):
    """Returns the type and the message of the exception that `work` raises, or None."""
    try:
        work()
    except Exception as raised:  # noqa: BLE001 - the test asserts the type
        return type(raised).__name__, str(raised)
    return None


def checks(rank, ranks):
    """Yields (name, check) in the same order on every rank."""
    for family in ("steep", "slow", "memory"):
        x, want = call(family, LENGTHS, initial_state=True)
        for name, table in tables(ranks).items():
            for on in ("owner", "all"):
                yield f"{family} {name} {on}", partial(compare, None, table, x, want, on)
    x, want = call("memory", (500,), state_v_first=True, K=8)
    table = FragmentTable.contiguous((500,), ranks)
    yield "one sequence, v first", lambda: compare(None, table, x, want, "all")
    x, want = call("mixed", (211,), V=24)
    table = FragmentTable.zigzag((211,), ranks)
    yield "mesh", lambda: compare(DeviceMesh("cpu", list(range(ranks))), table, x, want)

    def twice():
        a, b = run(None, table, x), run(None, table, x)
        return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])

    yield "same bits", twice

    def plans():
        """Returns how often this rank has planned after a first call, an equal call, and a call after a refresh."""
        cp = ContextParallel(None, table)
        mine = x | {n: table.shard(x[n], rank) for n in TOKENS}
        with mock.patch("kda_cp.distributed.plan_fragments", side_effect=plan_fragments) as counted:
            counts = []
            for refresh in (False, False, True):
                kda_core.backends(refresh=refresh)
                cp.chunk_kda(**mine)
                counts.append(counted.call_count)
        return counts

    yield "plans", plans
    zeros = torch.zeros(1, 2, 16, 24)

    def none_and_zeros():
        a, b = run(None, table, x), run(None, table, x | {"initial_state": zeros})
        return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])

    yield "none is zeros", none_and_zeros
    wrong = x | ({"v": x["v"][..., :-1, :]} if rank == 1 else {})
    yield "bad shape", lambda: fails(lambda: run(None, table, wrong))
    other = {"scale": 2.0} if rank == 0 else {}
    yield "other option", lambda: fails(lambda: run(None, table, x, **other))
    mine = FragmentTable.contiguous((211,), ranks) if rank == 1 else table
    yield "other table", lambda: fails(lambda: ContextParallel(None, mine))
    yield from order_checks(rank, ranks)
    small = FragmentTable.contiguous((211,), ranks + 1)
    yield "table for more", lambda: fails(lambda: ContextParallel(None, small))

    def broken():
        with mock.patch(
            "kda_core.reference.ReferenceBackend.chunk_fwd", side_effect=MemoryError("no memory")
        ):
            return fails(lambda: run(None, table, x))

    yield (
        "a rank runs out of memory",
        broken if rank == ranks - 1 else lambda: fails(lambda: run(None, table, x)),
    )

    def short_of_memory():
        with mock.patch(
            "kda_cp.local_fragments.LocalFragments.reserve", side_effect=MemoryError("no memory")
        ):
            return fails(lambda: run(None, table, x))

    yield (
        "a rank cannot allocate its memory",
        short_of_memory if rank == ranks - 1 else lambda: fails(lambda: run(None, table, x)),
    )
    yield "and the group still works", lambda: compare(None, table, x, want)

    last = rank == ranks - 1
    shards = x | {n: table.shard(x[n], rank) for n in TOKENS}
    apart = FragmentTable.document_aligned((211,), ranks)
    held = x | {n: apart.shard(x[n], rank) for n in TOKENS}

    def differs(cp, mine, **mistake):
        """Returns the error of a call in which the last rank passes a wrong argument."""
        return fails(lambda: cp.chunk_kda(**mine | (mistake if last else {})))

    yield "no tensor", lambda: differs(ContextParallel(None, table), shards, beta=0.5)
    yield "no table", lambda: fails(lambda: ContextParallel(None, None if last else table))
    for name, on in (("invalid final_state_on", "every"), ("other final_state_on", "all")):
        on = on if last else "owner"
        yield name, lambda on=on: fails(lambda: ContextParallel(None, apart, final_state_on=on))
    wanted = held | {"output_final_state": True}
    everywhere = partial(ContextParallel, None, apart, final_state_on="all")
    yield "no final states", lambda: differs(everywhere(), wanted, output_final_state=False)

    def out_of_step():
        """One rank fails after the others have received everything; then all ranks call again."""
        cp = ContextParallel(None, table)
        with (
            mock.patch("kda_cp.local_fragments.LocalFragments.execute", side_effect=MemoryError("no memory"))
            if last
            else nullcontext()
        ):
            first = fails(lambda: cp.chunk_kda(**shards))
        return first, fails(lambda: cp.chunk_kda(**shards))

    yield "out of step", out_of_step
    yield "a new instance works", lambda: compare(None, table, x, want)


def order_checks(rank, ranks):
    """Checks in which the ranks do the same in different order. Each returns the errors of this rank in its order of calls."""
    lengths = (60 * ranks,)
    x, want = call("memory", lengths)
    one = FragmentTable.contiguous(lengths, ranks)
    turned = tuple(Fragment((f.rank + 1) % ranks, f.sequence, f.start, f.stop) for f in one.fragments)
    tables = {
        "same summaries": FragmentTable(lengths, ranks, turned),
        "other summaries": FragmentTable.zigzag(lengths, ranks),
        "same table": one,
    }
    shards = {n: one.shard(x[n], rank) for n in TOKENS}

    for name, other in tables.items():

        def calls(other=other):
            instances = [ContextParallel(None, one), ContextParallel(None, other)]
            if rank == 0:
                instances.reverse()
            return [fails(lambda cp=cp: cp.chunk_kda(**x | shards)) for cp in instances]

        yield f"order: {name}", calls

    def tagged():
        instances = [ContextParallel(None, one, tag=tag) for tag in ("layer 0", "layer 1")]
        instances = instances[:: -1 if rank == 0 else 1]
        before = [fails(lambda cp=cp: cp.chunk_kda(**x | shards)) for cp in instances]
        o = instances[1 if rank == 0 else 0].chunk_kda(**x | shards)[0]
        return before, error(o, one.shard(want[0], rank), lengths=[60])

    yield "order: tagged", tagged
    tags = ("a", "b") if rank == 0 else ("b", "a")
    yield "order: constructed", lambda: [fails(lambda t=t: ContextParallel(None, one, tag=t)) for t in tags]

    def constructed_and_called():
        cp = ContextParallel(None, one)
        work = [lambda: cp.chunk_kda(**x | shards), lambda: ContextParallel(None, one)]
        return [fails(w) for w in (work if rank == 0 else work[::-1])]

    yield "order: constructed and called", constructed_and_called
    tag = 3 if rank == 1 else "a"
    yield "no tag", lambda: fails(lambda: ContextParallel(None, one, tag=tag))
    yield "options of training", lambda: compare(None, one, x, want, disable_recompute=True)


def deaths(rank, ranks, folder):
    """Entry of 6 processes. Rank 0 has a group with each other rank, and each other rank dies at another moment.

    Rank 1 dies before it constructs a `ContextParallel`, ranks 2 and 4 before their first call, and rank 3 during the exchange
    of summaries. In the group with rank 4, rank 0 fails as well. Rank 5 dies during the exchange of a backward. Rank 0 stores the
    errors that it raises.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # Gloo reports a dead rank at once. Without that, the test ends after this time.
    limit = datetime.timedelta(minutes=5)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit
    )
    groups = {r: dist.new_group([0, r], timeout=limit) for r in range(1, ranks)}
    x, _ = call("memory", (80,))
    table = FragmentTable.contiguous((80,), 2)
    mine = x | {n: table.shard(x[n], int(rank > 0)) for n in TOKENS}

    def use(group, dies=None, trains=False, **mistake):
        if dies == 1:
            os._exit(0)
        cp = ContextParallel(group, table, tag="layer 7")
        if dies in (2, 4):
            os._exit(0)
        if dies == 3:
            with dying_in_exchange():
                cp.chunk_kda(**mine)
        if dies == 5 or trains:
            q = mine["q"].clone().requires_grad_()
            o, _ = cp.chunk_kda(**mine | {"q": q})
            with dying_in_exchange() if dies else nullcontext():
                o.sum().backward()
        cp.chunk_kda(**mine | mistake)

    if rank:
        use(groups[rank], dies=rank)
    else:
        mistakes = {4: {"beta": 0.5}, 5: {"trains": True}}
        found = {r: fails(lambda r=r: use(groups[r], **mistakes.get(r, {}))) for r in groups}
        torch.save(found, f"{folder}/0.pt")
        os._exit(0)  # groups with dead ranks cannot be destroyed


def dying_in_exchange():
    """Ends this process when it starts to gather summaries or gradients of states, after the ranks have agreed."""
    gather = getattr(dist, GATHER)

    def die(*args, async_op=False, **kwargs):
        if async_op:
            os._exit(0)
        return gather(*args, **kwargs)

    return mock.patch.object(dist, GATHER, die)


LANES = Pass(((64, 100.0),), 0.01, 0.01, 1.0)  # many idle lanes, so that ranks cut their fragments
LONG = (640, 0, 1500, 64)


def cut_checks(rank, ranks, folder):
    """Checks in which each rank cuts its fragments into segments.

    The backends are the reference, one that summarises segments, and one with a merge kernel as well.
    """
    backends = ("reference", "segmented", "merging")
    for backend in backends:
        constants.store(("cpu", backend, "bfloat16"), Constants(LANES, 0.1, 0.01, LANES, LANES))
    info = folder / f"segmented{rank}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: segmented\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kda_core.backends]\nsegmented = helpers.segmented_backend:SPEC\nmerging = helpers.segmented_backend:MERGING\n"
    )
    sys.path.insert(0, str(folder))
    dist.barrier()
    kda_core.backends(refresh=True)
    forms = {"steep": {"initial_state": True, "state_v_first": True}, "memory": {}, "slow": {"V": 24}}
    for family, form in forms.items():
        x, want = call(family, LONG, **form)
        fragments = (
            Fragment(1, 2, 0, 700),
            Fragment(0, 2, 700, 1500),
            Fragment(0, 0, 0, 640),
            Fragment(1, 3, 0, 64),
        )
        separate = FragmentTable(LONG, ranks, (*fragments, Fragment(0, 1, 0, 0)))
        for name, table in (
            ("contiguous", FragmentTable.contiguous(LONG, ranks)),
            ("zigzag", FragmentTable.zigzag(LONG, ranks)),
            ("separate", separate),
        ):
            for backend in backends:
                yield f"cut {family} {name} {backend}", partial(cut, table, x, want, backend)


def cut(table, x, want, backend):
    """Returns the results of `compare`, and as "calls" (method, sequences) of each call of the backend and of each gather."""
    seen = []

    def watched(method, function):
        def call(self, inputs, *args):
            seen.append((method, inputs.shape.N))
            return function(self, inputs, *args)

        return call

    merge = segmented_backend.Merging.merge_segments

    def merged(self, initial, exits, transitions, bounds):
        seen.append(("merge_segments", len(bounds) - 1))
        merge(self, initial, exits, transitions, bounds)

    gather = getattr(dist, GATHER)

    def gathered(*args, async_op=False, **kwargs):
        if async_op:
            seen.append(("gather", 0))
        return gather(*args, async_op=async_op, **kwargs)

    with (
        mock.patch.object(dist, GATHER, gathered),
        mock.patch.multiple(
            segmented_backend.Segmented,
            **{
                m: watched(m, getattr(segmented_backend.Segmented, m))
                for m in ("summarize", "execute_segments")
            },
        ),
        mock.patch.object(segmented_backend.Merging, "merge_segments", merged),
        mock.patch.object(ReferenceBackend, "chunk_fwd", watched("chunk_fwd", ReferenceBackend.chunk_fwd)),
    ):
        return compare(None, table, x, want, "all", backend=backend) | {"calls": seen}


def work(rank, ranks, folder):
    """Entry of a spawned process: executes all checks and stores their results in the folder."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["KDA_CACHE_DIR"] = f"{folder}/cache{rank}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    results = {}
    try:
        for name, check in chain(checks(rank, ranks), cut_checks(rank, ranks, Path(folder))):
            results[name] = check()
    except Exception:  # noqa: BLE001 - the test prints it
        results["crashed"] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    leave()


def behind_a_busy_gpu(rank, ranks, folder, backend):
    """Entry of a process with its own GPU: makes a call while about one second of work is queued on the GPU."""
    torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    lengths = (5000, 300)
    x, want = call("slow", lengths, H=2, HV=4, K=128, V=128, device="cuda")
    table = FragmentTable.contiguous(lengths, ranks)
    cp = ContextParallel(None, table)
    mine = x | {n: table.shard(x[n], rank) for n in TOKENS}
    run = partial(cp.chunk_kda, **mine, output_final_state=True, backend="sm90")
    run()  # compiles the kernels and connects the ranks
    dist.barrier()  # no host may compile while another waits for its message
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    slept = torch.cuda.Event()
    slept.record()
    with record_calls() as calls:
        o, state = run()
    busy = not slept.query()
    held = [f.stop - f.start for f in table.of_rank(rank)]
    owned = list(table.owned(rank))
    found = (
        error(o, table.shard(want[0], rank), lengths=held),
        error(state, want[1][owned], state=True) if owned else 0.0,
        [(c.backend, c.planner) for c in calls],
        busy,
    )
    torch.save(found, f"{folder}/{rank}.pt")
    leave()
