"""The scheduler: CTAs, warps, and the fragments into which a warp diverges.

- A fragment is a set of lanes with one program counter. The runnable fragment with the lowest counter of its warp runs.
  Fragments whose counters become equal are merged.
- A random warp runs for a random number of instructions, then the next one. The seed decides both.
- The seed also decides when each pending asynchronous operation completes. If no warp can run, one of them completes.
"""

from __future__ import annotations

import functools
import operator
import random
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, Protocol

import numpy as np

from ptx_emulator.errors import ExecutionError
from ptx_emulator.lanes import BOOLS, FULL
from ptx_emulator.memory import GlobalMemory, Region, local_region, shared_region
from ptx_emulator.races import SECTIONS, Clock, Issuer, Shadow

POLLS = 256  # polls of a fragment without a change of memory, after which it counts as waiting forever
MOST_BYTES = (1 << 20) - 1  # the largest tx-count of an mbarrier
QUANTUM = 400  # most instructions of one turn of a warp
# In place of a group in `Warp.flight`: registers that a `tcgen05.ld` fills, and those that were computed from them before its wait.
LOADING, DERIVED = 1 << 60, 1 << 61
ENDLESS = (
    5_000_000  # instructions without a change visible to other warps, after which the launch is a deadlock
)


@dataclass
class Wait:
    """The fragment waits until ``ready()``. It then repeats the instruction (``again``) or continues behind it.

    ``reason`` describes what it waits for, for the deadlock message. ``barrier``: the wait cannot be over before the phase of this
    barrier is another one than ``phase``; None: it does not depend on one barrier.
    """

    ready: Callable[[], bool]
    reason: str
    again: bool
    barrier: Mbarrier | NamedBarrier | None = None
    phase: int = 0


class Converge:
    """The instruction needs further lanes, which have not arrived at it yet."""


class Poll:
    """The instruction polled memory: continue behind it, but let other warps run first."""


class Exit:
    """The lanes have executed `exit` or `ret`."""


CONVERGE, POLL, EXIT = Converge(), Poll(), Exit()


@dataclass
class Mbarrier:
    """An mbarrier object (PTX ISA, "mbarrier"), and what the checks need to know about it.

    Attributes:
        count: expected arrivals of each phase.
        pending: pending arrivals of the current phase.
        transactions: pending bytes (tx-count) of the current phase.
        phase: completed phases.
        released: merged vectors (`races.Clock`) of the arrivals of the current phase.
        complete: ``released`` of the last completed phase.
        seen: per completed phase, the warps that observed it, each with its clock at that time.
        arrived: per completed phase, its ``released``; None if asynchronous operations took part.
        asynchronous: whether asynchronous operations take part in the current phase.
        counted: whether bytes of copies, or a commit that must be observed, have arrived in the current phase.
        given_up: per warp, the last phase whose `try_wait` has given up.
        initialiser: the warp that initialised the object, and its CTA.
        visible: whether a fence has made the initialisation visible to other CTAs and the async proxy.
        loaded: the last completed phase in which they arrived; -1: there is none.
    """

    count: int
    pending: int
    transactions: int = 0
    phase: int = 0
    released: Any = None
    complete: Any = None
    seen: list[dict[int, int]] = field(default_factory=list)
    arrived: list[Any] = field(default_factory=list)
    asynchronous: bool = False
    given_up: dict[int, int] = field(default_factory=dict)
    initialiser: Warp | None = None
    visible: bool = False
    counted: bool = False
    loaded: int = -1

    def release(self, snapshot: Any) -> None:
        """Merge the vector of an arrival into the current phase."""
        self.released = snapshot if self.released is None else np.maximum(self.released, snapshot)

    def arrive(self, count: int, fail: Callable[[str], NoReturn]) -> None:
        """Count arrivals."""
        if count > self.pending:
            fail(f"mbarrier: {count} arrivals where {self.pending} of {self.count} are pending")
        self.pending -= count
        self.advance()

    def advance(self) -> None:
        """Start the next phase if the current one is complete."""
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.count
            self.complete = self.released
            self.seen.append({})
            self.arrived.append(None if self.asynchronous else self.released)
            if self.counted:
                self.loaded = self.phase - 1
            self.asynchronous = self.counted = False

    def expect(self, count: int, fail: Callable[[str], NoReturn]) -> None:
        """Add ``count`` bytes to those that the current phase waits for (expect-tx operation)."""
        self.transactions += count
        self.asynchronous = True
        if abs(self.transactions) > MOST_BYTES:
            fail(f"mbarrier: a tx-count of {self.transactions} bytes; its range ends at {MOST_BYTES}")

    def count_bytes(self, count: int, fail: Callable[[str], NoReturn]) -> None:
        """Count bytes that have arrived (complete-tx operation)."""
        self.expect(-count, fail)
        self.counted = True
        if self.pending == 0 and self.transactions < 0:
            fail(f"mbarrier: {-self.transactions} more bytes than it expects have arrived")
        self.advance()

    def known(self, clock: Clock) -> int:
        """Return how many phases the warp of ``clock`` knows to be complete.

        The warp knows it if it observed the completion, or if it is ordered behind a warp that did, or behind all arrivals
        of the phase.
        """
        for number in reversed(range(self.phase)):
            if any(w == clock.index or clock.known[w] >= at for w, at in self.seen[number].items()):
                return number + 1
            if (arrived := self.arrived[number]) is not None:
                behind = arrived[: clock.warps] > clock.known[: clock.warps]
                behind[clock.index] = False
                if not behind.any():
                    return number + 1
        return 0


