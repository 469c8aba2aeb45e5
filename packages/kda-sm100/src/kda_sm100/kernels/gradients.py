"""The gradients kernel (`kda_cute.device.gradients`) with tcgen05 for the products between chunks.

One thread issues the products of the CTA. They have M = 64 tokens, so that the 16 tokens of block w lie in lanes 32w on, or 32w + 16 on:
those lanes that both warps of the block may access. In tensor memory:

======= ======= ================================== ==================================
columns         lanes 32w to 32w + 15              lanes 32w + 16 to 32w + 31
======= ======= ================================== ==================================
d       64      dO R^T                             dX R^T
rows    128     dO S^T                             dX S^T
across  128     R dS'^T
======= ======= ================================== ==================================

A load ``16x256b`` gives a thread the elements that an accumulator of ``mma.sync`` has. The products overwrite what those of the step
before have left; the barrier of all compute warps between gates and products orders this.
"""

from types import SimpleNamespace

from cutlass import Boolean, Float32, Int32, Int64, cute

from kda_cute.device import gradients, ptx
from kda_cute.device.gradients.memory import CHUNK, COMPUTE, HALF, OFFSETS, TILES
from kda_cute.gradients import GradientsConfig
from kda_cute.records import HEAD_DIM
from kda_sm100.arguments import GRADIENTS
from kda_sm100.kernels import tensor
from kda_sm100.kernels.tensor import Operand

#: First columns in tensor memory.
D, ROWS, ACROSS = 0, CHUNK, CHUNK + HEAD_DIM
SECOND = 16 << 16  # from the first 16 lanes of a warp to the others
PRODUCTS = ("d", "rows", "across")  # each has an mbarrier

# Images: of tokens and of channels.
TOKENS, CHANNELS = Operand(CHUNK, HEAD_DIM), Operand(HEAD_DIM, HEAD_DIM)


class GradientsKernel(gradients.GradientsKernel):
    """Takes grad_q and `GradientsArguments`."""

    interface = GRADIENTS
    tensor_columns = SimpleNamespace(used=ACROSS + HEAD_DIM)

    def __init__(self, config: GradientsConfig):
        super().__init__(config)
        self.own = (
            self.shared_bytes
        )  # offset of the mbarriers of the products and of the address of tensor memory
        self.shared_bytes += 8 * len(PRODUCTS) + 8

    def between_chunks(self, shared, place, phase):
        return Products(shared, self.words(shared), place, phase)

    def words(self, shared):
        """Returns the pointers to the mbarriers of the products, and to the address of tensor memory."""
        first = cute.recast_ptr(shared + self.own, dtype=Int64)
        found = {name: first + n for n, name in enumerate(PRODUCTS)}
        return SimpleNamespace(**found, memory=cute.recast_ptr(first + len(PRODUCTS), dtype=Int32))

    @cute.jit
    def prepare(self, shared, thread: Int32):
        words = self.words(shared)
        if thread == 0:
            for name in PRODUCTS:
                cute.arch.mbarrier_init(getattr(words, name), 1)
        if thread < 32:
            tensor.allocate(words.memory)
            tensor.fence_before()

    def begin(self):
        tensor.fence_after()

    @cute.jit
    def finish(self, shared, thread: Int32):
        tensor.fence_before()
        cute.arch.sync_threads()
        if thread < 32:
            tensor.fence_after()
            tensor.free(self.words(shared).memory)


class Products(gradients.BetweenChunks):
    """Of a step. A warp has the block of tokens and the half of the channels of its ``place``."""

    def __init__(self, shared, words, place, phase):
        self.place, self.words, self.phase = place, words, phase
        self.base = ptx.load_shared(Int32(words.memory.toint()), Int32)
        self.images = {name: Int32((shared + at).toint()) for name, at in OFFSETS.items()}
        self.issues = place.thread < 32
        self.lanes = self.base + (place.block * 32 << 16)
        self.columns = place.half * HALF

    def start_rows(self):
        self.issue_rows(self.issues)
        self.accumulators = [cute.make_rmem_tensor((4 * TILES,), Float32) for _ in range(3)]
        return self.accumulators

    @cute.jit
    def issue_rows(self, issues: Boolean):
        if issues:
            tensor.fence_after()
            with cute.arch.elect_one():
                for rows, lanes in (("grad_o", 0), ("grad_v", SECOND)):
                    self.product(D + lanes, rows, TOKENS, "residual")
                tensor.commit(self.words.d)
                for rows, lanes in (("grad_o", 0), ("grad_v", SECOND)):
                    self.product(ROWS + lanes, rows, CHANNELS, "state")
                tensor.commit(self.words.rows)

    def product(self, d, a, kind, b):
        """Issues ``a b^T``. ``d``: its place. ``a``, ``b``: regions. ``kind``: the image of ``b``."""
        tensor.product_of_images(self.base + d, TOKENS, self.images[a], kind, self.images[b], add=False)

    def finish_d(self):
        self.wait(self.words.d)
        self.load(self.accumulators[0], self.lanes + D + self.place.half * SECOND)

    def finish_rows(self):
        self.wait(self.words.rows)
        for acc, lanes in zip(self.accumulators[1:], (0, SECOND), strict=True):
            self.load(acc, self.lanes + ROWS + lanes + self.columns)

    def start_across(self):
        self.issue_across(self.issues)
        self.across = cute.make_rmem_tensor((4 * TILES,), Float32)
        return self.across

    @cute.jit
    def issue_across(self, issues: Boolean):
        if issues:
            with cute.arch.elect_one():
                self.product(ACROSS, "residual", CHANNELS, "grad_state")
                tensor.commit(self.words.across)

    def finish_across(self):
        self.wait(self.words.across)
        self.load(self.across, self.lanes + ACROSS + self.columns)

    def wait(self, barrier):
        """Waits until products are done."""
        cute.arch.mbarrier_wait(barrier, self.phase)
        tensor.fence_after()

    def load(self, acc, address):
        """Loads the warp's part of an accumulator, 16 tokens and 64 columns. Products of the next step may overwrite it after a barrier."""
        for n, value in enumerate(tensor.load_half(address, HALF)):
            acc[n] = value
        tensor.fence_before()


assert COMPUTE == 2 * 128  # the compute warps of a half have the lanes of all blocks
