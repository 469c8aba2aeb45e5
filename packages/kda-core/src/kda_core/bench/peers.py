"""The peers: implementations by others, with the arguments of ``chunk_kda``, and where they run.

============  ==========================  ==============================================================================
peer          distribution                what is called
============  ==========================  ==============================================================================
fla           fla-core                    ``chunk_kda`` of flash-linear-attention (FLA); decoding in `decode`
cudnn         nvidia-cudnn-frontend       ``kimi_delta_attention`` with the engine that cuDNN chooses; for training its only
                                          backward on Hopper
cudnn-hopper  nvidia-cudnn-frontend       the engine ``kda_hopper``: no gate, l2norm, sigmoid, grouped value heads or backward
flashinfer    flashinfer-python           ``recurrent_kda``, decoding only, in `decode`; the pool is bf16
============  ==========================  ==============================================================================

What an engine of cuDNN does not compute (gate, l2norm, sigmoid) is computed before it and counts, as its caller has to pay for it.
With the suffix `PREPARED`, `prepared` computes all of it before the call, and it does not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from kda_core.contract import KdaOptions
from kda_core.gates import l2_normalised, log_decay, step_size

Outputs = tuple[Any, Any]
Capability = tuple[int, int]
PREFILL, TRAINING, DECODE = CALLS = ("prefill", "training", "decode")
#: Suffix of the name of a peer: gate, l2norm and sigmoid are computed before the call, outside of its time.
PREPARED = "+prepared"
#: The engine of a cuDNN peer by name; None leaves the choice to cuDNN.
ENGINES = {"cudnn": None, "cudnn-hopper": "kda_hopper"}
#: The engine of training: cuDNN's only backward of KDA on Hopper.
BACKWARD_ENGINE = "kda_hopper_cuda"
NEWEST = (99, 9)


@dataclass(frozen=True)
class Peer:
    """A peer.

    Attributes:
        distribution: the package that brings it.
        oldest: the oldest version of the package with these functions.
        serves: for each call, the lowest and the highest compute capability that the peer runs on.
        grouped: whether it has grouped value heads, for each call.
    """

    distribution: str
    oldest: tuple[int, int]
    serves: Mapping[str, tuple[Capability, Capability]]
    grouped: tuple[str, ...] = CALLS


HOPPER, HOPPER_ONLY = (9, 0), ((9, 0), (9, 0))
PEERS = {
    "fla": Peer("fla-core", (0, 0), dict.fromkeys(CALLS, ((0, 0), NEWEST))),
    "cudnn": Peer(
        "nvidia-cudnn-frontend", (1, 32), {PREFILL: (HOPPER, (10, 7)), TRAINING: HOPPER_ONLY}, (PREFILL,)
    ),
    "cudnn-hopper": Peer("nvidia-cudnn-frontend", (1, 32), {PREFILL: HOPPER_ONLY}, ()),
    "flashinfer": Peer("flashinfer-python", (0, 7), {DECODE: ((10, 0), (10, 7))}),
}


def is_peer(impl: str) -> bool:
    """Returns whether an implementation is a peer, not a backend of kda-core."""
    return impl.removesuffix(PREPARED) in PEERS


def names(call: str) -> tuple[str, ...]:
    """Returns the implementations of all peers that have a call. A cuDNN peer of prefill has two."""
    found = [name for name, peer in PEERS.items() if call in peer.serves]
    suffixes = {n: ("", PREPARED) if n in ENGINES and call == PREFILL else ("",) for n in found}
    return tuple(n + suffix for n in found for suffix in suffixes[n])


def serves(impl: str, call: str, grouped: bool, use_graph: bool) -> bool:
    """Returns whether a peer has the arguments of a call. No peer has ``use_graph``."""
    peer = PEERS[impl.removesuffix(PREPARED)]
    return call in peer.serves and not use_graph and (call in peer.grouped or not grouped)


def unavailable(impl: str, call: str, device: torch.device) -> str | None:
    """Returns why a peer cannot make a call on this machine; None if it can."""
    peer = PEERS[impl.removesuffix(PREPARED)]
    if call not in peer.serves:
        return f"has no {call}"
    try:
        found = version(peer.distribution)
    except PackageNotFoundError:
        return f"{peer.distribution} is not installed: pip install {peer.distribution}"
    if tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < peer.oldest:
        return f"needs {peer.distribution} {'.'.join(map(str, peer.oldest))} or newer, found {found}"
    if device.type != "cuda":
        return "needs a GPU"
    lowest, highest = peer.serves[call]
    if not lowest <= torch.cuda.get_device_capability(device) <= highest:
        has = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        return (
            f"serves {'sm_{}{}'.format(*lowest)} to {'sm_{}{}'.format(*highest)} in {call}, this GPU is {has}"
        )
    return None


# ---- FLA


def fla() -> Callable[..., Outputs]:
    """Returns the ``chunk_kda`` of flash-linear-attention (FLA), whose kernels are written in Triton."""
    from fla.ops.kda import chunk_kda

    def call(**x: Any) -> Outputs:
        return chunk_kda(**x)

    return call


# ---- cuDNN frontend


#: What a kernel of KDA may compute from raw inputs: the gate, the normalisation of q and k, the sigmoid of beta.
IN_KERNEL = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")
TOKENS = ("q", "k", "v", "g", "beta")
PARAMETERS = ("A_log", "dt_bias", "lower_bound")  # of the gate


def cudnn(engine: str | None) -> Callable[..., Outputs]:
    """Returns cuDNN frontend's KDA on an engine; None leaves the choice to cuDNN. It takes arguments as `arguments` returns them.

    Without a name of an engine, l2norm, sigmoid and bounded gates are computed in the kernel. A named engine gets ready values.
    """
    from cudnn.linear_attention import kimi_delta_attention

    prepare = fused() if torch.cuda.is_available() else ready

    def call(
        *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state_v_first: bool, cu_seqlens: Tensor,
        scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False, **x: Any,
    ) -> Outputs:  # fmt: skip
        in_front: dict[str, Any] = {name: bool(x.get(name)) for name in IN_KERNEL}
        flags: dict[str, Any] = {}
        if engine is None:
            flags = {name: True for name in IN_KERNEL[1:] if in_front[name]}
            in_front |= dict.fromkeys(flags, False)
            if in_front["use_gate_in_kernel"] and x.get("lower_bound") is not None:
                in_front["use_gate_in_kernel"] = False
                flags |= {
                    "safe_gate": True, "gate_lower_bound": x["lower_bound"], "a_log": x["A_log"],
                    "dt_bias": x["dt_bias"].reshape(v.shape[2], -1),
                }  # fmt: skip
        if any(in_front.values()):
            in_front |= {name: x.get(name) for name in PARAMETERS}
            q, k, g, beta = prepare(q, k, g, beta, **in_front)
        tokens = (t.squeeze(0) for t in (q, k, v, g, beta))
        o, state = kimi_delta_attention(
            *tokens, cu_seqlens, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            plan_name=engine, **flags,
        )  # fmt: skip
        return o.unsqueeze(0), state if output_final_state else None

    return call


def arguments(impl: str, x: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call in the layout that an implementation takes. Its time begins after this."""
    if impl.endswith(PREPARED):
        return prepared(x)
    return packed(x) if impl in ENGINES else x


