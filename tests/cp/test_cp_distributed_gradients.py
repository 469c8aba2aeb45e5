"""Gradients over 2 and 3 gloo processes on the CPU, against those of one process."""

import re

import pytest
import torch
import torch.multiprocessing as mp
from helpers import rank_gradients

from kda_cp.distributed import FragmentTable

AUTOMATIC = [("forward", "chunk_fwd", "cp.distributed"), ("reference", "chunk_bwd", "cp.distributed")]


@pytest.fixture(scope="module", params=[2, 3])
def results(request, tmp_path_factory):
    """Returns the results of the checks of each rank, for a group of this size."""
    ranks = request.param
    folder = tmp_path_factory.mktemp(f"gradients{ranks}")
    mp.spawn(rank_gradients.work, (ranks, str(folder)), nprocs=ranks)
    found = [torch.load(folder / f"{r}.pt") for r in range(ranks)]
    crashes = [r["crashed"] for r in found if "crashed" in r]
    assert not crashes, crashes[0]
    return found


def compared(results, prefix):
    """Yields (rank, rest of the name, result) of the comparisons whose names start with a prefix."""
    for rank, found in enumerate(results):
        for name, value in found.items():
            if name.startswith(prefix):
                yield rank, name.removeprefix(prefix), value


def exact(errors):
    """Returns whether errors are those of fp64. A_log and dt_bias are fp32."""
    return all(e < (1e-6 if n in ("A_log", "dt_bias") else 1e-13) for n, e in errors.items())


def test_every_table_has_the_gradients_of_one_process(results):
    ranks = len(results)
    tables, names = rank_gradients.tables(ranks), set()
    for rank, name, found in compared(results, "compare "):
        table_name, on = name.rsplit(" ", 1)
        table = tables[table_name]
        assert exact(found["errors"]) and len(found["errors"]) == 6, (rank, name, found)
        assert found["backends"] == (AUTOMATIC if table.of_rank(rank) else []), (rank, name)
        # An agreement and a gather; on all ranks, an agreement and a sum before.
        expected = (table.crosses or on == "all") + table.crosses + 2 * (on == "all")
        assert found["collectives"] == expected, (rank, name)
        names.add(name)
    assert len(names) == 12


def test_every_form_of_a_call_has_the_gradients_of_one_process(results):
    counts = set()
    for rank, name, found in compared(results, "form "):
        small = max(found["errors"].values()) < 1e-6 if name == "fp32" else exact(found["errors"])
        assert small and found["backends"] == AUTOMATIC, (rank, name, found)
        if name.startswith("of "):
            assert set(found["errors"]) == set(name.split()[1:])
        counts.add(name)
    assert len(counts) == 12


def test_gradients_pass_through_several_layers_and_microbatches(results):
    for found in results:
        first, second = found["layers"]
        assert first == second < 1e-6


def test_gradients_in_bf16_are_within_the_limits_of_the_kit(results):
    for found in results:
        ratios = found["limits"]
        assert len(ratios) == 8 and all(ratio < 1 and norm > 0 for ratio, norm in ratios.values()), ratios


@pytest.mark.parametrize("backend", ["writing", "old-writing", "merging"])
def test_a_backend_that_is_named_serves_forward_and_backward(results, backend):
    for found in results:
        value = found[f"backend {backend}"]
        assert max(value["errors"].values()) < 2e-6 and len(value["errors"]) == 8
        assert value["backends"] == [
            (backend, entry, "cp.distributed") for entry in ("chunk_fwd", "chunk_bwd")
        ]


def test_a_named_backend_without_a_backward_is_refused_on_all_ranks(results):
    for rank, found in enumerate(results):
        name, message = found["no backward"]
        assert name == ("BackendUnsupportedError" if rank == len(results) - 1 else "RankError")
        assert (
            "backend 'forward' (chosen by backend=) cannot serve this call: unsupported: backward" in message
        )
        assert "without gradients (torch.no_grad(), detach()) forward serves this call" in message


@pytest.mark.parametrize("backend", ["reference", "merging"])
def test_fragments_that_the_forward_cuts_have_the_gradients_of_one_process(results, backend):
    for found in results:
        value = found[f"cut {backend}"]
        assert max(value["errors"].values()) < 2e-6, value
        assert [b for b, *_ in value["backends"]] == [backend] * 2
        assert value["cut"] > 4  # segments of the forward


@pytest.mark.parametrize("on", ["owner", "all"])
@pytest.mark.parametrize("when", ["computes gradients of states", "allocates"])
def test_an_error_before_the_exchange_of_a_backward_raises_on_all_ranks(results, when, on):
    check_failure([found[f"fails as it {when}, {on}"] for found in results])


def test_an_error_before_gradients_of_final_states_are_added_raises_on_all_ranks(results):
    check_failure([found["fails before the sum"] for found in results])


def check_failure(by_rank):
    """The last rank raises its own error, the others name it, and all can repeat the backward and call again."""
    last = len(by_rank) - 1
    for rank, (first, again, call) in enumerate(by_rank):
        assert again is None and call is None
        if rank == last:
            assert first == ("MemoryError", "no memory")
            continue
        name, message = first
        assert name == "RankError" and message.endswith(f": rank {last} failed: MemoryError: no memory")
        assert re.match(r"the backward of call 1 of ContextParallel \d+ tagged 'layer 3'", message)


def test_a_rank_that_failed_alone_in_a_backward_disagrees_with_the_next_call(results):
    last = len(results) - 1
    for rank, found in enumerate(results):
        first, again, (name, message) = found["fails afterwards"]
        assert first == (("MemoryError", "no memory") if rank == last else None) and again is None
        assert name == "RankError" and re.search(rf"call is 2 on .* but 1 on rank {last}\.", message)


def test_inputs_that_require_grad_on_some_ranks_only_raise(results):
    for found in results:
        name, message = found["trained on some"]
        assert name == "RankError" and f"but False on rank {len(results) - 1}" in message
        assert "needs_backward is True on rank" in message


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("calls", r"ranks disagree: call is 1 on rank 0 but 2 on .*\. All ranks must run the backwards of the same calls"),
        ("instances", "ranks disagree: tag is 'a' on rank 0 but 'b' on rank"),
        ("call and backward", "step is running the backward of chunk_kda on rank 0 but calling chunk_kda on"),
    ],
)  # fmt: skip
def test_backwards_in_another_order_raise(results, what, words):
    for found in results:
        errors = found[f"order of {what}"]
        assert [name for name, _ in errors] == ["RankError"] * 2
        assert re.search(words, errors[0][1]), errors


def test_a_call_without_gradients_plans_no_backward_and_has_the_same_bits(results):
    assert all(found["no grad"] is True for found in results)


def test_a_repeated_and_a_checkpointed_backward_have_the_same_bits(results):
    assert all(found["again"] is True for found in results)


def test_second_derivatives_and_forward_mode_are_refused_by_name(results):
    for found in results:
        for name, message in found["forward mode"]:
            assert (
                name == "DerivativeError" and "forward-mode AD is not supported: v has a tangent" in message
            )
        name, message = found["second derivative"]
        assert name == "DerivativeError" and message.startswith("second derivatives are not supported")


def test_a_backward_that_exchanges_nothing_waits_for_no_rank(results):
    assert not FragmentTable.document_aligned(rank_gradients.LENGTHS, len(results)).crosses
    assert all(found["alone"] is True for found in results)
