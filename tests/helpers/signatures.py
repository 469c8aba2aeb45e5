"""Records of what the adapters in `kda_core.integrations` rely on in other projects: `tests/integrations/signatures/*.json`.

A record is read from the sources of an installed package, which are not imported, so it needs neither a GPU nor the package's own
requirements. ``python tests/helpers/signatures.py NAME`` writes the record of an installed package anew.

| entry | value |
| --- | --- |
| ``module:function``, ``module:Class.method`` | parameters in order, with defaults |
| ``module:Class`` | fields in order, with defaults |
| ``module:name`` | the value of a constant |
| ``module:Class.method -> callee`` | what each call of ``callee`` in the method passes, in order |
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "integrations" / "signatures"


def read(name: str) -> dict[str, Any]:
    """Returns the record of a package."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def installed(name: str) -> Path | None:
    """Returns the folder of a package without importing it, or None if it is not installed."""
    found = importlib.util.find_spec(name)
    return None if found is None or found.origin is None else Path(found.origin).parent


@cache
def _tree(folder: Path, module: str) -> ast.Module:
    parts = module.split(".")[1:]
    path = folder.joinpath(*parts, "__init__.py")
    return ast.parse((path if path.exists() else folder.joinpath(*parts).with_suffix(".py")).read_text())


def _member(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if getattr(node, "name", None) == name or name in (getattr(t, "id", None) for t in targets):
            return node
    return None


def described(folder: Path, entry: str) -> list[Any] | str:
    """Returns the value of an entry in the sources of a package.

    Raises:
        LookupError: the package has no such module, class or function.
    """
    place, _, callee = entry.partition(" -> ")
    module, _, path = place.partition(":")
    try:
        node: Any = _tree(folder, module)
    except FileNotFoundError:
        raise LookupError(f"{module} does not exist") from None
    for name in path.split("."):
        node = _member(node.body, name)
        if node is None:
            raise LookupError(f"{place} does not exist")
    if callee:
        calls = [x for x in ast.walk(node) if isinstance(x, ast.Call) and _is_called(x, callee)]
        if not calls:
            raise LookupError(f"{place} does not call {callee}")
        return [[*map(ast.unparse, x.args), *(k.arg or "**" for k in x.keywords)] for x in calls]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _parameters(node.args)
    if isinstance(node, ast.ClassDef):
        fields = (x for x in node.body if isinstance(x, (ast.AnnAssign, ast.Assign)))
        return [_named(x.targets[0] if isinstance(x, ast.Assign) else x.target, x.value) for x in fields]
    return ast.unparse(node.value)


def _is_called(call: ast.Call, name: str) -> bool:
    called = ast.unparse(call.func)
    return called == name or called.endswith(f".{name}")


def _named(name: ast.expr | str, default: ast.expr | None) -> str:
    text = name if isinstance(name, str) else ast.unparse(name)
    return text if default is None else f"{text}={ast.unparse(default)}"


def _parameters(args: ast.arguments) -> list[str]:
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
    found = [_named(a.arg, d) for a, d in zip(plain, defaults)]
    if args.posonlyargs:
        found.insert(len(args.posonlyargs), "/")
    if args.vararg is not None:
        found.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        found.append("*")
    found += [_named(a.arg, d) for a, d in zip(args.kwonlyargs, args.kw_defaults)]
    return found + ([f"**{args.kwarg.arg}"] if args.kwarg is not None else [])


def differences(name: str) -> list[str]:
    """Returns one line for each entry of a record that the installed package does not have in that form."""
    folder, lines = installed(name), []
    assert folder is not None, name
    for entry, recorded in read(name)["entries"].items():
        try:
            found = described(folder, entry)
        except LookupError as error:
            lines.append(str(error))
            continue
        if found != recorded:
            lines.append(f"{entry}: recorded {recorded}, found {found}")
    return lines


def write(name: str) -> None:
    """Writes the record of an installed package, with the entries that it has."""
    folder, record = installed(name), read(name)
    assert folder is not None, f"{name} is not installed"
    entries = {entry: described(folder, entry) for entry in record["entries"]}
    text = json.dumps({"package": name, "version": version(name), "entries": entries}, indent=2)
    (FOLDER / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    write(sys.argv[1])
