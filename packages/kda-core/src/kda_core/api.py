"""The user's functions: FLA's arguments in, one operator call out."""

from __future__ import annotations

import difflib
import inspect
import numbers
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from torch import Tensor

from kda_core import contract, flops, ops
from kda_core.contract import OPTION_FIELDS, KdaOptions, describe
from kda_core.errors import ArgumentError, DtypeError, UnknownArgumentError

if TYPE_CHECKING:
    from typing_extensions import Unpack

_N_TENSORS = 10
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _NoKeywords(TypedDict):
    """What type checkers allow beside the named parameters: nothing."""


def _names_its_keywords(function: _Function) -> _Function:
    """Hides the parameter `unknown`, which is there for a better message, from ``help`` and ``inspect.signature``."""
    found = inspect.signature(function)
    named = [p for p in found.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = found.replace(parameters=named)  # type: ignore[attr-defined]
    del function.__annotations__["unknown"]
    return function


@_names_its_keywords
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
    context_parallel: Any = "auto",
    out: Tensor | tuple[Tensor | None, ...] | None = None,
    workspace: Tensor | None = None,
    pin: bool = False,
    **unknown: Unpack[_NoKeywords],
) -> tuple[Any, ...]:
    r"""Kimi Delta Attention over whole sequences (prefill, training), with the arguments of FLA's ``chunk_kda``.

    Per value head, with a state S [K,V] that starts as `initial_state` or zeros, and tokens t (Kimi Linear,
    arXiv:2510.26692)::

        S *= exp(g_t)[:, None];  S += (beta_t k_t) (v_t - k_t^T S);  o_t = scale * q_t^T S

    The same call gives the same bits on every run. Strided inputs are copied. Gradients flow to every floating-point
    input where the chosen backend has a backward, which then runs on the same backend; otherwise inputs that require grad are
    refused. So are forward-mode AD and second derivatives (`DerivativeError`).

    Args:
        q, k: [B, T, H, K], bf16, fp16, fp32 or fp64 (a backend may take fewer). Query/key head of value head i:
            ``i // (HV // H)``.
        v: [B, T, HV, V], q's dtype; HV a multiple of H.
        g: [B, T, HV, K], fp32, bf16 or q's dtype: natural log of the decay, at most 0, or with `use_gate_in_kernel`
            what the gate is computed from.
        beta: [B, T, HV], fp32, bf16 or q's dtype, in [0, 1] (or its logits with `use_beta_sigmoid_in_kernel`).
        scale: factor of the output, ``K**-0.5`` by default.
        initial_state: [N, HV, K, V] fp32 (fp64 for fp64 inputs), or [N, HV, V, K] with `state_v_first`. N is B, or
            ``len(cu_seqlens) - 1``. None equals zeros, bit for bit.
        output_final_state: return the state after the last token of each sequence; a sequence of length zero passes
            its initial state through.
        use_qk_l2norm_in_kernel: q and k are divided by ``sqrt(sum(x**2) + 1e-6)`` over K.
        use_gate_in_kernel: with `lower_bound`, the decay is ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``
            (factor 1 without A_log); without it, ``-exp(A_log) * softplus(g + dt_bias)``.
        use_beta_sigmoid_in_kernel: beta is ``sigmoid(beta)``.
        allow_neg_eigval: beta is ``2 * sigmoid(beta)``; needs `use_beta_sigmoid_in_kernel`.
        safe_gate: the caller's promise that every decay g lies in [-5, 0]; a broken promise gives NaN, which
            ``KDA_CHECK=1`` finds. With `use_gate_in_kernel` it requires `lower_bound` in [-5, 0), which makes it true.
        lower_bound: a number below 0, see `use_gate_in_kernel`. Beside a g that is the decay itself it needs `safe_gate`
            and is part of that promise: every g lies in [lower_bound, 0], so one below -5 promises too little to help.
        disable_recompute: FLA's request to keep intermediates for the backward. It never changes results; a backend
            without a stored-intermediates backward (all of them at present) recomputes.
        return_intermediate_states: also return h, the states at the start of every chunk of `chunk_size` tokens; not
            differentiable. A packed call needs `cu_seqlens_cpu` (or CPU cu_seqlens, or `use_graph`), for the number of
            chunks is the shape of h.
        state_v_first: states are [V, K] instead of [K, V].
        cu_seqlens: [N+1] int32 or int64 on q's device, cumulative lengths of the sequences packed along T (B = 1).
            Values are read on the device, where they are clamped to [0, T].
        cu_seqlens_cpu: the same values in host memory; they are checked, and let a planner and the backend choose by the
            lengths without synchronisation, which changes no bit with `pin`.
        cp_context: FLA's context-parallel context; refused, no installed planner serves it yet.
        use_graph: the contents of `cu_seqlens`, which it needs, may change between CUDA-graph replays: nothing is derived
            from host copies, and ``cu_seqlens[-1]`` may be below T (rows of no sequence are not written).
        max_num_seqs: with `use_graph`, the number of sequences N to which cu_seqlens is padded by empty ones.
        A_log: [HV], or HV elements in another shape ([1, 1, HV, 1]); fp32, bf16 or fp16, computed with in fp32; with
            `use_gate_in_kernel`. Its gradient has its shape and dtype.
        dt_bias: [HV*K] or [HV, K], as A_log.
        chunk_size: 64 or 32, the spacing of `h`; not the chunk that a kernel computes in.
        transpose_state_layout: deprecated name of `state_v_first`.
        backend: name of the backend that must serve the call; there is no fallback. None: `use_backend`, then
            ``KDA_BACKEND``, then the best eligible one.
        context_parallel: "auto" (a planner may split long sequences), "off", or a plan made by a planner.
        out: tensors to write: o, or (o, final_state) or (o, final_state, h) with None where not asked for; contiguous,
            not overlapping the inputs. Not differentiable.
        workspace: 1-D uint8 scratch memory of at least ``explain(...).workspace_bytes``. A planner's own plan that needs more
            gives way to a direct call; where that needs more too, or `context_parallel` is a plan, the call raises. Calls that
            may overlap, on several streams or threads, must not share one.
        pin: fix kernel, chunk and plan, so that outputs depend on their own sequence up to their own token alone, bit
            for bit, whatever else the batch holds and whatever follows.

    Returns:
        o [B, T, HV, V] in q's dtype; the final states, fp32, shaped as `initial_state`, or None; and with
        `return_intermediate_states` h [B, NT, HV, K, V] (or [B, NT, HV, V, K]), bf16, NT = ceil(T / chunk_size), packed
        the total over sequences.

    Raises:
        UnknownArgumentError: an unknown keyword (a TypeError).
        ArgumentError, ShapeError, DtypeError, DeviceError, StrideError: bad input (ValueErrors; DtypeError also is a
            TypeError). Each names the argument, what was expected and what came.
        BackendError: nobody serves the call, or the named backend does not; the message says who refused and why.
    """
    if unknown:
        raise _unknown_keyword(chunk_kda, unknown)
    o, state, h = _run(
        (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu),
        (
            scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, safe_gate, lower_bound, disable_recompute, return_intermediate_states,
            state_v_first if transpose_state_layout is None else _v_first(state_v_first, transpose_state_layout),
            use_graph, max_num_seqs, chunk_size, pin, False, False, backend, context_parallel,
        ),
        cp_context, out, workspace,
    )  # fmt: skip
    final = state if output_final_state else None
    return (o, final, h) if return_intermediate_states else (o, final)


