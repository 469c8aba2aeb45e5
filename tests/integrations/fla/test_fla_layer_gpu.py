"""FLA's layer on a Hopper GPU: with kda-sm90 behind its calls, it agrees with the layer on FLA's own kernels."""

import warnings

import pytest
import torch
from helpers.real_fla import integration
from helpers.untuned import untuned

from kda_core.registry import record_calls

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    layers = pytest.importorskip("fla.layers", reason="flash-linear-attention is not installed")
    from fla.models.utils import Cache

pytestmark = pytest.mark.arch((9, 0))


@pytest.fixture(scope="module", autouse=True)
def untuned_kernels():
    with untuned():
        yield


@pytest.fixture
def layer():
    torch.manual_seed(0)
    made = layers.KimiDeltaAttention(hidden_size=512, head_dim=128, num_heads=4, layer_idx=0)
    return made.cuda().bfloat16()


def twice(monkeypatch, function, *entries):
    """Returns the results of `function` with kda-core and with FLA's kernels, and asserts which backend ran."""
    results = []
    for switch, expected in (("1", [("sm90", entry) for entry in entries]), ("0", [])):
        monkeypatch.setenv("FLA_KDA_CORE", switch)
        with record_calls() as calls:
            results.append(function())
        assert [(c.backend, c.entry) for c in calls] == expected
    return results


def close(found, wanted, limit):
    for name, a in found.items():
        b = wanted[name].double()
        assert (a.double() - b).norm() <= limit * b.norm(), name


def test_fla_asks_kda_core():
    assert integration.undispatched() == ()


@pytest.mark.parametrize("cu_seqlens", [None, (0, 100, 228, 1000)], ids=("fixed", "packed"))
def test_a_training_step(layer, monkeypatch, cu_seqlens):
    x = torch.randn(1, 1000, 512, device="cuda").bfloat16()
    more = {} if cu_seqlens is None else {"cu_seqlens": torch.tensor(cu_seqlens, device="cuda")}

    def step():
        layer.zero_grad()
        y = layer(x, **more)[0]
        y.float().square().mean().backward()
        return {"y": y.detach()} | {n: p.grad.clone() for n, p in layer.named_parameters()}

    ours, theirs = twice(monkeypatch, step, "chunk_fwd", "chunk_bwd")
    close({"y": ours.pop("y")}, theirs, 2e-2)
    sums = {n: ours.pop(n) for n in ("A_log", "dt_bias")}  # over all tokens, with cancellation
    close(ours, theirs, 5e-2)
    close(sums, theirs, 1e-1)


def test_a_prompt_and_decoding(layer, monkeypatch):
    layer.eval()
    x = torch.randn(2, 303, 512, device="cuda").bfloat16()

    def generate():
        cache = Cache()
        parts = x.split([300, 1, 1, 1], 1)
        y = torch.cat([layer(part, past_key_values=cache, use_cache=True)[0] for part in parts], 1)
        return {"y": y, "state": cache[0]["recurrent_state"]}

    with torch.inference_mode():
        ours, theirs = twice(monkeypatch, generate, "chunk_fwd", *["recurrent_fwd"] * 3)
    close(ours, theirs, 2e-2)
