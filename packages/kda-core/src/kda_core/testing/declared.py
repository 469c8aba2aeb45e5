"""The conformance tests of what a spec declares.

A base case needs no feature. Each other case changes one thing: a declared feature, dtype or pair of head dimensions, the number of
heads, the length, the device. All are compared with the fp64 oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import kda_core
from kda_core.backend import BackendSpec
from kda_core.contract import INPUT_DTYPES, OFFERS, Feature, dtype_name
from kda_core.errors import BackendUnsupportedError
from kda_core.registry import REGISTRY, record_calls
from kda_core.testing.gradients import GradientCase
from kda_core.testing.inputs import PLAIN, Inputs
from kda_core.testing.runner import NOT_DECLARED, Case, Runner, spec_of

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1000, 2048, 4096)
HEADS = (1, 3, 5, 7, 16, 40, 41, 64, 96)
COSTLY_HEADS = (16, 40, 64)
HEAD_DIMS = ((16, 16), (32, 48), (64, 64), (64, 128), (96, 80), (128, 64), (128, 128), (128, 256), (256, 256))
SEPARATE = {Feature.CHECKPOINTS, Feature.JOURNAL}
"""Features that no call without a pool needs."""
FORMS = ("precomputed", "gates in q's dtype", "states", "gate in the kernel")


def lengths_of(bounds: Iterable[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in itertools.pairwise(bounds))


class DeclaredConformance:
    """A part of `kda_core.testing.conformance.BackendConformance`, which has the fixture `kda`."""

    backend: str | None = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrises by the dtypes and head dimensions that the backend declares; if it declares none, by those of the
        contract and by `HEAD_DIMS`."""
        spec = _spec(self.backend or metafunc.config.getoption("kda_backend", None))
        if "dtype" in metafunc.fixturenames:
            every = [dtype_name(dtype) for dtype in INPUT_DTYPES]
            metafunc.parametrize(
                "dtype", every if spec is None or spec.dtypes is None else sorted(spec.dtypes)
            )
        if "head_dims" in metafunc.fixturenames:
            pairs = HEAD_DIMS if spec is None or spec.head_dims is None else sorted(spec.head_dims)
            metafunc.parametrize("head_dims", pairs, ids=lambda pair: f"K{pair[0]}-V{pair[1]}")

    # ---- the base case: bounded precomputed gates, unit keys, precomputed beta, H = HV, no states

    @pytest.mark.parametrize("T", LENGTHS)
    def test_base(self, kda: Runner, T: int) -> None:
        """A call that needs no feature agrees with the oracle for all lengths."""
        kda.full_only(T > 200)
        kda.compare(kda.case(PLAIN, T))

    @pytest.mark.parametrize("H", HEADS)
    def test_base_heads(self, kda: Runner, H: int) -> None:
        """The same for numbers of heads, in a batch if they are few."""
        kda.full_only(H in COSTLY_HEADS)
        kda.compare(kda.case(PLAIN, 70, B=1 if H > 7 else 3, H=H))

    # ---- declared calls agree with the oracle; undeclared ones are refused

    @pytest.mark.parametrize("feature", sorted({*Feature} - OFFERS - SEPARATE), ids=lambda f: f.value)
    def test_feature(self, kda: Runner, feature: Feature) -> None:
        """A call that needs a declared feature, and little else, agrees with the oracle. A call that needs an undeclared
        feature is refused, and nothing runs. No call needs a feature of `OFFERS`; these and `SEPARATE` have other tests."""
        inputs = needing(kda, feature)
        x = inputs.arguments
        recurrent = feature is Feature.RECURRENT
        if feature.value not in kda.declared():
            entry = kda_core.fused_recurrent_kda if recurrent else kda_core.chunk_kda
            _is_refused(kda, entry, x | _grad(x, feature), feature.value)
        elif recurrent:
            case = Case(inputs)
            kda.check(case, *kda.recurrent(x))
        elif feature is Feature.BACKWARD:
            kda.gradients_agree(GradientCase(inputs, of=("o",)))
        else:
            assert feature in kda.shape(x).features, f"the kit's call does not need {feature.value}"
            kda.compare(Case(inputs))

    @pytest.mark.parametrize("form", FORMS)
    def test_dtypes(self, kda: Runner, dtype: str, form: str) -> None:
        """Every declared dtype of q, k and v agrees with the oracle."""
        found = {"dtype": getattr(torch, dtype)}
        if form == "states":
            kda.agrees(kda.case(PLAIN, 130, **found, initial_state=True))
        elif form == "gate in the kernel":
            kda.compare(Case(needing(kda, Feature.GATE_IN_KERNEL, found["dtype"])))
        elif form == "gates in q's dtype":
            inputs = kda.case(PLAIN, 130, **found).inputs
            narrow = {n: inputs.arguments[n].to(found["dtype"]) for n in ("g", "beta")}
            kda.compare(Case(inputs.replace(**narrow)))
        else:
            kda.compare(kda.case(PLAIN, 130, **found))

    @pytest.mark.parametrize("states", (False, True), ids=("stateless", "states"))
    def test_head_dims(self, kda: Runner, head_dims: tuple[int, int], states: bool) -> None:
        """Every declared pair of head dimensions agrees with the oracle, also K != V."""
        K, V = head_dims
        case = kda.case(PLAIN, 130, K=K, V=V, initial_state=states)
        kda.compare(case, **({"output_final_state": True} if states else {}))

    def test_undeclared_dtypes_are_refused(self, kda: Runner) -> None:
        declared = spec_of(kda.backend).dtypes
        if declared is None:
            pytest.skip(f"{NOT_DECLARED}dtypes; can_run decides")
        for dtype in INPUT_DTYPES:
            if (name := dtype_name(dtype)) not in declared:
                x = kda.inputs(PLAIN, 20, dtype=dtype)
                _is_refused(kda, kda_core.chunk_kda, x, f"dtype {name}")

    def test_undeclared_head_dims_are_refused(self, kda: Runner) -> None:
        declared = spec_of(kda.backend).head_dims
        if declared is None:
            pytest.skip(f"{NOT_DECLARED}head_dims; can_run decides")
        others = {*HEAD_DIMS, *((V, K) for K, V in declared), *((K + 8, V) for K, V in declared)}
        for K, V in sorted(others - declared):
            x = kda.inputs(PLAIN, 20, K=K, V=V)
            _is_refused(kda, kda_core.chunk_kda, x, f"K={K}, V={V}")

    # ---- another device

    @pytest.mark.parametrize("states", (False, True), ids=("stateless", "states"))
    def test_device_index(self, kda: Runner, states: bool) -> None:
        """Tensors on a device that is not the current one, with an index other than 0, agree with the oracle."""
        device, current = kda.other_device(), torch.cuda.current_device()
        case = kda.case(PLAIN, 130, device=device, initial_state=states)
        found = kda.compare(case, **({"output_final_state": True} if states else {}))
        assert all(x is None or str(x.device) == device for x in found), "outputs are on another device"
        assert torch.cuda.current_device() == current, "the call changed the current device"


