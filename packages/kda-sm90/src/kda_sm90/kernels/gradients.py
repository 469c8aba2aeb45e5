"""The gradients kernel (`kda_cute.device.gradients`) with wgmma for the products between chunks.

An accumulator [64 tokens, 64 channels] of a warpgroup has the layout of ``mma.sync``.
"""

from cutlass import BFloat16, Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from kda_cute.device import gradients
from kda_cute.device.gradients.memory import CHUNK, HALF, OFFSETS
from kda_cute.records import HEAD_DIM
from kda_sm90.interfaces import GRADIENTS


class GradientsKernel(gradients.GradientsKernel):
    """Takes grad_q and `GradientsArguments`."""

    interface = GRADIENTS

    def between_chunks(self, shared, place, phase):
        return Products(shared, place)


class Products(gradients.BetweenChunks):
    """Of a warpgroup: the half of the channels that it computes."""

    def __init__(self, shared, place):
        self.shared, self.half, self.warps = shared, place.half, place.thread & 127
        self.mma = tiled_mma()

    def start_rows(self):
        d, acc_q, acc_k = (self.accumulator() for _ in range(3))
        self.start(d, self.rows("grad_o", 2)[None, None, self.half], self.rows("residual")[None, None, 0])
        self.start(acc_q, self.rows("grad_o")[None, None, 0], self.channels("state"))
        self.start(acc_k, self.rows("grad_v")[None, None, 0], self.channels("state"))
        return d, acc_q, acc_k

    def finish_d(self):
        warpgroup.wait_group(2)

    def finish_rows(self):
        warpgroup.wait_group(0)

    def start_across(self):
        across = self.accumulator()
        self.start(across, self.rows("residual")[None, None, 0], self.channels("grad_state"))
        return across

    def finish_across(self):
        warpgroup.wait_group(0)

    def accumulator(self):
        """Returns an accumulator [64, 64]."""
        return cute.make_rmem_tensor(self.mma.partition_shape_C((CHUNK, HALF)), Float32)

    def rows(self, name, count=1):
        """Returns the tensor [64 tokens, 128, count] of a region."""
        return matrix(self.shared, name, CHUNK, count)

    def channels(self, name):
        """Returns the tensor [64 channels of the half, 128] of a region."""
        return cute.local_tile(
            matrix(self.shared, name, HEAD_DIM)[None, None, 0], (HALF, HEAD_DIM), (self.half, 0)
        )

    def start(self, acc, a, b):
        """Starts ``acc = a b^T`` as one group of wgmmas. ``a`` [64, 128], ``b`` [64, 128]: tensors in shared memory."""
        part = self.mma.get_slice(self.warps)
        tCrA = self.mma.make_fragment_A(part.partition_A(a))
        tCrB = self.mma.make_fragment_B(part.partition_B(b))
        atom = cute.make_mma_atom(self.mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for k in range(HEAD_DIM // 16):
            cute.gemm(atom, acc, tCrA[None, None, k], tCrB[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()


def tiled_mma():
    """Returns the wgmma [64, 64] of two operands in shared memory."""
    return hopper_helpers.make_trivial_tiled_mma(
        BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (CHUNK, HALF)
    )


def matrix(shared: cute.Pointer, name, rows, count=1):
    """Returns the tensor [rows, 128, count] of a region: images in two panels of 64 columns."""
    from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom

    atom = make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, BFloat16)
    layout = cute.tile_to_shape(atom, (rows, HEAD_DIM, count), order=(0, 1, 2))
    pointer = cute.recast_ptr(shared + OFFSETS[name], layout.inner, dtype=BFloat16)
    return cute.make_tensor(pointer, layout.outer)
