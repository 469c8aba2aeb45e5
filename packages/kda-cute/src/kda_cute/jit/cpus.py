"""How many CPUs this process may use: its affinity, and the quota of its cgroups, as containers set it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """The CPUs that this process may run on, at most as many as its cgroups give it time for; at least 1. ``root`` is
    where the file systems ``proc`` and ``sys`` are."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """CPUs that each cgroup of this process grants: those of version 2 and of version 1, and their parents'."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if not controllers:
            mounts = [root / "sys/fs/cgroup"]
        elif "cpu" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in dict.fromkeys((controllers, "cpu"))]
        else:
            continue
        below = Path(path.lstrip("/"))
        for mount in mounts:  # in a container the path may be the host's, and the mount its own group
            for folder in dict.fromkeys(mount / part for part in (below, *below.parents)):
                yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) == 2 and all(word.isdigit() and int(word) for word in words):  # "max" and -1: no limit
        yield int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
