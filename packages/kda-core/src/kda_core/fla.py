"""The `fla` backend: the Triton kernels of flash-linear-attention (FLA), for what this project's own GPU backends do not serve.

Importing this module imports neither FLA nor Triton; `FlaBackend` does. The backend bypasses FLA's backend dispatch,
which could call the kernels of another package, or kda-core again.

Where FLA differs from the contract, this module adapts the call:

- States are [K, V] in FLA's kernels. States as [V, K] are transposed before and after, so both layouts have the same bits.
- FLA derives the chunks of packed sequences from cu_seqlens, and caches the result by the identity of that tensor. It always gets a
  new tensor, so FLA sees contents that changed in place. Its offsets are in [0, T] and never decrease, even if the caller's do.
- A packed forward uses FLA's graph mode, which computes the chunks on the device and does not wait for it.
- FLA's graph mode keeps the buffers of a backward for the life of the process, so a backward never uses it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kda_core import install
from kda_core.abi import BACKEND_ABI
from kda_core.backend import BackendSpec
from kda_core.contract import FLOAT_TENSORS, KdaGradients, KdaInputs, KdaOutputs, ProblemShape

K_RANGE = (16, 256)
"""The smallest K is that of a tensor-core product in Triton; FLA refuses a larger K than the other one."""
MAX_HEADS = 65535
"""Value heads of all batch rows: FLA's kernels have one CTA for each in the second dimension of their grid."""

SPEC = BackendSpec(
    name="fla",
    abi=BACKEND_ABI,
    archs=frozenset({"sm_80+"}),
    features=frozenset(
        {
            "varlen",
            "gva",
            "initial_state",
            "final_state",
            "state_v_first",
            "gate_in_kernel",
            "unbounded_gate",
            "beta_sigmoid",
            "neg_eigval",
            "qk_l2norm",
            "intermediate_states",
            "graph",
            "backward",
            "recurrent",
        }
    ),
    target="kda_core.fla:FlaBackend",
    install=install.command(install.FLA),
    priority=-90,
    note="the first calls with other head counts or head dimensions tune FLA's kernels, which takes minutes",
    dtypes=frozenset({"bfloat16", "float16"}),
)


def is_installed() -> bool:
    """Returns whether the package `fla` can be found. Does not import it."""
    try:
        found = find_spec("fla")
    except (ImportError, ValueError):  # an import hook, or a module without a spec
        return False
    return found is not None and found.origin is not None  # a folder without __init__.py has no origin


class FlaBackend:
    """The backend; see the module's docstring. Stateless, hence thread-safe.

    Raises:
        ImportError: FLA or Triton cannot be imported, or FLA is older than 0.6.
    """

    def __init__(self) -> None:
        chunk, recurrent = "fla.ops.kda.chunk", "fla.ops.kda.fused_recurrent"
        self._chunk = fla_function(chunk, "chunk_kda", "use_graph", "use_beta_sigmoid_in_kernel")
        self._recurrent = fla_function(recurrent, "fused_recurrent_kda_fwd", "out", "use_gate_in_kernel")

    def can_run(self, shape: ProblemShape) -> str | None:
        """Returns None, or which limit of FLA the shape exceeds."""
        least, most = K_RANGE
        if not least <= shape.K <= most:
            return f"head dimension K={shape.K}; FLA serves K from {least} to {most}"
        if (heads := shape.B * shape.HV) > MAX_HEADS and not shape.options.recurrent:
            return f"B*HV={heads}; FLA serves at most {MAX_HEADS}"
        if shape.options.use_graph and shape.options.needs_backward:
            return "gradients with use_graph; FLA keeps the buffers of such a backward, which another call would overwrite"
        return None

    def workspace_bytes(self, shape: ProblemShape) -> int:
        """Returns 0: FLA allocates the temporaries."""
        return 0

    def compile(self, shape: ProblemShape) -> None:
        """Does nothing: FLA compiles and tunes kernels in the first call that needs them."""

    @torch.inference_mode()  # FLA returns intermediate states in no other mode
    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """Computes in chunks of `chunk_size` tokens."""
        s = inputs.shape
        if s.T == 0:
            return _without_tokens(inputs, outputs)
        bounds = _device_bounds(inputs)
        with torch.autocast(inputs.q.device.type, enabled=False):
            o, state, *h = self._chunk(
                **_tensors(inputs),
                **_chunk_options(inputs),
                output_final_state=s.options.output_final_state,
                return_intermediate_states=s.options.return_intermediate_states,
                cu_seqlens=bounds,
                use_graph=bounds is not None,
            )
        if s.may_end_early and bounds is not None:
            inside = torch.arange(s.T, device=o.device) < bounds[-1]
            o = torch.where(inside.view(1, s.T, 1, 1), o, outputs.o)
        outputs.o.copy_(o)
        if outputs.final_state is not None:
            outputs.final_state.copy_(_turned(state, inputs))
        if outputs.intermediate_states is not None:
            # graph mode has rows for the largest possible number of chunks
            chunks = outputs.intermediate_states.shape[1]
            outputs.intermediate_states.copy_(_turned(h[0][:, :chunks], inputs))
        return outputs

    def recurrent_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """Computes token by token."""
        s, options = inputs.shape, inputs.options
        if s.T == 0:
            return _without_tokens(inputs, outputs)
        with torch.no_grad(), torch.cuda.device_of(inputs.q):  # Triton launches on the current device
            _, state = self._recurrent(
                **_tensors(inputs),
                **_options(inputs),
                output_final_state=options.output_final_state,
                inplace_final_state=False,
                cu_seqlens=_device_bounds(inputs),
                out=outputs.o,
            )
        if outputs.final_state is not None:
            outputs.final_state.copy_(_turned(state, inputs))
        return outputs

    def chunk_bwd(self, inputs: KdaInputs, grad_o: Tensor, grad_final_state: Tensor | None) -> KdaGradients:
        """Repeats the forward and computes FLA's gradients. Waits for the device if the sequences are packed."""
        s = inputs.shape
        if s.T == 0:
            return _gradients_without_tokens(inputs, grad_final_state)
        bounds, host = _backward_bounds(inputs)
        leaves = {n: x.detach().requires_grad_() for n, x in _tensors(inputs).items() if x is not None}
        with torch.enable_grad(), torch.autocast(inputs.q.device.type, enabled=False):
            o, state = self._chunk(
                **(dict.fromkeys(("A_log", "dt_bias", "initial_state")) | leaves),
                **_chunk_options(inputs),
                output_final_state=grad_final_state is not None,
                disable_recompute=True,
                cu_seqlens=bounds,
                cu_seqlens_cpu=host,
            )
            results, seeds = [o], [grad_o]
            if grad_final_state is not None:
                results.append(state)
                seeds.append(_turned(grad_final_state, inputs).contiguous())
            grads = dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), seeds)))
        if "dt_bias" in grads:
            grads["dt_bias"] = grads["dt_bias"].view(s.HV, s.K)
        if "initial_state" in grads:
            grads["initial_state"] = _turned(grads["initial_state"], inputs)
        gradients: dict[str, Any] = {name: grads.get(name) for name in FLOAT_TENSORS}
        return KdaGradients(**gradients)


