"""Control flow, barriers, mbarriers, fences, votes and shuffles.

Source: PTX ISA, "Control Flow Instructions", "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator.access import addresses, lanes_of, mbarrier_at, space_of, spread
from ptx_emulator.decode import Decoder, Execute, handler
from ptx_emulator.lanes import BOOLS, FULL, INDICES, LANES, Array, to_bits
from ptx_emulator.machine import CONVERGE, EXIT, POLL, Cta, Mbarrier, NamedBarrier, Wait, Warp
from ptx_emulator.memory import CTA_BITS, SHARED_WINDOW, WINDOW_BITS, Region
from ptx_emulator.parser import Instruction, Label, Operand, Pair, Sink
from ptx_emulator.races import GLOBAL, SHARED

# ---- control flow


@handler("bra")
def _bra(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers, "uni")
    (label,) = i.operands
    assert isinstance(label, Label)
    target = label.target
    if i.guard is None:
        return lambda w, lanes: (target, lanes)
    slot, negated = d.source(i.guard[0], "pred"), i.guard[1]

    def branch(w: Warp, lanes: int) -> Any:
        if w.unknown[slot] & lanes:
            w.fail(
                f"the predicate of a branch is undefined: nothing has written it (lanes {w.unknown[slot] & lanes:08x})"
            )
        value = w.regs[slot]
        taken = lanes & (~value if negated else value)
        return (target, taken) if taken else None

    return branch


@handler("ret", "exit")
def _ret(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers, "uni")

    return lambda w, lanes: EXIT


@handler("trap")
def _trap(d: Decoder, i: Instruction) -> Execute:
    return lambda w, lanes: w.fail(f"the kernel executes trap (lanes {lanes:08x})")


@handler("nanosleep")
def _nanosleep(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers, "u32")
    d.source(i.operands[0], "u32")
    return lambda w, lanes: POLL


@handler("setmaxnreg")
def _setmaxnreg(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers, "inc", "dec", "sync", "aligned", "u32")
    count = d.immediate(i.operands[0])
    if not 24 <= count <= 256 or count % 8:
        d.refuse(f"setmaxnreg: expected a multiple of 8 from 24 to 256, got {count}")
    return aligned(lambda w, lanes: w.registers.append(count))


@handler("fence", "membar")
def _fence(d: Decoder, i: Instruction) -> Execute:
    """The emulator's memory is sequentially consistent, so fences only matter to the checks.

    Memory fences update the `Clock` of the race check; proxy fences update the times that `check_proxy` compares.
    """
    if i.modifiers[:1] == ("mbarrier_init",):
        return lambda w, lanes: _show_mbarriers(w)
    if i.modifiers[:1] != ("proxy",):
        d.only(
            i.modifiers,
            "acq_rel",
            "sc",
            "cta",
            "gpu",
            "sys",
            "cluster",
            *(("gl",) if i.opcode == "membar" else ()),
        )
        return lambda w, lanes: w.clock.fence()
    if i.modifiers[1] == "tensormap::generic":
        return _tensor_map_fence(d, i)
    d.only(i.modifiers[1:2], "async")
    scope = i.modifiers[2] if len(i.modifiers) > 2 else ""
    spaces = {"": ("shared", "global"), "global": ("global",), "shared::cta": ("shared",)}.get(scope)
    if spaces is None:
        d.refuse("this fence is not modelled")

    def fence(w: Warp, lanes: int) -> None:
        w.machine.clock += 1
        for space in spaces:
            w.cta.fences[space] = w.machine.clock
            w.clock.proxy_fence(_SECTIONS[space], lanes, lanes == w.alive)
        w.clock.now += 1  # later writes are not fenced
        _show_mbarriers(w)
        if "global" in spaces:
            w.machine.fences[w.cta.number] = w.machine.clock

    return fence


def _tensor_map_fence(d: Decoder, i: Instruction) -> Execute:
    """`fence.proxy.tensormap::generic`: `.acquire` makes a tensor map that a kernel has changed usable by this CTA."""
    d.only(i.modifiers[2:], "acquire", "release", "cta", "cluster", "gpu", "sys")
    if "acquire" not in i.modifiers:
        return lambda w, lanes: w.clock.fence()
    base, offset = d.address(i.operands[0], "b64")

    def acquire(w: Warp, lanes: int) -> None:
        w.clock.fence()
        for address in addresses(w, base, offset, lanes).tolist():
            w.cta.acquired_maps[address] = w.machine.clock

    return acquire


def _show_mbarriers(w: Warp) -> None:
    """Make the mbarriers that this warp has initialised visible to the async proxy and to other CTAs."""
    for barrier in w.cta.mbarriers.values():
        barrier.visible |= barrier.initialiser is w


_SECTIONS = {"shared": SHARED, "global": GLOBAL}


def check_proxy(
    w: Warp,
    space: str,
    region: Region,
    units: Array | slice,
    owner: Cta | None = None,
    words: Array | None = None,
    access: str = "reads",
) -> None:
    """Check an access of the async proxy against earlier writes of the generic proxy (PTX ISA, "Proxies").

    A `fence.proxy.async` is required between them: of the thread that wrote, or of one that the write happens before, and before
    the read. Where races are not checked, any thread of the CTA counts.

    Args:
        space: "shared" or "global".
        units: the 16-byte units that are accessed, counted from ``region.base``.
        owner: the CTA whose shared memory is read, by default the warp's. Fences of its threads count, too.
        words: the words of 4 bytes of ``units``, if the caller has them.
        access: "reads" or "writes".
    """
    if isinstance(units, slice):
        units = np.arange(units.start, units.stop)
    if region.shadow is not None:
        here = (units[:, None] * 4 + np.arange(4)).reshape(-1) if words is None else words
        if region.shadow.unfenced(w, here, _SECTIONS[space]):
            w.fail(
                f"the async proxy {access} {region.name} after a write of the generic proxy without a fence.proxy.async between them "
                "(of the writing thread, or of one that is ordered behind it)"
            )
    late = region.written[units] > max(w.cta.fences[space], (owner or w.cta).fences[space])
    if late.any():
        writers = region.writer[units][late]
        own = np.array([w.machine.fences.get(int(cta), 0) if space == "global" else 0 for cta in writers])
        if (region.written[units][late] > own).any():
            w.fail(
                f"the async proxy {access} {region.name} after a write of the generic proxy without a fence.proxy.async between them"
            )


def aligned(execute: Execute) -> Execute:
    """Wrap an `.aligned` instruction: it waits until all lanes of the warp that have not ended execute it."""

    def together(w: Warp, lanes: int) -> Any:
        return execute(w, lanes) if lanes == w.alive else CONVERGE

    return together


def of_members(d: Decoder, i: Instruction, index: int, execute: Execute) -> Execute:
    """Wrap a ``.sync`` instruction with a member mask, operand ``index``.

    It waits until all members that have not ended have arrived, then executes for each set of lanes with the same mask.
    """
    mask = d.source(i.operands[index], "b32")

    def together(w: Warp, lanes: int) -> Any:
        if w.unknown[mask] & lanes:
            w.fail(
                f"the member mask is undefined: nothing has written it (lanes {w.unknown[mask] & lanes:08x})"
            )
        values = w.regs[mask][INDICES[lanes]]
        parts = []
        for value in [int(values[0])] if (values == values[0]).all() else np.unique(values).tolist():
            part = lanes_of(values == value, lanes)
            if part & ~value:
                w.fail(f"lanes {part & ~value:08x} execute this but are not in the member mask {value:08x}")
            if value & lanes & ~part:
                w.fail(
                    f"lanes {value & lanes & ~part:08x} are in the member mask {value:08x} but have another mask"
                )
            if value & w.alive & ~lanes:
                return CONVERGE
            parts.append(part)
        for part in parts:
            execute(w, part)
        return None

    return together


# ---- barriers of a CTA


@handler("bar", "barrier")
def _bar(d: Decoder, i: Instruction) -> Execute:
    if i.modifiers[:2] == ("warp", "sync"):
        # One clock stands for all lanes of a warp: lanes outside of the mask count as synchronized, too.
        return of_members(d, i, 0, lambda w, lanes: w.clock.synchronize())
    if i.modifiers[0] == "cluster":
        return _cluster_barrier(d, i)
    kind = i.modifiers[0]
    d.only(i.modifiers, "sync", "arrive", "cta", "aligned", "red", "popc", "and", "or", "u32", "pred")
    if kind == "cta":
        kind = i.modifiers[1]
    divergent = i.opcode == "barrier" and "aligned" not in i.modifiers
    operands, vote, negated, put = list(i.operands), None, False, None
    if kind == "red":
        vote, negated = d.predicate(operands.pop())
        put = _reduced(d, i, operands.pop(0))
    elif set(i.modifiers) & {"red", "popc", "and", "or", "u32", "pred"}:
        d.refuse("this barrier is not modelled")
    identity = d.source(operands[0], "u32")
    count = d.source(operands[1], "u32") if len(operands) > 1 else None
    if kind == "arrive" and count is None:
        d.refuse("bar.arrive: expected a number of threads, got none")

    def barrier(w: Warp, lanes: int) -> Any:
        number = uniform(w, identity, lanes)
        threads = len(w.cta.warps) * 32 if count is None else uniform(w, count, lanes)
        if number > 15 or threads % 32 or threads == 0:
            w.fail(
                f"barrier {number} of {threads} threads: expected a number from 0 to 15 and a positive multiple of 32 threads"
            )
        found = w.cta.barriers.setdefault(number, NamedBarrier())
        if found.arrived and found.expected != threads:
            w.fail(
                f"barrier {number}: {threads} threads expected here, {found.expected} by the warps that have already arrived"
            )
        found.expected = threads
        if vote is not None:
            if w.unknown[vote] & lanes:
                w.fail(
                    f"the predicate of a barrier is undefined: nothing has written it (lanes {w.unknown[vote] & lanes:08x})"
                )
            value = (w.regs[vote] ^ FULL * negated) & lanes
            found.votes = found.votes[0] + value.bit_count(), found.votes[1] + (lanes & ~value).bit_count()

        def arrive() -> None:
            """Count the warp. The last one completes the barrier."""
            found.arrived += 32
            if found.arrived > threads:
                w.fail(f"barrier {number}: {found.arrived} threads arrive, {threads} are expected")
            w.clock.synchronize()
            snapshot = w.clock.release()
            found.released = snapshot if found.released is None else np.maximum(found.released, snapshot)
            if found.arrived == threads:
                found.arrived = 0
                found.phase += 1
                found.complete, found.released = found.released, None
                found.result, found.votes = found.votes, (0, 0)

        phase = found.phase
        if divergent:  # the warp arrives when its last lane does, or when the lanes that are left have ended
            found.lanes[w.number] = found.lanes.get(w.number, 0) | lanes

        def complete() -> bool:
            if found.phase == phase and divergent and not w.alive & ~found.lanes.get(w.number, 0):
                del found.lanes[w.number]
                arrive()
            if found.phase == phase:
                return False
            w.clock.acquire(found.complete)
            if put is not None:
                put(w, lanes, *found.result)
            return True

        if not divergent:
            arrive()
        if kind == "arrive":
            if divergent and not w.alive & ~found.lanes[w.number]:
                del found.lanes[w.number]
                arrive()
            return None
        if complete():
            return None
        reason = f"barrier {number} of {threads} threads"
        # Lanes that diverged can also be released by those that end.
        return Wait(complete, reason, again=False, barrier=None if divergent else found, phase=phase)

    return barrier if divergent else aligned(barrier)


def _reduced(d: Decoder, i: Instruction, target: Operand) -> Callable[[Warp, int, int, int], None]:
    """Return the function that writes the result of `bar.red`, from the numbers of true and false predicates."""
    mode, kind = [m for m in i.modifiers if m != "aligned"][-2:]
    to = d.destination(target, kind)
    if (mode, kind) == ("popc", "u32"):
        return lambda w, lanes, true, false: w.put(to, np.full(32, true, np.uint32), 0, lanes)
    if mode not in ("and", "or") or kind != "pred":
        d.refuse("this barrier is not modelled")
    return lambda w, lanes, true, false: w.put_predicate(
        to, FULL * (true > 0 if mode == "or" else false == 0), 0, lanes
    )


def _cluster_barrier(d: Decoder, i: Instruction) -> Execute:
    """`barrier.cluster`. Only whole warps may execute it here."""
    d.only(i.modifiers[1:], "arrive", "wait", "release", "acquire", "relaxed", "aligned")
    ordered = "relaxed" not in i.modifiers

    def arrive(w: Warp, lanes: int) -> None:
        if w.arrived is not None:
            w.fail("barrier.cluster: this warp arrives a second time without a wait between")
        w.arrived = w.cta.cluster.generation
        w.clock.synchronize()
        w.cta.cluster.arrive(w, w.clock.release() if ordered else None)
        w.machine.changes += 1

    def wait(w: Warp, lanes: int) -> Any:
        cluster, arrived = w.cta.cluster, w.arrived
        if arrived is None:
            w.fail("barrier.cluster: a wait without an arrival of this warp")
        w.arrived = None

        def complete() -> bool:
            cluster.advance()
            if cluster.generation == arrived:
                return False
            w.clock.acquire(cluster.complete)
            return True

        return Wait(
            complete, f"the barrier of the cluster ({len(cluster.arrived)} warps have arrived)", again=False
        )

    return aligned(arrive if i.modifiers[1] == "arrive" else wait)


@handler("mapa")
def _mapa(d: Decoder, i: Instruction) -> Execute:
    """`mapa`: the corresponding address in the shared memory of another CTA."""
    kind = i.modifiers[-1]
    if i.modifiers not in (("shared::cluster", kind), (kind,)) or kind not in ("u32", "u64"):
        d.refuse("this form of mapa is not modelled")
    generic = len(i.modifiers) == 1
    if generic and kind == "u32":
        d.refuse("mapa.u32: generic addresses have 64 bits, expected .u64")
    to, place, rank = (
        d.destination(i.operands[0], kind),
        d.source(i.operands[1], kind),
        d.source(i.operands[2], "u32"),
    )
    word: Any = np.uint32 if kind == "u32" else np.uint64
    base = word(SHARED_WINDOW << WINDOW_BITS if generic else 0)

    def map_address(w: Warp, lanes: int) -> None:
        local = w.regs[place] & word((1 << CTA_BITS) - 1)
        found = local | w.regs[rank].astype(word) << word(CTA_BITS)
        w.put(to, found | base, w.unknown[place] | w.unknown[rank], lanes)

    return map_address


@handler("getctarank")
def _getctarank(d: Decoder, i: Instruction) -> Execute:
    """`getctarank`: the rank of the CTA whose shared memory an address points to."""
    d.only(i.modifiers, "shared::cluster", "u32", "u64")
    to, place = d.destination(i.operands[0], "b32"), d.source(i.operands[1], i.modifiers[-1])
    mask = (1 << WINDOW_BITS) - 1

    def rank(w: Warp, lanes: int) -> None:
        found = (w.regs[place].astype(np.int64) & mask) >> CTA_BITS
        w.put(to, found.astype(np.uint32), w.unknown[place], lanes)

    return rank


@handler("griddepcontrol")
def _griddepcontrol(d: Decoder, i: Instruction) -> Execute:
    """No operation: launches run one after the other, so the previous one has ended and the next one starts later."""
    d.only(i.modifiers, "wait", "launch_dependents")
    return lambda w, lanes: None


def uniform(w: Warp, slot: int, lanes: int) -> int:
    """Return the value of a register that must be the same in all active lanes."""
    values = w.regs[slot][INDICES[lanes]]
    if w.unknown[slot] & lanes:
        w.fail(
            f"an operand is undefined: it depends on a value that nothing has written yet "
            f"(lanes {w.unknown[slot] & lanes:08x})"
        )
    if (values != values[0]).any():
        w.fail(
            f"an operand must be the same in all lanes, but some have {values[0]} and others {values[values != values[0]][0]}"
        )
    return int(values[0])


# ---- mbarriers


def _places(d: Decoder, i: Instruction, operand: Operand) -> Callable[[Warp, int], Array]:
    """Decode the address of an mbarrier. Returns a function of the warp and the active lanes; errors for other memory."""
    base, offset = d.address(operand, "b32")
    if space_of(d, i) != "generic":
        return lambda w, lanes: addresses(w, base, offset, lanes)

    def generic(w: Warp, lanes: int) -> Array:
        found = addresses(w, base, offset, lanes)
        if (found >> WINDOW_BITS != SHARED_WINDOW).any():
            w.fail(
                f"mbarrier: generic address {int(found[found >> WINDOW_BITS != SHARED_WINDOW][0]):#x} is not in shared memory"
            )
        return found & (1 << WINDOW_BITS) - 1

    return generic


@handler("mbarrier")
def _mbarrier(d: Decoder, i: Instruction) -> Execute:
    operation = i.modifiers[0]
    kinds = {
        "init": _init, "arrive": _arrive, "arrive_drop": _arrive, "expect_tx": _transactions, "complete_tx": _transactions,
        "try_wait": _wait, "test_wait": _wait, "inval": _invalidate,
    }  # fmt: skip
    if operation not in kinds:
        d.refuse(f".{operation} is not modelled")
    d.only(
        i.modifiers[1:], "parity", "expect_tx", "noComplete", "shared", "shared::cta", "shared::cluster", "b64",
        "release", "acquire", "relaxed", "cta", "cluster",
    )  # fmt: skip
    if "noComplete" in i.modifiers:
        d.refuse(".noComplete is not modelled")
    return kinds[operation](d, i)


def _init(d: Decoder, i: Instruction) -> Execute:
    places_of, count = _places(d, i, i.operands[0]), d.source(i.operands[1], "u32")

    def init(w: Warp, lanes: int) -> None:
        places, counts = places_of(w, lanes), w.regs[count][INDICES[lanes]]
        for place, n in zip(places.tolist(), counts.tolist()):
            _check_place(w, place)
            if not 1 <= n < 1 << 20:
                w.fail(f"mbarrier.init: expected a count from 1 to {(1 << 20) - 1}, got {n}")
            w.cta.mbarriers[place] = Mbarrier(n, n, initialiser=w)
            region = w.cta.shared
            region.track()[place - region.base : place - region.base + 8] = (
                0  # the object is opaque: its bytes cannot be read as data
            )
        w.machine.changes += 1

    return init


def _invalidate(d: Decoder, i: Instruction) -> Execute:
    places_of = _places(d, i, i.operands[0])

    def invalidate(w: Warp, lanes: int) -> None:
        for place in places_of(w, lanes).tolist():
            mbarrier_at(w, place)
            del w.cta.mbarriers[place]

    return invalidate


def _check_place(w: Warp, place: int) -> None:
    if place % 8:
        w.fail(f"mbarrier: address {place:#x} is not aligned to 8 bytes")
    if place < w.cta.shared.low or place + 8 > w.cta.shared.high:
        w.fail(
            f"mbarrier: address {place:#x} is outside of shared memory ({w.cta.shared.low:#x} to {w.cta.shared.high:#x})"
        )


def _arrive(d: Decoder, i: Instruction) -> Execute:
    """`arrive`, `arrive.expect_tx` and `arrive_drop`.

    The opaque state that they return is the number of the phase here. `arrive_drop` lowers the count of later phases.
    """
    drop = i.modifiers[0] == "arrive_drop"
    operands = list(i.operands)
    to = d.destination(operands.pop(0), "b64")
    places_of = _places(d, i, operands[0])
    expect = "expect_tx" in i.modifiers
    if expect and len(operands) != 2:
        d.refuse("arrive.expect_tx: expected a number of bytes as the last operand")
    count = d.source(operands[1], "u32") if len(operands) > 1 else None

    def arrive(w: Warp, lanes: int) -> None:
        places = places_of(w, lanes).tolist()
        if count is not None and w.unknown[count] & lanes:
            w.fail(
                f"a count is undefined: it depends on a value that nothing has written yet "
                f"(lanes {w.unknown[count] & lanes:08x})"
            )
        counts = [1] * len(places) if count is None else w.regs[count][INDICES[lanes]].tolist()
        states = np.zeros(len(places), np.uint64)
        for n, (place, number) in enumerate(zip(places, counts)):
            barrier = mbarrier_at(w, place)
            states[n] = barrier.phase
            if expect:
                barrier.expect(number, w.fail)
            barrier.release(w.clock.release())
            if drop:
                barrier.count -= 1 if expect else number
            barrier.arrive(1 if expect else number, w.fail)
        w.machine.changes += 1
        w.put(to, spread(states, lanes), 0, lanes)

    return arrive


def _transactions(d: Decoder, i: Instruction) -> Execute:
    """`expect_tx` and `complete_tx`: they change the tx-count only."""
    places_of, count = _places(d, i, i.operands[0]), d.source(i.operands[1], "u32")
    complete = i.modifiers[0] == "complete_tx"

    def transact(w: Warp, lanes: int) -> None:
        if w.unknown[count] & lanes:
            w.fail(
                f"a number of bytes is undefined: it depends on a value that nothing has written yet "
                f"(lanes {w.unknown[count] & lanes:08x})"
            )
        for place, number in zip(places_of(w, lanes).tolist(), w.regs[count][INDICES[lanes]].tolist()):
            barrier = mbarrier_at(w, place)
            if complete:
                barrier.count_bytes(number, w.fail)
            else:
                barrier.expect(number, w.fail)
        w.machine.changes += 1

    return transact


def _wait(d: Decoder, i: Instruction) -> Execute:
    """`test_wait` and `try_wait`. Lanes whose phase is complete continue with a true predicate.

    `try_wait` may give up once (`_gives_up`); it then continues with a false predicate. After that it waits without a limit.
    If the program never uses the predicate, the instruction has no effect.

    A parity only distinguishes the current phase from the one before it. So a wait for phase k is safe only if

    - the warp knows that all phases before k are complete, and
    - phase k + 1 cannot complete before the warp has looked.

    The phase that a parity means is therefore the last one of this parity up to the first phase that the warp does not know
    to be complete (`Mbarrier.known`).
    """
    to = d.destination(i.operands[0], "pred")
    places_of = _places(d, i, i.operands[1])

    def ignored(w: Warp, lanes: int) -> None:
        """It may return before the phase is complete, and orders something only if it returns true."""
        for place in places_of(w, lanes).tolist():
            mbarrier_at(w, place)
        w.put_predicate(to, 0, 0, lanes)

    d.unobserved(to, ignored)
    parity = "parity" in i.modifiers
    phase = d.source(i.operands[2], "b32" if parity else "b64")
    if len(i.operands) > 3:
        d.source(i.operands[3], "u32")
    blocks = i.modifiers[0] == "try_wait"

    def wait(w: Warp, lanes: int) -> Any:
        places = places_of(w, lanes).tolist()
        if w.unknown[phase] & lanes:
            w.fail(
                f"a phase is undefined: it depends on a value that nothing has written yet "
                f"(lanes {w.unknown[phase] & lanes:08x})"
            )
        phases = w.regs[phase][INDICES[lanes]].tolist()
        # Most lanes wait for the same phase of the same mbarrier.
        keys = list(zip(places, phases))
        barriers = {key: mbarrier_at(w, key[0]) for key in dict.fromkeys(keys)}
        done = {}
        for (place, n), barrier in barriers.items():
            _check_phase(w, barrier, n, parity)
            done[place, n] = barrier.phase & 1 != n & 1 if parity else barrier.phase != n
        if blocks and _gives_up(w, list(barriers.values()), list(done.values())):
            w.put_predicate(to, 0, 0, lanes)
            return POLL
        if blocks and not any(done.values()):
            waiting = [(barrier, barrier.phase) for barrier in barriers.values()]
            barrier, phase_now = waiting[0]
            reason = f"mbarrier at {places[0]:#x} (phase {phase_now}, {barrier.pending} arrivals and "
            reason += f"{barrier.transactions} bytes pending)"
            if len(waiting) == 1:
                ready = lambda: barrier.phase != phase_now
                return Wait(ready, reason, again=True, barrier=barrier, phase=phase_now)
            return Wait(lambda: any(b.phase != n for b, n in waiting), reason, again=True)
        for key, barrier in barriers.items():
            if done[key] and barrier.phase:
                w.clock.acquire(barrier.complete)
                barrier.seen[-1].setdefault(w.clock.index, w.clock.now)
        if len(done) == 1:
            passed = lanes if done[keys[0]] else 0
        else:
            passed = lanes_of(np.array([done[key] for key in keys]), lanes)
        w.put_predicate(to, passed, 0, lanes)
        return None if blocks else POLL

    return wait


def _gives_up(w: Warp, barriers: list[Mbarrier], flags: list[bool]) -> bool:
    """Return whether a `try_wait` gives up. The seed decides; each warp gives up once in a phase, and only if it may.

    It may if the warp does not know that the phase is complete: it could have come earlier, when it was not.
    """
    for barrier, done in zip(barriers, flags):
        phase = barrier.phase - done  # the phase that the wait is for
        if barrier.given_up.get(w.clock.index, -1) >= phase or barrier.known(w.clock) > phase:
            return False
    if w.machine.choices.random() < 0.5:
        return False
    for barrier, done in zip(barriers, flags):
        barrier.given_up[w.clock.index] = barrier.phase - done
    return True


def _check_phase(w: Warp, barrier: Mbarrier, given: int, parity: bool) -> None:
    """Check that a wait is for the current phase or the one before.

    A current phase that only waits for bytes counts as complete, because they may arrive at any time.

    Args:
        given: the operand: a state, or a parity.
    """
    meant = given
    if parity:
        meant = barrier.known(w.clock)
        meant -= meant - given & 1
    if meant < barrier.phase + (barrier.pending == 0) - 1:
        w.fail(
            f"a wait for phase {meant} of an mbarrier may be too late: phase {meant + 1} is complete, or only waits for bytes "
            f"({barrier.phase} are complete). A parity only distinguishes the current phase from the one before it"
        )


# ---- votes and shuffles


@handler("vote")
def _vote(d: Decoder, i: Instruction) -> Execute:
    if i.modifiers[:1] != ("sync",):
        d.refuse("only vote.sync is modelled")
    mode, kind = i.modifiers[1], i.modifiers[2]
    d.only((mode,), "any", "all", "uni", "ballot")
    if (mode == "ballot") != (kind == "b32"):
        d.refuse(f".{kind} is not modelled")
    to = d.destination(i.operands[0], kind)
    p, negated = d.predicate(i.operands[1])

    def vote(w: Warp, lanes: int) -> None:
        value = (w.regs[p] ^ (FULL * negated)) & lanes
        unknown = lanes if w.unknown[p] & lanes else 0
        if mode == "ballot":
            w.put(to, np.full(32, value, np.uint32), unknown, lanes)
        else:
            result = (
                bool(value) if mode == "any" else value == lanes if mode == "all" else value in (0, lanes)
            )
            w.put_predicate(to, FULL * result, unknown, lanes)

    return of_members(d, i, 2, vote)


@handler("activemask")
def _activemask(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers, "b32")
    to = d.destination(i.operands[0], "b32")
    return lambda w, lanes: w.put(to, np.full(32, lanes, np.uint32), 0, lanes)


@handler("elect")
def _elect(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers, "sync")
    pair = i.operands[0]
    if not isinstance(pair, Pair):
        d.refuse(f"expected two destinations, got {pair}")
    lane = None if isinstance(pair.first, Sink) else d.destination(pair.first, "b32")
    p = d.destination(pair.second, "pred")

    def elect(w: Warp, lanes: int) -> None:
        first = int(INDICES[lanes][0])
        if lane is not None:
            w.put(lane, np.full(32, first, np.uint32), 0, lanes)
        w.put_predicate(p, 1 << first, 0, lanes)

    return of_members(d, i, 1, elect)


@handler("shfl")
def _shfl(d: Decoder, i: Instruction) -> Execute:
    mode = i.modifiers[1]
    if i.modifiers[0] != "sync" or mode not in ("idx", "bfly", "up", "down") or i.modifiers[2:] != ("b32",):
        d.refuse("only shfl.sync.b32 is modelled")
    first, p = i.operands[0], None
    if isinstance(first, Pair):
        p = d.destination(first.second, "pred")
        first = first.first
    to = d.destination(first, "b32")
    a, b, c = d.source(i.operands[1], "b32"), d.source(i.operands[2], "b32"), d.source(i.operands[3], "b32")

    def shuffle(w: Warp, lanes: int) -> None:
        if (w.unknown[b] | w.unknown[c]) & lanes:
            w.fail(
                f"an operand is undefined: it depends on a value that nothing has written yet "
                f"(lanes {(w.unknown[b] | w.unknown[c]) & lanes:08x})"
            )
        source, valid = shuffled(mode, w.regs[b].astype(np.int64) & 31, w.regs[c].astype(np.int64))
        if not BOOLS[lanes][source[INDICES[lanes]]].all():
            w.fail(f"a lane reads a lane that does not execute this shuffle (active lanes {lanes:08x})")
        w.put(to, w.regs[a][source], to_bits(BOOLS[w.unknown[a]][source]), lanes)
        if p is not None:
            w.put_predicate(p, to_bits(valid), 0, lanes)

    return of_members(d, i, 4, shuffle)


def shuffled(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """Return the lane that each lane reads, and whether it is in range (PTX ISA, `shfl.sync`, pseudocode)."""
    clamp, segment = c & 31, c >> 8 & 31
    high = LANES & segment | clamp & ~segment
    low = LANES & segment
    if mode == "idx":
        source = low | b & ~segment
        valid = source <= high
    elif mode == "bfly":
        source = LANES ^ b
        valid = source <= high
    elif mode == "up":
        source = LANES - b
        valid = source >= high
    else:
        source = LANES + b
        valid = source <= high
    return np.where(valid, source, LANES), valid
