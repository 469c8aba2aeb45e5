"""The machine code of the chains' loops."""

import re
import subprocess

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: no kernel could be compiled")

from helpers.nightly import nightly

from kda_cute.jit import ptxas
from kda_sm90.config import ARCH, PrefillConfig
from kda_sm90.kernels.prefill import PrefillKernel
from kda_sm90.variants import SAMPLE

#: A wgmma whose row operand is in registers, as all products of chains.
PRODUCT = re.compile(r"HGMMA\S* R\d+, R\d+, gdesc")
#: Most instructions between two products of a loop.
NEXT = 150

ALWAYS = (
    PrefillConfig(64, 1),
    PrefillConfig(32, 2, local=True),
    PrefillConfig(64, 1, mode="summarize"),
    PrefillConfig(64, 1, mode="reverse", states=True),
)
#: ptxas 13.4 keeps the addresses of ``recompute`` and ``execute`` in vector registers (docs/kernels/chain.md, "Machine code").
EXCEPTIONS = ("recompute", "execute")
OTHERS = tuple(
    config
    for config in SAMPLE
    if isinstance(config, PrefillConfig) and config.mode not in EXCEPTIONS and config not in ALWAYS
)


def loops(config, folder):
    """Returns the instructions from the first to the last product of each loop of a chain."""
    path = folder / "kernel.cubin"
    ptxas.report(PrefillKernel, config, ARCH, path)
    tool = ptxas.tool_path("nvdisasm", "nvidia-cuda-nvdisasm")
    text = subprocess.run([tool, "-c", path], check=True, capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]
    found: list[list[int]] = []
    for i in (i for i, line in enumerate(lines) if PRODUCT.search(line)):
        if not found or i - found[-1][-1] > NEXT:
            found.append([])
        found[-1].append(i)
    return [lines[places[0] : places[-1]] for places in found if len(places) > 8]


@pytest.mark.parametrize("config", (*ALWAYS, *map(nightly, OTHERS)), ids=str)
def test_addresses_of_operands_stay_in_uniform_registers(config, tmp_path):
    """If ptxas does not see that all lanes of a warp have the same addresses, it copies them from vector registers for every wgmma. A
    change far from the loop may cause this, and a chain then takes 10% longer."""
    found = loops(config, tmp_path)
    assert found
    assert [line for loop in found for line in loop if "R2UR" in line] == []
