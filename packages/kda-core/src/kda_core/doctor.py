"""What this installation looks like and what should be mended in it: versions, GPUs, the compiler's wheels, the cache, the
environment, the backends, and whether a standard call would be served.

Nothing that is broken ends the examination: a part that fails is a problem of its own, and the others are still reported.
"""

from __future__ import annotations

import copy
import difflib
import os
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kda_core import env, requirements
from kda_core.abi import BACKEND_ABI
from kda_core.contract import KdaOptions, ProblemShape
from kda_core.discovery import published_backends
from kda_core.errors import ArgumentError, BackendNotFoundError
from kda_core.explanation import explain
from kda_core.registry import REGISTRY, arch_matches, show_archs
from kda_cute import ARCHITECTURES
from kda_cute.jit.versions import DSL, DslWheels, dsl_wheels

DISTRIBUTIONS = (
    "torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "flash-linear-attention", "fla-core",
)  # fmt: skip
"""Third parties whose versions are shown, beside kda-core, its siblings and all that brings a backend or a planner."""

DSL_DRIVERS = {12: "575.51.03", 13: "580"}
"""The NVIDIA driver that a compiler of the CuTe DSL needs at least, by its CUDA major version: that of CUDA 12.9, and of any
13.x (NVIDIA's quick start of the CuTe DSL, and its table of minor-version compatibility)."""

STANDARD = ProblemShape(
    B=1, T=4096, H=16, HV=16, K=128, V=128, N=1,
    dtype=torch.bfloat16, g_dtype=torch.bfloat16, beta_dtype=torch.bfloat16, index_dtype=None,
    has_A_log=True, has_dt_bias=True, has_initial_state=False, device_type="cpu", arch=None,
    options=KdaOptions(
        scale=128**-0.5, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    ),
)  # fmt: skip
"""The call that is tried: a prefill of Kimi Linear."""


@dataclass
class _Found:
    """What the parts of an examination have found so far.

    Attributes:
        problems: what should be mended.
        unchecked: what could not be looked at, and why.
    """

    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def examine() -> dict[str, Any]:
    """All findings as plain data, which JSON can hold. It never raises.

    Returns:
        "python", "platform", "abi", "versions", "requirements", "cuda", "gpus", "dsl_wheels", "cache", "environment", "backends",
        "planners" and "calls", each empty where it could not be examined; "problems", a text for each thing that should be
        mended; "unchecked", a text for each that could not be looked at.
    """
    found = _Found()
    report: dict[str, Any] = {}
    for name, (look, empty) in _PARTS.items():
        try:
            report[name] = look(found)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever is broken, the rest is still reported
            report[name] = copy.deepcopy(empty)
            found.problems.append(f"{name} cannot be examined: {type(error).__name__}: {error}")
    report["problems"] = list(dict.fromkeys(found.problems))
    report["unchecked"] = list(dict.fromkeys(found.unchecked))
    return report


def show(report: dict[str, Any]) -> str:
    """The findings as text."""
    cuda, cache = report["cuda"], report["cache"]
    torch_cuda = f"CUDA {cuda['torch']}" if cuda["torch"] else "the CPU alone"
    lines = [
        f"python      {report['python']} on {report['platform']}",
        f"ABI         {'.'.join(map(str, report['abi']))}",
        *(f"version     {name} {v}" for name, v in report["versions"].items()),
        f"cuda        torch built for {torch_cuda}, driver {cuda['driver'] or 'not found'}",
        *(
            f"gpu         {g['index']}: {g['name']}, {g['arch']}, {g['memory_gib']:.0f} GiB"
            for g in report["gpus"]
        ),
        *([] if report["gpus"] else ["gpu         none visible"]),
        *(f"dsl wheel   {name} {v}" for name, v in report["dsl_wheels"].items()),
        f"cache       {cache['folder']} ({cache['files']} files, {cache['bytes']} bytes)",
        *(f"environment {name}={value}" for name, value in report["environment"].items()),
        *(
            f"backend     {b['name']}: {b['status']}{': ' if b['reason'] else ''}{b['reason']}"
            for b in report["backends"]
        ),
        *(f"note        {b['name']}: {b['note']}" for b in report["backends"] if b["note"]),
        *(f"planner     {p['name']}: {p['status']}" for p in report["planners"]),
        *(
            f"call        on {c['device']}: {c['backend'] or 'nobody'} (choice: {c['rule']}), {c['plan']}"
            for c in report["calls"]
        ),
        *(f"UNCHECKED   {u}" for u in report["unchecked"]),
        *(f"PROBLEM     {p}" for p in report["problems"]),
    ]
    count = len(report["problems"])
    end = f"{count} problem{'s' if count > 1 else ''}" if count else "no problems found"
    if report["unchecked"]:
        end += " in what was checked"
    return "\n".join(line.replace("\n", "\n            ") for line in [*lines, end])


