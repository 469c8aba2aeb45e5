"""Shared by all test folders: the plugin of the conformance kit, the marker `arch`, the fixture `install`, and summary lines
about tests that were skipped because their GPU is missing. Tests marked `nightly` run with ``--nightly``, the others without it."""

from __future__ import annotations

import gc
import importlib
import sys
from collections import Counter

# Allocated objects after which the collector runs within a test. With Python's own threshold it goes through all objects many times. The
# threshold is set before the imports, because they allocate most objects.
gc.set_threshold(1_000_000, 20, 100)

import pytest
from helpers.fake_plugins import install_into
from hypothesis import HealthCheck, settings

# The plugin that users load with `-p`. It fails a run of the kit that compares no output with the oracle; tests that the marker
# `arch` skips are not such a run.
pytest_plugins = ["kda_core.testing.plugin"]

# Generating examples may be slow on a busy machine, which is not a defect of the code under test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", action="store_true", help="run only the tests marked nightly and those of tests/nightly"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects by the marker `nightly`. Nothing but the nightly session collects the folder of this name."""
    nightly, chosen, others = config.getoption("--nightly"), [], []
    for item in items:
        is_marked = item.get_closest_marker("nightly") is not None
        is_chosen = is_marked or item.path.parent.name == "nightly" if nightly else not is_marked
        (chosen if is_chosen else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: takes long, so only `nox -s nightly` runs it")
    config.addinivalue_line(
        "markers",
        "arch(*capabilities): the test runs on a GPU of one of these compute capabilities, such as (9, 0); without "
        "one it is skipped, or fails if KDA_REQUIRE_ARCH=1",
    )


#: New objects after which it runs before a test.
NEW_OBJECTS = 600_000


def _spare_the_collector() -> None:
    """Collects garbage, and excludes all objects that are left from further collections. Those of torch, the DSL and decoded kernels are
    millions that stay: going through them repeatedly took a tenth of the time of emulated tests."""
    if gc.get_count()[0] > NEW_OBJECTS:
        gc.collect()
        gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.freeze()  # the interpreter's end would go through all objects several times


def pytest_runtest_setup(item: pytest.Item) -> None:
    _spare_the_collector()
    marker = item.get_closest_marker("arch")
    if marker is None:
        return
    from kda_core import env
    from kda_core.registry import show_archs, visible_archs

    if not marker.args:
        pytest.fail("the marker arch names no compute capability", pytrace=False)
    if any(capability in visible_archs() for capability in marker.args):
        return
    needed = show_archs(marker.args)
    reason = f"needs a GPU {needed}; this machine has {show_archs(visible_archs())}"
    if env.require_arch():
        pytest.fail(f"KDA_REQUIRE_ARCH=1, and this test {reason}", pytrace=False)
    item.user_properties.append(("kda_needs", needed))
    pytest.skip(f"not run: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    not_run = Counter(
        value
        for report in skipped
        for key, value in getattr(report, "user_properties", ())
        if key == "kda_needs"
    )
    for needed, count in sorted(not_run.items()):
        terminalreporter.write_line(
            f"not run because no GPU {needed} is visible: {count} tests (KDA_REQUIRE_ARCH=1 makes them fail)",
            yellow=True,
        )


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that installs a fake distribution into a folder on sys.path (`helpers.fake_plugins.install_into`).
    Discovery runs again after each installation and after the test."""
    import kda_core

    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def install_distribution(name, **fields):
        written.extend(install_into(tmp_path, name, **fields))
        importlib.invalidate_caches()
        kda_core.backends(refresh=True)

    yield install_distribution
    for module in written:
        sys.modules.pop(module, None)
    monkeypatch.undo()
    kda_core.backends(refresh=True)
