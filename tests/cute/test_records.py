"""The record layout: where a chain finds what the intra-chunk stage writes, and the check of its version."""

import pytest

from kda_cute import records
from kda_cute.records import HEAD_DIM, RECORDS, decay_offset, decay_start, decay_units, require


@pytest.mark.parametrize("quad", range(4))
@pytest.mark.parametrize("base", (0, 128, 4736))
def test_decay_units_invert_decay_offset(quad, base):
    channels = [16 * unit + 2 * quad + c for unit in range(8) for c in (0, 1, 8, 9)]
    addresses = [unit + 4 * word for unit in decay_units(base + decay_start(quad)) for word in range(4)]
    assert addresses == [base + 4 * decay_offset(channel) for channel in channels]


def test_every_channel_has_a_decay_of_its_own():
    assert sorted(decay_offset(channel) for channel in range(HEAD_DIM)) == list(range(HEAD_DIM))


def test_another_record_layout_is_refused_at_import(monkeypatch):
    require(RECORDS, "kda-sm90")
    monkeypatch.setattr(records, "RECORDS", RECORDS + 1)
    with pytest.raises(ImportError, match=f"kda-sm90 needs version {RECORDS} .* has version {RECORDS + 1}"):
        require(RECORDS, "kda-sm90")
