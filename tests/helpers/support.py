"""Helpers for tests of several packages. They use only public names of kda-core."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import kda_core
from kda_core.contract import KdaOptions, PoolShape, ProblemShape

BF16 = torch.bfloat16


def prefill(device: str = "cpu") -> dict[str, Any]:
    """Returns typical arguments of `kda_core.chunk_kda` for a GPU backend: bf16, K = V = 128, gates in [-5, 0]."""
    rng = torch.Generator().manual_seed(0)
    B, T, H, D = 1, 70, 2, 128
    q, k, v = (torch.randn(B, T, H, D, generator=rng).bfloat16() for _ in range(3))
    x = {
        "q": torch.nn.functional.normalize(q, dim=-1),
        "k": torch.nn.functional.normalize(k, dim=-1),
        "v": v,
        "g": -5 * torch.rand(B, T, H, D, generator=rng),
        "beta": torch.rand(B, T, H, generator=rng),
    }
    return {**{name: tensor.to(device) for name, tensor in x.items()}, "safe_gate": True}


def problem_shape(
    arch: tuple[int, int], B: int = 1, T: int = 1000, H: int = 4, HV: int = 4, K: int = 128, V: int = 128,
    N: int | None = None, index: torch.dtype | None = None, dtype: torch.dtype = BF16, g: torch.dtype = BF16,
    beta: torch.dtype = BF16, A_log: bool = True, dt_bias: bool = True,
    pool: PoolShape | None = None, **options: Any,
) -> ProblemShape:  # fmt: skip
    """Returns the metadata of a call that the GPU backends serve, with the given changes.

    Args:
        N: number of sequences; None: B.
        index: dtype of cu_seqlens; None: sequences are not packed.
        dtype, g, beta: dtypes of q, k, v, of g and of beta.
        A_log, dt_bias: whether the call has them.
        pool: that of a call over a pool of states.
        options: fields of `KdaOptions`.
    """
    gate = {"use_gate_in_kernel": True, "lower_bound": -5.0, "scale": 1.0}
    return ProblemShape(
        B=B, T=T, H=H, HV=HV, K=K, V=V, N=N or B, dtype=dtype, g_dtype=g, beta_dtype=beta, index_dtype=index,
        has_A_log=A_log, has_dt_bias=dt_bias, has_initial_state=False, device_type="cuda", arch=arch,
        options=KdaOptions(**gate | options), pool=pool,
    )  # fmt: skip


#: Calls that no GPU backend serves: (changes of `problem_shape`, words of the refusal).
NOT_BUILT: tuple[tuple[dict[str, Any], str], ...] = (
    ({"K": 64}, "K=64, V=128; serves K=128, V=128"),
    ({"V": 256}, "K=128, V=256; serves K=128, V=128"),
    ({"dtype": torch.float16}, "dtype float16; serves bfloat16"),
    ({"g": torch.float16}, "g: expected torch.bfloat16 or torch.float32, got torch.float16"),
    ({"beta": torch.float64}, "beta: expected torch.bfloat16 or torch.float32, got torch.float64"),
    ({"B": 2**20, "T": 2**20}, "below 2^31"),
)

#: Changes of `problem_shape`: the caller passes log decays, without a bound.
FREE: dict[str, Any] = {"use_gate_in_kernel": False, "lower_bound": None, "A_log": False, "dt_bias": False}


def refused(name: str, shape: ProblemShape) -> str | None:
    """Returns why a backend does not serve a shape, None if it does."""
    return {r.name: r.reason for r in kda_core.explain(shape).refusals}.get(name)


def listed(name: str) -> kda_core.BackendInfo:
    """Returns the entry of `kda_core.backends` for one backend."""
    (info,) = (i for i in kda_core.backends() if i.name == name)
    return info


def modules_after(code: str) -> set[str]:
    """Returns the top-level modules that a new Python process has imported after it ran `code`."""
    (found,) = modules_after_each(code, preloaded="sys")
    return found


_EACH = """
import json, os, sys
import {preloaded}

for code in {parts}:
    if not (child := os.fork()):
        exec(code)
        print(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def modules_after_each(*parts: str, preloaded: str = "torch") -> list[set[str]]:
    """Returns for each part the top-level modules that a new process has imported after it ran this part. The processes share the import of
    a module, which takes most of the time."""
    script = _EACH.format(preloaded=preloaded, parts=parts)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


_FORK = """
import os, threading

started, release, parent = threading.Event(), threading.Event(), os.getpid()

def hold():
    if os.getpid() == parent:
        started.set()
        release.wait()

def afterwards():
    pass

{code}

thread = threading.Thread(target=busy)
thread.start()
started.wait()
ours, theirs = os.pipe()
if os.fork() == 0:
    try:
        text = str(child())
    except BaseException as error:
        text = repr(error)
    os.write(theirs, text.encode())
    os._exit(0)
os.close(theirs)
with open(ours) as pipe:
    print(pipe.read(), end="")
release.set()
thread.join()
afterwards()
"""


def said_by_a_fork(code: str, folder: Path | None = None) -> str:
    """Forks a process while one of its threads waits, and returns the text of the result of ``child()`` in the child.

    A thread of the parent runs ``busy()``, which calls ``hold()``. The fork happens while the thread waits there, with all
    locks that it has taken. In the child ``hold()`` returns at once. A child that does not end fails the test.

    Args:
        code: Python that defines ``busy()`` and ``child()``, and may define ``afterwards()``, which the parent runs at the
            end.
        folder: a folder to put first on ``sys.path``.
    """
    paths = [*([] if folder is None else [str(folder)]), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", _FORK.format(code=code)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, errors = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, errors
    return out
