"""The byte map of the intra-chunk stage: regions that are reused hold what replaces them."""

import re
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import pytest

from kda_cute.device.intra_chunk.memory import FRAGMENT_BYTES, TILE, Layout
from kda_cute.records import Gate, GateDtype


@dataclass(frozen=True)
class Config:
    chunk: int
    unbounded: bool
    gate: Gate = "bounded"
    gate_dtype: GateDtype = "bfloat16"


@pytest.fixture(params=[(C, unbounded) for C in (32, 64) for unbounded in (False, True)], ids=str)
def layout(request):
    return Layout.of(Config(*request.param))


def test_regions_follow_one_another(layout):
    offsets = [getattr(layout, field.name) for field in fields(layout) if field.name != "chunk"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] == layout.bytes


def test_docstring_has_the_offsets_of_every_variant():
    variants = [Layout.of(Config(chunk, unbounded)) for chunk in (64, 32) for unbounded in (False, True)]
    rows = re.findall(r"^ +(\w+)((?: +(?:\d+|-)){4})$", Layout.__doc__, re.MULTILINE)
    assert [name for name, _ in rows] == [
        f.name for f in fields(Layout) if f.name not in ("chunk", "bytes")
    ] + ["end"]
    for name, values in rows:
        for value, layout in zip(values.split(), variants, strict=True):
            found = layout.bytes if name == "end" else getattr(layout, name)
            assert value == "-" if name == "hop_exponent" and layout.beta == found else int(value) == found


def test_page_has_the_offsets_of_bounded_chunks_of_64():
    page = Path(__file__).parents[2] / "docs/kernels/intra-chunk.md"
    layout = Layout.of(Config(64, False))
    rows = re.findall(r"^ +(\d+)  (\w+)", page.read_text(), re.MULTILINE)
    expected = {
        f.name: getattr(layout, f.name)
        for f in fields(layout)
        if f.name not in ("chunk", "hop_exponent", "bytes")
    }
    assert {name: int(offset) for offset, name in rows} == {**expected, "end": layout.bytes}


def test_blocks_of_l_fit_into_the_tables_that_they_replace(layout):
    last = layout.l_block(0, layout.blocks - 1, layout.blocks - 2)
    assert layout.l_block(0, 1, 0) == layout.first_decay and last + TILE <= layout.hop_scale


def test_inverses_and_scratch_fit_into_k(layout):
    for block in range(layout.blocks):
        start = layout.k + block * FRAGMENT_BYTES
        assert layout.inverse(0, block) == start and layout.scratch(0, block) == start + 2 * TILE
        assert layout.scratch(0, block) + 512 <= start + FRAGMENT_BYTES


def test_blocks_of_l_do_not_overlap(layout):
    starts = [layout.l_block(0, i, j) for i in range(layout.blocks) for j in range(i)]
    assert all(b - a == TILE for a, b in pairwise(starts))
