"""The adapter for SGLang, driven with tensors in SGLang's layouts and compared with the fp64 oracle.

Without SGLang its classes are stand-ins (`helpers.fake_sglang`). With SGLang, as in ``nox -s test-sglang``, the kernel is a subclass of
SGLang's own base class.
"""

from __future__ import annotations

import inspect
import logging
import sys
from importlib.metadata import entry_points
from itertools import accumulate

import pytest
import torch
from helpers import fake_sglang
from helpers.fake_sglang import KDAKernelDispatcher, LinearAttnKernelBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from kda_core.integrations import sglang as adapter
from kda_core.registry import record_calls
from kda_core.testing import token_oracle

H, HV, K, V, SLOTS, PADDING, STEPS = 2, 4, 16, 8, 7, 24, 3
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


@pytest.fixture
def sglang(monkeypatch):
    adapter.kernel_class.cache_clear()
    yield fake_sglang.install(monkeypatch)
    adapter.kernel_class.cache_clear()


class Fallback:
    """Stands in for SGLang's Triton kernel: returns the name of the method and its arguments."""

    def __getattr__(self, name):
        return lambda *x, **given: (name, x, given)


@pytest.fixture
def kernel(sglang):
    return adapter.kernel_class()(Fallback())


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


class Pool:
    """States [slots, HV, V, K] with NaNs between the slots, as in a pool of all layers."""

    def __init__(self, dtype=torch.float32, slots=SLOTS):
        size = HV * V * K
        self.buffer = torch.full((slots, size + PADDING), torch.nan, dtype=dtype)
        self.buffer[:, :size] = torch.randn(slots, size, generator=torch.Generator().manual_seed(3))
        self.states = self.buffer[:, :size].unflatten(1, (HV, V, K))
        self.before = self.buffer.clone()

    def check_untouched(self, *written):
        size = HV * V * K
        for slot in range(len(self.buffer)):
            start = size if slot in written else 0
            now, old = (x[slot, start:].view(torch.uint8) for x in (self.buffer, self.before))
            assert torch.equal(now, old), slot


class Batch:
    """The tensors of a batch as SGLang has them after its convolution: one row for each token."""

    def __init__(self, *lengths, seed=0, bound=-5.0):
        rng, T = torch.Generator().manual_seed(seed), sum(lengths)
        self.lengths = lengths
        self.mixed = torch.randn(T, 2 * H * K + HV * V + 8, generator=rng)[:, :-8]  # a view
        self.a = torch.randn(1, T, HV * K, generator=rng)
        self.b = torch.randn(1, T, HV + 3, generator=rng)[..., :HV]
        self.gate = {
            "A_log": torch.rand(1, 1, HV, 1, generator=rng),
            "dt_bias": torch.randn(HV * K, generator=rng),
            "lower_bound": bound,
        }
        self.bounds = ints(list(accumulate(lengths, initial=0)))

    @property
    def qkv(self):
        q, k, v = self.mixed[None].split([H * K, H * K, HV * V], dim=-1)
        return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))

    @property
    def keywords(self):
        names = ("q", "k", "v", "a", "b")
        return dict(zip(names, (*self.qkv, self.a, self.b))) | self.gate | {"query_start_loc": self.bounds}

    def oracle(self, n, state, tokens=None, scale=None):
        """Returns o [tokens, HV, V] and the state of sequence n, from `state` or zeros, after its first tokens."""
        start, end = self.bounds[n : n + 2].tolist()
        end = end if tokens is None else start + tokens
        x = (y[:, start:end] for y in (*self.qkv, self.a.unflatten(-1, (HV, K)), self.b))
        o, final, *_ = token_oracle(
            *x,
            initial_state=None if state is None else state[None].float(),
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
            scale=scale,
            **self.gate | {"A_log": self.gate["A_log"].flatten()},
        )
        return o[0], final[0]


def far(x, want):
    assert x.shape == want.shape
    return ((x.double() - want).abs().max() / want.abs().max()).item()


