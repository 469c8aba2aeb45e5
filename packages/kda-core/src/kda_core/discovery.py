"""Discovery of plugins: imports and checks every entry point. A broken plugin is listed with its reason and never prevents the
discovery of another.

Any exception of a plugin but `KeyboardInterrupt` becomes its reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distributions,
    version,
)
from typing import Any

from kda_core import install
from kda_core.abi import BACKEND_ABI, compatible
from kda_core.backend import BACKEND_GROUP, PLANNER_GROUP
from kda_core.plugin_checks import plain_spec, show_error, shown, spec_problem

FAILURES = (Exception, SystemExit, GeneratorExit)
"""The exceptions of plugins that core catches."""

_RESERVED = {BACKEND_GROUP: r"sm[0-9]+[a-z]?", PLANNER_GROUP: r"cp"}
"""Names that only the distribution ``kda-<name>`` may use, as regular expressions."""


def reserved_owner(group: str, name: str) -> str | None:
    """Returns the only distribution that may use a name, or None if any may.

    This project names a backend for an architecture ``sm<number>`` and publishes it as ``kda-sm<number>``. The reservation
    keeps another distribution from serving calls that name a backend of this project.
    """
    return f"kda-{name}" if re.fullmatch(_RESERVED[group], name) else None


def published_backends() -> dict[str, str]:
    """Returns the backends that this project publishes, with what `install.command` installs for each, so that messages can
    name a missing one."""
    return {name.removeprefix("kda-"): name for name in install.GPUS.values()} | {"fla": install.FLA}


@dataclass(frozen=True)
class Candidate:
    """An entry point after its import.

    Attributes:
        name: of the plugin.
        distribution, version: of the package that has the entry point.
        spec: None if it cannot be used.
        status: "ok", "broken" or "abi-mismatch".
        reason: explains the status.
        owner: whether users reach this candidate by its name. Of several candidates with one name only one is the owner; the
            others are broken.
    """

    name: str
    distribution: str
    version: str
    spec: Any = None
    status: str = "ok"
    reason: str = ""
    owner: bool = True


def entry_points(*, group: str) -> list[EntryPoint]:
    """Returns the entry points of a group, as `importlib.metadata.entry_points` does.

    The first call reads the metadata of every distribution on ``sys.path``, which takes tens of milliseconds where hundreds are
    installed. Later calls, for any group, reuse it until `forget_entry_points` or until ``sys.path`` changes.
    """
    return list(_entry_points_of(tuple(sys.path)).select(group=group))


@lru_cache(maxsize=1)
def _entry_points_of(path: tuple[str, ...]) -> Any:
    """``path``: ``sys.path``, the key of the cache."""
    return metadata.entry_points()


def forget_entry_points() -> None:
    """Makes the next `entry_points` read the metadata of all distributions again."""
    _entry_points_of.cache_clear()
    _distribution.cache_clear()


def discover(
    group: str, kind: type, read: Callable[..., Iterable[EntryPoint]], own: tuple[Candidate, ...] = ()
) -> tuple[Candidate, ...]:
    """Returns `own` and the candidates of an entry-point group, sorted by the name of the entry point, its value and the
    distribution, so that the order does not depend on the file system.

    Args:
        group: name of the entry-point group.
        kind: the class of a valid spec.
        read: `entry_points`.
        own: candidates of kda-core itself.
    """
    points, unreadable = _points(group, read)
    found = [_candidate(p, kind, group) for p in sorted(points, key=_order)]
    return (*own, *unreadable, *_with_owners(found, own, group))


def _order(point: EntryPoint) -> tuple[str, ...]:
    return (point.name, point.value, *_distribution(point.dist))


def installed_version(distribution: str) -> str:
    """Returns the version of a distribution, or words that say why there is none."""
    try:
        return version(distribution) or "unknown"
    except PackageNotFoundError:
        return "not installed as a package"


def _points(
    group: str, read: Callable[..., Iterable[EntryPoint]]
) -> tuple[list[EntryPoint], list[Candidate]]:
    """Returns the entry points of a group, and candidates for distributions whose entry points cannot be read."""
    try:
        return list(read(group=group)), []
    except Exception:  # noqa: BLE001 - the metadata of one distribution is damaged; the error does not name it
        return _points_one_by_one(group)


def _points_one_by_one(group: str) -> tuple[list[EntryPoint], list[Candidate]]:
    """`_points` that skips distributions with damaged metadata; those that mention the group become candidates."""
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
    """Returns whether a distribution's entry points contain the name of the group."""
    try:
        return group in (dist.read_text("entry_points.txt") or "")
    except Exception:  # noqa: BLE001 - the metadata may be damaged in any way
        return False


def _candidate(point: EntryPoint, kind: type, group: str) -> Candidate:
    """Imports and checks one entry point."""
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
        # a spec for another ABI may have fields that this core cannot interpret
        reason, usable = _mismatch(spec, distribution, number, group), None if unreadable else spec
        return Candidate(spec.name, distribution, number, usable, "abi-mismatch", reason)
    return Candidate(spec.name, distribution, number, spec) if unreadable is None else broken(unreadable)


def _mismatch(spec: Any, distribution: str, number: str, group: str) -> str:
    """Returns the reason of the status "abi-mismatch"."""
    plugin, core = (".".join(map(str, v)) for v in (spec.abi, BACKEND_ABI))
    if spec.abi > BACKEND_ABI:
        remedy = f"install a newer kda-core: {install.command()}"
    elif reserved_owner(group, spec.name) == _normal(distribution):
        remedy = f"install a newer {distribution}: {install.command(_normal(distribution))}"
    else:
        remedy = f"install a newer {distribution}: {spec.install}"
    return f"{distribution} {number} was written for ABI {plugin}, kda-core has {core}; {remedy}"


def _with_owners(found: list[Candidate], own: tuple[Candidate, ...], group: str) -> list[Candidate]:
    """Returns the candidates with one owner for each name; the others are broken. A reserved name belongs to its distribution.
    Any other name belongs to the first candidate that works, or to the first if none does."""

    def may_own(c: Candidate) -> bool:
        return reserved_owner(group, c.name) in (None, _normal(c.distribution))

    owners = {c.name: c for c in own}
    for c in sorted(found, key=lambda c: c.status != "ok"):  # a stable sort
        if may_own(c):
            owners.setdefault(c.name, c)
    listed = []
    for c in found:
        if owners.get(c.name) is c:
            listed.append(c)
            continue
        if may_own(c):
            why = f"{c.distribution} uses the name {c.name}, which belongs to {owners[c.name].distribution}"
        else:
            why = f"the name {c.name} is reserved for {reserved_owner(group, c.name)}"
        reason = f"{c.reason}; {why}" if c.reason else why
        listed.append(replace(c, spec=None, status="broken", reason=reason, owner=False))
    return listed


@lru_cache(maxsize=256)
def _distribution(dist: Distribution | None) -> tuple[str, str]:
    """Returns name and version from a distribution's metadata, which a damaged file may lack. Each of them reads the file."""

    def read(attribute: str) -> Any:
        try:
            return getattr(dist, attribute)
        except Exception:  # noqa: BLE001 - the metadata may be damaged in any way
            return None

    name, number = read("name"), read("version")
    return (name if isinstance(name, str) else "unknown", number if isinstance(number, str) else "")


def _normal(distribution: str) -> str:
    """Returns the normalised name of a distribution, as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
