"""From entry points to candidates: every plugin is imported and checked, and none can keep another from being found.

What a plugin raises becomes the reason for which it is listed as broken. `KeyboardInterrupt` alone passes through.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distributions, version
from typing import Any

from kda_core import install
from kda_core.abi import BACKEND_ABI, compatible
from kda_core.backend import BACKEND_GROUP, PLANNER_GROUP
from kda_core.plugin_checks import plain_spec, show_error, shown, spec_problem

FAILURES = (Exception, SystemExit, GeneratorExit)
"""What is caught of a plugin's code."""

OWNERS: dict[str, dict[str, str]] = {
    BACKEND_GROUP: {"reference": "kda-core", "sm90": "kda-sm90", "sm100": "kda-sm100"},
    PLANNER_GROUP: {"cp": "kda-cp"},
}
"""Reserved names, and the distributions that may use them: what this project publishes."""


@dataclass(frozen=True)
class Candidate:
    """An entry point after it was imported: a spec, or a final status. Of several candidates with one name, users reach
    the `owner` by it; the others are listed as broken."""

    name: str
    distribution: str
    version: str
    spec: Any = None
    status: str = "ok"
    reason: str = ""
    owner: bool = True


def discover(
    group: str, kind: type, read: Callable[..., Iterable[EntryPoint]], own: tuple[Candidate, ...] = ()
) -> tuple[Candidate, ...]:
    """`own` and the candidates of an entry-point group, in an order that does not depend on the file system: by the
    name of the entry point, its value, the distribution. `read` is `importlib.metadata.entry_points`."""
    points, unreadable = _points(group, read)
    found = [_candidate(p, kind) for p in sorted(points, key=_order)]
    return (*own, *unreadable, *_one_owner_a_name(found, own, OWNERS[group]))


def _order(point: EntryPoint) -> tuple[str, ...]:
    return (point.name, point.value, *_distribution(point.dist))


def installed_version(distribution: str) -> str:
    """The version of an installed distribution, in words where there is none."""
    try:
        return version(distribution) or "unknown"
    except PackageNotFoundError:
        return "not installed as a package"


def _points(
    group: str, read: Callable[..., Iterable[EntryPoint]]
) -> tuple[list[EntryPoint], list[Candidate]]:
    """The entry points of a group, and the distributions that have some which cannot be read."""
    try:
        return list(read(group=group)), []
    except Exception:  # noqa: BLE001 - damaged metadata of one distribution, whose name the error does not tell
        return _points_one_by_one(group)


def _points_one_by_one(group: str) -> tuple[list[EntryPoint], list[Candidate]]:
    """As `_points`, passing over distributions whose metadata is damaged; those that mention the group are listed."""
    points: list[EntryPoint] = []
    unreadable: list[Candidate] = []
    seen: set[str] = set()
    for dist in distributions():
        name, number = _distribution(dist)
        if _normal(name) in seen:  # the first on the path is the installed one
            continue
        seen.update({_normal(name)} - {"unknown"})
        try:
            points += [p for p in dist.entry_points if p.group == group]
        except Exception as error:  # noqa: BLE001 - the metadata may be damaged in any way
            if _mentions(dist, group):
                reason = f"the entry points of {name} cannot be read: {show_error(error)}"
                unreadable.append(Candidate(name, name, number, None, "broken", reason, owner=False))
    return points, sorted(unreadable, key=lambda c: c.name)


def _mentions(dist: Distribution, group: str) -> bool:
    try:
        return group in (dist.read_text("entry_points.txt") or "")
    except Exception:  # noqa: BLE001 - the metadata may be damaged in any way
        return False


def _candidate(point: EntryPoint, kind: type) -> Candidate:
    distribution, number = _distribution(point.dist)

    def broken(reason: str) -> Candidate:
        return Candidate(point.name, distribution, number, None, "broken", f"{point.value}: {reason}")

    try:
        loaded = point.load()
        if not isinstance(loaded, kind):
            kinds = f"of type {type(loaded).__name__}, not a {kind.__name__}"
            return broken(f"the entry point is {shown(loaded)}, {kinds}")
        spec = plain_spec(loaded, kind)
        problem, unreadable = spec_problem(spec, ("name", "abi")), spec_problem(spec)
    except FAILURES as error:
        return broken(show_error(error))
    if problem is None and not compatible(spec.abi):
        # a spec for another ABI may have fields of a form that this core does not know
        reason, usable = _mismatch(spec, distribution, number), None if unreadable else spec
        return Candidate(spec.name, distribution, number, usable, "abi-mismatch", reason)
    return Candidate(spec.name, distribution, number, spec) if unreadable is None else broken(unreadable)


def _mismatch(spec: Any, distribution: str, number: str) -> str:
    plugin, core = (".".join(map(str, v)) for v in (spec.abi, BACKEND_ABI))
    ours = {name for owners in OWNERS.values() for name in owners.values()}
    if spec.abi > BACKEND_ABI:
        remedy = f"install a newer kda-core: {install.command()}"
    elif _normal(distribution) in ours:
        remedy = f"install a newer {distribution}: {install.command(_normal(distribution))}"
    else:
        remedy = f"install a newer {distribution}: {spec.install}"
    return f"{distribution} {number} was written for ABI {plugin}, kda-core has {core}; {remedy}"


def _one_owner_a_name(
    found: list[Candidate], own: tuple[Candidate, ...], reserved: Mapping[str, str]
) -> list[Candidate]:
    """The candidates, of which no two own one name. A reserved name belongs to its distribution, any other to the first
    candidate that is sound, else to the first. The others are listed as broken."""

    def entitled(c: Candidate) -> bool:
        return reserved.get(c.name) in (None, _normal(c.distribution))

    owners = {c.name: c for c in own}
    for c in sorted(found, key=lambda c: c.status != "ok"):  # which keeps the order otherwise
        if entitled(c):
            owners.setdefault(c.name, c)
    listed = []
    for c in found:
        if owners.get(c.name) is c:
            listed.append(c)
            continue
        if entitled(c):
            why = f"{c.distribution} uses the name {c.name}, which {owners[c.name].distribution} has"
        else:
            why = f"the name {c.name} is reserved for {reserved[c.name]}"
        reason = f"{c.reason}; {why}" if c.reason else why
        listed.append(replace(c, spec=None, status="broken", reason=reason, owner=False))
    return listed


def _distribution(dist: Distribution | None) -> tuple[str, str]:
    """The name and the version that an installed distribution's metadata tell; a damaged file may lack them."""

    def told(attribute: str) -> Any:
        try:
            return getattr(dist, attribute)
        except Exception:  # noqa: BLE001 - the metadata may be damaged in any way
            return None

    name, number = told("name"), told("version")
    return (name if isinstance(name, str) else "unknown", number if isinstance(number, str) else "")


def _normal(distribution: str) -> str:
    """The name by which an index compares distributions."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
