"""Fixtures: an empty cache folder, the demonstration kernels, other Python processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kda_cute import clear_memory


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder (it does not exist yet) and a process that has loaded nothing."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KDA_CACHE_DIR", str(folder))
    monkeypatch.delenv("KDA_DISABLE_JIT", raising=False)
    clear_memory()
    yield folder
    clear_memory()


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """The module of demonstration kernels."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: no kernel could be compiled")
    pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi: no kernel could be compiled")
    from helpers import demo_kernels

    return demo_kernels


@pytest.fixture(scope="session")
def start_python() -> Callable[..., subprocess.Popen[str]]:
    """Starts an interpreter on some code, with this process's import path and environment."""

    def start(code: str, **environment: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
        command = [sys.executable, "-c", code]
        return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


@pytest.fixture(scope="session")
def python(start_python: Callable[..., subprocess.Popen[str]]) -> Callable[..., str]:
    """Runs code in a new interpreter and returns what it printed. The test fails if the code fails."""

    def run(code: str, **environment: str) -> str:
        process = start_python(code, **environment)
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        return output

    return run