# ---- versions


def _versions(found: _Found) -> dict[str, str]:
    installed = requirements.installed()
    names = (*requirements.ours(installed), *DISTRIBUTIONS)
    versions = {name: installed[name].version for name in names if name in installed}
    return versions | {"torch": str(torch.__version__)}  # what runs, whatever metadata says


def _requirements(found: _Found) -> list[str]:
    """The distributions whose requirements were compared with what is installed."""
    installed = requirements.installed()
    names = requirements.ours(installed)
    if "kda-core" not in names:
        found.unchecked.append(
            "versions: kda-core runs from a source tree that is not installed, so nothing says what it requires"
        )
    try:
        found.problems += requirements.unmet(names, installed, {"torch": str(torch.__version__)})
    except ImportError:
        found.unchecked.append(
            "versions: what the packages require is not compared with what is installed, for the Python package "
            "`packaging` is missing (pip install packaging)"
        )
        return []
    return names


# ---- CUDA


def _cuda(found: _Found) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as said:  # torch warns of a driver that it cannot use
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    found.problems += [f"CUDA: {w.message}" for w in said]
    driver = _driver()
    if driver is not None:
        wheels = dsl_wheels()
        if (problem := driver_problem(driver, wheels.cuda)) is not None:
            found.problems.append(problem)
        if torch.version.cuda is None and _wants_dsl(wheels):
            found.problems.append(
                f"this machine has an NVIDIA driver ({driver}) and a backend for GPUs, but torch is built for the CPU "
                "alone: install a torch with CUDA"
            )
    return {"torch": torch.version.cuda, "available": available, "driver": driver}


def _driver() -> str | None:
    """The NVIDIA driver's version as the kernel module tells it."""
    try:
        with open("/proc/driver/nvidia/version") as f:
            words = f.readline().split()
    except OSError:
        return None
    return next((w for w in words if w.count(".") >= 1 and w.replace(".", "").isdigit()), None)


def driver_problem(driver: str, compilers: tuple[int, ...]) -> str | None:
    """What is wrong with a driver for compilers of the CuTe DSL, of which the newest that it supports is used; None if one is
    supported, or nobody knows what they need.

    Args:
        compilers: their CUDA major versions.
    """
    needs = {cuda: DSL_DRIVERS.get(cuda) for cuda in compilers}
    if not needs or any(
        at_least is None or _number(driver) >= _number(at_least) for at_least in needs.values()
    ):
        return None
    wanted = ", ".join(f"CUDA {cuda} needs {at_least}" for cuda, at_least in needs.items())
    return (
        f"NVIDIA's driver {driver} is too old for the installed compilers of the CuTe DSL: {wanted} or newer"
    )


def _number(driver: str) -> tuple[int, ...]:
    return tuple(map(int, driver.split(".")))


