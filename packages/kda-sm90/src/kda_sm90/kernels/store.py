"""The store role of a chain: one warp per half copies O and intermediate states from shared to global memory."""

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from kda_cute.device import ptx
from kda_sm90.config import HEAD_DIM, PrefillConfig
from kda_sm90.kernels import barriers, schedule
from kda_sm90.kernels.barriers import NamedBarrier
from kda_sm90.kernels.fragments import HALF, MATRIX_BYTES

#: Accesses of 16 bytes for each lane that `StoreWarp.copy_rows` has under way.
BATCH = 8


class StoreWarp:
    """Copies what the chain publishes: O after every chunk (`NamedBarrier.O_READY`), with R if the call saves it, and states."""

    def __init__(self, config: PrefillConfig):
        self.chunk = config.chunk
        self.warpgroups = config.warpgroups
        self.states = config.states
        self.residual = config.residual
        self.image_bytes = 2 * self.chunk * HALF  # of an image of O or R
        self.o_bytes = self.image_bytes * (2 if self.residual else 1)  # of the buffer of a half
        self.state_bytes = 2 * HALF * HEAD_DIM  # of the buffer of a half

    @cute.jit
    def run(self, smem, sched, queue: Int32, args, half: Int32):
        """Copies O and the intermediate states of every part from shared to global memory."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = warp - 4 * self.warpgroups - 2
        self.release_buffers(smem, wg)
        head, n, high, low = schedule.first_task(sched, queue)
        end = high
        while end > low:
            part = schedule.part(sched, head, n, end, low, high)
            self.store_part(smem, sched, part, args, half + wg, wg)
            end = part.begin
            head, n = schedule.next_task(sched, head, n)

    @cute.jit
    def store_part(self, smem, sched, part, args, half, wg):
        """Copies the chunks of a part. Iteration c stores the state before chunk c, and O of chunk c - 1.

        The warp arrives at STATE_FREE exactly once for each state of the part, as often as the chain waits there.
        """
        o_row = Int64(args.HV) * (2 * HEAD_DIM)  # bytes from a token to the next
        place = (part.token * args.HV + part.head) * (2 * HEAD_DIM) + half * (2 * HALF)
        place += o_row * (part.first * self.chunk)
        kept = self.kept(args, part)
        number, left = Int32(0), Int32(0)  # index in args.states of the next state; states left in this part
        if const_expr(self.states):
            left = self.states_in(part, args.every)
            number = self.states_before(sched, args, part)
            number += cute.ceil_div(part.first, args.every)
            if left > 0:
                barriers.arrive(NamedBarrier.STATE_FREE, wg)
        for c in cutlass.range(part.chunks + 1, unroll=1):
            if const_expr(self.states):  # noqa: SIM102 - decided at compile time
                if c < part.chunks and (part.first + c) % args.every == 0:
                    barriers.sync(NamedBarrier.STATE_READY, wg)
                    self.store_intermediate(smem.state + wg * self.state_bytes, args, number, part.head, half)
                    number += 1
                    left -= 1
                    if left > 0:
                        barriers.arrive(NamedBarrier.STATE_FREE, wg)
            barriers.sync(NamedBarrier.O_READY, wg)
            valid = part.length - (part.first + c - 1) * self.chunk
            if c == 0:  # the first O of a part is empty
                valid = Int32(0)
            before = place - o_row * self.chunk
            self.copy_rows(
                smem.o + wg * self.o_bytes, self.chunk, 2 * HALF, args.o + before, o_row, valid, kept
            )
            if const_expr(self.residual):
                shared = smem.o + wg * self.o_bytes + self.image_bytes
                self.copy_rows(shared, self.chunk, 2 * HALF, args.residual + before, o_row, valid)
            place += o_row * self.chunk
            self.release_o(smem, wg)

    def kept(self, args, part):
        """Returns the bits of O to keep (Int32), the same for every word; None for all, decided at compile time."""
        return None  # noqa: RET501 - the value of an argument

    def release_buffers(self, smem, wg):
        """Releases the buffers that an mbarrier guards, at the start."""
        self.release_o(smem, wg)

    def release_o(self, smem, wg):
        """Releases the buffer of O to the chain, after all lanes have read it."""
        cute.arch.sync_warp()
        barriers.release(smem.o_free + wg)

    @cute.jit
    def store_intermediate(self, shared: Int32, args, number: Int32, head: Int32, half: Int32):
        """Copies half of a state, as image, to index ``number`` of the bf16 states, unless it is beyond their end."""
        matrix = args.states + (Int64(number) * args.HV + head) * (2 * HEAD_DIM * HEAD_DIM)
        exists = number < args.state_count
        row = Int64(2 * HEAD_DIM)
        if self.v_first(args) > 0:
            rows = ptx.select(exists, Int32(HALF), Int32(0))
            self.copy_rows(shared, HALF, 2 * HEAD_DIM, matrix + half * (2 * HALF * HEAD_DIM), row, rows)
        else:
            rows = ptx.select(exists, Int32(HEAD_DIM), Int32(0))
            self.copy_rows(shared, HEAD_DIM, 2 * HALF, matrix + half * (2 * HALF), row, rows)

    def v_first(self, args):
        """Returns whether states are written as [V, K]. Saved states never are."""
        return args.v_first * (1 - args.saved)

    def states_in(self, part, every):
        """Returns the states of a part: one before each of its chunks whose index ``every`` divides."""
        return cute.ceil_div(part.first + part.chunks, every) - cute.ceil_div(part.first, every)

    @cute.jit
    def states_before(self, sched, args, part) -> Int32:
        """Returns the index of the first state of a part's sequence; a whole warp calls it. A sequence has one state for each
        started ``args.every`` chunks. Intermediate states are dense; saved states of packed sequences are in slots
        (`kda_cute.device.varlen`)."""
        tokens = args.every * self.chunk
        count = part.sequence * cute.ceil_div(sched.T, tokens)  # sequences as rows of B
        if sched.offset_bytes > 0:
            count = Int32(part.token) // tokens + part.sequence
            if args.saved == 0:
                count = Int32(0)
                for n in cutlass.range(cute.arch.lane_idx(), part.sequence, 32, unroll=1):
                    _, length, _, _ = schedule.extent(sched, n)
                    count += cute.ceil_div(length, tokens)
                for i in cutlass.range_constexpr(5):
                    count += cute.arch.shuffle_sync_bfly(count, 1 << i)
        return count

    @cute.jit
    def copy_rows(
        self,
        shared: Int32,
        rows: cutlass.Constexpr[int],
        pitch: cutlass.Constexpr[int],
        address: Int64,
        stride: Int64,
        valid: Int32,
        kept=None,
    ):
        """Copies the first ``valid`` rows of a swizzled image of ``rows`` rows of ``pitch`` bytes to global rows
        ``stride`` bytes apart; a whole warp calls it. ``kept``: see `kept`.

        A loop, because ptxas loads the rows of straight code one by one, into the same registers.
        """
        units = pitch // 16
        step = 32 // units  # rows per access of the warp
        row, unit = self.lane() // units, self.lane() % units
        address += stride * row + unit * 16
        for start in cutlass.range(0, rows, BATCH * step, unroll=1):
            self.copy_batch(
                shared + start * pitch, row, unit, pitch, address, stride * step, valid - start, kept
            )
            address += stride * (BATCH * step)

    def lane(self):
        """Returns the lane's index, for `copy_rows`."""
        return cute.arch.lane_idx()

    def copy_batch(self, shared, row, unit, pitch, address, stride, valid, kept):
        """Copies the lane's units of one batch of `copy_rows`. ``row``, ``address``: of the first unit; ``stride``: bytes to the
        next one."""
        step = 32 // (pitch // 16)
        values = []
        for i in range(BATCH):
            r = i * step + row
            place = shared + r * pitch + (unit ^ (r % 8)) * 16
            value = ptx.load_shared_x4(place, Int32)
            values.append(value if kept is None else [word & kept for word in value])
        for i, value in enumerate(values):
            ptx.store_global_evict_first_x4(address + stride * i, value, i * step + row < valid)


