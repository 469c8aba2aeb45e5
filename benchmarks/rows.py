"""Measures the rows of one case and gate family, one for each implementation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import implementations, measure
from benchmarks.cases import CP, PLANNED, UNBOUNDED, Case
from kda_core.testing import Inputs, error, make_inputs, token_oracle

if TYPE_CHECKING:
    from kda_cp import Plan

#: Tokens per segment that ``--brute-force`` tries where the lengths of sequences differ.
SEGMENT_TOKENS = (*range(1024, 8192, 512), *range(8192, 16384, 1024), *range(16384, 65536, 4096))


@dataclass(frozen=True)
class Options:
    """How rows are measured.

    Attributes:
        repeats: timed repetitions of a row.
        errors_up_to: most tokens of a case whose errors are measured; the fp64 oracle takes them one by one.
        lengths_on_host: whether packed calls pass ``cu_seqlens_cpu``, without which no call is split.
        brute_force: whether to time all uniform plans, of 1 to `most_segments` segments for each sequence.
        most_segments: see `brute_force`.
    """

    repeats: int = 20
    errors_up_to: int = 1 << 18
    lengths_on_host: bool = False
    brute_force: bool = False
    most_segments: int = 64


def serves(impl: str, case: Case) -> bool:
    """Returns whether an implementation has the arguments of a case. FLA has no ``use_graph``."""
    return not (case.use_graph and impl == "fla")


def draw(case: Case, gates: str, initial_state: bool = False) -> Inputs:
    """Returns the inputs of a case on the CPU, with seed 0. The memory family has an initial state in any case."""
    family = UNBOUNDED.get(gates, gates)
    lengths = (*case.lengths, case.padding) if case.padding else case.lengths
    shape: dict[str, Any] = {"B": case.B, "H": case.H, "HV": case.HV, "lengths": lengths or None}
    x = make_inputs(family, case.T, seed=0, initial_state=initial_state, **shape)
    if case.padding:  # the last sequence becomes padding: its tokens stay, its bounds and state are dropped
        per_sequence = {n: x.arguments[n][:-1] for n in ("cu_seqlens", "initial_state") if n in x.arguments}
        x = Inputs(x.arguments | per_sequence, case.lengths)
    return x if family == gates else x.replace(lower_bound=None)


def measure_rows(
    case: Case, gates: str, x: Inputs, impls: list[str], device: torch.device, options: Options
) -> list[dict[str, Any]]:
    """Returns a row for each implementation that serves the case; run.py documents the fields."""
    x = Inputs(
        {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in x.arguments.items()}, x.lengths
    )
    call = dict(x.arguments) | {"output_final_state": True}
    if case.use_graph:
        call |= {"use_graph": True, "max_num_seqs": len(case.lengths)}
    if options.lengths_on_host and case.lengths:
        call["cu_seqlens_cpu"] = call["cu_seqlens"].cpu()
    tokens = case.T - case.padding
    checked = case.B * tokens <= options.errors_up_to
    want_o, want_s = token_oracle(**x.tokens(0, tokens)) if checked else (None, None)
    rows, outputs = [], {}
    for name in (impl for impl in impls if serves(impl, case)):
        function = implementations.named(name, call)
        with torch.inference_mode():
            started = time.perf_counter()
            o, state = function(**call)
            first = time.perf_counter() - started
            row: dict[str, Any] = {
                "case": case.name, "table": case.table, "B": case.B, "T": case.T, "H": case.H, "HV": case.HV,
                "lengths": list(case.lengths), "gates": gates, "impl": name,
                "error_o": error(o[:, :tokens], want_o, lengths=x.lengths) if checked else None,
                "error_state": error(state, want_s, state=True) if checked else None,
                "first_call_s": first,
            }  # fmt: skip
            once = lambda f=function: f(**call)
            row["median_ms"] = measure.device_time(once, options.repeats) if device.type == "cuda" else None
            row["eager_ms"] = measure.eager_time(once, options.repeats)
            if name.endswith(PLANNED):
                row |= plan_fields(name, call)
            if name.endswith(CP) and options.brute_force:
                row |= brute_force(name, call, device, options)
        outputs[name] = o
        rows.append(row)
        del o, state
    if "fla" in outputs:
        for row in rows:
            if row["impl"] != "fla":
                found = measure.difference(outputs[row["impl"]], outputs["fla"])
                row |= {f"{k}_fla": v for k, v in found.items()}
    return rows


def plan_fields(name: str, call: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a row that describe its plan, with the predicted times in milliseconds."""
    plan = implementations.plan(name, call)
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

    lengths = implementations.plan(name, call).lengths
    timed = measure.device_time if device.type == "cuda" else measure.eager_time

    def best(plans: dict[int, Plan]) -> tuple[float, int]:
        def ms(plan: Plan) -> float:
            function = implementations.planned(name, plan if plan.is_split else "off")
            return timed(lambda: function(**call), options.repeats)

        return min((ms(plan), n) for n, plan in plans.items())

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
