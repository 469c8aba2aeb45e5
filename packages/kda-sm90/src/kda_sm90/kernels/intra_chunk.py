"""The intra-chunk stage of chunks of 32 tokens: one warpgroup per chunk and value head.

It writes the records of `kda_cute.device.intra_chunk` (whose words this file uses) with two thirds of the shared-memory traffic:

- A lane has four channels of eight rows, in accesses of 8 bytes that are free of bank conflicts. Gates, their sums and all factors stay
  in its registers from the load of g to the last product with them.
- Operands replace q and k where these lie, as the operand images of one wgmma, which computes all blocks of L and Aqk.
- An anchor is rounded to an integer. A hop is then an exact power of two: multiplied by it, an operand in bf16 is not rounded
  again, so Kd, Qd and the hopped columns come from operands by one packed product each.

With A_b the rounded G of the first row of block b, X = G - A_b, and s = beta times the inverse norm of k:

    rows      k' = -k / |k| 2^X,  q' = scale q / |q| 2^X          bf16, A operand, rows k0 k1 q0 q1 (64)
    columns   c_b = s k 2^-X                                      bf16, B operand, rows c0, c0 2^(A_1 - A_0), c1 (48)
    record    Kd = k' 2^(A_b),  Qd = q' 2^(A_b),  Kg = s k 2^-X 2^(G_end - A_b)

            c0    c0 hopped   c1
    k0     -L00                           warp 0
    k1           -L10        -L11         warp 1
    q0      Aqk00                         warp 2
    q1            Aqk10       Aqk11       warp 3

In a *gentle* panel, whose G falls little, all anchors are 0. Then k' and q' are Kd and Qd, and c0 needs no hop.

Unbounded gates may fall too far for columns: `kernels.steep`. `kernels.intra_chunk_64` has the stage of chunks of 64, whose records are
folded.

T is the inverse of I + L, computed by one warp: both diagonal blocks, a lane for each column, then the block below them.

Time runs downwards. ``|`` is a barrier of the group::

    all warps        own q, k, g are here; gates and their sums, and between them sums of squares -> tables
    leader           room for the record (acquire_record)
    |
    all warps        anchors, factors, operands -> images; a -> record, and Kd and Qd unless the panel is gentle
    |
    all warps        wgmma; while it runs:
    leader             Kg, and Kd and Qd of gentle panels -> record, by bulk copies (`store_early`)
    claiming warp      claim of the next chunk (claim_next)
    all warps        L and Aqk -> shared memory; the claim is stored (store_claim)
    |
    leader           publish the record of the turn before (publish_previous)
    all warps        request g, k, q of the next chunk
    finishing warp   T -> shared memory
    |
    leader           T, Aqk -> record, by bulk copies (`complete`)

A warp loads the part of q, k and g that it alone uses, so a wait for its own copies and a `sync_warp` suffice. What an asynchronous copy
reads is overwritten only behind a wait of the leader, which has issued all of them, and a barrier.
"""

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from kda_cute.device import ptx
from kda_cute.device.intra_chunk import Worker
from kda_cute.device.intra_chunk.blocks import fragment, fragment_in_parts, load_parts, pack, store_parts
from kda_cute.device.intra_chunk.gates import Gate, gate_rate
from kda_cute.device.intra_chunk.inputs import Chunk, Inputs
from kda_cute.device.intra_chunk.inverse import COLUMN, eliminate, product_in_parts
from kda_cute.device.intra_chunk.strided import StridedInputs
from kda_cute.records import BLOCK, HEAD_DIM, PANEL
from kda_sm90.config import PrefillConfig
from kda_sm90.kernels import steep
from kda_sm90.kernels.barriers import WARPGROUP
from kda_sm90.kernels.norms import SumsOfSquares

ROW = 2 * PANEL  # bytes of a row of an image
ROWS = 8  # of a lane
BLOCK_BYTES = BLOCK * ROW  # of a block of rows of an image
MAGIC = 1.5 * 2**23  # x + MAGIC rounds x to an integer, which the low bits then hold
LOWEST = -126.0  # of an anchor of bounded gates: 2^A is a normal number
ONES = 0x3F803F80  # 1 and 1 in bf16
ZERO = -127.0  # the anchor for which `power` is 0
OFFSET = steep.OFFSET

#: A panel of a chunk of 32 tokens is *gentle* if G falls by less than this (in bits) in all of its channels. Its factors 2^G and 2^-G need no
#: anchors.
GENTLE = 60.0


