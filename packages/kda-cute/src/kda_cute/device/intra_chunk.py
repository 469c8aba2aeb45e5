"""The preparation: the tokens of one chunk and one value head become the operands of the chain.

With G the inclusive cumulative sum of the log decays of a chunk, in base 2:

    L_ij = k_i . 2^{G_i - G_j} beta_j k_j (j < i)      Aqk_ij = scale q_i . 2^{G_i - G_j} beta_j k_j (j <= i)
    T = (I + L)^-1
    Kd = k 2^G,  Qd = scale q 2^G,  Kg = beta k 2^{G_end - G},  a = 2^{G_end}

beta goes with the columns, so that the diagonal of T is exactly 1: rounded to bf16 in T, it would make a whole row of
the state too large or too small by one factor, where roundings of Kg differ from element to element.

A group of warps owns one (slot, value head), a warp one block of 16 rows. Within a block, decay is a row factor
2^{G_i - A} <= 1 times a column factor 2^{A - G_j} >= 1, A the G of the block's *first* row: an anchor further
down would let later gates round earlier outputs. Columns then hop from anchor to anchor, block by block, to
the end of the chunk, where they are Kg; no exponent of a hop is above 0.

Stages, a barrier of the group between them:

1. *decay*: one warp a block, four channels a lane, down the rows: gate, exponents relative to the anchor; then,
   with the sums of the other blocks, anchors and hops.
2. *rows*: one warp a block, in MMA fragments: factors, Kd, Qd, the diagonal blocks of L and Aqk.
3. *columns*: one warp a block, as columns: the inverse of its diagonal block, the blocks of L and Aqk below it, then
   Kg.
4. *merge*: one warp a column of blocks of T, by forward substitution in blocks.

Registers hold MMA fragments throughout. A row of q, k, D is held by the four lanes of a quad, each with the
8 channels 32m + 8*quad + 0..7, m < 4, which are one 16-byte access in global memory. The fragments of two
k16 steps take them in that order, so that "channel pair t of group m" is an MMA's pair of columns: a
permutation of the channels that both operands share.

Only mma.sync, ldmatrix, stmatrix and cp.async: nothing here is particular to sm_90, and every GPU backend calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.ptx import LOG2E
from kda_cute.records import BLOCK, HEAD_DIM, IntraChunkConfig, decay_offset, image_offset

G_FLOOR = -104.0 * LOG2E  # 2^G_FLOOR is 0 in fp32: masks of -1000 and -inf stay out of the cumulative sum
MOST_RATE = 2.0**60  # of a softplus gate: 1/rate is a number
#: A row is split into factors as a column while its gates since the anchor sum to less than this. Then whatever row factor
#: the product with it needs is a normal number, or the product below 2^-39.
VOTE_LIMIT = 60.0 * LOG2E

ROWS = 8192  # bytes of shared memory of a block of rows: [4 groups m] of 2048
GROUP = 2048  # fp32 exponents [16][32 channels]; then 1024 of k rows and 1024 of q rows
TILE = 1024  # bytes of a 16x16 matrix in fp32, or of its two bf16 parts in fragment order


class Chunk(NamedTuple):
    """One chunk of one sequence and value head.

    ``head``: value head. ``token``: first token in B*T. ``key_row``: row of that token and its key head in q and k,
    ``token * H + key head``. ``valid``: tokens of the chunk, 1 to C.
    """

    head: Any
    token: Any
    key_row: Any
    valid: Any


class Worker(NamedTuple):
    """The calling thread's place.

    ``thread``: index in its group. ``base``: shared address of the group's memory, a multiple of 1024. ``turn``: a number
    that differs from one chunk of the group to the next.
    """

    thread: Any
    base: Any
    turn: Any


class Hooks(NamedTuple):
    """What a kernel does between the stages of a chunk.

    ``sync``: barrier of the group. ``acquire_record``: waits until the record may be written. ``claim_next``: claims the
    group's next chunk, and returns a value that only `store_claim` uses. ``store_claim``: stores that claim.
    """

    sync: Callable[[], None]
    acquire_record: Callable[[], None]
    claim_next: Callable[[], Any]
    store_claim: Callable[[Any], None]


@dataclass(frozen=True)
class Layout:
    """Byte offsets of the regions of a group's shared memory, and their size."""

    exponents: int
    k: int
    q: int
    first: int
    last: int
    anchor: int
    hop: int
    fall: int
    beta: int
    live: int
    bytes: int

    @property
    def tables(self) -> int:
        """Start of the tables of decays, which the blocks of L replace after stage 2."""
        return self.first


