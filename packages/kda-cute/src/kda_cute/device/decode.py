"""Decode: the recurrence token by token, for a few tokens of each sequence.

    S <- Diag(2^g) S      u = beta (v - S^T k)      S <- S + k u^T      o = S^T q

A CTA has some values (columns of S, "rows" here) of the state of one sequence and value head, in registers. The states are the
traffic: each is read and written once. Their loads are issued first, so that they overlap everything that a warp computes from its
token. Every warp computes l2norm, gate and sigmoid of a token by itself. Rows are independent, and every sum has a fixed order, so the
bits of a sequence depend neither on the other sequences nor on the number of rows of a CTA.

============ ============================================ ============================================
layout       [V, K]: a row is contiguous                  [K, V]: a channel's values are contiguous
============ ============================================ ============================================
warp         4 rows at a time, all 128 channels           32 rows, 32 channels
lane         16 channels of a row: 8 lanes share a row    32 channels of a row
sums over K  3 shuffles                                   shared memory, across the four warps
============ ============================================ ============================================

Backends share this kernel: it uses nothing that is particular to an architecture.
"""

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute

from kda_cute import arguments
from kda_cute.decode import WARPS, DecodeConfig
from kda_cute.device import ptx
from kda_cute.device.intra_chunk.gates import Gate, gate_rate, sigmoid
from kda_cute.records import HEAD_DIM

ROW = 4 * HEAD_DIM  # bytes of a row of a state
PIECES = HEAD_DIM // 32  # of 4 channels, of a lane that shares a row with 7 others
CHANNELS = HEAD_DIM // WARPS  # of a warp, if the layout is [K, V]
FACTORS = 3 * ROW  # bytes of a warp's factors: k, q and decays of its token


class Arguments(NamedTuple):
    """Arguments after the tensor ``q``."""

    q: Int64  # [B, T, H, 128] bf16
    k: Int64  # [B, T, H, 128] bf16
    v: Int64  # [B, T, HV, 128] bf16
    g: Int64  # [B, T, HV, 128]
    beta: Int64  # [B, T, HV], elements of beta_bytes
    a_log: Int64  # [HV] fp32
    dt_bias: Int64  # [HV, 128] fp32
    offsets: Int64  # [N + 1], elements of offset_bytes
    initial_state: Int64  # [N, HV, 128, 128] fp32
    o: Int64  # [B, T, HV, 128] bf16
    final_state: Int64  # [N, HV, 128, 128] fp32. It may be the memory of initial_state
    N: Int32
    T: Int32
    H: Int32
    HV: Int32
    offset_bytes: Int32  # 4 or 8; 0: sequences are not packed
    beta_bytes: Int32  # 2: bf16, 4: fp32
    l2norm: Int32
    scale: Float32
    lower_bound: Float32  # of the bounded gate
    beta_factor: Float32  # factor on the sigmoid of beta; 0: beta is used without a sigmoid


