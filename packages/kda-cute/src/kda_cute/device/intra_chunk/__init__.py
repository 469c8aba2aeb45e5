"""The intra-chunk stage: the tokens of one chunk and one value head become the operands of the chain.

With G the inclusive cumulative sum of the log decays of a chunk, in base 2:

    L_ij = k_i . 2^{G_i - G_j} beta_j k_j (j < i)      Aqk_ij = scale q_i . 2^{G_i - G_j} beta_j k_j (j <= i)
    T = (I + L)^-1
    Kd = k 2^G,  Qd = scale q 2^G,  Kg = beta k 2^{G_end - G},  a = 2^{G_end}

beta belongs to the columns, so that the diagonal of T is exactly 1. Rounded to bf16 within T, beta would scale a whole row
of the state by one wrong factor, whereas roundings of Kg differ from element to element.

A group of warps owns one chunk and value head, each warp one block of 16 rows. Within block b, 2^{G_i - G_j} is a row factor
2^{G_i - A_b} <= 1 times a column factor 2^{A_b - G_j} >= 1, its *split factors*. The anchor A_b is the G of the block's
*first* row: with an anchor further down, later gates would round earlier outputs. Columns then *hop* from anchor to anchor,
block by block, to the end of the chunk, where they are Kg. No exponent of a hop is above 0. With unbounded gates, columns of a
steep decay have no split factors: 2^{A_b - G_j} would overflow. Their products are *refined* (`refine`).

======= ================================ ====================================================================== ============
stage   split                            work                                                                   module
======= ================================ ====================================================================== ============
1       one warp per block, four         decay: exponents G - A_b; then, from the sums of all blocks, anchors,  `decay`,
        channels per lane                hops and a                                                             `gates`
2       one warp per block, MMA          rows: factors, Kd, Qd, diagonal blocks of L and Aqk; refined products  `rows`,
        fragments                        (unbounded gates only)                                                 `refine`
3       one warp per block, as columns   columns: blocks of L and Aqk below the diagonal, Kg; inverses of the   `columns`,
                                         diagonal blocks                                                        `inverse`
4       one warp per column of blocks    inverse: blocks of T below the diagonal                                `inverse`
======= ================================ ====================================================================== ============

`fold` has a variant that also multiplies T into Kg and Aqk in stage 4.

Barriers of the group separate the stages; `IntraChunk.compute` says what each of them orders. `memory.Layout` maps shared
memory by stage.

Registers hold MMA fragments throughout. A quad (four lanes) holds two rows of q, k and G, its *halves* row and row + 8. The
128 channels are four *slices* m of 32. Of each slice a lane has 8 channels, one 16-byte access in global memory, which two
k16 *steps* of an MMA multiply:

    channel 32m + 8*quad_lane +    0   1    2   3     4   5    6   7
    step                          ------- 0 -------  ------- 1 -------
    pair of the lane                 0        1         0        1
    column of the MMA             2t  2t+1 2t+8 2t+9 2t  2t+1 2t+8 2t+9      t = quad_lane

PTX defines the last row. The order of channels in a product does not matter, as long as both operands share it.

Reading order: this file, `memory`, `decay`, `rows`, `columns`, `inverse`, then `gates`, `refine` and `blocks`.

The code uses mma.sync, ldmatrix, stmatrix and cp.async, and nothing that is particular to sm_90: every GPU backend runs it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from cutlass import Float32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.columns import Columns
from kda_cute.device.intra_chunk.decay import Decay
from kda_cute.device.intra_chunk.gates import Gate, gate_rate
from kda_cute.device.intra_chunk.inputs import Chunk, Inputs
from kda_cute.device.intra_chunk.inverse import Inverse
from kda_cute.device.intra_chunk.memory import BLOCK_BYTES, SLICE_BYTES, Layout, Place, fragment_address
from kda_cute.device.intra_chunk.rows import Rows
from kda_cute.records import BLOCK, HEAD_DIM, IntraChunkConfig


class Worker(NamedTuple):
    """The calling thread, as a kernel describes it. `memory.Place` follows from it.

    ``thread``: index in its group. ``base``: shared address of the group's memory, a multiple of 1024. ``turn``: a number
    that decides which warp has which block (`IntraChunk.block_of`). `request`, `compute` and `finish` of a chunk take the same
    turn, and consecutive chunks different ones.
    """

    thread: Any
    base: Any
    turn: Any


class Hooks(NamedTuple):
    """What a kernel does between the stages of a chunk. All threads of the group call each hook.

    ``sync``: barrier of the group. ``acquire_record``: waits until the record may be written; one thread may wait for the
    group, because a barrier follows. ``claim_next``: claims the group's next chunk, before stage 3. ``store_claim``: takes
    what ``claim_next`` returned, and stores the claim where the group finds it; it comes after stage 3, so that the claim's
    latency overlaps the stage, and a barrier follows.
    """

    sync: Callable[[], None]
    acquire_record: Callable[[], None]
    claim_next: Callable[[], Any]
    store_claim: Callable[[Any], None]


class IntraChunk(Inputs):
    """The intra-chunk stage of one group of ``threads`` threads (2C). ``layout``: the group's shared memory.

    For each chunk a kernel calls::

        loaded = request(x, worker, chunk)
        compute(x, worker, chunk, loaded, record, hooks)
        finish(worker, record)
        barrier of the group                      before the next `compute`, which overwrites what `finish` reads

    The kernel may `request` the next chunk as soon as `compute` has returned; in the first chunk, at once.

    ``x`` is the call, an object with these fields. Rows are contiguous:

    =========== ======= ==================================================================================
    field       type    meaning
    =========== ======= ==================================================================================
    q, k        Int64   addresses, bf16 [tokens, H, 128]
    g           Int64   address, bf16 or fp32 (``gate_dtype``) [tokens, HV, 128]
    beta        Int64   address, bf16 or fp32 [tokens, HV]
    a_log       Int64   address, fp32 [HV]; 0: absent, counts as zeros
    dt_bias     Int64   address, fp32 [HV, 128]; 0: absent, counts as zeros
    H, HV       Int32   key heads and value heads
    beta_bytes  Int32   2: beta is bf16; 4: fp32
    l2norm      Int32   1: q and k are normalised; 0: they are used as they are
    scale       Float32 factor of q
    lower_bound Float32 of a bounded gate
    beta_factor Float32 factor of sigmoid(beta); 0: beta is used as it is
    =========== ======= ==================================================================================

    ``record(name)`` returns the global address of the chunk's part of the array ``name``: kd, qd, kg, aqk, t or a.
    Gates are <= 0; a precomputed g is trusted to be.
    """

    #: Whether `request` starts the load of q. If not, `compute` does.
    requests_q = True

    def __init__(self, config: IntraChunkConfig):
        super().__init__(config)
        self.chunk = config.chunk
        self.layout = Layout.of(config)
        self.blocks = self.layout.blocks
        self.threads = 32 * self.blocks
        self.decay = Decay(config, self.layout)
        self.rows = Rows(config, self.layout)
        self.columns = Columns(self.layout)
        self.inverse = Inverse(self.layout)

    def request(self, x, worker: Worker, chunk: Chunk):
        """Starts the first loads of a chunk: g, and q if `requests_q`, to shared memory, the small inputs to registers.

        The regions of g and q are free from stage 4 of the previous chunk on. That of k is not, so `compute` requests k.

        Returns seven values for `compute`, a flat tuple so that a kernel can carry them through a loop: beta of a row as
        bf16 bits (Int32) and in fp32, one of which is 0; A_log of the head; dt_bias of the lane's four channels. Rows of g
        are counted in 32 bits (`host.refusal`).
        """
        p = self.place(worker)
        a_log, biases = self.load_gate_parameters(p, x, chunk.head)
        beta = self.load_beta(x, chunk, p.thread % self.chunk)
        self.copy_gates(p, x, chunk)
        if self.requests_q:
            self.copy_rows(p, x, "q", chunk, p.q)
        cute.arch.cp_async_commit_group()
        return *beta, a_log, *biases

    def compute(self, x, worker: Worker, chunk: Chunk, loaded, record, hooks: Hooks):
        """Computes stages 1 to 3 of a requested chunk. ``loaded``: what `request` returned.

        In stages 1 and 2 a warp loads, decays and multiplies its own block, so most data pass between lanes of one warp, and
        a `sync_warp` orders them. Barriers of the group order the rest:

        =============== ================================= ==============================================
        barrier         other warps may now read          the slice may now overwrite
        =============== ================================= ==============================================
        in stage 1      first_decay, last_exponent, beta  the record, row_scale
        after stage 2   row factors, hop_scale            first_decay, last_exponent, anchor_scale (by L)
        after stage 3   blocks of L, inverses, the claim  exponents, q, hop_scale, hop_exponent, beta
        after `finish`  the record                        k, and the tables that L has replaced
        =============== ================================= ==============================================
        """
        p = self.place(worker)
        l2norm = x.l2norm > 0
        beta_bf16, beta_fp32, a_log, *biases = loaded
        rate = gate_rate(a_log)
        self.copy_rows(p, x, "k", chunk, p.k)
        if not self.requests_q:
            self.copy_rows(p, x, "q", chunk, p.q)
        cute.arch.cp_async_commit_group()

        gate = Gate(self.config, rate, x.lower_bound)
        self.decay.store_row_scales(p, gate, chunk.valid)
        cute.arch.cp_async_wait_group(1)  # all but the last group: g is here, k is not
        cute.arch.sync_warp()  # each warp has copied the g of its block
        self.decay.exponents(p, gate, biases)
        self.store_beta(p, x, beta_bf16, beta_fp32, chunk.valid)
        hooks.acquire_record()
        hooks.sync()
        decay_address = record("a")
        hop = self.decay.store_anchors(p)
        self.decay.store_chunk_decay(p, decay_address)
        steep = self.decay.is_steep(hop)
        cute.arch.cp_async_wait_group(0)  # k and q
        cute.arch.sync_warp()  # k and q of the block, anchors and hops: stage 2 reads those of its own block

        l_acc, a_acc = self.rows.compute(p, steep, l2norm, x.scale, record("kd"), record("qd"))
        hooks.sync()

        claimed = hooks.claim_next()
        self.columns.compute(p, record("kg"), record("aqk"))
        # Not in stage 2: the store passes through scratch that holds columns until here.
        self.columns.store_aqk(p, a_acc, 0, record("aqk"))
        self.inverse.invert_diagonal(p, l_acc, record("t"))
        hooks.store_claim(claimed)
        hooks.sync()

    def finish(self, worker: Worker, record):
        """Computes stage 4 of the chunk. A barrier of the slice must follow before the next `compute`."""
        self.inverse.assemble(self.place(worker), record("t"))

    def is_claimer(self, thread, turn):
        """Returns whether the thread's warp claims chunks: that of the last block, which has no work in stage 4, and the least in stage 3."""
        return self.block_of(thread, turn) == self.blocks - 1

    def block_of(self, thread, turn):
        """Returns the block of the thread's warp. It changes from turn to turn, because blocks differ in work, and a warp's
        number decides its scheduler."""
        return (thread // 32 + turn) & (self.blocks - 1)  # modulo the number of blocks, 2 or 4

    def place(self, worker: Worker) -> Place:
        """Returns the thread's place in this turn."""
        return Place(self.layout, worker.thread, self.block_of(worker.thread, worker.turn), worker.base)

    # ---- loads

    def copy_gates(self, p: Place, x, chunk: Chunk):
        """Copies g of the warp's block to shared memory asynchronously, into the region of the exponents that replace it.
        `memory.Layout` has the form for each dtype."""
        size = self.gate_bytes
        units = HEAD_DIM * size // 16  # of 16 bytes, in a row
        unit, first = p.lane % units, p.lane // units
        start = p.exponents + p.block * BLOCK_BYTES
        first_row = p.block * BLOCK
        for at in range(0, BLOCK, 32 // units):
            row = at + first
            address = self.gate_address(x, chunk, first_row + row) + unit * 16
            if size == 2:
                to = start + unit // 8 * (2 * SLICE_BYTES) + row * 128 + unit % 8 * 16
            else:
                to = start + unit // 8 * SLICE_BYTES + row * 128 + (unit % 8 ^ row % 2) * 16
            ptx.cp_async_x4(to, address, first_row + row < chunk.valid)
        cute.arch.cp_async_commit_group()

    def copy_rows(self, p: Place, x, name, chunk: Chunk, region):
        """Copies the warp's block of q or k (``name``) to shared memory asynchronously, in fragment order.

        A warp copies 4 rows of 128 bytes at a time, whole lines of global memory: half the wavefronts of 8 rows of 64 bytes, which
        each thread would copy for itself. Eight lanes have two rows of one slice, which are 128 contiguous bytes in shared memory.
        """
        row_of_pair, quad_lane = p.lane // 4 % 2, p.lane % 4
        m, pair = p.lane // 8 % 2, p.lane // 16
        for half in range(2):
            for first in (0, 4):
                row = first + 2 * pair + row_of_pair
                token = p.block * BLOCK + row + 8 * half
                address = self.key_address(x, name, chunk, token) + m * 64 + quad_lane * 16
                to = fragment_address(region, p.block, row * 4 + quad_lane, half, m)
                for slices in (0, 2):
                    ptx.cp_async_x4(to + slices * 512, address + slices * 64, token < chunk.valid)

    def store_beta(self, p: Place, x, beta_bf16, beta_fp32, valid):
        """Stores beta of row ``thread % C`` to shared memory; two threads the same one. Rows beyond the sequence are 0."""
        row = p.thread % self.chunk
        ptx.store_shared(p.beta + row * 4, self.activated_beta(x, beta_bf16, beta_fp32, row < valid))

    def load_gate_parameters(self, p: Place, x, head):
        """Returns A_log of the head and dt_bias of the lane's four channels, 2*lane, 2*lane + 1 and these plus 64, as
        `Decay.exponents` takes them. Absent ones are 0, which changes nothing."""
        if self.config.gate == "precomputed":
            return Float32(0.0), [Float32(0.0)] * 4
        a_log = ptx.load_global_f32(x.a_log + Int64(head) * 4, x.a_log != Int64(0))
        first = x.dt_bias + (Int64(head) * HEAD_DIM + 2 * p.lane) * 4
        return a_log, [ptx.load_global_f32(first + at * 4, x.dt_bias != Int64(0)) for at in (0, 1, 64, 65)]
