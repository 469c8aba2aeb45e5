"""The layer `kda_core.nn.KimiDeltaAttention`: against a computation from the published formulas in fp64, decoding, packed and padded
batches, dtypes, torch.compile, and errors. `tests/sm90/test_sm90_layer.py` compares it with FLA's layer on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from kda_core.errors import ArgumentError, ShapeError
from kda_core.nn import Cache, KimiDeltaAttention
from kda_core.registry import record_calls

SIZES = {"hidden_size": 12, "head_dim": 8, "num_heads": 2, "layer_idx": 0}
OPTIONS = {
    "default": {},
    "value heads": {"num_v_heads": 4, "expand_v": 1.5, "conv_bias": True},
    "bounded gate": {"safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True, "conv_size": 3},
    "lower bound alone": {"lower_bound": -8.0},
    "no convolution": {"use_short_conv": False},
}
ALL = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
DECODERS = pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
LENGTHS = (5, 0, 1, 11)

# Names and shapes in the state_dict of FLA 0.6.0's layer, printed by
#   KimiDeltaAttention(hidden_size=12, head_dim=8, num_heads=2, **options).state_dict()
STATE_DICTS = {
    "default": {
        "A_log": (2,), "dt_bias": (16,), "q_proj.weight": (16, 12), "k_proj.weight": (16, 12), "v_proj.weight": (16, 12),
        "q_conv1d.weight": (16, 1, 4), "k_conv1d.weight": (16, 1, 4), "v_conv1d.weight": (16, 1, 4),
        "f_proj.0.weight": (8, 12), "f_proj.1.weight": (16, 8), "b_proj.weight": (2, 12),
        "g_proj.0.weight": (8, 12), "g_proj.1.weight": (16, 8), "g_proj.1.bias": (16,),
        "o_norm.weight": (8,), "o_proj.weight": (12, 16),
    },
    "value heads": {
        "A_log": (4,), "dt_bias": (32,), "q_proj.weight": (16, 12), "k_proj.weight": (16, 12), "v_proj.weight": (48, 12),
        "q_conv1d.weight": (16, 1, 4), "q_conv1d.bias": (16,), "k_conv1d.weight": (16, 1, 4), "k_conv1d.bias": (16,),
        "v_conv1d.weight": (48, 1, 4), "v_conv1d.bias": (48,),
        "f_proj.0.weight": (12, 12), "f_proj.1.weight": (32, 12), "b_proj.weight": (4, 12),
        "g_proj.0.weight": (12, 12), "g_proj.1.weight": (48, 12), "g_proj.1.bias": (48,),
        "o_norm.weight": (12,), "o_proj.weight": (12, 48),
    },
    "no convolution": {
        "A_log": (2,), "dt_bias": (16,), "q_proj.weight": (16, 12), "k_proj.weight": (16, 12), "v_proj.weight": (16, 12),
        "f_proj.0.weight": (8, 12), "f_proj.1.weight": (16, 8), "b_proj.weight": (2, 12),
        "g_proj.0.weight": (8, 12), "g_proj.1.weight": (16, 8), "g_proj.1.bias": (16,),
        "o_norm.weight": (8,), "o_proj.weight": (12, 16),
    },
}  # fmt: skip


def layer(dtype=torch.float64, **options):
    """Returns a small layer whose parameters are all random: the norm's weight of a new layer is 1, A_log may be 0."""
    torch.manual_seed(0)
    made = KimiDeltaAttention(**SIZES | options)
    with torch.no_grad():
        made.o_norm.weight.uniform_(0.5, 2)
        made.A_log.uniform_(-1, 1)
    return made.to(dtype)


def tokens(*lengths, dtype=torch.float64):
    rng = torch.Generator().manual_seed(len(lengths))
    shape = (len(lengths), lengths[0]) if len(set(lengths)) == 1 else (1, sum(lengths))
    return torch.randn(*shape, SIZES["hidden_size"], generator=rng, dtype=torch.float64).to(dtype)


def full(T=4):
    cache = Cache()
    layer()(tokens(T, T), past_key_values=cache, use_cache=True)
    return cache


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def served_in(entry):
    return [("reference", entry, "cpu")]


def ran(calls):
    return [(c.backend, c.entry, c.device_type) for c in calls]


