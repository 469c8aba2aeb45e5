"""Launches that begin before the kernel ahead of them has ended: the kernel waits before it accesses global memory."""

import re
import subprocess

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: no kernel could be compiled")

from helpers.exported_kernels import VARIANTS, compiled

from kda_cute.jit import ptxas
from kda_cute.store import cubin

OVERLAPPING = [one for one in VARIANTS if one[0].overlaps]
#: Instructions that access global memory, or memory of any kind.
ACCESS = re.compile(r"\b(LDG|STG|LDGSTS|ATOMG?|REDG?|LD|ST|UBLKCP|UTMALDG|UTMASTG|UTMAREDG)\b")


def machine_code(content, folder):
    """Returns the instructions of the only kernel of an object file, in their order."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin.cubin_of(content))
    tool = ptxas.tool_path("nvdisasm", "nvidia-cuda-nvdisasm")
    text = subprocess.run([tool, "-c", path], check=True, capture_output=True, text=True).stdout
    return [line.split("*/")[1] for line in text.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]


def test_kernels_of_decoding_overlap():
    assert {one[0].name for one in OVERLAPPING} == {"DecodeKernel", "JournalKernel", "VerifyKernel"}


@pytest.mark.parametrize("one", OVERLAPPING, ids=lambda one: one[0].name)
def test_the_wait_comes_before_all_accesses(one, tmp_path):
    """In the machine code: ptxas moves read-only loads across barriers."""
    lines = machine_code(compiled(*one).content, tmp_path)
    waits = [i for i, line in enumerate(lines) if "ACQBULK" in line]
    accesses = [i for i, line in enumerate(lines) if ACCESS.search(line)]
    assert len(waits) == 1 and len(accesses) > 20
    assert waits[0] < accesses[0], lines[accesses[0]]
    # no branch leads past the wait
    assert not any("BRA" in line for line in lines[: waits[0]])
