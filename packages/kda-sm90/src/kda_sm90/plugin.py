"""What kda-core reads to list this backend. Literals only: importing it needs neither a GPU nor the CuTe DSL."""

from kda_core.backend import BackendSpec

SPEC = BackendSpec(
    name="sm90",
    abi=(1, 0),  # what this package was written for, not what kda-core happens to have
    archs=frozenset({(9, 0)}),
    features=frozenset(),
    target="kda_sm90.backend:Sm90Backend",
    install="pip install kda-core[sm90]",
    unavailable="this version of kda-sm90 has no kernel yet",
)
