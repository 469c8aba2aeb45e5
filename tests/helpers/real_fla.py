"""FLA itself, with kda-core registered in it. A test module that imports this one is skipped where FLA is not installed.

Without a GPU, FLA's kernels run in Triton's interpreter, which has to be chosen before Triton is imported. Other tests of the process
compare with FLA's kernels, so FLA asks kda-core only where ``FLA_KDA_CORE`` is set to 1.
"""

import os
import warnings

import pytest
import torch

from kda_core.fla import is_installed

if not is_installed():
    pytest.skip("FLA is not installed: python -m nox -s test-fla", allow_module_level=True)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("FLA_KDA_CORE", "0")

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels on CPU tensors need Triton's interpreter: hide the GPUs"
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no GPU
    from fla.ops.cp import build_cp_context
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    import kda_core.integrations.fla as integration

__all__ = [
    "build_cp_context",
    "chunk_kda",
    "fused_recurrent_kda",
    "fused_recurrent_kda_fwd",
    "integration",
    "interpreted",
]
