"""Calls over pools, with records, and with `out` take a prepared launch if they are like an earlier one."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from helpers.fake_plugins import install_planner
from helpers.inputs import call
from helpers.prepared_backend import prepared
from torch.utils.flop_counter import FlopCounterMode

from kda_core import chunk_kda, fused_recurrent_kda, known
from kda_core.errors import ArgumentError, DeviceError, DtypeError, KdaError, ShapeError, StrideError
from kda_core.recent import Recent
from kda_core.registry import record_calls
from kda_core.serving import Journal, journal_decode_kda, verify_kda

HV, D, SLOTS = 2, 8, 6
INDEX = torch.tensor([4, -1, 2])


@pytest.fixture
def backend():
    with prepared() as found:
        yield found


def pool(seed, dtype=torch.float32, slots=SLOTS):
    return torch.randn(slots, HV, D, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decode(seed=0, **more):
    given = {"initial_state": pool(seed), "ssm_state_indices": INDEX.clone(), "output_final_state": True}
    return call(B=3, T=1, seed=seed) | given | more


def decode_to_other_slots(seed=0):
    mask = torch.tensor([True, True, bool(seed % 2)])
    return decode(seed, final_state_indices=INDEX.flip(0), has_initial_state=mask, first_slot=1)


def decode_of_drafts(seed=0):
    more = {"ssm_state_indices": torch.tensor([[4, 1], [0, -1], [2, 3]]), "initial_state": pool(seed)}
    accepted = torch.tensor([1 + seed % 2, 1, 2], dtype=torch.int32)
    return call(B=3, T=2, seed=seed) | more | {"num_accepted_tokens": accepted, "output_final_state": True}


def decode_packed(seed=0):
    bounds = torch.tensor([0, 1, 1, 4])
    return decode(seed) | call(T=6, seed=seed) | {"cu_seqlens": bounds}


def decode_of_strided_slots(seed=0):
    return decode(seed, ssm_state_indices=torch.stack([INDEX, INDEX.flip(0)], 1)[:, seed % 2])


def new_states(seed=0):
    return decode(seed, inplace_final_state=False)


def without_pool(seed=0):
    states = {"initial_state": pool(seed)[:3].contiguous(), "output_final_state": True}
    return call(B=3, T=2, seed=seed) | states


def with_out(make):
    def made(seed=0):
        x = make(seed)
        return x | {"out": torch.full_like(x["v"], torch.nan)}

    return made


def prefill(seed=0, **more):
    bounds = torch.tensor([0, 70, 70, 90])
    return decode(seed) | call(T=90, seed=seed) | {"cu_seqlens": bounds, "first_slot": 1} | more


def prefill_to_checkpoints(seed=0, own=True):
    points = {
        "checkpoint_cu": torch.tensor([0, 1, 1, 1], dtype=torch.int32),
        "checkpoint_positions": torch.tensor([64], dtype=torch.int32),
        "checkpoint_indices": torch.tensor([1 + seed % 2]),
    }
    return prefill(seed, **points, **({"checkpoint_pool": pool(seed + 10)} if own else {}))


def journal(seed=0, name="journal"):
    records = Journal.allocate(SLOTS, HV, D, D, length=2, drafts=2, dtype=torch.float32)
    return call(B=3, T=2, seed=seed) | {"pool": pool(seed), "slots": INDEX.clone(), name: records}


def outputs(seed=0):
    x = call(seed=seed) | {"initial_state": pool(seed)[:1].contiguous(), "output_final_state": True}
    given = torch.full_like(x["v"], torch.nan), torch.full_like(x["initial_state"], torch.nan)
    return x | {"out": given, "workspace": torch.empty(600, dtype=torch.uint8)}


def workspace(seed=0):
    return call(seed=seed) | {"workspace": torch.empty(600, dtype=torch.uint8)}


CASES = {
    "decode": (fused_recurrent_kda, decode),
    "decode, out": (fused_recurrent_kda, with_out(decode)),
    "decode, to other slots": (fused_recurrent_kda, decode_to_other_slots),
    "decode, drafts": (fused_recurrent_kda, decode_of_drafts),
    "decode, packed": (fused_recurrent_kda, decode_packed),
    "decode, packed, out": (fused_recurrent_kda, with_out(decode_packed)),
    "decode, strided slots": (fused_recurrent_kda, decode_of_strided_slots),
    "decode, new states": (fused_recurrent_kda, new_states),
    "decode, no pool": (fused_recurrent_kda, without_pool),
    "decode, no pool, out": (fused_recurrent_kda, with_out(without_pool)),
    "prefill": (chunk_kda, prefill),
    "prefill, out": (chunk_kda, with_out(prefill)),
    "prefill, checkpoints": (chunk_kda, prefill_to_checkpoints),
    "prefill, checkpoints in the pool": (chunk_kda, lambda seed=0: prefill_to_checkpoints(seed, own=False)),
    "journal": (journal_decode_kda, journal),
    "journal, out": (journal_decode_kda, with_out(journal)),
    "verify": (verify_kda, lambda seed=0: journal(seed, "records")),
    "outputs": (chunk_kda, outputs),
    "workspace": (chunk_kda, workspace),
}


def tensors_of(x):
    if isinstance(x, Journal):
        return list(filter(torch.is_tensor, vars(x).values()))
    return [x] if torch.is_tensor(x) else [y for part in x if part is not None for y in tensors_of(part)]


def everything(function, x):
    """Makes a call and returns copies of its results and of all tensors that it may have written."""
    found = function(**x)
    kept = [
        x[n]
        for n in ("initial_state", "pool", "checkpoint_pool", "journal", "records", "out")
        if x.get(n) is not None
    ]
    return [y.clone() for y in tensors_of([found, kept])]


def through_the_dispatcher(function, x):
    with FlopCounterMode(display=False):
        return everything(function, x)


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def make_known(backend, function, x):
    """Makes a call until it is known, and asserts that it is."""
    for _ in range(2):
        function(**x)
    before = sum(backend.launched)
    function(**x)
    assert sum(backend.launched) == before + 1, "the third call of a kind is known"


@pytest.mark.parametrize("case", CASES)
def test_known_calls_return_the_results_of_others(backend, case):
    function, make = CASES[case]
    make_known(backend, function, make())
    for seed in range(1, 4):
        with record_calls() as ran:
            got = everything(function, make(seed))
        assert same(got, through_the_dispatcher(function, make(seed)))
        assert len(ran) == 1 and ran[0].backend == "reference"
    assert backend.launched == [4] and len(backend.prepared) == 1


@pytest.mark.parametrize("case", CASES)
def test_known_calls_hold_no_tensor(backend, case, monkeypatch):
    monkeypatch.setattr(known, "KNOWN", Recent(100, lambda key, found: len(found)))
    function, make = CASES[case]
    x = make()
    make_known(backend, function, x)
    host = x.get("cu_seqlens")  # the stand-in for a backend keeps lengths that the host knows
    alive = [
        weakref.ref(t)
        for t in tensors_of([v for v in x.values() if isinstance(v, (torch.Tensor, Journal, tuple))])
    ]
    names = len(alive)
    del x
    gc.collect()
    assert names and not [ref().shape for ref in alive if ref() is not None and ref() is not host]


@pytest.mark.parametrize(
    "case", [c for c in CASES if "journal" not in c and "verify" not in c and "work" not in c]
)
def test_known_calls_mark_what_they_write(backend, case):
    """As the ordinary call does."""
    function, make = CASES[case]
    x = make()
    written = [x[n] for n in ("initial_state", "checkpoint_pool", "out") if x.get(n) is not None]
    versions = lambda: [t._version for t in tensors_of(written)]
    steps = []
    for _ in range(4):
        before = versions()
        function(**x)
        steps.append([b - a for a, b in zip(before, versions())])
    assert [s != 0 for s in steps[3]] == [s != 0 for s in steps[0]] and sum(backend.launched) == 2


# ---- calls that differ


def other_pitch(x):
    return torch.randn(SLOTS, HV, D, 2 * D)[..., :D].contiguous().new_zeros(SLOTS, 2, HV, D, D)[:, 0].copy_(x)


OTHERS = {
    "int32 slots": lambda x: {"ssm_state_indices": x["ssm_state_indices"].int()},
    "other slots": lambda x: {"ssm_state_indices": torch.tensor([1, 5, -3])},
    "strided slots": lambda x: {"ssm_state_indices": torch.stack([torch.tensor([1, 5, 0]), INDEX], 1)[:, 0]},
    "slots that start anywhere": lambda x: {"ssm_state_indices": torch.tensor([9, 1, 5, 0])[1:]},
    "another pool": lambda x: {"initial_state": pool(3)},
    "more slots": lambda x: {"initial_state": pool(3, slots=9), "ssm_state_indices": torch.tensor([8, 7, 6])},
    "bf16 pool": lambda x: {"initial_state": pool(3, torch.bfloat16)},
    "another pitch": lambda x: {"initial_state": other_pitch(pool(3))},
    "first slot": lambda x: {"first_slot": 3},
    "read only": lambda x: {"output_final_state": False},
    "a mask": lambda x: {"has_initial_state": torch.tensor([False, True, True])},
    "own final slots": lambda x: {"final_state_indices": torch.tensor([0, 1, 3])},
    "fewer sequences": lambda x: call(B=2, T=1, seed=5) | {"ssm_state_indices": torch.tensor([1, 5])},
    "more tokens": lambda x: call(B=3, T=2, seed=5),
    "other bounds": lambda x: call(T=9, seed=5) | {"cu_seqlens": torch.tensor([0, 3, 3, 7])},
    "strided tokens": lambda x: {"q": torch.stack([x["q"]] * 2, -2).flatten(-2)[..., :D].contiguous().unsqueeze(1)[:, 0]},
    "no l2norm": lambda x: {"use_qk_l2norm_in_kernel": True},
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERS)
def test_a_call_that_differs_has_its_own_result(backend, change):
    make_known(backend, fused_recurrent_kda, decode())
    made = lambda: (x := decode(1)) | OTHERS[change](x)
    for _ in range(4):
        assert same(
            everything(fused_recurrent_kda, made()), through_the_dispatcher(fused_recurrent_kda, made())
        )


def test_lengths_that_the_host_knows_are_read_in_every_call(backend):
    x = decode_packed()
    make_known(backend, fused_recurrent_kda, x)
    x["cu_seqlens"].copy_(torch.tensor([0, 2, 3, 6]))
    fresh = lambda: x | {"initial_state": pool(1)}
    for _ in range(3):
        assert same(
            everything(fused_recurrent_kda, fresh()), through_the_dispatcher(fused_recurrent_kda, fresh())
        )
    x["cu_seqlens"][1] = 5
    with pytest.raises(ArgumentError, match="5 before 3"):
        fused_recurrent_kda(**x)


def shifted(x):
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)


BAD_OUT = {
    "dtype": (lambda x: x["v"].double(), DtypeError, r"out\[0\]"),
    "shape": (lambda x: x["v"].new_empty(3, 1, HV, D + 1), ShapeError, r"out\[0\]"),
    "strides": (lambda x: torch.empty(*x["v"].shape, 2)[..., 0], StrideError, r"out\[0\]"),
    "device": (lambda x: torch.empty_like(x["v"], device="meta"), KdaError, r"out\[0\]|device"),
    "not aligned": (lambda x: shifted(x["v"]), ArgumentError, r"out\[0\] \(o\): expected memory that starts"),
    "memory of v": (lambda x: x["v"], ArgumentError, "not shared with v"),
    "memory of k": (lambda x: x["k"].view(x["v"].shape), ArgumentError, "not shared with k"),
    "memory of the pool": (lambda x: x["initial_state"].flatten()[8:][: x["v"].numel()].view(x["v"].shape), ArgumentError,
                           "not shared with initial_state"),
    "no tensor": (lambda x: 3.0, DtypeError, "out"),
    "too many": (lambda x: (None,) * 4, DtypeError, "out"),
    "sparse": (lambda x: x["v"].to_sparse(), ArgumentError, r"out\[0\].*dense"),
    "a final state": (lambda x: (None, x["initial_state"][:3].clone()), ArgumentError, r"out\[1\]"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_OUT)
def test_outputs_are_checked_after_a_known_call(backend, bad):
    change, error, text = BAD_OUT[bad]
    make_known(backend, fused_recurrent_kda, with_out(decode)())
    for _ in range(3):
        x = decode(1)
        with pytest.raises(error, match=text):
            fused_recurrent_kda(**x, out=change(x))
    assert sum(backend.launched) == 1


def test_outputs_may_not_share_memory_with_each_other(backend):
    make_known(backend, chunk_kda, outputs())
    x = outputs(1)
    o, state = x["out"]
    memory = torch.empty(max(o.numel(), state.numel()) + 8)
    both = memory[: o.numel()].view_as(o), memory[8:][: state.numel()].view_as(state)
    with pytest.raises(ArgumentError, match="memory of its own"):
        chunk_kda(**x | {"out": both})
    with pytest.raises(ArgumentError, match="workspace"):
        chunk_kda(**x | {"workspace": o.view(-1).view(torch.uint8)[:600]})
    with pytest.raises(ShapeError, match="workspace: expected at least 512 bytes"):
        chunk_kda(**x | {"workspace": torch.empty(500, dtype=torch.uint8)})
    assert sum(backend.launched) == 1


BAD_SLOTS = {
    "dtype": ({"ssm_state_indices": INDEX.float()}, DtypeError, "ssm_state_indices"),
    "shape": ({"ssm_state_indices": torch.tensor([1, 2])}, ShapeError, "ssm_state_indices"),
    "device": ({"ssm_state_indices": torch.empty(3, dtype=torch.int64, device="meta")}, DeviceError, "ssm_state"),
    "no tensor": ({"ssm_state_indices": [1, 2, 3]}, DtypeError, "ssm_state_indices"),
    "mask": ({"has_initial_state": torch.ones(3)}, DtypeError, "has_initial_state"),
    "first slot": ({"first_slot": True}, DtypeError, "first_slot"),
    "first slot below 0": ({"first_slot": -1}, DtypeError, "first_slot"),
    "pool dtype": ({"initial_state": pool(1, torch.float16)}, DtypeError, "initial_state"),
    "pool strides": ({"initial_state": pool(1).transpose(2, 3)}, StrideError, "initial_state"),
    "pool not aligned": ({"initial_state": shifted(pool(1))}, ArgumentError, "initial_state: expected memory"),
    "no pool": ({"initial_state": None}, ArgumentError, "initial_state"),
    "accepted": ({"num_accepted_tokens": torch.ones(3, dtype=torch.int32)}, ArgumentError, "num_accepted_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_SLOTS)
def test_slots_are_checked_after_a_known_call(backend, bad):
    change, error, text = BAD_SLOTS[bad]
    make_known(backend, fused_recurrent_kda, decode())
    for _ in range(3):
        with pytest.raises(error, match=text):
            fused_recurrent_kda(**decode(1, **change))
    assert sum(backend.launched) == 1


BAD_JOURNALS = {
    "another class": (lambda x: {"journal": object()}, DtypeError, "journal: expected a kda_core"),
    "records of another dtype": (lambda x: {"journal": replace(x["journal"], u=x["journal"].u.double())}, DtypeError, "journal.u"),
    "records that are not aligned": (lambda x: {"journal": replace(x["journal"], G=shifted(x["journal"].G))}, ArgumentError,
                                     "journal.G: expected memory"),
    "no spans": (lambda x: {"journal": replace(x["journal"], spans=None)}, DtypeError, "journal.spans"),
    "another length": (lambda x: {"journal": replace(x["journal"], length=2.0)}, ArgumentError, "journal.length"),
    "memory of the records": (lambda x: {"out": x["journal"].u.flatten()[: x["v"].numel()].view(x["v"].shape)}, ArgumentError,
                              "not shared with journal.u"),
    "slots": (lambda x: {"slots": INDEX.float()}, DtypeError, "slots"),
    "pool": (lambda x: {"pool": 3}, DtypeError, "pool"),
    "out": (lambda x: {"out": 3}, DtypeError, "out"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_JOURNALS)
def test_journals_are_checked_after_a_known_call(backend, bad):
    change, error, text = BAD_JOURNALS[bad]
    make_known(backend, journal_decode_kda, journal())
    make_known(backend, journal_decode_kda, with_out(journal)())
    before = sum(backend.launched)
    for _ in range(3):
        x = journal(1)
        with pytest.raises(error, match=text):
            journal_decode_kda(**x | change(x))
    assert sum(backend.launched) == before


@pytest.mark.parametrize("case", ["decode", "prefill", "journal", "verify"])
def test_gradients_are_refused_after_a_known_call(backend, case):
    function, make = CASES[case]
    make_known(backend, function, make())
    x = make(1)
    x["v"].requires_grad_()
    with torch.no_grad():
        make_known(backend, function, x)
    with pytest.raises(ArgumentError, match="v"):
        function(**x)


def test_slots_are_checked_by_the_environment(backend, monkeypatch):
    make_known(backend, fused_recurrent_kda, decode())
    make_known(backend, journal_decode_kda, journal())
    monkeypatch.setenv("KDA_CHECK_SLOTS", "1")
    twice = torch.tensor([2, 2, 1])
    for _ in range(3):
        with pytest.raises(ArgumentError, match="ssm_state_indices"):
            fused_recurrent_kda(**decode(1, ssm_state_indices=twice))
        with pytest.raises(ArgumentError, match="slots"):
            journal_decode_kda(**journal(1) | {"slots": twice})
    assert sum(backend.launched) == 2


def test_pool_calls_that_a_planner_splits_are_not_known(install):
    install_planner(install)
    x = call() | {
        "initial_state": pool(0),
        "ssm_state_indices": torch.tensor([2]),
        "output_final_state": True,
    }
    with prepared() as backend:
        for _ in range(4):
            with record_calls() as ran:
                chunk_kda(**x)
            assert [c.planner for c in ran] == ["halves"]
        assert not any(backend.launched)
        make_known(backend, chunk_kda, x | {"context_parallel": "off"})
