"""The arguments of a call in one NamedTuple, and the checks of their types.

`Arguments` carries a call from the public functions to a backend, and its fields define the schema of the operators in
`kda_core.ops`. The schema would also refuse a wrong type, but its message would lack the caller's name of the argument.
"""

from __future__ import annotations

import difflib
import inspect
import numbers
import operator
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from kda_core.buffers import GivenOutputs
from kda_core.contract import OPTION_NAMES, KdaOptions, ProblemShape, Tensors
from kda_core.errors import ArgumentError, DtypeError, UnknownArgumentError, describe
from kda_core.validate import OUTPUT_ARGUMENTS, check_layout, check_layouts, problem_shape


class Arguments(NamedTuple):
    """The arguments of one call: the fields of `Tensors`, then those of `KdaOptions`, then the choice of a backend and of
    context parallelism, then what autograd asks for. Values are as the caller passed them until `checked` has converted them.

    Attributes:
        backend: name of a backend, or None.
        context_parallel: "auto", "off", or a planner's plan, which `checked` converts to its JSON text.
        saves: whether the operator returns saved states for the backward. No caller sets it: `kda_core.gradients` does, from
            `kda_core.call.may_save`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    scale: float | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    disable_recompute: bool = False
    return_intermediate_states: bool = False
    state_v_first: bool = False
    use_graph: bool = False
    max_num_seqs: int | None = None
    chunk_size: int = 64
    pin: bool = False
    needs_backward: bool = False
    recurrent: bool = False
    backend: str | None = None
    context_parallel: str = "auto"
    saves: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The values of `Tensors`, in order."""
        return self[:N_TENSORS]  # type: ignore[return-value]

    @property
    def options(self) -> KdaOptions:
        """The options, validated.

        Raises:
            ArgumentError: as `KdaOptions`.
        """
        return KdaOptions(*self[N_TENSORS:_N_CALL])  # type: ignore[arg-type]

    def shape(self) -> ProblemShape:
        """Validates the metadata of the tensors and the options, and returns it.

        Raises:
            KdaError: as `kda_core.validate.problem_shape`.
        """
        return problem_shape(*Tensors._make(self.tensors), options=self.options)


N_TENSORS = len(Tensors._fields)
_N_CALL = N_TENSORS + len(OPTION_NAMES)


class Kind(NamedTuple):
    """The type of an argument: a class, and whether None is allowed."""

    type: type
    optional: bool


def _kind(hint: Any) -> Kind:
    alternatives = get_args(hint) or (hint,)
    (of_value,) = (x for x in alternatives if x is not NoneType)
    return Kind(of_value, NoneType in alternatives)


KINDS = {name: _kind(hint) for name, hint in get_type_hints(Arguments).items()}
"""The type of every argument by name, in the order of `Arguments`."""

_TENSOR_KINDS = tuple((name, KINDS[name].optional) for name in Tensors._fields)
_OPTION_KINDS = tuple((name, *KINDS[name]) for name in OPTION_NAMES)
_NEEDS_BACKWARD, _RECURRENT = OPTION_NAMES.index("needs_backward"), OPTION_NAMES.index("recurrent")


def checked(args: Arguments) -> Arguments:
    """Returns the arguments with their types checked and converted to those of the operators.

    Where an input requires grad and grad mode is on, the result has `needs_backward`, and not `recurrent`: the decode entry
    has no gradients, and the chunked entry computes the same values.

    Raises:
        ArgumentError, DtypeError: an argument of another type, or an unknown mode.
    """
    options = list(args[N_TENSORS:_N_CALL])  # a list, which torch.compile can trace
    for (name, optional), x in zip(_TENSOR_KINDS, args):
        if not isinstance(x, Tensor) and not (x is None and optional):
            raise DtypeError(name, "a torch.Tensor or None" if optional else "a torch.Tensor", describe(x))
        if x is not None:
            check_layout(name, x)
            if x.requires_grad and torch.is_grad_enabled():
                options[_NEEDS_BACKWARD], options[_RECURRENT] = True, False
    backend, mode = checked_choice(args.backend, args.context_parallel)
    values = [_option(name, kind, optional, x) for (name, kind, optional), x in zip(_OPTION_KINDS, options)]
    return Arguments(*args.tensors, *values, backend, mode)  # type: ignore[arg-type, call-arg]


def checked_choice(backend: Any, mode: Any) -> tuple[str | None, str]:
    """Returns the arguments `backend` and `context_parallel` of a call as the operators receive them: a plan becomes its JSON
    text.

    Raises:
        ArgumentError, DtypeError: an argument of another type, or an unknown mode.
    """
    if backend is not None and not isinstance(backend, str):
        raise DtypeError("backend", "the name of a backend or None", describe(backend))
    if not isinstance(mode, str):
        if not hasattr(mode, "to_json"):
            raise DtypeError("context_parallel", "'auto', 'off' or a plan", describe(mode))
        text = mode.to_json()
        if not isinstance(text, str):
            raise DtypeError("context_parallel", "a plan whose to_json() returns a str", describe(text))
        return backend, text
    if mode not in ("auto", "off"):
        raise ArgumentError("context_parallel", "'auto', 'off' or a plan", repr(mode))
    return backend, mode