def check(o, states, batch, slots, before, limit=2e-5, scale=None):
    """Compares each sequence that has a slot, and the zeros of the others."""
    for n, slot in enumerate(slots):
        start, end = batch.bounds[n : n + 2].tolist()
        if slot < 0:
            assert not o[0, start:end].any()
            continue
        want, final = batch.oracle(n, before[slot], scale=scale)
        assert far(o[0, start:end], want) < limit
        if states is not None:
            assert far(states[slot], final) < limit


# ---- registration


def test_the_entry_point_names_register():
    (point,) = (p for p in entry_points(group="sglang.srt.plugins") if p.name == "kda_core")
    assert point.load() is adapter.register


def test_without_sglang_the_plugin_logs_a_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with caplog.at_level(logging.INFO):
        adapter.register()
    assert "kda_core serves no layer of this SGLang: ModuleNotFoundError" in caplog.text


def test_without_its_base_class_the_choice_is_not_offered(sglang, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, f"{fake_sglang.LINEAR}.kernels.kernel_backend", None)
    adapter.register()
    assert not sglang.hooks and adapter.CHOICE not in sglang.choices
    assert "kda_core serves no layer of this SGLang: ModuleNotFoundError" in caplog.text


def test_the_plugin_offers_a_choice_and_may_be_loaded_again(sglang, caplog):
    with caplog.at_level(logging.INFO, "sglang.kda_core"):
        adapter.register()
        adapter.register()
    assert sglang.choices == ["triton", "cutedsl", "kda_core"]
    assert [(target, hook) for target, hook, _ in sglang.hooks] == [
        (adapter.DISPATCHER, adapter.choose_kernels)
    ]
    assert caplog.text.count("--linear-attn-backend kda_core is available") == 1


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, ("triton", "triton", "triton")),
        ({"linear_attn_backend": "kda_core"}, ("ours", "ours", "triton")),
        ({"linear_attn_prefill_backend": "kda_core"}, ("triton", "ours", "triton")),
        (
            {"linear_attn_decode_backend": "kda_core", "linear_attn_backend": "cutedsl"},
            ("ours", "cutedsl", "triton"),
        ),
        (
            {"linear_attn_backend": "kda_core", "linear_attn_decode_backend": "triton"},
            ("triton", "ours", "triton"),
        ),
        ({"linear_attn_verify_backend": "kda_core"}, ("triton", "triton", "ours")),
    ],
    ids=str,
)
def test_the_options_choose_the_kernels_of_each_mode(sglang, options, expected):
    vars(sglang.options).update(options)
    o = sglang.options
    names = (
        o.linear_attn_decode_backend or o.linear_attn_backend,
        o.linear_attn_prefill_backend or o.linear_attn_backend,
        o.linear_attn_verify_backend or "triton",
    )
    dispatcher = object.__new__(KDAKernelDispatcher)
    adapter.choose_kernels(
        KDAKernelDispatcher.__init__, dispatcher, *(LinearAttnKernelBackend(name) for name in names)
    )
    found = (dispatcher.decode_kernel, dispatcher.extend_kernel, dispatcher.verify_kernel)
    shown = tuple("ours" if isinstance(x, adapter.KdaCoreKernel) else x.split()[0] for x in found)
    assert shown == expected
    assert all(x.fallback == "triton kernel" for x in found if not isinstance(x, str))
    assert dispatcher.supports_packed_decode_safe_gate == (expected[0] == "ours")


def test_a_backend_that_sglang_chose_itself_stays(sglang):
    """SGLang may choose another kernel for a model than the options name."""
    sglang.options.linear_attn_backend = "kda_core"
    backends = [LinearAttnKernelBackend(name) for name in ("custom", "cutedsl", "triton")]
    dispatcher = object.__new__(KDAKernelDispatcher)
    adapter.choose_kernels(KDAKernelDispatcher.__init__, dispatcher, *backends)
    assert isinstance(dispatcher.decode_kernel, adapter.KdaCoreKernel)
    assert (dispatcher.extend_kernel, dispatcher.verify_kernel) == ("cutedsl kernel", "triton kernel")


