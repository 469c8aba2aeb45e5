"""`kda_cp.fla_context` with contexts that have the attributes of FLA's. tests/integrations/fla repeats the calls with FLA itself."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import fla_contexts
from helpers.fla_contexts import CASES, LAYOUTS, fake_context, shard

from kda_core.errors import ArgumentError
from kda_cp import fla_context
from kda_cp.distributed import FragmentTable


def tables_of(lengths, ranks, layout):
    """Returns the table that the ranks make of their contexts, and kda-cp's own."""
    by_rank = [fla_context.intervals(fake_context(lengths, r, ranks, layout)) for r in range(ranks)]
    return fla_context.table(by_rank), getattr(FragmentTable, layout)(lengths, ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "lengths", [*CASES, (5, 0, 19), (0, 24, 0), (23, 1), (1,) * 24, (7, 1, 1, 15)], ids=str
)
def test_the_ranks_make_the_table_of_the_whole_from_their_own_sequences(lengths, ranks, layout):
    found, wanted = tables_of(lengths, ranks, layout)
    kept = [n for n, length in enumerate(lengths) if length]  # FLA drops sequences without tokens
    assert found.lengths == tuple(lengths[n] for n in kept)
    positions = torch.arange(sum(lengths)).view(1, -1)
    for rank in range(ranks):
        own = [(kept[f.sequence], f.start, f.stop) for f in found.of_rank(rank)]
        held = [(f.sequence, f.start, f.stop) for f in wanted.of_rank(rank) if f.stop > f.start]
        assert own == held
        assert torch.equal(found.shard(positions, rank), shard(positions, rank, ranks, layout))


def test_offsets_come_from_the_device_without_a_host_copy():
    context = fake_context((10, 30, 56), 1, 2, "zigzag")
    wanted = fla_context.intervals(context)
    context.cu_seqlens_cpu = None
    assert fla_context.intervals(context) == wanted


@pytest.mark.parametrize("offsets", [[0], [3, 96], [0, 40, 40, 96], [0, 50, 40]])
def test_offsets_that_do_not_increase_are_refused(offsets):
    context = fake_context((96,), 0, 1, "contiguous")
    context.cu_seqlens_cpu = torch.tensor(offsets)
    with pytest.raises(ArgumentError, match="cp_context.cu_seqlens: expected offsets from 0 that increase"):
        fla_context.intervals(context)


def test_parts_of_a_zigzag_that_do_not_fit_are_refused():
    context = fake_context((10, 30, 56), 0, 2, "zigzag")
    context.front_num_seqs += 1
    with pytest.raises(ArgumentError, match="expected two parts of 24 tokens, the first with 3 sequences"):
        fla_context.intervals(context)


def test_intervals_that_do_not_fit_together_are_refused():
    first, second = (fla_context.intervals(fake_context((96,), r, 2, "contiguous")) for r in range(2))
    with pytest.raises(
        ArgumentError, match="cp_context: expected intervals that agree on which sequences continue"
    ):
        fla_context.table([first, first])
    with pytest.raises(
        ArgumentError, match="cp_context: expected intervals that agree on which sequences continue"
    ):
        fla_context.table([second, first])
    with pytest.raises(ArgumentError, match="cp_context: expected the same layout on all ranks"):
        fla_context.table([first, second * 2])


def test_contexts_that_cannot_be_served_have_a_reason():
    context = fake_context((96,), 0, 1, "contiguous")
    assert fla_context.refusal(context) is None
    for name, value, words in (
        ("cu_seqlens", None, "without cu_seqlens"),
        ("layout", "striped", "with the layout 'striped'"),
        ("group", None, "without a process group"),
    ):
        setattr(context, name, value)
        assert words in fla_context.refusal(context)


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_context_has_one_context_parallel_until_it_is_deleted(alone):
    context, other = (fake_context((10, 30, 56), 0, 1, "zigzag", alone) for _ in range(2))
    before = len(fla_context._known)
    cp = fla_context.context_parallel(context)
    assert cp.table.fragments == FragmentTable.contiguous((10, 30, 56), 1).fragments
    assert fla_context.context_parallel(context) is cp is not fla_context.context_parallel(other)
    assert len(fla_context._known) == before + 2
    del context, other
    gc.collect()
    assert len(fla_context._known) == before


@pytest.mark.parametrize("name", ["return_intermediate_states", "use_graph"])
def test_what_a_context_excludes_is_refused_by_name(alone, name):
    x, _, _ = fla_contexts.arguments((96,))
    context = fake_context((96,), 0, 1, "contiguous", alone)
    with pytest.raises(ArgumentError, match=f"{name}: expected False with cp_context"):
        fla_context.chunk_kda(**x, **fla_contexts.GATE, cp_context=context, **{name: True})


def test_two_ranks_have_the_results_and_gradients_of_one_process(tmp_path):
    mp.spawn(fla_contexts.work, (2, str(tmp_path), False), nprocs=2)
    fla_contexts.check([torch.load(tmp_path / f"{r}.pt") for r in range(2)])