def formulas(module, x, options):
    """The output of one sequence `x` [T, hidden_size], token by token and head by head, from the formulas of Kimi Linear's report
    (arXiv:2510.26692) and of the docstring. Uses nothing of the module but its parameters."""
    p = dict(module.named_parameters())
    H, K = SIZES["num_heads"], SIZES["head_dim"]
    HV, V = options.get("num_v_heads", H), int(K * options.get("expand_v", 1))

    def tap(name):
        y = x @ p[f"{name}_proj.weight"].T
        if options.get("use_short_conv", True):
            weight = p[f"{name}_conv1d.weight"][:, 0]  # [D, W], the last tap is the current token's
            W = weight.shape[1]
            past = torch.cat([y.new_zeros(W - 1, y.shape[1]), y])
            y = torch.stack([(past[t : t + W] * weight.T).sum(0) for t in range(len(x))])
            y = y + p.get(f"{name}_conv1d.bias", 0.0)
        return y * torch.sigmoid(y)

    q, k, v = tap("q").view(-1, H, K), tap("k").view(-1, H, K), tap("v").view(-1, HV, V)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    rate = p["A_log"].exp().view(HV, 1)
    raw = (x @ p["f_proj.0.weight"].T @ p["f_proj.1.weight"].T + p["dt_bias"]).view(-1, HV, K)
    if (bound := options.get("lower_bound")) is None:
        g = -rate * torch.log1p(raw.exp())
    else:
        g = bound / (1 + torch.exp(-rate * raw))
    beta = 1 / (1 + torch.exp(-(x @ p["b_proj.weight"].T)))
    beta = beta * (2 if options.get("allow_neg_eigval") else 1)
    heads = []
    for h in range(HV):
        i, S, rows = h // (HV // H), x.new_zeros(K, V), []
        for t in range(len(x)):
            S = g[t, h].exp()[:, None] * S
            S = S + beta[t, h] * torch.outer(k[t, i], v[t, h] - k[t, i] @ S)
            rows.append(K**-0.5 * q[t, i] @ S)
        heads.append(torch.stack(rows))
    o = torch.stack(heads, dim=1)  # [T, HV, V]
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["o_norm.weight"]
    gate = x @ p["g_proj.0.weight"].T @ p["g_proj.1.weight"].T + p["g_proj.1.bias"]
    return (o * torch.sigmoid(gate.view(-1, HV, V))).flatten(1) @ p["o_proj.weight"].T


# ---- weights


@pytest.mark.parametrize("name", STATE_DICTS)
def test_the_state_dict_has_the_names_and_shapes_of_flas_layer(name):
    module = KimiDeltaAttention(**SIZES | OPTIONS[name])
    found = module.state_dict()
    assert {key: tuple(x.shape) for key, x in found.items()} == STATE_DICTS[name]
    assert all(x.dtype == torch.float32 for x in found.values())
    module.load_state_dict({key: torch.zeros(shape) for key, shape in STATE_DICTS[name].items()}, strict=True)
    assert all(not x.any() for x in module.parameters())


def test_a_new_layer_starts_in_the_published_ranges():
    torch.manual_seed(0)
    module = KimiDeltaAttention(hidden_size=64, head_dim=32, num_heads=64)
    rate, dt = module.A_log.exp(), F.softplus(module.dt_bias)
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16
    assert 0.00099 < dt.min() < 0.0011 and 0.09 < dt.max() < 0.101
    bounded = KimiDeltaAttention(**SIZES | {"safe_gate": True, "lower_bound": -5.0})
    assert not bounded.A_log.any()
    assert module.A_log._no_weight_decay and module.dt_bias._no_weight_decay


# ---- values


@ALL
def test_the_layer_and_its_gradients_are_those_of_the_formulas(options):
    module, x = layer(**options), tokens(9, 9).requires_grad_()
    inputs = [x, *module.parameters()]
    with record_calls() as calls:
        y, weights, cache = module(x)
        seed = torch.randn_like(y)
        grads = torch.autograd.grad((y * seed).sum(), inputs)
    assert weights is None and cache is None
    assert ran(calls) == served_in("chunk_fwd") + served_in("chunk_bwd")
    want = torch.stack([formulas(module, row, options) for row in x])
    torch.testing.assert_close(y, want, rtol=1e-9, atol=1e-12)
    for got, exact in zip(grads, torch.autograd.grad((want * seed).sum(), inputs), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-7, atol=1e-10)


