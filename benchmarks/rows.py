"""The rows of one case and gate family of prefill or of context parallelism, one for each implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import plans
from kda_core.bench import measure
from kda_core.bench.cases import CP, PLANNED, Case
from kda_core.bench.implementations import serves
from kda_core.bench.prefill import Prefill
from kda_core.testing import Inputs

if TYPE_CHECKING:
    from kda_cp import Plan

#: Tokens per segment that ``--brute-force`` tries where the lengths of sequences differ.
SEGMENT_TOKENS = (*range(1024, 8192, 512), *range(8192, 16384, 1024), *range(16384, 65536, 4096))


@dataclass(frozen=True)
class Options:
    """How rows are measured.

    Attributes:
        repeats: timed repetitions of a row.
        errors_up_to, lengths_on_host: see `Prefill`.
        brute_force: whether to time all uniform plans, of 1 to `most_segments` segments for each sequence.
        most_segments: see `brute_force`.
    """

    repeats: int = 20
    errors_up_to: int = 1 << 18
    lengths_on_host: bool = False
    brute_force: bool = False
    most_segments: int = 64


def measure_rows(
    case: Case, gates: str, x: Inputs, impls: list[str], device: torch.device, options: Options
) -> list[dict[str, Any]]:
    """Returns a row for each implementation that serves the case; run.py documents the fields."""
    prefill = Prefill(case, gates, x, device, options.errors_up_to, options.lengths_on_host)
    call = prefill.arguments
    rows, outputs = [], {}
    for name in (impl for impl in impls if serves(impl, "prefill", case)):
        row, outputs[name] = prefill.measure(name, plans.named(name, call), options.repeats)
        with torch.inference_mode():
            if name.endswith(PLANNED):
                row |= plan_fields(name, call)
            if name.endswith(CP) and options.brute_force:
                row |= brute_force(name, call, device, options)
        rows.append(row)
    if "fla" in outputs:
        for row in rows:
            if row["impl"] != "fla":
                found = measure.difference(outputs[row["impl"]], outputs["fla"])
                row |= {f"{k}_fla": v for k, v in found.items()}
    return rows


def plan_fields(name: str, call: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a row that describe its plan, with the predicted times in milliseconds."""
    plan = plans.plan(name, call)
    predicted = plan.prediction
    in_ms = lambda t: t / 1e3 if t is not None and predicted is not None and predicted.unit == "us" else None
    return {
        "plan": str(plan), "pieces": max(map(len, plan.segments)),
        "predicted_ms": in_ms(predicted and predicted.planned),
        "predicted_serial_ms": in_ms(predicted and predicted.serial),
    }  # fmt: skip


def brute_force(name: str, call: dict[str, Any], device: torch.device, options: Options) -> dict[str, Any]:
    """Returns the fields of a row on the best of two families of plans; both contain the serial plan.

    The first family cuts every sequence into the same number of segments. The second, where lengths differ, cuts all sequences
    into segments of the same number of tokens.
    """
    from kda_cp import Plan

    lengths = plans.plan(name, call).lengths
    timed = measure.device_time if device.type == "cuda" else measure.eager_time

    def best(candidates: dict[int, Plan]) -> tuple[float, int]:
        def ms(plan: Plan) -> float:
            function = plans.planned(name, plan if plan.is_split else "off")
            return timed(lambda: function(**call), options.repeats)

        return min((ms(plan), n) for n, plan in candidates.items())

    ms, count = best({n: Plan.uniform(lengths, n) for n in range(1, options.most_segments + 1)})
    found = {"best_uniform_ms": ms, "best_uniform_pieces": count}
    if len({*lengths}) > 1:
        longest = max(lengths)
        tokens = (*(n for n in SEGMENT_TOKENS if n < longest), longest)
        found["best_fixed_ms"], found["best_fixed_tokens"] = best(
            {n: equal_segments(lengths, n) for n in tokens}
        )
    return found


def equal_segments(lengths: tuple[int, ...], tokens: int) -> Plan:
    """Returns the plan whose segments all have `tokens` tokens, except for the last segment of a sequence."""
    from kda_cp import Plan

    rest = lambda n: (n % tokens,) if n % tokens or not n else ()
    return Plan(tuple((*[tokens] * (n // tokens), *rest(n)) for n in lengths))
