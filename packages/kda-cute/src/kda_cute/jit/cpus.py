"""The number of CPUs that this process may use: its affinity, and the quotas of its cgroups, which containers set."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """Returns the number of CPUs in the process's affinity, limited by the quotas of its cgroups; at least 1.

    Args:
        root: the folder of the file systems ``proc`` and ``sys``.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in CPUs, of this process's cgroups (versions 1 and 2) and of their parents."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if not controllers:
            mounts = [root / "sys/fs/cgroup"]
        elif "cpu" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in dict.fromkeys((controllers, "cpu"))]
        else:
            continue
        below = Path(path.lstrip("/"))
        # In a container the path may be the host's, while the mount is the container's group.
        for mount in mounts:
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
