"""Small kernels for the tests of ``kda_cute``: one without problems, one that spills, one that does not compile."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

WARP = 32


@dataclass(frozen=True)
class RmsConfig:
    """``dim``: K, a multiple of 32. ``weighted``: whether the kernel has a weight."""

    dim: int = 128
    weighted: bool = True


class RmsNorm:
    """Computes y[t, k] = x[t, k] / sqrt(mean_k x[t, k]^2 + eps) (* w[k]).

    x, y: [T, K] bfloat16; w: [K] float32 or None. A warp computes a row, a CTA four rows. T is dynamic; K and the presence of
    w are not.
    """

    def __init__(self, config: RmsConfig):
        self.config = config
        self.rows = 4

    def fake_args(self):
        dim, rows = self.config.dim, cute.sym_int()
        x, y = (
            make_fake_compact_tensor(cutlass.BFloat16, (rows, dim), stride_order=(1, 0), assumed_align=16)
            for _ in range(2)
        )
        w = (
            make_fake_compact_tensor(cutlass.Float32, (dim,), assumed_align=16)
            if self.config.weighted
            else None
        )
        return x, w, y, cutlass.Float32(0.0), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor | None,
        y: cute.Tensor,
        eps: cutlass.Float32,
        stream,
    ):
        grid = [cute.ceil_div(x.shape[0], self.rows), 1, 1]
        self.kernel(x, w, y, eps).launch(grid=grid, block=[WARP * self.rows, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, w: cute.Tensor | None, y: cute.Tensor, eps: cutlass.Float32):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        lane = tidx % WARP
        row = bidx * self.rows + tidx // WARP
        per_lane = cutlass.const_expr(self.config.dim // WARP)
        if row < x.shape[0]:
            values = cute.make_rmem_tensor((per_lane,), cutlass.Float32)
            total = cutlass.Float32(0.0)
            for i in cutlass.range_constexpr(per_lane):
                values[i] = x[row, lane + WARP * i].to(cutlass.Float32)
                total += values[i] * values[i]
            total = cute.arch.warp_reduction_sum(total)
            scale = cute.math.rsqrt(total / self.config.dim + eps)
            for i in cutlass.range_constexpr(per_lane):
                scaled = values[i] * scale
                if cutlass.const_expr(self.config.weighted):
                    scaled = scaled * w[lane + WARP * i]
                y[row, lane + WARP * i] = scaled.to(cutlass.BFloat16)


@dataclass(frozen=True)
class SpillConfig:
    """``values``: numbers that a thread keeps. A thread has at most 255 registers."""

    values: int = 512


class Spill:
    """Each thread reads more numbers than it has registers, synchronises, and stores them in another order."""

    def __init__(self, config: SpillConfig):
        self.config = config

    def fake_args(self):
        x, y = (make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),)) for _ in range(2))
        return x, y, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=[1, 1, 1], block=[256, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        count = cutlass.const_expr(self.config.values)
        values = cute.make_rmem_tensor((count,), cutlass.Float32)
        for i in cutlass.range(count, unroll_full=True):
            values[i] = x[tidx + 256 * i]
        cute.arch.sync_threads()
        for i in cutlass.range(count, unroll_full=True):
            y[tidx + 256 * i] = values[count - 1 - i]


class Broken(Spill):
    """Does not compile: the kernel uses a name that does not exist."""

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        y[0] = x[no_such_name]  # noqa: F821


def sound():
    return [
        (RmsNorm, RmsConfig(dim=dim, weighted=weighted)) for dim in (64, 128) for weighted in (True, False)
    ]


def spilling():
    return [(RmsNorm, RmsConfig()), (Spill, SpillConfig())]


def offered(arch):
    """Returns the variants of a backend of these kernels, one of them twice."""
    return [*sound(), sound()[0]]


def offered_and_broken(arch):
    return [*sound()[:2], (Broken, SpillConfig())]


def many(arch):
    """Returns more variants than can be compiled before the test interrupts."""
    return [(RmsNorm, RmsConfig(dim=32 * n)) for n in range(1, 65)]
