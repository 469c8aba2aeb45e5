"""Sums of squares of the rows of k and q, for their norms: the diagonal of x x^T, by `mma.sync`."""

from cutlass import Float32, Int32

from kda_cute.device import ptx
from kda_cute.records import BLOCK, PANEL

STEPS = 2 * (PANEL // 16)  # of 16 channels, of k, then of q


class SumsOfSquares:
    """The sums over the warp's 16 rows and its panel, in `STEPS` steps.

    Each product waits for the one before. So the caller computes something else between two steps.

    Args:
        place: the `intra_chunk.Place` of the thread.
        layout: the `intra_chunk.Layout` of the group's shared memory, which holds q and k.
        blocks: blocks of 16 rows of a chunk.
    """

    def __init__(self, place, layout, blocks: int):
        row = place.lane % BLOCK
        self.place, self.layout, self.blocks, self.row = place, layout, blocks, row
        self.regions = (0, layout.q)
        self.start = place.panel + (place.block * BLOCK + row) * (2 * PANEL)
        self.sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in self.regions]  # of rows 0 to 7, 8 to 15
        self.loaded = self._load(0)

    def _load(self, step) -> list[Int32]:
        kind, k = divmod(step, STEPS // 2)
        unit = 2 * k + self.place.lane // BLOCK
        return ptx.ldmatrix_x4(self.start + self.regions[kind] + (unit ^ self.row % 8) * 16)

    def step(self, i: int) -> None:
        """Adds the squares of step i, and starts the loads of the next step. Steps are called in order."""
        a = self.loaded
        if i + 1 < STEPS:
            self.loaded = self._load(i + 1)
        sums = self.sums[i // (STEPS // 2)]
        # Registers 0 and 2 of an A fragment are the B fragment of its rows 0 to 7, registers 1 and 3 that of rows 8 to 15.
        for half in range(2):
            sums[half] = ptx.mma_m16n8k16(a, [a[half], a[half + 2]], sums[half])

    def store(self) -> None:
        """Stores the sums to the table ``norms`` of the layout."""
        p = self.place
        # Element [r, r] of an accumulator is in the lane with quad r and pair r // 2.
        diagonal, odd = p.lane % 4 == p.lane // 8, p.lane // 4 % 2 > 0
        for kind, (low, high) in enumerate(self.sums):
            norms = p.base + self.layout.norms + (2 * p.panel_index + kind) * (self.blocks * BLOCK * 4)
            at = norms + (p.block * BLOCK + p.lane // 4) * 4
            ptx.store_shared_if(at, ptx.select(odd, low[1], low[0]), diagonal)
            ptx.store_shared_if(at + 32, ptx.select(odd, high[3], high[2]), diagonal)
