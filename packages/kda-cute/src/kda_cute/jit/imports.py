"""Which modules a kernel's code imports, found from their text: local files by path, installed packages by version.

Only import statements count. A module whose name is known only at run time (`importlib.import_module`) is not found.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

#: Packages whose files are no part of a key: the DSL's version is an ingredient of its own, and torch is not used while a
#: kernel is traced.
_BY_VERSION = frozenset({"cutlass", "cuda", "tvm_ffi", "torch"})
#: This package is part of every key, as a whole.
_PACKAGE = __name__.partition(".")[0]


@functools.cache
def imported_by(modules: tuple[str, ...]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Returns the files, and the "name version" of installed packages, that modules import directly or indirectly. Their own
    packages and `kda_cute` are left out."""
    own = {name.partition(".")[0] for name in modules}
    queue, seen = list(modules), set(modules)
    files: set[Path] = set()
    versions: set[str] = set()
    while queue:
        name = queue.pop()
        top = name.partition(".")[0]
        if top in _BY_VERSION or top == _PACKAGE or top in sys.stdlib_module_names:
            continue
        if top not in own and (version := _release(top)):
            versions.add(version)
            continue
        path = _file(name)
        if path is None:
            continue
        if top not in own:
            files.add(path)
        found = set(_imports(name, path)) - seen
        seen |= found
        queue += found
    return tuple(sorted(files)), tuple(sorted(versions))


def _file(name: str) -> Path | None:
    """The Python file of a module, None if there is none. Imports the module's parents."""
    module = sys.modules.get(name)
    try:
        spec = importlib.util.find_spec(name) if module is None else None
    except Exception:  # noqa: BLE001 - a parent that no kernel has imported may raise anything
        return None
    origin = getattr(module, "__file__", None) or (spec.origin if spec is not None else None)
    return Path(origin) if origin and origin.endswith(".py") else None


def _imports(name: str, path: Path) -> Iterator[str]:
    """The modules that a module's text may import."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # then it was not imported either
        return
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _statements(tree):
        if isinstance(node, ast.Import):  # `import a.b` imports a and a.b
            for words in (alias.name.split(".") for alias in node.names):
                yield from (".".join(words[:n]) for n in range(1, len(words) + 1))
        else:
            parts = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)  # a module, or an attribute of one


def _statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements of a module and its functions, without those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(ast.Module(node.orelse, []))
        else:
            yield from _statements(node)


@functools.cache
def _distributions() -> dict[str, list[metadata.Distribution]]:
    """The installed distributions of each top-level module. (In Python 3.10, ``packages_distributions`` misses those without
    a ``top_level.txt``.)"""
    found: dict[str, list[metadata.Distribution]] = {}
    for distribution in metadata.distributions():
        text = distribution.read_text("top_level.txt")
        tops = (
            text.split() if text else {file.parts[0].partition(".")[0] for file in distribution.files or ()}
        )
        for top in tops:
            found.setdefault(top, []).append(distribution)
    return found


def _release(top: str) -> str | None:
    """Name and version of the installed distribution of a top-level module; None for a module of a checkout."""
    distributions = _distributions().get(top, [])
    try:
        spec = importlib.util.find_spec(top) if distributions else None
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    for distribution in distributions:
        folder = Path(str(distribution.locate_file("")))
        if any(Path(place).is_relative_to(folder) for place in places):
            return f"{distribution.metadata['Name']} {distribution.version}"
    return None
