"""The state of an installation and its problems: versions, GPUs, cache, environment, backends, and whether a standard call
would be served. Other packages add facts and problems through the entry-point group ``kda_core.diagnostics``
(`kda_core.extensions`).

`examine` never raises. A part that fails is reported as a problem, and the other parts are still examined.
"""

from __future__ import annotations

import copy
import difflib
import os
import platform
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kda_core import env, extensions, requirements
from kda_core.abi import BACKEND_ABI
from kda_core.backend import least_capability
from kda_core.contract import KdaOptions, ProblemShape
from kda_core.discovery import published_backends
from kda_core.errors import ArgumentError, BackendNotFoundError
from kda_core.explanation import explain
from kda_core.registry import REGISTRY, arch_matches, includes, published_archs, show_archs

PEERS = ("triton", "flash-linear-attention", "fla-core")
"""Distributions whose versions are shown although nothing of this project requires them."""

STANDARD = ProblemShape(
    B=1, T=4096, H=16, HV=16, K=128, V=128, N=1,
    dtype=torch.bfloat16, g_dtype=torch.bfloat16, beta_dtype=torch.bfloat16, index_dtype=None,
    has_A_log=True, has_dt_bias=True, has_initial_state=False, device_type="cpu", arch=None,
    options=KdaOptions(
        scale=128**-0.5, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    ),
)  # fmt: skip
"""The standard call: a prefill of Kimi Linear."""


@dataclass
class _Found:
    """Findings of the parts examined so far.

    Attributes:
        problems: what the user should fix.
        unchecked: what could not be examined, and why.
    """

    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def examine() -> dict[str, Any]:
    """Returns all findings as plain data that JSON can hold. Never raises.

    Returns:
        The keys of `_PARTS`, each empty if its part could not be examined; "problems", a text for each thing that the user
        should fix; "unchecked", a text for each thing that could not be examined.
    """
    found = _Found()
    report: dict[str, Any] = {}
    for name, (look, empty) in _PARTS.items():
        try:
            report[name] = look(found)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other parts are still examined
            report[name] = copy.deepcopy(empty)
            found.problems.append(f"{name} cannot be examined: {type(error).__name__}: {error}")
    report["problems"] = list(dict.fromkeys(found.problems))
    report["unchecked"] = list(dict.fromkeys(found.unchecked))
    return report


