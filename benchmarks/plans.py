"""The plans of the implementations "<backend>+cp" and "<backend>+certified", and calls with a given plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kda_core
from kda_core import buffers
from kda_core.bench import implementations
from kda_core.bench.cases import CERTIFIED, CP
from kda_core.bench.peers import Outputs
from kda_core.registry import REGISTRY

if TYPE_CHECKING:
    from kda_cp import Plan

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu")


def plan(name: str, x: dict[str, Any]) -> Plan:
    """Returns the plan of an implementation "<backend>+cp" or "<backend>+certified" for a call with the arguments `x`.

    "+cp" is the planner's decision, with its prediction. "+certified" is the best split by certified decay, even if the
    planner expects a serial call to be faster.

    Raises:
        ValueError: kda-cp is not installed or disabled, or the call has no ``cu_seqlens_cpu``.
    """
    backend_name = implementations.backend_name(name)
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


def planned(name: str, context_parallel: Any) -> Callable[..., Outputs]:
    """Returns ``chunk_kda`` on the backend of `name` with a plan, or with "off" for a direct call."""
    return implementations.backend(implementations.backend_name(name), context_parallel)


def named(name: str, x: dict[str, Any]) -> Callable[..., Outputs]:
    """Returns the function of an implementation for calls with the arguments `x`: those of `implementations.named`, and with the
    suffix "+certified" calls that execute the best plan of certified decay.

    Raises:
        ValueError: the implementation is unknown or cannot run on this machine.
    """
    function = implementations.named(name)
    return planned(name, plan(name, x)) if name.endswith(CERTIFIED) else function
