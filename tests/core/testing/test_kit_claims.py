"""The kit tests every declaration of a spec.

A backend that is correct only for common calls fails. A backend that declares little passes if it is correct for that. A run that
compared nothing fails.
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.fake_plugins import install_into

from kda_core import chunk_kda, contract
from kda_core.backend import BackendSpec
from kda_core.contract import Feature
from kda_core.testing import FAMILIES, error, make_inputs, specification, token_oracle
from kda_core.testing.inputs import PLAIN
from kda_core.testing.limits import limits
from kda_core.testing.runner import Runner

CONSTANTS = """
class Backend:
    def can_run(self, shape):
        return None

    def workspace_bytes(self, shape):
        return 0

    def compile(self, shape):
        pass

    def chunk_fwd(self, inputs, outputs):
        outputs.o.fill_(3.0)
        if outputs.final_state is not None:
            outputs.final_state.fill_(-7.0)
        return outputs
"""

# Correct only for bf16, K = V = 128 and up to 40 heads: the calls that the tests of most kernels cover.
CORNER = """
import torch
from kda_core.reference import ReferenceBackend

class Backend(ReferenceBackend):
    def chunk_fwd(self, inputs, outputs):
        super().chunk_fwd(inputs, outputs)
        s = inputs.shape
        if s.dtype is not torch.bfloat16 or (s.K, s.V) != (128, 128) or s.H > 40:
            outputs.o.fill_(3.0)
        return outputs
"""

# Rounds inputs of every dtype to bf16: correct for bf16, not for fp32 and fp64.
COARSE = """
import torch
from dataclasses import replace
from kda_core.reference import ReferenceBackend

class Backend(ReferenceBackend):
    def chunk_fwd(self, inputs, outputs):
        rounded = {n: getattr(inputs, n).bfloat16().to(inputs.q.dtype) for n in ("q", "k", "v")}
        return super().chunk_fwd(replace(inputs, **rounded), outputs)
"""

# A plugin of pytest that reports oracles which skipped tests have computed.
ORACLES = """
import pytest
import torch
from kda_core.testing import runner

computed, wasted = [], []

def counted(*args, _oracle=runner.token_oracle, **kwargs):
    computed.append(1)
    return _oracle(*args, **kwargs)

runner.token_oracle = counted

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and computed:
        wasted.append(item.nodeid)
    computed.clear()
    return report

