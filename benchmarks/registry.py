"""The benchmark cases: shapes and the tables that they belong to. Nothing here touches a GPU.

Every case runs with each family of gates (`kda_core.testing`): steep, slow, memory; and, where a run asks for them, with
`UNBOUNDED` ones. Packed cases name their lengths.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

GATES = ("steep", "slow", "memory")
#: The inputs of a family without its lower bound: gates in the softplus form, which may lie below -5.
UNBOUNDED = {f"{family}-unbounded": family for family in ("steep", "slow")}
# Tables. Those of prefill are measured on every architecture, "blackwell" on that one; a case that several have is of the first.
PREFILL, CONTEXT_PARALLEL = ("public", "gva", "varlen", "padded", "blackwell"), ("cp", "cp-h16", "cp-1m")

#: Behind the name of an implementation: split where kda-cp says so, or by its best plan of certified decay.
CP, CERTIFIED = PLANNED = "+cp", "+certified"


@dataclass(frozen=True)
class Case:
    """One shape. `lengths` are those of the sequences packed along T (then B = 1), empty for fixed length.
    `table` names the group of rows that a report shows together. With `use_graph` the call says so, and its lengths may
    sum to less than T."""

    name: str
    table: str
    B: int
    T: int
    H: int
    HV: int
    lengths: tuple[int, ...] = ()
    use_graph: bool = False

    @property
    def behind(self) -> int:
        """Tokens that belong to no sequence."""
        return self.T - sum(self.lengths) if self.lengths else 0


def fixed(table: str, B: int, T: int, H: int, HV: int | None = None) -> Case:
    HV = HV or H
    heads = f"H{H}" if HV == H else f"H{H}-HV{HV}"
    return Case(f"B{B}-T{T}-{heads}", table, B, T, H, HV)


def packed(table: str, label: str, lengths: tuple[int, ...], H: int, HV: int | None = None) -> Case:
    HV = HV or H
    heads = f"H{H}" if HV == H else f"H{H}-HV{HV}"
    return Case(f"varlen-{label}-{heads}", table, 1, sum(lengths), H, HV, lengths)


def uniform(T: int, n: int) -> tuple[int, ...]:
    """n sequences of T // n tokens, the first T % n of them one longer."""
    return tuple(T // n + (i < T % n) for i in range(n))


def drawn(T: int, n: int, seed: int) -> tuple[int, ...]:
    """n sequences of at least `SHORTEST` tokens: the tokens above that many are shared out between n - 1 distinct cuts
    of their number, drawn without replacement by ``random.Random(seed)``."""
    spare = T - SHORTEST * n
    cuts = sorted(random.Random(seed).sample(range(1, spare), n - 1))
    return tuple(SHORTEST + b - a for a, b in zip([0, *cuts], [*cuts, spare]))


def skewed(T: int, n: int) -> tuple[int, ...]:
    """One sequence of T // 2 tokens, then n - 1 that share the rest evenly, longer ones first."""
    return (T // 2, *uniform(T - T // 2, n - 1))


def _tokens(part: str) -> tuple[int, ...]:
    """The lengths that "2x1K" stands for."""
    count, _, length = part.rpartition("x")
    number = int(length.removesuffix("K")) * (1024 if length.endswith("K") else 1)
    return (number,) * int(count or 1)


#: The outputs of a sequence of one or two tokens may cancel to almost nothing in one head of many. The largest relative
#: error over heads then compares the luck of implementations that round alike (conformance tests such sequences).
SHORTEST = 16

MIXED = (1300, 547, 2048, 963, 271, 3063)  # lengths that published benchmarks of KDA kernels use, 8192 in all


RAGGED = {
    label: tuple(tokens for part in label.split("+") for tokens in _tokens(part))
    for label in (
        "16K+16K", "24K+8K", "28K+4K", "32K+256+256", "40K+1K+8K", "64K+512+256+128", "64K+32K+16K", "128K+1K",
        "128K+2x1K", "128K+5x1K", "128K+10x1K",
    )
}  # fmt: skip


def public() -> list[Case]:
    """The shapes of published benchmarks of KDA prefill."""
    cases = [fixed("public", B, T, H, HV) for B, T, H, HV in (
        (1, 2048, 12, 12), (1, 8192, 32, 32), (1, 8192, 64, 64), (1, 8192, 96, 96), (2, 8192, 64, 64),
        (1, 16384, 16, 16), (1, 65536, 8, 8), (1, 65536, 4, 4), (1, 8192, 16, 64), (1, 1024, 64, 64), (2, 16384, 64, 64),
    )]  # fmt: skip
    return cases + [packed("public", "mixed", MIXED, H) for H in (64, 96)]


def gva() -> list[Case]:
    """Fixed lengths with grouped value heads."""
    lengths = ((1, 1024), (1, 4096), (1, 8192), (1, 16384), (2, 4096), (2, 8192))
    return [fixed("gva", B, T, H, 64) for B, T in lengths for H in (64, 32, 16, 8)]


def varlen() -> list[Case]:
    """Packed sequences, lengths by the rules above; the seed of a drawn case is its number of sequences."""
    cases = [case for T in (4096, 8192) for n in (10, 20) for case in kinds("varlen", T, n, 64)]
    return cases + [packed("varlen", f"random-{n}x-T8192", drawn(8192, n, n), 32) for n in range(15, 19)]


def kinds(table: str, T: int, n: int, H: int, HV: int | None = None) -> list[Case]:
    """T tokens in n sequences by each rule."""
    lengths = {"uniform": uniform(T, n), "random": drawn(T, n, n), "skewed": skewed(T, n)}
    return [packed(table, f"{kind}-{n}x-T{T}", x, H, HV) for kind, x in lengths.items()]


def padded() -> list[Case]:
    """Packed calls with `use_graph`, as a serving engine captures them: room for T tokens, of which some are in use."""
    shapes = [(T, (256,) * 16, H) for H in (32, 4) for T in (4096, 8192, 65536)] + [(8192, (256,) * 32, 32)]
    return [
        Case(f"padded-{len(x)}x{x[0]}-T{T}-H{H}", "padded", 1, T, H, H, x, use_graph=True)
        for T, x, H in shapes
    ]


def blackwell() -> list[Case]:
    """The shapes of published benchmarks of KDA prefill on Blackwell, with as many heads of q and k as of v and with a
    quarter of them. Those of context parallelism are in `context_parallel`."""
    found = []
    for H in (64, 16):
        found += [fixed("blackwell", B, T, H, 64) for B in (1, 2) for T in (512, 1024, 4096, 8192, 16384)]
        for T in (4096, 8192, 16384):
            found += [case for n in (10, 20) for case in kinds("blackwell", T, n, H, 64)]
    return found


def context_parallel() -> list[Case]:
    """The shapes of published benchmarks of context parallelism within one GPU, and longer ones. They are the same on every
    architecture: rows of Blackwell are those of the implementations ``kda-sm100`` and ``kda-sm100+cp``."""
    found = []
    for H in (4, 8):
        found += [fixed("cp", 1, kilo * 1024, H) for kilo in (4, 8, 32, 64, 128)]
        found += [fixed("cp", B, kilo * 1024, H) for B, kilo in ((8, 4), (4, 8), (2, 16))]
        found += [packed("cp", label, lengths, H) for label, lengths in RAGGED.items()]
    found += [fixed("cp-h16", 1, kilo * 1024, 16) for kilo in (8, 16, 64, 256)]
    found += [packed("cp-h16", "32K+7x4K", (32 * 1024, *[4096] * 7), 16)]
    return found + [fixed("cp-1m", 1, 1 << 20, H) for H in (4, 8)]


def cases(hv: int | None = None) -> tuple[Case, ...]:
    """All cases of the `PREFILL` tables, by name; `hv` replaces the number of value heads of the GVA table.

    Raises:
        ValueError: `hv` is no multiple of a row's H.
    """
    found = [*public(), *varlen()]
    for c in gva():
        if hv is not None:
            if hv % c.H:
                raise ValueError(f"hv: expected a multiple of H={c.H}, got {hv}")
            c = replace(fixed("gva", c.B, c.T, c.H, hv), table="gva")
        found.append(c)
    found += [*padded(), *blackwell()]
    return tuple({c.name: c for c in reversed(found)}.values())[::-1]


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a results file in the order of the cases here, whichever was measured first; unknown ones last."""
    names = [c.name for c in (*context_parallel(), *cases())]
    place = {name: i for i, name in reversed([*enumerate(names)])}
    return sorted(rows, key=lambda r: place.get(r["case"], len(names)))
