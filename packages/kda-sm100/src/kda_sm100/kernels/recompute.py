"""The forward chains of a backward: they compute again what the forward has not saved, without outputs.

`CheckpointChainKernel` runs over a slab, from the state before it, and stores S before every 512 tokens in fp32. It is needed if the
forward has saved nothing. `RecomputeChainKernel` starts from these checkpoints: one CTA for every slot of 512 tokens and value head. It
stores S before every 64 tokens in bf16, and R.
"""

import cutlass
from cutlass import Int32, Int64

from kda_cute.device import ptx, varlen
from kda_sm100.arguments import BACKWARD_CHAINS
from kda_sm100.config import BackwardChainConfig, ChainConfig
from kda_sm100.kernels import workspace
from kda_sm100.kernels.saving import EVERY, StoresCheckpoints, StoresChunks
from kda_sm100.kernels.slabs import SlabChain
from kda_sm100.kernels.state_chain import StateChainKernel


class CheckpointChainKernel(StoresCheckpoints, SlabChain, StateChainKernel):
    """Takes any tensor of the device and `BackwardChainArguments`."""

    interface = BACKWARD_CHAINS["checkpoint"]

    def __init__(self, config: BackwardChainConfig):
        super().__init__(ChainConfig())
        self.config = config

    def save_state(self, args, task, number, c, row, S):
        self.save_checkpoint(args, args.checkpoints, task, task.begin + c, row, S)

    def load_initial(self, args, task, row, S):
        self.enter(args, task, task.begin > 0, row, S)

    def store_final(self, args, task, row, S):
        self.leave(args, task, task.end < task.all, Int64(0), row, S)


class RecomputeChainKernel(StoresChunks, SlabChain, StateChainKernel):
    """Takes any tensor of the device and `BackwardChainArguments`."""

    interface = BACKWARD_CHAINS["recompute"]

    def __init__(self, config: BackwardChainConfig):
        super().__init__(ChainConfig())
        self.config = config

    def task(self, values, index):
        """Returns the task of a slot of 512 tokens. ``matrix`` is that of its checkpoint."""
        args = self.interface.arguments(self.config)(*values)
        seqs, coarse = workspace.sequences(args, self.chunk), workspace.sequences(args, args.slot_tokens)
        slot = args.first_slot + index // args.HV
        exists = slot < coarse.span
        slot = cutlass.min(slot, coarse.span - 1)
        n = varlen.sequence_of(coarse, slot)
        _, _, first, _ = varlen.extent(coarse, n)
        chunks = EVERY // self.chunk
        begin = cutlass.max(slot - first, 0) * chunks
        end = ptx.select(exists, begin + chunks, Int32(0))
        slab, _ = workspace.slab(args, self.chunk)
        task = self.part(args, seqs, n, index % args.HV, slab, begin, end)
        task.matrix = slot * args.HV + task.head
        return args, seqs, task

    def residual_row(self, args):
        return args.residual_row

    def load_initial(self, args, task, row, S):
        exists = task.chunks > 0
        self.load_state(ptx.select(exists, args.checkpoints, Int64(0)), Int32(0), task.matrix, row, S)

    def store_final(self, args, task, row, S):
        """Stores nothing: the next slot has a checkpoint of its own."""
