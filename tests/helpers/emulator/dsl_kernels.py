"""Small functions of the CuTe DSL, compiled for the tests."""

import functools
import tempfile

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.utils import SmemAllocator

THREADS = 64
TILE = (32, 64)


@cute.kernel
def _scale(x: cute.Tensor, y: cute.Tensor, factor: Float32, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < n:
        y[i] = x[i] * factor


@cute.kernel
def _add(x: cute.Tensor, y: cute.Tensor):
    """Accesses past the end of x and y unless their length is a multiple of `THREADS`."""
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


@cute.kernel
def _rank(y: cute.Tensor):
    """y[block] = rank of the block in its cluster."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if thread == 0:
        y[block] = Float32(cute.arch.block_idx_in_cluster())


@cute.jit
def ranks(y: cute.Tensor, stream):
    """Writes the ranks of the CTAs of clusters of two."""
    _rank(y).launch(grid=(y.shape[0], 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), stream=stream)


def compiled_ranks(arch):
    vector = make_fake_compact_tensor(Float32, (cute.sym_int(),))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --dump-dir {folder}"
        return cute.compile(ranks, vector, stream, options=options)


@functools.cache
def compiled(arch, options="--keep-ptx"):
    vector = lambda: make_fake_compact_tensor(Float32, (cute.sym_int(),))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        return cute.compile(
            scale_and_add, vector(), vector(), Float32(0), Int32(0), stream,
            options=f"--enable-tvm-ffi --gpu-arch {arch} {options} --dump-dir {folder}",
        )  # fmt: skip


@cute.kernel
def _through_shared(
    load: cute.CopyAtom, x: cute.Tensor, store: cute.CopyAtom, y: cute.Tensor, layout: cute.ComposedLayout
):
    thread, _, _ = cute.arch.thread_idx()
    row, column, _ = cute.arch.block_idx()
    memory = SmemAllocator()
    barrier = memory.allocate_array(Int64, 1)
    tile = memory.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    one, flat = cute.make_layout(1), cute.group_modes(tile, 0, 2)
    g_x = cute.group_modes(cute.local_tile(x, TILE, (row, column)), 0, 2)
    g_y = cute.group_modes(cute.local_tile(y, TILE, (row, column)), 0, 2)
    s_x, g_x = cpasync.tma_partition(load, 0, one, flat, g_x)
    s_y, g_y = cpasync.tma_partition(store, 0, one, flat, g_y)
    if thread < 32:
        cpasync.prefetch_descriptor(load)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE[0] * TILE[1] * 2)
        cute.copy(load, g_x, s_x, tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)
    for n in cutlass.range_constexpr(TILE[0] * TILE[1] // THREADS):
        # One thread takes two neighbours: the race check works on whole words.
        j = (n // 2 * THREADS + thread) * 2 + n % 2
        i = j // TILE[1], j % TILE[1]
        tile[i] = BFloat16(Float32(tile[i]) * Float32(1.5) + Float32(1.0))
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    if thread < 32:
        cute.copy(store, s_y, g_y)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def map_tiles(x: cute.Tensor, y: cute.Tensor, kind: cutlass.Constexpr, stream):
    """y = 1.5 x + 1. Tensor maps load each tile into shared memory and store it from there."""
    layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, BFloat16), TILE, (0, 1))
    load, t_x = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, TILE)
    store, t_y = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, layout, TILE)
    _through_shared(load, t_x, store, t_y, layout).launch(
        grid=(cute.ceil_div(x.shape[0], TILE[0]), cute.ceil_div(x.shape[1], TILE[1]), 1),
        block=(THREADS, 1, 1), stream=stream,
    )  # fmt: skip


@functools.cache
def compiled_map_tiles(arch, kind):
    def matrix():
        shape = (cute.sym_int(), cute.sym_int(divisibility=8))
        return make_fake_compact_tensor(BFloat16, shape, stride_order=(1, 0), assumed_align=16)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        return cute.compile(
            map_tiles, matrix(), matrix(), getattr(warpgroup.SmemLayoutAtomKind, kind), stream,
            options=f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --dump-dir {folder}",
        )  # fmt: skip
