"""The product of one tile by tcgen05, compiled by the CuTe DSL."""

from dataclasses import dataclass

import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.utils import SmemAllocator

from kda_cute import get_kernel, kernels_made_by
from kda_cute.testing.emulation import load

M, THREADS = 128, 128


@dataclass(frozen=True)
class GemmConfig:
    """``majors``: "K" or "MN", the majors of x and y in shared memory. ``copy``: the shape of ``tcgen05.ld`` and ``tcgen05.st``."""

    n: int
    k: int
    majors: tuple[str, str]
    copy: str = "32x32b"
    a_in_tmem: bool = False
    m: int = M


class Gemm:
    """z [m, n] += x [m, k] y [n, k]^T; z is fp32, x and y are bf16.

    z goes to tensor memory and back by ``tcgen05.st`` and ``tcgen05.ld`` of the shape ``copy``, such as "16x256b". With ``a_in_tmem``, so
    does x, which is then operand A in tensor memory. The fences of tcgen05 around the barriers are left out: only the emulator runs it."""

    def __init__(self, config: GemmConfig):
        self.m, self.n, self.k = config.m, config.n, config.k
        self.majors = [getattr(OperandMajorMode, major) for major in config.majors]
        self.source = tcgen05.OperandSource.TMEM if config.a_in_tmem else tcgen05.OperandSource.SMEM
        self.load, self.store = (getattr(tcgen05, f"{kind}{config.copy}Op") for kind in ("Ld", "St"))
        self.repeat = tcgen05.Repetition.x2

    def fake_args(self):
        fake = lambda rows, columns, kind: make_fake_compact_tensor(
            kind, (rows, columns), stride_order=(1, 0), assumed_align=16
        )
        x, y = fake(self.m, self.k, BFloat16), fake(self.n, self.k, BFloat16)
        return x, y, fake(self.m, self.n, Float32), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, stream):
        shape = (self.m, self.n, self.k)
        mma = sm100.make_trivial_tiled_mma(
            BFloat16, *self.majors, Float32, tcgen05.CtaGroup.ONE, shape[:2], self.source
        )
        a, b = (
            make(mma, shape, BFloat16, 1) for make in (sm100.make_smem_layout_a, sm100.make_smem_layout_b)
        )
        self.kernel(mma, x, y, z, a, b).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, mma: cute.TiledMma, x: cute.Tensor, y: cute.Tensor, z: cute.Tensor,
        a: cute.ComposedLayout, b: cute.ComposedLayout,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = SmemAllocator()
        barrier, place = memory.allocate_array(Int64, 1), memory.allocate_array(Int32, 1)
        s_a = memory.allocate_tensor(BFloat16, a.outer, byte_alignment=1024, swizzle=a.inner)
        s_b = memory.allocate_tensor(BFloat16, b.outer, byte_alignment=1024, swizzle=b.inner)
        if warp == 0:
            cute.arch.alloc_tmem(512, place)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        self.fill(s_a, x, self.m, thread)
        self.fill(s_b, y, self.n, thread)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, place)
        t_a, t_b = mma.make_fragment_A(s_a), mma.make_fragment_B(s_b)
        if cutlass.const_expr(self.source is tcgen05.OperandSource.TMEM):
            in_tmem = cute.recast_ptr(pointer + self.n, dtype=BFloat16)
            t_a = cute.make_tensor(in_tmem, mma.make_fragment_A(cute.make_tensor(in_tmem, a.outer)).layout)
        acc = cute.make_tensor(pointer, mma.make_fragment_C(mma.partition_shape_C((self.m, self.n))).layout)
        flat = acc[((None, None), 0, 0)]
        self.copy_in(z, flat, thread)
        if cutlass.const_expr(self.source is tcgen05.OperandSource.TMEM):
            words = cute.composition(flat.layout, cute.make_layout((self.m, self.k // 2)))
            self.copy_in(cute.recast_tensor(x, Float32), cute.make_tensor(pointer + self.n, words), thread)
        cute.arch.fence_view_async_tmem_store()
        cute.arch.sync_threads()
        if warp == 0:
            for block in cutlass.range_constexpr(self.k // 16):
                mma.set(tcgen05.Field.ACCUMULATE, True)
                cute.gemm(mma, acc, t_a[None, None, block, 0], t_b[None, None, block, 0], acc)
            with cute.arch.elect_one():
                tcgen05.commit(barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        load = tcgen05.make_tmem_copy(cute.make_copy_atom(self.load(self.repeat), Float32), flat)
        mine = load.get_slice(thread)
        g_z = mine.partition_D(z)
        r_z = cute.make_rmem_tensor(g_z.shape, Float32)
        cute.copy(load, mine.partition_S(flat), r_z)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(r_z, g_z)
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(pointer, 512)

    @cute.jit
    def copy_in(self, x: cute.Tensor, to: cute.Tensor, thread: Int32):
        """Copies words from global to tensor memory."""
        store = tcgen05.make_tmem_copy(cute.make_copy_atom(self.store(self.repeat), Float32), to)
        mine = store.get_slice(thread)
        g_x = mine.partition_S(x)
        r_x = cute.make_rmem_tensor(g_x.shape, Float32)
        cute.autovec_copy(g_x, r_x)
        cute.copy(store, r_x, mine.partition_D(to))

    @cute.jit
    def fill(self, tile: cute.Tensor, x: cute.Tensor, rows: cutlass.Constexpr, thread: Int32):
        """Copies x into the tile. A thread copies two rows by two columns at a time, because no two threads may share a word."""
        for n in cutlass.range_constexpr(-(-rows * self.k // (4 * THREADS))):
            j = n * THREADS + thread
            if j < rows * self.k // 4:
                for e in cutlass.range_constexpr(4):
                    row, column = j % (rows // 2) * 2 + e // 2, j // (rows // 2) * 2 + e % 2
                    tile[(row, column % 16), 0, column // 16, 0] = x[row, column]


def compiled(*config):
    """Returns the emulated function of a `Gemm`. The DSL compiles it if the cache folder lacks it."""
    with kernels_made_by(load):
        return get_kernel(Gemm, GemmConfig(*config), "sm_100a")
