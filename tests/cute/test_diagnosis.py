"""The part of ``doctor`` that this package adds: the DSL's wheels and the NVIDIA driver."""

from __future__ import annotations

import json

import pytest

from kda_core.cli import main
from kda_cute import diagnosis
from kda_cute.jit.versions import DslWheels


@pytest.mark.parametrize(
    ("driver", "compilers", "problem"),
    [
        ("580.65.06", (13,), False),
        ("575.51.03", (13,), True),
        ("575.51.03", (12, 13), False),  # the compiler for CUDA 12 serves
        ("575.51.02", (12, 13), True),
        ("535.104.05", (12,), True),
        ("590.1", (12,), False),
        ("535.104.05", (), False),  # without a compiler there is no requirement
        ("535.104.05", (12, 14), False),  # the requirement of CUDA 14 is unknown
    ],
)
def test_the_driver_is_compared_with_what_the_compilers_need(driver, compilers, problem):
    said = diagnosis.driver_problem(driver, compilers)
    assert (said is not None) is problem
    if said:
        assert driver in said and ("CUDA 12 needs 575.51.03" in said or "CUDA 13 needs 580" in said)


def test_problems_of_the_wheels_and_of_the_driver_are_reported(monkeypatch):
    wheels = DslWheels((("nvidia-cutlass-dsl", "4.8.1"),), (13,), ("a wheel is missing",))
    monkeypatch.setattr(diagnosis, "dsl_wheels", lambda: wheels)
    monkeypatch.setattr(diagnosis, "nvidia_driver", lambda: "570.1.1")
    found = diagnosis.examine()
    assert found.facts == {"dsl wheel": {"nvidia-cutlass-dsl": "4.8.1"}}
    assert (
        found.problems[0] == "a wheel is missing" and "NVIDIA driver 570.1.1 is too old" in found.problems[1]
    )
    monkeypatch.setattr(diagnosis, "nvidia_driver", lambda: None)
    assert diagnosis.examine().problems == ["a wheel is missing"]


def test_doctor_shows_the_wheels(kernels, capsys):
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    wheels = report["diagnostics"]["cute"]["dsl wheel"]
    assert {"nvidia-cutlass-dsl", "apache-tvm-ffi"} <= wheels.keys()
    main(["doctor"])
    assert f"\ndsl wheel   nvidia-cutlass-dsl {wheels['nvidia-cutlass-dsl']}\n" in capsys.readouterr().out
