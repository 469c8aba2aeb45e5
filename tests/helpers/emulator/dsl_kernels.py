"""Small functions of the CuTe DSL, compiled for the tests."""

import functools
import tempfile
from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.experimental import primitives as prims
from cutlass.experimental.cuda import TensorMap, create_tensor_map_tiled
from cutlass.utils import SmemAllocator

from kda_cute import get_kernel, kernels_made_by
from kda_cute.device.division import divide, reciprocal
from kda_cute.testing.emulation import load

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


@cute.jit
def ranks_of_either(y: cute.Tensor, stream):
    """As `ranks`; the launch prefers clusters of four."""
    _rank(y).launch(
        grid=(y.shape[0], 1, 1),
        block=(32, 1, 1),
        cluster=(4, 1, 1),
        fallback_cluster=(2, 1, 1),
        stream=stream,
    )


def compiled_ranks(arch, function=ranks):
    return _compiled_over_vectors(function, arch, Float32)


def _compiled_over_vectors(function, arch, *dtypes):
    """Compiles a function of a vector of each of the dtypes and of the stream."""
    vectors = [make_fake_compact_tensor(dtype, (cute.sym_int(),)) for dtype in dtypes]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --dump-dir {folder}"
        return cute.compile(function, *vectors, stream, options=options)


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
def _divide(x: cute.Tensor, divisors: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    y[i] = divide(x[i], *reciprocal(divisors[i]))


@cute.jit
def divide_all(x: cute.Tensor, divisors: cute.Tensor, y: cute.Tensor, stream):
    """y = x // divisors. The length is a multiple of `THREADS`."""
    grid = (x.shape[0] // THREADS, 1, 1)
    _divide(x, divisors, y).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


def compiled_division(arch):
    return _compiled_over_vectors(divide_all, arch, Int32, Int32, Int32)


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


@dataclass(frozen=True)
class MapTilesConfig:
    """``kind``: the swizzle of the tiles, of ``SmemLayoutAtomKind``."""

    kind: str


class MapTiles:
    """y = 1.5 x + 1. Tensor maps load each tile into shared memory and store it from there."""

    def __init__(self, config: MapTilesConfig):
        self.swizzle = getattr(warpgroup.SmemLayoutAtomKind, config.kind)

    def fake_args(self):
        shape = (cute.sym_int(), cute.sym_int(divisibility=8))
        x, y = (
            make_fake_compact_tensor(BFloat16, shape, stride_order=(1, 0), assumed_align=16) for _ in range(2)
        )
        return x, y, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(self.swizzle, BFloat16), TILE, (0, 1))
        load, t_x = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, TILE)
        store, t_y = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, layout, TILE)
        _through_shared(load, t_x, store, t_y, layout).launch(
            grid=(cute.ceil_div(x.shape[0], TILE[0]), cute.ceil_div(x.shape[1], TILE[1]), 1),
            block=(THREADS, 1, 1), stream=stream,
        )  # fmt: skip


def map_tiles(arch, kind):
    """Returns the emulated function of `MapTiles`. The DSL compiles it if the cache folder lacks it."""
    with kernels_made_by(load):
        return get_kernel(MapTiles, MapTilesConfig(kind), arch)


@cute.kernel
def _load_tile(tensor_map: cutlass.GridConstant[TensorMap], y: cute.Tensor):
    """Loads one tile of `TILE` elements of 2 bytes through a map that the driver encodes."""
    thread, _, _ = cute.arch.thread_idx()
    count: cutlass.Constexpr[int] = TILE[0] * TILE[1]
    tile = cutlass.Array(cutlass.Float16, count, space=cutlass.AddressSpace.smem, alignment=128)
    barrier = cutlass.Array(Int64, 1, space=cutlass.AddressSpace.smem, alignment=8)
    if thread == 0:
        prims.mbarrier_init(barrier, 1)
    prims.fence_mbarrier_init()
    prims.barrier_cta_sync(0)
    if thread == 0:
        prims.mbarrier_arrive_expect_tx(barrier, tensor_map.global_tx_bytes())
        prims.cp_async_bulk_tensor_shared_cta_global(tile, tensor_map.get_ptr(), (0, 0), barrier)
    while not prims.mbarrier_try_wait_parity(barrier, 0):
        pass
    for n in cutlass.range_constexpr(count // THREADS):
        i = n * THREADS + thread
        y[i] = (tile.data_ptr() + i).load()


@cute.jit
def load_tile(x: cute.Tensor, y: cute.Tensor):
    """y = the first tile of x."""
    tensor_map = create_tensor_map_tiled(
        global_address=x.iterator.toint(), dtype=cutlass.Float16, global_dims=[x.shape[1], x.shape[0]],
        global_strides=[x.shape[1] * 2 // 16], box_dims=[TILE[1], TILE[0]],
    )  # fmt: skip
    _load_tile(tensor_map, y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


def compiled_load_tile(arch):
    matrix = make_fake_compact_tensor(
        cutlass.Float16, (cute.sym_int(), cute.sym_int()), stride_order=(1, 0), assumed_align=16
    )
    vector = make_fake_compact_tensor(cutlass.Float16, (TILE[0] * TILE[1],))
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --dump-dir {folder}"
        return cute.compile(load_tile, matrix, vector, options=options)


@cute.kernel
def _copy(x: cute.Tensor, y: cute.Tensor, n: Int32):
    """y[:n] = x[:n]."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < n:
        y[thread] = x[thread]


@cute.jit
def copy_pair(pairs: tuple, counts: tuple, stream):
    """Copies the first counts[i] elements of pairs[i][0] to pairs[i][1]."""
    for i in cutlass.range_constexpr(2):
        _copy(pairs[i][0], pairs[i][1], counts[i]).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def compiled_copy_pair(dtype):
    vector = lambda: make_fake_compact_tensor(dtype, (cute.sym_int(),))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    pairs = ((vector(), vector()), (vector(), vector()))
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
        return cute.compile(copy_pair, pairs, (Int32(0), Int32(0)), stream, options=options)
