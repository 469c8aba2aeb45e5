"""Decode: the recurrence token by token, for a few tokens of each sequence.

    S <- Diag(2^g) S      u = beta (v - S^T k)      S <- S + k u^T      o = S^T q

A CTA has some values (columns of S, "rows" here) of the state of one sequence and value head, in registers. The states are the
traffic: each is read and written once. Their loads are issued first, so that they overlap everything that a warp computes from its
token. Every warp computes l2norm, gate and sigmoid of a token by itself. Rows are independent, and every sum has a fixed order, so the
bits of a sequence depend neither on the other sequences, nor on the number of rows of a CTA, nor on the dtype of the states in memory.

============ ============================================ ============================================
layout       [V, K]: a row is contiguous                  [K, V]: a channel's values are contiguous
============ ============================================ ============================================
warp         4 rows at a time, all 128 channels           32 rows, 32 channels
lane         16 channels of a row: 8 lanes share a row    32 channels of a row
sums over K  3 or 4 shuffles                              shared memory, across the four warps
============ ============================================ ============================================

States are in the slots of a pool (`kda_cute.device.slots`), or in a tensor with a state for each sequence. Those that are read are in
fp32 or bf16; inside the kernel all is fp32.

Backends share this kernel: it uses nothing that is particular to an architecture.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from kda_cute.decode import DECODE, MOST_ALONG_Z, WARPS, DecodeArguments, DecodeConfig
from kda_cute.device import ptx, slots
from kda_cute.device.intra_chunk.gates import Gate, gate_rate, sigmoid
from kda_cute.device.kernel import Kernel
from kda_cute.records import HEAD_DIM

ROW = 4 * HEAD_DIM  # bytes of a row of an fp32 state
PIECES = HEAD_DIM // 32  # of 4 channels, of a lane that shares a row with 7 others
CHANNELS = HEAD_DIM // WARPS  # of a warp, if the layout is [K, V]
KEY, QUERY, DECAYS = 0, ROW, 2 * ROW  # bytes from a warp's factors to those of its token
FACTORS = 3 * ROW  # bytes of a warp's factors


class DecodeKernel(Kernel):
    """Takes a tensor, which determines the device and the stream, and the values of `DecodeArguments`."""

    spill_allowance = 0
    # At its default level 3, ptxas takes more registers for the same values.
    compile_options = "--ptxas-options '-O2'"
    interface = DECODE
    threads = 32 * WARPS
    carveout = 50

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.groups = HEAD_DIM // config.rows  # CTAs of a state
        narrow = config.state_dtype == "bfloat16"
        self.layout = RowsFirst(narrow, config.rows) if config.v_first else ChannelsFirst(narrow)
        self.state_bytes = 2 if narrow else 4  # of an element
        # Whether a token is loaded before the state. It shortens a CTA, but needs registers: others are slower with it. Only bf16 chooses
        # 64 rows.
        self.early = config.rows == 64
        self.shared_bytes = WARPS * FACTORS + self.layout.sum_bytes

    @property
    def ctas_per_sm(self) -> int:
        """Returns for how many CTAs on an SM ptxas limits the registers. The fastest of several numbers on an H200; for bf16 on an H100."""
        if not self.config.v_first:
            return 4
        return {16: 5, 32: 6 if self.layout.narrow else 7, 64: 3}[self.config.rows]

    @cute.kernel
    def kernel(self, values: tuple):
        x = DecodeArguments(*values)
        self.wait_for_stream()
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        thread, _, _ = cute.arch.thread_idx()
        n, place = self.place(thread, shared)
        state = cute.make_rmem_tensor((self.layout.size,), Float32)
        slot = slots.read_slot(x, n)
        first, count, words = Int32(0), Int32(0), None
        if cutlass.const_expr(self.early):
            place.row, first, count = uniform(*self.tokens(x, n))
            words = cute.make_rmem_tensor((sum(self.parts),), Int32)
            self.load_ahead(x, place, first, words, count > 0)  # needs no slot
        exists = (x.states != Int64(0)) & slots.has_state(x, n, slot)
        self.layout.load(self.matrix(x, place.head, slot), place, state, exists)
        if cutlass.const_expr(not self.early):
            place.row, first, count = uniform(*self.tokens(x, n))
        computed = ptx.select(slots.is_skipped(x, n, slot), Int32(0), count)
        # the tokens in runs, behind each of which the state is written: all tokens, or one
        per_token = x.per_token != 0
        length = ptx.select(per_token, Int32(1), computed)
        for run in cutlass.range(ptx.select(per_token, computed, Int32(1)), unroll=1):
            target = self.target(x, place.head, n, run)
            for t in cutlass.range(length, unroll=1):
                self.token(x, place, state, first + run * length + t, words)
                if cutlass.const_expr(self.early):
                    following = run * length + t + 1
                    self.load_ahead(x, place, first + following, words, following < computed)
            if target != Int64(0):
                self.layout.store(target, place, state)
        for t in cutlass.range(computed, count, unroll=1):
            self.clear(x, place, first + t)
        if x.final_state != Int64(0):
            matrix = (Int64(n) * x.HV + place.head) * (HEAD_DIM * ROW)
            self.layout.store_wide(x.final_state + matrix, place, state)

    def place(self, thread, shared):
        """Returns the sequence of the CTA, and what a thread works on; see `kda_cute.decode.grid`."""
        block, key_head, n = cute.arch.block_idx()
        width, _, members = cute.arch.grid_dim()
        member, swaps = block // self.groups, width > self.groups * MOST_ALONG_Z
        # not `ptx.select`, whose results are never in uniform registers
        n, member = cutlass.select_(swaps, member, n), cutlass.select_(swaps, n, member)
        members = cutlass.select_(swaps, members, width // self.groups)
        place = SimpleNamespace(
            warp=cute.arch.make_warp_uniform(thread >> 5),
            lane=thread & 31,
            group=block % self.groups,
            shared=shared,
            factors=shared + (thread >> 5) * FACTORS,
            dots=shared + WARPS * FACTORS,
            head=key_head * members + member,
            key_head=key_head,
            member=member,  # of the value heads of the key head
        )
        return n, place

    def matrix(self, x, head, slot: Int64):
        """Returns the address of a value head's state in a slot."""
        return x.states + (slot * x.pitch + Int64(head) * (HEAD_DIM * HEAD_DIM)) * self.state_bytes

    def target(self, x, head, n: Int32, run: Int32):
        """Returns the address where the state behind a run of tokens goes, or 0 if it goes nowhere."""
        # a sequence may have more tokens than slots
        wanted = (x.writes != 0) & (run < x.W)
        slot = slots.write_slot(x, n, run, wanted)
        return ptx.select(wanted & slots.is_slot(x, slot), self.matrix(x, head, slot), Int64(0))

    @cute.jit
    def tokens(self, x, n: Int32):
        """Returns the row of the batch of a sequence, its first token in that row, and its number of tokens."""
        row, first, count = n, Int32(0), Int32(x.T)
        if x.offset_bytes > 0:
            # offsets on the device are not trusted
            row = Int32(0)
            first = cutlass.min(cutlass.max(offset(x, n), 0), x.T)
            count = cutlass.min(cutlass.max(offset(x, n + 1), first), x.T) - first
        return row, first, count

    def gate(self, x, place):
        """Returns the gate of the value head, and dt_bias of the lane's four channels."""
        return self.gate_of(x, self.load_gate(x, place, Boolean(True)))

    def load_gate(self, x, place, valid):
        """Loads A_log, and dt_bias of the lane's four channels, as words; nothing for a gate that is computed before the call."""
        if self.config.gate == "precomputed":
            return []
        rate = ptx.load_global_f32(x.a_log + Int64(place.head) * 4, valid & (x.a_log != Int64(0)))
        address = x.dt_bias + Int64(place.head) * ROW + place.lane * 16
        return [
            ptx.bits_of_float(rate),
            *ptx.load_global_words(address, 4, valid & (x.dt_bias != Int64(0))),
        ]

    def gate_of(self, x, words):
        """Returns the gate and dt_bias from the words of `load_gate`."""
        if self.config.gate == "precomputed":
            return Gate(self.config, Float32(1.0), x.lower_bound), [Float32(0.0)] * 4
        rate, *biases = (ptx.float_of_bits(y) for y in words)
        return Gate(self.config, gate_rate(rate), x.lower_bound), biases

    def token(self, x, place, state, token, words):
        """Computes one token: the state behind it, and its o. ``words``: those of `load_ahead`; None: the token is loaded here, v and beta
        behind the factors, so that fewer registers are in use at a time."""
        if words is None:
            always = Boolean(True)
            gate, channels = self.load_gate(x, place, always), self.load_channels(x, place, token, always)
            self.store_factors(x, place, channels, gate)
            values = self.load_values(x, place, token, always)
        else:
            *channels, gate, values = self.split(words)
            self.store_factors(x, place, channels, gate)
        narrow, wide, *values = values
        beta, v = beta_of(x, narrow, wide), [ptx.unpack_bf16x2(y)[0] for y in values]
        layout = self.layout
        cute.arch.sync_warp()  # the factors are there
        # factors are loaded where they are needed: together they would occupy registers
        layout.decay(state, layout.factors(place, place.factors + DECAYS))
        k = layout.factors(place, place.factors + KEY)
        u = [beta * (y - dot) for y, dot in zip(v, layout.dots(place, state, k, 0), strict=True)]
        layout.add(state, k, u)
        q = layout.factors(place, place.factors + QUERY)
        self.store_o(x, place, token, layout.dots(place, state, q, 1))
        cute.arch.sync_warp()  # the factors have been read

    @property
    def parts(self):
        """The number of words of each part of a token: k, q, g; the gate; beta and v."""
        gate = 0 if self.config.gate == "precomputed" else 5
        return 2, 2, 4 if self.config.gate_dtype == "float32" else 2, gate, 2 + len(self.layout.steps)

    def split(self, words):
        """Returns the parts of the words of `load_ahead`."""
        loaded = iter([words[i] for i in range(sum(self.parts))])
        return [[next(loaded) for _ in range(count)] for count in self.parts]

    def load_ahead(self, x, place, token, words, valid):
        """Sets ``words`` to those of a token, zeros unless ``valid``."""
        k, q, g = self.load_channels(x, place, token, valid)
        gate, values = self.load_gate(x, place, valid), self.load_values(x, place, token, valid)
        for i, word in enumerate((*k, *q, *g, *gate, *values)):
            words[i] = word

    def load_channels(self, x, place, token, valid):
        """Loads the lane's four channels of k, q and g, as words."""
        at = place.lane * 4
        load = lambda start, index, size: ptx.load_global_words(start + (index + at) * size, size, valid)
        return [
            load(x.k, element(place, token, x.k_batch, x.k_token, place.key_head), 2),
            load(x.q, element(place, token, x.q_batch, x.q_token, place.key_head), 2),
            load(x.g, element(place, token, x.g_batch, x.g_token, place.head), self.parts[2]),
        ]

    def load_values(self, x, place, token, valid):
        """Loads beta, and v of the lane's rows, as words."""
        beta = beta_words(x, place, token, valid)
        first = element(place, token, x.v_batch, x.v_token, place.head) + self.layout.row(place)
        v = [ptx.load_global_u16(x.v + first * 2 + step * 2, valid) for step in self.layout.steps]
        return [*beta, *v]

    def clear(self, x, place, token):
        """Sets o of a token to zeros."""
        self.store_o(x, place, token, [Float32(0.0)] * len(self.layout.steps))

    def store_o(self, x, place, token, values):
        """Stores o of the lane's rows."""
        first = (Int64(place.row * x.T + token) * x.HV + place.head) * HEAD_DIM + self.layout.row(place)
        for step, y in zip(self.layout.steps, values, strict=True):
            word = ptx.pack_bf16x2(y, Float32(0.0))
            ptx.store_global_u16(x.o + first * 2 + step * 2, word, self.layout.writes(place))

    def store_factors(self, x, place, channels, gate_words):
        """Stores k, q and the decays of a token in the warp's shared memory; a lane computes four channels of each."""
        gate, biases = self.gate_of(x, gate_words)
        unpack = lambda words: [y for word in words for y in ptx.unpack_bf16x2(word)]
        k, q, g = channels
        k, q = unpack(k), unpack(q)
        g = [ptx.float_of_bits(y) for y in g] if self.config.gate_dtype == "float32" else unpack(g)
        decays = [ptx.ex2(gate.activate(y, bias) * gate.log_scale) for y, bias in zip(g, biases, strict=True)]
        k = [y * inverse_norm(x, k) for y in k]
        q = [y * (inverse_norm(x, q) * x.scale) for y in q]
        for start, y in ((KEY, k), (QUERY, q), (DECAYS, decays)):
            ptx.store_shared_x4(place.factors + start + self.layout.position(place) * 16, y)


