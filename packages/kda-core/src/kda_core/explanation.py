"""What is known, and what would run: `backends` and `explain`. Nothing here launches, copies or allocates tensors of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kda_core import contract, ops
from kda_core.api import choice_args, parsed_call
from kda_core.contract import KdaInputs, ProblemShape
from kda_core.errors import ArgumentError, ShapeError
from kda_core.registry import REGISTRY, Refusal, show_archs

NO_LENGTHS = "unknown: it depends on the lengths of the packed sequences, which are not given"
NO_CONTENTS = "none: no backend runs on tensors of the meta device"


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
        workspace_bytes: scratch memory of the call by its plan: what the call allocates, and what `workspace` has to hold
            for the call to use it. Of a direct call where the plan is unknown; 0 where the call would fail.
        plan: how a planner would split it, and why. It begins with "direct" for one call of the backend, with "none" where
            nothing would run, and with "unknown" where a planner goes by lengths that were not given.
        error: the message of the exception that the call would raise, or None. `out`, the contents of tensors on a device and
            the compilation of kernels are not looked at.
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
        where = s.device_type if s.arch is None else f"{s.device_type} {show_archs([s.arch])}"
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
    """Which backend would serve ``chunk_kda(*args, **kwargs)``, who refused and why, what plan and workspace it would have.

    Nothing is launched, and no tensor is copied. Fake tensors will do: they stand for tensors of their device.

    ``explain(shape, backend=None, context_parallel="auto", lengths=None)`` says the same of a `ProblemShape`, of a GPU that
    need not be here. `lengths` are those of the sequences of a packed call, as `cu_seqlens_cpu` would tell them.

    Raises:
        TypeError, ArgumentError, ShapeError, DtypeError, DeviceError: as `chunk_kda`. Whatever else the call would raise is
            `Explanation.error`.
    """
    if args and isinstance(args[0], ProblemShape):
        return _explain_shape(*args, **kwargs)
    tensors, options, backend, mode, workspace = parsed_call(*args, **kwargs)
    shape = contract.problem_shape(*tensors, options=options)
    *others, cu_seqlens, host = tensors
    known = not (isinstance(cu_seqlens, FakeTensor) or isinstance(host, FakeTensor))
    if not known:  # it has no contents to be read
        cu_seqlens, host = torch.empty(shape.N + 1, dtype=shape.index_dtype, device="meta"), None
    inputs = _inputs((*others, cu_seqlens, host), shape)
    inputs.sequence_lengths()
    return _explain(shape, backend, mode, inputs, known, workspace)


def _explain_shape(
    shape: ProblemShape,
    backend: str | None = None,
    context_parallel: Any = "auto",
    lengths: Sequence[int] | None = None,
) -> Explanation:
    """`explain` of a call that no tensors stand behind."""
    backend, mode = choice_args(backend, context_parallel)
    inputs = _inputs_of_shape(shape, lengths)
    return _explain(shape, backend, mode, inputs, lengths is not None or not shape.varlen)


def _explain(
    shape: ProblemShape,
    backend: str | None,
    mode: str,
    inputs: KdaInputs,
    lengths_known: bool,
    workspace: Tensor | None = None,
) -> Explanation:
    found = Explanation(
        shape, None, REGISTRY.rule(backend)[0], REGISTRY.refusals(shape, backend), 0, "none", None
    )
    if shape.device_type == "meta":
        return replace(found, plan=NO_CONTENTS)
    try:
        choice = REGISTRY.resolve(shape, backend)
        found = replace(found, backend=choice.spec.name)
        call = ops.make_plan(shape, choice, mode)
        if call.planner is not None and not lengths_known:
            return replace(found, plan=NO_LENGTHS, workspace_bytes=call.workspace_bytes)
        if shape.options.return_intermediate_states and lengths_known:
            contract.intermediate_states_count(inputs)  # which raises where nobody knows the shape of h
        asked = ops.ask_planner(call, inputs, inputs.sequence_lengths())
        wanted = ops.needed_workspace(call, asked, inputs)
        plan, needed = ops.fitting(call, asked, wanted, workspace)
        if workspace is not None and workspace.numel() < needed:
            raise ShapeError("workspace", f"at least {needed} bytes", f"{workspace.numel()} bytes")
    except Exception as error:  # noqa: BLE001 - the answer to "what would happen" is the exception's message
        return replace(found, error=f"{type(error).__name__}: {error}")
    said = _words(call, asked, inputs)
    if plan is not asked:
        said = f"direct (the workspace has less than {wanted} bytes, which this plan needs: {said})"
    return replace(found, plan=said, workspace_bytes=needed)


def _words(call: ops.CallPlan, plan: Any, inputs: KdaInputs) -> str:
    """A planner's decision, in its own words where it has them."""
    if call.planner is None:
        return "direct"
    name, planner = call.planner
    words = getattr(planner, "explain", None)  # optional: kda_core.backend.SupportsExplanation
    if words is None:
        return "direct" if plan is None else f"{name}: {plan}"
    try:
        said = words(plan, inputs, call.choice.spec, call.choice.backend)
    except Exception as error:  # noqa: BLE001 - a call does not ask for words, so it would not fail
        said = f"{plan}; the planner cannot explain it: {type(error).__name__}: {error}"
    return f"direct ({name}: {said})" if plan is None else f"{name}: {said}"


# ---- inputs for planners, which look at metadata and at lengths in host memory alone


_NAMES = [f.name for f in fields(KdaInputs) if f.name != "shape"]


def _inputs(tensors: Sequence[Tensor | None], shape: ProblemShape) -> KdaInputs:
    """The tensors of a call without the copies that a backend needs of strided ones."""
    given: dict[str, Any] = dict(zip(_NAMES, tensors))
    if (bias := given["dt_bias"]) is not None and bias.dim() == 1:
        given["dt_bias"] = bias.view(shape.HV, shape.K)  # one dimension divides whatever its stride is
    return KdaInputs(**given, shape=shape)


def _inputs_of_shape(s: ProblemShape, lengths: Sequence[int] | None) -> KdaInputs:
    """Inputs of this shape on the meta device, with the lengths in host memory where they are given.

    Raises:
        ArgumentError: `lengths` are none of the shape.
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
    if not s.varlen:
        raise ArgumentError("lengths", "None for a call that is not packed", repr(lengths))
    total, exact = sum(lengths), not s.options.use_graph
    if len(lengths) != s.N or min(lengths) < 0 or total > s.T or (exact and total != s.T):
        wanted = f"{s.N} whole numbers of at least 0 with the sum {'' if exact else 'of at most '}T={s.T}"
        raise ArgumentError("lengths", wanted, repr(lengths))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths)).rstrip() for r in [head, *rows])
