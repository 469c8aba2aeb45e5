"""The benchmark cases: shapes, and the tables that they belong to. This module needs no GPU.

A name such as "B1-T8192-H16-HV64" describes a case of fixed length, so that `parse` also reads names that belong to no table.

Each case is measured with the gate families `GATES` of `kda_core.testing` (steep, slow, memory), and on request with the
families `UNBOUNDED`. The names of packed cases say how the lengths were chosen.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import Any

GATES = ("steep", "slow", "memory")
#: Gate families without the lower bound, and the family whose inputs they use. Their gate is in softplus form and may lie
#: below -5.
UNBOUNDED = {f"{family}-unbounded": family for family in ("steep", "slow")}
#: Tables of prefill. "blackwell" is measured on Blackwell only, the others on every architecture. A case that several tables
#: contain belongs to the first of them.
PREFILL = ("public", "gva", "varlen", "padded", "blackwell")
CONTEXT_PARALLEL = ("cp", "cp-h16", "cp-1m")
TRAINING = "training"

#: Suffixes of the name of an implementation: kda-cp decides whether to split (CP), or takes its best plan of certified decay
#: (CERTIFIED).
CP, CERTIFIED = PLANNED = "+cp", "+certified"


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        name: unique name, used in results files.
        table: the table that reports show the case in.
        B, T, H, HV: batch size, tokens, heads of q and k, heads of v.
        lengths: token counts of the sequences packed along T (then B = 1); empty for sequences of T tokens.
        use_graph: whether the call sets ``use_graph``; the lengths may then sum to less than T.
    """

    name: str
    table: str
    B: int
    T: int
    H: int
    HV: int
    lengths: tuple[int, ...] = ()
    use_graph: bool = False

    @property
    def padding(self) -> int:
        """Number of tokens after the last sequence, which belong to no sequence."""
        return self.T - sum(self.lengths) if self.lengths else 0


def fixed(table: str, B: int, T: int, H: int, HV: int | None = None) -> Case:
    """Returns a case of B sequences of T tokens."""
    HV = HV or H
    heads = f"H{H}" if HV == H else f"H{H}-HV{HV}"
    return Case(f"B{B}-T{T}-{heads}", table, B, T, H, HV)


def parse(name: str) -> Case | None:
    """Returns the case of fixed length with this name, in the table "custom"; None if the name has another form."""
    found = re.fullmatch(r"B(\d+)-T(\d+)-H(\d+)(?:-HV(\d+))?", name)
    if found is None:
        return None
    B, T, H, HV = (int(n) if n else None for n in found.groups())
    if not B or not T or not H or HV == 0 or (HV or H) % H:
        return None
    return fixed("custom", B, T, H, HV)


def packed(table: str, label: str, lengths: tuple[int, ...], H: int, HV: int | None = None) -> Case:
    """Returns a case of packed sequences; `label` describes the lengths in the case's name."""
    HV = HV or H
    heads = f"H{H}" if HV == H else f"H{H}-HV{HV}"
    return Case(f"varlen-{label}-{heads}", table, 1, sum(lengths), H, HV, lengths)


SMALL = fixed("cpu", 1, 128, 2)  # takes seconds on a CPU, forward and backward


# ---- lengths of packed sequences


