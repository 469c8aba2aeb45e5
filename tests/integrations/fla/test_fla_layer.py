"""FLA's layer on the backends of kda-core. On a CPU its convolution and norm run in Triton's interpreter."""

import warnings

import pytest
import torch
from helpers.real_fla import interpreted
from helpers.untuned import untuned

from kda_core import nn
from kda_core.registry import record_calls

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    layers = pytest.importorskip("fla.layers", reason="flash-linear-attention is not installed")
    from fla.models.utils import Cache


pytestmark = interpreted


@pytest.fixture(scope="module", autouse=True)
def untuned_kernels():
    with untuned():
        yield


def layer_of(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "head_dim": 16, "num_heads": 2, "layer_idx": 0}
    return layers.KimiDeltaAttention(**sizes | changes)


def entries(calls):
    assert {c.backend for c in calls} <= {"reference"}
    return [c.entry for c in calls]


CONFIGURATIONS = {
    "default": {},
    "grouped heads": {"num_v_heads": 4},
    "bounded gate": {"safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_training_step_equals_that_of_the_layer_of_kda_core(name):
    layer = layer_of(**CONFIGURATIONS[name])
    mine = nn.KimiDeltaAttention(32, head_dim=16, num_heads=2, layer_idx=0, **CONFIGURATIONS[name])
    mine.load_state_dict(layer.state_dict())
    x = torch.randn(2, 21, 32)
    results = []
    for module in (layer, mine):
        module.zero_grad()
        with record_calls() as calls:
            y = module(x)[0]
            y.square().sum().backward()
        assert entries(calls) == ["chunk_fwd", "chunk_bwd"]
        results.append([y, *(p.grad for _, p in sorted(module.named_parameters()))])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_layer_chooses_decoding_for_short_inputs_and_continues_from_a_cache():
    layer, x = layer_of().eval(), torch.randn(2, 24, 32)
    cache = Cache()
    with torch.no_grad(), record_calls() as calls:
        whole = layer(x)[0]
        parts = [layer(part, past_key_values=cache, use_cache=True)[0] for part in x.split([21, 1, 2], 1)]
    assert entries(calls) == ["recurrent_fwd"] * 4
    assert cache[0]["recurrent_state"].shape == (2, 2, 16, 16)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_padding_is_packed():
    layer, x = layer_of().eval(), torch.randn(2, 70, 32)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, :13] = 0
    with torch.no_grad(), record_calls() as calls:
        y = layer(x, attention_mask=mask)[0]
        alone = layer(x[:1, 13:])[0]
    assert entries(calls) == ["chunk_fwd", "recurrent_fwd"]
    torch.testing.assert_close(y[:1, 13:], alone, rtol=1e-4, atol=1e-5)
