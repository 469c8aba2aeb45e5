"""FLA by one import: ``import kda_core.integrations.fla`` makes flash-linear-attention (FLA) 0.6 ask kda-core first.

The import registers `KdaCoreBackend` in both of FLA's registries, because FLA dispatches ``chunk_kda`` as a function, and of decoding the
inner ``fused_recurrent_kda_fwd``, under the operation "kda". Layers and models that call FLA then run on the backends of kda-core without
a change: FLA's ``KimiDeltaAttention``, and Hugging Face's Kimi Linear.

A call that kda-core cannot serve as FLA would goes on to FLA's own kernels. FLA logs the first reason of each function; the logger of
this module has all of them, each once, at level INFO. ``FLA_KDA_CORE=0`` turns this backend off, read at each call.

A call never loops. This backend refuses what the backend `fla` of kda-core would serve, because that one runs FLA's kernels. And the
backend `fla` calls FLA's functions below their dispatch (`kda_core.fla`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import kda_core
from kda_core import call as calls
from kda_core import install, pools
from kda_core.arguments import N_TENSORS, Arguments, checked
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape, intermediate_states_count
from kda_core.fla import SPEC, fla_function
from kda_core.pools import SlotArguments
from kda_core.recent import Recent
from kda_core.registry import Choice
from kda_core.validate import check_memory, check_outputs

try:
    from fla.backends import BaseBackend, register
    from fla.ops.kda import chunk_kda
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
except ImportError as error:
    raise ImportError(
        f"kda_core.integrations.fla needs fla-core 0.6, which cannot be imported ({error}); {install.command(install.FLA)}"
    ) from error

__all__ = ["KdaCoreBackend", "undispatched"]

_log = logging.getLogger(__name__)

_REASONS: Recent[str] = Recent(1024)
"""Why calls are refused, by the key of the call. Calls that are served are in the caches of kda-core."""
_logged: set[tuple[str, str]] = set()
_PROBE: Any = object()
"""Stands for q in the calls of `undispatched`."""

_PARAMETERS = inspect.signature(kda_core.chunk_kda)
_CONTEXT = list(_PARAMETERS.parameters).index("cp_context")


class KdaCoreBackend(BaseBackend):
    """The backend in FLA's registries. A verifier returns (True, None), or (False, reason). It launches nothing and never raises."""

    backend_type = "kda_core"
    env_var = "FLA_KDA_CORE"
    priority = 1  # before the other implementations for NVIDIA GPUs: FlashKDA has 3, TileLang 5

    def chunk_kda_verifier(self, q: Any, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """Returns whether `chunk_kda` serves a call of FLA's function with these arguments."""
        return (True, None) if q is _PROBE else _verdict("chunk_kda", _refused_chunk, q, *args, **kwargs)

    def chunk_kda(self, q: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes a call that the verifier has accepted."""
        if q is _PROBE:
            return _PROBE
        if kwargs.get("cp_context") is None and (len(args) < _CONTEXT or args[_CONTEXT - 1] is None):
            return kda_core.chunk_kda(q, *args, **kwargs)
        from kda_cp import fla_context

        return fla_context.chunk_kda(**_PARAMETERS.bind(q, *args, **kwargs).arguments)

    def fused_recurrent_kda_fwd_verifier(self, q: Any, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """Returns whether `fused_recurrent_kda_fwd` serves a call of FLA's function with these arguments."""
        if q is _PROBE:
            return True, None
        return _verdict("fused_recurrent_kda_fwd", _refused_recurrent, q, *args, **kwargs)

    def fused_recurrent_kda_fwd(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        A_log: Any = None,
        dt_bias: Any = None,
        initial_state: Any = None,
        scale: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Computes a call that the verifier has accepted. The order of arguments is not that of the public functions."""
        if q is _PROBE:
            return _PROBE
        given = dict(zip(_RECURRENT_NAMES, args)) | kwargs
        # FLA's default is True; without slots it is False here, see `_refused_recurrent`
        given["inplace_final_state"] = True if given.get("ssm_state_indices") is not None else None
        return kda_core.fused_recurrent_kda(q, k, v, g, beta, A_log, dt_bias, scale, initial_state, **given)


# ---- reasons


def _verdict(name: str, refused: Any, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    """Returns the result of a verifier; `refused` returns a reason or None."""
    try:
        reason = refused(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it is, FLA can still serve the call
        reason = f"{type(error).__name__}: {error}"
    if reason is None:
        return True, None
    if (name, reason) not in _logged and len(_logged) < 1024:
        _logged.add((name, reason))
        _log.info("%s runs on FLA's kernels: %s", name, reason)
    return False, reason


def _refused_chunk(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: Any = False,
    use_qk_l2norm_in_kernel: Any = False,
    use_gate_in_kernel: Any = False,
    use_beta_sigmoid_in_kernel: Any = False,
    allow_neg_eigval: Any = False,
    safe_gate: Any = False,
    lower_bound: Any = None,
    disable_recompute: Any = False,
    return_intermediate_states: Any = False,
    state_v_first: Any = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
    use_graph: Any = False,
    max_num_seqs: Any = None,
    *,
    A_log: Any = None,
    dt_bias: Any = None,
    chunk_size: Any = 64,
    transpose_state_layout: Any = None,
    **unknown: Any,
) -> str | None:
    """Returns why a call of FLA's ``chunk_kda`` is not served, or None."""
    if unknown:
        return _unknown(unknown)
    if transpose_state_layout is not None:
        if state_v_first:
            return "transpose_state_layout is the old name of state_v_first, and both are given"
        state_v_first = transpose_state_layout
    if return_intermediate_states and q.dtype != torch.bfloat16:
        return f"the intermediate states of kda-core are bf16, those of FLA have k's dtype, {q.dtype}"
    args = Arguments(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, scale, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound,
        disable_recompute, return_intermediate_states, state_v_first, use_graph, max_num_seqs, chunk_size,
    )  # fmt: skip
    return _refused(args) if cp_context is None else _refused_in_context(cp_context, args)


def _refused_recurrent(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    initial_state: Any = None,
    scale: Any = None,
    output_final_state: Any = False,
    inplace_final_state: Any = True,
    state_v_first: Any = False,
    cu_seqlens: Any = None,
    ssm_state_indices: Any = None,
    num_accepted_tokens: Any = None,
    use_qk_l2norm_in_kernel: Any = False,
    use_gate_in_kernel: Any = False,
    use_beta_sigmoid_in_kernel: Any = False,
    allow_neg_eigval: Any = False,
    lower_bound: Any = None,
    out: Any = None,
    **unknown: Any,
) -> str | None:
    """Returns why a call of FLA's ``fused_recurrent_kda_fwd`` is not served, or None."""
    if unknown:
        return _unknown(unknown)
    args = Arguments(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, None, scale, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, False, lower_bound,
        False, False, state_v_first, recurrent=True, context_parallel="off",
    )  # fmt: skip
    if ssm_state_indices is None:
        if inplace_final_state:
            return "inplace_final_state without ssm_state_indices"
        if num_accepted_tokens is not None:
            return "num_accepted_tokens without ssm_state_indices"
        return _refused(args, out)
    if not inplace_final_state:
        return "ssm_state_indices without inplace_final_state: FLA then returns a state for every token"
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if ssm_state_indices.dim() == 1 and q.shape[0] * q.shape[1] > sequences:
        return (
            "ssm_state_indices [N] with more than one token: FLA then writes to the slots of other sequences"
        )
    pools.refuse_gradients(args)
    slots = SlotArguments(ssm_state_indices, num_accepted_tokens=num_accepted_tokens, writes=True)
    args = args._replace(output_final_state=False)
    key, call = pools.look_up(args, slots)
    if call is None:
        if key is not None and (reason := _REASONS.get(key)) is not None:
            return reason
        try:
            call = pools.resolve(checked(args), pools.checked_slots(slots), key)
        except Exception as error:  # noqa: BLE001 - it becomes the reason
            return _keep(key, error)
    return _of_fla(call.call.choice) or _invalid_contents(args, call.shape, out)


_RECURRENT_NAMES = tuple(inspect.signature(_refused_recurrent).parameters)[9:-1]
"""The arguments of FLA's ``fused_recurrent_kda_fwd`` after `scale`, in its order."""


def _refused(args: Arguments, out: Tensor | None = None, needs: frozenset[str] = frozenset()) -> str | None:
    """Returns why a call without a pool is not served, or None. The answer about metadata is that of the caches of kda-core, so a
    repeated call costs a look-up here, too.

    Args:
        needs: features that the backends of forward and backward must declare besides those of the call.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args[:N_TENSORS]):  # type: ignore[union-attr]
        if out is not None:
            return "out with inputs that require grad"
        args = checked(args)
    key, call = calls.look_up(args)
    if call is None:
        if key is not None and (reason := _REASONS.get(key)) is not None:
            return reason
        try:
            call = calls.resolve(checked(args), key)
        except Exception as error:  # noqa: BLE001 - it becomes the reason
            return _keep(key, error)
    for choice in (call.choice, call.backward):
        if choice is not None and (reason := _of_fla(choice) or _lacks(choice, needs)) is not None:
            return reason
    return _invalid_contents(args, call.shape, out)


def _refused_in_context(context: Any, args: Arguments) -> str | None:
    """Returns why a call with FLA's context of context parallelism is not served, or None.

    The answer must be the same on all ranks, because they exchange data with kda-cp or with FLA's code.
    """
    if not _has_kda_cp():
        return f"cp_context needs kda-cp: {install.command('kda-cp')}"
    from kda_cp import fla_context

    if args.return_intermediate_states or args.use_graph:
        return "cp_context with return_intermediate_states or use_graph"
    if args.initial_state is not None or args.output_final_state:
        return "cp_context with initial_state or output_final_state, which FLA refuses"
    if (reason := fla_context.refusal(context)) is not None:
        return reason
    # a call that resembles those of a rank: it starts from states that others compute, and returns states
    own = {"cu_seqlens": context.cu_seqlens, "cu_seqlens_cpu": context.cu_seqlens_cpu}
    args = args._replace(**own, output_final_state=True, context_parallel="off")
    return _refused(args, needs=frozenset({"initial_state"}))


@functools.cache
def _has_kda_cp() -> bool:
    return find_spec("kda_cp") is not None


def _unknown(unknown: dict[str, Any]) -> str:
    return f"the keyword {', '.join(map(repr, unknown))}, which kda-core does not know"


def _keep(key: Any, error: Exception) -> str:
    """Returns the reason of an error, and keeps it for the next call with this key."""
    reason = f"{type(error).__name__}: {error}"
    if key is not None:
        _REASONS.put(key, reason)
    return reason


def _of_fla(choice: Choice) -> str | None:
    if choice.spec.name == SPEC.name:
        return f"the backend {SPEC.name!r} of kda-core would serve it, with FLA's own kernels"
    return None


def _lacks(choice: Choice, needs: frozenset[str]) -> str | None:
    missing = sorted(needs - choice.spec.features)
    return f"the backend {choice.spec.name!r} has no {', '.join(missing)}" if missing else None


def _invalid_contents(args: Arguments, shape: ProblemShape, out: Tensor | None) -> str | None:
    """Returns why something is refused that the key of a call does not show: offsets in host memory, or the tensor for o.

    Raises:
        KdaError: the error that the call would raise.
    """
    offsets, states = args.cu_seqlens, args.return_intermediate_states
    if offsets is not None and (offsets.device.type == "cpu" or args.cu_seqlens_cpu is not None or states):
        inputs = KdaInputs(*args.tensors, shape)  # type: ignore[arg-type, call-arg]
        inputs.sequence_lengths()
        if states:
            intermediate_states_count(inputs)
    if out is not None:
        without_state = replace(shape, options=replace(shape.options, output_final_state=False))
        inputs = KdaInputs(*args.tensors, without_state)  # type: ignore[arg-type, call-arg]
        outputs = KdaOutputs(out, None, None, None)
        check_outputs(inputs, outputs)
        check_memory(inputs, outputs)
    return None


# ---- registration


def undispatched() -> tuple[str, ...]:
    """Returns the names of FLA's functions that do not ask kda-core, now. They are called with objects in place of tensors, which no
    kernel gets. Both names come back under ``FLA_KDA_CORE=0``, too."""
    found = []
    for function in (chunk_kda, fused_recurrent_kda_fwd):
        try:
            answer = function(*[_PROBE] * 5)
        except Exception:  # noqa: BLE001 - FLA's own code cannot use the objects
            answer = None
        if answer is not _PROBE:
            found.append(function.__name__)
    return tuple(found)


def _register() -> None:
    """Registers the backend, and warns if FLA does not ask it.

    Raises:
        ImportError: FLA is older than 0.6.
    """
    fla_function("fla.ops.kda.chunk", "chunk_kda", "use_graph", "use_beta_sigmoid_in_kernel")
    for entry_point in (chunk_kda, "kda"):
        register(entry_point)(KdaCoreBackend)
    if KdaCoreBackend().is_enabled() and (names := undispatched()):
        cause = "another implementation takes every call first"
        if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
            cause = "FLA_DISABLE_BACKEND_DISPATCH=1"
        _log.warning("FLA does not ask kda-core for %s: %s", " and ".join(names), cause)


_register()