@ALL
def test_packed_sequences_are_those_of_single_calls(options):
    module, x = layer(**options), tokens(*LENGTHS)
    packed = x.clone().requires_grad_()
    y = module(packed, cu_seqlens=offsets(LENGTHS).int(), cu_seqlens_cpu=offsets(LENGTHS).int())[0]
    assert y.shape == x.shape
    (gradient,) = torch.autograd.grad(y.square().sum(), packed)
    for row, got, grad in zip(*(z.split(LENGTHS, dim=1) for z in (x, y, gradient)), strict=True):
        alone = row.clone().requires_grad_()
        if row.shape[1]:
            want = module(alone)[0]
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(grad, torch.autograd.grad(want.square().sum(), alone)[0])


MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]],
    "inside": [[0, 1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 1, 0, 1]],
    "a whole row": [[0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 1]],
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padding_changes_no_result_and_has_none(mask, dtype):
    module, x, mask = layer(), tokens(7, 7).requires_grad_(), torch.tensor(mask).to(dtype)
    cache = Cache()
    y = module(x, attention_mask=mask, past_key_values=cache, use_cache=True)[0]
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    for b, real in enumerate(mask.bool()):
        assert not y[b, ~real].any() and not gradient[b, ~real].any()
        if real.any():
            alone = Cache()
            want = module(x[b : b + 1, real], past_key_values=alone, use_cache=True)[0]
            torch.testing.assert_close(y[b, real], want[0], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(cache[0]["recurrent_state"][b], alone[0]["recurrent_state"][0])
            for got, exact in zip(cache[0]["conv_state"], alone[0]["conv_state"], strict=True):
                torch.testing.assert_close(got[b], exact[0])
        else:
            assert not cache[0]["recurrent_state"][b].any() and not cache[0]["conv_state"][0][b].any()


@pytest.mark.parametrize("more", [{}, {"attention_mask": torch.ones(2, 5)}], ids=["plain", "mask"])
def test_a_call_without_tokens_returns_none_and_keeps_the_states(more):
    module, cache = layer(), full()
    before = cache[0]["recurrent_state"].clone()
    y = module(tokens(4, 4)[:, :0], past_key_values=cache, use_cache=True, **more)[0]
    assert y.shape == (2, 0, 12) and torch.equal(cache[0]["recurrent_state"], before)


def test_a_mask_of_ones_changes_nothing():
    module, x = layer(), tokens(7, 7)
    torch.testing.assert_close(module(x, torch.ones(2, 7))[0], module(x)[0], rtol=1e-12, atol=1e-13)


def test_later_tokens_change_no_bit_of_earlier_outputs():
    module, x = layer(torch.float32), tokens(70, 70, dtype=torch.float32)
    changed = x.clone()
    changed[:, 40:] *= -3
    a, b = (module(z)[0] for z in (x, changed))
    assert torch.equal(a[:, :40], b[:, :40]) and not torch.equal(a[:, 40:], b[:, 40:])


# ---- decoding


@DECODERS
@ALL
def test_decoding_with_a_cache_continues_a_prefill(options, mode):
    module, x = layer(**options), tokens(13, 13)
    whole = module(x)[0]
    module.mode, cache = mode, Cache()
    with torch.inference_mode():
        outputs = []
        for part in x.split([6, 1, 2, 1, 1, 2], dim=1):  # also parts that are shorter than the convolution
            with record_calls() as calls:
                y, _, same = module(part, past_key_values=cache, use_cache=True)
            assert same is cache
            decodes = mode == "fused_recurrent" or part.shape[1] == 1
            assert ran(calls) == served_in("recurrent_fwd" if decodes else "chunk_fwd")
            outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-8, atol=1e-11)
    assert len(cache) == 1 and cache.get_seq_length() == 13


def test_decoding_in_bf16_continues_a_prefill():
    module, x = layer(torch.bfloat16, head_dim=32), tokens(40, 40, dtype=torch.bfloat16)
    cache = Cache()
    with torch.inference_mode():
        whole = module(x)[0]
        parts = [module(p, past_key_values=cache, use_cache=True)[0] for p in x.split([30] + [1] * 10, dim=1)]
    assert cache[0]["recurrent_state"].dtype == torch.float32
    assert all(state.dtype == torch.bfloat16 for state in cache[0]["conv_state"])
    joined = torch.cat(parts, dim=1).float()
    assert (joined - whole.float()).norm() <= 1e-2 * whole.float().norm()