@_names_its_keywords
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
    **unknown: Unpack[_NoKeywords],
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token (decoding), with the arguments of FLA's ``fused_recurrent_kda``.

    The formula, the arguments and the errors are those of `chunk_kda`. Where an input requires grad and grad mode is on,
    the call is one of `chunk_kda`, so that it has gradients; it then needs a backend with a backward.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. g: [B, T, HV, K]. beta: [B, T, HV]. A_log: [HV]. dt_bias: [HV*K] or
            [HV, K]. initial_state: [N, HV, K, V] or [N, HV, V, K]. cu_seqlens: [N+1]; without gradients its last value
            may be below T, and o is zeros behind it.

    Returns:
        o [B, T, HV, V] in q's dtype; the final states or None.
    """
    if unknown:
        raise _unknown_keyword(fused_recurrent_kda, unknown)
    o, state, _ = _run(
        (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, None),
        (
            scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, False, lower_bound, False, False,
            state_v_first if transpose_state_layout is None else _v_first(state_v_first, transpose_state_layout),
            False, None, 64, False, False, True, backend, "off",
        ),
    )  # fmt: skip
    return o, state if output_final_state else None


# ---- helpers


_KEYWORDS_ELSEWHERE = {
    "head_first": "Tensors are [B, T, H, ...]: where heads come first, pass x.transpose(1, 2)",
    "offsets": "Did you mean 'cu_seqlens'?",
    "chunk_indices": "Leave it out: it is found from cu_seqlens",
    "g_bias": "Did you mean 'dt_bias'?",
    "sigmoid_beta": "Did you mean 'use_beta_sigmoid_in_kernel'?",
    "compute_gate": "Did you mean 'use_gate_in_kernel'?",
    "state_layout": "Did you mean 'state_v_first'?",
} | dict.fromkeys(
    ("initial_state_indices", "ssm_state_indices", "num_accepted_tokens", "inplace_final_state"),
    "States are not updated in place: pass initial_state=pool[indices], and write the final states back",
)
"""What to do about keywords of FLA's predecessors and of its copies in serving engines."""


