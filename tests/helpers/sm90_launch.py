"""Launches the kernel of kda-sm90 without the API above it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from kda_cute import get_kernel
from kda_sm90.arguments import PrefillArguments
from kda_sm90.config import ARCH, PrefillConfig


def launch(config: PrefillConfig, o: torch.Tensor, **named: Any) -> None:
    """Launches the kernel and waits for its end.

    Args:
        config: kernel variant.
        o: [B, T, HV, 128] bf16, the output.
        named: arguments of `kda_sm90.arguments.PrefillArguments`. A tensor stands for its address; missing arguments are 0.
    """
    from kda_sm90.kernels.prefill import PrefillKernel

    given = {"o": o} | named
    assert given.keys() <= set(PrefillArguments._fields), given.keys() - set(PrefillArguments._fields)
    value = lambda x: x.data_ptr() if torch.is_tensor(x) else x or 0
    get_kernel(PrefillKernel, config, ARCH)(o, *(value(given.get(name)) for name in PrefillArguments._fields))
    if o.is_cuda:
        torch.cuda.synchronize()


def record_places(
    firsts: list[int], slots: int, heads: int, queues: int, reverse: bool = False
) -> tuple[torch.Tensor, int]:
    """Returns the record index of each slot, [heads, slots], and the depth of rings that hold all records of their queue.

    It restates the order of ``kernels/schedule.py`` independently.

    Args:
        firsts: first slot of every sequence of a head.
        slots: slots of a head.
        heads, queues: number of value heads and of queues.
        reverse: whether chains run from the last chunk of a sequence to the first.
    """
    starts = [head * slots + first for head in range(heads) for first in firsts] + [heads * slots]
    tasks = list(pairwise(starts))
    width = max(-(-heads * slots // queues), *(end - start for start, end in tasks))
    place = torch.empty(heads * slots, dtype=torch.long)
    for queue in range(queues):
        high = heads * slots - (queues - 1 - queue) * width
        low = high - width
        parts = [range(max(start, low), min(end, high)) for start, end in reversed(tasks)]
        if reverse:
            low, high = queue * width, queue * width + width
            parts = [range(max(start, low), min(end, high))[::-1] for start, end in tasks]
        for number, slot in enumerate(slot for part in parts for slot in part):
            place[slot] = queue * width + number
    return place.view(heads, slots), width
