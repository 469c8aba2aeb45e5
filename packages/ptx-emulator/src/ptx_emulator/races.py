"""Accesses that nothing orders: a happens-before check over shared and global memory.

Every warp has a clock, and knows up to which clock of each other warp accesses are ordered before its own.
Barriers, mbarriers, and releases with their acquires pass that knowledge on, for a whole warp at once,
whichever lane executes them. Lanes of one warp are ordered by what synchronises all of them: `bar.warp.sync`
and barriers of the CTA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.lanes import Array

if TYPE_CHECKING:
    from ptx_emulator.machine import Warp
    from ptx_emulator.memory import Region

SEVERAL = -2  # instead of a lane: more than one of a warp


class Clock:
    """Of one warp. ``known``: of each warp of the launch the clock up to which accesses come before this
    warp's next ones; of itself, before those of its other lanes."""

    def __init__(self, index: int, warps: int):
        self.index, self.now = index, 1
        self.known = np.zeros(warps, np.int64)
        # Between fences: what relaxed reads have seen, and what relaxed writes pass on.
        self.seen: Array | None = None
        self.fenced: Array | None = None

    def release(self) -> Array:
        """What others know that see this point."""
        snapshot = self.known.copy()
        snapshot[self.index] = self.now
        self.now += 1
        return snapshot

    def synchronize(self) -> None:
        """Between the lanes of the warp."""
        self.known[self.index] = self.now
        self.now += 1

    def acquire(self, snapshot: Array | None) -> None:
        """What was known where a lane, maybe of this warp, released."""
        if snapshot is not None:
            np.maximum(self.known, snapshot, out=self.known)

    def fence(self) -> None:
        """`fence.acq_rel` or `.sc`: relaxed reads before it acquire, relaxed writes behind it release."""
        self.acquire(self.seen)
        self.seen, self.fenced = None, self.release()

    def read(self, order: str, snapshot: Array | None) -> None:
        """A strong read of what was written with a snapshot."""
        if order in ("acquire", "acq_rel"):
            self.acquire(snapshot)
        elif snapshot is not None:
            self.seen = snapshot if self.seen is None else np.maximum(self.seen, snapshot)

    def write(self, order: str) -> Array | None:
        """The snapshot of a strong write."""
        return self.release() if order in ("release", "acq_rel") else self.fenced


def issued(w: Warp, clock: int) -> Array:
    """What those know that see a copy of this warp arrive: its own accesses up to when it was issued."""
    snapshot = np.zeros_like(w.clock.known)
    snapshot[w.clock.index] = clock
    return snapshot


class Shadow:
    """The last write of each word of 4 bytes, and the last read by each warp that reads at all."""

    def __init__(self, region: Region):
        self.region = region
        words = -(-len(region.data) // 4)
        self.writer, self.write_lane = np.zeros(words, np.int32), np.zeros(words, np.int8)
        self.written = np.zeros(words, np.int64)
        self.read: dict[int, tuple[Array, Array]] = {}

    def load(self, w: Warp, words: Array, lanes: Any) -> None:
        """A read of words by lanes, an array of the same shape or `SEVERAL`."""
        clock, lanes = w.clock, np.broadcast_to(lanes, words.shape)
        self._after_writes(w, words, lanes)
        if clock.index not in self.read:
            self.read[clock.index] = (
                np.zeros(len(self.written), np.int64),
                np.zeros(len(self.written), np.int8),
            )
        times, readers = self.read[clock.index]
        again = (times[words] > clock.known[clock.index]) & (readers[words] != lanes)
        readers[words] = np.where(again, SEVERAL, lanes)
        shared = readers[words] != lanes  # lanes that read one word at once
        if shared.any():
            readers[words[shared]] = SEVERAL
        times[words] = clock.now

    def store(self, w: Warp, words: Array, lanes: Any) -> None:
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
        """A read by an asynchronous copy: it has to come after what was written. Later writes are not
        compared with it, because a flag without order may tell that the copy has ended: nothing written after
        that reaches it."""
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
