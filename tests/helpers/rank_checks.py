"""What each rank of a group runs for tests/cp/test_cp_distributed.py and test_cp_gpu.py. A check returns what the test asserts
on."""

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
from kda_cp.part import planned
from torch.distributed.device_mesh import DeviceMesh

import kda_core
from helpers import segmented_backend
from kda_core.reference import ReferenceBackend
from kda_core.registry import record_calls
from kda_core.testing import error, make_inputs, token_oracle
from kda_cp import Constants, Pass, constants
from kda_cp.distributed import ContextParallel, Fragment, FragmentTable

TOKENS = ("q", "k", "v", "g", "beta")
# torch 2.13 has another name for all_gather_into_tensor.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
COLLECTIVES = ("all_gather", "all_gather_object", "all_reduce", "broadcast", GATHER)


def call(family, lengths, **more):
    """Arguments without cu_seqlens, which is the table's matter, and the oracle's o and states."""
    x = make_inputs(
        family, sum(lengths), lengths=lengths, **({"H": 1, "HV": 2, "K": 16, "V": 16} | more)
    ).arguments
    want = token_oracle(**x)
    del x["cu_seqlens"]
    return x, want


def run(group, table, x, on="owner", **more):
    """This rank's o and final states; which backends ran, and how often a collective was called."""
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
    """(error of this rank's o, of its states, backends, collectives); o is measured token range by token range."""
    rank = dist.get_rank()
    o, state, ran, count = run(group, table, x, on, **more)
    lengths = [f.stop - f.start for f in table.of_rank(rank)]
    states = want[1] if on == "all" else want[1][list(table.owned(rank))]
    assert state.dtype == torch.float32 and state.shape == states.shape
    return (
        error(o, table.shard(want[0], rank), lengths=lengths),
        error(state, states, state=True) if len(states) else 0.0,
        ran,
        count,
    )


LENGTHS = (70, 0, 130, 3, 55)


def tables(ranks):
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
    """The type and message of what `work` raises, or None."""
    try:
        work()
    except Exception as raised:  # noqa: BLE001 - the test looks at it
        return type(raised).__name__, str(raised)
    return None


def checks(rank, ranks):
    """(name, check) in the same order on every rank."""
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
        """How often this rank plans: in a first call, in one like it, and in one after other answers were called for."""
        cp = ContextParallel(None, table)
        mine = x | {n: table.shard(x[n], rank) for n in TOKENS}
        with mock.patch("kda_cp.distributed.planned", side_effect=planned) as counted:
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
    trained = x | {"v": x["v"].float().requires_grad_()}
    yield "training", lambda: fails(lambda: run(None, table, trained | {n: x[n].float() for n in ("q", "k")}))

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
        with mock.patch("kda_cp.part.Part.reserve", side_effect=MemoryError("no memory")):
            return fails(lambda: run(None, table, x))

    yield (
        "a rank finds no memory for its run",
        short_of_memory if rank == ranks - 1 else lambda: fails(lambda: run(None, table, x)),
    )
    yield "and the group still works", lambda: compare(None, table, x, want)

    last = rank == ranks - 1
    shards = x | {n: table.shard(x[n], rank) for n in TOKENS}
    apart = FragmentTable.document_aligned((211,), ranks)
    held = x | {n: apart.shard(x[n], rank) for n in TOKENS}

    def differs(cp, mine, **mistake):
        """What a call raises in which the last rank makes a mistake."""
        return fails(lambda: cp.chunk_kda(**mine | (mistake if last else {})))

    yield "no tensor", lambda: differs(ContextParallel(None, table), shards, beta=0.5)
    yield "no table", lambda: fails(lambda: ContextParallel(None, None if last else table))
    for name, on in (("no word for where states go", "every"), ("another word for where states go", "all")):
        on = on if last else "owner"
        yield name, lambda on=on: fails(lambda: ContextParallel(None, apart, final_state_on=on))
    wanted = held | {"output_final_state": True}
    everywhere = partial(ContextParallel, None, apart, final_state_on="all")
    yield "no final states", lambda: differs(everywhere(), wanted, output_final_state=False)

    def out_of_step():
        """A rank fails where the others have all that they need; then all call again."""
        cp = ContextParallel(None, table)
        with (
            mock.patch("kda_cp.part.Part.run", side_effect=MemoryError("no memory"))
            if last
            else nullcontext()
        ):
            first = fails(lambda: cp.chunk_kda(**shards))
        return first, fails(lambda: cp.chunk_kda(**shards))

    yield "out of step", out_of_step
    yield "another one brings them together", lambda: compare(None, table, x, want)


