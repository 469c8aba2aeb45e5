"""The public functions `chunk_kda` and `fused_recurrent_kda`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from torch import Tensor

from kda_core import known
from kda_core.arguments import given_outputs, unknown_keyword
from kda_core.errors import ArgumentError
from kda_core.ops import run, run_pooled
from kda_core.pools import SlotArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Function = TypeVar("_Function", bound=Callable[..., Any])
_new = tuple.__new__


class _NoKeywords(TypedDict):
    """Further keywords that type checkers accept: none."""


def _names_its_keywords(function: _Function) -> _Function:
    """Hides the parameter `unknown` from ``help`` and ``inspect.signature``. It exists only for a better error message."""
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
    ssm_state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    first_slot: int = 0,
    checkpoint_pool: Tensor | None = None,
    checkpoint_cu: Tensor | None = None,
    checkpoint_positions: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
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

    The same call returns the same bits on every run. Inputs that are not contiguous are copied. If a backend has a backward for the call,
    every floating-point input has a gradient; otherwise inputs that require grad raise an error. Forward and backward may run on two
    backends. Forward-mode AD and second derivatives raise a `DerivativeError`.

    Args:
        q, k: [B, T, H, K], bf16, fp16, fp32 or fp64 (a backend may take fewer). Query/key head of value head i:
            ``i // (HV // H)``.
        v: [B, T, HV, V], q's dtype; HV a multiple of H.
        g: [B, T, HV, K], fp32, bf16 or q's dtype: natural log of the decay, at most 0; with `use_gate_in_kernel` the input of
            the gate.
        beta: [B, T, HV], fp32, bf16 or q's dtype, in [0, 1] (or its logits with `use_beta_sigmoid_in_kernel`).
        scale: factor of the output, ``K**-0.5`` by default.
        initial_state: [N, HV, K, V] fp32 (fp64 for fp64 inputs), or [N, HV, V, K] with `state_v_first`. N is B, or
            ``len(cu_seqlens) - 1``. None gives the same bits as zeros. With `ssm_state_indices` a pool [slots, HV, K, V] or
            [slots, HV, V, K], fp32 or bf16, whose slots the call reads and writes in place. A slot is contiguous; the distance
            between slots is any multiple of 16 bytes. bf16 states are converted to fp32 when read, and rounded once, when written.
        output_final_state: return the state after the last token of each sequence; for a sequence of length zero its initial
            state. With a pool: write the final states to their slots, and return the pool itself; False only reads the pool.
        use_qk_l2norm_in_kernel: q and k are divided by ``sqrt(sum(x**2) + 1e-6)`` over K.
        use_gate_in_kernel: with `lower_bound`, the decay is ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``
            (factor 1 without A_log); without it, ``-exp(A_log) * softplus(g + dt_bias)``.
        use_beta_sigmoid_in_kernel: beta is ``sigmoid(beta)``.
        allow_neg_eigval: beta is ``2 * sigmoid(beta)``; needs `use_beta_sigmoid_in_kernel`.
        safe_gate: the caller's promise that every precomputed g lies in [-5, 0]. If g breaks it, outputs may be NaN, which
            ``KDA_CHECK=1`` detects. With `use_gate_in_kernel` it requires `lower_bound` in [-5, 0), which guarantees it.
        lower_bound: a number below 0, see `use_gate_in_kernel`. With a precomputed g it needs `safe_gate` and is part of that
            promise: every g lies in [lower_bound, 0]. A value below -5 is too weak a promise and has no effect.
        disable_recompute: keep more memory for the backward, so that it computes less. A bf16 or fp16 call then keeps the state before
            every 64 tokens instead of every 512, and the residual of every token; `explain(...).saved_bytes` is the memory. Backends
            without this mode recompute. It changes no bit of the outputs.
        return_intermediate_states: also return h, the states at the start of every chunk of `chunk_size` tokens; not
            differentiable. A packed call needs `cu_seqlens_cpu` (or CPU cu_seqlens, or `use_graph`), because the shape of h
            contains the number of chunks.
        state_v_first: states are [V, K] instead of [K, V].
        cu_seqlens: [N+1] int32 or int64 on q's device, cumulative lengths of the sequences packed along T (B = 1).
            Values are read on the device, which clamps them to [0, T].
        cu_seqlens_cpu: the same values in host memory. They are checked, and allow a planner and the backend to choose by the
            lengths without synchronisation. With `pin` that changes no bit.
        cp_context: FLA's context-parallel context. Anything but None raises an error. FLA's function serves it with kda-cp after
            ``import kda_core.integrations.fla``.
        use_graph: the contents of `cu_seqlens`, which it requires, may change between CUDA-graph replays. Nothing is derived
            from host copies, and ``cu_seqlens[-1]`` may be below T (tokens after it are not written).
        max_num_seqs: with `use_graph`, the number of sequences N to which cu_seqlens is padded by empty ones.
        A_log: [HV], or HV elements in another shape ([1, 1, HV, 1]); fp32, bf16 or fp16, converted to fp32; requires
            `use_gate_in_kernel`. Its gradient has its shape and dtype.
        dt_bias: [HV*K] or [HV, K], as A_log.
        ssm_state_indices: [N] int32 or int64, on q's device as all slots: the slot of the pool from which each sequence starts. Several
            sequences may read one slot. No input may require grad.
        final_state_indices: [N], dtype of `ssm_state_indices`: the slot of the final state. None: `ssm_state_indices`. If a slot
            is written twice, or written by one sequence and read by another, the numbers are undefined;
            ``KDA_CHECK_SLOTS=1`` detects that.
        has_initial_state: [N] bool. False starts the sequence from zeros and ignores its slot. None: all True.
        first_slot: the first slot that holds states. With an index below it or beyond the pool, nothing is read, or the final
            state is dropped. A sequence with neither a read slot nor a write slot is skipped: its o is zeros, and nothing else of
            it is read or written. With 0, negative indices are padding; with 1, slot 0 is too.
        checkpoint_pool: [slots, HV, K, V] or [slots, HV, V, K], as `initial_state`: the pool that gets the checkpoints.
            None: the pool of the states.
        checkpoint_cu: [N+1] int32: sequence n has the checkpoints ``checkpoint_cu[n]`` to ``checkpoint_cu[n+1] - 1``.
        checkpoint_positions: [C] int32, ascending multiples of 64 for each sequence. The state after that many of its tokens in
            this call is stored, rounded once. Other positions, and positions beyond the sequence, are ignored.
        checkpoint_indices: [C], dtype of `ssm_state_indices`: the slot of each checkpoint.
        chunk_size: 64 or 32, the spacing of h. Kernels choose their own chunk.
        transpose_state_layout: deprecated name of `state_v_first`.
        backend: name of the backend that must serve the call, forward and backward, without fallback. None: the one of
            `use_backend`, then of ``KDA_BACKEND``, then the best eligible one for each direction.
        context_parallel: "auto" (a planner may split long sequences), "off", or a plan of a planner.
        out: tensors to write: o, (o, final_state) or (o, final_state, h), with None for outputs that the call does not ask for;
            contiguous, not overlapping the inputs. Not differentiable.
        workspace: 1-D uint8 scratch memory of at least ``explain(...).workspace_bytes``. If it is too small for a planner's automatic
            plan, the call runs without a plan. If it is too small for that too, or `context_parallel` is a plan, the call raises an
            error. Calls that may overlap, on several streams or threads, must not share one.
        pin: fix kernel, chunk and plan, so that the bits of an output depend only on its own sequence up to its own token, not on
            the rest of the batch or on later tokens.

    Returns:
        o [B, T, HV, V] in q's dtype; the final states, fp32, shaped as `initial_state` (with `ssm_state_indices` the pool), or
        None; and with `return_intermediate_states` h [B, NT, HV, K, V] (or [B, NT, HV, V, K]), bf16. NT is ceil(T / chunk_size); for a packed
        call, the sum over sequences.

    Raises:
        UnknownArgumentError: an unknown keyword (a TypeError).
        ArgumentError, ShapeError, DtypeError, DeviceError, StrideError: invalid input (ValueErrors; DtypeError also is a
            TypeError). The message names the argument, what was expected and what came.
        BackendError: no backend serves the call, or the named one does not; the message gives the reasons.
    """
    if unknown:
        raise unknown_keyword(chunk_kda, unknown, chunk_kda)
    if transpose_state_layout is not None:
        state_v_first = renamed_layout(state_v_first, transpose_state_layout)
    if cp_context is not None:
        raise cp_context_error(cp_context)
    in_slots = (
        ssm_state_indices is not None or final_state_indices is not None or has_initial_state is not None
        or first_slot != 0 or checkpoint_pool is not None or checkpoint_cu is not None
        or checkpoint_positions is not None or checkpoint_indices is not None
    )  # fmt: skip
    wants_state = output_final_state
    if in_slots:
        output_final_state = False  # the states go to the pool
    # Not `Arguments(...)`: 29 keywords would take 2 us. A test compares the order with the fields.
    tensors = q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu
    values = (
        scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, safe_gate, lower_bound, disable_recompute, return_intermediate_states, state_v_first,
        use_graph, max_num_seqs, chunk_size, pin, False, False, backend, context_parallel,
    )  # fmt: skip
    given = None if out is None and workspace is None else given_outputs(out, workspace)
    if in_slots:
        slots = _new(SlotArguments, (
            ssm_state_indices, final_state_indices, has_initial_state, None, checkpoint_pool, checkpoint_cu,
            checkpoint_positions, checkpoint_indices, first_slot, bool(wants_state),
        ))  # fmt: skip
        o, _, h = known.run(tensors, values, slots, given) or run_pooled(tensors, values, slots, given)
        state = initial_state
    else:
        o, state, h = known.run(tensors, values, None, given) or run(tensors, values, given)
    final = state if wants_state else None
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
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    inplace_final_state: bool | None = None,
    final_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    first_slot: int = 0,
    out: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
    **unknown: Unpack[_NoKeywords],
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token (decoding), with the arguments of FLA's ``fused_recurrent_kda``.

    The formula, the arguments and the errors are those of `chunk_kda`. If an input requires grad and grad mode is on, the call
    becomes one of `chunk_kda`, so that it has gradients; it then needs a backend with a backward.

    q, k, v, g and beta may be views with any stride of B and T, such as parts of a projection. A backend that declares the feature
    ``strided`` reads them in place; for other backends they are copied.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. g: [B, T, HV, K]. beta: [B, T, HV]. A_log: [HV]. dt_bias: [HV*K] or
            [HV, K]. initial_state: [N, HV, K, V] or [N, HV, V, K], or a pool. cu_seqlens: [N+1]; without gradients its last value
            may be below T, and o is zero after it.
        ssm_state_indices: [N], as in `chunk_kda`, for any T. Or [N, W], W at least the tokens of a sequence: then the state after
            token t goes to slot ``ssm_state_indices[n, t]``, as in FLA.
        num_accepted_tokens: [N] int32, with [N, W] slots: a sequence starts from slot
            ``ssm_state_indices[n, num_accepted_tokens[n] - 1]``, with the number clamped to [1, W]. None: all 1.
        inplace_final_state: for a call with a pool. True writes the states to their slots, also without `output_final_state`. False
            only reads the pool; with `output_final_state` the call then returns the final states [N, ..] as a new tensor. None:
            the value of `output_final_state`.
        final_state_indices, has_initial_state, first_slot: as in `chunk_kda`.
        out: o to write, as in `chunk_kda`.

    Returns:
        o [B, T, HV, V] in q's dtype; the final states (the pool, if they were written to it) or None.
    """
    if unknown:
        raise unknown_keyword(fused_recurrent_kda, unknown, chunk_kda)
    if transpose_state_layout is not None:
        state_v_first = renamed_layout(state_v_first, transpose_state_layout)
    in_slots = (
        ssm_state_indices is not None or num_accepted_tokens is not None or inplace_final_state is not None
        or final_state_indices is not None or has_initial_state is not None or first_slot != 0
    )  # fmt: skip
    writes = in_slots and bool(output_final_state if inplace_final_state is None else inplace_final_state)
    if writes:
        output_final_state = False  # the states go to the pool
    tensors = q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, None
    values = (
        scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, False, lower_bound, False, False, state_v_first, False, None, 64, False, False, True, backend,
        "off",
    )  # fmt: skip
    given = None if out is None else given_outputs(out, None)
    if in_slots:
        slots = _new(SlotArguments, (
            ssm_state_indices, final_state_indices, has_initial_state, num_accepted_tokens, None, None, None, None,
            first_slot, writes,
        ))  # fmt: skip
        if ssm_state_indices is None and inplace_final_state is not None:
            expected = "None unless ssm_state_indices is given"
            raise ArgumentError("inplace_final_state", expected, repr(inplace_final_state))
        o, state, _ = known.run(tensors, values, slots, given) or run_pooled(tensors, values, slots, given)
        if writes:
            return o, initial_state
    else:
        o, state, _ = known.run(tensors, values, None, given) or run(tensors, values, given)
    return o, state if output_final_state else None


def cp_context_error(cp_context: object) -> ArgumentError:
    """Returns the error for FLA's context-parallel context, which only FLA's function serves."""
    came = type(cp_context).__name__
    return ArgumentError(
        "cp_context",
        "None (FLA's chunk_kda serves its contexts, after import kda_core.integrations.fla)",
        came,
    )


def renamed_layout(state_v_first: bool, transpose_state_layout: bool) -> bool:
    """Returns `state_v_first` from its deprecated name, with a warning."""
    warnings.warn("transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=3)
    if state_v_first:
        expected = "None with state_v_first (transpose_state_layout is its old name)"
        raise ArgumentError("transpose_state_layout", expected, "both")
    return transpose_state_layout
