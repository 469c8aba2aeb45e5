"""The rows of training: one case and gate family, measured with one implementation and mode after the other."""

from __future__ import annotations

from typing import Any

import torch

from kda_core.bench import implementations, measure, peers, prefill, steps
from kda_core.bench.cases import UNBOUNDED, Case, shortened
from kda_core.testing import Inputs

FIELDS = """Fields of a row of training:

  case, table, B, T, H, HV, lengths, gates, impl, disable_recompute    what was measured
  prepared              whether gate, l2norm and sigmoid were computed before the call
  inference_ms          forward without gradients, disable_recompute off
  forward_ms            forward in training mode, which saves what the backward needs
  backward_ms           backward alone; the saved tensors of one forward stay alive
  step_ms               forward and backward
  timing                how these four were measured: "graph", replays of a CUDA graph with the L2 flushed; "events", CUDA events
                        around an eager call with the L2 flushed, for a peer that no graph captures; "eager" on a CPU
  eager_ms              an eager step from its start to the end of its last kernel
  peak_bytes            peak of allocated memory above the inputs in an eager step; null on a CPU
  saved_bytes           what lives between forward and backward, besides inputs and outputs; null on a CPU
  first_step_s          the first step, with compilation and tuning
  difference_fla        largest `gradient_error` of a gradient from FLA's on the measured inputs, if FLA ran too
  error_case            the call whose errors were measured: the same heads and gates, B = 1, a limited number of tokens, with
                        an initial state and gradient of the final state, against autograd through the fp64 token loop
  error_o, error_state  largest relative Frobenius error over sequences and heads
  error_dq, error_dk, error_dv, error_dg, error_dbeta, error_dA_log, error_ddt_bias, error_dh0
                        relative Frobenius error of a gradient in its worst head, for A_log over all heads together; null where
                        the call has no such input
  median_dq, ...        the same of the median head: that of the worst head varies by tens of percent with the rounding errors
"""


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
        """Returns the row of an implementation and mode; see `FIELDS`."""
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
