"""The user's functions: FLA's arguments in, one operator call out."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_core import contract, flops, ops
from kda_core.contract import OPTION_FIELDS, KdaOptions, ProblemShape, describe
from kda_core.errors import ArgumentError, DtypeError, KdaError, PlannerError
from kda_core.registry import REGISTRY, Choice, Refusal

_N_TENSORS = 10


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
        safe_gate: the caller's promise that every decay g lies in [-5, 0]. With `use_gate_in_kernel` it requires
            `lower_bound` in [-5, 0), which makes it true.
        lower_bound: a number below 0, see `use_gate_in_kernel`.
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
        use_graph: the contents of `cu_seqlens` may change between CUDA-graph replays: nothing is derived from host
            copies, and ``cu_seqlens[-1]`` may be below T (rows of no sequence are not written).
        max_num_seqs: with `use_graph`, the number of sequences N to which cu_seqlens is padded by empty ones.
        A_log: [HV] fp32, with `use_gate_in_kernel`.
        dt_bias: [HV*K] or [HV, K] fp32, with `use_gate_in_kernel`.
        chunk_size: 64 or 32, the spacing of `h`; not the chunk that a kernel computes in.
        transpose_state_layout: deprecated name of `state_v_first`.
        backend: name of the backend that must serve the call; there is no fallback. None: `use_backend`, then
            ``KDA_BACKEND``, then the best eligible one.
        context_parallel: "auto" (a planner may split long sequences), "off", or a plan made by a planner.
        out: tensors to write: o, or (o, final_state) or (o, final_state, h) with None where not asked for; contiguous,
            not overlapping the inputs. Not differentiable.
        workspace: 1-D uint8 scratch memory of at least ``explain(...).workspace_bytes``.
        pin: fix kernel, chunk and plan, so that outputs depend on their own sequence up to their own token alone, bit
            for bit, whatever else the batch holds and whatever follows.

    Returns:
        o [B, T, HV, V] in q's dtype; the final states, fp32, shaped as `initial_state`, or None; and with
        `return_intermediate_states` h [B, NT, HV, K, V] (or [B, NT, HV, V, K]), bf16, NT = ceil(T / chunk_size), packed
        the total over sequences.

    Raises:
        TypeError: an unknown keyword.
        ArgumentError, ShapeError, DtypeError, DeviceError, StrideError: bad input (ValueErrors; DtypeError also is a
            TypeError). Each names the argument, what was expected and what came.
        BackendError: nobody serves the call, or the named backend does not; the message says who refused and why.
    """
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
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token (decoding), with the arguments of FLA's ``fused_recurrent_kda``.

    The formula, the arguments and the errors are those of `chunk_kda`; forward only.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. g: [B, T, HV, K]. beta: [B, T, HV]. A_log: [HV]. dt_bias: [HV*K] or
            [HV, K]. initial_state: [N, HV, K, V] or [N, HV, V, K]. cu_seqlens: [N+1].

    Returns:
        o [B, T, HV, V] in q's dtype; the final states or None.

    Raises:
        ArgumentError: also where an input requires grad.
    """
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


# ---- what is known, and what would run


class BackendTable(tuple):  # of BackendInfo
    """The backends that are known, each a `BackendInfo`; prints as a table."""

    def __str__(self) -> str:
        rows = [
            (
                i.name,
                i.status,
                f"{i.distribution} {i.version}".strip(),
                "; ".join(filter(None, (i.reason, i.note))),
            )
            for i in self
        ]
        return _table(("backend", "status", "distribution", "reason, note"), rows)


@dataclass(frozen=True)
class Explanation:
    """What a call would do, found without running it; prints as text.

    Attributes:
        shape: what the metadata of the call says.
        backend: name of the backend that would serve it, or None.
        rule: what decided: "backend=", "use_backend", "KDA_BACKEND" or "automatic".
        refusals: who would not serve it, and why.
        workspace_bytes: scratch memory of the call.
        plan: how a planner would split it, and why; "direct" for one call of the backend.
        error: the message of the exception that the call would raise, or None.
    """

    shape: ProblemShape
    backend: str | None
    rule: str
    refusals: tuple[Refusal, ...]
    workspace_bytes: int
    plan: str
    error: str | None

    def __str__(self) -> str:
        s = self.shape
        where = s.device_type if s.arch is None else f"{s.device_type} sm_{s.arch[0]}{s.arch[1]}"
        lines = [
            f"call      B={s.B} T={s.T} H={s.H} HV={s.HV} K={s.K} V={s.V} N={s.N} {str(s.dtype)[6:]} on {where}",
            f"needs     {', '.join(sorted(f.value for f in s.features)) or 'nothing special'}",
            f"backend   {self.backend or 'none'} (choice: {self.rule})",
            f"plan      {self.plan}",
            f"workspace {self.workspace_bytes} bytes",
        ]
        if self.error is not None:  # it holds the refusals
            return "\n".join([*lines, f"error     {self.error}"])
        return "\n".join([*lines, *(f"refused   {r.name}: {r.reason}" for r in self.refusals)])


def backends(refresh: bool = False) -> BackendTable:
    """Every known backend with its status: ok, not-installed, broken, abi-mismatch, wrong-arch, or unsupported.

    Args:
        refresh: read the installed packages again, and forget failures.
    """
    if refresh:
        REGISTRY.refresh()
    return BackendTable(REGISTRY.info())


def explain(*args: Any, **kwargs: Any) -> Explanation:
    """Which backend would serve ``chunk_kda(*args, **kwargs)``, who refused and why, and what plan it would have.

    Nothing is launched. Instead of a call's arguments one `ProblemShape` may be given, with `backend` alone.

    Raises:
        ArgumentError, ShapeError, DtypeError, DeviceError: as `chunk_kda`.
    """
    if len(args) == 1 and isinstance(args[0], ProblemShape):
        return _explain(args[0], kwargs.get("backend"), None, "off")
    bound = inspect.signature(chunk_kda).bind(*args, **kwargs)
    bound.apply_defaults()
    a = dict(bound.arguments)
    a["state_v_first"] = _v_first(a["state_v_first"], a.pop("transpose_state_layout"))
    del a["out"], a["workspace"]
    tensors = [a.pop(name) for name in _TENSOR_NAMES]
    *call, named, mode = operator_args(*tensors, recurrent=False, **a)
    shape = contract.problem_shape(*tensors, options=KdaOptions(*call[_N_TENSORS:]))
    inputs = contract.make_inputs(tensors, shape, align=False)
    inputs.sequence_lengths()
    return _explain(shape, named, inputs, mode)


def _explain(
    shape: ProblemShape, backend: str | None, inputs: contract.KdaInputs | None, mode: str
) -> Explanation:
    choice: Choice | None = None
    error = None
    try:
        choice = REGISTRY.resolve(shape, backend)
    except KdaError as e:  # the answer to "what would happen" is the exception's message
        error = f"{type(e).__name__}: {e}"
    refusals = REGISTRY.refusals(shape, backend)
    if choice is None:
        return Explanation(shape, None, "backend=" if backend else "automatic", refusals, 0, "none", error)
    call = ops.make_plan(shape, choice, "off")  # the workspace does not depend on the mode
    shown = "direct"
    if inputs is not None:
        try:
            shown = _explain_plan(ops.make_plan(shape, choice, mode), inputs)
        except PlannerError as e:
            shown, error = "none", f"{type(e).__name__}: {e}"
    return Explanation(shape, choice.spec.name, choice.rule, refusals, call.workspace_bytes, shown, error)


def _explain_plan(call: ops.CallPlan, inputs: contract.KdaInputs) -> str:
    """What a planner decides for a call, in its own words where it has them."""
    if call.planner is None:
        return "direct"
    name, planner = call.planner
    plan = ops.ask_planner(call, inputs, inputs.sequence_lengths())
    words = getattr(planner, "explain", None)  # optional: kda_core.backend.SupportsExplanation
    if words is not None:
        said = words(plan, inputs, call.choice.spec, call.choice.backend)
        return f"direct ({name}: {said})" if plan is None else f"{name}: {said}"
    return "direct" if plan is None else f"{name}: {plan}"


# ---- helpers


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
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            if options[_RECURRENT]:
                raise ArgumentError(
                    name, "no grad (fused_recurrent_kda is forward only; use chunk_kda)", "requires_grad=True"
                )
            options[_NEEDS_BACKWARD] = True
    if cp_context is not None:
        raise ArgumentError(
            "cp_context", "None (no installed planner serves FLA's contexts)", type(cp_context).__name__
        )
    if backend is not None and not isinstance(backend, str):
        raise DtypeError("backend", "the name of a backend or None", describe(backend))
    if not isinstance(mode, str):
        if not hasattr(mode, "to_json"):
            raise DtypeError("context_parallel", "'auto', 'off' or a plan", describe(mode))
        mode = mode.to_json()
    elif mode not in ("auto", "off"):
        raise ArgumentError("context_parallel", "'auto', 'off' or a plan", repr(mode))
    values = [_option(name, kind, x) for (name, kind, _), x in zip(OPTION_FIELDS, options)]
    return (*tensors, *values, backend, mode)


def _option(name: str, kind: str, value: Any) -> Any:
    """One option with its type checked. None stands for False, as FLA's callers use it (``use_cache=None``)."""
    if kind == "bool":
        if value is None:
            return False
        if not isinstance(value, bool):
            raise DtypeError(name, "a bool", describe(value))
    elif kind == "float | None":
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise DtypeError(name, "a number or None", describe(value))
        return None if value is None else float(value) + 0.0  # -0.0 is 0.0, which caches cannot tell from it
    elif not (value is None and kind == "int | None") and (
        isinstance(value, bool) or not isinstance(value, int)
    ):
        raise DtypeError(name, "an int", describe(value))
    return value


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
    given = (out,) if isinstance(out, Tensor) or out is None else tuple(out)
    if len(given) > 3 or not all(x is None or isinstance(x, Tensor) for x in given):
        raise DtypeError(
            "out", "a tensor, or a tuple of up to 3 tensors or None: (o, final_state, h)", describe(out)
        )
    return (*(*given, None, None, None)[:3], workspace)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths)).rstrip() for r in [head, *rows])
