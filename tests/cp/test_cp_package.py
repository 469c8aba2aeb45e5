"""The package: its discovery by kda-core, its dependencies and its diagnosis."""

import pickle
from importlib import metadata

import pytest
import torch
from helpers.support import modules_after, prefill
from packaging.requirements import Requirement

from kda_core import BACKEND_ABI, chunk_kda, doctor, explain
from kda_core.abi import compatible
from kda_core.cli import main
from kda_core.registry import record_calls
from kda_cp.distributed import RankError
from kda_cp.plugin import SPEC


def test_the_doctor_lists_the_planner(capsys):
    main(["doctor"])
    assert "planner     cp: ok" in capsys.readouterr().out
    assert compatible(SPEC.abi) and SPEC.abi <= BACKEND_ABI


def test_a_call_without_a_gain_is_explained_as_serial(stored):
    x = prefill()
    with record_calls() as calls:
        o, _ = chunk_kda(**x)
        direct, _ = chunk_kda(**x, context_parallel="off")
    assert [(c.backend, c.planner) for c in calls] == [("reference", None)] * 2
    assert torch.equal(o, direct)
    assert explain(**x).plan.startswith("direct (cp: serial")
    assert explain(**x, context_parallel="off").plan == "direct"


def test_the_package_requires_kda_core_and_filelock_only():
    requirements = [Requirement(r).name for r in metadata.requires("kda-cp") or ()]
    assert sorted(requirements) == ["filelock", "kda-core"]
    imported = modules_after(
        "import kda_core.registry as r; assert r.REGISTRY.planner()[0] == 'cp'; import kda_cp.execute"
    )
    assert "kda_cp" in imported
    assert not imported & {"cutlass", "tvm_ffi", "triton"}


def test_listing_planners_imports_only_the_spec():
    modules_after(
        "import sys, kda_core.registry as r; assert [c.name for c in r.REGISTRY.planners()] == ['cp']\n"
        "assert 'kda_cp.plugin' in sys.modules and 'kda_cp.execute' not in sys.modules"
    )


def test_errors_can_be_pickled():
    for error in (RankError("rank 1 failed"), RankError("ranks disagree", 1)):
        got = pickle.loads(pickle.dumps(error))
        assert type(got) is RankError and got.args == error.args


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"key": ["cpu", "reference", "bfl', "JSONDecodeError"),
        ('{"version": 2}', "expected a list, got a dict"),
        ('[{"key": ["cpu", "reference", "bfloat16"]}]', "KeyError"),
    ],
)
def test_the_doctor_reports_a_damaged_calibration_file(content, words, tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path))
    assert not any("calibration" in p for p in doctor.examine()["problems"])
    file = tmp_path / "cp" / "constants.json"
    file.parent.mkdir()
    file.write_text(content)
    for _ in range(2):  # a problem is reported each time, unlike a warning
        (problem,) = [p for p in doctor.examine()["problems"] if "calibration" in p]
        assert problem.startswith(f"planner cp: calibrations in {file} are ignored") and words in problem
