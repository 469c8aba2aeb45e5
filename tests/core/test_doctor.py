"""`doctor` reports everything that would fail, and never fails itself."""

import json
import os
import platform
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from kda_core import BACKEND_ABI, chunk_kda, doctor, install, requirements
from kda_core.cli import main
from kda_core.errors import KdaError
from kda_core.registry import REGISTRY

KEYS = [
    "python", "platform", "abi", "versions", "requirements", "cuda", "gpus", "diagnostics", "cache", "environment",
    "backends", "planners", "commands", "calls", "problems", "unchecked",
]  # fmt: skip

PLANNER = f"""
from kda_core.backend import PlannerSpec
SPEC = PlannerSpec(name="plans", abi={BACKEND_ABI!r}, target="fake_plans_backend:Plans", install="pip install plans")
"""
PLANS = """
class Plans:
    def plan(self, inputs, spec, backend):
        return None

    def plan_from_json(self, text):
        raise NotImplementedError

    def execute(self, plan, inputs, outputs, backend):
        raise NotImplementedError
"""


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    """Removes this project's variables from the environment and sets a separate cache folder."""
    for name in [name for name in os.environ if name.startswith("KDA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch see one GPU of a compute capability."""

    def see(*capability):
        major, minor = capability
        properties = types.SimpleNamespace(
            name="A GPU", major=major, minor=minor, total_memory=2**34, multi_processor_count=2
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)

    return see


def problems():
    return doctor.examine()["problems"]


def cpu_call_fails():
    x = torch.rand(1, 4, 1, 8)
    try:
        chunk_kda(x, x, x, -x, x[..., 0])
    except KdaError:
        return True
    return False


def test_the_report_as_json_and_as_text(capsys):
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert sorted(report) == sorted(KEYS) and code == (1 if report["problems"] else 0)
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    assert "call        on cpu: reference (choice: automatic), direct" in text
    end = text.splitlines()[-1]
    assert end == ("no problems found" if not code else end) and len(report["problems"]) == text.count(
        "PROBLEM "
    )


# ---- the environment


@pytest.mark.parametrize(
    ("name", "value", "said", "fails"),
    [
        ("KDA_CP", "maybe", "KDA_CP: expected 1/true/yes/on or 0/false/no/off, got 'maybe'", True),
        ("KDA_DISABLE_JIT", "2", "KDA_DISABLE_JIT: expected 1/true/yes/on or 0/false/no/off, got '2'", False),
        ("KDA_BACKEND", "nope", "KDA_BACKEND: backend 'nope' is not installed", True),
        ("KDA_BACKEND", "reference,nope", "KDA_BACKEND: backend 'nope' is not installed", True),
        ("KDA_BACKENDS", "reference", "KDA_BACKENDS is set, but no such variable exists; KDA_BACKEND does", False),
    ],
)  # fmt: skip
def test_variables_that_make_calls_fail_are_problems(install, monkeypatch, name, value, said, fails):
    install("plans", group="kda_core.planners", source=PLANNER, backend=PLANS)
    assert not cpu_call_fails() and not any("KDA_" in p for p in problems())
    monkeypatch.setenv(name, value)
    found = problems()
    assert any(said in p for p in found)
    assert cpu_call_fails() is fails
    assert any(p.startswith("a standard call on cpu fails: ") for p in found) is fails
    assert main(["doctor"]) == 1


def test_a_backend_named_by_the_environment_that_serves_no_call_is_a_problem(install, monkeypatch):
    install("far", archs={(7, 5)})
    monkeypatch.setenv("KDA_BACKEND", "far")
    (problem,) = [p for p in problems() if "standard call on cpu" in p]
    assert "on cpu fails" in problem and "far  wrong-arch: runs on sm_75" in problem


# ---- devices


def test_a_gpu_without_a_backend_is_no_problem(gpu):
    before = problems()
    gpu(7, 5)
    report = doctor.examine()
    assert report["problems"] == before
    (call,) = [c for c in report["calls"] if c["device"] == "sm_75"]
    assert call["backend"] is None and "no backend serves this call on cuda (sm_75)" in call["error"]
    assert "call        on sm_75: no backend (choice: automatic), none" in doctor.show(report)


def test_a_gpu_whose_backend_refuses_the_call_is_a_problem(install, gpu):
    install("picky", archs={(7, 5)}, refuses="not today")
    gpu(7, 5)
    (problem,) = [p for p in problems() if "standard call" in p]
    assert problem.startswith("a standard call on sm_75 fails: ") and "unsupported: not today" in problem


def test_a_device_that_the_environment_excludes_is_no_problem(install, gpu, monkeypatch):
    install("far", archs={(7, 5)})
    gpu(7, 5)
    monkeypatch.setenv("KDA_BACKEND", "far")
    report = doctor.examine()
    assert [(c["device"], c["backend"]) for c in report["calls"]] == [("cpu", None), ("sm_75", "far")]
    assert not [p for p in report["problems"] if "standard call" in p]


def test_the_table_of_gpus_agrees_with_the_installed_backends():
    ours = [c for c in REGISTRY.backends() if c.distribution in install.GPUS.values()]
    declared = {arch: c.distribution for c in ours for arch in c.spec.archs}
    installed = {c.distribution for c in ours}
    assert declared == {arch: name for arch, name in install.GPUS.items() if name in installed}


def test_a_driver_that_torch_cannot_use_is_a_problem(monkeypatch):
    def available():
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", available)
    assert "CUDA: CUDA initialization: The NVIDIA driver on your system is too old" in problems()


def test_a_torch_without_cuda_and_a_gpu_backend_are_a_problem(install, monkeypatch):
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: "580.65.06")
    monkeypatch.setattr(torch.version, "cuda", None)
    install("far", archs={(7, 5)})
    (problem,) = [p for p in problems() if "built for CPUs only" in p]
    assert "NVIDIA driver (580.65.06)" in problem
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not any("built for CPUs only" in p for p in problems())


# ---- the cache


def test_a_cache_that_cannot_be_written_is_a_problem(monkeypatch, tmp_path):
    assert not any("cache" in p for p in problems())
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("KDA_CACHE_DIR", str(file))
    assert any(str(file) in p for p in problems())


def test_a_cache_that_others_may_write_is_a_problem(monkeypatch, tmp_path):
    folder = tmp_path / "everybodys"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("KDA_CACHE_DIR", str(folder))
    (problem,) = [p for p in problems() if str(folder) in p]
    assert "written by others" in problem and "0777" in problem


def test_a_missing_home_directory_is_a_problem(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KDA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert any("Could not determine home directory" in p for p in problems())


# ---- versions


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Replaces the installed distributions by fake ones. ``add(name, version, *lines of METADATA)`` writes one."""

    def add(name, version, *lines, entry_points=""):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""])
        )
        (info / "entry_points.txt").write_text(entry_points)

    found = requirements.metadata.distributions
    monkeypatch.setattr(requirements.metadata, "distributions", lambda: found(path=[str(tmp_path)]))
    yield add
    monkeypatch.undo()
    REGISTRY.refresh()


def version_problems():
    return [p for p in problems() if " needs " in p or "requirement" in p]


def test_versions_outside_required_ranges_are_problems(site):
    site("kda-core", "0.1.0", "Requires-Dist: torch>=2.11,<3")
    site(
        "kda-fast", "0.1.0", "Requires-Python: >=3.10", "Requires-Dist: kda-core>=0.1,<0.2",
        "Requires-Dist: some-compiler[fast]>=4.6,<4.9", "Requires-Dist: absent>=1",
        'Requires-Dist: for-tests>=8; extra == "testing"', 'Requires-Dist: for-snakes; python_version < "3"',
    )  # fmt: skip
    site(
        "some-compiler",
        "5.1.0",
        'Requires-Dist: fast-parts==5.1.0; extra == "fast"',
        "Requires-Dist: odd",
    )
    site("fast-parts", "5.0.0")
    site("odd", "1")
    assert version_problems() == [
        "kda-fast 0.1.0 needs some-compiler<4.9,>=4.6, but 5.1.0 is installed",
        "some-compiler 5.1.0 needs fast-parts==5.1.0, but 5.0.0 is installed",
        "kda-fast 0.1.0 needs absent>=1, which is not installed",
    ]
    assert doctor.examine()["requirements"] == ["kda-core", "kda-fast"]


def test_a_release_candidate_is_outside_a_range_that_excludes_its_version(site):
    site("kda-core", "0.1.0", "Requires-Dist: torch>=2.11,<3")
    site("kda-fast", "0.1.5", "Requires-Dist: kda_core (>=0.1,<0.2)", "Requires-Dist: dsl>=4.6,<4.9")
    site("DSL", "4.9.0rc1")
    site("unrelated", "1", "Requires-Dist: missing")  # not a package of this project
    assert version_problems() == ["kda-fast 0.1.5 needs dsl<4.9,>=4.6, but 4.9.0rc1 is installed"]


def test_third_party_backends_and_other_pythons_are_compared_too(site):
    site("kda-core", "0.1.0")
    site(
        "fancy", "2", "Requires-Python: <3.5", "Requires-Dist: kda-core>=0.2", "Requires-Dist: not a requirement",
        entry_points="[kda_core.backends]\nfancy = fancy:SPEC\n",
    )  # fmt: skip
    site("odd", "one", entry_points="[kda_core.planners]\nodd = odd:SPEC\n")
    found = version_problems()
    assert f"fancy 2 needs Python <3.5, but {platform.python_version()} runs" in found
    assert "fancy 2 needs kda-core>=0.2, but 0.1.0 is installed" in found
    assert any("has a requirement that cannot be read, 'not a requirement'" in p for p in found)


def test_the_versions_of_required_packages_are_shown(site):
    site("kda-core", "0.1.0", "Requires-Dist: torch>=2.11,<3")
    site(
        "fancy", "2", "Requires-Dist: Some_Compiler[fast]>=4", "Requires-Dist: absent",
        'Requires-Dist: for-tests>=8; extra == "testing"',
        entry_points="[kda_core.backends]\nfancy = fancy:SPEC\n",
    )  # fmt: skip
    site("some-compiler", "5.1")
    site("for-tests", "8")
    site("fla-core", "0.3")
    expected = {"kda-core": "0.1.0", "fancy": "2", "some-compiler": "5.1", "fla-core": "0.3"}
    assert doctor.examine()["versions"] == expected | {"torch": str(torch.__version__)}


def test_the_version_of_the_imported_torch_counts(site, monkeypatch):
    site("kda-core", "0.1.0", "Requires-Dist: torch>=2.11,<3")  # no metadata of torch, as in a source build
    assert version_problems() == []
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert version_problems() == ["kda-core 0.1.0 needs torch<3,>=2.11, but 2.9.1+cu128 is installed"]


def test_a_comparison_that_was_not_made_is_reported(monkeypatch, capsys):
    for name in ("packaging", "packaging.requirements"):
        monkeypatch.setitem(sys.modules, name, None)
    report = doctor.examine()
    (unchecked,) = report["unchecked"]
    assert "`packaging` is missing" in unchecked and report["requirements"] == []
    text = doctor.show(report)
    assert f"UNCHECKED   {unchecked}" in text and text.endswith("in what was checked")


def test_a_source_tree_that_is_not_installed_is_reported(site):
    report = doctor.examine()
    assert any("kda-core runs from a source tree" in line for line in report["unchecked"])


# ---- plugins


def test_broken_backends_and_planners_are_problems(install, monkeypatch):
    install("broken", source="raise ImportError('half an installation')")
    install("plans", group="kda_core.planners", source=PLANNER, backend="raise ImportError('no plans')")
    found = problems()
    assert any(p.startswith("backend broken is broken") and "half an installation" in p for p in found)
    assert any(p.startswith("planner plans is broken") and "no plans" in p for p in found)
    monkeypatch.setenv("KDA_CP", "off")
    assert not any("planner" in p for p in problems())


def test_problems_of_a_planner_are_reported(install):
    said = "    def problems(self):\n        return ['its calibration is damaged; delete the file']\n"
    install("plans", group="kda_core.planners", source=PLANNER, backend=PLANS + said)
    assert "planner plans: its calibration is damaged; delete the file" in problems()


# ---- extensions


DIAGNOSTIC = """
from kda_core.extensions import Diagnosis
def SPEC():
    {body}
"""


def test_facts_and_problems_of_other_packages_are_shown(install, capsys):
    body = "return Diagnosis({'part': {'wheel': '1.5'}}, ['the wheel squeaks: oil it'])"
    install("cart", group="kda_core.diagnostics", source=DIAGNOSTIC.format(body=body))
    report = doctor.examine()
    assert report["diagnostics"]["cart"] == {"part": {"wheel": "1.5"}}
    assert "the wheel squeaks: oil it" in report["problems"]
    assert "\npart        wheel 1.5\n" in doctor.show(report)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('half an installation')", "is broken: ImportError: half an installation"),
        ("SPEC = 3", "is broken: expected a function, got an object of type int"),
        (DIAGNOSTIC.format(body="raise SystemExit('enough')"), "failed: SystemExit: enough"),
        (DIAGNOSTIC.format(body="return 'fine'"), "expected a Diagnosis, got an object of type str"),
        (DIAGNOSTIC.format(body="return Diagnosis(['wheel'])"), "failed: AttributeError"),
    ],
)
def test_a_broken_diagnostic_is_a_problem_and_affects_no_other(install, source, reason):
    install("broken", group="kda_core.diagnostics", source=source)
    install("cart", group="kda_core.diagnostics", source=DIAGNOSTIC.format(body="return Diagnosis({})"))
    report = doctor.examine()
    (problem,) = [p for p in report["problems"] if p.startswith("diagnostics broken")]
    assert reason in problem and "fake-broken 1.0" in problem
    assert report["diagnostics"]["cart"] == {}


def test_a_command_that_cannot_be_imported_is_a_problem(install):
    install("explode", group="kda_core.commands", source="raise ImportError('half an installation')")
    report = doctor.examine()
    assert {"name": "explode", "distribution": "fake-explode 1.0", "status": "broken"} in report["commands"]
    (problem,) = [p for p in report["problems"] if p.startswith("command explode")]
    assert "half an installation" in problem


# ---- failures of the examination


@pytest.mark.parametrize(
    "error", [RuntimeError("broken to bits"), SystemExit("gone"), OSError(5, "I/O error")]
)
def test_the_examination_never_raises(monkeypatch, error, capsys):
    def fail(*_, **__):
        raise error

    for owner, name in (
        (torch.cuda, "is_available"), (requirements.metadata, "distributions"), (platform, "platform"),
        (platform, "python_version"), (doctor.env, "cache_dir"), (doctor.env, "backend_order"),
        (REGISTRY, "info"), (REGISTRY, "backends"), (REGISTRY, "planners"), (REGISTRY, "resolve"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, fail)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert sorted(report) == sorted(KEYS)
    for part in ("platform", "cuda", "cache", "environment", "backends", "planners"):
        assert any(
            p.startswith(f"{part} cannot be examined: {type(error).__name__}") for p in report["problems"]
        )
    assert main(["doctor"]) == 1
    assert "PROBLEM     cuda cannot be examined" in capsys.readouterr().out


def test_a_part_that_fails_does_not_affect_the_others(monkeypatch):
    whole = doctor.examine()
    monkeypatch.setattr(REGISTRY, "info", lambda: 1 / 0)
    report = doctor.examine()
    assert (
        report["backends"] == []
        and "backends cannot be examined: ZeroDivisionError: division by zero" in (report["problems"])
    )
    assert report["calls"] == whole["calls"] and report["versions"] == whole["versions"]


def test_undecodable_names_are_shown(monkeypatch, capsys):
    monkeypatch.setitem(os.environ, "KDA_BACKEND", os.fsdecode(b"r\xe9f"))
    assert main(["doctor"]) == 1
    assert "KDA_BACKEND: backend " in capsys.readouterr().out
