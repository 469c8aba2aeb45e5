"""kda-cp as it stands: installed, listed with its reason, and out of the way of every call."""

from importlib import metadata

import pytest
import torch
from packaging.requirements import Requirement
from support import modules_after, prefill

from kda_core import chunk_kda, explain
from kda_core.cli import main
from kda_core.errors import PlannerError
from kda_core.registry import record_calls
from kda_cp.plugin import SPEC

NO_PLANNER = "this version of kda-cp has no planner yet"


def test_the_doctor_lists_it_with_the_reason(capsys):
    main(["doctor"])
    assert f"cp: unsupported: {NO_PLANNER}" in capsys.readouterr().out
    assert SPEC.unavailable == NO_PLANNER


def test_calls_run_as_if_it_were_not_there():
    x = prefill()
    with record_calls() as calls:
        o, _ = chunk_kda(**x)
        direct, _ = chunk_kda(**x, context_parallel="off")
    assert [(c.backend, c.planner) for c in calls] == [("reference", None)] * 2
    assert torch.equal(o, direct)
    assert explain(**x).plan == "direct"


def test_a_plan_is_refused_rather_than_ignored():
    class Plan:
        def to_json(self):
            return "{}"

    with pytest.raises(PlannerError, match="no planner is installed and on"):
        chunk_kda(**prefill(), context_parallel=Plan())


def test_it_brings_nothing_but_the_core():
    assert [Requirement(r).name for r in metadata.requires("kda-cp") or ()] == ["kda-core"]
    imported = modules_after(
        "import kda_core.registry as r; assert [c.name for c in r.REGISTRY.planners()] == ['cp']"
    )
    assert "kda_cp" in imported
    assert not imported & {"cutlass", "tvm_ffi", "triton"}
