"""Who runs when: CTAs, warps, and the fragments into which a warp diverges.

A fragment is a set of lanes with one program counter. Of a warp's fragments that can run, the one with the
lowest counter does; fragments that meet are one again. Warps run for a random number of instructions, in an
order that a seed decides; so does when asynchronous copies end, unless something waits for them.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from ptx_emulator.errors import ExecutionError
from ptx_emulator.lanes import BOOLS, FULL
from ptx_emulator.memory import CTA_BITS, GlobalMemory, Region, local_region, shared_region
from ptx_emulator.races import Clock, Shadow

POLLS = 256  # a warp's looks at memory that nothing has changed, after which they count as endless
QUANTUM = 400  # instructions of a turn, at most
ENDLESS = 5_000_000  # instructions without a change that another warp could see


@dataclass
class Wait:
    """A fragment goes on when ``ready``: with the same instruction (``again``), or with the next one."""

    ready: Callable[[], bool]
    reason: str
    again: bool


class Converge:
    """An instruction needs lanes that are elsewhere."""


class Poll:
    """The next instruction, after others have had their turn."""


class Exit:
    """The lanes end."""


CONVERGE, POLL, EXIT = Converge(), Poll(), Exit()


@dataclass
class Mbarrier:
    """An mbarrier object. ``phase`` counts those that are complete."""

    count: int
    pending: int
    transactions: int = 0
    phase: int = 0
    released: Any = None  # what those know that have arrived; in `complete` of phases that are
    complete: Any = None
    # Of each complete phase: who saw that, and when by its clock; and what those know that arrived, unless copies take part.
    seen: list[dict[int, int]] = field(default_factory=list)
    arrived: list[Any] = field(default_factory=list)
    asynchronous: bool = False  # copies take part in this phase

    def release(self, snapshot: Any) -> None:
        self.released = snapshot if self.released is None else np.maximum(self.released, snapshot)

    def arrive(self, count: int, fail: Callable[[str], NoReturn]) -> None:
        if count > self.pending:
            fail(f"mbarrier: {count} arrivals where {self.pending} of {self.count} are pending")
        self.pending -= count
        self.advance()

    def advance(self) -> None:
        """To the next phase, if this one is complete."""
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.count
            self.complete = self.released
            self.seen.append({})
            self.arrived.append(None if self.asynchronous else self.released)
            self.asynchronous = False

    def expect(self, count: int) -> None:
        """Bytes."""
        self.transactions += count
        self.asynchronous = True

    def count_bytes(self, count: int, fail: Callable[[str], NoReturn]) -> None:
        """They have come."""
        self.expect(-count)
        if self.pending == 0 and self.transactions < 0:
            fail("mbarrier: more bytes than it expects")
        self.advance()

    def known(self, clock: Clock) -> int:
        """How many phases a warp knows to be complete, because its view of the others says so."""
        for number in reversed(range(self.phase)):
            if any(w == clock.index or clock.known[w] >= at for w, at in self.seen[number].items()):
                return number + 1
            if (arrived := self.arrived[number]) is not None:
                behind = arrived > clock.known
                behind[clock.index] = False
                if not behind.any():
                    return number + 1
        return 0


@dataclass
class NamedBarrier:
    """A barrier of a CTA: threads that have come, of how many; ``generation`` counts completions."""

    come: int = 0
    expected: int = 0
    generation: int = 0
    released: Any = None
    complete: Any = None


@dataclass
class Fragment:
    """``seen``: what `Machine.changes` was at its last look at memory; ``polls``: looks since then."""

    pc: int
    lanes: int
    wait: Wait | Converge | None = None
    seen: int = -1
    polls: int = 0


@dataclass(frozen=True)
class Program:
    """A decoded kernel. ``code[pc]`` takes a warp and the active lanes; what it returns is None (go on), a
    (target, lanes) of a branch, or one of the objects above. ``registers``: what they hold at first,
    constants in place; ``unknown``: the lanes of each that hold nothing. ``specials``: (register, what gives
    its value for a warp). ``reads``, ``writes``: registers of each instruction. ``relaxed``: the instructions
    that may touch registers of wgmmas in flight."""

    name: str
    code: list[Callable[[Warp, int], Any]]
    lines: list[tuple[int, str]]
    registers: list[Any]
    unknown: list[int]
    specials: list[tuple[int, Callable[[Warp], Any]]]
    reads: list[frozenset[int]]
    writes: list[frozenset[int]]
    relaxed: list[bool]
    local_bytes: int = 0  # of a thread, a multiple of 16


class Warp:
    """32 lanes. ``regs``: arrays of 32 unsigned words, which are never changed in place, and ints for
    predicates; ``unknown``: for each register the lanes whose value is not known. ``packed``: the same of each
    byte, where they differ, with the array that it was said of: whatever else is put there ends it."""

    def __init__(self, cta: Cta, number: int, alive: int):
        program = cta.machine.program
        self.cta, self.machine, self.number, self.alive = cta, cta.machine, number, alive
        self.clock = Clock(cta.number * cta.width + number, cta.machine.total * cta.width)
        self.program = program
        self.regs, self.unknown = list(program.registers), list(program.unknown)
        for slot, value in program.specials:
            self.regs[slot], self.unknown[slot] = value(self), 0
        self.packed: dict[int, tuple[Any, list[int]]] = {}
        self.pc = 0
        self.arrived: int | None = None  # at the barrier of the cluster, after so many completions
        self.fragments = [Fragment(0, alive)]
        # Non-bulk asynchronous copies: the group that each lane fills, and copies of groups that nothing has
        # waited for.
        self.group = np.zeros(32, np.int64)
        self.copies: list[Any] = []
        # Bulk copies to global memory: the group that each lane fills, and those that have not been waited for.
        self.bulk_group = np.zeros(32, np.int64)
        self.bulk: list[Any] = []
        # tcgen05: words of tensor memory that are loaded and stored, and that nothing has waited for.
        self.tensor_loads: list[Any] = []
        self.tensor_stores: list[Any] = []
        # wgmma: registers in flight, with their group; what has to stay as it is, by group; the open group.
        self.flight: dict[int, int] = {}
        self.operands: list[tuple[int, Callable[[], None]]] = []
        self.wgmma_group = 0
        self.fenced: list[Any] | None = None

    @cached_property
    def local(self) -> Region:
        """Local memory of its threads, one after the other."""
        return local_region(self.program.local_bytes)

    def fail(self, message: str) -> NoReturn:
        """Raise for the instruction that is executing."""
        line, text = self.program.lines[self.pc]
        raise ExecutionError(message, self.program.name, self.cta.number, self.number, line, text)

    def put(self, slot: int, value: Any, unknown: int, lanes: int) -> None:
        """An array of unsigned words to a register."""
        if lanes == FULL:
            self.regs[slot], self.unknown[slot] = value, unknown
        else:
            self.regs[slot] = np.where(BOOLS[lanes], value, self.regs[slot])
            self.unknown[slot] = unknown & lanes | self.unknown[slot] & ~lanes

    def put_predicate(self, slot: int, value: int, unknown: int, lanes: int) -> None:
        """A set of lanes to a predicate."""
        self.regs[slot] = value & lanes | self.regs[slot] & ~lanes
        self.unknown[slot] = unknown & lanes | self.unknown[slot] & ~lanes

    def unknown_bytes(self, slot: int) -> list[int]:
        """For each byte of a register, lowest first, the lanes whose value is not known."""
        value, (array, unknown) = self.regs[slot], self.packed.get(slot, (None, []))
        return unknown if array is value else [self.unknown[slot]] * value.itemsize

    def put_bytes(self, slot: int, value: Any, unknown: list[int], lanes: int) -> None:
        """`put` of bytes that were moved as they are: each stays as known as it was."""
        if any(unknown) or self.unknown[slot]:
            before = self.unknown_bytes(slot)
            unknown = [new & lanes | old & ~lanes for new, old in zip(unknown, before)]
            self.put(slot, value, functools.reduce(operator.or_, unknown), lanes)
            self.packed[slot] = self.regs[slot], unknown
        else:
            self.put(slot, value, 0, lanes)

    # ---- fragments

    def runnable(self) -> bool:
        """Whether some fragment can go on and would see something new; wakes those that have what they waited
        for."""
        found, changes = False, self.machine.changes
        for fragment in self.fragments:
            wait = fragment.wait
            if wait is None:
                found |= fragment.seen != changes
            elif isinstance(wait, Wait) and wait.ready():
                fragment.wait = None
                fragment.pc += not wait.again
                fragment.seen = -1
                found = True
        return found

    def patient(self) -> bool:
        """Whether a fragment that waits for a change of memory may look again."""
        return any(f.wait is None and f.polls < POLLS for f in self.fragments)

    def run(self, budget: int) -> None:
        """Up to ``budget`` instructions of one fragment; one of them is runnable."""
        self._merge()
        changes = self.machine.changes
        able = [f for f in self.fragments if f.wait is None]
        fragment = min(able, key=lambda f: (f.seen == changes, f.polls if f.seen == changes else 0, f.pc))
        others = [f.pc for f in self.fragments if f is not fragment and not isinstance(f.wait, Wait)]
        limit = min((pc for pc in others if pc > fragment.pc), default=-1)
        code, pc, lanes = self.program.code, fragment.pc, fragment.lanes
        self.machine.executed += budget
        while budget:
            budget -= 1
            self.pc = pc
            if self.flight:
                self._check_flight(pc)
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

    def _merge(self) -> None:
        """One fragment of those at one place; it tries again what needed more lanes."""
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
        """Whether only fragments are left that need each other's lanes at different places. Lanes that have
        ended may be what they waited for."""
        self._merge()
        waiting = [f for f in self.fragments if isinstance(f.wait, Converge)]
        if not waiting or len(waiting) < len(self.fragments):
            return False
        if len(waiting) == 1 and waiting[0].lanes == self.alive:
            waiting[0].wait = None
            return False
        return True

    def waits(self) -> str:
        """What each fragment waits for, in words."""
        parts = []
        for f in self.fragments:
            line, text = self.program.lines[f.pc]
            if isinstance(f.wait, Wait):
                why = f.wait.reason
            else:
                why = "lanes that do not come" if f.wait else "a change of memory that does not come"
            parts.append(f"lanes {f.lanes:08x} at PTX line {line} ({text[:60]}): {why}")
        return "; ".join(parts)

    def _check_flight(self, pc: int) -> None:
        program = self.program
        if program.relaxed[pc]:
            return
        if not (program.reads[pc].isdisjoint(self.flight) and program.writes[pc].isdisjoint(self.flight)):
            self.fail("a register of a wgmma is touched that nothing has waited for")


class Cta:
    """A block: its shared memory, barriers and warps."""

    def __init__(
        self,
        machine: Machine,
        number: int,
        index: tuple[int, int, int],
        cluster: Cluster,
        place: tuple[int, int, int],
    ):
        """``index``: in the grid; ``place``: in the cluster."""
        self.machine, self.number, self.index = machine, number, index
        self.cluster, self.place, self.rank = cluster, place, len(cluster.ctas)
        self.shared: Region = shared_region(machine.shared_bytes)
        self.fences = {"shared": 0, "global": 0}  # when a thread last fenced towards the async proxy
        self.barriers: dict[int, NamedBarrier] = {}
        self.mbarriers: dict[int, Mbarrier] = {}
        self.tensor_memory: Any = None  # made when it is first used
        if machine.races:
            self.shared.shadow = Shadow(self.shared)
        threads = machine.block[0] * machine.block[1] * machine.block[2]
        self.width = -(-threads // 32)
        self.warps: list[Warp] = []
        for warp in range(self.width):
            alive = FULL if (warp + 1) * 32 <= threads else (1 << threads % 32) - 1
            self.warps.append(Warp(self, warp, alive))
        self.live = len(self.warps)

    def peer(self, rank: int, fail: Callable[[str], NoReturn]) -> Cta:
        """A CTA of the cluster, which has not ended."""
        if rank >= len(self.cluster.ctas):
            fail(f"rank {rank} of a cluster of {len(self.cluster.ctas)} CTAs")
        found = self.cluster.ctas[rank]
        if not found.live:
            fail(f"the shared memory of CTA {found.number} is accessed, which has ended")
        return found

    def window(self, rank: int, fail: Callable[[str], NoReturn]) -> Region:
        """Shared memory as addresses with a rank, counted from 1, see it; 0: the own one."""
        if rank == 0:
            return self.shared
        return self.peer(rank - 1, fail).shared.moved(rank << CTA_BITS)

    def warp_ended(self) -> None:
        self.live -= 1
        if self.live == 0:
            for warp in self.warps:
                if any(not one.was_awaited for one in warp.bulk):
                    warp.fail(
                        "the CTA ends, and a bulk copy may not have read its shared memory: nothing has waited"
                    )
            if self.tensor_memory is not None and (self.tensor_memory.owner >= 0).any():
                self.warps[0].fail("the CTA ends and has not freed its tensor memory")
            self.machine.cta_ended(self)


class Cluster:
    """CTAs that are on the device together, by rank, and their barrier."""

    def __init__(self, index: tuple[int, int, int]):
        self.index = index
        self.ctas: list[Cta] = []
        self.come: set[Warp] = set()  # to the barrier of the cluster
        self.generation = 0  # how often it was complete
        self.released: Any = None
        self.complete: Any = None

    def arrive(self, warp: Warp, snapshot: Any) -> None:
        self.come.add(warp)
        if snapshot is not None:
            self.released = snapshot if self.released is None else np.maximum(self.released, snapshot)
        self.advance()

    def advance(self) -> None:
        """Complete if all warps have come that have not ended."""
        if self.come and all(w in self.come for cta in self.ctas for w in cta.warps if w.fragments):
            self.come = set()
            self.generation += 1
            self.complete, self.released = self.released, None


@dataclass
class Machine:
    """One launch. ``resident``: CTAs that are on the device at once. ``changes`` counts writes that others
    may see."""

    program: Program
    memory: GlobalMemory
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: Region
    seed: int
    resident: int
    cluster: tuple[int, int, int]
    races: bool  # are looked for in shared memory
    changes: int = 0
    clock: int = 0  # counts stores and proxy fences
    fences: dict[int, int] = field(
        default_factory=dict
    )  # of each CTA, also of those that have ended, in global memory
    executed: int = 0
    pending: list[Callable[[], None]] = field(default_factory=list)  # asynchronous copies
    ctas: list[Cta] = field(default_factory=list)
    # With what a word was written by a strong access; those of shared memory by CTA.
    releases: dict[tuple[int, int], Any] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """CTAs of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def cta_ended(self, cta: Cta) -> None:
        self.ctas.remove(cta)

    def run(self) -> None:
        """To the end of all CTAs, and of what they left behind."""
        rng = random.Random(self.seed)
        started, changes, since = 0, 0, 0
        size = self.cluster[0] * self.cluster[1] * self.cluster[2]
        clusters = _places([g // c for g, c in zip(self.grid, self.cluster)])
        while True:
            if self.changes != changes:
                changes, since = self.changes, self.executed
            elif self.executed - since > ENDLESS:
                self._deadlock()
            while started < len(clusters) and len(self.ctas) + size <= max(self.resident, size):
                self._start(clusters[started])
                started += 1
            if not self.ctas:
                break
            if self.pending and rng.random() < 0.25:
                self._complete(rng)
            ready = [w for cta in self.ctas for w in cta.warps if w.fragments and w.runnable()]
            if ready:
                rng.choice(ready).run(rng.randint(1, QUANTUM))
            elif self.pending:
                self._complete(rng)
            elif not self._released():
                patient = [w for cta in self.ctas for w in cta.warps if w.patient()]
                if not patient:
                    self._deadlock()
                rng.choice(patient).run(rng.randint(1, QUANTUM))
        while self.pending:
            self._complete(rng)

    def _start(self, index: tuple[int, int, int]) -> None:
        """The CTAs of a cluster."""
        cluster = Cluster(index)
        for place in _places(self.cluster):
            x, y, z = (i * c + n for i, c, n in zip(index, self.cluster, place))
            number = (z * self.grid[1] + y) * self.grid[0] + x
            cluster.ctas.append(Cta(self, number, (x, y, z), cluster, place))
        self.ctas += cluster.ctas

    def _complete(self, rng: random.Random) -> None:
        self.pending.pop(rng.randrange(len(self.pending)))()
        self.changes += 1

    def _released(self) -> bool:
        """Whether a warp can go on because the lanes that it waited for have ended."""
        released = False
        for warp in (w for cta in self.ctas for w in cta.warps if w.fragments):
            before = [f.wait for f in warp.fragments]
            if warp.stuck():
                warp.pc = warp.fragments[0].pc
                warp.fail(f"lanes diverged for good: {warp.waits()}")
            released |= before != [f.wait for f in warp.fragments]
        return released

    def _deadlock(self) -> NoReturn:
        lines = [
            f"  CTA {w.cta.number}, warp {w.number}: {w.waits()}"
            for cta in self.ctas
            for w in cta.warps
            if w.fragments
        ]
        raise ExecutionError("deadlock: nothing can go on\n" + "\n".join(lines), self.program.name)


def _places(extents: Sequence[int]) -> list[tuple[int, int, int]]:
    """All (x, y, z), x fastest."""
    x, y, z = extents
    return [(n % x, n // x % y, n // (x * y)) for n in range(x * y * z)]
