"""What the conformance tests call the backend through: it insists that this backend ran, and knows the truth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_core
from kda_core.contract import Feature
from kda_core.registry import REGISTRY, record_calls
from kda_core.testing.inputs import Inputs, make_inputs
from kda_core.testing.oracle import token_oracle
from kda_core.testing.tolerance import error, tolerance

# How a test that did not run says why; the plugin counts these, and none of them counts as passed.
NOT_DECLARED, REFUSED, NEEDS_GPU, LEFT_OUT = (
    "not declared: ",
    "refused: ",
    "needs a GPU: ",
    "left out by --kda-quick",
)
TESTED = "kda_tested"  # the user property of a test that names (backend, device type, how it executes there)
EMULATED, EXECUTED = "emulated", "executed by the device itself"


@dataclass(frozen=True)
class Case:
    """An input with its oracle (o, final states) and tolerances (for o, for the state)."""

    inputs: Inputs
    o: Tensor
    state: Tensor
    limits: tuple[float, ...]

    def check(self, o: Tensor, state: Tensor | None, what: str = "") -> None:
        """Asserts that outputs are within tolerance of the oracle."""
        off = error(o, self.o, lengths=self.inputs.lengths)
        assert off <= self.limits[0], f"{what} error of o {off:.2e}, tolerance {self.limits[0]:.2e}"
        if state is not None:
            off = error(state, self.state, state=True)
            assert off <= self.limits[1], (
                f"{what} error of the state {off:.2e}, tolerance {self.limits[1]:.2e}"
            )


def case_of(inputs: Inputs) -> Case:
    """The case of any inputs."""
    oracle = token_oracle(**inputs.arguments)
    o, state = oracle[:2]
    return Case(inputs, o, state, tolerance(inputs.arguments, oracle=oracle))


@lru_cache(maxsize=24)
def make_case(family: str, T: int, device: str, recipe: tuple[tuple[str, Any], ...] = ()) -> Case:
    """A case by its recipe, kept for the tests that use the same one."""
    return case_of(make_inputs(family, T, device=device, **dict(recipe)))


class Runner:
    """One backend on one device."""

    def __init__(self, backend: str, device: str, head_dim: int, quick: bool) -> None:
        self.backend, self.device, self.head_dim, self.quick = backend, device, head_dim, quick

    def tested(self) -> tuple[str, str, str]:
        """The value of `TESTED`."""
        backend = REGISTRY.load(REGISTRY.find(self.backend).spec)
        return self.backend, self.device, EMULATED if getattr(backend, "emulated", False) else EXECUTED

    # ---- inputs

    def case(self, family: str, T: int, **recipe: Any) -> Case:
        """A case of a gate family, K = V = `head_dim`."""
        recipe = {"K": self.head_dim, "V": self.head_dim} | recipe
        return make_case(family, T, self.device, tuple(sorted(recipe.items())))

    def inputs(self, family: str, T: int, **recipe: Any) -> dict[str, Any]:
        """The arguments of such a case, without its oracle; fresh tensors each time."""
        recipe = {"K": self.head_dim, "V": self.head_dim} | recipe
        return make_inputs(family, T, device=self.device, **recipe).arguments

    def full_only(self, wanted: bool = True) -> None:
        """Leaves a costly test out of a quick run."""
        if self.quick and wanted:
            pytest.skip(LEFT_OUT)

    def needs_gpu(self, why: str) -> None:
        if self.device != "cuda":
            pytest.skip(f"{NEEDS_GPU}{why}")

    # ---- calls

    def declared(self) -> frozenset[str]:
        """The features that the backend declares."""
        return next(i.spec.features for i in kda_core.backends() if i.name == self.backend and i.spec)

    def require(self, *features: Feature) -> None:
        """Skips a test whose features the backend does not declare."""
        declared = self.declared()
        if missing := sorted(f.value for f in features if f.value not in declared):
            pytest.skip(f"{NOT_DECLARED}{', '.join(missing)}")

    def may_run(self, arguments: dict[str, Any]) -> None:
        """Skips where the backend does not declare what the call needs, or refuses its shape; fails where the call
        is wrong in itself."""
        arguments = {n: x for n, x in arguments.items() if n not in ("out", "workspace")}
        shape = kda_core.explain(**arguments).shape
        self.require(*shape.features)
        reason = REGISTRY.refusal(REGISTRY.find(self.backend), shape, named=True)
        if reason is not None:
            pytest.skip(f"{REFUSED}{reason}")

    def __call__(self, arguments: dict[str, Any], **more: Any) -> tuple[Any, ...]:
        """``chunk_kda`` on this backend without context parallelism; asserts which backend ran and where."""
        arguments = arguments | more
        self.may_run(arguments)
        with record_calls() as calls:
            result = kda_core.chunk_kda(**arguments, backend=self.backend, context_parallel="off")
        self.assert_ran(calls, "chunk_fwd")
        return result

    def direct(self, arguments: dict[str, Any], **more: Any) -> tuple[Any, ...]:
        """``chunk_kda`` without the checks around it, for graphs, threads and traces."""
        return kda_core.chunk_kda(**(arguments | more), backend=self.backend, context_parallel="off")

    def recurrent(self, arguments: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor | None]:
        """``fused_recurrent_kda`` on this backend."""
        self.require(Feature.RECURRENT)
        self.may_run(arguments | more)
        with record_calls() as calls:
            result = kda_core.fused_recurrent_kda(**(arguments | more), backend=self.backend)
        self.assert_ran(calls, "recurrent_fwd")
        return result

    def assert_ran(self, calls: list[Any], *entries: str) -> None:
        """Exactly these entries of this backend ran, on this device, through no planner."""
        wanted = [(self.backend, entry, self.device, None) for entry in entries]
        ran = [(c.backend, c.entry, c.device_type, c.planner) for c in calls]
        assert ran == wanted, f"ran (backend, entry, device, planner): {ran}, expected {wanted}"

    def agrees(self, case: Case, **more: Any) -> tuple[Tensor, Tensor]:
        """Runs a case with its final states and holds both outputs against the oracle."""
        o, state = self(case.inputs.arguments, output_final_state=True, **more)
        case.check(o, state)
        assert o.dtype == case.inputs.arguments["q"].dtype and state.dtype == torch.float32
        return o, state