@pytest.mark.parametrize("backends, named", [((1, 2), {}), ((1, 2, 3), {"another": 4})], ids=str)
def test_a_dispatcher_of_another_form_is_left_alone(sglang, backends, named):
    seen = []
    adapter.choose_kernels(lambda *x, **given: seen.append((x, given)), "dispatcher", *backends, **named)
    assert seen == [(("dispatcher", *backends), named)]


def test_unknown_names_of_others_are_refused_by_sglang(sglang):
    custom = LinearAttnKernelBackend("another plugin's")
    with pytest.raises(ValueError, match="Unsupported KDA backend"):
        adapter.choose_kernels(
            KDAKernelDispatcher.__init__, object.__new__(KDAKernelDispatcher), custom, custom, custom
        )


def test_the_kernel_is_a_subclass_with_the_flags_of_what_it_serves(kernel):
    base = sys.modules[f"{fake_sglang.LINEAR}.kernels.kernel_backend"].LinearAttnKernelBase
    assert isinstance(kernel, base) and not inspect.isabstract(type(kernel))
    assert kernel.supports_packed_decode and kernel.supports_packed_decode_safe_gate
    assert kernel.supports_track_state_snapshot and kernel.supports_safe_gate_verify
    assert not kernel.uses_state_checkpoints and not kernel.supports_fused_chain_verify


# ---- decode


@pytest.mark.parametrize("bound", (-5.0, None), ids=("bounded", "softplus"))
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_packed_decode(kernel, dtype, bound):
    batch, pool, slots = Batch(1, 1, 1, 1, 1, bound=bound), Pool(dtype), [3, 0, -1, 6, -1]
    before = pool.states.clone()
    with record_calls() as calls:
        o = kernel.packed_decode(
            batch.mixed,
            batch.a[0],
            batch.b.transpose(0, 1),  # SGLang passes [N, 1, HV] or [1, N, HV]
            scale=0.7,
            ssm_states=pool.states,
            cache_indices=ints(slots),
            num_v_heads=HV,
            head_v_dim=V,
            replayssm_d=None,
            **batch.gate,
        )
    assert [(c.backend, c.entry) for c in calls] == [("reference", "recurrent_fwd")]
    check(o, pool.states, batch, slots, before, LIMIT[dtype], scale=0.7)
    pool.check_untouched(3, 0, 6)


def test_decode_of_separate_tensors(kernel):
    batch, pool, slots = Batch(1, 1, 1), Pool(), [5, -1, 0]
    before = pool.states.clone()
    with record_calls() as calls:
        o = kernel.decode(**batch.keywords, ssm_states=pool.states, cache_indices=ints(slots))
    assert [(c.backend, c.entry) for c in calls] == [("reference", "recurrent_fwd")]
    check(o, pool.states, batch, slots, before)
    pool.check_untouched(5, 0)


def test_decode_with_replayssm_stays_with_sglang(kernel):
    batch, pool = Batch(1), Pool()
    given = {
        "ssm_states": pool.states,
        "cache_indices": ints([1]),
        "num_v_heads": HV,
        "head_v_dim": V,
    } | batch.gate
    name, _, passed = kernel.packed_decode(
        batch.mixed, batch.a[0], batch.b, scale=1.0, replayssm_d="ring", replayssm_k="k", **given
    )
    assert name == "packed_decode" and passed["replayssm_k"] == "k" and passed["scale"] == 1.0
    pool.check_untouched()


# ---- extend


def extend(kernel, batch, pool, slots, **more):
    q, k, v = batch.qkv
    given = {"ssm_states": pool.states, "cache_indices": ints(slots), "query_start_loc": batch.bounds}
    given |= {"beta_is_raw": True, "extend_seq_lens_cpu": list(batch.lengths)} | batch.gate
    return kernel.extend(q, k, v, batch.a.unflatten(-1, (HV, K)), batch.b, **given | more)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_extend_over_the_pool(kernel, dtype):
    batch, pool, slots = Batch(65, 1, 130, 7, 0, 3), Pool(dtype), [4, 0, 2, -1, 5, 6]
    before = pool.states.clone()
    with record_calls() as calls:
        o = extend(kernel, batch, pool, slots)
    assert [(c.backend, c.entry, c.planner) for c in calls] == [("reference", "chunk_fwd", None)]
    check(o, None, batch, slots[:4], before, LIMIT[dtype])
    for n in (0, 1, 2, 5):
        assert far(pool.states[slots[n]], batch.oracle(n, before[slots[n]])[1]) < LIMIT[dtype]
    pool.check_untouched(4, 0, 2, 6)