class Layout(NamedTuple):
    """Byte offsets in a group's shared memory, which starts at a multiple of 1024. Panel p (64 channels) starts at ``p * panel``.

    The figures are those of chunks of 32; a number behind a slash is that of 64 (`kernels.intra_chunk_64`).

    ======== ================== ==============================================================================
    region   bytes              content
    ======== ================== ==============================================================================
    panels   2 x panel          k, q -> rows [64 / 128 rows]; g -> columns [48 / 160]; Kg [32], each row 128 bytes, swizzled
                                as an image. g in fp32: [32 / 64 rows][64], not swizzled. Chunks of 64 with
                                unbounded gates: the last block of columns again, without lost rows [16]
    minus_l  2 / 4 x 1280       diagonal blocks of -L, then of T, by columns `COLUMN` apart; folded records: with the next region
                                then the image of Aqk~
    l_block  1 / 6 x 1024       blocks of L below the diagonal, in two bf16 parts
    squares  2 x 2048 / 8192    T, Aqk: images / T: an image
    sums     2 / 4 x 512        sum of the log decays of a block, fp32 [128]; folded records: then blocks of Aqk, with the next
                                two regions
    firsts   2 / 4 x 512        log decay of its first row
    norms    2 x 256 / 512      sum of squares over a panel: k [32 / 64], q [32 / 64]
    scales   4 / 8 x 256        of a warp's block: inverse norms of k [16], negative, of q [16] with scale; s [16]; the panel's `gentle_flag`
    ends     none / 512         2^(G_end - A), A the last anchor, fp32 [128]
    refined  4 / 8 x 1168       of a warp: refined products, see `steep.SteepColumns`; unbounded gates only. With chunks of 64
                                in the place of the blocks of L, before these are stored
    ======== ================== ==============================================================================

    ``gates``: of g. ``kg``: of Kg, or with folded records of the columns at the last anchor, which become Kg~. Those are still in use when
    the next g arrives, so they lie behind it. ``last``: of the last block of columns without lost rows. Local records (`kernels.local_records`)
    have no images here: the group stores them where its chain reads them.
    """

    q: int
    gates: int
    columns: int
    kg: int
    last: int
    panel: int
    minus_l: int
    l_block: int
    squares: int
    sums: int
    firsts: int
    norms: int
    scales: int
    ends: int
    refined: int
    bytes: int

    @property
    def keeps_lost(self) -> bool:
        """Whether the last block of columns is stored twice, without lost rows for `multiply` and with them for Kg."""
        return self.last < self.panel

    @classmethod
    def of(cls, config: PrefillConfig, has_images: bool) -> "Layout":
        """Returns the layout for a configuration. ``has_images``: of `WarpgroupIntraChunk`."""
        chunk = config.chunk
        blocks, image, square = chunk // BLOCK, chunk * ROW, 2 * chunk * chunk
        gates = columns = 2 * image
        gate_bytes = image * (1 if config.gate_dtype == "bfloat16" else 2)
        if config.folded:
            before = first_column(blocks - 1) * BLOCK_BYTES  # columns at other anchors than the last one
            columns += max(0, gate_bytes - before)
            kg = columns + before
            squares, ends = square, 512
        else:
            kg = columns + max(gate_bytes, first_column(blocks) * BLOCK_BYTES)
            squares, ends = 2 * square if has_images else 0, 0
        last = kg + (image if has_images else 0)
        panel = last + (BLOCK_BYTES if config.folded and config.unbounded else 0)
        sizes = (
            2 * panel, blocks * 16 * COLUMN, blocks * (blocks - 1) // 2 * 1024, squares, blocks * 512, blocks * 512,
            16 * chunk, 2 * blocks * 256, ends, 4 * steep.BYTES if config.unbounded and not config.folded else 0,
        )  # fmt: skip
        layout = cls(image, gates, columns, kg, last, panel, *accumulate(sizes))
        return layout._replace(refined=layout.minus_l) if config.folded else layout


class Hooks(NamedTuple):
    """What a kernel does between the stages of a chunk. All threads of the group call each hook.

    ``acquire_record``: the leader waits until the record may be written. It returns whether it has published the record of the turn
    before, for ``publish_previous``, which publishes it otherwise. The others: `kda_cute.device.intra_chunk.Hooks`.
    """

    sync: Callable[[], None]
    acquire_record: Callable[[], Any]
    claim_next: Callable[[], Any]
    store_claim: Callable[[Any], None]
    publish_previous: Callable[[Any], None]


def first_column(target: int) -> int:
    """Returns the number of blocks of columns before those at the anchor of block ``target``."""
    return target * (target + 1) // 2


