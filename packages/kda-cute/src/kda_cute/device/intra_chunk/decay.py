"""Stage 1, decay: cumulative log decays of a chunk relative to the anchor of each block."""

import cutlass
from cutlass import Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.gates import Gate
from kda_cute.device.intra_chunk.memory import BLOCK_BYTES, GROUP_BYTES, TABLE_ROW, Layout, Place
from kda_cute.device.ptx import LOG2E
from kda_cute.records import BLOCK, IntraChunkConfig, decay_offset

#: A column keeps its split factors while the gates of its row since the anchor sum to less than this. Whatever row factor a
#: product with it needs is then a normal number, or the product is below 2^-39.
SPLIT_LIMIT = 60.0 * LOG2E


class Decay:
    """Stage 1 of a group: one warp for each block, four channels for each lane."""

    def __init__(self, config: IntraChunkConfig, layout: Layout):
        self.config, self.layout, self.blocks = config, layout, layout.blocks
        self.gate_bytes = 2 if config.gate_dtype == "bfloat16" else 4

    def store_row_units(self, p: Place, gate: Gate, valid):
        """Stores the units of the gates of the warp's rows. A row beyond the sequence has unit 0. A precomputed gate needs
        no unit, because such rows are copied as zeros."""
        if self.config.gate == "precomputed":
            return
        row = p.block * BLOCK + p.lane % BLOCK
        ptx.store_shared(p.row_unit + row * 4, ptx.select(row < valid, gate.unit, Float32(0.0)))

    def load_row_units(self, p: Place):
        """Returns the units of the 16 rows of the warp's block."""
        if self.config.gate == "precomputed":
            return [Float32(-LOG2E)] * BLOCK
        places = [p.row_unit + (p.block * BLOCK + row) * 4 for row in range(0, BLOCK, 4)]
        return [x for place in places for x in ptx.load_shared_x4(place, Float32)]

    def exponents(self, p: Place, gate: Gate, biases):
        """Stores the exponents G - A_b of the warp's block, and what anchors are made of: the log decay of the block's first
        row, and the exponents of its last row. A lane has channels 2*lane, 2*lane + 1, and these plus 64."""
        place = p.exponents + p.block * BLOCK_BYTES
        unit, inner = p.lane % 16 // 2, p.lane % 2 * 8
        parity = [place + p.lane // 16 * GROUP_BYTES + (unit ^ odd) * 16 + inner for odd in range(2)]
        if self.gate_bytes == 2:
            raw = [
                [
                    ptx.load_shared(place + half * (2 * GROUP_BYTES) + row * 128 + p.lane * 4, Int32)
                    for half in range(2)
                ]
                for row in range(BLOCK)
            ]
            cute.arch.sync_warp()  # exponents are twice as wide as bf16 gates, and overwrite those of other lanes
        units = self.load_row_units(p)
        first, total = [], [Float32(0.0)] * 4
        for row in range(BLOCK):
            for half in range(2):
                at = parity[row % 2] + row * 128 + half * (2 * GROUP_BYTES)
                pair = (
                    ptx.unpack_bf16x2(raw[row][half])
                    if self.gate_bytes == 2
                    else ptx.load_shared_x2(at, Float32)
                )
                for c, g in enumerate(pair, 2 * half):
                    activated = gate.activate(g, biases[c])
                    if row == 0:
                        first.append(activated * units[row])
                    else:
                        total[c] = ptx.fma(activated, units[row], total[c])
                ptx.store_shared_x2(at, total[2 * half : 2 * half + 2])
        for half in range(2):
            cell = p.block * TABLE_ROW + half * 256 + p.lane * 8
            ptx.store_shared_x2(p.first_decay + cell, first[2 * half : 2 * half + 2])
            ptx.store_shared_x2(p.last_exponent + cell, total[2 * half : 2 * half + 2])

    def anchors(self, p: Place, address):
        """Stores 2^A_b and 2^(A_b+1 - A_b) of the warp's block, four channels a lane, and the chunk's decay ``a`` to its
        record at ``address``, each warp its share of the channels.

        Returns, for unbounded gates, whether some column of the block may have to do without split factors, or 2^hop
        underflow: a hop falls at least as far as any column. Returns None for bounded gates.
        """
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
        for share in range(4 // self.blocks):
            channel = (p.warp + self.blocks * share) * 32 + p.lane
            end = Float32(0.0)
            for block in range(self.blocks):
                for table in (p.first_decay, p.last_exponent):
                    end = end + ptx.load_shared(table + block * TABLE_ROW + channel * 4, Float32)
            ptx.store_global(address + decay_offset(channel) * 4, ptx.ex2(end))
        lowest = ptx.minimum(ptx.minimum(hop[0], hop[1]), ptx.minimum(hop[2], hop[3]))
        return cute.arch.vote_any_sync(lowest <= Float32(-SPLIT_LIMIT)) if self.config.unbounded else None
