"""Requirements of the installed distributions of this project and of its plugins, and which of them are not met.

Reads only metadata. ``packaging`` compares versions and evaluates markers; kda-core does not require it (pip and pytest bring
it along), so `unmet` raises an ImportError without it.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from importlib import metadata

from kda_core.backend import BACKEND_GROUP, PLANNER_GROUP
from kda_core.extensions import COMMAND_GROUP, DIAGNOSTIC_GROUP


def normalized(name: str) -> str:
    """Returns a distribution's name in the form in which package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, metadata.Distribution]:
    """Returns the installed distributions by `normalized` name. If a name is installed twice, the first one on the path counts,
    as for imports."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        # an interrupted pip leaves folders without a METADATA file, hence without a name
        if name := str(distribution.metadata.json.get("name", "")):
            found.setdefault(normalized(name), distribution)
    return found


def ours(found: Mapping[str, metadata.Distribution]) -> list[str]:
    """Returns the names of kda-core, its siblings (kda-*) and every distribution that contains a plugin or an extension."""
    groups = {BACKEND_GROUP, PLANNER_GROUP, COMMAND_GROUP, DIAGNOSTIC_GROUP}
    return sorted(
        name
        for name, d in found.items()
        if name.startswith("kda-") or any(point.group in groups for point in d.entry_points)
    )


def required(names: Iterable[str], found: Mapping[str, metadata.Distribution]) -> set[str]:
    """Returns the distributions that the distributions `names` require, extras left out. Needs no ``packaging``."""
    texts = [text for name in names for text in found[name].requires or () if "extra ==" not in text]
    starts = (re.match(r"[A-Za-z0-9._-]+", text) for text in texts)
    return {normalized(start[0]) for start in starts if start is not None}


def unmet(
    names: Iterable[str], found: Mapping[str, metadata.Distribution], running: Mapping[str, str] | None = None
) -> list[str]:
    """Returns one line for each unmet requirement of the distributions `names`. An extra counts only if a requirement names it.

    Args:
        found: the result of `installed`.
        running: versions of imported modules by distribution; they override metadata.

    Raises:
        ImportError: ``packaging`` is not installed.
    """
    import packaging.requirements  # noqa: F401 - fails early, even if nothing is to be compared

    versions = {name: d.version for name, d in found.items()} | dict(running or {})
    problems = []
    for name in names:
        problems += _python(found[name])
        problems += _unmet(found[name], "", found, versions)
    return list(dict.fromkeys(problems))


def _python(d: metadata.Distribution) -> list[str]:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    wanted = str(d.metadata.json.get("requires_python", ""))
    try:
        if SpecifierSet(wanted).contains(platform.python_version(), prereleases=True):
            return []
    except InvalidSpecifier:
        return [f"{_show(d)} needs Python {wanted!r}, which is not a version range"]
    return [f"{_show(d)} needs Python {wanted}, but {platform.python_version()} runs"]


def _unmet(
    d: metadata.Distribution,
    extra: str,
    found: Mapping[str, metadata.Distribution],
    versions: Mapping[str, str],
) -> list[str]:
    """Returns the unmet requirements of `d`; with an `extra`, only those of the extra."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion

    problems = []
    for text in d.requires or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement as error:
            problems.append(f"{_show(d)} has a requirement that cannot be read, {text!r}: {error}")
            continue
        marker = wanted.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always if extra else not always:
            continue
        if extra and not (marker is not None and marker.evaluate({"extra": extra})):
            continue
        name = normalized(wanted.name)
        needs = f"{_show(d)} needs {wanted.name}{wanted.specifier}"
        if (version := versions.get(name)) is None:
            problems.append(f"{needs}, which is not installed")
            continue
        try:
            if not wanted.specifier.contains(version, prereleases=True):
                problems.append(f"{needs}, but {version} is installed")
        except InvalidVersion:
            problems.append(f"{needs}, but {version!r} is installed, which is not a version")
        if name in found:
            for behind in sorted(wanted.extras):
                problems += _unmet(found[name], behind, found, versions)
    return problems


def _show(d: metadata.Distribution) -> str:
    return f"{d.metadata.json.get('name')} {d.version}"