def test_decoding_of_packed_sequences_keeps_a_state_for_each():
    module, x = layer(), tokens(*LENGTHS)
    more = tokens(*[2] * len(LENGTHS))
    cache = Cache()
    module(x, past_key_values=cache, use_cache=True, cu_seqlens=offsets(LENGTHS))
    y = module(more, past_key_values=cache, use_cache=True)[0]  # now a batch of four
    for n, row in enumerate(x.split(LENGTHS, dim=1)):
        want = module(torch.cat([row, more[n : n + 1]], dim=1))[0][0, -2:]
        torch.testing.assert_close(y[n], want, rtol=1e-8, atol=1e-11)


def test_decoding_takes_a_mask_of_all_tokens_so_far():
    module, x = layer(), tokens(7, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])
    cache = Cache()
    module(x[:, :5], mask[:, :5], past_key_values=cache, use_cache=True)
    y = torch.cat([module(x[:, t : t + 1], mask[:, : t + 1], cache, True)[0] for t in (5, 6)], dim=1)
    torch.testing.assert_close(y, module(x, mask)[0][:, 5:], rtol=1e-8, atol=1e-11)


def test_a_call_without_use_cache_reads_the_states_and_keeps_them():
    module, x = layer(), tokens(7, 7)
    cache = Cache()
    module(x[:, :5], past_key_values=cache, use_cache=True)
    before = {name: cache[0][name] for name in ("recurrent_state", "conv_state")}
    copies = [cache[0]["recurrent_state"].clone(), *(state.clone() for state in cache[0]["conv_state"])]
    first, second = (module(x[:, 5:], past_key_values=cache)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(cache[0][name] is states for name, states in before.items())
    now = [cache[0]["recurrent_state"], *cache[0]["conv_state"]]
    assert all(torch.equal(a, b) for a, b in zip(now, copies, strict=True))
    assert cache.get_seq_length() == 5


def test_layers_share_a_cache():
    torch.manual_seed(0)
    layers = [KimiDeltaAttention(**SIZES | {"layer_idx": i}).double() for i in (3, 1)]
    cache, x = Cache(), tokens(6, 6)
    for part in x.split([4, 2], dim=1):
        outputs = [module(part, past_key_values=cache, use_cache=True)[0] for module in layers]
    for module, y in zip(layers, outputs, strict=True):
        torch.testing.assert_close(y, module(x)[0][:, 4:], rtol=1e-8, atol=1e-11)
    assert len(cache) == 4 and cache[0] is None and cache[2] is None
    assert cache.get_seq_length(3) == 6 and cache.get_seq_length(2) == 0


def test_gradients_flow_through_a_cache():
    module, x = layer(), tokens(7, 7).requires_grad_()
    cache = Cache()
    parts = [module(part, past_key_values=cache, use_cache=True)[0] for part in x.split([4, 3], dim=1)]
    (got,) = torch.autograd.grad(torch.cat(parts, dim=1).square().sum(), x)
    (want,) = torch.autograd.grad(module(x)[0].square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-10)


# ---- dtypes and torch.compile


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def test_weights_in_bf16_and_autocast_to_bf16_stay_close_to_fp64():
    exact, x = layer(head_dim=32), tokens(40, 40)
    want = exact(x)[0]
    cast = layer(torch.bfloat16, head_dim=32)
    y = cast(x.bfloat16())[0]
    assert y.dtype == torch.bfloat16 and relative(y, want) < 2e-2
    single = layer(torch.float32, head_dim=32)
    assert relative(single(x.float())[0], want) < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        y = single(x.float())[0]
    assert y.dtype == torch.bfloat16 and relative(y, want) < 2e-2
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in single.parameters())


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_one_graph_contains_the_whole_layer(packed):
    torch._dynamo.reset()
    module, x = layer(torch.float32), tokens(8, 8, dtype=torch.float32)
    more = {"cu_seqlens": torch.tensor([0, 3, 8])} if packed else {}
    x = (x[:1] if packed else x).requires_grad_()

    def step(x):
        cache = Cache()
        y = module(x, past_key_values=cache, use_cache=True, **more)[0]
        return y, cache[0]["recurrent_state"]

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        y, state = function(x)
        results.append((y, state, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


# ---- refused


BUILD = {
    "num_heads": ({"num_heads": 0}, "num_heads: expected at least 1, got 0"),
    "mode": ({"mode": "chunked"}, "mode: expected 'chunk' or 'fused_recurrent', got 'chunked'"),
    "expand_v": ({"expand_v": 1.2}, "expand_v: expected a ratio with an integer head_dim \\* expand_v"),
    "num_v_heads": ({"num_v_heads": 3}, "num_v_heads: expected a multiple of num_heads=2, got 3"),
    "fewer value heads": ({"num_v_heads": 1}, "num_v_heads: expected a multiple of num_heads=2, got 1"),
    "lower_bound": ({"lower_bound": 0.0}, "lower_bound: expected a number below 0 or None, got 0.0"),
    "safe_gate": ({"safe_gate": True}, r"lower_bound: expected a number in \[-5, 0\) with safe_gate=True, got None"),
    "safe_gate, too low": ({"safe_gate": True, "lower_bound": -6.0}, "lower_bound: expected .*, got -6.0"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BUILD.values(), ids=BUILD)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ArgumentError, match=message):
        KimiDeltaAttention(**SIZES | options)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="use_output_gate"):
        KimiDeltaAttention(**SIZES, use_output_gate=True)


X = tokens(4, 4)
CALLS = {
    "width": ({"hidden_states": X[..., :3]}, ShapeError, r"hidden_states: expected \[B, T, hidden_size=12\]"),
    "two dimensions": ({"hidden_states": X[0]}, ShapeError, "hidden_states: expected"),
    "mask of attention": ({"attention_mask": torch.ones(2, 4, 4)}, ShapeError, r"attention_mask: expected \[B=2"),
    "short mask": ({"attention_mask": torch.ones(2, 3)}, ShapeError, "attention_mask: expected .* at least T=4"),
    "mask and offsets": (
        {"hidden_states": X[:1], "attention_mask": torch.ones(1, 4), "cu_seqlens": offsets([4])},
        ArgumentError, "attention_mask: expected None with cu_seqlens",
    ),
    "offsets of a batch": ({"cu_seqlens": offsets([4])}, ShapeError, "hidden_states: expected B=1 with cu_seqlens, got B=2"),
    "offsets in two dimensions": (
        {"hidden_states": X[:1], "cu_seqlens": offsets([4])[None]}, ShapeError, r"cu_seqlens: expected \[N\+1\]",
    ),
    "offsets that end early": (
        {"hidden_states": X[:1], "cu_seqlens": offsets([3])}, ArgumentError, "cu_seqlens: expected a last value of T=4, got 3",
    ),
    "offsets that end late": (
        {"hidden_states": X[:1], "cu_seqlens": offsets([9])}, ArgumentError, "cu_seqlens: expected a last value of T=4, got 9",
    ),
    "offsets that decrease": (
        {"hidden_states": X[:1], "cu_seqlens": torch.tensor([0, 3, 1, 4])}, ArgumentError, "cu_seqlens: expected values that",
    ),
    "no cache": ({"use_cache": True}, ArgumentError, "past_key_values: expected a cache with use_cache=True, got None"),
    "no class of caches": ({"past_key_values": {}}, ArgumentError, "past_key_values: expected a Cache or None, got dict"),
    "attention weights": ({"output_attentions": True}, ArgumentError, "output_attentions: expected False"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "message"), CALLS.values(), ids=CALLS)
def test_a_wrong_argument_is_named(arguments, kind, message):
    with pytest.raises(kind, match=message):
        layer()(**{"hidden_states": X} | arguments)


def test_lengths_in_host_memory_are_of_no_use_token_by_token():
    with pytest.raises(ArgumentError, match="cu_seqlens_cpu: expected None with mode='fused_recurrent'"):
        layer(mode="fused_recurrent")(X[:1], cu_seqlens=offsets([4]), cu_seqlens_cpu=offsets([4]))


def test_a_cache_of_another_batch_is_refused():
    with pytest.raises(ShapeError, match=r"cache: expected \[N, D, W\] = \[1, 16, 4\], got \[2, 16, 4\]"):
        layer()(X[:1], past_key_values=full())


def test_a_cache_needs_the_index_of_the_layer():
    with pytest.raises(ArgumentError, match="layer_idx: expected the index of the layer"):
        layer(layer_idx=None)(X, past_key_values=Cache())


def test_the_backend_that_the_layer_names_serves_its_calls(install):
    install("usual", priority=2)
    install("named", priority=1)
    for mode, entry in (("chunk", "chunk_fwd"), ("fused_recurrent", "recurrent_fwd")):
        with record_calls() as calls, torch.no_grad():
            layer(torch.float32, backend="named", mode=mode)(X.float())
        assert ran(calls) == [("named", entry, "cpu")]
