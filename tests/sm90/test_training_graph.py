"""A CUDA graph of a whole training step, forward and backward of `chunk_kda`: replays have the bits of eager steps on the same values."""

import pytest
import torch

from kda_core import chunk_kda
from kda_core.contract import FLOAT_TENSORS
from kda_core.registry import record_calls
from kda_core.testing import make_inputs

T = 1500
LENGTHS = (700, 0, 64, 736)
GRAPH = {"use_graph": True, "max_num_seqs": 4}
#: The lengths of packed sequences in each of three steps, and the options of the calls.
FORMS = {
    "fixed": (None, {}),
    "packed": ([LENGTHS] * 3, {}),
    "packed, other lengths in each replay": ([LENGTHS, (5, 1400, 95, 0), (0, 0, 1500, 0)], GRAPH),
    "packed, padding in a replay": ([LENGTHS, (600, 64, 0, 36), (0, 1, 0, 0)], GRAPH),
}


def draw(seed, lengths):
    """Returns the tensors of a call, the gradients of its outputs, and its options. Tokens behind the last sequence are padding."""
    padding = T - sum(lengths) if lengths else 0
    all_lengths = (*lengths, padding) if padding else lengths
    x = make_inputs(
        "slow", T, H=2, HV=4, seed=seed, lengths=all_lengths, initial_state=True, device="cuda"
    ).arguments
    if padding:
        x |= {n: x[n][:-1] for n in ("cu_seqlens", "initial_state")}
    tensors = {n: y for n, y in x.items() if isinstance(y, torch.Tensor)}
    rng = torch.Generator().manual_seed(seed)
    grads = {f"grad of {n}": torch.randn(x[n].shape, generator=rng).to(x[n]) for n in ("v", "initial_state")}
    return tensors | grads, {n: y for n, y in x.items() if n not in tensors}


def step(tensors, options):
    """Runs forward and backward; returns the outputs and the gradients by name."""
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items() if n in FLOAT_TENSORS}
    grads = [t for n, t in tensors.items() if n.startswith("grad of ")]
    call = {n: t for n, t in (tensors | leaves).items() if not n.startswith("grad of ")}
    o, state = chunk_kda(**call, **options, output_final_state=True)
    found = torch.autograd.grad((o, state), [*leaves.values()], grads)
    return {"o": o.detach(), "final_state": state.detach()} | dict(zip(leaves, found, strict=True))


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("dense", (False, True), ids=("default", "disable_recompute"))
@pytest.mark.parametrize("form", FORMS)
def test_replays_of_a_training_step_have_the_bits_of_eager_steps(form, dense):
    lengths, options = FORMS[form]
    problems = [draw(seed, lengths and lengths[seed]) for seed in range(3)]
    options = problems[0][1] | options | {"disable_recompute": dense}
    values = [tensors for tensors, _ in problems]
    want = [step(tensors, options) for tensors in values]
    static = {n: t.clone() for n, t in values[0].items()}
    graph = torch.cuda.CUDAGraph()
    with record_calls() as calls, torch.cuda.graph(graph):
        found = step(static, options)
    assert [(c.backend, c.entry) for c in calls] == [("sm90", "chunk_fwd"), ("sm90", "chunk_bwd")]
    for number in (0, 1, 2, 0):
        for name, t in static.items():
            t.copy_(values[number][name])
        graph.replay()
        torch.cuda.synchronize()
        used = sum(lengths[number]) if lengths else T  # tokens of no sequence have no output
        for name, expected in want[number].items():
            got, expected = (y[:, :used] if name == "o" else y for y in (found[name], expected))
            assert torch.equal(got, expected), (number, name)
