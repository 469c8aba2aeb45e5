"""Launches the kernel of kda-sm90 without the API above it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from kda_cute import get_kernel
from kda_sm90.arguments import ARGUMENTS
from kda_sm90.config import ARCH, PrefillConfig


def launch(config: PrefillConfig, o: torch.Tensor, **named: Any) -> None:
    """Launches the kernel and waits for its end.

    Args:
        named: arguments of `kda_sm90.arguments.ARGUMENTS`; a tensor stands for its address, and absent ones are 0.
    """
    from kda_sm90.kernels.prefill import PrefillKernel

    given = {"o": o} | named
    assert given.keys() <= ARGUMENTS.keys(), given.keys() - ARGUMENTS.keys()
    value = lambda x: x.data_ptr() if torch.is_tensor(x) else x or 0
    get_kernel(PrefillKernel, config, ARCH)(o, *(value(given.get(name)) for name in ARGUMENTS))
    torch.cuda.synchronize()


def record_places(firsts: list[int], slots: int, heads: int, queues: int) -> tuple[torch.Tensor, int]:
    """Returns the record index of each slot, [heads, slots], if every ring holds all records of its queue, and the
    ring depth for that. It restates the order of ``kernels/schedule.py`` independently.

    Args:
        firsts: first slot of every sequence of a head.
        slots: slots of a head.
    """
    starts = [head * slots + first for head in range(heads) for first in firsts] + [heads * slots]
    tasks = list(pairwise(starts))
    width = max(-(-heads * slots // queues), *(end - begin for begin, end in tasks))
    place = torch.empty(heads * slots, dtype=torch.long)
    for queue in range(queues):
        high = heads * slots - (queues - 1 - queue) * width
        low = high - width
        parts = [range(max(begin, low), min(end, high)) for begin, end in reversed(tasks)]
        for number, slot in enumerate(slot for part in parts for slot in part):
            place[slot] = queue * width + number
    return place.view(heads, slots), width