class RowsFirst:
    """States [V, K]. A warp has 4 rows at a time, and 8 lanes share a row. A lane has four pieces of 4 channels, so that 8 lanes access
    128 contiguous bytes at a time: with c the 5 bits of a piece's number among the 32 of a row,

    ========= ========================== ========================
    dtype     piece of a lane            lane of the 8
    ========= ========================== ========================
    fp32      2 c4 + c3                  4 c2 + 2 c1 + c0
    bf16      2 c4 + c0                  4 c3 + 2 c2 + c1
    ========= ========================== ========================

    Both sum over a row in the same order, that of the bits from c4 to c0.
    """

    sum_bytes = 0  # of shared memory

    def __init__(self, narrow: bool, rows: int):
        self.narrow = narrow
        self.steps = range(0, rows // WARPS, 4)  # from the lane's first row to each of its rows
        self.size = len(self.steps) * 4 * PIECES
        self.of_group = rows

    def row(self, place):
        """Returns the lane's first row."""
        return place.group * self.of_group + self.local_row(place)

    def local_row(self, place):
        """Returns the lane's first row among those of the CTA."""
        return place.warp * (self.of_group // WARPS) + (place.lane >> 3)

    def position(self, place):
        """Returns where lane c of a warp stores piece c of a row of factors: that of lane i of 8 and its piece j is at 8j + i."""
        c = place.lane
        return ((c >> 4) * 2 + (c & 1)) * 8 + ((c >> 1) & 7) if self.narrow else c

    def pieces(self, start, place):
        """Yields the address of each piece of the lane in fp32 states, and its first index in the state."""
        first = start + Int64(self.row(place)) * ROW + (place.lane & 7) * (32 if self.narrow else 16)
        for i, step in enumerate(self.steps):
            for j in range(PIECES):
                at = j // 2 * 256 + j % 2 * 16 if self.narrow else j * 128
                yield first + (step * ROW + at), 4 * (i * PIECES + j)

    def pairs(self, start, place):
        """Yields the address of each two pieces of the lane in bf16 states, and their first index in the state."""
        first = start + Int64(self.row(place)) * (ROW // 2) + (place.lane & 7) * 16
        for i, step in enumerate(self.steps):
            for j in range(0, PIECES, 2):
                yield first + (step * (ROW // 2) + j * 64), 4 * (i * PIECES + j)

    def load(self, start, place, state, exists):
        """Loads the state, or zeros unless it ``exists``."""
        if self.narrow:
            for address, n in self.pairs(start, place):
                for e, word in enumerate(ptx.load_global_streaming_x4(address, exists, Int32)):
                    state[n + 2 * e], state[n + 2 * e + 1] = ptx.unpack_bf16x2(word)
        else:
            for address, n in self.pieces(start, place):
                for e, y in enumerate(ptx.load_global_streaming_x4(address, exists)):
                    state[n + e] = y

    def store(self, start, place, state):
        """Stores the state in the dtype in which states are loaded."""
        if self.narrow:
            for address, n in self.pairs(start, place):
                words = [ptx.pack_bf16x2(state[n + e], state[n + e + 1]) for e in range(0, 8, 2)]
                ptx.store_global_streaming_x4(address, words)
        else:
            self.store_wide(start, place, state)

    def store_wide(self, start, place, state):
        """Stores the state in fp32."""
        for address, n in self.pieces(start, place):
            ptx.store_global_streaming_x4(address, [state[n + e] for e in range(4)])

    def factors(self, place, start):
        """Loads the lane's channels of a row of factors in shared memory."""
        first = start + (place.lane & 7) * 16
        return [y for j in range(PIECES) for y in ptx.load_shared_x4(first + j * 128, Float32)]

    def decay(self, state, decays):
        """Multiplies the channels by their decays."""
        for n in range(self.size):
            state[n] = state[n] * decays[n % (4 * PIECES)]

    def dots(self, place, state, factors, kind):
        """Returns the products of the lane's rows with ``factors``. All lanes of a row have them."""
        found = []
        for i in range(len(self.steps)):
            sums = [Float32(0.0)] * PIECES
            for j in range(PIECES):
                for e in range(4):
                    sums[j] = ptx.fma(state[4 * (i * PIECES + j) + e], factors[4 * j + e], sums[j])
            low, high = sums[0] + sums[2], sums[1] + sums[3]  # the pieces whose last bit is 0, and 1
            if self.narrow:
                # c3 comes before c0. Two lanes exchange sums: each adds those with one value of c0
                upper = (place.lane & 4) != 0
                sent = ptx.select(upper, low, high)
                total = ptx.select(upper, high, low) + cute.arch.shuffle_sync_bfly(sent, 4)
                others = (2, 1, 4)
            else:
                total, others = low + high, (4, 2, 1)
            for lanes in others:
                total = total + cute.arch.shuffle_sync_bfly(total, lanes)
            found.append(total)
        return found

    def add(self, state, k, u):
        """Adds k u^T."""
        for n in range(self.size):
            state[n] = ptx.fma(k[n % (4 * PIECES)], u[n // (4 * PIECES)], state[n])

    def writes(self, place):
        """Returns whether the lane writes o of its rows."""
        return (place.lane & 7) == 0


class ChannelsFirst:
    """States [K, V]. Warp w has channels 32w to 32w + 31, and a lane has one row of the 32 of the CTA."""

    size = CHANNELS
    of_group = 32
    steps = (0,)
    sum_bytes = 2 * WARPS * 32 * 4  # of shared memory: sums of each warp, for both products

    def __init__(self, narrow: bool):
        self.narrow = narrow

    def row(self, place):
        """Returns the lane's row."""
        return place.group * self.of_group + place.lane

    def local_row(self, place):
        """Returns the lane's row among those of the CTA."""
        return place.lane

    def position(self, place):
        """Returns where lane c of a warp stores channels 4c to 4c + 3 of a row of factors."""
        return place.lane

    def addresses(self, start, place, size):
        """Returns the addresses of the lane's values of ``size`` bytes."""
        first = start + Int64(place.warp * (CHANNELS * HEAD_DIM) + self.row(place)) * size
        return [first + channel * HEAD_DIM * size for channel in range(CHANNELS)]

    def load(self, start, place, state, exists):
        """Loads the state, or zeros unless it ``exists``."""
        if self.narrow:
            for n, address in enumerate(self.addresses(start, place, 2)):
                state[n] = ptx.unpack_bf16x2(ptx.load_global_streaming_u16(address, exists))[0]
        else:
            for n, address in enumerate(self.addresses(start, place, 4)):
                state[n] = ptx.load_global_streaming(address, exists)

    def store(self, start, place, state):
        """Stores the state in the dtype in which states are loaded."""
        if self.narrow:
            for n, address in enumerate(self.addresses(start, place, 2)):
                ptx.store_global_u16(address, ptx.pack_bf16x2(state[n], Float32(0.0)), Boolean(True))
        else:
            self.store_wide(start, place, state)

    def store_wide(self, start, place, state):
        """Stores the state in fp32."""
        for n, address in enumerate(self.addresses(start, place, 4)):
            ptx.store_global(address, state[n])

    def factors(self, place, start):
        """Loads the warp's channels of a row of factors in shared memory."""
        first = start + place.warp * (4 * CHANNELS)
        return [y for n in range(0, 4 * CHANNELS, 16) for y in ptx.load_shared_x4(first + n, Float32)]

    def decay(self, state, decays):
        """Multiplies the channels by their decays."""
        for n in range(self.size):
            state[n] = state[n] * decays[n]

    def dots(self, place, state, factors, kind):
        """Returns the product of the lane's row with ``factors``, by shared memory of its own for each ``kind``. All warps have it."""
        sums = [Float32(0.0)] * 4
        for n in range(self.size):
            sums[n % 4] = ptx.fma(state[n], factors[n], sums[n % 4])
        start = place.dots + kind * (WARPS * 128) + place.lane * 4
        ptx.store_shared(start + place.warp * 128, (sums[0] + sums[1]) + (sums[2] + sums[3]))
        cute.arch.sync_threads()
        parts = [ptx.load_shared(start + warp * 128, Float32) for warp in range(WARPS)]
        return [(parts[0] + parts[1]) + (parts[2] + parts[3])]

    def add(self, state, k, u):
        """Adds k u^T."""
        for n in range(self.size):
            state[n] = ptx.fma(k[n], u[0], state[n])

    def writes(self, place):
        """Returns whether the lane writes o of its row."""
        return place.warp == 0


def uniform(*values):
    """Returns values that all lanes of a warp have, so that the compiler knows it and keeps them in uniform registers."""
    return [cute.arch.make_warp_uniform(y) for y in values]


def offset(x, n):
    """Returns offset n of packed sequences."""
    return Int32(slots.load_index(x.offsets + Int64(n) * x.offset_bytes, x.offset_bytes))


def element(place, token, batch, stride, head, width=HEAD_DIM):
    """Returns the first element of a token and head, each of which has ``width`` elements, in a tensor with these two strides."""
    return Int64(place.row) * batch + Int64(token) * stride + head * width


def load_beta(x, place, token):
    """Returns beta of a token and value head through its activation."""
    return beta_of(x, *beta_words(x, place, token, Boolean(True)))


def beta_words(x, place, token, valid):
    """Loads beta of a token and value head as bf16 and as fp32, of which one is zero; both unless ``valid``."""
    address = x.beta + element(place, token, x.beta_batch, x.beta_token, place.head, 1) * x.beta_bytes
    narrow = ptx.load_global_u16(address, valid & (x.beta_bytes == 2))
    return narrow, ptx.bits_of_float(ptx.load_global_f32(address, valid & (x.beta_bytes == 4)))


def beta_of(x, narrow, wide):
    """Returns beta through its activation, from the words of `beta_words`."""
    raw = ptx.unpack_bf16x2(narrow)[0] + ptx.float_of_bits(wide)
    return ptx.select(x.beta_factor > Float32(0.0), sigmoid(raw) * x.beta_factor, raw)


def inverse_norm(x, values):
    """Returns 1/|x| of a row of which a lane has four channels, or 1 without l2norm."""
    total = Float32(0.0)
    for y in values:
        total = ptx.fma(y, y, total)
    for lanes in (16, 8, 4, 2, 1):
        total = total + cute.arch.shuffle_sync_bfly(total, lanes)
    return ptx.select(x.l2norm > 0, ptx.rsqrt(total + Float32(1e-6)), Float32(1.0))
