"""Checks of a plugin before its use: the fields of its spec, and the methods of its object.

A plugin may be defective in any way. No function here propagates an exception of its code, and every message contains the actual
value.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any

import torch

from kda_core.backend import BackendSpec, PlannerSpec, SupportsBackwardInto, least_capability
from kda_core.contract import INPUT_DTYPES, Feature, dtype_name


def plain_spec(loaded: object, kind: type) -> Any:
    """Returns the spec of an entry point with every field read once and with values of built-in types. A spec of a subclass is
    replaced by a plain one, so that a subclass cannot change the meaning of a spec.

    Raises:
        AttributeError: a field is missing, or a property of a subclass raises.
    """
    values = {}
    for f in fields(kind):
        try:
            values[f.name] = getattr(loaded, f.name)
        except Exception as error:
            raise AttributeError(f"{f.name} cannot be read: {show_error(error)}") from error
    plain = {name: _plain(value) for name, value in values.items()}
    if type(loaded) is kind and all(plain[name] is value for name, value in values.items()):
        return loaded
    return kind(**plain)


def spec_problem(spec: Any, names: Collection[str] | None = None) -> str | None:
    """Returns the defect of a spec from `plain_spec`, or None. `names`: the fields to check, all by default."""
    for f in fields(spec):
        check, expected = _CHECKS[f.name]
        value = getattr(spec, f.name)
        if (names is None or f.name in names) and not check(value):
            return f"{f.name} is {shown(value)}, not {expected}"
    return None


def target_problem(spec: BackendSpec | PlannerSpec, made: object) -> str | None:
    """Returns which methods the object of `spec.target` lacks, or None. Optional methods are required if the spec declares
    their feature."""
    features: Collection[str] = ()
    if isinstance(spec, PlannerSpec):
        needed = ["plan", "plan_from_json", "execute"]
    else:
        needed, features = ["can_run", "workspace_bytes", "compile", "chunk_fwd"], spec.features
        needed += [m for feature, methods in _METHODS.items() if feature in features for m in methods]
    missing = [name for name in needed if not callable(getattr(made, name, None))]
    if missing == ["chunk_bwd"] and isinstance(made, SupportsBackwardInto):
        missing = []
    if missing:
        return f"{type(made).__name__} has no {', '.join(missing)}"
    if Feature.SAVED_STATES.value in features and isinstance(made, SupportsBackwardInto):
        try:
            inspect.signature(made.chunk_bwd_into).bind(*range(7))
        except TypeError:
            what = "has no saved_states, residual, but the spec declares saved_states"
            return f"{type(made).__name__}.chunk_bwd_into {what}"
    return None


def shown(value: object) -> str:
    """Returns any value as text of at most 200 characters, for a message."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a plugin may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


def show_error(error: BaseException) -> str:
    """Returns the type and the text of an error, for a message."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a plugin may raise anything
        text = "an error without a text"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_DTYPES = tuple(sorted(map(dtype_name, INPUT_DTYPES)))
_ARCHS = "(9, 0), 'sm_80+', 'cpu' or 'any'"
_METHODS = {
    Feature.BACKWARD.value: ("chunk_bwd",),
    Feature.RECURRENT.value: ("recurrent_fwd",),
    Feature.JOURNAL.value: ("journal_decode", "journal_fold"),
}


def _plain(value: Any) -> Any:
    """Returns `value` with instances of subclasses of str, tuple and set replaced by instances of the built-in types."""
    if isinstance(value, str):
        return str.__str__(value)  # returns an exact str unchanged
    if not isinstance(value, (tuple, frozenset, set)):
        return value
    built_in = tuple if isinstance(value, tuple) else frozenset
    items = list(value)
    plain = [_plain(x) for x in items]
    same = type(value) is built_in and all(a is b for a, b in zip(items, plain))
    return value if same else built_in(plain)


def _is_integer(x: object) -> bool:
    return type(x) is int  # excludes bool


def _is_pair(x: object) -> bool:
    return type(x) is tuple and len(x) == 2 and all(type(n) is int and n >= 0 for n in x)


def _is_name(x: object) -> bool:
    return type(x) is str and re.fullmatch(r"[a-z0-9][a-z0-9._-]*", x) is not None


def _is_arch(x: object) -> bool:
    if type(x) is not str:
        return _is_pair(x)
    if x in ("any", "cuda"):  # a GPU is named by its compute capability
        return x == "any"
    if least_capability(x) is not None:
        return True
    try:
        return torch.device(x).type == x
    except RuntimeError:
        return False


def _is_dtype(x: object) -> bool:
    return type(x) is str and x in _DTYPES


def _is_head_dims(x: object) -> bool:
    return _is_pair(x) and 0 not in x  # type: ignore[operator]


def _is_path(x: object) -> bool:
    if type(x) is not str:
        return False
    module, _, attribute = x.partition(":")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _is_text(x: object) -> bool:
    return type(x) is str


def _optional(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda x: x is None or check(x)


def _set_of(check: Callable[[object], bool], least: int) -> Callable[[object], bool]:
    return lambda x: type(x) is frozenset and len(x) >= least and all(map(check, x))


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {  # field: (check, expected value for a message)
    "name": (_is_name, "a lower-case name of letters, digits, '.', '_' and '-'"),
    "abi": (_is_pair, "(major, minor)"),
    "archs": (_set_of(_is_arch, 1), f"a frozenset of compute capabilities such as {_ARCHS}"),
    "features": (_set_of(_is_text, 0), "a frozenset of texts"),
    "target": (_is_path, "'package.module:Class'"),
    "install": (_is_text, "a text"),
    "dtypes": (_optional(_set_of(_is_dtype, 1)), f"a frozenset of some of {', '.join(_DTYPES)}"),
    "head_dims": (_optional(_set_of(_is_head_dims, 1)), "a frozenset of pairs (K, V) of positive integers"),
    "priority": (_is_integer, "an int"),
    "unavailable": (_optional(_is_text), "a text or None"),
    "variants": (_optional(_is_path), "'package.module:callable'"),
    "note": (_optional(_is_text), "a text or None"),
}
