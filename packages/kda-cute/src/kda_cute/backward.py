"""Host functions of a backward: slabs, arrays of a workspace, the launch of the gradients kernel, the sums of A_log and dt_bias.

A backward takes one slab of slots after the other, so that its workspace is bounded. The gradients of dt_bias and A_log are sums of
one partial for each chunk. Their order is fixed, so two runs have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.contract import KdaGradients, KdaInputs, ProblemShape
from kda_cute.arguments import address
from kda_cute.records import HEAD_DIM

#: Tokens of a chunk, and between the states that the gradients kernel needs.
CHUNK = 64

#: Tokens between the fp32 states from which those of the chunks are computed again.
CHECKPOINT = 512

#: Bytes of the workspace, by `disable_recompute`.
BUDGETS = {True: 256 << 20, False: 640 << 20}

#: dtype and shape of the arrays of a workspace, by name.
Arrays = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def spacing_of(shape: ProblemShape) -> int:
    """Returns the spacing of the states that a call saves for its backward; 0 if it needs none."""
    if not shape.options.needs_backward:
        return 0
    return CHUNK if shape.options.disable_recompute else CHECKPOINT


def spacing_between(saved_states: Tensor | None, residual: Tensor | None) -> int:
    """Returns the spacing of saved states; 0 if there are none."""
    if saved_states is None:
        return 0
    return CHECKPOINT if residual is None else CHUNK


class Slabs(NamedTuple):
    """How a backward cuts the slots of a head: it takes one slab of slots after the other, from the last to the first."""

    slot_tokens: int
    total: int  # slots of a head
    slots: int  # slots of a slab; the last slab may have fewer

    @property
    def chunks(self) -> int:
        """Chunks of a head for which the workspace has states."""
        return self.slots * self.slot_tokens // CHUNK

    def starts(self) -> Iterator[int]:
        """Returns the first slot of every slab, from the last slab to the first."""
        return reversed(range(0, self.total, self.slots))


def cut(slot_tokens: int, total: int, size: Callable[[Slabs], int], budget: int, least: int) -> Slabs:
    """Returns the slabs of a backward: as few as fit, all of about the same size. A slab of one slot may exceed the budget.

    Args:
        slot_tokens, total: as in `Slabs`.
        size: returns the bytes of the workspace. In slabs of several slots, they grow by the same amount with every slot.
        budget: bytes of the workspace.
        least: bytes that a slab may take however many those are that do not depend on the slab.
    """
    of = lambda slots: size(Slabs(slot_tokens, total, slots))
    if of(total) <= budget:
        return Slabs(slot_tokens, total, total)
    fixed, each = of(0), of(1) - of(0)
    most = max(1, min(total - 1, max(budget - fixed, least) // each))
    return Slabs(slot_tokens, total, -(-total // -(-total // most)))


def total_bytes(arrays: Arrays) -> int:
    """Returns the bytes of a workspace."""
    return sum(_bytes(*array) for array in arrays.values())


def split(buffer: Tensor, arrays: Arrays) -> list[Tensor]:
    """Returns the arrays in a buffer of uint8 that is aligned to 128 bytes, as views."""
    views, start = [], 0
    for dtype, size in arrays.values():
        views.append(buffer[start : start + math.prod(size) * dtype.itemsize].view(dtype).view(size))
        start += _bytes(dtype, size)
    return views


def _bytes(dtype: torch.dtype, size: tuple[int, ...]) -> int:
    """Returns the bytes of an array in the workspace, a multiple of 128."""
    return -(-math.prod(size) * dtype.itemsize // 128) * 128


# ---- the gradients kernel


class GradientTensors(NamedTuple):
    """What the gradients kernel of a slab reads and writes besides inputs and gradients (`kda_cute.gradients.GradientsArguments`)."""

    residual: Tensor
    states: Tensor
    grad_states: Tensor
    partials: Tensor
    scratch: Tensor


class GradientsLaunch(NamedTuple):
    """The launch of the gradients kernel for a shape."""

    kernel: Callable[..., Any]
    numbers: dict[str, int | float]  # arguments that the shape determines

    def __call__(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        gradients: KdaGradients,
        x: GradientTensors,
        first: int,
        slots: int,
    ) -> None:
        """Launches on the current device and stream. ``first``, ``slots``: of the slab."""
        tensors = (
            inputs.q, inputs.k, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, inputs.cu_seqlens, grad_o, gradients.v,
            x.residual, x.states, x.grad_states, gradients.q, gradients.k, gradients.g, gradients.beta, x.partials, x.scratch,
        )  # fmt: skip
        residual_row = HEAD_DIM * x.residual.element_size()
        of_slab = {"first_slot": first, "slab_slots": slots, "residual_row": residual_row}
        self.kernel(gradients.q, *map(address, tensors), *(self.numbers | of_slab).values())


def gradients_launch(
    kernel: Callable[..., Any], shape: ProblemShape, slabs: Slabs, sms: int, state_images: bool
) -> GradientsLaunch:
    """Returns the launch for a shape. ``state_images``: whether the states are images."""
    o = shape.options
    numbers = {
        "N": shape.N, "T": shape.T, "H": shape.H, "HV": shape.HV, "group": shape.HV // shape.H,
        "offset_bytes": 0 if shape.index_dtype is None else shape.index_dtype.itemsize,
        "beta_bytes": shape.beta_dtype.itemsize, "l2norm": int(o.use_qk_l2norm_in_kernel),
        "ctas": min(sms, slabs.chunks * shape.H),
        "first_slot": 0, "slab_slots": 0, "slot_tokens": slabs.slot_tokens, "residual_row": 0,  # of a slab
        "state_images": int(state_images),
        "scale": shape.scale, "lower_bound": o.lower_bound or 0.0,
        "beta_factor": (2.0 if o.allow_neg_eigval else 1.0) if o.use_beta_sigmoid_in_kernel else 0.0,
    }  # fmt: skip
    return GradientsLaunch(kernel, numbers)


def scratch_shape(shape: ProblemShape, sms: int) -> tuple[int, ...]:
    """Returns the shape of the kernel's scratch: empty unless value heads share query heads."""
    return (sms if shape.HV > shape.H else 0, 2, CHUNK * HEAD_DIM)


def store_sums(gradients: KdaGradients, sums: Tensor) -> None:
    """Writes the gradients of dt_bias and A_log. ``sums``: [HV, 2, 128], of the partial sums of all chunks."""
    if gradients.dt_bias is not None:
        gradients.dt_bias.copy_(sums[:, 0].reshape(gradients.dt_bias.shape))
    if gradients.A_log is not None:
        gradients.A_log.copy_(sums[:, 1].sum(-1).reshape(gradients.A_log.shape))


def pass_gradient(grad_final_state: Tensor | None, gradients: KdaGradients) -> None:
    """Serves a call without tokens: the gradient of the final states is that of the initial ones."""
    for x in (gradients.A_log, gradients.dt_bias):
        if x is not None:
            x.zero_()
    if gradients.initial_state is not None:
        if grad_final_state is None:
            gradients.initial_state.zero_()
        else:
            gradients.initial_state.copy_(grad_final_state)
