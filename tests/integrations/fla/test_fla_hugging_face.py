"""Hugging Face's Kimi Linear finds FLA's functions by itself, so it runs on the backends of kda-core. On a CPU."""

import warnings
from collections import Counter

import pytest
import torch
from helpers.real_fla import interpreted

from kda_core.registry import record_calls

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")


pytestmark = interpreted


@pytest.fixture(scope="module")
def model():
    """A model with a layer of KDA and one of full attention."""
    torch.manual_seed(0)
    config = transformers.KimiLinearConfig(
        pad_token_id=0, bos_token_id=1, eos_token_id=None, vocab_size=128, hidden_size=64, intermediate_size=128,
        moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, linear_head_dim=32,
        linear_num_heads=2, num_local_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=16,
        q_lora_rank=None, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16,
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture
def ids():
    return torch.randint(3, 128, (2, 37), generator=torch.Generator().manual_seed(0))


def counted(calls):
    assert {c.backend for c in calls} == {"reference"}
    return Counter(c.entry for c in calls)


def test_generation(model, ids):
    model.eval()
    with torch.no_grad(), record_calls() as calls:
        found = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert counted(calls) == {"chunk_fwd": 1, "recurrent_fwd": 5}
    with torch.no_grad():  # each token from the whole text before it
        wanted = ids
        for _ in range(6):
            wanted = torch.cat([wanted, model(wanted).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, wanted)


def test_a_training_step_has_the_loss_and_gradients_of_transformers_own_code(model, ids, monkeypatch):
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    model.train()
    results = []
    for functions in ({}, {"chunk_kimi_delta_attention": modeling.chunk_kimi_delta_attention.__wrapped__}):
        for name, function in functions.items():
            monkeypatch.setattr(modeling, name, function)
        model.zero_grad()
        with record_calls() as calls:
            loss = model(ids, labels=ids).loss
            loss.backward()
        assert [c.entry for c in calls] == ([] if functions else ["chunk_fwd", "chunk_bwd"])
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
