"""The machine code of prefill: the chains' loops, their bulk copies, and the claims of the intra-chunk stage."""

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
    PrefillConfig(32, 2, gate="softplus", unbounded=True),
    PrefillConfig(64, 1, gate="softplus", unbounded=True),
    PrefillConfig(64, 1, mode="summarize"),
    PrefillConfig(64, 1, mode="execute"),
    PrefillConfig(64, 1, mode="reverse", states=True),
    PrefillConfig(64, 2, mode="recompute", states=True),
)
OTHERS = tuple(config for config in SAMPLE if isinstance(config, PrefillConfig) and config not in ALWAYS)


def disassemble(config, folder, *options):
    """Returns the output of nvdisasm for a variant."""
    path = folder / "kernel.cubin"
    ptxas.report(PrefillKernel, config, ARCH, path)
    tool = ptxas.tool_path("nvdisasm", "nvidia-cuda-nvdisasm")
    return subprocess.run([tool, "-c", *options, path], check=True, capture_output=True, text=True).stdout


def loops(config, folder):
    """Returns the instructions from the first to the last product of each loop of a chain."""
    text = disassemble(config, folder)
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


@pytest.mark.parametrize("config", (*ALWAYS, *map(nightly, OTHERS)), ids=str)
def test_bulk_copies_are_not_in_loops_over_lanes(config, tmp_path):
    """Operands of a bulk copy are in uniform registers. If ptxas does not see that one lane alone issues the copy, it loops over the lanes, with
    several copies to uniform registers for each. 1, 8192, 32 then took 4% longer."""
    text = disassemble(config, tmp_path)
    assert "UBLKCP" in text
    assert [line for line in text.splitlines() if "BRA.U.ANY" in line] == []


#: An instruction in the output of ``nvdisasm -hex``: its text, then the lower and the upper half of its 128 bits.
ENCODED = re.compile(r"/\*[0-9a-f]{4,}\*/ +(.*?);\s+/\* 0x([0-9a-f]{16}) \*/\s+/\* 0x([0-9a-f]{16}) \*/")


def scoreboards(upper):
    """Returns, from the upper half of an instruction's bits, the scoreboard that its result sets (7: none), and a mask of those that it
    waits for."""
    return upper >> 46 & 7, upper >> 52 & 63


@pytest.mark.parametrize(
    "config", (*(config for config in ALWAYS if not config.reads_records), PrefillConfig(32, 2)), ids=str
)
def test_groups_work_while_a_claim_is_under_way(config, tmp_path):
    """The answer to an atomic takes 0.5 to 1 us. ptxas lets a warp wait for it where an instruction uses the result first. Of the two claims in
    the code, that of an item without a chunk has nothing to do meanwhile."""
    code = [
        (text, *scoreboards(int(upper, 16)))
        for text, _, upper in ENCODED.findall(disassemble(config, tmp_path, "-hex"))
    ]
    hidden = []
    for i, (text, sets, _) in enumerate(code):
        if "ATOMG" in text:
            hidden.append(next(n for n, (*_, waits) in enumerate(code[i + 1 :]) if waits >> sets & 1))
    assert max(hidden) > 100
