"""The set that ``python -m kda_core precompile`` compiles, and the calls that it serves."""

from dataclasses import fields, is_dataclass

import pytest
import torch
from test_plan import shape

from kda_core.cute.key import Variant
from kda_sm90.plan import plan
from kda_sm90.variants import common_shapes

BF16, FP32 = torch.bfloat16, torch.float32


def configs(chosen):
    """The kernel configurations of a plan, whatever kernels it has."""
    return {value for f in fields(chosen) if is_dataclass(value := getattr(chosen, f.name))}


@pytest.fixture(scope="module")
def served():
    """The configurations of all `common_shapes`."""
    return frozenset().union(*(configs(plan(s)) for s in common_shapes()))


def test_the_set_is_of_valid_variants_and_compiles_in_minutes(served):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the kernel classes import it")
    from kda_sm90.variants import ahead_of_time

    offered = ahead_of_time("sm_90a")
    variants = {Variant(kernel, config, "sm_90a") for kernel, config in offered}  # refuses what is not valid
    assert len(variants) == len(offered) <= 500
    assert {config for _, config in offered} == served


GATES = {
    "bounded": {},
    "softplus": {"lower_bound": None},
    "precomputed": {"use_gate_in_kernel": False, "lower_bound": None, "A_log": False, "dt_bias": False},
}
PRECOMPUTED = GATES["precomputed"]


@pytest.mark.parametrize(
    "call",
    [
        # FLA's layer: raw gate and logits of beta, everything in the kernel
        {"T": 8192, "H": 64, "HV": 64, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
        {"B": 8, "T": 2048, "H": 32, "HV": 32, "use_qk_l2norm_in_kernel": True, **GATES["softplus"]},
        # a serving engine: packed sequences in int32 or int64, states in and out
        {"T": 20000, "N": 13, "H": 32, "HV": 32, "index": torch.int32, "initial": True,
         "output_final_state": True, "use_qk_l2norm_in_kernel": True, "beta": FP32, "g": FP32, **PRECOMPUTED},
        {"T": 999, "N": 40, "H": 8, "HV": 16, "index": torch.int64, "initial": True, "output_final_state": True,
         "state_v_first": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
        # all computed before
        {"T": 65536, "H": 96, "HV": 96, **PRECOMPUTED, "safe_gate": True},
        {"B": 3, "T": 5, "H": 1, "HV": 1, "output_final_state": True, "beta": FP32, **PRECOMPUTED},
        {"T": 4096, "pin": True, "H": 64, "HV": 64, "initial": True},
    ],
)  # fmt: skip
def test_typical_calls_are_served(served, call):
    assert configs(plan(shape(**call))) <= served


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("pin", (False, True))
def test_every_size_is_served(served, gate, pin):
    """Also sizes that `common_shapes` does not try."""
    for heads in range(1, 130):
        for B in (1, 2, 3, 8, 100):
            for T in (1, 100, 5000, 10**6):
                assert configs(plan(shape(B=B, T=T, H=heads, HV=heads, pin=pin, **GATES[gate]))) <= served


def test_rare_options_are_left_to_the_first_use(served):
    for rare in (
        {"return_intermediate_states": True},
        {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": True},
        {"lower_bound": -8.0},
    ):
        assert not configs(plan(shape(**rare))) <= served
