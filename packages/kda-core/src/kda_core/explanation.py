"""`backends` lists what is installed, `explain` says what a call would do. Neither launches, copies or allocates tensors of a
call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kda_core import call as calls
from kda_core import journal, pools
from kda_core.api import chunk_kda
from kda_core.arguments import Arguments, check_outputs_dense, checked_choice, given_outputs
from kda_core.binding import parsed
from kda_core.contract import KdaInputs, ProblemShape, Tensors, intermediate_states_count
from kda_core.errors import ArgumentError, KdaError, ShapeError
from kda_core.journal import JournalArguments
from kda_core.pools import SlotArguments
from kda_core.registry import REGISTRY, Choice, Refusal, show_archs
from kda_core.torch_private import FakeTensor

NO_LENGTHS = "unknown: it depends on the lengths of the packed sequences, which are not given"
NO_CONTENTS = "none: no backend runs on tensors of the meta device"


class BackendTable(tuple):  # of BackendInfo
    """The known backends, each a `BackendInfo`; prints as a table."""

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
    """What a call would do; prints as text.

    Attributes:
        shape: the metadata of the call.
        backend: name of the backend that would serve it (its forward, if inputs require grad), or None.
        rule: what chose the backend: "backend=", "use_backend", "KDA_BACKEND" or "automatic".
        refusals: the backends that would not serve the call, with their reasons. One that would serve only the forward of a call
            whose inputs require grad is listed with what it lacks for the backward.
        workspace_bytes: scratch memory in bytes that the call with its plan allocates, and that `workspace` must have. If the
            plan is unknown, that of a direct call; 0 if the call would fail.
        plan: how a planner would split the call, and why. Begins with "direct" for one call of the backend, with "none" if
            nothing would run, and with "unknown" if the plan depends on lengths that were not given.
        error: the message of the exception that the call would raise, or None. `out`, values of tensors on a device and the
            compilation of kernels are not checked.
        backward: name of the backend that would serve the backward. None if no input requires grad, or if no backend does.
        saved_bytes: what the forward keeps for the backward besides its inputs, in bytes; 0 if the backward recomputes it.
        pool: who reads and writes the pool of the call: "the backend", also in segments if `plan` splits the call, or "copies by
            kda-core". None without a pool, and if the call would fail.
        backward_plan: how a planner would split the backward, in the format of `plan`. None if `backward` is None.
    """

    shape: ProblemShape
    backend: str | None
    rule: str
    refusals: tuple[Refusal, ...]
    workspace_bytes: int
    plan: str
    error: str | None
    backward: str | None = None
    saved_bytes: int = 0
    pool: str | None = None
    backward_plan: str | None = None

    def __str__(self) -> str:
        s = self.shape
        where = s.device_type if s.arch is None else f"{s.device_type} {show_archs([s.arch])}"
        lines = [
            f"call      B={s.B} T={s.T} H={s.H} HV={s.HV} K={s.K} V={s.V} N={s.N} {str(s.dtype)[6:]} on {where}",
            f"needs     {', '.join(sorted(f.value for f in s.features)) or 'nothing special'}",
            f"backend   {self.backend or 'none'} (choice: {self.rule})",
            f"plan      {self.plan}",
            f"workspace {self.workspace_bytes} bytes",
        ]
        if self.backward is not None:
            of_backward = "" if self.backward_plan is None else f", plan {self.backward_plan}"
            lines.insert(3, f"backward  {self.backward}, saved {self.saved_bytes} bytes{of_backward}")
        if self.pool is not None:
            lines.append(f"pool      {self.pool}")
        if self.error is not None:  # it contains the refusals
            return "\n".join([*lines, f"error     {self.error}"])
        for r in self.refusals:
            of = ", the backward" if r.name == self.backend else ""
            lines.append(f"refused   {r.name}{of}: {r.reason}")
        return "\n".join(lines)


def backends(refresh: bool = False) -> BackendTable:
    """Returns every known backend with its status: ok, not-installed, broken, abi-mismatch, wrong-arch, or unsupported.

    Args:
        refresh: read the installed packages again, and forget failures.
    """
    if refresh:
        REGISTRY.refresh()
    return BackendTable(REGISTRY.info())


def explain(*args: Any, **kwargs: Any) -> Explanation:
    """Returns what ``chunk_kda(*args, **kwargs)`` would do: its backend, plan and workspace, and which backends refuse it.

    Nothing is launched, and no tensor is copied. Fake tensors are accepted; they represent tensors of their device.

    ``explain(shape, backend=None, context_parallel="auto", lengths=None)`` does the same for a `ProblemShape`, also for a GPU
    that this machine does not have. `lengths` are those of the sequences of a packed call, as `cu_seqlens_cpu` would give
    them.

    ``explain(function, ...)`` does it for a call ``function(...)`` of `kda_core.chunk_kda`, `kda_core.fused_recurrent_kda`,
    `kda_core.serving.journal_decode_kda` or `kda_core.serving.verify_kda`.

    Raises:
        TypeError, ArgumentError, ShapeError, DtypeError, DeviceError: as `chunk_kda`. Any other error of the call is in
            `Explanation.error`.
    """
    if args and isinstance(args[0], ProblemShape):
        return _explain_shape(*args, **kwargs)
    if args and args[0] is chunk_kda:
        args = args[1:]
    if args and callable(args[0]):
        return _explain_decode(args[0], args[1:], kwargs)
    call, slots, workspace = _parsed(*args, **kwargs)
    if slots is None:
        shape = call.shape()
    else:
        pools.refuse_gradients(call)
        shape = pools.pooled_shape(call, slots)
    known = not (isinstance(call.cu_seqlens, FakeTensor) or isinstance(call.cu_seqlens_cpu, FakeTensor))
    if not known:  # a fake tensor has no contents
        offsets = torch.empty(shape.N + 1, dtype=shape.index_dtype, device="meta")
        call = call._replace(cu_seqlens=offsets, cu_seqlens_cpu=None)
    inputs = _inputs(call, shape)
    inputs.sequence_lengths()
    if shape.pool is not None:
        return _explain_pooled(shape, call, inputs, known, workspace)
    requiring = [n for n, x in zip(Tensors._fields, call.tensors) if x is not None and x.requires_grad]
    return _explain(shape, call.backend, call.context_parallel, inputs, known, workspace, requiring)


def _explain_decode(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Explanation:
    """`explain` of a call that decodes."""
    call, given, _ = parsed(function, args, kwargs)
    if isinstance(given, JournalArguments):
        shape = journal.decode_shape(call, given)
        found = _explain(shape, call.backend, "off", _inputs(call, shape), lengths_known=True)
        return replace(found, pool=None if found.error is not None else "the backend")
    if given is None:
        shape = call.shape()
        return _explain(shape, call.backend, "off", _inputs(call, shape), lengths_known=True)
    shape = pools.pooled_shape(call, given)
    return _explain_pooled(shape, call, _inputs(call, shape), True, None)


def _explain_pooled(
    shape: ProblemShape, call: Arguments, inputs: KdaInputs, known: bool, workspace: Tensor | None
) -> Explanation:
    """`_explain` of the call that serves one with a pool."""
    mode, error = call.context_parallel, None
    try:
        native, mode = _is_native(shape, call, inputs, known)
    except KdaError as found:
        native, mode, error = True, "off", f"{type(found).__name__}: {found}"
    served = shape if native else pools.copied_shape(shape)
    explained = _explain(served, call.backend, mode, replace(inputs, shape=served), known, workspace)
    by = None if error is not None else "the backend" if native else "copies by kda-core"
    return replace(explained, shape=shape, error=error or explained.error, pool=by)


def _is_native(shape: ProblemShape, call: Arguments, inputs: KdaInputs, known: bool) -> tuple[bool, str]:
    """Returns whether the backend serves the pool itself, and the mode of the call that then runs. The lengths may be not ``known``."""
    mode = call.context_parallel
    choice, native = pools.choose(shape, call.backend, mode)
    made, split = pools.calls_of(shape, choice, native, mode)
    if split is None or not known:
        return native, "off" if native and made.planner is None else mode
    inputs = replace(inputs, shape=split.shape)
    native = calls.ask_planner(split, inputs, inputs.sequence_lengths()) is None
    return native, "off" if native else mode


def _parsed(*args: Any, **kwargs: Any) -> tuple[Arguments, SlotArguments | None, Tensor | None]:
    """Returns the arguments of ``chunk_kda(*args, **kwargs)`` with their types checked, those that concern slots (None without any),
    and its workspace.

    Raises:
        TypeError, ArgumentError, DtypeError: as `chunk_kda`.
    """
    call, slots, rest = parsed(chunk_kda, args, kwargs)
    assert not isinstance(slots, JournalArguments)
    given = given_outputs(rest.out, rest.workspace)
    check_outputs_dense(given)
    return call, slots, given.workspace


def _explain_shape(
    shape: ProblemShape,
    backend: str | None = None,
    context_parallel: Any = "auto",
    lengths: Sequence[int] | None = None,
) -> Explanation:
    """`explain` of a shape without tensors."""
    backend, mode = checked_choice(backend, context_parallel)
    inputs = _inputs_of_shape(shape, lengths)
    return _explain(shape, backend, mode, inputs, lengths is not None or not shape.varlen)


def _explain(
    shape: ProblemShape,
    backend: str | None,
    mode: str,
    inputs: KdaInputs,
    lengths_known: bool,
    workspace: Tensor | None = None,
    requiring: Sequence[str] = (),
) -> Explanation:
    found = Explanation(
        shape, None, REGISTRY.rule(backend)[0], REGISTRY.refusals(shape, backend), 0, "none", None
    )
    if shape.device_type == "meta":
        return replace(found, plan=NO_CONTENTS)
    try:
        choices = calls.choose(shape, backend, requiring)
        backward = None if choices.backward is None else choices.backward.spec.name
        found = replace(found, backend=choices.forward.spec.name, backward=backward)
        call = calls.of_shape(shape, choices, mode)
        found = replace(found, saved_bytes=shape.saved_bytes if call.saves else 0)
        if call.planner is not None and not lengths_known:
            of_backward = None if backward is None else NO_LENGTHS
            return replace(
                found, plan=NO_LENGTHS, backward_plan=of_backward, workspace_bytes=call.workspace_bytes
            )
        if shape.options.return_intermediate_states and lengths_known:
            intermediate_states_count(inputs)  # raises if the shape of h is unknown
        asked = calls.ask_planner(call, inputs, inputs.sequence_lengths())
        if choices.backward is not None:
            found = replace(found, backward_plan=_words_of_backward(shape, choices.backward, mode, inputs))
        wanted = calls.needed_workspace(call, asked, inputs)
        plan, needed = calls.fitting(call, asked, wanted, workspace)
        if workspace is not None and workspace.numel() < needed:
            raise ShapeError("workspace", f"at least {needed} bytes", f"{workspace.numel()} bytes")
    except Exception as error:  # noqa: BLE001 - the explanation of the call is the message of its exception
        return replace(found, error=f"{type(error).__name__}: {error}")
    said = _words(call, asked, inputs)
    if plan is not asked:
        said = f"direct (the workspace has less than {wanted} bytes, which this plan needs: {said})"
    return replace(found, plan=said, workspace_bytes=needed)


def _words_of_backward(shape: ProblemShape, choice: Choice, mode: str, inputs: KdaInputs) -> str:
    """Returns a planner's decision about the backward as text."""
    call = calls.of_shape(shape, calls.Choices(choice, choice), mode)
    inputs = replace(inputs, shape=shape)
    plan = calls.ask_planner_of_backward(call, inputs, inputs.sequence_lengths())
    return _words(call, plan, inputs, "explain_backward")


