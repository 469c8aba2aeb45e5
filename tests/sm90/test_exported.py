"""Exported kernels on a GPU: the bits of the DSL's launches, in a process that cannot import the DSL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_cute.jit.cache import entry_of
from kda_cute.jit.key import Variant
from kda_cute.store import export
from kda_sm90.config import ARCH

TESTS = Path(__file__).parents[1]


def run(folder: Path, name: str, *options: str, **environment: str) -> dict[str, Any]:
    """Runs the calls in a new process and returns its report."""
    result = folder / f"{name}.pt"
    variables = {**os.environ, **environment}
    command = [sys.executable, "-m", "helpers.exported_calls", str(result), "cuda", *options]
    done = subprocess.run(command, cwd=TESTS, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(result)


NO_LAUNCHES = """
import sys

for name in ("cutlass", "tvm_ffi"):
    sys.modules[name] = None
from dataclasses import replace

from helpers.exported_calls import calls
from kda_core import use_backend
from kda_core.registry import REGISTRY, record_calls
from kda_cute.store import search

wanted = set()


def find(self, interface, config, arch):
    count = len(interface.arguments(config)._fields)

    def launch(tensor, *values):
        assert len(values) == count
        wanted.add(interface.name)

    return launch, []


search.KernelStore.find = find
spec = REGISTRY.find("sm90").spec
with REGISTRY.replaced(replace(spec, archs=frozenset({"cpu"})), REGISTRY.load(spec), "no launches"), use_backend("sm90"):
    with record_calls() as served:
        done = [name for name, _ in calls("cpu")]
print(sorted(wanted), {call.backend for call in served}, len(done))
"""


def test_the_host_code_of_calls_needs_no_dsl():
    """Of forward, backward and decoding, with kernels that do nothing."""
    command = [sys.executable, "-c", NO_LAUNCHES]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = "['DecodeKernel', 'GradientsKernel', 'PrefillKernel']"
    assert done.stdout == f"{kernels} {{'sm90'}} 6\n"


@pytest.mark.arch((9, 0))
@pytest.mark.parametrize("blocked", [True, False], ids=["without-the-dsl", "beside-the-dsl"])
def test_exported_kernels_compute_the_bits_of_the_dsls_launches(tmp_path, monkeypatch, blocked):
    from kda_sm90.variants import ahead_of_time

    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KDA_KERNEL_DIR", raising=False)
    by_the_dsl = run(tmp_path, "dsl")
    assert by_the_dsl["backends"] == {"sm90"} and by_the_dsl["others"] > 3 and by_the_dsl["exported"] == 0

    offered = [Variant(kernel, config, ARCH) for kernel, config in ahead_of_time(ARCH)]
    compiled = [variant for variant in offered if entry_of(variant).exists()]
    assert len(compiled) == by_the_dsl["others"]
    export.write(compiled, tmp_path / "kernels", ARCH)

    options = ("--blocked",) if blocked else ()
    environment = {"KDA_KERNEL_DIR": str(tmp_path / "kernels"), "KDA_CACHE_DIR": str(tmp_path / "empty")}
    exported = run(tmp_path, "exported", *options, **environment)
    assert exported["backends"] == {"sm90"} and not (blocked and exported["dsl"])
    assert (exported["exported"], exported["others"]) == (len(compiled), 0)
    assert (
        exported["outputs"].keys()
        == by_the_dsl["outputs"].keys()
        >= {"prefill", "backward", "decode", "graph", "graph of a prefill"}
    )
    for name, expected in by_the_dsl["outputs"].items():
        for got, wanted in zip(exported["outputs"][name], expected, strict=True):
            assert torch.equal(got, wanted), name
    print("seconds of the calls, by the DSL and exported:", by_the_dsl["seconds"], exported["seconds"])