def _unknown_keyword(function: Callable[..., Any], unknown: Mapping[str, object]) -> UnknownArgumentError:
    """The exception for the first of the keywords that `function` does not have."""
    name, names = next(iter(unknown)), inspect.signature(function).parameters
    hint = _KEYWORDS_ELSEWHERE.get(name, "")
    if not hint and name in inspect.signature(chunk_kda).parameters:
        hint = "Only chunk_kda has it"
    if not hint and (close := difflib.get_close_matches(name, names, n=1)):
        hint = f"Did you mean {close[0]!r}?"
    message = f"{function.__name__}() got an unexpected keyword argument {name!r}"
    return UnknownArgumentError(f"{message}. {hint}" if hint else message)


_TENSOR_NAMES = (
    "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu",
)  # fmt: skip
_N_REQUIRED = 5
_OPTION_NAMES = [name for name, _, _ in OPTION_FIELDS]
_NEEDS_BACKWARD, _RECURRENT = _OPTION_NAMES.index("needs_backward"), _OPTION_NAMES.index("recurrent")


def _run(
    tensors: tuple[Any, ...],
    rest: tuple[Any, ...],
    cp_context: Any = None,
    out: Any = None,
    workspace: Any = None,
) -> tuple[Any, Any, Any]:
    """o, final state and h of a call, the last two arbitrary where they were not asked for. `tensors`: those of
    `_TENSOR_NAMES`. `rest`: as the user gave them, the options in the order of `OPTION_FIELDS` (needs_backward is found
    here), backend and context_parallel."""
    written = None if out is None and workspace is None else _written(out, workspace)
    if (
        not torch.compiler.is_compiling()
        and cp_context is None
        and type(rest[-1]) is str  # a planner's plan would be part of a key, and may be anything
        and ops.dispatcher_is_idle(tensors if written is None else (*tensors, *written))
    ):
        found = ops.execute_directly(ops.call_plan(tensors, rest, _checked), tensors, written)
        return found.o, found.final_state, found.intermediate_states
    args = _checked(tensors, rest, cp_context)
    if not torch.compiler.is_compiling():
        flops.offer()
    if written is None:
        return torch.ops.kda_core.chunk_fwd(*args)
    options = KdaOptions(*args[_N_TENSORS : _N_TENSORS + len(OPTION_FIELDS)])
    if options.needs_backward:
        raise ArgumentError(
            "out" if out is not None else "workspace", "None for inputs that require grad", "a tensor"
        )
    o, state, h, workspace = written
    if (
        o is None
        or (state is None and options.output_final_state)
        or (h is None and options.return_intermediate_states)
    ):  # the operator writes what it is given
        inputs = contract.make_inputs(tensors, contract.problem_shape(*tensors, options=options), align=False)
        fresh = contract.allocate_outputs(inputs, 0, written)
        o, state, h = fresh.o, fresh.final_state, fresh.intermediate_states
    torch.ops.kda_core.chunk_fwd_out(*args, o, state, h, workspace)
    return o, state, h


