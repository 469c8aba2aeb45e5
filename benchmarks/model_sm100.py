"""A model of the chain's time, from what single instructions take: ``python benchmarks/model_sm100.py``.

A loop over chunks is a list of steps of some roles. A step takes clocks of a resource that it holds (the tensor core, shared
memory, the role's own issue slots) and then, maybe, latency that holds nothing; roles wait for each other's steps. The
model plays many chunks and tells the clocks from one to the next. Nothing is fitted to a chain: constants are those of
instructions, of the CUDA guide or of microbenchmarks, and for Blackwell, of which none is at hand, assumptions.

It prints the model beside what was measured of kda-sm90's chain on an H200 (docs/kernels/chain.md), and then what it
predicts of kda-sm100's chain. The latter is a prediction: no Blackwell GPU has run that kernel. Copies from global memory are
left out: where two warpgroups share the loads, the chain on the H200 takes longer for them than the model says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

K = 128
CHUNKS = 200  # played; the first half fills the pipeline


class Step(NamedTuple):
    """``clocks`` of a ``resource`` ("" for the role's own), then ``latency``; after ``after``, steps of the same chunk by name,
    or of the one before with a leading "-". A role takes its steps in order and waits for ``latency`` only where it says
    ``blocks``."""

    name: str
    resource: str
    clocks: float
    latency: float = 0.0
    after: tuple[str, ...] = ()
    blocks: bool = True


@dataclass
class Loop:
    """Roles by name, each with its steps of a chunk."""

    roles: dict[str, list[Step]] = field(default_factory=dict)

    def clocks(self) -> float:
        """From one chunk to the next, once the pipeline is full."""
        free: dict[str, float] = {}
        done: dict[tuple[str, int], float] = {}
        clock, position = dict.fromkeys(self.roles, 0.0), dict.fromkeys(self.roles, 0)
        ends: list[float] = []
        while min(position.values()) < CHUNKS * min(len(steps) for steps in self.roles.values()):
            # The role whose next step can begin first.
            best: tuple[float, str, Step, int] | None = None
            for role, steps in self.roles.items():
                chunk, index = divmod(position[role], len(steps))
                step = steps[index]
                needed = [(name.removeprefix("-"), chunk - name.startswith("-")) for name in step.after]
                if chunk == CHUNKS or any(n >= 0 and (name, n) not in done for name, n in needed):
                    continue
                begin = max(
                    [clock[role], free.get(step.resource, 0.0), *(done.get(key, 0.0) for key in needed)]
                )
                if best is None or begin < best[0]:
                    best = begin, role, step, chunk
            if best is None:
                break
            begin, role, step, chunk = best
            end = begin + step.clocks
            if step.resource:
                free[step.resource] = end
            done[step.name, chunk] = end + step.latency
            clock[role] = end + step.latency if step.blocks else begin
            position[role] += 1
            ends.append(end)
        last = [time for (name, n), time in done.items() if n == CHUNKS - 1]
        half = [time for (name, n), time in done.items() if n == CHUNKS // 2 - 1]
        return (max(last) - max(half)) / (CHUNKS - CHUNKS // 2)


# ---- instructions. A warp issues one a clock; conversions take two (CUDA C++ programming guide, throughput of arithmetic
# instructions, 9.0 and 10.0: 64 a clock and SM). Shared memory moves 128 bytes a clock; 16 bytes a thread of four warps take 16.

CONVERT, ISSUE, SHARED = 2, 1, 16

# ---- Hopper

HOPPER_GHZ = 1.755  # of an H200 under tensor load
WGMMA_WAIT = 60  # of a batch, from its end to the next instruction (microbenchmark, H200)


def hopper(chunk: int, warpgroups: int, whole: bool) -> Loop:
    """The chain of kda-sm90. wgmma m64nNk16 takes N / 2 clocks, and whoever issues it waits (microbenchmarks, H200). It
    reads N rows of 32 bytes meanwhile, half of what shared memory gives: the other half is left to the other warpgroup.
    ``whole``: v is read from shared memory and O written to it. Copies to shared memory are not modelled."""
    loop = Loop()
    for wg in range(warpgroups):
        product = lambda n, k: n / 2 * (k / 16)
        own = lambda name, clocks, wg=wg: Step(f"{name}{wg}", "", clocks)
        tensor = lambda name, clocks, wait=0, wg=wg: Step(f"{name}{wg}", "tensor", clocks, wait)
        shared = lambda name, count, wg=wg: Step(f"{name}{wg}", "shared", SHARED * count * warpgroups)
        tile, state = chunk / 2, K / 2  # values of a thread
        steps = [
            tensor("X", product(chunk, K)),
            own("round O", tile / 2 * CONVERT),
            tensor("half of O", product(chunk, K) / 2, WGMMA_WAIT),
            own("round X", tile / 2 * CONVERT),
            tensor("R", product(chunk, chunk)),
            tensor("other half of O", product(chunk, K) / 2),
            shared("decays", 8),
            own("decay", state * ISSUE + WGMMA_WAIT),
            own("round R", tile / 2 * CONVERT),
            tensor("S", product(K, chunk)),
            tensor("O", product(chunk, chunk), WGMMA_WAIT),
            own("round S", state / 2 * CONVERT + WGMMA_WAIT),
        ]
        if whole:
            steps += [shared("O out", chunk / 16), shared("v", chunk / 16), own("unpack v", tile * ISSUE)]
        loop.roles[f"warpgroup {wg}"] = steps
    return loop


#: ns a token of the chain alone, records in L2, one H200: docs/kernels/chain.md, "As a role of the launch", without and
#: with bulk loads, v and O.
MEASURED = {(64, 1): (13.8, 16.5), (64, 2): (21.4, 27.6), (32, 1): (17.0, 20.1), (32, 2): (24.0, 28.6)}

# ---- Blackwell: assumptions

BLACKWELL_GHZ = 1.85
#: ns of one way between products and a warp's registers: a commit seen and a tile loaded, or a tile stored and an mbarrier seen. A
#: chunk waits for four.
HOP_NS = (80, 120, 160)


def blackwell(chunk: int, hop: float) -> Loop:
    """The chain of kda-sm100. tcgen05.mma of M = 128 and 16 of K takes N / 2 clocks: 8192 FLOP a clock and SM."""
    product = lambda n, k: n / 2 * (k / 16)
    tile, state = chunk, K  # values of a thread
    return Loop(
        {
            "state": [
                Step("S loaded", "", 0, hop, ("-S",)),
                Step("S rounded", "", state / 2 * CONVERT, hop),
                Step("S decayed", "", state * ISSUE, 0),
                Step("R loaded", "", 0, hop, ("R",)),
                Step("R rounded", "", tile * ISSUE + tile / 2 * CONVERT, hop),
            ],
            "multiplier": [
                Step("R", "tensor", product(chunk, K), 0, ("S rounded",), blocks=False),
                Step("half of O", "tensor", product(chunk, K), 0, ("S rounded", "-O loaded"), blocks=False),
                Step("S", "tensor", product(K, chunk), 0, ("R rounded",), blocks=False),
                Step("O", "tensor", product(chunk, chunk), 0, ("R rounded",), blocks=False),
            ],
            "output": [
                Step("O loaded", "", 0, hop, ("O",)),
                Step("O rounded", "", tile / 2 * CONVERT),
                Step("O out", "shared", 2 * SHARED * chunk / 8),
            ],
        }
    )


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
    for chunk in (64, 32):
        for hop in HOP_NS:
            clocks = blackwell(chunk, hop * BLACKWELL_GHZ).clocks()
            us = clocks / BLACKWELL_GHZ / 1000
            print(f"  C = {chunk}, {hop:3} ns a way {clocks:38.0f} {us:12.2f} {us * 1000 / chunk:12.1f}")


if __name__ == "__main__":
    main()
