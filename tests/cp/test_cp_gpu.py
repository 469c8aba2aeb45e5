"""Plans over kda-sm90 on a Hopper GPU: accuracy, no synchronisation, CUDA graphs, streams, repeats, several GPUs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from helpers import rank_checks, rank_gradients

from kda_core import chunk_kda
from kda_core.contract import FLOAT_TENSORS
from kda_core.registry import record_calls
from kda_core.testing import FAMILIES, error, make_inputs, token_oracle
from kda_cp import Plan

pytestmark = pytest.mark.arch((9, 0))

LENGTHS = (3000, 0, 1500, 100)
PLAN = ((700, 600, 1700), (0,), (400, 300, 800), (100,))
TRAINING = ((512, 1024, 1464), (0,), (512, 988), (100,))
PLANS = pytest.mark.parametrize(
    ("lengths", "plan"),
    [
        pytest.param(LENGTHS, Plan(PLAN), id="exact"),
        pytest.param(LENGTHS, Plan(PLAN, "certified"), id="certified"),
        pytest.param((5000,), Plan(((1700, 900, 1000, 624, 776),), whole_ends=True), id="whole ends"),
        pytest.param(
            (100, 5000, 0, 300),
            Plan(((100,), (1700, 900, 1000, 624, 776), (0,), (300,)), whole_ends=True),
            id="whole ends and others",
        ),
    ],
)


def tensors(family, lengths, seed=0):
    return make_inputs(
        family, sum(lengths), H=2, HV=4, lengths=lengths, initial_state=True, device="cuda", seed=seed
    ).arguments


def call(family="slow", lengths=LENGTHS):
    x = tensors(family, lengths)
    return x | {"cu_seqlens_cpu": x["cu_seqlens"].cpu(), "backend": "sm90", "output_final_state": True}


@PLANS
@pytest.mark.parametrize("family", FAMILIES)
def test_the_errors_of_a_plan_are_close_to_those_of_a_direct_call(family, lengths, plan):
    x = call(family, lengths)
    want = token_oracle(**{n: v for n, v in x.items() if n != "backend"})
    direct = chunk_kda(**x, context_parallel="off")
    with record_calls() as calls:
        o, state = chunk_kda(**x, context_parallel=plan)
    assert [(c.backend, c.device_type, c.planner) for c in calls] == [("sm90", "cuda", "cp")]
    assert error(o, want[0], lengths=lengths) <= 1.2 * error(direct[0], want[0], lengths=lengths)
    assert error(state, want[1], state=True) <= 1.2 * error(direct[1], want[1], state=True)


@PLANS
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch warns that the mode is a prototype
def test_a_plan_does_not_synchronise_with_the_device(lengths, plan):
    x = call(lengths=lengths)
    chunk_kda(**x, context_parallel=plan)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunk_kda(**x, context_parallel=plan)
        chunk_kda(**{n: v for n, v in x.items() if n != "cu_seqlens_cpu"})  # "auto" without lengths
    finally:
        torch.cuda.set_sync_debug_mode("default")


@PLANS
def test_a_captured_graph_computes_new_data(lengths, plan):
    x = call(lengths=lengths)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chunk_kda(**x, context_parallel=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = chunk_kda(**x, context_parallel=plan)
    for seed in (1, 2):
        fresh = tensors("steep", lengths, seed)
        for name, value in fresh.items():
            if torch.is_tensor(value):
                x[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        eager = chunk_kda(**x, context_parallel=plan)
        assert all(torch.equal(a, b) for a, b in zip(captured, eager))


@PLANS
def test_calls_on_several_streams_and_repeats_give_the_same_bits(lengths, plan):
    x = call(lengths=lengths)
    want = chunk_kda(**x, context_parallel=plan)
    torch.cuda.synchronize()
    found = []
    for i in range(20):
        stream = torch.cuda.Stream() if i % 2 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            found.append(chunk_kda(**x, context_parallel=plan))
    torch.cuda.synchronize()
    assert all(torch.equal(o, want[0]) and torch.equal(s, want[1]) for o, s in found)


def training_step(x, disable_recompute):
    """Returns the gradients of a call that kda-cp splits in both directions."""
    leaves = {n: x[n].detach().requires_grad_() for n in FLOAT_TENSORS}
    with record_calls() as calls:
        outputs = chunk_kda(
            **x | leaves, disable_recompute=disable_recompute, context_parallel=Plan(TRAINING)
        )
        found = torch.autograd.grad(outputs, list(leaves.values()), [x["v"], x["initial_state"]])
    assert [(c.entry, c.planner) for c in calls] == [("chunk_fwd", "cp"), ("chunk_bwd", "cp")]
    return found


@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch warns that the mode is a prototype
def test_a_split_training_step_does_not_synchronise_with_the_device(disable_recompute):
    x = call()
    training_step(x, disable_recompute)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training_step(x, disable_recompute)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("disable_recompute", [False, True])
def test_a_captured_split_training_step_computes_new_data(disable_recompute):
    x = call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        training_step(x, disable_recompute)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = training_step(x, disable_recompute)
    for seed in (1, 2):
        fresh = tensors("steep", LENGTHS, seed)
        for name, value in fresh.items():
            if torch.is_tensor(value):
                x[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        eager = training_step(x, disable_recompute)
        assert all(torch.equal(a, b) for a, b in zip(captured, eager))


def need(ranks):
    """Skips the test on a machine with fewer GPUs. ``KDA_REQUIRE_ARCH`` requires an architecture, not a number of GPUs."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"requires {ranks} GPUs, this machine has {torch.cuda.device_count()}")


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_host_does_not_wait_for_a_gpu_if_hosts_agree_through_gloo(ranks, backend, tmp_path):
    need(ranks)
    mp.spawn(rank_checks.behind_a_busy_gpu, (ranks, str(tmp_path), backend), nprocs=ranks)
    for rank in range(ranks):
        o, state, ran, busy = torch.load(tmp_path / f"{rank}.pt")
        assert o < 5e-3 and state < 5e-3 and ran == [("sm90", "cp.distributed")]
        assert busy or backend == "nccl", "the call returned after the GPU had finished"


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_over_several_gpus_are_close_to_those_of_one_process(ranks, backend, tmp_path):
    need(ranks)
    mp.spawn(rank_gradients.on_gpus, (ranks, str(tmp_path), backend), nprocs=ranks)
    for rank in range(ranks):
        for found in torch.load(tmp_path / f"{rank}.pt"):
            errors = found["errors"]
            # A gradient of A_log is a sum over all tokens, which may cancel.
            assert all(e < (0.1 if n == "A_log" else 2e-2) for n, e in errors.items()) and len(errors) == 8, (
                errors
            )
            assert found["backends"] == [("sm90", e, "cp.distributed") for e in ("chunk_fwd", "chunk_bwd")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_example_runs_on_several_gpus(ranks):
    """Over NCCL."""
    need(ranks)
    example = Path(__file__).parents[2] / "examples" / "context_parallel.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(example), "--cuda", "--tokens", "20000", "0", "3001"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(r"rank \d of \d on cuda:\d: .* of o (\S+), of the final states (\S+)", done.stdout)
    assert len(found) == ranks
    assert all(float(o) < 1e-2 and float(state) < 1e-2 for o, state in found)