def test_extend_stores_tracked_states(kernel):
    batch, pool, slots = Batch(130, 66, 20, 64), Pool(), [4, 0, 2, 1]
    before = pool.states.clone()
    track = torch.full((4, HV, V, K), torch.nan)
    kept = torch.zeros(2, dtype=torch.int64)
    o, h = extend(
        kernel,
        batch,
        pool,
        slots,
        return_intermediate_states=True,
        track_state=track,
        track_chunk_idx=ints([2, 1, -1, -1]),
        track_ssm_h_src=kept,
    )
    assert h is None
    check(o, pool.states, batch, slots, before)
    for n, tokens in ((0, 128), (1, 64)):
        assert far(track[n], batch.oracle(n, before[slots[n]], tokens)[1]) < 2e-5
    assert track[2:].isnan().all()
    pool.check_untouched(*slots)


def test_extend_without_tracked_states_returns_none_for_them(kernel):
    batch, pool = Batch(64), Pool()
    o, h = extend(kernel, batch, pool, [1], return_intermediate_states=True, track_ssm_h_src=torch.empty(0))
    assert h is None and o.shape == (1, 64, HV, V)


def test_extend_with_a_gate_and_beta_that_are_ready(kernel):
    batch, pool = Batch(40, 30), Pool()
    before = pool.states.clone()
    q, k, v = batch.qkv
    g, beta = -torch.rand(1, 70, HV, K), torch.rand(1, 70, HV)
    o = kernel.extend(
        q, k, v, g, beta, ssm_states=pool.states, cache_indices=ints([1, 3]), query_start_loc=batch.bounds
    )
    want, final, *_ = token_oracle(
        q, k, v, g, beta, initial_state=before[[1, 3]], cu_seqlens=batch.bounds, use_qk_l2norm_in_kernel=True,
        state_v_first=True,
    )  # fmt: skip
    assert far(o, want) < 2e-5 and far(pool.states[[1, 3]], final) < 2e-5


@pytest.mark.parametrize(
    "more",
    [{"is_spec_decode": True}, {"return_intermediate_states": True, "track_ssm_h_src": torch.zeros(1)}],
    ids=("drafts", "states of chunks"),
)
def test_extends_that_kda_core_cannot_serve_stay_with_sglang(kernel, more):
    batch, pool = Batch(64), Pool()
    name, x, passed = extend(kernel, batch, pool, [1], layer_id=7, **more)
    assert name == "extend" and len(x) == 5 and passed["layer_id"] == 7
    assert more.items() <= passed.items()
    pool.check_untouched()


# ---- target_verify


def verify(kernel, batch, pool, slots, rows, buffer, steps=STEPS, **more):
    given = {"retrieve_parent_token": None, "cache_steps": steps, "intermediate_states_buffer": buffer}
    given |= {
        "ssm_states": pool.states,
        "cache_indices": ints(slots),
        "intermediate_state_indices": ints(rows),
    }
    return kernel.target_verify(**batch.keywords | given | more)


@pytest.mark.parametrize("lengths", [(3, 3, 3, 3), (3, 1, 2, 3)], ids=("dense", "ragged"))
def test_verify_only_reads_the_pool_and_stores_the_state_of_each_draft(kernel, lengths):
    batch, pool, slots, rows = Batch(*lengths), Pool(), [3, -1, 0, 6], [0, 1, 2, 4]
    buffer = torch.full((6, STEPS + 1, HV, V, K), torch.nan)  # the last row is SGLang's padding
    with record_calls() as calls:
        o = verify(kernel, batch, pool, slots, [*rows, 5], buffer)
    assert [(c.backend, c.entry) for c in calls] == [("reference", "recurrent_fwd")]
    check(o, None, batch, slots, pool.states)
    pool.check_untouched()
    for n, (slot, row, length) in enumerate(zip(slots, rows, lengths)):
        for t in range(length if slot >= 0 else 0):
            assert far(buffer[row, t], batch.oracle(n, pool.states[slot], t + 1)[1]) < 2e-5
    assert buffer[[1, 3]].isnan().all() and buffer[:, STEPS].isnan()[[0, 2, 4]].all()


