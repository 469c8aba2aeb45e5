"""The arguments of a kernel as one struct, which the host fills and the device reads by name.

A module of host code declares a ``NamedTuple``. The types of its fields are those of the kernel's parameters:

========= =========================================== ==============
type      value                                       on the device
========= =========================================== ==============
`Address` address of a tensor; 0: it is absent         64-bit integer
`Long`    a number                                     64-bit integer
int       a number                                     32-bit integer
float     a factor                                     fp32
========= =========================================== ==============

.. code-block:: python

    class ScaleArguments(NamedTuple):
        x: Address  # [n] fp32
        n: int

    SCALE = KernelInterface("package.kernels.scale:ScaleKernel", lambda config: ScaleArguments, lambda config, x: (x.n, 1, 1))

    get_kernel(SCALE, config, arch)(tensor, *arguments.pack(ScaleArguments, x=x, n=8))

`kda_cute.interface` has the rest of the interface, `kda_cute.device.kernel` the base of the kernel class.

The host passes the values to the kernel's callable one by one, because this costs it least. Only the declaration states their
order: what changes from call to call comes first, so that `bound` can fix the rest. The callable takes the device, and with it torch's
current stream, from the leading tensor.

Importing this module imports neither torch nor the DSL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NewType, TypeVar, get_type_hints

Struct = TypeVar("Struct", bound=tuple)

#: A global memory address; 0 for an absent tensor.
Address = NewType("Address", int)

#: A 64-bit number.
Long = NewType("Long", int)


def address(tensor: Any) -> int:
    """Returns the address of a torch tensor, or 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def types(struct: type[tuple]) -> dict[str, Any]:
    """Returns name and type of every field of a struct, in order."""
    return get_type_hints(struct)


def joined(name: str, *structs: type[tuple]) -> Any:
    """Returns a ``NamedTuple`` that has the fields of several ones, in order."""
    fields = [field for struct in structs for field in types(struct).items()]
    return NamedTuple(name, fields)


def pack(struct: type[Struct], **given: Any) -> Struct:
    """Returns ``struct`` filled with the values of these names.

    A tensor stands for its address. An address that is None or not given is 0; numbers and factors are required.

    Raises:
        TypeError: the struct does not have a given name, or a number is missing.
    """
    absent = {name: 0 for name, kind in types(struct).items() if kind is Address}
    values = {name: x if isinstance(x, int | float) else address(x) for name, x in given.items()}
    return struct(**absent | values)


def bound(kernel: Callable[..., Any], *last: Any) -> Callable[..., Any]:
    """Returns a compiled kernel with the last values of its struct fixed: it takes the tensor and a tuple of the values before them.

    A `kda_cute.store.launcher.Launcher` packs the fixed values once, and its grid must follow from them. Any other callable, as that of
    an emulator, gets all values in every call.
    """
    if (make := getattr(kernel, "bound", None)) is not None:
        return make(*last)
    return lambda tensor, first: kernel(tensor, *first, *last)


def fake_args(struct: type[tuple], dtype: Any) -> tuple[Any, ...]:
    """Returns the fake arguments for compiling a kernel: a contiguous tensor of rank 4 in ``dtype``, aligned to 16 bytes and of
    any size; the values of ``struct``; the current stream."""
    from cutlass import Float32, Int32, Int64, cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    of_the_dsl: dict[Any, Any] = {Address: Int64, Long: Int64, int: Int32, float: Float32}
    shape = tuple(cute.sym_int() for _ in range(4))
    tensor = make_fake_compact_tensor(dtype, shape, stride_order=(3, 2, 1, 0), assumed_align=16)
    values = [of_the_dsl[kind](0) for kind in types(struct).values()]
    return (tensor, *values, make_fake_stream(use_tvm_ffi_env_stream=True))