@dataclass
class NamedBarrier:
    """A barrier of a CTA (`bar`, `barrier.cta`).

    Attributes:
        arrived: threads that have arrived.
        expected: threads that the barrier waits for.
        phase: completions so far.
        released: merged vectors of the arrivals.
        complete: ``released`` of the last completion.
        votes: true and false predicates of `bar.red` so far; ``result``: those of the last completion.
        lanes: per warp, the lanes that have arrived where not all of them have (`barrier` without `.aligned`).
    """

    arrived: int = 0
    expected: int = 0
    phase: int = 0
    released: Any = None
    complete: Any = None
    votes: tuple[int, int] = (0, 0)
    result: tuple[int, int] = (0, 0)
    lanes: dict[int, int] = field(default_factory=dict)


@dataclass
class Fragment:
    """Lanes with one program counter.

    Attributes:
        pc: index of the next instruction.
        lanes: the set of lanes.
        wait: what the fragment waits for; None: it can run.
        seen: `Machine.changes` at its last poll.
        polls: polls since memory last changed.
    """

    pc: int
    lanes: int
    wait: Wait | Converge | None = None
    seen: int = -1
    polls: int = 0

    def resume(self, wait: Wait) -> None:
        """End a wait that is over."""
        self.wait, self.seen = None, -1
        self.pc += not wait.again


class Effects(Protocol):
    """What an instruction does to registers.

    Attributes:
        reads, writes: the registers that it reads and writes.
        relaxed: whether it may access registers of a wgmma in flight.
        pure: whether it only computes registers from registers, lane by lane.
    """

    @property
    def reads(self) -> frozenset[int]: ...
    @property
    def writes(self) -> frozenset[int]: ...
    @property
    def relaxed(self) -> bool: ...
    @property
    def pure(self) -> bool: ...


@dataclass(frozen=True)
class Program:
    """A decoded kernel.

    Attributes:
        name: of the entry.
        code: per instruction, a function of a warp and the active lanes. It returns None (continue with the next
            instruction), (target, lanes) for a taken branch, or a `Wait`, `CONVERGE`, `POLL` or `EXIT`.
        lines, texts: per instruction, its 1-based line and its text.
        registers: initial value of each register. Constants are registers that nothing writes.
        unknown: per register, the set of lanes that are undefined at the start.
        specials: (register, function of the warp that returns its value) for each special register.
        effects: per instruction, what it does to registers.
        local_bytes: local memory of a thread, a multiple of 16.
    """

    name: str
    code: list[Callable[[Warp, int], Any]]
    lines: list[int]
    texts: list[str]
    registers: list[Any]
    unknown: list[int]
    specials: list[tuple[int, Callable[[Warp], Any]]]
    effects: Sequence[Effects]
    local_bytes: int = 0

    @cached_property
    def sections(self) -> int:
        """Sections of a vector of `races.Clock`. Only programs with an async proxy or tensor cores need more than one."""
        needing = ("tcgen05.", "wgmma.", "fence.proxy", "cp.async.bulk", "cp.reduce")
        texts = "\n".join(self.texts)
        return SECTIONS if any(name in texts for name in needing) else 1

    @cached_property
    def transitive(self) -> bool:
        """`races.Clock.transitive`: no asynchronous operation arrives at an mbarrier with the vector of its issue alone."""
        arriving = ("mbarrier::complete_tx", "cp.async.mbarrier.arrive", "st.async", "red.async")
        texts = "\n".join(self.texts)
        return not any(name in texts for name in arriving)


