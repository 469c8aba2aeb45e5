"""What the installed distributions of this project and of its plugins require, and what of that is not met.

Metadata only: nothing is imported but ``packaging``, which understands versions and markers. kda-core does not require it
(pip and pytest bring it along); whoever asks without it gets an ImportError.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from importlib import metadata

from kda_core.backend import BACKEND_GROUP, PLANNER_GROUP


def normalized(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, metadata.Distribution]:
    """Every installed distribution by its `normalized` name; of several, the one that imports find first."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        # pip leaves folders without a METADATA file behind when it is interrupted: they have no name
        if name := str(distribution.metadata.json.get("name", "")):
            found.setdefault(normalized(name), distribution)
    return found


def ours(found: Mapping[str, metadata.Distribution]) -> list[str]:
    """The names of kda-core, its siblings (kda-*) and whatever else brings a backend or a planner."""
    groups = {BACKEND_GROUP, PLANNER_GROUP}
    return sorted(
        name
        for name, d in found.items()
        if name.startswith("kda-") or any(point.group in groups for point in d.entry_points)
    )


def requires(names: Iterable[str], found: Mapping[str, metadata.Distribution], wanted: str) -> bool:
    """Whether one of the distributions `names` requires `wanted`, or an extra of it does. Needs no ``packaging``."""
    texts = (text for name in names for text in found[name].requires or ())
    starts = (re.match(r"[A-Za-z0-9._-]+", text) for text in texts)
    return any(start is not None and normalized(start[0]) == wanted for start in starts)


def unmet(
    names: Iterable[str], found: Mapping[str, metadata.Distribution], running: Mapping[str, str] | None = None
) -> list[str]:
    """One line for each requirement of the distributions `names` that is not met, extras left out but for those that a
    requirement asks for.

    Args:
        found: as `installed` gives it.
        running: versions of modules that are imported, by distribution; they count for more than metadata.

    Raises:
        ImportError: ``packaging`` is not installed.
    """
    import packaging.requirements  # noqa: F401 - here, lest it be found missing only where there is something to compare

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
        return [f"{_show(d)} needs Python {wanted!r}, which is no range of versions"]
    return [f"{_show(d)} needs Python {wanted}, but {platform.python_version()} runs"]


def _unmet(
    d: metadata.Distribution,
    extra: str,
    found: Mapping[str, metadata.Distribution],
    versions: Mapping[str, str],
) -> list[str]:
    """Of the requirements of `d`, or of those behind an extra of it alone."""
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
            problems.append(f"{needs}, but {version!r} is installed, which is no version")
        if name in found:
            for behind in sorted(wanted.extras):
                problems += _unmet(found[name], behind, found, versions)
    return problems


def _show(d: metadata.Distribution) -> str:
    return f"{d.metadata.json.get('name')} {d.version}"
