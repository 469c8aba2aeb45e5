"""``dsl_wheels`` finds all known ways in which an installation of the DSL can be broken, from metadata alone."""

from __future__ import annotations

from importlib import metadata

import pytest

from kda_cute import dsl_wheels

DSL = "nvidia-cutlass-dsl"
LAYOUT = {  # the requirements of 4.8
    DSL: ["{0}-libs-base=={1}", "{0}-libs-cu12=={1}", '{0}-libs-cu13=={1}; extra == "cu13"'],
    f"{DSL}-libs-base": ["{0}-libs-core=={1}", "typing-extensions>=4.10.0"],
    f"{DSL}-libs-core": ['backports.strenum; python_version < "3.11"'],
    f"{DSL}-libs-cu12": ["{0}-libs-base=={1}"],
    f"{DSL}-libs-cu13": ["{0}-libs-base=={1}"],
    "apache-tvm-ffi": [],
}


class Site:
    """A folder of fake distributions, which replaces the installation for ``importlib.metadata``."""

    def __init__(self, folder):
        self.folder = folder

    def install(self, name, version="4.8.1", requires=None, files=()):
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        requires = LAYOUT[name] if requires is None else requires
        lines = [f"Requires-Dist: {item.format(DSL, version)}" for item in requires]
        (info / "METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
        )
        for path, _ in files:  # Python 3.12 and later do not list files that are absent
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).touch()
        (info / "RECORD").write_text("".join(f"{path},sha256={digest},1\n" for path, digest in files))

    def install_all(self, **versions):
        for name in LAYOUT:
            self.install(name, versions.get(name.rpartition("-")[2], "4.8.1"))


@pytest.fixture
def site(tmp_path, monkeypatch):
    found = metadata.distributions
    monkeypatch.setattr(metadata, "distributions", lambda: found(path=[str(tmp_path)]))
    return Site(tmp_path)


def test_a_complete_installation_has_no_problems(site):
    site.install_all()
    wheels = dsl_wheels()
    assert wheels.problems == ()
    assert wheels.cuda == (12, 13)
    assert dict(wheels.versions)[f"{DSL}-libs-core"] == "4.8.1"


def test_an_extra_that_is_not_installed_is_no_problem(site):
    for name in LAYOUT.keys() - {f"{DSL}-libs-cu13"}:
        site.install(name)
    assert dsl_wheels().problems == ()
    assert dsl_wheels().cuda == (12,)


@pytest.mark.parametrize("part", ["base", "core", "cu12", "cu13"])
def test_parts_of_another_version_are_a_problem(site, part):
    site.install_all(**{part: "4.7.0"})
    problems = dsl_wheels().problems
    assert any(f"{DSL}-libs-{part}==4.8.1, but 4.7.0 is installed" in problem for problem in problems), (
        problems
    )


@pytest.mark.parametrize("part", ["base", "core", "cu12"])
def test_missing_parts_are_a_problem(site, part):
    for name in LAYOUT.keys() - {f"{DSL}-libs-{part}"}:
        site.install(name)
    problems = dsl_wheels().problems
    assert any(f"{DSL}-libs-{part}==4.8.1, which is not installed" in problem for problem in problems), (
        problems
    )


def test_leftover_parts_are_a_problem(site):
    for name in LAYOUT.keys() - {DSL}:
        site.install(name)
    assert dsl_wheels().problems[0].startswith(f"{DSL} is not installed")
    assert f"{DSL}-libs-cu13" in dsl_wheels().problems[1]


def test_a_folder_without_metadata_is_skipped(site):
    site.install_all()
    (site.folder / "~vidia_cutlass_dsl-4.7.0.dist-info").mkdir()
    assert dsl_wheels().problems == ()


def test_an_empty_installation_misses_both_packages(site):
    wheels = dsl_wheels()
    assert (wheels.versions, wheels.cuda) == ((), ())
    assert [problem.partition(" is ")[0] for problem in wheels.problems] == [DSL, "apache-tvm-ffi"]


def test_wheels_that_overwrite_each_other_are_a_problem(site):
    """The layout before 4.6: the base wheel and the CUDA 13 wheel contain different files of one path."""
    same, other = ("cutlass/__init__.py", "aaaa"), ("cutlass/cute/core.py", "bbbb")
    site.install(DSL, "4.5.0", ["{0}-libs-base=={1}", '{0}-libs-cu13=={1}; extra == "cu13"'])
    site.install(f"{DSL}-libs-base", "4.5.0", [], [same, other])
    site.install(
        f"{DSL}-libs-cu13", "4.5.0", ["{0}-libs-base=={1}"], [same, ("cutlass/cute/core.py", "cccc")]
    )
    site.install("apache-tvm-ffi", "0.1.15")
    (problem,) = dsl_wheels().problems
    assert "overwrite each other: 1 files, such as cutlass/cute/core.py" in problem


def test_this_installation_has_no_problems(kernels):
    """The other tests compile with this installation."""
    assert dsl_wheels().problems == ()
