"""The configuration of the kernel that verifies drafts, and the choice of it."""

from dataclasses import replace

import pytest
import torch
from helpers.support import problem_shape

from kda_core.contract import JournalShape, PoolShape
from kda_cute.verify import VerifyConfig, verify_config


def shape(T, *, N=3, v_first=True, spans=True, dtype=torch.float32):
    call = problem_shape((9, 0), B=N, T=T, HV=2, H=1, recurrent=True, state_v_first=v_first)
    journal = JournalShape(rows=16, length=8, has_spans=spans)
    return replace(call, pool=PoolShape(dtype, torch.int32, True), journal=journal)


@pytest.mark.parametrize("tokens", (1, 3, 16))
def test_a_config_without_a_kernel_raises_an_error(tokens):
    with pytest.raises(ValueError, match=f"tokens: expected one of .*, got {tokens}"):
        VerifyConfig(tokens)


@pytest.mark.parametrize(("T", "tokens"), ((2, 4), (4, 4), (5, 8), (8, 8)))
@pytest.mark.parametrize("N", (1, 1000))
@pytest.mark.parametrize("spans", (False, True))
def test_the_variant_follows_tokens_and_records_and_not_the_batch(T, tokens, N, spans):
    assert verify_config(shape(T, N=N, spans=spans)) == VerifyConfig(tokens, spans)


def test_the_variant_follows_the_dtype_of_the_pool():
    assert verify_config(shape(8, dtype=torch.bfloat16)) == VerifyConfig(8, True, state_dtype="bfloat16")


@pytest.mark.parametrize(("T", "v_first"), ((0, True), (1, True), (9, True), (4, False)))
def test_other_calls_have_no_variant(T, v_first):
    assert verify_config(shape(T, v_first=v_first)) is None
