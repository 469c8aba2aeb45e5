"""Stage 1, decay: cumulative log decays of a chunk relative to the anchor of each block.

G_i is the sum of the log decays g_0 to g_i of the chunk. Block b has rows 16b to 16b + 15. Its anchor A_b is G of its *first*
row, 16b, so that the exponents G_i - A_b of the block are the sums of g over rows 16b + 1 to i. A warp computes them without
the other blocks, and stores two rows of the block for the other warps:

    first_decay_b   = g_16b                      log decay of the first row
    last_exponent_b = G_{16b+15} - A_b           sum over the other 15 rows

After a barrier, the warps derive from these of all blocks:

    A_b       = first_decay_b + sum_{c<b} (first_decay_c + last_exponent_c)
    hop_b     = A_{b+1} - A_b = last_exponent_b + first_decay_{b+1};   of the last block: G_end - A_b = last_exponent_b
    log2(a)   = G_end = sum_c (first_decay_c + last_exponent_c)
"""

import cutlass
from cutlass import Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.gates import Gate
from kda_cute.device.intra_chunk.memory import BLOCK_BYTES, SLICE_BYTES, TABLE_ROW, Layout, Place
from kda_cute.device.ptx import LOG2E
from kda_cute.records import BLOCK, IntraChunkConfig, decay_offset

#: Column j of block b keeps its split factors if A_b - G_j is below this in every channel. Its column factor 2^(A_b - G_j) is then
#: below 2^86.6. A row factor that is no normal number, below 2^-126, makes a product below 2^-39 with it, which may be lost.
SPLIT_LIMIT = 60.0 * LOG2E


class Decay:
    """Stage 1 of a group: one warp for each block, four channels for each lane."""

    def __init__(self, config: IntraChunkConfig, layout: Layout):
        self.config, self.layout, self.blocks = config, layout, layout.blocks
        self.gate_bytes = 2 if config.gate_dtype == "bfloat16" else 4

    def store_row_scales(self, p: Place, gate: Gate, valid):
        """Stores `Gate.log_scale` for the warp's rows, and 0 for rows beyond the sequence. A precomputed gate needs no such
        scale, because g of such rows is copied as zeros."""
        if self.config.gate == "precomputed":
            return
        row = p.block * BLOCK + p.lane % BLOCK
        ptx.store_shared(p.row_scale + row * 4, ptx.select(row < valid, gate.log_scale, Float32(0.0)))

    def load_row_scales(self, p: Place):
        """Returns the scales of the log decays of the 16 rows of the warp's block."""
        if self.config.gate == "precomputed":
            return [Float32(-LOG2E)] * BLOCK
        addresses = [p.row_scale + (p.block * BLOCK + row) * 4 for row in range(0, BLOCK, 4)]
        return [x for address in addresses for x in ptx.load_shared_x4(address, Float32)]

    def exponents(self, p: Place, gate: Gate, biases):
        """Replaces g of the warp's block by the exponents G - A_b, and stores the block's first_decay and last_exponent.

        A lane has channels 2*lane and 2*lane + 1 (panel 0), and these plus 64 (panel 1): two words of a row in bf16, two
        8-byte halves of a unit in fp32. ``biases``: dt_bias of these four channels.
        """
        start = p.exponents + p.block * BLOCK_BYTES
        unit, inner = p.lane % 16 // 2, p.lane % 2 * 8
        # of the lane in even and in odd rows, whose units are swizzled differently
        parity = [start + p.lane // 16 * SLICE_BYTES + (unit ^ odd) * 16 + inner for odd in range(2)]
        if self.gate_bytes == 2:
            raw = [
                [
                    ptx.load_shared(start + panel * (2 * SLICE_BYTES) + row * 128 + p.lane * 4, Int32)
                    for panel in range(2)
                ]
                for row in range(BLOCK)
            ]
            cute.arch.sync_warp()  # exponents are twice as wide as bf16 gates, and overwrite those of other lanes
        scales = self.load_row_scales(p)
        first, total = [], [Float32(0.0)] * 4
        for row in range(BLOCK):
            for panel in range(2):
                at = parity[row % 2] + row * 128 + panel * (2 * SLICE_BYTES)
                pair = (
                    ptx.unpack_bf16x2(raw[row][panel])
                    if self.gate_bytes == 2
                    else ptx.load_shared_x2(at, Float32)
                )
                for c, g in enumerate(pair, 2 * panel):
                    activated = gate.activate(g, biases[c])
                    if row == 0:  # the anchor, whose exponent is 0
                        first.append(activated * scales[row])
                    else:
                        total[c] = ptx.fma(activated, scales[row], total[c])
                ptx.store_shared_x2(at, total[2 * panel : 2 * panel + 2])
        for panel in range(2):
            cell = p.block * TABLE_ROW + panel * 256 + p.lane * 8
            ptx.store_shared_x2(p.first_decay + cell, first[2 * panel : 2 * panel + 2])
            ptx.store_shared_x2(p.last_exponent + cell, total[2 * panel : 2 * panel + 2])

    def store_anchors(self, p: Place):
        """Stores 2^A_b, 2^hop_b and for unbounded gates hop_b of the warp's block to their tables. A lane has channels 4*lane
        to 4*lane + 3. Returns hop_b of these."""
        cell = p.lane * 16
        row = lambda table, block: ptx.load_shared_x4(table + block * TABLE_ROW + cell, Float32)
        anchor = row(p.first_decay, p.block)
        for block in range(self.blocks - 1):
            for i, (x, y) in enumerate(
                zip(row(p.first_decay, block), row(p.last_exponent, block), strict=True)
            ):
                anchor[i] = anchor[i] + ptx.select(block < p.block, x + y, Float32(0.0))
        following = row(p.first_decay, cutlass.min(p.block + 1, self.blocks - 1))
        last = p.block == self.blocks - 1
        hop = [
            x + ptx.select(last, Float32(0.0), y)
            for x, y in zip(row(p.last_exponent, p.block), following, strict=True)
        ]
        own = p.block * TABLE_ROW + cell
        ptx.store_shared_x4(p.anchor_scale + own, [ptx.ex2(x) for x in anchor])
        ptx.store_shared_x4(p.hop_scale + own, [ptx.ex2(x) for x in hop])
        if self.config.unbounded:
            ptx.store_shared_x4(p.hop_exponent + own, hop)
        return hop

    def store_chunk_decay(self, p: Place, address):
        """Stores the chunk's decay ``a`` to its record at ``address``, each warp its share of the 128 channels."""
        for share in range(4 // self.blocks):
            channel = (p.warp + self.blocks * share) * 32 + p.lane
            end = Float32(0.0)
            for block in range(self.blocks):
                for table in (p.first_decay, p.last_exponent):
                    end = end + ptx.load_shared(table + block * TABLE_ROW + channel * 4, Float32)
            ptx.store_global(address + decay_offset(channel) * 4, ptx.ex2(end))

    def is_steep(self, hop):
        """Returns whether a column of the warp's block may need refinement; None for bounded gates, where none does.

        ``hop``: of `store_anchors`. The warp votes: a hop falls at least as far as any column of its block, so that no
        column reaches `SPLIT_LIMIT` unless the hop does.
        """
        if not self.config.unbounded:
            return None
        lowest = ptx.minimum(ptx.minimum(hop[0], hop[1]), ptx.minimum(hop[2], hop[3]))
        return cute.arch.vote_any_sync(lowest <= Float32(-SPLIT_LIMIT))
