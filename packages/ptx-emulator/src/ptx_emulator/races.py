"""The race check: a happens-before check with vector clocks over shared, global and tensor memory.

Each warp has a clock, and a vector with one entry for each warp of the launch: accesses of that warp up to this clock
happen before the next accesses of this one. The following synchronisation merges vectors:

- barriers of a CTA or a cluster, and mbarriers;
- a release and the acquire that observes it (PTX ISA, "Memory Consistency Model").

One lane is enough: the whole warp is then synchronised. Accesses of different lanes of the same warp are ordered only by
`bar.warp.sync` and by barriers of the CTA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.lanes import Array

if TYPE_CHECKING:
    from ptx_emulator.machine import Warp
    from ptx_emulator.memory import Region

SEVERAL = -2  # in place of a lane: several lanes of the warp


class Clock:
    """The vector clock of one warp.

    Attributes:
        index: the warp's index in the launch.
        now: the clock of the warp's next accesses, from 1.
        known: int64[warps]. Accesses of warp n up to clock ``known[n]`` happen before the next accesses of this warp. The
            entry of this warp itself is about its other lanes.
        seen: merged vectors of the releases that relaxed reads have observed since the last fence.
        fenced: the vector of the last fence. Relaxed writes publish it.
    """

    def __init__(self, index: int, warps: int):
        self.index, self.now = index, 1
        self.known = np.zeros(warps, np.int64)
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


class Shadow:
    """The access history of a region: per word of 4 bytes, the last write, and the last read of each warp.

    Every access of the region is reported here with its word indices, counted from ``region.base``. The methods raise
    `ExecutionError` for a race.
    """

    def __init__(self, region: Region):
        self.region = region
        words = -(-len(region.data) // 4)
        self.writer, self.write_lane = np.zeros(words, np.int32), np.zeros(words, np.int8)
        self.written = np.zeros(words, np.int64)
        self.read: dict[int, tuple[Array, Array]] = {}

    def load(self, w: Warp, words: Array, lanes: Any) -> None:
        """Check and record a read. ``lanes``: the lane of each word, or `SEVERAL`."""
        clock = w.clock
        if clock.index not in self.read:
            self.read[clock.index] = (
                np.zeros(len(self.written), np.int64),
                np.zeros(len(self.written), np.int8),
            )
            if self.region.map is not None:
                self.region.map.reader(clock.index, *self.read[clock.index])
        if w.checked("load", self.region, words, lanes):
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

    def store(self, w: Warp, words: Array, lanes: Any) -> None:
        """Check and record a write. ``lanes``: the lane of each word, or `SEVERAL`."""
        if w.checked("store", self.region, words, lanes):
            return
        clock, lanes = w.clock, np.broadcast_to(lanes, words.shape)
        self._after_writes(w, words, lanes)
        for index, (times, readers) in self.read.items():
            late = times[words] > clock.known[index]
            if index == clock.index:
                late &= (readers[words] != lanes) | (readers[words] == SEVERAL)
            if late.any():
                self._report(w, "written", words[late][0], index, int(readers[words][late][0]), "read")
        self.writer[words], self.write_lane[words], self.written[words] = clock.index, lanes, clock.now

    def observe(self, w: Warp, words: Array) -> None:
        """Check a read by an asynchronous copy against the last writes, without recording it.

        Later writes are not compared with this read. A relaxed flag may tell the writer that the copy has completed; a
        write after that cannot reach the copy, although no vector orders it.
        """
        if not w.checked("observe", self.region, words, SEVERAL):
            self._after_writes(w, words, np.broadcast_to(SEVERAL, words.shape))

    def _after_writes(self, w: Warp, words: Array, lanes: Array) -> None:
        writers = self.writer[words]
        late = self.written[words] > w.clock.known[writers]
        if late.any():
            late &= (writers != w.clock.index) | (self.write_lane[words] != lanes) | (lanes == SEVERAL)
            if late.any():
                word = words[late][0]
                self._report(
                    w, "accessed", word, int(self.writer[word]), int(self.write_lane[word]), "written"
                )

    def _report(self, w: Warp, now: str, word: int, index: int, lane: int, before: str) -> None:
        cta, warp = divmod(index, len(w.cta.warps))
        who = f"CTA {cta}, warp {warp}, " + (f"lane {lane}" if lane >= 0 else "several lanes")
        where = f"{self.region.name}, offset {int(word) * 4 + self.region.base - self.region.low}"
        w.fail(f"a race: {where} is {now} here and was {before} by {who}; nothing orders them")