def fla_function(module: str, name: str, *parameters: str) -> Callable[..., Any]:
    """Returns a function of FLA without the decorators of FLA's backend dispatch.

    Args:
        parameters: those that older versions of FLA lack, and would ignore.

    Raises:
        ImportError: the module cannot be imported, or the function has not all of the parameters.
    """
    found: Callable[..., Any] = inspect.unwrap(getattr(importlib.import_module(module), name))
    if missing := sorted(set(parameters) - set(inspect.signature(found).parameters)):
        version = getattr(importlib.import_module("fla"), "__version__", "unknown")
        raise ImportError(
            f"fla-core: expected version 0.6, got {version}, whose {name} has no parameter {', '.join(missing)}; "
            f"{install.command(install.FLA)}"
        )
    return found


# ---- arguments of FLA's functions

_OPTIONS = (
    "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "lower_bound",
)  # fmt: skip


def _tensors(inputs: KdaInputs) -> dict[str, Tensor | None]:
    """Returns the floating-point tensors by FLA's names, in FLA's shapes: dt_bias [HV*K], states [N, HV, K, V]."""
    found: dict[str, Tensor | None] = {name: getattr(inputs, name) for name in FLOAT_TENSORS}
    if inputs.dt_bias is not None:
        found["dt_bias"] = inputs.dt_bias.view(-1)  # the gradient of FLA has this shape
    if inputs.initial_state is not None:
        found["initial_state"] = _turned(inputs.initial_state, inputs).contiguous()
    return found


def _options(inputs: KdaInputs) -> dict[str, Any]:
    """Returns the options that both functions of FLA have."""
    return {"scale": inputs.shape.scale} | {name: getattr(inputs.options, name) for name in _OPTIONS}


def _chunk_options(inputs: KdaInputs) -> dict[str, Any]:
    """Returns the options that chunk_kda has in forward and backward."""
    return _options(inputs) | {"safe_gate": inputs.options.safe_gate, "chunk_size": inputs.options.chunk_size}


def _turned(state: Tensor, inputs: KdaInputs) -> Tensor:
    """Returns states [.., K, V] as the call has them, or those of the call as [.., K, V]."""
    return state.mT if inputs.options.state_v_first else state


def _device_bounds(inputs: KdaInputs) -> Tensor | None:
    """Returns cu_seqlens as a new tensor of valid offsets, None for fixed lengths. Does not wait for the device."""
    if inputs.cu_seqlens is None:
        return None
    s = inputs.shape
    bounds = inputs.cu_seqlens.clamp(0, s.T).cummax(0).values
    bounds[:1].zero_()
    if not s.may_end_early:
        bounds[-1:].fill_(s.T)
    return bounds


def _backward_bounds(inputs: KdaInputs) -> tuple[Tensor | None, Tensor | None]:
    """Returns the offsets on the device and in host memory; the latter None if only the device knows them."""
    lengths = inputs.sequence_lengths()
    if inputs.cu_seqlens is None or lengths is None:
        return _device_bounds(inputs), None
    host = torch.tensor([0, *accumulate(lengths)], dtype=inputs.cu_seqlens.dtype)
    return host.to(inputs.q.device), host


# ---- calls without tokens, which FLA does not serve


def _without_tokens(inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
    if outputs.final_state is not None:
        if inputs.initial_state is None:
            outputs.final_state.zero_()
        else:
            outputs.final_state.copy_(inputs.initial_state)
    return outputs


def _gradients_without_tokens(inputs: KdaInputs, grad_final_state: Tensor | None) -> KdaGradients:
    tensors = {name: getattr(inputs, name) for name in FLOAT_TENSORS}
    gradients: dict[str, Any] = {n: None if x is None else torch.zeros_like(x) for n, x in tensors.items()}
    if inputs.initial_state is not None and grad_final_state is not None:
        gradients["initial_state"] = grad_final_state
    return KdaGradients(**gradients)