def _gpus(found: _Found) -> list[dict[str, Any]]:
    return [_gpu(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def _gpu(index: int) -> dict[str, Any]:
    p = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": p.name,
        "arch": f"sm_{p.major}{p.minor}",
        "memory_gib": p.total_memory / 2**30,
    }


def _dsl_wheels(found: _Found) -> dict[str, str]:
    wheels = dsl_wheels()
    if _wants_dsl(wheels):
        found.problems += wheels.problems
    return dict(wheels.versions)


def _wants_dsl(wheels: DslWheels) -> bool:
    installed = requirements.installed()
    return bool(wheels.versions) or requirements.requires(requirements.ours(installed), installed, DSL)


# ---- folders and variables


def _cache(found: _Found) -> dict[str, Any]:
    folder = env.cache_dir()
    if (problem := env.cache_dir_problem()) is not None:
        found.problems.append(problem)
    count = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(Path(parent, name), follow_symlinks=False).st_size
            except OSError:  # another process has removed it
                continue
            count += 1
    nearest = folder
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    if not writable:
        found.problems.append(f"the kernel cache {folder} cannot be written: every process compiles anew")
    return {"folder": str(folder), "files": count, "bytes": size, "writable": writable}


def _environment(found: _Found) -> dict[str, str]:
    known = {v.name: v for v in env.VARIABLES}
    for v in env.VARIABLES:
        if v.default in ("0", "1"):
            try:
                v.flag()
            except ArgumentError as error:
                found.problems.append(f"the environment variable {error}")
    for name in os.environ:
        if (
            name.startswith("KDA_")
            and name not in known
            and (near := difflib.get_close_matches(name, known, cutoff=0.8))
        ):
            found.problems.append(f"{name} is set, but no such variable exists; {near[0]} does")
    for name in env.backend_order():
        try:
            if (
                name not in published_backends()
            ):  # one of those may be for other machines with the same settings
                REGISTRY.find(name)
        except BackendNotFoundError as error:
            found.problems.append(f"{env.KDA_BACKEND.name}: {error}")
    return {name: os.environ[name] for name in known if name in os.environ}


# ---- backends and calls


def _backends(found: _Found) -> list[dict[str, str]]:
    infos = REGISTRY.info()
    found.problems += [
        f"backend {i.name} is {i.status}: {i.reason}" for i in infos if i.status in ("broken", "abi-mismatch")
    ]
    return [
        {"name": i.name, "status": i.status, "reason": i.reason, "version": i.version, "note": i.note}
        for i in infos
    ]


def _planners(found: _Found) -> list[dict[str, str]]:
    return [{"name": c.name, "status": _planner_status(c, found)} for c in REGISTRY.planners()]


def _planner_status(c: Any, found: _Found) -> str:
    status, reason = c.status, c.reason
    if status == "ok":
        if c.spec.unavailable is not None:
            return f"unsupported: {c.spec.unavailable}"
        try:
            planner = REGISTRY.load(c.spec)
            problems = getattr(planner, "problems", None)  # optional: kda_core.backend.SupportsDiagnosis
            if problems is not None:
                found.problems += [f"planner {c.name}: {problem}" for problem in problems()]
            return "ok"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the next planner is still examined
            status, reason = "broken", f"{type(error).__name__}: {error}"
    if _planners_are_asked():
        found.problems.append(f"planner {c.name} is {status}: {reason}")
    return f"{status}: {reason}"


def _planners_are_asked() -> bool:
    try:
        return env.context_parallel()
    except ArgumentError:  # which is a problem of the environment
        return True


def _calls(found: _Found) -> list[dict[str, Any]]:
    """Whether a standard call on the CPU and on each architecture here would be served. No problem is a GPU that no backend
    is for, or a device that ``KDA_BACKEND`` leaves out while another one is served."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    archs = dict.fromkeys(torch.cuda.get_device_capability(i) for i in range(count))
    shapes = [STANDARD, *(replace(STANDARD, device_type="cuda", arch=arch) for arch in archs)]
    explained = [explain(shape) for shape in shapes]
    served = any(e.error is None for e in explained)
    calls = []
    for shape, e in zip(shapes, explained):
        device = "cpu" if shape.arch is None else show_archs([shape.arch])
        chosen_away = e.rule == "KDA_BACKEND" and e.backend is None and served
        if e.error is not None and not chosen_away and _has_backend(shape.arch):
            found.problems.append(f"a standard call on {device} fails: {e.error}")
        calls.append(
            {"device": device, "backend": e.backend, "rule": e.rule, "plan": e.plan, "error": e.error}
        )
    return calls


def _has_backend(arch: tuple[int, int] | None) -> bool:
    """Whether a backend is for this architecture, installed or one of this project."""
    if arch is None or arch in ARCHITECTURES:
        return True
    specs = (c.spec for c in REGISTRY.backends() if c.status == "ok")
    return any("any" not in spec.archs and arch_matches(spec, arch) for spec in specs)


_Part = tuple[Callable[[_Found], Any], Any]
# what is examined, in order, with what stands there where that fails
_PARTS: dict[str, _Part] = {
    "python": (lambda found: platform.python_version(), ""),
    "platform": (lambda found: platform.platform(), ""),
    "abi": (lambda found: list(BACKEND_ABI), []),
    "versions": (_versions, {}),
    "requirements": (_requirements, []),
    "cuda": (_cuda, {"torch": None, "available": False, "driver": None}),
    "gpus": (_gpus, []),
    "dsl_wheels": (_dsl_wheels, {}),
    "cache": (_cache, {"folder": "", "files": 0, "bytes": 0, "writable": False}),
    "environment": (_environment, {}),
    "backends": (_backends, []),
    "planners": (_planners, []),
    "calls": (_calls, []),
}