def test_verify_has_the_bits_of_decoding(kernel):
    batch, pool = Batch(3, 3), Pool()
    buffer = torch.zeros(3, STEPS, HV, V, K)
    o = verify(kernel, batch, pool, [4, 1], [0, 1], buffer)
    for t in range(3):
        rows = [t, 3 + t]
        step = kernel.packed_decode(
            batch.mixed[rows], batch.a[0, rows], batch.b[0, rows], scale=K**-0.5, ssm_states=pool.states,
            cache_indices=ints([4, 1]), num_v_heads=HV, head_v_dim=V, **batch.gate,
        )  # fmt: skip
        assert torch.equal(step[0], o[0, rows]) and torch.equal(pool.states[[4, 1]], buffer[:2, t])


@pytest.mark.parametrize("case", ("tree", "ring", "no buffer", "strided buffer"))
def test_verifications_that_kda_core_cannot_serve_stay_with_sglang(kernel, case):
    batch, pool = Batch(3), Pool()
    buffer = torch.zeros(2, STEPS, HV, V, K)
    more = {
        "tree": {"retrieve_parent_token": ints([[0, 0, 0]])},
        "ring": {"cache_ring": True},
        "no buffer": {"intermediate_states_buffer": None},
        "strided buffer": {"intermediate_states_buffer": torch.zeros(2, STEPS + 1, HV, V, K)[:, :STEPS]},
    }[case]
    name, x, passed = verify(kernel, batch, pool, [1], [0], buffer, **more)
    assert name == "target_verify" and not x and passed.keys() >= {*more, "q", "cache_steps", "lower_bound"}
    assert all(passed[n] is value for n, value in more.items())
    pool.check_untouched()


# ---- CUDA graphs


def test_no_call_reads_a_tensor_on_the_host(kernel):
    """A fake tensor has no values, so it raises an exception where the host would wait for one."""
    with FakeTensorMode():
        batch, pool, buffer = Batch(2, 2), Pool(), torch.zeros(3, STEPS, HV, V, K)
        extended = extend(
            kernel, batch, pool, [1, -1], track_state=torch.empty(2, HV, V, K), track_chunk_idx=ints([0, -1])
        )
        verified = verify(kernel, batch, pool, [1, -1], [0, 1], buffer)
        single = Batch(1, 1)
        decoded = kernel.packed_decode(
            single.mixed, single.a[0], single.b[0], scale=1.0, ssm_states=pool.states, cache_indices=ints([1, -1]),
            num_v_heads=HV, head_v_dim=V, **single.gate,
        )  # fmt: skip
        assert extended.shape == verified.shape == (1, 4, HV, V) and decoded.shape == (1, 2, HV, V)


def test_kda_core_gets_views_and_the_pool_itself(kernel, monkeypatch):
    batch, pool, seen = Batch(1, 1), Pool(), {}
    monkeypatch.setattr(adapter, "fused_recurrent_kda", lambda *x, **given: seen.update(given, x=x))
    kernel.packed_decode(
        batch.mixed, batch.a[0], batch.b[0], scale=1.0, ssm_states=pool.states, cache_indices=ints([1, 2]),
        num_v_heads=HV, head_v_dim=V, **batch.gate,
    )  # fmt: skip
    owners = [x.untyped_storage().data_ptr() for x in (*[batch.mixed] * 3, batch.a, batch.b)]
    assert [x.untyped_storage().data_ptr() for x in seen["x"]] == owners
    assert seen["initial_state"] is pool.states
