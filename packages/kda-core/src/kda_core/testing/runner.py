"""Calls of the conformance tests: asserts which backend ran, and compares with the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_core
from kda_core import buffers, pools, validate
from kda_core.backend import BackendSpec
from kda_core.contract import (
    FLOAT_TENSORS,
    INPUT_DTYPES,
    OPTION_NAMES,
    Feature,
    KdaInputs,
    KdaOptions,
    ProblemShape,
    Tensors,
    dtype_name,
)
from kda_core.registry import REGISTRY, arch_matches, record_calls
from kda_core.testing.gradients import GradientCase, gradient_errors
from kda_core.testing.inputs import PLAIN, Inputs, copied, make_inputs, state_dtype
from kda_core.testing.limits import limits
from kda_core.testing.oracle import token_oracle
from kda_core.testing.tolerance import error

# Prefixes of the reasons of skipped tests, which the plugin counts.
NOT_DECLARED, REFUSED, NEEDS_GPU, LEFT_OUT = (
    "not declared: ",
    "refused: ",
    "needs a GPU: ",
    "left out by --kda-quick",
)
TESTED = "kda_tested"  # user property of a test: (backend, device type, execution)
COMPARED = "kda_compared"  # user property of a test, once for each output that it compared with the oracle
BASE = "test_base"  # prefix of the names of tests of the base case
EMULATED, EXECUTED = "emulated", "executed by the device itself"


POOL_ARGUMENTS = (
    "initial_state", "inplace_final_state", "out", *(n for n in pools.SlotArguments._fields if n != "writes"),
)  # fmt: skip
"""The arguments of a call over a pool that a call without states lacks."""


class Case:
    """Inputs with their oracle (o, final states, and intermediate states if the call asks for them) and tolerances.

    Both are computed at first use, so that a skipped case costs nothing, and from a copy of the inputs, so that a backend that
    writes to its inputs does not change them.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._kept = copied(inputs.arguments)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the call."""
        return self.inputs.arguments

    @cached_property
    def oracle(self) -> tuple[Tensor, ...]:
        """The exact results, see `token_oracle`."""
        return token_oracle(**self._kept)

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """The largest admissible errors, in the order of `oracle`."""
        return limits(self._kept, self.oracle)


@lru_cache(maxsize=24)
def make_case(family: str, T: int, recipe: tuple[tuple[str, Any], ...] = ()) -> Case:
    """Returns the case of a recipe, cached for tests that share it."""
    return Case(make_inputs(family, T, **dict(recipe)))


@lru_cache(maxsize=24)
def make_gradient_case(
    family: str, T: int, of: tuple[str, ...], recipe: tuple[tuple[str, Any], ...] = ()
) -> GradientCase:
    """Returns the case of a recipe with gradients of the outputs `of`, cached for tests that share it."""
    return GradientCase(make_inputs(family, T, **dict(recipe)), of)


def unusable(backend: str) -> str | None:
    """Returns why the kit cannot test a backend on this machine, or None."""
    known = kda_core.backends()
    info = next((i for i in known if i.name == backend), None)
    if info is not None and info.status == "ok":
        return None
    why = "not-installed" if info is None else f"{info.status}: {info.reason}"
    installed = ", ".join(i.name for i in known if i.status != "not-installed")
    return f"backend {backend!r} cannot run here: {why}; installed: {installed}"


def spec_of(backend: str) -> BackendSpec:
    """Returns the spec of an installed backend."""
    return REGISTRY.find(backend).spec


class Runner:
    """One backend on one device.

    Attributes:
        K, V, dtype: defaults of all inputs: K = V = `head_dim` in bf16 if the backend serves that, else the smallest pair and
            the first dtype that it declares.
    """

    def __init__(
        self,
        backend: str,
        device: str,
        head_dim: int,
        quick: bool,
        record: Callable[[str, object], None] = lambda name, value: None,
    ) -> None:
        """`record` stores a property of the current test, as the fixture `record_property` of pytest does."""
        self.backend, self.device, self.quick, self.record = backend, device, quick, record
        spec = spec_of(backend)
        pairs = spec.head_dims
        self.K, self.V = (head_dim,) * 2 if pairs is None or (head_dim,) * 2 in pairs else min(pairs)
        self.dtype = next(d for d in INPUT_DTYPES if spec.dtypes is None or dtype_name(d) in spec.dtypes)

    def tested(self) -> tuple[str, str, str]:
        """Returns the value of `TESTED`."""
        backend = REGISTRY.load(spec_of(self.backend))
        return self.backend, self.device, EMULATED if getattr(backend, "emulated", False) else EXECUTED

    # ---- inputs

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of states."""
        return state_dtype(self.dtype)

    @property
    def common(self) -> dict[str, Any]:
        """The common part of all recipes."""
        return {"K": self.K, "V": self.V, "dtype": self.dtype, "device": self.device}

    def case(self, family: str, T: int, **recipe: Any) -> Case:
        """Returns a case of a gate family."""
        return make_case(family, T, tuple(sorted((self.common | recipe).items())))

    def inputs(self, family: str, T: int, **recipe: Any) -> dict[str, Any]:
        """Returns the arguments of such a case, with new tensors."""
        return make_inputs(family, T, **(self.common | recipe)).arguments

    def served(self, family: str, T: int, **recipe: Any) -> dict[str, Any]:
        """Returns `inputs` with final states, without what the backend does not declare, for tests that work with any call. A
        family that needs undeclared features is replaced by `PLAIN`."""
        declared, recipe = self.declared(), self.declared_part(recipe)
        more = {"output_final_state": True} if "final_state" in declared else {}
        found = self.inputs(family, T, **recipe) | more
        if declared.issuperset(f.value for f in self.shape(found).features):
            return found
        return self.inputs(PLAIN, T, **recipe) | more

    def declared_part(self, recipe: dict[str, Any]) -> dict[str, Any]:
        """Returns a recipe without initial states, packed sequences and grouped heads that the backend does not declare."""
        needs = {"initial_state": Feature.INITIAL_STATE, "lengths": Feature.VARLEN, "HV": Feature.GVA}
        declared = self.declared()
        return {n: x for n, x in recipe.items() if n not in needs or needs[n].value in declared}

    def states(self, N: int, HV: int = 2, value: float = 0.0) -> Tensor:
        """Returns states [N, HV, K, V] filled with one value."""
        return torch.full((N, HV, self.K, self.V), value, dtype=self.state_dtype, device=self.device)

    def full_only(self, wanted: bool = True) -> None:
        """Skips a costly test in a quick run."""
        if self.quick and wanted:
            pytest.skip(LEFT_OUT)

    def needs_gpu(self, why: str) -> None:
        """Skips a test that needs a GPU."""
        if all(arch == "cpu" for arch in spec_of(self.backend).archs):
            pytest.skip(f"{NOT_DECLARED}a GPU ({why})")
        if self.device != "cuda":
            pytest.skip(f"{NEEDS_GPU}{why}")

    def other_device(self) -> str:
        """Returns a GPU that is not the current one and has an index other than 0; skips the test if the backend runs on no such
        GPU."""
        self.needs_gpu("a device whose index is not 0")
        for i in range(1, torch.cuda.device_count()):
            here = torch.cuda.get_device_capability(i)
            if i != torch.cuda.current_device() and arch_matches(spec_of(self.backend), here):
                return f"cuda:{i}"
        pytest.skip(f"{NEEDS_GPU}a second one, whose index is not 0")

    def backend_inputs(self, arguments: dict[str, Any], **more: Any) -> KdaInputs:
        """Returns a call in the form that a backend receives, with further options."""
        tensors = [arguments.get(n) for n in Tensors._fields]
        options = {n: arguments[n] for n in OPTION_NAMES if n in arguments} | more
        shape = validate.problem_shape(*tensors, options=KdaOptions(**options))  # type: ignore[arg-type]
        return buffers.make_inputs(tensors, shape)

    # ---- calls

    def declared(self) -> frozenset[str]:
        """Returns the features that the backend declares."""
        return spec_of(self.backend).features

    def require(self, *features: Feature) -> None:
        """Skips a test whose features the backend does not declare."""
        declared = self.declared()
        if missing := sorted(f.value for f in features if f.value not in declared):
            pytest.skip(f"{NOT_DECLARED}{', '.join(missing)}")

    def shape(self, arguments: dict[str, Any]) -> ProblemShape:
        """Returns the metadata of a call."""
        return kda_core.explain(**{n: x for n, x in arguments.items() if n not in ("out", "workspace")}).shape

    def may_run(self, arguments: dict[str, Any]) -> None:
        """Skips the test if the backend does not declare what the call needs, or refuses its shape. Fails if the call itself is
        invalid."""
        shape = self.shape(arguments)
        if shape.pool is not None and shape.pool.checkpoint_dtype is None:
            shape = pools.copied_shape(shape)  # core serves a pool by copies if the backend does not
        if (missing := spec_of(self.backend).undeclared(shape)) is not None:
            pytest.skip(f"{NOT_DECLARED}{missing}")
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
        """``chunk_kda`` on this backend without the assertions of `__call__`, for graphs, threads and traces."""
        return kda_core.chunk_kda(**(arguments | more), backend=self.backend, context_parallel="off")

    def recurrent(self, arguments: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor | None]:
        """``fused_recurrent_kda`` on this backend."""
        self.require(Feature.RECURRENT)
        self.may_run(arguments | more)
        with record_calls() as calls:
            result = kda_core.fused_recurrent_kda(**(arguments | more), backend=self.backend)
        self.assert_ran(calls, "recurrent_fwd")
        return result

    def decode_pool(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """``fused_recurrent_kda`` over a pool on this backend, which may take several calls of it."""
        self.require(Feature.RECURRENT)
        self.may_run({n: x for n, x in arguments.items() if n not in POOL_ARGUMENTS})
        with record_calls() as calls:
            result = kda_core.fused_recurrent_kda(**arguments, backend=self.backend)
        self.assert_ran(calls, *["recurrent_fwd"] * max(1, len(calls)))
        return result

    def assert_ran(self, calls: list[Any], *entries: str) -> None:
        """Asserts that exactly these entries of this backend ran, on this device, without a planner."""
        wanted = [(self.backend, entry, self.device, None) for entry in entries]
        ran = [(c.backend, c.entry, c.device_type, c.planner) for c in calls]
        assert ran == wanted, f"ran (backend, entry, device, planner): {ran}, expected {wanted}"

    # ---- comparisons with the oracle, all of which are counted

    def within(self, off: float, limit: float, what: str) -> None:
        """Asserts that the error of an output is within its tolerance."""
        self.record(COMPARED, what)
        assert limit < math.inf, f"{what}: the specification has no finite error for these inputs"
        assert off <= limit, f"error of {what} {off:.2e}, tolerance {limit:.2e}"

    def check(self, case: Case, o: Tensor | None, state: Tensor | None = None, what: str = "") -> None:
        """Asserts that outputs of a case are within tolerance of the oracle. Tensors without elements are not counted."""
        if o is not None and o.numel():
            off = error(o, case.oracle[0], lengths=case.inputs.lengths)
            self.within(off, case.limits[0], f"o{what}")
        if state is not None:
            self.within(error(state, case.oracle[1], state=True), case.limits[1], f"the final state{what}")

    def compare(self, case: Case, **more: Any) -> tuple[Any, ...]:
        """Runs a case, with arguments `more` that change no value, and compares all outputs with the oracle."""
        o, state, *h = self(case.arguments, **more)
        self.check(case, o, state)
        wide = state_dtype(o.dtype)
        assert o.dtype == case.arguments["q"].dtype, f"o is in {o.dtype}"
        assert state is None or state.dtype == wide, f"the final state is in {state.dtype}"
        for found in h:
            want = case.oracle[2]
            assert found.dtype == torch.bfloat16 and found.shape == want.shape, (
                f"h is {found.dtype} {found.shape}"
            )
            self.within(error(found, want, state=True), case.limits[2], "the intermediate states")
        return (o, state, *h)

    def agrees(self, case: Case) -> tuple[Any, ...]:
        """`compare` of a call that returns final states."""
        return self.compare(case, output_final_state=True)

    # ---- gradients

    def outputs(self) -> tuple[str, ...]:
        """Returns the names of the outputs that have gradients: o, and the final state if the backend declares it."""
        return ("o", "final_state") if Feature.FINAL_STATE.value in self.declared() else ("o",)

    def gradient_case(self, family: str, T: int, **recipe: Any) -> GradientCase:
        """Returns a case of a gate family with gradients of all `outputs`, without what the backend does not declare
        (`declared_part`)."""
        recipe = self.common | self.declared_part(recipe)
        return make_gradient_case(family, T, self.outputs(), tuple(sorted(recipe.items())))

    def gradients(
        self,
        arguments: dict[str, Any],
        grad_o: Tensor | None,
        grad_final_state: Tensor | None = None,
        **more: Any,
    ) -> dict[str, Tensor]:
        """Returns the gradient of each floating-point tensor of a call on this backend, from the gradients of its outputs, at least one
        of which is not None; asserts which backend ran and where."""
        given = {n: x for n in FLOAT_TENSORS if (x := arguments.get(n)) is not None}
        leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
        x = arguments | leaves | more
        self.may_run(x)
        with record_calls() as calls:
            o, state, *_ = self.direct(x)
            pairs = [(y, d) for y, d in ((o, grad_o), (state, grad_final_state)) if d is not None]
            outputs, seeds = zip(*pairs)
            gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds)
        self.assert_ran(calls, "chunk_fwd", "chunk_bwd")
        return dict(zip(leaves, gradients))

    def check_gradients(
        self,
        case: GradientCase,
        found: dict[str, Tensor],
        what: str = "",
        names: Sequence[str] = FLOAT_TENSORS,
    ) -> None:
        """Asserts that gradients of a case are within tolerance of the exact ones. Tensors without elements are not counted."""
        for name, off in gradient_errors(found, case.exact, case.inputs.lengths, names).items():
            if found[name].numel():
                self.within(off, case.limits[name], f"the gradient of {name}{what}")

    def gradients_agree(self, case: GradientCase) -> dict[str, Tensor]:
        """Runs a case, compares all gradients with the exact ones, and returns them."""
        found = self.gradients(case.arguments, case.grad_o, case.grad_final_state)
        self.check_gradients(case, found)
        return found
