"""The measured functions: backends of kda-core by name, and peers. All take the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

import kda_core
from benchmarks.cases import CERTIFIED, CP
from kda_core import buffers
from kda_core.registry import REGISTRY, record_calls
from kda_core.testing.oracle import log_decay

if TYPE_CHECKING:
    from kda_cp import Plan

Outputs = tuple[Any, Any]
#: Implementations that are not backends of kda-core.
PEERS = ("fla", "cudnn")
#: The oldest cuDNN frontend with a backward of KDA for Hopper, and the name of its kernels.
CUDNN, CUDNN_PLAN = (1, 32), "kda_hopper_cuda"
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


def cudnn() -> Callable[..., Outputs]:
    """Returns cuDNN frontend's KDA on its kernels for Hopper, forward and backward. It takes `prepared` arguments only: these
    kernels have no gate, no l2norm, no sigmoid and no grouped value heads in the backward."""
    from cudnn.linear_attention import kimi_delta_attention

    def call(*, q: Any, k: Any, v: Any, g: Any, beta: Any, state_v_first: bool, **x: Any) -> Outputs:
        tokens = (t.squeeze(0) for t in (q, k, v, g, beta))
        o, state = kimi_delta_attention(*tokens, **x, plan_name=CUDNN_PLAN)
        return o.unsqueeze(0), state if x.get("output_final_state") else None

    return call


def prepared(x: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of the same values whose gate, l2norm and sigmoid are computed before it.

    q and k [1, B*T, H, K] in their dtype, v [1, B*T, HV, V], the decay g [1, B*T, HV, K] and beta [1, B*T, HV] in fp32,
    cu_seqlens [N+1] int32, the initial state [N, HV, V, K]. They have no A_log and no dt_bias.
    """
    (B, T), dtype = x["q"].shape[:2], x["q"].dtype
    q, k, g, beta = (x[n].float() for n in ("q", "k", "g", "beta"))
    if x.get("use_qk_l2norm_in_kernel"):
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    if x.get("use_gate_in_kernel"):
        g = log_decay(g, x.get("A_log"), x.get("dt_bias"), x.get("lower_bound")).float()
    if x.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid()
    tokens = {"q": q.to(dtype), "k": k.to(dtype), "v": x["v"], "g": g, "beta": beta}
    found: dict[str, Any] = {n: t.flatten(0, 1).unsqueeze(0) for n, t in tokens.items()}
    bounds = x.get("cu_seqlens")
    found["cu_seqlens"] = torch.arange(B + 1, device=q.device) * T if bounds is None else bounds
    found["cu_seqlens"] = found["cu_seqlens"].to(torch.int32)
    if x.get("initial_state") is not None:
        found["initial_state"] = x["initial_state"].mT.contiguous()
    return found | {"output_final_state": x.get("output_final_state", False), "state_v_first": True}


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

    Names: "fla", "cudnn", "reference", "kda-<backend>"; a suffix "+cp" lets kda-cp decide whether to split, "+certified" executes its
    best plan of certified decay.

    Raises:
        ValueError: the implementation is unknown or cannot run on this machine.
    """
    if name in PEERS:
        return {"fla": fla, "cudnn": cudnn}[name]()
    backend_name = _backend_name(name)
    known = {i.name: i for i in kda_core.backends()}
    if backend_name not in known or known[backend_name].status != "ok":
        state = known.get(backend_name, f"known backends are {', '.join(known)}")
        raise ValueError(f"impl: {name!r} cannot run here: {state}")
    if name.endswith(CERTIFIED):
        return backend(backend_name, plan(name, x))
    return backend(backend_name, "auto" if name.endswith(CP) else "off")


def default(device: torch.device, peers: tuple[str, ...]) -> list[str]:
    """Returns the implementations that run on this machine, without suffixes: the backends for its GPU, or the reference on a CPU,
    and the given peers that are installed. On a CPU there is no peer."""
    if device.type == "cpu":
        return ["reference"]
    ok = [i.name for i in kda_core.backends() if i.status == "ok"]
    names = [f"kda-{n}" for n in ok if n not in ("reference", *PEERS)] or ["reference"]
    return [*names, *(name for name in peers if _is_installed(name))]


def _is_installed(peer: str) -> bool:
    """Returns whether a peer is installed, for cuDNN in a version and on a GPU that has its kernels."""
    try:
        found = version({"fla": "fla-core", "cudnn": "nvidia-cudnn-frontend"}[peer])
    except PackageNotFoundError:
        return False
    if peer != "cudnn":
        return True
    numbers = tuple(int(n) for n in found.split(".")[:2])
    return numbers >= CUDNN and torch.cuda.get_device_capability() == (9, 0)
