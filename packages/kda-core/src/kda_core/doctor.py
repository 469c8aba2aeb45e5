"""What this installation looks like, for bug reports: versions, GPUs, the compiler's wheels, the cache, the backends."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kda_core import env
from kda_core.abi import BACKEND_ABI
from kda_core.cute.versions import dsl_wheels
from kda_core.registry import REGISTRY

DISTRIBUTIONS = (
    "kda-core", "kda-sm90", "kda-sm100", "kda-cp", "torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi",
    "cuda-python", "flash-linear-attention", "fla-core",
)  # fmt: skip


def examine() -> dict[str, Any]:
    """All findings as plain data; ``problems`` lists what should be mended, empty where all is well."""
    wheels = dsl_wheels()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "abi": list(BACKEND_ABI),
        "versions": {name: v for name in DISTRIBUTIONS if (v := _version(name)) is not None},
        "cuda": {"torch": torch.version.cuda, "available": torch.cuda.is_available(), "driver": _driver()},
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "dsl_wheels": dict(wheels.versions),
        "cache": _cache(),
        "environment": {v.name: os.environ[v.name] for v in env.VARIABLES if v.name in os.environ},
        "backends": [
            {"name": i.name, "status": i.status, "reason": i.reason, "version": i.version, "note": i.note}
            for i in REGISTRY.info()
        ],
        "planners": [{"name": c.name, "status": _planner_status(c)} for c in REGISTRY.planners()],
    }
    wants_dsl = wheels.versions or {"kda-sm90", "kda-sm100"} & report["versions"].keys()
    problems = list(wheels.problems) if wants_dsl else []
    problems += [
        f"backend {b['name']} is {b['status']}: {b['reason']}"
        for b in report["backends"]
        if b["status"] in ("broken", "abi-mismatch")
    ]
    if not report["cache"]["writable"]:
        problems.append(
            f"the kernel cache {report['cache']['folder']} cannot be written: every process compiles anew"
        )
    report["problems"] = problems
    return report


def show(report: dict[str, Any]) -> str:
    """The findings as text."""
    cuda = report["cuda"]
    lines = [
        f"python      {report['python']} on {report['platform']}",
        f"ABI         {'.'.join(map(str, report['abi']))}",
        *(f"version     {name} {v}" for name, v in report["versions"].items()),
        f"cuda        torch built for {cuda['torch'] or 'CPU only'}, driver {cuda['driver'] or 'not found'}",
        *(
            f"gpu         {g['index']}: {g['name']}, {g['arch']}, {g['memory_gib']:.0f} GiB"
            for g in report["gpus"]
        ),
        *([] if report["gpus"] else ["gpu         none visible"]),
        *(f"dsl wheel   {name} {v}" for name, v in report["dsl_wheels"].items()),
        f"cache       {report['cache']['folder']} ({report['cache']['files']} files, {report['cache']['bytes']} bytes)",
        *(f"environment {name}={value}" for name, value in report["environment"].items()),
        *(
            f"backend     {b['name']}: {b['status']}{': ' if b['reason'] else ''}{b['reason']}"
            for b in report["backends"]
        ),
        *(f"note        {b['name']}: {b['note']}" for b in report["backends"] if b["note"]),
        *(f"planner     {p['name']}: {p['status']}" for p in report["planners"]),
        *(f"PROBLEM     {p}" for p in report["problems"]),
    ]
    return "\n".join(
        [*lines, "no problems found" if not report["problems"] else f"{len(report['problems'])} problems"]
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The NVIDIA driver's version as the kernel module tells it."""
    try:
        with open("/proc/driver/nvidia/version") as f:
            words = f.readline().split()
    except OSError:
        return None
    return next((w for w in words if w.count(".") >= 1 and w.replace(".", "").isdigit()), None)


def _gpu(index: int) -> dict[str, Any]:
    p = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": p.name,
        "arch": f"sm_{p.major}{p.minor}",
        "memory_gib": p.total_memory / 2**30,
    }


def _cache() -> dict[str, Any]:
    folder = env.cache_dir()
    files = [p for p in folder.rglob("*") if p.is_file()] if folder.is_dir() else []
    nearest = folder
    while not nearest.exists():
        nearest = nearest.parent
    return {
        "folder": str(folder),
        "files": len(files),
        "bytes": sum(p.stat().st_size for p in files),
        "writable": os.access(nearest, os.W_OK),
    }


def _planner_status(c: Any) -> str:
    if c.status != "ok":
        return f"{c.status}: {c.reason}"
    return "ok" if c.spec.unavailable is None else f"unsupported: {c.spec.unavailable}"
