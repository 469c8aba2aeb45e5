"""What the chains of a backward share: the task of a CTA in a slab, and states that pass from slab to slab.

A slab consists of some consecutive slots of every head. At most one sequence of a head is cut at its start, and one at its end.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Int32, Int64, cute

from kda_cute.device import ptx, varlen
from kda_sm100.kernels import workspace


class SlabChain:
    """Mixin of a chain kernel that takes `BackwardChainArguments`.

    A task has, besides what `ChainKernel.task` describes: ``begin`` and ``end``, its chunks within the sequence; ``all``, the
    chunks of the sequence; ``between``, the number of its matrix among the states that pass from slab to slab. Its first token, length,
    chunks and record are those of the slab.
    """

    def record_addresses(self, args, seqs):
        return workspace.slab_record_addresses(args, self.chunk)

    def task(self, values, index):
        args = self.interface.arguments(self.config)(*values)
        seqs = workspace.sequences(args, self.chunk)
        n, head = index // args.HV, index % args.HV
        first, end = workspace.slab(args, self.chunk)
        _, _, slot, _ = varlen.extent(seqs, n)
        return args, seqs, self.part(args, seqs, n, head, first, first - slot, end - slot)

    def part(self, args, seqs, n, head, slab, begin, end):
        """Returns the task of chunks ``begin`` to ``end - 1`` of a sequence, as far as they exist. ``slab``: the first slot of the slab."""
        token, length, slot, _ = varlen.extent(seqs, n)
        chunks = cute.ceil_div(length, self.chunk)
        # If device offsets decrease, the task may be any, but must stay within the records of the slab.
        begin = cutlass.max(cutlass.max(begin, slab - slot), 0)
        end = cutlass.min(cutlass.min(end, slab - slot + args.records // args.HV), chunks)
        return SimpleNamespace(
            sequence=n, head=head, token=token + begin * self.chunk, length=length - begin * self.chunk,
            chunks=cutlass.max(end - begin, 0), record=(slot + begin - slab) * args.HV + head, matrix=n * args.HV + head,
            begin=begin, end=end, all=chunks, between=head,
        )  # fmt: skip

    def enter(self, args, task, continues, row, S):
        """Loads the state at the start of the task: that of the slab before if the sequence ``continues`` there, or the entry. What an
        empty task loads is right only if the sequence is empty."""
        continues = continues & (task.chunks > 0)
        self.load_state(
            ptx.select(continues, args.from_slab, args.entry), ptx.select(continues, Int32(1), args.v_first),
            ptx.select(continues, task.between, task.matrix), row, S,
        )  # fmt: skip

    def leave(self, args, task, continues, exit, row, S):
        """Stores the state at the end of the task: for the slab behind if the sequence ``continues`` there, or to ``exit``. A sequence
        that has chunks, but none in the slab, stores nothing."""
        continues = continues & (task.chunks > 0)
        target = ptx.select(continues, args.to_slab, exit)
        exists = (task.chunks > 0) | (task.all == 0)
        self.store_state(
            ptx.select(exists, target, Int64(0)), ptx.select(continues, Int32(1), args.v_first),
            ptx.select(continues, task.between, task.matrix), row, S,
        )  # fmt: skip
