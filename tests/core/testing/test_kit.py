"""Wrong backends fail the conformance kit: each mutant below fails the tests that it names. Tests of the kit's parts."""

import os
import re
import subprocess
import sys

import pytest
import torch
from helpers.fake_plugins import install_into

from kda_core.testing import BAND, FAMILIES, error, make_inputs, specification, token_oracle, tolerance

HEAD = """
from dataclasses import replace
import torch
from kda_core.contract import KdaOutputs
from kda_core.reference import ReferenceBackend

class Backend(ReferenceBackend):
"""

# name: (body of the class, tests that must fail)
MUTANTS = {
    "drops-state": (
        ("def chunk_fwd(self, i, o):\n    return super().chunk_fwd(replace(i, initial_state=None), o)\n"),
        ("test_length", "test_split"),
    ),
    "bf16-state": (
        (
            "def chunk_fwd(self, i, o):\n"
            "    if i.initial_state is not None:\n"
            "        i = replace(i, initial_state=(i.initial_state / 8).bfloat16().float() * 8.1)\n"
            "    return super().chunk_fwd(i, o)\n"
        ),
        ("test_split",),
    ),
    "leaks-future": (
        (
            "def chunk_fwd(self, i, o):\n"
            "    super().chunk_fwd(i, o)\n"
            "    o.o.mul_(1 + 1e-2 * i.v[:, -1:].sign())\n"
            "    return o\n"
        ),
        ("test_causality",),
    ),
    "wrong-heads": (
        (
            "def chunk_fwd(self, i, o):\n"
            "    r = i.shape.HV // i.shape.H\n"
            "    wide = {n: getattr(i, n).repeat(1, 1, r, 1) for n in ('q', 'k')}\n"
            "    return super().chunk_fwd(replace(i, **wide, shape=replace(i.shape, H=i.shape.HV)), o)\n"
        ),
        ("test_heads[(2, 4)]",),
    ),
    "ignores-scale": (
        (
            "def chunk_fwd(self, i, o):\n"
            "    options = replace(i.options, scale=i.shape.K**-0.5)\n"
            "    return super().chunk_fwd(replace(i, shape=replace(i.shape, options=options)), o)\n"
        ),
        ("test_form[scale]",),
    ),
    "zeroes-empty": (
        (
            "def chunk_fwd(self, i, o):\n"
            "    super().chunk_fwd(i, o)\n"
            "    if i.cu_seqlens is not None and o.final_state is not None:\n"
            "        o.final_state[i.cu_seqlens.diff() == 0] = 0\n"
            "    return o\n"
        ),
        ("test_packed",),
    ),
    "writes-behind": (
        (
            "def chunk_fwd(self, i, o):\n"
            "    super().chunk_fwd(i, o)\n"
            "    flat = o.o.as_strided((o.o.numel() + 1,), (1,), o.o.storage_offset()) if o.o.storage_offset() else None\n"
            "    if flat is not None:\n"
            "        flat[-1] = 0\n"
            "    return o\n"
        ),
        ("test_untouched_memory",),
    ),
    "not-deterministic": (
        (
            "def chunk_fwd(self, i, o):\n"
            "    super().chunk_fwd(i, o)\n"
            "    o.o.add_(torch.randn_like(o.o) * 1e-3)\n"
            "    return o\n"
        ),
        ("test_same_bits_on_every_run", "test_two_threads"),
    ),
    "reads-output": (
        (
            "def chunk_fwd(self, i, o):\n"
            "    before = o.final_state.clone() if o.final_state is not None else None\n"
            "    super().chunk_fwd(i, o)\n"
            "    if before is not None:\n"
            "        o.final_state.add_(before * 0)\n"
            "    return o\n"
        ),
        ("test_poisoned_outputs_and_workspace",),
    ),
    "one-broken-head": (
        (
            "def chunk_fwd(self, i, o):\n"
            "    super().chunk_fwd(i, o)\n"
            "    o.o[:, :, -1] *= 1.05\n"
            "    return o\n"
        ),
        ("test_gates",),
    ),
    "truncated-h": (
        (
            "def chunk_fwd(self, i, o):\n"
            "    super().chunk_fwd(i, o)\n"
            "    if o.intermediate_states is not None:\n"
            "        o.intermediate_states[:, -1] = o.intermediate_states[:, 0]\n"
            "    return o\n"
        ),
        ("test_intermediate_states",),
    ),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Runs the tests that the mutants name over all mutants, in one run. Returns the lines of the failed tests."""
    folder = tmp_path_factory.mktemp("mutants")
    classes, wanted = ["from kda_core.testing.conformance import BackendConformance"], []
    for name, (body, tests) in MUTANTS.items():
        cls = "Test" + name.title().replace("-", "")
        install_into(folder, name, backend=HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
        classes.append(f"class {cls}(BackendConformance):\n    backend = {name!r}\n    quick = True")
        wanted += [f"({cls} and {t.partition('[')[0]})" for t in tests]
    (folder / "test_mutants.py").write_text("\n\n".join(classes))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "-k", " or ".join(wanted), "test_mutants.py"],
        capture_output=True, text=True, cwd=folder, env=_environment(folder), check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("FAILED")]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_backend_fails(verdicts, name):
    cls = "Test" + name.title().replace("-", "")
    for test in MUTANTS[name][1]:
        assert any(f"{cls}::{test}" in line for line in verdicts), f"{test} let {name} pass"


def test_a_correct_backend_passes_and_the_report_counts_its_tests(install, tmp_path):
    declared = {
        "varlen",
        "initial_state",
        "final_state",
        "gate_in_kernel",
        "beta_sigmoid",
        "qk_l2norm",
        "unbounded_gate",
    }
    install("partial", features=declared)
    run = lambda *more: subprocess.run(
        [sys.executable, "-m", "kda_core", "conformance", "partial", "-k", "test_heads or test_feature or backward", *more],
        capture_output=True, text=True, env=_environment(tmp_path), check=False,
    )  # fmt: skip
    done = run()
    assert done.returncode == 0, done.stdout
    assert "backend       partial (fake-partial 1.0)" in done.stdout
    assert re.search(r"^not run +\d+ \(not declared\)\n(.*\n)* +7  gva$", done.stdout, re.MULTILINE)
    assert run("--kda-no-skip").returncode == 0  # only tests of undeclared features were skipped
    assert "does not declare" in run("--kda-require", "all").stderr


def _environment(folder):
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    }


# ---- the parts


def test_oracle_by_hand():
    """One head, K = V = 1, two tokens: S1 = b1 k1 v1; S2 = S1 e^g2 + b2 k2 (v2 - k2 S1 e^g2)."""
    one = lambda *x: torch.tensor(x, dtype=torch.float64).view(1, -1, 1, 1)
    q, k, v, g = one(1.0, 2.0), one(0.5, 1.0), one(3.0, -1.0), one(-0.7, -0.1)
    beta = torch.tensor([[[0.5], [0.25]]], dtype=torch.float64)
    o, state = token_oracle(q, k, v, g, beta, scale=1.0)
    e = torch.exp(torch.tensor(-0.1, dtype=torch.float64))
    s1 = 0.5 * 0.5 * 3.0
    s2 = s1 * e + 0.25 * 1.0 * (-1.0 - 1.0 * s1 * e)
    torch.testing.assert_close(o.flatten(), torch.stack([torch.tensor(s1, dtype=torch.float64), 2.0 * s2]))
    torch.testing.assert_close(state.flatten(), s2.view(1))


def test_error_finds_one_broken_head():
    ref = torch.randn(1, 50, 64, 8, dtype=torch.float64)
    x = ref.clone()
    x[:, :, 17] *= 1.5
    assert error(x, ref) == pytest.approx(0.5)
    x[0, 0, 0, 0] = float("nan")
    assert error(x, ref) == float("inf")
    assert error(ref, ref) == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("C", (16, 32, 64))
def test_the_specification_stays_close_to_the_oracle(family, C):
    x = make_inputs(family, 300, HV=4).arguments
    want = token_oracle(**x)
    o, state = specification.forward(**x, C=C)
    assert error(o, want[0]) < 4 * BAND and error(state, want[1], state=True) < 4 * BAND
    limit = tolerance(x, C, want)
    assert limit == (2 * (error(o, want[0]) + BAND), 2 * (error(state, want[1], state=True) + BAND))


@pytest.mark.parametrize("family", ("slow", "mixed", "masked"))
def test_the_specification_is_causal(family):
    x, y = (make_inputs(family, 150, seed=s).arguments for s in (1, 2))
    o = specification.forward(**x, C=64)[0]
    for t in (1, 40, 64, 100):
        mixed = {n: torch.cat([x[n][:, :t], y[n][:, t:]], 1) for n in ("q", "k", "v", "g", "beta")}
        assert torch.equal(specification.forward(**(x | mixed), C=64)[0][:, :t], o[:, :t])


def test_inputs_are_the_same_everywhere():
    """Compares the first values of a recipe, which a change of the draw order would change."""
    x = make_inputs("slow", 3, H=1, seed=5).arguments
    again = make_inputs("slow", 3, H=1, seed=5).arguments
    assert all(torch.equal(a, again[n]) for n, a in x.items() if isinstance(a, torch.Tensor))
    rng = torch.Generator().manual_seed(5)
    assert torch.equal(x["q"], torch.randn(1, 3, 1, 128, generator=rng).bfloat16())
    with pytest.raises(ValueError, match="family: expected"):
        make_inputs("fast", 3)


def test_the_plugin_that_fails_empty_runs_is_active_in_this_repository(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("kda_core.testing.plugin")
