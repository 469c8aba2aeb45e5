"""The specification of the backward: its formulas are exact, each of their terms matters, and its roundings keep causality."""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kda_core.testing import EXTREMES, FAMILIES, make_inputs, specification, token_oracle
from kda_core.testing import backward_specification as of_backward
from kda_core.testing.backward_specification import backward
from kda_core.testing.forms import FORMS, in_form
from kda_core.testing.gradients import PER_TOKEN, GradientCase, gradient_errors, token_gradients
from kda_core.testing.specification import CHUNKS, dithered
from kda_core.testing.tolerance import BAND

SMALL = {"H": 1, "HV": 2, "K": 32, "V": 16, "initial_state": True, "dtype": torch.float64}


@pytest.fixture
def exact(monkeypatch):
    """The specification in fp64 without roundings."""
    monkeypatch.setattr(specification, "F32", torch.float64)
    monkeypatch.setattr(specification, "bf16", lambda x: x)


def errors(case, C):
    found = backward(case.arguments, case.grad_o, case.grad_final_state, C)
    return gradient_errors(found, case.exact, case.inputs.lengths)


# ---- formulas


@pytest.mark.parametrize("family", (*FAMILIES, *EXTREMES))
def test_without_roundings_every_family_is_exact(exact, family):
    case = GradientCase(make_inputs(family, 100, **SMALL))
    for C in CHUNKS:
        assert max(errors(case, C).values()) < 1e-9, C


@pytest.mark.parametrize("form", FORMS)
def test_without_roundings_every_form_is_exact(exact, form):
    inputs = in_form(form, lambda family: make_inputs(family, 70, **SMALL))
    narrow = [n for n in ("g", "beta") if inputs.arguments[n].dtype == torch.bfloat16]
    case = GradientCase(inputs.replace(**{n: inputs.arguments[n].double() for n in narrow}))
    for C in CHUNKS:
        assert max(errors(case, C).values()) < 1e-9, C


@pytest.mark.parametrize(
    "changes",
    (
        {"lengths": (0, 15, 64, 0, 65, 1, 1, 0)},
        {"lengths": (0, 15, 64, 0, 65, 1, 1, 0), "state_v_first": True},
        {"T": 50, "B": 3, "H": 2, "HV": 6},
        {"initial_state": False},
        {"T": 1},
        {"T": 0},
    ),
    ids=str,
)
def test_without_roundings_every_layout_is_exact(exact, changes):
    case = GradientCase(make_inputs("mixed", **({"T": 146} | SMALL | changes)))
    for C in CHUNKS:
        assert max(errors(case, C).values()) < 1e-9, C


@pytest.mark.parametrize("of", ("o", "final_state"))
def test_without_roundings_the_gradients_of_each_output_are_exact(exact, of):
    case = GradientCase(make_inputs("steep", 70, **SMALL), of=(of,))
    assert max(errors(case, 64).values()) < 1e-9


def test_exact_gradients_are_those_of_finite_differences():
    """The gradient in a random direction equals the symmetric difference quotient of the oracle."""
    case = GradientCase(make_inputs("steep", 20, **SMALL))
    rng = torch.Generator().manual_seed(2)
    x, values = case.arguments, case.exact.values
    ways = {n: torch.randn(d.shape, generator=rng, dtype=torch.float64) for n, d in values.items()}

    def total(step):
        o, state = token_oracle(**(x | {n: x[n].double() + step * way for n, way in ways.items()}))
        return (o * case.grad_o).sum() + (state * case.grad_final_state).sum()

    slope = (total(1e-6) - total(-1e-6)) / 2e-6
    wanted = sum((values[n] * way).sum() for n, way in ways.items())
    torch.testing.assert_close(slope, wanted, rtol=1e-7, atol=0)


# ---- roundings


@pytest.mark.parametrize("family", (*FAMILIES, *EXTREMES))
def test_the_rounded_specification_stays_close(family):
    """Repeated keys with beta near 1 make dv and dbeta cancel, and a gradient of A_log may cancel for any family."""
    case = GradientCase(make_inputs(family, 130, H=1, HV=2, initial_state=True))
    hard = family in ("one key", "near keys")
    for C in CHUNKS:
        for name, off in errors(case, C).items():
            if name != "A_log":
                assert off < (128 if hard and name in ("v", "beta") else 8) * BAND, (C, name, off)


@pytest.mark.parametrize("family", ("steep", "saturated", "mixed", "near keys"))
def test_other_roundings_are_within_the_tolerance(family):
    case = GradientCase(make_inputs(family, 75, H=1, HV=2, lengths=(1, 16, 0, 58), initial_state=True))
    for seed in range(1000, 1004):
        with dithered(seed):
            for name, off in errors(case, 32).items():
                assert off <= case.limits[name], (seed, name)


