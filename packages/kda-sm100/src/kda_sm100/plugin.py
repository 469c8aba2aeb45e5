"""The spec by which kda-core lists this backend. Importing the module needs neither a GPU nor the CuTe DSL."""

from kda_core import install
from kda_core.backend import BackendSpec

SPEC = BackendSpec(
    name="sm100",
    abi=(
        2,
        9,
    ),  # the ABI that this package was written for, which may differ from that of the installed kda-core
    archs=frozenset({(10, 0), (10, 3)}),
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
    target="kda_sm100.backend:Sm100Backend",
    install=install.command("kda-sm100"),
    variants="kda_sm100.variants:ahead_of_time",
    note="compiled for its GPUs and executed on ptx-emulator, on no GPU yet; "
    "`python -m kda_core conformance sm100` tests it on one",
    dtypes=frozenset({"bfloat16"}),
    head_dims=frozenset({(128, 128)}),
)
