"""The variants that are compiled without a GPU in the tests: each form of the gate, with and without
the vote, both chunk sizes, packed and not."""

from __future__ import annotations

from kda_sm90.config import PrepareConfig

PREPARE = (
    PrepareConfig(),
    PrepareConfig(chunk=32),
    PrepareConfig(gate="softplus", vote=True),
    PrepareConfig(chunk=32, gate="softplus", vote=True, offsets="int64"),
    PrepareConfig(
        gate="precomputed", a_log=False, dt_bias=False, gate_dtype="float32", vote=True, offsets="int32"
    ),
    PrepareConfig(beta_sigmoid=False, beta_dtype="float32", l2norm=False, vote=True, a_log=False),
)
