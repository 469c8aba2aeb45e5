"""What kda-core reads to list the backend; literals only, so that listing backends stays cheap."""

from kda_core.backend import BackendSpec

SPEC = BackendSpec(
    name="tokenwise",
    abi=(2, 0),  # the ABI that this package was written for
    archs=frozenset({"cpu"}),
    # Left out because `TokenwiseBackend` does not serve them: intermediate_states, graph, pin, backward. A call that
    # needs one of them goes to another backend, or is refused where the user named this one.
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
    priority=-200,  # below `reference` (-100), which is faster: it runs when it is named
    # float64 is left out because the state is kept in fp32. Any K and V are served, so there are no `head_dims`.
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
)
