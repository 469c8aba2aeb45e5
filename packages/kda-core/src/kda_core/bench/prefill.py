"""The rows of prefill: one case and gate family, measured with one implementation after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_core.bench import measure, peers
from kda_core.bench.cases import UNBOUNDED, Case
from kda_core.bench.peers import Outputs
from kda_core.testing import Inputs, error, make_inputs, token_oracle

FIELDS = """Fields of a row of prefill:

  case, table, B, T, H, HV, lengths, gates, impl    what was measured
  median_ms             device time: replays of a CUDA graph with the L2 flushed; null on a CPU
  timing                only of a peer that no CUDA graph captures: "events", CUDA events around an eager call with the L2 flushed
  eager_ms              an eager call from its start to the end of its last kernel
  error_o, error_state  largest relative Frobenius error over sequences and heads against the fp64 token loop; null for calls of so
                        many tokens that no errors are measured
  first_call_s          the first call, with compilation
"""


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


class Prefill:
    """The calls of a case with one gate family on a device, and their exact outputs.

    Attributes:
        arguments: of the call, on the device; with the final state.
    """

    def __init__(
        self,
        case: Case,
        gates: str,
        x: Inputs,
        device: torch.device,
        errors_up_to: int,
        lengths_on_host: bool = False,
    ):
        """Moves the inputs `x` (see `draw`) to the device, and computes the outputs in fp64.

        Args:
            errors_up_to: most tokens of a case whose errors are measured; the fp64 oracle takes them one by one.
            lengths_on_host: whether packed calls pass ``cu_seqlens_cpu``, without which no call is split.
        """
        x = Inputs(
            {n: t.to(device) if isinstance(t, Tensor) else t for n, t in x.arguments.items()}, x.lengths
        )
        self.arguments = dict(x.arguments) | {"output_final_state": True}
        if case.use_graph:
            self.arguments |= {"use_graph": True, "max_num_seqs": len(case.lengths)}
        if lengths_on_host and case.lengths:
            self.arguments["cu_seqlens_cpu"] = self.arguments["cu_seqlens"].cpu()
        self._case, self._gates, self._lengths, self._device = case, gates, x.lengths, device
        self._tokens = case.T - case.padding
        self._want: tuple[Any, ...] | None = None
        if case.B * self._tokens <= errors_up_to:
            self._want = token_oracle(**x.tokens(0, self._tokens))

    def measure(
        self, impl: str, function: Callable[..., Outputs], repeats: int
    ) -> tuple[dict[str, Any], Tensor]:
        """Returns the row of an implementation, and its o; see `FIELDS`."""
        case, call, x = self._case, peers.arguments(impl, self.arguments), self.arguments
        with torch.inference_mode():
            started = time.perf_counter()
            o, state = function(**call)
            first = time.perf_counter() - started
            o = o.view(x["v"].shape)
            if call.get("state_v_first") and not x.get("state_v_first"):
                state = state.mT
            row: dict[str, Any] = {
                "case": case.name, "table": case.table, "B": case.B, "T": case.T, "H": case.H, "HV": case.HV,
                "lengths": list(case.lengths), "gates": self._gates, "impl": impl, "error_o": None, "error_state": None,
                "first_call_s": first,
            }  # fmt: skip
            if self._want is not None:
                row["error_o"] = error(o[:, : self._tokens], self._want[0], lengths=self._lengths)
                row["error_state"] = error(state, self._want[1], state=True)
            once = lambda: function(**call)
            row["median_ms"] = None
            if self._device.type == "cuda":
                found = measure.times({"median_ms": once}, self._device, repeats, peers.is_peer(impl))
                row["median_ms"] = found["median_ms"]
                if found["timing"] != "graph":
                    row["timing"] = found["timing"]
            row["eager_ms"] = measure.eager_time(once, repeats)
        return row, o
