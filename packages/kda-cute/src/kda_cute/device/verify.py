"""Verification of drafts on tensor cores: T <= 8 tokens of a sequence from states [V, K] that are read once (`kda_core.contract.KdaJournal`).

With S the state before the call, d_t the decays of token t, and D_t their product from the first token to token t:

    c_tj = sum_K k_t k_j (D_t / D_j),    e_tj = sum_K q_t k_j (D_t / D_j)
    u_t = beta_t (v_t - (D_t k_t) S - sum_{j < t} c_tj u_j),    o_t = (D_t q_t) S + sum_{j <= t} e_tj u_j

No quotient is formed: D_t / D_j is the product of the decays after token j. It underflows to zero as the recurrence does.

A CTA has one state. A warp has 16 values of it, rows of an MMA's left operand, whose fragments it loads from global memory. The columns of
the right operand are D_t k_t and D_t q_t. Products are those of TF32 parts: three for states in fp32, two for those in bf16, which are
exact in TF32. Then a lane has a row, and solves the triangle of its T tokens.

If the slot has records, they are applied to the state in the registers first, and a slot that folds writes it.

Rows are independent, and every sum has a fixed order, so the bits of a sequence do not depend on other sequences.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from kda_cute.device import ptx, slots
from kda_cute.device.decode import ROW, element, inverse_norm, load_beta, uniform
from kda_cute.device.intra_chunk.gates import G_FLOOR
from kda_cute.device.journal import LN2, JournalKernel, natural_exp
from kda_cute.journal import VERIFY, JournalArguments
from kda_cute.records import HEAD_DIM
from kda_cute.verify import VerifyConfig

WARPS = 8  # each has 16 values of the state, and a token in the first phase
UNITS = HEAD_DIM // 16  # of 4 channels, that a lane has of each of its two rows
MATRIX = WARPS * ROW  # bytes of an array of rows for all tokens

#: With records, a CTA prefetches into the L2 the state of the CTA that comes this many later in the grid. 132 SMs run twice as many at a time.
AHEAD = 132
RECORD_WORDS = 11  # of a record that a lane loads
#: Bytes of a row of records. The padding puts the 8 bytes that lanes load from each of four rows on different banks.
RECORD = ROW + 32

# Arrays in shared memory, in bytes from its start. A row of the first five has the 128 channels or values of a token in fp32.
KEYS, QUERIES, DECAYS, LOGS, VALUES, BETAS = (i * MATRIX for i in range(6))
COEFFICIENTS = BETAS + WARPS * 128  # [j][2 tokens]: c_tj, then e_tj, each in the order of `place_of`
OPERAND = COEFFICIENTS + 2 * WARPS * WARPS * 4  # columns of the right operand, `column_bytes` each
PRODUCTS = KEYS  # [128 rows][2 tokens + 1]; keys, queries and decays have been read


class VerifyKernel(JournalKernel):
    """Takes a tensor, which determines the device and the stream, and the values of `kda_cute.journal.JournalArguments`."""

    spill_allowance = 8  # of variants with records
    interface = VERIFY
    threads = 32 * WARPS
    ctas_per_sm = 2

    def __init__(self, config: VerifyConfig):
        self.config, self.tokens = config, config.tokens
        self.narrow = config.state_dtype == "bfloat16"
        self.state_bytes = 2 if self.narrow else 4  # of an element
        self.groups = 1  # CTAs of a state
        # bf16 states stay as they are, two in a word, unless records are added to them
        self.packed = self.narrow and not config.records
        # the lanes of a quarter of a warp load from two columns, whose 16 bytes then lie on different banks
        self.column_bytes = ROW + (16 if self.narrow else 64)
        self.product_bytes = 4 * (2 * self.tokens + 1)  # of a row
        # 8 records in the memory of the operand: weights of k, u, and a row of decays
        records = 2 * WARPS * RECORD + ROW if config.records else 0
        self.shared_bytes = OPERAND + max(2 * self.tokens * self.column_bytes, records)

    @cute.kernel
    def kernel(self, values: tuple):
        x = JournalArguments(*values)
        self.wait_for_stream()
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        thread, _, _ = cute.arch.thread_idx()
        n, place = self.place(thread, shared)
        slot = slots.load_index(x.read + Int64(n) * x.index_bytes, x.index_bytes)
        # A token needs no slot, so its loads do not wait for it. Those of a sequence without a slot are not used.
        token = self.load_token(x, place)
        following = self.following(x, n, place)
        valid = slots.is_slot(x, slot)
        # in a uniform register: every lane has it, and it is below 2^31
        slot = Int64(uniform(Int32(ptx.select(valid, slot, Int64(0))))[0])
        if valid:
            self.verify(x, place, slot, token, following)
        else:
            self.prefetch(place, following)
            self.clear_tokens(x, place)

    def place(self, thread, shared):
        """As `DecodeKernel.place`. If slots may have records, CTAs start head by head; see `kda_cute.journal.VERIFY`."""
        n, place = super().place(thread, shared)
        if self.config.records:
            n, place.key_head, place.member = cute.arch.block_idx()
            _, _, members = cute.arch.grid_dim()
            place.head = place.key_head * members + place.member
        place.row, place.thread = n, thread
        return n, place

    def following(self, x, n, place):
        """Returns the address of the state of the CTA that comes `AHEAD` later in the order of the grid; 0 if it has none.

        It is 0 also without records, because prefetching then gains nothing, or loses."""
        if not self.config.records:
            return Int64(0)
        at = n + AHEAD
        heads = place.key_head + place.member * x.H + at // x.N  # that are before it
        n = at % x.N
        slot = slots.load_index(x.read + Int64(n) * x.index_bytes, x.index_bytes)
        head = heads % x.H * (x.HV // x.H) + heads // x.H
        exists = slots.is_slot(x, slot) & (heads < x.HV)
        return ptx.select(exists, self.matrix(x, head, slot), Int64(0))

    @cute.jit
    def prefetch(self, place, address: Int64):
        """Prefetches a state into the L2. ``address``: 0 for none."""
        if (place.thread == 0) & (address != 0):
            ptx.bulk_prefetch(address, Int32(HEAD_DIM * HEAD_DIM * self.state_bytes))

    def verify(self, x, place, slot: Int64, token, following: Int64):
        """Computes o and the records of all tokens of a sequence with a slot."""
        size = 2 * UNITS * (2 if self.packed else 4)
        state = cute.make_rmem_tensor((size,), Int32 if self.packed else Float32)
        matrix = self.matrix(x, place.head, slot)
        self.load_state(matrix, place, state)
        self.prefetch(place, following)
        records = SimpleNamespace(
            values=(slot * x.HV + place.head) * x.R,  # the first record of the value head, in rows
            keys=(slot * x.H + place.key_head) * x.R,
            next=Int32(0),  # the row behind the last one
        )
        first, count, folds = Int32(0), Int32(0), Boolean(False)
        loaded, last, total = None, None, Float32(0.0)  # total: G of the thread's channel
        if cutlass.const_expr(self.config.records):
            first, count = self.span(x, place.row, slot, Boolean(True))
            folds = count + x.T > x.fold_above
            records.next = self.ring(x, first, count)
            last = x.record_g + (records.values + self.ring(x, first, count - 1)) * ROW
            loaded = cute.make_rmem_tensor((RECORD_WORDS,), Int32)
            self.load_record(x, place, records, loaded, first, count, Int32(0))
        self.store_token(x, place, records, token)
        if cutlass.const_expr(self.config.records):
            self.apply_records(x, place, records, state, loaded, last, first, count)
            channel = Int64((place.thread & (HEAD_DIM - 1)) * 4)
            total = ptx.load_global_f32(last + channel, (count > 0) & ~folds)
            self.fold_state(matrix, place, state, folds)
        cute.arch.sync_threads()  # the rows of all tokens are there, and the operand's memory is free
        self.store_columns(x, place, records, total)
        self.store_coefficients(place)
        cute.arch.sync_threads()
        self.store_products(place, self.product(place, state))
        cute.arch.sync_warp()  # a warp has the products of its own rows
        self.solve(x, place, records)

    def ring(self, x, row, step):
        """Returns the row ``step`` rows behind a row of a slot's ring. ``step`` is at most the number of rows."""
        y = row + step
        return ptx.select(y >= x.R, y - x.R, y)

    # ---- states

    def lane_offset(self, inner):
        """Returns the offset, in bytes of an fp32 row, of the channels of a lane in its first unit. ``inner``: lane % 4."""
        return inner * (32 if self.narrow else 16)

    def unit_offset(self, unit):
        """Returns the offset, in bytes of an fp32 row, of a unit of four channels from the first one. Four lanes have 64 contiguous bytes
        of a row of states."""
        return unit // 2 * 128 + unit % 2 * 16 if self.narrow else unit * 64

    def pieces(self, start, place):
        """Yields the address of each 16 bytes of states that a lane has, and their first index in the state. Index 4 UNITS i + 4 n + e
        is channel e of unit n, of the lane's row i of two: rows lane // 4 and lane // 4 + 8 of the warp. Two bf16 that stay as they
        are have one index."""
        row = place.warp * 16 + (place.lane >> 2)
        first = start + Int64(row * ROW + self.lane_offset(place.lane & 3)) // (2 if self.narrow else 1)
        step = 2 if self.narrow else 1  # units of 16 bytes
        for i in range(2):
            for unit in range(0, UNITS, step):
                at = (i * 8 * ROW + self.unit_offset(unit)) // step
                yield first + at, (i * UNITS + unit) * (2 if self.packed else 4)

    def load_state(self, start, place, state):
        """Loads the lane's part of the state."""
        for address, n in self.pieces(start, place):
            if self.packed:
                for e, word in enumerate(ptx.load_global_streaming_x4(address, Boolean(True), Int32)):
                    state[n + e] = word
            elif self.narrow:
                for e, word in enumerate(ptx.load_global_streaming_x4(address, Boolean(True), Int32)):
                    state[n + 2 * e], state[n + 2 * e + 1] = ptx.unpack_bf16x2(word)
            else:
                for e, y in enumerate(ptx.load_global_streaming_x4(address, Boolean(True))):
                    state[n + e] = y

    @cute.jit
    def fold_state(self, start, place, state, folds):
        """Stores the state in the dtype of the pool, if the slot ``folds``."""
        if folds:
            for address, n in self.pieces(start, place):
                if cutlass.const_expr(self.narrow):
                    words = [ptx.pack_bf16x2(state[n + e], state[n + e + 1]) for e in range(0, 8, 2)]
                    ptx.store_global_streaming_x4(address, words)
                else:
                    ptx.store_global_streaming_x4(address, [state[n + e] for e in range(4)])

    @cute.jit
    def apply_records(self, x, place, records, state, loaded, last, first, count):
        """Applies the records of the slot to the state. ``loaded``: the warp's record of the first eight. ``last``: address of G of the
        last one."""
        operand = place.shared + OPERAND
        total = self.load_row(last, place, count > 0)
        for start in cutlass.range(0, count, WARPS, unroll=1):
            words = [loaded[i] for i in range(RECORD_WORDS)]
            self.load_record(x, place, records, loaded, first, count, start + WARPS)
            k = [y for word in words[:2] for y in ptx.unpack_bf16x2(word)]
            factor, *values = (ptx.float_of_bits(word) for word in words[2:])
            # the exponent of a record that does not exist is not above 0 either
            weights = [k[i] * factor * natural_exp(total[i] - values[i]) for i in range(4)]
            cute.arch.sync_threads()  # earlier records have been read
            at = operand + place.warp * RECORD + place.lane * 16
            ptx.store_shared_x4(at, weights)
            ptx.store_shared_x4(at + WARPS * RECORD, values[4:])
            if place.warp == 0:
                decays = [ptx.select(start == 0, natural_exp(y), Float32(1.0)) for y in total]
                ptx.store_shared_x4(operand + 2 * WARPS * RECORD + place.lane * 16, decays)
            cute.arch.sync_threads()
            self.add_records(place, state, operand)

    def load_record(self, x, place, records, loaded, first, count, start):
        """Loads the warp's record of the eight from record ``start`` on, zeros if there is none: the lane's four k, the factor, its four G
        and its four u."""
        record = start + place.warp
        exists = record < count
        ring = self.ring(x, first, cutlass.min(record, count - 1))
        row, key = records.values + ring, records.keys + ring
        words = [
            *ptx.load_global_words(x.record_k + key * (2 * HEAD_DIM) + place.lane * 8, 2, exists),
            ptx.bits_of_float(ptx.load_global_f32(x.record_factor + key * 4, exists)),
            *(
                word
                for array in (x.record_g, x.record_u)
                for word in ptx.load_global_words(array + row * ROW + place.lane * 16, 4, exists)
            ),
        ]
        for i, word in enumerate(words):
            loaded[i] = word

    def load_row(self, start, place, valid):
        """Loads the lane's four of 128 fp32 in global memory."""
        return [ptx.float_of_bits(y) for y in ptx.load_global_words(start + place.lane * 16, 4, valid)]

    def add_records(self, place, state, start):
        """Decays the state and adds eight records: an MMA with u as the left operand and the weights of k as the right one. The sums start
        from zero, because an MMA truncates what it adds to a larger number.

        Column n of tile e of a unit is channel 2 (n % 2) + e of lane n // 2, so that a lane gets its own channels."""
        inner, outer = place.lane & 3, place.lane >> 2
        at = start + (WARPS + inner) * RECORD + (place.warp * 16 + outer) * 4
        u = [
            ptx.cut_tf32(ptx.load_shared(at + j * (4 * RECORD) + i * 32, Float32))
            for j in range(2)
            for i in range(2)
        ]
        high, low = ([y[part] for y in u] for part in range(2))
        column = start + inner * RECORD + self.lane_offset(outer >> 1) + (outer & 1) * 8
        decays = start + 2 * WARPS * RECORD + self.lane_offset(inner)
        for unit in range(UNITS):
            at = column + self.unit_offset(unit)
            rows = [ptx.load_shared_x2(at + j * (4 * RECORD), Float32) for j in range(2)]
            decay = ptx.load_shared_x4(decays + self.unit_offset(unit), Float32)
            for e in range(2):
                parts = [ptx.cut_tf32(row[e]) for row in rows]
                b_high, b_low = ([y[part] for y in parts] for part in range(2))
                sums = ptx.mma_m16n8k8_tf32(low, b_high, [Float32(0.0)] * 4)
                sums = ptx.mma_m16n8k8_tf32(high, b_low, sums)
                sums = ptx.mma_m16n8k8_tf32(high, b_high, sums)
                for n, y in enumerate(sums):
                    channel = 2 * (n % 2) + e
                    at_state = (n // 2 * UNITS + unit) * 4 + channel
                    state[at_state] = ptx.fma(state[at_state], decay[channel], y)

    # ---- tokens

    def load_token(self, x, place):
        """Loads what a warp needs of its token; zeros for a warp without one. A lane has four channels and values."""
        exists = place.warp < x.T
        token, at = cutlass.min(place.warp, x.T - 1), place.lane * 4
        words = lambda start, index, size: ptx.load_global_words(start + (index + at) * size, size, exists)
        gates = element(place, token, x.g_batch, x.g_token, place.head)
        wide = self.config.gate_dtype == "float32"
        return SimpleNamespace(
            exists=exists,
            k=words(x.k, element(place, token, x.k_batch, x.k_token, place.key_head), 2),
            q=words(x.q, element(place, token, x.q_batch, x.q_token, place.key_head), 2),
            v=words(x.v, element(place, token, x.v_batch, x.v_token, place.head), 2),
            g=words(x.g, gates, 4 if wide else 2),
            beta=load_beta(x, place, token),
            gate=self.gate(x, place),
        )

    def store_token(self, x, place, records, token):
        """Stores the rows of a warp's token in shared memory, and k and its factor in the record."""
        unpack = lambda words: [y for word in words for y in ptx.unpack_bf16x2(word)]
        k, q, (gate, biases) = unpack(token.k), unpack(token.q), token.gate
        wide = self.config.gate_dtype == "float32"
        g = [ptx.float_of_bits(word) for word in token.g] if wide else unpack(token.g)
        logs = [
            ptx.maximum(gate.activate(y, bias) * gate.log_scale, Float32(G_FLOOR))
            for y, bias in zip(g, biases, strict=True)
        ]
        factor = inverse_norm(x, k)
        query = inverse_norm(x, q) * x.scale
        rows = {
            KEYS: [y * factor for y in k],
            QUERIES: [y * query for y in q],
            DECAYS: [ptx.ex2(y) for y in logs],
            LOGS: logs,
            VALUES: unpack(token.v),
        }
        start = place.shared + place.warp * ROW + place.lane * 16
        for array, row in rows.items():
            ptx.store_shared_x4(start + array, row)
        beta = ptx.select(token.exists, token.beta, Float32(0.0))
        ptx.store_shared(place.shared + BETAS + place.thread * 4, beta)  # of all lanes
        # one value head of a group writes what the group shares
        owns = token.exists & (place.member == 0)
        key = records.keys + self.ring(x, records.next, place.warp)
        ptx.store_global_words_if(x.record_k + key * (2 * HEAD_DIM) + place.lane * 8, token.k, owns)
        ptx.store_global_f32_if(x.record_factor + key * 4, factor, owns & (place.lane == 0))

    def store_columns(self, x, place, records, total):
        """Stores the columns of the right operand, D_t k_t and then D_t q_t, and G in the records. A thread has a channel of all k or
        of all q. ``total``: G before the first token."""
        at = (place.thread & (HEAD_DIM - 1)) * 4
        kind = place.thread >> 7  # 0: k, 1: q
        row = place.shared + at
        target = place.shared + OPERAND + kind * (self.tokens * self.column_bytes) + at
        decay = Float32(1.0)
        for t in range(self.tokens):
            decay = decay * ptx.load_shared(row + DECAYS + t * ROW, Float32)
            factor = ptx.load_shared(row + kind * QUERIES + t * ROW, Float32)
            ptx.store_shared(target + t * self.column_bytes, factor * decay)
            total = ptx.fma(ptx.load_shared(row + LOGS + t * ROW, Float32), Float32(LN2), total)
            ring = self.ring(x, records.next, t)
            address = x.record_g + (records.values + ring) * ROW + at
            ptx.store_global_f32_if(address, total, (kind == 0) & (t < x.T))

    def place_of(self, token):
        """Returns the place of a token among the coefficients: even tokens, then odd ones. Each half of a warp reads one kind."""
        return token % 2 * (self.tokens // 2) + token // 2

    def store_coefficients(self, place):
        """Stores c_tj and e_tj. A warp has token j = warp, and with at most 4 tokens one of the two kinds."""
        if self.tokens == WARPS:
            j, sources, target = place.warp, (KEYS, QUERIES), Int32(0)
        else:
            j, kind = place.warp % self.tokens, place.warp // self.tokens
            sources, target = (kind * QUERIES,), kind * (4 * self.tokens)
        start = place.shared + place.lane * 16
        own = ptx.load_shared_x4(start + KEYS + j * ROW, Float32)
        k = [Float32(0.0)] * 4  # k_j D_t / D_j; zero before token j
        sums = [Float32(0.0)] * (len(sources) * self.tokens)
        for t in range(self.tokens):
            decays = ptx.load_shared_x4(start + DECAYS + t * ROW, Float32)
            k = [ptx.select(j == t, own[i], k[i] * decays[i]) for i in range(4)]
            for n, source in enumerate(sources):
                other = ptx.load_shared_x4(start + source + t * ROW, Float32)
                dot = k[0] * other[0]
                for i in range(1, 4):
                    dot = ptx.fma(k[i], other[i], dot)
                sums[n * self.tokens + self.place_of(t)] = dot
        lanes = 32
        while len(sums) > 1:  # two lanes exchange sums: each adds one half of them
            lanes, half = lanes // 2, len(sums) // 2
            upper = (place.lane & lanes) != 0
            sent = [ptx.select(upper, sums[i], sums[i + half]) for i in range(half)]
            kept = [ptx.select(upper, sums[i + half], sums[i]) for i in range(half)]
            sums = [y + cute.arch.shuffle_sync_bfly(z, lanes) for y, z in zip(kept, sent, strict=True)]
        total = sums[0]  # sum lane // lanes
        for step in (8, 4, 2, 1):
            if step < lanes:
                total = total + cute.arch.shuffle_sync_bfly(total, step)
        at = place.shared + COEFFICIENTS + j * (8 * self.tokens) + target + place.lane // lanes * 4
        self.store_if((place.lane % lanes) == 0, at, total)

    @cute.jit
    def store_if(self, valid, address, value):
        """Stores a value in shared memory if ``valid``."""
        if valid:
            ptx.store_shared(address, value)

    # ---- products

    def product(self, place, state):
        """Returns the products of the warp's rows with all columns: for each tile of 8 columns four values of a lane, as
        `ptx.mma_m16n8k8_tf32` returns them."""
        tiles = self.tokens // 4
        high, low = ([[Float32(0.0)] * 4 for _ in range(tiles)] for _ in range(2))
        column = (
            place.shared + OPERAND + (place.lane >> 2) * self.column_bytes + self.lane_offset(place.lane & 3)
        )
        for unit in range(UNITS):
            left = self.fragments(state, unit)
            for tile in range(tiles):
                at = column + tile * (8 * self.column_bytes) + self.unit_offset(unit)
                parts = [ptx.cut_tf32(y) for y in ptx.load_shared_x4(at, Float32)]
                for n, (a_high, a_low) in enumerate(left):
                    b_high, b_low = ([parts[2 * n + i][part] for i in range(2)] for part in range(2))
                    if a_low is not None:
                        low[tile] = ptx.mma_m16n8k8_tf32(a_low, b_high, low[tile])
                    low[tile] = ptx.mma_m16n8k8_tf32(a_high, b_low, low[tile])
                    high[tile] = ptx.mma_m16n8k8_tf32(a_high, b_high, high[tile])
        return [[y + z for y, z in zip(*sums, strict=True)] for sums in zip(high, low, strict=True)]

    def fragments(self, state, unit):
        """Returns the two fragments of a unit, each in two TF32 parts; None for the second part of bf16 states. Channel 2n of the unit is
        k = lane % 4 of fragment n, and channel 2n + 1 is k + 4."""
        found = []
        for n in range(2):
            if self.packed:
                words = [state[(i * UNITS + unit) * 2 + n] for i in range(2)]
                found.append(([*(y << 16 for y in words), *(y & Int32(-65536) for y in words)], None))
            else:
                at = [(i * UNITS + unit) * 4 + 2 * n + e for e in range(2) for i in range(2)]
                found.append(tuple(zip(*(ptx.cut_tf32(state[y]) for y in at), strict=True)))
        return found

    def store_products(self, place, products):
        """Stores the products in the warp's part of shared memory."""
        row = place.warp * 16 + (place.lane >> 2)
        start = place.shared + PRODUCTS + row * self.product_bytes + (place.lane & 3) * 8
        for tile, values in enumerate(products):
            for i, y in enumerate(values):
                ptx.store_shared(start + (i // 2 * (8 * self.product_bytes) + tile * 32 + i % 2 * 4), y)

    def solve(self, x, place, records):
        """Computes u and o of a row. Both halves of a warp compute u; one writes even tokens, one odd tokens."""
        T, half = self.tokens, place.lane >> 4
        upper = half != 0
        row = place.warp * 16 + (place.lane & 15)
        start = place.shared + PRODUCTS + row * self.product_bytes
        dots = [ptx.load_shared(start + t * 4, Float32) for t in range(T)]
        outs = [ptx.load_shared(start + (T + 2 * i + half) * 4, Float32) for i in range(T // 2)]
        load = ptx.load_shared_x4 if T == 8 else ptx.load_shared_x2
        u = []
        for t in range(T):
            beta = ptx.load_shared(place.shared + BETAS + t * 128 + place.lane * 4, Float32)
            v = ptx.load_shared(place.shared + VALUES + t * ROW + row * 4, Float32)
            u.append(beta * (v - dots[t]))
            coefficients = place.shared + COEFFICIENTS + t * (8 * T)
            if t + 1 < T:
                c = [y for at in range(0, 4 * T, 16) for y in ptx.load_shared_x4(coefficients + at, Float32)]
                for s in range(t + 1, T):
                    dots[s] = ptx.fma(c[self.place_of(s)], u[t], dots[s])
            e = load(coefficients + T * 4 + half * (2 * T), Float32)
            for i in range(t // 2, T // 2):
                added = ptx.fma(e[i], u[t], outs[i])
                # an odd token is behind the even one
                outs[i] = ptx.select(upper, added, outs[i]) if t == 2 * i + 1 else added
        for i in range(T // 2):
            t = 2 * i + half
            exists = t < x.T
            at = (records.values + self.ring(x, records.next, t)) * HEAD_DIM + row
            ptx.store_global_f32_if(x.record_u + at * 4, ptx.select(upper, u[2 * i + 1], u[2 * i]), exists)
            self.store_value(x, place, t, row, ptx.pack_bf16x2(outs[i], Float32(0.0)), exists)

    def store_value(self, x, place, token, row, word, exists):
        """Stores a value of o, the low half of ``word``."""
        at = (Int64(place.row * x.T + token) * x.HV + place.head) * HEAD_DIM + row
        ptx.store_global_u16(x.o + at * 2, word, exists)

    def clear_tokens(self, x, place):
        """Sets o of all tokens to zeros."""
        for t in range(0, self.tokens, 2):
            token = t + (place.thread >> 7)
            row = place.thread & (HEAD_DIM - 1)
            self.store_value(x, place, token, row, Int32(0), token < x.T)
