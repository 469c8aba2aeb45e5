"""Reports the resources and the instructions of the kernels of kda-sm100. Needs no GPU.

    python tools/sm100_kernel_report.py [page ...]

The program compiles the kernels and prints the tables of docs/kernels/sm100-*.md, and of decode.md and verify.md beside them:

- registers and spills by ptxas for both architectures, shared memory, columns of tensor memory;
- the instructions of a kernel and of its loops, by nvdisasm;
- the clocks that a chunk, or a segment of the merge, occupies each unit of an SM. These follow from the instruction counts and
  the assumptions below. For the chains, ``sm100_chain_model.py`` predicts times instead.

ptxas and nvdisasm come from PyPI's ``nvidia-cuda-nvcc`` and ``nvidia-cuda-nvdisasm``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm100_chain_model import BANDWIDTH, BLACKWELL_GHZ, COPIED, SMS, K

from kda_cute.decode import DecodeConfig
from kda_cute.gradients import GradientsConfig
from kda_cute.jit import ptxas
from kda_cute.journal import JournalConfig
from kda_cute.verify import VerifyConfig
from kda_sm100.config import (
    ARCHS,
    CHUNKS,
    SPACINGS,
    BackwardChainConfig,
    ChainConfig,
    IntraChunkConfig,
    OutputConfig,
    SummaryConfig,
)
from kda_sm100.layouts import record_bytes

#: The kernels of each page, with the variants whose instructions it shows: (name, configuration). For the merge, whose
#: configuration cannot be imported without the DSL, the number of columns stands for the configuration.
PAGES: dict[str, dict[str, list[tuple[str, Any]]]] = {
    "sm100-intra-chunk": {
        "IntraChunkKernel": [
            *((f"C = {C}, bounded", IntraChunkConfig(C)) for C in CHUNKS),
            *((f"C = {C}, unbounded", IntraChunkConfig(C, unbounded=True)) for C in CHUNKS),
        ]
    },
    "sm100-chain": {
        "ChainKernel": [(f"C = {C}", ChainConfig(C)) for C in CHUNKS],
        "ServingChainKernel": [(f"serving, C = {C}", ChainConfig(C, serving=True)) for C in CHUNKS],
    },
    "sm100-segments": {
        "SummaryKernel": [(f"summary, C = {C}", SummaryConfig(C)) for C in CHUNKS],
        "PoolSummaryKernel": [("summary over a pool, C = 64", SummaryConfig())],
        "PoolSegmentChainKernel": [("segments over a pool, C = 64", ChainConfig(serving=True))],
        "ReverseSummaryKernel": [("summary of a backward", BackwardChainConfig("reverse_summarize"))],
        "MergeKernel": [(f"merge, {columns} columns", columns) for columns in (8, 16)],
    },
    "sm100-backward": {
        "SavingChainKernel": [
            (f"saves every {spacing} tokens", ChainConfig(saves=spacing)) for spacing in SPACINGS
        ],
        "CheckpointChainKernel": [("checkpoint", BackwardChainConfig("checkpoint"))],
        "RecomputeChainKernel": [("recompute", BackwardChainConfig("recompute"))],
        "ReverseChainKernel": [("reverse", BackwardChainConfig())],
        "GradientsKernel": [
            ("gradients, bounded", GradientsConfig()),
            ("gradients, unbounded", GradientsConfig(unbounded=True)),
        ],
    },
    "sm100-output": {"OutputKernel": [(f"C = {C}", OutputConfig(C)) for C in CHUNKS]},
    "decode": {
        "DecodeKernel": [
            ("[V, K], 16 values", DecodeConfig(16)),
            ("[V, K], 32 values", DecodeConfig(32)),
            ("[V, K], 64 values of bf16", DecodeConfig(64, state_dtype="bfloat16")),
            ("[K, V], 32 values", DecodeConfig(32, v_first=False)),
        ]
    },
    "verify": {
        "JournalKernel": [
            ("[V, K], 64 values", JournalConfig(64)),
            ("[V, K], 64 values of bf16", JournalConfig(64, state_dtype="bfloat16")),
            ("[K, V], 32 values", JournalConfig(32, v_first=False)),
        ],
        "VerifyKernel": [
            ("8 tokens", VerifyConfig(8)),
            ("8 tokens, records", VerifyConfig(8, records=True)),
            ("8 tokens, states of bf16", VerifyConfig(8, state_dtype="bfloat16")),
        ],
    },
}

#: Kernels without a table of clocks: `sm100_chain_model` predicts those of a chain, and calls over states are bound by HBM.
UNTIMED = (
    "ChainKernel",
    "ServingChainKernel",
    "SummaryKernel",
    "PoolSummaryKernel",
    "PoolSegmentChainKernel",
    "ReverseSummaryKernel",
    "SavingChainKernel",
    "CheckpointChainKernel",
    "RecomputeChainKernel",
    "ReverseChainKernel",
    "GradientsKernel",
    "DecodeKernel",
    "JournalKernel",
    "VerifyKernel",
)

#: Names of loops, by the prefix of an instruction that a loop contains. The first entry that matches counts.
LOOPS = {
    "UTCHMMA": "MMA warp, per chunk",
    "UBLKCP": "producer warp, per chunk",
    "STTM": "state warps, per chunk",
    "LDTM": "output warps, per chunk",
    "HMMA.1688.F32.TF32": "per segment",
    "HMMA": "products with a block of 16 columns",
}
LEAST = 20  # instructions; a shorter loop only waits

BLOCK = 16  # rows per warp
MERGE_WARPS = 8

# ---- assumptions: clocks of an SM per warp instruction. Source: CUDA C++ programming guide, throughput of arithmetic instructions,
# 10.0. Per clock, an SM issues four instructions, converts 64 values and evaluates 16 transcendentals; shared memory and the L1,
# which are the same memory, move 128 bytes. The rate of mma.sync on Blackwell is not published. Assumed is an A100's: 1024 bf16
# FMAs per clock, and half as many in TF32.
ISSUE, CONVERSION, TRANSCENDENTAL, SHARED = 1 / 4, 32 / 64, 32 / 16, 128
PRODUCT = 16 * 8 * 16 / 1024  # m16n8k16 of bf16, m16n8k8 of TF32


@dataclass(frozen=True)
class Code:
    """The machine code of a kernel.

    Attributes:
        instructions: names with modifiers.
        loops: (first, last) index of the instructions of each loop.
    """

    instructions: list[str]
    loops: list[tuple[int, int]]

    def mix(self, first: int = 0, last: int = -2) -> Counter:
        """Returns the number of instructions from ``first`` to ``last`` by name, without modifiers."""
        return Counter(name.partition(".")[0] for name in self.instructions[first : last + 1 or None])

    def named_loops(self) -> Iterator[tuple[str, int, int]]:
        """Yields (name, first, last) of the loops that `LOOPS` names."""
        for first, last in self.loops:
            inside = self.instructions[first : last + 1]
            has = lambda marker, inside=inside: any(name.startswith(marker) for name in inside)
            name = next((name for marker, name in LOOPS.items() if has(marker)), None)
            if name is not None:
                yield name, first, last


def parse(text: str) -> Code:
    """Returns the code that nvdisasm printed, up to the last EXIT. The waits and traps after it are left out."""
    found: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := re.match(r"\s*(\.L_x_\d+):", line):
            labels[match[1]] = len(found)
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(.*);", line):
            found.append((match[1], match[2]))
    found = found[: max(i for i, (name, _) in enumerate(found) if name == "EXIT") + 1]
    loops = []
    for last, (name, operands) in enumerate(found):
        if name.startswith("BRA") and (match := re.search(r"\.L_x_\d+", operands)):
            first = labels[match[0]]
            if last - first >= LEAST:
                loops.append((first, last))
    return Code([name for name, _ in found], loops)


def code_of(kernel: type, config: Any) -> Code:
    """Compiles a kernel for the first architecture and returns its code."""
    tool = ptxas.tool_path("nvdisasm", "nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        ptxas.report(kernel, config, ARCHS[0], cubin)
        done = subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, check=True)
    return parse(done.stdout)


def markdown(head: list[str], rows: list[list[Any]]) -> str:
    """Returns a Markdown table."""
    line = lambda cells: f"| {' | '.join(map(str, cells))} |"
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


# ---- resources, by ptxas


def resources(kernels: list[tuple[type, Any]]) -> str:
    """Returns the table of resources: a line per kernel and chunk size, over all its variants."""
    groups: dict[tuple[str, Any], list[tuple[type, Any]]] = {}
    for kernel, config in kernels:
        groups.setdefault((kernel.__name__, getattr(config, "chunk", "")), []).append((kernel, config))
    rows = []
    for (name, chunk), variants in groups.items():
        reports = {arch: [ptxas.report(*v, arch) for v in variants] for arch in ARCHS}
        every = [report for found in reports.values() for report in found]
        registers = [
            [u.registers for r in found for u in r.usage if u.registers] for found in reports.values()
        ]
        spilled = sum(u.spill_stores + u.spill_loads for r in every for u in r.usage)
        made = [kernel(config) for kernel, config in variants]
        extent = lambda x: " to ".join(f"{y:.4g}" for y in sorted({min(x), max(x)}))
        rows.append(
            [f"`{name}`", chunk, len(variants), *map(extent, registers), spilled, sum(len(r.complaints) for r in every),
             extent([x.shared_bytes / 1024 for x in made]), columns(made[0])]
        )  # fmt: skip
    head = ["kernel", "C", "variants", *(f"registers, {arch}" for arch in ARCHS), "bytes spilled", "ptxas advisories",
            "shared memory, KiB", "columns of tensor memory"]  # fmt: skip
    return markdown(head, rows)


def columns(kernel: Any) -> int:
    """Returns the columns of tensor memory that the matrices of a kernel occupy."""
    layout = getattr(kernel, "tensor_columns", None)
    return layout.used if layout else 0


# ---- instructions, by nvdisasm


def mixes(codes: dict[str, Code]) -> str:
    """Returns the table of instruction counts, for each variant of the whole kernel and of its loops."""
    rows = []
    for variant, code in codes.items():
        parts = [("all", 0, len(code.instructions) - 1), *code.named_loops()]
        lines = [(name, last - first + 1, shown(code.mix(first, last))) for name, first, last in parts]
        for line, times in Counter(lines).items():
            name, *rest = line
            rows.append([variant, name if times == 1 else f"{name}, {times} such loops", *rest])
    return markdown(["variant", "part", "instructions", "of them"], rows)


def shown(mix: Counter) -> str:
    """Returns the counts of the frequent instructions (32 or more) and of all that multiply or move data."""
    always = re.compile(r"LD[SGT]|ST[SGT]|[A-Z]*MMA|UBLKCP|MUFU")
    chosen = sorted(((n, name) for name, n in mix.items() if n >= 32 or always.match(name)), reverse=True)
    return ", ".join(f"{n} {name}" for n, name in chosen if name != "LDGDEPBAR")


# ---- clocks per chunk, or per segment of the merge


def times(kernel: str, codes: dict[str, tuple[Any, Code]]) -> str:
    """Returns the table of the clocks of each unit of an SM, and of the time of HBM."""
    rows, units = [], {}
    for variant, (config, code) in codes.items():
        units = clocks(kernel, config, code)
        size = moved(kernel, config)
        ns = [size * SMS / bandwidth for bandwidth in BANDWIDTH]
        rows.append(
            [variant, *(f"{x:.0f}" for x in units.values()), f"{max(units.values()) / BLACKWELL_GHZ / 1e3:.2f}",
             f"{size / 1024:.1f}", f"{min(ns) / 1e3:.2f} to {max(ns) / 1e3:.2f}"]
        )  # fmt: skip
    return markdown(["variant", *units, "largest, us", "KiB of HBM", "HBM, us"], rows)


def clocks(kernel: str, config: Any, code: Code) -> dict[str, float]:
    """Returns the clocks that each unit is busy: an upper bound, except for bank conflicts. Every warp takes all branches."""
    counted = list(zip(code.instructions, turns(code, getattr(config, "chunk", 0)), strict=True))
    of = lambda prefix: sum(n for name, n in counted if name.startswith(prefix))
    bulk = 2 * record_bytes(config.chunk)["w"] if kernel == "IntraChunkKernel" else 0
    loaded = sum(n * lane_bytes(name) * 32 for name, n in counted if re.match(r"LDG(STS)?\b", name))
    return {
        "issue": ISSUE * sum(n for _, n in counted),
        "conversions": CONVERSION * of("F2FP"),
        "transcendentals": TRANSCENDENTAL * of("MUFU"),
        "mma.sync": PRODUCT * products(kernel, config),
        "shared memory, L1": sum(n * shared_clocks(name) for name, n in counted) + bulk / SHARED,
        "L2": loaded / COPIED,
    }


def turns(code: Code, C: int) -> list[int]:
    """Returns how often all warps together execute each instruction.

    A warp executes the products with the blocks up to its own, skips the search for the sequence, and executes the rest once.
    For the merge, C is 0 and the count is that of one turn of the loop over segments.
    """
    blocks = C // BLOCK
    found = [blocks] * len(code.instructions)
    loops = {(first, last): 0 for first, last in code.loops}
    for name, first, last in code.named_loops():
        loops[first, last] = blocks * (blocks + 1) // 2 if name.startswith("products") else MERGE_WARPS
    for (first, last), n in loops.items():
        found[first : last + 1] = [n] * (last - first + 1)
    return found


def products(kernel: str, config: Any) -> float:
    """Returns the number of mma.sync, in units of bf16 m16n8k16: with l2norm, for bounded gates.

    For the merge, the number per segment of TF32 m16n8k8, which takes as long; three per product, because factors are in parts.
    """
    if kernel == "MergeKernel":
        return 3 * (K // 16) * (K // 8) * (config.columns // 8)
    blocks, steps, tiles = config.chunk // BLOCK, K // BLOCK, K // 8
    below, pairs = blocks * (blocks - 1) // 2, blocks * (blocks + 1) // 2
    if kernel != "IntraChunkKernel":
        return (blocks * steps + pairs) * tiles  # S, v_new
    norms = blocks * 64 / 2  # m16n8k8
    inverse = sum((blocks - step) * 6 * (step + 1) for step in range(1, blocks))
    return norms + (blocks + below) * 4 * steps + inverse + 2 * pairs * tiles  # L and Aqk; w and u


def shared_clocks(name: str) -> float:
    """Returns the clocks of shared memory or the L1 for one instruction of a warp; 0 if it accesses neither."""
    if name.startswith(("LDSM", "STSM")):
        return 128 * int(name.rpartition(".")[2]) / SHARED
    if re.match(r"(LDS|STS|LDG|LDGSTS)\b", name):
        return 32 * lane_bytes(name) / SHARED
    return 0.0


def lane_bytes(name: str) -> int:
    """Returns the bytes that a load or a store moves per lane; accesses of less than 4 bytes count as 4."""
    return next((int(x) for x in name.split(".") if x in ("64", "128")), 32) // 8


def moved(kernel: str, config: Any) -> int:
    """Returns the bytes of HBM traffic per CTA.

    q and k have as many heads as v; g is in bf16, for the output kernel in fp32. The merge moves M and its columns of B and S.
    Bytes that several CTAs share count once.
    """
    state = 2 * K * K
    if kernel == "MergeKernel":
        return (2 + 2 * 2) * state // (K // config.columns)  # of 16 or 8 CTAs
    C, wide = config.chunk, 2 * config.chunk * K
    if kernel == "OutputKernel":
        return 5 * wide + 2 * C * C + state  # q, v_new, g, o; A; S
    return 4 * wide + 2 * C + sum(record_bytes(C).values())  # q, k, v, g; beta; the record


def main(names: list[str]) -> None:
    """Prints the tables of the pages with these names; of all pages if there are none."""
    from kda_cute.merge import MergeConfig
    from kda_sm100.variants import kernels

    every = kernels()
    for page in names or PAGES:
        mine = [(kernel, config) for kernel, config in every if kernel.__name__ in PAGES[page]]
        print(f"{page}\n\n{resources(mine)}\n")
        for name, variants in PAGES[page].items():
            kernel = next(kernel for kernel, _ in mine if kernel.__name__ == name)
            configs = {v: MergeConfig(c) if name == "MergeKernel" else c for v, c in variants}
            codes = {variant: (config, code_of(kernel, config)) for variant, config in configs.items()}
            print(mixes({variant: code for variant, (_, code) in codes.items()}), end="\n\n")
            if name not in UNTIMED:
                print(times(name, {v: c for v, c in codes.items() if "unbounded" not in v}), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