class ReverseStoreWarp(StoreWarp):
    """Copies what the chains of ``reverse`` publish for every chunk: dS', then dX."""

    @cute.jit
    def store_part(self, smem, sched, part, args, half, wg):
        """Copies the chunks of a part, in the order of the chain."""
        o_row = Int64(args.HV) * (2 * HEAD_DIM)  # bytes from a token to the next
        o_chunk = args.o + (part.token * args.HV + part.head) * (2 * HEAD_DIM) + half * (2 * HALF)
        o_chunk += o_row * (part.first * self.chunk)
        for c in cutlass.range(part.chunks, unroll=1):
            state = self.state_address(args.states, args, part.slot + c * sched.step, part.head, half)
            self.store_state(smem, wg, state)
            valid = part.length - (part.first + c * sched.step) * self.chunk
            self.store_tokens(smem, wg, o_chunk, o_row, valid)
            o_chunk += o_row * (self.chunk * sched.step)

    def state_address(self, states, args, slot, head, half):
        """Returns the address of the image of half of a state in an array of `layouts.unpack_states`."""
        return states + ((Int64(slot) * args.HV + head) * 2 + half) * self.state_bytes

    def release_buffers(self, smem, wg):
        """Releases the buffers of dX and of states, at the start."""
        self.release_o(smem, wg)
        self.release_state(smem, wg)

    def release_state(self, smem, wg):
        """Releases the buffer of states to the chain."""
        cute.arch.sync_warp()
        barriers.release(smem.state_free + wg)

    @cute.jit
    def store_state(self, smem, wg, state):
        """Waits for a state, and copies its image."""
        barriers.sync(NamedBarrier.STATE_READY, wg)
        with cute.arch.elect_one():
            shared = smem.state + wg * self.state_bytes
            ptx.bulk_store(state, shared, Int32(self.state_bytes), evict_first=True)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.release_state(smem, wg)

    def store_tokens(self, smem, wg, tokens, pitch, valid):
        """Waits for a matrix [C, 64], and copies its first ``valid`` rows from its image."""
        barriers.sync(NamedBarrier.O_READY, wg)
        self.copy_rows(smem.o + wg * self.o_bytes, self.chunk, 2 * HALF, tokens, pitch, valid)
        self.release_o(smem, wg)


