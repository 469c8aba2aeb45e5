"""K1, the preparation: the tokens of one chunk and one value head become the operands of the chain.

With G the inclusive cumulative sum of the log decays of a chunk, in base 2, and T = (I + L)^-1 diag(beta):

    L_ij = beta_i k_i . 2^{G_i - G_j} k_j (j < i)      Aqk_ij = scale q_i . 2^{G_i - G_j} k_j (j <= i)
    w = T (k 2^G),  u = T v,  Qd = scale q 2^G,  Kg = k 2^{G_end - G},  a = 2^{G_end}

A CTA owns one (slot, value head), a warp one block of 16 rows. Within a block, decay is a row factor
2^{G_i - A} <= 1 times a column factor 2^{A - G_j} >= 1, A the G of the block's *first* row: an anchor further
down would let later gates round earlier outputs. Columns then hop from anchor to anchor, block by block, to
the end of the chunk, where they are Kg; no exponent of a hop is above 0.

Stages, a CTA barrier between them:

1. *decay*: one warp a block, four channels a lane, down the rows: gate, exponents relative to the anchor; then,
   with the sums of the other blocks, anchors and hops.
2. *rows*: one warp a block, in MMA fragments: factors, Qd, the diagonal blocks of L and Aqk, their inverse.
3. *columns*: one warp a block, as columns: the blocks of L and Aqk below the diagonal, then Kg.
4. *merge*: one warp a column of blocks of T, by forward substitution in blocks.
5. *products*: w, one warp a block of rows; u^T, one warp a slab of V.

Registers hold MMA fragments throughout. A row of q, k, D is held by the four lanes of a quad, each with the
8 channels 32m + 8*quad + 0..7, m < 4, which are one 16-byte access in global memory. The fragments of two
k16 steps take them in that order, so that "channel pair t of group m" is an MMA's pair of columns: a
permutation of the channels that both operands share, and the order in which w comes out.

Only mma.sync, ldmatrix, stmatrix, cp.async and one bulk store: nothing here is particular to sm_90.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.runtime import make_fake_stream

from kda_core.cute import device as dev
from kda_core.cute.device import LOG2E
from kda_sm90.config import BLOCK, HEAD_DIM, PrepareConfig
from kda_sm90.kernels.interface import DTYPES, clamped, fake_offsets, fake_tensor, fake_workspace, record
from kda_sm90.layouts import image_offset

G_FLOOR = -104.0 * LOG2E  # 2^G_FLOOR is 0 in fp32: masks of -1000 and -inf stay out of the cumulative sum
VOTE_LIMIT = (
    80.0 * LOG2E
)  # a row is split into factors while its gates since the anchor sum to less than this

SIGNS = -0x7FFF8000  # the sign bits of a bf16x2

ROWS = 8192  # bytes of shared memory of a block of rows: [4 groups m] of 2048
GROUP = 2048  # fp32 exponents [16][32 channels]; then 1024 of k rows and 1024 of q rows (later 512 of T)
TILE = 1024  # bytes of a 16x16 matrix in fp32, or of its two bf16 parts in fragment order


class PrepareKernel:
    """q, k [B,T,H,128] bf16, v [B,T,HV,128] bf16, g [B,T,HV,128], beta [B,T,HV], A_log [HV] fp32 or None,
    dt_bias [HV,128] fp32 or None, cu_seqlens [N+1] or None -> the records of ``layouts.Workspace``.

    Gates are <= 0 (a precomputed g is trusted to be). Sequences are rows of B, or with cu_seqlens are packed
    along T (B = 1), its contents clamped to [0, T]. Rows of a chunk beyond its sequence count as zero in q, k,
    v, g and beta; slots without a chunk are not written.
    """

    #: Twelve warps an SM leave 168 registers; some variants put a loop-invariant address or two aside, once a CTA.
    spill_allowance = 16

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.chunk = config.chunk
        self.blocks = config.chunk // BLOCK
        self.threads = 32 * self.blocks
        rows = self.chunk * HEAD_DIM * 2
        pairs = self.blocks * (self.blocks - 1) // 2
        later = {
            "l": TILE * pairs,  # blocks of L below the diagonal, (i, j) at i(i-1)/2 + j
            "x": TILE * self.blocks,  # scratch of the inversion, then the diagonal blocks of (I + L)^-1
            "aqk": self.chunk * self.chunk * 2,  # the image
        }
        table = HEAD_DIM * 4 * self.blocks
        sizes = {
            "rows": ROWS * self.blocks,
            "k": rows,  # k in fragment order; after stage 2, v: [C/8][16] matrices of 8 tokens x 8 channels
            "q": max(rows, sum(later.values())),  # q in fragment order; after stage 2, what is in ``later``
            "first": table,  # log decay of the first row of block b
            "last": table,  # exponent G - A_b of its last row
            "hop": table,  # 2^{A_{b+1} - A_b}; the exponent itself where rows vote
            "anchor": table,  # 2^{A_b}
            "beta": self.chunk * 4,
            "live": self.chunk * 4,  # what the gate of a row is multiplied with: 0 beyond the sequence
        }
        self.at, end = {}, 0
        for name, size in sizes.items():
            self.at[name] = end
            end += size
        start = self.at["q"]
        for name, size in later.items():
            self.at[name] = start
            start += size
        self.shared_bytes = end

    def fake_args(self) -> tuple:
        config = self.config
        B, T, H, HV = (cute.sym_int() for _ in range(4))
        gates, betas = DTYPES[config.gate_dtype], DTYPES[config.beta_dtype]
        return (
            *(fake_tensor(BFloat16, B, T, H, HEAD_DIM) for _ in range(2)),
            fake_tensor(BFloat16, B, T, HV, HEAD_DIM),
            fake_tensor(gates, B, T, HV, HEAD_DIM),
            fake_tensor(betas, B, T, HV, align=betas.width // 8),
            fake_tensor(Float32, HV, align=4) if config.a_log else None,
            fake_tensor(Float32, HV, HEAD_DIM, align=4) if config.dt_bias else None,
            fake_offsets(config.offsets),
            *fake_workspace(self.chunk),
            Float32(1.0),
            Float32(-5.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        a_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        offsets: cute.Tensor | None,
        w: cute.Tensor,
        qd: cute.Tensor,
        kg: cute.Tensor,
        aqk: cute.Tensor,
        u: cute.Tensor,
        a: cute.Tensor,
        scale: Float32,
        lower_bound: Float32,
        stream: cuda.CUstream,
    ):
        """``lower_bound`` counts for the bounded gate alone. No call for T = 0 without cu_seqlens."""
        if const_expr(self.config.offsets is None):
            slots = v.shape[0] * cute.ceil_div(v.shape[1], self.chunk)
        else:
            slots = v.shape[1] // self.chunk + offsets.shape[0] - 1
        self.kernel(
            q, k, v, g, beta, a_log, dt_bias, offsets, w, qd, kg, aqk, u, a, scale, lower_bound
        ).launch(
            grid=(slots * v.shape[2], 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=3 * 4 // self.blocks,
            preferred_smem_carveout=100,  # percent; otherwise the DSL asks a device, at compile time
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        a_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        offsets: cute.Tensor | None,
        w: cute.Tensor,
        qd: cute.Tensor,
        kg: cute.Tensor,
        aqk: cute.Tensor,
        u: cute.Tensor,
        a: cute.Tensor,
        scale: Float32,
        lower_bound: Float32,
    ):
        index, _, _ = cute.arch.block_idx()
        T, HV = q.shape[1], v.shape[2]
        slot, head = index // HV, index % HV
        shared = dev.shared_allocator().allocate(self.shared_bytes, 128)
        inputs = (q, k, v, g, beta, a_log, dt_bias, w, qd, kg, aqk, u, a)
        if const_expr(self.config.offsets is None):
            chunks = cute.ceil_div(T, self.chunk)
            sequence, number = slot // chunks, slot % chunks
            token = sequence * T + number * self.chunk
            valid = cutlass.min(T - number * self.chunk, self.chunk)
            self.prepare(*inputs, scale, lower_bound, shared, slot, head, token, valid)
        else:
            token, valid = self.locate(offsets, slot, T)
            if valid > 0:
                self.prepare(*inputs, scale, lower_bound, shared, slot, head, token, valid)

    @cute.jit
    def locate(self, offsets: cute.Tensor, slot: Int32, T: Int32):
        """First token and number of tokens (0: none) of a slot of packed sequences.

        The owner is the last sequence n with ``start//C + n <= slot``: a search in 32 places at a time.
        """
        lane = cute.arch.lane_idx()
        low, span = Int32(0), Int32(offsets.shape[0] - 1)
        while span > 1:
            step = (span + 31) // 32
            probe = low + lane * step
            below = Boolean(False)
            if lane * step < span:
                below = clamped(offsets, probe, Int32(0), T) // self.chunk + probe <= slot
            found = cute.arch.popc(cute.arch.vote_ballot_sync(below))
            skip = cutlass.max(found - 1, 0) * step
            low = low + skip
            span = cutlass.min(step, span - skip)
        start = clamped(offsets, low, Int32(0), T)
        end = clamped(offsets, low + 1, start, T)
        number = slot - (start // self.chunk + low)
        token = start + number * self.chunk
        valid = cutlass.min(end - token, self.chunk)
        if number < 0:
            valid = Int32(0)
        return token, valid

    # ---- one chunk

    def prepare(
        self, q, k, v, g, beta, a_log, dt_bias, w, qd, kg, aqk, u, a, scale, lower_bound, shared, slot, head,
        token, valid,
    ):  # fmt: skip
        """``token``: the first one in B*T; ``valid``: rows that exist, 1 to C. Rows of v and g are counted in 32 bits:
        2^31 of them are 512 GiB."""
        thread, _, _ = cute.arch.thread_idx()
        H, HV = q.shape[2], v.shape[2]
        base = Int32(shared.toint())
        number = slot * HV + head
        # Warps get another block in each CTA, because blocks differ in work, and a warp's number chooses its
        # scheduler.
        p = self.positions(thread, (thread // 32 + slot + head) % self.blocks, base)
        p.valid, p.scale = valid, scale
        value_row = token * HV + head
        key_row = token * H + head // (HV // H)

        gate = self.load_gate_parameters(p, a_log, dt_bias, head)
        beta_raw = self.load_beta(p, beta, value_row, HV)
        self.copy_gates(p, g, value_row, HV)
        self.copy_rows(p, k, key_row, H, p.k)
        self.copy_rows(p, q, key_row, H, p.q)
        cute.arch.cp_async_commit_group()

        self.store_live(p, lower_bound)
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_warp()
        steep = self.decay(p, g.element_type, *gate)
        self.store_beta(p, beta_raw)
        cute.arch.sync_threads()
        self.anchors(p, record(a, number))
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

        columns = cute.make_rmem_tensor((64,), Float32)
        l_acc, a_acc = self.rows(p, steep, columns, record(qd, number))
        cute.arch.sync_warp()
        self.copy_values(p, v, value_row, HV)
        cute.arch.sync_threads()

        self.store_aqk(p, a_acc, p.block, p.block)
        self.substitute(p, l_acc)
        self.columns(columns, p.block, p.lane, base)
        self.store_rows(p, record(kg, number), columns, 0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        self.send_aqk(thread, record(aqk, number), p.aqk)
        parts = self.diagonal(p)
        self.merge(parts, p.block, p.lane, base)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        product = cute.make_rmem_tensor((64,), Float32)
        self.product_w(product, p.block, p.lane, base)
        self.store_rows(p, record(w, number), product, SIGNS)
        self.product_u(p, record(u, number))
        self.wait_aqk(thread)

    def positions(self, thread, block, base):
        """Where a thread is, and where in shared memory everything begins."""
        lane = thread % 32
        places = {name: base + offset for name, offset in self.at.items()}
        return SimpleNamespace(
            thread=thread, warp=thread // 32, lane=lane, row=lane // 4, quad=lane % 4, block=block, **places
        )

    # ---- loads

    def row_address(self, x, row):
        """The address of a row of 128 channels of q, k, v or g, rows counted over B, T and heads."""
        return dev.address_of(x) + Int64(row) * (HEAD_DIM * x.element_type.width // 8)

    def copy_gates(self, p, g, value_row, HV):
        """g of the warp's block to shared memory, asynchronously: fp32 at the places of the exponents that replace
        it, bf16 as two halves of 64 channels, each in rows of 128 bytes within the room of its exponents."""
        size = g.element_type.width // 8
        units = HEAD_DIM * size // 16  # to a row
        unit, first = p.lane % units, p.lane // units
        place = p.rows + p.block * ROWS
        start = p.block * BLOCK
        for at in range(0, BLOCK, 32 // units):
            row = at + first
            address = self.row_address(g, value_row + (start + row) * HV) + unit * 16
            if size == 2:
                to = place + unit // 8 * (2 * GROUP) + row * 128 + unit % 8 * 16
            else:
                to = place + unit // 8 * GROUP + row * 128 + (unit % 8 ^ row % 2) * 16
            dev.cp_async_x4(to, address, start + row < p.valid)
        cute.arch.cp_async_commit_group()

    def copy_rows(self, p, x, key_row, H, place):
        """Rows of q or k to shared memory, asynchronously, in fragment order: a thread copies for itself."""
        for half in range(2):
            row = p.block * BLOCK + p.row + 8 * half
            address = self.row_address(x, key_row + row * H) + p.quad * 16
            for m in range(4):
                dev.cp_async_x4(self.row_place(p, place, half, m), address + 64 * m, row < p.valid)

    def load_pairs(self, p, place, half, m):
        """bf16x2 [4] of group m of a row of k or q, as ``copy_rows`` placed it."""
        return dev.load_shared_x4(self.row_place(p, place, half, m), Int32)

    def keys(self, p, half, pair):
        """Two channels of a row of k in fp32, normalised."""
        pair = dev.unpack_bf16x2(pair)
        return [x * p.k_factors[half] for x in pair] if self.config.l2norm else pair

    def queries(self, p, half, pair):
        """Two channels of a row of q in fp32, normalised and scaled."""
        return [x * p.q_factors[half] for x in dev.unpack_bf16x2(pair)]

    def row_place(self, p, place, half, m):
        return place + p.warp * 4096 + (half * 4 + m) * 512 + p.lane * 16

    def copy_values(self, p, v, value_row, HV):
        """v to shared memory, asynchronously: 8x8 matrices of 128 bytes."""
        for half in range(2):
            row = p.warp * BLOCK + 8 * half + p.lane % 8
            address = self.row_address(v, value_row + row * HV)
            for group in range(4):
                column = 4 * group + p.lane // 8
                matrix = (p.warp * 2 + half) * 16 + column
                place = p.k + matrix * 128 + (p.lane % 8) * 16
                dev.cp_async_x4(place, address + column * 16, row < p.valid)
        cute.arch.cp_async_commit_group()

    def load_beta(self, p, beta, value_row, HV):
        """beta of a row, as it comes; two threads load the same."""
        row = p.thread % self.chunk
        size = beta.element_type.width // 8
        load = dev.load_global_bf16 if size == 2 else dev.load_global_f32
        return load(dev.address_of(beta) + (Int64(value_row) + row * HV) * size, row < p.valid)

    def store_beta(self, p, x):
        """beta, activated, to shared memory; rows beyond the sequence are 0."""
        row = p.thread % self.chunk
        if self.config.beta_sigmoid:
            x = dev.sigmoid(x) * Float32(2.0 if self.config.neg_eigval else 1.0)
        dev.store_shared(p.beta + row * 4, dev.select(row < p.valid, x, Float32(0.0)))

    def load_gate_parameters(self, p, a_log, dt_bias, head):
        """A_log of the head, and dt_bias of the lane's four channels; None where the gate has none."""
        rate = biases = None
        if self.config.a_log:
            rate = dev.load_global_f32(dev.address_of(a_log) + Int64(head) * 4, Boolean(True))
        if self.config.dt_bias:
            first = dev.address_of(dt_bias) + (Int64(head) * HEAD_DIM + 2 * p.lane) * 4
            biases = [dev.load_global_f32(first + at * 4, Boolean(True)) for at in (0, 1, 64, 65)]
        return rate, biases

    # ---- stage 1: decay

    def decay(self, p, dtype, a_log, biases):
        """Exponents G_i - A of the warp's block, and what its anchors are made of: channels 2*lane, 2*lane + 1, and
        these plus 64. Whether some row may need to leave split factors, that is, whether the last one would."""
        config = self.config
        rate = dev.ex2(a_log * Float32(LOG2E)) if config.a_log else Float32(1.0)
        biases = biases if config.dt_bias else [Float32(0.0)] * 4
        place = p.rows + p.block * ROWS
        unit, inner = p.lane % 16 // 2, p.lane % 2 * 8
        parity = [place + p.lane // 16 * GROUP + (unit ^ odd) * 16 + inner for odd in range(2)]
        if dtype is BFloat16:
            raw = [
                [
                    dev.load_shared(place + half * (2 * GROUP) + row * 128 + p.lane * 4, Int32)
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
                    dev.unpack_bf16x2(raw[row][half])
                    if dtype is BFloat16
                    else dev.load_shared_x2(at, Float32)
                )
                for e, x in enumerate(pair):
                    decay = self.log_decay(x, rate, biases[2 * half + e], live[row])
                    if row == 0:
                        first.append(decay)
                    else:
                        since[2 * half + e] = since[2 * half + e] + decay
                dev.store_shared_x2(at, since[2 * half : 2 * half + 2])
        for half in range(2):
            cell = p.block * (HEAD_DIM * 4) + half * 256 + p.lane * 8
            dev.store_shared_x2(p.first + cell, first[2 * half : 2 * half + 2])
            dev.store_shared_x2(p.last + cell, since[2 * half : 2 * half + 2])
        fall = dev.minimum(dev.minimum(since[0], since[1]), dev.minimum(since[2], since[3]))
        return cute.arch.vote_any_sync(fall <= Float32(-VOTE_LIMIT)) if config.vote else None

    def anchors(self, p, address):
        """2^A and 2^hop of the warp's block, four channels a lane; and a, each warp its share of the channels."""
        cell = p.lane * 16
        row = lambda table, block: dev.load_shared_x4(table + block * (HEAD_DIM * 4) + cell, Float32)
        anchor = row(p.first, p.block)
        for block in range(self.blocks - 1):
            for i, (x, y) in enumerate(zip(row(p.first, block), row(p.last, block), strict=True)):
                anchor[i] = anchor[i] + dev.select(block < p.block, x + y, Float32(0.0))
        following = row(p.first, cutlass.min(p.block + 1, self.blocks - 1))
        last = p.block == self.blocks - 1
        hop = [
            x + dev.select(last, Float32(0.0), y)
            for x, y in zip(row(p.last, p.block), following, strict=True)
        ]
        own = p.block * (HEAD_DIM * 4) + cell
        dev.store_shared_x4(p.anchor + own, [dev.ex2(x) for x in anchor])
        dev.store_shared_x4(p.hop + own, hop if self.config.vote else [dev.ex2(x) for x in hop])
        for share in range(4 // self.blocks):
            channel = (p.warp + self.blocks * share) * 32 + p.lane
            end = Float32(0.0)
            for block in range(self.blocks):
                for table in (p.first, p.last):
                    end = end + dev.load_shared(table + block * (HEAD_DIM * 4) + channel * 4, Float32)
            dev.store_global(address + channel * 4, dev.ex2(end))

    def log_decay(self, x, rate, bias, live):
        """The log decay of one raw gate, in base 2; 0 where ``live`` is."""
        config = self.config
        if config.gate == "bounded":
            steepness = rate * Float32(-LOG2E)
            e = dev.ex2(dev.fma(x, steepness, bias * steepness))
            x = live * dev.rcp(e + Float32(1.0))
        elif config.gate == "softplus":
            x = dev.softplus(x + bias) * rate * live
        else:
            x = x * Float32(LOG2E)
        return dev.maximum(x, Float32(G_FLOOR)) if config.vote else x

    def store_live(self, p, lower_bound):
        """Factors of the rows' gates, to base 2 and with the bound of a bounded gate. A row beyond the sequence
        has 0; a precomputed gate needs none, for such rows are copied as zeros. Every warp stores its block's."""
        if self.config.gate == "precomputed":
            return
        factor = (lower_bound if self.config.gate == "bounded" else Float32(-1.0)) * Float32(LOG2E)
        row = p.block * BLOCK + p.lane % BLOCK
        dev.store_shared(p.live + row * 4, dev.select(row < p.valid, factor, Float32(0.0)))

    def load_live(self, p):
        if self.config.gate == "precomputed":
            return [None] * BLOCK
        places = [p.live + (p.block * BLOCK + row) * 4 for row in range(0, BLOCK, 4)]
        return [x for place in places for x in dev.load_shared_x4(place, Float32)]

    # ---- stage 2: rows

    def rows(self, p, steep, columns, address):
        """Row factors to shared memory, Qd to global memory, diagonal blocks of L and Aqk, and the columns [2 rows]
        [4 groups][8 channels] at the next block's anchor. ``steep``: some row has to leave split factors."""
        config = self.config
        p.k_factors, p.q_factors = [Float32(1.0)] * 2, [p.scale] * 2
        if config.l2norm:
            p.k_factors = self.inverse_norms(p, p.k)
            p.q_factors = [x * p.scale for x in self.inverse_norms(p, p.q)]
        zero = Float32(0.0)
        l_acc = [[zero] * 4 for _ in range(2)]
        a_acc = [[zero] * 4 for _ in range(2)]
        votes = None
        if config.vote:
            l_acc, a_acc, votes = self.vote(p, steep)

        for m in range(4):
            since = [self.load_exponents(p, m, half) for half in range(2)]
            cute.arch.sync_warp()  # the rows of the factors go where the exponents were
            place = p.rows + p.block * ROWS + m * GROUP + p.lane * 16
            qd = [[], []]
            for step in range(2):
                k_row, q_row, k_col = ([[], []] for _ in range(3))
                k_pairs, q_pairs = (
                    [dev.load_shared_x2(self.row_place(p, x, half, m) + step * 8, Int32) for half in range(2)]
                    for x in (p.k, p.q)
                )
                for pair in range(2):
                    channel = (m * 32 + p.quad * 8 + step * 4 + pair * 2) * 4
                    anchor, hop = (
                        dev.load_shared_x2(table + p.block * (HEAD_DIM * 4) + channel, Float32)
                        for table in (p.anchor, p.hop)
                    )
                    for half in range(2):
                        k = self.keys(p, half, k_pairs[half][pair])
                        q = self.queries(p, half, q_pairs[half][pair])
                        kr, qr, kc, qg = [], [], [], []
                        for e in range(2):
                            c = 2 * pair + e
                            fall = since[half][4 * step + c]
                            down = dev.ex2(fall)
                            kr.append(k[e] * down)
                            qr.append(q[e] * down)
                            qg.append(qr[e] * anchor[e])
                            index = half * 32 + m * 8 + step * 4 + c
                            if config.vote:
                                kept = votes[half]
                                kc.append(
                                    dev.select(kept, k[e] * dev.ex2(dev.select(kept, -fall, zero)), zero)
                                )
                                # Afresh: a hop of 80 or more would flush what the factor blew up.
                                columns[index] = k[e] * dev.ex2(hop[e] - fall)
                            else:
                                kc.append(k[e] * dev.ex2(-fall))
                                columns[index] = kc[e] * hop[e]
                        k_row[half].append(dev.pack_bf16x2(*kr))
                        q_row[half].append(dev.pack_bf16x2(*qr))
                        k_col[half].append(dev.pack_bf16x2(*kc))
                        qd[half].append(dev.pack_bf16x2(*qg))
                k_a, q_a = ([x[0][0], x[1][0], x[0][1], x[1][1]] for x in (k_row, q_row))
                dev.stmatrix_x4(place + step * 512, k_a)
                dev.stmatrix_x4(place + step * 512 + TILE, q_a)
                if config.vote:
                    k_a, q_a = (
                        [dev.select(votes[i % 2], a[i], Int32(0)) for i in range(4)] for a in (k_a, q_a)
                    )
                for half in range(2):
                    l_acc[half] = dev.mma_m16n8k16(k_a, k_col[half], l_acc[half])
                    a_acc[half] = dev.mma_m16n8k16(q_a, k_col[half], a_acc[half])
            for half in range(2):
                dev.store_global_x4(address + self.row_offset(p, m, half), qd[half])
        for tile in range(2):
            for i in range(4):
                inside = p.row + 8 * (i // 2) >= 8 * tile + 2 * p.quad + i % 2
                a_acc[tile][i] = dev.select(inside, a_acc[tile][i], Float32(0.0))
        return l_acc, a_acc

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
                    even = dev.mma_m16n8k8(a, a[0], even)
                    odd = dev.mma_m16n8k8(a, a[1], odd)
            diagonal = dev.select(p.row % 2 == 0, even[0] + odd[2], even[1] + odd[3])
            total = cute.arch.shuffle_sync(diagonal, p.row * 4 + p.row // 2)
            factors.append(dev.rsqrt(total + Float32(1e-6)))
        return factors

    def pack(self, values):
        """fp32 values to bf16x2, in pairs."""
        return [dev.pack_bf16x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]

    def load_exponents(self, p, m, half):
        """G_i - A of a row of the thread's block, its 8 channels of group m."""
        row = p.rows + p.block * ROWS + m * GROUP + (p.row + 8 * half) * 128
        parts = [row + ((2 * p.quad + part) ^ (p.row % 2)) * 16 for part in range(2)]
        return [x for part in parts for x in dev.load_shared_x4(part, Float32)]

    def load_channels(self, table, block, m, quad):
        """The thread's 8 channels of group m of a table [blocks][128] fp32."""
        place = table + block * (HEAD_DIM * 4) + m * 128 + quad * 32
        return [x for part in range(2) for x in dev.load_shared_x4(place + 16 * part, Float32)]

    def row_offset(self, p, m, half):
        """Byte offset in the image of [C, 128] of a row of the thread's block, its 8 channels of group m."""
        panel = (m // 2) * (self.chunk * 128)
        row = p.block * BLOCK + p.row + 8 * half
        return panel + row * 128 + (((4 * (m % 2) + p.quad) ^ p.row) * 16)

    def store_rows(self, p, address, values, sign):
        """Values [2 rows][4 groups][8 channels], rounded, their signs flipped by ``sign``, to an image of
        [C, 128]."""
        for half in range(2):
            for m in range(4):
                group = self.pack([values[half * 32 + m * 8 + c] for c in range(8)])
                dev.store_global_x4(
                    address + self.row_offset(p, m, half), [pair ^ Int32(sign) for pair in group]
                )

    # ---- rows that cannot be split into factors

    def vote(self, p, needed):
        """Blocks of L (without beta) and Aqk, two tiles of 4 values, whose rows without two-sided factors are
        filled, the others 0; and whether each of the two rows keeps its factors. ``needed``: some row does not;
        only then there is something to compute."""
        fine_l, fine_a = (cute.make_rmem_tensor((8,), Float32) for _ in range(2))
        fine_l.fill(0.0)
        fine_a.fill(0.0)
        reach = cute.make_rmem_tensor((2,), Float32)
        reach.fill(0.0)
        base = p.rows - self.at["rows"]
        self.refine(needed, *p.k_factors, *p.q_factors, fine_l, fine_a, reach, p.thread, p.block, base)
        votes = [reach[half] < VOTE_LIMIT for half in range(2)]
        blocks = [
            [
                [dev.select(votes[i // 2], Float32(0.0), x[tile * 4 + i]) for i in range(4)]
                for tile in range(2)
            ]
            for x in (fine_l, fine_a)
        ]
        return *blocks, votes

    @cute.jit
    def refine(
        self,
        needed: Boolean,
        k_factor: Float32,
        k_factor_8: Float32,
        q_factor: Float32,
        q_factor_8: Float32,
        fine_l: cute.Tensor,
        fine_a: cute.Tensor,
        reach: cute.Tensor,
        thread: Int32,
        block: Int32,
        base: Int32,
    ):
        """The block by halves: rows of the lower half against columns of the upper one, the anchor on the first
        row of the lower half, so that no factor is above 1; then the same within each half, down to single
        rows, whose own product has no decay. Also the reach of each row, the fall of G since the anchor."""
        p = self.positions(thread, block, base)
        p.k_factors, p.q_factors = (k_factor, k_factor_8), (q_factor, q_factor_8)
        if needed:
            self.refine_diagonal(p, fine_a, reach)
            for level in cutlass.range(4, unroll=1):
                self.refine_level(p, fine_l, fine_a, Int32(8) >> level)

    def refine_diagonal(self, p, fine_a, reach):
        """Aqk_ii = scale q_i . k_i, and the largest A - G_i over the channels, for the two rows of the thread."""
        for half in range(2):
            most, total = Float32(0.0), Float32(0.0)
            for m in range(4):
                for x in self.load_exponents(p, m, half):
                    most = dev.maximum(most, -x)
                for k_pair, q_pair in zip(*(self.load_pairs(p, x, half, m) for x in (p.k, p.q)), strict=True):
                    for x, y in zip(self.keys(p, half, k_pair), self.queries(p, half, q_pair), strict=True):
                        total = dev.fma(x, y, total)
            reach[half] = dev.quad_max(most)
            total = dev.quad_sum(total)
            for e in range(2):
                at = half * 4 + half * 2 + e  # row half and tile agree on the diagonal
                fine_a[at] = dev.select(p.row == 2 * p.quad + e, total, fine_a[at])

    def refine_level(self, p, fine_l, fine_a, size):
        """Rows i with bit ``size`` set against columns j without it, in each 2*size rows of the block."""
        zero = Float32(0.0)
        # Zero, which the compiler cannot know: it would fetch and unpack before the loop, and spill.
        nothing = dev.pinned(size) >> 8
        l_acc = [[zero] * 4 for _ in range(2)]
        a_acc = [[zero] * 4 for _ in range(2)]
        rows = [p.row + 8 * half for half in range(2)]
        lower = [(i & size) != 0 for i in rows]
        late = self.positions(p.thread, p.block, p.rows - self.at["rows"] + nothing)
        mine = [SimpleNamespace(rows=late.rows, block=p.block, row=i, quad=p.quad) for i in rows]
        first = [(i | size) & (0 - size) for i in rows]
        theirs = [SimpleNamespace(rows=p.rows, block=p.block, row=i, quad=p.quad) for i in first]
        for m in range(4):
            k_row, q_row, k_col = [], [], []
            for half in range(2):
                since = self.load_exponents(mine[half], m, 0)
                anchor = self.load_exponents(theirs[half], m, 0)
                k, q = [], []
                k_pairs, q_pairs = (self.load_pairs(late, x, half, m) for x in (late.k, late.q))
                for pair in range(4):
                    keys, queries = self.keys(p, half, k_pairs[pair]), self.queries(p, half, q_pairs[pair])
                    for e in range(2):
                        fall = since[2 * pair + e] - anchor[2 * pair + e]
                        factor = dev.ex2(dev.minimum(dev.select(lower[half], fall, -fall), zero))
                        k.append(keys[e] * factor)
                        q.append(queries[e] * factor)
                none = Int32(0)
                k = self.pack(k)
                k_row.append([dev.select(lower[half], pair, none) for pair in k])
                q_row.append([dev.select(lower[half], pair, none) for pair in self.pack(q)])
                k_col.append([dev.select(lower[half], none, pair) for pair in k])
            for t in (0, 2):
                k_a = [k_row[0][t], k_row[1][t], k_row[0][t + 1], k_row[1][t + 1]]
                q_a = [q_row[0][t], q_row[1][t], q_row[0][t + 1], q_row[1][t + 1]]
                for tile in range(2):
                    b = [k_col[tile][t], k_col[tile][t + 1]]
                    l_acc[tile] = dev.mma_m16n8k16(k_a, b, l_acc[tile])
                    a_acc[tile] = dev.mma_m16n8k16(q_a, b, a_acc[tile])
        for n in range(8):
            i, j = rows[n // 2 % 2], 8 * (n // 4) + 2 * p.quad + n % 2
            # size apart, and alike in all higher bits
            here = ((i ^ j) & (0 - size)) == (i & size)
            here = dev.select((i & size) != 0, Int32(here), Int32(0)) != 0
            fine_l[n] = dev.select(here, l_acc[n // 4][n % 4], fine_l[n])
            fine_a[n] = dev.select(here, a_acc[n // 4][n % 4], fine_a[n])

    # ---- stage 3: columns

    @cute.jit
    def columns(self, columns: cute.Tensor, block: Int32, lane: Int32, base: Int32):
        """Blocks of L and Aqk below the diagonal one, and the hops of the columns to the end of the chunk."""
        for target in cutlass.range(block, unroll=1):
            self.clear_aqk(target, block, lane, base)
        for target in cutlass.range(block + 1, self.blocks, unroll=1):
            self.column_block(columns, target, block, lane, base)

    def column_block(self, columns, target, block, lane, base):
        """L and Aqk of rows ``target`` and columns ``block``; then the columns hop past the target."""
        p = SimpleNamespace(lane=lane, row=lane // 4, quad=lane % 4, aqk=base + self.at["aqk"])
        l_acc = [[Float32(0.0)] * 4 for _ in range(2)]
        a_acc = [[Float32(0.0)] * 4 for _ in range(2)]
        for m in range(4):
            place = base + self.at["rows"] + target * ROWS + m * GROUP + lane * 16
            for step in range(2):
                k_a = dev.ldmatrix_x4(place + step * 512)
                q_a = dev.ldmatrix_x4(place + step * 512 + TILE)
                for half in range(2):
                    at = half * 32 + m * 8 + step * 4
                    b = self.pack([columns[at + i] for i in range(4)])
                    l_acc[half] = dev.mma_m16n8k16(k_a, b, l_acc[half])
                    a_acc[half] = dev.mma_m16n8k16(q_a, b, a_acc[half])
            hop = self.load_channels(base + self.at["hop"], target, m, p.quad)
            hop = [dev.ex2(x) for x in hop] if self.config.vote else hop
            for half in range(2):
                for c in range(8):
                    at = half * 32 + m * 8 + c
                    columns[at] = columns[at] * hop[c]
        self.store_aqk(p, a_acc, target, block)
        beta = [
            dev.load_shared(base + self.at["beta"] + (target * BLOCK + p.row + 8 * half) * 4, Float32)
            for half in range(2)
        ]
        scaled = [[tile[i] * beta[i // 2] for i in range(4)] for tile in l_acc]
        self.store_parts(self.l_place(base, target, block) + lane * 16, self.split(scaled))

    def clear_aqk(self, target, block, lane, base):
        """Zeros where Aqk is above the diagonal."""
        zero = [[Float32(0.0)] * 4 for _ in range(2)]
        self.store_aqk(SimpleNamespace(lane=lane, aqk=base + self.at["aqk"]), zero, target, block)

    def l_place(self, base, i, j):
        return base + self.at["l"] + (i * (i - 1) // 2 + j) * TILE

    def split(self, tiles):
        """Two accumulator tiles as the A fragment of their [16, 16], in two bf16 parts."""
        pairs = [tiles[i // 2][2 * (i % 2) : 2 * (i % 2) + 2] for i in range(4)]
        parts = [dev.split_bf16x2(*pair) for pair in pairs]
        return [head for head, _ in parts], [tail for _, tail in parts]

    def store_parts(self, address, parts):
        for i, part in enumerate(parts):
            dev.store_shared_x4(address + 512 * i, part)

    def load_parts(self, address):
        return [dev.load_shared_x4(address + 512 * i, Int32) for i in range(2)]

    def store_aqk(self, p, tiles, i, j):
        """Block (i, j) of Aqk, rounded, to its image in shared memory."""
        matrix = p.lane // 8
        row = i * BLOCK + 8 * (matrix % 2) + p.lane % 8
        column = j * BLOCK + 8 * (matrix // 2)
        pairs = [tiles[n // 2][2 * (n % 2) : 2 * (n % 2) + 2] for n in range(4)]
        address = p.aqk + image_offset(row, column, self.chunk, self.chunk) * 2
        dev.stmatrix_x4(address, [dev.pack_bf16x2(*pair) for pair in pairs])

    @cute.jit
    def send_aqk(self, thread: Int32, address: Int64, shared: Int32):
        if thread == 0:
            dev.bulk_store(address, shared, Int32(self.chunk * self.chunk * 2))

    @cute.jit
    def wait_aqk(self, thread: Int32):
        """Shared memory must outlive the bulk store that reads it."""
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    # ---- (I + L)^-1

    def substitute(self, p, l_acc):
        """The inverse of the block's I + L in fp32, [16][16] in shared memory: forward substitution, a lane a
        column (the two halves of the warp do the same)."""
        place = p.x + p.block * TILE
        for half in range(2):
            row = p.row + 8 * half
            beta = dev.load_shared(p.beta + (p.block * BLOCK + row) * 4, Float32)
            for tile in range(2):
                for e in range(2):
                    column = 8 * tile + 2 * p.quad + e
                    dev.store_shared(place + (column * 16 + row) * 4, l_acc[tile][2 * half + e] * (-beta))
        cute.arch.sync_warp()
        column = p.lane % 16  # not kept from stage 1, where registers are scarce in between
        x = [dev.select(column == i, Float32(1.0), Float32(0.0)) for i in range(BLOCK)]
        for i in range(BLOCK - 1):
            start = (i + 1) // 4 * 4
            minus_l = []
            for at in range(start, BLOCK, 4):
                minus_l += dev.load_shared_x4(place + (i * 16 + at) * 4, Float32)
            for row in range(i + 1, BLOCK):
                x[row] = dev.fma(minus_l[row - start], x[i], x[row])
        cute.arch.sync_warp()
        for row in range(BLOCK):
            dev.store_shared(place + (row * 16 + column) * 4, x[row])
        cute.arch.sync_warp()
        # To fragment order, in two bf16 parts; the block of T at once, because both are at hand.
        values = []
        for i in range(4):
            at = (p.row + 8 * (i % 2)) * 16 + 2 * p.quad + 8 * (i // 2)
            values.append(dev.load_shared_x2(place + at * 4, Float32))
        cute.arch.sync_warp()
        parts = [dev.split_bf16x2(*pair) for pair in values]
        self.store_parts(place + p.lane * 16, ([head for head, _ in parts], [tail for _, tail in parts]))
        p.inverse = values

    def diagonal(self, p):
        """The diagonal block of T to shared memory; the transposed inverse, bf16x2 [blocks][2 parts][4], of
        which the first of the blocks is filled."""
        pairs = []
        for i in range(4):
            at = p.block * BLOCK + 2 * p.quad + 8 * (i // 2)
            beta = dev.load_shared_x2(p.beta + at * 4, Float32)
            pairs.append(dev.pack_bf16x2(*(x * y for x, y in zip(p.inverse[i], beta, strict=True))))
        dev.store_shared_x4(self.t_place(p.rows, p.block, p.block) + p.lane * 16, pairs)
        parts = cute.make_rmem_tensor((self.blocks * 8,), Int32)
        parts.fill(0)
        for part, fragment in enumerate(self.load_parts(p.x + p.block * TILE + p.lane * 16)):
            for i, pair in enumerate(dev.transpose_16x16(fragment)):
                parts[part * 4 + i] = pair
        return parts

    def t_place(self, rows, i, j):
        """Where block (i, j) of T lies, in fragment order: in place of the rows of q."""
        return rows + i * ROWS + j * GROUP + TILE

    @cute.jit
    def merge(self, parts: cute.Tensor, block: Int32, lane: Int32, base: Int32):
        """Blocks of T below the diagonal one: X_ij = -X_ii sum_{j <= k < i} L_ik X_kj, transposed, so that an
        accumulator is the next product's A operand. Products in three of bf16 parts."""
        for step in cutlass.range_constexpr(1, self.blocks):
            if block + step < self.blocks:
                self.merge_block(parts, step, block, lane, base)

    def merge_block(self, parts, step, block, lane, base):
        i = block + step
        total = [[Float32(0.0)] * 4 for _ in range(2)]
        for d in range(step):
            x = [[parts[d * 8 + part * 4 + n] for n in range(4)] for part in range(2)]
            total = self.exact_product(
                x, self.load_parts(self.l_place(base, i, block + d) + lane * 16), total
            )
        zero = [[Float32(0.0)] * 4 for _ in range(2)]
        x_ii = self.load_parts(base + self.at["x"] + i * TILE + lane * 16)
        product = self.exact_product(self.split(total), x_ii, zero)
        minus = [[-x for x in tile] for tile in product]
        for part, fragment in enumerate(self.split(minus)):
            for n in range(4):
                parts[step * 8 + part * 4 + n] = fragment[n]
        first = base + self.at["beta"] + (block * BLOCK + lane // 4) * 4
        beta = [dev.load_shared(first + 32 * half, Float32) for half in range(2)]
        pairs = []
        for n in range(4):
            low, high = minus[n // 2][2 * (n % 2) : 2 * (n % 2) + 2]
            pairs.append(dev.pack_bf16x2(low * beta[n % 2], high * beta[n % 2]))
        place = self.t_place(base + self.at["rows"], i, block) + lane * 16
        dev.store_shared_x4(place, dev.transpose_16x16(pairs))

    def exact_product(self, a, b, acc):
        """a @ b^T + acc of 16x16 matrices in two bf16 parts (A fragments both), 16 bits of each counted."""
        for i, j in ((0, 1), (1, 0), (0, 0)):
            acc = [dev.mma_m16n8k16(a[i], [b[j][tile], b[j][tile + 2]], acc[tile]) for tile in range(2)]
        return acc

    # ---- stage 5: products

    @cute.jit
    def product_w(self, acc: cute.Tensor, block: Int32, lane: Int32, base: Int32):
        """Rows of w = sum_j T_bj (k 2^{G - A_j}) 2^{A_j}."""
        self.product_w_block(acc, block, 0, lane, base)
        for j in cutlass.range_constexpr(1, self.blocks):
            if j <= block:
                self.product_w_block(acc, block, j, lane, base)

    def product_w_block(self, acc, block, j, lane, base):
        rows = base + self.at["rows"]
        t = dev.load_shared_x4(self.t_place(rows, block, j) + lane * 16, Int32)
        for m in range(4):
            anchor = self.load_channels(base + self.at["anchor"], j, m, lane % 4)
            for step in range(2):
                b = dev.ldmatrix_x4(rows + j * ROWS + m * GROUP + step * 512 + lane * 16, transpose=True)
                for n in range(2):
                    zero = [Float32(0.0)] * 4
                    d = dev.mma_m16n8k16(t, b[2 * n : 2 * n + 2], zero)
                    for i in range(4):
                        c = 4 * step + 2 * n + i % 2
                        at = (i // 2) * 32 + m * 8 + c
                        acc[at] = d[i] * anchor[c] if j == 0 else dev.fma(d[i], anchor[c], acc[at])

    def product_u(self, p, address):
        """u^T, 16 rows of V at a time, stored in fragment order."""
        for slab in range(8 // self.blocks):
            tile = p.warp + self.blocks * slab
            corner = p.k + (2 * tile + p.lane // 8 % 2 + p.lane // 16 * 16) * 128 + p.lane % 8 * 16
            v = [dev.ldmatrix_x4(corner + j * 4096, transpose=True) for j in range(self.blocks)]
            half, thread = tile // 4, tile % 4 * 32 + p.lane
            place = address + (half * (self.chunk * 128) + thread * 16)
            for i in range(self.blocks):
                acc = [[Float32(0.0)] * 4 for _ in range(2)]
                for j in range(i + 1):
                    t = dev.load_shared_x4(self.t_place(p.rows, i, j) + p.lane * 16, Int32)
                    for n in range(2):
                        acc[n] = dev.mma_m16n8k16(v[j], [t[n], t[n + 2]], acc[n])
                dev.store_global_x4(place + i * 2048, self.pack(acc[0] + acc[1]))
            cute.arch.sync_warp()  # keeps the compiler from loading the next slab into registers that it lacks
