"""Calls whose states are in the slots of a pool: arguments, errors, copies for backends without pools, operators.

What every backend must compute is in the conformance kit (`kda_core.testing.serving`).
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kda_core
from kda_core import chunk_kda, explain, fused_recurrent_kda, slots
from kda_core.contract import Feature, KdaCheckpoints, KdaInputs, KdaPool
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
from kda_core.testing import make_inputs

LENGTHS = (17, 0, 47, 66)
K, V, HV, SLOTS = 16, 8, 2, 6
POOL_FEATURES = {
    Feature.STATE_POOL,
    Feature.BF16_POOL,
    Feature.TOKEN_STATES,
    Feature.CHECKPOINTS,
    Feature.STRIDED,
}


def call(**more):
    return make_inputs("slow", 130, lengths=LENGTHS, K=K, V=V, dtype=torch.float32).arguments | more


def decode(T=1, B=3, **more):
    return make_inputs("slow", T, B=B, K=K, V=V, dtype=torch.float32).arguments | more


def pool_of(slots=SLOTS, dtype=torch.float32):
    return torch.randn(slots, HV, K, V, generator=torch.Generator().manual_seed(1)).to(dtype)


def index(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@contextmanager
def without_pools(but=()):
    """Within the block, `reference` does not declare what concerns pools, except the features `but`."""
    left_out = {f.value for f in POOL_FEATURES - set(but)}
    spec = replace(SPEC, features=SPEC.features - left_out, abi=(2, 0))
    with REGISTRY.replaced(spec, ReferenceBackend(), "without pools"):
        yield


# ---- the call


def test_the_pool_itself_is_returned_and_updated():
    pool = pool_of()
    before, x = pool.clone(), call()
    at = index(3, 1, 4, 5)
    o, state = chunk_kda(**x, initial_state=pool, ssm_state_indices=at, output_final_state=True)
    assert state is pool
    want, states = chunk_kda(**x, initial_state=before[at.long()], output_final_state=True)
    assert torch.equal(o, want) and torch.equal(pool[at.long()], states)
    assert torch.equal(pool[[0, 2]], before[[0, 2]])


def test_without_a_final_state_the_pool_is_only_read():
    pool = pool_of()
    before = pool.clone()
    o, state = chunk_kda(**call(), initial_state=pool, ssm_state_indices=index(3, 1, 4, 5))
    assert state is None and torch.equal(pool, before)
    assert torch.equal(o, chunk_kda(**call(), initial_state=before[[3, 1, 4, 5]])[0])


def test_a_decode_call_decides_about_the_pool_by_inplace_final_state():
    x, at = decode(), index(3, 1, 4)
    want, states = fused_recurrent_kda(**x, initial_state=pool_of()[[3, 1, 4]], output_final_state=True)
    for inplace, output, writes in (
        (None, True, True),
        (None, False, False),
        (True, False, True),
        (True, True, True),
    ):
        pool = pool_of()
        o, state = fused_recurrent_kda(
            **x,
            initial_state=pool,
            ssm_state_indices=at,
            inplace_final_state=inplace,
            output_final_state=output,
        )
        assert torch.equal(o, want) and state is (pool if writes else None)
        assert torch.equal(pool, pool_of()) != writes
    pool = pool_of()
    o, state = fused_recurrent_kda(
        **x, initial_state=pool, ssm_state_indices=at, inplace_final_state=False, output_final_state=True
    )
    assert torch.equal(o, want) and torch.equal(state, states) and torch.equal(pool, pool_of())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("entry", [chunk_kda, fused_recurrent_kda])
def test_copies_have_the_bits_of_a_backend_with_pools(entry, packed, dtype):
    x = call() if packed else decode(20, B=4)
    more = {
        "ssm_state_indices": index(5, -1, 2, 0), "final_state_indices": index(5, -1, -1, 1),
        "has_initial_state": torch.tensor([True, True, True, False]), "output_final_state": True,
    }  # fmt: skip
    native, copied = pool_of(dtype=dtype), pool_of(dtype=dtype)
    a, _ = entry(**x, **more, initial_state=native)
    with without_pools(), record_calls() as calls:
        b, _ = entry(**x, **more, initial_state=copied)
    assert len(calls) == 1 and torch.equal(a, b) and torch.equal(native, copied)


@pytest.mark.parametrize("packed", [False, True])
def test_a_slot_for_every_token_is_served_by_copies_too(packed):
    x = decode(3, B=4)
    if packed:
        lengths = (3, 0, 2, 1)
        x = make_inputs("slow", 6, lengths=lengths, K=K, V=V, dtype=torch.float32).arguments
    at = torch.arange(16, dtype=torch.int64).view(4, 4).flip(0)[:, :3]
    at[3, 1] = -1
    more = {"ssm_state_indices": at, "num_accepted_tokens": index(2, 3, 0, 9), "inplace_final_state": True}
    native, copied = pool_of(16), pool_of(16)
    a, _ = fused_recurrent_kda(**x, **more, initial_state=native)
    with without_pools(), record_calls() as calls:
        b, _ = fused_recurrent_kda(**x, **more, initial_state=copied)
    assert [c.entry for c in calls] == ["recurrent_fwd"] * 3
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(native, copied)
    unused = sorted({*range(16)} - {*at.flatten().tolist()})
    assert torch.equal(copied[unused], pool_of(16)[unused]) and not torch.equal(copied, pool_of(16))


def test_out_is_written_and_rows_of_no_sequence_are_zero():
    x = make_inputs("slow", 6, lengths=(2, 1, 3), K=K, V=V, dtype=torch.float32).arguments
    x["cu_seqlens"] = index(0, 2, 3, 5)
    want, _ = fused_recurrent_kda(**x, initial_state=pool_of()[[3, 1, 4]])
    for pooled in (
        {"initial_state": pool_of()[[3, 1, 4]]},
        {"initial_state": pool_of(), "ssm_state_indices": index(3, 1, 4)},
    ):
        out = torch.full_like(x["v"], torch.nan)
        o, _ = fused_recurrent_kda(**x, **pooled, out=out)
        assert o is out and torch.equal(out, want) and not out[:, 5].any()


def test_a_call_in_inference_mode_updates_a_pool_of_inference_mode():
    with torch.inference_mode():
        pool = pool_of()
        chunk_kda(**call(), initial_state=pool, ssm_state_indices=index(3, 1, 4, 5), output_final_state=True)
        assert pool.is_inference() and not torch.equal(pool, pool_of())


def test_autograd_notices_that_the_pool_changed():
    pool, w = pool_of(), torch.ones(1, requires_grad=True)
    product = (pool * w).sum()
    chunk_kda(**call(), initial_state=pool, ssm_state_indices=index(3, 1, 4, 5), output_final_state=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.filterwarnings("ignore")  # warnings of torch's own code while it traces
@pytest.mark.parametrize("declared", [True, False])
def test_compiled_calls_update_the_pool(declared):
    x, at = call(), index(3, -1, 4, 5)
    d, to = decode(2), torch.tensor([[0, 1], [2, 3], [-1, -1]])

    def step(pool):
        pool = pool * 1.0  # functionalisation has to order the write after this
        o, state = chunk_kda(**x, initial_state=pool, ssm_state_indices=at, output_final_state=True)
        p, _ = fused_recurrent_kda(**d, initial_state=pool, ssm_state_indices=to, inplace_final_state=True)
        return o, p, state + 1

    with without_pools(POOL_FEATURES if declared else ()):
        torch._dynamo.reset()
        want, got = step(pool_of()), torch.compile(step, fullgraph=True, backend="aot_eager")(pool_of())
    assert all(torch.equal(a, b) for a, b in zip(want, got))


@pytest.mark.filterwarnings("ignore")  # as above
def test_a_compiled_call_mutates_its_argument():
    x = call()

    def step(pool, at):
        return chunk_kda(**x, initial_state=pool, ssm_state_indices=at, output_final_state=True)[0]

    torch._dynamo.reset()
    eager, compiled, at = pool_of(), pool_of(), index(3, -1, 4, 5)
    want, got = step(eager, at), torch.compile(step, fullgraph=True, backend="aot_eager")(compiled, at)
    assert torch.equal(want, got) and torch.equal(eager, compiled) and not torch.equal(eager, pool_of())


# ---- checkpoints


CHECKPOINTS = {
    "checkpoint_cu": index(0, 0, 0, 0, 1),
    "checkpoint_positions": index(64),
    "checkpoint_indices": index(0),
}


def test_checkpoints_need_a_backend_that_declares_them():
    x = call(
        initial_state=pool_of(), ssm_state_indices=index(3, 1, 4, 5), output_final_state=True, **CHECKPOINTS
    )
    with without_pools(), pytest.raises(NoEligibleBackendError, match="unsupported: checkpoints, state_pool"):
        chunk_kda(**x)
    with without_pools(), pytest.raises(BackendUnsupportedError, match="checkpoints"):
        chunk_kda(**x, backend="reference")


def test_a_checkpoint_goes_to_the_pool_or_to_a_pool_of_its_own():
    x, at = call(), index(3, 1, 4, 5)
    pool, other = pool_of(), torch.zeros(2, HV, K, V, dtype=torch.bfloat16)
    chunk_kda(**x, initial_state=pool, ssm_state_indices=at, output_final_state=True, **CHECKPOINTS)
    cut = {n: x[n][:, :128] for n in ("q", "k", "v", "g", "beta")} | {"cu_seqlens": index(0, 17, 17, 64, 128)}
    _, states = chunk_kda(**(x | cut), initial_state=pool_of()[at.long()], output_final_state=True)
    torch.testing.assert_close(pool[0], states[3])
    before = pool_of()
    chunk_kda(**x, initial_state=before, ssm_state_indices=at, checkpoint_pool=other, **CHECKPOINTS)
    assert torch.equal(other[0], pool[0].bfloat16()) and not other[1].any() and torch.equal(before, pool_of())


# ---- errors

OF = {"initial_state": pool_of(), "ssm_state_indices": index(3, 1, 4, 5)}
WRONG = [
    ({"ssm_state_indices": index(1)}, ShapeError, "ssm_state_indices: expected [N] = [4], got [1]"),
    ({"ssm_state_indices": index(3, 1, 4, 5).float()}, DtypeError, "ssm_state_indices: expected torch.int32 or torch.int64"),
    ({"ssm_state_indices": [3, 1, 4, 5]}, DtypeError, "ssm_state_indices: expected a torch.Tensor or None"),
    ({"initial_state": None}, ArgumentError, "initial_state: expected a pool of states"),
    ({"initial_state": pool_of().mT.contiguous()}, ShapeError, "Pass state_v_first=True"),
    ({"initial_state": pool_of().half()}, DtypeError, "initial_state: expected torch.float32 or torch.bfloat16"),
    ({"initial_state": pool_of().expand(2, -1, -1, -1, -1)[0].mT.contiguous().mT}, StrideError, "initial_state: expected contiguous slots"),
    ({"initial_state": pool_of()[:1].expand(6, -1, -1, -1)}, StrideError, "initial_state: expected contiguous slots"),
    ({"initial_state": torch.zeros(6 * 257)[:].as_strided((6, 2, 16, 8), (257, 128, 8, 1))}, StrideError, "multiple of 16 bytes"),
    ({"initial_state": torch.zeros(6 * 256 + 1)[1:].view(6, 2, 16, 8)}, ArgumentError, "initial_state: expected memory that starts"),
    ({"final_state_indices": index(3, 1, 4, 5, dtype=torch.int64)}, DtypeError, "final_state_indices: expected torch.int32"),
    ({"has_initial_state": index(1, 1, 1, 1)}, DtypeError, "has_initial_state: expected torch.bool"),
    ({"first_slot": -1}, DtypeError, "first_slot: expected an int of at least 0"),
    ({"ssm_state_indices": None, "first_slot": 1}, ArgumentError, "first_slot: expected its default unless ssm_state_indices"),
    ({"ssm_state_indices": None, "has_initial_state": torch.ones(4) > 0}, ArgumentError, "has_initial_state: expected its default"),
    ({"checkpoint_cu": index(0, 0, 0, 0, 1)}, ArgumentError, "checkpoint_positions: expected a tensor together with checkpoint_cu"),
    (CHECKPOINTS, ArgumentError, "checkpoint_pool: expected a pool of its own"),
    (CHECKPOINTS | {"output_final_state": True, "checkpoint_cu": index(0, 1)}, ShapeError, "checkpoint_cu: expected [N+1] = [5]"),
    ({"checkpoint_pool": pool_of()}, ArgumentError, "checkpoint_pool: expected None without checkpoint_positions"),
    ({"num_accepted_tokens": None}, TypeError, "Only fused_recurrent_kda has it"),
    ({"initial_state_indices": None}, TypeError, "Did you mean 'ssm_state_indices'?"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "kind", "words"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_wrong_argument_is_named(more, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        chunk_kda(**call(**(OF | more)))


WRONG_DECODES = [
    ({"num_accepted_tokens": index(1, 1, 1)}, ArgumentError, "num_accepted_tokens: expected None unless ssm_state_indices is [N, W]"),
    ({"ssm_state_indices": torch.zeros(3, 2, dtype=torch.int32)}, ShapeError, "W of at least 3"),
    ({"ssm_state_indices": torch.zeros(3, 3, dtype=torch.int32), "final_state_indices": index(1, 2, 3)}, ArgumentError, "final_state_indices: expected None if"),
    ({"ssm_state_indices": None, "inplace_final_state": True}, ArgumentError, "inplace_final_state: expected None unless"),
    ({"beta": torch.rand(3, 3, HV, V)}, ShapeError, "FLA's headwise beta"),
    ({"out": torch.zeros(3, 3, HV, V + 1)}, ShapeError, "out[0] (o)"),
]  # fmt: skip


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(
    ("more", "kind", "words"), WRONG_DECODES, ids=[str(i) for i in range(len(WRONG_DECODES))]
)
def test_a_wrong_argument_of_a_decode_call_is_named(more, kind, words, declared):
    x = decode(3, initial_state=pool_of(), ssm_state_indices=index(3, 1, 4)) | more
    with without_pools(POOL_FEATURES if declared else ()), pytest.raises(kind, match=re.escape(words)):
        fused_recurrent_kda(**x)


def test_a_wrong_out_of_a_call_with_a_slot_for_every_token_is_named():
    x = decode(3, initial_state=pool_of(), ssm_state_indices=torch.zeros(3, 3, dtype=torch.int32))
    with without_pools(), pytest.raises(ShapeError, match=re.escape("out[0] (o)")):
        fused_recurrent_kda(**x, out=torch.zeros(3, 3, HV, V + 1))


@pytest.mark.parametrize("name", ["q", "initial_state"])
def test_gradients_through_a_pool_are_refused(name):
    x = call(**OF)
    x[name] = x[name].clone().requires_grad_()
    with pytest.raises(
        ArgumentError, match="^initial_state: expected states without ssm_state_indices"
    ) as caught:
        chunk_kda(**x, output_final_state=True)
    assert f"{name} requires grad" in str(caught.value)
    with torch.no_grad():
        chunk_kda(**x)
    leaf = x[name].detach()
    with pytest.raises(ArgumentError, match="^initial_state: "):
        torch.func.grad(lambda t: chunk_kda(**(x | {name: t}))[0].sum())(leaf)


def test_outputs_must_not_share_memory_with_the_pool():
    pool = torch.zeros(8, HV, K, V)
    x = call(initial_state=pool, ssm_state_indices=index(3, 1, 4, 5))
    inside = torch.zeros(130 * HV * V + pool.numel())
    x["initial_state"] = inside[-pool.numel() :].view_as(pool)
    o = inside[: 130 * HV * V].view(1, 130, HV, V)
    chunk_kda(**x, out=o)
    o = inside.view(-1)[-130 * HV * V :].view(1, 130, HV, V)
    for context in (without_pools(), without_pools(POOL_FEATURES)):
        with context, pytest.raises(ArgumentError, match="not shared with initial_state"):
            chunk_kda(**x, out=o)


def test_the_final_states_of_a_pool_cannot_go_elsewhere():
    with pytest.raises(ArgumentError, match=re.escape("out[1] (final_state): expected None, because")):
        chunk_kda(**call(**OF, output_final_state=True), out=(None, torch.zeros(4, HV, K, V)))


# ---- explain


def test_explain_says_who_serves_the_pool():
    x = call(**OF, output_final_state=True)
    found = explain(**x)
    assert (
        found.pool == "the backend" and found.shape.pool.writes and Feature.STATE_POOL in found.shape.features
    )
    with without_pools():
        found = explain(**x)
        assert (found.pool, found.backend, found.error) == ("copies by kda-core", "reference", None)
        assert "pool      copies by kda-core" in str(found)
        found = explain(**x, **CHECKPOINTS)
        assert found.pool is None and "checkpoints" in found.error
    assert explain(**call()).pool is None


# ---- KDA_CHECK_SLOTS

BAD_SLOTS = [
    ({"ssm_state_indices": index(3, 1, 3, 5)}, "ssm_state_indices: expected no slot that is written twice, got slot 3 for sequences 0 and 2"),
    ({"final_state_indices": index(3, 1, 4, 1)}, "final_state_indices: expected no slot that is written twice"),
    ({"final_state_indices": index(1, 2, 4, 5)}, "slot 1 of sequence 0, which 1 reads"),
    ({"ssm_state_indices": index(3, 1, 6, 5)}, "ssm_state_indices: expected slots below 6 (the size of the pool), got 6"),
    (CHECKPOINTS | {"checkpoint_indices": index(3)}, "checkpoint_indices: expected no slot that is written twice"),
    (CHECKPOINTS | {"checkpoint_positions": index(100)}, "checkpoint_positions: expected positive multiples of 64"),
    (CHECKPOINTS | {"checkpoint_positions": index(128)}, "checkpoint_positions: expected positive multiples of 64"),
    (CHECKPOINTS | {"checkpoint_cu": index(0, 0, 0, 1, 0)}, "checkpoint_cu: expected values from 0 to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "words"), BAD_SLOTS, ids=[str(i) for i in range(len(BAD_SLOTS))])
def test_wrong_slots_are_found_if_asked(monkeypatch, more, words):
    x = call(**(OF | more), output_final_state=True)
    chunk_kda(**x)  # defined or not, it raises nothing and writes nothing foreign
    monkeypatch.setenv("KDA_CHECK_SLOTS", "1")
    with pytest.raises(ArgumentError, match=re.escape(words)):
        chunk_kda(**x)


def test_valid_slots_pass_the_check(monkeypatch):
    monkeypatch.setenv("KDA_CHECK_SLOTS", "1")
    chunk_kda(**call(**OF, output_final_state=True, **CHECKPOINTS))
    chunk_kda(**call(**(OF | {"ssm_state_indices": index(3, 3, -1, -1)})))  # nothing is written
    slots_of_tokens = torch.tensor([[0, 1], [2, 3], [-1, -1]])
    x = decode(2, initial_state=pool_of(), ssm_state_indices=slots_of_tokens, inplace_final_state=True)
    fused_recurrent_kda(**x)
    slots_of_tokens[0, 0] = 3
    with pytest.raises(ArgumentError, match="slot 3 for sequences 0 and 1"):
        fused_recurrent_kda(**x)


def test_kda_check_reads_the_states_of_a_pool(monkeypatch):
    monkeypatch.setenv("KDA_CHECK", "1")
    pool = pool_of()
    pool[0] = torch.nan
    chunk_kda(**call(**OF) | {"initial_state": pool})
    for context in (without_pools(), without_pools(POOL_FEATURES)):
        with context, pytest.raises(ArgumentError, match="initial_state: expected finite values"):
            chunk_kda(**call(initial_state=pool, ssm_state_indices=index(3, 0, 4, 5)))


# ---- arithmetic on slots


def test_no_arithmetic_on_slots_reads_a_value_on_the_host():
    """A fake tensor has no values, so reading one raises an exception."""
    x, W = decode(3, B=4), 3
    shape = explain(**x).shape
    with FakeTensorMode():
        states = torch.empty(SLOTS, HV, K, V)
        at, per_token = torch.empty(4, dtype=torch.int32), torch.empty(4, W, dtype=torch.int32)
        checkpoints = KdaCheckpoints(states, torch.empty(5, dtype=torch.int32), at, at)
        inputs = KdaInputs(*(None,) * 10, shape)
        inputs = replace(inputs, q=torch.empty(4, 3, HV, K))
        for read, accepted in ((at, None), (per_token, at), (per_token, None)):
            pool = KdaPool(states, read, read, 1, at > 0, accepted, checkpoints)
            found = slots.initial_states(pool, torch.float32)
            assert found.shape == (4, HV, K, V)
            slots.clear_rows(inputs, pool, torch.empty(4, 3, HV, V))
            slots.masked_copy_(states, at, found, at > 0)
            slots.checkpoint_rows(inputs, pool, checkpoints)


def test_masked_copy_writes_the_wanted_rows_only():
    for wanted in ([1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]):
        target, values = torch.full((7, 2), torch.nan), torch.rand(4, 2)
        mask = torch.tensor(wanted) > 0
        at = torch.where(mask, torch.tensor([5, 0, 6, 2]), torch.tensor([99, -1, 5, 6]))
        slots.masked_copy_(target, at, values, mask)
        assert torch.equal(target[at[mask]], values[mask])
        assert int(target.isnan().all(1).sum()) == 7 - sum(wanted)


def test_a_backend_of_an_earlier_abi_never_sees_a_pool():
    class Old(ReferenceBackend):
        def chunk_fwd(self, inputs, outputs):
            assert inputs.pool is None and inputs.shape.pool is None and inputs.initial_state is not None
            return super().chunk_fwd(inputs, outputs)

    left_out = {f.value for f in POOL_FEATURES}
    spec = replace(SPEC, features=SPEC.features - left_out, abi=(2, 0))
    with REGISTRY.replaced(spec, Old(), "of an earlier ABI"), record_calls() as calls:
        kda_core.chunk_kda(**call(**OF), output_final_state=True)
    assert [c.entry for c in calls] == ["chunk_fwd"]