class Warp:
    """A warp of 32 lanes.

    Attributes:
        number: index in the CTA.
        alive: the lanes that have not ended.
        regs: per register, an array of 32 unsigned words, or an int (a set of lanes) for a predicate. Arrays are never
            changed in place.
        unknown: per register, the set of lanes whose value is undefined.
        packed: registers whose bytes differ in state: the array that the entry describes, and per byte the set of undefined
            lanes. The entry is void once the register holds another array.
        pc: index of the executing instruction.
        arrived: `Cluster.generation` at this warp's arrival at the cluster barrier; None between a wait and an arrival.
        group, copies: of non-bulk `cp.async`: the current group of each lane, and the copies that may be pending.
        bulk_group, bulk: of bulk copies to global memory: the current bulk group of each lane, and the stores that no
            `wait_group` has covered.
        tensor_loads, tensor_stores: words of tensor memory of `tcgen05.ld` and `.st` before their wait.
        flight: registers of a wgmma or `tcgen05.ld` in flight, with their group: that of the wgmma, `LOADING`, or `DERIVED`.
        operands: (group, number of `Issuer`, check that the operands are unchanged) of wgmmas in flight.
        wgmma_group: the current wgmma group.
        registers: the operands of its `setmaxnreg` so far.
        fenced: all registers at the last `wgmma.fence`.
    """

    def __init__(self, cta: Cta, number: int, alive: int):
        program = cta.machine.program
        self.cta, self.machine, self.number, self.alive = cta, cta.machine, number, alive
        self.clock = Clock(
            cta.number * cta.width + number,
            cta.machine.total * cta.width,
            cta.machine.sections,
            program.transitive,
        )
        self.machine.proxy_fences[self.clock.index] = self.clock.fences
        self.program = program
        self.packed: dict[int, tuple[Any, list[int]]] = {}
        self._start_registers()
        for slot, value in program.specials:
            self.regs[slot], self.unknown[slot] = value(self), 0
        self.pc = 0
        self.arrived: int | None = None
        self.fragments = [Fragment(0, alive)]
        self.group = np.zeros(32, np.int64)
        self.copies: list[Any] = []
        self.bulk_group = np.zeros(32, np.int64)
        self.bulk: list[Any] = []
        self.tensor_loads: list[Any] = []
        self.tensor_stores: list[Any] = []
        self.set_flight({})
        self.operands: list[tuple[int, int, Callable[[], None]]] = []
        self.wgmma_group = 0
        self.registers: list[int] = []
        self.fenced: list[Any] | None = None

    @cached_property
    def issuer(self) -> Issuer:
        """The warp's tensor core instructions, for the race check."""
        return Issuer(self)

    @cached_property
    def local(self) -> Region:
        """Local memory: that of lane n follows that of lane n - 1."""
        return local_region(self.program.local_bytes)

    def set_flight(self, registers: dict[int, int]) -> None:
        """Replace `flight`."""
        self.flight = registers

    def fail(self, message: str) -> NoReturn:
        """Raise an `ExecutionError` for the executing instruction."""
        line, text = self.program.lines[self.pc], self.program.texts[self.pc]
        raise ExecutionError(message, self.program.name, self.cta.number, self.number, line, text)

    def _start_registers(self) -> None:
        """Create the registers."""
        self.regs, self.unknown = list(self.program.registers), list(self.program.unknown)

    def advance(self, pc: int, lanes: int, stop: int, budget: int) -> tuple[int, int, bool]:
        """Execute instructions that need no closure, as many as there are.

        Args:
            stop: the instruction at which the fragment has to merge; -1: there is none.

        Returns:
            The next instruction, what is left of the budget, and whether the fragment has to merge.
        """
        return pc, budget, False

    def put(self, slot: int, value: Any, unknown: int, lanes: int) -> None:
        """Write ``lanes`` of a register. ``value``: 32 unsigned words; ``unknown``: the lanes that become undefined."""
        if lanes == FULL:
            self.regs[slot], self.unknown[slot] = value, unknown
        else:
            self.regs[slot] = np.where(BOOLS[lanes], value, self.regs[slot])
            self.unknown[slot] = unknown & lanes | self.unknown[slot] & ~lanes

    def put_predicate(self, slot: int, value: int, unknown: int, lanes: int) -> None:
        """Write ``lanes`` of a predicate. ``value``: the set of lanes where it is true; ``unknown``: as in `put`."""
        self.regs[slot] = value & lanes | self.regs[slot] & ~lanes
        self.unknown[slot] = unknown & lanes | self.unknown[slot] & ~lanes

    def unknown_bytes(self, slot: int) -> list[int]:
        """Return for each byte of a register, lowest first, the set of lanes where it is undefined."""
        value, (array, unknown) = self.regs[slot], self.packed.get(slot, (None, []))
        return unknown if array is value else [self.unknown[slot]] * value.itemsize

    def put_bytes(self, slot: int, value: Any, unknown: list[int], lanes: int) -> None:
        """`put` for bytes that were moved unchanged. ``unknown``: per byte, the lanes where it is undefined."""
        if any(unknown) or self.unknown[slot]:
            before = self.unknown_bytes(slot)
            unknown = [new & lanes | old & ~lanes for new, old in zip(unknown, before)]
            self.put(slot, value, functools.reduce(operator.or_, unknown), lanes)
            self.packed[slot] = self.regs[slot], unknown
        else:
            self.put(slot, value, 0, lanes)

    def fence_registers(self) -> None:
        """`wgmma.fence`: note the values of all registers."""
        self.fenced = list(self.regs)

    def written_since_fence(self, slots: list[int]) -> bool:
        """Return whether one of these registers was written after the last `wgmma.fence`, other than by a wgmma."""
        return self.fenced is None or any(self.regs[s] is not self.fenced[s] for s in slots)

    def accumulate(self, slots: list[int]) -> None:
        """Note that a wgmma of the current group wrote these registers."""
        assert self.fenced is not None
        for slot in slots:
            self.flight[slot] = self.wgmma_group
            self.fenced[slot] = self.regs[slot]

    def values(self, slots: list[int]) -> Any:
        """Return the words [n, 32] of registers of 4 bytes."""
        return np.stack([self.regs[s] for s in slots])

    def put_all(self, slots: list[int], words: Any, unknown: list[int]) -> None:
        """`put` of registers of 4 bytes in all lanes. ``words``: [n, 32]; ``unknown``: per register."""
        for slot, word, missing in zip(slots, words, unknown):
            self.put(slot, word, missing, FULL)

    # ---- what compiled code does faster

    def product(self, left: Any, right: Any, c: Any) -> Any:
        """Return the bits of left @ right + c in fp32, as `matrices` computes it. None: nothing was done."""
        return None

    # ---- fragments

    def runnable(self) -> bool:
        """Return whether a fragment can run and would make progress.

        A fragment that polls makes progress only if memory changed. Fragments whose wait is over are resumed first.
        """
        found, changes = False, self.machine.changes
        for fragment in self.fragments:
            wait = fragment.wait
            if wait is None:
                found |= fragment.seen != changes
            elif isinstance(wait, Wait) and wait.ready():
                fragment.resume(wait)
                found = True
        return found

    def may_poll(self) -> bool:
        """Return whether a polling fragment has polls left."""
        return any(f.wait is None and f.polls < POLLS for f in self.fragments)

    def run(self, budget: int) -> None:
        """Run one fragment for up to ``budget`` instructions. At least one fragment must be runnable."""
        self._merge()
        if len(self.fragments) == 1:
            (fragment,), limit = self.fragments, -1
        else:
            fragment, limit = self._next()
        code, pc, lanes = self.program.code, fragment.pc, fragment.lanes
        self.machine.executed += budget
        while budget:
            pc, budget, merge = self.advance(pc, lanes, limit, budget)
            if merge or not budget:
                break
            budget -= 1
            self.pc = pc
            if self.flight:
                self._check_flight(pc, lanes)
            result = code[pc](self, lanes)
            if result is None:
                pc += 1
                if pc == limit:
                    break
            elif type(result) is tuple:
                target, taken = result
                if taken == lanes:
                    pc = target
                else:
                    self.fragments.append(Fragment(target, taken))
                    fragment.lanes = lanes = lanes & ~taken
                    pc += 1
                    break
                if limit >= 0 and pc >= limit:
                    break
            elif result is POLL:
                pc += 1
                fragment.polls = fragment.polls + 1 if fragment.seen == self.machine.changes else 0
                fragment.seen = self.machine.changes
                break
            elif result is EXIT:
                self.alive &= ~lanes
                self.fragments.remove(fragment)
                if not self.fragments:
                    self.cta.warp_ended()
                break
            else:
                fragment.wait = result
                break
        fragment.pc = pc
        self.machine.executed -= budget

    def _next(self) -> tuple[Fragment, int]:
        """Return the fragment that runs next, and the instruction at which it has to merge with another; -1: there is none."""
        changes = self.machine.changes
        able = [f for f in self.fragments if f.wait is None]
        fragment = min(able, key=lambda f: (f.seen == changes, f.polls if f.seen == changes else 0, f.pc))
        others = [f.pc for f in self.fragments if f is not fragment and not isinstance(f.wait, Wait)]
        return fragment, min((pc for pc in others if pc > fragment.pc), default=-1)

    def _merge(self) -> None:
        """Merge fragments with the same program counter. A merged fragment retries an instruction that lacked lanes."""
        if len(self.fragments) == 1:
            return
        found: dict[int, Fragment] = {}
        kept = []
        for fragment in self.fragments:
            other = None if isinstance(fragment.wait, Wait) else found.get(fragment.pc)
            if other is None:
                kept.append(fragment)
                if not isinstance(fragment.wait, Wait):
                    found[fragment.pc] = fragment
            else:
                other.lanes |= fragment.lanes
                other.wait = None
        self.fragments = kept

    def stuck(self) -> bool:
        """Return whether all fragments wait for each other's lanes, at different instructions.

        A single fragment that has all remaining lanes is resumed: it waited for lanes that have ended.
        """
        self._merge()
        waiting = [f for f in self.fragments if isinstance(f.wait, Converge)]
        if not waiting or len(waiting) < len(self.fragments):
            return False
        if len(waiting) == 1 and waiting[0].lanes == self.alive:
            waiting[0].wait = None
            return False
        return True

    def waits(self) -> str:
        """Describe what each fragment waits for."""
        parts = []
        for f in self.fragments:
            line, text = self.program.lines[f.pc], self.program.texts[f.pc]
            if isinstance(f.wait, Wait):
                why = f.wait.reason
            else:
                why = "lanes that never arrive" if f.wait else "a change of memory that never happens"
            parts.append(f"lanes {f.lanes:08x} at PTX line {line} ({text[:60]}) wait for {why}")
        return "; ".join(parts)

    def _check_flight(self, pc: int, lanes: int) -> None:
        """Check that the next instruction accesses no register of an instruction in flight.

        Computing with registers that a `tcgen05.ld` fills is no error: the results are then in flight as well. LLVM moves such
        instructions before the wait, and the assembler knows what they depend on.
        """
        flight, effects = self.flight, self.program.effects[pc]
        if effects.relaxed:
            return
        read, written = effects.reads, effects.writes
        if read.isdisjoint(flight) and written.isdisjoint(flight):
            return
        groups = {flight[slot] for slot in read & flight.keys()}
        if effects.pure and groups <= {LOADING, DERIVED}:
            groups = {flight[slot] for slot in written & flight.keys()}
            if groups <= {DERIVED}:
                derived = not read.isdisjoint(flight)
                whole = lanes == self.alive and not self.program.texts[pc].startswith("@")
                for slot in written:
                    if derived:
                        flight[slot] = DERIVED
                    elif whole:
                        flight.pop(slot, None)
                return
        else:
            groups |= {flight[slot] for slot in written & flight.keys()}
        if groups & {LOADING, DERIVED}:
            self.fail("a register of a tcgen05.ld in flight is accessed before its wait (tcgen05.wait::ld)")
        self.fail("a register of a wgmma in flight is accessed before its wait (wgmma.wait_group)")


