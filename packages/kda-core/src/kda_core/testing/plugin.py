"""The pytest plugin of the kit: options, and a closing summary in which nothing that did not run counts as passed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

import kda_core
from kda_core.contract import Feature
from kda_core.testing.runner import LEFT_OUT, NEEDS_GPU, NOT_DECLARED, REFUSED


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kda", "Kimi Delta Attention conformance")
    group.addoption("--kda-backend", metavar="NAME", help="the backend under test")
    group.addoption(
        "--kda-device", choices=("cpu", "cuda"), help="default: cuda where the backend runs there, else cpu"
    )
    group.addoption(
        "--kda-quick", action="store_true", help="leave out long sequences and eight of nine FLA cases"
    )
    group.addoption(
        "--kda-require", metavar="F,..", default="", help="features that must be declared, or 'all'"
    )
    group.addoption(
        "--kda-no-skip", action="store_true", help="a test that did not run, for any reason, is a failure"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = {f.strip() for f in config.getoption("kda_require").split(",") if f.strip()}
    if not wanted:
        return
    known = {f.value for f in Feature}
    wanted = known if wanted == {"all"} else wanted
    if unknown := sorted(wanted - known):
        raise pytest.UsageError(
            f"--kda-require: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    name = config.getoption("kda_backend")
    spec = next((i.spec for i in kda_core.backends() if i.name == name), None)
    missing = sorted(wanted - (set() if spec is None else set(spec.features)))
    if missing:
        raise pytest.UsageError(f"--kda-require: backend {name!r} does not declare {', '.join(missing)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.skipped and item.config.getoption("kda_no_skip"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome, report.longrepr = "failed", f"--kda-no-skip: {reason}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    counts, reasons = (
        Counter({k: len(stats.get(k, [])) for k in ("passed", "failed", "error")}),
        Counter[str](),
    )
    for report in stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    name = config.getoption("kda_backend")
    info = next((i for i in kda_core.backends() if i.name == name), None)
    line = terminalreporter.write_line
    terminalreporter.section("KDA conformance")
    if info is not None:
        line(f"backend       {info.name} ({info.distribution} {info.version}), executed by the device itself")
    line(
        f"run           {counts['passed'] + counts['failed']}: {counts['passed']} passed, {counts['failed']} failed"
    )
    if counts["error"]:
        line(f"errors        {counts['error']}")
    for title, prefix in (
        ("not declared", NOT_DECLARED),
        ("refused", REFUSED),
        ("needs a GPU", NEEDS_GPU),
        ("quick", LEFT_OUT),
    ):
        found = {r: n for r, n in sorted(reasons.items()) if r.startswith(prefix)}
        if found:
            line(f"not run       {sum(found.values())} ({title})")
            for reason, n in found.items():
                line(f"              {n:4d}  {reason.removeprefix(prefix) or reason}")
    other = {
        r: n for r, n in reasons.items() if not r.startswith((NOT_DECLARED, REFUSED, NEEDS_GPU, LEFT_OUT))
    }
    for reason, n in sorted(other.items()):
        line(f"not run       {n}  {reason}")


def run(backend: str, argv: Sequence[str] = ()) -> int:
    """The kit on one backend, in this process; further arguments go to pytest. Returns pytest's exit status."""
    alone = [
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
    ]  # not the configuration of the folder that it runs in
    own = [*alone, "--pyargs", "kda_core.testing.conformance", "--kda-backend", backend, "-q"]
    return int(pytest.main([*own, *argv], plugins=[sys.modules[__name__]]))