def order_checks(rank, ranks):
    """Ranks that do the same things in different order. Each check returns what this rank raised first and second."""
    lengths = (60 * ranks,)
    x, want = call("memory", lengths)
    one = FragmentTable.contiguous(lengths, ranks)
    turned = tuple(Fragment((f.rank + 1) % ranks, f.sequence, f.start, f.stop) for f in one.fragments)
    tables = {
        "same rows": FragmentTable(lengths, ranks, turned),
        "other rows": FragmentTable.zigzag(lengths, ranks),
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
    yield "order: made", lambda: [fails(lambda t=t: ContextParallel(None, one, tag=t)) for t in tags]

    def made_and_called():
        cp = ContextParallel(None, one)
        work = [lambda: cp.chunk_kda(**x | shards), lambda: ContextParallel(None, one)]
        return [fails(w) for w in (work if rank == 0 else work[::-1])]

    yield "order: made and called", made_and_called
    tag = 3 if rank == 1 else "a"
    yield "no tag", lambda: fails(lambda: ContextParallel(None, one, tag=tag))
    yield "options of training", lambda: compare(None, one, x, want, disable_recompute=True)


def deaths(rank, ranks, folder):
    """Entry of 5 processes: all but 0 die, in a group with 0, at another moment each, and 4 where 0 fails too. 0 returns what it
    raises."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit
    )
    groups = {r: dist.new_group([0, r], timeout=limit) for r in range(1, ranks)}
    x, _ = call("memory", (80,))
    table = FragmentTable.contiguous((80,), 2)
    mine = x | {n: table.shard(x[n], int(rank > 0)) for n in TOKENS}

    def use(group, dies=None, **mistake):
        if dies == 1:
            os._exit(0)
        cp = ContextParallel(group, table, tag="layer 7")
        if dies in (2, 4):
            os._exit(0)
        if dies == 3:
            mock.patch.object(cp, "_exchange", side_effect=lambda *_: os._exit(0)).start()
        cp.chunk_kda(**mine | mistake)

    if rank:
        use(groups[rank], dies=rank)
    else:
        mistakes = {4: {"beta": 0.5}}
        found = {r: fails(lambda r=r: use(groups[r], **mistakes.get(r, {}))) for r in groups}
        torch.save(found, f"{folder}/0.pt")
        os._exit(0)  # groups of the dead cannot be taken apart


LANES = Pass(((64, 100.0),), 0.01, 0.01, 1.0)  # many idle lanes: ranks cut their fragments
LONG = (640, 0, 1500, 64)


def cut_checks(rank, ranks, folder):
    """Checks in which each rank cuts its fragments further: over the reference, and over backends that summarise segments,
    one of which merges them as well."""
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
        apart = FragmentTable(LONG, ranks, (*fragments, Fragment(0, 1, 0, 0)))
        for name, table in (
            ("contiguous", FragmentTable.contiguous(LONG, ranks)),
            ("zigzag", FragmentTable.zigzag(LONG, ranks)),
            ("apart", apart),
        ):
            for backend in backends:
                yield f"cut {family} {name} {backend}", partial(cut, table, x, want, backend)


def cut(table, x, want, backend):
    """As `compare`, with the numbers of sequences of all calls of the backend by method."""
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

    def begun(*args, async_op=False, **kwargs):
        if async_op:
            seen.append(("gather", 0))
        return gather(*args, async_op=async_op, **kwargs)

    with (
        mock.patch.object(dist, GATHER, begun),
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
        return *compare(None, table, x, want, "all", backend=backend), seen


def work(rank, ranks, folder):
    """Entry of a spawned process: runs all checks, leaves their results in the folder."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["KDA_CACHE_DIR"] = f"{folder}/cache{rank}"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {}
    try:
        for name, check in chain(checks(rank, ranks), cut_checks(rank, ranks, Path(folder))):
            results[name] = check()
    except Exception:  # noqa: BLE001 - the test shows it
        results["crashed"] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def behind_a_busy_gpu(rank, ranks, folder, backend):
    """Entry of a process with a GPU of its own: a call while the GPU has a second's work ahead."""
    torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    lengths = (5000, 300)
    x, want = call("slow", lengths, H=2, HV=4, K=128, V=128, device="cuda")
    table = FragmentTable.contiguous(lengths, ranks)
    cp = ContextParallel(None, table)
    mine = x | {n: table.shard(x[n], rank) for n in TOKENS}
    run = partial(cp.chunk_kda, **mine, output_final_state=True, backend="sm90")
    run()  # compiles, and connects the ranks
    dist.barrier()  # the other host must not compile while this one waits for its word
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
    dist.destroy_process_group()
