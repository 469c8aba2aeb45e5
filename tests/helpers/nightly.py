"""Parameters of tests that only the nightly session runs."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*arguments: Any) -> Any:
    """Returns the parameters of a case that is marked `nightly`."""
    return pytest.param(*arguments, marks=pytest.mark.nightly)
