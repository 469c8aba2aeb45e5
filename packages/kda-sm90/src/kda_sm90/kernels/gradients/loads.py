"""Loads from global memory: operands of the tensor core by the producer, raw inputs by the compute threads."""

from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.gates import Gate, gate_rate
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels.gradients.memory import BLOCK, CHUNK, HALF, OFFSETS, PANEL, REGION, TILES, Operand

THREADS = 128
ROW = 2 * HEAD_DIM  # bytes of a row of 128 bf16


class Producer:
    """Copies dO, R, dX, S and dS' of one chunk and value head after the other. Rows behind the end of a sequence are zeros."""

    def load(self, x, base, barriers, thread, chunk, head, phase):
        """Copies the operands of a chunk as soon as their regions are free.

        The copies belong to the generic proxy, and wgmma reads through the async proxy. So each thread waits for its copies and
        executes a proxy fence before it arrives. It waits for an operand's copies after it has requested the next operand.
        """
        index = Int64(chunk.token) * x.HV + head
        row = index * ROW
        state = (Int64(chunk.slot) * x.HV + head) * (HEAD_DIM * ROW)
        pitch = Int64(x.HV) * ROW
        sources = {
            Operand.GRAD_O: (x.grad_o + row, pitch, CHUNK, chunk.valid),
            Operand.RESIDUAL: (
                x.residual + index * x.residual_row,
                Int64(x.HV) * x.residual_row,
                CHUNK,
                chunk.valid,
            ),
            Operand.GRAD_V: (x.grad_v + row, pitch, CHUNK, chunk.valid),
            Operand.STATE: (x.states + state, Int64(ROW), HEAD_DIM, Int32(HEAD_DIM)),
            Operand.GRAD_STATE: (x.grad_states + state, Int64(ROW), HEAD_DIM, Int32(HEAD_DIM)),
        }
        for operand, source in sources.items():
            cute.arch.mbarrier_wait(barriers.empty + int(operand), phase ^ 1)
            self.copy(base + OFFSETS[REGION[operand]], thread, *source)
            cute.arch.cp_async_commit_group()
            if operand > 0:
                self.arrive(barriers, operand - 1, pending=1)
        self.arrive(barriers, Operand.GRAD_STATE, pending=0)

    def copy(self, shared, thread, source, pitch, rows, valid):
        """Requests the copies of a matrix [rows, 128] to an image in two panels, its first ``valid`` rows."""
        unit, first = thread % 16, thread // 16
        place = shared + unit // 8 * (rows * 128) + first * 128 + (unit % 8 ^ first) * 16
        for start in range(0, rows, THREADS // 16):
            row = start + first
            ptx.cp_async_x4(place + start * 128, source + pitch * row + unit * 16, row < valid)

    def arrive(self, barriers, operand, pending):
        """Waits until at most ``pending`` later operands are missing, and arrives."""
        cute.arch.cp_async_wait_group(pending)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(barriers.full + int(operand))


class Raw:
    """The inputs of a chunk and value head in registers, as a thread needs them. They are loaded one chunk ahead.

    ``q``, ``k``: its 32 elements in the order of an accumulator, bf16x2 [tile][row]. ``g``: raw g of 16 rows and two channels
    (`decay.Lane`). ``beta``: raw beta of its two rows. ``bias``: dt_bias of the two channels. ``rate``: exp(A_log).
    """

    def __init__(self, config):
        self.config = config
        self.wide = config.gate_dtype == "float32"
        self.q, self.k = (cute.make_rmem_tensor((2 * TILES,), Int32) for _ in range(2))
        self.g = cute.make_rmem_tensor((BLOCK * 2 if self.wide else BLOCK,), Float32 if self.wide else Int32)
        self.beta, self.bias = (cute.make_rmem_tensor((2,), Float32) for _ in range(2))
        self.rate = cute.make_rmem_tensor((1,), Float32)

    def load(self, x, place, token, valid, head):
        """Loads the inputs of a chunk; zeros behind the end of its sequence."""
        for n, y in enumerate(self.load_gates(x, place, token, valid, head)):
            self.g[n] = y
        row = place.rows()[0]
        start, pitch = row_offset(place, token + row, x.H, head // x.group), Int64(x.H) * (8 * ROW)
        for source, found in ((x.q, self.q), (x.k, self.k)):
            for r in range(2):
                for tile in range(TILES):
                    address = source + start + pitch * r + 16 * tile
                    found[2 * tile + r] = ptx.load_global_i32(address, row + 8 * r < valid)
        for r, row in enumerate(place.rows()):
            self.beta[r] = raw_beta(x, token, valid, head, row)
        if self.config.gate != "precomputed":
            a_log = ptx.load_global_f32(x.a_log + Int64(head) * 4, x.a_log != Int64(0))
            self.rate[0] = gate_rate(a_log)
            channel = place.half * HALF + 2 * place.lane
            address = x.dt_bias + Int64(head * HEAD_DIM + channel) * 4
            for i, bias in enumerate(ptx.load_global_f32_x2(address, x.dt_bias != Int64(0))):
                self.bias[i] = bias
        else:
            self.rate[0] = Float32(1.0)
            self.bias[0] = self.bias[1] = Float32(0.0)

    def load_gates(self, x, place, token, valid, head):
        """Loads raw g of the warp's block, two channels a lane; see `gates`."""
        start, pitch = gate_offset(x, place, token, head, 4 if self.wide else 2)
        address, found = x.g + start, []
        for row in range(BLOCK):
            exists = row < valid - place.block * BLOCK
            if self.wide:
                found += ptx.load_global_f32_x2(address, exists)
            else:
                found.append(ptx.load_global_i32(address, exists))
            address = address + pitch
        return found

    def gates(self, g):
        """Returns raw g in fp32, [16 rows][2 channels]."""
        if self.wide:
            return [[g[2 * row], g[2 * row + 1]] for row in range(BLOCK)]
        return [ptx.unpack_bf16x2(g[row]) for row in range(BLOCK)]

    def gate(self, x):
        """Returns the gate of the value head."""
        return Gate(self.config, self.rate[0], x.lower_bound)

    def pairs(self, found):
        """Returns q or k as bf16x2, [tile][row]."""
        return [[found[2 * tile], found[2 * tile + 1]] for tile in range(TILES)]


def gate_offset(x, place, token, head, size):
    """Returns the byte offset of the first of the warp's gates in g or dg [B, T, HV, 128], elements of ``size`` bytes, and the bytes
    from a token to the next."""
    first = (Int64(token + place.block * BLOCK) * x.HV + head) * HEAD_DIM + (
        place.half * HALF + 2 * place.lane
    )
    return first * size, Int64(x.HV) * (HEAD_DIM * size)


def row_offset(place, token, heads, head):
    """Returns the byte offset of the thread's first channel of a token in a bf16 tensor [B, T, heads, 128]."""
    return ((Int64(token) * heads + head) * HEAD_DIM + place.half * HALF + 2 * place.quad) * 2


def raw_beta(x, token, valid, head, row):
    """Loads a raw beta; 0 behind the sequence."""
    address = x.beta + (Int64(token + row) * x.HV + head) * x.beta_bytes
    exists = row < valid
    narrow = ptx.unpack_bf16x2(ptx.load_global_u16(address, exists & (x.beta_bytes == 2)))[0]
    return narrow + ptx.load_global_f32(address, exists & (x.beta_bytes == 4))


assert 2 * PANEL == CHUNK * ROW
