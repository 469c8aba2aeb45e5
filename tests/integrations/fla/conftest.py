"""Makes FLA ask kda-core in the tests of this folder, and not in other tests of the process."""

import pytest


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setenv("FLA_KDA_CORE", "1")  # helpers.real_fla sets 0
