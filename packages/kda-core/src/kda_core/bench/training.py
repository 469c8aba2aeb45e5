"""The rows of training: one case and gate family, measured with one implementation and mode after the other."""

from __future__ import annotations

from typing import Any

import torch

from kda_core.bench import implementations, measure, peers, prefill, steps
from kda_core.bench.cases import UNBOUNDED, Case, shortened
from kda_core.testing import Inputs


def serves(impl: str, case: Case, disable_recompute: bool) -> bool:
    """Returns whether an implementation has a case and mode. Of the peers, only FLA has modes."""
    has_mode = not disable_recompute or impl == "fla" or not peers.is_peer(impl)
    return has_mode and implementations.serves(impl, peers.TRAINING, case)


def draw(case: Case, gates: str, initial_state: bool = False) -> Inputs:
    """Returns the inputs of a case on the CPU. Bounded gates come with the promise `safe_gate`, which FLA's fast kernels need."""
    x = prefill.draw(case, gates, initial_state)
    return x if gates in UNBOUNDED else x.replace(safe_gate=True)


class Training:
    """The steps of a case with one gate family on a device, a short call for errors, and its exact gradients.

    cuDNN's backward takes only inputs whose gate, l2norm and sigmoid its caller has computed: its steps are prepared.
    """

    def __init__(self, case: Case, gates: str, device: torch.device, error_tokens: int):
        """Draws the inputs. `error_tokens`: most tokens of the call whose errors are measured."""
        self._case, self._gates, self._device = case, gates, device
        self._short = shortened(case, error_tokens)
        # By whether the inputs are prepared.
        self._timed = {False: steps.problem(draw(case, gates), device, final_state=False)}
        checked = draw(self._short, gates, initial_state=True)
        self._checked = {False: steps.problem(checked, device, final_state=True)}
        self._want: dict[bool, Any] = {}
        self._of_fla: dict[str, torch.Tensor] | None = None

    def measure(self, impl: str, disable_recompute: bool, repeats: int) -> dict[str, Any]:
        """Returns the row of an implementation and mode; benchmarks/training.py documents the fields. Rows after one of FLA have the
        difference from it."""
        case, device, is_prepared = self._case, self._device, impl in peers.ENGINES
        if is_prepared and True not in self._timed:
            self._timed[True], self._checked[True] = map(
                steps.prepared, (self._timed[False], self._checked[False])
            )
        step = steps.Step(impl, self._timed[is_prepared], disable_recompute)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        row: dict[str, Any] = {
            "case": case.name, "table": case.table, "B": case.B, "T": case.T, "H": case.H, "HV": case.HV,
            "lengths": list(case.lengths), "gates": self._gates, "impl": impl, "disable_recompute": disable_recompute,
            "prepared": is_prepared, "first_step_s": steps.first(step, device),
        }  # fmt: skip
        row |= (
            steps.memory(step, before) if device.type == "cuda" else {"saved_bytes": None, "peak_bytes": None}
        )
        gradients = step()
        peer = None if impl == "fla" or is_prepared else self._of_fla
        row["difference_fla"] = peer and difference(gradients, peer, case.HV)
        if impl == "fla" and self._of_fla is None:
            self._of_fla = gradients
        del gradients
        row |= steps.times(step, device, repeats)
        row["eager_ms"] = measure.eager_time(step, repeats)
        del step
        problem = self._checked[is_prepared]
        if is_prepared not in self._want:
            self._want[is_prepared] = steps.exact(problem)
        # After the measured shape: FLA tunes its kernels for the first shape that it meets.
        row |= {"error_case": self._short.name}
        row |= steps.errors(steps.Step(impl, problem, disable_recompute), problem, self._want[is_prepared])
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return row


def difference(gradients: dict[str, torch.Tensor], peer: dict[str, torch.Tensor], heads: int) -> float:
    """Returns the largest `steps.gradient_error` of the gradients from those of a peer on the same inputs."""
    return max(steps.gradient_error(name, x, peer[name], heads) for name, x in gradients.items())
