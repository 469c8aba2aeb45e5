"""FLA's contexts of context parallelism on kda-cp, over two gloo processes, against one process."""

import pytest
import torch
import torch.multiprocessing as mp
from helpers import fla_contexts
from helpers.inputs import call
from helpers.real_fla import build_cp_context, chunk_kda, integration


def test_two_ranks_have_the_results_and_gradients_of_one_process(tmp_path):
    mp.spawn(fla_contexts.work, (2, str(tmp_path), True), nprocs=2)
    fla_contexts.check([torch.load(tmp_path / f"{r}.pt") for r in range(2)])


@pytest.fixture
def context(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield build_cp_context(torch.tensor([0, 20]), torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_graph": True}, "return_intermediate_states or use_graph"),
        ({"output_final_state": True}, "initial_state or output_final_state"),
        ({"initial_state": torch.zeros(1, 2, 8, 8)}, "initial_state or output_final_state"),
        ({"q": torch.zeros(1, 19, 2, 8)}, "ShapeError"),
    ],
    ids=("graph", "final state", "initial state", "tokens"),
)
def test_calls_with_a_context_that_are_refused(context, changes, words):
    backend = integration.KdaCoreBackend()
    assert backend.chunk_kda_verifier(**call(), cp_context=context) == (True, None)
    accepted, reason = backend.chunk_kda_verifier(**call() | changes, cp_context=context)
    assert not accepted and words in reason


def test_a_context_by_position(context):
    x = call()
    o, state = chunk_kda(*x.values(), None, None, *[False] * 6, None, *[False] * 3, None, None, context)
    wanted, _ = chunk_kda(**x)
    assert state is None
    torch.testing.assert_close(o, wanted)
