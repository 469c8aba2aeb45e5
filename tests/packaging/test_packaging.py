"""Wheels as users get them: what is in them, and how they install, alone and together."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from helpers.wheelhouse import ROOT, SOURCES, build_sdist, build_wheel, copy_project

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LICENSE = ROOT / "LICENSE"

PREFILL = """
import torch, kda_core
from kda_core.registry import record_calls
x = {n: torch.randn(1, 20, 1, 8) for n in "qkv"}
with record_calls() as calls:
    o, state = kda_core.chunk_kda(**x, g=-torch.rand(1, 20, 1, 8), beta=torch.rand(1, 20, 1), output_final_state=True)
assert o.shape == (1, 20, 1, 8) and state.shape == (1, 1, 8, 8) and o.isfinite().all() and state.isfinite().all()
print([c.backend for c in calls])
"""


def contents(wheel: Path) -> tuple[set[str], Message]:
    """The names of the files in a wheel, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (head,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        return names, Parser().parsestr(archive.read(head).decode())


def file(wheel: Path, end: str) -> bytes:
    """The one file of a wheel whose name ends so."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(end))
        return archive.read(name)


# ---- what is in a wheel


@pytest.mark.parametrize("name", SOURCES)
def test_a_wheel_is_pure_typed_and_licensed(wheels, name):
    names, head = contents(wheels[name])
    package = name.replace("-", "_")
    assert wheels[name].name == f"{package}-{head['Version']}-py3-none-any.whl"
    assert f"{package}/py.typed" in names
    assert file(wheels[name], ".dist-info/licenses/LICENSE") == LICENSE.read_bytes()
    assert (head["License-Expression"], head["Requires-Python"]) == ("Apache-2.0", ">=3.10")
    assert {n.partition("/")[0].partition("-")[0] for n in names} == {package}, (
        "one package of its own, no more"
    )
    assert {Path(n).suffix for n in names if n.startswith(f"{package}/")} <= {".py", ".typed"}
    sources = SOURCES[name] / "src"
    assert {n for n in names if n.endswith(".py")} == {
        p.relative_to(sources).as_posix() for p in sources.rglob("*.py")
    }


@pytest.mark.parametrize("name", SOURCES)
def test_requirements_are_ranges(wheels, name):
    _, head = contents(wheels[name])
    required = [r for r in head.get_all("Requires-Dist") or [] if "extra ==" not in r]
    assert required, "every package requires torch or the core"
    for requirement in required:
        assert ">=" in requirement and "<" in requirement and "==" not in requirement, requirement


@pytest.mark.parametrize("name", SOURCES)
def test_each_project_has_the_licence_as_a_file_of_its_own(name):
    """A link would be missing from what is built outside the repository."""
    licence = SOURCES[name] / "LICENSE"
    assert not licence.is_symlink() and licence.read_bytes() == LICENSE.read_bytes()


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_archive_makes_the_same_wheel(wheels, name, tmp_path):
    archive = build_sdist(copy_project(SOURCES[name], tmp_path / "project"), tmp_path)
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    # hatchling adds the .gitignore of the checkout that a folder lies in, where it lies in one
    assert {path.name for path in unpacked.iterdir()} - {"tests", ".gitignore"} == {
        "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "src",
    }  # fmt: skip
    again = tmp_path / "again"
    again.mkdir()
    assert build_wheel(unpacked, again).read_bytes() == wheels[name].read_bytes()


# ---- how wheels install


def test_an_install_from_a_folder_leaves_nothing_in_it_and_forgets_deleted_modules(tmp_path):
    project, site = copy_project(SOURCES["kda-cp"], tmp_path / "project"), tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]

    def installed() -> set[str]:
        shutil.rmtree(site, ignore_errors=True)
        done = subprocess.run(
            [*install, "--target", str(site), str(project)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return {p.relative_to(site).as_posix() for p in site.glob("kda_cp/**/*.py")}

    before = sorted(project.rglob("*"))
    first = installed()
    assert "kda_cp/merge.py" in first and sorted(project.rglob("*")) == before
    (project / "src" / "kda_cp" / "merge.py").unlink()
    assert installed() == first - {"kda_cp/merge.py"}


def test_the_type_checker_passes_by_what_older_installs_left():
    (pattern,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["exclude"]
    assert re.search(pattern, "packages/kda-core/build/lib/kda_core/api.py")
    tracked = [p.relative_to(ROOT).as_posix() for p in (ROOT / "packages").glob("*/src/**/*.py")]
    assert tracked and not any(re.search(pattern, path) for path in tracked)


def test_the_core_alone_does_the_main_job(clean_environment):
    environment = clean_environment("kda-core")
    assert set(environment.ours()) == {"kda-core"}
    assert {n: s for n, (s, _, _) in environment.statuses().items()} == {
        "reference": "ok",
        "sm90": "not-installed",
        "sm100": "not-installed",
    }
    assert environment.run("-c", PREFILL).strip() == "['reference']"
    listed = environment.run("-m", "kda_core", "backends")
    assert "pip install ./packages/kda-core ./packages/kda-cute ./packages/kda-sm90," in listed
    assert environment.run_command("kda-core", "backends") == listed


@pytest.mark.parametrize(
    ("extra", "other", "state", "why"),
    [
        ("sm90", "sm100", "wrong-arch", "runs on sm_90; here: cpu"),
        ("sm100", "sm90", "wrong-arch", "runs on sm_100, sm_103; here: cpu"),
    ],
)
def test_an_extra_installs_exactly_one_backend(clean_environment, extra, other, state, why):
    environment = clean_environment(f"kda-core[{extra}]")
    assert set(environment.ours()) == {"kda-core", f"kda-{extra}"}
    statuses = environment.statuses()
    status, reason, distribution = statuses.pop(extra)
    assert (status, distribution) == (state, f"kda-{extra}")
    assert reason == why
    assert {n: s for n, (s, _, _) in statuses.items()} == {"reference": "ok", other: "not-installed"}
    assert environment.run("-c", PREFILL).strip() == "['reference']"


def test_the_planner_installs_without_a_backend(clean_environment):
    environment = clean_environment("kda-core[cp]")
    assert set(environment.ours()) == {"kda-core", "kda-cp"}
    found = environment.ask(
        "[(c.name, c.status, c.distribution) for c in kda_core.registry.REGISTRY.planners()]"
    )
    assert found == [["cp", "ok", "kda-cp"]]
    assert environment.run("-c", PREFILL).strip() == "['reference']"


EMULATED = """
import torch, ptx_emulator
ptx = '''
.version 8.0
.target sm_90a
.address_size 64
.visible .entry double(.param .u64 p)
{
.reg .b32 %r<3>; .reg .b64 %q<3>;
ld.param.u64 %q0, [p]; mov.u32 %r0, %tid.x; mul.wide.u32 %q1, %r0, 4; add.s64 %q2, %q0, %q1;
ld.global.b32 %r1, [%q2]; add.s32 %r2, %r1, %r1; st.global.b32 [%q2], %r2; ret;
}
'''
x = torch.arange(32, dtype=torch.int32)
ptx_emulator.run(ptx, (1,), (32,), 0, (x,))
print(x.tolist() == [2 * n for n in range(32)])
"""


def test_the_emulator_needs_no_other_package(clean_environment):
    environment = clean_environment("ptx-emulator")
    assert set(environment.ours()) == {"ptx-emulator"}
    assert environment.run("-c", EMULATED).strip() == "True"


def test_all_packages_install_together(clean_environment):
    environment = clean_environment("kda-core[sm90,sm100,cp]", "kda-tokenwise", "ptx-emulator")
    assert set(environment.ours()) == set(SOURCES)
    assert {n: s for n, (s, _, _) in environment.statuses().items()} == {
        "reference": "ok",
        "tokenwise": "ok",
        "sm90": "wrong-arch",
        "sm100": "wrong-arch",
    }


# ---- other people's plugins


def test_the_third_party_example_passes_the_conformance_kit(clean_environment, tmp_path):
    environment = clean_environment("kda-tokenwise[test]")
    shutil.copy(SOURCES["kda-tokenwise"] / "tests" / "test_conformance.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # so that no configuration of a folder above applies
    report = environment.run(
        "-m",
        "pytest",
        "-p",
        "kda_core.testing.plugin",
        "--kda-quick",
        "-q",
        "test_conformance.py",
        cwd=tmp_path,
    )
    print(report)
    passed, failed = map(int, re.search(r"(\d+) passed, (\d+) failed", report).groups())
    assert passed > 100 and failed == 0
    declared = environment.ask(
        "[sorted(i.spec.features) for i in kda_core.backends() if i.name == 'tokenwise']"
    )[0]
    for feature in ("backward", "graph", "intermediate_states", "pin"):
        assert feature not in declared and re.search(rf"^ +\d+  {feature}$", report, re.MULTILINE), feature


PYPROJECT = """
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "kda-{name}"
version = "0.3.0"
dependencies = ["kda-core"]

[project.entry-points."kda_core.backends"]
{name} = "kda_{name}:SPEC"

[tool.hatch.build.targets.wheel]
only-include = ["kda_{name}.py"]
"""

SPEC = """
from kda_core.backend import BackendSpec

SPEC = BackendSpec(
    name="{name}", abi={abi}, archs=frozenset({{"cpu"}}), features=frozenset({{"unbounded_gate", "final_state"}}),
    target="{target}", install="pip install kda-{name}", priority=1000,
)
"""

BAD_PLUGINS = {
    "unimportable": "import a_module_that_was_never_there\n",
    "unloadable": SPEC.format(name="unloadable", abi=(2, 0), target="kda_unloadable:Absent"),
    "outdated": SPEC.format(name="outdated", abi=(0, 9), target="kda_outdated:Backend"),
    "futuristic": SPEC.format(name="futuristic", abi=(2, 999), target="kda_futuristic:Backend"),
}


def test_bad_plugins_are_listed_with_reasons_and_hide_nobody(clean_environment, tmp_path):
    wheels = []
    for name, source in BAD_PLUGINS.items():
        project = tmp_path / name
        project.mkdir()
        (project / "pyproject.toml").write_text(PYPROJECT.format(name=name))
        (project / f"kda_{name}.py").write_text(source)
        wheels.append(str(build_wheel(project, tmp_path)))
    environment = clean_environment("kda-core[sm90]", "kda-tokenwise", *wheels)
    found = environment.statuses()
    assert {n: s for n, (s, _, _) in found.items()} == {
        "reference": "ok",
        "tokenwise": "ok",
        "sm90": "wrong-arch",
        "sm100": "not-installed",
        "unimportable": "broken",
        "unloadable": "broken",
        "outdated": "abi-mismatch",
        "futuristic": "abi-mismatch",
    }
    assert "ModuleNotFoundError: No module named 'a_module_that_was_never_there'" in found["unimportable"][1]
    assert "kda_unloadable:Absent failed to load: AttributeError" in found["unloadable"][1]
    core = ".".join(map(str, environment.ask("kda_core.BACKEND_ABI")))
    newer_core = "kda-core: pip install ./packages/kda-core, from a checkout of the repository"
    for name, abi, remedy in (
        ("outdated", "0.9", "kda-outdated: pip install kda-outdated"),
        ("futuristic", "2.999", newer_core),
    ):
        reason = f"kda-{name} 0.3.0 was written for ABI {abi}, kda-core has {core}; install a newer {remedy}"
        assert found[name][1:] == [reason, f"kda-{name}"]
    # Their priority is the highest, and still the call is served.
    assert environment.run("-c", PREFILL).strip() == "['reference']"
