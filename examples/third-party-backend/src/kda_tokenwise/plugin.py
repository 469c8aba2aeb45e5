"""The spec that kda-core reads to list the backend. It has only literals, so that listing backends is cheap."""

from kda_core.backend import BackendSpec

SPEC = BackendSpec(
    name="tokenwise",
    abi=(2, 0),  # the ABI that this package was written for
    archs=frozenset({"cpu"}),
    # Not served: intermediate_states, graph, pin, backward. A call that needs one of them goes to another backend, or is
    # refused if the user named this one.
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
            "recurrent",
        }
    ),
    target="kda_tokenwise.backend:TokenwiseBackend",
    install="pip install ./examples/third-party-backend, from a checkout of the repository",
    priority=-200,  # below `reference` (-100), which is faster: this backend runs only when it is named
    # Not float64, because the state is in fp32. No `head_dims`, because any K and V are served.
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
)
