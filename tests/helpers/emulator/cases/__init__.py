"""The calibration cases: small kernels whose outputs an H200 recorded, and the limits within which the emulator must match them.

A case runs PTX through `ptx.execute`, on inputs from a fixed seed, and returns its outputs. `calibrate.py` records the outputs
of a GPU as fixtures and compares the emulator with them. Recorded outputs are looked up by group and name: do not rename a
case without recording it again.

Limits: exactly defined arithmetic and matrix products must match bit for bit. Approximate instructions may differ by the error
that PTX documents. Whole kernels, which contain approximate instructions, may differ by a relative norm.

Each module registers the cases of its topic when it is imported. The order of the imports is the order of the page in docs.
"""

# ruff: noqa: I001 - the order of the page
from helpers.emulator.cases import arithmetic
from helpers.emulator.cases import conversions
from helpers.emulator.cases import approximations
from helpers.emulator.cases import lanes
from helpers.emulator.cases import atomics
from helpers.emulator.cases import addresses
from helpers.emulator.cases import mma
from helpers.emulator.cases import wgmma
from helpers.emulator.cases import tcgen05
from helpers.emulator.cases import tensor_maps
from helpers.emulator.cases import async_copies
from helpers.emulator.cases import gemm
from helpers.emulator.cases import clusters
from helpers.emulator.cases import prefill
from helpers.emulator.cases.registry import CASES, TO_BE_RECORDED, Bits, Case, Limit, Near, Norm

__all__ = [
    "CASES", "TO_BE_RECORDED", "Bits", "Case", "Limit", "Near", "Norm", "addresses", "approximations", "arithmetic",
    "async_copies", "atomics", "clusters", "conversions", "gemm", "lanes", "mma", "prefill", "tcgen05", "tensor_maps", "wgmma",
]  # fmt: skip
