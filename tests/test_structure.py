"""The structure of the packages: import graphs without cycles, the layers of kda-core, and its dependencies."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from kda_core import api, call, ops
from kda_core.arguments import KINDS, Arguments
from kda_core.buffers import GivenOutputs
from kda_core.contract import KdaInputs, KdaOptions, Tensors
from kda_core.pools import SlotArguments

ROOT = Path(__file__).parents[1]
SOURCES = {
    ".".join(path.relative_to(src).with_suffix("").parts).removesuffix(".__init__"): path
    for src in sorted(ROOT.glob("packages/*/src"))
    for path in sorted(src.rglob("*.py"))
}
CORE = {name: path for name, path in SOURCES.items() if name.partition(".")[0] == "kda_core"}

LAYERS = (
    "api",
    "ops",
    "journal",
    "pools",
    "call",
    "arguments",
    "buffers",
    "validate",
    "contract",
    "offsets",
    "errors",
)
"""The modules that a call passes through in kda-core, in order: no module imports one to its left."""


def _at_import(nodes):
    """Yields the statements that run when a module is imported; blocks of ``if TYPE_CHECKING`` do not."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_import(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from _at_import(getattr(node, part, ()))


def imported_names(name):
    """Returns the dotted names that a module imports when it is imported itself."""
    path = SOURCES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in _at_import(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join(filter(None, [*parts, node.module]))
            found.update(f"{origin}.{alias.name}" for alias in node.names)
    return found


def imported_modules(name):
    """Returns the modules of this repository that a module imports, without the packages that contain them."""
    found = set()
    for dotted in imported_names(name):
        module = dotted if dotted in SOURCES else dotted.rpartition(".")[0]
        if module in SOURCES:
            found.add(module)
    return found - {name}


def cycle(graph):
    """Returns the nodes of a cycle, or None."""
    done, path = set(), []

    def visit(node):
        if node in path:
            return path[path.index(node) :] + [node]
        if node in done:
            return None
        path.append(node)
        for follower in sorted(graph[node]):
            if (found := visit(follower)) is not None:
                return found
        done.add(path.pop())
        return None

    return next((found for node in sorted(graph) if (found := visit(node)) is not None), None)


def test_no_module_imports_itself_through_others():
    assert len(SOURCES) > 100
    graph = {name: imported_modules(name) for name in SOURCES}
    assert graph["kda_core.api"] >= {"kda_core.arguments", "kda_core.ops"}
    found = cycle(graph)
    assert found is None, " -> ".join(found)


def test_no_gpu_backend_needs_another_one():
    packages = {name.partition(".")[0] for name in SOURCES}
    backends = {package for package in packages if package.startswith("kda_sm") and package[6:].isdigit()}
    assert len(backends) > 1
    for backend in backends:
        found, left = set(), {name for name in SOURCES if name.startswith(f"{backend}.")}
        while left:
            name = left.pop()
            found.add(name)
            left |= (imported_modules(name) | {name.rpartition(".")[0]}) & SOURCES.keys() - found
        needed = {name.partition(".")[0] for name in found}
        assert {"kda_cute", "kda_core"} <= needed and needed & backends == {backend}


def test_a_cycle_would_be_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


@pytest.mark.parametrize("name", LAYERS)
def test_a_call_passes_through_kda_core_in_one_direction(name):
    upper = {f"kda_core.{layer}" for layer in LAYERS[: LAYERS.index(name)]}
    assert not upper & imported_modules(f"kda_core.{name}")


def test_kda_core_imports_torch_and_the_standard_library_only():
    """pytest and hypothesis are exceptions for the conformance kit, which is an extra, and so is the package of an integration."""
    allowed = {*sys.stdlib_module_names, "torch", "kda_core"}
    for name in CORE:
        found = {dotted.partition(".")[0] for dotted in imported_names(name)}
        kit = {"pytest", "hypothesis"} if name.startswith("kda_core.testing.") else set()
        other = {name.rpartition(".")[2]} if name.startswith("kda_core.integrations.") else set()
        assert found <= allowed | kit | other, name


def test_kda_core_contains_no_word_of_the_kernel_language():
    words = re.compile(r"(?<!kda-)\b(cute|cutlass|DSL|ptxas)\b|CuTe")  # messages name the package kda-cute
    for path in CORE.values():
        found = [m[0] for m in words.finditer(path.read_text())]
        assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_only_one_module_uses_private_names_of_torch():
    private = re.compile(
        r"\btorch(?:\.\w+)*\._[a-zA-Z]\w*|\bforward_ad\._\w+|from torch[\w.]* import [^\n]*\b_\w+"
    )
    for name, path in CORE.items():
        if name not in ("kda_core.torch_private", "kda_core.testing.conformance"):
            assert not private.findall(path.read_text()), name


# ---- one list of arguments


def test_arguments_are_the_tensors_the_options_and_the_choice():
    options = {f: KdaOptions.__dataclass_fields__[f].default for f in KdaOptions.__dataclass_fields__}
    assert Arguments._fields == (*Tensors._fields, *options, "backend", "context_parallel", "saves")
    choice = {"backend": None, "context_parallel": "auto", "saves": False}
    defaults = Tensors._field_defaults | options | choice
    assert Arguments._field_defaults == defaults
    assert (*Tensors._fields, "shape", "pool", "journal", "segments") == tuple(KdaInputs.__dataclass_fields__)
    types = {name: str(field.type) for name, field in KdaOptions.__dataclass_fields__.items()}
    for name, text in types.items():
        assert text == KINDS[name].type.__name__ + (" | None" if KINDS[name].optional else ""), name


def test_public_functions_pass_arguments_in_the_order_of_the_fields():
    """`chunk_kda` passes tuples instead of keywords, because that takes less time."""
    made: dict[str, list[list[ast.expr]]] = {"tensors": [], "values": []}
    for node in ast.walk(ast.parse(Path(api.__file__).read_text())):
        if isinstance(node, ast.Assign) and (target := ast.unparse(node.targets[0])) in made:
            assert isinstance(node.value, ast.Tuple)
            made[target].append(node.value.elts)
    assert len(made["tensors"]) == len(made["values"]) == 2
    fixed = (
        {"needs_backward": False, "recurrent": False},
        {
            "cu_seqlens_cpu": None, "safe_gate": False, "disable_recompute": False,
            "return_intermediate_states": False, "use_graph": False, "max_num_seqs": None, "chunk_size": 64,
            "pin": False, "needs_backward": False, "recurrent": True, "context_parallel": "off",
        },
    )  # fmt: skip
    for tensors, values, constants in zip(made["tensors"], made["values"], fixed, strict=True):
        assert len(tensors) == len(Tensors._fields)
        *names, last = Arguments._fields
        assert last == "saves"
        for name, value in zip(names, (*tensors, *values), strict=True):
            if name in constants:
                assert isinstance(value, ast.Constant) and value.value == constants[name], name
            else:
                assert isinstance(value, ast.Name) and value.id == name, name


def test_the_schema_of_the_operators_has_every_argument():
    operators = ops.torch.ops.kda_core
    names = [a.name for a in operators.chunk_fwd.default._schema.arguments]
    assert tuple(names) == Arguments._fields
    pooled = operators.pooled_fwd_.default._schema.arguments
    assert [a.name for a in pooled] == [*names, *SlotArguments._fields, *GivenOutputs._fields]
    written = {a.name for a in pooled if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"initial_state", "checkpoint_pool", *GivenOutputs._fields}
    assert call.N_TENSORS == len(Tensors._fields)
