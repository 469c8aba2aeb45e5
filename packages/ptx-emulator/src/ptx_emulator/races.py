"""The race check: a happens-before check with vector clocks over shared, global and tensor memory.

Each warp has a clock, and a vector with one entry for each warp of the launch: accesses of that warp up to this clock
happen before the next accesses of this one. The following synchronisation merges vectors:

- barriers of a CTA or a cluster, and mbarriers;
- a release and the acquire that observes it (PTX ISA, "Memory Consistency Model").

One lane is enough: the whole warp is then synchronised. Accesses of different lanes of the same warp are ordered only by
`bar.warp.sync` and by barriers of the CTA.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ptx_emulator.lanes import Array

if TYPE_CHECKING:
    from ptx_emulator.machine import Cta, Warp
    from ptx_emulator.memory import Region

SEVERAL = -2  # in place of a lane: several lanes of the warp

# Sections of a vector, behind that of the accesses of each warp (see `Clock`).
SHARED, GLOBAL, TENSOR, ORDERED = 1, 2, 3, 4
SECTIONS = 5


class Clock:
    """The vector clock of one warp.

    Attributes:
        index: the warp's index in the launch.
        now: the clock of the warp's next accesses, from 1.
        warps: of the launch.
        known: int64[sections * warps]. Accesses of warp n up to clock ``known[n]`` happen before the next accesses of this warp.
            The entry of this warp itself is about its other lanes. Further sections, of programs that need them:
            `SHARED`, `GLOBAL`: the same for accesses of the async proxy, by state space: a proxy fence lies between;
            `TENSOR`: the tensor core instructions of warp n up to this number are complete (`Issuer`);
            `ORDERED`: they are ordered before later ones, by `tcgen05.fence::before_thread_sync`.
        fences: (clock, lanes) of the proxy fences of this warp that only some of its lanes executed.
        seen: merged vectors of the releases that relaxed reads have observed since the last fence.
        fenced: the vector of the last fence. Relaxed writes publish it.
    """

    def __init__(self, index: int, warps: int, sections: int = 1):
        self.index, self.now, self.warps = index, 1, warps
        self.known = np.zeros(sections * warps, np.int64)
        self.fences: list[tuple[int, int]] = []
        self.seen: Array | None = None
        self.fenced: Array | None = None

    def release(self) -> Array:
        """Return the vector that an acquire of this release obtains, and advance the clock."""
        snapshot = self.known.copy()
        snapshot[self.index] = self.now
        self.now += 1
        return snapshot

    def synchronize(self) -> None:
        """Order the accesses so far before the next ones of all lanes of the warp."""
        self.known[self.index] = self.now
        self.now += 1

    def acquire(self, snapshot: Array | None) -> None:
        """Merge the vector of a release. The releasing lane may belong to this warp. None: nothing was released."""
        if snapshot is not None:
            np.maximum(self.known, snapshot, out=self.known)

    def proxy_fence(self, section: int, lanes: int, whole: bool) -> None:
        """`fence.proxy.async` of ``lanes`` for a state space (`SHARED`, `GLOBAL`). ``whole``: these are all lanes of the warp."""
        n = self.warps
        fenced = self.known[section * n : (section + 1) * n]
        np.maximum(fenced, self.known[:n], out=fenced)
        if whole:
            fenced[self.index] = self.now
        else:
            self.fences.append((self.now, lanes))

    def learn(self, index: int, time: int) -> None:
        """Order the accesses up to ``time`` of an index before the next ones."""
        self.known[index] = max(self.known[index], time)

    def fence(self) -> None:
        """`fence.acq_rel` or `.sc`: earlier relaxed reads become acquires, later relaxed writes become releases."""
        self.acquire(self.seen)
        self.seen, self.fenced = None, self.release()

    def read(self, order: str, snapshot: Array | None) -> None:
        """A strong read (``order``: its semantics) of a word that a strong write published with ``snapshot``."""
        if order in ("acquire", "acq_rel"):
            self.acquire(snapshot)
        elif snapshot is not None:
            self.seen = snapshot if self.seen is None else np.maximum(self.seen, snapshot)

    def write(self, order: str) -> Array | None:
        """Return the vector that a strong write (``order``: its semantics) publishes; None: no vector."""
        return self.release() if order in ("release", "acq_rel") else self.fenced


def issue_snapshot(w: Warp, clock: int) -> Array:
    """Return the vector of an asynchronous copy's completion: the issuing warp's own accesses up to ``clock``, its issue."""
    snapshot = np.zeros_like(w.clock.known)
    snapshot[w.clock.index] = clock
    return snapshot


class Issuer:
    """Stands for the asynchronous tensor core instructions of a warp, in the form of a `Warp`, in calls of `Shadow`.

    The accesses of instruction n are recorded under the number n, in the section `TENSOR`. Nobody knows that they are complete
    before a wait of wgmma or a commit of tcgen05 says so.

    Attributes:
        w: the warp.
        clock: its ``now`` is the number of the next instructions.
        last: per lane, the number of its last tcgen05 instruction; ``uncommitted``: that of the first one without a commit.
        order: section `ORDERED` at the last `tcgen05.fence::after_thread_sync`.
    """

    def __init__(self, w: Warp):
        self.w: Warp = weakref.proxy(w)  # the warp holds this object: see `machine.Cta.free`
        self.cta: Cta = weakref.proxy(w.cta)
        self.clock = Clock(TENSOR * w.clock.warps + w.clock.index, w.clock.warps)
        self.last: dict[int, int] = {}
        self.uncommitted: dict[int, int] = {}
        self.order: Array | None = None

    def fail(self, message: str) -> NoReturn:
        """`Warp.fail`."""
        self.w.fail(message)

    def start(self) -> Issuer:
        """Take over what the warp knows, before an instruction is issued. Instructions of the same warp keep their order."""
        clock, n = self.w.clock, self.clock.warps
        known = self.clock.known = clock.known.copy()
        known[clock.index], known[self.clock.index] = clock.now, self.clock.now
        if self.order is not None:
            np.maximum(
                known[TENSOR * n : (TENSOR + 1) * n], self.order, out=known[TENSOR * n : (TENSOR + 1) * n]
            )
        return self

    def issue(self, lane: int) -> None:
        """Note that a lane has issued a tcgen05 instruction."""
        if self.last.keys() - {lane}:
            self.advance()
        self.last[lane] = self.clock.now
        self.uncommitted.setdefault(lane, self.clock.now)

    def commit(self, lane: int) -> int:
        """Return up to which number the instructions are complete when a commit of ``lane`` arrives: those of this lane only."""
        if lane not in self.last:
            return 0
        self.uncommitted.pop(lane, None)
        self.advance()
        return (
            min(self.last[lane], *(number - 1 for number in self.uncommitted.values()))
            if self.uncommitted
            else self.last[lane]
        )

    def advance(self) -> int:
        """Return the number of the instructions so far; the next ones get another."""
        self.clock.now += 1
        return self.clock.now - 1


class Shadow:
    """The access history of a region: per word of 4 bytes, the last write, and the last read of each warp.

    Every access of the region is reported here with its word indices, counted from ``region.base``. The methods raise
    `ExecutionError` for a race.

    Attributes:
        generic: per word, whether the generic proxy wrote it last.
        constant: per word, whether `ld.global.nc` has read it; None: no word.
        reading: per word, the bulk copies that may still read it, because nothing has waited for them; None: no copy.
    """

    def __init__(self, region: Region):
        self.region: Region = weakref.proxy(region)  # the region holds this object
        words = -(-len(region.data) // 4)
        self.writer, self.write_lane = np.zeros(words, np.int32), np.zeros(words, np.int8)
        self.written = np.zeros(words, np.int64)
        self.generic = np.zeros(words, np.bool_)
        self.constant: Array | None = None
        self.reading: Array | None = None
        self.read: dict[int, tuple[Array, Array]] = {}

    def load(self, w: Warp | Issuer, words: Array, lanes: Any) -> None:
        """Check and record a read. ``lanes``: the lane of each word, or `SEVERAL`."""
        clock = w.clock
        if clock.index not in self.read:
            self.read[clock.index] = (
                np.zeros(len(self.written), np.int64),
                np.zeros(len(self.written), np.int8),
            )
            if self.region.map is not None:
                self.region.map.reader(clock.index, *self.read[clock.index])
        if self._compiled("load", w, words, lanes):
            return
        lanes = np.broadcast_to(lanes, words.shape)
        self._after_writes(w, words, lanes)
        times, readers = self.read[clock.index]
        again = (times[words] > clock.known[clock.index]) & (readers[words] != lanes)
        readers[words] = np.where(again, SEVERAL, lanes)
        shared = readers[words] != lanes  # several lanes read this word at once
        if shared.any():
            readers[words[shared]] = SEVERAL
        times[words] = clock.now

    def store(self, w: Warp | Issuer, words: Array, lanes: Any, generic: bool = False) -> None:
        """Check and record a write. ``lanes``: the lane of each word, or `SEVERAL`. ``generic``: it is of the generic proxy."""
        if self._compiled("store", w, words, lanes, generic):
            return
        clock, lanes = w.clock, np.broadcast_to(lanes, words.shape)
        if self.reading is not None and self.reading[words].any():
            w.fail(
                "shared memory is overwritten before a bulk copy has read it: nothing has waited for the copy "
                "(cp.async.bulk.wait_group)"
            )
        if self.constant is not None and self.constant[words].any():
            w.fail(f"{self.region.name} is written, but this kernel has read it with ld.global.nc")
        self._after_writes(w, words, lanes)
        for index, (times, readers) in self.read.items():
            late = times[words] > clock.known[index]
            if index == clock.index:
                late &= (readers[words] != lanes) | (readers[words] == SEVERAL)
            if late.any():
                self._report(w, "written", words[late][0], index, int(readers[words][late][0]), "read")
        self.writer[words], self.write_lane[words], self.written[words] = clock.index, lanes, clock.now
        self.generic[words] = generic

    def load_constant(self, w: Warp, words: Array) -> None:
        """Check and record a read by `ld.global.nc`: of data that the kernel does not write."""
        if self.written[words].any():
            w.fail(f"ld.global.nc reads {self.region.name} where this kernel has written it")
        if self.constant is None:
            self.constant = np.zeros(len(self.written), np.bool_)
            if self.region.map is not None:
                self.region.map.set("shadow_constant", self.constant)
        self.constant[words] = True

    def start_reading(self, words: Array) -> None:
        """Record that a bulk copy reads these words at some later time, until `end_reading`."""
        if self.reading is None:
            self.reading = np.zeros(len(self.written), np.int32)
            if self.region.map is not None:
                self.region.map.set("shadow_reading", self.reading)
        self.reading[words] += 1

    def end_reading(self, words: Array) -> None:
        """Record that something has waited for the copy of `start_reading`."""
        assert self.reading is not None
        self.reading[words] -= 1

    def unfenced(self, w: Warp, words: Array, section: int) -> bool:
        """Return whether writes of the generic proxy have no proxy fence between them and a read of the async proxy now.

        The fence must be one of the writing thread, or come after the write was ordered before it. ``section``: `SHARED` or `GLOBAL`.
        """
        clock, map_ = w.clock, self.region.map
        if map_ is not None and map_.checked("fenced", clock, words, 0, False, section):
            return False
        words = words[self.generic[words]]
        writers, times = self.writer[words], self.written[words]
        late = times > clock.known[section * clock.warps + writers]
        for word in np.unique(words[late]).tolist():
            index, time, lane = int(self.writer[word]), int(self.written[word]), int(self.write_lane[word])
            known = clock.known[index] if index != clock.index else clock.now
            found = w.machine.clocks[index].fences
            if not any(time <= at <= known and lane >= 0 and lanes >> lane & 1 for at, lanes in found):
                return True
        return False

    def observe(self, w: Warp | Issuer, words: Array) -> None:
        """Check a read by an asynchronous copy against the last writes, without recording it.

        Later writes are not compared with this read. A relaxed flag may tell the writer that the copy has completed; a
        write after that cannot reach the copy, although no vector orders it.
        """
        if not self._compiled("observe", w, words, SEVERAL):
            self._after_writes(w, words, np.broadcast_to(SEVERAL, words.shape))

    def _compiled(self, what: str, w: Warp | Issuer, words: Array, lanes: Any, generic: bool = False) -> bool:
        """Let compiled code do the same as a method of this class. False: nothing was done."""
        map_ = self.region.map
        return map_ is not None and map_.checked(what, w.clock, words, lanes, generic)

    def _after_writes(self, w: Warp | Issuer, words: Array, lanes: Array) -> None:
        writers = self.writer[words]
        late = self.written[words] > w.clock.known[writers]
        if late.any():
            late &= (writers != w.clock.index) | (self.write_lane[words] != lanes) | (lanes == SEVERAL)
            if late.any():
                word = words[late][0]
                self._report(
                    w, "accessed", word, int(self.writer[word]), int(self.write_lane[word]), "written"
                )

    def _report(self, w: Warp | Issuer, now: str, word: int, index: int, lane: int, before: str) -> None:
        section, index = divmod(index, w.clock.warps)
        cta, warp = divmod(index, w.cta.width)
        who = f"CTA {cta}, warp {warp}, " + (f"lane {lane}" if lane >= 0 else "several lanes")
        if section:
            who = f"a tensor core instruction of CTA {cta}, warp {warp}"
        where = f"{self.region.name}, offset {int(word) * 4 + self.region.base - self.region.low}"
        w.fail(f"a race: {where} is {now} here and was {before} by {who}; nothing orders them")