class Place:
    """Where the calling thread works: warp w of the group has block ``w // 2`` and the panel ``w % 2``, its lane four channels of the
    rows ``first_row`` to ``first_row + 7``, in the upper or the lower half of the block."""

    def __init__(self, layout: Layout, worker: Worker, warps: int):
        thread, base = worker.thread, worker.base
        self.thread, self.lane, self.base, self.layout = thread, thread % 32, base, layout
        # The mask tells the compiler that the number is not negative.
        self.warp = cute.arch.make_warp_uniform(thread // 32) & (warps - 1)
        self.block, self.panel_index = self.warp // 2, self.warp % 2
        self.half, self.quad_of_channels = self.lane // 16, self.lane % 16
        self.first_row = self.block * BLOCK + self.half * ROWS
        self.panel = base + self.panel_index * layout.panel
        self.channel = self.panel_index * PANEL + self.quad_of_channels * 4
        #: Offset in an image of the lane's 8 bytes of its first row.
        self.cell = self.first_row * ROW + self.quad_of_channels // 2 * 16 + self.quad_of_channels % 2 * 8


class Anchors(NamedTuple):
    """What the anchor A of the lane's block determines, for its four channels. With unbounded gates, X is greater by `OFFSET`.

    ``shift``: X before the lane's first row. ``hops``: 2^(A_i - A_(i-1)) of block i, from the second one on. ``from_start``: 2^(G - X). Both are
    bf16x2 [2]. ``to_end``: G_end - G + X.
    ``next_anchor``, of unbounded gates: the difference between the anchor of the next block and A. In the last block it is that of
    `SteepColumns.last_shift`. ``after_next``: ``to_end`` minus ``next_anchor``.
    """

    shift: list
    hops: list
    from_start: list
    to_end: list
    next_anchor: list | None
    after_next: list | None


class WarpgroupIntraChunk(Inputs):
    """The intra-chunk stage of one group. For each chunk a kernel calls::

        loaded = request(x, worker, chunk)
        compute(x, worker, chunk, loaded, record, hooks)
        finish(worker, record)
        barrier of the group
        complete(worker, record, barrier)

    ``x``, ``record`` and the order of the calls are those of `kda_cute.device.intra_chunk.IntraChunk`. A record is complete once the leader
    has called `wait_for_stores`.
    """

    threads = WARPGROUP
    #: The thread that waits for room, issues bulk copies and publishes records.
    leader = 96
    #: The warp that claims chunks. The leader issues bulk copies at the same time, so another warp claims.
    claimer = 0
    #: Whether the group's memory has images of parts of the record, which bulk copies take there. If not, the threads store these parts to
    #: the record themselves.
    has_images = True
    #: Groups of bulk copies of a turn: those of `store_early`, and those of T and Aqk in `complete`.
    early_copies, late_copies = 1, 1

    def __init__(self, config: PrefillConfig):
        super().__init__(config)
        self.chunk = config.chunk
        self.blocks = config.chunk // BLOCK
        self.image_bytes = config.chunk * ROW  # of a panel of k, q or Kg
        self.square_bytes = 2 * config.chunk * config.chunk
        self.layout = Layout.of(config, self.has_images)
        #: Whether panels may be gentle. Chunks of 64 gain nothing, because chains limit their calls. Nor may they have gentle panels: later
        #: tokens decide whether a panel is gentle, and with ``pin``, which has chunks of 64, no bit may depend on later tokens.
        self.may_be_gentle = config.chunk == 32
        self.steep = steep.SteepColumns(self.layout, self.blocks, config.folded)

    def place(self, worker: Worker) -> Place:
        """Returns where the calling thread works."""
        return Place(self.layout, worker, self.threads // 32)

    def is_claimer(self, thread, turn):
        """Returns whether the thread's warp claims chunks."""
        return thread // 32 == self.claimer

    def request(self, x, worker: Worker, chunk: Chunk):
        """Starts the loads of a chunk: g, then k and q, to shared memory, the small inputs to registers. Their regions are free once
        `compute` has returned."""
        p = self.place(worker)
        a_log, biases = Float32(0.0), [Float32(0.0)] * 4
        if self.config.gate != "precomputed":
            a_log = ptx.load_global_f32(x.a_log + Int64(chunk.head) * 4, x.a_log != Int64(0))
            first = x.dt_bias + (Int64(chunk.head) * HEAD_DIM + p.channel) * 4
            biases = [y for at in (0, 8) for y in ptx.load_global_f32_x2(first + at, x.dt_bias != Int64(0))]
        beta = self.load_beta(x, chunk, p.block * BLOCK + p.lane % BLOCK)
        self.copy_gates(p, x, chunk)
        # Whole lines of 128 bytes of four rows, to eight units of a row that touch all banks.
        unit, first_row = p.lane % 8, p.block * BLOCK + p.lane // 8
        for name, region in (("k", 0), ("q", self.layout.q)):
            start = self.key_address(x, name, chunk, first_row) + (p.panel_index * ROW + unit * 16)
            for at in range(0, BLOCK, 4):
                row = first_row + at
                to = p.panel + region + row * ROW + (unit ^ row % 8) * 16
                ptx.cp_async_x4(to, start + Int64(self.key_pitch(x, name) * at), row < chunk.valid)
        cute.arch.cp_async_commit_group()
        return *beta, a_log, *biases

    def copy_gates(self, p: Place, x, chunk: Chunk):
        """Copies the warp's part of g to shared memory asynchronously."""
        width = PANEL * self.gate_bytes
        units = width // 16  # of a row
        unit, first_row = p.lane % units, p.block * BLOCK + p.lane // units
        start = self.gate_address(x, chunk, first_row) + (p.panel_index * width + unit * 16)
        for at in range(0, BLOCK, 32 // units):
            row = first_row + at
            address = start + Int64(self.gate_pitch(x) * at)
            place = (unit ^ row % 8) if self.gate_bytes == 2 else unit
            to = p.panel + self.layout.gates + row * width + place * 16
            ptx.cp_async_x4(to, address, row < chunk.valid)

    def compute(self, x, worker: Worker, chunk: Chunk, loaded, record, hooks: Hooks):
        """Computes all of a requested chunk but T. ``loaded``: what `request` returned."""
        p = self.place(worker)
        beta_bf16, beta_fp32, a_log, *biases = loaded
        gate = Gate(self.config, gate_rate(a_log), x.lower_bound)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        squares = SumsOfSquares(p, self.layout, self.blocks)
        sums, total = self.sums_of_decays(p, gate, biases, chunk.valid, squares)
        first = [cute.arch.shuffle_sync(y, p.quad_of_channels) for y in sums[0]]
        other = [cute.arch.shuffle_sync_bfly(y, 16) for y in total]
        block_sum = [y + z for y, z in zip(total, other, strict=True)]
        # The lanes of the upper eight rows store the sum of the block, the others its first row.
        upper = p.half == 0
        table = p.base + ptx.select(upper, Int32(self.layout.sums), Int32(self.layout.firsts))
        values = [ptx.select(upper, y, z) for y, z in zip(block_sum, first, strict=True)]
        ptx.store_shared_x4(table + p.block * 512 + p.channel * 4, values)
        squares.store()
        beta = self.activated_beta(x, beta_bf16, beta_fp32, p.block * BLOCK + p.lane % BLOCK < chunk.valid)
        published = hooks.acquire_record()
        self.wait_for_reads(worker, self.late_copies)  # of Kg of the turn before
        hooks.sync()

        self.operands(p, x, sums, first, other, beta, chunk.valid, record)
        self.wait_for_reads(worker, 0)  # of everything else of the turn before
        cute.arch.fence_proxy("async.shared", space="cta")
        hooks.sync()

        products = self.multiply(p)
        if not self.config.folded:
            self.store_early(worker, record)
        claimed = hooks.claim_next()
        warpgroup.wait_group(0)
        self.store_blocks(p, tiles_of(products), record, hooks.sync)
        hooks.store_claim(claimed)
        if self.may_be_gentle:
            self.wait_for_reads(worker, 0)  # the inputs of the next chunk replace Kd and Qd
        hooks.sync()
        hooks.publish_previous(published)

    # ---- decays and norms

    def sums_of_decays(self, p: Place, gate: Gate, biases, valid, squares: SumsOfSquares):
        """Returns [8 rows][4 channels]: the log decays, summed from the lane's first row on; and [4]: their sum, in which rows beyond the
        sequence do not decay. A step of ``squares``, which has one for each row, follows every row."""
        raw = []
        for r in range(ROWS):
            if self.gate_bytes == 2:
                pairs = ptx.load_shared_x2(in_row(p.panel + p.cell, r) + self.layout.gates, Int32)
                raw.append([y for pair in pairs for y in ptx.unpack_bf16x2(pair)])
            else:
                row = p.panel + self.layout.gates + (p.first_row + r) * (4 * PANEL)
                raw.append(ptx.load_shared_x4(row + p.quad_of_channels * 16, Float32))
        sums, total = [], [Float32(0.0)] * 4
        for r in range(ROWS):
            scale = gate.log_scale
            if (
                self.config.unbounded
            ):  # rows beyond the sequence do not decay, because 2^-X could be infinite there
                scale = ptx.select(p.first_row + r < valid, scale, Float32(0.0))
            total = [
                ptx.fma(gate.activate(g, bias), scale, y)
                for g, bias, y in zip(raw[r], biases, total, strict=True)
            ]
            sums.append(total)
            squares.step(r)
        return sums, total if self.config.unbounded else self.total_of_valid(p, sums, valid)

    @cute.jit
    def total_of_valid(self, p: Place, sums: list, valid: Int32):
        """Returns [4]: the last of the ``sums`` whose row is in the sequence. Those of further rows decay only zeros."""
        total = cute.make_rmem_tensor((4,), Float32)
        for c in cutlass.range_constexpr(4):
            total[c] = sums[ROWS - 1][c]
        if valid < self.chunk:
            for c in cutlass.range_constexpr(4):
                last = Float32(0.0)
                for r in cutlass.range_constexpr(ROWS):
                    last = ptx.select(p.first_row + r < valid, sums[r][c], last)
                total[c] = last
        return [total[c] for c in range(4)]

    def store_scales(self, p: Place, x, beta):
        """Stores the factors of the rows of the warp's block to its table, each lane that of one row of k or q. ``beta``: of that row."""
        row = p.block * BLOCK + p.lane % BLOCK
        is_key = p.lane < BLOCK
        norms = p.base + self.layout.norms + p.lane // BLOCK * (4 * self.chunk) + row * 4
        total = ptx.load_shared(norms, Float32) + ptx.load_shared(norms + 8 * self.chunk, Float32)
        factor = ptx.select(x.l2norm > 0, ptx.rsqrt(total + Float32(1e-6)), Float32(1.0))
        table = p.base + self.layout.scales + p.warp * 256 + p.lane * 4
        ptx.store_shared(table, factor * ptx.select(is_key, Float32(-1.0), x.scale))
        ptx.store_shared(table + 128, factor * beta)
        cute.arch.sync_warp()

    # ---- operands

    def operands(self, p: Place, x, sums, first, other, beta, valid, record):
        """Stores rows, columns and Kg to shared memory, and a to the record. Stores Kd and Qd to the record if the panel is not gentle."""
        cell = p.base + p.channel * 4
        load = lambda table, block: ptx.load_shared_x4(cell + table + block * 512, Float32)
        block_sums = [load(self.layout.sums, b) for b in range(self.blocks)]
        firsts = [load(self.layout.firsts, b) for b in range(1, self.blocks)]
        self.store_scales(p, x, beta)
        starts = [[Float32(0.0)] * 4]  # G before each block, and at the end
        for block_sum in block_sums:
            starts.append([y + z for y, z in zip(starts[-1], block_sum, strict=True)])
        *starts, end = starts
        own = starts[0]
        for b in range(1, self.blocks):
            own = [ptx.select(p.block >= b, z, y) for y, z in zip(own, starts[b], strict=True)]
        before = [y + ptx.select(p.half > 0, z, Float32(0.0)) for y, z in zip(own, other, strict=True)]
        # `decay_offset` of channels 4n and 4n + 2, whose terms are bits of the lane
        unit, quad_lane = p.channel // 16, p.quad_of_channels % 2 * 2
        for i in range(2):
            at = (quad_lane + i) * 32 + (unit ^ (quad_lane + i)) * 4 + p.quad_of_channels // 2 % 2 * 2
            pair = [ptx.ex2(y) for y in end[2 * i : 2 * i + 2]]
            self.store_decays(record("a") + at * 4, pair, self.stores_per_channel(p))
        is_gentle = Boolean(False)
        if self.may_be_gentle:
            # In a partial chunk of bounded gates, rows beyond the sequence decay.
            falls = (steep.minimum(end) <= Float32(-GENTLE)) | (valid < self.chunk)
            is_gentle = Int32(cute.arch.vote_ballot_sync(falls)) == 0
        by_blocks = functools.partial(
            self.operands_by_blocks, p, sums, starts, firsts, own, first, before, end, record, is_gentle
        )
        if self.may_be_gentle and self.has_images:
            self.operands_by_panel(p, sums, before, end, record, is_gentle, by_blocks)
        else:
            by_blocks()

    @cute.jit
    def operands_by_panel(self, p: Place, sums, before, end, record, is_gentle: Boolean, by_blocks):
        """Stores the operands of a gentle panel. For another one it calls ``by_blocks``."""
        ptx.store_shared_if(self.gentle_flag(p.base, p.warp), Int32(is_gentle), p.lane == 0)
        if is_gentle:
            anchors = Anchors(before, [], [], end, None, None)
            if const_expr(self.config.unbounded):
                self.steep.store_flag(p, Int32(0))
            self.store_operands(p, anchors, self.exponents(anchors, sums), record, is_gentle=True)
        else:
            by_blocks()

    def gentle_flag(self, base, warp):
        """Returns the address of the word that is 1 if the panel of a warp is gentle, for `store_early`."""
        return base + self.layout.scales + warp * 256 + 192

    def stores_per_channel(self, p: Place):
        """Returns whether the lane stores the values that its channels have once per chunk. One lane of each quad of channels does."""
        return (p.block == self.blocks - 1) & (p.half == 0)

    def operands_by_blocks(self, p: Place, sums, starts, firsts, own, first, before, end, record, is_gentle):
        """Stores the operands of a panel whose blocks have an anchor each.

        Local records call this for gentle panels too, and then all anchors are 0. So they have the same bits as other records.

        Args:
            starts, own, before: G before each block, before the lane's block, and before the lane's first row.
            firsts, first: the log decays of the first row of each block but the first one, and of the lane's block.
        """
        # Two blocks of bounded gates fall by at most 2^115 each, so that 2^A and 2^(A_1 - A_0) are normal numbers.
        falls_further = self.config.unbounded or self.blocks > 2
        lowest = None if falls_further else LOWEST
        anchor = lambda y: rounded(y, lowest)
        if self.may_be_gentle and not self.has_images:
            anchor = lambda y: ptx.select(is_gentle, Float32(MAGIC), rounded(y, lowest))
        anchors = [anchor(y + z) for y, z in zip(own, first, strict=True)]
        later = [  # of the blocks from the second one on
            [anchor(y + z) for y, z in zip(*both, strict=True)]
            for both in zip(starts[1:], firsts, strict=True)
        ]
        shift = [y - value(a) for y, a in zip(before, anchors, strict=True)]
        to_end = [y - value(a) for y, a in zip(end, anchors, strict=True)]
        next_anchor = after_next = None
        if self.config.unbounded:
            shift, to_end = ([y + Float32(OFFSET) for y in z] for z in (shift, to_end))
            next_anchor = self.steep.last_shift(to_end)
            for b in reversed(range(self.blocks - 1)):
                hop = [z - y for y, z in zip(anchors, later[b], strict=True)]
                next_anchor = [ptx.select(p.block > b, y, z) for y, z in zip(next_anchor, hop, strict=True)]
            after_next = [y - z for y, z in zip(to_end, next_anchor, strict=True)]
        if falls_further:
            hops = [
                pack([power(rounded(z - y, ZERO)) for y, z in zip(before, one, strict=True)])
                for before, one in zip([anchors, *later], later, strict=False)
            ]
            offset = Float32(OFFSET if self.config.unbounded else 0.0)
            from_start = pack([power(ptx.maximum(a - offset, Float32(MAGIC + ZERO))) for a in anchors])
        else:
            hops = [
                pack([power_of_difference(z, y) for y, z in zip(anchors, one, strict=True)]) for one in later
            ]
            from_start = pack([power(a) for a in anchors])
        if self.config.folded:
            shifts = to_end if next_anchor is None else after_next
            for i in range(2):
                pair = [ptx.ex2(y) for y in shifts[2 * i : 2 * i + 2]]
                at = p.base + self.layout.ends + (p.channel + 2 * i) * 4
                ptx.store_shared_x2_if(at, pair, self.stores_per_channel(p))
        anchors = Anchors(shift, hops, from_start, to_end, next_anchor, after_next)
        if self.config.unbounded:
            lowest = [y + z for y, z in zip(sums[ROWS - 1], shift, strict=True)]
            lanes, is_steep = self.steep.vote(p, lowest, next_anchor)
            self.store_operands_of_unbounded(p, anchors, sums, record, lanes, is_steep)
        else:
            self.store_operands(p, anchors, self.exponents(anchors, sums), record)

    def exponents(self, anchors, sums):
        """Returns [8 rows][4 channels]: X."""
        return [[y + z for y, z in zip(row, anchors.shift, strict=True)] for row in sums]

    @cute.jit
    def store_operands_of_unbounded(self, p: Place, anchors, sums, record, lanes: Int32, is_steep: Boolean):
        """Calls `store_operands`, in a steep panel of a block with what `SteepColumns.refine` returns. ``lanes``, ``is_steep``: of
        `SteepColumns.vote`."""
        if is_steep:
            # The last block of Kg is free before its operands are stored, and so is the second copy of the last columns.
            spare = p.panel + self.layout.last
            if not self.config.folded:
                spare = self.kg_cell(p, record) - p.cell + BLOCK_BYTES
            exponents = self.steep.refine(p, spare, self.exponents(anchors, sums), lanes)
            self.store_operands(p, anchors, exponents, record, is_steep=True)
        else:
            self.store_operands(p, anchors, self.exponents(anchors, sums), record)

    def store_operands(self, p: Place, anchors, exponents, record, is_steep=False, is_gentle=False):
        """Stores rows, columns and Kg to shared memory, Kd and Qd to the record. With folded records there is no Kg.

        ``exponents``: X. ``is_steep``: whether rows may be lost, and the columns at the next anchor need exponentials of their own.
        ``is_gentle``: whether all anchors are 0. Then hopped columns are columns, and `store_early` copies the rows of k and q, which are Kd and
        Qd.
        """
        is_last_block = p.block == self.blocks - 1
        scales = p.base + self.layout.scales + p.warp * 256 + p.half * 32
        norm_k, norm_q, factor_k = (
            [y for i in range(2) for y in ptx.load_shared_x4(scales + at + 16 * i, Float32)]
            for at in (0, 64, 128)
        )
        has_kg = not self.config.folded
        to_end = [ptx.ex2(y) for y in (anchors.after_next if is_steep else anchors.to_end)] if has_kg else []
        # The columns of the lane's block at the anchor of block i are block `first_column(i)` + p.block of all columns.
        own = p.panel + p.cell
        own_columns = own + p.block * (p.block + 1) // 2 * BLOCK_BYTES + self.layout.columns
        own_kg_columns = own_columns
        if self.layout.keeps_lost:
            other = own - (self.blocks - 1) * BLOCK_BYTES + self.layout.last
            own_columns = ptx.select(is_last_block, other, own_columns)
        # From one anchor to the next one, from the lane's own on, or in a steep panel from the next one on.
        hops = [
            [ptx.select(p.block + is_steep < i, y, Int32(ONES)) for y in hop]
            for i, hop in enumerate(anchors.hops, 1)
        ]
        own_kg = self.kg_cell(p, record) if has_kg else None
        kd, qd = self.cell(p, record("kd")), self.cell(p, record("qd"))
        for r in range(ROWS):
            shared = in_row(own, r)
            k, q = (
                [y for pair in ptx.load_shared_x2(at, Int32) for y in ptx.unpack_bf16x2(pair)]
                for at in (shared, shared + self.layout.q)
            )
            k_row, q_row, column, hopped, kg = [], [], [], [], []
            for c in range(4):
                exponent = exponents[r][c]
                decay, growth = ptx.ex2(exponent), ptx.ex2(-exponent)
                k_row.append(k[c] * norm_k[r] * decay)
                q_row.append(q[c] * norm_q[r] * decay)
                scaled = k[c] * factor_k[r]
                column.append(scaled * growth)
                if is_steep:  # not from the column, because 2^-X may be infinite
                    hopped.append(scaled * ptx.ex2(anchors.next_anchor[c] - exponent))
                if has_kg:
                    kg.append((hopped if is_steep else column)[c] * to_end[c])
            k_row, q_row, column, hopped, kg = (pack(y) for y in (k_row, q_row, column, hopped, kg))
            if is_steep:
                column = self.steep.without_lost(exponents[r], column)
            else:
                hopped = column
            ptx.store_shared_x2(shared, k_row)
            ptx.store_shared_x2(shared + self.layout.q, q_row)
            if has_kg:
                self.store_kg_row(own_kg, shared, r, kg)
            ptx.store_shared_x2(in_row(own_columns, r), column)
            if self.layout.keeps_lost:
                ptx.store_shared_x2_if(in_row(own_kg_columns, r), hopped, is_last_block)
            for i in range(1, self.blocks):
                if not is_gentle and (i > 1 or not is_steep):
                    hopped = product(hopped, hops[i - 1])
                at = shared + self.layout.columns + first_column(i) * BLOCK_BYTES
                ptx.store_shared_x2_if(at, hopped, p.block < i)
            if not is_gentle:
                self.store_row(kd, r, product(k_row, anchors.from_start))
                self.store_row(qd, r, product(q_row, anchors.from_start))

    # ---- places of a record

    def cell(self, p: Place, image):
        """Returns the place of the lane's 8 bytes of its first row in an image of the record, for `store_row`."""
        # Of rows 0 to 3 and of rows 4 to 7, because a record may start at any multiple of 64 bytes on a CPU.
        return [image + Int64(p.panel_index * self.image_bytes + (p.cell ^ at)) for at in (0, 64)]

    def store_row(self, cell, r, words):
        """Stores the lane's 8 bytes of its row r to an image of the record."""
        ptx.store_global_x2((cell[r // 4] ^ Int64(r % 4 * 16)) + r * ROW, words, keep=True)

    def store_decays(self, address, words, condition):
        """Stores words of a to the record."""
        ptx.store_global_words_if(address, words, condition)

    def kg_cell(self, p: Place, record):
        """Returns the shared address of the lane's 8 bytes of its first row of Kg."""
        return p.panel + p.cell + self.layout.kg

    def store_kg_row(self, cell, shared, r, words):
        """Stores the lane's 8 bytes of its row r of Kg. ``cell``: of `kg_cell`. ``shared``: the address of those of k."""
        ptx.store_shared_x2(shared + self.layout.kg, words)

    def square(self, base, record, name):
        """Returns the shared address of T or Aqk."""
        return base + self.layout.squares + ("t", "aqk").index(name) * self.square_bytes

    # ---- L and Aqk

    def multiply(self, p: Place):
        """Starts (rows) (columns)^T. Returns its accumulators, each with its number of blocks of columns."""
        count = first_column(self.blocks)
        parts = [(self.layout.columns, count)]  # offsets, and blocks of columns
        if self.layout.keeps_lost:
            parts = [(self.layout.columns, count - 1), (self.layout.last, 1)]
        found = []
        warpgroup.fence()
        for offset, blocks in parts:
            mma = hopper_helpers.make_trivial_tiled_mma(
                BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, BLOCK * blocks)
            )  # fmt: skip
            part = mma.get_slice(p.thread % WARPGROUP)
            acc = cute.make_rmem_tensor(mma.partition_shape_C((64, BLOCK * blocks)), Float32)
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, False)
            for panel in range(2):
                start = p.base + panel * self.layout.panel
                rows = start + self.rows_of_warpgroup(p)
                a = mma.make_fragment_A(part.partition_A(image(rows, 64)))
                b = mma.make_fragment_B(part.partition_B(image(start + offset, BLOCK * blocks)))
                for k in range(PANEL // 16):
                    cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
                    atom.set(warpgroup.Field.ACCUMULATE, True)
            found.append((acc, blocks))
        warpgroup.commit_group()
        return found

    def rows_of_warpgroup(self, p: Place):
        """Returns the offset in a panel of the 64 rows that the warpgroup multiplies: all rows of k and q."""
        return 0

    @cute.jit
    def store_blocks(self, p: Place, blocks, record, sync):
        """Stores the blocks of -L for `finish`, and those of Aqk as an image. ``blocks``: of `tiles_of`. ``sync``: the group's barrier."""
        square = self.square(p.base, record, "aqk")
        lower = p.warp % 2 > 0
        diagonal = [
            [ptx.select(lower, y, z) for y, z in zip(blocks[2][tile], blocks[0][tile], strict=True)]
            for tile in range(2)
        ]
        if const_expr(self.config.unbounded):
            diagonal = self.steep.with_refined(p, diagonal)
        row, pair = p.lane // 4, 2 * (p.lane % 4)
        if p.warp < 2:
            start = p.base + self.layout.minus_l + p.warp * (16 * COLUMN)
            for tile in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    at = start + (8 * tile + pair + i % 2) * COLUMN + (row + 8 * (i // 2)) * 4
                    ptx.store_shared(at, diagonal[tile][i])
            if lower:
                store_parts(p.base + self.layout.l_block + p.lane * 16, fragment_in_parts(blocks[1]))
        else:
            below = [ptx.select(lower, y, Int32(0)) for y in fragment(blocks[1])]
            own = fragment(self.causal(p, diagonal))
            left = [ptx.select(lower, y, z) for y, z in zip(below, own, strict=True)]
            right = [ptx.select(lower, y, Int32(0)) for y in own]
            block_row = p.warp % 2
            store_square(square, self.chunk, left, block_row, 0, p.lane)
            store_square(square, self.chunk, right, block_row, 1, p.lane)

    def causal(self, p: Place, tiles):
        """Returns a diagonal block of Aqk with zeros above its diagonal."""
        row, pair = p.lane // 4, 2 * (p.lane % 4)
        return [
            [
                ptx.select(row + 8 * (e // 2) >= 8 * tile + pair + e % 2, tiles[tile][e], Float32(0.0))
                for e in range(4)
            ]
            for tile in range(2)
        ]

    # ---- T

    @cute.jit
    def finish(self, worker: Worker, record):
        """Computes T, in one warp, which changes from turn to turn. A barrier of the group must follow."""
        if worker.thread // 32 == worker.turn % 3:
            self.invert(worker.base, worker.thread % 32, self.square(worker.base, record, "t"))
        cute.arch.fence_proxy("async.shared", space="cta")

    def invert(self, base, lane, square):
        """Computes T from what `store_blocks` has stored. Lanes 0 to 15 have the columns of the upper diagonal block, the others those of
        the lower one. ``square``: address of T."""
        start = base + self.layout.minus_l
        eliminate(start + lane // BLOCK * (16 * COLUMN), lane % BLOCK)
        quad, pair = lane // 4, 2 * (lane % 4)
        upper, lower = start, start + 16 * COLUMN
        x_00, x_11 = [], []
        for i in range(4):
            # the transpose of T00: its rows are columns, contiguous in memory
            at = upper + (quad + 8 * (i % 2)) * COLUMN + (pair + 8 * (i // 2)) * 4
            x_00.append(ptx.load_shared_x2(at, Float32))
            at = lower + (pair + 8 * (i // 2)) * COLUMN + (quad + 8 * (i % 2)) * 4
            x_11.append([ptx.load_shared(at + e * COLUMN, Float32) for e in range(2)])
        x_00, x_11 = (list(zip(*(ptx.split_bf16x2(*y) for y in x), strict=True)) for x in (x_00, x_11))
        zero = [[Float32(0.0)] * 4 for _ in range(2)]
        l_block = load_parts(base + self.layout.l_block + lane * 16)
        # T10^T = (T00^T (-L10)^T) T11^T
        product = product_in_parts(x_00, l_block, zero)
        product = product_in_parts(fragment_in_parts(product), x_11, zero)
        below = fragment(product)
        store = functools.partial(store_square, square, self.chunk)
        store(x_00[0], 0, 0, lane, transpose=True)
        store([Int32(0)] * 4, 0, 1, lane)
        store(below, 1, 0, lane, transpose=True)
        store(x_11[0], 1, 1, lane)

    # ---- bulk copies, of the leader. Groups without images have none.

    @cute.jit
    def store_early(self, worker: Worker, record):
        """Copies Kg to the record asynchronously, and Kd and Qd of gentle panels."""
        if const_expr(self.has_images) and worker.thread == self.leader:
            for panel in cutlass.range_constexpr(2):
                copy = functools.partial(self.store_panel, worker, record, panel)
                if ptx.load_shared(self.gentle_flag(worker.base, panel), Int32) > 0:
                    copy("kd", 0)
                    copy("qd", self.layout.q)
                copy("kg", self.layout.kg)
            cute.arch.cp_async_bulk_commit_group()

    def store_panel(self, worker: Worker, record, panel, name, region):
        """Copies a panel of an image to the record asynchronously."""
        shared = worker.base + panel * self.layout.panel + region
        to = record(name) + panel * self.image_bytes
        ptx.bulk_store(to, shared, Int32(self.image_bytes), keep=True, commit=False)

    @cute.jit
    def complete(self, worker: Worker, record, sync):
        """Copies T and Aqk to the record asynchronously. ``sync``: the barrier of the group, which must separate `finish` from this call."""
        if const_expr(self.has_images) and worker.thread == self.leader:
            for name in ("t", "aqk"):
                shared = self.square(worker.base, record, name)
                ptx.bulk_store(record(name), shared, Int32(self.square_bytes), keep=True, commit=False)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait_for_reads(self, worker: Worker, pending: cutlass.Constexpr[int]):
        """The leader waits until all but the last ``pending`` bulk copies have read shared memory."""
        if const_expr(self.has_images) and worker.thread == self.leader:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)

    def wait_for_stores(self, pending):
        """Waits until all but the last ``pending`` bulk copies are complete. The leader calls it."""
        if self.has_images:
            cute.arch.cp_async_bulk_wait_group(pending)


class StridedWarpgroupIntraChunk(StridedInputs, WarpgroupIntraChunk):
    """`WarpgroupIntraChunk` over strided inputs."""


# ---- anchors: numbers of the form integer + MAGIC


def rounded(x: Float32, lowest: float | None = None) -> Float32:
    """Returns x, rounded to an integer of at least ``lowest``, as an anchor."""
    if lowest is not None:
        x = ptx.maximum(x, Float32(lowest))
    return x + Float32(MAGIC)


def value(anchor: Float32) -> Float32:
    """Returns the integer of an anchor."""
    return anchor - Float32(MAGIC)


def power(anchor: Float32) -> Float32:
    """Returns 2^A of an anchor from `ZERO` on; 0 for that."""
    return ptx.float_of_bits((ptx.bits_of_float(anchor) << 23) + Int32(0x3F800000))


def power_of_difference(anchor: Float32, other: Float32) -> Float32:
    """Returns 2^(A - other)."""
    return ptx.float_of_bits(
        ((ptx.bits_of_float(anchor) - ptx.bits_of_float(other)) << 23) + Int32(0x3F800000)
    )


def product(a, b):
    """Returns the products of lists of bf16x2."""
    return [ptx.mul_bf16x2(x, y) for x, y in zip(a, b, strict=True)]


# ---- images in shared memory


def image(address: Int32, rows: int):
    """Returns the tensor [rows, 64] of an image panel at a shared address, a multiple of 1024."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    layout = cute.tile_to_shape(atom, (rows, PANEL), order=(0, 1))
    pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.smem, assumed_align=1024)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=BFloat16), layout.outer)


def in_row(cell, r):
    """Returns the address of the lane's 8 bytes of its row r, from that of row 0. Images start at multiples of 128 bytes, so the XOR of the
    swizzle is one instruction, and the rest is the offset of the access."""
    return (cell ^ (r * 16)) + r * ROW


def tiles_of(products):
    """Returns the warp's 16 rows of what `multiply` has started, once that is complete: two accumulator tiles for each block of columns."""
    return [
        [[acc[8 * i + 4 * tile + e] for e in range(4)] for tile in range(2)]
        for acc, blocks in products
        for i in range(blocks)
    ]


def store_square(square, chunk, a, i, j, lane, transpose=False):
    """Stores block (i, j), an A fragment, to the image [C, C] at a shared address; with ``transpose`` the fragment is that of the block's
    transpose."""
    # Matrices 1 and 2 of a fragment of the transpose change places.
    low, high = (lane // 16, lane // 8 % 2) if transpose else (lane // 8 % 2, lane // 16)
    row, unit = i * BLOCK + 8 * low + lane % 8, 2 * j + high
    swizzle = row // 2 % 4 if chunk == 32 else row % 8
    address = square + row * (2 * chunk) + (unit ^ swizzle) * 16
    ptx.stmatrix_x4(address, [a[n] for n in range(4)], transpose=transpose)