def _option(name: str, kind: type, optional: bool, value: Any) -> Any:
    """Returns one option with its type checked, and numpy's scalars converted to Python's. None means False, because FLA's
    callers pass it so (``use_cache=None``)."""
    if value is None and kind is not int:
        return False if kind is bool else None
    if value is None and optional:
        return None
    if kind is bool:
        if isinstance(value, bool):
            return value
        if _is_numpy_bool(value):
            return bool(value)
        expected = "a bool"
    elif kind is float:
        if isinstance(value, (int, float, numbers.Real)) and not isinstance(value, bool):
            try:
                return float(value) + 0.0  # -0.0 becomes 0.0, because caches cannot distinguish them
            except OverflowError:
                raise ArgumentError(name, "a number that fp64 can hold", describe(value)) from None
        expected = "a number or None"
    else:
        if isinstance(value, (int, numbers.Integral)) and not isinstance(value, bool):
            value = operator.index(value)
            if not -(2**63) <= value < 2**63:
                raise ArgumentError(name, "an int of 64 bits", describe(value))
            return value
        expected = "an int"
    # a tensor is not accepted, because the host would wait for its value
    hint = f"Pass {name}.item()" if getattr(value, "shape", None) == () else ""
    raise DtypeError(name, expected, describe(value), hint)


def _is_numpy_bool(value: Any) -> bool:
    """Compares by name, because kda-core does not import numpy. numpy registers its other scalars with `numbers`."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def given_outputs(out: Any, workspace: Any) -> GivenOutputs:
    """Returns the tensors of the arguments `out` and `workspace`, with their types checked, but not that they are dense
    (`check_outputs_dense`).

    Raises:
        DtypeError: not a tensor, or not a tuple of up to three.
    """
    if workspace is None and type(out) is Tensor:
        return tuple.__new__(GivenOutputs, (out, None, None, None))
    if workspace is not None and not isinstance(workspace, Tensor):
        raise DtypeError("workspace", "a torch.Tensor or None", describe(workspace))
    if out is None or isinstance(out, Tensor):
        return GivenOutputs(out, workspace=workspace)
    tensors: tuple[Any, ...] = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if len(tensors) > 3 or not all(x is None or isinstance(x, Tensor) for x in tensors):
        expected = "a tensor, or a tuple of up to 3 tensors or None: (o, final_state, h)"
        raise DtypeError("out", expected, describe(out))
    o, final_state, h = (*tensors, None, None, None)[:3]
    return GivenOutputs(o, final_state, h, workspace)


def check_outputs_dense(given: GivenOutputs | None) -> None:
    """Checks that all tensors that the caller passed to be written are dense.

    Raises:
        ArgumentError: one is not.
    """
    check_layouts(OUTPUT_ARGUMENTS, given or ())


# ---- unknown keywords

_HINTS = {
    "head_first": "Tensors are [B, T, H, ...]: pass x.transpose(1, 2) if heads come first",
    "offsets": "Did you mean 'cu_seqlens'?",
    "chunk_indices": "Leave it out: it is computed from cu_seqlens",
    "g_bias": "Did you mean 'dt_bias'?",
    "sigmoid_beta": "Did you mean 'use_beta_sigmoid_in_kernel'?",
    "compute_gate": "Did you mean 'use_gate_in_kernel'?",
    "state_layout": "Did you mean 'state_v_first'?",
    "initial_state_indices": "Did you mean 'ssm_state_indices'?",
    "num_accepted_tokens": "Only fused_recurrent_kda has it",
    "inplace_final_state": "Only fused_recurrent_kda has it; output_final_state updates a pool in place",
}
"""Hints for keywords of FLA's earlier versions and of its copies in serving engines."""


def unknown_keyword(
    function: Callable[..., Any], unknown: Mapping[str, object], largest: Callable[..., Any]
) -> UnknownArgumentError:
    """Returns the exception for the first keyword in `unknown`, none of which `function` has. `largest`: the function with
    all arguments."""
    name, names = next(iter(unknown)), inspect.signature(function).parameters
    hint = _HINTS.get(name, "")
    if not hint and name in inspect.signature(largest).parameters:
        hint = f"Only {largest.__name__} has it"
    if not hint and (close := difflib.get_close_matches(name, names, n=1)):
        hint = f"Did you mean {close[0]!r}?"
    message = f"{function.__name__}() got an unexpected keyword argument {name!r}"
    return UnknownArgumentError(f"{message}. {hint}" if hint else message)
