"""The arguments of a kernel as one struct, which the host fills and the device reads by name.

A kernel module declares a ``NamedTuple`` whose fields are DSL scalars: ``Int64`` addresses of tensors (0: the tensor is
absent), ``Int32`` numbers and ``Float32`` factors.

.. code-block:: python

    class ScaleArguments(NamedTuple):
        x: Int64  # [n] fp32
        n: Int32

    class ScaleKernel:
        def fake_args(self):
            return arguments.fake_args(ScaleArguments, BFloat16)

        @cute.jit
        def __call__(self, tensor: cute.Tensor, *values):
            *values, stream = values
            x = ScaleArguments(*values)
            self.kernel(tuple(values)).launch(...)

    get_kernel(ScaleKernel, config, arch)(tensor, *arguments.pack(ScaleArguments, x=x, n=8))

The host passes the values to the compiled function one by one, because this costs it least. Only the declaration states their
order. The launcher takes the device, and with it torch's current stream, from the leading tensor.

Importing this module imports neither torch nor the DSL.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NewType, TypeVar, get_type_hints

Struct = TypeVar("Struct", bound=tuple)

#: A global memory address; 0 for an absent tensor. On the device a 64-bit integer.
Address = NewType("Address", int)

#: A 64-bit number.
Long = NewType("Long", int)


def device_struct(name: str, *declared: type[tuple]) -> type[tuple]:
    """Returns a ``NamedTuple`` of DSL scalars with the fields of some ``NamedTuple`` classes, whose types are `Address`, `Long`, ``int``
    (32 bits) and ``float`` (fp32), or DSL scalars already."""
    from cutlass import Float32, Int32, Int64

    types = {Address: Int64, Long: Int64, int: Int32, float: Float32}
    fields = [field for struct in declared for field in get_type_hints(struct).items()]
    return NamedTuple(name, [(field, types.get(kind, kind)) for field, kind in fields])  # type: ignore[misc]


def address(tensor: Any) -> int:
    """Returns the address of a torch tensor, or 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def pack(struct: type[Struct], **given: Any) -> Struct:
    """Returns ``struct`` filled with the values of these names.

    A tensor stands for its address. A tensor that is None or not given is 0; numbers and factors are required.

    Raises:
        TypeError: the struct does not have a given name, or a number is missing.
    """
    from cutlass import Int64

    absent = {name: 0 for name, kind in struct.__annotations__.items() if kind is Int64}
    values = {name: x if isinstance(x, int | float) else address(x) for name, x in given.items()}
    return struct(**absent | values)


def fake_args(struct: type[tuple], dtype: Any) -> tuple[Any, ...]:
    """Returns the fake arguments for compiling a kernel: a contiguous tensor of rank 4 in ``dtype``, aligned to 16 bytes and of
    any size; the values of ``struct``; the current stream."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    shape = tuple(cute.sym_int() for _ in range(4))
    tensor = make_fake_compact_tensor(dtype, shape, stride_order=(3, 2, 1, 0), assumed_align=16)
    values = [kind(0) for kind in struct.__annotations__.values()]
    return (tensor, *values, make_fake_stream(use_tvm_ffi_env_stream=True))
