"""A griffe extension for the API reference: it adapts docstrings to the syntax of griffe and Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Function, Module, Object, ParameterKind

SHARED = re.compile(
    r"^(?P<indent> +)(?P<first>\w+)(?P<others>(?:, \w+)+):(?P<text>.*(?:\n(?P=indent) +.*)*)", re.MULTILINE
)
SECTIONS = re.compile(r"(?<=^Args:\n)(?:.+\n?)+|(?<=^Attributes:\n)(?:.+\n?)+", re.MULTILINE)


def _separate(entry: re.Match[str]) -> str:
    """One entry for each of the names that share `entry`; the others refer to the first."""
    indent, first, text = entry["indent"], entry["first"], entry["text"]
    names = entry["others"].removeprefix(", ").split(", ")
    return "\n".join([f"{indent}{first}:{text}", *(f"{indent}{name}: See `{first}`." for name in names)])


class Adapt(Extension):
    """Changes docstrings and signatures before they are rendered:

    - An entry "q, k: ..." below "Args:" or "Attributes:" becomes one entry for each name.
    - "::" and ".. code-block:: python" before an indented block disappear, because Markdown shows the block as code anyway.
    - The parameter ``**unknown`` disappears. It exists for a better error message, and `inspect.signature` hides it too.
    """

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Edits the docstring of a package, for which griffe does not call `on_object`."""
        self.on_object(obj=pkg)

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Edits a docstring before it is parsed."""
        if obj.docstring is not None:
            text = re.sub(r"^\.\. code-block:: python\n\n", "", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            obj.docstring.value = SECTIONS.sub(lambda section: SHARED.sub(_separate, section[0]), text)

    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        """Removes ``**unknown``."""
        if "unknown" in func.parameters and func.parameters["unknown"].kind is ParameterKind.var_keyword:
            del func.parameters["unknown"]
