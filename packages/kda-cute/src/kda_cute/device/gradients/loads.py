"""Loads from global memory: operands of the tensor core by the producer, raw inputs by the compute threads."""

from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.gradients import memory
from kda_cute.device.gradients.decay import ROWS, WIDTH, Lane
from kda_cute.device.gradients.memory import CHUNK, HALF, OFFSETS, PANEL, REGION, RUN, TILES, Operand
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
    """The inputs of a chunk and value head in registers, as a thread needs them. They are loaded one chunk ahead.

    ``q``, ``k``: its 32 elements in the order of an accumulator, bf16x2 [tile][row]. ``g``: raw g of 8 rows and four channels
    (`decay.Lane`).
    """

    def __init__(self, config):
        self.wide = config.gate_dtype == "float32"
        self.words = WIDTH if self.wide else WIDTH // 2  # of a row of g
        self.q, self.k = (cute.make_rmem_tensor((2 * TILES,), Int32) for _ in range(2))
        self.g = cute.make_rmem_tensor((ROWS * self.words,), Int32)

    def load(self, x, place, step):
        """Loads the inputs of a step; zeros behind the end of its sequence."""
        for n, y in enumerate(self.load_gates(x, place, step)):
            self.g[n] = y
        for source, found in ((x.q, self.q), (x.k, self.k)):
            for n, y in enumerate(y for pair in self.load_rows(x, source, place, step) for y in pair):
                found[n] = y

    def load_rows(self, x, source, place, step):
        """Loads the thread's elements of q or k as bf16x2, [tile][row]."""
        row = place.rows()[0]
        start = source + row_offset(place, step.token + row, x.H, step.key_head)
        found = []
        for r in range(2):
            address, exists = start + Int64(x.H) * (8 * ROW * r), row + 8 * r < step.valid
            found.append([y for n in (0, 16) for y in ptx.load_global_words(address + n, 4, exists)])
        return [list(pair) for pair in zip(*found, strict=True)]

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
