"""What tests of several packages use; public names of kda-core alone."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

import kda_core


def prefill(device: str = "cpu") -> dict[str, Any]:
    """Arguments of `kda_core.chunk_kda` that a GPU backend is made for: bf16, K = V = 128, gates in [-5, 0]."""
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


def listed(name: str) -> kda_core.BackendInfo:
    """The line of `kda_core.backends` for one backend."""
    (info,) = (i for i in kda_core.backends() if i.name == name)
    return info


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh Python has imported once it has run `code`."""
    script = (
        f"import json, sys\n{code}\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))
