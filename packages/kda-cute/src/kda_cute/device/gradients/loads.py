"""Loads from global memory: operands of the tensor core by the producer, raw inputs by the compute threads."""

from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.gradients import memory
from kda_cute.device.gradients.decay import ROWS, WIDTH, Lane
from kda_cute.device.gradients.memory import (
    BLOCK,
    CHUNK,
    HALF,
    OFFSETS,
    PANEL,
    REGION,
    RUN,
    TILES,
    Operand,
)
from kda_cute.device.intra_chunk.gates import sigmoid
from kda_cute.records import HEAD_DIM

THREADS = 128
ROW = 2 * HEAD_DIM  # bytes of a row of 128 bf16
IMAGE_ROW = 128  # bytes of a row of an image


class Producer:
    """Copies dO, R, dX, S and dS' of one chunk and value head after the other. Rows behind the end of a sequence are zeros."""

    def __init__(self, config):
        self.gate_bytes = 4 if config.gate_dtype == "float32" else 2

    def load(self, x, base, barriers, thread, chunk, head, phase):
        """Copies the operands of a chunk as soon as their regions are free.

        The copies belong to the generic proxy, and wgmma reads through the async proxy. So each thread waits for its copies and
        executes a proxy fence before it arrives. It waits for an operand's copies after it has requested the next operand.
        """
        index = Int64(chunk.token) * x.HV + head
        row = index * ROW
        state = (Int64(chunk.slot) * x.HV + head) * (HEAD_DIM * ROW)
        pitch = Int64(x.HV) * ROW
        shift = self.image_shift(thread)
        sources = {
            Operand.GRAD_O: (x.grad_o + row, pitch, CHUNK, chunk.valid),
            Operand.RESIDUAL: (
                x.residual + index * x.residual_row,
                Int64(x.HV) * x.residual_row,
                CHUNK,
                chunk.valid,
            ),
            Operand.GRAD_V: (x.grad_v + row, pitch, CHUNK, chunk.valid),
            Operand.STATE: (
                x.states + state + x.state_images * shift,
                ptx.select(x.state_images > 0, Int64(IMAGE_ROW), Int64(ROW)),
                HEAD_DIM,
                Int32(HEAD_DIM),
            ),
            Operand.GRAD_STATE: (
                x.grad_states + state + shift,
                Int64(IMAGE_ROW),
                HEAD_DIM,
                Int32(HEAD_DIM),
            ),
        }
        for operand, source in sources.items():
            cute.arch.mbarrier_wait(barriers.empty + int(operand), phase ^ 1)
            self.copy(base + OFFSETS[REGION[operand]], thread, *source)
            cute.arch.cp_async_commit_group()
            if operand > 0:
                self.arrive(barriers, operand - 1, pending=1)
        self.arrive(barriers, Operand.GRAD_STATE, pending=0)

    def prefetch(self, x, token, head, key_head):
        """Requests that the rows of q, k and g of a token be brought into the L2, where the compute threads find them."""
        row = (Int64(token) * x.H + key_head) * ROW
        gates = self.gate_bytes * HEAD_DIM
        for source, offset, size in (
            (x.q, row, ROW),
            (x.k, row, ROW),
            (x.g, (Int64(token) * x.HV + head) * gates, gates),
        ):
            ptx.bulk_prefetch(source + offset, Int32(size))

    def image_shift(self, thread):
        """Returns how far the thread's unit of the image of a state lies from where `copy` takes it, for rows of `IMAGE_ROW`."""
        unit, first = thread % 16, thread // 16
        return unit // 8 * (HEAD_DIM * IMAGE_ROW) + ((unit % 8 ^ first) - unit) * 16

    def copy(self, shared, thread, source, pitch, rows, valid):
        """Requests the copies of a matrix [rows, 128] to an image in two panels, its first ``valid`` rows. The 128 rows of a state take
        the order of `memory.position`."""
        unit, first = thread & 15, thread >> 4  # 8 rows at a time
        panel, address = shared + (unit >> 3) * (rows * 128), source + pitch * first + unit * 16
        of_token = first * 128 + ((unit & 7) ^ first) * 16
        of_channel = memory.position(first) * 128 + ((unit & 7) ^ (first & 1)) * 16
        for start in range(0, rows, 8):
            if rows == CHUNK:
                place = panel + of_token + start * 128
            else:  # position(start + first) is position(start) + position(first)
                at = start % HALF
                place = (panel + of_channel + start // HALF * (HALF * 128)) ^ (at // RUN * 32)
                place = place + memory.position(at) * 128
            ptx.cp_async_x4(place, address, start + first < valid)
            address = address + pitch * 8

    def arrive(self, barriers, operand, pending):
        """Waits until at most ``pending`` later operands are missing, and arrives."""
        cute.arch.cp_async_wait_group(pending)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(barriers.full + int(operand))


class Raw:
    """The inputs of a chunk and value head. `request` copies them to shared memory one chunk ahead, `take` loads them into registers.

    The copies of a warp are those of its block of rows and half of the channels. So they need no barrier but `sync_warp`. They go past
    the L1, which beside the shared memory has too little room for them.

    ``q``, ``k``: 32 elements of the thread in the order of an accumulator, bf16x2 [tile][row]. ``g``: raw g of 8 rows and four
    channels (`decay.Lane`).
    """

    #: Regions of the copies of q and k.
    REGIONS = ("row_q", "row_k")

    def __init__(self, config):
        self.wide = config.gate_dtype == "float32"
        self.words = WIDTH if self.wide else WIDTH // 2  # of a row of g
        self.q, self.k = (cute.make_rmem_tensor((2 * TILES,), Int32) for _ in range(2))
        self.g = cute.make_rmem_tensor((ROWS * self.words,), Int32)

    def request(self, x, place, step):
        """Requests the inputs of a step; zeros behind the end of its sequence. q and k take the place of factors of rows, g that of
        exponents."""
        first = step.token + place.block * BLOCK
        row = (Int64(first) * x.H + step.key_head) * ROW + place.half * (2 * HALF)
        in_panel = lambda panel: lambda row, unit: memory.image(panel, place.block * BLOCK + row, unit * 8)
        for source, name in zip((x.q, x.k), self.REGIONS, strict=True):
            at = in_panel(place.panel(name))
            self.copy(place, step, source + row, Int64(x.H) * ROW, 2 * HALF, at)
        size = 4 if self.wide else 2
        row = (Int64(first) * x.HV + step.head) * (size * HEAD_DIM) + place.half * (size * HALF)
        at = lambda row, unit: memory.raw_gate(place, row) + unit * 16
        self.copy(place, step, x.g + row, Int64(x.HV) * (size * HEAD_DIM), size * HALF, at)
        cute.arch.cp_async_commit_group()

    def copy(self, place, step, source, pitch, size, at):
        """Requests copies of ``size`` bytes of each row of the warp's block. ``at``: returns the address of a unit of 16 bytes of a row of
        the block."""
        units = size // 16
        unit, first = place.lane & units - 1, place.lane >> units.bit_length() - 1
        left, address = step.valid - place.block * BLOCK - first, source + pitch * first + unit * 16
        for row in range(0, BLOCK, 32 // units):
            ptx.cp_async_x4(at(first + row, unit), address, row < left, evict_first=False)
            address = address + pitch * (32 // units)

    def take(self, place):
        """Waits for the requested inputs and loads them."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        at = Lane(place)
        load = ptx.load_shared_x4 if self.wide else ptx.load_shared_x2
        for row in range(ROWS):
            start = memory.raw_gate(place, ROWS * at.late + row) + at.unit * (4 * self.words)
            for n, y in enumerate(load(start, Int32)):
                self.g[self.words * row + n] = y
        for name, found in zip(self.REGIONS, (self.q, self.k), strict=True):
            for r, row in enumerate(place.rows()):
                for n in range(2):
                    start = memory.image(place.panel(name), row, place.quad * RUN + 8 * n)
                    for i, y in enumerate(ptx.load_shared_x4(start, Int32)):
                        found[2 * (4 * n + i) + r] = y

    def load_gates(self, x, place, step):
        """Loads raw g of the lane's rows and channels; see `gates`."""
        at = Lane(place)
        start, pitch = gate_offset(x, at, step.token, step.head, 4 if self.wide else 2)
        address, found, left = x.g + start, [], step.valid - at.row
        for row in range(ROWS):
            found += ptx.load_global_words(address, self.words, row < left)
            address = address + pitch
        return found

    def gates(self, g):
        """Returns raw g in fp32, [8 rows][4 channels]."""
        floats = (lambda y: [ptx.float_of_bits(y)]) if self.wide else ptx.unpack_bf16x2
        rows = [[g[self.words * row + n] for n in range(self.words)] for row in range(ROWS)]
        return [[y for word in row for y in floats(word)] for row in rows]

    def elements(self, found, zero=None):
        """Returns q or k in fp32, [tile][row][element]. ``zero``: of the step, from the second use on (`ptx.unpack_bf16x2_again`)."""
        unpack = ptx.unpack_bf16x2 if zero is None else lambda pair: ptx.unpack_bf16x2_again(pair, zero)
        return [[unpack(found[2 * tile + r]) for r in range(2)] for tile in range(TILES)]


def gate_offset(x, at, token, head, size):
    """Returns the byte offset of the first of the lane's gates in g or dg [B, T, HV, 128], elements of ``size`` bytes, and the bytes
    from a token to the next."""
    first = (Int64(token + at.row) * x.HV + head) * HEAD_DIM + at.channel
    return first * size, Int64(x.HV) * (HEAD_DIM * size)


def row_offset(place, token, heads, head):
    """Returns the byte offset of the thread's first channel of a token in a bf16 tensor [B, T, heads, 128]."""
    return ((Int64(token) * heads + head) * HEAD_DIM + place.channel) * 2


def load_beta(x, token, exists, head, row):
    """Returns beta of a row through its activation; 0 unless it ``exists``."""
    address = x.beta + (Int64(token + row) * x.HV + head) * x.beta_bytes
    narrow = ptx.unpack_bf16x2(ptx.load_global_u16(address, exists & (x.beta_bytes == 2)))[0]
    raw = narrow + ptx.load_global_f32(address, exists & (x.beta_bytes == 4))
    beta = ptx.select(x.beta_factor > Float32(0.0), sigmoid(raw) * x.beta_factor, raw)
    return ptx.select(exists, beta, Float32(0.0))


assert 2 * PANEL == CHUNK * ROW
