"""The spec by which kda-core lists this backend. Importing the module needs neither a GPU nor the CuTe DSL."""

from kda_core import install
from kda_core.backend import BackendSpec

SPEC = BackendSpec(
    name="sm90",
    abi=(
        2,
        10,
    ),  # the ABI that this package was written for, which may differ from that of the installed kda-core
    archs=frozenset({(9, 0)}),
    features=frozenset(
        {
            "varlen",
            "gva",
            "initial_state",
            "final_state",
            "state_v_first",
            "gate_in_kernel",
            "unbounded_gate",
            "beta_sigmoid",
            "neg_eigval",
            "qk_l2norm",
            "intermediate_states",
            "pin",
            "graph",
            "backward",
            "saved_states",
            "recurrent",
            "state_pool",
            "bf16_pool",
            "token_states",
            "strided",
            "checkpoints",
            "journal",
            "segment_summary",
            "pool_segments",
        }
    ),
    target="kda_sm90.backend:Sm90Backend",
    install=install.command("kda-sm90"),
    variants="kda_sm90.variants:ahead_of_time",
    dtypes=frozenset({"bfloat16"}),
    head_dims=frozenset({(128, 128)}),
)
