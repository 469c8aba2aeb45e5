"""Small functions of the CuTe DSL, compiled for the tests."""

import functools
import tempfile

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

THREADS = 64


@cute.kernel
def _scale(x: cute.Tensor, y: cute.Tensor, factor: Float32, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < n:
        y[i] = x[i] * factor


@cute.kernel
def _add(x: cute.Tensor, y: cute.Tensor):
    """Past the end of x and y where their length is no multiple of `THREADS`."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    y[i] = y[i] + x[i]


@cute.jit
def scale_and_add(x: cute.Tensor, y: cute.Tensor, factor: Float32, n: Int32, stream):
    """y = factor * x, then y += x, in two launches."""
    grid = (cute.ceil_div(n, THREADS), 1, 1)
    _scale(x, y, factor, n).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)
    _add(x, y).launch(grid=grid, block=(THREADS, 1, 1), smem=1024, cooperative=True, stream=stream)


@functools.cache
def compiled(arch, options="--keep-ptx"):
    vector = lambda: make_fake_compact_tensor(Float32, (cute.sym_int(),))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        return cute.compile(
            scale_and_add, vector(), vector(), Float32(0), Int32(0), stream,
            options=f"--enable-tvm-ffi --gpu-arch {arch} {options} --dump-dir {folder}",
        )  # fmt: skip