class Cta:
    """A CTA: its shared memory, tensor memory, barriers and warps.

    Attributes:
        number: linear index in the grid; ``index``: the same as (x, y, z).
        place: (x, y, z) in the cluster; ``rank``: the same as a linear index.
        fences: per state space, `Machine.clock` at the last `fence.proxy.async` of a thread of this CTA.
        barriers: by number.
        mbarriers: by address in shared memory.
        tensor_memory: `tensor_memory.TensorMemory`, created on first use.
        wgmmas: per warpgroup, the instruction and the descriptors of each wgmma.
        acquired_maps: per address, `Machine.clock` at the last `fence.proxy.tensormap::generic.acquire` of that tensor map.
        incoming: bulk copies in flight that write its shared memory.
        width: warps of the CTA.
        live: warps that have not ended.
    """

    def __init__(
        self,
        machine: Machine,
        number: int,
        index: tuple[int, int, int],
        cluster: Cluster,
        place: tuple[int, int, int],
    ):
        self.machine, self.number, self.index = machine, number, index
        self.cluster, self.place, self.rank = cluster, place, len(cluster.ctas)
        self.shared: Region = shared_region(machine.shared_bytes, self.rank)
        self.fences = {"shared": 0, "global": 0}
        self.barriers: dict[int, NamedBarrier] = {}
        self.mbarriers: dict[int, Mbarrier] = {}
        self.tensor_memory: Any = None
        self.acquired_maps: dict[int, int] = {}
        self.incoming = 0
        self.wgmmas: dict[int, list[Any]] = {}
        if machine.races:
            self.shared.shadow = Shadow(self.shared)
        threads = machine.block[0] * machine.block[1] * machine.block[2]
        self.width = -(-threads // 32)
        self.warps: list[Warp] = []
        for warp in range(self.width):
            alive = FULL if (warp + 1) * 32 <= threads else (1 << threads % 32) - 1
            self.warps.append(machine.warp_type(self, warp, alive))
        self.live = len(self.warps)

    def peer(self, rank: int, fail: Callable[[str], NoReturn]) -> Cta:
        """Return a CTA of the cluster; call ``fail`` if there is none of this rank, or if it has ended."""
        if rank >= len(self.cluster.ctas):
            fail(f"shared memory of rank {rank} of a cluster of {len(self.cluster.ctas)} CTAs is accessed")
        found = self.cluster.ctas[rank]
        if not found.live:
            fail(
                f"shared memory of CTA {found.number}, rank {rank} of the cluster, is accessed, but that CTA has ended"
            )
        return found

    def window(self, rank: int, fail: Callable[[str], NoReturn]) -> Region:
        """Return the shared memory of a CTA of the cluster."""
        return self.shared if rank == self.rank else self.peer(rank, fail).shared

    def warp_ended(self) -> None:
        """Count a warp that has ended. The last one checks that bulk copies were waited for and tensor memory was freed."""
        self.live -= 1
        self.machine.live = None
        if self.live == 0:
            for warp in self.warps:
                if any(not one.was_awaited for one in warp.bulk):
                    warp.fail(
                        "the CTA ends while a bulk copy may still read its shared memory: nothing has waited (wait_group)"
                    )
            self._check_loads()
            alike = "setmaxnreg" not in self.machine.assume
            for first in range(0, self.width if alike else 0, 4):
                for warp in self.warps[first : first + 4]:
                    if warp.registers != self.warps[first].registers:
                        warp.fail(
                            f"setmaxnreg: all warps of a warpgroup must execute the same ones, but warp {first} executed "
                            f"{self.warps[first].registers} and warp {warp.number} {warp.registers}"
                        )
            if self.tensor_memory is not None and (self.tensor_memory.owner >= 0).any():
                self.warps[0].fail("the CTA ends and has not freed its tensor memory (tcgen05.dealloc)")
            self.machine.cta_ended(self)
            self.free()

    def free(self) -> None:
        """Break the reference cycles of the CTA, so that its memory is freed at once when the CTA has ended.

        Python's garbage collector comes late: it counts objects, of which the DSL makes millions, and not bytes.
        """
        self.live, self.warps, self.mbarriers = 0, [], {}
        if not any(cta.live for cta in self.cluster.ctas):
            self.cluster.ctas = []

    def _check_loads(self) -> None:
        """Check that the CTA has observed the arrival of all bytes that copies write to its shared memory, and of all commits of tcgen05 if
        the machine checks them."""
        unseen = any(
            barrier.counted or (barrier.loaded >= 0 and not any(barrier.seen[barrier.loaded :]))
            for barrier in self.mbarriers.values()
        )
        queued = self.machine.commits and self.tensor_memory is not None and self.tensor_memory.queue
        if self.incoming or queued or unseen:
            what = "a bulk copy or a tcgen05.commit" if self.machine.commits else "a bulk copy"
            self.warps[0].fail(
                f"the CTA ends while {what} may still write its shared memory: nothing has waited for its mbarrier"
            )


class Cluster:
    """A cluster: its CTAs, and the state of `barrier.cluster`.

    Attributes:
        index: (x, y, z) in the grid of clusters.
        ctas: by rank.
        arrived: warps that have arrived at the barrier.
        generation: completions of the barrier.
        released: merged vectors of the arrivals.
        complete: ``released`` of the last completion.
        declined: whether a `clusterlaunchcontrol.try_cancel` has found no cluster.
    """

    def __init__(self, index: tuple[int, int, int]):
        self.index = index
        self.ctas: list[Cta] = []
        self.arrived: set[Warp] = set()
        self.generation = 0
        self.released: Any = None
        self.complete: Any = None
        self.declined = False

    def arrive(self, warp: Warp, snapshot: Any) -> None:
        """Record an arrival. ``snapshot``: its vector; None: the arrival is relaxed."""
        self.arrived.add(warp)
        if snapshot is not None:
            self.released = snapshot if self.released is None else np.maximum(self.released, snapshot)
        self.advance()

    def advance(self) -> None:
        """Complete the barrier if all warps that have not ended have arrived."""
        if self.arrived and all(w in self.arrived for cta in self.ctas for w in cta.warps if w.fragments):
            self.arrived = set()
            self.generation += 1
            self.complete, self.released = self.released, None


@dataclass
class Machine:
    """One launch.

    Attributes:
        shared_bytes: shared memory of a CTA, static and dynamic.
        resident: CTAs that are on the device at once.
        cluster: extents of a cluster in CTAs.
        races: whether shared and tensor memory are checked for races.
        commits: whether a CTA must observe the arrivals of its commits.
        assume: see `launch.run`.
        changes: counts changes that other warps may see.
        clock: counts writes of the generic proxy and proxy fences.
        fences: per CTA, ended ones included, ``clock`` at its last `fence.proxy.async` for global memory.
        executed: warp instructions.
        pending: completions of asynchronous operations.
        ctas: those on the device.
        clusters: those that have not started, the next one last.
        live: the warps on the device that have not ended; None: to be listed again. The next four attributes have their places in the list.
        able: in ascending order, those of one fragment that can run. They remain able until they run.
        split: those of several fragments.
        asked: those of one fragment that are asked before each turn whether they can run.
        waiting: those of one fragment that wait for a later phase of a barrier, with the barrier and its phase.
        proxy_fences: `races.Clock.fences` of the warps that have started, by their index.
        releases: per word that a strong access wrote, the vector that it published. The key is (CTA, address); the CTA is -1
            for global memory.
        part: the clusters that this process executes.
        warp_type, compiled, map: `Warp`; or `compiled.warp.CompiledWarp`, with the compiled program and its map of memory.
    """

    program: Program
    memory: GlobalMemory
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: Region
    seed: int
    resident: int
    cluster: tuple[int, int, int]
    races: bool
    commits: bool
    assume: frozenset[str] = frozenset()
    changes: int = 0
    clock: int = 0
    fences: dict[int, int] = field(default_factory=dict)
    executed: int = 0
    pending: list[Callable[[], None]] = field(default_factory=list)
    ctas: list[Cta] = field(default_factory=list)
    clusters: list[tuple[int, int, int]] = field(default_factory=list)
    live: list[Warp] | None = None
    able: list[int] = field(default_factory=list)
    split: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    waiting: dict[tuple[int, int], tuple[Mbarrier | NamedBarrier, int, list[int]]] = field(
        default_factory=dict
    )
    proxy_fences: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    releases: dict[tuple[int, int], Any] = field(default_factory=dict)
    part: slice = field(default_factory=lambda: slice(None))
    warp_type: type[Warp] = Warp
    compiled: Any = None
    map: Any = None

    @cached_property
    def choices(self) -> random.Random:
        """Decides what a device may choose within an instruction."""
        return random.Random(self.seed)

    @property
    def sections(self) -> int:
        """Sections of a vector of `races.Clock`."""
        return self.program.sections

    @property
    def total(self) -> int:
        """The number of CTAs of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def places(self) -> list[tuple[int, int, int]]:
        """Return the indices of all clusters, in the order in which they start."""
        return _places([g // c for g, c in zip(self.grid, self.cluster)])

    def cancel(self) -> tuple[int, ...] | None:
        """Cancel the next cluster that has not started. Return the index of its first CTA; None: all have started."""
        return tuple(n * c for n, c in zip(self.clusters.pop(), self.cluster)) if self.clusters else None

    def cta_ended(self, cta: Cta) -> None:
        """Remove a CTA from the device."""
        self.ctas.remove(cta)

    def run(self) -> None:
        """Run until all CTAs have ended and all asynchronous operations are complete."""
        try:
            self._run()
        finally:  # after an error, too: its traceback holds this object
            self.pending.clear()
            self.live, self.waiting = None, {}
            for cta in self.ctas:
                cta.free()
            self.ctas.clear()

    def _run(self) -> None:
        rng = random.Random(self.seed)
        changes, since = 0, 0
        size = self.cluster[0] * self.cluster[1] * self.cluster[2]
        self.clusters = self.places()[self.part][::-1]
        while True:
            if self.changes != changes:
                changes, since = self.changes, self.executed
            elif self.executed - since > ENDLESS:
                self._deadlock()
            while self.clusters and len(self.ctas) + size <= max(self.resident, size):
                self._start(self.clusters.pop())
            if not self.ctas:
                break
            if self.pending and rng.random() < 0.25:
                self._complete(rng)
            ready = self._ready()
            if ready:
                self._take(rng.choice(ready)).run(rng.randint(1, QUANTUM))
            elif self.pending:
                self._complete(rng)
            elif not self._released():
                polling = [w for cta in self.ctas for w in cta.warps if w.may_poll()]
                if not polling:
                    self._deadlock()
                self.live = None
                rng.choice(polling).run(rng.randint(1, QUANTUM))
        while self.pending:
            self._complete(rng)

    def _ready(self) -> list[int]:
        """Return the places in `live` of the warps that are `Warp.runnable`, in ascending order.

        This is done for each turn, so only warps are asked whose answer may have changed.
        """
        live = self.live
        if live is None:
            live = self.live = [warp for cta in self.ctas for warp in cta.warps if warp.fragments]
            self.able, self.split, self.asked, self.waiting = [], [], list(range(len(live))), {}
        for key in [key for key, (barrier, phase, _) in self.waiting.items() if barrier.phase != phase]:
            self.asked += self.waiting.pop(key)[2]
        asked, changes, self.asked = sorted(self.asked), self.changes, []
        for n in asked:
            fragments = live[n].fragments
            if len(fragments) > 1:
                self.split.append(n)
                continue
            (fragment,) = fragments
            wait = fragment.wait
            if wait is None:
                ready = fragment.seen != changes
            elif isinstance(wait, Converge):
                ready = False
            elif wait.barrier is not None and wait.barrier.phase == wait.phase:
                key = id(wait.barrier), wait.phase
                self.waiting.setdefault(key, (wait.barrier, wait.phase, []))[2].append(n)
                continue
            elif ready := wait.ready():
                fragment.resume(wait)
            if ready:
                insort(self.able, n)
            else:
                self.asked.append(n)
        if not self.split:
            return self.able
        return sorted([*self.able, *(n for n in self.split if live[n].runnable())])

    def _take(self, n: int) -> Warp:
        """Return the warp at a place in `live`, which runs now. It is asked before the next turn."""
        assert self.live is not None
        warp = self.live[n]
        (self.split if len(warp.fragments) > 1 else self.able).remove(n)
        self.asked.append(n)
        return warp

    def _start(self, index: tuple[int, int, int]) -> None:
        """Start the CTAs of a cluster."""
        cluster = Cluster(index)
        for place in _places(self.cluster):
            x, y, z = (i * c + n for i, c, n in zip(index, self.cluster, place))
            number = (z * self.grid[1] + y) * self.grid[0] + x
            cluster.ctas.append(Cta(self, number, (x, y, z), cluster, place))
        self.ctas += cluster.ctas
        self.live = None

    def _complete(self, rng: random.Random) -> None:
        """Complete a random asynchronous operation."""
        self.pending.pop(rng.randrange(len(self.pending)))()
        self.changes += 1

    def _released(self) -> bool:
        """Return whether a fragment was resumed because the lanes that it waited for have ended."""
        released = False
        for warp in (w for cta in self.ctas for w in cta.warps if w.fragments):
            before = [f.wait for f in warp.fragments]
            if warp.stuck():
                warp.pc = warp.fragments[0].pc
                warp.fail(f"lanes diverged for good, and each part waits for the others: {warp.waits()}")
            released |= before != [f.wait for f in warp.fragments]
        self.live = None
        return released

    def _deadlock(self) -> NoReturn:
        lines = [
            f"  CTA {w.cta.number}, warp {w.number}: {w.waits()}"
            for cta in self.ctas
            for w in cta.warps
            if w.fragments
        ]
        raise ExecutionError("deadlock: no warp can continue\n" + "\n".join(lines), self.program.name)


def _places(extents: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return all (x, y, z) within the extents, x fastest."""
    x, y, z = extents
    return [(n % x, n // x % y, n // (x * y)) for n in range(x * y * z)]