def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"oracles of skipped tests: {wasted}")
"""


def environment(folder):
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


def conformance(folder, name, *more):
    return subprocess.run(
        [sys.executable, "-m", "kda_core", "conformance", name, *more],
        capture_output=True, text=True, env=environment(folder), check=False,
    )  # fmt: skip


def failures(done):
    return set(re.findall(r"^FAILED \S+::TestBackend::(\S+)", done.stdout, re.MULTILINE))


def compared(done):
    return int(re.search(r"^compared +(\d+) outputs with the fp64 oracle$", done.stdout, re.MULTILINE)[1])


def test_a_backend_that_returns_constants_fails_at_each_feature_that_it_declares(tmp_path):
    features = {"initial_state", "final_state", "unbounded_gate"}
    install_into(tmp_path, "constants", features=features, backend=CONSTANTS)
    done = conformance(tmp_path, "constants", "--kda-quick")
    assert done.returncode == 1, done.stdout
    failed = failures(done)
    assert {f"test_feature[{f}]" for f in features} <= failed
    assert {"test_base[1]", "test_base[129]", "test_base_heads[3]"} <= failed
    assert not any(f.startswith("test_feature") for f in failed - {f"test_feature[{f}]" for f in features})


def test_a_backend_that_is_correct_only_for_common_calls_fails(tmp_path):
    install_into(tmp_path, "corner", backend=CORNER)
    done = conformance(tmp_path, "corner", "--kda-quick", "-k", "test_base or test_dtypes or test_head_dims")
    assert done.returncode == 1, done.stdout
    failed = failures(done)
    assert {"test_base_heads[41]", "test_base_heads[96]"} <= failed
    for dtype in ("float16", "float32", "float64"):
        assert f"test_dtypes[{dtype}-precomputed]" in failed
    for pair in ("K64-V64", "K64-V128", "K128-V64", "K128-V256", "K256-V256"):
        assert f"test_head_dims[{pair}-states]" in failed
    inside = ("test_base[", "test_base_heads[7]", "test_dtypes[bfloat16", "test_head_dims[K128-V128-")
    assert not any(test.startswith(inside) for test in failed)


def test_only_declared_dtypes_and_head_dims_are_tested_and_all_others_are_refused(tmp_path):
    declared = {"dtypes": frozenset({"bfloat16"}), "head_dims": frozenset({(128, 128)})}
    install_into(tmp_path, "corner", backend=CORNER, **declared)
    done = conformance(tmp_path, "corner", "--kda-quick", "-k", "dtypes or head_dims or test_base")
    assert failures(done) == {"test_base_heads[41]", "test_base_heads[96]"}, done.stdout
    assert "test_undeclared" not in done.stdout and "not declared" not in done.stdout


def test_a_backend_that_rounds_to_bf16_fails_in_the_finer_dtypes(tmp_path):
    install_into(tmp_path, "coarse", backend=COARSE)
    done = conformance(tmp_path, "coarse", "--kda-quick", "-k", "test_dtypes")
    assert {f.rpartition("-")[0] for f in failures(done)} == {"test_dtypes[float32", "test_dtypes[float64"}, (
        done.stdout
    )


def test_a_backend_without_features_passes_and_no_test_of_its_declarations_is_skipped(tmp_path):
    (tmp_path / "oracles.py").write_text(ORACLES)
    install_into(tmp_path, "minimal", features=set())
    done = conformance(tmp_path, "minimal", "--kda-no-skip", "-p", "oracles")
    assert done.returncode == 0 and compared(done) > 40, done.stdout
    assert "oracles of skipped tests: []" in done.stdout
    assert re.search(r"^ +\d+  a GPU \(CUDA streams\)$", done.stdout, re.MULTILINE)
    assert not re.search(r"^not run +\d+ \((refused|needs a GPU|quick)\)", done.stdout, re.MULTILINE)
    quick = conformance(tmp_path, "minimal", "--kda-no-skip", "--kda-quick", "-k", "test_base_heads")
    assert quick.returncode == 1 and "--kda-no-skip: Skipped: left out by --kda-quick" in quick.stdout


@pytest.mark.parametrize("more", ((), ("-n", "2")), ids=("one process", "xdist"))
def test_a_run_that_compared_nothing_fails(tmp_path, more):
    install_into(tmp_path, "unwilling", refuses="not today")
    base = conformance(tmp_path, "unwilling", "-k", "test_base", *more)
    assert base.returncode == 1 and compared(base) == 0, base.stdout
    assert "FAILED: no output of backend 'unwilling' was compared with the fp64 oracle" in base.stdout
    assert "(refused)" in base.stdout and not failures(base)
    if not more:
        narrow = conformance(tmp_path, "unwilling", "-k", "test_two_threads")
        assert narrow.returncode == 0 and compared(narrow) == 0 and "FAILED" not in narrow.stdout


def test_a_backend_of_another_dtype_and_head_dimension_is_tested_with_those(tmp_path):
    declared = {"dtypes": frozenset({"float64"}), "head_dims": frozenset({(24, 40)})}
    features = {f.value for f in Feature} - {"segment_summary"}
    install_into(tmp_path, "exotic", features=features, **declared)
    done = conformance(tmp_path, "exotic", "--kda-quick")
    assert done.returncode == 0 and compared(done) > 200, done.stdout


@pytest.mark.parametrize("name", ("no-such-backend", "foreign"))
def test_a_backend_that_cannot_run_here_is_reported_in_one_line(tmp_path, name):
    install_into(tmp_path, "foreign", archs={(3, 5)})
    done = conformance(tmp_path, name)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"backend {name!r} cannot run here: ")
    assert re.search("installed: reference.*foreign", line)


def test_an_option_that_names_no_backend_is_a_usage_error(tmp_path):
    own = ("-c", os.devnull, "-p", "no:cacheprovider", "-p", "kda_core.testing.plugin")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *own, "--pyargs", "kda_core.testing.conformance", "--kda-backend", "nope"],
        capture_output=True, text=True, env=environment(tmp_path), check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--kda-backend: backend 'nope' cannot run here: not-installed; installed:" in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) < 5


GUIDE = Path(__file__).parents[3] / "docs" / "writing-a-backend.md"


def test_the_backend_of_the_guide_passes(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (spec,) = (b for b in blocks if "SPEC = " in b)
    (backend,) = (b for b in blocks if "class MineBackend" in b)
    package = tmp_path / "kda_mine"
    package.mkdir()
    (package / "backend.py").write_text(backend)
    install_into(tmp_path, "mine", source=spec)
    done = conformance(tmp_path, "mine", "--kda-quick")
    assert done.returncode == 0 and compared(done) > 30, done.stdout


def test_the_guide_lists_every_field_that_a_backend_receives():
    text = GUIDE.read_text()
    for kind in (contract.KdaInputs, contract.ProblemShape, contract.KdaOutputs, BackendSpec):
        missing = [f.name for f in dataclasses.fields(kind) if f"`{f.name}`" not in text]
        assert not missing, f"{kind.__name__}: {missing}"


def test_a_second_gpu_is_used_if_there_is_one(monkeypatch):
    cuda = {"current_device": lambda: 0, "get_device_capability": lambda i: (9, 0)}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    kda = Runner("reference", "cuda", 128, quick=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert kda.other_device() == "cuda:1"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(pytest.skip.Exception, match="needs a GPU: a second one"):
        kda.other_device()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(pytest.skip.Exception, match="needs a GPU: a second one"):
        kda.other_device()


# ---- the accuracy of each dtype


def tf32(x):
    """Returns fp32 values rounded to the 10 bits of a TF32 mantissa."""
    bits = x.float().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("family", (PLAIN, *FAMILIES))
@pytest.mark.parametrize("T", (20, 130))
def test_tf32_operands_are_accurate_enough_for_fp32_inputs_and_bf16_operands_are_not(monkeypatch, family, T):
    x = make_inputs(family, T, K=64, V=64, dtype=torch.float32, initial_state=True).arguments
    want = token_oracle(**x)
    for_o, for_state = limits(x, want)
    assert error(specification.forward(**x, C=64)[0], want[0]) > for_o
    monkeypatch.setattr(specification, "bf16", tf32)
    o, state = specification.forward(**x, C=64)
    assert error(o, want[0]) <= for_o and error(state, want[1], state=True) <= for_state


@pytest.mark.parametrize("family", (PLAIN, *FAMILIES))
def test_fp64_arithmetic_is_accurate_enough_for_fp64_inputs_and_fp32_arithmetic_is_not(family):
    x = make_inputs(family, 130, K=64, V=64, dtype=torch.float64, initial_state=True).arguments
    want = token_oracle(**x)
    for_o, for_state = limits(x, want)
    run = lambda y: chunk_kda(**y, output_final_state=True, backend="reference", context_parallel="off")
    o, state = run(x)
    assert error(o, want[0]) <= for_o and error(state, want[1], state=True) <= for_state
    o, state = run({n: t.float() if isinstance(t, torch.Tensor) else t for n, t in x.items()})
    assert error(o, want[0]) > for_o and error(state, want[1], state=True) > for_state
