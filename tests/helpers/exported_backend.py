"""Exported kernels of a GPU backend: host code without the DSL, and on a GPU the bits of the DSL's launches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kda_cute.jit.cache import entry_of
from kda_cute.jit.key import Variant
from kda_cute.store import export

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
name = sys.argv[1]
spec = REGISTRY.find(name).spec
with REGISTRY.replaced(replace(spec, archs=frozenset({"cpu"})), REGISTRY.load(spec), "no launches"), use_backend(name):
    with record_calls() as served:
        done = [call for call, _ in calls("cpu")]
print(sorted(wanted), {call.backend for call in served}, len(done))
"""


def kernels_without_dsl(backend: str) -> list[str]:
    """Returns the names of the kernels of all calls, forward, backward and decoding, in a process that cannot import the DSL, where kernels do
    nothing."""
    command = [sys.executable, "-c", NO_LAUNCHES, backend]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names, served = done.stdout.split("] ")
    assert served == f"{{'{backend}'}} 6\n"
    return [name.strip("'") for name in names.strip("[").split(", ")]


def check_bits(
    backend: str,
    arch: str,
    ahead_of_time: Callable[[str], list[tuple[type, object]]],
    folder: Path,
    monkeypatch: Any,
    blocked: bool,
) -> None:
    """Checks on a GPU that exported kernels compute the bits of the DSL's launches. ``blocked``: the DSL cannot be imported."""
    monkeypatch.setenv("KDA_CACHE_DIR", str(folder / "cache"))
    monkeypatch.delenv("KDA_KERNEL_DIR", raising=False)
    by_the_dsl = run(folder, "dsl")
    assert by_the_dsl["backends"] == {backend} and by_the_dsl["others"] > 3 and by_the_dsl["exported"] == 0

    offered = [Variant(kernel, config, arch) for kernel, config in ahead_of_time(arch)]
    compiled = [variant for variant in offered if entry_of(variant).exists()]
    assert len(compiled) == by_the_dsl["others"]
    export.write(compiled, folder / "kernels", arch)

    options = ("--blocked",) if blocked else ()
    environment = {"KDA_KERNEL_DIR": str(folder / "kernels"), "KDA_CACHE_DIR": str(folder / "empty")}
    exported = run(folder, "exported", *options, **environment)
    assert exported["backends"] == {backend} and not (blocked and exported["dsl"])
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
