"""Stage 2, rows: row factors, Kd, Qd, and the diagonal blocks of L and Aqk."""

from cutlass import Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.decay import SPLIT_LIMIT
from kda_cute.device.intra_chunk.memory import (
    BLOCK_BYTES,
    GROUP_BYTES,
    TABLE_ROW,
    TILE,
    Layout,
    Place,
    fragment_address,
    load_exponents,
    load_fragment,
)
from kda_cute.device.intra_chunk.refine import Norms, Refinement
from kda_cute.records import BLOCK, IntraChunkConfig


class RowImage:
    """Addresses of a thread's rows in an image [C, 128] in global memory."""

    def __init__(self, layout: Layout, p: Place, image):
        # Two starts, of groups 0 and 1, because a step that is a constant then costs no addition.
        first = (p.block * BLOCK + p.row) * 128 + (p.quad ^ p.row) * 16
        self.starts, self.panel = [image + first, image + (first ^ 64)], layout.chunk * 128

    def address(self, m, half):
        """Returns the address of the 16 bytes of group m of the thread's row ``half``."""
        return self.starts[m % 2] + (m // 2 * self.panel + half * 1024)


class Rows:
    """Stage 2 of a group: one warp for each block, in MMA fragments."""

    def __init__(self, config: IntraChunkConfig, layout: Layout):
        self.unbounded, self.layout = config.unbounded, layout
        self.refinement = Refinement(layout)

    def compute(self, p: Place, steep, l2norm, scale, kd_image, qd_image):
        """Stores row factors to shared memory, -Kd and Qd to the record, and the columns at the next block's anchor in place
        of k and q. Returns the diagonal blocks of L and Aqk, two accumulator tiles each.

        ``steep``: some column may have to do without split factors. ``l2norm``: k and q are normalised.
        """
        refined = splits = None
        if self.unbounded:
            products, falls = (cute.make_rmem_tensor((n,), Float32) for n in (16, 2))
            products.fill(0.0)
            falls.fill(0.0)
            self.refinement.refine_if(steep, products, falls, p.thread, p.block, p.base)
            splits = [falls[half] < SPLIT_LIMIT for half in range(2)]
        k_norms, q_norms = (
            [ptx.select(l2norm, x, Float32(1.0)) for x in self.inverse_norms(p, y)] for y in (p.k, p.q)
        )
        norms = Norms(k_norms, [x * scale for x in q_norms])
        if self.unbounded:
            refined = self.refinement.normalised(p, products, splits, norms)
        acc = self.products(p, norms, kd_image, qd_image, refined, splits)
        l_acc, a_acc = acc[:2], acc[2:]
        for tile in range(2):
            beta = ptx.load_shared_x2(p.beta + (p.block * BLOCK + 8 * tile + 2 * p.quad) * 4, Float32)
            for i in range(4):
                inside = p.row + 8 * (i // 2) >= 8 * tile + 2 * p.quad + i % 2
                l_acc[tile][i] = l_acc[tile][i] * beta[i % 2]
                a_acc[tile][i] = ptx.select(inside, a_acc[tile][i] * beta[i % 2], Float32(0.0))
        return l_acc, a_acc

    def products(self, p: Place, norms: Norms, kd_image, qd_image, refined=None, splits=None):
        """Returns four tiles, two of L and two of Aqk, both without beta, from rows and columns with split factors.

        ``refined``: initial values of the tiles, in the columns that have no split factors. ``splits``: whether the columns
        of the thread's two rows have split factors (None: all).
        """
        acc = refined or [[Float32(0.0)] * 4 for _ in range(4)]
        l_acc, a_acc = acc[:2], acc[2:]
        kd_rows, qd_rows = (RowImage(self.layout, p, image) for image in (kd_image, qd_image))
        following = self.load_group(p, 0)
        for m in range(4):
            exponents, k_pairs, q_pairs = following
            cute.arch.sync_warp()  # row factors overwrite the exponents
            place = p.exponents + p.block * BLOCK_BYTES + m * GROUP_BYTES + p.lane * 16
            kd, qd = ([[], []] for _ in range(2))
            for step in range(2):
                columns = [[], []]
                if step == 1 and m < 3:
                    # Here, because the compiler moves no load up past a store, nor down to its use.
                    following = self.load_group(p, m + 1)
                k_row, q_row, k_col = ([[], []] for _ in range(3))
                for pair in range(2):
                    channel = (m * 32 + p.quad * 8 + step * 4 + pair * 2) * 4
                    anchor, hop = (
                        ptx.load_shared_x2(table + p.block * TABLE_ROW + channel, Float32)
                        for table in (p.anchor_scale, p.hop_exponent if splits else p.hop_scale)
                    )
                    for half in range(2):
                        k = [x * norms.k[half] for x in ptx.unpack_bf16x2(k_pairs[half][2 * step + pair])]
                        q = [x * norms.q[half] for x in ptx.unpack_bf16x2(q_pairs[half][2 * step + pair])]
                        kr, qr, kc, kg, qg = [], [], [], [], []
                        for e in range(2):
                            exponent = exponents[half][4 * step + 2 * pair + e]
                            down = ptx.ex2(exponent)
                            kr.append(k[e] * down)
                            qr.append(q[e] * down)
                            kg.append(kr[e] * -anchor[e])
                            qg.append(qr[e] * anchor[e])
                            kc.append(k[e] * ptx.ex2(-exponent))
                            # Of unbounded gates a fresh exponential: a steep hop would flush what the factor blew up.
                            column = k[e] * ptx.ex2(hop[e] - exponent) if splits else kc[e] * hop[e]
                            columns[half].append(column)
                        k_row[half].append(ptx.pack_bf16x2(*kr))
                        q_row[half].append(ptx.pack_bf16x2(*qr))
                        k_col[half].append(ptx.pack_bf16x2(*kc))
                        kd[half].append(ptx.pack_bf16x2(*kg))
                        qd[half].append(ptx.pack_bf16x2(*qg))
                k_a, q_a = ([x[0][0], x[1][0], x[0][1], x[1][1]] for x in (k_row, q_row))
                ptx.stmatrix_x4(place + step * 512, k_a)
                ptx.stmatrix_x4(place + step * 512 + TILE, q_a)
                if splits:
                    k_col = [
                        [ptx.select(one, x, Int32(0)) for x in column]
                        for one, column in zip(splits, k_col, strict=True)
                    ]
                for half in range(2):
                    l_acc[half] = ptx.mma_m16n8k16(k_a, k_col[half], l_acc[half])
                    a_acc[half] = ptx.mma_m16n8k16(q_a, k_col[half], a_acc[half])
                    place_of_columns = fragment_address((p.k, p.q)[step], p.block, p.lane, half, m)
                    ptx.store_shared_x4(place_of_columns, columns[half])
            for half in range(2):
                ptx.store_global_x4(kd_rows.address(m, half), kd[half], keep=True)
                ptx.store_global_x4(qd_rows.address(m, half), qd[half], keep=True)
        return l_acc + a_acc

    def load_group(self, p: Place, m):
        """Returns exponents, k and q of the thread's two rows, channels of group m."""
        exponents = [load_exponents(p, m, p.row + 8 * half) for half in range(2)]
        return exponents, *([load_fragment(p, x, half, m) for half in range(2)] for x in (p.k, p.q))

    def inverse_norms(self, p: Place, region):
        """Returns 1/sqrt(sum x^2 + 1e-6) of the thread's two rows of k or q.

        The sums of squares are the diagonal of x x^T. A pair of registers as loaded, taken for rows r and r + 8 of an MMA,
        are the even and the odd pairs of one row: two accumulators take half a sum each.
        """
        factors = []
        for half in range(2):
            even, odd = ([Float32(0.0)] * 4 for _ in range(2))
            for m in range(4):
                group = load_fragment(p, region, half, m)
                for a in (group[:2], group[2:]):
                    even = ptx.mma_m16n8k8(a, a[0], even)
                    odd = ptx.mma_m16n8k8(a, a[1], odd)
            diagonal = ptx.select(p.row % 2 == 0, even[0] + odd[2], even[1] + odd[3])
            total = cute.arch.shuffle_sync(diagonal, p.row * 4 + p.row // 2)
            factors.append(ptx.rsqrt(total + Float32(1e-6)))
        return factors