def operator_args(
    *tensors: Tensor | None,
    backend: str | None,
    context_parallel: Any,
    recurrent: bool,
    cp_context: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    """The arguments of the operators from those of a call, with their types checked: the ten tensors, the options in the order
    of `OPTION_FIELDS`, which are given by name, backend and context_parallel.

    Raises:
        ArgumentError, DtypeError: an argument of another type.
    """
    options["recurrent"] = recurrent
    values = [options.get(name, default) for name, _, default in OPTION_FIELDS]
    return _checked(tensors, (*values, backend, context_parallel), cp_context)


def _checked(tensors: tuple[Any, ...], rest: tuple[Any, ...], cp_context: Any = None) -> tuple[Any, ...]:
    """The arguments of the operators in `kda_core.ops` from those of `_run`, with their types checked: an operator's
    schema would refuse a wrong type too, but would not name the argument as the user knows it."""
    options, (backend, mode) = list(rest[:-2]), rest[-2:]  # a list also where torch.compile traces
    for name, x in zip(_TENSOR_NAMES, tensors):
        optional = name not in _TENSOR_NAMES[:_N_REQUIRED]
        if not isinstance(x, Tensor) and not (x is None and optional):
            raise DtypeError(name, "a torch.Tensor or None" if optional else "a torch.Tensor", describe(x))
        if x is not None:
            contract.check_layout(name, x)
            if x.requires_grad and torch.is_grad_enabled():
                # token by token there are no gradients; chunks compute the same
                options[_NEEDS_BACKWARD], options[_RECURRENT] = True, False
    if cp_context is not None:
        raise ArgumentError(
            "cp_context", "None (no installed planner serves FLA's contexts)", type(cp_context).__name__
        )
    backend, mode = choice_args(backend, mode)
    values = [_option(name, kind, x) for (name, kind, _), x in zip(OPTION_FIELDS, options)]
    return (*tensors, *values, backend, mode)


def choice_args(backend: Any, mode: Any) -> tuple[str | None, str]:
    """The arguments `backend` and `context_parallel` of a call as the operators take them.

    Raises:
        ArgumentError, DtypeError: an argument of another type, or an unknown mode.
    """
    if backend is not None and not isinstance(backend, str):
        raise DtypeError("backend", "the name of a backend or None", describe(backend))
    if not isinstance(mode, str):
        if not hasattr(mode, "to_json"):
            raise DtypeError("context_parallel", "'auto', 'off' or a plan", describe(mode))
        mode = _plan_text(mode)
    elif mode not in ("auto", "off"):
        raise ArgumentError("context_parallel", "'auto', 'off' or a plan", repr(mode))
    return backend, mode


def parsed_call(
    *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], KdaOptions, str | None, str, Tensor | None]:
    """What ``chunk_kda(*args, **kwargs)`` asks for, with the types checked: its tensors in the order of the operators'
    arguments, options, backend, mode of context parallelism and workspace.

    Raises:
        TypeError, ArgumentError, DtypeError: as `chunk_kda`.
    """
    signature = inspect.signature(chunk_kda)
    if unknown := {name: x for name, x in kwargs.items() if name not in signature.parameters}:
        raise _unknown_keyword(chunk_kda, unknown)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    a = dict(bound.arguments)
    a["state_v_first"] = _v_first(a["state_v_first"], a.pop("transpose_state_layout"))
    workspace = _written(a.pop("out"), a.pop("workspace"))[-1]
    tensors = tuple(a.pop(name) for name in _TENSOR_NAMES)
    *call, backend, mode = operator_args(*tensors, recurrent=False, **a)
    return tensors, KdaOptions(*call[_N_TENSORS:]), backend, mode, workspace


def _option(name: str, kind: str, value: Any) -> Any:
    """One option with its type checked; scalars of numpy become Python's. None stands for False, as FLA's callers use it
    (``use_cache=None``)."""
    if value is None and kind != "int":
        return False if kind == "bool" else None
    if kind == "bool":
        if isinstance(value, bool):
            return value
        if _is_numpy_bool(value):
            return bool(value)
        expected = "a bool"
    elif kind == "float | None":
        if isinstance(value, (int, float, numbers.Real)) and not isinstance(value, bool):
            try:
                return float(value) + 0.0  # -0.0 is 0.0, which caches cannot tell from it
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
    # a tensor would have to be read, for which the host waits
    hint = f"Pass {name}.item()" if getattr(value, "shape", None) == () else ""
    raise DtypeError(name, expected, describe(value), hint)


def _is_numpy_bool(value: Any) -> bool:
    """Told by its name, for core imports torch alone; numpy registers its other scalars with `numbers`."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def _plan_text(plan: Any) -> str:
    text = plan.to_json()
    if not isinstance(text, str):
        raise DtypeError("context_parallel", "a plan whose to_json() gives a str", describe(text))
    return text


def _v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    if transpose_state_layout is None:
        return state_v_first
    warnings.warn("transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=3)
    if state_v_first:
        raise ArgumentError("transpose_state_layout", "None with state_v_first (it is the old name)", "both")
    return transpose_state_layout


def _written(out: Any, workspace: Any) -> tuple[Tensor | None, ...]:
    """o, final_state, h and workspace as the caller gave them, with their types checked."""
    if workspace is not None and not isinstance(workspace, Tensor):
        raise DtypeError("workspace", "a torch.Tensor or None", describe(workspace))
    given = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if len(given) > 3 or not all(x is None or isinstance(x, Tensor) for x in given):
        raise DtypeError(
            "out", "a tensor, or a tuple of up to 3 tensors or None: (o, final_state, h)", describe(out)
        )
    written = (*(*given, None, None, None)[:3], workspace)
    for name, x in zip(("out[0] (o)", "out[1] (final_state)", "out[2] (h)", "workspace"), written):
        if x is not None:
            contract.check_layout(name, x)
    return written
