"""Decode over records of tokens (`kda_core.contract.KdaJournal`): the states of the pool are read once, and written only where they fold.

    S <- Diag(e^G_m) S_0 + sum_j (e^(G_m - G_j) k_j) u_j^T,   then the recurrence of `kda_cute.device.decode` for the new tokens

A CTA has some values of one state in registers, as in the decode kernel. Its warps share the factors of a token. It applies the m records
of the slot to them, one by one. It loads up to eight records together into shared memory, so that their loads overlap. A fold writes the
result. Every token then leaves a record. CTAs need no order: the new records are in other rows than those that are read, and a CTA folds
only the values that it has read.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from kda_cute.decode import WARPS
from kda_cute.device import ptx, slots
from kda_cute.device.decode import (
    DECAYS,
    FACTORS,
    KEY,
    QUERY,
    ROW,
    DecodeKernel,
    element,
    inverse_norm,
    load_beta,
    uniform,
)
from kda_cute.device.intra_chunk.gates import G_FLOOR
from kda_cute.journal import JOURNAL, JournalArguments
from kda_cute.records import HEAD_DIM

LN2 = 0.6931471805599453
BATCH = 2 * WARPS  # records that are in shared memory at a time
RECORD = 3 * ROW // 2  # bytes of one there: 128 decayed k, and u of at most 64 values of the CTA
# Parts of the CTA's memory for a token, in bytes from that of the factors
LOGS = FACTORS  # of the decays, in base 2
VALUES = LOGS + ROW  # v of the CTA's values
FACTOR, BETA = VALUES + 256, VALUES + 512  # factors of k and of q, and beta: a value for each lane
TOKEN = BETA + 128


class JournalKernel(DecodeKernel):
    """Takes a tensor, which determines the device and the stream, and the values of `JournalArguments`."""

    spill_allowance = 0
    interface = JOURNAL

    def __init__(self, config):
        super().__init__(config)
        self.shared_bytes = TOKEN + self.layout.sum_bytes + ROW + BATCH * RECORD

    @property
    def ctas_per_sm(self) -> int:
        """As `DecodeKernel.ctas_per_sm`."""
        return {16: 5, 32: 6, 64: 4}[self.config.rows] if self.config.v_first else 4

    @cute.kernel
    def kernel(self, values: tuple):
        x = JournalArguments(*values)
        self.wait_for_stream()
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        thread, _, _ = cute.arch.thread_idx()
        n, place = self.place(thread, shared)
        place.row, head = n, place.head
        place.factors = shared  # of all warps
        place.dots = shared + TOKEN
        place.sums = (
            place.dots + self.layout.sum_bytes
        )  # decays from the state in the pool to the last record
        place.records = place.sums + ROW
        state = cute.make_rmem_tensor((self.layout.size,), Float32)
        slot = slots.load_index(x.read + Int64(n) * x.index_bytes, x.index_bytes)
        valid = slots.is_slot(x, slot)
        # in a uniform register: every lane has it, and it is below 2^31
        slot = Int64(uniform(Int32(ptx.select(valid, slot, Int64(0))))[0])
        self.layout.load(self.matrix(x, head, slot), place, state, valid)
        first, count = self.span(x, n, slot, valid)
        computed = ptx.select(valid, Int32(x.T), Int32(0))
        # the factors of a token need no records: the first ones are computed while the state and the records are loaded
        if computed > 0:
            self.store_factors(x, place, Int32(0))
        place.values = (slot * x.HV + head) * x.R  # the first record of the value head, in rows
        place.keys = (slot * x.H + place.key_head) * x.R
        sums = cute.make_rmem_tensor((4,), Float32)  # G behind the last record, of the lane's four channels
        self.apply_records(x, place, state, sums, first, count)
        folds = valid & (count + x.T > x.fold_above)
        if folds:
            self.layout.store(self.matrix(x, head, slot), place, state)
        for i in range(4):
            sums[i] = ptx.select(folds, Float32(0.0), sums[i])
        for t in cutlass.range(computed, unroll=1):
            cute.arch.sync_threads()  # the factors are there
            self.record_token(x, place, state, sums, t, (first + count + t) % x.R)
            cute.arch.sync_threads()  # the factors have been read
            if t + 1 < computed:
                self.store_factors(x, place, t + 1)
        for t in cutlass.range(computed, x.T, unroll=1):
            self.clear(x, place, t)

    def span(self, x, n, slot, valid):
        """Returns the row of a slot's first record, and its number of records. Both are not trusted."""
        has_spans = valid & (x.spans != Int64(0))
        first = ptx.load_global_i32(x.spans + slot * 8, has_spans)
        count = ptx.load_global_i32(x.spans + slot * 8 + 4, has_spans)
        count = count + ptx.load_global_i32(x.accepted + Int64(n) * 4, valid & (x.accepted != Int64(0)))
        clamp = lambda y, most: cutlass.min(cutlass.max(y, 0), most)
        return uniform(clamp(first, x.R - 1), clamp(count, x.most))

    @cute.jit
    def apply_records(self, x, place, state, sums, first, count):
        """Applies the records of the slot to the state, and sets ``sums`` to G of the last one."""
        last = place.values + (first + count - 1) % x.R
        for i, y in enumerate(self.load_sums(x, place, last, count > 0)):
            sums[i] = y
        for start in cutlass.range(0, count, BATCH, unroll=1):
            self.store_records(x, place, sums, first + start, count - start)
            cute.arch.sync_threads()  # the records are there
            if start == 0:
                self.layout.decay(state, self.layout.factors(place, place.sums))
            for j in cutlass.range(cutlass.min(count - start, BATCH), unroll=1):
                self.add_record(place, state, place.records + j * RECORD)
            cute.arch.sync_threads()  # the records have been read

    def store_records(self, x, place, sums, first, count):
        """Stores the decayed k and the u of up to `BATCH` records in shared memory, and the decays to the last record. A warp loads every
        fourth record, all of its records before it computes anything."""
        loaded = []
        for j in range(0, BATCH, WARPS):
            index = j + place.warp
            valid = index < count
            ring = (first + index) % x.R
            row, key = place.values + ring, place.keys + ring
            words = ptx.load_global_words(x.record_k + key * (2 * HEAD_DIM) + place.lane * 8, 2, valid)
            factor = ptx.load_global_f32(x.record_factor + key * 4, valid)
            u = []
            for part in range(0, self.layout.of_group, 32):
                value = place.group * self.layout.of_group + part + place.lane
                in_group = valid & (part + place.lane < self.layout.of_group)
                u.append(ptx.load_global_f32(x.record_u + (row * HEAD_DIM + value) * 4, in_group))
            loaded.append((index, words, factor, self.load_sums(x, place, row, valid), u))
        # every warp stores the same values
        self.store_row(place, place.sums, [natural_exp(sums[i]) for i in range(4)])
        for index, words, factor, G, u in loaded:
            k = [y for word in words for y in ptx.unpack_bf16x2(word)]
            # the exponent of a record that does not exist is not above 0 either
            values = [y * factor * natural_exp(sums[i] - G[i]) for i, y in enumerate(k)]
            self.store_row(place, place.records + index * RECORD, values)
            for part, y in enumerate(u):
                ptx.store_shared(place.records + index * RECORD + ROW + part * 128 + place.lane * 4, y)

    def add_record(self, place, state, record):
        """Adds a record in shared memory to the state."""
        first = record + ROW + self.layout.local_row(place) * 4
        u = [ptx.load_shared(first + step * 4, Float32) for step in self.layout.steps]
        self.layout.add(state, self.layout.factors(place, record), u)

    def load_sums(self, x, place, row, valid):
        """Loads G of a record, the lane's four channels."""
        words = ptx.load_global_words(x.record_g + row * ROW + place.lane * 16, 4, valid)
        return [ptx.float_of_bits(y) for y in words]

    def store_row(self, place, start, values):
        """Stores the lane's four channels of a row of factors at ``start``, as `RowsFirst.factors` loads them."""
        ptx.store_shared_x4(start + self.layout.position(place) * 16, values)

    def record_token(self, x, place, state, sums, token, ring):
        """Computes one token, whose factors are stored: the state behind it, its o, and its record in row ``ring`` of the slot."""
        layout = self.layout
        layout.decay(state, layout.factors(place, place.factors + DECAYS))
        beta = ptx.load_shared(place.factors + BETA + place.lane * 4, Float32)
        first = place.factors + VALUES + layout.local_row(place) * 4
        v = [ptx.load_shared(first + step * 4, Float32) for step in layout.steps]
        k = layout.factors(place, place.factors + KEY)
        u = [beta * (y - dot) for y, dot in zip(v, layout.dots(place, state, k, 0), strict=True)]
        layout.add(state, k, u)
        row = (place.values + ring) * HEAD_DIM + layout.row(place)
        for step, y in zip(layout.steps, u, strict=True):
            ptx.store_global_f32_if(x.record_u + (row + step) * 4, y, layout.writes(place))
        q = layout.factors(place, place.factors + QUERY)
        self.store_o(x, place, token, layout.dots(place, state, q, 1))
        self.store_keys(x, place, sums, token, ring)

    def store_keys(self, x, place, sums, token, ring):
        """Stores k, its factor and G of a token in its record, and adds the log decays of the token to ``sums``."""
        logs = ptx.load_shared_x4(place.factors + LOGS + place.lane * 16, Float32)
        for i, y in enumerate(logs):
            sums[i] = ptx.fma(y, Float32(LN2), sums[i])
        # one warp of the state writes what its CTAs share, and one value head of a group what the group shares
        writes = (place.group == 0) & (place.warp == 0)
        G = x.record_g + (place.values + ring) * ROW + place.lane * 16
        ptx.store_global_words_if(G, [sums[i] for i in range(4)], writes)
        owns = writes & (place.member == 0)
        key = place.keys + ring
        k = element(place, token, x.k_batch, x.k_token, place.key_head) + place.lane * 4
        raw = ptx.load_global_words(x.k + k * 2, 2, owns)
        ptx.store_global_words_if(x.record_k + key * (2 * HEAD_DIM) + place.lane * 8, raw, owns)
        factor = ptx.load_shared(place.factors + FACTOR + place.lane * 4, Float32)
        ptx.store_global_f32_if(x.record_factor + key * 4, factor, owns & (place.lane == 0))

    @cute.jit
    def store_factors(self, x, place, token):
        """Stores what the CTA needs of a token in shared memory: a warp each has k, q, the decays, and v with beta."""
        if place.warp < 2:
            self.store_vector(x, place, token)
        elif place.warp == 2:
            self.store_decays(x, place, token)
        else:
            self.store_values(x, place, token)

    def store_vector(self, x, place, token):
        """Stores k (warp 0) or q (warp 1), and the factor of k. A lane has four channels."""
        is_key = place.warp == 0
        at = place.lane * 4
        keys = x.k + (element(place, token, x.k_batch, x.k_token, place.key_head) + at) * 2
        queries = x.q + (element(place, token, x.q_batch, x.q_token, place.key_head) + at) * 2
        y = load_narrow(ptx.select(is_key, keys, queries))
        norm = inverse_norm(x, y)
        factor = ptx.select(is_key, norm, norm * x.scale)
        start = place.factors + ptx.select(is_key, Int32(KEY), Int32(QUERY))
        self.store_row(place, start, [z * factor for z in y])
        ptx.store_shared(place.factors + FACTOR + place.warp * 128 + place.lane * 4, factor)

    def store_decays(self, x, place, token):
        """Stores the decays and their logs. A lane has four channels."""
        gate, biases = self.gate(x, place)
        index = element(place, token, x.g_batch, x.g_token, place.head) + place.lane * 4
        if self.config.gate_dtype == "float32":
            words = ptx.load_global_words(x.g + index * 4, 4, Boolean(True))
            g = [ptx.float_of_bits(y) for y in words]
        else:
            g = load_narrow(x.g + index * 2)
        logs = [
            ptx.maximum(gate.activate(y, bias) * gate.log_scale, Float32(G_FLOOR))
            for y, bias in zip(g, biases, strict=True)
        ]
        self.store_row(place, place.factors + DECAYS, [ptx.ex2(y) for y in logs])
        ptx.store_shared_x4(place.factors + LOGS + place.lane * 16, logs)

    def store_values(self, x, place, token):
        """Stores v of the CTA's values, and beta."""
        first = element(place, token, x.v_batch, x.v_token, place.head) + place.group * self.layout.of_group
        for part in range(0, self.layout.of_group, 32):
            value = part + place.lane
            word = ptx.load_global_u16(x.v + (first + value) * 2, value < self.layout.of_group)
            ptx.store_shared(place.factors + VALUES + value * 4, ptx.unpack_bf16x2(word)[0])
        ptx.store_shared(place.factors + BETA + place.lane * 4, load_beta(x, place, token))


def load_narrow(address: Int64):
    """Loads four bf16."""
    words = ptx.load_global_words(address, 2, Boolean(True))
    return [y for word in words for y in ptx.unpack_bf16x2(word)]


def natural_exp(y: Float32) -> Float32:
    """Returns e^y."""
    return ptx.ex2(y * Float32(ptx.LOG2E))