class IntraChunk:
    """What one group of ``threads`` threads does with one chunk and value head.

    Gates are <= 0 (a precomputed g is trusted to be). Rows of a chunk beyond its sequence count as zero in q, k, g and
    beta. ``layout``: shared memory of a group.
    """

    def __init__(self, config: IntraChunkConfig):
        self.config = config
        self.chunk = config.chunk
        self.blocks = config.chunk // BLOCK
        self.threads = 32 * self.blocks
        self.gate_bytes = 2 if config.gate_dtype == "bfloat16" else 4
        rows = self.chunk * HEAD_DIM * 2
        table = HEAD_DIM * 4 * self.blocks
        sizes = {
            "exponents": ROWS * self.blocks,
            # k in fragment order, a block's rows in its 4096 bytes. After stage 2 k and q hold the columns; after
            # stage 3 this the diagonal block of (I + L)^-1 (TILE), and the scratch of its warp.
            "k": rows,
            "q": rows,
            "first": table,  # log decay of the first row of block b
            "last": table,  # exponent G - A_b of its last row
            "anchor": table,  # 2^{A_b}
            "hop": table,  # 2^{A_{b+1} - A_b}
            "fall": table if config.unbounded else 0,  # A_{b+1} - A_b
            "beta": self.chunk * 4,
            "live": self.chunk * 4,  # what the gate of a row is multiplied with: 0 beyond the sequence
        }
        at, end = {}, 0
        for name, size in sizes.items():
            at[name] = end
            end += size
        self.layout = Layout(**at, bytes=end)

    # ---- one chunk

    def request(self, x, worker: Worker, chunk: Chunk):
        """Ask for g and q of a chunk, whose room is free as soon as the chunk before is in its last stage; what is asked
        for into registers: beta of a row, as bf16 and as fp32, A_log, and dt_bias of four channels. ``x``: the call
        (addresses q, k, g, beta, a_log, dt_bias; numbers H, HV, beta_bytes, scale, l2norm, lower_bound, beta_factor).
        Rows of g are counted in 32 bits: 2^31 of them are 512 GiB."""
        p = self.positions(worker)
        p.valid = chunk.valid
        value_row = chunk.token * x.HV + chunk.head
        rate, biases = self.load_gate_parameters(p, x, chunk.head)
        beta = self.load_beta(p, x, value_row)
        self.copy_gates(p, x.g, value_row, x.HV)
        self.copy_rows(p, x.q, chunk.key_row, x.H, p.q)
        cute.arch.cp_async_commit_group()
        return *beta, rate, *biases

    def compute(self, x, worker: Worker, chunk: Chunk, loaded, record, hooks: Hooks):
        """Stages 1 to 3 of a chunk that was requested. ``loaded``: what `request` returned. ``record``: gives the address of
        the chunk's record in an array, by name."""
        p = self.positions(worker)
        p.valid, p.scale, p.l2norm = chunk.valid, x.scale, x.l2norm > 0
        narrow, wide, a_log, *biases = loaded
        rate = ptx.minimum(ptx.ex2(a_log * Float32(LOG2E)), Float32(MOST_RATE))
        self.copy_rows(p, x.k, chunk.key_row, x.H, p.k)
        cute.arch.cp_async_commit_group()

        factor = self.gate_factor(x, rate)
        self.store_live(p, factor)
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_warp()
        self.decay(p, rate, biases, factor)
        self.store_beta(p, x, narrow, wide)
        hooks.acquire_record()
        hooks.sync()
        steep = self.anchors(p, record("a"))
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

        l_acc, a_acc = self.rows(p, steep, record("kd"), record("qd"))
        hooks.sync()

        claimed = hooks.claim_next()
        self.columns(p.block, p.lane, worker.base, record("kg"), record("aqk"))
        self.store_block(self.pack(a_acc[0] + a_acc[1]), p.block, p.block, p.lane, worker.base, record("aqk"))
        self.substitute(p, l_acc, worker.base, record("t"))
        hooks.store_claim(claimed)
        hooks.sync()

    def finish(self, worker: Worker, record):
        """Stage 4."""
        p = self.positions(worker)
        parts = self.diagonal(p, worker.base)
        self.merge(parts, p.block, p.lane, worker.base, record("t"))

    def has_least_work(self, thread, turn):
        """Whether the thread's warp has nothing to do in stage 4, and the least of all in stage 3."""
        return self.block_of(thread, turn) == self.blocks - 1

    def positions(self, worker: Worker):
        """Where a thread is, and where in shared memory everything begins. Warps get another block in each turn, because
        blocks differ in work, and a warp's number chooses its scheduler."""
        return self.placed(worker.thread, self.block_of(worker.thread, worker.turn), worker.base)

    def block_of(self, thread, turn):
        return thread // 32 + turn & self.blocks - 1

    def placed(self, thread, block, base):
        lane = thread % 32
        places = {field.name: base + getattr(self.layout, field.name) for field in fields(self.layout)}
        return SimpleNamespace(
            thread=thread, warp=thread // 32, lane=lane, row=lane // 4, quad=lane % 4, block=block, **places
        )

    # ---- loads

    def row_address(self, x, row, size=2):
        """The address of a row of 128 channels of ``size`` bytes, rows counted over B, T and heads."""
        return x + Int64(row) * (HEAD_DIM * size)

    def copy_gates(self, p, g, value_row, HV):
        """g of the warp's block to shared memory, asynchronously: fp32 at the places of the exponents that replace
        it, bf16 as two halves of 64 channels, each in rows of 128 bytes within the room of its exponents."""
        size = self.gate_bytes
        units = HEAD_DIM * size // 16  # to a row
        unit, first = p.lane % units, p.lane // units
        place = p.exponents + p.block * ROWS
        start = p.block * BLOCK
        for at in range(0, BLOCK, 32 // units):
            row = at + first
            address = self.row_address(g, value_row + (start + row) * HV, size) + unit * 16
            if size == 2:
                to = place + unit // 8 * (2 * GROUP) + row * 128 + unit % 8 * 16
            else:
                to = place + unit // 8 * GROUP + row * 128 + (unit % 8 ^ row % 2) * 16
            ptx.cp_async_x4(to, address, start + row < p.valid)
        cute.arch.cp_async_commit_group()

    def copy_rows(self, p, x, key_row, H, place):
        """Rows of q or k to shared memory, asynchronously, in fragment order: a thread copies for itself."""
        for half in range(2):
            row = p.block * BLOCK + p.row + 8 * half
            address = self.row_address(x, key_row + row * H) + p.quad * 16
            for m in range(4):
                ptx.cp_async_x4(self.row_place(p, place, half, m), address + 64 * m, row < p.valid)

    def load_pairs(self, p, place, half, m):
        """bf16x2 [4] of group m of a row of k or q, as ``copy_rows`` placed it."""
        return ptx.load_shared_x4(self.row_place(p, place, half, m), Int32)

    def keys(self, p, half, pair):
        """Two channels of a row of k in fp32, normalised."""
        pair = ptx.unpack_bf16x2(pair)
        return [x * p.k_factors[half] for x in pair]

    def queries(self, p, half, pair):
        """Two channels of a row of q in fp32, normalised and scaled."""
        return [x * p.q_factors[half] for x in ptx.unpack_bf16x2(pair)]

    def row_place(self, p, place, half, m):
        return place + p.block * 4096 + (half * 4 + m) * 512 + p.lane * 16

    def load_beta(self, p, x, value_row):
        """beta of a row, as it comes; two threads load the same."""
        row = p.thread % self.chunk
        address = x.beta + (Int64(value_row) + row * x.HV) * x.beta_bytes
        exists, narrow = row < p.valid, x.beta_bytes == 2
        # Two loads, of which one is none: whatever combined them here would wait for them.
        return (
            ptx.load_global_u16(address, exists & narrow),
            ptx.load_global_f32(address, exists & (x.beta_bytes == 4)),
        )

    def store_beta(self, p, x, narrow, wide):
        """beta, activated (``beta_factor`` times the sigmoid, 0: as it is), to shared memory; rows beyond the
        sequence are 0."""
        row = p.thread % self.chunk
        beta = ptx.unpack_bf16x2(narrow)[0] + wide
        beta = ptx.select(x.beta_factor > Float32(0.0), ptx.sigmoid(beta) * x.beta_factor, beta)
        ptx.store_shared(p.beta + row * 4, ptx.select(row < p.valid, beta, Float32(0.0)))

    def load_gate_parameters(self, p, x, head):
        """A_log of the head, and dt_bias of the lane's four channels; 0, which changes nothing, where there is none."""
        if self.config.gate == "precomputed":
            return Float32(0.0), [Float32(0.0)] * 4
        rate = ptx.load_global_f32(x.a_log + Int64(head) * 4, x.a_log != Int64(0))
        first = x.dt_bias + (Int64(head) * HEAD_DIM + 2 * p.lane) * 4
        return rate, [ptx.load_global_f32(first + at * 4, x.dt_bias != Int64(0)) for at in (0, 1, 64, 65)]

    # ---- stage 1: decay

    def decay(self, p, rate, biases, factor):
        """Exponents G_i - A of the warp's block, and what its anchors are made of: channels 2*lane, 2*lane + 1, and
        these plus 64."""
        share = factor * Float32(1.0 / G_FLOOR)
        place = p.exponents + p.block * ROWS
        unit, inner = p.lane % 16 // 2, p.lane % 2 * 8
        parity = [place + p.lane // 16 * GROUP + (unit ^ odd) * 16 + inner for odd in range(2)]
        if self.gate_bytes == 2:
            raw = [
                [
                    ptx.load_shared(place + half * (2 * GROUP) + row * 128 + p.lane * 4, Int32)
                    for half in range(2)
                ]
                for row in range(BLOCK)
            ]
            cute.arch.sync_warp()  # exponents take twice the room: they go where others read
        live = self.load_live(p)
        first, since = [], [Float32(0.0)] * 4
        for row in range(BLOCK):
            for half in range(2):
                at = parity[row % 2] + row * 128 + half * (2 * GROUP)
                pair = (
                    ptx.unpack_bf16x2(raw[row][half])
                    if self.gate_bytes == 2
                    else ptx.load_shared_x2(at, Float32)
                )
                for c, x in enumerate(pair, 2 * half):
                    gate = self.gate(x, rate, biases[c], share)
                    if row == 0:
                        first.append(gate * live[row])
                    else:
                        since[c] = ptx.fma(gate, live[row], since[c])
                ptx.store_shared_x2(at, since[2 * half : 2 * half + 2])
        for half in range(2):
            cell = p.block * (HEAD_DIM * 4) + half * 256 + p.lane * 8
            ptx.store_shared_x2(p.first + cell, first[2 * half : 2 * half + 2])
            ptx.store_shared_x2(p.last + cell, since[2 * half : 2 * half + 2])

    def anchors(self, p, address):
        """2^A and 2^hop of the warp's block, four channels a lane; and a, each warp its share of the channels.
        Whether some column may have to leave split factors, or 2^hop is too small a number: a hop falls further than
        any of them."""
        cell = p.lane * 16
        row = lambda table, block: ptx.load_shared_x4(table + block * (HEAD_DIM * 4) + cell, Float32)
        anchor = row(p.first, p.block)
        for block in range(self.blocks - 1):
            for i, (x, y) in enumerate(zip(row(p.first, block), row(p.last, block), strict=True)):
                anchor[i] = anchor[i] + ptx.select(block < p.block, x + y, Float32(0.0))
        following = row(p.first, cutlass.min(p.block + 1, self.blocks - 1))
        last = p.block == self.blocks - 1
        hop = [
            x + ptx.select(last, Float32(0.0), y)
            for x, y in zip(row(p.last, p.block), following, strict=True)
        ]
        own = p.block * (HEAD_DIM * 4) + cell
        ptx.store_shared_x4(p.anchor + own, [ptx.ex2(x) for x in anchor])
        ptx.store_shared_x4(p.hop + own, [ptx.ex2(x) for x in hop])
        if self.config.unbounded:
            ptx.store_shared_x4(p.fall + own, hop)
        for share in range(4 // self.blocks):
            channel = (p.warp + self.blocks * share) * 32 + p.lane
            end = Float32(0.0)
            for block in range(self.blocks):
                for table in (p.first, p.last):
                    end = end + ptx.load_shared(table + block * (HEAD_DIM * 4) + channel * 4, Float32)
            ptx.store_global(address + decay_offset(channel) * 4, ptx.ex2(end))
        fall = ptx.minimum(ptx.minimum(hop[0], hop[1]), ptx.minimum(hop[2], hop[3]))
        return cute.arch.vote_any_sync(fall <= Float32(-VOTE_LIMIT)) if self.config.unbounded else None

    def gate(self, x, rate, bias, share):
        """The log decay of one raw gate, but for the factor of its row; at least 0. With votes, down to G_FLOOR, in which
        it is then counted if it was raw: ``share`` is the gate's factor in these units."""
        vote = self.config.unbounded
        if self.config.gate == "precomputed":
            return ptx.minimum(-x, Float32(G_FLOOR / -LOG2E)) if vote else -x
        if self.config.gate == "softplus":
            return ptx.scaled_softplus2(x, bias, share)
        steepness = rate * Float32(-LOG2E)
        gate = ptx.rcp(ptx.ex2(ptx.fma(x, steepness, bias * steepness)) + Float32(1.0))
        return ptx.fma_saturated(gate, share, Float32(0.0)) if vote else gate

    def gate_factor(self, x, rate):
        """What a gate is multiplied with, to be a log decay in base 2; below 0."""
        if self.config.gate == "bounded":
            return x.lower_bound * Float32(LOG2E)
        return -rate if self.config.gate == "softplus" else Float32(-LOG2E)

    def store_live(self, p, factor):
        """Factors of the rows' gates. A row beyond the sequence has 0; a precomputed gate needs none, for such rows are
        copied as zeros. Every warp stores its block's."""
        if self.config.gate == "precomputed":
            return
        row = p.block * BLOCK + p.lane % BLOCK
        unit = Float32(G_FLOOR) if self.config.unbounded else factor
        ptx.store_shared(p.live + row * 4, ptx.select(row < p.valid, unit, Float32(0.0)))

    def load_live(self, p):
        if self.config.gate == "precomputed":
            return [Float32(-LOG2E)] * BLOCK
        places = [p.live + (p.block * BLOCK + row) * 4 for row in range(0, BLOCK, 4)]
        return [x for place in places for x in ptx.load_shared_x4(place, Float32)]

    # ---- stage 2: rows

    def rows(self, p, steep, kd_address, qd_address):
        """Row factors to shared memory, -Kd and Qd to global memory, and the diagonal blocks of L and Aqk. The
        columns at the next block's anchor replace k and q, for the same thread: 4 channels of a group of 8 each.
        ``steep``: some column may have to leave split factors."""
        refined = votes = None
        if self.config.unbounded:
            products, reach = (cute.make_rmem_tensor((n,), Float32) for n in (16, 2))
            products.fill(0.0)
            reach.fill(0.0)
            self.vote(steep, products, reach, p.thread, p.block, p.exponents - self.layout.exponents)
            votes = [reach[half] < VOTE_LIMIT for half in range(2)]
        norms = (
            [ptx.select(p.l2norm, x, Float32(1.0)) for x in self.inverse_norms(p, y)] for y in (p.k, p.q)
        )
        p.k_factors, q_norms = norms
        p.q_factors = [x * p.scale for x in q_norms]
        if self.config.unbounded:
            refined = self.normalised(p, products, votes)
        products = self.split_rows(p, kd_address, qd_address, refined, votes)
        l_acc, a_acc = products[:2], products[2:]
        for tile in range(2):
            beta = ptx.load_shared_x2(p.beta + (p.block * BLOCK + 8 * tile + 2 * p.quad) * 4, Float32)
            for i in range(4):
                inside = p.row + 8 * (i // 2) >= 8 * tile + 2 * p.quad + i % 2
                l_acc[tile][i] = l_acc[tile][i] * beta[i % 2]
                a_acc[tile][i] = ptx.select(inside, a_acc[tile][i] * beta[i % 2], Float32(0.0))
        return l_acc, a_acc

    def split_rows(self, p, kd_address, qd_address, refined=None, votes=None):
        """The rows by two-sided factors: four tiles of 4 values, two of L and two of Aqk, both without beta.
        ``refined``: what they hold of the columns that have not such factors, ``votes`` whether each of the two has."""
        acc = refined or [[Float32(0.0)] * 4 for _ in range(4)]
        l_acc, a_acc = acc[:2], acc[2:]
        kd_rows, qd_rows = (self.row_addresses(p, address) for address in (kd_address, qd_address))
        following = self.load_group(p, 0)
        for m in range(4):
            since, k_pairs, q_pairs = following
            cute.arch.sync_warp()  # the rows of the factors go where the exponents were
            place = p.exponents + p.block * ROWS + m * GROUP + p.lane * 16
            kd, qd = ([[], []] for _ in range(2))
            for step in range(2):
                columns = [[], []]
                if step == 1 and m < 3:
                    # Here, because no load moves up past a store, nor before the next group's use.
                    following = self.load_group(p, m + 1)
                k_row, q_row, k_col = ([[], []] for _ in range(3))
                for pair in range(2):
                    channel = (m * 32 + p.quad * 8 + step * 4 + pair * 2) * 4
                    anchor, hop = (
                        ptx.load_shared_x2(table + p.block * (HEAD_DIM * 4) + channel, Float32)
                        for table in (p.anchor, p.fall if votes else p.hop)
                    )
                    for half in range(2):
                        k = self.keys(p, half, k_pairs[half][2 * step + pair])
                        q = self.queries(p, half, q_pairs[half][2 * step + pair])
                        kr, qr, kc, kg, qg = [], [], [], [], []
                        for e in range(2):
                            c = 2 * pair + e
                            fall = since[half][4 * step + c]
                            down = ptx.ex2(fall)
                            kr.append(k[e] * down)
                            qr.append(q[e] * down)
                            kg.append(kr[e] * -anchor[e])
                            qg.append(qr[e] * anchor[e])
                            kc.append(k[e] * ptx.ex2(-fall))
                            # With votes afresh: a steep hop would flush what the factor blew up.
                            column = k[e] * ptx.ex2(hop[e] - fall) if votes else kc[e] * hop[e]
                            columns[half].append(column)
                        k_row[half].append(ptx.pack_bf16x2(*kr))
                        q_row[half].append(ptx.pack_bf16x2(*qr))
                        k_col[half].append(ptx.pack_bf16x2(*kc))
                        kd[half].append(ptx.pack_bf16x2(*kg))
                        qd[half].append(ptx.pack_bf16x2(*qg))
                k_a, q_a = ([x[0][0], x[1][0], x[0][1], x[1][1]] for x in (k_row, q_row))
                ptx.stmatrix_x4(place + step * 512, k_a)
                ptx.stmatrix_x4(place + step * 512 + TILE, q_a)
                if votes:
                    k_col = [
                        [ptx.select(vote, x, Int32(0)) for x in column]
                        for vote, column in zip(votes, k_col, strict=True)
                    ]
                for half in range(2):
                    l_acc[half] = ptx.mma_m16n8k16(k_a, k_col[half], l_acc[half])
                    a_acc[half] = ptx.mma_m16n8k16(q_a, k_col[half], a_acc[half])
                    ptx.store_shared_x4(self.row_place(p, (p.k, p.q)[step], half, m), columns[half])
            for half in range(2):
                step = self.row_step(m, half)
                ptx.store_global_x4(kd_rows[m % 2] + step, kd[half], keep=True)
                ptx.store_global_x4(qd_rows[m % 2] + step, qd[half], keep=True)
        return l_acc + a_acc

    def load_group(self, p, m):
        """Exponents, k and q of the thread's two rows, channels of group m."""
        since = [self.load_exponents(p, m, half) for half in range(2)]
        return since, *([self.load_pairs(p, x, half, m) for half in range(2)] for x in (p.k, p.q))

    def inverse_norms(self, p, place):
        """1/sqrt(sum x^2 + 1e-6) of the thread's two rows of k or q.

        The sums of squares are the diagonal of x x^T. A pair of registers as they were loaded, taken for rows r
        and r + 8 of an MMA, are the even and the odd pairs of one row: two accumulators take half a sum each.
        """
        factors = []
        for half in range(2):
            even, odd = ([Float32(0.0)] * 4 for _ in range(2))
            for m in range(4):
                group = self.load_pairs(p, place, half, m)
                for a in (group[:2], group[2:]):
                    even = ptx.mma_m16n8k8(a, a[0], even)
                    odd = ptx.mma_m16n8k8(a, a[1], odd)
            diagonal = ptx.select(p.row % 2 == 0, even[0] + odd[2], even[1] + odd[3])
            total = cute.arch.shuffle_sync(diagonal, p.row * 4 + p.row // 2)
            factors.append(ptx.rsqrt(total + Float32(1e-6)))
        return factors

    def pack(self, values):
        """fp32 values to bf16x2, in pairs."""
        return [ptx.pack_bf16x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]

    def load_exponents(self, p, m, half):
        """G_i - A of a row of the thread's block, its 8 channels of group m."""
        row = p.exponents + p.block * ROWS + m * GROUP + (p.row + 8 * half) * 128
        parts = [row + ((2 * p.quad + part) ^ (p.row % 2)) * 16 for part in range(2)]
        return [x for part in parts for x in ptx.load_shared_x4(part, Float32)]

    def load_channels(self, table, block, m, quad):
        """The thread's 8 channels of group m of a table [blocks][128] fp32."""
        place = table + block * (HEAD_DIM * 4) + m * 128 + quad * 32
        return [x for part in range(2) for x in ptx.load_shared_x4(place + 16 * part, Float32)]

    def row_addresses(self, p, image):
        """Where a row of the thread's block is in an image of [C, 128], its 8 channels of groups 0 and 1; what
        ``row_step`` gives leads to those of the other groups and to the row 8 further down. Two steps, because what is
        constant costs no addition."""
        first = (p.block * BLOCK + p.row) * 128 + (p.quad ^ p.row) * 16
        return [image + first, image + (first ^ 64)]

    def row_step(self, m, half):
        return m // 2 * (self.chunk * 128) + half * 1024

    # ---- columns that cannot be split into factors

    @cute.jit
    def vote(
        self,
        steep: Boolean,
        products: cute.Tensor,
        reach: cute.Tensor,
        thread: Int32,
        block: Int32,
        base: Int32,
    ):
        """`refine` if need be: whether a column then takes what is refined depends on this column alone, and on none
        that comes after it."""
        if steep:
            self.refine(products, reach, thread, block, base)

    def normalised(self, p, products, votes):
        """Refined products with the factors of their rows and columns; of columns that are not lost none."""
        lost = [ptx.select(vote, Float32(0.0), x) for vote, x in zip(votes, p.k_factors, strict=True)]
        # Column 8 * tile + 2 * quad + e is row 2 * quad + e, or that plus 8, of the thread in its first lane.
        of_column = [cute.arch.shuffle_sync(x, (2 * p.quad + e) * 4) for x in lost for e in range(2)]
        of_row = p.k_factors, p.q_factors
        found = [[], [], [], []]
        for n in range(16):
            factor = of_row[n // 8][n // 2 % 2] * of_column[n // 4 % 2 * 2 + n % 2]
            found[n // 4].append(products[n] * factor)
        return found

    @cute.jit
    def refine(self, products: cute.Tensor, reach: cute.Tensor, thread: Int32, block: Int32, base: Int32):
        """The block by halves: rows of the lower half against columns of the upper one, the anchor on the first
        row of the lower half, so that no factor is above 1; then the same within each half, down to single
        rows, whose own product has no decay. Also the reach of each row, the fall of G since the anchor. Rows are
        taken as they came, products normalised at the end."""
        p = self.placed(thread, block, base)
        # [rows 8 to 15 against 0 to 7; of each half: sizes 4, 2, 1, the diagonal][2 of L, 2 of Aqk]
        acc = cute.make_rmem_tensor((36,), Float32)
        acc.fill(0.0)
        # Not a loop: for one with accumulators of its own the assembler schedules the whole kernel for fewer registers.
        for m in cutlass.range_constexpr(4):
            self.refine_group(p, acc, reach, m)
        for half in cutlass.range_constexpr(2):
            reach[half] = ptx.quad_max(reach[half])
        self.refined(p, acc, products)

    def refine_group(self, p, acc, reach, m):
        """What group m of the channels adds. Rows of k and of the same 8 rows of q are one A operand, so that a product
        has L in its upper half and Aqk in its lower one."""

        def add(at, k, q, columns):
            for t in (0, 2):
                a, b = [k[t], q[t], k[t + 1], q[t + 1]], [columns[t], columns[t + 1]]
                for i, x in enumerate(ptx.mma_m16n8k16(a, b, [acc[at + i] for i in range(4)])):
                    acc[at + i] = x

        def decayed(x, factors):
            return [ptx.mul_bf16x2(pair, factor) for pair, factor in zip(x, factors, strict=True)]

        since = [self.load_exponents(p, m, half) for half in range(2)]
        keys, queries = ([self.load_pairs(p, x, half, m) for half in range(2)] for x in (p.k, p.q))
        for half in range(2):
            for x in since[half]:
                reach[half] = ptx.maximum(reach[half], -x)
        for level, size in enumerate((8, 4, 2)):
            first = (p.row | size) & -size
            columns = None
            for half in range(2):
                anchor = self.load_anchor(p, m, first % 8 + 8 * max(half, size // 8))
                # A row's factor is the same as row and as column.
                factors = self.pack(
                    [ptx.ex2(-ptx.absolute(x - y)) for x, y in zip(since[half], anchor, strict=True)]
                )
                k = decayed(keys[half], factors)
                if size == 8 and half == 0:
                    columns = k
                else:
                    q = decayed(queries[half], factors)
                    add(0 if size == 8 else 4 + 16 * half + 4 * (level - 1), k, q, columns or k)
        for half in range(2):  # an odd row is the anchor, so that only the columns decay
            anchor = self.load_anchor(p, m, (p.row | 1) + 8 * half)
            factors = self.pack([ptx.ex2(y - x) for x, y in zip(since[half], anchor, strict=True)])
            add(4 + 16 * half + 8, keys[half], queries[half], decayed(keys[half], factors))
            add(4 + 16 * half + 12, keys[half], queries[half], keys[half])

    def load_anchor(self, p, m, row):
        """Exponents of another row of the block."""
        return self.load_exponents(
            SimpleNamespace(exponents=p.exponents, block=p.block, row=row, quad=p.quad), m, 0
        )

    def refined(self, p, acc, products):
        """Each pair of rows from the size at which they part."""
        for kind in range(2):
            for e in range(2):
                column = 2 * p.quad + e
                # rows of the lower half, columns of the upper one
                products[8 * kind + 2 + e] = acc[2 * kind + e]
                for half in range(2):
                    at = 4 + 16 * half + 2 * kind + e
                    x = ptx.select(p.row == column, acc[at + 12], Float32(0.0))
                    for level, size in enumerate((4, 2, 1)):
                        # alike in all higher bits, and only the row has this one
                        parted = (p.row ^ column) & (8 - size)
                        here = (parted | (~p.row & size) << 3) == size
                        x = ptx.select(here, acc[at + 4 * level], x)
                    products[8 * kind + half * 4 + half * 2 + e] = x

    # ---- stage 3: columns

    @cute.jit
    def columns(self, block: Int32, lane: Int32, base: Int32, kg: Int64, aqk: Int64):
        """Blocks of L and Aqk below the diagonal one, and the columns' way to the end of the chunk, where they are Kg.
        ``kg``, ``aqk``: addresses of the images."""
        p = SimpleNamespace(block=block, lane=lane, row=lane // 4, quad=lane % 4)
        columns = cute.make_rmem_tensor((64,), Float32)  # [4 groups m][2 rows][8 channels]
        first = base + self.layout.beta + (block * BLOCK + p.row) * 4
        beta = [ptx.load_shared(first + 32 * half, Float32) for half in range(2)]
        for m in cutlass.range_constexpr(4):
            for half in cutlass.range_constexpr(2):
                for i, name in enumerate(("k", "q")):
                    place = self.row_place(p, base + getattr(self.layout, name), half, m)
                    for j, x in enumerate(ptx.load_shared_x4(place, Float32)):
                        columns[16 * m + 8 * half + 4 * i + j] = x * beta[half]
        for step in cutlass.range_constexpr(1, self.blocks):
            if block + step < self.blocks:
                self.column_block(columns, step, block, lane, base, aqk)
        rows = self.row_addresses(p, kg)
        for m in cutlass.range_constexpr(4):
            for half in cutlass.range_constexpr(2):
                group = self.pack([columns[16 * m + 8 * half + c] for c in range(8)])
                ptx.store_global_x4(rows[m % 2] + self.row_step(m, half), group, keep=True)
        for i in cutlass.range(block, unroll=1):
            self.clear_block(i, block, lane, aqk)

    def column_block(self, columns, step, block, lane, base, aqk):
        """Block (block + step, block): L, in parts, for the merge; Aqk to its image. Then the columns hop past
        its rows."""
        target = block + step
        l_acc, a_acc = ([[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2))
        for m in range(4):
            place = base + self.layout.exponents + target * ROWS + m * GROUP + lane * 16
            for s in range(2):
                rows = [ptx.ldmatrix_x4(place + s * 512 + kind * TILE) for kind in range(2)]
                for half in range(2):
                    b = self.pack([columns[16 * m + 8 * half + 4 * s + i] for i in range(4)])
                    l_acc[half] = ptx.mma_m16n8k16(rows[0], b, l_acc[half])
                    a_acc[half] = ptx.mma_m16n8k16(rows[1], b, a_acc[half])
            hop = self.load_channels(base + self.layout.hop, target, m, lane % 4)
            for half in range(2):
                for c in range(8):
                    columns[16 * m + 8 * half + c] = columns[16 * m + 8 * half + c] * hop[c]
        self.store_block(self.pack(a_acc[0] + a_acc[1]), target, block, lane, base, aqk)
        self.store_parts(self.l_place(base, target, block) + lane * 16, self.split(l_acc))

    # ---- blocks of the images of Aqk and T

    def block_address(self, i, j, lane, address):
        """Where a lane's 16 bytes of a block are in the image at ``address``: of row lane % 16, columns from
        8 * (lane // 16)."""
        row, column = i * BLOCK + lane % BLOCK, j * BLOCK + 8 * (lane // BLOCK)
        return address + image_offset(row, column, self.chunk, self.chunk) * 2

    def store_block(self, fragment, i, j, lane, base, address):
        """Block (i, j), an A fragment, to the image at ``address``, by way of the scratch of the warp, whose block is
        j."""
        scratch = self.x_place(base, j) + TILE + lane * 16
        cute.arch.sync_warp()  # the block before may still be read
        ptx.stmatrix_x4(scratch, [fragment[0], fragment[1], fragment[2], fragment[3]])
        cute.arch.sync_warp()
        ptx.store_global_x4(
            self.block_address(i, j, lane, address), ptx.load_shared_x4(scratch, Int32), keep=True
        )

    def clear_block(self, i, j, lane, address):
        """Zeros in block (i, j) of the image at ``address``, above the diagonal."""
        ptx.store_global_x4(self.block_address(i, j, lane, address), [Int32(0)] * 4, keep=True)

    def x_place(self, base, block):
        """Where the diagonal block of (I + L)^-1 lies: in fp32 while it is computed, then in parts."""
        return base + self.layout.k + block * 4096

    def l_place(self, base, i, j):
        return base + self.layout.tables + (i * (i - 1) // 2 + j) * TILE

    def split(self, tiles):
        """Two accumulator tiles as the A fragment of their [16, 16], in two bf16 parts."""
        pairs = [tiles[i // 2][2 * (i % 2) : 2 * (i % 2) + 2] for i in range(4)]
        parts = [ptx.split_bf16x2(*pair) for pair in pairs]
        return [head for head, _ in parts], [tail for _, tail in parts]

    def store_parts(self, address, parts):
        for i, part in enumerate(parts):
            ptx.store_shared_x4(address + 512 * i, part)

    def load_parts(self, address):
        return [ptx.load_shared_x4(address + 512 * i, Int32) for i in range(2)]

    # ---- (I + L)^-1

    def substitute(self, p, l_acc, base, t):
        """The inverse of the block's I + L in fp32, [16][16] in shared memory: forward substitution, a lane a
        column (the two halves of the warp do the same). And the diagonal block of T to the image at ``t``."""
        place = self.x_place(p.k - self.layout.k, p.block)
        for half in range(2):
            row = p.row + 8 * half
            for tile in range(2):
                for e in range(2):
                    column = 8 * tile + 2 * p.quad + e
                    ptx.store_shared(place + (column * 16 + row) * 4, -l_acc[tile][2 * half + e])
        cute.arch.sync_warp()
        column = p.lane % 16  # not kept from stage 1, where registers are scarce in between
        x = [ptx.select(column == i, Float32(1.0), Float32(0.0)) for i in range(BLOCK)]
        for i in range(BLOCK - 1):
            start = (i + 1) // 4 * 4
            minus_l = []
            for at in range(start, BLOCK, 4):
                minus_l += ptx.load_shared_x4(place + (i * 16 + at) * 4, Float32)
            for row in range(i + 1, BLOCK):
                x[row] = ptx.fma(minus_l[row - start], x[i], x[row])
        cute.arch.sync_warp()
        for row in range(BLOCK):
            ptx.store_shared(place + (row * 16 + column) * 4, x[row])
        cute.arch.sync_warp()
        # To fragment order, in two bf16 parts.
        values = []
        for i in range(4):
            at = (p.row + 8 * (i % 2)) * 16 + 2 * p.quad + 8 * (i // 2)
            values.append(ptx.load_shared_x2(place + at * 4, Float32))
        cute.arch.sync_warp()
        heads, tails = zip(*(ptx.split_bf16x2(*pair) for pair in values), strict=True)
        self.store_parts(place + p.lane * 16, (heads, tails))
        self.store_block(heads, p.block, p.block, p.lane, base, t)

    def diagonal(self, p, base):
        """The transposed inverse of the diagonal block, bf16x2 [blocks][2 parts][4], of
        which the first of the blocks is filled."""
        parts = cute.make_rmem_tensor((self.blocks * 8,), Int32)
        parts.fill(0)
        for part, fragment in enumerate(self.load_parts(self.x_place(base, p.block) + p.lane * 16)):
            for i, pair in enumerate(ptx.transpose_16x16(fragment)):
                parts[part * 4 + i] = pair
        return parts

    @cute.jit
    def merge(self, parts: cute.Tensor, block: Int32, lane: Int32, base: Int32, t: Int64):
        """Blocks of T below the diagonal one, to the image at ``t``: X_ij = -X_ii sum_{j <= k < i} L_ik X_kj,
        transposed, so that an accumulator is the next product's A operand. Products in three of bf16 parts."""
        for i in cutlass.range(block, unroll=1):
            self.clear_block(i, block, lane, t)
        for step in cutlass.range_constexpr(1, self.blocks):
            if block + step < self.blocks:
                self.merge_block(parts, step, block, lane, base, t)

    def merge_block(self, parts, step, block, lane, base, t):
        i = block + step
        total = [[Float32(0.0)] * 4 for _ in range(2)]
        for d in range(step):
            x = [[parts[d * 8 + part * 4 + n] for n in range(4)] for part in range(2)]
            total = self.exact_product(
                x, self.load_parts(self.l_place(base, i, block + d) + lane * 16), total
            )
        zero = [[Float32(0.0)] * 4 for _ in range(2)]
        x_ii = self.load_parts(self.x_place(base, i) + lane * 16)
        product = self.exact_product(self.split(total), x_ii, zero)
        minus = [[-x for x in tile] for tile in product]
        heads, tails = self.split(minus)
        for n, x in enumerate(heads + tails):
            parts[step * 8 + n] = x
        self.store_block(ptx.transpose_16x16(heads), i, block, lane, base, t)

    def exact_product(self, a, b, acc):
        """a @ b^T + acc of 16x16 matrices in two bf16 parts (A fragments both), 16 bits of each counted."""
        for i, j in ((0, 1), (1, 0), (0, 0)):
            acc = [ptx.mma_m16n8k16(a[i], [b[j][tile], b[j][tile + 2]], acc[tile]) for tile in range(2)]
        return acc
