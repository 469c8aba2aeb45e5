"""Installation of the packages, from a checkout and from wheels, alone and together."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.wheelhouse import ROOT, SOURCES, build_wheel, copy_project

PREFILL = """
import torch, kda_core
from kda_core.registry import record_calls
x = {n: torch.randn(1, 20, 1, 8) for n in "qkv"}
with record_calls() as calls:
    o, state = kda_core.chunk_kda(**x, g=-torch.rand(1, 20, 1, 8), beta=torch.rand(1, 20, 1), output_final_state=True)
assert o.shape == (1, 20, 1, 8) and state.shape == (1, 1, 8, 8) and o.isfinite().all() and state.isfinite().all()
print([c.backend for c in calls])
"""


# ---- from a checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Returns a copy of the folder `packages`, and of no other file of the repository."""
    folder = tmp_path / "checkout"
    for name, source in SOURCES.items():
        if source.parent == ROOT / "packages":
            copy_project(source, folder / name)
    return folder


@pytest.mark.parametrize(
    ("folder", "installed"),
    [
        ("kda-core", {"kda-core"}),
        ("kda-cute", {"kda-core", "kda-cute"}),
        ("kda-sm90", {"kda-core", "kda-cute", "kda-sm90"}),
        ("kda-sm100", {"kda-core", "kda-cute", "kda-sm100"}),
        ("kda-cp", {"kda-core", "kda-cp"}),
        ("kda-core[sm90,cp]", {"kda-core", "kda-cute", "kda-sm90", "kda-cp"}),
    ],
)
def test_a_folder_installs_with_its_siblings(bare_environment, checkout, folder, installed):
    bare_environment.install(str(checkout / folder))
    assert set(bare_environment.ours()) == installed
    assert bare_environment.run("-c", PREFILL).strip() == "['reference']"


def test_an_installed_package_states_version_ranges_and_no_folder(
    bare_environment, checkout, clean_environment
):
    """A reference to the checkout would break later pip commands once the checkout is gone."""
    bare_environment.install(str(checkout / "kda-sm90"))
    shutil.rmtree(checkout)
    from_folder = {name: bare_environment.requirements(name) for name in ("kda-sm90", "kda-cute")}
    assert not any("file:" in text for required in from_folder.values() for text in required)
    bare_environment.install("kda-sm90")  # already satisfied, although the folders are gone
    from_wheels = clean_environment("kda-sm90")
    assert from_folder == {name: from_wheels.requirements(name) for name in from_folder}


def test_several_folders_install_in_one_command(bare_environment, checkout):
    bare_environment.install(*(str(folder) for folder in sorted(checkout.iterdir())))
    assert set(bare_environment.ours()) == {folder.name for folder in checkout.iterdir()}


def test_all_folders_install_as_editable_in_one_command(bare_environment, checkout):
    bare_environment.install(*(word for folder in sorted(checkout.iterdir()) for word in ("-e", str(folder))))
    assert set(bare_environment.ours()) == {folder.name for folder in checkout.iterdir()}
    code = "import kda_core, kda_cute, kda_sm90; print(kda_cute.__file__)"
    assert Path(bare_environment.run("-c", code).strip()).is_relative_to(checkout)


def test_a_folder_without_its_siblings_takes_them_from_the_index(bare_environment, checkout, wheels):
    """The index is a folder of wheels here. It has a version that no other source has, which shows where pip found the sibling."""
    shutil.rmtree(checkout / "kda-core")
    with_index = replace(bare_environment, wheels=wheels["kda-core"].parent)
    with_index.install(str(checkout / "kda-cp"))
    assert set(with_index.ours()) == {"kda-core", "kda-cp"}


def test_installing_a_folder_leaves_no_build_in_it_and_drops_deleted_modules(tmp_path):
    project, site = copy_project(SOURCES["kda-cp"], tmp_path / "project"), tmp_path / "site"
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(site)]

    def installed() -> set[str]:
        shutil.rmtree(site, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", *options, str(project)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return {p.relative_to(site).as_posix() for p in site.glob("kda_cp/**/*.py")}

    def files() -> set[Path]:
        return {path for path in project.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    before = files()
    first = installed()
    assert first and files() == before
    deleted = min(name for name in first if not name.endswith("__init__.py"))
    (project / "src" / deleted).unlink()
    assert installed() == first - {deleted}


# ---- from wheels


def test_kda_core_alone_serves_calls_on_the_cpu(clean_environment):
    environment = clean_environment("kda-core")
    assert set(environment.ours()) == {"kda-core"}
    assert {n: s for n, (s, _, _) in environment.statuses().items()} == {
        "reference": "ok",
        "sm90": "not-installed",
        "sm100": "not-installed",
        "fla": "not-installed",
    }
    assert environment.run("-c", PREFILL).strip() == "['reference']"
    listed = environment.run("-m", "kda_core", "backends")
    assert re.search(r"pip install [^,]*\./packages/kda-sm90\b", listed)
    assert environment.run_command("kda-core", "backends") == listed


@pytest.mark.parametrize(
    ("extra", "other", "archs"), [("sm90", "sm100", ["sm_90"]), ("sm100", "sm90", ["sm_100", "sm_103"])]
)
def test_an_extra_installs_one_backend_and_what_it_requires(clean_environment, extra, other, archs):
    environment = clean_environment(f"kda-core[{extra}]")
    assert set(environment.ours()) == {"kda-core", "kda-cute", f"kda-{extra}"}
    statuses = environment.statuses()
    status, reason, distribution = statuses.pop(extra)
    assert (status, distribution) == ("wrong-arch", f"kda-{extra}")
    assert all(arch in reason for arch in archs)
    assert {n: s for n, (s, _, _) in statuses.items()} == {
        "reference": "ok",
        other: "not-installed",
        "fla": "not-installed",
    }
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


def test_the_emulator_requires_no_other_package_of_this_repository(clean_environment):
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
        "fla": "not-installed",
    }


# ---- other people's plugins


def test_the_third_party_example_passes_the_conformance_kit(clean_environment, tmp_path):
    environment = clean_environment("kda-tokenwise[test]")
    shutil.copy(SOURCES["kda-tokenwise"] / "tests" / "test_conformance.py", tmp_path)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\n"
    )  # so that pytest reads no configuration of a parent folder
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


def test_bad_plugins_are_listed_with_reasons_and_leave_the_others_usable(clean_environment, tmp_path):
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
        "fla": "not-installed",
        "unimportable": "broken",
        "unloadable": "broken",
        "outdated": "abi-mismatch",
        "futuristic": "abi-mismatch",
    }
    assert "ModuleNotFoundError: No module named 'a_module_that_was_never_there'" in found["unimportable"][1]
    assert "kda_unloadable:Absent failed to load: AttributeError" in found["unloadable"][1]
    core = ".".join(map(str, environment.ask("kda_core.BACKEND_ABI")))
    for name, abi, newer in (
        ("outdated", "0.9", "pip install kda-outdated"),
        ("futuristic", "2.999", "pip install ./packages/kda-core"),
    ):
        reason, distribution = found[name][1:]
        assert distribution == f"kda-{name}"
        assert all(part in reason for part in (f"kda-{name} 0.3.0", f"ABI {abi}", core, newer)), reason
    # The bad plugins have the highest priority; the reference still serves the call.
    assert environment.run("-c", PREFILL).strip() == "['reference']"
