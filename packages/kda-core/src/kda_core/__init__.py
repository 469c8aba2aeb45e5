"""Kimi Delta Attention behind one API: ``from kda_core import chunk_kda``.

`chunk_kda` and `fused_recurrent_kda` take FLA's arguments. `backends` lists the backends, `explain` says which one would serve a
call, and `use_backend` chooses one.
"""

from importlib.metadata import PackageNotFoundError, version

from kda_core.abi import BACKEND_ABI
from kda_core.api import chunk_kda, fused_recurrent_kda
from kda_core.explanation import BackendTable, Explanation, backends, explain
from kda_core.registry import BackendInfo, use_backend

try:
    __version__ = version("kda-core")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "BACKEND_ABI",
    "BackendInfo",
    "BackendTable",
    "Explanation",
    "backends",
    "chunk_kda",
    "explain",
    "fused_recurrent_kda",
    "use_backend",
]
