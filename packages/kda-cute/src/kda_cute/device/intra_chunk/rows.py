"""Stage 2, rows: row factors, Kd, Qd, and the diagonal blocks of L and Aqk.

In block b, with scale in q and the inverse norms in q and k:

    row factors      k_i 2^(G_i - A_b), q_i 2^(G_i - A_b)     A operands here and in stage 3; times 2^A_b they are Kd and Qd
    column factors   k_j 2^(A_b - G_j)                        B operands here
    columns          k_j 2^(A_{b+1} - G_j)                    column factors after their first hop, for stage 3

beta multiplies the products here, and the columns in stage 3.
"""

from typing import NamedTuple

from cutlass import Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.decay import SPLIT_LIMIT
from kda_cute.device.intra_chunk.memory import (
    BLOCK_BYTES,
    SLICE_BYTES,
    TABLE_ROW,
    TILE,
    Layout,
    Place,
    fragment_address,
    load_exponents,
    load_fragment,
)
from kda_cute.device.intra_chunk.refine import Refinement, RowScales
from kda_cute.records import BLOCK, IntraChunkConfig


class RowImage:
    """Addresses of a thread's 16-byte units in an image [C, 128] in global memory: `image_offset` at row ``p.row + 8*half`` of
    the block and channel ``32m + 8*quad_lane``, with the constant part of the swizzle taken out."""

    def __init__(self, layout: Layout, p: Place, image):
        # Unit 4*(m % 2) + quad_lane of a panel's row lies at this number XOR row % 8; slices 2 and 3 are in the second panel.
        # Two starts, of even and odd slices, because a constant that is added to one of them costs no instruction.
        first = (p.block * BLOCK + p.row) * 128 + (p.quad_lane ^ p.row) * 16
        self.starts, self.panel = [image + first, image + (first ^ 64)], layout.chunk * 128

    def address(self, m, half):
        """Returns the address of the 16 bytes of slice m of the thread's row ``half``."""
        return self.starts[m % 2] + (m // 2 * self.panel + half * 1024)


class Slice(NamedTuple):
    """The thread's part of a slice of 32 channels: [2 halves] of 8 channels each."""

    exponents: list  # fp32 [8]
    k: list  # bf16x2 [4]
    q: list  # bf16x2 [4]


class StepOperands(NamedTuple):
    """What a thread derives of k and q for one k16 step of the MMA: [2 halves] of 4 channels, bf16x2 but for ``columns``."""

    k_row: list  # k 2^(G - A_b), row factors
    q_row: list  # q 2^(G - A_b)
    k_column: list  # k 2^(A_b - G), column factors
    columns: list  # k 2^(A_{b+1} - G), fp32, the columns for stage 3
    kd: list  # -k 2^G
    qd: list  # q 2^G


class Rows:
    """Stage 2 of a group: one warp for each block, in MMA fragments."""

    def __init__(self, config: IntraChunkConfig, layout: Layout):
        self.unbounded, self.layout = config.unbounded, layout
        self.refinement = Refinement()

    def compute(self, p: Place, steep, l2norm, scale, kd_image, qd_image):
        """Stores row factors to shared memory, -Kd and Qd to the record, and the columns at the next block's anchor in place
        of k and q. Returns the diagonal blocks of L and Aqk, two accumulator tiles each.

        The block of Aqk is 0 above the diagonal. That of L is valid only below the diagonal: `Inverse` reads no other element.
        ``steep``: of `Decay.is_steep`. ``l2norm``: whether k and q are normalised.
        """
        refined = splittable = None
        if self.unbounded:
            products, falls = (cute.make_rmem_tensor((n,), Float32) for n in (16, 2))
            products.fill(0.0)
            falls.fill(0.0)
            self.refinement.refine_if(p, steep, products, falls)
            splittable = [falls[half] < SPLIT_LIMIT for half in range(2)]
        k_scales, q_scales = (
            [ptx.select(l2norm, x, Float32(1.0)) for x in self.inverse_norms(p, y)] for y in (p.k, p.q)
        )
        scales = RowScales(k_scales, [x * scale for x in q_scales])
        if self.unbounded:
            refined = self.refinement.scaled(p, products, splittable, scales)
        l_acc, a_acc = self.products(p, scales, kd_image, qd_image, refined, splittable)
        for tile in range(2):
            beta = ptx.load_shared_x2(p.beta + (p.block * BLOCK + 8 * tile + 2 * p.quad_lane) * 4, Float32)
            for i in range(4):
                inside = p.row + 8 * (i // 2) >= 8 * tile + 2 * p.quad_lane + i % 2
                l_acc[tile][i] = l_acc[tile][i] * beta[i % 2]
                a_acc[tile][i] = ptx.select(inside, a_acc[tile][i] * beta[i % 2], Float32(0.0))
        return l_acc, a_acc

    def products(self, p: Place, scales: RowScales, kd_image, qd_image, refined=None, splittable=None):
        """Returns the diagonal blocks of L and Aqk without beta, two accumulator tiles each: rows with row factors times
        columns with column factors.

        ``refined``: initial values of the four tiles, not 0 in the columns that have no split factors (None: all 0).
        ``splittable``: whether the columns of the thread's two rows have split factors (None: all have).

        Every store goes where only this warp has data, so that `sync_warp` suffices: row factors replace the exponents of the
        same slice, and columns the 16 bytes of k and q that this thread has loaded.
        """
        acc = refined or [[Float32(0.0)] * 4 for _ in range(4)]
        l_acc, a_acc = acc[:2], acc[2:]
        kd_rows, qd_rows = (RowImage(self.layout, p, image) for image in (kd_image, qd_image))
        following = self.load_slice(p, 0)
        for m in range(4):
            present = following
            cute.arch.sync_warp()  # row factors overwrite the exponents
            start = p.exponents + p.block * BLOCK_BYTES + m * SLICE_BYTES + p.lane * 16
            kd, qd = ([[], []] for _ in range(2))
            for step in range(2):
                if step == 1 and m < 3:
                    # Here, because the compiler moves no load up past a store, nor down to its use.
                    following = self.load_slice(p, m + 1)
                x = self.step_operands(p, m, step, present, scales)
                for half in range(2):
                    kd[half] += x.kd[half]
                    qd[half] += x.qd[half]
                # A fragments: rows `row` and `row + 8` of the first pair of channels, then of the second
                k_a, q_a = ([y[0][0], y[1][0], y[0][1], y[1][1]] for y in (x.k_row, x.q_row))
                ptx.stmatrix_x4(start + step * 512, k_a)
                ptx.stmatrix_x4(start + step * 512 + TILE, q_a)
                k_column = x.k_column
                if splittable:
                    k_column = [
                        [ptx.select(one, y, Int32(0)) for y in column]
                        for one, column in zip(splittable, k_column, strict=True)
                    ]
                for half in range(2):
                    l_acc[half] = ptx.mma_m16n8k16(k_a, k_column[half], l_acc[half])
                    a_acc[half] = ptx.mma_m16n8k16(q_a, k_column[half], a_acc[half])
                    address = fragment_address((p.k, p.q)[step], p.block, p.lane, half, m)
                    ptx.store_shared_x4(address, x.columns[half])
            for half in range(2):
                ptx.store_global_x4(kd_rows.address(m, half), kd[half], keep=True)
                ptx.store_global_x4(qd_rows.address(m, half), qd[half], keep=True)
        return l_acc, a_acc

    def step_operands(self, p: Place, m, step, inputs: Slice, scales: RowScales) -> StepOperands:
        """Returns the operands of one k16 step of slice m.

        Unbounded gates take the first hop of a column by an exponential of its own, 2^(hop - exponent): for a steep hop,
        2^hop is 0 in fp32, although the column may be large.
        """
        result = StepOperands(*([[], []] for _ in StepOperands._fields))
        for pair in range(2):
            channel = (m * 32 + p.quad_lane * 8 + step * 4 + pair * 2) * 4
            # hop: for unbounded gates the exponent, else 2^hop
            anchor_scale, hop = (
                ptx.load_shared_x2(table + p.block * TABLE_ROW + channel, Float32)
                for table in (p.anchor_scale, p.hop_exponent if self.unbounded else p.hop_scale)
            )
            for half in range(2):
                k = [x * scales.k[half] for x in ptx.unpack_bf16x2(inputs.k[half][2 * step + pair])]
                q = [x * scales.q[half] for x in ptx.unpack_bf16x2(inputs.q[half][2 * step + pair])]
                k_row, q_row, k_column, kd, qd = [], [], [], [], []
                for e in range(2):
                    exponent = inputs.exponents[half][4 * step + 2 * pair + e]
                    row_factor = ptx.ex2(exponent)
                    k_row.append(k[e] * row_factor)
                    q_row.append(q[e] * row_factor)
                    kd.append(k_row[e] * -anchor_scale[e])  # stored negated
                    qd.append(q_row[e] * anchor_scale[e])
                    k_column.append(k[e] * ptx.ex2(-exponent))
                    column = k[e] * ptx.ex2(hop[e] - exponent) if self.unbounded else k_column[e] * hop[e]
                    result.columns[half].append(column)
                result.k_row[half].append(ptx.pack_bf16x2(*k_row))
                result.q_row[half].append(ptx.pack_bf16x2(*q_row))
                result.k_column[half].append(ptx.pack_bf16x2(*k_column))
                result.kd[half].append(ptx.pack_bf16x2(*kd))
                result.qd[half].append(ptx.pack_bf16x2(*qd))
        return result

    def load_slice(self, p: Place, m) -> Slice:
        """Loads the thread's part of slice m."""
        exponents = [load_exponents(p, m, p.row + 8 * half) for half in range(2)]
        return Slice(exponents, *([load_fragment(p, x, half, m) for half in range(2)] for x in (p.k, p.q)))

    def inverse_norms(self, p: Place, region):
        """Returns 1/sqrt(sum x^2 + 1e-6) of the thread's two rows of k or q.

        The sums of squares of 8 rows x are the diagonal of x x^T, which MMAs compute and sum over the lanes of a quad. x has
        8 rows and A has 16: A takes two registers a0, a1 of each row, two pairs of channels per lane, as rows r and r + 8.

            even += [a0; a1] @ a0^T      element [r, r] sums the squares of a0
            odd  += [a0; a1] @ a1^T      element [r + 8, r] sums the squares of a1

        The other elements are not used. Column r is in the lane r // 2 of a quad, element r % 2.
        """
        factors = []
        for half in range(2):
            even, odd = ([Float32(0.0)] * 4 for _ in range(2))
            for m in range(4):
                pairs = load_fragment(p, region, half, m)
                for a in (pairs[:2], pairs[2:]):
                    even = ptx.mma_m16n8k8(a, a[0], even)
                    odd = ptx.mma_m16n8k8(a, a[1], odd)
            diagonal = ptx.select(p.row % 2 == 0, even[0] + odd[2], even[1] + odd[3])
            total = cute.arch.shuffle_sync(diagonal, p.row * 4 + p.row // 2)
            factors.append(ptx.rsqrt(total + Float32(1e-6)))
        return factors