def uniform(T: int, n: int) -> tuple[int, ...]:
    """Returns n lengths of T // n tokens; the first T % n of them are one token longer."""
    return tuple(T // n + (i < T % n) for i in range(n))


def drawn(T: int, n: int, seed: int) -> tuple[int, ...]:
    """Returns n random lengths of at least `SHORTEST` tokens.

    ``random.Random(seed)`` draws n - 1 distinct cuts of the T - n * `SHORTEST` remaining tokens without replacement.
    """
    spare = T - SHORTEST * n
    cuts = sorted(random.Random(seed).sample(range(1, spare), n - 1))
    return tuple(SHORTEST + b - a for a, b in zip([0, *cuts], [*cuts, spare]))


def skewed(T: int, n: int) -> tuple[int, ...]:
    """Returns one length of T // 2 tokens, then n - 1 lengths that share the rest evenly, longer ones first."""
    return (T // 2, *uniform(T - T // 2, n - 1))


def _tokens(part: str) -> tuple[int, ...]:
    """Returns the lengths that a part of a label names: "2x1K" is (1024, 1024)."""
    count, _, length = part.rpartition("x")
    number = int(length.removesuffix("K")) * (1024 if length.endswith("K") else 1)
    return (number,) * int(count or 1)


#: Fewest tokens of a random length. In sequences of one or two tokens the output of one head in many may cancel to almost
#: nothing. The largest relative error over heads then compares chance, not implementations. The conformance kit tests such
#: sequences.
SHORTEST = 16

MIXED = (
    1300,
    547,
    2048,
    963,
    271,
    3063,
)  # lengths in published benchmarks of KDA kernels, 8192 tokens in all


RAGGED = {
    label: tuple(tokens for part in label.split("+") for tokens in _tokens(part))
    for label in (
        "16K+16K", "24K+8K", "28K+4K", "32K+256+256", "40K+1K+8K", "64K+512+256+128", "64K+32K+16K", "128K+1K",
        "128K+2x1K", "128K+5x1K", "128K+10x1K",
    )
}  # fmt: skip


# ---- tables


def public() -> list[Case]:
    """Returns the shapes of published benchmarks of KDA prefill."""
    cases = [fixed("public", B, T, H, HV) for B, T, H, HV in (
        (1, 2048, 12, 12), (1, 8192, 32, 32), (1, 8192, 64, 64), (1, 8192, 96, 96), (2, 8192, 64, 64),
        (1, 16384, 16, 16), (1, 65536, 8, 8), (1, 65536, 4, 4), (1, 8192, 16, 64), (1, 1024, 64, 64), (2, 16384, 64, 64),
    )]  # fmt: skip
    return cases + [packed("public", "mixed", MIXED, H) for H in (64, 96)]


def gva() -> list[Case]:
    """Returns sequences of one length with grouped value heads."""
    lengths = ((1, 1024), (1, 4096), (1, 8192), (1, 16384), (2, 4096), (2, 8192))
    return [fixed("gva", B, T, H, 64) for B, T in lengths for H in (64, 32, 16, 8)]


def varlen() -> list[Case]:
    """Returns packed sequences. The seed of a case with random lengths is its number of sequences."""
    cases = [case for T in (4096, 8192) for n in (10, 20) for case in kinds("varlen", T, n, 64)]
    return cases + [packed("varlen", f"random-{n}x-T8192", drawn(8192, n, n), 32) for n in range(15, 19)]


def kinds(table: str, T: int, n: int, H: int, HV: int | None = None) -> list[Case]:
    """Returns three cases of T tokens in n sequences: uniform, random and skewed lengths."""
    lengths = {"uniform": uniform(T, n), "random": drawn(T, n, n), "skewed": skewed(T, n)}
    return [packed(table, f"{kind}-{n}x-T{T}", x, H, HV) for kind, x in lengths.items()]


def padded() -> list[Case]:
    """Returns packed calls with ``use_graph``, as a serving engine captures them: sequences that use a part of T tokens."""
    shapes = [(T, (256,) * 16, H) for H in (32, 4) for T in (4096, 8192, 65536)] + [(8192, (256,) * 32, 32)]
    return [
        Case(f"padded-{len(x)}x{x[0]}-T{T}-H{H}", "padded", 1, T, H, H, x, use_graph=True)
        for T, x, H in shapes
    ]


def blackwell() -> list[Case]:
    """Returns the shapes of published benchmarks of KDA prefill on Blackwell, with HV = H and with HV = 4 * H.

    Their shapes of context parallelism are in `context_parallel`.
    """
    found = []
    for H in (64, 16):
        found += [fixed("blackwell", B, T, H, 64) for B in (1, 2) for T in (512, 1024, 4096, 8192, 16384)]
        for T in (4096, 8192, 16384):
            found += [case for n in (10, 20) for case in kinds("blackwell", T, n, H, 64)]
    return found


def context_parallel() -> list[Case]:
    """Returns the shapes of published benchmarks of context parallelism within one GPU, and longer ones.

    The shapes are the same on every architecture.
    """
    found = []
    for H in (4, 8):
        found += [fixed("cp", 1, kilo * 1024, H) for kilo in (4, 8, 32, 64, 128)]
        found += [fixed("cp", B, kilo * 1024, H) for B, kilo in ((8, 4), (4, 8), (2, 16))]
        found += [packed("cp", label, lengths, H) for label, lengths in RAGGED.items()]
    found += [fixed("cp-h16", 1, kilo * 1024, 16) for kilo in (8, 16, 64, 256)]
    found += [packed("cp-h16", "32K+7x4K", (32 * 1024, *[4096] * 7), 16)]
    return found + [fixed("cp-1m", 1, 1 << 20, H) for H in (4, 8)]


def training() -> list[Case]:
    """Returns the shapes of training."""
    shapes = ((1, 8192, 32, 32), (1, 8192, 64, 64), (2, 8192, 64, 64), (1, 8192, 16, 64), (1, 65536, 4, 4))
    cases = [fixed(TRAINING, B, T, H, HV) for B, T, H, HV in shapes]
    return [*cases[:3], packed(TRAINING, "mixed", MIXED, 64), *cases[3:]]


def training_gates(case: Case) -> tuple[str, ...]:
    """Returns the gate families that a case of training is measured with: one shape has all of them."""
    return ("slow", "steep", "memory") if case.name == "B1-T8192-H64" else ("slow",)


def shortened(case: Case, tokens: int) -> Case:
    """Returns a case of B = 1 and at most `tokens` tokens with the heads of `case`; packed sequences become shorter by one
    factor. The fp64 token loop stores its state after every token, so its gradients need a short case."""
    if not case.lengths:
        return fixed(case.table, 1, min(case.T, tokens), case.H, case.HV)
    factor = -(-case.T // tokens)
    lengths = tuple(max(n // factor, 1) for n in case.lengths)
    return packed(case.table, "+".join(map(str, lengths)), lengths, case.H, case.HV)


def prefill(hv: int | None = None) -> tuple[Case, ...]:
    """Returns all cases of the `PREFILL` tables, each name once; `hv` replaces the number of value heads of table gva.

    Raises:
        ValueError: `hv` is not a multiple of a case's H.
    """
    found = [*public(), *varlen()]
    for c in gva():
        if hv is not None:
            if hv % c.H:
                raise ValueError(f"hv: expected a multiple of H={c.H}, got {hv}")
            c = replace(fixed("gva", c.B, c.T, c.H, hv), table="gva")
        found.append(c)
    found += [*padded(), *blackwell()]
    first: dict[str, Case] = {}
    for c in found:
        first.setdefault(c.name, c)
    return tuple(first.values())


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows of a results file in the order of the cases here; rows of unknown cases are last."""
    known = [(c.table, c.name) for c in (*prefill(), *context_parallel(), *training())]
    place = {name: i for i, name in enumerate(known)}
    return sorted(rows, key=lambda r: place.get((r["table"], r["case"]), len(known)))
