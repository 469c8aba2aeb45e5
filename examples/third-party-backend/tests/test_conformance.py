"""The conformance kit of kda-core on this backend: ``pytest -p kda_core.testing.plugin``."""

from kda_core.testing.conformance import BackendConformance


class TestTokenwise(BackendConformance):
    backend = "tokenwise"
