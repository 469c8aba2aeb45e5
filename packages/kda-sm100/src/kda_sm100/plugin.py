"""What kda-core reads to list this backend. Literals only: importing it needs neither a GPU nor the CuTe DSL."""

from kda_core.backend import BackendSpec

SPEC = BackendSpec(
    name="sm100",
    abi=(1, 0),  # what this package was written for, not what kda-core happens to have
    archs=frozenset({(10, 0), (10, 3)}),
    features=frozenset(),
    target="kda_sm100.backend:Sm100Backend",
    install="pip install kda-core[sm100]",
    unavailable="this version of kda-sm100 has no kernel yet",
)