class DecodeKernel:
    """Takes q as a tensor, which determines the device and the stream, and the values of `Arguments`."""

    spill_allowance = 0

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.groups = HEAD_DIM // config.rows  # CTAs of a state
        self.layout = RowsFirst(config.rows) if config.v_first else ChannelsFirst()
        self.shared_bytes = WARPS * FACTORS + self.layout.sum_bytes

    def fake_args(self) -> tuple:
        return arguments.fake_args(Arguments, BFloat16)

    @cute.jit
    def __call__(self, q: cute.Tensor, *values_and_stream):
        *values, stream = values_and_stream
        x = Arguments(*values)
        self.kernel(tuple(values)).launch(
            grid=(x.N * x.HV * self.groups, 1, 1),
            block=(32 * WARPS, 1, 1),
            smem=self.shared_bytes,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, values: tuple):
        x = Arguments(*values)
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        task = block // self.groups
        n, head = task // x.HV, task % x.HV
        place = SimpleNamespace(
            warp=cute.arch.make_warp_uniform(thread >> 5),
            lane=thread & 31,
            group=block % self.groups,
            shared=shared,
            factors=shared + (thread >> 5) * FACTORS,
            head=head,
            key_head=head // (x.HV // x.H),
        )
        matrix = (Int64(n) * x.HV + head) * (HEAD_DIM * ROW)
        state = cute.make_rmem_tensor((self.layout.size,), Float32)
        self.layout.load(x.initial_state + matrix, place, state, x.initial_state != Int64(0))
        first, count = self.tokens(x, n)
        gate, biases = self.gate(x, place)
        for t in cutlass.range(count, unroll=1):
            self.token(x, place, state, first + t, gate, biases)
        if x.final_state != Int64(0):
            self.layout.store(x.final_state + matrix, place, state)

    @cute.jit
    def tokens(self, x, n: Int32):
        """Returns the first token of a sequence in B*T, and its number of tokens."""
        first, count = n * x.T, Int32(x.T)
        if x.offset_bytes > 0:
            # offsets on the device are not trusted
            first = cutlass.min(cutlass.max(offset(x, n), 0), x.T)
            count = cutlass.min(cutlass.max(offset(x, n + 1), first), x.T) - first
        return first, count

    def gate(self, x, place):
        """Returns the gate of the value head, and dt_bias of the lane's four channels."""
        if self.config.gate == "precomputed":
            return Gate(self.config, Float32(1.0), x.lower_bound), [Float32(0.0)] * 4
        rate = gate_rate(ptx.load_global_f32(x.a_log + Int64(place.head) * 4, x.a_log != Int64(0)))
        address = x.dt_bias + Int64(place.head) * ROW + place.lane * 16
        words = ptx.load_global_words(address, 4, x.dt_bias != Int64(0))
        return Gate(self.config, rate, x.lower_bound), [ptx.float_of_bits(y) for y in words]

    def token(self, x, place, state, token, gate, biases):
        """Computes one token: the state behind it, and its o."""
        keys = Int64(token) * x.H + place.key_head
        values = Int64(token) * x.HV + place.head
        self.store_factors(x, place, keys, values, gate, biases)
        beta = load_beta(x, values)
        layout = self.layout
        rows = layout.rows(place)
        v = [load_bf16(x.v + (values * HEAD_DIM + row) * 2) for row in rows]
        cute.arch.sync_warp()  # the factors are there
        # factors are loaded where they are needed: together they would occupy registers
        layout.decay(state, layout.factors(place, 2))
        k = layout.factors(place, 0)
        u = [beta * (y - dot) for y, dot in zip(v, layout.dots(place, state, k, 0), strict=True)]
        layout.add(state, k, u)
        q = layout.factors(place, 1)
        for row, y in zip(rows, layout.dots(place, state, q, 1), strict=True):
            address = x.o + (values * HEAD_DIM + row) * 2
            ptx.store_global_u16(address, ptx.pack_bf16x2(y, Float32(0.0)), layout.writes(place))
        cute.arch.sync_warp()  # the factors have been read

    def store_factors(self, x, place, keys, values, gate, biases):
        """Stores k, q and the decays of a token in the warp's shared memory; a lane computes four channels of each."""
        at = Int64(place.lane) * 4
        narrow = lambda start, index: [
            y
            for word in ptx.load_global_words(start + (index * HEAD_DIM + at) * 2, 2, Boolean(True))
            for y in ptx.unpack_bf16x2(word)
        ]
        k, q = narrow(x.k, keys), narrow(x.q, keys)
        if self.config.gate_dtype == "float32":
            words = ptx.load_global_words(x.g + (values * HEAD_DIM + at) * 4, 4, Boolean(True))
            g = [ptx.float_of_bits(y) for y in words]
        else:
            g = narrow(x.g, values)
        decays = [ptx.ex2(gate.activate(y, bias) * gate.log_scale) for y, bias in zip(g, biases, strict=True)]
        k = [y * inverse_norm(x, k) for y in k]
        q = [y * (inverse_norm(x, q) * x.scale) for y in q]
        for kind, y in enumerate((k, q, decays)):
            ptx.store_shared_x4(place.factors + kind * ROW + place.lane * 16, y)


