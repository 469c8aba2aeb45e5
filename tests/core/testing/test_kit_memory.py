"""Backends that read or write memory of others fail the kit, and its report names each backend that it tested."""

import os
import subprocess
import sys

import pytest
from helpers.fake_plugins import install_into

HEAD = """
import torch
from kda_core.reference import ReferenceBackend

def behind(x, n=1):
    \"\"\"Returns the n elements after x in its memory.\"\"\"
    return x.as_strided((n,), (1,), x.storage_offset() + x.numel())

class Backend(ReferenceBackend):
"""

# name: (body of the class, the test that must fail)
MUTANTS = {
    "loads-behind": (
        """
        def chunk_fwd(self, i, o):
            super().chunk_fwd(i, o)
            if i.v.storage_offset():
                o.o.add_(0 * behind(i.v))
            return o
        """,
        "test_poisoned_surroundings",
    ),
    "mixes-sequences": (
        """
        def chunk_fwd(self, i, o):
            super().chunk_fwd(i, o)
            o.o.add_(0 * i.v.sum())
            return o
        """,
        "test_poisoned_neighbours",
    ),
    "clobbers-workspace": (
        """
        def chunk_fwd(self, i, o):
            super().chunk_fwd(i, o)
            if o.workspace is not None and o.workspace.storage_offset():
                behind(o.workspace).zero_()
            return o
        """,
        "test_untouched_memory",
    ),
    "clobbers-behind-h": (
        """
        def chunk_fwd(self, i, o):
            super().chunk_fwd(i, o)
            if o.intermediate_states is not None and o.intermediate_states.storage_offset():
                behind(o.intermediate_states).zero_()
            return o
        """,
        "test_untouched_memory_around_intermediate_states",
    ),
    "declares-too-much": (
        """
        def recurrent_fwd(self, i, o):
            raise NotImplementedError
        """,
        "test_feature",
    ),
    "falls-back": (
        """
        def chunk_fwd(self, i, o):
            import kda_core
            args = (i.q, i.k, i.v, i.g, i.beta)
            kda_core.chunk_kda(*args, backend="reference", use_gate_in_kernel=True, A_log=i.A_log)
            return super().chunk_fwd(i, o)
        """,
        "test_heads",
    ),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Returns the completed run of the kit over all mutants and one correct, emulated backend."""
    folder = tmp_path_factory.mktemp("memory")
    classes = ["from kda_core.testing import BackendConformance"]
    for name, (body, _) in (MUTANTS | {"emulating": ("\n        emulated = True\n", "")}).items():
        lines = (line.removeprefix("    ") for line in body.splitlines())
        install_into(folder, name, backend=HEAD + "\n".join(lines))
        classes.append(f"class {_class(name)}(BackendConformance):\n    backend = {name!r}")
    (folder / "test_these.py").write_text("\n\n".join(classes) + "\n")
    wanted = [f"({_class(n)} and {test})" for n, (_, test) in MUTANTS.items()]
    wanted += [f"({_class('emulating')} and {test})" for _, test in MUTANTS.values()]
    return _pytest(folder, "-k", " or ".join(wanted))


def _class(name):
    return "Test" + name.title().replace("-", "")


def _pytest(folder, *more):
    own = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "-p", "kda_core.testing.plugin", "--kda-quick")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "pytest", *own, *more, "test_these.py"],
        capture_output=True, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": path}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_backend_that_uses_foreign_memory_fails(report, name):
    failed = [line for line in report.stdout.splitlines() if line.startswith("FAILED")]
    assert any(f"{_class(name)}::{MUTANTS[name][1]}" in line for line in failed), report.stdout


def test_the_correct_backend_passes_the_same_tests_and_is_called_emulated(report):
    assert f"::{_class('emulating')}::" not in report.stdout, report.stdout
    assert "backend       emulating (fake-emulating 1.0) on cpu, emulated" in report.stdout
    assert (
        "backend       falls-back (fake-falls-back 1.0) on cpu, executed by the device itself"
        in report.stdout
    )


def test_required_features_of_a_subclass(tmp_path):
    install_into(tmp_path, "narrow", features={"varlen"})
    text = "from kda_core.testing import BackendConformance\nclass TestNarrow(BackendConformance):\n    backend = 'narrow'\n"
    (tmp_path / "test_these.py").write_text(text)
    done = _pytest(tmp_path, "--kda-require", "varlen,gva")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "backend 'narrow' does not declare gva" in done.stderr