@pytest.mark.parametrize("family", ("slow", "mixed", "masked", "spikes"))
def test_later_tokens_change_no_bit_of_earlier_gradients(family):
    recipe = {"H": 1, "HV": 2, "K": 64, "V": 32}
    case = GradientCase(make_inputs(family, 130, **recipe), of=("o",))
    x, y = case.arguments, make_inputs(family, 130, seed=9, **recipe).arguments
    for t, C in ((1, 64), (40, 64), (77, 64), (100, 32)):
        used = case.grad_o.clone()
        used[:, t:] = 0
        want = backward(x, used, None, C)
        assert not any(want[n][:, t:].any() for n in PER_TOKEN), (t, C)
        mixed = {n: torch.cat([x[n][:, :t], y[n][:, t:]], 1) for n in PER_TOKEN}
        found = backward(x | mixed, used, None, C)
        assert all(torch.equal(found[n][:, :t], want[n][:, :t]) for n in PER_TOKEN), (t, C)


@pytest.mark.parametrize("family", ("steep", "saturated", "spikes"))
def test_the_scale_of_the_gradients_changes_only_exponents(family):
    case = GradientCase(make_inputs(family, 100, H=1, HV=2, K=64, V=32, initial_state=True))
    one = backward(case.arguments, case.grad_o, case.grad_final_state, 64)
    for n in (-40, 40):
        scaled = case.grad_o * 2.0**n, case.grad_final_state * 2.0**n
        for name, d in backward(case.arguments, *scaled, 64).items():
            assert (d * 2.0**-n - one[name]).abs().max() < 2.0**-60, (n, name)


# ---- tolerances


def test_the_resolution_of_a_saturated_gate_is_no_error():
    """Where s (1 - s) is below what fp32 resolves, a wrong g within that resolution counts as exact, and ten times that does not."""
    case = GradientCase(make_inputs("saturated", 40, H=1, HV=2, K=32, V=16))
    exact = case.exact
    assert exact.values["g"].norm() < exact.resolution["g"].norm()
    for factor, passes in ((0.9, True), (10.0, False)):
        found = exact.values | {n: exact.values[n] + factor * exact.resolution[n] for n in ("g", "A_log")}
        off = gradient_errors(found, exact)
        assert all((off[n] <= case.limits[n]) == passes for n in ("g", "A_log")), factor


def test_an_error_in_one_head_or_one_sequence_shows():
    case = GradientCase(make_inputs("steep", 60, H=2, lengths=(20, 40), K=32, V=16, initial_state=True))
    for name, d in case.exact.values.items():
        wrong = d.clone()
        where = {"A_log": ..., "dt_bias": 1, "initial_state": (1, 1)}.get(
            name, (slice(None), slice(30, None), 1)
        )
        wrong[where] *= 1.5
        off = gradient_errors(case.exact.values | {name: wrong}, case.exact, case.inputs.lengths)
        assert off[name] > case.limits[name] and sum(off.values()) == off[name], name


def test_a_wrong_shape_is_reported():
    case = GradientCase(make_inputs("slow", 5, H=1, K=16, V=16))
    found = case.exact.values | {"g": case.exact.values["g"][:, :4]}
    with pytest.raises(
        ValueError, match=r"gradient of g: expected the shape \[1, 5, 1, 16\], got \[1, 4, 1, 16\]"
    ):
        gradient_errors(found, case.exact)


def test_exact_gradients_of_unused_inputs_are_zeros():
    x = make_inputs("slow", 5, H=1, K=16, V=16, initial_state=True).arguments
    found = token_gradients(x, None, torch.zeros(1, 1, 16, 16)).values
    assert set(found) == {*PER_TOKEN, "A_log", "dt_bias", "initial_state"}
    assert not any(d.any() for d in found.values())


# ---- mutations


@dataclass(frozen=True)
class Mutation:
    """A term that is left out: the text in the source of the specification, and what replaces it."""

    text: str
    by: str


