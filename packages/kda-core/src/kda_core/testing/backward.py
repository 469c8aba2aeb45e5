"""The conformance tests of a backward.

Exact gradients are those of autograd through the fp64 oracle. The tolerance of each gradient follows from the error of
`kda_core.testing.backward_specification` on the same inputs, see `kda_core.testing.gradients`. Gradients are random numbers, except
where a test says otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kda_core.backend import SupportsBackwardInto, SupportsStateGradients
from kda_core.contract import FLOAT_TENSORS, Feature, KdaGradients
from kda_core.registry import REGISTRY
from kda_core.testing.declared import lengths_of
from kda_core.testing.forms import FORMS, in_form
from kda_core.testing.gradients import PER_TOKEN, GradientCase
from kda_core.testing.inputs import EXTREMES, FAMILIES, PLAIN, Inputs, copied
from kda_core.testing.memory import amid, guarded
from kda_core.testing.runner import NOT_DECLARED, REFUSED, Runner

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 129)
BOUNDS = ((0, 15, 15, 79, 80), (0, 0, 0, 40, 105, 105), (0, 0, 0))
HEADS = ((3, 3), (1, 4), (2, 8), (16, 64))
EXPONENTS = (-30, -20, 20)
PACKED = (0, 17, 17, 64, 130)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor], *names: str) -> bool:
    """Returns whether the named gradients are equal bit for bit, all of them without names."""
    return all(torch.equal(a[n], b[n]) for n in names or a)


class BackwardConformance:
    """A part of `kda_core.testing.conformance.BackendConformance`, which has the fixture `kda`."""

    @pytest.fixture
    def bwd(self, kda: Runner) -> Runner:
        """The backend under test, if it has a backward."""
        kda.require(Feature.BACKWARD)
        return kda

    # ---- results

    @pytest.mark.parametrize("family", (*FAMILIES, *EXTREMES))
    def test_gradients_of_gates(self, bwd: Runner, family: str) -> None:
        """Every family of gates agrees with the oracle, and so do repeated, similar and zero keys, no decay, and sudden decay."""
        bwd.gradients_agree(bwd.gradient_case(family, 130, H=1, HV=2, initial_state=True))

    @pytest.mark.parametrize("T", LENGTHS)
    def test_gradients_of_a_length(self, bwd: Runner, T: int) -> None:
        """Lengths around every block boundary agree with the oracle."""
        bwd.gradients_agree(bwd.gradient_case("slow", T, H=1, HV=2, initial_state=True))

    def test_gradients_of_no_token(self, bwd: Runner) -> None:
        """A call without tokens and without states has gradients of its parameters, which are zeros."""
        bwd.gradients_agree(GradientCase(bwd.case("slow", 0, HV=4).inputs, of=("o",)))

    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_gradients_of_heads(self, bwd: Runner, heads: tuple[int, int]) -> None:
        """Equal and grouped heads agree with the oracle."""
        bwd.full_only(heads == (16, 64))
        H, HV = heads
        case = bwd.case("steep", 20, B=2 if HV < 16 else 1, H=H, HV=HV)
        bwd.gradients_agree(GradientCase(case.inputs, of=("o",)))

    @pytest.mark.parametrize("family", ("mixed", "memory"))
    @pytest.mark.parametrize("bounds", BOUNDS, ids=lambda b: "-".join(map(str, b)))
    def test_gradients_of_packed_sequences(self, bwd: Runner, bounds: tuple[int, ...], family: str) -> None:
        """Packed sequences agree with the oracle. The gradient of an empty one's initial state is that of its final state."""
        bwd.require(Feature.VARLEN, Feature.INITIAL_STATE, Feature.FINAL_STATE)
        lengths = lengths_of(bounds)
        recipe = {"H": 1, "HV": 2, "lengths": lengths, "initial_state": True}
        case = bwd.gradient_case(family, bounds[-1], **recipe)
        found, given = bwd.gradients_agree(case)["initial_state"], case.grad_final_state
        assert given is not None
        assert all(torch.equal(found[n], given[n]) for n, size in enumerate(lengths) if size == 0)

    @pytest.mark.parametrize("form", FORMS)
    def test_gradients_of_a_form(self, bwd: Runner, form: str) -> None:
        """Each form of gate, beta, normalisation and scale agrees with the oracle, also if A_log or dt_bias is absent."""
        recipe = bwd.declared_part({"H": 1, "HV": 2, "initial_state": True})
        inputs = in_form(form, lambda family: bwd.case(family, 70, **recipe).inputs)
        bwd.gradients_agree(GradientCase(inputs, bwd.outputs()))

    @pytest.mark.parametrize("of", (("o",), ("final_state",)), ids=" ".join)
    @pytest.mark.parametrize("initial_state", (False, True), ids=("no initial state", "initial state"))
    def test_gradients_of_one_output(self, bwd: Runner, initial_state: bool, of: tuple[str, ...]) -> None:
        """The gradients of o alone and of the final state alone agree with the oracle, with and without an initial state."""
        case = bwd.case("mixed", 70, H=1, HV=2, initial_state=initial_state)
        bwd.gradients_agree(GradientCase(case.inputs, of))

    @pytest.mark.parametrize("exponent", EXPONENTS, ids=lambda n: f"2^{n}")
    @pytest.mark.parametrize("family", ("steep", "saturated", "mixed", "spikes"))
    def test_gradients_at_a_scale(self, bwd: Runner, family: str, exponent: int) -> None:
        """If the gradients of the outputs are 2^n times as large, those of the inputs are, with the same relative errors. The mean over a
        million elements has gradients of 2^-20."""
        if bwd.dtype is torch.float16:
            pytest.skip(f"{NOT_DECLARED}a dtype whose exponents reach 2^{exponent}")
        case = bwd.gradient_case(family, 130, H=1, HV=2, initial_state=True)
        scaled = (None if d is None else d * 2.0**exponent for d in (case.grad_o, case.grad_final_state))
        found = bwd.gradients(case.arguments, *scaled)
        unscaled = {n: d.double() * 2.0**-exponent for n, d in found.items()}
        bwd.check_gradients(case, unscaled, f" at 2^{exponent}")

    @pytest.mark.parametrize("form", ("precomputed", "gates in q's dtype", "states"))
    def test_gradients_of_dtypes(self, bwd: Runner, dtype: str, form: str) -> None:
        """Every declared dtype of q, k and v agrees with the oracle."""
        given = {"dtype": getattr(torch, dtype), "initial_state": form == "states"}
        inputs = bwd.case(PLAIN, 20, **given).inputs
        if form == "gates in q's dtype":
            inputs = inputs.replace(**{n: inputs.arguments[n].to(given["dtype"]) for n in ("g", "beta")})
        bwd.gradients_agree(GradientCase(inputs, ("o", "final_state") if form == "states" else ("o",)))

    def test_gradients_of_head_dims(self, bwd: Runner, head_dims: tuple[int, int]) -> None:
        """Every declared pair of head dimensions agrees with the oracle, also K != V."""
        K, V = head_dims
        bwd.gradients_agree(GradientCase(bwd.case(PLAIN, 20, K=K, V=V).inputs, of=("o",)))

    @pytest.mark.parametrize("family", ("slow", "memory", "mixed"))
    @pytest.mark.parametrize("cut", (1, 64, 100))
    def test_gradients_of_a_split(self, bwd: Runner, family: str, cut: int) -> None:
        """Two calls, of which the first passes the state on and the second the gradient of the state back, agree with one call."""
        bwd.require(Feature.INITIAL_STATE, Feature.FINAL_STATE)
        case = bwd.gradient_case(family, 130, H=1, HV=2, initial_state=True)
        assert case.grad_o is not None
        first, second = case.inputs.tokens(0, cut), case.inputs.tokens(cut)
        state = bwd(first)[1]
        late = bwd.gradients(
            second | {"initial_state": state}, case.grad_o[:, cut:].contiguous(), case.grad_final_state
        )
        early = bwd.gradients(first, case.grad_o[:, :cut].contiguous(), late.pop("initial_state"))
        found = {"initial_state": early.pop("initial_state")}
        found |= {n: torch.cat([d, late[n]], 1) if n in PER_TOKEN else d + late[n] for n, d in early.items()}
        bwd.check_gradients(case, found, f", cut at {cut}")

    # ---- equalities

    @pytest.mark.parametrize("bounds", (None, PACKED), ids=("fixed", "packed"))
    def test_gradients_of_state_layouts(self, bwd: Runner, bounds: tuple[int, ...] | None) -> None:
        """The gradients of a call with [V,K] states are those of the call with [K,V] states, bit for bit."""
        lengths = None if bounds is None else lengths_of(bounds)
        recipe = {"H": 1, "HV": 2, "lengths": lengths, "initial_state": True}
        case = bwd.gradient_case("slow", 130, **recipe)
        x, given = case.arguments, case.grad_final_state
        assert given is not None
        turned = x | {"initial_state": x["initial_state"].mT.contiguous(), "state_v_first": True}
        found = bwd.gradients(turned, case.grad_o, given.mT.contiguous())
        found["initial_state"] = found["initial_state"].mT
        assert same_bits(found, bwd.gradients(x, case.grad_o, given))

    @pytest.mark.parametrize("family", ("slow", "mixed"))
    def test_gradients_on_every_run(self, bwd: Runner, family: str) -> None:
        """Every run returns the same bits."""
        case = self._served(bwd, family, 130, B=2, H=1, HV=2, initial_state=True)
        first = self._gradients(bwd, case)
        for _ in range(2):
            assert same_bits(self._gradients(bwd, case), first)

    @pytest.mark.parametrize("family", ("slow", "mixed", "masked"))
    def test_gradients_behind_the_last_used_output(self, bwd: Runner, family: str) -> None:
        """If the gradients of o from t on and of the final state are zero, those of all inputs from t on are exactly zero."""
        case = self._served(bwd, family, 130, H=1, HV=2)
        for t in (0, 1, 40, 64, 100) if not bwd.quick else (1, 64):
            found = bwd.gradients(case.arguments, _until(case, t))
            nonzero = [n for n in PER_TOKEN if found[n][:, t:].any()]
            assert not nonzero, f"gradients of {nonzero} from token {t} on are not zero"

    @pytest.mark.parametrize("family", ("slow", "mixed", "masked"))
    def test_gradients_before_the_last_used_output(self, bwd: Runner, family: str) -> None:
        """Pinned: if the gradients of o from t on and of the final state are zero, the gradients of earlier tokens keep every bit if all
        inputs from t on change, and if these tokens are cut off."""
        bwd.require(Feature.PIN)
        case, other = (self._served(bwd, family, 130, H=1, HV=2, seed=seed) for seed in (1, 2))
        x, y = case.arguments | {"pin": True}, other.arguments
        for t in (1, 40, 64) if not bwd.quick else (40,):
            used = _until(case, t)
            want = bwd.gradients(x, used)
            mixed = {n: torch.cat([x[n][:, :t], y[n][:, t:]], 1) for n in PER_TOKEN}
            changed = bwd.gradients(x | mixed, used)
            cut = bwd.gradients(x | {n: x[n][:, :t].contiguous() for n in mixed}, used[:, :t].contiguous())
            for what, found in (("inputs from it on", changed), ("whether more tokens follow", cut)):
                wrong = [n for n in PER_TOKEN if not torch.equal(found[n][:, :t], want[n][:, :t])]
                assert not wrong, f"gradients of {wrong} before token {t} depend on {what}"

    def test_gradients_of_a_batch(self, bwd: Runner) -> None:
        """Pinned: the gradients of a sequence have the same bits alone, in a batch, and packed among others."""
        bwd.require(Feature.PIN)
        case = self._served(bwd, "slow", 70, B=3, H=1, HV=2, initial_state=True)
        x, (grad_o, grad_state) = case.arguments | {"pin": True}, (case.grad_o, case.grad_final_state)
        assert grad_o is not None
        names = [n for n in (*PER_TOKEN, "initial_state") if n in x]
        part: Any = lambda d, b: None if d is None else d[b : b + 1]
        together = bwd.gradients(x, grad_o, grad_state)
        for b in range(3):
            alone = x | {n: part(x[n], b) for n in names}
            found = bwd.gradients(alone, part(grad_o, b), part(grad_state, b))
            assert same_bits(found, {n: part(together[n], b) for n in names}, *names), f"sequence {b}"
        if Feature.VARLEN.value not in bwd.declared():
            return
        cu_seqlens = torch.tensor([0, 70, 70, 140, 210], device=bwd.device)
        as_packed = lambda d: d.flatten(0, 1).unsqueeze(0)
        with_empty: Any = lambda d: None if d is None else torch.cat([d[:1], d[:1], d[1:]])
        packed = x | {n: as_packed(x[n]) for n in PER_TOKEN} | {"cu_seqlens": cu_seqlens}
        if "initial_state" in x:
            packed["initial_state"] = with_empty(x["initial_state"])
        found = bwd.gradients(packed, as_packed(grad_o), with_empty(grad_state))
        want = {n: as_packed(together[n]) for n in PER_TOKEN}
        assert same_bits(found, want, *PER_TOKEN)
        if "initial_state" in x:
            assert torch.equal(found["initial_state"][[0, 2, 3]], together["initial_state"])

    def test_gradients_of_a_sum_and_of_strided_outputs(self, bwd: Runner) -> None:
        """The memory layout of the gradient of o changes no bit: expanded as that of a sum, and strided between NaNs."""
        case = self._served(bwd, "slow", 65, H=1, HV=2)
        x, o = case.arguments, case.grad_o
        assert o is not None
        ones = torch.ones_like(o)
        summed = bwd.gradients(x, torch.ones((), dtype=o.dtype, device=o.device).expand(o.shape))
        assert same_bits(summed, bwd.gradients(x, ones))
        wide = torch.full((*o.shape[:-1], 2 * o.shape[-1]), float("nan"), dtype=o.dtype, device=o.device)
        wide[..., ::2] = o
        assert same_bits(bwd.gradients(x, wide[..., ::2]), bwd.gradients(x, o))

    # ---- memory

    @pytest.mark.parametrize("bounds", (None, PACKED), ids=("fixed", "packed"))
    def test_gradients_into_poisoned_memory(self, bwd: Runner, bounds: Any) -> None:
        """`chunk_bwd_into` reads neither gradients nor workspace before it writes them, writes every element, and writes nothing else."""
        backend: Any = REGISTRY.load(REGISTRY.find(bwd.backend).spec)
        if not isinstance(backend, SupportsBackwardInto):
            pytest.skip(f"{NOT_DECLARED}chunk_bwd_into")
        lengths = None if bounds is None else lengths_of(bounds)
        case = self._served(bwd, "mixed", 130, H=1, HV=2, lengths=lengths, initial_state=True)
        grad_o, grad_state = case.grad_o, case.grad_final_state
        assert grad_o is not None
        bwd.may_run(case.arguments)
        inputs = bwd.backend_inputs(case.arguments, needs_backward=True)
        given = {n: x for n in FLOAT_TENSORS if (x := getattr(inputs, n)) is not None}
        kept = {n: x.clone() for n, x in given.items()}
        results: list[dict[str, Tensor]] = []
        for poison in (0xFF, 0x00):  # 0xFF bytes are NaN in bf16 and in fp32
            memory = {n: guarded(tuple(x.shape), x.dtype, x.device) for n, x in given.items()}
            found = {n: tensor.fill_(float("nan")) for n, (tensor, _) in memory.items()}
            size = backend.backward_workspace_bytes(inputs.shape)
            workspace, around = guarded((size,), torch.uint8, bwd.device)
            absent: dict[str, Any] = dict.fromkeys(FLOAT_TENSORS)
            gradients = KdaGradients(**(absent | found))
            backend.chunk_bwd_into(inputs, grad_o, grad_state, gradients, workspace.fill_(poison))
            results.append(found)
            assert all((guard() == 7).all() for _, guard in memory.values()), "wrote around a gradient"
            assert (around() == 7).all(), "wrote around the workspace"
            assert all(torch.equal(x, kept[n]) for n, x in given.items()), "wrote to an input"
        assert same_bits(results[0], results[1])
        bwd.check_gradients(case, results[0])

    @pytest.mark.parametrize("bounds", (None, PACKED), ids=("fixed", "packed"))
    def test_gradients_in_poisoned_surroundings(self, bwd: Runner, bounds: Any) -> None:
        """NaNs next to the inputs and to the gradients of the outputs change no bit."""
        lengths = None if bounds is None else lengths_of(bounds)
        case = self._served(bwd, "mixed", 130, H=1, HV=2, lengths=lengths, initial_state=True)
        x = {n: amid(t) if isinstance(t, Tensor) else t for n, t in case.arguments.items()}
        outer = (None if d is None else amid(d) for d in (case.grad_o, case.grad_final_state))
        assert same_bits(bwd.gradients(x, *outer), self._gradients(bwd, case))

    @pytest.mark.parametrize("n", (0, 2))
    def test_gradients_of_poisoned_neighbours(self, bwd: Runner, n: int) -> None:
        """NaNs in one packed sequence, in its state and in the gradients of its outputs reach no other sequence."""
        bwd.require(Feature.VARLEN, Feature.INITIAL_STATE, Feature.FINAL_STATE)
        recipe = {"H": 1, "HV": 2, "lengths": lengths_of(PACKED), "initial_state": True}
        case = bwd.gradient_case("mixed", PACKED[-1], **recipe)
        x, mine = copied(case.arguments), slice(PACKED[n], PACKED[n + 1])
        outer = [d.clone() for d in (case.grad_o, case.grad_final_state) if d is not None]
        for t in (*(x[name] for name in PER_TOKEN), outer[0]):
            t[:, mine] = float("nan")
        for t in (x["initial_state"], outer[1]):
            t[n] = float("nan")
        found = bwd.gradients(x, *outer)
        for name in PER_TOKEN:
            found[name][:, mine] = case.exact.values[name][:, mine].to(found[name])
        found["initial_state"][n] = case.exact.values["initial_state"][n].to(found["initial_state"])
        what = f" of other sequences than {n}, which holds NaNs,"
        bwd.check_gradients(case, found, what, (*PER_TOKEN, "initial_state"))

    def test_gradients_of_rows_of_no_sequence(self, bwd: Runner) -> None:
        """With use_graph, tokens after the last sequence are not read, and their gradients are zero."""
        bwd.require(Feature.GRAPH)
        case = bwd.gradient_case("slow", 100, H=1, HV=2, lengths=(40, 60, 0))
        padded = lambda d: torch.cat([d, torch.full_like(d[:, :30], float("nan"))], 1)
        x = case.arguments | {n: padded(case.arguments[n]) for n in PER_TOKEN}
        assert case.grad_o is not None
        found = bwd.gradients(x, padded(case.grad_o), case.grad_final_state, use_graph=True, max_num_seqs=3)
        assert not any(found[n][:, 100:].any() for n in PER_TOKEN), "gradients of tokens of no sequence"
        bwd.check_gradients(case, found | {n: found[n][:, :100] for n in PER_TOKEN})

    # ---- optional parts

    @pytest.mark.parametrize("family", (PLAIN, "steep", "slow", "memory"))
    def test_state_gradients_of_segments(self, bwd: Runner, family: str) -> None:
        """Gradients of states that pass through segments from behind agree with those of the whole sequence."""
        bwd.require(Feature.VARLEN, Feature.INITIAL_STATE, Feature.FINAL_STATE)
        backend = REGISTRY.load(REGISTRY.find(bwd.backend).spec)
        if not isinstance(backend, SupportsStateGradients):
            pytest.skip(f"{NOT_DECLARED}initial_state_gradients")
        case = bwd.gradient_case(family, 230, HV=2, lengths=(230,), initial_state=True)
        x = case.arguments
        assert case.grad_o is not None and case.grad_final_state is not None
        unread = x["initial_state"].new_full((4, *x["initial_state"].shape[1:]), torch.nan)
        cu_seqlens = torch.tensor([0, 100, 100, 167, 230], dtype=torch.int32, device=bwd.device)
        packed = {"initial_state": unread, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens.cpu()}
        inputs = bwd.backend_inputs(x | packed, output_final_state=True, needs_backward=True)
        shape = inputs.shape
        if (reason := REGISTRY.refusal(REGISTRY.find(bwd.backend), shape, named=True)) is not None:
            pytest.skip(f"{REFUSED}{reason}")
        ends = torch.zeros_like(unread)
        ends[3] = case.grad_final_state[0]
        found = torch.full_like(unread, torch.nan)
        transitions = unread.new_full((4, 2, shape.K, shape.K), torch.nan)
        size = backend.state_gradients_workspace_bytes(shape)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=bwd.device)
        backend.initial_state_gradients(inputs, case.grad_o, ends, found, transitions, workspace)
        identity = torch.eye(shape.K, dtype=found.dtype, device=bwd.device)
        assert torch.equal(transitions[1], identity.expand(2, -1, -1)) and not found[1].any()
        dS = found[3].double()
        for i in (2, 1, 0):
            dS = transitions[i].double() @ dS + found[i].double()
        bwd.check_gradients(case, {"initial_state": dS[None]}, " through segments", ("initial_state",))

    # ---- helpers

    @staticmethod
    def _served(bwd: Runner, family: str, T: int, **recipe: Any) -> GradientCase:
        """Returns a case that the backend serves, see `Runner.served`."""
        x = bwd.served(family, T, **recipe)
        of = ("o", "final_state") if x.get("output_final_state") else ("o",)
        return GradientCase(Inputs(x, recipe.get("lengths") if "cu_seqlens" in x else None), of)

    @staticmethod
    def _gradients(bwd: Runner, case: GradientCase) -> dict[str, Tensor]:
        return bwd.gradients(case.arguments, case.grad_o, case.grad_final_state)


def _until(case: GradientCase, t: int) -> Tensor:
    """Returns the gradient of o of a case with zeros from token t on."""
    assert case.grad_o is not None
    used = case.grad_o.clone()
    used[:, t:] = 0
    return used
