"""The number of workers on a machine or in a container: affinity, and the quotas of cgroups."""

from __future__ import annotations

import os

import pytest

from kda_cute.jit.cpus import usable_cpus


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 16 CPUs and the given files (path -> text)."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)

    def make(**files):
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return make


V1 = "3:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n"
V1_FOLDER = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 16),
        (
            {
                "proc/self/cgroup": "0::/a.slice/b.scope\n",
                "sys/fs/cgroup/a.slice/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a.slice/b.scope/cpu.max": "max 100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": V1,
                f"{V1_FOLDER}/docker/abc/cpu.cfs_quota_us": "500000\n",
                f"{V1_FOLDER}/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (  # inside the container the mount is the container's group
            {
                "proc/self/cgroup": V1,
                f"{V1_FOLDER}/cpu.cfs_quota_us": "500000\n",
                f"{V1_FOLDER}/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
        ({"proc/self/cgroup": "nonsense\n\n", "sys/fs/cgroup/cpu.max": "a b c\n"}, 16),
    ],
)
def test_quotas(machine, files, cpus):
    assert usable_cpus(machine(**files)) == cpus


def test_affinity(machine, monkeypatch):
    root = machine(**{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5}, raising=False)
    assert usable_cpus(root) == 2


def test_this_machine():
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)
