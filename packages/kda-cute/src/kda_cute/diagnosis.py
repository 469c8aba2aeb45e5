"""The CuTe DSL's part of ``python -m kda_core doctor``: its wheels, the NVIDIA driver that its compilers need, exported kernels.

The entry point ``cute`` of the group ``kda_core.diagnostics`` names `examine`.
"""

from __future__ import annotations

from kda_core.doctor import nvidia_driver
from kda_core.extensions import Diagnosis
from kda_cute.jit.versions import dsl_wheels
from kda_cute.store import search

DRIVERS = {12: "575.51.03", 13: "580"}
"""The lowest NVIDIA driver of each compiler of the DSL, by the compiler's CUDA major version: that of CUDA 12.9, and of any
13.x (sources: NVIDIA's quick start of the CuTe DSL, and its table of minor-version compatibility)."""


def examine() -> Diagnosis:
    """Returns the versions of the DSL's wheels, the exported kernels, and the problems of the wheels, of the driver and of the
    folder of exported kernels."""
    wheels = dsl_wheels()
    problems = list(wheels.problems)
    driver = nvidia_driver()
    if driver is not None and (problem := driver_problem(driver, wheels.cuda)) is not None:
        problems.append(problem)
    kernels, kernel_problems = search.status()
    facts = {"dsl wheel": dict(wheels.versions)} | ({"kernels": kernels} if kernels else {})
    return Diagnosis(facts, [*problems, *kernel_problems])


def driver_problem(driver: str, compilers: tuple[int, ...]) -> str | None:
    """Returns why a driver is too old for the installed compilers of the DSL; None if it supports one of them, or if the
    requirement of one is unknown. The DSL uses the newest compiler that the driver supports.

    Args:
        driver: its version, such as "580.65.06".
        compilers: their CUDA major versions.
    """
    needed = {cuda: DRIVERS.get(cuda) for cuda in compilers}
    if not needed or any(lowest is None or _number(driver) >= _number(lowest) for lowest in needed.values()):
        return None
    wanted = ", ".join(f"CUDA {cuda} needs {lowest}" for cuda, lowest in needed.items())
    return f"NVIDIA driver {driver} is too old for the installed compilers of the CuTe DSL: {wanted} or newer"


def _number(driver: str) -> tuple[int, ...]:
    return tuple(map(int, driver.split(".")))