def _words(call: calls.ResolvedCall, plan: Any, inputs: KdaInputs, method: str = "explain") -> str:
    """Returns a planner's decision as text, in the planner's own words if it can explain itself."""
    if call.planner is None:
        return "direct"
    name, planner = call.planner
    words = getattr(planner, method, None)  # optional: kda_core.backend.SupportsExplanation, SupportsTraining
    if words is None:
        return "direct" if plan is None else f"{name}: {plan}"
    try:
        said = words(plan, inputs, call.choice.spec, call.choice.backend)
    except Exception as error:  # noqa: BLE001 - a call needs no explanation, so it would not fail
        said = f"{plan}; the planner cannot explain it: {type(error).__name__}: {error}"
    return f"direct ({name}: {said})" if plan is None else f"{name}: {said}"


# ---- inputs for planners, which read only metadata and lengths in host memory


def _inputs(args: Arguments, shape: ProblemShape) -> KdaInputs:
    """Returns the inputs of a call without copying tensors that are not contiguous."""
    if args.dt_bias is not None and args.dt_bias.dim() == 1:
        args = args._replace(dt_bias=args.dt_bias.view(shape.HV, shape.K))  # possible for any stride
    return KdaInputs(*args.tensors, shape)  # type: ignore[arg-type, call-arg]


