"""What is measured: each backend of kda-core by name, and peers, all called with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from registry import CERTIFIED, CP

import kda_core
from kda_core import contract
from kda_core.registry import REGISTRY, record_calls

if TYPE_CHECKING:
    from kda_cp import Plan

Outputs = tuple[Any, Any]
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu")


def backend(name: str, context_parallel: Any = "off") -> Callable[..., Outputs]:
    """``chunk_kda`` on one backend; every call asserts that this backend ran."""

    def call(**x: Any) -> Outputs:
        with record_calls() as calls:
            o, state = kda_core.chunk_kda(**x, backend=name, context_parallel=context_parallel)
        assert [c.backend for c in calls] == [name], calls
        return o, state

    return call


def fla() -> Callable[..., Outputs]:
    """FLA's Triton kernels, the peer in the same process."""
    from fla.ops.kda import chunk_kda

    def call(**x: Any) -> Outputs:
        return chunk_kda(**x)

    return call


def plan(name: str, x: dict[str, Any]) -> Plan:
    """What kda-cp decides for a call of "<backend>+cp", with its prediction; or for "<backend>+certified" its best split by
    certified decay, whatever serial would take.

    Raises:
        ValueError: kda-cp is not installed, or does not know the lengths.
    """
    backend_name = _backend_name(name)
    found, shape = REGISTRY.planner(), kda_core.explain(**x, backend=backend_name).shape
    if found is None:
        raise ValueError(f"impl {name!r} cannot run here: no planner is installed and on")
    inputs = contract.make_inputs([x.get(n) for n in TENSORS], shape)
    choice = REGISTRY.resolve(shape, backend_name)
    planner: Any = found[1]
    decided = planner.decide(inputs, choice.spec, choice.backend)
    if decided is None:
        raise ValueError("a packed call without cu_seqlens_cpu has no plan")
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
    """The backend of an ``impl`` by a plan, or "off"."""
    return backend(_backend_name(name), context_parallel)


def named(name: str, x: dict[str, Any]) -> Callable[..., Outputs]:
    """The implementation behind a row's ``impl``, for calls with these arguments: "fla", "reference", or "kda-<backend>"; with
    "+cp" behind it, where kda-cp splits calls by itself, or "+certified", by its best plan of certified decay.

    Raises:
        ValueError: no such implementation here.
    """
    if name == "fla":
        return fla()
    backend_name = _backend_name(name)
    known = {i.name: i for i in kda_core.backends()}
    if backend_name not in known or known[backend_name].status != "ok":
        state = known.get(backend_name, "unknown")
        raise ValueError(f"impl {name!r} cannot run here: {state}")
    if name.endswith(CERTIFIED):
        return backend(backend_name, plan(name, x))
    return backend(backend_name, "auto" if name.endswith(CP) else "off")
