"""Backends with a wrong backward fail the kit: each mutant below fails the test that it names. A backend that writes its gradients
into memory of core passes."""

import os
import subprocess
import sys

import pytest
from helpers.fake_plugins import install_into

HEAD = """
import torch
from dataclasses import fields, replace
from kda_core.reference import ReferenceBackend

TOKENS = ("q", "k", "v", "g", "beta")

def behind(x, n=1):
    \"\"\"Returns the n elements after x in its memory.\"\"\"
    return x.as_strided((n,), (1,), x.storage_offset() + x.numel())

class Into(ReferenceBackend):
    \"\"\"The reference, with a backward that writes into memory of core.\"\"\"

    def backward_workspace_bytes(self, shape):
        return 64

    def chunk_bwd_into(self, i, do, ds, out, workspace, saved_states=None, residual=None):
        found = self.chunk_bwd(i, do, ds)
        workspace.fill_(7)
        for f in fields(out):
            if getattr(out, f.name) is not None:
                getattr(out, f.name).copy_(getattr(found, f.name))

"""

RIGHT = "class Backend(Into):\n    pass\n"

# name: (the class, the test that must fail)
MUTANTS = {
    "one-head-of-g": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                g.g[:, :, -1] *= 1.05
                return g
        """,
        "test_gradients_of_gates[slow]",
    ),
    "ten-percent-of-a-log": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                return g if g.A_log is None else replace(g, A_log=g.A_log * 1.1)
        """,
        "test_gradients_of_gates[steep]",
    ),
    "drops-state-gradient": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                return super().chunk_bwd(i, do, None)
        """,
        "test_gradients_of_one_output[initial state-final_state]",
    ),
    "empty-sequences": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                if i.cu_seqlens is not None and g.initial_state is not None:
                    g.initial_state[i.cu_seqlens.diff() == 0] = 0
                return g
        """,
        "test_gradients_of_packed_sequences[0-15-15-79-80-mixed]",
    ),
    "fp16-outputs": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                return super().chunk_bwd(i, do.half().to(do), ds)
        """,
        "test_gradients_at_a_scale[steep-2^-30]",
    ),
    "half-a-group": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                return replace(g, q=g.q / 2) if i.shape.HV > 2 * i.shape.H else g
        """,
        "test_gradients_of_heads[(1, 4)]",
    ),
    "wrong-layout": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                if i.options.state_v_first and g.initial_state is not None:
                    g = replace(g, initial_state=g.initial_state.mT.contiguous())
                return g
        """,
        "test_gradients_of_state_layouts[fixed]",
    ),
    "not-deterministic": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                return replace(g, v=g.v + torch.randn_like(g.v) * 1e-3)
        """,
        "test_gradients_on_every_run[slow]",
    ),
    "leaks-behind": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                return replace(g, g=g.g + 1e-12)
        """,
        "test_gradients_behind_the_last_used_output[slow]",
    ),
    "looks-ahead": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                used = (do != 0).flatten(2).any(-1).view(*do.shape[:2], 1, 1)
                return replace(g, k=g.k * (1 + 2**-8 * (i.v[:, -1:, :1, :1] > 0) * used))
        """,
        "test_gradients_before_the_last_used_output[slow]",
    ),
    "sees-the-batch": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                return replace(g, q=g.q * 1.0078125) if i.shape.N > 1 else g
        """,
        "test_gradients_of_a_batch",
    ),
    "keeps-dt-bias-of-split": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                return g if i.shape.T > 100 or i.dt_bias is None else replace(g, dt_bias=0 * g.dt_bias)
        """,
        "test_gradients_of_a_split[64-slow]",
    ),
    "reads-gradients": (
        """
        class Backend(Into):
            def chunk_bwd_into(self, i, do, ds, out, workspace, saved_states=None, residual=None):
                before = out.k.clone()
                super().chunk_bwd_into(i, do, ds, out, workspace)
                out.k.add_(0 * before)
        """,
        "test_gradients_into_poisoned_memory[packed]",
    ),
    "reads-workspace": (
        """
        class Backend(Into):
            def chunk_bwd_into(self, i, do, ds, out, workspace, saved_states=None, residual=None):
                scale = 1 + workspace[0].item() / 2**14
                super().chunk_bwd_into(i, do, ds, out, workspace)
                out.v.mul_(scale)
        """,
        "test_gradients_into_poisoned_memory[packed]",
    ),
    "writes-behind": (
        """
        class Backend(Into):
            def chunk_bwd_into(self, i, do, ds, out, workspace, saved_states=None, residual=None):
                super().chunk_bwd_into(i, do, ds, out, workspace)
                if workspace.storage_offset():
                    behind(workspace).zero_()
        """,
        "test_gradients_into_poisoned_memory[packed]",
    ),
    "loads-behind": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                return replace(g, q=g.q + 0 * behind(do)) if do.storage_offset() else g
        """,
        "test_gradients_in_poisoned_surroundings[fixed]",
    ),
    "mixes-sequences": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                return replace(g, v=g.v + 0 * do.sum())
        """,
        "test_gradients_of_poisoned_neighbours[2]",
    ),
    "rows-of-no-sequence": (
        """
        class Backend(Into):
            def chunk_bwd_into(self, i, do, ds, out, workspace, saved_states=None, residual=None):
                super().chunk_bwd_into(i, do, ds, out, workspace)
                if i.cu_seqlens is not None:
                    out.beta[:, int(i.cu_seqlens[-1]):] = 1
        """,
        "test_gradients_of_rows_of_no_sequence",
    ),
    "wide-heads": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                g = super().chunk_bwd(i, do, ds)
                return g if i.shape.K <= 128 else replace(g, k=g.k * 1.1)
        """,
        "test_gradients_of_head_dims[K256-V256]",
    ),
    "rounds-to-bf16": (
        """
        class Backend(ReferenceBackend):
            def chunk_bwd(self, i, do, ds):
                rounded = {n: getattr(i, n).bfloat16().to(do) for n in ("q", "k", "v")}
                return super().chunk_bwd(replace(i, **rounded), do.bfloat16().to(do), ds)
        """,
        "test_gradients_of_dtypes[float32-precomputed]",
    ),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Returns the completed run of the named tests over all mutants and the correct backend."""
    folder = tmp_path_factory.mktemp("backward")
    classes = ["from kda_core.testing import BackendConformance"]
    for name, (body, _) in (MUTANTS | {"right": (RIGHT, "")}).items():
        lines = (line.removeprefix("        ") for line in body.splitlines())
        install_into(folder, name, backend=HEAD + "\n".join(lines))
        classes.append(f"class {_class(name)}(BackendConformance):\n    backend, head_dim = {name!r}, 32")
    (folder / "test_these.py").write_text("\n\n".join(classes) + "\n")
    here = "test_these.py::" + "{}::{}"
    wanted = [here.format(_class(n), test) for n, (_, test) in MUTANTS.items()]
    into = [test for body, test in MUTANTS.values() if "Into" in body]
    wanted += sorted({here.format(_class("right"), test) for test in into})
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    own = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "-p", "kda_core.testing.plugin", "--kda-quick")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *own, *wanted],
        capture_output=True, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": path}, check=False,
    )  # fmt: skip


def _class(name):
    return "Test" + name.title().replace("-", "")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_backward_fails(report, name):
    failed = [line for line in report.stdout.splitlines() if line.startswith("FAILED")]
    assert any(f"{_class(name)}::{MUTANTS[name][1]}" in line for line in failed), report.stdout


def test_a_right_backward_passes(report):
    assert report.returncode == pytest.ExitCode.TESTS_FAILED, report.stdout + report.stderr
    assert f"::{_class('right')}::" not in report.stdout, report.stdout
    assert "backend       right (fake-right 1.0) on cpu" in report.stdout
