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
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ptx_emulator.lanes import Array, address_of

if TYPE_CHECKING:
    from ptx_emulator.machine import Cta, Warp
    from ptx_emulator.memory import Region

SEVERAL = -2  # in place of a lane: several lanes of the warp
BLOCK = 128  # words of a block of `FurtherReads`; a power of 2
WHOLE = 1 << 14  # blocks of reads at most up to which warps get rows for all of a region at once
SMALL = 32  # blocks at most of a region where warps get them together

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
            The entry of this warp itself is about its other lanes. The array stays the same. Further sections, of programs that need them:
            `SHARED`, `GLOBAL`: the same for accesses of the async proxy, by state space: a proxy fence lies between;
            `TENSOR`: the tensor core instructions of warp n up to this number are complete (`Issuer`);
            `ORDERED`: they are ordered before later ones, by `tcgen05.fence::before_thread_sync`.
        known_at: the address of ``known``.
        fences: (clock, lanes) of the proxy fences of this warp that only some of its lanes executed.
        seen: merged vectors of the releases that relaxed reads have observed since the last fence.
        fenced: the vector of the last fence. Relaxed writes publish it.
        transitive: whether a warp that learns of an access of this warp also learns what this warp knew at the access. The completions of
            asynchronous operations do not pass this on: see `issue_snapshot`, `learn`.
    """

    def __init__(self, index: int, warps: int, sections: int = 1, transitive: bool = False):
        self.index, self.now, self.warps, self.transitive = index, 1, warps, transitive
        self.known = np.zeros(sections * warps, np.int64)
        self.known_at = address_of(self.known)
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
    assert not w.clock.transitive
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
        warps = w.clock.warps
        self.clock = Clock(TENSOR * warps + w.clock.index, warps, w.clock.known.size // warps)
        self.last: dict[int, int] = {}
        self.uncommitted: dict[int, int] = {}
        self.order: Array | None = None

    def fail(self, message: str) -> NoReturn:
        """`Warp.fail`."""
        self.w.fail(message)

    def start(self) -> Issuer:
        """Take over what the warp knows, before an instruction is issued. Instructions of the same warp keep their order."""
        clock, n = self.w.clock, self.clock.warps
        known = self.clock.known
        known[:] = clock.known
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


class FurtherReads:
    """The reads of a region that are in no slot of `Shadow`: of each warp its last ones, in blocks of words.

    Attributes:
        words: of the region.
        rows: by the index of a clock, per block the row of its reads in ``times`` and ``lanes``. Row 0 stays empty: it is that of blocks
            without reads.
        times, lanes: [rows, halves, `BLOCK`], by half of a word and word of a block; there is one half until `double`. Time 0: no read.
    """

    def __init__(self, words: int):
        self.words = words
        self.rows: dict[int, Array] = {}
        self.times, self.lanes = (np.zeros((2, 1, BLOCK), kind) for kind in (np.int64, np.int8))
        self._used = 1

    def places(self, index: int, cells: Array) -> Array:
        """Return where the reads of cells by a clock of ``rows`` are in ``times`` and ``lanes``, as flat arrays."""
        halves, words = np.divmod(cells, self.words)
        return (self.rows[index][words // BLOCK] * self.times.shape[1] + halves) * BLOCK + words % BLOCK

    def make_room(self, index: int, cells: Array, together: Iterable[int]) -> None:
        """Create the rows for reads of cells, and more than that, to be asked rarely.

        The first warps get the rows of all blocks of the region. If it is small, the warps ``together`` get theirs at once. Behind `WHOLE`
        blocks of reads, a warp gets the rows of the blocks of ``cells``, and of as many blocks behind these as it has rows.
        """
        count = -(-self.words // BLOCK)
        new = [index]
        if count <= SMALL:
            new += [other for other in together if other != index and other not in self.rows]
        if index not in self.rows and (len(self.rows) + len(new)) * count <= WHOLE:
            numbers = np.arange(self._used, self._used + len(new) * count, dtype=np.int32)
            self.rows |= zip(new, numbers.reshape(len(new), count))
            self._used += numbers.size
        else:
            rows = self.rows.setdefault(index, np.zeros(count, np.int32))
            blocks = np.unique(cells % self.words // BLOCK)
            behind = np.arange(blocks[-1], min(blocks[-1] + 1 + np.count_nonzero(rows), count))
            blocks = np.union1d(blocks, behind)
            blocks = blocks[rows[blocks] == 0]
            rows[blocks] = np.arange(self._used, self._used + len(blocks))
            self._used += len(blocks)
        if self._used > len(self.times):
            size = max(self._used, 2 * len(self.times), BLOCK)
            self.times, self.lanes = (_extended(x, size) for x in (self.times, self.lanes))

    def double(self) -> None:
        """Make room for reads of upper halves."""
        self.times = np.concatenate([self.times, np.zeros_like(self.times)], axis=1)
        self.lanes = np.concatenate([self.lanes, np.zeros_like(self.lanes)], axis=1)

    def take_apart(self, words: Array) -> None:
        """Give the upper halves of words the reads of the words."""
        for history in (self.times.reshape(-1), self.lanes.reshape(-1)):
            for index in self.rows:
                history[self.places(index, words + self.words)] = history[self.places(index, words)]


class Shadow:
    """The access history of a region: per cell, the last write, and the last reads.

    Every read counts until a later one of the same warp replaces it. Most cells have one reader, so each cell has a slot for one read,
    and `further` holds the others. A read takes the slot if no read is there, or one of the same warp, or one that is ordered before
    it: a write that is ordered behind the new read is then ordered behind the old one, too. That needs `Clock.transitive`.

    A cell is a word of 4 bytes. From the first access of at most 2 bytes to a word on, each half of this word has a cell of its
    own: cell n is the lower half of word n, cell ``words`` + n the upper half.

    Every access of the region is reported here with its word indices, counted from ``region.base``. ``halves``: of accesses of
    at most 2 bytes, which half of each word (0 or 1); None: the accesses cover whole words. The methods raise `ExecutionError`
    for a race.

    Attributes:
        words: the number of words.
        apart: per word, whether its halves have their own cells; None: those of no word do, and there are only ``words`` cells.
        generic: per cell, whether the generic proxy wrote it last.
        constant: per cell, whether `ld.global.nc` has read it; None: no cell.
        observed: per cell, whether an asynchronous copy has read it; None: not noted.
        reading: per cell, the bulk copies that may still read it, because nothing has waited for them; None: no copy.
        writer, write_lane, written: of the last write of each cell: the index of the clock, the lane, the time (0: no write).
        reader, read_lane, read: the same of the read in each cell's slot.
        further: the reads that are not in slots.
    """

    def __init__(self, region: Region):
        self.region: Region = weakref.proxy(region)  # the region holds this object
        self.words = words = -(-len(region.data) // 4)
        self.apart: Array | None = None
        self.writer, self.write_lane = _history(words, np.int32), _history(words, np.int8)
        self.written = _history(words, np.int64)
        self.reader, self.read_lane = _history(words, np.int32), _history(words, np.int8)
        self.read = _history(words, np.int64)
        self.generic = _history(words, np.bool_)
        self.constant: Array | None = None
        self.observed: Array | None = None
        self.reading: Array | None = None
        self.further = FurtherReads(words)

    def load(self, w: Warp | Issuer, words: Array, lanes: Any, halves: Array | None = None) -> None:
        """Check and record a read. ``lanes``: the lane of each word, or `SEVERAL`."""
        cells, lanes = self._cells(words, lanes, halves)
        if self._compiled("load", w, cells, lanes):
            return
        clock, lanes = w.clock, np.broadcast_to(lanes, cells.shape)
        self._after_writes(w, cells, lanes)
        readers, times = self.reader[cells], self.read[cells]
        mine = readers == clock.index
        free = mine | (times <= (clock.known[readers] if clock.transitive else 0))
        rest, further = cells[~free], self.further
        if rest.size:
            # The warps of the CTA, and more if many have read: those of the next CTAs, which start later.
            first = w.cta.number * w.cta.width
            end = min(first + max(w.cta.width, len(further.rows)), clock.warps)
            further.make_room(clock.index, rest, range(first, end) if clock.index < clock.warps else ())
            if self.region.map is not None:
                self.region.map.set_further(further)
                if self._compiled("load", w, cells, lanes):
                    return
        taken = cells[free & ~mine]
        self.reader[taken], self.read[taken] = clock.index, 0
        _record(clock, self.read, self.read_lane, cells[free], lanes[free])
        if rest.size:
            places = further.places(clock.index, rest)
            _record(clock, further.times.reshape(-1), further.lanes.reshape(-1), places, lanes[~free])

    def store(
        self,
        w: Warp | Issuer,
        words: Array,
        lanes: Any,
        halves: Array | None = None,
        *,
        generic: bool = False,
    ) -> None:
        """Check and record a write. ``lanes``: the lane of each word, or `SEVERAL`. ``generic``: it is of the generic proxy."""
        cells, lanes = self._cells(words, lanes, halves)
        if self._compiled("store", w, cells, lanes, generic):
            return
        clock, lanes = w.clock, np.broadcast_to(lanes, cells.shape)
        if self.reading is not None and self.reading[cells].any():
            w.fail(
                "shared memory is overwritten before a bulk copy has read it: nothing has waited for the copy "
                "(cp.async.bulk.wait_group)"
            )
        if self.constant is not None and self.constant[cells].any():
            w.fail(f"{self.region.name} is written, but this kernel has read it with ld.global.nc")
        self._after_writes(w, cells, lanes)
        earlier = self.reader[cells], self.read[cells], self.read_lane[cells]
        self._compare(w, cells, lanes, *earlier, "written", "read")
        times, readers = self.further.times.reshape(-1), self.further.lanes.reshape(-1)
        for index in self.further.rows:
            places = self.further.places(index, cells)
            self._compare(w, cells, lanes, index, times[places], readers[places], "written", "read")
        self.writer[cells], self.write_lane[cells], self.written[cells] = clock.index, lanes, clock.now
        self.generic[cells] = generic

    def load_constant(self, w: Warp, words: Array, halves: Array | None = None) -> None:
        """Check and record a read by `ld.global.nc`: of data that the kernel does not write."""
        cells, _ = self._cells(words, SEVERAL, halves)
        if self.written[cells].any():
            w.fail(f"ld.global.nc reads {self.region.name} where this kernel has written it")
        if self.constant is None:
            self.constant = self._marks(np.bool_)
            if self.region.map is not None:
                self.region.map.set("shadow_constant", self.constant)
        self.constant[cells] = True

    def start_reading(self, words: Array) -> None:
        """Record that a bulk copy reads these words at some later time, until `end_reading`."""
        if self.reading is None:
            self.reading = self._marks(np.int32)
            if self.region.map is not None:
                self.region.map.set("shadow_reading", self.reading)
        self.reading[self._cells(words, SEVERAL)[0]] += 1

    def end_reading(self, words: Array) -> None:
        """Record that something has waited for the copy of `start_reading`."""
        assert self.reading is not None
        self.reading[self._cells(words, SEVERAL)[0]] -= 1

    def unfenced(self, w: Warp, words: Array, section: int) -> bool:
        """Return whether writes of the generic proxy have no proxy fence between them and a read of the async proxy now.

        The fence must be one of the writing thread, or come after the write was ordered before it. ``section``: `SHARED` or `GLOBAL`.
        """
        clock, map_, (cells, _) = w.clock, self.region.map, self._cells(words, SEVERAL)
        if map_ is not None and map_.checked("fenced", clock, cells, 0, False, section):
            return False
        cells = cells[self.generic[cells]]
        writers, times = self.writer[cells], self.written[cells]
        late = times > clock.known[section * clock.warps + writers]
        for cell in np.unique(cells[late]).tolist():
            index, time, lane = int(self.writer[cell]), int(self.written[cell]), int(self.write_lane[cell])
            known = clock.known[index] if index != clock.index else clock.now
            found = w.machine.proxy_fences[index]
            if not any(time <= at <= known and lane >= 0 and lanes >> lane & 1 for at, lanes in found):
                return True
        return False

    def note_observed(self) -> None:
        """Note from now on which cells asynchronous copies read."""
        self.observed = self._marks(np.bool_)

    def observe(self, w: Warp | Issuer, words: Array) -> None:
        """Check a read by an asynchronous copy against the last writes, without recording it.

        Later writes are not compared with this read. A relaxed flag may tell the writer that the copy has completed; a
        write after that cannot reach the copy, although no vector orders it.
        """
        cells, _ = self._cells(words, SEVERAL)
        if self.observed is not None:
            self.observed[cells] = True
        if not self._compiled("observe", w, cells, SEVERAL):
            self._after_writes(w, cells, np.broadcast_to(SEVERAL, cells.shape))

    def _cells(self, words: Array, lanes: Any, halves: Array | None = None) -> tuple[Array, Any]:
        """Return the cells of accesses, and the lane of each cell (or one for all, if ``lanes`` is one for all)."""
        if halves is not None:
            self._take_apart(words)
            return words + halves * self.words, lanes
        if self.apart is None or not (both := self.apart[words]).any():
            return words, lanes
        cells = np.concatenate([words.reshape(-1), words[both] + self.words])
        if isinstance(lanes, int):
            return cells, lanes
        lanes = np.broadcast_to(lanes, words.shape)
        return cells, np.concatenate([lanes.reshape(-1), lanes[both]])

    def _take_apart(self, words: Array) -> None:
        """Give each half of these words a cell of its own, with the history of the word."""
        if self.apart is None:
            self.apart = np.zeros(self.words, np.bool_)
            self.writer, self.write_lane = _doubled(self.writer), _doubled(self.write_lane)
            self.written, self.generic = _doubled(self.written), _doubled(self.generic)
            self.reader, self.read_lane = _doubled(self.reader), _doubled(self.read_lane)
            self.read = _doubled(self.read)
            self.constant = None if self.constant is None else _doubled(self.constant)
            self.observed = None if self.observed is None else _doubled(self.observed)
            self.reading = None if self.reading is None else _doubled(self.reading)
            self.further.double()
            if self.region.map is not None:
                self.region.map.watch(self)
        new = words[~self.apart[words]]
        if new.size:
            self.apart[new] = True
            marks = (self.generic, self.constant, self.observed, self.reading)
            last = (self.writer, self.write_lane, self.written, self.reader, self.read_lane, self.read)
            for history in (*last, *marks):
                if history is not None:
                    history[new + self.words] = history[new]
            self.further.take_apart(new)

    def _marks(self, kind: type[np.generic]) -> Array:
        """Return an array with a zero for each cell."""
        found = _history(self.words, kind)
        return found if self.apart is None else _doubled(found)

    def _compiled(self, what: str, w: Warp | Issuer, cells: Array, lanes: Any, generic: bool = False) -> bool:
        """Let compiled code do the same as a method of this class. False: nothing was done."""
        map_ = self.region.map
        return map_ is not None and map_.checked(what, w.clock, cells, lanes, generic)

    def _after_writes(self, w: Warp | Issuer, cells: Array, lanes: Array) -> None:
        earlier = self.writer[cells], self.written[cells], self.write_lane[cells]
        self._compare(w, cells, lanes, *earlier, "accessed", "written")

    def _compare(
        self, w: Warp | Issuer, cells: Array, lanes: Array, indices: Any, times: Array, earlier: Array, now: str, what: str
    ) -> None:  # fmt: skip
        """Report a race if earlier accesses are not ordered before those of ``cells`` now.

        Args:
            indices: of the clocks of the earlier accesses, one for each cell, or one for all.
            times, earlier: when and by which lane each cell was accessed.
            now, what: what happens to the cells, and what happened.
        """
        late = times > w.clock.known[indices]
        if late.any():
            late &= (indices != w.clock.index) | (earlier != lanes) | (earlier == SEVERAL)
            if late.any():
                index = np.broadcast_to(indices, cells.shape)[late][0]
                self._report(w, now, cells[late][0], int(index), int(earlier[late][0]), what)

    def _report(self, w: Warp | Issuer, now: str, cell: int, index: int, lane: int, before: str) -> None:
        section, index = divmod(index, w.clock.warps)
        cta, warp = divmod(index, w.cta.width)
        who = f"CTA {cta}, warp {warp}, " + (f"lane {lane}" if lane >= 0 else "several lanes")
        if section:
            who = f"a tensor core instruction of CTA {cta}, warp {warp}"
        upper, word = divmod(int(cell), self.words)
        where = f"{self.region.name}, offset {word * 4 + upper * 2 + self.region.base - self.region.low}"
        w.fail(f"a race: {where} is {now} here and was {before} by {who}; nothing orders them")


def _record(clock: Clock, times: Array, readers: Array, cells: Array, lanes: Array) -> None:
    """Record reads of a warp in place of its last ones. ``cells``: where they are in the arrays of times and lanes."""
    again = (times[cells] > clock.known[clock.index]) & (readers[cells] != lanes)
    readers[cells] = np.where(again, SEVERAL, lanes)
    shared = readers[cells] != lanes  # several lanes read this cell at once
    readers[cells[shared]] = SEVERAL
    times[cells] = clock.now


def _extended(reads: Array, rows: int) -> Array:
    """Return a copy with more rows. The system allocates the new ones on first use."""
    found = np.zeros((rows, *reads.shape[1:]), reads.dtype)
    found[: len(reads)] = reads
    return found


def _history(cells: int, kind: type[np.generic]) -> Array:
    """Return zeros for cells that nothing has accessed. There is room for as many more; the system allocates it on first use."""
    return np.zeros(2 * cells, kind)[:cells]


def _doubled(history: Array) -> Array:
    """Return a `_history` with its room: nothing has accessed the new cells."""
    assert history.base is not None
    return history.base