def chunks_of(sched, part, i):
    """Returns, for the i-th slot of a part in the mode ``recompute``, its first token in the sequence and its chunks, at least 1."""
    start = (part.first + i * sched.step) * sched.chunk
    return start, cute.ceil_div(
        cutlass.min(part.length - start, sched.chunk), sched.chunk // sched.chunks_per_slot
    )


class RecomputeStoreWarp(ReverseStoreWarp):
    """Copies what the chains of ``recompute`` publish for every slot: S and R of its chunks forward, then dS' and dX back.

    It also prefetches the checkpoint of the next slot into the L2, three chunks before the chain needs it.
    """

    @cute.jit
    def store_part(self, smem, sched, part, args, half, wg):
        """Copies the slots of a part, in the order of the chain."""
        row_of_half = part.token * args.HV + part.head
        pitch, residual_pitch = Int64(args.HV) * (2 * HEAD_DIM), Int64(args.HV) * args.residual_row
        values = args.o + row_of_half * (2 * HEAD_DIM) + half * (2 * HALF)
        residuals = args.residual + row_of_half * args.residual_row + half * (2 * HALF)
        next_state = Int64(args.HV) * (
            2 * self.state_bytes
        )  # bytes from the state of a slot to that of the next
        for i in cutlass.range(part.chunks, unroll=1):
            start, chunks = chunks_of(sched, part, i)
            first = self.first_slot(sched, part) + start // self.chunk - sched.chunks_before
            before = self.state_address(args.forward_states, args, first, part.head, half)
            behind = self.state_address(args.states, args, first, part.head, half)
            for c in cutlass.range(chunks, unroll=1):
                self.store_state(smem, wg, before + next_state * c)
                row = start + c * self.chunk
                self.store_tokens(
                    smem, wg, residuals + residual_pitch * row, residual_pitch, part.length - row
                )
            for back in cutlass.range(chunks, unroll=1):
                c = chunks - 1 - back
                if c == cutlass.min(2, chunks - 1) and i + 1 < part.chunks:
                    with cute.arch.elect_one():
                        self.prefetch_checkpoint(sched, args, part, i + 1, half)
                self.store_state(smem, wg, behind + next_state * c)
                row = start + c * self.chunk
                self.store_tokens(smem, wg, values + pitch * row, pitch, part.length - row)

    def lane(self):
        """A shuffle hides that the index does not change. ptxas would compute the addresses of all rows ahead, and spill them."""
        return cute.arch.shuffle_sync_bfly(cute.arch.lane_idx(), 0)

    def prefetch_checkpoint(self, sched, args, part, i, half):
        """Requests half of the state that was saved before the i-th slot of a part into the L2."""
        matrix = Int64(sched.first_slot + part.slot + i * sched.step) * args.HV + part.head
        size = MATRIX_BYTES // 2
        ptx.bulk_prefetch(args.checkpoints + (matrix * 2 + half) * size, Int32(size))

    @cute.jit
    def first_slot(self, sched, part) -> Int32:
        """Returns the first slot of 64 tokens of a part's sequence (`kda_cute.device.varlen`)."""
        slot = part.sequence * cute.ceil_div(sched.T, self.chunk)
        if sched.offset_bytes > 0 and part.sequence > 0:
            slot = Int32(part.token) // self.chunk + part.sequence
        return slot
