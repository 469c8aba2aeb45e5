"""A kernel that multiplies the states of slots in place: it reads and writes what one decode step must read and write, and computes nothing.

Its time is the floor that decode kernels are compared with. Importing this module imports the CuTe DSL.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from kda_cute.arguments import Address, Long
from kda_cute.device import ptx
from kda_cute.device.kernel import Kernel
from kda_cute.interface import KernelInterface

THREADS = 128


class Arguments(NamedTuple):
    """Arguments after the leading tensor, which determines the device and the stream."""

    states: Address  # [slots, bytes of a slot]
    slots: Address  # [N] int32
    bytes: Long  # of a slot, a multiple of `RmwKernel.bytes`
    N: int
    factor: float


@dataclass(frozen=True)
class RmwConfig:
    """Variant. ``loads``: 16-byte loads of a thread, all issued before the first store. ``state_dtype``: float32 or bfloat16."""

    loads: int = 8
    state_dtype: str = "float32"


#: All variants. Neither number of loads is the faster one everywhere.
RMWS = tuple(RmwConfig(loads, dtype) for loads in (4, 8) for dtype in ("float32", "bfloat16"))


#: The interface of `RmwKernel`.
RMW = KernelInterface(
    "benchmarks.rmw:RmwKernel",
    lambda config: Arguments,
    lambda config, x: (x.N * Int32(x.bytes // (config.loads * THREADS * 16)), 1, 1),
)


class RmwKernel(Kernel):
    """Takes a tensor and the values of `Arguments`. Multiplies all values of the slots by the factor."""

    spill_allowance = 0
    interface = RMW
    threads = THREADS
    shared_bytes = 0

    def __init__(self, config: RmwConfig):
        self.config = config
        self.bytes = config.loads * THREADS * 16  # of a CTA

    @cute.kernel
    def kernel(self, values: tuple):
        x = Arguments(*values)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        groups = Int32(x.bytes // self.bytes)
        slot = ptx.load_global_i32(x.slots + Int64(block // groups) * 4, Boolean(True))
        first = x.states + Int64(slot) * x.bytes + Int64(block % groups) * self.bytes + thread * 16
        narrow = cutlass.const_expr(self.config.state_dtype == "bfloat16")
        kind = Int32 if narrow else Float32
        places = [first + i * (THREADS * 16) for i in range(self.config.loads)]
        loaded = [ptx.load_global_streaming_x4(at, Boolean(True), kind) for at in places]
        for at, values_of_16_bytes in zip(places, loaded, strict=True):
            ptx.store_global_streaming_x4(at, [self.product(y, x.factor) for y in values_of_16_bytes])

    def product(self, y, factor):
        """Returns 4 bytes of a state, one fp32 or two bf16, multiplied by the factor."""
        if self.config.state_dtype == "bfloat16":
            low, high = ptx.unpack_bf16x2(y)
            return ptx.pack_bf16x2(low * factor, high * factor)
        return y * factor


def kernels():
    """Returns all variants, for `kda_cute.jit.ptxas`."""
    return [(RmwKernel, config) for config in RMWS]