def needing(kda: Runner, feature: Feature, dtype: torch.dtype | None = None) -> Inputs:
    """Returns the smallest call that needs `feature`."""
    T = {Feature.BACKWARD: 45, Feature.RECURRENT: 20}.get(feature, 130)
    declared, common = kda.declared(), {} if dtype is None else {"dtype": dtype}
    plain = lambda **recipe: kda.case(PLAIN, T, **common, **recipe).inputs
    taken = lambda family, *names: {n: kda.case(family, T, **common).arguments[n] for n in names}
    in_kernel = ("g", "A_log", "dt_bias", "use_gate_in_kernel", "lower_bound")
    logits = ("beta", "use_beta_sigmoid_in_kernel")
    if feature in (Feature.VARLEN, Feature.GRAPH):
        return plain(lengths=(17, 0, 47, 66)).replace(use_graph=feature is Feature.GRAPH)
    if feature is Feature.GVA:
        return plain(H=1, HV=3)
    if feature is Feature.INITIAL_STATE:
        return plain(initial_state=True)
    if (
        feature is Feature.STATE_V_FIRST
    ):  # the layout matters only for states, so the call has one that the backend serves
        initial = Feature.INITIAL_STATE.value in declared
        final = Feature.FINAL_STATE.value in declared or not initial
        return plain(initial_state=initial, state_v_first=True).replace(output_final_state=final)
    if feature is Feature.RECURRENT:  # `fused_recurrent_kda` has no argument safe_gate
        bounded = Feature.UNBOUNDED_GATE.value not in declared and Feature.GATE_IN_KERNEL.value in declared
        return plain().replace(safe_gate=None, **(taken("slow", *in_kernel) if bounded else {}))
    changes: dict[Feature, dict[str, Any]] = {
        Feature.FINAL_STATE: {"output_final_state": True},
        Feature.GATE_IN_KERNEL: taken("slow", *in_kernel),
        Feature.UNBOUNDED_GATE: taken("masked", "g") | {"safe_gate": False},
        Feature.BETA_SIGMOID: taken("slow", *logits),
        Feature.NEG_EIGVAL: taken("slow", *logits) | {"allow_neg_eigval": True},
        Feature.QK_L2NORM: taken("slow", "q", "k", "use_qk_l2norm_in_kernel"),
        Feature.INTERMEDIATE_STATES: {"return_intermediate_states": True},
        Feature.PIN: {"pin": True},
        Feature.BACKWARD: {},  # the tests ask for gradients
    }
    return plain().replace(**changes[feature])


# ---- helpers


def _spec(backend: str | None) -> BackendSpec | None:
    """Returns the spec of an installed backend, None if it cannot be read; then the fixture of the tests fails."""
    return next((c.spec for c in REGISTRY.backends() if c.name == backend), None)


def _grad(x: dict[str, Any], feature: Feature) -> dict[str, Any]:
    return {"v": x["v"].clone().requires_grad_()} if feature is Feature.BACKWARD else {}


def _is_refused(kda: Runner, entry: Any, x: dict[str, Any], words: str) -> None:
    """Asserts that a call is refused with these words, and that nothing runs."""
    with record_calls() as calls, pytest.raises(BackendUnsupportedError, match=words):
        entry(**x, backend=kda.backend)
    assert not calls, f"a call that was refused ran: {calls}"
