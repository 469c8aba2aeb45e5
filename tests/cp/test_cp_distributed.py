"""Fragment tables, and calls over 2 to 4 gloo processes on the CPU against the fp64 oracle."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from helpers import rank_checks
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_core.errors import ArgumentError
from kda_cp.distributed import Fragment, FragmentTable

EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel.py"

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=6).map(tuple)


# ---- tables


@settings(deadline=None)
@given(
    sizes,
    st.integers(1, 5),
    st.sampled_from([FragmentTable.contiguous, FragmentTable.zigzag, FragmentTable.document_aligned]),
)
def test_a_table_contains_every_token_once(lengths, ranks, make):
    table = make(lengths, ranks)
    x = torch.arange(sum(lengths)).view(1, -1)
    shards = [table.shard(x, r) for r in range(ranks)]
    assert torch.equal(torch.cat(shards, 1).sort().values, x) and torch.equal(table.unshard(shards), x)
    assert sorted(n for r in range(ranks) for n in table.owned(r)) == list(range(len(lengths)))
    if make == FragmentTable.document_aligned or ranks == 1:
        assert not table.crosses
    else:
        held = [p.shape[1] for p in shards]
        assert max(held) - min(held) <= 2
    if make == FragmentTable.contiguous:
        assert torch.equal(torch.cat(shards, 1), x)


def test_a_zigzag_table_pairs_early_and_late_blocks():
    table = FragmentTable.zigzag((80,), 2)
    assert [(f.rank, f.start, f.stop) for f in table.of_sequence(0)] == [(0, 0, 20), (1, 20, 60), (0, 60, 80)]


@pytest.mark.parametrize(
    ("ranks", "fragments", "words"),
    [
        (2, [(0, 0, 0, 5), (1, 0, 6, 10)], "each of the 10 tokens of sequence 0"),
        (2, [(0, 0, 0, 6), (1, 0, 5, 10)], "each of the 10 tokens"),
        (2, [(0, 0, 0, 10), (1, 0, 10, 10)], "each of the 10 tokens"),
        (2, [(0, 0, 0, 9)], "each of the 10 tokens"),
        (2, [], "each of the 10 tokens"),
        (2, [(2, 0, 0, 10)], "ranks below 2"),
        (2, [(0, 1, 0, 10)], "sequences below 1"),
        (0, [], "ranks: expected an integer of at least 1"),
    ],
)
def test_an_invalid_table_raises(ranks, fragments, words):
    with pytest.raises(ArgumentError, match=words):
        FragmentTable((10,), ranks, tuple(Fragment(*f) for f in fragments))


@pytest.mark.parametrize(
    "make", [FragmentTable.contiguous, FragmentTable.zigzag, FragmentTable.document_aligned]
)
@pytest.mark.parametrize(
    ("lengths", "ranks", "words"),
    [((-5, 10), 2, "lengths: expected"), ((2.5,), 2, "lengths: expected"), ((10,), 0, "ranks: expected"), ((10,), 1.5, "ranks: expected")],
)  # fmt: skip
def test_invalid_lengths_and_ranks_raise(make, lengths, ranks, words):
    with pytest.raises(ArgumentError, match=words):
        make(lengths, ranks)


def test_equal_tables_have_equal_digests_whatever_their_integer_types():
    fragments = [Fragment(np.int64(0), 0, 0, torch.tensor(10))]
    other = FragmentTable([np.int32(10)], 1, fragments)
    assert other == FragmentTable.contiguous((10,), 1)
    assert other.digest() == FragmentTable.contiguous((10,), 1).digest()


def test_shard_checks_the_rank_and_unshard_the_shards():
    table, x = FragmentTable.contiguous((10,), 2), torch.arange(10).view(1, 10)
    for rank in (-1, 2):
        with pytest.raises(ArgumentError, match="rank: expected an integer from 0 to 1"):
            table.shard(x, rank)
    shards = [table.shard(x, r) for r in range(2)]
    for wrong in (shards[:1], [*shards, shards[0]], [shards[0], shards[1][:, :3]], [p[0] for p in shards]):
        with pytest.raises(ArgumentError, match="shards: expected"):
            table.unshard(wrong)


# ---- ranks


@pytest.fixture(scope="module", params=[2, 3, 4])
def results(request, tmp_path_factory):
    """Returns the results of the checks of each rank, for a group of this size."""
    ranks = request.param
    folder = tmp_path_factory.mktemp(f"ranks{ranks}")
    mp.spawn(rank_checks.work, (ranks, str(folder)), nprocs=ranks)
    found = [torch.load(folder / f"{r}.pt") for r in range(ranks)]
    crashes = [r["crashed"] for r in found if "crashed" in r]
    assert not crashes, crashes[0]
    return found


def test_every_table_agrees_with_the_oracle(results):
    ranks = len(results)
    tables = rank_checks.tables(ranks)
    compared = 0
    for rank, found in enumerate(results):
        for name, value in found.items():
            if not isinstance(value, dict) or name.startswith("cut "):
                continue
            assert value["o"] < 5e-3 and value["state"] < 1e-5, (rank, name, value)
            table = next((t for n, t in tables.items() if f" {n} " in name), None)
            holds_tokens = table is None or table.of_rank(rank)
            assert value["backends"] == ([("reference", "cp.distributed")] if holds_tokens else []), (
                rank,
                name,
            )
            if table is not None:
                on_all = name.endswith(" all")
                agreements = table.crosses or on_all
                # With " all", also the agreement that all ranks completed, and the gather of the states.
                expected = agreements + table.crosses + 2 * on_all
                assert value["collectives"] == expected, (rank, name)
            compared += 1
    assert compared == ranks * 41


def test_ranks_cut_their_fragments_into_segments(results):
    cut_further = {"reference": 0, "segmented": 0, "merging": 0}
    for rank, own in enumerate(results):
        cut = {tuple(name.split()[1:]): x for name, x in own.items() if name.startswith("cut ")}
        assert len(cut) == 27
        for (_, table, backend), found in cut.items():
            assert found["o"] < 5e-3 and found["state"] < 1e-5, (rank, table, backend)
            assert {b for b, _ in found["backends"]} <= {backend} and found["collectives"] == 4
            methods = [method for method, _ in found["calls"]]
            if backend != "reference":
                assert methods.count("summarize") == methods.count("execute_segments")
            merges = "summarize" in methods and backend == "merging"
            assert ("merge_segments" in methods) == merges, (rank, table, backend)
            # A rank computes its own sequences while summaries arrive, and the others afterwards.
            if table == "separate" and rank < 2:
                after = methods[methods.index("gather") + 1 : -1]
                assert methods[0] != "gather" and methods[-1] == "gather" and len(after) >= 2
            cut_further[backend] += max((n for _, n in found["calls"]), default=0) > 4
    assert all(n >= 2 for n in cut_further.values()), cut_further


def test_a_rank_plans_again_only_after_a_refresh(results):
    for found in results:
        first, again, refreshed = found["plans"]
        assert first >= 1 and again == first and refreshed == 2 * first


def test_repeated_calls_and_zero_initial_states_give_the_same_bits(results):
    assert all(r["same bits"] is True and r["none is zeros"] is True for r in results)


@pytest.mark.parametrize(
    ("check", "guilty", "kind", "own", "others"),
    [
        ("bad shape", 1, "ShapeError", "g: expected", "rank 1 failed: ShapeError: g: expected"),
        (
            "a rank cannot allocate its memory",
            -1,
            "MemoryError",
            "no memory",
            "failed: MemoryError: no memory",
        ),
        ("a rank runs out of memory", -1, "MemoryError", "no memory", "failed: MemoryError: no memory"),
        (
            "invalid final_state_on",
            -1,
            "ArgumentError",
            "'owner' or 'all'",
            "failed: ArgumentError: final_state_on: expected 'owner' or 'all'",
        ),
        ("no tensor", -1, "DtypeError", "beta: expected a torch.Tensor", "failed: DtypeError: beta"),
        ("no table", -1, "ArgumentError", "table: expected a FragmentTable", "failed: ArgumentError: table"),
        ("no tag", 1, "ArgumentError", "tag: expected a str or None", "rank 1 failed: ArgumentError: tag"),
    ],
)
def test_an_error_on_one_rank_raises_on_all_ranks(results, check, guilty, kind, own, others):
    for rank, found in enumerate(results):
        name, message = found[check]
        if rank == guilty % len(results):
            assert name == kind and own in message
        else:
            assert name == "RankError" and others in message


def listed(ranks):
    """Returns a range of ranks in the words of error messages."""
    first, last = ranks[0], ranks[-1]
    if first == last:
        return f"rank {first}"
    return f"ranks {first} {'and' if last == first + 1 else 'to'} {last}"


def test_a_disagreement_raises_on_all_ranks(results):
    others, last = listed(range(1, len(results))), len(results) - 1
    for found in results:
        name, message = found["other option"]
        assert name == "RankError"
        differing = f": ranks disagree: scale is 2.0 on rank 0 but 0.25 on {others}"
        assert message.endswith(differing), message  # no field that is equal
        name, message = found["other table"]
        assert name == "RankError" and re.search(
            "disagree: table is sequences=1 tokens=211 fragments=", message
        )
        name, message = found["table for more"]
        assert name == "ArgumentError" and f"a table for {len(results)} ranks" in message
        name, message = found["other final_state_on"]
        assert name == "RankError"
        assert message.endswith(
            f"disagree: final_state_on is 'owner' on {listed(range(last))} but 'all' on rank {last}"
        )
        name, message = found["no final states"]
        assert name == "RankError"
        assert message.endswith(
            f"disagree: output_final_state is True on {listed(range(last))} but False on rank {last}"
        )


@pytest.mark.parametrize("tables", ["same summaries", "other summaries", "same table"])
def test_a_different_order_of_calls_raises_on_all_ranks(results, tables):
    for found in results:
        for name, message in found[f"order: {tables}"]:
            assert name == "RankError" and "disagree: ContextParallel is " in message, message
            assert message.endswith("construct and call the same ContextParallels in the same order")
            assert ("; table is " in message) == (tables != "same table") and "scale" not in message


def test_tags_identify_instances(results):
    others = listed(range(1, len(results)))
    for rank, found in enumerate(results):
        before, o = found["order: tagged"]
        assert [name for name, _ in before] == ["RankError"] * 2
        assert f"tag is 'layer 1' on rank 0 but 'layer 0' on {others}" in before[0][1]
        mine = "layer 1" if rank == 0 else "layer 0"
        assert re.match(rf"call 1 of ContextParallel \d+ tagged '{mine}': ", before[0][1])
        assert o < 5e-3  # in the same order the calls succeed
        for (name, message), tags in zip(found["order: constructed"], ("ab", "ba")):
            assert name == "RankError"
            assert f"disagree: tag is '{tags[0]}' on rank 0 but '{tags[1]}' on {others}." in message


def test_constructing_an_instance_while_others_call_one_raises(results):
    others = listed(range(1, len(results)))
    for found in results:
        (name, message), (name2, message2) = found["order: constructed and called"]
        assert name == name2 == "RankError"
        differing, constructs = "ranks disagree: step is ", "constructing a ContextParallel"
        assert f"{differing}calling chunk_kda on rank 0 but {constructs} on {others}. All" in message
        assert f"{differing}{constructs} on rank 0 but calling chunk_kda on {others}. All" in message2


def test_a_rank_that_failed_alone_disagrees_with_the_next_call_of_the_others(results):
    others, last = listed(range(len(results) - 1)), len(results) - 1
    for rank, found in enumerate(results):
        first, second = found["out of step"]
        assert first == (("MemoryError", "no memory") if rank == last else None)
        assert (
            second[0] == "RankError" and f"disagree: call is 2 on {others} but 1 on rank {last}." in second[1]
        )


def test_a_dead_rank_causes_a_rank_error(tmp_path):
    mp.spawn(rank_checks.deaths, (6, str(tmp_path)), nprocs=6)
    found = torch.load(tmp_path / "0.pt")
    call = r"call 1 of ContextParallel \d+ tagged 'layer 7'"
    where = {1: "ContextParallel tagged 'layer 7'", 2: call, 3: call, 5: f"the backward of {call}"}
    name, message = found.pop(4)
    # Rank 0 raises its own error, not a RankError.
    assert name == "DtypeError" and "beta: expected a torch.Tensor" in message
    for dead, (name, message) in found.items():
        assert name == "RankError"
        assert re.match(f"{where[dead]}: rank 0 cannot reach rank 1, which died", message), message
        assert "restart all ranks" in message and "pass a longer timeout to init_process_group" in message


# ---- the example


def test_the_example_runs_under_torchrun():
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        str(EXAMPLE),
    ]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--tokens", "150", "21"], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"rank (\d) of 3 on cpu: .* of o (\S+), of the final states (\S+)", done.stdout)
    assert {rank for rank, _, _ in found} == {"0", "1", "2"}
    assert all(float(o) < 5e-3 and float(state) < 1e-5 for _, o, state in found)
