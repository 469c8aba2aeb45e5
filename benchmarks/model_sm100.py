"""A model of the chain's time, from what single instructions take: ``python benchmarks/model_sm100.py``.

A loop over chunks is a list of steps of some roles. A step takes clocks of a resource that it holds (the
tensor core, shared memory, the role's own issue slots) and then, maybe, latency that holds nothing; roles
wait for each other's steps, and for a resource in the order in which they come. The model plays many chunks
and tells the clocks from one to the next. Nothing is fitted to a chain: constants are those of instructions,
of the CUDA guide or of microbenchmarks, and for Blackwell, of which none is at hand, assumptions.

It prints the model beside what was measured of kda-sm90's chain on an H200 (docs/kernels/chain.md), and then
what it predicts of kda-sm100's chain, and with it of whole calls on a B200, beside published times of others.
The latter two are predictions: no Blackwell GPU has run those kernels.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.cases import Case, public

K = 128
CHUNKS = 60  # played; the first half fills the pipeline


class Step(NamedTuple):
    """``clocks`` of a ``resource`` ("" for the role's own), then ``latency``; after ``after``, steps of the
    same chunk by name, or of the one before with a leading "-". Of shared memory it takes ``reads`` clocks
    meanwhile. A role takes its steps in order and waits for their ends only where they say ``blocks``."""

    name: str
    resource: str
    clocks: float
    latency: float = 0.0
    after: tuple[str, ...] = ()
    blocks: bool = True
    reads: float = 0.0


@dataclass
class Loop:
    """Roles by name, each with its steps of a chunk."""

    roles: dict[str, list[Step]] = field(default_factory=dict)

    def clocks(self) -> float:
        """From one chunk to the next, once the pipeline is full."""
        free: dict[str, float] = {}
        done: dict[tuple[str, int], float] = {}
        clock, position = dict.fromkeys(self.roles, 0.0), dict.fromkeys(self.roles, 0)
        while True:
            # The role whose next step can begin first; of equals, the one that has waited longest.
            best: tuple[float, float, str, Step, int] | None = None
            for role, steps in self.roles.items():
                chunk, index = divmod(position[role], len(steps))
                step = steps[index]
                needed = [(name.removeprefix("-"), chunk - name.startswith("-")) for name in step.after]
                if chunk == CHUNKS or any(n >= 0 and (name, n) not in done for name, n in needed):
                    continue
                ready = max([clock[role], *(done.get(key, 0.0) for key in needed)])
                held = [step.resource, *["shared"] * (step.reads > 0)]
                begin = max([ready, *(free.get(resource, 0.0) for resource in held)])
                if best is None or (begin, ready) < best[:2]:
                    best = begin, ready, role, step, chunk
            if best is None:
                break
            begin, _, role, step, chunk = best
            end = begin + step.clocks
            if step.resource:
                free[step.resource] = end
            if step.reads:
                free["shared"] = begin + step.reads
            done[step.name, chunk] = end + step.latency
            clock[role] = end + step.latency if step.blocks else begin
            position[role] += 1
        ends = [
            max(time for (_, n), time in done.items() if n == chunk)
            for chunk in (CHUNKS // 2 - 1, CHUNKS - 1)
        ]
        return (ends[1] - ends[0]) / (CHUNKS - CHUNKS // 2)


# ---- instructions. A warp issues one a clock; conversions take two (CUDA C++ programming guide, throughput of arithmetic
# instructions, 9.0 and 10.0: 64 a clock and SM). Shared memory moves 128 bytes a clock; 16 bytes a thread of four warps take 16.

CONVERT, ISSUE, SHARED = 2, 1, 16
COPIED = 64  # bytes a clock that come to an SM from the L2


def product(name: str, n: int, k: int, latency: float = 0.0, **more: Any) -> list[Step]:
    """Instructions of N = ``n`` and 16 of K: n / 2 clocks each, in which one reads n rows of 32 bytes from
    shared memory."""
    parts = [Step(f"{name}, {i}", "tensor", n / 2, reads=n / 4, **more) for i in range(k // 16)]
    return [*parts[:-1], parts[-1]._replace(name=name, latency=latency)]


def accesses(name: str, count: int, **more: Any) -> list[Step]:
    """Of shared memory, by four warps, 16 bytes a thread each."""
    return [Step(f"{name}, {i}", "shared", SHARED, **more) for i in range(count)]


def copies(size: int, *after: str) -> list[Step]:
    """``size`` bytes to shared memory, for the next chunk, when a stage is free: 1 KiB at a time."""
    clocks = 1024 / 128
    parts = [Step(f"copy {i}", "shared", clocks, 1024 / COPIED - clocks) for i in range(size // 1024)]
    return [parts[0]._replace(after=after), *parts[1:-1], parts[-1]._replace(name="copied")]


# ---- Hopper

HOPPER_GHZ = 1.755  # of an H200 under tensor load
WGMMA_WAIT = 60  # of a batch, from its end to the next instruction (microbenchmark, H200)


def hopper(chunk: int, warpgroups: int, whole: bool) -> Loop:
    """The chain of kda-sm90. wgmma m64nNk16 takes N / 2 clocks, and whoever issues it waits (microbenchmarks,
    H200). ``whole``: with copies of records and of v to shared memory, and with v and O on their ways through
    it."""
    loop = Loop()
    tile, state = chunk // 2, K // 2  # values of a thread
    for wg in range(warpgroups):
        own = lambda name, clocks, wg=wg: [Step(f"{name} {wg}", "", clocks)]
        steps = [
            *product(f"X {wg}", chunk, K, after=("-copied",) * whole),
            *own("round O", tile / 2 * CONVERT),
            *product(f"half of O {wg}", chunk, K // 2, WGMMA_WAIT),
            *own("round X", tile / 2 * CONVERT),
            *product(f"R {wg}", chunk, chunk),
            *product(f"other half of O {wg}", chunk, K // 2),
            *accesses(f"decays {wg}", 8),
            *own("decay", state * ISSUE + WGMMA_WAIT),
            *own("round R", tile / 2 * CONVERT),
            *product(f"S {wg}", K, chunk),
            *product(f"O {wg}", chunk, chunk, WGMMA_WAIT),
            *own("round S", state / 2 * CONVERT + WGMMA_WAIT),
        ]
        if whole:
            steps += accesses(f"O out {wg}", chunk // 16)
            steps += own("O given", 0)
            steps += accesses(f"v {wg}", chunk // 16)
            steps += own("unpack v", tile * ISSUE)
            loop.roles[f"store {wg}"] = accesses(f"O stored {wg}", chunk // 16, after=(f"O given {wg}",))
        loop.roles[f"warpgroup {wg}"] = [*steps, *own("end", 0)]
    if whole:
        size = (
            3 * 2 * chunk * K + 2 * 2 * chunk * chunk + 4 * K + warpgroups * chunk * K
        )  # Kd, Qd, Kg; Aqk, T; a; v
        loop.roles["producer"] = copies(size, *(f"-end {wg}" for wg in range(warpgroups)))
    return loop


#: ns a token of the chain alone, records in L2, one H200: docs/kernels/chain.md, "As a role of the launch", without and
#: with bulk loads, v and O.
MEASURED = {(64, 1): (13.8, 16.5), (64, 2): (21.4, 27.6), (32, 1): (17.0, 20.1), (32, 2): (24.0, 28.6)}

# ---- Blackwell: assumptions

BLACKWELL_GHZ = 1.85
#: ns of one way between products and a warp's registers, half of it each: a commit seen and a tile loaded, or
#: a tile stored and an mbarrier seen. A chunk waits for four.
HOP_NS = (80, 120, 160)


@functools.cache
def blackwell(chunk: int, hop: float, outputs: bool = True) -> float:
    """Clocks a chunk of kda-sm100's chain, or without ``outputs`` of that of summaries. tcgen05.mma of M =
    128 and 16 of K takes N / 2 clocks (8192 FLOP a clock and SM), in which it reads B."""
    tile, state, half = chunk, K, hop / 2  # values of a thread
    issued: dict[str, Any] = {"latency": half, "blocks": False}
    told = lambda name: [Step(f"{name} stored", "", 0, half), Step(name, "", 0, half, blocks=False)]
    loop = Loop(
        {
            "state": [
                Step("S loaded", "", 0, half, ("-S",)),
                Step("S in bf16", "", state / 2 * CONVERT),
                *told("S rounded"),
                *accesses("decays", 8),
                Step("S decayed", "", state * ISSUE),
                *accesses("u", chunk // 8),
                Step("u unpacked", "", tile * ISSUE),
                Step("R loaded", "", 0, half, ("R",)),
                Step("R in bf16", "", tile * ISSUE + tile / 2 * CONVERT),
                *told("R rounded"),
            ],
            "multiplier": [
                *product("R", chunk, K, after=("S rounded", "-copied"), **issued),
                *product("half of O", chunk, K, after=("S rounded", "-O loaded"), **issued),
                *product("S", K, chunk, after=("R rounded",), **issued),
                *product("O", chunk, chunk, after=("R rounded",), **issued),
            ],
            "output": [
                Step("O loaded", "", 0, half, ("O",)),
                Step("O rounded", "", tile / 2 * CONVERT),
                *accesses("O out", 2 * chunk // 8),
            ],
            "producer": copies(4 * 2 * chunk * K + 2 * chunk * chunk + 4 * K, "-O"),  # w, u, Qd, Kg; Aqk; a
        }
    )
    if not outputs:
        del loop.roles["output"]
        loop.roles["multiplier"] = [x for x in loop.roles["multiplier"] if "O" not in x.name]
        loop.roles["producer"] = copies(3 * 2 * chunk * K + 4 * K, "-S")  # w, u; Kg; a
    return loop.clocks()


# ---- calls of kda-sm100 on a B200, predicted: the preparation of all chunks of 64, then the chains over
# them. Launches themselves are left out, and what the chains find in the L2.

SMS = 148
BANDWIDTH = (7000, 6650, 6300)  # bytes a ns that a B200 reaches, by others' account; one for each of `HOP_NS`
#: ns a chunk, of which an SM has three at a time: kda-sm90's preparation, measured on an H200
#: (docs/kernels/prefill.md, the role alone). Assumed: as many clocks on a B200. The products w and u, which are more here,
#: are left out.
PREPARE_NS = 14100 * HOPPER_GHZ / BLACKWELL_GHZ
RECORD = 1160  # bytes a token and value head, written once and read once

#: ms on Blackwell that others publish, by case.
PUBLISHED = {
    "B1-T8192-H64": "FlashInfer 0.328 (CUDA), 0.39 to 0.46 (CuTe DSL); FlashKDA 0.92 to 1.00; cuLA 0.984"
}


def call_ms(case: Case, hop: int, bandwidth: int) -> tuple[float, float]:
    """The preparation and the chains of a call that is not cut into segments, bounded gates in bf16."""
    chunks = [-(-length // 64) for length in case.lengths or (case.T,) * case.B]
    items = sum(chunks) * case.HV
    moved = lambda each: items * 64 * each / bandwidth  # bytes a token and value head
    inputs = 2 * K * (2 + 2 * case.H / case.HV)  # v, g; q, k
    prepare = max(max(1, items / (3 * SMS)) * PREPARE_NS, moved(inputs + RECORD))
    chunk = blackwell(64, hop * BLACKWELL_GHZ) / BLACKWELL_GHZ
    busy = [0.0] * SMS  # until when; a CTA a sequence and value head, in order
    for n in chunks:
        for _ in range(case.HV):
            heapq.heapreplace(busy, busy[0] + n * chunk)
    return prepare / 1e6, max(*busy, moved(RECORD + 2 * K)) / 1e6


def table() -> str:
    """The predictions for published shapes, as it stands on docs/kernels/sm100-chain.md."""
    lines = [
        "| shape | preparation | chains | together | published by others |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in public():
        found = [call_ms(case, *assumed) for assumed in zip(HOP_NS, BANDWIDTH)]
        columns = (*zip(*found), [sum(times) for times in found])
        ranges = [" to ".join(sorted({f"{x[0]:.2f}", f"{x[-1]:.2f}"})) for x in columns]
        lines.append(f"| {case.name} | {' | '.join(ranges)} | {PUBLISHED.get(case.name, '')} |")
    return "\n".join(lines)


def main() -> None:
    print("kda-sm90's chain, one H200, ns a token              model  measured    off")
    for (chunk, warpgroups), times in MEASURED.items():
        for whole, measured in zip((False, True), times):
            ns = hopper(chunk, warpgroups, whole).clocks() / HOPPER_GHZ / chunk
            what = "with loads, v and O" if whole else "without"
            print(
                f"  C = {chunk}, {warpgroups} warpgroup(s), {what:20} {ns:14.1f} {measured:9.1f} {ns / measured - 1:+6.0%}"
            )
    print("\nkda-sm100's chain, predicted from assumptions     clocks a chunk   us a chunk   ns a token")
    for outputs, chunk, hop in itertools.product((True, False), (64, 32), HOP_NS):
        clocks = blackwell(chunk, hop * BLACKWELL_GHZ, outputs)
        us = clocks / BLACKWELL_GHZ / 1000
        what = f"C = {chunk}, {hop:3} ns a way{'' if outputs else ', of summaries'}"
        print(f"  {what:38} {clocks:22.0f} {us:12.2f} {us * 1000 / chunk:12.1f}")
    print("\ncalls of kda-sm100 on a B200, predicted from assumptions, not measured, ms\n")
    print(table())


if __name__ == "__main__":
    main()
