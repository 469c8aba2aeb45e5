"""The variants that are compiled without a GPU in the tests and by ``nox -s compile``: each form of the gate, with
and without the vote, both chunk sizes, both numbers of warpgroups, packed and not, all states and none."""

from __future__ import annotations

from typing import Any

from kda_sm90.config import ChainConfig, PrepareConfig

_PREPARE: tuple[dict[str, Any], ...] = (
    {},
    {"vote": True, "offsets": "int32"},
    {"gate": "softplus", "vote": True, "offsets": "int64"},
    {"gate": "precomputed", "a_log": False, "dt_bias": False, "gate_dtype": "float32", "vote": True},
    {"gate": "precomputed", "a_log": False, "dt_bias": False, "offsets": "int32"},
    {"beta_sigmoid": False, "beta_dtype": "float32", "l2norm": False, "vote": True, "a_log": False},
)
_CHAIN: tuple[dict[str, Any], ...] = (
    {},
    {"final_state": False, "offsets": "int64"},
    {"initial_state": True, "states": 64, "offsets": "int32"},
    {"initial_state": True, "states": 64, "v_first": True},
)

PREPARE = tuple(PrepareConfig(chunk=chunk, **kind) for chunk in (32, 64) for kind in _PREPARE)
CHAIN = tuple(
    ChainConfig(chunk=chunk, warpgroups=n, **kind) for chunk in (32, 64) for n in (1, 2) for kind in _CHAIN
)


def kernels() -> list[tuple[type, object]]:
    """(kernel class, configuration) of all of them; imports the DSL."""
    from kda_sm90.kernels.chain import ChainKernel
    from kda_sm90.kernels.prepare import PrepareKernel

    return [(PrepareKernel, config) for config in PREPARE] + [(ChainKernel, config) for config in CHAIN]