MUTATIONS = {
    "Aqk^T dO": Mutation("Y = mma(x.Aqk.mT, dO) + mma(x.Kg, dS)", "Y = mma(x.Kg, dS)"),
    "Kg dS'": Mutation("Y = mma(x.Aqk.mT, dO) + mma(x.Kg, dS)", "Y = mma(x.Aqk.mT, dO)"),
    "T^T": Mutation("dX = mma(x.T.mT, Y)", "dX = Y"),
    "a dS'": Mutation("dS = x.a.unsqueeze(-1) * dS + mma(x.Qd", "dS = mma(x.Qd"),
    "Qd^T dO": Mutation(" + mma(x.Qd.mT, dO) - mma(x.Kd.mT, dX)", " - mma(x.Kd.mT, dX)"),
    "Kd^T dX": Mutation(" - mma(x.Kd.mT, dX)", ""),
    "dAqk": Mutation("mma(grad_o, x.R.mT)", "0 * mma(grad_o, x.R.mT)"),
    "dL": Mutation("mma(x.dX, x.R.mT)", "0 * mma(x.dX, x.R.mT)"),
    "dQd": Mutation("mma(grad_o, x.S.mT)", "0 * mma(grad_o, x.S.mT)"),
    "dKd": Mutation("-mma(x.dX, x.S.mT)", "0 * mma(x.dX, x.S.mT)"),
    "dKg": Mutation("mma(x.R, x.dS.mT)", "0 * mma(x.R, x.dS.mT)"),
    "rows of q": Mutation("return Products(E * U_q, ", "return Products(0 * U_q, "),
    "rows of k": Mutation("E * U_q, E * U_k, F * W, ", "E * U_q, 0 * U_k, F * W, "),
    "columns": Mutation("E * U_q, E * U_k, F * W, ", "E * U_q, E * U_k, 0 * W, "),
    "pairs of dg, rows": Mutation("r_q * U_q + r_k * U_k, -c * W", "0 * U_q, -c * W"),
    "pairs of dg, columns": Mutation("r_q * U_q + r_k * U_k, -c * W", "r_q * U_q + r_k * U_k, 0 * W"),
    "pairs of dg": Mutation("difference = of_rows + of_columns", "difference = 0 * of_rows"),
    "blocks below the diagonal": Mutation("for rows in blocks[1:]:", "for rows in ():"),
    "Qd dQd in dg": Mutation("q * grown * dQd + k * grown * dKd", "k * grown * dKd"),
    "Kd dKd in dg": Mutation("q * grown * dQd + k * grown * dKd", "q * grown * dQd"),
    "Kg dKg in dg": Mutation("suffix_sum(difference) + earlier", "suffix_sum(difference)"),
    "a S dS' in dg": Mutation(" + earlier + through", " + earlier"),
    "dS' of the call": Mutation("S_in, dS_out = states(x.get(\"initial_state\")), states(grad_final_state)",
                                "S_in, dS_out = states(x.get(\"initial_state\")), states(None)"),
    "S of the call": Mutation("S_in, dS_out = states(x.get(\"initial_state\"))", "S_in, dS_out = states(None)"),
    "k as rows": Mutation("tokens(found.uk + step * found.ub)", "tokens(step * found.ub)"),
    "k as columns": Mutation("tokens(found.uk + step * found.ub)", "tokens(found.uk)"),
    "value heads of a group": Mutation("sum(d[1:], start=d[0])", "d[0]"),
    "projection": Mutation("d - unit * (unit * d).sum(-1, keepdim=True)", "d"),
    "slope of the sigmoid": Mutation("d * beta * (1 - beta / top)", "d * beta"),
    "slope of the gate": Mutation("d * bound * s * (1 - s)", "d * bound * s"),
    "rate of the gate": Mutation("found, of_rate = inner * rate, inner * rate * at", "found, of_rate = inner, inner * rate * at"),
    "A_log": Mutation("of_rate.sum((0, 1, 3))", "of_rate.sum((0, 3))[-1]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def cases():
    """A case of the bounded gate, and one of precomputed gates whose state decays slowly. Values do not repeat among heads."""
    recipe = {"H": 1, "HV": 2, "K": 64, "V": 64, "initial_state": True}
    return [GradientCase(make_inputs(family, 150, **recipe)) for family in ("slow", "memory")]


def mutated(change, folder):
    """Returns the specification with one change of its source."""
    source = Path(of_backward.__file__).read_text()
    assert source.count(change.text) == 1, f"{change.text!r} occurs {source.count(change.text)} times"
    path = folder / "mutated.py"
    path.write_text(source.replace(change.text, change.by))
    spec = importlib.util.spec_from_file_location("mutated", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("term", MUTATIONS)
def test_without_a_term_the_tolerance_is_exceeded(cases, tmp_path, term):
    """Each term of the backward that is left out shows in a gradient, with more than twice the tolerance."""
    seen, module = 0.0, mutated(MUTATIONS[term], tmp_path)
    for case in cases:
        found = module.backward(case.arguments, case.grad_o, case.grad_final_state, 64)
        off = gradient_errors(found, case.exact)
        assert not any(math.isnan(e) for e in off.values())
        seen = max(seen, *(e / case.limits[n] for n, e in off.items()))
    assert seen > 2, f"largest error over its tolerance: {seen:.2f}"
