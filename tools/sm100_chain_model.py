"""A timing model of the chain, built from the throughput of single instructions.

    python tools/sm100_chain_model.py

The model has roles. A role executes a list of steps per chunk, in order. A step occupies a resource for some clocks (the tensor
core, shared memory, or the role's own issue slots) and may then have a latency that occupies nothing. Roles wait for each
other's steps; a resource serves the steps in the order in which they become ready. The model runs many chunks and reports the
clocks from one chunk to the next. No constant is fitted to a chain: constants come from the CUDA guide and from
microbenchmarks of instructions. For Blackwell no microbenchmark exists yet, so its constants are assumptions.

The program prints the model beside the measured times of kda-sm90's chain on an H200 (docs/kernels/chain.md), and predictions: for
kda-sm100's chains, forward and backward; for whole backwards on a B200; and for whole forwards there, beside times that others publish.
All but the first are predictions: no Blackwell GPU has run these kernels.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kda_core.bench.cases import Case, public, training
from kda_core.bench.cases import blackwell as blackwell_cases
from kda_cute.backward import BUDGETS, cut

K = 128
CHUNKS = 60  # chunks that the model runs; the first half fills the pipeline


class Step(NamedTuple):
    """One step of a role.

    Attributes:
        name: name of the step; unique within the loop.
        resource: what the step occupies; "" is the role's own issue slots.
        clocks: how long the step occupies the resource.
        latency: clocks from then to the end of the step.
        after: steps that must have ended: of the same chunk, or with a leading "-" of the chunk before.
        blocks: whether the role waits for the end of the step before its next one.
        reads: clocks for which the step also occupies shared memory.
    """

    name: str
    resource: str
    clocks: float
    latency: float = 0.0
    after: tuple[str, ...] = ()
    blocks: bool = True
    reads: float = 0.0


@dataclass
class Loop:
    """The steps per chunk of each role."""

    roles: dict[str, list[Step]] = field(default_factory=dict)

    def clocks(self) -> float:
        """Returns the clocks from one chunk to the next once the pipeline is full."""
        free: dict[str, float] = {}
        done: dict[tuple[str, int], float] = {}
        clock, position = dict.fromkeys(self.roles, 0.0), dict.fromkeys(self.roles, 0)
        needed = {
            role: [
                [(name.removeprefix("-"), int(name.startswith("-"))) for name in step.after] for step in steps
            ]
            for role, steps in self.roles.items()
        }
        while True:
            # Choose the role whose next step can start first. Of equals, choose the one that has waited longest.
            best: tuple[float, float, str, Step, int] | None = None
            for role, steps in self.roles.items():
                chunk, index = divmod(position[role], len(steps))
                if chunk == CHUNKS:
                    continue
                step, ready, waits = steps[index], clock[role], False
                for name, before in needed[role][index]:
                    if chunk >= before:
                        ended = done.get((name, chunk - before))
                        if waits := ended is None:
                            break
                        ready = max(ready, ended)
                if waits:
                    continue
                begin = max(ready, free.get(step.resource, 0.0))
                if step.reads > 0:
                    begin = max(begin, free.get("shared", 0.0))
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


# ---- instructions. A warp issues one instruction per clock. A conversion takes two clocks (CUDA C++ programming guide, throughput
# of arithmetic instructions, 9.0 and 10.0: 64 per clock and SM). Shared memory moves 128 bytes per clock, so that an access of 16
# bytes per thread by four warps takes 16 clocks.

CONVERT, ISSUE, SHARED = 2, 1, 16
COPIED = 64  # bytes per clock from the L2 to an SM


def product(name: str, n: int, k: int, latency: float = 0.0, **more: Any) -> list[Step]:
    """Returns the instructions of a product. Each covers N = ``n`` and 16 of K, takes n / 2 clocks, and reads n rows of 32
    bytes from shared memory."""
    parts = [Step(f"{name}, {i}", "tensor", n / 2, reads=n / 4, **more) for i in range(k // 16)]
    return [*parts[:-1], parts[-1]._replace(name=name, latency=latency)]


def accesses(name: str, count: int, **more: Any) -> list[Step]:
    """Returns ``count`` accesses of four warps to shared memory, 16 bytes per thread each."""
    return [Step(f"{name}, {i}", "shared", SHARED, **more) for i in range(count)]


def copies(size: int, *after: str) -> list[Step]:
    """Returns the copies of the next chunk's ``size`` bytes to shared memory, 1 KiB each, after the steps ``after``."""
    clocks = 1024 / 128
    parts = [Step(f"copy {i}", "shared", clocks, 1024 / COPIED - clocks) for i in range(size // 1024)]
    return [parts[0]._replace(after=after), *parts[1:-1], parts[-1]._replace(name="copied")]


# ---- Hopper

HOPPER_GHZ = 1.755  # clock of an H200 under tensor load
WGMMA_WAIT = 60  # clocks from the end of a wgmma batch to the next instruction (microbenchmark, H200)


def hopper(chunk: int, warpgroups: int, whole: bool) -> Loop:
    """Returns the loop of kda-sm90's chain.

    wgmma m64nNk16 takes N / 2 clocks, and the issuing warpgroup waits for it (microbenchmarks, H200). ``whole``: include the
    copies of records and v to shared memory, the reads of v and the way of O through shared memory.
    """
    loop = Loop()
    tile, state = chunk // 2, K // 2  # values per thread
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


#: ns per token of the chain alone with records in the L2, one H200, without and with bulk loads, v and O. Source:
#: docs/kernels/chain.md, "As a role of the launch".
MEASURED = {(64, 1): (13.8, 16.5), (64, 2): (21.4, 27.6), (32, 1): (17.0, 20.1), (32, 2): (24.0, 28.6)}

# ---- Blackwell: assumptions

BLACKWELL_GHZ = 1.85
#: ns of one hop between the tensor core and a warp's registers: a commit arrives and the warp loads a tile, or the warp stores
#: a tile and its arrival reaches the tensor core's warp. Each part takes half of it. A chunk waits for four hops.
HOP_NS = (80, 120, 160)


@functools.cache
def blackwell(chunk: int, hop: float, outputs: bool = True, stores: bool = False) -> float:
    """Returns the clocks per chunk of kda-sm100's chain.

    A tcgen05.mma of M = 128 and 16 of K takes N / 2 clocks (8192 FLOP per clock and SM) and reads B meanwhile.

    Args:
        hop: clocks.
        outputs: whether it computes O; False for the summary kernel and for `recompute`.
        stores: whether the output warps store S and R of every chunk, as `recompute` does.
    """
    tile, state, half = chunk, K, hop / 2  # values per thread
    issued: dict[str, Any] = {"latency": half, "blocks": False}
    published = lambda name: [Step(f"{name} stored", "", 0, half), Step(name, "", 0, half, blocks=False)]
    loop = Loop(
        {
            "state": [
                Step("S loaded", "", 0, half, ("-S",)),
                Step("S in bf16", "", state / 2 * CONVERT),
                *published("S rounded"),
                *accesses("decays", 8),
                Step("S decayed", "", state * ISSUE),
                *accesses("u", chunk // 8),
                Step("u unpacked", "", tile * ISSUE),
                Step("R loaded", "", 0, half, ("R",)),
                Step("R in bf16", "", tile * ISSUE + tile / 2 * CONVERT),
                *published("R rounded"),
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
    if stores:
        loop.roles["state"][0] = loop.roles["state"][0]._replace(after=("-S", "-S copied"))
        loop.roles["output"] = [
            Step("S copied", "", 0, half, ("S rounded",)),
            *accesses("S out", 2 * K // 8),
            Step("R copied", "", 0, half, ("R rounded",)),
            *accesses("R out", 2 * chunk // 8),
        ]
    return loop.clocks()


@functools.cache
def blackwell_reverse(hop: float, stores: bool = True, values: bool = True) -> float:
    """Returns the clocks per chunk of 64 of kda-sm100's reverse chain, by the assumptions of `blackwell`.

    Args:
        hop: clocks.
        stores: whether the output warps store dS' and dX; False for the summaries of a backward.
        values: whether there are products of dO; False for the transitions.
    """
    chunk, half = 64, hop / 2
    issued: dict[str, Any] = {"latency": half, "blocks": False}
    published = lambda name: [Step(f"{name} stored", "", 0, half), Step(name, "", 0, half, blocks=False)]
    a_read = K * 32 / 128  # clocks of shared memory for 16 of K of A, which lies there in the products of dO

    def of_images(name: str, n: int, k: int, **more: Any) -> list[Step]:
        return [step._replace(reads=step.reads + a_read) for step in product(name, n, k, **more)]

    multiplier = product("Y", chunk, K, after=("dS rounded", "-copied"), **issued)
    if values:
        multiplier = [*of_images("dO Aqk", chunk, chunk, after=("-copied",), blocks=False), *multiplier]
        multiplier += of_images("dO Qd", K, chunk, after=("dS decayed",), blocks=False)
    multiplier += product("dS", K, chunk, after=("Y rounded", "dS decayed"), **issued)
    loop = Loop(
        {
            "state": [
                Step("dS loaded", "", 0, half, ("-dS",)),
                Step("dS in bf16", "", K / 2 * CONVERT),
                *published("dS rounded"),
                *accesses("decays", 8),
                Step("dS decays", "", K * ISSUE),
                *published("dS decayed"),
                Step("Y loaded", "", 0, half, ("Y",)),
                Step("Y in bf16", "", chunk / 2 * CONVERT),
                *published("Y rounded"),
            ],
            "multiplier": multiplier,
        }
    )
    wide, square = 2 * chunk * K, 2 * chunk * chunk
    size = 2 * wide + 4 * K  # Kg, w; a
    if values:
        size += 2 * wide + square  # dO, Qd; Aqk
    if stores:
        multiplier += product("dX", chunk, chunk, after=("Y rounded", "-dX loaded"), **issued)
        size += square  # T
        loop.roles["output"] = [
            Step("dS copied", "", 0, half, ("dS rounded",)),
            *accesses("dS out", 2 * K // 8),
            Step("dX loaded", "", 0, half, ("dX",)),
            Step("dX rounded", "", chunk / 2 * CONVERT),
            *accesses("dX out", 2 * chunk // 8),
        ]
    loop.roles["producer"] = copies(size, "-dX" if stores else "-dS")
    return loop.clocks()


def reverse_table() -> str:
    """Returns the predictions for the chains of a backward as a Markdown table, the one of docs/kernels/sm100-backward.md."""
    kernels: dict[str, Callable[[float], float]] = {
        "recompute": lambda hop: blackwell(64, hop, False, True),
        "reverse chain": blackwell_reverse,
        "summary of a backward, N": lambda hop: blackwell_reverse(hop, False),
        "summary of a backward, M^T": lambda hop: blackwell_reverse(hop, False, False),
    }
    lines = [
        f"| us per chunk of 64 | {' | '.join(f'{hop} ns per hop' for hop in HOP_NS)} |",
        "| --- | --- | --- | --- |",
    ]
    for name, clocks in kernels.items():
        us = (clocks(hop * BLACKWELL_GHZ) / BLACKWELL_GHZ / 1000 for hop in HOP_NS)
        lines.append(f"| {name} | {' | '.join(f'{x:.2f}' for x in us)} |")
    return "\n".join(lines)


# ---- calls of kda-sm100 on a B200, predicted: the intra-chunk kernel over all chunks of 64, then the chains. The prediction leaves
# out launch overhead and hits in the L2.

SMS = 148
BANDWIDTH = (7000, 6650, 6300)  # bytes per ns that others report for a B200; one for each of `HOP_NS`
#: ns per chunk of the intra-chunk stage with three chunks at a time on an SM, as kda-sm90 takes on an H200
#: (docs/kernels/prefill.md, the role alone). Assumption: a B200 takes as many clocks. The products w and u, which only kda-sm100
#: computes, are left out.
INTRA_CHUNK_NS = 14100 * HOPPER_GHZ / BLACKWELL_GHZ
RECORD = 1160  # bytes per token and value head, written once and read once
RECORD_WITH_T = RECORD + 2 * 64
#: ns per chunk and value head of the gradients kernel on one SM: 0.63 ms for 128 chunks of 64 heads on the 132 SMs of an H200
#: (docs/kernels/backward.md). Assumption: a B200 takes as many clocks, although five of the products are those of tcgen05.
GRADIENTS_NS = 0.63e6 / (128 * 64 / 132) * HOPPER_GHZ / BLACKWELL_GHZ

#: Times on Blackwell that others publish, in ms, by case. All but those of B1-T8192-H64 are from FlashInfer's pull request 4675, whose table
#: names no GPU: https://github.com/flashinfer-ai/flashinfer/pull/4675
PUBLISHED = {
    "B1-T8192-H32": "FlashInfer 0.351 (CUDA), 0.340 (CuTe DSL); FlashKDA 0.907",
    "B1-T8192-H64": "FlashInfer 0.328 (CUDA), 0.39 to 0.46 (CuTe DSL); FlashKDA 0.92 to 1.00; cuLA 0.984",
    "B1-T8192-H96": "FlashInfer 0.453 (CUDA), 0.483 (CuTe DSL); FlashKDA 1.094",
    "varlen-mixed-H64": "FlashInfer 0.245 (CUDA), 0.253 (CuTe DSL); FlashKDA 0.685",
    "varlen-mixed-H96": "FlashInfer 0.364 (CUDA), 0.359 (CuTe DSL); FlashKDA 0.907",
}


#: ms on a GB200 that cuLA publishes, by case: with CUDA 12.9 and with CUDA 13.0. Source: BENCHMARK_GB200.md of 2026-03-29 and
#: BENCHMARK_GB200_CUDA_130.md of 2026-05-19, https://github.com/inclusionAI/cuLA. Cases of random lengths are left out, because theirs are
#: others.
CULA_GB200 = {
    "B1-T512-H64": (0.603, 0.455),
    "B1-T1024-H64": (0.590, 0.444),
    "B1-T4096-H64": (0.561, 0.551),
    "B1-T8192-H64": (1.056, 1.021),
    "B1-T16384-H64": (2.046, 1.961),
    "B2-T512-H64": (0.606, 0.453),
    "B2-T1024-H64": (0.563, 0.451),
    "B2-T4096-H64": (1.062, 1.026),
    "B2-T8192-H64": (2.064, 1.975),
    "B2-T16384-H64": (4.073, 3.874),
    "varlen-uniform-10x-T4096-H64": (0.608, 0.595),
    "varlen-skewed-10x-T4096-H64": (0.604, 0.586),
    "varlen-uniform-20x-T4096-H64": (0.673, 0.647),
    "varlen-skewed-20x-T4096-H64": (0.625, 0.608),
    "varlen-uniform-10x-T8192-H64": (1.081, 1.043),
    "varlen-skewed-10x-T8192-H64": (1.106, 1.069),
    "varlen-uniform-20x-T8192-H64": (1.133, 1.091),
    "varlen-skewed-20x-T8192-H64": (1.140, 1.101),
    "varlen-uniform-10x-T16384-H64": (2.077, 1.988),
    "varlen-skewed-10x-T16384-H64": (2.086, 1.997),
    "varlen-uniform-20x-T16384-H64": (2.069, 1.991),
    "varlen-skewed-20x-T16384-H64": (2.074, 1.994),
}


def call_ms(case: Case, hop: int, bandwidth: int) -> tuple[float, float]:
    """Returns the ms of the intra-chunk kernel and of the chains, for a call without segments, bounded gates in bf16."""
    chunks = [-(-length // 64) for length in case.lengths or (case.T,) * case.B]
    items = sum(chunks) * case.HV
    moved = lambda each: items * 64 * each / bandwidth  # ns for ``each`` bytes per token and value head
    inputs = 2 * K * (2 + 2 * case.H / case.HV)  # v, g; q, k
    intra_chunk = max(max(1, items / (3 * SMS)) * INTRA_CHUNK_NS, moved(inputs + RECORD))
    chain = longest(chunks, case.HV, blackwell(64, hop * BLACKWELL_GHZ) / BLACKWELL_GHZ)
    return intra_chunk / 1e6, max(chain, moved(RECORD + 2 * K)) / 1e6


def longest(chunks: Sequence[int], heads: int, each: float) -> float:
    """Returns the ns until all chains have ended, one CTA on an SM at a time, in order: one for each head and entry of ``chunks``, of so
    many chunks that take ``each`` ns."""
    busy = [0.0] * SMS  # ns until each SM is free
    for n in chunks:
        for _ in range(heads):
            heapq.heapreplace(busy, busy[0] + n * each)
    return max(busy)


def backward_ms(case: Case, hop: int, bandwidth: int, recompute: bool) -> dict[str, float]:
    """Returns the ms of each launch of a backward, all slabs together, for bounded gates in bf16.

    ``recompute``: the forward has saved states every 512 tokens. Otherwise it has saved those of every chunk, and R (``disable_recompute``).
    """
    tokens = 512 if recompute else 64
    slots = [  # (sequence, chunks)
        (n, -(-min(tokens, length - first) // 64))
        for n, length in enumerate(case.lengths or (case.T,) * case.B)
        for first in range(0, length, tokens)
    ]
    states = 2 * K * K // 64  # bytes of bf16 S per token and value head
    workspace = RECORD_WITH_T + states * (1 + recompute) + 16
    slabs = cut(
        tokens, len(slots), lambda x: x.slots * tokens * case.HV * workspace, BUDGETS[not recompute], 0
    )
    wide, square, raw = 2 * K, 2 * 64, 4 * K * case.H / case.HV
    sizes = {  # bytes per token and value head that a launch reads, then writes
        "intra-chunk": 2 * wide + raw + RECORD_WITH_T,  # v, g, q, k; the record
        "recompute": 3 * wide + 8 + 4 * K * K // 512 + states + wide,  # w, u, Kg, a, saved S; S, R
        "reverse": 4 * wide + 2 * square + 8 + wide + states,  # w, Qd, Kg, dO, Aqk, T, a; dv, dS'
        "gradients": raw
        + 4 * wide
        + 2 * states
        + raw
        + wide
        + 16,  # q, k, g, dO, dv, R, S, dS'; dq, dk, dg, sums
    }
    clocks = hop * BLACKWELL_GHZ
    chunk = {"recompute": blackwell(64, clocks, False, True), "reverse": blackwell_reverse(clocks)}
    parts = dict.fromkeys(sizes, 0.0)
    for first in slabs.starts():
        slab = slots[first : first + slabs.slots]
        sequences = [sum(n for _, n in group) for _, group in itertools.groupby(slab, lambda x: x[0])]
        chains = {"recompute": [n for _, n in slab], "reverse": sequences}
        items = sum(sequences) * case.HV
        busy = {name: longest(x, case.HV, chunk[name] / BLACKWELL_GHZ) for name, x in chains.items()}
        busy["intra-chunk"] = max(1, items / (3 * SMS)) * INTRA_CHUNK_NS
        busy["gradients"] = -(-items // SMS) * GRADIENTS_NS
        for name, size in sizes.items():
            if recompute or name != "recompute":
                parts[name] += max(busy[name], items * 64 * size / bandwidth)
    return {name: ns / 1e6 for name, ns in parts.items()}


def table() -> str:
    """Returns the predictions for published shapes as a Markdown table, the one of docs/kernels/sm100-chain.md."""
    lines = [
        "| shape | intra-chunk | chains | together | published by others |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in public():
        lines.append(f"| {case.name} | {' | '.join(ranges(case))} | {PUBLISHED.get(case.name, '')} |")
    return "\n".join(lines)


def ranges(case: Case) -> list[str]:
    """Returns the predicted ms of the intra-chunk kernel, of the chains and of both, over the assumptions."""
    return spread([call_ms(case, *assumed) for assumed in zip(HOP_NS, BANDWIDTH)])


def spread(found: Sequence[Sequence[float]]) -> list[str]:
    """Returns the least and the largest ms of each launch, and of all of them together. ``found``: for each assumption."""
    columns = (*zip(*found), [sum(times) for times in found])
    return [" to ".join(sorted({f"{x[0]:.2f}", f"{x[-1]:.2f}"})) for x in columns]


def backward_table() -> str:
    """Returns the predictions of `backward_ms` as a Markdown table, the one of docs/kernels/sm100-backward.md."""
    lines = [
        "| shape | intra-chunk | recompute | reverse | gradients | together | with `disable_recompute` |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in training():
        both = [
            spread([[*backward_ms(case, *assumed, recompute).values()] for assumed in zip(HOP_NS, BANDWIDTH)])
            for recompute in (True, False)
        ]
        lines.append(f"| {case.name} | {' | '.join(both[0])} | {both[1][-1]} |")
    return "\n".join(lines)


def cula_table() -> str:
    """Returns the predictions for the shapes of cuLA's pages as a Markdown table, the one of docs/kernels/sm100-chain.md."""
    lines = [
        "| shape | predicted, a B200 | cuLA, a GB200, CUDA 12.9 | CUDA 13.0 |",
        "| --- | --- | --- | --- |",
    ]
    cases = {case.name: case for case in blackwell_cases()}
    for name, published in CULA_GB200.items():
        lines.append(f"| {name} | {ranges(cases[name])[-1]} | {' | '.join(f'{x:.3f}' for x in published)} |")
    return "\n".join(lines)


def main() -> None:
    print("kda-sm90's chain, one H200, ns per token            model  measured    off")
    for (chunk, warpgroups), times in MEASURED.items():
        for whole, measured in zip((False, True), times):
            ns = hopper(chunk, warpgroups, whole).clocks() / HOPPER_GHZ / chunk
            what = "with loads, v and O" if whole else "without"
            print(
                f"  C = {chunk}, {warpgroups} warpgroup(s), {what:20} {ns:14.1f} {measured:9.1f} {ns / measured - 1:+6.0%}"
            )
    print("\nkda-sm100's chain, predicted from assumptions   clocks per chunk  us per chunk  ns per token")
    for outputs, chunk, hop in itertools.product((True, False), (64, 32), HOP_NS):
        clocks = blackwell(chunk, hop * BLACKWELL_GHZ, outputs)
        us = clocks / BLACKWELL_GHZ / 1000
        what = f"C = {chunk}, {hop:3} ns per hop{'' if outputs else ', summary'}"
        print(f"  {what:38} {clocks:22.0f} {us:12.2f} {us * 1000 / chunk:12.1f}")
    print("\nchains of kda-sm100's backward, predicted from assumptions, us per chunk of 64\n")
    print(reverse_table())
    print("\nbackwards of kda-sm100 on a B200, predicted from assumptions, not measured, ms\n")
    print(backward_table())
    print("\ncalls of kda-sm100 on a B200, predicted from assumptions, not measured, ms\n")
    print(table())
    print("\nthe same for the shapes of cuLA's pages, beside its times on a GB200, ms\n")
    print(cula_table())


if __name__ == "__main__":
    main()
