"""The measured functions: backends of kda-core by name, and peers. All take the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kda_core
from benchmarks.cases import CERTIFIED, CP
from kda_core import buffers
from kda_core.registry import REGISTRY, record_calls

if TYPE_CHECKING:
    from kda_cp import Plan

Outputs = tuple[Any, Any]
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu")


def backend(name: str, context_parallel: Any = "off") -> Callable[..., Outputs]:
    """Returns ``chunk_kda`` on one backend. Every call asserts that this backend served it."""

    def call(**x: Any) -> Outputs:
        with record_calls() as calls:
            o, state = kda_core.chunk_kda(**x, backend=name, context_parallel=context_parallel)
        assert [c.backend for c in calls] == [name], calls
        return o, state

    return call


def fla() -> Callable[..., Outputs]:
    """Returns the ``chunk_kda`` of flash-linear-attention (FLA), whose kernels are written in Triton."""
    from fla.ops.kda import chunk_kda

    def call(**x: Any) -> Outputs:
        return chunk_kda(**x)

    return call


def plan(name: str, x: dict[str, Any]) -> Plan:
    """Returns the plan of an implementation "<backend>+cp" or "<backend>+certified" for a call with the arguments `x`.

    "+cp" is the planner's decision, with its prediction. "+certified" is the best split by certified decay, even if the
    planner expects a serial call to be faster.

    Raises:
        ValueError: kda-cp is not installed or disabled, or the call has no ``cu_seqlens_cpu``.
    """
    backend_name = _backend_name(name)
    found, shape = REGISTRY.planner(), kda_core.explain(**x, backend=backend_name).shape
    if found is None:
        raise ValueError(f"impl: {name!r} needs a planner; install kda-cp and unset KDA_CP=0")
    inputs = buffers.make_inputs([x.get(n) for n in TENSORS], shape)
    choice = REGISTRY.resolve(shape, backend_name)
    planner: Any = found[1]
    decided = planner.decide(inputs, choice.spec, choice.backend)
    if decided is None:
        raise ValueError("cu_seqlens_cpu: a packed call has no plan without it, got None")
    if name.endswith(CP):
        return decided
    from kda_cp import make_plan
    from kda_cp.machine import machine

    known, source, SMs = machine(inputs, choice.spec)
    return make_plan(
        decided.lengths, HV=shape.HV, K=shape.K, V=shape.V, constants=known, source=source, SMs=SMs,
        strategy="certified",
    )  # fmt: skip


def _backend_name(impl: str) -> str:
    return impl.removesuffix(CP).removesuffix(CERTIFIED).removeprefix("kda-")


def planned(name: str, context_parallel: Any) -> Callable[..., Outputs]:
    """Returns ``chunk_kda`` on the backend of `name` with a plan, or with "off" for a direct call."""
    return backend(_backend_name(name), context_parallel)


def named(name: str, x: dict[str, Any]) -> Callable[..., Outputs]:
    """Returns the function of an implementation for calls with the arguments `x`.

    Names: "fla", "reference", "kda-<backend>"; a suffix "+cp" lets kda-cp decide whether to split, "+certified" executes its
    best plan of certified decay.

    Raises:
        ValueError: the implementation is unknown or cannot run on this machine.
    """
    if name == "fla":
        return fla()
    backend_name = _backend_name(name)
    known = {i.name: i for i in kda_core.backends()}
    if backend_name not in known or known[backend_name].status != "ok":
        state = known.get(backend_name, f"known backends are {', '.join(known)}")
        raise ValueError(f"impl: {name!r} cannot run here: {state}")
    if name.endswith(CERTIFIED):
        return backend(backend_name, plan(name, x))
    return backend(backend_name, "auto" if name.endswith(CP) else "off")
