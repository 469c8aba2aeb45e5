"""`kda_core.serving` on the reference backend: arguments and errors, the choice of the backend, compilation, bound calls."""

import pytest
import torch
from helpers.inputs import call
from helpers.prepared_backend import PreparedReference, prepared

from kda_core import explain, fused_recurrent_kda, torch_private
from kda_core.backend import SupportsPrepare
from kda_core.errors import (
    ArgumentError,
    BackendUnsupportedError,
    DtypeError,
    NoEligibleBackendError,
    ShapeError,
    StrideError,
)
from kda_core.reference import SPEC, ReferenceBackend
from kda_core.registry import REGISTRY, record_calls
from kda_core.serving import (
    Journal,
    bind,
    journal_advance,
    journal_decode_kda,
    journal_fold,
    journal_reset,
    verify_kda,
)

H, HV, K, V, SLOTS = 2, 4, 8, 16, 6


def tokens(N=3, T=2, seed=0):
    return call(B=N, T=T, H=H, HV=HV, K=K, V=V, seed=seed)


def states(dtype=torch.float32):
    return torch.randn(SLOTS, HV, K, V, generator=torch.Generator().manual_seed(1)).to(dtype)


def new_journal(**more):
    return Journal.allocate(
        SLOTS, HV, K, V, **{"H": H, "length": 4, "drafts": 3, "dtype": torch.float32} | more
    )


def given(**more):
    return {"pool": states(), "slots": torch.tensor([4, -1, 2]), "journal": new_journal()} | more


def pooled(**more):
    pool = {"initial_state": states(), "ssm_state_indices": torch.tensor([4, -1, 2])}
    return pool | {"output_final_state": True} | more


@pytest.fixture
def without_journal():
    replaced = SPEC.__class__(**SPEC.__dict__ | {"features": SPEC.features - {"journal"}})
    with REGISTRY.replaced(replaced, ReferenceBackend(), "no journal"):
        yield


# ---- arguments


