"""The intra-chunk stage: the tokens of one chunk and one value head become the operands of the chain.

With G the inclusive cumulative sum of the log decays of a chunk, in base 2:

    L_ij = k_i . 2^{G_i - G_j} beta_j k_j (j < i)      Aqk_ij = scale q_i . 2^{G_i - G_j} beta_j k_j (j <= i)
    T = (I + L)^-1
    Kd = k 2^G,  Qd = scale q 2^G,  Kg = beta k 2^{G_end - G},  a = 2^{G_end}

beta belongs to the columns, so that the diagonal of T is exactly 1. Rounded to bf16 within T, beta would scale a whole row
of the state by one wrong factor, whereas roundings of Kg differ from element to element.

A group of warps owns one chunk and value head, each warp one block of 16 rows. Within block b, decay is a row factor
2^{G_i - A_b} <= 1 times a column factor 2^{A_b - G_j} >= 1. The anchor A_b is the G of the block's *first* row: with an
anchor further down, later gates would round earlier outputs. Columns then hop from anchor to anchor, block by block, to the
end of the chunk, where they are Kg. No exponent of a hop is above 0.

======= ================================ ====================================================================== ============
stage   split                            work                                                                   module
======= ================================ ====================================================================== ============
1       a warp a block, four channels a  decay: exponents G - A_b; then, from the sums of all blocks, anchors,  `decay`
        lane                             hops and a
2       a warp a block, MMA fragments    rows: factors, Kd, Qd, diagonal blocks of L and Aqk; columns without   `rows`,
                                         split factors (unbounded gates only)                                   `refine`
3       a warp a block, as columns       columns: blocks of L and Aqk below the diagonal, Kg; inverses of the   `columns`,
                                         diagonal blocks                                                        `inverse`
4       a warp a column of blocks        inverse: blocks of T below the diagonal                                `inverse`
======= ================================ ====================================================================== ============

A barrier of the group separates the stages. `memory.Layout` maps shared memory by stage.

Registers hold MMA fragments throughout. The four lanes of a quad hold a row of q, k or G; each has the 8 channels
32m + 8*quad + 0..7, m < 4, which are one 16-byte access in global memory. The fragments of two k16 steps take the channels
in this order: an MMA's "pair of columns t" is channel pair t of group m, a permutation that both operands share.

The code uses mma.sync, ldmatrix, stmatrix and cp.async, and nothing that is particular to sm_90: every GPU backend runs it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from cutlass import Float32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.blocks import pack
from kda_cute.device.intra_chunk.columns import Columns
from kda_cute.device.intra_chunk.decay import Decay
from kda_cute.device.intra_chunk.gates import Gate, gate_rate, sigmoid
from kda_cute.device.intra_chunk.inverse import Inverse
from kda_cute.device.intra_chunk.memory import BLOCK_BYTES, GROUP_BYTES, Layout, Place, fragment_address
from kda_cute.device.intra_chunk.rows import Rows
from kda_cute.records import BLOCK, HEAD_DIM, IntraChunkConfig


class Worker(NamedTuple):
    """The calling thread.

    ``thread``: index in its group. ``base``: shared address of the group's memory, a multiple of 1024. ``turn``: a number
    that differs from one chunk of the group to the next.
    """

    thread: Any
    base: Any
    turn: Any


class Chunk(NamedTuple):
    """One chunk of one sequence and value head.

    ``head``: value head. ``token``: first token in B*T. ``key_row``: row of that token and its key head in q and k,
    ``token * H + key head``. ``valid``: tokens of the chunk, 1 to C; the other rows count as zero in q, k, g and beta.
    """

    head: Any
    token: Any
    key_row: Any
    valid: Any


class Hooks(NamedTuple):
    """What a kernel does between the stages of a chunk.

    ``sync``: barrier of the group. ``acquire_record``: waits until the record may be written. ``claim_next``: claims the
    group's next chunk, and returns a value for `store_claim` alone, so that the claim's latency overlaps stage 3.
    ``store_claim``: stores that claim where the group finds it.
    """

    sync: Callable[[], None]
    acquire_record: Callable[[], None]
    claim_next: Callable[[], Any]
    store_claim: Callable[[Any], None]


class IntraChunk:
    """The intra-chunk stage of one group of ``threads`` threads.

    For each chunk a kernel calls `request`, then `compute`, then `finish`; it may `request` the next chunk between `compute`
    and `finish`. ``layout``: the group's shared memory. Gates are <= 0; a precomputed g is trusted to be.
    """

    def __init__(self, config: IntraChunkConfig):
        self.config = config
        self.chunk = config.chunk
        self.layout = Layout.of(config)
        self.blocks = self.layout.blocks
        self.threads = 32 * self.blocks
        self.decay = Decay(config, self.layout)
        self.rows = Rows(config, self.layout)
        self.columns = Columns(self.layout)
        self.inverse = Inverse(self.layout)

    def request(self, x, worker: Worker, chunk: Chunk):
        """Starts the loads of a chunk: g and q to shared memory, and to registers what it returns for `compute`.

        g and q overwrite regions that the previous chunk no longer uses in stage 4. ``x``: the call: addresses q, k, g, beta,
        a_log, dt_bias; numbers H, HV, beta_bytes, scale, l2norm, lower_bound, beta_factor. Returns beta of a row in bf16 and
        in fp32, A_log, and dt_bias of four channels. Rows of g are counted in 32 bits: 2^31 of them are 512 GiB.
        """
        p = self.place(worker)
        value_row = chunk.token * x.HV + chunk.head
        rate, biases = self.load_gate_parameters(p, x, chunk.head)
        beta = self.load_beta(p, x, value_row, chunk.valid)
        self.copy_gates(p, x.g, value_row, x.HV, chunk.valid)
        self.copy_rows(p, x.q, chunk.key_row, x.H, p.q, chunk.valid)
        cute.arch.cp_async_commit_group()
        return *beta, rate, *biases

    def compute(self, x, worker: Worker, chunk: Chunk, loaded, record, hooks: Hooks):
        """Stages 1 to 3 of a requested chunk. ``loaded``: what `request` returned. ``record(name)``: address of the chunk's
        record in the array ``name``."""
        p = self.place(worker)
        l2norm = x.l2norm > 0
        narrow, wide, a_log, *biases = loaded
        rate = gate_rate(a_log)
        self.copy_rows(p, x.k, chunk.key_row, x.H, p.k, chunk.valid)
        cute.arch.cp_async_commit_group()

        gate = Gate(self.config, rate, x.lower_bound)
        self.decay.store_row_units(p, gate, chunk.valid)
        cute.arch.cp_async_wait_group(1)  # g and q
        cute.arch.sync_warp()
        self.decay.exponents(p, gate, biases)
        self.store_beta(p, x, narrow, wide, chunk.valid)
        hooks.acquire_record()
        hooks.sync()
        steep = self.decay.anchors(p, record("a"))
        cute.arch.cp_async_wait_group(0)  # k
        cute.arch.sync_warp()

        l_acc, a_acc = self.rows.compute(p, steep, l2norm, x.scale, record("kd"), record("qd"))
        hooks.sync()

        claimed = hooks.claim_next()
        self.columns.compute(p.thread, p.block, p.base, record("kg"), record("aqk"))
        diagonal = pack(a_acc[0] + a_acc[1])
        self.columns.image.store(record("aqk"), diagonal, p.block, p.block, p.lane, p.base)
        self.inverse.invert_diagonal(p, l_acc, record("t"))
        hooks.store_claim(claimed)
        hooks.sync()

    def finish(self, worker: Worker, record):
        """Stage 4."""
        block = self.block_of(worker.thread, worker.turn)
        self.inverse.assemble(worker.thread, block, worker.base, record("t"))

    def has_least_work(self, thread, turn):
        """Returns whether the thread's warp has the last block: no work in stage 4, and the least in stage 3."""
        return self.block_of(thread, turn) == self.blocks - 1

    def block_of(self, thread, turn):
        """Returns the block of the thread's warp. It changes from turn to turn, because blocks differ in work, and a warp's
        number decides its scheduler."""
        return thread // 32 + turn & self.blocks - 1

    def place(self, worker: Worker) -> Place:
        """Returns the thread's place in this turn."""
        return Place(self.layout, worker.thread, self.block_of(worker.thread, worker.turn), worker.base)

    # ---- loads

    def row_address(self, x, row, size=2):
        """Returns the address of a row of 128 channels of ``size`` bytes; rows are counted over B, T and heads."""
        return x + Int64(row) * (HEAD_DIM * size)

    def copy_gates(self, p: Place, g, value_row, HV, valid):
        """Copies g of the warp's block to shared memory asynchronously: fp32 to the places of the exponents that replace it,
        bf16 as two halves of 64 channels, each in rows of 128 bytes within the region of its exponents."""
        size = self.decay.gate_bytes
        units = HEAD_DIM * size // 16  # of a row
        unit, first = p.lane % units, p.lane // units
        place = p.exponents + p.block * BLOCK_BYTES
        start = p.block * BLOCK
        for at in range(0, BLOCK, 32 // units):
            row = at + first
            address = self.row_address(g, value_row + (start + row) * HV, size) + unit * 16
            if size == 2:
                to = place + unit // 8 * (2 * GROUP_BYTES) + row * 128 + unit % 8 * 16
            else:
                to = place + unit // 8 * GROUP_BYTES + row * 128 + (unit % 8 ^ row % 2) * 16
            ptx.cp_async_x4(to, address, start + row < valid)
        cute.arch.cp_async_commit_group()

    def copy_rows(self, p: Place, x, key_row, H, region, valid):
        """Copies rows of q or k to shared memory asynchronously, in fragment order: each thread copies what it reads."""
        for half in range(2):
            row = p.block * BLOCK + p.row + 8 * half
            address = self.row_address(x, key_row + row * H) + p.quad * 16
            for m in range(4):
                to = fragment_address(region, p.block, p.lane, half, m)
                ptx.cp_async_x4(to, address + 64 * m, row < valid)

    def load_beta(self, p: Place, x, value_row, valid):
        """Returns beta of a row as bf16 bits and as fp32, one of which is 0. Two threads load the same row."""
        row = p.thread % self.chunk
        address = x.beta + (Int64(value_row) + row * x.HV) * x.beta_bytes
        exists, narrow = row < valid, x.beta_bytes == 2
        # Two loads, one of which does nothing: whatever combined them here would wait for memory.
        return (
            ptx.load_global_u16(address, exists & narrow),
            ptx.load_global_f32(address, exists & (x.beta_bytes == 4)),
        )

    def store_beta(self, p: Place, x, narrow, wide, valid):
        """Stores beta of a row, ``beta_factor`` times its sigmoid (0: as it is), to shared memory. Rows beyond the sequence
        are 0."""
        row = p.thread % self.chunk
        beta = ptx.unpack_bf16x2(narrow)[0] + wide
        beta = ptx.select(x.beta_factor > Float32(0.0), sigmoid(beta) * x.beta_factor, beta)
        ptx.store_shared(p.beta + row * 4, ptx.select(row < valid, beta, Float32(0.0)))

    def load_gate_parameters(self, p: Place, x, head):
        """Returns A_log of the head and dt_bias of the lane's four channels. Absent ones are 0, which changes nothing."""
        if self.config.gate == "precomputed":
            return Float32(0.0), [Float32(0.0)] * 4
        rate = ptx.load_global_f32(x.a_log + Int64(head) * 4, x.a_log != Int64(0))
        first = x.dt_bias + (Int64(head) * HEAD_DIM + 2 * p.lane) * 4
        return rate, [ptx.load_global_f32(first + at * 4, x.dt_bias != Int64(0)) for at in (0, 1, 64, 65)]
