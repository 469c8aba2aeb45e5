"""Triton's kernels without tuning, which takes minutes for each combination of head counts and head dimensions."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def untuned() -> Iterator[None]:
    """Within the block, each tuned kernel of a module that has been imported uses its first configuration."""
    from triton.runtime.autotuner import Autotuner

    gc.unfreeze()  # `get_objects` leaves out what tests/conftest.py has frozen
    kept = [(x, x.configs) for x in gc.get_objects() if issubclass(type(x), Autotuner)]
    gc.freeze()
    assert kept
    for tuner, configs in kept:
        tuner.configs = configs[:1]
    try:
        yield
    finally:
        for tuner, configs in kept:
            tuner.configs = configs