def show(report: dict[str, Any]) -> str:
    """Returns the report of `examine` as text."""
    cuda, cache = report["cuda"], report["cache"]
    torch_cuda = f"CUDA {cuda['torch']}" if cuda["torch"] else "CPUs only"
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
        *(
            f"{label:<11} {name} {value}"
            for facts in report["diagnostics"].values()
            for label, values in facts.items()
            for name, value in values.items()
        ),
        f"cache       {cache['folder']} ({cache['files']} files, {cache['bytes']} bytes)",
        *(f"environment {name}={value}" for name, value in report["environment"].items()),
        *(
            f"backend     {b['name']}: {b['status']}{': ' if b['reason'] else ''}{b['reason']}"
            for b in report["backends"]
        ),
        *(f"note        {b['name']}: {b['note']}" for b in report["backends"] if b["note"]),
        *(f"planner     {p['name']}: {p['status']}" for p in report["planners"]),
        *(
            f"call        on {c['device']}: {c['backend'] or 'no backend'} (choice: {c['rule']}), {c['plan']}"
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
    ours = requirements.ours(installed)
    names = (*ours, *sorted(requirements.required(ours, installed)), *PEERS)
    versions = {name: installed[name].version for name in names if name in installed}
    return versions | {"torch": str(torch.__version__)}  # the imported version, which metadata may contradict


def _requirements(found: _Found) -> list[str]:
    """Returns the distributions whose requirements were compared with the installed versions."""
    installed = requirements.installed()
    names = requirements.ours(installed)
    if "kda-core" not in names:
        found.unchecked.append(
            "versions: kda-core runs from a source tree that is not installed, so its requirements are unknown"
        )
    try:
        found.problems += requirements.unmet(names, installed, {"torch": str(torch.__version__)})
    except ImportError:
        found.unchecked.append(
            "versions: the packages' requirements were not compared with the installed versions, because the Python package "
            "`packaging` is missing (pip install packaging)"
        )
        return []
    return names


# ---- CUDA


def _cuda(found: _Found) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:  # torch warns of a driver that it cannot use
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    found.problems += [f"CUDA: {w.message}" for w in caught]
    driver = nvidia_driver()
    if driver is not None and torch.version.cuda is None and _has_gpu_backend():
        found.problems.append(
            f"this machine has an NVIDIA driver ({driver}) and a backend for GPUs, but torch is built for CPUs only: "
            "install a torch with CUDA"
        )
    return {"torch": torch.version.cuda, "available": available, "driver": driver}


def nvidia_driver() -> str | None:
    """Returns the version of the loaded NVIDIA kernel driver, such as "580.65.06"; None if there is none."""
    try:
        with open("/proc/driver/nvidia/version") as f:
            words = f.readline().split()
    except OSError:
        return None
    return next((w for w in words if w.count(".") >= 1 and w.replace(".", "").isdigit()), None)


def _has_gpu_backend() -> bool:
    specs = (c.spec for c in REGISTRY.backends() if c.status == "ok")
    archs = {arch for spec in specs for arch in spec.archs}
    return any(isinstance(arch, tuple) or least_capability(arch) is not None for arch in archs)


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
            except OSError:  # another process removed it
                continue
            count += 1
    nearest = folder
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    if not writable:
        found.problems.append(
            f"the kernel cache {folder} cannot be written: every process compiles its kernels again"
        )
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
            if name not in published_backends():  # these may be for other machines that share the settings
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
    except ArgumentError:  # reported as a problem of the environment
        return True


def _calls(found: _Found) -> list[dict[str, Any]]:
    """Explains the standard call on the CPU and on each visible GPU architecture. A call that would fail is a problem, except
    on a GPU that no backend is made for, and on a device that ``KDA_BACKEND`` excludes while it serves another one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    archs = dict.fromkeys(torch.cuda.get_device_capability(i) for i in range(count))
    shapes = [STANDARD, *(replace(STANDARD, device_type="cuda", arch=arch) for arch in archs)]
    explained = [explain(shape) for shape in shapes]
    served = any(e.error is None for e in explained)
    calls = []
    for shape, e in zip(shapes, explained):
        device = "cpu" if shape.arch is None else show_archs([shape.arch])
        excluded = e.rule == "KDA_BACKEND" and e.backend is None and served
        if e.error is not None and not excluded and _has_backend(shape.arch):
            found.problems.append(f"a standard call on {device} fails: {e.error}")
        calls.append(
            {"device": device, "backend": e.backend, "rule": e.rule, "plan": e.plan, "error": e.error}
        )
    return calls


def _has_backend(arch: tuple[int, int] | None) -> bool:
    """Returns whether a backend is made for this architecture: an installed one, or one of this project."""
    if arch is None or any(includes(published_archs(name), arch) for name in published_backends()):
        return True
    specs = (c.spec for c in REGISTRY.backends() if c.status == "ok")
    return any("any" not in spec.archs and arch_matches(spec, arch) for spec in specs)


# ---- what other packages add


def _commands(found: _Found) -> list[dict[str, str]]:
    """Returns the subcommands of other packages. One that cannot be imported is a problem."""
    return [_command(e, found) for e in extensions.find(extensions.COMMAND_GROUP).values()]


def _command(extension: extensions.Extension, found: _Found) -> dict[str, str]:
    status = "ok"
    try:
        extension.command()
    except extensions.ExtensionError as error:
        status = "broken"
        found.problems.append(f"command {error}")
    return {"name": extension.name, "distribution": extension.distribution, "status": status}


def _diagnostics(found: _Found) -> dict[str, Mapping[str, Mapping[str, str]]]:
    """Returns the facts of each diagnostic by name."""
    report = {}
    for extension in extensions.find(extensions.DIAGNOSTIC_GROUP).values():
        try:
            diagnosis = extension.diagnosis()
        except extensions.ExtensionError as error:
            found.problems.append(f"diagnostics {error}")
            continue
        found.problems += diagnosis.problems
        report[extension.name] = diagnosis.facts
    return report


_Part = tuple[Callable[[_Found], Any], Any]
#: What is examined, in this order: key of the report -> (function, value of the key if the function fails).
_PARTS: dict[str, _Part] = {
    "python": (lambda found: platform.python_version(), ""),
    "platform": (lambda found: platform.platform(), ""),
    "abi": (lambda found: list(BACKEND_ABI), []),
    "versions": (_versions, {}),
    "requirements": (_requirements, []),
    "cuda": (_cuda, {"torch": None, "available": False, "driver": None}),
    "gpus": (_gpus, []),
    "diagnostics": (_diagnostics, {}),
    "cache": (_cache, {"folder": "", "files": 0, "bytes": 0, "writable": False}),
    "environment": (_environment, {}),
    "backends": (_backends, []),
    "planners": (_planners, []),
    "commands": (_commands, []),
    "calls": (_calls, []),
}