def _inputs_of_shape(s: ProblemShape, lengths: Sequence[int] | None) -> KdaInputs:
    """Returns inputs of this shape on the meta device, with the given lengths in host memory.

    Raises:
        ArgumentError: `lengths` do not fit the shape.
    """

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    cu_seqlens = host = None
    if s.index_dtype is not None:
        cu_seqlens = empty(s.N + 1, dtype=s.index_dtype)
    if lengths is not None:
        _check_lengths(s, lengths)
        host = torch.tensor([0, *accumulate(lengths)], dtype=s.index_dtype)
        if s.device_type == "cpu":
            cu_seqlens = host
    wide = s.state_dtype
    return KdaInputs(
        q=empty(s.B, s.T, s.H, s.K, dtype=s.dtype),
        k=empty(s.B, s.T, s.H, s.K, dtype=s.dtype),
        v=empty(s.B, s.T, s.HV, s.V, dtype=s.dtype),
        g=empty(s.B, s.T, s.HV, s.K, dtype=s.g_dtype),
        beta=empty(s.B, s.T, s.HV, dtype=s.beta_dtype),
        A_log=empty(s.HV, dtype=wide) if s.has_A_log else None,
        dt_bias=empty(s.HV, s.K, dtype=wide) if s.has_dt_bias else None,
        initial_state=empty(*s.state_shape, dtype=wide) if s.has_initial_state else None,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=host,
        shape=s,
    )


def _check_lengths(s: ProblemShape, lengths: Sequence[int]) -> None:
    """Checks that `lengths` are those of a packed call of this shape."""
    if not s.varlen:
        raise ArgumentError("lengths", "None for a call of fixed length", repr(lengths))
    total, exact = sum(lengths), not s.options.use_graph
    if len(lengths) != s.N or min(lengths) < 0 or total > s.T or (exact and total != s.T):
        wanted = f"{s.N} whole numbers of at least 0 with the sum {'' if exact else 'of at most '}T={s.T}"
        raise ArgumentError("lengths", wanted, repr(lengths))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Returns lines with aligned columns."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths)).rstrip() for r in [head, *rows])
