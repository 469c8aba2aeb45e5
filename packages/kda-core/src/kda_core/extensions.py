"""Subcommands and diagnostics that other packages add to ``python -m kda_core``.

| entry-point group | what the entry point names | when it is imported |
| --- | --- | --- |
| ``kda_core.commands`` | a `Command`; the entry point's name is the subcommand's | when the user calls the subcommand or asks for help |
| ``kda_core.diagnostics`` | a function without arguments that returns a `Diagnosis` | by ``doctor`` |

The modules should be cheap to import: no compiler, no CUDA. A broken extension is reported and never affects others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from kda_core.discovery import FAILURES, entry_points
from kda_core.errors import KdaError
from kda_core.plugin_checks import show_error

COMMAND_GROUP = "kda_core.commands"
DIAGNOSTIC_GROUP = "kda_core.diagnostics"


class ExtensionError(KdaError):
    """An extension cannot be imported, or is not what its group requires."""


@dataclass(frozen=True)
class Command:
    """A subcommand of ``python -m kda_core``.

    Attributes:
        help: one line for the list of subcommands.
        description: the paragraph above the options in the subcommand's own help.
        add_arguments: adds the options to the subcommand's parser.
        run: executes the command; returns the exit status: 0 for success, 1 for a finding, 2 for wrong usage. A `KdaError`
            that it raises is printed without a traceback. ``args.usage_error(message)`` exits as argparse does for wrong
            usage.
    """

    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Diagnosis:
    """What a package reports to ``doctor``.

    Attributes:
        facts: label of a line (at most 11 characters) -> name -> value, such as ``{"wheel": {"package": "1.0"}}``.
        problems: one text for each thing that the user should fix, with the remedy.
    """

    facts: Mapping[str, Mapping[str, str]]
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class Extension:
    """An entry point of one of the groups, not imported yet."""

    point: metadata.EntryPoint

    @property
    def name(self) -> str:
        return self.point.name

    @property
    def distribution(self) -> str:
        """The name and version of the distribution that contains it, for messages."""
        dist = self.point.dist
        return "an unknown distribution" if dist is None else f"{dist.name} {dist.version}"

    def load(self, kind: Callable[[Any], bool], expected: str) -> Any:
        """Imports and returns the object.

        Args:
            kind: returns whether an object is what the group requires.
            expected: the requirement in words, for the message.

        Raises:
            ExtensionError: the import fails, or the object is something else.
        """
        where = f"{self.name} ({self.point.value}, from {self.distribution}) is broken"
        try:
            found = self.point.load()
        except FAILURES as error:
            raise ExtensionError(f"{where}: {show_error(error)}") from error
        if not kind(found):
            raise ExtensionError(
                f"{where}: expected {expected}, got an object of type {type(found).__name__}"
            )
        return found

    def command(self) -> Command:
        """Returns the subcommand of an entry point of `COMMAND_GROUP`.

        Raises:
            ExtensionError: it cannot be imported or is no `Command`.
        """
        return self.load(lambda x: isinstance(x, Command), "a kda_core.extensions.Command")

    def diagnosis(self) -> Diagnosis:
        """Calls the function of an entry point of `DIAGNOSTIC_GROUP` and returns its report.

        Raises:
            ExtensionError: it cannot be imported, raises, or returns no `Diagnosis`.
        """
        examine = self.load(callable, "a function")
        where = f"{self.name} (from {self.distribution})"
        try:
            found = examine()
            if not isinstance(found, Diagnosis):
                raise TypeError(f"expected a Diagnosis, got an object of type {type(found).__name__}")
            facts = {
                str(label): {str(k): str(v) for k, v in values.items()}
                for label, values in found.facts.items()
            }
            return Diagnosis(facts, [str(problem) for problem in found.problems])
        except FAILURES as error:
            raise ExtensionError(f"{where} failed: {show_error(error)}") from error


def find(group: str) -> dict[str, Extension]:
    """Returns the extensions of a group by name, sorted. If two distributions use one name, the distribution that sorts first owns
    it."""
    found: dict[str, Extension] = {}
    for extension in sorted(map(Extension, _points(group)), key=lambda e: (e.name, e.distribution)):
        found.setdefault(extension.name, extension)
    return found


def _points(group: str) -> list[metadata.EntryPoint]:
    try:
        return entry_points(group=group)
    except Exception:  # noqa: BLE001 - the metadata of one distribution is damaged: read the others one by one
        return [point for dist in metadata.distributions() for point in _points_of(dist, group)]


def _points_of(dist: metadata.Distribution, group: str) -> list[metadata.EntryPoint]:
    try:
        return [point for point in dist.entry_points if point.group == group]
    except Exception:  # noqa: BLE001 - damaged in any way; `backends` reports such a distribution if it brings a backend
        return []
