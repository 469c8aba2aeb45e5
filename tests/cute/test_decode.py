"""The configuration of the decode kernel."""

from dataclasses import replace

import pytest
import torch
from helpers.support import problem_shape

from kda_core.contract import PoolShape
from kda_cute.decode import ROWS, DecodeConfig, decode_config


@pytest.mark.parametrize(
    ("rows", "v_first", "dtype"),
    ((8, True, "float32"), (128, True, "bfloat16"), (16, False, "float32")),
)
def test_a_config_without_a_kernel_raises_an_error(rows, v_first, dtype):
    with pytest.raises(ValueError, match=f"rows: expected one of .*, got {rows}"):
        DecodeConfig(rows, v_first, state_dtype=dtype)


@pytest.mark.parametrize("dtype", ROWS)
def test_a_cta_has_more_rows_if_there_are_many_states(dtype):
    rows = []
    for states in (ROWS[dtype].many_states - 1, ROWS[dtype].many_states):
        shape = problem_shape((9, 0), B=states, T=1, HV=1, H=1, recurrent=True, state_v_first=True)
        pool = PoolShape(getattr(torch, dtype), torch.int32, True)
        config = decode_config(replace(shape, pool=pool))
        assert config == DecodeConfig(config.rows, True, "bounded", "bfloat16", dtype)
        rows.append(config.rows)
    assert rows == [ROWS[dtype].few, ROWS[dtype].many]


@pytest.mark.parametrize("states", (1, 1000))
def test_the_number_of_k_first_states_does_not_change_the_rows(states):
    shape = problem_shape((9, 0), B=states, T=1, HV=1, H=1, recurrent=True, state_v_first=False)
    assert decode_config(shape) == DecodeConfig(32, False, "bounded", "bfloat16")


def test_the_variant_follows_gate_and_dtype():
    shape = problem_shape((9, 0), B=1, T=1, HV=1, H=1, g=torch.float32, lower_bound=None, recurrent=True)
    config = decode_config(shape)
    assert (config.gate, config.gate_dtype, config.unbounded) == ("softplus", "float32", True)


@pytest.mark.parametrize(("dtype", "name"), ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")))
def test_only_the_dtype_of_a_pool_changes_the_variant(dtype, name):
    shape = problem_shape((9, 0), B=2, T=1, recurrent=True, state_v_first=True)
    pools = [
        PoolShape(dtype, index, writes, per_token, mask, per_token)
        for index in (torch.int32, torch.int64)
        for writes in (False, True)
        for per_token in (False, True)
        for mask in (False, True)
    ]
    found = {decode_config(replace(shape, pool=pool)) for pool in pools}
    assert found == {replace(decode_config(shape), rows=ROWS[name].few, state_dtype=name)}
