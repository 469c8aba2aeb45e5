"""The private names of torch that kda-core uses, each looked up once at import. No other module uses a private name of torch.

Torch lacks a name of     Then
------------------------  ------------------------------------------------------------------------------------------
`DispatcherState`         `STATE` is None, and every eager call goes through torch's dispatcher. Results and errors are
                          the same; a call takes more host time.
`TensorGuards`            bound calls compare the metadata of their tensors in Python, which takes more host time.
`_empty_strided_cuda`     known and bound calls allocate by ``torch.empty_strided``, which takes more host time; so for `_empty_strided_cpu`.
any other                 importing kda_core raises an ImportError or AttributeError that contains the name, because
                          torch has no public equivalent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as active_dispatch_modes

# a context in which the dispatcher skips autograd's kernels
below_autograd = torch._C._AutoDispatchBelowAutograd
# the current device, without the check that CUDA is initialised: it is, where there is a tensor on a GPU
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# whether torch fills the memory that it allocates, see `torch.utils.deterministic`; ``torch.are_deterministic_algorithms_enabled``
# takes longer
is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
compiled_autograd_key = torch.autograd.Function._compiled_autograd_key
set_forward_gradients = forward_ad._set_fwd_grad_enabled

__all__ = [
    "ALLOCATORS",
    "GUARDS",
    "STATE",
    "DispatcherState",
    "FakeTensor",
    "SingleLevelFunction",
    "active_dispatch_modes",
    "allocator",
    "below_autograd",
    "compiled_autograd_key",
    "current_device",
    "enable_single_level_autograd_function",
    "forward_level",
    "is_deterministic",
    "is_dispatcher_idle",
    "is_free_of_modes",
    "is_intercepted",
    "is_transformed",
    "metadata_guard",
    "probe",
    "probe_allocators",
    "set_forward_gradients",
]


class DispatcherState(NamedTuple):
    """Functions that report what torch's dispatcher would do besides calling an operator's kernel.

    Attributes:
        dispatch_modes: returns the number of active TorchDispatchModes, fake tensor mode included.
        function_modes: returns whether a TorchFunctionMode is active.
        transform: returns the innermost torch.func transform, or None.
        tracer: returns the state of torch.jit.trace, or None.
    """

    dispatch_modes: Callable[[], int]
    function_modes: Callable[[], bool]
    transform: Callable[[], Any]
    tracer: Callable[[], Any]


def probe(torch_c: Any) -> DispatcherState | None:
    """Returns the functions that torch's extension module `torch_c` provides, or None if it lacks one."""
    try:
        return DispatcherState(
            torch_c._len_torch_dispatch_stack,
            torch_c._is_torch_function_mode_enabled,
            torch_c._functorch.peek_interpreter_stack,
            torch_c._get_tracing_state,
        )
    except AttributeError:
        return None


STATE = probe(torch._C)


def forward_level() -> int:
    """Returns the level of forward-mode AD, -1 outside of any."""
    return forward_ad._current_level


forward_level()  # fails at import, not in the first call, if torch renamed the variable


def is_dispatcher_idle() -> bool:
    """Returns whether no mode, transform, tracer or level of forward-mode AD is active; False if torch lacks a function that
    says so."""
    if STATE is None:
        return False
    dispatch_modes, function_modes, transform, tracer = STATE
    return (
        not dispatch_modes()
        and not function_modes()
        and transform() is None
        and tracer() is None
        and forward_ad._current_level < 0
    )


def is_free_of_modes() -> bool:
    """Returns whether no TorchDispatchMode, TorchFunctionMode or level of forward-mode AD is active; False if torch lacks a function that
    says so. With a True of `metadata_guard` this is `is_dispatcher_idle`, in less time."""
    if STATE is None:
        return False
    return not STATE.dispatch_modes() and not STATE.function_modes() and forward_ad._current_level < 0


def is_transformed() -> bool:
    """Returns whether a torch.func transform is active; True if torch lacks the function that says so."""
    return STATE is None or STATE.transform() is not None


def is_intercepted() -> bool:
    """Returns whether a TorchDispatchMode is active; True if torch lacks the function that says so."""
    return STATE is None or STATE.dispatch_modes() > 0


def probe_guards(torch_c: Any) -> Any:
    """Returns the class of dynamo's metadata guards from torch's extension module `torch_c`, or None if it lacks one."""
    dynamo = getattr(torch_c, "_dynamo", None)
    return getattr(getattr(dynamo, "guards", None), "TensorGuards", None)


GUARDS = probe_guards(torch._C)


def metadata_guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Returns a function of as many tensors that says, in one call of C++, whether each is like that of `tensors`: in class, dispatch
    keys, dtype, device, ``requires_grad``, shape and strides. None if torch lacks it.

    Dispatch keys are those that the dispatcher would use. So if `is_dispatcher_idle` now, the function returns False within transforms and
    tracers. Of modes it shows only some (`is_free_of_modes`).

    A nested tensor (``is_nested``) ends the process: whoever calls the function excludes it. Other objects are not like a tensor."""
    if GUARDS is None:
        return None
    is_like: Callable[..., bool] = GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return is_like


def probe_allocators(torch_c: Any) -> dict[str, Callable[..., Tensor]]:
    """Returns the functions of the code that inductor generates that allocate a tensor of a size, strides and a dtype on the current device,
    below the dispatcher, by device type."""
    guards = getattr(getattr(torch_c, "_dynamo", None), "guards", None)
    found = {name: getattr(guards, f"_empty_strided_{name}", None) for name in ("cpu", "cuda")}
    return {name: make for name, make in found.items() if make is not None}


ALLOCATORS = probe_allocators(torch._C)


def allocator(size: Sequence[int], dtype: torch.dtype, device_type: str) -> Callable[[], Tensor]:
    """Returns a function that allocates an uninitialised contiguous tensor of this size on the current device of a type. While it runs, the
    dispatcher must be idle, and `is_deterministic` False: the function does not fill memory."""
    size = torch.Size(size)
    strides = torch.empty(size, device="meta").stride()
    make = ALLOCATORS.get(device_type)
    if make is None:
        return partial(torch.empty_strided, size, strides, dtype=dtype, device=device_type)
    return partial(make, tuple(size), strides, dtype)
