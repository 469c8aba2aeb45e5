"""`explain` and the two command lines report the plan and the workspace of the actual call."""

import re

import pytest
import torch

import kda_core.cli
import kda_cp.__main__
from kda_core import chunk_kda, explain
from kda_core.registry import REGISTRY, record_calls
from kda_core.testing import make_inputs
from kda_cp import Constants, Pass, machine
from kda_cp.planner import ContextParallelPlanner

LANES = Pass(((64, 100.0),), 0.01, 0.01, 1.0)  # many idle lanes: long sequences gain
STORED = {"reference": Constants(LANES, 0.1, 0.01), "segmented": Constants(LANES, 0.1, 0.01, LANES, LANES)}


def decided(text):
    """Returns strategy, segments and predicted times from a line of text."""
    return re.search(r"(?:exact|serial) \(.*?\); predicted \d+ us, serial \d+ us", text)[0]


@pytest.mark.parametrize(
    "lengths", [(65536,), (262144,), (8192,), (512,), (50000, 100, 4096), (30000, 30000)]
)
@pytest.mark.parametrize("HV", [4, 32])
def test_both_command_lines_print_the_same_plan(lengths, HV, capsys):
    assert kda_cp.__main__.main(["plan", *map(str, lengths), "--HV", str(HV)]) == 0
    planned = decided(capsys.readouterr().out)
    shape = ["--T", str(*lengths)] if len(lengths) == 1 else ["--lengths", ",".join(map(str, lengths))]
    assert kda_core.cli.main(["explain", "--arch", "9.0", "--H", str(HV), *shape]) == 0
    explained = capsys.readouterr().out
    assert decided(explained) == planned and "backend   sm90" in explained


@pytest.mark.parametrize("backend", ["reference", "segmented"])
@pytest.mark.parametrize("lengths", [None, (1100, 300), (90, 1310), (140,) * 10])
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_call_uses_the_plan_and_the_workspace_that_explain_reports(
    segmented, stored, monkeypatch, backend, lengths, mode
):
    for name, constants in STORED.items():
        stored(("cpu", name, "bfloat16"), constants)
    REGISTRY.refresh()
    ran = []
    run = ContextParallelPlanner.execute

    def watched(self, plan, inputs, outputs, backend):
        ran.append((plan, 0 if outputs.workspace is None else outputs.workspace.numel()))
        return run(self, plan, inputs, outputs, backend)

    monkeypatch.setattr(ContextParallelPlanner, "execute", watched)
    x = make_inputs("memory", 1400, H=1, K=16, V=16, lengths=lengths).arguments
    x |= {"backend": backend, "context_parallel": mode}
    found = explain(**x)
    assert explain(found.shape, backend, mode, lengths) == found
    with record_calls() as calls:
        chunk_kda(**x)
    ((plan, workspace),) = ran or [(None, found.workspace_bytes)]
    assert (calls[0].backend, calls[0].planner) == (backend, "cp" if ran else None)
    if plan is None:
        assert found.plan.startswith("direct")
    else:
        assert found.plan.startswith(f"cp: {plan};") or found.plan == f"cp: {plan}"
    assert found.workspace_bytes == workspace
    if mode == "auto" and lengths == (1100, 300):
        assert plan is not None and plan.is_split

    chunk_kda(**x, workspace=torch.empty(found.workspace_bytes, dtype=torch.uint8))
    assert len(ran) in (0, 2) and len(set(ran)) <= 1  # a workspace of the reported size gives the same plan


@pytest.fixture
def plan(capsys):
    """Returns a function of an architecture: the plan that the command line prints for a long call with four heads."""

    def explained(arch):
        REGISTRY.refresh()  # drops cached plans
        kda_core.cli.main(["explain", "--arch", arch, "--T", "262144", "--H", "4"])
        return re.search("(?m)^plan +(.*)$", capsys.readouterr().out)[1]

    yield explained
    REGISTRY.refresh()


def test_an_absent_gpu_is_explained_as_a_typical_gpu_of_its_architecture(plan):
    assert "NVIDIA H200's shipped constants" in plan("9.0") and plan("9.0").startswith("cp: exact (")
    assert "ratio rule for 148 SMs" in plan("10.0") and plan("10.0").startswith("cp: exact (")
    assert plan("10.3") == "direct (cp: serial (1 sequences); the number of SMs of sm_103 is not known)"


def test_a_present_gpu_is_used_for_its_architecture(plan, monkeypatch):
    """The host has two GPUs, and the second has the architecture of the call."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: [(9, 0), (10, 0)][i])
    monkeypatch.setattr(machine, "gpu", lambda i: [("NVIDIA H200", 132), ("A small B", 20)][i])
    assert "ratio rule for 20 SMs" in plan("10.0")
