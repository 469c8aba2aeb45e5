"""The kernel of kda-sm90 without the API above it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from kda_cute import get_kernel
from kda_sm90.config import PrefillConfig


def launch(config: PrefillConfig, o: torch.Tensor, **named: Any) -> None:
    """One launch with the arguments that ``kernels.prefill.ARGUMENTS`` names; tensors stand for their addresses, and
    what is not named is 0. Waits for its end."""
    from kda_sm90.kernels.prefill import ARGUMENTS, PrefillKernel

    given = {"o": o} | named
    names = [name for group in ARGUMENTS.values() for name in group]
    assert given.keys() <= set(names), given.keys() - set(names)
    values = [
        given.get(name) or 0 if not torch.is_tensor(given.get(name)) else given[name].data_ptr()
        for name in names
    ]
    get_kernel(PrefillKernel, config, "sm_90a")(o, *values)
    torch.cuda.synchronize()


def places(firsts: list[int], slots: int, heads: int, streams: int) -> tuple[torch.Tensor, int]:
    """Where the record of each slot of each head lies, [heads, slots], if rings hold all that their streams have; and how
    deep they are for that. ``firsts``: the first slot of every sequence of a head. The order of
    ``kernels/schedule.py``, written anew."""
    starts = [head * slots + first for head in range(heads) for first in firsts] + [heads * slots]
    tasks = list(pairwise(starts))
    width = max(-(-heads * slots // streams), *(end - begin for begin, end in tasks))
    place = torch.empty(heads * slots, dtype=torch.long)
    for stream in range(streams):
        high = heads * slots - (streams - 1 - stream) * width
        low = high - width
        parts = [range(max(begin, low), min(end, high)) for begin, end in reversed(tasks)]
        for number, slot in enumerate(slot for part in parts for slot in part):
            place[slot] = stream * width + number
    return place.view(heads, slots), width