def packed(x: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the same call with the sequences of all batch rows packed, as cuDNN takes them.

    q and k [1, B*T, H, K], v [1, B*T, HV, V], g [1, B*T, HV, K], beta [1, B*T, HV], cu_seqlens [N+1] int32, the initial state
    [N, HV, V, K].
    """
    B, T = x["q"].shape[:2]
    found = {n: y.flatten(0, 1).unsqueeze(0) if n in TOKENS else y for n, y in x.items()}
    bounds = x.get("cu_seqlens")
    found["cu_seqlens"] = torch.arange(B + 1, device=x["q"].device) * T if bounds is None else bounds
    found["cu_seqlens"] = found["cu_seqlens"].to(torch.int32)
    if x.get("initial_state") is not None and not x.get("state_v_first"):
        found["initial_state"] = x["initial_state"].mT.contiguous()
    found.pop("cu_seqlens_cpu", None)
    return found | {"output_final_state": x.get("output_final_state", False), "state_v_first": True}


def prepared(x: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of the same values, `packed`, whose gate, l2norm and sigmoid are computed before it.

    q, k and v keep their dtype; the decay g and beta are fp32. There are no A_log and no dt_bias.
    """
    flags: dict[str, Any] = {name: bool(x.get(name)) for name in IN_KERNEL}
    parameters: dict[str, Any] = {name: x.get(name) for name in PARAMETERS}
    q, k, g, beta = ready(x["q"], x["k"], x["g"], x["beta"], **parameters, **flags)
    found = packed(x | {"q": q, "k": k, "g": g, "beta": beta})
    return {n: y for n, y in found.items() if n not in (*IN_KERNEL, *PARAMETERS, "safe_gate")}


def ready(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    use_gate_in_kernel: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, the decay g and beta as a kernel without gate, l2norm and sigmoid takes them. Computes in fp32; q and k keep
    their dtype, g and beta are fp32."""
    heads = g.shape[2]
    options = KdaOptions(
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, lower_bound=lower_bound,
    )  # fmt: skip
    if use_qk_l2norm_in_kernel:
        q, k = (l2_normalised(t.float()).to(t.dtype) for t in (q, k))
    rate = None if A_log is None else A_log.reshape(heads, 1)
    bias = None if dt_bias is None else dt_bias.reshape(heads, -1)
    return q, k, log_decay(g.float(), rate, bias, options), step_size(beta.float(), options)


def fused() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Returns `ready` as fused kernels, which torch compiles: what a caller of a kernel without gate and l2norm would run."""
    torch.compiler.reset()  # torch compiles a function for eight shapes at most, and a benchmark has more
    return torch.compile(ready, fullgraph=True, dynamic=False)


# ---- FlashInfer


def flashinfer() -> Callable[..., None]:
    """Returns FlashInfer's decoding over a pool of bf16 states [V, K], in place, with the arguments of ``fused_recurrent_kda``.

    Tokens are packed, because only then do FlashInfer's kernels read and write the slots themselves for every number of heads.
    """
    from flashinfer import recurrent_kda

    def call(
        *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, ssm_state_indices: Tensor, out: Tensor,
        cu_seqlens: Tensor, use_beta_sigmoid_in_kernel: bool, num_accepted_tokens: Tensor | None = None,
        state_v_first: bool, **x: Any,
    ) -> None:  # fmt: skip
        T = q.shape[1]
        tokens = (t.flatten(0, 1).unsqueeze(0) for t in (q, k, v, g, beta))
        recurrent_kda(
            *tokens, **x, initial_state=initial_state, ssm_state_indices=ssm_state_indices, cu_seqlens=cu_seqlens,
            num_spec_tokens=T - 1 if T > 1 else None, num_accepted_tokens=num_accepted_tokens,
            output=out.flatten(0, 1).unsqueeze(0), beta_is_logit=use_beta_sigmoid_in_kernel,
        )  # fmt: skip

    return call