class RowsFirst:
    """States [V, K]. A warp has 4 rows at a time, and 8 lanes share a row: lane 8r + i has channels 32j + 4i to 32j + 4i + 3 of row r."""

    sum_bytes = 0  # of shared memory

    def __init__(self, rows: int):
        self.count = rows // (4 * WARPS)  # rows of a lane
        self.size = self.count * 4 * PIECES
        self.of_group = rows

    def rows(self, place):
        """Returns the lane's rows."""
        first = place.group * self.of_group + place.warp * (4 * self.count) + (place.lane >> 3)
        return [first + 4 * i for i in range(self.count)]

    def pieces(self, start, place):
        """Yields the address of each piece of the lane, and its first index in the state."""
        for i, row in enumerate(self.rows(place)):
            for j in range(PIECES):
                yield start + Int64(row) * ROW + (place.lane & 7) * 16 + j * 128, 4 * (i * PIECES + j)

    def load(self, start, place, state, exists):
        """Loads the state, or zeros unless it ``exists``."""
        for address, n in self.pieces(start, place):
            for e, y in enumerate(ptx.load_global_streaming_x4(address, exists)):
                state[n + e] = y

    def store(self, start, place, state):
        """Stores the state."""
        for address, n in self.pieces(start, place):
            ptx.store_global_streaming_x4(address, [state[n + e] for e in range(4)])

    def factors(self, place, kind):
        """Loads the factors of the lane's channels: of k (``kind`` 0), of q (1), or the decays (2)."""
        start = place.factors + kind * ROW + (place.lane & 7) * 16
        return [y for j in range(PIECES) for y in ptx.load_shared_x4(start + j * 128, Float32)]

    def decay(self, state, decays):
        """Multiplies the channels by their decays."""
        for n in range(self.size):
            state[n] = state[n] * decays[n % (4 * PIECES)]

    def dots(self, place, state, factors, kind):
        """Returns the products of the lane's rows with ``factors``. All lanes of a row have them."""
        found = []
        for i in range(self.count):
            sums = [Float32(0.0)] * PIECES
            for j in range(PIECES):
                for e in range(4):
                    sums[j] = ptx.fma(state[4 * (i * PIECES + j) + e], factors[4 * j + e], sums[j])
            total = (sums[0] + sums[1]) + (sums[2] + sums[3])
            for lanes in (4, 2, 1):
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
    sum_bytes = 2 * WARPS * 32 * 4  # of shared memory: sums of each warp, for both products

    def rows(self, place):
        """Returns the lane's row."""
        return [place.group * self.of_group + place.lane]

    def addresses(self, start, place):
        """Returns the addresses of the lane's values."""
        (row,) = self.rows(place)
        first = start + Int64(place.warp * CHANNELS) * ROW + row * 4
        return [first + channel * ROW for channel in range(CHANNELS)]

    def load(self, start, place, state, exists):
        """Loads the state, or zeros unless it ``exists``."""
        for n, address in enumerate(self.addresses(start, place)):
            state[n] = ptx.load_global_streaming(address, exists)

    def store(self, start, place, state):
        """Stores the state."""
        for n, address in enumerate(self.addresses(start, place)):
            ptx.store_global(address, state[n])

    def factors(self, place, kind):
        """Loads the factors of the warp's channels; ``kind`` as in `RowsFirst.factors`."""
        start = place.factors + kind * ROW + place.warp * (4 * CHANNELS)
        return [y for n in range(0, 4 * CHANNELS, 16) for y in ptx.load_shared_x4(start + n, Float32)]

    def decay(self, state, decays):
        """Multiplies the channels by their decays."""
        for n in range(self.size):
            state[n] = state[n] * decays[n]

    def dots(self, place, state, factors, kind):
        """Returns the product of the lane's row with ``factors``, by shared memory of its own for each ``kind``. All warps have it."""
        sums = [Float32(0.0)] * 4
        for n in range(self.size):
            sums[n % 4] = ptx.fma(state[n], factors[n], sums[n % 4])
        start = place.shared + WARPS * FACTORS + kind * (WARPS * 128) + place.lane * 4
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


def offset(x, n):
    """Returns offset n of packed sequences."""
    address = x.offsets + Int64(n) * x.offset_bytes
    wide = ptx.load_global_i64(address, x.offset_bytes == 8)
    return Int32(wide + Int64(ptx.load_global_i32(address, x.offset_bytes == 4)))


def load_bf16(address):
    """Loads one bf16."""
    return ptx.unpack_bf16x2(ptx.load_global_u16(address, Boolean(True)))[0]


def load_beta(x, index):
    """Returns beta of a token and value head through its activation."""
    address = x.beta + index * x.beta_bytes
    narrow = ptx.unpack_bf16x2(ptx.load_global_u16(address, x.beta_bytes == 2))[0]
    raw = narrow + ptx.load_global_f32(address, x.beta_bytes == 4)
    return ptx.select(x.beta_factor > Float32(0.0), sigmoid(raw) * x.beta_factor, raw)


def inverse_norm(x, values):
    """Returns 1/|x| of a row of which a lane has four channels, or 1 without l2norm."""
    total = (values[0] * values[0] + values[1] * values[1]) + (values[2] * values[2] + values[3] * values[3])
    for lanes in (16, 8, 4, 2, 1):
        total = total + cute.arch.shuffle_sync_bfly(total, lanes)
    return ptx.select(x.l2norm > 0, ptx.rsqrt(total + Float32(1e-6)), Float32(1.0))
