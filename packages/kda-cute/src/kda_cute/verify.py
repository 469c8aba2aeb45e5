"""Verification of drafts on a GPU: the configuration of the kernel `kda_cute.device.verify`, and the choice of it.

`kda_cute.journal` launches it. Importing this needs torch, but not the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from kda_core.contract import ProblemShape
from kda_cute.host import DTYPES, gate_of
from kda_cute.records import Gate, GateDtype, StateDtype

#: Tokens of a variant. A call of fewer tokens, from 2 on, is computed by the next larger one.
TOKENS = (4, 8)


@dataclass(frozen=True)
class VerifyConfig:
    """Variant of the kernel.

    Attributes:
        tokens: most tokens of a call, one of `TOKENS`.
        records: whether slots may have records. Without them the states of a bf16 pool stay in bf16, and nothing folds.
        gate: form of the gate.
        gate_dtype: dtype of g.
        state_dtype: dtype of the pool.

    Raises:
        ValueError: the kernel has no such variant.
    """

    tokens: int = 8
    records: bool = False
    gate: Gate = "bounded"
    gate_dtype: GateDtype = "bfloat16"
    state_dtype: StateDtype = "float32"

    def __post_init__(self) -> None:
        if self.tokens not in TOKENS:
            raise ValueError(f"tokens: expected one of {TOKENS}, got {self.tokens}")

    @property
    def unbounded(self) -> bool:
        """As `kda_cute.device.intra_chunk.gates.Gate` needs it. Every log decay is clamped, because records have their sum."""
        return True


#: All variants.
VERIFIES = tuple(
    VerifyConfig(tokens, records, gate, gate_dtype, state_dtype)
    for tokens in TOKENS
    for records in (False, True)
    for gate in ("bounded", "softplus", "precomputed")
    for gate_dtype in ("bfloat16", "float32")
    for state_dtype in ("float32", "bfloat16")
)


def verify_config(shape: ProblemShape) -> VerifyConfig | None:
    """Returns the variant for a shape with a journal; None if `kda_cute.device.journal` computes it.

    That kernel has states [K, V], folds without tokens, single tokens, and more tokens than 8. The choice does not depend on the number of
    sequences, so neither do the bits of one.
    """
    pool, journal = shape.pool, shape.journal
    assert pool is not None and journal is not None
    if not shape.options.state_v_first or not 2 <= shape.T <= max(TOKENS):
        return None
    tokens = next(n for n in TOKENS if shape.T <= n)
    return VerifyConfig(tokens, journal.has_spans, gate_of(shape), DTYPES[shape.g_dtype], DTYPES[pool.dtype])
