"""K1, the preparation: the tokens of one chunk and one value head become the operands of the chain.

With G the inclusive cumulative sum of the log decays of a chunk, in base 2, and T = (I + L)^-1 diag(beta):

    L_ij = beta_i k_i . 2^{G_i - G_j} k_j (j < i)      Aqk_ij = scale q_i . 2^{G_i - G_j} k_j (j <= i)
    w = T (k 2^G),  u = T v,  Qd = scale q 2^G,  Kg = k 2^{G_end - G},  a = 2^{G_end}

A CTA owns one (slot, value head), a warp one block of 16 rows. Within a block, decay is a row factor
2^{G_i - A} <= 1 times a column factor 2^{A - G_j} >= 1, A the G of the block's *first* row: an anchor further
down would let later gates round earlier outputs. Columns then hop from anchor to anchor, block by block, to
the end of the chunk, where they are Kg; no exponent of a hop is above 0.

Stages, a CTA barrier between them:

1. *decay*: one thread a channel walks down the rows: gate, cumulative sum, exponents relative to the anchor.
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
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from kda_core.cute import device as dev
from kda_core.cute.device import LOG2E
from kda_sm90.config import BLOCK, HEAD_DIM, PrepareConfig
from kda_sm90.layouts import image_offset

G_FLOOR = -104.0 * LOG2E  # 2^G_FLOOR is 0 in fp32: masks of -1000 and -inf stay out of the cumulative sum
VOTE_LIMIT = (
    80.0 * LOG2E
)  # a row is split into factors while its gates since the anchor sum to less than this

_DTYPE = {"bfloat16": BFloat16, "float32": Float32, "int32": Int32, "int64": Int64}

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
            "v": rows,  # q in fragment order; after stage 1, v: [C/8][16] matrices of 8 tokens x 8 channels
            "k": max(rows, sum(later.values())),  # k in fragment order; after stage 1, what is in ``later``
            "hop": table,  # 2^{A_{b+1} - A_b}
            "anchor": table,  # 2^{A_b}
            "exponent": table if config.vote else 0,  # A_{b+1} - A_b
            "beta": self.chunk * 4,
            "live": self.chunk * 4,  # what the gate of a row is multiplied with: 0 beyond the sequence
            "flags": 4 * self.blocks,
        }
        self.at, end = {}, 0
        for name, size in sizes.items():
            self.at[name] = end
            end += size
        start = self.at["k"]
        for name, size in later.items():
            self.at[name] = start
            start += size
        self.shared_bytes = end

    def fake_args(self) -> tuple:
        config = self.config
        B, T, H, HV, records = (cute.sym_int() for _ in range(5))

        def tensor(dtype, *shape):
            order = tuple(reversed(range(len(shape))))
            return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

        def record(width, dtype=BFloat16):
            return make_fake_compact_tensor(dtype, (records, width), stride_order=(1, 0), assumed_align=128)

        q, k = (tensor(BFloat16, B, T, H, HEAD_DIM) for _ in range(2))
        v = tensor(BFloat16, B, T, HV, HEAD_DIM)
        g = tensor(_DTYPE[config.gate_dtype], B, T, HV, HEAD_DIM)
        beta_dtype = _DTYPE[config.beta_dtype]
        beta = make_fake_compact_tensor(
            beta_dtype, (B, T, HV), stride_order=(2, 1, 0), assumed_align=beta_dtype.width // 8
        )
        a_log = make_fake_compact_tensor(Float32, (HV,), assumed_align=4) if config.a_log else None
        dt_bias = (
            make_fake_compact_tensor(Float32, (HV, HEAD_DIM), stride_order=(1, 0), assumed_align=4)
            if config.dt_bias
            else None
        )
        offsets = None
        if config.offsets:
            dtype = _DTYPE[config.offsets]
            offsets = make_fake_compact_tensor(dtype, (cute.sym_int(),), assumed_align=dtype.width // 8)
        wide = self.chunk * HEAD_DIM
        workspace = (
            *(record(wide) for _ in range(3)),
            record(self.chunk * self.chunk),
            record(wide),
            record(HEAD_DIM, Float32),
        )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return q, k, v, g, beta, a_log, dt_bias, offsets, *workspace, Float32(1.0), Float32(-5.0), stream

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
        shared = cutlass.memory.SmemAllocator().allocate(self.shared_bytes, 128)
        inputs = (q, k, v, g, beta, a_log, dt_bias, w, qd, kg, aqk, u, a)
        if const_expr(self.config.offsets is None):
            chunks = cute.ceil_div(T, self.chunk)
            sequence, number = slot // chunks, slot % chunks
            token = Int64(sequence) * T + number * self.chunk
            valid = cutlass.min(T - number * self.chunk, self.chunk)
            self.prepare(*inputs, scale, lower_bound, shared, slot, head, token, valid)
        else:
            token, valid = self.locate(offsets, slot, T)
            if valid > 0:
                self.prepare(*inputs, scale, lower_bound, shared, slot, head, Int64(token), valid)

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
                below = self.clamped(offsets, probe, Int32(0), T) // self.chunk + probe <= slot
            found = cute.arch.popc(cute.arch.vote_ballot_sync(below))
            skip = cutlass.max(found - 1, 0) * step
            low = low + skip
            span = cutlass.min(step, span - skip)
        start = self.clamped(offsets, low, Int32(0), T)
        end = self.clamped(offsets, low + 1, start, T)
        number = slot - (start // self.chunk + low)
        token = start + number * self.chunk
        valid = cutlass.min(end - token, self.chunk)
        if number < 0:
            valid = Int32(0)
        return token, valid

    def clamped(self, offsets, n, low, T):
        """Offset n in [low, T]: what the device holds is not trusted."""
        wide = cutlass.min(cutlass.max(Int64(offsets[n]), Int64(low)), Int64(T))
        return Int32(wide)

    # ---- one chunk

    def prepare(
        self, q, k, v, g, beta, a_log, dt_bias, w, qd, kg, aqk, u, a, scale, lower_bound, shared, slot, head,
        token, valid,
    ):  # fmt: skip
        """``token``: the first one in B*T; ``valid``: rows that exist, 1 to C."""
        thread, _, _ = cute.arch.thread_idx()
        H, HV = q.shape[2], v.shape[2]
        warp, lane = thread // 32, thread % 32
        base = Int32(shared.toint())
        record = slot * HV + head
        # Warps get another block in each CTA, because blocks differ in work, and a warp's number chooses its
        # scheduler.
        p = SimpleNamespace(
            thread=thread,
            warp=warp,
            lane=lane,
            row=lane // 4,
            quad=lane % 4,
            block=(warp + slot + head) % self.blocks,
            valid=valid,
            scale=scale,
            **{name: base + offset for name, offset in self.at.items()},
        )
        value_row = token * HV + head
        key_row = token * H + head // (HV // H)

        gate = self.load_gate_parameters(p, a_log, dt_bias, head)
        beta_raw = self.load_beta(p, beta, value_row, HV)
        self.copy_gates(p, g, value_row, HV)
        self.copy_rows(p, k, key_row, H, p.k)
        self.copy_rows(p, q, key_row, H, p.v)
        cute.arch.cp_async_commit_group()

        self.store_live(p, lower_bound)
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_warp()
        self.decay(p, g.element_type, *gate, self.record(a, record))
        self.store_beta(p, beta_raw)
        cute.arch.cp_async_wait_group(0)
        k_rows, q_rows = self.load_rows(p, p.k), self.load_rows(p, p.v)
        cute.arch.sync_threads()

        self.copy_values(p, v, value_row, HV)
        columns = cute.make_rmem_tensor((64,), Float32)
        self.rows(p, k_rows, q_rows, columns, self.record(qd, record))
        cute.arch.sync_threads()

        self.columns(columns, p.block, p.lane, base)
        self.store_rows(p, self.record(kg, record), columns, 0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        self.send_aqk(thread, self.record(aqk, record), p.aqk)
        parts = self.diagonal(p)
        self.merge(parts, p.block, p.lane, base)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        product = cute.make_rmem_tensor((64,), Float32)
        product.fill(0.0)
        self.product_w(product, p.block, p.lane, base)
        self.store_rows(p, self.record(w, record), product, SIGNS)
        self.product_u(p, self.record(u, record))
        self.wait_aqk(thread)

    def record(self, array, index):
        """The address of a record in an array of the workspace."""
        return dev.address_of(array) + Int64(index) * (array.shape[1] * array.element_type.width // 8)

    # ---- loads

    def copy_gates(self, p, g, value_row, HV):
        """g to shared memory, asynchronously: the groups of channels whose decay the warp will walk, in rows of
        64 bytes (bf16), or at the places of the exponents that replace them (fp32)."""
        size = g.element_type.width // 8
        lanes = 2 * size  # to a row of a group, 16 bytes each
        stride = Int64(HV) * (HEAD_DIM * size)
        row, lane = p.lane // lanes, p.lane % lanes
        column = lane * 16 if size == 2 else (lane ^ (row % 2)) * 16
        for group in self.groups(p):
            first = dev.address_of(g) + (value_row * HEAD_DIM + group * 32) * size + lane * 16
            for start in range(0, self.chunk, 32 // lanes):
                block, inner = divmod(start, BLOCK)
                place = p.rows + block * ROWS + group * GROUP + (inner + row) * (32 * size) + column
                dev.cp_async_x4(place, first + stride * (start + row), start + row < p.valid)
        cute.arch.cp_async_commit_group()

    def groups(self, p):
        """The groups of 32 channels whose decay a warp walks, a lane a channel."""
        return [p.warp + self.blocks * i for i in range(4 // self.blocks)]

    def copy_rows(self, p, x, key_row, H, place):
        """Rows of q or k to shared memory, asynchronously, in fragment order: a thread copies for itself."""
        stride = Int64(H) * (HEAD_DIM * 2)
        first = dev.address_of(x) + key_row * (HEAD_DIM * 2) + p.quad * 16
        for half in range(2):
            row = p.block * BLOCK + p.row + 8 * half
            address = first + stride * row
            for m in range(4):
                dev.cp_async_x4(self.row_place(p, place, half, m), address + 64 * m, row < p.valid)

    def load_rows(self, p, place):
        """What ``copy_rows`` copied: bf16x2 [2 rows][4 groups][4 pairs]."""
        groups = [[self.row_place(p, place, half, m) for m in range(4)] for half in range(2)]
        return [[dev.load_shared_x4(address, Int32) for address in row] for row in groups]

    def row_place(self, p, place, half, m):
        return place + p.warp * 4096 + (half * 4 + m) * 512 + p.lane * 16

    def copy_values(self, p, v, value_row, HV):
        """v to shared memory, asynchronously: 8x8 matrices of 128 bytes."""
        stride = Int64(HV) * (HEAD_DIM * 2)
        first = dev.address_of(v) + value_row * (HEAD_DIM * 2)
        for half in range(2):
            row = p.warp * BLOCK + 8 * half + p.lane % 8
            for group in range(4):
                column = 4 * group + p.lane // 8
                matrix = (p.warp * 2 + half) * 16 + column
                place = p.v + matrix * 128 + (p.lane % 8) * 16
                dev.cp_async_x4(place, first + stride * row + column * 16, row < p.valid)
        cute.arch.cp_async_commit_group()

    def load_beta(self, p, beta, value_row, HV):
        """beta of a row, as it comes; two threads load the same."""
        row = p.thread % self.chunk
        size = beta.element_type.width // 8
        load = dev.load_global_bf16 if size == 2 else dev.load_global_f32
        return load(dev.address_of(beta) + (value_row + Int64(row) * HV) * size, row < p.valid)

    def store_beta(self, p, x):
        """beta, activated, to shared memory; rows beyond the sequence are 0."""
        row = p.thread % self.chunk
        if self.config.beta_sigmoid:
            x = dev.sigmoid(x) * Float32(2.0 if self.config.neg_eigval else 1.0)
        dev.store_shared(p.beta + row * 4, dev.select(row < p.valid, x, Float32(0.0)))

    def load_gate_parameters(self, p, a_log, dt_bias, head):
        """A_log of the head, and dt_bias of the thread's channels; None where the gate has none."""
        config = self.config
        rate, biases = None, [None for _ in self.groups(p)]
        if config.a_log:
            rate = dev.load_global_f32(dev.address_of(a_log) + Int64(head) * 4, Boolean(True))
        if config.dt_bias:
            first = dev.address_of(dt_bias) + (Int64(head) * HEAD_DIM + p.lane) * 4
            biases = [dev.load_global_f32(first + group * 128, Boolean(True)) for group in self.groups(p)]
        return rate, biases

    # ---- stage 1: decay

    def decay(self, p, dtype, a_log, dt_bias, address):
        """Exponents G_i - A of every row, 2^A and 2^hop of every block, and a. Flags of what needs the vote."""
        config = self.config
        rate = dev.ex2(a_log * Float32(LOG2E)) if config.a_log else Float32(1.0)
        reach = [Float32(0.0) for _ in range(self.blocks)]
        depth = [Float32(0.0) for _ in range(self.blocks)]
        for group, bias in zip(self.groups(p), dt_bias, strict=True):
            channel = group * 32 + p.lane
            bias = bias if config.dt_bias else Float32(0.0)
            place = p.rows + group * GROUP
            parity = [place + ((p.lane // 4) ^ odd) * 16 + (p.lane % 4) * 4 for odd in range(2)]
            G, anchors = Float32(0.0), []
            for block in range(self.blocks):
                if dtype is BFloat16:
                    rows = [
                        dev.load_shared_bf16(place + p.lane * 2 + (block * ROWS + row * 64))
                        for row in range(BLOCK)
                    ]
                    cute.arch.sync_warp()  # exponents take twice the room: they go where others read
                else:
                    rows = [
                        dev.load_shared(parity[row % 2] + (block * ROWS + row * 128), Float32)
                        for row in range(BLOCK)
                    ]
                live = self.load_live(p, block)
                for row, x in enumerate(rows):
                    G = G + self.log_decay(x, rate, bias, live[row])
                    if row == 0:
                        anchors.append(G)
                    since = G - anchors[block]
                    dev.store_shared(parity[row % 2] + (block * ROWS + row * 128), since)
                    if config.vote:
                        reach[block] = dev.maximum(reach[block], -since)
            anchors.append(G)
            dev.store_global(address + channel * 4, dev.ex2(G))
            for block in range(self.blocks):
                hop = anchors[block + 1] - anchors[block]
                cell = (block * HEAD_DIM + channel) * 4
                dev.store_shared(p.hop + cell, dev.ex2(hop))
                dev.store_shared(p.anchor + cell, dev.ex2(anchors[block]))
                if config.vote:
                    dev.store_shared(p.exponent + cell, hop)
                    depth[block] = dev.maximum(depth[block], -hop)
        if config.vote:
            bits = Int32(0)
            for block in range(self.blocks):
                for shift, value in enumerate((reach[block], depth[block])):
                    some = cute.arch.vote_any_sync(value >= VOTE_LIMIT)
                    bits = bits | dev.select(some, Int32(1 << (2 * block + shift)), Int32(0))
            dev.store_shared(p.flags + p.warp * 4, bits)

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
        has 0; a precomputed gate needs none, for such rows are copied as zeros. Every warp stores the same."""
        if self.config.gate == "precomputed":
            return
        factor = (lower_bound if self.config.gate == "bounded" else Float32(-1.0)) * Float32(LOG2E)
        for i in range(self.chunk // 32):
            row = p.lane + 32 * i
            dev.store_shared(p.live + row * 4, dev.select(row < p.valid, factor, Float32(0.0)))

    def load_live(self, p, block):
        if self.config.gate == "precomputed":
            return [None] * BLOCK
        places = [p.live + (block * BLOCK + row) * 4 for row in range(0, BLOCK, 4)]
        return [x for place in places for x in dev.load_shared_x4(place, Float32)]

    # ---- stage 2: rows

    def rows(self, p, k_raw, q_raw, columns, address):
        """Row factors to shared memory, Qd to global memory, diagonal blocks of L (inverted) and Aqk, and the
        columns [2 rows][4 groups][8 channels] at the next block's anchor."""
        config = self.config
        k = self.normalise(p, k_raw) if config.l2norm else k_raw
        q = self.normalise(p, q_raw) if config.l2norm else q_raw
        fine_l = fine_a = votes = steep = None
        if config.vote:
            bits = Int32(0)
            for i in range(self.blocks):
                bits = bits | dev.load_shared(p.flags + 4 * i, Int32)
            bits = bits >> (2 * p.block)
            steep = (bits & 2) != 0
            fine_l, fine_a, votes = self.vote(p, k, q, (bits & 1) != 0)

        zero = Float32(0.0)
        l_acc = [[zero] * 4 for _ in range(2)]
        a_acc = [[zero] * 4 for _ in range(2)]
        for m in range(4):
            since = [self.load_exponents(p, m, half) for half in range(2)]
            cute.arch.sync_warp()  # the rows of the factors go where the exponents were
            place = p.rows + p.block * ROWS + m * GROUP + p.lane * 16
            qd = [[], []]
            for step in range(2):
                at = (p.block * HEAD_DIM + m * 32 + p.quad * 8 + step * 4) * 4
                hop, anchor = (dev.load_shared_x4(table + at, Float32) for table in (p.hop, p.anchor))
                exponent = dev.load_shared_x4(p.exponent + at, Float32) if config.vote else None
                k_row, q_row, k_col = ([[], []] for _ in range(3))
                for half in range(2):
                    for pair in range(2):
                        kx, qx = (dev.unpack_bf16x2(dev.pinned(x[half][m][2 * step + pair])) for x in (k, q))
                        kr, qr, kc, qg = [], [], [], []
                        for e in range(2):
                            c = 2 * pair + e
                            fall = since[half][4 * step + c]
                            down = dev.ex2(fall)
                            kr.append(kx[e] * down)
                            qr.append(qx[e] * p.scale * down)
                            qg.append(qr[e] * anchor[c])
                            index = half * 32 + m * 8 + step * 4 + c
                            if config.vote:
                                kept = votes[half]
                                up = dev.ex2(dev.select(kept, -fall, zero))
                                kc.append(dev.select(kept, kx[e] * up, zero))
                                # Where the hop would flush what the factor blew up: a fresh exponential.
                                far = kx[e] * dev.ex2(dev.select(steep, exponent[c] - fall, zero))
                                columns[index] = dev.select(steep, far, kc[e] * hop[c])
                            else:
                                kc.append(kx[e] * dev.ex2(-fall))
                                columns[index] = kc[e] * hop[c]
                        k_row[half].append(dev.pack_bf16x2(*kr))
                        q_row[half].append(dev.pack_bf16x2(*qr))
                        k_col[half].append(dev.pack_bf16x2(*kc))
                        qd[half].append(dev.pack_bf16x2(*qg))
                k_a, q_a = ([x[0][0], x[1][0], x[0][1], x[1][1]] for x in (k_row, q_row))
                for half in range(2):
                    l_acc[half] = dev.mma_m16n8k16(k_a, k_col[half], l_acc[half])
                    a_acc[half] = dev.mma_m16n8k16(q_a, k_col[half], a_acc[half])
                dev.stmatrix_x4(place + step * 512, k_a)
                dev.stmatrix_x4(place + step * 512 + TILE, q_a)
            for half in range(2):
                dev.store_global_x4(address + self.row_offset(p, m, half), qd[half])
        if config.vote:
            for tile in range(2):
                for i in range(4):
                    kept = votes[i // 2]
                    l_acc[tile][i] = dev.select(kept, l_acc[tile][i], fine_l[tile * 4 + i])
                    a_acc[tile][i] = dev.select(kept, a_acc[tile][i], fine_a[tile * 4 + i])
        for tile in range(2):
            for i in range(4):
                inside = p.row + 8 * (i // 2) >= 8 * tile + 2 * p.quad + i % 2
                a_acc[tile][i] = dev.select(inside, a_acc[tile][i], Float32(0.0))
        self.store_aqk(p, a_acc, p.block, p.block)
        self.substitute(p, l_acc)

    def normalise(self, p, x):
        """Rows over their norms, rounded to bf16. The sums of squares are the diagonal of x x^T."""
        rows = []
        for half in range(2):
            acc = [Float32(0.0)] * 4
            for m in range(4):
                for t in (0, 2):
                    a = [x[0][m][t], x[1][m][t], x[0][m][t + 1], x[1][m][t + 1]]
                    acc = dev.mma_m16n8k16(a, [x[half][m][t], x[half][m][t + 1]], acc)
            diagonal = dev.select(p.row % 2 == 0, acc[2 * half], acc[2 * half + 1])
            total = cute.arch.shuffle_sync(diagonal, p.row * 4 + p.row // 2)
            inverse = dev.rsqrt(total + Float32(1e-6))
            rows.append([[self.scale_pair(pair, inverse) for pair in group] for group in x[half]])
        return rows

    def scale_pair(self, pair, factor):
        low, high = dev.unpack_bf16x2(pair)
        return dev.pack_bf16x2(low * factor, high * factor)

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

    def vote(self, p, k, q, needed):
        """Blocks of L (without beta) and Aqk without two-sided factors, two tiles of 4 values, and whether each
        of the two rows keeps its factors. ``needed``: some row does not; only then the blocks are computed."""
        k_pairs, q_pairs = (cute.make_rmem_tensor((32,), Int32) for _ in range(2))
        for half in range(2):
            for m in range(4):
                for pair in range(4):
                    k_pairs[half * 16 + m * 4 + pair] = k[half][m][pair]
                    q_pairs[half * 16 + m * 4 + pair] = q[half][m][pair]
        fine_l, fine_a = (cute.make_rmem_tensor((8,), Float32) for _ in range(2))
        fine_l.fill(0.0)
        fine_a.fill(0.0)
        reach = cute.make_rmem_tensor((2,), Float32)
        reach.fill(0.0)
        place = p.rows + p.block * ROWS
        self.refine(needed, k_pairs, q_pairs, fine_l, fine_a, reach, place, p.lane, p.scale)
        return fine_l, fine_a, [reach[half] < VOTE_LIMIT for half in range(2)]

    @cute.jit
    def refine(
        self,
        needed: Boolean,
        k_pairs: cute.Tensor,
        q_pairs: cute.Tensor,
        fine_l: cute.Tensor,
        fine_a: cute.Tensor,
        reach: cute.Tensor,
        place: Int32,
        lane: Int32,
        scale: Float32,
    ):
        """The block by halves: rows of the lower half against columns of the upper one, the anchor on the first
        row of the lower half, so that no factor is above 1; then the same within each half, down to single
        rows, whose own product has no decay. Also the reach of each row, the fall of G since the anchor."""
        if needed:
            self.refine_diagonal(k_pairs, q_pairs, fine_a, reach, place, lane, scale)
            for level in cutlass.range(4, unroll=1):
                self.refine_level(k_pairs, q_pairs, fine_l, fine_a, place, lane, scale, Int32(8) >> level)

    def refine_diagonal(self, k_pairs, q_pairs, fine_a, reach, place, lane, scale):
        """Aqk_ii = scale q_i . k_i, and the largest A - G_i over the channels, for the two rows of the thread."""
        p = SimpleNamespace(rows=place, block=0, row=lane // 4, quad=lane % 4)
        for half in range(2):
            most, total = Float32(0.0), Float32(0.0)
            for m in range(4):
                for x in self.load_exponents(p, m, half):
                    most = dev.maximum(most, -x)
                for pair in range(4):
                    at = half * 16 + m * 4 + pair
                    for x, y in zip(
                        *(dev.unpack_bf16x2(dev.pinned(t[at])) for t in (q_pairs, k_pairs)), strict=True
                    ):
                        total = dev.fma(x, y, total)
            reach[half] = dev.quad_max(most)
            total = dev.quad_sum(total) * scale
            for e in range(2):
                at = half * 4 + half * 2 + e  # row half and tile agree on the diagonal
                fine_a[at] = dev.select(p.row == 2 * p.quad + e, total, fine_a[at])

    def refine_level(self, k_pairs, q_pairs, fine_l, fine_a, place, lane, scale, size):
        """Rows i with bit ``size`` set against columns j without it, in each 2*size rows of the block."""
        row, quad = lane // 4, lane % 4
        zero = Float32(0.0)
        # Unknown to the compiler, which would unpack q and k before the loop, into 128 registers.
        nothing = dev.pinned(size) >> 8
        l_acc = [[zero] * 4 for _ in range(2)]
        a_acc = [[zero] * 4 for _ in range(2)]
        rows = [row + 8 * half for half in range(2)]
        lower = [(i & size) != 0 for i in rows]
        mine = [SimpleNamespace(rows=place, block=0, row=i, quad=quad) for i in rows]
        first = [(i | size) & (0 - size) for i in rows]
        theirs = [SimpleNamespace(rows=place, block=0, row=i, quad=quad) for i in first]
        for m in range(4):
            k_row, q_row, k_col = [], [], []
            for half in range(2):
                since = self.load_exponents(mine[half], m, 0)
                anchor = self.load_exponents(theirs[half], m, 0)
                k, q = [], []
                for pair in range(4):
                    at = half * 16 + m * 4 + pair
                    k_pair, q_pair = (dev.unpack_bf16x2(x[at] ^ nothing) for x in (k_pairs, q_pairs))
                    for e in range(2):
                        fall = since[2 * pair + e] - anchor[2 * pair + e]
                        factor = dev.ex2(dev.minimum(dev.select(lower[half], fall, -fall), zero))
                        k.append(k_pair[e] * factor)
                        q.append(q_pair[e] * scale * factor)
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
            i, j = rows[n // 2 % 2], 8 * (n // 4) + 2 * quad + n % 2
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
        column = p.lane % 16
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
        for j in cutlass.range(block + 1, unroll=1):
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
                        acc[at] = dev.fma(d[i], anchor[c], acc[at])

    def product_u(self, p, address):
        """u^T, 16 rows of V at a time, stored in fragment order."""
        for slab in range(8 // self.blocks):
            tile = p.warp + self.blocks * slab
            corner = p.v + (2 * tile + p.lane // 8 % 2 + p.lane // 16 * 16) * 128 + p.lane % 8 * 16
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