CASES = {
    "another class": ({"journal": object()}, DtypeError, "journal: expected a kda_core.serving.Journal"),
    "no pool": ({"pool": None}, DtypeError, "pool: expected a torch.Tensor"),
    "K and V swapped": ({"pool": torch.zeros(SLOTS, HV, V, K)}, ShapeError, "pool: .*state_v_first=True"),
    "pool of other dtype": ({"pool": states(torch.float16)}, DtypeError, "pool: expected torch.float32"),
    "another number of slots": ({"pool": torch.zeros(7, HV, K, V)}, ShapeError, r"journal.u: .*\[7, 4, 7, 16\]"),
    "too many tokens": ({"journal": new_journal(drafts=1)}, ShapeError, "q: .*T from 1 to 1"),
    "slots of each token": ({"slots": torch.zeros(3, 2, dtype=torch.int32)}, ShapeError, r"slots: expected \[N\]"),
    "float slots": ({"slots": torch.zeros(3)}, DtypeError, "slots: expected torch.int32"),
    "negative first slot": ({"first_slot": -1}, DtypeError, "first_slot"),
    "keys of other dtype": ({"journal": new_journal(dtype=torch.bfloat16)}, DtypeError, "journal.k: expected torch.float32"),
    "other key heads": ({"journal": new_journal(H=1)}, ShapeError, r"journal.k: .*\[6, 2, 7, 8\]"),
    "out": ({"out": torch.zeros(3, 2, HV, K)}, ShapeError, r"out\[0\] \(o\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_invalid_argument_is_named(case):
    change, error, words = CASES[case]
    with record_calls() as calls, pytest.raises(error, match=words):
        journal_decode_kda(**tokens(), **given(**change))
    assert not calls


def test_memory_that_is_shared_or_not_contiguous_is_refused():
    x, more = tokens(), given()
    with pytest.raises(ArgumentError, match=r"out\[0\].*not shared with pool"):
        journal_decode_kda(**x, **more, out=more["pool"].view(-1)[: x["v"].numel()].view(x["v"].shape))
    wide = torch.zeros(SLOTS, HV, 8, V)[:, :, :7]
    journal = Journal(**more["journal"].__dict__ | {"u": wide})
    with pytest.raises(StrideError, match="journal.u: expected a contiguous"):
        journal_decode_kda(**x, **more | {"journal": journal})


def test_gradients_are_refused():
    x = tokens()
    x["v"].requires_grad_()
    with pytest.raises(ArgumentError, match="v: expected a tensor that requires no grad"):
        journal_decode_kda(**x, **given())
    with torch.no_grad():
        assert journal_decode_kda(**x, **given()).isfinite().all()


@pytest.mark.parametrize(
    ("name", "size"), [("length", 0), ("drafts", 2.0), ("slots", -1), ("H", 3), ("dtype", torch.int8)]
)
def test_a_journal_has_valid_sizes(name, size):
    with pytest.raises(ArgumentError, match="HV" if name == "H" else name):
        if name == "slots":
            Journal.allocate(size, HV, K, V)
        else:
            new_journal(**{name: size})


def test_advance_checks_its_arguments():
    journal, slots = new_journal(), torch.tensor([4, -1, 2])
    with pytest.raises(ArgumentError, match="T: expected an int from 1 to 3"):
        journal_advance(journal, slots, 1, 4)
    with pytest.raises(ArgumentError, match="accepted: .*an int from 0 to 2"):
        journal_advance(journal, slots, 3, 2)
    with pytest.raises(ShapeError, match=r"accepted: expected \[N\] = \[3\]"):
        journal_advance(journal, slots, torch.tensor([1, 2]), 2)
    with pytest.raises(DtypeError, match="slots: expected torch.int32"):
        journal_reset(journal, slots.float())
    assert not journal.spans.any()


def test_advance_counts_accepted_tokens_and_restarts_where_a_call_folds():
    journal, slots = new_journal(), torch.tensor([4, -1, 2, SLOTS], dtype=torch.int32)
    for accepted, spans in (
        ([3, 3, 1, 3], {4: [0, 3], 2: [0, 1]}),
        ([9, 3, -1, 3], {4: [3, 3], 2: [0, 1]}),  # clamped to [0, 3]; slot 4 had 3 records and folds
        ([0, 3, 3, 3], {4: [6, 0], 2: [0, 4]}),
        ([2, 3, 2, 3], {4: [6, 2], 2: [4, 2]}),
    ):
        journal_advance(journal, slots, torch.tensor(accepted, dtype=torch.int32), 3)
        assert {slot: journal.spans[slot].tolist() for slot in (4, 2)} == spans
    journal_reset(journal, slots)
    assert not journal.spans.any()


def test_layers_share_their_spans():
    first = new_journal()
    second = new_journal(spans=first.spans)
    journal_advance(second, torch.tensor([1]), 2, 3)
    assert first.lengths.tolist() == [0, 2, 0, 0, 0, 0]


# ---- the choice of the backend


def test_a_backend_without_the_feature_is_refused_by_name(without_journal):
    x, more = tokens(), given()
    bits = more["pool"].clone()
    with record_calls() as calls:
        for function in (journal_decode_kda, bind):
            arguments = () if function is journal_decode_kda else (journal_decode_kda,)
            with pytest.raises(BackendUnsupportedError, match="'reference'.*unsupported: journal"):
                function(*arguments, **x, **more, backend="reference")
        with pytest.raises(NoEligibleBackendError, match="reference +unsupported: journal"):
            journal_fold(more["pool"], more["slots"], more["journal"])
        found = explain(journal_decode_kda, **x, **more)
    assert not calls and torch.equal(more["pool"], bits)
    assert found.backend is None and "unsupported: journal" in found.error


def test_explain_names_the_backend():
    x, more = tokens(), given()
    found = explain(journal_decode_kda, **x, **more)
    assert (found.backend, found.pool, found.error) == ("reference", "the backend", None)
    assert found.shape.journal.length == 4 and found.shape.journal.rows == 7
    records = {"records": more.pop("journal")}
    assert explain(verify_kda, **x, **more, **records).shape.journal.has_spans is False
    assert explain(fused_recurrent_kda, **x, **pooled()).pool == "the backend"
    assert explain(fused_recurrent_kda, **x).backend == "reference"
    with pytest.raises(ArgumentError, match="function: expected chunk_kda or fused_recurrent_kda or"):
        explain(journal_fold, **x)


def test_slots_are_checked_if_asked(monkeypatch):
    monkeypatch.setenv("KDA_CHECK_SLOTS", "1")
    for slots, words in (([4, 4, 2], "slots: .*written twice.*slot 4"), ([4, SLOTS, 2], "slots: .*below 6")):
        more = given(slots=torch.tensor(slots))
        with pytest.raises(ArgumentError, match=words):
            journal_decode_kda(**tokens(), **more)
        with pytest.raises(ArgumentError, match=words):
            bind(journal_decode_kda, **tokens(), **more)(**tokens())


# ---- operators


def test_a_compiled_step_has_the_bits_of_an_eager_one():
    torch._dynamo.reset()

    def step(x, pool, slots, journal):
        o = journal_decode_kda(**x, pool=pool, slots=slots, journal=journal)
        journal_advance(journal, slots, 2, 2)
        checked = verify_kda(**x, pool=pool, slots=slots, records=journal)
        journal_fold(pool, slots, journal)
        journal_reset(journal, slots)
        return o, checked

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    slots, pools, journals = torch.tensor([4, -1, 2]), (states(), states()), (new_journal(), new_journal())
    for seed in range(2):
        x = tokens(seed=seed)
        with record_calls() as calls:
            found = compiled(x, pools[0], slots, journals[0])
        assert [c.entry for c in calls] == ["journal_decode", "journal_decode", "journal_fold"]
        want = step(x, pools[1], slots, journals[1])
        assert all(torch.equal(a, b) for a, b in zip(found, want))
        assert torch.equal(*pools) and torch.equal(journals[0].u, journals[1].u)


def test_calls_go_through_the_dispatcher_where_something_observes_it():
    from torch.utils.flop_counter import FlopCounterMode

    x, more = tokens(), given()
    with FlopCounterMode(display=False) as counter, record_calls() as calls:
        journal_decode_kda(**x, **more)
        bind(journal_decode_kda, **x, **more)(**x)
    assert [c.entry for c in calls] == ["journal_decode"] * 2
    assert counter.get_total_flops() == 2 * 6 * K * V * 3 * 2 * HV


def test_the_operators_have_correct_schemas_and_fakes():
    from kda_core.arguments import Arguments, checked
    from kda_core.journal import journal_arguments

    x, more = tokens(), given()
    args = checked(Arguments(**x, initial_state=more["pool"], recurrent=True, context_parallel="off"))
    for verifies in (False, True):
        operands = journal_arguments("journal", more["journal"], more["slots"], 0, verifies=verifies)
        operator = torch.ops.kda_core.verify_ if verifies else torch.ops.kda_core.journal_decode_
        torch.library.opcheck(operator, (*args, *operands, torch.zeros_like(x["v"])))
    operands = journal_arguments("journal", more["journal"], more["slots"], 0)
    torch.library.opcheck(torch.ops.kda_core.journal_fold_, (more["pool"], *operands, None, False, None))


# ---- bound calls


@pytest.mark.parametrize("function", (journal_decode_kda, verify_kda, fused_recurrent_kda))
def test_a_backend_may_prepare_the_launch(function):
    assert isinstance(PreparedReference(), SupportsPrepare) and not isinstance(
        ReferenceBackend(), SupportsPrepare
    )
    more = pooled() if function is fused_recurrent_kda else given()
    if function is verify_kda:
        more["records"] = more.pop("journal")
    with prepared() as backend, record_calls() as calls:
        step = bind(function, **tokens(), **more)
        assert not calls and backend.launched == [0]
        got = step(**tokens(seed=4))
        assert len(calls) == 1 and backend.launched == [1]
    fresh = {
        name: states() if name in ("pool", "initial_state") else new_journal() if name in ("journal", "records") else x
        for name, x in more.items()
    }  # fmt: skip
    want = function(**tokens(seed=4), **fresh)
    if function is fused_recurrent_kda:
        assert torch.equal(*(x[0] for x in (got, want))) and torch.equal(*(x[1] for x in (got, want)))
    else:
        assert torch.equal(got, want)


CHANGES = {
    "shape": (lambda x: x[:, :1], ShapeError, r"v: expected \[3, 2, 4, 16\], as bound"),
    "dtype": (lambda x: x.double(), DtypeError, "v: expected torch.float32, as bound"),
    "strides": (lambda x: x.mT.contiguous().mT, StrideError, "v: expected strides"),
    "address": (lambda x: torch.zeros(x.numel() + 1)[1:].view(x.shape), ArgumentError, "v: .*4 bytes past"),
}


@pytest.mark.parametrize("earlier", ("first call", "later call", "later call without TensorGuards"))
@pytest.mark.parametrize("change", CHANGES)
def test_a_bound_call_refuses_other_tensors(change, earlier, monkeypatch):
    changed, error, words = CHANGES[change]
    step, x = bind(journal_decode_kda, **tokens(), **given()), tokens()
    if earlier.endswith("TensorGuards"):
        monkeypatch.setattr(torch_private, "GUARDS", None)
    if earlier.startswith("later"):
        want, out = step(**x), torch.empty_like(x["v"])
        assert torch.equal(step(**x, out=out), want) and torch.equal(step(**tokens()), want)
    with record_calls() as calls:
        with pytest.raises(error, match=words):
            step(**x | {"v": changed(x["v"])})
        with pytest.raises(error, match=words.replace("v:", "out:")):
            step(**x, out=changed(torch.zeros_like(x["v"])))
    assert not calls


def test_a_bound_call_of_tensors_that_require_grad_is_a_call_of_the_function():
    step, x = bind(journal_decode_kda, **tokens(), **given()), tokens()
    step(**x)
    x["v"].requires_grad_()
    with torch.no_grad():
        step(**x)
    with pytest.raises(ArgumentError, match="v: expected a tensor that requires no grad"):
        step(**x)


def test_bind_refuses_what_it_would_have_to_copy():
    x = tokens()
    with pytest.raises(ArgumentError, match="ssm_state_indices: expected the slots of a pool"):
        bind(fused_recurrent_kda, **x)
    with pytest.raises(ArgumentError, match="function: expected chunk_kda or fused_recurrent_kda or"):
        bind(journal_fold, **x)
    with pytest.raises(ArgumentError, match="inplace_final_state"):
        bind(fused_recurrent_kda, **x, **pooled(inplace_final_state=False))
    with pytest.raises(ArgumentError, match="out: expected None"):
        bind(fused_recurrent_kda, **x, **pooled(), out=torch.zeros_like(x["v"]))
    with pytest.raises(StrideError, match="ssm_state_indices: .*bind copies nothing"):
        bind(fused_recurrent_kda, **x, **pooled(ssm_state_indices=torch.arange(6)[::2]))
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(HV, dtype=torch.bfloat16)}
    with pytest.raises(ArgumentError, match="A_log: .*bind copies nothing"):
        bind(fused_recurrent_kda, **x, **pooled(), **gate)
    copies = SPEC.__class__(**SPEC.__dict__ | {"features": SPEC.features - {"state_pool"}})
    with (
        REGISTRY.replaced(copies, ReferenceBackend(), "no pools"),
        pytest.raises(BackendUnsupportedError, match="'reference' serves this pool by copies"),
    ):
        bind(fused_recurrent_kda, **x, **pooled())


def test_a_bound_call_clears_tokens_of_no_sequence():
    x = {name: y[:1] for name, y in tokens(1, 6).items()}
    more = pooled(ssm_state_indices=torch.tensor([1, 3]), cu_seqlens=torch.tensor([0, 2, 3]))
    step, out = bind(fused_recurrent_kda, **x, **more), torch.full_like(x["v"], torch.nan)
    o, pool = step(**x, out=out)
    assert o is out and pool is more["initial_state"] and o[:, :3].isfinite().all() and not o[:, 3:].any()


def test_a_bound_call_marks_what_it_writes_for_autograd():
    x, more = tokens(), pooled()
    step, before = bind(fused_recurrent_kda, **x, **more), more["initial_state"]._version
    step(**x)
    assert more["initial_state"]._version > before
