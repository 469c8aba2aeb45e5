"""The pytest plugin of the kit: options, and a closing summary. Tests that did not run never count as passed, and a run that
compared no output with the oracle fails.

The summary calls a backend emulated if its class has a true attribute `emulated`: it executes another device's code, so the run
is no evidence about that device's own arithmetic or memory.

PYTEST_DONT_REWRITE: this module has no assertions, and `run` imports it before pytest does.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

import kda_core
from kda_core.contract import OFFERS, Feature
from kda_core.testing.runner import (
    BASE,
    COMPARED,
    LEFT_OUT,
    NEEDS_GPU,
    NOT_DECLARED,
    REFUSED,
    TESTED,
    unusable,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kda", "Kimi Delta Attention conformance")
    group.addoption("--kda-backend", metavar="NAME", help="the backend under test")
    group.addoption(
        "--kda-device", choices=("cpu", "cuda"), help="default: cuda if the backend runs there, else cpu"
    )
    group.addoption(
        "--kda-quick", action="store_true", help="leave out long sequences and eight of nine FLA cases"
    )
    group.addoption(
        "--kda-require", metavar="F,..", default="", help="features that must be declared, or 'all'"
    )
    group.addoption(
        "--kda-no-skip",
        action="store_true",
        help="a test of what the backend declares that did not run, for any reason, is a failure",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Reports a backend that cannot be tested in one line, instead of one for each test."""
    name = config.getoption("kda_backend")
    if name is not None and (why := unusable(name)) is not None:
        raise pytest.UsageError(f"--kda-backend: {why}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = {f.strip() for f in config.getoption("kda_require").split(",") if f.strip()}
    if not wanted:
        return
    known = {f.value for f in Feature}
    wanted = known - {f.value for f in OFFERS} if wanted == {"all"} else wanted  # calls need all others
    if unknown := sorted(wanted - known):
        raise pytest.UsageError(
            f"--kda-require: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    specs = {i.name: i.spec for i in kda_core.backends()}
    for name in sorted({name for item in items if (name := _tested(item, config)) is not None}):
        spec = specs.get(name)
        if missing := sorted(wanted - (set() if spec is None else set(spec.features))):
            raise pytest.UsageError(f"--kda-require: backend {name!r} does not declare {', '.join(missing)}")


def _tested(item: pytest.Item, config: pytest.Config) -> str | None:
    """Returns the backend that a test of the kit tests; None for any other test."""
    from kda_core.testing.conformance import BackendConformance

    cls = getattr(item, "cls", None)
    if cls is None or not issubclass(cls, BackendConformance):
        return None
    return cls.backend or config.getoption("kda_backend")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.skipped and item.config.getoption("kda_no_skip"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not reason.removeprefix("Skipped: ").startswith(NOT_DECLARED):
            report.outcome, report.longrepr = "failed", f"--kda-no-skip: {reason}"
    return report


@dataclass
class _Results:
    """The results of the tests of one (backend, device, execution).

    Attributes:
        outcomes: (outcome, reason of a skip) of each test.
        compared: number of outputs compared with the oracle.
        has_base: whether the base case was among the tests.
    """

    outcomes: list[tuple[str, str]] = field(default_factory=list)
    compared: int = 0
    has_base: bool = False


def _results(config: pytest.Config) -> dict[tuple[str, str, str], _Results]:
    """Returns the results of the tests of the kit so far."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # a worker of pytest-xdist has none
    found: dict[tuple[str, str, str], _Results] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in [] if reporter is None else reporter.stats.get(outcome, []):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            properties = getattr(report, "user_properties", ())
            for tested in (value for key, value in properties if key == TESTED):
                results = found.setdefault(tuple(tested), _Results())
                results.outcomes.append((outcome, reason.removeprefix("Skipped: ")))
                results.compared += sum(key == COMPARED for key, _ in properties)
                results.has_base |= report.nodeid.rpartition("::")[2].startswith(BASE)
    return found


def _is_narrowed(config: pytest.Config) -> bool:
    """Returns whether the command line selects tests."""
    chosen = (config.getoption(name, None) for name in ("keyword", "markexpr", "deselect", "lf"))
    return any(chosen) or any("::" in arg for arg in config.args)


def _proves_nothing(results: _Results, config: pytest.Config) -> bool:
    """Returns whether the run compared nothing, although the base case ran or the command line selects no subset of the tests."""
    return not results.compared and (results.has_base or not _is_narrowed(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run that proves nothing."""
    empty = (_proves_nothing(results, session.config) for results in _results(session.config).values())
    if session.exitstatus == pytest.ExitCode.OK and any(empty):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints one paragraph for each (backend, device) that the session tested. Only tests of the kit count."""
    found = _results(config)
    if found:
        terminalreporter.section("KDA conformance")
    for (name, device, how), results in sorted(found.items()):
        for line in _summary(name, device, how, results):
            terminalreporter.write_line(line)
        if _proves_nothing(results, config):
            terminalreporter.write_line(
                f"FAILED: no output of backend {name!r} was compared with the fp64 oracle", red=True
            )


def _summary(name: str, device: str, how: str, results: _Results) -> list[str]:
    """Returns the paragraph: the backend and its device, how many tests ran, how many outputs were compared, and why other tests did
    not run."""
    info = next(i for i in kda_core.backends() if i.name == name)
    counts = Counter(outcome for outcome, _ in results.outcomes)
    where = torch.cuda.get_device_name() if device == "cuda" else device
    ran = f"{counts['passed']} passed, {counts['failed']} failed"
    lines = [
        f"backend       {name} ({info.distribution} {info.version}) on {where}, {how}",
        f"run           {counts['passed'] + counts['failed']}: {ran}",
        f"compared      {results.compared} outputs with the fp64 oracle",
    ]
    if counts["error"]:
        lines.append(f"errors        {counts['error']}")
    reasons = Counter(reason for outcome, reason in results.outcomes if outcome == "skipped")
    kinds = {"not declared": NOT_DECLARED, "refused": REFUSED, "needs a GPU": NEEDS_GPU, "quick": LEFT_OUT}
    for title, prefix in kinds.items():
        here = {r: n for r, n in sorted(reasons.items()) if r.startswith(prefix)}
        if here:
            lines.append(f"not run       {sum(here.values())} ({title})")
            lines += [f"              {n:4d}  {r.removeprefix(prefix) or r}" for r, n in here.items()]
    other = {r: n for r, n in sorted(reasons.items()) if not r.startswith(tuple(kinds.values()))}
    return lines + [f"not run       {n}  {reason}" for reason, n in other.items()]


def run(backend: str, argv: Sequence[str] = ()) -> int:
    """Runs the kit on one backend in this process; further arguments go to pytest. Returns pytest's exit status, or 2 if
    the backend cannot be tested."""
    if (why := unusable(backend)) is not None:
        print(why, file=sys.stderr)
        return 2
    # ignores the configuration of the current folder
    alone = ("-c", os.devnull, "-p", "no:cacheprovider")
    own = ("-p", __name__, "--pyargs", "kda_core.testing.conformance", "--kda-backend", backend, "-q")
    return int(pytest.main([*alone, *own, *argv]))
